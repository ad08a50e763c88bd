"""Which files make up a model: a file, a directory, shards with an index, modules in folders of
their own; and what a directory without a model has instead.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final, TypeGuard

from darelib.core.text import LOG, ConfigError, DareError, as_text, list_names
from darelib.models.source import Source, check_links, download, is_on_hub
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
PIPELINE_FILE: Final = "model_index.json"  # of diffusers
ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
# How the names of files with weights begin, as transformers and as diffusers names them.
OWN_STEM: Final = "model"
DIFFUSERS_STEM: Final = "diffusion_pytorch_model"
# The components of a pipeline that are merged unless others are asked for: how their names begin.
MERGED_COMPONENTS: Final = ("transformer", "unet", "text_encoder", "prior")
# The files in which weights are looked for, the first one first.
KNOWN_FILES: Final = tuple(
    f"{stem}{end}"
    for stem in (OWN_STEM, DIFFUSERS_STEM)
    for end in (".safetensors", ".safetensors.index.json")
)
# The same of another precision, say fp16, or an index of such.
VARIANT: Final = re.compile(
    rf"({OWN_STEM}|{DIFFUSERS_STEM})\.(\w+\.safetensors|safetensors\.index\.\w+\.json)"
)
# What a directory may hold that is no model yet: the names of its files, what it is, what to do.
# In a pattern, * also stands for a slash.
OTHER_KINDS: Final = (
    (
        ("*.safetensors",),
        f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}, but other files",
        f"name the file or the folder; a pipeline has {PIPELINE_FILE}, shards have an index, and "
        "broken links want the model downloaded again",
    ),
    (
        ("*_optim_states.pt", "zero_to_fp32.py", "global_step*"),
        "is a training checkpoint of DeepSpeed, with the weights in pieces",
        "put them together with the script that lies in it, and give the result: "
        "python zero_to_fp32.py . merged --safe_serialization",
    ),
    (
        ("*.distcp",),
        "is a distributed checkpoint of PyTorch (FSDP), with the weights in pieces",
        "put them together, and give the result: "
        "accelerate merge-weights DIRECTORY_OF_DISTCP_FILES merged",
    ),
    (("*.gguf",), "holds GGUF files", GGUF_HINT),
    (
        (PIPELINE_FILE,),
        "is a pipeline without weights in safetensors files",
        "download its folders, too (unet, transformer, text_encoder, ...), in that format",
    ),
)
STATED_KEY: Final = "base_model_name_or_path"
BASE_HINT: Final = "give --base MODEL, or base_file in [models] of a --config file"


@dataclass(frozen=True)
class Layout:
    """Which files make up a model."""

    files: tuple[Path, ...]
    folder: Path | None = None  # the model directory, where it has one
    # The file of each tensor, according to an index.
    weight_map: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[Path, str] = field(default_factory=dict)  # folders, by the files in them
    # How the names of its files begin: of those in the folder itself, which has the name "", or of
    # those in each folder of a pipeline.
    stems: Mapping[str, str] = field(default_factory=dict)


def find_checkpoint(source: Source) -> Layout:
    """The files of a model that is a file, a directory or an index, and of its other modules; or
    of a pipeline.
    """
    path = source.path
    if (path / PIPELINE_FILE).is_file() and not find_weights(path):
        return _find_pipeline(source)
    layout = _find_model(source)
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
    return _find_folders(folder, paths, MODULES_FILE)


def find_components(folder: Path) -> list[str]:
    """The folders of a pipeline; none of any other model."""
    path = folder / PIPELINE_FILE
    check_links(folder, [path])
    table = read_json(path, str(path)) if path.is_file() else {}
    listed = [name for name, value in table.items() if isinstance(value, list)]
    return _find_folders(folder, listed, PIPELINE_FILE)


def find_parts(folder: Path) -> dict[str, bool]:
    """The folders in which parts of a model are stored: whether their weights are read."""
    modules = {name: (folder / name / WEIGHTS_FILE).is_file() for name in find_modules(folder)}
    return modules | {name: bool(find_weights(folder / name)) for name in find_components(folder)}


def _find_folders(folder: Path, names: Iterable[object], owner: str) -> list[str]:
    """Of names that a file of a model has, those of folders beside it."""
    known = {name: folder / name for name in names if isinstance(name, str) and _is_inside(name)}
    found = {name: path for name, path in known.items() if path.name == name and path.is_dir()}
    for path in found.values():
        if path.is_symlink():
            raise DareError(
                f"{str(path)!r}, which {owner} names, is a link",
                "links to folders are not followed; put a copy of the folder in its place",
            )
    return list(found)


def find_weights(folder: Path) -> Path | None:
    """The weights in a folder: a file, or an index; None: there are none by a name that is known.

    Where the plain ones are missing, those of the only other precision.
    """
    for name in KNOWN_FILES:
        if (folder / name).exists():
            return folder / name
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    variants = [name for name in names if VARIANT.fullmatch(name) and (folder / name).exists()]
    if len(variants) > 1:
        raise DareError(
            f"{str(folder)!r} has weights of several kinds: {list_names(variants)}",
            f"name one of the files, or rename it to {variants[0].partition('.')[0]}.safetensors",
        )
    return folder / variants[0] if variants else None


def _find_pipeline(source: Source) -> Layout:
    """The files of all components of a pipeline, whose tensors are named COMPONENT/NAME."""
    folder = source.path
    layout = Layout((), folder)
    for name in find_components(folder):
        path = find_weights(folder / name)
        if path is None:
            inside = sorted((folder / name).iterdir())
            pickles = [file for file in inside if file.name.endswith(PICKLE_SUFFIXES)]
            if pickles and name.startswith(MERGED_COMPONENTS):  # others are copied
                raise DareError(
                    f"{part_name(source, folder / name)!r} holds PyTorch pickles, not "
                    "safetensors files",
                    convert_hint(pickles[0]),
                )
            continue
        own = _find_files(source, path)
        weight_map = {f"{name}/{key}": f"{name}/{file}" for key, file in own.weight_map.items()}
        layout = replace(
            layout,
            files=(*layout.files, *own.files),
            weight_map={**layout.weight_map, **weight_map},
            modules={**layout.modules, **dict.fromkeys(own.files, name)},
            stems={**layout.stems, name: own.stems[""]},
        )
    if not layout.files:
        raise _explain_no_weights(source)
    return layout


def _find_model(source: Source) -> Layout:
    path = source.path
    folder = path.parent
    if path.is_dir():
        found = find_weights(path)
        if found is None:
            raise _explain_no_weights(source)
        return _find_files(source, found)
    layout = _find_files(source, path)
    # A file of another name may be among unrelated ones; one of these belongs to the directory that
    # it is in.
    belongs = path.name in KNOWN_FILES and (folder / CONFIG_FILE).exists()
    if belongs or path.suffix == ".json":
        return layout
    check_links(folder, [folder / CONFIG_FILE])  # which is read all the same
    return replace(layout, folder=None)


def _find_files(source: Source, path: Path) -> Layout:
    """The files of the weights in a folder, by one of them or an index."""
    layout = (
        _find_by_index(source, path) if path.suffix == ".json" else Layout((path,), path.parent)
    )
    is_diffusers = path.name.startswith(f"{DIFFUSERS_STEM}.")
    return replace(layout, stems={"": DIFFUSERS_STEM if is_diffusers else OWN_STEM})


def find_shards_beside(name: str, layout: Layout) -> Iterator[str]:
    """What to warn of where a directory holds two models: loaders may take either."""
    for own, stem in layout.stems.items() if layout.folder else ():
        folder = Path(layout.folder or "", own)
        weights = folder / f"{stem}.safetensors"
        index = folder / f"{stem}.safetensors.index.json"
        shards = [path.name for path in folder.glob(f"{stem}-*-of-*.safetensors")]
        if weights in layout.files and index.exists() and shards:
            yield (
                f"{name} has {weights.name}, which is read, and {index.name} with shards "
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


def _explain_no_weights(source: Source) -> DareError:
    """What a directory without a model has instead, in it or in a folder of it."""
    folder = source.path
    found = [
        path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*"))
    ]
    for patterns, words, hint in OTHER_KINDS:
        names = [name for pattern in patterns for name in fnmatch.filter(found, pattern)]
        if names:
            return DareError(f"{source.name!r} {words}: {list_names(sorted(names))}", hint)
    if any(name.endswith(PICKLE_SUFFIXES) and "/" not in name for name in found):
        return DareError(
            f"{source.name!r} holds PyTorch pickles, not safetensors files", convert_hint(folder)
        )
    return DareError(
        f"the directory {source.name!r} holds no model",
        f"it should have {WEIGHTS_FILE} or {INDEX_FILE}",
    )


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


# --- the base that adapters name ----------------------------------------------------------------


def is_name(stated: object) -> TypeGuard[str]:
    return isinstance(stated, str) and 0 < len(stated) <= 1000


def is_folder(stated: str) -> bool:
    """Whether a path of an adapter's is here. No adapter may have another machine asked."""
    return not re.match(r"[/\\]{2}", stated) and os.path.isdir(stated)


def find_base(adapters: Sequence[Source]) -> Source:
    """The base that all adapters name. It must be on this machine, or in its cache of the Hub:
    nothing is downloaded that nobody asked for.
    """
    if not adapters:
        raise ConfigError("there is no base model", BASE_HINT)
    trained = {_read_name(adapter): adapter.name for adapter in adapters}
    if len(trained) > 1:
        (one, first), (other, second), *_ = trained.items()
        raise ConfigError(
            f"{first!r} was trained on {one!r}, and {second!r} on {other!r}",
            f"adapters that are merged share a base; {BASE_HINT}",
        )
    [name] = trained
    base = Source(name, Path(name))
    if is_on_hub(base):
        with suppress(DareError):
            cached = download(base, is_cached=True)
            base = cached if any(cached.path.glob("*.safetensors")) else base
    if not is_folder(str(base.path)):
        raise ConfigError(
            f"{trained[name]!r} was trained on {name!r}, which is neither a directory here nor in "
            "the cache of the Hub",
            BASE_HINT,
        )
    LOG.info(f"base: {name} (named by the adapters)")
    return base


def _read_name(adapter: Source) -> str:
    """What an adapter calls its base; on the Hub, with the revision that it names."""
    path = download(adapter, [ADAPTER_CONFIG]).path
    is_file = path.name in (ADAPTER_FILE, ADAPTER_CONFIG)
    config = (path.parent if is_file else path) / ADAPTER_CONFIG
    table = read_json(config, str(config)) if os.path.isfile(config) else {}
    stated = table.get(STATED_KEY)
    if not is_name(stated):
        raise ConfigError(
            f"there is no base model, and {adapter.name!r} is no adapter that names one", BASE_HINT
        )
    revision = table.get("revision")
    is_branch = is_name(revision) and is_on_hub(Source(stated, Path(stated)))
    return f"{stated}@{revision}" if is_branch else stated
