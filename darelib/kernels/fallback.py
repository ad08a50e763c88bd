"""The engine "plain": the definition, chunk by chunk, in the kernels' buffers. For where Numba cannot be loaded."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, Final

import numpy as np

from darelib.formats import DIGIT_BITS, FORMATS
from darelib.interrupts import Interrupts
from darelib.kernels import Kernel, KernelSpec, plain
from darelib.kernels.records import BINS, FIRST_BIN, LANES, Buffers
from darelib.mask import TILE
from darelib.methods import Coefficients

Array = plain.Array


def load_kernels(specs: Collection[KernelSpec], interrupts: Interrupts) -> dict[KernelSpec, Kernel]:
    return {spec: expand if spec.kind == "expand" else partial(CHUNKS[spec.kind], spec) for spec in specs}


def read_base(spec: KernelSpec, buffers: Buffers, count: int) -> Array:
    raw = buffers.base[: count * FORMATS[spec.base].itemsize]
    return plain.decode(raw, spec.base, spec.real)


def read_model(spec: KernelSpec, buffers: Buffers, i: int, count: int) -> Array:
    raw = buffers.finetuned[i, : count * FORMATS[spec.finetuned].itemsize]
    return plain.decode(raw, spec.finetuned, spec.real)


def find_delta(spec: KernelSpec, buffers: Buffers, i: int, base: Array) -> Array:
    values = read_model(spec, buffers, i, len(base))
    with np.errstate(invalid="ignore", over="ignore"):
        return values if buffers.models["is_delta"][i] else values - base


def draw_mask(buffers: Buffers, i: int, first_tile: int, count: int) -> Array:
    model = buffers.models[i]
    key = int(model["key_0"]), int(model["key_1"])
    return plain.draw_mask(key, int(model["limit"]) + 1, first_tile * TILE, count)


def add_sums(total: float, values: Array) -> float:
    """A running sum of tiles, in the kernels' order."""
    for tile in plain.fold_tiles(values):
        total += float(tile)
    return total


def find_peak(values: Array, so_far: Any) -> int:
    """The largest bit pattern of |values|: that of a NaN or an infinity is the largest of all."""
    return max(int(np.abs(values).view(f"u{values.itemsize}").max(initial=0)), int(so_far))


def note_delta(buffers: Buffers, i: int, delta: Array) -> None:
    model, size = buffers.models[i], np.abs(delta)
    threshold = delta.dtype.type(buffers.tensor["threshold"][0])
    model["peak"] = find_peak(delta, model["peak"])
    model["above"] += np.uint64(np.count_nonzero(size > threshold))
    model["size"] = add_sums(float(model["size"]), size)


@np.errstate(all="ignore")
def merge_chunk(spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int) -> None:
    base, tensor, rows = read_base(spec, buffers, count), buffers.tensor[0], []
    tensor["base_size"] = add_sums(float(tensor["base_size"]), np.abs(base))
    for i in range(models):
        model, delta = buffers.models[i], find_delta(spec, buffers, i, base)
        mask = draw_mask(buffers, i, first_tile, count)
        note_delta(buffers, i, delta)
        model["kept"] += np.uint64(np.count_nonzero(mask))
        rows.append(plain.thin(delta, mask, float(model["scale"]), float(model["floor"])))
    told = buffers.models[:models]
    found = Coefficients(tuple(told["scale"]), tuple(told["weight"]), tuple(told["floor"]), float(tensor["base_share"]))
    if tensor["exact"]:
        values = read_model(spec, buffers, 0, count)
    else:
        values = plain.apply(base, plain.combine(spec.kind, base, rows, found), float(tensor["lambda_coeff"]))
    tensor["peak"] = find_peak(values, tensor["peak"])
    stored = plain.encode(values, spec.output)
    buffers.output[: stored.nbytes] = stored.view(np.uint8)


@np.errstate(all="ignore")
def multiply_chunk(spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int) -> None:
    base, tensor = read_base(spec, buffers, count), buffers.tensor[0]
    ends = [base, base]
    for i in range(models):
        mask, model = draw_mask(buffers, i, first_tile, count), buffers.models[i]
        end = int(model["arc_end"])
        ends[end] = ends[end] + plain.thin(find_delta(spec, buffers, i, base), mask, float(model["scale"]))
    tensor["square_0"], tensor["square_1"] = plain.multiply(ends[0], ends[0]), plain.multiply(ends[1], ends[1])
    tensor["product"] = plain.multiply(ends[0], ends[1])


def count_chunk(spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int) -> None:
    base, shift = read_base(spec, buffers, count), buffers.tensor["shift"][0]
    for i in range(models):
        delta = find_delta(spec, buffers, i, base)[draw_mask(buffers, i, first_tile, count)]
        patterns = np.abs(delta).view(f"u{delta.itemsize}").astype(np.uint64) >> shift
        patterns = patterns[patterns >> np.uint64(DIGIT_BITS) == buffers.models["prefix"][i]]
        digits = (patterns & np.uint64(0xFFFF)).astype(np.int64)
        buffers.counts[i] += np.bincount(digits, minlength=1 << DIGIT_BITS).astype(np.uint32)


@np.errstate(all="ignore")
def measure_chunk(spec: KernelSpec, buffers: Buffers, count: int, models: int, first_tile: int) -> None:
    base, tensor = read_base(spec, buffers, count), buffers.tensor[0]
    tensor["base_size"] = add_sums(float(tensor["base_size"]), np.abs(base))
    tensor["base_squares"] = add_sums(float(tensor["base_squares"]), base * base)
    padding = -count % TILE  # zeros, which the kernels count with the others
    deltas = [find_delta(spec, buffers, i, base) for i in range(models)]
    for i, delta in enumerate(deltas):
        model = buffers.models[i]
        note_delta(buffers, i, delta)
        model["zeros"] += np.uint64(np.count_nonzero(delta == 0) + padding)
        model["squares"] = add_sums(float(model["squares"]), delta * delta)
        bins = np.clip(
            (np.abs(delta).astype(np.float32).view(np.uint32) >> 19).astype(np.int64) - FIRST_BIN, 0, BINS - 1
        )
        counts = buffers.counts[i].reshape(LANES, BINS)
        counts[0] += np.bincount(bins, minlength=BINS).astype(np.uint32)
        counts[0, 0] += padding
    pairs = [(one, other) for i, one in enumerate(deltas) for other in deltas[i + 1 :]]
    for row, (one, other) in enumerate(pairs, 1):
        pair = buffers.pairs[row]
        note_conflict(pair, (one > 0) & (other < 0) | (one < 0) & (other > 0), (one != 0) & (other != 0), [one, other])
        pair["product"] = add_sums(float(pair["product"]), one * other)
    if models > 2:
        up, down = sum(1 * (delta > 0) for delta in deltas), sum(1 * (delta < 0) for delta in deltas)
        note_conflict(buffers.pairs[0], (up > 0) & (down > 0), up + down > 1, deltas)


def note_conflict(pair: Any, opposed: Array, both: Array, deltas: list[Array]) -> None:
    size = np.zeros_like(deltas[0])
    for delta in deltas:
        size = size + np.abs(delta)
    zero = size.dtype.type(0)
    pair["opposed"] += np.count_nonzero(opposed)
    pair["both"] += np.count_nonzero(both)
    pair["opposed_size"] = add_sums(float(pair["opposed_size"]), np.where(opposed, size, zero))
    pair["both_size"] = add_sums(float(pair["both_size"]), np.where(both, size, zero))


@np.errstate(all="ignore")
def expand(left: Array, right: Array, made: Array, first: int, ranks_before: int) -> None:
    """Elements of left @ right from one of the first row on, added to made in the order of the ranks."""
    total = np.zeros((left.shape[0], right.shape[1]), made.dtype)
    flat = total.reshape(-1)[first : first + len(made)]
    flat[:] = made if ranks_before else 0
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k]
    made[:] = flat


CHUNKS: Final = {
    "sum": merge_chunk,
    "elect": merge_chunk,
    "products": multiply_chunk,
    "count": count_chunk,
    "measure": measure_chunk,
}
