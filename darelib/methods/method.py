"""What a way to combine thinned deltas is made of, and how a tensor is merged by one.

A kernel only multiplies, adds and compares. Every number that it is given is computed here or in
the method's own file, once for all engines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from darelib.core.arrays import Array
from darelib.core.drops import Bounds
from darelib.core.matrices import Factors, Matrices
from darelib.methods.looks import Found, Look
from darelib.methods.mergekit import Family
from darelib.methods.settings import BASE, ZERO, Options, TensorSettings

DARE_RATE: Final = 0.9  # the paper's, for the methods that are DARE's own


@dataclass(frozen=True)
class Coefficients:
    """What a kernel multiplies by and compares with; a row for each model that has the tensor."""

    scales: tuple[float, ...]  # of the kept deltas
    # ties divides by those of the models that agree, added to the first share.
    weights: tuple[float, ...]
    bounds: tuple[Bounds | None, ...]  # of the |delta| that the drop keeps, where it is by size
    floors: tuple[float, ...]  # trim and ram keep what is at least as large
    base_share: float = 0.0  # how much of the base itself the merged delta gets
    first_share: float = 0.0
    bound: float = 0.0  # what the score of an entry must reach; nearswap: how far one may move
    boosts: tuple[float, ...] = ()  # of what only this model changes


Weigh = Callable[[TensorSettings, Sequence[int], Found], Coefficients]
# The weights, from those given, if any, for so many models, perhaps to be normalized.
Share = Callable[[Sequence[float] | None, int, bool], tuple[float, ...]]


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
    kernel: str  # the kernel that merges a chunk
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
    # Whether it merges one model of weight 1 into that model.
    returns_model: Callable[[TensorSettings], bool] = lambda _: True
    # Whether it leaves the base's tensor as it is, so that its bytes can be copied.
    keeps_base: Callable[[TensorSettings], bool] = lambda _: False
    mergekit: Mapping[str, Family] = field(default_factory=dict)  # by mergekit's name for it


def weigh(
    settings: TensorSettings,
    models: Sequence[int],
    found: Found,
    weights: Sequence[float] | None = None,
    base_share: float = 0.0,
) -> Coefficients:
    """A model's kept deltas are multiplied by its weight over its divisor, and by its factor."""
    weights = settings.weights if weights is None else weights
    scaled = zip(models, found.factors or (1.0,) * len(models), strict=True)
    return Coefficients(
        scales=tuple(weights[i] / settings.divisors[i] * factor for i, factor in scaled),
        weights=tuple(weights[i] for i in models),
        bounds=found.bounds or (None,) * len(models),
        floors=found.floors or (0.0,) * len(models),
        base_share=base_share,
        bound=found.bound,
        boosts=found.boosts or (1.0,) * len(models),
    )


def weigh_from_origin(
    settings: TensorSettings,
    models: Sequence[int],
    found: Found,
    weights: Sequence[float] | None = None,
) -> Coefficients:
    """From zero, the base gets what the weights lack of 1; those of models without the tensor,
    which have the base's, count.
    """
    weights = settings.weights if weights is None else weights
    is_zero = settings.origin == ZERO
    return weigh(settings, models, found, weights, math.fsum(weights) - 1 if is_zero else 0.0)


def weigh_for_look(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """Looks see the thinned deltas as they are, without weights."""
    return weigh(settings, models, found, (1.0,) * len(settings.divisors))


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
