"""Tensors that are made of pieces of others of the same model: stacked, cut, swapped or transposed.

Rows lie one after the other, so that a range of them is a range of elements.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import STORED_BITS
from darelib.models.encodings import Derived, Input, Piece, TensorInfo


@dataclass(frozen=True, eq=False)
class Pieces(Derived):
    """Pieces of other tensors of the same type, one after the other."""

    parts: tuple[Piece, ...]

    @property
    def is_delta(self) -> bool:
        return any(part.info.is_delta for part in self.parts if part.info)

    def list_pieces(self, info: TensorInfo) -> tuple[Piece, ...]:
        return self.parts

    def stored_bytes(self, info: TensorInfo) -> int:
        parts = [(part.info, part.count) for part in self.parts if part.info]
        return sum(own.stored_bytes * count // own.count for own, count in parts if own.count)

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        item = STORED_BITS[info.dtype] // 8
        place = 0  # of the part
        for part in self.parts:
            first = max(start, place)
            last = max(first, min(start + count, place + part.count))
            target = into[(first - start) * item : (last - start) * item]
            if part.info is None:
                target[:] = 0
            elif target.size:
                model.read(part.info, part.start + first - place, last - first, target)
            place += part.count


@dataclass(frozen=True, eq=False)
class Transposed(Pieces):
    """A whole matrix of which rows are stored as columns."""

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        item = STORED_BITS[info.dtype] // 8
        stored = np.empty((*info.shape[::-1], item), np.uint8)
        super().read(model, info, 0, info.count, stored.reshape(-1))
        into[:] = stored.swapaxes(0, 1).reshape(-1)[start * item : (start + count) * item]

    def revert(self, change: TensorInfo) -> TensorInfo:
        return transpose(change)


def count_used(infos: Iterable[TensorInfo]) -> Counter[int]:
    """By id of a model's tensors: how many of their elements others are made of."""
    used = Counter[int]()
    for info in infos:
        for piece in info.encoding.list_pieces(info):
            used[id(piece.info)] += piece.count
    return used


def transpose(info: TensorInfo) -> TensorInfo:
    encoding = Transposed((Piece(info, 0, info.count),))
    return TensorInfo(info.dtype, info.shape[::-1], encoding=encoding)


def join(parts: Sequence[Piece], shape: tuple[int, ...]) -> TensorInfo:
    """A tensor of pieces; of one that is whole, that one, if it has this shape."""
    first = next(part.info for part in parts if part.info)
    if len(parts) == 1 and parts[0].count == first.count:
        if first.shape == shape:
            return first
        if first.added_rank:  # a product stays one
            return replace(first, shape=shape)
    return TensorInfo(first.dtype, shape, encoding=Pieces(tuple(parts)))


def fit_shape(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """A convolution of a single point is a matrix, and may be stored as either."""
    sides, wanted = ([side for side in each if side > 1] for each in (info.shape, shape))
    fits = sides == wanted and info.shape != shape and STORED_BITS[info.dtype] >= 8
    return join(info.encoding.list_pieces(info), shape) if fits else info


def fill_gaps(pieces: Sequence[tuple[int, Piece]], count: int) -> list[Piece] | None:
    """Pieces in the order of their places, with zeros between them; None: two of them overlap."""
    filled: list[Piece] = []
    end = 0
    for place, piece in [*sorted(pieces, key=lambda pair: pair[0]), (count, Piece(None, 0, 0))]:
        if place < end:
            return None
        filled += [Piece(None, 0, place - end), piece]
        end = place + piece.count
    return [piece for piece in filled if piece.count]
