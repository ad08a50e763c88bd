"""An output in the making: written in a folder beside its destination, and renamed to it when it is complete.

Whatever happens, and whenever, the destination is the old model or the new one. No library does this for directories.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError, InputChanged
from darelib.core.tuning import TUNING
from darelib.models.tensorfile import BINARY, SEEK_LOCK, read_at
from darelib.output.destination import Destination, check_replaceable, digest_of
from darelib.output.journal import Journal, explain_difference, write_synced
from darelib.output.lock import LOCK_FILE, LOCK_WORDS, Lock, remove, try_lock
from darelib.plan.files import PlannedFile

# In the folder beside the destination: the new model, the one that it replaces, and the journal.
MADE: Final = "output"
REPLACED: Final = "replaced"
JOURNAL_FILE: Final = "journal"
# What is reserved first, and the rate, in bytes a second, below which it must be done by writing zeros.
RESERVED_BYTES: Final = 1 << 26
ZEROS_PER_SECOND: Final = 8e9
# How systems say that a directory cannot be synced at all, or not even opened, as on Windows.
NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
NO_OPEN: Final = (*NO_SYNC, errno.EACCES, errno.EISDIR)


class Flusher:
    """Sends to the disk what is written, while more is computed, so that there is little to wait for at the end.

    record: is called with what is certain to be on the disk.
    """

    def __init__(self, record: Callable[[list[Any]], None]) -> None:
        self._record = record
        self._dirty: set[int] = set()  # descriptors
        self._written: list[Any] = []  # and not recorded yet
        self._error: OSError | None = None
        self._mutex = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.start = self._thread.start

    def mark(self, descriptor: int) -> None:
        """Remember that a file has unsynced bytes."""
        with self._mutex:
            self._dirty.add(descriptor)

    def note(self, entry: Any) -> None:
        """Remember that something is written; once it is on the disk, it goes to the journal."""
        self.check()
        with self._mutex:
            self._written.append(entry)

    def check(self) -> None:
        """Raise an error of the background: the system reports it only once."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        recorded = time.monotonic()
        while not self._stopped.wait(TUNING.flush_seconds):
            due = time.monotonic() - recorded > TUNING.journal_seconds
            try:
                self._flush(due)
            except OSError as error:
                self._error = error
                return
            recorded = time.monotonic() if due else recorded

    def _flush(self, record: bool) -> None:
        with self._mutex:
            dirty, self._dirty = self._dirty, set()
            written, self._written = (self._written, []) if record else ([], self._written)
        for descriptor in dirty:
            os.fsync(descriptor)
        if written:
            self._record(written)

    def stop(self, record: bool = False) -> None:
        """record: also see to it that all is on the disk and in the journal."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if record:
            self.check()
            self._flush(record)


class Files:
    """Files of tensors in the making that one process writes, and the journal of what is certain to be in them."""

    def __init__(
        self, destination: Destination, files: Sequence[PlannedFile], journal: str
    ) -> None:
        self.destination, self.files, self.folder = destination, files, destination.partial
        self.made = self.folder / MADE
        self.paths = [
            self.made / file.name if destination.directory else self.made for file in files
        ]
        self.journal = Journal(self.folder / journal)
        self.flusher = Flusher(self._record)
        self.note = self.flusher.note
        self.descriptors: list[int] = []
        self.marks: list[
            tuple[int, Path]
        ] = []  # what else is open, and must stay what others would find

    def are_there(self) -> list[bool]:
        """Which files are as long as they will be."""
        sizes = [path.stat().st_size if path.is_file() else -1 for path in self.paths]
        return [size == file.size for size, file in zip(sizes, self.files, strict=True)]

    def _open(self) -> None:
        """Open the files, and make those that are not there: what a journal of their own says is not true of them."""
        for number, there in enumerate(self.are_there()):
            if not there:
                remove(self.folder / shard_journal(self.files[number]))
            self.descriptors.append(
                os.open(self.paths[number], os.O_RDWR | os.O_CREAT | BINARY, 0o666)
            )
            self._check_names(self.marks)  # before anything is written
            if not there:
                reserve(self.descriptors[-1], self.files[number].size)
            # Who made a file that is there may have come no further than its size.
            found = bytearray(len(self.files[number].header))
            if (
                read_at(self.descriptors[-1], memoryview(found), 0) < len(found)
                or found != self.files[number].header
            ):
                self.write_at(number, memoryview(self.files[number].header), 0)

    def _sync(self) -> None:
        for descriptor in self.descriptors:
            os.fsync(descriptor)

    def _record(self, entries: list[Any]) -> None:
        self._check_still_ours()
        self.journal.append(entries)

    def _check_still_ours(self) -> None:
        self._check_names([*self.marks, *zip(self.descriptors, self.paths, strict=True)])

    def _check_names(self, opened: Sequence[tuple[int, Path]]) -> None:
        """Somebody may have removed the folder by hand, and another merge may have begun in one of the same name."""
        with suppress(FileNotFoundError):
            if all(
                os.path.samestat(os.fstat(descriptor), path.stat()) for descriptor, path in opened
            ):
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
            view, offset = view[done:], offset + done
        self.flusher.mark(descriptor)

    def _close(self) -> None:
        while self.descriptors:
            with suppress(OSError):
                os.close(self.descriptors.pop())


class Shard(Files):
    """One file of an output, made by a process that is not the one that publishes it, with a journal of its own.

    Another process may make the same one at the same time: both write the same bytes. What their journals then lack is
    done again.
    """

    def __init__(
        self, destination: Destination, file: PlannedFile, identity: dict[str, Any]
    ) -> None:
        super().__init__(destination, [file], shard_journal(file))
        path = self.folder / JOURNAL_FILE
        self.marks = [(os.open(path, os.O_RDONLY | BINARY), path)]
        try:
            # The merge that asked for this file may have failed, and another one have begun in its place.
            whole = Journal(path)  # of a process that went on alone
            check_same_merge(whole, identity, self.folder)
            if whole.done and not all(self.are_there()):
                raise DareError(
                    f"{file.name!r} is gone from {str(self.folder)!r}",
                    "remove that folder, and merge again",
                )
            self._open()
            self.journal = Journal(self.journal.path)  # which is gone, if the file was
            if self.journal.identity == (mark := mark_of(identity)) and self.journal.path.exists():
                os.truncate(self.journal.path, self.journal.length)
            else:
                remove(self.journal.path)
                self.journal = Journal(self.journal.path)
                self._sync()
                self.journal.append(mark)
            sync_directory(self.made)
        except BaseException:
            self._close()
            raise
        self.done = [*whole.done, *self.journal.done]
        self.flusher.start()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Note what is done. What failed to reach the disk is an error even if nothing else is."""
        try:
            self.flusher.stop(record=True)
        except OSError:
            if kind is None:
                raise
        finally:
            self._close()

    def _close(self) -> None:
        super()._close()
        while self.marks:
            os.close(self.marks.pop()[0])


class Output(Files):
    """What a merge writes. publish() gives it its name; what is not published is removed or kept to be continued."""

    def __init__(
        self,
        destination: Destination,
        files: Sequence[PlannedFile],
        identity: dict[str, Any],
        resume: bool,
    ) -> None:
        """identity: all that must be equal for a merge begun earlier to be continued."""
        self.resume = resume
        self.lock = Lock(destination.partial, destination.name)
        super().__init__(destination, files, JOURNAL_FILE)
        self.marks = [(self.lock.descriptor, self.lock.path)]
        self.done: list[Any] = []  # by earlier runs
        keep = True  # what an earlier run left, until it is known to be of no use
        try:
            self._restore_replaced()
            if not self._continue(identity):
                keep = False
                self._begin(identity)
            self.flusher.start()
        except BaseException:
            self.discard(keep)
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.discard(keep=self.resume and error is not None and not isinstance(error, InputChanged))

    def _restore_replaced(self) -> None:
        """Undo what a crash between two renames left: the destination's old content without its name."""
        old, target = self.folder / REPLACED, self.destination.path
        if not old.exists():
            return
        if target.is_dir() and not os.listdir(target):
            os.rmdir(target)
        if not target.exists():
            os.rename(old, target)
        elif self.made.exists():  # so the new one was not put there, but something else was
            raise DareError(
                f"the model that was at {str(target)!r} is in {str(old)!r}",
                "move one of them elsewhere",
            )

    def _continue(self, identity: dict[str, Any]) -> bool:
        """Continue what an earlier run left, if that is wanted and possible."""
        if not self.lock.leftovers():
            if self.resume:
                LOG.info("there is no unfinished merge to resume; starting from the beginning")
            return False
        begun = self.journal.identity
        # What parts have not made yet is not missed.
        complete = begun is not None and (not self.journal.done or all(self.are_there()))
        if not self.resume or begun is None:
            what = "is removed (--resume would continue it)" if complete else "is removed"
            LOG.warning(f"an unfinished merge in {self.folder} {what}")
            return False
        if difference := explain_difference(begun, identity):
            raise DareError(
                f"the unfinished merge in {str(self.folder)!r} is another one: {difference}",
                "run without --resume to remove it and start again",
            )
        if not complete:
            LOG.warning(
                f"the unfinished merge in {self.folder} cannot be continued: its files are not complete"
            )
            return False
        os.truncate(self.journal.path, self.journal.length)
        self._open()
        journals = [Journal(self.folder / shard_journal(file)) for file in self.files]
        parts = [journal.done for journal in journals if journal.identity == mark_of(identity)]
        self.done = list(itertools.chain(self.journal.done, *parts))
        return True

    def _begin(self, identity: dict[str, Any]) -> None:
        for path in self.lock.leftovers():
            remove(path)
        self.journal = Journal(self.journal.path)
        if self.destination.directory:
            os.mkdir(self.made)
        self._open()
        self._sync()
        self.journal.append(identity)

    def write_file(self, name: str, content: bytes | Path) -> None:
        """A small file of a model directory: of this content, or a copy of that file."""
        os.makedirs((self.made / name).parent, exist_ok=True)
        write_synced(self.made / name, os.O_TRUNC, read_pieces(content))

    def publish(
        self, side: Mapping[str, bytes | Path], digests: Mapping[str, str], check_inputs: Callable[[], None],
        force: bool, interrupts: Interrupts,
    ) -> None:  # fmt: skip
        """Complete the output and give it its name.

        side: the files of a model directory besides the tensors; digests: those that copied ones must have.
        check_inputs: raises an error if an input changed.
        """
        for name, content in side.items():
            interrupts.check()
            self.write_file(name, content)
        check_inputs()
        for name, digest in digests.items():
            if digest_of(self.made / name) != digest:
                raise DareError(
                    f"{name!r} changed while it was merged",
                    "merge again, and change no input meanwhile",
                )
        self._commit(force)

    def _commit(self, force: bool) -> None:
        """Make the bytes durable, then the name."""
        self.flusher.stop()
        self.flusher.check()
        self._sync()
        self._check_still_ours()
        while self.descriptors:
            os.close(self.descriptors.pop())
        if self.destination.directory:
            for place, _, _ in os.walk(self.made, topdown=False):
                sync_directory(Path(place))
        check_replaceable(
            self.destination, force
        )  # somebody may have put something there meanwhile
        # From here on what lies in the folder may be the old model, which must not be continued.
        self.journal.path.unlink()
        self.resume = False
        sync_directory(self.folder)
        replace(self.made, self.destination.path)
        try:
            sync_directory(self.destination.path.parent)
        except OSError as error:
            raise DareError(
                f"{self.destination.name!r} is in place, but may not survive a power failure: its directory cannot be "
                f"synced ({error.strerror or error})",
                "check the disk, and merge again",
            ) from None

    def discard(self, keep: bool = False) -> None:
        """Remove what is left, which may be what was replaced; or keep it, to be continued."""
        with suppress(OSError):  # of what is kept, the rest is done again
            self.flusher.stop(record=keep and bool(self.descriptors))
        self._close()
        try:
            self._restore_replaced()
        except (OSError, DareError):
            keep = True  # the old model is still in the folder
        self.lock.release(keep)


def shard_journal(file: PlannedFile) -> str:
    return f"{JOURNAL_FILE}-{file.name}"


def mark_of(identity: dict[str, Any]) -> dict[str, Any]:
    """What the journal of a shard begins with: which merge it belongs to."""
    return {"merge": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()}


@contextmanager
def share_folder(destination: Destination, identity: dict[str, Any]) -> Iterator[None]:
    """Work in the folder of an output beside others that do the same merge. The first one makes it, in one step.

    Meanwhile nobody else can publish or remove it, so far as the filesystem has locks.
    """
    folder = destination.partial
    if not (folder / LOCK_FILE).exists():
        new = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        try:
            os.makedirs(new / MADE)
            write_synced(new / LOCK_FILE, 0, [f"{LOCK_WORDS} {os.getpid()}\n".encode()])
            Journal(new / JOURNAL_FILE).append(identity)
            sync_directory(new)
            with suppress(OSError):  # somebody else was faster
                os.rename(new, folder)
        finally:
            remove(new)
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | BINARY)
    except FileNotFoundError:
        raise DareError(
            f"{str(folder)!r} is in the way", "this tool did not make it; move it elsewhere"
        ) from None
    try:
        if not try_lock(descriptor, shared=True):
            raise DareError(
                f"another merge is writing {destination.name!r}", "wait, or give another output"
            )
        check_same_merge(Journal(folder / JOURNAL_FILE), identity, folder)
        yield
    finally:
        os.close(descriptor)


def check_same_merge(journal: Journal, identity: dict[str, Any], folder: Path) -> None:
    if journal.identity is None:
        raise DareError(
            f"{str(folder)!r} is in the way: no merge can be continued there",
            "remove it, and try again",
        )
    if difference := explain_difference(journal.identity, identity):
        hint = "give all parts the same models and settings, or remove that folder"
        raise DareError(
            f"the unfinished merge in {str(folder)!r} is another one: {difference}", hint
        )


@contextmanager
def explain_write_errors(destination: Destination, resume: bool) -> Iterator[None]:
    """What the system refuses while an output is written, as an error that says what to do."""
    try:
        yield
    except OSError as error:
        kept = resume and os.path.exists(destination.partial / JOURNAL_FILE)
        again = f"run again: what is done is in {destination.partial}" if kept else "try again"
        raise DareError(
            f"cannot write {destination.name!r}: {error.strerror or error}",
            f"what was there before is unchanged; fix that and {again}",
        ) from None


def reserve(descriptor: int, size: int) -> None:
    """Make a file as long as it will be and, where the system can, reserve its space on the disk.

    A disk does that at once. Where it takes as long as writing zeros (on tmpfs it is just that), the rest is skipped.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    function = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    place, step = 0, RESERVED_BYTES
    while function is not None and place < size:
        piece, started = min(step, size - place), time.perf_counter()
        failed = function(
            ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(place), ctypes.c_int64(piece)
        )
        if failed and ctypes.get_errno() == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if failed or time.perf_counter() - started > piece / ZEROS_PER_SECOND:
            break
        place, step = place + piece, 2 * step
    os.ftruncate(descriptor, size)


def read_pieces(content: bytes | Path) -> Iterator[bytes]:
    """What is to be written: the bytes as they are, or what a file holds, a piece at a time."""
    if isinstance(content, bytes):
        yield content
        return
    try:
        with open(content, "rb") as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise InputChanged(
            f"cannot read {str(content)!r} any more: {error.strerror}", "merge again"
        ) from None


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system lets a directory be opened and synced."""
    folder = -1
    try:
        folder = os.open(path, os.O_RDONLY)
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (NO_SYNC if folder >= 0 else NO_OPEN):
            raise
    finally:
        if folder >= 0:
            with suppress(OSError):  # nothing was written through it
                os.close(folder)


def replace(made: Path, target: Path) -> None:
    """Give what was made its name. What had that name goes, at the same instant, to where the new one was made."""
    if not made.is_dir() or not target.exists():
        os.replace(made, target)
    elif not exchange(made, target):
        # Without a way to exchange names there is an instant in which neither has it; what was replaced is put back
        # if the second step fails, now or, after a crash, by the next run.
        os.rename(target, made.with_name(REPLACED))
        os.rename(made, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, if this system can."""
    for function, arguments in (
        (
            "renameat2",
            (-100, os.fsencode(one), -100, os.fsencode(other), 2),
        ),  # Linux: AT_FDCWD, RENAME_EXCHANGE
        ("renamex_np", (os.fsencode(one), os.fsencode(other), 2)),  # macOS: RENAME_SWAP
    ):
        with suppress(AttributeError, OSError, TypeError):
            return bool(getattr(ctypes.CDLL(None), function)(*arguments) == 0)
    return False
