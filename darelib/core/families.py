"""mergekit's merge methods: what each is made of here, and mergekit's defaults for it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from darelib.core.drops import BREADCRUMBS, DELLA, DROPS, MAGNITUDE, RANDOM
from darelib.core.methods import (
    FUSION,
    KARCHER,
    LINEAR,
    MULTISLERP,
    NEARSWAP,
    NUSLERP,
    PASSTHROUGH,
    RAM,
    RAMPLUS,
    SCE,
    SLERP,
    STOCK,
    TIES,
)
from darelib.core.settings import ZERO

# What the base is to a method: what deltas are taken from, which must or may be given; one of the
# models; the first of two; or the only one.
NEEDED, OPTIONAL, COUNTED, FIRST, ONLY = "needed", "optional", "counted", "first", "only"
Settings = dict[str, Any]
LEAST_DIVISOR: Final = 1e-8  # a smaller sum of weights is none to mergekit: it divides by 1


@dataclass(frozen=True)
class Family:
    method: str
    # Parameters of each model and those that there is one of, with the settings that they become.
    each: Mapping[str, str]
    shared: Mapping[str, str]
    ignored: tuple[str, ...] = ("int8_mask",)  # parameters without effect
    # Parameters that can only have this value here, with the reason.
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    drop: str = ""  # none: it drops nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of parameters
    base: str = NEEDED
    others: tuple[int, int | None] = (1, None)  # models beside the base: at least, at most
    # The settings of a tensor, from those that its parameters have become.
    finish: Callable[[Settings], Settings] = lambda made: made


def make_task_family(
    method: str, drop: str = "", *, normalize: bool = False, rescale: bool = False
) -> Family:
    """Deltas, perhaps thinned, times their weights."""
    own = {name: name for name in DROPS[drop].settings} if drop else {}
    return Family(
        method,
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
        finish=leave_out,
    )


def leave_out(made: Settings) -> Settings:
    """With the weight 0 for models of which nothing is kept: any drop rate will do for them.

    They have no sign that could be elected; but where all weights are divided by, theirs count.
    """
    weights = made["weights"]
    given = made["drop_rate"]
    rates = given if isinstance(given, list) else [given] * len(weights)
    if 1 not in rates:
        return made
    divisor = 1.0
    if made["normalize"] and made["method"] == LINEAR:
        total = math.fsum(weights)
        divisor = total if abs(total) >= LEAST_DIVISOR else 1.0
        made = made | {"normalize": False}
    pairs = list(zip(weights, rates, strict=True))
    return made | {
        "weights": [0.0 if rate == 1 else weight / divisor for weight, rate in pairs],
        "drop_rate": [0.0 if rate == 1 else rate for rate in rates],
    }


def finish_average(made: Settings) -> Settings:
    """Weights that are not divided by their sum multiply values, not deltas."""
    return made if made["normalize"] else made | {"origin": ZERO}


def finish_selection(made: Settings) -> Settings:
    """Where nothing is selected, the base stays as it is."""
    selects = made["keep_ratio"] != 0
    return made | {"keep_ratio": made["keep_ratio"] or 1.0, "lambda_coeff": float(selects)}


FAMILIES: Final = {
    "linear": Family(
        LINEAR,
        each={"weight": "weights"},
        shared={"normalize": "normalize"},
        defaults={"normalize": True},
        base=COUNTED,
        finish=finish_average,
    ),
    "task_arithmetic": make_task_family(LINEAR),
    "ties": make_task_family(TIES, MAGNITUDE, normalize=True),
    "dare_linear": make_task_family(LINEAR, RANDOM, rescale=True),
    "dare_ties": make_task_family(TIES, RANDOM, rescale=True),
    "breadcrumbs": make_task_family(LINEAR, BREADCRUMBS),
    "breadcrumbs_ties": make_task_family(TIES, BREADCRUMBS),
    "della": make_task_family(TIES, DELLA, normalize=True, rescale=True),
    "della_linear": make_task_family(LINEAR, DELLA, rescale=True),
    "slerp": Family(SLERP, each={}, shared={"t": "slerp_t"}, base=FIRST, others=(1, 1)),
    "passthrough": Family(
        PASSTHROUGH,
        each={"scale": "scale"},
        shared={},
        defaults={"scale": 1.0},
        base=ONLY,
        others=(0, 0),
    ),
    "ram": Family(RAM, each={}, shared={"epsilon": "threshold"}, defaults={"epsilon": 1e-5}),
    "model_stock": Family(
        STOCK,
        each={},
        shared={},
        only={"filter_wise": (False, "a tensor is one vector, not one by row")},
        defaults={"filter_wise": False},
        others=(2, None),
    ),
    "nuslerp": Family(
        NUSLERP,
        each={"weight": "weights"},
        shared={},
        ignored=("int8_mask", "nuslerp_row_wise"),  # which means nothing to flat tensors
        only={"nuslerp_flatten": (True, "a tensor is one vector, not one by row or column")},
        defaults={"nuslerp_flatten": True},
        base=OPTIONAL,
        others=(2, 2),
    ),
    "multislerp": Family(
        MULTISLERP,
        each={"weight": "weights"},
        shared={"normalize_weights": "normalize"},
        ignored=("int8_mask", "eps"),
        defaults={"normalize_weights": True},
        base=OPTIONAL,
    ),
    "karcher": Family(
        KARCHER,
        each={},
        shared={"max_iter": "max_iter", "tol": "tol"},
        defaults={"max_iter": 10, "tol": 1e-5},
        base=COUNTED,
    ),
    "nearswap": Family(NEARSWAP, each={}, shared={"t": "swap_t"}, others=(1, 1)),
    "sce": Family(
        SCE,
        each={},
        shared={"select_topk": "keep_ratio"},
        defaults={"select_topk": 1.0},
        finish=finish_selection,
    ),
    "ramplus_tl": Family(
        RAMPLUS,
        each={},
        shared={"r": "boost", "alpha": "boost_limit", "epsilon": "threshold"},
        defaults={"r": 0.1, "alpha": 0.2, "epsilon": 1e-5},
    ),
    "arcee_fusion": Family(FUSION, each={}, shared={}, others=(1, 1)),
}
