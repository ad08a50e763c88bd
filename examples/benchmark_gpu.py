"""Made-up models, and what dare_merge takes on a CUDA GPU, beside a copy of the same bytes and mergekit's arithmetic.

Everything is in the GPU's memory, and merges are written into existing tensors. Times are wall-clock times of whole
calls, Python's part included: several, taken in turn.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmark_report import Point, Stored, count_of

DENSITY = 0.1  # what the rivals keep of the deltas: the tool's default
DTYPES = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}  # their names in torch, and bytes
WIDTHS = {2e7: 128, 1e8: 512, 8e8: 1280, math.inf: 3072}  # hidden sizes of models with up to so many parameters
SQUARES, SMALL, LLAMA = "squares of 4096", "squares of 1024", "Llama"  # what the tensors are like
SETTINGS: dict[str, dict[str, Any]] = {"linear": {}, "ties": {"method": "ties"}, "slerp": {"method": "slerp"}}
SETTINGS["trim"] = {"method": "ties", "drop_rate": 0.5, "keep_ratio": 0.5}
Shapes, State = dict[str, tuple[int, ...]], dict[str, Any]


def describe(parameters: int) -> tuple[Shapes, dict[str, Any]]:
    """The tensors of a Llama, and its config.json for mergekit: as many layers as come closest to the size."""
    hidden = next(width for limit, width in WIDTHS.items() if parameters <= limit)
    mlp, vocabulary = 128 * round(hidden / 48), min(32 * hidden, 32000)
    layer: Shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layer |= {f"self_attn.{name}_proj": (hidden if name in "qo" else hidden // 4, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
    named = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    rest = parameters - sum(map(math.prod, named.values()))
    layers = max(1, round(rest / sum(map(math.prod, layer.values()))))
    named |= {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    return {f"{name}.weight": shape for name, shape in sorted(named.items())}, config | {"hidden_size": hidden}


def make_state(shapes: Shapes, model: int, dtype: str = "bf16", device: str = "cpu") -> State:
    """The base, if the number of the model is 0, or a fine-tune, whose values are close to the base's."""
    import torch

    made, random, empty = {}, torch.Generator(device), partial(torch.empty, device=device)
    for seed, (name, shape) in enumerate(shapes.items()):
        weights = empty(shape).normal_(float(len(shape) == 1), 0.02, generator=random.manual_seed(seed))
        if model:
            weights += empty(shape).normal_(0, 0.001, generator=random.manual_seed(1000 * model + seed))
        made[name] = weights.to(getattr(torch, DTYPES[dtype][0]))
    return made


def merge_like_mergekit(base: State, finetuned: list[State], method: str, out: State) -> None:
    """mergekit 0.1.5's operations for dare_linear and dare_ties, in its order and types, one tensor at a time."""
    import torch

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


def same_bits(dare: Any) -> bool:
    """Whether the GPU gives the CPU's bits."""
    import torch

    here = [make_state({"w": (300, 700), "v": (4999,), "x": (64, 1024)}, model) for model in range(3)]
    there = [{name: tensor.cuda() for name, tensor in state.items()} for state in here]
    for settings in SETTINGS.values():
        config = dare.DareConfig(**settings)
        ours, theirs = (dare.dare_merge(state[0], state[1:], config) for state in (here, there))
        if not all(torch.equal(ours[name].view(torch.uint8), theirs[name].cpu().view(torch.uint8)) for name in ours):
            return False
    return True


def measure_gpu(point: Point) -> Stored:
    """Nine calls of each task, after one that compiles. A point's method says what its tensors are like."""
    import torch

    dare: Any = importlib.import_module("dare")
    if 4 * point.parameters * (point.models + 2) > torch.cuda.mem_get_info()[1]:  # all models and as much for the copy
        return {"figures": {"copy": {"runs": [], "trouble": "out of memory"}}}
    squares = {f"layers.{k}.weight": (4096, 4096) for k in range(max(1, round(point.parameters / 4096**2)))}
    small = {f"layers.{k}.weight": (1024, 1024) for k in range(max(1, point.parameters // 1_000_000))}
    shapes = {SQUARES: squares, SMALL: small, LLAMA: describe(point.parameters)[0]}[point.method]
    base, *finetuned = (make_state(shapes, model, device="cuda") for model in range(point.models + 1))
    out = {name: torch.empty_like(tensor) for name, tensor in base.items()}
    elements = sum(tensor.numel() for tensor in base.values())
    halves = torch.empty((2, (point.models + 2) * elements // 2), dtype=torch.bfloat16, device="cuda")
    configs = {kind: dare.DareConfig(**SETTINGS[kind]) for kind in list(SETTINGS)[: 4 if point.models == 2 else 2]}
    merges = {kind: partial(dare.dare_merge, base, finetuned, config, out=out) for kind, config in configs.items()}
    tasks: dict[str, Callable[[], Any]] = {"copy": lambda: halves[0].copy_(halves[1]), **merges}
    for kind in ("linear", "ties") if point.method == SQUARES and point.models == 2 else ():
        tasks[f"mergekit's {kind}"] = partial(merge_like_mergekit, base, finetuned, kind, out)
    figures: Stored = {role: {"runs": [], "trouble": ""} for role in tasks}
    for number in range(10):
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
