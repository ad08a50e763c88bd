"""Merges of files that are matched with examples: of which models, what is written, reports,
and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dare import ConfigError, DareError
from darelib.run import matching
from darelib.run.matching.network import EMBEDDINGS, VECTORS
from darelib.run.matching.walk import EXCLUDED, Sums, Walk
from tests.house import COUNT, House, make_adapter, pack, write_lines
from tests.scene import contents
from tests.support import (
    BF16,
    POSIX,
    Capture,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    family_model,
    raw,
    read_json,
    run,
    same_bits,
    slow,
    tensors_in,
    to_hub_cache,
)
from tests.test_adapters import change_of, near

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def made(llama: House) -> tuple[Path, Any]:
    """The merge with examples, and its report; beside it, the one without."""
    llama.merger(examples=()).merge(llama.folder / "plain")
    return llama.folder / "merged", llama.merger().merge(llama.folder / "merged")


def change_a_byte(folder: Path, tensor: torch.Tensor) -> None:
    whole = raw(tensor).tobytes()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(whole, bytes([whole[0] ^ 1]) + whole[1:]))


# --- which models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "moe", *map(slow, ("qwen", "gemma", "sees", "gpt2"))])
def test_models_of_any_architecture_are_matched_verified_and_loaded(
    houses: Callable[[str], House], tmp_path: Path, kind: str
) -> None:
    house = houses(kind)
    merger = house.merger(max_shard_size="8kB")
    report = merger.merge(tmp_path / "out").matching
    assert report.after < report.before
    assert len(report.blocks) >= 2, "by blocks"
    assert all(block.after < block.before for block in report.blocks)
    assert sum(block.matrices for block in report.blocks) == house.matched
    assert house.words in str(report)
    house.merger(examples=()).merge(tmp_path / "plain")
    found, without = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "plain")
    changed = [name for name in found if not same_bits(found[name], without[name])]
    assert len(changed) == house.matched
    assert not [name for name in changed if "norm" in name or "emb" in name or "expert" in name]
    loaded, info = house.kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not {*info["missing_keys"], *info["unexpected_keys"]}
    assert loaded(input_ids=torch.arange(9)[None]).logits.isfinite().all()
    assert merger.verify(tmp_path / "out").matched == house.matched
    change_a_byte(tmp_path / "out", found[changed[0]])
    with pytest.raises(DareError, match="has another digest"):
        merger.verify(tmp_path / "out")


INPUTS: dict[str, Callable[[House, Path], dict[str, Any]]] = {
    "adapters": lambda house, folder: {
        "models": [make_adapter(house, folder / f"a{k}", k) for k in range(2)]
    },
    "model+adapter": lambda house, folder: {
        "models": [f"{house.models[0]}+{make_adapter(house, folder / 'a', 1)}", house.models[1]]
    },
    "packed": lambda house, folder: {
        "models": [house.models[0], pack(house, folder / "p.safetensors")], "drop_rate": 0.5,
    },
    "base's examples": lambda house, _: {"base_examples": house.examples[0]},
    "wudi": lambda *_: {"method": "wudi"},
    "bfloat16": lambda *_: {"dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["adapters", *map(slow, (kind for kind in INPUTS if kind != "adapters"))]
)
def test_inputs_of_any_kind_are_matched_into_a_file(
    llama: House, tmp_path: Path, kind: str
) -> None:
    merger = llama.merger(**INPUTS[kind](llama, tmp_path))
    report = merger.merge(tmp_path / "out.safetensors")
    assert report.matching.after < report.matching.before
    assert len(report.matching.examples) == 2 + (kind == "base's examples")
    expected = 14 if "adapters" in kind else 15
    assert sum(block.matrices for block in report.matching.blocks) == expected
    assert merger.verify(tmp_path / "out.safetensors").matched == expected


def to_fp8(model: Path, folder: Path) -> Path:
    """The same with the blocks' matrices in FP8, each with one scale."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: Tensors = {}
    for name, each in tensors_in(model).items():
        scale = each.abs().amax() / 448
        if "proj" in name:
            stored |= {name: (each / scale).to(FP8), f"{name}_scale_inv": scale.reshape(1, 1)}
        else:
            stored[name] = each.to(BF16)
    save_file(stored, folder / "model.safetensors")
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = read_json(model / "config.json") | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_fp8_models_are_matched_judged_and_written_in_fp8(llama: House, tmp_path: Path) -> None:
    base, *models = (to_fp8(each, tmp_path / each.name) for each in (llama.base, *llama.models))
    merger = llama.merger(models=models, base=base)
    report = merger.merge(tmp_path / "out")
    assert report.matching.after < report.matching.before
    assert tensors_in(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"].dtype == FP8
    assert merger.verify(tmp_path / "out").matched == 15
    scores = merger.evaluate([tmp_path / "out"]).to_dict()["models"]
    losses = [[score["loss"] for score in model["scores"]] for model in scores]
    assert all(own > merged for own, merged in zip(losses[0], losses[-1], strict=True))


@pytest.mark.slow
@POSIX
def test_models_of_the_hub_are_matched_and_judged_by_their_names(
    llama: House, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for k, path in enumerate((llama.base, *llama.models)):
        to_hub_cache(tmp_path / "hub", f"org/{path.name}", path, str(k) * 40)
    flags = ["-b", "org/base", "-m", "org/math", "org/code", *llama.flags[5:]]
    flags += ["--examples", *llama.examples]
    run(*flags, "-o", "out")
    run("verify", "out")
    run("-c", "out", "-o", "again", "--examples", *llama.examples, "-q", "--engine", "plain")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    run("evaluate", *flags, "--model", "out")


def test_an_adapter_as_the_output_is_the_best_of_its_rank(
    llama: House, made: tuple[Path, Any], tmp_path: Path
) -> None:
    merger = llama.merger(adapter_rank=4)
    merger.merge(tmp_path / "adapter")
    merger.verify(tmp_path / "adapter")
    merged, start = tensors_in(made[0]), tensors_in(llama.base)
    for name, change in change_of(tmp_path / "adapter").items():
        u, s, v = torch.linalg.svd((merged[name] - start[name]).double())
        assert near(change, u[:, :4] * s[:4] @ v[:4], 1e-3), name
    adapters = INPUTS["adapters"](llama, tmp_path)["models"]
    small = llama.merger(models=adapters, adapter_rank=4)
    assert small.plan(tmp_path / "small").matching.matrices == 14, "no adapter has the head"
    with pytest.raises(ConfigError, match="adapter_rank full is found from the models' changes"):
        llama.merger(models=adapters, adapter_rank="full").merge(tmp_path / "full")
    assert not (tmp_path / "full").exists()


def test_an_example_is_the_same_however_it_is_written(llama: House, tmp_path: Path) -> None:
    base = shutil.copytree(llama.base, tmp_path / "base")
    template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
    (base / "chat_template.jinja").write_text(template)
    pairs = [json.loads(line) for line in llama.examples[0].read_text().splitlines()]
    texts = [f"{pair['prompt']} {pair['completion']}" for pair in pairs]
    written: list[Callable[[int], Any]] = [
        lambda k: {"text": texts[k]},
        lambda k: {"input_ids": [int(word[1:]) for word in texts[k].split()]},
        lambda k: {"messages": [{"role": "user", "content": text} for text in pairs[k].values()]},
    ]
    mixed = [written[k % 3](k) for k in range(COUNT)]
    files = [llama.examples[0], write_lines(tmp_path / "mixed.jsonl", mixed)]
    for file in files:
        merger = llama.merger(models=llama.models[:1], examples=[file], base=base)
        merger.merge(tmp_path / file.stem)
    assert_same(*(tensors_in(tmp_path / file.stem) for file in files))


# --- what is written, and made again --------------------------------------------------------------


def test_a_recipe_has_no_text_and_is_made_again_from_the_same_examples_only(
    llama: House, made: tuple[Path, Any], tmp_path: Path, refused: Refusal
) -> None:
    path, _ = made
    text = (path / "dare_recipe.toml").read_text()
    entries = [entry.get("examples") for entry in tomllib.loads(text)["recipe"]["inputs"]]
    assert entries[0] is None
    assert [(e["file"], e["count"], len(e["sha256"])) for e in entries[1:]] == [
        ("math.jsonl", COUNT, 64), ("code.jsonl", COUNT, 64)
    ]  # fmt: skip
    prompt = json.loads(llama.examples[0].read_text().splitlines()[0])["prompt"]
    assert not [name for name, data in contents(path).items() if prompt.encode() in data]
    models = ["-b", llama.base, "-m", *llama.models]
    again = ["-c", path, *models, "-q", "--engine", "plain", "-o", tmp_path / "again"]
    run(*again, "--examples", *llama.examples)
    assert contents(tmp_path / "again") == contents(path)
    run("verify", path, *models, "-q")
    refused(1, "is not the 'math.jsonl'", *again, "--examples", *llama.examples[::-1])
    refused(1, "the recipe was matched with 'math.jsonl'", *again)
    refused(1, "made without examples", "-c", llama.folder / "plain", *again[2:],
            "--examples", *llama.examples)  # fmt: skip


def test_a_configuration_names_examples_beside_it(
    llama: House, made: tuple[Path, Any], tmp_path: Path
) -> None:
    config = llama.folder / "config.toml"
    config.write_text('[examples]\nfiles = ["math.jsonl", "./code.jsonl"]')
    written = tmp_path / "written.toml"
    run("-c", config, *llama.flags, "-o", tmp_path / "out", "--write-config", written)
    run("-c", written, "-o", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(made[0])


def test_a_rule_leaves_tensors_as_the_merge_without_examples_has_them(
    llama: House, made: tuple[Path, Any], tmp_path: Path
) -> None:
    rules = [{"match": ["*mlp*", "lm_head*"], "matched": False}]
    report = llama.merger(rules=rules).merge(tmp_path / "out")
    found, plain = tensors_in(tmp_path / "out"), tensors_in(llama.folder / "plain")
    changed = [name for name in found if not same_bits(found[name], plain[name])]
    assert sorted(changed) == [name for name in sorted(plain) if "_attn." in name]
    assert {why: len(names) for why, names in report.matching.left.items()} == {
        EXCLUDED: 7,
        EMBEDDINGS: 1,
        VECTORS: 5,
    }


# --- reports and warnings -------------------------------------------------------------------------


def test_the_report_has_deviations_and_losses(made: tuple[Path, Any]) -> None:
    report = made[1]
    table = report.to_dict()["matching"]
    names = [block["name"] for block in table["blocks"]]
    assert names == ["model.layers.0", "model.layers.1", "after the blocks"]
    assert (table["examples"], table["tokens"]) == ([COUNT] * 2, [190] * 2)
    for losses in table["losses"]:
        assert losses["own"] < losses["merged"] < losses["base"]
    assert "matched 15 matrices with 40 examples (380 tokens): outputs were off" in str(report)
    assert str(report).count("loss on the answers of ") == 2
    assert report.warnings == ()


def test_few_examples_and_files_in_another_order_are_warned_about(
    llama: House, tmp_path: Path, capsys: Capture
) -> None:
    math, code = llama.examples
    run(*llama.flags, "-o", tmp_path / "out", "--examples", code, math, "--max-examples", "3")
    printed = capsys.readouterr().err
    for name in ("math", "code"):
        assert f"warning: {name}.jsonl has 3 examples: with fewer than 16" in printed
    assert "warning: other models are better at 'code.jsonl', 'math.jsonl' than those" in printed
    run(*llama.flags, "-o", tmp_path / "out2", "--examples", math, math)
    printed = capsys.readouterr().err
    assert "code: math.jsonl', the fine-tune whose examples these should be is no better" in printed
    assert "other models" not in printed


# --- what is refused ------------------------------------------------------------------------------


def rewrite_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | values))


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)].clear()


TURNS = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}
REFUSED: dict[str, tuple[int, str, Any, Any, list[str]]] = {
    "no config": (1, "its config.json is needed", remove("config.json"), [2, 3], []),
    "unknown": (1, "is a NoSuchModel, which transformers does not have",
                lambda folder: rewrite_config(folder, architectures=["NoSuchModel"]), [2, 3], []),
    "no model": (1, "is a logging, which transformers does not have",
                 lambda folder: rewrite_config(folder, architectures=["logging"]), [2, 3], []),
    "wrong config": (1, "transformers cannot make the module of",
                     lambda folder: rewrite_config(folder, hidden_size="x"), [2, 3], []),
    "other config": (1, "has no tensor for 'model.layers.2.",
                     lambda folder: rewrite_config(folder, num_hidden_layers=3), [2, 3], []),
    "no tokenizer": (1, "has a tokenizer that transformers can read",
                     remove("tokenizer*"), {"text": "w1 w2"}, []),
    "no template": (1, "is a conversation, and neither", None, TURNS, []),
    "no row": (1, "has a token that the base has no row for", None, [2, 40], []),
    "one token": (1, "has two tokens", None, [3], []),
    "part": (2, "--part divides a merge by files", None, [2, 3], ["--part", "1/2"]),
    "resume": (2, "cannot be continued", None, [2, 3], ["--resume"]),
    "a share": (2, "adapter_rank 0.9 is found", None, [2, 3], ["--adapter-rank", "0.9"]),
    "nothing to match": (1, "no matrix of the model can be matched", None, [2, 3],
                         ["--rule", "*:matched=false"]),
    "nothing to do": (2, "nothing is matched with the examples", None, [2, 3], ["--no-matched"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_matched_is_refused(
    llama: House, tmp_path: Path, refused: Refusal, kind: str
) -> None:
    status, words, change, example, flags = REFUSED[kind]
    base = shutil.copytree(llama.base, tmp_path / "base")
    if change:
        change(base)
    entry = {"input_ids": example} if isinstance(example, list) else example
    path = write_lines(tmp_path / "e.jsonl", [entry])
    refused(status, words, *llama.flags, "-b", base, "-o", tmp_path / "out",
            "--examples", path, path, *flags)  # fmt: skip


@pytest.mark.slow
def test_a_model_that_is_not_called_with_tokens_alone_is_refused(
    tmp_path: Path, refused: Refusal
) -> None:
    for name in ("base", "math"):
        family_model("t5").save_pretrained(tmp_path / name)
    path = write_lines(tmp_path / "e.jsonl", [{"input_ids": [2, 3]}])
    refused(1, "cannot be called with tokens alone", "-b", tmp_path / "base", "-m",
            tmp_path / "math", "-o", tmp_path / "out", "--examples", path)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "there is too little memory"),
        (torch.OutOfMemoryError(), "the GPU has too little memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "there is too little memory"),
    ],
)
def test_too_little_memory_is_said(
    llama: House, tmp_path: Path, refused: Refusal, monkeypatch: Patch, error: Exception, words: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Sums, "add", fail)
    refused(1, (words, "--max-tokens"), *llama.flags, "-o", tmp_path / "out",
            "--examples", *llama.examples)  # fmt: skip


def test_without_transformers_the_command_says_what_to_install(
    llama: House, tmp_path: Path, refused: Refusal, monkeypatch: Patch
) -> None:
    for name in ("matched_files", "model_files", "language"):
        monkeypatch.delitem(sys.modules, f"darelib.run.matching.{name}", raising=False)
        monkeypatch.delattr(matching, name, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(1, ("transformers is missing", "install it"), *llama.flags, "-o", tmp_path / "out",
            "--examples", *llama.examples)  # fmt: skip


def test_ctrl_c_in_the_middle_leaves_nothing_behind(
    llama: House, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    match = Walk.match

    def interrupt(self: Any, segment: Any) -> Any:
        if segment.number == 1:
            signal.raise_signal(signal.SIGINT)
        return match(self, segment)

    monkeypatch.setattr(Walk, "match", interrupt)
    run(*llama.flags, "-o", tmp_path / "out", "--examples", *llama.examples,
        status=130)  # fmt: skip
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
