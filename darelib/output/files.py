"""The folder in which an output is made: its lock, its journal, and its files, which are written at
any place and synced meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.models.tensorfile import BINARY, SEEK_LOCK, open_regular
from darelib.output.destination import Destination, explain_difference

if TYPE_CHECKING:
    from darelib.plan.tensorplan import PlannedFile

# In the folder beside the destination: the lock, and a folder of the merge's own with the new model
# and what is noted of it.
MADE: Final = "output"
JOURNAL_FILE: Final = "journal"
LOCK_FILE: Final = "lock"
LOCK_WORDS: Final = "dare is merging here: process"
# How much is reserved at a time, and the rate, in bytes a second, below which a system does it by
# writing zeros.
RESERVED_BYTES: Final = 1 << 26
ZEROS_PER_SECOND: Final = 8e9
# How often what others add to, while it is removed, is removed again, and after how many seconds.
REMOVALS: Final = 10
REMOVAL_SECONDS: Final = 0.02
# How systems say that a directory cannot be synced at all, or not even opened.
NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
NO_OPEN: Final = (*NO_SYNC, errno.EACCES, errno.EISDIR)
# Of the folder: nobody else can put anything in it, or read it. The output in it has its own.
PRIVATE: Final = 0o700
OTHERS_WRITE: Final = 0o022
NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)  # so that a link is an error


class Lock:
    """A locked file in the folder in which an output is made.

    The system unlocks it when the process ends.
    """

    def __init__(self, folder: Path, destination: str, shared: bool = False) -> None:
        """shared: with others that want the same, as the parts of one merge do."""
        self.folder = folder
        self.path = folder / LOCK_FILE
        self.new_parents: list[Path] = []  # that were made for it, the deepest first
        self.descriptor = -1
        self.is_ours = False  # the folder
        try:
            while not self._lock(destination, shared):
                self.close()
            self._sign(shared)
        except BaseException:
            self.release(keep=True)
            raise

    def _lock(self, destination: str, shared: bool) -> bool:
        """Lock what others would find. Gives whether it is: who had it may remove it any time."""
        try:
            if not self.folder.parent.exists():
                self.new_parents = [path for path in self.folder.parents if not path.exists()]
                os.makedirs(self.folder.parent, exist_ok=True)
            try:
                os.mkdir(self.folder, PRIVATE)
            except FileExistsError:
                check_ours(self.folder)
            self.is_ours = True
            self.descriptor = open_own(self.path, os.O_RDWR, 0o600)
            if try_lock(self.descriptor, shared):
                return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
            words = self._read().partition("\n")[0].split()
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(self.folder) or os.path.isfile(self.folder):
                raise explain_foreign(self.folder) from None
            return False
        self.close()  # so that nothing of the other's is removed
        holder = f"process {words[-1]}" if words else "of an unknown process"
        raise DareError(
            f"another merge ({holder}) is writing {destination!r}", "wait, or give another output"
        )

    def _read(self) -> str:
        return os.read(self.descriptor, 100).decode(errors="replace")

    def _sign(self, shared: bool) -> None:
        """Write who has the lock, unless it is somebody's file of the same name."""
        is_alone = not self.leftovers()  # before it is read: who shares it has signed it first
        content = self._read()
        # A lock of ours may have been cut short if there is nothing beside it.
        is_cut = LOCK_WORDS.startswith(content) and is_alone
        if not content.startswith(LOCK_WORDS) and not is_cut:
            self.close()
            raise explain_foreign(self.folder)
        if is_cut or not shared:
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            os.write(self.descriptor, f"{LOCK_WORDS} {os.getpid()}\n".encode())

    def leftovers(self) -> list[Path]:
        """What there is besides the lock, as an unfinished merge leaves it."""
        return [self.folder / name for name in os.listdir(self.folder) if name != LOCK_FILE]

    def clear(self) -> list[Path]:
        """Remove what there is besides the lock. Gives what could not be removed.

        What another machine does for a merge that has ended may add to it meanwhile; once its
        folder is gone, it cannot.
        """
        for number in range(REMOVALS):
            time.sleep(REMOVAL_SECONDS if number else 0)
            for path in self.leftovers():
                remove(path)
            if not self.leftovers():
                break
        return self.leftovers()

    def release(self, keep: bool) -> None:
        """Unlock, and remove the folder unless it has something to keep.

        Without the lock, only an empty one goes.
        """
        with suppress(OSError):
            is_over = self.descriptor >= 0 and not (keep and self.leftovers())
            if is_over and not self.clear():  # the lock marks what could not be removed as ours
                try:
                    self.path.unlink(missing_ok=True)
                except PermissionError:  # Windows removes nothing that is open
                    self.close()
                    self.path.unlink(missing_ok=True)
        own = [self.folder] if self.is_ours else []
        for path in (*own, *self.new_parents):
            with suppress(OSError):  # with something in it, it stays
                os.rmdir(path)
        self.close()

    def close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1
        with suppress(OSError):  # as where none is open
            os.close(descriptor)


def check_ours(folder: Path) -> None:
    """Refuse what this tool did not make, and where others may have put links to any file.

    A filesystem that has no modes shows the lock, which is private, as open to others, too.
    """
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise explain_foreign(folder)
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if not is_own and status.st_uid != find_owner(folder.parent):
        raise explain_foreign(folder, "belongs to another user")
    names = os.listdir(folder)
    modes = [os.lstat(folder / LOCK_FILE).st_mode] if LOCK_FILE in names else []
    if names and not any(map(stat.S_ISREG, modes)):
        raise explain_foreign(folder)
    if status.st_mode & OTHERS_WRITE and not any(mode & OTHERS_WRITE for mode in modes):
        raise explain_foreign(folder, "can be written to by other users")


def find_owner(folder: Path) -> int:
    """Whom what this process makes in a folder belongs to: network disks may give it to others, as
    NFS gives what root makes to nobody.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def explain_foreign(folder: Path, why: str = "exists and was not made by this tool") -> DareError:
    return DareError(f"{str(folder)!r} {why}", "move it elsewhere, or give another output")


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file, unless another process has locked it.

    shared: together with others that do the same.
    """
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # no locks here: a merge is better than none
        pass
    return True


class Journal:
    """A line for what the merge is and for the files that it is about, then lines for what of them
    is known to be on the disk.

    Each line begins with a checksum; one that does not match it, as after a crash, is skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        entries: list[Any] = []
        with suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
            for line in file:
                check, _, text = line.rstrip(b"\n").partition(b" ")
                if check == b"%08x" % zlib.crc32(text):
                    entries.append(json.loads(text))
        # After a first line that is damaged, what follows means nothing.
        is_sound = bool(entries) and isinstance(entries[0], dict)
        first = entries[0] if is_sound else {}
        self.identity: dict[str, Any] | None = first.get("merge")
        self.files: list[str] = first.get("files", [])
        self.done: list[Any] = list(itertools.chain(*entries[1:])) if is_sound else []

    def begin(self, identity: dict[str, Any], files: Sequence[PlannedFile] = ()) -> None:
        self.append({"merge": identity, "files": [file.name for file in files]})

    def append(self, entry: Any) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        # What a crash left of a line before it must end.
        write_synced(self.path, os.O_APPEND, [b"\n%08x %s\n" % (zlib.crc32(text), text)])


def list_journals(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/{JOURNAL_FILE}*"))


def name_folder(identity: dict[str, Any]) -> str:
    """The name of a merge's own folder: no two merges have the same, so that what is late for one
    cannot get into another's.
    """
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def read_journals(folder: Path, identity: dict[str, Any]) -> list[Journal]:
    """What all processes have noted of an unfinished merge, which must be this one."""
    found = map(Journal, list_journals(folder))
    journals = [journal for journal in found if journal.identity is not None]
    for journal in journals:
        if difference := explain_difference(journal.identity or {}, identity):
            raise DareError(
                f"the unfinished merge in {str(folder)!r} is another one: {difference}",
                "give the same models and settings; or remove it, as a merge without --resume does",
            )
    return journals


class Files:
    """Files that one process writes, and the journal of what is certain to be in them.

    What is written is sent to the disk while more is computed, so that the end need not be waited
    for. guard: another open file of the folder, and the path at which it must stay.
    """

    def __init__(
        self,
        destination: Destination,
        files: Sequence[PlannedFile],
        identity: dict[str, Any],
        journal: str,
        guard: tuple[int, Path],
    ) -> None:
        """identity: all that must be equal for a merge begun earlier to be continued."""
        self.destination = destination
        self.files = files
        self.identity = identity
        self.folder = destination.partial / name_folder(identity)
        self.made = self.folder / MADE
        self.paths = [
            self.made / file.name if destination.directory else self.made for file in files
        ]
        self.guard = guard
        self.journal = Journal(self.folder / journal)
        self.done: list[Any] = []  # by others, or by earlier runs
        self.descriptors: list[int] = []
        self._dirty: set[int] = set()  # descriptors of files with bytes that are not synced
        self._written: list[Any] = []  # what is not in the journal yet
        self._recorded = time.monotonic()  # when something last was
        self._mutex = threading.Lock()
        self._stopped = threading.Event()
        self._background: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def list_lost(self) -> set[str]:
        """The files that are not as long as they will be."""
        return {
            file.name
            for path, file in zip(self.paths, self.files, strict=True)
            if not path.is_file() or path.stat().st_size != file.size
        }

    def _open(self, journals: Sequence[Journal] = ()) -> None:
        """Open the files, and make those that are not there: what journals say of them is not
        true.
        """
        lost = self.list_lost()
        for path in self.paths:
            if path.parent not in (self.folder, self.made):  # of a module that is stored apart
                with suppress(FileExistsError):
                    os.mkdir(path.parent)
            self.descriptors.append(open_own(path, os.O_RDWR))
        self._check_still_ours()  # before anything is written
        for journal in journals:
            if lost.isdisjoint(journal.files):
                self.done += journal.done
            else:
                journal.path.unlink(missing_ok=True)
        for number, file in enumerate(self.files):
            if file.name in lost:
                reserve(self.descriptors[number], file.size)
            # Who made a file that is there may have come no further than its size.
            with open_regular(self.paths[number]) as made:
                if made.read(len(file.header)) != file.header:
                    self.write_at(number, memoryview(file.header), 0)
        self._sync()
        self.journal = Journal(self.journal.path)
        if self.journal.identity is None:
            self.journal.path.unlink(missing_ok=True)
            self.journal.begin(self.identity, self.files)
        self._background = ThreadPoolExecutor(1).submit(self._run)

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
        if self._background and self._background.done():
            self._background.result()  # which failed: the system reports an error only once
        with self._mutex:
            self._written.append(entry)

    def _run(self) -> None:
        while not self._stopped.wait(TUNING.flush_seconds):
            self._flush(time.monotonic() - self._recorded > TUNING.journal_seconds)

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
        if self._background:
            self._background.result()
        if record:
            self._flush(record)

    def _sync(self) -> None:
        for descriptor in self.descriptors:
            os.fsync(descriptor)

    def _close(self) -> None:
        self._stopped.set()  # else a process that was interrupted would wait for the background
        while self.descriptors:
            with suppress(OSError):
                os.close(self.descriptors.pop())


def reserve(descriptor: int, size: int) -> None:
    """Make a file as long as it will be and, where the system can, reserve its space on the disk.

    A merge then takes a sixth less time. A disk does that at once. Where it takes as long as
    writing zeros (on tmpfs it is just that), the rest is skipped.
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


def open_own(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file in a folder of ours, or make it, but not where a link leads."""
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | BINARY, mode)
    return os.open(path, flags | NO_FOLLOW | BINARY)


def write_synced(path: Path, flags: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a small file, and wait until it is on the disk."""
    descriptor = open_own(path, os.O_WRONLY | flags)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def limit_mode(path: Path, like: Path) -> None:
    """Open a file to nobody to whom the one that it replaces, or is a copy of, is not open."""
    if like.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
        narrower = mode & ~(0o077 & ~like.stat().st_mode)
        if narrower != mode:
            path.chmod(narrower)


def remove(path: Path) -> None:
    """Remove a file, or a directory and what is in it, as far as the system allows it."""
    # shutil.rmtree opens every directory, and leaves all that is in one that it cannot open.
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            os.unlink(path)
            return
        for name in os.listdir(path):
            remove(path / name)
        os.rmdir(path)
