"""A model with an adapter on top, as one input: it has the values that PEFT's merge_and_unload
gives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS
from darelib.core.text import DareError, count_of, list_names
from darelib.kernels import Kernel, KernelSpec
from darelib.kernels.plain import encode
from darelib.models.checkpoint import EMBEDDINGS, HEADS, QUANTISE_HINT, Checkpoint, ties_embeddings
from darelib.models.encodings import PLAIN, Derived, Input, TensorInfo
from darelib.models.lora import LoraAdapter
from darelib.models.rows import choose_real, read_values
from darelib.models.source import Source


@dataclass(frozen=True, eq=False)
class Adapted(Derived):
    """A tensor that an adapter changes. It is rounded once, to the model's type."""

    stored: TensorInfo  # the model's
    change: TensorInfo  # the adapter's: what is added, or what replaces it
    model: Checkpoint = field(repr=False)
    adapter: Checkpoint = field(repr=False)

    def stored_bytes(self, info: TensorInfo) -> int:
        return self.change.stored_bytes + self.change.is_delta * self.stored.stored_bytes

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        if not self.change.is_delta and self.change.dtype == info.dtype:
            self.adapter.read(self.change, start, count, into)
            return
        real = choose_real(info, self.change)
        values = read_values(self.adapter, self.change, start, count, real)
        with np.errstate(all="ignore"):  # what is not finite is found by the merge
            if self.change.is_delta:
                values += read_values(self.model, self.stored, start, count, real)
        values[np.isnan(values)] = np.nan  # which no rounding makes a number
        into[:] = encode(values, info.dtype).view(np.uint8)


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

    def _adapt(self, name: str, change: TensorInfo) -> TensorInfo:
        stored = self._model.tensors[name]
        is_made = change.encoding is not PLAIN
        if stored.encoding.kind or (is_made and stored.dtype not in FORMATS):
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
        dtype = stored.dtype if are_floats else change.dtype
        if change.dtype == dtype and not is_made:
            file = change.file + len(self._model.files)
            return replace(change, file=file, folder=stored.folder)
        encoding = Adapted(stored, change, self._model, self._adapter)
        return TensorInfo(dtype, stored.shape, encoding=encoding, folder=stored.folder)

    def _find_tied(self, changed: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
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

    def check_unchanged(self) -> None:
        super().check_unchanged()
        self._adapter.check_unchanged()
