"""A table, verdicts and a picture of what quality.py has measured: from its results file alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

from darelib.sweep.report import chance

# Okabe and Ito's colours, which colour-blind people can tell apart, less the yellow, which print loses. Lines also
# differ in mark and dash, for print without colour.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")
DASHES: Final[tuple[Any, ...]] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)), "-")
SINGLE_ARMS: Final = ("DARE", "no rescale", "magnitude", "DAREx-q")
# Each is compared with the same method without dropping, whose lambda was chosen from the same grid.
MERGE_ARMS: Final = ("linear + DARE", "linear + DARE 0.9", "ties + DARE", "slerp + DARE")
# Without dropping, linear is the average with a lambda of its own.
LABELS: Final = {"average": "average, lambda 1", "linear": "average, lambda tuned"}
KEPT_GAIN: Final = 0.95  # of the expert's gain over the base: where less is kept, the cliff begins
# A difference counts where a two-sided t test over the masks gives it a chance of 1 in 20 at most, and where it is
# large enough to matter: a point of the score.
SIGNIFICANT: Final = 0.05
MATTERS: Final = 0.01
EFFECT: Final = {1: "better", -1: "worse", 0: "cannot be told"}

Unit = dict[str, Any]  # what was measured of one family at one width
Masks = list[float]  # a value for each mask


def order(results: dict[str, Any]) -> dict[str, Unit]:
    """Family by family, from the narrowest to the widest."""
    return dict(sorted(results["units"].items(), key=lambda item: (item[0].split("/")[0], item[1]["parameters"])))


def average(unit: Unit, rows: Sequence[Sequence[float]]) -> Masks:
    """The mean over the rows for each mask. What is deterministic was measured once, and is the same for all masks."""
    return [fmean(row[k % len(row)] for row in rows) for k in range(unit["settings"]["test_seeds"])]


def curve(unit: Unit, names: Sequence[str], arm: str) -> list[Masks]:
    """The mean score of the fine-tunes at each drop rate."""
    return [average(unit, rows) for rows in zip(*(unit["single"][name][arm] for name in names), strict=True)]


def merge_scores(unit: Unit, merge: str, arm: str) -> Masks:
    """The mean over the skills."""
    return average(unit, list(zip(*unit["merged"][merge][arm]["scores"], strict=True)))


def cliff(rates: Sequence[float], scores: Sequence[float], least: float) -> float:
    """The highest drop rate up to which no score is below the least, by straight lines between the rates tried."""
    tried = [(0.0, least), *zip(rates, scores, strict=True)]
    for (rate, score), (next_rate, next_score) in pairwise(tried):
        if next_score < least:
            return rate + (score - least) / (score - next_score) * (next_rate - rate)
    return rates[-1]


def cliffs(unit: Unit, names: Sequence[str], arm: str) -> Masks:
    """The mean cliff of the fine-tunes; the one with large deltas has the first skill."""
    rows = []
    for name in names:
        scores, skill = curve(unit, [name], arm), 0 if name == "large" else unit["skills"].index(name)
        base, expert = unit["models"]["base"]["scores"][skill], scores[0][0]  # nothing is dropped at the first rate
        least = base + KEPT_GAIN * (expert - base)
        rows.append([cliff(unit["settings"]["rates"], mask, least) for mask in zip(*scores, strict=True)])
    return average(unit, rows)


def cliffs_table(units: dict[str, Unit]) -> str:
    """As the documents show it."""
    lines = [
        "| | parameters | DARE | drop without rescale | magnitude pruning | DAREx-q | DARE, large deltas |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, unit in units.items():
        found = [*(cliffs(unit, unit["skills"], arm) for arm in SINGLE_ARMS), cliffs(unit, ["large"], "DARE")]
        cells = [name.replace("/", ", width "), f"{unit['parameters']:,}", *(f"{100 * fmean(x):.0f}" for x in found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(units: dict[str, Unit], arm: str) -> dict[str, Masks]:
    """How much better an arm is than its rival, wherever it was tried."""
    found, rival = {}, arm.split()[0]
    for name, unit in units.items():
        for merge in (merge for merge, arms in unit["merged"].items() if arm in arms):
            pairs = zip(merge_scores(unit, merge, arm), merge_scores(unit, merge, rival), strict=True)
            found[f"{name} {merge}"] = [one - other for one, other in pairs]
    return found


def direction(values: Masks) -> int:
    """1 for more, -1 for less, 0 for what cannot be told."""
    middle = fmean(values)
    if abs(middle) < MATTERS or len(values) < 2:
        return 0
    spread = stdev(values)
    t = abs(middle) / (spread / math.sqrt(len(values))) if spread else math.inf
    return int(math.copysign(1, middle)) if 2 * chance(t, len(values) - 1) <= SIGNIFICANT else 0


def verdict(values: Masks) -> str:
    return f"{100 * fmean(values):+.1f} ± {100 * stdev(values):.1f} points: {EFFECT[direction(values)]}"


def report(results: dict[str, Any]) -> str:
    units = order(results)
    lines = [
        f"{next(iter(units.values()))['machine']}; {results['seconds']:.0f} s in all",
        f"One model: the highest drop rate in % that keeps {KEPT_GAIN:.0%} of what fine-tuning gained\n",
        f"{cliffs_table(units)}\n",
        "Several models, ± standard deviation over masks. A difference is told when a two-sided t test over the masks",
        f"gives it a chance of at most {SIGNIFICANT:.0%} and it is at least one percentage point.",
    ]
    for arm in MERGE_ARMS:
        found, rival = differences(units, arm), arm.split()[0]
        signs = [direction(values) for values in found.values()]
        counts = ", ".join(f"{effect} in {signs.count(sign)}" for sign, effect in EFFECT.items())
        overall = verdict([fmean(mask) for mask in zip(*found.values(), strict=True)])
        lines.append(f"\n{arm} against {LABELS.get(rival, rival)}, on average {overall} ({counts} of {len(found)})")
        lines += [f"  {name}: {verdict(values)}" for name, values in found.items()]
    return "\n".join(lines)


def draw_lines(axes: Any, title: str, ticks: dict[str, float], places: Sequence[float], lines: dict[str, Any]) -> None:
    """The mean over the masks at each place, in a band from the lowest to the highest."""
    for (label, cells), colour, mark, dash in zip(lines.items(), COLOURS, MARKS, DASHES, strict=False):
        style = {"color": colour, "marker": mark, "linestyle": dash, "linewidth": 1.8, "markersize": 4}
        axes.plot(places, [100 * fmean(cell) for cell in cells], label=label, **style)
        low, high = [100 * min(cell) for cell in cells], [100 * max(cell) for cell in cells]
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xticks(list(ticks.values()), list(ticks), fontsize=8)
    axes.set_ylim(-2, 102)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("score on test data, %", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="best")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def place_on_axis(drop_rate: float) -> float:
    """By the logarithm of what is kept: the noise of dropping grows with 1 / (1 - p), and 0.9 is far from 0.99."""
    return -math.log10(1 - drop_rate)


def draw(results: dict[str, Any], path: Path) -> None:
    """A column for each family: the ways to thin the widest model, DARE by width, and merged models."""
    from matplotlib.figure import Figure

    families = [dict(units) for _, units in groupby(order(results).items(), key=lambda item: item[0].split("/")[0])]
    figure = Figure(figsize=(5 * len(families), 11), dpi=100, layout="constrained")
    grid = figure.subplots(3, len(families), squeeze=False)
    ticks = {f"{rate:g}": place_on_axis(rate) for rate in (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)}
    for (top, middle, bottom), units in zip(grid.T, families, strict=True):
        widest, unit = list(units.items())[-1]
        rates = [place_on_axis(rate) for rate in unit["settings"]["rates"]]
        lines = {arm: curve(unit, unit["skills"], arm) for arm in SINGLE_ARMS}
        draw_lines(top, f"{widest} by drop rate, mean of three skills", ticks, rates, lines)
        lines = {name: curve(other, other["skills"], "DARE") for name, other in units.items()}
        lines[f"{widest}, large deltas"] = curve(unit, ["large"], "DARE")
        draw_lines(middle, "DARE by drop rate: widths, and large deltas", ticks, rates, lines)
        *pairs, _ = unit["merged"]  # the last is of all three
        lines, widths = {}, {name: float(place) for place, name in enumerate(units)}
        for arm in ("average", "linear", "linear + DARE", "ties", "ties + DARE", "slerp", "slerp + DARE"):
            scores = [[merge_scores(other, pair, arm) for pair in pairs] for other in units.values()]
            lines[LABELS.get(arm, arm)] = [average(unit, rows) for rows in scores]
        draw_lines(bottom, "Pairs merged, mean of both skills", widths, list(widths.values()), lines)
    figure.savefig(path)
