"""The engine for where stored machine code fails: Numba compiles in this process, and runs that."""

from __future__ import annotations

from collections.abc import Collection

from darelib.core.interrupts import Interrupts
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec
from darelib.kernels.compiler import prove_here
from darelib.kernels.native import Function, bind, find_code

_loaded: dict[KernelSpec, Function] = {}


def load_kernels(specs: Collection[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, Kernel]:
    """The kernels, proved by another process, which may crash, before they are proved by this."""
    codes = {spec: find_code(spec) for spec in specs}
    wanted = sorted({*codes.values()} - _loaded.keys(), key=str)
    if wanted:
        prove_here(wanted, interrupts)
    try:
        for code in wanted:
            from darelib.kernels import cpu, proof

            function = cpu.run_here(code)
            proof.prove_function(code, function)
            _loaded[code] = function
    except EngineUnavailable:
        raise
    except Exception as error:  # of a compiler that another process could use, and this one cannot
        raise EngineUnavailable(f"{type(error).__name__}: {error}") from None
    return {spec: bind(spec, _loaded[code]) for spec, code in codes.items()}
