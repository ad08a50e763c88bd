"""What a merge means: the whole arithmetic, in plain NumPy, to be read. Engines give its bits.

Values are float32 (float64 where any side is stored as float64), models come in the order given,
and there is one rounding at the very end, to nearest even. A tensor is a flat array here;
`merge_tensor` is the definition from end to end, and the functions above it are its steps. Those
that ask for an array's library do the same to torch's tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from darelib.arithmetic.stored import decode, encode
from darelib.core.arrays import Array, Matrices, add_up, find_matrices, library
from darelib.core.drops import Bounds, End, Thinning
from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_BITS, ROUNDS, TILE, mask_key
from darelib.methods import METHODS, OPERATIONS, choose_looks, returns_model
from darelib.methods.looks import (
    ZERO,
    BoundsLook,
    ChunkLook,
    Coefficients,
    Found,
    GramLook,
    Look,
    Piece,
    PieceLook,
    ScoreLook,
    TensorSettings,
    fold_columns,
    weigh_for_look,
)

# A model's delta, which entries a drop keeps, and what each is divided by.
Kept = tuple[Array, Array, Array | None]
# A tensor in pieces of 2^k tiles: the base's values there, and the deltas of some of the models.
Pieces = Callable[[Sequence[int], Found], Iterator[tuple[Array, dict[int, Kept]]]]
Sums = tuple[float, ...]


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


def draw_mask(key: tuple[int, int], threshold: int, start: int, count: int) -> Array:
    """Which elements from start on, a multiple of a tile, have bits below the threshold."""
    return draw_bits(key, start // TILE, -(-count // TILE))[:count] < threshold


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
) -> Kept:
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


def combine(operation: str, piece: Piece, own: Coefficients, lambda_coeff: float) -> Array:
    """base + lambda * merged, where an operation makes merged of the models' thinned deltas."""
    merged = OPERATIONS[operation].combine(piece, own)
    return add_change(piece.base, merged, lambda_coeff)


def add_change(base: Array, merged: Array, lambda_coeff: float) -> Array:
    change = lambda_coeff * merged
    # base + 0 would turn -0.0 into 0.0
    return library(base).where(change == 0, base, base + change)


def thin_all(deltas: Mapping[int, Kept], own: Coefficients) -> dict[int, Array]:
    each = zip(deltas.items(), own.scales, own.floors, strict=True)
    return {i: thin(*kept, scale, floor) for (i, kept), scale, floor in each}


def merge_piece(
    settings: TensorSettings,
    base: Array,
    deltas: Mapping[int, Kept],
    own: Coefficients,
    start: int,
    width: int,
) -> Array:
    """The merged values of a tensor, or of a piece of it. deltas: of each model that has it."""
    piece = Piece(base, list(thin_all(deltas, own).values()), start, width)
    operation = METHODS[settings.method].operation.name
    return combine(operation, piece, own, settings.lambda_coeff)


# --- what methods must know of a whole tensor ----------------------------------------------


def dot(one: Array, other: Array) -> float:
    lib = library(one)
    return add_up(lib.asarray(one, dtype=lib.float64) * other)


def multiply_ends(
    origin: Array,
    kept: Mapping[int, Array],
    count: int,
    dot: Callable[[Array, Array], float] = dot,
) -> Sums:
    """The scalar products of so many ends, each with itself, then each with all behind it.

    An end is origin + kept, where the origin is the base, or 0.
    """
    ends = [origin + kept[i] if i in kept else origin for i in range(count)]
    squares = [dot(end, end) for end in ends]
    products = [dot(end, other) for i, end in enumerate(ends) for other in ends[i + 1 :]]
    return (*squares, *products)


def thin_for_look(
    settings: TensorSettings, deltas: Mapping[int, Kept], found: Found
) -> dict[int, Array]:
    return thin_all(deltas, weigh_for_look(settings, list(deltas), found))


def find_size(sizes: Array, number: int) -> float:
    """One of them, counted from the largest down; on a GPU, to sort all is faster."""
    if getattr(sizes, "is_cuda", False):
        return float(sizes.sort().values[-number])
    return float(np.partition(sizes, -number)[-number])


def find_end(sizes: Array, number: int) -> End:
    """The entry of this number, from the largest down, among those that equal it."""
    size = find_size(sizes, number)
    return End(size, number - int((sizes > size).sum()), int((sizes == size).sum()))


def find_ends(look: BoundsLook, pieces: Pieces) -> None:
    """Entries by their numbers in the order of |delta|, of what is kept of each model."""
    ends = []
    for i in look.models:
        opened = (kept[i] for _, kept in pieces([i], look.found))  # one at a time: they take memory
        sizes = join([abs(delta[mask]) for delta, mask, _ in opened])
        ends.append([find_end(sizes, number) for number in look.number(i, len(sizes))])
    look.record(ends)


def add_pieces(list_sums: Callable[..., Sums], look: ChunkLook, pieces: Pieces) -> None:
    opened = pieces(look.models, look.found)
    look.record(fold_columns([list_sums(look, base, kept) for base, kept in opened]))


def sum_sizes(look: Look, _: Array, kept: Mapping[int, Kept]) -> Sums:
    """Of |delta|, then of what is kept."""
    deltas = [delta for delta, *_ in kept.values()]
    thinned = thin_for_look(look.settings, kept, look.found).values()
    return tuple(add_up(abs(row)) for row in (*deltas, *thinned))


def sum_products(look: GramLook, base: Array, kept: Mapping[int, Kept]) -> Sums:
    """Of all models: one without the tensor has the base's."""
    origin = base if look.settings.origin == ZERO else library(base).zeros_like(base)
    thinned = thin_for_look(look.settings, kept, look.found)
    return multiply_ends(origin, thinned, len(look.settings.weights))


# What the looks find that a GPU may have kernels for, by what these are called.
LOOKS: Final[Mapping[str, Callable[..., None]]] = {
    "count": find_ends,
    "sums": partial(add_pieces, sum_sizes),
    "products": partial(add_pieces, sum_products),
}


def join(arrays: Sequence[Array]) -> Array:
    return library(arrays[0]).concatenate(arrays)


def open_pieces(look: Look, pieces: Pieces) -> Iterator[Piece]:
    """What a look sees that a method defines."""
    start = 0
    for base, kept in pieces(look.models, look.found):
        rows = [delta for delta, *_ in kept.values()]
        if not look.sees_dropped:
            rows = list(thin_all(kept, look.weigh()).values())
        yield Piece(base, rows, start, look.found.width)
        start += len(base)


def examine(look: Look, pieces: Pieces) -> None:
    """Look by a method's own definition."""
    opened = open_pieces(look, pieces)
    if isinstance(look, ScoreLook):
        scores = join([look.score(piece) for piece in opened])
        numbers = [look.number(i, len(scores)) for i in look.models]
        look.record([[find_end(scores, number) for number in own] for own in numbers])
        return
    if look.of_rows:
        parts = list(opened)
        rows = [join(row) for row in zip(*(part.rows for part in parts), strict=True)]
        opened = iter([Piece(join([part.base for part in parts]), rows, 0, look.found.width)])
    if isinstance(look, PieceLook):
        look.add({piece.start: look.measure(piece) for piece in opened})
    look.conclude(0)


def look_up(
    settings: TensorSettings,
    models: Sequence[int],
    pieces: Pieces,
    count: int,
    bits: int,
    width: int,
) -> Found:
    """What must be known of a whole tensor before it is merged: of so many entries, each of so many
    bits, in rows of this width.
    """
    found = Found(width=width)
    for kind in choose_looks(settings, models) if models and count else ():
        look = kind(settings, models, count, bits, found)
        if look.kernel:
            LOOKS[look.kernel](look, pieces)
        elif not look.whole:  # such a look is the merge itself
            examine(look, pieces)
    return found


# --- matrices -------------------------------------------------------------------------------------


def merge_whole(
    settings: TensorSettings,
    thinned: Mapping[int, Array],
    matrices: Matrices | None,
    define: Callable[..., Array],
) -> Array:
    """The merged delta of a tensor, flat. thinned: by number, the deltas of models that have it."""
    shape = matrices or (1, 1, 1)
    none = np.zeros(shape)
    models = range(len(settings.weights))
    shaped = [thinned[i].reshape(shape) if i in thinned else none for i in models]
    merged = [
        define(list(deltas), settings.weights, settings.options)
        for deltas in zip(*shaped, strict=True)
    ]
    return np.concatenate(merged).reshape(-1)


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
    start = decode(base, dtype).astype(FORMATS[real].real)
    models = list(finetuned)
    if models and returns_model(settings):
        raw, kind = finetuned[0]
        return encode(decode(raw, kind).astype(start.dtype), output)

    def open_whole(models: Sequence[int], found: Found) -> Iterator[tuple[Array, dict[int, Kept]]]:
        bounds = dict(zip(finetuned, found.bounds, strict=False))
        parts = {}
        for i in models:
            raw, kind = finetuned[i]
            delta = decode(raw, kind).astype(start.dtype) - start
            thinning = settings.thinnings[i]
            bits = draw_bits(mask_key(seed + i, name), 0, -(-len(delta) // TILE))[: len(delta)]
            ranked = thinning.scheme.thresholds
            thresholds = find_thresholds(thinning, delta, width) if ranked else thinning.threshold
            parts[i] = keep(delta, bits, thresholds, bounds.get(i), thinning.divides_each)
        yield start, parts

    found = look_up(settings, models, open_whole, len(start), FORMATS[real].bits, width)
    [(_, kept)] = open_whole(models, found)
    if whole := METHODS[settings.method].whole:
        thinned = thin_for_look(settings, kept, found)
        change = merge_whole(settings, thinned, find_matrices(name, shape), whole.define)
        return encode(add_change(start, change.astype(start.dtype), settings.lambda_coeff), output)
    own = METHODS[settings.method].weigh(settings, models, found)
    return encode(merge_piece(settings, start, kept, own, 0, width), output)
