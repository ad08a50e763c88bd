"""What a search writes besides its study: the winner's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from darelib.commands.sweep.report import SweepReport
from darelib.core.text import ConfigError, printable
from darelib.requests.configfile import format_settings, write_config
from darelib.requests.request import Request

MARK: Final = "# Found by a sweep"


@dataclass(frozen=True)
class Places:
    """Where a command keeps its study and writes: beside the configuration, unless flags say otherwise."""

    storage: str
    winner: Path
    models: Path
    may_replace: bool


def find_places(flags: Mapping[str, Any]) -> Places:
    config = Path(os.path.expanduser(flags.get("config", "merge")))
    beside = config.parent if "config" in flags else Path()
    winner = flags.get("write_config", beside / f"{config.stem}_best.toml")
    storage = flags.get("storage", f"sqlite:///{(beside / f'{config.stem}_sweep.db').as_posix()}")
    for name, taken in (
        ("configuration", config),
        ("study", Path(storage.removeprefix("sqlite:///"))),
    ):
        if winner.resolve() == taken.resolve():
            raise ConfigError(
                f"--write-config {str(winner)!r} is the {name} itself", "choose another name"
            )
    return Places(
        storage, winner, flags.get("keep_models", beside), "force" in flags or _is_ours(winner)
    )


def _is_ours(path: Path) -> bool:
    """Whether a file was written here, so that the next search may replace it."""
    try:
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


def write_winner(report: SweepReport, request: Request, path: Path) -> None:
    """Write the winner's settings as a configuration that makes the very same model."""
    config = report.winner.config
    dare: dict[str, Any] = config.recipe_settings()
    dare |= {
        name: request.dare[name]
        for name in ("max_shard_size", "delta_threshold")
        if name in request.dare
    }
    remarks = [f"{report.winner.name}, of the study {report.study}", *report.remarks]
    comments = "".join(f"# {printable(remark)}\n" for remark in remarks)
    write_config(
        path, f"{MARK}:\n{comments}\n{format_settings(dare, config.typed_rules, {})}", request
    )
