"""`dare.py merge`: its options and its run: a merge, a plan or a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from darelib.commands.options import (
    CONTINUES,
    FORCE,
    RESUME,
    SHARED,
    WRITE_CONFIG,
    Flags,
    MergerClass,
    Options,
    make_merger,
    merge_to_end,
    show,
)
from darelib.commands.report import Report
from darelib.config import Group
from darelib.core.text import LOG, ConfigError
from darelib.requests.request import SeveralDocuments
from darelib.run import check_runner

if TYPE_CHECKING:
    from darelib.commands.summary import MergeReport


def parse_part(text: str) -> tuple[int, ...] | str:
    return tuple(map(int, text.split("/"))) if re.fullmatch(r"\d+/\d+", text) else text


OPTIONS: Final[Options] = {
    **SHARED,
    "--bake": {
        "action": "store_true",
        "help": "add adapters to the base in full, with strength 1 or --weights",
        "group": Group.ADAPTERS,
    },
    "--part": {
        "metavar": "K/N",
        "type": parse_part,
        "help": "make every Nth file, from the Kth on; --resume then publishes",
        "group": Group.MACHINES,
    },
    "--runner": {
        "metavar": "NAME",
        "help": "threads, or ray: a cluster's nodes (default threads)",
        "group": Group.MACHINES,
    },
    "--ray-address": {
        "metavar": "ADDRESS",
        "help": "of the cluster (default: what Ray finds)",
        "group": Group.MACHINES,
    },
    "--dry-run": {
        "action": "store_true",
        "help": "print the plan and an estimate of the time; write nothing",
        "group": Group.RUN,
    },
    "--force": FORCE,
    "--resume": RESUME,
    "--write-config": WRITE_CONFIG
    | {
        "help": "write this configuration as TOML (-: print it); merge nothing",
        "group": Group.RUN,
    },
}


def run(
    flags: Flags,
    merger_class: MergerClass,
    describe: Callable[[MergeReport], Report] | None = None,
) -> None:
    """describe: what another command makes of the report."""
    runner = {name: flags[name] for name in ("part", "runner", "ray_address") if name in flags}
    check_runner(**runner)
    try:
        merger, request = make_merger(flags, merger_class)
    except SeveralDocuments as several:
        from darelib.commands.documents import merge_documents

        merge_documents(several.files, flags, merger_class)
        return
    if "write_config" in flags:
        from darelib.requests.configfile import write_request

        write_request(request, flags["write_config"], "force" in flags)
        return
    if request.output is None:
        raise ConfigError("there is no output", "give --output PATH, or output_file in [models]")
    how = {"force": "force" in flags, "resume": "resume" in flags}
    if "dry_run" in flags:
        plan = merger.plan(request.output, **how, estimate=True)
        for warning in plan.warnings:
            LOG.warning(warning)
        show(plan, flags, True)
        return
    continues = flags.keys() & {"resume", "part"}
    hint = CONTINUES if continues else "with --resume, a merge can go on"
    report = merge_to_end(merger, request.output, hint, **how, **runner)
    show(describe(report) if describe else report, flags, merger.config.verbose)
