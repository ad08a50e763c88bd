"""This machine, as LLVM knows it, and what machine code for it depends on."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

from darelib.kernels import EngineUnavailable

# What the machine code and its proof depend on; an edit elsewhere recompiles nothing.
SOURCES: Final = (
    "kernels/__init__.py",
    "kernels/child.py",
    "kernels/cpu.py",
    "kernels/fallback.py",
    "kernels/looks.py",
    "kernels/machine.py",
    "kernels/native.py",
    "kernels/parts.py",
    "kernels/plain.py",
    "kernels/proof.py",
    "kernels/records.py",
    "kernels/tiles.py",
    "core/formats.py",
    "core/mask.py",
)
# What users set to choose the processor's features themselves.
FEATURE_VARIABLES: Final = ("NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")


@cache
def load_llvmlite() -> Any:
    """llvmlite, whose binding can compile for this machine."""
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except Exception as error:  # of a library that is missing, or does not fit this system
        raise EngineUnavailable(f"{type(error).__name__}: {error}") from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvmlite


def host_features() -> str:
    """What this processor can do, as LLVM names it.

    Where it has vectors of 512 bits, LLVM would use half of them, to avoid a lower clock; the
    kernels gain by all.
    """
    features = load_llvmlite().binding.get_host_cpu_features().flatten()
    return f"{features},-prefer-256-bit" if "+avx512f" in features else features


def target_machine() -> Any:
    llvm = load_llvmlite().binding
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features(), opt=3, codemodel="jitdefault"
    )


@cache
def identify() -> str:
    """What an object file is good for: this processor, then these sources and versions."""
    llvm = load_llvmlite()
    processor = (
        llvm.binding.get_process_triple(),
        llvm.binding.get_host_cpu_name(),
        host_features(),
        [os.environ.get(name) for name in FEATURE_VARIABLES],
    )
    sources = [Path(__file__).parent.parent / name for name in SOURCES]
    numba = importlib.util.find_spec("numba")
    for folder in (numba and numba.submodule_search_locations) or ():
        sources.append(Path(folder, "_version.py"))  # which is not imported
    try:
        texts = [path.read_bytes() for path in sources]
    except OSError as error:
        raise EngineUnavailable(f"its sources cannot be read: {error.strerror}") from None
    made_by = hashlib.sha256(b"".join([llvm.__version__.encode(), *texts]))
    made_for = hashlib.sha256(repr(processor).encode())
    return f"{made_for.hexdigest()[:8]}.{made_by.hexdigest()[:16]}"
