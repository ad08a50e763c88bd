"""Numba's kernels as machine code: compiled once by a process of their own, kept on disk, loaded without Numba.

Loading Numba takes longer than merging a billion parameters, and which vectors it uses can only be set for a whole
process. So a child process compiles, and this one loads the object file by llvmlite alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from darelib.formats import FORMATS
from darelib.interrupts import Interrupts
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec
from darelib.text import LOG
from darelib.tuning import TUNING, count_cores

# What the machine code depends on; an edit elsewhere recompiles nothing.
SOURCES: Final = (
    "kernels/__init__.py",
    "kernels/cpu.py",
    "kernels/looks.py",
    "kernels/parts.py",
    "kernels/records.py",
    "kernels/tiles.py",
    "formats.py",
    "mask.py",
)
# What users set to choose the processor's features themselves.
FEATURE_VARIABLES: Final = ("NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
# Far more than a kernel takes on a busy machine.
COMPILE_SECONDS: Final = 300
COMPILE: Final = "import sys; from darelib.kernels import native; native.compile_to(*sys.argv[1:])"

_loaded: dict[KernelSpec, Kernel] = {}


def load_kernels(specs: Collection[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, Kernel]:
    """The kernels as functions that run without the interpreter's lock; what was never compiled is compiled first."""
    wanted = sorted(set(specs) - _loaded.keys(), key=str)
    if wanted:
        folder = find_cache()
        paths = {spec: folder / f"dare.{spec}.{_identify()}.o" for spec in wanted}
        codes = {spec: code for spec, path in paths.items() if (code := _read_object(path))}
        for spec, code in _compile([spec for spec in wanted if spec not in codes], interrupts).items():
            codes[spec] = code
            _store(code, paths[spec])
        _loaded.update({spec: _load(spec, code) for spec, code in codes.items()})
    return {spec: _loaded[spec] for spec in specs}


@cache
def _llvm() -> Any:
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

    Where it has vectors of 512 bits, LLVM would use half of them, to avoid a lower clock; the kernels gain by all.
    """
    features = _llvm().binding.get_host_cpu_features().flatten()
    return f"{features},-prefer-256-bit" if "+avx512f" in features else features


def _target_machine() -> Any:
    llvm = _llvm().binding
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features(), opt=3, codemodel="jitdefault"
    )


@cache
def _identify() -> str:
    """What an object file is good for: this processor, then these sources and versions."""
    llvm = _llvm()
    chosen = [os.environ.get(name) for name in FEATURE_VARIABLES]
    processor = repr((llvm.binding.get_process_triple(), llvm.binding.get_host_cpu_name(), host_features(), chosen))
    made_by = hashlib.sha256(llvm.__version__.encode())
    numba = importlib.util.find_spec("numba")
    try:
        for folder in (numba and numba.submodule_search_locations) or ():
            made_by.update(Path(folder, "_version.py").read_bytes())  # without importing it
        for name in SOURCES:
            made_by.update((Path(__file__).parent.parent / name).read_bytes())
    except OSError as error:
        raise EngineUnavailable(f"its sources cannot be read: {error.strerror}") from None
    return f"{hashlib.sha256(processor.encode()).hexdigest()[:8]}.{made_by.hexdigest()[:16]}"


def find_cache() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, or beside this file, or in the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    beside = Path(__file__).absolute().parent / "__pycache__"
    with suppress(OSError):
        beside.mkdir(exist_ok=True)
    users = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return beside if os.access(beside, os.W_OK) else Path(users, "dare")


def _read_object(path: Path) -> bytes | None:
    """The code in an object file; a file that a crash cut short must not be run."""
    with suppress(OSError):
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    return None


def _compile(specs: Sequence[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, bytes]:
    """The code of these kernels, compiled by as many processes at a time as there are cores."""
    if not specs:
        return {}
    waiting, running = list(specs), dict[KernelSpec, subprocess.Popen[bytes]]()
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            while waiting or running:
                while waiting and len(running) < count_cores():
                    spec = waiting.pop()
                    LOG.info("compiling for this machine (%s, %s); later runs start at once", spec.kind, spec.finetuned)
                    running[spec] = _start_compiler(spec, Path(folder))
                for spec in [spec for spec, child in running.items() if child.poll() is not None]:
                    interrupts.check()  # which may be why it ended
                    if running.pop(spec).returncode:
                        reason = Path(folder, f"{spec}.txt").read_text(errors="replace").strip().rpartition("\n")[2]
                        raise EngineUnavailable(reason or "its compiler failed")
                if time.monotonic() - started > COMPILE_SECONDS * len(specs):
                    raise EngineUnavailable("its compiler does not come to an end")
                time.sleep(TUNING.poll_seconds / 5)
                interrupts.check()
            return {spec: Path(folder, f"{spec}.o").read_bytes() for spec in specs}
    except OSError as error:  # such as a full disk, or where Python is part of another program
        raise EngineUnavailable(f"its compiler cannot be run: {error.strerror or error}") from None
    finally:
        for child in running.values():
            child.kill()
            child.wait()


def _start_compiler(spec: KernelSpec, folder: Path) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
        "NUMBA_DISABLE_JIT": "0",
        "OPENBLAS_NUM_THREADS": "1",  # more of them only take memory, and where there is little they never start
    }
    if "+avx512f" in host_features() and not any(name in os.environ for name in FEATURE_VARIABLES):
        environment["NUMBA_CPU_FEATURES"] = host_features()
    # -P: nothing is imported from the working directory. A session of its own: Ctrl-C is for this process to handle.
    words = [sys.executable or "python", "-P", "-c", COMPILE, str(folder / f"{spec}.o")]
    words += [spec.kind, spec.base, spec.finetuned, spec.output]
    with open(folder / f"{spec}.txt", "wb") as messages:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": messages}
        return subprocess.Popen(words, env=environment, start_new_session=True, **quiet)


def compile_to(path: str, *words: str) -> None:
    """What the child process does: compile one kernel."""
    from darelib.kernels import cpu

    Path(path).write_bytes(cpu.compile_object(KernelSpec(*words), _target_machine()))


def _store(code: bytes, path: Path) -> None:
    """Keep what was compiled, if that can be done, and remove what other sources compiled for this processor."""
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(code).digest() + code)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
    processor, made_by = path.name.split(".")[-3:-1]
    for other in path.parent.glob(f"dare.*.{processor}.*"):
        if f".{processor}.{made_by}." not in other.name:
            with suppress(OSError):
                other.unlink()


def _load(spec: KernelSpec, code: bytes) -> Kernel:
    llvm = _llvm().binding
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 11, *[ctypes.c_ssize_t] * 4)
    function = prototype(engine.get_function_address("kernel"))
    slots = ctypes.create_string_buffer(16)  # for a returned value and an exception, of which there are none
    where, itemsize = ctypes.addressof(slots), FORMATS[spec.finetuned].itemsize

    def run_chunk(buffers: Any, count: int, models: int, first_tile: int, _owners: Any = (engine, slots)) -> None:
        stride = buffers.finetuned.shape[1] // itemsize
        function(where, where + 8, *buffers.addresses, count, stride, models, first_tile)

    def expand(left: Any, right: Any, made: Any, first: int, ranks_before: int, _owners: Any = (engine, slots)) -> None:
        before = ctypes.c_int64(ranks_before)
        addresses = [*(array.ctypes.data for array in (left, right, made)), ctypes.addressof(before)]
        function(where, where + 8, *addresses, 0, 0, 0, 0, 0, len(made), right.shape[1], left.shape[1], first)

    def rank(
        base: Any, values: Any, by_rank: Any, order: Any, limits: Any, skipped: int, is_delta: bool,
        _owners: Any = (engine, slots),
    ) -> None:  # fmt: skip
        addresses = [array.ctypes.data for array in (base, values, by_rank, order, limits)]
        function(where, where + 8, *addresses, 0, 0, 0, 0, len(limits), len(by_rank), skipped, is_delta)

    # The engine owns the code and the function writes to its slots: they live as long as these functions do.
    others: dict[str, Kernel] = {"expand": expand, "rank": rank}
    return others.get(spec.kind, run_chunk)
