"""Tensors and their encodings: values are stored plainly, or made of other tensors.

FP8, a LoRA, a packed tensor, rows in another order, pieces of other tensors: each is an encoding.
It knows how it is read (always dense, always plain numbers), what is stored, and how it is written.
State dicts in memory have the same names, shapes and types that files have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from darelib.core.formats import DTYPES, FORMATS, STORED_BITS, widen
from darelib.core.text import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
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


class FactorPair(NamedTuple):
    """The two stored matrices of a LoRA: their product is scale * left @ right."""

    left: TensorInfo  # rows x rank; transposed: rank x rows
    right: TensorInfo  # rank x columns; transposed: columns x rank
    rank: int
    transposed: bool  # whether the base stores inputs x outputs
    scale: float
    magnitudes: TensorInfo | None  # of DoRA, one for each output


@dataclass(frozen=True, slots=True)
class Span:
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

    product: FactorPair | None = None  # of a LoRA
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

    def list_pieces(self, info: TensorInfo) -> tuple[Span, ...]:
        """The stored tensors that a tensor is made of: itself, unless those are others."""
        return (Span(info, 0, info.count),)

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


# --- state dicts in memory ------------------------------------------------------------------------

STATE_DICT_HINT: Final = (
    "give what model.state_dict() or safetensors.torch.load_file gives; DareMerger takes files"
)
# What safetensors calls torch's types.
STORED_NAMES: Final = {
    **DTYPES,
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}


def check_state_dict(what: str, given: object) -> None:
    from torch import Tensor

    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{what} must be a state dict, not of type {type(given).__name__}", STATE_DICT_HINT
        )
    kinds = {*map(type, given.values())}  # few, where there are many tensors
    if {*map(type, given)} <= {str} and all(issubclass(kind, Tensor) for kind in kinds):
        if any(map(attrgetter("is_meta"), given.values())):
            raise ConfigError(
                f"{what} has tensors without values, on the device meta",
                "load all of the model, without offloading",
            )
        return
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{what} must map names to tensors, not {name!r} to {type(value).__name__}",
                STATE_DICT_HINT,
            )


class StateDict(Described):
    """A state dict. What is known of its tensors is read in bulk: there may be thousands, and
    little time.
    """

    def __init__(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        from torch import Tensor

        self.name = name
        self.state = state
        self.names = tuple(state)
        self.values = list(state.values())
        self.shapes = tuple(map(attrgetter("shape"), self.values))
        self.dtypes = tuple(map(attrgetter("dtype"), self.values))
        self.devices = tuple(map(attrgetter("device"), self.values))
        self.addresses = tuple(map(Tensor.data_ptr, self.values))

    def choose(self, names: tuple[str, ...]) -> StateDict:
        if names == self.names:
            return self
        return StateDict(self.name, {name: self.state[name] for name in names})

    @cached_property
    def dense(self) -> tuple[bool, ...]:
        """Whether each tensor's values lie one after the other."""
        from torch import Tensor

        return tuple(map(Tensor.is_contiguous, self.values))

    def describe(self) -> None:
        """Make what a plan wants to know: for many tensors, that takes longer than to merge
        them.
        """
        # C64: another complex type, which is only copied.
        types = (STORED_NAMES.get(str(each).removeprefix("torch."), "C64") for each in self.dtypes)
        self.tensors = {
            name: TensorInfo(dtype, tuple(shape))
            for name, dtype, shape in zip(self.names, types, self.shapes, strict=True)
        }

    @cached_property
    def twins(self) -> tuple[tuple[str, ...], ...]:
        if len(set(self.addresses)) == len(self.addresses):
            return ()
        groups: dict[Any, list[str]] = {}
        for name, tensor in self.state.items():
            if tensor.numel():
                values = tensor.data_ptr(), tensor.shape, tensor.stride()
                groups.setdefault((*values, tensor.dtype, tensor.device), []).append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def find_twins(self, name: str) -> tuple[str, ...]:
        return self._twins_by_name.get(name, ())

    @cached_property
    def _twins_by_name(self) -> dict[str, tuple[str, ...]]:
        return {name: names for names in self.twins for name in names}

    def is_same_as(self, other: StateDict) -> bool:
        mine = self.addresses, self.names, self.shapes
        return mine == (other.addresses, other.names, other.shapes)

    def sample(self, name: str, info: TensorInfo, start: int, count: int) -> NDArray[Any]:
        import torch

        tensor = self.state[name].detach()
        places = torch.arange(start, start + count, device=tensor.device)
        return tensor.take(places).cpu().double().numpy()
