"""How weights come in: finds out what kind of input each source is, and opens it."""

import copy
import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from darelib.config import DareConfig
from darelib.core.text import DareError, as_text
from darelib.models.checkpoint import Checkpoint
from darelib.models.composed import AdaptedModel, Stack, check_adapter
from darelib.models.directories import Layout, find_checkpoint
from darelib.models.fp8 import read_unscaled, recognise_fp8
from darelib.models.lora import LoraAdapter
from darelib.models.lorafile import LoraFile, find_lora_file
from darelib.models.packed import PackedModel, find_packed
from darelib.models.peft import PeftAdapter, find_adapter
from darelib.models.prefixes import fit_names
from darelib.models.rows import unite_tokens
from darelib.models.source import UNION, Source, check_links, download, path_hint
from darelib.models.tensorfile import WEIGHT_SUFFIXES, explain_os_error
from darelib.models.translation import find_homes, list_ways, put_back, use_names
from darelib.models.vocabulary import TOKENIZER_FILE

# Gives tensors that are stored in an encoding of their own that encoding.
ENCODINGS: Final[tuple[Callable[[Checkpoint], None], ...]] = (recognise_fp8,)


def open_checkpoint(source: Source, layout: Layout, _: Checkpoint | None) -> Checkpoint:
    with ExitStack() as opened:
        model = opened.enter_context(closing(Checkpoint(source, layout)))
        for recognise in ENCODINGS:
            recognise(model)
        opened.pop_all()
    return model


def open_adapter(
    kind: type[LoraAdapter], source: Source, layout: Layout, base: Checkpoint | None
) -> Checkpoint:
    """An adapter, which may have any of the names by which a diffusion model is known."""
    ways = list_ways(base.tensors, find_homes(base.tensors)) if base else {}
    if not base or not ways:
        return kind(source, layout, base)
    view = copy.copy(base)
    view.tensors = {**base.tensors, **ways}
    with ExitStack() as opened:
        adapter = opened.enter_context(closing(kind(source, layout, view)))
        adapter.tensors = put_back(adapter.tensors, base.tensors, ways, adapter.name)
        opened.pop_all()
    return adapter


# The files of a source; None: it is of another kind.
Finder: TypeAlias = Callable[[Source], Layout | None]
# Without a base, it is to be the base.
Opener: TypeAlias = Callable[[Source, Layout, Checkpoint | None], Checkpoint]
# The kinds of input: the first one that finds files opens them.
OPENERS: Final[tuple[tuple[Finder, Opener], ...]] = (
    (find_adapter, partial(open_adapter, PeftAdapter)),
    (find_lora_file, partial(open_adapter, LoraFile)),
    (find_packed, PackedModel),
    (find_checkpoint, open_checkpoint),
)


@contextmanager
def explain_path(source: Source) -> Iterator[None]:
    """What is wrong with a path that the user gave, as an error that says so."""
    try:
        source.path.stat()
        yield
    except FileNotFoundError:
        raise DareError(
            f"there is no file or directory {source.name!r}", path_hint(source)
        ) from None
    except OSError as error:
        raise explain_os_error(error, source.name, path_hint(source)) from None
    except ValueError as error:
        raise DareError(
            f"{source.name!r} is not a path: {error}", "give a .safetensors file or a directory"
        ) from None


def find_files(source: Source) -> tuple[Opener, Layout]:
    with explain_path(source):
        if source.path.is_dir() and not os.access(source.path, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        opener, layout = next(
            (opener, layout) for find, opener in OPENERS if (layout := find(source))
        )
        if layout.folder:
            check_links(layout.folder, find_own(layout.folder, {*layout.files} - {source.path}))
        return opener, layout


def find_own(folder: Path, weights: Collection[Path]) -> Iterator[Path]:
    """What may be read in a model's folder: its weights, and all that is not weights."""
    yield from weights
    for path in folder.iterdir():
        if not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            yield path


def open_source(source: Source, base: Checkpoint | None) -> Checkpoint:
    """A model, open for reading. base: None: it is to be the base."""
    if not source.slices and not source.joined:
        open_files, layout = find_files(source)
        return open_files(source, layout, base)
    with ExitStack() as opened:

        def open_part(part: Source, below: Checkpoint | None) -> Checkpoint:
            return opened.enter_context(closing(open_source(part, below)))

        if source.slices:
            made: Checkpoint = Stack(source, [open_part(each, None) for each in source.models])
        elif base and is_base(source.joined[0], base):
            # An adapter on the base is an input by itself.
            made = check_adapter(open_part(source.joined[1], base), base)
        else:
            model = open_part(source.joined[0], None)
            made = AdaptedModel(source, model, open_part(source.joined[1], model))
        opened.pop_all()
    return made


def is_base(source: Source, base: Checkpoint) -> bool:
    is_plain = base.source.parts == (base.source,)
    return is_plain and os.path.realpath(base.source.path) == os.path.realpath(source.path)


@contextmanager
def open_models(
    sources: Sequence[Source],
    tokenizer: Source | None = None,
    config: DareConfig | None = None,
) -> Iterator[list[Checkpoint]]:
    """The inputs, open for reading: the base, which is the first, and the models. Downloads those
    of the Hub.

    tokenizer: of the output. If it is the union, or an input's with other tokens than the base, all
    inputs get its token ids. config: of a merge, for which models are fitted to the base; None:
    they stay as they are.
    """
    inputs: list[Checkpoint] = []
    with ExitStack() as opened:
        for source in map(download, sources):
            model = open_source(source, inputs[0] if inputs else None)
            inputs.append(opened.enter_context(closing(model)))
            use_names(model, inputs[0])
            if config:
                fit_names(model, inputs[0], config)
                read_unscaled(model, inputs[0], config)
        if tokenizer:
            owners = (model for model in inputs if any(is_of(tokenizer, p) for p in model.parts))
            owner = next(owners, None)
            multiple = (config and config.pad_vocabulary) or 0
            if owner or tokenizer.name == UNION:
                unite_tokens(inputs, owner, multiple)
            elif multiple:
                raise DareError(
                    "pad_vocabulary needs the tokens of one of the models, or of all of them",
                    "use --tokenizer union, or --tokenizer MODEL with a model that has a "
                    "tokenizer.json",
                )
        yield inputs


def is_of(tokenizer: Source, model: Checkpoint) -> bool:
    """Whether a tokenizer is a model's own, and a tokenizer.json says which tokens it has."""
    if tokenizer.is_word or not model.folder or not (model.folder / TOKENIZER_FILE).exists():
        return False
    is_there = os.path.realpath(tokenizer.path) == os.path.realpath(model.folder)
    return is_there or tokenizer.name == model.source.name


@contextmanager
def explain_read_errors() -> Iterator[None]:
    """What the system refuses beside the weights, whose own errors are explained where they are
    read.
    """
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, as_text(error.filename or "the models")) from None
    except RecursionError:
        raise DareError(
            "something in the models' directories is nested too deeply", "remove it"
        ) from None


def check_unchanged(inputs: Sequence[Checkpoint]) -> None:
    """Refuse to go on if an input is not what it was when it was opened."""
    for model in inputs:
        model.check_unchanged()
