"""Models for the benchmark: a base and fine-tunes of any size, with the tensors of a Llama and made-up values."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

# The names of safetensors and torch for a type, and its bytes.
DTYPES = {"bf16": ("BF16", "bfloat16", 2), "fp32": ("F32", "float32", 4)}
# Up to so many parameters: hidden size, MLP, head and vocabulary.
PROPORTIONS = (
    (5e5, 64, 192, 16, 512),
    (2e7, 128, 384, 32, 4096),
    (1e8, 512, 1408, 64, 16384),
    (8e8, 1280, 3456, 64, 32000),
    (math.inf, 3072, 8192, 128, 32000),
)


def describe(parameters: int) -> tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]:
    """A title, the tensors, and a config.json for mergekit: as many layers as come closest to the size."""
    _, hidden, mlp, head, vocabulary = next(row for row in PROPORTIONS if parameters <= row[0])
    heads = hidden // head
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layer |= {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    layer |= {f"self_attn.{name}_proj": (heads // 4 * head, hidden) for name in "kv"}
    layer |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
    named = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    rest = parameters - sum(map(math.prod, named.values()))
    layers = max(1, round(rest / sum(map(math.prod, layer.values()))))
    named |= {f"model.layers.{index}.{name}": shape for index in range(layers) for name, shape in layer.items()}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    config |= {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary, "head_dim": head}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "tie_word_embeddings": False}
    counted = f"{layers} layer{'s' * (layers != 1)}"
    title = f"Llama shape, {counted}, hidden size {hidden}, MLP {mlp}, vocabulary {vocabulary}"
    return title, {f"{name}.weight": shape for name, shape in sorted(named.items())}, config


def size_of(parameters: int, dtype: str) -> int:
    return DTYPES[dtype][2] * sum(map(math.prod, describe(parameters)[1].values()))


def to_bf16(values: Any) -> Any:
    """Round float32 to the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def random_block(length: int, scale: float, seed: int) -> Any:
    """Draw values that bf16 holds exactly, so that a fine-tune differs from its base by the delta alone."""
    drawn = np.random.default_rng(seed).standard_normal(length, dtype=np.float32) * np.float32(scale)
    return (to_bf16(drawn).astype(np.uint32) << 16).view(np.float32)


def write_model(folder: Path, parameters: int, dtype: str, model: int) -> None:
    """Write model 0, the base, or a fine-tune, whose values are close to the base's.

    By hand, because the safetensors library would want all tensors in memory at once.
    """
    _, tensors, config = describe(parameters)
    entries, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + DTYPES[dtype][2] * math.prod(shape)
        entries[name] = {"dtype": DTYPES[dtype][0], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    header += b" " * (-len(header) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    # The values are tiled from two random blocks. Their lengths have no common divisor, so that a pair of a weight and
    # a delta does not come back before a trillion elements.
    weights, deltas = random_block((1 << 20) + 7, 0.02, 1), random_block((1 << 20) - 3, 0.001, 2)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for index, shape in enumerate(tensors.values()):
            place, count = index * 104729, math.prod(shape)
            values = np.resize(np.roll(weights, -place), count) + np.float32(len(shape) == 1)
            if model:
                values += np.resize(np.roll(deltas, -place - model * 350377), count)
            file.write(to_bf16(values).data if dtype == "bf16" else values.data)


def make_models(scratch: Path, parameters: int, dtype: str, models: int) -> list[Path]:
    """The folders of the base and its fine-tunes; those that are not there yet are made."""
    names = ["base", *(f"fine-tune-{number + 1}" for number in range(models))]
    folders = [scratch / f"{parameters}-{dtype}" / name for name in names]
    for model, folder in enumerate(folders):
        if not folder.exists():
            print(f"making {folder}", file=sys.stderr, flush=True)
            write_model(folder, parameters, dtype, model)
    return folders
