# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot]"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Measure dare.py against a copy of the files, a plain torch script and, where it is installed, mergekit.

    uv run examples/benchmark.py --parameters 0.48e9 --method ties
    uv run examples/benchmark.py --parameters 0.48e9 --against ../another-checkout
    uv run --with mergekit examples/benchmark.py --whole --json figures.json
    uv run examples/benchmark.py --report figures.json --plot figures.png

A Llama-shaped base and its fine-tunes are made up in a temporary directory, which should be on a disk, not in memory:
set TMPDIR to choose it. All programs work on the same files, each in a fresh process, in turn, several times over. The
floor is plain Python that reads every input once and writes one copy of the base. Inputs are in the page cache unless a
point is called cold. The whole comparison varies one thing at a time: threads, cache, method, number of models, type,
and size, up to one that does not fit in memory. With --json, it continues where it was interrupted.

Times are in seconds and include the start of Python and its imports. Peak memory is the system's figure for the
process, which counts the pages of memory-mapped files.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_models import DTYPES, describe, make_models, size_of
from benchmark_report import (
    MIB,
    START_UP,
    Point,
    count_of,
    draw,
    list_failures,
    load,
    markdown,
    print_end,
    print_outcome,
    summary,
)

ROOT = Path(__file__).resolve().parent.parent
RIVALS = str(ROOT / "examples" / "benchmark_rivals.py")
PACKAGES = ("numpy", "numba", "llvmlite", "safetensors", "mergekit", "torch", "transformers")
CENTRE = 480_000_000  # parameters of most points of the whole comparison
SLOW_RUNS = 2  # of mergekit and the torch script in the whole comparison; at the largest size they run once
DENSITY = 0.1  # what these two keep of the deltas: the tool's default
BARE = [sys.executable, "-I", "-S", RIVALS]  # a Python that imports next to nothing
OUTPUT = "{output}"  # in a command: where it writes
# What Python, C++ and torch print when there is no memory left.
STARVED = ("MemoryError", "std::bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory")
# The tool's flags, and mergekit's name for the method. Its slerp drops nothing, so it does less.
METHODS: dict[str, tuple[list[str], str]] = {
    "linear": ([], "dare_linear"),
    "ties": (["--method", "ties"], "dare_ties"),
    "trim": (["--method", "ties", "--keep-ratio", "0.5"], ""),
    "slerp": (["--method", "slerp"], "slerp"),
    "analyze": ([], ""),
}


class Trouble(Exception):
    """A program or a point could not be measured: why, in a word or two, and in detail."""


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cores() -> int:
    """Count the cores that this process may use, which is what the tool takes by default."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int | None:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def mergekit_recipe(point: Point, folders: list[str]) -> dict[str, Any]:
    base, *others = folders
    recipe = {"merge_method": METHODS[point.method][1], "dtype": DTYPES[point.dtype][1]}
    if point.method == "slerp":
        return recipe | {"base_model": others[0], "models": [{"model": m} for m in others], "parameters": {"t": 0.5}}
    parameters = {"density": DENSITY, "weight": 1 / len(others)}
    return recipe | {"base_model": base, "models": [{"model": model, "parameters": parameters} for model in others]}


def measure(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command in a fresh process. To run out of memory is a result, other failures are not."""
    # Without bytecode on disk, which is the default, imports would take several times as long.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words, environment = [*BARE, "launch", *command], inherited | {"HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace")
    status, run = json.loads(done.stdout)
    if status == -9 or any(word in done.stderr for word in STARVED):
        raise Trouble("out of memory", f"ended after {run['wall_s']:.1f} s")
    if status:
        raise Trouble("failed", "\n".join([f"ended with status {status}", *done.stderr.splitlines()[-20:]]))
    return run  # type: ignore[no-any-return]


def evict(file: Path) -> None:
    """Make the system forget what it holds of a file."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that were not written back would stay
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Bench:
    """A point and how it is measured."""

    scratch: Path
    point: Point
    repeat: int
    slow_runs: int  # of mergekit and the torch script
    single: bool = False  # not a part of the whole comparison
    other: Path | None = None  # another checkout: only the two are compared then

    def tool(self, folders: list[Path], method: str, root: Path = ROOT) -> list[str]:
        base, *others = (str(folder / "model.safetensors") for folder in folders)
        words = [sys.executable, str(root / "dare.py"), *["analyze"] * (not self.point.writes), "--quiet"]
        words += ["--base", base, "--merge", *others, *METHODS[method][0]]
        words += ["--threads", str(self.point.threads)] * bool(self.point.threads)
        return words + ["--output", OUTPUT] * self.point.writes

    def programs(self, folders: list[Path]) -> dict[str, tuple[str, list[str]]]:
        """What is compared, in the order of the table: by role, a name and a command."""
        method, writes = self.point.method, self.point.writes
        files = [str(folder / "model.safetensors") for folder in folders]
        tool = {"tool": (f"dare.py {method}", self.tool(folders, method))}
        if self.other:
            return tool | {"against": (f"dare.py of {self.other}", self.tool(folders, method, self.other))}
        found = {}
        for kind, threads in {"1": 1, "n": self.point.threads or cores()}.items():
            name = f"floor, {count_of(threads, 'thread')}, {'with fsync' if writes else 'reading only'}"
            words = [*BARE, "copy", str(threads), OUTPUT * writes, *files[1:], files[0]]
            if kind == "1" or threads > 1:
                found[f"floor-{kind}{'-fsync' * writes}"] = name, words
        found |= tool
        if (name := METHODS[method][1]) and importlib.util.find_spec("mergekit"):
            recipe = folders[0].with_name("mergekit.yaml")
            recipe.write_text(json.dumps(mergekit_recipe(self.point, list(map(str, folders)))))  # JSON is YAML, too
            words = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(recipe), OUTPUT, "--no-copy-tokenizer"]
            words += ["--no-write-model-card", "--quiet"]
            found["mergekit"] = f"mergekit {name}{' (no dropping)' * (method == 'slerp')}", words
        words = ["torch_merge", method, str(DENSITY), OUTPUT] if writes else ["torch_analyze"]
        if method != "trim":
            name = "plain torch script" if writes else "the same figures in plain torch"
            found["torch"] = name, [sys.executable, RIVALS, *words, *files]
        if self.single and writes and method != "linear":
            found["linear"] = "dare.py linear", self.tool(folders, "linear")
        return found

    def run(self, command: list[str], cold: list[Path] | None = None, first: bool = False) -> dict[str, Any]:
        """Run a program once, with nothing of the runs before left to be written back meanwhile."""
        environment = {"OMP_NUM_THREADS": str(self.point.threads)} if self.point.threads else {}
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            environment |= {"NUMBA_CACHE_DIR": folder} if first else {}
            if hasattr(os, "sync"):
                os.sync()
            for inputs in cold or ():
                evict(inputs / "model.safetensors")
            output = Path(folder) / "merged.safetensors"
            run = measure([str(output) if word == OUTPUT else word for word in command], environment)
            if OUTPUT in command and not output.exists():
                raise Trouble("failed", "wrote nothing")
            return run

    def warm_up(self, inputs: list[Path], small: list[Path]) -> None:
        """Have bytecode and kernels on disk, and the inputs in the cache, before anything is timed.

        One program runs at full size: a virtual machine gets its memory only once it is used, and the first to use it
        would pay for that.
        """
        for name, command in [*self.programs(small).values(), next(iter(self.programs(inputs).values()))]:
            log(f"warm-up: {name}")
            with suppress(Trouble):  # which shows again
                self.run(command)

    def measure(self) -> dict[str, Any]:
        """Measure the programs in turn, so that a slow spell of the machine affects all of them."""
        point, scratch = self.point, self.scratch
        check_room(scratch, point)
        inputs, small = (make_models(scratch, size, point.dtype, point.models) for size in (point.parameters, START_UP))
        self.warm_up(inputs, small)
        programs = self.programs(inputs)
        if self.single and not self.other:
            programs["first"] = "dare.py, small model, nothing compiled yet", self.tool(small, point.method)
        most = {"mergekit": self.slow_runs, "torch": self.slow_runs, "first": 1}
        figures = {role: new_figures(role, name) for role, (name, _) in programs.items()}
        order = random.Random(0)  # another order each time, since what ran just before matters
        for number in range(self.repeat):
            for role in order.sample(list(programs), len(programs)):
                if number < most.get(role, self.repeat) and not figures[role]["trouble"]:
                    log(f"run {number + 1} of {programs[role][0]}")
                    try:
                        run = self.run(programs[role][1], inputs if point.cold else None, role == "first")
                        figures[role]["runs"].append(run)
                    except Trouble as trouble:
                        figures[role]["trouble"], figures[role]["detail"] = trouble.args
        sizes = {"title": describe(point.parameters)[0], "size": size_of(point.parameters, point.dtype)}
        threads = point.threads or cores()
        return {"point": point._asdict(), **sizes, "threads": threads, "figures": list(figures.values())}


def new_figures(role: str, name: str) -> dict[str, Any]:
    return {"role": role, "name": name, "runs": [], "trouble": "", "detail": ""}


def check_room(scratch: Path, point: Point) -> None:
    """Refuse a point before its inputs fill the disk; those that are there already need no more room."""
    kept = sum(file.stat().st_size for file in scratch.glob(f"{point.parameters}-{point.dtype}/*/*.safetensors"))
    free = shutil.disk_usage(scratch).free + kept
    needed = size_of(point.parameters, point.dtype) * (point.models + 2)
    if free < needed + 256 * MIB:  # a disk that is filled to the last block is slow
        raise Trouble("failed", f"{free / MIB:,.0f} MiB of disk are free, and {needed / MIB:,.0f} MiB are needed")
    if point.cold and not hasattr(os, "posix_fadvise"):
        raise Trouble("failed", "this system cannot be made to forget the inputs")


# ---------------------------------------------------------------------------------------------------------------------
# The whole comparison
# ---------------------------------------------------------------------------------------------------------------------


def new_results(repeat: int, sizes: list[int]) -> dict[str, Any]:
    """What is stored: everything that the tables and the picture are made from."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = (names or [platform.processor() or platform.machine()])[0]
    system = {"system": platform.platform(terse=True), "processor": processor}
    machine = {**system, "cores": cores(), "memory_bytes": memory()}
    installed = [package for package in PACKAGES if importlib.util.find_spec(package)]
    versions = {"python": platform.python_version()} | {each: importlib.metadata.version(each) for each in installed}
    sources = [ROOT / "dare.py", *sorted((ROOT / "darelib").rglob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    about = {"command": sys.argv[1:], "machine": machine, "versions": versions, "program": digest, "repeat": repeat}
    return about | {"sizes": sizes, "outcomes": [], "left_out": []}


def store(results: dict[str, Any], path: Path) -> None:
    """Replace the file as a whole, so that an interruption leaves the points that are done."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def whole_sizes() -> list[int]:
    """The last is one at which two fine-tunes, their base and the result do not fit in memory together."""
    size = 2 * CENTRE
    while 4 * 2 * size <= (memory() or 16 << 30):
        size *= 2
    return [100_000_000, CENTRE, size]


def star(sizes: list[int], threads: int) -> list[Point]:
    """Go from a centre along one axis at a time: all combinations would take days.

    Points with the same inputs follow each other, so that few have to be on the disk at once.
    """
    small, middle, large = sizes
    changes: list[dict[str, Any]] = [{}, *({"threads": 1 << n} for n in range(16) if 1 << n < threads), {"cold": True}]
    changes += [{"method": "ties"}, {"method": "slerp"}, {"models": 5}, {"models": 5, "method": "ties"}]
    changes += [{"dtype": "fp32"}, {"parameters": START_UP}, {"parameters": small}, {"parameters": large}]
    return list(dict.fromkeys(Point(middle)._replace(**change) for change in changes))


def load_done(path: Path, results: dict[str, Any]) -> dict[Point, dict[str, Any]]:
    """What an earlier run has measured, if it was of the same kind; what failed is measured again."""
    old = load(path)
    for name in ("machine", "versions", "program", "repeat", "sizes"):
        if old[name] != results[name]:
            sys.exit(f"{path} was measured with another {name}: give another file after --json")
    done = (outcome for outcome in old["outcomes"] if all(each["trouble"] != "failed" for each in outcome["figures"]))
    return {Point(**outcome["point"]): outcome for outcome in done}


def run_whole(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure every point of the star that the file does not hold yet."""
    results = new_results(arguments.repeat, whole_sizes())
    done = load_done(arguments.json, results) if arguments.json and arguments.json.exists() else {}
    points = star(results["sizes"], cores())
    for number, point in enumerate(points):
        log(f"\npoint {number + 1} of {len(points)}: {point.label}{', measured before' * (point in done)}")
        slow_runs = 1 if point.parameters == results["sizes"][-1] else SLOW_RUNS
        try:
            if point not in done:
                done[point] = Bench(scratch, point, arguments.repeat, slow_runs).measure()
        except Trouble as trouble:
            results["left_out"].append(f"{point.label}: {trouble.args[1]}")
            continue
        print_outcome(done[point])
        results["outcomes"] = [done[each] for each in points if each in done]
        if arguments.json:
            store(results, arguments.json)
        folder = f"{point.parameters}-{point.dtype}"
        if folder not in (f"{later.parameters}-{later.dtype}" for later in points[number + 1 :]):
            shutil.rmtree(scratch / folder, ignore_errors=True)
    return results


def run_single(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    point = Point(int(arguments.parameters), arguments.method, arguments.models, arguments.dtype)
    bench = Bench(scratch, point, arguments.repeat, arguments.repeat, single=True, other=arguments.against)
    try:
        outcome = bench.measure()
    except Trouble as trouble:
        sys.exit(trouble.args[1])
    print_outcome(outcome)
    return new_results(arguments.repeat, []) | {"outcomes": [outcome]}


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--parameters", type=float, default=1e8, metavar="N", help="size of the models (default 1e8)")
    add("--method", choices=list(METHODS), default="linear", help="what to measure (default linear)")
    add("--models", type=int, default=2, metavar="N", help="number of fine-tunes (default 2)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="type of the tensors (default bf16)")
    add("--against", type=Path, metavar="DIR", help="compare with another checkout of the tool, and with nothing else")
    add("--whole", action="store_true", help="measure the whole comparison, in about an hour")
    add("--repeat", type=int, default=3, metavar="N", help="runs of each program (default 3)")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file; --whole continues what it holds")
    add("--report", type=Path, metavar="FILE", help="measure nothing; print what such a file holds")
    add("--markdown", action="store_true", help="print the summary as a Markdown table")
    add("--plot", type=Path, metavar="FILE", help="draw times and memory: a .png or .svg file")
    arguments = parser.parse_args()
    if arguments.method == "slerp" and arguments.models != 2:
        parser.error("slerp is between two fine-tunes: leave --models out")
    if arguments.against and not (arguments.against / "dare.py").is_file():
        parser.error(f"there is no dare.py in {arguments.against}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        results = load(arguments.report)
        for outcome in results["outcomes"] if not arguments.markdown else ():
            print_outcome(outcome)
    else:
        with tempfile.TemporaryDirectory(prefix="dare-benchmark-") as scratch:
            results = (run_whole if arguments.whole else run_single)(arguments, Path(scratch))
        if arguments.json:
            store(results, arguments.json)
    print(markdown(summary(results))) if arguments.markdown else print_end(results)
    if arguments.plot:
        draw(results, arguments.plot)
    sys.exit(1 if list_failures(results) else 0)


if __name__ == "__main__":
    # Terminated from outside, it cleans up as after Ctrl-C: the inputs take gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
