"""Where mergekit is installed: what both tools can do, both do alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.support import F32, Tensors, assert_same, finetune, merge, random_model, save_directory

pytest.importorskip("mergekit")

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


def run_mergekit(folder: Path, method: str, count: int, each: dict[str, Any], shared: dict[str, Any]) -> Tensors:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    paths = [str(folder / f"m{number}") for number in range(count + 1)]
    base = paths[1 if method == "slerp" else 0]
    recipe = {"merge_method": method, "dtype": "float32", "parameters": shared, "base_model": base}
    recipe["models"] = [{"model": path, **({"parameters": each} if each else {})} for path in paths[1:]]
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, cuda=False)
    run_merge(MergeConfiguration.model_validate(recipe), str(folder / "theirs"), options)
    return load_file(folder / "theirs" / "model.safetensors")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("method", "weight", "each", "shared", "ours"),
    [
        ("task_arithmetic", 0.3, {}, {"normalize": False}, {}),
        ("dare_linear", 0.3, {"density": 1.0}, {"normalize": False, "lambda": 0.7}, {"lambda_coeff": 0.7}),
        ("ties", 1.0, {"density": 1.0}, {"normalize": True}, {"method": "ties"}),
        ("ties", 0.3, {"density": 0.25}, {"normalize": True}, {"method": "ties", "keep_ratio": 0.25}),
        ("dare_ties", 0.5, {"density": 1.0}, {"normalize": True}, {"method": "ties"}),
    ],
)
def test_linear_and_ties_equal_mergekit_to_the_last_bit(
    tmp_path: Path, count: int, method: str, weight: float, each: dict[str, Any], shared: Any, ours: dict[str, Any]
) -> None:
    base, *models = make_models(tmp_path, count)
    theirs = run_mergekit(tmp_path, method, count, {"weight": weight, **each}, shared)
    assert_same(merge(tmp_path, base, *models, drop_rate=0.0, weights=[weight] * count, **ours), theirs)


@pytest.mark.parametrize("t", [0.2, 0.5])
def test_slerp_equals_mergekit_within_rounding(tmp_path: Path, t: float) -> None:
    base, *models = make_models(tmp_path, 2)
    theirs = run_mergekit(tmp_path, "slerp", 2, {}, {"t": t})
    merged = merge(tmp_path, base, *models, drop_rate=0.0, method="slerp", slerp_t=t)
    for name in merged:
        np.testing.assert_allclose(merged[name], theirs[name], rtol=2e-6, atol=1e-8)
