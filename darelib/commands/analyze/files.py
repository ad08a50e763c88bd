"""What an analysis writes: the suggested settings as a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from darelib.commands.analyze.plots import load_pyplot
from darelib.core.text import ConfigError, printable
from darelib.models.inputs import find_files
from darelib.models.source import Source, download
from darelib.output.destination import check_apart
from darelib.output.tokenizer import TOKENIZER_PATTERNS
from darelib.requests.configfile import check_new_config, check_new_file, write_config
from darelib.requests.request import Request

if TYPE_CHECKING:
    from darelib.commands.analyze.report import AnalysisReport


def check_places(
    sources: Sequence[Source], plot: Path | None, config: Path | None, force: bool
) -> None:
    """Refuse places where a picture or a configuration cannot be, before there is any work."""
    if plot is not None:
        load_pyplot(plot)
        check_new_file(plot, "picture", force)
    if config is not None:
        check_new_config(config, force)
    if plot and config and plot.absolute() == config.absolute():
        raise ConfigError(
            "the picture and the configuration have the same name", "choose another name for one"
        )
    used: list[tuple[str, Path]] = []
    for source in sources if plot or config else ():
        _, layout = find_files(download(source))
        places = (layout.folder, *layout.files)
        used += [(source.name, place) for place in places if place]
    for path in (plot, config):
        if path:
            check_apart(repr(str(path)), path.resolve(), used)


def write_suggestion(report: AnalysisReport, request: Request, path: Path) -> None:
    """Write the suggested settings as a complete configuration, with the reasons in comments."""

    def fetch(source: Source | None) -> Source | None:
        is_model = source is not None and not source.is_word
        return download(source, TOKENIZER_PATTERNS) if source and is_model else source

    assert request.base is not None
    request = replace(
        request,
        base=download(request.base),
        merge=tuple(map(download, request.merge)),
        tokenizer=fetch(request.tokenizer),
        chat_template=fetch(request.chat_template),
    )
    reasons = [printable(advice.text) for advice in report.advice]
    lines = [
        "# Suggested by an analysis of the models:",
        *(f"# - {reason}" for reason in reasons),
        f"# {printable(report.confidence)}",
    ]
    write_config(path, "\n".join([*lines, "", report.suggestion]), request)
