"""The kernels for the CPU, written for Numba: each is one loop over the tiles of a chunk."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np

from darelib.core.formats import FORMATS
from darelib.core.mask import TILE
from darelib.kernels import EngineUnavailable, KernelSpec, looks, tiles
from darelib.kernels.parts import (
    ENCODERS,
    RAW,
    carray,
    combine,
    decode,
    decode_finetuned,
    draw,
    encode,
    fill_in,
    finetuned_raw,
    fold,
    inline,
    list_names,
    narrow,
    numba,
    open_chunk,
    output_raw,
    pick,
    real,
    round_to_odd,
    scatter,
    thin_model,
    unsigned,
)
from darelib.kernels.records import MODEL


def merge_chunk(
    base_at: Any,
    finetuned_at: Any,
    output_at: Any,
    models_at: Any,
    tensor_at: Any,
    scratch_at: Any,
    counts_at: Any,
    _pairs: Any,
    limits_at: Any,
    count: int,
    stride: int,
    models: int,
    first_tile: int,
    _: int,
) -> None:  # compiled
    """Merges one chunk: decode, subtract, mask, combine, encode."""
    chunk = open_chunk(
        base_at,
        finetuned_at,
        output_at,
        models_at,
        tensor_at,
        scratch_at,
        counts_at,
        limits_at,
        count,
        stride,
        models,
        first_tile,
    )
    tensor = chunk.tensors[0]
    outputs = carray(output_at, (chunk.tiles * TILE,), output_raw)
    base, merged = chunk.base, chunk.merged
    lambda_coeff = real(tensor.lambda_coeff)
    base_share = real(tensor.base_share)
    for tile in range(chunk.tiles):
        raw = chunk.raw_base[tile * TILE : (tile + 1) * TILE]
        for j in range(TILE):
            value = decode(raw[j])
            base[j] = value
            chunk.size[j] = abs(value)
            merged[j] = base_share * value
        tensor.base_size += fold(chunk.size)
        for i in range(models):
            thin_model(chunk, tile, i, chunk.kept[i], merged)
            chunk.models[i].size += fold(chunk.size)
        combine(chunk, tile)
        if tensor.exact:
            raw = chunk.raw_models[0, tile * TILE : (tile + 1) * TILE]
            for j in range(TILE):
                base[j] = decode_finetuned(raw[j])
                merged[j] = 0
        output = outputs[tile * TILE : (tile + 1) * TILE]
        peak = unsigned(tensor.peak)
        for j in range(TILE):
            change = lambda_coeff * merged[j]
            sum_ = base[j] + change
            value = base[j] if change == 0 else sum_  # base + 0 would turn -0.0 into 0.0
            peak = max(peak, real(abs(value)).view(unsigned))
            output[j] = encode(narrow(value))
        tensor.peak = peak


def expand_chunk(
    left_at: Any,
    right_at: Any,
    output_at: Any,
    _models: Any,
    _tensor: Any,
    _scratch: Any,
    _counts: Any,
    _pairs: Any,
    _limits: Any,
    count: int,
    columns: int,
    rank: int,
    first: int,
    ranks_before: int,
) -> None:  # compiled
    """Multiplies an adapter's two matrices, for a range of the product's elements.

    The products are added in the order of the rank, whatever the range: no library promises the
    same bits twice.
    """
    rows = (first + count + columns - 1) // columns
    left_all = carray(left_at, (rows, rank), real)
    right_all = carray(right_at, (rank, columns), real)
    output = carray(output_at, (count,), real)
    place = first
    done = 0
    for row in range(rows):
        left = left_all[row]
        while place < columns and done < count:
            width = min(columns - place, count - done, TILE)
            right = right_all[:, place : place + width]
            part = output[done : done + width]
            if ranks_before == 0:
                for j in range(width):
                    part[j] = 0
            k = 0
            while k + 4 <= rank:  # four at a time: the sum stays in registers for longer
                f0, f1, f2, f3 = left[k], left[k + 1], left[k + 2], left[k + 3]
                r0, r1, r2, r3 = right[k], right[k + 1], right[k + 2], right[k + 3]
                for j in range(width):
                    part[j] = (((part[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
                k += 4
            while k < rank:
                factor = left[k]
                others = right[k]
                for j in range(width):
                    part[j] += factor * others[j]
                k += 1
            place += width
            done += width
        place = 0


def pack_chunk(
    _base: Any,
    finetuned_at: Any,
    output_at: Any,
    models_at: Any,
    _tensor: Any,
    scratch_at: Any,
    _counts: Any,
    _pairs: Any,
    _limits: Any,
    count: int,
    _stride: int,
    _models: int,
    first_tile: int,
    _: int,
) -> None:  # compiled
    """Picks the entries of a chunk that the mask keeps."""
    given = carray(finetuned_at, (count,), finetuned_raw)
    made = carray(output_at, (count,), finetuned_raw)
    model = carray(models_at, (1,), MODEL)[0]
    rows = carray(scratch_at, (2, TILE), np.uint16)
    kept: Any = np.int64(0)
    for start in range(0, count, TILE):
        draw(rows[0], first_tile + start // TILE, model.key_0, model.key_1)
        for k in range(pick(rows[0], np.uint16(model.limit), rows[1])):
            place = start + rows[1, k]
            if place < count:
                made[kept] = given[place]
                kept += 1
    model.kept = kept


def unpack_chunk(
    base_at: Any,
    entries_at: Any,
    values_at: Any,
    models_at: Any,
    bits_at: Any,
    _scratch: Any,
    _counts: Any,
    _pairs: Any,
    _limits: Any,
    count: int,
    available: int,
    first_tile: int,
    _zero: int,
    _: int,
) -> None:  # compiled
    """Makes values of the base's and of a packed model's entries, where the mask keeps them."""
    base = carray(base_at, (count,), finetuned_raw)
    entries = carray(entries_at, (available,), finetuned_raw)
    values = carray(values_at, (count,), finetuned_raw)
    model = carray(models_at, (1,), MODEL)[0]
    bits = carray(bits_at, (TILE,), np.uint16)
    flags = carray(bits_at, (3, TILE), np.uint8)[2]  # behind the bits
    words = carray(bits_at, (3, TILE // 8), np.uint64)[2]
    limit = np.uint16(model.limit)
    kept: Any = np.int64(0)
    for start in range(0, count, TILE):
        draw(bits, first_tile + start // TILE, model.key_0, model.key_1)
        part = values[start : start + TILE]
        given = base[start : start + TILE]
        for j in range(len(part)):
            part[j] = given[j]
        kept += scatter(entries[min(kept, available) :], bits, limit, flags, words, part)
    model.kept = kept


# What a kernel may call: every process has these (the last two on a Mac).
FROM_C: Final = frozenset({"memset", "memcpy", "memmove", "bzero", "memset_pattern16"})

# By kernel: its template, and what is filled in where that calls it.
KERNELS: Final[Mapping[str, tuple[Any, Mapping[str, Any]]]] = {
    **{kind: (merge_chunk, {"combine": part}) for kind, part in tiles.COMBINERS.items()},
    **{kind: (tiles.note_chunk, {"note": part}) for kind, part in tiles.NOTERS.items()},
    "measure": (looks.measure_chunk, {part.__name__: part for part in looks.MEASURES}),
    "diverge": (tiles.diverge_rows, {}),
    "expand": (expand_chunk, {}),
    "pack": (pack_chunk, {}),
    "unpack": (unpack_chunk, {}),
    "products": (looks.multiply_chunk, {}),
    "sums": (looks.add_chunk, {}),
    "rank": (looks.rank_rows, {}),
    "count": (looks.count_chunk, {}),
}


def build(code: KernelSpec) -> Any:
    """A kernel for some types. All are given nine addresses, then five whole numbers."""
    template, parts = KERNELS[code.kind]
    is_wide = code.real == "F64"
    is_apart = code.kind not in ("sum", "products")  # which only want them added to something
    names = dict(list_names(code.base, code.finetuned, is_wide, is_apart))
    for name, part in parts.items():
        names[name] = inline(fill_in(part, names))
    rounds_twice = is_wide and FORMATS[code.output].bits == 16
    names["encode"] = ENCODERS[code.output]
    names["narrow"] = round_to_odd if rounds_twice else names["real"]
    names["output_raw"] = RAW[code.output]
    types = numba.types
    signature = types.void(*[types.voidptr] * 9, *[types.intp] * 5)
    return numba.cfunc(signature)(fill_in(template, names))


def run_here(code: KernelSpec) -> Callable[..., None]:
    """The kernel as a function of this process, which Numba owns."""
    compiled = build(code)

    def call(*arguments: int) -> None:
        compiled.ctypes(*arguments)

    return call


def compile_object(code: KernelSpec, machine: Any) -> bytes:
    """The kernel as an object file that needs nothing of Numba to run.

    Loading Numba takes longer than merging a billion parameters. So Numba compiles once, and what
    is kept is the bare function, without its wrappers for Python:
    status = kernel(return slot, exception slot, arguments...).
    """
    function = build(code)
    module = llvm.parse_assembly(function.inspect_llvm())
    bare = function.native_name.removeprefix("cfunc.")
    for other in module.functions:
        if other.name != bare and not other.is_declaration:
            other.linkage = "internal"
    module.get_function(bare).name = "kernel"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    for value in (*module.functions, *module.global_variables):
        if value.is_declaration and not value.name.startswith("llvm.") and value.name not in FROM_C:
            raise EngineUnavailable(
                f"the kernel {code.kind} needs {value.name}, which only Numba has"
            )
    return machine.emit_object(module)
