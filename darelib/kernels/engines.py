"""Which engine computes: machine code that Numba made, or NumPy.

Loading Numba takes longer than merging a billion parameters, and which vectors it uses can only be
set for a whole process. So child processes compile and check, and this one loads their object files
by llvmlite alone. A crash in a child ends no merge.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError
from darelib.core.tuning import TUNING, count_cores
from darelib.kernels import COMPILED, EngineUnavailable, Kernel, KernelSpec, fallback
from darelib.kernels.objects import (
    FEATURE_VARIABLES,
    can_store,
    find_cache,
    find_doubt,
    host_features,
    load_object,
    object_name,
    read_objects,
    store,
)
from darelib.kernels.records import MERGES

Kernels = dict[KernelSpec, Kernel]
Process = subprocess.Popen[bytes]

# Far more than all kernels of a merge take on a busy machine.
COMPILE_SECONDS: Final = 600
# A child loads Numba, and then compiles and checks one kernel after the other. As measured on a
# core of 2024, of the kernels that take longest.
START_SECONDS: Final = 2.0
KERNEL_SECONDS: Final = 5.0

_loaded: Kernels = {}
_failures: list[EngineUnavailable] = []  # what failed once is not tried again


def load_kernels(
    specs: Collection[KernelSpec], engine: str, interrupts: Interrupts, work: int
) -> Kernels:
    """A kernel for each spec, of an engine; auto: Numba's, unless these cannot be used, or NumPy is
    done before they are compiled. work: how many entries of models they are for.

    To be called as kernel(buffers, count, models, first_tile), to expand as
    kernel(left, right, product, first, ranks_before), to rank as
    kernel(base, values, by_rank, order, last_bits, skipped, is_delta), and to unpack as
    kernel(base, entries, values, key, threshold, first_tile), which gives how many the mask keeps.
    """
    kernels = fallback.load_kernels(specs)
    codes = {spec: find_code(spec) for spec in specs if spec.kind in COMPILED}
    if engine == "plain" or is_done_at_once(codes.values(), engine, work):
        return kernels
    try:
        wanted = sorted({*codes.values()} - _loaded.keys(), key=str)
        _loaded.update(load_compiled(wanted, interrupts))
    except EngineUnavailable as error:
        _failures[:] = [error]
        if engine == "numba":
            raise DareError(
                f"the engine numba cannot be used: {error}", "use engine auto or plain"
            ) from None
        LOG.warning(
            f"Numba cannot be used ({error}), so NumPy computes: the same result, many times slower"
        )
        return kernels
    return kernels | {spec: _loaded[code] for spec, code in codes.items()}


def find_code(spec: KernelSpec) -> KernelSpec:
    """The function that a kernel is: one for all outputs, unless it merges."""
    return spec if spec.kind in MERGES else replace(spec, output=spec.real)


def is_done_at_once(codes: Collection[KernelSpec], engine: str, work: int) -> bool:
    """Whether NumPy does it in about the time in which kernels are compiled or, where these are
    stored, loaded.
    """
    is_small = engine == "auto" and work < TUNING.compiled_work
    if not is_small or not {*codes} - _loaded.keys():
        return False
    return work < TUNING.loaded_work or count_missing(codes) > 0


def count_missing(codes: Collection[KernelSpec]) -> int:
    """How many functions are neither loaded nor stored where nobody else can write."""
    wanted = {*codes} - _loaded.keys()
    folder = find_cache()
    with suppress(EngineUnavailable):  # of a machine that nothing can be compiled for
        if not find_doubt(folder):
            return sum(not (folder / object_name(code)).exists() for code in wanted)
    return len(wanted)


def estimate_compiling(specs: Collection[KernelSpec], engine: str, work: int) -> float:
    """How many seconds a merge will wait for kernels."""
    codes = {find_code(spec) for spec in specs if spec.kind in COMPILED}
    if engine == "plain" or _failures or is_done_at_once(codes, engine, work):
        return 0.0
    rounds = -(-count_missing(codes) // count_cores())
    return START_SECONDS + rounds * KERNEL_SECONDS if rounds else 0.0


def load_compiled(codes: Sequence[KernelSpec], interrupts: Interrupts) -> Kernels:
    """Functions from the user's cache; what is not there is compiled now."""
    if not codes:
        return {}
    if _failures:
        raise _failures[0]
    folder = find_cache()
    paths = {code: folder / object_name(code) for code in codes}
    doubt = find_doubt(folder)
    if doubt:
        LOG.warning(f"{doubt}, so no kernel there is run: they are compiled for this run only")
    known = {} if doubt else read_objects(paths)
    missing = [code for code in codes if code not in known]
    if missing:
        types = ", ".join(dict.fromkeys(code.finetuned for code in missing))
        is_kept = not doubt and can_store(folder)
        promise = "; later runs start at once" if is_kept else ""
        LOG.info(f"compiling for this machine ({types}){promise}")
        known |= run_compilers(missing, interrupts)
        for code in missing if is_kept else ():
            store(known[code], paths[code])
    return {code: load_object(code, machine_code) for code, machine_code in known.items()}


# --- the processes that compile -------------------------------------------------------------------


def run_compilers(codes: Sequence[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, bytes]:
    """The machine code of functions, checked by the processes that compiled it."""
    count = min(count_cores(), len(codes))
    processes: list[Process] = []
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            paths = {code: Path(name, object_name(code)) for code in codes}
            messages = [Path(name, f"{k}.txt") for k in range(count)]
            try:
                for k, file in enumerate(messages):
                    processes.append(start_compiler([*paths.values()][k::count], file))
                wait_for(processes, interrupts)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            for process, file in zip(processes, messages, strict=True):
                if process.returncode:
                    raise EngineUnavailable(explain(process, file))
            made = read_objects(paths)
    except OSError as error:  # such as a full disk, or where Python is part of another program
        raise EngineUnavailable(f"its compiler cannot be run: {error.strerror or error}") from None
    if len(made) < len(codes):
        raise EngineUnavailable("what it compiled could not be written")
    return made


def start_compiler(paths: Sequence[Path], messages: Path) -> Process:
    """messages: a file for what it says."""
    root = str(Path(__file__).parents[2])
    folders = [path for path in sys.path if path and isinstance(path, str)]
    # What else is set for Numba, as for finding mistakes, would change what is stored for good.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NUMBA_") or name in FEATURE_VARIABLES
    }
    environment["PYTHONPATH"] = os.pathsep.join(folders if root in folders else [root, *folders])
    # More of them only take memory, and where there is little they never start.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if "+avx512f" in host_features() and environment.keys().isdisjoint(FEATURE_VARIABLES):
        environment["NUMBA_CPU_FEATURES"] = host_features()
    # -P: nothing is imported from the working directory.
    command = [sys.executable or "python", "-P", "-m", "darelib.kernels.proof", *map(str, paths)]
    with open(messages, "wb") as errors:
        return subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process to handle
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def wait_for(processes: Sequence[Process], interrupts: Interrupts) -> None:
    """Until all have ended, or one has failed."""
    deadline = time.monotonic() + COMPILE_SECONDS
    while None in (ends := [process.poll() for process in processes]) and not any(ends):
        interrupts.check()
        if time.monotonic() > deadline:
            raise EngineUnavailable("its compiler does not come to an end")
        time.sleep(TUNING.poll_seconds / 5)
    interrupts.check()  # which may be why one has failed


def explain(process: Process, messages: Path) -> str:
    """Why a process failed: what it said last, unless it was ended without a word."""
    last = messages.read_text(errors="replace").strip().rpartition("\n")[2]
    crash = f"its compiler, or compiled code, crashed with status {process.returncode}"
    return last if process.returncode == 1 and last else crash
