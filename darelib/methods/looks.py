"""How one tensor is merged: its settings; looks, facts about the whole tensor that a method needs
first, in passes over its chunks; and the numbers to multiply by and to compare with.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from darelib.core.arrays import Array, fold_neighbours, library
from darelib.core.drops import Bounds, End, Thinning
from darelib.core.formats import DIGIT_BITS, NO_PREFIX

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
    extra: dict[str, Any] = field(default_factory=dict)  # what the method's own looks have found


@dataclass(frozen=True)
class Coefficients:
    """What deltas are multiplied by and compared with, for each model that has the tensor."""

    scales: tuple[float, ...]  # of the kept deltas
    # ties divides by those of the models that agree, added to the first share.
    weights: tuple[float, ...]
    bounds: tuple[Bounds | None, ...]  # of the |delta| that the drop keeps, where it is by size
    floors: tuple[float, ...]  # trim and ram keep what is at least as large
    base_share: float = 0.0  # how much of the base itself the merged delta gets
    first_share: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the method's definition needs


def weigh(
    settings: TensorSettings,
    models: Sequence[int],
    found: Found,
    weights: Sequence[float] | None = None,
    base_share: float = 0.0,
    extra: Mapping[str, Any] | None = None,
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
        extra={**found.extra, **(extra or {})},
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


class Chunk(Protocol):
    """A chunk of a tensor, as looks see it in a merge of files."""

    start: int
    base: Array
    merged: Array  # for a look that merges: the result, and the largest |value| of it
    peak: float

    def as_piece(self, sees_dropped: bool) -> Piece:
        """As the method's definition sees it."""
        ...

    def count_digits(self, row: int, shift: int, prefixes: Any, counts: Any) -> None:
        """Count what a model's drop keeps by 16 bits of |delta|."""
        ...

    def count_scores(self, scores: Array, shift: int, prefixes: Any, counts: Any) -> None:
        """Count scores in the same way."""
        ...

    def add_sizes(self) -> tuple[float, ...]:
        """The sums of |delta|, for each model, then of what the drop keeps of it."""
        ...

    def multiply_ends(self, ends: int, from_zero: bool) -> tuple[float, ...]:
        """The scalar products of all thinned models, or of their deltas: each with itself first."""
        ...


@dataclass(eq=False)
class Look:
    """Finds out what must be known of one whole tensor before it is merged.

    In passes, each of them jobs in any order and in any thread; what they note is added one at a
    time.
    """

    # Without types, so that they are no fields: each class has its own.
    counters = 0  # that a job holds for each model
    kernel = ""  # what the definition and a GPU's kernels call it; none: it has its own definition
    merges = False  # whether it sees the merged values
    whole = False  # whether its jobs are whole matrices
    of_rows = False  # whether its pieces are whole rows
    sees_dropped = False  # whether its pieces hold whole deltas, and not thinned ones

    settings: TensorSettings
    models: Sequence[int]  # those that have the tensor
    count: int  # of its entries
    bits: int  # of the floats to compute in
    found: Found  # what earlier looks have found, and where this one adds to it

    @classmethod
    def count_passes(cls, bits: int) -> int:
        return 1

    def weigh(self) -> Coefficients:
        """How the deltas are thinned that it sees."""
        return weigh_for_look(self.settings, self.models, self.found)

    def observe(self, chunk: Chunk, number: int, noted: Any) -> Any:
        """What is to be noted of a chunk in a pass, with what was noted of the job before (None: it
        is the first).
        """
        raise NotImplementedError

    def add(self, noted: Any) -> None:
        """Add what was noted of a job."""

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


def list_prefixes(wanted: Sequence[Digits], count: int) -> list[int]:
    """The different beginnings of what is looked for, filled up to so many."""
    known = list(dict.fromkeys(digits.prefix for digits in wanted))
    return known + [NO_PREFIX] * (count - len(known))


@dataclass(eq=False)
class BoundsLook(Look):
    """The smallest and the largest |delta| that each model's drop keeps, where that is by size.

    They are known by their numbers in order of size. Each pass finds one more digit of them.
    """

    kernel = "count"
    ends = 2  # how many entries of a model it can look for
    counters = ends << DIGIT_BITS
    _wanted: list[list[Digits]] = field(default_factory=list)
    _counts: Any = 0

    @classmethod
    def count_passes(cls, bits: int) -> int:
        return bits // DIGIT_BITS

    def observe(self, chunk: Chunk, number: int, noted: Any) -> Any:
        lib = library(chunk.base)
        if noted is None:
            noted = lib.zeros((len(self.models), self.ends, 1 << DIGIT_BITS), lib.uint32)
        shift = self.bits - (number + 1) * DIGIT_BITS
        for row, counts in enumerate(noted):
            wanted = self._wanted[row] if number else [Digits(0)]
            prefixes = lib.array(list_prefixes(wanted, self.ends), lib.uint64)
            self._count(chunk, row, shift, prefixes, counts)
        return noted

    def _count(self, chunk: Chunk, row: int, shift: int, prefixes: Any, counts: Any) -> None:
        chunk.count_digits(row, shift, prefixes, counts)

    def add(self, noted: Any) -> None:
        self._counts = self._counts + noted.astype("i8")

    def conclude(self, number: int) -> None:
        counts = self._counts
        self._counts = 0
        if number == 0:
            numbers = map(self.number, self.models, counts[:, 0].sum(axis=1).tolist())
            self._wanted = [list(map(Digits, each)) for each in numbers]
        for wanted, parts in zip(self._wanted, counts, strict=True):
            prefixes = list_prefixes(wanted, 0)  # those that begin alike were counted together
            places = [prefixes.index(digits.prefix) for digits in wanted]
            for digits, place in zip(wanted, places, strict=True):
                digits.find_next(parts[place])
        if number == self.count_passes(self.bits) - 1:
            self.record([[digits.as_end(self.bits) for digits in each] for each in self._wanted])

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        """Which entries of a model to find, of so many, counted from the largest down."""
        return self.settings.thinnings[model].list_ends(self.count)

    def record(self, found: Sequence[Sequence[End]]) -> None:
        """Note what follows from these entries, of each model."""
        pairs = zip(self.models, found, strict=True)
        self.found.bounds = tuple(self.settings.thinnings[i].find_bounds(ends) for i, ends in pairs)


class TrimLook(BoundsLook):
    """The smallest |delta| that trim keeps of what survives the drop, found in the same way."""

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        """How many are kept: the largest, and all that equal the last of them."""
        return (max(1, int(self.settings.options["keep_ratio"] * survivors)),) if survivors else ()

    def record(self, found: Sequence[Sequence[End]]) -> None:
        self.found.floors = tuple(ends[0].size if ends else 0.0 for ends in found)


@dataclass(eq=False)
class ChunkLook(Look):
    """Adds up what it finds in each chunk, in the chunks' order."""

    _chunks: dict[int, Any] = field(default_factory=dict)

    def observe(self, chunk: Chunk, number: int, noted: Any) -> Any:
        return {**(noted or {}), chunk.start: self.measure_chunk(chunk)}

    def measure_chunk(self, chunk: Chunk) -> Any:
        raise NotImplementedError

    def add(self, noted: Any) -> None:
        self._chunks |= noted

    def conclude(self, number: int) -> None:
        self.record(fold_columns([self._chunks.pop(start) for start in sorted(self._chunks)]))

    def record(self, sums: Sequence[float]) -> None:
        """Note what follows from the sums."""


class SumsLook(ChunkLook):
    """The sums of |delta|, for each model, then of what the drop keeps of it, for each model."""

    kernel = "sums"

    def measure_chunk(self, chunk: Chunk) -> tuple[float, ...]:
        return chunk.add_sizes()

    def record(self, sums: Sequence[float]) -> None:
        number = len(self.models)
        thinnings = [self.settings.thinnings[i] for i in self.models]
        triples = zip(thinnings, sums[:number], sums[number:], strict=True)
        self.found.factors = tuple(own.find_factor(size, kept) for own, size, kept in triples)


class GramLook(ChunkLook):
    """The scalar products of all thinned models, or of their deltas: each with itself first."""

    kernel = "products"

    def measure_chunk(self, chunk: Chunk) -> tuple[float, ...]:
        return chunk.multiply_ends(len(self.settings.weights), self.settings.origin == ZERO)

    def record(self, sums: Sequence[float]) -> None:
        self.found.products = tuple(sums)


class ArcLook(GramLook):
    """Those of two, the ends of an arc: a GPU has a kernel of its own for them."""


class MatrixLook(Look):
    """The merged delta of a tensor whose matrices are merged as a whole: a job for each."""

    whole = True


# --- looks by a method's own definition -----------------------------------------------------------


class ScoreLook(BoundsLook):
    """Entries that are known by their numbers in order of some score, of all models together."""

    kernel = ""

    def score(self, piece: Piece) -> Array:
        """The scores that count, in any order: none is negative."""
        raise NotImplementedError

    def _count(self, chunk: Chunk, row: int, shift: int, prefixes: Any, counts: Any) -> None:
        if row == 0:
            scores = self.score(chunk.as_piece(self.sees_dropped))
            chunk.count_scores(scores, shift, prefixes, counts)


class PieceLook(ChunkLook):
    """What a method's definition measures in each piece."""

    def measure(self, piece: Piece) -> Any:
        raise NotImplementedError

    def measure_chunk(self, chunk: Chunk) -> Any:
        return self.measure(chunk.as_piece(self.sees_dropped))


class SumLook(PieceLook):
    """Sums over all pieces: `measure` gives some numbers."""


class RowLook(PieceLook):
    """A number for each row of the tensor, under a name: `measure` gives an array."""

    of_rows = True
    sees_dropped = True
    name = ""

    def conclude(self, number: int) -> None:
        parts = [self._chunks.pop(start) for start in sorted(self._chunks)]
        self.found.extra[self.name] = library(parts[0]).concatenate(parts)


def fold_columns(chunks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(fold_neighbours(list(column)) for column in zip(*chunks, strict=True))
