"""The arithmetic: one definition (plain), and engines that give its very bits (cpu, fallback, tensors)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from darelib.interrupts import Interrupts
from darelib.text import LOG, DareError, install_hint

Kernel = Callable[..., Any]


class EngineUnavailable(Exception):
    """This engine cannot be used here; the reason is in the message."""


@dataclass(frozen=True)
class KernelSpec:
    """Which kernel: what it does, and the stored types that it reads and writes."""

    # sum, elect or average: merge a chunk; products: what slerp must know of it; count: what drops by size and trim
    # must; sums: what restores them; rank: the limits of its elements' mask bits; measure: what an analysis wants to
    # know; expand: multiply an adapter's matrices; pack: what the mask keeps.
    kind: str
    base: str
    finetuned: str
    output: str

    @property
    def real(self) -> str:
        """The type to compute in: float32, or float64 where any side is."""
        return "F64" if "F64" in (self.base, self.finetuned, self.output) else "F32"

    def __str__(self) -> str:
        return f"{self.kind}-{self.base}-{self.finetuned}-{self.output}"


# The module of each engine; its load_kernels(specs, interrupts) gives a kernel for each spec, to be called as
# kernel(buffers, count, models, first_tile), or to expand as kernel(left, right, made, first, ranks_before), or to rank
# as kernel(base, values, by_rank, order, limits, skipped, is_delta).
ENGINES: Final = {"numba": "darelib.kernels.native", "plain": "darelib.kernels.fallback"}


def load_kernels(specs: Collection[KernelSpec], engine: str, interrupts: Interrupts) -> dict[KernelSpec, Kernel]:
    """The kernels of an engine; auto: Numba's or, where that cannot be loaded, NumPy's."""
    name = "numba" if engine == "auto" else engine
    try:
        return importlib.import_module(ENGINES[name]).load_kernels(specs, interrupts)
    except EngineUnavailable as error:
        if engine != "auto":
            raise DareError(f"the engine {engine} cannot be used: {error}", "use engine auto or plain") from None
        LOG.warning(f"Numba cannot be used ({error}), so NumPy computes: the same result, many times slower")
        return load_kernels(specs, "plain", interrupts)


def load_tensors() -> Any:
    """The merge of tensors in memory, which needs torch."""
    try:
        return importlib.import_module("darelib.kernels.tensors")
    except ModuleNotFoundError:
        raise DareError("tensors in memory need torch", install_hint("torch")) from None
