"""The recipe in a merged model: it says how the model was made, and makes it again."""

from __future__ import annotations

import hashlib
import struct
import tomllib
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dare
from tests.support import assert_same, refuse, run_merge, tensors_in

Patch = pytest.MonkeyPatch


def recipe_of(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["dare_recipe"])


def test_a_merged_file_says_all_that_determines_its_bytes_and_no_more(models: list[Path], tmp_path: Path) -> None:
    run_merge(models[0], models[1:], tmp_path / "out.safetensors", drop_rate=0.75, seed=9)
    recipe = tomllib.loads(recipe_of(tmp_path / "out.safetensors"))
    assert (recipe["dare"]["drop_rate"], recipe["dare"]["seed"]) == (0.75, 9)
    assert recipe["models"] == {"base_file": str(models[0]), "merge_files": [str(m) for m in models[1:]]}
    assert (recipe["recipe"]["version"], recipe["recipe"]["seeds"]) == (dare.__version__, [9, 10])
    for entry, path in zip(recipe["recipe"]["inputs"], models, strict=True):
        data = path.read_bytes()
        header = data[: 8 + struct.unpack("<Q", data[:8])[0]]
        assert entry == {"file": str(path), "size": len(data), "header_sha256": hashlib.sha256(header).hexdigest()}
    others = {"threads": 1, "delta_threshold": 9, "engine": "plain", "max_shard_size": "1MB"}
    run_merge(models[0], models[1:], tmp_path / "other.safetensors", drop_rate=0.75, seed=9, **others)
    assert (tmp_path / "other.safetensors").read_bytes() == (tmp_path / "out.safetensors").read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        "--drop-rate 0.6 --seed 3",
        "--method ties --weights 1 2 --keep-ratio 0.4 --lambda 0.9 --dtype float32 --mismatch overlap",
        "--method slerp --slerp-t 0.3 --drop-rate 0.5 0.7 --rescale-q 0.6",
        "--no-rescale --drop-rate 0.2 --weights 1 -1 --rule *bias:drop_rate=0 --rule *.weight:lambda_coeff=0.5",
    ],
)
def test_a_recipe_makes_the_same_file_again(models: list[Path], tmp_path: Path, monkeypatch: Patch, flags: str) -> None:
    monkeypatch.chdir(tmp_path)
    base, *others = (path.name for path in models)
    engine = ["-q", "--engine", "plain"]
    assert dare.main([*engine, "-b", base, "-o", "first.safetensors", *flags.split(), "-m", *others]) == 0
    Path("recipe.toml").write_text(recipe_of(Path("first.safetensors")))
    monkeypatch.chdir("/")
    assert dare.main([*engine, "-c", f"{tmp_path}/recipe.toml", "-o", f"{tmp_path}/again.safetensors"]) == 0
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "first.safetensors").read_bytes()


@pytest.mark.usefixtures("pair")
def test_the_recipe_of_a_directory_leads_to_its_models(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert dare.main(["-b", "base", "-m", "math/model.safetensors", "-o", "link/merged", "--max-shard-size=9kB"]) == 0
    monkeypatch.chdir("/")
    first, second = tmp_path / "results" / "merged", tmp_path / "elsewhere"
    assert str(tmp_path) not in (first / "dare_recipe.toml").read_text(), "its paths are relative to it"
    assert dare.main(["-q", "-c", str(first / "dare_recipe.toml"), "-o", str(second)]) == 0
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    assert_same(tensors_in(first), tensors_in(second))


def test_a_recipe_refuses_other_inputs(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_merge(models[0], models[1:], tmp_path / "first.safetensors")
    (tmp_path / "recipe.toml").write_text(recipe_of(tmp_path / "first.safetensors"))
    save_file(load_file(models[2]) | {"more": load_file(models[0])["scalar"]}, models[2])
    arguments = ["-c", str(tmp_path / "recipe.toml"), "-q", "-o", str(tmp_path / "again.safetensors")]
    refuse(tmp_path, capsys, 1, "is not the file that the recipe was made with: its size is", arguments=arguments)
    assert dare.main([*arguments, "--merge", str(models[1])]) == 0, "named anew, the models are taken as they are"
