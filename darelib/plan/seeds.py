"""The seed of each model's mask."""

from __future__ import annotations

from collections.abc import Sequence

from darelib.config import DareConfig
from darelib.models.inputs import Input


def find_seeds(config: DareConfig, inputs: Sequence[Input]) -> tuple[int, ...]:
    """The seed of each model's mask: the first one's and up, unless it was decided before."""
    return tuple(
        config.seed + i if model.seed is None else model.seed for i, model in enumerate(inputs[1:])
    )
