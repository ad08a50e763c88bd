"""The journal of a merge in the making: what is on the disk, so that it can be continued."""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from darelib.models.tensorfile import BINARY, open_regular


class Journal:
    """A line for what the merge is, then lines for what of it is known to be on the disk.

    Each line begins with a checksum; the first one that does not match, as after a crash, ends the
    journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0  # of the lines that are complete
        entries: list[Any] = []
        with suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
            for line in file:
                check, _, text = line.partition(b" ")
                if check != b"%08x" % zlib.crc32(text.rstrip(b"\n")) or not line.endswith(b"\n"):
                    break
                entries.append(json.loads(text))
                self.length += len(line)
        # After a first line that is damaged, what follows means nothing.
        is_sound = bool(entries) and isinstance(entries[0], dict)
        self.identity: dict[str, Any] | None = entries[0] if is_sound else None
        self.done: list[Any] = list(itertools.chain(*entries[1:])) if is_sound else []

    def append(self, entry: Any) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        write_synced(self.path, os.O_APPEND, [b"%08x %s\n" % (zlib.crc32(text), text)])


def write_synced(path: Path, flags: int, pieces: Iterable[bytes]) -> None:
    """Write a small file, and wait until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags | BINARY, 0o666)
    try:
        for piece in pieces:
            write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def explain_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """What distinguishes two merges, by their identities: in words, or "" if they are the same."""
    for key in dict.fromkeys([*new, *old]):
        name = prefix + key
        before, now = old.get(key), new.get(key)
        if before == now:
            continue
        if before is None:
            return f"it has no {name}, and this one has"
        if now is None:
            return f"it has {name}, and this one has not"
        if isinstance(before, dict) and isinstance(now, dict):
            return explain_difference(before, now, f"{name}.")
        return f"its {name} is {before!r}, not {now!r}"
    return ""
