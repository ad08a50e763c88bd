"""The kernels for the CPU, written for Numba: each is one loop over the tiles of a chunk, in the processor's cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from darelib.formats import DIGIT_BITS, FORMATS
from darelib.kernels import KernelSpec, tiles
from darelib.kernels.records import (
    BASE_ROW,
    BINS,
    DENSE_ROW,
    LANES,
    LEFT_ROW,
    MERGED_ROW,
    MODEL,
    PAIR,
    RIGHT_ROW,
    SCRATCH_ROWS,
    SCRATCH_WIDTH,
    SIZE_ROW,
    TENSOR,
    ZERO_ROW,
)
from darelib.mask import TILE

numba: Any = importlib.import_module("numba")  # whose types say less than its functions take
importlib.import_module("numba.extending")
EXPANDED: Final = 32  # entries of a packed model at a time


@cache
def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it."""
    options = {"forceinline": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


def _expand_entries(_: Any, bits: Any, start: Any, limit: Any, entries: Any, place: Any, made: Any) -> Any:
    """Put the next entries where the mask keeps them, for EXPANDED elements, and zeros elsewhere. Gives their number.

    Processors have an instruction for this that no loop is compiled to; where they do not, LLVM makes a loop of it.
    """
    types, cgutils = numba.types, numba.core.cgutils

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def point(which: int, index: int) -> Any:
            array = context.make_array(signature.args[which])(context, builder, values[which])
            return cgutils.get_item_pointer(context, builder, signature.args[which], array, [values[index]])

        item = context.get_data_type(entries.dtype)
        words, vector = (ir.VectorType(kind, EXPANDED) for kind in (ir.IntType(16), item))
        mask, number = ir.VectorType(ir.IntType(1), EXPANDED), ir.IntType(32)
        first = builder.insert_element(ir.Constant(words, ir.Undefined), values[2], ir.Constant(number, 0))
        zeros = ir.Constant(ir.VectorType(number, EXPANDED), [0] * EXPANDED)
        limits = builder.shuffle_vector(first, ir.Constant(words, ir.Undefined), zeros)
        drawn = builder.load(builder.bitcast(point(0, 1), words.as_pointer()), align=2)
        kept = builder.icmp_unsigned("<=", drawn, limits)
        kind = ir.FunctionType(vector, [item.as_pointer(), mask, vector])
        name = f"llvm.masked.expandload.v{EXPANDED}i{item.width}"
        load = cgutils.get_or_insert_function(builder.module, kind, name)
        found = builder.call(load, [point(3, 4), kept, ir.Constant(vector, [0] * EXPANDED)])
        builder.store(found, builder.bitcast(point(5, 1), vector.as_pointer()), align=2)
        return builder.zext(builder.ctpop(builder.bitcast(kept, number)), ir.IntType(64))

    return types.intp(bits, types.intp, types.uint16, entries, types.intp, made), generate


expand_entries: Any = numba.extending.intrinsic(_expand_entries)


class Parts:
    """What all kernels of a spec are made of: the types, and the inner functions, ready to be compiled in."""

    def __init__(self, spec: KernelSpec) -> None:
        wide = spec.real == "F64"
        self.real: Any = np.float64 if wide else np.float32
        self.unsigned: Any = np.uint64 if wide else np.uint32
        self.raw = [np.dtype(FORMATS[name].raw).type for name in (spec.base, spec.finetuned, spec.output)]
        self.decode = inline(tiles.DECODERS[spec.base])
        self.decode_finetuned = inline(tiles.DECODERS[spec.finetuned])
        self.encode = inline(tiles.ENCODERS[spec.output])
        if wide and FORMATS[spec.output].bits == 16:
            self.encode = self._encode_by_odd(self.encode)
        self.expand = expand_entries
        self.unpack = self._unpack_tile()
        self.thin = self._thin_model(spec.kind == "elect")
        self.open = self._open_buffers()

    def _encode_by_odd(self, encode: Any) -> Any:
        narrow = inline(tiles.round_to_odd)

        def encode_by_odd(value: Any) -> Any:  # compiled
            return encode(narrow(value))

        return inline(encode_by_odd)

    def _open_buffers(self) -> Any:
        """Addresses as arrays, with zeros behind the last tile and in the row that stands in for a base of zeros."""
        carray, real, pad_rows = numba.carray, self.real, inline(tiles.pad)
        base_raw, finetuned_raw, _ = self.raw

        def open_buffers(  # compiled
            base_at: Any, finetuned_at: Any, models_at: Any, tensor_at: Any, scratch_at: Any,
            count: int, stride: int, models: int,
        ) -> Any:  # fmt: skip
            tiles = (count + TILE - 1) // TILE
            base = carray(base_at, (1, tiles * TILE), base_raw)
            finetuned = carray(finetuned_at, (models, stride), finetuned_raw)
            records = carray(models_at, (models,), MODEL)
            tensor = carray(tensor_at, (1,), TENSOR)
            scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
            bits = carray(scratch_at, (1, TILE), np.uint16)[0]
            pad_rows(base, count, tiles * TILE)
            pad_rows(finetuned, count, tiles * TILE)
            pad_rows(scratch[ZERO_ROW : ZERO_ROW + 1], 0, TILE)
            return tiles, base[0], finetuned, records, tensor, scratch, bits

        return inline(open_buffers)

    def _thin_model(self, apart: bool) -> Any:
        """The heart of all kernels: one tile of one model, from its stored values to its thinned deltas.

        They are added to a row, or, to elect signs, are what the row holds then.
        """
        draw_bits, unpack_tile = inline(tiles.draw), self.unpack
        thin_row, thin_packed = self._thin_row(apart, False), self._thin_row(apart, True)

        def thin_model(  # compiled
            values: Any, start: int, width: int, tile: int, model: Any, base: Any, bits: Any, dense: Any, size: Any,
            row: Any, threshold: Any,
        ) -> None:  # fmt: skip
            draw_bits(bits, tile, model.key_0, model.key_1)
            if model.stored:
                unpack_tile(values, width, model, bits, dense)
                thin_packed(dense, model, base, bits, size, row, threshold)
            else:
                thin_row(values[start : start + TILE], model, base, bits, size, row, threshold)

        return inline(thin_model)

    def _thin_row(self, apart: bool, packed: bool) -> Any:
        """packed: only some entries are there, and nothing has changed elsewhere."""
        decode, real, unsigned = self.decode_finetuned, self.real, self.unsigned

        def thin_row(
            raw: Any, model: Any, base: Any, bits: Any, size: Any, row: Any, threshold: Any
        ) -> None:  # compiled
            limit, floor, scale = np.uint16(model.limit), real(model.floor), real(model.scale)
            stored, peak = np.uint16(model.stored - np.uint64(1)), unsigned(model.peak)
            above = np.uint32(0)
            survivors = np.uint32(0)
            for j in range(TILE):
                delta = decode(raw[j]) - base[j]
                if packed:
                    delta = delta if bits[j] <= stored else real(0)
                magnitude = abs(delta)
                size[j] = magnitude
                # Compared as integers, a NaN or an infinity is the largest of all, and the loop vectorises.
                pattern = real(magnitude).view(unsigned)
                peak = pattern if pattern > peak else peak
                above = np.uint32(above + np.uint32(magnitude > threshold))
                survives = bits[j] <= limit
                survivors = np.uint32(survivors + np.uint32(survives))
                if apart:
                    row[j] = delta * scale if survives and magnitude >= floor else real(0)
                else:
                    row[j] += delta * scale if survives else real(0)
            model.peak = peak
            model.above += np.uint64(above)
            model.kept += np.uint64(survivors)

        return inline(thin_row)

    def _unpack_tile(self) -> Any:
        """The entries of one tile of a packed model, each in its place; elsewhere zeros."""
        expand = self.expand

        def unpack_tile(entries: Any, width: int, model: Any, bits: Any, dense: Any) -> None:  # compiled
            stored, place = np.uint16(model.stored - np.uint64(1)), np.intp(model.next)
            for start in range(0, TILE, EXPANDED):
                place += expand(bits, start, stored, entries, place, dense)
            for j in range(width, TILE):  # what pads a last tile
                place -= np.intp(bits[j] <= stored)
                dense[j] = 0
            model.next = np.uint64(place)

        return inline(unpack_tile)

    def compile(self, function: Callable[..., None]) -> Any:
        """All kernels have one signature: eight addresses and four whole numbers."""
        types = numba.types
        return numba.cfunc(types.void(*[types.voidptr] * 8, *[types.intp] * 4))(function)


def build_merge(spec: KernelSpec) -> Any:
    """The loop that merges one chunk: decode, subtract, mask, combine, encode."""
    parts = Parts(spec)
    carray, real, unsigned, decode, encode = numba.carray, parts.real, parts.unsigned, parts.decode, parts.encode
    open_buffers, thin_model, decode_finetuned = parts.open, parts.thin, parts.decode_finetuned
    fold_tile, elect_signs = inline(tiles.fold), inline(tiles.elect)
    (_, finetuned_raw, output_raw), elects = parts.raw, spec.kind == "elect"

    def merge_chunk(  # compiled
        base_at: Any, finetuned_at: Any, output_at: Any, models_at: Any, tensor_at: Any, scratch_at: Any, _counts: Any,
        _pairs: Any, count: int, stride: int, models: int, first_tile: int,
    ) -> None:  # fmt: skip
        tiles, base_all, finetuned_all, records, tensors, scratch, bits = open_buffers(
            base_at, finetuned_at, models_at, tensor_at, scratch_at, count, stride, models
        )
        tensor = tensors[0]
        output_all = carray(output_at, (1, tiles * TILE), output_raw)[0]
        dense = scratch[DENSE_ROW].view(finetuned_raw)
        base, merged, size, kept = scratch[BASE_ROW], scratch[MERGED_ROW], scratch[SIZE_ROW], scratch[SCRATCH_ROWS:]
        threshold = real(tensor.threshold)
        lambda_coeff, base_share = real(tensor.lambda_coeff), real(tensor.base_share)
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                size[j] = abs(value)
                merged[j] = base_share * value
            tensor.base_size += fold_tile(size)
            for i in range(models):
                model = records[i]
                against = scratch[ZERO_ROW if model.is_delta else BASE_ROW]
                row, at = kept[i] if elects else merged, first_tile + tile
                thin_model(
                    finetuned_all[i], start, count - start, at, model, against, bits, dense, size, row, threshold
                )
                model.size += fold_tile(size)
                # Of a last tile, what pads it was counted too.
                for j in range(count - start, TILE):
                    model.kept -= np.uint64(bits[j] <= np.uint16(model.limit))
            if elects:
                elect_signs(kept, records, merged, scratch[LEFT_ROW], scratch[RIGHT_ROW], real(tensor.first_share))
            if tensor.exact:
                raw_finetuned = finetuned_all[0, start : start + TILE]
                for j in range(TILE):
                    base[j] = decode_finetuned(raw_finetuned[j])
                    merged[j] = 0
            output = output_all[start : start + TILE]
            peak = unsigned(tensor.peak)
            for j in range(TILE):
                change = lambda_coeff * merged[j]
                sum_ = base[j] + change
                value = base[j] if change == 0 else sum_  # base + 0 would turn -0.0 into 0.0
                pattern = real(abs(value)).view(unsigned)
                peak = pattern if pattern > peak else peak
                output[j] = encode(value)
            tensor.peak = peak

    return parts.compile(merge_chunk)


def build_products(spec: KernelSpec) -> Any:
    """The loop that gives slerp |end 0|^2, |end 1|^2 and end 0 . end 1, where an end of the arc is base + kept."""
    parts = Parts(spec)
    carray, real, decode, thin_model, open_buffers = numba.carray, parts.real, parts.decode, parts.thin, parts.open
    fold_tile, fold_pairs, finetuned_raw = inline(tiles.fold), inline(tiles.fold_neighbours), parts.raw[1]

    def multiply_chunk(  # compiled
        base_at: Any, finetuned_at: Any, output_at: Any, models_at: Any, tensor_at: Any, scratch_at: Any, _counts: Any,
        _pairs: Any, count: int, stride: int, models: int, first_tile: int,
    ) -> None:  # fmt: skip
        tiles, base_all, finetuned_all, records, tensors, scratch, bits = open_buffers(
            base_at, finetuned_at, models_at, tensor_at, scratch_at, count, stride, models
        )
        tensor = tensors[0]
        sums = carray(output_at, (3, tiles), np.float64)
        dense = scratch[DENSE_ROW].view(finetuned_raw)
        products = carray(scratch_at, (SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)[SCRATCH_ROWS + models]
        base, size, ends = scratch[BASE_ROW], scratch[SIZE_ROW], scratch[LEFT_ROW : RIGHT_ROW + 1]
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                ends[0, j] = value
                ends[1, j] = value
            for i in range(models):
                model = records[i]
                against = scratch[ZERO_ROW if model.is_delta else BASE_ROW]
                end, at = ends[np.int64(model.number)], first_tile + tile
                thin_model(finetuned_all[i], start, count - start, at, model, against, bits, dense, size, end, real(0))
            for which in range(3):
                left, right = ends[1 if which == 1 else 0], ends[0 if which == 0 else 1]
                for j in range(TILE):
                    products[j] = np.float64(left[j]) * np.float64(right[j])
                sums[which, tile] = fold_tile(products)
        tensor.square_0 = fold_pairs(sums[0])
        tensor.square_1 = fold_pairs(sums[1])
        tensor.product = fold_pairs(sums[2])

    return parts.compile(multiply_chunk)


def build_count(spec: KernelSpec) -> Any:
    """The loop that counts, for trim, the surviving |delta| by 16 bits of their pattern.

    shift says which bits; only patterns that continue the model's prefix, found by the passes before, are counted. Few
    entries survive, so they are picked first, and only their deltas are computed.
    """
    parts = Parts(spec)
    carray, real, unsigned, decode = numba.carray, parts.real, parts.unsigned, parts.decode
    base_raw, finetuned_raw, _ = parts.raw
    draw_bits, pick_kept, decode_finetuned = inline(tiles.draw), inline(tiles.pick), parts.decode_finetuned
    unpack_tile = parts.unpack

    def count_chunk(  # compiled
        base_at: Any, finetuned_at: Any, _output: Any, models_at: Any, tensor_at: Any, scratch_at: Any, counts_at: Any,
        _pairs: Any, count: int, stride: int, models: int, first_tile: int,
    ) -> None:  # fmt: skip
        base_all = carray(base_at, (1, count), base_raw)[0]
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        records = carray(models_at, (models,), MODEL)
        shift = carray(tensor_at, (1,), TENSOR)[0].shift
        counts = carray(counts_at, (models, 1 << DIGIT_BITS), np.uint32)
        rows = carray(scratch_at, (2, 2 * TILE), np.uint16)
        bits, picked = rows[0], rows[1]
        dense = carray(scratch_at, (DENSE_ROW + 1, SCRATCH_WIDTH), real)[DENSE_ROW].view(finetuned_raw)
        for start in range(0, count, TILE):
            width = count - start
            for i in range(models):
                model = records[i]
                draw_bits(bits, first_tile + start // TILE, model.key_0, model.key_1)
                limit, prefix, minus_base = np.uint16(model.limit), model.prefix, model.is_delta == 0
                values = finetuned_all[i, start : start + TILE]
                if model.stored:
                    unpack_tile(finetuned_all[i], width, model, bits, dense)
                    values = dense
                for k in range(pick_kept(bits, limit, picked)):
                    place = np.int64(picked[k])
                    if place < width:
                        delta = real(decode_finetuned(values[place]))
                        if minus_base:
                            delta = real(delta - real(decode(base_all[start + place])))
                        pattern = np.uint64(real(abs(delta)).view(unsigned)) >> shift
                        if pattern >> np.uint64(DIGIT_BITS) == prefix:
                            counts[i, np.int64(pattern & np.uint64(0xFFFF))] += np.uint32(1)

    return parts.compile(count_chunk)


def build_measure(spec: KernelSpec) -> Any:
    """The loop that gathers an analysis' figures. Zeros that pad a last tile are counted with the others."""
    parts = Parts(spec)
    carray, real, unsigned, decode = numba.carray, parts.real, parts.unsigned, parts.decode
    decode_finetuned, open_buffers, fold_tile = parts.decode_finetuned, parts.open, inline(tiles.fold)
    signs, mixed_signs, bin_tile = inline(tiles.compare_signs), inline(tiles.compare_all), inline(tiles.find_bins)
    draw_bits, unpack_tile, finetuned_raw = inline(tiles.draw), parts.unpack, parts.raw[1]

    def measure_chunk(  # compiled
        base_at: Any, finetuned_at: Any, _output: Any, models_at: Any, tensor_at: Any, scratch_at: Any, counts_at: Any,
        pairs_at: Any, count: int, stride: int, models: int, first_tile: int,
    ) -> None:  # fmt: skip
        tiles, base_all, finetuned_all, records, tensors, scratch, bins = open_buffers(
            base_at, finetuned_at, models_at, tensor_at, scratch_at, count, stride, models
        )
        tensor = tensors[0]
        pairs = carray(pairs_at, (1 + models * (models - 1) // 2,), PAIR)
        counts = carray(counts_at, (models, LANES, BINS), np.uint32)
        dense = scratch[DENSE_ROW].view(finetuned_raw)
        base, size, deltas = scratch[BASE_ROW], scratch[SIZE_ROW], scratch[SCRATCH_ROWS:]
        left, right, products = scratch[LEFT_ROW], scratch[RIGHT_ROW], scratch[MERGED_ROW]
        threshold = real(tensor.threshold)
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                products[j] = value * value
            tensor.base_squares += fold_tile(products)
            for i in range(models):
                model = records[i]
                raw_finetuned = finetuned_all[i, start : start + TILE]
                against = scratch[ZERO_ROW if model.is_delta else BASE_ROW]
                delta_row = deltas[i]
                peak = unsigned(model.peak)
                zeros = np.uint32(0)
                over = np.uint32(0)
                stored = np.uint16(model.stored - np.uint64(1))
                if model.stored:
                    draw_bits(bins, first_tile + tile, model.key_0, model.key_1)
                    unpack_tile(finetuned_all[i], count - start, model, bins, dense)
                    raw_finetuned = dense
                for j in range(TILE):
                    delta = decode_finetuned(raw_finetuned[j]) - against[j] if bins[j] <= stored else real(0)
                    delta_row[j] = delta
                    magnitude = abs(delta)
                    size[j] = magnitude
                    products[j] = delta * delta
                    pattern = real(magnitude).view(unsigned)
                    peak = pattern if pattern > peak else peak
                    zeros = np.uint32(zeros + np.uint32(magnitude == 0))
                    over = np.uint32(over + np.uint32(magnitude > threshold))
                bin_tile(size, bins)
                model.peak = peak
                model.zeros += np.uint64(zeros)
                model.above += np.uint64(over)
                model.size += fold_tile(size)
                model.squares += fold_tile(products)
                for j in range(0, TILE, LANES):
                    for lane in range(LANES):
                        counts[i, lane, bins[j + lane]] += np.uint32(1)
            row = 1
            for i in range(models):
                for k in range(i + 1, models):
                    pair = pairs[row]
                    signs(deltas[i], deltas[k], left, right, pair)
                    pair.opposed_size += fold_tile(left)
                    pair.both_size += fold_tile(right)
                    one, other = deltas[i], deltas[k]
                    for j in range(TILE):
                        products[j] = one[j] * other[j]
                    pair.product += fold_tile(products)
                    row += 1
            if models > 2:  # with two models, their pair says it
                pair = pairs[0]
                mixed_signs(deltas[:models], left, right, size, pair)
                pair.opposed_size += fold_tile(left)
                pair.both_size += fold_tile(right)

    return parts.compile(measure_chunk)


def build_expand(spec: KernelSpec) -> Any:
    """The loop that multiplies an adapter's two matrices, for a range of the product's elements.

    The products are added in the order of the rank, whatever the range: no library promises the same bits twice.
    """
    parts = Parts(spec)
    carray, real = numba.carray, parts.real

    def expand_chunk(  # compiled
        left_at: Any, right_at: Any, output_at: Any, numbers_at: Any, _tensor: Any, _scratch: Any, _counts: Any,
        _pairs: Any, count: int, columns: int, rank: int, first: int,
    ) -> None:  # fmt: skip
        ranks_before = carray(numbers_at, (1,), np.int64)[0]
        rows = (first + count + columns - 1) // columns
        left_all = carray(left_at, (rows, rank), real)
        right = carray(right_at, (rank, columns), real)
        output = carray(output_at, (1, count), real)[0]
        place, done = first, 0
        for row in range(rows):
            left = left_all[row]
            while place < columns and done < count:
                width = min(columns - place, count - done, TILE)
                part = output[done : done + width]
                if ranks_before == 0:
                    for j in range(width):
                        part[j] = 0
                k = 0
                while k + 4 <= rank:  # four at a time, so that the sum stays in registers for longer
                    f0, f1, f2, f3 = left[k], left[k + 1], left[k + 2], left[k + 3]
                    r0, r1 = right[k, place : place + width], right[k + 1, place : place + width]
                    r2, r3 = right[k + 2, place : place + width], right[k + 3, place : place + width]
                    for j in range(width):
                        part[j] = (((part[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
                    k += 4
                while k < rank:
                    factor, others = left[k], right[k, place : place + width]
                    for j in range(width):
                        part[j] += factor * others[j]
                    k += 1
                place, done = place + width, done + width
            place = 0

    return parts.compile(expand_chunk)


def build_pack(spec: KernelSpec) -> Any:
    """The loop that picks the entries of a chunk that the mask keeps."""
    parts = Parts(spec)
    carray, raw, draw_bits, pick_kept = numba.carray, parts.raw[1], inline(tiles.draw), inline(tiles.pick)

    def pack_chunk(  # compiled
        _base: Any, finetuned_at: Any, output_at: Any, models_at: Any, _tensor: Any, scratch_at: Any, _counts: Any,
        _pairs: Any, count: int, _stride: int, _models: int, first_tile: int,
    ) -> None:  # fmt: skip
        given = carray(finetuned_at, (1, count), raw)[0]
        made = carray(output_at, (1, count), raw)[0]
        model = carray(models_at, (1,), MODEL)[0]
        rows = carray(scratch_at, (2, 2 * TILE), np.uint16)
        bits, picked = rows[0], rows[1]
        kept: Any = np.int64(0)
        for start in range(0, count, TILE):
            draw_bits(bits, first_tile + start // TILE, model.key_0, model.key_1)
            for k in range(pick_kept(bits, np.uint16(model.limit), picked)):
                if start + picked[k] < count:
                    made[kept] = given[start + picked[k]]
                    kept += 1
        model.kept = kept

    return parts.compile(pack_chunk)


BUILDERS: Final = {
    "sum": build_merge, "elect": build_merge, "products": build_products, "count": build_count,
    "measure": build_measure, "expand": build_expand, "pack": build_pack,
}  # fmt: skip


def compile_object(spec: KernelSpec, machine: Any) -> bytes:
    """The kernel as an object file that needs nothing of Numba to run.

    Loading Numba takes longer than merging a billion parameters. So Numba compiles once, and what is kept is the bare
    function: status = kernel(return slot, exception slot, arguments...), its wrappers for Python left behind.
    """
    function = BUILDERS[spec.kind](spec)
    module = llvm.parse_assembly(function.inspect_llvm())
    bare = function.native_name.removeprefix("cfunc.")
    for other in module.functions:
        if other.name != bare and not other.is_declaration:
            other.linkage = "internal"
    module.get_function(bare).name = "kernel"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return machine.emit_object(module)
