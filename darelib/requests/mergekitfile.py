"""mergekit's configurations as they are written: the method, the models, the slices, the base."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from darelib.config import is_count
from darelib.core.families import FAMILIES
from darelib.core.methods import SLERP
from darelib.core.text import ConfigError, nearest
from darelib.models.lora import UNLOAD_HINT

KEYS: Final = (
    "merge_method",
    "base_model",
    "models",
    "slices",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "chat_template",
    "parameters",
)
# What mergekit can do and this tool cannot.
REFUSED: Final = {
    "modules": "all parts of a model are merged alike",
    "residual_weight": "layers are not scaled",
    "override_architecture": "the architecture is the base's",
    "tokens": "no token gets an embedding of its own",
    "pad_to_multiple_of": "vocabularies are not padded",
}
STACKED: Final = (
    "only the layers of the base, in their order and merged with the same ones of all models, "
    "can be sliced"
)
Table = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A model as mergekit names it: a path or a name on the Hub, perhaps with an adapter on top."""

    path: str
    lora: str = ""

    def __str__(self) -> str:
        return repr(f"{self.path}+{self.lora}" if self.lora else self.path)


@dataclass(frozen=True)
class Part:
    """A slice of the layers, or all of them: what is merged there, and its parameters."""

    models: dict[Reference, Table]  # with each one's own parameters
    parameters: Table = field(default_factory=dict)
    base: Reference | None = None
    layers: tuple[int, int] = (0, 0)


class MergekitFile:
    """One configuration."""

    def __init__(self, path: str, content: Any) -> None:
        self.path = path
        self.content = self.read_table(content, "", KEYS)
        if "merge_method" not in self.content:
            raise self.error("merge_method", "it is missing", f"one of {', '.join(FAMILIES)}")
        self.method = str(self.content["merge_method"])
        if self.method not in FAMILIES:
            hint = nearest(self.method, FAMILIES)
            raise self.error("merge_method", f"this tool has no {self.method!r}", hint)
        self.family = FAMILIES[self.method]
        self.each, self.shared, ignored = self.family.list_parameters()
        self.own = (*self.each, *ignored)  # what a model may have
        self.parameters = self.read_parameters(self.content, "", (*self.own, *self.shared))
        self.parts = self.read_parts()
        self.base = self.choose_base()
        self.models = self.choose_models()

    def error(self, where: str, what: str, hint: str) -> ConfigError:
        return ConfigError(": ".join(filter(None, (self.path, where, what))), hint)

    def read_table(self, value: Any, where: str, known: Collection[str]) -> Table:
        """A mapping, less what is null in it. A key that is none of these is an error."""
        if not isinstance(value, dict):
            raise self.error(
                where, f"it must be a mapping, not {str(value)[:60]!r}", f"with {', '.join(known)}"
            )
        given = {key: entry for key, entry in value.items() if entry is not None and entry != []}
        for key in value:
            if key in REFUSED and given.get(key, {}) != {}:
                raise self.error(
                    where,
                    f"{key} is not supported: {REFUSED[key]}",
                    "leave it out, or use mergekit",
                )
            if key not in known and key not in REFUSED:
                raise self.error(where, f"there is no key {str(key)!r}", nearest(str(key), known))
        return given

    def read_parameters(self, table: Table, where: str, known: Collection[str]) -> Table:
        where = f"{where}.parameters".removeprefix(".")
        return self.read_table(table.get("parameters", {}), where, known)

    def read_reference(self, value: Any, where: str) -> Reference:
        parts = self.split(value, "+", ("model", "lora"), where)
        return Reference(*(self.read_name(part, where) for part in parts))

    def read_name(self, value: Any, where: str) -> str:
        """A path, or a name on the Hub and its revision, as this tool writes it."""
        words = self.split(value, "@", ("path", "revision"), where)
        if not all(isinstance(word, str) and word for word in words):
            raise self.explain_name(value, where)
        if len(words) == 2 and os.path.exists(os.path.expanduser(words[0])):
            raise self.error(
                where,
                f"{words[0]!r} is on this machine and has no revisions",
                f"leave @{words[1]} out",
            )
        return "@".join(words)

    def split(self, value: Any, mark: str, keys: tuple[str, str], where: str) -> list[Any]:
        """What is one part of a name or two: a text with a mark in it, or a mapping."""
        if isinstance(value, dict):
            return list(({keys[0]: None} | self.read_table(value, where, keys)).values())
        parts = value.split(mark) if isinstance(value, str) else [value]
        if len(parts) > 2:
            raise self.explain_name(value, where)
        return parts

    def explain_name(self, value: Any, where: str) -> ConfigError:
        what = "it is missing" if value is None else f"{str(value)[:60]!r} does not name a model"
        return self.error(where, what, "like models/base, org/name@revision or models/base+adapter")

    def read_parts(self) -> list[Part]:
        if ("models" in self.content) == ("slices" in self.content):
            raise self.error(
                "models",
                "there must be either models or slices",
                "list the models that are to be merged",
            )
        if "models" in self.content:
            return [Part(self.read_models(self.content["models"], "models"))]
        slices = self.read_list(self.content["slices"], "slices")
        return [self.read_slice(entry, where) for where, entry in slices]

    def read_slice(self, value: Any, where: str) -> Part:
        table = self.read_table(value, where, ("sources", "base_model", "parameters"))
        models = self.read_models(table.get("sources"), f"{where}.sources", "layer_range")
        layers, *others = (source.get("layer_range") for source in table["sources"])
        if any(other != layers for other in others):
            raise self.error(
                where, f"its sources have different layers: {[layers, *others]}", STACKED
            )
        is_pair = isinstance(layers, list) and len(layers) == 2
        if not is_pair or not all(is_count(number, 0) for number in layers):
            raise self.error(
                where, f"layer_range must be two whole numbers, not {layers!r}", "like [0, 32]"
            )
        base = self.read_base(table, f"{where}.base_model")
        parameters = self.read_parameters(table, where, (*self.own, *self.shared))
        return Part(models, parameters, base, (layers[0], layers[1]))

    def read_list(self, value: Any, where: str) -> Iterator[tuple[str, Any]]:
        """The entries of a list, after what to call them."""
        if not isinstance(value, list):
            raise self.error(
                where, "it must be a list with at least one entry", "see mergekit's examples"
            )
        return ((f"{where}[{k}]", entry) for k, entry in enumerate(value))

    def read_models(self, value: Any, where: str, *known: str) -> dict[Reference, Table]:
        models: dict[Reference, Table] = {}
        for place, entry in self.read_list(value, where):
            table = self.read_table(entry, place, ("model", "parameters", *known))
            model = self.read_reference(table.get("model"), f"{place}.model")
            if model in models:
                raise self.error(place, f"{model} is there twice", "list each model once")
            models[model] = self.read_parameters(table, place, self.own)
        return models

    def read_base(self, table: Table, where: str) -> Reference | None:
        given = table.get("base_model")
        return None if given is None else self.read_reference(given, where)

    def choose_base(self) -> Reference:
        given = self.read_base(self.content, "base_model")
        base, *others = {part.base or given for part in self.parts}
        models = self.parts[0].models
        if others:
            raise self.error("slices", "they have different base models", STACKED)
        if base is None and not self.family.average:
            raise self.error(
                "base_model", "it is missing", "name the model that the others were made from"
            )
        if base is None:  # an average does not depend on it, but adapters can only be put on it
            first, *_ = sorted(models, key=lambda model: not model.lora)
            return Reference(first.path)
        if self.family.average and "models" in self.content:
            models.setdefault(base, {})
        if base.lora:
            raise self.error("base_model", "the base cannot have an adapter on top", UNLOAD_HINT)
        return base

    def choose_models(self) -> list[Reference]:
        """What is merged: of an average or an arc, the base is a part."""
        models = list(self.parts[0].models)
        if any({*part.models, self.base} != {*models, self.base} for part in self.parts):
            raise self.error("slices", "they merge different models", STACKED)
        for model in models:
            if model.lora and model.path != self.base.path:
                raise self.error(
                    "models",
                    f"{model}: adapters can only be put on the base, {self.base}",
                    UNLOAD_HINT,
                )
        if self.family.average:
            return models
        others = [model for model in models if model != self.base]
        is_arc = self.family.method == SLERP
        if not others or (is_arc and len(others) != 1):
            wanted = "one model" if is_arc else "models"
            what = f"{self.method} merges {wanted} besides the base, not {len(others)}"
            raise self.error(
                "models", what, "leave the others out" if others else "list what is to be merged"
            )
        return [self.base, *others] if is_arc else others

    def check_slices(self, layers: Mapping[str, int]) -> None:
        """Refuse slices that are not the base's own layers, of these kinds, in their order."""
        if len(layers) != 1:
            raise self.error(
                "slices", f"{self.base} has {len(layers)} stacks of layers", "use models: instead"
            )
        [count] = layers.values()
        starts = [part.layers[0] for part in self.parts]
        ends = [part.layers[1] for part in self.parts]
        bounds = [0, *ends]
        if starts != bounds[:-1] or bounds != sorted(set(bounds)) or ends[-1] != count:
            ranges = ", ".join(str(list(part.layers)) for part in self.parts)
            raise self.error(
                "slices", f"{ranges} are not the {count} layers of {self.base}", STACKED
            )
