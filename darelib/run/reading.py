"""One chunk of a tensor: read from all inputs, thinned and combined."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic import chunks
from darelib.arithmetic.chunks import CUT, Combining, Cut, Seen
from darelib.arithmetic.definition import multiply_ends
from darelib.core.arrays import Array
from darelib.core.drops import Thinning
from darelib.core.formats import FORMATS
from darelib.core.mask import KEEP_ALL, MASK_BITS, TILE, mask_key
from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.methods import METHODS, OPERATIONS, returns_model
from darelib.methods.looks import Coefficients, Piece
from darelib.models.tensor import Described, Known, Tensor
from darelib.plan.plan import MergePlan
from darelib.plan.tensorplan import TensorPlan

BROKEN_HINT: Final = "such a model is broken; use a checkpoint from before that happened"
ONLY_THINNED: Final = Combining(False, False, np.zeros(0), 0.0, 0.0, 0.0)


@lru_cache(16)
def find_last_bits(thinning: Thinning, width: int) -> NDArray[np.uint16]:
    """By rank in a row: the largest mask bits of what is kept."""
    thresholds = thinning.find_thresholds(np.arange(width, dtype=np.float64), width)
    return (thresholds - 1).astype(np.uint16)


class TensorChunk:
    """A chunk of a tensor, with the values of all models that have it."""

    merged: Array
    peak = np.inf  # the largest |value| of what is merged; infinite where one is not finite

    def __init__(
        self,
        tensor: TensorPlan,
        start: int,
        base: Array,
        values: NDArray[Any],
        cuts: Sequence[Cut],
        last_bits: NDArray[np.uint16],
        large: float,
    ) -> None:
        """values, cuts, last_bits: of each model, in a row each."""
        self.tensor = tensor
        self.start = start
        self.base = base
        self.values = values
        self.cuts = cuts
        self.last_bits = last_bits
        self.seen: list[Seen] = []  # of each model, once its delta is thinned
        self.base_sizes: Array = base[:0]  # the sums of the base's |values| by tile, then too
        self._large = large

    @cached_property
    def deltas(self) -> list[Array]:
        models = zip(self.tensor.finetuned, self.values, strict=True)
        return [values if info.is_delta else values - self.base for (_, info), values in models]

    @cached_property
    def rows(self) -> NDArray[Any]:
        """The thinned deltas."""
        rows = np.empty_like(self.values)
        self._merge(ONLY_THINNED, rows, np.empty_like(self.base[:0]))
        return rows

    def _merge(self, how: Combining, rows: NDArray[Any], merged: Array) -> None:
        cuts = np.array(self.cuts, CUT)
        given = (self.base, self.values, cuts, self.last_bits, self.start, self._large)
        sums, peaks, counts = chunks.merge(*given, how, rows, merged)
        *sizes, self.base_sizes = sums
        *largest, self.peak = peaks.tolist()
        parts = zip(sizes, largest, counts.tolist(), strict=True)
        self.seen = [Seen(size, peak, *both) for size, peak, both in parts]

    def as_piece(self, sees_dropped: bool = False) -> Piece:
        rows = self.deltas if sees_dropped else list(self.rows)
        return Piece(self.base, rows, self.start, self.tensor.base.width)

    # --- for looks ----------------------------------------------------------------------------

    def count_digits(self, row: int, shift: int, prefixes: Any, counts: Any) -> None:
        given = (self.base, self.values[row], self.cuts[row], self.start // TILE)
        chunks.count_digits(*given, shift, prefixes, counts)

    def count_scores(self, scores: Array, shift: int, prefixes: Any, counts: Any) -> None:
        chunks.count_sizes(scores, shift, prefixes, counts)

    def add_sizes(self) -> tuple[float, ...]:
        ones = np.ones_like(self.base)
        return tuple(chunks.dot(np.abs(row), ones) for row in (*self.deltas, *self.rows))

    def multiply_ends(self, ends: int, from_zero: bool) -> tuple[float, ...]:
        kept = dict(zip(self.tensor.models, self.rows, strict=True))
        origin = self.base if from_zero else np.zeros_like(self.base)
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
            self.peak = chunks.add_change(self.values[0], self.merged, 1.0)
            return
        operation = METHODS[settings.method].operation.name
        if OPERATIONS[operation].compiled:
            self.merged = np.empty_like(self.base)
            how = Combining(
                averages=operation != "sum",
                elects=operation == "elect",
                weights=np.array(own.weights, np.float64),
                base_share=own.base_share,
                first_share=own.first_share,
                lambda_coeff=settings.lambda_coeff,
            )
            self._merge(how, self.values[:0], self.merged)
            return
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
        self.peak = chunks.add_change(self.base, self.merged, lambda_coeff)


class ChunkReader:
    def __init__(self, plan: MergePlan, inputs: Sequence[Described]) -> None:
        self._plan = plan
        self._names = [model.name for model in inputs]
        # Last bits by tensor and start, which the merge wants again after a look.
        self._ranked: dict[tuple[str, int], NDArray[np.uint16]] = {}

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
        base, values = self._read(tensor, start, count, len(cuts))
        if is_mask:
            base = np.zeros_like(base)
            values = np.zeros_like(values)
        last_bits = np.zeros((len(cuts), 0), np.uint16)
        if tensor.ranks and cuts:
            known = self._ranked.pop((tensor.name, start), last_bits)[:, :count]
            is_known = known.shape[1] == count
            last_bits = known if is_known else self._rank(tensor, start, count, remember)
        large = float(self._plan.config.delta_threshold)
        return TensorChunk(tensor, start, base, values, cuts, last_bits, large)

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
    ) -> NDArray[np.uint16]:
        """Find the last bits that are kept in a chunk, which whole rows decide."""
        width = tensor.base.width
        first = start // width * width
        elements = -(-(start + count) // width) * width - first
        known, base = self._read_base(tensor, first, elements)
        found = np.zeros((len(tensor.finetuned), count), np.uint16)
        delta = np.empty_like(base)  # of one model at a time: rows may be long
        for (i, info), last_bits in zip(tensor.finetuned, found, strict=True):
            thinning = tensor.settings.thinnings[i]
            if thinning.scheme.thresholds:
                self._read_model(info, first, known, base, delta)
                delta -= 0 if info.is_delta else base
                sizes = np.abs(delta, out=delta).view(f"u{delta.itemsize}")
                by_rank = find_last_bits(thinning, width)
                last_bits[:] = chunks.rank_rows(sizes, by_rank, start - first, count)
        room = (len(self._ranked) + 1) * self._plan.chunk * len(found) * 2
        if remember and room <= TUNING.ranked_bytes:
            self._ranked[tensor.name, start] = found
        return found

    def _read(
        self, tensor: TensorPlan, start: int, count: int, models: int
    ) -> tuple[Array, NDArray[Any]]:
        """Elements of the base and, in rows, of so many models, or none."""
        known, base = self._read_base(tensor, start, count)
        values = np.empty((models, count), base.dtype)
        for (_, info), row in zip(tensor.finetuned, values, strict=False):
            self._read_model(info, start, known, base, row)
        return base, values

    def _read_base(self, tensor: TensorPlan, start: int, count: int) -> tuple[Known, Array]:
        known = Known(tensor.base, tensor.base.read(start, count))
        return known, known.values.astype(FORMATS[tensor.real].real, copy=False)

    def _read_model(
        self, info: Tensor, start: int, known: Known, base: Array, values: Array
    ) -> None:
        """Fill values with elements of a model; of the base, where the model has fewer rows."""
        present = max(0, min(len(values), info.count - start))
        values[present:] = 0 if info.is_delta else base[present:]
        if present:
            info.read_into(values[:present], start, known)


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
        is_delta=tensor.finetuned[row][1].is_delta,
        ranked=thinning.scheme.thresholds is not None,
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
