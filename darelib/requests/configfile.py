"""A configuration as a file: what a request asks for, in TOML."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tomli_w

from darelib.config import Rule
from darelib.core.text import LOG, ConfigError, as_text, print_result
from darelib.models.source import Source, download, is_on_hub
from darelib.output.destination import check_apart
from darelib.output.new_files import write_new_file
from darelib.output.tokenizer import TOKENIZER_PATTERNS
from darelib.requests.readers import YAML_SUFFIXES
from darelib.requests.request import Request

STDOUT: Final = Path("-")  # as a configuration: it is printed


def check_new_file(path: Path, what: str, force: bool) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for the {what} {str(path)!r}", "make it first")
    if not force and os.path.lexists(path):
        raise ConfigError(
            f"{str(path)!r} exists already", "choose another name, or add --force to replace it"
        )


def check_new_config(path: Path, force: bool) -> None:
    if path.suffix in YAML_SUFFIXES:  # which would be read as mergekit's
        raise ConfigError(
            f"the configuration is TOML, and {str(path)!r} is a name for YAML",
            "let it end in .toml",
        )
    if path != STDOUT:
        check_new_file(path, "configuration", force)


def write_request(request: Request, path: Path, force: bool) -> None:
    check_new_config(path, force)
    sources = [source for source in (request.base, *request.merge) if source]
    parts = [part for source in sources for part in source.parts]
    inputs = [(part.name, part.path) for part in parts if part.path.exists()]
    check_apart(repr(str(path)), path, inputs if path != STDOUT else ())
    settings = format_settings(request.dare, request.rules)
    if request.sweep:
        settings += f"\n{format_table('[sweep]', request.sweep)}"
    write_config(path, settings, request)


def format_settings(dare: Mapping[str, Any], rules: Iterable[Rule]) -> str:
    tables = [format_table("[dare]", dare)]
    tables += [format_table("[[rules]]", rule.as_table()) for rule in rules]
    return "\n".join(tables)


def format_table(header: str, table: Mapping[str, Any]) -> str:
    """A table as TOML, a setting a line: what is a table itself would end it otherwise."""
    lines = [f"{key} = {as_literal(value)}\n" for key, value in table.items()]
    return "".join([f"{header}\n", *lines])


def write_config(path: Path, settings: str, request: Request) -> None:
    """Write settings, as TOML, and a request's models, with paths that lead there from the file."""
    assert request.base is not None
    folder = path.absolute().parent.resolve()
    output = "merged" if path == STDOUT else f"{path.stem}_merged"
    if request.base.path.is_file() and not request.tokenizer:
        output += ".safetensors"
    if request.output:
        output = path_from(folder, str(request.output), request.output)
    models: dict[str, Any] = {
        "base_file": name_from(folder, request.base),
        "merge_files": [name_from(folder, model) for model in request.merge],
        "output_file": output,
    }
    others = {"tokenizer": request.tokenizer, "chat_template": request.chat_template}
    models |= {
        key: source.name if source.is_word else avoid_word(name_from(folder, source))
        for key, source in others.items()
        if source
    }
    tables: dict[str, Any] = {"models": models}
    if request.examples:
        files = [path_from(folder, file.name, file.path) for file in request.examples]
        tables["examples"] = {"files": files}
        if base := request.base_examples:
            tables["examples"]["base"] = path_from(folder, base.name, base.path)
    text = f"{settings.rstrip()}\n\n{tomli_w.dumps(tables)}"
    if path == STDOUT:
        print_result(text.rstrip())
        return
    write_new_file(path, [text.encode()])
    LOG.info(f"wrote {path}")


def pin_models(request: Request) -> Request:
    """The same with models of the Hub downloaded, by their commits: a branch may move meanwhile."""
    assert request.base is not None
    return dataclasses.replace(
        request,
        base=download(request.base),
        merge=tuple(map(download, request.merge)),
        tokenizer=request.tokenizer and pin_tokenizer(request.tokenizer),
        chat_template=request.chat_template and pin_tokenizer(request.chat_template),
    )


def pin_tokenizer(source: Source) -> Source:
    """A tokenizer or a chat template by its commit, if it is on the Hub."""
    if source.is_word or not is_on_hub(source):
        return source
    return Source.of(download(source, TOKENIZER_PATTERNS).recorded)


def as_literal(value: Any) -> str:
    """A setting in one line of TOML, where tomli_w writes a line for each entry of a list."""
    if isinstance(value, dict):
        keys = [key if key.isidentifier() else as_literal(key) for key in value]
        pairs = zip(keys, map(as_literal, value.values()), strict=True)
        return "{" + ", ".join(f"{key} = {entry}" for key, entry in pairs) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + ", ".join(map(as_literal, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def name_from(folder: Path, source: Source) -> Any:
    """A model's name on the Hub, or a path that leads to it from a folder; or its slices."""
    if source.slices:
        return [each.as_table(name_from(folder, each.source)) for each in source.slices]
    if source.joined:
        return "+".join(name_from(folder, part) for part in source.joined)
    if source.pinned or is_on_hub(source):
        return source.pinned or source.name
    return path_from(folder, source.name, source.path)


def avoid_word(path: str) -> str:
    """The path of a tokenizer or a chat template, for what might be read as a word."""
    return f"./{path}" if Source.of(path).is_word else path


def path_from(folder: Path, given: str, path: Path) -> str:
    """A path that leads from a folder to another one, if the user did not give an absolute one."""
    if os.path.isabs(os.path.expanduser(given)):
        return as_text(given)
    physical = path.parent.resolve() / path.name  # a link itself is kept: what it leads to may move
    try:
        return as_text(Path(os.path.relpath(physical, folder)).as_posix())
    except ValueError:  # on another drive
        return as_text(physical)
