"""A configuration as a file: what a request asks for, in TOML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from darelib.config import Rule
from darelib.core.text import LOG, ConfigError, as_text
from darelib.models.hub import is_on_hub
from darelib.models.source import Source
from darelib.output.destination import check_apart
from darelib.output.newfile import write_new_file
from darelib.requests.readers import YAML_SUFFIXES
from darelib.requests.request import Request


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
    check_new_file(path, "configuration", force)


def write_request(request: Request, path: Path, force: bool) -> None:
    """Write what a request asks for as a configuration that asks for the same."""
    check_new_config(path, force)
    sources = [
        source for source in (request.base, *request.merge) if source and source.path.exists()
    ]
    check_apart(repr(str(path)), path, [(source.name, source.path) for source in sources])
    write_config(path, format_settings(request.dare, request.rules, request.notes), request)


def format_settings(
    dare: Mapping[str, Any], rules: Iterable[Rule], notes: Mapping[str, str]
) -> str:
    """Settings and rules as TOML. notes: comments on some of them."""
    lines = ["[dare]"]
    for key, value in dare.items():
        lines.append(f"{key} = {as_literal(value)}" + (f"  # {notes[key]}" if key in notes else ""))
    for rule in rules:
        lines += [
            "",
            "[[rules]]",
            *(f"{key} = {as_literal(value)}" for key, value in rule.as_table().items()),
        ]
    return "\n".join(lines)


def write_config(path: Path, settings: str, request: Request) -> None:
    """Write settings, as TOML, and the models of a request, with paths that lead there from the file."""
    import tomli_w

    def name(source: Source) -> str:
        known = source.recorded or (source.name if is_on_hub(source) else "")
        return path_from(dataclasses.replace(source, recorded=known), folder)

    assert request.base is not None
    folder = path.absolute().parent.resolve()
    own = f"{path.stem}_merged{'' if request.tokenizer or not request.base.path.is_file() else '.safetensors'}"
    models: dict[str, Any] = {
        "base_file": name(request.base),
        "merge_files": [name(model) for model in request.merge],
    }
    models["output_file"] = (
        path_from(Source(str(request.output), request.output), folder) if request.output else own
    )
    for key, source in (("tokenizer", request.tokenizer), ("chat_template", request.chat_template)):
        if source:
            models[key] = source.name if source.is_word else name(source)
    write_new_file(path, [f"{settings.rstrip()}\n\n{tomli_w.dumps({'models': models})}".encode()])
    LOG.info(f"wrote {path}")


def as_literal(value: Any) -> str:
    """A setting in one line of TOML."""
    import tomli_w

    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "[" + ", ".join(map(as_literal, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def path_from(source: Source, folder: Path) -> str:
    """A path that leads from a folder to a model, if the user did not give an absolute one; or its name on the Hub."""
    if source.recorded or os.path.isabs(os.path.expanduser(source.name)):
        return source.recorded or source.name
    physical = (
        source.path.parent.resolve() / source.path.name
    )  # a link itself is kept: what it leads to may move
    try:
        return as_text(Path(os.path.relpath(physical, folder)).as_posix())
    except ValueError:  # on another drive
        return as_text(physical)
