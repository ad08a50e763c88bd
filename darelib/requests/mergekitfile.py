"""mergekit's configurations as they are written: method, base, models and slices; and several
configurations in one file, as mergekit-multi takes them.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

import yaml

from darelib.config import is_count
from darelib.core.text import LOG, ConfigError, as_text, list_names, nearest
from darelib.methods import MERGEKIT
from darelib.methods.method import COUNTED, FIRST, ONLY, OPTIONAL
from darelib.models.source import Source, is_inner_path

MAX_YAML: Final = 1 << 18  # bytes: PyYAML takes seconds for more
MAX_DIGITS: Final = 100  # of a whole number: Python does not print large ones
MAX_VALUES: Final = 50_000  # of a file with its aliases written out
# PyYAML raises the last three for a value that does not fit its tag, like !!int.
FAULTS: Final = (
    *(yaml.YAMLError, ValueError, OverflowError, RecursionError),
    *(LookupError, AttributeError, TypeError),
)


def load_yaml(text: str, path: str) -> list[Any]:
    """The documents of a YAML text, without empty ones, if any is not.

    Texts that would take long, or are ambiguous, are refused.
    """
    try:
        if len(text.encode(errors="replace")) > MAX_YAML:
            raise ValueError(f"it is longer than {MAX_YAML:,} bytes")
        loader = yaml.SafeLoader(text)
        documents = []
        while loader.check_node():
            node = loader.get_node()
            _count_values(node, {})
            documents.append(loader.construct_document(node))
        return [document for document in documents if document is not None] or [None]
    except FAULTS as error:
        reason = str(getattr(error, "problem", None) or error).partition("\n")[0]
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(
            f"{path} cannot be read: {type(error).__name__}: {reason}{line}",
            "it must be YAML, as mergekit takes it, indented with spaces, not with tabs",
        ) from None


def _count_values(node: Any, counts: dict[int, int]) -> int:
    """How many values a node holds, aliases written out."""
    if id(node) not in counts:
        counts[id(node)] = 0  # until it is known
        line = f"(line {node.start_mark.line + 1})" if node else ""
        if isinstance(node, yaml.ScalarNode) and node.value != as_text(node.value):
            raise ValueError(f"half of a surrogate pair is no text {line}")
        is_integer = isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int")
        if is_integer and len(node.value) > MAX_DIGITS:
            raise ValueError(f"a number has {len(node.value):,} digits {line}")
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            for key, times in Counter(str(key.value) for key, _ in children).most_common(1):
                if times > 1:
                    raise ValueError(f"the key {key[:60]!r} is there {times} times {line}")
            children = [child for pair in children for child in pair]
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    if not 0 < counts[id(node)] <= MAX_VALUES:
        raise ValueError(f"with its aliases written out, it holds more than {MAX_VALUES:,} values")
    return counts[id(node)]


# The keys of a file and of the tables in it.
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
MODULE_KEYS: Final = ("models", "slices", "parameters")
MODEL_KEYS: Final = ("model", "parameters")
SLICE_KEYS: Final = ("sources", "base_model", "parameters")
SOURCE_KEYS: Final = (*MODEL_KEYS, "layer_range")
REFERENCE_KEYS: Final = ("model", "lora")
PATH_KEYS: Final = ("path", "revision")
TOKENIZER_KEYS: Final = ("source", "pad_to_multiple_of")
# Keys that mergekit ignores and many files have: descriptions of the model, options of mergekit's
# commands, and a weight that it reads and does not use.
DESCRIPTIONS: Final = frozenset(
    {
        *("author", "authors", "base_model_relation", "comment", "comments", "contributors"),
        *("credits", "datasets", "date", "description", "language", "library_name", "license"),
        *("license_link", "license_name", "metadata", "metrics", "model_name", "model_type"),
        *("name", "notes", "output_path", "pipeline_tag", "purpose", "summary", "tags", "title"),
        *("version", "widget"),
        *("allow_crimes", "clone_tensors", "copy_tokenizer", "cuda", "device", "lazy_unpickle"),
        *("low_cpu_memory", "multi_gpu", "num_threads", "out_shard_size", "quiet", "random_seed"),
        *("read_to_gpu", "residual_weight", "trust_remote_code", "verbose", "write_model_card"),
    }
)
LENIENT: Final = "(--lenient ignores it, as mergekit does)"
# The parameters of all methods.
PARAMETERS: Final = frozenset(
    name
    for _, family in MERGEKIT.values()
    for name in (*family.each, *family.shared, *family.ignored, *family.only)
)
# A key that mergekit knows is no misspelling: where nobody reads it, a warning is enough.
KNOWN: Final = DESCRIPTIONS.union(
    *(PARAMETERS, KEYS, SLICE_KEYS, SOURCE_KEYS, REFERENCE_KEYS, PATH_KEYS, TOKENIZER_KEYS)
)
# What mergekit can do and this tool cannot.
REFUSED: Final = {
    "override_architecture": "the architecture is the base's",
    "tokens": "no token gets an embedding of its own",
    **dict.fromkeys(("experts", "gate_mode"), "mergekit-moe makes mixtures of experts"),
}
# Under which keys a document may name another one.
REFERENCES: Final = ("model", "path", "base_model", "tokenizer_source", "source")
YamlTable = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A model as mergekit names it: a path or a name on the Hub, perhaps with an adapter on top."""

    path: str
    lora: str = ""

    def __str__(self) -> str:
        return repr(f"{self.path}+{self.lora}" if self.lora else self.path)


@dataclass(frozen=True)
class LayerSlice:
    """A slice of the layers, or all of them: its models and parameters."""

    models: dict[Reference, YamlTable]  # with each one's own parameters
    parameters: YamlTable = field(default_factory=dict)
    base: Reference | None = None
    ranges: dict[Reference, tuple[int, int]] = field(default_factory=dict)  # of each one's layers
    # The base, and the models that have parameters, in order.
    columns: tuple[Reference, ...] = ()

    @property
    def depth(self) -> int:
        """How many layers it makes."""
        return next((stop - start for start, stop in self.ranges.values()), 0)

    def choose(self, column: int) -> Reference:
        """A model of this part. The base stands in for a model that only other parts have."""
        return self.columns[column if column < len(self.columns) else 0]


class MergekitFile:
    def __init__(self, path: str, content: Any, lenient: bool = False) -> None:
        self.path = path
        self.lenient = lenient  # misspelled keys are warnings, not errors
        self.places: dict[str, Path] = {}  # of the models that other documents made, by name
        self.content = self.read_table(unwrap_module(self, content), "", KEYS)
        self.name = str(self.content.get("name", ""))
        tokenizer = self.content.get("tokenizer", {})
        self.tokenizer = self.read_table(tokenizer, "tokenizer", TOKENIZER_KEYS)
        self.method = str(self.content.get("merge_method", ""))
        self.check(
            self.method in MERGEKIT,
            "merge_method",
            f"this tool has no {self.method!r}" if self.method else "it is missing",
            nearest(self.method, MERGEKIT),
        )
        self.ours, self.family = MERGEKIT[self.method]
        self.own = (*self.family.each, *self.family.ignored)  # the parameters of a model
        # The parameters of a slice and of the file.
        self.all = (*self.own, *self.family.shared, *self.family.only)
        self.parameters = self.read_parameters(self.content, "", self.all)
        self.from_zero = False  # whether values are combined, since there is no base
        self.parts = self.choose_parts(self.read_parts())
        self.base = self.parts[0].choose(0)
        _, *self.models = max((part.columns for part in self.parts), key=len)
        check_columns(self)

    def error(self, where: str, what: str, hint: str) -> ConfigError:
        return ConfigError(": ".join(filter(None, (self.path, where, what))), hint)

    def check(self, fits: object, where: str, what: str, hint: str) -> None:
        """Refuse the file unless this fits. where: the place in the file; what: the fault."""
        if not fits:
            raise self.error(where, what, hint)

    def read_table(self, value: Any, where: str, known: Collection[str]) -> YamlTable:
        """A mapping without its nulls and unknown keys."""
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
        elif key in KNOWN or self.lenient:
            is_misplaced = key in PARAMETERS and "parameters" in known
            hint = "; put it under parameters" if is_misplaced else ""
            place = ": ".join(filter(None, (self.path, where)))
            LOG.warning(f"{place}: {key} has no effect here, as in mergekit{hint}")
        else:
            hint = f"{nearest(str(key), known)} {LENIENT}"
            raise self.error(where, f"there is no key {str(key)!r}", hint)

    def find(self, name: str) -> Source:
        """A model by its name: another document's result, or any model."""
        return Source(name, self.places[name]) if name in self.places else Source.of(name)

    def read_parameters(self, table: YamlTable, where: str, known: Collection[str]) -> YamlTable:
        where = f"{where}.parameters".removeprefix(".")
        return self.read_table(table.get("parameters", {}), where, known)

    def read_reference(self, value: Any, where: str) -> Reference:
        parts = self.split(value, "+", REFERENCE_KEYS, where)
        return Reference(*(self.read_name(part, where) for part in parts))

    def read_name(self, value: Any, where: str) -> str:
        """A path, or a name on the Hub and its revision, as this tool writes it."""
        words = self.split(value, "@", PATH_KEYS, where)
        self.check_name(all(isinstance(word, str) and word for word in words), value, where)
        path, *revision = words
        if revision and os.path.exists(os.path.expanduser(path)):
            LOG.warning(
                f"{self.path}: {where}: {path!r} is on this machine, so its revision has no effect"
            )
            return str(path)
        return "@".join(words)

    def split(self, value: Any, mark: str, keys: tuple[str, str], where: str) -> list[Any]:
        """The one or two parts of a name: a text with a mark between them, or a mapping."""
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
            "write it like models/base, org/name@revision or models/base+adapter",
        )

    def read_parts(self) -> list[LayerSlice]:
        self.check(
            ("models" in self.content) != ("slices" in self.content),
            "models",
            "there must be either models or slices",
            "list the models to merge",
        )
        if "models" in self.content:
            return [LayerSlice(self.read_models(self.content["models"], "models", MODEL_KEYS))]
        slices = self.read_list(self.content["slices"], "slices")
        return [read_slice(self, entry, where) for where, entry in slices]

    def read_list(self, value: Any, where: str) -> list[tuple[str, Any]]:
        """The entries of a list, each with its place in the file."""
        self.check(
            isinstance(value, list),
            where,
            "it must be a list with at least one entry",
            "see mergekit's examples",
        )
        return [(f"{where}[{k}]", entry) for k, entry in enumerate(value)]

    def read_models(
        self, value: Any, where: str, known: tuple[str, ...]
    ) -> dict[Reference, YamlTable]:
        models: dict[Reference, YamlTable] = {}
        for place, entry in self.read_list(value, where):
            table = self.read_table(entry, place, known)
            model = self.read_reference(table.get("model"), f"{place}.model")
            self.check(
                model not in models, place, f"{model} is there twice", "list each model once"
            )
            models[model] = self.read_parameters(table, place, self.own)
        return models

    def read_base(self, table: YamlTable, where: str) -> Reference | None:
        given = table.get("base_model")
        return None if given is None else self.read_reference(given, where)

    def choose_base(self, part: LayerSlice) -> Reference:
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
            "name the model that the others were fine-tuned from",
        )
        if base is None:  # any will do; adapters on it cost least
            self.from_zero = role == OPTIONAL
            first, *_ = sorted(models, key=lambda model: not model.lora)
            return Reference(first.path)
        if role == COUNTED and "models" in self.content:
            models.setdefault(base, {})
        return base

    def choose_parts(self, parts: Sequence[LayerSlice]) -> list[LayerSlice]:
        chosen = [self.choose_models(part) for part in parts]
        if any(len(part.columns) > 1 for part in chosen):
            return chosen
        # There is only the base, and it is the result.
        self.ours, self.family = MERGEKIT["passthrough"]
        return [self.choose_models(part) for part in parts]

    def choose_models(self, part: LayerSlice) -> LayerSlice:
        """A part with its base and its models: an average or an arc counts the base as one."""
        base = self.choose_base(part)
        is_merged = self.family.base == COUNTED or self.from_zero
        others = [model for model in part.models if is_merged or model != base]
        least, most = self.family.others
        wanted = f"{least}" if most == least else f"at least {least}"
        self.check(
            least <= len(others) and (most is None or len(others) <= most),
            "models",
            f"besides the base, {self.method} merges {wanted}, not {len(others)}",
            "list the models to merge" if len(others) < least else "leave the others out",
        )
        merged = [base, *others] if self.family.base in (FIRST, ONLY) else others
        if part.ranges and base not in part.ranges:
            same = {*part.ranges.values()}
            words = f"the base {base} is not a source, and the sources have different layers"
            self.check(len(same) == 1, "slices", words, "add it with its own layer_range")
            part.ranges[base] = min(same)
        return replace(part, columns=(base, *merged))


def read_slice(file: MergekitFile, value: Any, where: str) -> LayerSlice:
    table = file.read_table(value, where, SLICE_KEYS)
    models = file.read_models(table.get("sources"), f"{where}.sources", SOURCE_KEYS)
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
    parameters = file.read_parameters(table, where, file.all)
    ranges = {model: (own[0], own[1]) for model, own in zip(models, given, strict=True)}
    return LayerSlice(models, parameters, base, ranges)


def check_columns(file: MergekitFile) -> None:
    """Refuse slices of different numbers of models, if no weight of 0 can leave one out."""
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
    """The content of the only module in place of `modules`: mergekit writes its files so."""
    modules = content.get("modules") if isinstance(content, dict) else None
    if not modules:
        return content
    file.check(
        isinstance(modules, dict) and len(modules) == 1,
        "modules",
        "there must be exactly one",
        "keep one of them, or use mergekit",
    )
    [(name, module)] = modules.items()
    own = file.read_table(module, f"modules.{name}", MODULE_KEYS)
    outer = {key: value for key, value in content.items() if key != "modules"}
    tables = [each.get("parameters") or {} for each in (outer, own)]
    both = {"parameters": {**tables[0], **tables[1]}} if all(tables) else {}
    return {**outer, **own, **both}


def read_documents(text: str, path: str, lenient: bool) -> list[MergekitFile]:
    """The documents of a file, each after those that it refers to. The last is the output."""
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
        whose = f"another document has the name {name!r}" if name else "two documents have none"
        file.check(name not in by_name, "name", whose, "give each but the output its own name")
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
            "no model can be made from itself",
        ) from None
    ends = [name for name in order if not any(name in others for others in needs.values())]
    if len(ends) > 1:
        raise ConfigError(
            f"{path}: no other document uses {list_names(sorted(ends))}, and only one of them can "
            "be the output",
            "give the others a file of their own",
        )
    return [by_name[name] for name in order]


def list_references(value: Any, key: str = "") -> set[str]:
    """Possible names of documents in a document, without adapters."""
    if isinstance(value, dict):
        pairs = value.items()
        return {name for inner, entry in pairs for name in list_references(entry, str(inner))}
    if isinstance(value, list):
        return {name for entry in value for name in list_references(entry, key)}
    is_reference = isinstance(value, str) and key in REFERENCES
    return {value.partition("+")[0]} if is_reference else set()
