"""Machine code for this machine: what it depends on, where it is kept, whether it may be run, and
how it is called.
"""

import ctypes
import hashlib
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.core.mask import TILE
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec
from darelib.kernels.records import EXPANSION, MODEL, RANKING, UNPACKING

# What makes machine code. What a kernel is known by covers this module and all that it imports.
MAKER: Final = "darelib.kernels.cpu"
IMPORTS: Final = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+(darelib[.\w]*)(?:[ \t]+import[ \t]+(\([^)]*\)|.*))?", re.M
)
# What users set to choose the processor's features themselves.
FEATURE_VARIABLES: Final = ("NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")

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


def read_sources() -> dict[str, bytes]:
    """All modules of darelib that are compiled in, by following imports without importing."""
    root = Path(__file__).parents[2]
    sources: dict[str, bytes] = {}
    waiting = [MAKER]
    while waiting:
        name = waiting.pop()
        place = root.joinpath(*name.split("."))
        files = [
            path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()
        ]
        if name in sources or not files:  # or it is a name in a module
            continue
        sources[name] = files[0].read_bytes()
        waiting += [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        for module, names in IMPORTS.findall(sources[name].decode()):
            waiting += [module, *(f"{module}.{each}" for each in re.findall(r"\w+", names))]
    return sources


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
    try:
        versions = [Path(folder, "_version.py").read_bytes() for folder in folders]
        made_by = repr((llvmlite.__version__, versions, sorted(read_sources().items())))
    except OSError as error:
        raise EngineUnavailable(f"its sources cannot be read: {error.strerror}") from None
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (repr(processor), made_by)]
    return f"{digests[0][:8]}.{digests[1][:16]}"


# --- calls ----------------------------------------------------------------------------------------


def load_object(code: KernelSpec, machine_code: bytes) -> Kernel:
    llvm = load_llvmlite().binding
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)
    function = prototype(engine.get_function_address("kernel"))
    # For a returned value and an exception, of which there are none.
    slots = ctypes.create_string_buffer(16)
    first = ctypes.addressof(slots)

    # What it owns must live as long as the function.
    def run(arguments: Any, _owners: Any = (engine, slots)) -> None:
        if function(first, first + 8, arguments.ctypes.data):
            raise RuntimeError(f"the kernel {code.kind} failed")

    return partial(CALLS.get(code.kind, call_chunk), run)


def call(run: Callable[[Any], None], record: Any, **fields: Any) -> None:
    """fields: of a record of this type: arrays, of which it has the addresses, and numbers."""
    arguments = np.zeros(1, record)
    for name, value in fields.items():
        arguments[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    run(arguments)


def call_chunk(run: Any, buffers: Any, count: int, models: int, first_tile: int) -> None:
    buffers.arguments["count"] = count
    buffers.arguments["model_count"] = models
    buffers.arguments["first_tile"] = first_tile
    run(buffers.arguments)


def call_expand(
    run: Any, left: Any, right: Any, product: Any, first: int, ranks_before: int
) -> None:
    call(
        run,
        EXPANSION,
        left=left,
        right=right,
        product=product,
        count=len(product),
        columns=right.shape[1],
        rank=left.shape[1],
        first=first,
        ranks_before=ranks_before,
    )


def call_rank(
    run: Any,
    base: Any,
    values: Any,
    by_rank: Any,
    order: Any,
    last_bits: Any,
    skipped: int,
    is_delta: bool,
) -> None:
    call(
        run,
        RANKING,
        base=base,
        values=values,
        by_rank=by_rank,
        order=order,
        last_bits=last_bits,
        count=len(last_bits),
        width=len(by_rank),
        skipped=skipped,
        is_delta=is_delta,
    )


def call_unpack(
    run: Any,
    base: Any,
    entries: Any,
    values: Any,
    key: tuple[int, int],
    threshold: int,
    first_tile: int,
) -> int:
    model = np.zeros(1, MODEL)
    model["key_0"], model["key_1"] = key
    model["threshold"] = threshold
    call(
        run,
        UNPACKING,
        base=base,
        entries=entries,
        values=values,
        model=model,
        bits=np.empty((2, TILE), np.uint16),
        count=len(values),
        available=len(entries),
        first_tile=first_tile,
    )
    return int(model["kept"][0])


# Of kernels that are not given buffers.
CALLS: Final[Mapping[str, Kernel]] = {
    "expand": call_expand,
    "rank": call_rank,
    "unpack": call_unpack,
}

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
    if can_store(beside) and not find_doubt(beside):
        return beside
    users = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Where a user has no home, or says so with a relative path, the working directory is no place
    # for machine code.
    return Path(users, "dare") if os.path.isabs(users) else beside


def can_store(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return folder.is_dir() and os.access(folder, os.W_OK)


def find_doubt(path: Path | int) -> str | None:
    """Why what is there, or open, may be another user's, if it is there and may be."""
    if not hasattr(os, "geteuid"):
        return None
    with suppress(OSError):
        status = os.stat(path)
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
        return machine_code if is_whole and not find_doubt(file.fileno()) else None
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
        with open(unfinished, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(_digest(path, machine_code) + machine_code)
        unfinished.replace(path)
    with suppress(OSError):  # where the disk is full
        unfinished.unlink()
