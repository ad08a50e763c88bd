"""LoRA adapters: two small matrices for each tensor that they change, seen as tensors of the base.

An element is scale * (left @ right), with the products added in the order of the rank, so that it
has the same bits whatever range of elements is read.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS, STORED_BITS, widen
from darelib.core.text import DareError, count_of
from darelib.core.tuning import TUNING
from darelib.kernels import Kernel, KernelSpec
from darelib.models.checkpoint import EMBEDDINGS, HEADS, Checkpoint, Layout
from darelib.models.source import Source
from darelib.models.tensorfile import TensorInfo

UNLOAD_HINT: Final = (
    "merge it into the base with PEFT's merge_and_unload, and use the result as a model"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTensor(TensorInfo):
    """A tensor, or a change to one, that is scale * left @ right."""

    left: TensorInfo  # rows x rank, or rank x rows if it is transposed
    right: TensorInfo  # rank x columns, or columns x rank
    rank: int
    columns: int
    transposed: bool
    scale: float
    # The tensor that it changes, where that was saved with it; None: the base's.
    whole: TensorInfo | None = None

    @property
    def stored_bytes(self) -> int:
        return self.left.nbytes + self.right.nbytes + (self.whole.nbytes if self.whole else 0)

    @property
    def held_bytes(self) -> int:
        """What a thread that reads it keeps: all of the right matrix."""
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
                f"the base {source.name!r} is a LoRA adapter",
                "give the model that it was trained on",
            )
        super().__init__(source, layout)
        self._base = base
        self._kernels: Mapping[KernelSpec, Kernel] = {}
        self._room = 0  # elements of a matrix that a thread may hold
        self._held = threading.local()
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

    def _describe(self, base: Checkpoint) -> None:
        """Set what others ask about this kind of input."""
        pairs = [info for info in self.tensors.values() if isinstance(info, LowRankTensor)]
        self.specs = frozenset(pair.spec for pair in pairs)
        self.held_bytes = max((pair.held_bytes for pair in pairs), default=0)
        ranks = sorted({pair.rank for pair in pairs})
        ends = " to ".join(map(str, sorted({*ranks[:1], *ranks[-1:]})))
        kind = f"LoRA of rank {ends}" if ends else "LoRA"
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

    def prepare(self, kernels: Mapping[KernelSpec, Kernel], readers: int) -> None:
        self._kernels = kernels
        self._room = TUNING.expand_elements // readers

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Of a product, the bytes that it would have if it were stored."""
        if not isinstance(info, LowRankTensor):
            super().read_bytes(view, info, start)
        elif view:
            made = np.frombuffer(view, FORMATS[info.dtype].real)
            self._expand(info, start // made.itemsize, made)

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
        height = rows.stop - rows.start
        step = max(1, self._room // max(info.columns, height))
        whole = None
        if height * info.rank <= self._room:  # of all ranks it is one read; of some, one a row
            whole = self._read_matrix(info.left, rows, slice(0, info.rank), info)
        for k in range(0, info.rank, step):
            ranks = slice(k, min(k + step, info.rank))
            if whole is None:
                left = self._read_matrix(info.left, rows, ranks, info)
            else:
                left = np.ascontiguousarray(whole[:, ranks])
            kernel(left, self._read_right(info, ranks), made, start % info.columns, k)
        with np.errstate(over="ignore"):  # the merge finds what is out of range, and says where
            made *= made.dtype.type(info.scale)
        if info.whole is not None:
            raw = np.empty(made.size * STORED_BITS[info.whole.dtype] // 8, np.uint8)
            self.read(info.whole, start, made.size, raw)
            made += widen(raw, info.whole.dtype)

    def _read_right(self, info: LowRankTensor, ranks: slice) -> NDArray[Any]:
        """Kept while a thread reads the same tensor: its next chunk needs the same matrix."""
        if getattr(self._held, "key", None) != (info, ranks):
            self._held.right = self._read_matrix(info.right, ranks, slice(0, info.columns), info)
            self._held.key = info, ranks
        return cast("NDArray[Any]", self._held.right)

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
