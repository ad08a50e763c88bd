"""ram: the average, at each position, over the models that change it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.methods.looks import Found
from darelib.methods.mergekit import Family
from darelib.methods.method import Coefficients, Method, keep_shares, weigh
from darelib.methods.settings import TensorSettings

LEAST_CHANGE: Final = 1e-5  # a smaller |delta| counts as none
PAPER: Final = "[Reinforced Agent Merging](https://arxiv.org/abs/2601.13572)"


def weigh_changes(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    floors = (settings.options["threshold"],) * len(models)
    return replace(weigh(settings, models, found), floors=floors)


RAM: Final = Method(
    "ram",
    card=lambda settings: (
        f"averaged where they are at least {settings.options['threshold']:g}, and added to the base"
    ),
    paper=PAPER,
    kernel="average",
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
