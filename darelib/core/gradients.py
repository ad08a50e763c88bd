"""Gradients: numbers that change over the layers of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# The first part of a dotted name that is a number, and what is before it; no model has a billion
# layers.
LAYER: Final = re.compile(r"(.*?\.)??([0-9]{1,9})(?:\.|\Z)", re.DOTALL)

MAX_NUMBERS: Final = 1000  # of a gradient: each of them is checked, and models have fewer layers


@dataclass(frozen=True)
class Gradient:
    """A number that changes over the layers: these at even distances, and lines between them."""

    numbers: tuple[float, ...]

    def at(self, depth: float) -> float:
        """Its value at a depth from 0, the first layer, to 1, the last."""
        place = depth * (len(self.numbers) - 1)
        share = place % 1
        low = self.numbers[int(place)]
        high = self.numbers[min(int(place) + 1, len(self.numbers) - 1)]
        return (1 - share) * low + share * high


def freeze(value: Any) -> Any:
    """A setting with tuples for lists and Gradients for tables like {gradient = [0.9, 0.5]}.

    Numbers and arrays of NumPy become Python's.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict) and value.keys() == {"gradient"}:
        numbers = freeze(value["gradient"])
        is_right = isinstance(numbers, tuple) and 0 < len(numbers) <= MAX_NUMBERS
        return Gradient(numbers) if is_right else value
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def value_at(value: Any, depth: float) -> Any:
    """What a setting is at a depth."""
    if isinstance(value, tuple):
        return tuple(value_at(entry, depth) for entry in value)
    return value.at(depth) if isinstance(value, Gradient) else value


def find_depths(value: Any) -> set[float]:
    """Where the lines of a setting meet: between those, it is straight."""
    if isinstance(value, tuple):
        return {depth for entry in value for depth in find_depths(entry)}
    steps = len(value.numbers) - 1 if isinstance(value, Gradient) else 0
    return {k / steps for k in range(steps + 1)} if steps else {0.0}


def count_layers(names: Iterable[str]) -> dict[str, int]:
    """How many layers there are of each kind: by what is before the number in a tensor's name."""
    counts: dict[str, int] = {}
    for match in filter(None, map(LAYER.match, names)):
        kind, number = match.groups()
        counts[kind] = max(counts.get(kind, 0), int(number) + 1)
    return counts


def depth_of(name: str, layers: Mapping[str, int]) -> float:
    """How deep a tensor is: from 0 in the first layer to 1 in the last; 0 outside of the layers."""
    match = LAYER.match(name)
    if not match or match[1] not in layers:
        return 0.0
    last = layers[match[1]] - 1
    return int(match[2]) / last if last else 1.0
