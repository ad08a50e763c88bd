"""The lock of a destination: one merge at a time writes it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from darelib.core.text import DareError
from darelib.models.tensorfile import BINARY
from darelib.output.journal import write_all

LOCK_FILE: Final = "lock"
LOCK_WORDS: Final = "dare is merging here: process"


class Lock:
    """A locked file in the folder in which an output is made.

    The system unlocks it when the process ends.
    """

    def __init__(self, folder: Path, destination: str) -> None:
        self.folder = folder
        self.path = folder / LOCK_FILE
        self.new_parents: list[Path] = []  # that were made for it, the deepest first
        self.descriptor = -1
        try:
            while not self._lock(destination):
                self._close()
            self._sign()
        except BaseException:
            self.release(keep=True)
            raise

    def _lock(self, destination: str) -> bool:
        """Lock what others would find. Gives whether it is: who had it may remove it any time."""
        try:
            if not self.folder.parent.exists():
                self.new_parents = [path for path in self.folder.parents if not path.exists()]
                os.makedirs(self.folder.parent, exist_ok=True)
            with suppress(FileExistsError):
                os.mkdir(self.folder)
            names = os.listdir(self.folder)
            if names and not (LOCK_FILE in names and stat.S_ISREG(os.stat(self.path).st_mode)):
                raise explain_foreign(self.folder)
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
            if try_lock(self.descriptor):
                return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
            words = os.read(self.descriptor, 100).decode(errors="replace").split()
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(self.folder) or os.path.isfile(self.folder):
                raise explain_foreign(self.folder) from None
            return False
        self._close()  # so that nothing of the other's is removed
        holder = f"process {words[-1]}" if words else "of an unknown process"
        raise DareError(
            f"another merge ({holder}) is writing {destination!r}", "wait, or give another output"
        )

    def _sign(self) -> None:
        """Write who has the lock, unless it is somebody's file of the same name."""
        content = os.read(self.descriptor, 100).decode(errors="replace")
        # A lock of ours may have been cut short if there is nothing beside it.
        is_cut = LOCK_WORDS.startswith(content) and not self.leftovers()
        if not content.startswith(LOCK_WORDS) and not is_cut:
            self._close()
            raise explain_foreign(self.folder)
        words = f"{LOCK_WORDS} {os.getpid()}\n".encode()
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        write_all(self.descriptor, words)
        os.ftruncate(self.descriptor, len(words))

    def leftovers(self) -> list[Path]:
        """What there is besides the lock, as an unfinished merge leaves it."""
        return [self.folder / name for name in os.listdir(self.folder) if name != LOCK_FILE]

    def release(self, keep: bool) -> None:
        """Unlock, and remove the folder unless it has something to keep.

        Without the lock, only an empty one goes.
        """
        with suppress(OSError):
            if self.descriptor >= 0 and not (keep and self.leftovers()):
                for path in self.leftovers():  # while nobody else can have begun in it
                    remove(path)
                if not self.leftovers():  # the lock marks what could not be removed as ours
                    self.path.unlink(missing_ok=True)
            os.rmdir(self.folder)
        for path in self.new_parents:
            with suppress(OSError):  # with an output in it, it stays
                os.rmdir(path)
        self._close()

    def _close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1
        with suppress(OSError):  # as where none is open
            os.close(descriptor)


def explain_foreign(folder: Path) -> DareError:
    """Where an output is to be made, there is something of the same name."""
    return DareError(
        f"{str(folder)!r} exists and was not made by this tool", "move it elsewhere, or rename it"
    )


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
