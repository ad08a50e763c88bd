"""Matrices as a whole, by the libraries of this machine: NumPy's BLAS, or torch on a GPU. They are
merged here, or become products of two thin ones: the best of a rank, or nearly so.
"""

import math
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from darelib.core.arrays import LEAST_SHARE, Array, Factors, find_span, library
from darelib.core.pieces import Crew, employ, multiply
from darelib.core.text import LOG
from darelib.core.tuning import TUNING
from darelib.methods import METHODS
from darelib.methods.looks import TensorSettings
from darelib.methods.method import WholeMerge


def find_whole(settings: TensorSettings) -> WholeMerge:
    whole = METHODS[settings.method].whole
    assert whole
    return whole


def merge_matrices(
    deltas: Sequence[Array], weights: Sequence[float], settings: TensorSettings, precise: bool
) -> Array:
    """The merged change of one matrix, in the deltas' type. These are overwritten.

    weights: of the deltas; what is left to 1 is that of models without a change. precise: computed
    in float64.
    """
    precise |= multiplies_roughly(library(deltas[0]))
    return find_whole(settings).merge(deltas, weights, settings.options, precise)


def multiplies_roughly(lib: Any) -> bool:
    """Whether a program has told torch to round the factors of float32's products (TF32)."""
    if lib is np:
        return False
    try:
        return bool(lib.get_float32_matmul_precision() != "highest")
    except RuntimeError:  # it was set for some devices, by torch's newer names
        return True


def merge_factors(
    factors: Sequence[Factors], weights: Sequence[float], settings: TensorSettings
) -> Array:
    """The same of changes that are products of two factors, as adapters have them."""
    left, right = merge_spaces(factors, weights, settings)
    return multiply(left.astype(np.float32), right.astype(np.float32))


def merge_spaces(
    factors: Sequence[Factors], weights: Sequence[float], settings: TensorSettings
) -> Factors:
    """The merged change as such a product itself."""
    return find_whole(settings).merge_products(factors, weights, settings.options)


MEASURED_SIDE: Final = 1024  # of the product that tells how fast this machine multiplies
# What a system has where it has a GPU: only then is torch loaded, which takes seconds.
GPU_DEVICES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


@cache
def load_gpu() -> Any:
    """torch, if it is there and finds a GPU."""
    if not shutil.which("nvidia-smi") and not any(path.exists() for path in GPU_DEVICES):
        return None
    try:
        import torch
    except ImportError:
        LOG.warning("the GPU is not used for matrices: torch is not installed")
        return None
    return torch if torch.cuda.is_available() else None


class MatrixEngine:
    """Where matrices in NumPy's arrays are merged: on a GPU or, without one, by NumPy."""

    device = "cuda"

    def __init__(self, engine: str) -> None:
        self._torch: Any = load_gpu() if engine == "auto" else None
        self.on_gpu = self._torch is not None
        self.no_memory: Any = self._torch.OutOfMemoryError if self._torch else MemoryError

    def move(self, matrix: Array) -> Array:
        """A matrix to where it is computed with; here, if it has no room there."""
        if self._torch:
            with suppress(self.no_memory):
                return self._torch.as_tensor(matrix, device=self.device)
        return matrix

    def merge(
        self,
        deltas: Sequence[Array],
        weights: Sequence[float],
        settings: TensorSettings,
        precise: bool,
    ) -> Array:
        """As merge_matrices, into NumPy's memory. Deltas may be on the GPU already."""
        if not self._torch:
            return merge_matrices(deltas, weights, settings, precise)
        try:
            moved = [self._torch.as_tensor(delta, device=self.device) for delta in deltas]
            merged = merge_matrices(moved, weights, settings, precise)
        except self.no_memory:
            LOG.warning("the GPU has too little memory for a matrix, so NumPy merges it")
            here = [self._torch.as_tensor(delta).cpu().numpy() for delta in deltas]
            return merge_matrices(here, weights, settings, precise)
        # Memory that does not move is written to at the full speed of the bus.
        pinned = self.device == "cuda"
        made = self._torch.empty(merged.shape, dtype=merged.dtype, pin_memory=pinned)
        return made.copy_(merged).numpy()

    def measure_rate(self, threads: int) -> float:
        """Floating-point operations in a second, of products of matrices by so many threads."""
        factor: Array = np.ones((MEASURED_SIDE, MEASURED_SIDE), np.float32)
        if self._torch:
            factor = self._torch.from_numpy(factor).to(self.device)
        with (
            threadpool_limits(1, "blas"),
            ThreadPoolExecutor(threads) as pool,
            employ(Crew(pool)),
        ):
            multiply(factor, factor)[0, 0].item()  # the first starts threads, or a GPU
            started = time.perf_counter()
            seconds = 0.0
            products = 0
            while seconds < TUNING.sample_seconds:  # beside other work, a short one is lucky
                multiply(factor, factor)[0, 0].item()
                products += 1
                seconds = time.perf_counter() - started
        return products * 2.0 * MEASURED_SIDE**3 / seconds


# --- products of thin matrices --------------------------------------------------------------------

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
