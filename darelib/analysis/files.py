"""What an analysis writes: the suggested settings as a configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from darelib.analysis.plots import load_pyplot
from darelib.models import find_files
from darelib.models.hub import download
from darelib.output.destination import check_apart
from darelib.output.newfile import write_new_file
from darelib.output.tokenizer import TOKENIZER_PATTERNS
from darelib.readers import WORDS, Request, Source
from darelib.text import LOG, ConfigError, as_text, printable

if TYPE_CHECKING:
    from darelib.analysis.report import AnalysisReport


def check_places(sources: Sequence[Source], plot: Path | None, written: Path | None, force: bool) -> None:
    """Refuse to write a picture or a configuration where that cannot be, before any work is done for it."""
    if plot is not None:
        load_pyplot(plot)
    for path, what in ((written, "configuration"), (plot, "picture")):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no directory for the {what} {str(path)!r}", "make it first")
        if path is not None and not force and os.path.lexists(path):
            raise ConfigError(f"{str(path)!r} exists already", "choose another name, or add --force to replace it")
    if plot and written and plot.absolute() == written.absolute():
        raise ConfigError("the picture and the configuration have the same name", "choose another name for one")
    paths = [path for path in (plot, written) if path]
    layouts = [(source.name, find_files(download(source))[1]) for source in sources] if paths else []
    used = [(name, place) for name, layout in layouts for place in (layout.folder, *layout.files) if place]
    for path in paths:
        check_apart(repr(str(path)), path.resolve(), used)


def write_suggestion(report: AnalysisReport, request: Request, path: Path) -> None:
    """Write the suggested settings as a complete configuration, with the reasons in comments."""
    import tomli_w

    assert request.base is not None
    folder, base, tokenizer = path.absolute().parent.resolve(), download(request.base), request.tokenizer
    own = f"{path.stem}_merged{'' if os.path.isdir(base.path) or tokenizer else '.safetensors'}"
    models: dict[str, Any] = {"base_file": path_from(base, folder)}
    models["merge_files"] = [path_from(download(model), folder) for model in request.merge]
    models["output_file"] = path_from(Source(str(request.output), request.output), folder) if request.output else own
    for key, source in (("tokenizer", tokenizer), ("chat_template", request.chat_template)):
        if source:
            place = source if source.name in WORDS else download(source, TOKENIZER_PATTERNS)
            models[key] = source.name if source.name in WORDS else path_from(place, folder)
    reasons = "".join(f"# - {printable(advice.text)}\n" for advice in report.advice)
    reasons = f"# Suggested by an analysis of the models:\n{reasons}# {printable(report.confidence)}\n"
    write_new_file(path, [f"{reasons}\n{report.suggestion}\n{tomli_w.dumps({'models': models})}".encode()])
    LOG.info(f"wrote {path}")


def path_from(source: Source, folder: Path) -> str:
    """A path that leads from a folder to a model, if the user did not give an absolute one; or its name on the Hub."""
    if source.recorded or os.path.isabs(os.path.expanduser(source.name)):
        return source.recorded or source.name
    physical = source.path.parent.resolve() / source.path.name  # a link itself is kept: what it leads to may move
    try:
        return as_text(Path(os.path.relpath(physical, folder)).as_posix())
    except ValueError:  # on another drive
        return as_text(physical)
