"""Models inside models: the language model of a vision model, or a model in a trainer's wrapper.

Matches tensors with those of the base whose names differ only in a prefix.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from darelib.config import DareConfig
from darelib.core.text import LISTED, DareError, count_of
from darelib.models.checkpoint import ARCHITECTURE, Checkpoint, ties_embeddings

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
