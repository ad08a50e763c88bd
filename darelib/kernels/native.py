"""Numba's kernels as machine code: compiled and proved once, kept on disk, loaded without Numba.

Loading Numba takes longer than merging a billion parameters, and which vectors it uses can only be
set for a whole process. So child processes compile, and this one loads the object files by llvmlite
alone. What crashes in a child ends no merge.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.mask import TILE
from darelib.core.text import LOG
from darelib.core.tuning import TUNING, count_cores
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec
from darelib.kernels.objects import (
    FEATURE_VARIABLES,
    Function,
    can_keep,
    find_cache,
    find_doubt,
    host_features,
    load_object,
    object_name,
    read_objects,
    store,
)
from darelib.kernels.records import MERGES, MODEL

# Kernels that merge a type in other ways, or show what a merge would do: who needs one of them soon
# wants another.
COMPANIONS: Final = (
    "sum",
    "elect",
    "products",
    "count",
    "rank",
    "average",
    "sums",
    "pack",
    "measure",
    "unpack",
)

# Far more than all kernels of a merge take on a busy machine.
COMPILE_SECONDS: Final = 600
CHILD: Final = "import sys; from darelib.kernels import proof; proof.work(*sys.argv[1:])"

Functions = dict[KernelSpec, Function]
Process = subprocess.Popen[bytes]

_loaded: Functions = {}
_background: list[Process] = []  # which nobody waits for any more


def load_stored(wanted: Collection[KernelSpec], interrupts: Interrupts) -> Functions:
    """Kernels from disk; what was never compiled is compiled now."""
    folder = find_cache()
    paths = {code: folder / object_name(code) for code in wanted}
    doubts = [*filter(None, map(find_doubt, (folder, *paths.values())))]
    known = {} if doubts else read_objects(paths)
    missing = [code for code in wanted if code not in known]
    if doubts:
        LOG.warning(f"{doubts[0]}, so no kernel there is run: they are compiled for this run only")
    if missing:
        types = ", ".join(dict.fromkeys(code.finetuned for code in missing))
        is_kept = not doubts and can_keep(folder)
        promise = "; later runs start at once" if is_kept else ""
        LOG.info(f"compiling for this machine ({types}){promise}")
        known |= run_compilers("object", missing, folder if is_kept else None, interrupts)
    if len(known) < len(wanted):
        raise EngineUnavailable("what it compiled cannot be read")
    return {code: load_object(code, machine_code) for code, machine_code in known.items()}


def load_kernels(
    specs: Collection[KernelSpec],
    interrupts: Interrupts,
    load: Callable[[Sequence[KernelSpec], Interrupts], Functions] = load_stored,
) -> dict[KernelSpec, Kernel]:
    """The kernels as functions that run without the interpreter's lock.

    load: gives the functions that this process does not have yet.
    """
    codes = {spec: find_code(spec) for spec in specs}
    wanted = sorted({*codes.values()} - _loaded.keys(), key=str)
    if wanted:
        _loaded.update(load(wanted, interrupts))
    return {spec: bind(spec, _loaded[code]) for spec, code in codes.items()}


def find_code(spec: KernelSpec) -> KernelSpec:
    """The function that a kernel is: one for all outputs, unless it merges."""
    return spec if spec.kind in MERGES else replace(spec, output=spec.real)


def list_companions(code: KernelSpec) -> list[KernelSpec]:
    """Functions of the same types, this one among them."""
    output = code.output if code.kind in MERGES else code.base
    kinds = COMPANIONS if code.kind in COMPANIONS else ()
    return [find_code(replace(code, kind=kind, output=output)) for kind in kinds]


def run_compilers(
    how: str, wanted: Sequence[KernelSpec], folder: Path | None, interrupts: Interrupts
) -> dict[KernelSpec, bytes]:
    """The machine code of kernels, proved by the processes that compiled them.

    how: as in darelib.kernels.proof.work. folder: where it is kept; the same processes put their
    companions there afterwards, without being waited for.
    """
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            paths = {code: Path(name, object_name(code)) for code in wanted}
            later: list[Path] = []
            if folder:
                companions = dict.fromkeys(c for code in wanted for c in list_companions(code))
                later = [folder / object_name(code) for code in companions if code not in wanted]
            _run_processes(how, list(paths.values()), later, Path(name), interrupts)
            found = read_objects(paths)
            if folder:
                for code, machine_code in found.items():
                    store(machine_code, folder / object_name(code))
            return found
    except OSError as error:  # such as a full disk, or where Python is part of another program
        raise EngineUnavailable(f"its compiler cannot be run: {error.strerror or error}") from None


def _run_processes(
    how: str, wanted: Sequence[Path], others: Sequence[Path], folder: Path, interrupts: Interrupts
) -> None:
    """Start a process for each core, and wait for what is wanted; they make others after that."""
    missing = [*wanted, *(path for path in others if not os.path.exists(path))]
    count = min(count_cores(), len(missing))
    deadline = time.monotonic() + COMPILE_SECONDS
    running: list[tuple[Process, Sequence[Path], Path]] = []
    try:
        for number in range(count):
            messages = folder / f"{number}.txt"
            its = wanted[number::count]
            try:
                process = _start([how, *map(str, missing[number::count])], messages)
            except OSError:
                if its:
                    raise
                break  # others are only wanted later
            running.append((process, its, messages))
        while not all(map(os.path.exists, wanted)):
            for process, its, messages in running:
                ended = process.poll() is not None
                interrupts.check()  # which may be why it ended
                if ended and not all(map(os.path.exists, its)):
                    raise EngineUnavailable(_explain(process, messages))
            if time.monotonic() > deadline:
                raise EngineUnavailable("its compiler does not come to an end")
            time.sleep(TUNING.poll_seconds / 5)
    except BaseException:
        for process, _, _ in running:
            process.kill()
            process.wait()
        raise
    started = [process for process, _, _ in running]
    _background[:] = [process for process in (*_background, *started) if process.poll() is None]


def _explain(process: Process, messages: Path) -> str:
    """Why a process made nothing: what it said last, unless it was ended without a word."""
    if process.returncode == 0:
        return "what it compiled could not be written"
    last = messages.read_text(errors="replace").strip().rpartition("\n")[2]
    crash = f"its compiler, or what that made, crashed with status {process.returncode}"
    return last if process.returncode == 1 and last else crash


def _start(words: Sequence[str], messages: Path) -> Process:
    """messages: a file for what it says."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [path for path in sys.path if path and isinstance(path, str)]
    # What else is set for Numba, as for finding mistakes, would change what is stored for good.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NUMBA_") or name in FEATURE_VARIABLES
    }
    environment["PYTHONPATH"] = os.pathsep.join(paths if root in paths else [root, *paths])
    # More of them only take memory, and where there is little they never start.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if "+avx512f" in host_features() and environment.keys().isdisjoint(FEATURE_VARIABLES):
        environment["NUMBA_CPU_FEATURES"] = host_features()
    # -P: nothing is imported from the working directory.
    command = [sys.executable or "python", "-P", "-c", CHILD, *words]
    with open(messages, "wb") as errors:
        return subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process to handle
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def bind(spec: KernelSpec, function: Function) -> Kernel:
    """A kernel as it is called, whatever arguments its function has."""
    itemsize = FORMATS[spec.finetuned].itemsize

    def call(arrays: Sequence[Any], *numbers: int) -> None:
        addresses = [array.ctypes.data for array in arrays]
        function(*addresses, *[0] * (9 - len(addresses)), *numbers, *[0] * (5 - len(numbers)))

    def run_chunk(buffers: Any, count: int, models: int, first_tile: int) -> None:
        stride = buffers.finetuned.shape[1] // itemsize
        function(*buffers.addresses, count, stride, models, first_tile, 0)

    def expand(left: Any, right: Any, made: Any, first: int, ranks_before: int) -> None:
        call([left, right, made], len(made), right.shape[1], left.shape[1], first, ranks_before)

    def rank(
        base: Any, values: Any, by_rank: Any, order: Any, limits: Any, skipped: int, is_delta: bool
    ) -> None:
        arrays = [base, values, by_rank, order, limits]
        call(arrays, len(limits), len(by_rank), skipped, is_delta)

    def diverge(buffers: Any, rows: int, width: int, is_delta: bool) -> None:
        call([*buffers.rows, buffers.order, buffers.limits], rows, width, is_delta)

    def unpack(
        base: Any, entries: Any, values: Any, key: tuple[int, int], threshold: int, first_tile: int
    ) -> int:
        model = np.zeros(1, MODEL)
        model["key_0"], model["key_1"] = key
        model["limit"] = threshold - 1
        bits = np.empty((2, TILE), np.uint16)
        arrays = [base, entries, values, model, bits]
        call(arrays, len(values), len(entries), first_tile)
        return int(model["kept"][0])

    others: dict[str, Kernel] = {
        "expand": expand,
        "rank": rank,
        "diverge": diverge,
        "unpack": unpack,
    }
    return others.get(spec.kind, run_chunk)
