"""mergekit's configurations: what such a YAML file asks for, in our settings.

mergekit looks up each parameter by itself: the value of the first filter that the tensor's name contains. Of our rules
the first that matches is taken whole. So where a file has filters or slices, the base's names decide: those that get
the same settings become one rule.
"""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

from darelib.config import Rule, as_toml, check_setting, is_count
from darelib.core.drops import DROPS, L1, NONE, complement
from darelib.core.families import FAMILIES
from darelib.core.formats import DTYPES
from darelib.core.gradients import LAYER, Gradient, count_layers, freeze, value_at
from darelib.core.methods import METHODS, SLERP
from darelib.core.text import LOG, ConfigError, nearest
from darelib.models.inputs import open_models
from darelib.models.lora import UNLOAD_HINT
from darelib.models.source import AUTO, BASE, UNION, Source, is_template
from darelib.requests.request import Request
from darelib.requests.yamlfile import load_yaml

# Of the parameters that need not be given; normalize and rescale are the family's.
DEFAULTS: Final = {"density": 1.0, "gamma": 0.01, "epsilon": 0.15, "lambda": 1.0}
FLAGS: Final = ("normalize", "rescale", "int8_mask")
YES, NO = ("true", "yes", "on", "1", "1.0"), ("false", "no", "off", "0", "0.0")
KEYS: Final = (
    "merge_method", "base_model", "models", "slices", "dtype", "out_dtype", "tokenizer_source", "tokenizer",
    "chat_template", "parameters",
)  # fmt: skip
# What mergekit can do and this tool cannot.
REFUSED: Final = {
    "modules": "all parts of a model are merged alike",
    "residual_weight": "layers are not scaled",
    "override_architecture": "the architecture is the base's",
    "tokens": "no token gets an embedding of its own",
    "pad_to_multiple_of": "vocabularies are not padded",
}
STACKED: Final = "only the layers of the base, in their order and merged with the same ones of all models, can be sliced"
# Tensors outside the layers that mergekit takes for part of the first slice; the others are part of the last.
BEFORE_LAYERS: Final = re.compile(r"emb(?!ed_out)|\bw[tp]e\b")

NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a part of a name

Value = float | bool | Gradient
Entries = list[tuple[str, Value]]  # by filter; the last filter is empty, which every name contains
Settings = dict[str, Any]
Key = tuple[str, int]  # a parameter and the number of the model that it is for; -1: for all


@dataclass(frozen=True)
class Reference:
    """A model as mergekit names it: a path, or a name on the Hub with its revision; perhaps with an adapter on top."""

    path: str
    lora: str = ""

    def __str__(self) -> str:
        return repr(f"{self.path}+{self.lora}" if self.lora else self.path)


@dataclass(frozen=True)
class Part:
    """A slice of the layers, or all of them: what is merged there, and its parameters."""

    models: dict[Reference, Settings]  # with each one's own parameters
    parameters: Settings
    base: Reference | None
    layers: tuple[int, int] = (0, 0)


def parse_yaml(text: str, path: str, folder: Path) -> Request:
    """A mergekit configuration from its text. As there, paths in it are relative to the working directory."""
    return _File(path, load_yaml(text, path)).request()


class _File:
    """Reads one configuration."""

    def __init__(self, path: str, content: Any) -> None:
        self.path = path
        self.file = self.table(content, "", KEYS)
        if "merge_method" not in self.file:
            raise self.error("merge_method", "it is missing", f"one of {', '.join(FAMILIES)}")
        self.name = str(self.file["merge_method"])
        if self.name not in FAMILIES:
            raise self.error(
                "merge_method", f"this tool has no {self.name!r}", nearest(self.name, FAMILIES)
            )
        self.family = FAMILIES[self.name]
        self.each, self.shared, self.ignored = self.family.list_parameters()
        self.parameters = self.list_parameters(self.file, "")
        self.parts = list(self.read_parts())
        self.base = self.choose_base()
        self.models = self.choose_models()

    def request(self) -> Request:
        dare, rules = self.settings()
        key = "out_dtype" if "out_dtype" in self.file else "dtype"
        if (dtype := self.file.get(key)) is not None:
            dare["dtype"] = str(dtype).removeprefix("torch.")
            if dare["dtype"] not in DTYPES:
                raise self.error(
                    key, f"tensors cannot be stored as {dtype!r}", nearest(str(dtype), DTYPES)
                )
        return Request(
            dare=dare,
            base=Source.of(self.base.path),
            merge=tuple(map(self.source, self.models)),
            tokenizer=self.tokenizer(),
            chat_template=self.chat_template(),
            rules=rules,
            notes=self.notes(dare),
        )

    def error(self, where: str, what: str, hint: str) -> ConfigError:
        return ConfigError(": ".join(filter(None, (self.path, where, what))), hint)

    def table(self, value: Any, where: str, known: Collection[str]) -> Settings:
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

    def list_parameters(self, table: Settings, where: str, own: bool = False) -> Settings:
        known = (*self.each, *self.ignored, *(() if own else self.shared))
        return self.table(
            table.get("parameters", {}), f"{where}.parameters".removeprefix("."), known
        )

    # --- models and slices

    def reference(self, value: Any, where: str) -> Reference:
        if isinstance(value, str) and value.count("+") < 2:
            return Reference(*(self.place(part, where) for part in value.split("+")))
        if not isinstance(value, dict):
            raise self.name_error(value, where)
        table: Settings = {"model": None} | self.table(value, where, ("model", "lora"))
        return Reference(
            *(self.place(table[key], where) for key in sorted(table, reverse=True))
        )  # model, lora

    def name_error(self, value: Any, where: str) -> ConfigError:
        what = "it is missing" if value is None else f"{str(value)[:60]!r} does not name a model"
        return self.error(where, what, "like models/base, org/name@revision or models/base+adapter")

    def place(self, value: Any, where: str) -> str:
        """A path, or a name on the Hub and its revision, as this tool writes it."""
        if isinstance(value, dict):
            table = {"path": ""} | self.table(value, where, ("path", "revision"))
            words = [table[key] for key in sorted(table)]  # path, revision
        else:
            words = value.split("@") if isinstance(value, str) else [value]
        if len(words) > 2 or not all(isinstance(word, str) and word for word in words):
            raise self.name_error(value, where)
        if len(words) == 2 and os.path.exists(os.path.expanduser(words[0])):
            raise self.error(
                where,
                f"{words[0]!r} is on this machine and has no revisions",
                f"leave @{words[1]} out",
            )
        return "@".join(words)

    def read_parts(self) -> Iterator[Part]:
        if ("models" in self.file) == ("slices" in self.file):
            raise self.error(
                "models",
                "there must be either models or slices",
                "list the models that are to be merged",
            )
        if "models" in self.file:
            yield Part(self.list_models(self.file["models"], "models"), {}, None)
            return
        for where, entry in self.items(self.file["slices"], "slices"):
            table = self.table(entry, where, ("sources", "base_model", "parameters"))
            models = self.list_models(table.get("sources"), f"{where}.sources", "layer_range")
            ranges = [source.get("layer_range") for source in table["sources"]]
            if any(given != ranges[0] for given in ranges):
                raise self.error(where, f"its sources have different layers: {ranges}", STACKED)
            if (
                not isinstance(ranges[0], list)
                or len(ranges[0]) != 2
                or not all(is_count(n, 0) for n in ranges[0])
            ):
                raise self.error(
                    where,
                    f"layer_range must be two whole numbers, not {ranges[0]!r}",
                    "like [0, 32]",
                )
            base = (
                self.reference(table["base_model"], f"{where}.base_model")
                if "base_model" in table
                else None
            )
            yield Part(
                models, self.list_parameters(table, where), base, (ranges[0][0], ranges[0][1])
            )

    def items(self, value: Any, where: str) -> Iterator[tuple[str, Any]]:
        """The entries of a list, and what to call them."""
        if not isinstance(value, list):
            raise self.error(
                where, "it must be a list with at least one entry", "see mergekit's examples"
            )
        return ((f"{where}[{k}]", entry) for k, entry in enumerate(value))

    def list_models(self, value: Any, where: str, *known: str) -> dict[Reference, Settings]:
        models: dict[Reference, Settings] = {}
        for place, entry in self.items(value, where):
            table = self.table(entry, place, ("model", "parameters", *known))
            model = self.reference(table.get("model"), f"{place}.model")
            if model in models:
                raise self.error(place, f"{model} is there twice", "list each model once")
            models[model] = self.list_parameters(table, place, own=True)
        return models

    def choose_base(self) -> Reference:
        given = (
            self.reference(self.file["base_model"], "base_model")
            if "base_model" in self.file
            else None
        )
        base, *others = dict.fromkeys(part.base or given for part in self.parts)
        if others:
            raise self.error("slices", "they have different base models", STACKED)
        if base is None and not self.family.average:
            raise self.error(
                "base_model", "it is missing", "name the model that the others were made from"
            )
        models = self.parts[0].models
        if base is None:  # an average does not depend on it, but adapters can only be put on it
            return Reference(
                next((model.path for model in models if model.lora), next(iter(models)).path)
            )
        if self.family.average and "models" in self.file:
            models.setdefault(base, {})
        if base.lora:
            raise self.error("base_model", "the base cannot have an adapter on top", UNLOAD_HINT)
        return base

    def choose_models(self) -> list[Reference]:
        """What is merged: of an average or an arc, the base is a part."""
        if any(
            set(part.models) | {self.base} != set(self.parts[0].models) | {self.base}
            for part in self.parts
        ):
            raise self.error("slices", "they merge different models", STACKED)
        models = list(self.parts[0].models)
        if self.family.average:
            return models
        others = [model for model in models if model != self.base]
        if not others or (self.family.method == SLERP and len(others) != 1):
            wanted = "one model" if self.family.method == SLERP else "models"
            hint = "leave the others out" if others else "list what is to be merged"
            raise self.error(
                "models", f"{self.name} merges {wanted} besides the base, not {len(others)}", hint
            )
        return [self.base, *others] if self.family.method == SLERP else others

    def source(self, model: Reference) -> Source:
        if model.lora and model.path != self.base.path:
            raise self.error(
                "models", f"{model}: adapters can only be put on the base, {self.base}", UNLOAD_HINT
            )
        return Source.of(model.lora or model.path)

    def check_slices(self, layers: Mapping[str, int]) -> None:
        """Refuse slices that are not the model's own layers in their order."""
        if len(layers) != 1:
            raise self.error(
                "slices", f"{self.base} has {len(layers)} stacks of layers", "use models: instead"
            )
        [count] = layers.values()
        ends = [0, *(part.layers[1] for part in self.parts)]
        if (
            ends[:-1] != [part.layers[0] for part in self.parts]
            or ends != sorted(set(ends))
            or ends[-1] != count
        ):
            ranges = ", ".join(str(list(part.layers)) for part in self.parts)
            raise self.error(
                "slices", f"{ranges} are not the {count} layers of {self.base}", STACKED
            )

    # --- parameters

    def parse_value(self, name: str, value: Any) -> Value:
        """A number, a gradient of numbers, or a flag. Numbers may be words: YAML takes 1e-3 for one."""
        if name in FLAGS and (word := str(value).lower()) in (*YES, *NO):
            return word in YES
        given, numbers = value if isinstance(value, list) else [value], list[float]()
        with suppress(ValueError, TypeError, OverflowError):
            numbers = [math.nan if isinstance(number, bool) else float(number) for number in given]
        if not numbers or not all(map(math.isfinite, numbers)) or name in FLAGS:
            wanted = "true or false" if name in FLAGS else "a number, or a list of numbers"
            raise self.error(
                name, f"it must be {wanted}, not {str(value)[:60]!r}", "or such values with filters"
            )
        if name == "density" and not all(0 < number <= 1 for number in numbers):
            raise self.error(
                name,
                f"it must be above 0 and at most 1, not {value!r}",
                "weight 0 leaves a model out",
            )
        return Gradient(tuple(numbers)) if len(numbers) > 1 else numbers[0]

    def parse_entries(self, name: str, value: Any) -> Entries:
        """A parameter by filter."""
        by_filter = isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(v, dict) for v in value)
        )
        if not by_filter:
            return [("", self.parse_value(name, value))]
        entries: Entries = []
        for entry in value if isinstance(value, list) else [value]:
            table = self.table(entry, name, ("filter", "value"))
            word = table.get("filter", "")
            if not isinstance(word, str):
                raise self.error(name, f"a filter must be a word, not {word!r}", "put it in quotes")
            entries.append(
                ("" if word == "*" else word, self.parse_value(name, table.get("value")))
            )
        return entries

    def look_up(self, name: str, *levels: Settings) -> Entries:
        """A parameter by filter: the nearest level first, the default last."""
        entries = [
            entry
            for level in levels
            if name in level
            for entry in self.parse_entries(name, level[name])
        ]
        default = DEFAULTS.get(name, getattr(self.family, name, None))
        entries += [] if default is None else [("", default)]
        end = next((k for k, (word, _) in enumerate(entries, 1) if not word), len(entries))
        return entries[:end]

    def look_up_all(self, part: Part) -> dict[Key, Entries]:
        levels = (part.parameters, self.parameters)
        found: dict[Key, Entries] = {
            (name, -1): self.look_up(name, *levels) for name in self.shared
        }
        for i, model in enumerate(self.models):
            found |= {
                (name, i): self.look_up(name, part.models.get(model, {}), *levels)
                for name in self.each
            }
        return found

    def settings(self) -> tuple[Settings, tuple[Rule, ...]]:
        """[dare], which is what most tensors get, and the rules for the others."""
        lists = [self.look_up_all(part) for part in self.parts]
        names = [""]  # of any tensor
        if "slices" in self.file or any(
            word for entries in lists[0].values() for word, _ in entries
        ):
            with open_models([Source.of(self.base.path)]) as [base]:
                names = list(base.tensors)
            words = dict.fromkeys(
                word for found in lists for entries in found.values() for word, _ in entries
            )
            for word in words:
                if not any(word in name for name in names):
                    LOG.warning(
                        f"{self.path}: filter {word!r} is part of no tensor's name, so it does nothing"
                    )
        if "slices" in self.file:
            self.check_slices(count_layers(names))
        made, groups = dict[str, Settings](), dict[str, str]()  # by the settings in words
        for name in names:
            part, depth = self.locate(name)
            values = {key: self.choose(key, entries, name) for key, entries in lists[part].items()}
            settings = self.translate(
                values if depth is None else {k: value_at(v, depth) for k, v in values.items()}
            )
            groups[name] = repr(settings)
            made[groups[name]] = settings
        [(usual, _)] = Counter(groups.values()).most_common(1)
        dare, rules = made.pop(usual), []
        for group, patterns in find_patterns(groups, usual).items():
            own = {key: value for key, value in made[group].items() if value != dare[key]}
            rules.append(Rule.of({"match": patterns, **own}, self.path))
        for key, value in dare.items():
            check_setting(key, value, f"{self.path}: {key}")
        return {key: as_toml(freeze(value)) for key, value in dare.items()}, tuple(rules)

    def locate(self, name: str) -> tuple[int, float | None]:
        """The part that a tensor is in, and how deep; None: the depth is that in the whole model, so gradients stay."""
        if len(self.parts) == 1:
            return 0, None
        if not (found := LAYER.match(name)):
            return (0 if BEFORE_LAYERS.search(name) else len(self.parts) - 1), 0.0
        layer = int(found[2])
        part = next(k for k, part in enumerate(self.parts) if layer < part.layers[1])
        start, stop = self.parts[part].layers
        return part, (layer - start) / (stop - start - 1) if stop - start > 1 else 1.0

    def choose(self, key: Key, entries: Entries, name: str) -> Value:
        for word, value in entries:
            if word in name:
                return value
        what = f"there is none for {name!r}" if name and entries else "it is missing"
        of = f" of {self.models[key[1]]}" if key[1] >= 0 else ""
        raise self.error(key[0] + of, what, f"{self.name} needs one for every tensor")

    def translate(self, values: Mapping[Key, Value]) -> Settings:
        """mergekit's parameters of a tensor as our settings."""

        def each(name: str) -> list[Any]:
            return [values[name, i] for i in range(len(self.models))]

        made: Settings = {"method": self.family.method, "drop_rate": 0.0}
        if self.family.method == SLERP:
            return made | {"slerp_t": values["t", -1]}
        made |= {"weights": each("weight"), "normalize": values["normalize", -1]}
        if self.family.average:
            total = (
                math.nan
                if any(isinstance(w, Gradient) for w in each("weight"))
                else math.fsum(each("weight"))
            )
            if not made["normalize"] and not abs(total - 1) < 1e-9:
                raise self.error(
                    "normalize", "the weights of an average must add up to 1", "set it to true"
                )
            return made | {"normalize": True}
        made["lambda_coeff"] = values["lambda", -1]
        if self.family.drop:
            made |= {"drop": self.family.drop, "rescale": L1 if values["rescale", -1] else NONE}
            made["drop_rate"] = one_or_each([drop_rate_of(density) for density in each("density")])
            made |= {name: one_or_each(each(name)) for name in DROPS[self.family.drop].settings}
        return made

    def notes(self, dare: Settings) -> dict[str, str]:
        """Why settings are written that have other defaults here."""
        made = {"drop_rate": f"{self.name} drops nothing"} if not self.family.drop else {}
        if dare.get("normalize", self.family.normalize) != METHODS[self.family.method].normalize:
            made["normalize"] = (
                f"mergekit's default for {self.name} is {str(self.family.normalize).lower()}"
            )
        if dare.get("rescale") == L1:
            made["rescale"] = (
                'what mergekit calls rescale; the papers do what is "expectation" here'
            )
        return made

    # --- tokenizer and chat template

    def tokenizer(self) -> Source | None:
        given = self.file.get("tokenizer_source")
        if "tokenizer" in self.file:
            if given is not None:
                raise self.error(
                    "tokenizer", "there is a tokenizer_source too", "leave one of the two out"
                )
            given = self.table(self.file["tokenizer"], "tokenizer", ("source",)).get(
                "source", UNION
            )
        if given in (None, BASE, UNION):
            return Source.of(given) if given else None
        path = self.reference(given, "tokenizer").path
        return Source.of(BASE if path == self.base.path else path)

    def chat_template(self) -> Source | None:
        given = self.file.get("chat_template", "")
        if not isinstance(given, str) or not (given in ("", AUTO) or is_template(given)):
            reason = f"{str(given)[:60]!r} is neither auto nor the text of a template"
            raise self.error("chat_template", reason, "of mergekit's own templates, give the text")
        return Source.of(given) if given else None


def drop_rate_of(density: Value) -> Value:
    return (
        Gradient(tuple(map(complement, density.numbers)))
        if isinstance(density, Gradient)
        else complement(density)
    )


def one_or_each(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def find_patterns(groups: Mapping[str, str], usual: str) -> dict[str, list[str]]:
    """For each group but the usual one, glob patterns for the names in it, and for no others.

    With * for the numbers in a name where that is possible; else for all but the layer's; else the name itself.
    """
    inside: dict[str, set[str]] = {}
    for name, group in groups.items():
        inside.setdefault(hide_numbers(name, 1), set()).add(group)

    @cache
    def fits(pattern: str, group: str) -> bool:
        return all(
            found == {group} for shape, found in inside.items() if fnmatchcase(shape, pattern)
        )

    patterns: dict[str, dict[str, None]] = {}
    for name, group in groups.items():
        if group != usual:
            exact = glob.escape(name)
            shapes = (hide_numbers(exact, kept) for kept in (0, 1))
            patterns.setdefault(group, {})[
                next((shape for shape in shapes if fits(shape, group)), exact)
            ] = None
    return {group: list(found) for group, found in patterns.items()}


def hide_numbers(name: str, kept: int) -> str:
    """A name with * for the parts of it that are numbers, but for the first so many."""
    number = itertools.count()
    return NUMBER.sub(lambda found: "*" if next(number) >= kept else found[0], name)
