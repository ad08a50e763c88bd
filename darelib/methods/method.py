"""The parts of a method, and its defaults.

A kernel only multiplies, adds and compares. Every number that it is given is computed here or in
the method's own file, once for all engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from darelib.core.arrays import Array
from darelib.core.matrices import Factors, Matrices
from darelib.methods.coefficients import Coefficients, Found, Piece, weigh
from darelib.methods.looks import Look
from darelib.methods.mergekit import Family
from darelib.methods.settings import BASE, ZERO, Options, TensorSettings

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
