"""What of a delta is dropped: one entry for each scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from darelib.mask import keep_rate, keep_threshold


@dataclass(frozen=True)
class Drop:
    """A way to choose what is kept of a tensor."""

    threshold: Callable[[float], int]  # by drop rate: an element whose 16 mask bits are below it is kept
    keep_rate: Callable[[float], float]  # by drop rate: the share that is kept, and the default divisor of the rest


RANDOM: Final = "random"  # DARE's own
DROPS: Final = {RANDOM: Drop(keep_threshold, keep_rate)}
