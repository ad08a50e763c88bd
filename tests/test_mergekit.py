"""Where mergekit is installed: what both tools can do, both do alike."""

from pathlib import Path
from string import Template

import numpy as np
import pytest
import torch
import yaml

import dare
from darelib.methods import MERGEKIT
from darelib.requests.mergekitfile import PARAMETERS
from tests.support import (
    BF16,
    F32,
    Config,
    Patch,
    Tensors,
    assert_same,
    finetune,
    low_rank,
    random_model,
    read_json,
    save_directory,
    tensors_in,
    write_adapter,
)

pytest.importorskip("mergekit")
pytestmark = pytest.mark.slow  # mergekit is not there in the default suite

UNEVEN = [0.3, -0.7, 1.1]
HIDDEN, MLP, VOCABULARY = 32, 64, 48
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.0.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
    **{f"model.layers.0.mlp.{part}_proj.weight": (MLP, HIDDEN) for part in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
    **{
        f"model.layers.0.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")
    },
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: Patch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# --- the same file, given to both -----------------------------------------------------------------

LAYERS = 4
WHO = ("ours", "theirs")
DEEP: dict[str, tuple[int, ...]] = {
    name.replace("layers.0", f"layers.{layer}"): shape
    for layer in range(LAYERS)
    for name, shape in SHAPES.items()
}
# What nothing random is in, by what it shows. $b is the base, $m1 ... its fine-tunes, $l1 and $l2
# adapters on it.
TWO = """
base_model: $b
models:
  - model: $m1
    parameters: {weight: 0.7, density: 0.53}
  - model: $m2
    parameters: {weight: 0.4, density: 0.31}
dtype: float32
"""
FILTERS = """
base_model: $b
models:
  - model: $b
  - model: $m1
    parameters:
      density: [1, 0.71, 0.13]
      weight: 1.0
  - model: $m2
    parameters:
      density: 0.47
      weight: [0.1, 0.3, 0.7, 1]
  - model: $m3
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0.25
dtype: float32
"""
OVERLAPPING = """
base_model: $b
models:
  - model: $m1
    parameters:
      weight:
        - {filter: layers.1, value: 0.9}
        - {filter: self_attn.q, value: [0.2, 0.8]}
        - {filter: _proj, value: 0.6}
        - filter: "*"
          value: 0.3
      density: [{filter: proj.w, value: 0.51}, {filter: mlp.up, value: 0.23}]
  - model: $m2
    parameters: {weight: [{filter: attn.q_p, value: 0.35}]}
parameters:
  weight: 0.45
  density:
    - {filter: norm, value: 1.0}
    - {filter: q_proj.weight, value: 0.77}
    - {value: 0.61}
  lambda: [{filter: lm_head, value: 0.5}, {value: 1.1}]
dtype: float32
"""
SLICES = """
base_model: $b
slices:
  - sources:
      - {model: $b, layer_range: [0, 1]}
      - {model: $m1, layer_range: [0, 1], parameters: {weight: 0.9}}
      - {model: $m2, layer_range: [0, 1]}
    parameters: {weight: 0.2, density: 0.57}
  - sources:
      - {model: $b, layer_range: [1, 4]}
      - {model: $m1, layer_range: [1, 4]}
      - {model: $m2, layer_range: [1, 4], parameters: {weight: [0.1, 0.9]}}
    parameters: {density: [{filter: mlp, value: [0.9, 0.37]}, {filter: norm, value: 0.83}]}
parameters:
  weight: [0.3, 0.6, 0.8]
  density: 0.43
dtype: float32
"""
SLERP = """
merge_method: slerp
base_model: $m1
$models
parameters:
  t: $t
dtype: float32
"""
ARC = "models: [{model: $m1}, {model: $m2}]"
SLICED_ARC = (
    "slices: [{sources: [{model: $m1, layer_range: [0, 4]}, {model: $m2, layer_range: [0, 4]}]}]"
)
HALVES = """
slices:
  - sources: [{model: $m2, layer_range: [0, 2]}, {model: $m1, layer_range: [0, 2]}]
    parameters: {t: [0.1, 0.4]}
  - sources: [{model: $m2, layer_range: [2, 4]}, {model: $m1, layer_range: [2, 4]}]
"""
GRADIENT = """
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
"""
LORAS = """
base_model: $b
models:
  - {model: $b+$l1, parameters: {weight: 0.8}}
  - {model: {model: $b, lora: $l2}, parameters: {weight: 0.6}}
dtype: float32
"""
ADAPTED = """
base_model: $b+$l1
models:
  - {model: $m1+$l2, parameters: {weight: 0.8}}
  - {model: {model: $b, lora: $l2}, parameters: {weight: 0.6}}
  - {model: $b, parameters: {weight: 0.3}}
dtype: float32
"""
LINEAR_BASE = """
merge_method: linear
base_model: $b
models: [{model: $m1}, {model: $m2}]
parameters: {weight: [{filter: mlp, value: [0.2, 1.4]}, {value: 0.4}]}
dtype: float32
"""
LINEAR_FILTERS = """
merge_method: linear
models:
  - {model: $m1, parameters: {weight: [{filter: down, value: [0.1, 0.9]}, {value: 1}]}}
  - {model: $m3, parameters: {weight: [{filter: proj, value: 3}, {value: 2}]}}
dtype: float32
"""
LINEAR_ADAPTERS = """
merge_method: linear
models: [{model: $b+$l1}, {model: $m1}]
parameters: {weight: 0.5, normalize: false}
dtype: float32
"""
RAM = """
name: named
merge_method: ram
base_model: $b
parameters: {epsilon: 0.003}
models: [{model: $m1}, {model: $m2}, {model: $m3}]
"""
FRANKEN = """
merge_method: passthrough
slices:
  - sources: [{model: $m1, layer_range: [0, 3]}]
  - sources: [{model: $m2, layer_range: [1, 4], parameters: {scale: [0.5, 1.5]}}]
    parameters: {scale: 3}
  - sources: [{model: $m1, layer_range: [1, 2]}]
  - sources: [{model: $m3, layer_range: [2, 4]}]
parameters:
  scale:
    - {filter: layers.2.self_attn.o_proj, value: 0.1}
    - {filter: down_proj, value: 0.0}
    - {filter: up_proj, value: [0.7, 1.3]}
    - {value: 1.0}
"""
SHORT = """
merge_method: task_arithmetic
base_model: $b
slices:
  - sources:
      - {model: $b, layer_range: [0, 1]}
      - {model: $m1, layer_range: [0, 1], parameters: {weight: 0.9}}
  - sources:
      - {model: $b, layer_range: [2, 4]}
      - {model: $m1, layer_range: [2, 4]}
parameters: {weight: [0.3, 0.6, 0.8]}
dtype: float32
"""
OTHER_LAYERS = """
slices:
  - sources: [{model: $m1, layer_range: [0, 2]}, {model: $m2, layer_range: [1, 3]}]
    parameters: {t: [0.1, 0.4]}
  - sources: [{model: $m2, layer_range: [2, 3]}, {model: $m1, layer_range: [0, 1]}]
  - sources: [{model: $m1, layer_range: [1, 4]}, {model: $m3, layer_range: [1, 4]}]
"""
UNEVEN_SLICES = """
merge_method: linear
slices:
  - sources:
      - {model: $m1, layer_range: [0, 1], parameters: {weight: 0}}
      - {model: $m2, layer_range: [0, 1], parameters: {weight: 1}}
  - sources: [{model: $m1, layer_range: [1, 4], parameters: {weight: 0.5}}]
  - sources: [{model: $m3, layer_range: [0, 2], parameters: {weight: 1}}]
  - sources:
      - {model: $m2, layer_range: [3, 4], parameters: {weight: 2}}
      - model: $m3
        layer_range: [2, 3]
        parameters: {weight: [{filter: layers.2.mlp, value: 3}, {value: 1}]}
"""
BASES = """
merge_method: ties
slices:
  - base_model: $b
    sources:
      - {model: $b, layer_range: [0, 2]}
      - {model: $m1, layer_range: [0, 2]}
      - {model: $m2, layer_range: [2, 4]}
  - base_model: $m3
    sources:
      - {model: $m2, layer_range: [1, 3]}
      - {model: $b, layer_range: [2, 4]}
      - {model: $m3, layer_range: [0, 2]}
parameters: {weight: 0.6, density: 0.5}
"""
STACKED = {
    "passthrough, slices and scales": FRANKEN,
    "passthrough, one model": "merge_method: passthrough\nmodels: [{model: $m2}]\n"
    "parameters: {scale: [{filter: norm, value: 2}, {filter: mlp, value: [0.1, 0.9]}]}",
    "task arithmetic, fewer layers": SHORT,
    "ties, a base for each slice": BASES,
    "linear, slices of one and two": UNEVEN_SLICES,
    "slerp, other layers": SLERP.replace("$models", OTHER_LAYERS).replace("$t", GRADIENT),
}
EXACT = STACKED | {
    "task arithmetic": "merge_method: task_arithmetic" + TWO,
    "task arithmetic, filters": "merge_method: task_arithmetic" + FILTERS,
    "task arithmetic, overlapping filters": "merge_method: task_arithmetic" + OVERLAPPING,
    "task arithmetic, slices": "merge_method: task_arithmetic" + SLICES,
    "task arithmetic, adapters": "merge_method: task_arithmetic" + LORAS,
    "task arithmetic, adapters on models": "merge_method: task_arithmetic" + ADAPTED,
    "task arithmetic, weight 0": "merge_method: task_arithmetic"
    + TWO.replace("0.7", "[0, 0.3]").replace(
        "0.4", "[{filter: lm_head, value: 0.4}, {value: [0, 1]}]"
    ),
    "task arithmetic, normalized": "merge_method: task_arithmetic\n"
    "parameters: {normalize: true, lambda: 1e-1}" + TWO,
    "ties": "merge_method: ties" + TWO,
    "ties, filters": "merge_method: ties" + FILTERS,
    "ties, overlapping filters": "merge_method: ties" + OVERLAPPING,
    "ties, slices": "merge_method: ties" + SLICES,
    "ties, adapters": "merge_method: ties\nparameters: {density: 0.41}" + LORAS,
    "ties, adapters on models": "merge_method: ties\nparameters: {density: 0.41}" + ADAPTED,
    "ties, density 0": "merge_method: ties" + TWO.replace("0.31", "0"),
    "ties, density 0 by a filter and a gradient": "merge_method: ties"
    + FILTERS.replace("density: 0.33", "density: [{filter: mlp, value: 0}, {value: [0.6, 0, 1]}]"),
    "breadcrumbs, density 0, normalized": "merge_method: breadcrumbs\n"
    "parameters: {normalize: true}" + FILTERS.replace("0.47", "0").replace("0.13", "0"),
    "dare_linear, density 0 and 1": "merge_method: dare_linear\nparameters: {normalize: true}"
    + TWO.replace("0.53", "0").replace("0.31", "1"),
    "della, density 0 and 1": "merge_method: della"
    + TWO.replace("0.53", "0.0").replace("0.31", "1"),
    "ties, weight 0 for most": "merge_method: ties"
    + TWO.replace("0.7", "[{filter: mlp, value: 1}, {value: 0}]").replace("0.4", "0"),
    "ties, not normalized": "merge_method: ties\n"
    "parameters: {normalize: false, int8_mask: true, lambda: 0.7}" + TWO,
    "ties, rescaled": "merge_method: ties\nparameters: {rescale: true}" + FILTERS,
    "breadcrumbs": "merge_method: breadcrumbs" + TWO,
    "breadcrumbs, filters": "merge_method: breadcrumbs\nparameters: {gamma: [0.03, 0.11]}"
    + FILTERS,
    "breadcrumbs, slices": "merge_method: breadcrumbs" + SLICES,
    "breadcrumbs, rescaled": "merge_method: breadcrumbs\n"
    "parameters: {rescale: true, normalize: true}" + TWO,
    "breadcrumbs_ties": "merge_method: breadcrumbs_ties" + TWO,
    "breadcrumbs_ties, filters": "merge_method: breadcrumbs_ties" + FILTERS,
    "breadcrumbs_ties, overlapping filters": "merge_method: breadcrumbs_ties" + OVERLAPPING,
    "breadcrumbs_ties, wide": "merge_method: breadcrumbs_ties\nparameters: {gamma: 0.6}" + FILTERS,
    "dare_linear, dense": "merge_method: dare_linear"
    + TWO.replace("0.53", "1").replace("0.31", "1"),
    "dare_ties, dense": "merge_method: dare_ties" + LORAS,
    "della, dense": "merge_method: della" + LORAS,
    "linear": "merge_method: linear"
    + TWO.replace("base_model: $b", "")
    .replace(", density: 0.53", "")
    .replace(", density: 0.31", ""),
    "linear, with a base": LINEAR_BASE,
    "linear, filters": LINEAR_FILTERS,
    "linear, adapters": LINEAR_ADAPTERS,
    "linear, adapters on models": LINEAR_ADAPTERS.replace("$m1", "$m1+$l2"),
    "linear, not normalized": LINEAR_BASE.replace(
        "parameters: {", "parameters: {normalize: false, "
    ),
    "ram": RAM,
    "ram, filters and gradients": RAM.replace(
        "0.003", "[{filter: mlp, value: [0.001, 0.004]}, {value: 0.002}]"
    ),
    "ram, as an only module": RAM.replace("models:", "modules: {default: {models:") + "}}",
    "slerp": SLERP.replace("$models", ARC).replace("$t", "0.3"),
    "slerp, filters and gradients": SLERP.replace("$models", ARC).replace("$t", GRADIENT),
    "slerp, one slice": SLERP.replace("$models", SLICED_ARC).replace("$t", GRADIENT),
    "slerp, two slices": SLERP.replace("$models", HALVES).replace("$t", GRADIENT),
}

# --- sums whose coefficients follow from scalar products

STOCK = """
merge_method: model_stock
base_model: $b
models: [{model: $m1}, {model: $m2}, {model: $m3}]
dtype: float32
"""
NUSLERP = """
merge_method: nuslerp
base_model: $b
models:
  - {model: $m1, parameters: {weight: [{filter: mlp, value: [0.2, 1.4]}, {value: 0.4}]}}
  - {model: $m2, parameters: {weight: [0.3, 0.6, 0.9]}}
dtype: float32
"""
MULTISLERP = NUSLERP.replace("nuslerp", "multislerp").replace(
    "models:", "models:\n  - {model: $m3, parameters: {weight: 0.7}}"
)
SPANNED = {
    "model_stock": STOCK,
    "model_stock of two": STOCK.replace(", {model: $m3}", ""),
    "model_stock, no filters": STOCK + "parameters: {filter_wise: false}",
    "nuslerp": NUSLERP,
    "nuslerp, no base": NUSLERP.replace("base_model: $b", ""),
    "nuslerp, weights that add up to 0": NUSLERP.replace("[0.3, 0.6, 0.9]", "[-0.4, 0.2]"),
    "nuslerp, beyond the ends": NUSLERP.replace("[0.3, 0.6, 0.9]", "-0.15"),
    "nuslerp, rows of flat tensors": NUSLERP + "parameters: {nuslerp_row_wise: true}",
    "multislerp": MULTISLERP,
    "multislerp, no base": MULTISLERP.replace("base_model: $b", ""),
    "multislerp, not normalized": MULTISLERP + "parameters: {normalize_weights: false, eps: 1e-8}",
    "karcher": STOCK.replace("model_stock", "karcher"),
    "karcher, no base": STOCK.replace("model_stock", "karcher").replace("base_model: $b", ""),
    "karcher, one step": STOCK.replace("model_stock", "karcher")
    + "parameters: {max_iter: 1, tol: 1e-9}",
}
EXACT |= SPANNED


# Methods that decide about single entries.
ONE = "\nbase_model: $b\nmodels: [{model: $m1}]\ndtype: float32\n"
OTHERS = ", {model: $m2}, {model: $m3}"
THREE = ONE.replace("{model: $m1}", "{model: $m1}" + OTHERS)
# Parameters that other methods read, at every level, and others in the wrong place.
UNUSED = "{normalize: true, lambda: 3, weight: 2, int8_mask: true, select_topk: 0.1, t: 0.9}"
UNUSED_PARAMETERS = THREE.replace("$m1}", f"$m1, parameters: {UNUSED}}}")
UNUSED_PARAMETERS += f"parameters: {UNUSED}\n"
EXACT |= {
    "model_stock, unused parameters": "merge_method: model_stock" + UNUSED_PARAMETERS,
    "sce, unused parameters": "merge_method: sce" + UNUSED_PARAMETERS,
    "sce, parameters at the top": "merge_method: sce\nselect_topk: 0.1\nint8_mask: true" + THREE,
    "ram, unused parameters": "merge_method: ram" + UNUSED_PARAMETERS,
    "karcher, unused parameters": "merge_method: karcher" + UNUSED_PARAMETERS,
    "slerp, unused parameters": "merge_method: slerp" + UNUSED_PARAMETERS.replace(OTHERS, ""),
    "nearswap, unused parameters": "merge_method: nearswap" + UNUSED_PARAMETERS.replace(OTHERS, ""),
    "multislerp, unused parameters": "merge_method: multislerp" + UNUSED_PARAMETERS,
    "nuslerp, unused parameters": "merge_method: nuslerp"
    + UNUSED_PARAMETERS.replace(", {model: $m3}", ""),
    "passthrough, unused parameters": "merge_method: passthrough\nmodels: [{model: $m2, "
    f"revision: main, parameters: {UNUSED}}}]\nparameters: {UNUSED}",
    "ties, a revision of a path": "merge_method: ties"
    + TWO.replace("model: $m1", "model: {model: {path: $m1, revision: main}}"),
    **{
        f"{method}, only the base": f"merge_method: {method}\nbase_model: $b\n"
        "models: [{model: $b}]\nparameters: {weight: 0.5, lambda: 2}"
        for method in ("task_arithmetic", "ties", "dare_ties", "ram", "sce", "linear")
    },
    "task arithmetic, layers of the base": "merge_method: task_arithmetic\nbase_model: $b\n"
    "slices: [{sources: [{model: $b, layer_range: [0, 2]}]}, "
    "{sources: [{model: $b, layer_range: [1, 3]}]}]",
    "nearswap": "merge_method: nearswap\nparameters: {t: 0.01}" + ONE,
    "nearswap, the base listed": "merge_method: nearswap\nparameters: {t: 0.01}"
    + ONE.replace("[{", "[{model: $b}, {"),
    "nearswap, filters and gradients": "merge_method: nearswap\nparameters:\n  t:\n"
    "    - {filter: mlp, value: [0, 0.004, 0.03]}\n    - {filter: norm, value: 1}\n"
    "    - value: 0.008" + ONE,
    "sce": "merge_method: sce" + THREE,
    "sce, some": "merge_method: sce\nparameters: {select_topk: 0.3, int8_mask: true}" + THREE,
    "sce, nothing": "merge_method: sce\nparameters: {select_topk: 0}" + THREE,
    "sce, filters and gradients": "merge_method: sce\nparameters:\n  select_topk:\n"
    "    - {filter: mlp, value: [0.1, 0.9]}\n    - {filter: norm, value: 0}\n"
    "    - value: 0.5" + THREE,
    "ramplus_tl": "merge_method: ramplus_tl" + THREE,
    "ramplus_tl, boosted": "merge_method: ramplus_tl\n"
    "parameters: {r: 0.4, alpha: 0.9, epsilon: 0.02}" + THREE,
    "ramplus_tl, filters": "merge_method: ramplus_tl\nparameters: {epsilon: 0.02, alpha: 2, "
    "r: [{filter: attn, value: [0.1, 0.7]}, {value: 0.3}]}" + THREE,
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small Llama, three fine-tunes and two adapters, by the names that the files above call them
    by."""
    folder = tmp_path_factory.mktemp("zoo")
    base = random_model(0, F32, DEEP)
    models = {"b": base} | {f"m{k}": finetune(base, k, 0.02) for k in (1, 2, 3)}
    config = {**CONFIG, "num_hidden_layers": LAYERS}
    paths = {
        name: save_directory(folder / name, tensors, **config) for name, tensors in models.items()
    }
    for k in (1, 2):
        modules = [
            f"model.layers.{layer}.{part}"
            for layer in range(LAYERS)
            for part in ("self_attn.q_proj", "mlp.up_proj")
        ]
        tensors = {
            key: t
            for m in modules
            for key, t in low_rank(m, DEEP[f"{m}.weight"], seed=k + sum(map(ord, m))).items()
        }
        config = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"], "bias": "none"}
        paths[f"l{k}"] = write_adapter(
            folder / f"l{k}", tensors, base_model_name_or_path=str(paths["b"]), **config
        )
    return paths


def run_theirs(
    file: Path, output: Path, seed: int = 0, adapter_dtype: str | None = "float32"
) -> Tensors:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(
        write_model_card=False,
        copy_tokenizer=False,
        cuda=False,
        random_seed=seed,
        quiet=True,
        lora_merge_cache=str(output / "adapters"),
        lora_merge_dtype=adapter_dtype,
    )
    run_merge(
        MergeConfiguration.model_validate(yaml.safe_load(file.read_text())), str(output), options
    )
    return tensors_in(output)


def run_ours(file: Path, output: Path, *flags: str) -> Tensors:
    assert dare.main(["--config", str(file), "--output", str(output), "-q", *flags]) == 0
    return tensors_in(output)


def run_both(
    text: str, paths: dict[str, Path], folder: Path, **theirs: str | None
) -> tuple[Tensors, Tensors]:
    """What this tool and mergekit make of a file with these models."""
    file = folder / "merge.yaml"
    file.write_text(Template(text).substitute(paths))
    made = (run_ours(file, folder / "ours"), run_theirs(file, folder / "theirs", **theirs))
    assert made[0].keys() == made[1].keys()
    return made


def save_narrow(folder: Path, zoo: dict[str, Path]) -> dict[str, Path]:
    """The models of the zoo in 16 bits."""
    return {
        name: save_directory(
            folder / name,
            {key: tensor.to(BF16) for key, tensor in tensors_in(zoo[name]).items()},
            **read_json(zoo[name] / "config.json") | {"torch_dtype": "bfloat16"},
        )
        for name in ("b", "m1", "m2", "m3")
    }


def join(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


DENSE = {"density": 1.0}
SUMMED = {"normalize": False}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("method", "weights", "each", "shared"),
    [
        ("task_arithmetic", [0.3] * 3, {}, SUMMED),
        ("dare_linear", [0.3] * 3, DENSE, SUMMED | {"lambda": 0.7}),
        ("dare_linear", UNEVEN, DENSE, SUMMED),
        ("ties", [1.0] * 3, DENSE, {"normalize": True}),
        ("ties", [0.3, 0.7, 1.1], {"density": 0.25}, {"normalize": True}),
        ("ties", UNEVEN, DENSE, SUMMED),
        ("ties", UNEVEN, {"density": 0.25}, SUMMED),
        ("dare_ties", [0.5] * 3, DENSE, {"normalize": True}),
        ("dare_ties", UNEVEN, DENSE, SUMMED),
    ],
)
def test_linear_and_ties_equal_mergekit_to_the_last_bit(
    zoo: dict[str, Path],
    tmp_path: Path,
    count: int,
    method: str,
    weights: list[float],
    each: Config,
    shared: Config,
) -> None:
    recipe = {"merge_method": method, "dtype": "float32", "parameters": shared, "base_model": "$b"}
    numbered = enumerate(weights[:count], 1)
    models = [{"model": f"$m{k}", "parameters": each | {"weight": own}} for k, own in numbered]
    assert_same(*run_both(yaml.safe_dump(recipe | {"models": models}), zoo, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT)
def test_the_same_file_gives_the_same_tensors(
    case: str, zoo: dict[str, Path], tmp_path: Path
) -> None:
    ours, theirs = run_both(EXACT[case], zoo, tmp_path)
    for name in ours:
        np.testing.assert_allclose(
            ours[name], theirs[name], rtol=2e-6, atol=2e-6 * 0.05, err_msg=name
        )
    depths = [read_json(tmp_path / who / "config.json")["num_hidden_layers"] for who in WHO]
    assert depths[0] == depths[1]
    toml = tmp_path / "merge.toml"
    assert dare.main(["-c", f"{tmp_path}/merge.yaml", "-q", "--write-config", str(toml)]) == 0
    assert_same(run_ours(toml, tmp_path / "again"), ours)


@pytest.mark.slow
def test_an_adapter_is_put_on_a_model_in_the_models_type(
    zoo: dict[str, Path], tmp_path: Path
) -> None:
    """Their sums are in another order, which rarely decides a rounding."""
    text = "merge_method: task_arithmetic\nbase_model: $m1+$l1\nmodels: [{model: $m1}]\n"
    text += "parameters: {weight: 1, lambda: 0}"
    paths = zoo | save_narrow(tmp_path, zoo)
    ours, theirs = map(join, run_both(text, paths, tmp_path, adapter_dtype=None))
    assert ours.dtype == theirs.dtype == BF16
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-7)
    assert (ours != theirs).float().mean() < 1 / 500


NARROW = [*SPANNED, "nearswap", "sce", "sce, some", "ramplus_tl, boosted"]
NARROW += [case for case in STACKED if case.startswith("passthrough")]


@pytest.mark.slow
@pytest.mark.parametrize("case", NARROW)
def test_what_is_stored_in_16_bits_is_mergekits_within_one_rounding(
    case: str, zoo: dict[str, Path], tmp_path: Path
) -> None:
    """Many variances are equal in bf16: of these, sce takes some in mergekit, and all here."""
    text = EXACT[case] + "\nout_dtype: bfloat16\n"
    ours, theirs = map(join, run_both(text, save_narrow(tmp_path, zoo), tmp_path))
    assert ours.dtype == theirs.dtype == BF16
    is_near = torch.isclose(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)
    assert (~is_near).float().mean() <= (1 / 500 if "some" in case else 0)
    if case in SPANNED:
        assert (ours != theirs).float().mean() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokenizer",
    [
        *("tokenizer_source: union", "tokenizer_source: base", "tokenizer_source: $m2"),
        *(
            f"tokenizer: {{source: {source}, pad_to_multiple_of: {multiple}}}"
            for source, multiple in (("union", 16), ("base", 7), ("$m2", 4), ("base", 48))
        ),
    ],
)
@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
def test_rows_are_those_of_mergekits_tokens(method: str, tokenizer: str, tmp_path: Path) -> None:
    """Each model has a token of its own, which keeps its row. After the tokens comes padding."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    base = random_model(0, F32, SHAPES)
    paths = dict[str, Path]()
    for k, name in enumerate(("b", "m1", "m2")):
        tensors = finetune(base, k, 0.02) if k else dict(base)
        for table in ("model.embed_tokens.weight", "lm_head.weight") if k else ():
            tensors[table] = torch.cat(
                [tensors[table], random_model(k, F32, {table: (1, HIDDEN)})[table]]
            )
        paths[name] = save_directory(
            tmp_path / name, tensors, **CONFIG | {"vocab_size": VOCABULARY + bool(k)}
        )
        words = {"<unk>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
        own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")))
        own.add_tokens([f"<{name}>"] if k else [])
        own.save_pretrained(paths[name])
    text = (
        f"merge_method: {method}\nbase_model: $b\nmodels: [{{model: $b}}, {{model: $m1}}, "
        f"{{model: $m2}}]\nparameters: {{weight: 0.4}}\n{tokenizer}\n"
    )
    ours, theirs = run_both(text, paths, tmp_path)
    for made, folder in zip((ours, theirs), WHO, strict=True):
        # mergekit adds the tokens in any order.
        added = PreTrainedTokenizerFast.from_pretrained(tmp_path / folder).get_added_vocab()
        rows = [*range(VOCABULARY), *(added[token] for token in sorted(added) if token != "<unk>")]
        height = len(made["lm_head.weight"])
        assert read_json(tmp_path / folder / "config.json")["vocab_size"] == height
        rows += range(len(rows), height)
        made |= {
            table: made[table][rows] for table in ("model.embed_tokens.weight", "lm_head.weight")
        }
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, atol=1e-7, err_msg=name)
    assert dare.main(["verify", str(tmp_path / "ours"), "-q"]) == 0


def test_all_of_mergekits_parameters_are_known() -> None:
    from mergekit.merge_methods.registry import registered_methods

    methods = registered_methods()
    assert {method.spec.name for method in methods} == MERGEKIT.keys()
    assert {each.name for method in methods for each in method.spec.parameters} == PARAMETERS


# --- what is random: the same distribution

WIDTH, TOKENS = 64, 8192
SIZES = CONFIG | {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": WIDTH}
TALL: dict[str, tuple[int, ...]] = {
    name: (TOKENS, WIDTH) if shape[0] == VOCABULARY else (WIDTH,) * len(shape)
    for name, shape in SHAPES.items()
}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base of zeros and two models, with a million entries."""
    folder = tmp_path_factory.mktemp("crowd")
    zeros = {name: torch.zeros(shape) for name, shape in TALL.items()}
    models = {"b": zeros} | {f"m{k}": finetune(zeros, k, 0.02) for k in (1, 2)}
    return {name: save_directory(folder / name, each, **SIZES) for name, each in models.items()}


def compare_moments(ours: np.ndarray, theirs: np.ndarray, groups: np.ndarray) -> None:
    """The mean and the mean square of each group must differ by no more than chance."""
    count = np.bincount(groups)
    for power in (1, 2):
        means = [np.bincount(groups, made**power) / count for made in (ours, theirs)]
        squares = [np.bincount(groups, made ** (2 * power)) / count for made in (ours, theirs)]
        variance = squares[0] - means[0] ** 2 + squares[1] - means[1] ** 2
        assert (np.abs(means[0] - means[1]) <= 5 * np.sqrt(variance / count) + 1e-12).all(), power


@pytest.mark.slow
@pytest.mark.parametrize("rescale", ["true", "false"])
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_random_merges_have_mergekits_mean_and_variance(
    method: str, rescale: str, crowd: dict[str, Path], tmp_path: Path
) -> None:
    text = f"merge_method: {method}\nparameters: {{rescale: {rescale}}}" + TWO
    made = (*run_both(text, crowd, tmp_path), tensors_in(crowd["m1"]), tensors_in(crowd["m2"]))
    ours, theirs, first, second = (join(each).double().numpy() for each in made)
    sign = np.sign(first)  # so that means are not 0
    of_all = np.zeros(len(first), int)
    by_size = np.searchsorted(np.arange(1, 9) / 200, np.abs(first)) * 2 + (first * second > 0)
    for groups in (of_all, by_size):
        compare_moments(ours * sign, theirs * sign, groups)
    with pytest.raises(AssertionError):
        compare_moments(ours * sign * 1.02, theirs * sign, of_all)


@pytest.mark.slow
def test_fusion_chooses_what_mergekit_chooses(zoo: dict[str, Path], tmp_path: Path) -> None:
    """Its divergences, in float32, are right to some digits: what lies on the edge may differ."""
    made = run_both("merge_method: arcee_fusion" + ONE, zoo, tmp_path)
    ours, theirs, base = map(join, (*made, tensors_in(zoo["b"])))
    chosen = int((ours != base).sum())
    assert chosen > 1000
    assert (~torch.isclose(ours, theirs, rtol=2e-6, atol=1e-7)).sum() <= chosen / 200
