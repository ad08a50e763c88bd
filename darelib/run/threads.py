"""The runner of one machine: all jobs of a merge, or those of some files of its output, in
threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, count_of, human, progress
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import check_unchanged
from darelib.output.prepare import FilePlan
from darelib.output.publish import Output, OutputPart, explain_write_errors, share_folder
from darelib.plan.plan import Job, MergePlan
from darelib.run.products import open_worker, settle_ranks
from darelib.run.rounds import run_rounds
from darelib.run.solving import count_steps
from darelib.run.worker import Outcome, Worker, check_related


@dataclass(frozen=True)
class Order:
    plan: FilePlan
    inputs: Sequence[Checkpoint]
    interrupts: Interrupts
    force: bool = False
    resume: bool = False
    part: tuple[int, int] | None = None  # which of how many, if only a part is made
    ray_address: str | None = None

    @property
    def name(self) -> str:
        part = f" (part {self.part[0]} of {self.part[1]})" if self.part else ""
        return f"{self.plan.output.name}{part}"


Made: TypeAlias = tuple[FilePlan, list[Outcome]]  # the plan of what was made, what all jobs found


def publish(order: Order, run: Callable[[Output], Made]) -> Made:
    """Let a runner write a whole output, and publish it. run: runs the jobs that are not done."""
    plan = order.plan
    if plan.replaces:
        LOG.info(f"replaces {plan.output.name}: {human(plan.replaces)}")
    identity = plan.identity(order.inputs)
    with (
        explain_write_errors(plan.output, order.resume),
        Output(plan.output, plan.files, identity, order.resume) as output,
    ):
        plan, outcomes = run(output)
        check_related(plan, order.inputs, outcomes)
        output.publish(plan, lambda: check_unchanged(order.inputs), order.force, order.interrupts)
    return plan, outcomes


def run(order: Order) -> Made:
    """Make what is asked for."""
    if order.part:
        return run_part(order, *order.part)
    order = replace(order, plan=settle_ranks(order.plan, order.inputs, order.interrupts))
    worker = open_worker(order.plan, order.inputs)

    def make(output: Output) -> Made:
        return order.plan, run_merge(order.plan, worker, output, order.interrupts)

    return publish(order, make)


def run_merge(
    plan: MergePlan, worker: Worker, output: Output | OutputPart, interrupts: Interrupts
) -> list[Outcome]:
    """Run all jobs that an earlier run has not done.

    Gives what all jobs found, those of the earlier run included.
    """
    outcomes = list_done(plan, output)
    done = {(outcome.tensor, outcome.start) for outcome in outcomes}

    def note(job: Job, outcome: Outcome | None) -> None:
        worker.advance(job.bytes_read)
        if outcome is not None:
            outcomes.append(outcome)
            output.note(outcome.as_entry())

    read = sum(outcome.bytes_read for outcome in outcomes)
    left = 1 - read / max(1, sum(tensor.bytes_read for tensor in plan.tensors))
    steps = round(left * count_steps(plan))
    with progress("merging", steps, plan.config.verbose) as worker.advance:
        run_rounds(plan.rounds(done), worker, output.write_at, note, interrupts)
    return outcomes


def run_part(order: Order, k: int, n: int) -> Made:
    """Make every nth file of an output, from the kth on."""
    plan = order.plan
    check_shards(plan, "--part")
    own = plan.part(range(k - 1, len(plan.files), n))
    if not own.files:
        files = count_of(len(plan.files), "file")
        LOG.info(f"the output has {files}, so there is nothing to do for part {k} of {n}")
        return own, []
    LOG.info(
        "when all parts are made, the same command with --resume in place of --part publishes the "
        "output"
    )
    identity = plan.identity(order.inputs)
    with explain_write_errors(plan.output, resume=True), share_folder(plan.output, identity):
        return own, make_part(own, order.inputs, identity, order.interrupts)


def make_part(
    part: FilePlan, inputs: Sequence[Checkpoint], identity: dict[str, Any], interrupts: Interrupts
) -> list[Outcome]:
    """Make some files of an output and leave them, synced, in the folder. Jobs that earlier runs
    have done are not run again.

    identity: of the whole merge. Gives what all jobs of the files found.
    """
    worker = open_worker(part, inputs)
    with OutputPart(part.output, part.files, identity) as files:
        outcomes = run_merge(part, worker, files, interrupts)
        check_unchanged(inputs)
    return outcomes


def check_shards(plan: FilePlan, what: str) -> None:
    """Refuse an output that several machines cannot write."""
    if len(plan.files) == 1:
        raise ConfigError(
            f"{what} divides a merge by the files of its output, and this one has a single file",
            "give a directory as output, with a smaller --max-shard-size, or merge on one machine",
        )


def list_done(plan: MergePlan, output: Output | OutputPart) -> list[Outcome]:
    """The outcomes of earlier runs. Two that ran at the same time may have noted the same job."""
    names = {tensor.name for tensor in plan.tensors}
    entries = {(entry[0], entry[1]): entry for entry in output.done if entry[0] in names}
    outcomes = [Outcome.of_entry(entry) for entry in entries.values()]
    if outcomes:
        size = sum(outcome.bytes_read for outcome in outcomes)
        LOG.info("continuing: %s of %s are done", human(size), human(plan.bytes_to_read))
    return outcomes
