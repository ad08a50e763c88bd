"""DARE: merge fine-tuned models into one: drop most of what each has learned, rescale the rest.

    delta_i = finetuned_i - base               what fine-tuning changed
    kept_i  = mask_i * delta_i / r_i           drop at random, keep a share r_i, rescale by 1 / r_i
    merged  = combine(kept_1 ... kept_n)       by default the sum of w_i * kept_i with w_i = 1 / n
    output  = base + lambda * merged

Dropping changes no expectation, and fine-tuned models tolerate it surprisingly well: Yu et al.,
"Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch", ICML
2024, arXiv:2311.03099.

    python dare.py --config merge_config.toml        from the shell
    python dare.py analyze --config ...              look before you merge
    from dare import DareConfig, DareMerger          from a script

This file is the front door: DareMerger.merge shows how a merge flows, COMMANDS what the command can
do. Behind it, in darelib, is a room for each job: core (words, number types, the mask), methods (a
file for each way to combine), config (settings), arithmetic (how numbers are merged), models (what
weights are read from), plan (which models change which tensors), run (read, merge and round, chunk
by chunk), output (checks and files), requests (what a user asks for) and commands.
docs/contributing.md has the map.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # Until main looks after signals, there is nothing to tidy up; an interrupt in the imports below
    # shows no traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import copy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from darelib import __version__ as __version__
from darelib.commands import analyze, convert, evaluate, extract, merge, pack, sweep, verify
from darelib.commands.shell import Commands, parse_flags, run_command
from darelib.config import DareConfig, Rule
from darelib.core.interrupts import Interrupts, ignore_signals
from darelib.core.text import LOG, ConfigError, DareError
from darelib.core.tuning import raise_open_file_limit
from darelib.models.directories import find_base
from darelib.models.examples import check_examples
from darelib.models.source import Given, Source, recorded_name
from darelib.run import check_runner, load_in_memory, load_matching, load_states

if TYPE_CHECKING:
    import torch

    from darelib.commands.analyze.analysis import AnalysisReport, plot_analysis
    from darelib.commands.dryrun import Estimate, Plan
    from darelib.commands.evaluate import EvaluationReport
    from darelib.commands.summary import MergeReport, ModelReport
    from darelib.commands.sweep.results import SweepReport, plot_sweep
    from darelib.commands.verify import VerifyReport
    from darelib.models.checkpoint import Checkpoint
    from darelib.output.destination import Destination
    from darelib.output.prepare import FilePlan

__all__ = [
    "AnalysisReport", "ConfigError", "DareConfig", "DareError", "DareMerger", "Estimate",
    "EvaluationReport", "MergeReport", "ModelReport", "Plan", "Rule", "SweepReport", "VerifyReport",
    "dare_drop", "dare_evaluate", "dare_match", "dare_merge", "dare_sparsify", "dare_sweep",
    "plot_analysis", "plot_sweep",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Reports and plots: their modules are imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from darelib.commands import dryrun, summary
    from darelib.commands.analyze import analysis
    from darelib.commands.sweep import results

    modules = (dryrun, summary, evaluate, verify, analysis, results)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted(__all__)


def check_config(config: DareConfig | None) -> DareConfig:
    if config is not None and not isinstance(config, DareConfig):
        raise ConfigError("config must be a DareConfig", "like DareConfig(drop_rate=0.9)")
    return config or DareConfig()


class DareMerger:
    """Merges models fine-tuned from one base: DareMerger(base, [first, second]).merge(output)."""

    def __init__(
        self,
        base_file: Given | None,
        merge_files: Sequence[Given],
        config: DareConfig | None = None,
        *,
        tokenizer: str | Path | Source = "base",
        chat_template: str | Path | Source | None = None,
        examples: Sequence[str | Path] = (),
        base_examples: str | Path | None = None,
    ) -> None:
        """A model is a file, a directory, an index, a name on the Hub, MODEL+ADAPTER or an adapter;
        or layers of models: [{"model": "a", "layers": [0, 16]}, {"model": "b", "layers": [8, 24]}].

        base_file: None: the one that the adapters name, if they all name the same, and it is here.
        tokenizer: of an output directory: the "base"'s, a "union" of all tokens, or a model's.
        chat_template: a model or a file; None: the base's, or the first that a model has.
        examples: a file for each model, .jsonl or .txt, of what it can do: with them the merge is
        matched. base_examples: one of general text, on which it shall stay like the base.
        """
        if isinstance(merge_files, str | Path):
            raise ConfigError(
                "merge_files must be a list of files, not a single path", "put it in brackets"
            )
        self.models = tuple(map(Source.of_model, merge_files))
        self.config = check_config(config)
        self.config.check_models(len(self.models))
        self.base = find_base(self.models) if base_file is None else Source.of_model(base_file)
        self.tokenizer = Source.of(tokenizer)
        self.chat_template = None if chat_template is None else Source.of(chat_template)
        self.examples = check_examples(examples, base_examples, len(self.models))
        self.published: MergeReport | None = None  # what merge has made, interrupted or not

    def merge(
        self,
        output_file: str | Path,
        *,
        force: bool = False,
        resume: bool = False,
        part: tuple[int, int] | None = None,
        runner: str = "threads",
        ray_address: str | None = None,
    ) -> MergeReport:
        """Merge into a file (if its name ends in .safetensors) or a model directory.

        force replaces an existing output of another recipe, or that this tool did not make; one of
        the same recipe is replaced anyway. resume continues an unfinished merge, and leaves one
        behind that can be continued if it is itself interrupted.
        part: (3, 16) makes the third of 16 parts of a directory's files, while other machines make
        the others; a last merge with resume makes what is missing and publishes. runner: "ray"
        makes the files on the nodes of a Ray cluster. All machines see the same filesystem.
        """
        from darelib.commands.summary import report_merge
        from darelib.output.destination import find_output
        from darelib.run.threads import Order

        check_runner(runner, part, ray_address, bool(self.examples))
        if runner == "ray":
            from darelib.run.ray import run
        elif self.examples:
            run = load_matching().run
        else:
            from darelib.run.threads import run
        started = time.perf_counter()
        destination = find_output(output_file)
        self.published = None
        with self.open_inputs() as inputs:
            plan = self._plan(inputs, destination, force)
            with Interrupts() as interrupts:
                order = Order(plan, inputs, interrupts, force, resume, part, ray_address)
                made, outcomes = run(order)
                seconds = time.perf_counter() - started
                report = report_merge(made, outcomes, order.name, seconds)
                for warning in report.warnings:
                    LOG.warning(warning)
                self.published = report
        return report

    def plan(
        self,
        output_file: str | Path,
        *,
        force: bool = False,
        resume: bool = False,
        estimate: bool = False,
    ) -> Plan:
        """Check everything and describe what merge would do with the same force and resume.

        estimate: also run the first jobs, to estimate how long all take. Nothing is written.
        """
        from darelib.commands.dryrun import describe_plan
        from darelib.output.destination import find_output

        destination = find_output(output_file)
        with self.open_inputs() as inputs:
            return describe_plan(self._plan(inputs, destination, force), inputs, resume, estimate)

    def analyze(self) -> AnalysisReport:
        """Look at every delta once, and report what models are like and how to merge them."""
        from darelib.commands.analyze import analysis, measure
        from darelib.models.inputs import check_unchanged
        from darelib.plan.plan import plan_merge

        started = time.perf_counter()
        with self.open_inputs() as inputs, Interrupts() as interrupts:
            plan = plan_merge(self.config, inputs, looks_only=True)
            findings = measure.measure_deltas(plan, inputs, interrupts)
            check_unchanged(inputs)
        for warning in plan.warnings:
            LOG.warning(warning)
        return analysis.report_analysis(plan, inputs, findings, time.perf_counter() - started)

    def verify(self, output_file: str | Path) -> VerifyReport:
        """Make an output again, without writing, and compare: the first difference is an error.

        Of a directory, the files besides the tensors are compared with the digests in its recipe.
        """
        from darelib.output import adapter, destination, tokenizer
        from darelib.requests.recipe import find_merged, read_recipe

        path = find_merged(output_file).resolve()
        if self.config.is_auto:  # which was chosen when it was merged
            merged = copy.copy(self)
            merged.config = self.config.settle_lambda(read_recipe(path).dare["lambda_coeff"])
            merged.examples = self.examples if self.config.matches else ()
            return merged.verify(path)
        output = destination.Destination(str(output_file), path, path.is_dir())
        choice = tokenizer.TokenizerChoice(recorded_name(self.tokenizer))
        with self.open_inputs() as inputs, Interrupts() as interrupts:
            plan = adapter.choose_planner(self.config)(
                self.config, inputs, output, choice, with_side_files=False
            )
            return verify.compare_output(plan, inputs, interrupts)

    def evaluate(self, models: Sequence[Given] = ()) -> EvaluationReport:
        """Judge the base, the fine-tunes and other models by the examples: how far each is from
        what the examples say, and from the fine-tune whose examples these are.

        models: such as merges; none: the merge that the settings describe, which is not written.
        """
        from darelib.plan.plan import plan_merge

        if isinstance(models, str | Path):
            raise ConfigError("models must be a list, not a single path", "put it in brackets")
        others = tuple(map(Source.of_model, models))
        with self.open_inputs(others) as opened, Interrupts() as interrupts:
            inputs = opened[: len(self.sources)]
            judged = opened[len(self.sources) :]
            plan = plan_merge(self.config, inputs)
            return evaluate.judge_models(plan, inputs, judged, interrupts)

    def sweep(
        self,
        evaluate: Callable[..., Any] | str | None,
        space: Mapping[str, Any],
        *,
        model: torch.nn.Module | None = None,
        in_memory: bool = False,
        timeout: float | None = None,
        lm_eval_tasks: str | Path | None = None,
        folder: str | Path = ".",
        keep_models: bool = False,
        **options: Any,
    ) -> SweepReport:
        """Search for the settings whose merge scores best; all others are as in the config.

        evaluate: a function, file.py:function, a command with {model} in it, or lm-eval:TASK,TASK
        (lm_eval_tasks: a folder of more tasks); None: the examples judge, by the loss on answers or
        the distance from the fine-tune. A function is given the path of a merged model, which is
        written in folder, over the one before unless keep_models; in_memory, a state dict; or the
        live model, into whose tensors it was merged, and which holds the winner in the end. space:
        as under [sweep] in TOML. options: trials, search, objectives, storage and study
        (darelib.commands.sweep.search.SearchOptions).
        """
        from darelib.commands.sweep.start import sweep_models

        return sweep_models(
            self,
            evaluate,
            space,
            model=model,
            in_memory=in_memory,
            timeout=timeout,
            lm_eval_tasks=None if lm_eval_tasks is None else Path(lm_eval_tasks),
            folder=Path(folder),
            keep_models=keep_models,
            options=options,
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.base, *self.models)

    def open_inputs(
        self, others: Sequence[Source] = ()
    ) -> AbstractContextManager[list[Checkpoint]]:
        """The base and the models, with one number for each token if the tokenizer asks for it,
        and other models of their kind.
        """
        from darelib.models.inputs import open_models

        sources = (*self.sources, *others)
        return open_models(sources, self.tokenizer, self.config, self.examples)

    def _plan(
        self, inputs: Sequence[Checkpoint], destination: Destination, force: bool
    ) -> FilePlan:
        from darelib.output import adapter, prepare, tokenizer

        self.config.check_examples(bool(self.examples))
        choice = tokenizer.choose_tokenizer(self.tokenizer, self.chat_template)
        planner = adapter.choose_planner(self.config)
        return prepare.plan_output(planner, self.config, inputs, destination, choice, force)


# --- tensors in memory ---------------------------------------------------------------------------


def dare_drop(
    task_vector: Mapping[str, torch.Tensor],
    drop_rate: float = 0.9,
    seed: int = 42,
    rescale: bool = True,
) -> dict[str, torch.Tensor]:
    """Thin deltas: drop entries at random and rescale the rest. Only weights are thinned."""
    config = DareConfig(drop_rate=drop_rate, seed=seed, rescale=rescale)
    return load_in_memory().drop_deltas(task_vector, config)


def dare_sparsify(
    pretrained: Mapping[str, torch.Tensor],
    finetuned: Mapping[str, torch.Tensor],
    drop_rate: float = 0.9,
    seed: int = 42,
) -> dict[str, torch.Tensor]:
    """One fine-tuned model with its changes from the pretrained one thinned."""
    return dare_merge(pretrained, [finetuned], DareConfig(drop_rate=drop_rate, seed=seed))


def dare_merge(
    base: Mapping[str, torch.Tensor],
    finetuned: Sequence[Mapping[str, torch.Tensor]],
    config: DareConfig | None = None,
    *,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The merged state dict: the bits that DareMerger writes for these names and settings.

    out: tensors to write it into, such as a live model's or the base's own, so that nothing new is
    allocated. What does not fit is refused before anything is written; a value that is not finite
    is only met on the way. State dicts may be in FP8, or another encoding that files may have; what
    comes out is plain: float32 in place of the base's.
    """
    return load_in_memory().merge_tensors(base, finetuned, check_config(config), out)


def dare_match(
    model: torch.nn.Module,
    base: Mapping[str, torch.Tensor],
    finetuned: Sequence[Mapping[str, torch.Tensor]],
    batches: Sequence[Iterable[Any]],
    config: DareConfig | None = None,
    *,
    base_batches: Iterable[Any] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The merged state dict, matched with a few examples of each fine-tune's skill: its matrices
    are solved for, so that they give what the fine-tune's own give. Nothing is trained.

    batches: for each fine-tune, what the model is called with: tensors, tuples or dictionaries.
    base_batches: such on which the merge shall stay like the base. out: as dare_merge has it.
    """
    return load_states().match_tensors(
        model, base, finetuned, batches, check_config(config), base_batches, out
    )


def dare_evaluate(
    model: torch.nn.Module,
    base: Mapping[str, torch.Tensor],
    finetuned: Sequence[Mapping[str, torch.Tensor]],
    batches: Sequence[Iterable[Any]],
    merges: Sequence[Mapping[str, torch.Tensor]] = (),
    *,
    base_batches: Iterable[Any] | None = None,
) -> EvaluationReport:
    """Judge the base, the fine-tunes and merges: on each fine-tune's batches, how often the
    likeliest answer is the fine-tune's, and how far what is expected is from it (KL).

    batches: as dare_match has them. The model's output is logits.
    """
    from darelib.commands.evaluate import EvaluationReport

    judged = load_states().judge_tensors(model, base, finetuned, batches, merges, base_batches)
    own = [f"model {k}" for k in range(len(finetuned))]
    names = ("base", *own, *(f"merge {k}" for k in range(len(merges))))
    return EvaluationReport(names, **vars(judged))


def dare_sweep(
    base: Mapping[str, torch.Tensor],
    finetuned: Sequence[Mapping[str, torch.Tensor]],
    evaluate: Callable[..., Any],
    space: Mapping[str, Any],
    config: DareConfig | None = None,
    *,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> SweepReport:
    """Search, as DareMerger.sweep does, for the settings whose merge of state dicts scores best.

    evaluate: is given the merged state dict or, if there is one, the live model, into whose tensors
    it was merged, and which holds the winner in the end. Nothing is written.
    """
    from darelib.commands.sweep.start import sweep_states

    return sweep_states(base, finetuned, evaluate, space, check_config(config), model, options)


# --- the command ---------------------------------------------------------------------------------


# By the first word: what it does, and its module. What is heavy is imported when it is run, so that
# --help starts at once.
COMMANDS: Final[Commands] = {
    "merge": ("merge models (default)", merge),
    "analyze": ("show the changes of each model, and suggest settings", analyze),
    "evaluate": ("judge models by examples of each skill", evaluate),
    "sweep": ("let an evaluation choose the settings", sweep),
    "verify": ("make a merged model again from its recipe, and compare", verify),
    "pack": ("store a thinned fine-tune, for later merges", pack),
    "extract": ("write the changes of a fine-tune as a LoRA adapter", extract),
    "convert": ("write a pickle, an adapter or an image model in another format", convert),
}


def main(arguments: Sequence[str] | None = None) -> int:
    def act() -> None:
        module, flags = parse_flags(arguments, COMMANDS)
        raise_open_file_limit()
        module.run(flags, DareMerger)

    return run_command(act)


def command() -> NoReturn:
    """The command as a process of its own: when all is done, no signal changes its status."""
    status = main()
    ignore_signals()
    sys.exit(status)


if __name__ == "__main__":
    command()
