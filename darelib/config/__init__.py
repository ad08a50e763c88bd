"""DareConfig: how to merge, with all settings of a tensor resolved, checked and explained."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast

from darelib.config.settings import (
    CHECKS,
    LAYER,
    PER_MODEL,
    RULE_SETTINGS,
    SWEEP_SETTINGS,
    TENSOR_SETTINGS,
    Gradient,
    Number,
    Rule,
    Settings,
    as_toml,
    check_fields,
    check_setting,
    count_layers,
    depth_of,
    find_depths,
    freeze,
    is_count,
    is_number,
    list_given,
    naming,
    parse_size,
    value_at,
)
from darelib.core.drops import DROP_SETTINGS, DROPS, EXPECTATION, L1, NONE, RANDOM, Drop, Thinning
from darelib.core.formats import SHORT_DTYPES
from darelib.core.matrices import find_matrices
from darelib.core.text import ConfigError, count_of
from darelib.methods import DEFAULT, METHOD_NUMBERS, METHOD_SETTINGS, METHODS, choose_method
from darelib.methods.method import Method, sum_weights
from darelib.methods.settings import ZERO, TensorSettings

__all__ = [
    "CHECKS",
    "LAYER",
    "PER_MODEL",
    "RULE_SETTINGS",
    "SWEEP_SETTINGS",
    "TENSOR_SETTINGS",
    "Chooser",
    "DareConfig",
    "Gradient",
    "Rule",
    "as_toml",
    "check_setting",
    "count_layers",
    "depth_of",
    "freeze",
    "is_count",
    "is_number",
    "naming",
    "parse_size",
    "value_at",
]


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
    """How one model's delta is thinned. q: what to divide by instead of by the keep rate."""
    # The tolerance allows for 1 - 0.9 being a little less than 0.1.
    if q is not None and q < 1 - drop_rate - 1e-9:
        raise ConfigError(
            f"rescale_q {q:g} is below 1 - drop_rate = {1 - drop_rate:g}, "
            "which would more than undo the dropping",
            "DAREx-q wants 1 - drop_rate <= q <= 1; "
            "a rule with a drop rate of its own may need its own q",
        )
    word = name_rescale(rescale, drop)
    divisor = 1.0
    if drop == RANDOM and word == EXPECTATION:
        divisor = Thinning(drop_rate).keep_rate if q is None else q
    thinning = Thinning(drop_rate, drop, gamma, epsilon, word, divisor)
    DROPS[drop].check(thinning)
    return thinning


def check_meaning(
    names: Collection[str],
    kind: str,
    table: Mapping[str, Method] | Mapping[str, Drop],
    used: Collection[str],
) -> None:
    """Refuse settings that mean something to other methods or drops, but not to those used."""
    for name in names:
        fitting = [word for word, entry in table.items() if name in entry.settings]
        if fitting and not set(fitting) & set(used):
            verb = "mean" if name == "weights" else "means"
            raise ConfigError(
                f"{name} {verb} nothing to {kind} {' and '.join(sorted(used))}",
                f"use {kind} {' or '.join(fitting)}, or leave it out",
            )


@dataclass(frozen=True)
class Scope:
    """What is set for the tensors of a rule, or for those without one."""

    own: Mapping[str, Any]  # by the rule, or for all tensors where there is none
    values: Mapping[str, Any]  # the same, over what is set for all tensors

    @property
    def drops(self) -> tuple[str, ...]:
        drop = self.values["drop"]
        return drop if isinstance(drop, tuple) else (drop,)

    @property
    def depths(self) -> list[float]:
        """Where the lines of its gradients meet."""
        return sorted(find_depths(tuple(self.values.values())))

    def check_drops(self) -> None:
        other = next((drop for drop in self.drops if drop != RANDOM), None)
        exact = next((drop for drop in self.drops if DROPS[drop].rescale != EXPECTATION), None)
        rescale = self.values.get("rescale")
        if other and not METHODS[self.values["method"]].any_drop:
            fitting = " or ".join(name for name, method in METHODS.items() if method.any_drop)
            raise ConfigError(
                f"method {self.values['method']} goes with drop random only, not {other}",
                f"use method {fitting}",
            )
        if other and self.values.get("keep_ratio", 1) != 1:
            raise ConfigError(
                f"keep_ratio goes with drop random only, not {other}",
                "drop_rate alone says how much is kept; in a rule, keep_ratio = 1 turns trim off",
            )
        if exact and rescale in (True, EXPECTATION):
            raise ConfigError(
                f"rescale {str(rescale).lower()} means nothing to drop {exact}, "
                "which drops nothing at random",
                'use rescale "l1" or "none", or leave it out',
            )
        if "rescale_q" in self.values and (other or rescale in (False, NONE, L1)):
            why = f"when rescale is {'l1' if rescale == L1 else 'off'}"
            raise ConfigError(
                f"rescale_q means nothing {f'to drop {other}' if other else why}",
                "leave one of the two out",
            )

    def resolve(self, count: int, depth: float = 0.0) -> TensorSettings:
        """The settings for so many models, from depth 0 in the first layer to 1 in the last."""
        values = {name: value_at(value, depth) for name, value in self.values.items()}
        method = METHODS[values["method"]]

        def each(name: str, default: Any = None) -> tuple[Any, ...]:
            value = values.get(name, default)
            if isinstance(value, tuple) and len(value) != count:
                raise ConfigError(
                    f"{name} has {count_of(len(value), 'value')} for {count_of(count, 'model')}",
                    "give one for each model; "
                    "what changes over the layers is like {gradient = [0.9, 0.5, 0.9]}",
                )
            return value if isinstance(value, tuple) else (value,) * count

        thinnings = map(
            make_thinning,
            each("drop_rate", method.drop_rate),
            each("drop"),
            each("gamma", Thinning.gamma),
            each("epsilon", Thinning.epsilon),
            each("rescale"),
            each("rescale_q"),
        )
        weights = each("weights") if "weights" in values else None
        normalize = values.get("normalize", method.normalize)
        if weights and normalize and method.shares_only and min(weights) < 0:
            raise ConfigError(
                f"{values['method']} weights must not be negative where they are normalized",
                "they are shares, and lambda_coeff sets the size; or set normalize to false",
            )
        are_zero = weights is not None and not any(weights)
        if weights and normalize and not are_zero and not sum_weights(weights):
            raise ConfigError(
                "the weights add up to 0, so they cannot be normalized", "set normalize to false"
            )
        return TensorSettings(
            method=values["method"],
            thinnings=tuple(thinnings),
            # Where all are 0, what is left is the base's tensor, whatever the method.
            weights=method.share(None if are_zero else weights, count, normalize),
            normalize=normalize,
            lambda_coeff=0.0 if are_zero else float(values["lambda_coeff"]),
            origin=values.get("origin", method.origin),
            options={
                name: float(values.get(name, default))
                for name, default in method.settings.items()
                if default is not None
            },
        )


@dataclass(frozen=True, kw_only=True)
class DareConfig(Settings):
    """How to merge.

    Every field, those of Settings among them, is also a key of [dare] in TOML (rules: [[rules]])
    and a flag of the command.
    """

    method: str = DEFAULT
    drop_rate: Number | Sequence[Number] | None = None
    drop: str | Sequence[str] = RANDOM
    lambda_coeff: Number = 1.0
    # karcher: how many steps it may take; None: 10.
    max_iter: int | None = None
    # karcher: it ends with a step shorter than this; None: 1e-5.
    tol: float | None = None
    # Output type of float tensors, kept by its long name; None: the base's.
    dtype: str | None = None
    # Write what is FP8 without scales in the base in FP8 again.
    keep_fp8: bool = False
    # Write a LoRA adapter: of this rank, of what keeps this share of each change's energy, or full
    # (the ranks of adapters added up); None: a model.
    adapter_rank: float | str | None = None
    # In it, what changed and is no matrix: save (whole modules) or leave-out; None: save.
    adapter_rest: str | None = None
    # Of a diffusion pipeline: the folders to merge; None: transformers, U-Nets and text encoders.
    components: Sequence[str] | None = None
    # Tensors of another shape: error; overlap: merge the common rows; base: keep the base's.
    mismatch: str = "error"
    # True: merge even where the base is another kind of model, by config.json, names or weights.
    any_base: bool = False
    # The part of the base that models are, or of them that the base is: what its names begin with;
    # or what these begin with, by what the models' begin with; None: it is found.
    part_of: str | Mapping[str, str] | None = None
    # Of each file's tensors, where the output is a directory.
    max_shard_size: str | int = "5GB"
    # Warn where deltas are larger; the paper's limit for safe dropping.
    delta_threshold: float = 0.002
    # The first model's seed; model i draws its mask with seed + i.
    seed: int = 42
    # None: all cores that this process may use.
    threads: int | None = None
    # What computes: numba, plain (NumPy: slow, for where Numba cannot be loaded), or auto.
    engine: str = "auto"
    # Progress and summary.
    verbose: bool = True
    # The first that matches a tensor's name wins.
    rules: Sequence[Rule | dict[str, Any]] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if self.adapter_rest is not None and self.adapter_rank is None:
            raise ConfigError("adapter_rest means nothing without adapter_rank", "leave it out")
        if not isinstance(self.rules, tuple):
            raise ConfigError(
                f"rules must be a list, not {self.rules!r}",
                'like [{"match": "*norm*", "drop_rate": 0.5}]',
            )
        rules = tuple(Rule.of(rule, f"rule {k}") for k, rule in enumerate(self.rules, 1))
        object.__setattr__(self, "rules", rules)
        # Settings that mean nothing together are refused, rather than one of them ignored.
        scopes = self._scopes.values()
        given = [name for name in METHOD_SETTINGS if any(name in scope.own for scope in scopes)]
        check_meaning(given, "method", METHODS, self._methods)
        for where, scope in self._scopes.items():
            with naming(where):
                scope.check_drops()
                check_meaning(scope.own, "drop", DROPS, set(scope.drops) if where else self._drops)

    @property
    def typed_rules(self) -> tuple[Rule, ...]:
        return cast(tuple[Rule, ...], self.rules)

    def _scope(self, rule: Rule | None) -> Scope:
        values = list_given(self)
        own = list_given(rule) if rule else values
        return Scope(own, values | own)

    @cached_property
    def _scopes(self) -> dict[str, Scope]:
        """Of the tensors without a rule, and of those of each rule, by what to call them."""
        numbered = enumerate((None, *self.typed_rules))
        return {f"rule {k}: " if rule else "": self._scope(rule) for k, rule in numbered}

    @property
    def _drops(self) -> set[str]:
        return {drop for scope in self._scopes.values() for drop in scope.drops}

    @property
    def _methods(self) -> set[str]:
        return {scope.values["method"] for scope in self._scopes.values()}

    def check_models(self, count: int) -> None:
        for name in sorted(self._methods):
            least, most = METHODS[name].models
            if least and not count:
                hint = "give --merge MODEL..., or merge_files in [models]"
                raise ConfigError("there are no models to merge", hint)
            if count < least or (most is not None and count > most):
                wanted = f"{least}" if most == least else f"at least {least}"
                raise ConfigError(
                    f"method {name} takes {wanted} models, not {count}",
                    "use linear, which takes any number",
                )
        self.resolve_all(count)
        if not any(any(scope.values.get("weights", [1])) for scope in self._scopes.values()):
            raise ConfigError(
                "all weights are 0, so nothing would be merged", "give the models weights above 0"
            )

    def resolve_all(self, count: int) -> list[TensorSettings]:
        """The settings of all rules, and of no rule, wherever the lines of gradients meet."""
        resolved: list[TensorSettings] = []
        for where, scope in self._scopes.items():
            with naming(where):
                resolved += [scope.resolve(count, depth) for depth in scope.depths]
        return resolved

    @property
    def _is_normalized(self) -> bool:
        return METHODS[self.method].normalize if self.normalize is None else self.normalize

    @property
    def averages(self) -> bool:
        """Whether the base itself may be one of the models: it then counts."""
        method = METHODS[self.method]
        return (self.origin or method.origin) == ZERO or method.averages(self._is_normalized)

    @cached_property
    def has_gradients(self) -> bool:
        return any(len(scope.depths) > 1 for scope in self._scopes.values())

    def settle_rates(self, are_packed: Sequence[bool]) -> Self:
        """The same, with all drop rates stated.

        Where the user gives none, packed models bring theirs, and nothing more of them is dropped;
        all others have the method's own.
        """

        def find_rates(method: str) -> float | list[float]:
            rates = [0.0 if packed else METHODS[method].drop_rate for packed in are_packed]
            return rates if len({*rates}) > 1 else [*rates, METHODS[method].drop_rate][0]

        if self.drop_rate is not None:
            return self
        rules = [
            replace(rule, drop_rate=find_rates(rule.method))
            if rule.method and rule.drop_rate is None
            else rule
            for rule in self.typed_rules
        ]
        return replace(self, drop_rate=find_rates(self.method), rules=rules)

    def general(self, count: int) -> TensorSettings:
        return self.for_rule(None, count)

    def for_rule(self, rule: Rule | None, count: int, depth: float = 0.0) -> TensorSettings:
        """The settings of a rule's tensors, from depth 0 in the first layer to 1 in the last."""
        return self._scope(rule).resolve(count, depth)

    def recipe_settings(self) -> dict[str, Any]:
        """The settings that determine the output's bytes, as a [dare] table."""
        method = METHODS[self.method]
        rescales = {name_rescale(self.rescale, drop) for drop in self._drops}
        rescale: Any = rescales.pop() if len(rescales) == 1 else None  # None: each drop's own
        if self._drops == {RANDOM}:
            rescale = {EXPECTATION: True, NONE: False}.get(rescale, rescale)
        numbers = {name: value for name, value in method.settings.items() if value is not None}
        defaults = {name: value for name, value in numbers.items() if name != "keep_ratio"}
        chosen: dict[str, Any] = {
            "method": self.method,
            "drop_rate": as_toml(method.drop_rate if self.drop_rate is None else self.drop_rate),
            "seed": self.seed,
            "lambda_coeff": as_toml(self.lambda_coeff),
            **({} if rescale is None else {"rescale": rescale}),
            **defaults,
        }
        optional = (*METHOD_NUMBERS, "origin", "weights", "rescale_q", "dtype")
        optional += (*DROP_SETTINGS, "adapter_rank", "adapter_rest", "components", "part_of")
        is_written = {name: getattr(self, name) is not None for name in optional} | {
            "drop": set(self._scopes[""].drops) != {RANDOM},
            "normalize": self._is_normalized != method.normalize,
            "mismatch": self.mismatch != "error",
            **{name: getattr(self, name) for name in ("any_base", "keep_fp8")},
        }
        written = [name for name, wanted in is_written.items() if wanted]
        return chosen | {name: as_toml(getattr(self, name)) for name in written}


class Chooser:
    """Chooses the settings of tensors, by their rules and depths.

    names: those of all tensors of the base.
    """

    def __init__(self, config: DareConfig, names: Iterable[str], count: int) -> None:
        self._config = config
        self._count = count
        self._layers = count_layers(names) if config.has_gradients else {}
        self._known: dict[tuple[Rule | None, float, bool], TensorSettings] = {}

    def choose(self, name: str, shape: tuple[int, ...]) -> tuple[Rule | None, TensorSettings]:
        """The first rule that matches a tensor's name, and its settings.

        These are the same object for all tensors that share them. Where the method takes matrices,
        other tensors are averaged.
        """
        rule = next((rule for rule in self._config.typed_rules if rule.matches(name)), None)
        depth = depth_of(name, self._layers) if self._layers else 0.0
        is_matrix = find_matrices(name, shape) is not None
        if (rule, depth, is_matrix) not in self._known:
            settings = self._config.for_rule(rule, self._count, depth)
            self._known[rule, depth, is_matrix] = choose_method(settings, is_matrix)
        return rule, self._known[rule, depth, is_matrix]
