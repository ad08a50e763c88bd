"""`dare.py merge`: its options and its run: a merge, a plan or a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
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
    merger_for,
    show,
)
from darelib.commands.report import Report
from darelib.config import SETTINGS, Decides, Group, name_flag
from darelib.core.text import LOG, ConfigError
from darelib.models.source import Source, is_on_hub
from darelib.requests.request import SeveralDocuments, layer_flags
from darelib.run import check_runner

if TYPE_CHECKING:
    from darelib.commands.summary import MergeReport
    from darelib.requests.mergekitfile import MergekitFile


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


# What goes with a file of several documents: flags that mean the same to every merge, or are about
# the output; the others are one merge's.
FITTING: Final = frozenset(
    {
        *("config", "lenient", "output", "force", "json", "seed", "any_base", "mismatch"),
        *(name for name, row in SETTINGS.items() if row.decides is not Decides.TENSORS),
    }
)


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
    hint = CONTINUES if continues else "nothing is left; start with --resume to be able to go on"
    hint = "nothing is left" if merger.examples else hint
    report = merge_to_end(merger, request.output, hint, **how, **runner)
    show(describe(report) if describe else report, flags, merger.config.verbose)


def merge_documents(files: Sequence[MergekitFile], flags: Flags, merger_class: MergerClass) -> None:
    """Several merges in one file: each is made in a folder beside the output, the last is it."""
    from darelib.output.new_files import open_scratch
    from darelib.requests.configfile import check_new_file
    from darelib.requests.mergekit import make_request

    unfit = next((name for name in flags if name not in FITTING), None)
    if unfit:
        raise ConfigError(
            f"{name_flag(unfit)} means nothing to a file of several documents",
            "give the document that it is for a file of its own",
        )
    check_models(files)
    if "output" not in flags:
        raise ConfigError("there is no output", "give --output PATH")
    output = Source.of(flags["output"]).path
    check_new_file(output, "merged model", "force" in flags)
    places: dict[str, Path] = {}
    with open_scratch(output.with_name(f".{output.name[:50]}.documents-")) as folder:
        for k, file in enumerate(files, 1):
            file.places = places
            merger = merger_for(layer_flags(make_request(file), flags), merger_class)
            if k < len(files):
                LOG.info(f"merging {file.name!r}, {k} of {len(files)}")
                places[file.name] = folder / "models" / file.name
                merger.merge(places[file.name])
        report = merge_to_end(merger, output, "the next run begins anew", force="force" in flags)
    show(report, flags, merger.config.verbose)


def check_models(files: Sequence[MergekitFile]) -> None:
    """Refuse models that are not there, before the first document takes its time."""
    from darelib.models.inputs import explain_path

    made = {file.name for file in files}
    models = {model for file in files for part in file.parts for model in part.columns}
    names = {name for model in models for name in (model.path, model.lora)}
    for source in map(Source.of, sorted(names - {"", *made})):
        if not is_on_hub(source):
            with explain_path(source):
                pass
