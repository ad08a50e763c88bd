"""Tensors and their encodings: values are stored plainly, or made of other tensors.

FP8, a LoRA, a packed tensor, rows in another order, pieces of other tensors: each is an encoding.
It knows how it is read (always dense, always plain numbers), what is stored, and how it is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from darelib.core.formats import FORMATS, STORED_BITS, widen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from darelib.methods.looks import Look

# Writes bytes of one of a tensor's outputs, by its name, from a place in it on.
Put: TypeAlias = Callable[[str, memoryview, int], None]


@dataclass(frozen=True)
class Target:
    """A tensor that is to be written: whose place it takes in which model, and by what."""

    model: Input
    name: str
    info: TensorInfo  # of the base's
    dtype: str  # of the merged values
    put: Put


class Product(NamedTuple):
    """The two stored matrices of a LoRA: their product is scale * left @ right."""

    left: TensorInfo  # rows x rank; transposed: rank x rows
    right: TensorInfo  # rank x columns; transposed: columns x rank
    rank: int
    transposed: bool  # whether the base stores inputs x outputs
    scale: float
    magnitudes: TensorInfo | None  # of DoRA, one for each output


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a tensor, one after the other."""

    info: TensorInfo | None  # None: zeros, where nothing is changed
    start: int
    count: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Encoding:
    """Values that are stored plainly. Other encodings say what differs."""

    kind: ClassVar[str] = ""  # what to call it, where it is quantised
    merges: ClassVar[bool] = True  # False: it is copied, and belongs to another tensor
    rereads: ClassVar[bool] = True  # whether a merge reads the chunks that its looks read
    hint: ClassVar[str] = ""  # what a model must have to be read
    # What goes with it, where it is not kept: keys of config.json, and files of a model directory.
    config_keys: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ()

    product: Product | None = None  # of a LoRA
    # Of a packed tensor: its drop rate, the share of its entries that is stored, the base's tensor,
    # which has the values of all others, and the name that its mask is drawn by.
    drop_rate: float = 0.0
    share: float = 1.0
    base: TensorInfo | None = None
    mask_name: str | None = None

    @property
    def is_delta(self) -> bool:
        """Whether its values are changes to the base, not changed values."""
        return False

    @property
    def looks(self) -> tuple[type[Look], ...]:
        """What must be known of the merged tensor before it can be written."""
        return ()

    def stored_bytes(self, info: TensorInfo) -> int:
        return info.nbytes

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        """Read values as bytes of the tensor's type."""
        model.read_bytes(into.data, info, start * STORED_BITS[info.dtype] // 8)

    def read_over(
        self,
        model: Input,
        info: TensorInfo,
        start: int,
        count: int,
        into: NDArray[np.uint8],
        base: NDArray[np.uint8],
    ) -> None:
        """Read values, where those of self.base have just been read."""
        self.read(model, info, start, count, into)

    def read_stored(self, model: Input, info: TensorInfo, start: int, view: memoryview) -> None:
        """Read bytes, from one of them on."""
        model.read_bytes(view, info, start)

    def read_factors(self, info: TensorInfo) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """The two matrices whose product a change is, in float64; None: it is not stored so."""
        return None

    def list_pieces(self, info: TensorInfo) -> tuple[Piece, ...]:
        """The stored tensors that a tensor is made of: itself, unless those are others."""
        return (Piece(info, 0, info.count),)

    def revert(self, change: TensorInfo) -> TensorInfo:
        """A change to such a tensor, in the order of what it is made of."""
        return change

    def list_outputs(self, name: str, info: TensorInfo) -> dict[str, TensorInfo]:
        """All that is written for a tensor, by name. info: of its merged values."""
        return {name: info}

    def move(self, files: int, rename: Callable[[str], str]) -> Encoding:
        """The same in another model, whose files come after so many others, by other names."""
        return self

    def find_step(self, info: TensorInfo) -> int:
        """Elements that jobs are divided by."""
        return 1

    def count_held(self, info: TensorInfo, chunk: int) -> int:
        """Bytes that a thread holds while it writes."""
        return 0

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        """What writes the values of a job. look: the last one at the tensor."""
        return Writer(target, start)


class Derived(Encoding):
    """Values made of other tensors. Their bytes are those of the same values stored plainly."""

    def read_stored(self, model: Input, info: TensorInfo, start: int, view: memoryview) -> None:
        import numpy as np

        item = STORED_BITS[info.dtype] // 8  # which divides all chunks
        into = np.frombuffer(view, np.uint8)
        self.read(model, info, start // item, len(view) // item, into)


class Writer:
    """Writes the merged values of one job, in order."""

    def __init__(self, target: Target, start: int) -> None:
        self._target = target
        self._itemsize = FORMATS[target.dtype].itemsize
        self._place = start * self._itemsize

    def add(self, merged: NDArray[np.uint8], base: NDArray[np.uint8], count: int) -> None:
        """The next values, and the base's, as bytes."""
        size = count * self._itemsize
        self._target.put(self._target.name, merged.data[:size], self._place)
        self._place += size

    def finish(self) -> None:
        """Write what is still held."""


PLAIN: Final = Encoding()


@dataclass(frozen=True, slots=True)  # there may be very many
class TensorInfo:
    """Where a tensor is in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    file: int = 0  # which of the checkpoint's files
    encoding: Encoding = PLAIN
    folder: str = ""  # of a module that is stored apart: its name starts with that

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return -(-self.count * STORED_BITS[self.dtype] // 8)

    @property
    def stored_bytes(self) -> int:
        return self.encoding.stored_bytes(self)

    @property
    def is_delta(self) -> bool:
        return self.encoding.is_delta

    @property
    def added_rank(self) -> int:
        """Of a change that is a product of two thin matrices: their rank; else 0."""
        product = self.encoding.product
        return product.rank if product and self.is_delta else 0

    def place_of(self, element: int) -> list[int]:
        """The indices of an element, of any number of dimensions: NumPy knows 64."""
        places = []
        for side in reversed(self.shape):
            element, place = divmod(element, side)
            places.append(place)
        return places[::-1]


class Described:
    """What a plan knows of a model, wherever it is: its tensors by name, and what goes with
    them.
    """

    name: str
    tensors: dict[str, TensorInfo]
    partial: ClassVar[bool] = False  # whether it holds only what it changes
    seed: int | None = None  # of its mask, if that was decided before
    unused: tuple[str, ...] = ()  # what it holds that the base has no place for
    # Of the base's tensors: those that it need not have, since it is only a part of such a model.
    outside: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    # What is known of the configuration of the model that an adapter was trained on.
    base_config: Mapping[str, Any] = MappingProxyType({})
    # How the names of its files begin, by folder: "" is its own, all others are a pipeline's.
    stems: Mapping[str, str] = MappingProxyType({})

    @property
    def components(self) -> list[str]:
        """The folders of a pipeline; none of any other model."""
        return [folder for folder in self.stems if folder]

    @cached_property
    def config(self) -> dict[str, Any]:
        return {}

    def find_twins(self, name: str) -> tuple[str, ...]:
        """All names of one and the same tensor, if it has several."""
        return ()

    def is_same_as(self, other: Any) -> bool:
        raise NotImplementedError

    def sample(self, name: str, info: TensorInfo, start: int, count: int) -> NDArray[Any]:
        """Some values of a tensor, as floats."""
        raise NotImplementedError


class Input(Described):
    """A model in files: its values can be read, always dense, always plain numbers."""

    def read(
        self,
        info: TensorInfo,
        start: int,
        count: int,
        into: NDArray[np.uint8],
        base: NDArray[np.uint8] | None = None,
    ) -> None:
        """Read values of a tensor, as bytes of its type, into exactly as many bytes.

        base: the same elements of info.encoding.base, if they have just been read.
        """
        if base is None:
            info.encoding.read(self, info, start, count, into)
        else:
            info.encoding.read_over(self, info, start, count, into, base)

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Read bytes of a tensor that is stored plainly, from one of them on."""
        raise NotImplementedError

    def sample(self, name: str, info: TensorInfo, start: int, count: int) -> NDArray[Any]:
        import numpy as np

        raw = np.empty(count * FORMATS[info.dtype].itemsize, np.uint8)
        self.read(info, start, count, raw)
        return widen(raw, info.dtype)


def drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end, which say nothing about where its elements are."""
    end = max((k for k, side in enumerate(shape, 1) if side != 1), default=0)
    return shape[:end]
