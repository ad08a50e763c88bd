"""One chunk of a tensor: read from all inputs, thinned and combined."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic import chunks
from darelib.arithmetic.chunks import Cut, Seen
from darelib.arithmetic.definition import multiply_ends
from darelib.core.arrays import Array, fold_tiles
from darelib.core.drops import Thinning
from darelib.core.formats import FORMATS
from darelib.core.mask import KEEP_ALL, MASK_BITS, TILE, mask_key
from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.methods import METHODS, OPERATIONS, returns_model
from darelib.methods.looks import Coefficients, Piece
from darelib.models.tensor import Described, Known
from darelib.plan.plan import MergePlan
from darelib.plan.tensorplan import TensorPlan

BROKEN_HINT: Final = "such a model is broken; use a checkpoint from before that happened"
NO_BITS: Final = np.zeros(0, np.uint16)


@lru_cache(16)
def find_last_bits(thinning: Thinning, width: int) -> NDArray[np.uint16]:
    """By rank in a row: the largest mask bits of what is kept."""
    thresholds = thinning.find_thresholds(np.arange(width, dtype=np.float64), width)
    return (thresholds - 1).astype(np.uint16)


class TensorChunk:
    """A chunk of a tensor, with the values of all models that have it."""

    merged: Array
    peak = np.inf  # the largest |value| of what is merged; infinite where one is not finite
    base_sizes: Array  # the sums of the base's |values| by tile

    def __init__(
        self,
        tensor: TensorPlan,
        start: int,
        base: Array,
        values: Sequence[Array],
        cuts: Sequence[Cut],
        large: float,
    ) -> None:
        self.tensor = tensor
        self.start = start
        self.base = base
        self.values = values
        self.cuts = cuts
        self.last_bits: Sequence[NDArray[np.uint16]] = [NO_BITS] * len(values)
        self.seen: list[Seen] = []  # of each model, once its delta is thinned
        self._large = large

    @cached_property
    def origins(self) -> list[Array]:
        """What each model's values are the difference from: the base, or zeros."""
        deltas = [info.is_delta for _, info in self.tensor.finetuned]
        zeros = np.zeros_like(self.base) if any(deltas) else self.base
        return [zeros if is_delta else self.base for is_delta in deltas]

    @cached_property
    def deltas(self) -> list[Array]:
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            pairs = zip(self.values, self.origins, strict=True)
            return [values - origin for values, origin in pairs]

    @cached_property
    def rows(self) -> NDArray[Any]:
        """The thinned deltas."""
        rows = np.empty((len(self.values), len(self.base)), self.base.dtype)
        self._thin(rows, 0.0)
        return rows

    def _thin(self, rows: Array, base_share: float) -> Array:
        """Put the thinned deltas into rows, if those have a length, and add them up."""
        total = base_share * self.base if base_share else np.empty_like(self.base)
        models = zip(self.values, self.origins, self.cuts, self.last_bits, rows, strict=True)
        for k, (*given, row) in enumerate(models):
            is_first = not (k or base_share)
            found = chunks.thin(*given, self.start, self._large, row, total, is_first)
            self.seen.append(Seen(*found))
        return total

    def as_piece(self, sees_dropped: bool = False) -> Piece:
        rows = self.deltas if sees_dropped else list(self.rows)
        return Piece(self.base, rows, self.start, self.tensor.base.width)

    # --- for looks ----------------------------------------------------------------------------

    def count_digits(self, row: int, shift: int, prefixes: Any, counts: Any) -> None:
        given = (self.values[row], self.origins[row], self.cuts[row], self.start // TILE)
        chunks.count_digits(*given, shift, prefixes, counts)

    def count_scores(self, scores: Array, shift: int, prefixes: Any, counts: Any) -> None:
        chunks.count_sizes(scores, shift, prefixes, counts)

    def add_sizes(self) -> tuple[float, ...]:
        return tuple(map(chunks.add_sizes, [*self.deltas, *self.rows]))

    def multiply_ends(self, ends: int, from_zero: bool) -> tuple[float, ...]:
        kept = dict(zip(self.tensor.models, self.rows, strict=True))
        origin = self.base if from_zero else np.zeros_like(self.base)
        with np.errstate(all="ignore"):
            return multiply_ends(origin, kept, ends, chunks.dot)

    def measure(self, row: int, counts: Any) -> tuple[int, int, float, float]:
        """How many entries of a delta are 0, and large, and the sums of sizes and squares."""
        found = chunks.measure(self.deltas[row], self._large, counts)
        zeros, above, size, squares, peak = found
        self.seen.append(Seen(np.array([size]), peak, above, len(self.base)))
        return zeros, above, size, squares

    def compare(self, one: int, other: int) -> tuple[float, int, int, float, float]:
        return chunks.compare(self.deltas[one], self.deltas[other])

    # --- for the merge ------------------------------------------------------------------------

    def combine(self, own: Coefficients) -> None:
        """Make the merged values."""
        settings = self.tensor.settings
        has_values = any(not info.is_delta for _, info in self.tensor.finetuned)
        if returns_model(settings) and has_values:
            self.merged = np.zeros_like(self.rows[0])
            self.base_sizes = fold_tiles(np.abs(self.base))
            self.peak, _ = chunks.add_change(self.values[0], self.merged, 1.0)
            return
        operation = METHODS[settings.method].operation.name
        if OPERATIONS[operation].compiled:
            is_sum = operation == "sum"
            rows = np.empty((len(self.values), 0 if is_sum else len(self.base)), self.base.dtype)
            self.merged = self._thin(rows, own.base_share)
            if not is_sum:
                weights = np.array(own.weights, np.float64)
                elects = operation == "elect"
                chunks.average(rows, weights, own.first_share, elects, self.merged)
        else:
            with np.errstate(all="ignore"):
                merged = OPERATIONS[operation].combine(self.as_piece(), own)
            self.merged = np.ascontiguousarray(merged)
        self.add_change()

    def take_change(self, changes: Mapping[int, Array]) -> None:
        """Make the merged values of a solved change: of whole matrices, by their first element."""
        self.merged = np.zeros_like(self.base)
        stop = self.start + len(self.base)
        for first, change in changes.items():
            low = max(first, self.start)
            high = min(first + len(change), stop)
            if low < high:
                own = slice(low - self.start, high - self.start)
                self.merged[own] = change[low - first : high - first]
        self.add_change()

    def add_change(self) -> None:
        lambda_coeff = self.tensor.settings.lambda_coeff
        self.peak, self.base_sizes = chunks.add_change(self.base, self.merged, lambda_coeff)


class ChunkReader:
    def __init__(self, plan: MergePlan, inputs: Sequence[Described]) -> None:
        self._plan = plan
        self._models = inputs[1:]
        self._names = [model.name for model in inputs]
        # Last bits by tensor and start, which the merge wants again after a look.
        self._ranked: dict[tuple[str, int], list[NDArray[np.uint16]]] = {}

    def make_cuts(self, tensor: TensorPlan, own: Coefficients, is_merge: bool = False) -> list[Cut]:
        """How each model is thinned. is_merge: what was dropped before is not dropped again."""
        return [
            make_cut(tensor, row, self._plan.seeds[i], own, is_merge)
            for row, (i, _) in enumerate(tensor.finetuned)
        ]

    def load(
        self,
        tensor: TensorPlan,
        start: int,
        count: int,
        cuts: Sequence[Cut],
        is_mask: bool = False,
        remember: bool = False,
    ) -> TensorChunk:
        """Read a chunk of every input: zeros, if the tensor is a mask.

        remember: what is found about it will be wanted again. cuts: of the models that are read.
        """
        known = Known(tensor.base, tensor.base.read(start, count))
        base = known.values.astype(FORMATS[tensor.real].real, copy=False)
        models = range(len(cuts))
        values = [self._read_model(tensor, row, start, count, base, known) for row in models]
        if is_mask:
            base = np.zeros_like(base)
            values = [base for _ in values]
        large = self._plan.config.delta_threshold
        chunk = TensorChunk(tensor, start, base, values, cuts, large)
        if tensor.ranks and cuts:
            last_bits = self._ranked.pop((tensor.name, start), None)
            chunk.last_bits = last_bits or self._rank(tensor, start, count, remember)
        return chunk

    def load_rows(
        self, tensor: TensorPlan, start: int, count: int, cuts: Sequence[Cut]
    ) -> TensorChunk | None:
        """Read all rows that start in a chunk; a row may be longer than that."""
        width = tensor.base.width
        first = -(-start // width) * width
        elements = -(-(start + count) // width) * width - first
        return self.load(tensor, first, elements, cuts) if elements else None

    def keeps_base(self, tensor: TensorPlan, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether a tensor is a mask, with -inf in it and nothing else that is not finite, and no
        model has other values, or they do not count.
        """
        is_mask = False
        for start, count in ranges:
            none = [Cut(0, 0)] * len(tensor.finetuned)
            chunk = self.load(tensor, start, count, none)
            base = chunk.base
            finite = base[np.isfinite(base)]
            fits = float(abs(finite).max(initial=0)) < FORMATS[tensor.dtype].limit
            equal = all(np.array_equal(base, values) for values in chunk.values)
            if not fits or not (equal or tensor.settings.lambda_coeff == 0):
                return False
            if not all(values.max() < np.inf for values in (base, *chunk.values)):
                return False
            is_mask |= any(values.min() == -np.inf for values in (base, *chunk.values))
        return is_mask

    def explain_non_finite(self, tensor: TensorPlan, ranges: Sequence[tuple[int, int]]) -> NoReturn:
        """Name the first value that no merge can use.

        Off the fast path, so it reads again and looks with NumPy.
        """
        inputs = [(self._names[0], tensor.base)]
        inputs += [(self._names[1 + i], info) for i, info in tensor.finetuned]
        for model, info in inputs:
            for start, count in ranges:
                values = info.read(start, max(0, min(count, info.count - start)))
                bad = np.flatnonzero(~np.isfinite(values))
                if bad.size:
                    place = tensor.base.place_of(start + int(bad[0]))
                    value = values[bad[0]]
                    mask = f"--rule '{tensor.name}:lambda_coeff=0' keeps the base's mask; a weight"
                    raise DareError(
                        f"{model!r}: tensor {tensor.name!r} holds {value} at {place}",
                        f"{mask} like that is broken" if value == -np.inf else BROKEN_HINT,
                    )
        raise DareError(
            f"merging tensor {tensor.name!r} gives values beyond the range of "
            f"{tensor.output.dtype}",
            "lower lambda_coeff, the weights or the drop rate, or choose a wider dtype",
        )

    def _rank(
        self, tensor: TensorPlan, start: int, count: int, remember: bool
    ) -> list[NDArray[np.uint16]]:
        """Find the last bits that are kept in a chunk, which whole rows decide."""
        width = tensor.base.width
        first = start // width * width
        elements = -(-(start + count) // width) * width - first
        chunk = TensorChunk(tensor, first, *self._read_rows(tensor, first, elements), (), 0.0)
        found = []
        for (i, _), delta in zip(tensor.finetuned, chunk.deltas, strict=True):
            thinning = tensor.settings.thinnings[i]
            last_bits = NO_BITS
            if thinning.scheme.thresholds:
                sizes = np.abs(delta).view(f"u{delta.itemsize}")
                by_rank = find_last_bits(thinning, width)
                last_bits = chunks.rank_rows(sizes, by_rank, start - first, count)
            found.append(last_bits)
        room = (len(self._ranked) + 1) * self._plan.chunk * len(found) * 2
        if remember and room <= TUNING.ranked_bytes:
            self._ranked[tensor.name, start] = found
        return found

    def _read_rows(self, tensor: TensorPlan, start: int, count: int) -> tuple[Array, list[Array]]:
        base = tensor.base.read(start, count).astype(FORMATS[tensor.real].real, copy=False)
        models = range(len(tensor.finetuned))
        return base, [self._read_model(tensor, row, start, count, base) for row in models]

    def _read_model(
        self,
        tensor: TensorPlan,
        row: int,
        start: int,
        count: int,
        base: Array,
        known: Known | None = None,
    ) -> Array:
        """Read elements of one model. base: the same of the base, for rows that the model lacks."""
        _, info = tensor.finetuned[row]
        present = max(0, min(count, info.count - start))  # less, where the model has fewer rows
        rest = np.zeros(count - present, base.dtype) if info.is_delta else base[present:]
        if not present:
            return rest
        values = info.read(start, present, known).astype(base.dtype, copy=False)
        return values if present == count else np.concatenate([values, rest])


def make_cut(tensor: TensorPlan, row: int, seed: int, own: Coefficients, is_merge: bool) -> Cut:
    i, _ = tensor.finetuned[row]
    thinning = tensor.settings.thinnings[i]
    threshold = thinning.threshold
    if is_merge and tensor.is_thinned(row):
        threshold = KEEP_ALL
    draws = threshold < KEEP_ALL or thinning.scheme.thresholds is not None
    bounds = own.bounds[row]
    cut = Cut(
        *mask_key(seed, tensor.mask_names[row]),
        threshold=threshold,
        draws=draws,
        divided=thinning.divides_each,
        scale=float(own.scales[row]),
        floor=float(own.floors[row]),
    )
    if bounds is None:
        return cut
    low, high, at_low, at_high = bounds
    draws = draws or at_low + at_high < 2 << MASK_BITS
    return cut._replace(
        draws=draws,
        bounded=True,
        low=float(low),
        high=float(high),
        at_low=int(at_low),
        at_high=int(at_high),
    )
