"""Which tensors are matrices, for methods that take a matrix as a whole."""

import math
from typing import Final, NamedTuple

# A side whose Gram matrix would be larger (a gigabyte of float32) is left out: a vocabulary's.
LONGEST_SIDE: Final = 16_384


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

    def count_operations(self, models: int) -> int:
        """Floating-point operations to merge all: Gram matrices, cubes, factors and solutions."""
        products = sum(models * side + 2 * side for side in self.sides)
        cubes = 2 * models * min(self.rows, self.columns)
        factors = sum(side**3 for side in self.sides) // 3
        return self.number * (self.size * (products + cubes) + factors)


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
