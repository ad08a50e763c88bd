"""One small or large file that appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from darelib.core.text import DareError
from darelib.output.scratch import make_scratch


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file beside its name and then give it that name, replacing what had it."""
    path = Path(os.path.realpath(path))  # a link stays one
    name = f"{path.name[:50]}.partial-"  # names may be as long as the filesystem allows
    try:
        with make_scratch(path.with_name(name)) as folder:
            partial = folder / "output"
            with partial.open("xb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise DareError(
            f"cannot write {str(path)!r}: {error.strerror}", "choose another place for it"
        ) from None
