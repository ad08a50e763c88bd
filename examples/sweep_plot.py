"""The picture of a sweep: score against drop rate."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dare import DareError
from darelib.gradients import Gradient

if TYPE_CHECKING:
    from sweep import Row, SweepResult

# Okabe and Ito's colours, which colour-blind people can tell apart, less the yellow, which print loses. Lines also
# differ in mark and dash, for print without colour. As many as can be told apart are drawn.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")
DASHES: Final[tuple[Any, ...]] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)), "-")


def load_matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise DareError("a plot needs matplotlib, which is not installed", "uv sync --extra plot") from None


def place_on_axis(drop_rate: Any) -> float:
    """By the logarithm of what is kept: the noise of dropping grows with 1 / (1 - p), and 0.9 is far from 0.99."""
    return -math.log10(1 - average(drop_rate))


def average(value: Any) -> float:
    """Of a number, of one per model, of one that changes over the layers."""
    parts = value.numbers if isinstance(value, Gradient) else value
    return statistics.fmean(map(average, parts)) if isinstance(parts, tuple) else parts


def show(value: Any) -> str:
    if isinstance(value, Gradient):
        return "..".join(map(show, value.numbers))
    return "/".join(map(show, value)) if isinstance(value, tuple) else f"{value:g}"


def lines_of(result: SweepResult) -> dict[str, list[Row]]:
    """The rows that differ in nothing but their drop rate, best line first."""
    lines: dict[str, list[Row]] = {}
    for row in result.merges:
        if row.scores and row.candidate.kind == "grid":
            lines.setdefault(row.line, []).append(row)
    undropped = any(not row.candidate.is_random for rows in lines.values() for row in rows)
    average = result.baseline.line
    if undropped and average in lines and result.baseline.scores:  # the baseline stands for its point in the grid
        lines[average].append(result.baseline)
    for rows in lines.values():
        rows.sort(key=lambda row: place_on_axis(row.candidate.settings.drop_rate))
    return lines


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Move the places of labels, in ascending order from 0 to 1, until none is nearer to the next than a gap."""
    moved = list(places)
    for _ in range(100):
        for k in range(1, len(moved)):
            if (lack := gap - (moved[k] - moved[k - 1])) > 0:
                moved[k - 1 : k + 1] = [moved[k - 1] - lack / 2, moved[k] + lack / 2]
        moved = [min(max(place, gap * k), 1 - gap * (len(moved) - 1 - k)) for k, place in enumerate(moved)]
    return moved


def draw(result: SweepResult, path: Path, mark: str) -> None:
    """Score against drop rate, a line for each combination of the other settings, with its seeds as a band.

    mark: what the file says of who made it.
    """
    figure = load_matplotlib().Figure(figsize=(9.3, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lines = lines_of(result)
    faint = 0.16 if len(lines) <= 4 else 0.08
    for (name, rows), colour, shape, dash in zip(lines.items(), COLOURS, MARKS, DASHES, strict=False):
        x = [place_on_axis(row.candidate.settings.drop_rate) for row in rows]
        low, high = [min(row.scores) for row in rows], [max(row.scores) for row in rows]
        axes.fill_between(x, low, high, facecolor=(colour, faint), edgecolor=(colour, 3 * faint), linewidth=0.6)
        style: dict[str, Any] = {"linewidth": 2, "markersize": 7, "markeredgecolor": "white", "label": name}
        axes.plot(x, [row.mean for row in rows], color=colour, marker=shape, linestyle=dash, **style)
    mark_drop_rates(axes, [row for rows in lines.values() for row in rows])
    mark_references(axes, result)
    axes.set_xlabel("drop rate (spaced by the logarithm of the share that is kept)", fontsize=12)
    axes.set_ylabel(f"score ({'lower' if result.minimize else 'higher'} is better)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    seeds = max((row.wanted for rows in lines.values() for row in rows), default=1)
    title = f"Mean of {seeds} seed{'s' * (seeds > 1)}" + "; bands: lowest to highest" * (seeds > 1)
    if len(lines) > len(COLOURS):
        title += f"; the best {len(COLOURS)} of {len(lines)} lines"
    axes.set_title(title, fontsize=12, loc="left", color="#333333")
    if lines:
        columns = int(9.3 / (0.9 + 0.08 * max(map(len, lines))))  # in inches: picture, sample of a line, letter
        columns = min(max(columns, 1), len(lines))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=11, frameon=False, handlelength=3)
    try:
        figure.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": mark})
    except OSError as error:
        raise DareError(f"cannot write {str(path)!r}: {error.strerror}", "give another file after --plot") from None


def mark_drop_rates(axes: Any, rows: Sequence[Row]) -> None:
    """A tick for every rate that was tried, and its figure where there is room."""
    rates = {place_on_axis(row.candidate.settings.drop_rate): row.candidate.settings.drop_rate for row in rows}
    places = sorted(rates)
    room = (places[-1] - places[0]) / 16 if places else 0
    labels, last = [], -math.inf
    for place in places:
        labels.append(show(rates[place]) if place - last >= room else "")
        last = place if labels[-1] else last
    axes.set_xticks(places, labels)


def mark_references(axes: Any, result: SweepResult) -> None:
    """Lines for the baseline and for each model alone, named at their right ends.

    What is so far away that it would flatten everything else is only named, at the edge that it lies beyond.
    """
    rows = sorted((row for row in result.rows if row.candidate.kind != "grid" and row.scores), key=lambda row: row.mean)
    low, high = axes.get_ylim()
    for row in rows:
        average, far = row is result.baseline, not 2 * low - high < row.mean < 2 * high - low
        if average or not far:
            style = ("#333333", "-", 1.6) if average else ("#888888", (0, (2, 2)), 1)
            axes.axhline(row.mean, color=style[0], linestyle=style[1], linewidth=style[2], zorder=1)
    low, high = axes.get_ylim()
    shares = [min(max((row.mean - low) / (high - low), 0), 1) for row in rows]
    for row, share, place in zip(rows, shares, apart(shares, 0.047), strict=True):
        name = "plain average" if row is result.baseline else f"{Path(row.candidate.models[0].name).stem} alone"
        beyond = {0: " \u2193", 1: " \u2191"}.get(share, "")
        label = f"{name} {result.number(row.mean)}{beyond}"
        axes.text(1.01, place, label, transform=axes.transAxes, va="center", fontsize=10.5, color="#222222")
