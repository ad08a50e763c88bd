"""The search itself, by Optuna: it chooses and remembers; here models are merged and scored."""

import dataclasses
import hashlib
import json
import logging
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self, TypeAlias
from urllib.parse import quote

from darelib.commands.sweep.evaluation import EvaluationFailed, Objective, read_scores
from darelib.commands.sweep.report import Row, SweepReport, name_choice
from darelib.commands.sweep.space import Space, draws_masks, equal_lambda, identify
from darelib.config import DareConfig, is_count, is_number
from darelib.core.interrupts import Interrupts
from darelib.core.text import (
    LOG,
    ConfigError,
    DareError,
    InputChanged,
    clip,
    duration,
    install_hint,
    nearest,
)

FACTS: Final = "what scores depend on"
BASE: Final = "base"  # beside the trials, what the base scores
# Makes the model of a configuration (None: the base), which may be kept by a name, and evaluates it
# for a trial. What it gives is as yet unread.
Score: TypeAlias = Callable[[DareConfig | None, Any, str], Any]
FINALISTS: Final = 3  # how many of the best are scored again
# A grid's trials are queued, so that nothing of them is left to chance.
SAMPLERS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "tpe": lambda samplers, seed: samplers.TPESampler(seed=seed),
    "cmaes": lambda samplers, seed: load_evolution().CmaEsSampler(seed),
    "random": lambda samplers, seed: samplers.RandomSampler(seed=seed),
    "grid": lambda samplers, seed: samplers.RandomSampler(seed=seed),
}


def load_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise DareError("a sweep needs Optuna", install_hint("sweep")) from None
    return optuna


def load_evolution() -> Any:
    try:
        from darelib.commands.sweep import evolution
    except ImportError:
        raise DareError("search cmaes needs cmaes", install_hint("sweep")) from None
    return evolution


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna reports every trial, which is done here; afterwards it is as loud as it was."""
    optuna = load_optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def explain_study_errors(storage: str | None) -> Iterator[None]:
    """What a study that is damaged, or that another tool wrote, leads to."""
    try:
        yield
    except DareError:
        raise
    except Exception as error:  # whatever a database may come up with
        if storage is None:  # nothing of it comes from elsewhere
            raise
        reason = str(error).partition("\n")[0]
        raise DareError(
            f"the study in {storage!r} cannot be used: {type(error).__name__}: {reason}",
            "move it elsewhere, or give another --storage",
        ) from error


@dataclasses.dataclass(frozen=True)
class Options:
    """How to search. Each is a flag of the command, too."""

    # In all, those of earlier runs included. None: 30, or a grid's every combination.
    trials: int | None = None
    search: str = "tpe"
    objectives: tuple[Objective, ...] = (Objective("score", True),)
    confirm: int = 5  # fresh seeds with which the best few are scored again
    storage: str | None = None  # where the study is kept, as a URL; None: in memory
    study: str | None = None  # its name; None: made from all that scores depend on

    @classmethod
    def of(cls, objectives: Sequence[str] = ("score:max",), **options: Any) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        if odd := next((name for name in options if name not in known), None):
            raise ConfigError(f"a sweep has no option {odd!r}", nearest(odd, known))
        if isinstance(objectives, str) or not objectives:
            raise ConfigError("objectives must be a list", 'like ["accuracy:max"]')
        parsed = tuple(map(Objective.of, objectives))
        if len({each.name for each in parsed}) < len(parsed):
            raise ConfigError("two objectives have one name", "give each score once")
        return cls(objectives=parsed, **options)

    def __post_init__(self) -> None:
        if self.search not in SAMPLERS:
            raise ConfigError(f"there is no search {self.search!r}", nearest(self.search, SAMPLERS))
        if self.search == "cmaes" and len(self.objectives) > 1:
            raise ConfigError("search cmaes takes one objective", "use tpe or random")
        for name, least in (("trials", 1), ("confirm", 0)):
            value = getattr(self, name)
            if value is not None and not is_count(value, least):
                raise ConfigError(
                    f"{name} must be a whole number from {least} up, not {value!r}", "see --help"
                )
        if self.confirm in (1, 2):
            raise ConfigError(
                "so few fresh seeds say nothing about chance", "give --confirm 3 or more, or 0"
            )


class StopAfterTrial(Interrupts):
    """Holds a first Ctrl-C back until a trial is done; a second one, or SIGTERM, stops at once."""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))  # first, since the next one may come at any moment
        if len(self._caught) > 1 or number == signal.SIGTERM:
            self._before[number](number, frame)
        LOG.warning("stopping after this trial; once more to stop at once")


@contextmanager
def warn_once() -> Iterator[None]:
    """Every merge warns of the same things; once is enough."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        known = record.levelno >= logging.WARNING and record.getMessage() in seen
        seen.add(record.getMessage())
        return not known

    LOG.addFilter(is_new)
    try:
        yield
    finally:
        LOG.removeFilter(is_new)


def is_new_file(storage: str | None) -> bool:
    """Whether a study would be the first in its file, which can be made."""
    path = Path((storage or "").partition("sqlite:///")[2].partition("?")[0])
    return path.parent.is_dir() and not path.exists()


def open_study(
    optuna: Any, space: Space, options: Options, label: str, facts: Sequence[Any]
) -> Any:
    """The study of all that scores depend on, or the one that the user names."""
    rules = [rule.as_table() for rule in space.config.typed_rules]
    aims = [dataclasses.astuple(objective) for objective in options.objectives]
    settings = [space.config.recipe_settings(), rules]
    digest = make_digest([facts, settings, aims, repr((space.axes, space.rules))])
    name = options.study or f"sweep-{make_digest([digest, label])}"
    directions = ["maximize" if each.maximize else "minimize" for each in options.objectives]
    for attempt in range(10):
        try:
            study = optuna.create_study(
                storage=options.storage, study_name=name, directions=directions, load_if_exists=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([each.name for each in options.objectives])
            break
        except Exception as error:  # whatever a database may come up with
            reason = str(error).partition("\n")[0]
            # Another process may just be making it.
            if attempt == 9 or not re.search("already exists|UNIQUE|locked", reason):
                raise DareError(
                    f"cannot open the study {name!r} in {options.storage!r}: {reason}",
                    "--storage takes a URL like sqlite:///sweep.db; the directory must exist",
                ) from None
            time.sleep(0.2)
    has_scores = study.get_trials(deepcopy=False) or BASE in study.user_attrs
    if has_scores and study.user_attrs.get(FACTS) != digest:
        raise ConfigError(
            f"the study {name!r} is of other models, settings or values", "give it another name"
        )
    study.set_user_attr(FACTS, digest)
    return study


def queue_grid(study: Any, states: Any, combinations: Sequence[dict[str, Any]]) -> None:
    """Let Optuna hand out what is left of a grid, to this process and to others."""
    # What seems to run may have been killed: it is queued as the last, and its scores are used if
    # there are any by then.
    known = {
        identify(trial.system_attrs.get("fixed_params", trial.params)): trial.state
        for trial in study.get_trials(deepcopy=False)
    }
    for wanted in ((None, states.FAIL), (states.RUNNING,)):
        for params in combinations:
            if known.get(identify(params)) in wanted:
                study.enqueue_trial(params)


class Search:
    """A study that is under way."""

    def __init__(
        self,
        space: Space,
        evaluate: Score,
        options: Options,
        label: str,
        facts: Sequence[Any],
    ) -> None:
        """label: of the evaluation; facts: what else scores depend on, besides the settings."""
        self.space = space
        self.evaluate = evaluate
        self.options = options
        self.optuna = load_optuna()
        self.states = self.optuna.trial.TrialState
        self.interrupts = StopAfterTrial()
        self.started = time.perf_counter()
        self.failed: set[int] = set()  # the trials of this run
        self.draws = False  # whether any of them has dropped at random
        if options.search == "cmaes" and space.count_ranges() < 2:
            raise ConfigError("search cmaes needs two ranges or more", "use tpe")
        grid = space.list_combinations() if options.search == "grid" else []
        self.combinations = grid[: options.trials]
        self.wanted = len(self.combinations) or options.trials or 30
        self._open = partial(open_study, self.optuna, space, label=label, facts=facts)
        # A new file is made once the base is scored, so that a bad evaluation leaves none.
        self.is_new = is_new_file(options.storage)
        first = dataclasses.replace(options, storage=None) if self.is_new else options
        with quiet_optuna(), explain_study_errors(options.storage):
            self.study = self._open(first)
            self.before = self._count_done()

    def run(self) -> SweepReport:
        """Search until there are as many trials as are wanted, then score the best few again."""
        explained = explain_study_errors(self.options.storage)
        with quiet_optuna(), warn_once(), self.interrupts, explained:
            base = self._score_base()
            if self.is_new:
                self.study = self._open(self.options)
                self.study.set_user_attr(BASE, base)
            if self.before:
                name = self.study.study_name
                LOG.info(f"going on with the study {name}: {self.before} trials are done")
            queue_grid(self.study, self.states, self.combinations)
            if not self._is_done():
                self._seed_sampler()
                self.study.optimize(self._try, callbacks=[self._finish], catch=(EvaluationFailed,))
            return self._confirm()

    def _trials(self, *states: Any) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _count_done(self) -> int:
        """How many trials are through. What failed before is not: its cause may be gone."""
        through = (self.states.COMPLETE, self.states.PRUNED)
        done = [t for t in self._trials() if t.state in through or t.number in self.failed]
        if not self.combinations:
            return len(done)
        return len({identify(t.params) for t in done} & set(map(identify, self.combinations)))

    def _is_done(self) -> bool:
        if self.combinations and not self._trials(self.states.WAITING):
            return True  # or others try the rest
        return self._count_done() >= self.wanted

    def _seed_sampler(self) -> None:
        # A run that goes on, or another process, must not choose the same again.
        seed = (self.space.config.seed + len(self._trials())) % 2**32
        self.study.sampler = SAMPLERS[self.options.search](self.optuna.samplers, seed)

    def _score_base(self) -> list[float]:
        try:
            return self._recall(BASE, None)
        except DareError as error:
            for line in getattr(error, "output", "").splitlines():
                LOG.info(f"| {line}")
            raise DareError(
                f"the evaluation cannot score the base: {error}", "fix it first; nothing was merged"
            ) from None

    def _score(self, config: DareConfig | None, trial: Any, name: str) -> list[float]:
        """The scores of a merge, or of the base; whatever an evaluation raises is its failure."""
        try:
            # A study may be called a/b.
            model = quote(f"{self.study.study_name}-{name.replace(' ', '-')}", safe="")
            return read_scores(self.evaluate(config, trial, model), self.options.objectives)
        except (DareError, self.optuna.TrialPruned):
            raise
        except (Exception, SystemExit) as error:
            raise EvaluationFailed(f"{type(error).__name__}: {error}") from error

    def _recall(self, key: str, config: DareConfig | None) -> list[float]:
        """Scores beside the trials, which the study remembers as well."""
        if key not in self.study.user_attrs:
            try:
                scores = self._score(config, self.optuna.trial.FixedTrial({}), key)
            except self.optuna.TrialPruned:
                raise EvaluationFailed("it was pruned") from None
            self.study.set_user_attr(key, scores)
        stored = self.study.user_attrs[key]
        if len(stored) != len(self.options.objectives) or not all(map(is_number, stored)):
            raise ValueError(f"its scores of {key} are {stored!r}")
        return list(stored)

    def _try(self, trial: Any) -> Sequence[float]:
        try:
            config = self.space.choose(trial)
            self.draws |= draws_masks(config, self.space.count)
            for other in self._trials(self.states.COMPLETE):
                if other.params == trial.params:
                    return other.values
            return self._score(config, trial, f"trial-{trial.number:04}")
        except (ConfigError, self.optuna.TrialPruned) as error:
            is_refused = isinstance(error, ConfigError)
            trial.set_user_attr("why", f"left out: {error}" if is_refused else "pruned")
            raise self.optuna.TrialPruned from None
        except InputChanged:
            raise
        except DareError as error:
            trial.set_user_attr("why", f"failed: {error}")
            trial.set_user_attr("output", getattr(error, "output", ""))
            self.failed.add(trial.number)
            raise EvaluationFailed(str(error)) from None

    def _finish(self, study: Any, trial: Any) -> None:
        """Show a trial, and prepare the next, unless it was the last."""
        done = self._count_done()
        outcome = trial.user_attrs.get("why") or " ".join(f"{value:g}" for value in trial.values)
        if len(self.options.objectives) == 1 and self._trials(self.states.COMPLETE):
            outcome += f" (best {study.best_value:g})"
        rate = (time.perf_counter() - self.started) / max(1, done - self.before)
        left = self.wanted - done + self._count_after()
        LOG.log(
            logging.WARNING if trial.number in self.failed else logging.INFO,
            f"[{done}/{self.wanted}] {clip(name_choice(trial.params), 100)}: {outcome}, "
            f"{trial.duration.total_seconds():.1f} s, {duration(rate * left)} left",
        )
        if self._is_done():
            study.stop()
        self._seed_sampler()
        self.interrupts.check()

    def _count_after(self) -> int:
        """About how many merges are scored after the trials."""
        seeds = self.options.confirm if self.draws else 0
        return min(FINALISTS, self.wanted) * seeds + len(self.space.list_lambdas())

    def _confirm(self) -> SweepReport:
        """Score the best few with fresh seeds, and the plain average with several lambdas."""
        report = self._report()
        finalists = report.ranked[:FINALISTS]
        if self.options.confirm and any(row.draws for row in finalists):
            LOG.info("scoring the best again with fresh seeds")
        LOG.info("scoring the plain average, which is what they are compared with")
        for row in finalists:
            for k in range(1, self.options.confirm + 1 if row.draws else 1):
                # Model i draws with seed + i, so that seeds which share no mask are as far apart
                # as there are models.
                seed = row.config.seed + k * self.space.count
                config = dataclasses.replace(row.config, seed=seed)
                row.confirmed.extend(self._try_again(f"trial {row.number} seed {seed}", config))
        lambdas = {equal_lambda(row.config, self.space.count) for row in finalists}
        averages = []
        scales = sorted(lambdas.union(self.space.list_lambdas()))
        for scale in scales if self.space.count else ():  # of no models, there is no average
            config = self.space.plain_average(scale)
            for scores in self._try_again(f"plain average lambda {scale!r}", config):
                averages.append(Row(None, {"lambda_coeff": scale}, config, scores))
        return dataclasses.replace(
            report, averages=averages, seconds=time.perf_counter() - self.started
        )

    def _report(self) -> SweepReport:
        """All trials, of those that chose the same the first; nothing is confirmed yet."""
        rows: dict[frozenset[Any], Row] = {}
        for trial in self._trials(self.states.COMPLETE):
            config = self.space.choose(self.optuna.trial.FixedTrial(trial.params))
            draws = draws_masks(config, self.space.count)
            row = Row(trial.number, trial.params, config, trial.values, draws)
            rows.setdefault(identify(trial.params), row)
        failures = [
            (t.number, t.user_attrs["why"]) for t in self._trials() if "why" in t.user_attrs
        ]
        if not rows:
            why = failures[0][1] if failures else "was stopped"
            raise DareError(
                f"no trial could be scored; the first {why}", "fix the evaluation or the space"
            )
        return SweepReport(
            self.options.objectives,
            list(rows.values()),
            self._recall(BASE, None),
            failures,
            study=self.study.study_name,
        )

    def _try_again(self, key: str, config: DareConfig) -> list[list[float]]:
        self.interrupts.check()
        try:
            return [self._recall(key, config)]
        except InputChanged:
            raise
        except DareError as error:
            LOG.warning(f"{key} could not be scored: {error}")
            return []


def make_digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
