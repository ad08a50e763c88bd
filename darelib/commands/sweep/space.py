"""What a search may choose from: for each setting some values or a range, also for each model, also by rules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from darelib.config import (
    CHECKS,
    PER_MODEL,
    RULE_SETTINGS,
    SWEEP_SETTINGS,
    DareConfig,
    Rule,
    check_setting,
    is_number,
)
from darelib.core.drops import DROP_SETTINGS, DROPS, EXPECTATION, RANDOM
from darelib.core.methods import LINEAR, METHOD_SETTINGS, METHODS
from darelib.core.text import ConfigError, nearest

EXAMPLE: Final = "like lambda_coeff = {low = 0.5, high = 2.5}, or drop_rate = [0, 0.5, 0.9]"
DEFAULTS: Final[dict[str, Any]] = {
    field.name: field.default for field in dataclasses.fields(DareConfig)
}
MAX_GRID: Final = 10_000  # combinations
RANGE_KEYS: Final = ("low", "high", "step", "log")
Get = Callable[[str], Any]  # a setting's value, by its name


@dataclasses.dataclass(frozen=True)
class Axis:
    """What one value may be: one of some values or, if there are none, a number in a range."""

    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False

    @classmethod
    def of(cls, given: Any, setting: str, where: str) -> Axis:
        if isinstance(given, Mapping) and "gradient" not in given:
            return cls._of_range(given, setting, where)
        values = tuple(given) if isinstance(given, list | tuple) else (given,)
        if not values:
            raise ConfigError(f"{where} has no values to choose from", EXAMPLE)
        for value in values:
            check_setting(setting, value, where)
        return cls(values)

    @classmethod
    def _of_range(cls, table: Mapping[str, Any], setting: str, where: str) -> Axis:
        for key, value in table.items():
            if key not in RANGE_KEYS:
                raise ConfigError(f"{where} has no key {key!r}", nearest(key, RANGE_KEYS))
            if not (isinstance(value, bool) if key == "log" else is_number(value)):
                raise ConfigError(
                    f"{where}: {key} must be {'true or false' if key == 'log' else 'a number'}",
                    EXAMPLE,
                )
        if not {"low", "high"} <= table.keys():
            raise ConfigError(f"{where} must have low and high", EXAMPLE)
        axis = cls(**table)
        for end in (axis.low, axis.high):
            check_setting(setting, [end] if setting == "weights" else end, where)
        if not axis.low < axis.high:
            raise ConfigError(
                f"{where}: the range from {axis.low:g} to {axis.high:g} is empty", EXAMPLE
            )
        if (axis.step is not None and not axis.step > 0) or (
            axis.log and (axis.step or axis.low <= 0)
        ):
            raise ConfigError(
                f"{where}: step must be above 0, and log = true needs a low above 0 and no step",
                "leave one out",
            )
        return axis

    def suggest(self, trial: Any, name: str, least: float) -> Any:
        if not self.values:
            low, high = min(max(self.low, least), self.high), self.high
            if self.step is not None:  # all points stay those of the whole range
                points = self.list_points(name)
                low, high = (
                    next((point for point in points if point >= least - 1e-9), points[-1]),
                    points[-1],
                )
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # of points of a grid that are left out for it
                return trial.suggest_float(name, low, high, step=self.step, log=self.log)
        labels = self.labels
        return self.values[labels.index(trial.suggest_categorical(name, labels))]

    @property
    def labels(self) -> list[Any]:
        """The values as a study stores them."""
        return [
            value if isinstance(value, str | int | float) else json.dumps(value)
            for value in self.values
        ]

    def list_points(self, name: str) -> list[Any]:
        """For a grid: all values."""
        if not self.values and self.step is None:
            raise ConfigError(
                f"a grid needs values for {name}, not a range", "give a list, or the range a step"
            )
        # In decimals, as Optuna counts: 0.1 + 3 * 0.15 is 0.55.
        low, high, step = (Decimal(str(number)) for number in (self.low, self.high, self.step or 1))
        return self.labels or [float(low + k * step) for k in range(int((high - low) / step) + 1)]


Axes = dict[str, Axis | tuple[Axis, ...]]  # by setting; several: one for each model


class Space:
    """The settings that a search chooses, on top of a configuration."""

    def __init__(
        self, table: Mapping[str, Any], config: DareConfig, count: int, where: str = "[sweep]"
    ) -> None:
        self.config, self.count = config, count
        if not isinstance(table, Mapping) or not (table.keys() - {"rules"} or table.get("rules")):
            raise ConfigError(
                "there is nothing to search", f"say so under [sweep] or with --vary, {EXAMPLE}"
            )
        self.axes = self._parse_table(
            {k: v for k, v in table.items() if k != "rules"}, SWEEP_SETTINGS, where
        )
        self.rules: list[tuple[Any, Axes]] = []
        rules = table.get("rules", ())
        if not isinstance(rules, list | tuple) or not all(
            isinstance(rule, Mapping) for rule in rules
        ):
            raise ConfigError(
                f"{where} rules must be tables", "write [[sweep.rules]] on a line of its own"
            )
        for k, rule in enumerate(rules, 1):
            rest, place = (
                {name: value for name, value in rule.items() if name != "match"},
                f"{where} rule {k}",
            )
            Rule.of(
                {"match": rule.get("match", ()), "lambda_coeff": 1.0}, place
            )  # whether it can match anything
            if not rest:
                raise ConfigError(f"{place} sets nothing", EXAMPLE)
            self.rules.append((rule["match"], self._parse_table(rest, RULE_SETTINGS, place)))
        methods, drops, rates = (
            self._list_values(name) for name in ("method", "drop", "drop_rate")
        )
        for method in methods:
            self._fit({"method": method}).check_models(count)
        whole = {name: getattr(config, name) for name in SWEEP_SETTINGS}
        choices = [
            whole | {"method": m, "drop": d, "drop_rate": r}
            for m in methods
            for d in drops
            for r in rates
        ]
        for name in self.axes:
            if not any(self._matters(name, chosen.__getitem__) for chosen in choices):
                raise ConfigError(
                    f"{where} {name} means nothing beside the other settings", "leave it out"
                )

    def _list_values(self, name: str) -> list[Any]:
        """What a setting may be; of a range, its end."""
        axis = self.axes.get(name, Axis((getattr(self.config, name),)))
        return (
            list(axis.values or [axis.high])
            if isinstance(axis, Axis)
            else [[each.high for each in axis]]
        )

    def _parse_table(self, table: Mapping[str, Any], known: tuple[str, ...], where: str) -> Axes:
        axes: Axes = {}
        for name in sorted(table, key=[*CHECKS, *table].index):  # what others depend on comes first
            given, place = table[name], f"{where} {name}"
            if name == "seed":
                raise ConfigError(
                    f"{place}: masks are noise, not a setting to choose", "--confirm draws several"
                )
            if name not in known:
                raise ConfigError(f"{where} has no key {name!r}", nearest(name, known))
            tables = (
                isinstance(given, list)
                and bool(given)
                and all(isinstance(each, dict) for each in given)
            )
            if name == "weights" and isinstance(given, dict) and "gradient" not in given:
                given, tables = [given] * self.count, True
            if tables and name in PER_MODEL and not any("gradient" in each for each in given):
                if len(given) != self.count:
                    raise ConfigError(
                        f"{place} has {len(given)} ranges for {self.count} models",
                        "give one for each",
                    )
                axes[name] = tuple(Axis.of(each, name, place) for each in given)
            else:
                axes[name] = Axis.of(given, name, place)
        return axes

    def choose(self, trial: Any) -> DareConfig:
        """The configuration that a trial asks for: what means nothing beside what is chosen already is not asked."""
        chosen = self._choose(trial, self.axes, lambda name: getattr(self.config, name), "")
        rules = []
        for k, (match, axes) in enumerate(self.rules):
            whole = {name: chosen.get(name, getattr(self.config, name)) for name in SWEEP_SETTINGS}
            own = self._choose(trial, axes, whole.__getitem__, f"rules.{k}.")
            rules += [Rule(match, **own)] if own else []
        config = self._fit(chosen, rules)
        config.check_models(self.count)
        return config

    def _choose(self, trial: Any, axes: Axes, get: Get, prefix: str) -> dict[str, Any]:
        chosen: dict[str, Any] = {}

        def look(name: str) -> Any:
            return chosen[name] if name in chosen else get(name)

        for name, axis in axes.items():
            if not self._matters(name, look):
                continue
            # Dividing by less than what is kept would more than undo the dropping.
            least = 1 - min(_each(look("drop_rate"))) if name == "rescale_q" else float("-inf")
            if isinstance(axis, tuple):
                chosen[name] = [
                    each.suggest(trial, f"{prefix}{name}.{i}", least) for i, each in enumerate(axis)
                ]
            else:
                chosen[name] = axis.suggest(trial, prefix + name, least)
        return chosen

    def _matters(self, name: str, get: Get) -> bool:
        """Whether a setting means anything beside the others."""
        method, drops = METHODS[get("method")], {*_each(get("drop"))}
        if name in METHOD_SETTINGS and name not in method.settings:
            return False
        if name in ("drop", "rescale", "rescale_q", *DROP_SETTINGS) and not self._drops_any(get):
            return False
        if name == "drop":
            return method.any_drop
        if name in DROP_SETTINGS:
            return any(name in DROPS[drop].settings for drop in drops)
        if name == "rescale_q":
            return drops == {RANDOM} and get("rescale") in (None, True, EXPECTATION)
        return name != "keep_ratio" or drops == {RANDOM}

    def _drops_any(self, get: Get) -> bool:
        rates = [get("drop_rate"), *(rule.drop_rate or 0 for rule in self.config.typed_rules)]
        return any(any(_each(rate)) for rate in rates) or any(
            "drop_rate" in axes for _, axes in self.rules
        )

    def _fit(self, chosen: Mapping[str, Any], rules: list[Rule] | None = None) -> DareConfig:
        """The configuration with other settings, less what means nothing beside them, which would be an error."""
        settings = {name: chosen.get(name, getattr(self.config, name)) for name in SWEEP_SETTINGS}
        conditional = ("keep_ratio", "rescale_q", *METHOD_SETTINGS, *DROP_SETTINGS)
        if not METHODS[settings["method"]].any_drop:
            settings["drop"] = RANDOM
        odd = [name for name in conditional if not self._matters(name, settings.__getitem__)]
        settings |= {name: DEFAULTS[name] for name in odd}
        kept = []
        for rule in self.config.typed_rules:
            own = {
                name: value
                for name, value in rule.as_table().items()
                if name not in ("match", *odd)
            }
            # Without any setting of its own, a rule would let later ones match.
            kept.append(Rule(rule.match, **(own or {"lambda_coeff": settings["lambda_coeff"]})))
        return dataclasses.replace(self.config, **settings, rules=[*(rules or ()), *kept])

    def list_combinations(self, fixed: Callable[[dict[str, Any]], Any]) -> Iterator[dict[str, Any]]:
        """What all trials of a grid choose, each once. fixed: makes a trial that is given what it chooses."""
        points = {label: axis.list_points(label) for label, axis in self._list_axes()}
        if (size := math.prod(map(len, points.values()))) > MAX_GRID:
            raise ConfigError(
                f"a grid of {size:,} combinations is too large", f"at most {MAX_GRID:,}; or use tpe"
            )
        seen: set[tuple[Any, ...]] = set()
        for values in itertools.product(*points.values()):
            trial = fixed(dict(zip(points, values, strict=True)))
            try:
                self.choose(trial)
            except ConfigError:
                continue
            if (chosen := tuple(trial.params.items())) not in seen:
                seen.add(chosen)
                yield trial.params
        if not seen:
            raise ConfigError(
                "no combination of the grid can be merged", "see --help for what goes together"
            )

    def plain_average(self, scale: float) -> DareConfig:
        """Nothing dropped, nothing weighed; what rules say of lambda stays, such as which parts to leave alone."""
        plain = {
            name: DEFAULTS[name] for name in SWEEP_SETTINGS if name not in ("dtype", "mismatch")
        }
        rules = [
            Rule(r.match, drop_rate=0.0, lambda_coeff=r.lambda_coeff)
            for r in self.config.typed_rules
        ]
        plain |= {"method": LINEAR, "drop_rate": 0.0, "lambda_coeff": scale, "rules": rules}
        return dataclasses.replace(self.config, **plain)

    def equal_lambda(self, config: DareConfig) -> float:
        """The lambda with which a plain average is as long as a merge: weights scale it, too."""
        settings = config.general(self.count)
        return settings.lambda_coeff * (sum(settings.weights) if config.method == LINEAR else 1.0)

    def count_ranges(self) -> int:
        return sum(not axis.values for _, axis in self._list_axes())

    def _list_axes(self) -> Iterator[tuple[str, Axis]]:
        """All axes, by the names that a study has for what is chosen."""
        for prefix, axes in (
            ("", self.axes),
            *((f"rules.{k}.", axes) for k, (_, axes) in enumerate(self.rules)),
        ):
            for name, axis in axes.items():
                if isinstance(axis, Axis):
                    yield prefix + name, axis
                else:
                    yield from ((f"{prefix}{name}.{i}", each) for i, each in enumerate(axis))

    def list_lambdas(self) -> list[float]:
        """Values of lambda all over what is searched, for what the best is to be compared with."""
        axis = self.axes.get("lambda_coeff")
        if not isinstance(axis, Axis):
            own: Any = self.config.lambda_coeff
            return [float(own)] if is_number(own) else [1.0]
        if axis.values:
            return sorted({float(value) for value in axis.values if is_number(value)}) or [1.0]
        return [axis.low + k / 4 * (axis.high - axis.low) for k in range(5)]

    def draws(self, config: DareConfig) -> bool:
        """Whether anything is dropped at random; if not, the seed means nothing."""
        thinnings = (
            thinning for each in config.resolve_all(self.count) for thinning in each.thinnings
        )
        return any(t.drop_rate > 0 and DROPS[t.drop].rescale == EXPECTATION for t in thinnings)


def _each(value: Any) -> tuple[Any, ...]:
    """Of a setting that there may be one of for each model, all; of what changes over the layers, all ends."""
    numbers = getattr(value, "numbers", value)
    if isinstance(numbers, Mapping):
        numbers = numbers["gradient"]
    if not isinstance(numbers, list | tuple):
        return (numbers,)
    return tuple(each for entry in numbers for each in _each(entry))
