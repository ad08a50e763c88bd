"""`dare.py sweep`: its options, and what they ask for: settings chosen by an evaluation.

start: where models are made, and what is written; space: what may be chosen; evaluation: scores;
search: the trials; report: what was found.
"""

from pathlib import Path
from typing import Final

from darelib.commands.options import (
    CONTINUES,
    FORCE,
    PLOT,
    SETTINGS,
    WRITE_CONFIG,
    Flags,
    MergerClass,
    Options,
    make_merger,
    merger_for,
    show,
)
from darelib.core.interrupts import Terminated
from darelib.core.text import LOG, ConfigError

OPTIONS: Final[Options] = {
    "--evaluate": {
        "metavar": "WHAT",
        "help": "a command with {model} in it, whose last line is a score or JSON, or "
        "file.py:function",
    },
    "--vary": {
        "metavar": "AXIS",
        "action": "append",
        "help": "what to choose from, besides [sweep]: drop_rate=[0, 0.5]",
    },
    "--trials": {
        "metavar": "N",
        "type": int,
        "help": "in all, earlier runs included (default 30; a grid: all of it)",
    },
    "--search": {"metavar": "HOW", "help": "tpe (default), cmaes, grid or random"},
    "--objective": {
        "metavar": "NAME:max",
        "nargs": "+",
        "help": "scores by name, :max or :min (default score:max)",
    },
    "--confirm": {
        "metavar": "N",
        "type": int,
        "help": "fresh seeds to score the best few with again (default 5; 0: none)",
    },
    "--timeout": {
        "metavar": "S",
        "type": float,
        "help": "seconds after which a command is ended, and has failed",
    },
    "--in-memory": {
        "action": "store_true",
        "help": "give the function a merged state dict, and write no model",
    },
    "--keep-models": {
        "metavar": "DIR",
        "type": Path,
        "help": "keep all merged models there (default: none)",
    },
    "--storage": {
        "metavar": "URL",
        "help": "of the study, for Optuna (default: a _sweep.db file beside the config)",
    },
    "--study": {
        "metavar": "NAME",
        "help": "its name (default: made from all that scores depend on)",
    },
    "--plot": PLOT,
    "--write-config": WRITE_CONFIG
    | {"help": "the winner (default: a _best.toml file beside the config)"},
    "--force": FORCE | {"help": "replace existing files of --plot and --write-config"},
    **SETTINGS,
}
SEARCH_OPTIONS: Final = ("trials", "search", "confirm", "study", "timeout")


def run(flags: Flags, merger_class: MergerClass) -> None:
    from darelib.commands.analyze.analysis import check_places
    from darelib.commands.sweep.report import plot_sweep
    from darelib.commands.sweep.start import find_places, write_winner
    from darelib.requests.configfile import pin_models
    from darelib.requests.request import parse_axes

    merger, request = make_merger(flags, merger_class)
    if "evaluate" not in flags:
        raise ConfigError(
            "nothing scores the models", "give --evaluate 'COMMAND {model}' or file.py:function"
        )
    storage, winner, may_replace, folder = find_places(flags)
    plot = flags.get("plot")
    check_places(merger.sources, plot, winner, may_replace)
    request = pin_models(request)  # what is written is what is scored
    merger = merger_for(request, merger_class)
    try:
        report = merger.sweep(
            flags["evaluate"],
            {**request.sweep, **parse_axes(flags.get("vary", ()))},
            in_memory="in_memory" in flags,
            folder=folder,
            keep_models="keep_models" in flags,
            objectives=flags.get("objective", ["score:max"]),
            storage=storage,
            **{name: flags[name] for name in SEARCH_OPTIONS if name in flags},
        )
    except (KeyboardInterrupt, Terminated) as stopped:
        stopped.add_note(CONTINUES)
        raise
    show(report, flags, merger.config.verbose)
    write_winner(report, request, winner)
    if plot is not None:
        plot_sweep(report, plot)
        LOG.info(f"drew {plot}")
