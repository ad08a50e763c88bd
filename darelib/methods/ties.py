"""ties: at each position, the models that agree with the sum's sign are averaged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.core.arrays import Array, divide, library
from darelib.core.drops import BREADCRUMBS, DELLA, MAGNITUDE, RANDOM
from darelib.methods.looks import Coefficients, Found, Piece, TensorSettings, TrimLook, weigh
from darelib.methods.method import (
    DARE_RATE,
    Method,
    Operation,
    add_rows,
    keep_shares,
    make_task_family,
)


def elect(piece: Piece, own: Coefficients) -> Array:
    """The sum's sign is elected at each position, positive at 0, and its models are averaged.

    Or summed up: where the first share is 1 and all weights are 0, the division changes nothing.
    """
    merged = add_rows(piece, own)
    lib = library(merged)
    total = lib.zeros_like(merged)
    share = lib.full_like(merged, own.first_share)
    for row, weight in zip(piece.rows, own.weights, strict=True):
        agrees = lib.where(merged >= 0, row > 0, row < 0)
        total = lib.where(agrees, total + row, total)
        share = lib.where(agrees, share + weight, share)
    return lib.where(share > 0, divide(total, share), 0.0)


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
    operation=Operation("elect", elect, compiled=True),
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
