"""mergekit's configurations as requests: their parameters become settings and rules.

mergekit looks up each parameter on its own: the first filter in the tensor's name gives the value.
Here the first matching rule gives all settings. So filters and slices are applied to the names of
the base's tensors, and names with the same settings become one rule.
"""

import glob
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

from darelib.config import (
    LAYER,
    Gradient,
    Rule,
    as_toml,
    check_setting,
    count_layers,
    depth_of,
    freeze,
    value_at,
)
from darelib.core.drops import L1, NONE, complement
from darelib.core.formats import DTYPES
from darelib.core.text import LOG, nearest
from darelib.methods import METHODS
from darelib.methods.looks import ZERO
from darelib.models.composed import BEFORE_LAYERS, put_layer
from darelib.models.directories import INDEX_FILE, WEIGHTS_FILE
from darelib.models.inputs import open_models
from darelib.models.source import (
    AUTO,
    BASE,
    UNION,
    Slice,
    Source,
    is_missing,
    is_on_hub,
    is_template,
)
from darelib.models.vocabulary import TEMPLATES, TOKENIZER_FILE
from darelib.requests.mergekitfile import (
    LayerSlice,
    MergekitFile,
    Reference,
    YamlTable,
    read_documents,
)
from darelib.requests.request import Request, SeveralDocuments

FLAGS: Final = (
    *("normalize", "normalize_weights", "rescale", "int8_mask"),
    *("filter_wise", "nuslerp_flatten", "nuslerp_row_wise"),
)
KEPT: Final = ("density", "select_topk")  # shares: a 0 becomes a 0 of another setting
YES = ("true", "yes", "on", "1", "1.0")
NO = ("false", "no", "off", "0", "0.0")
NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a part of a name

Value = float | bool | Gradient
Entries = list[tuple[str, Value]]  # by filter; the last filter is empty, which every name contains
Key = tuple[str, int]  # a parameter and the number of the model that it is for; -1: for all


def parse_yaml(text: str, path: str, folder: Path, lenient: bool = False) -> Request:
    """A mergekit configuration from its text; as there, paths are from the working directory."""
    files = read_documents(text, path, lenient)
    if len(files) > 1:
        for file in files:
            # Wrong parameters are refused now, not after the merges before.
            Parameters(file, find_source(file, file.base))
        raise SeveralDocuments(path, files)
    return make_request(files[0])


def make_request(file: MergekitFile) -> Request:
    base, *models = list_sources(file)
    dare, rules = Parameters(file, base).as_settings()
    # Different layers differ as much as models that are not fine-tunes of one another.
    if any(len({*part.ranges.values()}) > 1 for part in file.parts):
        dare["any_base"] = True
    return Request(
        dare=dare | read_dtype(file) | read_padding(file),
        base=base,
        merge=tuple(models),
        tokenizer=read_tokenizer(file),
        chat_template=read_chat_template(file),
        rules=rules,
    )


class Parameters:
    """The parameters of a file, as settings and rules."""

    def __init__(self, file: MergekitFile, base: Source) -> None:
        self.file = file
        self.base = base
        self.tables = [self.look_up_all(part) for part in file.parts]
        self.layers: dict[str, int] = {}  # those of the base, where each tensor is looked at

    def look_up_all(self, part: LayerSlice) -> dict[Key, Entries]:
        family = self.file.family
        levels = (part.parameters, self.file.parameters)
        table = {(name, -1): self.look_up(name, levels) for name in (*family.shared, *family.only)}
        for i in range(len(self.file.models)):
            own: tuple[YamlTable, ...] = ({"weight": 0},)  # the base stands in for a model
            if i + 1 < len(part.columns):
                own = (part.models.get(part.choose(i + 1), {}), *levels)
            table |= {(name, i): self.look_up(name, own) for name in family.each}
        return table

    def look_up(self, name: str, levels: Sequence[YamlTable]) -> Entries:
        """A parameter by filter: the nearest level first, the default last."""
        values = [*(level.get(name) for level in levels), self.file.family.defaults.get(name)]
        parsed = [self.parse_entries(name, value) for value in values if value is not None]
        entries = list(itertools.chain.from_iterable(parsed))
        end = next((k for k, (word, _) in enumerate(entries, 1) if not word), len(entries))
        return entries[:end]

    def parse_entries(self, name: str, value: Any) -> Entries:
        values = value if isinstance(value, list) else [value]
        if not any(isinstance(entry, dict) for entry in values):
            return [("", self.parse_value(name, value))]
        entries: Entries = []
        for entry in values:
            table = self.file.read_table(entry, name, ("filter", "value"))
            word = table.get("filter", "")
            self.file.check(
                isinstance(word, str),
                name,
                f"a filter must be a word, not {word!r}",
                "put it in quotes",
            )
            entries.append(
                ("" if word == "*" else word, self.parse_value(name, table.get("value")))
            )
        return entries

    def parse_value(self, name: str, value: Any) -> Value:
        """A number, a gradient of numbers, or a flag.

        Numbers may be words: YAML reads 1e-3 as one.
        """
        word = str(value).lower()
        if name in FLAGS and word in (*YES, *NO):
            return word in YES
        numbers: list[float] = []
        with suppress(ValueError, TypeError, OverflowError):
            given = value if isinstance(value, list) else [value]
            numbers = [math.nan if isinstance(number, bool) else float(number) for number in given]
        wanted = "true or false" if name in FLAGS else "a number, or a list of numbers"
        self.file.check(
            numbers and all(map(math.isfinite, numbers)) and name not in FLAGS,
            name,
            f"it must be {wanted}, not {str(value)[:60]!r}",
            "or such values with filters",
        )
        self.file.check(
            name != "density" or all(0 <= number <= 1 for number in numbers),
            name,
            f"it must be from 0 to 1, not {value!r}",
            "it is the share of a model's changes that is kept",
        )
        return Gradient(tuple(numbers)) if len(numbers) > 1 else numbers[0]

    def as_settings(self) -> tuple[YamlTable, tuple[Rule, ...]]:
        """[dare] with the settings of most tensors, and rules for the others."""
        settings = {name: translate(self.file, self.choose_all(name)) for name in self.list_names()}
        self.file.check(
            any(any(own.get("weights", [1])) for own in settings.values()),
            "models",
            "each has weight 0 or density 0, so nothing would be merged",
            "give one of them a weight and a density above 0",
        )
        groups = {name: repr(own) for name, own in settings.items()}
        by_group = {groups[name]: own for name, own in settings.items()}
        [(usual, _)] = Counter(groups.values()).most_common(1)
        dare = by_group[usual]
        rules = []
        for group, patterns in find_patterns(groups, usual).items():
            own = {key: value for key, value in by_group[group].items() if value != dare[key]}
            rules.append(Rule.of({"match": patterns, **own}, self.file.path))
        for key, value in dare.items():
            check_setting(key, value, f"{self.file.path}: {key}")
        return {key: as_toml(freeze(value)) for key, value in dare.items()}, tuple(rules)

    def list_names(self) -> list[str]:
        """The names of the base's tensors if they matter, else one that stands for all."""
        parameters = itertools.chain.from_iterable(table.values() for table in self.tables)
        words = dict.fromkeys(word for entries in parameters for word, _ in entries)
        fades_out = self.fades_out()
        if "slices" not in self.file.content and not any(words) and not fades_out:
            return [""]
        with open_models([self.base]) as [base]:
            names = list(base.tensors)
        own = {each for name in names for each in locate(self.file.parts, name).names} | {*names}
        for word in words:
            if not any(word in name for name in own):
                LOG.warning(
                    f"{self.file.path}: filter {word!r} is part of no tensor's name, "
                    "so it has no effect"
                )
        if fades_out and len(self.tables) == 1:
            self.layers = count_layers(names)
        return names

    def fades_out(self) -> bool:
        """Whether a share is 0 somewhere and a parameter changes over the layers."""
        values = [
            (name, value)
            for table in self.tables
            for (name, _), entries in table.items()
            for _, value in entries
        ]
        gradients = [(name, value.numbers) for name, value in values if isinstance(value, Gradient)]
        numbers = [*gradients, *((name, (value,)) for name, value in values)]
        return bool(gradients) and any(name in KEPT and 0 in each for name, each in numbers)

    def choose_all(self, name: str) -> dict[Key, Value]:
        """The parameters of a tensor. With one part only, gradients stay gradients."""
        place = locate(self.file.parts, name)
        values = {}
        for key, entries in self.tables[place.part].items():
            # mergekit applies a model's own filters to the model's own names.
            own = place.names[key[1]] if 0 <= key[1] < len(place.names) else name
            values[key] = self.choose(key, entries, own, self.file.parts[place.part])
        if len(self.tables) == 1 and not self.layers:
            return values
        depth = depth_of(name, self.layers) if self.layers else place.depth
        return {key: value_at(value, depth) for key, value in values.items()}

    def choose(self, key: Key, entries: Entries, name: str, part: LayerSlice) -> Value:
        for word, value in entries:
            if word in name:
                return value
        parameter, model = key
        raise self.file.error(
            f"{parameter} of {part.choose(model + 1)}" if model >= 0 else parameter,
            f"there is no value for {name!r}" if name and entries else "it is missing",
            f"{self.file.method} needs a value for every tensor",
        )


def translate(file: MergekitFile, values: Mapping[Key, Any]) -> YamlTable:
    """mergekit's parameters of a tensor as our settings."""
    family = file.family
    made: YamlTable = {"method": file.ours, "drop_rate": 0.0}
    if file.from_zero:
        made["origin"] = ZERO
    if family.drop:
        made["drop"] = family.drop
    for name, setting in family.each.items():
        numbers = [convert(name, values[name, i]) for i in range(len(file.models))]
        are_equal = all(number == numbers[0] for number in numbers)
        made[setting] = numbers[0] if are_equal and setting != "weights" else numbers
    for name, setting in family.shared.items():
        made[setting] = convert(name, values[name, -1])
    for name, (value, reason) in family.only.items():
        file.check(
            values[name, -1] == value,
            name,
            f"it can only be {value} here: {reason}",
            "leave it out",
        )
    return family.finish(made)


def convert(name: str, value: Any) -> Any:
    """The value of the setting for a value of a parameter."""
    if name == "rescale":
        return L1 if value else NONE
    if name != "density":
        return value
    is_gradient = isinstance(value, Gradient)
    return Gradient(tuple(map(complement, value.numbers))) if is_gradient else complement(value)


def read_dtype(file: MergekitFile) -> YamlTable:
    key = "out_dtype" if "out_dtype" in file.content else "dtype"
    given = file.content.get(key)
    name = str(given).removeprefix("torch.")
    file.check(
        given is None or name in DTYPES,
        key,
        f"tensors cannot be stored as {given!r}",
        nearest(str(given), DTYPES),
    )
    return {} if given is None else {"dtype": name}


def read_padding(file: MergekitFile) -> YamlTable:
    multiple = file.tokenizer.get("pad_to_multiple_of")
    if not multiple:
        return {}
    check_setting("pad_vocabulary", multiple, f"{file.path}: tokenizer.pad_to_multiple_of")
    return {"pad_vocabulary": multiple}


def read_tokenizer(file: MergekitFile) -> Source | None:
    given = file.content.get("tokenizer_source")
    if "tokenizer" in file.content:
        file.check(
            given is None,
            "tokenizer",
            "there is also a tokenizer_source",
            "leave one of the two out",
        )
        given = file.tokenizer.get("source", UNION)
    if given in (None, UNION):
        return Source.of(given) if given else None
    path = file.base.path if given == BASE else file.read_reference(given, "tokenizer").path
    source = file.find(path)
    if source.is_word:  # here it is a folder
        source = replace(source, name=f"./{source.name}")
    # Without a tokenizer.json, rows are merged by their numbers.
    is_bare = path == file.base.path and is_missing(source.path / TOKENIZER_FILE)
    return Source.of(BASE) if is_bare and not is_on_hub(source) else source


def read_chat_template(file: MergekitFile) -> Source | None:
    given = file.content.get("chat_template", "")
    is_named = given in ("", AUTO, *TEMPLATES)
    file.check(
        is_named or (isinstance(given, str) and is_template(given)),
        "chat_template",
        f"{str(given)[:60]!r} is neither the name nor the text of a template",
        f"named are {', '.join((AUTO, *TEMPLATES))}",
    )
    # mergekit means its own template, even if there is a file of that name.
    return Source.of(TEMPLATES.get(given) or given) if given else None


@dataclass(frozen=True)
class Place:
    """Where a tensor of the output is made."""

    part: int
    depth: float = 0.0  # in the part: from 0 in its first layer to 1 in its last
    names: tuple[str, ...] = ()  # in each of its models, where that may differ


def locate(parts: Sequence[LayerSlice], name: str) -> Place:
    match = LAYER.match(name)
    if not match or not parts[0].ranges:
        return Place(0 if BEFORE_LAYERS.search(name) else len(parts) - 1)
    layer = int(match[2])
    number = 0
    while layer >= parts[number].depth:
        layer -= parts[number].depth
        number += 1
    part = parts[number]
    starts = [part.ranges[model][0] for model in part.columns[1:]]
    names = tuple(put_layer(start + layer, name) for start in starts)
    return Place(number, layer / (part.depth - 1) if part.depth > 1 else 1.0, names)


def list_sources(file: MergekitFile) -> list[Source]:
    """The base and the models of a merge. With slices, each is a stack of one source per slice."""
    count = 0 if METHODS[file.ours].models == (0, 0) else len(file.models)
    columns = [[part.choose(i) for part in file.parts] for i in range(count + 1)]
    if not file.parts[0].ranges or is_whole(file, columns):
        others = [find_source(file, own, file.base) for [own, *_] in columns[1:]]
        return [find_source(file, file.base), *others]
    made = []
    for models in columns:
        pairs = zip(file.parts, models, strict=True)
        slices = [Slice(find_source(file, own), *part.ranges[own]) for part, own in pairs]
        made.append(Source.stack(slices))
    return made


def find_source(file: MergekitFile, model: Reference, base: Reference | None = None) -> Source:
    """A model, perhaps with an adapter. An adapter on the base is an input by itself."""
    if not model.lora:
        return file.find(model.path)
    adapter = file.find(model.lora)
    is_on_base = base == Reference(model.path)
    # A whole model in place of the adapter would be merged as a model; joined, it is refused.
    is_model = any((adapter.path / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))
    if is_on_base and not is_model and not adapter.path.is_file():
        return adapter
    return Source.join(file.find(model.path), adapter)


def is_whole(file: MergekitFile, columns: Sequence[Sequence[Reference]]) -> bool:
    """Whether the slices are all layers of the same models, and only their parameters differ."""
    end = 0
    for part in file.parts:
        if {*part.ranges.values()} != {(end, end + part.depth)}:
            return False
        end += part.depth
    if any(len({*models}) > 1 for models in columns):
        return False
    with open_models([find_source(file, columns[0][0])]) as [base]:
        return [*count_layers(base.tensors).values()] == [end]


def find_patterns(groups: Mapping[str, str], usual: str) -> dict[str, list[str]]:
    """Glob patterns that match exactly the names of each group but the usual one.

    Numbers in a name become * if that is possible; else all but the layer's; else none.
    """
    inside: dict[str, set[str]] = {}
    for name, group in groups.items():
        inside.setdefault(hide_numbers(name, 1), set()).add(group)

    @cache
    def fits(pattern: str, group: str) -> bool:
        shapes = (shape for shape in inside if fnmatchcase(shape, pattern))
        return all(inside[shape] == {group} for shape in shapes)

    patterns: dict[str, list[str]] = {}
    for name, group in groups.items():
        if group != usual:
            exact = glob.escape(name)
            shapes = (hide_numbers(exact, kept) for kept in (0, 1))
            pattern = next((shape for shape in shapes if fits(shape, group)), exact)
            patterns.setdefault(group, []).append(pattern)
    return {group: list(dict.fromkeys(each)) for group, each in patterns.items()}


def hide_numbers(name: str, kept: int) -> str:
    """A name with * for its numbers, except for the first so many (kept)."""
    number = itertools.count()
    return NUMBER.sub(lambda match: "*" if next(number) >= kept else match[0], name)
