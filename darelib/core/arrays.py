"""Functions for arrays of NumPy and tensors of torch alike; neither is imported here."""

import sys
from typing import Any

from darelib.core.mask import TILE

Array = Any  # of one dimension, but for matrices


def library(array: Array) -> Any:
    """NumPy or torch: the names that are used of them mean the same in both."""
    numpy = sys.modules["numpy"]  # the kernels have loaded it
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
