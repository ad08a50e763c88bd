"""One job: read ranges of the inputs, let a kernel compute, write one range of the output."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from darelib.core.drops import Thinning
from darelib.core.formats import FORMATS, widen
from darelib.core.interrupts import Interrupts
from darelib.core.mask import MASK_BITS, TILE, mask_key
from darelib.core.methods import METHODS, Coefficients, Found, Look, weigh_for_look
from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.kernels import Kernel, KernelSpec
from darelib.kernels.engines import load_kernels
from darelib.kernels.records import Buffers
from darelib.models.checkpoint import QUANTISE_HINT
from darelib.models.inputs import Input
from darelib.models.tensorfile import TensorInfo
from darelib.output.fp8 import Encoder, PeakLook
from darelib.plan.plan import Job, MergePlan, Task, TensorPlan

# What jobs write by: the number of a file, what to write, and where; it may also only compare.
Write: TypeAlias = Callable[[int, memoryview, int], None]


BROKEN_HINT: Final = "such a model is broken; use a checkpoint from before that happened"


class Abandoned(Exception):
    """A job that has to stop."""


Sums = TypeVar("Sums", bound=NamedTuple)


class Tally(NamedTuple):
    """What the kernels counted, for one model and one or all tensors."""

    parameters: int = 0
    sum: float = 0.0
    peak: float = 0.0
    above: int = 0
    kept: int = 0
    expected: float = 0.0  # what the masks' thresholds say should be kept
    base_sum: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.parameters if self.parameters else 0.0


def sum_fields(parts: Iterable[Sums]) -> Sums:
    """Sums that are all of one kind, added up one after the other; of their peaks, the largest.

    Not by sum(), whose rounding depends on the version of Python.
    """
    first, *others = parts
    rows = zip(first._fields, zip(first, *others, strict=True), strict=True)
    return first._make(
        max(row) if name == "peak" else reduce(operator.add, row) for name, row in rows
    )


@dataclass
class Outcome:
    """What one job found: a tally per model that has the tensor, or the models that differ from a copied base."""

    tensor: str
    start: int
    bytes_read: int
    tallies: dict[int, Tally] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)

    def as_entry(self) -> list[Any]:
        """For the journal."""
        tallies = {str(i): list(tally) for i, tally in self.tallies.items()}
        return [self.tensor, self.start, self.bytes_read, tallies, sorted(self.differing)]

    @classmethod
    def of_entry(cls, entry: list[Any]) -> Outcome:
        tensor, start, bytes_read, tallies, differing = entry
        return cls(
            tensor,
            start,
            bytes_read,
            {int(i): Tally(*t) for i, t in tallies.items()},
            set(differing),
        )


@lru_cache(16)
def find_limits(thinning: Thinning, width: int) -> NDArray[np.uint16]:
    """By rank in a row: the largest mask bits of what is kept."""
    thresholds = thinning.find_thresholds(np.arange(width, dtype=np.float64), width)
    return (thresholds - 1).astype(np.uint16)


class JobWorker:
    """What runs the jobs of one task: any of them, in any order, in any thread that brings its own buffers."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.abandoned = threading.Event()  # set to make all jobs stop at once

    def make_buffers(self) -> Buffers:
        raise NotImplementedError

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        """None: it only looked, and there is something to take."""
        raise NotImplementedError

    def take(self, job: Job, buffers: Buffers) -> None:
        """Take what a job that only looked has found, one job at a time."""

    def chunks(self, job: Job) -> Iterator[tuple[int, int]]:
        """Where each chunk starts, and how long it is."""
        for start in range(job.start, job.stop, self.task.chunk):
            if self.abandoned.is_set():
                raise Abandoned
            yield start, min(self.task.chunk, job.stop - start)

    def offset(self, tensor: TensorPlan) -> int:
        """Where a tensor starts in its file."""
        return self.place_of(tensor.output)

    def place_of(self, output: TensorInfo) -> int:
        return len(self.task.files[output.file].header) + output.offset


class Worker(JobWorker):
    """Runs the jobs of a merge, of its looks, or of an analysis."""

    def __init__(
        self, task: Task, inputs: Sequence[Input], passes: Mapping[str, Sequence[tuple[Look, int]]],
        specs: Collection[KernelSpec], interrupts: Interrupts,
    ) -> None:  # fmt: skip
        """passes: by tensor, the looks before its merge. specs: the kernels that merge, if any; others come on top."""
        super().__init__(task)
        self.base, self.models, self.passes = inputs[0], inputs[1:], passes
        self._looked = Counter[
            str
        ]()  # by tensor: of how many elements a pass has taken what was found
        self._ranked: dict[
            tuple[str, int, int], NDArray[np.uint16]
        ] = {}  # limits by tensor, row and start
        wanted = {
            *specs,
            *(t.look_spec(look) for t in task.tensors for look, _ in passes.get(t.name, ())),
        }
        wanted |= {spec for model in inputs for spec in model.specs}
        self.kernels = load_kernels(wanted, task.config.engine, interrupts)
        for model in inputs:
            model.prepare(self.kernels, task.threads * len(inputs))

    @classmethod
    def for_merge(cls, plan: MergePlan, inputs: Sequence[Input], interrupts: Interrupts) -> Worker:
        return cls(plan, inputs, plan.list_passes(), plan.specs(), interrupts)

    def make_buffers(self) -> Buffers:
        kinds = {look.kernel for passes in self.passes.values() for look, _ in passes}
        ranked = self.task.ranked if any(spec.kind == "rank" for spec in self.kernels) else 0
        return Buffers(len(self.models), self.task.chunk * self.task.itemsize, kinds, ranked)

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        """None: it only looked, and there is something to take."""
        if job.look_pass is not None:
            self._look(job, buffers, *self.passes[job.tensor.name][job.look_pass])
            return None
        return (
            self._merge(job, buffers, write)
            if job.tensor.merged
            else self._copy(job, buffers, write)
        )

    def take(self, job: Job, buffers: Buffers) -> None:
        """Let a look take what a job found, one job at a time; after the last of a pass it draws its conclusion."""
        name = job.tensor.name
        look, number = self.passes[name][job.look_pass or 0]
        look.add_job(job.start, job.stop, buffers)
        self._looked[name] += job.stop - job.start
        if self._looked[name] == job.tensor.length:
            del self._looked[name]
            look.conclude(number)

    def _look(self, job: Job, buffers: Buffers, look: Look, number: int) -> None:
        tensor, kernel = job.tensor, self.kernels[job.tensor.look_spec(look)]
        weigh = METHODS[tensor.settings.method].weigh if look.merges else weigh_for_look
        self._describe(tensor, buffers, weigh(tensor.settings, tensor.models, look.found))
        look.describe(buffers, number)
        for start, count in self.chunks(job):
            self._load(
                tensor, start, count, buffers, remember=tensor.scales is None
            )  # else its chunks will be others
            self._compute(kernel, tensor, start, count, buffers)
            look.add_chunk(start, count, buffers)
        if not np.isfinite(self._peaks(tensor, buffers)).all():
            self._explain_non_finite(job, buffers)

    def _merge(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
        tensor, spec, passes = job.tensor, job.tensor.spec, self.passes.get(job.tensor.name)
        kernel, item, models = (
            self.kernels[spec],
            FORMATS[spec.output].itemsize,
            len(tensor.finetuned),
        )
        weigh, offset = METHODS[tensor.settings.method].weigh, self.offset(tensor)
        encoder = self._make_encoder(job, write, passes[-1][0] if passes else None)
        found = passes[-1][0].found if passes else Found()
        self._describe(tensor, buffers, weigh(tensor.settings, tensor.models, found))
        for start, count in self.chunks(job):
            self._load(tensor, start, count, buffers)
            self._compute(kernel, tensor, start, count, buffers)
            if encoder:
                encoder.take(
                    *(row.view(np.float32)[:count] for row in (buffers.output, buffers.base))
                )
            else:
                write(
                    tensor.output.file, buffers.output.data[: count * item], offset + start * item
                )
        if encoder:
            encoder.flush()
        peaks = self._peaks(tensor, buffers)
        if not (peaks[models] < FORMATS[spec.output].limit and np.isfinite(peaks).all()):
            self._explain_non_finite(job, buffers)
        tallies = {
            i: self._tally(job, buffers, row, peaks[row]) for row, i in enumerate(tensor.models)
        }
        return Outcome(tensor.name, job.start, job.bytes_read, tallies)

    def _make_encoder(self, job: Job, write: Write, look: Look | None) -> Encoder | None:
        """What writes the values of a job, if that is in FP8. look: the last one at the tensor."""
        tensor, scales, scaled = job.tensor, job.tensor.scales, job.tensor.scaled
        if scales is None or scaled is None:
            return None

        def put(is_scales: bool, view: memoryview, place: int) -> None:
            output = scales.info if is_scales else tensor.output
            write(output.file, view, self.place_of(output) + place)

        peak = look if isinstance(look, PeakLook) else None
        return Encoder(self.base, scaled, job.start, self.task.chunk, put, peak)

    def _describe(self, tensor: TensorPlan, buffers: Buffers, found: Coefficients) -> None:
        """Set what the kernels must know, and clear what they found before."""
        settings = tensor.settings
        buffers.clear()
        for row, (i, info) in enumerate(tensor.finetuned):
            record = buffers.models[row]
            thinning, bounds = settings.thinnings[i], found.bounds[row]
            record["key_0"], record["key_1"] = mask_key(self.task.seeds[i], tensor.mask_names[row])
            record["limit"], record["bounded"] = thinning.threshold - 1, bounds is not None
            for name, value in bounds._asdict().items() if bounds else ():
                record[name] = value
            record["ranked"], record["divided"] = (
                thinning.scheme.thresholds is not None,
                thinning.divides_each,
            )
            record["number"], record["is_delta"] = i, info.is_delta
            record["stored"] = 0 if info.mask_name is None else info.threshold
            record["scale"], record["weight"], record["floor"] = (
                found.scales[row],
                found.weights[row],
                found.floors[row],
            )
        whole = buffers.tensor[0]
        whole["lambda_coeff"] = settings.lambda_coeff
        whole["base_share"], whole["first_share"] = found.base_share, found.first_share
        whole["threshold"] = self.task.config.delta_threshold
        whole["exact"] = settings.returns_model and any(
            not info.is_delta for _, info in tensor.finetuned
        )

    def _compute(
        self, kernel: Kernel, tensor: TensorPlan, start: int, count: int, buffers: Buffers
    ) -> None:
        kernel(buffers, count, len(tensor.finetuned), start // TILE)
        for row, (i, info) in enumerate(tensor.finetuned):
            if buffers.models["stored"][row]:
                self.models[i].take(info, count, int(buffers.models["next"][row]))
                buffers.models["next"][row] = 0

    def _load(
        self, tensor: TensorPlan, start: int, count: int, buffers: Buffers, remember: bool = False
    ) -> None:
        """Read a chunk of every input. remember: what is found about it will be wanted again."""
        self._rank(tensor, start, count, buffers, remember)
        base = self._read(self.base, tensor.base, start, count, buffers.base)
        for row in range(len(tensor.finetuned)):
            self._load_model(tensor, row, start, base, buffers.finetuned[row], count)

    def _rank(
        self, tensor: TensorPlan, start: int, count: int, buffers: Buffers, remember: bool
    ) -> None:
        """Find the mask's limits for a chunk of the models whose drops want ranks, which whole rows decide."""
        spec, width = tensor.rank_spec, tensor.base.width
        if spec not in self.kernels or self._recall(tensor, start, count, buffers):
            return
        first, stop = start // width * width, -(-(start + count) // width) * width
        base, values = (
            self._read(self.base, tensor.base, first, stop - first, buffers.rows[0]),
            buffers.rows[1],
        )
        for row, (i, info) in enumerate(tensor.finetuned):
            if tensor.settings.thinnings[i].scheme.thresholds:
                self._load_model(tensor, row, first, base, values, stop - first)
                limits = find_limits(tensor.settings.thinnings[i], width)
                found = buffers.limits[row, :count]
                self.kernels[spec](
                    base, values, limits, buffers.order, found, start - first, info.is_delta
                )
                if (
                    remember
                    and (len(self._ranked) + 1) * self.task.chunk * found.itemsize
                    <= TUNING.ranked_bytes
                ):
                    self._ranked[tensor.name, row, start] = found.copy()

    def _recall(self, tensor: TensorPlan, start: int, count: int, buffers: Buffers) -> bool:
        """Whether all limits of a chunk were remembered."""
        ranked = [
            row
            for row, i in enumerate(tensor.models)
            if tensor.settings.thinnings[i].scheme.thresholds
        ]
        known = [self._ranked.pop((tensor.name, row, start), None) for row in ranked]
        for row, limits in zip(ranked, known, strict=True):
            if limits is not None:
                buffers.limits[row, :count] = limits
        return bool(ranked) and not any(limits is None for limits in known)

    def _load_model(
        self,
        tensor: TensorPlan,
        row: int,
        start: int,
        base: NDArray[np.uint8],
        values: NDArray[np.uint8],
        count: int,
    ) -> None:
        """Read elements of one model into values. base: the same of the base, for rows that the model lacks."""
        (i, info), dtype = tensor.finetuned[row], tensor.spec.finetuned
        wanted, item = FORMATS[dtype], FORMATS[dtype].itemsize
        present = max(0, min(count, info.count - start))  # less, where the model has fewer rows
        stored = self._read(self.models[i], info, start, present, values)
        if info.dtype != dtype:
            with np.errstate(
                all="ignore"
            ):  # of a packed model, what follows its entries is anything
                values.view(wanted.real)[:present] = widen(stored.copy(), info.dtype)
        if info.is_delta:
            values[present * item : count * item] = 0
        elif present < count and tensor.base.dtype == dtype:
            values[present * item : count * item] = base[present * item :]
        elif present < count:
            values.view(wanted.real)[present:count] = widen(base, tensor.base.dtype)[present:]

    def _read(
        self, model: Input, info: TensorInfo, start: int, count: int, buffer: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Elements of a tensor, as bytes at the start of buffer."""
        part = buffer[: count * FORMATS[info.dtype].itemsize]
        model.read(info, start, count, part)
        return part

    def _peaks(self, tensor: TensorPlan, buffers: Buffers) -> NDArray[np.float64]:
        """The largest |delta| of each model and, where it is merged, the largest of the result."""
        real = FORMATS[tensor.spec.real]
        patterns = [*buffers.models["peak"][: len(tensor.finetuned)], buffers.tensor["peak"][0]]
        return np.array(patterns, real.raw).view(real.real).astype(np.float64)

    def _tally(self, job: Job, buffers: Buffers, row: int, peak: float) -> Tally:
        i, info = job.tensor.finetuned[row]
        found, settings = buffers.models[row], job.tensor.settings
        count = max(0, min(job.stop, info.count) - job.start)  # what the model has of it
        rate = settings.thinnings[i].keep_rate
        # What stands in for rows that it lacks, deltas of 0, is not its own.
        share = (
            (found["low"] == 0) * found["at_low"] / (1 << MASK_BITS) if found["bounded"] else rate
        )
        lacking = (job.stop - job.start - count) * share
        kept = int(found["kept"]) - round(lacking)
        base_size = float(buffers.tensor["base_size"][0])
        sample = count / (
            info.seen(job.start, job.stop) or 1
        )  # above 1, where not all deltas are known
        above, size = round(int(found["above"]) * sample), float(found["size"]) * sample
        return Tally(
            count, size, float(peak), above, min(count, max(0, kept)), count * rate, base_size
        )

    def _copy(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
        outcome, tensor = Outcome(job.tensor.name, job.start, job.bytes_read), job.tensor
        for start, size in self.chunks(job):
            mine, theirs = buffers.base.data[:size], buffers.output.data[:size]
            self.base.read_bytes(mine, tensor.base, start)
            for i, info in tensor.finetuned:
                if info.mask_name is not None:
                    continue  # packed, since only another model has integers here: not all of it is known
                alike = (info.dtype, info.shape) == (tensor.base.dtype, tensor.base.shape)
                if alike:
                    self.models[i].read_bytes(theirs, info, start)
                if not alike or not np.array_equal(buffers.base[:size], buffers.output[:size]):
                    outcome.differing.add(i)
            write(tensor.output.file, mine, self.offset(tensor) + start)
        if outcome.differing and tensor.quantised:
            name = self.models[min(outcome.differing)].name
            raise DareError(
                f"tensor {tensor.name!r} is part of a quantised module ({tensor.base.dtype}) and differs in {name!r}",
                QUANTISE_HINT,
            )
        return outcome

    def _explain_non_finite(self, job: Job, buffers: Buffers) -> NoReturn:
        """Name the first value that no merge can use. Off the fast path, so it reads again and looks with NumPy."""
        tensor = job.tensor
        for model, info in [
            (self.base, tensor.base),
            *((self.models[i], info) for i, info in tensor.finetuned),
        ]:
            for start, count in self.chunks(job):
                present = max(0, min(count, info.count - start))
                buffers.base[:] = 0  # a packed model has fewer entries
                values = widen(self._read(model, info, start, present, buffers.base), info.dtype)
                bad = np.flatnonzero(~np.isfinite(values))
                if bad.size:
                    place = (
                        f" at {tensor.base.place_of(start + int(bad[0]))}"
                        if info.mask_name is None
                        else ""
                    )
                    raise DareError(
                        f"{model.name!r}: tensor {tensor.name!r} holds {values[bad[0]]}{place}",
                        BROKEN_HINT,
                    )
        raise DareError(
            f"merging tensor {tensor.name!r} gives values beyond the range of {tensor.output.dtype}",
            "lower lambda_coeff, the weights or the drop rate, or choose a wider dtype",
        )
