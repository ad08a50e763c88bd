"""DareConfig: how to merge, with all settings of a tensor resolved, checked and explained."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self, cast

from darelib.config.settings import (
    LEAVE_OUT,
    RULE_SETTINGS,
    SAVE,
    Decides,
    Group,
    Row,
    Rule,
    Settings,
    check_fields,
    check_value,
    hint_at_fp8,
    list_given,
    list_rows,
    naming,
    setting,
)
from darelib.config.values import (
    AUTO,
    FULL,
    LAYER,
    LEAST_BARE_SIZE,
    MAX_PADDING,
    SWITCH,
    TEXT,
    Check,
    Gradient,
    Number,
    above,
    as_toml,
    constant,
    count_layers,
    depth_of,
    find_depths,
    freeze,
    is_count,
    is_number,
    is_rank,
    is_size,
    is_whole,
    list_of,
    names_part,
    number,
    parse_number,
    parse_size,
    value_at,
    whole,
    word,
)
from darelib.core.arrays import find_matrices
from darelib.core.drops import DROP_SETTINGS, DROPS, EXPECTATION, L1, NONE, RANDOM, Drop, Thinning
from darelib.core.formats import DTYPES, SHORT_DTYPES
from darelib.core.text import ConfigError, count_of
from darelib.methods import DEFAULT, METHOD_SETTINGS, METHODS, choose_method
from darelib.methods.looks import ZERO, TensorSettings
from darelib.methods.method import Method, sum_weights

__all__ = [
    "LAYER",
    "PER_MODEL",
    "RULE_SETTINGS",
    "SETTINGS",
    "SWEEP_SETTINGS",
    "TENSOR_SETTINGS",
    "Chooser",
    "DareConfig",
    "Decides",
    "Gradient",
    "Group",
    "Row",
    "Rule",
    "as_toml",
    "check_setting",
    "count_layers",
    "depth_of",
    "explain_setting",
    "freeze",
    "is_count",
    "is_number",
    "name_flag",
    "naming",
    "parse_size",
    "value_at",
]


HELD_OUT: Final = 0.25  # of the examples, unless another share is asked for


def name_rescale(rescale: bool | str | None, drop: str) -> str:
    """How what a drop keeps is rescaled, from what is set: None is its own way."""
    if isinstance(rescale, bool):
        return EXPECTATION if rescale else NONE
    return rescale or DROPS[drop].rescale


def make_thinning(
    drop_rate: float,
    drop: str,
    options: Mapping[str, float],
    rescale: bool | str | None,
    q: float | None,
) -> Thinning:
    """How one model's delta is thinned. options: the drop's own settings. q: what to divide by
    instead of by the keep rate.
    """
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
    thinning = Thinning(drop_rate, drop, options, word, divisor)
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


def find_factor(lambda_coeff: float | str) -> float:
    """What a merge is planned with; until examples have chosen another, with 1."""
    return 1.0 if isinstance(lambda_coeff, str) else float(lambda_coeff)


def find_default(
    setting: str, table: Mapping[str, Method] | Mapping[str, Drop], used: Iterable[str]
) -> Any:
    """What a setting is by default, if the methods or drops that use it agree."""
    defaults = {table[word].settings.get(setting) for word in used} - {None}
    return defaults.pop() if len(defaults) == 1 else None


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

        drops = each("drop")
        options = [
            {name: each(name, default)[i] for name, default in DROPS[drop].settings.items()}
            for i, drop in enumerate(drops)
        ]
        thinnings = map(
            make_thinning,
            each("drop_rate", method.drop_rate),
            drops,
            options,
            each("rescale"),
            each("rescale_q"),
        )
        weights = each("weights") if "weights" in values else None
        normalize = values.get("normalize", method.normalize)
        if weights and normalize and method.shares_only and min(weights) < 0:
            raise ConfigError(
                f"{values['method']} weights must not be negative where they are normalized",
                "they are shares, and lambda_coeff sets the size"
                + ("; or set normalize to false" if "normalize" in method.settings else ""),
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
            lambda_coeff=0.0 if are_zero else find_factor(values["lambda_coeff"]),
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
    drop: str | Sequence[str] = RANDOM
    lambda_coeff: Number | str = setting(
        Check(
            "a number, or auto",
            lambda value: value == AUTO or number().accepts(value),
            parse_number,
            (AUTO,),
        ),
        "scale of the merged delta; auto: the best on examples that are held out",
        Group.MAIN,
        default=1.0,
        flag="--lambda",
    )
    max_iter: int | None = setting(
        Check("a whole number from 0 up", is_whole, int), "most steps", Group.METHOD,
        metavar="N",
    )  # fmt: skip
    tol: float | None = setting(constant(above(0)), "a shorter step is the last", Group.METHOD)
    max_examples: int | None = setting(
        whole("from 1 up", 1),
        "examples of each file that are used; others are left out at random (default 256)",
        Group.EXAMPLES,
        metavar="N",
    )
    max_tokens: int | None = setting(
        whole("from 2 up", 2),
        "tokens of each example that are used (default 512)",
        Group.EXAMPLES,
        metavar="N",
    )
    match_ridge: float | None = setting(
        constant(above(0)),
        "small follows the examples, large keeps what the method gives (default 0.05)",
        Group.EXAMPLES,
        searched=True,
    )
    held_out: float | None = setting(
        constant(number(" above 0 and below 1", lambda share: 0 < share < 1)),
        "share of the examples that judge, and match nothing (default: 0.25 where a lambda or a "
        "merge is judged, else none)",
        Group.EXAMPLES,
        metavar="SHARE",
    )
    dtype: str | None = setting(
        replace(
            word(*DTYPES, *SHORT_DTYPES),
            wanted=f"one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})",
            hint=hint_at_fp8,
        ),
        f"{', '.join(DTYPES)} (default: the base's)",
        Group.MAIN,
        metavar="NAME",
        searched=True,
    )
    seed: int = setting(
        whole("from 0 to 2^63 - 1", 0),
        "seed of the first model's mask; N + 1 is the next one's",
        Group.MAIN,
        default=42,
        metavar="N",
    )
    adapter_rank: float | str | None = setting(
        Check(
            "a whole number from 1 up, a share of the energy between 0 and 1, or full",
            is_rank,
            parse_number,
            (FULL,),
        ),
        "write a LoRA adapter of rank R; 0.95: ranks that keep this share of the energy; full: "
        "exact for a merge of adapters",
        Group.ADAPTERS,
        metavar="R",
    )
    adapter_rest: str | None = setting(
        word(SAVE, LEAVE_OUT),
        "changed norms, biases and embeddings: save or leave-out (default save)",
        Group.ADAPTERS,
        metavar="HOW",
    )
    components: Sequence[str] | None = setting(
        list_of("names of folders", TEXT),
        "folders of a pipeline to merge (default: transformer*, unet*, text_encoder*, prior*)",
        Group.IMAGES,
        metavar="NAME",
    )
    mismatch: str = setting(
        word("error", "overlap", "base"),
        "tensors of other shapes: error, overlap (merge common rows) or base",
        Group.MISFITS,
        default="error",
        metavar="HOW",
        searched=True,
    )
    any_base: bool = setting(
        SWITCH, "merge even if a model was not fine-tuned from this base", Group.MISFITS,
        default=False,
    )  # fmt: skip
    part_of: str | Mapping[str, str] | None = setting(
        Check("the start of names, or a table of such, by those that they replace", names_part),
        "merge only the part of the base, or else of the models, whose names begin with PREFIX "
        "(default: the part that fits)",
        Group.MISFITS,
        metavar="PREFIX",
    )
    pad_vocabulary: int | None = setting(
        Check(
            "a whole number from 1 to 65536",
            lambda value: is_count(value, 1) and value <= MAX_PADDING,
            int,
        ),
        "pad embeddings and heads to a multiple of N rows",
        Group.OUTPUT,
        metavar="N",
    )
    keep_fp8: bool = setting(
        SWITCH, "keep the base's FP8 tensors without scales in FP8", Group.OUTPUT,
        default=False,
    )  # fmt: skip
    max_shard_size: str | int = setting(
        Check(
            f"a size like 5GB or 500MiB, or a number of bytes from {LEAST_BARE_SIZE} up", is_size
        ),
        "largest file of an output directory",
        Group.OUTPUT,
        default="5GB",
        metavar="SIZE",
        decides=Decides.FILES,
    )
    delta_threshold: float = setting(
        constant(above(0)),
        "warn about larger deltas",
        Group.RUN,
        default=0.002,
        decides=Decides.WARNINGS,
    )
    threads: int | None = setting(
        whole("from 1 up", 1),
        "threads to use (default: all cores)",
        Group.RUN,
        metavar="N",
        decides=Decides.NOTHING,
    )
    engine: str = setting(
        word("auto", "numba", "plain"),
        "numba, plain (NumPy: the same bits, slow) or auto",
        Group.RUN,
        default="auto",
        metavar="NAME",
        decides=Decides.NOTHING,
    )
    verbose: bool = setting(
        SWITCH, "show progress and summary", Group.RUN, default=True, decides=Decides.NOTHING
    )
    # The first that matches a tensor's name wins.
    rules: Sequence[Rule | dict[str, Any]] = ()

    def __post_init__(self) -> None:
        check_fields(self, SETTINGS)
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
        values = list_given(self, TENSOR_SETTINGS)
        own = list_given(rule, RULE_SETTINGS) if rule else values
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

    def check_examples(self, are_there: bool) -> None:
        own = [name for name, row in SETTINGS.items() if row.group == Group.EXAMPLES]
        given = [name for holder in (self, *self.typed_rules) for name in list_given(holder, own)]
        if given and not are_there:
            raise ConfigError(
                f"{given[0]} means nothing without examples",
                "give --examples FILE..., one for each model, or leave it out",
            )
        if self.is_auto and not are_there:
            raise ConfigError(
                "lambda auto is chosen by examples, and there are none",
                "give --examples FILE..., one for each model, or a number",
            )
        if are_there and not self.needs_examples:
            raise ConfigError(
                "nothing is matched with the examples, and no lambda is chosen by them",
                "leave --examples out, or give --lambda auto",
            )

    @property
    def is_auto(self) -> bool:
        return self.lambda_coeff == AUTO

    @property
    def matches(self) -> bool:
        """Whether examples, where there are some, are for matching, too."""
        return self.matched is not False or any(rule.matched for rule in self.typed_rules)

    @property
    def needs_examples(self) -> bool:
        """Whether examples, where there are some, are for anything."""
        return self.matches or self.is_auto

    @property
    def judged_share(self) -> float:
        """Of the examples, where something is judged by them."""
        return self.held_out or HELD_OUT

    def settle_lambda(self, factor: float) -> Self:
        """The same with the lambda that examples have chosen. Where they are for nothing else, no
        setting of theirs is left.
        """
        settled = replace(self, lambda_coeff=factor)
        if self.matches:
            return replace(settled, held_out=self.judged_share)
        return settled.without_examples()

    def without_examples(self) -> Self:
        own = [name for name, row in SETTINGS.items() if row.group == Group.EXAMPLES]
        rules = [rule.without(own, self.method) for rule in self.typed_rules]
        nothing: dict[str, Any] = dict.fromkeys(own)
        return replace(self, rules=rules, **nothing)

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

    def recipe_settings(self, directory: bool = False) -> dict[str, Any]:
        """The settings that decide the output's bytes, as a [dare] table, with the defaults that
        methods and drops have: these may be others in another version.
        """
        decisive = {Decides.TENSORS, Decides.FILES} if directory else {Decides.TENSORS}
        values: dict[str, Any] = {"drop_rate": METHODS[self.method].drop_rate}
        values |= {name: find_default(name, METHODS, self._methods) for name in METHOD_SETTINGS}
        values |= {name: find_default(name, DROPS, self._drops) for name in DROP_SETTINGS}
        values |= list_given(self, SETTINGS)
        rescales = {name_rescale(self.rescale, drop) for drop in self._drops}
        if len(rescales) == 1:
            values["rescale"] = rescales.pop()
        return {
            name: as_toml(values[name], row.check.parse)
            for name, row in SETTINGS.items()
            if row.decides in decisive and values.get(name) is not None
        }


SETTINGS: Final = list_rows(DareConfig)
# What a search may choose.
SWEEP_SETTINGS: Final = tuple(
    name for name, row in SETTINGS.items() if row.searched or name in RULE_SETTINGS
)
PER_MODEL: Final = tuple(name for name, row in SETTINGS.items() if row.check.per_model)
# What says how a tensor is merged.
TENSOR_SETTINGS: Final = tuple(
    name for name in SETTINGS if name in RULE_SETTINGS or name in METHOD_SETTINGS
)


def check_setting(name: str, value: Any, where: str) -> None:
    """Refuse a value that a setting cannot have. where: what to call the setting."""
    check_value(SETTINGS[name].check, value, where)


def name_flag(setting: str) -> str:
    """Also of what is no setting."""
    own = SETTINGS[setting].flag if setting in SETTINGS else ""
    return own or f"--{setting.replace('_', '-')}"


def explain_setting(name: str) -> str:
    """The help of its flag: the methods or drops that use it, what it does, and its default."""
    row = SETTINGS[name]
    default = getattr(DareConfig, name)
    users: list[str] = []
    if name in DROP_SETTINGS:
        users = [drop for drop in DROPS if name in DROPS[drop].settings]
        default = find_default(name, DROPS, users)
    elif row.group == Group.METHOD:
        users = [method for method in METHODS if name in METHODS[method].settings]
        default = find_default(name, METHODS, users)
    prefix = f"{', '.join(users)}: " if users else ""
    value = f"{default:g}" if is_number(default) else default
    shown = "" if default is None or default is False else f" (default {value})"
    return f"{prefix}{row.help}{shown}"


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
