"""What is done to a chunk of a tensor, in NumPy: the definition's steps, with what a merge counts
on the way. jitted.py has the same functions for Numba.

Values are float32 or float64.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic import definition
from darelib.arithmetic.engine import compiled
from darelib.core.arrays import Array, add_in_turn, fold_tiles
from darelib.core.drops import Bounds
from darelib.core.formats import BINS, DIGIT_BITS, FIRST_BIN
from darelib.core.mask import KEEP_ALL, TILE
from darelib.methods.looks import Coefficients, Piece
from darelib.methods.method import add_rows as sum_rows
from darelib.methods.ram import average as average_rows
from darelib.methods.ties import elect as elect_rows


class Cut(NamedTuple):
    """How one model's delta of a tensor is thinned and scaled."""

    key_0: int
    key_1: int
    threshold: int = KEEP_ALL  # what has mask bits below it is kept
    draws: bool = False  # whether the mask's bits matter
    is_delta: bool = False  # whether its values are changes, not changed values
    ranked: bool = False  # whether each entry has last bits of its own that are kept
    # What lies between low and high is kept, and of what equals them, what has bits below these.
    bounded: bool = False
    low: float = 0.0
    high: float = 0.0
    at_low: int = 0
    at_high: int = 0
    divided: bool = False  # each entry by its own probability to be kept
    scale: float = 1.0
    floor: float = 0.0  # what is smaller is dropped, too


# The same for compiled functions.
CUT: Final = np.dtype([(name, Cut.__annotations__[name]) for name in Cut._fields])


class Combining(NamedTuple):
    """How thinned deltas are combined: summed up or, averages, averaged where they are not 0 or,
    elects, where they have the sign of their sum.
    """

    averages: bool
    elects: bool
    weights: NDArray[np.float64]
    base_share: float
    first_share: float
    lambda_coeff: float


class Seen(NamedTuple):
    """What was counted of one model's delta."""

    sizes: Array  # the sum of |delta| of each tile
    peak: float  # the largest; infinite where a value is not finite
    above: int  # how many are larger than what was asked
    kept: int


def join_seen(parts: Sequence[Seen]) -> Seen:
    sizes, peaks, above, kept = zip(*parts, strict=True)
    return Seen(np.concatenate(sizes), max(peaks), sum(above), sum(kept))


def find_peak(values: Array) -> float:
    peak = float(np.abs(values).max(initial=0))
    return peak if peak < np.inf else np.inf  # a NaN, too


def add_tiles(values: Array) -> float:
    return add_in_turn(fold_tiles(values))


@compiled
def merge(
    base: Array,
    values: NDArray[Any],
    cuts: NDArray[Any],
    last_bits: NDArray[np.uint16],
    start: int,
    large: float,
    how: Combining,
    rows: NDArray[Any],
    merged: Array,
) -> tuple[NDArray[Any], NDArray[np.float64], NDArray[np.int64]]:
    """Put the thinned deltas into rows, if there are any, and what they are combined to into
    merged, if that has a length.

    values, cuts, last_bits: of each model. Gives what Seen has: the sums of sizes by tile, and the
    largest, of each model and of the base and the result; and two counts of each model.
    """
    models = zip(values, cuts.tolist(), last_bits, strict=True)
    made = [thin(base, mine, Cut(*cut), bits, start, large) for mine, cut, bits in models]
    thinned = [row for row, _ in made]
    seen = [each for _, each in made]
    for row, values_ in zip(rows, thinned, strict=False):
        row[:] = values_
    peak = 0.0
    sums = fold_tiles(np.pad(np.abs(base), (start % TILE, 0)))
    if len(merged):
        own = Coefficients((), how.weights.tolist(), (), (), how.base_share, how.first_share)
        combine = (elect_rows if how.elects else average_rows) if how.averages else sum_rows
        merged[:] = combine(Piece(base, thinned), own)
        peak = add_change(base, merged, how.lambda_coeff)
    return (
        np.stack([*(each.sizes for each in seen), sums]),
        np.array([*(each.peak for each in seen), peak]),
        np.array([(each.above, each.kept) for each in seen], np.int64).reshape(-1, 2),
    )


def thin(
    base: Array, values: Array, cut: Cut, last_bits: NDArray[np.uint16], start: int, large: float
) -> tuple[Array, Seen]:
    """The thinned delta of one model, and what was counted of it."""
    delta = values if cut.is_delta else values - base
    thresholds: Any = last_bits.astype(np.int32) + 1 if cut.ranked else cut.threshold
    bounds = Bounds(cut.low, cut.high, cut.at_low, cut.at_high) if cut.bounded else None
    skipped = start % TILE
    bits: Any = np.zeros(len(delta), np.int32)
    if cut.draws:
        tiles = -(-(skipped + len(delta)) // TILE)
        bits = definition.draw_bits((cut.key_0, cut.key_1), start // TILE, tiles)
        bits = bits[skipped : skipped + len(delta)]
    delta, mask, divisors = definition.keep(delta, bits, thresholds, bounds, cut.divided)
    sizes = np.abs(delta)
    return definition.thin(delta, mask, divisors, cut.scale, cut.floor), Seen(
        sizes=fold_tiles(np.pad(sizes, (skipped, 0))),
        peak=find_peak(sizes),
        above=int(np.count_nonzero(sizes > sizes.dtype.type(large))),
        kept=int(np.count_nonzero(mask)),
    )


@compiled
def add_change(base: Array, merged: Array, lambda_coeff: float) -> float:
    """Turn the merged delta into the result, in place. Gives the largest |value|, as Seen does."""
    merged[:] = definition.add_change(base, merged, lambda_coeff)
    return find_peak(merged)


@compiled
def count_digits(
    base: Array,
    values: Array,
    cut: Cut,
    first_tile: int,
    shift: int,
    prefixes: NDArray[np.uint64],
    counts: NDArray[np.uint32],
) -> None:
    """Count |delta| of what the mask keeps by 16 bits of their pattern, from a bit on, for each of
    two prefixes: of those whose higher bits are these.

    counts: to which these are added.
    """
    delta = np.abs(values if cut.is_delta else values - base)
    if cut.draws:
        first = first_tile * TILE
        delta = delta[
            definition.draw_mask((cut.key_0, cut.key_1), cut.threshold, first, len(delta))
        ]
    count_sizes(delta, shift, prefixes, counts)


def count_sizes(
    sizes: Array, shift: int, prefixes: NDArray[np.uint64], counts: NDArray[np.uint32]
) -> None:
    patterns = sizes.view(f"u{sizes.itemsize}").astype(np.uint64) >> np.uint64(shift)
    for part, prefix in zip(counts, dict.fromkeys(prefixes.tolist()), strict=False):
        fitting = patterns[patterns >> np.uint64(DIGIT_BITS) == np.uint64(prefix)]
        digits = (fitting & np.uint64(0xFFFF)).astype(np.int64)
        part += np.bincount(digits, minlength=len(part)).astype(np.uint32)


@compiled
def dot(one: Array, other: Array) -> float:
    """The scalar product: of tiles by halves, then their sums by pairs of neighbours."""
    return definition.dot(one, other)


@compiled
def rank_rows(
    sizes: NDArray[Any], by_rank: NDArray[np.uint16], skipped: int, count: int
) -> NDArray[np.uint16]:
    """What each entry of whole rows has by its rank, for so many of them, but for some at the
    start. sizes: |delta| as unsigned integers.
    """
    ranks = definition.rank(sizes.astype(np.int64), len(by_rank))
    return by_rank[ranks][skipped : skipped + count]


@compiled
def measure(
    delta: Array, large: float, counts: NDArray[np.int64]
) -> tuple[int, int, float, float, float]:
    """How many are 0, and above a size; the sums of sizes and squares; the largest.

    counts: by bin, to which these are added.
    """
    sizes = np.abs(delta)
    patterns = sizes.astype(np.float32).view(np.uint32)
    bins = ((patterns >> 19).astype(np.int64) - FIRST_BIN).clip(0, BINS - 1)
    counts += np.bincount(bins, minlength=BINS)
    zeros = int(np.count_nonzero(sizes == 0))
    above = int(np.count_nonzero(sizes > sizes.dtype.type(large)))
    return zeros, above, add_tiles(sizes), add_tiles(sizes * sizes), find_peak(sizes)


@compiled
def compare(one: Array, other: Array) -> tuple[float, int, int, float, float]:
    """The scalar product of two deltas; how many entries have opposite signs, and are not 0 in
    both; and how large they are there.
    """
    size = np.abs(one) + np.abs(other)
    signs = np.sign(one) * np.sign(other)
    opposed = signs < 0
    both = signs != 0
    return (
        add_tiles(one * other),
        int(np.count_nonzero(opposed)),
        int(np.count_nonzero(both)),
        add_tiles(np.where(opposed, size, 0)),
        add_tiles(np.where(both, size, 0)),
    )


@compiled
def add_product(left: Array, right: Array, product: Array, first: int) -> None:
    """Add elements of left @ right from one of the first row on, in the order of the ranks."""
    total = np.zeros((left.shape[0], right.shape[1]), product.dtype)
    flat = total.reshape(-1)[first : first + len(product)]
    flat[:] = product
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k]
    product[:] = flat


@compiled
def take_kept(
    raw: NDArray[Any], key_0: int, key_1: int, threshold: int, first_tile: int
) -> NDArray[Any]:
    """The stored values that a mask keeps."""
    return raw[definition.draw_mask((key_0, key_1), threshold, first_tile * TILE, len(raw))]


@compiled
def put_kept(
    base: Array,
    entries: Array,
    key_0: int,
    key_1: int,
    threshold: int,
    first_tile: int,
    values: Array,
) -> int:
    """Make values of entries where a mask keeps them, as far as there are any, and of the base's.

    Gives how many it keeps.
    """
    values[:] = base
    mask = definition.draw_mask((key_0, key_1), threshold, first_tile * TILE, len(values))
    places = np.flatnonzero(mask)
    filled = places[: len(entries)]
    values[filled] = entries[: len(filled)]
    return len(places)
