"""The plan of a merge: what will be read and computed, and in what pieces.

Nothing here knows where it is written.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from darelib.config import DareConfig
from darelib.core.text import ConfigError
from darelib.core.tuning import TUNING, count_cores
from darelib.methods.looks import Look
from darelib.models.tensor import Described
from darelib.plan.checks import check_table
from darelib.plan.tensorplan import Matcher, PlannedFile, TensorPlan
from darelib.plan.warnings import list_warnings

# The kinds of jobs: look at a range before the merge, solve a whole matrix, merge a range, copy it.
LOOK = "look"
SOLVE = "solve"
MERGE = "merge"
COPY = "copy"


@dataclass(frozen=True)
class Job:
    """A range of one tensor (of its bytes, where it is copied): read ranges, compute, write
    ranges.
    """

    order: int  # among the jobs of its round
    tensor: TensorPlan
    start: int
    stop: int
    kind: str
    look_pass: int = 0  # of a look, or of what is solved

    @property
    def bytes_read(self) -> int:
        return self.tensor.bytes_read * (self.stop - self.start) // self.tensor.length


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge will do, wherever its inputs are and its output goes."""

    base: str
    models: tuple[str, ...]
    config: DareConfig
    tensors: tuple[TensorPlan, ...]
    threads: int
    seeds: tuple[int, ...]  # of each model's mask
    warnings: tuple[str, ...]
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    mismatched: tuple[tuple[str, ...], ...]  # per model: tensors of another shape in the base
    repeats_base: tuple[bool, ...]  # per model: whether it is the base itself
    embedding_rows: int  # how many tokens the base has room for, or 0 where that is unknown
    files: tuple[PlannedFile, ...] = ()  # that will be written, if it goes to files

    @cached_property
    def itemsize(self) -> int:
        """Bytes of the widest value that is computed with."""
        wide = any(tensor.real == "F64" for tensor in self.tensors if tensor.merged)
        return 8 if wide else 4

    @cached_property
    def chunk(self) -> int:
        """Elements at a time: a power of two that fits the budget.

        The output does not depend on it.
        """
        arrays = self.threads * (2 * len(self.models) + 3)
        fitting = TUNING.buffer_bytes // (arrays * self.itemsize)
        most = TUNING.max_chunk * (4 if self.threads >= TUNING.many_threads else 1)
        return max(TUNING.min_chunk, min(most, 1 << max(fitting.bit_length() - 1, 0)))

    @cached_property
    def ranked(self) -> int:
        """Elements of the longest row that must be read as a whole, if any."""
        return max((t.base.width for t in self.tensors if t.needs_rows), default=0)

    @cached_property
    def changed(self) -> tuple[TensorPlan, ...]:
        own = [t for t in self.tensors if t.merged and not t.buffer]
        return tuple(t for t in own if t.base.count and t.finetuned)

    @cached_property
    def passes(self) -> dict[str, int]:
        """How often each tensor is looked at before it is merged."""
        return {tensor.name: len(tensor.list_passes()) for tensor in self.tensors}

    @property
    def bytes_to_read(self) -> int:
        return sum((1 + self.passes[t.name]) * t.bytes_read for t in self.tensors)

    def list_passes(self) -> dict[str, list[tuple[Look, int]]]:
        return {t.name: t.list_passes() for t in self.tensors if self.passes[t.name]}

    def jobs(
        self,
        tensors: Sequence[TensorPlan],
        done: Collection[tuple[str, int]] = (),
        kind: str = MERGE,
        look_pass: int = 0,
    ) -> Iterator[Job]:
        """done: the tensors and starts of the jobs that need not be run again."""
        order = 0
        for tensor in tensors:
            # Looks add up by chunks, whose starts are the same for all tensors.
            starts = range(0, tensor.length, TUNING.job_elements)
            if kind == MERGE:
                starts = self.list_starts(tensor)
            elif kind == SOLVE and tensor.matrices:
                starts = range(0, tensor.length, tensor.matrices.size)
            own = COPY if kind == MERGE and not tensor.merged else kind
            for start in starts:
                if (tensor.name, start) not in done:
                    stop = min(start + starts.step, tensor.length)
                    yield Job(order, tensor, start, stop, own, look_pass)
                    order += 1

    def list_starts(self, tensor: TensorPlan) -> range:
        step = tensor.form.find_step()
        return range(0, tensor.length, max(1, TUNING.job_elements // step) * step)

    def rounds(self, done: Collection[tuple[str, int]] = ()) -> Iterator[Iterator[Job]]:
        """Sets of jobs, each to be finished before the next: for a batch of tensors, look, look
        again, merge.
        """
        enough = TUNING.ranked_elements if self.ranked else TUNING.batch_elements
        if any(tensor.matrices for tensor in self.tensors):  # their changes wait in memory
            enough = min(enough, TUNING.matrix_elements * max(1, self.threads // 2))
        batch: list[TensorPlan] = []
        elements = 0
        for tensor in self.tensors:
            if not all((tensor.name, start) in done for start in self.list_starts(tensor)):
                batch.append(tensor)
                elements += tensor.base.count
            if elements >= enough and self.passes[tensor.name]:
                yield from self._rounds_of(batch, done)
                batch = []
                elements = 0
        yield from self._rounds_of(batch, done)

    def _rounds_of(
        self, batch: Sequence[TensorPlan], done: Collection[tuple[str, int]]
    ) -> Iterator[Iterator[Job]]:
        for k in range(max((self.passes[t.name] for t in batch), default=0)):
            own = [tensor for tensor in batch if k < self.passes[tensor.name]]
            for kind in (LOOK, SOLVE):
                is_whole = kind == SOLVE
                if chosen := [t for t in own if t.list_passes()[k][0].whole == is_whole]:
                    yield self.jobs(chosen, (), kind, k)
        if batch:
            yield self.jobs(batch, done)


def plan_merge(
    config: DareConfig, inputs: Sequence[Described], looks_only: bool = False
) -> MergePlan:
    """First say what becomes of each tensor, then check that. looks_only: nothing is merged, so
    settings need not make sense.
    """
    base, *models = inputs
    if looks_only and not models:
        raise ConfigError("there are no models to look at", "give --merge MODEL...")
    settled = config.settle_rates([model.seed is not None for model in models])
    matcher = Matcher(settled, inputs)
    table = matcher.make_table()
    check_table(config, inputs, table, looks_only)
    seeds = find_seeds(config, inputs)
    return MergePlan(
        base=base.name,
        models=tuple(model.name for model in models),
        config=settled,
        tensors=tuple(table.tensors),
        threads=count_threads(config, table.tensors),
        seeds=seeds,
        warnings=tuple(list_warnings(config, inputs, table, seeds, looks_only)),
        missing=table.missing,
        extra=table.extra,
        mismatched=table.mismatched,
        repeats_base=tuple(model.is_same_as(base) for model in models),
        embedding_rows=matcher.count_embedding_rows(),
    )


def find_seeds(config: DareConfig, inputs: Sequence[Described]) -> tuple[int, ...]:
    """The seed of each model's mask: the first one's and up, unless it was decided before."""
    return tuple(
        config.seed + i if model.seed is None else model.seed for i, model in enumerate(inputs[1:])
    )


def count_threads(config: DareConfig, tensors: Sequence[TensorPlan]) -> int:
    """As many as asked for, or as there are cores; more threads than jobs would only take
    memory.
    """
    jobs = sum(-(-max(t.base.count, t.length) // TUNING.job_elements) for t in tensors)
    return max(1, min(config.threads or count_cores(), jobs))
