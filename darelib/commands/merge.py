"""`dare.py merge`: its options, and what they ask for: a merge, a plan or a configuration."""

import re
from typing import Final

from darelib.commands.options import (
    CONTINUES,
    FORCE,
    RESUME,
    SETTINGS,
    WRITE_CONFIG,
    Flags,
    MergerClass,
    Options,
    make_merger,
    show,
)
from darelib.core.interrupts import Terminated, ignore_signals
from darelib.core.text import LOG, ConfigError
from darelib.run import check_runner


def parse_part(text: str) -> tuple[int, ...] | str:
    return tuple(map(int, text.split("/"))) if re.fullmatch(r"\d+/\d+", text) else text


OPTIONS: Final[Options] = {
    **SETTINGS,
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


def run(flags: Flags, merger_class: MergerClass) -> None:
    runner = {name: flags[name] for name in ("part", "runner", "ray_address") if name in flags}
    check_runner(**runner)
    merger, request = make_merger(flags, merger_class)
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
    try:
        report = merger.merge(request.output, **how, **runner)
        ignore_signals()
    except (KeyboardInterrupt, Terminated) as stopped:
        if merger.published is None:
            continues = flags.keys() & {"resume", "part"}
            stopped.add_note(CONTINUES if continues else "with --resume, a merge can go on")
            raise
        report = merger.published  # it came too late to stop anything
    show(report, flags, merger.config.verbose)
