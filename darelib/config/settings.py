"""A setting is one row: a field of a dataclass that also says what it must be, what it does, and
where it may stand. Checks, flags, keys in TOML, recipes and searches follow from it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from darelib.config.values import (
    RATIO,
    SWITCH,
    Check,
    Number,
    as_toml,
    at_least,
    below,
    freeze,
    is_number,
    list_of,
    number,
    one_or_each,
    word,
)
from darelib.core.drops import DROPS, RESCALES
from darelib.core.text import ConfigError, as_text, nearest
from darelib.methods import METHODS
from darelib.methods.looks import BASE, ZERO

# Of changes that are no product of matrices, where an adapter is written.
SAVE: Final = "save"
LEAVE_OUT: Final = "leave-out"


class Group(StrEnum):
    """The headings of --help, in its order."""

    MODELS = "models"
    MAIN = "main settings"
    DROP = "what is dropped"
    METHOD = "methods"
    EXAMPLES = "examples of each skill"
    ADAPTERS = "adapters"
    IMAGES = "image models"
    MISFITS = "models that do not fit their base"
    OUTPUT = "what is written"
    MACHINES = "several machines"
    RUN = "this run"


class Decides(StrEnum):
    """What depends on a setting: recipes have only those that an output depends on."""

    TENSORS = "tensors"
    FILES = "files"  # into which a directory's tensors are divided
    WARNINGS = "warnings"
    NOTHING = "nothing"  # but how one run goes on one machine


@dataclass(frozen=True)
class Row:
    """All about a setting but its name, its type and its default, which its field has."""

    check: Check
    help: str  # of its flag, which also names the methods or drops that use it, and its default
    group: Group
    metavar: str = "X"
    flag: str = ""  # where it is not spelled like the name
    searched: bool = False  # whether a search may choose it, though rules may not set it
    decides: Decides = Decides.TENSORS


def setting(check: Check, help: str, group: Group, *, default: Any = None, **others: Any) -> Any:
    """The field of a setting. Where it may stand: in a rule, if the field is one of Settings; as a
    gradient or one for each model, if its check accepts that.
    """
    return field(default=default, metadata={"row": Row(check, help, group, **others)})


def list_rows(holder: type) -> dict[str, Row]:
    """The rows of a dataclass, by name. A field that gives only another default keeps its row."""
    classes = [base for base in reversed(holder.__mro__) if is_dataclass(base)]
    entries = [entry for base in classes for entry in fields(base)]
    return {entry.name: entry.metadata["row"] for entry in entries if entry.metadata}


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Let errors begin with where they are."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}{error}", error.hint) from None


def check_value(check: Check, value: Any, where: str) -> None:
    """Refuse a value that a setting cannot have. where: what to call the setting."""
    if not check.accepts(freeze(value)):
        hint = check.hint(value)
        if isinstance(value, str) and check.choices and not hint:
            hint = nearest(value.lower(), check.choices)
        raise ConfigError(
            f"{where} must be {check.wanted}, not {value!r}", hint or "--help says what it does"
        )


def check_fields(holder: Any, rows: Mapping[str, Row]) -> None:
    """Check all settings of a frozen dataclass, and store them frozen too."""
    for entry in fields(holder):
        value = getattr(holder, entry.name)
        if entry.name in rows and (value is not None or entry.default is not None):
            check_value(rows[entry.name].check, value, entry.name)
        object.__setattr__(holder, entry.name, freeze(value))


def hint_at_share(value: Any) -> str:
    is_percentage = is_number(value) and 2 <= value < 100
    return f"it is a share: {value:g}% are {value / 100:g}" if is_percentage else ""


def hint_at_fp8(value: Any) -> str:
    is_fp8 = isinstance(value, str) and "8" in value
    return "--keep-fp8 writes FP8 again; else write bfloat16, and quantise the result" * is_fp8


# The methods that drop something by default.
RATES: Final = ", ".join(
    f"{name} {method.drop_rate:g}" for name, method in METHODS.items() if method.drop_rate
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How tensors are merged: all of them or, by a rule, some. None: what the others have, or what
    the method or the drop has by default.
    """

    method: str | None = setting(
        word(*METHODS), f"how to combine the deltas: {', '.join(METHODS)}", Group.MAIN,
        metavar="NAME",
    )  # fmt: skip
    drop_rate: Number | Sequence[Number] | None = setting(
        one_or_each(below(1, hint_at_share)),
        "share of each delta to drop, 0 <= P < 1; one, or one per model "
        f"(default: {RATES}, else 0)",
        Group.MAIN,
        metavar="P",
    )
    drop: str | Sequence[str] | None = setting(
        one_or_each(word(*DROPS), "word"),
        f"{', '.join(DROPS)}; one, or one per model",
        Group.DROP,
        metavar="NAME",
    )
    gamma: Number | Sequence[Number] | None = setting(
        one_or_each(below(1)), "share of the largest entries to drop as well", Group.DROP,
        metavar="G",
    )  # fmt: skip
    epsilon: Number | Sequence[Number] | None = setting(
        one_or_each(below(0.5)),
        "keep rates from 1 - P - E (smallest of a row) to 1 - P + E",
        Group.DROP,
        metavar="E",
    )
    rescale: bool | str | None = setting(
        replace(
            word(*RESCALES),
            wanted=f"one of {', '.join(RESCALES)}, or true or false",
            accepts=lambda value: isinstance(value, bool) or value in RESCALES,
        ),
        "expectation (divide by the keep rate), l1 (restore the sum of |delta|) or none "
        "(default: by drop)",
        Group.DROP,
        metavar="HOW",
    )
    rescale_q: Number | Sequence[Number] | None = setting(
        one_or_each(RATIO),
        "DAREx-q: divide by Q, not by 1 - P",
        Group.DROP,
        metavar="Q",
    )
    weights: Sequence[Number] | None = setting(
        replace(list_of("numbers, one per model", number()), per_model=True),
        "one per model (default: equal)",
        Group.MAIN,
        metavar="W",
    )
    normalize: bool | None = setting(
        SWITCH,
        "divide by the sum of the weights (default: by method)",
        Group.METHOD,
    )
    origin: str | None = setting(
        word(BASE, ZERO),
        "combine deltas (base) or whole weights (zero) (default: by method)",
        Group.METHOD,
        metavar="NAME",
    )
    lambda_coeff: Number | str | None = setting(
        number(), "scale of the merged delta", Group.MAIN, flag="--lambda"
    )
    keep_ratio: Number | None = setting(
        RATIO,
        "share of entries to keep: the largest, or (sce) the most different",
        Group.METHOD,
        metavar="R",
    )
    slerp_t: Number | None = setting(
        number(" from 0 to 1", lambda t: 0 <= t <= 1),
        "position between the two models",
        Group.METHOD,
        metavar="T",
    )
    swap_t: Number | None = setting(
        at_least(0), "how far an entry may move", Group.METHOD, metavar="T"
    )
    threshold: Number | None = setting(
        at_least(0), "a smaller |delta| counts as none", Group.METHOD
    )
    boost: Number | None = setting(
        at_least(0),
        "multiply entries of only one model by 1 + R * shared / own entries",
        Group.METHOD,
        metavar="R",
    )
    boost_limit: Number | None = setting(
        at_least(0), "limit of shared / own entries", Group.METHOD, metavar="A"
    )
    ridge: Number | None = setting(
        # Beyond these, float64 cannot solve for the merged change.
        number(" from 1e-12 to 1e12", lambda ridge: 1e-12 <= ridge <= 1e12),
        "small keeps deltas apart, large averages them",
        Group.METHOD,
    )
    norm_limit: Number | None = setting(
        at_least(0),
        "merged delta's size, at most X times the models' mean; 0: as it is",
        Group.METHOD,
    )
    scale: Number | None = setting(number(), "multiply the base's weights by X", Group.METHOD)
    matched: bool | None = setting(
        SWITCH, "match matrices, where there are examples (default: match)", Group.EXAMPLES
    )


# What a rule may set for the tensors that it matches.
RULE_ROWS: Final = list_rows(Settings)
RULE_SETTINGS: Final = tuple(RULE_ROWS)


def list_given(holder: object, names: Iterable[str]) -> dict[str, Any]:
    """Those of some settings that a configuration or a rule has."""
    values = {name: getattr(holder, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


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
        check_fields(self, RULE_ROWS)
        if not list_given(self, RULE_SETTINGS):
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

    def without(self, names: Collection[str], method: str) -> Rule:
        """The same without some settings. method: that of all tensors; a rule that would have no
        settings has it, so that no later rule matches.
        """
        own = list_given(self, RULE_SETTINGS)
        kept = {name: each for name, each in own.items() if name not in names}
        return Rule(self.match, **(kept or {"method": method}))

    def as_table(self) -> dict[str, Any]:
        settings = list_given(self, RULE_SETTINGS)
        return {"match": list(self.match)} | {name: as_toml(settings[name]) for name in settings}

    def matches(self, name: str) -> bool:
        return _compile_globs(self.match)(name) is not None


@lru_cache(4096)
def _compile_globs(patterns: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Rules may hold thousands of patterns; fnmatch itself remembers only a few hundred."""
    return re.compile("|".join(map(fnmatch.translate, patterns))).match
