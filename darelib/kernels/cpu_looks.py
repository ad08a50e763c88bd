"""The kernels that only look, for Numba: what a merge or an analysis asks of a whole tensor."""

from typing import Any, Final

import numpy as np

from darelib.core.formats import DIGIT_BITS
from darelib.core.mask import KEEP_ALL, TILE
from darelib.kernels import KernelSpec
from darelib.kernels.cpu_parts import (
    Types,
    draw,
    find_types,
    fold,
    inline,
    make_loader,
    make_opener,
    make_pattern_finder,
    make_thinner,
    numba,
    pick,
    view,
)
from darelib.kernels.records import (
    BINS,
    CHUNK,
    FIRST_BIN,
    LANES,
    MODEL,
    PAIR,
    RANKING,
    SCRATCH_WIDTH,
    SIZE_ROW,
    SORT_BITS,
    SORT_COUNTERS,
    TENSOR,
)

SHORT: Final = 16  # so few entries of a row are compared with each other


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


@inline
def multiply(one: Any, other: Any, products: Any) -> Any:  # compiled
    """The scalar product of two tiles, in float64. Overwrites products."""
    for j in range(TILE):
        products[j] = np.float64(one[j]) * np.float64(other[j])
    return fold(products)


@inline
def add_sizes(values: Any, room: Any) -> Any:  # compiled
    """The sum of a tile's sizes, in float64. Overwrites room."""
    for j in range(TILE):
        room[j] = abs(np.float64(values[j]))
    return fold(room)


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
def find_bins(size: Any, bins: Any) -> None:  # compiled
    """The bin of each |delta| of a tile."""
    for j in range(TILE):
        place = np.float32(size[j]).view(np.uint32) >> np.uint32(19)
        place = np.uint32(max(place, np.uint32(FIRST_BIN)) - np.uint32(FIRST_BIN))
        bins[j] = np.uint16(place if place < np.uint32(BINS - 1) else np.uint32(BINS - 1))


# --- kernels --------------------------------------------------------------------------------------


def make_products(code: KernelSpec) -> Any:
    types = find_types(code)
    open_chunk, load_base = make_opener(types), make_loader(types)
    thin_model = make_thinner(types, is_apart=False)

    def multiply_chunk(given_at: Any) -> None:  # compiled
        """The scalar products of all ends, each with itself first.

        An end is what is kept of a model, or the base and that.
        """
        chunk = open_chunk(given_at)
        tensor = chunk.tensors[0]
        ends: Any = np.int64(tensor.ends)
        origin = chunk.base if tensor.from_zero else chunk.zeros
        for tile in range(chunk.tiles):
            load_base(chunk, tile)
            for i in range(ends):
                for j in range(TILE):
                    chunk.kept[i, j] = origin[j]
            for i in range(len(chunk.models)):
                end = chunk.kept[np.int64(chunk.models[i].end)]
                thin_model(chunk, tile, i, chunk.right, end)
            row = ends
            for i in range(ends):
                end = chunk.kept[i]
                chunk.sums[i, tile] = multiply(end, end, chunk.wide)
                for k in range(i + 1, ends):
                    chunk.sums[row, tile] = multiply(end, chunk.kept[k], chunk.wide)
                    row += 1
        for i in range(ends * (ends + 1) // 2):  # in place, each before what is left of its tiles
            fold_neighbours(chunk.sums[i])

    return multiply_chunk


def make_sums(code: KernelSpec) -> Any:
    types = find_types(code)
    open_chunk, load_base = make_opener(types), make_loader(types)
    thin_model = make_thinner(types, is_apart=True)

    def add_chunk(given_at: Any) -> None:  # compiled
        """For each model, the sums of |delta| and of what is kept of it."""
        chunk = open_chunk(given_at)
        for i in range(len(chunk.models)):  # one at a time: there is room for the sums of one
            for tile in range(chunk.tiles):
                load_base(chunk, tile)
                thin_model(chunk, tile, i, chunk.right, chunk.merged)
                chunk.sums[0, tile] = add_sizes(chunk.size, chunk.wide)
                chunk.sums[1, tile] = add_sizes(chunk.right, chunk.wide)
            chunk.models[i].size = fold_neighbours(chunk.sums[0])
            chunk.models[i].kept_size = fold_neighbours(chunk.sums[1])

    return add_chunk


def make_rank(code: KernelSpec) -> Any:
    types = find_types(code)
    base_raw, finetuned_raw, pattern = types.base, types.finetuned, types.pattern
    find_pattern = make_pattern_finder(types)

    def rank_rows(given_at: Any) -> None:  # compiled
        """Ranks the entries of each row by |delta|, and looks up their last bits."""
        given = numba.carray(given_at, (1,), RANKING)[0]
        width = given.width
        skipped = given.skipped
        minus_base = given.is_delta == 0
        rows = (skipped + given.count + width - 1) // width
        base_all = view(given.base, (rows, width), base_raw)
        values_all = view(given.values, (rows, width), finetuned_raw)
        by_rank = view(given.by_rank, (width,), np.uint16)
        last_bits = view(given.last_bits, (given.count,), np.uint16)
        patterns = view(given.order, (2, width), pattern)
        places = view(given.order, (6, width), np.uint32)[4:]
        counts = view(given.order, (6 * width + SORT_COUNTERS,), np.uint32)[6 * width :]
        for row in range(rows):
            base = base_all[row]
            values = values_all[row]
            for j in range(width):
                patterns[0, j] = find_pattern(values[j], base[j], minus_base)
                places[0, j] = j
            if width > SHORT:
                rank_row(patterns, places, counts, by_rank, last_bits, row * width - skipped)
            else:
                rank_short_row(patterns[0], by_rank, last_bits, row * width - skipped)

    return rank_rows


@inline
def note_pattern(pattern: Any, shift: Any, model: Any, counts: Any) -> None:  # compiled
    beginning = np.uint64(pattern) >> shift
    prefix = beginning >> np.uint64(DIGIT_BITS)
    digit = np.int64(beginning & np.uint64(0xFFFF))
    if prefix == model.prefix:
        counts[0, digit] += np.uint32(1)
    elif prefix == model.prefix_2:
        counts[1, digit] += np.uint32(1)


def make_count(code: KernelSpec) -> Any:
    types = find_types(code)
    base_raw, finetuned_raw, pattern_type = types.base, types.finetuned, types.pattern
    itemsize = np.dtype(types.finetuned).itemsize
    find_pattern = make_pattern_finder(types)

    def count_chunk(given_at: Any) -> None:  # compiled
        """Counts |delta| by 16 bits of their pattern, of all entries or of the survivors.

        shift says which bits; only patterns that continue one of the model's prefixes, found by the
        passes before, are counted. Where few entries survive, they are picked first.
        """
        given = numba.carray(given_at, (1,), CHUNK)[0]
        count = given.count
        models = given.model_count
        first_tile = given.first_tile
        base_all = view(given.base, (count,), base_raw)
        finetuned_all = view(given.finetuned, (models, given.row_bytes // itemsize), finetuned_raw)
        records = view(given.models, (models,), MODEL)
        shift = view(given.tensor, (1,), TENSOR)[0].shift
        counts = view(given.counts, (models, 2, 1 << DIGIT_BITS), np.uint32)
        rows = view(given.scratch, (2, 2 * TILE), np.uint16)
        bits, picked = rows[0], rows[1]
        patterns = view(given.scratch, (SIZE_ROW + 1, SCRATCH_WIDTH), pattern_type)[SIZE_ROW]
        for start in range(0, count, TILE):
            width = count - start
            base = base_all[start : start + TILE]
            for i in range(models):
                model = records[i]
                minus_base = model.is_delta == 0
                values = finetuned_all[i, start : start + TILE]
                if model.threshold == np.uint64(KEEP_ALL):
                    for j in range(min(width, TILE)):
                        patterns[j] = find_pattern(values[j], base[j], minus_base)
                    for j in range(min(width, TILE)):
                        note_pattern(patterns[j], shift, model, counts[i])
                    continue
                draw(bits, first_tile + start // TILE, model.key_0, model.key_1)
                for k in range(pick(bits, np.uint16(model.threshold - np.uint64(1)), picked)):
                    place = np.int64(picked[k])
                    if place < width:
                        pattern = find_pattern(values[place], base[place], minus_base)
                        note_pattern(pattern, shift, model, counts[i])

    return count_chunk


def make_measure(code: KernelSpec) -> Any:
    types = find_types(code)
    real, decode = types.real, types.decode_base
    open_chunk = make_opener(types)
    measure_model = make_model_measure(types)
    compare = make_comparison(types)

    def measure_chunk(given_at: Any) -> None:  # compiled
        """Gathers an analysis' figures. Zeros that pad a last tile are counted, too."""
        chunk = open_chunk(given_at)
        given = numba.carray(given_at, (1,), CHUNK)[0]
        models = len(chunk.models)
        pairs = view(given.pairs, (models * (models - 1) // 2,), PAIR)
        counts = view(given.counts, (models, LANES, BINS), np.uint32)
        for tile in range(chunk.tiles):
            raw = chunk.raw_base[tile * TILE : (tile + 1) * TILE]
            for j in range(TILE):
                value = real(decode(raw[j]))
                chunk.base[j] = value
                chunk.merged[j] = value * value
            chunk.tensors[0].base_squares += fold(chunk.merged)
            for i in range(models):
                measure_model(chunk, tile, i)
                find_bins(chunk.size, chunk.bits)
                for j in range(0, TILE, LANES):
                    for lane in range(LANES):
                        counts[i, lane, chunk.bits[j + lane]] += np.uint32(1)
                chunk.models[i].size += fold(chunk.size)
            row = 0
            for i in range(models):
                for k in range(i + 1, models):
                    compare(chunk, i, k)
                    note_conflict(chunk, pairs[row])
                    pairs[row].product += fold(chunk.merged)
                    row += 1

    return measure_chunk


def make_model_measure(types: Types) -> Any:
    real, pattern, decode = types.real, types.pattern, types.decode_finetuned

    @inline
    def measure_model(chunk: Any, tile: int, i: int) -> None:  # compiled
        """The deltas of a model, as they are, and their sizes."""
        model = chunk.models[i]
        raw = chunk.raw_models[i, tile * TILE : (tile + 1) * TILE]
        base = chunk.zeros if model.is_delta else chunk.base
        deltas = chunk.kept[i]
        large = real(chunk.tensors[0].delta_threshold)
        peak = pattern(model.peak)
        zeros = np.uint32(0)
        above = np.uint32(0)
        for j in range(TILE):
            delta = decode(raw[j]) - base[j]
            deltas[j] = delta
            magnitude = abs(delta)
            chunk.size[j] = magnitude
            chunk.merged[j] = delta * delta
            peak = max(peak, real(magnitude).view(pattern))
            zeros = np.uint32(zeros + np.uint32(magnitude == 0))
            above = np.uint32(above + np.uint32(magnitude > large))
        model.peak = peak
        model.zeros += np.uint64(zeros)
        model.above += np.uint64(above)
        model.squares += fold(chunk.merged)

    return measure_model


def make_comparison(types: Types) -> Any:
    real = types.real

    @inline
    def compare(chunk: Any, i: int, k: int) -> None:  # compiled
        """How many of two models change a position up or down, by how much, and the product."""
        one, other = chunk.kept[i], chunk.kept[k]
        for j in range(TILE):
            a, b = one[j], other[j]
            chunk.left[j] = real(a > 0) + real(b > 0)
            chunk.right[j] = real(a < 0) + real(b < 0)
            chunk.size[j] = abs(a) + abs(b)
            chunk.merged[j] = a * b

    return compare


@inline
def note_conflict(chunk: Any, pair: Any) -> None:  # compiled
    """How many positions two change in opposite directions, or both change; by how much."""
    up, down = chunk.left, chunk.right
    opposed = np.uint32(0)
    both = np.uint32(0)
    for j in range(TILE):
        is_opposed = up[j] > 0 and down[j] > 0
        is_both = up[j] + down[j] > 1
        opposed = np.uint32(opposed + np.uint32(is_opposed))
        both = np.uint32(both + np.uint32(is_both))
        up[j] = chunk.size[j] if is_opposed else up.dtype.type(0)
        down[j] = chunk.size[j] if is_both else up.dtype.type(0)
    pair.opposed += np.float64(opposed)
    pair.both += np.float64(both)
    pair.opposed_size += fold(up)
    pair.both_size += fold(down)
