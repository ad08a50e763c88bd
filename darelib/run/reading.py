"""One chunk of a tensor, read from all inputs into a thread's buffers, with the bits that ranks
keep of its mask.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from darelib.core.drops import Thinning
from darelib.core.formats import FORMATS, widen
from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.kernels import Kernel, KernelSpec
from darelib.kernels.plain import encode
from darelib.kernels.records import Buffers
from darelib.models.encodings import Input, TensorInfo
from darelib.plan.plan import MergePlan
from darelib.plan.tensorplan import TensorPlan

Bytes = NDArray[np.uint8]
BROKEN_HINT: Final = "such a model is broken; use a checkpoint from before that happened"


@lru_cache(16)
def find_last_bits(thinning: Thinning, width: int) -> NDArray[np.uint16]:
    """By rank in a row: the largest mask bits of what is kept."""
    thresholds = thinning.find_thresholds(np.arange(width, dtype=np.float64), width)
    return (thresholds - 1).astype(np.uint16)


def read(model: Input, info: TensorInfo, start: int, count: int, buffer: Bytes) -> Bytes:
    """Elements of a tensor, as bytes at the start of buffer."""
    part = buffer[: count * FORMATS[info.dtype].itemsize]
    model.read(info, start, count, part)
    return part


def as_floats(row: Bytes, dtype: str, count: int) -> NDArray[Any]:
    return widen(row[: count * FORMATS[dtype].itemsize], dtype)


class ChunkReader:
    def __init__(
        self, plan: MergePlan, inputs: Sequence[Input], kernels: Mapping[KernelSpec, Kernel]
    ) -> None:
        self._plan = plan
        self._base = inputs[0]
        self._models = inputs[1:]
        self._kernels = kernels
        # Last bits by tensor and start, which the merge wants again after a look.
        self._ranked: dict[tuple[str, int], NDArray[np.uint16]] = {}

    def load(
        self, tensor: TensorPlan, start: int, count: int, buffers: Buffers, remember: bool = False
    ) -> None:
        """Read a chunk of every input. remember: what is found about it will be wanted again."""
        rank = self._kernels.get(tensor.rank_spec) if tensor.rank_spec else None
        last_bits = self._ranked.pop((tensor.name, start), None)
        if last_bits is not None:
            buffers.last_bits[: len(last_bits), :count] = last_bits
        elif rank:
            self._rank(rank, tensor, start, count, buffers, remember)
        base = read(self._base, tensor.base, start, count, buffers.base)
        for row in range(len(tensor.finetuned)):
            self._load_model(tensor, row, start, base, buffers.finetuned[row], count)

    def load_rows(
        self, tensor: TensorPlan, start: int, count: int, buffers: Buffers
    ) -> tuple[int, int] | None:
        """Read all rows that start in a chunk, of the base and of the only model. Gives where they
        begin, and how many elements they have; a row may be longer than a chunk.
        """
        width = tensor.base.width
        first = -(-start // width) * width
        elements = -(-(start + count) // width) * width - first
        if not elements:
            return None
        base = read(self._base, tensor.base, first, elements, buffers.rows[0])
        self._load_model(tensor, 0, first, base, buffers.rows[1], elements)
        return first, elements

    def load_change(
        self,
        tensor: TensorPlan,
        start: int,
        count: int,
        buffers: Buffers,
        changes: Mapping[int, NDArray[Any]],
    ) -> None:
        """Read a chunk of the base, with its change as the only model's. changes: of whole
        matrices, by their first element.
        """
        read(self._base, tensor.base, start, count, buffers.base)
        row = buffers.finetuned[0].view(FORMATS[tensor.spec.finetuned].real)
        stop = start + count
        for first, change in changes.items():
            low = max(first, start)
            high = min(first + len(change), stop)
            if low < high:
                row[low - start : high - start] = change[low - first : high - first]

    def keeps_base(
        self, tensor: TensorPlan, chunks: Iterable[tuple[int, int]], buffers: Buffers
    ) -> bool:
        """Whether a tensor is a mask, with -inf in it and nothing else that is not finite, and no
        model has other values, or they do not count.
        """
        is_mask = False
        for start, count in chunks:
            self.load(tensor, start, count, buffers)
            base = as_floats(buffers.base, tensor.base.dtype, count)
            rows = buffers.finetuned[: len(tensor.finetuned)]
            models = [as_floats(row, tensor.spec.finetuned, count) for row in rows]
            finite = base[np.isfinite(base)]
            fits = float(abs(finite).max(initial=0)) < FORMATS[tensor.spec.output].limit
            equal = all(np.array_equal(base, values) for values in models)
            if not fits or not (equal or tensor.settings.lambda_coeff == 0):
                return False
            if not all(values.max() < np.inf for values in (base, *models)):
                return False
            is_mask |= any(values.min() == -np.inf for values in (base, *models))
        return is_mask

    def explain_non_finite(
        self, tensor: TensorPlan, chunks: Sequence[tuple[int, int]], buffers: Buffers
    ) -> NoReturn:
        """Name the first value that no merge can use.

        Off the fast path, so it reads again and looks with NumPy.
        """
        inputs = [(self._base, tensor.base)]
        inputs += [(self._models[i], info) for i, info in tensor.finetuned]
        for model, info in inputs:
            for start, count in chunks:
                present = max(0, min(count, info.count - start))
                values = widen(read(model, info, start, present, buffers.base), info.dtype)
                bad = np.flatnonzero(~np.isfinite(values))
                if bad.size:
                    place = tensor.base.place_of(start + int(bad[0]))
                    value = values[bad[0]]
                    mask = f"--rule '{tensor.name}:lambda_coeff=0' keeps the base's mask; a weight"
                    raise DareError(
                        f"{model.name!r}: tensor {tensor.name!r} holds {value} at {place}",
                        f"{mask} like that is broken" if value == -np.inf else BROKEN_HINT,
                    )
        raise DareError(
            f"merging tensor {tensor.name!r} gives values beyond the range of "
            f"{tensor.output.dtype}",
            "lower lambda_coeff, the weights or the drop rate, or choose a wider dtype",
        )

    def take_base(self, tensor: TensorPlan, start: int, count: int, buffers: Buffers) -> None:
        """Put the base's values where a kernel puts its result."""
        raw = read(self._base, tensor.base, start, count, buffers.base)
        values = encode(widen(raw, tensor.base.dtype), tensor.spec.output).view(np.uint8)
        buffers.output[: len(values)] = values

    def _rank(
        self,
        rank: Kernel,
        tensor: TensorPlan,
        start: int,
        count: int,
        buffers: Buffers,
        remember: bool,
    ) -> None:
        """Find the last bits that are kept in a chunk, which whole rows decide."""
        width = tensor.base.width
        first = start // width * width
        elements = -(-(start + count) // width) * width - first
        base = read(self._base, tensor.base, first, elements, buffers.rows[0])
        values = buffers.rows[1]
        found = buffers.last_bits[: len(tensor.finetuned), :count]
        for row, (i, info) in enumerate(tensor.finetuned):
            thinning = tensor.settings.thinnings[i]
            if thinning.scheme.thresholds:
                self._load_model(tensor, row, first, base, values, elements)
                by_rank = find_last_bits(thinning, width)
                last_bits = found[row]
                rank(base, values, by_rank, buffers.order, last_bits, start - first, info.is_delta)
        room = (len(self._ranked) + 1) * self._plan.chunk * len(found) * found.itemsize
        if remember and room <= TUNING.ranked_bytes:
            self._ranked[tensor.name, start] = found.copy()

    def _load_model(
        self, tensor: TensorPlan, row: int, start: int, base: Bytes, values: Bytes, count: int
    ) -> None:
        """Read elements of one model into values. base: the same of the base, for rows that the
        model lacks.
        """
        i, info = tensor.finetuned[row]
        wanted = FORMATS[tensor.spec.finetuned]
        present = max(0, min(count, info.count - start))  # less, where the model has fewer rows
        stored = values[: present * FORMATS[info.dtype].itemsize]
        known = base if info.encoding.base is tensor.base else None
        self._models[i].read(info, start, present, stored, known)
        if info.dtype != tensor.spec.finetuned:
            values.view(wanted.real)[:present] = widen(stored.copy(), info.dtype)
        if present == count:
            return
        missing = slice(present * wanted.itemsize, count * wanted.itemsize)
        if info.is_delta:
            values[missing] = 0
        elif tensor.base.dtype == tensor.spec.finetuned:
            values[missing] = base[present * wanted.itemsize :]
        else:
            values.view(wanted.real)[present:count] = widen(base, tensor.base.dtype)[present:]
