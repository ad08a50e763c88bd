"""One merge across machines that share a filesystem: the unit is a file of the output, whoever
makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, count_of, progress
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import check_unchanged
from darelib.output.prepare import FilePlan
from darelib.output.publish import Shard, explain_write_errors, share_folder
from darelib.run.order import Order, Result
from darelib.run.outcomes import Outcome
from darelib.run.threads import run_jobs
from darelib.run.worker import Worker


def run(order: Order) -> Result:
    """Make every nth file of an output, from the kth on."""
    plan = order.plan
    check_shards(plan, "--part")
    k, n = order.part or (1, 1)
    numbers = range(k - 1, len(plan.files), n)
    own = plan.part(numbers)
    outcomes: list[Outcome] = []
    if not numbers:
        files = count_of(len(plan.files), "file")
        LOG.info(f"the output has {files}, so there is nothing to do for part {k} of {n}")
        return Result(own, outcomes)
    LOG.info(
        "when all parts are made, the same command with --resume in place of --part publishes the "
        "output"
    )
    identity = plan.identity(order.inputs)
    with (
        explain_write_errors(plan.output, resume=True),
        share_folder(plan.output, identity),
        progress("merging", own.bytes_to_read, plan.config.verbose) as advance,
    ):
        for shard in plan.shards(numbers):
            outcomes += make_shard(shard, order.inputs, identity, advance, order.interrupts)
    return Result(own, outcomes)


def make_shard(
    shard: FilePlan,
    inputs: Sequence[Checkpoint],
    identity: dict[str, Any],
    advance: Callable[[int], None],
    interrupts: Interrupts,
) -> list[Outcome]:
    """Make one file of an output, or what an earlier run has left to do, and leave it, synced, in
    the folder.

    identity: of the whole merge. Gives what all jobs of the file found.
    """
    worker = Worker.for_merge(shard, inputs, interrupts)
    with Shard(shard.output, shard.files[0], identity) as file:
        outcomes = run_jobs(shard, worker, file, advance, interrupts)
        check_unchanged(inputs)
    return outcomes


def check_shards(plan: FilePlan, what: str) -> None:
    """Refuse an output that several machines cannot write."""
    if len(plan.files) == 1:
        raise ConfigError(
            f"{what} divides a merge by the files of its output, and this one has a single file",
            "give a directory as output, with a smaller --max-shard-size, or merge on one machine",
        )
