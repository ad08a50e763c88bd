"""Merged directories are at home among Hugging Face's tools: transformers loads, runs and saves
them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import (
    BF16,
    F32,
    FAMILIES,
    INDEX,
    assert_same,
    family_model,
    run_merge,
    tensors_in,
)

LOADED = [(family, dtype) for family in FAMILIES for dtype in (BF16, F32)]


def save_family(folder: Path, family: str, dtype: torch.dtype = F32, **shards: str) -> list[Path]:
    """A base and two fine-tunes as transformers saves them, with the given sizes of shards."""
    model = family_model(family, dtype)
    paths = []
    for seed, name in enumerate(("base", "math", "code")):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters() if seed else ():
                parameter += (torch.randn(parameter.shape, generator=generator) * 0.001).to(dtype)
        paths.append(folder / name)
        model.save_pretrained(paths[-1], max_shard_size=shards.get(name, "5GB"))
    return paths


@pytest.mark.slow  # importing transformers takes longer than most of the suite
@pytest.mark.parametrize(("family", "dtype"), LOADED)
def test_a_merged_directory_loads_in_transformers_and_runs(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    import transformers

    base, *models = save_family(tmp_path, family, dtype, math="9KB")
    report = run_merge(base, models, tmp_path / "merged", max_shard_size="5kB")
    run_merge(base, models, tmp_path / "merged.safetensors")
    assert len(report.files) > 1
    assert_same(tensors_in(tmp_path / "merged"), load_file(tmp_path / "merged.safetensors"))
    loaded, info = getattr(transformers, FAMILIES[family][0]).from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.dtype == dtype
    assert bool(loaded(torch.arange(8)[None]).logits.isfinite().all())
    # What transformers saves again is what we wrote, under the same names, in as many bytes.
    loaded.save_pretrained(tmp_path / "again", max_shard_size="5KB")
    assert_same(tensors_in(tmp_path / "again"), load_file(tmp_path / "merged.safetensors"))
    ours, theirs = (
        json.loads((tmp_path / name / INDEX).read_text()) for name in ("merged", "again")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_a_model_of_another_type_loads_in_that_type(tmp_path: Path, key: str | None) -> None:
    import transformers

    base, *models = save_family(tmp_path, "llama")
    config = json.loads((base / "config.json").read_text())
    config.pop("dtype")
    (base / "config.json").write_text(json.dumps(config | ({key: "float32"} if key else {})))
    run_merge(base, models, tmp_path / "merged", dtype="bfloat16")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == BF16
