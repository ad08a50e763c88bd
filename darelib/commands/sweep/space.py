"""The space of a search: for each setting some values or a range, also by model and by rule."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from darelib.config import (
    PER_MODEL,
    RULE_SETTINGS,
    SETTINGS,
    SWEEP_SETTINGS,
    DareConfig,
    Gradient,
    Group,
    Rule,
    check_setting,
    freeze,
    is_number,
)
from darelib.config.values import AUTO
from darelib.core.drops import DROP_SETTINGS, DROPS, EXPECTATION, RANDOM
from darelib.core.text import ConfigError, nearest
from darelib.methods import DEFAULT, METHOD_SETTINGS, METHODS

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

EXAMPLE: Final = "like lambda_coeff = {low = 0.3, high = 2}, or drop_rate = [0, 0.5]"
MAX_GRID: Final = 10_000  # combinations
MAX_STEPS: Final = 100_000  # of a range, whose points are listed
NEAR_END: Final = 0.02  # of a range: a best value so near to an end may have wanted to go on
# What the keys of a range must be, in words, and the test for it.
RANGE_KEYS: Final[dict[str, tuple[str, Callable[[object], bool]]]] = {
    **dict.fromkeys(("low", "high", "step"), ("a number", is_number)),
    "log": ("true or false", lambda value: isinstance(value, bool)),
}
Settings = Mapping[str, Any]  # by name


@dataclasses.dataclass(frozen=True)
class Axis:
    """What one value may be: one of some values or, if there are none, a number in a range."""

    setting: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False

    @classmethod
    def of(cls, given: Any, setting: str, where: str) -> Axis:
        if is_range(given):
            return cls._of_range(given, setting, where)
        values = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not values:
            raise ConfigError(f"{where} has no values to choose from", EXAMPLE)
        for value in values:
            check_setting(setting, value, where)
        return cls(setting, values)

    @classmethod
    def _of_range(cls, table: Settings, setting: str, where: str) -> Axis:
        for key, value in table.items():
            if key not in RANGE_KEYS:
                raise ConfigError(f"{where} has no key {key!r}", nearest(key, RANGE_KEYS))
            wanted, accepts = RANGE_KEYS[key]
            if not accepts(value):
                raise ConfigError(f"{where}: {key} must be {wanted}", EXAMPLE)
        if not {"low", "high"} <= table.keys():
            raise ConfigError(f"{where} must have low and high", EXAMPLE)
        axis = cls(setting, **table)
        for end in (axis.low, axis.high):
            axis.check(end, where)
        if not axis.low < axis.high:
            raise ConfigError(
                f"{where}: the range from {axis.low:g} to {axis.high:g} is empty", EXAMPLE
            )
        is_wrong_step = axis.step is not None and axis.step <= 0
        if is_wrong_step or (axis.log and (axis.step or axis.low <= 0)):
            raise ConfigError(
                f"{where}: step must be above 0, and log = true needs a low above 0 and no step",
                "leave one out",
            )
        if axis.step and (axis.high - axis.low) / axis.step > MAX_STEPS:
            raise ConfigError(
                f"{where}: a range of more than {MAX_STEPS:,} steps of {axis.step:g}",
                "leave the step out, and any number in the range may be chosen",
            )
        return axis

    def check(self, number: float, where: str) -> None:
        """Refuse a number that the setting cannot be."""
        check_setting(self.setting, [number] if self.setting == "weights" else number, where)

    def find_end(self, value: Any) -> float | None:
        """The end of a range that a value is at, if the setting could be beyond it."""
        if self.values:
            return None
        scale, undo = (math.log, math.exp) if self.log else (float, float)
        near = NEAR_END * (scale(self.high) - scale(self.low))
        ends = self.points or [self.low, self.high]
        for end, way in ((ends[0], -1), (ends[-1], 1)):
            if abs(scale(value) - scale(end)) <= near:
                with suppress(ConfigError):
                    self.check(undo(scale(end) + way * near), "")
                    return end
        return None

    @property
    def points(self) -> list[Any]:
        """All that may be chosen, as a study stores it; nothing for a range without a step."""
        if self.values:
            return [
                value if isinstance(value, str | int | float) else json.dumps(value)
                for value in self.values
            ]
        if self.step is None:
            return []
        # In decimals, as Optuna counts: 0.1 + 3 * 0.15 is 0.55.
        low, high, step = (Decimal(str(number)) for number in (self.low, self.high, self.step))
        return [float(low + k * step) for k in range(int((high - low) / step) + 1)]

    def suggest(self, trial: BaseTrial, name: str, least: float) -> Any:
        """What a trial chooses; of a range, nothing below the least."""
        points = self.points
        if self.values:
            return self.values[points.index(trial.suggest_categorical(name, points))]
        within = [point for point in points if point >= least - 1e-9] or points[-1:]
        ends = within or [min(max(self.low, least), self.high), self.high]
        with warnings.catch_warnings():
            # Of steps that divide a range but for rounding, and of a grid's points below the least.
            warnings.simplefilter("ignore", UserWarning)
            chosen = trial.suggest_float(name, ends[0], ends[-1], step=self.step, log=self.log)
        # Optuna adds steps up: 0.8999999999999999 is 0.9.
        return min(points, key=lambda point: abs(point - chosen)) if points else chosen


Axes = dict[str, Axis | tuple[Axis, ...]]  # by setting; several: one for each model


class Space:
    """The settings that a search chooses, on top of a configuration."""

    def __init__(
        self,
        table: Settings,
        config: DareConfig,
        models: Sequence[str],
        has_examples: bool = False,
    ) -> None:
        """models: what they are called, no two alike. has_examples: whether merges are matched."""
        self.config = config
        self.has_examples = has_examples
        self.models = models
        self.count = len(models)
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
        for method in self._list_values("method"):
            self._fit({"method": method}, []).check_models(self.count)
        names = ("method", "drop", "drop_rate", "matched")
        choices = [
            self.fixed | dict(zip(names, values, strict=True))
            for values in product(*map(self._list_values, names))
        ]
        for name in self.axes:
            if not any(self._matters(name, settings) for settings in choices):
                raise ConfigError(
                    f"[sweep] {name} means nothing beside the other settings", "leave it out"
                )

    def _parse_table(self, table: Settings, known: tuple[str, ...], where: str) -> Axes:
        if not self.has_examples:
            known = tuple(n for n in known if SETTINGS[n].group is not Group.EXAMPLES)
        for name in table:
            if name == "seed":
                raise ConfigError(
                    f"{where} seed: masks are noise, not a setting to choose", "leave it out"
                )
            if name not in known:
                raise ConfigError(f"{where} has no key {name!r}", nearest(name, known))
        # In the order of SETTINGS, where what others depend on comes first.
        return {
            name: self._parse_axis(name, table[name], f"{where} {name}")
            for name in SETTINGS
            if name in table
        }

    def _parse_axis(self, name: str, given: Any, where: str) -> Axis | tuple[Axis, ...]:
        if name == "weights" and is_range(given):
            given = [given] * self.count
        are_ranges = isinstance(given, list) and given and all(map(is_range, given))
        if not are_ranges or name not in PER_MODEL:
            return Axis.of(given, name, where)
        if len(given) != self.count:
            raise ConfigError(
                f"{where} has {len(given)} ranges for {self.count} models", "give one for each"
            )
        return tuple(Axis.of(each, name, where) for each in given)

    def _parse_rule(self, rule: Settings, where: str) -> tuple[Any, Axes]:
        axes = dict(rule)
        match = axes.pop("match", ())
        Rule.of({"match": match, "lambda_coeff": 1.0}, where)  # whether it can match anything
        if not axes:
            raise ConfigError(f"{where} sets nothing", EXAMPLE)
        known = tuple(name for name in SWEEP_SETTINGS if name in RULE_SETTINGS)
        return match, self._parse_table(axes, known, where)

    def _list_values(self, name: str) -> list[Any]:
        """What a setting may be; of a range, its end."""
        axis = self.axes.get(name, Axis(name, (self.fixed[name],)))
        if isinstance(axis, tuple):
            return [[each.high for each in axis]]
        return list(axis.values or [axis.high])

    def describe(self) -> list[Any]:
        """All that decides what a trial's choices mean."""
        rules = [rule.as_table() for rule in self.config.typed_rules]
        axes = repr((self.axes, self.rules, self.models))
        return [self.config.recipe_settings(), rules, axes]

    def choose(self, trial: BaseTrial) -> DareConfig:
        """The configuration of a trial, which chooses only what means something beside the rest."""
        chosen = self._choose(trial, self.axes, self.fixed, "")
        rules = []
        for k, (match, axes) in enumerate(self.rules, 1):
            own = self._choose(trial, axes, self.fixed | chosen, f"rule {k} ")
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
            # Dividing by less than what is kept would more than undo the dropping.
            kept = 1 - min(list_numbers(find_rate(settings)))
            least = kept if name == "rescale_q" else -math.inf
            named = self._name_axes(prefix + name, axis).items()
            values = [each.suggest(trial, label, least) for label, each in named]
            chosen[name] = values if isinstance(axis, tuple) else values[0]
        return chosen

    def _matters(self, name: str, settings: Settings) -> bool:
        if SETTINGS[name].group is Group.EXAMPLES:
            matches = settings["matched"] is not False or self._rules_match
            is_judged = settings["lambda_coeff"] == AUTO and name != "match_ridge"
            return self.has_examples and (name == "matched" or matches or is_judged)
        method = METHODS[settings["method"]]
        drops = set(list_numbers(settings["drop"]))
        if name in METHOD_SETTINGS and name not in method.settings:
            return False
        if SETTINGS[name].group is Group.DROP and not self._drops_any(settings):
            return False
        if name == "drop":
            return method.any_drop
        if name in DROP_SETTINGS:
            return any(name in DROPS[drop].settings for drop in drops)
        if name == "rescale_q":
            return drops == {RANDOM} and settings["rescale"] in (None, True, EXPECTATION)
        return name != "keep_ratio" or drops == {RANDOM}

    @property
    def _rules_match(self) -> bool:
        """Whether rules match, or may."""
        is_searched = any("matched" in axes for _, axes in self.rules)
        return is_searched or any(rule.matched for rule in self.config.typed_rules)

    @property
    def needs_examples(self) -> bool:
        """Whether merges are matched, or their lambdas chosen, by some of the examples."""
        matches = {*self._list_values("matched")} != {False} or self._rules_match
        return self.has_examples and (matches or AUTO in self._list_values("lambda_coeff"))

    def _drops_any(self, settings: Settings) -> bool:
        rates = [find_rate(settings), *(rule.drop_rate or 0 for rule in self.config.typed_rules)]
        is_searched = any("drop_rate" in axes for _, axes in self.rules)
        return is_searched or any(list_numbers(rates))

    def _fit(self, chosen: Settings, rules: list[Rule]) -> DareConfig:
        """The configuration with other settings, less what would mean nothing beside them."""
        settings = self.fixed | dict(chosen)
        if not METHODS[settings["method"]].any_drop:
            settings["drop"] = RANDOM
        optional = (name for name in SETTINGS if getattr(DareConfig, name) is None)
        unused = [name for name in optional if not self._matters(name, settings)]
        settings |= dict.fromkeys(unused)
        kept = [rule.without(unused, settings["method"]) for rule in self.config.typed_rules]
        return dataclasses.replace(self.config, **settings, rules=[*rules, *kept])

    def list_combinations(self) -> list[dict[str, Any]]:
        """What all trials of a grid choose, each once: what means nothing is not chosen."""
        from optuna.trial import FixedTrial

        points = {label: axis.points for label, axis in self._list_axes()}
        if endless := next((label for label, values in points.items() if not values), None):
            raise ConfigError(
                f"a grid needs values for {endless}, not a range",
                "give a list, or the range a step",
            )
        if (size := math.prod(map(len, points.values()))) > MAX_GRID:
            raise ConfigError(
                f"a grid of {size:,} combinations is too large", f"at most {MAX_GRID:,}; or use tpe"
            )
        found: dict[frozenset[Any], dict[str, Any]] = {}
        for combination in product(*points.values()):
            trial = FixedTrial(dict(zip(points, combination, strict=True)))
            with suppress(ConfigError):
                self.choose(trial)
                found[identify(trial.params)] = trial.params
        if not found:
            raise ConfigError(
                "no combination of the grid can be merged", "see --help for what goes together"
            )
        return list(found.values())

    def plain_average(self, scale: float) -> DareConfig:
        """Nothing dropped, weighed or matched; rules keep their lambda, such as 0 for parts."""
        plain = vars(DareConfig(method=DEFAULT, drop_rate=0.0, lambda_coeff=scale))
        plain = {name: plain[name] for name in SWEEP_SETTINGS if name not in ("dtype", "mismatch")}
        rules = [
            Rule(rule.match, drop_rate=0.0, lambda_coeff=rule.lambda_coeff)
            for rule in self.config.typed_rules
        ]
        if self.has_examples:
            plain["matched"] = False
        return dataclasses.replace(self.config, **plain, rules=rules)

    def _list_axes(self) -> Iterator[tuple[str, Axis]]:
        """All axes, by the names that a study has for what is chosen."""
        tables = {"": self.axes}
        tables |= {f"rule {k} ": axes for k, (_, axes) in enumerate(self.rules, 1)}
        for prefix, axes in tables.items():
            for name, axis in axes.items():
                yield from self._name_axes(prefix + name, axis).items()

    def _name_axes(self, name: str, axis: Axis | tuple[Axis, ...]) -> dict[str, Axis]:
        if isinstance(axis, Axis):
            return {name: axis}
        return {f"{name} {model}": each for model, each in zip(self.models, axis, strict=True)}

    def find_ends(self, params: Settings) -> list[str]:
        """A remark on each choice that is at the end of its range."""
        ends = {
            name: axis.find_end(params[name]) for name, axis in self._list_axes() if name in params
        }
        return [
            f"The best {name} is at the end of its range, {end:g}: a wider one may have a better."
            for name, end in ends.items()
            if end is not None
        ]

    def list_lambdas(self) -> list[float]:
        """Values of lambda all over what is searched, for what the best is to be compared with."""
        axis = self.axes.get("lambda_coeff")
        if isinstance(axis, Axis) and not axis.values:
            return [axis.low + k / 4 * (axis.high - axis.low) for k in range(5)]
        return [*map(float, filter(is_number, self._list_values("lambda_coeff")))] or [1.0]


def find_rate(settings: Settings) -> Any:
    """The drop rate: the method's own, where none is set."""
    rate = settings["drop_rate"]
    return METHODS[settings["method"]].drop_rate if rate is None else rate


def equal_lambda(config: DareConfig, count: int) -> float:
    """The lambda with which a plain average is as long as a merge: weights scale it, too."""
    settings = config.general(count)
    return settings.lambda_coeff * (sum(settings.weights) if config.method == DEFAULT else 1.0)


def is_range(given: Any) -> bool:
    """Whether this is a table like {low = 0, high = 1}, and not a number that changes by layer."""
    return isinstance(given, Mapping) and "gradient" not in given


def identify(params: Settings) -> frozenset[Any]:
    return frozenset(params.items())


def list_numbers(value: Any) -> list[Any]:
    """All that a setting is: for each model, and for what changes over the layers at each end."""
    frozen = freeze(value)
    if isinstance(frozen, tuple):
        return [number for entry in frozen for number in list_numbers(entry)]
    return list(frozen.numbers) if isinstance(frozen, Gradient) else [frozen]
