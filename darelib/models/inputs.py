"""How weights come in: finds out what kind of input each source is, and opens it."""

import copy
import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from darelib.config import DareConfig
from darelib.core.text import LISTED, DareError, as_text, count_of
from darelib.models.checkpoint import ARCHITECTURE, Checkpoint, ties_embeddings
from darelib.models.composed import AdaptedModel, Stack, check_adapter
from darelib.models.directories import Layout, find_checkpoint
from darelib.models.examples import read_examples
from darelib.models.fp8 import read_unscaled, recognise_fp8
from darelib.models.lora import LoraAdapter
from darelib.models.lorafile import LoraFile, find_lora_file
from darelib.models.packed import PackedModel, find_packed
from darelib.models.peft import PeftAdapter, find_adapter
from darelib.models.rows import unite_tokens
from darelib.models.source import UNION, Source, check_links, download, path_hint
from darelib.models.tensor import Described
from darelib.models.tensorfile import WEIGHT_SUFFIXES, explain_os_error
from darelib.models.translation import find_homes, list_ways, put_back, use_names
from darelib.models.vocabulary import TOKENIZER_FILE

# The names of a model's tensors, and the base's for the same.
Places: TypeAlias = dict[str, str]

# What stands before the index of a layer, if there is one.
HEAD: Final = re.compile(r"(?:(?!\d+\.)[^.]*\.)*")
# The parts of names that only say which module holds a model: those of training programs, and those
# that transformers 4 and 5 put in different places.
HOLDERS: Final = re.compile(
    r"(?<![^.])(?:_orig_mod|module|base_model|model|language_model)\."
    r"|(?<=vision_tower\.)vision_model\."
)
MAX_PARTS: Final = 8  # of a model, those with most tensors, that are tried
TEXT: Final = "text_config"
# Of examples, unless others are asked for.
MAX_EXAMPLES = 256
MAX_TOKENS = 512


def fit_names(model: Checkpoint, base: Checkpoint, config: DareConfig) -> None:
    """Give a whole model's tensors the base's names, if they differ only in a prefix.

    Other tensors of the base are not missing, and other tensors of the model are left out.
    """
    if model is base or model.partial or model.seed is not None:
        return
    place_config(model, base)
    part = config.part_of
    if isinstance(part, Mapping):
        found = replace_prefixes(part, model, base)
    else:
        within = end_prefix(part or "")
        check_prefix(within, base, model)
        is_alike = not model.tensors.keys().isdisjoint(base.tensors)
        if has_place(model, base, within) or (config.any_base and not part and is_alike):
            return
        found = find_places(model, base, within)
        if part and not found:
            raise DareError(
                f"nothing of {model.name!r} fits {base.name!r} where names begin with {within!r}",
                explain_prefixes(base),
            )
    free = base.tensors.keys() - found.values()
    places = found | {name: name for name in model.tensors if name in free and name not in found}
    is_asked = part and config.any_base
    if 2 * len(places) < min(len(model.tensors), len(base.tensors)) and not is_asked:
        return  # whoever compares the names refuses it
    model.outside = frozenset(base.tensors.keys() - places.values())
    model.warnings += (
        f"{model.name}: {describe(found)}: matched {len(places):,} of "
        f"{count_of(len(model.tensors), 'tensor')}; {len(model.outside):,} of the base's are not "
        f"in it and stay; {len(model.tensors) - len(places):,} of its own are left out",
    )
    model.tensors = {place: model.tensors[name] for name, place in places.items()}


def has_place(model: Checkpoint, base: Checkpoint, within: str) -> bool:
    """Whether the names of the base's part, or of all of it, are the model's as they are."""
    part = {name for name in base.tensors if name.startswith(within)}
    fewest = min(len(model.tensors), len(part))
    return 2 * len(model.tensors.keys() & part) >= fewest and (bool(part) or not within)


def check_prefix(prefix: str, base: Checkpoint, *models: Checkpoint) -> None:
    """Refuse a prefix that no name has."""
    inputs = (base, *models)
    if prefix and not any(name.startswith(prefix) for each in inputs for name in each.tensors):
        raise DareError(
            f"no tensor of {' or '.join(repr(each.name) for each in inputs)} has a name that "
            f"begins with {prefix!r}",
            explain_prefixes(base),
        )


def explain_prefixes(base: Checkpoint) -> str:
    names = ", ".join(list_prefixes(base.tensors))
    return f"--part-of wants the start of names; the base's are {names or 'without any dot'}"


def list_prefixes(names: Iterable[str]) -> list[str]:
    """What --part-of could be: the first parts of names, the most usual ones first."""
    heads = (re.match(r"((?!\d+\.)[^.]+\.)((?!\d+\.)[^.]+\.)?", name) for name in names)
    starts = (start for head in heads if head for start in {head[1], head[0]})
    return [start for start, _ in Counter(starts).most_common(MAX_PARTS)]


def end_prefix(prefix: str) -> str:
    """A prefix as names have it: with a dot at its end."""
    return prefix and f"{prefix.removesuffix('.')}."


def replace_prefixes(table: Mapping[str, str], model: Checkpoint, base: Checkpoint) -> Places:
    """What a user says: of several prefixes that a name has, the longest is replaced."""
    pairs = [(end_prefix(old), end_prefix(new)) for old, new in table.items()]
    pairs.sort(key=lambda pair: len(pair[0]))
    places: Places = {}
    for old, new in pairs:
        check_prefix(new, base)
        renamed = {n: f"{new}{n.removeprefix(old)}" for n in model.tensors if n.startswith(old)}
        places |= {name: place for name, place in renamed.items() if place in base.tensors}
    # Of several names that get one place, the last has it.
    owners = {place: name for name, place in places.items()}
    return {name: place for place, name in owners.items()}


def find_places(model: Checkpoint, base: Checkpoint, within: str) -> Places:
    """The match of most tensors, with the model as a part of the base or the base as a part of the
    model. within: the prefix of that part.
    """
    is_base = any(name.startswith(within) for name in base.tensors)
    parts = [("", within) if is_base else (within, "")]
    if not within:
        parts += [("", prefix) for prefix in list_prefixes(base.tensors)]
        parts += [(prefix, "") for prefix in list_prefixes(model.tensors)]
    ways = [match_part(model, old, base, new) for old, new in parts]
    most = max(map(len, ways))
    best = [way for way in ways if len(way) == most]
    rivals = [way for k, way in enumerate(best) if way not in best[:k]]
    if most and len(rivals) > 1:
        raise DareError(
            f"{model.name!r} fits {base.name!r} in several ways: "
            f"{', or '.join(map(describe, rivals[:LISTED]))}",
            "say which part of the base, or of the model, is meant, by --part-of PREFIX",
        )
    return best[0]


def match_part(model: Checkpoint, old: str, base: Checkpoint, new: str) -> Places:
    """The tensors below two prefixes whose names differ only in holders."""
    mine = index_names(model, old)
    theirs = index_names(base, new)
    return {name: theirs[plain] for plain, name in mine.items() if plain in theirs}


def index_names(model: Checkpoint, prefix: str) -> dict[str, str]:
    """The names below a prefix, by what they are without holders; none where several are equal."""
    names = [name for name in model.tensors if name.startswith(prefix)]
    plain = [drop_holders(name[len(prefix) :]) for name in names]
    counts = Counter(plain)
    return {key: name for key, name in zip(plain, names, strict=True) if counts[key] == 1}


def drop_holders(name: str) -> str:
    head = HEAD.match(name)
    end = head.end() if head else 0
    return HOLDERS.sub("", name[:end]) + name[end:]


def describe(places: Places) -> str:
    """Which prefixes are replaced, and by what."""
    ways = Counter[str]()
    for name, place in places.items():
        tail = name
        while tail and not f".{place}".endswith(f".{tail}"):
            tail = tail.partition(".")[2]
        old, new = (f"{each.removesuffix(tail)}*" for each in (name, place))
        ways[f"its {old!r} is the base's {new!r}"] += old != new
    return ", ".join(way for way, count in ways.most_common(LISTED) if count)


def place_config(model: Checkpoint, base: Checkpoint) -> None:
    """Let configurations be compared where only one model is the text part of the other.

    A kind like qwen2_vl_text is that of a part only, and is not compared: names and shapes are.
    """
    whole = base.config
    own = model.config
    is_part = bool(whole.get(TEXT)) != bool(own.get(TEXT))
    if not is_part or whole.get("model_type") == own.get("model_type"):
        return
    text = {**(own.get(TEXT) or own), "tie_word_embeddings": ties_embeddings(own)}
    kinds = [str(table.get("model_type")) for table in (text, whole.get(TEXT) or whole)]
    ignored = {ARCHITECTURE, TEXT}
    if any(kind.endswith("_text") for kind in kinds):
        ignored.add("model_type")
    text = {key: value for key, value in text.items() if key not in ignored and value is not None}
    model.config = {TEXT: text} if whole.get(TEXT) else text


# Gives tensors that are stored in an encoding of their own that encoding.
ENCODINGS: Final[tuple[Callable[[Described], None], ...]] = (recognise_fp8,)


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
    examples: Sequence[Path | None] = (),
) -> Iterator[list[Checkpoint]]:
    """The inputs, open for reading: the base, which is the first, and the models. Downloads those
    of the Hub.

    tokenizer: of the output. If it is the union, or an input's with other tokens than the base, all
    inputs get its token ids. config: of a merge, for which models are fitted to the base; None:
    they stay as they are. examples: a file for each, where it is matched with them.
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
        if config:
            attach_examples(inputs, examples, config)
        yield inputs


def attach_examples(
    inputs: Sequence[Checkpoint], files: Sequence[Path | None], config: DareConfig
) -> None:
    count = config.max_examples or MAX_EXAMPLES
    for model, path in zip(inputs, files, strict=False):
        if path and len(model.parts) > 1:
            raise DareError(
                f"{model.name!r} is made of layers of models, and examples are for whole ones",
                "merge it first, then match the result",
            )
        if path:
            model.parts[0].examples = read_examples(path, count, config.max_tokens or MAX_TOKENS)


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
