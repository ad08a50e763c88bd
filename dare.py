"""DARE: merge fine-tuned models into one, by dropping most of what each has learned and rescaling the rest.

    delta_i = finetuned_i - base                     what fine-tuning changed
    kept_i  = mask_i * delta_i / r_i                 drop at random, keep a share r_i, rescale by 1 / r_i
    merged  = combine(kept_1 ... kept_n)             by default the sum of w_i * kept_i with w_i = 1 / n
    output  = base + lambda * merged

Dropping changes no expectation, and fine-tuned models tolerate it surprisingly well: Yu et al., "Language Models are
Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch", ICML 2024, arXiv:2311.03099.

    python dare.py --config merge_config.toml        from the shell
    python dare.py analyze --config ...              look before you merge
    from dare import DareConfig, DareMerger          from a script

This file is the front door: DareMerger.merge shows how a merge flows, COMMANDS what the command can do. Behind it, in
darelib, is a room for each job:

    config, readers      DareConfig and its rules; TOML and flags
    gradients            numbers that change over the layers
    methods, drops, mask what can be chosen, with every formula; r_i is 1 - drop rate, as exactly as the mask keeps it
    kernels/             the arithmetic: plain is its definition (NumPy); cpu, tensors and gpu: Numba, torch and Triton
    models/              how weights come in: checkpoints, FP8, adapters, packed models, the Hub; several models' tokens
    matching, plan       which models change which tensors; what will be read, computed and written
    run/                 who does the jobs: threads, parts on several machines, a Ray cluster
    output/              how a model comes out: publish (write, sync, rename), directory, tokenizer, recipe
    report, verify       what a merge will do and did; a merged model against its recipe
    analysis/            what the models are like, and what to do with them
    sweep/               settings chosen by an evaluation
    pack, convert        packed models; pickles as safetensors files
    mergekit, families, yamlfile    what another tool's configurations ask for
    text, formats, tuning, interrupts    words for people; stored types; sizes and intervals; signals
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # Until main looks after signals, there is nothing to tidy up; an interrupt in the imports below shows no traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import dataclasses
import importlib
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from darelib import __version__
from darelib.config import DareConfig, Rule
from darelib.core.drops import DROPS
from darelib.core.interrupts import Interrupts
from darelib.core.methods import METHODS
from darelib.core.text import LOG, ConfigError, DareError, Messages, label, nearest, progress
from darelib.core.tuning import raise_open_file_limit
from darelib.run import load_memory

if TYPE_CHECKING:
    import torch

    from darelib.commands.analyze.plots import plot_analysis
    from darelib.commands.analyze.report import AnalysisReport
    from darelib.commands.report import Estimate, MergeReport, ModelReport, Plan
    from darelib.commands.sweep.report import SweepReport, plot_sweep
    from darelib.commands.verify import VerifyReport
    from darelib.models.checkpoint import Checkpoint
    from darelib.models.source import Source
    from darelib.output.destination import Destination
    from darelib.output.prepare import FilePlan
    from darelib.requests.request import Request

__all__ = [
    "AnalysisReport", "ConfigError", "DareConfig", "DareError", "DareMerger", "Estimate", "MergeReport", "ModelReport",
    "Plan", "Rule", "SweepReport", "VerifyReport", "dare_drop", "dare_merge", "dare_sparsify", "dare_sweep",
    "plot_analysis", "plot_sweep",
]  # fmt: skip
# Rooms are imported where they are used, so that --help starts at once. These names are found in theirs when asked for.
ROOMS: Final = {
    "AnalysisReport": "darelib.commands.analyze.report", "Estimate": "darelib.commands.report", "MergeReport": "darelib.commands.report",
    "ModelReport": "darelib.commands.report", "Plan": "darelib.commands.report", "VerifyReport": "darelib.commands.verify",
    "plot_analysis": "darelib.commands.analyze.plots", "SweepReport": "darelib.commands.sweep.report",
    "plot_sweep": "darelib.commands.sweep.report",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(ROOMS[name]), name)


def check_config(config: DareConfig | None) -> DareConfig:
    if config is not None and not isinstance(config, DareConfig):
        raise ConfigError("config must be a DareConfig", "like DareConfig(drop_rate=0.9)")
    return config or DareConfig()


class DareMerger:
    """Merges models fine-tuned from one base: DareMerger(base, [first, second], config).merge(output)."""

    def __init__(
        self,
        base_file: str | Path | Source,
        merge_files: Sequence[str | Path | Source],
        config: DareConfig | None = None,
        *,
        tokenizer: str | Path | Source = "base",
        chat_template: str | Path | Source | None = None,
    ) -> None:
        """A model is a file, a directory, an index, a name on the Hub or, to be merged, a LoRA adapter or packed model.

        tokenizer: of an output directory: the "base"'s, a "union" of all tokens, each with its row, or a model's.
        chat_template: a model or a file; None: the base's or, if it has none, that of the first model that has one.
        """
        from darelib.models.source import Source

        if isinstance(merge_files, str | Path):
            raise ConfigError(
                "merge_files must be a list of files, not a single path", "put it in brackets"
            )
        if not merge_files:
            raise ConfigError("there are no models to merge", "name at least one fine-tuned model")
        self.base = Source.of(base_file)
        self.models = tuple(Source.of(file) for file in merge_files)
        self.tokenizer = Source.of(tokenizer)
        self.chat_template = None if chat_template is None else Source.of(chat_template)
        self.config = check_config(config)
        self.config.check_models(len(self.models))
        self.version = __version__  # that recipes name
        self.published: MergeReport | None = (
            None  # what merge has made, even if it is interrupted right after that
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.base, *self.models

    def _open(self) -> AbstractContextManager[list[Checkpoint]]:
        """The base and the models, with the same number for each token if their tokenizers are to be united."""
        from darelib.models.inputs import open_models
        from darelib.models.source import UNION

        return open_models(self.sources, self.tokenizer.name == UNION)

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
        """Merge into a file (if its name ends in .safetensors) or a model directory, and report what was done.

        force replaces an existing output that this tool did not make. resume continues an unfinished merge, and leaves
        one behind that can be continued if it is itself interrupted. part: (3, 16) makes the third of 16 parts of a
        directory's files, while other machines make the others; a last merge with resume makes what is missing and
        publishes. runner: "ray" makes the files on the nodes of a Ray cluster. All machines see the same filesystem.
        """
        from darelib.commands.report import report_merge
        from darelib.output.destination import find_output
        from darelib.run.order import Order
        from darelib.run.runners import choose_runner

        started = time.perf_counter()
        run = choose_runner(runner, part, ray_address)
        destination = find_output(output_file)
        self.published = None
        with self._open() as inputs:
            plan = self._plan(inputs, destination, force)
            with Interrupts() as interrupts:
                order = Order(plan, inputs, interrupts, force, resume, part, ray_address)
                result = run(order)
                seconds = time.perf_counter() - started
                report = report_merge(result.plan, result.outcomes, order.name, seconds)
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
        """Check everything and describe what merge would do with the same force and resume; write nothing.

        estimate: also run the first jobs, for half a second, to estimate how long all of them will take.
        """
        from darelib.commands.report import describe_plan
        from darelib.output.destination import find_output
        from darelib.run.threads import measure_rate
        from darelib.run.worker import Worker

        destination = find_output(output_file)
        with self._open() as inputs:
            plan, sampled = self._plan(inputs, destination, force), None
            if estimate:
                with Interrupts() as interrupts:
                    worker = Worker.for_merge(plan, inputs, interrupts)
                    sampled = measure_rate(plan.rounds(), worker, interrupts)
            return describe_plan(plan, inputs, resume, sampled)

    def analyze(self) -> AnalysisReport:
        """Look at every delta once, and report what the models are like and how they might be merged; write nothing."""
        from darelib.commands.analyze.measure import Findings, MeasureLook
        from darelib.commands.analyze.report import analysis_report
        from darelib.models.inputs import check_unchanged
        from darelib.plan.plan import plan_merge
        from darelib.run.threads import run_rounds
        from darelib.run.worker import Worker

        started = time.perf_counter()
        with self._open() as inputs, Interrupts() as interrupts:
            task = plan_merge(self.config, inputs, looks_only=True)
            findings = Findings(task.seeds)
            passes = {tensor.name: [(MeasureLook(tensor, findings), 0)] for tensor in task.changed}
            worker = Worker(task, inputs, passes, (), interrupts)
            size = sum(tensor.bytes_read for tensor in task.changed)
            with progress("analyzing", size, self.config.verbose) as advance:
                jobs = task.jobs(task.changed, look_pass=0)
                run_rounds(
                    [jobs],
                    worker,
                    lambda *_: None,
                    lambda job, _: advance(job.bytes_read),
                    interrupts,
                )
            check_unchanged(inputs)
        for warning in task.warnings:
            LOG.warning(warning)
        partial, seconds = [model.partial for model in inputs[1:]], time.perf_counter() - started
        return analysis_report(task, findings, partial, task.warnings, seconds, size)

    def verify(self, output_file: str | Path) -> VerifyReport:
        """Make an output again, without writing, and compare: the first difference is raised as an error.

        Of a directory, the files besides the tensors are compared with the digests in its recipe.
        """
        from darelib.commands.verify import Comparison, VerifyReport
        from darelib.output.destination import Destination
        from darelib.output.prepare import plan_files
        from darelib.output.tokenizer import TokenizerChoice
        from darelib.run.threads import run_rounds
        from darelib.run.worker import Worker

        started = time.perf_counter()
        path = Path(os.path.expanduser(output_file)).resolve()
        destination = Destination(str(output_file), path, path.is_dir())
        with self._open() as inputs, Interrupts() as interrupts:
            tokens = TokenizerChoice(self.tokenizer.name)
            plan = plan_files(
                self.config, inputs, destination, tokens, self.version, with_side_files=False
            )
            with closing(Comparison(plan, str(output_file))) as comparison:
                comparison.check_side_files()
                worker = Worker.for_merge(plan, inputs, interrupts)
                with progress("verifying", plan.bytes_to_read, self.config.verbose) as advance:
                    rounds, compare = plan.rounds(), comparison.write_at
                    run_rounds(
                        rounds, worker, compare, lambda job, _: advance(job.bytes_read), interrupts
                    )
        return VerifyReport(
            str(output_file), len(plan.tensors), plan.size, time.perf_counter() - started
        )

    def sweep(
        self,
        evaluate: Callable[..., Any] | str,
        space: Mapping[str, Any],
        *,
        model: torch.nn.Module | None = None,
        in_memory: bool = False,
        timeout: float | None = None,
        folder: str | Path = ".",
        keep_models: bool = False,
        **options: Any,
    ) -> SweepReport:
        """Search for the settings whose merge scores best; what is not searched is as in the config.

        evaluate: a function, file.py:function, or a command with {model} in it. It is given the path of a merged model,
        which is written in folder, over the one before unless keep_models; in_memory, a state dict; or the live model,
        into whose tensors it was merged, and which holds the winner in the end. space: as under [sweep] in TOML.
        options: trials, search, objectives, confirm, storage and study (darelib.commands.sweep.search.Options).
        """
        from darelib.commands.sweep.bench import FileBench, load_states, prepare_folder
        from darelib.commands.sweep.evaluation import find_evaluation
        from darelib.commands.sweep.search import Options, Search, search_in_memory
        from darelib.commands.sweep.space import Space
        from darelib.models.hub import download
        from darelib.models.inputs import check_unchanged

        run, label = find_evaluation(evaluate, timeout)
        how, quiet = Options.of(**options), dataclasses.replace(self.config, verbose=False)
        choices = Space(space, quiet, len(self.models))
        with self._open() as inputs:
            facts: list[Any] = [self.tokenizer.name, self.chat_template and self.chat_template.name]
            facts += [each.fingerprint for each in inputs]
            if model is not None or in_memory:
                if keep_models:
                    raise ConfigError(
                        "in memory there are no models to keep", "leave one of the two out"
                    )
                base, *finetuned = load_states(inputs, model)
                return search_in_memory(base, finetuned, run, choices, how, model, label, facts)

            def merge(config: DareConfig, path: Path) -> None:
                check_unchanged(inputs)  # scores of other models would not be comparable
                self._with(config).merge(path, force=True)

            with prepare_folder(Path(folder), keep_models) as place:
                bench = FileBench(download(self.base).path, merge, run, place, keep_models)
                self._with(quiet).plan(bench.place("merged"))  # to fail now rather than later
                return Search(choices, bench, how, label, facts).run()

    def _with(self, config: DareConfig) -> DareMerger:
        return DareMerger(
            self.base,
            self.models,
            config,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
        )

    def _plan(
        self, inputs: Sequence[Checkpoint], destination: Destination, force: bool
    ) -> FilePlan:
        from darelib.output.prepare import plan_output
        from darelib.output.tokenizer import choose_tokenizer

        tokenizer = choose_tokenizer(self.tokenizer, self.chat_template)
        return plan_output(self.config, inputs, destination, tokenizer, force)


# --- tensors in memory -----------------------------------------------------------------------------------------------


def dare_drop(
    task_vector: Mapping[str, torch.Tensor],
    drop_rate: float = 0.9,
    seed: int = 42,
    rescale: bool = True,
) -> dict[str, torch.Tensor]:
    """Thin deltas: drop entries at random and rescale the rest. Tensors that are not floats are left as they are."""
    config = DareConfig(drop_rate=drop_rate, seed=seed, rescale=rescale)
    return load_memory().drop_deltas(task_vector, config)


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
    """The merged state dict, by any method and rules: the bits that DareMerger writes for these names and settings.

    out: tensors to write it into, such as a live model's or the base's own, so that nothing new is allocated. What does
    not fit is refused before anything is written; a value that is not finite is only met on the way.
    """
    return load_memory().merge_tensors(base, finetuned, check_config(config), out)


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
    """Search for the settings whose merge of state dicts scores best, as DareMerger.sweep does; nothing is written.

    evaluate: is given the merged state dict or, if there is one, the live model, into whose tensors it was merged, and
    which holds the winner in the end.
    """
    from darelib.commands.sweep.evaluation import find_evaluation
    from darelib.commands.sweep.search import Options, search_in_memory
    from darelib.commands.sweep.space import Space

    run, label = find_evaluation(evaluate, None)
    how, config = Options.of(**options), check_config(config)
    if not finetuned:
        raise ConfigError("there are no models to merge", "give at least one state dict")
    config.check_models(len(finetuned))
    facts: list[Any] = []
    if how.storage:
        facts = [
            {n: float(tensor.double().sum()) for n, tensor in state.items()}
            for state in (base, *finetuned)
        ]
    return search_in_memory(
        base, finetuned, run, Space(space, config, len(finetuned)), how, model, label, facts
    )


# --- the command -----------------------------------------------------------------------------------------------------


Add = Callable[..., Any]  # argparse's add_argument
GOES_ON: Final = "the same command goes on from here"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        numbers = "only numbers, with spaces between them, go there; files go after --merge"
        raise ConfigError(
            message, numbers if "invalid float" in message else f"see {self.prog} --help"
        )


def build_parser(name: str) -> Parser:
    """The options of one command."""
    script = "dare.py" if sys.argv[0].endswith(".py") else "dare"
    command, default = COMMANDS[name], name == DEFAULT_COMMAND
    lines = "; ".join(f"{word}: {other.help}" for word, other in COMMANDS.items())
    parser = Parser(
        prog=script,
        usage=f"%(prog)s [{' | '.join(COMMANDS)}] [options]"
        if default
        else f"%(prog)s {name} [options]",
        description="Merge models fine-tuned from the same base by DARE: drop most of each delta at random, rescale "
        f"the rest, combine, add to the base. Commands: {lines}. Each has a --help of its own."
        if default
        else f"{name}: {command.help}.",
        epilog="Flags beat TOML, TOML beats defaults. Paths in TOML are relative to the TOML file. "
        "Exit status: 0 done, 1 the merge failed, 2 wrong usage or configuration, 130 interrupted (143 by SIGTERM).",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    # As argparse has it, -1e-3 looks like an option.
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    add = parser.add_argument
    command.add_options(add)
    add(
        "--json",
        action="store_true",
        help="print what was done, planned, verified or found as JSON",
    )
    add("-v", "--verbose", action="store_true", help="show progress and summary (default)")
    add(
        "-q",
        "--quiet",
        action="store_false",
        dest="verbose",
        help="no progress or summary, only warnings and errors",
    )
    add("--version", action="version", version=f"dare {__version__}")
    return parser


def add_models(add: Add) -> None:
    """What every command that computes takes."""
    add("-b", "--base", metavar="MODEL", help="the model that the others were fine-tuned from")
    add(
        "-m",
        "--merge",
        metavar="MODEL",
        nargs="+",
        action="extend",
        help="the fine-tuned models, or LoRA adapters",
    )
    add(
        "--threads",
        metavar="N",
        type=int,
        help="threads to use (default: all cores this process may use)",
    )
    add(
        "--engine",
        metavar="NAME",
        help="what computes: auto (default), numba, or plain (NumPy: the same, but slow)",
    )


def add_settings(add: Add) -> None:
    """The models and the settings: what has a key in TOML too."""
    each: dict[str, Any] = {"type": float, "nargs": "+"}
    drops, methods = (
        "share of each delta to drop, 0 <= P < 1 (default 0.9); one or one each",
        ", ".join(METHODS),
    )
    q = "DAREx-q: divide by Q, 1 - P <= Q <= 1, instead of 1 - P; one or one each"
    normalize = "divide by the sum of the weights, in ties of the models that agree (default: ties yes, linear no)"
    trim = "ties: share of the surviving entries that trim keeps (default 1)"
    which = f"what to drop: {', '.join(DROPS)} (default random); one or one each"
    rescale = "what is kept: expectation (default of random, della), l1 (restore the sum of |delta|) or none"
    types = "output type: float32, float16, bfloat16 or float64, or fp32, fp16, bf16, fp64 (default: the base's)"
    shapes = "tensors of other shapes: error (default), overlap (merge common rows) or base"
    add(
        "-c",
        "--config",
        metavar="FILE",
        type=Path,
        help="TOML configuration, mergekit's YAML, or a merged model: its recipe",
    )
    add_models(add)
    add(
        "-o",
        "--output",
        metavar="PATH",
        help="where to write: a .safetensors file, or a model directory",
    )
    add("--method", metavar="NAME", help=f"how to combine: {methods} (default linear)")
    add("--drop-rate", **each, metavar="P", help=drops)
    add("--drop", metavar="NAME", nargs="+", help=which)
    add(
        "--gamma",
        **each,
        metavar="G",
        help="breadcrumbs: share of the largest to drop as well (default 0.01)",
    )
    add(
        "--epsilon",
        **each,
        metavar="E",
        help="della: keep with 1 - P - E (smallest) to 1 - P + E (default 0.15)",
    )
    add(
        "--weights",
        **each,
        metavar="W",
        help="one per model; linear: default 1/n each; ties: relative, default equal",
    )
    add("--normalize", action=argparse.BooleanOptionalAction, help=normalize)
    add(
        "--lambda",
        dest="lambda_coeff",
        metavar="X",
        type=float,
        help="scale of the merged delta (default 1)",
    )
    add("--rescale", metavar="HOW", help=rescale)
    add("--no-rescale", action="store_false", dest="rescale", help="the same as --rescale none")
    add("--rescale-q", **each, metavar="Q", help=q)
    add("--keep-ratio", metavar="R", type=float, help=trim)
    add(
        "--slerp-t",
        metavar="T",
        type=float,
        help="slerp: position between the two models (default 0.5)",
    )
    add(
        "--threshold",
        metavar="X",
        type=float,
        help="ram: a smaller |delta| counts as none (default 1e-5)",
    )
    add("--dtype", metavar="NAME", help=types)
    add("--mismatch", metavar="HOW", help=shapes)
    add(
        "--any-base",
        action="store_true",
        help="merge even if config.json says that the base is another kind of model",
    )
    add(
        "--max-shard-size",
        metavar="SIZE",
        help="largest size of one file of an output directory (default 5GB)",
    )
    add(
        "--tokenizer",
        metavar="WHICH",
        help="of an output directory: base (default), union (all tokens), or a model's",
    )
    add(
        "--chat-template",
        metavar="WHICH",
        help="of a model, or a file (default: the base's, else a model's)",
    )
    add(
        "--rule",
        dest="rules",
        metavar="RULE",
        action="append",
        help="PATTERN:SETTING=VALUE,... for matching tensors",
    )
    add(
        "--delta-threshold",
        metavar="X",
        type=float,
        help="warn where deltas are larger than this (default 0.002)",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        help="the first model's seed; model i uses N + i (default 42)",
    )


def add_merge_options(add: Add) -> None:
    add_settings(add)
    add(
        "--force",
        action="store_true",
        help="replace an existing output that this tool did not make",
    )
    add(
        "--resume",
        action="store_true",
        help="continue an unfinished merge; if interrupted, leave one to continue",
    )
    add(
        "--part",
        metavar="K/N",
        type=parse_part,
        help="make every Nth file, from the Kth on; --resume then publishes",
    )
    add(
        "--runner",
        metavar="NAME",
        help="who makes the files: threads (default), or ray, the nodes of a cluster",
    )
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="of the cluster (default: what Ray finds, or one on this machine)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the plan, with an estimate of the time, and write nothing",
    )
    add(
        "--write-config",
        metavar="FILE",
        type=Path,
        help="write the settings and models as TOML, and merge nothing",
    )


def parse_part(text: str) -> tuple[int, ...] | str:
    return tuple(map(int, text.split("/"))) if re.fullmatch(r"\d+/\d+", text) else text


def run_merge_command(flags: dict[str, Any]) -> None:
    from darelib.run.runners import choose_runner

    where = {name: flags[name] for name in ("part", "runner", "ray_address") if name in flags}
    choose_runner(**where)
    merger, request = make_merger(flags)
    if "write_config" in flags:
        from darelib.requests.configfile import write_request

        write_request(request, flags["write_config"], "force" in flags)
        return
    if request.output is None:
        raise ConfigError("there is no output", "give --output PATH, or output_file in [models]")
    if "dry_run" in flags:
        plan = merger.plan(
            request.output, force="force" in flags, resume="resume" in flags, estimate=True
        )
        for warning in plan.warnings:
            LOG.warning(warning)
        show(plan, flags, True)
        return
    try:
        report = merger.merge(
            request.output, force="force" in flags, resume="resume" in flags, **where
        )
        ignore_signals()
    except (KeyboardInterrupt, Terminated):
        if merger.published is None:
            raise
        report = merger.published  # it came too late to stop anything
    show(report, flags, merger.config.verbose)


def say_how_to_go_on(flags: dict[str, Any]) -> str:
    if "dry_run" in flags:
        return ""
    return GOES_ON if flags.keys() & {"resume", "part"} else "with --resume, a merge can go on"


def add_analyze_options(add: Add) -> None:
    add_settings(add)
    add("--per-tensor", action="store_true", help="also list every tensor")
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw what was found, to a .png, .svg or .pdf file",
    )
    add(
        "--write-config",
        metavar="FILE",
        type=Path,
        help="write the suggested settings as a configuration",
    )
    add("--force", action="store_true", help="replace an existing file of --write-config")


def run_analyze_command(flags: dict[str, Any]) -> None:
    merger, request = make_merger(flags)
    from darelib.commands.analyze.files import check_places, write_suggestion
    from darelib.commands.analyze.plots import plot_analysis

    plot, written = flags.get("plot"), flags.get("write_config")
    check_places(merger.sources, plot, written, "force" in flags)
    report = merger.analyze()
    try:
        if written is not None:
            write_suggestion(report, request, written)
        if plot is not None:
            plot_analysis(report, plot)
            LOG.info(f"drew {plot}")
    finally:  # a disk that is full must not cost what was found
        if "json" in flags or merger.config.verbose:
            per_tensor = "per_tensor" in flags
            print_result(report.as_dict(per_tensor) if "json" in flags else report.text(per_tensor))


def add_sweep_options(add: Add) -> None:
    evaluate = (
        "a command with {model} in it, whose last line is a score or JSON, or file.py:function"
    )
    add("--evaluate", metavar="WHAT", help=evaluate)
    add(
        "--vary",
        metavar="AXIS",
        action="append",
        help="what to choose from, besides [sweep]: drop_rate=[0, 0.5]",
    )
    add(
        "--trials",
        metavar="N",
        type=int,
        help="in all, earlier runs included (default 30; a grid: all of it)",
    )
    add("--search", metavar="HOW", help="tpe (default), cmaes, grid or random")
    add(
        "--objective",
        metavar="NAME:max",
        nargs="+",
        help="scores by name, :max or :min (default score:max)",
    )
    add(
        "--confirm",
        metavar="N",
        type=int,
        help="fresh seeds to score the best few with again (default 5; 0: none)",
    )
    add(
        "--timeout",
        metavar="S",
        type=float,
        help="seconds after which a command is ended, and has failed",
    )
    add(
        "--in-memory",
        action="store_true",
        help="give the function a merged state dict, and write no model",
    )
    add(
        "--keep-models",
        metavar="DIR",
        type=Path,
        help="keep all merged models there (default: none)",
    )
    add(
        "--storage",
        metavar="URL",
        help="of the study, for Optuna (default: a _sweep.db file beside the config)",
    )
    add("--study", metavar="NAME", help="its name (default: made from all that scores depend on)")
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw what was found, to a .png, .svg or .pdf file",
    )
    add(
        "--write-config",
        metavar="FILE",
        type=Path,
        help="the winner (default: a _best.toml file beside the config)",
    )
    add("--force", action="store_true", help="replace existing files of --plot and --write-config")
    add_settings(add)


def run_sweep_command(flags: dict[str, Any]) -> None:
    from darelib.commands.analyze.files import check_places
    from darelib.commands.sweep.files import find_places, write_winner
    from darelib.commands.sweep.report import plot_sweep
    from darelib.requests.request import parse_axes

    merger, request = make_merger(flags)
    if "evaluate" not in flags:
        raise ConfigError(
            "nothing scores the models", "give --evaluate 'COMMAND {model}' or file.py:function"
        )
    places, plot = find_places(flags), flags.get("plot")
    check_places(merger.sources, plot, places.winner, places.may_replace)
    options = {
        name: flags[name]
        for name in ("trials", "search", "confirm", "study", "timeout")
        if name in flags
    }
    report = merger.sweep(
        flags["evaluate"],
        {**request.sweep, **parse_axes(flags.get("vary", ()))},
        in_memory="in_memory" in flags,
        folder=places.models,
        keep_models="keep_models" in flags,
        objectives=flags.get("objective", ["score:max"]),
        storage=places.storage,
        **options,
    )
    show(report, flags, merger.config.verbose)
    write_winner(report, request, places.winner)
    if plot is not None:
        plot_sweep(report, plot)
        LOG.info(f"drew {plot}")


def add_verify_options(add: Add) -> None:
    add(
        "path",
        metavar="PATH",
        nargs="?",
        help="the merged model; its settings are those of its recipe",
    )
    add("--verify", metavar="PATH", dest="path", help="the same, without the word verify")
    add_models(add)


def run_verify_command(flags: dict[str, Any]) -> None:
    """Check a merged model by its own recipe."""
    from darelib.models.source import UNION
    from darelib.requests.recipe import locate_inputs, read_recipe

    if "path" not in flags:
        raise ConfigError("there is nothing to verify", "give a merged model: verify PATH")
    path = Path(os.path.expanduser(flags["path"]))
    request = dataclasses.replace(
        read_recipe(path), chat_template=None
    )  # other files are held to their digests
    if request.tokenizer and request.tokenizer.name != UNION:
        request = dataclasses.replace(request, tokenizer=None)
    request = locate_inputs(request, models_of(flags), path)
    own = {name: flags[name] for name in ("threads", "engine", "verbose") if name in flags}
    merger = merger_for(dataclasses.replace(request, dare=request.dare | own))
    merger.version = request.version
    show(merger.verify(path), flags, merger.config.verbose)


def in_room(room: str, help: str) -> Command:
    """A command that has a room of its own, which is imported when the command is used."""

    def run(flags: dict[str, Any]) -> None:
        report = importlib.import_module(room).run(flags)
        for warning in report.warnings:
            LOG.warning(warning)
        show(report, flags, flags.get("verbose", True))

    return Command(help, lambda add: importlib.import_module(room).add_options(add), run, room)


@dataclass(frozen=True)
class Command:
    """What the first word of the command line may be."""

    help: str
    add_options: Callable[[Add], None]
    run: Callable[[dict[str, Any]], None]  # by the flags that are given
    room: str = ""  # where it is, if not here: to be imported only when it is used
    stopped: Callable[[dict[str, Any]], str] = lambda _: (
        ""
    )  # what to do after an interrupt, by the flags


COMMANDS: Final = {
    "merge": Command(
        "merge models (default)", add_merge_options, run_merge_command, stopped=say_how_to_go_on
    ),
    "analyze": Command(
        "show what models are like, and suggest settings", add_analyze_options, run_analyze_command
    ),
    "sweep": Command(
        "let an evaluation choose the settings",
        add_sweep_options,
        run_sweep_command,
        stopped=lambda _: GOES_ON,
    ),
    "verify": Command(
        "make a merged model again from its recipe, and compare",
        add_verify_options,
        run_verify_command,
    ),
    "pack": in_room(
        "darelib.commands.pack", "store what a drop rate leaves of a fine-tune, for merges"
    ),
    "convert": in_room("darelib.commands.convert", "write a PyTorch pickle as a .safetensors file"),
}
DEFAULT_COMMAND: Final = "merge"


def parse_flags(arguments: Sequence[str] | None) -> tuple[Command, dict[str, Any]]:
    """The command, merge where none is given, and the flags."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and words[0] in COMMANDS else DEFAULT_COMMAND
    if name == DEFAULT_COMMAND and any(word.split("=")[0] == "--verify" for word in words):
        name = "verify"
    parser = build_parser(name)
    parsed, unknown = parser.parse_known_args(words)
    late = next(
        (word for word in COMMANDS if word in unknown or word in getattr(parsed, "merge", ())), None
    )
    if late and not os.path.exists(late):
        raise ConfigError(f"{late!r} must be the first word", f"like {parser.prog} {late} ...")
    if unknown:
        raise explain_unknown(unknown[0].split("=")[0], name, parser)
    return COMMANDS[name], vars(parsed)


def explain_unknown(word: str, name: str, parser: Parser) -> ConfigError:
    """What is wrong with a word that a command does not take."""
    if not word.startswith("-"):
        import difflib

        close = difflib.get_close_matches(word, COMMANDS, cutoff=0.5)
        files = "files go after --config, --base, --merge or --output"
        return ConfigError(
            f"{word!r} is not expected here",
            f"did you mean {parser.prog} {close[0]}?" if close else files,
        )
    for other, command in COMMANDS.items():
        if not command.room and word in build_parser(other)._option_string_actions:
            return ConfigError(
                f"{word} means nothing to {name}", f"it belongs to {parser.prog} {other}"
            )
    from darelib.requests.request import explain_key

    hint = explain_key(word.lstrip("-").replace("-", "_"), ())
    return ConfigError(
        f"there is no option {word!r}", hint or nearest(word, parser._option_string_actions)
    )


def make_merger(flags: dict[str, Any]) -> tuple[DareMerger, Request]:
    """The merger that a configuration, or the recipe of a merged model, and flags ask for."""
    from darelib.requests.readers import load_request
    from darelib.requests.request import Request, layer_flags

    request, path = Request(), Path(os.path.expanduser(flags.get("config", "")))
    if "config" in flags and (path.suffix == ".safetensors" or path.is_dir()):
        from darelib.requests.recipe import read_recipe

        request = read_recipe(path)
    elif "config" in flags:
        request = load_request(path)
    layered = layer_flags(request, flags)
    if request.inputs:
        from darelib.requests.recipe import locate_inputs

        layered = locate_inputs(layered, models_of(flags), path)
    return merger_for(layered), layered


def models_of(flags: dict[str, Any]) -> list[str]:
    """The models that are given by flags, the base first."""
    return [*([flags["base"]] if "base" in flags else []), *flags.get("merge", [])]


def merger_for(request: Request) -> DareMerger:
    config = DareConfig(**request.dare, rules=request.rules)
    LOG.setLevel(logging.INFO if config.verbose else logging.WARNING)
    if request.base is None:
        raise ConfigError(
            "there is no base model",
            "give --base MODEL, or base_file in [models] of a --config file",
        )
    if not request.merge:
        raise ConfigError(
            "there are no models to merge", "give --merge MODEL..., or merge_files in [models]"
        )
    tokenizer, template = request.tokenizer or "base", request.chat_template
    return DareMerger(
        request.base, request.merge, config, tokenizer=tokenizer, chat_template=template
    )


def show(report: Any, flags: dict[str, Any], verbose: bool) -> None:
    if "json" in flags or verbose:
        print_result(report.as_dict() if "json" in flags else str(report))


def print_result(result: str | dict[str, Any]) -> None:
    """Print what came out, as text or as JSON. That nobody can read it does not undo it."""
    import json

    try:
        print(result if isinstance(result, str) else json.dumps(result, indent=2), flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whoever read our output has read enough
            LOG.warning(f"cannot print what was done: {error.strerror}")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the interpreter's last flush)


class Terminated(BaseException):
    """Somebody sent SIGTERM: to be handled like an interrupt."""


def ignore_signals() -> None:
    with suppress(ValueError):  # only a main thread gets them
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _stop(number: int, _: object) -> NoReturn:
    """The first signal stops the merge; more of them must not stop it from tidying up."""
    ignore_signals()
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Errors become a sentence and a status, signals stop it, and no traceback reaches a user."""
    # Closed by the caller, as after >&- or 2>&-, they are None; they stay open here as long as the process lives.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a name that the terminal lacks letters for is no error
    messages = Messages(sys.stderr)
    LOG.addHandler(messages)
    LOG.propagate = False
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # only a main thread may take signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, _stop)
    command: Command | None = None
    flags: dict[str, Any] = {}
    try:
        command, flags = parse_flags(arguments)
        raise_open_file_limit()
        command.run(flags)
        sys.stdout.flush()
        return 0
    except (KeyboardInterrupt, Terminated) as stopped:
        print("interrupted", file=sys.stderr)
        if command and (hint := command.stopped(flags)):
            print(label("hint", hint, sys.stderr), file=sys.stderr)
        return 143 if isinstance(stopped, Terminated) else 130
    except Exception as error:
        return explain(error)
    finally:
        LOG.removeHandler(messages)
        LOG.propagate = True
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(error: Exception) -> int:
    """Print an error and what to do about it. Gives the exit status."""
    if isinstance(error, DareError):
        message, hint, status = str(error), error.hint, error.status
    elif isinstance(error, ModuleNotFoundError):
        message = f"{error.name} is not installed for {sys.executable}"
        hint, status = "use uv run python dare.py ..., or pip install . first", 1
    elif os.environ.get("DARE_TRACEBACK"):
        raise error
    else:
        message = f"unexpected {type(error).__name__}: {error}"
        hint, status = (
            "this is a bug; run again with DARE_TRACEBACK=1 set and report what it shows",
            1,
        )
    print(label("error", message, sys.stderr), file=sys.stderr)
    if hint:
        print(label("hint", hint, sys.stderr), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
