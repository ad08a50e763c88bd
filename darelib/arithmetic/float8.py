"""FP8 as stored: F8_E4M3 values with a scale for each block, row or tensor, to float32 and back."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TYPES: Final = ("F8_E4M3", "F8_E5M2")  # whose values bfloat16 has, too
LARGEST: Final = 448.0  # of F8_E4M3, which has no infinities
# The smallest normal float32 and bfloat16: below it, a quotient might exceed LARGEST.
SMALLEST_SCALE: Final = 2.0**-126
MANTISSA: Final = 3
LOWEST: Final = -9  # the exponent of the smallest value
# Values that are encoded at a time, so that what is computed on the way stays in the caches.
PIECE: Final = 1 << 16


def list_values() -> Array:
    """The value of each byte, as float32."""
    byte = np.arange(128)
    exponent = byte >> MANTISSA
    fraction = (byte & 7) + 8 * (exponent > 0)
    sizes = np.ldexp(fraction.astype(float), np.maximum(exponent, 1) - 1 + LOWEST)
    sizes[127] = np.nan
    return np.concatenate([sizes, -sizes]).astype(np.float32)


@cache
def list_brains(dtype: str) -> Array:
    """The value of each byte of one of TYPES, as bfloat16: the first half of float32."""
    values = list_values()
    if dtype == "F8_E5M2":  # the first half of float16
        values = (np.arange(256) << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@cache
def pair_values() -> Array:
    """The values of any two bytes: half as many places to look up take half the time."""
    values = list_values()
    pairs = np.stack([np.tile(values, 256), np.repeat(values, 256)], 1).astype("<f4")
    return pairs.view(np.complex64).reshape(-1)


def decode(stored: Array, into: Array) -> None:
    """Bytes as float32."""
    even = len(stored) // 2 * 2
    pair_values().take(stored[:even].view("<u2"), out=into[:even].view(np.complex64), mode="wrap")
    if len(stored) % 2:
        into[-1] = list_values()[stored[-1]]


def encode(values: Array) -> Array:
    """float32 of at most LARGEST as bytes, rounded to nearest even."""
    given = values.reshape(-1)
    stored = np.empty(len(given), np.uint8)
    for k in range(0, len(given), PIECE):
        piece = given[k : k + PIECE]
        bits = piece.view(np.uint32)
        # 2^20 times the power of two below a value, but no lower than that below the smallest
        # normal one: in a sum with it, float32 has room for just the bits that FP8 keeps, and
        # rounds to them.
        power = np.maximum(bits & np.uint32(0x7F800000), np.uint32(121 << 23)) + np.uint32(20 << 23)
        kept = (np.abs(piece) + power.view(np.float32)).view(np.uint32) & np.uint32(0xFF)
        sign = bits >> np.uint32(24) & np.uint32(0x80)
        stored[k : k + PIECE] = (power >> np.uint32(20)) - np.uint32(141 << MANTISSA) + kept + sign
    return stored.reshape(values.shape)


def spread(
    scales: Array, block: tuple[int, int], first: int, rows: int, width: int
) -> Iterator[tuple[slice, Array]]:
    """What rows of a matrix are scaled by: some of the rows, and what fits them.

    scales: from the block on that the first of the rows is in. first: the row's number.
    """
    wide = scales if scales.shape[1] == 1 else scales.repeat(block[1], 1)[:, :width]
    if block[0] == 1:
        yield slice(0, rows), wide
        return
    ends = [0, *range(block[0] - first % block[0], rows, block[0]), rows]
    for (start, stop), row in zip(pairwise(ends), wide, strict=False):
        yield slice(start, stop), row


def reduce_blocks(how: np.ufunc, values: Array, block: tuple[int, int]) -> Array:
    """Something of each block of whole rows of blocks."""
    rows, width = values.shape
    if block[0] > 1:
        # Many times faster than reduceat along the rows.
        blocks = (values[k : k + block[0]] for k in range(0, rows, block[0]))
        values = np.stack([how.reduce(each, 0) for each in blocks])
    return np.asarray(how.reduceat(values, range(0, width, block[1]), 1))
