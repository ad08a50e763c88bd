"""A merge into files, matched with examples: the weights that the walk wants come from the inputs,
by plans of merges; what it solves goes to the output as if it were one more model's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darelib.config import DareConfig
from darelib.config.values import FULL
from darelib.core.drops import Thinning
from darelib.core.formats import DTYPES
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, DareError, progress
from darelib.kernels.matrix_engine import MatrixEngine
from darelib.methods import DEFAULT
from darelib.methods.looks import TensorSettings
from darelib.methods.passthrough import PASSTHROUGH
from darelib.models.checkpoint import Checkpoint
from darelib.models.encodings import PLAIN, TensorInfo
from darelib.output.matched import (
    UNMATCHED,
    AnswerLoss,
    MatchReport,
    PlannedMatch,
    digest_range,
)
from darelib.output.prepare import FilePlan, is_share, record_matched
from darelib.output.publish import Output
from darelib.plan.plan import Job, MergePlan, plan_merge
from darelib.plan.tensorplan import TensorPlan, assign_offsets, choose_kernel
from darelib.run.matching.language import Names, Reader, count_batch, make_module, make_streams
from darelib.run.matching.network import BASE, START, Network
from darelib.run.matching.walk import (
    RIDGE,
    Matched,
    Participant,
    Stream,
    Walk,
    explain_memory,
    explain_unmatched,
    find_tied,
    start_from,
    summarize,
)
from darelib.run.products import open_worker
from darelib.run.rounds import run_rounds
from darelib.run.solving import make_worker
from darelib.run.threads import Made, Order, publish, run_merge
from darelib.run.worker import Outcome, Tally

STORED_TYPES: Final = {stored: getattr(torch, name) for name, stored in DTYPES.items()}
# What a matrix takes besides its sums, in forwards; what torch and transformers take, as measured.
FORWARDS: Final = 7
LIBRARY_BYTES: Final = 700_000_000
PREDICTING: Final = ("ForCausalLM", "LMHeadModel")  # the next token, so that answers can be judged
FEW: Final = 16  # examples, below which a merge is hardly better matched
JUDGED: Final = 2  # batches of each model's examples on which the base is judged, too


class Inputs:
    """The weights of base, models and start: each is a merge of its own, into memory."""

    def __init__(
        self, config: DareConfig, inputs: Sequence[Checkpoint], interrupts: Interrupts
    ) -> None:
        self.inputs = inputs
        self.interrupts = interrupts
        # What was counted of the start, by tensor and the start of each job.
        self.found: dict[str, dict[int, dict[int, Tally]]] = {}
        alone = DareConfig(
            drop_rate=0.0,
            mismatch=config.mismatch,
            components=config.components,
            any_base=True,
            dtype="float32",
            threads=config.threads,
            engine=config.engine,
        )
        base, *models = inputs
        self._plans: dict[int, tuple[MergePlan, Sequence[Checkpoint]]] = {
            START: (plan_merge(start_from(config), inputs), inputs),
            BASE: (plan_merge(replace(alone, method=PASSTHROUGH.name), [base]), [base]),
        }
        for i, model in enumerate(models):
            self._plans[i] = plan_merge(alone, [base, model]), [base, model]

    def make(self, who: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors in float32, or as they are stored."""
        plan, inputs = self._plans[who]
        wanted = {*names}
        chosen = [tensor for tensor in plan.tensors if tensor.name in wanted]
        model = inputs[-1]
        plain = [t for t in chosen if who != START and is_plain(model.tensors.get(t.name), t.base)]
        with ThreadPoolExecutor(plan.threads) as pool:
            read = list(pool.map(partial(read_plain, model), [t.name for t in plain]))
        found = {tensor.name: each for tensor, each in zip(plain, read, strict=True)}
        left = [tensor for tensor in chosen if tensor.name not in found]
        return found | (self._merge(who, left) if left else {})

    def _merge(self, who: int, chosen: Sequence[TensorPlan]) -> dict[str, Tensor]:
        plan, inputs = self._plans[who]
        tensors, [file] = assign_offsets(chosen, sys.maxsize, {}, "memory")
        part = replace(plan, tensors=tuple(tensors), files=(file,))
        head = len(file.header)
        made = np.empty(file.size - head, np.uint8)

        def put(_: int, view: memoryview, place: int) -> None:
            made[place - head : place - head + len(view)] = view

        def note(job: Job, outcome: Outcome | None) -> None:
            if outcome and who == START:
                self.found.setdefault(outcome.tensor, {})[job.start] = outcome.tallies

        worker = make_worker(part, inputs, self.interrupts)
        run_rounds(part.rounds(), worker, put, note, self.interrupts)
        return {tensor.name: as_floats(made, tensor.output) for tensor in tensors}


def is_plain(info: TensorInfo | None, base: TensorInfo) -> bool:
    """Whether a model's own tensor is what it stores, and can be read as it is."""
    return bool(
        info
        and info.encoding is PLAIN
        and info.shape == base.shape
        and info.dtype in STORED_TYPES
        and info.count
    )


def read_plain(model: Checkpoint, name: str) -> Tensor:
    info = model.tensors[name]
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    model.read(info, 0, info.count, raw.numpy())
    return raw.view(STORED_TYPES[info.dtype]).reshape(info.shape)


def as_floats(made: NDArray[np.uint8], info: TensorInfo) -> Tensor:
    """A tensor among the bytes of all. Others than floats come as they are stored, flat."""
    raw = torch.from_numpy(made[info.offset : info.offset + info.nbytes])
    return raw.view(torch.float32).reshape(info.shape) if info.dtype == "F32" else raw


class SolvedModel(Checkpoint):
    """Matrices in memory, as one more model of the merge."""

    def __init__(self, solved: Mapping[str, Tensor]) -> None:
        self.name = "the matched model"
        self.values = [np.ascontiguousarray(each.numpy()) for each in solved.values()]
        self.tensors = {
            name: TensorInfo("F32", tuple(each.shape), file=k)
            for k, (name, each) in enumerate(solved.items())
        }

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        raw = self.values[info.file].reshape(-1).view(np.uint8)
        view[:] = raw[start : start + len(view)].data


def place_solved(tensor: TensorPlan, solved: SolvedModel, number: int) -> TensorPlan:
    """A row of the plan, of which the model of this number is the only one."""
    info = solved.tensors[tensor.name]
    settings = TensorSettings(
        method=DEFAULT,
        thinnings=(Thinning(),) * (number + 1),
        weights=(1.0,) * (number + 1),
        normalize=False,
        lambda_coeff=tensor.settings.lambda_coeff,
    )
    return replace(
        tensor,
        finetuned=((number, info),),
        mask_names=(tensor.name,),
        settings=settings,
        spec=choose_kernel(DEFAULT, tensor.base, [info], tensor.spec.output),
    )


class FileMatch:
    """One merge into files, matched."""

    def __init__(self, order: Order) -> None:
        check_order(order)
        self.order = order
        self.plan = order.plan
        self.config = order.plan.config
        self.inputs = order.inputs
        base = order.inputs[0]
        self.weights = Inputs(self.config, order.inputs, order.interrupts)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = make_module(base.folder or base.files[0].path.parent, base.name)
        for own in module.modules():
            for name, buffer in own._buffers.items():
                own._buffers[name] = None if buffer is None else buffer.to(device)
        self.names = Names(module, {name: info.shape for name, info in base.tensors.items()})
        self.network = Network(module, device)
        self.predicts = type(module).__name__.endswith(PREDICTING)
        self.rows = {tensor.name: tensor for tensor in self.plan.tensors}
        self.tied = find_tied(module)
        self.participants, self.watchers = self._read_examples()
        self.digests: dict[str, str] = {}

    def _read_examples(self) -> tuple[list[Participant], list[Participant]]:
        """Who is matched with which examples; and the base, to be judged on some of each."""
        base, *models = self.inputs
        participants: list[Participant] = []
        watchers: list[Participant] = []
        for who, model in [*enumerate(models), (BASE, base)]:
            examples = model.parts[0].examples
            if examples is None:
                continue
            rows = self.plan.embedding_rows
            tokens = Reader([model.folder, base.folder], model.name, rows).read(examples)
            streams = make_streams(tokens, count_batch(self.network.device))
            if not self.predicts:
                streams = [Stream(stream.batch, stream.tokens) for stream in streams]
            participants.append(Participant(who, streams))
            if who != BASE:
                some = [streams[k] for k in choose_judged(streams)]
                some = [Stream(each.batch, each.tokens, each.answers) for each in some]
                watchers.append(Participant(BASE, some, watches=True))
            if len(examples.entries) < FEW:
                LOG.warning(
                    f"{examples.name} has {len(examples.entries)} examples: with fewer than {FEW}, "
                    "a merge is matched to little more than these"
                )
        return participants, watchers

    def explain_left(self, parameter: str) -> str:
        """Why a matrix is not to be matched, or ""."""
        row = self.rows.get(self.names.find_tensor(parameter))
        return explain_unmatched(row, parameter in self.tied, self.config)

    def load(self, who: int, parameters: Sequence[str]) -> dict[str, Tensor]:
        tensors = self.weights.make(who, self.names.list_tensors(parameters))
        found = self.names.assemble(parameters, tensors)
        return {name: each for name, each in found.items() if each.is_floating_point()}

    def list_candidates(self) -> list[TensorPlan]:
        """All that may be matched."""
        names = [name for segment in self.network.segments for name in segment.matrices]
        free = [name for name in dict.fromkeys(names) if not self.explain_left(name)]
        return [self.rows[self.names.find_tensor(name)] for name in free]

    def estimate(self) -> PlannedMatch:
        """What it takes, by the time of a product: forwards, sums and solutions."""
        free = {row.name for row in self.list_candidates()}
        tokens = sum(map(count_tokens, self.participants))
        operations = 0
        largest = 0
        widest = 0
        width = 0  # of the hidden states
        for segment in self.network.segments:
            names = map(self.names.find_tensor, segment.matrices)
            sizes = [self.rows[name].base.shape for name in names if name in free]
            width = width or min((min(shape) for shape in sizes), default=0)
            entries = sum(rows * columns for rows, columns in sizes)
            largest = max(largest, entries)
            operations += FORWARDS * 2 * entries * tokens
            for side in {columns for _, columns in sizes}:
                operations += 2 * side**2 * tokens + side**3 // 3
                widest = max(widest, side)
        hidden = 2 * tokens * width
        held = (len(self.participants) + 2) * largest + 2 * largest + 2 * widest**2 + hidden
        rate = MatrixEngine(self.config.engine).measure_rate(self.plan.threads)
        return PlannedMatch(
            matrices=len(free),
            examples=sum(len(e.entries) for m in self.inputs if (e := m.parts[0].examples)),
            tokens=tokens,
            memory=LIBRARY_BYTES + 4 * held,
            seconds=operations / rate,
        )

    def run(self) -> Made:
        outputs = [name for row in self.list_candidates() for name in row.outputs]
        if not outputs:
            raise DareError("no matrix of the model can be matched", "merge without examples")
        self.digests = dict.fromkeys(sorted(outputs), UNMATCHED)
        self.plan = record_matched(self.plan, self.inputs, self.digests)
        return publish(replace(self.order, plan=self.plan), self._make)

    def _make(self, output: Output) -> Made:
        interrupts = self.order.interrupts
        results: list[Matched] = []
        outcomes: list[Outcome] = []
        done: set[str] = set()
        with self.network.opened(), explain_memory():
            self._try()
            walk = Walk(
                self.network,
                self.load,
                [*self.participants, *self.watchers],
                ridge=self.config.match_ridge or RIDGE,
                excluded=self.explain_left,
                check=interrupts.check,
            )
            steps = len(self.network.segments)
            with progress("matching", steps, self.config.verbose) as advance:
                for result in walk.run():
                    outcomes += self._write(result, output)
                    done |= {self.names.find_tensor(name) for name in result.solved}
                    result.solved = dict.fromkeys(result.solved, torch.empty(0))
                    results.append(result)
                    advance(1)
        left = [tensor for tensor in self.plan.tensors if tensor.name not in done]
        rest = replace(self.plan, tensors=tuple(left))
        worker = open_worker(rest, self.inputs, interrupts)
        outcomes += run_merge(rest, worker, output, interrupts)
        plan = record_matched(self.plan, self.inputs, self.digests)
        for number, file in enumerate(plan.files):
            output.write_at(number, memoryview(file.header), 0)
        report = self._report(results)
        warnings = (*plan.warnings, *find_useless(report.losses))
        return replace(plan, matching=report, warnings=warnings), outcomes

    def _try(self) -> None:
        """Call the module with one example, to see how it can be walked."""
        batch = self.participants[0].streams[0].batch
        try:
            self.network.choose_way(self.load, {name: each[:1] for name, each in batch.items()})
        except IndexError:
            raise DareError(
                "an example has more tokens, or others, than the model can be called with",
                "give a smaller --max-tokens, or examples by the model's own tokenizer",
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DareError(
                f"{self.inputs[0].name!r} cannot be called with tokens alone: {error}",
                "merge without examples; in Python, dare_match takes any module",
            ) from None

    def _write(self, result: Matched, output: Output) -> list[Outcome]:
        """Write what was solved of a segment, and note its digests."""
        named = {self.names.find_tensor(name): each for name, each in result.solved.items()}
        solved = SolvedModel(named)
        number = len(self.inputs) - 1
        rows = [place_solved(self.rows[name], solved, number) for name in named]
        part = replace(self.plan, tensors=tuple(rows), seeds=(*self.plan.seeds, 0))
        outcomes: list[Outcome] = []

        def note(job: Job, outcome: Outcome | None) -> None:
            if outcome:
                outcomes.append(replace(outcome, tallies={}))

        worker = open_worker(part, [*self.inputs, solved], self.order.interrupts)
        run_rounds(part.rounds(), worker, output.write_at, note, self.order.interrupts)
        for name in named:
            for start, tallies in self.weights.found[name].items():
                outcomes.append(Outcome(name, start, 0, tallies))
        for row in rows:
            for name, info in row.outputs.items():
                place = worker.place_of(info)
                self.digests[name] = digest_range(output.paths[info.file], place, info.nbytes)
        return outcomes

    def _report(self, results: Sequence[Matched]) -> MatchReport:
        used = [model.parts[0].examples for model in (*self.inputs[1:], self.inputs[0])]
        return replace(
            summarize(results),
            examples=tuple(len(each.entries) for each in used if each),
            tokens=tuple(count_tokens(each) for each in self.participants),
            losses=tuple(self._find_losses()),
        )

    def _find_losses(self) -> Iterator[AnswerLoss]:
        factors = {row.settings.lambda_coeff for row in self.rows.values() if row.finetuned}
        is_walked = factors == {1.0} and self.config.adapter_rank is None  # what is written
        for participant, watcher in zip(self.participants, self.watchers, strict=False):
            chosen = choose_judged(participant.streams)
            base = watcher.mean_loss("own", range(len(chosen)))
            own = participant.mean_loss("own", chosen)
            merged = participant.mean_loss("merged", chosen)
            if base is not None and own is not None:
                name = self.plan.models[participant.who]
                yield AnswerLoss(name, base, own, merged if is_walked else None)


def choose_judged(streams: Sequence[Stream]) -> range:
    """The batches on which the base is judged, too: long examples and short ones."""
    return range(0, len(streams), -(-len(streams) // JUDGED))


def find_useless(losses: Sequence[AnswerLoss]) -> Iterator[str]:
    for loss in losses:
        if loss.own >= loss.base:
            yield (
                f"{loss.model} is no better than the base on the answers of its own examples, so "
                "matching teaches the merge nothing of it: are the files in another order than "
                "the models, or of another task?"
            )


def count_tokens(participant: Participant) -> int:
    masks = [stream.tokens for stream in participant.streams]
    return sum(int(mask.sum()) for mask in masks if mask is not None)


def check_order(order: Order) -> None:
    """Refuse what a matched merge cannot be."""
    if order.inputs[0].heights[1]:
        raise ConfigError(
            "examples are read by the models' own tokenizers, and the output has other token ids",
            "leave --tokenizer and --pad-vocabulary out",
        )
    if order.part:
        raise ConfigError(
            "--part divides a merge by files, and matching goes through the model in its order",
            "merge on one machine, or without examples",
        )
    if order.resume:
        raise ConfigError(
            "a merge with examples cannot be continued: each matrix depends on those before it",
            "leave --resume out",
        )
    rank = order.plan.config.adapter_rank
    if rank == FULL or is_share(rank):
        raise ConfigError(
            f"adapter_rank {rank} is found from the models' changes, and matching changes them",
            "give the rank as a number, like --adapter-rank 32",
        )


def estimate(plan: FilePlan, inputs: Sequence[Checkpoint]) -> PlannedMatch:
    with Interrupts() as interrupts:
        return FileMatch(Order(plan, inputs, interrupts)).estimate()


def run(order: Order) -> Made:
    """Merge, and match what the method gives."""
    return FileMatch(order).run()
