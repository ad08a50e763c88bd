"""Machine code for this machine: what it depends on, where it is kept, whether it may be run."""

import ctypes
import hashlib
import importlib.util
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from darelib.kernels import EngineUnavailable, KernelSpec

# What the machine code and its proof depend on; an edit elsewhere recompiles nothing.
SOURCES: Final = (
    "kernels/__init__.py",
    "core/arrays.py",
    "kernels/cpu.py",
    "kernels/entries.py",
    "kernels/fallback.py",
    "kernels/looks.py",
    "kernels/native.py",
    "kernels/objects.py",
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

Function = Callable[..., Any]  # of nine addresses, then whole numbers

# --- this machine, as LLVM knows it ---------------------------------------------------------------


@cache
def load_llvmlite() -> Any:
    """llvmlite, whose binding can compile for this machine."""
    try:
        import llvmlite.binding
    except Exception as error:  # of a library that is missing, or does not fit this system
        raise EngineUnavailable(f"{type(error).__name__}: {error}") from None
    llvmlite.binding.initialize_native_target()
    llvmlite.binding.initialize_native_asmprinter()
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
    llvmlite = load_llvmlite()
    processor = (
        llvmlite.binding.get_process_triple(),
        llvmlite.binding.get_host_cpu_name(),
        host_features(),
        [os.environ.get(name) for name in FEATURE_VARIABLES],
    )
    numba = importlib.util.find_spec("numba")  # which is not imported
    folders = (numba and numba.submodule_search_locations) or ()
    sources = [Path(__file__).parent.parent / name for name in SOURCES]
    try:
        texts = [
            path.read_bytes()
            for path in (*sources, *(Path(folder, "_version.py") for folder in folders))
        ]
    except OSError as error:
        raise EngineUnavailable(f"its sources cannot be read: {error.strerror}") from None
    made_by = hashlib.sha256(b"".join([llvmlite.__version__.encode(), *texts]))
    made_for = hashlib.sha256(repr(processor).encode())
    return f"{made_for.hexdigest()[:8]}.{made_by.hexdigest()[:16]}"


def load_object(code: KernelSpec, machine_code: bytes) -> Function:
    llvm = load_llvmlite().binding
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 11, *[ctypes.c_ssize_t] * 5)
    function = prototype(engine.get_function_address("kernel"))
    # For a returned value and an exception, of which there are none.
    slots = ctypes.create_string_buffer(16)
    first = ctypes.addressof(slots)

    # What it owns must live as long as the function.
    def call(*arguments: int, _owners: Any = (engine, slots)) -> None:
        if function(first, first + 8, *arguments):
            raise RuntimeError(f"the kernel {code.kind} failed")

    return call


# --- object files on disk -------------------------------------------------------------------------


def object_name(code: KernelSpec) -> str:
    return f"dare.{code}.{identify()}.o"


def code_of(name: str) -> KernelSpec:
    """What an object file of this name holds."""
    return KernelSpec(*name.split(".")[1].split("-"))


def find_cache() -> Path:
    """Where kernels are kept: NUMBA_CACHE_DIR, or beside this file, or in the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    beside = Path(__file__).absolute().parent / "__pycache__" / "kernels"
    with suppress(OSError):
        beside.mkdir(mode=0o755, parents=True, exist_ok=True)
    if os.access(beside, os.W_OK) and not find_doubt(beside):
        return beside
    users = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Where a user has no home, or says so with a relative path, the working directory is no place
    # for machine code.
    return Path(users, "dare") if os.path.isabs(users) else beside


def can_keep(folder: Path) -> bool:
    """Whether something can be stored there, or that folder made."""
    nearest = next(filter(os.path.exists, (folder, *folder.absolute().parents)), folder)
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK)


def find_doubt(path: Path, descriptor: int | None = None) -> str | None:
    """Why what is there may be another user's, if it is there and may be. descriptor: it, open."""
    if not hasattr(os, "geteuid"):
        return None
    with suppress(OSError):
        status = os.stat(path if descriptor is None else descriptor)
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others can write to {path} (chmod go-w would change that)"
    return None


def read_object(path: Path) -> bytes | None:
    """The code in an object file, if it is whole, has its own name, and is not another user's."""
    with suppress(OSError), open(path, "rb") as file:
        stored = file.read()
        machine_code = stored[32:]
        is_whole = stored[:32] == _digest(path, machine_code)
        return machine_code if is_whole and not find_doubt(path, file.fileno()) else None
    return None


def read_objects(paths: Mapping[KernelSpec, Path]) -> dict[KernelSpec, bytes]:
    """The code in those of the files that can be used."""
    stored = {code: read_object(path) for code, path in paths.items()}
    return {code: machine_code for code, machine_code in stored.items() if machine_code}


def _digest(path: Path, machine_code: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + machine_code).digest()


def store(machine_code: bytes, path: Path) -> None:
    """Keep what was compiled and proved, if that is possible, where nobody else can write to it."""
    unfinished = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open(unfinished, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(_digest(path, machine_code) + machine_code)
        unfinished.replace(path)
    with suppress(OSError):  # where the disk is full
        unfinished.unlink()
