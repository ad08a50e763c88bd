"""Which way matrices are stored: outputs x inputs, as most are, or the other way, as GPT-2's."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from typing import TypeAlias

from darelib.models.tensorfile import TensorInfo

Ways: TypeAlias = Mapping[str, set[bool]]


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
