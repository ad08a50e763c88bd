"""The report of a search: a table, the best beside the base and the plain average, a picture."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

from darelib.commands.analyze.analysis import load_figure, save_figure
from darelib.commands.report import Report
from darelib.commands.sweep.scores import Objective
from darelib.config import DareConfig
from darelib.core.text import DareError, clip, count_of, duration, install_hint, printable, table

SHOWN: Final = 10  # trials in the table
SHORT_NAMES: Final = {"lambda_coeff": "lambda", "drop_rate": "drop rate"}


def load_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise DareError("a sweep needs Optuna", install_hint("sweep")) from None
    return optuna


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna reports every trial, which is done here; afterwards it is as loud as it was."""
    optuna = load_optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class ScoredMerge:
    """A merge that was scored: a trial, or a plain average."""

    number: int | None  # Optuna's, of a trial
    params: Mapping[str, Any]
    config: DareConfig
    scores: list[float]

    @property
    def name(self) -> str:
        kind = "plain average" if self.number is None else f"trial {self.number}"
        return f"{kind}: {name_choice(self.params)}"


def name_choice(params: Mapping[str, Any]) -> str:
    choices = []
    for name, value in params.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        choices.append(f"{SHORT_NAMES.get(name, name)} {shown}")
    return ", ".join(choices)


@dataclass(frozen=True)
class SweepReport(Report):
    """All trials, and what they are compared with. Prints as a table and what to make of it."""

    ROWS: ClassVar = "trials"
    objectives: Sequence[Objective]
    rows: list[ScoredMerge]
    base: list[float]
    failures: list[tuple[int, str]]
    front: list[int]  # the trials that no other beats in one score without losing in another
    trials: Sequence[Any] = field(repr=False)  # Optuna's, for its pictures
    averages: list[ScoredMerge] = field(default_factory=list)  # the plain average, by lambda
    ends: list[str] = field(default_factory=list)  # the ranges at whose ends the best is
    rivals: list[int] = field(default_factory=list)  # trials that are no worse, so far as is known
    seconds: float = 0.0
    study: str = ""

    @cached_property
    def ranked(self) -> list[ScoredMerge]:
        """Best first. With several objectives, the Pareto front comes first; of equals, that whose
        worst score is best.
        """
        columns = list(zip(*(row.scores for row in self.rows), strict=True))
        spans = [max(column) - min(column) or 1 for column in columns]
        pairs = zip(self.objectives, columns, strict=True)
        ideal = [max(column) if each.maximize else min(column) for each, column in pairs]

        def order(row: ScoredMerge) -> tuple[bool, float]:
            losses = zip(self._gains(ideal, row.scores), spans, strict=True)
            return row.number not in self.front, max(loss / span for loss, span in losses)

        return sorted(self.rows, key=order)

    def _gains(self, one: Sequence[float], other: Sequence[float]) -> list[float]:
        """How much better one is than the other, by objective."""
        pairs = zip(self.objectives, one, other, strict=True)
        return [objective.gain(a, b) for objective, a, b in pairs]

    def _beats(self, one: Sequence[float], other: Sequence[float]) -> bool:
        gains = self._gains(one, other)
        return max(gains) > 0 and min(gains) >= 0

    @property
    def best(self) -> ScoredMerge:
        return self.ranked[0]

    @property
    def average(self) -> ScoredMerge | None:
        """The plain average with its best lambda."""
        gain = self.objectives[0].gain
        return max(self.averages, key=lambda row: gain(row.scores[0], 0.0), default=None)

    @property
    def winner(self) -> ScoredMerge:
        """The best trial, or the plain average where that is as good."""
        average = self.average
        if average is None or len(self.objectives) > 1:
            return self.best
        return self.best if self._beats(self.best.scores, average.scores) else average

    @property
    def is_base_best(self) -> bool:
        """Whether every merge is worse than the base; of several scores, better by none."""
        merges = (*self.rows, *self.averages)
        return all(self._beats(self.base, row.scores) for row in merges)

    @property
    def verdict(self) -> str:
        if self.is_base_best:
            return (
                f"The base beats every merge: it has {format_scores(self.base)}, and the best, "
                f"{self.winner.name}, has {format_scores(self.winner.scores)}."
            )
        if len(self.objectives) > 1:
            return self._front_verdict()
        score = format_scores(self.best.scores)
        what = f"The best merge is trial {self.best.number} ({name_choice(self.best.params)})"
        base = f"the base has {format_scores(self.base)}"
        if self.average is None:
            return f"{what}, with {score}; {base}. The plain average could not be scored."
        plain = name_choice(self.average.params)
        than = f"the plain average ({plain}: {format_scores(self.average.scores)})"
        if self.winner is self.average:
            return f"No trial scores better than {than}, so that is the winner; {base}."
        return f"{what}, with {score}, better than {than}; {base}."

    def _front_verdict(self) -> str:
        front = [row for row in self.rows if row.number in self.front]
        rivals = [row.scores for row in self.averages]
        lost = sum(any(self._beats(rival, row.scores) for rival in rivals) for row in front)
        worse = sum(self._beats(self.base, row.scores) for row in front)
        named = ", ".join(str(row.number) for row in front[:SHOWN])
        return (
            f"{count_of(len(front), 'trial')} on the Pareto front ({named}), of which plain "
            f"averages beat {lost} and the base {worse}. The most balanced is trial "
            f"{self.best.number} ({name_choice(self.best.params)})."
        )

    @property
    def remarks(self) -> list[str]:
        remarks = [self.verdict, *self.ends]
        if self.rivals and self.winner is self.best:
            named = ", ".join(map(str, self.rivals[:SHOWN]))
            remarks.append(f"On these examples, trial {self.best.number} cannot be told apart from "
                           f"{count_of(len(self.rivals), 'other')} ({named}).")  # fmt: skip
        if self.failures:
            many = count_of(len(self.failures), "trial")
            number, why = self.failures[0]
            remarks.append(f"{many} without a score; the first, trial {number}, {why}.")
        return [
            *remarks,
            "The best of many looks better than it is: confirm it on data that was not used here.",
        ]

    def to_dict(self) -> dict[str, Any]:
        def as_table(row: ScoredMerge) -> dict[str, Any]:
            return {"params": dict(row.params), "scores": self._name_scores(row.scores)}

        return {
            "study": self.study,
            "winner": self.winner.name,
            "verdict": self.verdict,
            "base_is_best": self.is_base_best,
            "base": self._name_scores(self.base),
            "plain_averages": list(map(as_table, self.averages)),
            "trials": [{"number": row.number} | as_table(row) for row in self.ranked],
            "failed": [{"number": number, "why": why} for number, why in self.failures],
            "front": self.front,
            "rivals": self.rivals,
            "seconds": self.seconds,
        }

    def _name_scores(self, scores: Sequence[float]) -> dict[str, float]:
        names = [objective.name for objective in self.objectives]
        return dict(zip(names, scores, strict=True))

    def __str__(self) -> str:
        shown = [*self.ranked[:SHOWN], *([self.average] if self.average else [])]
        merges = [(clip(row.name, 80), row.scores) for row in shown]
        rows = [["", *(objective.name for objective in self.objectives)]]
        for name, scores in (*merges, ("base", self.base)):
            rows.append([name, *(f"{score:.6g}" for score in scores)])
        hidden = len(self.rows) - SHOWN
        more = f"and {hidden} more trials; " if hidden > 0 else ""
        last = f"({more}{duration(self.seconds)})"
        return "\n".join([table(rows), last, "", *map(printable, self.remarks)])

    def plot(self, path: str | Path) -> None:
        plot_sweep(self, path)

    def draw(self) -> Any:
        """Optuna's picture of the trials, as a figure of matplotlib: each setting against the
        score; of two or three scores, the Pareto front.
        """
        import matplotlib.pyplot as plt
        import optuna.visualization.matplotlib as pictures
        from optuna import create_study

        names = [objective.name for objective in self.objectives]
        title = count_of(len(self.rows), "trial")
        # Names are no formulas. Optuna's style is not left behind for others.
        looks: Any = {"text.parse_math": False, "figure.constrained_layout.use": True}
        with quiet_optuna(), plt.rc_context(looks):
            study = create_study(directions=[each.direction for each in self.objectives])
            study.add_trials(self.trials)
            warnings.simplefilter("ignore", UserWarning)  # of a setting with one value
            drawn: Any
            if len(names) in (2, 3):
                drawn = pictures.plot_pareto_front(study, target_names=names)
            else:
                drawn = pictures.plot_slice(
                    study, target=lambda trial: trial.values[0], target_name=names[0]
                )
            axes = list(getattr(drawn, "flat", [drawn]))
            for axis in axes:
                axis.set_title("")
            if self.average and len(names) == 1:
                title += "; dashed: the plain average with its best lambda"
                for axis in axes:
                    axis.axhline(self.average.scores[0], color="black", linestyle="--")
            figure = axes[0].figure
            figure.suptitle(title)
            plt.close(figure)
        return figure


def format_scores(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:.6g}" for score in scores)


def plot_sweep(report: SweepReport, path: str | Path) -> None:
    """Draw each setting against the score or, of two or three scores, the Pareto front."""
    load_figure(Path(path))
    save_figure(report.draw(), path)
