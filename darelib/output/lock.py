"""The lock of a destination: one merge at a time writes it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from darelib.models.tensorfile import BINARY
from darelib.output.journal import write_all
from darelib.text import DareError

LOCK_FILE: Final = "lock"
LOCK_WORDS: Final = "dare is merging here: process"


class Lock:
    """A locked file in the folder in which an output is made. The system unlocks it when the process ends."""

    def __init__(self, folder: Path, destination: str) -> None:
        self.folder, self.path, self.descriptor = folder, folder / LOCK_FILE, -1
        made = False
        try:
            while not self._holds_path():  # whoever had the lock may remove the folder at any moment
                self.close()
                with suppress(FileExistsError):
                    os.mkdir(folder)
                    made = True
                self._check_place()
                with suppress(FileNotFoundError):
                    self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
                    self._acquire(destination)
            self._check_words()
            words = f"{LOCK_WORDS} {os.getpid()}\n".encode()
            write_all(self.descriptor, words)
            os.ftruncate(self.descriptor, len(words))
        except BaseException:
            if made and self.descriptor >= 0:
                self.release(keep=False)
            elif made:
                with suppress(OSError):  # somebody else may be in it
                    os.rmdir(folder)
            self.close()
            raise

    def _check_place(self) -> None:
        """Refuse what has the folder's name only by chance: a folder of ours has a lock before anything else."""
        try:
            names = os.listdir(self.folder)
            foreign = bool(names) and not (LOCK_FILE in names and stat.S_ISREG(os.stat(self.path).st_mode))
        except FileNotFoundError:  # it has just been removed, unless it is a link to nothing
            foreign = os.path.islink(self.folder)
        except OSError:
            foreign = True
        if foreign:
            raise self._refuse()

    def _check_words(self) -> None:
        """Refuse a lock of somebody else. One of ours may have been cut short if there is nothing beside it."""
        content = self._read()
        if not content.startswith(LOCK_WORDS) and (self.has_leftovers() or not LOCK_WORDS.startswith(content)):
            self.close()
            raise self._refuse()

    def _refuse(self) -> DareError:
        return DareError(f"{str(self.folder)!r} is in the way", "this tool did not make it; move it elsewhere")

    def _acquire(self, destination: str) -> None:
        if not try_lock(self.descriptor):
            words = self._read().split()
            self.close()
            holder = f"process {words[-1]}" if words else "of an unknown process"
            raise DareError(f"another merge ({holder}) is writing {destination!r}", "wait, or give another output")

    def _read(self) -> str:
        content = os.read(self.descriptor, 100).decode(errors="replace")
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return content

    def _holds_path(self) -> bool:
        """Whether the file that is locked is still the one that others would find."""
        try:
            return self.descriptor >= 0 and os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def has_leftovers(self) -> bool:
        """Whether there is anything besides the lock, as an unfinished merge leaves it."""
        return any(name != LOCK_FILE for name in os.listdir(self.folder))

    def clear(self) -> None:
        """Remove everything but the lock, as far as the system allows it."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if name != LOCK_FILE:
                    remove(self.folder / name)

    def release(self, keep: bool) -> None:
        """Unlock, and remove the folder unless it has something to keep."""
        with suppress(OSError):
            if not (keep and self.has_leftovers()):
                self.clear()  # while nobody else can have begun in it
                if os.name == "nt":  # where open files cannot be removed
                    self.close()
                if not self.has_leftovers():  # the lock marks what could not be removed as ours
                    self.path.unlink(missing_ok=True)
                os.rmdir(self.folder)
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file, unless another process has locked it."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # far behind the words, which others must be able to read
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            finally:
                os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a filesystem without locks: a merge is better than none
        pass
    return True


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
