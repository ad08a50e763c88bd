"""ties: at each position, the models that agree with the sum's sign are averaged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.core.drops import BREADCRUMBS, DELLA, MAGNITUDE, RANDOM
from darelib.methods.looks import Found, TrimLook
from darelib.methods.mergekit import make_task_family
from darelib.methods.method import DARE_RATE, Coefficients, Method, keep_shares, weigh
from darelib.methods.settings import TensorSettings


def weigh_agreeing(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    shares = weigh(settings, models, found)
    sums = replace(shares, weights=(0.0,) * len(models), first_share=1.0)
    return shares if settings.normalize else sums


def describe(settings: TensorSettings) -> str:
    how = "averaged" if settings.normalize else "summed up by weight"
    return f"{how} over the models that agree on a sign, and added to the base"


TIES: Final = Method(
    "ties",
    card=describe,
    paper="[TIES](https://arxiv.org/abs/2306.01708)",
    kernel="elect",
    settings={"weights": None, "normalize": None, "keep_ratio": 1.0},
    drop_rate=DARE_RATE,
    share=keep_shares,
    looks=lambda settings: (TrimLook,) if settings.options["keep_ratio"] < 1 else (),
    weigh=weigh_agreeing,
    normalize=True,
    shares_only=True,
    returns_model=lambda settings: settings.options["keep_ratio"] == 1,
    mergekit={
        "ties": make_task_family(MAGNITUDE, normalize=True),
        "dare_ties": make_task_family(RANDOM, rescale=True),
        "breadcrumbs_ties": make_task_family(BREADCRUMBS),
        "della": make_task_family(DELLA, normalize=True, rescale=True),
    },
)
