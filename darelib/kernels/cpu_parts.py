"""What all kernels for the CPU are made of, for Numba: their types, and the functions of one tile.

The arithmetic is that of darelib.kernels.plain, to the bit. Loops are what LLVM vectorises well: a
fixed number of turns, slices rather than offsets, no output that could be an input under another
name. What Numba compiles is marked `# compiled`: coverage cannot see it, since it runs without the
interpreter.

A function that depends on the stored types is made by a function of these `Types`: Numba takes what
it finds in such a closure for constants. A kernel is given one address, that of a record of
darelib.kernels.records, which has the addresses of arrays and numbers by their names.
"""

import importlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir

from darelib.core.formats import FORMATS
from darelib.core.mask import KEEP_ALL, MASK_BITS, ROUNDS, TILE
from darelib.kernels import KernelSpec
from darelib.kernels.records import (
    BASE_ROW,
    CHUNK,
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
intrinsic: Any = importlib.import_module("numba.extending").intrinsic

# A function that is compiled into the kernels that call it.
inline: Callable[[Callable[..., Any]], Any] = numba.njit(
    forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)

# --- arrays ---------------------------------------------------------------------------------------


def point(_: Any, address: Any) -> Any:
    """An address, which records have as an integer, as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = context.get_value_type(signature.return_type)
        return builder.inttoptr(arguments[0], pointer)

    return numba.types.voidptr(address), generate


point_to = intrinsic(point)


@inline
def view(address: Any, shape: Any, dtype: Any) -> Any:  # compiled
    """The array that begins at an address."""
    return numba.carray(point_to(address), shape, dtype)


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
def pick(bits: Any, last: Any, picked: Any) -> Any:  # compiled
    """The places of a tile that a mask keeps, in order. Gives how many they are.

    last: the largest bits that are kept. Without branches, which no processor could predict.
    """
    found = np.uint64(0)
    for j in range(TILE):
        picked[found] = j
        found += np.uint64(bits[j] <= last)
    return found


def count_zeros(_: Any, word: Any) -> Any:
    """The zeros below the lowest bit of a word, which must have one: an instruction."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return word(word), generate


find_first_bit = intrinsic(count_zeros)


@inline
def scatter(
    entries: Any, bits: Any, last: Any, flags: Any, words: Any, values: Any
) -> Any:  # compiled
    """Put entries where a mask keeps them, as far as there are any. Gives how many it keeps.

    flags: room for a byte for each value of the tile; words: the same as 64-bit words.
    """
    for j in range(TILE):
        flags[j] = np.uint8(bits[j] <= last)
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
def choose_by_rank(bits: Any, last_bits: Any, divisors: Any) -> Any:  # compiled
    """Make bits those of a mask that keeps entries up to bits of their own. Gives its last bits."""
    for j in range(TILE):
        divisors[j] = (last_bits[j] + np.float32(1)) / np.float32(65536)
        bits[j] = np.uint16(bits[j] > last_bits[j])
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


# --- types ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Types:
    """What a kernel computes in, and what it reads, as Numba knows it."""

    real: Any  # the floats to compute in
    pattern: Any  # unsigned integers of their size
    base: Any  # unsigned integers, as which values are stored
    finetuned: Any
    decode_base: Any
    decode_finetuned: Any


def find_types(code: KernelSpec) -> Types:
    is_wide = code.real == "F64"
    return Types(
        real=np.float64 if is_wide else np.float32,
        pattern=np.uint64 if is_wide else np.uint32,
        base=RAW[code.base],
        finetuned=RAW[code.finetuned],
        decode_base=DECODERS[code.base],
        decode_finetuned=DECODERS[code.finetuned],
    )


def make_encoder(code: KernelSpec) -> Any:
    encode = ENCODERS[code.output]

    @inline
    def encode_by_odd(value: Any) -> Any:  # compiled
        return encode(round_to_odd(value))

    rounds_twice = code.real == "F64" and FORMATS[code.output].bits == 16
    return encode_by_odd if rounds_twice else encode


# --- chunks ---------------------------------------------------------------------------------------

# What a kernel is given of a chunk, as arrays: where it begins and ends, stored values, records of
# the models and of the tensor, the last bits that are kept of entries, sums by tiles (in the
# output's place); rows of scratch, and one in float64. Kept: a row for each model.
Chunk = namedtuple(
    "Chunk",
    "first_tile tiles count raw_base raw_models models tensors last_bits sums"
    " bits base merged size left right zeros divisors kept wide",
)


@cache  # as the others: what several kernels have in common is compiled once
def make_opener(types: Types) -> Any:
    real, base_raw, finetuned_raw = types.real, types.base, types.finetuned
    itemsize = np.dtype(types.finetuned).itemsize

    @inline
    def open_chunk(given_at: Any) -> Any:  # compiled
        """Addresses as arrays, with zeros behind the last tile and for a base of zeros."""
        given = numba.carray(given_at, (1,), CHUNK)[0]
        count = given.count
        models = given.model_count
        tiles = (count + TILE - 1) // TILE
        base = view(given.base, (tiles * TILE,), base_raw)
        finetuned = view(given.finetuned, (models, given.row_bytes // itemsize), finetuned_raw)
        tensors = view(given.tensor, (1,), TENSOR)
        rows = SCRATCH_ROWS + max(models, np.int64(tensors[0].ends))
        scratch = view(given.scratch, (rows, SCRATCH_WIDTH), real)
        base[count:] = 0
        finetuned[:, count : tiles * TILE] = 0
        scratch[ZERO_ROW] = 0
        return Chunk(
            first_tile=given.first_tile,
            tiles=tiles,
            count=count,
            raw_base=base,
            raw_models=finetuned,
            models=view(given.models, (models,), MODEL),
            tensors=tensors,
            last_bits=view(given.last_bits, (models, given.row_bytes // 2), np.uint16),
            sums=view(given.output, (rows * rows, tiles), np.float64),
            bits=view(given.scratch, (TILE,), np.uint16),
            base=scratch[BASE_ROW],
            merged=scratch[MERGED_ROW],
            size=scratch[SIZE_ROW],
            left=scratch[LEFT_ROW],
            right=scratch[RIGHT_ROW],
            zeros=scratch[ZERO_ROW],
            divisors=scratch[DIVISOR_ROW],
            kept=scratch[SCRATCH_ROWS:],
            wide=view(given.scratch, (rows + 1, SCRATCH_WIDTH), np.float64)[rows],
        )

    return open_chunk


@cache
def make_loader(types: Types) -> Any:
    decode = types.decode_base

    @inline
    def load_base(chunk: Any, tile: int) -> None:  # compiled
        raw = chunk.raw_base[tile * TILE : (tile + 1) * TILE]
        for j in range(TILE):
            chunk.base[j] = decode(raw[j])

    return load_base


@cache
def make_thinner(types: Types, is_apart: bool) -> Any:
    """is_apart: whether thinned deltas are wanted in a row of their own."""
    thin_row = make_row_thinner(types, is_apart, is_rare=False)
    thin_rare_row = make_row_thinner(types, is_apart, is_rare=True)
    choose_by_size = make_chooser(types)

    @inline
    def thin_model(chunk: Any, tile: int, i: int, row: Any, total: Any) -> None:  # compiled
        """One tile of one model, from stored values to thinned deltas: the heart of all kernels.

        They are added to a total; where they are wanted apart, they are what a row holds, too.
        """
        model = chunk.models[i]
        start = tile * TILE
        raw = chunk.raw_models[i, start : start + TILE]
        base = chunk.zeros if model.is_delta else chunk.base
        bits = chunk.bits
        last = np.uint16(model.threshold - np.uint64(1))
        # Where all is kept, no bits are above the last: whatever is there from before will do.
        drops_some = model.ranked or model.threshold < np.uint64(KEEP_ALL)
        if model.bounded:
            drops_some = model.at_low + model.at_high < np.uint64(2 << MASK_BITS)
        if drops_some:
            draw(bits, chunk.first_tile + tile, model.key_0, model.key_1)
        if model.bounded:
            last = choose_by_size(raw, base, model, bits)
        if model.ranked:
            last = choose_by_rank(bits, chunk.last_bits[i, start : start + TILE], chunk.divisors)
        if model.divided or model.floor > 0:
            thin_rare_row(chunk, raw, model, base, last, row, total)
        else:
            thin_row(chunk, raw, model, base, last, row, total)
        for j in range(chunk.count - start, TILE):  # what pads a last tile was counted too
            model.kept -= np.uint64(bits[j] <= last)

    return thin_model


def make_chooser(types: Types) -> Any:
    real, decode = types.real, types.decode_finetuned

    @inline
    def choose_by_size(raw: Any, base: Any, model: Any, bits: Any) -> Any:  # compiled
        """Make bits those of a mask that keeps what is within bounds. Gives its last bits."""
        low, high = real(model.low), real(model.high)
        at_low, at_high = np.uint32(model.at_low), np.uint32(model.at_high)
        for j in range(TILE):
            magnitude = abs(decode(raw[j]) - base[j])
            is_low = magnitude == low
            is_high = magnitude == high
            survives = np.uint32(bits[j]) < (at_low if is_low else at_high)
            kept = (magnitude > low and magnitude < high) or ((is_low or is_high) and survives)
            bits[j] = np.uint16(0) if kept else np.uint16(1)
        return np.uint16(0)

    return choose_by_size


def make_row_thinner(types: Types, is_apart: bool, is_rare: bool) -> Any:
    """is_rare: for a model that is divided (each entry by its own divisor) or trimmed."""
    real, pattern, decode = types.real, types.pattern, types.decode_finetuned

    @inline
    def thin_row(
        chunk: Any, raw: Any, model: Any, base: Any, last: Any, row: Any, total: Any
    ) -> None:  # compiled
        large = real(chunk.tensors[0].delta_threshold)
        floor = real(model.floor)
        scale = real(model.scale)
        divided = model.divided != 0
        peak = pattern(model.peak)
        above = np.uint32(0)
        survivors = np.uint32(0)
        for j in range(TILE):
            delta = decode(raw[j]) - base[j]
            magnitude = abs(delta)
            chunk.size[j] = magnitude
            # As integers, a NaN or an infinity is the largest of all, and the loop vectorises.
            peak = max(peak, real(magnitude).view(pattern))
            above = np.uint32(above + np.uint32(magnitude > large))
            survives = chunk.bits[j] <= last
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

    return thin_row


@cache
def make_pattern_finder(types: Types) -> Any:
    real, pattern = types.real, types.pattern
    decode_base, decode_finetuned = types.decode_base, types.decode_finetuned

    @inline
    def find_pattern(value: Any, base: Any, minus_base: Any) -> Any:  # compiled
        """The bits of |delta|."""
        delta = real(decode_finetuned(value))
        if minus_base:
            delta = real(delta - real(decode_base(base)))
        return real(abs(delta)).view(pattern)

    return find_pattern
