"""The search: Optuna chooses and remembers; here models are merged and scored."""

import dataclasses
import hashlib
import json
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self, TypeAlias
from urllib.parse import quote

from darelib.commands.sweep.results import (
    ScoredMerge,
    SweepReport,
    load_optuna,
    name_choice,
    quiet_optuna,
)
from darelib.commands.sweep.scores import EvaluationFailed, Objective, read_scores
from darelib.commands.sweep.space import Space, equal_lambda, identify
from darelib.config import DareConfig, is_count, is_number
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, DareError, InputChanged, clip, duration, nearest

FACTS: Final = "what scores depend on"
TOTAL: Final = "score"  # of all files of examples
COSTS: Final = "costs by example"  # of a trial that is judged by examples
BASE: Final = "base"  # beside the trials, what the base scores
# Makes the model of a configuration (None: the base), which may be kept by a name, and evaluates it
# for a trial. What it gives is as yet unread.
Score: TypeAlias = Callable[[DareConfig | None, Any, str], Any]
# A grid's trials are queued: Optuna's own sampler for grids would also try what means nothing
# beside other choices, and would not try again what has failed.
SAMPLERS: Final = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "RandomSampler"}


@contextmanager
def explain_study_errors(storage: str | None) -> Iterator[None]:
    """What a study that cannot be opened, is damaged, or that another tool wrote, leads to."""
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
            "give another --storage, a URL like sqlite:///sweep.db in a directory that exists",
        ) from error


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """How to search. Each is a flag of the command, too."""

    # In all, those of earlier runs included. None: 30, or a grid's every combination.
    trials: int | None = None
    search: str = "tpe"
    objectives: tuple[Objective, ...] = (Objective("score", True),)
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
        if self.trials is not None and not is_count(self.trials, 1):
            raise ConfigError(
                f"trials must be a whole number from 1 up, not {self.trials!r}", "see --help"
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


def open_storage(optuna: Any, url: str | None) -> Any:
    for _ in range(10):
        try:
            return optuna.storages.get_storage(url)
        except Exception as error:  # another process may just be making the same tables
            if not re.search("already exists|UNIQUE|locked", str(error)):
                raise
        time.sleep(0.2)
    return optuna.storages.get_storage(url)


class Search:
    """A study that is under way."""

    def __init__(
        self,
        space: Space,
        evaluate: Score,
        options: SearchOptions,
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
        grid = space.list_combinations() if options.search == "grid" else []
        self.combinations = grid[: options.trials]
        self.wanted = len(self.combinations) or options.trials or 30
        self.digest = make_digest([facts, space.describe(), options.objectives])
        self.name = options.study or f"sweep-{make_digest([self.digest, label])}"

    def run(self) -> SweepReport:
        """Search until there are as many trials as are wanted, then score the plain average."""
        explained = explain_study_errors(self.options.storage)
        with quiet_optuna(), warn_once(), self.interrupts, explained:
            self.study = self._open_study()
            self.before = self._count_done()
            if self.before:
                LOG.info(f"going on with the study {self.name}: {self.before} trials are done")
            self._queue_grid()
            if not self._is_done():
                self._seed_sampler()
                self.study.optimize(self._try, callbacks=[self._finish], catch=(EvaluationFailed,))
            return self._report()

    def _open_study(self) -> Any:
        """The study of all that scores depend on, or the one that the user names.

        It is made once the base is scored, so that a bad evaluation leaves none.
        """
        url = self.options.storage
        storage = None if is_new_file(url) else open_storage(self.optuna, url)
        is_known = storage and self.name in self.optuna.get_all_study_names(storage)
        base = None if is_known else self._score_base()
        study = self.optuna.create_study(
            storage=storage or open_storage(self.optuna, url),
            study_name=self.name,
            directions=[each.direction for each in self.options.objectives],
            load_if_exists=True,
        )
        has_scores = study.get_trials(deepcopy=False) or BASE in study.user_attrs
        if has_scores and study.user_attrs.get(FACTS) != self.digest:
            raise ConfigError(
                f"the study {self.name!r} is of other models, settings or values",
                "give it another name",
            )
        study.set_metric_names([each.name for each in self.options.objectives])
        study.set_user_attr(FACTS, self.digest)
        if base:
            study.set_user_attr(BASE, base)
        return study

    def _queue_grid(self) -> None:
        """Let Optuna hand out what is left of a grid, to this process and to others."""
        # What seems to run may have been killed: it is queued as the last, and its scores are used
        # if there are any by then.
        known = {
            identify(trial.system_attrs.get("fixed_params", trial.params)): trial.state
            for trial in self._trials()
        }
        for wanted in ((None, self.states.FAIL), (self.states.RUNNING,)):
            for params in self.combinations:
                if known.get(identify(params)) in wanted:
                    self.study.enqueue_trial(params)

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
        sampler = getattr(self.optuna.samplers, SAMPLERS[self.options.search])
        self.study.sampler = sampler(seed=seed)

    def _score_base(self) -> list[float]:
        try:
            return self._score(None, self.optuna.trial.FixedTrial({}), BASE)
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
            model = quote(f"{self.name}-{name.replace(' ', '-')}", safe="")
            return read_scores(self.evaluate(config, trial, model), self.options.objectives)
        except self.optuna.TrialPruned:
            if isinstance(trial, self.optuna.trial.FixedTrial):
                raise EvaluationFailed("it was pruned") from None
            raise
        except DareError:
            raise
        except (Exception, SystemExit) as error:
            raise EvaluationFailed(f"{type(error).__name__}: {error}") from error

    def _recall(self, key: str, config: DareConfig | None) -> list[float]:
        """Scores beside the trials, which the study remembers as well."""
        if key not in self.study.user_attrs:
            scores = self._score(config, self.optuna.trial.FixedTrial({}), key)
            self.study.set_user_attr(key, scores)
        stored = self.study.user_attrs[key]
        if len(stored) != len(self.options.objectives) or not all(map(is_number, stored)):
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
            self.failed.add(trial.number)
            raise EvaluationFailed(str(error)) from None

    def _finish(self, study: Any, trial: Any) -> None:
        """Show a trial, and prepare the next, unless it was the last."""
        done = self._count_done()
        outcome = trial.user_attrs.get("why") or " ".join(f"{value:g}" for value in trial.values)
        if len(self.options.objectives) == 1 and self._trials(self.states.COMPLETE):
            outcome += f" (best {study.best_value:g})"
        rate = (time.perf_counter() - self.started) / max(1, done - self.before)
        left = self.wanted - done + len(self.space.list_lambdas())
        LOG.log(
            logging.WARNING if trial.number in self.failed else logging.INFO,
            f"trial {trial.number}: {clip(name_choice(trial.params), 100)}: {outcome}, "
            f"{trial.duration.total_seconds():.1f} s; {done} of {self.wanted} done, "
            f"{duration(rate * left)} left",
        )
        if self._is_done():
            study.stop()
        self._seed_sampler()
        self.interrupts.check()

    def _report(self) -> SweepReport:
        """All trials, of those that chose the same the first, and what they are compared with."""
        rows: dict[frozenset[Any], ScoredMerge] = {}
        for trial in self._trials(self.states.COMPLETE):
            config = self.space.choose(self.optuna.trial.FixedTrial(trial.params))
            row = ScoredMerge(trial.number, trial.params, config, trial.values)
            rows.setdefault(identify(trial.params), row)
        trials = self._trials()
        failures = [(t.number, t.user_attrs["why"]) for t in trials if "why" in t.user_attrs]
        if not rows:
            why = failures[0][1] if failures else "was stopped"
            raise DareError(
                f"no trial could be scored; the first {why}", "fix the evaluation or the space"
            )
        numbers = {row.number for row in rows.values()}
        report = SweepReport(
            self.options.objectives,
            list(rows.values()),
            self._recall(BASE, None),
            failures,
            [trial.number for trial in self.study.best_trials if trial.number in numbers],
            trials,
            study=self.name,
        )
        return dataclasses.replace(
            report,
            averages=self._score_averages(report.best.config),
            rivals=self._find_rivals(report),
            ends=self.space.find_ends(report.best.params),
            seconds=time.perf_counter() - self.started,
        )

    def _find_rivals(self, report: SweepReport) -> list[int]:
        """Trials that differ from the best by less than the error of what judges them."""
        known = {t.number: t.user_attrs.get(COSTS) for t in report.trials}
        numbers = [k for row in report.rows if (k := row.number) is not None and known[k]]
        best = report.best.number
        [name, *others] = [each.name for each in self.options.objectives]
        if others or best not in numbers:
            return []
        import numpy as np

        from darelib.output.judged import Cost, find_rivals

        costs = []
        for number in numbers:
            files = [file for skill, file in known[number].items() if name in (TOTAL, skill)]
            costs.append([Cost(*map(np.array, file)) for file in files])
        return [numbers[k] for k in find_rivals(costs, numbers.index(best))]

    def _score_averages(self, best: DareConfig) -> list[ScoredMerge]:
        """The plain average with lambdas from the same range, and as long as the best merge."""
        if not self.space.count:
            return []
        LOG.info("scoring the plain average, which the best is compared with")
        averages = []
        for scale in sorted({*self.space.list_lambdas(), equal_lambda(best, self.space.count)}):
            self.interrupts.check()
            config = self.space.plain_average(scale)
            try:
                scores = self._recall(f"plain average lambda {scale!r}", config)
                averages.append(ScoredMerge(None, {"lambda_coeff": scale}, config, scores))
            except InputChanged:
                raise
            except DareError as error:
                LOG.warning(f"the plain average with lambda {scale:g} has no score: {error}")
        return averages


def make_digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
