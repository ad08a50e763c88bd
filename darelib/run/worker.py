"""One job: read ranges of the inputs, compute, write ranges of the output."""

from __future__ import annotations

import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic.chunks import Cut, Seen, join_seen
from darelib.arithmetic.engine import ENGINE
from darelib.core.arrays import Array, add_in_turn
from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_BITS
from darelib.core.text import DareError, list_names
from darelib.methods import METHODS
from darelib.methods.looks import Coefficients, Found, Look, weigh_for_look
from darelib.models.checkpoint import QUANTISE_HINT
from darelib.models.forms import Entry, Target
from darelib.models.fp8 import UNREAD_HINTS
from darelib.models.tensor import Described
from darelib.plan.checks import check_distance
from darelib.plan.plan import COPY, LOOK, MERGE, Job, MergePlan
from darelib.plan.tensorplan import TensorPlan
from darelib.run.reading import ChunkReader, TensorChunk

Sums = TypeVar("Sums", bound=NamedTuple)


class Tally(NamedTuple):
    """What was counted, for one model and one or all tensors."""

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
Task: TypeAlias = Callable[[Job, Write], Outcome | None]


class Abandoned(Exception):
    """A job that has to stop."""


class Worker:
    """Runs the jobs of one plan: any of them, in any order, in any thread. tasks says what is done
    for each kind of job.
    """

    def __init__(
        self,
        plan: MergePlan,
        inputs: Sequence[Described],
        passes: Mapping[str, Sequence[tuple[Look, int]]],
    ) -> None:
        """passes: by tensor, the looks before its merge."""
        self.plan = plan
        self.inputs = inputs
        self.passes = passes
        self.tasks: dict[str, Task] = {LOOK: self.look, MERGE: self.merge, COPY: self.copy}
        self.abandoned = threading.Event()  # set to make all jobs stop at once
        self.advance: Callable[[int], None] = lambda steps: None  # shows progress within a job
        self.written: list[Found] = []  # their solved changes are not needed in the next round
        self.reader = ChunkReader(plan, inputs)
        self._lock = threading.Lock()
        self._looked = Counter[str]()  # by tensor: how many elements a pass has seen
        self._masks: dict[str, bool] = {}  # by tensor with infinities: whether it is a mask
        ENGINE.choose(plan.config.engine, count_work(plan))

    def run(self, job: Job, write: Write) -> Outcome | None:
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            return self.tasks[job.kind](job, write)

    def chunks(self, job: Job) -> Iterator[tuple[int, int]]:
        """Where each chunk starts, and how long it is."""
        for start in range(job.start, job.stop, self.plan.chunk):
            if self.abandoned.is_set():
                raise Abandoned
            yield start, min(self.plan.chunk, job.stop - start)

    def place_of(self, output: Entry) -> int:
        return len(self.plan.files[output.file].header) + output.offset

    # --- what jobs do -------------------------------------------------------------------------

    def look(self, job: Job, write: Write) -> None:
        """Look at a range before its tensor is merged. After the last range of a pass, the look
        draws its conclusion.
        """
        name = job.tensor.name
        look, look_pass = self.passes[name][job.look_pass]
        noted, is_finite = self._look_at(job, look, look_pass)
        if not is_finite:
            self.check_mask(job)
            noted, _ = self._look_at(job, look, look_pass, is_mask=True)
        with self._lock:
            if noted is not None:
                look.add(noted)
            self._looked[name] += job.stop - job.start
            if self._looked[name] == job.tensor.length:
                del self._looked[name]
                look.conclude(look_pass)

    def merge(self, job: Job, write: Write) -> Outcome:
        tensor = job.tensor
        look = self.passes[tensor.name][-1][0] if tensor.name in self.passes else None
        found = look.found if look else Found()
        counts = self._merge_range(job, write, look, found)
        if counts is None:
            self.check_mask(job)
            counts = self._merge_range(job, write, look, found, is_mask=True)
            assert counts
        if found.change is None:
            tallies = counts.make_tallies(job)
        else:
            # A whole tensor was counted when it was solved: its first job has the tallies.
            tallies = found.change.sum_tallies() if job.start == 0 else {}
            self.written.append(found)
        return Outcome(tensor.name, job.start, job.bytes_read, tallies)

    def copy(self, job: Job, write: Write) -> Outcome:
        tensor = job.tensor
        outcome = Outcome(tensor.name, job.start, job.bytes_read)
        place = self.place_of(tensor.output)
        for start, size in self.chunks(job):
            mine = tensor.base.read_raw(start, size)
            for i, info in tensor.finetuned:
                alike = (info.dtype, info.shape) == (tensor.base.dtype, tensor.base.shape)
                if not alike or not np.array_equal(mine, info.read_raw(start, size)):
                    outcome.differing.add(i)
            write(tensor.output.file, mine.data, place + start)
        if outcome.differing and tensor.quantised:
            hint = UNREAD_HINTS.get(tensor.base.dtype, QUANTISE_HINT)
            raise explain_quantised(tensor, self.inputs[1 + min(outcome.differing)].name, hint)
        return outcome

    # --- how they do it -----------------------------------------------------------------------

    def _look_at(
        self, job: Job, look: Look, look_pass: int, is_mask: bool = False
    ) -> tuple[Any, bool]:
        """What a look notes of a range, and whether all deltas that it sees are finite."""
        tensor = job.tensor
        own = self.weigh(tensor, look.found) if look.merges else look.weigh()
        cuts = self.reader.make_cuts(tensor, own, look.merges)
        noted: Any = None
        is_finite = True
        for start, count in self.chunks(job):
            if look.of_rows:
                chunk = self.reader.load_rows(tensor, start, count, cuts)
            else:
                chunk = self.load(tensor, start, count, cuts, look.found, is_mask, True)
            if chunk is None:
                continue
            if look.merges:
                self.combine(chunk, own, look.found)
                is_finite &= chunk.peak < math.inf
            noted = look.observe(chunk, look_pass, noted)
            is_finite &= all(seen.peak < math.inf for seen in chunk.seen)
        return noted, is_finite

    def _merge_range(
        self, job: Job, write: Write, look: Look | None, found: Found, is_mask: bool = False
    ) -> Counts | None:
        """Merge a range, or write the base's if it is a mask. Gives what was counted; None: some
        values are not finite. Such are not written.
        """
        tensor = job.tensor

        def put(name: str, view: memoryview, place: int) -> None:
            output = tensor.outputs[name]
            write(output.file, view, self.place_of(output) + place)

        target = Target(tensor.name, tensor.base, tensor.dtype, put)
        writer = tensor.form.open_writer(target, job.start, self.plan.chunk, look)
        own = self.weigh(tensor, found)
        cuts = [] if found.change is not None else self.reader.make_cuts(tensor, own, True)
        counts = Counts()
        for start, count in self.chunks(job):
            chunk = self.load(tensor, start, count, cuts, found, is_mask)
            self.combine(chunk, own, found)
            if not chunk.peak < math.inf:
                return None
            counts.add(chunk)
            base = tensor.base.read(start, count) if is_mask else chunk.base
            writer.add(base if is_mask else chunk.merged, base)
        writer.finish()
        if not counts.is_finite:  # what was dropped
            return None
        if not counts.peak < FORMATS[tensor.dtype].limit:
            self.reader.explain_non_finite(tensor, [*self.chunks(job)])
        return counts

    def check_mask(self, job: Job) -> None:
        """Refuse values that are not finite, unless they are the -inf of a mask that stays the
        base's. They then count as zeros.
        """
        tensor = job.tensor
        if tensor.name not in self._masks:
            whole = replace(job, start=0, stop=tensor.length)
            self._masks[tensor.name] = self.reader.keeps_base(tensor, self.chunks(whole))
        if not self._masks[tensor.name]:
            self.reader.explain_non_finite(tensor, [*self.chunks(job)])

    def weigh(self, tensor: TensorPlan, found: Found) -> Coefficients:
        if found.change is not None:
            return weigh_for_look(tensor.settings, tensor.models, Found())
        return METHODS[tensor.settings.method].weigh(tensor.settings, tensor.models, found)

    def load(
        self,
        tensor: TensorPlan,
        start: int,
        count: int,
        cuts: Sequence[Cut],
        found: Found,
        is_mask: bool,
        is_look: bool = False,
    ) -> TensorChunk:
        """A chunk of all inputs or, where the merged change is known, of the base."""
        used = cuts if found.change is None else ()
        return self.reader.load(
            tensor, start, count, used, is_mask, is_look and tensor.form.rereads
        )

    def combine(self, chunk: TensorChunk, own: Coefficients, found: Found) -> None:
        if found.change is None:
            chunk.combine(own)
        else:
            chunk.take_change(found.change.parts)


class Counts:
    """What was counted in the chunks of one job."""

    def __init__(self) -> None:
        self._base_sizes: list[Array] = []
        self._seen: list[list[Seen]] = []  # of each chunk and model
        self._cuts: Sequence[Cut] = ()
        self.peak = 0.0  # the largest |value| of the result
        self.is_finite = True  # whether all deltas are

    def add(self, chunk: TensorChunk) -> None:
        self._base_sizes.append(chunk.base_sizes)
        self._seen.append(chunk.seen)
        self._cuts = chunk.cuts
        self.peak = max(self.peak, chunk.peak)
        self.is_finite &= all(seen.peak < math.inf for seen in chunk.seen)

    def make_tallies(self, job: Job) -> dict[int, Tally]:
        """By model. Statistics are of weights."""
        if job.tensor.buffer:
            return {}
        base_size = add_in_turn(np.concatenate(self._base_sizes))
        parts = zip(job.tensor.models, self._cuts, zip(*self._seen, strict=True), strict=True)
        return {
            i: make_tally(job, row, cut, join_seen(seen), base_size)
            for row, (i, cut, seen) in enumerate(parts)
        }


def count_work(plan: MergePlan) -> int:
    """Entries of all models that are merged. Of whole matrices, the change alone."""
    merged = [tensor for tensor in plan.tensors if tensor.merged]
    return sum(t.base.count * (1 if t.matrices else len(t.finetuned)) for t in merged)


def make_tally(job: Job, row: int, cut: Cut, seen: Seen, base_size: float) -> Tally:
    i, info = job.tensor.finetuned[row]
    count = max(0, min(job.stop, info.count) - job.start)  # entries that the model has
    rate = job.tensor.settings.thinnings[i].keep_rate
    share = (cut.low == 0) * cut.at_low / (1 << MASK_BITS) if cut.bounded else rate
    # The zeros that stand in for rows which the model lacks are not its own.
    lacking = (job.stop - job.start - count) * share
    kept = seen.kept - round(lacking)
    stored = info.share
    if job.tensor.is_thinned(row):  # a part of all, so that the parts add up
        kept = round(stored * (job.start + count)) - round(stored * job.start)
    known = stored or 1.0  # the share of its deltas that is stored, and stands for all
    return Tally(
        parameters=count,
        sum=add_in_turn(seen.sizes) / known,
        peak=seen.peak,
        above=round(seen.above / known),
        kept=min(count, max(0, kept)),
        expected=count * rate,
        base_sum=base_size,
    )


def explain_quantised(tensor: TensorPlan, name: str, hint: str = QUANTISE_HINT) -> DareError:
    return DareError(
        f"tensor {tensor.name!r} is part of a quantised module ({tensor.base.dtype}) and differs "
        f"in {name!r}",
        hint,
    )
