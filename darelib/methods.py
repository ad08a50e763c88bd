"""The ways to combine thinned deltas: one entry each, with its settings, what it must look up first, its formulas.

A kernel only multiplies, adds and compares; every number that it is given is computed here, once for all engines.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from darelib.drops import Thinning
from darelib.formats import DIGIT_BITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Beyond this cosine two directions count as one, and slerp is linear.
SLERP_LINEAR: Final = 0.9995
# Angles, sines and cosines are whole numbers of 2^-FRACTION_BITS where slerp computes with them.
FRACTION_BITS: Final = 128
PI: Final = 0x3243F6A8885A308D313198A2E03707344


@dataclass(frozen=True, eq=False)
class TensorSettings:
    """How to merge one tensor, all rules considered. What there is one of per model is in the order of the models."""

    method: str
    thinnings: tuple[Thinning, ...]
    weights: tuple[float, ...]
    normalize: bool  # whether weights are divided by their sum
    lambda_coeff: float
    keep_ratio: float  # share of the surviving entries that trim keeps
    slerp_t: float

    @property
    def drop_rates(self) -> tuple[float, ...]:
        return tuple(thinning.drop_rate for thinning in self.thinnings)

    @property
    def divisors(self) -> tuple[float, ...]:
        return tuple(thinning.divisor for thinning in self.thinnings)

    @property
    def returns_model(self) -> bool:
        """Whether the merge of a single model is that model: base + 1 * (finetuned - base).

        It is then taken as it is; computing it would lose bits where the base is much larger.
        """
        kept_whole = self.drop_rates == (0,) and self.divisors == (1,) and self.keep_ratio == 1
        return kept_whole and self.lambda_coeff == 1 and self.weights == (1,)


@dataclass(frozen=True)
class Coefficients:
    """What a kernel multiplies by and compares with; a row for each model that has the tensor."""

    scales: tuple[float, ...]  # of the kept deltas
    weights: tuple[float, ...]  # ties divides by those of the models that agree, added to the first share
    floors: tuple[float, ...]  # trim keeps what is at least as large
    base_share: float = 0.0  # how much of the base itself the merged delta gets
    first_share: float = 0.0


@dataclass(frozen=True)
class Method:
    """One way to combine."""

    card: Callable[[TensorSettings], str]  # what happens to the thinned deltas, for a model card
    kernel: str  # the kernel that merges a chunk
    settings: tuple[str, ...]  # those of the optional settings that mean something to it
    share: Callable[[Sequence[float] | None, int, bool], tuple[float, ...]]  # the weights, from those given, if any
    look: Callable[[TensorSettings], type[Look] | None]  # what must be found out first
    weigh: Callable[[TensorSettings, Sequence[int], Sequence[float] | None], Coefficients]  # by what was found
    show_weight: Callable[[TensorSettings, int], str] = lambda settings, i: f"{settings.weights[i]:.4g}"  # of a model
    models: int | None = None  # how many it takes, where it does not take any number
    normalize: bool = False  # whether weights are divided by their sum, where the user does not say
    shares_only: bool = False  # weights that are divided by their sum are shares of a whole: never negative


def weigh(
    settings: TensorSettings, models: Sequence[int], weights: Sequence[float] | None = None,
    floors: Sequence[float] | None = None, base_share: float = 0.0,
) -> Coefficients:  # fmt: skip
    """A model's kept deltas are multiplied by its weight over its divisor."""
    weights = settings.weights if weights is None else weights
    scales = tuple(weights[i] / settings.divisors[i] for i in models)
    return Coefficients(scales, tuple(weights[i] for i in models), tuple(floors or (0.0,) * len(models)), base_share)


def weigh_for_look(settings: TensorSettings, models: Sequence[int]) -> Coefficients:
    """Looks see the thinned deltas as they are, without weights."""
    return weigh(settings, models, (1.0,) * len(settings.divisors))


def rank_of_floor(keep_ratio: float, survivors: int) -> int:
    """Trim keeps so many of the surviving entries of a tensor, the largest, and all that equal the last of them."""
    return max(1, int(keep_ratio * survivors))


class Look:
    """Finds out what must be known of one whole tensor before it is merged: in passes, each of them jobs in any order.

    buffers are the kernels' (see darelib.kernels); jobs are taken one at a time, chunks from any thread.
    """

    kernel: str
    passes = 1
    found: tuple[float, ...] | None = None  # what weigh takes, after the last pass

    def __init__(self, settings: TensorSettings, models: Sequence[int], bits: int) -> None:
        """models: those that have the tensor. bits: of the floats to compute in."""
        self.settings, self.models, self.bits = settings, models, bits

    def describe(self, buffers: Any, number: int) -> None:
        """Set what its kernel must know in this pass."""

    def take_chunk(self, start: int, buffers: Any) -> None:
        """Take what the kernel found in the chunk that starts there."""

    def take_job(self, start: int, stop: int, buffers: Any) -> None:
        """Take what the kernel found in a job."""

    def conclude(self, number: int) -> None:
        """Draw the conclusion of this pass, of which all jobs have been taken."""


class TrimLook(Look):
    """The smallest |delta| that trim keeps, for each model: the digits of its bit pattern, one in each pass."""

    kernel = "count"

    def __init__(self, settings: TensorSettings, models: Sequence[int], bits: int) -> None:
        super().__init__(settings, models, bits)
        self.passes = bits // DIGIT_BITS
        self._prefixes = [0] * len(models)  # the digits found so far
        self._ranks = [0] * len(models)  # of the entry that is looked for, among those with that prefix
        self._counts: Any = 0

    def describe(self, buffers: Any, number: int) -> None:
        buffers.tensor["shift"] = self.bits - (number + 1) * DIGIT_BITS
        buffers.models["prefix"][: len(self.models)] = self._prefixes

    def take_job(self, start: int, stop: int, buffers: Any) -> None:
        self._counts = self._counts + buffers.counts[: len(self.models)].astype("i8")

    def conclude(self, number: int) -> None:
        for row, counts in enumerate(self._counts):
            self._find_digit(row, counts, number)
        self._counts = 0
        if number == self.passes - 1:
            (pattern, value), count = "Qd" if self.bits == 64 else "If", len(self.models)
            self.found = struct.unpack(f"<{count}{value}", struct.pack(f"<{count}{pattern}", *self._prefixes))

    def _find_digit(self, row: int, counts: NDArray[Any], number: int) -> None:
        """The digit of the last entry that is kept, counting from the largest down."""
        downwards = counts[::-1].cumsum()
        if number == 0:
            self._ranks[row] = rank_of_floor(self.settings.keep_ratio, int(downwards[-1]))
        place = int(downwards.searchsorted(self._ranks[row]))
        if place == len(counts):  # nothing survived the drop, so there is nothing to trim
            return
        self._ranks[row] -= int(downwards[place - 1]) if place else 0
        self._prefixes[row] = self._prefixes[row] << DIGIT_BITS | (len(counts) - 1 - place)


class ArcLook(Look):
    """The squared lengths and the scalar product of the two thinned models, between which slerp's arc goes."""

    kernel = "products"

    def __init__(self, settings: TensorSettings, models: Sequence[int], bits: int) -> None:
        super().__init__(settings, models, bits)
        self._chunks: dict[int, tuple[float, ...]] = {}

    def take_chunk(self, start: int, buffers: Any) -> None:
        self._chunks[start] = tuple(float(buffers.tensor[name][0]) for name in ("square_0", "square_1", "product"))

    def conclude(self, number: int) -> None:
        self.found = fold_columns([self._chunks.pop(start) for start in sorted(self._chunks)])


def fold_columns(chunks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(fold_neighbours(list(column)) for column in zip(*chunks, strict=True))


def fold_neighbours(values: list[float]) -> float:
    """A sum by pairs of neighbours: the same for a tensor in one piece as for pieces of 2^k values summed again."""
    while len(values) > 1:
        values = [*values, 0.0] if len(values) % 2 else values
        values = [values[k] + values[k + 1] for k in range(0, len(values), 2)]
    return values[0]


@lru_cache(64)
def slerp_weights(first: float, second: float, product: float, t: float) -> tuple[float, float]:
    """The coefficients of two vectors, of these squared lengths and this scalar product, in their slerp at t.

    Sines by series in whole numbers: libraries differ in the last bit of theirs, and the output must not.
    """
    cosine = product / math.sqrt(first) / math.sqrt(second) if first > 0 and second > 0 else 1.0
    if not abs(cosine) <= SLERP_LINEAR:  # also where it is not a number, which the merge itself will report
        return 1 - t, t
    angle, wanted, one = _fix(math.acos(cosine)), _fix(cosine), 1 << FRACTION_BITS
    whole = math.isqrt(one * one - wanted * wanted)
    # Newton's method, from the library's angle to one of twice as many digits; cos x = 1 - 2 (sin x/2)^2.
    angle += ((one - (_sine(angle // 2) ** 2 >> FRACTION_BITS - 1) - wanted) << FRACTION_BITS) // whole
    share = _fix(t) * angle >> FRACTION_BITS
    return _sine(angle - share) / whole, _sine(share) / whole


def _fix(x: float) -> int:
    top, bottom = x.as_integer_ratio()
    return (top << FRACTION_BITS) // bottom


def _sine(x: int) -> int:
    x = min(x, PI - x)
    square, term, total, n = x * x >> FRACTION_BITS, x, x, 1
    while term:
        term = (term * square >> FRACTION_BITS) // -((n + 1) * (n + 2))
        total, n = total + term, n + 2
    return total


def add_up(weights: Sequence[float]) -> Fraction:
    """The exact sum; 0 where only the rounding of the weights keeps it from that, as in 0.1 + 0.2 - 0.3."""
    total, largest = sum(map(Fraction, weights), Fraction()), max(abs(Fraction(weight)) for weight in weights)
    return total if abs(total) * 10**9 >= largest else Fraction()


def _average(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    if given is None:
        return (1 / count,) * count
    return tuple(float(Fraction(w) / add_up(given)) for w in given) if normalize else tuple(map(float, given))


def _equal_shares(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    """Shares are divided by those of the models that agree, later. The share of an only model is the whole."""
    if not normalize:
        return _average(given, count, normalize)
    return (1.0,) * count if given is None or count == 1 else tuple(map(float, given))


def _weigh_ties(settings: TensorSettings, models: Sequence[int], floors: Sequence[float] | None) -> Coefficients:
    found = weigh(settings, models, floors=floors)
    return found if settings.normalize else replace(found, weights=(0.0,) * len(models), first_share=1.0)


def _describe_ties(settings: TensorSettings) -> str:
    how = "averaged" if settings.normalize else "summed up by weight"
    return f"{how} over the models that agree on a sign, and added to the base"


def _weigh_slerp(settings: TensorSettings, models: Sequence[int], products: Sequence[float] | None) -> Coefficients:
    """The arc goes between base + kept_0 and base + kept_1, and what is merged is added to one whole base."""
    weights = slerp_weights(*products or (0.0, 0.0, 0.0), settings.slerp_t)
    return weigh(settings, models, weights, base_share=sum(weights) - 1)


LINEAR, TIES, SLERP = "linear", "ties", "slerp"
METHODS: Final = {
    LINEAR: Method(
        card=lambda _: "summed up by weight and added to the base",
        kernel="sum",
        settings=("weights", "normalize"),
        share=_average,
        look=lambda _: None,
        weigh=lambda settings, models, _: weigh(settings, models),
    ),
    TIES: Method(
        card=_describe_ties,
        kernel="elect",
        settings=("weights", "normalize", "keep_ratio"),
        share=_equal_shares,
        look=lambda settings: TrimLook if settings.keep_ratio < 1 else None,
        weigh=_weigh_ties,
        normalize=True,
        shares_only=True,
    ),
    SLERP: Method(
        card=lambda _: "interpolated along the arc between the two",
        kernel="sum",
        settings=("slerp_t",),
        share=_average,
        look=lambda _: ArcLook,
        weigh=_weigh_slerp,
        show_weight=lambda settings, _: f"slerp at {settings.slerp_t:g}",
        models=2,
    ),
}
# The settings that mean something to some methods only.
METHOD_SETTINGS: Final = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.settings))
