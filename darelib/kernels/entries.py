"""What is made of the kept deltas of a position, and how methods that decide about single entries
score them: the definition, for arrays of NumPy and of torch.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from darelib.core.arrays import Array, library
from darelib.methods.method import Coefficients
from darelib.methods.sce import LEAST_SHARE

Combiner = Callable[[Array, Sequence[Array], Coefficients, Any], Array]

LEAST_DELTA: Final = 1e-6  # nearswap divides by no smaller one

# --- combining ------------------------------------------------------------------------------------


def elect(
    merged: Array,
    rows: Sequence[Array],
    weights: Sequence[float],
    first_share: float,
    any_sign: bool = False,
) -> Array:
    """Ties: the sum's sign is elected at each position, positive at 0, and its models are averaged.

    Ram, of any sign: all that have a delta there.
    Or summed up: where the first share is 1 and all weights are 0, the division changes nothing.
    """
    lib = library(merged)
    total, share = lib.zeros_like(merged), lib.full_like(merged, first_share)
    for row, weight in zip(rows, weights, strict=True):
        agrees = row != 0 if any_sign else lib.where(merged >= 0, row > 0, row < 0)
        total = lib.where(agrees, total + row, total)
        share = lib.where(agrees, share + weight, share)
    with np.errstate(divide="ignore", invalid="ignore"):
        return lib.where(share > 0, total / share, 0.0)


def swap_near(merged: Array, found: Coefficients) -> Array:
    """Nearswap: all of a small delta, and no more than the bound of a large one."""
    size = abs(merged).clip(LEAST_DELTA)
    share = library(merged).full_like(merged, found.bound) / size
    return share.clip(0, 1) * merged


def select(merged: Array, rows: Sequence[Array], found: Coefficients) -> Array:
    """Sce: where the models differ most, those of the sum's sign are averaged by their shares."""
    lib = library(merged)
    total = lib.zeros_like(merged)
    share = lib.zeros_like(merged)
    for row, weight in zip(rows, found.weights, strict=True):
        agrees = lib.where(merged >= 0, row > 0, row < 0)
        total = lib.where(agrees, total + weight * row, total)
        share = lib.where(agrees, share + weight, share)
    is_chosen = find_variance(rows or [merged]) >= found.bound
    return lib.where(is_chosen, total / share.clip(LEAST_SHARE), 0.0)


def boost_alone(merged: Array, rows: Sequence[Array], found: Coefficients) -> Array:
    """Ramplus: ram, and what only one model changes is multiplied by its boost."""
    lib = library(merged)
    averaged = elect(merged, rows, found.weights, found.first_share, True)
    number = count_changes(rows or [0 * merged])
    factor = lib.ones_like(merged)
    for row, boost in zip(rows, found.boosts, strict=True):
        factor = lib.where((row != 0) & (number == 1), boost * factor, factor)
    return averaged * factor


def fuse(merged: Array, rows: Sequence[Array], found: Coefficients, floors: Array) -> Array:
    """Fusion: what is at least as large as the floor of its row. The bound: its scale."""
    if not rows:  # nothing is known of rows either
        return merged
    return library(merged).where(abs(merged) >= found.bound * floors, merged, 0.0)


# By kernel; of the sum of the thinned deltas, these, and a number for each entry.
COMBINERS: Final[Mapping[str, Combiner]] = {
    "elect": lambda merged, rows, found, _: elect(merged, rows, found.weights, found.first_share),
    "average": lambda merged, rows, found, _: elect(
        merged, rows, found.weights, found.first_share, True
    ),
    "near": lambda merged, _, found, __: swap_near(merged, found),
    "select": lambda merged, rows, found, _: select(merged, rows, found),
    "boost": lambda merged, rows, found, _: boost_alone(merged, rows, found),
    "fuse": fuse,
}

# --- scores ---------------------------------------------------------------------------------------


def find_variance(rows: Sequence[Array]) -> Array:
    """The variance of each entry over the models, times their number; 0 where all are equal."""
    first, *others = rows
    lib = library(first)
    mean = lib.zeros_like(first)
    for row in others:
        mean = mean + (row - first)
    mean = mean * (1 / len(rows))  # one over an array is no division on all of torch's devices
    variance = mean * mean
    for row in others:
        gap = (row - first) - mean
        variance = variance + gap * gap
    return variance


def select_rows(rows: Sequence[Array], bound: float) -> list[Array]:
    """What sce selects, in float64."""
    lib = library(rows[0])
    is_chosen = find_variance(rows) >= bound
    return [lib.asarray(lib.where(is_chosen, row, 0.0), dtype=lib.float64) for row in rows]


def count_changes(rows: Sequence[Array]) -> Array:
    """How many models change each entry."""
    return sum(1 * (row != 0) for row in rows)


def count_overlap(rows: Sequence[Array]) -> Any:
    """For each model, how many entries it changes alone, and with others."""
    number = count_changes(rows)
    pairs = [[(row != 0) & (number == 1), (row != 0) & (number > 1)] for row in rows]
    return np.array([[int(each.sum()) for each in pair] for pair in pairs], np.uint64)


def spread(by_row: Any, width: int, start: int, count: int, like: Array) -> Any:
    """What rows have, for some entries, in the type of others; None if they have nothing."""
    if by_row is None:
        return None
    lib = library(by_row)
    first = start // width
    last = -(-(start + count) // width)
    rows = lib.broadcast_to(by_row[first:last, None], (last - first, width)).reshape(-1)
    own = rows[start - first * width :][:count]
    return lib.asarray(own, dtype=like.dtype)


# --- softmax --------------------------------------------------------------------------------------

# Adding it leaves a float64's nearest whole number in its lowest bits.
ROUNDER: Final = 1.5 * 2.0**52
[ROUNDER_BITS] = struct.unpack("<q", struct.pack("<d", ROUNDER))
LOG2_E: Final = 1.4426950408889634
LN2: Final = 0.6931471805599453
# Its first bits, whose product with a small whole number is exact, and the rest.
LN2_HIGH: Final = 0.6931471803691238
LN2_LOW: Final = 1.9082149292705877e-10
[ROOT_BITS] = struct.unpack("<q", struct.pack("<d", 0.7071067811865476))
LOWEST: Final = -700.0  # whose power of e is a normal number yet
# Of the powers of e, from the highest down, and of (artanh x) / x, by x^2.
POWER_TERMS: Final = tuple(
    1 / n for n in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1)
)
LOG_TERMS: Final = tuple(2 / n for n in range(21, 0, -2))
SOFTMAX_EPSILON: Final = 1e-8  # mergekit adds it to every share
ROWS_AT_ONCE: Final = 1 << 22  # elements of whole rows


def raise_e(x: Array) -> Array:
    """e^x, for x <= 0, to the bit on every machine: libraries differ in the last one of theirs."""
    lib = library(x)
    x = x.clip(LOWEST)
    shifted = x * LOG2_E + ROUNDER
    whole = shifted - ROUNDER
    rest = (x - whole * LN2_HIGH) - whole * LN2_LOW
    power = lib.full_like(x, POWER_TERMS[0])
    for term in POWER_TERMS[1:]:
        power = power * rest + term
    return power * (shifted.view(lib.int64) + 1023 << 52).view(lib.float64)


def find_log(x: Array) -> Array:
    """The natural logarithm of normal numbers above 0, to the bit on every machine."""
    lib = library(x)
    bits = x.view(lib.int64)
    exponent = bits - ROOT_BITS >> 52
    part = (bits - (exponent << 52)).view(lib.float64)
    ratio = (part - 1) / (part + 1)
    square = ratio * ratio
    series = lib.full_like(x, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        series = series * square + term
    return ((exponent + ROUNDER_BITS).view(lib.float64) - ROUNDER) * LN2 + ratio * series


def add_rows(values: Array) -> Array:
    """The sum of each row, by halves: first with second half, until one value is left."""
    lib = library(values)
    while values.shape[1] > 1:
        width = values.shape[1]
        half = (width + 1) // 2
        added = values[:, : width - half] + values[:, half:]
        values = lib.concatenate([added, values[:, width - half : half]], 1)
    return values


def take_softmax(rows: Array) -> Array:
    powers = raise_e(rows - library(rows).amax(rows, 1)[:, None])
    return powers / add_rows(powers) + SOFTMAX_EPSILON


def find_divergences(base: Array, delta: Array, width: int) -> Array:
    """Of each row, that of the fine-tune's softmax from the base's, after Kullback and Leibler.

    In float64, some rows at a time, and in the end in float32.
    """
    lib = library(base)
    step = max(1, ROWS_AT_ONCE // width) * width
    found = []
    for start in range(0, len(base), step):
        values = base[start : start + step]
        moved = values + delta[start : start + step]
        wide = [lib.asarray(each, dtype=lib.float64) for each in (values, moved)]
        before, after = (take_softmax(each.reshape(-1, width)) for each in wide)
        sums = add_rows(after * find_log(after / before))[:, 0]
        found.append(lib.asarray(sums.clip(0), dtype=lib.float32))
    return lib.concatenate(found)
