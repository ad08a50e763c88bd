"""Which engine computes: the first that can be used, and a warning if it is not the usual."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec

WARNINGS: Final = {
    "numba, for this run": "Kernels compiled beforehand cannot be used (%s), so Numba compiles "
    "them for this run: the same result, after a longer start",
    "plain": "Numba cannot be used (%s), so NumPy computes: the same result, many times slower",
}

# What failed once is not tried again.
_refused: dict[tuple[str, frozenset[KernelSpec]], EngineUnavailable] = {}


def load_kernels(
    specs: Collection[KernelSpec], engine: str, interrupts: Interrupts
) -> dict[KernelSpec, Kernel]:
    """A kernel for each spec, of an engine; auto: of the first that can be used.

    To be called as kernel(buffers, count, models, first_tile), to expand as
    kernel(left, right, made, first, ranks_before), to rank as
    kernel(base, values, by_rank, order, limits, skipped, is_delta), and to unpack as
    kernel(values, entries, key, threshold, first_tile), which gives how many the mask keeps.
    """
    from darelib.kernels import fallback, here, native

    engines = {"numba": native, "numba, for this run": here, "plain": fallback}
    reason = None
    for name in engines if engine == "auto" else (engine,):
        attempt = name, frozenset(specs)
        try:
            if attempt in _refused:
                raise _refused[attempt]
            kernels = engines[name].load_kernels(specs, interrupts)
        except EngineUnavailable as error:
            _refused[attempt] = error
            reason = reason or error
            continue
        if reason:
            LOG.warning(WARNINGS[name], reason)
        return kernels
    raise DareError(f"the engine {engine} cannot be used: {reason}", "use engine auto or plain")
