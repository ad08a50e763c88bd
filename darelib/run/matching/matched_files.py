"""Merges of files with examples: matched and written, as if what the walk solves were one more
model's; estimated; judged; and tried by searches.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final

from torch import Tensor

from darelib.arithmetic.matrix_engine import MatrixEngine
from darelib.config import DareConfig
from darelib.config.values import FULL
from darelib.core.drops import Thinning
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, shorten_names
from darelib.methods import DEFAULT
from darelib.methods.looks import TensorSettings
from darelib.models.checkpoint import Checkpoint
from darelib.models.tensor import Described, Known
from darelib.models.tensor import Tensor as StoredTensor
from darelib.output.adapter import choose_planner
from darelib.output.judged import (
    Costs,
    Judgement,
    LambdaChoice,
    explain_order,
    find_cost,
    find_doubts,
    list_costs,
)
from darelib.output.matched import (
    UNMATCHED,
    AnswerLoss,
    MatchReport,
    PlannedMatch,
    digest_range,
)
from darelib.output.prepare import FilePlan, is_share, plan_output, record_matched
from darelib.output.publish import Output
from darelib.plan.plan import Job, MergePlan, plan_merge
from darelib.plan.tensorplan import TensorPlan
from darelib.run.matching.judging import LAMBDAS, Judge, Streams, list_lambdas
from darelib.run.matching.model_files import ModelFiles
from darelib.run.matching.models import Keep, Spool
from darelib.run.matching.network import BASE
from darelib.run.matching.walk import (
    Matched,
    Participant,
    enlist,
    enlist_watched,
    start_from,
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
SPOOLED: Final = 8 << 30  # bytes of merges that a search keeps, to try them with other lambdas


@dataclass(frozen=True, eq=False)
class Solved(StoredTensor):
    """A matrix in memory."""

    values: Tensor = field(repr=False)

    def read(self, start: int, count: int, known: Known | None = None) -> Any:
        return self.values.reshape(-1)[start : start + count].numpy()


class MatchedOutput:
    """A matched merge, on its way into files."""

    def __init__(
        self, order: Order, models: ModelFiles, participants: Sequence[Participant]
    ) -> None:
        outputs = [name for row in models.list_candidates() for name in row.outputs]
        self.digests = dict.fromkeys(sorted(outputs), UNMATCHED)
        plan = record_matched(order.plan, order.inputs, self.digests)
        self.order = replace(order, plan=plan)
        self.models = models
        self.participants = participants
        self.outcomes: list[Outcome] = []

    def publish(self, match: Callable[[Keep], list[Matched]]) -> Made:
        return publish(self.order, lambda output: self._make(match, output))

    def _make(self, match: Callable[[Keep], list[Matched]], output: Output) -> Made:
        plan = self.order.plan
        inputs = self.order.inputs
        rows = {tensor.name: tensor for tensor in plan.tensors}
        results = match(lambda name, solved: self._write(rows.pop(name), solved, output))
        rest = replace(plan, tensors=tuple(rows.values()))
        worker = open_worker(rest, inputs)
        self.outcomes += run_merge(rest, worker, output, self.order.interrupts)
        plan = record_matched(plan, inputs, self.digests)
        for number, file in enumerate(plan.files):
            output.write_at(number, memoryview(file.header), 0)
        report = self._report(results)
        warnings = (*plan.warnings, *self._explain_order())
        return replace(plan, matching=report, warnings=warnings), self.outcomes

    def _write(self, row: TensorPlan, solved: Tensor, output: Output) -> None:
        """Write what was solved, as if a last model were the only one, and note its digest."""
        model = Described()
        model.name = "the matched model"
        plan = self.order.plan
        seeds = (*plan.seeds, 0)
        tensor = Solved("F32", tuple(solved.shape), solved)
        settings = TensorSettings(
            method=DEFAULT,
            thinnings=(Thinning(),) * len(seeds),
            weights=(1.0,) * len(seeds),
            normalize=False,
            lambda_coeff=row.settings.lambda_coeff,
        )
        placed = replace(
            row,
            finetuned=((len(plan.seeds), tensor),),
            mask_names=(row.name,),
            settings=settings,
        )
        part = replace(plan, tensors=(placed,), seeds=seeds)

        def note(job: Job, outcome: Outcome | None) -> None:
            if outcome:
                self.outcomes.append(replace(outcome, tallies={}))

        worker = open_worker(part, [*self.order.inputs, model])
        run_rounds(part.rounds(), worker, output.write_at, note, self.order.interrupts)
        for start, tallies in self.models.weights.found[row.name].items():
            self.outcomes.append(Outcome(row.name, start, 0, tallies))
        for name, info in row.outputs.items():
            place = worker.place_of(info)
            self.digests[name] = digest_range(output.paths[info.file], place, info.nbytes)

    def _report(self, results: Sequence[Matched]) -> MatchReport:
        own = [each for each in self.participants if not each.watches]
        return replace(
            summarize(results),
            examples=tuple(each.count for each in own),
            tokens=tuple(each.tokens for each in own),
            losses=tuple(self._find_losses(own)),
        )

    def _find_losses(self, participants: Sequence[Participant]) -> Iterator[AnswerLoss]:
        plan = self.order.plan
        factors = {row.settings.lambda_coeff for row in plan.tensors if row.finetuned}
        is_walked = factors == {1.0} and plan.config.adapter_rank is None  # what is written
        watchers = {each.owner: each for each in self.participants if each.who == BASE}
        for participant in (each for each in participants if each.who in watchers):
            base = watchers[participant.who].mean_loss("own")
            own = participant.mean_loss("own")
            merged = participant.mean_loss("merged")
            if base is not None and own is not None:
                name = plan.models[participant.who]
                yield AnswerLoss(name, base, own, merged if is_walked else None)

    def _explain_order(self) -> Iterator[str]:
        found = {(each.who, each.subject): each.mean_loss("own") for each in self.participants}
        losses = {pair: loss for pair, loss in found.items() if loss is not None}
        known = [k for k in self.models.titles if (BASE, k) in losses]
        yield from explain_order(
            [self.models.titles[k] for k in known],
            [losses[BASE, k] for k in known],
            [losses[k, k] for k in known],
            [[losses[j, k] for j in known] for k in known],
        )


def check_order(order: Order) -> None:
    """Refuse what a matched merge cannot be."""
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
    """What it takes, by the time of a product: forwards, sums and solutions."""
    models = ModelFiles(plan, inputs, Interrupts())
    used, held = divide_examples(models)
    free = {row.name for row in models.list_candidates()}
    enlisted = enlist_watched(used) if free else []
    participants = [each for each in enlisted if not each.watches]
    tokens = sum(each.tokens for each in participants)
    watched = sum(each.tokens for each in enlisted) - tokens
    is_auto = models.config.is_auto
    judged = sum(Participant(who, own).tokens for who, own in held.items()) if is_auto else 0
    find = models.names.find_tensor
    blocks = [
        [inputs[0].tensors[name].shape for name in filter(None, map(find, segment.matrices))]
        for segment in models.network.segments
    ]
    entries = [sum(map(math.prod, shapes)) for shapes in blocks]
    widths = [width for shapes in blocks for width in {columns for _, columns in shapes}]
    calls = FORWARDS * tokens + watched + (len(LAMBDAS) + 1) * judged
    operations = 2 * sum(entries) * calls
    if free:
        operations += sum(2 * width**2 * tokens + width**3 // 3 for width in widths)
    # The fine-tunes' and the merge's; then the fine-tunes' and one for each lambda.
    hidden = max(2 * tokens + watched, (len(LAMBDAS) + 1) * judged) * min(widths, default=0)
    weights = (len(participants) + 4) * max(entries) + 2 * max(widths, default=0) ** 2
    rate = MatrixEngine(models.config.engine).measure_rate(plan.threads)
    return PlannedMatch(
        matrices=len(free),
        examples=sum(each.count for each in participants),
        tokens=tokens,
        judged=judged,
        memory=LIBRARY_BYTES + 4 * (weights + hidden),
        seconds=operations / rate,
    )


def run(order: Order) -> Made:
    """Merge, match what the method gives, and choose lambda: all that is wanted of the examples."""
    check_order(order)
    models = ModelFiles(order.plan, order.inputs, order.interrupts)
    used, held = divide_examples(models)
    participants = enlist_watched(used)
    if not models.config.is_auto:
        with models.opened():
            output = MatchedOutput(order, models, participants)
            return output.publish(lambda keep: models.match_into(keep, participants))
    folder = next(filter(Path.exists, order.plan.output.path.parents))
    with closing(Spool(folder)) as spool:
        with models.opened():
            matches = models.config.matches
            results = models.match_into(spool.__setitem__, participants) if matches else []
            choice = models.choose_lambda(held, spool)
        order = settle_lambda(order, choice)

        def restore(keep: Keep) -> list[Matched]:
            for name in spool.places:
                keep(name, spool[name])
            return results

        if matches:
            made, outcomes = MatchedOutput(order, models, participants).publish(restore)
        else:
            made, outcomes = run_plain(order)
        warnings = (*made.warnings, *choice.warnings)
        return replace(made, choice=choice, warnings=warnings), outcomes


def divide_examples(models: ModelFiles) -> tuple[Streams, Streams]:
    """Examples that match, and examples that choose lambda."""
    if models.config.is_auto:
        models.check_predicts()
    return models.divide(bool(models.config.is_auto or models.config.held_out))


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


def judge(
    plan: MergePlan,
    inputs: Sequence[Checkpoint],
    others: Sequence[Checkpoint],
    interrupts: Interrupts,
) -> Judgement:
    """others: models that are judged; none: the merge that the plan describes."""
    models = ModelFiles(plan, inputs, interrupts, others)
    models.check_predicts()
    for warning in dict.fromkeys(models.weights.warnings if others else plan.warnings):
        LOG.warning(warning)
    config = plan.config
    is_divided = not others and (config.needs_examples or config.held_out)
    used, held = models.divide(bool(is_divided))
    names = shorten_names([model.name for model in others])
    merges = [] if others else list_lambdas(config)
    with models.opened(), closing(Spool(Path(gettempdir()))) as spool:
        if merges and config.matches:
            models.match_into(spool.__setitem__, enlist(used))
        found = models.compare(held, names, merges, spool)
    doubts = found.choice.warnings if found.choice else find_doubts(found.files)
    remarks = [*doubts, *found.remarks]
    if merges and config.adapter_rank is not None:
        remarks.append("the merge is judged in full, not as an adapter of some rank: judge that "
                       "by --model once it is written")  # fmt: skip
    return replace(found, remarks=tuple(dict.fromkeys(remarks)))


class Trials:
    """Merges of the same models with other settings."""

    def __init__(self, models: ModelFiles, used: Streams, judge: Judge, folder: Path) -> None:
        self.models = models
        self.used = used
        self.judge = judge
        self.owners = judge.score_owners()
        self.files = judge.describe(self.owners)
        self.folder = folder
        self._spools: dict[str, Spool] = {}  # merges with lambda 1, by what they depend on

    def score(self, config: DareConfig | None) -> Costs:
        """By file. None: of the base."""
        if config is None:
            base = self.judge.score_one(BASE)
            before, own = ([score.mean_loss for score in row] for row in (base, self.owners))
            order = explain_order([file.name for file in self.files], before, own)
            for remark in (*find_doubts(self.files), *order):
                LOG.warning(remark)
            return list_costs(base)
        models = self.models.with_config(config)
        make = models.scale(list_lambdas(config), self._find_spool(models), keeps=True)
        costs = list(map(list_costs, self.judge.score(make)))
        return min(costs, key=find_cost)

    def _find_spool(self, models: ModelFiles) -> Spool:
        rows = models.rows.values()
        # Where lambda is 0, nothing is matched.
        still = [row.name for row in rows if not row.settings.lambda_coeff]
        key = repr((start_from(models.config), still if models.config.matches else ()))
        if key not in self._spools:
            # The oldest merges are forgotten, if another one might not fit beside them.
            most = min(SPOOLED, shutil.disk_usage(self.folder).free)
            while 2 * sum(each.size for each in self._spools.values()) > most:
                self._spools.pop(next(iter(self._spools))).close()
            spool = Spool(self.folder)
            if models.config.matches:
                models.match_into(spool.__setitem__, enlist(self.used))
            self._spools[key] = spool
        return self._spools[key]


@contextmanager
def open_trials(
    config: DareConfig, inputs: Sequence[Checkpoint], interrupts: Interrupts, folder: Path
) -> Iterator[Trials]:
    """folder: where merges are kept while they are tried, in files without a name."""
    plan = plan_merge(replace(config, lambda_coeff=1.0), inputs)
    models = ModelFiles(plan, inputs, interrupts)
    models.check_predicts()
    Spool(folder).close()  # whether there can be one
    used, held = models.divide(bool(config.held_out))
    skills = {who: streams for who, streams in held.items() if who != BASE}
    with models.opened(), models.judging(skills, 1) as judge:
        yield Trials(models, used, judge, folder)
