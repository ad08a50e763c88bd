"""A folder of a process's own beside what it writes. The next process removes what a killed one
left.
"""

import glob
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from darelib.core.text import DareError
from darelib.models.tensorfile import BINARY
from darelib.output.files import LOCK_FILE, Lock, limit_mode, sync_directory, try_lock


@contextmanager
def make_scratch(prefix: Path) -> Iterator[Path]:
    """A new folder whose name begins like this, which goes away in the end."""
    os.stat(prefix.parent)  # which fails where there is none
    try:
        lock = _make(prefix)
    except DareError:  # another process has just looked whether it is abandoned
        lock = _make(prefix)
    try:
        remove_abandoned(prefix, lock.path)
        yield lock.folder
    finally:
        lock.release(keep=False)


@contextmanager
def open_scratch(prefix: Path) -> Iterator[Path]:
    """The same for models that are made on the way: where it cannot be made, a user is told."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(make_scratch(prefix))
        except OSError as error:
            raise DareError(
                f"cannot write models in {str(prefix.parent)!r}: {error.strerror}",
                "choose another place for the output",
            ) from None
        yield folder


def _make(prefix: Path) -> Lock:
    folder = prefix.with_name(f"{prefix.name}{secrets.token_hex(4)}")
    return Lock(folder, str(folder))


def remove_abandoned(prefix: Path, locked: Path) -> None:
    """Remove the folders of this kind that nobody holds. locked: a file that this process does."""
    # As _make names them: what is called otherwise may be an output's. What has no lock is not
    # ours.
    named = prefix.parent.glob(f"{glob.escape(prefix.name)}{'[0-9a-f]' * 8}")
    # Not Path.exists, which fails in a folder that is closed to this user.
    left = [folder for folder in named if os.path.exists(folder / LOCK_FILE)]
    if left and _has_locks(locked):
        for folder in left:
            with suppress(DareError, OSError):  # what is locked is another process's
                Lock(folder, str(folder)).release(keep=False)


def _has_locks(locked: Path) -> bool:
    """Whether a lock keeps others out here: if not, a folder that is used looks abandoned."""
    descriptor = os.open(locked, os.O_RDWR | BINARY)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def write_new_folder(path: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """Write a folder beside its name and then give it that name, which nothing has yet."""
    try:
        with make_scratch(path.with_name(f"{path.name[:50]}.partial-")) as scratch:
            folder = scratch / "output"
            folder.mkdir()
            for name, pieces in files.items():
                write_new_file(folder / name, pieces)
            sync_directory(folder)
            folder.rename(path)
    except OSError as error:
        raise DareError(
            f"cannot write {str(path)!r}: {error.strerror}", "choose another place for it"
        ) from None


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file beside its name and then give it that name, replacing what had it."""
    path = Path(os.path.realpath(path))  # a link stays one
    name = f"{path.name[:50]}.partial-"  # names may be as long as the filesystem allows
    try:
        with make_scratch(path.with_name(name)) as folder:
            partial = folder / "output"
            with partial.open("xb") as file:
                limit_mode(partial, path)
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise DareError(
            f"cannot write {str(path)!r}: {error.strerror}", "choose another place for it"
        ) from None
