"""The kernels that only look, for Numba: what a merge or an analysis asks of a whole tensor."""

from typing import Any, Final

import numpy as np

from darelib.core.formats import DIGIT_BITS
from darelib.core.mask import TILE
from darelib.kernels.parts import (
    base_raw,
    carray,
    decode,
    decode_finetuned,
    draw,
    find_pattern,
    finetuned_raw,
    fold,
    inline,
    open_buffers,
    pick,
    real,
    thin_model,
    unsigned,
)
from darelib.kernels.records import (
    ADD_SIZES,
    BASE_ROW,
    BINS,
    DIVISOR_ROW,
    FIRST_BIN,
    LANES,
    LEFT_ROW,
    MERGED_ROW,
    MODEL,
    MULTIPLY,
    PAIR,
    RIGHT_ROW,
    SCRATCH_ROWS,
    SCRATCH_WIDTH,
    SIZE_ROW,
    SORT_BITS,
    SORT_COUNTERS,
    TENSOR,
    ZERO_ROW,
)

SHORT: Final = 16  # so few entries of a row are compared with each other


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
            elif place >= 0 and place < len(limits):  # what is found in the end is the rank itself
                limits[place] = by_rank[rank]
        now = 1 - now
        low += bits


@inline
def rank_short_row(patterns: Any, by_rank: Any, limits: Any, first: int) -> None:  # compiled
    """The same for a few entries: to compare all with each other takes less time than to sort."""
    for j in range(len(patterns)):
        rank = np.uint32(0)
        for k in range(j):
            rank = np.uint32(rank + np.uint32(patterns[k] <= patterns[j]))
        for k in range(j + 1, len(patterns)):
            rank = np.uint32(rank + np.uint32(patterns[k] < patterns[j]))
        if first + j >= 0 and first + j < len(limits):
            limits[first + j] = by_rank[rank]


@inline
def multiply(one: Any, other: Any, products: Any) -> Any:  # compiled
    """The scalar product of two tiles, in float64. Overwrites products."""
    for j in range(TILE):
        products[j] = np.float64(one[j]) * np.float64(other[j])
    return fold(products)


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
def compare(
    one: Any, other: Any, opposed: Any, both: Any, products: Any, pair: Any
) -> None:  # compiled
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
        products[j] = a * b
    pair.opposed += np.float64(against)
    pair.both += np.float64(shared)
    pair.opposed_size += fold(opposed)
    pair.both_size += fold(both)
    pair.product += fold(products)


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
    pair.opposed_size += fold(left)
    pair.both_size += fold(right)


@inline
def find_bins(size: Any, bins: Any) -> None:  # compiled
    """The bin of each |delta| of a tile."""
    for j in range(TILE):
        place = np.float32(size[j]).view(np.uint32) >> np.uint32(19)
        place = np.uint32(max(place, np.uint32(FIRST_BIN)) - np.uint32(FIRST_BIN))
        bins[j] = np.uint16(place if place < np.uint32(BINS - 1) else np.uint32(BINS - 1))


def add_chunk(
    base_at: Any,
    finetuned_at: Any,
    output_at: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    _counts: Any,
    _pairs: Any,
    limits_at: Any,
    count: int,
    stride: int,
    models: int,
    first_tile: int,
    way: int,
) -> None:  # compiled
    """Adds up what must be known of a whole tensor. way: MULTIPLY or ADD_SIZES.

    The scalar products of all ends, each with itself first: an end is kept, or base + kept. Or, for
    each model, |delta| and what is kept of it.
    """
    tiles, base_all, finetuned_all, records, tensors, scratch, bits, limits = open_buffers(
        base_at,
        finetuned_at,
        models_at,
        tensor_at,
        scratch_at,
        limits_at,
        count,
        stride,
        models,
    )
    tensor = tensors[0]
    ends: Any = np.int64(tensor.ends)
    sums = carray(output_at, (max(2, ends * (ends + 1) // 2), tiles), np.float64)
    last = SCRATCH_ROWS + max(models, ends)
    products = carray(scratch_at, (last + 1, SCRATCH_WIDTH), np.float64)[last]
    rows = carray(scratch_at, (last, SCRATCH_WIDTH), real)
    base = scratch[BASE_ROW]
    origin = scratch[BASE_ROW if tensor.from_zero else ZERO_ROW]
    size = scratch[SIZE_ROW]
    ones = scratch[MERGED_ROW]
    left, right = scratch[LEFT_ROW], scratch[RIGHT_ROW]
    for j in range(TILE):
        ones[j] = 1
    # Ends are multiplied when all are there. There is room for the sums of one model's sizes.
    step = models if way == MULTIPLY else 1
    for first in range(0, models, step):
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[start : start + TILE]
            for j in range(TILE):
                base[j] = decode(raw[j])
            for i in range(ends):
                for j in range(TILE):
                    rows[SCRATCH_ROWS + i, j] = origin[j]
            for i in range(first, first + step):
                model = records[i]
                thin_model(
                    finetuned_all[i, start : start + TILE],
                    count - start,
                    first_tile + tile,
                    model,
                    scratch[ZERO_ROW if model.is_delta else BASE_ROW],
                    bits,
                    limits[i, start : start + TILE],
                    size,
                    scratch[DIVISOR_ROW],
                    right,
                    rows[SCRATCH_ROWS + np.int64(model.number) if way == MULTIPLY else LEFT_ROW],
                    real(0),
                    way == ADD_SIZES,
                )
            row = ends
            for i in range(ends):
                end = rows[SCRATCH_ROWS + i]
                sums[i, tile] = multiply(end, end, products)
                for k in range(i + 1, ends):
                    sums[row, tile] = multiply(end, rows[SCRATCH_ROWS + k], products)
                    row += 1
            if way == ADD_SIZES:
                for j in range(TILE):
                    left[j] = size[j]
                    right[j] = abs(right[j])
                sums[0, tile] = multiply(left, ones, products)
                sums[1, tile] = multiply(right, ones, products)
        if way == ADD_SIZES:
            records[first].size = fold_neighbours(sums[0])
            records[first].kept_size = fold_neighbours(sums[1])
    for i in range(ends * (ends + 1) // 2):  # in place, each before what is left of its tiles
        fold_neighbours(sums[i])


def rank_rows(
    base_at: Any,
    values_at: Any,
    by_rank_at: Any,
    order_at: Any,
    limits_at: Any,
    _scratch: Any,
    _counts: Any,
    _pairs: Any,
    _limits: Any,
    count: int,
    width: int,
    skipped: int,
    is_delta: int,
) -> None:  # compiled
    """Ranks the entries of each row by |delta|, and looks up their limits."""
    rows = (skipped + count + width - 1) // width
    base_all = carray(base_at, (rows, width), base_raw)
    values_all = carray(values_at, (rows, width), finetuned_raw)
    by_rank = carray(by_rank_at, (1, width), np.uint16)[0]
    limits = carray(limits_at, (1, count), np.uint16)[0]
    patterns = carray(order_at, (2, width), unsigned)
    places = carray(order_at, (6, width), np.uint32)[4:]
    counts = carray(order_at, (6 * width + SORT_COUNTERS,), np.uint32)[6 * width :]
    for row in range(rows):
        base = base_all[row]
        values = values_all[row]
        for j in range(width):
            value = decode_finetuned(values[j])
            delta = value if is_delta else value - decode(base[j])
            patterns[0, j] = real(abs(delta)).view(unsigned)
            places[0, j] = j
        if width > SHORT:
            rank_row(patterns, places, counts, by_rank, limits, row * width - skipped)
        else:
            rank_short_row(patterns[0], by_rank, limits, row * width - skipped)


@inline
def note_pattern(pattern: Any, shift: Any, model: Any, counts: Any) -> None:  # compiled
    beginning = np.uint64(pattern) >> shift
    prefix = beginning >> np.uint64(DIGIT_BITS)
    digit = np.int64(beginning & np.uint64(0xFFFF))
    if prefix == model.prefix:
        counts[0, digit] += np.uint32(1)
    elif prefix == model.prefix_2:
        counts[1, digit] += np.uint32(1)


def count_chunk(
    base_at: Any,
    finetuned_at: Any,
    _output: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    counts_at: Any,
    _pairs: Any,
    _limits: Any,
    count: int,
    stride: int,
    models: int,
    first_tile: int,
) -> None:  # compiled
    """Counts |delta| by 16 bits of their pattern, of all entries or of the survivors.

    shift says which bits; only patterns that continue one of the model's prefixes, found by the
    passes before, are counted. Where few entries survive, they are picked first.
    """
    base_all = carray(base_at, (1, count), base_raw)[0]
    finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
    records = carray(models_at, (models,), MODEL)
    shift = carray(tensor_at, (1,), TENSOR)[0].shift
    counts = carray(counts_at, (models, 2, 1 << DIGIT_BITS), np.uint32)
    rows = carray(scratch_at, (2, 2 * TILE), np.uint16)
    bits, picked = rows[0], rows[1]
    patterns = carray(scratch_at, (SIZE_ROW + 1, SCRATCH_WIDTH), unsigned)[SIZE_ROW]
    for start in range(0, count, TILE):
        width = count - start
        base = base_all[start : start + TILE]
        for i in range(models):
            model = records[i]
            minus_base = model.is_delta == 0
            values = finetuned_all[i, start : start + TILE]
            if model.limit == np.uint64(0xFFFF):
                for j in range(min(width, TILE)):
                    patterns[j] = find_pattern(values[j], base[j], minus_base)
                for j in range(min(width, TILE)):
                    note_pattern(patterns[j], shift, model, counts[i])
                continue
            draw(bits, first_tile + start // TILE, model.key_0, model.key_1)
            for k in range(pick(bits, np.uint16(model.limit), picked)):
                place = np.int64(picked[k])
                if place < width:
                    pattern = find_pattern(values[place], base[place], minus_base)
                    note_pattern(pattern, shift, model, counts[i])


def measure_chunk(
    base_at: Any,
    finetuned_at: Any,
    _output: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    counts_at: Any,
    pairs_at: Any,
    limits_at: Any,
    count: int,
    stride: int,
    models: int,
    first_tile: int,
) -> None:  # compiled
    """Gathers an analysis' figures. Zeros that pad a last tile are counted, too."""
    tiles, base_all, finetuned_all, records, tensors, scratch, bins, _ = open_buffers(
        base_at,
        finetuned_at,
        models_at,
        tensor_at,
        scratch_at,
        limits_at,
        count,
        stride,
        models,
    )
    tensor = tensors[0]
    pairs = carray(pairs_at, (1 + models * (models - 1) // 2,), PAIR)
    counts = carray(counts_at, (models, LANES, BINS), np.uint32)
    base = scratch[BASE_ROW]
    size = scratch[SIZE_ROW]
    deltas = scratch[SCRATCH_ROWS:]
    left, right = scratch[LEFT_ROW], scratch[RIGHT_ROW]
    products = scratch[MERGED_ROW]
    threshold = real(tensor.threshold)
    for tile in range(tiles):
        start = tile * TILE
        raw = base_all[start : start + TILE]
        for j in range(TILE):
            value = real(decode(raw[j]))
            base[j] = value
            products[j] = value * value
        tensor.base_squares += fold(products)
        for i in range(models):
            model = records[i]
            raw_finetuned = finetuned_all[i, start : start + TILE]
            against = scratch[ZERO_ROW if model.is_delta else BASE_ROW]
            delta_row = deltas[i]
            peak = unsigned(model.peak)
            zeros = np.uint32(0)
            over = np.uint32(0)
            for j in range(TILE):
                delta = decode_finetuned(raw_finetuned[j]) - against[j]
                delta_row[j] = delta
                magnitude = abs(delta)
                size[j] = magnitude
                products[j] = delta * delta
                peak = max(peak, real(magnitude).view(unsigned))
                zeros = np.uint32(zeros + np.uint32(magnitude == 0))
                over = np.uint32(over + np.uint32(magnitude > threshold))
            find_bins(size, bins)
            model.peak = peak
            model.zeros += np.uint64(zeros)
            model.above += np.uint64(over)
            model.size += fold(size)
            model.squares += fold(products)
            for j in range(0, TILE, LANES):
                for lane in range(LANES):
                    counts[i, lane, bins[j + lane]] += np.uint32(1)
        row = 1
        for i in range(models):
            for k in range(i + 1, models):
                compare(deltas[i], deltas[k], left, right, products, pairs[row])
                row += 1
        if models > 2:  # with two models, their pair says it
            compare_all(deltas[:models], left, right, size, pairs[0])
