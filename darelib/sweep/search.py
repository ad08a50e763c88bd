"""The search itself, on Optuna: its samplers choose, its storage remembers; here models are merged and scored."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from darelib.config import DareConfig
from darelib.interrupts import Interrupts
from darelib.sweep.bench import Bench
from darelib.sweep.evaluation import EvaluationFailed, Objective, read_scores
from darelib.sweep.report import Row, SweepReport, name_choice
from darelib.sweep.space import Space
from darelib.text import LOG, ConfigError, DareError, InputChanged, clip, duration, install_hint, nearest

FINALISTS: Final = 3  # how many of the best are scored again
SAMPLERS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "tpe": lambda samplers, seed: samplers.TPESampler(seed=seed),
    "cmaes": lambda samplers, seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "random": lambda samplers, seed: samplers.RandomSampler(seed=seed),
    "grid": lambda samplers, seed: samplers.RandomSampler(seed=seed),  # of which nothing is left to chance
}


def load_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise DareError("a sweep needs Optuna", install_hint("sweep")) from None


@dataclasses.dataclass(frozen=True)
class Options:
    """How to search. Each is a flag of the command, too."""

    trials: int | None = None  # in all, those of earlier runs included; None: 30, or a grid's every combination
    search: str = "tpe"
    objectives: tuple[Objective, ...] = (Objective("score", True),)
    confirm: int = 5  # fresh seeds with which the best few are scored again
    storage: str | None = None  # where the study is kept, as a URL; None: in memory
    study: str | None = None  # its name; None: made from all that scores depend on

    @classmethod
    def of(cls, objectives: Sequence[str | Objective] = ("score:max",), **options: Any) -> Options:
        known = {field.name for field in dataclasses.fields(cls)}
        if odd := next((name for name in options if name not in known), None):
            raise ConfigError(f"a sweep has no option {odd!r}", nearest(odd, known))
        if isinstance(objectives, str) or not objectives:
            raise ConfigError("objectives must be a list", 'like ["accuracy:max"]')
        parsed = tuple(each if isinstance(each, Objective) else Objective.of(each) for each in objectives)
        return cls(objectives=parsed, **options)

    def __post_init__(self) -> None:
        if self.search not in SAMPLERS:
            raise ConfigError(f"there is no search {self.search!r}", nearest(self.search, SAMPLERS))
        if self.search == "cmaes" and len(self.objectives) > 1:
            raise ConfigError("search cmaes takes one objective", "use tpe or random")
        for name, least in (("trials", 1), ("confirm", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} must be a whole number from {least} up, not {value!r}", "see --help")
        if self.confirm == 1:
            raise ConfigError("one more seed says nothing about chance", "give --confirm 3 or more, or 0")


class Patience(Interrupts):
    """Holds a first signal back until a trial is done; a second one stops at once."""

    def __enter__(self) -> Patience:
        super().__enter__()
        import signal

        for number in self._before:
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._caught:
            self.check()
        LOG.warning("stopping after this trial; once more to stop at once")
        self._caught.append((number, frame))


class OnlyOnce(logging.Filter):
    """Every merge warns of the same things; once is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.levelno < logging.WARNING or record.getMessage() not in self.seen
        self.seen.add(record.getMessage())
        return new


class Search:
    """A study that is under way."""

    def __init__(self, space: Space, bench: Bench, options: Options, facts: Sequence[Any]) -> None:
        """facts: all that scores depend on, besides the space and the objectives."""
        self.space, self.bench, self.options, self.optuna = space, bench, options, load_optuna()
        self.objectives, self.started = options.objectives, time.perf_counter()
        known = [facts, [dataclasses.astuple(each) for each in self.objectives], repr((space.axes, space.rules))]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
        self.combinations = list(space.list_combinations(self._fix)) if options.search == "grid" else []
        self.wanted = options.trials or len(self.combinations) or 30
        self.wanted = min(self.wanted, len(self.combinations) or self.wanted)
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        self.study = self._open_study(options.study or f"{'grid' if self.combinations else 'sweep'}-{digest[:12]}")
        if self.combinations and any(trial.params not in self.combinations for trial in self._complete()):
            raise ConfigError(f"the study {options.study!r} is of another search", "give a grid a study of its own")

    def _fix(self, params: dict[str, Any]) -> Any:
        return self.optuna.trial.FixedTrial(params)

    def _open_study(self, name: str) -> Any:
        ways = ["maximize" if objective.maximize else "minimize" for objective in self.objectives]
        warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
        try:
            sampler = self._make_sampler(0)
            study = self.optuna.create_study(
                storage=self.options.storage, study_name=name, directions=ways, sampler=sampler, load_if_exists=True
            )
            study.set_metric_names([objective.name for objective in self.objectives])
        except ImportError as error:
            raise DareError(f"this search needs {error.name}", install_hint("sweep")) from None
        except Exception as error:  # whatever a database may come up with
            reason = str(error).partition("\n")[0]
            raise DareError(
                f"cannot open the study {name!r} in {self.options.storage!r}: {reason}",
                "--storage takes a URL like sqlite:///sweep.db; the directory must exist",
            ) from None
        return study

    def _make_sampler(self, number: int) -> Any:
        """For one trial: a run that goes on, or another process, must not choose the same again."""
        seed = (self.space.config.seed + number) % 2**32  # as much as NumPy takes
        return SAMPLERS[self.options.search](self.optuna.samplers, seed)

    def run(self) -> SweepReport:
        """Search until there are as many trials as are wanted, then score the best few again."""
        once = OnlyOnce()
        LOG.addFilter(once)
        try:
            with Patience() as patience:
                self._score_base()
                if before := self._count_done():
                    LOG.info(f"going on with the study {self.study.study_name}: {before} trials are done")
                while (done := self._count_done()) < self.wanted and self._is_any_left():
                    patience.check()
                    self._try_one(done, before)
                report = self._confirm(patience)
        finally:
            LOG.removeFilter(once)
        return report

    def _count_done(self) -> int:
        """How many trials have a score, or a reason why not; those that were stopped do not count."""
        states, trials = self.optuna.trial.TrialState, self.study.get_trials(deepcopy=False)
        return sum(t.state.is_finished() and (t.state is not states.FAIL or "why" in t.user_attrs) for t in trials)

    def _is_any_left(self) -> bool:
        queue = self._queue()
        return not queue or len(self.study.get_trials(deepcopy=False)) < len(queue)

    def _queue(self) -> list[dict[str, Any]]:
        """What the trials of a grid choose, by their numbers, which no two processes share; last, what was stopped."""
        failed = self.study.get_trials(deepcopy=False, states=[self.optuna.trial.TrialState.FAIL])
        stopped = [trial.params for trial in failed if trial.params and "why" not in trial.user_attrs]
        return [*self.combinations, *stopped] if self.combinations else []

    def _score_base(self) -> None:
        try:
            self._recall("base", None)
        except (EvaluationFailed, DareError) as error:
            for line in getattr(error, "output", "").splitlines():
                LOG.info(f"| {line}")
            raise DareError(
                f"the evaluation cannot score the base: {error}", "fix it first; nothing was merged"
            ) from None

    def _score(self, config: DareConfig | None, trial: Any, name: str) -> list[float]:
        """The scores of a merge, or of the base; whatever somebody's evaluation comes up with is its failure."""
        try:
            return read_scores(self.bench.score(config, trial, name), self.objectives)
        except (DareError, self.optuna.TrialPruned):
            raise
        except Exception as error:
            raise EvaluationFailed(f"{type(error).__name__}: {error}") from error

    def _recall(self, key: str, config: DareConfig | None) -> list[float]:
        """Scores beside the trials, which the study remembers as well."""
        if key not in self.study.user_attrs:
            self.study.set_user_attr(key, self._score(config, self._fix({}), key.replace(" ", "-")))
        return list(self.study.user_attrs[key])

    def _try_one(self, done: int, before: int) -> None:
        sampler = self._make_sampler(len(self.study.get_trials(deepcopy=False)))
        self.study.sampler = sampler
        trial, states, started = self.study.ask(), self.optuna.trial.TrialState, time.perf_counter()
        said, state, scores = "", None, None
        if queue := self._queue():
            if trial.number >= len(queue):  # another process has the last one
                self.study.tell(trial, state=states.FAIL)
                return
            self.study.sampler = self.optuna.samplers.PartialFixedSampler(queue[trial.number], sampler)
        try:
            scores = self._score(self.space.choose(trial), trial, f"trial-{trial.number:04}")
        except ConfigError as error:
            said, state = f"left out: {error}", states.PRUNED
        except self.optuna.TrialPruned:
            said, state = "pruned", states.PRUNED
        except DareError as error:
            if isinstance(error, InputChanged):
                self.study.tell(trial, state=states.FAIL)
                raise
            said, state = f"failed: {error}", states.FAIL
            trial.set_user_attr("output", getattr(error, "output", ""))
        except BaseException:  # stopped
            self.study.tell(trial, state=states.FAIL)
            raise
        if said:
            trial.set_user_attr("why", said)
        self.study.tell(trial, scores, state)
        taken = time.perf_counter() - started
        left = (time.perf_counter() - self.started) / (done + 1 - before) * (self.wanted - done - 1)
        shown = said or " ".join(f"{value:g}" for value in scores or ())
        best = "" if len(self.objectives) > 1 or not self._complete() else f" (best {self.study.best_value:g})"
        line = f"[{done + 1}/{self.wanted}] {clip(name_choice(trial.params), 100)}: {shown}{best}, {taken:.1f} s"
        LOG.log(logging.WARNING if state is states.FAIL else logging.INFO, f"{line}, {duration(left)} left")

    def _complete(self) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=[self.optuna.trial.TrialState.COMPLETE])

    def _confirm(self, patience: Patience) -> SweepReport:
        """Score the best few with fresh seeds, and the plain average with lambdas from all over the same range."""
        complete = self._complete()
        if not complete:
            failed = next((trial.user_attrs.get("why") for trial in self.study.trials if trial.user_attrs), "")
            raise DareError(f"no trial could be scored; the first {failed}", "fix the evaluation or the space")
        rows = [Row(t.number, dict(t.params), self.space.choose(self._fix(t.params)), list(t.values)) for t in complete]
        report = SweepReport(self.objectives, rows, self._recall("base", None), self._describe_failures())
        lambdas = set(self.space.list_lambdas())
        LOG.info("scoring the best again with fresh seeds, and the plain average with several lambdas")
        for row in report.rank()[:FINALISTS]:
            if isinstance(row.config.lambda_coeff, float | int):
                lambdas.add(float(row.config.lambda_coeff))
            count = self.options.confirm if self.space.draws(row.config) else 0
            for k in range(1, count + 1):
                patience.check()
                # Model i draws with seed + i, so that seeds which share no mask are as far apart as there are models.
                seed = row.config.seed + k * self.space.count
                self._add(row.confirmed, f"trial {row.number} seed {seed}", dataclasses.replace(row.config, seed=seed))
        for scale in sorted(lambdas):
            patience.check()
            config, scores = self.space.plain_average(scale), list[list[float]]()
            self._add(scores, f"plain average lambda {scale!r}", config)
            report.averages += [Row(None, {"lambda_coeff": scale}, config, each) for each in scores]
        report.drawn = {row.number for row in rows if self.space.draws(row.config)}
        report.seconds = time.perf_counter() - self.started
        report.study = self.study.study_name
        return report

    def _add(self, found: list[list[float]], key: str, config: DareConfig) -> None:
        try:
            found.append(self._recall(key, config))
        except InputChanged:
            raise
        except DareError as error:
            LOG.warning(f"{key} could not be scored: {error}")

    def _describe_failures(self) -> list[tuple[int, str]]:
        trials = self.study.get_trials(deepcopy=False)
        return [(trial.number, trial.user_attrs["why"]) for trial in trials if "why" in trial.user_attrs]
