"""New files and folders, safetensors files of tensors from anywhere among them. They are made in a
folder of the process's own beside them; the next process removes what a killed one left.
"""

import glob
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from darelib.core.text import LOG, ConfigError, DareError, human, progress
from darelib.models.forms import Entry, Sized
from darelib.models.tensor import Tensor
from darelib.models.tensorfile import header_bytes
from darelib.output.files import (
    LOCK_FILE,
    MADE,
    Lock,
    limit_mode,
    sync_directory,
    try_lock,
    write_synced,
)


@contextmanager
def make_scratch(prefix: Path) -> Iterator[Path]:
    """A new folder whose name begins like this, which goes away in the end."""
    os.stat(prefix.parent)  # which fails where there is none
    try:
        lock = _make(prefix)
    except DareError:  # another process has just looked whether it is abandoned
        lock = _make(prefix)
    try:
        _remove_abandoned(prefix, lock)
        yield lock.folder
    finally:
        lock.release(keep=False)


@contextmanager
def open_scratch(prefix: Path) -> Iterator[Path]:
    """The same for models that are made on the way; an error says if it cannot be made."""
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


def _remove_abandoned(prefix: Path, own: Lock) -> None:
    """Remove the folders of this kind that nobody holds."""
    with own.path.open("r+b") as again:  # NFS locks only what may be written
        if try_lock(again.fileno()):  # there are no locks here: what is used looks abandoned
            return
    # As _make names them: what is called otherwise may be an output's.
    for folder in prefix.parent.glob(f"{glob.escape(prefix.name)}{'[0-9a-f]' * 8}"):
        # What has no lock is not ours. Path.exists fails where this user may not look.
        if os.path.exists(folder / LOCK_FILE):
            with suppress(DareError, OSError):  # what is locked is another process's
                Lock(folder, str(folder)).release(keep=False)


@contextmanager
def _make_beside(path: Path) -> Iterator[Path]:
    """Where to make something that then gets its name, replacing a file that had it."""
    path = Path(os.path.realpath(path))  # a link stays one
    name = f"{path.name[:50]}.partial-"  # names may be as long as the filesystem allows
    try:
        with make_scratch(path.with_name(name)) as folder:
            yield folder / MADE
            os.replace(folder / MADE, path)
    except OSError as error:
        raise DareError(
            f"cannot write {str(path)!r}: {error.strerror}", "choose another place for it"
        ) from None


def write_new_folder(path: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """Write a folder beside its name and then give it that name, which nothing has yet."""
    with _make_beside(path) as folder:
        folder.mkdir()
        for name, pieces in files.items():
            write_synced(folder / name, 0, pieces)
        sync_directory(folder)


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file beside its name and then give it that name, replacing what had it."""
    with _make_beside(path) as made:
        made.touch()
        limit_mode(made, Path(os.path.realpath(path)))
        write_synced(made, 0, pieces)


Bytes: TypeAlias = Iterable[bytes | memoryview]
# By name: what a tensor is, and its bytes, which are made when they are written.
Contents: TypeAlias = dict[str, tuple[Sized, Bytes]]


def list_contents(tensors: Mapping[str, Tensor]) -> Contents:
    """Tensors of a model, or that are made of such, by new names."""
    return {name: (tensor, _read(tensor)) for name, tensor in tensors.items()}


def _read(tensor: Tensor) -> Iterator[memoryview]:
    yield tensor.read_raw(0, tensor.nbytes).data


def encode_file(contents: Contents) -> Iterator[bytes | memoryview]:
    """The file, tensor by tensor."""
    infos: dict[str, Entry] = {}
    offset = 0
    for name, (info, _) in contents.items():
        infos[name] = Entry(info.dtype, info.shape, offset)
        offset += info.nbytes
    yield header_bytes(infos, {"format": "pt"})
    with progress("writing", offset, LOG.isEnabledFor(logging.INFO)) as advance:
        for info, pieces in contents.values():
            yield from pieces
            advance(info.nbytes)


def write_tensors(new: Path, contents: Contents, inputs: Collection[Path]) -> None:
    """Write a file, which must not be one of the inputs."""
    if new.suffix != ".safetensors":
        raise ConfigError(
            f"what is written is one file, and {new.name!r} does not end in .safetensors",
            f"give the name of a file, like {new.name}.safetensors",
        )
    if new.exists() and any(new.samefile(path) for path in inputs):
        raise ConfigError(f"{str(new)!r} is the input", "choose another name")
    size = sum(info.nbytes for info, _ in contents.values())
    free = shutil.disk_usage(new.absolute().parent).free
    if size > free:
        raise DareError(
            f"the output needs {human(size)} and there are {human(free)} free", "make room"
        )
    write_new_file(new, encode_file(contents))
