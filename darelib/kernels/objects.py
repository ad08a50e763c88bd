"""Object files on disk: where kernels are kept, and whether what is there may be run."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from darelib.kernels import KernelSpec
from darelib.kernels.machine import identify

# What stands beside an object file that is being made, and how long that is believed unless it is
# renewed.
MAKING: Final = ".making"
MAKING_SECONDS: Final = 30


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
    existing = filter(os.path.exists, (folder, *folder.absolute().parents))
    nearest = next(existing, folder)
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
        is_whole = stored == _digest(path, machine_code) + machine_code
        if is_whole and not find_doubt(path, file.fileno()):
            return machine_code
    return None


def read_objects(paths: Mapping[KernelSpec, Path]) -> dict[KernelSpec, bytes]:
    """The code in those of the files that can be used."""
    stored = {code: read_object(path) for code, path in paths.items()}
    return {code: machine_code for code, machine_code in stored.items() if machine_code}


def _digest(path: Path, machine_code: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + machine_code).digest()


@contextmanager
def announced(paths: Collection[Path]) -> Iterator[None]:
    """Say of object files that they are being made, by processes that nobody waits for.

    Unless that fails, which leaves everything as it was.
    """
    parents = {folder for path in paths for folder in path.parents}
    missing = [folder for folder in parents if not os.path.exists(folder)]
    for path in paths:
        with suppress(OSError):
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.with_suffix(MAKING).touch()
    try:
        yield
    except BaseException:
        for path in paths:
            withdraw(path)
        for folder in sorted(missing, reverse=True):  # those inside others first
            with suppress(OSError):
                folder.rmdir()
        raise


def withdraw(path: Path) -> None:
    with suppress(OSError):
        path.with_suffix(MAKING).unlink()


def is_announced(path: Path) -> bool:
    """Whether an object file will soon be there; who says so and dies is not believed for long."""
    with suppress(OSError):
        return abs(time.time() - path.with_suffix(MAKING).stat().st_mtime) < MAKING_SECONDS
    return False


def store(machine_code: bytes, path: Path) -> None:
    """Keep what was compiled and proved, if that is possible, where nobody else can write to it."""
    unfinished = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open(unfinished, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(_digest(path, machine_code) + machine_code)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
    withdraw(path)
