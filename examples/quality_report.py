"""Tables, verdicts and a picture of what quality.py has measured: from its results file alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sweep import chance
from sweep_plot import COLOURS, DASHES, MARKS, load_matplotlib, place_on_axis

SINGLE_ARMS: Final = ("DARE", "no rescale", "magnitude", "DAREx-q")
CLAIMED: Final = 0.9  # the drop rate that the paper calls harmless
KEPT_GAIN: Final = 0.95  # of the expert's gain over the base: where less is kept, the cliff begins
# Differences count where a t test over the masks gives them a chance of 1 in 20, and where they are large enough to
# matter: a point of the score, or of the drop rate.
SIGNIFICANT: Final = 0.05
MATTERS: Final = 0.01
CRITERION: Final = (
    "A difference counts as told when a two-sided t test over the masks gives it a chance of at most 5% and it is at "
    "least one percentage point."
)


def mean_of(rows: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.fmean(row) for row in rows)


def skill_of(name: str, skills: Sequence[str]) -> str:
    """What a fine-tune was trained for: the one with large deltas, for the first skill."""
    return skills[0] if name == "large" else name


def direction(differences: Sequence[float]) -> int:
    """1 for more, -1 for less, 0 for what cannot be told."""
    middle = statistics.fmean(differences)
    if abs(middle) < MATTERS or len(differences) < 2:
        return 0
    spread = statistics.stdev(differences)
    t = abs(middle) / (spread / math.sqrt(len(differences))) if spread else math.inf
    return int(math.copysign(1, middle)) if 2 * chance(t, len(differences) - 1) <= SIGNIFICANT else 0


EFFECT: Final = {1: "helps", -1: "hurts", 0: "cannot be told"}


def verdict(sign: int) -> str:
    return {1: "as the paper says", -1: "not as the paper says", 0: "cannot be told"}[sign]


def spread_of(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def points(values: Sequence[float], sign: str = "") -> str:
    """The mean in % and the standard deviation; with the sign "+", as a difference."""
    return f"{100 * statistics.fmean(values):{sign}.1f} ± {100 * spread_of(values):.1f}"


def cliff(rates: Sequence[float], scores: Sequence[float], least: float) -> float:
    """The highest drop rate up to which no score is below the least, by straight lines between the rates tried."""
    for k, score in enumerate(scores):
        if score < least:
            if k == 0:
                return 0.0
            share = (scores[k - 1] - least) / (scores[k - 1] - score)
            return rates[k - 1] + share * (rates[k] - rates[k - 1])
    return rates[-1]


def expert_scores(unit: dict[str, Any], name: str) -> tuple[float, float]:
    """What the base and the expert score at the expert's skill."""
    place = unit["skills"].index(skill_of(name, unit["skills"]))
    return unit["models"]["base"]["scores"][place], unit["models"][name]["scores"][place]


def cliffs(unit: dict[str, Any], name: str, arm: str) -> list[float]:
    """The cliff of one fine-tune, for each mask; a deterministic arm has the same for all."""
    base, expert = expert_scores(unit, name)
    count, curve = unit["settings"]["test_seeds"], unit["single"][name][arm]
    masks = [[row[k % len(row)] for row in curve] for k in range(count)]
    return [cliff(unit["settings"]["rates"], scores, base + KEPT_GAIN * (expert - base)) for scores in masks]


def mean_cliffs(unit: dict[str, Any], arm: str) -> list[float]:
    """For each mask, the mean over the fine-tunes with small deltas."""
    return [statistics.fmean(row) for row in zip(*(cliffs(unit, name, arm) for name in unit["skills"]), strict=True)]


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def mask_means(arm: dict[str, Any], count: int) -> list[float]:
    """The mean over the skills for each mask; what is deterministic is the same for all."""
    rows = [statistics.fmean(row) for row in arm["scores"]]
    return [rows[k % len(rows)] for k in range(count)]


def ordered(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(sorted(results["units"].items(), key=lambda item: (item[0].split("/")[0], int(item[0].split("/")[1]))))


def by_family(results: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for name, unit in ordered(results).items():
        families.setdefault(name.split("/")[0], {})[name] = unit
    return families


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that a terminal and Markdown both show."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def models_table(results: dict[str, Any]) -> str:
    rows = []
    for name, unit in ordered(results).items():
        for expert in unit["single"]:
            size = unit["models"][expert]["delta"]
            sizes = [f"{size['mean']:.2g}", f"{size['p99']:.2g}", f"{size['relative']:.1%}"]
            scores = [f"{100 * score:.1f}" for score in expert_scores(unit, expert)]
            found = [f"{statistics.fmean(cliffs(unit, expert, arm)):.2f}" for arm in SINGLE_ARMS]
            rows.append([name, expert, *scores, *sizes, *found])
    head = ["model", "fine-tune", "base", "expert", "mean delta", "99th percentile", "relative norm"]
    return table([*head, *(f"cliff: {arm}" for arm in SINGLE_ARMS)], rows)


def rates_table(results: dict[str, Any]) -> str:
    """Means over the fine-tunes with small deltas, and the one with large ones."""
    rows = []
    rates = sorted({rate for unit in results["units"].values() for rate in unit["settings"]["rates"]})
    for name, unit in ordered(results).items():
        for arm in (*SINGLE_ARMS, "DARE, large"):
            names = ["large"] if arm == "DARE, large" else unit["skills"]
            columns = zip(*(unit["single"][expert][arm.split(",")[0]] for expert in names), strict=True)
            means = dict(zip(unit["settings"]["rates"], map(mean_of, columns), strict=True))
            rows.append([name, arm, *(f"{100 * means[rate]:.1f}" if rate in means else "" for rate in rates)])
    return table(["model", "drop rate:", *map(str, rates)], rows)


def alone(unit: dict[str, Any], skills: Sequence[str]) -> dict[str, Any]:
    """The base and each expert by itself at all the skills of a merge, like arms that chose nothing."""
    places = [unit["skills"].index(skill) for skill in skills]
    return {
        f"{name} alone": {"scores": [[unit["models"][name]["scores"][place] for place in places]]}
        for name in ("base", *skills)
    }


# Without dropping, linear is the average with a lambda of its own.
LABELS: Final = {"average": "average, lambda 1", "linear": "average, lambda tuned"}


def merged_table(results: dict[str, Any]) -> str:
    rows = []
    for name, unit in ordered(results).items():
        for models, arms in unit["merged"].items():
            for arm, found in (alone(unit, models.split(" + ")) | arms).items():
                columns = zip(*found["scores"], strict=True)
                each = " / ".join(f"{100 * statistics.fmean(column):.1f}" for column in columns)
                setting = f"drop {found['drop_rate']:g}, lambda {found['lambda']:g}" if "lambda" in found else ""
                means = mask_means(found, len(found["scores"]))
                rows.append([name, models, LABELS.get(arm, arm), setting, points(means), each])
    return table(["model", "merged", "how", "chosen on validation data", "test: mean", "each skill"], rows)


def single_verdicts(name: str, units: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What one family shows of thinning one model."""
    found = {unit: mean_cliffs(results, "DARE") for unit, results in units.items()}
    for unit, rates in found.items():
        flat = 1 if statistics.fmean(rates) >= CLAIMED else direction([rate - CLAIMED for rate in rates])
        yield f"{unit}: flat until {points(rates)}% are dropped (paper: {CLAIMED:.0%} or more): {verdict(flat)}."
    narrow, wide = next(iter(found)), list(found)[-1]
    if narrow != wide:
        moved = minus(found[wide], found[narrow])
        says = verdict(direction(moved))
        yield f"{name}: the cliff moves right from {narrow} to {wide}, by {points(moved, '+')} points: {says}."
    for unit, results in units.items():
        for arm in ("no rescale", "magnitude"):
            lead = minus(found[unit], mean_cliffs(results, arm))
            words = "without rescaling" if arm == "no rescale" else "with magnitude pruning"
            sign, when = (1, "earlier") if statistics.fmean(lead) >= 0 else (-1, "later")
            size = points([sign * value for value in lead])
            yield f"{unit}: {words} it falls {size} points {when} (paper: earlier): {verdict(direction(lead))}."
        gain = minus(mean_cliffs(results, "DAREx-q"), found[unit])
        yield f"{unit}: DAREx-q moves the cliff by {points(gain, '+')} points: {EFFECT[direction(gain)]}."
        skill = results["skills"][0]
        lead = minus(cliffs(results, skill, "DARE"), cliffs(results, "large", "DARE"))
        says = verdict(direction(lead))
        yield f"{unit}: large deltas of {skill} fail earlier, by {points(lead, '+')} points: {says}."


# DARE, and the same without dropping, whose lambda was chosen from the same grid.
RIVALS: Final = (
    ("linear + DARE", "linear"),
    ("linear + DARE 0.9", "linear"),
    ("ties + DARE", "ties"),
    ("slerp + DARE", "slerp"),
)


def differences(results: dict[str, Any], dropping: str, rival: str) -> dict[str, list[float]]:
    """DARE less its rival, for each mask, wherever both were tried."""
    found = {}
    for name, unit in ordered(results).items():
        count = unit["settings"]["test_seeds"]
        for models, arms in unit["merged"].items():
            if dropping in arms:
                pair = (mask_means(arms[arm], count) for arm in (dropping, rival))
                found[f"{name} {models}"] = minus(*pair)
    return found


def merge_verdicts(results: dict[str, Any]) -> Iterator[str]:
    for dropping, rival in RIVALS:
        found = differences(results, dropping, rival)
        signs = {name: direction(values) for name, values in found.items()}
        counts = [sum(sign == wanted for sign in signs.values()) for wanted in (1, -1, 0)]
        average = "the average" if rival == "linear" else f"{rival} without dropping"
        overall = [statistics.fmean(mask) for mask in zip(*found.values(), strict=True)]
        yield (
            f"{dropping} against {average}, lambda tuned the same way: helps in {counts[0]}, hurts in {counts[1]}, "
            f"cannot be told in {counts[2]} of {len(found)} merges; on average {points(overall, '+')} points: "
            f"{EFFECT[direction(overall)]}."
        )
        for name, values in found.items():
            yield f"  {name}: {points(values, '+')} points: {EFFECT[signs[name]]}"


def report(results: dict[str, Any]) -> str:
    """All tables and verdicts."""
    machines = sorted({unit["machine"] for unit in results["units"].values()})
    each = ", ".join(f"{name} {unit['seconds']:.0f} s" for name, unit in ordered(results).items())
    sections = [
        f"{'; '.join(machines)}; {results['seconds']:.0f} s in all (side by side: {each})",
        "One model: scores in %, sizes of the deltas, and the cliff: the highest drop rate that keeps "
        f"{KEPT_GAIN:.0%} of the gain",
        models_table(results),
        "Scores in % by drop rate, mean of the three fine-tunes and all masks",
        rates_table(results),
        "Several models: mean of the skills in %, ± standard deviation over masks",
        merged_table(results),
        f"Verdicts. {CRITERION}",
        "\n".join(line for name, units in by_family(results).items() for line in single_verdicts(name, units)),
        "\n".join(merge_verdicts(results)),
    ]
    return "\n\n".join(sections)


BARS: Final = ("average", "linear", "linear + DARE", "ties", "ties + DARE", "slerp", "slerp + DARE")


def mean_curve(unit: dict[str, Any], names: Sequence[str], arm: str) -> list[list[float]]:
    """For each drop rate: the mean over the fine-tunes, for each mask, in %."""
    curves = [unit["single"][name][arm] for name in names]
    return [[100 * statistics.fmean(mask) for mask in zip(*cells, strict=True)] for cells in zip(*curves, strict=True)]


def draw_curve(axes: Any, unit: dict[str, Any], names: Sequence[str], arm: str, number: int, label: str) -> None:
    rates, cells = [place_on_axis(rate) for rate in unit["settings"]["rates"]], mean_curve(unit, names, arm)
    style = {"color": COLOURS[number], "marker": MARKS[number], "linestyle": DASHES[number]}
    axes.plot(rates, [statistics.fmean(cell) for cell in cells], label=label, linewidth=1.8, markersize=4, **style)
    low, high = [min(cell) for cell in cells], [max(cell) for cell in cells]
    axes.fill_between(rates, low, high, color=COLOURS[number], alpha=0.15, linewidth=0)


def finish_curves(axes: Any, unit: dict[str, Any], title: str) -> None:
    shown = [rate for rate in (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99) if rate in unit["settings"]["rates"]]
    axes.set_xticks([place_on_axis(rate) for rate in shown], [f"{rate:g}" for rate in shown], fontsize=8)
    axes.set_ylim(-2, 102)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("drop rate", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="best")


def draw_bars(axes: Any, units: dict[str, dict[str, Any]]) -> None:
    """The merges of each width: the mean over all pairs, a bar for each way; whiskers: standard deviation of masks."""
    for number, arm in enumerate(BARS):
        for place, unit in enumerate(units.values()):
            count, merges = unit["settings"]["test_seeds"], unit["merged"].values()
            rows = [mask_means(arms[arm], count) for arms in merges if arm in arms and "slerp" in arms]  # pairs
            means = [100 * statistics.fmean(row) for row in zip(*rows, strict=True)]
            axes.bar(
                place + (number - len(BARS) / 2 + 0.5) * 0.12,
                statistics.fmean(means),
                0.11,
                yerr=spread_of(means),
                color=COLOURS[(number + 1) // 2],
                alpha=0.55 if "DARE" not in arm and number else 1,
                hatch="//" if "DARE" in arm else None,
                edgecolor="white",
                error_kw={"linewidth": 1},
                label=LABELS.get(arm, arm) if place == 0 else None,
            )
    for place, unit in enumerate(units.values()):  # what a perfect merge would keep, and the base
        own = [expert_scores(unit, skill) for skill in unit["skills"]]
        for level in (100 * statistics.fmean(column) for column in zip(*own, strict=True)):
            axes.plot([place - 0.43, place + 0.43], [level, level], color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(units)), list(units), fontsize=9)
    axes.set_ylim(0, 102)
    axes.set_title("Pairs merged, mean of both skills (dotted: their experts, base)", fontsize=10, loc="left")


def draw(results: dict[str, Any], path: Path) -> None:
    """A column for each family: the ways to thin the widest model, DARE by width, and merged models."""
    families = by_family(results)
    figure = load_matplotlib().Figure(figsize=(5 * len(families), 11), dpi=100, layout="constrained")
    grid = figure.subplots(3, len(families), squeeze=False)
    for column, units in enumerate(families.values()):
        widest, unit = list(units.items())[-1]
        for number, arm in enumerate(SINGLE_ARMS):
            draw_curve(grid[0][column], unit, unit["skills"], arm, number, arm)
        finish_curves(grid[0][column], unit, f"{widest}: one model thinned, mean of three skills")
        for number, (name, other) in enumerate(units.items()):
            draw_curve(grid[1][column], other, other["skills"], "DARE", number, name)
        draw_curve(grid[1][column], unit, ["large"], "DARE", len(units), f"{widest}, large deltas")
        finish_curves(grid[1][column], unit, "DARE by width, and with large deltas")
        draw_bars(grid[2][column], units)
    for axes in grid.flat:
        axes.set_ylabel("score on test data, %", fontsize=9)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[2][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(BARS), fontsize=9, frameon=False)
    figure.savefig(path)
