"""Tables, verdicts and a picture of what quality.py has measured: from its results file alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark_report import table

from darelib.commands.sweep.report import chance

REFERENCE: Final = "task arithmetic"  # with a lambda that was searched for, and nothing dropped
PLAIN: Final = "task arithmetic, lambda 1"  # the plain average
START: Final = "lambda 1.5"  # of what is drawn without a search
MATRICES: Final = "wudi, lambda 1"  # by its defaults
# What each step is worth: what it is called, with it, and without it. (Those from the reference are
# in the ranking.)
STEPS: Final = (
    ("lambda searched for, not 1", "task arithmetic", PLAIN),
    ("wudi, lambda 1, not a lambda searched for", MATRICES, REFERENCE),
    ("lambda searched for, not 1.5, in ram", "ram", f"ram, {START}"),
    ("ram, not task arithmetic, lambda 1.5", f"ram, {START}", f"task arithmetic, {START}"),
    ("DARE in ties", "ties + DARE", "ties"),
    ("DARE in slerp", "slerp + DARE", "slerp"),
    ("DARE in ram", "ram + DARE", "ram"),
    ("magnitude in ties, as its paper has it", "ties + magnitude", "ties"),
    (
        "rescaling by 1 / (1 - p), not at all",
        "task arithmetic + DARE",
        "task arithmetic + DARE, none",
    ),
    ("rescaling by l1, not by 1 / (1 - p)", "task arithmetic + DARE, l1", "task arithmetic + DARE"),
    ("a divisor searched for (DAREx-q)", "task arithmetic + DAREx-q", "task arithmetic + DARE"),
    ("della, not DARE", "task arithmetic + della", "task arithmetic + DARE"),
    ("della, not DARE, in ties", "ties + della", "ties + DARE"),
    ("magnitude in ram", "ram + magnitude", "ram"),
    ("breadcrumbs in ram", "ram + breadcrumbs", "ram"),
)
KEPT_GAIN: Final = 0.95  # of the expert's gain over the base: where less is kept, the cliff begins
SIGNIFICANT: Final = 0.05
COLOURS: Final = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito's
MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")
Results = dict[str, Any]


def units_of(results: Results) -> dict[str, list[Results]]:
    """What was measured of each kind of network, by training, from the smallest network up."""
    names: dict[str, list[Results]] = {}
    for name, record in results["units"].items():
        unit, _, training = name.rpartition("/")
        names.setdefault(unit, []).append({**record, "round": training})
    return dict(
        sorted(names.items(), key=lambda item: (item[0].split("/")[0], item[1][0]["parameters"]))
    )


def title(name: str, records: Sequence[Results]) -> str:
    number = records[0]["parameters"]
    size = f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number / 1e3:.3g} k"
    return f"{name.split('/')[0]}, {size}"


def probability(values: Sequence[float]) -> float:
    """That a mean so far from 0, either way, is chance: a t test."""
    if len(values) < 3 or not any(values):
        return 1.0
    if not stdev(values):
        return 0.0
    return 2 * chance(
        abs(fmean(values)) / (stdev(values) / math.sqrt(len(values))), len(values) - 1
    )


def correct(found: Sequence[float]) -> list[float]:
    """Probabilities of several tests, corrected for their number by Holm's way."""
    least = 0.0
    corrected = dict[int, float]()
    for rank, (p, place) in enumerate(sorted(zip(found, range(len(found)), strict=True))):
        corrected[place] = least = max(least, min(1.0, p * (len(found) - rank)))
    return [corrected[place] for place in range(len(found))]


@dataclass
class Comparison:
    """How many points one contender is ahead, by unit and round; by family, the chance of that."""

    name: str
    values: dict[str, dict[str, float]]
    p: dict[str, float] = field(default_factory=dict)

    @property
    def every(self) -> list[float]:
        return [value for values in self.values.values() for value in values.values()]

    @property
    def families(self) -> dict[str, list[float]]:
        """By family the means of its rounds, whose networks share what is held out and merged."""
        found: dict[str, dict[str, list[float]]] = {}
        for unit, values in self.values.items():
            for number, value in values.items():
                found.setdefault(unit.partition("/")[0], {}).setdefault(number, []).append(value)
        return {family: [*map(fmean, rounds.values())] for family, rounds in found.items()}

    def tell(self, family: str) -> str:
        told = "better" if fmean(self.families[family]) > 0 else "worse"
        return told if self.p[family] <= SIGNIFICANT else "cannot be told"

    @property
    def by_network(self) -> list[str]:
        return [f"{fmean(values.values()):+.1f}" for values in self.values.values()]

    def short_cells(self) -> list[str]:
        """The means by family, bold where a difference can be told, and by network."""
        marks = {
            family: "" if self.tell(family) == "cannot be told" else "**"
            for family in self.families
        }
        told = (
            f"{marks[family]}{fmean(x):+.1f}{marks[family]}" for family, x in self.families.items()
        )
        return [*told, *self.by_network]

    def cells(self) -> list[str]:
        """Of a table: over all trainings; what can be told of each family; the means by network."""
        told = (
            f"{spread(values, '+.1f')}, {self.tell(family)} (p {self.p[family]:.3f})".replace(
                "p 0.000", "p < 0.001"
            )
            for family, values in self.families.items()
        )
        return [f"{fmean(self.every):+.1f}", str(len(self.every)), *told, *self.by_network]


def spread(values: Sequence[float], form: str) -> str:
    return f"{fmean(values):{form}}" + (
        f" ± {stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    )


def compare(results: Results, pairs: Sequence[tuple[str, str, str]]) -> list[Comparison]:
    """Of each pair that was tried, by the mean over the merges that both are for.

    Corrected for their number.
    """
    tried = {*list_names(results, True), *list_names(results, False)}
    found = []
    for name, one, other in (pair for pair in pairs if {*pair[1:]} <= tried):
        values: dict[str, dict[str, float]] = {}
        for unit, records in units_of(results).items():
            merges = [
                [arms for arms in r["merges"].values() if one in arms and other in arms]
                for r in records
            ]
            ahead = (
                [arms[one]["score"] - arms[other]["score"] for arms in each] for each in merges
            )
            values[unit] = {
                r["round"]: 100 * fmean(each) for r, each in zip(records, ahead, strict=True)
            }
        found.append(Comparison(name, values))
    tests = [(each, family) for each in found for family in each.families]
    for (each, family), p in zip(
        tests, correct([probability(e.families[f]) for e, f in tests]), strict=True
    ):
        each.p[family] = p
    return found


def list_names(results: Results, searched: bool) -> list[str]:
    """All ways to merge that a search was made for, or none."""
    merges = (arms for record in results["units"].values() for arms in record["merges"].values())
    return list(
        dict.fromkeys(
            name for arms in merges for name in arms if bool(arms[name]["chosen"]) == searched
        )
    )


def rank(results: Results) -> list[Comparison]:
    """All contenders against the reference, the best first."""
    pairs = [(name, name, REFERENCE) for name in list_names(results, True) if name != REFERENCE]
    return sorted(compare(results, pairs), key=lambda each: -fmean(each.every))


def chosen(results: Results, contender: str, setting: str) -> str:
    """The median of what the searches have chosen."""
    merges = [
        arms
        for record in results["units"].values()
        for arms in record["merges"].values()
        if contender in arms
    ]
    values = [arms[contender]["chosen"].get(setting, 0) for arms in merges]
    return f"{median(values):.2g}" if any(values) else "-"


def name_columns(results: Results) -> list[str]:
    units = units_of(results)
    families = dict.fromkeys(name.partition("/")[0] for name in units)
    return ["", "points", "trainings", *families, *map(title, units, units.values())]


def ranking(results: Results) -> str:
    head = [*name_columns(results), "lambda", "drop rate"]
    settings = ("lambda_coeff", "drop_rate")
    return table(
        [
            head,
            *(
                [c.name, *c.cells(), *(chosen(results, c.name, s) for s in settings)]
                for c in rank(results)
            ),
        ]
    )


def compare_starts(results: Results) -> list[Comparison]:
    """All that needs no search against the plain average."""
    return compare(results, [(name, name, PLAIN) for name in list_names(results, False)])


def starts(results: Results) -> str:
    """What needs no search, by family and by network, for one lambda after the other."""
    found: dict[str, list[list[str]]] = {}
    for each in compare_starts(results):
        found.setdefault(each.name.split(", ")[0], []).append(each.short_cells())
    rows = (
        [way, *map(" / ".join, zip(*by_lambda, strict=True))] for way, by_lambda in found.items()
    )
    return table([["", *name_columns(results)[3:]], *rows])


def steps(results: Results) -> str:
    return table(
        [name_columns(results), *([each.name, *each.cells()] for each in compare(results, STEPS))]
    )


def scores(results: Results) -> str:
    """What is ranked, in %: the base, the experts at their own skill, and the reference."""
    rows = []
    for name, records in units_of(results).items():
        merged = [
            fmean(arms[REFERENCE]["score"] for arms in record["merges"].values())
            for record in records
        ]
        found = [
            [record["base"] for record in records],
            [r["curves"]["DARE"][0] for r in records],
            merged,
        ]
        cells = [f"{100 * fmean(each):.1f}" for each in found]
        rows.append(
            [title(name, records), f"{records[0]['parameters']:,}", str(len(records)), *cells]
        )
    return table(
        [["", "parameters", "trainings", "base", "fine-tunes, each at its skill", REFERENCE], *rows]
    )


def matrices(results: Results) -> str:
    """Points ahead of task arithmetic with its best lambda, by network and number of skills.

    The best on test data, so that a short search is not the reason.
    """
    lines = []
    for unit, records in units_of(results).items():
        ahead: dict[int, list[float]] = {}
        for merge, arms in (item for record in records for item in record["merges"].items()):
            averages = (arms[name]["score"] for name in arms if name.split(", ")[0] == REFERENCE)
            if MATRICES in arms:
                gain = 100 * (arms[MATRICES]["score"] - max(averages))
                ahead.setdefault(len(merge.split(" + ")), []).append(gain)
        lines += [
            f"{title(unit, records)}, {count} skills: {fmean(gains):+.1f} points "
            f"({', '.join(f'{gain:+.1f}' for gain in gains)}); "
            f"ahead in {sum(gain > 0 for gain in gains)} of {len(gains)} trainings"
            for count, gains in ahead.items()
        ]
    return "\n".join(lines) or "not tried"


def cliff(rates: Sequence[float], found: Sequence[float], least: float) -> float:
    """The highest drop rate up to which no score is below the least, by straight lines."""
    tried = [(0.0, least), *zip(rates, found, strict=True)]
    for (rate, score), (next_rate, next_score) in pairwise(tried):
        if next_score < least:
            return rate + (score - least) / (score - next_score) * (next_rate - rate)
    return rates[-1]


def cliffs(results: Results) -> str:
    """One model: the drop rate in % up to which most of what fine-tuning gained stays."""
    rows = []
    rates = results["rates"]
    for name, records in units_of(results).items():
        cells = [title(name, records)]
        for arm in records[0]["curves"]:
            kept = [r["base"] + KEPT_GAIN * (r["curves"][arm][0] - r["base"]) for r in records]
            found = [
                100 * cliff(rates, r["curves"][arm], least)
                for r, least in zip(records, kept, strict=True)
            ]
            cells.append(spread(found, ".0f"))
        rows.append(cells)
    return table([["", *records[0]["curves"]], *rows])


def report(results: Results) -> str:
    machines = {record["machine"] for record in results["units"].values()}
    scales = dict.fromkeys(name.split(", lambda ")[1] for name in list_names(results, False))
    blocks = [
        f"{'; '.join(sorted(machines))}; {results['seconds']:.0f} s in all",
        "Scores on test data in %, means over trainings, merges and masks:",
        scores(results),
        f"Points ahead of {REFERENCE} without dropping, in the same training: the mean; "
        "for each family mean ± standard deviation\n"
        "over rounds, and what a t test over them tells, corrected for the number of tests (Holm); "
        "the means by network; medians\n"
        "of what was chosen. A round is one training of each network:",
        ranking(results),
        "What each step is worth, in points:",
        steps(results),
        "Without a search, points ahead of the plain average "
        "(task arithmetic with a lambda of 1), with a lambda of\n"
        f"{' / '.join(scales)}; bold: a difference that the same test tells:",
        starts(results),
        f"Whole matrices: {MATRICES}, with its defaults and no search, against {REFERENCE} with "
        "the lambda, of those\ntried, that is best on test data; the mean, and each training:",
        matrices(results),
        f"One model: the highest drop rate in % that keeps {KEPT_GAIN:.0%} of what fine-tuning "
        "gained, ± standard deviation over\ntrainings:",
        cliffs(results),
    ]
    return "\n\n".join(blocks)


def draw(results: Results, path: Path) -> None:
    """All ways to merge, a point for each kind of network; DARE of one model by drop rate."""
    from matplotlib.figure import Figure

    ranked = rank(results)
    units = units_of(results)
    begun = sorted(compare_starts(results), key=lambda each: -fmean(each.every))
    begun = [each for each in begun if each.name.endswith(START)]
    figure = Figure(figsize=(13, 1.5 + 0.27 * len(ranked)), dpi=100, layout="constrained")
    axes = figure.subplot_mosaic([["ranked", "starts"], ["ranked", "curves"]])
    styles = {
        name: {"color": colour, "marker": mark, "markersize": 5, "label": title(name, records)}
        for (name, records), colour, mark in zip(units.items(), COLOURS, MARKS, strict=False)
    }
    panels = (
        ("ranked", ranked, f"points ahead of {REFERENCE}, by a search"),
        ("starts", begun, f"points ahead of the plain average, no search, {START}"),
    )
    figure.suptitle(
        "Bars are means over all trainings, black where a difference is told of a family",
        fontsize=9,
    )
    for panel, rows, words in panels:
        drawn = axes[panel]
        for name, style in styles.items():
            means = [fmean(each.values[name].values()) for each in rows]
            drawn.plot(means, range(len(rows)), linestyle="none", alpha=0.8, **style)
        for row, each in enumerate(rows):
            colour = "#000000" if min(each.p.values()) <= SIGNIFICANT else "#999999"
            drawn.plot(
                [fmean(each.every)] * 2,
                [row - 0.4, row + 0.4],
                color=colour,
                linewidth=2.5,
                zorder=0,
            )
        drawn.axvline(0, color="#999999", linewidth=0.8)
        drawn.set_yticks(
            range(len(rows)), [each.name.removesuffix(f", {START}") for each in rows], fontsize=8
        )
        drawn.set_ylim(len(rows) - 0.5, -0.5)
        drawn.set_xscale("symlog", linthresh=2)
        drawn.xaxis.set_major_formatter(lambda tick, _: f"{tick:+g}")
        drawn.set_title(words, fontsize=9, loc="left")
    # By the logarithm of what is kept: the noise of dropping grows with 1 / (1 - p), and 0.9 is far
    # from 0.99.
    drawn = axes["curves"]
    places = [-math.log10(1 - rate) for rate in results["rates"]]
    for name, records in units.items():
        curves = zip(*(record["curves"]["DARE"] for record in records), strict=True)
        drawn.plot(places, [100 * fmean(scores) for scores in curves], **styles[name])
    ticks = (0, 0.5, 0.8, 0.9, 0.95, 0.99)
    drawn.set_xticks([-math.log10(1 - rate) for rate in ticks], [f"{rate:g}" for rate in ticks])
    drawn.set_title("one fine-tune at its skill by DARE's drop rate, %", fontsize=9, loc="left")
    drawn.legend(fontsize=8, frameon=False)
    for panel in axes.values():
        panel.grid(color="#eeeeee")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
