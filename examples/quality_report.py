"""Tables, verdicts and a picture of what quality.py has measured: from its results file alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from textwrap import fill
from typing import Any, Final, NamedTuple

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark_report import table

Results = dict[str, Any]
Rows = list[list[str]]
# A family or a kind of network, and how many skills are merged.
Cell = tuple[str, int]
REFERENCE: Final = "task arithmetic"  # with a lambda that was searched for, and nothing dropped
PLAIN: Final = "task arithmetic, lambda 1"  # the plain average
FAMILIES: Final = {  # and what they are called above a picture
    "chars": "word tasks, full fine-tunes",
    "lora": "word tasks, LoRA of rank 16",
    "contexts": "tasks in each other's way",
    "digits": "digits",
}
ORDER: Final = tuple(FAMILIES)
EVERYWHERE: Final = ("all", 0)
MATCHED: Final = f"{REFERENCE}, matched with 512"
TENTHS: Final = "tenths, matched with 512"
BASED: Final = "matched with 512, and the base's text"
# What is shown by network, with costs, and with lambdas that were chosen.
KEY_WAYS: Final = (
    *(PLAIN, REFERENCE, "wudi, lambda 1", "wudi"),
    *(f"{REFERENCE}, matched with {count}, lambda 1" for count in (16, 64, 512)),
    *(MATCHED, f"{TENTHS}, lambda 1"),
)
COST_WAYS: Final = (REFERENCE, "wudi", MATCHED, TENTHS, BASED)
CHOSEN_WAYS: Final = (REFERENCE, "wudi", MATCHED, TENTHS)
# Of what starts without a search are shown.
START_WAYS: Final = (
    *(REFERENCE, "ties", "ram", "karcher", "wudi", "wudi ridge 0.1"),
    *("task arithmetic + DARE 0.5", "task arithmetic + DARE 0.9"),
    *("wudi + DARE 0.5", "wudi + DARE 0.9"),
    *(f"{start}, matched with {n}" for start in (REFERENCE, "wudi") for n in (16, 64, 512)),
    *("tenths, matched with 64", TENTHS, BASED),
)
BY: Final = ", lambda "  # between a way and how its lambda was found, where no search has labels
CHOICES: Final = (f"{BY}1", f"{BY}auto", f"{BY}by answers", "")
# By how many examples it is matched; and by which.
COUNTS: Final = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
WRONG: Final = (
    *("examples in the wrong order", "examples of other text"),
    *("examples without answers", "examples of another skill"),
)
KEPT_GAIN: Final = 0.95  # of the expert's gain over the base: where less is kept, the cliff begins
SIGNIFICANT: Final = 0.05
# What is drawn: what it is called, its mark, its line and its colour, one of Okabe and Ito's.
DRAWN: Final = {
    f"{MATCHED}, lambda 1": ("matched with 512 examples, lambda 1", "D", "-", "#009E73"),
    f"{TENTHS}, lambda 1": ("tenths, matched with 512, lambda 1", "P", "--", "#009E73"),
    "wudi": ("wudi, best lambda", "o", "-", "#D55E00"),
    REFERENCE: ("plain average, best lambda", "^", "-", "#0072B2"),
    PLAIN: ("plain average, lambda 1", "v", "--", "#56B4E9"),
}
DRAWN_WIDTH: Final = 384  # of a network at least
SPACING: Final = 0.04  # between marks at one number of skills: some ways lie on one another


class Merge(NamedTuple):
    """What all ways to merge some skills of one training have given."""

    unit: str
    record: Results  # of the training
    skills: int
    arms: dict[str, Any]  # by way: the score, the loss elsewhere, and the lambda if searched for

    @property
    def family(self) -> str:
        return self.unit.partition("/")[0]


Figure = Callable[[Merge, str], float]  # of a merge, by the way that it was made
Show = Callable[[Sequence[float]], str]


def score(merge: Merge, name: str) -> float:
    return 100 * float(merge.arms[name][0])


def lead(merge: Merge, name: str) -> float:
    """How many points a way is ahead of the reference."""
    return score(merge, name) - score(merge, REFERENCE)


def units_of(results: Results) -> dict[str, list[Results]]:
    """What was measured of each kind of network, by training, from the smallest network up."""
    found: dict[str, list[Results]] = {}
    for name, record in sorted(results["units"].items()):
        unit, _, training = name.rpartition("/")
        found.setdefault(unit, []).append({**record, "round": training})

    def order(unit: str) -> tuple[int, int]:
        return ORDER.index(unit.partition("/")[0]), found[unit][0]["parameters"]

    return {unit: found[unit] for unit in sorted(found, key=order)}


def list_merges(results: Results) -> list[Merge]:
    return [
        Merge(unit, record, len(skills.split(" + ")), arms)
        for unit, records in units_of(results).items()
        for record in records
        for skills, arms in record["merges"].items()
    ]


def list_names(merges: Iterable[Merge], searched: bool) -> list[str]:
    """All ways to merge with a lambda that was searched for with labels, or not."""
    every = (name for merge in merges for name in merge.arms)
    return [*dict.fromkeys(name for name in every if (BY not in name) == searched)]


def list_families(merges: Iterable[Merge]) -> list[str]:
    return sorted({merge.family for merge in merges}, key=ORDER.index)


def list_cells(merges: Iterable[Merge], group: str) -> list[Cell]:
    """A family or network with each number of its skills that are merged."""
    found = {merge.skills for merge in merges if group in (merge.family, merge.unit)}
    return [(group, skills) for skills in sorted(found)]


def probability(values: Sequence[float]) -> float:
    """That a mean so far from 0, either way, is chance: a t test."""
    if len(values) < 3 or not any(values):
        return 1.0
    if not stdev(values):
        return 0.0
    error = stdev(values) / math.sqrt(len(values))
    return 2 * chance(abs(fmean(values)) / error, len(values) - 1)


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


def correct(found: Sequence[float]) -> list[float]:
    """Probabilities of several tests, corrected for their number by Holm's way."""
    least = 0.0
    corrected = dict[int, float]()
    for rank, (p, index) in enumerate(sorted(zip(found, range(len(found)), strict=True))):
        corrected[index] = least = max(least, min(1.0, p * (len(found) - rank)))
    return [corrected[index] for index in range(len(found))]


@dataclass
class Comparison:
    """How many points a way is ahead of the reference, by cell: the mean of each round, whose
    networks share what is held out and merged; and the chance of that.
    """

    name: str
    rounds: dict[Cell, list[float]]
    p: dict[Cell, float] = field(default_factory=dict)

    def verdict(self, cell: Cell) -> str:
        word = "better" if fmean(self.rounds[cell]) > 0 else "worse"
        return word if self.p[cell] <= SIGNIFICANT else "cannot be told"

    def show(self, cell: Cell) -> str:
        """The mean, bold where a difference can be told."""
        if cell not in self.rounds:
            return "-"
        mark = "" if self.verdict(cell) == "cannot be told" else "**"
        return f"{mark}{fmean(self.rounds[cell]):+.1f}{mark}"


def average_rounds(merges: Iterable[Merge], name: str) -> dict[Cell, list[float]]:
    """By cell the points ahead, as a mean for each round."""
    found: dict[Cell, dict[str, list[float]]] = {}
    for merge in merges:
        for cell in ((merge.family, merge.skills), EVERYWHERE):
            if name in merge.arms:
                rounds = found.setdefault(cell, {})
                rounds.setdefault(merge.record["round"], []).append(lead(merge, name))
    return {cell: [*map(fmean, rounds.values())] for cell, rounds in found.items()}


def compare(results: Results, searched: bool) -> list[Comparison]:
    """All ways with a search, or without, against the reference: the best first, and those of
    pairs alone last. Corrected for the number of tests: those of everywhere, and the others.
    """
    merges = list_merges(results)
    names = [name for name in list_names(merges, searched) if name != REFERENCE]
    found = [Comparison(name, average_rounds(merges, name)) for name in names]
    whole = average_rounds(merges, REFERENCE).keys()
    for each in found:
        if each.rounds.keys() != whole:
            del each.rounds[EVERYWHERE]
    for is_whole in (True, False):
        tests = [(c, at) for c in found for at in c.rounds if (at == EVERYWHERE) == is_whole]
        chances = correct([probability(each.rounds[cell]) for each, cell in tests])
        for (each, cell), p in zip(tests, chances, strict=True):
            each.p[cell] = p
    return sorted(found, key=lambda each: -fmean(each.rounds.get(EVERYWHERE, [-math.inf])))


def show_at(merges: Sequence[Merge], group: str, name: str, figure: Figure, show: Show) -> str:
    """What the trainings of a family or network have given, by the number of skills."""
    cells = []
    for _, skills in list_cells(merges, group):
        own = [m for m in merges if m.skills == skills and group in (m.family, m.unit)]
        values = [figure(merge, name) for merge in own if name in merge.arms]
        cells.append(show(values) if values else "-")
    return " / ".join(cells)


def by_family(merges: Sequence[Merge], names: Iterable[str], figure: Figure, show: Show) -> Rows:
    families = list_families(merges)
    return [
        [name, *(show_at(merges, each, name, figure, show) for each in families)] for name in names
    ]


def by_network(results: Results, names: Sequence[str], figure: Figure, show: Show) -> Rows:
    merges = list_merges(results)
    return [
        [title(unit, records), *(show_at(merges, unit, name, figure, show) for name in names)]
        for unit, records in units_of(results).items()
    ]


def title(unit: str, records: Sequence[Results]) -> str:
    number = records[0]["parameters"]
    size = f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number / 1e3:.3g} k"
    family, _, shape = unit.partition("/")
    _, _, blocks = shape.partition("x")
    return f"{family}, {size}{f', {blocks} blocks' if blocks else ''}"


def name_columns(merges: Sequence[Merge]) -> list[str]:
    """The heads of what is shown by family and number of skills."""
    cells = [list_cells(merges, family) for family in list_families(merges)]
    return [f"{each[0][0]}, {' / '.join(str(n) for _, n in each)} skills" for each in cells]


def show_mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}"


def show_points(values: Sequence[float]) -> str:
    return f"{fmean(values):+.1f}"


def show_loss(values: Sequence[float]) -> str:
    return f"{fmean(values):+.2f}"


def scores(results: Results) -> str:
    """What is compared, in %: the base, the experts at their own skill, and what DARE leaves of
    them at the highest rate that was tried.
    """
    rate = results["rates"][-1]
    heads = ["", "parameters", "trainings", "base", "fine-tunes, each at its skill"]
    rows = [[*heads, f"the same with {rate:.0%} dropped"]]
    for unit, records in units_of(results).items():
        base = show_mean([100 * record["base"] for record in records])
        alone = [
            show_mean([100 * record["curves"]["DARE"][place] for record in records])
            for place in (0, -1)
        ]
        size = f"{records[0]['parameters']:,}"
        rows.append([title(unit, records), size, str(len(records)), base, *alone])
    return table(rows)


def way_of(name: str) -> str:
    """The way to merge, of a start without a search."""
    return name.partition(BY)[0]


def ranking(results: Results, searched: bool) -> str:
    """Points ahead of the reference, of all ways with a search, or of some without."""
    merges = list_merges(results)
    rows = [["", "all", *name_columns(merges)]]
    compared = compare(results, searched)
    for each in (each for each in compared if searched or way_of(each.name) in START_WAYS):
        rows_cells = (list_cells(merges, family) for family in list_families(merges))
        cells = (" / ".join(map(each.show, by_skills)) for by_skills in rows_cells)
        rows.append([each.name, each.show(EVERYWHERE), *cells])
    return table(rows)


def networks(results: Results) -> str:
    """How the scores of a few ways change with size and skills."""
    return table([["", *KEY_WAYS], *by_network(results, KEY_WAYS, score, show_mean)])


def elsewhere(results: Results) -> str:
    """The loss that fine-tunes and merges add to the base's, at what no skill is about."""
    merges = list_merges(results)

    def subtract_base(merge: Merge, name: str) -> float:
        return float(merge.arms[name][1] - merge.record["elsewhere"]["base"])

    own = ["the fine-tunes themselves"]
    for family in list_families(merges):
        losses = [merge.record["elsewhere"] for merge in merges if merge.family == family]
        own.append(show_loss([each["fine-tunes"] - each["base"] for each in losses]))
    names = [name + choice for name in COST_WAYS for choice in ("", f"{BY}1")]
    added = by_family(merges, names, subtract_base, show_loss)
    return table([["", *name_columns(merges)], own, *added])


def lambdas(results: Results) -> str:
    """Medians of what was chosen."""
    merges = list_merges(results)

    def choose(merge: Merge, name: str) -> float:
        return float(merge.arms[name][2])

    def show(values: Sequence[float]) -> str:
        return f"{median(values):.3g}"

    names = [name + choice for name in CHOSEN_WAYS for choice in CHOICES[1:]]
    return table([["", *name_columns(merges)], *by_family(merges, names, choose, show)])


def chosen(results: Results) -> str:
    """Scores by how lambda was chosen."""
    merges = list_merges(results)
    names = [name + choice for name in CHOSEN_WAYS for choice in CHOICES]
    return table([["", *name_columns(merges)], *by_family(merges, names, score, show_mean)])


def limits(results: Results) -> str:
    """Scores with fewer and more examples, all skills merged, lambda 1."""
    ways = [f"{REFERENCE}, matched with {count}{BY}1" for count in COUNTS]
    names = [PLAIN, *ways, "wudi, lambda 1"]
    rows = [["", "plain average", *map(str, COUNTS), "wudi"]]
    for unit, records in limited(results).items():
        own = last_merges(unit, records)
        cells = [show_mean([score(merge, name) for merge in own]) for name in names]
        rows.append([title(unit, records), *cells])
    return table(rows)


def wrong(results: Results) -> str:
    """Scores with examples that are not of the skill, lambda 1, and for how many of the models the
    tool would warn: they are no better than the base on the answers of these examples.
    """
    rows = [["", *WRONG]]
    for unit, records in limited(results).items():
        cells = [title(unit, records)]
        for name in WRONG:
            tried = [
                (100 * record["merges"][cell][f"{name}{BY}1"][0], made[name])
                for record in records
                for cell, made in record["tried"].items()
                if name in made
            ]
            mean = show_mean([points for points, _ in tried]) if tried else "-"
            warned = sum(made["warned"] for _, made in tried)
            cells.append(f"{mean} ({warned} of {sum(made['models'] for _, made in tried)})")
        rows.append(cells)
    return table(rows)


def limited(results: Results) -> dict[str, list[Results]]:
    """What was merged with few examples, and with wrong ones."""
    return {
        unit: records
        for unit, records in units_of(results).items()
        if any(WRONG[0] in made for each in records for made in each.get("tried", {}).values())
    }


def last_merges(unit: str, records: Sequence[Results]) -> list[Merge]:
    """Of as many skills as there are."""
    merges = [
        Merge(unit, record, len(skills.split(" + ")), arms)
        for record in records
        for skills, arms in record["merges"].items()
    ]
    most = max(merge.skills for merge in merges)
    return [merge for merge in merges if merge.skills == most]


def seconds(results: Results) -> str:
    """How long a merge takes in memory, by network, with the most skills; the median."""
    ways = [REFERENCE, "wudi", MATCHED, "wudi, matched with 512"]
    rows = [["", *ways]]
    for unit, records in units_of(results).items():
        tried = [list(record["tried"].values())[-1] for record in records]
        known = [[made[way]["seconds"] for made in tried if way in made] for way in ways]
        rows.append([title(unit, records), *(f"{median(k):.2f}" if k else "-" for k in known)])
    return table(rows)


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
    for unit, records in units_of(results).items():
        cells = [title(unit, records)]
        for arm in records[0]["curves"]:
            curves = [(record["base"], record["curves"][arm]) for record in records]
            kept = [base + KEPT_GAIN * (curve[0] - base) for base, curve in curves]
            found = [
                100 * cliff(results["rates"], curve, least)
                for (_, curve), least in zip(curves, kept, strict=True)
            ]
            deviation = f" ± {stdev(found):.0f}" if len(found) > 1 else ""
            cells.append(f"{fmean(found):.0f}{deviation}")
        rows.append(cells)
    return table([["", *records[0]["curves"]], *rows])


def report(results: Results) -> str:
    machines = {record["machine"] for record in results["units"].values()}
    sections = {
        "Scores on test data in %, means over trainings:": scores(results),
        f"Points ahead of {REFERENCE} with nothing dropped, in the same training, each with the "
        "best lambda of a search. Bold: a t test over rounds tells it from chance, p <= "
        f"{SIGNIFICANT} when corrected for the number of tests (Holm), in the first column and in "
        "the others. A round is one training of each network:": ranking(results, True),
        "Without a search, points ahead of the same, for which lambda is searched; bold as before, "
        "corrected for all starts in the results:": ranking(results, False),
    }
    if limited(results):
        sections |= {
            "How few examples, scores in % with a lambda of 1 and all skills merged:": limits(
                results
            ),
            "How wrong, the same, and for how many models a warning comes:": wrong(results),
        }
    if any("tried" in record for record in results["units"].values()):
        sections |= {
            "By network, scores in %, by the number of skills:": networks(results),
            "Scores in % with a lambda of 1; with the one that is nearest to the fine-tunes on "
            "held-out examples (auto); with the one that makes their answers likeliest; and with "
            "the best of a search:": chosen(results),
            "The lambdas, medians over trainings:": lambdas(results),
            "What it costs elsewhere: bits a letter of other text, or an image as the base knows "
            "it, more than the base takes:": elsewhere(results),
            "Seconds for a merge of the most skills, in memory, beside other work:": seconds(
                results
            ),
        }
    else:
        sections[
            f"One model: the highest drop rate in % that keeps {KEPT_GAIN:.0%} of what fine-tuning "
            "gained, ± standard deviation over trainings:"
        ] = cliffs(results)
    blocks = [f"{'; '.join(sorted(machines))}; {results['seconds']:.0f} s in all"]
    for caption, shown in sections.items():
        blocks += [fill(caption, 100), shown]
    return "\n\n".join(blocks)


def width_of(unit: str) -> int:
    return int(unit.partition("/")[2].partition("x")[0])


def draw(results: Results, path: Path) -> None:
    """How each way falls off with the number of skills, by family."""
    from matplotlib.figure import Figure

    every = list_merges(results)
    merges = [merge for merge in every if width_of(merge.unit) >= DRAWN_WIDTH] or every
    families = list_families(merges)
    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    for panel, family in zip(panels, families, strict=True):
        lines |= draw_family(panel, [merge for merge in merges if merge.family == family])
        panel.set_title(FAMILIES[family], fontsize=10, loc="left")
        panel.set_xlabel("skills merged")
        panel.grid(axis="y", color="#eeeeee")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("right answers on test data, %")
    panels[0].set_ylim(0, 100)
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path)


def average_networks(merges: Sequence[Merge], name: str) -> float:
    """Of each kind of network the mean of its trainings; of these the mean."""
    units = {merge.unit for merge in merges}
    return fmean(fmean(score(m, name) for m in merges if m.unit == unit) for unit in units)


def draw_family(panel: Any, every: Sequence[Merge]) -> dict[str, Any]:
    """The mean scores by the number of skills. Gives the lines by what they are called."""
    names = [name for name in DRAWN if any(name in merge.arms for merge in every)]
    # Of the networks that all of these were tried with, so that their means can be compared.
    merges = [merge for merge in every if merge.arms.keys() >= {*names}]
    counts = sorted({merge.skills for merge in merges})
    lines = {}
    for number, name in enumerate(names):
        label, mark, line, colour = DRAWN[name]
        means = [average_networks([m for m in merges if m.skills == n], name) for n in counts]
        xs = [x + SPACING * (number - len(names) / 2) for x in range(len(counts))]
        (lines[label],) = panel.plot(xs, means, line, marker=mark, color=colour, linewidth=1.2)
    alone = 100 * fmean(merge.record["curves"]["DARE"][0] for merge in merges)
    lines["fine-tunes, each at its skill"] = panel.axhline(alone, color="#999999", linewidth=1)
    panel.set_xticks(range(len(counts)), counts)
    return lines
