"""What a search writes besides its study: the winner's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from darelib.commands.sweep.report import SweepReport
from darelib.core.text import ConfigError, printable
from darelib.requests.configfile import format_settings, write_config
from darelib.requests.request import Request

MARK: Final = "# Found by a sweep"


class Places(NamedTuple):
    """Where a command keeps its study and writes: beside the configuration by default."""

    storage: str
    winner: Path
    models: Path
    may_replace: bool


def find_places(flags: Mapping[str, Any]) -> Places:
    config = Path(os.path.expanduser(flags.get("config", "merge")))
    beside = config.parent if "config" in flags else Path()
    winner = flags.get("write_config", beside / f"{config.stem}_best.toml")
    storage = flags.get("storage", f"sqlite:///{(beside / f'{config.stem}_sweep.db').as_posix()}")
    study = Path(storage.removeprefix("sqlite:///"))
    for name, other in (("configuration", config), ("study", study)):
        if winner.resolve() == other.resolve():
            raise ConfigError(
                f"--write-config {str(winner)!r} is the {name} itself", "choose another name"
            )
    may_replace = "force" in flags
    with suppress(OSError), winner.open("rb") as file:  # the next search may replace what was found
        may_replace |= file.read(len(MARK)) == MARK.encode()
    return Places(storage, winner, flags.get("keep_models", beside), may_replace)


def write_winner(report: SweepReport, request: Request, path: Path) -> None:
    """Write the winner's settings as a configuration that makes the very same model."""
    config = report.winner.config
    dare: dict[str, Any] = config.recipe_settings()
    own = ("max_shard_size", "delta_threshold")
    dare |= {name: request.dare[name] for name in own if name in request.dare}
    remarks = [f"{report.winner.name}, of the study {report.study}", *report.remarks]
    comments = "".join(f"# {printable(remark)}\n" for remark in remarks)
    settings = format_settings(dare, config.typed_rules, {})
    write_config(path, f"{MARK}:\n{comments}\n{settings}", request)
