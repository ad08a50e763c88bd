# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot]"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Measure dare.py against a copy of the files, a plain torch script and, if installed, mergekit.

    uv run examples/benchmark.py --parameters 0.48e9 --method ties
    uv run examples/benchmark.py --parameters 0.48e9 --against ../another-checkout
    uv run --with mergekit --with ray examples/benchmark.py --whole --json figures.json
    uv run --with mergekit examples/benchmark.py --gpu --json figures.json
    uv run examples/benchmark.py --report figures.json --plot figures.png

A Llama-shaped base and its fine-tunes are made up in a temporary directory, which should be on a
disk, not in memory: set TMPDIR to choose it. All programs work on the same files, each in a fresh
process, in turn, several times over. The floor is plain Python that reads every input once and
writes one copy of the base. Inputs are in the page cache unless a point is called cold. Times
include the start of Python and its imports. Peak memory is the system's figure for the process,
which counts the pages of memory-mapped files. Threads, Ray and the GPU are measured in this
process: whole calls, Python's part included; on the GPU, from tensors in its memory into existing
ones. It needs Linux or macOS.

--json FILE keeps what FILE holds: what was measured there by this code on this machine is not
measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from benchmark_gpu import LLAMA, SMALL, SQUARES, measure_gpu
from benchmark_models import DENSITY, DTYPES, make_adapters, make_models, measure_error
from benchmark_report import Point, Stored, count_of, draw, report, show_runs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where dare.py is
DARE = str(ROOT / "dare.py")
RIVALS = str(ROOT / "examples" / "benchmark_rivals.py")
BARE = [sys.executable, "-I", "-S", RIVALS]  # a Python that imports next to nothing
PACKAGES = (
    *("numpy", "numba", "llvmlite", "safetensors", "mergekit"),
    *("torch", "triton", "transformers", "ray"),
)
INSTALLED = {each.name: each.version for each in metadata.distributions()}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Parameters: one that shows how long a program takes to start, and the usual
START_UP = 1_000_000
CENTRE = 480_000_000
# The points of each section go from the first along one axis at a time: all combinations would take
# days.
SECTIONS: dict[str, list[Point]] = {
    "files": [
        *(Point(CENTRE), Point(CENTRE, threads=1), Point(CENTRE, cold=True)),
        *(Point(CENTRE, method) for method in ("ties", "trim", "slerp")),
        *(Point(CENTRE, models=5), Point(CENTRE, "ties", models=5), Point(CENTRE, dtype="fp32")),
        *(Point(size) for size in (START_UP, 100_000_000, 3_840_000_000)),
    ],
    "drops": [Point(CENTRE, method) for method in ("magnitude", "breadcrumbs", "della")],
    "methods": [
        *(Point(CENTRE, method) for method in ("model_stock", "nuslerp", "multislerp", "karcher")),
        *(Point(CENTRE, method) for method in ("sce", "ramplus_tl", "passthrough")),
        *(Point(CENTRE, method, models=1) for method in ("nearswap", "arcee_fusion")),
    ],
    "packed": [Point(CENTRE, "pack"), Point(CENTRE, "pack", cold=True)],
    "matrices": [Point(100_000_000, "wudi")],
    "adapters": [Point(CENTRE, "adapters", models=8)],
    "extraction": [Point(100_000_000, "extract", models=1)],
    "analysis": [Point(CENTRE, "analyze")],
    "install": [Point(464_010, "the README's first command")],
    "nodes": [Point(CENTRE, "ties", models=5)],
    "gpu": [Point(10**9, shape) for shape in (SQUARES, SMALL, LLAMA)]
    + [Point(10**9, SQUARES, models=5), Point(8 * 10**9, LLAMA)],
    "threads": [Point(1_450_000_000, method) for method in ("linear", "ties")],
    "cuda": [Point(CENTRE, method) for method in ("linear", "ties")],
}
ON_GPU = ("gpu", "threads", "cuda")  # what --gpu measures, and --whole does not
NEEDS = {"install": ["uv"], "nodes": ["ray"], "gpu": ["a GPU"], "cuda": ["a GPU", "mergekit"]}
NEEDS["threads"] = ["safetensors"]
# What is compared, the first with all others. list_programs says what the words in capitals stand
# for.
MERGE = "DARE --base BASE --merge MODELS --output FILE -q"
WHOLE = f"{MERGE} --drop-rate 0"
INSIDE = "RIVAL merge_inside {} METHOD FOLDER BASE MODELS"
KIT = (
    "PYTHON -m mergekit.scripts.run_yaml RECIPE FOLDER "
    "--no-copy-tokenizer --no-write-model-card --quiet"
)
PROGRAMS: dict[str, dict[str, str]] = {
    "files": {
        "this tool": f"{MERGE} SETTINGS",
        "copy on 1 thread": "COPY 1 FILE MODELS BASE",
        "copy on all threads": "COPY CORES FILE MODELS BASE",
        "mergekit": KIT,
        "torch script": "RIVAL torch_merge METHOD DENSITY FILE BASE MODELS",
        "linear": MERGE,
    },
    "drops": {"this tool": "DARE --config RECIPE --output FOLDER -q", "mergekit": KIT},
    "methods": {
        "this tool": "DARE --config RECIPE --output FOLDER -q",
        "mergekit": KIT,
        "copy of one model": "COPY CORES FILE MODEL",
    },
    "packed": {
        "packed models": MERGE.replace("MODELS", "PACKED"),
        "the models": MERGE,
        "packing one": "DARE pack --base BASE --merge MODEL --output FILE -q",
    },
    "matrices": {
        "wudi": f"{WHOLE} --method wudi --engine numba",
        "its products alone": "RIVAL multiply BASE MODELS",
        "linear": WHOLE,
    },
    "adapters": {
        "wudi": f"{WHOLE} --method wudi --engine numba".replace("MODELS", "ADAPTERS"),
        "linear": WHOLE.replace("MODELS", "ADAPTERS"),
    },
    "extraction": {
        "this tool": "DARE extract --base BASE --merge MODEL --output FOLDER -q "
        "--adapter-rank 32 --adapter-rest leave-out",
        "mergekit": "PYTHON -m mergekit.scripts.extract_lora --base-model HOME --model HOMES "
        "--out-path FOLDER --max-rank 32 --skip-undecomposable --quiet",
    },
    "analysis": {
        "this tool": "DARE analyze --base BASE --merge MODELS -q",
        "torch script": "RIVAL torch_analyze BASE MODELS",
        "reading on 1 thread": "COPY 1 NOWHERE MODELS BASE",
        "on all threads": "COPY CORES NOWHERE MODELS BASE",
    },
    "install": {
        "empty cache": "RIVAL install empty FOLDER ROOT",
        "filled cache": "RIVAL install filled FOLDER ROOT",
    },
    "nodes": {count_of(nodes, "node"): INSIDE.format(f"ray {nodes}") for nodes in (1, 2)},
    "threads": {
        count_of(threads, "thread"): INSIDE.format(f"threads {threads}")
        for threads in (1, 2, 4, 8, 16)
        if threads <= CORES
    },
    "cuda": {"this tool": f"{MERGE} SETTINGS", "mergekit": KIT, "mergekit --cuda": f"{KIT} --cuda"},
}
METHODS = {
    point.method: section
    for section in (
        *("extraction", "adapters", "matrices", "analysis", "packed", "methods", "drops"),
        "files",
    )
    for point in SECTIONS[section]
}
SETTINGS = {
    "ties": "--method ties",
    "slerp": "--method slerp",
    "trim": "--method ties --keep-ratio 0.5",
}
# mergekit's names. Its slerp drops nothing, so it does less.
KIT_METHODS = {"linear": "dare_linear", "ties": "dare_ties", "slerp": "slerp", "magnitude": "ties"}
KIT_METHODS |= {"breadcrumbs": "breadcrumbs", "della": "della_linear"}
KIT_METHODS |= {point.method: point.method for point in SECTIONS["methods"]}
# The parameters of methods that drop nothing.
KIT_PARAMETERS: dict[str, dict[str, float]] = {
    **{point.method: {} for point in SECTIONS["methods"]},
    **{method: {"weight": 0.5} for method in ("nuslerp", "multislerp")},
    "sce": {"select_topk": 0.5},
    "nearswap": {"t": 0.001},
    "slerp": {"t": 0.5},
}
# What Python, C++ and torch print when there is no memory left.
STARVED = ("MemoryError", "std::bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory")


class Trouble(Exception):
    """A program could not be measured: why, in a word or two, and in detail."""


def list_programs(
    section: str, point: Point, files: list[Path], output: Path
) -> dict[str, list[str]]:
    """The commands that are compared; what they read beside the models is made."""
    base, *models = map(str, files)
    recipe = files[0].with_name("mergekit.yaml")
    dare = [sys.executable, DARE]
    packed = [f"{file.parent}-packed.safetensors" for file in files[1:]]
    threads = ["--threads", str(point.threads)] if point.threads else []
    adapters = make_adapters(files[0], point.models) if section == "adapters" else []
    words = {
        "BASE": [base],
        "MODELS": models,
        "MODEL": models[:1],
        "HOME": [str(files[0].parent)],
        "HOMES": [str(file.parent) for file in files[1:]],
        "PACKED": packed,
        "ADAPTERS": [*map(str, adapters)],
        "RECIPE": [str(recipe)],
        "FILE": [f"{output}/merged.safetensors"],
        "FOLDER": [f"{output}/merged"],
        "NOWHERE": [os.devnull],
        "DARE": dare,
        "COPY": [*BARE, "copy"],
        "RIVAL": [sys.executable, RIVALS],
        "PYTHON": [sys.executable],
        "METHOD": [point.method],
        "DENSITY": [str(DENSITY)],
        "CORES": [str(point.threads or CORES)],
        "SETTINGS": [*SETTINGS.get(point.method, "").split(), *threads],
        "ROOT": [str(ROOT)],
    }
    if point.method in KIT_METHODS:
        recipe.write_text(json.dumps(write_recipe(section, point, files)))  # JSON is YAML, too
    # With the seeds of a merge of the models.
    for number, file in enumerate(packed if section == "packed" else ()):
        flags = ["--base", base, "--merge", models[number], "--output", file, "-q"]
        subprocess.run([*dare, "pack", *flags, "--seed", str(42 + number)], check=True)
    missing = {"linear": ["linear"], "trim": ["mergekit", "torch script"]}.get(point.method, [])
    missing = missing if "mergekit" in INSTALLED else [*missing, "mergekit"]
    lines = {role: line.split() for role, line in PROGRAMS[section].items() if role not in missing}
    return {
        role: [each for word in line for each in words.get(word, [word])]
        for role, line in lines.items()
    }


def write_recipe(section: str, point: Point, files: list[Path]) -> dict[str, Any]:
    """A configuration for mergekit."""
    method = KIT_METHODS[point.method]
    homes = [str(file.parent) for file in files]
    density = 0.5 if section == "drops" else DENSITY
    thinned = {"density": density, "weight": 1 / point.models}
    made = {
        "merge_method": method,
        "dtype": DTYPES[point.dtype][0],
        "parameters": KIT_PARAMETERS.get(method, thinned),
    }
    if method == "passthrough":  # half of one model, and the other half of another
        config = json.loads(files[0].with_name("config.json").read_text())
        layers = config["num_hidden_layers"]
        bounds = (0, layers // 2, layers)
        ranges = zip(homes[1:], itertools.pairwise(bounds), strict=False)
        sources = ({"model": home, "layer_range": [*span]} for home, span in ranges)
        return made | {"slices": [{"sources": [source]} for source in sources]}
    listed = [{"model": home} for home in homes[1:]]
    return made | {"models": listed, "base_model": homes[1 if method == "slerp" else 0]}


def measure(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command in a fresh process. To run out of memory is a result, unlike other failures."""
    # Without bytecode on disk, imports would take several times as long.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""} | environment
    options: Any = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "errors": "replace",
    }
    with subprocess.Popen(
        [*BARE, "launch", *command], env=environment, start_new_session=True, **options
    ) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:  # this process was told to stop, and what it runs is to stop with it
            os.killpg(process.pid, signal.SIGKILL)
            raise
    status, run = json.loads(stdout)
    if status == -signal.SIGKILL or any(word in stderr for word in STARVED):
        raise Trouble("out of memory", f"ended after {run['wall_s']:.1f} s")
    if status:
        raise Trouble(
            "failed", "\n".join([f"ended with status {status}", *stderr.splitlines()[-20:]])
        )
    return run


def measure_programs(
    section: str, point: Point, arguments: argparse.Namespace, scratch: Path
) -> Stored:
    """Measure the programs in turn, so that a slow spell of the machine affects all of them."""
    output = scratch / "output"
    stored = point._replace(models=0) if section == "adapters" else point
    small = make_models(scratch / "small", stored._replace(parameters=START_UP))
    made = make_models(scratch, stored)
    programs, warm_up = (list_programs(section, point, each, output) for each in (made, small))
    if arguments.against:
        other = str(arguments.against / "dare.py")
        tools = [next(iter(each.values())) for each in (programs, warm_up)]
        others = [[other if word == DARE else word for word in tool] for tool in tools]
        programs, warm_up = (
            {"this checkout": tool, other: rival} for tool, rival in zip(tools, others, strict=True)
        )

    def run(command: list[str], files: list[Path]) -> dict[str, float]:
        output.mkdir()
        os.sync()  # so that nothing of the runs before is left to be written back meanwhile
        for file in scratch.rglob("*.safetensors") if point.cold else ():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            found = measure(
                command, {"OMP_NUM_THREADS": str(point.threads)} if point.threads else {}
            )
            packed = [
                file.stat().st_size for file in output.glob("*.safetensors") if "pack" in command
            ]
            if section == "extraction" and files is made:
                found["error"] = measure_error(*made, output / "merged")
            return found | ({"written_bytes": packed[0]} if packed else {})
        finally:
            shutil.rmtree(output)

    # Bytecode and kernels are to be on disk, and the inputs in the cache, before anything is timed.
    # One program runs at full size: a virtual machine gets its memory only once it is used, and the
    # first to use it would pay for that.
    first = [(command, small) for command in warm_up.values()]
    first.append((next(iter(programs.values())), made))
    for command, files in first if section != "install" else ():
        with suppress(Trouble):  # which shows again
            run(command, files)
    figures: Stored = {role: {"runs": [], "trouble": ""} for role in programs}
    order = random.Random(0)  # another order each time, since what ran just before matters
    for number in range(arguments.repeat):
        for role in order.sample(list(programs), len(programs)):
            slow = role in ("torch script", "mergekit", "mergekit --cuda")
            figure = figures[role]
            if figure["trouble"] or (slow and number > (point.parameters <= CENTRE)):
                continue
            print(f"run {number + 1} of {role}", file=sys.stderr)
            try:
                figure["runs"].append(run(programs[role], made))
            except Trouble as trouble:
                figure["trouble"] = trouble.args[0]
                print(": ".join(trouble.args), file=sys.stderr)
    return {"figures": figures}


def identify(section: str, arguments: argparse.Namespace) -> Stored:
    """Where points come from; only those that have all of it in common stand in one table."""
    cpus = Path("/proc/cpuinfo")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    named = re.search(r"model name\s*: (.+)", cpus.read_text()) if cpus.exists() else None
    machine = [
        named[1] if named else platform.machine(),
        count_of(CORES, "core"),
        f"{memory:.1f} GiB of memory",
    ]
    if "a GPU" in NEEDS.get(section, ()):
        machine.insert(0, import_module("torch").cuda.get_device_name())
    versions = {
        platform.system(): platform.release(),
        "Python": platform.python_version(),
        "dare": import_module("darelib").__version__,
    }
    versions |= {name: INSTALLED[name] for name in PACKAGES if name in INSTALLED}
    code = b"".join(
        file.read_bytes() for file in (ROOT / "dare.py", *sorted(ROOT.glob("darelib/**/*.py")))
    )
    size = f" --parameters {arguments.parameters:g}" if arguments.parameters else ""
    command = f"examples/benchmark.py --only {section} --repeat {arguments.repeat}{size}"
    return {
        "machine": machine,
        "versions": versions,
        "code": hashlib.sha256(code).hexdigest(),
        "command": command,
    }


def measure_section(
    section: str, points: list[Point], results: Stored, arguments: argparse.Namespace
) -> None:
    """Measure the points that are not stored yet, and store each as soon as it is measured."""
    origin = identify(section, arguments)
    old = results.get(section, {})
    kept = old["outcomes"] if old | origin == old else []
    outcomes = [each for each in kept if Point(**each["point"]) in points and not has_failed(each)]
    results[section] = origin | {"outcomes": outcomes}
    for point in points:
        if point in [Point(**each["point"]) for each in outcomes]:
            continue
        print(f"{section}: {point.label()}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="dare-benchmark-") as scratch:
            if section == "gpu":
                is_first = point == SECTIONS["gpu"][0]
                outcome = measure_gpu(point, is_first and "mergekit" in INSTALLED)
            else:
                outcome = measure_programs(section, point, arguments, Path(scratch))
        outcomes.append({"point": point._asdict()} | outcome)
        if arguments.json:
            written = arguments.json.with_suffix(".partial")
            written.write_text(json.dumps(results, indent=1) + "\n")
            written.replace(arguments.json)


def has_failed(outcome: Stored) -> bool:
    return any(each["trouble"] == "failed" for each in outcome["figures"].values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--parameters",
        type=float,
        metavar="N",
        help="size of the models (default 1e8); of sections, at most that",
    )
    add(
        "--method", choices=list(METHODS), default="linear", help="what to measure (default linear)"
    )
    add("--models", type=int, default=2, metavar="N", help="number of fine-tunes (default 2)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="type of the tensors (default bf16)")
    add(
        "--against",
        type=Path,
        metavar="DIR",
        help="compare with another checkout of the tool, and with nothing else",
    )
    add(
        "--whole",
        action="store_true",
        help=f"measure all sections but {', '.join(ON_GPU)}, in about an hour",
    )
    add("--gpu", action="store_true", help=f"measure {', '.join(ON_GPU)}")
    add(
        "--only",
        nargs="+",
        choices=list(SECTIONS),
        metavar="SECTION",
        help=f"measure some of {', '.join(SECTIONS)}",
    )
    add("--repeat", type=int, default=3, metavar="N", help="runs of each program (default 3)")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="store sections in this file, and measure what it lacks",
    )
    add("--report", type=Path, metavar="FILE", help="measure nothing; print what such a file holds")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw times and memory of files: a .png or .svg file",
    )
    arguments = parser.parse_args()
    chosen = arguments.only or [
        name for name in SECTIONS if (arguments.gpu if name in ON_GPU else arguments.whole)
    ]
    if arguments.json and not chosen:
        parser.error("--json stores sections: give --whole, --gpu or --only as well")
    stored = arguments.report or arguments.json
    results = json.loads(stored.read_text()) if stored and stored.exists() else {}
    here = {*INSTALLED, *(["uv"] if shutil.which("uv") else [])}
    if (
        {"gpu", "cuda"} & {*chosen}
        and "torch" in INSTALLED
        and import_module("torch").cuda.is_available()
    ):
        here.add("a GPU")
    for section in chosen:
        if missing := [need for need in NEEDS.get(section, ()) if need not in here]:
            print(f"{section} is left out: it needs {' and '.join(missing)}", file=sys.stderr)
            continue
        most = arguments.parameters or math.inf
        points = dict.fromkeys(
            each._replace(parameters=int(min(each.parameters, most))) for each in SECTIONS[section]
        )
        measure_section(section, list(points), results, arguments)
    if chosen or arguments.report:
        print(report(results))
    else:
        point = Point(
            int(arguments.parameters or 1e8), arguments.method, arguments.models, arguments.dtype
        )
        measure_section(METHODS[point.method], [point], results, arguments)
        print(show_runs(results[METHODS[point.method]]["outcomes"][0]))
    if arguments.plot:
        draw(results["files"]["outcomes"], arguments.plot)
    sys.exit(
        int(any(has_failed(each) for section in results.values() for each in section["outcomes"]))
    )


if __name__ == "__main__":
    for stopping in (signal.SIGINT, signal.SIGTERM):  # it cleans up: the inputs take gigabytes
        signal.signal(stopping, lambda number, _: sys.exit(128 + number))
    main()
