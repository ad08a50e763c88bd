"""linear: the weighted sum of the deltas; with dropping at random, DARE itself."""

from typing import Final

from darelib.core.drops import BREADCRUMBS, DELLA, RANDOM
from darelib.methods.looks import ZERO, weigh_from_origin
from darelib.methods.method import (
    COUNTED,
    DARE_RATE,
    SUM,
    Family,
    Method,
    Translated,
    leave_out_of_sum,
    make_task_family,
)


def finish_average(made: Translated) -> Translated:
    """Weights that are not divided by their sum multiply values, not deltas."""
    return made if made["normalize"] else made | {"origin": ZERO}


LINEAR: Final = Method(
    "linear",
    card=lambda _: "summed up by weight and added to the base",
    paper="[task arithmetic](https://arxiv.org/abs/2212.04089)",
    operation=SUM,
    settings={"weights": None, "normalize": None, "origin": None},
    drop_rate=DARE_RATE,
    weigh=weigh_from_origin,
    averages=lambda normalize: normalize,
    adds_ranks=True,
    mergekit={
        "linear": Family(
            each={"weight": "weights"},
            shared={"normalize": "normalize"},
            defaults={"normalize": True},
            base=COUNTED,
            finish=finish_average,
        ),
        "task_arithmetic": make_task_family(finish=leave_out_of_sum),
        "dare_linear": make_task_family(RANDOM, rescale=True, finish=leave_out_of_sum),
        "breadcrumbs": make_task_family(BREADCRUMBS, finish=leave_out_of_sum),
        "della_linear": make_task_family(DELLA, rescale=True, finish=leave_out_of_sum),
    },
)
