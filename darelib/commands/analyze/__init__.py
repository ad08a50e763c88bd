"""`dare.py analyze`: its options and its run."""

from typing import Final

from darelib.commands.options import (
    FORCE,
    PLOT,
    SHARED,
    WRITE_CONFIG,
    Flags,
    MergerClass,
    Options,
    make_merger,
    merger_for,
)
from darelib.core.text import LOG, ConfigError, print_result

OPTIONS: Final[Options] = {
    **SHARED,
    "--full": {
        "action": "store_true",
        "help": "also show layers, what low ranks would keep, and each pair of models",
    },
    "--per-tensor": {"action": "store_true", "help": "also list every tensor"},
    "--plot": PLOT,
    "--write-config": WRITE_CONFIG
    | {"help": "write the suggested settings as a configuration (-: print that alone)"},
    "--force": FORCE | {"help": "replace an existing file of --write-config"},
}


def run(flags: Flags, merger_class: MergerClass) -> None:
    merger, request = make_merger(flags, merger_class)
    from darelib.commands.analyze.analysis import AnalysisReport, check_places, write_suggestion
    from darelib.requests.configfile import STDOUT, pin_models

    plot = flags.get("plot")
    suggestion = flags.get("write_config")
    per_tensor = "per_tensor" in flags
    if suggestion == STDOUT and "json" in flags:
        raise ConfigError("--json and --write-config - both print", "give --write-config a file")
    check_places(merger.sources, plot, suggestion, "force" in flags)
    request = pin_models(request)  # what is written is what is analyzed
    merger = merger_for(request, merger_class)
    report = merger.analyze()
    assert isinstance(report, AnalysisReport)
    try:
        if suggestion is not None:
            write_suggestion(report, request, suggestion)
        if plot is not None:
            report.plot(plot)
            LOG.info(f"drew {plot}")
    finally:  # a disk that is full must not cost what was found
        if "json" in flags:
            print_result(report.to_dict(per_tensor))
        elif merger.config.verbose and suggestion != STDOUT:
            print_result(report.text("full" in flags, per_tensor))
