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
from darelib.core.text import ConfigError, as_text, nearest
from darelib.methods import METHODS
from darelib.methods.settings import BASE, ZERO

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


def is_size(value: object) -> bool:
    has_unit = re.search("[A-Za-z]", str(value))
    return parse_size(value) >= (1 if has_unit else LEAST_BARE_SIZE)


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
        f"a size like 5GB or 500MiB, or a number of bytes from {LEAST_BARE_SIZE} up",
        is_size,
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
        raise ConfigError(f"{where} must be {check.wanted}, not {value!r}", hint)


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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How tensors are merged: all of them or, by a rule, some. None: what the others have, or what
    the method or the drop has by default.
    """

    # How the thinned deltas are combined: linear, ties, slerp, ram, wudi, model_stock, nuslerp,
    # multislerp, karcher, nearswap, sce, ramplus or arcee_fusion; passthrough takes no models.
    method: str | None = None
    # Share of each delta to drop; one for all models, or one per model.
    drop_rate: Number | Sequence[Number] | None = None
    # What to drop: random, magnitude, breadcrumbs or della; one, or one per model.
    drop: str | Sequence[str] | None = None
    # breadcrumbs: share of the largest to drop; None: 0.01.
    gamma: Number | Sequence[Number] | None = None
    # della: keep with 1 - drop_rate +- this, by size; None: 0.15.
    epsilon: Number | Sequence[Number] | None = None
    # Of what is kept: expectation (True), l1, none (False); None: by drop.
    rescale: bool | str | None = None
    # DAREx-q: divide by this instead of by the keep rate.
    rescale_q: Number | Sequence[Number] | None = None
    # None: 1/n each, or equal shares where ties normalizes.
    weights: Sequence[Number] | None = None
    # Divide by the sum of the weights (ties: of those that agree); None: ties and multislerp only.
    normalize: bool | None = None
    # What is combined: base (the models' deltas) or zero (their values); None: by method.
    origin: str | None = None
    # Scale of the merged delta.
    lambda_coeff: Number | None = None
    # ties, sce: share of the entries to keep, of those that survived or that differ; None: all.
    keep_ratio: Number | None = None
    # slerp: position between the two models; None: 0.5.
    slerp_t: Number | None = None
    # nearswap: how far an entry may move; None: 0.0001.
    swap_t: Number | None = None
    # ram, ramplus: a model changes an entry if |delta| is at least this; None: 1e-5.
    threshold: Number | None = None
    # ramplus: what only one model changes is multiplied by 1 + boost * (entries that it shares /
    # entries that are its own, at most boost_limit); None: 0.1 and 0.2.
    boost: Number | None = None
    boost_limit: Number | None = None
    # wudi: a small one keeps the models' deltas apart, a large one averages them; None: 1.
    ridge: Number | None = None
    # wudi: the merged delta has at most so many times the mean size of the models'; None: 1.5;
    # 0: it is not resized.
    norm_limit: Number | None = None
    # passthrough, which takes no models: what the base is multiplied by; None: 1.
    scale: Number | None = None


@dataclass(frozen=True)
class Rule(Settings):
    """Other settings for the tensors whose names match one of some glob patterns."""

    match: tuple[str, ...]

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
RULE_SETTINGS: Final = tuple(field.name for field in fields(Settings))
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
