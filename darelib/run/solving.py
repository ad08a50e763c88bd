"""Whole matrices: a job gathers the changes of one and solves it. The merged change waits in memory
until it is written like any other.

A matrix that only adapters change, and of which nothing is dropped, is never multiplied out.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic.matrix_engine import MatrixEngine, find_whole, merge_factors
from darelib.core.arrays import Factors
from darelib.core.formats import FORMATS
from darelib.core.pieces import Crew, employ
from darelib.core.tuning import TUNING
from darelib.methods.looks import Found, weigh_for_look
from darelib.models.tensor import Described
from darelib.plan.plan import SOLVE, Job, MergePlan
from darelib.plan.tensorplan import TensorPlan
from darelib.run.worker import Abandoned, Counts, MatrixChange, Tally, Worker, Write

# Copies that are held at a time while a matrix is solved, as measured: of itself, besides the
# models' deltas, and of the Gram matrix of its longer side.
MATRIX_COPIES: Final = 4
GRAM_COPIES: Final = 1
# Entries of a matrix up to which each thread solves one of its own. Larger ones are solved by all
# threads, one after the other.
SMALL_MATRIX: Final = 1 << 20
# Floating-point operations that take about as long as to read a byte and merge it.
BYTE_OPERATIONS: Final = 100
# Rows of a matrix that describe the changes of adapters.
SAMPLED_ROWS: Final = 64


def estimate_matrices(plan: MergePlan) -> int:
    """The memory that whole matrices take: large ones, one while it is solved and the deltas of the
    next, a small one of each thread, and the changes that wait to be written.
    """
    large = 0
    small = 0
    waiting = 0
    for tensor in plan.tensors:
        if matrices := tensor.matrices:
            models = len(tensor.finetuned)
            item = 8 if is_precise(tensor) else 4
            grams = GRAM_COPIES * max(side**2 for side in matrices.sides)
            solved = item * (matrices.size * (models + MATRIX_COPIES) + grams)
            if matrices.size > SMALL_MATRIX:
                large = max(large, solved + 4 * models * matrices.size)
            else:
                small = max(small, solved)
            waiting += 4 * tensor.base.count
    waiting = min(waiting, 4 * TUNING.matrix_elements * max(1, plan.threads // 2))
    return large + plan.threads * small + waiting


def estimate_solving(plan: MergePlan) -> float:
    """How long it takes to read and to solve all matrices, by the time of a product."""
    matrices = replace(plan, tensors=tuple(t for t in plan.tensors if t.matrices))
    operations = BYTE_OPERATIONS * count_steps(matrices)
    rate = MatrixEngine(plan.config.engine).measure_rate
    return operations / rate(plan.threads) if operations else 0.0


def count_steps(plan: MergePlan) -> int:
    """What progress counts: bytes that are read, and operations as so many bytes."""
    return plan.bytes_to_read + sum(map(count_operations, plan.tensors)) // BYTE_OPERATIONS


def count_operations(tensor: TensorPlan) -> int:
    """Floating-point operations to solve a tensor. Those of float64 count double."""
    if not tensor.matrices:
        return 0
    if rank := find_added_rank(tensor):
        return 2 * rank * tensor.base.count
    whole = find_whole(tensor.settings)
    count = whole.count_operations(tensor.matrices, len(tensor.finetuned))
    return 2 * count if is_precise(tensor) else count


def is_precise(tensor: TensorPlan) -> bool:
    """Whether a tensor is solved in float64."""
    return FORMATS[tensor.dtype].bits > 16


def find_added_rank(tensor: TensorPlan) -> int:
    """The sum of the ranks of a matrix that only adapters change, and of which nothing is dropped.
    0: it is another, or its factors are not smaller than itself.
    """
    rows = tensor.base.shape[0]
    rank = sum(info.added_rank for _, info in tensor.finetuned)
    is_smaller = tensor.adds_ranks and rank < min(rows, tensor.base.count // rows)
    return rank if is_smaller else 0


class Solver:
    """Solves the matrices of a plan: small ones side by side. Of large ones few are read at a time,
    and one is solved, by all threads.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.delta_threshold = worker.plan.config.delta_threshold
        self.engine = MatrixEngine(worker.plan.config.engine)
        # A GPU solves faster than one thread reads.
        many = min(worker.plan.threads, TUNING.most_matrices)
        self.room = threading.Semaphore(many if self.engine.on_gpu else TUNING.matrices_at_once)
        self.solving = threading.Lock()
        self.changing = threading.Lock()
        self.crew = Crew(ThreadPoolExecutor(worker.plan.threads))

    def solve(self, job: Job, write: Write) -> None:
        """Find the merged change of one matrix. It is written in a later round."""
        tensor = job.tensor
        look, _ = self.worker.passes[tensor.name][job.look_pass]
        weights = [tensor.settings.weights[i] for i in tensor.models]
        precise = is_precise(tensor)
        is_small = not self.engine.on_gpu and job.stop - job.start <= SMALL_MATRIX
        with self.changing:
            while self.worker.written:
                self.worker.written.pop().change = None
        with nullcontext() if is_small else self.room:
            if factors := self.read_factors(tensor):
                tallies = self.sample(tensor, factors)
                merge = partial(merge_factors, factors)
            else:
                deltas, tallies = self._gather(job, look.found)
                merge = partial(self.engine.merge, [*deltas], precise=precise)
            with nullcontext() if is_small else self.solving, self.count(job, is_small):
                merged = merge(weights=weights, settings=tensor.settings)
        with self.changing:
            change = look.found.change or MatrixChange()
            change.parts[job.start] = merged.reshape(-1)
            change.tallies[job.start] = tallies
            look.found.change = change

    @contextmanager
    def count(self, job: Job, is_alone: bool) -> Iterator[None]:
        """Count the products of one matrix as progress, and stop after any of them if the merge is
        abandoned. is_alone: no other thread takes part.
        """
        whole = count_operations(job.tensor) * (job.stop - job.start) // job.tensor.length
        left = whole // BYTE_OPERATIONS

        def note(operations: int) -> None:
            nonlocal left
            if self.worker.abandoned.is_set():
                raise Abandoned
            done = min(left, operations * (2 if is_precise(job.tensor) else 1) // BYTE_OPERATIONS)
            left -= done
            self.worker.advance(done)

        note(0)
        with employ(Crew(note=note) if is_alone else replace(self.crew, note=note)):
            yield
        self.worker.advance(left)

    def read_factors(self, tensor: TensorPlan) -> list[Factors]:
        """The factors of a matrix that is merged in the space of its adapters; of others none."""
        if not find_added_rank(tensor):
            return []
        found = [info.read_factors() for _, info in tensor.finetuned]
        factors = [each for each in found if each is not None]
        is_finite = all(np.isfinite(each).all() for pair in factors for each in pair)
        return factors if is_finite else []

    def sample(self, tensor: TensorPlan, factors: Sequence[Factors]) -> dict[int, Tally]:
        """What is counted, by some rows: to multiply out each adapter would take longer than the
        merge.
        """
        rows = len(factors[0][0])
        columns = factors[0][1].shape[1]
        chosen = np.unique(np.linspace(0, rows - 1, SAMPLED_ROWS).astype(int))
        share = rows / len(chosen)
        base_sum = 0.0
        for row in chosen.tolist():
            values = tensor.base.read(row * columns, columns)
            base_sum += float(np.abs(values).sum())
        tallies = {}
        for i, (left, right) in zip(tensor.models, factors, strict=True):
            sizes = np.abs(left[chosen] @ right)
            tallies[i] = Tally(
                parameters=tensor.base.count,
                sum=float(sizes.sum()) * share,
                peak=float(sizes.max()),
                above=round(np.count_nonzero(sizes > self.delta_threshold) * share),
                kept=tensor.base.count,
                expected=float(tensor.base.count),
                base_sum=base_sum * share,
            )
        return tallies

    def _gather(self, job: Job, found: Found) -> tuple[NDArray[Any], dict[int, Tally]]:
        """The thinned deltas of one matrix, of each model that has it, and what was counted."""
        deltas, counts = self._read_deltas(job, found)
        if not counts.is_finite:
            self.worker.check_mask(job)
            deltas, counts = self._read_deltas(job, found, is_mask=True)
        return deltas, counts.make_tallies(job)

    def _read_deltas(
        self, job: Job, found: Found, is_mask: bool = False
    ) -> tuple[NDArray[Any], Counts]:
        worker = self.worker
        tensor = job.tensor
        own = weigh_for_look(tensor.settings, tensor.models, found)
        cuts = worker.reader.make_cuts(tensor, own)
        real = FORMATS[tensor.real].real
        deltas = np.empty((len(cuts), job.stop - job.start), real)
        counts = Counts()
        for start, count in worker.chunks(job):
            chunk = worker.reader.load(tensor, start, count, cuts, is_mask)
            deltas[:, start - job.start :][:, :count] = chunk.rows
            counts.add(chunk)
        rows = tensor.matrices.rows if tensor.matrices else 1
        return deltas.reshape(len(cuts), rows, -1), counts


def add_solver(worker: Worker) -> Solver:
    solver = Solver(worker)
    worker.tasks[SOLVE] = solver.solve
    return solver


def make_worker(plan: MergePlan, inputs: Sequence[Described]) -> Worker:
    """The worker of a plan that merges, whatever becomes of what is merged."""
    worker = Worker(plan, inputs, plan.list_passes())
    if any(tensor.matrices for tensor in plan.tensors):
        add_solver(worker)
    return worker
