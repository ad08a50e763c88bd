"""The kernels that only look, written for Numba: what must be known of a whole tensor, to merge it or to analyse it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from darelib.core.formats import DIGIT_BITS
from darelib.core.mask import TILE
from darelib.kernels import KernelSpec, tiles
from darelib.kernels.parts import inline, numba, share_parts
from darelib.kernels.records import (
    ADD_SIZES,
    BASE_ROW,
    BINS,
    DENSE_ROW,
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

INSERTED: Final = 32  # so few entries of a row are sorted one by one


def build_totals(spec: KernelSpec) -> Any:
    """The loop that adds up what must be known of a whole tensor. way: MULTIPLY or ADD_SIZES.

    For slerp, |end 0|^2, |end 1|^2 and end 0 . end 1, where an end of the arc is base + kept. Or, for each model,
    |delta| and what is kept of it.
    """
    parts = share_parts(spec.base, spec.finetuned, spec.real)
    carray, real, decode, thin_model, open_buffers = (
        numba.carray,
        parts.real,
        parts.decode,
        parts.thin,
        parts.open,
    )
    fold_tile, fold_sums, multiply_rows = (
        inline(tiles.fold),
        inline(tiles.fold_neighbours),
        inline(tiles.multiply),
    )

    def add_chunk(  # compiled
        base_at: Any, finetuned_at: Any, output_at: Any, models_at: Any, tensor_at: Any, scratch_at: Any, _counts: Any,
        _pairs: Any, limits_at: Any, count: int, stride: int, models: int, first_tile: int, way: int,
    ) -> None:  # fmt: skip
        tiles, base_all, finetuned_all, records, tensors, scratch, bits, limits, dense = (
            open_buffers(
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
        )
        tensor = tensors[0]
        sums = carray(output_at, (3, tiles), np.float64)
        products = carray(scratch_at, (SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)[
            SCRATCH_ROWS + models
        ]
        base, size, kept, ones = (
            scratch[BASE_ROW],
            scratch[SIZE_ROW],
            scratch[SCRATCH_ROWS],
            scratch[MERGED_ROW],
        )
        left, right = scratch[LEFT_ROW], scratch[RIGHT_ROW]
        # An arc has two models at most; sizes are added up for one at a time, since there is room for the sums of one.
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
                    against = scratch[ZERO_ROW if model.is_delta else BASE_ROW]
                    thin_model(
                        finetuned_all[i], start, count - start, first_tile + tile, model, against, bits, limits[i],
                        dense, size, scratch[DIVISOR_ROW], kept, right if model.number else left, real(0),
                        way == ADD_SIZES,
                    )  # fmt: skip
                if way == ADD_SIZES:
                    for j in range(TILE):
                        left[j] = size[j]
                        right[j] = abs(kept[j])
                        ones[j] = 1
                for which in range(3):
                    one = right if which == 1 else left
                    other = ones if way == ADD_SIZES else left if which == 0 else right
                    multiply_rows(one, other, products)
                    sums[which, tile] = fold_tile(products)
            for which in range(3):
                fold_sums(sums[which])
            if way == ADD_SIZES:
                records[first].size = sums[0, 0]
                records[first].kept_size = sums[1, 0]
        if way == MULTIPLY:
            tensor.square_0 = sums[0, 0]
            tensor.square_1 = sums[1, 0]
            tensor.product = sums[2, 0]

    return parts.compile(add_chunk)


def build_rank(spec: KernelSpec) -> Any:
    """The loop that ranks the entries of each row by |delta|, and looks up their limits by rank."""
    parts = share_parts(spec.base, spec.finetuned, spec.real)
    carray, real, unsigned, decode = numba.carray, parts.real, parts.unsigned, parts.decode
    (base_raw, finetuned_raw), decode_finetuned = parts.raw, parts.decode_finetuned
    rank_row, rank_short_row = inline(tiles.rank_row), inline(tiles.rank_short_row)

    def rank_rows(  # compiled
        base_at: Any, values_at: Any, by_rank_at: Any, order_at: Any, limits_at: Any, _scratch: Any, _counts: Any,
        _pairs: Any, _limits: Any, count: int, width: int, skipped: int, is_delta: int,
    ) -> None:  # fmt: skip
        rows = (skipped + count + width - 1) // width
        base_all = carray(base_at, (rows, width), base_raw)
        values_all = carray(values_at, (rows, width), finetuned_raw)
        by_rank = carray(by_rank_at, (1, width), np.uint16)[0]
        limits = carray(limits_at, (1, count), np.uint16)[0]
        patterns = carray(order_at, (2, width), unsigned)
        places = carray(order_at, (6, width), np.uint32)[4:]
        counts = carray(order_at, (6 * width + SORT_COUNTERS,), np.uint32)[6 * width :]
        for row in range(rows):
            base, values = base_all[row], values_all[row]
            for j in range(width):
                value = decode_finetuned(values[j])
                delta = value if is_delta else value - decode(base[j])
                patterns[0, j] = real(abs(delta)).view(unsigned)
                places[0, j] = j
            if width > INSERTED:
                rank_row(patterns, places, counts, by_rank, limits, row * width - skipped)
            else:
                rank_short_row(patterns[0], places[0], by_rank, limits, row * width - skipped)

    return parts.compile(rank_rows)


def build_count(spec: KernelSpec) -> Any:
    """The loop that counts |delta| by 16 bits of their pattern, of all entries or of those that survive the drop.

    shift says which bits; only patterns that continue one of the model's prefixes, found by the passes before, are
    counted. Where few entries survive, they are picked first.
    """
    parts = share_parts(spec.base, spec.finetuned, spec.real)
    carray, real, unsigned, decode = numba.carray, parts.real, parts.unsigned, parts.decode
    base_raw, finetuned_raw = parts.raw
    draw_bits, pick_kept, decode_finetuned = (
        inline(tiles.draw),
        inline(tiles.pick),
        parts.decode_finetuned,
    )
    unpack_tile = parts.unpack
    item, wide = finetuned_raw().itemsize, real().itemsize

    def find_pattern(value: Any, base: Any, minus_base: Any) -> Any:  # compiled
        delta = real(decode_finetuned(value))
        if minus_base:
            delta = real(delta - real(decode(base)))
        return real(abs(delta)).view(unsigned)

    def note(pattern: Any, shift: Any, model: Any, counts: Any) -> None:  # compiled
        beginning = np.uint64(pattern) >> shift
        prefix, digit = beginning >> np.uint64(DIGIT_BITS), np.int64(beginning & np.uint64(0xFFFF))
        if prefix == model.prefix:
            counts[0, digit] += np.uint32(1)
        elif prefix == model.prefix_2:
            counts[1, digit] += np.uint32(1)

    pattern_of, note_pattern = inline(find_pattern), inline(note)

    def count_chunk(  # compiled
        base_at: Any, finetuned_at: Any, _output: Any, models_at: Any, tensor_at: Any, scratch_at: Any, counts_at: Any,
        _pairs: Any, _limits: Any, count: int, stride: int, models: int, first_tile: int,
    ) -> None:  # fmt: skip
        base_all = carray(base_at, (1, count), base_raw)[0]
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        records = carray(models_at, (models,), MODEL)
        shift = carray(tensor_at, (1,), TENSOR)[0].shift
        counts = carray(counts_at, (models, 2, 1 << DIGIT_BITS), np.uint32)
        rows = carray(scratch_at, (2, 2 * TILE), np.uint16)
        bits, picked = rows[0], rows[1]
        dense = carray(scratch_at, (DENSE_ROW + 1, SCRATCH_WIDTH * wide // item), finetuned_raw)[
            DENSE_ROW
        ]
        patterns = carray(scratch_at, (SIZE_ROW + 1, SCRATCH_WIDTH), unsigned)[SIZE_ROW]
        for start in range(0, count, TILE):
            width = count - start
            base = base_all[start : start + TILE]
            for i in range(models):
                model = records[i]
                minus_base = model.is_delta == 0
                values = finetuned_all[i, start : start + TILE]
                if model.limit == np.uint64(0xFFFF) and model.stored == 0:
                    for j in range(min(width, TILE)):
                        patterns[j] = pattern_of(values[j], base[j], minus_base)
                    for j in range(min(width, TILE)):
                        note_pattern(patterns[j], shift, model, counts[i])
                    continue
                draw_bits(bits, first_tile + start // TILE, model.key_0, model.key_1)
                if model.stored:
                    unpack_tile(finetuned_all[i], width, model, bits, dense)
                    values = dense
                for k in range(pick_kept(bits, np.uint16(model.limit), picked)):
                    place = np.int64(picked[k])
                    if place < width:
                        note_pattern(
                            pattern_of(values[place], base[place], minus_base),
                            shift,
                            model,
                            counts[i],
                        )

    return parts.compile(count_chunk)


def build_measure(spec: KernelSpec) -> Any:
    """The loop that gathers an analysis' figures. Zeros that pad a last tile are counted with the others."""
    parts = share_parts(spec.base, spec.finetuned, spec.real)
    carray, real, unsigned, decode = numba.carray, parts.real, parts.unsigned, parts.decode
    decode_finetuned, open_buffers, fold_tile = (
        parts.decode_finetuned,
        parts.open,
        inline(tiles.fold),
    )
    signs, mixed_signs, bin_tile = (
        inline(tiles.compare_signs),
        inline(tiles.compare_all),
        inline(tiles.find_bins),
    )
    draw_bits, unpack_tile = inline(tiles.draw), parts.unpack

    def measure_chunk(  # compiled
        base_at: Any, finetuned_at: Any, _output: Any, models_at: Any, tensor_at: Any, scratch_at: Any, counts_at: Any,
        pairs_at: Any, limits_at: Any, count: int, stride: int, models: int, first_tile: int,
    ) -> None:  # fmt: skip
        tiles, base_all, finetuned_all, records, tensors, scratch, bins, _, dense = open_buffers(
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
        base, size, deltas = scratch[BASE_ROW], scratch[SIZE_ROW], scratch[SCRATCH_ROWS:]
        left, right, products = scratch[LEFT_ROW], scratch[RIGHT_ROW], scratch[MERGED_ROW]
        threshold = real(tensor.threshold)
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[start : start + TILE]
            for j in range(TILE):
                value = real(decode(raw[j]))
                base[j] = value
                products[j] = value * value
            tensor.base_squares += fold_tile(products)
            for i in range(models):
                model = records[i]
                raw_finetuned = finetuned_all[i, start : start + TILE]
                against = scratch[ZERO_ROW if model.is_delta else BASE_ROW]
                delta_row = deltas[i]
                peak = unsigned(model.peak)
                zeros = np.uint32(0)
                over = np.uint32(0)
                stored = np.uint16(model.stored - np.uint64(1))
                if model.stored:
                    draw_bits(bins, first_tile + tile, model.key_0, model.key_1)
                    unpack_tile(finetuned_all[i], count - start, model, bins, dense)
                    raw_finetuned = dense
                for j in range(TILE):
                    delta = (
                        decode_finetuned(raw_finetuned[j]) - against[j]
                        if bins[j] <= stored
                        else real(0)
                    )
                    delta_row[j] = delta
                    magnitude = abs(delta)
                    size[j] = magnitude
                    products[j] = delta * delta
                    pattern = real(magnitude).view(unsigned)
                    peak = pattern if pattern > peak else peak
                    zeros = np.uint32(zeros + np.uint32(magnitude == 0))
                    over = np.uint32(over + np.uint32(magnitude > threshold))
                bin_tile(size, bins)
                model.peak = peak
                model.zeros += np.uint64(zeros)
                model.above += np.uint64(over)
                model.size += fold_tile(size)
                model.squares += fold_tile(products)
                for j in range(0, TILE, LANES):
                    for lane in range(LANES):
                        counts[i, lane, bins[j + lane]] += np.uint32(1)
            row = 1
            for i in range(models):
                for k in range(i + 1, models):
                    pair = pairs[row]
                    signs(deltas[i], deltas[k], left, right, pair)
                    pair.opposed_size += fold_tile(left)
                    pair.both_size += fold_tile(right)
                    one, other = deltas[i], deltas[k]
                    for j in range(TILE):
                        products[j] = one[j] * other[j]
                    pair.product += fold_tile(products)
                    row += 1
            if models > 2:  # with two models, their pair says it
                pair = pairs[0]
                mixed_signs(deltas[:models], left, right, size, pair)
                pair.opposed_size += fold_tile(left)
                pair.both_size += fold_tile(right)

    return parts.compile(measure_chunk)
