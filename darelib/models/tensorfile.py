"""The files of a model: safetensors, with headers checked against every rule, and JSON.

The safetensors library would map the whole file into memory to read a header, and accepts names
that are given twice.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import operator
import os
import shlex
import stat
import struct
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from darelib.core.formats import FORMATS, STORED_BITS
from darelib.core.text import DareError, InputChanged
from darelib.models.forms import Entry
from darelib.models.tensor import Known, Tensor

# Bytes: more than MAX_TENSORS take with long names, so that no file takes much memory.
MAX_HEADER: Final = 64_000_000
MAX_TENSORS: Final = 250_000  # more than twice as many as the largest models have
MAX_NAME: Final = 1 << 16  # characters
# Of JSON files, so that a hostile one takes little memory.
MAX_JSON: Final = 1 << 24  # of a configuration
MAX_INDEX: Final = 1 << 25  # of an index: those of the largest models have 10 MB
NO_ENTRY: Final = "it is not a type, a shape and two offsets"

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Weights of any framework, and what training leaves behind: none of it belongs to a merged model.
WEIGHT_SUFFIXES: Final = (
    ".safetensors", ".index.json", *PICKLE_SUFFIXES, ".h5", ".msgpack", ".gguf", ".ggml", ".onnx",
    ".onnx_data", ".ot",
    ".tflite", ".mlmodel", ".mlpackage", ".npz", ".npy", ".distcp", ".nemo", ".partial",
)  # fmt: skip
GGUF_HINT: Final = (
    "its tensors are laid out for llama.cpp: merge the original model, then convert the result"
)
AGAIN_HINT: Final = "download or save it again"
CHANGED_HINT: Final = "do not change inputs during a merge; run it again"

# Of a file's status: what stays the same as long as nobody changes or replaces the file.
IDENTITY: Final = operator.attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns")
BINARY: Final = getattr(os, "O_BINARY", 0)  # so that Windows does not translate line ends
# Where the system has no positioned reads and writes, no other thread may come between seeking
# and reading.
SEEK_LOCK: Final = threading.Lock()


def explain_os_error(error: OSError, name: str, hint: str = "check its permissions") -> DareError:
    hints = {
        errno.EACCES: "check its permissions, and those of the directories above it",
        errno.EINVAL: "give a .safetensors file or a model directory",
        errno.EMFILE: "raise the limit on open files, for example with: ulimit -n 4096",
        errno.ENFILE: "close other programs, or raise the system's limit on open files",
    }
    return DareError(
        f"cannot read {name!r}: {error.strerror or error}", hints.get(error.errno or 0, hint)
    )


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file. Anything else is an OSError: from a pipe or a device, a read may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.open("rb")


def file_sha256(path: Path) -> str:
    """The digest of a file's content; empty if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def read_json(path: Path, name: str, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object in which no key is given twice. name: what to call it in messages."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError("it is larger than any model's")
        table = json.loads(data.decode(), object_pairs_hook=reject_duplicates)
        if not isinstance(table, dict):
            raise ValueError("it is not a JSON object")
        return table
    except OSError as error:
        raise explain_os_error(error, name) from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DareError(f"{name!r} is not valid: {reason}", AGAIN_HINT) from None


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill view from a position on; return how many bytes there were, fewer only at the end."""
    done = 0
    count = 1
    while count and done < len(view):
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [view[done:]], offset + done)
        else:
            with SEEK_LOCK:
                os.lseek(descriptor, offset + done, os.SEEK_SET)
                data = os.read(descriptor, len(view) - done)
            count = len(data)
            view[done : done + count] = data
        done += count
    return done


def convert_hint(path: Path) -> str:
    name = path.as_posix()
    stem = f"{name}/model" if path.is_dir() else name.removesuffix(path.suffix)
    new = f"{stem}.safetensors"
    if new == name:
        new = f"{name}.converted.safetensors"
    command = f"dare convert {shlex.quote(name)} {shlex.quote(new)}"
    return f"pickles can run any code, so convert it first, which runs none: {command}"


class TensorFile:
    """One safetensors file, open for reading."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.metadata: dict[str, str] = {}
        self.header_sha256 = ""
        try:
            self._file = open_regular(path)
            self.status = os.fstat(self._file.fileno())
        except FileNotFoundError:
            raise
        except OSError as error:
            raise explain_os_error(error, name) from None
        known = PEEKED.pop((path, IDENTITY(self.status)), None)
        entries: Mapping[str, Any] = known.tensors if known else self._read_header()
        if known:
            self.metadata = known.metadata
            self.header_sha256 = known.header_sha256
        self.tensors: dict[str, Tensor] = {
            name: Stored(entry.dtype, entry.shape, entry.offset, self)
            for name, entry in entries.items()
        }

    def _read_header(self) -> Mapping[str, Entry]:
        size = self.status.st_size
        start = bytearray(min(9, size))
        try:
            self.read_into(memoryview(start), 0)
            raw = self._read_bytes(start, size)
            text = str(memoryview(raw)[8:], "utf-8")
            entries, self.metadata = parse_header(text, len(raw), size)
        except (ValueError, RecursionError) as error:
            self.close()
            raise self._explain_broken(error, start) from None
        self.header_sha256 = hashlib.sha256(raw).hexdigest()
        return entries

    def _read_bytes(self, start: bytearray, size: int) -> bytearray:
        """The header with its length before it. start: the first bytes of the file."""
        length = int.from_bytes(start[:8], "little")
        faults = (
            (size < 8, "it is too short for a header"),
            (length > MAX_HEADER, f"its header would be {length:,} bytes long"),
            (
                8 + length > size,
                f"its header should be {length:,} bytes long and it has {size - 8:,}",
            ),
            (start[8:] != b"{", "its header does not start with {"),
        )
        for is_so, words in faults:
            if is_so:
                raise ValueError(words)
        header = bytearray(8 + length)
        self.read_into(memoryview(header), 0)
        return header

    def _explain_broken(self, error: Exception, start: bytearray) -> DareError:
        """What a file that is not safetensors is instead, and what to do about it."""
        pickled = start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[8:] != b"{")
        pickled |= self.path.suffix in PICKLE_SUFFIXES
        reason = "its header is nested too deeply" if isinstance(error, RecursionError) else error
        kinds = (
            (not start, "is empty", AGAIN_HINT),
            (pickled, "is a PyTorch pickle, not a safetensors file", convert_hint(self.path)),
            (
                start[:4] == b"vers",
                "looks like a Git LFS pointer, not the file itself",
                "run git lfs pull",
            ),
            (start[:4] == b"GGUF", "is a GGUF file", GGUF_HINT),
            (True, f"is not a complete safetensors file: {reason}", AGAIN_HINT),
        )
        words, hint = next((words, hint) for is_so, words, hint in kinds if is_so)
        return DareError(f"{self.name!r} {words}", hint)

    def read_into(self, view: memoryview, offset: int) -> None:
        try:
            done = read_at(self._file.fileno(), view, offset)
        except OSError as error:
            raise explain_os_error(error, self.name, "check the disk that it is on") from None
        if done < len(view):
            raise InputChanged(f"{self.name!r} became shorter while it was read", CHANGED_HINT)

    def check_unchanged(self) -> None:
        now = []
        with suppress(OSError):  # it is gone
            now = [os.fstat(self._file.fileno()), self.path.stat()]
        if len(now) < 2 or any(IDENTITY(status) != IDENTITY(self.status) for status in now):
            raise InputChanged(f"{self.name!r} changed while it was merged", CHANGED_HINT)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, eq=False, slots=True)  # there may be very many
class Stored(Tensor):
    """A tensor whose values are stored plainly: a range of a file."""

    offset: int
    file: TensorFile = field(repr=False)

    def read(self, start: int, count: int, known: Known | None = None) -> Any:
        from darelib.arithmetic.stored import decode

        item = FORMATS[self.dtype].itemsize
        return decode(self.read_raw(start * item, count * item), self.dtype)

    def read_into(self, values: Any, start: int, known: Known | None = None) -> None:
        from darelib.arithmetic.stored import decode_into

        item = FORMATS[self.dtype].itemsize
        decode_into(values, self.read_raw(start * item, len(values) * item), self.dtype)

    def read_raw(self, start: int, size: int) -> Any:
        import numpy as np

        raw = np.empty(size, np.uint8)
        self.file.read_into(raw.data, self.offset + start)
        return raw


# The file that was last looked at, to find out of what kind it is, until it is opened: closed.
PEEKED: Final[dict[object, TensorFile]] = {}


def peek_header(path: Path) -> tuple[Collection[str], Mapping[str, str]]:
    """The names in a file and its metadata, to find out of what kind the file is.

    Both are empty where they cannot be read: whoever opens the file then explains why.
    """
    try:
        key = path, IDENTITY(path.stat())
        if key not in PEEKED:
            with closing(TensorFile(path, path.name)) as file:
                PEEKED.clear()
                PEEKED[key] = file
        file = PEEKED[key]
        return file.tensors.keys(), file.metadata
    except (DareError, OSError, KeyError):
        return (), {}


def parse_header(
    text: str, data_start: int, file_size: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors in the order in which they are stored, and the metadata.

    A broken rule is a ValueError.
    """
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # each is kept once: a model has few

    # As a table, an entry would take many times the memory.
    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Entry | ValueError:
        fields = reject_duplicates(pairs)
        if fields.keys() != {"dtype", "shape", "data_offsets"}:
            return fields
        try:
            shape, begin = _check_entry(**fields)
        except ValueError as error:
            return error  # the name of the tensor is not known yet
        shape = shapes.setdefault(shape, shape)
        return Entry(sys.intern(fields["dtype"]), shape, data_start + begin)

    try:
        header = json.loads(text, object_pairs_hook=read_object, parse_int=_parse_count)
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not JSON: {error.msg} (character {error.pos:,})") from None
    if not isinstance(header, dict):
        raise ValueError("its header is the entry of a tensor")
    metadata = _check_metadata(header.pop("__metadata__", None))
    if len(header) > MAX_TENSORS:
        raise ValueError(f"its header is larger than that of {MAX_TENSORS:,} tensors")
    for name, entry in header.items():
        name.encode()  # half of a surrogate pair is no text
        if len(name) > MAX_NAME:
            raise ValueError(f"the name of a tensor has {len(name):,} characters")
        if not isinstance(entry, Entry):
            reason = entry if isinstance(entry, ValueError) else NO_ENTRY
            raise ValueError(f"the entry of tensor {name!r} is wrong: {reason}")
    return _order_tensors(header, data_start, file_size), metadata


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these pairs, if no key is given twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:MAX_NAME]!r} is in it twice")
    return table


def _parse_count(text: str) -> int | float:
    return int(text) if len(text) < 20 and text.isdigit() else math.nan  # -0 is no count


def _check_entry(dtype: Any, shape: Any, data_offsets: Any) -> tuple[tuple[int, ...], int]:
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(data_offsets, list)):
        raise ValueError(NO_ENTRY)
    counts = (*shape, *data_offsets)
    if len(data_offsets) != 2 or set(map(type, counts)) != {int} or max(counts) >> 63:
        raise ValueError(NO_ENTRY)
    if dtype not in STORED_BITS:
        raise ValueError(f"{dtype[:MAX_NAME]!r} is an unknown type")
    bits = STORED_BITS[dtype]
    for side in shape:
        bits *= side
        if bits >> 64:
            raise ValueError("its shape is beyond all bounds")
    if bits % 8:
        raise ValueError("it does not end at a byte")
    begin, end = data_offsets
    if end - begin != bits // 8:
        raise ValueError(f"[{begin}, {end}] is not the {bits // 8:,} bytes that it takes")
    return tuple(shape), begin


def _check_metadata(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not a table of strings")
    "".join((*metadata, *metadata.values())).encode()
    return metadata


def _order_tensors(tensors: dict[str, Entry], data_start: int, file_size: int) -> dict[str, Entry]:
    """By their places in the file, which they must fill; at the same place, empty ones first."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    place = data_start
    for name, info in ordered:
        if info.offset != place:
            raise ValueError(
                f"tensor {name!r} at {info.offset - data_start:,} leaves a hole or overlaps"
            )
        place += info.nbytes
    if place != file_size:
        raise ValueError(
            f"its tensors take {place - data_start:,} bytes, and {file_size - data_start:,} are "
            "there"
        )
    return dict(ordered)


def header_bytes(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """A safetensors header for tensors whose offsets count from the start of the data."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    parts = [f'{{"__metadata__":{encode(metadata)}']
    # One by one: as a table, the entries would take many times the memory.
    for name, info in tensors.items():
        ends = [info.offset, info.offset + info.nbytes]
        entry = {"dtype": info.dtype, "shape": info.shape, "data_offsets": ends}
        parts.append(f",{encode(name)}:{encode(entry)}")
    text = "".join([*parts, "}"]).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
