"""What is known of a tensor, and how its values are stored: plainly, or in an encoding of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

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


@dataclass(frozen=True, eq=False)
class Encoding:
    """Values as they are. An encoding of its own says what differs: how it is read, and how it is
    written again.
    """

    kind: ClassVar[str] = ""  # what to call it; plain values need no name
    # False: it is copied, and makes no sense without what it belongs to.
    merges: ClassVar[bool] = True
    rereads: ClassVar[bool] = True  # whether a merge reads the chunks that its looks read
    hint: ClassVar[str] = ""  # what a model must have to be read
    # What goes with it, where it is not kept: keys of config.json, and files of a model directory.
    config_keys: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ()

    @property
    def looks(self) -> tuple[type[Look], ...]:
        """What must be known of the merged tensor before it can be written."""
        return ()

    def stored_bytes(self, info: TensorInfo) -> int:
        return info.nbytes

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        model.read_bytes(into.data, info, start * STORED_BITS[info.dtype] // 8)

    def read_stored(self, model: Input, info: TensorInfo, start: int, view: memoryview) -> None:
        """Read bytes as they are, from one of them on."""
        model.read_bytes(view, info, start)

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
    is_delta: bool = False  # its values are changes to the base already, and not the changed tensor
    encoding: Encoding = PLAIN
    folder: str = ""  # of a module that is stored apart: its name starts with that
    # Of one that was thinned before, and packed: by which rate, which share of its changes that
    # left, what it was thinned against (where its mask drops, it has the values of this), and what
    # its mask is drawn by.
    drop_rate: float = 0.0
    share: float = 1.0
    base: TensorInfo | None = None
    mask_name: str | None = None

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
    def added_rank(self) -> int:
        """Of a change that is a product of two thin matrices: their rank; else 0."""
        return 0

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

        base: the same of info.base, if they have just been read.
        """
        info.encoding.read(self, info, start, count, into)

    def read_factors(self, info: TensorInfo) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """The two matrices whose product a change is, in float64; None: it is not stored so."""
        return None

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Read bytes of what is stored, from one of them on."""
        raise NotImplementedError

    def sample(self, name: str, info: TensorInfo, start: int, count: int) -> NDArray[Any]:
        import numpy as np

        raw = np.empty(count * FORMATS[info.dtype].itemsize, np.uint8)
        self.read(info, start, count, raw)
        return widen(raw, info.dtype)
