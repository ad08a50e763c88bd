"""Comparison of values that the libraries of other machines make a little different."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from darelib.core.formats import FORMATS, STORED_BITS, widen

Array = Any
# Of stored and made values, as bytes, and their type: how many differ, and the first that differs
# by too much.
Comparison: TypeAlias = Callable[[memoryview, memoryview, str], tuple[int, int | None]]
# Of the mean |value|, by bits: below that, values may differ that were solved on another machine.
TOLERANCES: Final = {8: 0.0, 16: 2.0**-16, 32: 2.0**-22, 64: 2.0**-22}


def compare_values(stored: Array, made: Array, dtype: str) -> tuple[int, int | None]:
    """How many stored values differ, and the first that differs by more than one unit in the last
    place, and more than next to nothing of the mean.
    """
    bits = STORED_BITS[dtype]
    raw = np.dtype(f"u{bits // 8}")
    first, second = (np.frombuffer(each, raw) for each in (stored, made))
    places = [order_patterns(each, bits) for each in (first, second)]
    is_far = np.abs(places[0] - places[1]) > 1
    if dtype in FORMATS:
        values = [widen(each.view(np.uint8), dtype).astype(np.float64) for each in (first, second)]
        is_far &= np.abs(values[0] - values[1]) > TOLERANCES[bits] * np.abs(values[1]).mean()
    beyond = np.flatnonzero(is_far)
    return int(np.count_nonzero(first != second)), int(beyond[0]) if len(beyond) else None


def order_patterns(raw: Array, bits: int) -> Array:
    """Bit patterns of floats as numbers in the order of the values: neighbours differ by 1."""
    sign = raw >> raw.dtype.type(bits - 1)
    size = (raw & raw.dtype.type((1 << (bits - 1)) - 1)).astype(np.int64)
    return np.where(sign, -size, size)


# By norm: two factors of one change, each made by products of matrices. Directions that are equally
# strong may come out in any order, and differ.
LARGEST_DISTANCE: Final = 0.01


def compare_factors(stored: memoryview, made: memoryview, dtype: str) -> tuple[int, int | None]:
    """The same of factors: they differ as a whole."""
    first, second = (
        widen(np.frombuffer(each, np.uint8), dtype).astype(np.float64) for each in (stored, made)
    )
    distance = np.abs(first - second)
    is_far = np.linalg.norm(distance) > LARGEST_DISTANCE * np.linalg.norm(second)
    return int(np.count_nonzero(distance)), int(distance.argmax()) if is_far else None
