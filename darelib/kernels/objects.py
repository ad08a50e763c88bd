"""Object files on disk: where kernels are kept, and whether what is found there may be run."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from darelib.kernels import KernelSpec
from darelib.kernels.machine import identify

# What stands beside an object file that is being made, and how long that is believed unless it is renewed.
MAKING: Final = ".making"
MAKING_SECONDS: Final = 30


def object_name(code: KernelSpec) -> str:
    return f"dare.{code}.{identify()}.o"


def code_of(name: str) -> KernelSpec:
    """What an object file of this name holds."""
    return KernelSpec(*name.split(".")[1].split("-"))


def find_cache() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, or beside this file, or in the user's cache."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    beside = Path(__file__).absolute().parent / "__pycache__" / "kernels"
    with suppress(OSError):
        beside.mkdir(mode=0o755, parents=True, exist_ok=True)
    if os.access(beside, os.W_OK) and not find_doubt(beside):
        return beside
    users = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    # Where a user has no home, or says so with a relative path, the working directory is no place for machine code.
    return Path(users, "dare") if os.path.isabs(users) else beside


def can_keep(folder: Path) -> bool:
    """Whether something can be stored there, or that folder made."""
    nearest = next(
        (path for path in (folder, *folder.absolute().parents) if os.path.exists(path)), folder
    )
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK)


def find_doubt(path: Path) -> str | None:
    """Why what is there may be another user's, if it is there and may be."""
    with suppress(OSError):
        return _doubt(path.stat(), path)
    return None


def _doubt(told: os.stat_result, path: Path) -> str | None:
    if not hasattr(os, "geteuid"):
        return None
    if told.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    writable = told.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"others can write to {path} (chmod go-w would change that)" if writable else None


def read_object(path: Path) -> bytes | None:
    """The code in an object file; one that a crash cut short, or that was given another name, must not be run."""
    with suppress(OSError), open(path, "rb") as file:
        stored = file.read()
        whole = _digest(path, stored[32:]) == stored[:32]
        return stored[32:] if whole and not _doubt(os.fstat(file.fileno()), path) else None
    return None


def _digest(path: Path, made: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + made).digest()


@contextmanager
def announced(paths: Collection[Path]) -> Iterator[None]:
    """Say of object files that they are being made, by processes that nobody waits for yet; unless that fails."""
    folders = dict.fromkeys(
        folder for path in paths for folder in path.parents if not os.path.exists(folder)
    )
    for path in paths:
        with suppress(OSError):
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.with_suffix(MAKING).touch()
    try:
        yield
    except BaseException:
        for path in paths:
            withdraw(path)
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()
        raise


def withdraw(path: Path) -> None:
    with suppress(OSError):
        path.with_suffix(MAKING).unlink()


def is_announced(path: Path) -> bool:
    """Whether an object file will soon be there: a process that says so and dies is not believed for long."""
    with suppress(OSError):
        return abs(time.time() - path.with_suffix(MAKING).stat().st_mtime) < MAKING_SECONDS
    return False


def store(made: bytes, path: Path) -> None:
    """Keep what was compiled and proved, if that can be done, so that nobody else can write to it."""
    unfinished = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open(unfinished, "xb", opener=partial(os.open, mode=0o644)) as file:
            file.write(_digest(path, made) + made)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
    withdraw(path)
