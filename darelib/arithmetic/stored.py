"""Stored values as floats, and floats as stored values: the only place that knows both."""

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic.engine import compiled
from darelib.core.arrays import Array, library
from darelib.core.formats import FORMATS


def decode(raw: Array, dtype: str) -> Array:
    """Stored values as float32, or float64 where that is what is stored; all exactly."""
    form = FORMATS[dtype]
    if form.bits > 16:
        return raw.view(form.real)
    values = np.empty(raw.nbytes // 2, np.float32)
    decode_into(values, raw, dtype)
    return values


def decode_into(values: Array, raw: Array, dtype: str) -> None:
    """The same, into an array of floats."""
    if FORMATS[dtype].bits > 16 or values.dtype != np.float32:
        values[:] = decode(raw, dtype)
    else:
        widen = widen_bf16 if dtype == "BF16" else widen_f16
        widen(raw.view(np.uint16), values)


def encode(values: Array, dtype: str) -> Array:
    """Floats as stored values, rounded once, to nearest even; as unsigned integers."""
    form = FORMATS[dtype]
    if form.bits == 16:
        single = round_to_odd(values) if values.dtype == np.float64 else values
        return narrow_bf16(single) if dtype == "BF16" else narrow_f16(single)
    with np.errstate(over="ignore"):
        return values.astype(form.real, copy=False).view(form.raw)


def round_to(values: Array, dtype: str) -> Array:
    """Floats as a type has them. What is not a number stays so, whatever its bits are."""
    numbers = np.where(np.isnan(values), values.dtype.type(np.nan), values)
    return decode(encode(numbers, dtype), dtype)


def round_to_odd(values: Array) -> Array:
    """float64 to a float32 that rounds on to 16 bits just as the float64 would.

    What does not fit is cut off, and the last bit says so.
    """
    lib = library(values)
    with np.errstate(over="ignore"):
        near = lib.asarray(values, dtype=lib.float32)
    bits = near.view(lib.int32) - lib.asarray(abs(near) > abs(values), dtype=lib.int32)
    return (bits | lib.asarray(bits.view(lib.float32) != values, dtype=lib.int32)).view(lib.float32)


@compiled
def widen_bf16(raw: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    np.left_shift(raw, 16, out=values.view(np.uint32), dtype=np.uint32)


@compiled
def widen_f16(raw: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    values[:] = raw.view(np.float16)


@compiled
def narrow_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounding = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


@compiled
def narrow_f16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return values.astype(np.float16).view(np.uint16)
