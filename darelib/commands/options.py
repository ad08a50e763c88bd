"""Parts that commands share: their flags, the merger that flags ask for, printing of results."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from darelib.commands.report import Report
from darelib.config import SETTINGS, DareConfig, Group, explain_setting, name_flag
from darelib.config.values import SWITCH
from darelib.core.interrupts import Terminated, ignore_signals
from darelib.core.text import LOG, ConfigError, print_result
from darelib.models.directories import BASE_HINT
from darelib.models.source import Given, Source
from darelib.models.vocabulary import TEMPLATES
from darelib.requests.readers import YAML_SUFFIXES, load_request
from darelib.requests.request import Request, layer_flags

if TYPE_CHECKING:
    from darelib.commands.dryrun import Plan
    from darelib.commands.summary import MergeReport
    from darelib.models.checkpoint import Checkpoint

# By name: what argparse's add_argument is given, and a group of --help; none: the command's own.
Options: TypeAlias = dict[str, dict[str, Any]]
Flags: TypeAlias = dict[str, Any]  # those that a user gives, by name


class Merger(Protocol):
    """dare.DareMerger, which nothing in darelib imports, as commands use it."""

    base: Source
    models: tuple[Source, ...]
    config: DareConfig
    tokenizer: Source
    chat_template: Source | None
    examples: tuple[Path | None, ...]
    published: MergeReport | None

    @property
    def sources(self) -> tuple[Source, ...]: ...
    def open_inputs(self) -> AbstractContextManager[list[Checkpoint]]: ...
    def merge(
        self,
        output_file: str | Path,
        *,
        force: bool = False,
        resume: bool = False,
        part: tuple[int, int] | None = None,
        runner: str = "threads",
        ray_address: str | None = None,
    ) -> MergeReport: ...
    def plan(
        self,
        output_file: str | Path,
        *,
        force: bool = False,
        resume: bool = False,
        estimate: bool = False,
    ) -> Plan: ...
    def analyze(self) -> Report: ...
    def verify(self, output_file: str | Path) -> Report: ...
    def evaluate(self, models: Sequence[Given] = ()) -> Report: ...
    def sweep(
        self, evaluate: Callable[..., Any] | str | None, space: Mapping[str, Any], **options: Any
    ) -> Report: ...


MergerClass: TypeAlias = Callable[..., Merger]

CONTINUES: Final = "the same command goes on from here"  # a hint after an interrupt


def make_flag(name: str) -> dict[str, Any]:
    """The flag of a setting, from its row."""
    row = SETTINGS[name]
    flag = {"dest": name, "help": explain_setting(name), "group": row.group}
    if row.check is SWITCH:
        is_off = getattr(DareConfig, name) is False
        return flag | {"action": "store_true" if is_off else argparse.BooleanOptionalAction}
    several = {"nargs": "+"} if row.check.per_model or row.check.is_list else {}
    return flag | several | {"metavar": row.metavar, "type": row.check.parse}


# What every command that computes takes.
MODELS: Final[Options] = {
    "--base": {
        "metavar": "MODEL",
        "help": "the model that the others were fine-tuned from",
        "group": Group.MODELS,
    },
    "--merge": {
        "metavar": "MODEL",
        "nargs": "+",
        "action": "extend",
        "help": "fine-tuned models, LoRA adapters, or MODEL+ADAPTER",
        "group": Group.MODELS,
    },
    **{name_flag(name): make_flag(name) for name in ("threads", "engine")},
}
# What merge, analyze and sweep take: the models, and the settings.
SHARED: Final[Options] = {
    "--config": {
        "metavar": "FILE",
        "type": Path,
        "help": "TOML, mergekit's YAML, or a merged model: its recipe",
        "group": Group.MODELS,
    },
    **MODELS,
    "--output": {
        "metavar": "PATH",
        "help": "a .safetensors file, or a model directory",
        "group": Group.MODELS,
    },
    "--examples": {
        "metavar": "FILE",
        "nargs": "+",
        "action": "extend",
        "help": "match the merge with examples of each model's skill, .jsonl or .txt",
        "group": Group.EXAMPLES,
    },
    "--base-examples": {
        "metavar": "FILE",
        "help": "general text, on which the merge shall stay like the base",
        "group": Group.EXAMPLES,
    },
    **{name_flag(name): make_flag(name) for name in SETTINGS if name != "verbose"},
    "--no-rescale": {
        "action": "store_false",
        "dest": "rescale",
        "help": "the same as --rescale none",
        "group": Group.DROP,
    },
    "--rule": {
        "dest": "rules",
        "metavar": "RULE",
        "action": "append",
        "help": "PATTERN:SETTING=VALUE,... for matching tensors",
        "group": Group.MAIN,
    },
    "--tokenizer": {
        "metavar": "WHICH",
        "help": "base, union (all tokens), or a model's (default base)",
        "group": Group.OUTPUT,
    },
    "--chat-template": {
        "metavar": "WHICH",
        "help": f"a model's, a file, {', '.join(TEMPLATES)} (default: the base's or a model's)",
        "group": Group.OUTPUT,
    },
    "--lenient": {
        "action": "store_true",
        "help": "only warn about keys that mergekit ignores",
        "group": Group.RUN,
    },
}
# What only some commands take; each says in its own words what the last is for.
FORCE: Final = {
    "action": "store_true",
    "help": "replace an output of another recipe or tool",
    "group": Group.RUN,
}
RESUME: Final = {
    "action": "store_true",
    "help": "continue an unfinished merge; can be interrupted itself",
    "group": Group.RUN,
}
PLOT: Final = {
    "metavar": "FILE",
    "type": Path,
    "help": "draw what was found, to a .png, .svg or .pdf file",
}
WRITE_CONFIG: Final = {"metavar": "FILE", "type": Path}  # -: it is printed


def make_merger(flags: Flags, merger_class: MergerClass) -> tuple[Merger, Request]:
    """The merger that a configuration, or the recipe of a merged model, and flags ask for."""
    path = Path(os.path.expanduser(flags.get("config", "")))
    if "lenient" in flags and path.suffix not in YAML_SUFFIXES:
        raise ConfigError(
            "--lenient means nothing without a configuration of mergekit's",
            "leave it out; a key that is not known is an error in TOML",
        )
    if "config" not in flags:
        request = Request()
    elif path.suffix == ".safetensors" or path.is_dir():
        from darelib.requests.recipe import read_recipe

        request = read_recipe(path)
    else:
        options = {"lenient": True} if "lenient" in flags else {}
        request = load_request(path, **options)
    request = layer_flags(request, flags)
    if request.inputs:
        from darelib.requests.recipe import check_examples, locate_inputs

        check_examples(request)
        request = locate_inputs(request, list_models(flags), path)
    merger = merger_for(request, merger_class)
    return merger, dataclasses.replace(request, base=merger.base)  # which adapters may name


def list_models(flags: Flags) -> list[str]:
    """The models that are given by flags, the base first."""
    base = [flags["base"]] if "base" in flags else []
    return [*base, *flags.get("merge", [])]


def merger_for(request: Request, merger_class: MergerClass) -> Merger:
    config = DareConfig(**request.dare, rules=request.rules)
    LOG.setLevel(logging.INFO if config.verbose else logging.WARNING)
    if request.base is None and not request.merge:
        raise ConfigError("there is no base model", BASE_HINT)
    return merger_class(
        request.base,
        request.merge,
        config,
        tokenizer=request.tokenizer or "base",
        chat_template=request.chat_template,
        examples=[source.path for source in request.examples],
        base_examples=request.base_examples and request.base_examples.path,
    )


def merge_to_end(merger: Merger, output: str | Path, hint: str, **how: Any) -> MergeReport:
    """Merge, and give the report. hint: after an interrupt."""
    try:
        report = merger.merge(output, **how)
        ignore_signals()
    except (KeyboardInterrupt, Terminated) as stopped:
        if merger.published is None:
            stopped.add_note(hint)
            raise
        report = merger.published  # it came too late to stop anything
    return report


def show(report: Report, flags: Flags, verbose: bool) -> None:
    if "json" in flags or verbose:
        print_result(report.to_dict() if "json" in flags else str(report))
