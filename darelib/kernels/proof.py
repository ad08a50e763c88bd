"""Proof that a compiled kernel computes what its definition does, bit for bit, on all branches; and
the process that compiles one: compile, load as the tool will, prove, and store.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import DIGIT_BITS, FORMATS, NO_PREFIX, Format
from darelib.core.mask import TILE
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec, fallback, plain
from darelib.kernels.native import bind
from darelib.kernels.objects import (
    Function,
    code_of,
    load_object,
    store,
    target_machine,
)
from darelib.kernels.records import BINS, LANES, SORT_COUNTERS, WIDEST, Buffers
from darelib.methods.looks import PREFIXES

Record = Mapping[str, float]
Array = NDArray[Any]
# What kernels have found, by name, on numbers that are the same every time.
Results = Iterator[tuple[str, Array]]

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
RANKED: Final[Record] = {"ranked": 1, "limit": ALL, "scale": 0.2, "weight": 1}
DIVIDED: Final[Record] = {"ranked": 1, "divided": 1, "scale": 0.1, "weight": 1}
DENSE: Final = (WHOLE, DROPPED, ADAPTER, BOUNDED, BOUNDED_ALL, RANKED, DIVIDED)
COUNTED: Final = (WHOLE, {**ADAPTER, "limit": ALL}, DROPPED, ADAPTER)
TENSOR: Final[Record] = {
    "lambda_coeff": 0.9,
    "base_share": 0.25,
    "first_share": 0.3,
    "bound": 0.001,
    "threshold": 0.001,
}
# Zeros of either sign, and values whose differences are the bounds above, in all types.
SPECIAL: Final = slice(8, 8 + 7 * 40)
BASE_SPECIAL: Final = (0.0, -0.0, 0.5, 0.5625, 0.75, 0.0, 0.0)
MODEL_SPECIAL: Final = (-0.0, 0.0, 0.5625, 0.5, 0.5, LOW, -LOW)
SUBNORMAL: Final = slice(300, 302)
# What is not finite, or very large, in models, and where.
BROKEN: Final = {310: math.inf, 311: math.nan, 312: -math.inf, TILE + 400: 6e4}
# By kernel: models, a tensor, and whether some of their values are not finite.
Case = tuple[Sequence[Record], Record, bool]
ENDS: Final = [({**one, "number": 0}, {**other, "number": 1}) for one, other in pairwise(DENSE)]
NUMBERED: Final = [{**model, "number": k} for k, model in enumerate(DENSE)]
MERGES: Final[Sequence[Case]] = [
    ((*DENSE, TRIMMED), TENSOR, False),
    ((*DENSE, TRIMMED), TENSOR, True),
    ((DROPPED, ADAPTER, DROPPED), {**TENSOR, "base_share": 0, "first_share": 0}, False),
    ((WHOLE,), {**TENSOR, "exact": 1}, False),
    ((), TENSOR, False),
]
CASES: Final[Mapping[str, Sequence[Case]]] = {
    "products": [
        *((ends, {"ends": 2, "from_zero": 1}, False) for ends in ENDS),
        (NUMBERED, {"ends": len(DENSE)}, False),
        (NUMBERED[1:3], {"ends": 4, "from_zero": 1}, False),  # others lack the tensor
    ],
    "sums": [(DENSE, {}, False)],
    "measure": [
        ((WHOLE, ADAPTER, DROPPED), TENSOR, False),
        ((WHOLE, ADAPTER), TENSOR, False),
        ((WHOLE, ADAPTER), TENSOR, True),
    ],
    "pack": [((DROPPED,), {}, False)],
    "squares": [(DENSE, {"bound": 1e-4}, False)],
    # It divides by the sum of shares that agree, which are never negative.
    "select": [
        ([{**model, "weight": 0.1 + 0.1 * k} for k, model in enumerate(models)], tensor, broken)
        for models, tensor, broken in MERGES
    ],
    # Floors on either side of what is merged.
    "fuse": [(models, {**tensor, "bound": 0.5}, broken) for models, tensor, broken in MERGES],
    "overlap": [((*DENSE, TRIMMED), {}, False), ((TRIMMED, DROPPED), {}, False)],
}
# What kernels find, of each model or of the tensor; and whether in the output.
MERGED: Final = ("peak", "above", "kept", "size", "base_size", "output")
FOUND: Final[Mapping[str, tuple[str, ...]]] = {
    "products": (),
    "sums": ("size", "kept_size"),
    "count": (),
    "variance": (),
    "importance": (),
    "squares": ("squares",),
    "overlap": ("alone", "shared"),
    "measure": ("peak", "above", "zeros", "size", "squares", "base_squares"),
    "pack": ("kept", "output"),
}


def work(how: str, *names: str) -> None:
    """Make object files.

    how: object, for what is stored in them; here, for what Numba runs itself, where they only say
    that it was proved.
    """
    from darelib.kernels import cpu

    gc.disable()  # a compiler makes many objects, and lives for a few seconds
    try:
        for path in map(Path, names):
            if path.exists():
                continue  # another process was faster
            code = code_of(path.name)
            machine_code = b"" if how == "here" else cpu.compile_object(code, target_machine())
            prove_function(
                code, load_object(code, machine_code) if machine_code else cpu.run_here(code)
            )
            store(machine_code, path)
    except EngineUnavailable as error:
        raise SystemExit(str(error)) from None
    except Exception as error:  # of a compiler, which says much
        raise SystemExit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None


def prove_function(spec: KernelSpec, function: Function) -> None:
    """Refuse a compiled function that gives other bits than the definition."""
    try_out = TRIALS.get(spec.kind, _try_chunks)
    defined = partial(fallback.KERNELS[spec.kind], spec)
    with np.errstate(all="ignore"):
        results = zip(try_out(spec, bind(spec, function)), try_out(spec, defined), strict=True)
        for (name, mine), (_, theirs) in results:
            if mine.tobytes() != theirs.tobytes():
                raise EngineUnavailable(
                    f"the compiled kernel {spec.kind} gives another {name} than its definition"
                )


def _try_chunks(spec: KernelSpec, run: Kernel) -> Results:
    """Chunks that take all branches of a kernel."""
    cases = CASES.get(spec.kind, MERGES)
    if spec.kind in ("count", "variance", "importance"):
        cases = list(_count_cases(FORMATS[spec.real]))
    if spec.kind == "importance":  # of one model
        cases = [([model], tensor, broken) for models, tensor, broken in cases for model in models]
    for models, tensor, broken in cases:
        buffers = _fill(spec, models, tensor, broken)
        run(buffers, COUNT, len(models), FIRST_TILE)
        yield from _list_found(spec, buffers, broken)


def _count_cases(real: Format) -> Iterator[Case]:
    """The first pass, and one that looks for several beginnings."""
    sizes = np.array([0.001, 0.005, 0.0001], real.real).view(real.raw)
    prefixes = [int(size) >> (real.bits - DIGIT_BITS) for size in sizes]
    for digits, known in ((1, [0, NO_PREFIX, NO_PREFIX]), (2, prefixes)):
        models = [{**model, **dict(zip(PREFIXES, known, strict=True))} for model in COUNTED]
        yield models, {"shift": real.bits - digits * DIGIT_BITS}, True


def _fill(spec: KernelSpec, models: Sequence[Record], tensor: Record, broken: bool) -> Buffers:
    """What a kernel is given; the same every time."""
    rng = np.random.default_rng(0)
    numbers = max(len(models), int(tensor.get("ends", 0)))
    buffers = Buffers(numbers, 3 * TILE * WIDEST, [spec.kind], ranked=1)
    for used in (buffers.base, buffers.finetuned, buffers.output, buffers.scratch, buffers.limits):
        used.view(np.uint8)[:] = rng.integers(0, 256, used.view(np.uint8).shape, np.uint8)
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
    if models and spec.kind in ("fuse", "importance"):
        buffers.by_entry[:COUNT] = rng.random(COUNT, np.float32) / 64
    for name, value in tensor.items():
        buffers.tensor[name] = value
    return buffers


def _put(row: Array, values: Array, dtype: str) -> None:
    raw = plain.encode(values, dtype)
    raw[SUBNORMAL] = 1, 1 << (FORMATS[dtype].bits - 1) | 1  # the smallest
    row[: raw.nbytes] = raw.view(np.uint8)


def _list_found(spec: KernelSpec, buffers: Buffers, broken: bool) -> Results:
    """What a kernel has found; of values that are not finite, that they were noticed."""
    names = FOUND.get(spec.kind, MERGED)
    output = buffers.output[: COUNT * FORMATS[spec.output].itemsize].view(FORMATS[spec.output].raw)
    counts = buffers.counts
    if spec.kind == "measure":  # in any lane
        counts = counts.reshape(-1, LANES, BINS).sum(1)
    if broken and "peak" in names:
        real = FORMATS[spec.real]
        peaks = np.append(buffers.models["peak"], buffers.tensor["peak"]).astype(real.raw)
        yield "peak", np.isfinite(peaks.view(real.real))
        output = np.delete(output, list(BROKEN))
    else:
        for records in (buffers.models, buffers.tensor):
            for name in names:
                if name in (records.dtype.names or ()):
                    yield name, records[name]
    if "output" in names:
        yield "output", output
    yield "product", buffers.find_products(COUNT)
    yield "count", counts
    if not broken:
        yield "pair", buffers.pairs


def _try_ranks(spec: KernelSpec, rank: Kernel) -> Results:
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
        rows = [
            plain.encode(base, spec.base).view(np.uint8),
            plain.encode(values, spec.finetuned).view(np.uint8),
        ]
        by_rank = rng.integers(0, 1 << 16, width).astype(np.uint16)
        order = np.full(3 * width + SORT_COUNTERS // 2, 0xABCDEF0123456789, np.uint64)
        for is_delta in (False, True):
            limits = np.zeros(count - skipped - 2, np.uint16)
            rank(*rows, by_rank, order, limits, skipped, is_delta)
            yield "order", limits


def _try_rows(spec: KernelSpec, diverge: Kernel) -> Results:
    """Rows of one entry, of an odd number, and of more than a tile; equal ones, and far apart."""
    rng = np.random.default_rng(0)
    for width in (1, 7, TILE + 5):
        buffers = Buffers(1, 8 * TILE * WIDEST, ["importance"], width)
        base = rng.normal(0, 1, (5, width)) * [[0.01], [0.1], [1], [100], [1000]]
        base[4] = -abs(base[4])
        values = base + rng.normal(0, 0.01, (5, width))
        values[0] = base[0]
        stored = ((base, spec.base), (values, spec.finetuned))
        for row, (array, dtype) in zip(buffers.rows, stored, strict=True):
            raw = plain.encode(array.reshape(-1), dtype).view(np.uint8)
            row[: len(raw)] = raw
        for is_delta in (False, True):
            diverge(buffers, 5, width, is_delta)
            yield "divergence", buffers.by_entry[:5].copy()


def _try_products(spec: KernelSpec, expand: Kernel) -> Results:
    """A first piece of an adapter's ranks, and another; their number is no multiple of four."""
    rng = np.random.default_rng(0)
    real = FORMATS[spec.real].real
    columns = TILE + 100
    left = rng.normal(0, 1, (4, 6)).astype(real)
    right = rng.normal(0, 1, (6, columns)).astype(real)
    left[0, :3] = 0, -0.0, 1e-38
    right[0, :3] = -0.0, 1e-42, -1e-30
    for ranks_before in (0, 6):
        product = np.full(3 * columns, 0.75, real)
        expand(left, right, product, 5, ranks_before)
        yield "product", product


def _try_entries(spec: KernelSpec, unpack: Kernel) -> Results:
    """More entries than the mask keeps, and fewer."""
    raw = FORMATS[spec.finetuned].raw
    for size in (COUNT, COUNT // 50):
        values = np.zeros(COUNT, raw)
        base = np.arange(COUNT, 0, -1).astype(raw)
        entries = np.arange(1, size + 1).astype(raw)
        kept = unpack(base, entries, values, (7, 1234567890), TENTH, FIRST_TILE)
        yield "value", np.append(values, kept)


TRIALS: Final[Mapping[str, Callable[[KernelSpec, Kernel], Results]]] = {
    "rank": _try_ranks,
    "expand": _try_products,
    "diverge": _try_rows,
    "unpack": _try_entries,
}
