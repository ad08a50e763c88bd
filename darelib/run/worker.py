"""One job: read ranges of the inputs, let a kernel compute, write ranges of the output."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.mask import KEEP_ALL, MASK_BITS, TILE, mask_key
from darelib.core.text import DareError, list_names
from darelib.kernels import KernelSpec
from darelib.kernels.engines import load_kernels
from darelib.kernels.fallback import examine, examine_rows
from darelib.kernels.records import Buffers
from darelib.methods import METHODS, returns_model
from darelib.methods.looks import Coefficients, Found, Look, weigh_for_look
from darelib.models.checkpoint import QUANTISE_HINT, Checkpoint
from darelib.models.encodings import Described, Target, TensorInfo
from darelib.models.fp8 import UNREAD_HINTS
from darelib.plan.checks import check_distance
from darelib.plan.plan import COPY, LOOK, MERGE, Job, MergePlan
from darelib.plan.tensorplan import TensorPlan
from darelib.run.reading import ChunkReader

Sums = TypeVar("Sums", bound=NamedTuple)


class Tally(NamedTuple):
    """What the kernels counted, for one model and one or all tensors."""

    parameters: int = 0
    sum: float = 0.0
    peak: float = 0.0
    above: int = 0
    kept: int = 0
    expected: float = 0.0  # entries that the keep rates say should be kept
    base_sum: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.parameters if self.parameters else 0.0


def sum_fields(parts: Iterable[Sums]) -> Sums:
    """Sums of one kind, added up one after the other; of peaks, the largest.

    Not by sum(), whose rounding depends on the version of Python.
    """
    first, *others = parts
    rows = zip(first._fields, zip(first, *others, strict=True), strict=True)
    return first._make(max(r) if name == "peak" else reduce(operator.add, r) for name, r in rows)


@dataclass
class Outcome:
    """What one job found: a tally per model that has the tensor, or the models that differ from a
    copied base.
    """

    tensor: str
    start: int
    bytes_read: int
    tallies: dict[int, Tally] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)
    # Of a change that was written as a product: the sums of squares that it keeps, and of all.
    energy: tuple[float, float] | None = None
    rank: int | None = None  # that holds enough of a change, where that is to be found out

    def as_entry(self) -> list[Any]:
        """For the journal."""
        tallies = {str(i): list(tally) for i, tally in self.tallies.items()}
        differing = sorted(self.differing)
        return [self.tensor, self.start, self.bytes_read, tallies, differing, self.energy]

    @classmethod
    def of_entry(cls, entry: list[Any]) -> Self:
        tensor, start, bytes_read, tallies, differing, energy = entry
        read = {int(i): Tally(*tally) for i, tally in tallies.items()}
        kept = (energy[0], energy[1]) if energy else None
        return cls(tensor, start, bytes_read, read, set(differing), kept)


@dataclass
class MatrixChange:
    """The merged change of a tensor that is solved by matrices, and what was counted: by the first
    element of each matrix.
    """

    parts: dict[int, NDArray[Any]] = field(default_factory=dict)
    tallies: dict[int, dict[int, Tally]] = field(default_factory=dict)

    def sum_tallies(self) -> dict[int, Tally]:
        """The tallies of the whole tensor, by model."""
        counted = [self.tallies[start] for start in sorted(self.tallies)]
        return {i: sum_fields(each[i] for each in counted) for i in counted[0]}


def check_related(
    plan: MergePlan, inputs: Sequence[Described], outcomes: Sequence[Outcome]
) -> None:
    """Refuse a base if all its weights show that it is another model's."""
    base, *models = inputs
    for i, model in enumerate(models):
        tallies = [outcome.tallies[i] for outcome in outcomes if i in outcome.tallies]
        total = sum_fields([Tally(), *tallies])
        weight = total.base_sum / max(total.parameters, 1)
        check_distance(plan.config, base, model, total.parameters, total.mean, weight)


def explain_copied(model: str, names: Sequence[str]) -> str:
    return (
        f"{model} differs from the base in tensors that are copied, not merged: {list_names(names)}"
    )


# Writes bytes into one of the plan's files, from a place on. It may also only compare them.
Write: TypeAlias = Callable[[int, memoryview, int], None]
# What is done for a job of one kind. It gives what was found; None: the job only looked.
Task: TypeAlias = Callable[[Job, Buffers, Write], Outcome | None]

# Where the bit patterns of infinities and NaNs begin, without their signs.
INFINITIES: Final = {32: 0x7F80_0000, 64: 0x7FF0_0000_0000_0000}


class Abandoned(Exception):
    """A job that has to stop."""


class Worker:
    """Runs the jobs of one plan: any of them, in any order, in any thread that brings its own
    buffers. tasks says what is done for each kind of job.
    """

    def __init__(
        self,
        plan: MergePlan,
        inputs: Sequence[Checkpoint],
        passes: Mapping[str, Sequence[tuple[Look, int]]],
        specs: Collection[KernelSpec],
        interrupts: Interrupts,
    ) -> None:
        """passes: by tensor, the looks before its merge. specs: the kernels of the tasks; those of
        looks and of inputs come on top.
        """
        self.plan = plan
        self.base = inputs[0]
        self.models = inputs[1:]
        self.passes = passes
        self.tasks: dict[str, Task] = {LOOK: self.look, MERGE: self.merge, COPY: self.copy}
        self.abandoned = threading.Event()  # set to make all jobs stop at once
        self.advance: Callable[[int], None] = lambda steps: None  # shows progress within a job
        self.written: list[Found] = []  # their solved changes are not needed in the next round
        self._lock = threading.Lock()
        self._looked = Counter[str]()  # by tensor: how many elements a pass has seen
        self._masks: dict[str, bool] = {}  # by tensor with infinities: whether it is a mask
        wanted = {spec for model in inputs for spec in model.specs} | {*specs}
        for tensor in plan.tensors:
            looks = [look for look, _ in passes.get(tensor.name, ()) if look.kernel]
            wanted |= {tensor.look_spec(look) for look in looks}
        self.kernels = load_kernels(wanted, plan.config.engine, interrupts, count_work(plan))
        self.reader = ChunkReader(plan, inputs, self.kernels)
        for model in inputs:
            model.prepare(self.kernels, len(inputs))

    def make_buffers(self) -> Buffers:
        looks = [look for passes in self.passes.values() for look, _ in passes]
        ranks = any(spec.kind == "rank" for spec in self.kernels)
        reads_rows = ranks or any(look.of_rows for look in looks)
        return Buffers(
            models=len(self.models),
            row_bytes=self.plan.chunk * self.plan.itemsize,
            kernels={look.kernel for look in looks},
            ranked=self.plan.ranked if reads_rows else 0,
            counters=max((look.counters for look in looks), default=0),
        )

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        return self.tasks[job.kind](job, buffers, write)

    def chunks(self, job: Job) -> Iterator[tuple[int, int]]:
        """Where each chunk starts, and how long it is."""
        for start in range(job.start, job.stop, self.plan.chunk):
            if self.abandoned.is_set():
                raise Abandoned
            yield start, min(self.plan.chunk, job.stop - start)

    def place_of(self, output: TensorInfo) -> int:
        return len(self.plan.files[output.file].header) + output.offset

    # --- what jobs do -------------------------------------------------------------------------

    def look(self, job: Job, buffers: Buffers, write: Write) -> None:
        """Look at a range before its tensor is merged. After the last range of a pass, the look
        draws its conclusion.
        """
        name = job.tensor.name
        look, look_pass = self.passes[name][job.look_pass]
        if not self._look_at(job, buffers, look, look_pass):
            self.check_mask(job, buffers)
            self._look_at(job, buffers, look, look_pass, is_mask=True)
        with self._lock:
            look.add_job(job.start, job.stop, buffers)
            self._looked[name] += job.stop - job.start
            if self._looked[name] == job.tensor.length:
                del self._looked[name]
                look.conclude(look_pass)

    def merge(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
        tensor = job.tensor
        look = self.passes[tensor.name][-1][0] if tensor.name in self.passes else None
        found = look.found if look else Found()
        if not self._merge_range(job, buffers, write, look, found):
            self.check_mask(job, buffers)
            self._merge_range(job, buffers, write, look, found, is_mask=True)
        if found.change is None:
            tallies = self.count(job, buffers)
        else:
            # A whole tensor was counted when it was solved: its first job has the tallies.
            tallies = found.change.sum_tallies() if job.start == 0 else {}
            self.written.append(found)
        return Outcome(tensor.name, job.start, job.bytes_read, tallies)

    def copy(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
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

    # --- how they do it -----------------------------------------------------------------------

    def _look_at(
        self, job: Job, buffers: Buffers, look: Look, look_pass: int, is_mask: bool = False
    ) -> bool:
        """Let a look's kernel see a range. Gives whether all deltas are finite."""
        tensor = job.tensor
        models = len(tensor.finetuned)
        if look.merges:
            models = self.describe_merge(tensor, buffers, look.found)
        else:
            self.describe(tensor, buffers, look.weigh())
        look.describe(buffers, look_pass)
        for start, count in self.chunks(job):
            if look.of_rows:
                if rows := self.reader.load_rows(tensor, start, count, buffers):
                    examine_rows(look, tensor.spec, buffers, *rows)
                continue
            self.load(tensor, start, count, buffers, look.found, is_mask, tensor.encoding.rereads)
            if look.kernel:
                self.kernels[tensor.look_spec(look)](buffers, count, models, start // TILE)
                look.add_chunk(start, count, buffers)
            else:
                examine(look, tensor.spec, buffers, count, models, start // TILE)
        return bool(np.isfinite(find_peaks(tensor, buffers, models)).all())

    def _merge_range(
        self,
        job: Job,
        buffers: Buffers,
        write: Write,
        look: Look | None,
        found: Found,
        is_mask: bool = False,
    ) -> bool:
        """Merge a range, or write the base's if it is a mask. Gives whether all values are finite;
        others are not written.
        """
        tensor = job.tensor
        kernel = self.kernels[tensor.spec]

        def put(name: str, view: memoryview, place: int) -> None:
            output = tensor.outputs[name]
            write(output.file, view, self.place_of(output) + place)

        target = Target(self.base, tensor.name, tensor.base, tensor.spec.output, put)
        writer = tensor.encoding.open_writer(target, job.start, self.plan.chunk, look)
        infinity = INFINITIES[FORMATS[tensor.spec.real].bits]
        models = self.describe_merge(tensor, buffers, found)
        for start, count in self.chunks(job):
            self.load(tensor, start, count, buffers, found, is_mask)
            kernel(buffers, count, models, start // TILE)
            if buffers.tensor["peak"][0] >= infinity:
                return False
            if is_mask:
                self.reader.take_base(tensor, start, count, buffers)
            writer.add(buffers.output, buffers.base, count)
        writer.finish()
        peaks = find_peaks(tensor, buffers, models)
        if not np.isfinite(peaks).all():  # of entries that were dropped
            return False
        if not peaks[models] < FORMATS[tensor.spec.output].limit:
            self.reader.explain_non_finite(tensor, [*self.chunks(job)], buffers)
        return True

    def check_mask(self, job: Job, buffers: Buffers) -> None:
        """Refuse values that are not finite, unless they are the -inf of a mask that stays the
        base's. Kernels are then given zeros.
        """
        tensor = job.tensor
        if tensor.name not in self._masks:
            whole = replace(job, start=0, stop=tensor.length)
            is_mask = self.reader.keeps_base(tensor, self.chunks(whole), buffers)
            self._masks[tensor.name] = is_mask
        if not self._masks[tensor.name]:
            self.reader.explain_non_finite(tensor, [*self.chunks(job)], buffers)

    def describe_merge(self, tensor: TensorPlan, buffers: Buffers, found: Found) -> int:
        """Set what the kernel that merges must know. Gives how many models it is given."""
        if found.change is not None:
            return self._describe_change(tensor, buffers)
        weigh = METHODS[tensor.settings.method].weigh
        self.describe(tensor, buffers, weigh(tensor.settings, tensor.models, found))
        for row in range(len(tensor.finetuned)):
            if tensor.is_thinned(row):  # dropped entries are 0 already
                buffers.models[row]["threshold"] = KEEP_ALL
        return len(tensor.finetuned)

    def _describe_change(self, tensor: TensorPlan, buffers: Buffers) -> int:
        """A solved change is given to the kernel as if it were the only model's."""
        self.describe(tensor, buffers, weigh_for_look(tensor.settings, tensor.models, Found()))
        record = buffers.models[0]
        record["threshold"] = KEEP_ALL
        record["is_delta"] = True
        record["scale"] = 1.0
        for name in ("bounded", "ranked", "divided"):
            record[name] = False
        return 1

    def load(
        self,
        tensor: TensorPlan,
        start: int,
        count: int,
        buffers: Buffers,
        found: Found,
        is_mask: bool,
        remember: bool = False,
    ) -> None:
        """Read what the kernel that merges is given of a chunk: zeros, if the tensor is a mask."""
        if found.change is None:
            self.reader.load(tensor, start, count, buffers, remember)
        else:
            self.reader.load_change(tensor, start, count, buffers, found.change.parts)
        if is_mask:
            buffers.base[:] = 0
            buffers.finetuned[:] = 0

    def count(self, job: Job, buffers: Buffers) -> dict[int, Tally]:
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
            record["threshold"] = thinning.threshold
            record["bounded"] = bounds is not None
            for name, value in bounds._asdict().items() if bounds else ():
                record[name] = value
            record["ranked"] = thinning.scheme.thresholds is not None
            record["divided"] = thinning.divides_each
            record["end"] = i
            record["is_delta"] = info.is_delta
            for name in ("scale", "weight", "floor"):
                record[name] = getattr(found, f"{name}s")[row]
        buffers.extra = found.extra
        buffers.width = tensor.base.width
        whole = buffers.tensor[0]
        whole["lambda_coeff"] = settings.lambda_coeff
        for name in ("base_share", "first_share"):
            whole[name] = getattr(found, name)
        whole["delta_threshold"] = self.plan.config.delta_threshold
        has_values = any(not info.is_delta for _, info in tensor.finetuned)
        whole["exact"] = returns_model(settings) and has_values


def count_work(plan: MergePlan) -> int:
    """Entries that kernels are given, of all models. Of whole matrices, the change alone."""
    merged = [tensor for tensor in plan.tensors if tensor.merged]
    return sum(t.base.count * (1 if t.matrices else len(t.finetuned)) for t in merged)


def find_peaks(tensor: TensorPlan, buffers: Buffers, models: int) -> NDArray[np.float64]:
    """The largest |delta| of each model and, where it is merged, the largest of the result."""
    real = FORMATS[tensor.spec.real]
    patterns = [*buffers.models["peak"][:models], buffers.tensor["peak"][0]]
    return np.array(patterns, real.raw).view(real.real).astype(np.float64)


def make_tally(job: Job, buffers: Buffers, row: int, peak: float) -> Tally:
    i, info = job.tensor.finetuned[row]
    found = buffers.models[row]
    count = max(0, min(job.stop, info.count) - job.start)  # entries that the model has
    rate = job.tensor.settings.thinnings[i].keep_rate
    share = rate
    if found["bounded"]:
        share = (found["low"] == 0) * found["at_low"] / (1 << MASK_BITS)
    # The zeros that stand in for rows which the model lacks are not its own.
    lacking = (job.stop - job.start - count) * share
    kept = int(found["kept"]) - round(lacking)
    stored = info.encoding.share
    if job.tensor.is_thinned(row):  # a part of all, so that the parts add up
        kept = round(stored * (job.start + count)) - round(stored * job.start)
    known = stored or 1.0  # the share of its deltas that is stored, and stands for all
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
