"""The parts of a method, and its defaults.

Compiled functions only multiply, add and compare. Every number that they are given is computed
here or in the method's own file, once for all engines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from darelib.core.arrays import Array, Factors, Matrices
from darelib.core.drops import DROPS
from darelib.methods.looks import (
    BASE,
    ZERO,
    Coefficients,
    Found,
    Look,
    Options,
    Piece,
    TensorSettings,
    weigh,
)

# The base's part in a method. NEEDED: deltas are taken from it. OPTIONAL: they are, if it is given.
# COUNTED: it is one of the models. FIRST: it is the first of two. ONLY: it is the only one.
NEEDED = "needed"
OPTIONAL = "optional"
COUNTED = "counted"
FIRST = "first"
ONLY = "only"
Translated = dict[str, Any]
LEAST_DIVISOR: Final = 1e-8  # a smaller sum of weights is none to mergekit: it divides by 1


@dataclass(frozen=True)
class Family:
    # Parameters of each model and of the merge, with the settings that they become.
    each: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ("int8_mask",)  # parameters without effect on the result
    # Parameters with the only value that they can have here, and the reason.
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    drop: str = ""  # none: it drops nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of parameters
    base: str = NEEDED
    others: tuple[int, int | None] = (0, None)  # models beside the base: at least, at most
    # The settings of a tensor, from those that its parameters have become.
    finish: Callable[[Translated], Translated] = lambda made: made


def make_task_family(
    drop: str = "",
    *,
    normalize: bool = False,
    rescale: bool = False,
    finish: Callable[[Translated], Translated] | None = None,
) -> Family:
    """Deltas, perhaps thinned, times their weights."""
    own = {name: name for name in DROPS[drop].settings} if drop else {}
    return Family(
        each={"weight": "weights", **({"density": "drop_rate"} if drop else {}), **own},
        shared={
            "lambda": "lambda_coeff",
            "normalize": "normalize",
            **({"rescale": "rescale"} if drop else {}),
        },
        ignored=("int8_mask",) if drop else ("density", "rescale", "int8_mask"),
        drop=drop,
        defaults={
            "density": 1.0,
            "gamma": 0.01,
            "epsilon": 0.15,
            "lambda": 1.0,
            "normalize": normalize,
            "rescale": rescale,
        },
        finish=finish or leave_out,
    )


def leave_out(made: Translated) -> Translated:
    """Give models with drop rate 1 the weight 0 and another drop rate, which has no effect."""
    given = made["drop_rate"]
    weights = made["weights"]
    rates = given if isinstance(given, list) else [given] * len(weights)
    if 1 not in rates:
        return made
    pairs = list(zip(weights, rates, strict=True))
    return made | {
        "weights": [0.0 if rate == 1 else weight for weight, rate in pairs],
        "drop_rate": [0.0 if rate == 1 else rate for rate in rates],
    }


def leave_out_of_sum(made: Translated) -> Translated:
    """The same, but weights that become 0 still count in the sum that all are divided by."""
    given = made["drop_rate"]
    if not made["normalize"] or 1 not in (given if isinstance(given, list) else [given]):
        return leave_out(made)
    total = math.fsum(made["weights"])
    divisor = total if abs(total) >= LEAST_DIVISOR else 1.0
    weights = [weight / divisor for weight in made["weights"]]
    return leave_out(made | {"normalize": False, "weights": weights})


DARE_RATE: Final = 0.9  # the paper's, for the methods that are DARE's own


Weigh = Callable[[TensorSettings, Sequence[int], Found], Coefficients]
# The weights, from those given, if any, for so many models, perhaps to be normalized.
Share = Callable[[Sequence[float] | None, int, bool], tuple[float, ...]]


@dataclass(frozen=True)
class Operation:
    """What is made of the thinned deltas of each position: the merged delta, before lambda.

    Few are compiled. All others are run by their definition, chunk by chunk, on every engine.
    """

    name: str
    combine: Callable[[Piece, Coefficients], Array]  # the definition, for arrays of any library
    compiled: bool = False


def add_rows(piece: Piece, own: Coefficients) -> Array:
    return sum(piece.rows, start=own.base_share * piece.base)


SUM: Final = Operation("sum", add_rows, compiled=True)


@dataclass(frozen=True)
class WholeMerge:
    """Functions of a method that merges the changes of one matrix as a whole, by their weights."""

    define: Callable[[Sequence[Array], Sequence[float], Options], Array]  # in float64
    # In the changes' type, or in float64. They are overwritten.
    merge: Callable[[Sequence[Array], Sequence[float], Options, bool], Array]
    # Of changes that are products, as adapters have them.
    merge_products: Callable[[Sequence[Factors], Sequence[float], Options], Factors]
    count_operations: Callable[[Matrices, int], int]  # for so many models


@dataclass(frozen=True)
class Method:
    name: str
    card: Callable[[TensorSettings], str]  # what happens to the thinned deltas, for a model card
    operation: Operation
    # Those of the optional settings that mean something to it, with its defaults; None: it has no
    # fixed one.
    settings: Mapping[str, float | None] = field(default_factory=dict)
    drop_rate: float = 0.0  # where the user does not say
    paper: str = ""  # a link, for a model card
    share: Share = lambda given, count, normalize: average_weights(given, count, normalize)
    weigh: Weigh = lambda settings, models, found: weigh(settings, models, found)
    # What must be found out first, beside what drops want, one after the other.
    looks: Callable[[TensorSettings], tuple[type[Look], ...]] = lambda _: ()
    # The models' shares of what can only be averaged.
    shares: Callable[[TensorSettings], tuple[float, ...]] = lambda own: own.weights
    models: tuple[int, int | None] = (1, None)  # how many it takes: at least, at most
    any_drop: bool = True  # whether it goes with other drops than random
    sees_dropped: bool = False  # whether dropped entries count in its decisions
    # Whether the base may be one of the models, by whether weights are normalized.
    averages: Callable[[bool], bool] = lambda _: False
    # Where the user does not say: deltas (from the base) or values (from zero) are combined.
    origin: str = BASE
    normalize: bool = False  # whether weights are divided by their sum, where the user does not say
    # Whether weights that are divided by their sum are shares of a whole: never negative.
    shares_only: bool = False
    whole: WholeMerge | None = None  # it takes whole matrices; all other tensors are averaged
    # Whether the merged delta's rank is at most the sum of the models' ranks.
    adds_ranks: bool = False
    # Whether the same inputs give the same bytes on every machine, and not only nearly.
    exact: bool = True
    # Whether it merges one model of weight 1 into that model.
    returns_model: Callable[[TensorSettings], bool] = lambda _: True
    # Whether it leaves the base's tensor as it is, so that its bytes can be copied.
    keeps_base: Callable[[TensorSettings], bool] = lambda _: False
    mergekit: Mapping[str, Family] = field(default_factory=dict)  # by mergekit's name for it


def sum_weights(weights: Sequence[float]) -> Fraction:
    """The exact sum; 0 where only rounding keeps it from that, as in 0.1 + 0.2 - 0.3."""
    total = sum(map(Fraction, weights), Fraction())
    return total if abs(total) * 10**9 >= max(map(abs, weights)) else Fraction()


def average_weights(
    given: Sequence[float] | None, count: int, normalize: bool
) -> tuple[float, ...]:
    if given is None:
        return (1 / count,) * count
    if not normalize:
        return tuple(map(float, given))
    total = sum_weights(given)
    return tuple(float(Fraction(weight) / total) for weight in given)


def keep_shares(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    """Shares are divided by those of the models that agree, later. An only model's is the whole."""
    if not normalize:
        return average_weights(given, count, normalize)
    return (1.0,) * count if given is None or count == 1 else tuple(map(float, given))


def name_origin(settings: TensorSettings) -> str:
    return ", with the base in each" if settings.origin == ZERO else ", and added to the base"
