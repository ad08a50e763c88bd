"""Configuration files and flags: what a user asks for, before any model is opened."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from darelib.config import CHECKS, RULE_SETTINGS, SWEEP_SETTINGS, Rule, check_setting
from darelib.mask import MASK_NAME
from darelib.text import ConfigError, as_text, nearest

MAX_TOML: Final = 1 << 20  # bytes, so that a hostile file takes little memory and time
TOO_LONG: Final = f"it is longer than {MAX_TOML:,} bytes"
# Python's parser takes memory and time with the square of the number of parts of a dotted key.
LONG_KEY: Final = re.compile(
    r"""(?<![\w\\-])(?:(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}"""  # bare or quoted parts
)
YAML_SUFFIXES: Final = (".yaml", ".yml")  # of mergekit's configurations
# The files that a model in a directory is named by; the directory's name says more.
MODEL_FILES: Final = (
    "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "adapter_config.json",
)  # fmt: skip
# The keys that each table of a configuration may have. [recipe] is there so that a recipe is itself a configuration.
TABLES: Final[dict[str, tuple[str, ...]]] = {
    "dare": tuple(CHECKS),
    "models": ("base_file", "merge_files", "output_file", "tokenizer", "chat_template"),
    "rules": ("match", *RULE_SETTINGS),
    "sweep": (*SWEEP_SETTINGS, "rules", "seed"),
    "recipe": ("version", "mask", "seeds", "inputs", "files", "packed"),
}

# What a tokenizer may be besides a model's: the base's, or all models' tokens together.
BASE, UNION = ("base", "union")
AUTO: Final = "auto"  # the chat template that most models have
# What other tools and the papers call our settings.
FOREIGN_KEYS: Final = {
    "density": "drop_rate = 1 - density",
    "weight_mask_rate": "drop_rate, the same number",
    "merge_method": 'method: dare_linear is "linear", dare_ties is "ties"',
    "weight": "weights, a list with one number per model",
    "lambda": "lambda_coeff",
    "scaling_coefficient": "lambda_coeff",
    "t": "slerp_t",
    "out_dtype": "dtype",
    "torch_dtype": "dtype",
    "random_seed": "seed",
    "base_model": "base_file under [models]",
    "tokenizer_source": "tokenizer under [models]",
    "tokenizer_from": "tokenizer",
    "q": "rescale_q",
}


@dataclass(frozen=True)
class Source:
    """A model as the user named it, and where that is on this machine."""

    name: str
    path: Path
    recorded: str = ""  # what recipes call it, where that is not the last part of its path: its name on the Hub

    @property
    def pinned(self) -> str:
        """Its name and commit, if it lies in a cache of the Hub, where directories are called by their commits."""
        return self.recorded if self.recorded.endswith(f"@{self.path.name}") else ""

    @classmethod
    def of(cls, given: str | Path | Source, folder: Path | None = None) -> Source:
        if isinstance(given, Source):
            return given
        if not isinstance(given, str | Path):
            raise ConfigError(f"a model must be a path or a name, not {type(given).__name__}", "like 'models/base'")
        if not str(given):
            raise ConfigError("the path of a model is empty", "perhaps a variable of the shell is not set")
        name = as_text(given)  # the recipe, which names it, must be text
        path = Path(given)
        with suppress(ValueError):  # of what cannot be a path, as will be found when it is used
            path = Path(os.path.expanduser(given))
        return cls(name, Path(folder or "", path))

    @property
    def is_word(self) -> bool:
        """Whether a tokenizer or a chat template is a word, or the template itself, and not a path."""
        return self.name in (BASE, UNION, AUTO) or is_template(self.name)


def is_template(text: str) -> bool:
    """Whether a text is a chat template, and not the path of one."""
    return "{{" in text or "{%" in text


def recorded_name(source: Source) -> str:
    """What a recipe calls a model: its name and commit on the Hub, or the last part of its path."""
    path = Path(os.path.abspath(source.path))
    return source.recorded or as_text(path.parent.name if path.name in MODEL_FILES else path.name)


@dataclass(frozen=True)
class Request:
    """What a configuration file, with flags on top, asks for."""

    dare: dict[str, Any] = field(default_factory=dict)
    base: Source | None = None
    merge: tuple[Source, ...] = ()
    output: Path | None = None
    tokenizer: Source | None = None
    chat_template: Source | None = None
    rules: tuple[Rule, ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()  # fingerprints of base and models, where the file is a recipe
    version: str = ""  # of the tool that made the recipe
    packed: bool = False  # whether that is a packed model
    sweep: Mapping[str, Any] = field(default_factory=dict)  # what a search may choose
    notes: Mapping[str, str] = field(default_factory=dict)  # on settings: what a written configuration says of them


def load_request(path: Path) -> Request:
    """Read a configuration, or a recipe taken out of a merged file. Paths in it are relative to it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML + 1)
        if len(data) > MAX_TOML:
            raise ValueError(TOO_LONG)
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {str(path)!r}", "check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", "give --config a TOML file") from None
    except ValueError as error:
        kind = "YAML" if path.suffix in YAML_SUFFIXES else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}", "see merge_config.toml for an example") from None
    return READERS.get(path.suffix, parse_request)(text, str(path), path.parent)


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML text says; what is not TOML, or would take too much memory or time, is a ValueError."""
    if len(text.encode(errors="replace")) > MAX_TOML:
        raise ValueError(TOO_LONG)
    if LONG_KEY.search(text):
        raise ValueError("one of its keys has too many parts")
    return tomllib.loads(text)


def parse_request(text: str, path: str, folder: Path) -> Request:
    """A TOML configuration from its text. path: what to call it; folder: what paths in it are relative to."""
    tables = _parse_tables(text, path)
    dare, models, recipe = (tables.get(name, {}) for name in ("dare", "models", "recipe"))
    for key, value in dare.items():
        check_setting(key, value, f"{path}: [dare] {key}")
    for key in ("base_file", "output_file", "tokenizer", "chat_template"):
        if not isinstance(models.get(key, ""), str):
            raise ConfigError(
                f"{path}: [models] {key} must be a path in quotes, not {models[key]!r}", f'write it as {key} = "PATH"'
            )
    files = models.get("merge_files", [])
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{path}: [models] merge_files must be a list of paths, not {files!r}",
            'write it as merge_files = ["first.safetensors", "second.safetensors"]',
        )
    return Request(
        dare=dare,
        base=Source.of(models["base_file"], folder) if "base_file" in models else None,
        merge=tuple(Source.of(file, folder) for file in files),
        output=Source.of(models["output_file"], folder).path if "output_file" in models else None,
        tokenizer=Source.of(models["tokenizer"], folder) if "tokenizer" in models else None,
        chat_template=Source.of(models["chat_template"], folder) if "chat_template" in models else None,
        rules=tuple(Rule.of(rule, f"{path}: rule {k}") for k, rule in enumerate(tables.get("rules", ()), 1)),
        inputs=_parse_fingerprints(path, recipe),
        version=str(recipe.get("version", "")),
        packed=bool(recipe.get("packed")),
        sweep=tables.get("sweep", {}),
    )


def _parse_yaml(text: str, path: str, folder: Path) -> Request:
    """A configuration of mergekit's, whose room is above this one: it has to look at models."""
    return cast(Request, importlib.import_module("darelib.mergekit").parse_yaml(text, path, folder))


# What reads a configuration, by the suffix of its file; any other suffix is read as TOML.
READERS: Final[Mapping[str, Callable[[str, str, Path], Request]]] = {
    ".toml": parse_request,
    **dict.fromkeys(YAML_SUFFIXES, _parse_yaml),
}


def _parse_tables(text: str, path: str) -> dict[str, Any]:
    try:
        tables = read_toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "see merge_config.toml for an example") from None
    for name, table in tables.items():
        if name not in TABLES:
            home = next((f"put {name} under [{t}]" for t, keys in TABLES.items() if name in keys), None)
            raise ConfigError(f"{path}: there is no table [{name}]", home or explain_key(name, TABLES))
        if not isinstance(table, list if name == "rules" else dict):
            header = "[[rules]]" if name == "rules" else f"[{name}]"
            kind = "a list of tables" if name == "rules" else "a table"
            raise ConfigError(f"{path}: {name} must be {kind}", f"write {header} on a line of its own")
        for key in table if isinstance(table, dict) else ():
            if key not in TABLES[name]:
                raise ConfigError(f"{path}: there is no key {key!r} in [{name}]", explain_key(key, TABLES[name]))
    return tables


def explain_key(key: str, known: Collection[str]) -> str:
    """What a key of another tool is called here, or the known key that is spelled most like it."""
    if key in FOREIGN_KEYS:
        return f"here it is {FOREIGN_KEYS[key]}"
    return nearest(key, known) if known else ""


def _parse_fingerprints(path: str, recipe: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The sizes and digests that a recipe holds its inputs to."""
    mask = recipe.get("mask", MASK_NAME)
    if mask != MASK_NAME:
        raise ConfigError(
            f"{path}: this recipe draws its mask with {mask!r}, and this version of dare with {MASK_NAME!r}",
            "run it with the version of dare that it names, or take its [recipe] table out",
        )
    inputs = recipe.get("inputs", [])
    if not isinstance(inputs, list) or not all(isinstance(entry, dict) for entry in inputs):
        raise ConfigError(f"{path}: [recipe] inputs must be a list of tables", "take the [recipe] table out")
    return tuple(inputs)


def layer_flags(request: Request, flags: Mapping[str, Any]) -> Request:
    """Flags over a configuration. Rules given by flags come before those of the file, so that they win."""
    dare = dict(request.dare)
    for name in CHECKS:
        if name in flags:
            value = flags[name]
            # One number is for all models; weights are a list even where there is one model.
            value = value[0] if isinstance(value, list) and len(value) == 1 and name != "weights" else value
            check_setting(name, value, flag_of(name))
            dare[name] = value
    names = ("base", "tokenizer", "chat_template")
    changes: dict[str, Any] = {name: Source.of(flags[name]) for name in names if name in flags}
    if "merge" in flags:
        changes["merge"] = tuple(map(Source.of, flags["merge"]))
    if "output" in flags:
        changes["output"] = Source.of(flags["output"]).path
    rules = (*map(parse_rule, flags.get("rules", ())), *request.rules)
    return dataclasses.replace(request, dare=dare, rules=rules, **changes)


def parse_axes(texts: Iterable[str]) -> dict[str, Any]:
    """What a search may choose, as flags: settings with their values or ranges, as in TOML."""
    axes: dict[str, Any] = {}
    for text in texts:
        try:
            axes |= read_toml(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"--vary {text!r} must be SETTING=VALUES", "like --vary 'drop_rate=[0, 0.5]'") from None
    return axes


def flag_of(name: str) -> str:
    """The flag of a setting, or of an option of the command."""
    others = {"lambda_coeff": "--lambda", "rules": "--rule"}
    return others.get(name, f"--{name.replace('_', '-')}")


def parse_rule(text: str) -> Rule:
    """A rule as a flag: the pattern, a colon, and settings as in TOML, with commas between them."""
    pattern, colon, assignments = text.rpartition(":")
    example = "like --rule '*embed_tokens*:drop_rate=0.5'"
    if not colon:
        raise ConfigError(f"--rule {text!r} has no colon after its pattern", example)
    try:
        [table] = tomllib.loads(f"rule = {{ {assignments} }}").values()  # a line end could begin another
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--rule {text!r} must be PATTERN:SETTING=VALUE", f'{example}; words in quotes, like drop="magnitude"'
        ) from None
    return Rule.of({**table, "match": pattern}, f"--rule {text!r}")
