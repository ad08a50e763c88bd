"""What Triton compiles for CUDA GPUs: many tensors in one launch, at the speed of their memory.

The arithmetic is that of the definition, to the bit: nothing is contracted to a fused multiply-add,
divisions are rounded to nearest, and constants above 2^31 are arrays of uint32, since a literal
would become an int64. A lane draws one Philox block, whose eight pieces belong to elements 128
apart, so that lanes side by side load elements side by side. A program loads all that it needs
before it computes anything: the memory is busy while masks are drawn.
"""

from typing import Any

import triton
import triton.language as tl

from darelib.core.mask import ROUNDS, TILE

constexpr: Any = tl.constexpr

PIECES = constexpr(8)
LANES = constexpr(TILE // 8)
TILE_SIZE = constexpr(TILE)
PHILOX_ROUNDS = constexpr(ROUNDS)
# Where trim counts, many values are equal, and adding to one counter takes turns: so there are
# several of each.
BINS = constexpr(1 << 11)
COPIES = constexpr(64)
# Of a tensor's row in a table, the first places: addresses and sizes; coefficients. A model's
# follow, three each.
PLACES = constexpr(5)  # base, output, elements, first program, first sum
NUMBERS = constexpr(4)  # lambda, base share, first share, what the output type rounds to infinity


@triton.jit
def draw(key, block):  # compiled
    """The Philox block of each lane: four words, of two pieces each."""
    x0, x1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    x2, x3 = tl.zeros_like(x0), tl.zeros_like(x0)
    k0, k1 = key.to(tl.uint32) + x2, (key >> 32).to(tl.uint32) + x2
    m0, m1 = tl.full(x0.shape, 0xD2511F53, tl.uint32), tl.full(x0.shape, 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full(x0.shape, 0x9E3779B9, tl.uint32), tl.full(x0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        p0, p1 = x0 * m0, x2 * m1
        x0, x2 = tl.umulhi(x2, m1) ^ x1 ^ k0, tl.umulhi(x0, m0) ^ x3 ^ k1
        x1, x3 = p1, p0
        k0, k1 = k0 + w0, k1 + w1
    return x0, x1, x2, x3


@triton.jit
def locate(owners, places, lanes, WIDTH: constexpr, EVEN: constexpr, GROUP: constexpr):  # compiled
    """The tensor that this program works on, its row of places, the first tile, the elements left.

    And of each lane its Philox block, and its first element.
    """
    program = tl.program_id(0)
    tensor = tl.load(owners + program).to(tl.int64)
    place = places + tensor * WIDTH
    tile = (program - tl.load(place + 3)) * GROUP
    # Wide loads give several neighbours to one thread. Lanes that are loaded, too, draw the mask in
    # that very thread.
    lane = tl.arange(0, GROUP * LANES)
    lane = tl.load(lanes + lane) if EVEN else lane
    left = tl.minimum(tl.load(place + 2) - tile * TILE_SIZE, GROUP * TILE_SIZE).to(tl.int32)
    start = tl.arange(0, GROUP * LANES) // LANES * TILE_SIZE + tl.arange(0, GROUP * LANES) % LANES
    return tensor, place, tile, left, tile * LANES + lane, start


@triton.jit
def point(address, tile, TYPE: constexpr, EVEN: constexpr):  # compiled
    """To the first element of a tile.

    EVEN: addresses are fit for wide loads, and programs have no element too many.
    """
    pointer = address.to(tl.pointer_type(TYPE)) + tile * TILE_SIZE
    return tl.multiple_of(pointer, 16) if EVEN else pointer


@triton.jit
def load_pieces(pointer, start, left, EVEN: constexpr):  # compiled
    """The eight pieces of what a program works on, as they are stored."""
    pieces = ()
    for h in tl.static_range(PIECES):
        at = start + h * LANES
        pieces = pieces + (
            tl.load(pointer + at) if EVEN else tl.load(pointer + at, mask=at < left, other=0.0),
        )
    return pieces


@triton.jit
def open_inputs(
    place, tile, block, start, left, BASE: constexpr, TYPES: constexpr, EVEN: constexpr
):  # compiled
    """The base's values; of each model its values, the mask's limit and its Philox blocks.

    The limit is the upper half of a word.
    """
    bases = load_pieces(point(tl.load(place), tile, BASE, EVEN), start, left, EVEN)
    values, models = (), ()
    for i in tl.static_range(len(TYPES)):
        pointer = point(tl.load(place + PLACES + 3 * i), tile, TYPES[i], EVEN)
        values = values + (load_pieces(pointer, start, left, EVEN),)
    for i in tl.static_range(len(TYPES)):
        mine = place + PLACES + 3 * i
        models = models + (
            (values[i], tl.load(mine + 2).to(tl.uint32), draw(tl.load(mine + 1), block)),
        )
    return bases, models


@triton.jit
def load_numbers(number, N: constexpr):  # compiled
    """Of each model: its scale, its weight and its floor."""
    numbers = ()
    for i in tl.static_range(N):
        own = number + NUMBERS + 3 * i
        numbers = numbers + ((tl.load(own), tl.load(own + 1), tl.load(own + 2)),)
    return numbers


@triton.jit
def find_delta(model, h: constexpr, base):  # compiled
    """For piece h: a model's values, their deltas, and whether the mask keeps them.

    It keeps those whose bits are at most the limit.
    """
    values, limit, words = model
    value, word = values[h].to(tl.float32), words[h // 2]
    return value, value - base, (word if h % 2 else word << 16) <= limit


@triton.jit
def turn(values, sign):  # compiled
    """The values, or their negatives where the sign's bit is set."""
    return (values.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def divide_by_count(total, count, MOST: constexpr):  # compiled
    """A total divided by a whole number, or by 1 for 0: the bits of div_rn, in less time.

    The quotient is corrected by its remainder, which is exact, in denormal numbers as well. Up to
    5: of 6 and some others a remainder of one half would not be.
    """
    if MOST <= 2:
        return tl.where(count > 1, total * 0.5, total)
    count = tl.maximum(count, 1.0)
    inverse = 1.0 / count
    near = total * inverse
    return tl.fma(tl.fma(-near, count, total), inverse, near)


@triton.jit
def divide(total, share, COUNTS: constexpr, MOST: constexpr):  # compiled
    """A total divided by a share, which may be 0: then it is 0."""
    if COUNTS:
        return divide_by_count(total, share, MOST)
    return tl.where(share > 0, tl.div_rn(total, share), 0.0)


@triton.jit
def merge_kernel(  # compiled
    owners,
    places,
    lanes,
    numbers,
    flags,
    ELECTS: constexpr,
    AVERAGES: constexpr,
    COUNTS: constexpr,
    TRIMS: constexpr,
    EXACT: constexpr,
    BASE: constexpr,
    FINETUNED: constexpr,
    OUTPUT: constexpr,
    EVEN: constexpr,
    GROUP: constexpr,
):
    N: constexpr = len(FINETUNED)
    tensor, place, tile, left, block, start = locate(
        owners, places, lanes, PLACES + 3 * N, EVEN, GROUP
    )
    number = numbers + tensor * (NUMBERS + 3 * N)
    lambda_coeff = tl.load(number)
    base_share = tl.load(number + 1)
    first_share = tl.load(number + 2)
    coefficients = load_numbers(number, N)
    output_at = point(tl.load(place + 1), tile, OUTPUT, EVEN)
    bases, models = open_inputs(place, tile, block, start, left, BASE, FINETUNED, EVEN)
    zeros = tl.zeros(start.shape, tl.float32)
    zeros_or_nan, highest = zeros, zeros
    for h in tl.static_range(PIECES):
        base = bases[h].to(tl.float32)
        merged, value, rows = base_share * base, base, ()
        for i in tl.static_range(N):
            scale, _, floor = coefficients[i]
            value, delta, kept = find_delta(models[i], h, base)
            zeros_or_nan = tl.fma(delta, zeros, zeros_or_nan)  # 0 times what is not finite is NaN
            if TRIMS:
                kept &= tl.abs(delta) >= floor
            row = tl.where(kept, delta * scale, 0.0)
            merged += row
            rows = rows + (row,)
        if ELECTS:  # where the sum is negative, all is turned round
            sign = merged.to(tl.uint32, bitcast=True) & tl.full(merged.shape, 0x80000000, tl.uint32)
            total, share = zeros, zeros + first_share
            for i in tl.static_range(N):
                row = turn(rows[i], sign)
                total += tl.maximum(row, 0.0)
                share += tl.where(row > 0, 1.0 if COUNTS else coefficients[i][1], 0.0)
            merged = turn(divide(total, share, COUNTS, N), sign)
        if AVERAGES:
            share = zeros
            for i in tl.static_range(N):
                share += tl.where(rows[i] != 0, 1.0 if COUNTS else coefficients[i][1], 0.0)
            merged = divide(merged, share, COUNTS, N)
        if not EXACT:
            change = lambda_coeff * merged
            value = tl.where(change == 0, base, base + change)
        highest = tl.maximum(tl.abs(value), highest, propagate_nan=tl.PropagateNan.ALL)
        offset = start + h * LANES
        if EVEN:
            tl.store(output_at + offset, value.to(OUTPUT))
        else:
            tl.store(output_at + offset, value.to(OUTPUT), mask=offset < left)
    broken = tl.where((zeros_or_nan == 0) & (highest < tl.load(number + 3)), 0, 1)
    tl.atomic_or(flags + tensor + tl.zeros_like(broken), broken, mask=broken != 0)


@triton.jit
def fold_pieces(rows):  # compiled
    """The sum of eight pieces, by halves."""
    fours = (rows[0] + rows[4], rows[1] + rows[5], rows[2] + rows[6], rows[3] + rows[7])
    return (fours[0] + fours[2]) + (fours[1] + fours[3])


@triton.jit
def fold_tiles(first, second, product, GROUP: constexpr):  # compiled
    """Three sums of each tile, and one of them again, from their lanes by halves.

    A sum of two has no order.
    """
    values = tl.join(tl.join(first, second), tl.join(product, product))
    for k in tl.static_range(7):
        values = tl.sum(tl.reshape(values, (GROUP, 2, LANES >> (k + 1), 2, 2)), 1)
    return tl.permute(tl.reshape(values, (GROUP, 2, 2)), (0, 2, 1)).reshape((GROUP, 4))


@triton.jit
def products_kernel(  # compiled
    owners,
    places,
    lanes,
    numbers,
    sums,
    length,
    BASE: constexpr,
    FINETUNED: constexpr,
    EVEN: constexpr,
    GROUP: constexpr,
):
    """For slerp: for each tile |end 0|^2, |end 1|^2 and end 0 . end 1."""
    N: constexpr = len(FINETUNED)
    tensor, place, tile, left, block, start = locate(
        owners, places, lanes, PLACES + 3 * N, EVEN, GROUP
    )
    coefficients = load_numbers(numbers + tensor * (NUMBERS + 3 * N), N)
    bases, models = open_inputs(place, tile, block, start, left, BASE, FINETUNED, EVEN)
    firsts, seconds, products = (), (), ()
    for h in tl.static_range(PIECES):
        base = bases[h].to(tl.float32)
        first, second = base, base
        for i in tl.static_range(N):
            _, delta, kept = find_delta(models[i], h, base)
            end = base + tl.where(kept, delta * coefficients[i][0], 0.0)
            if i == 0:
                first = end
            else:
                second = end
        one, other = first.to(tl.float64), second.to(tl.float64)
        firsts = firsts + (one * one,)
        seconds = seconds + (other * other,)
        products = products + (one * other,)
    tiles = tile + tl.arange(0, GROUP)[:, None]
    which = tl.arange(0, 4)[None, :]
    inside = (tiles * TILE_SIZE < tl.load(place + 2)) & (which < 3)
    found = fold_tiles(fold_pieces(firsts), fold_pieces(seconds), fold_pieces(products), GROUP)
    tl.store(sums + tl.load(place + 4) + tiles + which * length, found, mask=inside)


@triton.jit
def count_kernel(  # compiled
    owners,
    places,
    lanes,
    prefixes,
    counts,
    SHIFT: constexpr,
    WIDTH: constexpr,
    BASE: constexpr,
    FINETUNED: constexpr,
    EVEN: constexpr,
    GROUP: constexpr,
):
    """For trim: count the surviving |delta| whose higher bits are those found so far, by others."""
    N: constexpr = len(FINETUNED)
    tensor, place, tile, left, block, start = locate(
        owners, places, lanes, PLACES + 3 * N, EVEN, GROUP
    )
    bases, models = open_inputs(place, tile, block, start, left, BASE, FINETUNED, EVEN)
    for h in tl.static_range(PIECES):
        for i in tl.static_range(N):
            _, delta, kept = find_delta(models[i], h, bases[h].to(tl.float32))
            pattern = tl.abs(delta).to(tl.uint32, bitcast=True) >> SHIFT
            kept &= (pattern >> WIDTH) == tl.load(prefixes + tensor * N + i).to(tl.uint32)
            if not EVEN:
                kept &= start + h * LANES < left
            row = counts + ((tensor * N + i) * COPIES + tl.program_id(0) % COPIES) * BINS
            digit = (pattern & ((1 << WIDTH) - 1)).to(tl.int32)
            tl.atomic_add(row + digit, tl.full(digit.shape, 1, tl.int32), mask=kept, sem="relaxed")


@triton.jit(do_not_specialize=["low", "high", "first"])
def bits_kernel(bits, low, high, first):  # compiled
    """The mask's bits of whole tiles, for what has no kernel of its own."""
    tile, lane = tl.program_id(0), tl.arange(0, LANES)
    key = low.to(tl.uint32).to(tl.uint64) | (high.to(tl.uint32).to(tl.uint64) << 32)
    words = draw(key, (first + tile).to(tl.int64) * LANES + lane)
    for h in tl.static_range(PIECES):
        piece = words[h // 2] >> 16 if h % 2 else words[h // 2] & 0xFFFF
        tl.store(bits + tile * TILE_SIZE + h * LANES + lane, piece.to(tl.int32))
