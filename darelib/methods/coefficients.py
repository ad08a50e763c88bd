"""How one tensor is merged: its settings, and the numbers to multiply by and to compare with, from
what looks have found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from darelib.core.arrays import Array, library
from darelib.core.drops import Bounds, Thinning

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


@dataclass(frozen=True)
class Piece:
    """Neighbouring entries of a tensor, as arrays of NumPy or torch."""

    base: Array
    rows: Sequence[Array]  # the thinned deltas of each model that has the tensor, scaled
    start: int = 0  # the place of the first entry in the tensor
    width: int = 1  # of the tensor's rows

    def spread(self, by_row: Array) -> Array:
        """What rows of the tensor have, for each entry, in the type of the base's values."""
        lib = library(by_row)
        count = len(self.base)
        first = self.start // self.width
        last = -(-(self.start + count) // self.width)
        rows = lib.broadcast_to(by_row[first:last, None], (last - first, self.width)).reshape(-1)
        own = rows[self.start - first * self.width :][:count]
        return lib.asarray(own, dtype=self.base.dtype)


@dataclass
class Found:
    """What looks have found out about one tensor so far, for each model that has it."""

    # Of the |delta| that the drop keeps, where it is by size.
    bounds: tuple[Bounds | None, ...] = ()
    factors: tuple[float, ...] = ()  # that restore the sum of |delta|
    floors: tuple[float, ...] = ()  # the smallest |delta| that trim keeps
    # Not by model: the scalar products of all thinned models, each with itself first.
    products: tuple[float, ...] = ()
    width: int = 1  # of the tensor's rows
    change: Any = None  # the merged delta itself, where a method takes matrices as a whole
    own: dict[str, Any] = field(default_factory=dict)  # what the method's own looks have found


@dataclass(frozen=True)
class Coefficients:
    """What a kernel multiplies by and compares with; a row for each model that has the tensor."""

    scales: tuple[float, ...]  # of the kept deltas
    # ties divides by those of the models that agree, added to the first share.
    weights: tuple[float, ...]
    bounds: tuple[Bounds | None, ...]  # of the |delta| that the drop keeps, where it is by size
    floors: tuple[float, ...]  # trim and ram keep what is at least as large
    base_share: float = 0.0  # how much of the base itself the merged delta gets
    first_share: float = 0.0
    own: Mapping[str, Any] = field(default_factory=dict)  # what the method's definition needs


def weigh(
    settings: TensorSettings,
    models: Sequence[int],
    found: Found,
    weights: Sequence[float] | None = None,
    base_share: float = 0.0,
    own: Mapping[str, Any] | None = None,
) -> Coefficients:
    """A model's kept deltas are multiplied by its weight over its divisor, and by its factor."""
    weights = settings.weights if weights is None else weights
    scaled = zip(models, found.factors or (1.0,) * len(models), strict=True)
    return Coefficients(
        scales=tuple(weights[i] / settings.divisors[i] * factor for i, factor in scaled),
        weights=tuple(weights[i] for i in models),
        bounds=found.bounds or (None,) * len(models),
        floors=found.floors or (0.0,) * len(models),
        base_share=base_share,
        own=found.own if own is None else own,
    )


def weigh_from_origin(
    settings: TensorSettings,
    models: Sequence[int],
    found: Found,
    weights: Sequence[float] | None = None,
) -> Coefficients:
    """From zero, the base gets what the weights lack of 1; those of models without the tensor,
    which have the base's, count.
    """
    weights = settings.weights if weights is None else weights
    is_zero = settings.origin == ZERO
    return weigh(settings, models, found, weights, math.fsum(weights) - 1 if is_zero else 0.0)


def weigh_for_look(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """Looks see the thinned deltas as they are, without weights."""
    return weigh(settings, models, found, (1.0,) * len(settings.divisors))
