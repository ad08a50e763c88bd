"""ramplus: ram, and what only one model changes is boosted."""

from collections.abc import Sequence
from typing import Any, Final

from darelib.methods.looks import ChunkLook
from darelib.methods.mergekit import Family
from darelib.methods.method import Method, keep_shares
from darelib.methods.ram import LEAST_CHANGE, PAPER, weigh_changes
from darelib.methods.settings import TensorSettings


class OverlapLook(ChunkLook):
    """How many entries each model changes alone, and how many with others."""

    kernel = "overlap"

    def describe(self, buffers: Any, number: int) -> None:
        buffers.models["floor"][: len(self.models)] = self.settings.options["threshold"]

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        records = buffers.models[: len(self.models)]
        self._chunks[start] = (*records["alone"].tolist(), *records["shared"].tolist())

    def record(self, sums: Sequence[float]) -> None:
        own = self.settings.options
        pairs = zip(sums[: len(self.models)], sums[len(self.models) :], strict=True)
        least = own["threshold"]
        ratios = [shared / max(alone, least) if alone else 0.0 for alone, shared in pairs]
        most = own["boost_limit"]
        self.found.boosts = tuple(1 + own["boost"] * min(ratio, most) for ratio in ratios)


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
    kernel="boost",
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
