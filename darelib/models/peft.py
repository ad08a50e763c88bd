"""LoRA adapters of PEFT: their configuration, and which tensors of the base their names mean."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any, Final, Self

from darelib.config import is_count, is_number
from darelib.core.text import DareError, InputChanged, clip, list_names
from darelib.models.checkpoint import (
    EMBEDDINGS,
    HEADS,
    NAME_KEY,
    Checkpoint,
    compare_configs,
    read_config,
)
from darelib.models.directories import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    INDEX_FILE,
    STATED_KEY,
    WEIGHTS_FILE,
    Layout,
    is_folder,
    is_name,
    part_name,
)
from darelib.models.lora import (
    UNLOAD_HINT,
    LoraAdapter,
    Pair,
    find_transposed,
    make_pair,
    make_product,
    sort_parts,
)
from darelib.models.source import Source
from darelib.models.tensor import Tensor
from darelib.models.tensorfile import (
    AGAIN_HINT,
    CHANGED_HINT,
    MAX_NAME,
    file_sha256,
    read_json,
)

# Settings that make an adapter something else than scale * B @ A, and what people call them.
OTHER_ADAPTERS: Final = {
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow",
    "monteclora_config": "MonteCLoRA",
    "alora_invocation_tokens": "activated LoRA",
    "lora_bias": "LoRA with biases",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "LoRA on parameters that are not modules",
}
# Other kinds of adapter that PEFT can merge.
MERGED_BY_PEFT: Final = (
    "ADALORA", "BOFT", "BONE", "C3A", "FOURIERFT", "HRA", "IA3", "LOHA", "LOKR", "MISS", "OFT",
    "RANDLORA", "ROAD", "SHIRA", "VBLORA", "VERA",
)  # fmt: skip
# Ways to start training that leave the base as it is. The others (PiSSA, OLoRA, LoftQ, ...) change
# it, so that the adapter is not a change to the base that the user has.
PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
# Where transformers keeps the class of a kind of model.
CLASS_MODULE: Final = re.compile(r"transformers\.models\.(?:deprecated\.)?(\w+)\.modeling_\w+")
PREFIX: Final = "base_model.model."  # before all names
# What stands in the names of modules that were saved whole.
WRAPPER: Final = re.compile(r"\.base_layer(?=\.)|\.modules_to_save(\.default)?(?=\.)")
# The settings that determine the weights, and what each may be.
SETTINGS: Final[dict[str, Callable[[Any], bool]]] = {
    "r": lambda rank: is_count(rank, 1),
    "lora_alpha": is_number,
    "use_rslora": lambda flag: isinstance(flag, bool),
    "use_dora": lambda flag: isinstance(flag, bool),
    "fan_in_fan_out": lambda flag: isinstance(flag, bool),
    "rank_pattern": lambda table: (
        isinstance(table, dict) and all(is_count(rank, 1) for rank in table.values())
    ),
    "alpha_pattern": lambda table: isinstance(table, dict) and all(map(is_number, table.values())),
}

# Where ranks differ, PEFT writes a pattern for each module, and there may be thousands: most
# patterns are plain names.
PLAIN_PATTERN: Final = re.compile(r"(?:[\w-]|\\?\.)*+")
# The other patterns that are matched: what is repeated is a character or a class, never a group.
# Anything else may take a time that doubles with each letter.
ATOM: Final = (
    r"(?:[\w-]|\\?\.|\\[dw]|\[\^?(?:[\w.]|-(?!-))++\])(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})?+"
)
SIMPLE_PATTERN: Final = re.compile(rf"\^?(?:{ATOM}|\||\((?:\?:)?(?:{ATOM}|\|)*+\)\??)*+\$?")
MAX_PATTERNS: Final = 20_000  # characters of such patterns together
MAX_STEPS: Final = 500_000_000  # to match all of them with all modules: some seconds at worst


@dataclass(frozen=True)
class LoraConfig:
    """What of an adapter_config.json determines the weights."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def match(self, modules: Sequence[str], name: str) -> Self:
        """The same with the names of modules for patterns. name: of the adapter."""
        return replace(
            self,
            rank_pattern=match_patterns(self.rank_pattern, modules, name),
            alpha_pattern=match_patterns(self.alpha_pattern, modules, name),
        )

    def find_scale(self, module: str, pair: Pair) -> float:
        """What a module's product is multiplied by: it must be as these settings say."""
        rank = self.rank_pattern.get(module, self.r)
        if pair.rank != rank or bool(pair.magnitudes) != self.use_dora:
            raise DareError(
                f"the matrices {list(pair.a.shape)} and {list(pair.b.shape)} of {pair.title} are "
                f"not of rank {rank}{' with magnitudes' if self.use_dora else ''}",
                f"its {ADAPTER_CONFIG} belongs to other weights",
            )
        alpha = self.alpha_pattern.get(module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_settings(table: dict[str, Any], name: str) -> LoraConfig:
    """The configuration of a LoRA or DoRA; every other kind is refused. name: of the adapter."""
    kind = table.get("peft_type")
    if kind != "LORA":
        hint = UNLOAD_HINT if kind in MERGED_BY_PEFT else "only LoRA adapters can be merged"
        raise DareError(f"the adapter {name!r} is of type {kind!r}", hint)
    for key, words in OTHER_ADAPTERS.items():
        if table.get(key):
            raise DareError(
                f"the adapter {name!r} uses {words} ({key}), which is not a product of two "
                "matrices",
                UNLOAD_HINT,
            )
    start = table.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise DareError(
            f"the adapter {name!r} was started by {start!r}, which may also have changed the base",
            "convert it to a plain LoRA, as PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion",
        )
    given = {key: table[key] for key in SETTINGS if table.get(key) is not None}
    for key, value in given.items():
        if not SETTINGS[key](value):
            raise DareError(
                f"the adapter {name!r} has {key} = {value!r}", f"fix its {ADAPTER_CONFIG}"
            )
    return LoraConfig(**given)


def match_patterns(
    patterns: Mapping[str, Any], modules: Sequence[str], adapter: str
) -> dict[str, Any]:
    """The values of the modules that patterns match.

    As PEFT matches them: the first one that matches the end of the module's name, after a dot. But
    in a plain name a dot is only a dot, so that names are looked up, however many there are.
    """
    odd = [key for key in patterns if not PLAIN_PATTERN.fullmatch(key)]
    if sum(map(len, odd)) > MAX_PATTERNS or any(len(key) > 2 * MAX_NAME for key in patterns):
        raise DareError(
            f"the patterns in the {ADAPTER_CONFIG} of {adapter!r} are too long", "fix it"
        )
    order = {key: place for place, key in enumerate(patterns)}
    plain = {key.replace("\\", ""): key for key in reversed(order) if key not in odd}
    starts = {name: [dot.end() for dot in re.finditer(r"^|\.", name)] for name in modules}
    letters = max(map(len, modules), default=0)
    attempts = len(odd) * sum(map(len, starts.values()))
    compiled = {key: compile_pattern(key, letters, attempts, adapter) for key in odd}
    values = {}
    for module, places in starts.items():
        matching = [plain[module[k:]] for k in places if module[k:] in plain]
        matching += [
            key
            for key, pattern in compiled.items()
            if any(pattern.fullmatch(module, k) for k in places)
        ]
        if matching:
            values[module] = patterns[min(matching, key=order.__getitem__)]
    return values


def compile_pattern(key: str, letters: int, attempts: int, adapter: str) -> re.Pattern[str]:
    """A regular expression that takes a bounded time for so many names of so many letters.

    A repetition may end at any letter, and a group may match by any of its choices.
    """
    repeats = len(re.findall(r"[*+{]", key))
    choices = math.prod(1 + part.count("|") for part in re.split(r"[()]", key))
    steps = math.comb(letters + repeats, repeats) * choices << key.count("?")
    try:
        if SIMPLE_PATTERN.fullmatch(key) and steps * attempts <= MAX_STEPS:
            return re.compile(key)
    except re.error:
        pass
    raise DareError(
        f"the pattern {clip(repr(key))} in the {ADAPTER_CONFIG} of {adapter!r} is no regular "
        "expression, or may take too long to match",
        "write the names of modules instead, or a pattern that repeats no group",
    )


def find_adapter(source: Source) -> Layout | None:
    """The files of an adapter; None: the source is something else."""
    folder = source.path
    if folder.name in (ADAPTER_FILE, ADAPTER_CONFIG) and not folder.is_dir():
        folder = folder.parent
    elif not any(os.path.lexists(folder / name) for name in (ADAPTER_FILE, ADAPTER_CONFIG)):
        return None
    elif any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        if not (folder / ADAPTER_CONFIG).exists():
            return None
        raise DareError(
            f"{source.name!r} holds a model and an adapter",
            f"name one of them, like {WEIGHTS_FILE}",
        )
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / name).exists():
            raise DareError(
                f"the adapter {source.name!r} has no {name}",
                f"{AGAIN_HINT}, with a current PEFT",
            )
    return Layout((folder / ADAPTER_FILE,), folder)


def sort_keys(
    tensors: Mapping[str, Tensor], adapter: str
) -> tuple[dict[str, Pair], dict[str, Tensor]]:
    """The pairs of matrices by module, and the tensors that are stored whole."""
    own: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, info in tensors.items():
        key = name.removeprefix(PREFIX)
        if "lora_" in key or "trainable_tokens" in key:
            own[name] = info
        elif ".original_module." not in key:  # the base's, beside the one that replaces it
            whole[WRAPPER.sub("", key)] = info
    parts = sort_parts(own, adapter)
    plain = {module.removeprefix(PREFIX): each for module, each in parts.items()}
    if len(plain) < len(parts):
        raise DareError(f"{adapter!r} holds several adapters", "save each by itself")
    odd = [f"{module}.{part}" for module in plain for part in ("alpha", "dora_scale")]
    if not whole.keys().isdisjoint(odd):
        raise DareError(f"the adapter {adapter!r} is not a plain LoRA of PEFT's", UNLOAD_HINT)
    return {module: make_pair(module, each, adapter) for module, each in plain.items()}, whole


def read_stated(stated: object) -> dict[str, Any]:
    """The configuration of the base that an adapter states, if it is here, as PEFT reads paths."""
    return read_config(Path(stated)) if is_name(stated) and is_folder(stated) else {}


def is_absolute(path: str) -> bool:
    """Whether it is a path of one machine only, on any system."""
    return path.startswith(("/", "\\", "~")) or bool(PureWindowsPath(path).drive)


def find_other_base(name: str, stated: Any, base: Checkpoint) -> Iterator[str]:
    """What to warn of where an adapter states another base than it gets."""
    if not is_name(stated):
        return
    path = base.folder or base.files[0].path
    path = path.parent if path.name == WEIGHTS_FILE else path
    differences: dict[str, str] = {}
    if is_folder(stated):
        if os.path.samefile(stated, path):
            return
        differences = compare_configs(read_stated(stated), base.config)
        stated = os.path.abspath(stated)
    names = (
        base.source.recorded.partition("@")[0],  # on the Hub
        os.path.abspath(path),
        os.path.realpath(path),
        str(base.config.get(NAME_KEY, "")),
    )
    how = "is given as its base"
    if differences:
        how = f"is configured differently from it ({', '.join(differences.values())})"
    elif last_part(stated) in map(last_part, names):
        return
    yield (
        f"{name} was trained on {stated!r}, and {base.name} {how}; check that they are the "
        "same model"
    )


def find_kind(table: Mapping[str, Any], base: Checkpoint) -> dict[str, str]:
    """The kind of model that an adapter was trained on, where PEFT noted its class and it is surely
    not the base's kind: transformers has a folder for each, named like it, or like its start.
    """
    noted = table.get("auto_mapping")
    library = noted.get("parent_library") if isinstance(noted, dict) else None
    found = CLASS_MODULE.fullmatch(library) if isinstance(library, str) else None
    kind = str(base.config.get("model_type", "")).replace("-", "_")
    if not found or kind.startswith(found[1]) or found[1].startswith(kind):
        return {}
    return {"model_type": found[1]}


def last_part(name: str) -> str:
    """What a path and a name on the Hub have in common for one model."""
    parts = re.split(r"[/\\]", name.rstrip("/\\"))
    if parts[-2:-1] == ["snapshots"] and len(parts) > 2:  # in the Hub's cache, before a commit
        parts = parts[-3].split("--")
    return parts[-1].lower().removesuffix(".safetensors")


class PeftAdapter(LoraAdapter):
    """A LoRA adapter of PEFT, open for reading: its configuration is a file of its own."""

    def _find_changes(self, base: Checkpoint) -> dict[str, Tensor]:
        self._config_path = self.files[0].path.with_name(ADAPTER_CONFIG)
        table = read_json(self._config_path, part_name(self.source, self._config_path))
        self._config_sha256 = file_sha256(self._config_path)
        stated = table.get(STATED_KEY)
        self.base_config = read_stated(stated) or find_kind(table, base)
        self.warnings = tuple(find_other_base(self.name, stated, base))
        pairs, whole = sort_keys(self.tensors, self.name)
        if not pairs and not whole:
            raise DareError(f"the adapter {self.name!r} is empty", AGAIN_HINT)
        settings = read_settings(table, self.name).match(list(pairs), self.name)
        targets = {f"{module}.weight": module for module in pairs}
        to_base = match_names(list(targets or whole), base.tensors)
        changes = {to_base(name): info for name, info in whole.items()}
        for target, module in targets.items():
            name = to_base(target)
            if name not in base.tensors:
                raise self._explain_missing(target)
            stored = base.tensors[name]
            is_turned = find_transposed(name, self._ways)
            if stored.shape[:1] != stored.shape[1:]:  # then the shape itself shows it
                is_turned = True
            elif is_turned is None:  # PEFT states what is true of the last module it looked at
                is_turned = settings.fan_in_fan_out
            scale = settings.find_scale(module, pairs[module])
            changes[name] = make_product(
                self, pairs[module], stored, scale, is_turned, changes.get(name)
            )
        if is_name(stated) and not is_absolute(stated):
            self.stated = stated
        self.modules = {to_base(target): module for target, module in targets.items()}
        return changes

    @property
    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint | {"config_sha256": self._config_sha256}

    def check_unchanged(self) -> None:
        super().check_unchanged()
        if file_sha256(self._config_path) != self._config_sha256:
            raise InputChanged(f"{self.name!r} changed while it was merged", CHANGED_HINT)

    def _explain_missing(self, target: str) -> DareError:
        base = self.base.tensors
        hint = f"check the base; it has {list_names(list(base))}"
        if target.endswith(HEADS) and any(other.endswith(EMBEDDINGS) for other in base):
            hint = (
                "the base uses its embedding as the output head, and changing only one of them "
                f"unties them; {UNLOAD_HINT}"
            )
        return DareError(
            f"the adapter {self.name!r} changes {target!r}, which the base does not have", hint
        )


def describe_lora(
    base: str, ranks: Mapping[str, int], alphas: Mapping[str, float], **others: Any
) -> dict[str, Any]:
    """The configuration of an adapter that changes these modules. base: what it is called."""
    whole = {
        module: int(alpha) if float(alpha).is_integer() else alpha
        for module, alpha in alphas.items()
    }
    return {
        "peft_type": "LORA",
        STATED_KEY: base or None,
        "r": max(ranks.values(), default=1),
        "lora_alpha": max(whole.values(), default=1),
        "rank_pattern": make_patterns(ranks),
        "alpha_pattern": make_patterns(whole),
        "target_modules": list(ranks),
        "bias": "none",
        "inference_mode": True,
        **others,
    }


def make_patterns(values: Mapping[str, float]) -> dict[str, float]:
    """A pattern for each module where they differ, the longest first: PEFT takes the first one
    that matches the end of a name.
    """
    if len(set(values.values())) == 1:
        return {}
    longest = sorted(values, key=len, reverse=True)
    return {module.replace(".", r"\."): values[module] for module in longest}


def match_names(targets: Sequence[str], base: Mapping[str, Tensor]) -> Callable[[str], str]:
    """How an adapter's names become the base's.

    Unchanged, without their first part, or with what the base has before them: checkpoints of a
    bare model lack the name under which a model with a head holds it, and adapters may be of
    either.
    """
    first = f"{targets[0].partition('.')[0]}."
    prefixes = [name.removesuffix(targets[0]) for name in base if name.endswith(f".{targets[0]}")]
    # What to replace, and by what.
    ways = [("", ""), (first, ""), *(("", prefix) for prefix in prefixes)]

    def rename(name: str, old: str, new: str) -> str | None:
        return new + name.removeprefix(old) if name.startswith(old) else None

    fitting = [way for way in ways if all(rename(target, *way) in base for target in targets)]
    if len(fitting) > 1 and fitting[0] != ("", ""):
        raise DareError(
            f"an adapter for {targets[0]!r} may mean several tensors: "
            f"{list_names([prefix + targets[0] for prefix in prefixes])}",
            "save it with the names of the base",
        )
    way = fitting[0] if fitting else ("", "")

    def to_base(name: str) -> str:
        renamed = rename(name, *way)
        return renamed if renamed is not None and renamed in base else name

    return to_base
