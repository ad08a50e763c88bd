"""What an analysis writes: the suggested settings as a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darelib.commands.analyze.plots import load_pyplot
from darelib.core.text import ConfigError, printable
from darelib.models.hub import download
from darelib.models.inputs import find_files
from darelib.models.source import Source
from darelib.output.destination import check_apart
from darelib.output.tokenizer import TOKENIZER_PATTERNS
from darelib.requests.configfile import check_new_config, check_new_file, write_config
from darelib.requests.request import Request

if TYPE_CHECKING:
    from darelib.commands.analyze.report import AnalysisReport


def check_places(
    sources: Sequence[Source], plot: Path | None, written: Path | None, force: bool
) -> None:
    """Refuse to write a picture or a configuration where that cannot be, before any work is done for it."""
    if plot is not None:
        load_pyplot(plot)
        check_new_file(plot, "picture", force)
    if written is not None:
        check_new_config(written, force)
    if plot and written and plot.absolute() == written.absolute():
        raise ConfigError(
            "the picture and the configuration have the same name", "choose another name for one"
        )
    paths = [path for path in (plot, written) if path]
    layouts = (
        [(source.name, find_files(download(source))[1]) for source in sources] if paths else []
    )
    used = [
        (name, place)
        for name, layout in layouts
        for place in (layout.folder, *layout.files)
        if place
    ]
    for path in paths:
        check_apart(repr(str(path)), path.resolve(), used)


def write_suggestion(report: AnalysisReport, request: Request, path: Path) -> None:
    """Write the suggested settings as a complete configuration, with the reasons in comments."""

    def fetch(source: Source | None, *patterns: str) -> Any:
        return source if source is None or source.is_word else download(source, patterns or None)

    assert request.base is not None
    request = replace(
        request,
        base=download(request.base),
        merge=tuple(map(download, request.merge)),
        tokenizer=fetch(request.tokenizer, *TOKENIZER_PATTERNS),
        chat_template=fetch(request.chat_template, *TOKENIZER_PATTERNS),
    )
    reasons = "".join(f"# - {printable(advice.text)}\n" for advice in report.advice)
    reasons = (
        f"# Suggested by an analysis of the models:\n{reasons}# {printable(report.confidence)}\n"
    )
    write_config(path, f"{reasons}\n{report.suggestion}", request)
