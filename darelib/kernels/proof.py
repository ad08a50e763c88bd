"""Proof that a compiled kernel computes what its definition does, bit for bit, on all branches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import DIGIT_BITS, FORMATS, NO_PREFIX
from darelib.core.mask import TILE
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec, fallback, plain
from darelib.kernels.native import Function, bind, list_kinds
from darelib.kernels.records import BINS, LANES, SORT_COUNTERS, WIDEST, Buffers

Record = Mapping[str, float]
Array = NDArray[Any]

# Elements of a chunk, whose last tile is not full, and its place in a tensor, beyond 2^32 elements.
COUNT: Final = 2 * TILE + 37
FIRST_TILE: Final = (1 << 25) + 5
ALL: Final = 0xFFFF  # the limit of a mask that keeps everything
TENTH: Final = 6552
LOW: Final = 2.0**-10
# Models that are thinned in all the ways there are.
WHOLE: Final[Record] = {"limit": ALL, "scale": 0.5, "weight": 0.5}
DROPPED: Final[Record] = {"limit": TENTH, "scale": 2.5, "weight": 0.25}
ADAPTER: Final[Record] = {"limit": TENTH, "scale": -2.5, "weight": -0.25, "is_delta": 1}
TRIMMED: Final[Record] = {"limit": ALL, "scale": 0.7, "weight": 0.7, "floor": 0.002}
BOUNDED: Final[Record] = {
    "bounded": 1,
    "low": LOW,
    "high": 0.0625,
    "at_low": 40000,
    "at_high": 20000,
    "scale": 1.3,
}
BOUNDED_ALL: Final[Record] = {
    "bounded": 1,
    "low": LOW,
    "high": 0.25,
    "at_low": 65536,
    "at_high": 65536,
    "scale": 0.3,
}
RANKED: Final[Record] = {"ranked": 1, "scale": 0.2, "weight": 1}
DIVIDED: Final[Record] = {"ranked": 1, "divided": 1, "scale": 0.1, "weight": 1}
DENSE: Final = (WHOLE, DROPPED, ADAPTER, BOUNDED, BOUNDED_ALL, RANKED, DIVIDED)
COUNTED: Final = (WHOLE, {**ADAPTER, "limit": ALL}, DROPPED, ADAPTER)
TENSOR: Final[Record] = {
    "lambda_coeff": 0.9,
    "base_share": 0.25,
    "first_share": 0.3,
    "threshold": 0.001,
}
# Zeros of either sign, and values whose differences are the bounds above, in all types.
SPECIAL: Final = slice(8, 8 + 7 * 40)
BASE_SPECIAL: Final = (0.0, -0.0, 0.5, 0.5625, 0.75, 0.0, 0.0)
MODEL_SPECIAL: Final = (-0.0, 0.0, 0.5625, 0.5, 0.5, LOW, -LOW)
SUBNORMAL: Final = slice(300, 302)
# What is not finite, or very large, in models, and where.
BROKEN: Final = {310: math.inf, 311: math.nan, 312: -math.inf, TILE + 400: 6e4}
# What kernels find, of each model and of the tensor.
MERGED: Final = (("peak", "above", "kept", "size"), ("peak", "base_size"))
FOUND: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "sum": MERGED,
    "elect": MERGED,
    "average": MERGED,
    "products": ((), ("square_0", "square_1", "product")),
    "sums": (("size", "kept_size"), ()),
    "count": ((), ()),
    "measure": (("peak", "above", "zeros", "size", "squares"), ("base_squares",)),
    "pack": (("kept",), ()),
}


def prove_function(code: KernelSpec, function: Function) -> None:
    """Refuse a compiled function that gives other bits than the definition."""
    provers = {
        "rank": _compare_ranks,
        "expand": _compare_products,
        "unpack": _compare_entries,
    }
    for kind in list_kinds(code):
        spec = KernelSpec(kind, code.base, code.finetuned, code.output)
        compiled, defined = bind(spec, function), partial(fallback.KERNELS[kind], spec)
        with np.errstate(all="ignore"):
            different = next(provers.get(kind, _compare_chunks)(spec, compiled, defined), None)
        if different:
            raise EngineUnavailable(
                f"the compiled kernel {kind} gives another {different} than its definition"
            )


def _compare_chunks(spec: KernelSpec, compiled: Kernel, defined: Kernel) -> Iterator[str]:
    """What is different on chunks that take all branches of a kernel."""
    for models, tensor, broken in _list_cases(spec):
        results = []
        for run in (compiled, defined):
            buffers = _fill(spec, models, tensor, broken)
            run(buffers, COUNT, len(models), FIRST_TILE)
            results.append(_list_found(spec, buffers, broken))
        for (name, mine), (_, theirs) in zip(*results, strict=True):
            if mine.tobytes() != theirs.tobytes():
                yield name


def _list_cases(spec: KernelSpec) -> Iterator[tuple[Sequence[Record], Record, bool]]:
    """Models, a tensor, and whether some of their values are not finite."""
    match spec.kind:
        case "products":
            for one, other in pairwise(DENSE):
                yield ({**one, "number": 0}, {**other, "number": 1}), {}, False
        case "sums":
            yield DENSE, {}, False
        case "count":
            bits = FORMATS[spec.real].bits
            sizes = np.array([0.001, 0.005], FORMATS[spec.real].real).view(FORMATS[spec.real].raw)
            first, second = (int(size) >> (bits - DIGIT_BITS) for size in sizes)
            for shift, prefix, prefix_2 in ((bits - 16, 0, NO_PREFIX), (bits - 32, first, second)):
                models = [{**model, "prefix": prefix, "prefix_2": prefix_2} for model in COUNTED]
                yield models, {"shift": shift}, True
        case "measure":
            yield (WHOLE, ADAPTER, DROPPED), TENSOR, False
            yield (WHOLE, ADAPTER), TENSOR, False
            yield (WHOLE, ADAPTER), TENSOR, True
        case "pack":
            yield (DROPPED,), {}, False
        case _:
            yield (*DENSE, TRIMMED), TENSOR, False
            yield (*DENSE, TRIMMED), TENSOR, True
            yield (DROPPED, ADAPTER, DROPPED), {**TENSOR, "base_share": 0, "first_share": 0}, False
            yield (WHOLE,), {**TENSOR, "exact": 1}, False
            yield (), TENSOR, False


def _fill(spec: KernelSpec, models: Sequence[Record], tensor: Record, broken: bool) -> Buffers:
    """What a kernel is given; the same every time."""
    rng = np.random.default_rng(0)
    buffers = Buffers(len(models), 3 * TILE * WIDEST, [spec.kind], ranked=1)
    for used in (buffers.base, buffers.finetuned, buffers.output, buffers.scratch, buffers.limits):
        used.view(np.uint8)[:] = rng.integers(0, 256, used.nbytes, np.uint8).reshape(
            used.view(np.uint8).shape
        )
    base = rng.normal(0, 0.02, COUNT)
    base[SPECIAL] = np.tile(BASE_SPECIAL, 40)
    _put(buffers.base, base, spec.base)
    for i, model in enumerate(models):
        values = rng.normal(0, 0.01, COUNT)
        values[::7] = 0
        if not model.get("is_delta"):
            values += base
        values[SPECIAL] = np.tile(MODEL_SPECIAL, 40)
        if broken:
            values[list(BROKEN)] = list(BROKEN.values())
        _put(buffers.finetuned[i], values, spec.finetuned)
        buffers.limits[i, :COUNT] = rng.integers(0, 1 << 16, COUNT)
        for name, value in {"key_0": 7 * i, "key_1": 1234567890 + i, **model}.items():
            buffers.models[name][i] = value
    for name, value in tensor.items():
        buffers.tensor[name] = value
    return buffers


def _put(row: Array, values: Array, dtype: str) -> None:
    raw = plain.encode(values, dtype)
    raw[SUBNORMAL] = 1, 1 << (FORMATS[dtype].bits - 1) | 1  # the smallest
    row[: raw.nbytes] = raw.view(np.uint8)


def _list_found(spec: KernelSpec, buffers: Buffers, broken: bool) -> list[tuple[str, Array]]:
    """What a kernel has found; of values that are not finite, that they were noticed."""
    of_models, of_tensor = FOUND[spec.kind]
    output = buffers.output[: COUNT * FORMATS[spec.output].itemsize].view(FORMATS[spec.output].raw)
    counts = (
        buffers.counts[:, : LANES * BINS].reshape(-1, LANES, BINS).sum(1)
        if spec.kind == "measure"
        else None
    )
    if broken and "peak" in of_models:
        peaks = np.append(buffers.models["peak"], buffers.tensor["peak"]).astype(
            FORMATS[spec.real].raw
        )
        beside = np.delete(output, list(BROKEN)) if counts is None else counts
        return [("peak", np.isfinite(peaks.view(FORMATS[spec.real].real))), ("output", beside)]
    found = [(name, buffers.models[name]) for name in of_models]
    found += [(name, buffers.tensor[name]) for name in of_tensor]
    match spec.kind:
        case "count":
            found.append(("count", buffers.counts))
        case "measure":
            found.append(("count", np.asarray(counts)))
            found.append(("pair", buffers.pairs))
        case "pack" | "sum" | "elect" | "average":
            found.append(("output", output))
    return found


def _compare_ranks(spec: KernelSpec, compiled: Kernel, defined: Kernel) -> Iterator[str]:
    """Rows of a few entries, of many, and of more than fewer bits sort; some of equal deltas."""
    rng = np.random.default_rng(0)
    skipped = 3
    for width in (7, TILE, 4 * TILE + 5):
        count = max(3, 2 * TILE // width) * width
        base = rng.normal(0, 0.02, count)
        values = base + np.round(rng.normal(0, 3, count)) / 256  # often the same
        values[width : 2 * width] = base[width : 2 * width]
        base[2 * width : 3 * width] = 0.5
        values[2 * width : 3 * width] = 0.75
        values[2:5] = math.nan, math.inf, -math.inf
        stored = plain.encode(base, spec.base), plain.encode(values, spec.finetuned)
        rows = [row.view(np.uint8) for row in stored]
        by_rank = rng.integers(0, 1 << 16, width).astype(np.uint16)
        order = np.full(3 * width + SORT_COUNTERS // 2, 0xABCDEF0123456789, np.uint64)
        for is_delta in (False, True):
            limits = [np.zeros(count - skipped - 2, np.uint16) for _ in range(2)]
            for run, found in zip((compiled, defined), limits, strict=True):
                run(*rows, by_rank, order, found, skipped, is_delta)
            if limits[0].tobytes() != limits[1].tobytes():
                yield "order"


def _compare_products(spec: KernelSpec, compiled: Kernel, defined: Kernel) -> Iterator[str]:
    """A first piece of an adapter's ranks, and another; their number is no multiple of four."""
    rng = np.random.default_rng(0)
    real = FORMATS[spec.real].real
    first = 5
    columns = TILE + 100
    left = rng.normal(0, 1, (4, 6)).astype(real)
    right = rng.normal(0, 1, (6, columns)).astype(real)
    left[0, :3] = 0, -0.0, 1e-38
    right[0, :3] = -0.0, 1e-42, -1e-30
    for ranks_before in (0, 6):
        results = [np.full(3 * columns, 0.75, real) for _ in range(2)]
        for run, product in zip((compiled, defined), results, strict=True):
            run(left, right, product, first, ranks_before)
        if results[0].tobytes() != results[1].tobytes():
            yield "product"


def _compare_entries(spec: KernelSpec, compiled: Kernel, defined: Kernel) -> Iterator[str]:
    """More entries than the mask keeps, and fewer."""
    raw = FORMATS[spec.finetuned].raw
    for size in (COUNT, COUNT // 50):
        results = []
        for run in (compiled, defined):
            values = np.zeros(COUNT, raw)
            kept = run(
                values, np.arange(1, size + 1).astype(raw), (7, 1234567890), TENTH, FIRST_TILE
            )
            results.append((kept, values.tobytes()))
        if results[0] != results[1]:
            yield "value"
