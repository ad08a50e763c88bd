"""Several merges in one file: each is made in a folder beside the output, and the last is it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from darelib.commands.options import Flags, MergerClass, merge_to_end, merger_for, show
from darelib.config import name_flag
from darelib.core.text import LOG, ConfigError
from darelib.models.inputs import explain_path
from darelib.models.source import Source, is_on_hub
from darelib.output.new_files import open_scratch
from darelib.requests.configfile import check_new_file
from darelib.requests.mergekit import make_request
from darelib.requests.mergekitfile import MergekitFile
from darelib.requests.request import layer_flags

# Flags that mean the same to every merge, or are about the output; the others are one merge's.
FITTING: Final = frozenset(
    {
        *("config", "lenient", "output", "force", "json", "verbose"),
        *("threads", "engine", "seed", "any_base", "mismatch", "max_shard_size"),
    }
)


def merge_documents(files: Sequence[MergekitFile], flags: Flags, merger_class: MergerClass) -> None:
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
    made = {file.name for file in files}
    models = {model for file in files for part in file.parts for model in part.columns}
    names = {name for model in models for name in (model.path, model.lora)}
    for source in map(Source.of, sorted(names - {"", *made})):
        if not is_on_hub(source):
            with explain_path(source):
                pass
