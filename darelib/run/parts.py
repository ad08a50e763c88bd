"""One merge across machines that share a filesystem: the unit is a file of the output, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, count_of, progress
from darelib.models.inputs import Input, check_unchanged
from darelib.output.publish import Shard, share_folder
from darelib.plan.plan import MergePlan
from darelib.run.threads import run_jobs
from darelib.run.worker import Outcome, Worker


def make_shard(
    shard: MergePlan, inputs: Sequence[Input], identity: dict[str, Any], advance: Callable[[int], None],
    interrupts: Interrupts,
) -> list[Outcome]:  # fmt: skip
    """Make one file of an output, or what an earlier run has left to do, and leave it, synced, in the folder.

    identity: of the whole merge. Gives what all jobs of the file found.
    """
    worker = Worker.for_merge(shard, inputs, interrupts)
    with Shard(shard.output, shard.files[0], identity) as file:
        outcomes = run_jobs(shard, worker, file, advance, interrupts)
        check_unchanged(inputs)
    return outcomes


def make_part(
    plan: MergePlan, inputs: Sequence[Input], part: tuple[int, int], interrupts: Interrupts
) -> tuple[MergePlan, list[Outcome]]:
    """Make every nth file of an output, from the kth on. Gives the plan of these files, and what their jobs found."""
    check_shards(plan, "--part")
    (k, n), outcomes, identity = part, list[Outcome](), plan.identity(inputs)
    numbers = range(k - 1, len(plan.files), n)
    if not numbers:
        LOG.info(
            f"the output has {count_of(len(plan.files), 'file')}, so there is nothing to do for part {k} of {n}"
        )
        return plan.part(()), outcomes
    LOG.info(
        "when all parts are made, the same command with --resume in place of --part publishes the output"
    )
    own = plan.part(numbers)
    with (
        share_folder(plan.output, identity),
        progress("merging", own.bytes_to_read, plan.config.verbose) as advance,
    ):
        for shard in plan.shards(numbers):
            outcomes += make_shard(shard, inputs, identity, advance, interrupts)
    return own, outcomes


def check_shards(plan: MergePlan, what: str) -> None:
    """Refuse an output that several machines cannot write."""
    if len(plan.files) == 1:
        raise ConfigError(
            f"{what} divides a merge by the files of its output, and this one has a single file",
            "give a directory as output, with a smaller --max-shard-size, or merge on one machine",
        )
