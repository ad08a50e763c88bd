"""Where mergekit is installed: what both tools can do, both do alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support import F32, Tensors, assert_same, finetune, merge, random_model, save_directory

pytest.importorskip("mergekit")

Config = dict[str, Any]
UNEVEN, SUMMED = [0.3, -0.7, 1.1, 0.45], {"method": "ties", "normalize": False}
HIDDEN, MLP, VOCABULARY = 32, 64, 48
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.0.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
    **{f"model.layers.0.mlp.{part}_proj.weight": (MLP, HIDDEN) for part in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
    **{f"model.layers.0.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")},
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def make_models(folder: Path, count: int) -> list[Tensors]:
    """A tiny Llama and fine-tunes of it, in the directories that mergekit wants."""
    base = random_model(0, F32, SHAPES)
    models = [base, *(finetune(base, seed, 0.02) for seed in range(1, count + 1))]
    for number, tensors in enumerate(models):
        save_directory(folder / f"m{number}", tensors, **CONFIG)
    return models


def run_mergekit(
    folder: Path, method: str, count: int, each: Config, shared: Config, weights: Sequence[float] = ()
) -> Tensors:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    paths = [str(folder / f"m{number}") for number in range(count + 1)]
    base = paths[1 if method == "slerp" else 0]
    recipe = {"merge_method": method, "dtype": "float32", "parameters": shared, "base_model": base}
    models = [{"model": path, "parameters": dict(each)} for path in paths[1:]]
    for model, weight in zip(models, weights, strict=False):
        model["parameters"]["weight"] = weight
    recipe["models"] = models
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, cuda=False)
    run_merge(MergeConfiguration.model_validate(recipe), str(folder / "theirs"), options)
    return load_file(folder / "theirs" / "model.safetensors")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("method", "weights", "each", "shared", "ours"),
    [
        ("task_arithmetic", [0.3] * 4, {}, {"normalize": False}, {}),
        ("dare_linear", [0.3] * 4, {"density": 1.0}, {"normalize": False, "lambda": 0.7}, {"lambda_coeff": 0.7}),
        ("dare_linear", UNEVEN, {"density": 1.0}, {"normalize": False}, {}),
        ("ties", [1.0] * 4, {"density": 1.0}, {"normalize": True}, {"method": "ties"}),
        ("ties", [0.3, 0.7, 1.1, 0.45], {"density": 0.25}, {"normalize": True}, {"method": "ties", "keep_ratio": 0.25}),
        ("ties", UNEVEN, {"density": 1.0}, {"normalize": False}, SUMMED),
        ("ties", UNEVEN, {"density": 0.25}, {"normalize": False}, {**SUMMED, "keep_ratio": 0.25}),
        ("dare_ties", [0.5] * 4, {"density": 1.0}, {"normalize": True}, {"method": "ties"}),
        ("dare_ties", UNEVEN, {"density": 1.0}, {"normalize": False}, SUMMED),
    ],
)
def test_linear_and_ties_equal_mergekit_to_the_last_bit(
    tmp_path: Path, count: int, method: str, weights: list[float], each: Config, shared: Config, ours: Config
) -> None:
    base, *models = make_models(tmp_path, count)
    theirs = run_mergekit(tmp_path, method, count, each, shared, weights)
    assert_same(merge(tmp_path, base, *models, drop_rate=0.0, weights=weights[:count], **ours), theirs)


def test_normalized_linear_equals_mergekit_within_rounding(tmp_path: Path) -> None:
    base, *models = make_models(tmp_path, 3)
    theirs = run_mergekit(tmp_path, "dare_linear", 3, {"density": 1.0}, {"normalize": True}, UNEVEN)
    merged = merge(tmp_path, base, *models, drop_rate=0.0, weights=UNEVEN[:3], normalize=True)
    for name in merged:
        np.testing.assert_allclose(merged[name], theirs[name], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("t", [0.2, 0.5])
def test_slerp_equals_mergekit_within_rounding(tmp_path: Path, t: float) -> None:
    base, *models = make_models(tmp_path, 2)
    theirs = run_mergekit(tmp_path, "slerp", 2, {}, {"t": t})
    merged = merge(tmp_path, base, *models, drop_rate=0.0, method="slerp", slerp_t=t)
    for name in merged:
        np.testing.assert_allclose(merged[name], theirs[name], rtol=2e-6, atol=1e-8)
