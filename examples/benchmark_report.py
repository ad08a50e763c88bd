"""Tables and a picture of what benchmark.py has measured and stored."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
START_UP = 1_000_000  # parameters of a model that shows how long a program takes to start
COPIES = ("floor-n-fsync", "floor-1-fsync", "floor-n", "floor-1")
ONE_THREAD = ("floor-1-fsync", "floor-1")
# What is compared throughout: name, colour and mark in the picture.
PROGRAMS = {
    "floor": ("copying the files", "#888888", "|"),
    "tool": ("this tool", "#0072B2", "o"),
    "mergekit": ("mergekit", "#D55E00", "s"),
    "torch": ("plain torch script", "#009E73", "^"),
}


class Point(NamedTuple):
    """One setting of the comparison. Without a number of threads, each program chooses its own."""

    parameters: int
    method: str = "linear"
    models: int = 2
    dtype: str = "bf16"
    cold: bool = False
    threads: int | None = None

    @property
    def writes(self) -> bool:
        return self.method != "analyze"

    @property
    def words(self) -> list[str]:
        large = self.parameters >= 1e8
        size = f"{self.parameters / 1e9:g} billion" if large else f"{self.parameters / 1e6:g} million"
        words = [self.method, count_of(self.models, "fine-tune"), self.dtype, size, "cold" * self.cold]
        return [*words, count_of(self.threads, "thread") if self.threads else ""]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, self.words))


def count_of(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def load(path: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads(path.read_text())
        if not results["outcomes"]:
            raise ValueError("there are none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"cannot read the figures of a benchmark from {path}: {error}") from None
    return results


def find(outcome: dict[str, Any] | None, *roles: str) -> dict[str, Any] | None:
    """The first of the roles that has figures."""
    known = {figures["role"]: figures for figures in outcome["figures"] if figures["runs"]} if outcome else {}
    return next((known[role] for role in roles if role in known), None)


def value(figures: dict[str, Any] | None, key: str = "wall_s", pick: Callable[..., Any] = statistics.median) -> Any:
    """The median of a figure over the runs, or what else to pick; None where it is not known."""
    known = [run[key] for run in figures["runs"] if run[key] is not None] if figures else []
    return pick(known) if known else None


def ratio(above: Any, below: Any) -> float | None:
    return above / below if above and below else None


def show(number: float | None, digits: int = 2) -> str:
    return "n/a" if number is None else f"{number:,.{digits}f}"


def show_peak(figures: dict[str, Any] | None) -> str:
    return show(ratio(value(figures, "peak_bytes", max), MIB), 0)


def compare(one: dict[str, Any] | None, other: dict[str, Any]) -> str:
    """The ratios of everything that is measured."""
    ratios = {
        "best time": ratio(value(one, pick=min), value(other, pick=min)),
        "median time": ratio(value(one), value(other)),
        "CPU time": ratio(value(one, "cpu_s"), value(other, "cpu_s")),
        "peak memory": ratio(value(one, "peak_bytes", max), value(other, "peak_bytes", max)),
    }
    return ", ".join(f"{name} {show(times)}" for name, times in ratios.items())


def print_outcome(outcome: dict[str, Any]) -> None:
    """One table. The tool and the copies wait for the disk (fsync); mergekit and torch do not."""
    tool, floor = value(find(outcome, "tool")), value(find(outcome, *COPIES))
    print(f"\n{Point(**outcome['point']).label}\n{outcome['title']}; {outcome['size'] / MIB:,.0f} MiB each")
    columns = ("best s", "median s", "CPU s", "peak MiB", "/ tool", "/ floor")
    print(f"{'':<44} runs " + " ".join(f"{column:>8}" for column in columns))
    for each in outcome["figures"]:
        if each["runs"]:
            median, cells = value(each), [show(value(each, pick=min)), show(value(each)), show(value(each, "cpu_s"))]
            cells += [show_peak(each), show(ratio(median, tool)), show(ratio(median, floor))]
            print(f"{each['name']:<44} {len(each['runs']):>4} " + " ".join(f"{cell:>8}" for cell in cells))
        if each["trouble"]:
            print(f"{each['name']:<44}      {each['trouble']}: {each['detail'].partition(chr(10))[0]}")
    if other := find(outcome, "against"):
        print(f"this checkout / the other: {compare(find(outcome, 'tool'), other)}")


def label_of(results: dict[str, Any], point: Point) -> str:
    """How the point differs from the centre of the comparison; in full if it does not, or there is none."""
    centre = Point(results["sizes"][1]).words if results["sizes"] else [""] * len(point.words)
    differing = [word for word, usual in zip(point.words, centre, strict=True) if word and word != usual]
    return ", ".join(differing) or point.label


def rival(outcome: dict[str, Any], role: str) -> str:
    """A rival's time and how many times the tool's that is, or why there is none."""
    figures = next((each for each in outcome["figures"] if each["role"] == role), None)
    if not figures or not figures["runs"]:
        return (figures["trouble"] if figures else "") or "-"
    notes = [f"{value(figures) / value(find(outcome, 'tool')):.1f} x"] if find(outcome, "tool") else []
    notes += ["1 run"] * (len(figures["runs"]) == 1 < max(len(each["runs"]) for each in outcome["figures"]))
    notes += ["no dropping"] * figures["name"].endswith("(no dropping)")
    notes += [f"then {figures['trouble']}"] * bool(figures["trouble"])
    return f"{value(figures):.1f} ({', '.join(notes)})"


def summary(results: dict[str, Any]) -> list[list[str]]:
    """One row for each point, below a row of titles: medians in seconds, and peaks in MiB."""
    rows = [["", "copy on 1 thread", "on all threads", "this tool", "/ copies", "mergekit", "torch script"]]
    rows[0] += ["MiB, this tool", "mergekit", "torch script"]
    for outcome in results["outcomes"]:
        slow, fast, tool = (value(find(outcome, *roles)) for roles in (ONE_THREAD, COPIES, ("tool",)))
        cells = [label_of(results, Point(**outcome["point"])), show(slow), show(fast), show(tool)]
        cells.append(f"{show(ratio(tool, slow))}, {show(ratio(tool, fast))}" if tool else "n/a")
        cells += [rival(outcome, "mergekit"), rival(outcome, "torch")]
        rows.append(cells + [show_peak(find(outcome, role)) for role in ("tool", "mergekit", "torch")])
    return rows


def markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def align(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(map("  ".join, lines))


def growth(results: dict[str, Any]) -> list[list[str]]:
    """Seconds per GB read, less the time to start, along each axis, and the growth from end to end."""
    rows = [["seconds per GB read, start-up taken off", "GB read", "copy", "this tool", "mergekit", "torch script"]]
    known = {Point(**outcome["point"]): outcome for outcome in results["outcomes"]}
    centre, start = Point(results["sizes"][1]), known.get(Point(START_UP))
    ties = centre._replace(method="ties")
    axes = {
        "size": [Point(size) for size in results["sizes"]],
        "models": [centre, centre._replace(models=5)],
        "models, ties": [ties, ties._replace(models=5)],
        "threads": [*(point for point in known if point.threads), centre],
    }
    for axis, wanted in axes.items():
        points = [point for point in wanted if point in known]
        if len(points) < 2:
            continue
        spent = [[beyond(known[point], start, role) for role in PROGRAMS] for point in points]
        read = [known[point]["size"] * (point.models + 1) / 1e9 for point in points]
        for point, size, times in zip(points, read, spent, strict=True):
            rates = [show(ratio(seconds, size), 3) for seconds in times]
            rows.append([f"{axis}: {label_of(results, point)}", show(size, 3), *rates])
        grown = [show(ratio(last, first)) for first, last in zip(spent[0], spent[-1], strict=True)]
        rows.append([f"{axis}: time, last / first", show(read[-1] / read[0]), *grown])
    return rows


def beyond(outcome: dict[str, Any], start: dict[str, Any] | None, role: str) -> float | None:
    """A program's median time less its time to start, unless that is within the noise."""
    roles = COPIES if role == "floor" else (role,)
    spent, small = value(find(outcome, *roles)), value(find(start, *roles))
    return spent - small if spent and small and spent >= 1.05 * small else None


def list_failures(results: dict[str, Any]) -> list[str]:
    return [
        f"{Point(**outcome['point']).label}: {each['name']}: {each['detail']}"
        for outcome in results["outcomes"]
        for each in outcome["figures"]
        if each["trouble"] == "failed"
    ]


def print_end(results: dict[str, Any]) -> None:
    if results["sizes"]:
        print("\nMedians in seconds; copies with fsync; in brackets, times slower than this tool")
        print(f"{align(summary(results))}\n\n{align(growth(results))}")
    for text in results["left_out"]:
        print(f"\nleft out: {text}")
    for text in list_failures(results):
        print(f"\nnot measured: {text}")
    machine, size = results["machine"], show(ratio(results["machine"]["memory_bytes"], 1 << 30), 1)
    print(f"\n{machine['system']}, {machine['processor']}, {count_of(machine['cores'], 'core')}, {size} GiB of memory")
    print(", ".join(f"{name} {version}" for name, version in results["versions"].items()))


def draw(results: dict[str, Any], path: Path) -> None:
    """Time and peak memory of all programs, side by side, a line for each point."""
    from matplotlib.figure import Figure

    outcomes = results["outcomes"]
    picture = Figure(figsize=(9.3, 1.9 + 0.36 * len(outcomes)), dpi=150, layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    draw_panel(panels[0], outcomes, "median time in seconds", value)
    draw_panel(panels[1], outcomes, "peak memory in MiB", lambda each: ratio(value(each, "peak_bytes", max), MIB))
    labels = [label_of(results, Point(**outcome["point"])) for outcome in outcomes]
    panels[0].set_yticks(range(len(outcomes)), labels, fontsize=10)
    panels[0].set_ylim(len(outcomes) - 0.5, -0.5)
    handles, names = panels[0].get_legend_handles_labels()
    named = dict(zip(names, handles, strict=True))
    picture.legend(named.values(), named, loc="outside lower center", ncols=4, fontsize=11, frameon=False)
    picture.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": "dare"})


def draw_panel(axes: Any, outcomes: list[dict[str, Any]], title: str, measured: Callable[[Any], float | None]) -> None:
    axes.set_xscale("log")
    for line, outcome in enumerate(outcomes):
        copies = [copy for copy in (find(outcome, *COPIES), find(outcome, *ONE_THREAD)) if copy]
        for role, (name, colour, mark) in PROGRAMS.items():
            figures = min(copies, key=value, default=None) if role == "floor" else find(outcome, role)
            if figures and (place := measured(figures)):
                style = {"markersize": 13, "markeredgewidth": 2.5} if mark == "|" else {"markeredgecolor": "white"}
                axes.plot(place, line, mark, color=colour, label=name, **{"markersize": 8} | style)
        troubled = [each for each in outcome["figures"] if each["role"] in PROGRAMS and not each["runs"]]
        for number, each in enumerate(troubled):
            # Below and above the line, on which other programs have their marks.
            (name, colour, _), where = PROGRAMS[each["role"]], (0.99, line + (0.31, -0.31)[number % 2])
            text = {"ha": "right", "va": "center", "fontsize": 8, "color": colour}
            axes.annotate(f"{name}: {each['trouble']}", where, xycoords=("axes fraction", "data"), **text)
    axes.set_title(title, fontsize=12, loc="left", color="#333333")
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:,g}")
    axes.xaxis.set_minor_formatter("")
    axes.tick_params(labelsize=10)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
