"""Weights that are written in FP8: merged values become bytes once all values that share a scale
are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS, widen
from darelib.core.methods import METHODS, Found, Look, TensorSettings
from darelib.kernels import fp8, plain
from darelib.models.tensors import Input, Target, TensorInfo, Writer

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a tensor, which are a tensor themselves."""

    name: str
    info: TensorInfo
    block: tuple[int, int]  # the rows and columns that share one
    grid: tuple[int, int]  # how many there are
    powers: bool = False  # whether the configuration wants powers of two (scale_fmt ue8m0)

    @property
    def whole(self) -> bool:
        """Whether one is for all of the tensor."""
        return self.grid == (1, 1)


def read_scales(model: Input, scales: Scales, row: int, rows: int) -> NDArray[np.uint8]:
    """The scales of the blocks that rows of the tensor are in, as bytes."""
    first = row // scales.block[0]
    last = -(-(row + rows) // scales.block[0])
    item = scales.grid[1] * (scales.info.nbytes // scales.info.count)
    raw = np.empty((last - first) * item, np.uint8)
    model.read_bytes(raw.data, scales.info, first * item)
    return raw


class PeakLook(Look):
    """The largest magnitude of a merged tensor that has one scale, and whether the merge changes
    anything.
    """

    merges = True

    def __init__(
        self, settings: TensorSettings, models: Sequence[int], count: int, bits: int, found: Found
    ) -> None:
        super().__init__(settings, models, count, bits, found)
        self.kernel = METHODS[settings.method].kernel
        self.peak = 0
        self.changed = False

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        merged = buffers.output.view(np.float32)[:count]
        if (merged != buffers.base.view(np.float32)[:count]).any():
            self.changed = True  # set only: another thread may have seen a change, too

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        self.peak = max(self.peak, int(buffers.tensor["peak"][0]))  # patterns are ordered as values

    @property
    def largest(self) -> np.float32:
        pattern = np.array([self.peak], f"u{self.bits // 8}")
        return np.float32(pattern.view(f"f{self.bits // 8}")[0])


class Fp8Writer(Writer):
    """Gathers the merged values of one job until those that share a scale are there, and writes
    them.

    look: where one scale is for all. group: elements that are written at a time.
    """

    def __init__(
        self,
        target: Target,
        stored: TensorInfo,
        scales: Scales,
        start: int,
        group: int,
        look: PeakLook | None,
    ) -> None:
        super().__init__(target, start)
        self._model = target.model
        self._info = target.info
        self._stored = stored
        self._scales = scales
        self._start = start
        self._look = look
        self._held = np.empty((2, group), np.float32)  # merged values, and the base's
        self._count = 0

    def add(self, merged: NDArray[np.uint8], base: NDArray[np.uint8], count: int) -> None:
        done = 0
        given = merged.view(np.float32)[:count], base.view(np.float32)[:count]
        while done < count:
            size = min(count - done, self._held.shape[1] - self._count)
            for held, values in zip(self._held, given, strict=True):
                held[self._count : self._count + size] = values[done : done + size]
            self._count += size
            done += size
            is_last = self._start + self._count == self._info.count
            if is_last or self._count == self._held.shape[1]:
                self.finish()

    def finish(self) -> None:
        """Write what is held: whole rows of blocks or, where one scale is for all, any number of
        values.
        """
        count = self._count
        if not count:
            return
        start = self._start
        self._start += count
        self._count = 0
        whole = self._scales.whole
        width = count if whole else self._info.width
        block = (1, count) if whole else self._scales.block
        row = 0 if whole else start // width
        merged, base = self._held[:, :count].reshape(2, -1, width)
        changed, divisors = self._write_scales(merged, base, row, block)
        made: Array = np.empty((0, 0), np.uint8)
        if changed.any():
            with np.errstate(all="ignore"):  # in blocks that keep the base's bytes
                for rows, factors in fp8.spread(divisors, block, 0, len(merged), width):
                    merged[rows] /= factors
            made = fp8.encode(merged)
        if not changed.all():
            stored = np.empty(merged.shape, np.uint8)
            self._model.read_bytes(stored.reshape(-1).data, self._stored, start)
            made = self._choose(changed, made, stored, block) if changed.any() else stored
        self._put(self._name, made.reshape(-1).data, start)

    def _choose(self, changed: Array, made: Array, stored: Array, block: tuple[int, int]) -> Array:
        """The new bytes of blocks that have changed, and the base's of the others."""
        rows, width = made.shape
        wide = changed if len(changed[0]) == 1 else changed.repeat(block[1], 1)[:, :width]
        return np.where(wide.repeat(block[0], 0)[:rows], made, stored)

    def _write_scales(
        self, merged: Array, base: Array, row: int, block: tuple[int, int]
    ) -> tuple[Array, Array]:
        """Which blocks have changed, and what each is to be divided by; the scales are written."""
        dtype = self._scales.info.dtype
        if self._look is not None:
            changed = np.array([[self._look.changed]])
            peaks = np.array([[self._look.largest]])
        else:
            changed = fp8.reduce_blocks(np.logical_or, merged != base, block)
            peaks = fp8.reduce_blocks(np.maximum, np.abs(merged), block)
        old = read_scales(self._model, self._scales, row, len(merged))
        old = old.view(FORMATS[dtype].raw).reshape(changed.shape)
        wanted = np.maximum(peaks / np.float32(fp8.LARGEST), np.float32(fp8.SMALLEST_SCALE))
        if self._scales.powers:  # the next one up, as the base's are
            fractions, exponents = np.frexp(wanted)
            wanted = np.ldexp(np.float32(1), exponents - (fractions == 0.5))
        raw = np.where(changed & (peaks > 0), plain.encode(wanted, dtype), old)
        place = row // self._scales.block[0] * raw.itemsize * self._scales.grid[1]
        self._put(self._scales.name, raw.reshape(-1).view(np.uint8).data, place)
        return changed, widen(raw.reshape(-1), dtype).reshape(raw.shape)
