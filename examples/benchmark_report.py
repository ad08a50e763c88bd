"""Tables and a picture of what benchmark.py has measured and stored."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

MIB = 1 << 20
# What is told of a program's runs: in which figure, what of all runs, in which unit.
MEASURES: dict[str, tuple[str, Any, int]] = {
    "best time": ("wall_s", min, 1),
    "median time": ("wall_s", median, 1),
    "CPU time": ("cpu_s", median, 1),
    "peak memory": ("peak_bytes", max, MIB),
}
# What is compared throughout: name, and mark in the picture.
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "floor": ("copying the files", {"color": "#888888", "marker": "|", "markersize": 13, "markeredgewidth": 2.5}),
    "tool": ("this tool", {"color": "#0072B2", "marker": "o", "markersize": 8, "markeredgecolor": "white"}),
    "mergekit": ("mergekit", {"color": "#D55E00", "marker": "s", "markersize": 8, "markeredgecolor": "white"}),
    "torch": ("plain torch script", {"color": "#009E73", "marker": "^", "markersize": 8, "markeredgecolor": "white"}),
}
COPIES = ("floor-1-fsync", "floor-n-fsync")
TITLES = ["", "copy on 1 thread", "on all threads", "this tool", "/ copies", "mergekit", "torch script"]
TITLES += ["MiB, this tool", "mergekit", "torch script"]
Stored = dict[str, Any]  # all results, or the outcome of a point


class Point(NamedTuple):
    """One setting of the comparison. Without a number of threads, each program chooses its own."""

    parameters: int
    method: str = "linear"
    models: int = 2
    dtype: str = "bf16"
    cold: bool = False
    threads: int | None = None

    def label(self, usual: Point | None = None) -> str:
        """How it differs from the usual point; in full if it does not, or there is none."""
        large = self.parameters >= 1e8
        size = f"{self.parameters / 1e9:g} billion" if large else f"{self.parameters / 1e6:g} million"
        words = {"method": self.method, "models": count_of(self.models, "fine-tune"), "dtype": self.dtype}
        words |= {"parameters": size, "cold": "cold" * self.cold, "threads": count_of(self.threads or 0, "thread")}
        differing = [words[name] for name in words if getattr(self, name) != getattr(usual, name, None)]
        return ", ".join(filter(None, differing)) or self.label()


def count_of(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}" if number else ""


def value(outcome: Stored, role: str, measure: str = "median time") -> float:
    """What was measured of a program; not a number if it was not."""
    key, pick, unit = MEASURES[measure]
    runs = [run for each in outcome["figures"] if each["role"] == role for run in each["runs"]]
    return float(pick([run[key] for run in runs]) / unit) if runs else math.nan


def show(number: float, digits: int = 2) -> str:
    return "n/a" if math.isnan(number) else f"{number:,.{digits}f}"


def print_outcome(outcome: Stored) -> None:
    """One table. The tool and the copies wait for the disk (fsync); mergekit and torch do not."""
    print(f"\n{Point(**outcome['point']).label()}, {outcome['size'] / MIB:,.0f} MiB each; times in s, memory in MiB")
    print(f"{'':<44} runs " + " ".join(f"{title:>11}" for title in (*MEASURES, "time / tool")))
    for each in outcome["figures"]:
        numbers = [value(outcome, each["role"], measure) for measure in MEASURES]
        numbers.append(value(outcome, each["role"]) / value(outcome, "tool"))
        print(f"{each['name']:<44} {len(each['runs']):>4} " + " ".join(f"{show(number):>11}" for number in numbers))
        if each["trouble"]:
            print(f"{each['trouble']}: {each['detail']}")
        if each["role"] == "against":
            pairs = ((name, value(outcome, "tool", name) / value(outcome, "against", name)) for name in MEASURES)
            print(f"this checkout / the other: {', '.join(f'{name} {show(ratio)}' for name, ratio in pairs)}")


def rival(outcome: Stored, role: str) -> str:
    """A rival's time and how many times the tool's that is, or why there is none."""
    figures = next((each for each in outcome["figures"] if each["role"] == role), None)
    if not figures or not figures["runs"]:
        return figures["trouble"] if figures else "-"
    notes = [f"{show(value(outcome, role) / value(outcome, 'tool'), 1)} x"]
    notes += ["1 run"] * (len(figures["runs"]) == 1 < max(len(each["runs"]) for each in outcome["figures"]))
    notes += ["no dropping"] * figures["name"].endswith("(no dropping)")
    notes += [f"then {figures['trouble']}"] * bool(figures["trouble"])
    return f"{value(outcome, role):.1f} ({', '.join(notes)})"


def list_labels(outcomes: list[Stored]) -> list[str]:
    points = [Point(**outcome["point"]) for outcome in outcomes]
    return [point.label(points[0]) for point in points]


def summarize(outcomes: list[Stored]) -> str:
    """A Markdown table with a row for each point: medians in seconds, and peaks in MiB."""
    rows = [TITLES, ["---"] + ["---:"] * (len(TITLES) - 1)]
    for label, outcome in zip(list_labels(outcomes), outcomes, strict=True):
        slow, fast, tool = (value(outcome, role) for role in (*COPIES, "tool"))
        fast = slow if math.isnan(fast) else fast  # with one thread, there may be only one
        cells = [label, show(slow), show(fast), show(tool), f"{show(tool / slow)}, {show(tool / fast)}"]
        cells += [rival(outcome, "mergekit"), rival(outcome, "torch")]
        rows.append(cells + [show(value(outcome, role, "peak memory"), 0) for role in ("tool", "mergekit", "torch")])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def print_end(results: Stored) -> None:
    if len(results["outcomes"]) > 1:
        print(f"\n{summarize(results['outcomes'])}")
    machine, memory = results["machine"], results["machine"]["memory_bytes"] / (1 << 30)
    cores = f"{count_of(machine['cores'], 'core')}, {memory:.1f} GiB of memory"
    print(f"\n{machine['system']}, {machine['processor']}, {cores}")
    print(", ".join(f"{name} {version}" for name, version in results["versions"].items()))


def draw(outcomes: list[Stored], path: Path) -> None:
    """Time and peak memory of all programs, side by side, a line for each point."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9.3, 1.9 + 0.36 * len(outcomes)), dpi=150, layout="constrained")
    panels, titles = picture.subplots(1, 2, sharey=True), ("median time in seconds", "peak memory in MiB")
    fastest = [min(COPIES, key=partial(value, outcome)) for outcome in outcomes]
    for axes, title, measure in zip(panels, titles, ("median time", "peak memory"), strict=True):
        axes.set_xscale("log")
        for role, (name, style) in PROGRAMS.items():
            programs = zip(outcomes, fastest if role == "floor" else [role] * len(outcomes), strict=True)
            places = [value(outcome, program, measure) for outcome, program in programs]
            axes.plot(places, range(len(places)), linestyle="none", label=name, **style)
        axes.set_title(title, fontsize=12, loc="left", color="#333333")
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:,g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(axis="x", color="#dddddd")
        axes.grid(axis="y", color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(outcomes)), list_labels(outcomes))
    panels[0].set_ylim(len(outcomes) - 0.5, -0.5)
    named = panels[0].get_legend_handles_labels()
    picture.legend(*named, loc="outside lower center", ncols=4, fontsize=11, frameon=False)
    picture.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": "dare"})
