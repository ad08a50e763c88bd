"""What all kernels for the CPU are made of: their types, and the thinning of one tile.

Kernels and what is below are templates: names that depend on the types are filled in by `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any, Final

import numpy as np

from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_BITS, TILE
from darelib.kernels import KernelSpec
from darelib.kernels.records import MODEL, SCRATCH_ROWS, SCRATCH_WIDTH, TENSOR, ZERO_ROW
from darelib.kernels.tiles import (
    DECODERS,
    ENCODERS,
    carray,
    choose_by_rank,
    draw,
    inline,
    numba,
    pad_rows,
    round_to_odd,
)

# The names that are filled in: the type to compute in, and the unsigned integers of its size; those
# of stored values, and how these become values and back; variants of thin_row.
FILLED_IN: Final[Any] = None
real = unsigned = base_raw = finetuned_raw = output_raw = FILLED_IN
decode = decode_finetuned = encode = FILLED_IN
thin_apart = thin_rare = is_apart = is_rare = FILLED_IN


def open_buffers(
    base_at: Any,
    finetuned_at: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    limits_at: Any,
    count: int,
    stride: int,
    models: int,
) -> Any:  # compiled
    """Addresses as arrays, with zeros behind the last tile and for a base of zeros."""
    tiles = (count + TILE - 1) // TILE
    base = carray(base_at, (1, tiles * TILE), base_raw)
    finetuned = carray(finetuned_at, (models, stride), finetuned_raw)
    records = carray(models_at, (models,), MODEL)
    tensor = carray(tensor_at, (1,), TENSOR)
    scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
    bits = carray(scratch_at, (1, TILE), np.uint16)[0]
    limits = carray(limits_at, (models, stride * finetuned.itemsize // 2), np.uint16)
    pad_rows(base, count, tiles * TILE)
    pad_rows(finetuned, count, tiles * TILE)
    pad_rows(scratch[ZERO_ROW : ZERO_ROW + 1], 0, TILE)
    return tiles, base[0], finetuned, records, tensor, scratch, bits, limits


def thin_model(
    raw: Any,
    width: int,
    tile: int,
    model: Any,
    base: Any,
    bits: Any,
    limits: Any,
    size: Any,
    divisors: Any,
    row: Any,
    total: Any,
    threshold: Any,
    apart: bool,
) -> None:  # compiled
    """One tile of one model, from stored values to thinned deltas: the heart of all kernels.

    They are added to a total; apart: they are what a row holds, too.
    """
    limit = np.uint16(model.limit)
    # No bits are above a limit that keeps all: whatever is there from before will do.
    drops_some = model.ranked or limit < np.uint16((1 << MASK_BITS) - 1)
    if model.bounded:
        drops_some = model.at_low + model.at_high < np.uint64(2 << MASK_BITS)
    if drops_some:
        draw(bits, tile, model.key_0, model.key_1)
    if model.bounded:
        limit = choose_by_size(raw, base, model, bits)
    if model.ranked:
        limit = choose_by_rank(bits, limits, divisors)
    if model.divided or model.floor > 0:
        thin_rare(raw, model, base, bits, limit, size, divisors, row, total, threshold)
    elif apart:
        thin_apart(raw, model, base, bits, limit, size, divisors, row, total, threshold)
    else:
        thin_row(raw, model, base, bits, limit, size, divisors, row, total, threshold)
    for j in range(width, TILE):  # what pads a last tile was counted too
        model.kept -= np.uint64(bits[j] <= limit)


def choose_by_size(raw: Any, base: Any, model: Any, bits: Any) -> Any:  # compiled
    """Make bits those of a mask that keeps what is within bounds. Gives its limit."""
    low, high = real(model.low), real(model.high)
    at_low, at_high = np.uint32(model.at_low), np.uint32(model.at_high)
    for j in range(TILE):
        magnitude = abs(decode_finetuned(raw[j]) - base[j])
        is_low = magnitude == low
        is_high = magnitude == high
        survives = np.uint32(bits[j]) < (at_low if is_low else at_high)
        kept = (magnitude > low and magnitude < high) or ((is_low or is_high) and survives)
        bits[j] = np.uint16(0) if kept else np.uint16(1)
    return np.uint16(0)


def thin_row(
    raw: Any,
    model: Any,
    base: Any,
    bits: Any,
    limit: Any,
    size: Any,
    divisors: Any,
    row: Any,
    total: Any,
    threshold: Any,
) -> None:  # compiled
    """is_rare: a model that is divided (each entry by its own divisor) or trimmed."""
    floor = real(model.floor)
    scale = real(model.scale)
    divided = model.divided != 0
    peak = unsigned(model.peak)
    above = np.uint32(0)
    survivors = np.uint32(0)
    for j in range(TILE):
        delta = decode_finetuned(raw[j]) - base[j]
        magnitude = abs(delta)
        size[j] = magnitude
        # As integers, a NaN or an infinity is the largest of all, and the loop vectorises.
        pattern = real(magnitude).view(unsigned)
        peak = pattern if pattern > peak else peak
        above = np.uint32(above + np.uint32(magnitude > threshold))
        survives = bits[j] <= limit
        survivors = np.uint32(survivors + np.uint32(survives))
        scaled = delta * scale
        if is_rare:
            scaled = scaled / divisors[j] if divided else scaled
            scaled = scaled if magnitude >= floor else real(0)
        kept = scaled if survives else real(0)
        if is_apart:
            row[j] = kept
        total[j] += kept
    model.peak = peak
    model.above += np.uint64(above)
    model.kept += np.uint64(survivors)


def find_pattern(value: Any, base: Any, minus_base: Any) -> Any:  # compiled
    """The bits of |delta|."""
    delta = real(decode_finetuned(value))
    if minus_base:
        delta = real(delta - real(decode(base)))
    return real(abs(delta)).view(unsigned)


def encode_by_odd(value: Any) -> Any:  # compiled
    """float64 to 16 bits, rounded once."""
    return encode(round_to_odd(value))


def fill_in(template: Any, names: Mapping[str, Any]) -> FunctionType:
    """A copy of a function to which some global names mean something else."""
    return FunctionType(template.__code__, {**template.__globals__, **names}, template.__name__)


@cache  # so that what several kernels have in common is compiled once
def list_names(base: str, finetuned: str, is_wide: bool) -> dict[str, Any]:
    names: dict[str, Any] = {
        "real": np.float64 if is_wide else np.float32,
        "unsigned": np.uint64 if is_wide else np.uint32,
        "base_raw": find_raw(base),
        "finetuned_raw": find_raw(finetuned),
        "decode": DECODERS[base],
        "decode_finetuned": DECODERS[finetuned],
        "is_apart": False,
        "is_rare": False,
    }
    apart = {**names, "is_apart": True}
    names["thin_rare"] = inline(fill_in(thin_row, {**apart, "is_rare": True}))
    names["thin_apart"] = inline(fill_in(thin_row, apart))
    for template in (thin_row, choose_by_size, thin_model, open_buffers, find_pattern):
        names[template.__name__] = inline(fill_in(template, names))
    return names


def find_raw(dtype: str) -> Any:
    return np.dtype(FORMATS[dtype].raw).type


def find_encoder(spec: KernelSpec) -> Any:
    encoder = ENCODERS[spec.output]
    if spec.real == "F32" or FORMATS[spec.output].bits > 16:
        return encoder
    return inline(fill_in(encode_by_odd, {"encode": encoder}))


def build(template: Any, spec: KernelSpec) -> Any:
    """A kernel for some types. All are given nine addresses, then four whole numbers or five."""
    names = list_names(spec.base, spec.finetuned, spec.real == "F64")
    output = {"encode": find_encoder(spec), "output_raw": find_raw(spec.output)}
    function = fill_in(template, names | output)
    numbers = function.__code__.co_argcount - 9
    types = numba.types
    return numba.cfunc(types.void(*[types.voidptr] * 9, *[types.intp] * numbers))(function)
