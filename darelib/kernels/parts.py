"""What all kernels for the CPU are made of, for Numba: their types, and the functions of one tile.

The arithmetic is that of darelib.kernels.plain, to the bit. Loops are what LLVM vectorises well: a
fixed number of turns, slices rather than offsets, no output that could be an input under another
name. What Numba compiles is marked `# compiled`: coverage cannot see it, since it runs without the
interpreter. Kernels and what they share are templates: names that depend on the types are filled in
by `build`.
"""

import importlib
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any, Final

import numpy as np
from llvmlite import ir

from darelib.core.formats import DIGIT_BITS
from darelib.core.mask import MASK_BITS, ROUNDS, TILE
from darelib.kernels.records import (
    BASE_ROW,
    DIVISOR_ROW,
    LEFT_ROW,
    MERGED_ROW,
    MODEL,
    RIGHT_ROW,
    SCRATCH_ROWS,
    SCRATCH_WIDTH,
    SIZE_ROW,
    TENSOR,
    ZERO_ROW,
)

# Numba's types say less than its functions accept.
numba: Any = importlib.import_module("numba")
carray = numba.carray


# A function that is compiled into the kernels that call it.
inline: Callable[[Callable[..., Any]], Any] = numba.njit(
    forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)


# --- stored values --------------------------------------------------------------------------------


@inline
def decode_bf16(raw: Any) -> Any:  # compiled
    return np.uint32(np.uint32(raw) << np.uint32(16)).view(np.float32)


@inline
def decode_f16(raw: Any) -> Any:  # compiled
    magnitude = np.uint32(raw) & np.uint32(0x7FFF)
    sign = (np.uint32(raw) & np.uint32(0x8000)) << np.uint32(16)
    shifted = magnitude << np.uint32(13)
    # Subnormals by way of a float that is 2^-14 too large: exact, and never a subnormal float32.
    small = np.float32(np.uint32(shifted + np.uint32(0x38800000)).view(np.float32)) - np.float32(
        2.0**-14
    )
    normal = shifted + (
        np.uint32(224 << 23) if magnitude >= np.uint32(0x7C00) else np.uint32(112 << 23)
    )
    value = np.float32(small).view(np.uint32) if magnitude < np.uint32(0x400) else normal
    return np.uint32(np.uint32(value) | sign).view(np.float32)


@inline
def decode_f32(raw: Any) -> Any:  # compiled
    return np.uint32(raw).view(np.float32)


@inline
def decode_f64(raw: Any) -> Any:  # compiled
    return np.uint64(raw).view(np.float64)


@inline
def round_to_odd(value: Any) -> Any:  # compiled
    """float64 to a float32 that rounds on to 16 bits just as the float64 would.

    What does not fit is cut off, and the last bit says so.
    """
    near = np.float32(value)
    is_larger = abs(np.float64(near)) > abs(value)
    bits = np.uint32(np.float32(near).view(np.uint32) - np.uint32(is_larger))
    is_cut = np.float64(bits.view(np.float32)) != value
    return np.uint32(bits | np.uint32(is_cut)).view(np.float32)


@inline
def encode_bf16(value: Any) -> Any:  # compiled
    bits = np.float32(value).view(np.uint32)
    return np.uint16(
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    )


@inline
def encode_f16(value: Any) -> Any:  # compiled
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Subnormals: adding 0.5 leaves the wanted bits, rounded to nearest even, at the low end.
    nudged = np.float32(np.uint32(magnitude).view(np.float32)) + np.float32(0.5)
    small = np.float32(nudged).view(np.uint32) - np.uint32(0x3F000000)
    rounding = np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(magnitude + rounding - np.uint32(112 << 23)) >> np.uint32(13)
    return np.uint16((small if magnitude < np.uint32(0x38800000) else normal) | sign)


@inline
def encode_f32(value: Any) -> Any:  # compiled
    return np.float32(value).view(np.uint32)


@inline
def encode_f64(value: Any) -> Any:  # compiled
    return np.float64(value).view(np.uint64)


RAW: Final = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64}
DECODERS: Final = {"BF16": decode_bf16, "F16": decode_f16, "F32": decode_f32, "F64": decode_f64}
ENCODERS: Final = {"BF16": encode_bf16, "F16": encode_f16, "F32": encode_f32, "F64": encode_f64}

# --- one tile -------------------------------------------------------------------------------------


@inline
def draw(bits: Any, tile: int, k0: Any, k1: Any) -> None:  # compiled
    """Fill bits[0:TILE] with the 16 random bits of each element of a tile.

    All lanes store side by side, without shuffling, and 32-bit words are multiplied in 64 bits:
    that is what vectorises.
    """
    low = np.uint64(0xFFFFFFFF)
    first = np.uint64(tile) * np.uint64(TILE // 8)
    for lane in range(TILE // 8):
        x0 = (first & low) + np.uint64(lane)
        x1 = first >> np.uint64(32)
        x2 = np.uint64(0)
        x3 = np.uint64(0)
        a = k0
        b = k1
        for _ in range(ROUNDS):
            p0 = (x0 & low) * np.uint64(0xD2511F53)
            p1 = (x2 & low) * np.uint64(0xCD9E8D57)
            x0, x1 = (p1 >> np.uint64(32)) ^ x1 ^ a, p1 & low
            x2, x3 = (p0 >> np.uint64(32)) ^ x3 ^ b, p0 & low
            a = (a + np.uint64(0x9E3779B9)) & low
            b = (b + np.uint64(0xBB67AE85)) & low
        words = (x0, x1, x2, x3)
        for w in range(4):
            bits[lane + 256 * w] = words[w]
            bits[lane + 256 * w + 128] = words[w] >> np.uint64(16)


@inline
def pick(bits: Any, limit: Any, picked: Any) -> Any:  # compiled
    """The places of a tile that a mask keeps, in order. Gives how many they are.

    Without branches, which no processor could predict.
    """
    found = np.uint64(0)
    for j in range(TILE):
        picked[found] = j
        found += np.uint64(bits[j] <= limit)
    return found


def count_zeros(_: Any, word: Any) -> Any:
    """The zeros below the lowest bit of a word, which must have one: an instruction."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


find_first_bit = importlib.import_module("numba.extending").intrinsic(count_zeros)


@inline
def scatter(
    entries: Any, bits: Any, limit: Any, flags: Any, words: Any, values: Any
) -> Any:  # compiled
    """Put entries where a mask keeps them, as far as there are any. Gives how many it keeps.

    flags: room for a byte for each value of the tile; words: the same as 64-bit words.
    """
    for j in range(TILE):
        flags[j] = np.uint8(bits[j] <= limit)
    for j in range(len(values), TILE):
        flags[j] = 0
    kept = np.uint16(0)
    for j in range(TILE):
        kept = np.uint16(kept + np.uint16(flags[j]))
    done = np.uint64(0)
    for first in range(np.uint64(0), np.uint64(TILE), np.uint64(64)):
        mask = np.uint64(0)
        for byte in range(np.uint64(8)):
            # Eight flags become eight bits: each is multiplied to its place in the highest byte.
            flagged = words[first // np.uint64(8) + byte] * np.uint64(0x0102040810204080)
            mask |= (flagged >> np.uint64(56)) << (np.uint64(8) * byte)
        while mask and done < np.uint64(len(entries)):
            values[first + find_first_bit(mask)] = entries[done]
            done += np.uint64(1)
            mask &= mask - np.uint64(1)
    return np.int64(kept)


@inline
def choose_by_rank(bits: Any, limits: Any, divisors: Any) -> Any:  # compiled
    """Make bits those of a mask that keeps what is below limits of their own. Gives its limit."""
    for j in range(TILE):
        divisors[j] = (limits[j] + np.float32(1)) / np.float32(65536)
        bits[j] = np.uint16(bits[j] > limits[j])
    return np.uint16(0)


@inline
def fold(values: Any) -> Any:  # compiled
    """The sum of a tile, by halves, which vectorises and loses less than a running sum.

    Overwrites the tile.
    """
    half = TILE // 2
    while half > 0:
        for j in range(half):
            values[j] += values[j + half]
        half //= 2
    return values[0]


# --- templates ----------------------------------------------------------------------------------

# The names that are filled in: the type to compute in, and the unsigned integers of its size; those
# of stored values, and how these become values and back; variants of thin_row; what a kernel does
# to a tile.
FILLED_IN: Final[Any] = None
real = unsigned = base_raw = finetuned_raw = output_raw = FILLED_IN
decode = decode_finetuned = narrow = encode = combine = note = FILLED_IN
thin_rare = is_apart = is_rare = FILLED_IN


# What a kernel is given of a chunk, as arrays: where it begins and ends, stored values, records of
# the models and of the tensor, what kernels count, the limits or numbers of entries, sums by tiles
# (in the output's place); rows of scratch, and one in float64. Kept: a row for each model.
Chunk = namedtuple(
    "Chunk",
    "first_tile tiles count raw_base raw_models models tensors counts limits by_entry sums"
    " bits base merged size left right zeros divisors kept wide",
)


def open_chunk(
    base_at: Any,
    finetuned_at: Any,
    output_at: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    counts_at: Any,
    limits_at: Any,
    count: int,
    stride: int,
    models: int,
    first_tile: int,
) -> Any:  # compiled
    """Addresses as arrays, with zeros behind the last tile and for a base of zeros."""
    tiles = (count + TILE - 1) // TILE
    base = carray(base_at, (tiles * TILE,), base_raw)
    finetuned = carray(finetuned_at, (models, stride), finetuned_raw)
    tensors = carray(tensor_at, (1,), TENSOR)
    ends: Any = np.int64(tensors[0].ends)
    rows = SCRATCH_ROWS + max(models, ends)
    scratch = carray(scratch_at, (rows, SCRATCH_WIDTH), real)
    base[count:] = 0
    finetuned[:, count : tiles * TILE] = 0
    scratch[ZERO_ROW] = 0
    return Chunk(
        first_tile=first_tile,
        tiles=tiles,
        count=count,
        raw_base=base,
        raw_models=finetuned,
        models=carray(models_at, (models,), MODEL),
        tensors=tensors,
        counts=carray(counts_at, (3, 1 << DIGIT_BITS), np.uint32),
        limits=carray(limits_at, (models, stride * finetuned.itemsize // 2), np.uint16),
        by_entry=carray(limits_at, (tiles * TILE,), np.float32),
        sums=carray(output_at, (rows * rows, tiles), np.float64),
        bits=carray(scratch_at, (TILE,), np.uint16),
        base=scratch[BASE_ROW],
        merged=scratch[MERGED_ROW],
        size=scratch[SIZE_ROW],
        left=scratch[LEFT_ROW],
        right=scratch[RIGHT_ROW],
        zeros=scratch[ZERO_ROW],
        divisors=scratch[DIVISOR_ROW],
        kept=scratch[SCRATCH_ROWS:],
        wide=carray(scratch_at, (rows + 1, SCRATCH_WIDTH), np.float64)[rows],
    )


def load_base(chunk: Any, tile: int) -> None:  # compiled
    raw = chunk.raw_base[tile * TILE : (tile + 1) * TILE]
    for j in range(TILE):
        chunk.base[j] = decode(raw[j])


def thin_model(chunk: Any, tile: int, i: int, row: Any, total: Any) -> None:  # compiled
    """One tile of one model, from stored values to thinned deltas: the heart of all kernels.

    They are added to a total; where they are wanted apart, they are what a row holds, too.
    """
    model = chunk.models[i]
    start = tile * TILE
    raw = chunk.raw_models[i, start : start + TILE]
    base = chunk.zeros if model.is_delta else chunk.base
    bits = chunk.bits
    limit = np.uint16(model.limit)
    # No bits are above a limit that keeps all: whatever is there from before will do.
    drops_some = model.ranked or limit < np.uint16((1 << MASK_BITS) - 1)
    if model.bounded:
        drops_some = model.at_low + model.at_high < np.uint64(2 << MASK_BITS)
    if drops_some:
        draw(bits, chunk.first_tile + tile, model.key_0, model.key_1)
    if model.bounded:
        limit = choose_by_size(raw, base, model, bits)
    if model.ranked:
        limit = choose_by_rank(bits, chunk.limits[i, start : start + TILE], chunk.divisors)
    if model.divided or model.floor > 0:
        thin_rare(chunk, raw, model, base, limit, row, total)
    else:
        thin_row(chunk, raw, model, base, limit, row, total)
    for j in range(chunk.count - start, TILE):  # what pads a last tile was counted too
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
    chunk: Any, raw: Any, model: Any, base: Any, limit: Any, row: Any, total: Any
) -> None:  # compiled
    """is_rare: a model that is divided (each entry by its own divisor) or trimmed."""
    threshold = real(chunk.tensors[0].threshold)
    floor = real(model.floor)
    scale = real(model.scale)
    divided = model.divided != 0
    peak = unsigned(model.peak)
    above = np.uint32(0)
    survivors = np.uint32(0)
    for j in range(TILE):
        delta = decode_finetuned(raw[j]) - base[j]
        magnitude = abs(delta)
        chunk.size[j] = magnitude
        # As integers, a NaN or an infinity is the largest of all, and the loop vectorises.
        peak = max(peak, real(magnitude).view(unsigned))
        above = np.uint32(above + np.uint32(magnitude > threshold))
        survives = chunk.bits[j] <= limit
        survivors = np.uint32(survivors + np.uint32(survives))
        scaled = delta * scale
        if is_rare:
            scaled = scaled / chunk.divisors[j] if divided else scaled
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


# In an order in which each is filled in before what calls it.
TEMPLATES: Final = (thin_row, choose_by_size, thin_model, load_base, open_chunk, find_pattern)


def fill_in(template: Any, names: Mapping[str, Any]) -> FunctionType:
    """A copy of a function to which some global names mean something else."""
    return FunctionType(template.__code__, {**template.__globals__, **names}, template.__name__)


@cache  # so that what several kernels have in common is compiled once
def list_names(base: str, finetuned: str, is_wide: bool, is_apart: bool) -> dict[str, Any]:
    names: dict[str, Any] = {
        "real": np.float64 if is_wide else np.float32,
        "unsigned": np.uint64 if is_wide else np.uint32,
        "base_raw": RAW[base],
        "finetuned_raw": RAW[finetuned],
        "decode": DECODERS[base],
        "decode_finetuned": DECODERS[finetuned],
        "is_apart": is_apart,
        "is_rare": False,
    }
    names["thin_rare"] = inline(fill_in(thin_row, {**names, "is_rare": True}))
    for template in TEMPLATES:
        names[template.__name__] = inline(fill_in(template, names))
    return names
