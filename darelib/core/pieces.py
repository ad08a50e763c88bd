"""Products of NumPy's matrices, piece by piece: threads share the pieces, and a merge can stop
after any of them.

A library cannot be stopped within a product. And its threads wait for each other by spinning, which
takes ten times as long beside other work: here, each piece is computed by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from darelib.core.arrays import Array, library

if TYPE_CHECKING:
    from concurrent.futures import Executor

# Floating-point operations of a piece: to compute fewer takes no longer than to hand them to a
# thread; more take a tenth of a second on a core.
LEAST_OPERATIONS: Final = 100_000_000
MOST_OPERATIONS: Final = 2_000_000_000
PIECES: Final = 16  # between these, to keep so many cores busy

Slices = tuple[slice, slice]


@dataclass(frozen=True)
class Crew:
    """The threads that share products, if not the caller's alone, and a function that is called
    with the operations of each piece. It may raise an error, to stop.
    """

    pool: Executor | None = None
    note: Callable[[int], None] = lambda operations: None


ALONE: Final = Crew()
EMPLOYED: Final = ContextVar("EMPLOYED", default=ALONE)


@contextmanager
def employ(crew: Crew) -> Iterator[None]:
    """Let a crew compute the products of this thread."""
    token = EMPLOYED.set(crew)
    try:
        yield
    finally:
        EMPLOYED.reset(token)


def multiply(left: Array, right: Array) -> Array:
    """left @ right. torch's matrices are multiplied in one piece."""
    lib = library(left)
    if lib.__name__ != "numpy":
        return left @ right
    crew = EMPLOYED.get()
    columns = right.shape[1]
    made = lib.empty((len(left), columns), left.dtype)

    def compute(piece: Slices) -> int:
        own = made[piece]
        lib.matmul(left[piece[0]], right[:, piece[1]], out=own)
        return 2 * own.size * len(right)

    pieces = list(cut(len(left), columns, len(right)))
    run = crew.pool.map if crew.pool and len(pieces) > 1 else map
    for operations in run(compute, pieces):
        crew.note(operations)
    return made


def cut(rows: int, columns: int, inner: int) -> Iterator[Slices]:
    """Pieces of a product: the same for any number of threads, and so are the bytes."""
    whole = 2 * rows * columns * inner
    most = min(max(whole // PIECES, LEAST_OPERATIONS), MOST_OPERATIONS)
    entries = max(1, most // max(1, 2 * inner))
    width = max(1, min(columns, max(math.isqrt(entries), entries // max(1, rows))))
    height = max(1, min(rows, entries // width))
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)
