"""The kernels that only look, for Numba: what a merge or an analysis asks of a whole tensor."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from darelib.core.formats import DIGIT_BITS
from darelib.core.mask import TILE
from darelib.kernels.parts import (
    base_raw,
    decode,
    decode_finetuned,
    find_pattern,
    finetuned_raw,
    open_buffers,
    real,
    thin_model,
    unsigned,
)
from darelib.kernels.records import (
    ADD_SIZES,
    BASE_ROW,
    BINS,
    DIVISOR_ROW,
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
    SORT_COUNTERS,
    TENSOR,
    ZERO_ROW,
)
from darelib.kernels.tiles import (
    carray,
    compare_all,
    compare_signs,
    draw,
    find_bins,
    fold,
    fold_neighbours,
    inline,
    multiply,
    pick,
    rank_row,
    rank_short_row,
)

INSERTED: Final = 32  # so few entries of a row are sorted one by one


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

    For slerp, |end 0|^2, |end 1|^2 and end 0 . end 1, where an end of the arc is base + kept. Or,
    for each model, |delta| and what is kept of it.
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
    sums = carray(output_at, (3, tiles), np.float64)
    products = carray(scratch_at, (SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)[
        SCRATCH_ROWS + models
    ]
    base = scratch[BASE_ROW]
    size = scratch[SIZE_ROW]
    kept = scratch[SCRATCH_ROWS]
    ones = scratch[MERGED_ROW]
    left, right = scratch[LEFT_ROW], scratch[RIGHT_ROW]
    by_left, by_right = (ones, ones) if way == ADD_SIZES else (left, right)
    for j in range(TILE):
        ones[j] = 1
    # An arc has two models at most. There is room for the sums of one model's sizes.
    step = models if way == MULTIPLY else 1
    for first in range(0, models, step):
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                left[j] = value
                right[j] = value
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
                    kept,
                    right if model.number else left,
                    real(0),
                    way == ADD_SIZES,
                )
            if way == ADD_SIZES:
                for j in range(TILE):
                    left[j] = size[j]
                    right[j] = abs(kept[j])
            sums[0, tile] = multiply(left, by_left, products)
            sums[1, tile] = multiply(right, by_right, products)
            sums[2, tile] = multiply(left, right, products)
        for which in range(3):
            fold_neighbours(sums[which])
        if way == ADD_SIZES:
            records[first].size = sums[0, 0]
            records[first].kept_size = sums[1, 0]
    if way == MULTIPLY:
        tensor.square_0 = sums[0, 0]
        tensor.square_1 = sums[1, 0]
        tensor.product = sums[2, 0]


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
        if width > INSERTED:
            rank_row(patterns, places, counts, by_rank, limits, row * width - skipped)
        else:
            rank_short_row(patterns[0], places[0], by_rank, limits, row * width - skipped)


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
    bits = rows[0]
    picked = rows[1]
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
                pattern = real(magnitude).view(unsigned)
                peak = pattern if pattern > peak else peak
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
                pair = pairs[row]
                one, other = deltas[i], deltas[k]
                compare_signs(one, other, left, right, pair)
                pair.opposed_size += fold(left)
                pair.both_size += fold(right)
                for j in range(TILE):
                    products[j] = one[j] * other[j]
                pair.product += fold(products)
                row += 1
        if models > 2:  # with two models, their pair says it
            pair = pairs[0]
            compare_all(deltas[:models], left, right, size, pair)
            pair.opposed_size += fold(left)
            pair.both_size += fold(right)
