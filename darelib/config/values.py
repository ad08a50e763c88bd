"""What a setting may be: numbers, gradients (numbers that change over the layers of a model), words
and sizes; what each must be, in words and as a test.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final, TypeAlias, TypeGuard

from darelib.core.text import as_text

SIZE_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}
# A smaller size that names no unit was meant in another one: nobody wants files of five bytes.
LEAST_BARE_SIZE: Final = 1000
# The first part of a dotted name that is a number, and what is before it; no model has a billion
# layers.
LAYER: Final = re.compile(r"(.*?\.)??([0-9]{1,9})(?:\.|\Z)", re.DOTALL)

FULL: Final = "full"  # rank of an adapter: as many ranks as its inputs have together
AUTO: Final = "auto"  # lambda: the best on held-out examples
MAX_PADDING: Final = 1 << 16  # rows: far more than any hardware asks for
MAX_NUMBERS: Final = 1000  # of a gradient: each of them is checked, and models have fewer layers


@dataclass(frozen=True)
class Gradient:
    """A number that changes over the layers: these at even distances, and lines between them."""

    numbers: tuple[float, ...]

    def __repr__(self) -> str:
        return f"{{gradient = {list(self.numbers)}}}"

    def at(self, depth: float) -> float:
        """Its value at a depth from 0, the first layer, to 1, the last."""
        place = depth * (len(self.numbers) - 1)
        share = place % 1
        low = self.numbers[int(place)]
        high = self.numbers[min(int(place) + 1, len(self.numbers) - 1)]
        return (1 - share) * low + share * high


def freeze(value: Any) -> Any:
    """A setting with tuples for lists and Gradients for tables like {gradient = [0.9, 0.5]}.

    Numbers and arrays of NumPy become Python's.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict) and value.keys() == {"gradient"}:
        numbers = freeze(value["gradient"])
        is_right = isinstance(numbers, tuple) and 0 < len(numbers) <= MAX_NUMBERS
        return Gradient(numbers) if is_right else value
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def value_at(value: Any, depth: float) -> Any:
    if isinstance(value, tuple):
        return tuple(value_at(entry, depth) for entry in value)
    return value.at(depth) if isinstance(value, Gradient) else value


def find_depths(value: Any) -> set[float]:
    """Where the lines of a setting meet: between those, it is straight."""
    if isinstance(value, tuple):
        return {depth for entry in value for depth in find_depths(entry)}
    steps = len(value.numbers) - 1 if isinstance(value, Gradient) else 0
    return {k / steps for k in range(steps + 1)} if steps else {0.0}


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """How many layers there are of each kind: by what is before the number in a tensor's name."""
    counts: dict[str, int] = {}
    for match in filter(None, map(LAYER.match, names)):
        kind, number = match.groups()
        counts[kind] = max(counts.get(kind, 0), int(number) + 1)
    return counts


def depth_of(name: str, layers: Mapping[str, int]) -> float:
    """How deep a tensor is: from 0 in the first layer to 1 in the last; 0 outside of the layers."""
    match = LAYER.match(name)
    if not match or match[1] not in layers:
        return 0.0
    last = layers[match[1]] - 1
    return int(match[2]) / last if last else 1.0


# A number, or one that changes over the layers: {"gradient": [0.9, 0.5, 0.9]}.
Number: TypeAlias = float | Gradient | Mapping[str, Sequence[float]]


def is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def is_whole(value: object) -> bool:
    """Whether it is a whole number from 0 up, also as 3.0."""
    return is_number(value) and value >= 0 and float(value).is_integer()


def is_rank(value: object) -> bool:
    """Whether it is a rank of an adapter, a share of the energy, or all ranks."""
    is_share = is_number(value) and 0 < value < 1
    return value == FULL or is_share or (value != 0 and is_whole(value))


def parse_number(given: Any) -> Any:
    """A number, or a word in place of one."""
    try:
        return float(given)
    except ValueError:
        return given


def parse_size(given: object) -> int:
    """Bytes, from a number of them or a text like 5GB (by 1000) or 4.5GiB (by 1024); 0: neither."""
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", given.strip())
        return int(Decimal(parts[1]) * SIZE_UNITS.get(parts[2].upper(), 0)) if parts else 0
    return given if is_count(given, 1) else 0


def is_size(value: object) -> bool:
    has_unit = re.search("[A-Za-z]", str(value))
    return parse_size(value) >= (1 if has_unit else LEAST_BARE_SIZE)


def names_part(value: object) -> bool:
    """Whether it says what names begin with, in text, which a recipe can hold."""
    texts = [*value, *value.values()] if isinstance(value, Mapping) else [value]
    return bool(value) and all(isinstance(text, str) and text == as_text(text) for text in texts)


def as_toml(value: Any, number: Callable[[Any], Any] = float) -> Any:
    """A setting as in TOML, with numbers of one type, so that 1 and 1.0 make the same recipe."""
    if isinstance(value, Gradient):
        return {"gradient": as_toml(value.numbers)}
    if isinstance(value, tuple):
        return [as_toml(entry, number) for entry in value]
    return number(value) if is_number(value) else value


@dataclass(frozen=True)
class Check:
    """What a setting must be, in words and as a test."""

    wanted: str
    accepts: Callable[[Any], bool]
    parse: Callable[[Any], Any] = lambda given: given  # from a flag's text
    choices: tuple[str, ...] = ()  # the words that it may be
    per_model: bool = False  # whether there may be one for each model
    is_list: bool = False  # whether even a single one is a list
    hint: Callable[[Any], str] = lambda _: ""  # for a value that is wrong in a usual way


def word(*choices: str) -> Check:
    return Check(f"one of {', '.join(choices)}", lambda value: value in choices, choices=choices)


def number(range_in_words: str = "", accepts: Callable[[float], bool] = lambda _: True) -> Check:
    """A number, or one that changes over the layers."""

    def accepts_all(value: object) -> bool:
        numbers = value.numbers if isinstance(value, Gradient) else (value,)
        return all(is_number(number) and accepts(number) for number in numbers)

    return Check(f"a number{range_in_words}", accepts_all, float)


def at_least(least: float) -> Check:
    return number(f" from {least:g} up", lambda value: value >= least)


def above(limit: float) -> Check:
    return number(f" above {limit:g}", lambda value: value > limit)


def below(limit: float, hint: Callable[[Any], str] = lambda _: "") -> Check:
    words = f" from 0 up to but not including {limit:g}"
    return replace(number(words, lambda value: 0 <= value < limit), hint=hint)


def constant(check: Check) -> Check:
    """The same, but not a gradient."""
    return replace(
        check, accepts=lambda value: not isinstance(value, Gradient) and check.accepts(value)
    )


def whole(words: str, least: int) -> Check:
    return Check(f"a whole number {words}", lambda value: is_count(value, least), int)


def one_or_each(one: Check, kind: str = "number") -> Check:
    def accepts(value: object) -> bool:
        values = value if isinstance(value, tuple) else (value,)
        return len(values) > 0 and all(map(one.accepts, values))

    wanted = f"{one.wanted}, or one such {kind} per model"
    return replace(one, wanted=wanted, accepts=accepts, per_model=True)


def list_of(words: str, one: Check) -> Check:
    def accepts(value: object) -> bool:
        return isinstance(value, tuple) and len(value) > 0 and all(map(one.accepts, value))

    return replace(one, wanted=f"a list of {words}", accepts=accepts, is_list=True)


SWITCH: Final = Check("true or false", lambda value: isinstance(value, bool))
RATIO: Final = number(" above 0 and at most 1", lambda ratio: 0 < ratio <= 1)
TEXT: Final = Check("text", lambda value: isinstance(value, str) and value == as_text(value))
