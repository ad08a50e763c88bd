"""Merges that are judged by examples, and not written: for evaluations and searches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Final

from darelib.config import DareConfig
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, shorten_names
from darelib.models.checkpoint import Checkpoint
from darelib.output.judged import (
    Costs,
    Judgement,
    find_cost,
    find_disorder,
    find_doubts,
    list_costs,
)
from darelib.plan.plan import MergePlan, plan_merge
from darelib.run.matching.judging import Judge, Streams, list_lambdas
from darelib.run.matching.model_files import ModelFiles
from darelib.run.matching.models import Spool
from darelib.run.matching.network import BASE
from darelib.run.matching.walk import enlist, start_from

SPOOLED: Final = 8 << 30  # bytes of merges that a search keeps, to try them with other lambdas


def judge(
    plan: MergePlan,
    inputs: Sequence[Checkpoint],
    others: Sequence[Checkpoint],
    interrupts: Interrupts,
) -> Judgement:
    """others: models that are judged; none: the merge that the plan describes."""
    models = ModelFiles(plan, inputs, interrupts, others)
    models.check_predicts()
    for warning in dict.fromkeys([*plan.warnings, *models.weights.warnings]):
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
    remarks = [*find_doubts(found.files), *found.remarks]
    if found.choice:
        remarks += found.choice.warnings
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
            base = list_costs(self.judge.score_one(BASE))
            owners = list_costs(self.owners)
            for remark in (*find_doubts(self.files), *find_disorder(self.files, base, owners)):
                LOG.warning(remark)
            return base
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
                del self._spools[next(iter(self._spools))]
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
    used, held = models.divide(bool(config.held_out))
    skills = {who: streams for who, streams in held.items() if who != BASE}
    with models.opened(), models.judging(skills, 1) as judge:
        yield Trials(models, used, judge, folder)
