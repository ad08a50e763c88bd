"""The arguments and results of kernels: records with named fields; one thread's buffers."""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.mask import TILE

# Compiled kernels that merge: the only ones that write values of the output's type.
MERGES: Final = ("sum", "elect", "average")

# A record for each model. threshold: what has mask bits below it is kept. peak is the bit pattern
# of the largest |delta|. bounded: what lies between low and high is kept, and of what equals them,
# what has mask bits below at_low or at_high. ranked: each entry has last bits of its own; divided:
# by which it is rescaled, too. end: which of the vectors that are multiplied it belongs to.
MODEL: Final = np.dtype(
    [(name, "u8") for name in ("key_0", "key_1", "threshold", "end", "prefix", "prefix_2")]
    + [(name, "u8") for name in ("prefix_3",)]
    + [(name, "u8") for name in ("is_delta", "bounded", "at_low", "at_high", "ranked", "divided")]
    + [(name, "f8") for name in ("scale", "weight", "floor", "low", "high")]
    + [(name, "u8") for name in ("peak", "above", "kept", "zeros")]
    + [(name, "f8") for name in ("size", "kept_size", "squares")]
)
# One record for the tensor. first_share: what ties adds weights to before it divides. exact: the
# only model is used as it is. shift: which bits sizes are counted by. ends: how many vectors are
# multiplied by each other; from_zero: they are values, not deltas. delta_threshold: larger |delta|
# are counted.
TENSOR: Final = np.dtype(
    [(name, "f8") for name in ("lambda_coeff", "base_share", "first_share")]
    + [("delta_threshold", "f8")]
    + [(name, "u8") for name in ("exact", "shift", "peak", "ends", "from_zero")]
    + [(name, "f8") for name in ("base_size", "base_squares")]
)
# For an analysis, a record for each pair of models.
PAIR: Final = np.dtype(
    [(name, "f8") for name in ("product", "opposed", "both", "opposed_size", "both_size")]
)


def _describe(addresses: str, numbers: str) -> np.dtype[Any]:
    fields = [(name, "u8") for name in addresses.split()]
    return np.dtype(fields + [(name, "i8") for name in numbers.split()])


# What a compiled kernel is given: the address of one such record, which has the addresses of arrays
# and numbers. One for those that work on a chunk, which are those of a thread's buffers, and one
# for each of the others.
CHUNK: Final = _describe(
    "base finetuned output models tensor scratch counts pairs last_bits",
    "row_bytes count model_count first_tile",
)
EXPANSION: Final = _describe("left right product", "count columns rank first ranks_before")
RANKING: Final = _describe("base values by_rank order last_bits", "count width skipped is_delta")
UNPACKING: Final = _describe("base entries values model bits", "count available first_tile")

# Rows of scratch, each as wide as a tile, before the models' own. They are a little wider, since
# rows of exactly 4 KiB would share cache sets.
(
    BITS_ROW,
    BASE_ROW,
    MERGED_ROW,
    SIZE_ROW,
    LEFT_ROW,
    RIGHT_ROW,
    ZERO_ROW,
    DIVISOR_ROW,
    SCRATCH_ROWS,
) = range(9)
SCRATCH_WIDTH: Final = TILE + 80
# An analysis counts |delta| by size: 16 bins to each doubling, the first for all below 2^-40.
# Neighbours are counted in different lanes, since adding to what was just added to would wait.
BINS: Final = 1024
BINS_PER_OCTAVE: Final = 16
FIRST_BIN: Final = (127 - 40) * BINS_PER_OCTAVE - 1  # as the float32 pattern without its low bits
LANES: Final = 4
# The entries of a row are ranked by so many bits of their pattern at a time, or one less, with so
# many counters.
SORT_BITS: Final = 11
SORT_COUNTERS: Final = 64 // (SORT_BITS - 1) + 1 << SORT_BITS
WIDEST: Final = 8  # bytes of an element
# Counters per model, by kernel: for each prefix, one for each digit.
COUNTERS: Final = {
    "count": 2 << 16,
    "measure": LANES * BINS,
}
NARROWEST: Final = 2  # bytes of an element


def align(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that start a cache line: vectors across two of them would halve the kernels' speed."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


class Buffers:
    """One thread's buffers, made once and used for every job.

    kernels: the kinds that will use them. ranked: elements of the longest row that is read as a
    whole, if any. counters: of each model, beside those of the kernels.
    """

    # What the definition of a method that is not compiled needs besides.
    extra: Mapping[str, Any] = MappingProxyType({})
    width = 1  # of the tensor's rows

    def __init__(
        self,
        models: int,
        row_bytes: int,
        kernels: Collection[str],
        ranked: int = 0,
        counters: int = 0,
    ) -> None:
        self.base = align((row_bytes,), np.uint8)
        self.finetuned = align((models, row_bytes), np.uint8)
        # Where a merge puts its result, all models' products are added up by tiles, in float64.
        tiles = -(-row_bytes // (TILE * NARROWEST)) if "products" in kernels else 0
        self.output = align((max(row_bytes, 4 * models * (models + 1) * tiles),), np.uint8)
        self.models = align((models,), MODEL)
        self.tensor = align((1,), TENSOR)
        self.scratch = align((SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)
        counters = max([counters, *(COUNTERS.get(kind, 0) for kind in kernels)])
        self.counts = align((models, counters), np.uint32)
        self.pairs = align((models * (models - 1) // 2,), PAIR)
        # The largest mask bits with which an entry is kept: its threshold - 1, to fit 16 bits.
        self.last_bits = align((models, row_bytes // NARROWEST if ranked else 0), np.uint16)
        # Whole rows of the base and of one model; those at the ends may be in other chunks, too.
        self.rows = align((2, row_bytes + 2 * ranked * WIDEST if ranked else 0), np.uint8)
        # For each entry of a row two patterns and two places, then counters.
        self.order = align((3 * ranked + SORT_COUNTERS // 2 if ranked else 0,), np.uint64)
        self.arguments = align((1,), CHUNK)
        self.arguments["row_bytes"] = row_bytes
        for name, array in vars(self).items():
            if name in (CHUNK.names or ()):
                self.arguments[name] = array.ctypes.data

    def clear(self) -> None:
        """Forget what kernels have found, and what they had to know."""
        for records in (self.models, self.tensor, self.counts, self.pairs):
            records.view(np.uint8).fill(0)  # field by field it takes many times as long

    def find_products(self, count: int) -> NDArray[np.float64]:
        """Where the kernel products puts those of a chunk of so many elements: each before what is
        left of its tiles' sums.
        """
        tiles = -(-count // TILE)
        ends = int(self.tensor["ends"][0])
        return self.output.view(np.float64)[: ends * (ends + 1) // 2 * tiles : tiles]

    @property
    def nbytes(self) -> int:
        arrays = (each for each in vars(self).values() if isinstance(each, np.ndarray))
        return sum(array.nbytes for array in arrays)
