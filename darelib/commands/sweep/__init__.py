"""`dare.py sweep`: its options, and what they ask for: settings chosen by an evaluation.

space: what may be chosen; search: the trials; start: where their models are made; evaluation: their
scores; report: what was found.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from darelib.commands.options import (
    CONTINUES,
    FORCE,
    PLOT,
    SHARED,
    WRITE_CONFIG,
    Flags,
    MergerClass,
    Options,
    make_merger,
    merger_for,
    show,
)
from darelib.config import SETTINGS, Decides
from darelib.core.interrupts import Terminated
from darelib.core.text import LOG, ConfigError, printable

if TYPE_CHECKING:
    from darelib.commands.sweep.results import SweepReport
    from darelib.requests.request import Request

MARK: Final = "# Found by a sweep"
OPTIONS: Final[Options] = {
    "--evaluate": {
        "metavar": "WHAT",
        "help": "a command with {model} in it, which prints a score or JSON last, "
        "file.py:function, or lm-eval:TASK,TASK (default: the examples judge)",
    },
    "--vary": {
        "metavar": "AXIS",
        "action": "append",
        "help": "a setting and its values, besides [sweep]: drop_rate=[0, 0.5]",
    },
    "--trials": {
        "metavar": "N",
        "type": int,
        "help": "in all, earlier runs included (default 30; a grid: all of it)",
    },
    "--search": {"metavar": "HOW", "help": "tpe (default), grid or random"},
    "--objectives": {
        "dest": "objectives",
        "metavar": "NAME:max",
        "nargs": "+",
        "help": "scores by name, :max or :min (default score:max); each: one for each file of "
        "examples",
    },
    "--timeout": {
        "metavar": "S",
        "type": float,
        "help": "seconds after which a command is ended, and has failed",
    },
    "--lm-eval-tasks": {
        "metavar": "DIR",
        "type": Path,
        "help": "a folder of tasks for lm-eval besides its own, as YAML files",
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
        "help": "name of the study (default: by models, space and evaluation)",
    },
    "--plot": PLOT,
    "--write-config": WRITE_CONFIG
    | {"help": "the winner (default: a _best.toml file beside the config)"},
    "--force": FORCE
    | {
        "help": "replace existing files of --plot and --write-config, and write the best merge "
        "even if the base beats it"
    },
    **SHARED,
}
SEARCH_OPTIONS: Final = ("trials", "search", "objectives", "study", "timeout", "lm_eval_tasks")


def run(flags: Flags, merger_class: MergerClass) -> None:
    from darelib.commands.analyze.analysis import check_places
    from darelib.commands.sweep.results import SweepReport, plot_sweep
    from darelib.requests.configfile import pin_models
    from darelib.requests.request import parse_axes

    merger, request = make_merger(flags, merger_class)
    storage, winner, may_replace, folder = find_places(flags)
    plot = flags.get("plot")
    check_places(merger.sources, plot, winner, may_replace)
    request = pin_models(request)  # what is written is what is scored
    merger = merger_for(request, merger_class)
    try:
        report = merger.sweep(
            flags.get("evaluate"),
            {**request.sweep, **parse_axes(flags.get("vary", ()))},
            in_memory="in_memory" in flags,
            folder=folder,
            keep_models="keep_models" in flags,
            storage=storage,
            **{name: flags[name] for name in SEARCH_OPTIONS if name in flags},
        )
    except (KeyboardInterrupt, Terminated) as stopped:
        stopped.add_note(CONTINUES)
        raise
    assert isinstance(report, SweepReport)
    show(report, flags, merger.config.verbose)
    if report.is_base_best and "force" not in flags:
        LOG.warning(
            "no configuration was written, since the base beats every merge; "
            "--force writes that of the best merge"
        )
    else:
        write_winner(report, request, winner)
    if plot is not None:
        plot_sweep(report, plot)
        LOG.info(f"drew {plot}")


def find_places(flags: Flags) -> tuple[str, Path, bool, Path]:
    """Where a command keeps its study, writes the winner, and whether it may replace what is there,
    and where it makes models: beside the configuration by default.
    """
    config = Path(os.path.expanduser(flags.get("config", "merge")))
    beside = config.parent if "config" in flags else Path()
    winner = flags.get("write_config", beside / f"{config.stem}_best.toml")
    storage = flags.get("storage", f"sqlite:///{(beside / f'{config.stem}_sweep.db').as_posix()}")
    used = {"configuration": config, "study": Path(storage.removeprefix("sqlite:///"))}
    for name, other in used.items():
        if winner.resolve() == other.resolve():
            raise ConfigError(
                f"--write-config {str(winner)!r} is the {name} itself", "choose another name"
            )
    may_replace = "force" in flags
    with suppress(OSError), winner.open("rb") as file:  # the next search may replace what was found
        may_replace |= file.read(len(MARK)) == MARK.encode()
    return storage, winner, may_replace, flags.get("keep_models", beside)


def write_winner(report: SweepReport, request: Request, path: Path) -> None:
    """Write the winner's settings as a configuration that makes the very same model."""
    from darelib.requests.configfile import format_settings, write_config

    config = report.winner.config
    if not config.needs_examples:  # a plain average
        config = config.without_examples()
        request = replace(request, examples=(), base_examples=None)
    dare: dict[str, Any] = config.recipe_settings()
    # Beside what tensors depend on, which the search has chosen.
    others = (Decides.FILES, Decides.WARNINGS)
    own = [name for name, row in SETTINGS.items() if row.decides in others]
    dare |= {name: request.dare[name] for name in own if name in request.dare}
    remarks = [f"{report.winner.name}, of the study {report.study}", *report.remarks]
    comments = "".join(f"# {printable(remark)}\n" for remark in remarks)
    settings = format_settings(dare, config.typed_rules)
    write_config(path, f"{MARK}:\n{comments}\n{settings}", request)
