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
from types import FrameType
from typing import Any, Final, TypeAlias
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
    nearest,
)

FACTS: Final = "what scores depend on"
# Makes the model of a configuration (None: the base), which may be kept by a name, and evaluates it
# for a trial. What it gives is as yet unread.
Score: TypeAlias = Callable[[DareConfig | None, Any, str], Any]
SEARCHES: Final = ("tpe", "cmaes", "random", "grid")
FINALISTS: Final = 3  # how many of the best are scored again
ATTEMPTS: Final = 10  # to open a study that another process may just be making


@dataclasses.dataclass(frozen=True)
class Options:
    """How to search. Each is a flag of the command, too."""

    # In all, those of earlier runs included. None: 30, or a grid's every combination.
    trials: int | None = None
    search: str = "tpe"
    objectives: Sequence[str] = ("score:max",)
    confirm: int = 5  # fresh seeds with which the best few are scored again
    storage: str | None = None  # where the study is kept, as a URL; None: in memory
    study: str | None = None  # its name; None: made from all that scores depend on

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise ConfigError(f"there is no search {self.search!r}", nearest(self.search, SEARCHES))
        if len({each.name for each in self.aims}) < len(self.aims):
            raise ConfigError("two objectives have one name", "give each score once")
        if self.search == "cmaes" and len(self.aims) > 1:
            raise ConfigError("search cmaes takes one objective", "use tpe or random")
        if self.trials is not None and not is_count(self.trials, 1):
            raise ConfigError(f"trials must be a whole number, not {self.trials!r}", "at least 1")
        if self.confirm != 0 and not is_count(self.confirm, 3):
            raise ConfigError(
                f"confirm must be 0 or a whole number from 3 up, not {self.confirm!r}",
                "fewer seeds say nothing about chance",
            )

    @property
    def aims(self) -> tuple[Objective, ...]:
        return tuple(map(Objective.of, self.objectives))


class StopAfterTrial(Interrupts):
    """Holds a first Ctrl-C back until a trial is done; a second one, or SIGTERM, stops at once."""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))  # first, since the next one may come at any moment
        if len(self._caught) > 1 or number == signal.SIGTERM:
            self._before[number](number, frame)
        LOG.warning("stopping after this trial; once more to stop at once")


def run_search(
    space: Space, evaluate: Score, options: Options, label: str, facts: Sequence[Any]
) -> SweepReport:
    """label: of the evaluation; facts: what else scores depend on, besides the settings."""
    ranges = [axis for _, axis in space.list_axes() if not isinstance(axis, tuple)]
    if options.search == "cmaes" and len(ranges) < 2:
        raise ConfigError("search cmaes needs two ranges or more", "use tpe")
    combinations = space.list_combinations() if options.search == "grid" else []
    with (
        keep_quiet(space.optuna),
        explain_study_errors(options.storage),
        StopAfterTrial() as interrupts,
    ):
        study = open_study(space, options, label, facts)
        search = Search(study, space, evaluate, options, interrupts)
        return search.run(combinations[: options.trials])


@contextmanager
def keep_quiet(optuna: Any) -> Iterator[None]:
    """Optuna reports every trial, which is done here, and every merge warns of the same things:
    once is enough. Afterwards all is as loud as it was.
    """
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        known = record.levelno >= logging.WARNING and record.getMessage() in seen
        seen.add(record.getMessage())
        return not known

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    LOG.addFilter(is_new)
    try:
        yield
    finally:
        LOG.removeFilter(is_new)
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def explain_study_errors(storage: str | None) -> Iterator[None]:
    """What a study that cannot be opened, is damaged or was written by another tool leads to."""
    try:
        yield
    except (DareError, ImportError):
        raise
    except Exception as error:  # whatever a database may come up with
        if storage is None:  # nothing of it comes from elsewhere
            raise
        reason = str(error).partition("\n")[0]
        raise DareError(
            f"the study in {storage!r} cannot be used: {type(error).__name__}: {reason}",
            "move it elsewhere, or give another --storage, a URL like sqlite:///sweep.db",
        ) from error


def open_study(space: Space, options: Options, label: str, facts: Sequence[Any]) -> Any:
    """The study of all that scores depend on, or the one that the user names."""
    rules = [rule.as_table() for rule in space.config.typed_rules]
    aims = [dataclasses.astuple(objective) for objective in options.aims]
    settings = [space.config.recipe_settings(), rules]
    digest = make_digest([facts, settings, aims, repr((space.axes, space.rules))])
    name = options.study or f"sweep-{make_digest([digest, label])}"
    directions = ["maximize" if each.maximize else "minimize" for each in options.aims]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            study = space.optuna.create_study(
                storage=options.storage, study_name=name, directions=directions, load_if_exists=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", space.optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([each.name for each in options.aims])
            break
        except Exception as error:  # whatever a database may come up with
            is_busy = re.search("already exists|UNIQUE|locked", str(error))
            if attempt == ATTEMPTS or not is_busy:
                raise
            time.sleep(0.2)
    made_here = digest if not study.get_trials(deepcopy=False) else None
    if study.user_attrs.get(FACTS, made_here) != digest:
        raise ConfigError(
            f"the study {name!r} is of other models, settings or values", "give it another name"
        )
    study.set_user_attr(FACTS, digest)
    return study


def make_digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


class Search:
    def __init__(
        self,
        study: Any,
        space: Space,
        evaluate: Score,
        options: Options,
        interrupts: Interrupts,
    ) -> None:
        self.optuna = space.optuna
        self.study = study
        self.space = space
        self.evaluate = evaluate
        self.options = options
        self.objectives = options.aims
        self.interrupts = interrupts
        self.states = space.optuna.trial.TrialState
        self.started = time.perf_counter()
        self.wanted = options.trials or 30
        self.failed = 0  # trials of this run

    def _score_base(self) -> None:
        try:
            self._recall("base", None)
        except DareError as error:
            if self.options.storage and not self._trials():
                name = self.study.study_name
                self.optuna.delete_study(study_name=name, storage=self.options.storage)
            for line in getattr(error, "output", "").splitlines():
                LOG.info(f"| {line}")
            raise DareError(
                f"the evaluation cannot score the base: {error}", "fix it first; nothing was merged"
            ) from None

    def run(self, combinations: Sequence[dict[str, Any]]) -> SweepReport:
        """Search until there are as many trials as are wanted, then score the best few again.

        combinations: those of a grid, of which every one is tried.
        """
        self._score_base()
        done = len(self._trials(self.states.COMPLETE))
        if done:
            LOG.info(f"going on with the study {self.study.study_name}: {done} trials are done")
        self.wanted = len(combinations) or self.wanted
        self._queue(combinations)
        if self._count_left() > 0:
            self._seed_sampler()
            self.study.optimize(self._try, callbacks=[self._finish], catch=(EvaluationFailed,))
        return self._confirm()

    def _trials(self, *states: Any) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _queue(self, combinations: Sequence[dict[str, Any]]) -> None:
        """Let Optuna hand out what is left of a grid, to this process and to others."""
        # What seems to run may have been killed: it is queued as the last, and its scores are used
        # if there are any by then.
        known = {
            identify(trial.system_attrs.get("fixed_params", trial.params)): trial.state
            for trial in self._trials()
        }
        for wanted in ((None, self.states.FAIL), (self.states.RUNNING,)):
            for params in combinations:
                if known.get(identify(params)) in wanted:
                    self.study.enqueue_trial(params)

    def _count_left(self) -> int:
        """How many trials are to come. What failed before is tried again: its cause may be gone."""
        if self.options.search == "grid":
            return len(self._trials(self.states.WAITING))
        done = self._trials(self.states.COMPLETE, self.states.PRUNED)
        return self.wanted - len(done) - self.failed

    def _seed_sampler(self) -> None:
        # A run that goes on, or another process, must not choose the same again.
        seed = (self.space.config.seed + len(self._trials())) % 2**32
        if self.options.search == "tpe":
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed)
        elif self.options.search == "cmaes":
            from darelib.commands.sweep.evolution import CmaEsSampler

            self.study.sampler = CmaEsSampler(seed)
        else:  # a grid's trials are queued, so that nothing of them is left to chance
            self.study.sampler = self.optuna.samplers.RandomSampler(seed=seed)

    def _score(self, config: DareConfig | None, trial: Any, name: str) -> list[float]:
        """The scores of a merge, or of the base; whatever an evaluation raises is its failure."""
        try:
            # A study may be called a/b.
            model = quote(f"{self.study.study_name}-{name.replace(' ', '-')}", safe="")
            return read_scores(self.evaluate(config, trial, model), self.objectives)
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
        if len(stored) != len(self.objectives) or not all(map(is_number, stored)):
            raise ValueError(f"its scores of {key} are {stored!r}")
        return list(stored)

    def _try(self, trial: Any) -> Sequence[float]:
        try:
            config = self.space.choose(trial)
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
            self.failed += 1
            raise EvaluationFailed(str(error)) from None

    def _finish(self, study: Any, trial: Any) -> None:
        """Show a trial, and prepare the next, unless it was the last."""
        left = self._count_left()
        outcome = trial.user_attrs.get("why") or " ".join(f"{value:g}" for value in trial.values)
        if len(self.objectives) == 1 and self._trials(self.states.COMPLETE):
            outcome += f" (best {study.best_value:g})"
        LOG.log(
            logging.WARNING if trial.state == self.states.FAIL else logging.INFO,
            f"[{self.wanted - left}/{self.wanted}] {clip(name_choice(trial.params), 100)}: "
            f"{outcome}, {trial.duration.total_seconds():.1f} s",
        )
        if left <= 0:
            study.stop()
        self._seed_sampler()
        self.interrupts.check()

    def _confirm(self) -> SweepReport:
        """Score the best few with fresh seeds, and the plain average with several lambdas."""
        report = self._report()
        finalists = report.ranked[:FINALISTS]
        LOG.info("scoring the best again with fresh seeds, and the plain average to compare with")
        for row in finalists:
            for k in range(1, self.options.confirm + 1 if row.draws else 1):
                # Model i draws with seed + i, so that seeds which share no mask are as far apart
                # as there are models.
                seed = row.config.seed + k * self.space.count
                config = dataclasses.replace(row.config, seed=seed)
                row.confirmed.extend(self._try_again(f"trial {row.number} seed {seed}", config))
        lambdas = {equal_lambda(row.config, self.space.count) for row in finalists}
        scales = sorted(lambdas.union(self.space.list_lambdas()))
        for scale in scales if self.space.count else ():  # of no models, there is no average
            config = self.space.plain_average(scale)
            for scores in self._try_again(f"plain average lambda {scale!r}", config):
                report.averages.append(Row(None, {"lambda_coeff": scale}, config, scores))
        return dataclasses.replace(report, seconds=time.perf_counter() - self.started)

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
            why = f"the first {failures[0][1]}" if failures else "nothing fits together"
            raise DareError(f"no trial could be scored; {why}", "fix the evaluation or the space")
        return SweepReport(
            self.objectives,
            list(rows.values()),
            self._recall("base", None),
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
