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
    """A locked file in the folder in which an output is made. The system unlocks it when the process ends."""

    def __init__(self, folder: Path, destination: str) -> None:
        self.folder, self.path, self.descriptor = folder, folder / LOCK_FILE, -1
        foreign = DareError(
            f"{str(folder)!r} is in the way", "this tool did not make it; move it elsewhere"
        )
        made, content = False, ""
        try:
            while (
                not self._holds_path()
            ):  # whoever had the lock may remove the folder at any moment
                self._close()
                with suppress(FileExistsError):
                    os.mkdir(folder)
                    made = True
                if self._is_foreign():
                    raise foreign
                with suppress(FileNotFoundError):
                    self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
                    is_locked = try_lock(self.descriptor)
                    content = os.read(self.descriptor, 100).decode(errors="replace")
                    if not is_locked:
                        self._close()  # so that nothing of the other's is removed
                        holder = (
                            f"process {content.split()[-1]}"
                            if content.split()
                            else "of an unknown process"
                        )
                        words = f"another merge ({holder}) is writing {destination!r}"
                        raise DareError(words, "wait, or give another output")
            # A lock of ours may have been cut short if there is nothing beside it.
            if not content.startswith(LOCK_WORDS) and (
                self.leftovers() or not LOCK_WORDS.startswith(content)
            ):
                self._close()
                raise foreign
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            mine = f"{LOCK_WORDS} {os.getpid()}\n".encode()
            write_all(self.descriptor, mine)
            os.ftruncate(self.descriptor, len(mine))
        except BaseException:
            if made:
                self.release(keep=False)
            self._close()
            raise

    def _is_foreign(self) -> bool:
        """Whether the folder has its name only by chance: one of ours has a lock before anything else."""
        try:
            names = os.listdir(self.folder)
            return bool(names) and not (
                LOCK_FILE in names and stat.S_ISREG(os.stat(self.path).st_mode)
            )
        except FileNotFoundError:  # it has just been removed, unless it is a link to nothing
            return os.path.islink(self.folder)
        except OSError:
            return True

    def _holds_path(self) -> bool:
        """Whether the file that is locked is still the one that others would find."""
        try:
            return self.descriptor >= 0 and os.path.samestat(
                os.fstat(self.descriptor), os.stat(self.path)
            )
        except FileNotFoundError:
            return False

    def leftovers(self) -> list[Path]:
        """What there is besides the lock, as an unfinished merge leaves it."""
        return [self.folder / name for name in os.listdir(self.folder) if name != LOCK_FILE]

    def release(self, keep: bool) -> None:
        """Unlock, and remove the folder unless it has something to keep. Without the lock, only an empty one goes."""
        with suppress(OSError):
            if self.descriptor >= 0 and not (keep and self.leftovers()):
                for path in self.leftovers():  # while nobody else can have begun in it
                    remove(path)
                if os.name == "nt":  # where open files cannot be removed
                    self._close()
                if not self.leftovers():  # the lock marks what could not be removed as ours
                    self.path.unlink(missing_ok=True)
            os.rmdir(self.folder)
        self._close()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file, unless another process has locked it. shared: together with others that do the same."""
    try:
        if os.name == "nt" and not shared:  # where locks cannot be shared
            import msvcrt

            os.lseek(
                descriptor, 1 << 30, os.SEEK_SET
            )  # far behind the words, which others must be able to read
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            finally:
                os.lseek(descriptor, 0, os.SEEK_SET)
        elif os.name != "nt":
            import fcntl

            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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
