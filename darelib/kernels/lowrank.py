"""A matrix as the product of two thin ones: the best of a rank, or nearly so, and what it keeps.

By the libraries of this machine, as whole matrices are merged: NumPy's BLAS, or torch on a GPU.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from darelib.core.arrays import LEAST_SHARE, find_span, library

Array = Any  # of NumPy or torch, of two dimensions
# A random sketch has so many columns more than are wanted, and is multiplied by the matrix and its
# transpose so often (Halko, Martinsson, Tropp, 2011): what is kept is then within two percent of
# the squares of the best, even of noise.
MORE_COLUMNS: Final = 16
POWER_STEPS: Final = 3
SEED: Final = 2311_03099
# From this share of the shorter side on, all of it is computed, and the product is the best.
EXACT_SHARE: Final = 0.25


class Product(NamedTuple):
    """left @ right, and the sums of squares of its entries and of those of what it stands for."""

    left: Array  # rows x rank
    right: Array  # rank x columns
    kept: float
    total: float


def find_rank(squares: Sequence[float], total: float, share: float) -> int:
    """How many of the squared singular values, the largest first, add up to a share of all."""
    return int(np.searchsorted(np.cumsum(squares), share * total * (1 - 1e-12))) + 1


def measure_squares(matrix: Array) -> Array:
    """The squared singular values of a matrix, the largest first."""
    lib = library(matrix)
    wide = lib.asarray(matrix, dtype=lib.float64)
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    squares = as_numpy(lib.linalg.eigvalsh(wide @ wide.T))[::-1]
    return np.maximum(squares, 0.0)


def is_exact(matrix: Any, rank: int) -> bool:
    """Whether a product is the best of its rank. matrix: what has its shape."""
    rows = matrix.shape[0]
    shorter = min(rows, math.prod(matrix.shape) // rows)
    return rank + MORE_COLUMNS >= EXACT_SHARE * shorter


def approximate(matrix: Array, rank: int) -> Product:
    """The best product of a rank, nearly; of a large one, exactly."""
    lib = library(matrix)
    flat = matrix.reshape(-1)
    total = float(flat @ flat)
    if not total:
        return Product(np.zeros((len(matrix), 0)), np.zeros((0, matrix.shape[1])), 0.0, 0.0)
    if is_exact(matrix, rank):
        if matrix.shape[0] > matrix.shape[1]:
            turned = cut(None, matrix.T, rank)
            return turned._replace(left=turned.right.T, right=turned.left.T)
        return cut(None, matrix, rank)
    drawn = np.random.default_rng(SEED).standard_normal(
        (matrix.shape[1], rank + MORE_COLUMNS), np.float32
    )
    sketch = lib.asarray(drawn, dtype=matrix.dtype)
    sketch = sketch if lib is np else sketch.to(matrix.device)
    basis = orthonormalise(matrix @ sketch)
    for _ in range(POWER_STEPS):
        basis = orthonormalise(matrix @ orthonormalise(matrix.T @ basis))
    return cut(basis, basis.T @ matrix, rank, total)


def reduce_product(left: Array, right: Array, rank: int) -> Product:
    """The best product of a rank for one of a higher rank, of which no whole matrix is made."""
    left_space, [left_part] = find_span([left])
    right_space, [right_part] = find_span([right.T])
    small = left_part @ right_part.T @ right_space.T
    return cut(left_space, small, rank, float(np.vdot(small, small)))


def cut(basis: Array | None, small: Array, rank: int, total: float | None = None) -> Product:
    """The product basis @ small, cut off at a rank, with both factors of the same size.

    basis: orthonormal columns; None: small itself is the product. total: of what small is only a
    part of.
    """
    lib = library(small)
    wide = lib.asarray(small, dtype=lib.float64)
    found, vectors = lib.linalg.eigh(wide @ wide.T)
    values = as_numpy(found)
    total = float(np.maximum(values, 0.0).sum()) if total is None else total
    count = min(rank, int(np.count_nonzero(values > LEAST_SHARE * max(values, default=0.0))))
    kept = np.ascontiguousarray(values[len(values) - count :][::-1])
    chosen = lib.asarray(vectors[:, len(values) - count :], dtype=small.dtype)
    chosen = chosen[:, ::-1] if lib is np else chosen.flip(1)
    roots = lib.asarray(kept**0.25, dtype=small.dtype)
    roots = roots if lib is np else roots.to(small.device)
    left = chosen * roots
    right = (chosen / roots).T @ small
    left = as_numpy(left if basis is None else basis @ left)
    signs = np.sign(left[np.abs(left).argmax(axis=0), range(count)])  # libraries give either
    right = as_numpy(right) * signs[:, None]
    return Product(left * signs, right, min(float(kept.sum()), total), total)


def orthonormalise(columns: Array) -> Array:
    """Orthonormal columns that span the same, by the eigenvectors of their products."""
    lib = library(columns)
    wide = lib.asarray(columns, dtype=lib.float64)
    values, vectors = lib.linalg.eigh(wide.T @ wide)
    is_kept = values > LEAST_SHARE * values[-1]
    return columns @ lib.asarray(vectors[:, is_kept] / values[is_kept] ** 0.5, dtype=columns.dtype)


def as_numpy(array: Array) -> Array:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()
