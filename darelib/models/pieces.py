"""Tensors that are made of pieces of others of the same model: stacked, cut, or swapped.

Rows lie one after the other, so that a range of them is a range of elements.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import STORED_BITS
from darelib.kernels.plain import encode
from darelib.models.rows import choose_real, read_values
from darelib.models.tensors import Encoding, Input, TensorInfo


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a tensor, one after the other."""

    info: TensorInfo | None  # None: zeros, where nothing is changed
    start: int
    count: int


@dataclass(frozen=True, eq=False)
class Made(Encoding):
    """What is nowhere stored as it is."""

    def read_stored(self, model: Input, info: TensorInfo, start: int, view: memoryview) -> None:
        item = STORED_BITS[info.dtype] // 8
        first = start // item
        last = -(-(start + len(view)) // item)
        made = np.empty((last - first) * item, np.uint8)
        self.read(model, info, first, last - first, made)
        view[:] = made[start - first * item :][: len(view)].data


@dataclass(frozen=True, eq=False)
class Pieces(Made):
    """Pieces of other tensors, one after the other."""

    parts: tuple[Piece, ...]

    def stored_bytes(self, info: TensorInfo) -> int:
        parts = [(part.info, part.count) for part in self.parts if part.info]
        return sum(own.stored_bytes * count // own.count for own, count in parts)

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        item = STORED_BITS[info.dtype] // 8
        place = 0  # of the part
        for part in self.parts:
            first = max(start, place)
            last = min(start + count, place + part.count)
            if first < last:
                target = into[(first - start) * item : (last - start) * item]
                inside = Piece(part.info, part.start + first - place, last - first)
                _read_piece(model, inside, info.dtype, target)
            place += part.count


def _read_piece(model: Input, piece: Piece, dtype: str, target: NDArray[np.uint8]) -> None:
    if piece.info is None:
        target[:] = 0
    elif piece.info.dtype == dtype:
        model.read(piece.info, piece.start, piece.count, target)
    else:
        real = choose_real(piece.info)
        values = read_values(model, piece.info, piece.start, piece.count, real)
        target[:] = encode(values, dtype).view(np.uint8)


@dataclass(frozen=True, eq=False)
class Transposed(Made):
    """A matrix of which rows are stored as columns."""

    stored: TensorInfo

    def stored_bytes(self, info: TensorInfo) -> int:
        return self.stored.stored_bytes

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        item = STORED_BITS[info.dtype] // 8
        raw = np.empty((*self.stored.shape, item), np.uint8)
        model.read(self.stored, 0, self.stored.count, raw.reshape(-1))
        turned = np.swapaxes(raw, 0, 1).reshape(-1)
        into[:] = turned[start * item : (start + count) * item]


def transpose(info: TensorInfo) -> TensorInfo:
    made = TensorInfo(info.dtype, info.shape[::-1], is_delta=info.is_delta)
    return replace(made, encoding=Transposed(info))


def list_pieces(info: TensorInfo) -> tuple[Piece, ...]:
    """What a tensor is made of: of itself, unless it is of others."""
    encoding = info.encoding
    return encoding.parts if isinstance(encoding, Pieces) else (Piece(info, 0, info.count),)


def list_sources(info: TensorInfo) -> list[TensorInfo]:
    """The tensors of a model that one is made of."""
    if isinstance(info.encoding, Transposed):
        return [info.encoding.stored]
    return [piece.info for piece in list_pieces(info) if piece.info]


def join(pieces: Iterable[Piece], shape: tuple[int, ...]) -> TensorInfo:
    """A tensor of pieces; of one whole one of this shape, that one."""
    parts = tuple(pieces)
    infos = [part.info for part in parts if part.info]
    first = infos[0]
    if len(parts) == 1 and parts[0].count == first.count:
        if first.shape == shape:
            return first
        if first.added_rank:  # a product stays one
            return replace(first, shape=shape)
    dtypes = {info.dtype for info in infos}
    dtype = first.dtype if len(dtypes) == 1 else choose_real(*infos)
    return TensorInfo(dtype, shape, is_delta=first.is_delta, encoding=Pieces(parts))


def fit_shape(info: TensorInfo, shape: tuple[int, ...]) -> TensorInfo:
    """A convolution of a single point is a matrix, and may be stored as either."""
    sides, wanted = ([side for side in each if side > 1] for each in (info.shape, shape))
    return join(list_pieces(info), shape) if sides == wanted else info


def count_rows(info: TensorInfo) -> int:
    return info.shape[0] if info.shape else 1


def cut_rows(info: TensorInfo, first: int, rows: int) -> Piece:
    width = math.prod(info.shape[1:])
    return Piece(info, first * width, rows * width)


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
