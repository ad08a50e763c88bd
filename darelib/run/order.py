"""A merge that somebody is to run: its plan, what it reads, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import check_unchanged
from darelib.output.prepare import FilePlan
from darelib.output.publish import Output, explain_write_errors
from darelib.run.outcomes import Outcome


@dataclass(frozen=True)
class Order:
    """What a runner is given."""

    plan: FilePlan
    inputs: Sequence[Checkpoint]
    interrupts: Interrupts
    force: bool = False
    resume: bool = False
    part: tuple[int, int] | None = None  # which of how many, if only a part is made
    ray_address: str | None = None

    @property
    def name(self) -> str:
        """What is made."""
        if self.part is None:
            return self.plan.output.name
        return f"{self.plan.output.name} (part {self.part[0]} of {self.part[1]})"


@dataclass(frozen=True)
class Result:
    """What a runner gives: the plan of what it made, and what all jobs of it found."""

    plan: FilePlan
    outcomes: list[Outcome]


def publish(order: Order, run: Callable[[Output], list[Outcome]]) -> Result:
    """Let a runner write a whole output, and publish it. run: runs all jobs that are not done
    yet.
    """
    plan = order.plan
    if plan.replaces:
        LOG.info(f"replaces {plan.output.name}: {plan.replaces}")
    identity = plan.identity(order.inputs)
    with (
        explain_write_errors(plan.output, order.resume),
        Output(plan.output, plan.files, identity, order.resume) as output,
    ):
        outcomes = run(output)
        output.publish(
            plan.side,
            plan.digests,
            lambda: check_unchanged(order.inputs),
            order.force,
            order.interrupts,
        )
    return Result(plan, outcomes)
