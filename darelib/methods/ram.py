"""ram: the average, at each position, over the models that change it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.core.arrays import Array, divide, library
from darelib.methods.coefficients import Coefficients, Found, Piece, weigh
from darelib.methods.mergekit import Family
from darelib.methods.method import Method, Operation, keep_shares
from darelib.methods.settings import TensorSettings

LEAST_CHANGE: Final = 1e-5  # a smaller |delta| counts as none
PAPER: Final = "[Reinforced Agent Merging](https://arxiv.org/abs/2601.13572)"


def average(piece: Piece, own: Coefficients) -> Array:
    lib = library(piece.base)
    total = lib.zeros_like(piece.base)
    share = lib.full_like(piece.base, own.first_share)
    for row, weight in zip(piece.rows, own.weights, strict=True):
        total = lib.where(row != 0, total + row, total)
        share = lib.where(row != 0, share + weight, share)
    return lib.where(share > 0, divide(total, share), 0.0)


def weigh_changes(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    floors = (settings.options["threshold"],) * len(models)
    return replace(weigh(settings, models, found), floors=floors)


RAM: Final = Method(
    "ram",
    card=lambda settings: (
        f"averaged where they are at least {settings.options['threshold']:g}, and added to the base"
    ),
    paper=PAPER,
    operation=Operation("average", average, compiled=True),
    settings={"weights": None, "threshold": LEAST_CHANGE},
    share=keep_shares,
    weigh=weigh_changes,
    normalize=True,
    shares_only=True,
    returns_model=lambda _: False,
    mergekit={
        "ram": Family(shared={"epsilon": "threshold"}, defaults={"epsilon": LEAST_CHANGE}),
    },
)
