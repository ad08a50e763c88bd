"""Measure dare.py against the disk it works on, a plain torch script, and mergekit where that is installed.

    uv run --with mergekit python examples/benchmark.py --whole --json figures.json
    uv run python examples/benchmark.py --report figures.json --plot figures.png
    uv run python examples/benchmark.py --parameters 0.48e9 --method ties --cold
    uv run python examples/benchmark.py --parameters 0.48e9 --method analyze
    uv run python examples/benchmark.py --one-tensor 4e9

A Llama-shaped base and its fine-tunes are made up in a scratch directory, which should lie on the disk that is of
interest: give --directory to choose it, and to keep the inputs for the next time. All programs then work on the same
files, each in a fresh process, in turn, several times over, with the inputs in the page cache or, if cold, without:

- the floor: plain Python that reads every input once and writes one copy of the base, and does nothing else;
- dare.py from the shell, its kernels already compiled; for one setting also once with an empty cache;
- mergekit's method of the same name; for slerp, its plain one, since it has none that drops;
- a script as one writes it with torch from the paper's formulae;
- for an analysis, the same figures in plain torch, tensor by tensor, and a floor that only reads.

The whole comparison goes from a centre along one axis at a time: method, number of models, type, size up to one that
does not fit the memory, cold cache, threads. It is stored after each point and goes on from there if it is started
again. To run out of memory or time is a result. So that the machine survives it, a program is killed once it holds nine
tenths of what memory was free, not counting mapped files.

Wall and CPU times are in seconds. Peak memory is the operating system's figure for the process, which counts the
pages of memory-mapped files while they are mapped. Both times and memory include the start of Python and its imports:
the small model shows what these alone cost.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import mmap
import os
import platform
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, NoReturn

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
# The share of the deltas that mergekit and the torch script keep: the tool's default.
DENSITY: Final = 0.1
PACKAGES: Final = ("numpy", "numba", "llvmlite", "safetensors", "mergekit", "torch", "transformers")
# The size that most points of the whole comparison have, and one that shows what it takes a program to start.
CENTRE: Final = 480_000_000
START_UP: Final = 1_000_000
# What Python, C++ and torch say when there is no memory left.
STARVED: Final = ("MemoryError", "std::bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory")


class UsageError(Exception):
    """What was asked for makes no sense, or cannot be done here."""


class Dtype(NamedTuple):
    """What safetensors and torch call a type, and how many bytes a value takes."""

    safetensors: str
    torch: str
    width: int


DTYPES: Final = {"bf16": Dtype("BF16", "bfloat16", 2), "fp32": Dtype("F32", "float32", 4)}


class Method(NamedTuple):
    """The tool's flags for a way to combine, and mergekit's name for the same, where it has one."""

    flags: list[str]
    mergekit: str | None = None
    writes: bool = True


METHODS: Final = {
    "linear": Method([], "dare_linear"),
    "ties": Method(["--method", "ties"], "dare_ties"),
    "trim": Method(["--method", "ties", "--keep-ratio", "0.5"]),
    # mergekit has no slerp of thinned deltas; its plain one, between the fine-tunes as they are, does less.
    "slerp": Method(["--method", "slerp"], "slerp"),
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
    Proportions(5e5, 64, 192, 16, 512),
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
    """The tensors of a model, the folder for models of this kind, and a config.json, empty if it is not a Llama."""

    title: str
    folder: str
    tensors: dict[str, tuple[int, ...]]
    dtype: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def size(self) -> int:
        return DTYPES[self.dtype].width * self.parameters


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


def llama(parameters: int, dtype: str) -> Shape:
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
        "dtype": DTYPES[dtype].torch,
    }
    return Shape(title, f"{parameters}-{dtype}", tensors, dtype, config)


def one_tensor(size: int, dtype: str) -> Shape:
    rows = max(1, size // (1024 * DTYPES[dtype].width))
    return Shape(f"one tensor of {rows} x 1024", f"one-tensor-{rows}-{dtype}", {"weight": (rows, 1024)}, dtype)


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


def write_tensor(file: BinaryIO, shape: Shape, index: int, model: int, weights: Any, deltas: Any) -> None:
    """Write the tensor numbered `index` of a model; model 0 is the base, and all others are close to it."""
    size = list(shape.tensors.values())[index]
    position, centre = index * 104729, np.float32(len(size) == 1)
    for piece in tiled(weights, position, math.prod(size)):
        values = piece + centre
        done = 0
        for delta in tiled(deltas, position + model * 350377, len(values) if model else 0):
            values[done : done + len(delta)] += delta
            done += len(delta)
        file.write(to_bf16(values).data if shape.dtype == "bf16" else values.data)
        position += len(piece)


def header(shape: Shape) -> bytes:
    """Lay the tensors out one after the other, as the safetensors library would."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, kind = 0, DTYPES[shape.dtype]
    for name, size in shape.tensors.items():
        start, end = end, end + kind.width * math.prod(size)
        entries[name] = {"dtype": kind.safetensors, "shape": size, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def make_model(folder: Path, shape: Shape, model: int) -> None:
    """Write one model, unless the folder holds it already."""
    file, note = folder / "model.safetensors", folder / "recipe.json"
    recipe = json.dumps([RECIPE_VERSION, model, shape.dtype, shape.tensors])
    head = header(shape)
    if note.exists() and note.read_text() == recipe and file.stat().st_size == len(head) + shape.size:
        return
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    weights, deltas = random_block(WEIGHTS, 0.02, 1), random_block(DELTAS, 0.001, 2)
    with file.open("wb") as opened:
        opened.write(head)
        for index in range(len(shape.tensors)):
            write_tensor(opened, shape, index, model, weights, deltas)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2))
    # Last, so that a model that was not finished is not taken for one that was.
    note.write_text(recipe)


def place_inputs(scratch: Path, shape: Shape, models: int) -> Inputs:
    """Settings share their inputs: a file depends on nothing but the shape, the type and the number of the model."""
    directory = scratch / shape.folder
    return Inputs(shape, [directory / "base", *(directory / f"fine-tune-{number + 1}" for number in range(models))])


def make_inputs(scratch: Path, shape: Shape, models: int) -> Inputs:
    inputs = place_inputs(scratch, shape, models)
    for model, folder in enumerate(inputs.folders):
        say(f"input {folder}, {shape.size / MIB:,.0f} MiB")
        make_model(folder, shape, model)
    return inputs


# ---------------------------------------------------------------------------------------------------------------------
# What runs in the children. Only the source of these functions goes there, so that a child imports next to nothing.
# ---------------------------------------------------------------------------------------------------------------------


def watch(child: int, limit: int, timeout: float, ended: threading.Event, reasons: list[str]) -> None:
    """Kill the child once its own memory exceeds the limit (0 is none), or its time is over, and say which it was.

    Mapped files do not count, because the system can take their pages back. A limit by setrlimit would count them:
    the safetensors library maps its inputs privately and writably for torch.
    """
    stop = time.monotonic() + timeout
    while not ended.wait(0.05):
        reason = "time" if time.monotonic() > stop else ""
        if limit and not reason:
            with suppress(OSError), open(f"/proc/{child}/status") as status:
                own = [int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssShmem"))]
                reason = "memory" if sum(own) * 1024 > limit else ""
        if reason:
            reasons.append(reason)
            os.kill(child, 9)
            return


def launch() -> None:
    """Run a command, and print its wall time, CPU time, peak resident memory, exit status, and why it was killed.

    A process's peak begins with that of the process that started it, so this one has to be small.
    """
    limit, timeout, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if limit:
        # Should memory run out in spite of the limit, the system is to take it from the command, not from others.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    ended = threading.Event()
    reasons: list[str] = []
    started = time.perf_counter()
    # The command's output joins its errors, which leaves the standard output to the figures.
    to_errors = [(os.POSIX_SPAWN_DUP2, 2, 1)]
    child = os.posix_spawn(command[0], command, os.environ, file_actions=to_errors)
    threading.Thread(target=watch, args=(child, limit, timeout, ended, reasons), daemon=True).start()
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - started
    ended.set()
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    print(wall, cpu, usage.ru_maxrss * unit, os.waitstatus_to_exitcode(status), *reasons)


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

    opened: list[Any] = [safe_open(name, framework="pt") for name in sys.argv[1:]]
    base, *models = opened
    found: dict[Any, Any] = {}
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


def torch_merge() -> None:
    """DARE as one writes it from the paper's formulae: load the models, go through their tensors, save the result."""
    import torch
    from safetensors.torch import load_file, save_file

    method, density, output, *files = sys.argv[1:]
    base, *models = map(load_file, files)
    merged = {}
    for name, weights in base.items():
        start, kept = weights.float(), []
        for model in models:
            delta = model[name].float() - start
            mask = torch.bernoulli(torch.full_like(delta, float(density)))
            kept.append(mask * delta / float(density))
        if method == "linear":
            result = start + sum(kept) / len(kept)
        elif method == "ties":
            deltas = torch.stack(kept)
            agreed = deltas * deltas.sum(0).sign() > 0
            result = start + (deltas * agreed).sum(0) / agreed.sum(0).clamp(min=1)
        else:
            one, other = start + kept[0], start + kept[1]
            cosine = (one / one.norm() * (other / other.norm())).sum()
            angle = cosine.clamp(-1, 1).acos()
            halves = 0.5 if cosine > 0.9995 else (angle / 2).sin() / angle.sin()
            result = halves * one + halves * other
        merged[name] = result.to(weights.dtype)
    save_file(merged, output, metadata={"format": "pt"})


@cache  # so that an edit of this file during a long run does not reach the children
def source_of(function: Any) -> str:
    return inspect.getsource(function)


def child_source(*functions: Any) -> list[str]:
    """Give the command that runs the last of the functions, in a bare Python unless it needs torch."""
    body = "\n".join(map(source_of, functions))
    imports = "import os, sys, threading, time\nfrom contextlib import ExitStack, suppress"
    # Annotations name what is not imported there.
    source = f"from __future__ import annotations\n{imports}\n{body}\n{functions[-1].__name__}()"
    bare = [] if functions[-1] in (torch_figures, torch_merge) else ["-I", "-S"]
    return [sys.executable, *bare, "-c", source]


# ---------------------------------------------------------------------------------------------------------------------
# What is measured, and what came out
# ---------------------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """One setting of the comparison. Without a number of threads, each program takes as many as it likes."""

    parameters: int
    method: str = "linear"
    models: int = 2
    dtype: str = "bf16"
    cold: bool = False
    threads: int | None = None

    @property
    def words(self) -> list[str]:
        large = self.parameters >= 1e8
        size = f"{self.parameters / 1e9:g} billion" if large else f"{self.parameters / 1e6:g} million"
        words = [self.method, several(self.models, "fine-tune"), self.dtype, size, "cold" * self.cold]
        return [*words, several(self.threads, "thread") if self.threads else ""]

    @property
    def label(self) -> str:
        return ", ".join(filter(None, self.words))


@dataclass(frozen=True)
class Run:
    """One run of one command; Windows tells neither CPU time nor memory."""

    wall_s: float
    cpu_s: float | None = None
    peak_bytes: int | None = None


@dataclass
class Figures:
    """How a program fared, and what kept it from faring better: "out of memory", "over 900 s" or "failed"."""

    role: str
    name: str
    runs: list[Run] = field(default_factory=list)
    trouble: str = ""
    detail: str = ""

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


@dataclass
class Outcome:
    """All figures of a point, and the models that it was measured with."""

    point: Point
    title: str
    size: int  # of one model, in bytes
    threads: int
    figures: list[Figures]

    def of(self, *roles: str) -> Figures | None:
        """Give the first of the roles that has figures."""
        known = {figures.role: figures for figures in self.figures if figures.runs}
        return next((known[role] for role in roles if role in known), None)

    @property
    def read(self) -> int:
        return self.size * (self.point.models + 1)


@dataclass(frozen=True)
class Machine:
    system: str
    processor: str
    cores: int
    memory_bytes: int | None


@dataclass
class Results:
    """What is stored: everything that the tables and the picture are made from."""

    command: list[str]
    machine: Machine
    versions: dict[str, str]
    program: str  # a digest of dare.py
    repeat: int
    without: list[str] = field(default_factory=list)  # programs that were left out
    sizes: list[int] = field(default_factory=list)  # of the whole comparison
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def label(self, point: Point) -> str:
        """Say in what the point differs from the centre of the comparison; in full if in nothing, or without one."""
        centre = Point(self.sizes[1]).words if self.sizes else [""] * len(point.words)
        differing = [word for word, usual in zip(point.words, centre, strict=True) if word and word != usual]
        return ", ".join(differing) or point.label

    def of(self, point: Point) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.point == point), None)

    @property
    def failures(self) -> list[str]:
        return [
            f"{outcome.point.label}: {figures.name}: {figures.detail}"
            for outcome in self.outcomes
            for figures in outcome.figures
            if figures.trouble == "failed"
        ]


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


def new_results(arguments: argparse.Namespace, sizes: list[int]) -> Results:
    machine = Machine(platform.platform(terse=True), processor(), cores(), memory())
    program = hashlib.sha256(TOOL.read_bytes()).hexdigest()
    return Results(sys.argv[1:], machine, versions(), program, arguments.repeat, arguments.without, sizes)


def store(results: Results, path: Path) -> None:
    """Replace the file as a whole, so that an interruption leaves the points that are done."""
    content = asdict(results)
    for entry, outcome in zip(content["outcomes"], results.outcomes, strict=True):
        entry["point"] = outcome.point._asdict()
    partial_file = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file.write_text(json.dumps(content, indent=1) + "\n")
        partial_file.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def load(path: Path) -> Results:
    try:
        content = json.loads(path.read_text())
        outcomes = []
        for entry in content.pop("outcomes"):
            figures = [Figures(**item | {"runs": [Run(**run) for run in item["runs"]]}) for item in entry["figures"]]
            outcomes.append(Outcome(**entry | {"point": Point(**entry["point"]), "figures": figures}))
        return Results(**content | {"machine": Machine(**content["machine"]), "outcomes": outcomes})
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} does not hold the figures of a benchmark") from None


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class MeasureError(Exception):
    """A command could not be measured: in a word or two, and in detail."""

    def __init__(self, detail: str, trouble: str = "failed") -> None:
        super().__init__(detail)
        self.detail, self.trouble = detail, trouble


class Conditions(NamedTuple):
    """What every run meets; without a limit, a command may have nine tenths of the memory that is free."""

    cold: bool
    timeout: float
    memory_limit: int | None = None

    @property
    def limit(self) -> int:
        return self.memory_limit or int(0.9 * available())


@dataclass
class Case:
    """A command to measure, the shape and the place of what it writes, and how it fared."""

    figures: Figures
    command: list[str]
    inputs: Inputs | None = None
    output: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    most: int | None = None  # runs, where it is too slow for as many as the others get


def available() -> int:
    """Tell how many bytes the system could still hand out, or 0 where it does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def environment(extra: dict[str, str]) -> dict[str, str]:
    """Let the children keep their bytecode, as they do by default: without it, imports take several times as long."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | extra


def measure(command: list[str], conditions: Conditions, extra: dict[str, str] | None = None) -> Run:
    """Run a command in a fresh process."""
    environ = environment(extra or {})
    if not hasattr(os, "wait4"):
        return measure_plainly(command, conditions, environ)
    launcher = [*child_source(watch, launch), str(conditions.limit), str(conditions.timeout)]
    failed, figures, errors = run_group([*launcher, *command], environ)
    if failed:
        raise MeasureError(f"cannot be started\n{errors}")
    wall, cpu, peak, status, *reasons = figures.split()
    run = Run(float(wall), float(cpu), int(peak))
    if reasons == ["time"]:
        raise MeasureError(f"stopped after {run.wall_s:.0f} s", f"over {conditions.timeout:g} s")
    if int(status):
        raise explain(int(status), errors, f"ended after {run.wall_s:.1f} s, at {int(peak) / MIB:,.0f} MiB")
    return run


def run_group(command: list[str], environ: dict[str, str]) -> tuple[int, str, str]:
    """Give exit status, output and errors. If interrupted, leave no process behind, which would write on meanwhile."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=environ, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # until the last of them has let go of its pipe
            raise
    return process.returncode, output, errors


def measure_plainly(command: list[str], conditions: Conditions, environ: dict[str, str]) -> Run:
    """Do what there is a way to do where a process's usage cannot be asked for."""
    started = time.perf_counter()
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=conditions.timeout)
    except subprocess.TimeoutExpired:
        raise MeasureError("stopped", f"over {conditions.timeout:g} s") from None
    run = Run(time.perf_counter() - started)
    if done.returncode:
        raise explain(done.returncode, done.stderr, f"ended after {run.wall_s:.1f} s")
    return run


def explain(status: int, errors: str, ended: str) -> MeasureError:
    """Tell a lack of memory, which is a result, from other failures. Nothing else kills a command outright."""
    if status == -9 or any(word in errors for word in STARVED):
        return MeasureError(ended, "out of memory")
    return MeasureError("\n".join([f"ended with status {status}", *errors.splitlines()[-20:]]))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def check_output(path: Path, shape: Shape) -> None:
    """What was written must have the tensors of the base, and their size."""
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    found: dict[str, Any] = {}
    for file in files:
        with file.open("rb") as opened:
            found |= json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    found.pop("__metadata__", None)
    wanted = {name: (DTYPES[shape.dtype].safetensors, list(size)) for name, size in shape.tensors.items()}
    if {name: (entry["dtype"], entry["shape"]) for name, entry in found.items()} != wanted:
        raise MeasureError("wrote other tensors than those of the base")
    size = sum(file.stat().st_size for file in files)
    if size < shape.size:
        raise MeasureError(f"wrote {size} bytes, which is less than {shape.size}")


def cached_share(file: Path) -> float:
    """Ask the system which share of a file's pages is in memory."""
    content: Any = np.memmap(file, np.uint8, "c")  # for its address only: nothing of it is touched
    states = np.zeros(-(-content.size // mmap.PAGESIZE), np.uint8)
    addresses = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(content.size), ctypes.c_void_p(states.ctypes.data)
    if ctypes.CDLL(None).mincore(*addresses):
        raise OSError(f"cannot ask about the pages of {file}")
    return float((states & 1).mean())


def evict(files: list[Path]) -> None:
    """Have the system forget what it holds of the files, and see that it did: tmpfs, for one, cannot."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # pages that were not written back would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if cached_share(file) > 0.01:
            raise MeasureError(f"{file.name} stays in the page cache")


def can_evict(folder: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    probe = folder / "probe"
    probe.write_bytes(bytes(4 * MIB))
    try:
        evict([probe])
    except (MeasureError, OSError):
        return False
    finally:
        probe.unlink()
    return True


def attempt(case: Case, conditions: Conditions) -> None:
    """Measure a case once more, with nothing of the runs before left to be written back meanwhile."""
    if hasattr(os, "sync"):
        os.sync()
    if conditions.cold and case.inputs:
        evict(case.inputs.files)
    try:
        run = measure(case.command, conditions, case.environment)
        if case.output and case.inputs:
            check_output(case.output, case.inputs.shape)
    finally:
        if case.output:
            remove(case.output)
            remove(case.output.with_name(f"{case.output.name}.partial"))  # of the tool, if it was killed
    case.figures.runs.append(run)


def read_all(files: list[Path]) -> None:
    """Bring the files into the page cache."""
    buffer = bytearray(2 * MIB)
    for name in files:
        with name.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_all(cases: list[Case], conditions: Conditions, repeat: int) -> None:
    """Measure the cases in turn, so that a slow spell of the machine meets all of them; note what went wrong."""
    # Another order each time, since what ran just before matters. The same ones every time, so that runs compare.
    order = random.Random(0)
    for number in range(repeat):
        for case in order.sample(cases, len(cases)):
            figures = case.figures
            if figures.trouble or number >= (case.most or repeat):
                continue
            say(f"run {number + 1} of {case.most or repeat}: {figures.name}")
            try:
                attempt(case, conditions)
            except MeasureError as error:
                figures.trouble, figures.detail = error.trouble, error.detail
                say(f"{figures.name}: {error.trouble}: {error.detail}")


# ---------------------------------------------------------------------------------------------------------------------
# The cases
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all cases of a point have in common."""

    scratch: Path
    point: Point
    inputs: Inputs
    small: Inputs
    conditions: Conditions
    repeat: int
    slow_runs: int | None = None  # of mergekit and the torch script, if not as many
    without: tuple[str, ...] = ()  # of them
    against: Path | None = None  # another version of the tool

    @property
    def threads(self) -> int:
        return self.point.threads or cores()


def floor_case(setting: Setting, threads: int, sync: bool) -> Case:
    writes = METHODS[setting.point.method].writes
    output = setting.scratch / "floor.safetensors" if writes else None
    base, *others = map(str, setting.inputs.files)
    command = [*child_source(copy, floor), str(threads), "fsync" if sync else "none", str(output or os.devnull)]
    what = f"{'with' if sync else 'no'} fsync" if writes else "reading only"
    role = f"floor-{'1' if threads == 1 else 'n'}{'-fsync' if sync else ''}"
    figures = Figures(role, f"floor, {several(threads, 'thread')}, {what}")
    return Case(figures, [*command, *others, base], setting.inputs, output)


def tool_case(setting: Setting, inputs: Inputs, role: str, name: str, method: str = "") -> Case:
    method = method or setting.point.method
    writes, program = METHODS[method].writes, setting.against if role == "against" else TOOL
    output = setting.scratch / "tool.safetensors" if writes else None
    base, *others = map(str, inputs.files)
    command = [sys.executable, str(program), *([] if writes else ["analyze"]), "--base", base, "--merge"]
    command += [*others, "--quiet", *METHODS[method].flags]
    if setting.point.threads:
        command += ["--threads", str(setting.threads)]
    if output:
        command += ["--output", str(output)]
    return Case(Figures(role, name), command, inputs, output)


def torch_case(setting: Setting, inputs: Inputs, role: str = "torch") -> Case:
    files = list(map(str, inputs.files))
    environment = {"OMP_NUM_THREADS": str(setting.threads)} if setting.point.threads else {}
    if not METHODS[setting.point.method].writes:
        command = [*child_source(torch_figures), *files]
        return Case(Figures(role, "the same figures in plain torch"), command, inputs, environment=environment)
    output = setting.scratch / "torch.safetensors"
    command = [*child_source(torch_merge), setting.point.method, str(DENSITY), str(output), *files]
    return Case(Figures(role, "plain torch script"), command, inputs, output, environment)


def mergekit_recipe(method: str, inputs: Inputs) -> dict[str, Any]:
    base, *others = map(str, inputs.folders)
    recipe = {"merge_method": METHODS[method].mergekit, "dtype": DTYPES[inputs.shape.dtype].torch}
    if method == "slerp":
        return recipe | {"base_model": others[0], "models": [{"model": m} for m in others], "parameters": {"t": 0.5}}
    parameters = {"density": DENSITY, "weight": 1 / len(others)}
    return recipe | {"base_model": base, "models": [{"model": model, "parameters": parameters} for model in others]}


def mergekit_case(setting: Setting, inputs: Inputs, role: str, name: str) -> Case:
    output = setting.scratch / "mergekit"
    recipe = inputs.folders[0].parent / "mergekit.yaml"
    # JSON is YAML too.
    recipe.write_text(json.dumps(mergekit_recipe(setting.point.method, inputs), indent=2))
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(recipe), str(output)]
    # The model card would ask the hub about the models.
    command += ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
    if setting.point.threads:
        command += ["--num-threads", str(setting.threads)]
    return Case(Figures(role, name), command, inputs, output, {"HF_HUB_OFFLINE": "1"})


def make_cases(setting: Setting, alone: bool) -> list[Case]:
    """The programs that are compared, in the order of the table."""
    method = METHODS[setting.point.method]
    syncs = ((False, True) if alone else (True,)) if method.writes else (False,)
    cases = [floor_case(setting, count, sync) for count in sorted({1, setting.threads}) for sync in syncs]
    cases.append(tool_case(setting, setting.inputs, "tool", f"dare.py {setting.point.method}"))
    slow = []
    if method.mergekit and setting.inputs.shape.config and importlib.util.find_spec("mergekit"):
        name = f"mergekit {method.mergekit}{' (no dropping)' if setting.point.method == 'slerp' else ''}"
        slow.append(mergekit_case(setting, setting.inputs, "mergekit", name))
    if setting.point.method != "trim":
        slow.append(torch_case(setting, setting.inputs))
    for case in slow:
        case.most = setting.slow_runs
    return cases + [case for case in slow if case.figures.role not in setting.without]


def small_cases(setting: Setting, cases: list[Case]) -> list[Case]:
    """The same programs with a small model: to warm up with, and to see what it takes them to start."""
    found = [tool_case(setting, setting.small, "tool-small", "dare.py, small model")]
    for case in cases:
        name = f"{case.figures.name}, small model"
        if case.figures.role == "mergekit":
            found.append(mergekit_case(setting, setting.small, "mergekit-small", name))
        if case.figures.role == "torch":
            found.append(torch_case(setting, setting.small, "torch-small"))
            found[-1].figures.name = name
    return found


def other_tools(setting: Setting) -> list[tuple[str, str, str]]:
    """Name the role, name and method of other merges to hold the tool's against."""
    method = setting.point.method
    found = [("linear", "dare.py linear", "linear")] if METHODS[method].writes and method != "linear" else []
    return [*found, ("against", "the other dare.py", method)] if setting.against else found


def other_cases(setting: Setting) -> list[Case]:
    """What is of interest about a single setting only."""
    empty = Case(Figures("empty", "Python that does nothing"), [sys.executable, "-I", "-S", "-c", "pass"])
    return [empty, *(tool_case(setting, setting.inputs, *other) for other in other_tools(setting))]


def measure_first(setting: Setting) -> Figures:
    """Time the tool's very first run, which is one only if it had to fill an empty cache of kernels."""
    case = tool_case(setting, setting.small, "first", "dare.py, small model, nothing compiled yet")
    kernels = setting.scratch / "kernels"
    case.environment["NUMBA_CACHE_DIR"] = str(kernels)
    remove(kernels)
    kernels.mkdir()
    measure_all([case], setting.conditions, 1)
    if not any(path.is_file() for path in kernels.rglob("*")):
        case.figures.runs.clear()
    remove(kernels)
    return case.figures


def warm_up(setting: Setting, cases: list[Case], alone: bool) -> None:
    """Have bytecode and kernels on disk before anything is timed. Failures show again, and are told, later.

    The floor takes part because a virtual machine gets its memory only once it uses it, and the first to write a file
    of that size would pay for that.
    """
    if not setting.point.cold:
        read_all(setting.inputs.files)
    others = [tool_case(setting, setting.small, *other) for other in other_tools(setting) if alone]
    for case in [*small_cases(setting, cases), *others, floor_case(setting, 1, False)]:
        say(f"warm-up: {case.figures.name}")
        with suppress(MeasureError):
            attempt(case, setting.conditions._replace(cold=False))


def run_setting(setting: Setting, alone: bool) -> Outcome:
    """Measure a point; where it is the only one, also what the whole comparison learns from other points."""
    cases = make_cases(setting, alone)
    warm_up(setting, cases, alone)
    further = [*other_cases(setting), *small_cases(setting, cases)] if alone else []
    measure_all([*cases, *further], setting.conditions, setting.repeat)
    figures = [case.figures for case in [*cases, *further]] + ([measure_first(setting)] if alone else [])
    shape = setting.inputs.shape
    return Outcome(setting.point, shape.title, shape.size, setting.threads, figures)


# ---------------------------------------------------------------------------------------------------------------------
# The whole comparison
# ---------------------------------------------------------------------------------------------------------------------

# Of programs that take many times as long, whose times differ less from run to run; at the largest size they run once.
SLOW_RUNS: Final = 2


def beyond_memory() -> int:
    """Find a size at which two fine-tunes, their base and the result do not fit the memory together."""
    size = 2 * CENTRE
    while 4 * DTYPES["bf16"].width * size <= (memory() or 16 << 30):
        size *= 2
    return size


def star(sizes: list[int], threads: int) -> list[Point]:
    """Go from a centre along one axis at a time: all combinations would take days.

    Points with the same inputs follow each other, so that few have to be on the disk at once.
    """
    small, middle, large = sizes
    centre = Point(middle)
    changes: list[dict[str, Any]] = [
        {},
        *({"threads": 1 << power} for power in range(16) if 1 << power < threads),
        {"cold": True},
        {"method": "ties"},
        {"method": "slerp"},
        {"models": 5},
        {"models": 5, "method": "ties"},
        {"dtype": "fp32"},
        {"parameters": START_UP},
        {"parameters": small},
        {"parameters": large},  # more than the cache holds, so that a cold one would be the same
    ]
    return list(dict.fromkeys(centre._replace(**change) for change in changes))


def lacking_space(scratch: Path, shape: Shape, models: int) -> str:
    """Say so before the disk is full; inputs that are there already need no more."""
    kept = sum(file.stat().st_size for file in place_inputs(scratch, shape, models).files if file.exists())
    free, needed = shutil.disk_usage(scratch).free + kept, shape.size * (models + 2)
    # A disk that is filled to the last block is slow, and not ours alone.
    if free < needed + 256 * MIB:
        return f"the scratch directory has {free / MIB:,.0f} MiB free, and {needed / MIB:,.0f} MiB are needed"
    return ""


def prepare(arguments: argparse.Namespace, scratch: Path, point: Point, slow_runs: int | None) -> Setting:
    """Make the inputs, and a small model of the same kind to warm up with."""
    shape, small = llama(point.parameters, point.dtype), llama(START_UP, point.dtype)
    if arguments.one_tensor:
        shape, small = one_tensor(arguments.one_tensor, point.dtype), one_tensor(2 * MIB, point.dtype)
    lacking = lacking_space(scratch, shape, point.models)
    if lacking:
        raise MeasureError(lacking)
    if point.cold and not can_evict(scratch):
        raise MeasureError("this system cannot be made to forget the inputs")
    if shape.size * (point.models + 2) > 0.8 * (memory() or math.inf):
        say("warning: inputs and output do not fit the page cache, so the disk's speed is measured as well")
    inputs, small_inputs = make_inputs(scratch, shape, point.models), make_inputs(scratch, small, point.models)
    conditions = Conditions(point.cold, arguments.timeout, arguments.memory_limit)
    choices = (slow_runs, tuple(arguments.without), arguments.against)
    return Setting(scratch, point, inputs, small_inputs, conditions, arguments.repeat, *choices)


def continued(path: Path | None, results: Results) -> Results:
    """Take up what a run before had measured, if it was of the same kind."""
    if not path or not path.exists():
        return results
    old = load(path)
    for name in ("machine", "versions", "program", "repeat", "without", "sizes"):
        if getattr(old, name) != getattr(results, name):
            raise UsageError(f"{path} was measured with other {name}: remove it, or give another file after --json")
    # What failed is tried again. What ran out of memory or time would do so again.
    results.outcomes = [outcome for outcome in old.outcomes if all(f.trouble != "failed" for f in outcome.figures)]
    return results


def run_whole(arguments: argparse.Namespace, scratch: Path) -> Results:
    sizes = arguments.sizes or [100_000_000, CENTRE, beyond_memory()]
    results = continued(arguments.json, new_results(arguments, sizes))
    say(f"sizes: {', '.join(f'{size:.4g}' for size in sizes)} parameters")
    if arguments.json:
        store(results, arguments.json)  # a file that cannot be written is better known now
    points = star(sizes, cores())
    for number, point in enumerate(points):
        outcome = results.of(point)
        say(f"\npoint {number + 1} of {len(points)}: {point.label}{', which is there already' if outcome else ''}")
        if not outcome:
            try:
                slow_runs = 1 if point.parameters == sizes[-1] else SLOW_RUNS
                outcome = run_setting(prepare(arguments, scratch, point, slow_runs), alone=False)
            except MeasureError as error:
                results.left_out.append(f"{point.label}: {error}")
                say(f"left out: {error}")
                continue
            results.outcomes.append(outcome)
            if arguments.json:
                store(results, arguments.json)
        print_outcome(outcome)
        folders = [llama(each.parameters, each.dtype).folder for each in (point, *points[number + 1 :])]
        if not arguments.directory and folders[0] not in folders[1:]:
            remove(scratch / folders[0])
    results.outcomes.sort(key=lambda outcome: points.index(outcome.point))
    return results


def run_single(arguments: argparse.Namespace, scratch: Path) -> Results:
    results = new_results(arguments, [])
    parameters = arguments.parameters
    if arguments.one_tensor:
        parameters = arguments.one_tensor // DTYPES[arguments.dtype].width
    point = Point(parameters, arguments.method, arguments.models, arguments.dtype, arguments.cold, arguments.threads)
    try:
        results.outcomes.append(run_setting(prepare(arguments, scratch, point, None), alone=True))
    except MeasureError as error:
        raise SystemExit(str(error)) from None
    print_outcome(results.outcomes[0])
    return results


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------

FLOOR: Final = ("floor-n-fsync", "floor-1-fsync", "floor-n", "floor-1")  # the strictest that there is
FLOOR_1: Final = ("floor-1-fsync", "floor-1")
# What is compared throughout: name, colour and mark in the picture.
PROGRAMS: Final = {
    "floor": ("copying the files", "#888888", "|"),
    "tool": ("this tool", "#0072B2", "o"),
    "mergekit": ("mergekit", "#D55E00", "s"),
    "torch": ("plain torch script", "#009E73", "^"),
}


def figure(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"


def mebibytes(figures: Figures | None) -> str:
    return figure(figures.peak / MIB, 0) if figures and figures.peak is not None else "n/a"


def against(above: Figures, below: Figures | None) -> str:
    return figure(above.median / below.median) if below else "n/a"


def print_outcome(outcome: Outcome) -> None:
    """One table: the tool syncs its output, so the floor of the ratios does; mergekit and torch do not sync."""
    tool, floor = outcome.of("tool"), outcome.of(*FLOOR)
    print(f"\n{outcome.point.label}\n{outcome.title}; {outcome.size / MIB:,.0f} MiB each")
    columns = ("runs", "best s", "median s", "CPU s", "peak MiB", "/ tool", "/ floor")
    print(f"{'':<44} {columns[0]:>4} " + " ".join(f"{column:>8}" for column in columns[1:]))
    for each in outcome.figures:
        if each.runs:
            cells = [figure(each.best), figure(each.median), figure(each.cpu), mebibytes(each)]
            cells += [against(each, tool), against(each, floor)]
            print(f"{each.name:<44} {len(each.runs):>4} " + " ".join(f"{cell:>8}" for cell in cells))
        if each.trouble:
            print(f"{each.name:<44}      {each.trouble}: {each.detail.partition(chr(10))[0]}")
    print_beyond_start(outcome)


def print_beyond_start(outcome: Outcome) -> None:
    """Compare what the programs need on top of a small model: most of a rival's time may be its imports."""
    tool, small = outcome.of("tool"), outcome.of("tool-small")
    for role in ("mergekit", "torch"):
        other, other_small = outcome.of(role), outcome.of(f"{role}-small")
        if tool and small and other and other_small and tool.median > 1.05 * small.median:
            times = (other.median - other_small.median) / (tool.median - small.median)
            print(f"{other.name} / {tool.name}, each less its time for the small model: {times:.2f}")


def rival(outcome: Outcome, role: str) -> str:
    """Give a rival's time, and how many times the tool's that is, or what became of it."""
    figures = next((each for each in outcome.figures if each.role == role), None)
    tool = outcome.of("tool")
    if not figures or not figures.runs:
        return (figures.trouble if figures else "") or "-"
    notes = [f"{figures.median / tool.median:.1f} x"] if tool else []
    notes += ["1 run"] * (len(figures.runs) == 1 < max(len(each.runs) for each in outcome.figures))
    notes += ["no dropping"] * figures.name.endswith("(no dropping)")
    notes += [f"then {figures.trouble}"] * bool(figures.trouble)
    return f"{figures.median:.1f} ({', '.join(notes)})"


def summary(results: Results) -> list[list[str]]:
    """One row for each point, below a row of titles: medians in seconds, and peaks in MiB."""
    rows = [["", "copy on 1 thread", "on all threads", "this tool", "/ copies", "mergekit", "torch script"]]
    rows[0] += ["MiB, this tool", "mergekit", "torch script"]
    for outcome in results.outcomes:
        tool, slow, fast = outcome.of("tool"), outcome.of(*FLOOR_1), outcome.of(*FLOOR)
        cells = [results.label(outcome.point), *(figure(each.median if each else None) for each in (slow, fast, tool))]
        cells.append(f"{against(tool, slow)}, {against(tool, fast)}" if tool else "n/a")
        cells += [rival(outcome, "mergekit"), rival(outcome, "torch")]
        rows.append(cells + [mebibytes(outcome.of(role)) for role in ("tool", "mergekit", "torch")])
    return rows


def markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] + ["---:"] * (len(rows[0]) - 1), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(map("  ".join, lines))


def growth(results: Results) -> list[list[str]]:
    """Seconds per GB read, less what it takes a program to start, along each axis, and the growth from end to end."""
    rows = [["seconds per GB read, start-up taken off", "GB read", "copy", "this tool", "mergekit", "torch script"]]
    start, centre = results.of(Point(START_UP)), Point(results.sizes[1])
    ties = centre._replace(method="ties")
    axes = {
        "size": [Point(size) for size in results.sizes],
        "models": [centre, centre._replace(models=5)],
        "models, ties": [ties, ties._replace(models=5)],
        "threads": [*(outcome.point for outcome in results.outcomes if outcome.point.threads), centre],
    }
    for axis, points in axes.items():
        outcomes = [outcome for outcome in map(results.of, points) if outcome]
        if len(outcomes) < 2:
            continue
        spent = [[beyond(outcome, start, role) for role in PROGRAMS] for outcome in outcomes]
        for outcome, times in zip(outcomes, spent, strict=True):
            gigabytes = outcome.read / 1e9
            rates = [figure(time and time / gigabytes, 3) for time in times]
            rows.append([f"{axis}: {results.label(outcome.point)}", figure(gigabytes, 3), *rates])
        ends = zip(spent[0], spent[-1], strict=True)
        grown = [figure(last / first if first and last else None) for first, last in ends]
        rows.append([f"{axis}: time, last / first", figure(outcomes[-1].read / outcomes[0].read), *grown])
    return rows


def beyond(outcome: Outcome, start: Outcome | None, role: str) -> float | None:
    """A program's median time on top of its start; nothing that is within the noise of starting."""
    roles = FLOOR if role == "floor" else (role,)
    figures, small = outcome.of(*roles), start.of(*roles) if start else None
    if not figures or not small or figures.median < 1.05 * small.median:
        return None
    return figures.median - small.median


def print_end(results: Results) -> None:
    if results.sizes:
        print("\nMedians in seconds; copies with fsync; in brackets, times slower than this tool")
        print(aligned(summary(results)))
        print(f"\n{aligned(growth(results))}")
    for text in results.left_out:
        print(f"\nleft out: {text}")
    for text in results.failures:
        print(f"\nnot measured: {text}")
    machine = results.machine
    size = "unknown" if machine.memory_bytes is None else f"{machine.memory_bytes / 2**30:.1f} GiB"
    print(f"\n{machine.system}, {machine.processor}, {several(machine.cores, 'core')}, {size} of memory")
    print(", ".join(f"{name} {version}" for name, version in results.versions.items()))


# ---------------------------------------------------------------------------------------------------------------------
# The picture
# ---------------------------------------------------------------------------------------------------------------------


def load_matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("a plot needs matplotlib, which is not installed: uv sync --extra plot") from None


def draw(results: Results, path: Path) -> None:
    """Time and peak memory of all programs, side by side, a line for each point."""
    outcomes = results.outcomes
    picture = load_matplotlib().Figure(figsize=(9.3, 1.9 + 0.36 * len(outcomes)), dpi=150, layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    draw_panel(panels[0], outcomes, "median time in seconds", lambda figures: figures.median)
    draw_panel(panels[1], outcomes, "peak memory in MiB", lambda figures: (figures.peak or 0) / MIB)
    panels[0].set_yticks(range(len(outcomes)), [results.label(outcome.point) for outcome in outcomes], fontsize=10)
    panels[0].set_ylim(len(outcomes) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    picture.legend(named.values(), named, loc="outside lower center", ncols=4, fontsize=11, frameon=False)
    try:
        picture.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": "dare"})
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot draw {path}: {error}") from None


def fastest_copy(outcome: Outcome) -> Figures | None:
    """Of the copies on one thread and on all, which differ from hour to hour in which is faster."""
    copies = [outcome.of(*FLOOR), outcome.of(*FLOOR_1)]
    return min(filter(None, copies), key=lambda figures: figures.median, default=None)


def draw_panel(axes: Any, outcomes: list[Outcome], title: str, value: Callable[[Figures], float]) -> None:
    axes.set_xscale("log")
    for line, outcome in enumerate(outcomes):
        for role, (name, colour, mark) in PROGRAMS.items():
            figures = fastest_copy(outcome) if role == "floor" else outcome.of(role)
            if figures and value(figures):
                style = {"markersize": 13, "markeredgewidth": 2.5} if mark == "|" else {"markeredgecolor": "white"}
                axes.plot(value(figures), line, mark, color=colour, label=name, **{"markersize": 8} | style)
        troubled = [each for each in outcome.figures if each.role in PROGRAMS and each.trouble and not each.runs]
        for place, each in enumerate(troubled):
            # Below and above the line, on which other programs have their marks.
            name, where = PROGRAMS[each.role][0], (0.99, line + (0.31, -0.31)[place % 2])
            text = {"ha": "right", "va": "center", "fontsize": 8, "color": PROGRAMS[each.role][1]}
            axes.annotate(f"{name}: {each.trouble}", where, xycoords=("axes fraction", "data"), **text)
    axes.set_title(title, fontsize=12, loc="left", color="#333333")
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:,g}")
    axes.xaxis.set_minor_formatter("")
    axes.tick_params(labelsize=10)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def number(text: str, least: int) -> int:
    """Read a count, which may be written as 0.48e9."""
    with suppress(ValueError):
        if least <= float(text) < 1e15:
            return int(float(text))
    raise argparse.ArgumentTypeError(f"{text} is not a number of at least {least}")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, without the usage, which is longer than a screen."""
        self.exit(2, f"{self.prog}: {message}\n")


def make_parser() -> Parser:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    count, parameters = partial(number, least=1), partial(number, least=1000)
    one = parser.add_argument_group("one setting").add_argument
    one("--parameters", type=parameters, default=100_000_000, help="size of the models (default 1e8)")
    one("--one-tensor", type=partial(number, least=4096), metavar="BYTES", help="models of one tensor of that size")
    one("--models", type=count, default=2, metavar="N", help="number of fine-tunes (default 2)")
    one("--dtype", choices=list(DTYPES), default="bf16", help="type of the tensors (default bf16)")
    one("--method", choices=list(METHODS), default="linear", help="how the models are combined (default linear)")
    one("--threads", type=count, metavar="N", help="threads of all programs (default: as each chooses)")
    one("--cold", action="store_true", help="drop the inputs from the page cache before each run")
    one("--against", type=Path, metavar="FILE", help="another version of dare.py to compare with")
    add = parser.add_argument
    add("--whole", action="store_true", help="measure the whole comparison, in about an hour")
    add(
        "--sizes",
        type=parameters,
        nargs=3,
        metavar="N",
        help="its three sizes, in parameters, the smallest first; the second is the centre",
    )
    add("--repeat", type=count, default=3, metavar="N", help="runs of each program (default 3)")
    add("--without", choices=["mergekit", "torch"], nargs="+", default=[], help="programs not to compare with")
    add("--timeout", type=count, default=900, metavar="SECONDS", help="what a run may take (default 900)")
    add("--memory-limit", type=count, metavar="BYTES", help="memory of a program (default: 0.9 of what is available)")
    add("--directory", type=Path, help="where to work; inputs are kept there and used again (default: temporary)")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file; --whole continues what it holds")
    add("--report", type=Path, metavar="FILE", help="measure nothing; tell what such a file holds")
    add("--plot", type=Path, metavar="FILE", help="draw times and memory: a .png or .svg file")
    add("--markdown", action="store_true", help="print the summary as a Markdown table")
    return parser


SINGLE: Final = ("parameters", "one_tensor", "models", "dtype", "method", "threads", "cold", "against")


def parse() -> argparse.Namespace:
    """Refuse what would be silently ignored."""
    parser = make_parser()
    arguments = parser.parse_args()
    given = [name for name in SINGLE if getattr(arguments, name) != parser.get_default(name)]
    if given and (arguments.whole or arguments.report):
        flag = "--whole" if arguments.whole else "--report"
        parser.error(f"--{given[0].replace('_', '-')} is about one setting, and does not go with {flag}")
    if arguments.report and (arguments.whole or arguments.json):
        parser.error(f"--report measures nothing, and does not go with {'--whole' if arguments.whole else '--json'}")
    if arguments.sizes and (not arguments.whole or sorted(set(arguments.sizes)) != arguments.sizes):
        parser.error("--sizes goes with --whole, and takes three sizes, the smallest first")
    if arguments.method == "slerp" and arguments.models != 2:
        parser.error("slerp is between two fine-tunes: leave --models out")
    for path in (arguments.json, arguments.plot):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"the directory of {path} does not exist")
    if arguments.plot and arguments.plot.suffix not in (".png", ".svg"):
        parser.error(f"--plot {arguments.plot} is neither .png nor .svg")
    if arguments.against and not arguments.against.is_file():
        parser.error(f"there is no file {arguments.against}")
    return arguments


def run(arguments: argparse.Namespace) -> Results:
    measured = run_whole if arguments.whole else run_single
    if arguments.directory:
        arguments.directory.mkdir(parents=True, exist_ok=True)
        return measured(arguments, arguments.directory.resolve())
    with tempfile.TemporaryDirectory(prefix="dare-benchmark-") as scratch:
        return measured(arguments, Path(scratch))


def tell(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        load_matplotlib()  # before anything is measured in vain
    if arguments.json and arguments.json.exists():
        load(arguments.json)  # nothing else is to be replaced
    results = load(arguments.report) if arguments.report else run(arguments)
    if arguments.json:
        store(results, arguments.json)
    for outcome in results.outcomes if arguments.report and not arguments.markdown else []:
        print_outcome(outcome)
    if arguments.markdown:
        print(markdown(summary(results)))
    else:
        print_end(results)
    if arguments.plot:
        draw(results, arguments.plot)
    return 1 if results.failures else 0


def main() -> int:
    try:
        return tell(parse())
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{Path(__file__).name}: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    # Ended from outside, it is to clean up as after Ctrl-C: the inputs take gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
