"""The search itself, on Optuna: its samplers choose, its storage remembers; here models are merged and scored."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import re
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import Any, Final

from darelib.commands.sweep.bench import Bench, MemoryBench
from darelib.commands.sweep.evaluation import (
    Evaluate,
    EvaluationFailed,
    Objective,
    ShellCommand,
    read_scores,
)
from darelib.commands.sweep.report import Row, SweepReport, name_choice
from darelib.commands.sweep.space import Space
from darelib.config import DareConfig
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
FINALISTS: Final = 3  # how many of the best are scored again
SAMPLERS: Final[dict[str, Callable[[Any, int], Any]]] = {
    "tpe": lambda samplers, seed: samplers.TPESampler(seed=seed),
    "cmaes": lambda samplers, seed: samplers.CmaEsSampler(
        seed=seed, warn_independent_sampling=False
    ),
    "random": lambda samplers, seed: samplers.RandomSampler(seed=seed),
    "grid": lambda samplers, seed: samplers.RandomSampler(
        seed=seed
    ),  # of which nothing is left to chance
}


def load_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise DareError("a sweep needs Optuna", install_hint("sweep")) from None


@dataclasses.dataclass(frozen=True)
class Options:
    """How to search. Each is a flag of the command, too."""

    trials: int | None = (
        None  # in all, those of earlier runs included; None: 30, or a grid's every combination
    )
    search: str = "tpe"
    objectives: tuple[Objective, ...] = (Objective("score", True),)
    confirm: int = 5  # fresh seeds with which the best few are scored again
    storage: str | None = None  # where the study is kept, as a URL; None: in memory
    study: str | None = None  # its name; None: made from all that scores depend on

    @classmethod
    def of(cls, objectives: Sequence[str] = ("score:max",), **options: Any) -> Options:
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
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ConfigError(
                    f"{name} must be a whole number from {least} up, not {value!r}", "see --help"
                )
        if self.confirm in (1, 2):
            raise ConfigError(
                "so few fresh seeds say nothing about chance", "give --confirm 3 or more, or 0"
            )


class Patience(Interrupts):
    """Holds a first Ctrl-C back until a trial is done; a second one, or SIGTERM, stops at once."""

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))  # first, since the next one may come at any moment
        if len(self._caught) > 1 or number == signal.SIGTERM:
            self._before[number](number, frame)
        LOG.warning("stopping after this trial; once more to stop at once")


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

    def __init__(
        self, space: Space, bench: Bench, options: Options, label: str, facts: Sequence[Any]
    ) -> None:
        """label: of the evaluation; facts: what else scores depend on, besides settings, space and objectives."""
        self.space, self.bench, self.options, self.optuna = space, bench, options, load_optuna()
        self.objectives, self.started, self.failed = (
            options.objectives,
            time.perf_counter(),
            set[int](),
        )
        self.states, self.begun = self.optuna.trial.TrialState, datetime.now()
        if options.search == "cmaes" and space.count_ranges() < 2:
            raise ConfigError("search cmaes needs two ranges or more", "use tpe")
        self.combinations = (
            list(space.list_combinations(self._fix)) if options.search == "grid" else []
        )
        most = len(self.combinations)
        self.wanted = min(options.trials or most, most) if most else options.trials or 30
        aims = [dataclasses.astuple(each) for each in self.objectives]
        settings = [
            space.config.recipe_settings(),
            [rule.as_table() for rule in space.config.typed_rules],
        ]
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        self.study = self._open_study(
            _digest([facts, settings, aims, repr((space.axes, space.rules))]), label
        )

    def _fix(self, params: dict[str, Any]) -> Any:
        return self.optuna.trial.FixedTrial(params)

    def _open_study(self, digest: str, label: str) -> Any:
        """The study that a name or all that scores depend on make it; digest: of all that, but the evaluation."""
        name = self.options.study or f"sweep-{_digest([digest, label])}"
        ways = ["maximize" if objective.maximize else "minimize" for objective in self.objectives]
        warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
        for attempt in range(10):
            try:
                study = self.optuna.create_study(
                    storage=self.options.storage,
                    study_name=name,
                    directions=ways,
                    load_if_exists=True,
                )
                study.set_metric_names([objective.name for objective in self.objectives])
                break
            except Exception as error:  # whatever a database may come up with
                reason = str(error).partition("\n")[0]
                if attempt < 9 and re.search(
                    "already exists|UNIQUE|locked", reason
                ):  # made by another process
                    time.sleep(0.2)
                    continue
                raise DareError(
                    f"cannot open the study {name!r} in {self.options.storage!r}: {reason}",
                    "--storage takes a URL like sqlite:///sweep.db; the directory must exist",
                ) from None
        if study.user_attrs.setdefault(FACTS, digest) != digest:
            raise ConfigError(
                f"the study {name!r} is of other models, settings or values", "give it another name"
            )
        study.set_user_attr(FACTS, digest)
        return study

    def run(self) -> SweepReport:
        """Search until there are as many trials as are wanted, then score the best few again."""
        once = OnlyOnce()
        LOG.addFilter(once)
        try:
            with Patience() as patience:
                self._score_base()
                before = self._count_done()
                if before:
                    LOG.info(
                        f"going on with the study {self.study.study_name}: {before} trials are done"
                    )
                while self._count_done() < self.wanted:
                    patience.check()
                    if not self._try_one(before):
                        break
                return self._confirm(patience)
        finally:
            LOG.removeFilter(once)

    def _trials(self, *states: Any) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _count_done(self) -> int:
        """How many trials are through. Those that failed in an earlier run are not: their cause may be gone."""
        if self.combinations:
            return len(self.combinations) - len(self._list_left())
        return len(self._trials(self.states.COMPLETE, self.states.PRUNED)) + len(self.failed)

    def _score_base(self) -> None:
        try:
            self._recall("base", None)
        except DareError as error:
            for line in getattr(error, "output", "").splitlines():
                LOG.info(f"| {line}")
            raise DareError(
                f"the evaluation cannot score the base: {error}", "fix it first; nothing was merged"
            ) from None

    def _score(self, config: DareConfig | None, trial: Any, name: str) -> list[float]:
        """The scores of a merge, or of the base; whatever somebody's evaluation comes up with is its failure."""
        try:
            found = self.bench.score(
                config, trial, f"{self.study.study_name}-{name.replace(' ', '-')}"
            )
            return read_scores(found, self.objectives)
        except (DareError, self.optuna.TrialPruned):
            raise
        except (Exception, SystemExit) as error:
            raise EvaluationFailed(f"{type(error).__name__}: {error}") from error

    def _recall(self, key: str, config: DareConfig | None) -> list[float]:
        """Scores beside the trials, which the study remembers as well."""
        if key not in self.study.user_attrs:
            try:
                self.study.set_user_attr(key, self._score(config, self._fix({}), key))
            except self.optuna.TrialPruned:
                raise EvaluationFailed("it was pruned") from None
        return list(self.study.user_attrs[key])

    def _list_left(self, mine: int = -1) -> list[dict[str, Any]]:
        """What of a grid has no score yet, did not fail in this run, and is not tried by another process.

        mine: the number of the trial that is to choose. What was begun before this run may have been killed: it comes
        last.
        """
        known, own, doubtful = (
            set[tuple[Any, ...]](),
            dict(enumerate(self.combinations)),
            list[dict[str, Any]](),
        )
        for t in self._trials():
            if t.state in (self.states.COMPLETE, self.states.PRUNED) or t.number in self.failed:
                known.add(_key(t.params))
            elif t.state is self.states.RUNNING and t.number != mine:
                params = own.get(t.number, t.params)
                doubtful += [params] if t.datetime_start < self.begun else []
                known |= set() if t.datetime_start < self.begun else {_key(params)}
        left = [params for params in self.combinations if _key(params) not in known]
        return sorted(left, key=lambda params: params in doubtful)

    def _ask(self) -> Any:
        """The next trial; None: there is nothing left of a grid."""
        if self.combinations and not self._list_left():
            return None
        # A run that goes on, or another process, must not choose the same again.
        seed = (self.space.config.seed + len(self._trials())) % 2**32
        self.study.sampler = sampler = SAMPLERS[self.options.search](self.optuna.samplers, seed)
        trial = self.study.ask()
        if left := self._list_left(trial.number):
            own = self.combinations[trial.number : trial.number + 1]  # which no other process has
            chosen = own[0] if own and own[0] in left else left[0]
            self.study.sampler = self.optuna.samplers.PartialFixedSampler(chosen, sampler)
        return trial

    def _try_one(self, before: int) -> bool:
        trial, started = self._ask(), time.perf_counter()
        if trial is None:
            return False
        said, state, scores = "", None, None
        try:
            config = self.space.choose(trial)
            same = (
                t.values for t in self._trials(self.states.COMPLETE) if t.params == trial.params
            )
            scores = next(same, None) or self._score(config, trial, f"trial-{trial.number:04}")
        except ConfigError as error:
            said, state = f"left out: {error}", self.states.PRUNED
        except self.optuna.TrialPruned:
            said, state = "pruned", self.states.PRUNED
        except BaseException as error:
            if not isinstance(error, DareError) or isinstance(error, InputChanged):  # stopped
                self.study.tell(trial, state=self.states.FAIL)
                raise
            said, state = f"failed: {error}", self.states.FAIL
            trial.set_user_attr("output", getattr(error, "output", ""))
            self.failed.add(trial.number)
        if said:
            trial.set_user_attr("why", said)
        self.study.tell(trial, scores, state)
        self._show(trial, said or " ".join(f"{value:g}" for value in scores or ()), started, before)
        return True

    def _show(self, trial: Any, said: str, started: float, before: int) -> None:
        now, done, complete = (
            time.perf_counter(),
            self._count_done(),
            self._trials(self.states.COMPLETE),
        )
        left = (now - self.started) / max(1, done - before) * (self.wanted - done)
        choose = max if self.objectives[0].maximize else min
        best = (
            f" (best {choose(t.values[0] for t in complete):g})"
            if complete and len(self.objectives) == 1
            else ""
        )
        line = f"[{done}/{self.wanted}] {clip(name_choice(trial.params), 100)}: {said}{best}, {now - started:.1f} s"
        level = logging.WARNING if trial.number in self.failed else logging.INFO
        LOG.log(level, f"{line}, {duration(left)} left")

    def _confirm(self, patience: Patience) -> SweepReport:
        """Score the best few with fresh seeds, and the plain average with lambdas from all over the same range."""
        distinct = {
            _key(trial.params): trial for trial in reversed(self._trials(self.states.COMPLETE))
        }
        failures = [
            (t.number, t.user_attrs["why"]) for t in self._trials() if "why" in t.user_attrs
        ]
        if not distinct:
            why = failures[0][1] if failures else "was stopped"
            raise DareError(
                f"no trial could be scored; the first {why}", "fix the evaluation or the space"
            )
        trials = sorted(distinct.values(), key=lambda trial: trial.number)
        rows = [
            Row(t.number, dict(t.params), self.space.choose(self._fix(t.params)), list(t.values))
            for t in trials
        ]
        drawn = {row.number for row in rows if self.space.draws(row.config)}
        finalists = SweepReport(self.objectives, rows, [], failures, drawn).ranked[:FINALISTS]
        lambdas = {
            *self.space.list_lambdas(),
            *(self.space.equal_lambda(row.config) for row in finalists),
        }
        LOG.info(
            "scoring the best again with fresh seeds, and the plain average with several lambdas"
        )
        for row in finalists:
            for k in range(1, self.options.confirm + 1 if row.number in drawn else 1):
                # Model i draws with seed + i, so that seeds which share no mask are as far apart as there are models.
                seed = row.config.seed + k * self.space.count
                config = dataclasses.replace(row.config, seed=seed)
                row.confirmed.extend(
                    self._try_again(f"trial {row.number} seed {seed}", config, patience)
                )
        averages = []
        for scale in sorted(lambdas):
            config = self.space.plain_average(scale)
            for scores in self._try_again(f"plain average lambda {scale!r}", config, patience):
                averages.append(Row(None, {"lambda_coeff": scale}, config, scores))
        seconds, base = time.perf_counter() - self.started, self._recall("base", None)
        return SweepReport(
            self.objectives, rows, base, failures, drawn, averages, seconds, self.study.study_name
        )

    def _try_again(self, key: str, config: DareConfig, patience: Patience) -> list[list[float]]:
        patience.check()
        try:
            return [self._recall(key, config)]
        except InputChanged:
            raise
        except DareError as error:
            LOG.warning(f"{key} could not be scored: {error}")
            return []


def search_in_memory(
    base: Mapping[str, Any], finetuned: Sequence[Mapping[str, Any]], evaluate: Evaluate, space: Space, how: Options,
    model: Any, label: str, facts: Sequence[Any],
) -> SweepReport:  # fmt: skip
    """Search with state dicts. A live model, if there is one, holds the winner in the end or, without one, the base."""
    if isinstance(evaluate, ShellCommand):
        raise ConfigError(
            "a command needs models in files", "give a function, or leave out --in-memory"
        )
    bench = MemoryBench(base, finetuned, evaluate, model, space.config.dtype)
    try:
        report = Search(space, bench, how, label, facts).run()
    except BaseException:
        with suppress(DareError):  # which is what is raised already
            bench.leave(None)
        raise
    bench.leave(report.winner.config)
    return report


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _key(params: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(params.items()))
