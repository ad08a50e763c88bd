"""What the changes of whole matrices show, by a sample: how much of them a low rank would keep, and
whether those of two models lie in the same space.

A change's rows lie where the inputs of its task lie. Where those of two models have little in
common, a merge by whole matrices can keep both.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic.matrix_engine import MORE_COLUMNS, SEED, orthonormalise, reduce_product
from darelib.core.arrays import Matrices, find_matrices
from darelib.core.interrupts import Interrupts
from darelib.models.tensor import Tensor
from darelib.plan.plan import MergePlan

Array = NDArray[Any]
LARGEST: Final = 1e30  # of what can be multiplied
SAMPLED_ROWS: Final = 64  # of a matrix; half of them are compared with the other half
LEAST_ROWS: Final = 8
RANKS: Final = (8, 16, 32, 64, 128, 256)
SAMPLED: Final = 2  # matrices of a model: each takes a tenth of the rest of an analysis's time
# Multiples of this share of a list are spread over it, whatever repeats there.
GOLDEN: Final = 0.6180339887
LEAST_SIDE: Final = 64  # an adapter of a smaller matrix would save next to nothing
READ_ENTRIES: Final = 1 << 20


class ModelChange(NamedTuple):
    """What one model changes in a matrix; of stacked ones, in the first."""

    tensor: Tensor
    base: Tensor
    matrices: Matrices

    def read(self, row: int, count: int) -> Array:
        start = row * self.matrices.columns
        size = count * self.matrices.columns
        rows = self.tensor.read(start, size)
        if not self.tensor.is_delta:
            rows = rows - self.base.read(start, size)
        return rows.reshape(count, -1)

    def read_all(self, size: float, interrupts: Interrupts) -> Iterator[Array]:
        """Some rows at a time, divided by a size, so that no square is beyond float32."""
        step = max(1, READ_ENTRIES // self.matrices.columns)
        for row in range(0, self.matrices.rows, step):
            interrupts.check()
            yield self.read(row, min(step, self.matrices.rows - row)) / size

    def sample(self) -> Array:
        """Some rows, from all over the matrix."""
        chosen = np.unique(np.linspace(0, self.matrices.rows - 1, SAMPLED_ROWS).astype(int))
        if factors := self.tensor.read_factors():
            left, right = factors
            return left[chosen] @ right
        rows = read_rows(self.tensor, chosen, self.matrices.columns)
        if self.tensor.is_delta:
            return rows
        return rows - read_rows(self.base, chosen, self.matrices.columns)


def read_rows(tensor: Tensor, chosen: Array, columns: int) -> Array:
    rows = [tensor.read(row * columns, columns) for row in chosen.tolist()]
    return np.stack(rows).astype(np.float64)


def list_changes(task: MergePlan) -> Iterator[tuple[str, dict[int, ModelChange]]]:
    """Of each matrix, its name and what each model changes; of packed ones too little is known."""
    for tensor in task.changed:
        if matrices := find_matrices(tensor.name, tensor.base.shape):
            yield (
                tensor.name,
                {
                    i: ModelChange(info, tensor.base, matrices)
                    for i, info in tensor.finetuned
                    if info.shape == tensor.base.shape and info.share == 1
                },
            )


@np.errstate(all="ignore")  # no trained model has values so large
def measure_spaces(task: MergePlan) -> dict[tuple[int, int], float]:
    """By pair of models that change the same matrices: from 0, nothing in common, to 1."""
    sums: dict[tuple[int, int], float] = {}
    weights: dict[tuple[int, int], float] = {}
    for _, changes in list_changes(task):
        if len(changes) < 2 or next(iter(changes.values())).matrices.rows < LEAST_ROWS:
            continue
        rows = {i: change.sample() for i, change in changes.items()}
        for pair in combinations(rows, 2):
            one, other = (rows[i] for i in pair)
            weight = float(np.linalg.norm(one) * np.linalg.norm(other))
            if 0 < weight < LARGEST:
                sums[pair] = sums.get(pair, 0.0) + weight * compare_spaces(one, other)
                weights[pair] = weights.get(pair, 0.0) + weight
    return {pair: sums[pair] / weight for pair, weight in weights.items()}


def compare_spaces(one: Array, other: Array) -> float:
    """How large the products of the rows of two changes are, beside those of each one's own rows
    with one another.
    """
    own = [float(np.linalg.norm(rows[0::2] @ rows[1::2].T)) for rows in (one, other)]
    crossed = [one[0::2] @ other[1::2].T, one[1::2] @ other[0::2].T]
    both = sum(float(np.linalg.norm(product)) for product in crossed) / 2
    return min(1.0, both / math.sqrt(own[0] * own[1])) if min(own) > 0 else 0.0


def measure_energy(
    task: MergePlan,
    squares: Sequence[Mapping[str, float]],
    interrupts: Interrupts,
) -> list[dict[str, float]]:
    """By model and rank, the share that is kept, to a percent; nothing where no matrix is known.

    squares: of each model's changes, by tensor.
    """
    found: list[list[tuple[float, ModelChange]]] = [[] for _ in task.models]
    for name, changes in list_changes(task):
        for i, change in changes.items():
            sides = change.matrices.sides
            is_wide = len(sides) == 2 and min(sides) >= LEAST_SIDE  # and no vocabulary
            if is_wide and 1 / LARGEST < squares[i][name] < LARGEST:
                found[i].append((squares[i][name], change))
    return [keep_by_rank(changes, interrupts) for changes in found]


def keep_by_rank(
    changes: Sequence[tuple[float, ModelChange]], interrupts: Interrupts
) -> dict[str, float]:
    """changes: of one model, each with its sum of squares."""
    kept = np.zeros(len(RANKS))
    total = 0.0
    for place, weight in choose([square for square, _ in changes]).items():
        leading = np.cumsum(find_leading(*changes[place], interrupts))
        if len(leading):
            last = np.minimum(RANKS, len(leading)) - 1
            kept += weight * np.minimum(leading[last], 1.0)
            total += weight
    if not total:
        return {}
    return dict(zip(map(str, RANKS), np.round(kept / total, 2).tolist(), strict=True))


def choose(squares: Sequence[float]) -> Mapping[int, float]:
    """Which matrices are looked at, and what each counts: all, by their squares, or some that are
    spread over the sum of all squares, which are then as likely as they are large.
    """
    if len(squares) <= SAMPLED:
        return dict(enumerate(squares))
    ends = np.cumsum(squares)
    points = [(k + 0.5) * GOLDEN % 1 * ends[-1] for k in range(SAMPLED)]
    return Counter(np.searchsorted(ends, points).tolist())


def find_leading(square: float, change: ModelChange, interrupts: Interrupts) -> Array:
    """The leading squared singular values, as shares of the sum of all; none: it is 0.

    A random sketch is multiplied by the matrix and its transpose once: what is found for ranks up
    to 64 is then at most two percent of the squares too low, and for 256 seven. (Of a change that
    is noise, by a quarter.) Twice would halve that, and take half as long again.
    """
    if factors := change.tensor.read_factors():
        product = reduce_product(*factors, RANKS[-1])
        return (product.left**2).sum(0) ** 2 / product.total
    size = math.sqrt(square)
    shape = (change.matrices.columns, RANKS[-1] + MORE_COLUMNS)
    drawn = np.random.default_rng(SEED).standard_normal(shape, np.float32)
    products = (rows.T @ (rows @ drawn) for rows in change.read_all(size, interrupts))
    sketch = sum(products, np.zeros_like(drawn))
    if not sketch.any():
        return np.zeros(0)
    basis = orthonormalise(orthonormalise(sketch))  # again: to what is large, rounding is not
    total = 0.0
    gram = np.zeros(basis.shape[1:] * 2)
    for rows in change.read_all(size, interrupts):
        total += float(np.vdot(rows, rows))
        kept = rows @ basis
        gram += kept.T @ kept
    return np.linalg.eigvalsh(gram)[::-1] / total
