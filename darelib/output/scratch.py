"""A folder of a process's own beside what it writes. The next process removes what a killed one
left.
"""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from darelib.core.text import DareError
from darelib.models.tensorfile import BINARY
from darelib.output.lock import LOCK_FILE, Lock, try_lock


@contextmanager
def make_scratch(prefix: Path) -> Iterator[Path]:
    """A new folder whose name begins like this, which goes away in the end."""
    os.stat(prefix.parent)  # which fails where there is none
    try:
        lock = _make(prefix)
    except DareError:  # another process has just looked whether it is abandoned
        lock = _make(prefix)
    try:
        if _has_locks(lock):
            _remove_abandoned(prefix)
        yield lock.folder
    finally:
        lock.release(keep=False)


def _make(prefix: Path) -> Lock:
    folder = prefix.with_name(f"{prefix.name}{secrets.token_hex(4)}")
    return Lock(folder, str(folder))


def _has_locks(lock: Lock) -> bool:
    """Whether a lock keeps others out here: if not, a folder that is used looks abandoned."""
    descriptor = os.open(lock.path, os.O_RDWR | BINARY)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(prefix: Path) -> None:
    for folder in prefix.parent.glob(f"{glob.escape(prefix.name)}*"):
        # What is locked is another process's, and what has no lock is not ours.
        with suppress(DareError, OSError):
            if (folder / LOCK_FILE).exists():
                Lock(folder, str(folder)).release(keep=False)
