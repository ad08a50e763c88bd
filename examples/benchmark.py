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
    uv run examples/benchmark.py --gpu
    uv run --with ray examples/benchmark.py --nodes --method ties --models 5

A Llama-shaped base and its fine-tunes are made up in a temporary directory, which should be on a disk, not in memory:
set TMPDIR to choose it. All programs work on the same files, each in a fresh process, in turn, several times over. The
floor is plain Python that reads every input once and writes one copy of the base. Inputs are in the page cache unless a
point is called cold. Times include the start of Python and its imports. Peak memory is the system's figure for the
process, which counts the pages of memory-mapped files. It needs Linux or macOS.
"""

from __future__ import annotations

import argparse
import importlib.metadata
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
from pathlib import Path
from typing import Any

from benchmark_report import MIB, Point, Stored, count_of, draw, print_end, print_outcome

ROOT = Path(__file__).resolve().parent.parent
RIVALS = str(ROOT / "examples" / "benchmark_rivals.py")
BARE = [sys.executable, "-I", "-S", RIVALS]  # a Python that imports next to nothing
PACKAGES = ("numpy", "numba", "llvmlite", "safetensors", "mergekit", "torch", "transformers")
INSTALLED = {each.name: each.version for each in importlib.metadata.distributions()}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
START_UP, CENTRE = 1_000_000, 480_000_000  # parameters: one that shows how long a program takes to start, and the usual
# The whole comparison goes from the first point along one axis at a time: all combinations would take days.
POINTS = [
    *(Point(CENTRE), Point(CENTRE, threads=1), Point(CENTRE, cold=True)),
    *(Point(CENTRE, method) for method in ("ties", "slerp", "pack", "magnitude", "breadcrumbs", "della")),
    *(Point(CENTRE, method, models=5) for method in ("linear", "ties")),
    Point(CENTRE, dtype="fp32"),
    *(Point(size) for size in (START_UP, 100_000_000, 3_840_000_000)),
]
# The tool's command or flags, and mergekit's name for the method. Its slerp drops nothing, so it does less.
METHODS: dict[str, tuple[list[str], str]] = {
    "linear": ([], "dare_linear"),
    "ties": (["--method", "ties"], "dare_ties"),
    "trim": (["--method", "ties", "--keep-ratio", "0.5"], ""),
    "slerp": (["--method", "slerp"], "slerp"),
    "magnitude": (["--method", "ties", "--drop", "magnitude", "--drop-rate", "0.5"], "ties"),
    "breadcrumbs": (["--drop", "breadcrumbs", "--drop-rate", "0.5"], "breadcrumbs"),
    "della": (["--drop", "della", "--rescale", "l1", "--drop-rate", "0.5"], "della_linear"),
    "analyze": (["analyze"], ""),
    "pack": (["pack"], ""),
}
DTYPES = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}  # their names in torch, and bytes
DENSITY = 0.1  # what mergekit and the torch script keep of the deltas: the tool's default
# What Python, C++ and torch print when there is no memory left.
STARVED = ("MemoryError", "std::bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory")
WIDTHS = {2e7: 128, 1e8: 512, 8e8: 1280, math.inf: 3072}  # hidden sizes of models with up to so many parameters
Programs = dict[str, tuple[str, list[str]]]  # by role, a name and a command


class Trouble(Exception):
    """A program or a point could not be measured: why, in a word or two, and in detail."""


def describe(parameters: int) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """The tensors, and a config.json for mergekit: as many layers as come closest to the size."""
    hidden = next(width for limit, width in WIDTHS.items() if parameters <= limit)
    mlp, vocabulary = 128 * round(hidden / 48), min(32 * hidden, 32000)
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layer |= {f"self_attn.{name}_proj": (hidden if name in "qo" else hidden // 4, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
    named = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    rest = parameters - sum(map(math.prod, named.values()))
    layers = max(1, round(rest / sum(map(math.prod, layer.values()))))
    named |= {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    config |= {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary, "head_dim": 32}
    config |= {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 128, "tie_word_embeddings": False}
    return {f"{name}.weight": shape for name, shape in sorted(named.items())}, config


def make_models(folder: Path, point: Point) -> list[Path]:
    """The files of the base and its fine-tunes, whose values are close to the base's."""
    import torch
    from safetensors.torch import save_file

    tensors, config = describe(point.parameters)
    files = [folder / f"model-{number}" / "model.safetensors" for number in range(point.models + 1)]
    for model, file in enumerate(files):
        made, random = {}, torch.Generator()
        for seed, (name, shape) in enumerate(tensors.items()):
            weights = torch.normal(float(len(shape) == 1), 0.02, shape, generator=random.manual_seed(seed))
            if model:
                weights += torch.normal(0.0, 0.001, shape, generator=random.manual_seed(1000 * model + seed))
            made[name] = weights.to(getattr(torch, DTYPES[point.dtype][0]))
        file.parent.mkdir(parents=True)
        file.with_name("config.json").write_text(json.dumps(config))
        save_file(made, file, metadata={"format": "pt"})
    return files


def measure(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command in a fresh process. To run out of memory is a result, other failures are not."""
    # Without bytecode on disk, imports would take several times as long.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""} | environment
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen([*BARE, "launch", *command], env=environment, start_new_session=True, **options) as process:
        try:
            stdout, stderr = process.communicate()
        except BaseException:  # this process was told to stop, and what it runs is to stop with it
            os.killpg(process.pid, signal.SIGKILL)
            raise
    status, run = json.loads(stdout)
    if status == -signal.SIGKILL or any(word in stderr for word in STARVED):
        raise Trouble("out of memory", f"ended after {run['wall_s']:.1f} s")
    if status:
        raise Trouble("failed", "\n".join([f"ended with status {status}", *stderr.splitlines()[-20:]]))
    return run  # type: ignore[no-any-return]


def list_programs(point: Point, files: list[Path], output: str, other: Path | None) -> Programs:
    """What is compared, in the order of the table."""
    base, *others = map(str, files)
    method, (flags, kit_method), merges = point.method, METHODS[point.method], point.method != "analyze"
    density = 1 - float(flags[-1]) if "--drop-rate" in flags else DENSITY

    def tool(root: Path, method: str) -> list[str]:
        words = [sys.executable, str(root / "dare.py"), *METHODS[method][0], "--quiet", "--base", base]
        words += ["--merge", *others, *(["--output", output] if merges else [])]
        return words + (["--threads", str(point.threads)] if point.threads else [])

    if method == "pack":
        return list_packing(base, others, output)
    found = {"tool": (f"dare.py {method}", tool(ROOT, method))}
    if other:
        return found | {"against": (f"dare.py of {other}", tool(other, method))}
    ending, how = ("-fsync", "with fsync") if merges else ("", "reading only")
    for kind, threads in {"1": 1, "n": point.threads or CORES}.items():
        words = [*BARE, "copy", str(threads), output if merges else os.devnull, *others, base]
        found[f"floor-{kind}{ending}"] = f"floor, {count_of(threads, 'thread')}, {how}", words
    if kit_method and "mergekit" in INSTALLED:
        dares, models = method != "slerp", [{"model": str(file.parent)} for file in files]
        parameters = {"density": density, "weight": 1 / len(others)} if dares else {"t": 0.5}
        recipe: dict[str, Any] = {"merge_method": kit_method, "dtype": DTYPES[point.dtype][0], "parameters": parameters}
        recipe |= {"base_model": models[0 if dares else 1]["model"], "models": models[1:]}
        written = files[0].with_name("mergekit.yaml")
        written.write_text(json.dumps(recipe))  # JSON is YAML, too
        words = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(written), output]
        words += ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
        found["mergekit"] = f"mergekit {kit_method}{'' if dares else ' (no dropping)'}", words
    if method != "trim" and "--drop" not in flags:
        words = ["torch_merge", method, str(DENSITY), output] if merges else ["torch_analyze"]
        found["torch"] = "plain torch script", [sys.executable, RIVALS, *words, base, *others]
    if merges and method != "linear":
        found["linear"] = "dare.py linear", tool(ROOT, "linear")
    return found


def list_packing(base: str, models: list[str], output: str) -> Programs:
    """To pack a model, and to merge packed ones, beside the merge of the models themselves."""
    words = [sys.executable, str(ROOT / "dare.py")]
    packed = [f"{Path(model).parent}-packed.safetensors" for model in models]

    def pack(number: int, written: str) -> list[str]:
        seed = ["--seed", str(42 + number)]  # as the merge of the models has it
        return [*words, "pack", "-q", "--base", base, "--merge", models[number], "--output", written, *seed]

    def merge(given: list[str]) -> list[str]:
        return [*words, "-q", "--base", base, "--merge", *given, "--output", output]

    for number, written in enumerate(packed):
        subprocess.run(pack(number, written), check=True)
    share = os.path.getsize(packed[0]) / os.path.getsize(models[0])
    return {
        "tool": (f"dare.py pack, to {share:.1%} of the size", pack(0, output)),
        "packed": ("dare.py linear, packed models", merge(packed)),
        "linear": ("dare.py linear", merge(models)),
    }


def measure_point(point: Point, repeat: int, other: Path | None, scratch: Path) -> Stored:
    """Measure the programs in turn, so that a slow spell of the machine affects all of them."""
    free, needed = shutil.disk_usage(scratch).free, DTYPES[point.dtype][1] * point.parameters * (point.models + 2)
    if free < needed + 256 * MIB:  # a disk that is filled to the last block is slow
        sys.exit(f"{free / MIB:,.0f} MiB of disk are free, and {needed / MIB:,.0f} MiB are needed")
    output = scratch / "output" / "merged.safetensors"
    inputs, small = make_models(scratch, point), make_models(scratch / "small", point._replace(parameters=START_UP))
    programs, warm_up = (list_programs(point, files, str(output), other) for files in (inputs, small))

    def run(command: list[str]) -> dict[str, float]:
        output.parent.mkdir()
        os.sync()  # so that nothing of the runs before is left to be written back meanwhile
        for file in inputs if point.cold else ():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return measure(command, {"OMP_NUM_THREADS": str(point.threads)} if point.threads else {})
        finally:
            shutil.rmtree(output.parent)

    # Bytecode and kernels are to be on disk, and the inputs in the cache, before anything is timed. One program runs at
    # full size: a virtual machine gets its memory only once it is used, and the first to use it would pay for that.
    for name, command in [*warm_up.values(), programs["tool"]]:
        print(f"warm-up: {name}", file=sys.stderr)
        with suppress(Trouble):  # which shows again
            run(command)
    most = dict.fromkeys(("mergekit", "torch"), 1 if point.parameters > CENTRE else 2)  # they are slow
    figures: dict[str, Stored] = {}
    for role, (name, _) in programs.items():
        figures[role] = {"role": role, "name": name, "runs": [], "trouble": "", "detail": ""}
    order = random.Random(0)  # another order each time, since what ran just before matters
    for number in range(repeat):
        for role in order.sample(list(programs), len(programs)):
            if number < most.get(role, repeat) and not figures[role]["trouble"]:
                print(f"run {number + 1} of {programs[role][0]}", file=sys.stderr)
                try:
                    figures[role]["runs"].append(run(programs[role][1]))
                except Trouble as trouble:
                    figures[role]["trouble"], figures[role]["detail"] = trouble.args
    return {"point": point._asdict(), "size": inputs[0].stat().st_size, "figures": list(figures.values())}


def measure_all(points: list[Point], arguments: argparse.Namespace) -> Stored:
    """What is stored: everything that the tables and the picture are made from."""
    cpus = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", cpus.read_text()) if cpus.exists() else None
    machine = {"system": platform.platform(terse=True), "processor": named[1] if named else platform.machine()}
    machine |= {"cores": CORES, "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    versions = {"python": platform.python_version()} | {name: INSTALLED[name] for name in PACKAGES if name in INSTALLED}
    outcomes: list[Stored] = []
    results = {"command": sys.argv[1:], "machine": machine, "versions": versions, "outcomes": outcomes}
    for point in points:
        with tempfile.TemporaryDirectory(prefix="dare-benchmark-") as scratch:
            outcomes.append(measure_point(point, arguments.repeat, arguments.against, Path(scratch)))
        print_outcome(outcomes[-1])
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--parameters", type=float, default=1e8, metavar="N", help="size of the models (default 1e8)")
    add("--method", choices=list(METHODS), default="linear", help="what to measure (default linear)")
    add("--models", type=int, default=2, metavar="N", help="number of fine-tunes (default 2)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="type of the tensors (default bf16)")
    add("--against", type=Path, metavar="DIR", help="compare with another checkout of the tool, and with nothing else")
    add(
        "--gpu", action="store_true", help="measure tensors in the memory of a CUDA GPU instead, 1e9 parameters or more"
    )
    add("--nodes", action="store_true", help="measure Ray clusters of one and two nodes with one CPU each instead")
    add("--whole", action="store_true", help="measure the whole comparison, in about an hour")
    add("--repeat", type=int, default=3, metavar="N", help="runs of each program (default 3)")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    add("--report", type=Path, metavar="FILE", help="measure nothing; print what such a file holds")
    add("--plot", type=Path, metavar="FILE", help="draw times and memory: a .png or .svg file")
    arguments = parser.parse_args()
    if arguments.gpu:
        import benchmark_gpu

        benchmark_gpu.run(describe, int(max(arguments.parameters, 1e9)), arguments.json)
        return
    if arguments.nodes:
        import benchmark_nodes

        with tempfile.TemporaryDirectory(prefix="dare-benchmark-") as scratch:
            point = Point(int(arguments.parameters), arguments.method, arguments.models, arguments.dtype)
            benchmark_nodes.run(make_models(Path(scratch), point), arguments.method, arguments.repeat)
        return
    if arguments.report:
        results = json.loads(arguments.report.read_text())
        for outcome in results["outcomes"]:
            print_outcome(outcome)
    else:
        point = Point(int(arguments.parameters), arguments.method, arguments.models, arguments.dtype)
        results = measure_all(POINTS if arguments.whole else [point], arguments)
    print_end(results)
    if arguments.plot:
        draw(results["outcomes"], arguments.plot)
    failed = (each["trouble"] == "failed" for outcome in results["outcomes"] for each in outcome["figures"])
    sys.exit(1 if any(failed) else 0)


if __name__ == "__main__":
    for stopping in (signal.SIGINT, signal.SIGTERM):  # it cleans up: the inputs take gigabytes
        signal.signal(stopping, lambda number, _: sys.exit(128 + number))
    main()
