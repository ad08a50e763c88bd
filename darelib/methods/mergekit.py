"""mergekit's merge methods: the settings that each becomes here, and mergekit's defaults."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from darelib.core.drops import DROPS

# The base's part in a method. NEEDED: deltas are taken from it. OPTIONAL: they are, if it is given.
# COUNTED: it is one of the models. FIRST: it is the first of two. ONLY: it is the only one.
NEEDED, OPTIONAL, COUNTED, FIRST, ONLY = "needed", "optional", "counted", "first", "only"
Settings = dict[str, Any]
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
    finish: Callable[[Settings], Settings] = lambda made: made


def make_task_family(
    drop: str = "",
    *,
    normalize: bool = False,
    rescale: bool = False,
    finish: Callable[[Settings], Settings] | None = None,
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


def leave_out(made: Settings) -> Settings:
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


def leave_out_of_sum(made: Settings) -> Settings:
    """The same, but weights that become 0 still count in the sum that all are divided by."""
    given = made["drop_rate"]
    if not made["normalize"] or 1 not in (given if isinstance(given, list) else [given]):
        return leave_out(made)
    total = math.fsum(made["weights"])
    divisor = total if abs(total) >= LEAST_DIVISOR else 1.0
    weights = [weight / divisor for weight in made["weights"]]
    return leave_out(made | {"normalize": False, "weights": weights})
