"""`dare.py merge`: its options, and what they ask for: a merge, a plan or a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from darelib.commands.options import (
    CONTINUES,
    FORCE,
    RESUME,
    SETTINGS,
    WRITE_CONFIG,
    Flags,
    Merger,
    MergerClass,
    Options,
    make_merger,
    show,
)
from darelib.commands.report import Report
from darelib.core.interrupts import Terminated, ignore_signals
from darelib.core.text import LOG, ConfigError
from darelib.requests.request import SeveralDocuments
from darelib.run import check_runner

if TYPE_CHECKING:
    from darelib.commands.summary import MergeReport


def parse_part(text: str) -> tuple[int, ...] | str:
    return tuple(map(int, text.split("/"))) if re.fullmatch(r"\d+/\d+", text) else text


OPTIONS: Final[Options] = {
    **SETTINGS,
    "--bake": {
        "action": "store_true",
        "help": "add LoRA adapters to the base as they are: drop nothing, strength 1 or --weights",
    },
    "--force": FORCE,
    "--resume": RESUME,
    "--part": {
        "metavar": "K/N",
        "type": parse_part,
        "help": "make every Nth file, from the Kth on; --resume then publishes",
    },
    "--runner": {
        "metavar": "NAME",
        "help": "who makes the files: threads (default), or ray, the nodes of a cluster",
    },
    "--ray-address": {
        "metavar": "ADDRESS",
        "help": "of the cluster (default: what Ray finds, or one on this machine)",
    },
    "--dry-run": {
        "action": "store_true",
        "help": "print the plan, with an estimate of the time, and write nothing",
    },
    "--write-config": WRITE_CONFIG
    | {"help": "write the settings and models as TOML (-: print them), and merge nothing"},
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


def merge_to_end(merger: Merger, output: Path, hint: str, **how: Any) -> Any:
    """Merge, and give the report. hint: after an interrupt."""
    try:
        report = merger.merge(output, **how)
        ignore_signals()
    except (KeyboardInterrupt, Terminated) as stopped:
        if merger.published is None:
            stopped.add_note(hint)
            raise
        report = merger.published  # it came too late to stop anything
    return report
