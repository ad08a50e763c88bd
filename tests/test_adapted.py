"""A model with an adapter on top, MODEL+ADAPTER, merges like the model that the two give."""

import contextlib
import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import dare
from tests import test_tokenizer
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    Capture,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    examples,
    finetune,
    low_rank,
    merge_paths,
    random_model,
    run,
    same_bits,
    save,
    save_directory,
    slow,
    tensors_in,
    to_hub_cache,
    tune,
    write_adapter,
)
from tests.test_lora import multiply
from tests.test_tokenizer import EMBEDDING, HEAD

ADAPTER = low_rank("layer", (37, 61))
NORM = {"base_model.model.layer.bias": torch.linspace(0, 1, 61)}  # what is saved whole


def bake(model: Tensors, seed: int, dtype: torch.dtype) -> Tensors:
    """What write_pair puts on a model, put on it: one rounding, to the model's type."""
    real = F64 if dtype == F64 else F32
    adapter = low_rank("layer", (37, 61), seed=seed)
    change = multiply(adapter, 2, np.float64 if dtype == F64 else np.float32)
    whole = NORM["base_model.model.layer.bias"].to(dtype)
    return model | {
        "layer.weight": (model["layer.weight"].to(real) + change).to(dtype),
        "layer.bias": whole,
    }


def write_all(folder: Path, dtype: torch.dtype) -> None:
    """A base and a fine-tune, an adapter for each, and what the adapters make of them."""
    models = {"base": random_model(dtype=dtype), "tuned": finetune(random_model(dtype=dtype), 1)}
    for number, (name, model) in enumerate(models.items()):
        save_directory(folder / name, model, model_type="llama", name=name)
        adapter = low_rank("layer", (37, 61), seed=number) | NORM
        write_adapter(folder / f"on_{name}", adapter)
        baked = bake(model, number, dtype)
        save_directory(folder / f"baked_{name}", baked, model_type="llama", name=name)


@pytest.mark.parametrize("adapted", [("base", "tuned"), slow(("base",)), slow(("tuned",))], ids=str)
@pytest.mark.parametrize(
    ("dtype", "engine"),
    [(BF16, "plain"), (F64, "plain"), *(slow(dtype, "numba") for dtype in (F32, F16, BF16))],
    ids=str,
)
def test_a_model_with_an_adapter_is_the_model_that_they_give(
    tmp_path: Path, adapted: tuple[str, ...], dtype: torch.dtype, engine: str
) -> None:
    """As the base and as a fine-tune, in chunks of any size."""
    write_all(tmp_path, dtype)
    names = {name: f"{tmp_path}/{name}+{tmp_path}/on_{name}" for name in adapted}
    joined, baked = (
        [Path(given.get(name, tmp_path / name)) for name in ("base", "tuned")]
        for given in (names, {name: f"{tmp_path}/baked_{name}" for name in adapted})
    )
    config = {"drop_rate": 0.4, "engine": engine}
    expected = merge_paths(baked[0], baked[1:], tmp_path / "expected", **config)
    for chunk, threads in ((1 << 18, 1), (1024, 2)):
        tune(min_chunk=chunk, max_chunk=chunk, job_elements=chunk)
        made = merge_paths(joined[0], joined[1:], tmp_path / "made", threads=threads, **config)
        assert_same(made, expected)
    assert json.loads((tmp_path / "made" / "config.json").read_text())["name"] == "base"
    run("verify", "-q", tmp_path / "made", "--engine", engine)


def test_on_the_base_itself_the_adapter_alone_is_the_input(tmp_path: Path) -> None:
    write_all(tmp_path, BF16)
    base, adapter = tmp_path / "base", tmp_path / "on_base"
    link = tmp_path / "link"
    link.symlink_to(base)
    alone = merge_paths(base, [adapter], tmp_path / "alone", engine="plain")
    recipe = (tmp_path / "alone" / "dare_recipe.toml").read_bytes()
    for model in (base, link):
        both = merge_paths(base, [Path(f"{model}+{adapter}")], tmp_path / "both", engine="plain")
        assert_same(both, alone)
        assert (tmp_path / "both" / "dare_recipe.toml").read_bytes() == recipe


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_recipes_name_both_and_make_the_same_again_wherever_they_are(
    tmp_path: Path, refused: Refusal, output: str, monkeypatch: Patch
) -> None:
    write_all(tmp_path, BF16)
    monkeypatch.chdir(tmp_path)
    run("-q", "-b", "base+on_base", "-m", "tuned+on_tuned", "-o", output, "--engine", "plain")
    made = load_file(output) if "." in output else tensors_in(Path(output))
    if output == "out":
        recipe = tomllib.loads(Path("out/dare_recipe.toml").read_text())
        assert recipe["models"]["base_file"] == "base+on_base"
        assert recipe["models"]["merge_files"] == ["tuned+on_tuned"]
        keys = {"file", "size", "adapter_size", "adapter_config_sha256", "adapter_content_sha256"}
        assert all(keys <= entry.keys() for entry in recipe["recipe"]["inputs"])
    plain = ("-q", "--engine", "plain")
    run("verify", *plain, output)
    again = f"again{output}"
    run(*plain, "-c", output, "-o", again)
    assert_same(load_file(again) if "." in output else tensors_in(Path(again)), made)
    for wrong in ("base", "base+on_tuned", "tuned+on_base"):
        refused(1, "is none of the models", "verify", output, "-b", wrong)
    Path("moved").mkdir()
    for name in ("base", "on_base", "tuned", "on_tuned"):
        shutil.move(name, f"moved/{name}_2")
    refused(1, ("cannot find 'base+on_base'", "--base and --merge"), "verify", output)
    where = ("-b", "moved/base_2+moved/on_base_2", "-m", "moved/tuned_2+moved/on_tuned_2")
    run("verify", *plain, output, *where)
    adapter = load_file("moved/on_base_2/adapter_model.safetensors")
    other = {name: tensor + 1 for name, tensor in adapter.items()}
    write_adapter(Path("moved/on_base_2"), other)
    refused(1, ("another one", "adapter_content_sha256"), "verify", output, *where[:2])


def test_names_are_read_the_same_from_toml_and_written_so_that_they_can_be_read(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    write_all(tmp_path / "c++", BF16)
    monkeypatch.chdir(tmp_path)
    config = "[models]\nbase_file = 'c++/base+c++/on_base'\nmerge_files = ['c++/tuned']\n"
    Path("merge.toml").write_text(f"{config}[dare]\nengine = 'plain'\n")
    (tmp_path / "sub").mkdir()
    run("-q", "-c", "merge.toml", "-o", "out")
    run("-q", "-c", "merge.toml", "--write-config", "sub/new.toml")
    written = tomllib.loads(Path("sub/new.toml").read_text())["models"]
    assert written["base_file"] == "../c++/base+../c++/on_base"
    run("-q", "-c", "sub/new.toml", "-o", "again")
    assert_same(tensors_in(Path("again")), tensors_in(Path("out")))
    run("-q", "-c", "merge.toml", "-o", "again")  # the same merge, though it was named otherwise
    recipe = Path("out/dare_recipe.toml").read_bytes()
    assert Path("again/dare_recipe.toml").read_bytes() == recipe


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere+on_tuned", "there is no file or directory 'nowhere'"),
        ("tuned+nowhere", "there is no file or directory 'nowhere'"),
        ("tuned+on_tuned+on_base", "one adapter on top, not several"),
        ("tuned+baked_tuned", "'baked_tuned' is not an adapter that could be put on 'tuned'"),
        ("on_tuned+on_base", "error: 'on_tuned' is a LoRA adapter, where a model is needed"),
        ("packed+on_base", "error: 'packed' is a packed model, where a whole one is needed"),
        ("tuned+wider", "the adapter 'wider'"),
        ("tuned+elsewhere", "the adapter 'elsewhere' changes 'other.weight'"),
        ("whole+on_tuned", "'layer.weight' of 'whole' is I32"),
        ("small+on_tuned", "'layer.weight' of 'small' is FP8, on which no adapter can be put"),
        ("base+tuned", "'tuned' is not an adapter that could be put on 'base'"),
        ("tuned+", "there is no file or directory 'tuned+'"),
        ("+on_tuned", "there is no file or directory '+on_tuned'"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, refused: Refusal, given: str, words: str, monkeypatch: Patch
) -> None:
    write_all(tmp_path, BF16)
    write_adapter(tmp_path / "wider", low_rank("layer", (38, 61)))
    write_adapter(tmp_path / "elsewhere", low_rank("other", (37, 61)))
    integers = random_model() | {"layer.weight": torch.ones(37, 61, dtype=torch.int32)}
    save_directory(tmp_path / "whole", integers)
    small = {"layer.weight": torch.ones(37, 61).to(torch.float8_e4m3fn)}
    save_directory(
        tmp_path / "small", random_model() | small | {"layer.weight_scale": torch.ones(())}
    )
    monkeypatch.chdir(tmp_path)
    run("pack", "-q", "-b", "base", "-m", "tuned", "-o", "packed", "--engine", "plain")
    status = 2 if "several" in words else 1
    refused(status, words, "-b", "base", "-m", given, "-o", "out")
    refused(status, words, "-b", given, "-m", "tuned", "-o", "out")


def test_a_path_with_a_plus_in_it_is_that_path(tmp_path: Path, monkeypatch: Patch) -> None:
    write_all(tmp_path, BF16)
    monkeypatch.chdir(tmp_path)
    shutil.copytree("baked_tuned", "tuned+on_tuned")
    run("-q", "-b", "base", "-m", "tuned+on_tuned", "-o", "a+b", "--engine", "plain")
    recipe = tomllib.loads(Path("a+b/dare_recipe.toml").read_text())["recipe"]
    assert "adapter_size" not in recipe["inputs"][1]
    run("verify", "-q", "a+b", "--engine", "plain")
    shutil.rmtree("tuned+on_tuned")  # the two are not what was merged, though they have its name
    run("verify", "-q", "a+b", status=1)


def test_a_recipe_does_not_choose_what_is_read(tmp_path: Path, refused: Refusal) -> None:
    write_all(tmp_path, BF16)
    for name in ("../base+on_base", "/etc/base+on_base", "a/../b+c/../d"):
        recipe = f"[models]\nbase_file = '{name}'\nmerge_files = ['tuned']\n"
        recipe += f"[recipe]\ninputs = [{{file = '{name}'}}, {{file = 'tuned'}}]\n"
        (tmp_path / "recipe.toml").write_text(recipe)
        words = "names no path that is absolute or leads up"
        refused(2, words, "-c", tmp_path / "recipe.toml", "-o", tmp_path / "out")
    for other in ("..+..", "base+/etc/on_base"):
        (tmp_path / "recipe.toml").write_text(recipe.replace("a/../b+c/../d", other))
        words = f"cannot find {other!r}"
        refused(1, words, "-c", tmp_path / "recipe.toml", "-o", tmp_path / "out")


def test_both_parts_may_be_on_the_hub(tmp_path: Path, monkeypatch: Patch) -> None:
    write_all(tmp_path / "made", BF16)
    commits = {"tuned": "a" * 40, "on_tuned": "b" * 40}
    for name, commit in commits.items():
        to_hub_cache(tmp_path / "hub", f"org/{name}", tmp_path / "made" / name, commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    base = "org/tuned+made/on_tuned"
    given = ("-b", base, "-m", "org/tuned@main+org/on_tuned", "made/baked_tuned")
    run("-q", *given, "-o", "out", "--engine", "plain")
    models = tomllib.loads(Path("out", "dare_recipe.toml").read_text())["models"]
    pinned = [f"org/{name}@{commit}" for name, commit in commits.items()]
    assert models["merge_files"][0] == "+".join(pinned)
    card = Path("out", "README.md").read_text()
    assert '- "org/tuned"\n' in card
    assert '- "org/on_tuned"\n' in card
    run("verify", "-q", "out", "-b", base, "-m", "made/baked_tuned", "--engine", "plain")
    assert_same(tensors_in(Path("out")), tensors_in(tmp_path / "made" / "baked_tuned"))


def on_embedding(folder: Path, rows: int) -> Path:
    parts = low_rank("model.embed_tokens", (test_tokenizer.WIDTH, rows))
    return write_adapter(
        folder, {n.replace("lora_", "lora_embedding_")[: -len(".weight")]: parts[n] for n in parts}
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_tied_follows_the_embedding_that_an_adapter_changes(
    tmp_path: Path, tied: bool
) -> None:
    tensors = random_model(0, BF16, {EMBEDDING: (12, test_tokenizer.WIDTH), "rest": (3,)})
    tensors[HEAD] = tensors[EMBEDDING].clone()
    base = save_directory(tmp_path / "base", tensors, tie_word_embeddings=tied)
    adapter = on_embedding(tmp_path / "adapter", 12)
    given = Path(f"{base}+{adapter}")
    merged = merge_paths(given, [base], tmp_path / "out", lambda_coeff=0.0, engine="plain")
    assert not same_bits(merged[EMBEDDING], tensors[EMBEDDING])
    assert same_bits(merged[HEAD], (merged if tied else tensors)[EMBEDDING])


def test_a_file_of_kohyas_trainer_can_be_the_adapter(tmp_path: Path) -> None:
    a, b = ADAPTER.values()
    start = "lora_unet_layer"
    tensors = {f"{start}.lora_down.weight": a, f"{start}.lora_up.weight": b}
    base = random_model(dtype=BF16)
    paths = save(tmp_path, base=base, kohya=tensors | {f"{start}.alpha": torch.tensor(4.0)})
    given = Path("+".join(map(str, paths)))
    merged = merge_paths(given, paths[:1], tmp_path / "out", lambda_coeff=0.0, engine="plain")
    expected = (base["layer.weight"].float() + multiply(ADAPTER, 2)).to(BF16)
    assert_same(merged, base | {"layer.weight": expected})


@pytest.mark.parametrize("command", ["analyze", "pack"])
def test_other_commands_take_it_as_the_model_that_they_give(
    tmp_path: Path, command: str, capsys: Capture
) -> None:
    write_all(tmp_path, BF16)
    shown = []
    for model in (f"{tmp_path}/tuned+{tmp_path}/on_tuned", f"{tmp_path}/baked_tuned"):
        base = f"{tmp_path}/base+{tmp_path}/on_base" if "+" in model else f"{tmp_path}/baked_base"
        given = ("-b", base, "-m", model, "--engine", "plain", "-q")
        if command == "pack":
            run("pack", *given, "-o", tmp_path / "packed", "--force")
            merged = merge_paths(
                Path(base), [tmp_path / "packed"], tmp_path / "out", engine="plain"
            )
            shown.append({name: tensor.tolist() for name, tensor in merged.items()})
        else:
            run("analyze", *given, "--json")
            [model_found] = json.loads(capsys.readouterr().out)["models"]
            model_found["name"] = model_found["label"] = model_found["total"]["name"] = ""
            shown.append(model_found)
    assert shown[0] == shown[1]


@examples(20)
@given(name=st.text("ab+./@", min_size=1, max_size=9))
def test_any_name_is_one_path_or_two_or_has_more_than_one_plus(name: str) -> None:
    refused = pytest.raises(dare.ConfigError, match="one adapter on top, not several")
    with refused if name[1:-1].count("+") > 1 else contextlib.nullcontext():
        dare.DareMerger(name, [name])
