"""What is the same for arrays of NumPy and tensors of torch."""

import sys
from typing import Any

import numpy as np

from darelib.core.looks import fold_neighbours
from darelib.core.mask import TILE

Array = Any  # of one dimension, but for rows of a matrix


def library(array: Array) -> Any:
    """NumPy or torch: the names that are used here mean the same in both."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def fold_tiles(values: Array) -> Array:
    """The sum of each tile, by halves: first with second half, until one value is left."""
    lib = library(values)
    padding = lib.zeros_like(values[:1]).repeat(-len(values) % TILE)
    tiles = lib.concatenate([values, padding]).reshape(-1, TILE)
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def add_up(values: Array) -> float:
    """The sum, in float64: tiles by halves, then their sums by pairs of neighbours."""
    lib = library(values)
    return fold_neighbours(fold_tiles(lib.asarray(values, dtype=lib.float64)).tolist())
