"""Whole matrices: a job gathers the changes of one and solves it. The merged change waits in memory
until it is written like any other.

A matrix that only adapters change, and of which nothing is dropped, is never multiplied out.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.arrays import Factors
from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.mask import TILE
from darelib.core.pieces import Crew, employ
from darelib.core.tuning import TUNING
from darelib.kernels.fallback import thin_chunk
from darelib.kernels.matrix_engine import MatrixEngine, find_whole, merge_factors
from darelib.kernels.records import Buffers
from darelib.methods.looks import Found, weigh_for_look
from darelib.models.checkpoint import Checkpoint
from darelib.models.encodings import TensorInfo
from darelib.plan.plan import SOLVE, Job, MergePlan
from darelib.plan.tensorplan import TensorPlan
from darelib.run.worker import Abandoned, MatrixChange, Tally, Worker, Write, find_peaks

Moved = tuple[dict[int, Tally], list[Any]]
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
    return FORMATS[tensor.spec.output].bits > 16


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

    def solve(self, job: Job, buffers: Buffers, write: Write) -> None:
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
            elif moved := self._try_to_move(job):
                tallies, on_gpu = moved
                merge = partial(self.engine.merge, on_gpu, precise=precise)
            else:
                deltas = self._gather(job, buffers, look.found)
                tallies = self.worker.count(job, buffers)
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
        found = [info.encoding.read_factors(info) for _, info in tensor.finetuned]
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
            values = self.worker.base.sample(tensor.name, tensor.base, row * columns, columns)
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

    def _try_to_move(self, job: Job) -> Moved | None:
        """Where nothing is dropped and there is a GPU with room: the deltas there. None: they are
        to be gathered here.
        """
        is_delta = any(info.is_delta for _, info in job.tensor.finetuned)
        if not self.engine.on_gpu or is_delta or not job.tensor.is_simple:
            return None
        with suppress(self.engine.no_memory):
            return self._move(job)
        return None

    def _move(self, job: Job) -> Moved | None:
        """What is counted, and the deltas on the GPU, to which stored values are sent."""
        tensor = job.tensor
        count = job.stop - job.start
        stored = self._read_stored(self.worker.base, tensor.base, job.start, count)
        base = self.engine.upload(stored, tensor.base.dtype)
        base_sum, _, _ = self.engine.describe(base)
        tallies = {}
        deltas = []
        for i, info in tensor.finetuned:
            known = stored if info.encoding.base is tensor.base else None
            raw = self._read_stored(self.worker.models[i], info, job.start, count, known)
            delta = self.engine.upload(raw, info.dtype) - base
            total, peak, above = self.engine.describe(delta, self.delta_threshold)
            if not np.isfinite(peak):
                return None
            tallies[i] = Tally(count, total, peak, above, count, float(count), base_sum)
            deltas.append(delta.reshape(tensor.matrices.rows if tensor.matrices else 1, -1))
        return tallies, deltas

    def _read_stored(
        self,
        model: Checkpoint,
        info: TensorInfo,
        start: int,
        count: int,
        base: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        raw = np.empty(count * FORMATS[info.dtype].itemsize, np.uint8)
        model.read(info, start, count, raw, base)
        return raw

    def _gather(self, job: Job, buffers: Buffers, found: Found) -> NDArray[Any]:
        """The thinned deltas of one matrix, of each model that has it."""
        deltas = self._read_deltas(job, buffers, found)
        if not np.isfinite(find_peaks(job.tensor, buffers, len(deltas))).all():
            self.worker.check_mask(job, buffers)
            deltas = self._read_deltas(job, buffers, found, is_mask=True)
        return deltas

    def _read_deltas(
        self, job: Job, buffers: Buffers, found: Found, is_mask: bool = False
    ) -> NDArray[Any]:
        worker = self.worker
        tensor = job.tensor
        models = len(tensor.finetuned)
        worker.describe(tensor, buffers, weigh_for_look(tensor.settings, tensor.models, found))
        real = FORMATS[tensor.spec.real].real
        deltas = np.empty((models, job.stop - job.start), real)
        first = job.start // TILE * TILE  # masks are drawn by whole tiles
        for start, count in worker.chunks(replace(job, start=first)):
            worker.load(tensor, start, count, buffers, Found(), is_mask)
            skipped = max(0, job.start - start)
            place = start + skipped - job.start
            with np.errstate(all="ignore"):  # values that are not finite are found afterwards
                _, rows = thin_chunk(tensor.spec, buffers, count, models, start // TILE, skipped)
            deltas[:, place : place + count - skipped] = rows
        return deltas.reshape(models, tensor.matrices.rows, -1) if tensor.matrices else deltas


def make_worker(plan: MergePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts) -> Worker:
    """The worker of a plan that merges, whatever becomes of what is merged."""
    worker = Worker(plan, inputs, plan.list_passes(), plan.specs(), interrupts)
    if any(tensor.matrices for tensor in plan.tensors):
        worker.tasks[SOLVE] = Solver(worker).solve
    return worker
