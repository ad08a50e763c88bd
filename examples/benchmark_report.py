"""What benchmark.py has stored, in Markdown: by section a table, its ratios, its origin."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
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
LESS = ("mergekit", "slerp")  # which drops nothing there
EIGHT = "8 threads"
# what is assumed of a machine's disk, and of a filesystem of many: bytes a second
DISK = 3e9
FILESYSTEM = 10e9
COPIES = ("copy on 1 thread", "copy on all threads")
MARKS = {"copy": ("|", "#888888"), "this tool": ("o", "#0072B2"), "mergekit": ("s", "#D55E00")}
MARKS["torch script"] = ("^", "#009E73")
Stored = dict[
    str, Any
]  # all results, a section, the outcome of a point, or the figures of a program


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
        size = (
            f"{self.parameters / 1e9:g} billion" if large else f"{self.parameters / 1e6:g} million"
        )
        words = {
            "method": self.method,
            "models": count_of(self.models, "fine-tune"),
            "dtype": self.dtype,
        }
        words |= {
            "parameters": size,
            "cold": "cold" * self.cold,
            "threads": count_of(self.threads or 0, "thread"),
        }
        differing = [
            words[name] for name in words if getattr(self, name) != getattr(usual, name, None)
        ]
        return ", ".join(filter(None, differing)) or self.label()


def count_of(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}" if number else ""


def value(outcome: Stored, role: str, measure: str = "median time") -> float:
    """What was measured of a program; not a number if it was not."""
    key, pick, unit = MEASURES[measure]
    found = [run[key] for run in outcome["figures"].get(role, {"runs": []})["runs"] if key in run]
    return float(pick(found) / unit) if found else math.nan


def ratio(outcome: Stored, role: str) -> float:
    """How many times the first program's time it takes; on a GPU, that of the same method."""
    return value(outcome, role) / value(
        outcome, role.partition("mergekit's ")[2] or next(iter(outcome["figures"]))
    )


def show(number: float, digits: int | None = None) -> str:
    digits = (number < 10) + (number < 1) if digits is None else digits
    return "n/a" if math.isnan(number) else f"{number:,.{digits}f}"


def span(numbers: Iterable[float]) -> str:
    found = sorted(number for number in numbers if not math.isnan(number)) or [math.nan]
    return " to ".join(dict.fromkeys(map(show, (found[0], found[-1]))))


def table(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_runs(outcome: Stored) -> str:
    """All measures of one point. Only the tool and the copies wait for the disk (fsync)."""
    rows = [
        [
            f"{Point(**outcome['point']).label()}; s, MiB",
            "runs",
            *MEASURES,
            "time / first",
            "trouble",
        ]
    ]
    for role, figure in outcome["figures"].items():
        numbers = [*(value(outcome, role, measure) for measure in MEASURES), ratio(outcome, role)]
        rows.append(
            [
                role,
                str(len(figure["runs"])),
                *(show(number, 2) for number in numbers),
                figure["trouble"],
            ]
        )
    if "this checkout" in outcome["figures"]:
        pairs = (
            [value(outcome, role, measure) for role in outcome["figures"]] for measure in MEASURES
        )
        rows.append(
            [
                "this checkout / the other",
                "",
                *(show(one / other, 2) for one, other in pairs),
                "",
                "",
            ]
        )
    return table(rows)


def show_time(outcome: Stored, role: str) -> str:
    """How long a program took, also in times of the first one's; or why nothing is known."""
    figure = outcome["figures"].get(role)
    taken = value(outcome, role)
    times = ratio(outcome, role)
    if not figure or not figure["runs"]:
        return figure["trouble"] if figure else "-"
    notes = [f"{show(times, 1 + (times < 2))} x"] * (role != next(iter(outcome["figures"])))
    notes += [
        f"{run['written_bytes'] / 1e6:,.0f} MB"
        for run in figure["runs"][:1]
        if "written_bytes" in run
    ]
    notes += [f"error {run['error']:.3f}" for run in figure["runs"][:1] if "error" in run]
    notes += ["1 run"] * (
        len(figure["runs"]) == 1 < max(len(each["runs"]) for each in outcome["figures"].values())
    )
    notes += ["no dropping"] * ((role, outcome["point"]["method"]) == LESS)
    notes += [f"then {figure['trouble']}"] * bool(figure["trouble"])
    shown = f"{show(taken, 1 + (taken < 10))} s" if taken > 0.1 else f"{show(1000 * taken, 2)} ms"
    return shown + f" ({', '.join(notes)})" * bool(notes)


def list_labels(outcomes: list[Stored]) -> list[str]:
    points = [Point(**outcome["point"]) for outcome in outcomes]
    return [
        point.label(points[0]) + outcome.get("note", "")
        for point, outcome in zip(points, outcomes, strict=True)
    ]


def tell(section: Stored) -> list[str]:
    """A table with a row for each point: medians, and peaks in MiB; its ratios; its origin."""
    outcomes = section["outcomes"]
    labels = list_labels(section["outcomes"])
    roles = list(dict.fromkeys(role for outcome in outcomes for role in outcome["figures"]))
    peaks = {role: [value(outcome, role, "peak memory") for outcome in outcomes] for role in roles}
    peaks = {
        role: found for role, found in peaks.items() if span(found) != "n/a" and role not in COPIES
    }
    rows = [["", *roles, *(f"MiB, {role}" for role in peaks)]]
    for number, outcome in enumerate(outcomes):
        times = [show_time(outcome, role) for role in roles]
        rows.append([labels[number], *times, *(show(found[number], 0) for found in peaks.values())])
    large = [
        each
        for each in outcomes
        if each["point"]["parameters"] >= outcomes[0]["point"]["parameters"]
    ]
    times = {
        role: [ratio(each, role) for each in large if (role, each["point"]["method"]) != LESS]
        for role in roles
    }
    own = {role: role.replace("mergekit's", " times") for role in roles if "mergekit's" in role}
    words = ", ".join(
        f"{role} {span(found)}{own.get(role, '')}"
        for role, found in times.items()
        if role != roles[0]
    )
    held = ", ".join(f"{role} {span(found)}" for role, found in peaks.items())
    short = f"In short, in times of {roles[0]}: {words}." + f" MiB: {held}." * bool(held)
    versions = ", ".join(f"{name} {version}" for name, version in section["versions"].items())
    machine = ", ".join(section["machine"])
    code = section["code"][:12]
    origin = f"Measured on {machine}; {versions}; code {code}; `{section['command']}`"
    return [table(rows), textwrap.fill(short, 120), textwrap.fill(origin, 120)]


def project(results: Stored) -> str:
    """What larger linear merges of two bf16 models take, by measured cores and assumed disks."""
    measured = {
        role: results[section]["outcomes"][0]
        for section, role in (("files", "this tool"), ("threads", EIGHT))
    }
    rates = [
        8 * outcome["point"]["parameters"] / value(outcome, role)
        for role, outcome in measured.items()
    ]
    rows = [
        [
            "parameters",
            "read and written",
            "2 cores",
            "8 cores",
            "16 x 8 cores",
            "16 x 8 cores, one filesystem",
        ]
    ]
    for billions in (8, 70, 671):
        moved = 8e9 * billions
        ways = [{"cores": rate, "disk": DISK} for rate in rates]
        ways += [
            {"cores": 16 * rates[1], "disk": 16 * DISK},
            {"cores": 16 * rates[1], "filesystem": FILESYSTEM},
        ]
        cells = [f"{billions} billion", f"{moved / 1e9:,.0f} GB"]
        for way in ways:
            bound, rate = min(way.items(), key=lambda item: item[1])
            seconds = moved / rate
            cells.append(
                f"{seconds:.0f} s ({bound})"
                if seconds < 60
                else f"{seconds / 60:.0f} min ({bound})"
            )
        rows.append(cells)
    return table(rows)


def report(results: Stored) -> str:
    told = [[f"## {name}", *tell(section)] for name, section in results.items()]
    told += (
        [["## larger models", project(results)]] if results.keys() >= {"files", "threads"} else []
    )
    return "\n\n".join("\n\n".join(blocks) for blocks in told)


def draw(outcomes: list[Stored], path: Path) -> None:
    """Time and peak memory of all programs, side by side, a line for each point."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9.3, 1.9 + 0.36 * len(outcomes)), dpi=150, layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    titles = ("median time in seconds", "peak memory in MiB")
    fastest = [min(COPIES, key=partial(value, outcome)) for outcome in outcomes]
    for axes, title, measure in zip(panels, titles, ("median time", "peak memory"), strict=True):
        axes.set_xscale("log")
        for role, (mark, color) in MARKS.items():
            programs = zip(
                outcomes, fastest if role == "copy" else [role] * len(outcomes), strict=True
            )
            places = [value(outcome, program, measure) for outcome, program in programs]
            style = {"ms": 13, "mew": 2.5} if mark == "|" else {"ms": 8, "markeredgecolor": "white"}
            axes.plot(places, range(len(places)), mark, label=role, color=color, **style)
        axes.set_title(title, fontsize=12, loc="left", color="#333333")
        axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:,g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(outcomes)), list_labels(outcomes))
    panels[0].set_ylim(len(outcomes) - 0.5, -0.5)
    named = panels[0].get_legend_handles_labels()
    picture.legend(*named, loc="outside lower center", ncols=4, fontsize=11, frameon=False)
    picture.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": "dare"})
