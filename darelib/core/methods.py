"""The ways to combine thinned deltas: settings, formulas, and what must be looked up first.

A kernel only multiplies, adds and compares; every number that it is given is computed here, once
for all engines.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Final

from darelib.core.combinations import (
    LEAST_PRODUCT,
    Products,
    find_arc,
    find_direction,
    find_karcher,
    find_stock,
    slerp_weights,
)
from darelib.core.drops import Bounds, Thinning
from darelib.core.looks import (
    ArcLook,
    BoundsLook,
    DivergenceLook,
    Found,
    GramLook,
    ImportanceLook,
    Look,
    MatrixLook,
    OverlapLook,
    SquaresLook,
    SumsLook,
    TrimLook,
    VarianceLook,
)
from darelib.core.settings import BASE, ZERO, TensorSettings


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


@dataclass(frozen=True)
class Method:
    card: Callable[[TensorSettings], str]  # what happens to the thinned deltas, for a model card
    kernel: str  # the kernel that merges a chunk
    settings: tuple[str, ...]  # those of the optional settings that mean something to it
    # The weights, from those given, if any, for so many models, perhaps to be normalized.
    share: Callable[[Sequence[float] | None, int, bool], tuple[float, ...]]
    weigh: Weigh
    # What must be found out first, beside what drops want, one after the other.
    looks: Callable[[TensorSettings], tuple[type[Look], ...]] = lambda _: ()
    # The models' shares of what can only be averaged.
    shares: Callable[[TensorSettings], tuple[float, ...]] = lambda own: own.weights
    models: tuple[int, int | None] = (1, None)  # how many it takes: at least, at most
    any_drop: bool = True  # whether it goes with other drops than random
    sees_dropped: bool = False  # whether what a drop leaves out decides with the rest
    # Whether the base may be one of the models, by whether weights are normalized.
    averages: Callable[[bool], bool] = lambda _: False
    # Of what is combined, where the user does not say: deltas, from the base, or values, from zero.
    origin: str = BASE
    normalize: bool = False  # whether weights are divided by their sum, where the user does not say
    # Whether weights that are divided by their sum are shares of a whole: never negative.
    shares_only: bool = False
    whole: bool = False  # whether it takes whole matrices; all other tensors are averaged
    # Whether the merged delta's rank is at most those of the models' together.
    adds_ranks: bool = False
    returns_model: bool = True  # whether it merges one model of weight 1 into that model
    # Whether it leaves the base's tensor as it is, so that its bytes can be copied.
    keeps_base: Callable[[TensorSettings], bool] = lambda _: False


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
    """From zero, what the weights lack of 1 is taken of the base; those of models without the
    tensor, which have the base's, count.
    """
    weights = settings.weights if weights is None else weights
    is_zero = settings.origin == ZERO
    return weigh(settings, models, found, weights, math.fsum(weights) - 1 if is_zero else 0.0)


def returns_model(settings: TensorSettings) -> bool:
    """Whether the merge of a single model is that model: base + 1 * (finetuned - base).

    It is then taken as it is; computing it would lose bits where the base is much larger.
    """
    is_whole = settings.drop_rates == (0,) and settings.divisors == (1,)
    is_plain = settings.keep_ratio == 1 and METHODS[settings.method].returns_model
    return is_whole and is_plain and settings.lambda_coeff == 1 and settings.weights == (1,)


def average_only(settings: TensorSettings) -> TensorSettings:
    """For what must stay between the inputs' values, as variances must: nothing is dropped, and the
    weights are shares, equal ones where some are negative.
    """
    count = len(settings.weights)
    weights = METHODS[settings.method].shares(settings)
    return TensorSettings(
        method=LINEAR,
        thinnings=(Thinning(),) * count,
        weights=_average(None if min(weights) < 0 else weights, count, True),
        normalize=True,
        lambda_coeff=min(max(settings.lambda_coeff, 0.0), 1.0),
        keep_ratio=1.0,
    )


def choose_method(settings: TensorSettings, is_matrix: bool) -> TensorSettings:
    """The settings of a tensor: what no method for matrices is needed for is averaged, or is the
    only model's.
    """
    needs_matrices = is_matrix and len(settings.weights) > 1 and settings.lambda_coeff != 0
    if needs_matrices or not METHODS[settings.method].whole:
        return settings
    return replace(settings, method=LINEAR)


def weigh_for_look(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """Looks see the thinned deltas as they are, without weights."""
    return weigh(settings, models, found, (1.0,) * len(settings.divisors))


def choose_looks(settings: TensorSettings, models: Sequence[int]) -> list[type[Look]]:
    """What must be found out about a tensor that these models have, one after the other."""
    thinnings = [settings.thinnings[i] for i in models]
    looks: list[type[Look]] = []
    if any(thinning.scheme.ends for thinning in thinnings):
        looks.append(BoundsLook)
    if any(thinning.restores_sum for thinning in thinnings):
        looks.append(SumsLook)
    return [*looks, *METHODS[settings.method].looks(settings)]


def sum_weights(weights: Sequence[float]) -> Fraction:
    """The exact sum; 0 where only rounding keeps it from that, as in 0.1 + 0.2 - 0.3."""
    total = sum(map(Fraction, weights), Fraction())
    return total if abs(total) * 10**9 >= max(map(abs, weights)) else Fraction()


def _average(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    if given is None:
        return (1 / count,) * count
    if not normalize:
        return tuple(map(float, given))
    total = sum_weights(given)
    return tuple(float(Fraction(weight) / total) for weight in given)


def _equal_shares(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    """Shares are divided by those of the models that agree, later. An only model's is the whole."""
    if not normalize:
        return _average(given, count, normalize)
    return (1.0,) * count if given is None or count == 1 else tuple(map(float, given))


def _weigh_ties(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    shares = weigh(settings, models, found)
    sums = replace(shares, weights=(0.0,) * len(models), first_share=1.0)
    return shares if settings.normalize else sums


def _describe_ties(settings: TensorSettings) -> str:
    how = "averaged" if settings.normalize else "summed up by weight"
    return f"{how} over the models that agree on a sign, and added to the base"


def _weigh_slerp(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """The arc goes from base + kept_0 to base + kept_1; what is merged is added to a whole base."""
    weights = slerp_weights(*(found.products or (0.0,) * 3), settings.slerp_t)
    return weigh_from_origin(settings, models, found, weights)


def _weigh_ram(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh(settings, models, found), floors=(settings.threshold,) * len(models))


def weigh_by_products(find: Callable[[TensorSettings, Products], Products]) -> Weigh:
    """The weights are found by the scalar products of the thinned models, or of their deltas."""

    def weigh_found(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
        weights = settings.weights
        # What no float can hold gives values that are not finite, which the merge will report.
        if found.products and all(map(math.isfinite, found.products)):
            with suppress(ArithmeticError, ValueError):
                weights = find(settings, found.products)
        return weigh_from_origin(settings, models, found, weights)

    return weigh_found


def _place(settings: TensorSettings) -> str:
    return ", with the base in each" if settings.origin == ZERO else ", and added to the base"


def _share_arc(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    """The middle, where weights add up to 0."""
    adds_up = given is not None and abs(sum_weights(given)) >= LEAST_PRODUCT
    return _average(given if adds_up else None, count, True)


def _weigh_near(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh(settings, models, found), bound=settings.swap_t)


def _weigh_sce(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh_for_look(settings, models, found), weights=found.shares)


def _weigh_fusion(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """Floors are of deltas as they are: the bound scales them like what is kept."""
    weighed = weigh(settings, models, found)
    return replace(weighed, bound=weighed.scales[0] if models else 0.0)


LINEAR, TIES, SLERP, RAM, WUDI = "linear", "ties", "slerp", "ram", "wudi"
STOCK, NUSLERP, MULTISLERP, KARCHER = "model_stock", "nuslerp", "multislerp", "karcher"
PASSTHROUGH: Final = "passthrough"
NEARSWAP, SCE, RAMPLUS, FUSION = "nearswap", "sce", "ramplus", "arcee_fusion"
METHODS: Final = {
    LINEAR: Method(
        card=lambda _: "summed up by weight and added to the base",
        kernel="sum",
        settings=("weights", "normalize", "origin"),
        share=_average,
        weigh=weigh_from_origin,
        averages=lambda normalize: normalize,
        adds_ranks=True,
    ),
    TIES: Method(
        card=_describe_ties,
        kernel="elect",
        settings=("weights", "normalize", "keep_ratio"),
        share=_equal_shares,
        looks=lambda settings: (TrimLook,) if settings.keep_ratio < 1 else (),
        weigh=_weigh_ties,
        normalize=True,
        shares_only=True,
    ),
    SLERP: Method(
        card=lambda _: "interpolated along the arc between the two",
        kernel="sum",
        settings=("slerp_t",),
        share=_average,
        looks=lambda _: (ArcLook,),
        weigh=_weigh_slerp,
        shares=lambda settings: (1 - settings.slerp_t, settings.slerp_t),
        models=(2, 2),
        any_drop=False,
        origin=ZERO,
    ),
    RAM: Method(  # arXiv 2601.13572
        card=lambda settings: (
            f"averaged where they are at least {settings.threshold:g}, and added to the base"
        ),
        kernel="average",
        settings=("weights", "threshold"),
        share=_equal_shares,
        weigh=_weigh_ram,
        normalize=True,
        shares_only=True,
        returns_model=False,
    ),
    WUDI: Method(  # after arXiv 2503.08099; darelib.kernels.matrices has the formula
        card=lambda settings: (
            "merged matrix by matrix, so that each keeps its effect on its own inputs and outputs "
            f"(ridge {settings.ridge:g}), and added to the base"
        ),
        kernel="sum",
        settings=("weights", "ridge", "norm_limit"),
        share=_average,
        looks=lambda _: (MatrixLook,),
        weigh=weigh,
        normalize=True,
        shares_only=True,
        whole=True,
        adds_ranks=True,
    ),
    STOCK: Method(
        card=lambda _: (
            "averaged, scaled, tensor by tensor, by how far their directions agree (Model Stock), "
            "and added to the base"
        ),
        kernel="sum",
        settings=(),
        share=_average,
        looks=lambda _: (GramLook,),
        weigh=weigh_by_products(lambda own, found: find_stock(found, len(own.weights))),
        models=(2, None),
    ),
    NUSLERP: Method(
        card=lambda settings: f"interpolated along the arc between the two{_place(settings)}",
        kernel="sum",
        settings=("weights", "origin"),
        share=_share_arc,
        looks=lambda _: (GramLook,),
        weigh=weigh_by_products(lambda own, found: find_arc(found, own.weights[1])),
        models=(2, 2),
    ),
    MULTISLERP: Method(
        card=lambda settings: (
            "merged as the weighted mean of their directions, with the weighted mean of their "
            f"lengths{_place(settings)}"
        ),
        kernel="sum",
        settings=("weights", "normalize", "origin"),
        share=_average,
        looks=lambda _: (GramLook,),
        weigh=weigh_by_products(lambda own, found: find_direction(found, own.weights)),
        normalize=True,
    ),
    KARCHER: Method(
        card=lambda settings: (
            "merged as the Karcher mean of their directions, with the mean of their lengths"
            f"{_place(settings)}"
        ),
        kernel="sum",
        settings=("origin", "max_iter", "tol"),
        share=_average,
        looks=lambda _: (GramLook,),
        weigh=weigh_by_products(
            lambda own, found: find_karcher(found, len(own.weights), int(own.max_iter), own.tol)
        ),
        origin=ZERO,
    ),
    PASSTHROUGH: Method(
        card=lambda settings: "copied" if settings.scale == 1 else f"times {settings.scale:g}",
        kernel="sum",
        settings=("scale",),
        share=lambda *_: (),
        weigh=lambda own, models, found: weigh(own, models, found, base_share=own.scale - 1),
        models=(0, 0),
        keeps_base=lambda settings: settings.scale == 1,
    ),
    NEARSWAP: Method(
        card=lambda settings: (
            f"added to the base, at most {settings.swap_t:g} of each entry: what lies near is "
            "swapped"
        ),
        kernel="near",
        settings=("swap_t",),
        share=_average,
        weigh=_weigh_near,
        models=(1, 1),
        returns_model=False,
    ),
    SCE: Method(  # arXiv 2408.07990
        card=lambda settings: (
            "averaged, by their squares, over the models that agree on a sign, where they differ "
            f"most (a share of {settings.keep_ratio:g}), and added to the base"
        ),
        kernel="select",
        settings=("keep_ratio",),
        share=_average,
        looks=lambda settings: (
            (VarianceLook, SquaresLook) if settings.keep_ratio < 1 else (SquaresLook,)
        ),
        weigh=_weigh_sce,
    ),
    RAMPLUS: Method(  # arXiv 2601.13572
        card=lambda settings: (
            f"averaged where they are at least {settings.threshold:g}, what only one model changes "
            f"up to {1 + settings.boost * settings.boost_limit:g}-fold, and added to the base"
        ),
        kernel="boost",
        settings=("weights", "threshold", "boost", "boost_limit"),
        share=_equal_shares,
        looks=lambda _: (OverlapLook,),
        weigh=_weigh_ram,
        normalize=True,
        shares_only=True,
        returns_model=False,
    ),
    # Its importance is that of the fine-tune as it is: a drop thins what is chosen.
    FUSION: Method(
        card=lambda _: (
            "added to the base where their size, times how far the row's softmax moves, is an "
            "outlier"
        ),
        kernel="fuse",
        settings=(),
        share=_average,
        looks=lambda _: (DivergenceLook, ImportanceLook),
        weigh=_weigh_fusion,
        models=(1, 1),
        any_drop=False,
        sees_dropped=True,
        returns_model=False,
    ),
}
# The settings that mean something to some methods only, and those of them that are just numbers.
METHOD_SETTINGS: Final = tuple(
    dict.fromkeys(name for method in METHODS.values() for name in method.settings)
)
METHOD_NUMBERS: Final = tuple(
    entry.name
    for entry in fields(TensorSettings)
    if entry.name in METHOD_SETTINGS and entry.type is float
)
