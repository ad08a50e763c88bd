"""Functions for arrays of NumPy and tensors of torch alike, neither of which is imported here; and
which tensors are matrices.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from darelib.core.mask import TILE

Array = Any  # of one dimension, but for matrices


def library(array: Array) -> Any:
    """NumPy or torch: the names that are used of them mean the same in both."""
    numpy = sys.modules["numpy"]  # whoever has an array has loaded it
    is_numpy = isinstance(array, numpy.ndarray | numpy.generic)
    return numpy if is_numpy else sys.modules["torch"]


def divide(dividend: Array, divisor: Array) -> Array:
    """As IEEE 754 has it: NumPy does not warn of zeros and what is not finite."""
    lib = library(dividend)
    if lib.__name__ != "numpy":
        return dividend / divisor
    with lib.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return dividend / divisor


def fold_tiles(values: Array) -> Array:
    """The sum of each tile, by halves: first with second half, until one value is left."""
    lib = library(values)
    padding = lib.zeros_like(values[:1]).repeat(-len(values) % TILE)
    tiles = lib.concatenate([values, padding]).reshape(-1, TILE)
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def add_in_turn(sums: Array) -> float:
    """The sum, in float64, one after the other: in pieces as in one."""
    return float(library(sums).cumsum(sums, dtype="f8")[-1]) if len(sums) else 0.0


def fold_neighbours(values: list[float]) -> float:
    """A sum by pairs of neighbours: of 2^k values each, it is the same in pieces as in one."""
    while len(values) > 1:
        values = [*values, 0.0] if len(values) % 2 else values
        values = [values[k] + values[k + 1] for k in range(0, len(values), 2)]
    return values[0]


def add_up(values: Array) -> float:
    """The sum, in float64: tiles by halves, then their sums by pairs of neighbours."""
    lib = library(values)
    return fold_neighbours(fold_tiles(lib.asarray(values, dtype=lib.float64)).tolist())


Factors: TypeAlias = tuple[Array, Array]  # whose product a change is

# A side whose Gram matrix would be larger (a gigabyte of float32) is left out: a vocabulary's.
LONGEST_SIDE: Final = 16_384
# Of the largest eigenvalue, as float64 gives it: below that, it is rounding.
LEAST_SHARE: Final = 1e-13


class Matrices(NamedTuple):
    """A tensor as so many matrices of the same shape, one after the other."""

    number: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides that a matrix can be solved from."""
        return tuple(side for side in (self.rows, self.columns) if side <= LONGEST_SIDE)


def find_matrices(name: str, shape: tuple[int, ...]) -> Matrices | None:
    """A tensor's matrices: stacked experts are one each, a convolution is out x all the rest.

    None: it is no matrix, or both sides are too long.
    """
    if len(shape) < 2 or not math.prod(shape):
        return None
    is_stack = len(shape) == 3 and "experts" in name
    count = shape[0] if is_stack else 1
    rows = shape[1] if is_stack else shape[0]
    found = Matrices(count, rows, math.prod(shape) // (count * rows))
    return found if found.sides else None


def find_span(parts: Sequence[Array]) -> tuple[Array, list[Array]]:
    """The space of all columns, as orthonormal ones, and each part's columns in it.

    By the eigenvectors of their products, which takes a fifth of a factorisation's time; what is
    below a millionth of a part's size is not seen. A part of nothing but zeros spans nothing.
    """
    lib = library(parts[0])
    sizes = [float(lib.linalg.norm(part)) or 1.0 for part in parts]
    columns = lib.hstack([part / size for part, size in zip(parts, sizes, strict=True)])
    values, vectors = lib.linalg.eigh(columns.T @ columns)
    is_kept = values > LEAST_SHARE * max(values[-1], LEAST_SHARE)
    roots = lib.sqrt(values[is_kept])
    vectors = vectors[:, is_kept]
    ends = lib.cumsum([part.shape[1] for part in parts])[:-1]
    found = lib.split((vectors * roots).T, ends, axis=1)
    return columns @ (vectors / roots), [
        part * size for part, size in zip(found, sizes, strict=True)
    ]
