"""The kernels for the CPU, written for Numba: each is one loop over the tiles of a chunk."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np

from darelib.core.mask import TILE
from darelib.kernels import EngineUnavailable, KernelSpec, cpu_looks
from darelib.kernels.cpu_parts import (
    RAW,
    draw,
    find_types,
    fold,
    inline,
    make_encoder,
    make_opener,
    make_thinner,
    numba,
    pick,
    scatter,
    view,
)
from darelib.kernels.objects import target_machine
from darelib.kernels.records import CHUNK, EXPANSION, MODEL, UNPACKING


@inline
def elect(chunk: Any, any_sign: bool) -> None:  # compiled
    """Ties: elect each position's sign by the sum, then average, by weight, the models that agree.

    Or, of any sign, those that have a delta there.
    """
    merged, total, share = chunk.merged, chunk.left, chunk.right
    zero = total.dtype.type(0)  # a plain 0 would make float64 of float32
    total[:] = zero
    share[:] = chunk.tensors[0].first_share
    for i in range(len(chunk.models)):
        row = chunk.kept[i]
        weight = total.dtype.type(chunk.models[i].weight)
        for j in range(TILE):
            has_sign = row[j] > 0 if merged[j] >= 0 else row[j] < 0
            agrees = row[j] != 0 if any_sign else has_sign
            total[j] += row[j] if agrees else zero
            share[j] += weight if agrees else zero
    for j in range(TILE):
        merged[j] = total[j] / share[j] if share[j] > 0 else zero


def make_merge(code: KernelSpec) -> Any:
    """Of kind sum; elect, which averages those of the elected sign; average, those of any sign."""
    types = find_types(code)
    real, pattern, output_raw = types.real, types.pattern, RAW[code.output]
    decode_base, decode_finetuned = types.decode_base, types.decode_finetuned
    encode = make_encoder(code)
    elects = code.kind != "sum"
    any_sign = code.kind == "average"
    open_chunk = make_opener(types)
    thin_model = make_thinner(types, is_apart=elects)  # a sum only wants them added up

    def merge_chunk(given_at: Any) -> None:  # compiled
        """Merges one chunk: decode, subtract, mask, combine, encode."""
        chunk = open_chunk(given_at)
        given = numba.carray(given_at, (1,), CHUNK)[0]
        tensor = chunk.tensors[0]
        outputs = view(given.output, (chunk.tiles * TILE,), output_raw)
        base, merged = chunk.base, chunk.merged
        lambda_coeff = real(tensor.lambda_coeff)
        base_share = real(tensor.base_share)
        for tile in range(chunk.tiles):
            raw = chunk.raw_base[tile * TILE : (tile + 1) * TILE]
            for j in range(TILE):
                value = decode_base(raw[j])
                base[j] = value
                chunk.size[j] = abs(value)
                merged[j] = base_share * value
            tensor.base_size += fold(chunk.size)
            for i in range(len(chunk.models)):
                thin_model(chunk, tile, i, chunk.kept[i], merged)
                chunk.models[i].size += fold(chunk.size)
            if elects:
                elect(chunk, any_sign)
            if tensor.exact:
                raw = chunk.raw_models[0, tile * TILE : (tile + 1) * TILE]
                for j in range(TILE):
                    base[j] = decode_finetuned(raw[j])
                    merged[j] = 0
            output = outputs[tile * TILE : (tile + 1) * TILE]
            peak = pattern(tensor.peak)
            for j in range(TILE):
                change = lambda_coeff * merged[j]
                sum_ = base[j] + change
                value = base[j] if change == 0 else sum_  # base + 0 would turn -0.0 into 0.0
                peak = max(peak, real(abs(value)).view(pattern))
                output[j] = encode(real(value))
            tensor.peak = peak

    return merge_chunk


def make_expand(code: KernelSpec) -> Any:
    real = find_types(code).real

    def expand_chunk(given_at: Any) -> None:  # compiled
        """Multiplies an adapter's two matrices, for a range of the product's elements.

        The products are added in the order of the rank, whatever the range: no library promises the
        same bits twice.
        """
        given = numba.carray(given_at, (1,), EXPANSION)[0]
        count = given.count
        columns = given.columns
        rank = given.rank
        first = given.first
        ranks_before = given.ranks_before
        rows = (first + count + columns - 1) // columns
        left_all = view(given.left, (rows, rank), real)
        right_all = view(given.right, (rank, columns), real)
        product = view(given.product, (count,), real)
        place = first
        done = 0
        for row in range(rows):
            left = left_all[row]
            while place < columns and done < count:
                width = min(columns - place, count - done, TILE)
                right = right_all[:, place : place + width]
                part = product[done : done + width]
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

    return expand_chunk


def make_pack(code: KernelSpec) -> Any:
    raw = RAW[code.finetuned]

    def pack_chunk(given_at: Any) -> None:  # compiled
        """Picks the entries of a chunk that the mask keeps."""
        given = numba.carray(given_at, (1,), CHUNK)[0]
        count = given.count
        first_tile = given.first_tile
        values = view(given.finetuned, (count,), raw)
        made = view(given.output, (count,), raw)
        model = view(given.models, (1,), MODEL)[0]
        last = np.uint16(model.threshold - np.uint64(1))
        rows = view(given.scratch, (2, TILE), np.uint16)
        kept: Any = np.int64(0)
        for start in range(0, count, TILE):
            draw(rows[0], first_tile + start // TILE, model.key_0, model.key_1)
            for k in range(pick(rows[0], last, rows[1])):
                place = start + rows[1, k]
                if place < count:
                    made[kept] = values[place]
                    kept += 1
        model.kept = kept

    return pack_chunk


def make_unpack(code: KernelSpec) -> Any:
    raw = RAW[code.finetuned]

    def unpack_chunk(given_at: Any) -> None:  # compiled
        """Makes values of the base's and of a packed model's entries, where the mask keeps them."""
        given = numba.carray(given_at, (1,), UNPACKING)[0]
        count = given.count
        available = given.available
        first_tile = given.first_tile
        base = view(given.base, (count,), raw)
        entries = view(given.entries, (available,), raw)
        values = view(given.values, (count,), raw)
        model = view(given.model, (1,), MODEL)[0]
        bits = view(given.bits, (TILE,), np.uint16)
        flags = view(given.bits, (3, TILE), np.uint8)[2]  # behind the bits
        words = view(given.bits, (3, TILE // 8), np.uint64)[2]
        last = np.uint16(model.threshold - np.uint64(1))
        kept: Any = np.int64(0)
        for start in range(0, count, TILE):
            draw(bits, first_tile + start // TILE, model.key_0, model.key_1)
            part = values[start : start + TILE]
            before = base[start : start + TILE]
            for j in range(len(part)):
                part[j] = before[j]
            kept += scatter(entries[min(kept, available) :], bits, last, flags, words, part)
        model.kept = kept

    return unpack_chunk


# By kernel: what makes it.
MAKERS: Final[Mapping[str, Callable[[KernelSpec], Any]]] = {
    "sum": make_merge,
    "elect": make_merge,
    "average": make_merge,
    "expand": make_expand,
    "pack": make_pack,
    "unpack": make_unpack,
    "products": cpu_looks.make_products,
    "sums": cpu_looks.make_sums,
    "rank": cpu_looks.make_rank,
    "count": cpu_looks.make_count,
    "measure": cpu_looks.make_measure,
}

# What a kernel may call: every process has these (the last two on a Mac).
FROM_C: Final = frozenset({"memset", "memcpy", "memmove", "bzero", "memset_pattern16"})


def compile_object(code: KernelSpec) -> bytes:
    """The kernel as an object file that needs nothing of Numba to run.

    Loading Numba takes longer than merging a billion parameters. So Numba compiles once, and what
    is kept is the bare function, without its wrappers for Python:
    status = kernel(return slot, exception slot, address of a record).
    """
    machine = target_machine()
    types = numba.types
    function = numba.cfunc(types.void(types.voidptr))(MAKERS[code.kind](code))
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
