"""A model with an adapter on top, as one input: it has the values that PEFT's merge_and_unload
gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.text import DareError, count_of, list_names
from darelib.kernels import Kernel, KernelSpec, fallback
from darelib.kernels.plain import encode
from darelib.models.checkpoint import EMBEDDINGS, HEADS, QUANTISE_HINT, Checkpoint, ties_embeddings
from darelib.models.lora import LoraAdapter, LowRankTensor
from darelib.models.rows import choose_real, read_values
from darelib.models.source import Source
from darelib.models.tensors import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedTensor(TensorInfo):
    """A tensor that the adapter changes. It is rounded once, to the model's type."""

    stored: TensorInfo  # the model's
    change: TensorInfo  # the adapter's: what is added, or what replaces it

    @property
    def stored_bytes(self) -> int:
        return self.change.stored_bytes + self.change.is_delta * self.stored.stored_bytes


def check_adapter(adapter: Checkpoint, model: Checkpoint) -> LoraAdapter:
    if not isinstance(adapter, LoraAdapter):
        raise DareError(
            f"{adapter.name!r} is not an adapter that could be put on {model.name!r}",
            "write MODEL+ADAPTER; models are merged if each is given by itself",
        )
    return adapter


class AdaptedModel(Checkpoint):
    """A model and an adapter, both open for reading, as one model. All that is not a tensor is the
    model's.
    """

    def __init__(self, source: Source, model: Checkpoint, adapter: Checkpoint) -> None:
        adapter = check_adapter(adapter, model)
        self.source = source
        self.name = source.name
        self.folder = model.folder
        self.stems = model.stems
        self.paths = (*model.paths, *adapter.paths)
        self.files = [*model.files, *adapter.files]
        self._model = model
        self._adapter = adapter
        changed = {name: self._adapt(name, info) for name, info in adapter.tensors.items()}
        tied = self._find_tied(changed) if ties_embeddings(self.config) else {}
        self.tensors = model.tensors | tied | changed
        self.specs = adapter.specs
        self.held_bytes = adapter.held_bytes
        self.note = f"with {adapter.note}"
        self.base_config = adapter.base_config
        self.warnings = (*model.warnings, *adapter.warnings)
        if adapter.unused:
            count = count_of(len(adapter.unused), "tensor")
            self.warnings += (
                f"{adapter.name} has {count} that {model.name} lacks: "
                f"{list_names(adapter.unused)}; ignored",
            )
        # Until there are faster ones: some values are read before a merge begins.
        self.prepare(fallback.load_kernels(self.specs, Interrupts()), 1)

    def _adapt(self, name: str, change: TensorInfo) -> AdaptedTensor:
        stored = self._model.tensors[name]
        is_product = change.is_delta or isinstance(change, LowRankTensor)
        if stored.encoding.kind or (is_product and stored.dtype not in FORMATS):
            raise DareError(
                f"{name!r} of {self._model.name!r} is {stored.encoding.kind or stored.dtype}, on "
                "which no adapter can be put",
                QUANTISE_HINT,
            )
        if change.shape != stored.shape:
            raise DareError(
                f"{name!r} is {list(stored.shape)} in {self._model.name!r}, and "
                f"{list(change.shape)} in the adapter {self._adapter.name!r}",
                "give the model that it was trained on",
            )
        are_floats = {stored.dtype, change.dtype} <= FORMATS.keys()
        return AdaptedTensor(
            dtype=stored.dtype if are_floats else change.dtype,
            shape=stored.shape,
            folder=stored.folder,
            stored=stored,
            change=change,
        )

    def _find_tied(self, changed: Mapping[str, AdaptedTensor]) -> dict[str, AdaptedTensor]:
        """The heads that are stored beside an embedding that is changed, as that embedding."""
        stored = self._model.tensors
        embeddings = [info for name, info in changed.items() if name.endswith(EMBEDDINGS)]
        heads = [name for name in stored if name.endswith(HEADS)]
        return {name: e for name in heads for e in embeddings if e.shape == stored[name].shape}

    @cached_property
    def _digests(self) -> dict[str, Any]:
        """The model's, and the adapter's by other names. The size is that of both, so that neither
        is taken for the model alone.
        """
        adapter = {f"adapter_{key}": value for key, value in self._adapter.fingerprint.items()}
        return self._model.fingerprint | adapter | {"size": self.size}

    def prepare(self, kernels: Mapping[KernelSpec, Kernel], inputs: int) -> None:
        self._adapter.prepare(kernels, inputs)

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Of what the adapter changes, the bytes that it would have if it were stored."""
        if not isinstance(info, AdaptedTensor):
            self._model.read_bytes(view, info, start)
        elif not info.change.is_delta and info.change.dtype == info.dtype:
            info.change.encoding.read_stored(self._adapter, info.change, start, view)
        else:
            item = FORMATS[info.dtype].itemsize
            where = start // item, len(view) // item
            real = choose_real(info, info.change)
            values = read_values(self._adapter, info.change, *where, real)
            with np.errstate(all="ignore"):  # what is not finite is found by the merge
                if info.change.is_delta:
                    values += read_values(self, info.stored, *where, real)
            values[np.isnan(values)] = np.nan  # which no rounding makes a number
            view[:] = encode(values, info.dtype).view(np.uint8).data

    def check_unchanged(self) -> None:
        super().check_unchanged()
        self._adapter.check_unchanged()
