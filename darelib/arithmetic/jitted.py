"""The functions of chunks.py once more, for Numba, bit for bit.

Loops are what LLVM vectorises well: over the elements of a tile, into arrays that are no input,
with sums and peaks by lane. What Numba compiles is marked `# compiled`: coverage cannot see it. All
of it is in this file: by that file's time, Numba knows when to compile again.
"""

import importlib
from typing import Any, Final

import numpy as np

from darelib.core.formats import BINS, DIGIT_BITS, FIRST_BIN
from darelib.core.mask import ROUNDS, TILE

numba: Any = importlib.import_module("numba")  # its types say less than its functions accept
overload: Any = importlib.import_module("numba.extending").overload
inline: Any = numba.njit(forceinline=True, error_model="numpy")

# The entries of a row are ranked by so many bits of their pattern at a time, or one less.
SORT_BITS: Final = 11
SORT_COUNTERS: Final = 64 // (SORT_BITS - 1) + 1 << SORT_BITS
SHORT: Final = 16  # so few entries of a row are compared with each other


def jit(function: Any) -> Any:
    """Compile a function at its first call, and keep it for later runs if there is a place."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return numba.njit(nogil=True, error_model="numpy")(function)


def find_pattern(size: Any) -> Any:
    """A size as an unsigned integer: in the same order, with what is not finite last."""


def find_peak(pattern: Any) -> Any:
    """The size that has this pattern, infinite if it is not finite."""


@overload(find_pattern)
def define_pattern(size: Any) -> Any:
    real, raw = (np.float64, np.uint64) if size == numba.float64 else (np.float32, np.uint32)

    def convert(size: Any) -> Any:  # compiled
        return real(size).view(raw)

    return convert


@overload(find_peak)
def define_peak(pattern: Any) -> Any:
    real, raw = (np.float64, np.uint64) if pattern == numba.uint64 else (np.float32, np.uint32)

    def convert(pattern: Any) -> Any:  # compiled
        peak = np.float64(raw(pattern).view(real))
        return peak if peak < np.inf else np.inf

    return convert


# --- stored values --------------------------------------------------------------------------------


@jit
def widen_bf16(raw: Any, values: Any) -> None:  # compiled
    bits = values.view(np.uint32)
    for j in range(len(raw)):
        bits[j] = np.uint32(raw[j]) << np.uint32(16)


@jit
def widen_f16(raw: Any, values: Any) -> None:  # compiled
    made = values.view(np.uint32)
    for j in range(len(raw)):
        magnitude = np.uint32(raw[j]) & np.uint32(0x7FFF)
        sign = (np.uint32(raw[j]) & np.uint32(0x8000)) << np.uint32(16)
        shifted = magnitude << np.uint32(13)
        # Subnormals by way of a float that is 2^-14 too large: exact, never a subnormal float32.
        large = np.uint32(shifted + np.uint32(0x38800000)).view(np.float32)
        small = np.float32(large - np.float32(2.0**-14)).view(np.uint32)
        exponent = np.uint32(224 << 23 if magnitude >= np.uint32(0x7C00) else 112 << 23)
        made[j] = (small if magnitude < np.uint32(0x400) else shifted + exponent) | sign


@jit
def narrow_bf16(values: Any) -> Any:  # compiled
    bits = values.view(np.uint32)
    raw = np.empty(len(bits), np.uint16)
    for j in range(len(bits)):
        odd = (bits[j] >> np.uint32(16)) & np.uint32(1)
        raw[j] = np.uint16((bits[j] + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return raw


@jit
def narrow_f16(values: Any) -> Any:  # compiled
    bits = values.view(np.uint32)
    raw = np.empty(len(bits), np.uint16)
    for j in range(len(bits)):
        sign = (bits[j] & np.uint32(0x80000000)) >> np.uint32(16)
        magnitude = np.uint32(bits[j] & np.uint32(0x7FFFFFFF))
        # Subnormals: adding 0.5 leaves the wanted bits, rounded to nearest even, at the low end.
        nudged = np.float32(magnitude.view(np.float32) + np.float32(0.5))
        small = nudged.view(np.uint32) - np.uint32(0x3F000000)
        rounding = np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
        normal = np.uint32(magnitude + rounding - np.uint32(112 << 23)) >> np.uint32(13)
        normal = min(normal, np.uint32(0x7C00))
        normal = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else normal
        raw[j] = np.uint16((small if magnitude < np.uint32(0x38800000) else normal) | sign)
    return raw


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
        a = np.uint64(k0)
        b = np.uint64(k1)
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
    count = np.uint64(0)
    for j in range(TILE):
        picked[count] = j
        count += np.uint64(bits[j] <= last)
    return count


@inline
def fold(values: Any) -> Any:  # compiled
    """The sum of a tile, by halves, which vectorises. Overwrites the tile."""
    half = TILE // 2
    while half > 0:
        for j in range(half):
            values[j] += values[j + half]
        half //= 2
    return values[0]


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
def choose_by_size(mine: Any, own: Any, cut: Any, bits: Any) -> None:  # compiled
    """Make bits 0 where |delta| is within the bounds, else 1."""
    real = mine.dtype.type
    low, high = real(cut.low), real(cut.high)
    at_low, at_high = np.uint32(cut.at_low), np.uint32(cut.at_high)
    for j in range(len(mine)):
        magnitude = abs(mine[j] - own[j])
        is_low = magnitude == low
        is_high = magnitude == high
        survives = np.uint32(bits[j]) < (at_low if is_low else at_high)
        kept = (magnitude > low and magnitude < high) or ((is_low or is_high) and survives)
        bits[j] = np.uint16(0) if kept else np.uint16(1)


@inline
def choose_by_rank(last_bits: Any, bits: Any, divisors: Any) -> None:  # compiled
    """Make bits 0 where they are at most bits of their own, else 1."""
    for j in range(len(last_bits)):
        divisors[j] = (last_bits[j] + np.float32(1)) / np.float32(65536)
        bits[j] = np.uint16(bits[j] > last_bits[j])


# --- merging --------------------------------------------------------------------------------------


@inline
def thin_tile(
    mine: Any, own: Any, kept: Any, made: Any, sizes: Any, numbers: Any, is_rare: bool
) -> Any:  # compiled
    """One loop, which vectorises: the heart of a merge. Gives the largest pattern, and two counts.

    is_rare: entries have divisors of their own, or a floor.
    """
    bits, last, divisors = kept
    scale, floor, large, divided = numbers
    zero = scale - scale
    peak = find_pattern(zero)
    above = np.uint32(0)
    survivors = np.uint32(0)
    for j in range(len(mine)):
        delta = mine[j] - own[j]
        size = abs(delta)
        sizes[j] = size
        peak = max(peak, find_pattern(size))
        above = np.uint32(above + np.uint32(size > large))
        survives = bits[j] <= last
        survivors = np.uint32(survivors + np.uint32(survives))
        scaled = delta * scale
        if is_rare:
            scaled = scaled / divisors[j] if divided else scaled
            scaled = scaled if size >= floor else zero
        made[j] = scaled if survives else zero
    return peak, above, survivors


@inline
def average_tile(rows: Any, how: Any, merged: Any, total: Any, share: Any) -> None:  # compiled
    """Average the rows that are not 0 or, elects, that have the sign of what merged holds."""
    real = merged.dtype.type
    zero = real(0)  # a plain 0 would make float64 of float32
    total[:] = zero
    share[:] = real(how.first_share)
    for i in range(len(rows)):
        row = rows[i]
        weight = real(how.weights[i])
        for j in range(TILE):
            has_sign = row[j] > 0 if merged[j] >= 0 else row[j] < 0
            agrees = has_sign if how.elects else row[j] != 0
            total[j] += row[j] if agrees else zero
            share[j] += weight if agrees else zero
    for j in range(TILE):
        merged[j] = total[j] / share[j] if share[j] > 0 else zero


@inline
def change_tile(own: Any, merged: Any, factor: Any, made: Any) -> Any:  # compiled
    """Gives the largest pattern."""
    peak = find_pattern(factor - factor)
    for j in range(len(own)):
        change = factor * merged[j]
        total = own[j] + change
        value = own[j] if change == 0 else total  # base + 0 would turn -0.0 into 0.0
        peak = max(peak, find_pattern(abs(value)))
        made[j] = value
    return peak


@jit
def merge(
    base: Any,
    values: Any,
    cuts: Any,
    last_bits: Any,
    start: int,
    large: float,
    how: Any,
    rows: Any,
    merged: Any,
) -> Any:  # compiled
    real = base.dtype.type
    models = len(values)
    first_tile = start // TILE
    first_place = start % TILE
    tiles = (first_place + len(base) + TILE - 1) // TILE
    sums = np.empty((models + 1, tiles), base.dtype)
    peaks = np.zeros(models + 1, np.float64)
    counts = np.zeros((models, 2), np.int64)
    scratch = np.zeros((models, TILE), base.dtype)
    zeros = np.zeros(TILE, base.dtype)
    sizes = np.empty(TILE, base.dtype)
    total = np.empty(TILE, base.dtype)
    spare = np.empty(TILE, base.dtype)
    divisors = np.empty(TILE, base.dtype)
    all_bits = np.empty(TILE, np.uint16)
    all_bits[:] = np.uint16(0)
    for tile in range(tiles):
        low = max(tile * TILE - first_place, 0)
        high = min((tile + 1) * TILE - first_place, len(base))
        width = high - low
        skipped = low + first_place - tile * TILE  # where values begin within a tile
        bits = all_bits[skipped:]
        own = base[low:high]
        for i in range(models):
            cut = cuts[i]
            if width < TILE:
                sizes[:] = real(0)
            mine = values[i, low:high]
            origin = zeros[:width] if cut.is_delta else own
            if cut.draws:
                draw(all_bits, first_tile + tile, cut.key_0, cut.key_1)
            last = np.uint16(cut.threshold - 1)
            if cut.bounded:
                choose_by_size(mine, origin, cut, bits)
                last = np.uint16(0)
            if cut.ranked:
                choose_by_rank(last_bits[i, low:high], bits, divisors)
                last = np.uint16(0)
            made = rows[i, low:high] if len(rows) else scratch[i, :width]
            kept = bits, last, divisors
            numbers = real(cut.scale), real(cut.floor), real(large), cut.divided
            if cut.divided or cut.floor > 0:
                seen = thin_tile(mine, origin, kept, made, sizes[skipped:], numbers, True)
            else:
                seen = thin_tile(mine, origin, kept, made, sizes[skipped:], numbers, False)
            peaks[i] = max(peaks[i], find_peak(seen[0]))
            counts[i, 0] += seen[1]
            counts[i, 1] += seen[2]
            sums[i, tile] = fold(sizes)
        if width < TILE:
            sizes[:] = real(0)
        for j in range(width):
            sizes[skipped + j] = abs(own[j])
        sums[models, tile] = fold(sizes)
        if len(merged):
            share = real(how.base_share)
            for j in range(width):
                total[j] = share * own[j]
            for i in range(models):
                for j in range(width):
                    total[j] += scratch[i, j]
            if how.averages:
                average_tile(scratch, how, total, sizes, spare)
            factor = real(how.lambda_coeff)
            peak = change_tile(own, total, factor, merged[low:high])
            peaks[models] = max(peaks[models], find_peak(peak))
    return sums, peaks, counts


@jit
def add_change(base: Any, merged: Any, lambda_coeff: float) -> Any:  # compiled
    return find_peak(change_tile(base, merged, base.dtype.type(lambda_coeff), merged))


# --- looks ----------------------------------------------------------------------------------------


@inline
def note_pattern(pattern: Any, shift: Any, prefixes: Any, counts: Any) -> None:  # compiled
    beginning = np.uint64(pattern) >> shift
    prefix = beginning >> np.uint64(DIGIT_BITS)
    digit = np.int64(beginning & np.uint64(0xFFFF))
    if prefix == prefixes[0]:
        counts[0, digit] += np.uint32(1)
    elif prefix == prefixes[1]:
        counts[1, digit] += np.uint32(1)


@jit
def count_digits(
    base: Any,
    values: Any,
    cut: Any,
    first_tile: int,
    shift: int,
    prefixes: Any,
    counts: Any,
) -> None:  # compiled
    sizes = np.empty(TILE, values.dtype)
    bits = np.empty(TILE, np.uint16)
    picked = np.empty(2 * TILE, np.uint16)
    zeros = np.zeros(TILE, values.dtype)
    lowest = np.uint64(shift)
    for start in range(0, len(values), TILE):
        mine = values[start : start + TILE]
        own = zeros if cut.is_delta else base[start : start + TILE]
        for j in range(len(mine)):
            sizes[j] = abs(mine[j] - own[j])
        if not cut.draws:
            for j in range(len(mine)):
                note_pattern(find_pattern(sizes[j]), lowest, prefixes, counts)
            continue
        draw(bits, first_tile + start // TILE, cut.key_0, cut.key_1)
        for k in range(pick(bits, np.uint16(cut.threshold - 1), picked)):
            if picked[k] < len(mine):
                note_pattern(find_pattern(sizes[picked[k]]), lowest, prefixes, counts)


@jit
def dot(one: Any, other: Any) -> Any:  # compiled
    tiles = (len(one) + TILE - 1) // TILE
    sums = np.empty(max(tiles, 1), np.float64)
    sums[0] = 0.0
    products = np.empty(TILE, np.float64)
    for tile in range(tiles):
        mine, theirs = (
            one[tile * TILE : (tile + 1) * TILE],
            other[tile * TILE : (tile + 1) * TILE],
        )
        products[:] = 0
        for j in range(len(mine)):
            products[j] = np.float64(mine[j]) * np.float64(theirs[j])
        sums[tile] = fold(products)
    return fold_neighbours(sums)


@inline
def rank_row(
    patterns: Any, places: Any, counts: Any, by_rank: Any, last_bits: Any, first: int
) -> None:  # compiled
    """Give each entry of a row the last bits of its rank; of equal patterns, the first comes first.

    first: the row's place in last_bits. patterns and places have two rows each: the first what to
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
    for k in range(passes):
        keys, others = patterns[now], patterns[1 - now]
        before, after = places[now], places[1 - now]
        ranks = counts[k * size : (k + 1) * size]
        for j in range(width):
            bucket = (np.uint64(keys[j]) >> low) & last
            rank = ranks[bucket]
            ranks[bucket] = np.uint32(rank + np.uint32(1))
            place = first + np.int64(before[j])
            if k < passes - 1:
                others[rank] = keys[j]
                after[rank] = before[j]
            elif place >= 0 and place < len(last_bits):  # the rank is found
                last_bits[place] = by_rank[rank]
        now = 1 - now
        low += bits


@inline
def rank_short_row(patterns: Any, by_rank: Any, last_bits: Any, first: int) -> None:  # compiled
    """The same for a few entries: to compare all with each other takes less time than to sort."""
    for j in range(len(patterns)):
        rank = np.uint32(0)
        for k in range(j):
            rank = np.uint32(rank + np.uint32(patterns[k] <= patterns[j]))
        for k in range(j + 1, len(patterns)):
            rank = np.uint32(rank + np.uint32(patterns[k] < patterns[j]))
        if first + j >= 0 and first + j < len(last_bits):
            last_bits[first + j] = by_rank[rank]


@jit
def rank_rows(sizes: Any, by_rank: Any, skipped: int, count: int) -> Any:  # compiled
    width = len(by_rank)
    last_bits = np.empty(count, np.uint16)
    patterns = np.empty((2, width), sizes.dtype)
    places = np.empty((2, width), np.uint32)
    counts = np.empty(SORT_COUNTERS, np.uint32)
    for row in range(len(sizes) // width):
        patterns[0] = sizes[row * width : (row + 1) * width]
        for j in range(width):
            places[0, j] = j
        if width > SHORT:
            rank_row(patterns, places, counts, by_rank, last_bits, row * width - skipped)
        else:
            rank_short_row(patterns[0], by_rank, last_bits, row * width - skipped)
    return last_bits


@jit
def measure(delta: Any, large: float, counts: Any) -> Any:  # compiled
    real = delta.dtype.type
    least = real(large)
    sizes = np.empty(TILE, delta.dtype)
    squares = np.empty(TILE, delta.dtype)
    bins = np.empty(TILE, np.uint16)
    lanes = np.zeros((4, BINS), np.int64)
    size = np.float64(0)
    square = np.float64(0)
    peak = find_pattern(real(0))
    zeros = np.int64(0)
    above = np.int64(0)
    for start in range(0, len(delta), TILE):
        mine = delta[start : start + TILE]
        none = np.uint32(0)
        many = np.uint32(0)
        if len(mine) < TILE:
            sizes[:] = real(0)
        for j in range(len(mine)):
            sizes[j] = abs(mine[j])
        for j in range(TILE):
            squares[j] = sizes[j] * sizes[j]
            place = np.float32(sizes[j]).view(np.uint32) >> np.uint32(19)
            place = np.uint32(max(place, np.uint32(FIRST_BIN)) - np.uint32(FIRST_BIN))
            bins[j] = np.uint16(min(place, np.uint32(BINS - 1)))
        for j in range(TILE):
            none = np.uint32(none + np.uint32(sizes[j] == 0))
            many = np.uint32(many + np.uint32(sizes[j] > least))
            peak = max(peak, find_pattern(sizes[j]))
        for j in range(len(mine)):  # neighbours in different lanes: adding again would wait
            lanes[j & 3, bins[j]] += np.int64(1)
        size += fold(sizes)
        square += fold(squares)
        zeros += none
        zeros -= TILE - len(mine)
        above += many
    for k in range(4):
        for j in range(BINS):
            counts[j] += lanes[k, j]
    return zeros, above, size, square, find_peak(peak)


@jit
def compare(one: Any, other: Any) -> Any:  # compiled
    real = one.dtype.type
    zero = real(0)
    products = np.empty(TILE, one.dtype)
    opposed_sizes = np.empty(TILE, one.dtype)
    both_sizes = np.empty(TILE, one.dtype)
    product = np.float64(0)
    opposed_size = np.float64(0)
    both_size = np.float64(0)
    opposed = np.int64(0)
    both = np.int64(0)
    for start in range(0, len(one), TILE):
        mine, theirs = one[start : start + TILE], other[start : start + TILE]
        apart = np.uint32(0)
        shared = np.uint32(0)
        if len(mine) < TILE:
            products[:] = zero
            opposed_sizes[:] = zero
            both_sizes[:] = zero
        for j in range(len(mine)):
            a, b = mine[j], theirs[j]
            up = real(a > 0) + real(b > 0)
            down = real(a < 0) + real(b < 0)
            is_opposed = up > 0 and down > 0
            is_both = up + down > 1
            size = abs(a) + abs(b)
            apart += np.uint32(is_opposed)
            shared += np.uint32(is_both)
            products[j] = a * b
            opposed_sizes[j] = size if is_opposed else zero
            both_sizes[j] = size if is_both else zero
        product += fold(products)
        opposed_size += fold(opposed_sizes)
        both_size += fold(both_sizes)
        opposed += apart
        both += shared
    return product, opposed, both, opposed_size, both_size


# --- adapters and packs ---------------------------------------------------------------------------


@jit
def add_product(left: Any, right: Any, product: Any, first: int) -> None:  # compiled
    columns = right.shape[1]
    rank = right.shape[0]
    place = first
    done = 0
    for row in range(left.shape[0]):
        mine = left[row]
        while place < columns and done < len(product):
            width = min(columns - place, len(product) - done, TILE)
            part = product[done : done + width]
            k = 0
            while k + 4 <= rank:  # four at a time: the sum stays in registers for longer
                f0, f1, f2, f3 = mine[k], mine[k + 1], mine[k + 2], mine[k + 3]
                r0 = right[k, place : place + width]  # rows, for LLVM to see that they are dense
                r1 = right[k + 1, place : place + width]
                r2 = right[k + 2, place : place + width]
                r3 = right[k + 3, place : place + width]
                for j in range(width):
                    part[j] = (((part[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
                k += 4
            while k < rank:
                factor = mine[k]
                others = right[k, place : place + width]
                for j in range(width):
                    part[j] += factor * others[j]
                k += 1
            place += width
            done += width
        place = 0


@jit
def take_kept(raw: Any, key_0: int, key_1: int, threshold: int, first_tile: int) -> Any:  # compiled
    made = np.empty_like(raw)
    bits = np.empty(TILE, np.uint16)
    picked = np.empty(2 * TILE, np.uint16)
    kept = 0
    for start in range(0, len(raw), TILE):
        mine = raw[start : start + TILE]
        draw(bits, first_tile + start // TILE, key_0, key_1)
        for k in range(pick(bits, np.uint16(threshold - 1), picked)):
            if picked[k] < len(mine):
                made[kept] = mine[picked[k]]
                kept += 1
    return made[:kept]


@jit
def put_kept(
    base: Any, entries: Any, key_0: int, key_1: int, threshold: int, first_tile: int, values: Any
) -> Any:  # compiled
    bits = np.empty(TILE, np.uint16)
    picked = np.empty(2 * TILE, np.uint16)
    kept = 0
    for start in range(0, len(base), TILE):
        own, made = base[start : start + TILE], values[start : start + TILE]
        for j in range(len(own)):
            made[j] = own[j]
        draw(bits, first_tile + start // TILE, key_0, key_1)
        for k in range(pick(bits, np.uint16(threshold - 1), picked)):
            if picked[k] < len(made):
                if kept < len(entries):
                    made[picked[k]] = entries[kept]
                kept += 1
    return kept
