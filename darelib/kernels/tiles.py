"""For Numba: what methods that decide about single entries do to a tile, and what they must know of
a whole tensor first. The arithmetic is that of darelib.kernels.entries, to the bit.

The functions of a tile are filled in where a kernel says `combine` or `note`.
"""

from typing import Any, Final

import numpy as np

from darelib.core.formats import DIGIT_BITS
from darelib.core.looks import LEAST_SHARE
from darelib.core.mask import TILE
from darelib.kernels.entries import (
    LEAST_DELTA,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOG_TERMS,
    LOWEST,
    POWER_TERMS,
    ROOT_BITS,
    ROUNDER,
    ROUNDER_BITS,
    SOFTMAX_EPSILON,
)
from darelib.kernels.looks import fold_neighbours, multiply, note_pattern
from darelib.kernels.parts import (
    FILLED_IN,
    base_raw,
    carray,
    decode,
    decode_finetuned,
    elect,
    finetuned_raw,
    inline,
    open_buffers,
    real,
    thin_model,
    unsigned,
)
from darelib.kernels.records import (
    ADD,
    AVERAGE,
    BASE_ROW,
    DIVISOR_ROW,
    LEFT_ROW,
    MERGED_ROW,
    RIGHT_ROW,
    SCRATCH_ROWS,
    SCRATCH_WIDTH,
    SIZE_ROW,
    ZERO_ROW,
)

note = FILLED_IN
HIGHEST: Final = np.int64((1 << 63) - 1)

# --- combining ------------------------------------------------------------------------------------


def combine_signs(
    kept: Any, models: Any, tensor: Any, merged: Any, scratch: Any, _by_entry: Any, way: int
) -> None:  # compiled
    if way != ADD:
        elect(
            kept,
            models,
            merged,
            scratch[LEFT_ROW],
            scratch[RIGHT_ROW],
            real(tensor.first_share),
            way == AVERAGE,
        )


def swap_near(
    _kept: Any, _models: Any, tensor: Any, merged: Any, _scratch: Any, _by_entry: Any, _way: int
) -> None:  # compiled
    bound = real(tensor.bound)
    for j in range(TILE):
        share = bound / max(abs(merged[j]), real(LEAST_DELTA))
        merged[j] = min(share, real(1)) * merged[j]


@inline
def find_variance(kept: Any, number: int, mean: Any, variance: Any) -> None:  # compiled
    share = kept.dtype.type(1 / max(number, 1))
    first = kept[0]
    for j in range(TILE):
        mean[j] = 0
    for i in range(1, number):
        row = kept[i]
        for j in range(TILE):
            mean[j] += row[j] - first[j]
    for j in range(TILE):
        mean[j] *= share
        variance[j] = mean[j] * mean[j]
    for i in range(1, number):
        row = kept[i]
        for j in range(TILE):
            gap = (row[j] - first[j]) - mean[j]
            variance[j] += gap * gap


def select(
    kept: Any, models: Any, tensor: Any, merged: Any, scratch: Any, _by_entry: Any, _way: int
) -> None:  # compiled
    total = scratch[LEFT_ROW]
    share = scratch[RIGHT_ROW]
    variance = scratch[SIZE_ROW]
    bound = real(tensor.bound)
    find_variance(kept, len(models), total, variance)
    for j in range(TILE):
        total[j] = 0
        share[j] = 0
    for i in range(len(models)):
        row = kept[i]
        weight = real(models[i].weight)
        for j in range(TILE):
            agrees = row[j] > 0 if merged[j] >= 0 else row[j] < 0
            total[j] += weight * row[j] if agrees else real(0)
            share[j] += weight if agrees else real(0)
    for j in range(TILE):
        averaged = total[j] / max(share[j], real(LEAST_SHARE))
        merged[j] = averaged if variance[j] >= bound else real(0)


def boost_alone(
    kept: Any, models: Any, tensor: Any, merged: Any, scratch: Any, _by_entry: Any, _way: int
) -> None:  # compiled
    number = scratch[LEFT_ROW]
    factor = scratch[RIGHT_ROW]
    elect(kept, models, merged, number, factor, real(tensor.first_share), True)
    for j in range(TILE):
        number[j] = 0
        factor[j] = 0
    for i in range(len(models)):
        row = kept[i]
        boost = real(models[i].boost)
        for j in range(TILE):
            number[j] += real(1) if row[j] != 0 else real(0)
            factor[j] += boost if row[j] != 0 else real(0)
    for j in range(TILE):
        merged[j] *= factor[j] if number[j] == 1 else real(1)


def fuse(
    _kept: Any, models: Any, tensor: Any, merged: Any, _scratch: Any, by_entry: Any, _way: int
) -> None:  # compiled
    scale = real(tensor.bound)
    for j in range(TILE if len(models) else 0):
        merged[j] = merged[j] if abs(merged[j]) >= scale * real(by_entry[j]) else real(0)


COMBINERS: Final = {
    "merge": combine_signs,
    "near": swap_near,
    "select": select,
    "boost": boost_alone,
    "fuse": fuse,
}

# --- looks ----------------------------------------------------------------------------------------


def note_variance(
    kept: Any, models: Any, tensor: Any, scratch: Any, counts: Any, *_: Any
) -> None:  # compiled
    variance = scratch[RIGHT_ROW]
    find_variance(kept, len(models), scratch[LEFT_ROW], variance)
    for j in range(TILE):
        if variance[j] > 0:  # which nothing is that pads a last tile
            note_pattern(real(variance[j]).view(unsigned), tensor.shift, models[0], counts)


def note_squares(
    kept: Any,
    models: Any,
    tensor: Any,
    scratch: Any,
    _counts: Any,
    _by_entry: Any,
    products: Any,
    sums: Any,
    tile: int,
    _width: int,
) -> None:  # compiled
    chosen = scratch[LEFT_ROW]
    variance = scratch[RIGHT_ROW]
    bound = real(tensor.bound)
    find_variance(kept, len(models), chosen, variance)
    for i in range(len(models)):
        row = kept[i]
        for j in range(TILE):
            chosen[j] = row[j] if variance[j] >= bound else real(0)
        sums[i, tile] = multiply(chosen, chosen, products)
        if tile == sums.shape[1] - 1:
            models[i].squares = fold_neighbours(sums[i])


def note_overlap(kept: Any, models: Any, _tensor: Any, scratch: Any, *_: Any) -> None:  # compiled
    number = scratch[LEFT_ROW]
    for j in range(TILE):
        number[j] = 0
    for i in range(len(models)):
        row = kept[i]
        for j in range(TILE):
            number[j] += real(row[j] != 0)
    for i in range(len(models)):
        row = kept[i]
        alone = np.uint32(0)
        shared = np.uint32(0)
        for j in range(TILE):
            changed = np.uint32(row[j] != 0)
            alone = np.uint32(alone + (changed & np.uint32(number[j] == 1)))
            shared = np.uint32(shared + (changed & np.uint32(number[j] > 1)))
        models[i].alone += np.uint64(alone)
        models[i].shared += np.uint64(shared)


def note_importance(
    _kept: Any,
    models: Any,
    tensor: Any,
    scratch: Any,
    counts: Any,
    by_entry: Any,
    _products: Any,
    _sums: Any,
    _tile: int,
    width: int,
) -> None:  # compiled
    size = scratch[SIZE_ROW]
    model = models[0]
    for j in range(TILE):
        size[j] *= real(by_entry[j])
    for j in range(width):
        pattern = np.uint64(real(abs(size[j])).view(unsigned))
        beginning = pattern >> tensor.shift
        if beginning >> np.uint64(DIGIT_BITS) == model.prefix_3:
            counts[2, np.int64(beginning & np.uint64(0xFFFF))] += np.uint32(1)
        else:
            note_pattern(pattern, tensor.shift, model, counts)


NOTERS: Final = {
    "variance": note_variance,
    "squares": note_squares,
    "overlap": note_overlap,
    "importance": note_importance,
}


def note_chunk(
    base_at: Any,
    finetuned_at: Any,
    output_at: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    counts_at: Any,
    _pairs: Any,
    limits_at: Any,
    count: int,
    stride: int,
    models: int,
    first_tile: int,
) -> None:  # compiled
    """Notes something of the thinned deltas of all models."""
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
    sums = carray(output_at, (models, tiles), np.float64)
    rows = carray(scratch_at, (SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)
    counts = carray(counts_at, (3, 1 << DIGIT_BITS), np.uint32)
    by_entry = carray(limits_at, (1, tiles * TILE), np.float32)[0]
    base = scratch[BASE_ROW]
    kept = scratch[SCRATCH_ROWS:]
    for tile in range(tiles):
        start = tile * TILE
        raw = base_all[start : start + TILE]
        for j in range(TILE):
            base[j] = decode(raw[j])
        for i in range(models):
            model = records[i]
            thin_model(
                finetuned_all[i, start : start + TILE],
                count - start,
                first_tile + tile,
                model,
                scratch[ZERO_ROW if model.is_delta else BASE_ROW],
                bits,
                limits[i, start : start + TILE],
                scratch[SIZE_ROW],
                scratch[DIVISOR_ROW],
                kept[i],
                scratch[MERGED_ROW],
                real(0),
                True,
            )
        note(
            kept,
            records,
            tensors[0],
            scratch,
            counts,
            by_entry[start : start + TILE],
            rows[SCRATCH_ROWS + models],
            sums,
            tile,
            min(count - start, TILE),
        )


# --- rows -----------------------------------------------------------------------------------------


@inline
def raise_e(x: Any) -> Any:  # compiled
    x = max(x, LOWEST)
    shifted = x * LOG2_E + ROUNDER
    whole = shifted - ROUNDER
    rest = (x - whole * LN2_HIGH) - whole * LN2_LOW
    power = POWER_TERMS[0]
    for term in POWER_TERMS[1:]:
        power = power * rest + term
    return power * np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)


@inline
def find_log(x: Any) -> Any:  # compiled
    bits = np.float64(x).view(np.int64)
    exponent = np.int64((bits - ROOT_BITS) >> 52)
    part = np.int64(bits - (exponent << 52)).view(np.float64)
    ratio = (part - 1) / (part + 1)
    square = ratio * ratio
    series = LOG_TERMS[0]
    for term in LOG_TERMS[1:]:
        series = series * square + term
    return (np.int64(exponent + ROUNDER_BITS).view(np.float64) - ROUNDER) * LN2 + ratio * series


@inline
def add_row(values: Any) -> Any:  # compiled
    """The sum of a row, by halves. Overwrites it."""
    width = len(values)
    while width > 1:
        half = (width + 1) // 2
        low = values[: width - half]
        high = values[half:width]
        for j in range(len(low)):
            low[j] += high[j]
        width = half
    return values[0]


@inline
def find_largest(values: Any) -> Any:  # compiled
    """As integers of the same order, since a loop over those vectorises."""
    top = ~HIGHEST
    for j in range(len(values)):
        bits = np.float64(values[j]).view(np.int64)
        top = max(top, bits if bits >= 0 else bits ^ HIGHEST)
    return np.int64(top if top >= 0 else top ^ HIGHEST).view(np.float64)


@inline
def take_softmax(values: Any, powers: Any) -> None:  # compiled
    """In place of the values. Overwrites powers."""
    largest = find_largest(values)
    for j in range(len(values)):
        powers[j] = raise_e(values[j] - largest)
    for j in range(len(values)):
        values[j] = powers[j]
    total = add_row(powers)
    for j in range(len(values)):
        values[j] = values[j] / total + SOFTMAX_EPSILON


@inline
def multiply_logs(before: Any, after: Any, terms: Any) -> None:  # compiled
    for j in range(len(terms)):
        terms[j] = after[j] / before[j]
    for j in range(len(terms)):
        terms[j] = find_log(terms[j])
    for j in range(len(terms)):
        terms[j] *= after[j]


def diverge_rows(
    base_at: Any,
    values_at: Any,
    room_at: Any,
    found_at: Any,
    _tensor: Any,
    _scratch: Any,
    _counts: Any,
    _pairs: Any,
    _limits: Any,
    rows: int,
    width: int,
    is_delta: int,
    _unused: int,
) -> None:  # compiled
    """How far the fine-tune's softmax of each row is from the base's."""
    base_all = carray(base_at, (rows, width), base_raw)
    values_all = carray(values_at, (rows, width), finetuned_raw)
    room = carray(room_at, (3, width), np.float64)
    found = carray(found_at, (1, rows), np.float32)[0]
    before, after, terms = room[0], room[1], room[2]
    for row in range(rows):
        base = base_all[row]
        values = values_all[row]
        for j in range(width):
            before[j] = real(decode(base[j]))
        for j in range(width):
            start = real(before[j])
            value = real(decode_finetuned(values[j]))
            after[j] = real(start + (value if is_delta else value - start))
        take_softmax(before, terms)
        take_softmax(after, terms)
        multiply_logs(before, after, terms)
        total = add_row(terms)
        found[row] = 0 if total < 0 else total
