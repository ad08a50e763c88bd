"""Models inside models: a language model in one that also sees, or a model in what training has
wrapped around it. Finds what its names begin with where the base's begin otherwise.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from darelib.config import DareConfig
from darelib.core.text import LISTED, DareError, count_of
from darelib.models.checkpoint import ARCHITECTURE, EMBEDDINGS, HEADS, Checkpoint, ties_embeddings

# What a model's names begin with, and what the base's begin with instead.
Way: TypeAlias = tuple[str, str]
# The names of a model's tensors, and the base's for the same.
Places: TypeAlias = dict[str, str]

# The longest prefix of a name: four parts, none of them the number of a layer.
PREFIX: Final = re.compile(r"(?:(?!\d+\.)[^.]*\.){0,4}")
# Where more of the base's names end alike, none of them is surely meant.
MAX_CHOICES: Final = 8
# Between transformers 4 and 5, three prefixes have changed.
MAX_WAYS: Final = 8
# Models have some dozens of them, and files that nobody trained may have millions.
MAX_CANDIDATES: Final = 10_000
TEXT: Final = "text_config"


def fit_names(model: Checkpoint, base: Checkpoint, config: DareConfig) -> None:
    """Give a whole model's tensors the base's names, if they only begin otherwise.

    What the base has besides is not missing, and what the model has besides is left out.
    """
    if model is base or model.partial or model.seed is not None:
        return
    place_config(model, base)
    part = config.part_of
    if isinstance(part, Mapping):
        chosen = [(end_prefix(old), end_prefix(new)) for old, new in part.items()]
        for _, new in chosen:
            check_prefix(new, base)
    else:
        within = end_prefix(part or "")
        check_prefix(within, base, model)
        is_alike = not model.tensors.keys().isdisjoint(base.tensors)
        if has_place(model, base, within) or (config.any_base and not part and is_alike):
            return
        chosen = choose_ways(find_ways(model, base, within), model, base)
        if part and not chosen:
            raise DareError(
                f"nothing of {model.name!r} fits {base.name!r} where names begin with {within!r}",
                list_prefixes(base),
            )
    places = place_names(chosen, model, base)
    is_asked = part and config.any_base
    if 2 * len(places) < min(len(model.tensors), len(base.tensors)) and not is_asked:
        return  # whoever compares the names refuses it
    model.outside = frozenset(base.tensors.keys() - places.values())
    model.warnings += (
        f"{model.name}: {', '.join(map(describe_way, chosen))}: matched {len(places):,} of "
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
    """Refuse what no name begins with."""
    inputs = (base, *models)
    if prefix and not any(name.startswith(prefix) for each in inputs for name in each.tensors):
        raise DareError(
            f"no tensor of {' or '.join(repr(each.name) for each in inputs)} has a name that "
            f"begins with {prefix!r}",
            list_prefixes(base),
        )


def list_prefixes(base: Checkpoint) -> str:
    """What --part-of could be, as a hint."""
    counts = Counter(name[:end] for name in base.tensors for end in list_starts(name)[1:3])
    names = ", ".join(prefix for prefix, _ in counts.most_common(MAX_CHOICES))
    return f"--part-of wants the start of names; the base's are {names or 'without any dot'}"


def end_prefix(prefix: str) -> str:
    """A prefix as names have it: with a dot at its end."""
    return prefix and f"{prefix.removesuffix('.')}."


def describe_way(way: Way) -> str:
    return f"its {way[0] + '*'!r} is the base's {way[1] + '*'!r}"


def list_starts(name: str) -> list[int]:
    """Where a name's tail may start: at once, and behind each part that a prefix may have."""
    longest = PREFIX.match(name)
    return [0, *(k + 1 for k in range(longest.end() if longest else 0) if name[k] == ".")]


def find_ways(model: Checkpoint, base: Checkpoint, within: str) -> dict[Way, Places]:
    """What could be replaced, with the tensors that it would place: their names end alike, and
    they have the same shapes. Nothing where there is too much of it.

    within: what the names of the base, or else those of the model, must begin with.
    """
    tails: dict[str, list[str]] = {}
    for place in base.tensors:
        for start in list_starts(place):
            tails.setdefault(place[start:], []).append(place)
    is_base = any(place.startswith(within) for place in base.tensors)
    ways: dict[Way, Places] = {}
    for name, info in model.tensors.items():
        # The number of tokens may differ: settings say what happens to such rows.
        rows = 1 if name.endswith((*EMBEDDINGS, *HEADS)) else 0
        for start in list_starts(name):
            fitting = tails.get(name[start:], [])
            for place in fitting if len(fitting) <= MAX_CHOICES else []:
                way = (name[:start], place.removesuffix(name[start:]))
                is_inside = (place if is_base else name).startswith(within)
                is_alike = base.tensors[place].shape[rows:] == info.shape[rows:]
                if is_inside and is_alike and is_shortest(*way, name[start:]):
                    ways.setdefault(way, {})[name] = place
        if len(ways) > MAX_CANDIDATES:
            return {}
    return ways


def is_shortest(old: str, new: str, tail: str) -> bool:
    """Whether no less could be replaced, and enough stays, so that it is hardly by chance."""
    if old and new:
        return old.split(".")[-2] != new.split(".")[-2] and "." in tail
    return old != new


def choose_ways(ways: dict[Way, Places], model: Checkpoint, base: Checkpoint) -> list[Way]:
    """What explains most tensors, then what explains most of the others, and so on."""
    chosen: list[Way] = []
    while ways and len(chosen) < MAX_WAYS:
        best = max(ways, key=lambda way: len(ways[way]))
        own = ways[best]
        taken = set(own.values())
        rivals = [
            way
            for way, others in ways.items()
            if len(others) == len(own)
            and not (own.keys().isdisjoint(others) and taken.isdisjoint(others.values()))
        ]
        if len(rivals) > 1:
            if chosen:  # what is left stays out
                break
            parts = {old for old, _ in rivals}
            raise DareError(
                f"{model.name!r} fits {base.name!r} in several ways: "
                f"{', or '.join(map(describe_way, rivals[:LISTED]))}",
                f"say which part is meant: --part-of {best[0] if len(parts) > 1 else best[1]}",
            )
        chosen.append(best)
        ways = {
            way: left
            for way, others in ways.items()
            if way[0] != best[0]  # which is replaced already
            and (left := {n: p for n, p in others.items() if n not in own and p not in taken})
        }
    return chosen


def place_names(chosen: Sequence[Way], model: Checkpoint, base: Checkpoint) -> Places:
    """The base's names of a model's tensors, by the longest prefix; or they are the same.

    Shapes that differ are refused as everywhere.
    """
    places: Places = {}
    taken: set[str] = set()
    for old, new in (*sorted(chosen, key=lambda way: -len(way[0])), ("", "")):
        for name in model.tensors:
            place = f"{new}{name.removeprefix(old)}"
            is_free = name not in places and place not in taken
            if is_free and name.startswith(old) and place in base.tensors:
                places[name] = place
                taken.add(place)
    return places


def place_config(model: Checkpoint, base: Checkpoint) -> None:
    """Let a model's configuration be compared with that of the text part that it is, or has.

    A kind like qwen2_vl_text is that of a part only: names and shapes must say that it fits.
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
