"""What a merge means: the whole arithmetic, in plain NumPy, to be read. Engines give its bits.

Values are float32 (float64 where any side is stored as float64), models come in the order given,
and there is one rounding at the very end, to nearest even. A tensor is a flat array here;
`merge_tensor` is the definition from end to end, and the functions above it are its steps. Those
that ask for an array's library do the same to torch's tensors.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from darelib.core.drops import Bounds, End, Thinning
from darelib.core.formats import FORMATS, widen
from darelib.core.looks import (
    ArcLook,
    BoundsLook,
    DivergenceLook,
    Found,
    GramLook,
    ImportanceLook,
    MatrixLook,
    OverlapLook,
    SquaresLook,
    SumsLook,
    TrimLook,
    VarianceLook,
    find_boosts,
    find_factors,
    find_row_floors,
    find_shares,
    fold_columns,
    number_quartiles,
    rank_of_floor,
)
from darelib.core.mask import MASK_BITS, ROUNDS, TILE, mask_key
from darelib.core.matrices import LONGEST_SIDE, Matrices, find_matrices
from darelib.core.methods import METHODS, Coefficients, choose_looks, returns_model, weigh_for_look
from darelib.core.settings import ZERO, TensorSettings
from darelib.kernels import entries
from darelib.kernels.arrays import Array, add_up, library

# A model's delta, what is kept of it, and what each entry is divided by.
Part = tuple[Array, Array, Array | None]
# A tensor in pieces of 2^k tiles: the base's values there, and the parts of some of the models.
Pieces = Callable[[Sequence[int], Found], Iterator[tuple[Array, dict[int, Part]]]]


# --- the mask -------------------------------------------------------------------------------------

ARANGE: Final = partial(np.arange, dtype=np.int64)


def draw_bits(
    key: tuple[int, int], first_tile: int, tiles: int, arange: Callable[..., Array] = ARANGE
) -> Array:
    """The 16 random bits of each element of some tiles, by Philox4x32-7 (Salmon et al., SC 2011).

    Block b of the tensor is Philox at counter (b mod 2^32, b div 2^32, 0, 0) and gives eight 16-bit
    pieces. A tile has 128 blocks; piece h of its block l belongs to its element 128 h + l.
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
    key: tuple[int, int],
    threshold: int,
    start: int,
    count: int,
    arange: Callable[..., Array] = ARANGE,
) -> Array:
    """Which elements from start on, a multiple of a tile, have bits below the threshold."""
    return draw_bits(key, start // TILE, -(-count // TILE), arange)[:count] < threshold


# --- stored values --------------------------------------------------------------------------------


def decode(raw: Array, dtype: str, real: str) -> Array:
    """Stored values as the floats to compute in ("F32" or "F64")."""
    return widen(raw, dtype).astype(FORMATS[real].real, copy=False)


def encode(values: Array, dtype: str) -> Array:
    """Floats as stored values, rounded once, to nearest even; as unsigned integers."""
    with np.errstate(over="ignore"):
        if FORMATS[dtype].bits == 16 and values.dtype == np.float64:
            values = round_to_odd(values)
        if dtype != "BF16":
            return values.astype(FORMATS[dtype].real).view(FORMATS[dtype].raw)
    bits = values.view(np.uint32)
    rounding = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def round_to_odd(values: Array) -> Array:
    """float64 to a float32 that rounds on to 16 bits just as the float64 would.

    What does not fit is cut off, and the last bit says so.
    """
    lib = library(values)
    near = lib.asarray(values, dtype=lib.float32)
    bits = near.view(lib.int32) - lib.asarray(abs(near) > abs(values), dtype=lib.int32)
    return (bits | lib.asarray(bits.view(lib.float32) != values, dtype=lib.int32)).view(lib.float32)


# --- thinning and combining -----------------------------------------------------------------------


def rank(delta: Array, width: int) -> Array:
    """The rank of each entry in its row, from the smallest |delta| up; equal ones stay in order."""
    lib, rows = library(delta), abs(delta).reshape(-1, width)
    order = lib.argsort(rows, **({"kind": "stable"} if lib is np else {"stable": True}))
    ranks = lib.empty_like(order)
    ones = lib.ones_like(order)  # whose sums so far count rows and places
    ranks[ones[:, :1].cumsum(0) - 1, order] = ones[:1].cumsum(1) - 1
    return ranks.reshape(-1)


def find_thresholds(thinning: Thinning, delta: Array, width: int) -> Array:
    """What is kept has mask bits below them: by rank, for each entry of whole rows."""
    lib = library(delta)
    return thinning.find_thresholds(lib.asarray(rank(delta, width), dtype=lib.float64), width)


def keep(
    delta: Array, bits: Array, thresholds: Array, bounds: Bounds | None, divided: bool
) -> Part:
    """What a drop keeps of a delta: by mask bits below a threshold, or by size.

    That is, where |delta| lies between bounds or, equal to one, has bits below its threshold.
    divided: each entry by its own probability to be kept, in the type to compute in.
    """
    lib = library(delta)
    if bounds:
        size = abs(delta)
        is_kept_high = (size == bounds.high) & (bits < bounds.at_high)
        is_kept = lib.where(size == bounds.low, bits < bounds.at_low, is_kept_high)
        return delta, is_kept | ((size > bounds.low) & (size < bounds.high)), None
    divisors = lib.asarray(thresholds, dtype=delta.dtype) / 2.0**MASK_BITS if divided else None
    return delta, bits < thresholds, divisors


def thin(
    delta: Array, mask: Array, divisors: Array | None, scale: float, floor: float = 0.0
) -> Array:
    """kept = mask * delta * scale, where scale is the weight over the keep rate.

    Trim drops what is below the floor. divisors: by which each entry is divided, if they differ.
    """
    scaled = delta * scale if divisors is None else delta * scale / divisors
    return library(delta).where(mask & (abs(delta) >= floor), scaled, 0.0)


def combine(
    kernel: str,
    base: Array,
    rows: Sequence[Array],
    found: Coefficients,
    lambda_coeff: float,
    by_entry: Array | None = None,
) -> Array:
    """base + lambda * merged, which is the sum of the models' kept deltas, in order.

    Or what a method makes of them and of that sum. by_entry: a number for each entry.
    """
    merged = sum(rows, start=found.base_share * base)
    if kernel != "sum":
        merged = entries.COMBINERS[kernel](merged, rows, found, by_entry)
    return add_change(base, merged, lambda_coeff)


def add_change(base: Array, merged: Array, lambda_coeff: float) -> Array:
    change = lambda_coeff * merged
    # base + 0 would turn -0.0 into 0.0
    return library(base).where(change == 0, base, base + change)


def merge_parts(
    settings: TensorSettings,
    base: Array,
    parts: Iterable[Part],
    found: Coefficients,
    by_entry: Array | None = None,
) -> Array:
    """The merged values of a tensor, or of a piece of it. parts: of each model that has it."""
    each = zip(parts, found.scales, found.floors, strict=True)
    rows = [thin(*part, scale, floor) for part, scale, floor in each]
    kernel = METHODS[settings.method].kernel
    return combine(kernel, base, rows, found, settings.lambda_coeff, by_entry)


# --- what methods must know of a whole tensor ----------------------------------------------


def multiply_ends(origin: Array, kept: Mapping[int, Array], count: int) -> tuple[float, ...]:
    """The scalar products of so many ends, each with itself, then each with all behind it.

    An end is origin + kept, where the origin is the base, or 0.
    """
    lib = library(origin)
    ends = [origin + kept[i] if i in kept else origin for i in range(count)]
    squares: list[float] = []
    products: list[float] = []
    for i, end in enumerate(ends):
        wide = lib.asarray(end, dtype=lib.float64)  # one at a time: they take memory
        squares.append(add_up(wide * wide))
        products += [add_up(wide * other) for other in ends[i + 1 :]]
    return (*squares, *products)


def add_sizes(parts: Iterable[Part], kept: Iterable[Array]) -> tuple[float, ...]:
    """The sums of |delta|, then of what is kept."""
    deltas = (delta for delta, *_ in parts)
    return tuple(add_up(abs(row)) for row in (*deltas, *kept))


def thin_for_look(
    settings: TensorSettings, parts: Mapping[int, Part], found: Found
) -> dict[int, Array]:
    scales = weigh_for_look(settings, list(parts), found).scales
    return {i: thin(*parts[i], scale) for i, scale in zip(parts, scales, strict=True)}


def list_sizes(pieces: Pieces, i: int, found: Found) -> Array:
    """|delta| of what is kept of a model."""
    parts = (opened[i] for _, opened in pieces([i], found))  # one at a time: they take memory
    sizes = [abs(delta[mask]) for delta, mask, _ in parts]
    return library(sizes[0]).concatenate(sizes)


def find_size(sizes: Array, number: int) -> float:
    """One of them, counted from the largest down; on a GPU, to sort all is faster."""
    if getattr(sizes, "is_cuda", False):
        return float(sizes.sort().values[-number])
    return float(np.partition(sizes, -number)[-number])


def find_end(sizes: Array, number: int) -> End:
    """The entry of this number, from the largest down, among those that equal it."""
    size = find_size(sizes, number)
    return End(size, number - int((sizes > size).sum()), int((sizes == size).sum()))


def find_bounds(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    """Drops by size: for each model with one, the smallest and the largest |delta| it keeps."""
    bounds = []
    for i in models:
        thinning = settings.thinnings[i]
        sizes = list_sizes(pieces, i, found) if thinning.scheme.ends else ()
        ends = [find_end(sizes, number) for number in thinning.list_ends(len(sizes))]
        bounds.append(thinning.find_bounds(ends))
    found.bounds = tuple(bounds)


def find_sums(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    """The factors that restore the sums of |delta|."""
    sums = [
        add_sizes(parts.values(), thin_for_look(settings, parts, found).values())
        for _, parts in pieces(models, found)
    ]
    found.factors = find_factors(settings, models, fold_columns(sums))


def find_floors(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    """Trim: for each model, the smallest |delta| that is kept of those that survived the drop."""
    survivors = (list_sizes(pieces, i, found) for i in models)
    found.floors = tuple(
        find_size(sizes, rank_of_floor(settings.keep_ratio, len(sizes))) if len(sizes) else 0.0
        for sizes in survivors
    )


def find_products(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    """Those of all models: one without the tensor has the base's."""
    products = []
    for base, parts in pieces(models, found):
        origin = base if settings.origin == ZERO else library(base).zeros_like(base)
        kept = thin_for_look(settings, parts, found)
        products.append(multiply_ends(origin, kept, len(settings.weights)))
    found.products = fold_columns(products)


def find_variance(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    """Sce: what the variance of an entry over the models must reach."""
    opened = (thin_for_look(settings, parts, found) for _, parts in pieces(models, found))
    found_in = [entries.find_variance(list(rows.values())) for rows in opened]
    scores = library(found_in[0]).concatenate(found_in)
    scores = scores[scores > 0]
    chosen = int(settings.keep_ratio * len(scores))
    found.bound = find_size(scores, chosen) if chosen else math.inf


def find_squares(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    sums = []
    count = 0
    for base, parts in pieces(models, found):
        rows = list(thin_for_look(settings, parts, found).values())
        chosen = entries.select_rows(rows, found.bound)
        sums.append(tuple(add_up(row * row) for row in chosen))
        count += len(base)
    found.shares = find_shares(fold_columns(sums), count)


def find_overlap(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    counts = np.zeros((len(models), 2), np.uint64)
    for _, parts in pieces(models, found):
        scales = weigh_for_look(settings, models, found).scales
        pairs = zip(parts.values(), scales, strict=True)
        rows = [thin(*part, scale, settings.threshold) for part, scale in pairs]
        counts += entries.count_overlap(rows)
    found.boosts = find_boosts(settings, counts.tolist())


def find_divergences(
    _: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found
) -> None:
    opened = [(base, parts[models[0]][0]) for base, parts in pieces(models, found)]
    lib = library(opened[0][0])
    base, delta = (lib.concatenate(each) for each in zip(*opened, strict=True))
    found.by_row = entries.find_divergences(base, delta, found.width)


def find_importance(_: TensorSettings, models: Sequence[int], pieces: Pieces, found: Found) -> None:
    opened = [abs(parts[models[0]][0]) for _, parts in pieces(models, found)]
    sizes = library(opened[0]).concatenate(opened)
    scores = sizes * entries.spread(found.by_row, found.width, 0, len(sizes), sizes)
    quartiles = [find_size(scores, number) for number in number_quartiles(len(scores))]
    found.by_row = find_row_floors(found.by_row, quartiles)


LOOKS: Final = {
    VarianceLook: find_variance,
    SquaresLook: find_squares,
    OverlapLook: find_overlap,
    DivergenceLook: find_divergences,
    ImportanceLook: find_importance,
    BoundsLook: find_bounds,
    SumsLook: find_sums,
    TrimLook: find_floors,
    GramLook: find_products,
    ArcLook: find_products,
    MatrixLook: lambda *_: None,  # it is the merge itself, below
}


def look_up(
    settings: TensorSettings, models: Sequence[int], pieces: Pieces, count: int, width: int
) -> Found:
    """What must be known of a whole tensor, of so many entries, before it is merged."""
    found = Found(width=width)
    for look in choose_looks(settings, models) if models and count else ():
        LOOKS[look](settings, models, pieces, found)
    return found


# --- matrices -------------------------------------------------------------------------------------


def merge_matrices(
    deltas: Sequence[Array], weights: Sequence[float], ridge: float, norm_limit: float
) -> Array:
    """Wudi: the merged delta of one matrix, in float64. Deltas may be of 0 only.

    The mean of what the definition gives from the columns' side and from the rows' side, times what
    makes its projections on the deltas 1 in the mean, within a limit of its size.
    """
    wide = [np.asarray(delta, dtype=np.float64) for delta in deltas]
    sides = []
    if wide[0].shape[1] <= LONGEST_SIDE:
        sides.append(solve_columns(wide, weights, ridge))
    if wide[0].shape[0] <= LONGEST_SIDE:
        sides.append(solve_columns([delta.T for delta in wide], weights, ridge).T)
    merged: Array = sum(sides) / len(sides)
    pairs = [(weight, delta) for weight, delta in zip(weights, wide, strict=True) if delta.any()]
    if not norm_limit or not merged.any():
        return merged
    total = sum(weight for weight, _ in pairs)
    held = sum(weight * (merged * delta).sum() / (delta**2).sum() for weight, delta in pairs)
    mean = sum(weight * np.linalg.norm(delta) for weight, delta in pairs) / total
    most = 1 / max(held / total, 1 / len(pairs))
    return merged * min(most, norm_limit * mean / np.linalg.norm(merged))


def merge_whole(
    settings: TensorSettings, thinned: Mapping[int, Array], matrices: Matrices | None
) -> Array:
    """The merged delta of a tensor, flat. thinned: by number, the deltas of models that have it."""
    shape = matrices or (1, 1, 1)
    none = np.zeros(shape)
    models = range(len(settings.weights))
    shaped = [thinned[i].reshape(shape) if i in thinned else none for i in models]
    merged = [
        merge_matrices(list(deltas), settings.weights, settings.ridge, settings.norm_limit)
        for deltas in zip(*shaped, strict=True)
    ]
    return np.concatenate(merged).reshape(-1)


def solve_columns(deltas: Sequence[Array], weights: Sequence[float], ridge: float) -> Array:
    """M = (sum of w_i t_i G_i) (sum of w_i G_i)^-1, where G_i is t_i' t_i with a mean diagonal of
    1, plus the ridge.
    """
    unit = np.eye(deltas[0].shape[1])
    grams = []
    for delta in deltas:
        gram = delta.T @ delta
        mean = gram.diagonal().mean()
        grams.append((gram / mean if mean else gram) + ridge * unit)
    parts = list(zip(weights, deltas, grams, strict=True))
    total = sum(weight * gram for weight, _, gram in parts)
    wanted = sum(weight * delta @ gram for weight, delta, gram in parts)
    return np.linalg.solve(total, wanted.T).T


# --- the whole ------------------------------------------------------------------------------------


def merge_tensor(
    name: str,
    base: Array,
    dtype: str,
    finetuned: Mapping[int, tuple[Array, str]],
    output: str,
    settings: TensorSettings,
    seed: int,
    width: int,
    shape: tuple[int, ...] = (),
) -> Array:
    """One whole tensor, from stored values to stored values.

    finetuned: by number, the models that have it. width: its last dimension, 1 if it has none.
    shape: all of them, where the method takes whole matrices.
    """
    types = (dtype, output, *(kind for _, kind in finetuned.values()))
    real = "F64" if "F64" in types else "F32"
    start = decode(base, dtype, real)
    models = list(finetuned)
    if models and returns_model(settings):
        raw, kind = finetuned[0]
        return encode(decode(raw, kind, real), output)

    def open_whole(models: Sequence[int], found: Found) -> Iterator[tuple[Array, dict[int, Part]]]:
        bounds = dict(zip(finetuned, found.bounds, strict=False))
        parts = {}
        for i in models:
            raw, kind = finetuned[i]
            delta = decode(raw, kind, real) - start
            thinning = settings.thinnings[i]
            bits = draw_bits(mask_key(seed + i, name), 0, -(-len(delta) // TILE))[: len(delta)]
            ranked = thinning.scheme.thresholds
            thresholds = find_thresholds(thinning, delta, width) if ranked else thinning.threshold
            parts[i] = keep(delta, bits, thresholds, bounds.get(i), thinning.divides_each)
        yield start, parts

    found = look_up(settings, models, open_whole, len(start), width)
    coefficients = METHODS[settings.method].weigh(settings, models, found)
    [(_, parts)] = open_whole(models, found)
    if METHODS[settings.method].whole:
        thinned = thin_for_look(settings, parts, found)
        change = merge_whole(settings, thinned, find_matrices(name, shape))
        return encode(add_change(start, change.astype(start.dtype), settings.lambda_coeff), output)
    by_entry = entries.spread(found.by_row, width, 0, len(start), start)
    return encode(merge_parts(settings, start, parts.values(), coefficients, by_entry), output)
