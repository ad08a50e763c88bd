"""DareConfig and Rule: how to merge, with every setting checked and explained."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, cast

from darelib.drops import Thinning
from darelib.formats import DTYPES, SHORT_DTYPES
from darelib.methods import LINEAR, METHOD_SETTINGS, METHODS, add_up
from darelib.methods import TensorSettings as TensorSettings
from darelib.text import ConfigError, count_of, nearest

MISMATCHES: Final = ("error", "overlap", "base")
ENGINES: Final = ("auto", "numba", "plain")
SIZE_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}
# The words that a setting may be, where it is one.
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "method": tuple(METHODS),
    "dtype": (*DTYPES, *SHORT_DTYPES),
    "mismatch": MISMATCHES,
    "engine": ENGINES,
}
# A size below this that names no unit was meant in another one: nobody wants files of five bytes.
LEAST_BARE_SIZE: Final = 1000


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def _one_or_each(value: object, accepts: Callable[[Any], bool]) -> bool:
    return all(map(accepts, value)) and len(value) > 0 if isinstance(value, list | tuple) else accepts(value)


def _is_word(name: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in CHOICES[name]


def parse_size(given: object) -> int:
    """Bytes, from a number of them or from text like 5GB (powers of 1000) or 4.5GiB (of 1024). 0: it is neither."""
    if isinstance(given, str) and (found := re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", given.strip())):
        return int(Decimal(found[1]) * SIZE_UNITS.get(found[2].upper(), 0))
    return given if isinstance(given, int) and is_count(given, 1) else 0


# For each setting: what it must be, in words, and the test for it.
CHECKS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "method": (f"one of {', '.join(METHODS)}", _is_word("method")),
    "drop_rate": (
        "a number from 0 up to but not including 1, or one such number per model",
        lambda v: _one_or_each(v, lambda p: is_number(p) and 0 <= p < 1),
    ),
    "weights": (
        "a list of numbers, one per model",
        lambda v: isinstance(v, list | tuple) and _one_or_each(v, is_number),
    ),
    "normalize": ("true or false", lambda v: isinstance(v, bool)),
    "lambda_coeff": ("a number", is_number),
    "rescale": ("true or false", lambda v: isinstance(v, bool)),
    "rescale_q": (
        "a number above 0 and at most 1, or one such number per model",
        lambda v: _one_or_each(v, lambda q: is_number(q) and 0 < q <= 1),
    ),
    "keep_ratio": ("a number above 0 and at most 1", lambda v: is_number(v) and 0 < v <= 1),
    "slerp_t": ("a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1),
    "dtype": (f"one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})", _is_word("dtype")),
    "mismatch": (f"one of {', '.join(MISMATCHES)}", _is_word("mismatch")),
    "any_base": ("true or false", lambda v: isinstance(v, bool)),
    "max_shard_size": ("a size like 5GB or 500MiB, or a number of bytes", lambda v: parse_size(v) > 0),
    "delta_threshold": ("a number above 0", lambda v: is_number(v) and v > 0),
    "seed": ("a whole number from 0 to 2^63 - 1", lambda v: is_count(v, 0)),
    "threads": ("a whole number from 1 up", lambda v: is_count(v, 1)),
    "engine": (f"one of {', '.join(ENGINES)}", _is_word("engine")),
    "verbose": ("true or false", lambda v: isinstance(v, bool)),
}
# What a rule may set for the tensors that it matches.
RULE_SETTINGS: Final = ("drop_rate", "rescale_q", "lambda_coeff", "keep_ratio")


def check_setting(name: str, value: object, where: str) -> None:
    wanted, accepts = CHECKS[name]
    if not accepts(value):
        is_word = isinstance(value, str) and name in CHOICES
        hint = nearest(str(value).lower(), CHOICES[name]) if is_word else "--help says what it does"
        if name == "drop_rate" and is_number(value) and 2 <= cast(float, value) < 100:
            hint = f"it is a share: {cast(float, value):g}% are {cast(float, value) / 100:g}"
        raise ConfigError(f"{where} must be {wanted}, not {value!r}", hint)
    size = parse_size(value) if name == "max_shard_size" else LEAST_BARE_SIZE
    if size < LEAST_BARE_SIZE and not re.search("[A-Za-z]", str(value)):
        raise ConfigError(
            f"{where} would be {count_of(size, 'byte')}", f"write {str(value).strip()}GB, or {size}B if you mean it"
        )


@dataclass(frozen=True)
class Rule:
    """Other settings for the tensors whose names match one of some glob patterns. None: as for all the others."""

    match: tuple[str, ...]
    drop_rate: float | tuple[float, ...] | None = None
    rescale_q: float | tuple[float, ...] | None = None
    lambda_coeff: float | None = None
    keep_ratio: float | None = None

    def __post_init__(self) -> None:
        match = (self.match,) if isinstance(self.match, str) else self.match
        if not isinstance(match, list | tuple) or not match or not all(isinstance(p, str) for p in match):
            raise ConfigError("match must be a pattern or a list of patterns", 'like match = ["*lm_head*"]')
        object.__setattr__(self, "match", tuple(match))
        for name in RULE_SETTINGS:
            if getattr(self, name) is not None:
                check_setting(name, getattr(self, name), name)
                object.__setattr__(self, name, _freeze(getattr(self, name)))
        if all(getattr(self, name) is None for name in RULE_SETTINGS):
            raise ConfigError("it sets nothing", f"give it one of {', '.join(RULE_SETTINGS)}")

    @classmethod
    def of(cls, table: Any, where: str) -> Rule:
        """From a TOML table, or a dictionary like one."""
        if isinstance(table, Rule):
            return table
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table, not {table!r}", 'like {match = "*norm*", drop_rate = 0.5}')
        for key in table:
            if key not in ("match", *RULE_SETTINGS):
                raise ConfigError(f"{where} has no key {key!r}", nearest(key, ("match", *RULE_SETTINGS)))
        try:
            return cls(**{"match": (), **table})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}", error.hint) from None

    def as_table(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in RULE_SETTINGS if getattr(self, name) is not None}
        return {"match": list(self.match), **{name: _as_floats(value) for name, value in given.items()}}

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_floats(value: Any) -> Any:
    """Numbers as floats, so that 1 and 1.0 make the same recipe."""
    if isinstance(value, tuple):
        return [float(number) for number in value]
    return float(value) if isinstance(value, int) else value


@dataclass(frozen=True)
class DareConfig:
    """How to merge. Every field is also a key of [dare] in TOML (rules: [[rules]]) and a flag of the command."""

    method: str = LINEAR  # how the thinned deltas are combined: linear, ties or slerp
    drop_rate: float | Sequence[float] = 0.9  # share of each delta to drop; one for all models, or one per model
    weights: Sequence[float] | None = None  # None: 1/n each, or equal shares where ties normalizes
    normalize: bool | None = None  # divide by the sum of the weights (ties: of those that agree); None: ties only
    lambda_coeff: float = 1.0  # scale of the merged delta
    rescale: bool = True  # False: drop without rescaling
    rescale_q: float | Sequence[float] | None = None  # DAREx-q: divide by this instead of by the keep rate
    keep_ratio: float | None = None  # ties: share of the surviving entries that trim keeps; None: all
    slerp_t: float | None = None  # slerp: position between the two models; None: 0.5
    dtype: str | None = None  # output type of float tensors, kept by its long name; None: the base's
    mismatch: str = "error"  # tensors of another shape: error; overlap: merge the common rows; base: keep the base's
    any_base: bool = False  # True: merge even where config.json says that the base is another kind of model
    max_shard_size: str | int = "5GB"  # of each file's tensors, where the output is a directory
    delta_threshold: float = 0.002  # warn where deltas are larger; the paper's limit for safe dropping
    seed: int = 42  # the first model's seed; model i draws its mask with seed + i
    threads: int | None = None  # None: all cores that this process may use
    engine: str = "auto"  # what computes: numba, plain (NumPy: slow, for where Numba cannot be loaded), or auto
    verbose: bool = True  # progress and summary
    rules: Sequence[Rule | dict[str, Any]] = ()  # the first that matches a tensor's name wins

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if setting.name in CHECKS and (value is not None or setting.default is not None):
                check_setting(setting.name, value, setting.name)
            object.__setattr__(self, setting.name, _freeze(value))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if not isinstance(self.rules, list | tuple):
            raise ConfigError(
                f"rules must be a list, not {self.rules!r}", 'like [{"match": "*norm*", "drop_rate": 0.5}]'
            )
        rules = tuple(Rule.of(rule, f"rule {k}") for k, rule in enumerate(self.rules, 1))
        object.__setattr__(self, "rules", rules)
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse settings that mean nothing together, rather than ignore one of them."""

        def is_set(name: str) -> bool:
            return any(getattr(holder, name, None) is not None for holder in (self, *self.typed_rules))

        for name in METHOD_SETTINGS:
            if is_set(name) and name not in METHODS[self.method].settings:
                fitting = "method " + " or ".join(m for m, entry in METHODS.items() if name in entry.settings)
                verb = "mean" if name == "weights" else "means"
                raise ConfigError(f"{name} {verb} nothing to method {self.method}", f"use {fitting}, or leave it out")
        if is_set("rescale_q") and not self.rescale:
            raise ConfigError("rescale_q means nothing when rescale is off", "leave one of the two out")

    @property
    def typed_rules(self) -> tuple[Rule, ...]:
        return cast(tuple[Rule, ...], self.rules)

    def check_models(self, count: int) -> None:
        """Refuse settings that do not fit this number of models."""
        method = METHODS[self.method]
        if method.models not in (None, count):
            others = " or ".join(name for name, entry in METHODS.items() if entry.models is None)
            raise ConfigError(f"method {self.method} takes {method.models} models, not {count}", f"use {others}")
        for where, holder in [("", self), *((f"rule {k}: ", rule) for k, rule in enumerate(self.typed_rules, 1))]:
            for name in ("drop_rate", "weights", "rescale_q"):
                value = getattr(holder, name, None)
                if isinstance(value, tuple) and len(value) != count:
                    raise ConfigError(
                        f"{where}{name} has {len(value)} values for {count} models", "give one for each model"
                    )
        if method.shares_only and self.is_normalized and self.weights is not None and min(self.weights) < 0:
            raise ConfigError(
                f"{self.method} weights must not be negative where they are normalized",
                "they are shares, and lambda_coeff sets the size; or set normalize to false",
            )
        if self.weights is not None and not any(self.weights):
            raise ConfigError("all weights are 0, so nothing would be merged", "give the models weights above 0")
        if self.weights is not None and self.is_normalized and not add_up(self.weights):
            raise ConfigError("the weights add up to 0, so they cannot be normalized", "set normalize to false")
        for rule in (None, *self.typed_rules):
            self.for_rule(rule, count)

    @property
    def is_normalized(self) -> bool:
        """Whether weights are divided by their sum."""
        return METHODS[self.method].normalize if self.normalize is None else self.normalize

    @property
    def position(self) -> float:
        """Where slerp stops between its two models."""
        return 0.5 if self.slerp_t is None else float(self.slerp_t)

    def general(self, count: int) -> TensorSettings:
        """The settings of the tensors that no rule matches."""
        return self.for_rule(None, count)

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches a tensor's name."""
        return next((rule for rule in self.typed_rules if rule.matches(name)), None)

    def for_tensor(self, name: str, count: int) -> TensorSettings:
        """The settings of one tensor, by the first rule that matches its name."""
        return self.for_rule(self.rule_for(name), count)

    def for_rule(self, rule: Rule | None, count: int) -> TensorSettings:
        """The settings of the tensors that a rule is for."""

        def choose(name: str) -> Any:
            own = getattr(rule, name, None)
            return getattr(self, name) if own is None else own

        def each(value: Any) -> tuple[Any, ...]:
            return value if isinstance(value, tuple) else (value,) * count

        rates, given = each(choose("drop_rate")), each(choose("rescale_q"))
        ratio = choose("keep_ratio")
        return TensorSettings(
            method=self.method,
            thinnings=tuple(Thinning(p, divisor=self._divisor(p, q)) for p, q in zip(rates, given, strict=True)),
            weights=METHODS[self.method].share(self.weights, count, self.is_normalized),
            normalize=self.is_normalized,
            lambda_coeff=float(choose("lambda_coeff")),
            keep_ratio=1.0 if ratio is None else float(ratio),
            slerp_t=self.position,
        )

    def _divisor(self, rate: float, q: float | None) -> float:
        """What the kept deltas are divided by: q, or the rate at which the mask keeps them."""
        # The tolerance allows for 1 - 0.9 being a little less than 0.1.
        if q is not None and q < 1 - rate - 1e-9:
            raise ConfigError(
                f"rescale_q {q:g} is below 1 - drop_rate = {1 - rate:g}, which would more than undo the dropping",
                "DAREx-q wants 1 - drop_rate <= q <= 1; a rule with a drop rate of its own may need its own q",
            )
        if not self.rescale:
            return 1.0
        return Thinning(rate).keep_rate if q is None else q

    def recipe_settings(self) -> dict[str, Any]:
        """The settings that determine the output's bytes, as a [dare] table."""
        chosen: dict[str, Any] = {"method": self.method, "drop_rate": _as_floats(self.drop_rate), "seed": self.seed}
        chosen |= {"lambda_coeff": float(self.lambda_coeff), "rescale": self.rescale}
        if "slerp_t" in METHODS[self.method].settings:
            chosen["slerp_t"] = self.position
        for name in ("weights", "rescale_q", "keep_ratio", "dtype"):
            if getattr(self, name) is not None:
                chosen[name] = _as_floats(getattr(self, name))
        if self.is_normalized != METHODS[self.method].normalize:
            chosen["normalize"] = self.is_normalized
        if self.mismatch != "error":
            chosen["mismatch"] = self.mismatch
        if self.any_base:
            chosen["any_base"] = True
        return chosen
