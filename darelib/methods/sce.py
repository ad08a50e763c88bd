"""sce: where the models differ most, those that agree with the sum's sign, by their squares."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from darelib.core.drops import End
from darelib.methods.looks import BoundsLook, ChunkLook, Found
from darelib.methods.mergekit import Family, Settings
from darelib.methods.method import Coefficients, Method, weigh_for_look
from darelib.methods.settings import TensorSettings

LEAST_SHARE: Final = 1e-6  # what weights are divided by is not smaller


class VarianceLook(BoundsLook):
    """The smallest variance over the models that is among the largest."""

    kernel = "variance"

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        """All models have one variance together, which is noted with the first."""
        chosen = int(self.settings.options["keep_ratio"] * survivors)
        return (chosen,) if chosen and model == self.models[0] else ()

    def record(self, found: Sequence[Sequence[End]]) -> None:
        self.found.bound = found[0][0].size if found[0] else math.inf


class SquaresLook(ChunkLook):
    """The models' shares, by the squares of what is chosen of them."""

    kernel = "squares"

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        self._chunks[start] = tuple(buffers.models["squares"][: len(self.models)].tolist())

    def describe(self, buffers: Any, number: int) -> None:
        buffers.tensor["bound"] = self.found.bound

    def record(self, sums: Sequence[float]) -> None:
        means = [square / self.count for square in sums]
        total = math.fsum(means)
        if total < LEAST_SHARE:
            self.found.shares = (1 / len(means),) * len(means)
        else:
            self.found.shares = tuple(mean / total for mean in means)


def weigh_squares(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh_for_look(settings, models, found), weights=found.shares)


def finish_selection(made: Settings) -> Settings:
    """Where nothing is selected, the base stays as it is."""
    selects = made["keep_ratio"] != 0
    return made | {"keep_ratio": made["keep_ratio"] or 1.0, "lambda_coeff": float(selects)}


SCE: Final = Method(
    "sce",
    card=lambda settings: (
        "averaged, by their squares, over the models that agree on a sign, where they differ most "
        f"(a share of {settings.options['keep_ratio']:g}), and added to the base"
    ),
    paper="[SCE](https://arxiv.org/abs/2408.07990)",
    kernel="select",
    settings={"keep_ratio": 1.0},
    looks=lambda settings: (
        (VarianceLook, SquaresLook) if settings.options["keep_ratio"] < 1 else (SquaresLook,)
    ),
    weigh=weigh_squares,
    returns_model=lambda settings: settings.options["keep_ratio"] == 1,
    mergekit={
        "sce": Family(
            shared={"select_topk": "keep_ratio"},
            defaults={"select_topk": 1.0},
            finish=finish_selection,
        ),
    },
)
