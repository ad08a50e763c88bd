"""One job: read ranges of the inputs, let a kernel compute, write ranges of the output."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.mask import KEEP_ALL, MASK_BITS, TILE, mask_key
from darelib.core.text import DareError
from darelib.kernels import KernelSpec
from darelib.kernels.engines import load_kernels
from darelib.kernels.entries import spread
from darelib.kernels.records import Buffers
from darelib.methods import METHODS, returns_model
from darelib.methods.looks import Found, Look
from darelib.methods.method import Coefficients, weigh_for_look
from darelib.models.checkpoint import QUANTISE_HINT, Checkpoint
from darelib.models.encodings import Target, TensorInfo
from darelib.models.fp8 import UNREAD_HINTS
from darelib.plan.plan import Job, MergePlan
from darelib.plan.tensors import TensorPlan
from darelib.run.outcomes import Outcome, Tally
from darelib.run.reading import Reader

# What jobs write by: the number of a file, what to write, and where; it may also only compare.
Write: TypeAlias = Callable[[int, memoryview, int], None]

# The bit patterns of what is not finite, without its sign, begin there.
INFINITIES: Final = {32: 0x7F80_0000, 64: 0x7FF0_0000_0000_0000}


class Abandoned(Exception):
    """A job that has to stop."""


class JobWorker:
    """What runs the jobs of one plan: any of them, in any order, in any thread that brings its own
    buffers.
    """

    def __init__(self, plan: MergePlan) -> None:
        self.plan = plan
        self.abandoned = threading.Event()  # set to make all jobs stop at once

    def make_buffers(self) -> Buffers:
        raise NotImplementedError

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        """None: it only looked, and the look is to be finished."""
        raise NotImplementedError

    def finish_look(self, job: Job, buffers: Buffers) -> None:
        """Keep what a job that only looked has found, one job at a time."""

    def chunks(self, job: Job) -> Iterator[tuple[int, int]]:
        """Where each chunk starts, and how long it is."""
        for start in range(job.start, job.stop, self.plan.chunk):
            if self.abandoned.is_set():
                raise Abandoned
            yield start, min(self.plan.chunk, job.stop - start)

    def place_of(self, output: TensorInfo) -> int:
        return len(self.plan.files[output.file].header) + output.offset


class Worker(JobWorker):
    """Runs the jobs of a merge, of its looks, or of an analysis."""

    def __init__(
        self,
        plan: MergePlan,
        inputs: Sequence[Checkpoint],
        passes: Mapping[str, Sequence[tuple[Look, int]]],
        specs: Collection[KernelSpec],
        interrupts: Interrupts,
    ) -> None:
        """passes: by tensor, the looks before its merge. specs: the kernels that merge, if any;
        others come on top.
        """
        super().__init__(plan)
        self.base = inputs[0]
        self.models = inputs[1:]
        self.passes = passes
        self._looked = Counter[str]()  # by tensor: how many elements a pass has seen
        wanted = {spec for model in inputs for spec in model.specs} | {*specs}
        for tensor in plan.tensors:
            looks = [look for look, _ in passes.get(tensor.name, ()) if not look.whole]
            wanted |= {tensor.look_spec(look) for look in looks}
        self.kernels = load_kernels(wanted, plan.config.engine, interrupts)
        self.reader = Reader(plan, inputs, self.kernels)
        for model in inputs:
            model.prepare(self.kernels, len(inputs))

    @classmethod
    def for_merge(
        cls, plan: MergePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts
    ) -> Self:
        return cls(plan, inputs, plan.list_passes(), plan.specs(), interrupts)

    def make_buffers(self) -> Buffers:
        kinds = {look.kernel for passes in self.passes.values() for look, _ in passes}
        ranks = any(spec.kind in ("rank", "diverge") for spec in self.kernels)
        row_bytes = self.plan.chunk * self.plan.itemsize
        return Buffers(len(self.models), row_bytes, kinds, self.plan.ranked if ranks else 0)

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        if job.look_pass is not None:
            self.look(job, buffers, *self.passes[job.tensor.name][job.look_pass])
            return None
        if job.tensor.merged:
            return self._merge(job, buffers, write)
        return self._copy(job, buffers, write)

    def finish_look(self, job: Job, buffers: Buffers) -> None:
        """After the last job of a pass, the look draws its conclusion."""
        name = job.tensor.name
        look, number = self.passes[name][job.look_pass or 0]
        look.add_job(job.start, job.stop, buffers)
        self._looked[name] += job.stop - job.start
        if self._looked[name] == job.tensor.length:
            del self._looked[name]
            look.conclude(number)

    def look(self, job: Job, buffers: Buffers, look: Look, number: int) -> None:
        tensor = job.tensor
        kernel = self.kernels[tensor.look_spec(look)]
        models = len(tensor.finetuned)
        if look.merges:
            models = self.describe_merge(tensor, buffers, look.found)
        else:
            seen = weigh_for_look(tensor.settings, tensor.models, look.found)
            self.describe(tensor, buffers, seen)
        look.describe(buffers, number)
        for start, count in self.chunks(job):
            if look.of_rows:
                rows = self.reader.measure_rows(kernel, tensor, start, count, buffers)
                look.add_chunk(start, rows, buffers)
                continue
            self.load(tensor, start, count, buffers, look.found, tensor.encoding.rereads)
            kernel(buffers, count, models, start // TILE)
            look.add_chunk(start, count, buffers)
        if not np.isfinite(find_peaks(tensor, buffers, models)).all():
            self.keep_base(job, buffers)
            self.look(job, buffers, look, number)

    def _merge(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
        tensor = job.tensor
        look = self.passes[tensor.name][-1][0] if tensor.name in self.passes else None
        found = look.found if look else Found()
        kernel = self.kernels[tensor.spec]

        def put(name: str, view: memoryview, place: int) -> None:
            output = tensor.outputs[name]
            write(output.file, view, self.place_of(output) + place)

        target = Target(self.base, tensor.name, tensor.base, tensor.spec.output, put)
        writer = tensor.encoding.open_writer(target, job.start, self.plan.chunk, look)
        infinity = INFINITIES[FORMATS[tensor.spec.real].bits]
        models = self.describe_merge(tensor, buffers, found)
        for start, count in self.chunks(job):
            self.load(tensor, start, count, buffers, found)
            kernel(buffers, count, models, start // TILE)
            if buffers.tensor["peak"][0] >= infinity:  # before it is written
                self.keep_base(job, buffers)
                return self._merge(job, buffers, write)
            if tensor.name in self.reader.kept:
                self.reader.take_base(tensor, start, count, buffers)
            writer.add(buffers.output, buffers.base, count)
        writer.finish()
        peaks = find_peaks(tensor, buffers, models)
        if not np.isfinite(peaks).all():  # of what was dropped
            self.keep_base(job, buffers)
            return self._merge(job, buffers, write)
        if not peaks[models] < FORMATS[tensor.spec.output].limit:
            self.reader.explain_non_finite(tensor, [*self.chunks(job)], buffers)
        return Outcome(tensor.name, job.start, job.bytes_read, self.count(job, buffers, found))

    def describe_merge(self, tensor: TensorPlan, buffers: Buffers, found: Found) -> int:
        """Set what the kernel that merges must know. Gives how many models it is given."""
        weigh = METHODS[tensor.settings.method].weigh
        self.describe(tensor, buffers, weigh(tensor.settings, tensor.models, found))
        for row in range(len(tensor.finetuned)):
            if tensor.is_thinned(row):  # what its mask drops is 0, and need not be found again
                buffers.models[row]["limit"] = KEEP_ALL
        return len(tensor.finetuned)

    def load(
        self,
        tensor: TensorPlan,
        start: int,
        count: int,
        buffers: Buffers,
        found: Found,
        remember: bool = False,
    ) -> None:
        """Read what the kernel that merges is given of a chunk."""
        self.reader.load(tensor, start, count, buffers, remember)
        if found.by_row is not None:
            own = buffers.by_entry
            own[:count] = spread(found.by_row, found.width, start, count, own)

    def count(self, job: Job, buffers: Buffers, found: Found) -> dict[int, Tally]:
        """What kernels have counted in a job, by model. Statistics are of weights."""
        peaks = find_peaks(job.tensor, buffers, len(job.tensor.finetuned))
        rows = () if job.tensor.buffer else job.tensor.models
        return {i: make_tally(job, buffers, row, peaks[row]) for row, i in enumerate(rows)}

    def describe(self, tensor: TensorPlan, buffers: Buffers, found: Coefficients) -> None:
        """Set what the kernels must know, and clear what they found before."""
        settings = tensor.settings
        buffers.clear()
        for row, (i, info) in enumerate(tensor.finetuned):
            record = buffers.models[row]
            thinning = settings.thinnings[i]
            bounds = found.bounds[row]
            record["key_0"], record["key_1"] = mask_key(self.plan.seeds[i], tensor.mask_names[row])
            record["limit"] = thinning.threshold - 1
            record["bounded"] = bounds is not None
            for name, value in bounds._asdict().items() if bounds else ():
                record[name] = value
            record["ranked"] = thinning.scheme.thresholds is not None
            record["divided"] = thinning.divides_each
            record["number"] = i
            record["is_delta"] = info.is_delta
            for name in ("scale", "weight", "floor", "boost"):
                record[name] = getattr(found, f"{name}s")[row]
        whole = buffers.tensor[0]
        whole["lambda_coeff"] = settings.lambda_coeff
        for name in ("base_share", "first_share", "bound"):
            whole[name] = getattr(found, name)
        whole["threshold"] = self.plan.config.delta_threshold
        has_values = any(not info.is_delta for _, info in tensor.finetuned)
        whole["exact"] = returns_model(settings) and has_values

    def _copy(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
        tensor = job.tensor
        outcome = Outcome(tensor.name, job.start, job.bytes_read)
        place = self.place_of(tensor.output)
        for start, size in self.chunks(job):
            mine = buffers.base[:size]
            theirs = buffers.output[:size]
            tensor.base.encoding.read_stored(self.base, tensor.base, start, mine.data)
            for i, info in tensor.finetuned:
                alike = (info.dtype, info.shape) == (tensor.base.dtype, tensor.base.shape)
                if alike:
                    info.encoding.read_stored(self.models[i], info, start, theirs.data)
                if not alike or not np.array_equal(mine, theirs):
                    outcome.differing.add(i)
            write(tensor.output.file, mine.data, place + start)
        if outcome.differing and tensor.quantised:
            hint = UNREAD_HINTS.get(tensor.base.dtype, QUANTISE_HINT)
            raise explain_quantised(tensor, self.models[min(outcome.differing)].name, hint)
        return outcome

    def keep_base(self, job: Job, buffers: Buffers) -> None:
        """Take the base's tensor as it is if it is a mask; any other value that is not finite is an
        error.
        """
        whole = replace(job, start=0, stop=job.tensor.length)
        kept = self.reader.kept
        is_mask = self.reader.keeps_base(job.tensor, self.chunks(whole), buffers)
        # Another thread may have found out meanwhile: then zeros were read here.
        if not is_mask and job.tensor.name not in kept:
            self.reader.explain_non_finite(job.tensor, [*self.chunks(job)], buffers)
        kept.add(job.tensor.name)


def find_peaks(tensor: TensorPlan, buffers: Buffers, models: int) -> NDArray[np.float64]:
    """The largest |delta| of each model and, where it is merged, the largest of the result."""
    real = FORMATS[tensor.spec.real]
    patterns = [*buffers.models["peak"][:models], buffers.tensor["peak"][0]]
    return np.array(patterns, real.raw).view(real.real).astype(np.float64)


def make_tally(job: Job, buffers: Buffers, row: int, peak: float) -> Tally:
    i, info = job.tensor.finetuned[row]
    found = buffers.models[row]
    count = max(0, min(job.stop, info.count) - job.start)  # what the model has of it
    rate = job.tensor.settings.thinnings[i].keep_rate
    share = rate
    if found["bounded"]:
        share = (found["low"] == 0) * found["at_low"] / (1 << MASK_BITS)
    # What stands in for rows that it lacks, deltas of 0, is not its own.
    lacking = (job.stop - job.start - count) * share
    kept = int(found["kept"]) - round(lacking)
    stored = info.encoding.share
    if job.tensor.is_thinned(row):  # a part of all, so that the parts add up
        kept = round(stored * (job.start + count)) - round(stored * job.start)
    known = stored or 1.0  # of its deltas, which stand for all
    return Tally(
        parameters=count,
        sum=float(found["size"]) / known,
        peak=float(peak),
        above=round(int(found["above"]) / known),
        kept=min(count, max(0, kept)),
        expected=count * rate,
        base_sum=float(buffers.tensor["base_size"][0]),
    )


def explain_quantised(tensor: TensorPlan, name: str, hint: str = QUANTISE_HINT) -> DareError:
    return DareError(
        f"tensor {tensor.name!r} is part of a quantised module ({tensor.base.dtype}) and differs "
        f"in {name!r}",
        hint,
    )
