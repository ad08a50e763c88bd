"""What of a delta is dropped, and what the rest is multiplied by: one entry for each scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from darelib.mask import keep_rate, keep_threshold

RANDOM: Final = "random"  # DARE's own


@dataclass(frozen=True)
class Drop:
    """A way to choose what is kept of a tensor."""

    threshold: Callable[[float], int]  # by drop rate: an element whose 16 mask bits are below it is kept
    keep_rate: Callable[[float], float]  # by drop rate: the share that is kept, and the default divisor of the rest


DROPS: Final = {RANDOM: Drop(keep_threshold, keep_rate)}


@dataclass(frozen=True)
class Thinning:
    """How one model's delta of one tensor is thinned."""

    drop_rate: float = 0.0
    drop: str = RANDOM
    divisor: float = 1.0  # of what is kept

    @property
    def threshold(self) -> int:
        return DROPS[self.drop].threshold(self.drop_rate)

    @property
    def keep_rate(self) -> float:
        return DROPS[self.drop].keep_rate(self.drop_rate)
