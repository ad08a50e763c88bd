"""The arithmetic: one definition (plain), and engines that give its very bits (native, fallback, tensors)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError

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
# as kernel(base, values, by_rank, order, limits, skipped, is_delta). Auto takes the first of them that can be used.
ENGINES: Final = {
    "numba": "darelib.kernels.native",
    "numba, for this run": "darelib.kernels.here",
    "plain": "darelib.kernels.fallback",
}
TAKEN_OVER: Final = {
    "numba, for this run": "Kernels compiled beforehand cannot be used (%s), so Numba compiles them for this run: the "
    "same result, after a longer start",
    "plain": "Numba cannot be used (%s), so NumPy computes: the same result, many times slower",
}

_refused: dict[
    tuple[str, frozenset[KernelSpec]], EngineUnavailable
] = {}  # what failed once is not tried again


def load_kernels(
    specs: Collection[KernelSpec], engine: str, interrupts: Interrupts
) -> dict[KernelSpec, Kernel]:
    """The kernels of an engine, or of the first that can be used."""
    reason = None
    for name in ENGINES if engine == "auto" else (engine,):
        attempt = name, frozenset(specs)
        try:
            if attempt in _refused:
                raise _refused[attempt]
            kernels = importlib.import_module(ENGINES[name]).load_kernels(specs, interrupts)
        except EngineUnavailable as error:
            _refused[attempt] = error
            reason = reason or error
            continue
        if reason:
            LOG.warning(TAKEN_OVER[name], reason)
        return kernels
    raise DareError(f"the engine {engine} cannot be used: {reason}", "use engine auto or plain")
