"""mergekit's configurations as they are written: the method, the models, the slices, the base; and
several in one file, as mergekit-multi takes them.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

from darelib.config import is_count
from darelib.core.text import LOG, ConfigError, list_names, nearest
from darelib.methods import MERGEKIT
from darelib.methods.mergekit import COUNTED, FIRST, ONLY, OPTIONAL
from darelib.models.source import Source, is_inner_path
from darelib.requests.yamlfile import load_yaml

KEYS: Final = (
    "name",
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
# What mergekit does not use either, and people write nevertheless: what describes a model, options
# of mergekit's commands, a method or a name where it counts for nothing.
HARMLESS: Final = frozenset(
    {
        *("author", "authors", "base_model_relation", "comment", "comments", "contributors"),
        *("credits", "datasets", "date", "description", "language", "library_name", "license"),
        *("license_link", "license_name", "metadata", "metrics", "model_name", "model_type"),
        *("name", "notes", "output_path", "pipeline_tag", "purpose", "summary", "tags", "title"),
        *("version", "widget"),
        *("allow_crimes", "clone_tensors", "copy_tokenizer", "cuda", "device", "lazy_unpickle"),
        *("low_cpu_memory", "multi_gpu", "num_threads", "out_shard_size", "quiet", "random_seed"),
        *("read_to_gpu", "trust_remote_code", "verbose", "write_model_card"),
        *("merge_method", "residual_weight"),
    }
)
LENIENT: Final = "--lenient ignores it, as mergekit does"
# What any of the methods takes.
PARAMETERS: Final = frozenset(
    name
    for _, family in MERGEKIT.values()
    for name in (*family.each, *family.shared, *family.ignored, *family.only)
)
# What mergekit can do and this tool cannot.
REFUSED: Final = {
    "override_architecture": "the architecture is the base's",
    "tokens": "no token gets an embedding of its own",
    "pad_to_multiple_of": "vocabularies are not padded",
    **dict.fromkeys(("experts", "gate_mode"), "mergekit-moe makes mixtures of experts"),
}
# Under which keys a document may name another one.
REFERENCES: Final = ("model", "path", "base_model", "tokenizer_source", "source")
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
    ranges: dict[Reference, tuple[int, int]] = field(default_factory=dict)  # of each one's layers
    # The base, and those that parameters are for, in order.
    columns: tuple[Reference, ...] = ()

    @property
    def depth(self) -> int:
        """How many layers it makes."""
        return next((stop - start for start, stop in self.ranges.values()), 0)

    def choose(self, column: int) -> Reference:
        """The base stands in for what a slice lacks that others have."""
        return self.columns[column if column < len(self.columns) else 0]


class MergekitFile:
    def __init__(self, path: str, content: Any, lenient: bool = False) -> None:
        self.path = path
        self.lenient = lenient  # keys that mergekit ignores are no errors
        self.places: dict[str, Path] = {}  # of the models that other documents made, by name
        self.content = self.read_table(unwrap_module(self, content), "", KEYS)
        self.name = str(self.content.get("name", ""))
        self.method = str(self.content.get("merge_method", ""))
        self.check(
            self.method in MERGEKIT,
            "merge_method",
            f"this tool has no {self.method!r}" if self.method else "it is missing",
            nearest(self.method, MERGEKIT),
        )
        self.ours, self.family = MERGEKIT[self.method]
        self.each = tuple(self.family.each)
        self.shared = (*self.family.shared, *self.family.only)
        self.own = (*self.each, *self.family.ignored)  # what a model may have
        self.parameters = self.read_parameters(self.content, "", (*self.own, *self.shared))
        self.from_zero = False  # whether values are combined, since there is no base
        self.parts = [self.choose_models(part) for part in self.read_parts()]
        self.base = self.parts[0].choose(0)
        _, *self.models = max((part.columns for part in self.parts), key=len)
        check_columns(self)

    def error(self, where: str, what: str, hint: str) -> ConfigError:
        return ConfigError(": ".join(filter(None, (self.path, where, what))), hint)

    def check(self, fits: object, where: str, what: str, hint: str) -> None:
        """Refuse the file, unless this fits. where: in the file; what: is wrong there."""
        if not fits:
            raise self.error(where, what, hint)

    def read_table(self, value: Any, where: str, known: Collection[str]) -> Table:
        """A mapping, less what is null in it. A key that is none of these is an error, unless it
        does no harm.
        """
        self.check(
            isinstance(value, dict),
            where,
            f"it must be a mapping, not {str(value)[:60]!r}",
            f"with {', '.join(known)}",
        )
        given = {key: entry for key, entry in value.items() if entry is not None and entry != []}
        for key in value:
            if key not in known:
                self.check_unknown(key, bool(value[key]), where, known)
        return {key: entry for key, entry in given.items() if key in known}

    def check_unknown(self, key: Any, is_given: bool, where: str, known: Collection[str]) -> None:
        if key in REFUSED:
            self.check(
                not is_given,
                where,
                f"{key} is not supported: {REFUSED[key]}",
                "leave it out, or use mergekit",
            )
        elif key in HARMLESS or self.lenient:
            LOG.warning(f"{': '.join(filter(None, (self.path, where)))}: {key} does nothing")
        else:
            is_misplaced = key in PARAMETERS and "parameters" in known
            hint = "put it under parameters" if is_misplaced else nearest(str(key), known)
            raise self.error(
                where, f"there is no key {str(key)!r}", f"{hint.removesuffix('?')}; {LENIENT}"
            )

    def find(self, name: str) -> Source:
        """A model by its name: what another document made, or any other."""
        return Source(name, self.places[name]) if name in self.places else Source.of(name)

    def read_parameters(self, table: Table, where: str, known: Collection[str]) -> Table:
        where = f"{where}.parameters".removeprefix(".")
        return self.read_table(table.get("parameters", {}), where, known)

    def read_reference(self, value: Any, where: str) -> Reference:
        parts = self.split(value, "+", ("model", "lora"), where)
        return Reference(*(self.read_name(part, where) for part in parts))

    def read_name(self, value: Any, where: str) -> str:
        """A path, or a name on the Hub and its revision, as this tool writes it."""
        words = self.split(value, "@", ("path", "revision"), where)
        self.check_name(all(isinstance(word, str) and word for word in words), value, where)
        self.check(
            len(words) == 1 or not os.path.exists(os.path.expanduser(words[0])),
            where,
            f"{words[0]!r} is on this machine and has no revisions",
            f"leave @{words[-1]} out",
        )
        return "@".join(words)

    def split(self, value: Any, mark: str, keys: tuple[str, str], where: str) -> list[Any]:
        """What is one part of a name or two: a text with a mark in it, or a mapping."""
        if isinstance(value, dict):
            return list(({keys[0]: None} | self.read_table(value, where, keys)).values())
        parts = value.split(mark) if isinstance(value, str) else [value]
        self.check_name(len(parts) <= 2, value, where)
        return parts

    def check_name(self, fits: bool, value: Any, where: str) -> None:
        self.check(
            fits,
            where,
            "it is missing" if value is None else f"{str(value)[:60]!r} does not name a model",
            "like models/base, org/name@revision or models/base+adapter",
        )

    def read_parts(self) -> list[Part]:
        self.check(
            ("models" in self.content) != ("slices" in self.content),
            "models",
            "there must be either models or slices",
            "list the models that are to be merged",
        )
        if "models" in self.content:
            return [Part(self.read_models(self.content["models"], "models"))]
        slices = self.read_list(self.content["slices"], "slices")
        return [read_slice(self, entry, where) for where, entry in slices]

    def read_list(self, value: Any, where: str) -> list[tuple[str, Any]]:
        """The entries of a list, after what to call them."""
        self.check(
            isinstance(value, list),
            where,
            "it must be a list with at least one entry",
            "see mergekit's examples",
        )
        return [(f"{where}[{k}]", entry) for k, entry in enumerate(value)]

    def read_models(self, value: Any, where: str, *known: str) -> dict[Reference, Table]:
        models: dict[Reference, Table] = {}
        for place, entry in self.read_list(value, where):
            table = self.read_table(entry, place, ("model", "parameters", *known))
            model = self.read_reference(table.get("model"), f"{place}.model")
            self.check(
                model not in models, place, f"{model} is there twice", "list each model once"
            )
            models[model] = self.read_parameters(table, place, self.own)
        return models

    def read_base(self, table: Table, where: str) -> Reference | None:
        given = table.get("base_model")
        return None if given is None else self.read_reference(given, where)

    def choose_base(self, part: Part) -> Reference:
        base = part.base or self.read_base(self.content, "base_model")
        role = self.family.base
        models = part.models
        if role == ONLY:
            [base, *others] = models
            self.check(
                not others,
                "slices" if part.ranges else "models",
                f"{self.method} takes one model, not {len(models)}",
                "give each model a slice of its own",
            )
        if role == COUNTED and part.ranges and base not in models:
            base = None
        self.check(
            base or role in (OPTIONAL, COUNTED),
            "base_model",
            "it is missing",
            "name the model that the others were made from",
        )
        if base is None:  # the result does not depend on it; adapters are cheapest on it
            self.from_zero = role == OPTIONAL
            first, *_ = sorted(models, key=lambda model: not model.lora)
            return Reference(first.path)
        if role == COUNTED and "models" in self.content:
            models.setdefault(base, {})
        return base

    def choose_models(self, part: Part) -> Part:
        """A part with its base and what is merged: of an average or an arc, the base is one."""
        base = self.choose_base(part)
        is_merged = self.family.base == COUNTED or self.from_zero
        others = [model for model in part.models if is_merged or model != base]
        least, most = self.family.others
        wanted = f"{least}" if most == least else f"at least {least}"
        self.check(
            least <= len(others) and (most is None or len(others) <= most),
            "models",
            f"besides the base, {self.method} merges {wanted}, not {len(others)}",
            "list what is to be merged" if len(others) < least else "leave the others out",
        )
        merged = [base, *others] if self.family.base in (FIRST, ONLY) else others
        if part.ranges and base not in part.ranges:
            same = {*part.ranges.values()}
            words = f"{base}, the base, is not a source, and the sources' layers are not the same"
            self.check(len(same) == 1, "slices", words, "add it with its own layer_range")
            part.ranges[base] = min(same)
        return replace(part, columns=(base, *merged))


def read_slice(file: MergekitFile, value: Any, where: str) -> Part:
    table = file.read_table(value, where, ("sources", "base_model", "parameters"))
    models = file.read_models(table.get("sources"), f"{where}.sources", "layer_range")
    given = [source.get("layer_range") for source in table["sources"]]
    for layers in given:
        is_pair = isinstance(layers, list) and len(layers) == 2
        file.check(
            is_pair and all(is_count(number, 0) for number in layers),
            where,
            f"layer_range must be two whole numbers, not {layers!r}",
            "like [0, 32]",
        )
    lengths = {stop - start for start, stop in given}
    file.check(
        len(lengths) == 1 and min(lengths) >= 0,
        where,
        f"its sources have different numbers of layers, or none: {given}",
        "give ranges of the same length",
    )
    base = file.read_base(table, f"{where}.base_model")
    parameters = file.read_parameters(table, where, (*file.own, *file.shared))
    ranges = {model: (own[0], own[1]) for model, own in zip(models, given, strict=True)}
    return Part(models, parameters, base, ranges)


def check_columns(file: MergekitFile) -> None:
    """Refuse slices with fewer models than others, where no weight of 0 can leave one out."""
    counts = [len(part.columns) - 1 for part in file.parts]
    file.check(
        len({*counts}) == 1 or "weight" in file.family.each,
        "slices",
        f"they merge different numbers of models: {counts}",
        f"{file.method} needs the same number in each",
    )
    own = [entry.get("base_model") for entry in file.content.get("slices", [])]
    file.check(
        not file.from_zero or not any(own),
        "slices",
        "some have a base and some have none",
        "give base_model once, for all",
    )


def unwrap_module(file: MergekitFile, content: Any) -> Any:
    """The content without the level of an only module, as mergekit itself writes its models."""
    modules = content.get("modules") if isinstance(content, dict) else None
    if not modules:
        return content
    file.check(
        isinstance(modules, dict) and len(modules) == 1,
        "modules",
        "all parts of a model are merged alike",
        "leave one of them, or use mergekit",
    )
    [(name, module)] = modules.items()
    own = file.read_table(module, f"modules.{name}", ("models", "slices", "parameters"))
    outer = {key: value for key, value in content.items() if key != "modules"}
    tables = [each.get("parameters") or {} for each in (outer, own)]
    both = {"parameters": {**tables[0], **tables[1]}} if all(tables) else {}
    return {**outer, **own, **both}


def read_documents(text: str, path: str, lenient: bool) -> list[MergekitFile]:
    """The documents of a file, each after those that it refers to: the last is the output."""
    contents = load_yaml(text, path)
    if len(contents) == 1:
        return [MergekitFile(path, contents[0], lenient)]
    numbered = enumerate(contents, 1)
    files = [MergekitFile(f"{path}, document {k}", content, lenient) for k, content in numbered]
    by_name: dict[str, MergekitFile] = {}
    for file in files:
        name = file.name
        is_folder = is_inner_path(name) and not {"/", "\\"} & {*name}
        file.check(not name or is_folder, "name", f"{name!r} is no name for a folder", "change it")
        whose = f"another document is called {name!r}" if name else "another one has none either"
        file.check(name not in by_name, "name", whose, "give each but the output a name of its own")
        by_name[name] = file
    needs = {
        name: sorted(list_references(file.content) & by_name.keys())
        for name, file in by_name.items()
    }
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ConfigError(
            f"{path}: documents refer to each other in a circle: {' -> '.join(error.args[1])}",
            "a model cannot be made from itself",
        ) from None
    ends = [name for name in order if not any(name in others for others in needs.values())]
    if len(ends) > 1:
        raise ConfigError(
            f"{path}: {list_names(sorted(ends))} are used by no other document, and only one of "
            "them can be the output",
            "give the others a file of their own",
        )
    return [by_name[name] for name in order]


def list_references(value: Any, key: str = "") -> set[str]:
    """What may be names of documents in a document, without adapters on top of them."""
    if isinstance(value, dict):
        pairs = value.items()
        return {name for inner, entry in pairs for name in list_references(entry, str(inner))}
    if isinstance(value, list):
        return {name for entry in value for name in list_references(entry, key)}
    is_reference = isinstance(value, str) and key in REFERENCES
    return {value.partition("+")[0]} if is_reference else set()
