"""LoRA adapters: two small matrices for each tensor that they change, seen as tensors of the base.

An element is scale * (left @ right), with the products added in the order of the rank, so that it
has the same bits whatever range of elements is read. An adapter of DoRA also sets how long what
each output is made of is, its magnitude: then an element is one of the changed tensor,
magnitude / length * (base + scale * (left @ right)).
"""

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS, STORED_BITS, widen
from darelib.core.text import DareError, count_of
from darelib.core.tuning import TUNING
from darelib.kernels import Kernel, KernelSpec
from darelib.models.checkpoint import EMBEDDINGS, HEADS, Checkpoint
from darelib.models.directories import Layout
from darelib.models.source import Source
from darelib.models.tensorfile import TensorInfo

UNLOAD_HINT: Final = (
    "merge it into its base with the program that made it (PEFT: merge_and_unload), and use the "
    "result as a model"
)
# By module: whether the matrices in it are stored as inputs x outputs, as GPT-2's.
Ways: TypeAlias = Mapping[str, set[bool]]
# Elements at a time whose squares are added. The sums' last bits depend on it.
SQUARED_ELEMENTS: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTensor(TensorInfo):
    """A tensor, or a change to one, that is scale * left @ right."""

    left: TensorInfo  # rows x rank, or rank x rows if it is transposed
    right: TensorInfo  # rank x columns, or columns x rank
    rank: int
    columns: int
    transposed: bool
    scale: float
    # The tensor that it changes, where that was saved with it or the lengths of DoRA are its; None:
    # it is the change alone.
    whole: TensorInfo | None = None
    whole_is_base: bool = False  # and not the adapter's
    magnitudes: TensorInfo | None = None  # of DoRA, one for each output

    @property
    def added_rank(self) -> int:
        return 0 if self.whole else self.rank

    @property
    def stored_bytes(self) -> int:
        parts = (self.left, self.right, self.whole, self.magnitudes)
        return sum(part.stored_bytes for part in parts if part)

    @property
    def held_bytes(self) -> int:
        """What is held to read it: all of the right matrix."""
        return self.rank * self.columns * FORMATS[self.dtype].itemsize

    @property
    def spec(self) -> KernelSpec:
        """The kernel that multiplies the matrices."""
        return KernelSpec("expand", self.dtype, self.dtype, self.dtype)


class LoraAdapter(Checkpoint):
    """A LoRA adapter of any format: its tensors are those of the base that it changes."""

    partial = True

    def __init__(self, source: Source, layout: Layout, base: Checkpoint | None) -> None:
        if base is None:
            raise DareError(
                f"{source.name!r} is a LoRA adapter, where a model is needed",
                "give the model that it was trained on",
            )
        super().__init__(source, layout)
        self._base = base
        self._kernels: Mapping[KernelSpec, Kernel] = {}
        self._room = 0  # elements of the matrices that are kept
        self._kept: dict[tuple[LowRankTensor, int], NDArray[Any]] = {}
        self._keeping = threading.Lock()
        self._factors: dict[LowRankTensor, NDArray[Any]] = {}
        try:
            changes = self._find_changes(base)
        except BaseException:
            self.close()
            raise
        self.tensors = {name: info for name, info in changes.items() if name in base.tensors}
        self.unused = tuple(name for name in changes if name not in base.tensors)
        self._describe(base)

    def _find_changes(self, base: Checkpoint) -> dict[str, TensorInfo]:
        """By the base's names, how what it changes is made; what the base lacks has other names."""
        raise NotImplementedError

    @cached_property
    def _ways(self) -> Ways:
        """Which way the base's matrices are stored."""
        return find_ways(self._base.tensors)

    def _describe(self, base: Checkpoint) -> None:
        """Set what others ask about this kind of input."""
        pairs = [info for info in self.tensors.values() if isinstance(info, LowRankTensor)]
        self.specs = frozenset(pair.spec for pair in pairs)
        self.held_bytes = max((pair.held_bytes for pair in pairs), default=0)
        self._locks = {pair: threading.Lock() for pair in pairs if pair.magnitudes}
        ranks = sorted({pair.rank for pair in pairs})
        ends = " to ".join(map(str, sorted({*ranks[:1], *ranks[-1:]})))
        kind = "DoRA" if self._locks else "LoRA"
        kind += f" of rank {ends}" if ends else ""
        self.note = f"{kind}, changes {count_of(len(self.tensors), 'tensor')}"
        whole = [
            name
            for name, info in self.tensors.items()
            if name.endswith(EMBEDDINGS) and not isinstance(info, LowRankTensor)
        ]
        if whole and not any(name.endswith(HEADS) for name in base.tensors):
            self.warnings += (
                f"{self.name} has its own {whole[0]!r}, and the base uses that as its output head "
                "too: both change, where PEFT would leave the head as it was",
            )

    def prepare(self, kernels: Mapping[KernelSpec, Kernel], inputs: int) -> None:
        self._kernels = kernels
        self._room = TUNING.expand_elements // inputs

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Of a product, the bytes that it would have if it were stored."""
        if not isinstance(info, LowRankTensor):
            super().read_bytes(view, info, start)
        elif view:
            made = np.frombuffer(view, FORMATS[info.dtype].real)
            first = start // made.itemsize
            self._expand(info, first, made)
            if info.magnitudes is not None:
                made *= self._spread_factors(info, first, made.size)

    def read_factors(self, info: TensorInfo) -> tuple[NDArray[Any], NDArray[Any]] | None:
        if not isinstance(info, LowRankTensor) or info.whole:
            return None
        rows = slice(0, info.count // info.columns)
        ranks = slice(0, info.rank)
        left = self._read_matrix(info.left, rows, ranks, info)
        right = self._read_matrix(info.right, ranks, slice(0, info.columns), info)
        return left.astype(np.float64) * info.scale, right.astype(np.float64)

    def _expand(self, info: LowRankTensor, start: int, made: NDArray[Any]) -> None:
        """Fill made with elements of a product, by as many ranks at a time as there is room for."""
        kernel = self._kernels[info.spec]
        rows = slice(start // info.columns, -(-(start + len(made)) // info.columns))
        step = max(1, self._room // max(info.columns, rows.stop - rows.start))
        for k in range(0, info.rank, step):
            ranks = slice(k, min(k + step, info.rank))
            left = self._read_matrix(info.left, rows, ranks, info)
            kernel(left, self._read_right(info, ranks), made, start % info.columns, k)
        with np.errstate(over="ignore"):  # the merge finds what is out of range, and says where
            made *= made.dtype.type(info.scale)
        if info.whole is not None:
            raw = np.empty(made.size * STORED_BITS[info.whole.dtype] // 8, np.uint8)
            model = self._base if info.whole_is_base else self
            model.read(info.whole, start, made.size, raw)
            made += widen(raw, info.whole.dtype)

    def _spread_factors(self, info: LowRankTensor, start: int, count: int) -> NDArray[Any]:
        """For each element, what makes its output as long as it is to be."""
        with self._locks[info]:  # the first one to need them finds them
            if info not in self._factors:
                self._factors[info] = self._find_factors(info)
        factors = self._factors[info]
        rows = slice(start // info.columns, -(-(start + count) // info.columns))
        if info.transposed:
            spread = np.tile(factors, rows.stop - rows.start)
        else:
            spread = np.repeat(factors[rows], info.columns)
        return spread[start % info.columns :][:count]

    def _find_factors(self, info: LowRankTensor) -> NDArray[Any]:
        """For each output, its magnitude through its length, which is found by some whole rows at
        a time. An output is a row; of a transposed tensor, a column.
        """
        assert info.magnitudes is not None
        raw = np.empty(info.magnitudes.nbytes, np.uint8)
        self.read_bytes(raw.data, info.magnitudes, 0)
        squares = np.zeros(info.magnitudes.count)
        step = max(1, SQUARED_ELEMENTS // info.columns) * info.columns
        for start, stop in pairwise([*range(0, info.count, step), info.count]):
            made = np.empty(stop - start, FORMATS[info.dtype].real)
            self._expand(info, start, made)
            squared = np.square(made.reshape(-1, info.columns), dtype=np.float64)
            if info.transposed:
                squares += squared.sum(axis=0)
            else:
                squares[start // info.columns : stop // info.columns] = squared.sum(axis=1)
        with np.errstate(all="ignore"):  # the merge finds what is not finite, and says where
            factors = widen(raw, info.magnitudes.dtype) / np.sqrt(squares)
            return factors.astype(FORMATS[info.dtype].real)

    def _read_right(self, info: LowRankTensor, ranks: slice) -> NDArray[Any]:
        """Kept for a while: the next chunks of a tensor, in any thread, need the same matrix."""
        key = (info, ranks.start)
        with self._keeping:
            right = self._kept.get(key)
        if right is None:
            right = self._read_matrix(info.right, ranks, slice(0, info.columns), info)
            with self._keeping:
                self._kept[key] = right
                while sum(each.size for each in self._kept.values()) > self._room:
                    del self._kept[next(iter(self._kept))]
        return right

    def _read_matrix(
        self, stored: TensorInfo, rows: slice, columns: slice, info: LowRankTensor
    ) -> NDArray[Any]:
        """A part of one of the two matrices of a tensor, in the type that it is multiplied in.

        Of more than two dimensions, all after the first are its columns.
        """
        if info.transposed:
            rows, columns = columns, rows
        width = stored.count // stored.shape[0]
        height = rows.stop - rows.start
        wanted = columns.stop - columns.start
        item = FORMATS[stored.dtype].itemsize
        raw = np.empty((height, wanted * item), np.uint8)
        reads = raw.reshape(1, -1) if wanted == width else raw  # whole rows are one read
        for row, part in enumerate(reads, rows.start):
            self.read_bytes(part.data, stored, (row * width + columns.start) * item)
        values = widen(raw.reshape(-1), stored.dtype).reshape(height, wanted)
        return np.ascontiguousarray(
            values.T if info.transposed else values, FORMATS[info.dtype].real
        )


# --- which way matrices are stored ---------------------------------------------------------------


def find_ways(tensors: Mapping[str, TensorInfo]) -> Ways:
    """By module: whether the matrices in it are stored as inputs x outputs, as biases show.

    A bias has a value for each output; of a square matrix, that shows nothing.
    """
    ways = defaultdict[str, set[bool]](set)
    for name, info in tensors.items():
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1]:
            for module in accumulate(name.split("."), "{}.{}".format):
                ways[module].add(bias.shape == info.shape[1:])
    return ways


def find_transposed(name: str, ways: Ways) -> bool | None:
    """Whether a matrix is stored as inputs x outputs, as are its neighbours; None: nobody knows."""
    parts = name.split(".")
    known = (ways[".".join(parts[:count])] for count in range(len(parts), 0, -1))
    found = next(filter(None, known), {True, False})
    return True in found if len(found) == 1 else None
