"""What a search has found: a table, whether the best is better than luck, its configuration and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from darelib.commands.analyze.plots import COLOURS, load_pyplot, make_label, save_figure
from darelib.commands.sweep.evaluation import Objective
from darelib.config import DareConfig
from darelib.core.text import clip, count_of, duration, printable, table

SHOWN: Final = 10  # trials in the table
SIGNIFICANT: Final = (
    0.05  # how sure to be, after allowing for the choice, that the best beats the plain average
)


@dataclass(frozen=True)
class Row:
    """A merge that was scored: a trial, or a plain average."""

    number: int | None  # of a trial
    params: Mapping[str, Any]
    config: DareConfig
    scores: list[float]
    confirmed: list[list[float]] = field(default_factory=list)  # with fresh seeds

    @property
    def name(self) -> str:
        return f"{'plain average' if self.number is None else f'trial {self.number}'}: {name_choice(self.params)}"

    def mean(self, k: int) -> float:
        """With fresh seeds, if there are any: the one that it was chosen with flatters it."""
        return (
            statistics.fmean(each[k] for each in self.confirmed)
            if self.confirmed
            else self.scores[k]
        )


def name_choice(params: Mapping[str, Any]) -> str:
    """What was chosen, in a few words."""
    short = {"lambda_coeff": "lambda", "drop_rate": "drop rate"}
    return ", ".join(
        f"{short.get(name, name)} {value:.4g}"
        if isinstance(value, float)
        else f"{short.get(name, name)} {value}"
        for name, value in params.items()
    )


def chance(t: float, freedom: int) -> float:
    """The chance that Student's t with so many degrees of freedom is above t >= 0: Abramowitz and Stegun, 26.7.3-4."""
    angle = math.atan(t / math.sqrt(freedom))
    term, total = (math.cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
    for k in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    inside = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inside) if freedom % 2 else inside)) / 2


@dataclass
class SweepReport:
    """All trials, and what they are compared with. Prints as a table and what to make of it."""

    objectives: Sequence[Objective]
    rows: list[Row]
    base: list[float]
    failures: list[tuple[int, str]]
    drawn: set[int | None] = field(default_factory=set)  # the trials that drop at random
    averages: list[Row] = field(default_factory=list)  # the plain average, by lambda
    seconds: float = 0.0
    study: str = ""

    @cached_property
    def ranked(self) -> list[Row]:
        """Best first, but what a seed may flatter after all that was scored again, if anything was.

        With several objectives, the Pareto front comes first; of equals, that whose worst score is best.
        """
        columns = [[row.mean(k) for row in self.rows] for k in range(len(self.objectives))]
        spans = [(min(column), max(column) - min(column) or 1) for column in columns]
        doubtful = self.drawn if any(row.confirmed for row in self.rows) else set()
        front = {row.number for row in (self.front if len(self.objectives) > 1 else self.rows)}

        def order(row: Row) -> tuple[bool, bool, float]:
            shares = []
            for k, (each, (low, width)) in enumerate(zip(self.objectives, spans, strict=True)):
                share = (row.mean(k) - low) / width
                shares.append(share if each.maximize else 1 - share)
            return (
                row.number not in front,
                row.number in doubtful and not row.confirmed,
                -min(shares),
            )

        return sorted(self.rows, key=order)

    @cached_property
    def front(self) -> list[Row]:
        """The trials that no other beats in one score without losing in another."""
        return [row for row in self.rows if not any(self._beats(other, row) for other in self.rows)]

    def _beats(self, one: Row, other: Row) -> bool:
        pairs = list(zip(one.scores, other.scores, self.objectives, strict=True))  # of one seed
        some = any(each.is_better(a, b) for a, b, each in pairs)
        return some and not any(each.is_better(b, a) for a, b, each in pairs)

    @property
    def best(self) -> Row:
        """The best trial."""
        return self.ranked[0]

    @property
    def average(self) -> Row | None:
        """The plain average with its best lambda."""
        first = self.objectives[0]
        ordered = sorted(self.averages, key=lambda row: row.scores[0], reverse=first.maximize)
        return ordered[0] if ordered else None

    @property
    def winner(self) -> Row:
        """The best trial, or the plain average where that is as good."""
        best, average = self.best, self.average
        lost = (
            average
            and len(self.objectives) == 1
            and not self.objectives[0].is_better(best.mean(0), average.mean(0))
        )
        return average if average and lost else best

    @property
    def probability(self) -> float | None:
        """The chance of such a gain over the plain average, if there were none; None: seeds cannot tell.

        The plain average draws nothing, so this is Student's one-sided t test of the fresh seeds' mean against it; p is
        multiplied by the number of trials that the winner was picked from by their fresh seeds (Bonferroni).
        """
        values, average = [each[0] for each in self.best.confirmed], self.average
        if len(values) < 2 or not statistics.stdev(values) or average is None:
            return None
        gain = statistics.fmean(values) - average.mean(0)
        gain = gain if self.objectives[0].maximize else -gain
        error = statistics.stdev(values) / math.sqrt(len(values))
        finalists = sum(bool(row.confirmed) for row in self.rows)
        p = chance(abs(gain) / error, len(values) - 1)
        return min(1.0, finalists * (p if gain > 0 else 1 - p))

    @property
    def verdict(self) -> str:
        if len(self.objectives) > 1:
            return self._front_verdict()
        best, average = self.best, self.average
        what = f"The best merge is trial {best.number} ({name_choice(best.params)}), with {best.mean(0):.6g}"
        if average is None:
            return f"{what}. The plain average could not be scored, so there is nothing to compare it with."
        than = f"the plain average ({name_choice(average.params)}: {average.mean(0):.6g})"
        if self.winner is average:
            return f"No trial scores better than {than}, so that is the winner."
        p = self.probability
        if p is None:
            why = (
                "all its seeds score the same"
                if best.confirmed
                else "it was not scored with fresh seeds"
            )
            why = why if best.number in self.drawn else "neither drops anything at random"
            return f"{what}, better than {than}. Whether that is chance cannot be told from seeds: {why}."
        test = f"t test over {len(best.confirmed)} fresh seeds, p = {p:.2g}"
        if p <= SIGNIFICANT:
            return f"{what}, better than {than} by more than its seeds' spread explains ({test})."
        return f"{what}, not distinguishable from {than} ({test})."

    def _front_verdict(self) -> str:
        front = self.front
        ahead = [
            row for row in front if not any(self._beats(average, row) for average in self.averages)
        ]
        named = ", ".join(str(row.number) for row in front[:SHOWN])
        many, lost = count_of(len(front), "trial"), len(front) - len(ahead)
        best = f"The most balanced is trial {self.best.number} ({name_choice(self.best.params)})."
        return f"{many} on the Pareto front ({named}), of which plain averages beat {lost}. {best}"

    @property
    def remarks(self) -> list[str]:
        remarks = [self.verdict]
        if self.failures:
            many = count_of(len(self.failures), "trial")
            remarks.append(
                f"{many} without a score; the first, trial {self.failures[0][0]}, {self.failures[0][1]}."
            )
        return [
            *remarks,
            "The best of many looks better than it is: confirm it on data that was not used here.",
        ]

    def as_dict(self) -> dict[str, Any]:
        names = [objective.name for objective in self.objectives]

        def show(scores: Sequence[float]) -> dict[str, float]:
            return dict(zip(names, scores, strict=True))

        trials = [
            {"number": row.number, "params": dict(row.params), "scores": show(row.scores)}
            | ({"confirmed": [show(each) for each in row.confirmed]} if row.confirmed else {})
            for row in self.ranked
        ]
        averages = [
            {"params": dict(row.params), "scores": show(row.scores)} for row in self.averages
        ]
        failed = [{"number": number, "why": why} for number, why in self.failures]
        result = {
            "study": self.study,
            "winner": self.winner.name,
            "verdict": self.verdict,
            "p": self.probability,
        }
        return result | {
            "base": show(self.base), "plain_averages": averages, "trials": trials, "failed": failed,
            "front": [row.number for row in self.front], "seconds": self.seconds,
        }  # fmt: skip

    def __str__(self) -> str:
        names = [objective.name for objective in self.objectives]
        rows = [["", *names, "fresh seeds", "spread"]]

        def add(
            name: str, scores: Sequence[float], confirmed: Sequence[Sequence[float]] = ()
        ) -> None:
            columns = list(zip(*confirmed, strict=True))
            means = " ".join(f"{statistics.fmean(column):.6g}" for column in columns)
            spread = " ".join(
                f"{statistics.stdev(column):.2g}" for column in columns if len(column) > 1
            )
            rows.append([name, *(f"{score:.6g}" for score in scores), means or "-", spread or "-"])

        ranked = self.ranked
        for row in ranked[:SHOWN]:
            add(clip(row.name, 80), row.scores, row.confirmed)
        if self.average is not None:
            add(self.average.name, self.average.scores)
        add("base", self.base)
        more = f"and {len(ranked) - SHOWN} more trials; " if len(ranked) > SHOWN else ""
        return "\n".join(
            [
                table(rows),
                f"({more}{duration(self.seconds)})",
                "",
                *(printable(remark) for remark in self.remarks),
            ]
        )


def plot_sweep(report: SweepReport, path: str | Path) -> None:
    """Draw each setting against the score, the best score so far and, of two scores, the Pareto front."""
    pyplot, first = load_pyplot(Path(path)), report.objectives[0]
    settings = list(dict.fromkeys(name for row in report.rows for name in row.params))
    panels = len(settings) + 1 + (len(report.objectives) > 1)
    columns = 2 if panels == 4 else min(3, panels)
    figure, grid = pyplot.subplots(
        -(-panels // columns), columns, figsize=(4 * columns, 3.2 * -(-panels // columns)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    axes = iter(grid.flat)
    for name in settings:
        axis, rows = next(axes), [row for row in report.rows if name in row.params]
        values = [row.params[name] for row in rows]
        words = not all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        axis.scatter([make_label(str(v)) for v in values] if words else values, [r.scores[0] for r in rows],
                     color=COLOURS[0], s=18)  # fmt: skip
        _finish(axis, report, make_label(name), first.name)
    _plot_best(next(axes), report)
    if len(report.objectives) > 1:
        _plot_front(next(axes), report)
    for axis in axes:
        axis.set_visible(False)
    figure.suptitle(
        f"{count_of(len(report.rows), 'trial')}; dashed: the plain average with its best lambda"
    )
    save_figure(pyplot, figure, path)


def _finish(axis: Any, report: SweepReport, x: str, y: str) -> None:
    if report.average is not None:
        axis.axhline(report.average.mean(0), color="black", linestyle="--", linewidth=1)
    axis.set(xlabel=x, ylabel=make_label(y))
    axis.grid(alpha=0.3)


def _plot_best(axis: Any, report: SweepReport) -> None:
    rows, first = sorted(report.rows, key=lambda row: row.number or 0), report.objectives[0]
    best: list[float] = []
    for row in rows:
        best.append(
            row.scores[0] if not best or first.is_better(row.scores[0], best[-1]) else best[-1]
        )
    axis.scatter(
        [row.number for row in rows], [row.scores[0] for row in rows], color=COLOURS[0], s=18
    )
    axis.step([row.number for row in rows], best, where="post", color=COLOURS[1])
    _finish(axis, report, "trial (line: best so far)", first.name)


def _plot_front(axis: Any, report: SweepReport) -> None:
    front = sorted(report.front, key=lambda row: row.mean(0))
    axis.scatter(
        [r.scores[0] for r in report.rows],
        [r.scores[1] for r in report.rows],
        color=COLOURS[0],
        s=18,
    )
    axis.plot(
        [row.mean(0) for row in front],
        [row.mean(1) for row in front],
        color=COLOURS[1],
        marker="o",
        markersize=4,
    )
    axis.scatter(
        [r.scores[0] for r in report.averages],
        [r.scores[1] for r in report.averages],
        color="black",
        marker="x",
    )
    axis.set(
        xlabel=make_label(report.objectives[0].name), ylabel=make_label(report.objectives[1].name)
    )
    axis.set_title("Pareto front; x: plain averages", fontsize=10)
    axis.grid(alpha=0.3)
