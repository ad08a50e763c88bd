"""What benchmark.py measures on a GPU, in its own process: tensors in memory, and their bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from benchmark_models import DENSITY, State, describe, make_state
from benchmark_report import Point, Stored, count_of

# What tensors on a GPU are like
SQUARES = "squares of 4096"
SMALL = "squares of 1024"
LLAMA = "Llama"
ON_TENSORS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ties": {"method": "ties"},
    "slerp": {"method": "slerp", "drop_rate": 0.9},
}
ON_TENSORS["trim"] = {"method": "ties", "drop_rate": 0.5, "keep_ratio": 0.5}
ON_TENSORS["ram"] = {"method": "ram", "drop_rate": 0.9}
ON_TENSORS["ram, nothing dropped"] = {"method": "ram", "drop_rate": 0.0}


def merge_by_mergekit(base: State, finetuned: list[State], method: str) -> Any:
    """mergekit's own arithmetic and nothing else, one tensor at a time. Gives the last one."""
    registry, types = (
        import_module(f"mergekit.merge_methods.{name}") for name in ("registry", "base")
    )
    models = range(1, len(finetuned) + 1)
    settings = {"int8_mask": False, "normalize": False, "rescale": True}
    settings |= {
        "density": dict.fromkeys(models, DENSITY),
        "weight": dict.fromkeys(models, 1 / len(finetuned)),
    }
    for name, tensor in base.items():
        inputs = types.TensorGroup.from_tensors(
            [tensor, *(model[name] for model in finetuned)], base_index=0
        )
        merged = registry.get(f"dare_{method}").merge_group(inputs, **settings, **{"lambda": 1.0})
    return merged


def same_bits(dare: Any) -> bool:
    """Whether the GPU gives the CPU's bits."""
    import torch

    here = [
        make_state({"w": (300, 700), "v": (4999,), "x": (64, 1024)}, model) for model in range(3)
    ]
    there = [{name: tensor.cuda() for name, tensor in state.items()} for state in here]
    for settings in ON_TENSORS.values():
        config = dare.DareConfig(**settings)
        ours, theirs = (dare.dare_merge(state[0], state[1:], config) for state in (here, there))
        if not all(
            torch.equal(ours[name].view(torch.uint8), theirs[name].cpu().view(torch.uint8))
            for name in ours
        ):
            return False
    return True


def measure_gpu(point: Point, with_mergekit: bool) -> Stored:
    """25 calls of each task, after one that compiles. A point's method is what tensors are like."""
    import torch

    dare: Any = import_module("dare")
    # All models, and as much for the copy.
    if 4 * point.parameters * (point.models + 2) > torch.cuda.mem_get_info()[1]:
        return {"figures": {"copy": {"runs": [], "trouble": "out of memory"}}}
    squares = {
        f"layers.{k}.weight": (4096, 4096) for k in range(max(1, round(point.parameters / 4096**2)))
    }
    small = {
        f"layers.{k}.weight": (1024, 1024) for k in range(max(1, point.parameters // 1_000_000))
    }
    shapes = {SQUARES: squares, SMALL: small, LLAMA: describe(point.parameters)[0]}[point.method]
    base, *finetuned = (
        make_state(shapes, model, device="cuda") for model in range(point.models + 1)
    )
    out = {name: torch.empty_like(tensor) for name, tensor in base.items()}
    elements = sum(tensor.numel() for tensor in base.values())
    halves = torch.empty(
        (2, (point.models + 2) * elements // 2), dtype=torch.bfloat16, device="cuda"
    )
    configs = {
        kind: dare.DareConfig(**ON_TENSORS[kind])
        for kind in list(ON_TENSORS)[: None if point.models == 2 else 2]
    }
    merges = {
        kind: partial(dare.dare_merge, base, finetuned, config, out=out)
        for kind, config in configs.items()
    }
    tasks: dict[str, Callable[[], Any]] = {"copy": lambda: halves[0].copy_(halves[1]), **merges}
    for kind in ("linear", "ties") if with_mergekit else ():
        tasks[f"mergekit's {kind}"] = partial(merge_by_mergekit, base, finetuned, kind)
    figures: Stored = {role: {"runs": [], "trouble": ""} for role in tasks}
    for number in range(26):
        for role, task in tasks.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            task()
            torch.cuda.synchronize()
            figures[role]["runs"] += [{"wall_s": time.perf_counter() - started}] if number else []
    extra = 0
    for merge in merges.values():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        merge()
        extra = max(extra, torch.cuda.max_memory_allocated() - held)
    bits = "the CPU's bits" if same_bits(dare) else "BITS THAT DIFFER FROM THE CPU'S"
    return {
        "figures": figures,
        "note": f", {count_of(len(base), 'tensor')}, {bits}, {extra / 1e6:.0f} MB of memory",
    }
