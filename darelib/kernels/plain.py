"""What a merge means: the whole arithmetic, in plain NumPy, to be read. All engines give the bits of this one.

Values are float32 (float64 where any side is stored as float64), models come in the order given, and there is one
rounding at the very end, to nearest even. A tensor is a flat array here; `merge_tensor` is the definition from end to
end, and the functions above it are its steps. Those that ask for an array's library do the same to torch's tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from darelib.formats import FORMATS, widen
from darelib.mask import ROUNDS, TILE, mask_key
from darelib.methods import METHODS, Coefficients, TensorSettings, fold_neighbours, rank_of_floor, weigh_for_look

Array = Any  # of one dimension
Part = tuple[Array, Array]  # a model's delta and mask


def library(array: Array) -> Any:
    """NumPy or torch: the names that are used here mean the same in both."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


# --- the mask ---------------------------------------------------------------------------------------------------------

ARANGE: Final = partial(np.arange, dtype=np.int64)


def draw_bits(key: tuple[int, int], first_tile: int, tiles: int, arange: Callable[..., Array] = ARANGE) -> Array:
    """The 16 random bits of each element of some tiles, by Philox4x32-7 (Salmon et al., SC 2011).

    Block b of the tensor is Philox at counter (b mod 2^32, b div 2^32, 0, 0) and gives eight 16-bit pieces. A tile has
    128 blocks; piece h of its block l belongs to its element 128 h + l.
    """
    low, block = 0xFFFFFFFF, arange(first_tile * (TILE // 8), (first_tile + tiles) * (TILE // 8))
    lib = library(block)
    x0, x1, x2, x3 = block & low, block >> 32, lib.zeros_like(block), lib.zeros_like(block)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # of 64 bits, the highest of which is a sign here
        x0, x1 = (p1 >> 32 & low) ^ x1 ^ k0, p1 & low
        x2, x3 = (p0 >> 32 & low) ^ x3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    pieces = [piece for x in (x0, x1, x2, x3) for piece in (x & 0xFFFF, x >> 16)]
    narrow = lib.stack([lib.asarray(piece, dtype=lib.int32) for piece in pieces])
    return narrow.reshape(8, tiles, TILE // 8).swapaxes(0, 1).reshape(-1)


def draw_mask(
    key: tuple[int, int], threshold: int, start: int, count: int, arange: Callable[..., Array] = ARANGE
) -> Array:
    """Which elements from start on, a multiple of a tile, are kept: those whose bits are below the threshold."""
    return draw_bits(key, start // TILE, -(-count // TILE), arange)[:count] < threshold


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
    lib = library(values)
    near = lib.asarray(values, dtype=lib.float32)
    bits = near.view(lib.int32) - lib.asarray(abs(near) > abs(values), dtype=lib.int32)
    return (bits | lib.asarray(bits.view(lib.float32) != values, dtype=lib.int32)).view(lib.float32)


# --- thinning and combining -------------------------------------------------------------------------------------------


def thin(delta: Array, mask: Array, scale: float, floor: float = 0.0) -> Array:
    """kept = mask * delta * scale, where scale is the weight over the keep rate; trim drops what is below the floor."""
    return library(delta).where(mask & (abs(delta) >= floor), delta * scale, 0.0)


def elect(merged: Array, rows: Sequence[Array], weights: Sequence[float], first_share: float) -> Array:
    """Ties: the sum's sign is elected at each position, positive at 0; the models of that sign are averaged.

    Or summed up: where the first share is 1 and all weights are 0, the division changes nothing.
    """
    lib = library(merged)
    total, share = lib.zeros_like(merged), lib.full_like(merged, first_share)
    for row, weight in zip(rows, weights, strict=True):
        agrees = lib.where(merged >= 0, row > 0, row < 0)
        total, share = lib.where(agrees, total + row, total), lib.where(agrees, share + weight, share)
    with np.errstate(divide="ignore", invalid="ignore"):
        return lib.where(share > 0, total / share, 0.0)


def combine(
    kernel: str, base: Array, rows: Sequence[Array], weights: Sequence[float], base_share: float, first_share: float
) -> Array:
    """The sum of the models' kept deltas, one after the other; or, to elect signs, an average by that sum."""
    merged = sum(rows, start=base_share * base)
    return elect(merged, rows, weights, first_share) if kernel == "elect" else merged


def apply(base: Array, merged: Array, lambda_coeff: float) -> Array:
    """base + lambda * merged; base + 0 would turn -0.0 into 0.0."""
    change = lambda_coeff * merged
    return library(base).where(change == 0, base, base + change)


def merge_parts(settings: TensorSettings, base: Array, parts: Iterable[Part], found: Coefficients) -> Array:
    """The merged values of a tensor, or of a piece of it. parts: of each model that has it."""
    rows = [thin(*part, *numbers) for part, *numbers in zip(parts, found.scales, found.floors, strict=True)]
    kernel, shares = METHODS[settings.method].kernel, (found.base_share, found.first_share)
    merged = combine(kernel, base, rows, found.weights, *shares)
    return apply(base, merged, settings.lambda_coeff)


# --- what slerp and trim must know of a whole tensor ------------------------------------------------------------------


def fold_tiles(values: Array) -> Array:
    """The sum of each tile, by halves: first with second half, until one value is left."""
    lib = library(values)
    padding = lib.zeros_like(values[:1]).repeat(-len(values) % TILE)
    tiles = lib.concatenate([values, padding]).reshape(-1, TILE)
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def multiply(first: Array, second: Array) -> float:
    """The scalar product, in float64: tiles by halves, then their sums by pairs of neighbours."""
    lib = library(first)
    return fold_neighbours(fold_tiles(lib.asarray(first, dtype=lib.float64) * second).tolist())


def multiply_ends(base: Array, kept: Mapping[int, Array]) -> tuple[float, float, float]:
    """|end 0|^2, |end 1|^2 and end 0 . end 1, where an end of slerp's arc is base + kept."""
    ends = [base + kept[i] if i in kept else base for i in range(2)]
    return multiply(ends[0], ends[0]), multiply(ends[1], ends[1]), multiply(ends[0], ends[1])


def find_products(settings: TensorSettings, base: Array, parts: Mapping[int, Part]) -> tuple[float, ...]:
    scales = weigh_for_look(settings, list(parts)).scales
    return multiply_ends(base, {i: thin(*parts[i], scale) for i, scale in zip(parts, scales, strict=True)})


def find_floors(settings: TensorSettings, _: Array, parts: Mapping[int, Part]) -> tuple[float, ...]:
    """Trim: for each model, the smallest |delta| that is kept of those that survived the drop."""
    survivors = [np.sort(np.abs(delta[mask])) for delta, mask in parts.values()]
    return tuple(float(s[-rank_of_floor(settings.keep_ratio, len(s))]) if len(s) else 0.0 for s in survivors)


LOOKS: Final = {"products": find_products, "count": find_floors}  # by the kernels that do the same

# --- the whole --------------------------------------------------------------------------------------------------------


def merge_tensor(
    name: str, base: Array, dtype: str, finetuned: Mapping[int, tuple[Array, str]], output: str,
    settings: TensorSettings, seed: int,
) -> Array:  # fmt: skip
    """One whole tensor, from stored values to stored values. finetuned: by number, the models that have it."""
    real = "F64" if "F64" in (dtype, output, *(kind for _, kind in finetuned.values())) else "F32"
    start, parts = decode(base, dtype, real), {}
    for i, (raw, kind) in finetuned.items():
        value, threshold = decode(raw, kind, real), settings.thinnings[i].threshold
        if settings.returns_model:
            return encode(value, output)
        parts[i] = value - start, draw_mask(mask_key(seed + i, name), threshold, 0, len(start))
    method = METHODS[settings.method]
    look = method.look(settings) if parts and len(start) else None
    found = method.weigh(settings, list(parts), LOOKS[look.kernel](settings, start, parts) if look else None)
    return encode(merge_parts(settings, start, parts.values(), found), output)
