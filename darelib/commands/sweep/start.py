"""Where a search makes its models: as files, or in memory."""

import copy
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from darelib.commands.options import Merger
from darelib.commands.sweep.evaluation import Evaluate, Terms, find_evaluation
from darelib.commands.sweep.results import SweepReport
from darelib.commands.sweep.search import COSTS, TOTAL, Score, Search, SearchOptions
from darelib.commands.sweep.space import Space
from darelib.config import DareConfig
from darelib.core.interrupts import Interrupts
from darelib.core.text import ConfigError, DareError, install_hint, printable, shorten_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import check_unchanged
from darelib.models.source import download
from darelib.output.new_files import make_scratch
from darelib.requests.configfile import pin_tokenizer
from darelib.run import load_in_memory, load_matching

EXAMPLES: Final = "examples"  # that judge, in place of an evaluation


def sweep_models(
    merger: Merger,
    evaluate: Callable[..., Any] | str | None,
    space: Mapping[str, Any],
    *,
    model: Any,
    in_memory: bool,
    timeout: float | None,
    lm_eval_tasks: Path | None,
    folder: Path,
    keep_models: bool,
    options: Mapping[str, Any],
) -> SweepReport:
    """What DareMerger.sweep does."""
    is_in_memory = in_memory or model is not None
    score: Evaluate | None = None
    name = EXAMPLES
    if evaluate is None:
        given = {
            "--in-memory": is_in_memory,
            "--keep-models": keep_models,
            "--timeout": timeout,
            "--lm-eval-tasks": lm_eval_tasks,
        }
        check_judged(merger, given)
        how = SearchOptions.of(**{**options, "objectives": name_costs(merger, options)})
    else:
        merger.config.check_examples(bool(merger.examples))
        how = SearchOptions.of(**options)
        terms = Terms(how.objectives, is_in_memory, timeout, lm_eval_tasks)
        score, name = find_evaluation(evaluate, terms)
    if merger.examples and is_in_memory:
        raise ConfigError(
            "in memory, a search merges without examples",
            "search in files, or leave the examples out",
        )
    quiet = dataclasses.replace(merger.config, verbose=False)
    names = name_models([model.name for model in merger.models])
    choices = Space(space, quiet, names, bool(merger.examples))
    if score is None and choices.needs_examples:  # what is written is what is scored
        quiet = dataclasses.replace(quiet, held_out=quiet.judged_share)
        choices = Space(space, quiet, names, True)
    merger = pin_sources(merger)
    with merger.open_inputs() as inputs:
        template = merger.chat_template and merger.chat_template.name
        facts = [merger.tokenizer.name, template, *(each.fingerprint for each in inputs)]
        if score is None:
            with load_matching().open_trials(quiet, inputs, Interrupts(), folder) as trials:
                judged = partial(judge_by_examples, trials, inputs, list_skills(merger))
                return Search(choices, judged, how, name, facts).run()
        if not is_in_memory:
            with prepare_folder(folder, keep_models) as place:
                in_files = merge_in_files(merger, inputs, quiet, score, place, keep_models)
                return Search(choices, in_files, how, name, facts).run()
        if keep_models:
            raise ConfigError("in memory there are no models to keep", "leave one of the two out")
        base, *finetuned = load_states(inputs, model)
        return search_in_memory(base, finetuned, score, choices, how, model, name, facts)


def list_skills(merger: Merger) -> list[str]:
    """What the score of each file of examples is called."""
    _, *files = merger.examples or (None,)
    return name_models([TOTAL, *(file.stem for file in files if file)])[1:]


def name_costs(merger: Merger, options: Mapping[str, Any]) -> Sequence[str]:
    """The objectives where examples judge: the mean cost, unless others are wanted."""
    skills = list_skills(merger)
    wanted = list(options.get("objectives", [f"{TOTAL}:min"]))
    if wanted == ["each"]:
        return [f"{skill}:min" for skill in skills]
    known = [f"{name}:min" for name in (TOTAL, *skills)]
    if odd := next((each for each in wanted if each not in known), None):
        raise ConfigError(
            f"examples give no {odd!r}: they give costs, of which less is better",
            f"known are each, {', '.join(known)}",
        )
    return wanted


def check_judged(merger: Merger, given: Mapping[str, Any]) -> None:
    """Refuse what goes with an evaluation only. given: by flag."""
    if not merger.examples:
        raise ConfigError(
            "nothing scores the models",
            "give --examples FILE..., one for each, or --evaluate 'COMMAND {model}'",
        )
    if odd := next((flag for flag, value in given.items() if value), None):
        raise ConfigError(
            f"{odd} means nothing where examples judge the merges",
            "leave it out, or give --evaluate",
        )


def judge_by_examples(
    trials: Any,
    inputs: Sequence[Checkpoint],
    skills: Sequence[str],
    config: DareConfig | None,
    trial: Any,
    _: str,
) -> dict[str, float]:
    """A merge is judged as it is made, and never written."""
    from darelib.output.judged import find_cost

    check_unchanged(inputs)
    costs = trials.score(config)
    named = dict(zip(skills, costs, strict=True))
    found = {name: [sums.tolist(), each.tolist()] for name, (sums, each) in named.items()}
    trial.set_user_attr(COSTS, found)
    return {TOTAL: find_cost(costs)} | {name: cost.mean for name, cost in named.items()}


def name_models(names: Sequence[str]) -> list[str]:
    """What a study calls models: briefly, and no two alike."""
    short = shorten_names(names)
    counts = [short[:k].count(name) for k, name in enumerate(short)]
    return [
        printable(f"{name}~{count + 1}" if count else name)
        for name, count in zip(short, counts, strict=True)
    ]


def pin_sources(merger: Merger) -> Merger:
    """The same with models of the Hub by their commits: a branch may move during a search."""
    pinned = copy.copy(merger)
    pinned.base = download(merger.base)
    pinned.models = tuple(map(download, merger.models))
    pinned.tokenizer = pin_tokenizer(merger.tokenizer)
    pinned.chat_template = merger.chat_template and pin_tokenizer(merger.chat_template)
    return pinned


@contextmanager
def prepare_folder(folder: Path, keep: bool) -> Iterator[Path]:
    """Where models are written: there, to be kept, or in a folder of its own that goes away."""
    with ExitStack() as opened:
        try:
            if keep:
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = opened.enter_context(make_scratch(folder / ".sweep-"))
        except OSError as error:
            raise DareError(
                f"cannot write models in {str(folder)!r}: {error.strerror}",
                "give --keep-models DIR",
            ) from None
        yield folder


def merge_in_files(
    merger: Merger,
    inputs: Sequence[Checkpoint],
    config: DareConfig,
    evaluate: Evaluate,
    folder: Path,
    keep: bool,
) -> Score:
    """Models are written, each over the one before unless they are kept, and handed over by their
    path. config: to see whether they can be, now rather than later.
    """
    base = merger.base.path
    # Of the kind that the base is, so that what loads the base loads it.
    ending = base.suffix if base.is_file() and base.suffix == ".safetensors" else ""

    def configure(config: DareConfig) -> Merger:
        other = copy.copy(merger)
        other.config = config
        if not config.needs_examples:  # as the plain average
            other.config = config.without_examples()
            other.examples = ()
        return other

    def score(config: DareConfig | None, trial: Any, name: str) -> Any:
        if config is None:
            return evaluate(base.absolute(), trial)
        path = folder.absolute() / f"{name if keep else 'merged'}{ending}"
        if not keep:  # what an evaluation has put beside the last one's files goes, too
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        check_unchanged(inputs)  # scores of other models would not be comparable
        configure(config).merge(path, force=not keep)
        return evaluate(path, trial)

    configure(config).plan(folder.absolute() / f"merged{ending}", force=True)
    return score


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
    how = SearchOptions.of(**options)
    score, name = find_evaluation(evaluate, Terms(how.objectives, in_memory=True))
    if not finetuned:
        raise ConfigError("there are no models to merge", "give at least one state dict")
    config.check_models(len(finetuned))
    choices = Space(space, config, [f"model {k}" for k in range(len(finetuned))])
    states = (base, *finetuned) if how.storage else ()  # nothing else outlives this search
    facts = [{key: float(each.double().sum()) for key, each in state.items()} for state in states]
    return search_in_memory(base, finetuned, score, choices, how, model, name, facts)


def search_in_memory(
    base: Mapping[str, Any],
    finetuned: Sequence[Mapping[str, Any]],
    evaluate: Evaluate,
    space: Space,
    how: SearchOptions,
    model: Any,
    label: str,
    facts: Sequence[Any],
) -> SweepReport:
    """State dicts are merged, into a live model's tensors if there is one; nothing is written. The
    live model holds the winner in the end, or else the base.
    """
    memory = load_in_memory()
    solutions = memory.Solutions()
    out = None if model is None else model.state_dict()
    own_base, *own = separate([base, *finetuned], out or {})
    nothing = DareConfig(lambda_coeff=0.0, dtype=space.config.dtype)  # which gives the base

    def make(config: DareConfig | None) -> Any:
        """What is scored: a merged state dict, or the live model. None: the base."""
        merged = memory.merge_tensors(own_base, own, config or nothing, out, solutions=solutions)
        return merged if model is None else model

    def score(config: DareConfig | None, trial: Any, _: str) -> Any:
        return evaluate(make(config), trial)

    def leave(config: DareConfig | None) -> None:
        if model is not None:
            make(config)

    try:
        report = Search(space, score, how, label, facts).run()
    except BaseException:
        with suppress(DareError):  # which is what is raised already
            leave(None)
        raise
    leave(report.winner.config)
    return report


def separate(
    states: Sequence[Mapping[str, Any]], written: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """State dicts, the base first, as they can be merged into tensors again and again."""
    owners: dict[int, str] = {}  # by address, the first name of each tensor that is written
    tied = set()  # the other names: a tied head is merged once
    for name, tensor in written.items():
        if tensor.numel() and owners.setdefault(tensor.data_ptr(), name) != name:
            tied.add(name)
    base, *finetuned = (
        {name: tensor for name, tensor in state.items() if name not in tied} for state in states
    )
    for k, state in enumerate(states[1:]):
        if any(tensor.data_ptr() in owners for tensor in state.values()):
            raise DareError(
                f"model {k} and the live model share their memory", "give copies of its tensors"
            )
    # What is merged into the base's own tensors would be the base of the next merge.
    for name, tensor in base.items():
        base[name] = tensor.clone() if tensor.data_ptr() in owners else tensor
    return [base, *finetuned]


def is_as_stored(model: Checkpoint) -> bool:
    """Whether a model is what its files hold, by the names that its tensors have there."""
    names = {name for file in model.files for name in file.tensors}
    return type(model) is Checkpoint and model.tensors.keys() <= names


def load_states(inputs: Sequence[Checkpoint], model: Any) -> list[dict[str, Any]]:
    """The tensors of models in files, on the device of a live model if there is one."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise DareError(
            "models in memory need torch and safetensors", install_hint("torch")
        ) from None
    device = "cpu" if model is None else str(next(iter(model.state_dict().values())).device)
    if odd := next((each for each in inputs if not is_as_stored(each)), None):
        raise DareError(
            f"{odd.name!r} is no whole model of plain weights, as is needed in memory",
            "search in files, or merge it alone first",
        )
    return [
        {
            name: tensor
            for file in each.files
            for name, tensor in load_file(file.path, device).items()
            if name in each.tensors
        }
        for each in inputs
    ]
