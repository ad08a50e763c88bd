"""Where matrices are merged as a whole: on a GPU, by torch, or by NumPy's BLAS."""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from darelib.core.arrays import Array, library
from darelib.core.formats import DTYPES
from darelib.core.matrices import Factors
from darelib.core.pieces import Crew, employ, multiply
from darelib.core.text import LOG
from darelib.core.tuning import TUNING
from darelib.methods import METHODS
from darelib.methods.method import WholeMerge
from darelib.methods.settings import TensorSettings


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
