"""How to merge one tensor, all rules considered."""

from dataclasses import dataclass
from typing import Final

from darelib.core.drops import Thinning

# Where what is combined starts: deltas from the base, or values from zero.
BASE: Final = "base"
ZERO: Final = "zero"


@dataclass(frozen=True, eq=False)
class TensorSettings:
    """How to merge one tensor, all rules considered; what is per model, in the models' order."""

    method: str
    thinnings: tuple[Thinning, ...]
    weights: tuple[float, ...]
    normalize: bool  # whether weights are divided by their sum
    lambda_coeff: float
    keep_ratio: float = 1.0  # share of the surviving entries that trim keeps
    origin: str = BASE
    slerp_t: float = 0.5
    max_iter: float = 10.0  # karcher: so many steps at most
    tol: float = 1e-5  # karcher: a shorter step is none, and so is a shorter vector
    swap_t: float = 1e-4  # nearswap: how far an entry may move
    threshold: float = 1e-5  # ram, ramplus: a smaller |delta| is none
    boost: float = 0.1  # ramplus: how much of the ratio below what one model changes gains
    boost_limit: float = 0.2  # ramplus: of the entries it shares to those that are its own
    ridge: float = 1.0  # wudi: what is added to the Gram matrices, whose mean diagonal is 1
    # wudi: how large the merged delta may be, in mean sizes of the models'; 0: as it comes.
    norm_limit: float = 1.5
    scale: float = 1.0  # passthrough: what the base is multiplied by

    @property
    def drop_rates(self) -> tuple[float, ...]:
        return tuple(thinning.drop_rate for thinning in self.thinnings)

    @property
    def divisors(self) -> tuple[float, ...]:
        return tuple(thinning.divisor for thinning in self.thinnings)
