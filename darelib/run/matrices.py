"""Merges by whole matrices: a job gathers the changes of one, solves, and keeps the merged change
until it is written like any other; or, into an adapter, makes a product of it and writes that.

What adapters alone change, and nothing is dropped of, is never a whole matrix.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS, widen
from darelib.core.interrupts import Interrupts
from darelib.core.mask import KEEP_ALL, TILE
from darelib.core.matrices import Factors
from darelib.core.tuning import TUNING
from darelib.kernels import KernelSpec
from darelib.kernels.fallback import thin_chunk
from darelib.kernels.lowrank import (
    Array,
    Product,
    approximate,
    find_rank,
    is_exact,
    measure_squares,
    reduce_product,
)
from darelib.kernels.matrix_engine import MatrixEngine, find_whole, merge_factors, merge_spaces
from darelib.kernels.plain import encode
from darelib.kernels.records import Buffers
from darelib.methods import METHODS
from darelib.methods.looks import Found, Look, MatrixLook
from darelib.methods.method import weigh_for_look
from darelib.models.checkpoint import Checkpoint
from darelib.models.encodings import TensorInfo
from darelib.output.adapter import AdapterPlan, Module, place_factors
from darelib.output.prepare import FilePlan
from darelib.plan.plan import Job, MergePlan
from darelib.plan.tensors import TensorPlan
from darelib.run.outcomes import Outcome, Tally, sum_fields
from darelib.run.rounds import run_rounds
from darelib.run.worker import Worker, Write, find_peaks

Moved = tuple[dict[int, Tally], list[Any]]
# Copies that are held at a time while a matrix is solved, as measured: of itself, besides the
# models' deltas, and of the Gram matrix of its longer side.
MATRIX_COPIES: Final = 4
GRAM_COPIES: Final = 1
# Of a matrix that adapters change: enough to describe their changes.
SAMPLED_ROWS: Final = 64
# For each entry of a matrix that becomes a product, as measured; and where the rank is large.
MATRIX_BYTES: Final = 6
EXACT_BYTES: Final = 24


@dataclass
class MatrixChange:
    """The merged change of a tensor, and what was counted in it: by the first element of each
    matrix.
    """

    parts: dict[int, NDArray[Any]] = field(default_factory=dict)
    tallies: dict[int, dict[int, Tally]] = field(default_factory=dict)


def estimate_matrices(plan: MergePlan) -> int:
    """What matrices that are merged as a whole take in memory: one while it is solved, the deltas
    of the next, and the changes that wait to be written; or, with what is made of them, those that
    become products.
    """
    modules = plan.modules if isinstance(plan, AdapterPlan) else {}
    most = 0
    waiting = 0
    largest = 0
    for tensor in plan.tensors:
        if matrices := tensor.matrices:
            models = len(tensor.finetuned)
            item = 4 if FORMATS[tensor.spec.output].bits == 16 else 8
            grams = GRAM_COPIES * max(side**2 for side in matrices.sides)
            solved = item * (matrices.size * (models + MATRIX_COPIES) + grams)
            most = max(most, solved + 4 * models * matrices.size)
            waiting += 4 * tensor.base.count
        if tensor.name in modules and not tensor.adds_ranks:
            is_large = is_exact(tensor.base, modules[tensor.name].rank)
            largest = max(largest, tensor.base.count * (EXACT_BYTES if is_large else MATRIX_BYTES))
    held = most + min(waiting, 4 * TUNING.matrix_elements * max(1, plan.threads // 2))
    return held + TUNING.matrices_at_once * largest


def estimate_solving(plan: MergePlan) -> float:
    """How long it takes to solve all matrices, by the time of a product."""
    operations = sum(
        find_whole(tensor.settings).count_operations(tensor.matrices, len(tensor.finetuned))
        for tensor in plan.tensors
        if tensor.matrices
    )
    return operations / MatrixEngine(plan.config.engine).measure_rate() if operations else 0.0


class MatrixWorker(Worker):
    """Also merges whole matrices: few at a time are read, and one is solved, by all cores."""

    def __init__(
        self,
        plan: MergePlan,
        inputs: Sequence[Checkpoint],
        passes: Mapping[str, Sequence[tuple[Look, int]]],
        specs: Collection[KernelSpec],
        interrupts: Interrupts,
    ) -> None:
        super().__init__(plan, inputs, passes, specs, interrupts)
        self.engine = MatrixEngine(plan.config.engine)
        # A GPU solves faster than one thread reads.
        many = min(plan.threads, TUNING.most_matrices)
        self.room = threading.Semaphore(many if self.engine.on_gpu else TUNING.matrices_at_once)
        self.solving = threading.Lock()
        self._written: list[Found] = []  # whose changes are not needed in the next round

    def look(self, job: Job, buffers: Buffers, look: Look, number: int) -> None:
        if not isinstance(look, MatrixLook):
            super().look(job, buffers, look, number)
            return
        weights = [job.tensor.settings.weights[i] for i in job.tensor.models]
        is_precise = FORMATS[job.tensor.spec.output].bits > 16
        with self.room:
            if factors := self.read_factors(job.tensor):
                tallies = self.sample(job.tensor, factors)
                merge = partial(merge_factors, factors)
            elif moved := self._try_to_move(job):
                tallies, on_gpu = moved
                merge = partial(self.engine.merge, on_gpu, precise=is_precise)
            else:
                deltas = self._gather(job, buffers, look.found)
                tallies = super().count(job, buffers, look.found)
                merge = partial(self.engine.merge, [*deltas], precise=is_precise)
            with self.solving:
                while self._written:
                    self._written.pop().change = None
                merged = merge(weights=weights, settings=job.tensor.settings)
                change = look.found.change or MatrixChange()
                change.parts[job.start] = merged.reshape(-1)
                change.tallies[job.start] = tallies
                look.found.change = change

    def read_factors(self, tensor: TensorPlan) -> list[Factors]:
        """Of a matrix that only adapters change, and of which nothing is dropped: what they
        multiply. None, if that is not smaller than the matrix.
        """
        rows = tensor.base.shape[0]
        rank = sum(info.added_rank for _, info in tensor.finetuned)
        if not tensor.adds_ranks or rank >= min(rows, tensor.base.count // rows):
            return []
        found = [info.encoding.read_factors(info) for _, info in tensor.finetuned]
        factors = [each for each in found if each is not None]
        is_finite = all(np.isfinite(each).all() for pair in factors for each in pair)
        return factors if is_finite else []

    def sample(self, tensor: TensorPlan, factors: Sequence[Factors]) -> dict[int, Tally]:
        """What is counted, of some rows for all: to multiply out each adapter would take longer
        than the merge.
        """
        rows, columns = len(factors[0][0]), factors[0][1].shape[1]
        chosen = np.unique(np.linspace(0, rows - 1, SAMPLED_ROWS).astype(int))
        share = rows / len(chosen)
        base_sum = 0.0
        for row in chosen.tolist():
            values = self.base.sample(tensor.name, tensor.base, row * columns, columns)
            base_sum += float(np.abs(values).sum())
        tallies = {}
        for i, (left, right) in zip(tensor.models, factors, strict=True):
            sizes = np.abs(left[chosen] @ right)
            tallies[i] = Tally(
                parameters=tensor.base.count,
                sum=float(sizes.sum()) * share,
                peak=float(sizes.max()),
                above=round(np.count_nonzero(sizes > self.plan.config.delta_threshold) * share),
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
        stored = self._read_stored(self.base, tensor.base, job.start, count)
        base = self.engine.upload(stored, tensor.base.dtype)
        base_sum, _, _ = self.engine.describe(base)
        tallies = {}
        deltas = []
        for i, info in tensor.finetuned:
            known = stored if info.encoding.base is tensor.base else None
            raw = self._read_stored(self.models[i], info, job.start, count, known)
            delta = self.engine.upload(raw, info.dtype) - base
            total, peak, above = self.engine.describe(delta, self.plan.config.delta_threshold)
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
            self.keep_base(job, buffers)
            deltas = self._read_deltas(job, buffers, found)
        return deltas

    def _read_deltas(self, job: Job, buffers: Buffers, found: Found) -> NDArray[Any]:
        tensor = job.tensor
        models = len(tensor.finetuned)
        self.describe(tensor, buffers, weigh_for_look(tensor.settings, tensor.models, found))
        real = FORMATS[tensor.spec.real].real
        deltas = np.empty((models, job.stop - job.start), real)
        first = job.start // TILE * TILE  # masks are drawn by whole tiles
        for start, count in self.chunks(replace(job, start=first)):
            self.reader.load(tensor, start, count, buffers)
            skipped = max(0, job.start - start)
            place = start + skipped - job.start
            with np.errstate(all="ignore"):  # what is not finite is found afterwards
                _, rows = thin_chunk(tensor.spec, buffers, count, models, start // TILE, skipped)
            deltas[:, place : place + count - skipped] = rows
        return deltas.reshape(models, tensor.matrices.rows, -1) if tensor.matrices else deltas

    def describe_merge(self, tensor: TensorPlan, buffers: Buffers, found: Found) -> int:
        """What the kernel is given is the change, as if it were the only model's."""
        if found.change is None:
            return super().describe_merge(tensor, buffers, found)
        self.describe(tensor, buffers, weigh_for_look(tensor.settings, tensor.models, Found()))
        record = buffers.models[0]
        record["limit"] = KEEP_ALL
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
        remember: bool = False,
    ) -> None:
        if found.change is None:
            super().load(tensor, start, count, buffers, found, remember)
        else:
            self.reader.load_change(tensor, start, count, buffers, found.change.parts)

    def count(self, job: Job, buffers: Buffers, found: Found) -> dict[int, Tally]:
        """Of a whole tensor, with its first job."""
        if found.change is None:
            return super().count(job, buffers, found)
        self._written.append(found)
        tallies = found.change.tallies.values() if job.start == 0 else ()
        return {i: sum_fields(each[i] for each in tallies) for i in job.tensor.models if tallies}


# --- adapters -------------------------------------------------------------------------------------


class AdapterWorker(MatrixWorker):
    """Also writes changes as factors."""

    plan: AdapterPlan

    def look(self, job: Job, buffers: Buffers, look: Look, number: int) -> None:
        """What is merged in the space of adapters needs no look."""
        has_factors = job.tensor.name in self.plan.modules and bool(self.read_factors(job.tensor))
        if not has_factors or not isinstance(look, MatrixLook):
            super().look(job, buffers, look, number)

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        module = self.plan.modules.get(job.tensor.name)
        if job.look_pass is not None:
            return super().run(job, buffers, write)
        if module is None:
            return self._save(job, buffers, write)
        with self.room:
            change, outcome = self._find_change(job, buffers)
            with self.solving:
                product = self.factorise(job.tensor, change, module)
        self._write(job.tensor, module, product, write)
        return replace(outcome, energy=(product.kept, product.total))

    def _save(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        """Merge what is held whole, under each of its names."""
        places = [(info.file, self.place_of(info)) for info in job.tensor.outputs.values()]
        first = places[0][1]

        def put(_: int, view: memoryview, place: int) -> None:
            for file, start in places:
                write(file, view, place - first + start)

        [info, *_] = job.tensor.outputs.values()
        own = replace(job.tensor, outputs={job.tensor.name: info})
        return super().run(replace(job, tensor=own), buffers, put)

    def _find_change(self, job: Job, buffers: Buffers) -> tuple[Factors | Array, Outcome]:
        """The merged change of a matrix, as factors or whole, and what was counted."""
        tensor = job.tensor
        settings = tensor.settings
        factors = self.read_factors(tensor)
        if not factors:
            return self._compute(job, buffers)
        outcome = Outcome(tensor.name, 0, job.bytes_read, self.sample(tensor, factors))
        method = METHODS[settings.method]
        if method.whole:
            weights = [settings.weights[i] for i in tensor.models]
            left, right = merge_spaces(factors, weights, settings)
            return (left * settings.lambda_coeff, right), outcome
        scales = method.weigh(settings, tensor.models, Found()).scales
        lefts = [left * scale for (left, _), scale in zip(factors, scales, strict=True)]
        left = np.hstack(lefts) * settings.lambda_coeff
        return (left, np.vstack([right for _, right in factors])), outcome

    def _compute(self, job: Job, buffers: Buffers) -> tuple[Array, Outcome]:
        """The whole change: what the merge makes, without the base."""
        tensor = job.tensor
        base = tensor.base
        dtype = tensor.spec.output
        made = np.empty(base.count, FORMATS[dtype].real)
        info = TensorInfo(dtype, base.shape)
        first = self.place_of(info)
        raw = made.view(np.uint8).data

        def put(_: int, view: memoryview, place: int) -> None:
            raw[place - first : place - first + len(view)] = view

        own = replace(tensor, outputs={tensor.name: info})
        outcome = super().run(replace(job, tensor=own), buffers, put)
        assert outcome is not None
        for start, count in self.chunks(job):
            stored = buffers.base[: count * FORMATS[base.dtype].itemsize]
            self.base.read(base, start, count, stored)
            made[start : start + count] -= widen(stored, base.dtype)
        return made.reshape(base.shape[0], -1), outcome

    def factorise(self, tensor: TensorPlan, change: Factors | Array, module: Module) -> Product:
        if not isinstance(change, tuple):
            return approximate(self.engine.move(change), module.rank)
        left, right = change
        # Those of a space that was solved in are not the same on every machine.
        if len(right) > module.rank or METHODS[tensor.settings.method].whole:
            return reduce_product(left, right, module.rank)
        total = float(((left.T @ left) * (right @ right.T)).sum())
        return Product(left, right, total, total)

    def _write(self, tensor: TensorPlan, module: Module, product: Product, write: Write) -> None:
        """A of rank x inputs, B of outputs x rank; what is missing of the rank is zeros."""
        a, b = product.right, product.left.T
        if module.is_transposed:
            a, b = b, a
        for info, factor in zip(tensor.outputs.values(), (a, b), strict=True):
            padded = np.zeros((module.rank, factor.shape[1]), factor.dtype)
            padded[: len(factor)] = factor
            values = padded if factor is a else np.ascontiguousarray(padded.T)
            stored = encode(values, info.dtype)
            write(info.file, memoryview(stored.reshape(-1).view(np.uint8)), self.place_of(info))


class RankFinder(AdapterWorker):
    """Finds out which ranks hold a share of each change, and writes nothing."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.modules: dict[str, Module] = {}

    def _save(self, job: Job, buffers: Buffers, write: Write) -> Outcome | None:
        return Outcome(job.tensor.name, 0, 0)

    def factorise(self, tensor: TensorPlan, change: Factors | Array, module: Module) -> Product:
        if isinstance(change, tuple):
            left, right = change
            whole = reduce_product(left, right, module.rank)
            squares = measure_squares(whole.left) ** 2
        else:
            squares = measure_squares(self.engine.move(change))
        total = float(squares.sum())
        rank = find_rank(squares, total, float(self.plan.config.adapter_rank or 0))
        rank = min(rank, module.rank)
        self.modules[tensor.name] = module._replace(rank=rank)
        none = np.zeros((0, 0))
        return Product(none, none, float(squares[:rank].sum()), total)

    def _write(self, tensor: TensorPlan, module: Module, product: Product, write: Write) -> None:
        pass


def settle_ranks(plan: FilePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts) -> FilePlan:
    """The plan with the ranks that the changes want, where it depends on them."""
    if not isinstance(plan, AdapterPlan) or not plan.is_measured:
        return plan
    finder = RankFinder.for_merge(plan, inputs, interrupts)
    run_rounds(plan.rounds(), finder, lambda *_: None, lambda *_: None, interrupts)
    modules = {name: finder.modules[name] for name in plan.modules}  # in an order of no thread's
    return place_factors(replace(plan, modules=modules), inputs)


def open_worker(
    plan: MergePlan,
    inputs: Sequence[Checkpoint],
    interrupts: Interrupts,
    settles_ranks: bool = False,
) -> Worker:
    """What merges a plan. settles_ranks: or finds out which ranks it wants, if it depends on
    that.
    """
    kind: type[Worker] = MatrixWorker if any(tensor.matrices for tensor in plan.tensors) else Worker
    if isinstance(plan, AdapterPlan):
        kind = RankFinder if settles_ranks and plan.is_measured else AdapterWorker
    return kind.for_merge(plan, inputs, interrupts)
