"""Measure dare.py against the disk it works on, and against mergekit where that is installed.

    uv run python examples/benchmark.py --parameters 0.48e9
    uv run --with mergekit python examples/benchmark.py --parameters 0.48e9 --json figures.json
    uv run python examples/benchmark.py --one-tensor 4e9
    uv run python examples/benchmark.py --parameters 0.48e9 --method analyze

A Llama-shaped bf16 base and its fine-tunes are made up in a scratch directory, which should lie on the disk that is
of interest: give --directory to choose it, and to keep the inputs for the next time. All programs then work on the
same files, each in a fresh process, in turn, several times over, with the inputs in the page cache:

- the floor: plain Python that reads every input once and writes one copy of the base, and does nothing else;
- dare.py from the shell, its kernels already compiled, and once with an empty cache, so that it has to compile them;
- mergekit's method of the same name;
- for an analysis, the same figures in plain torch, tensor by tensor, and a floor that only reads.

Wall and CPU times are in seconds. Peak memory is the operating system's figure for the process, which counts the
pages of memory-mapped files while they are mapped. Both times and memory include the start of Python and its imports:
the rows of the small model show what these alone cost.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

TOOL: Final = Path(__file__).resolve().parent.parent / "dare.py"
MIB: Final = 1 << 20
# Bump when the bytes of the generated inputs change, so that inputs kept from before are made again.
RECIPE_VERSION: Final = 1
# The values of the models are tiled from two random blocks. Their lengths have no common divisor, so that a pair of
# a weight and a delta does not come back before a trillion elements.
WEIGHTS: Final = (1 << 20) + 7
DELTAS: Final = (1 << 20) - 3
# The share of the deltas that mergekit keeps: the tool's default.
DENSITY: Final = 0.1
PACKAGES: Final = ("numpy", "numba", "llvmlite", "safetensors", "mergekit", "torch", "transformers")


class Method(NamedTuple):
    """The tool's flags for a way to combine, and mergekit's name for the same, where it has one."""

    flags: list[str]
    mergekit: str | None = None
    writes: bool = True


METHODS: Final = {
    "linear": Method([], "dare_linear"),
    "ties": Method(["--method", "ties"], "dare_ties"),
    "trim": Method(["--method", "ties", "--keep-ratio", "0.5"]),
    "slerp": Method(["--method", "slerp"]),
    "analyze": Method([], writes=False),
}


def say(text: str) -> None:
    """Tell how far we are, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def several(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count != 1 else ''}"


# ---------------------------------------------------------------------------------------------------------------------
# The models
# ---------------------------------------------------------------------------------------------------------------------


class Proportions(NamedTuple):
    """What models of up to so many parameters look like, but for their depth."""

    parameters: float
    hidden: int
    mlp: int
    head: int
    vocabulary: int


FAMILY: Final = (
    Proportions(2e7, 128, 384, 32, 4096),
    Proportions(1e8, 512, 1408, 64, 16384),
    Proportions(3e8, 768, 2048, 64, 32000),
    Proportions(8e8, 1280, 3456, 64, 32000),
    Proportions(2e9, 2048, 5632, 64, 32000),
    Proportions(5e9, 3072, 8192, 128, 32000),
    Proportions(2e10, 4096, 14336, 128, 128256),
    Proportions(math.inf, 8192, 28672, 128, 128256),
)


@dataclass(frozen=True)
class Shape:
    """The tensors of a model, and what its config.json says; nothing where it is not a Llama."""

    title: str
    tensors: dict[str, tuple[int, ...]]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def size(self) -> int:
        return 2 * self.parameters


def layer(hidden: int, mlp: int, values: int) -> dict[str, tuple[int, ...]]:
    """Name the tensors of one layer; `values` is the width of the shared key and value heads."""
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (values, hidden),
        "self_attn.v_proj": (values, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }


def llama(parameters: float) -> Shape:
    """Choose the proportions that go with the size, then as many layers as come closest to it."""
    _, hidden, mlp, head, vocabulary = next(row for row in FAMILY if parameters <= row.parameters)
    heads = hidden // head
    block = layer(hidden, mlp, heads // 4 * head)
    ends = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    spent = sum(map(math.prod, ends.values()))
    layers = max(1, round((parameters - spent) / sum(map(math.prod, block.values()))))
    named = ends | {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in block.items()}
    tensors = {f"{name}.weight": shape for name, shape in sorted(named.items())}
    title = f"Llama shape, {several(layers, 'layer')}, hidden size {hidden}, MLP {mlp}, vocabulary {vocabulary}"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return Shape(title, tensors, config)


def one_tensor(size: int) -> Shape:
    rows = max(1, size // 2048)
    return Shape(f"one tensor of {rows} x 1024", {"weight": (rows, 1024)})


# ---------------------------------------------------------------------------------------------------------------------
# Making the inputs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """A base and its fine-tunes, each in a directory of its own, as mergekit wants them."""

    shape: Shape
    folders: list[Path]

    @property
    def files(self) -> list[Path]:
        return [folder / "model.safetensors" for folder in self.folders]


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def random_block(length: int, scale: float, seed: int) -> NDArray[np.float32]:
    """Draw values that bf16 holds exactly, so that a fine-tune differs from its base by the delta alone."""
    drawn = np.random.default_rng(seed).standard_normal(length, dtype=np.float32) * np.float32(scale)
    return (to_bf16(drawn).astype(np.uint32) << 16).view(np.float32)


def tiled(block: NDArray[np.float32], start: int, count: int) -> Iterator[NDArray[np.float32]]:
    """Repeat the block from `start` on, in pieces, for `count` elements."""
    while count:
        start %= len(block)
        piece = block[start : start + count]
        yield piece
        start, count = start + len(piece), count - len(piece)


def write_tensor(file: BinaryIO, index: int, model: int, shape: tuple[int, ...], weights: Any, deltas: Any) -> None:
    """Write the tensor numbered `index` of a model; model 0 is the base, and all others are close to it."""
    position, centre = index * 104729, np.float32(len(shape) == 1)
    for piece in tiled(weights, position, math.prod(shape)):
        values = piece + centre
        done = 0
        for delta in tiled(deltas, position + model * 350377, len(values) if model else 0):
            values[done : done + len(delta)] += delta
            done += len(delta)
        file.write(to_bf16(values).data)
        position += len(piece)


def header(shape: Shape) -> bytes:
    """Lay the tensors out one after the other, as the safetensors library would."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shape.tensors.items():
        start, end = end, end + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def make_model(folder: Path, shape: Shape, model: int) -> None:
    """Write one model, unless the folder holds it already."""
    file, note = folder / "model.safetensors", folder / "recipe.json"
    recipe = json.dumps([RECIPE_VERSION, model, shape.tensors])
    head = header(shape)
    if note.exists() and note.read_text() == recipe and file.stat().st_size == len(head) + shape.size:
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    weights, deltas = random_block(WEIGHTS, 0.02, 1), random_block(DELTAS, 0.001, 2)
    with file.open("wb") as opened:
        opened.write(head)
        for index, size in enumerate(shape.tensors.values()):
            write_tensor(opened, index, model, size, weights, deltas)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2))
    # Last, so that a model that was not finished is not taken for one that was.
    note.write_text(recipe)


def make_inputs(directory: Path, shape: Shape, models: int) -> Inputs:
    folders = [directory / "base", *(directory / f"fine-tune-{number + 1}" for number in range(models))]
    for model, folder in enumerate(folders):
        say(f"input {folder}, {shape.size / MIB:,.0f} MiB")
        make_model(folder, shape, model)
    return Inputs(shape, folders)


# ---------------------------------------------------------------------------------------------------------------------
# What runs in the children. Only the source of these functions goes there, so that a child imports next to nothing.
# ---------------------------------------------------------------------------------------------------------------------


def launch() -> None:
    """Run a command, and print its wall time, CPU time, peak resident memory and exit status.

    A process's peak begins with that of the process that started it, so this one has to be small.
    """
    command = sys.argv[1:]
    started = time.perf_counter()
    # The command's output joins its errors, which leaves the standard output to the figures.
    to_errors = [(os.POSIX_SPAWN_DUP2, 2, 1)]
    child = os.posix_spawn(command[0], command, os.environ, file_actions=to_errors)
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    print(wall, cpu, usage.ru_maxrss * unit, os.waitstatus_to_exitcode(status))


def copy(inputs: list[str], output: str, first: int, step: int, size: int, chunk: int) -> None:
    """Take every `step`-th chunk: read it from all inputs into one buffer, and write what the last one had."""
    buffer = memoryview(bytearray(chunk))
    with ExitStack() as stack:
        files = [stack.enter_context(open(name, "rb", buffering=0)) for name in inputs]
        target = stack.enter_context(open(output, "r+b", buffering=0))
        for offset in range(first * chunk, size, step * chunk):
            for file in files:
                file.seek(offset)
                count = file.readinto(buffer) or 0
            target.seek(offset)
            if os.path.basename(output) != "null" and target.write(buffer[:count]) != count:
                raise OSError("short write")


def floor() -> None:
    """Read all inputs, the base last, and write one copy of the base (or, to a device of the name null, nothing)."""
    threads, sync, output, inputs = int(sys.argv[1]), sys.argv[2] == "fsync", sys.argv[3], sys.argv[4:]
    size = os.path.getsize(inputs[-1])
    with open(output, "wb") as file:
        if os.path.basename(output) != "null":
            file.truncate(size)
        share = (inputs, output)
        others = [threading.Thread(target=copy, args=(*share, n, threads, size, 2 << 20)) for n in range(1, threads)]
        for thread in others:
            thread.start()
        copy(*share, 0, threads, size, 2 << 20)
        for thread in others:
            thread.join()
        if sync:
            os.fsync(file.fileno())


def torch_figures() -> None:
    """What an analysis finds, as one would write it with torch: tensor by tensor, with a histogram for percentiles."""
    import torch
    from safetensors import safe_open

    base, *models = (safe_open(name, framework="pt") for name in sys.argv[1:])
    found = {}
    for name in base.keys():  # noqa: SIM118 (not a dictionary)
        weights = base.get_tensor(name).float()
        deltas = [model.get_tensor(name).float() - weights for model in models]
        norm = weights.norm()
        for i, delta in enumerate(deltas):
            size = delta.abs()
            largest = size.max()
            counts = torch.histc(size.clamp(min=2.0**-40).log2(), 1024, -40, 24).cumsum(0) / size.numel()
            found[name, i] = (
                size.numel(), (size == 0).float().mean(), size.mean(), size.std(), largest,
                [int((counts < share).sum()) for share in (0.5, 0.95, 0.99)],
                (size > 0.002).float().mean(), (size < largest / 100).float().mean(), delta.norm() / norm,
            )  # fmt: skip
        for i, one in enumerate(deltas):
            for k in range(i + 1, len(deltas)):
                both, opposed = (one != 0) & (deltas[k] != 0), one.sign() * deltas[k].sign() < 0
                size = one.abs() + deltas[k].abs()
                found[name, i, k] = (
                    (one * deltas[k]).sum(),
                    both.sum(),
                    opposed.sum(),
                    size[both].sum(),
                    size[opposed].sum(),
                )
    print(len(found))


def child_source(*functions: Any) -> list[str]:
    """Give the command that runs the last of the functions in a bare Python."""
    body = "\n".join(inspect.getsource(function) for function in functions)
    source = f"import os, sys, threading, time\nfrom contextlib import ExitStack\n{body}\n{functions[-1].__name__}()"
    bare = [] if functions[-1] is torch_figures else ["-I", "-S"]
    return [sys.executable, *bare, "-c", source]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class MeasureError(Exception):
    """A command could not be measured."""


@dataclass(frozen=True)
class Run:
    """One run of one command; Windows tells neither CPU time nor memory."""

    wall_s: float
    cpu_s: float | None = None
    peak_bytes: int | None = None


@dataclass
class Case:
    """A command to measure, where it writes and at least how much, and how it fared."""

    name: str
    command: list[str]
    output: Path | None = None
    expected: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(run.wall_s for run in self.runs)

    @property
    def median(self) -> float:
        return statistics.median(run.wall_s for run in self.runs)

    @property
    def cpu(self) -> float | None:
        known = [run.cpu_s for run in self.runs if run.cpu_s is not None]
        return statistics.median(known) if known else None

    @property
    def peak(self) -> int | None:
        return max((run.peak_bytes for run in self.runs if run.peak_bytes is not None), default=None)


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Let the children keep their bytecode, as they do by default: without it, imports take several times as long."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | extra


def measure(command: list[str], extra: dict[str, str] | None = None) -> Run:
    """Run a command in a fresh process."""
    environ = environment(extra or {})
    if not hasattr(os, "wait4"):
        started = time.perf_counter()
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        run, status = Run(time.perf_counter() - started), done.returncode
    else:
        done = subprocess.run([*child_source(launch), *command], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise MeasureError(f"cannot be started\n{done.stderr}")
        wall, cpu, peak, ended = done.stdout.split()
        run, status = Run(float(wall), float(cpu), int(peak)), int(ended)
    if status:
        raise MeasureError("\n".join([f"ended with status {status}", *done.stderr.splitlines()[-20:]]))
    return run


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def written(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def attempt(case: Case) -> None:
    """Measure a case once more, with nothing of the runs before left to be written back meanwhile."""
    if hasattr(os, "sync"):
        os.sync()
    try:
        run = measure(case.command, case.environment)
        if case.output and written(case.output) < case.expected:
            raise MeasureError(f"wrote {written(case.output)} bytes, which is less than {case.expected}")
    finally:
        if case.output:
            remove(case.output)
    case.runs.append(run)


def read_all(files: list[Path]) -> None:
    """Bring the files into the page cache."""
    buffer = bytearray(2 * MIB)
    for name in files:
        with name.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_all(cases: list[Case], repeat: int) -> list[str]:
    """Measure the cases in turn, so that a slow spell of the machine meets all of them; tell what went wrong."""
    failures: dict[str, str] = {}
    # Another order each time, since what ran just before matters. The same ones every time, so that runs compare.
    order = random.Random(0)
    for number in range(repeat):
        for case in order.sample(cases, len(cases)):
            if case.name in failures:
                continue
            say(f"run {number + 1} of {repeat}: {case.name}")
            try:
                attempt(case)
            except MeasureError as error:
                failures[case.name] = f"{case.name}: {error}"
                say(failures[case.name])
    return list(failures.values())


# ---------------------------------------------------------------------------------------------------------------------
# The cases
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all cases have in common."""

    scratch: Path
    inputs: Inputs
    small: Inputs
    method: str
    threads: int
    # The tool and mergekit are told how many threads to use only if the user said so.
    told: bool
    against: Path | None = None  # another version of the tool


def floor_case(setting: Setting, threads: int, sync: str) -> Case:
    writes = METHODS[setting.method].writes
    output = setting.scratch / "floor.safetensors" if writes else Path(os.devnull)
    base, *others = map(str, setting.inputs.files)
    command = [*child_source(copy, floor), str(threads), sync, str(output), *others, base]
    what = f"{'with' if sync == 'fsync' else 'no'} fsync" if writes else "reading only"
    name = f"floor, {several(threads, 'thread')}, {what}"
    return Case(name, command, output, setting.inputs.shape.size) if writes else Case(name, command)


def tool_case(
    setting: Setting, inputs: Inputs, name: str, method: str | None = None, program: Path | None = None
) -> Case:
    writes = METHODS[method or setting.method].writes
    output = setting.scratch / "tool.safetensors"
    base, *others = map(str, inputs.files)
    command = [sys.executable, str(program or TOOL), *([] if writes else ["analyze"]), "--base", base, "--merge"]
    command += [*others, "--quiet", *METHODS[method or setting.method].flags]
    if setting.told:
        command += ["--threads", str(setting.threads)]
    if not writes:
        return Case(name, command)
    return Case(name, [*command, "--output", str(output)], output, inputs.shape.size)


def torch_case(setting: Setting) -> Case:
    environment = {"OMP_NUM_THREADS": str(setting.threads)} if setting.told else {}
    return Case("the same figures in plain torch", [*child_source(torch_figures), *map(str, setting.inputs.files)],
                environment=environment)  # fmt: skip


def mergekit_case(setting: Setting, inputs: Inputs, name: str) -> Case:
    output = setting.scratch / "mergekit"
    recipe = inputs.folders[0].parent / "mergekit.yaml"
    base, *others = map(str, inputs.folders)
    models = [{"model": model, "parameters": {"density": DENSITY, "weight": 1 / len(others)}} for model in others]
    content = {
        "merge_method": METHODS[setting.method].mergekit,
        "base_model": base,
        "models": models,
        "dtype": "bfloat16",
    }
    # JSON is YAML too.
    recipe.write_text(json.dumps(content, indent=2))
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(recipe), str(output)]
    # The model card would ask the hub about the models.
    command += ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
    if setting.told:
        command += ["--num-threads", str(setting.threads)]
    return Case(name, command, output, inputs.shape.size, {"HF_HUB_OFFLINE": "1"})


@dataclass
class Suite:
    """All cases, in the order of the table, and those that the ratios are about."""

    floors: list[Case]
    tool: Case
    linear: Case | None  # the tool by its default method, for comparison
    against: Case | None  # another version of the tool
    tool_small: Case
    mergekit: Case | None
    mergekit_small: Case | None
    torch: Case | None  # an analysis in plain torch
    empty: Case
    first: Case
    failures: list[str] = field(default_factory=list)

    @property
    def repeated(self) -> list[Case]:
        optional = [self.linear, self.against, self.mergekit, self.mergekit_small, self.torch]
        return [*self.floors, self.tool, *filter(None, optional), self.tool_small, self.empty]

    @property
    def rows(self) -> list[Case]:
        ordered = [
            *self.floors,
            self.linear,
            self.tool,
            self.against,
            self.mergekit,
            self.torch,
            self.empty,
            self.tool_small,
            self.first,
            self.mergekit_small,
        ]
        return [case for case in ordered if case and case.runs]


def make_suite(setting: Setting) -> Suite:
    threads = sorted({1, setting.threads})
    counterpart, writes = METHODS[setting.method].mergekit, METHODS[setting.method].writes
    installed = importlib.util.find_spec("mergekit") is not None
    with_mergekit = bool(installed and counterpart and setting.inputs.shape.config)
    name, tool = f"mergekit {counterpart}", "dare.py" if setting.method == "linear" else f"dare.py {setting.method}"
    syncs = ("none", "fsync") if writes else ("none",)
    first = tool_case(setting, setting.small, "dare.py, small model, nothing compiled yet")
    first.environment["NUMBA_CACHE_DIR"] = str(setting.scratch / "kernels")
    return Suite(
        floors=[floor_case(setting, count, sync) for count in threads for sync in syncs],
        tool=tool_case(setting, setting.inputs, tool),
        linear=tool_case(setting, setting.inputs, "dare.py linear", "linear")
        if writes and setting.method != "linear"
        else None,
        against=tool_case(setting, setting.inputs, "the other dare.py", None, setting.against)
        if setting.against
        else None,
        tool_small=tool_case(setting, setting.small, "dare.py, small model"),
        mergekit=mergekit_case(setting, setting.inputs, name) if with_mergekit else None,
        mergekit_small=mergekit_case(setting, setting.small, f"{name}, small model") if with_mergekit else None,
        torch=None if writes else torch_case(setting),
        empty=Case("Python that does nothing", [sys.executable, "-I", "-S", "-c", "pass"]),
        first=first,
    )


def measure_first(case: Case) -> None:
    """Time the tool's very first run, which is one only if it had to fill an empty cache of kernels."""
    kernels = Path(case.environment["NUMBA_CACHE_DIR"])
    remove(kernels)
    kernels.mkdir()
    attempt(case)
    if not any(path.is_file() for path in kernels.rglob("*")):
        case.runs.clear()
    remove(kernels)


def warm_up(suite: Suite) -> None:
    """Have bytecode and kernels on disk before anything is timed. Failures show again, and are told, later.

    The floor takes part because a virtual machine gets its memory only once it uses it, and the first to write a file
    of that size would pay for that.
    """
    for case in filter(None, [suite.tool_small, suite.against, suite.mergekit_small, suite.floors[0]]):
        say(f"warm-up: {case.name}")
        with suppress(MeasureError):
            attempt(case)
        case.runs.clear()


def run_suite(setting: Setting, repeat: int) -> Suite:
    suite = make_suite(setting)
    read_all(setting.inputs.files)
    warm_up(suite)
    try:
        measure_first(suite.first)
    except MeasureError as error:
        suite.failures.append(f"{suite.first.name}: {error}")
    suite.failures += measure_all(suite.repeated, repeat)
    return suite


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    name: str
    best: float
    median: float


@dataclass(frozen=True)
class Machine:
    system: str
    processor: str
    cores: int
    memory_bytes: int | None


def ratio(above: Case, below: Case) -> Ratio:
    return Ratio(f"{above.name} / {below.name}", above.best / below.best, above.median / below.median)


def beyond_start(suite: Suite) -> Iterator[Ratio]:
    """Compare what the two programs need on top of a small model: most of mergekit's time may be its imports."""
    tool, small, other, other_small = suite.tool, suite.tool_small, suite.mergekit, suite.mergekit_small
    if other and other_small and other.runs and other_small.runs and small.runs and tool.median > small.median:
        best = (other.best - other_small.best) / (tool.best - small.best)
        median = (other.median - other_small.median) / (tool.median - small.median)
        yield Ratio("the same, each less its time for the small model", best, median)


def ratios(suite: Suite) -> list[Ratio]:
    """The tool syncs its output, so it is held against the floors that do; mergekit does not sync."""
    if not suite.tool.runs:
        return []
    found = [ratio(suite.tool, case) for case in suite.floors if case.runs and "no fsync" not in case.name]
    if suite.torch and suite.torch.runs:
        found.append(ratio(suite.torch, suite.tool))
    if suite.linear and suite.linear.runs:
        found.append(ratio(suite.tool, suite.linear))
    if suite.against and suite.against.runs:
        found.append(ratio(suite.tool, suite.against))
    if suite.mergekit and suite.mergekit.runs:
        found += [ratio(suite.mergekit, suite.tool), *beyond_start(suite)]
    return found


def processor() -> str:
    """Find the name that the processor is sold by."""
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return asked.stdout.strip()
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def cores() -> int:
    """Count the cores that this process may use, which is what the tool takes by default."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def row(case: Case) -> str:
    cpu = "n/a" if case.cpu is None else f"{case.cpu:.2f}"
    peak = "n/a" if case.peak is None else f"{case.peak / MIB:,.0f}"
    return f"{case.name:<46} {case.best:>8.2f} {case.median:>8.2f} {cpu:>8} {peak:>9}"


def print_suite(suite: Suite) -> None:
    print(f"\n{'':<46} {'best s':>8} {'median s':>8} {'CPU s':>8} {'peak MiB':>9}")
    for case in suite.rows:
        print(row(case))
    found = ratios(suite)
    if found:
        print(f"\n{'ratio':<82} {'of best':>8} {'of median':>10}")
    for item in found:
        print(f"{item.name:<82} {item.best:>8.2f} {item.median:>10.2f}")


def print_machine(machine: Machine) -> None:
    size = "unknown" if machine.memory_bytes is None else f"{machine.memory_bytes / 2**30:.1f} GiB"
    print(f"\n{machine.system}, {machine.processor}, {machine.cores} cores, {size} of memory")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))


def as_json(setting: Setting, suite: Suite, machine: Machine) -> str:
    shape = setting.inputs.shape
    cases = [
        {"name": case.name, "best_s": case.best, "median_s": case.median, "runs": [asdict(run) for run in case.runs]}
        for case in suite.rows
    ]
    content = {
        "model": {"title": shape.title, "parameters": shape.parameters, "bytes": shape.size},
        "small_model": {"title": setting.small.shape.title, "parameters": setting.small.shape.parameters},
        "models": len(setting.inputs.folders) - 1,
        "method": setting.method,
        "threads": setting.threads,
        "cases": cases,
        "ratios": [asdict(item) for item in ratios(suite)],
        "failures": suite.failures,
        "machine": asdict(machine),
        "versions": versions(),
    }
    return json.dumps(content, indent=2) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def number(text: str, least: int) -> int:
    """Read a count, which may be written as 0.48e9."""
    with suppress(ValueError):
        if least <= float(text) < 1e15:
            return int(float(text))
    raise argparse.ArgumentTypeError(f"{text} is not a number of at least {least}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    count = partial(number, least=1)
    add = parser.add_argument
    add("--parameters", type=partial(number, least=1000), default=100_000_000, help="size of the models (default 1e8)")
    add("--one-tensor", type=partial(number, least=2048), metavar="BYTES", help="models of one tensor of that size")
    add("--models", type=count, default=2, metavar="N", help="number of fine-tunes (default 2)")
    add("--method", choices=list(METHODS), default="linear", help="how the models are combined (default linear)")
    add("--repeat", type=count, default=3, metavar="N", help="runs of each program (default 3)")
    add("--threads", type=count, metavar="N", help="threads of all programs (default: as each chooses)")
    add("--against", type=Path, metavar="FILE", help="another version of dare.py to compare with")
    add("--directory", type=Path, help="where to work; inputs are kept there and used again (default: temporary)")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser.parse_args()


def check_space(directory: Path, needed: int) -> None:
    """Stop before the disk is full, and warn where the inputs will not stay in memory."""
    kept = sum(file.stat().st_size for file in directory.glob("*/model.safetensors"))
    free = shutil.disk_usage(directory).free + kept
    if free < needed:
        raise SystemExit(f"{directory} has {free / MIB:,.0f} MiB free, and {needed / MIB:,.0f} MiB are needed")
    total = memory()
    if total and needed > total * 0.8:
        say("warning: inputs and output do not fit the page cache, so the disk's speed is measured as well")


def prepare(arguments: argparse.Namespace, scratch: Path) -> Setting:
    """Make the inputs, and a small model of the same kind to warm up with."""
    single = arguments.one_tensor is not None
    shape = one_tensor(arguments.one_tensor) if single else llama(arguments.parameters)
    check_space(scratch, shape.size * (arguments.models + 2))
    inputs = make_inputs(scratch, shape, arguments.models)
    small = make_inputs(scratch / "small", one_tensor(2 * MIB) if single else llama(1e6), arguments.models)
    threads = arguments.threads or cores()
    return Setting(scratch, inputs, small, arguments.method, threads, arguments.threads is not None, arguments.against)


def run(arguments: argparse.Namespace, scratch: Path) -> int:
    setting = prepare(arguments, scratch)
    shape, small = setting.inputs.shape, setting.small.shape
    suite = run_suite(setting, arguments.repeat)
    machine = Machine(platform.platform(terse=True), processor(), cores(), memory())
    print(f"{shape.title}: {shape.parameters / 1e9:.3f}e9 parameters, {shape.size / MIB:,.0f} MiB, bf16")
    tunes = several(arguments.models, "fine-tune")
    print(f"{tunes}; small model of {small.parameters / 1e6:.1f}e6 parameters; in {scratch}")
    print_suite(suite)
    for failure in suite.failures:
        print(f"\nnot measured: {failure}")
    print_machine(machine)
    if arguments.json:
        arguments.json.write_text(as_json(setting, suite, machine))
    return 1 if suite.failures else 0


def main() -> int:
    arguments = parse()
    with ExitStack() as stack:
        if arguments.directory:
            arguments.directory.mkdir(parents=True, exist_ok=True)
            return run(arguments, arguments.directory.resolve())
        return run(arguments, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dare-benchmark-"))))


if __name__ == "__main__":
    sys.exit(main())
