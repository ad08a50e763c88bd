"""How much of a model's change a low rank would keep: by the sum of squares, of a few matrices."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from darelib.commands.analyze.spaces import LARGEST
from darelib.core.interrupts import Interrupts
from darelib.core.matrices import Matrices, find_matrices
from darelib.kernels.lowrank import MORE_COLUMNS, SEED, orthonormalise, reduce_product
from darelib.models.tensors import Input, TensorInfo
from darelib.plan.plan import MergePlan

Array = NDArray[Any]
RANKS: Final = (8, 16, 32, 64, 128, 256)
SAMPLED: Final = 2  # matrices of a model: each takes a tenth of the rest of an analysis's time
# Multiples of this share of a list are spread over it, whatever repeats there.
GOLDEN: Final = 0.6180339887
LEAST_SIDE: Final = 64  # an adapter of a smaller matrix would save next to nothing
READ_ENTRIES: Final = 1 << 20


class Change(NamedTuple):
    """What one model changes in a matrix; of stacked ones, in the first."""

    model: Input
    info: TensorInfo
    base: Input
    base_info: TensorInfo
    matrices: Matrices
    square: float  # the sum of all squares

    def read(self, interrupts: Interrupts) -> Iterator[Array]:
        """The change, some rows at a time, divided by its size."""
        size = self.matrices.size
        step = max(1, READ_ENTRIES // self.matrices.columns) * self.matrices.columns
        for start in range(0, size, step):
            interrupts.check()
            count = min(step, size - start)
            rows = self.model.sample("", self.info, start, count)
            rows = rows - self.base.sample("", self.base_info, start, count)
            yield rows.reshape(-1, self.matrices.columns) / self.square**0.5


def measure_energy(
    task: MergePlan,
    inputs: Sequence[Input],
    squares: Sequence[Mapping[str, float]],
    interrupts: Interrupts,
) -> list[dict[str, float]]:
    """By model and rank, the share that is kept, to a percent; nothing where no matrix is known.

    squares: of each model's changes, by tensor.
    """
    energy = []
    for changes in list_changes(task, inputs, squares):
        kept = np.zeros(len(RANKS))
        total = 0.0
        for place, weight in choose([change.square for change in changes]).items():
            leading = np.cumsum(find_leading(changes[place], interrupts))
            if len(leading):
                last = np.minimum(RANKS, len(leading)) - 1
                kept += weight * np.minimum(leading[last], 1.0)
                total += weight
        shares = np.round(kept / (total or 1.0), 2).tolist()
        energy.append(dict(zip(map(str, RANKS), shares, strict=True)) if total else {})
    return energy


def list_changes(
    task: MergePlan, inputs: Sequence[Input], squares: Sequence[Mapping[str, float]]
) -> list[list[Change]]:
    """The matrices that each model changes, if all of it is known, and no side is a vocabulary."""
    base, *models = inputs
    changes: list[list[Change]] = [[] for _ in models]
    for tensor in task.changed:
        matrices = find_matrices(tensor.name, tensor.base.shape)
        if not matrices or len(matrices.sides) < 2 or min(matrices.sides) < LEAST_SIDE:
            continue
        for i, info in tensor.finetuned:
            square = squares[i][tensor.name]
            is_whole = info.shape == tensor.base.shape and info.share == 1
            if is_whole and 1 / LARGEST < square < LARGEST:
                changes[i].append(Change(models[i], info, base, tensor.base, matrices, square))
    return changes


def choose(squares: Sequence[float]) -> Mapping[int, float]:
    """Which matrices are looked at, and what each counts: all, by their squares, or some that are
    spread over the sum of all squares, which are then as likely as they are large.
    """
    if len(squares) <= SAMPLED:
        return dict(enumerate(squares))
    ends = np.cumsum(squares)
    points = [(k + 0.5) * GOLDEN % 1 * ends[-1] for k in range(SAMPLED)]
    return Counter(np.searchsorted(ends, points).tolist())


def find_leading(change: Change, interrupts: Interrupts) -> Array:
    """The leading squared singular values, as shares of the sum of all; none: it is 0.

    A random sketch is multiplied by the matrix and its transpose once: what is found for ranks up
    to 64 is then at most two percent of the squares too low, and for 256 seven. (Of a change that
    is noise, by a quarter.) Twice would halve that, and take half as long again.
    """
    if factors := change.model.read_factors(change.info):
        product = reduce_product(*factors, RANKS[-1])
        return (product.left**2).sum(0) ** 2 / product.total
    shape = (change.matrices.columns, RANKS[-1] + MORE_COLUMNS)
    drawn = np.random.default_rng(SEED).standard_normal(shape, np.float32)
    products = (rows.T @ (rows @ drawn) for rows in change.read(interrupts))
    sketch = sum(products, np.zeros_like(drawn))
    if not sketch.any():
        return np.zeros(0)
    basis = orthonormalise(orthonormalise(sketch))  # again: to what is large, rounding is not
    total = 0.0
    gram = np.zeros(basis.shape[1:] * 2)
    for rows in change.read(interrupts):
        total += float(np.vdot(rows, rows))
        kept = rows @ basis
        gram += kept.T @ kept
    return np.linalg.eigvalsh(gram)[::-1] / total
