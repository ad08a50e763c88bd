"""The models that benchmark.py merges: a Llama-shaped base of any size, and its fine-tunes."""

from __future__ import annotations

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmark_report import MIB, Point

DENSITY = 0.1  # what the rivals keep of the deltas: the tool's default
DTYPES = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}  # their names in torch, and bytes
WIDTHS = {
    2e7: 128,
    1e8: 512,
    8e8: 1280,
    math.inf: 3072,
}  # hidden sizes of models with up to so many parameters
Shapes = dict[str, tuple[int, ...]]
State = dict[str, Any]


def describe(parameters: int) -> tuple[Shapes, dict[str, Any]]:
    """The tensors of a Llama of about this size, and its config.json for mergekit."""
    hidden = next(width for limit, width in WIDTHS.items() if parameters <= limit)
    mlp = 128 * round(hidden / 48)
    vocabulary = min(32 * hidden, 32000)
    layer: Shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    named: Shapes = {
        "model.embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "model.norm": (hidden,),
    }
    rest = parameters - sum(map(math.prod, named.values()))
    layers = max(1, round(rest / sum(map(math.prod, layer.values()))))
    named |= {
        f"model.layers.{index}.{name}": shape
        for index in range(layers)
        for name, shape in layer.items()
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 256),
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }
    return {f"{name}.weight": shape for name, shape in sorted(named.items())}, config


def make_state(shapes: Shapes, model: int, dtype: str = "bf16", device: str = "cpu") -> State:
    """The base, if the model's number is 0, or a fine-tune, whose values are close to its."""
    import torch

    made = {}
    random = torch.Generator(device)
    empty = partial(torch.empty, device=device)
    for seed, (name, shape) in enumerate(shapes.items()):
        weights = empty(shape).normal_(
            float(len(shape) == 1), 0.02, generator=random.manual_seed(seed)
        )
        if model:
            weights += empty(shape).normal_(
                0, 0.001, generator=random.manual_seed(1000 * model + seed)
            )
        made[name] = weights.to(getattr(torch, DTYPES[dtype][0]))
    return made


def make_models(folder: Path, point: Point) -> list[Path]:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    free = shutil.disk_usage(folder).free
    needed = DTYPES[point.dtype][1] * point.parameters * (point.models + 2)
    if free < needed + 256 * MIB:  # a disk that is filled to the last block is slow
        sys.exit(f"{free / MIB:,.0f} MiB of disk are free, and {needed / MIB:,.0f} MiB are needed")
    shapes, config = describe(point.parameters)
    files = [folder / f"model-{number}" / "model.safetensors" for number in range(point.models + 1)]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.with_name("config.json").write_text(json.dumps(config))
        made = make_state(
            shapes, number, point.dtype, "cuda" if torch.cuda.is_available() else "cpu"
        )
        save_file(made, file, metadata={"format": "pt"})
    return files


def make_adapters(base: Path, count: int, rank: int = 16) -> list[Path]:
    """LoRA adapters that change all matrices of the base's layers, beside it."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(base, "pt") as file:
        names = [name for name in file.keys() if "_proj" in name]  # noqa: SIM118
        wanted = {name: file.get_slice(name).get_shape() for name in names}
    targets = sorted({name.split(".")[-2] for name in wanted})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    folders = [base.parent / f"adapter-{number}" for number in range(count)]
    for seed, made in enumerate(folders):
        made.mkdir()
        made.joinpath("adapter_config.json").write_text(json.dumps(config))
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (outputs, inputs) in wanted.items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            first = torch.empty(rank, inputs).normal_(0, 0.02, generator=random)
            second = torch.empty(outputs, rank).normal_(0, 0.02, generator=random)
            tensors |= {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second}
        save_file(tensors, made / "adapter_model.safetensors")
    return folders


def measure_error(base: Path, model: Path, adapter: Path) -> float:
    """How far the products of an adapter are from a model's changes of the same matrices: relative,
    by norm.
    """
    from safetensors.torch import load_file

    before = load_file(base)
    after = load_file(model)
    parts = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    lost = 0.0
    total = 0.0
    for name, second in parts.items():
        tensor = name.removeprefix("base_model.model.").replace(".lora_B.", ".")
        if ".lora_B." in name and "_proj" in name:
            change = after[tensor].double() - before[tensor].double()
            first = parts[name.replace(".lora_B.", ".lora_A.")]
            lost += float((change - scale * second.double() @ first.double()).square().sum())
            total += float(change.square().sum())
    return math.sqrt(lost / total)
