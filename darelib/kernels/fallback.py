"""The engine "plain": the definition, chunk by chunk, where Numba cannot be loaded."""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import combinations
from typing import Any, Final

import numpy as np

from darelib.core.arrays import Array, add_up, fold_tiles
from darelib.core.drops import Bounds
from darelib.core.formats import DIGIT_BITS, FORMATS
from darelib.core.mask import KEEP_ALL, TILE
from darelib.kernels import Kernel, KernelSpec, plain
from darelib.kernels.records import BINS, FIRST_BIN, LANES, Buffers
from darelib.methods import OPERATIONS
from darelib.methods.looks import PREFIXES, Coefficients, Look, Piece, ScoreLook


def load_kernels(specs: Collection[KernelSpec]) -> dict[KernelSpec, Kernel]:
    quiet = np.errstate(all="ignore")  # what is not finite is found in the result
    return {spec: quiet(partial(KERNELS[spec.kind], spec)) for spec in specs}


def read(row: Array, dtype: str, real: str, count: int) -> Array:
    return plain.decode(row[: count * FORMATS[dtype].itemsize], dtype, real)


def find_delta(spec: KernelSpec, buffers: Buffers, i: int, base: Array) -> Array:
    values = read(buffers.finetuned[i], spec.finetuned, spec.real, len(base))
    return values if buffers.models["is_delta"][i] else values - base


def open_model(
    spec: KernelSpec, buffers: Buffers, i: int, base: Array, first_tile: int
) -> plain.Kept:
    model = buffers.models[i]
    delta = find_delta(spec, buffers, i, base)
    if not drops_some(model):  # nothing need be drawn
        return delta, np.ones(len(delta), bool), None
    thresholds: Any = int(model["threshold"])
    if model["ranked"]:
        thresholds = buffers.last_bits[i, : len(base)].astype(np.int32) + 1
    bounds = Bounds(*(model[name].item() for name in Bounds._fields)) if model["bounded"] else None
    bits = draw_bits(model, len(base), first_tile)
    return plain.keep(delta, bits, thresholds, bounds, bool(model["divided"]))


def draw_bits(model: Any, count: int, first_tile: int) -> Array:
    key = int(model["key_0"]), int(model["key_1"])
    return plain.draw_bits(key, first_tile, -(-count // TILE))[:count]


def add_sums(record: Any, name: str, values: Array) -> None:
    """A running sum of tiles, in the kernels' order."""
    record[name] = np.cumsum([record[name], *fold_tiles(values)], dtype=np.float64)[-1]


def find_peak(values: Array, so_far: Any) -> int:
    """The largest bit pattern of |values|: that of a NaN or an infinity is the largest of all."""
    return max(int(np.abs(values).view(f"u{values.itemsize}").max(initial=0)), int(so_far))


def note_delta(buffers: Buffers, model: Any, delta: Array) -> None:
    large = delta.dtype.type(buffers.tensor["delta_threshold"][0])
    model["peak"] = find_peak(delta, model["peak"])
    model["above"] += np.uint64(np.count_nonzero(np.abs(delta) > large))


def thin_chunk(
    spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int, skipped: int = 0
) -> tuple[Array, list[Array]]:
    """The base's values, and each model's thinned deltas; some at the start are not wanted."""
    base = read(buffers.base, spec.base, spec.real, count)
    add_sums(buffers.tensor[0], "base_size", np.abs(base[skipped:]))
    rows = []
    for model, delta, row in thin_models(spec, buffers, base, models, first_tile, skipped):
        add_sums(model, "size", np.abs(delta))
        rows.append(row)
    return base[skipped:], rows


def thin_models(
    spec: KernelSpec, buffers: Buffers, base: Array, models: int, first_tile: int, skipped: int = 0
) -> Iterator[tuple[Any, Array, Array]]:
    """The record of each model, its delta, and that thinned."""
    for i, model in enumerate(buffers.models[:models]):
        part = open_model(spec, buffers, i, base, first_tile)
        delta, mask, _ = part
        is_whole = model["scale"] == 1 and not model["floor"] and not drops_some(model)
        row = delta if is_whole else plain.thin(*part, float(model["scale"]), float(model["floor"]))
        note_delta(buffers, model, delta[skipped:])
        model["kept"] += np.uint64(np.count_nonzero(mask[skipped:]))
        yield model, delta[skipped:], row[skipped:]


def drops_some(model: Any) -> bool:
    return bool(model["ranked"] or model["bounded"] or model["threshold"] < KEEP_ALL)


def merge_chunk(
    spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int
) -> None:
    base, rows = thin_chunk(spec, buffers, count, models, first_tile)
    records = buffers.models[:models]
    tensor = buffers.tensor[0]
    if tensor["exact"]:
        values = read(buffers.finetuned[0], spec.finetuned, spec.real, count)
    else:
        own = Coefficients(
            scales=tuple(records["scale"].tolist()),
            weights=tuple(records["weight"].tolist()),
            bounds=(),
            floors=(),
            base_share=float(tensor["base_share"]),
            first_share=float(tensor["first_share"]),
            extra=buffers.extra,
        )
        piece = Piece(base, rows, first_tile * TILE, buffers.width)
        values = plain.combine(spec.kind, piece, own, float(tensor["lambda_coeff"]))
    tensor["peak"] = find_peak(values, tensor["peak"])
    stored = plain.encode(values, spec.output)
    buffers.output[: stored.nbytes] = stored.view(np.uint8)


def multiply_chunk(
    spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int
) -> None:
    base = read(buffers.base, spec.base, spec.real, count)
    thinned = thin_models(spec, buffers, base, models, first_tile)
    kept = {int(model["end"]): row for model, _, row in thinned}
    tensor = buffers.tensor[0]
    origin = base if tensor["from_zero"] else np.zeros_like(base)
    buffers.find_products(count)[:] = plain.multiply_ends(origin, kept, int(tensor["ends"]))


def count_chunk(
    spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int
) -> None:
    base = read(buffers.base, spec.base, spec.real, count)
    shift = buffers.tensor["shift"][0]
    for i in range(models):
        delta, mask, _ = open_model(spec, buffers, i, base, first_tile)
        count_digits(np.abs(delta[mask]), shift, buffers.models[i], buffers.counts[i])


def count_digits(sizes: Array, shift: Any, model: Any, counts: Array) -> None:
    patterns = sizes.view(f"u{sizes.itemsize}").astype(np.uint64) >> shift
    # Once, where they are equal.
    prefixes = dict.fromkeys(int(model[name]) for name in PREFIXES)
    for part, prefix in zip(counts.reshape(-1, 1 << DIGIT_BITS), prefixes, strict=False):
        fitting = patterns[patterns >> np.uint64(DIGIT_BITS) == np.uint64(prefix)]
        add_counts(part, fitting & np.uint64(0xFFFF))


def add_chunk(spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int) -> None:
    base = read(buffers.base, spec.base, spec.real, count)
    for model, delta, row in thin_models(spec, buffers, base, models, first_tile):
        model["size"] = add_up(np.abs(delta))
        model["kept_size"] = add_up(np.abs(row))


@np.errstate(all="ignore")
def examine(
    look: Look, spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int
) -> None:
    """Let a look see a chunk that a method defines."""
    base, rows = thin_chunk(spec, buffers, count, models, first_tile)
    if look.sees_dropped:
        rows = [find_delta(spec, buffers, i, base) for i in range(models)]
    piece = Piece(base, rows, first_tile * TILE, buffers.width)
    if isinstance(look, ScoreLook):
        shift = buffers.tensor["shift"][0]
        count_digits(look.score(piece), shift, buffers.models[0], buffers.counts[0])
    else:
        look.add_piece(piece)


@np.errstate(all="ignore")
def examine_rows(look: Look, spec: KernelSpec, buffers: Buffers, first: int, count: int) -> None:
    """The same with whole rows, from this element on, of the base and of one model."""
    base = read(buffers.rows[0], spec.base, spec.real, count)
    values = read(buffers.rows[1], spec.finetuned, spec.real, count)
    delta = values if buffers.models["is_delta"][0] else values - base
    look.add_piece(Piece(base, [delta], first, buffers.width))


def rank(
    spec: KernelSpec,
    base: Array,
    values: Array,
    by_rank: Array,
    _: Array,
    last_bits: Array,
    skipped: int,
    is_delta: bool,
) -> None:
    """The last bits of elements of whole rows, but for some at the start and the end, by rank."""
    width = len(by_rank)
    count = -(-(skipped + len(last_bits)) // width) * width
    delta = read(values, spec.finetuned, spec.real, count)
    if not is_delta:
        delta = delta - read(base, spec.base, spec.real, count)
    last_bits[:] = by_rank[plain.rank(delta, width)][skipped : skipped + len(last_bits)]


def add_counts(counts: Array, places: Array) -> None:
    counts += np.bincount(places.astype(np.int64), minlength=len(counts)).astype(np.uint32)


def measure_chunk(
    spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int
) -> None:
    base = read(buffers.base, spec.base, spec.real, count)
    add_sums(buffers.tensor[0], "base_squares", base * base)
    padding = (0, -count % TILE)  # zeros, which the kernels count with the others
    deltas = [np.pad(find_delta(spec, buffers, i, base), padding) for i in range(models)]
    for counts, model, delta in zip(buffers.counts, buffers.models, deltas, strict=False):
        note_delta(buffers, model, delta)
        model["zeros"] += np.uint64(np.count_nonzero(delta == 0))
        add_sums(model, "size", np.abs(delta))
        add_sums(model, "squares", delta * delta)
        patterns = np.abs(delta).astype(np.float32).view(np.uint32)
        places = (patterns >> 19).astype(np.int64) - FIRST_BIN
        lanes = np.arange(len(delta)) % LANES
        add_counts(counts[: LANES * BINS], lanes * BINS + places.clip(0, BINS - 1))
    for pair, (one, other) in zip(buffers.pairs, combinations(deltas, 2), strict=False):
        note_conflict(pair, one, other)
        add_sums(pair, "product", one * other)


def note_conflict(pair: Any, one: Array, other: Array) -> None:
    """Where two have opposite signs, where both are not 0, and how large they are there."""
    size = np.abs(one) + np.abs(other)
    signs = np.sign(one) * np.sign(other)
    for name, there in (("opposed", signs < 0), ("both", signs != 0)):
        pair[name] += np.count_nonzero(there)
        add_sums(pair, f"{name}_size", np.where(there, size, 0.0))


def expand(
    _: KernelSpec, left: Array, right: Array, product: Array, first: int, ranks_before: int
) -> None:
    """Elements of left @ right from one of the first row on, added in the order of the ranks."""
    total = np.zeros((left.shape[0], right.shape[1]), product.dtype)
    flat = total.reshape(-1)[first : first + len(product)]
    flat[:] = product if ranks_before else 0
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k]
    product[:] = flat


def pack_chunk(
    spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int
) -> None:
    model = buffers.models[0]
    values = buffers.finetuned[0].view(FORMATS[spec.finetuned].raw)[:count]
    kept = values[draw_bits(model, count, first_tile) < int(model["threshold"])]
    buffers.output[: kept.nbytes] = kept.view(np.uint8)
    model["kept"] = len(kept)


def unpack(
    _: KernelSpec,
    base: Array,
    entries: Array,
    values: Array,
    key: tuple[int, int],
    threshold: int,
    first_tile: int,
) -> int:
    """Make values of entries where a mask keeps them, as far as there are any, and of the base's.

    Gives how many it keeps.
    """
    values[:] = base
    mask = plain.draw_mask(key, threshold, first_tile * TILE, len(values))
    places = np.flatnonzero(mask)
    filled = places[: len(entries)]
    values[filled] = entries[: len(filled)]
    return len(places)


KERNELS: Final[dict[str, Kernel]] = {
    **dict.fromkeys(OPERATIONS, merge_chunk),
    "products": multiply_chunk,
    "count": count_chunk,
    "sums": add_chunk,
    "rank": rank,
    "measure": measure_chunk,
    "expand": expand,
    "pack": pack_chunk,
    "unpack": unpack,
}
