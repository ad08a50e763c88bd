"""Which files make up a model: a file, a directory, shards with an index, modules in folders of
their own; and what a directory without a model has instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from darelib.core.text import DareError, as_text, list_names
from darelib.models.source import Source, check_links
from darelib.models.tensorfile import (
    AGAIN_HINT,
    GGUF_HINT,
    MAX_INDEX,
    MAX_JSON,
    MAX_NAME,
    PICKLE_SUFFIXES,
    convert_hint,
    open_regular,
    read_json,
)

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CONFIG_FILE: Final = "config.json"
MODULES_FILE: Final = "modules.json"  # of sentence-transformers
ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"


@dataclass(frozen=True)
class Layout:
    """Which files make up a model."""

    files: tuple[Path, ...]
    folder: Path | None = None  # the model directory, where it has one
    # The file of each tensor, according to an index.
    weight_map: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[Path, str] = field(default_factory=dict)  # folders, by the files in them


def find_checkpoint(source: Source) -> Layout:
    """The files of a model that is a file, a directory or an index, and of its other modules."""
    layout = _find_weights(source)
    folder = layout.folder
    found = {folder / name / WEIGHTS_FILE: name for name in find_modules(folder)} if folder else {}
    modules = {path: name for path, name in found.items() if path.is_file()}
    return replace(layout, files=(*layout.files, *modules), modules=modules)


def find_modules(folder: Path) -> list[str]:
    """The folders of a model in which modules besides the transformer are stored."""
    try:
        with open_regular(folder / MODULES_FILE) as file:
            paths = [module["path"] for module in json.loads(file.read(MAX_JSON))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # it has no list of modules, or one that nobody can read
    known = {path: folder / path for path in paths if isinstance(path, str) and _is_inside(path)}
    found = {name: path for name, path in known.items() if path.name == name and path.is_dir()}
    for path in found.values():
        if path.is_symlink():
            raise DareError(
                f"{str(path)!r}, which {MODULES_FILE} names, is a link",
                "links to folders are not followed; put a copy of the folder in its place",
            )
    return list(found)


def _find_weights(source: Source) -> Layout:
    path = source.path
    folder = path if path.is_dir() else path.parent
    is_directory = path == folder
    if is_directory:
        present = [name for name in (WEIGHTS_FILE, INDEX_FILE) if (folder / name).exists()]
        if not present:
            raise _explain_no_weights(source, sorted(os.listdir(folder)))
        path = folder / present[0]
    if path.suffix == ".json":
        return _find_by_index(source, path)
    # A file of another name may be among unrelated ones; this one belongs to the directory that it
    # is in.
    is_directory |= path.name == WEIGHTS_FILE and (folder / CONFIG_FILE).exists()
    if not is_directory:
        check_links(folder, [folder / CONFIG_FILE])  # which is read all the same
    return Layout((path,), folder if is_directory else None)


def find_shards_beside(name: str, layout: Layout) -> Iterator[str]:
    """What to warn of where a directory holds two models: loaders may take either."""
    folder = layout.folder
    if folder and layout.files == (folder / WEIGHTS_FILE,) and (folder / INDEX_FILE).exists():
        shards = [path.name for path in folder.glob("model-*-of-*.safetensors")]
        if shards:
            yield (
                f"{name} has {WEIGHTS_FILE}, which is read, and {INDEX_FILE} with shards "
                f"({list_names(sorted(shards))}), which are not; remove what is out of date"
            )


def part_name(source: Source, path: Path) -> str:
    """What to call a file of a model, in terms of the name that the user gave."""
    if source.path == path:
        return source.name
    if source.path.is_dir():
        return f"{source.name}/{path.relative_to(source.path).as_posix()}"
    return os.path.join(
        os.path.dirname(source.name), path.relative_to(source.path.parent).as_posix()
    )


def _explain_no_weights(source: Source, names: list[str]) -> DareError:
    """What a directory without a model has instead."""
    shown = repr(source.name)
    broken = next((name for name in (WEIGHTS_FILE, INDEX_FILE) if name in names), "")
    tensors = [name for name in names if name.endswith(".safetensors")]
    kinds = (
        (broken, f"{broken!r} in {shown} is a broken link", "download the model again"),
        (
            tensors,
            f"the directory {shown} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, but "
            f"{list_names(tensors)}",
            "name the file, or put the index beside its shards",
        ),
        (
            any(name.endswith(".gguf") for name in names),
            f"{shown} holds GGUF files",
            GGUF_HINT,
        ),
        (
            any(name.endswith(PICKLE_SUFFIXES) for name in names),
            f"{shown} holds PyTorch pickles, not safetensors files",
            convert_hint(source.path),
        ),
        (
            True,
            f"the directory {shown} holds no model",
            f"it should have {WEIGHTS_FILE} or {INDEX_FILE}",
        ),
    )
    return next(DareError(words, hint) for is_so, words, hint in kinds if is_so)


def _find_by_index(source: Source, path: Path) -> Layout:
    """The files that an index names, which must lie beside it."""
    shown = part_name(source, path)
    if path != source.path:
        check_links(path.parent, [path])
    weight_map = read_json(path, shown, MAX_INDEX).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict):
        raise DareError(
            f"{shown!r} is JSON without a weight_map", "give a model directory or its index file"
        )
    plain: dict[str, str] = {}  # the files' names, as paths are written
    for tensor, file in weight_map.items():
        if len(tensor) > MAX_NAME or (isinstance(file, str) and len(file) > MAX_NAME):
            raise DareError(
                f"{shown!r} is not valid: it has names of more than {MAX_NAME:,} characters",
                AGAIN_HINT,
            )
        if not isinstance(file, str) or not (file in plain or _is_inside(file)):
            raise DareError(
                f"{shown!r} says that tensor {tensor!r} is in {file!r}, which is no file beside it",
                "such an index may lead anywhere, so it is not followed; get the model from "
                "somewhere you trust",
            )
        plain[file] = plain.get(file) or PurePosixPath(file).as_posix()
    files = tuple(path.parent / name for name in sorted(set(plain.values())))
    return Layout(files, path.parent, {tensor: plain[file] for tensor, file in weight_map.items()})


def _is_inside(name: str) -> bool:
    """Whether a name can only lead into the directory that it is relative to, on any system."""
    flavours = (PurePosixPath(name), PureWindowsPath(name))
    leaves = any(path.anchor or ".." in path.parts for path in flavours)
    return (
        not leaves
        and bool(PurePosixPath(name).parts)
        and as_text(name).isprintable()
        and as_text(name) == name
    )
