"""One small or large file that appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from darelib.core.text import DareError


def write_new_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file beside its name and then give it that name, replacing what had it."""
    path = Path(os.path.realpath(path))  # a link stays one
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with ExitStack() as cleanup:
            with partial.open("xb") as file:  # a file that has this name already is not ours
                cleanup.callback(partial.unlink, missing_ok=True)
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise DareError(
            f"cannot write {str(path)!r}: {error.strerror}", "choose another place for it"
        ) from None
