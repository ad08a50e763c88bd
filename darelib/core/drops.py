"""Drop schemes: which entries of a delta are kept, and the factor that rescales them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final, NamedTuple

from darelib.core.mask import MASK_BITS, keep_rate, keep_threshold
from darelib.core.text import ConfigError

# What is kept: any (DARE's own); the largest; neither the largest nor the smallest; large ones
# more likely.
RANDOM = "random"
MAGNITUDE = "magnitude"
BREADCRUMBS = "breadcrumbs"
DELLA = "della"
# What is kept is divided by the probability to keep it; or multiplied so that the sum of |delta|
# stays what it was.
EXPECTATION, L1, NONE = RESCALES = ("expectation", "l1", "none")
# A sum of |delta| that is smaller cannot be restored.
LEAST_SUM: Final = 1e-7


@dataclass(frozen=True)
class Drop:
    """A way to choose what is kept of a tensor: by its mask's bits alone, by size, or by both."""

    card: tuple[str, str]  # for a model card: whose way of dropping it is, and what it does
    # By drop rate: what has mask bits below it is kept.
    threshold: Callable[[float], int] = lambda _: 1 << MASK_BITS
    # By drop rate: the share that is kept.
    keep_rate: Callable[[float], float] = lambda rate: 1 - rate
    rescale: str = EXPECTATION  # where the user does not say
    # The settings that mean something to it, with its defaults.
    settings: Mapping[str, float] = field(default_factory=dict)
    # By size: of n entries, counted from the largest down, the numbers of the last and of the first
    # that are kept.
    ends: Callable[[Thinning, int], tuple[int, int]] | None = None
    # Raises an error for numbers that do not go together.
    check: Callable[[Thinning], None] = lambda _: None
    # By size and bits: thresholds for ranks, from the smallest up, in a row of so many entries.
    thresholds: Callable[[Thinning, Any, int], Any] | None = None


class End(NamedTuple):
    """The |delta| of an entry that is found by its number, counted from the largest down."""

    size: float
    number: int  # among those of its size
    equal: int  # how many there are


class Bounds(NamedTuple):
    """Between which |delta| is kept; of those that equal one, by mask bits below a threshold."""

    low: float
    high: float
    at_low: int
    at_high: int


@dataclass(frozen=True)
class Thinning:
    """How one model's delta of one tensor is thinned."""

    drop_rate: float = 0.0
    drop: str = RANDOM
    options: Mapping[str, float] = field(default_factory=dict, hash=False)  # the scheme's settings
    rescale: str = EXPECTATION
    divisor: float = 1.0  # of what is kept, where that is one number and known beforehand

    @property
    def scheme(self) -> Drop:
        """Where nothing is dropped, all schemes are one."""
        return DROPS[self.drop if self.drop_rate else RANDOM]

    @property
    def threshold(self) -> int:
        return self.scheme.threshold(self.drop_rate)

    @property
    def keep_rate(self) -> float:
        return self.scheme.keep_rate(self.drop_rate)

    @property
    def restores_sum(self) -> bool:
        return self.rescale == L1 and self.drop_rate > 0

    @property
    def divides_each(self) -> bool:
        """Whether each entry is divided by its own probability to be kept."""
        return self.rescale == EXPECTATION and self.scheme.thresholds is not None

    def raise_to(self, drop_rate: float) -> Thinning:
        """The same at this drop rate, if it is higher."""
        if self.drop_rate >= drop_rate:
            return self
        divisor = self.divisor
        if self.rescale == EXPECTATION and divisor == self.keep_rate:
            divisor = DROPS[self.drop].keep_rate(drop_rate)
        return replace(self, drop_rate=drop_rate, divisor=divisor)

    def list_ends(self, count: int) -> tuple[int, ...]:
        """The last and the first that are kept of so many entries, by size, if any are."""
        last, first = self.scheme.ends(self, count) if self.scheme.ends else (0, 1)
        return (last, first) if last >= first else ()

    def find_bounds(self, ends: Sequence[End]) -> Bounds | None:
        """By the last and the first that are kept, if any are.

        Of those that equal one of them, many where models are stored in 16 bits, as many are kept,
        at random, as there is room for in expectation.
        """
        if not self.scheme.ends:
            return None
        last, first = ends or (End(math.inf, 1, 1), End(math.inf, 1, 1))
        low_share = last.number / last.equal
        high_share = 1 - (first.number - 1) / first.equal
        if last.size == first.size:
            low_share = high_share = (last.number - first.number + 1) / last.equal
        at_low, at_high = (round(share * (1 << MASK_BITS)) for share in (low_share, high_share))
        return Bounds(last.size, first.size, at_low, at_high)

    def find_thresholds(self, ranks: Any, width: int) -> Any:
        """ranks: as float64, in an array of NumPy or torch."""
        return self.scheme.thresholds(self, ranks, width) if self.scheme.thresholds else None

    def find_factor(self, size: float, kept: float) -> float:
        """What is kept is multiplied by it. size, kept: the sums of |delta| before and after."""
        return size / kept if self.restores_sum and min(size, kept) >= LEAST_SUM else 1.0


def is_random(drop: str | Sequence[str]) -> bool:
    """Whether a setting, of all models or of each, drops at random only."""
    return {RANDOM} == ({drop} if isinstance(drop, str) else set(drop))


def complement(share: float) -> float:
    """What is left: 0.1, and not 0.09999999999999998, for 0.9."""
    return float(1 - Decimal(repr(float(share))))


def _largest(thinning: Thinning, count: int) -> tuple[int, int]:
    return max(1, int(complement(thinning.drop_rate) * count)), 1


def _middle(thinning: Thinning, count: int) -> tuple[int, int]:
    """Below the largest, unless too few would be left. Without any, first comes after last."""
    kept = int(complement(thinning.drop_rate) * count)
    last = min(count, kept + int(thinning.options["gamma"] * count))
    return last, last - kept + 1


def _rise(thinning: Thinning, ranks: Any, width: int) -> Any:
    places = ranks / (width - 1) if width > 1 else ranks + 0.5
    epsilon = thinning.options["epsilon"]
    rates = (1 - thinning.drop_rate - epsilon) + 2 * epsilon * places
    return (rates * (1 << MASK_BITS)).round().clip(1)


def _check_rise(thinning: Thinning) -> None:
    rate = thinning.drop_rate
    epsilon = thinning.options["epsilon"]
    low = 1 - rate - epsilon
    high = 1 - rate + epsilon
    if rate > 0 and not (low > 1e-9 and high < 1 - 1e-9):
        raise ConfigError(
            f"with drop_rate {rate:g} and epsilon {epsilon:g}, {thinning.drop} would keep entries "
            f"with probabilities from {low:.4g} to {high:.4g}",
            f"give an epsilon below {min(rate, 1 - rate):.4g}, "
            f"or a drop_rate between {epsilon:.4g} and {1 - epsilon:.4g}",
        )


DROPS: Final = {
    RANDOM: Drop(
        ("[DARE](https://arxiv.org/abs/2311.03099) (drop and rescale)", "at random"),
        keep_threshold,
        keep_rate,
    ),
    MAGNITUDE: Drop(
        ("the trim of [TIES](https://arxiv.org/abs/2306.01708)", "by size, the smallest first"),
        rescale=NONE,
        ends=_largest,
    ),
    BREADCRUMBS: Drop(
        (
            "[Model Breadcrumbs](https://arxiv.org/abs/2312.06795)",
            "by size, the smallest and the largest",
        ),
        rescale=NONE,
        settings={"gamma": 0.01},  # share of the largest to drop
        ends=_middle,
    ),
    DELLA: Drop(
        (
            "[DELLA](https://arxiv.org/abs/2406.11617)",
            "at random, small ones more often than large ones",
        ),
        settings={"epsilon": 0.15},  # how far keep rates lie around 1 - drop_rate
        check=_check_rise,
        thresholds=_rise,
    ),
}
# The settings that mean something to some drops only.
DROP_SETTINGS: Final = tuple(
    dict.fromkeys(name for drop in DROPS.values() for name in drop.settings)
)
