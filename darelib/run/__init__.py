"""Who does the jobs of a merge: the runners, one module each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from darelib.interrupts import Interrupts
    from darelib.output.publish import Output
    from darelib.plan import MergePlan
    from darelib.run.worker import Outcome, Worker

# The module of each runner; its run_merge runs all jobs of a plan that are not done yet.
RUNNERS: Final = {"threads": "darelib.run.threads"}


def run_merge(
    plan: MergePlan, worker: Worker, output: Output, interrupts: Interrupts, runner: str = "threads"
) -> list[Outcome]:
    """What all jobs of a merge found, those of an earlier run that is continued included."""
    outcomes: list[Outcome] = importlib.import_module(RUNNERS[runner]).run_merge(plan, worker, output, interrupts)
    return outcomes
