"""What a search may choose: for each setting some values or a range, also by model and by rule."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from darelib.config import (
    CHECKS,
    PER_MODEL,
    RULE_SETTINGS,
    SWEEP_SETTINGS,
    DareConfig,
    Gradient,
    Rule,
    check_setting,
    freeze,
    is_number,
)
from darelib.core.drops import DROP_SETTINGS, DROPS, EXPECTATION, RANDOM
from darelib.core.methods import LINEAR, METHOD_SETTINGS, METHODS
from darelib.core.text import ConfigError, DareError, install_hint, nearest

if TYPE_CHECKING:
    from optuna.distributions import FloatDistribution
    from optuna.trial import BaseTrial

EXAMPLE: Final = "like lambda_coeff = {low = 0.3, high = 2, step = 0.1}, or drop_rate = [0, 0.5]"
RANGE_KEYS: Final = ("low", "high", "step", "log")
MAX_GRID: Final = 10_000  # combinations
# What may mean nothing beside other settings, and is then not set.
CONDITIONAL: Final = ("keep_ratio", "rescale_q", *METHOD_SETTINGS, *DROP_SETTINGS)
OF_DROPS: Final = ("drop", "rescale", "rescale_q", *DROP_SETTINGS)  # where nothing is dropped: none
Settings = Mapping[str, Any]  # by name
# What one value may be: one of some values, or a number in a range.
Axis: TypeAlias = "tuple[Any, ...] | FloatDistribution"
Axes: TypeAlias = "dict[str, Axis | list[Axis]]"  # by setting; a list: one for each model


def load_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise DareError("a sweep needs Optuna", install_hint("sweep")) from None
    return optuna


def parse_axis(given: Any, setting: str, where: str) -> Axis:
    if not is_range(given):
        values = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not values:
            raise ConfigError(f"{where} has no values to choose from", EXAMPLE)
        for value in values:
            check_setting(setting, value, where)
        return values
    unknown = next((key for key in given if key not in RANGE_KEYS), None)
    if unknown:
        raise ConfigError(f"{where} has no key {unknown!r}", nearest(unknown, RANGE_KEYS))
    try:
        with warnings.catch_warnings():
            # Of a range that is no whole number of steps, which ends before.
            warnings.simplefilter("ignore", UserWarning)
            axis: FloatDistribution = load_optuna().distributions.FloatDistribution(**given)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where} is no range: {error}", EXAMPLE) from None
    for end in (axis.low, axis.high):
        check_setting(setting, [end] if setting == "weights" else end, where)
    return axis


def list_points(axis: Axis) -> list[Any]:
    """What may be chosen, as a study stores it; nothing for a range without a step."""
    if isinstance(axis, tuple):
        return [each if isinstance(each, str | int | float) else json.dumps(each) for each in axis]
    if axis.step is None:
        return []
    count = round((axis.high - axis.low) / axis.step) + 1
    return [find_step(axis, k) for k in range(min(count, MAX_GRID + 1))]


def find_step(axis: FloatDistribution, number: int) -> float:
    """In decimals: 0.1 + 3 * 0.15 is 0.55."""
    return float(Decimal(str(axis.low)) + number * Decimal(str(axis.step)))


def suggest(axis: Axis, trial: BaseTrial, name: str) -> Any:
    if isinstance(axis, tuple):
        points = list_points(axis)
        return axis[points.index(trial.suggest_categorical(name, points))]
    chosen = trial.suggest_float(name, axis.low, axis.high, step=axis.step, log=axis.log)
    if axis.step is None:
        return chosen
    return find_step(axis, round((chosen - axis.low) / axis.step))


class Space:
    """The settings that a search chooses, on top of a configuration."""

    def __init__(self, table: Settings, config: DareConfig, count: int) -> None:
        self.optuna = load_optuna()
        self.config = config
        self.count = count
        self.fixed = {name: getattr(config, name) for name in SWEEP_SETTINGS}
        given = dict(table)
        rules = given.pop("rules", ())
        if not given and not rules:
            raise ConfigError(
                "there is nothing to search", f"say so under [sweep] or with --vary, {EXAMPLE}"
            )
        self.axes = self._parse_table(given, SWEEP_SETTINGS, "[sweep]")
        if not (isinstance(rules, list | tuple) and all(isinstance(r, Mapping) for r in rules)):
            raise ConfigError(
                "[sweep] rules must be tables", "write [[sweep.rules]] on a line of its own"
            )
        self.rules = [
            self._parse_rule(rule, f"[sweep] rule {number}") for number, rule in enumerate(rules, 1)
        ]

    def _parse_table(self, table: Settings, known: tuple[str, ...], where: str) -> Axes:
        for name in table:
            if name not in known:
                raise ConfigError(f"{where} has no key {name!r}", nearest(name, known))
        # In the order of CHECKS, where what others depend on comes first.
        return {
            name: self._parse_axis(name, table[name], f"{where} {name}")
            for name in CHECKS
            if name in table
        }

    def _parse_axis(self, name: str, given: Any, where: str) -> Axis | list[Axis]:
        if name == "weights" and is_range(given):
            given = [given] * self.count
        are_ranges = isinstance(given, list) and given and all(map(is_range, given))
        if not are_ranges or name not in PER_MODEL:
            return parse_axis(given, name, where)
        if len(given) != self.count:
            raise ConfigError(
                f"{where} has {len(given)} ranges for {self.count} models", "give one for each"
            )
        return [parse_axis(each, name, where) for each in given]

    def _parse_rule(self, rule: Settings, where: str) -> tuple[Any, Axes]:
        axes = dict(rule)
        match = axes.pop("match", ())
        Rule.of({"match": match, "lambda_coeff": 1.0}, where)  # whether it can match anything
        if not axes:
            raise ConfigError(f"{where} sets nothing", EXAMPLE)
        return match, self._parse_table(axes, RULE_SETTINGS, where)

    def choose(self, trial: BaseTrial) -> DareConfig:
        """The configuration of a trial, which chooses only what means something beside the rest."""
        chosen = self._choose(trial, self.axes, self.fixed, "")
        rules = []
        for k, (match, axes) in enumerate(self.rules):
            own = self._choose(trial, axes, self.fixed | chosen, f"rules.{k}.")
            if own:
                rules.append(Rule(match, **own))
        config = self._fit(chosen, rules)
        config.check_models(self.count)
        return config

    def _choose(
        self, trial: BaseTrial, axes: Axes, others: dict[str, Any], prefix: str
    ) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        settings = ChainMap(chosen, others)
        for name, axis in axes.items():
            if not self._matters(name, settings):
                continue
            named = name_axes(prefix + name, axis).items()
            values = [suggest(each, trial, label) for label, each in named]
            chosen[name] = values if isinstance(axis, list) else values[0]
        return chosen

    def _matters(self, name: str, settings: Settings) -> bool:
        method = METHODS[settings["method"]]
        drops = set(list_numbers(settings["drop"]))
        if name in METHOD_SETTINGS and name not in method.settings:
            return False
        if name in OF_DROPS and not self._drops_any(settings):
            return False
        if name == "drop":
            return method.any_drop
        if name in DROP_SETTINGS:
            return any(name in DROPS[drop].settings for drop in drops)
        if name == "rescale_q":
            return drops == {RANDOM} and settings["rescale"] in (None, True, EXPECTATION)
        return name != "keep_ratio" or drops == {RANDOM}

    def _drops_any(self, settings: Settings) -> bool:
        rates = [settings["drop_rate"], *(rule.drop_rate or 0 for rule in self.config.typed_rules)]
        is_searched = any("drop_rate" in axes for _, axes in self.rules)
        return is_searched or any(list_numbers(rates))

    def _fit(self, chosen: Settings, rules: list[Rule]) -> DareConfig:
        """The configuration with other settings, less what would mean nothing beside them."""
        settings = self.fixed | dict(chosen)
        if not METHODS[settings["method"]].any_drop:
            settings["drop"] = RANDOM
        unused = [name for name in CONDITIONAL if not self._matters(name, settings)]
        settings |= dict.fromkeys(unused)
        rules = [*rules, *self.config.typed_rules]
        return dataclasses.replace(self.config, **settings, rules=rules)

    def list_combinations(self) -> list[dict[str, Any]]:
        """What all trials of a grid choose, each once: what means nothing is not chosen."""
        points = {label: list_points(axis) for label, axis in self.list_axes()}
        endless = next((label for label, values in points.items() if not values), None)
        if endless:
            raise ConfigError(
                f"a grid needs values for {endless}, not a range",
                "give a list, or the range a step",
            )
        size = math.prod(map(len, points.values()))
        if size > MAX_GRID:
            raise ConfigError(
                f"a grid of {size:,} combinations is too large", f"at most {MAX_GRID:,}; or use tpe"
            )
        found: dict[frozenset[Any], dict[str, Any]] = {}
        for combination in product(*points.values()):
            trial = self.optuna.trial.FixedTrial(dict(zip(points, combination, strict=True)))
            with suppress(ConfigError):
                self.choose(trial)
                found[identify(trial.params)] = trial.params
        return list(found.values())

    def plain_average(self, scale: float) -> DareConfig:
        """Nothing dropped, nothing weighed; rules keep their lambda, such as 0 for some parts."""
        plain = vars(DareConfig(method=LINEAR, drop_rate=0.0, lambda_coeff=scale))
        plain = {name: plain[name] for name in SWEEP_SETTINGS if name not in ("dtype", "mismatch")}
        rules = [
            Rule(rule.match, drop_rate=0.0, lambda_coeff=rule.lambda_coeff)
            for rule in self.config.typed_rules
        ]
        return dataclasses.replace(self.config, **plain, rules=rules)

    def list_axes(self) -> Iterator[tuple[str, Axis]]:
        """All axes, by the names that a study has for what is chosen."""
        tables = {"": self.axes} | {f"rules.{k}.": axes for k, (_, axes) in enumerate(self.rules)}
        for prefix, axes in tables.items():
            for name, axis in axes.items():
                yield from name_axes(prefix + name, axis).items()

    def list_lambdas(self) -> list[float]:
        """Values of lambda all over what is searched, for what the best is to be compared with."""
        axis = self.axes.get("lambda_coeff", (self.config.lambda_coeff,))
        if isinstance(axis, tuple | list):  # of which some may change over the layers
            return [float(value) for value in axis if is_number(value)] or [1.0]
        return [axis.low + k / 4 * (axis.high - axis.low) for k in range(5)]


def equal_lambda(config: DareConfig, count: int) -> float:
    """The lambda with which a plain average is as long as a merge: weights scale it, too."""
    settings = config.general(count)
    return settings.lambda_coeff * (sum(settings.weights) if config.method == LINEAR else 1.0)


def draws_masks(config: DareConfig, count: int) -> bool:
    """Whether anything is dropped at random; if not, the seed means nothing."""
    thinnings = (each for settings in config.resolve_all(count) for each in settings.thinnings)
    return any(t.drop_rate > 0 and DROPS[t.drop].rescale == EXPECTATION for t in thinnings)


def is_range(given: Any) -> bool:
    """Whether this is a table like {low = 0, high = 1}, and not a number that changes by layer."""
    return isinstance(given, Mapping) and "gradient" not in given


def identify(params: Settings) -> frozenset[Any]:
    return frozenset(params.items())


def name_axes(name: str, axis: Axis | list[Axis]) -> dict[str, Axis]:
    """A setting's axis, or those of all models, by the names that a study has for them."""
    if isinstance(axis, list):
        return {f"{name}.{i}": each for i, each in enumerate(axis)}
    return {name: axis}


def list_numbers(value: Any) -> list[Any]:
    """All that a setting is: for each model, and for what changes over the layers at each end."""
    frozen = freeze(value)
    if isinstance(frozen, tuple):
        return [number for entry in frozen for number in list_numbers(entry)]
    return list(frozen.numbers) if isinstance(frozen, Gradient) else [frozen]
