"""How to merge one tensor, all rules considered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from darelib.core.drops import Thinning

# Where vectors that are combined start: deltas from the base, or values from zero.
BASE: Final = "base"
ZERO: Final = "zero"
Options = Mapping[str, float]  # numbers that a method has of its own, by name


@dataclass(frozen=True, eq=False)
class TensorSettings:
    """How to merge one tensor, all rules considered; what is per model, in the models' order."""

    method: str
    thinnings: tuple[Thinning, ...]
    weights: tuple[float, ...]
    normalize: bool  # whether weights are divided by their sum
    lambda_coeff: float
    origin: str = BASE
    options: Options = field(default_factory=dict)

    @property
    def drop_rates(self) -> tuple[float, ...]:
        return tuple(thinning.drop_rate for thinning in self.thinnings)

    @property
    def divisors(self) -> tuple[float, ...]:
        return tuple(thinning.divisor for thinning in self.thinnings)
