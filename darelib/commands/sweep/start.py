"""A search from what a user asks for: where models are made and scored, as files or in memory, and
what is written besides the study.
"""

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from darelib.commands.options import Merger
from darelib.commands.sweep.evaluation import Evaluate, ShellCommand, find_evaluation
from darelib.commands.sweep.report import SweepReport
from darelib.commands.sweep.search import Options, Search
from darelib.commands.sweep.space import Space
from darelib.config import DareConfig
from darelib.core.text import ConfigError, DareError, install_hint, printable
from darelib.models.checkpoint import Checkpoint
from darelib.models.hub import download
from darelib.models.inputs import check_unchanged
from darelib.requests.configfile import format_settings, write_config
from darelib.requests.request import Request
from darelib.run import load_memory

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
        with prepare_folder(folder, keep_models) as place:
            base_path = download(merger.base).path
            bench = FileBench(merger, inputs, base_path, score, Path(place), keep_models)
            bench.configure(quiet).plan(bench.place("merged"))  # to fail now rather than later
            return Search(choices, bench.score, how, name, facts).run()


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


def search_in_memory(
    base: Mapping[str, Any],
    finetuned: Sequence[Mapping[str, Any]],
    evaluate: Evaluate,
    space: Space,
    how: Options,
    model: Any,
    label: str,
    facts: Sequence[Any],
) -> SweepReport:
    """Search with state dicts. A live model holds the winner in the end, or else the base."""
    if isinstance(evaluate, ShellCommand):
        raise ConfigError(
            "a command needs models in files", "give a function, or leave out --in-memory"
        )
    bench = MemoryBench(base, finetuned, evaluate, model, space.config.dtype)
    try:
        report = Search(space, bench.score, how, label, facts).run()
    except BaseException:
        with suppress(DareError):  # which is what is raised already
            bench.leave(None)
        raise
    bench.leave(report.winner.config)
    return report


@dataclasses.dataclass(frozen=True)
class FileBench:
    """Models are written, each over the one before, and handed over by their path."""

    merger: Merger
    inputs: Sequence[Checkpoint]
    base: Path
    evaluate: Evaluate
    folder: Path
    keep: bool

    def configure(self, config: DareConfig) -> Merger:
        """A merger of the same models with another configuration."""
        other = copy.copy(self.merger)
        other.config = config
        return other

    def place(self, name: str) -> Path:
        """Of the kind that the base is, so that what loads the base loads it."""
        is_file = self.base.is_file() and self.base.suffix == ".safetensors"
        return self.folder.absolute() / (f"{name}.safetensors" if is_file else name)

    def score(self, config: DareConfig | None, trial: Any, name: str) -> Any:
        if config is None:
            return self.evaluate(self.base.absolute(), trial)
        path = self.place(name if self.keep else "merged")
        if not self.keep:  # what an evaluation has put beside the last one's files goes, too
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        check_unchanged(self.inputs)  # scores of other models would not be comparable
        self.configure(config).merge(path, force=True)
        return self.evaluate(path, trial)


def prepare_folder(folder: Path, keep: bool) -> AbstractContextManager[str]:
    """Where models are written: there, to be kept, or in a folder of its own that goes away."""
    try:
        if not keep:
            return TemporaryDirectory(prefix=".sweep-", dir=folder, ignore_cleanup_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return nullcontext(str(folder))
    except OSError as error:
        raise DareError(
            f"cannot write models in {str(folder)!r}: {error.strerror}", "give --keep-models DIR"
        ) from None


class MemoryBench:
    """State dicts are merged, into a live model's tensors if there is one; nothing is written."""

    def __init__(
        self,
        base: Mapping[str, Any],
        finetuned: Sequence[Mapping[str, Any]],
        evaluate: Evaluate,
        model: Any,
        dtype: str | None,
    ) -> None:
        self.merge = load_memory().merge_tensors
        self.evaluate = evaluate
        self.model = model
        self.nothing = DareConfig(lambda_coeff=0.0, dtype=dtype)  # which gives the base
        self.out = None if model is None else model.state_dict()
        owners: dict[int, str] = {}  # by address, the first name of each tensor that is written
        tied = set()  # the other names: a tied head is merged once
        for name, tensor in (self.out or {}).items():
            if tensor.numel() and owners.setdefault(tensor.data_ptr(), name) != name:
                tied.add(name)
        # What is merged into the base's own tensors would be the base of the next merge.
        self.base = {
            name: tensor.clone() if tensor.data_ptr() in owners else tensor
            for name, tensor in base.items()
            if name not in tied
        }
        self.finetuned = [
            {name: tensor for name, tensor in state.items() if name not in tied}
            for state in finetuned
        ]
        for k, state in enumerate(finetuned):
            if any(tensor.data_ptr() in owners for tensor in state.values()):
                raise DareError(
                    f"model {k} and the live model share their memory", "give copies of its tensors"
                )

    def make(self, config: DareConfig | None) -> Any:
        """What is scored: a merged state dict, or the live model. None: the base."""
        merged = self.merge(self.base, self.finetuned, config or self.nothing, self.out)
        return merged if self.model is None else self.model

    def leave(self, config: DareConfig | None) -> None:
        """Let a live model hold a merge, or the base."""
        if self.model is not None:
            self.make(config)

    def score(self, config: DareConfig | None, trial: Any, _: str) -> Any:
        return self.evaluate(self.make(config), trial)


def load_states(inputs: Sequence[Checkpoint], model: Any) -> list[dict[str, Any]]:
    """The tensors of models in files, on the device of a live model if there is one."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise DareError(
            "models in memory need torch and safetensors", install_hint("torch")
        ) from None
    device = "cpu" if model is None else str(next(iter(model.state_dict().values())).device)
    for each in inputs:
        if type(each) is not Checkpoint:
            raise DareError(
                f"{each.name!r} is no whole model of plain weights, as is needed in memory",
                "search in files, or merge it alone first",
            )
    return [
        {n: t for file in each.files for n, t in load_file(file.path, device).items()}
        for each in inputs
    ]
