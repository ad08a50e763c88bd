"""Files of tensors in the making: written at any place, synced meanwhile, noted in a journal."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from darelib.core.tuning import TUNING
from darelib.models.tensorfile import BINARY, SEEK_LOCK, open_regular
from darelib.output.destination import Destination
from darelib.output.journal import Journal
from darelib.output.lock import remove
from darelib.plan.tensors import PlannedFile

# In the folder beside the destination: the new model, and the journal.
MADE: Final = "output"
JOURNAL_FILE: Final = "journal"
# How much is reserved at a time, and the rate, in bytes a second, below which a system does it by
# writing zeros.
RESERVED_BYTES: Final = 1 << 26
ZEROS_PER_SECOND: Final = 8e9
# How systems say that a directory cannot be synced at all, or not even opened.
NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
NO_OPEN: Final = (*NO_SYNC, errno.EACCES, errno.EISDIR)


class Files:
    """Files that one process writes, and the journal of what is certain to be in them.

    What is written is sent to the disk while more is computed, so that the end need not be waited
    for. guard: another open file of the folder, and the path at which it must stay.
    """

    def __init__(
        self,
        destination: Destination,
        files: Sequence[PlannedFile],
        journal: str,
        guard: tuple[int, Path],
    ) -> None:
        self.destination = destination
        self.files = files
        self.folder = destination.partial
        self.made = self.folder / MADE
        self.paths = [
            self.made / file.name if destination.directory else self.made for file in files
        ]
        self.guard = guard
        self.journal = Journal(self.folder / journal)
        self.descriptors: list[int] = []
        self._dirty: set[int] = set()  # descriptors of files with bytes that are not synced
        self._written: list[Any] = []  # what is not in the journal yet
        self._recorded = time.monotonic()  # when something last was
        self._error: OSError | None = None  # of the background: the system reports it only once
        self._mutex = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        return self

    def list_complete(self) -> list[bool]:
        """Which files are as long as they will be."""
        sizes = [path.stat().st_size if path.is_file() else -1 for path in self.paths]
        return [size == file.size for size, file in zip(sizes, self.files, strict=True)]

    def _open(self) -> None:
        """Open the files, and make those that are not there: their own journals are not true."""
        complete = self.list_complete()
        for path in self.paths:
            self.descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o666))
        self._check_still_ours()  # before anything is written
        for number, file in enumerate(self.files):
            if not complete[number]:
                remove(self.folder / name_journal(file))
                reserve(self.descriptors[number], file.size)
            # Who made a file that is there may have come no further than its size.
            with open_regular(self.paths[number]) as made:
                if made.read(len(file.header)) != file.header:
                    self.write_at(number, memoryview(file.header), 0)

    def _check_still_ours(self) -> None:
        """Refuse to go on in a folder that somebody removed: another merge may have begun there."""
        opened = [self.guard, *zip(self.descriptors, self.paths, strict=True)]
        with suppress(FileNotFoundError):
            if all(os.path.samestat(os.fstat(number), path.stat()) for number, path in opened):
                return
        raise OSError(errno.ENOENT, f"somebody removed {self.folder} in the meantime")

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        descriptor = self.descriptors[file]
        while view:
            if hasattr(os, "pwrite"):
                done = os.pwrite(descriptor, view, offset)
            else:
                with SEEK_LOCK:
                    os.lseek(descriptor, offset, os.SEEK_SET)
                    done = os.write(descriptor, view)
            view = view[done:]
            offset += done
        with self._mutex:
            self._dirty.add(descriptor)

    def note(self, entry: Any) -> None:
        """Remember that something is written; once it is on the disk, it goes to the journal."""
        if self._error is not None:
            raise self._error
        with self._mutex:
            self._written.append(entry)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(TUNING.flush_seconds):
                self._flush(time.monotonic() - self._recorded > TUNING.journal_seconds)
        except OSError as error:
            self._error = error

    def _flush(self, record: bool) -> None:
        """Send what is written to the disk. record: and then say so in the journal."""
        with self._mutex:
            dirty = self._dirty
            written = self._written
            self._dirty = set()
            self._written = [] if record else written
        for descriptor in dirty:
            os.fsync(descriptor)
        if record and written:
            self._check_still_ours()
            self.journal.append(written)
            self._recorded = time.monotonic()

    def _stop(self, record: bool) -> None:
        """Stop the background, and raise what failed there. record: flush for the last time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error
        if record:
            self._flush(record)

    def _sync(self) -> None:
        for descriptor in self.descriptors:
            os.fsync(descriptor)

    def _close(self) -> None:
        while self.descriptors:
            with suppress(OSError):
                os.close(self.descriptors.pop())


def name_journal(file: PlannedFile) -> str:
    """The journal of a file that another process makes than the one that publishes it."""
    return f"{JOURNAL_FILE}-{file.name}"


def reserve(descriptor: int, size: int) -> None:
    """Make a file as long as it will be and, where the system can, reserve its space on the disk.

    A disk does that at once. Where it takes as long as writing zeros (on tmpfs it is just that),
    the rest is skipped.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    allocate: Any = getattr(libc, "fallocate", None)
    for start in range(0, size if allocate else 0, RESERVED_BYTES):
        count = min(RESERVED_BYTES, size - start)
        began = time.perf_counter()
        failed = allocate(descriptor, 0, ctypes.c_int64(start), ctypes.c_int64(count))
        if failed and ctypes.get_errno() == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if failed or time.perf_counter() - began > count / ZEROS_PER_SECOND:
            break
    os.ftruncate(descriptor, size)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system lets it be opened and synced."""
    folder = -1
    try:
        folder = os.open(path, os.O_RDONLY)
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (NO_SYNC if folder >= 0 else NO_OPEN):
            raise
    finally:
        with suppress(OSError):  # nothing was written through it, if it is open at all
            os.close(folder)
