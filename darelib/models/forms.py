"""How tensors are written: with a type, a shape and a place; encoded plainly, here, or in a form
that a tensor's class has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from darelib.core.formats import STORED_BITS

if TYPE_CHECKING:
    from darelib.methods.looks import Look

Array = Any
# Writes bytes of one of a tensor's outputs, by its name, from a place in it on.
Put: TypeAlias = Callable[[str, memoryview, int], None]


class Sized:
    """What follows from a type and a shape."""

    __slots__ = ()
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return -(-self.count * STORED_BITS[self.dtype] // 8)

    def place_of(self, element: int) -> list[int]:
        """The indices of an element, of any number of dimensions: NumPy knows 64."""
        places = []
        for side in reversed(self.shape):
            element, place = divmod(element, side)
            places.append(place)
        return places[::-1]


@dataclass(frozen=True, slots=True)
class Entry(Sized):
    """A tensor in the header of a file: where it is stored, or will be."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    file: int = 0  # which of the output's files


@dataclass(frozen=True)
class Target:
    """A tensor that is to be written."""

    name: str
    base: Sized  # whose place it takes
    dtype: str  # of the merged values
    put: Put


class Writer:
    """Writes the merged values of one job, in order."""

    def __init__(self, target: Target, start: int) -> None:
        self._target = target
        self._place = start * STORED_BITS[target.dtype] // 8

    def add(self, merged: Array, base: Array) -> None:
        """The next values, and the base's."""
        from darelib.arithmetic.stored import encode

        raw = memoryview(encode(merged, self._target.dtype)).cast("B")
        self._target.put(self._target.name, raw, self._place)
        self._place += len(raw)

    def finish(self) -> None:
        """Write what is still held."""


class Form:
    """Values are encoded, and lie where the base's do."""

    rereads: ClassVar[bool] = True  # whether a merge reads the chunks that its looks read

    @property
    def looks(self) -> tuple[type[Look], ...]:
        """What must be known of the merged tensor before it can be written."""
        return ()

    def list_entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        """All that is written for a tensor, by name. entry: of its merged values."""
        return {name: entry}

    def find_step(self) -> int:
        """Elements that jobs are divided by."""
        return 1

    def count_held(self, chunk: int) -> int:
        """Bytes that a thread holds while it writes."""
        return 0

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        """What writes the values of a job. look: the last one at the tensor."""
        return Writer(target, start)


PLAIN: Final = Form()
