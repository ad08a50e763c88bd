"""Whether the changes of two models lie in the same space: matrix by matrix, by a sample of rows.

A change's rows lie where the inputs of its task lie. Where those of two models have little in
common, a merge by whole matrices can keep both.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS, widen
from darelib.core.matrices import Matrices, find_matrices
from darelib.models.tensors import Input, TensorInfo
from darelib.plan.plan import MergePlan
from darelib.plan.tensors import TensorPlan

Rows = NDArray[np.float64]
SAMPLED_ROWS: Final = 64  # of a matrix; half of them are compared with the other half
LEAST_ROWS: Final = 8
LARGEST: Final = 1e30  # of what can be multiplied


@np.errstate(all="ignore")  # no trained model has values so large
def measure_spaces(task: MergePlan, inputs: Sequence[Input]) -> dict[tuple[int, int], float]:
    """By pair of models that change the same matrices: from 0, nothing in common, to 1."""
    sums: dict[tuple[int, int], float] = {}
    weights: dict[tuple[int, int], float] = {}
    for tensor in task.changed:
        matrices = find_matrices(tensor.name, tensor.base.shape)
        if matrices is None or matrices.rows < LEAST_ROWS or len(tensor.finetuned) < 2:
            continue
        rows = read_changes(tensor, matrices, inputs)
        for pair in combinations(rows, 2):
            one, other = (rows[i] for i in pair)
            weight = float(np.linalg.norm(one) * np.linalg.norm(other))
            if not 0 < weight < LARGEST:
                continue
            sums[pair] = sums.get(pair, 0.0) + weight * compare_spaces(one, other)
            weights[pair] = weights.get(pair, 0.0) + weight
    return {pair: sums[pair] / weight for pair, weight in weights.items()}


def read_changes(
    tensor: TensorPlan, matrices: Matrices, inputs: Sequence[Input]
) -> dict[int, Rows]:
    """Some rows of a matrix's changes, by model. Of stacked matrices, the first stands for all; of
    packed models too little is known.
    """
    base, *models = inputs
    chosen = np.unique(np.linspace(0, matrices.rows - 1, SAMPLED_ROWS).astype(int))
    mine = read_rows(base, tensor.base, chosen, matrices.columns)
    changes = {}
    for i, info in tensor.finetuned:
        if info.shape != tensor.base.shape or info.share < 1:
            continue
        if factors := models[i].read_factors(info):
            left, right = factors
            changes[i] = left[chosen] @ right
        elif not info.is_delta:
            changes[i] = read_rows(models[i], info, chosen, matrices.columns) - mine
    return changes


def read_rows(model: Input, info: TensorInfo, chosen: NDArray[Any], columns: int) -> Rows:
    raw = np.empty((len(chosen), columns * FORMATS[info.dtype].itemsize), np.uint8)
    for row, part in zip(chosen.tolist(), raw, strict=True):
        model.read(info, row * columns, columns, part)
    return widen(raw.reshape(-1), info.dtype).reshape(-1, columns).astype(np.float64)


def compare_spaces(one: Rows, other: Rows) -> float:
    """How large the products of the rows of two changes are, beside those of each one's own rows
    with one another.
    """
    own = [float(np.linalg.norm(rows[0::2] @ rows[1::2].T)) for rows in (one, other)]
    crossed = [one[0::2] @ other[1::2].T, one[1::2] @ other[0::2].T]
    both = sum(float(np.linalg.norm(product)) for product in crossed) / 2
    return min(1.0, both / math.sqrt(own[0] * own[1])) if min(own) > 0 else 0.0
