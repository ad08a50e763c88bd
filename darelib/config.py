"""DareConfig and Rule: how to merge, with every setting checked and explained."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, Final, TypeAlias, cast

from darelib.core.drops import (
    DROP_SETTINGS,
    DROPS,
    EXPECTATION,
    L1,
    NONE,
    RANDOM,
    RESCALES,
    Thinning,
)
from darelib.core.formats import DTYPES, SHORT_DTYPES
from darelib.core.gradients import Gradient, count_layers, depth_of, find_depths, freeze, value_at
from darelib.core.methods import LINEAR, METHOD_SETTINGS, METHODS, sum_weights
from darelib.core.methods import TensorSettings as TensorSettings
from darelib.core.text import ConfigError, count_of, nearest

# A number, or one that changes over the layers: {"gradient": [0.9, 0.5, 0.9]}.
Number: TypeAlias = float | Gradient | Mapping[str, Sequence[float]]
MISMATCHES: Final = ("error", "overlap", "base")
ENGINE_NAMES: Final = ("auto", "numba", "plain")
SIZE_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}
# The words that a setting may be, where it is one.
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "method": tuple(METHODS),
    "drop": tuple(DROPS),
    "rescale": RESCALES,
    "dtype": (*DTYPES, *SHORT_DTYPES),
    "mismatch": MISMATCHES,
    "engine": ENGINE_NAMES,
}
# A size below this that names no unit was meant in another one: nobody wants files of five bytes.
LEAST_BARE_SIZE: Final = 1000


def is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def _one_or_each(accepts: Callable[[Any], bool]) -> Callable[[object], bool]:
    return lambda value: (
        all(map(accepts, value)) and len(value) > 0 if isinstance(value, tuple) else accepts(value)
    )


def _number(accepts: Callable[[Any], bool] = lambda _: True) -> Callable[[object], bool]:
    """Of a number that may change over the layers."""
    return lambda value: all(
        is_number(number) and accepts(number)
        for number in (value.numbers if isinstance(value, Gradient) else (value,))
    )


def _is_word(name: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in CHOICES[name]


def parse_size(given: object) -> int:
    """Bytes, from a number of them or from text like 5GB (powers of 1000) or 4.5GiB (of 1024). 0: it is neither."""
    if isinstance(given, str) and (
        found := re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", given.strip())
    ):
        return int(Decimal(found[1]) * SIZE_UNITS.get(found[2].upper(), 0))
    return given if isinstance(given, int) and is_count(given, 1) else 0


# For each setting: what it must be, in words, and the test for it.
CHECKS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "method": (f"one of {', '.join(METHODS)}", _is_word("method")),
    "drop_rate": (
        "a number from 0 up to but not including 1, or one such number per model",
        _one_or_each(_number(lambda p: 0 <= p < 1)),
    ),
    "drop": (
        f"one of {', '.join(DROPS)}, or one such word per model",
        _one_or_each(_is_word("drop")),
    ),
    "gamma": (
        "a number from 0 up to but not including 1, or one such number per model",
        _one_or_each(_number(lambda share: 0 <= share < 1)),
    ),
    "epsilon": (
        "a number from 0 up to but not including 0.5, or one such number per model",
        _one_or_each(_number(lambda e: 0 <= e < 0.5)),
    ),
    "weights": (
        "a list of numbers, one per model",
        lambda v: isinstance(v, tuple) and _one_or_each(_number())(v),
    ),
    "normalize": ("true or false", lambda v: isinstance(v, bool)),
    "lambda_coeff": ("a number", _number()),
    "rescale": (
        f"one of {', '.join(RESCALES)}, or true or false",
        lambda v: isinstance(v, bool) or _is_word("rescale")(v),
    ),
    "rescale_q": (
        "a number above 0 and at most 1, or one such number per model",
        _one_or_each(_number(lambda q: 0 < q <= 1)),
    ),
    "keep_ratio": ("a number above 0 and at most 1", _number(lambda r: 0 < r <= 1)),
    "slerp_t": ("a number from 0 to 1", _number(lambda t: 0 <= t <= 1)),
    "threshold": ("a number from 0 up", lambda v: is_number(v) and v >= 0),
    "dtype": (f"one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})", _is_word("dtype")),
    "mismatch": (f"one of {', '.join(MISMATCHES)}", _is_word("mismatch")),
    "any_base": ("true or false", lambda v: isinstance(v, bool)),
    "max_shard_size": (
        "a size like 5GB or 500MiB, or a number of bytes",
        lambda v: parse_size(v) > 0,
    ),
    "delta_threshold": ("a number above 0", lambda v: is_number(v) and v > 0),
    "seed": ("a whole number from 0 to 2^63 - 1", lambda v: is_count(v, 0)),
    "threads": ("a whole number from 1 up", lambda v: is_count(v, 1)),
    "engine": (f"one of {', '.join(ENGINE_NAMES)}", _is_word("engine")),
    "verbose": ("true or false", lambda v: isinstance(v, bool)),
}
# What a search may choose: the settings that change what is merged, less the noise of the masks.
SWEEP_SETTINGS: Final = tuple(
    name
    for name in CHECKS
    if name
    not in ("any_base", "max_shard_size", "delta_threshold", "seed", "threads", "engine", "verbose")
)
# What there may be one of per model.
PER_MODEL: Final = ("drop_rate", "drop", "gamma", "epsilon", "rescale_q", "weights")


def check_setting(name: str, value: object, where: str) -> None:
    wanted, accepts = CHECKS[name]
    if not accepts(freeze(value)):
        is_word = isinstance(value, str) and name in CHOICES
        hint = nearest(str(value).lower(), CHOICES[name]) if is_word else "--help says what it does"
        if name == "drop_rate" and is_number(value) and 2 <= cast(float, value) < 100:
            hint = f"it is a share: {cast(float, value):g}% are {cast(float, value) / 100:g}"
        if not isinstance(value, str) and "{" in repr(value):
            hint = "only numbers change over the layers, like {gradient = [0.9, 0.5, 0.9]}, and each of them must fit"
        raise ConfigError(f"{where} must be {wanted}, not {value!r}", hint)
    size = parse_size(value) if name == "max_shard_size" else LEAST_BARE_SIZE
    if size < LEAST_BARE_SIZE and not re.search("[A-Za-z]", str(value)):
        raise ConfigError(
            f"{where} would be {count_of(size, 'byte')}",
            f"write {str(value).strip()}GB, or {size}B if you mean it",
        )


@dataclass(frozen=True)
class Rule:
    """Other settings for the tensors whose names match one of some glob patterns. None: as for all the others."""

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
    slerp_t: Number | None = None

    def __post_init__(self) -> None:
        match = (self.match,) if isinstance(self.match, str) else self.match
        if (
            not isinstance(match, list | tuple)
            or not match
            or not all(isinstance(p, str) for p in match)
        ):
            raise ConfigError(
                "match must be a pattern or a list of patterns", 'like match = ["*lm_head*"]'
            )
        object.__setattr__(self, "match", tuple(match))
        for name in RULE_SETTINGS:
            if getattr(self, name) is not None:
                check_setting(name, getattr(self, name), name)
                object.__setattr__(self, name, freeze(getattr(self, name)))
        if all(getattr(self, name) is None for name in RULE_SETTINGS):
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
        for key in table:
            if key not in ("match", *RULE_SETTINGS):
                raise ConfigError(
                    f"{where} has no key {key!r}", nearest(key, ("match", *RULE_SETTINGS))
                )
        try:
            return cls(**{"match": (), **table})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}", error.hint) from None

    def as_table(self) -> dict[str, Any]:
        given = {
            name: getattr(self, name) for name in RULE_SETTINGS if getattr(self, name) is not None
        }
        return {
            "match": list(self.match),
            **{name: as_toml(value) for name, value in given.items()},
        }

    def matches(self, name: str) -> bool:
        return _compile_globs(self.match)(name) is not None


# What a rule may set for the tensors that it matches.
RULE_SETTINGS: Final = tuple(
    field.name for field in dataclasses.fields(Rule) if field.name != "match"
)


@lru_cache(4096)
def _compile_globs(patterns: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Rules may hold thousands of patterns, and every tensor asks all rules; fnmatch remembers only a few hundred."""
    return re.compile("|".join(map(fnmatch.translate, patterns))).match


def as_toml(value: Any) -> Any:
    """A setting as in TOML, with numbers as floats, so that 1 and 1.0 make the same recipe."""
    if isinstance(value, Gradient):
        return {"gradient": as_toml(value.numbers)}
    if isinstance(value, tuple):
        return [as_toml(entry) for entry in value]
    return float(value) if is_number(value) else value


def name_rescale(rescale: bool | str | None, drop: str) -> str:
    """How what a drop keeps is rescaled, from what is set: None is its own way."""
    if isinstance(rescale, bool):
        return EXPECTATION if rescale else NONE
    return rescale or DROPS[drop].rescale


def make_thinning(
    drop_rate: float,
    drop: str,
    gamma: float,
    epsilon: float,
    rescale: bool | str | None,
    q: float | None,
) -> Thinning:
    """How one model's delta is thinned. q: what is to be divided by, instead of the rate at which the mask keeps."""
    # The tolerance allows for 1 - 0.9 being a little less than 0.1.
    if q is not None and q < 1 - drop_rate - 1e-9:
        raise ConfigError(
            f"rescale_q {q:g} is below 1 - drop_rate = {1 - drop_rate:g}, which would more than undo the dropping",
            "DAREx-q wants 1 - drop_rate <= q <= 1; a rule with a drop rate of its own may need its own q",
        )
    word, divisor = name_rescale(rescale, drop), 1.0
    if drop == RANDOM and word == EXPECTATION:
        divisor = Thinning(drop_rate).keep_rate if q is None else q
    thinning = Thinning(drop_rate, drop, gamma, epsilon, word, divisor)
    DROPS[drop].check(thinning)
    return thinning


@dataclass(frozen=True)
class DareConfig:
    """How to merge. Every field is also a key of [dare] in TOML (rules: [[rules]]) and a flag of the command."""

    method: str = LINEAR  # how the thinned deltas are combined: linear, ties, slerp or ram
    drop_rate: Number | Sequence[Number] = (
        0.9  # share of each delta to drop; one for all models, or one per model
    )
    weights: Sequence[Number] | None = None  # None: 1/n each, or equal shares where ties normalizes
    normalize: bool | None = (
        None  # divide by the sum of the weights (ties: of those that agree); None: ties only
    )
    lambda_coeff: Number = 1.0  # scale of the merged delta
    rescale: bool | str | None = (
        None  # of what is kept: expectation (True), l1, none (False); None: by drop
    )
    rescale_q: Number | Sequence[Number] | None = (
        None  # DAREx-q: divide by this instead of by the keep rate
    )
    keep_ratio: Number | None = (
        None  # ties: share of the surviving entries that trim keeps; None: all
    )
    slerp_t: Number | None = None  # slerp: position between the two models; None: 0.5
    drop: str | Sequence[str] = (
        RANDOM  # what to drop: random, magnitude, breadcrumbs or della; one, or one per model
    )
    gamma: Number | Sequence[Number] | None = (
        None  # breadcrumbs: share of the largest to drop; None: 0.01
    )
    epsilon: Number | Sequence[Number] | None = (
        None  # della: keep with 1 - drop_rate +- this, by size; None: 0.15
    )
    threshold: float | None = (
        None  # ram: a model changes an entry if |delta| is at least this; None: 1e-5
    )
    dtype: str | None = (
        None  # output type of float tensors, kept by its long name; None: the base's
    )
    mismatch: str = "error"  # tensors of another shape: error; overlap: merge the common rows; base: keep the base's
    any_base: bool = (
        False  # True: merge even where config.json says that the base is another kind of model
    )
    max_shard_size: str | int = "5GB"  # of each file's tensors, where the output is a directory
    delta_threshold: float = (
        0.002  # warn where deltas are larger; the paper's limit for safe dropping
    )
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
            object.__setattr__(self, setting.name, freeze(value))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if not isinstance(self.rules, list | tuple):
            raise ConfigError(
                f"rules must be a list, not {self.rules!r}",
                'like [{"match": "*norm*", "drop_rate": 0.5}]',
            )
        rules = tuple(Rule.of(rule, f"rule {k}") for k, rule in enumerate(self.rules, 1))
        object.__setattr__(self, "rules", rules)
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse settings that mean nothing together, rather than ignore one of them."""

        def is_set(name: str) -> bool:
            return any(
                getattr(holder, name, None) is not None for holder in (self, *self.typed_rules)
            )

        for name in METHOD_SETTINGS:
            if is_set(name) and name not in METHODS[self.method].settings:
                fitting = "method " + " or ".join(
                    m for m, entry in METHODS.items() if name in entry.settings
                )
                verb = "mean" if name == "weights" else "means"
                raise ConfigError(
                    f"{name} {verb} nothing to method {self.method}",
                    f"use {fitting}, or leave it out",
                )
        for where, rule in self._scopes():
            self._check_drops(where, rule)
            users = set(self._drops(rule)) if rule else self._all_drops
            for name in DROP_SETTINGS:
                if getattr(rule or self, name) is not None and not any(
                    name in DROPS[d].settings for d in users
                ):
                    [fitting] = (drop for drop, entry in DROPS.items() if name in entry.settings)
                    raise ConfigError(
                        f"{where}{name} means nothing to drop {' and '.join(sorted(users))}",
                        f"use drop {fitting}, or leave it out",
                    )

    def _check_drops(self, where: str, rule: Rule | None) -> None:
        """Refuse what does not go with what is dropped of the tensors that a rule is for."""
        drops = self._drops(rule)
        other = next((drop for drop in drops if drop != RANDOM), None)
        exact = next((drop for drop in drops if DROPS[drop].rescale != EXPECTATION), None)
        rescale = self._choose(rule, "rescale")
        if other and not METHODS[self.method].any_drop:
            fitting = " or ".join(name for name, method in METHODS.items() if method.any_drop)
            raise ConfigError(
                f"{where}method {self.method} goes with drop random only, not {other}",
                f"use method {fitting}",
            )
        if other and self._choose(rule, "keep_ratio") not in (None, 1):
            raise ConfigError(
                f"{where}keep_ratio goes with drop random only, not {other}",
                "drop_rate alone says how much is kept; in a rule, keep_ratio = 1 turns trim off",
            )
        if exact and rescale in (True, EXPECTATION):
            raise ConfigError(
                f"{where}rescale {str(rescale).lower()} means nothing to drop {exact}, which drops nothing at random",
                'use rescale "l1" or "none", or leave it out',
            )
        if self._choose(rule, "rescale_q") is not None and (other or rescale in (False, NONE, L1)):
            why = (
                f"to drop {other}"
                if other
                else "when rescale is off"
                if rescale != L1
                else "when rescale is l1"
            )
            raise ConfigError(f"{where}rescale_q means nothing {why}", "leave one of the two out")

    def _scopes(self) -> list[tuple[str, Rule | None]]:
        """What settings are resolved for: the tensors without a rule, and those of each rule; how to name them."""
        return [("", None), *((f"rule {k}: ", rule) for k, rule in enumerate(self.typed_rules, 1))]

    def _choose(self, rule: Rule | None, name: str) -> Any:
        own = getattr(rule, name, None)
        return getattr(self, name) if own is None else own

    def _gather(self, rule: Rule | None) -> tuple[Any, ...]:
        return tuple(self._choose(rule, name) for name in RULE_SETTINGS)

    def _drops(self, rule: Rule | None) -> tuple[str, ...]:
        drop = self._choose(rule, "drop")
        return drop if isinstance(drop, tuple) else (drop,)

    @property
    def _all_drops(self) -> set[str]:
        return {drop for _, rule in self._scopes() for drop in self._drops(rule)}

    @property
    def typed_rules(self) -> tuple[Rule, ...]:
        return cast(tuple[Rule, ...], self.rules)

    @cached_property
    def _fitting(self) -> set[int]:
        """Numbers of models that were found to fit: searches merge again and again."""
        return set()

    def check_models(self, count: int) -> None:
        """Refuse settings that do not fit this number of models."""
        if count in self._fitting:
            return
        method = METHODS[self.method]
        if method.models not in (None, count):
            others = " or ".join(name for name, entry in METHODS.items() if entry.models is None)
            raise ConfigError(
                f"method {self.method} takes {method.models} models, not {count}", f"use {others}"
            )
        for where, rule in self._scopes():
            for name in PER_MODEL:
                value = getattr(rule or self, name)
                if isinstance(value, tuple) and len(value) != count:
                    raise ConfigError(
                        f"{where}{name} has {len(value)} values for {count} models",
                        "give one for each model; what changes over the layers is like {gradient = [0.9, 0.5, 0.9]}",
                    )
        if self.weights is not None and not any(self.weights):
            raise ConfigError(
                "all weights are 0, so nothing would be merged", "give the models weights above 0"
            )
        self.resolve_all(count)
        self._fitting.add(count)

    def resolve_all(self, count: int) -> list[TensorSettings]:
        """The settings of all rules, and of no rule, wherever the lines of gradients meet."""
        found = []
        for where, rule in self._scopes():
            for depth in sorted(find_depths(self._gather(rule))):
                try:
                    found.append(self.for_rule(rule, count, depth))
                except ConfigError as error:
                    raise ConfigError(f"{where}{error}", error.hint) from None
        return found

    def _check_weights(self, weights: Sequence[float], normalize: bool) -> None:
        if METHODS[self.method].shares_only and normalize and min(weights) < 0:
            raise ConfigError(
                f"{self.method} weights must not be negative where they are normalized",
                "they are shares, and lambda_coeff sets the size; or set normalize to false",
            )
        if normalize and any(weights) and not sum_weights(weights):
            raise ConfigError(
                "the weights add up to 0, so they cannot be normalized", "set normalize to false"
            )

    @property
    def is_normalized(self) -> bool:
        """Whether weights are divided by their sum."""
        return METHODS[self.method].normalize if self.normalize is None else self.normalize

    @property
    def averages(self) -> bool:
        """Whether the base itself may be one of the models: it then counts."""
        return METHODS[self.method].averages(self.is_normalized)

    @cached_property
    def has_gradients(self) -> bool:
        """Whether any setting changes over the layers."""
        return any(len(find_depths(self._gather(rule))) > 1 for _, rule in self._scopes())

    def general(self, count: int) -> TensorSettings:
        """The settings of the tensors that no rule matches, outside of the layers."""
        return self.for_rule(None, count)

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches a tensor's name."""
        return next((rule for rule in self.typed_rules if rule.matches(name)), None)

    def for_rule(self, rule: Rule | None, count: int, depth: float = 0.0) -> TensorSettings:
        """The settings of the tensors that a rule is for, from depth 0 in the first layer to 1 in the last."""

        def choose(name: str, default: Any = None) -> Any:
            value = self._choose(rule, name)
            return default if value is None else value_at(value, depth)

        def each(name: str, default: Any = None) -> tuple[Any, ...]:
            value = choose(name, default)
            return value if isinstance(value, tuple) else (value,) * count

        drops, rescales = each("drop_rate"), each("rescale")
        shapes = each("drop"), each("gamma", Thinning.gamma), each("epsilon", Thinning.epsilon)
        weights, normalize = choose("weights"), choose("normalize", METHODS[self.method].normalize)
        scale = float(choose("lambda_coeff"))
        if weights is not None:
            self._check_weights(weights, normalize)
            if not any(weights):  # the base's tensor, whatever the method
                weights, scale = None, 0.0
        return TensorSettings(
            method=self.method,
            thinnings=tuple(map(make_thinning, drops, *shapes, rescales, each("rescale_q"))),
            weights=METHODS[self.method].share(weights, count, normalize),
            normalize=normalize,
            lambda_coeff=scale,
            keep_ratio=float(choose("keep_ratio", 1)),
            slerp_t=float(choose("slerp_t", 0.5)),
            threshold=float(choose("threshold", TensorSettings.threshold)),
        )

    def recipe_settings(self) -> dict[str, Any]:
        """The settings that determine the output's bytes, as a [dare] table."""
        chosen: dict[str, Any] = {
            "method": self.method,
            "drop_rate": as_toml(self.drop_rate),
            "seed": self.seed,
        }
        chosen["lambda_coeff"] = as_toml(self.lambda_coeff)
        drops = self._all_drops
        words = {name_rescale(self.rescale, drop) for drop in drops}
        if len(words) == 1:  # else each drop's own
            [word] = words
            chosen["rescale"] = (
                {EXPECTATION: True, NONE: False}.get(word, word) if drops == {RANDOM} else word
            )
        for name, default in (("slerp_t", 0.5), ("threshold", TensorSettings.threshold)):
            if name in METHODS[self.method].settings:
                chosen[name] = as_toml(
                    default if getattr(self, name) is None else getattr(self, name)
                )
        for name in ("weights", "rescale_q", "keep_ratio", "dtype", *DROP_SETTINGS):
            if getattr(self, name) is not None:
                chosen[name] = as_toml(getattr(self, name))
        if set(self._drops(None)) != {RANDOM}:
            chosen["drop"] = as_toml(self.drop)
        if self.is_normalized != METHODS[self.method].normalize:
            chosen["normalize"] = self.is_normalized
        if self.mismatch != "error":
            chosen["mismatch"] = self.mismatch
        if self.any_base:
            chosen["any_base"] = True
        return chosen


class Chooser:
    """Chooses the settings of tensors, by their rules and depths. names: those of all tensors of the base."""

    def __init__(self, config: DareConfig, names: Iterable[str], count: int) -> None:
        self._config, self._count = config, count
        self._layers = count_layers(names) if config.has_gradients else {}
        self._known: dict[tuple[Rule | None, float], TensorSettings] = {}

    def choose(self, name: str) -> tuple[Rule | None, TensorSettings]:
        """The first rule that matches a tensor's name, and its settings: the same object for those that share them."""
        rule = self._config.rule_for(name) if self._config.rules else None
        key = rule, depth_of(name, self._layers) if self._layers else 0.0
        if key not in self._known:
            self._known[key] = self._config.for_rule(rule, self._count, key[1])
        return rule, self._known[key]

    def choose_all(self, names: Sequence[str]) -> list[TensorSettings]:
        """The settings of some tensors."""
        if names and not self._config.rules and not self._layers:  # one for all
            return [self.choose(names[0])[1]] * len(names)
        return [self.choose(name)[1] for name in names]
