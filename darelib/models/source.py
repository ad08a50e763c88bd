"""A model as the user named it, and where it is: on this machine, or on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from darelib.config import is_count
from darelib.core.text import LISTED, ConfigError, DareError, as_text, install_hint, nearest
from darelib.models.tensorfile import PICKLE_SUFFIXES, WEIGHT_SUFFIXES
from darelib.models.vocabulary import TEMPLATES

# The files that a model in a directory is named by; the directory's name says more.
MODEL_FILES: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
    "pytorch_lora_weights.safetensors",
)
RECIPE_FILE: Final = "dare_recipe.toml"  # in the directory of a merged model
# What a tokenizer may be besides a model's: the base's, or all models' tokens together.
BASE = "base"
UNION = "union"
AUTO: Final = "auto"  # the chat template that most models have
SLICE: Final = '{model = "models/a", layers = [0, 16]}'
# org/name, or org/name@revision
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True)
class Source:
    """A model as the user named it, and where that is on this machine."""

    name: str
    path: Path
    # What recipes call it, where that is not its path: its name on the Hub.
    recorded: str = ""
    # Of a model with an adapter on top: the two. Its path is the model's.
    joined: tuple[Source, ...] = ()
    # Of a model that is made of layers of others: these. Its path is the first one's.
    slices: tuple[Slice, ...] = ()

    @property
    def parts(self) -> tuple[Source, ...]:
        """All that must be opened for it."""
        return tuple(part for model in self.models for part in model.joined or (model,))

    @property
    def models(self) -> tuple[Source, ...]:
        """The models that it is made of, each once; itself, unless it is made of others."""
        return tuple(dict.fromkeys(each.source for each in self.slices)) or (self,)

    @property
    def pinned(self) -> str:
        """Its name and commit, if it is in a cache of the Hub, where directories are commits."""
        return self.recorded if self.recorded.endswith(f"@{self.path.name}") else ""

    @classmethod
    def of(cls, given: Given, folder: Path | None = None) -> Self:
        if isinstance(given, cls):
            return given
        if isinstance(given, list | tuple) and given:
            return cls.stack([Slice.of(entry, folder, cls.of) for entry in given])
        if not isinstance(given, str | Path):
            raise ConfigError(
                f"a model must be a path or a name, not {type(given).__name__}",
                f"like 'models/base', or layers of models: [{SLICE}, ...]",
            )
        if not str(given):
            raise ConfigError(
                "the path of a model is empty", "perhaps a variable of the shell is not set"
            )
        name = as_text(given)  # the recipe, which names it, must be text
        path = Path(given)
        with suppress(ValueError):  # of what cannot be a path, as will be found when it is used
            path = Path(os.path.expanduser(given))
        return cls(name, Path(folder or "", path))

    @classmethod
    def join(cls, model: Source, adapter: Source) -> Self:
        return cls(f"{model.name}+{adapter.name}", model.path, joined=(model, adapter))

    @classmethod
    def of_model(cls, given: Given, folder: Path | None = None) -> Self:
        """The same of what may have an adapter on top: where there is no such path, MODEL+ADAPTER
        means both.
        """
        if isinstance(given, list | tuple) and given:
            return cls.stack([Slice.of(entry, folder, cls.of_model) for entry in given])
        whole = cls.of(given, folder)
        if isinstance(given, cls) or os.path.lexists(whole.path):
            return whole
        pairs = [[cls.of(part, folder) for part in pair] for pair in list_splits(str(given))]
        here = [pair for pair in pairs if all(os.path.lexists(part.path) for part in pair)]
        if len(here or pairs) > 1:
            raise ConfigError(
                f"there is no file or directory {whole.name!r}, and a model can have one adapter "
                "on top, not several",
                "write MODEL+ADAPTER, or merge the adapters as models of their own",
            )
        return cls.join(*(here or pairs)[0]) if pairs else whole

    @classmethod
    def stack(cls, slices: Sequence[Slice]) -> Self:
        name = " + ".join(map(str, slices[:LISTED]))
        more = f" + {len(slices) - LISTED} more" if len(slices) > LISTED else ""
        return cls(name + more, slices[0].source.path, slices=tuple(slices))

    @property
    def arrangement(self) -> list[tuple[int, int, int]]:
        """Which layers of which of its models follow one another."""
        return [(self.models.index(each.source), each.start, each.stop) for each in self.slices]

    def find_models(self, find: Callable[[Source], Source]) -> Source:
        """The same, with its models as they are found."""
        if not self.slices:
            return find(self)
        known = {model: find(model) for model in self.models}
        return Source.stack([replace(each, source=known[each.source]) for each in self.slices])

    @property
    def is_word(self) -> bool:
        """Whether a tokenizer or a chat template is a word or the template itself, not a path."""
        has_template = self.name in TEMPLATES and is_missing(self.path)
        # A recipe does not say that a tokenizer is the base's: this is an input called base.
        is_base = self.name == BASE and not self.recorded
        return has_template or is_base or self.name in (UNION, AUTO) or is_template(self.name)


def list_splits(name: str) -> list[tuple[str, str]]:
    """The ways to read a name as that of a model and of an adapter on top."""
    marks = [k for k, sign in enumerate(name) if sign == "+" and 0 < k < len(name) - 1]
    return [(name[:k], name[k + 1 :]) for k in marks]


@dataclass(frozen=True)
class Slice:
    """Layers of a model, from start up to stop, which is left out."""

    source: Source
    start: int
    stop: int

    @classmethod
    def of(cls, given: Any, folder: Path | None, read: Callable[..., Source]) -> Self:
        """read: what gives the source of a model by its name."""
        table = given if isinstance(given, dict) else {}
        layers = table.get("layers")
        ends = layers if isinstance(layers, list | tuple) else []
        is_range = len(ends) == 2 and all(is_count(end, 0) for end in ends)
        if table.keys() != {"model", "layers"} or not is_range or ends[0] > ends[1]:
            raise ConfigError(f"{given!r} does not name layers of a model", f"write {SLICE}")
        source = read(table["model"], folder)
        if source.slices:
            raise ConfigError("layers of layers are not a model", f"write {SLICE}")
        return cls(source, *ends)

    def as_table(self, name: str) -> dict[str, Any]:
        return {"model": name, "layers": [self.start, self.stop]}

    def __str__(self) -> str:
        return f"{self.source.name}[{self.start}:{self.stop}]"


# A model as a script may give it; a list is one of slices.
Given: TypeAlias = str | Path | Source | Sequence[Mapping[str, Any]]


def is_inner_path(name: str) -> bool:
    """Whether a name is a path that leads down from wherever it is looked for."""
    path = Path(name)
    return bool(path.parts) and not path.anchor and ".." not in path.parts


def list_recorded_parts(name: object) -> list[tuple[str, ...]]:
    """The ways to read what a recipe calls a model: a path, or those of a model and an adapter."""
    ways = [(name,), *list_splits(name)] if isinstance(name, str) else []
    return [way for way in ways if all(map(is_inner_path, way))]


# The folders of a model, and of an adapter behind a plus; but one may be called c++. They begin
# where a name does: a pattern that could begin anywhere takes the square of a long name's length.
FOLDERS: Final = re.compile(r"(?:(?<![^/])|(?<=\+)(?=[^+/]))(?:[^+/]|\+(?=[+/]))*+/")


def last_parts(recorded: str) -> str:
    """What a recipe calls a model, or a model and an adapter, without the folders they are in."""
    return FOLDERS.sub("", recorded)


def is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def recorded_name(source: Source) -> str:
    """What a recipe calls a model: its name and commit on the Hub, or its path as it was given; of
    one that is absolute or leads up, the last part.
    """
    if source.slices:
        raise DareError(
            f"{source.name!r} is made of layers of models, and has no name to refer to it by",
            "merge the layers first, by passthrough, and give the result",
        )
    paths = (Path(source.name), Path(os.path.abspath(source.path)))
    given, whole = (path.parent if path.name in MODEL_FILES else path for path in paths)
    is_kept = is_inner_path(given.as_posix()) and not source.name.startswith("~")
    own = given.as_posix() if is_kept else as_text(whole.name)
    return source.recorded or "+".join(map(recorded_name, source.joined)) or own


def path_hint(source: Source) -> str:
    return (
        f"looked for {str(source.path.absolute())!r}; only paths in TOML are relative to their file"
    )


def download(
    source: Source, wanted: Sequence[str] | None = None, *, is_cached: bool = False
) -> Source:
    """The model on this machine: itself or, where there is no such path, the Hub's of that name.

    wanted: patterns of the files that are needed; None: all but weights of other frameworks.
    is_cached: only what was downloaded before.
    """
    if source.joined:
        parts = tuple(download(part, wanted, is_cached=is_cached) for part in source.joined)
        return replace(source, path=parts[0].path, joined=parts)
    if source.slices:
        return source.find_models(lambda model: download(model, wanted, is_cached=is_cached))
    if not is_on_hub(source):
        return source
    repository, _, revision = source.name.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        raise DareError(
            f"there is no file or directory {source.name!r}",
            f"{path_hint(source)}; models of the Hugging Face Hub need huggingface_hub, "
            f"{install_hint('hub')}",
        ) from None
    others = {f"*{suffix}" for suffix in WEIGHT_SUFFIXES} - {"*.safetensors", "*.index.json"}
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(wanted) if wanted else None,
            ignore_patterns=[*sorted(others), "original/*", "consolidated*"],
            local_files_only=is_cached,
        )
    except Exception as error:  # of the network, its libraries, the Hub: there are dozens of kinds
        reason = re.split(r"(?<=\.)\s|\n", str(error).strip())[0] or type(error).__name__
        says = f"the Hugging Face Hub does not give a model of that name: {reason}"
        if "internet connection" in str(error):
            says = "there is no connection to the Hugging Face Hub"
        beside = os.listdir(source.path.parent) if source.path.parent.is_dir() else []
        folder = source.name.removesuffix(source.path.name)
        raise DareError(
            f"there is no file or directory {source.name!r}, and {says}",
            nearest(source.path.name, beside, folder)
            if beside
            else f"{path_hint(source)}; for the Hub, check the name, the network, HF_TOKEN and "
            "HF_HUB_OFFLINE",
        ) from None
    # The snapshot's directory has the name of its commit, which is what a recipe must hold, since
    # branches move.
    return Source(source.name, Path(folder), f"{repository}@{Path(folder).name}")


def check_links(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse files of a model that are links out of its folder, where any file of a user may be.

    A cache of the Hub holds what the files of its snapshots are links to in a folder beside them.
    """
    home = folder.resolve()
    homes = [home]
    homes += [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    for path in paths:
        real = path.resolve() if path.is_file() else home
        if not any(map(real.is_relative_to, homes)):
            raise DareError(
                f"{str(path)!r} leads out of its model, to {str(real)!r}",
                "such a link may lead to any file, so it is not followed; if you trust it, put a "
                "copy of that file in its place",
            )


def is_on_hub(source: Source) -> bool:
    """Whether a source is a name on the Hub, as far as one can tell from here."""
    is_file = source.name.endswith((".safetensors", ".json", *PICKLE_SUFFIXES))
    return not is_file and HUB_NAME.fullmatch(source.name) is not None and is_missing(source.path)


def is_missing(path: Path) -> bool:
    """Whether there is nothing at a path, and the system lets us see that."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False
