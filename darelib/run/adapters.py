"""Merges into an adapter: a job makes the merged change of one matrix, and writes it as a product.

What adapters alone change, and nothing is dropped of, is never a whole matrix.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from darelib.core.formats import FORMATS, widen
from darelib.core.interrupts import Interrupts
from darelib.core.looks import Found, Look, MatrixLook
from darelib.core.methods import METHODS
from darelib.core.tuning import TUNING
from darelib.kernels.lowrank import (
    Array,
    Product,
    approximate,
    find_rank,
    is_exact,
    measure_squares,
    reduce_product,
)
from darelib.kernels.matrices import Factors, merge_spaces
from darelib.kernels.plain import encode
from darelib.kernels.records import Buffers
from darelib.models.checkpoint import Checkpoint
from darelib.models.tensors import TensorInfo
from darelib.output.adapter import AdapterPlan, Module, place_factors
from darelib.output.prepare import FilePlan
from darelib.plan.plan import Job, MergePlan
from darelib.plan.tensors import TensorPlan
from darelib.run.matrices import MatrixWorker
from darelib.run.outcomes import Outcome
from darelib.run.rounds import run_rounds
from darelib.run.worker import Worker, Write

# For each entry of a matrix, as measured; and where the rank is a large one.
MATRIX_BYTES: Final = 6
EXACT_BYTES: Final = 24


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


def estimate_factors(plan: MergePlan) -> int:
    """What matrices that become products take in memory, with what is made of them."""
    if not isinstance(plan, AdapterPlan):
        return 0
    dense = [t for t in plan.tensors if t.name in plan.modules and not t.adds_ranks]
    held = [
        t.base.count
        * (EXACT_BYTES if is_exact(t.base, plan.modules[t.name].rank) else MATRIX_BYTES)
        for t in dense
    ]
    return TUNING.matrices_at_once * max(held, default=0)


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
