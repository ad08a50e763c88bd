"""What dare_merge takes on a CUDA GPU, beside a copy of the same bytes and mergekit's arithmetic in torch.

Everything is in the GPU's memory, and merges are written into existing tensors. Times are wall-clock times of whole
calls, Python's part included: the median of several, taken in turn. Bits are compared with the CPU's first.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
torch: Any = importlib.import_module("torch")
State = dict[str, Any]
DENSITY = 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"method": "ties"},
    "slerp": {"method": "slerp"},
    "trim": {"method": "ties", "drop_rate": 0.5, "keep_ratio": 0.5},
}


def make_states(shapes: dict[str, tuple[int, ...]], models: int, device: str) -> list[State]:
    """A base and its fine-tunes, whose values are close to the base's."""
    random = torch.Generator(device).manual_seed(0)

    def noise(shape: Any, size: float) -> Any:
        return torch.randn(shape, generator=random, device=device) * size

    base = {name: noise(shape, 0.02).bfloat16() for name, shape in shapes.items()}
    return [base, *({n: (t + noise(t.shape, 0.001)).bfloat16() for n, t in base.items()} for _ in range(models))]


def merge_like_mergekit(base: State, finetuned: list[State], method: str, out: State) -> None:
    """mergekit 0.1.5's operations for dare_linear and dare_ties, in its order and types, one tensor at a time."""
    for name, start in base.items():
        deltas = []
        for model in finetuned:
            delta = model[name] - start
            kept = delta * torch.bernoulli(torch.full_like(delta, DENSITY))
            before, after = delta.abs().sum(), kept.abs().sum()
            deltas.append(kept if before < 1e-7 or after < 1e-7 else kept * (before / after))
        stacked = torch.stack(deltas)
        weights = torch.tensor([1 / len(deltas)] * len(deltas), dtype=start.dtype, device=start.device)
        weighted = stacked * weights.reshape(-1, *[1] * start.dim())
        if method == "ties":
            signs, majority = weighted.sign(), (weighted.sum(0) >= 0).to(start.dtype) * 2 - 1
            weighted = weighted * (signs == majority)
        out[name].copy_(start + weighted.sum(0))


def time_in_turn(tasks: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """The median time of each, in milliseconds. The first run, which compiles, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(repeat + 1):
        for name, task in tasks.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            task()
            torch.cuda.synchronize()
            if number:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in times.items()}


def measure(
    dare: Any, shapes: dict[str, tuple[int, ...]], models: int, kinds: list[str], rivals: bool
) -> dict[str, Any]:
    base, *finetuned = make_states(shapes, models, "cuda")
    out = {name: torch.empty_like(tensor) for name, tensor in base.items()}
    elements = sum(tensor.numel() for tensor in base.values())
    halves = torch.empty((2, (models + 2) * elements // 2), dtype=torch.bfloat16, device="cuda")
    configs = {kind: dare.DareConfig(**SETTINGS[kind]) for kind in kinds}
    tasks: dict[str, Callable[[], Any]] = {"copy": lambda: halves[0].copy_(halves[1])}
    tasks |= {k: lambda c=c: dare.dare_merge(base, finetuned, c, out=out) for k, c in configs.items()}
    if rivals:
        for kind in ("linear", "ties"):
            tasks[f"mergekit {kind}"] = lambda kind=kind: merge_like_mergekit(base, finetuned, kind, out)
    found: dict[str, Any] = {"times_ms": time_in_turn(tasks, 9), "elements": elements, "tensors": len(base)}
    extra = 0
    for config in configs.values():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        dare.dare_merge(base, finetuned, config, out=out)
        extra = max(extra, torch.cuda.max_memory_allocated() - held)
    return found | {"models": models, "extra_bytes": extra}


def same_bits(dare: Any) -> bool:
    """Whether the GPU gives the CPU's bits."""
    here = make_states({"w": (300, 700), "v": (4999,), "x": (64, 1024)}, 2, "cpu")
    there = [{name: tensor.cuda() for name, tensor in state.items()} for state in here]
    for settings in SETTINGS.values():
        config = dare.DareConfig(**settings)
        ours, theirs = (dare.dare_merge(state[0], state[1:], config) for state in (here, there))
        if not all(torch.equal(ours[name].view(torch.uint8), theirs[name].cpu().view(torch.uint8)) for name in ours):
            return False
    return True


def run(describe: Callable[[int], Any], parameters: int, file: Path | None) -> None:
    """Measure and print a table. describe: gives the shapes of a model of some size."""
    sys.path.insert(0, str(ROOT))
    dare = importlib.import_module("dare")
    if not torch.cuda.is_available():
        sys.exit("--gpu needs a CUDA GPU, and torch that can use it")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, times of whole calls in ms")
    print("bits equal to the CPU's" if same_bits(dare) else "BITS DIFFER FROM THE CPU'S")
    every = list(SETTINGS)
    squares = {f"layers.{k}.weight": (4096, 4096) for k in range(max(1, round(parameters / 4096**2)))}
    small = {f"layers.{k}.weight": (1024, 1024) for k in range(max(1, parameters // 1_000_000))}
    points = {
        "squares of 4096, 2 models": measure(dare, squares, 2, every, rivals=True),
        "Llama, 2 models": measure(dare, describe(parameters)[0], 2, every, rivals=False),
        "squares of 4096, 5 models": measure(dare, squares, 5, ["linear", "ties"], rivals=False),
        "small tensors, 2 models": measure(dare, small, 2, every, rivals=False),
    }
    for name, found in points.items():
        times = found["times_ms"]
        print(f"\n{name}: {found['elements'] / 1e9:.2f} B parameters in {found['tensors']} tensors, "
              f"{found['extra_bytes'] / 1e6:.0f} MB beside inputs and output")  # fmt: skip
        for task, taken in times.items():
            rival = times.get(f"mergekit {task}")
            faster = f", {rival / taken:.1f} times as fast as mergekit's arithmetic" if rival else ""
            print(f"  {task:16} {taken:8.2f}   {taken / times['copy']:5.2f} copies{faster}")
    if file:
        file.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "points": points}))
