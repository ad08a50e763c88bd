"""The inner functions of the Numba kernels: one value, or one tile at a time.

The arithmetic is that of darelib.kernels.plain, to the bit. Loops are what LLVM vectorises well: a
fixed number of turns, slices rather than offsets, no output that could be an input under another
name. What Numba compiles is marked `# compiled`: coverage cannot see it, since it runs without the
interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir

from darelib.core.mask import ROUNDS, TILE
from darelib.kernels.records import BINS, FIRST_BIN, SORT_BITS

numba: Any = importlib.import_module("numba")  # whose types say less than its functions accept
carray = numba.carray


def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it."""
    options = {
        "forceinline": True,
        "error_model": "numpy",
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
    }
    return numba.njit(**options)(function)


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
    bits = np.float32(near).view(np.uint32)
    if abs(np.float64(near)) > abs(value):
        bits = np.uint32(bits - np.uint32(1))
    if np.float64(np.uint32(bits).view(np.float32)) != value:
        bits = np.uint32(bits | np.uint32(1))
    return np.uint32(bits).view(np.float32)


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
        bits[lane] = x0
        bits[lane + 128] = x0 >> np.uint64(16)
        bits[lane + 256] = x1
        bits[lane + 384] = x1 >> np.uint64(16)
        bits[lane + 512] = x2
        bits[lane + 640] = x2 >> np.uint64(16)
        bits[lane + 768] = x3
        bits[lane + 896] = x3 >> np.uint64(16)


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


find_first_bit = numba.extending.intrinsic(count_zeros)


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
def rank_row(
    patterns: Any, places: Any, counts: Any, by_rank: Any, limits: Any, first: int
) -> None:  # compiled
    """Give each entry of a row the limit of its rank; of equal patterns, the first comes first.

    first: the row's place in limits. patterns and places have two rows each: the first what to
    sort, the second to work in. A radix sort, by no more bits than differ, which are counted for
    all its passes at once.
    """
    width = patterns.shape[1]
    differing = np.uint64(0)
    low = np.uint64(0)
    span = 0
    for j in range(width):
        differing |= np.uint64(patterns[0, j] ^ patterns[0, 0])
    while differing and not differing & np.uint64(1):
        differing >>= np.uint64(1)
        low += np.uint64(1)
    while differing:
        differing >>= np.uint64(1)
        span += 1
    passes = max(1, -(-span // (SORT_BITS - 1 if width < 4096 else SORT_BITS)))
    bits = np.uint64(max(1, -(-span // passes)))
    size = 1 << np.int64(bits)
    last = np.uint64(size - 1)
    for k in range(passes * size):
        counts[k] = 0
    for j in range(width):
        key = np.uint64(patterns[0, j]) >> low
        for k in range(passes):
            counts[k * size + np.int64(key & last)] += np.uint32(1)
            key >>= bits
    for k in range(passes):
        total = np.uint32(0)
        for b in range(k * size, (k + 1) * size):
            total, counts[b] = np.uint32(total + counts[b]), total
    now = 0
    for k in range(passes - 1):
        keys, others = patterns[now], patterns[1 - now]
        before, after = places[now], places[1 - now]
        ranks = counts[k * size : (k + 1) * size]
        for j in range(width):
            key = keys[j]
            bucket = (np.uint64(key) >> low) & last
            rank = ranks[bucket]
            ranks[bucket] = np.uint32(rank + np.uint32(1))
            others[rank] = key
            after[rank] = before[j]
        now = 1 - now
        low += bits
    keys = patterns[now]
    before = places[now]
    ranks = counts[(passes - 1) * size : passes * size]
    for j in range(width):  # the last time, what is found is the rank itself
        bucket = (np.uint64(keys[j]) >> low) & last
        rank = ranks[bucket]
        ranks[bucket] = np.uint32(rank + np.uint32(1))
        place = first + np.int64(before[j])
        if place >= 0 and place < len(limits):
            limits[place] = by_rank[rank]


@inline
def rank_short_row(
    patterns: Any, places: Any, by_rank: Any, limits: Any, first: int
) -> None:  # compiled
    """The same for a few entries, in one row: counting would take longer."""
    for j in range(1, len(patterns)):
        key = patterns[j]
        place = places[j]
        k = j
        while k > 0 and patterns[k - 1] > key:
            patterns[k] = patterns[k - 1]
            places[k] = places[k - 1]
            k -= 1
        patterns[k] = key
        places[k] = place
    for j in range(len(patterns)):
        where = first + np.int64(places[j])
        if where >= 0 and where < len(limits):
            limits[where] = by_rank[j]


@inline
def elect(
    kept: Any, models: Any, merged: Any, total: Any, share: Any, first_share: Any, any_sign: bool
) -> None:  # compiled
    """Ties: elect each position's sign by the sum, then average, by weight, the models that agree.

    Or, of any sign, those that have a delta there.
    """
    zero = kept.dtype.type(0)  # a plain 0 would make float64 of float32
    for j in range(TILE):
        total[j] = zero
        share[j] = first_share
    for i in range(len(models)):
        row = kept[i]
        weight = kept.dtype.type(models[i].weight)
        for j in range(TILE):
            has_sign = row[j] > 0 if merged[j] >= 0 else row[j] < 0
            agrees = row[j] != 0 if any_sign else has_sign
            total[j] += row[j] if agrees else zero
            share[j] += weight if agrees else zero
    for j in range(TILE):
        merged[j] = total[j] / share[j] if share[j] > 0 else zero


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


@inline
def multiply(one: Any, other: Any, products: Any) -> Any:  # compiled
    """The scalar product of two tiles, in float64. Overwrites products."""
    for j in range(TILE):
        products[j] = np.float64(one[j]) * np.float64(other[j])
    return fold(products)


@inline
def pad_rows(rows: Any, start: int, stop: int) -> None:  # compiled
    """Zeros for the rest of a last tile, so that the loops need not stop within one."""
    for row in range(len(rows)):
        for j in range(start, stop):
            rows[row, j] = 0


@inline
def fold_neighbours(values: Any) -> Any:  # compiled
    """A sum by pairs of neighbours: the same for a whole tensor as for its pieces of 2^k values."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        for k in range(half):
            values[k] = values[2 * k] + (values[2 * k + 1] if 2 * k + 1 < count else 0.0)
        count = half
    return values[0]


@inline
def compare_signs(one: Any, other: Any, opposed: Any, both: Any, pair: Any) -> None:  # compiled
    """How many positions two models change in opposite directions, or both change; by how much."""
    zero = opposed.dtype.type(0)
    against = np.uint32(0)
    shared = np.uint32(0)
    for j in range(TILE):
        a, b = one[j], other[j]
        is_opposed = (a > 0 and b < 0) or (a < 0 and b > 0)
        is_both = a != 0 and b != 0
        against = np.uint32(against + np.uint32(is_opposed))
        shared = np.uint32(shared + np.uint32(is_both))
        size = abs(a) + abs(b)
        opposed[j] = size if is_opposed else zero
        both[j] = size if is_both else zero
    pair.opposed += np.float64(against)
    pair.both += np.float64(shared)


@inline
def compare_all(deltas: Any, left: Any, right: Any, size: Any, pair: Any) -> None:  # compiled
    """How many positions any two models change in opposite directions, or several change."""
    zero = left.dtype.type(0)
    one = left.dtype.type(1)
    for j in range(TILE):
        left[j] = zero
        right[j] = zero
        size[j] = zero
    for i in range(len(deltas)):
        row = deltas[i]
        for j in range(TILE):
            left[j] += one if row[j] > 0 else zero
            right[j] += one if row[j] < 0 else zero
            size[j] += abs(row[j])
    mixed = np.uint32(0)
    several = np.uint32(0)
    for j in range(TILE):
        is_mixed = left[j] > 0 and right[j] > 0
        is_several = left[j] + right[j] > 1
        mixed = np.uint32(mixed + np.uint32(is_mixed))
        several = np.uint32(several + np.uint32(is_several))
        left[j] = size[j] if is_mixed else zero
        right[j] = size[j] if is_several else zero
    pair.opposed += np.float64(mixed)
    pair.both += np.float64(several)


@inline
def find_bins(size: Any, bins: Any) -> None:  # compiled
    """The bin of each |delta| of a tile."""
    for j in range(TILE):
        place = np.float32(size[j]).view(np.uint32) >> np.uint32(19)
        place = place if place > np.uint32(FIRST_BIN) else np.uint32(FIRST_BIN)
        place = np.uint32(place - np.uint32(FIRST_BIN))
        bins[j] = np.uint16(place if place < np.uint32(BINS - 1) else np.uint32(BINS - 1))
