"""A merge into files, matched: what the walk solves is written as if it were one more model's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from darelib.config.values import FULL
from darelib.core.drops import Thinning
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, DareError, count_of, progress
from darelib.kernels.matrix_engine import MatrixEngine
from darelib.methods import DEFAULT
from darelib.methods.looks import TensorSettings
from darelib.models.checkpoint import Checkpoint
from darelib.models.encodings import TensorInfo
from darelib.output.adapter import choose_planner
from darelib.output.judged import LambdaChoice
from darelib.output.matched import (
    UNMATCHED,
    AnswerLoss,
    MatchReport,
    PlannedMatch,
    digest_range,
)
from darelib.output.prepare import FilePlan, is_share, plan_output, record_matched
from darelib.output.publish import Output, explain_write_errors
from darelib.plan.plan import Job, MergePlan
from darelib.plan.tensorplan import TensorPlan, choose_kernel
from darelib.run.matching.judging import LAMBDAS, list_lambdas
from darelib.run.matching.language import Tokens
from darelib.run.matching.model_files import ModelFiles, Spool
from darelib.run.matching.network import BASE
from darelib.run.matching.walk import (
    RIDGE,
    Matched,
    Participant,
    Stream,
    Walk,
    explain_unmatched,
    summarize,
)
from darelib.run.products import open_worker
from darelib.run.rounds import run_rounds
from darelib.run.threads import Made, Order, publish, run_merge
from darelib.run.threads import run as run_plain
from darelib.run.worker import Outcome

# What a matrix takes besides its sums, in forwards; what torch and transformers take, as measured.
FORWARDS: Final = 7
LIBRARY_BYTES: Final = 700_000_000
FEW: Final = 16  # examples, below which a merge is hardly better matched
JUDGED: Final = 2  # batches of each model's examples on which the base is judged, too


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


class Matching:
    """The matrices of models in files, matched with examples."""

    def __init__(self, models: ModelFiles, examples: Mapping[int, Sequence[Tokens]]) -> None:
        """examples: by whose they are, without those that are held out."""
        self.models = models
        self.config = models.config
        self.interrupts = models.interrupts
        self.network = models.network
        self.examples = examples
        self.participants: list[Participant] = []
        self.watchers: list[Participant] = []  # the base, to be judged on some of each
        for who, tokens in examples.items():
            streams = models.make_streams(tokens)
            if not models.predicts:
                streams = [Stream(stream.batch, stream.tokens) for stream in streams]
            self.participants.append(Participant(who, streams))
            if who != BASE:
                chosen = [streams[k] for k in choose_judged(streams)]
                some = [Stream(each.batch, each.tokens, each.answers) for each in chosen]
                self.watchers.append(Participant(BASE, some, watches=True))
            if len(tokens) < FEW and self.config.matches:
                LOG.warning(
                    f"{models.name_examples(who)} has {count_of(len(tokens), 'example')}: with "
                    f"fewer than {FEW}, a merge is matched to little more than these"
                )

    def explain_left(self, parameter: str) -> str:
        """Why a matrix is not to be matched, or ""."""
        row = self.models.rows.get(self.models.names.find_tensor(parameter))
        return explain_unmatched(row, parameter in self.models.tied, self.config)

    def list_candidates(self) -> list[TensorPlan]:
        """All that may be matched."""
        names = [name for segment in self.network.segments for name in segment.matrices]
        free = [name for name in dict.fromkeys(names) if not self.explain_left(name)]
        return [self.models.rows[self.models.names.find_tensor(name)] for name in free]

    def estimate(self, held: Mapping[int, Sequence[Tokens]]) -> PlannedMatch:
        """What it takes, by the time of a product: forwards, sums and solutions.

        held: examples by which lambda is chosen.
        """
        free = {row.name for row in self.list_candidates()}
        tokens = sum(map(count_tokens, self.participants)) if free else 0
        judged = sum(len(each.ids) for own in held.values() for each in own)
        judged = judged if self.config.is_auto else 0
        operations = 0
        largest = 0
        widest = 0
        width = 0  # of the hidden states
        for segment in self.network.segments:
            names = list(filter(None, map(self.models.names.find_tensor, segment.matrices)))
            shapes = {name: self.models.rows[name].base.shape for name in names}
            whole = sum(map(math.prod, shapes.values()))
            operations += 2 * whole * judged * (len(LAMBDAS) + 1)
            sizes = [shape for name, shape in shapes.items() if name in free]
            width = width or min(map(min, shapes.values()), default=0)
            entries = sum(rows * columns for rows, columns in sizes)
            largest = max(largest, entries)
            operations += FORWARDS * 2 * entries * tokens
            for side in {columns for _, columns in sizes}:
                operations += 2 * side**2 * tokens + side**3 // 3
                widest = max(widest, side)
        # The fine-tunes' and the merge's; then the fine-tunes' and one for each lambda.
        hidden = max(2 * tokens, (len(LAMBDAS) + 1) * judged) * width
        blocks = (len(self.participants) + 4) * largest
        rate = MatrixEngine(self.config.engine).measure_rate(self.models.plan.threads)
        return PlannedMatch(
            matrices=len(free),
            examples=sum(map(len, self.examples.values())),
            tokens=tokens,
            judged=judged,
            memory=LIBRARY_BYTES + 4 * (blocks + 2 * widest**2 + hidden),
            seconds=operations / rate,
        )

    def run(self) -> Iterator[Matched]:
        """Match, with the module opened. Of each segment, what is solved is gone at the next."""
        if not self.list_candidates():
            raise DareError("no matrix of the model can be matched", "merge without examples")
        walk = Walk(
            self.network,
            self.models.load,
            [*self.participants, *self.watchers],
            ridge=self.config.match_ridge or RIDGE,
            excluded=self.explain_left,
            check=self.interrupts.check,
        )
        steps = len(self.network.segments)
        with progress("matching", steps, self.config.verbose) as advance:
            for result in walk.run():
                yield result
                result.solved = dict.fromkeys(result.solved, torch.empty(0))
                advance(1)

    def spool(self, spool: Spool) -> list[Matched]:
        """Match, and put what is solved into a file."""
        results = []
        for result in self.run():
            for name, each in result.solved.items():
                spool.put(self.models.names.find_tensor(name), each)
            results.append(result)
        return results

    def restore(self, results: Iterable[Matched], spool: Spool) -> Iterator[Matched]:
        """The results with what was solved, one after the other."""
        find = self.models.names.find_tensor
        for result in results:
            yield replace(result, solved={name: spool.get(find(name)) for name in result.solved})

    def report(self, results: Sequence[Matched], plan: MergePlan) -> MatchReport:
        return replace(
            summarize(results),
            examples=tuple(map(len, self.examples.values())),
            tokens=tuple(count_tokens(each) for each in self.participants),
            losses=tuple(self._find_losses(plan)),
        )

    def _find_losses(self, plan: MergePlan) -> Iterator[AnswerLoss]:
        factors = {row.settings.lambda_coeff for row in plan.tensors if row.finetuned}
        is_walked = factors == {1.0} and self.config.adapter_rank is None  # what is written
        for participant, watcher in zip(self.participants, self.watchers, strict=False):
            chosen = choose_judged(participant.streams)
            base = watcher.mean_loss("own", range(len(chosen)))
            own = participant.mean_loss("own", chosen)
            merged = participant.mean_loss("merged", chosen)
            if base is not None and own is not None:
                name = plan.models[participant.who]
                yield AnswerLoss(name, base, own, merged if is_walked else None)


class MatchedOutput:
    """A matched merge, on its way into files."""

    def __init__(self, order: Order, matching: Matching) -> None:
        self.order = order
        self.matching = matching
        self.digests: dict[str, str] = {}

    def write(self, results: Iterable[Matched]) -> Made:
        outputs = [name for row in self.matching.list_candidates() for name in row.outputs]
        self.digests = dict.fromkeys(sorted(outputs), UNMATCHED)
        plan = record_matched(self.order.plan, self.order.inputs, self.digests)
        self.order = replace(self.order, plan=plan)
        return publish(self.order, lambda output: self._make(results, output))

    def _make(self, results: Iterable[Matched], output: Output) -> Made:
        plan = self.order.plan
        inputs = self.order.inputs
        find = self.matching.models.names.find_tensor
        outcomes: list[Outcome] = []
        done: set[str] = set()
        kept = []
        for result in results:
            named = {find(name): each for name, each in result.solved.items()}
            outcomes += self._write(named, output)
            done |= named.keys()
            kept.append(result)
        left = [tensor for tensor in plan.tensors if tensor.name not in done]
        rest = replace(plan, tensors=tuple(left))
        worker = open_worker(rest, inputs, self.order.interrupts)
        outcomes += run_merge(rest, worker, output, self.order.interrupts)
        plan = record_matched(plan, inputs, self.digests)
        for number, file in enumerate(plan.files):
            output.write_at(number, memoryview(file.header), 0)
        report = self.matching.report(kept, plan)
        warnings = (*plan.warnings, *find_useless(report.losses))
        return replace(plan, matching=report, warnings=warnings), outcomes

    def _write(self, found: Mapping[str, Tensor], output: Output) -> list[Outcome]:
        """Write what was solved of a segment, and note its digests."""
        solved = SolvedModel(found)
        number = len(self.order.inputs) - 1
        rows = {tensor.name: tensor for tensor in self.order.plan.tensors}
        placed = [place_solved(rows[name], solved, number) for name in found]
        plan = self.order.plan
        part = replace(plan, tensors=tuple(placed), seeds=(*plan.seeds, 0))
        outcomes: list[Outcome] = []

        def note(job: Job, outcome: Outcome | None) -> None:
            if outcome:
                outcomes.append(replace(outcome, tallies={}))

        worker = open_worker(part, [*self.order.inputs, solved], self.order.interrupts)
        run_rounds(part.rounds(), worker, output.write_at, note, self.order.interrupts)
        for name in found:
            for start, tallies in self.matching.models.weights.found[name].items():
                outcomes.append(Outcome(name, start, 0, tallies))
        for row in placed:
            for name, info in row.outputs.items():
                place = worker.place_of(info)
                self.digests[name] = digest_range(output.paths[info.file], place, info.nbytes)
        return outcomes


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


def check_tokens(inputs: Sequence[Checkpoint]) -> None:
    if inputs[0].heights[1]:
        raise ConfigError(
            "examples are read by the models' own tokenizers, and the output has other token ids",
            "leave --tokenizer and --pad-vocabulary out",
        )


def check_order(order: Order) -> None:
    """Refuse what a matched merge cannot be."""
    check_tokens(order.inputs)
    if order.part:
        raise ConfigError(
            "--part divides a merge by files, and examples go through the model in its order",
            "merge on one machine, or without examples",
        )
    if order.resume:
        raise ConfigError(
            "a merge with examples cannot be continued: each matrix depends on those before it",
            "leave --resume out",
        )
    rank = order.plan.config.adapter_rank
    if order.plan.config.matches and (rank == FULL or is_share(rank)):
        raise ConfigError(
            f"adapter_rank {rank} is found from the models' changes, and matching changes them",
            "give the rank as a number, like --adapter-rank 32",
        )


def estimate(plan: FilePlan, inputs: Sequence[Checkpoint]) -> PlannedMatch:
    with Interrupts() as interrupts:
        models = ModelFiles(plan, inputs, interrupts)
        used, held = divide_examples(models)
        return Matching(models, used).estimate(held)


def run(order: Order) -> Made:
    """Merge, match what the method gives, and choose lambda: all that is wanted of the examples."""
    check_order(order)
    models = ModelFiles(order.plan, order.inputs, order.interrupts)
    used, held = divide_examples(models)
    if not models.config.matches:
        with models.opened(held):
            choice = choose_lambda(models, held)
        made, outcomes = run_plain(settle_lambda(order, choice))
        return note_choice(made, choice), outcomes
    matching = Matching(models, used)
    with models.opened(used):
        if not models.config.is_auto:
            return MatchedOutput(order, matching).write(matching.run())
        folder = next(filter(Path.exists, order.plan.output.path.parents))
        with explain_write_errors(order.plan.output, False), closing(Spool(folder)) as spool:
            results = matching.spool(spool)
            choice = choose_lambda(models, held, spool)
            settled = settle_lambda(order, choice)
            made, outcomes = MatchedOutput(settled, matching).write(
                matching.restore(results, spool)
            )
            return note_choice(made, choice), outcomes


def choose_lambda(
    models: ModelFiles, held: Mapping[int, Sequence[Tokens]], solved: Spool | None = None
) -> LambdaChoice:
    """The lambda with which the merge is best on examples. solved: matrices that were matched."""
    skills = {who: tokens for who, tokens in held.items() if who != BASE}
    with models.judging(skills, len(LAMBDAS)) as (judge, files):
        scores = judge.score(models.scale(list_lambdas(models.config), solved))
        return LambdaChoice.of(LAMBDAS, scores, files)


def divide_examples(
    models: ModelFiles,
) -> tuple[dict[int, list[Tokens]], dict[int, list[Tokens]]]:
    """Examples that match, and examples that choose lambda."""
    if models.config.is_auto:
        models.check_predicts()
    is_divided = models.config.is_auto or models.config.held_out
    return models.hold_out() if is_divided else (models.read_examples(), {})


def settle_lambda(order: Order, choice: LambdaChoice) -> Order:
    """The merge with the lambda that was chosen. Where the examples are for nothing else, it is the
    same as without them.
    """
    old = order.plan
    if not old.config.matches:
        for model in order.inputs:
            model.parts[0].examples = None
    config = old.config.settle_lambda(choice.chosen)
    planner = choose_planner(config)
    plan = plan_output(planner, config, order.inputs, old.output, old.tokenizer, order.force)
    return replace(order, plan=plan)


def note_choice(plan: FilePlan, choice: LambdaChoice) -> FilePlan:
    return replace(plan, choice=choice, warnings=(*plan.warnings, *choice.warnings))
