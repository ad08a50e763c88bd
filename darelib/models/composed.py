"""Models made of others, each as one input: a model with an adapter on top, and a stack of layers.

The former has the values that PEFT's merge_and_unload gives. Of the latter, what comes before the
layers is the first model's, what comes after them the last one's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import numpy as np

from darelib.arithmetic.stored import round_to
from darelib.config import LAYER, count_layers
from darelib.core.formats import FORMATS
from darelib.core.text import DareError, count_of, list_names
from darelib.models.checkpoint import (
    EMBEDDINGS,
    HEADS,
    QUANTISE_HINT,
    Checkpoint,
    compare_configs,
    ties_embeddings,
)
from darelib.models.directories import CONFIG_FILE
from darelib.models.lora import LoraAdapter
from darelib.models.source import Source
from darelib.models.tensor import Known, Tensor
from darelib.models.tensorfile import MAX_TENSORS, Stored

Array = Any

# Tensors outside the layers that come before them; all others come after.
BEFORE_LAYERS: Final = re.compile(r"emb(?!ed_out)|\bw[tp]e\b")
# What configurations call the depth of a model, and their lists that are not by layer.
COUNTS: Final = re.compile(r"(num|n)_(\w+_)?layers?")
NOT_BY_LAYER: Final = re.compile(r"architectures|\w*token_ids?")
# The lists of the indices of some layers.
INDEX_LISTS: Final = re.compile(
    "(mlp_only|moe|cross_attention|rope_scaling)_layers|attn_layer_indices|full_attn_idxs"
    "|local_layer_ids"
)
MAX_LAYERS: Final = 10_000  # no model has nearly as many
# What must be equal for one model's layers to fit another's.
FITTING: Final = re.compile(r"(text_config\.)?(model_type|hidden_size|n_embd|d_model)")


# --- a model with an adapter on top -------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Adapted(Tensor):
    """A tensor that an adapter changes. It is rounded once, to the model's type."""

    stored: Tensor  # the model's
    change: Tensor  # the adapter's: what is added, or what replaces it

    @property
    def stored_bytes(self) -> int:
        return self.change.stored_bytes + self.change.is_delta * self.stored.stored_bytes

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        values = self.change.read(start, count)
        if not self.change.is_delta and self.change.dtype == self.dtype:
            return values
        if self.change.is_delta:
            with np.errstate(all="ignore"):  # what is not finite is found by the merge
                values = values + self.stored.read(start, count)
        return round_to(values, self.dtype)


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

    def _adapt(self, name: str, change: Tensor) -> Tensor:
        stored = self._model.tensors[name]
        is_made = not isinstance(change, Stored)
        if stored.kind or (is_made and stored.dtype not in FORMATS):
            raise DareError(
                f"{name!r} of {self._model.name!r} is {stored.kind or stored.dtype}, on "
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
            return replace(change, folder=stored.folder)
        return Adapted(dtype, stored.shape, stored, change, folder=stored.folder)

    def _find_tied(self, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
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

    def check_unchanged(self) -> None:
        super().check_unchanged()
        self._adapter.check_unchanged()


# --- layers of several models -------------------------------------------------------------------


@dataclass(frozen=True)
class StackedModel:
    model: Checkpoint
    kind: str  # what is before the index of a layer in a name
    depth: int
    # Its tensors, by layer; those before the layers have the index -1, those after them the depth.
    layers: Mapping[int, dict[str, Tensor]]

    @classmethod
    def of(cls, model: Checkpoint) -> StackedModel:
        counts = count_layers(model.tensors)
        if len(counts) != 1:
            raise DareError(
                f"{model.name!r} has {count_of(len(counts), 'stack')} of layers",
                "layers can only be taken of a model that has one",
            )
        [(kind, depth)] = counts.items()
        layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, info in model.tensors.items():
            match = LAYER.match(name)
            outside = -1 if BEFORE_LAYERS.search(name) else depth
            layers[int(match[2]) if match else outside][name] = info
        return cls(model, kind, depth, layers)

    @cached_property
    def tables(self) -> list[dict[str, Any]]:
        return self.model.read_tables()

    def find_entry(self, key: str, layer: int) -> Any:
        """What its configuration says of one of its layers; of a list of indices, whether it has
        that of the layer.
        """
        for listed in (table.get(key) for table in self.tables):
            if isinstance(listed, list) and INDEX_LISTS.fullmatch(key):
                return layer in listed
            if isinstance(listed, list) and len(listed) == self.depth:
                return listed[layer]
        raise DareError(
            f"{CONFIG_FILE} of {self.model.name!r} does not say what {key} of its layers is",
            "save the model again with the version of transformers that saved the others",
        )


class Stack(Checkpoint):
    def __init__(self, source: Source, models: Sequence[Checkpoint]) -> None:
        self.source = source
        self.name = source.name
        self.folder = models[0].folder
        self.stems = models[0].stems
        self.paths = tuple(path for model in models for path in model.paths)
        self.files = []
        self.tensors = {}
        own: dict[Source, StackedModel] = {}
        for model in models:
            own[model.source] = StackedModel.of(model)
            self.files += model.files
        self._own = own
        self.held_bytes = max(model.held_bytes for model in models)
        self._home = home = own[source.slices[0].source]
        self.warnings = (*(words for model in models for words in model.warnings), *self._compare())
        last = own[source.slices[-1].source]
        after = last.layers[last.depth]
        if lacking := [name for name in home.layers[home.depth] if name not in after]:
            raise DareError(
                f"{last.model.name!r}, whose layers come last, has no {lacking[0]!r}",
                "let the last layers be those of a model that has it",
            )
        self._add(home.layers[-1], str)
        for place, (part, layer) in enumerate(self._order):
            self._add(part.layers[layer], partial(put_layer, place))
        self._add(after, str)

    @property
    def parts(self) -> list[Checkpoint]:
        return [part.model for part in self._own.values()]

    @property
    def fingerprint(self) -> dict[str, Any]:
        own = [part.fingerprint for part in self.parts]
        return {"layers": self.source.arrangement, "models": own}

    def check_unchanged(self) -> None:
        for model in self.parts:
            model.check_unchanged()

    @property
    def stored(self) -> list[Tensor]:
        return list(self.tensors.values())

    @cached_property
    def _order(self) -> list[tuple[StackedModel, int]]:
        """The layers, one after the other: whose they are, and their indices there."""
        slices = self.source.slices
        # Before any is listed: a range may be long, and be given often.
        total = sum(own.stop - own.start for own in slices)
        if not 0 < total <= MAX_LAYERS:
            raise DareError(
                f"{self.name!r} would have {'too many' if total else 'no'} layers",
                "give other ranges of layers",
            )
        order: list[tuple[StackedModel, int]] = []
        for own in slices:
            part = self._own[own.source]
            if own.stop > part.depth:
                raise DareError(
                    f"{part.model.name!r} has {count_of(part.depth, 'layer')}, so there is no "
                    f"layer {own.stop - 1}",
                    "layers are counted from 0, and the end of a range is left out",
                )
            order += [(part, layer) for layer in range(own.start, own.stop)]
        return order

    def _compare(self) -> Iterator[str]:
        """Refuse layers that do not fit one another, and tell of other differences."""
        home = self._home
        for part in self._own.values():
            differences = compare_configs(home.model.config, part.model.config)
            odd = [words for key, words in differences.items() if FITTING.fullmatch(key)]
            if part.kind != home.kind:
                odd = [f"its layers are called {part.kind!r}, not {home.kind!r}"]
            if odd:
                raise DareError(
                    f"layers of {part.model.name!r} do not fit {home.model.name!r}: {odd[0]}",
                    "stack layers of models of one kind and size",
                )
            words = [text for key, text in differences.items() if not COUNTS.search(key)]
            if words:
                yield (
                    f"{part.model.name} is configured differently from {home.model.name}, whose "
                    f"configuration the output has: {', '.join(words)}"
                )

    def _add(self, tensors: Mapping[str, Tensor], rename: Callable[[str], str]) -> None:
        self.tensors |= {rename(name): tensor.rename(rename) for name, tensor in tensors.items()}
        if len(self.tensors) > MAX_TENSORS:
            raise DareError(
                f"{self.name!r} would have more than {MAX_TENSORS:,} tensors",
                "give fewer layers",
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The first model's, without its depth."""
        config = self._home.model.config
        text = hide_counts(config.get("text_config", {}))
        return {**hide_counts(config), "text_config": text} if config else {}

    def list_changes(self, tables: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
        depth = self._home.depth
        changes: dict[str, tuple[Any, Any]] = {}
        for key, value in (entry for table in tables for entry in table.items()):
            has_indices = INDEX_LISTS.fullmatch(key)
            is_list = isinstance(value, list) and (has_indices or len(value) == depth)
            if COUNTS.fullmatch(key) and value == depth:
                changes[key] = value, len(self._order)
            elif is_list and not NOT_BY_LAYER.fullmatch(key):
                own = [part.find_entry(key, layer) for part, layer in self._order]
                named = [place for place, is_named in enumerate(own) if is_named]
                changes[key] = value, named if has_indices else own
        return changes


def hide_counts(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if not COUNTS.fullmatch(key)}


def put_layer(place: int, name: str) -> str:
    match = LAYER.match(name)
    return f"{match[1] or ''}{place}{name[match.end(2) :]}" if match else name
