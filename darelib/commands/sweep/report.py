"""What a search has found: a table, whether the best is better than luck, and a picture."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

from darelib.commands.analyze.pictures import COLOURS, load_figure, make_label, save_figure
from darelib.commands.report import Report
from darelib.commands.sweep.evaluation import Objective
from darelib.config import DareConfig, is_number
from darelib.core.text import clip, count_of, duration, printable, table

SHOWN: Final = 10  # trials in the table
# How sure to be, after allowing for the choice, that the best beats the plain average.
SIGNIFICANT: Final = 0.05
SHORT_NAMES: Final = {"lambda_coeff": "lambda", "drop_rate": "drop rate"}


@dataclass(frozen=True)
class Row:
    """A merge that was scored: a trial, or a plain average."""

    number: int | None  # of a trial
    params: Mapping[str, Any]
    config: DareConfig
    scores: list[float]
    draws: bool = False  # whether it drops at random
    confirmed: list[list[float]] = field(default_factory=list)  # with fresh seeds

    @property
    def name(self) -> str:
        kind = "plain average" if self.number is None else f"trial {self.number}"
        return f"{kind}: {name_choice(self.params)}"

    def mean(self, k: int) -> float:
        """With fresh seeds, if there are any: the one that it was chosen with flatters it."""
        return statistics.fmean(each[k] for each in self.confirmed or [self.scores])


def name_choice(params: Mapping[str, Any]) -> str:
    choices = []
    for name, value in params.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        choices.append(f"{SHORT_NAMES.get(name, name)} {shown}")
    return ", ".join(choices)


def chance(t: float, freedom: int) -> float:
    """The chance that Student's t with so many degrees of freedom is above t >= 0.

    Abramowitz and Stegun, 26.7.3-4.
    """
    is_odd = freedom % 2
    angle = math.atan(t / math.sqrt(freedom))
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    inside = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inside) if is_odd else inside)) / 2


@dataclass(frozen=True)
class SweepReport(Report):
    """All trials, and what they are compared with. Prints as a table and what to make of it."""

    ROWS: ClassVar = "trials"
    objectives: Sequence[Objective]
    rows: list[Row]
    base: list[float]
    failures: list[tuple[int, str]]
    averages: list[Row] = field(default_factory=list)  # the plain average, by lambda
    seconds: float = 0.0
    study: str = ""

    @cached_property
    def ranked(self) -> list[Row]:
        """Best first, but what a seed may flatter after all that was scored again, if any was.

        With several objectives, the Pareto front comes first; of equals, that whose worst score is
        best.
        """
        columns = [[row.mean(k) for row in self.rows] for k in range(len(self.objectives))]
        spans = [(min(column), max(column) - min(column) or 1) for column in columns]
        is_confirmed = any(row.confirmed for row in self.rows)
        front = {row.number for row in (self.front if len(self.objectives) > 1 else self.rows)}

        def order(row: Row) -> tuple[bool, bool, float]:
            shares = [(row.mean(k) - low) / width for k, (low, width) in enumerate(spans)]
            worst = min(
                share if objective.maximize else 1 - share
                for share, objective in zip(shares, self.objectives, strict=True)
            )
            is_doubtful = is_confirmed and row.draws and not row.confirmed
            return row.number not in front, is_doubtful, -worst

        return sorted(self.rows, key=order)

    @cached_property
    def front(self) -> list[Row]:
        """The trials that no other beats in one score without losing in another."""
        return [row for row in self.rows if not any(self._beats(other, row) for other in self.rows)]

    def _beats(self, one: Row, other: Row) -> bool:
        pairs = zip(self.objectives, one.scores, other.scores, strict=True)  # of one seed
        gains = [objective.gain(a, b) for objective, a, b in pairs]
        return max(gains) > 0 and min(gains) >= 0

    @property
    def best(self) -> Row:
        return self.ranked[0]

    @property
    def average(self) -> Row | None:
        """The plain average with its best lambda."""
        gain = self.objectives[0].gain
        return max(self.averages, key=lambda row: gain(row.scores[0], 0.0), default=None)

    @property
    def winner(self) -> Row:
        """The best trial, or the plain average where that is as good."""
        average = self.average
        if average is None or len(self.objectives) > 1:
            return self.best
        gain = self.objectives[0].gain(self.best.mean(0), average.mean(0))
        return self.best if gain > 0 else average

    @property
    def probability(self) -> float | None:
        """The chance of such a gain over the plain average, if there were none; None: unknown.

        The plain average draws nothing, so this is Student's one-sided t test of the fresh seeds'
        mean against it; p is multiplied by the number of trials that the winner was picked from by
        their fresh seeds (Bonferroni).
        """
        values = [each[0] for each in self.best.confirmed]
        if len(values) < 2 or not statistics.stdev(values) or self.average is None:
            return None
        gain = self.objectives[0].gain(statistics.fmean(values), self.average.mean(0))
        error = statistics.stdev(values) / math.sqrt(len(values))
        finalists = sum(bool(row.confirmed) for row in self.rows)
        p = chance(abs(gain) / error, len(values) - 1)
        return min(1.0, finalists * (p if gain > 0 else 1 - p))

    @property
    def verdict(self) -> str:
        if len(self.objectives) > 1:
            return self._front_verdict()
        best = self.best
        average = self.average
        what = (
            f"The best merge is trial {best.number} ({name_choice(best.params)}), "
            f"with {best.mean(0):.6g}"
        )
        if average is None:
            return (
                f"{what}. The plain average could not be scored, "
                "so there is nothing to compare it with."
            )
        than = f"the plain average ({name_choice(average.params)}: {average.mean(0):.6g})"
        if self.winner is average:
            return f"No trial scores better than {than}, so that is the winner."
        p = self.probability
        if p is None:
            why = "neither drops anything at random"
            if best.draws:
                why = "all its seeds score the same"
            if best.draws and not best.confirmed:
                why = "it was not scored with fresh seeds"
            return (
                f"{what}, better than {than}. "
                f"Whether that is chance cannot be told from seeds: {why}."
            )
        test = f"t test over {len(best.confirmed)} fresh seeds, p = {p:.2g}"
        if p <= SIGNIFICANT:
            return f"{what}, better than {than} by more than its seeds' spread explains ({test})."
        return f"{what}, not distinguishable from {than} ({test})."

    def _front_verdict(self) -> str:
        front = self.front
        lost = sum(any(self._beats(average, row) for average in self.averages) for row in front)
        named = ", ".join(str(row.number) for row in front[:SHOWN])
        return (
            f"{count_of(len(front), 'trial')} on the Pareto front ({named}), of which plain "
            f"averages beat {lost}. The most balanced is trial {self.best.number} "
            f"({name_choice(self.best.params)})."
        )

    @property
    def remarks(self) -> list[str]:
        remarks = [
            self.verdict,
            "The best of many looks better than it is: confirm it on data that was not used here.",
        ]
        if self.failures:
            many = count_of(len(self.failures), "trial")
            number, why = self.failures[0]
            remarks.insert(1, f"{many} without a score; the first, trial {number}, {why}.")
        return remarks

    def plot(self, path: str | Path) -> None:
        plot_sweep(self, path)

    def to_dict(self) -> dict[str, Any]:
        def name_scores(scores: Sequence[float]) -> dict[str, float]:
            names = [objective.name for objective in self.objectives]
            return dict(zip(names, scores, strict=True))

        def as_table(row: Row) -> dict[str, Any]:
            table = {"params": dict(row.params), "scores": name_scores(row.scores)}
            again = {"confirmed": list(map(name_scores, row.confirmed))} if row.confirmed else {}
            return table | again

        return {
            "study": self.study,
            "winner": self.winner.name,
            "verdict": self.verdict,
            "p": self.probability,
            "base": name_scores(self.base),
            "plain_averages": list(map(as_table, self.averages)),
            "trials": [{"number": row.number} | as_table(row) for row in self.ranked],
            "failed": [{"number": number, "why": why} for number, why in self.failures],
            "front": [row.number for row in self.front],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        names = [objective.name for objective in self.objectives]
        rows = [["", *names, "fresh seeds", "spread"]]
        for row in self.ranked[:SHOWN]:
            rows.append(format_cells(clip(row.name, 80), row.scores, row.confirmed))
        if self.average is not None:
            rows.append(format_cells(self.average.name, self.average.scores))
        rows.append(format_cells("base", self.base))
        hidden = len(self.rows) - SHOWN
        more = f"and {hidden} more trials; " if hidden > 0 else ""
        last = f"({more}{duration(self.seconds)})"
        return "\n".join([table(rows), last, "", *map(printable, self.remarks)])


def format_cells(
    name: str, scores: Sequence[float], confirmed: Sequence[Sequence[float]] = ()
) -> list[str]:
    columns = list(zip(*confirmed, strict=True))
    means = " ".join(f"{statistics.fmean(column):.6g}" for column in columns)
    spread = " ".join(f"{statistics.stdev(column):.2g}" for column in columns if len(column) > 1)
    return [name, *(f"{score:.6g}" for score in scores), means or "-", spread or "-"]


def plot_sweep(report: SweepReport, path: str | Path) -> None:
    """Draw each setting against the score, the best so far and, of two scores, the Pareto front."""
    figure_class = load_figure(Path(path))
    settings = list(dict.fromkeys(name for row in report.rows for name in row.params))
    panels = len(settings) + 1 + (len(report.objectives) > 1)
    columns = 2 if panels == 4 else min(3, panels)
    lines = math.ceil(panels / columns)
    figure = figure_class(figsize=(4 * columns, 3.2 * lines), layout="constrained")
    axes = iter(figure.subplots(lines, columns, squeeze=False).flat)
    for name in settings:
        rows = [row for row in report.rows if name in row.params]
        values = [row.params[name] for row in rows]
        if not all(map(is_number, values)):
            values = [make_label(str(value)) for value in values]
        _scatter(next(axes), report, values, rows, make_label(name))
    _plot_best(next(axes), report)
    if len(report.objectives) > 1:
        _plot_front(next(axes), report)
    for axis in axes:
        axis.set_visible(False)
    figure.suptitle(
        f"{count_of(len(report.rows), 'trial')}; dashed: the plain average with its best lambda"
    )
    save_figure(figure, path)


def _scatter(
    axis: Any, report: SweepReport, values: Sequence[Any], rows: Iterable[Row], label: str
) -> None:
    axis.scatter(values, [row.scores[0] for row in rows], color=COLOURS[0], s=18)
    if report.average is not None:
        axis.axhline(report.average.mean(0), color="black", linestyle="--", linewidth=1)
    axis.set(xlabel=label, ylabel=make_label(report.objectives[0].name))
    axis.grid(alpha=0.3)


def _plot_best(axis: Any, report: SweepReport) -> None:
    rows = sorted(report.rows, key=lambda row: row.number or 0)
    numbers = [row.number for row in rows]
    choose = max if report.objectives[0].maximize else min
    best = list(itertools.accumulate((row.scores[0] for row in rows), choose))
    _scatter(axis, report, numbers, rows, "trial (line: best so far)")
    axis.step(numbers, best, where="post", color=COLOURS[1])


def _plot_front(axis: Any, report: SweepReport) -> None:
    front = sorted(report.front, key=lambda row: row.mean(0))
    means = [(row.mean(0), row.mean(1)) for row in front]
    axis.scatter(*_first_two(report.rows), color=COLOURS[0], s=18)
    axis.plot(*zip(*means, strict=True), color=COLOURS[1], marker="o", markersize=4)
    axis.scatter(*_first_two(report.averages), color="black", marker="x")
    first, second = (make_label(objective.name) for objective in report.objectives[:2])
    axis.set(xlabel=first, ylabel=second, title="Pareto front; x: plain averages")
    axis.grid(alpha=0.3)


def _first_two(rows: Iterable[Row]) -> tuple[list[float], list[float]]:
    return [row.scores[0] for row in rows], [row.scores[1] for row in rows]
