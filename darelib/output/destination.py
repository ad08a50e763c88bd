"""Where a merged model goes, and what must not be replaced there."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from darelib.core.text import MAX_TOML, ConfigError, DareError, as_text, list_names, read_toml
from darelib.models.directories import (
    ADAPTER_FILE,
    CONFIG_FILE,
    KNOWN_FILES,
    PIPELINE_FILE,
    VARIANT,
)
from darelib.models.packed import PACKED_KEY
from darelib.models.source import RECIPE_FILE, Source, is_template, last_parts
from darelib.models.tensorfile import (
    PICKLE_SUFFIXES,
    WEIGHT_SUFFIXES,
    TensorFile,
    file_sha256,
    open_regular,
    peek_header,
)

RECIPE_KEY: Final = "dare_recipe"  # in the metadata of a file of tensors
MATCHED_KEY: Final = "matched"  # of a recipe: digests by tensor
# Of a recipe: who made an output, and what came out, but not how it was made.
NOT_COMPARED: Final = ("version", "files", MATCHED_KEY)
# What a recipe that is none leads to: it may be anybody's.
UNSOUND: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Of the files in a directory, those that say that it is a model.
MODEL_MARKS: Final = frozenset({*KNOWN_FILES, PIPELINE_FILE, ADAPTER_FILE, RECIPE_FILE})
# What an output's name ends in where somebody wants a file, and not a directory.
FILE_SUFFIXES: Final = (".st", ".sft", ".gguf", ".json", ".toml", *PICKLE_SUFFIXES)


@dataclass(frozen=True)
class Destination:
    name: str  # as the user has it
    path: Path  # with links followed
    directory: bool

    @property
    def partial(self) -> Path:
        """The folder beside it in which it is made.

        Names may be as long as the filesystem allows.
        """
        name = self.path.name
        if len(os.fsencode(name)) > 200:
            name = f"{name[:40]}.{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
        return self.path.with_name(f"{name}.partial")


def is_misspelled(suffix: str) -> bool:
    """Whether a suffix is nearly .safetensors."""
    if suffix in ("", ".safetensors"):
        return False
    from difflib import SequenceMatcher  # most merges start without it

    return SequenceMatcher(None, suffix, ".safetensors").ratio() > 0.8


def find_output(given: str | Path) -> Destination:
    """Where an output goes, if something can be written there at all."""
    path = Source.of(given).path
    if path.name == "-":
        raise ConfigError(
            "a model cannot be written to standard output",
            "give a .safetensors file or a directory",
        )
    suffix = path.suffix.lower()
    if suffix in FILE_SUFFIXES or is_misspelled(suffix):
        raise ConfigError(
            f"the output {str(path)!r} does not end in .safetensors",
            "did you mean .safetensors? A name without such a suffix makes a model directory",
        )
    with explain_place_errors(str(path)):
        target = path.resolve()
        is_dangling = not target.exists() and path.is_symlink()  # too long a name fails here
        above = next((parent for parent in target.parents if parent.exists()), target)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise DareError(
            f"the output's directory {str(above)!r} is not writable, or a file",
            "choose another directory",
        )
    if is_dangling:
        raise DareError(
            f"the output {str(path)!r} is a link to {str(target)!r}, which does not exist",
            "remove the link, or give the name that it leads to",
        )
    return Destination(str(path), target, suffix != ".safetensors")


@contextmanager
def explain_place_errors(name: str) -> Iterator[None]:
    """What the system refuses where an output is to go, before anything is written there."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise DareError(
            f"the output {name!r} cannot be used: {getattr(error, 'strerror', None) or error}",
            "give another path",
        ) from None


def check_apart(what: str, path: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Refuse to write where an input is, whatever the flags.

    inputs: their names with their files and directories.
    """
    for name, used in inputs:
        if relation := describe_overlap(path.resolve(), used.resolve()):
            raise ConfigError(
                f"{what} {relation} the input {name!r}", "inputs are never overwritten"
            )


def describe_overlap(target: Path, used: Path) -> str:
    """Whether an output is, holds or lies inside an input, by whatever names and links.

    In words, or "" if they are apart.
    """
    if target.exists() and target.samefile(used):
        return "is"
    if target.exists() and any(map(target.samefile, used.parents)):
        return "holds"
    above = filter(Path.exists, target.parents)
    return "lies inside" if used.is_dir() and any(map(used.samefile, above)) else ""


def check_replaceable(destination: Destination, force: bool, recipe: str = "") -> None:
    """Refuse to replace what somebody else or another recipe made and, even with force, what is no
    model.

    recipe: of what is to be written; empty: it is not known yet.
    """
    target = destination.path
    shown = f"the output {destination.name!r}"
    if not target.exists():
        return
    if target.is_dir() and not destination.directory:
        raise DareError(f"{shown} is a directory", "give another name, like merged.safetensors")
    if destination.directory and not target.is_dir():
        raise DareError(f"{shown} is a file", "give a directory, or a file like merged.safetensors")
    if destination.directory:
        _check_directory(target, shown, force)
    elif not force and not {RECIPE_KEY, PACKED_KEY} & peek_header(target)[1].keys():
        raise DareError(
            f"{shown} exists and was not made by this tool", "add --force to replace it"
        )
    if force or not recipe:
        return
    made = peek_recipe(target)
    if destination.directory and not made:  # it is empty, or another merge is just replacing it
        return
    if difference := compare_recipes(made, recipe):
        raise DareError(
            f"{shown} exists and has another recipe: {difference}",
            "add --force to replace it, or give another output",
        )


def peek_recipe(output: Path) -> str:
    """What an output says of how it was made; empty: nothing that can be read."""
    if not output.is_dir():
        return peek_header(output)[1].get(RECIPE_KEY, "")
    with suppress(OSError, ValueError), open_regular(output / RECIPE_FILE) as file:
        return file.read(MAX_TOML + 1).decode()
    return ""


def compare_recipes(made: str, wanted: str) -> str:
    """How an output's recipe differs from the one that is wanted, in words; empty: it does not."""
    try:
        old, new = map(read_toml, (made, wanted))
        for recipe in (old, new):
            for key in NOT_COMPARED:
                recipe["recipe"].pop(key, None)
            recipe["models"] = forget_folders(recipe["models"])
            recipe["recipe"]["inputs"] = forget_folders(recipe["recipe"]["inputs"])
        return explain_difference(old, new)
    except UNSOUND:
        return "it cannot be read"


def forget_folders(value: Any) -> Any:
    """Names of models by the last parts of their paths: from any place, it is the same merge."""
    if isinstance(value, dict):
        return {key: forget_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(forget_folders, value))
    return last_parts(value) if isinstance(value, str) and not is_template(value) else value


def _check_directory(target: Path, shown: str, force: bool) -> None:
    status = target.stat()
    names = os.listdir(target)
    if os.path.samestat(status, os.stat(os.curdir)):
        raise DareError(f"{shown} is the working directory", "name a directory in it")
    is_model = not MODEL_MARKS.isdisjoint(names) or (
        CONFIG_FILE in names and any(map(is_weights, names))
    )
    if names and (not is_model or ".git" in names):
        raise DareError(f"{shown} is a directory with other things in it", "give a new name")
    if force or not names:
        return
    ours = read_digests(target)
    if not ours:
        raise DareError(
            f"{shown} exists and was not made by this tool", "add --force to replace it all"
        )
    others = [
        name
        for name in list_files(target)
        if name != RECIPE_FILE and ours.get(as_text(name)) != digest_of(target / name)
    ]
    if others and os.path.samestat(status, target.stat()):
        raise DareError(
            f"{shown} also holds {list_names(others)}, which this tool did not write, "
            "or which has changed since",
            "move it elsewhere, or add --force to replace the whole directory",
        )
    if others:  # another merge has just put its own there
        _check_directory(target, shown, force)


def read_digests(folder: Path) -> dict[str, str]:
    """The files of a directory that this tool wrote, with their digests; none without a recipe."""
    with suppress(*UNSOUND):
        files = read_toml(peek_recipe(folder))["recipe"]["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    return {}


def digest_of(content: Path | bytes) -> str:
    """The digest that a recipe has of a file: of its content or, with tensors, of its header."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    if content.suffix != ".safetensors":
        return file_sha256(content)
    with suppress(DareError, OSError), closing(TensorFile(content, content.name)) as file:
        return file.header_sha256
    return ""


def list_files(folder: Path) -> list[str]:
    """All files of a directory and of those below it, by their names relative to it."""
    listed = []
    for place, folders, names in os.walk(folder):
        below = Path(place).relative_to(folder)
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        listed += [(below / name).as_posix() for name in (*names, *links)]
        if not folders and not names and place != str(folder):
            listed.append(f"{below.as_posix()}/")  # an empty directory
    return sorted(listed)


def is_weights(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES) or VARIANT.fullmatch(Path(name).name) is not None


def explain_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """What distinguishes two merges, by their identities: in words, or "" if they are the same."""
    for key in dict.fromkeys([*new, *old]):
        name = prefix + key
        before = old.get(key)
        now = new.get(key)
        if before == now:
            continue
        if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            before, now = map(number, (before, now))
        if isinstance(before, dict) and isinstance(now, dict):
            return explain_difference(before, now, f"{name}.")
        return f"its {name} is {before!r}, not {now!r}"
    return ""


def number(values: list[Any]) -> dict[str, Any]:
    """What a list holds, by its place and, of what belongs to a file, also the file's name."""
    return {
        f"{k} ({each['file']})" if isinstance(each, dict) and "file" in each else str(k): each
        for k, each in enumerate(values)
    }
