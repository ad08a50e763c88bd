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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.core.formats import DTYPES, FORMATS, STORED_BITS, widen
from darelib.core.matrices import LONGEST_SIDE
from darelib.core.methods import TensorSettings
from darelib.core.text import LOG
from darelib.kernels.plain import library

Array = Any  # of NumPy or torch, of two dimensions
# In float32, what lies where no change is comes out too large, by about this times the unit
# roundoff, times the mean eigenvalue (by size) of the Gram matrix, divided by the ridge: measured.
ERROR_FACTOR: Final = 4 * 2.0**-24
BLOCK_SIDE: Final = 256  # of the blocks that are solved by themselves
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
    is_wide = precise or deltas[0].dtype == lib.float64
    if not is_wide:
        try:
            return solve(changes, shape, settings, LARGEST_ERROR)
        except TooRough:
            pass
    wide = [replace(each, unit=lib.asarray(each.unit, dtype=lib.float64)) for each in changes]
    return lib.asarray(solve(wide, shape, settings, np.inf), dtype=deltas[0].dtype)


def merge_factors(
    factors: Sequence[tuple[Array, Array]], weights: Sequence[float], settings: TensorSettings
) -> Array:
    """The same of changes that are products of two factors, as adapters have them, in float64.

    All that happens, happens in the space that the factors span together: nothing there is larger
    than the sum of the ranks (Panariello et al., NeurIPS 2025), and the result is the same.
    """
    left_space, left_parts = np.linalg.qr(np.hstack([left for left, _ in factors]))
    right_space, right_parts = np.linalg.qr(np.hstack([right.T for _, right in factors]))
    ends = np.cumsum([left.shape[1] for left, _ in factors])[:-1]
    lefts = np.split(left_parts, ends, axis=1)
    rights = np.split(right_parts, ends, axis=1)
    cores = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
    changes = [change for change in map(measure, cores, weights) if change.square]
    shape = (len(left_space), len(right_space))
    if not changes:
        return np.zeros(shape, np.float32)
    core = solve(changes, shape, settings, np.inf)
    return (left_space @ core).astype(np.float32) @ right_space.T.astype(np.float32)


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
    most = float(len(changes))
    held = sum(shares) / total
    return min(1 / max(held, 1 / most), norm_limit * mean / size)


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
    is_tall = shape[0] >= shape[1]
    units = [each.unit if is_tall else each.unit.T for each in changes]  # tall, all of them
    long, short = max(shape), min(shape)
    gram: Any = 0
    means: Any = 0
    cubes: Any = 0
    for each, unit in zip(changes, units, strict=True):
        own = unit.T @ unit
        weight = each.weight * each.scale
        means = means + weight * unit
        cubes = cubes + weight / each.square * (unit @ own)
        own *= each.weight * short / each.square
        gram = gram + own
    merged = solve_side(gram, short * cubes + settings.ridge * means, settings, largest_error)
    if long <= LONGEST_SIDE:
        gram = 0
        for each, unit in zip(changes, units, strict=True):
            own = unit @ unit.T
            own *= each.weight * long / each.square
            gram = gram + own
        wanted = long * cubes + settings.ridge * means
        merged = (merged + solve_side(gram, wanted.T, settings, largest_error).T) / 2
    merged = merged if is_tall else merged.T
    return merged * find_factor(merged, changes, settings.norm_limit)


def solve_side(gram: Array, wanted: Array, settings: TensorSettings, largest_error: float) -> Array:
    """wanted times the inverse of a weighted sum of Gram matrices, plus the ridge. gram is
    overwritten.
    """
    side = len(gram)
    flat = gram.reshape(-1)
    if ERROR_FACTOR * float(flat @ flat) / side / settings.ridge > largest_error:
        raise TooRough
    flat[:: side + 1] += settings.ridge
    lib = library(gram)
    if lib is np:
        return solve_blocks(gram, np.ascontiguousarray(wanted.T)).T
    return lib.cholesky_solve(wanted.T, lib.linalg.cholesky(gram)).T


def solve_blocks(gram: Array, right: Array) -> Array:
    """gram^-1 right, by Cholesky's factors, block by block; both are overwritten.

    By NumPy's products: its own way to solve takes four times as long.
    """
    side = len(gram)
    inverses = []
    for k in range(0, side, BLOCK_SIDE):
        end = min(k + BLOCK_SIDE, side)
        own = slice(k, end)
        gram[k:, own] -= gram[k:, :k] @ gram[own, :k].T
        inverse = np.linalg.inv(np.linalg.cholesky(gram[own, own]))
        inverses.append(inverse)
        gram[end:, own] = gram[end:, own] @ inverse.T
        right[own] = inverse @ (right[own] - gram[own, :k] @ right[:k])
    for k in reversed(range(0, side, BLOCK_SIDE)):
        end = min(k + BLOCK_SIDE, side)
        own = slice(k, end)
        right[own] = inverses.pop().T @ (right[own] - gram[end:, own].T @ right[end:])
    return right


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


# --- what is made again, elsewhere ---------------------------------------------------------------

# Of the mean |value|, by bits: below that, values may differ that were solved on another machine.
TOLERANCES: Final = {8: 0.0, 16: 2.0**-16, 32: 2.0**-22, 64: 2.0**-22}


def compare_values(stored: Array, made: Array, dtype: str) -> tuple[int, int | None]:
    """How many stored values differ, and the first that differs by more than one unit in the last
    place, and more than next to nothing of the mean.
    """
    bits = STORED_BITS[dtype]
    raw = np.dtype(f"u{bits // 8}")
    first, second = (np.frombuffer(each, raw) for each in (stored, made))
    places = [order_patterns(each, bits) for each in (first, second)]
    is_far = np.abs(places[0] - places[1]) > 1
    if dtype in FORMATS:
        values = [widen(each.view(np.uint8), dtype).astype(np.float64) for each in (first, second)]
        is_far &= np.abs(values[0] - values[1]) > TOLERANCES[bits] * np.abs(values[1]).mean()
    beyond = np.flatnonzero(is_far)
    return int(np.count_nonzero(first != second)), int(beyond[0]) if len(beyond) else None


def order_patterns(raw: Array, bits: int) -> Array:
    """Bit patterns of floats as numbers in the order of the values: neighbours differ by 1."""
    sign = raw >> raw.dtype.type(bits - 1)
    size = (raw & raw.dtype.type((1 << (bits - 1)) - 1)).astype(np.int64)
    return np.where(sign, -size, size)
