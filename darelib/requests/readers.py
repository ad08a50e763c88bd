"""Configuration files: TOML here, other formats in their own rooms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from darelib.config import RULE_SETTINGS, SETTINGS, SWEEP_SETTINGS, Rule, check_setting, naming
from darelib.core.mask import MASK_NAME
from darelib.core.text import MAX_TOML, TOO_LONG, ConfigError, DareError, read_toml
from darelib.models.source import RECIPE_FILE, Source, is_template, list_recorded_parts
from darelib.requests.request import Request, explain_key

YAML_SUFFIXES: Final = (".yaml", ".yml")  # of mergekit's configurations
# The keys that each table of a configuration may have. [recipe] is there so that a recipe is itself
# a configuration.
TABLES: Final[dict[str, tuple[str, ...]]] = {
    "dare": tuple(SETTINGS),
    "models": ("base_file", "merge_files", "output_file", "tokenizer", "chat_template"),
    "examples": ("files", "base"),
    "rules": ("match", *RULE_SETTINGS),
    "sweep": (*SWEEP_SETTINGS, "rules"),
    "recipe": ("version", "mask", "seeds", "inputs", "files", "packed", "matched"),
}


def load_request(path: Path, **options: bool) -> Request:
    """Read a configuration, or the recipe of a merged file; its paths are relative to it.

    options: of what reads it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML + 1)
        if len(data) > MAX_TOML:
            raise ValueError(TOO_LONG)
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}: {error.strerror}",
            "check the path after --config",
        ) from None
    except ValueError as error:
        kind = "YAML" if path.suffix in YAML_SUFFIXES else "TOML"
        raise ConfigError(
            f"{path} is not valid {kind}: {error}", "see merge_config.toml for an example"
        ) from None
    request = READERS.get(path.suffix, parse_request)(text, str(path), path.parent, **options)
    if path.name == RECIPE_FILE:
        check_recipe(request, path)
    return request


def check_recipe(request: Request, path: Path) -> None:
    """Refuse what is in a model, and is no recipe: it could name any path."""
    if not request.inputs:
        raise DareError(
            f"the recipe of {str(path)!r} names no inputs",
            "only what this tool has merged has a recipe",
        )


def parse_request(text: str, path: str, folder: Path) -> Request:
    """A TOML configuration from its text.

    path: what to call it; folder: what paths in it are relative to.
    """
    tables = _parse_tables(text, path)
    dare, models, recipe = (tables.get(name, {}) for name in ("dare", "models", "recipe"))
    for key, value in dare.items():
        check_setting(key, value, f"{path}: [dare] {key}")
    names = {key: name for key, name in models.items() if key != "merge_files"}
    for key, name in names.items():
        if not isinstance(name, str) and not (key == "base_file" and is_stack(name)):
            raise ConfigError(
                f"{path}: [models] {key} must be a path in quotes, not {name!r}",
                f'write it as {key} = "PATH"',
            )
    files = models.get("merge_files", [])
    is_list = isinstance(files, list) and not is_stack(files)
    if not is_list or not all(isinstance(file, str) or is_stack(file) for file in files):
        raise ConfigError(
            f"{path}: [models] merge_files must be a list of paths, not {files!r}",
            'write it as merge_files = ["first.safetensors", "second.safetensors"]',
        )
    inputs = _parse_fingerprints(path, recipe)
    # What a recipe names is looked for later.
    read_model = Source.of if "recipe" in tables else Source.of_model
    with naming(f"{path}: [models] "):
        sources = {key: Source.of(name, folder) for key, name in names.items()}
        base = read_model(names["base_file"], folder) if "base_file" in names else None
        merge = tuple(read_model(file, folder) for file in files)
    if "recipe" in tables:
        parts = [model.name for source in (*sources.values(), *merge) for model in source.models]
        _check_names(path, names, [*parts, *(entry.get("file") for entry in inputs)])
        sources = {key: replace(own, recorded=own.name) for key, own in sources.items()}
    examples = _parse_examples(path, tables.get("examples", {}), folder)
    output = sources.get("output_file")
    rules = enumerate(tables.get("rules", ()), 1)
    return Request(
        dare=dare,
        base=base,
        merge=merge,
        output=output.path if output else None,
        tokenizer=sources.get("tokenizer"),
        chat_template=sources.get("chat_template"),
        rules=tuple(Rule.of(rule, f"{path}: rule {k}") for k, rule in rules),
        inputs=inputs,
        version=str(recipe.get("version", "")),
        packed=bool(recipe.get("packed")),
        sweep=tables.get("sweep", {}),
        **examples,
    )


def _parse_examples(path: str, table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What [examples] names: a file for each model and, if it takes part, one for the base."""
    files = table.get("files", [])
    base = table.get("base")
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{path}: [examples] files must be a list of paths, not {files!r}",
            'write it as files = ["math.jsonl", "code.jsonl"], one for each model',
        )
    if base is not None and not isinstance(base, str):
        raise ConfigError(
            f"{path}: [examples] base must be a path in quotes, not {base!r}",
            'write it as base = "general.txt"',
        )
    return {
        "examples": tuple(Source.of(file, folder) for file in files),
        "base_examples": Source.of(base, folder) if base else None,
    }


def is_stack(value: object) -> bool:
    """Whether a model is a list of layers of others, which are checked where it is read."""
    return isinstance(value, list) and any(isinstance(entry, dict) for entry in value)


def _parse_yaml(text: str, path: str, folder: Path, lenient: bool = False) -> Request:
    from darelib.requests.mergekit import parse_yaml  # which looks at models

    return parse_yaml(text, path, folder, lenient)


# What reads a configuration, by the suffix of its file; any other suffix is read as TOML.
READERS: Final[Mapping[str, Callable[..., Request]]] = {
    ".toml": parse_request,
    **dict.fromkeys(YAML_SUFFIXES, _parse_yaml),
}


def _parse_tables(text: str, path: str) -> dict[str, Any]:
    try:
        tables = read_toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", "see merge_config.toml for an example"
        ) from None
    for name, table in tables.items():
        if name not in TABLES:
            homes = [table for table, keys in TABLES.items() if name in keys]
            hint = f"put {name} under [{homes[0]}]" if homes else explain_key(name, TABLES)
            raise ConfigError(f"{path}: there is no table [{name}]", hint)
        if not isinstance(table, list if name == "rules" else dict):
            header = "[[rules]]" if name == "rules" else f"[{name}]"
            raise ConfigError(
                f"{path}: {name} must be a table", f"write {header} on a line of its own"
            )
        unknown = [key for key in table if name != "rules" and key not in TABLES[name]]
        if unknown:
            raise ConfigError(
                f"{path}: there is no key {unknown[0]!r} in [{name}]",
                explain_key(unknown[0], TABLES[name]),
            )
    return tables


def _check_names(path: str, names: Mapping[str, str], files: Sequence[Any]) -> None:
    """Refuse a recipe, which may be anybody's, that chooses what is read or where is written."""
    hint = "do not use it; a configuration of your own, without [recipe], may name any path"
    if "output_file" in names:
        raise ConfigError(f"{path}: a recipe names no output_file", hint)
    for name in files:
        if not list_recorded_parts(name) and not (isinstance(name, str) and is_template(name)):
            raise ConfigError(
                f"{path}: a recipe names no path that is absolute or leads up, like {name!r}", hint
            )


def _parse_fingerprints(path: str, recipe: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The sizes and digests that a recipe holds its inputs to."""
    mask = recipe.get("mask", MASK_NAME)
    if mask != MASK_NAME:
        raise ConfigError(
            f"{path}: this recipe draws its mask with {mask!r}, "
            f"and this version of dare with {MASK_NAME!r}",
            "run it with the version of dare that it names, or take its [recipe] table out",
        )
    inputs = recipe.get("inputs", [])
    if not isinstance(inputs, list) or not all(isinstance(entry, dict) for entry in inputs):
        raise ConfigError(
            f"{path}: [recipe] inputs must be a list of tables", "take the [recipe] table out"
        )
    return tuple(inputs)
