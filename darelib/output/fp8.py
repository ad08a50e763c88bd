"""Weights that are written in FP8: merged values become bytes once all values that share a scale are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS, widen
from darelib.core.mask import TILE
from darelib.core.methods import METHODS, Found, Look, TensorSettings
from darelib.kernels import fp8, plain
from darelib.models.fp8 import ScaledTensor, read_scales

Array = NDArray[Any]


class PeakLook(Look):
    """The largest magnitude of a merged tensor that has one scale, and whether the merge changes anything."""

    merges = True

    def __init__(
        self, settings: TensorSettings, models: Sequence[int], count: int, bits: int, found: Found
    ) -> None:
        super().__init__(settings, models, count, bits, found)
        self.kernel, self.peak, self.changed = METHODS[settings.method].kernel, 0, False

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        changed = buffers.output.view(np.float32)[:count] != buffers.base.view(np.float32)[:count]
        if changed.any():  # set only: another thread may have found something
            self.changed = True

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        self.peak = max(
            self.peak, int(buffers.tensor["peak"][0])
        )  # bit patterns are ordered as values

    @property
    def largest(self) -> np.float32:
        return np.float32(np.array([self.peak], f"u{self.bits // 8}").view(f"f{self.bits // 8}")[0])


def whole_blocks(info: ScaledTensor) -> int:
    """Elements that jobs are divided by, so that each finds its scales alone: rows of blocks that are whole tiles."""
    return TILE if info.scales.whole else math.lcm(info.scales.block[0] * info.width, TILE)


def count_held(info: ScaledTensor, chunk: int) -> int:
    """Elements that are gathered before they are written: whole rows of blocks, a chunk if they fit."""
    row = info.scales.block[0] * info.width
    return chunk if info.scales.whole else min(max(1, chunk // row) * row, info.count)


class Encoder:
    """Takes the merged values of one job, in order, and writes them.

    write: takes bytes of the tensor, or of its scales, and where they go in it. look: where one scale is for all.
    """

    def __init__(
        self, base: Any, info: ScaledTensor, start: int, chunk: int, write: Callable[[bool, memoryview, int], None],
        look: PeakLook | None,
    ) -> None:  # fmt: skip
        self.base, self.info, self.start, self.write, self.look = base, info, start, write, look
        self._held = np.empty(
            (2, count_held(info, chunk)), np.float32
        )  # merged values, and the base's
        self._count = 0

    def take(self, values: Array, base: Array) -> None:
        """The next values, and the base's."""
        done = 0
        while done < len(values):
            size = min(len(values) - done, self._held.shape[1] - self._count)
            for held, given in zip(self._held, (values, base), strict=True):
                held[self._count : self._count + size] = given[done : done + size]
            self._count, done = self._count + size, done + size
            if self._count == self._held.shape[1] or self.start + self._count == self.info.count:
                self.flush()

    def flush(self) -> None:
        """Write what is held: whole rows of blocks or, where one scale is for all, any number of values."""
        count, self._count = self._count, 0
        if not count:
            return
        scales, start, self.start = self.info.scales, self.start, self.start + count
        width = count if scales.whole else self.info.width
        merged, base = self._held[:, :count].reshape(2, -1, width)
        block = (1, count) if scales.whole else scales.block
        row = 0 if scales.whole else start // width
        changed, found = self._find_scales(merged, base, row, block)
        made: Array = np.empty((0, 0), np.uint8)
        if changed.any():
            with np.errstate(all="ignore"):  # in blocks that keep the base's bytes
                for rows, divisors in fp8.spread(found, block, 0, len(merged), width):
                    merged[rows] /= divisors
            made = fp8.encode(merged)
        if not changed.all():
            stored = np.empty(merged.shape, np.uint8)
            self.base.read_bytes(stored.reshape(-1).data, self.info.stored, start)
            wide = changed if len(changed[0]) == 1 else changed.repeat(block[1], 1)[:, :width]
            made = (
                np.where(wide.repeat(block[0], 0)[: len(merged)], made, stored)
                if changed.any()
                else stored
            )
        self.write(False, made.reshape(-1).data, start)

    def _find_scales(
        self, merged: Array, base: Array, row: int, block: tuple[int, int]
    ) -> tuple[Array, Array]:
        """Which blocks have changed, and what each is to be divided by; the scales are written."""
        scales, dtype = self.info.scales, self.info.scales.info.dtype
        if self.look is not None:
            changed, peaks = np.array([[self.look.changed]]), np.array([[self.look.largest]])
        else:
            changed = fp8.reduce_blocks(np.logical_or, merged != base, block)
            peaks = fp8.reduce_blocks(np.maximum, np.abs(merged), block)
        old = (
            read_scales(self.base, scales, row, len(merged))
            .view(FORMATS[dtype].raw)
            .reshape(changed.shape)
        )
        found = np.maximum(peaks / np.float32(fp8.LARGEST), np.float32(fp8.SMALLEST_SCALE))
        if scales.powers:  # the next one up, as the base's are
            fractions, exponents = np.frexp(found)
            found = np.ldexp(np.float32(1), exponents - (fractions == 0.5))
        new = plain.encode(found, dtype)
        raw = np.where(changed & (peaks > 0), new, old)
        self.write(
            True,
            raw.reshape(-1).view(np.uint8).data,
            row // scales.block[0] * raw.itemsize * scales.grid[1],
        )
        return changed, widen(raw.reshape(-1), dtype).reshape(raw.shape)
