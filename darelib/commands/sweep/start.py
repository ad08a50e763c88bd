"""A search from what a user asks for: merges of models that are written or in memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from darelib.commands.options import Merger
from darelib.commands.sweep.bench import FileBench, load_states, prepare_folder
from darelib.commands.sweep.evaluation import find_evaluation
from darelib.commands.sweep.report import SweepReport
from darelib.commands.sweep.search import Options, Search, search_in_memory
from darelib.commands.sweep.space import Space
from darelib.config import DareConfig
from darelib.core.text import ConfigError
from darelib.models.inputs import check_unchanged
from darelib.models.source import download


def sweep_models(
    merger: Merger,
    evaluate: Callable[..., Any] | str,
    space: Mapping[str, Any],
    *,
    model: Any,
    in_memory: bool,
    timeout: float | None,
    folder: Path,
    keep_models: bool,
    options: Mapping[str, Any],
) -> SweepReport:
    """What DareMerger.sweep does."""
    score, name = find_evaluation(evaluate, timeout)
    how = Options.of(**options)
    quiet = dataclasses.replace(merger.config, verbose=False)
    choices = Space(space, quiet, len(merger.models))
    with merger.open_inputs() as inputs:
        template = merger.chat_template and merger.chat_template.name
        facts = [merger.tokenizer.name, template, *(each.fingerprint for each in inputs)]
        if model is not None or in_memory:
            if keep_models:
                raise ConfigError(
                    "in memory there are no models to keep", "leave one of the two out"
                )
            base, *finetuned = load_states(inputs, model)
            return search_in_memory(base, finetuned, score, choices, how, model, name, facts)

        def merge(config: DareConfig, path: Path) -> None:
            check_unchanged(inputs)  # scores of other models would not be comparable
            configure(merger, config).merge(path, force=True)

        with prepare_folder(folder, keep_models) as place:
            bench = FileBench(download(merger.base).path, merge, score, place, keep_models)
            configure(merger, quiet).plan(bench.place("merged"))  # to fail now rather than later
            return Search(choices, bench, how, name, facts).run()


def configure(merger: Merger, config: DareConfig) -> Merger:
    """A merger of the same models with another configuration."""
    other = copy.copy(merger)
    other.config = config
    return other


def sweep_states(
    base: Mapping[str, Any],
    finetuned: Sequence[Mapping[str, Any]],
    evaluate: Callable[..., Any],
    space: Mapping[str, Any],
    config: DareConfig,
    model: Any,
    options: Mapping[str, Any],
) -> SweepReport:
    """What dare_sweep does."""
    score, name = find_evaluation(evaluate, None)
    how = Options.of(**options)
    if not finetuned:
        raise ConfigError("there are no models to merge", "give at least one state dict")
    config.check_models(len(finetuned))
    choices = Space(space, config, len(finetuned))
    states = (base, *finetuned) if how.storage else ()  # nothing else outlives this search
    facts = [{key: float(each.double().sum()) for key, each in state.items()} for state in states]
    return search_in_memory(base, finetuned, score, choices, how, model, name, facts)
