"""The ways to combine thinned deltas: settings, formulas, and what must be looked up first.

A kernel only multiplies, adds and compares; every number that it is given is computed here, once
for all engines.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

from darelib.core.arc import slerp_weights
from darelib.core.drops import Bounds, End, Thinning
from darelib.core.formats import DIGIT_BITS, NO_PREFIX


@dataclass(frozen=True, eq=False)
class TensorSettings:
    """How to merge one tensor, all rules considered; what is per model, in the models' order."""

    method: str
    thinnings: tuple[Thinning, ...]
    weights: tuple[float, ...]
    normalize: bool  # whether weights are divided by their sum
    lambda_coeff: float
    keep_ratio: float  # share of the surviving entries that trim keeps
    slerp_t: float = 0.5
    threshold: float = 1e-5  # ram: a smaller |delta| is none
    ridge: float = 1.0  # wudi: what is added to the Gram matrices, whose mean diagonal is 1
    # wudi: how large the merged delta may be, in mean sizes of the models'; 0: as it comes.
    norm_limit: float = 1.5

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
        has_threshold = "threshold" in METHODS[self.method].settings
        return kept_whole and not has_threshold and self.lambda_coeff == 1 and self.weights == (1,)


@dataclass
class Found:
    """What looks have found out about one tensor so far, for each model that has it."""

    # Of the |delta| that the drop keeps, where it is by size.
    bounds: tuple[Bounds | None, ...] = ()
    factors: tuple[float, ...] = ()  # that restore the sum of |delta|
    floors: tuple[float, ...] = ()  # the smallest |delta| that trim keeps
    # Not by model: squared lengths and scalar product of the ends of slerp's arc.
    products: tuple[float, ...] = (0.0, 0.0, 0.0)
    change: Any = None  # the merged delta itself, where a method takes matrices as a whole


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


@dataclass(frozen=True)
class Method:
    card: Callable[[TensorSettings], str]  # what happens to the thinned deltas, for a model card
    kernel: str  # the kernel that merges a chunk
    settings: tuple[str, ...]  # those of the optional settings that mean something to it
    # The weights, from those given, if any, for so many models, perhaps to be normalized.
    share: Callable[[Sequence[float] | None, int, bool], tuple[float, ...]]
    # What must be found out first, beside what drops want.
    look: Callable[[TensorSettings], type[Look] | None]
    weigh: Callable[[TensorSettings, Sequence[int], Found], Coefficients]
    # Of a model, for a model card.
    show_weight: Callable[[TensorSettings, int], str] = lambda own, i: f"{own.weights[i]:.4g}"
    models: int | None = None  # how many it takes, where it does not take any number
    any_drop: bool = True  # whether it goes with other drops than random
    # Whether the base may be one of the models, by whether weights are normalized.
    averages: Callable[[bool], bool] = lambda _: False
    normalize: bool = False  # whether weights are divided by their sum, where the user does not say
    # Whether weights that are divided by their sum are shares of a whole: never negative.
    shares_only: bool = False
    whole: bool = False  # whether it takes whole matrices; all other tensors are averaged
    # Whether the merged delta's rank is at most those of the models' together.
    adds_ranks: bool = False


def weigh(
    settings: TensorSettings,
    models: Sequence[int],
    found: Found,
    weights: Sequence[float] | None = None,
    base_share: float = 0.0,
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
    )


def average_only(settings: TensorSettings) -> TensorSettings:
    """For what must stay between the inputs' values, as variances must: nothing is dropped, and the
    weights are shares, equal ones where some are negative.
    """
    count = len(settings.weights)
    is_arc = settings.method == SLERP
    weights = (1 - settings.slerp_t, settings.slerp_t) if is_arc else settings.weights
    return TensorSettings(
        method=LINEAR,
        thinnings=(Thinning(),) * count,
        weights=_average(None if min(weights) < 0 else weights, count, True),
        normalize=True,
        lambda_coeff=min(max(settings.lambda_coeff, 0.0), 1.0),
        keep_ratio=1.0,
    )


def choose_method(settings: TensorSettings, is_matrix: bool) -> TensorSettings:
    """The settings of a tensor: what no method for matrices is needed for is averaged, or is the
    only model's.
    """
    needs_matrices = is_matrix and len(settings.weights) > 1 and settings.lambda_coeff != 0
    if needs_matrices or not METHODS[settings.method].whole:
        return settings
    return replace(settings, method=LINEAR)


def weigh_for_look(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """Looks see the thinned deltas as they are, without weights."""
    return weigh(settings, models, found, (1.0,) * len(settings.divisors))


def rank_of_floor(keep_ratio: float, survivors: int) -> int:
    """How many surviving entries trim keeps: the largest, and all that equal the last of them."""
    return max(1, int(keep_ratio * survivors))


@dataclass(eq=False)
class Look:
    """Finds out what must be known of one whole tensor before it is merged.

    In passes, each of them jobs in any order. buffers are the kernels' (see darelib.kernels); jobs
    are added one at a time, chunks from any thread.
    """

    # Without types, so that they are no fields: each class has its own.
    kernel = ""
    merges = False  # whether its kernel is the one that merges
    whole = False  # whether its jobs are whole matrices, which no kernel is for

    settings: TensorSettings
    models: Sequence[int]  # those that have the tensor
    count: int  # of its entries
    bits: int  # of the floats to compute in
    found: Found  # what earlier looks have found, and where this one adds to it

    @classmethod
    def count_passes(cls, bits: int) -> int:
        return 1

    def describe(self, buffers: Any, number: int) -> None:
        """Set what its kernel must know in this pass."""

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        """Add what the kernel found in so many entries from there on."""

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        """Add what the kernel found in a job."""

    def conclude(self, number: int) -> None:
        """Draw the conclusion of this pass, of which all jobs have been added."""


@dataclass
class Digits:
    """The bit pattern of one entry that is looked for, as far as it is known."""

    number: int  # of the entry, counted from the largest down, among those that begin like it
    prefix: int = 0
    equal: int = 0  # how many begin like it

    def find_next(self, counts: Any) -> None:
        """counts: by the next digit, of the entries that begin like it."""
        downwards = counts[::-1].cumsum()
        place = int(downwards.searchsorted(self.number))
        self.number -= int(downwards[place - 1]) if place else 0
        self.equal = int(counts[len(counts) - 1 - place])
        self.prefix = self.prefix << DIGIT_BITS | (len(counts) - 1 - place)

    def as_end(self, bits: int) -> End:
        integer, real = "Qd" if bits == 64 else "If"
        [size] = struct.unpack(f"<{real}", struct.pack(f"<{integer}", self.prefix))
        return End(size, self.number, self.equal)


@dataclass(eq=False)
class BoundsLook(Look):
    """The smallest and the largest |delta| that each model's drop keeps, where that is by size.

    They are known by their numbers in order of size. Each pass finds one more digit of them.
    """

    kernel = "count"
    _wanted: list[list[Digits]] = field(default_factory=list)
    _counts: Any = 0

    @classmethod
    def count_passes(cls, bits: int) -> int:
        return bits // DIGIT_BITS

    def describe(self, buffers: Any, number: int) -> None:
        buffers.tensor["shift"] = self.bits - (number + 1) * DIGIT_BITS
        for record, wanted in zip(buffers.models, self._wanted, strict=False):
            prefixes = [*(digits.prefix for digits in wanted), NO_PREFIX, NO_PREFIX]
            record["prefix"], record["prefix_2"] = prefixes[:2]

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        self._counts = self._counts + buffers.counts[: len(self.models)].astype("i8")

    def conclude(self, number: int) -> None:
        counts = self._counts.reshape(len(self.models), 2, -1)
        self._counts = 0
        if number == 0:
            numbers = map(self.number, self.models, counts[:, 0].sum(axis=1).tolist())
            self._wanted = [list(map(Digits, each)) for each in numbers]
        for wanted, halves in zip(self._wanted, counts, strict=True):
            alike = len({digits.prefix for digits in wanted}) == 1  # both were counted together
            for digits, half in zip(wanted, halves[[0, 0]] if alike else halves, strict=False):
                digits.find_next(half)
        if number == self.count_passes(self.bits) - 1:
            self.record([[digits.as_end(self.bits) for digits in each] for each in self._wanted])

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        """Which entries of a model to find, of so many, counted from the largest down."""
        return self.settings.thinnings[model].list_ends(self.count)

    def record(self, found: list[list[End]]) -> None:
        pairs = zip(self.models, found, strict=True)
        self.found.bounds = tuple(self.settings.thinnings[i].find_bounds(ends) for i, ends in pairs)


class TrimLook(BoundsLook):
    """The smallest |delta| that trim keeps of what survives the drop, found in the same way."""

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        return (rank_of_floor(self.settings.keep_ratio, survivors),) if survivors else ()

    def record(self, found: list[list[End]]) -> None:
        self.found.floors = tuple(ends[0].size if ends else 0.0 for ends in found)


@dataclass(eq=False)
class ChunkLook(Look):
    """Adds up what a kernel finds in each chunk, in the chunks' order."""

    _chunks: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def fold(self) -> tuple[float, ...]:
        return fold_columns([self._chunks.pop(start) for start in sorted(self._chunks)])


class SumsLook(ChunkLook):
    """The sums of |delta| before and after the drop, for each model."""

    kernel = "sums"

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        records = buffers.models[: len(self.models)]
        self._chunks[start] = (*records["size"].tolist(), *records["kept_size"].tolist())

    def conclude(self, number: int) -> None:
        self.found.factors = find_factors(self.settings, self.models, self.fold())


def find_factors(
    settings: TensorSettings, models: Sequence[int], sums: Sequence[float]
) -> tuple[float, ...]:
    """sums: of |delta|, for each model, then of what is kept of it, for each model."""
    triples = zip(models, sums[: len(models)], sums[len(models) :], strict=True)
    return tuple(settings.thinnings[i].find_factor(size, kept) for i, size, kept in triples)


class ArcLook(ChunkLook):
    """The squared lengths and the scalar product of the two thinned models, the ends of an arc."""

    kernel = "products"

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        names = ("square_0", "square_1", "product")
        self._chunks[start] = tuple(float(buffers.tensor[name][0]) for name in names)

    def conclude(self, number: int) -> None:
        self.found.products = self.fold()


class MatrixLook(Look):
    """The merged delta of a tensor whose matrices are merged as a whole: a job for each."""

    whole = True


def choose_looks(settings: TensorSettings, models: Sequence[int]) -> list[type[Look]]:
    """What must be found out about a tensor that these models have, one after the other."""
    thinnings = [settings.thinnings[i] for i in models]
    looks: list[type[Look] | None] = [
        BoundsLook if any(thinning.scheme.ends for thinning in thinnings) else None,
        SumsLook if any(thinning.restores_sum for thinning in thinnings) else None,
        METHODS[settings.method].look(settings),
    ]
    return [look for look in looks if look]


def fold_columns(chunks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(fold_neighbours(list(column)) for column in zip(*chunks, strict=True))


def fold_neighbours(values: list[float]) -> float:
    """A sum by pairs of neighbours: of 2^k values each, it is the same in pieces as in one."""
    while len(values) > 1:
        values = [*values, 0.0] if len(values) % 2 else values
        values = [values[k] + values[k + 1] for k in range(0, len(values), 2)]
    return values[0]


def sum_weights(weights: Sequence[float]) -> Fraction:
    """The exact sum; 0 where only rounding keeps it from that, as in 0.1 + 0.2 - 0.3."""
    total = sum(map(Fraction, weights), Fraction())
    return total if abs(total) * 10**9 >= max(map(abs, weights)) else Fraction()


def _average(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    if given is None:
        return (1 / count,) * count
    if not normalize:
        return tuple(map(float, given))
    total = sum_weights(given)
    return tuple(float(Fraction(weight) / total) for weight in given)


def _equal_shares(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    """Shares are divided by those of the models that agree, later. An only model's is the whole."""
    if not normalize:
        return _average(given, count, normalize)
    return (1.0,) * count if given is None or count == 1 else tuple(map(float, given))


def _weigh_ties(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    shares = weigh(settings, models, found)
    sums = replace(shares, weights=(0.0,) * len(models), first_share=1.0)
    return shares if settings.normalize else sums


def _describe_ties(settings: TensorSettings) -> str:
    how = "averaged" if settings.normalize else "summed up by weight"
    return f"{how} over the models that agree on a sign, and added to the base"


def _weigh_slerp(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """The arc goes from base + kept_0 to base + kept_1; what is merged is added to a whole base."""
    weights = slerp_weights(*found.products, settings.slerp_t)
    return weigh(settings, models, found, weights, base_share=sum(weights) - 1)


def _weigh_ram(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh(settings, models, found), floors=(settings.threshold,) * len(models))


LINEAR, TIES, SLERP, RAM, WUDI = "linear", "ties", "slerp", "ram", "wudi"
METHODS: Final = {
    LINEAR: Method(
        card=lambda _: "summed up by weight and added to the base",
        kernel="sum",
        settings=("weights", "normalize"),
        share=_average,
        look=lambda _: None,
        weigh=weigh,
        averages=lambda normalize: normalize,
        adds_ranks=True,
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
        any_drop=False,
        averages=lambda _: True,
    ),
    RAM: Method(  # arXiv 2601.13572
        card=lambda settings: (
            f"averaged where they are at least {settings.threshold:g}, and added to the base"
        ),
        kernel="average",
        settings=("weights", "threshold"),
        share=_equal_shares,
        look=lambda _: None,
        weigh=_weigh_ram,
        normalize=True,
        shares_only=True,
    ),
    WUDI: Method(  # after arXiv 2503.08099; darelib.kernels.matrices has the formula
        card=lambda settings: (
            "merged matrix by matrix, so that each keeps its effect on its own inputs and outputs "
            f"(ridge {settings.ridge:g}), and added to the base"
        ),
        kernel="sum",
        settings=("weights", "ridge", "norm_limit"),
        share=_average,
        look=lambda _: MatrixLook,
        weigh=weigh,
        normalize=True,
        shares_only=True,
        whole=True,
        adds_ranks=True,
    ),
}
# The settings that mean something to some methods only.
METHOD_SETTINGS: Final = tuple(
    dict.fromkeys(name for method in METHODS.values() for name in method.settings)
)
