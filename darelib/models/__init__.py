"""How weights come in: finds out what kind of input each source is, and opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from darelib.models.checkpoint import Checkpoint, Layout, find_checkpoint, path_hint
from darelib.models.hub import download
from darelib.models.lora import LoraAdapter, find_adapter
from darelib.models.tensorfile import explain_os_error
from darelib.readers import Source
from darelib.text import DareError, as_text

Input: TypeAlias = Checkpoint  # what every kind of input is


@dataclass(frozen=True)
class Opener:
    """A kind of input."""

    find: Callable[[Source], Layout | None]  # the files of a source; None: it is of another kind
    open: Callable[[Source, Layout, Checkpoint | None], Input]  # without a base, it is to be the base


# The first one that finds files opens them.
OPENERS: Final = (
    Opener(find_adapter, LoraAdapter),
    Opener(find_checkpoint, lambda source, layout, _: Checkpoint(source, layout)),
)


def find_files(source: Source) -> tuple[Opener, Layout]:
    """What kind of input a source is, and which files it has."""
    try:
        source.path.stat()
        return next((opener, layout) for opener in OPENERS if (layout := opener.find(source)))
    except FileNotFoundError:
        raise DareError(f"there is no file or directory {source.name!r}", path_hint(source)) from None
    except OSError as error:
        raise explain_os_error(error, source.name, path_hint(source)) from None
    except ValueError as error:
        raise DareError(f"{source.name!r} is not a path: {error}", "give a .safetensors file or a directory") from None


def open_model(source: Source, base: Checkpoint | None = None) -> Input:
    """An input of any kind, open for reading. Without a base, it is the base."""
    opener, layout = find_files(source)
    return opener.open(source, layout, base)


@contextmanager
def open_models(sources: Sequence[Source]) -> Iterator[list[Input]]:
    """The inputs, open for reading: the base, which is the first, and the models. Downloads those of the Hub."""
    inputs: list[Input] = []
    try:
        for source in sources:
            inputs.append(open_model(download(source), inputs[0] if inputs else None))
        yield inputs
    except OSError as error:  # of what lies around the weights; the weights' own errors are explained where they arise
        raise explain_os_error(error, as_text(error.filename or "the models")) from None
    except RecursionError:
        raise DareError("something in the models' directories is nested too deeply", "remove it") from None
    finally:
        for checkpoint in inputs:
            checkpoint.close()


def check_unchanged(inputs: Sequence[Input]) -> None:
    """Refuse to go on if an input is not what it was when it was opened."""
    for model in inputs:
        model.check_unchanged()
