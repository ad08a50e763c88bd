"""Checking a merged model: it is made again by its own recipe, and compared instead of written."""

from __future__ import annotations

import dataclasses
import os
import threading
from io import BufferedReader
from typing import Any

from darelib.core.formats import STORED_BITS
from darelib.core.text import DareError, as_text, human, printable
from darelib.models.tensorfile import explain_os_error, file_sha256, open_regular, read_at
from darelib.output.destination import list_files, read_digests
from darelib.output.prepare import FilePlan
from darelib.output.recipe import check_seal
from darelib.plan.files import PlannedFile


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """A merged model that is, byte for byte, what its recipe makes. Prints as a line; as_dict gives plain data."""

    output: str
    tensors: int
    bytes_compared: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"verified {printable(self.output)}: {self.tensors:,} tensors, {human(self.bytes_compared)}, "
            f"are what the recipe makes, in {self.seconds:.2f} s"
        )


class Comparison:
    """An output that exists already: what jobs write to it is compared, and the first difference is an error."""

    def __init__(self, plan: FilePlan, name: str) -> None:
        self.plan, self.name = plan, name
        self.folder = plan.output.path if plan.output.directory else plan.output.path.parent
        self.files: list[BufferedReader] = []
        self._buffers = threading.local()
        try:
            for file in plan.files:
                self._open(file)
        except BaseException:
            self.close()
            raise

    def _open(self, planned: PlannedFile) -> None:
        path = self.folder / planned.name
        try:
            file = open_regular(path)
        except FileNotFoundError:
            raise self._differs(f"{planned.name!r} is not there") from None
        except OSError as error:
            raise explain_os_error(error, str(path)) from None
        self.files.append(file)
        size = os.fstat(file.fileno()).st_size
        if size != planned.size:
            raise self._differs(f"{planned.name!r} is {size:,} bytes long, not {planned.size:,}")
        if file.read(len(planned.header)) != planned.header:
            raise self._differs(
                f"the header of {planned.name!r} differs, as with other models or settings"
            )

    def check_side_files(self) -> None:
        """Compare the other files of a directory with the digests in its recipe, whose own digest is its seal."""
        if not self.plan.output.directory:
            return
        check_seal(self.folder)
        paths = {as_text(name): self.folder / name for name in list_files(self.folder)}
        digests = read_digests(self.folder)
        for name in sorted(
            digests.keys() - {file.name for file in self.plan.files}
        ):  # whose headers are compared
            found = file_sha256(paths[name]) if name in paths else ""
            if found != digests[name]:
                raise self._differs(f"{name!r} {'differs' if found else 'cannot be read'}")

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        import numpy as np

        if len(getattr(self._buffers, "found", b"")) < len(view):
            self._buffers.found = bytearray(len(view))
        found = memoryview(self._buffers.found)[: len(view)]
        try:
            done = read_at(self.files[file].fileno(), found, offset)
        except OSError as error:
            raise explain_os_error(
                error, str(self.files[file].name), "check the disk that it is on"
            ) from None
        if done < len(found):
            raise self._differs(f"{self.plan.files[file].name!r} became shorter while it was read")
        differs = np.frombuffer(found, np.uint8) != np.frombuffer(view, np.uint8)
        if differs.any():
            raise self._tensor_differs(file, offset + int(differs.argmax()))

    def _tensor_differs(self, file: int, place: int) -> DareError:
        """Name the tensor that a byte of a file belongs to, and the element."""
        start = place - len(self.plan.files[file].header)
        infos = (
            pair for t in self.plan.tensors if t.output.file == file for pair in t.outputs.items()
        )
        name, info = next(
            pair for pair in infos if pair[1].offset <= start < pair[1].offset + pair[1].nbytes
        )
        element = (start - info.offset) * 8 // STORED_BITS[info.dtype]
        return self._differs(f"tensor {name!r} differs at {info.place_of(element)}")

    def _differs(self, how: str) -> DareError:
        return DareError(
            f"{self.name!r} is not what its recipe makes: {how}",
            "it was damaged or changed after it was merged, or the inputs were; merge again",
        )

    def close(self) -> None:
        for file in self.files:
            file.close()
