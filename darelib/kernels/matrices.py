"""Merges of whole matrices, by the libraries of this machine: NumPy's BLAS, or torch on a GPU.

A change of a linear layer is a sum of outer products, error signals times inputs: its rows lie
where its task's inputs lie, its columns where its error signals lie. The merge keeps what each
change does there. With t_i the changes, w_i their weights (which add up to 1), from the columns'
side:

    G_i = t_i' t_i;   G_i <- G_i / mean(diag G_i) + ridge * I
    M   = (sum of w_i t_i G_i) (sum of w_i G_i)^-1

and the mean of that and of the same from the rows' side. It solves the objective of WUDI-Merging
exactly (Cheng et al., ICML 2025, arXiv:2503.08099); the ridge, in both factors, makes the weighted
average the limit of a large one. Then M is resized, so that lambda 1 is a good choice: so that on
average it holds each change in full, the mean of <M, t_i> / |t_i|^2 being 1, but to no more than
norm_limit times the mean |t_i|. plain.merge_matrices is this definition.

Here, u_i is t_i times a power of two, and what both sides need is computed once:
t_i t_i' t_i is the one product of three in either.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from darelib.core.formats import DTYPES
from darelib.core.matrices import LONGEST_SIDE
from darelib.core.settings import TensorSettings
from darelib.core.text import LOG
from darelib.kernels.arrays import library

Array = Any  # of NumPy or torch, of two dimensions
Factors: TypeAlias = tuple[Array, Array]
# In float32, what lies where no change is comes out too large, by about this times the unit
# roundoff, times the mean eigenvalue (by size) of the Gram matrix, divided by the ridge: measured.
ERROR_FACTOR: Final = 4 * 2.0**-24
BLOCK_SIDE: Final = 128  # of the blocks that are inverted by themselves
PRODUCT_SIDE: Final = 512  # of the largest in which rows are multiplied by each other
# Of the largest eigenvalue, as float64 gives it: below that, it is rounding.
LEAST_SHARE: Final = 1e-13
LARGEST_ERROR: Final = 5e-5  # relative, by norm; where more is expected, float64 is used


@dataclass(frozen=True)
class Change:
    """One model's change of a matrix."""

    unit: Array  # the change, times a power of two that makes its largest entry about 1
    scale: float  # by which the unit is multiplied to give the change
    square: float  # the sum of the unit's squared entries
    weight: float


class TooRough(Exception):
    """float32 would be off by too much."""


def merge_matrices(
    deltas: Sequence[Array], weights: Sequence[float], settings: TensorSettings, precise: bool
) -> Array:
    """The merged change of one matrix, in the deltas' type. These are overwritten.

    weights: of the deltas; what is left to 1 is that of models without a change. precise: computed
    in float64.
    """
    lib = library(deltas[0])
    changes = [change for change in map(measure, deltas, weights) if change.square]
    if not changes:
        return lib.zeros_like(deltas[0])
    shape = deltas[0].shape
    is_wide = precise or deltas[0].dtype == lib.float64 or multiplies_roughly(lib)
    if not is_wide:
        try:
            return solve(changes, shape, settings, LARGEST_ERROR)
        except TooRough:
            pass
    wide = [replace(each, unit=lib.asarray(each.unit, dtype=lib.float64)) for each in changes]
    return lib.asarray(solve(wide, shape, settings, np.inf), dtype=deltas[0].dtype)


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
    return left.astype(np.float32) @ right.astype(np.float32)


def merge_spaces(
    factors: Sequence[Factors], weights: Sequence[float], settings: TensorSettings
) -> Factors:
    """The merged change itself as such a product, in float64.

    All that happens, happens in the space that the factors span together: nothing there is larger
    than the sum of the ranks (Panariello et al., NeurIPS 2025), and the result is the same.
    """
    left_space, lefts = find_span([left for left, _ in factors])
    right_space, rights = find_span([right.T for _, right in factors])
    cores = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
    changes = [change for change in map(measure, cores, weights) if change.square]
    shape = (len(left_space), len(right_space))
    if not changes:
        return np.zeros((shape[0], 0)), np.zeros((0, shape[1]))
    return left_space @ solve(changes, shape, settings, np.inf), right_space.T


def find_span(parts: Sequence[Array]) -> tuple[Array, list[Array]]:
    """The space of all columns, as orthonormal ones, and each part's columns in it.

    By the eigenvectors of their products, which takes a fifth of a factorisation's time; what is
    below a millionth of a part's size is not seen. A part of nothing but zeros spans nothing.
    """
    sizes = [float(np.linalg.norm(part)) or 1.0 for part in parts]
    columns = np.hstack([part / size for part, size in zip(parts, sizes, strict=True)])
    values, vectors = np.linalg.eigh(columns.T @ columns)
    is_kept = values > LEAST_SHARE * max(values[-1], LEAST_SHARE)
    roots = np.sqrt(values[is_kept])
    vectors = vectors[:, is_kept]
    ends = np.cumsum([part.shape[1] for part in parts])[:-1]
    found = np.split((vectors * roots).T, ends, axis=1)
    return columns @ (vectors / roots), [
        part * size for part, size in zip(found, sizes, strict=True)
    ]


def measure(delta: Array, weight: float) -> Change:
    """A change, scaled in place."""
    peak = max(float(delta.max()), -float(delta.min()))
    exponent = int(np.frexp(peak)[1])
    delta *= 2.0**-exponent
    flat = delta.reshape(-1)
    return Change(delta, 2.0**exponent, float(flat @ flat), weight)


def find_factor(merged: Array, changes: Sequence[Change], norm_limit: float) -> float:
    """What the merged change is multiplied by, to hold each change in full within the limit.

    At most by how many they are: what is left of changes that cancel out is not blown up.
    """
    flat = merged.reshape(-1)
    size = float(flat @ flat) ** 0.5
    if not norm_limit or not size:
        return 1.0
    total = sum(each.weight for each in changes)
    shares = [
        each.weight * float(flat @ each.unit.reshape(-1)) / (each.square * each.scale)
        for each in changes
    ]
    mean = sum(each.weight * each.scale * each.square**0.5 for each in changes) / total
    held = max(sum(shares) / total, 1 / len(changes))
    return min(1 / held, norm_limit * mean / size)


def solve(
    changes: Sequence[Change],
    shape: tuple[int, int],
    settings: TensorSettings,
    largest_error: float,
) -> Array:
    """The merged change: the mean of the solutions from both sides, or the one from the side that
    is not too long, resized.

    shape: of the matrix; that of the units is smaller where they are its cores in another space.
    """
    lib = library(changes[0].unit)
    short = int(shape[0] >= shape[1])  # the axis of the shorter side
    means = lib.zeros_like(changes[0].unit)
    cubes = lib.zeros_like(means)
    gram = make_gram(means, short)
    for each in changes:
        own = make_gram(means, short)
        add_products(own, each.unit, short)
        mirror(own)
        weight = each.weight * each.scale
        means += weight * each.unit
        cubes += weight / each.square * multiply(own, each.unit, short)
        own *= each.weight * shape[short] / each.square
        gram += own
    del own
    merged = shape[short] * cubes
    merged += settings.ridge * means
    solve_side(gram, merged, short, settings.ridge, largest_error)
    long = 1 - short
    if shape[long] <= LONGEST_SIDE:
        gram = make_gram(means, long)
        for each in changes:
            add_products(gram, each.unit, long, each.weight * shape[long] / each.square)
        cubes *= shape[long]
        means *= settings.ridge
        cubes += means
        solve_side(gram, cubes, long, settings.ridge, largest_error)
        merged += cubes
        merged /= 2
    merged *= find_factor(merged, changes, settings.norm_limit)
    return merged


def make_gram(matrix: Array, axis: int) -> Array:
    """Zeros, for the products of all rows (axis 0) or columns of a matrix."""
    side = matrix.shape[axis]
    lib = library(matrix)
    return lib.zeros_like(matrix, shape=(side, side)) if lib is np else matrix.new_zeros(side, side)


def list_blocks(side: int) -> Iterator[tuple[int, int]]:
    """Where blocks of rows start and end: of a small matrix, many, to compute little twice."""
    step = max(BLOCK_SIDE, min(PRODUCT_SIDE, side // 8))
    starts = range(0, side, step)
    return ((start, min(start + step, side)) for start in starts)


def add_products(gram: Array, matrix: Array, axis: int, weight: float = 1.0) -> None:
    """Add the products of all rows (axis 0) or columns: those on and below the diagonal, which are
    half, and some above.
    """
    rows = matrix if axis == 0 else matrix.T
    for start, end in list_blocks(len(rows)):
        own = rows[start:end] if weight == 1 else weight * rows[start:end]
        gram[start:end, :end] += own @ rows[:end].T


def mirror(gram: Array) -> None:
    """Fill in what is above the diagonal."""
    for start, end in list_blocks(len(gram)):
        gram[:start, start:end] = gram[start:end, :start].T


def multiply(factor: Array, matrix: Array, axis: int) -> Array:
    """factor matrix, or of the transposed matrix (axis 1), transposed back."""
    return factor @ matrix if axis == 0 else matrix @ factor.T


def solve_side(gram: Array, right: Array, axis: int, ridge: float, largest_error: float) -> None:
    """Divide by a weighted sum of Gram matrices plus the ridge, in place. gram is overwritten."""
    mirror(gram)
    flat = gram.reshape(-1)
    if ERROR_FACTOR * float(flat @ flat) / len(gram) / ridge > largest_error:
        raise TooRough
    flat[:: len(gram) + 1] += ridge
    lib = library(gram)
    if lib is np:
        inverses = factorise(gram)
        divide(gram, inverses, right, axis)
        divide(gram, inverses, right, axis, backwards=True)
    else:
        rows = right if axis == 0 else right.T
        rows.copy_(lib.cholesky_solve(rows, lib.linalg.cholesky(gram)))


# Cholesky's factor L, and what is solved by it, by NumPy's products of halves: its own way to solve
# takes four times as long.


def factorise(gram: Array) -> list[Array]:
    """L, into what is below gram's diagonal, and the inverses of the blocks on it."""
    side = len(gram)
    if side <= BLOCK_SIDE:
        return [np.linalg.inv(np.linalg.cholesky(gram))]
    half = find_half(side)
    above = factorise(gram[:half, :half])
    below = gram[half:, :half]
    divide(gram[:half, :half], above, below, axis=1)
    add_products(gram[half:, half:], below, axis=0, weight=-1.0)
    return above + factorise(gram[half:, half:])


def divide(
    gram: Array, inverses: Sequence[Array], right: Array, axis: int, backwards: bool = False
) -> None:
    """Solve L X = right, or L' X = right (backwards), in place; axis 1: of right transposed."""
    side = len(gram)
    if side <= BLOCK_SIDE:
        [inverse] = inverses
        right[...] = multiply(inverse.T if backwards else inverse, right, axis)
        return
    half = find_half(side)
    first = right[:half] if axis == 0 else right[:, :half]
    second = right[half:] if axis == 0 else right[:, half:]
    below = gram[half:, :half]
    above = inverses[: half // BLOCK_SIDE]
    others = inverses[half // BLOCK_SIDE :]
    if backwards:
        divide(gram[half:, half:], others, second, axis, backwards)
        first -= multiply(below.T, second, axis)
        divide(gram[:half, :half], above, first, axis, backwards)
    else:
        divide(gram[:half, :half], above, first, axis)
        second -= multiply(below, first, axis)
        divide(gram[half:, half:], others, second, axis)


def find_half(side: int) -> int:
    """About half of a side: whole blocks."""
    return -(-side // (2 * BLOCK_SIDE)) * BLOCK_SIDE


MEASURED_SIDE: Final = 1024  # of the product that tells how fast this machine multiplies
# What a system has where it has a GPU: only then is torch loaded, which takes seconds.
GPU_DEVICES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def load_gpu() -> Any:
    """torch, if it is there and finds a GPU."""
    if not shutil.which("nvidia-smi") and not any(path.exists() for path in GPU_DEVICES):
        return None
    try:
        import torch
    except ImportError:
        LOG.warning("there is a GPU, and torch, which would use it for matrices, is not installed")
        return None
    return torch if torch.cuda.is_available() else None


class MatrixEngine:
    """Where matrices in NumPy's arrays are merged: on a GPU or, without one, by NumPy."""

    device = "cuda"

    def __init__(self, engine: str) -> None:
        self._torch: Any = load_gpu() if engine == "auto" else None
        self.on_gpu = self._torch is not None
        self.no_memory: Any = self._torch.OutOfMemoryError if self._torch else MemoryError

    def upload(self, raw: Array, dtype: str) -> Array:
        """Stored values as float32 on the GPU, flat."""
        [name] = [name for name, stored in DTYPES.items() if stored == dtype]
        moved = self._torch.from_numpy(raw).to(self.device)
        return moved.view(getattr(self._torch, name)).float()

    def describe(self, values: Array, threshold: float = 0.0) -> tuple[float, float, int]:
        """The sum and the largest of |values| on the GPU, and how many are above a threshold."""
        sizes = values.abs()
        total = sizes.sum(dtype=self._torch.float64)
        return float(total), float(sizes.max()), int((sizes > threshold).sum())

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

    def measure_rate(self) -> float:
        """Floating-point operations in a second, of a product of matrices."""
        factor: Array = np.ones((MEASURED_SIDE, MEASURED_SIDE), np.float32)
        if self._torch:
            factor = self._torch.from_numpy(factor).to(self.device)
        (factor @ factor)[0, 0].item()  # the first starts threads, or a GPU
        started = time.perf_counter()
        (factor @ factor)[0, 0].item()
        return 2.0 * MEASURED_SIDE**3 / (time.perf_counter() - started)
