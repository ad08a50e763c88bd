"""ram: the average, at each position, over the models that change it; ramplus: what only one model
changes is boosted as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.core.arrays import Array, divide, library
from darelib.methods.looks import Coefficients, Found, Piece, SumLook, TensorSettings, weigh
from darelib.methods.method import Family, Method, Operation, keep_shares

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


def count_changes(rows: Sequence[Array]) -> Array:
    """How many models change each entry."""
    return sum(1 * (row != 0) for row in rows)


class OverlapLook(SumLook):
    """How many entries each model changes alone, and how many with others."""

    def weigh(self) -> Coefficients:
        floors = (self.settings.options["threshold"],) * len(self.models)
        return replace(super().weigh(), floors=floors)

    def measure(self, piece: Piece) -> tuple[float, ...]:
        changes = count_changes(piece.rows)
        alone = [(row != 0) & (changes == 1) for row in piece.rows]
        shared = [(row != 0) & (changes > 1) for row in piece.rows]
        return tuple(float(each.sum()) for each in (*alone, *shared))

    def record(self, sums: Sequence[float]) -> None:
        own = self.settings.options
        pairs = zip(sums[: len(self.models)], sums[len(self.models) :], strict=True)
        least = own["threshold"]
        ratios = [shared / max(alone, least) if alone else 0.0 for alone, shared in pairs]
        most = own["boost_limit"]
        boosts = tuple(1 + own["boost"] * min(ratio, most) for ratio in ratios)
        self.found.extra["boosts"] = boosts


def boost_alone(piece: Piece, own: Coefficients) -> Array:
    if not piece.rows:
        return 0 * piece.base
    lib = library(piece.base)
    changes = count_changes(piece.rows)
    factor = lib.ones_like(piece.base)
    for row, boost in zip(piece.rows, own.extra["boosts"], strict=True):
        factor = lib.where((row != 0) & (changes == 1), boost * factor, factor)
    return average(piece, own) * factor


def describe(settings: TensorSettings) -> str:
    own = settings.options
    return (
        f"averaged where they are at least {own['threshold']:g}, what only one model changes up to "
        f"{1 + own['boost'] * own['boost_limit']:g}-fold, and added to the base"
    )


RAMPLUS: Final = Method(
    "ramplus",
    card=describe,
    paper=PAPER,
    operation=Operation("ramplus", boost_alone),
    settings={"weights": None, "threshold": LEAST_CHANGE, "boost": 0.1, "boost_limit": 0.2},
    share=keep_shares,
    looks=lambda _: (OverlapLook,),
    weigh=weigh_changes,
    normalize=True,
    shares_only=True,
    returns_model=lambda _: False,
    mergekit={
        "ramplus_tl": Family(
            shared={"r": "boost", "alpha": "boost_limit", "epsilon": "threshold"},
            defaults={"r": 0.1, "alpha": 0.2, "epsilon": LEAST_CHANGE},
        ),
    },
)
