"""Adapters as the output: changes are written as products of two thin matrices. And what opens the
worker of a plan, whatever its output is.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from darelib.arithmetic.matrix_engine import (
    Product,
    approximate,
    find_rank,
    is_exact,
    measure_squares,
    merge_spaces,
    reduce_product,
)
from darelib.arithmetic.stored import encode
from darelib.core.arrays import Array, Factors
from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.tuning import TUNING
from darelib.methods import METHODS
from darelib.methods.looks import Found
from darelib.models.checkpoint import Checkpoint
from darelib.models.forms import Entry
from darelib.models.tensor import Described
from darelib.output.adapter import place_factors
from darelib.output.prepare import FilePlan, Module
from darelib.plan.plan import COPY, MERGE, SOLVE, Job
from darelib.plan.tensorplan import TensorPlan
from darelib.run.rounds import limit_blas, run_rounds
from darelib.run.solving import Solver, add_solver, make_worker
from darelib.run.worker import Outcome, Worker, Write

# For each entry of a matrix that becomes a product, as measured; and where the rank is large.
MATRIX_BYTES: Final = 6
EXACT_BYTES: Final = 24


def estimate_products(plan: FilePlan) -> int:
    """The memory that matrices take which become products, with what is made of them."""
    largest = 0
    for tensor in plan.tensors:
        if tensor.name in plan.modules and not tensor.adds_ranks:
            is_large = is_exact(tensor.base, plan.modules[tensor.name].rank)
            largest = max(largest, tensor.base.count * (EXACT_BYTES if is_large else MATRIX_BYTES))
    return TUNING.matrices_at_once * largest


class Products:
    """What jobs do whose changes become products. Each of them is a whole tensor."""

    def __init__(self, plan: FilePlan, solver: Solver) -> None:
        self.plan = plan
        self.solver = solver
        self.worker = solver.worker

    def solve(self, job: Job, write: Write) -> None:
        """A change that is merged in the space of the adapters needs no whole matrix."""
        if job.tensor.name not in self.plan.modules or not self.solver.read_factors(job.tensor):
            self.solver.solve(job, write)

    def write(self, job: Job, write: Write) -> Outcome | None:
        module = self.plan.modules.get(job.tensor.name)
        if module is None:
            return self.save(job, write)
        with self.solver.room:
            change, outcome = self._find_change(job)
            with self.solver.solving, self.share_cores():
                product = self.factorise(job.tensor, change, module)
        self._write_factors(job.tensor, module, product, write)
        return replace(outcome, energy=(product.kept, product.total))

    def save(self, job: Job, write: Write) -> Outcome | None:
        """Merge or copy a tensor that is held whole, under each of its names."""
        worker = self.worker
        places = [(info.file, worker.place_of(info)) for info in job.tensor.outputs.values()]
        first = places[0][1]

        def put(_: int, view: memoryview, place: int) -> None:
            for file, start in places:
                write(file, view, place - first + start)

        [info, *_] = job.tensor.outputs.values()
        own = replace(job, tensor=replace(job.tensor, outputs={job.tensor.name: info}))
        task = worker.merge if job.tensor.merged else worker.copy
        return task(own, put)

    def measure_rank(self, job: Job, write: Write) -> Outcome:
        """Find the rank that holds the wanted share of a change. Nothing is written."""
        module = self.plan.modules.get(job.tensor.name)
        if module is None:
            return self.skip(job, write)
        with self.solver.room:
            change, outcome = self._find_change(job)
            with self.solver.solving, self.share_cores():
                squares = self._measure_squares(change, module)
        total = float(squares.sum())
        rank = find_rank(squares, total, float(self.plan.config.adapter_rank or 0))
        rank = min(rank, module.rank)
        return replace(outcome, energy=(float(squares[:rank].sum()), total), rank=rank)

    def share_cores(self) -> AbstractContextManager[Any]:
        """While one matrix is decomposed and others are read, BLAS has all threads."""
        return limit_blas(self.plan.threads)

    def skip(self, job: Job, write: Write) -> Outcome:
        return Outcome(job.tensor.name, 0, 0)

    def _find_change(self, job: Job) -> tuple[Factors | Array, Outcome]:
        """The merged change of a matrix, as factors or whole, and what was counted."""
        tensor = job.tensor
        settings = tensor.settings
        factors = self.solver.read_factors(tensor)
        if not factors:
            return self._compute(job)
        outcome = Outcome(tensor.name, 0, job.bytes_read, self.solver.sample(tensor, factors))
        method = METHODS[settings.method]
        if method.whole:
            weights = [settings.weights[i] for i in tensor.models]
            left, right = merge_spaces(factors, weights, settings)
            return (left * settings.lambda_coeff, right), outcome
        scales = method.weigh(settings, tensor.models, Found()).scales
        lefts = [left * scale for (left, _), scale in zip(factors, scales, strict=True)]
        left = np.hstack(lefts) * settings.lambda_coeff
        return (left, np.vstack([right for _, right in factors])), outcome

    def _compute(self, job: Job) -> tuple[Array, Outcome]:
        """The whole change: the merged matrix without the base's."""
        tensor = job.tensor
        base = tensor.base
        made = np.empty(base.count, FORMATS[tensor.dtype].real)
        info = Entry(tensor.dtype, base.shape)
        first = self.worker.place_of(info)
        raw = made.view(np.uint8).data

        def put(_: int, view: memoryview, place: int) -> None:
            raw[place - first : place - first + len(view)] = view

        own = replace(tensor, outputs={tensor.name: info})
        outcome = self.worker.merge(replace(job, tensor=own), put)
        for start, count in self.worker.chunks(job):
            made[start : start + count] -= base.read(start, count)
        return made.reshape(base.shape[0], -1), outcome

    def factorise(self, tensor: TensorPlan, change: Factors | Array, module: Module) -> Product:
        if not isinstance(change, tuple):
            return approximate(self.solver.engine.move(change), module.rank)
        left, right = change
        # Factors of a space that was solved differ between machines.
        if len(right) > module.rank or METHODS[tensor.settings.method].whole:
            return reduce_product(left, right, module.rank)
        total = float(((left.T @ left) * (right @ right.T)).sum())
        return Product(left, right, total, total)

    def _write_factors(
        self, tensor: TensorPlan, module: Module, product: Product, write: Write
    ) -> None:
        """A of rank x inputs, B of outputs x rank. Zeros fill a smaller rank."""
        a = product.right
        b = product.left.T
        if module.is_transposed:
            a, b = b, a
        for info, factor in zip(tensor.outputs.values(), (a, b), strict=True):
            padded = np.zeros((module.rank, factor.shape[1]), factor.dtype)
            padded[: len(factor)] = factor
            values = padded if factor is a else np.ascontiguousarray(padded.T)
            stored = encode(values, info.dtype).reshape(-1).view(np.uint8)
            write(info.file, memoryview(stored), self.worker.place_of(info))

    def _measure_squares(self, change: Factors | Array, module: Module) -> Array:
        """The squares of the singular values of a change, the largest first."""
        if not isinstance(change, tuple):
            return measure_squares(self.solver.engine.move(change))
        left, right = change
        whole = reduce_product(left, right, module.rank)
        return measure_squares(whole.left) ** 2


def open_worker(
    plan: FilePlan, inputs: Sequence[Described], measures_ranks: bool = False
) -> Worker:
    """The worker of a plan. measures_ranks: it only finds the ranks that the changes want, if the
    plan depends on them.
    """
    if not plan.modules:
        return make_worker(plan, inputs)
    worker = Worker(plan, inputs, plan.list_passes())
    products = Products(plan, add_solver(worker))
    worker.tasks |= {SOLVE: products.solve, MERGE: products.write, COPY: products.save}
    if measures_ranks and plan.is_measured:
        worker.tasks |= {MERGE: products.measure_rank, COPY: products.skip}
    return worker


def settle_ranks(plan: FilePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts) -> FilePlan:
    """The plan with the ranks that the changes want, if it depends on them."""
    if not plan.is_measured:
        return plan
    done: list[tuple[Job, Outcome | None]] = []
    worker = open_worker(plan, inputs, measures_ranks=True)
    run_rounds(
        plan.rounds(), worker, lambda *_: None, lambda *found: done.append(found), interrupts
    )
    outcomes = [outcome for _, outcome in done if outcome]
    return place_factors(set_ranks(plan, outcomes), inputs)


def set_ranks(plan: FilePlan, outcomes: Sequence[Outcome]) -> FilePlan:
    """The plan with the ranks that jobs have found."""
    ranks = {outcome.tensor: outcome.rank for outcome in outcomes if outcome.rank is not None}
    modules = {
        name: module._replace(rank=ranks.get(name, module.rank))
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)
