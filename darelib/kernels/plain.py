"""What a merge means: the whole arithmetic, in plain NumPy, to be read. All engines give the bits of this one.

Values are float32 (float64 where any side is stored as float64), models come in the order given, and there is one
rounding at the very end, to nearest even. A tensor is a flat array here; `merge_tensor` is the definition from end to
end, and the functions above it are its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from darelib.formats import FORMATS, widen
from darelib.mask import ROUNDS, TILE, mask_key
from darelib.methods import METHODS, ArcLook, Coefficients, TensorSettings, TrimLook, rank_of_floor, weigh_for_look

Array = Any  # a NumPy array of one dimension

# --- the mask ---------------------------------------------------------------------------------------------------------


def draw_bits(key: tuple[int, int], first_tile: int, tiles: int) -> Array:
    """The 16 random bits of each element of some tiles, by Philox4x32-7 (Salmon et al., SC 2011).

    Block b of the tensor is Philox at counter (b mod 2^32, b div 2^32, 0, 0) and gives eight 16-bit pieces. A tile has
    128 blocks; piece h of its block l belongs to its element 128 h + l.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    block = np.arange(first_tile * (TILE // 8), (first_tile + tiles) * (TILE // 8), dtype=np.uint64)
    x0, x1, x2, x3 = block & low, block >> half, np.zeros_like(block), np.zeros_like(block)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (p1 >> half) ^ x1 ^ np.uint64(k0), p1 & low, (p0 >> half) ^ x3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    pieces = np.stack([piece for x in (x0, x1, x2, x3) for piece in (x & np.uint64(0xFFFF), x >> np.uint64(16))])
    return pieces.reshape(8, tiles, TILE // 8).transpose(1, 0, 2).reshape(-1).astype(np.uint16)


def draw_mask(key: tuple[int, int], threshold: int, start: int, count: int) -> Array:
    """Which elements from start on, a multiple of a tile, are kept: those whose bits are below the threshold."""
    return draw_bits(key, start // TILE, -(-count // TILE))[:count] <= threshold - 1


# --- stored values ----------------------------------------------------------------------------------------------------


def decode(raw: Array, dtype: str, real: str) -> Array:
    """Stored values as the floats to compute in ("F32" or "F64")."""
    return widen(raw, dtype).astype(FORMATS[real].real, copy=False)


def encode(values: Array, dtype: str) -> Array:
    """Floats as stored values, rounded once, to nearest even; as unsigned integers."""
    with np.errstate(over="ignore"):
        if FORMATS[dtype].bits == 16:
            values = round_to_odd(values) if values.dtype == np.float64 else values
            if dtype == "F16":
                return values.astype(np.float16).view(np.uint16)
            bits = values.view(np.uint32)
            bits = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            return bits.astype(np.uint16)
        return values.astype(FORMATS[dtype].real).view(FORMATS[dtype].raw)


def round_to_odd(values: Array) -> Array:
    """float64 to a float32 that rounds on to 16 bits just as the float64 would: truncate, and mark what was cut off."""
    near = values.astype(np.float32)
    bits = near.view(np.uint32) - (np.abs(near.astype(np.float64)) > np.abs(values)).astype(np.uint32)
    return (bits | (bits.view(np.float32).astype(np.float64) != values).astype(np.uint32)).view(np.float32)


# --- thinning and combining -------------------------------------------------------------------------------------------


def thin(delta: Array, mask: Array, scale: float, floor: float = 0.0) -> Array:
    """kept = mask * delta * scale, where scale is the weight over the keep rate; trim drops what is below the floor."""
    zero = delta.dtype.type(0)
    return np.where(mask & (np.abs(delta) >= delta.dtype.type(floor)), delta * delta.dtype.type(scale), zero)


def add_up(base: Array, rows: Sequence[Array], base_share: float) -> Array:
    """The sum of the models' kept deltas, one after the other."""
    merged = base.dtype.type(base_share) * base
    for row in rows:
        merged = merged + row
    return merged


def elect(merged: Array, rows: Sequence[Array], weights: Sequence[float]) -> Array:
    """Ties: the sum's sign is elected at each position, positive at 0; the models of that sign are averaged."""
    zero = merged.dtype.type(0)
    total, share = np.zeros_like(merged), np.zeros_like(merged)
    for row, weight in zip(rows, weights, strict=True):
        agrees = np.where(merged >= 0, row > 0, row < 0)
        total = total + np.where(agrees, row, zero)
        share = share + np.where(agrees, merged.dtype.type(weight), zero)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(share > 0, total / share, zero)


def combine(kernel: str, base: Array, rows: Sequence[Array], coefficients: Coefficients) -> Array:
    merged = add_up(base, rows, coefficients.base_share)
    return elect(merged, rows, coefficients.weights) if kernel == "elect" else merged


def apply(base: Array, merged: Array, lambda_coeff: float) -> Array:
    """base + lambda * merged; base + 0 would turn -0.0 into 0.0."""
    change = base.dtype.type(lambda_coeff) * merged
    return np.where(change == 0, base, base + change)


# --- what slerp and trim must know of a whole tensor ------------------------------------------------------------------


def fold_tiles(values: Array) -> Array:
    """The sum of each tile, by halves: first with second half, until one value is left."""
    tiles = np.pad(values, (0, -len(values) % TILE)).reshape(-1, TILE)
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def multiply(first: Array, second: Array) -> float:
    """The scalar product, in float64: tiles by halves, then their sums by pairs of neighbours."""
    sums = fold_tiles(first.astype(np.float64) * second.astype(np.float64))
    while len(sums) > 1:
        sums = np.pad(sums, (0, len(sums) % 2))
        sums = sums[::2] + sums[1::2]
    return float(sums[0])


def find_floor(survivors: Array, keep_ratio: float) -> float:
    """The smallest |delta| that trim keeps of those that survived the drop."""
    if not len(survivors):
        return 0.0
    place = len(survivors) - rank_of_floor(keep_ratio, len(survivors))
    return float(np.partition(np.abs(survivors), place)[place])


# --- the whole --------------------------------------------------------------------------------------------------------


def merge_tensor(
    name: str, base: Array, dtype: str, finetuned: Mapping[int, tuple[Array, str]], output: str,
    settings: TensorSettings, seed: int,
) -> Array:  # fmt: skip
    """One whole tensor, from stored values to stored values. finetuned: by number, the models that have it."""
    real = "F64" if "F64" in (dtype, output, *(kind for _, kind in finetuned.values())) else "F32"
    start = decode(base, dtype, real)
    values = [decode(raw, kind, real) for raw, kind in finetuned.values()]
    if len(values) == 1 and settings.returns_model:
        return encode(values[0], output)
    models, method = list(finetuned), METHODS[settings.method]
    deltas = [value - start for value in values]
    thresholds = [settings.drop.threshold(settings.drop_rates[i]) for i in models]
    masks = [draw_mask(mask_key(seed + i, name), t, 0, len(start)) for i, t in zip(models, thresholds, strict=True)]
    look = method.look(settings, models, len(start), FORMATS[real].bits) if models and len(start) else None
    if isinstance(look, ArcLook):
        scales = weigh_for_look(settings, models).scales
        thinned = [thin(d, m, scale) for d, m, scale in zip(deltas, masks, scales, strict=True)]
        ends = [start + thinned[models.index(i)] if i in models else start for i in range(2)]
        look.conclude(multiply(ends[0], ends[0]), multiply(ends[1], ends[1]), multiply(ends[0], ends[1]))
    elif isinstance(look, TrimLook):
        look.floors = [find_floor(d[m], settings.keep_ratio) for d, m in zip(deltas, masks, strict=True)]
    found = method.weigh(settings, models, look)
    rows = [thin(*parts) for parts in zip(deltas, masks, found.scales, found.floors, strict=True)]
    return encode(apply(start, combine(method.kernel, start, rows, found), settings.lambda_coeff), output)
