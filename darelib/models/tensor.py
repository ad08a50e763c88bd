"""What a tensor of a model is: something with a type and a shape whose values can be read.

Values are stored plainly, or made of other tensors: scaled, multiplied, scattered, reordered, put
together. Each way is a class of its own, in its own file. Nobody else asks which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from darelib.core.formats import STORED_BITS
from darelib.models.forms import PLAIN, Form, Sized

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array = Any
Factors = tuple[Array, Array]  # whose product a change is


class FactorPair(NamedTuple):
    """The two stored matrices of a LoRA: their product is scale * left @ right."""

    left: Tensor  # rows x rank; transposed: rank x rows
    right: Tensor  # rank x columns; transposed: columns x rank
    rank: int
    transposed: bool  # whether the base stores inputs x outputs
    scale: float
    magnitudes: Tensor | None  # of DoRA, one for each output


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of a tensor, one after the other."""

    tensor: Tensor | None  # None: zeros, where nothing is changed
    start: int
    count: int


class Known(NamedTuple):
    """A tensor of the base, and values of it that have just been read."""

    tensor: Tensor
    values: Array


@dataclass(frozen=True, eq=False)
class Tensor(Sized):
    """A tensor of a model. Its type is that of its values, if they were stored plainly."""

    kind: ClassVar[str] = ""  # what to call it, where it is quantised
    merges: ClassVar[bool] = True  # False: it is copied, and belongs to another tensor
    hint: ClassVar[str] = ""  # what a model must have to be read
    # What goes with it, where it is not kept: keys of config.json, and files of a model directory.
    config_keys: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ()
    # Without types, so that they are no fields. What only a LoRA has: its factors.
    product = None  # type: FactorPair | None
    # What only a packed tensor has: its drop rate, the share of its entries that is stored, the
    # base's tensor, which has the values of all others, and the name that its mask is drawn by.
    drop_rate = 0.0
    share = 1.0
    base = None  # type: Tensor | None
    mask_name = None  # type: str | None

    dtype: str
    shape: tuple[int, ...]
    folder: str = field(default="", kw_only=True)  # of a module stored apart: its name has that

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        """Values as float32, or float64 where these are stored.

        known: the same elements of the base, if it was read before.
        """
        raise NotImplementedError

    def read_into(self, values: Array, start: int, known: Known | None = None) -> None:
        """Fill an array with values, from one of them on."""
        values[:] = self.read(start, len(values), known)

    def read_raw(self, start: int, size: int) -> NDArray[Any]:
        """Bytes, as if the values were stored plainly, from one of them on."""
        from darelib.arithmetic.stored import encode

        item = STORED_BITS[self.dtype] // 8  # which divides all ranges
        return encode(self.read(start // item, size // item), self.dtype).view("u1")

    @property
    def is_delta(self) -> bool:
        """Whether its values are changes to the base, not changed values."""
        return False

    @property
    def added_rank(self) -> int:
        """Of a change that is a product of two thin matrices: their rank; else 0."""
        return self.product.rank if self.product and self.is_delta else 0

    @property
    def stored_bytes(self) -> int:
        """That are read for all of it."""
        return self.nbytes

    @property
    def form(self) -> Form:
        """How a merged tensor is written in its place."""
        return PLAIN

    def read_factors(self) -> Factors | None:
        """The two matrices whose product a change is, in float64; None: it is not stored so."""
        return None

    def list_spans(self) -> tuple[Span, ...]:
        """The stored tensors that it is made of: itself, unless those are others."""
        return (Span(self, 0, self.count),)

    def revert(self, change: Tensor) -> Tensor:
        """A change to such a tensor, in the order of what it is made of."""
        return change

    def rename(self, rename: Callable[[str], str]) -> Tensor:
        """The same in a model whose tensors have other names."""
        return self


class Described:
    """What a plan knows of a model, wherever it is: its tensors by name, and what goes with
    them.
    """

    name: str
    tensors: dict[str, Tensor]
    folder: Path | None = None  # of a model directory
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

    def read_tables(self) -> list[dict[str, Any]]:
        """Its whole configuration, and that of its text model."""
        return []

    def find_twins(self, name: str) -> tuple[str, ...]:
        """All names of one and the same tensor, if it has several."""
        return ()

    def is_same_as(self, other: Any) -> bool:
        raise NotImplementedError

    def sample(self, name: str, tensor: Tensor, start: int, count: int) -> Array:
        """Some values of a tensor, as floats."""
        return tensor.read(start, count)


def drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end, which say nothing about where its elements are."""
    end = max((k for k, side in enumerate(shape, 1) if side != 1), default=0)
    return shape[:end]
