"""What all kernels for the CPU are made of: inner functions compiled in, and the thinning of one tile of one model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir

from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_BITS, TILE
from darelib.kernels import tiles
from darelib.kernels.records import DENSE_ROW, MODEL, SCRATCH_ROWS, SCRATCH_WIDTH, TENSOR, ZERO_ROW

numba: Any = importlib.import_module("numba")  # whose types say less than its functions take
importlib.import_module("numba.extending")
EXPANDED: Final = 32  # entries of a packed model at a time


@cache
def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it."""
    options = {
        "forceinline": True,
        "error_model": "numpy",
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
    }
    return numba.njit(**options)(function)


def _expand_entries(
    _: Any, bits: Any, start: Any, limit: Any, entries: Any, place: Any, made: Any
) -> Any:
    """Put the next entries where the mask keeps them, for EXPANDED elements, and zeros elsewhere. Gives their number.

    Processors have an instruction for this that no loop is compiled to; where they do not, LLVM makes a loop of it.
    """
    types, cgutils = numba.types, numba.core.cgutils

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def point(which: int, index: int) -> Any:
            array = context.make_array(signature.args[which])(context, builder, values[which])
            return cgutils.get_item_pointer(
                context, builder, signature.args[which], array, [values[index]]
            )

        item = context.get_data_type(entries.dtype)
        words, vector = (ir.VectorType(kind, EXPANDED) for kind in (ir.IntType(16), item))
        mask, number = ir.VectorType(ir.IntType(1), EXPANDED), ir.IntType(32)
        first = builder.insert_element(
            ir.Constant(words, ir.Undefined), values[2], ir.Constant(number, 0)
        )
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
    """What all kernels of some types are made of: the types, and the inner functions, ready to be compiled in."""

    def __init__(self, base: str, finetuned: str, real: str) -> None:
        wide = real == "F64"
        self.real: Any = np.float64 if wide else np.float32
        self.unsigned: Any = np.uint64 if wide else np.uint32
        self.raw = [np.dtype(FORMATS[name].raw).type for name in (base, finetuned)]
        self.decode = inline(tiles.DECODERS[base])
        self.decode_finetuned = inline(tiles.DECODERS[finetuned])
        self.expand = expand_entries
        self.unpack = self._unpack_tile()
        self.thin = self._thin_model()
        self.open = self._open_buffers()

    def find_encoder(self, output: str) -> Any:
        encode, narrow = inline(tiles.ENCODERS[output]), inline(tiles.round_to_odd)
        if self.real is np.float32 or FORMATS[output].bits > 16:
            return encode

        def encode_by_odd(value: Any) -> Any:  # compiled
            return encode(narrow(value))

        return inline(encode_by_odd)

    def _open_buffers(self) -> Any:
        """Addresses as arrays, with zeros behind the last tile and in the row that stands in for a base of zeros."""
        carray, real, pad_rows = numba.carray, self.real, inline(tiles.pad)
        base_raw, finetuned_raw = self.raw
        item, wide = finetuned_raw().itemsize, real().itemsize

        def open_buffers(  # compiled
            base_at: Any, finetuned_at: Any, models_at: Any, tensor_at: Any, scratch_at: Any, limits_at: Any,
            count: int, stride: int, models: int,
        ) -> Any:  # fmt: skip
            tiles = (count + TILE - 1) // TILE
            base = carray(base_at, (1, tiles * TILE), base_raw)
            finetuned = carray(finetuned_at, (models, stride), finetuned_raw)
            records = carray(models_at, (models,), MODEL)
            tensor = carray(tensor_at, (1,), TENSOR)
            scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
            bits = carray(scratch_at, (1, TILE), np.uint16)[0]
            dense = carray(scratch_at, (SCRATCH_ROWS, SCRATCH_WIDTH * wide // item), finetuned_raw)[
                DENSE_ROW
            ]
            limits = carray(limits_at, (models, stride * item // 2), np.uint16)
            pad_rows(base, count, tiles * TILE)
            pad_rows(finetuned, count, tiles * TILE)
            pad_rows(scratch[ZERO_ROW : ZERO_ROW + 1], 0, TILE)
            return tiles, base[0], finetuned, records, tensor, scratch, bits, limits, dense

        return inline(open_buffers)

    def _thin_model(self) -> Any:
        """The heart of all kernels: one tile of one model, from its stored values to its thinned deltas.

        They are added to a total; apart: they are what a row holds, too.
        """
        draw_bits, unpack_tile, choose_by_size = (
            inline(tiles.draw),
            self.unpack,
            self._choose_by_size(),
        )
        choose_by_rank, thin_row = inline(tiles.choose_by_rank), self._thin_row()
        thin_apart, thin_rare = self._thin_row(apart=True), self._thin_row(apart=True, rare=True)

        def thin_model(  # compiled
            values: Any, start: int, width: int, tile: int, model: Any, base: Any, bits: Any, limits: Any, dense: Any,
            size: Any, divisors: Any, row: Any, total: Any, threshold: Any, apart: bool,
        ) -> None:  # fmt: skip
            limit = np.uint16(model.limit)
            raw = values[start : start + TILE]
            if not model.bounded or model.at_low + model.at_high < np.uint64(2 << MASK_BITS):
                draw_bits(bits, tile, model.key_0, model.key_1)
            if model.bounded:
                limit = choose_by_size(raw, base, model, bits)
            if model.ranked:
                limit = choose_by_rank(bits, limits[start : start + TILE], divisors)
            if model.stored:
                unpack_tile(values, width, model, bits, dense)
                raw = dense
            if model.stored or model.divided or model.floor > 0:
                thin_rare(raw, model, base, bits, limit, size, divisors, row, total, threshold)
            elif apart:
                thin_apart(raw, model, base, bits, limit, size, divisors, row, total, threshold)
            else:
                thin_row(raw, model, base, bits, limit, size, divisors, row, total, threshold)
            for j in range(width, TILE):  # what pads a last tile was counted too
                model.kept -= np.uint64(bits[j] <= limit)

        return inline(thin_model)

    def _choose_by_size(self) -> Any:
        """Instead of random bits, those of a mask that keeps what lies within a model's bounds. Gives its limit."""
        decode, real = self.decode_finetuned, self.real

        def choose_by_size(raw: Any, base: Any, model: Any, bits: Any) -> Any:  # compiled
            low, high = real(model.low), real(model.high)
            at_low, at_high = np.uint32(model.at_low), np.uint32(model.at_high)
            for j in range(TILE):
                magnitude = abs(decode(raw[j]) - base[j])
                is_low, is_high = magnitude == low, magnitude == high
                survives = np.uint32(bits[j]) < (at_low if is_low else at_high)
                kept = (magnitude > low and magnitude < high) or ((is_low or is_high) and survives)
                bits[j] = np.uint16(0) if kept else np.uint16(1)
            return np.uint16(0)

        return inline(choose_by_size)

    def _thin_row(self, apart: bool = False, rare: bool = False) -> Any:
        """rare: of a model that is packed (there are only some entries, and nothing has changed elsewhere), divided
        (each entry by its own divisor) or trimmed."""
        decode, real, unsigned = self.decode_finetuned, self.real, self.unsigned

        def thin_row(  # compiled
            raw: Any, model: Any, base: Any, bits: Any, limit: Any, size: Any, divisors: Any, row: Any, total: Any,
            threshold: Any,
        ) -> None:  # fmt: skip
            floor, scale, divided = real(model.floor), real(model.scale), model.divided != 0
            stored, peak = np.uint16(model.stored - np.uint64(1)), unsigned(model.peak)
            above = np.uint32(0)
            survivors = np.uint32(0)
            for j in range(TILE):
                delta = decode(raw[j]) - base[j]
                if rare:
                    delta = delta if bits[j] <= stored else real(0)
                magnitude = abs(delta)
                size[j] = magnitude
                # Compared as integers, a NaN or an infinity is the largest of all, and the loop vectorises.
                pattern = real(magnitude).view(unsigned)
                peak = pattern if pattern > peak else peak
                above = np.uint32(above + np.uint32(magnitude > threshold))
                survives = bits[j] <= limit
                survivors = np.uint32(survivors + np.uint32(survives))
                scaled = delta * scale
                if rare:
                    scaled = scaled / divisors[j] if divided else scaled
                    scaled = scaled if magnitude >= floor else real(0)
                kept = scaled if survives else real(0)
                if apart:
                    row[j] = kept
                total[j] += kept
            model.peak = peak
            model.above += np.uint64(above)
            model.kept += np.uint64(survivors)

        return inline(thin_row)

    def _unpack_tile(self) -> Any:
        """The entries of one tile of a packed model, each in its place; elsewhere zeros."""
        expand = self.expand

        def unpack_tile(
            entries: Any, width: int, model: Any, bits: Any, dense: Any
        ) -> None:  # compiled
            stored, place = np.uint16(model.stored - np.uint64(1)), np.intp(model.next)
            for start in range(0, TILE, EXPANDED):
                place += expand(bits, start, stored, entries, place, dense)
            for j in range(width, TILE):  # what pads a last tile
                place -= np.intp(bits[j] <= stored)
                dense[j] = 0
            model.next = np.uint64(place)

        return inline(unpack_tile)

    def compile(self, function: Callable[..., None]) -> Any:
        """All kernels take nine addresses, then four whole numbers or five."""
        types, numbers = numba.types, function.__code__.co_argcount - 9
        return numba.cfunc(types.void(*[types.voidptr] * 9, *[types.intp] * numbers))(function)


share_parts = cache(Parts)  # so that what several kernels need of them is compiled once
