"""The settings: what each must be, in words and as a test; gradients, which are numbers that change
over the layers of a model; and rules that set some of them.
"""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeGuard

from darelib.core.drops import DROPS, RESCALES
from darelib.core.formats import DTYPES, SHORT_DTYPES
from darelib.core.methods import METHODS
from darelib.core.settings import BASE, ZERO
from darelib.core.text import ConfigError, as_text, count_of, nearest

SIZE_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}
# A size below this that names no unit was meant in another one: nobody wants files of five bytes.
LEAST_BARE_SIZE: Final = 1000
# The first part of a dotted name that is a number, and what is before it; no model has a billion
# layers.
LAYER: Final = re.compile(r"(.*?\.)??([0-9]{1,9})(?:\.|\Z)", re.DOTALL)

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


@dataclass(frozen=True)
class Check:
    wanted: str  # in words
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()  # the words that it may be, where it is one
    per_model: bool = False  # whether there may be one for each model
    searched: bool = True  # whether a search may choose it


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Let errors begin with where they are."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}{error}", error.hint) from None


def is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_count(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def parse_size(given: object) -> int:
    """Bytes, from a number of them or a text like 5GB (by 1000) or 4.5GiB (by 1024); 0: neither."""
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", given.strip())
        return int(Decimal(parts[1]) * SIZE_UNITS.get(parts[2].upper(), 0)) if parts else 0
    return given if is_count(given, 1) else 0


def names_part(value: object) -> bool:
    """Whether it says what names begin with, in text, which a recipe can hold."""
    texts = [*value, *value.values()] if isinstance(value, Mapping) else [value]
    return bool(value) and all(isinstance(text, str) and text == as_text(text) for text in texts)


def _word(choices: tuple[str, ...]) -> Check:
    return Check(f"one of {', '.join(choices)}", lambda value: value in choices, choices)


def _number(range_in_words: str, accepts: Callable[[float], bool]) -> Check:
    def accepts_all(value: object) -> bool:
        numbers = value.numbers if isinstance(value, Gradient) else (value,)
        return all(is_number(number) and accepts(number) for number in numbers)

    return Check(f"a number{range_in_words}", accepts_all)


def _one_or_each(one: Check, kind: str) -> Check:
    """One for all models, or one for each of them."""

    def accepts(value: object) -> bool:
        values = value if isinstance(value, tuple) else (value,)
        return len(values) > 0 and all(map(one.accepts, values))

    return Check(
        f"{one.wanted}, or one such {kind} per model", accepts, one.choices, per_model=True
    )


_FLAG: Final = Check("true or false", lambda value: isinstance(value, bool))
_ANY: Final = _number("", lambda _: True)
_RATIO: Final = _number(" above 0 and at most 1", lambda ratio: 0 < ratio <= 1)
_SHARES: Final = _one_or_each(
    _number(" from 0 up to but not including 1", lambda share: 0 <= share < 1), "number"
)
# Of an adapter that is written: as many ranks as its inputs have together; and what happens to
# changes that are no product of matrices.
FULL: Final = "full"
SAVE: Final = "save"
LEAVE_OUT: Final = "leave-out"
# The noise of the masks, and what does not change what is merged, is nothing to search for.
CHECKS: Final = {
    "method": _word(tuple(METHODS)),
    "drop_rate": _SHARES,
    "drop": _one_or_each(_word(tuple(DROPS)), "word"),
    "gamma": _SHARES,
    "epsilon": _one_or_each(
        _number(" from 0 up to but not including 0.5", lambda e: 0 <= e < 0.5), "number"
    ),
    "weights": Check(
        "a list of numbers, one per model",
        lambda value: isinstance(value, tuple) and _one_or_each(_ANY, "number").accepts(value),
        per_model=True,
    ),
    "normalize": _FLAG,
    "origin": _word((BASE, ZERO)),
    "lambda_coeff": _ANY,
    "rescale": Check(
        f"one of {', '.join(RESCALES)}, or true or false",
        lambda value: isinstance(value, bool) or value in RESCALES,
        RESCALES,
    ),
    "rescale_q": _one_or_each(_RATIO, "number"),
    "keep_ratio": _RATIO,
    "slerp_t": _number(" from 0 to 1", lambda t: 0 <= t <= 1),
    "swap_t": _number(" from 0 up", lambda t: t >= 0),
    "boost": _number(" from 0 up", lambda boost: boost >= 0),
    "boost_limit": _number(" from 0 up", lambda limit: limit >= 0),
    "ridge": _number(" above 0", lambda ridge: ridge > 0),
    "norm_limit": _number(" from 0 up", lambda limit: limit >= 0),
    "max_iter": Check(
        "a whole number from 0 up",
        lambda value: is_number(value) and value >= 0 and float(value).is_integer(),
        searched=False,
    ),
    "tol": Check("a number above 0", lambda value: is_number(value) and value > 0, searched=False),
    "scale": _ANY,
    "threshold": _number(" from 0 up", lambda threshold: threshold >= 0),
    "dtype": replace(
        _word((*DTYPES, *SHORT_DTYPES)),
        wanted=f"one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})",
    ),
    "keep_fp8": replace(_FLAG, searched=False),
    "adapter_rank": Check(
        "a whole number from 1 up, a share of the energy between 0 and 1, or full",
        lambda value: (
            value == FULL
            or (is_number(value) and (0 < value < 1 or (value >= 1 and float(value).is_integer())))
        ),
        (FULL,),
        searched=False,
    ),
    "adapter_rest": replace(_word((SAVE, LEAVE_OUT)), searched=False),
    "components": Check(
        "a list of names of folders",
        lambda value: (
            isinstance(value, tuple)
            and value != ()
            and all(name == as_text(name) for name in value)
        ),
        searched=False,
    ),
    "mismatch": _word(("error", "overlap", "base")),
    "any_base": replace(_FLAG, searched=False),
    "part_of": Check(
        "the start of names, or a table of such, by those that they replace",
        names_part,
        searched=False,
    ),
    "max_shard_size": Check(
        "a size like 5GB or 500MiB, or a number of bytes",
        lambda value: parse_size(value) > 0,
        searched=False,
    ),
    "delta_threshold": Check(
        "a number above 0", lambda value: is_number(value) and value > 0, searched=False
    ),
    "seed": Check(
        "a whole number from 0 to 2^63 - 1", lambda value: is_count(value, 0), searched=False
    ),
    "threads": Check("a whole number from 1 up", lambda value: is_count(value, 1), searched=False),
    "engine": replace(_word(("auto", "numba", "plain")), searched=False),
    "verbose": replace(_FLAG, searched=False),
}
SWEEP_SETTINGS: Final = tuple(name for name, check in CHECKS.items() if check.searched)
PER_MODEL: Final = tuple(name for name, check in CHECKS.items() if check.per_model)


def check_setting(name: str, value: Any, where: str) -> None:
    """Refuse a value that a setting cannot have. where: what to call the setting."""
    check = CHECKS[name]
    if not check.accepts(freeze(value)):
        hint = "--help says what it does"
        if isinstance(value, str) and check.choices:
            hint = nearest(value.lower(), check.choices)
            if "8" in value and name == "dtype":
                hint = "--keep-fp8 writes FP8 again; else write bfloat16, and quantise the result"
        elif name == "drop_rate" and is_number(value) and 2 <= value < 100:
            hint = f"it is a share: {value:g}% are {value / 100:g}"
        elif not isinstance(value, str) and "{" in repr(value):
            example = "{gradient = [0.9, 0.5, 0.9]}"
            hint = f"only numbers change over the layers, like {example}, and each of them must fit"
        raise ConfigError(f"{where} must be {check.wanted}, not {value!r}", hint)
    size = parse_size(freeze(value)) if name == "max_shard_size" else LEAST_BARE_SIZE
    if size < LEAST_BARE_SIZE and not re.search("[A-Za-z]", str(value)):
        raise ConfigError(
            f"{where} would be {count_of(size, 'byte')}",
            f"write {str(value).strip()}GB, or {size}B if you mean it",
        )


def check_fields(holder: Any) -> None:
    """Check all settings of a frozen dataclass, and store them frozen too."""
    for field in fields(holder):
        value = getattr(holder, field.name)
        if field.name in CHECKS and (value is not None or field.default is not None):
            check_setting(field.name, value, field.name)
        object.__setattr__(holder, field.name, freeze(value))


def as_toml(value: Any) -> Any:
    """A setting as in TOML, with numbers as floats, so that 1 and 1.0 make the same recipe."""
    if isinstance(value, Gradient):
        return {"gradient": as_toml(value.numbers)}
    if isinstance(value, tuple):
        return [as_toml(entry) for entry in value]
    return float(value) if is_number(value) else value


@dataclass(frozen=True)
class Rule:
    """Other settings for the tensors whose names match one of some glob patterns.

    None: as for all the others.
    """

    match: tuple[str, ...]
    drop_rate: Number | Sequence[Number] | None = None
    rescale_q: Number | Sequence[Number] | None = None
    lambda_coeff: Number | None = None
    keep_ratio: Number | None = None
    drop: str | Sequence[str] | None = None
    gamma: Number | Sequence[Number] | None = None
    epsilon: Number | Sequence[Number] | None = None
    rescale: bool | str | None = None
    weights: Sequence[Number] | None = None
    normalize: bool | None = None
    origin: str | None = None
    slerp_t: Number | None = None
    swap_t: Number | None = None
    boost: Number | None = None
    boost_limit: Number | None = None
    method: str | None = None
    threshold: Number | None = None
    ridge: Number | None = None
    norm_limit: Number | None = None
    scale: Number | None = None

    def __post_init__(self) -> None:
        match = (self.match,) if isinstance(self.match, str) else freeze(self.match)
        is_tuple = isinstance(match, tuple) and len(match) > 0
        # Half of a surrogate pair is no text, and no recipe could hold it.
        if not is_tuple or any(pattern != as_text(pattern) for pattern in match):
            raise ConfigError(
                "match must be a pattern or a list of patterns", 'like match = ["*lm_head*"]'
            )
        object.__setattr__(self, "match", match)
        check_fields(self)
        if not list_given(self):
            raise ConfigError("it sets nothing", f"give it one of {', '.join(RULE_SETTINGS)}")

    @classmethod
    def of(cls, table: Any, where: str) -> Rule:
        """From a TOML table, or a dictionary like one."""
        if isinstance(table, Rule):
            return table
        if not isinstance(table, dict):
            raise ConfigError(
                f"{where} must be a table, not {table!r}",
                'like {match = "*norm*", drop_rate = 0.5}',
            )
        known = ("match", *RULE_SETTINGS)
        if unknown := [key for key in table if key not in known]:
            raise ConfigError(f"{where} has no key {unknown[0]!r}", nearest(unknown[0], known))
        with naming(f"{where}: "):
            return cls(**{"match": (), **table})

    def as_table(self) -> dict[str, Any]:
        settings = {name: as_toml(value) for name, value in list_given(self).items()}
        return {"match": list(self.match), **settings}

    def matches(self, name: str) -> bool:
        return _compile_globs(self.match)(name) is not None


# What a rule may set for the tensors that it matches.
RULE_SETTINGS: Final = tuple(field.name for field in fields(Rule) if field.name != "match")
# What says how a tensor is merged.
TENSOR_SETTINGS: Final = ("max_iter", "tol", *RULE_SETTINGS)


def list_given(holder: object) -> dict[str, Any]:
    """What a configuration or a rule sets for its tensors."""
    values = {name: getattr(holder, name, None) for name in TENSOR_SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


@lru_cache(4096)
def _compile_globs(patterns: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Rules may hold thousands of patterns; fnmatch itself remembers only a few hundred."""
    return re.compile("|".join(map(fnmatch.translate, patterns))).match
