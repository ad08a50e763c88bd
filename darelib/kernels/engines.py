"""Which engine computes: the first that can be used, and a warning if it is not the usual."""

from collections.abc import Collection, Sequence
from typing import Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec, fallback, native
from darelib.kernels.proof import prove_function

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
    engines = {
        "numba": native.load_kernels,
        "numba, for this run": load_here,
        "plain": fallback.load_kernels,
    }
    reason = None
    for name in engines if engine == "auto" else (engine,):
        attempt = name, frozenset(specs)
        try:
            if attempt in _refused:
                raise _refused[attempt]
            kernels = engines[name](specs, interrupts)
        except EngineUnavailable as error:
            _refused[attempt] = error
            reason = reason or error
            continue
        if reason:
            LOG.warning(WARNINGS[name], reason)
        return kernels
    raise DareError(f"the engine {engine} cannot be used: {reason}", "use engine auto or plain")


def load_here(specs: Collection[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, Kernel]:
    """For where stored machine code fails: Numba compiles in this process, and runs that."""
    return native.load_kernels(specs, interrupts, _compile_here)


def _compile_here(wanted: Sequence[KernelSpec], interrupts: Interrupts) -> native.Functions:
    """Functions that were proved by another process, which may crash, before they are by this."""
    native.run_compilers("here", wanted, None, interrupts)
    try:
        from darelib.kernels import cpu

        functions = {code: cpu.run_here(code) for code in wanted}
    except Exception as error:  # of a compiler that another process could use, and this one cannot
        raise EngineUnavailable(f"{type(error).__name__}: {error}") from None
    for code, function in functions.items():
        prove_function(code, function)
    return functions
