"""The process that compiles kernels: compile, load as the tool will, check, and store.

A compiled kernel must give the bits of its definition on numbers that exercise it. One table of
models, thinned in all the ways there are, is for all kernels that work on chunks.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import DIGIT_BITS, FORMATS, NO_PREFIX
from darelib.core.mask import KEEP_ALL, TILE
from darelib.kernels import EngineUnavailable, Kernel, KernelSpec, cpu, fallback, plain
from darelib.kernels.objects import code_of, load_object, store
from darelib.kernels.records import MERGES, SORT_COUNTERS, WIDEST, Buffers

Record = Mapping[str, float]
Array = NDArray[Any]
# What kernels have found, by name, on numbers that are the same every time.
Results = Iterator[tuple[str, Array]]

# Elements of a chunk, whose last tile is not full, and its place in a tensor, beyond 2^32 elements.
COUNT: Final = 2 * TILE + 37
FIRST_TILE: Final = (1 << 25) + 5
TENTH: Final = 6553
LOW: Final = 2.0**-10
BOUNDED: Final = {"bounded": 1, "low": LOW, "scale": 1.3, "weight": 0.4}
MODELS: Final[Sequence[Record]] = (
    {"scale": 0.5, "weight": 0.5},
    {"threshold": TENTH, "scale": 2.5, "weight": 0.25},
    {"threshold": TENTH, "scale": -2.5, "weight": -0.25, "is_delta": 1},
    {"scale": 0.3, "weight": 0.1, "is_delta": 1},
    {"scale": 0.7, "weight": 0.7, "floor": 0.002},
    {**BOUNDED, "high": 0.0625, "at_low": 40000, "at_high": 20000},
    {**BOUNDED, "high": 0.25, "at_low": KEEP_ALL, "at_high": KEEP_ALL},
    {"ranked": 1, "scale": 0.2, "weight": 1},
    {"ranked": 1, "divided": 1, "scale": 0.1, "weight": 1},
)
COUNTED: Final = MODELS[:4]  # no others are counted
TENSOR: Final[Record] = {
    "lambda_coeff": 0.9,
    "base_share": 0.25,
    "first_share": 0.3,
    "delta_threshold": 0.001,
    "ends": len(MODELS) + 1,  # one model lacks the tensor
    "from_zero": 1,
}
# Models, a tensor, and whether some of their values are not finite.
CASES: Final[Sequence[tuple[Sequence[Record], Record, bool]]] = (
    (MODELS, TENSOR, False),
    (MODELS, TENSOR, True),
    (MODELS[1:3], {**TENSOR, "base_share": 0, "first_share": 0, "from_zero": 0}, False),
    (MODELS[:1], {**TENSOR, "exact": 1}, False),
    ((), TENSOR, False),
)
# Zeros of either sign, and values whose differences are the bounds above, in all types.
SPECIAL: Final = slice(8, 8 + 7 * 40)
BASE_SPECIAL: Final = (0.0, -0.0, 0.5, 0.5625, 0.75, 0.0, 0.0)
MODEL_SPECIAL: Final = (-0.0, 0.0, 0.5625, 0.5, 0.5, LOW, -LOW)
SUBNORMAL: Final = slice(300, 302)
# What is not finite, or very large, in models, and where.
BROKEN: Final = {310: math.inf, 311: math.nan, 312: -math.inf, TILE + 400: 6e4}


def main(names: Sequence[str]) -> None:
    """Make object files."""
    gc.disable()  # a compiler makes many objects, and lives for a few seconds
    try:
        for path in map(Path, names):
            code = code_of(path.name)
            machine_code = cpu.compile_object(code)
            check(code, load_object(code, machine_code))
            store(machine_code, path)
    except EngineUnavailable as error:
        raise SystemExit(str(error)) from None
    except Exception as error:  # of a compiler, which says much
        raise SystemExit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None


def check(code: KernelSpec, kernel: Kernel) -> None:
    """Refuse a compiled kernel that gives other bits than the definition."""
    try_out = TRIALS.get(code.kind, try_chunks)
    defined = partial(fallback.KERNELS[code.kind], code)
    with np.errstate(all="ignore"):
        results = zip(try_out(code, kernel), try_out(code, defined), strict=True)
        for (name, mine), (_, theirs) in results:
            if mine.tobytes() != theirs.tobytes():
                raise EngineUnavailable(
                    f"the compiled kernel {code.kind} gives other {name} than its definition"
                )


def try_chunks(code: KernelSpec, kernel: Kernel) -> Results:
    for models, tensor, is_broken in CASES:
        given = [model for model in models if code.kind != "count" or model in COUNTED]
        buffers = fill(code, given, tensor, is_broken)
        kernel(buffers, COUNT, len(given), FIRST_TILE)
        yield "counts", buffers.counts
        if code.kind == "pack":
            yield "entries", buffers.output
        if code.kind in MERGES:
            values = buffers.output.view(FORMATS[code.output].raw)[:COUNT]
            yield "values", np.delete(values, list(BROKEN)) if is_broken else values
        if is_broken:  # its bits are not defined, but it is noticed
            real = FORMATS[code.real]
            peaks = np.append(buffers.models["peak"], buffers.tensor["peak"]).astype(real.raw)
            yield "peaks", np.isfinite(peaks.view(real.real))
        else:
            yield "figures", buffers.models
            yield "figures", buffers.tensor
            yield "figures", buffers.pairs
            if code.kind == "products":
                yield "products", buffers.find_products(COUNT)


def fill(code: KernelSpec, models: Sequence[Record], tensor: Record, is_broken: bool) -> Buffers:
    """What a kernel is given; the same every time."""
    rng = np.random.default_rng(0)
    buffers = Buffers(len(MODELS) + 1, 3 * TILE * WIDEST, [code.kind], ranked=1)
    filled = (buffers.base, buffers.finetuned, buffers.output, buffers.scratch, buffers.last_bits)
    for used in filled:
        used.view(np.uint8)[:] = rng.integers(0, 256, used.view(np.uint8).shape, np.uint8)
    base = rng.normal(0, 0.02, COUNT)
    base[SPECIAL] = BASE_SPECIAL * 40
    put(buffers.base, base, code.base)
    buffers.models["threshold"] = KEEP_ALL
    for i, model in enumerate(models):
        is_delta = bool(model.get("is_delta"))
        delta = rng.normal(0, 0.01, COUNT)
        delta[::7] = 0
        values = delta if is_delta else base + delta
        values[SPECIAL] = MODEL_SPECIAL * 40
        for place, value in BROKEN.items() if is_broken else ():
            values[place] = value
        put(buffers.finetuned[i], values, code.finetuned)
        buffers.last_bits[i, :COUNT] = rng.integers(0, 1 << 16, COUNT)
        buffers.models[i]["end"] = i
        for name, value in {"key_0": 7 * i, "key_1": 1234567890 + i, **model}.items():
            buffers.models[i][name] = value
    for name, value in tensor.items():
        buffers.tensor[name] = value
    prepare_count(code, buffers, is_first=is_broken)
    return buffers


def put(row: Array, values: Array, dtype: str) -> None:
    raw = plain.encode(values, dtype)
    raw[SUBNORMAL] = 1, 1 << (FORMATS[dtype].bits - 1) | 1  # the smallest
    row[: raw.nbytes] = raw.view(np.uint8)


def prepare_count(code: KernelSpec, buffers: Buffers, is_first: bool) -> None:
    """For the first pass of a count, or one that looks for several beginnings."""
    real = FORMATS[code.real]
    sizes = np.array([0.001, 0.005], real.real).view(real.raw)
    prefixes = (0, NO_PREFIX) if is_first else sizes >> (real.bits - DIGIT_BITS)
    buffers.tensor["shift"] = real.bits - (1 if is_first else 2) * DIGIT_BITS
    buffers.models["prefix"], buffers.models["prefix_2"] = prefixes
    buffers.models["prefix_3"] = NO_PREFIX


def try_ranks(code: KernelSpec, rank: Kernel) -> Results:
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
            plain.encode(base, code.base).view(np.uint8),
            plain.encode(values, code.finetuned).view(np.uint8),
        ]
        by_rank = rng.integers(0, 1 << 16, width).astype(np.uint16)
        order = np.full(3 * width + SORT_COUNTERS // 2, 0xABCDEF0123456789, np.uint64)
        for is_delta in (False, True):
            last_bits = np.zeros(count - skipped - 2, np.uint16)
            rank(*rows, by_rank, order, last_bits, skipped, is_delta)
            yield "order", last_bits


def try_products(code: KernelSpec, expand: Kernel) -> Results:
    """A first piece of an adapter's ranks, and another; their number is no multiple of four."""
    rng = np.random.default_rng(0)
    real = FORMATS[code.real].real
    columns = TILE + 100
    left = rng.normal(0, 1, (4, 6)).astype(real)
    right = rng.normal(0, 1, (6, columns)).astype(real)
    left[0, :3] = 0, -0.0, 1e-38
    right[0, :3] = -0.0, 1e-42, -1e-30
    for ranks_before in (0, 6):
        product = np.full(3 * columns, 0.75, real)
        expand(left, right, product, 5, ranks_before)
        yield "products", product


def try_entries(code: KernelSpec, unpack: Kernel) -> Results:
    """More entries than the mask keeps, and fewer."""
    raw = FORMATS[code.finetuned].raw
    for size in (COUNT, COUNT // 50):
        values = np.zeros(COUNT, raw)
        base = np.arange(COUNT, 0, -1).astype(raw)
        entries = np.arange(1, size + 1).astype(raw)
        kept = unpack(base, entries, values, (7, 1234567890), TENTH, FIRST_TILE)
        yield "values", np.append(values, kept)


# Of kernels that are not given chunks.
TRIALS: Final[Mapping[str, Callable[[KernelSpec, Kernel], Results]]] = {
    "rank": try_ranks,
    "expand": try_products,
    "unpack": try_entries,
}

if __name__ == "__main__":
    main(sys.argv[1:])
