"""For Numba: what methods that decide about single entries do to a tile, and what they must know of
a whole tensor first. The arithmetic is that of darelib.kernels.entries, to the bit.

The functions of a tile are filled in where a kernel says `combine` or `note`.
"""

from typing import Any, Final

import numpy as np

from darelib.core.formats import DIGIT_BITS
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
    base_raw,
    carray,
    decode,
    decode_finetuned,
    finetuned_raw,
    inline,
    load_base,
    note,
    open_chunk,
    real,
    thin_model,
    unsigned,
)
from darelib.methods.sce import LEAST_SHARE

HIGHEST: Final = np.int64((1 << 63) - 1)

# --- combining ------------------------------------------------------------------------------------


@inline
def elect(chunk: Any, any_sign: bool) -> None:  # compiled
    """Ties: elect each position's sign by the sum, then average, by weight, the models that agree.

    Or, of any sign, those that have a delta there.
    """
    merged, total, share = chunk.merged, chunk.left, chunk.right
    zero = total.dtype.type(0)  # a plain 0 would make float64 of float32
    total[:] = zero
    share[:] = chunk.tensors[0].first_share
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        weight = total.dtype.type(chunk.models[i].weight)
        for j in range(TILE):
            has_sign = row[j] > 0 if merged[j] >= 0 else row[j] < 0
            agrees = row[j] != 0 if any_sign else has_sign
            total[j] += row[j] if agrees else zero
            share[j] += weight if agrees else zero
    for j in range(TILE):
        merged[j] = total[j] / share[j] if share[j] > 0 else zero


def keep_sum(_chunk: Any, _tile: int) -> None:  # compiled
    pass


def elect_sign(chunk: Any, _tile: int) -> None:  # compiled
    elect(chunk, False)


def average(chunk: Any, _tile: int) -> None:  # compiled
    elect(chunk, True)


def swap_near(chunk: Any, _tile: int) -> None:  # compiled
    bound = real(chunk.tensors[0].bound)
    for j in range(TILE):
        share = bound / max(abs(chunk.merged[j]), real(LEAST_DELTA))
        chunk.merged[j] *= min(share, real(1))


@inline
def find_variance(chunk: Any, mean: Any, variance: Any) -> None:  # compiled
    number = len(chunk.models)
    share = mean.dtype.type(1 / max(number, 1))
    first = chunk.kept[0]
    mean[:] = 0
    for i in range(1, number):
        row = chunk.kept[i]
        for j in range(TILE):
            mean[j] += row[j] - first[j]
    for j in range(TILE):
        mean[j] *= share
        variance[j] = mean[j] * mean[j]
    for i in range(1, number):
        row = chunk.kept[i]
        for j in range(TILE):
            gap = (row[j] - first[j]) - mean[j]
            variance[j] += gap * gap


def select(chunk: Any, _tile: int) -> None:  # compiled
    merged, total, share = chunk.merged, chunk.left, chunk.right
    variance = chunk.size
    bound = real(chunk.tensors[0].bound)
    find_variance(chunk, total, variance)
    total[:] = 0
    share[:] = 0
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        weight = real(chunk.models[i].weight)
        for j in range(TILE):
            agrees = row[j] > 0 if merged[j] >= 0 else row[j] < 0
            total[j] += weight * row[j] if agrees else real(0)
            share[j] += weight if agrees else real(0)
    for j in range(TILE):
        averaged = total[j] / max(share[j], real(LEAST_SHARE))
        merged[j] = averaged if variance[j] >= bound else real(0)


@inline
def count_changes(chunk: Any, number: Any) -> None:  # compiled
    """How many models change each entry."""
    number[:] = 0
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        for j in range(TILE):
            number[j] += number.dtype.type(row[j] != 0)


def boost_alone(chunk: Any, _tile: int) -> None:  # compiled
    elect(chunk, True)
    count_changes(chunk, chunk.left)
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        boost = real(chunk.models[i].boost)
        for j in range(TILE):
            is_alone = row[j] != 0 and chunk.left[j] == 1
            chunk.merged[j] *= boost if is_alone else real(1)


def fuse(chunk: Any, tile: int) -> None:  # compiled
    by_entry = chunk.by_entry[tile * TILE : (tile + 1) * TILE]
    scale = real(chunk.tensors[0].bound)
    for j in range(TILE if len(chunk.models) else 0):
        value = chunk.merged[j]
        chunk.merged[j] = value if abs(value) >= scale * real(by_entry[j]) else real(0)


COMBINERS: Final = {
    "sum": keep_sum,
    "elect": elect_sign,
    "average": average,
    "near": swap_near,
    "select": select,
    "boost": boost_alone,
    "fuse": fuse,
}

# --- looks ----------------------------------------------------------------------------------------


def note_variance(chunk: Any, _tile: int) -> None:  # compiled
    find_variance(chunk, chunk.left, chunk.right)
    for j in range(TILE):
        if chunk.right[j] > 0:  # which nothing is that pads a last tile
            pattern = real(chunk.right[j]).view(unsigned)
            note_pattern(pattern, chunk.tensors[0].shift, chunk.models[0], chunk.counts)


def note_squares(chunk: Any, tile: int) -> None:  # compiled
    chosen, variance = chunk.left, chunk.right
    bound = real(chunk.tensors[0].bound)
    find_variance(chunk, chosen, variance)
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        for j in range(TILE):
            chosen[j] = row[j] if variance[j] >= bound else real(0)
        chunk.sums[i, tile] = multiply(chosen, chosen, chunk.wide)
        if tile == chunk.tiles - 1:
            chunk.models[i].squares = fold_neighbours(chunk.sums[i])


def note_overlap(chunk: Any, _tile: int) -> None:  # compiled
    number = chunk.left
    count_changes(chunk, number)
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        alone = np.uint32(0)
        shared = np.uint32(0)
        for j in range(TILE):
            changed = np.uint32(row[j] != 0)
            alone = np.uint32(alone + (changed & np.uint32(number[j] == 1)))
            shared = np.uint32(shared + (changed & np.uint32(number[j] > 1)))
        chunk.models[i].alone += np.uint64(alone)
        chunk.models[i].shared += np.uint64(shared)


def note_importance(chunk: Any, tile: int) -> None:  # compiled
    by_entry = chunk.by_entry[tile * TILE : (tile + 1) * TILE]
    shift = chunk.tensors[0].shift
    model = chunk.models[0]
    for j in range(min(chunk.count - tile * TILE, TILE)):
        pattern = np.uint64(real(abs(chunk.size[j] * real(by_entry[j]))).view(unsigned))
        beginning = pattern >> shift
        if beginning >> np.uint64(DIGIT_BITS) == model.prefix_3:
            chunk.counts[2, np.int64(beginning & np.uint64(0xFFFF))] += np.uint32(1)
        else:
            note_pattern(pattern, shift, model, chunk.counts)


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
    _: int,
) -> None:  # compiled
    """Notes something of the thinned deltas of all models."""
    chunk = open_chunk(
        base_at,
        finetuned_at,
        output_at,
        models_at,
        tensor_at,
        scratch_at,
        counts_at,
        limits_at,
        count,
        stride,
        models,
        first_tile,
    )
    for tile in range(chunk.tiles):
        load_base(chunk, tile)
        for i in range(models):
            thin_model(chunk, tile, i, chunk.kept[i], chunk.merged)
        note(chunk, tile)


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
    _skipped: int,
    _: int,
) -> None:  # compiled
    """How far the fine-tune's softmax of each row is from the base's."""
    base_all = carray(base_at, (rows, width), base_raw)
    values_all = carray(values_at, (rows, width), finetuned_raw)
    room = carray(room_at, (3, width), np.float64)
    found = carray(found_at, (rows,), np.float32)
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
        for j in range(width):
            terms[j] = after[j] / before[j]
        for j in range(width):
            terms[j] = find_log(terms[j])
        for j in range(width):
            terms[j] *= after[j]
        total = add_row(terms)
        found[row] = 0 if total < 0 else total
