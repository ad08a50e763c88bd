"""The ways to combine thinned deltas: one file for each, or for a close family, and this table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.core.drops import Thinning
from darelib.methods.arcs import KARCHER, MULTISLERP, NUSLERP, SLERP
from darelib.methods.fusion import FUSION
from darelib.methods.linear import LINEAR
from darelib.methods.looks import BoundsLook, Look, SumsLook, TensorSettings
from darelib.methods.method import Method, average_weights
from darelib.methods.nearswap import NEARSWAP
from darelib.methods.passthrough import PASSTHROUGH
from darelib.methods.ram import RAM, RAMPLUS
from darelib.methods.sce import SCE
from darelib.methods.stock import STOCK
from darelib.methods.ties import TIES
from darelib.methods.wudi import WUDI

METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        LINEAR,
        TIES,
        SLERP,
        RAM,
        WUDI,
        STOCK,
        NUSLERP,
        MULTISLERP,
        KARCHER,
        PASSTHROUGH,
        NEARSWAP,
        SCE,
        RAMPLUS,
        FUSION,
    )
}
DEFAULT: Final = LINEAR.name
RECOMMENDED: Final = WUDI.name  # by the experiment in docs/evidence.md
# The settings that mean something to some methods only.
METHOD_SETTINGS: Final = tuple(
    dict.fromkeys(name for method in METHODS.values() for name in method.settings)
)
OPERATIONS: Final = {method.operation.name: method.operation for method in METHODS.values()}
# By mergekit's name: ours, and what it is made of.
MERGEKIT: Final = {
    name: (method.name, family)
    for method in METHODS.values()
    for name, family in method.mergekit.items()
}


def returns_model(settings: TensorSettings) -> bool:
    """Whether the merge of a single model is that model: base + 1 * (finetuned - base).

    It is then taken as it is; computing it would lose bits where the base is much larger.
    """
    is_whole = settings.drop_rates == (0,) and settings.divisors == (1,)
    is_plain = settings.lambda_coeff == 1 and settings.weights == (1,)
    return is_whole and is_plain and METHODS[settings.method].returns_model(settings)


def average_only(settings: TensorSettings) -> TensorSettings:
    """For values that must stay between the inputs', like variances: nothing is dropped, and the
    weights are shares, equal ones where some are negative.
    """
    count = len(settings.weights)
    weights = METHODS[settings.method].shares(settings)
    return TensorSettings(
        method=DEFAULT,
        thinnings=(Thinning(),) * count,
        weights=average_weights(None if min(weights) < 0 else weights, count, True),
        normalize=True,
        lambda_coeff=min(max(settings.lambda_coeff, 0.0), 1.0),
    )


def choose_method(settings: TensorSettings, is_matrix: bool) -> TensorSettings:
    """The settings of a tensor: one that needs no method for matrices is averaged, or is the only
    model's.
    """
    needs_matrices = is_matrix and len(settings.weights) > 1 and settings.lambda_coeff != 0
    if needs_matrices or not METHODS[settings.method].whole:
        return settings
    return replace(settings, method=DEFAULT)


def keep_only(count: int) -> TensorSettings:
    """For a tensor that stays the base's, beside so many models."""
    return TensorSettings(
        method=PASSTHROUGH.name,
        thinnings=(Thinning(),) * count,
        weights=(0.0,) * count,
        normalize=False,
        lambda_coeff=0.0,
        options={"scale": 1.0},
    )


def choose_looks(settings: TensorSettings, models: Sequence[int]) -> list[type[Look]]:
    """What must be found out about a tensor that these models have, one after the other."""
    thinnings = [settings.thinnings[i] for i in models]
    looks: list[type[Look]] = []
    if any(thinning.scheme.ends for thinning in thinnings):
        looks.append(BoundsLook)
    if any(thinning.restores_sum for thinning in thinnings):
        looks.append(SumsLook)
    return [*looks, *METHODS[settings.method].looks(settings)]
