"""sce: where the models differ most, those that agree with the sum's sign, by their squares."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.core.arrays import Array, add_up, library
from darelib.core.drops import End
from darelib.methods.looks import (
    Coefficients,
    Found,
    Piece,
    ScoreLook,
    SumLook,
    TensorSettings,
    weigh_for_look,
)
from darelib.methods.method import Family, Method, Operation, Translated, add_rows

LEAST_SHARE: Final = 1e-6  # what weights are divided by is not smaller


def find_variance(rows: Sequence[Array]) -> Array:
    """The variance of each entry over the models, times their number; 0 where all are equal."""
    first, *others = rows
    mean = library(first).zeros_like(first)
    for row in others:
        mean = mean + (row - first)
    mean = mean * (1 / len(rows))  # one over an array is no division on all of torch's devices
    variance = mean * mean
    for row in others:
        gap = (row - first) - mean
        variance = variance + gap * gap
    return variance


class VarianceLook(ScoreLook):
    """The smallest variance over the models that is among the largest."""

    def score(self, piece: Piece) -> Array:
        variance = find_variance(piece.rows)
        return variance[variance > 0]

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        """All models have one variance together, which is noted with the first."""
        chosen = int(self.settings.options["keep_ratio"] * survivors)
        return (chosen,) if chosen and model == self.models[0] else ()

    def record(self, found: Sequence[Sequence[End]]) -> None:
        self.found.extra["bound"] = found[0][0].size if found[0] else math.inf


class SquaresLook(SumLook):
    """The models' shares, by the squares of what is chosen of them."""

    def measure(self, piece: Piece) -> tuple[float, ...]:
        lib = library(piece.base)
        is_chosen = find_variance(piece.rows) >= self.found.extra.get("bound", 0.0)
        chosen = [lib.where(is_chosen, row, 0.0) for row in piece.rows]
        wide = [lib.asarray(row, dtype=lib.float64) for row in chosen]
        return tuple(add_up(row * row) for row in wide)

    def record(self, sums: Sequence[float]) -> None:
        means = [square / self.count for square in sums]
        total = math.fsum(means)
        equal = (1 / len(means),) * len(means)
        shares = tuple(mean / total for mean in means) if total >= LEAST_SHARE else equal
        self.found.extra["shares"] = shares


def select(piece: Piece, own: Coefficients) -> Array:
    merged = add_rows(piece, own)
    lib = library(merged)
    total = lib.zeros_like(merged)
    share = lib.zeros_like(merged)
    for row, weight in zip(piece.rows, own.weights, strict=True):
        agrees = lib.where(merged >= 0, row > 0, row < 0)
        total = lib.where(agrees, total + weight * row, total)
        share = lib.where(agrees, share + weight, share)
    is_chosen = find_variance(piece.rows or [merged]) >= own.extra.get("bound", 0.0)
    return lib.where(is_chosen, total / share.clip(LEAST_SHARE), 0.0)


def weigh_squares(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh_for_look(settings, models, found), weights=found.extra.get("shares", ()))


def finish_selection(made: Translated) -> Translated:
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
    operation=Operation("sce", select),
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
