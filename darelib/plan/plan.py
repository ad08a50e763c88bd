"""The plan of a merge: what will be read and computed, and in what pieces.

Nothing here knows where it is written.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from darelib.config import DareConfig
from darelib.core.formats import FORMATS
from darelib.core.text import ConfigError
from darelib.core.tuning import TUNING, count_cores
from darelib.kernels import KernelSpec
from darelib.methods.looks import Look
from darelib.models.encodings import Described
from darelib.plan.checks import (
    check_rules,
    find_odd_inputs,
    find_odd_names,
    find_odd_settings,
    find_samples,
)
from darelib.plan.matching import Matcher
from darelib.plan.tensors import PlannedFile, TensorPlan


@dataclass(frozen=True)
class Job:
    """A range of one tensor (of its bytes, where it is copied): read ranges, compute, write
    ranges.
    """

    number: int
    tensor: TensorPlan
    start: int
    stop: int
    look_pass: int | None = None  # None: merge and write; else only look

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
        """Bytes of the widest element that a buffer has to hold."""
        specs = {tensor.spec for tensor in self.tensors if tensor.merged}
        names = [name for spec in specs for name in (spec.base, spec.finetuned, spec.output)]
        return max([FORMATS[name].itemsize for name in names], default=1)

    @cached_property
    def chunk(self) -> int:
        """Elements at a time: what fits the buffers' budget, as a power of two.

        The output does not depend on it.
        """
        buffers = self.threads * (len(self.models) + 2)
        fitting = TUNING.buffer_bytes // (buffers * self.itemsize)
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

    def specs(self) -> set[KernelSpec]:
        merged = [tensor for tensor in self.tensors if tensor.merged and tensor.base.count]
        return {spec for tensor in merged for spec in (tensor.spec, tensor.rank_spec) if spec}

    def jobs(
        self,
        tensors: Sequence[TensorPlan],
        done: Collection[tuple[str, int]] = (),
        look_pass: int | None = None,
        is_whole: bool = False,
    ) -> Iterator[Job]:
        """done: the tensors and starts of the jobs that need not be run again. is_whole: jobs are
        whole matrices.
        """
        number = 0
        for tensor in tensors:
            # Looks add up by chunks, whose starts are the same for all tensors.
            starts = range(0, tensor.length, TUNING.job_elements)
            if look_pass is None:
                starts = self._starts(tensor)
            elif is_whole and tensor.matrices:
                starts = range(0, tensor.length, tensor.matrices.size)
            for start in starts:
                if (tensor.name, start) not in done:
                    stop = min(start + starts.step, tensor.length)
                    yield Job(number, tensor, start, stop, look_pass)
                    number += 1

    def _starts(self, tensor: TensorPlan) -> range:
        step = tensor.encoding.find_step(tensor.base)
        return range(0, tensor.length, max(1, TUNING.job_elements // step) * step)

    def rounds(self, done: Collection[tuple[str, int]] = ()) -> Iterator[Iterator[Job]]:
        """Sets of jobs, each to be finished before the next: for a batch of tensors, look, look
        again, merge.
        """
        enough = TUNING.ranked_elements if self.ranked else TUNING.batch_elements
        if any(tensor.matrices for tensor in self.tensors):  # whose changes wait in memory
            enough = min(enough, TUNING.matrix_elements * max(1, self.threads // 2))
        batch: list[TensorPlan] = []
        elements = 0
        for tensor in self.tensors:
            if not all((tensor.name, start) in done for start in self._starts(tensor)):
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
            for is_whole in (False, True):
                chosen = [tensor for tensor in own if tensor.takes_matrices(k) == is_whole]
                if chosen:
                    yield self.jobs(chosen, (), k, is_whole)
        if batch:
            yield self.jobs(batch, done)


def plan_merge(
    config: DareConfig, inputs: Sequence[Described], looks_only: bool = False
) -> MergePlan:
    """looks_only: nothing is merged, so that settings need not fit."""
    base, *models = inputs
    settled = config.settle_rates([model.seed is not None for model in models])
    matcher = Matcher(settled, inputs)
    if looks_only and not models:
        raise ConfigError("there are no models to look at", "give --merge MODEL...")
    seeds = find_seeds(config, inputs)
    compared = [matcher.compare_names(i) for i in range(len(models))]
    missing = tuple(lacking for lacking, _ in compared)
    extra = tuple(unknown for _, unknown in compared)
    warnings = [*base.warnings, *find_odd_inputs(config, inputs)]
    for model, lacking, unknown in zip(models, missing, extra, strict=True):
        warnings += find_odd_names(model.name, lacking, unknown)
    if not looks_only:
        check_rules(config, matcher.tensors)
        warnings += find_odd_settings(config, inputs, matcher.tensors, seeds)
    warnings += matcher.warnings()
    if looks_only:
        warnings += find_samples(inputs)
    return MergePlan(
        base=base.name,
        models=tuple(model.name for model in models),
        config=settled,
        tensors=tuple(matcher.tensors),
        threads=count_threads(config, matcher.tensors),
        seeds=seeds,
        warnings=tuple(warnings),
        missing=missing,
        extra=extra,
        mismatched=tuple(map(tuple, matcher.mismatched)),
        repeats_base=tuple(model.is_same_as(base) for model in models),
        embedding_rows=matcher.embedding_rows(),
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
