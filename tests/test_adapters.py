"""A merge ends as an adapter: PEFT loads it and gives the merged model's logits, and the report
says what a rank loses."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dare
from dare import DareConfig, DareError
from darelib.arithmetic.matrix_engine import approximate
from darelib.models.directories import STATED_KEY
from darelib.plan.plan import Job
from darelib.run import products
from darelib.run.rounds import run_rounds
from tests.support import (
    F32,
    FAMILIES,
    Capture,
    Patch,
    Tensors,
    examples,
    family_model,
    finetune,
    low_rank,
    make_merger,
    random_model,
    read_json,
    run,
    run_merge,
    save_directory,
    slow,
    snapshot,
    tensors_in,
    tune,
    write_adapter,
)
from tests.test_lora import ADAPTERS

A_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMES = ("layers.0.up", "layers.0.down", "layers.1.up")
SHAPES = {f"{name}.weight": (48, 40) if "up" in name else (40, 48) for name in NAMES}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


# --- PEFT -----------------------------------------------------------------------------------------


def load(family: str, folder: Path) -> Any:
    import transformers

    return getattr(transformers, FAMILIES[family][0]).from_pretrained(folder)


def make_adapter(folder: Path, base: Path, kind: str, seed: int, **changes: Any) -> Path:
    """An adapter of a kind, trained by a random generator."""
    import peft

    family, targets, settings = ADAPTERS[kind]
    config = {"r": 3, "lora_alpha": 6, "target_modules": targets, **settings, **changes}
    adapted = peft.get_peft_model(load(family, base), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            is_bias = name.endswith("bias") and settings.get("bias") == "all"
            if "lora_" in name or "modules_to_save" in name or is_bias:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    adapted.save_pretrained(folder)
    return folder


def find_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        tokens = torch.arange(24).reshape(2, 12)
        more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        return torch.as_tensor(model.eval()(input_ids=tokens, **more).logits)


def find_adapted(family: str, base: Path, adapter: Path) -> torch.Tensor:
    import peft

    return find_logits(peft.PeftModel.from_pretrained(load(family, base), adapter))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["linear", "wudi"])
@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if "dora" not in kind])
@pytest.mark.slow  # importing PEFT takes longer than most of the suite
def test_adapters_merge_into_one_that_peft_loads_as_the_merged_model(
    tmp_path: Path, kind: str, method: str
) -> None:
    family, _, settings = ADAPTERS[kind]
    base = tmp_path / "base"
    family_model(family).save_pretrained(base)
    other = {} if "rank_pattern" in settings else {"r": 2}
    adapters = [
        make_adapter(tmp_path / "one", base, kind, 1),
        make_adapter(tmp_path / "two", base, kind, 2, **other),
    ]
    how: dict[str, Any] = {"drop_rate": 0.0, "method": method, "weights": [0.7, 0.6]}
    run_merge(base, adapters, tmp_path / "merged", **how)
    run_merge(base, adapters, tmp_path / "adapter", adapter_rank="full", **how)
    before, wanted = (find_logits(load(family, folder)) for folder in (base, tmp_path / "merged"))
    found = find_adapted(family, base, tmp_path / "adapter")
    change = float((before - wanted).abs().max())
    assert change > 1e-2
    assert float((found - wanted).abs().max()) < 2e-5 * max(1.0, change)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen", "gpt2", "gpt2 bare", "gpt2 untied", "moe", "classifier", "neox", "t5"],
)
@pytest.mark.slow
def test_a_finetune_is_extracted_whole_at_a_large_rank(tmp_path: Path, family: str) -> None:
    """Also what no low rank holds: norms, biases, embeddings and heads that are tied to them."""
    family, _, is_bare = family.partition(" bare")
    model = family_model(family)
    model.save_pretrained(tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.02
    model.save_pretrained(tmp_path / "tuned")
    for name in ("base", "tuned") if is_bare else ():
        whole = tensors_in(tmp_path / name)
        bare = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
        save_directory(tmp_path / name, bare)
    run("extract", "--base", tmp_path / "base", "--merge", tmp_path / "tuned", "--adapter-rank",
        "64", "--output", tmp_path / "adapter", "-q")  # fmt: skip
    wanted = find_logits(model)
    found = find_adapted(family, tmp_path / "base", tmp_path / "adapter")
    assert float((found - wanted).abs().max()) < 2e-5


# --- what is written ------------------------------------------------------------------------------


def make_base(folder: Path, dtype: torch.dtype = F32) -> tuple[Path, Tensors]:
    tensors = random_model(0, dtype, {**SHAPES, "layers.0.norm.weight": (40,)})
    return save_directory(folder / "base", tensors, **CONFIG), tensors


def make_lora(folder: Path, rank: int, seed: int, names: tuple[str, ...] = NAMES) -> Path:
    pairs: Tensors = {}
    for k, name in enumerate(names):
        pairs |= low_rank(name, SHAPES[f"{name}.weight"], rank, seed + k)
    return write_adapter(folder, pairs, r=rank, lora_alpha=2 * rank)


def make_inputs(folder: Path) -> tuple[Path, list[Path], list[Tensors]]:
    """A base, two adapters of other ranks and targets, a fine-tune; and the adapters' changes."""
    base, tensors = make_base(folder)
    adapters = [
        make_lora(folder / "a", 3, 1),
        make_lora(folder / "b", 2, 20, ("layers.0.up", "layers.1.up")),
    ]
    tuned = save_directory(folder / "t", finetune(tensors, 3, 0.01), **CONFIG)
    return base, [*adapters, tuned], [change_of(adapter) for adapter in adapters]


def change_of(adapter: Path) -> Tensors:
    """What an adapter adds to each tensor, in float64."""
    config = read_json(adapter / "adapter_config.json")
    scale = config["lora_alpha"] / config["r"]  # the same of all modules, here
    parts = tensors_in(adapter)
    changes = {}
    for name, left in parts.items():
        if name.endswith("lora_B.weight"):
            right = parts[name.replace("lora_B", "lora_A")]
            module = name.removeprefix(PREFIX).removesuffix(".lora_B.weight")
            changes[f"{module}.weight"] = scale * (left.double() @ right.double())
    return changes


def near(one: torch.Tensor, other: torch.Tensor, share: float = 1e-6) -> bool:
    return float((one - other).norm()) <= share * float(other.norm())


def test_full_is_the_weighted_sum_of_adapters_of_any_ranks_and_targets(tmp_path: Path) -> None:
    base, [one, other, _], changes = make_inputs(tmp_path)
    how = {"drop_rate": 0.0, "weights": [0.5, 2.0], "lambda_coeff": 0.7, "adapter_rank": "full"}
    report = run_merge(base, [one, other], tmp_path / "out", **how)
    made = change_of(tmp_path / "out")
    for name in SHAPES:
        parts = [w * c[name] for w, c in zip((0.5, 2.0), changes, strict=True) if name in c]
        assert near(made[name], 0.7 * sum(parts, torch.zeros(())))
    config = read_json(tmp_path / "out" / "adapter_config.json")
    assert config["r"] == 5
    assert config["rank_pattern"] == {}
    assert config["base_model_name_or_path"] == "base"
    assert str(tmp_path) not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "out").iterdir()
    )
    assert report.adapter.kept == 1
    assert report.adapter.largest_error == 0


@pytest.mark.parametrize("method", ["linear", "ties", "ram", "wudi", "slerp"])
@pytest.mark.parametrize("dropped", [0.0, slow(0.5)])
def test_each_method_gives_the_best_product_of_its_merged_change(
    tmp_path: Path, method: str, dropped: float
) -> None:
    """Of adapters, fine-tunes and packed models, in any mixture."""
    base, [one, _, tuned], _ = make_inputs(tmp_path)
    run("pack", "--base", base, "--merge", tuned, "--drop-rate", "0.5", "--seed", "43",
        "--output", tmp_path / "p.safetensors", "-q", "--engine", "plain")  # fmt: skip
    for models in ([one, tuned], [one, tmp_path / "p.safetensors"]):
        rate = 0.5 if "p.safe" in str(models[1]) else dropped
        how: dict[str, Any] = {"drop_rate": rate, "method": method, "engine": "plain"}
        make_merger(base, models, **how).merge(tmp_path / "merged", force=True)
        merger = make_merger(base, models, adapter_rank=6, **how)
        report = merger.merge(tmp_path / "out", force=True)
        whole, start, made = (
            tensors_in(tmp_path / "merged"),
            tensors_in(base),
            change_of(tmp_path / "out"),
        )
        for name in SHAPES:
            wanted = (whole[name] - start[name]).double()
            u, s, v = torch.linalg.svd(wanted)
            best = u[:, :6] * s[:6] @ v[:6]
            assert near(made[name], best, 2e-4), name
            kept = float((s[:6] ** 2).sum() / (s**2).sum())
            assert report.adapter.tensors[name] == pytest.approx(kept, rel=1e-4)
        norm = tensors_in(tmp_path / "out")[f"{PREFIX}layers.0.norm.weight"]
        assert torch.equal(norm, whole["layers.0.norm.weight"])


def run_backwards(rounds: Iterable[Iterator[Job]], *rest: Any) -> None:
    run_rounds((reversed(list(jobs)) for jobs in rounds), *rest)


def test_a_share_of_the_energy_gives_each_matrix_the_rank_that_it_needs(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """In whichever order models are given, and matrices looked at."""
    base, [one, other, tuned], _ = make_inputs(tmp_path)
    for k, models in enumerate(([one, other], [one, tuned])):
        how: dict[str, Any] = {"drop_rate": 0.0}
        run_merge(base, models, tmp_path / f"m{k}", **how)
        report = run_merge(base, models, tmp_path / f"o{k}", adapter_rank=0.8, **how)
        whole, start = tensors_in(tmp_path / f"m{k}"), tensors_in(base)
        for name in SHAPES:
            squares = torch.linalg.svdvals((whole[name] - start[name]).double()) ** 2
            wanted = int((squares.cumsum(0) < 0.8 * squares.sum()).sum()) + 1
            made = tensors_in(tmp_path / f"o{k}")[f"{PREFIX}{name[:-7]}.lora_A.weight"]
            assert len(made) == wanted
        assert min(report.adapter.tensors.values()) >= 0.8 - 1e-6
        assert make_merger(base, models, adapter_rank=0.8, **how).verify(tmp_path / f"o{k}")
        with monkeypatch.context() as patch:
            patch.setattr(products, "run_rounds", run_backwards)
            run_merge(base, models[::-1], tmp_path / f"b{k}", adapter_rank=0.8, **how)
        one, other = (tmp_path / f"{name}{k}" / "adapter_config.json" for name in "ob")
        assert one.read_bytes() == other.read_bytes()


def test_what_did_not_change_is_not_in_it_and_what_is_no_matrix_may_be_left_out(
    tmp_path: Path, capsys: Capture
) -> None:
    base, tensors = make_base(tmp_path)
    tuned = dict(tensors)
    tuned["layers.0.up.weight"] = tensors["layers.0.up.weight"] + 0.01
    tuned["layers.0.norm.weight"] = tensors["layers.0.norm.weight"] + 0.01
    model = save_directory(tmp_path / "t", tuned, **CONFIG)
    words = ["extract", "--base", base, "--merge", model, "--adapter-rank", "4"]
    for name, rest, said in (
        ("saved", "save", "is saved whole"),
        ("left", "leave-out", "is left out"),
    ):
        run(*words, "--output", tmp_path / name, "--adapter-rest", rest)
        out, err = capsys.readouterr()
        assert f"1 tensor that no low rank can hold {said}: 'layers.0.norm" in err
        assert re.match(rf"rank 4 keeps .*\nextracted what .* changed into .*{name}: \d tens", out)
        assert not re.search("merged|dropped|seed", out)
    factors = {f"{PREFIX}layers.0.up.lora_{part}.weight" for part in "AB"}
    assert tensors_in(tmp_path / "left").keys() == factors
    assert tensors_in(tmp_path / "saved").keys() == {*factors, f"{PREFIX}layers.0.norm.weight"}
    configs = [read_json(tmp_path / name / "adapter_config.json") for name in ("saved", "left")]
    assert [config["modules_to_save"] for config in configs] == [["layers.0.norm"], None]
    assert configs[0]["target_modules"] == ["layers.0.up"]
    assert configs[0]["task_type"] == "CAUSAL_LM"
    run(*words[:3], "--merge", save_directory(tmp_path / "u", finetune(tensors, 3), **CONFIG),
        "--adapter-rank", "4", "--match", "*up*", "--output", tmp_path / "matched")  # fmt: skip
    assert read_json(tmp_path / "matched" / "adapter_config.json")["target_modules"] == ["up"]
    assert len(tensors_in(tmp_path / "matched")) == 4


@pytest.mark.parametrize("kind", ["mamba", "other"])
def test_what_peft_has_no_factors_for_is_saved_whole(tmp_path: Path, kind: str) -> None:
    shapes = {"a.conv.weight": (8, 1, 4), "a.out_proj.weight": (8, 8), "a.in_proj.weight": (8, 8)}
    tensors = random_model(0, F32, shapes)
    base, tuned = (
        save_directory(tmp_path / name, each, model_type=kind)
        for name, each in (("base", tensors), ("t", finetune(tensors, 1)))
    )
    run_merge(base, [tuned], tmp_path / "out", drop_rate=0.0, adapter_rank=2)
    config = read_json(tmp_path / "out" / "adapter_config.json")
    saved = ["a.conv", "a.out_proj"] if kind == "mamba" else ["a.conv"]
    assert config["modules_to_save"] == saved
    assert len(config["target_modules"]) == 3 - len(saved)


def test_a_head_may_be_the_embedding_where_nothing_says_what_the_base_is(tmp_path: Path) -> None:
    tensors = random_model(0, F32, {**SHAPES, "model.embed_tokens.weight": (9, 8)})
    base, tuned = (
        save_directory(tmp_path / name, each)
        for name, each in (("base", tensors), ("t", finetune(tensors, 1)))
    )
    run_merge(base, [tuned], tmp_path / "out", drop_rate=0.0, adapter_rank=2)
    made = tensors_in(tmp_path / "out")
    head, table = (made[f"{PREFIX}{name}.weight"] for name in ("lm_head", "model.embed_tokens"))
    assert torch.equal(head, table)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["models/base"] * 2, "models/base"),
        (["./models/base/"] * 2, "./models/base/"),
        (["org/base"] * 2, "org/base"),  # on the Hub
        (["org/base", "/elsewhere/base"], "org/base"),
        (["org/base", None], "org/base"),
        (["org/base", "models/base"], "org/base"),
        (["models/base", "./models/base"], "base"),
        (["org/other"] * 2, "base"),
        (["/elsewhere/base"] * 2, "base"),
        (["C:\\models\\base"] * 2, "base"),
        (["\\\\server\\base"] * 2, "base"),
    ],
    ids=str,
)
def test_an_adapter_names_the_base_as_its_inputs_do_unless_that_is_an_absolute_path(
    tmp_path: Path, monkeypatch: Patch, names: list[str | None], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path / "models")
    for k, stated in enumerate(names):
        path = make_lora(tmp_path / f"a{k}", 3, k) / "adapter_config.json"
        path.write_text(json.dumps(read_json(path) | {STATED_KEY: stated}))
    run("-q", "-b", "models/base", "-m", "a0", "a1", "-o", "both", "--adapter-rank=full",
        "--drop-rate=0")  # fmt: skip
    assert read_json(Path("both/adapter_config.json"))[STATED_KEY] == name
    if name == "models/base":
        run("-q", "-m", "both", "-o", "again", "--drop-rate=0")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_peft_finds_the_base_of_an_adapter_that_was_merged(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    import peft

    monkeypatch.chdir(tmp_path)
    family_model("llama").save_pretrained("models/base")
    for k in range(2):
        make_adapter(Path(f"a{k}"), Path("models/base"), "plain", k)
    run("-q", "-m", "a0", "a1", "-o", "both", "--adapter-rank=full", "--drop-rate=0")
    run("-q", "-m", "a0", "a1", "-o", "merged", "--drop-rate=0")
    found = find_logits(peft.AutoPeftModelForCausalLM.from_pretrained("both"))
    wanted = find_logits(load("llama", Path("merged")))
    assert float((found - wanted).abs().max()) < 2e-5


def test_a_base_in_the_cache_of_the_hub_is_called_by_its_name_there(tmp_path: Path) -> None:
    _, tensors = make_base(tmp_path)
    base = save_directory(tmp_path / "models--org--nice" / "snapshots" / "0f", tensors, **CONFIG)
    tuned = save_directory(tmp_path / "t", finetune(tensors, 1), **CONFIG)
    run_merge(base, [tuned], tmp_path / "out", drop_rate=0.0, adapter_rank=2)
    config = read_json(tmp_path / "out" / "adapter_config.json")
    assert config["base_model_name_or_path"] == "org/nice"


@pytest.mark.parametrize("rest", ["save", "leave-out"])
def test_an_adapter_without_a_matrix_is_refused(tmp_path: Path, capsys: Capture, rest: str) -> None:
    base, tensors = make_base(tmp_path)
    norm = {"layers.0.norm.weight": tensors["layers.0.norm.weight"] + 1}
    tuned = save_directory(tmp_path / "t", tensors | norm, **CONFIG)
    run("extract", "--base", base, "--merge", tuned, "--adapter-rank", "2", "--output",
        tmp_path / "out", "--adapter-rest", rest, status=1)  # fmt: skip
    assert "layers.0.norm.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--adapter-rank", "0"], "adapter-rank"),
        (["--adapter-rank", "2.5"], "adapter-rank"),
        (["--adapter-rank", "ful"], "full"),
        (["--adapter-rank", "4", "--output", "x.safetensors"], "directory"),
        (["--adapter-rank", "4", "--tokenizer", "union"], "tokenizer"),
        (["--adapter-rank", "4", "--part", "1/2"], "single file"),
        (["--adapter-rest", "save"], "adapter_rank"),
        (["--adapter-rank", "4", "--rule", "*:lambda_coeff=0"], "nothing"),
    ],
)
def test_what_cannot_be_an_adapter_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch, words: list[str], named: str
) -> None:
    base, [_, _, tuned], _ = make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    given = ["--base", base, "--merge", tuned, "--drop-rate", "0", "--output", "out", *words]
    assert dare.main([str(word) for word in given]) in (1, 2)
    assert named in capsys.readouterr().err
    assert snapshot(tmp_path) == before


SETTINGS = "entries are dropped, the method is neither linear nor wudi, the origin is zero"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--merge", "b", "dora"], "'dora' is DoRA"),
        (["--merge", "b", "whole"], "'whole' saves that module whole"),
        (["--merge", "b", "t"], "'t' is a model, not an adapter"),
        (["--drop-rate", "0.5"], SETTINGS),
        (["--method", "ties"], SETTINGS),
    ],
)
def test_full_names_the_adapter_that_has_no_rank_and_says_why(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch, words: list[str], reason: str
) -> None:
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    up = f"{PREFIX}layers.0.up"
    lengths = {f"{up}.lora_magnitude_vector": torch.ones(48)}
    write_adapter(Path("dora"), low_rank("layers.0.up", (48, 40)) | lengths, use_dora=True)
    write_adapter(Path("whole"), {f"{up}.weight": torch.ones(48, 40)})
    run("-q", "--base", "base", "--merge", "b", "--drop-rate", "0", "--output", "out",
        "--adapter-rank", "full", *words, status=1)  # fmt: skip
    assert f".weight' is no product of the adapters' matrices: {reason}" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("missing", ["--merge", "--adapter-rank", "--output"])
def test_what_extract_needs_is_named(capsys: Capture, missing: str) -> None:
    given = {"--base": "b", "--merge": "m", "--adapter-rank": "4", "--output": "o"}
    words = [word for pair in given.items() if pair[0] != missing for word in pair]
    assert dare.main(["extract", *words]) == 2
    assert missing in capsys.readouterr().err


def test_tensors_in_memory_have_no_adapter() -> None:
    state = {"w": torch.ones(2, 2)}
    with pytest.raises(DareError, match="adapter_rank"):
        dare.dare_merge(state, [state], DareConfig(adapter_rank=2))


def test_it_is_resumed_verified_and_merged_again(tmp_path: Path, monkeypatch: Patch) -> None:
    base, models, _ = make_inputs(tmp_path)
    how: dict[str, Any] = {"drop_rate": 0.0, "adapter_rank": 4, "threads": 1}
    report = run_merge(base, models, tmp_path / "whole", **how)
    made = products.Products.factorise
    calls: list[str] = []

    def stop_at_the_second(self: Any, tensor: Any, *rest: Any) -> Any:
        calls.append(tensor.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(self, tensor, *rest)

    tune(journal_seconds=0.0, flush_seconds=0.0)
    monkeypatch.setattr(products.Products, "factorise", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        make_merger(base, models, **how).merge(tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()
    again = make_merger(base, models, **how).merge(tmp_path / "out", resume=True)
    assert (tmp_path / "out" / A_FILE).read_bytes() == (tmp_path / "whole" / A_FILE).read_bytes()
    assert again.adapter == report.adapter
    run("verify", tmp_path / "out", "--base", base, "--merge", *models)
    stored = bytearray((tmp_path / "out" / A_FILE).read_bytes())
    stored[-2000:] = bytes(2000)
    (tmp_path / "out" / A_FILE).write_bytes(stored)
    run("verify", tmp_path / "out", "--base", base, "--merge", *models, status=1)
    merged = run_merge(base, [tmp_path / "whole"], tmp_path / "baked.safetensors", drop_rate=0.0)
    assert merged.models[0].parameters


def test_factors_that_another_machine_made_are_verified(tmp_path: Path) -> None:
    """Its libraries round otherwise: here, by changes in the last places."""
    base, models, _ = make_inputs(tmp_path)
    how: dict[str, Any] = {"drop_rate": 0.0, "adapter_rank": 4}
    run_merge(base, models[:2], tmp_path / "out", **how)
    path = tmp_path / "out" / A_FILE
    stored = np.frombuffer(path.read_bytes(), np.uint8).copy()
    stored[-2000::4] ^= 1
    path.write_bytes(stored.tobytes())
    assert make_merger(base, models[:2], **how).verify(tmp_path / "out").differing == 500


@pytest.mark.parametrize("rank", [4, "full", 0.9])
@pytest.mark.parametrize("method", ["linear", "wudi"])
def test_factors_are_the_same_whichever_signs_a_library_gives(
    tmp_path: Path, monkeypatch: Patch, method: str, rank: float | str
) -> None:
    base, [one, other, tuned], _ = make_inputs(tmp_path)
    models = [one, other] if rank == "full" else [one, tuned]
    how: dict[str, Any] = {"drop_rate": 0.0, "adapter_rank": rank, "method": method}
    run_merge(base, models, tmp_path / "out", **how)
    eigh = np.linalg.eigh

    def negate(matrix: Any) -> Any:
        values, vectors = eigh(matrix)
        return values, -vectors

    monkeypatch.setattr(np.linalg, "eigh", negate)
    assert make_merger(base, models, **how).verify(tmp_path / "out")


@pytest.mark.parametrize("norm_changed", [True, False])
def test_statistics_that_changed_are_held_with_their_module_or_named(
    tmp_path: Path, capsys: Capture, norm_changed: bool
) -> None:
    base = random_model(0, F32, {"up.weight": (8, 6), "bn.weight": (8,), "bn.running_mean": (8,)})
    tuned = finetune(base, 1) | ({} if norm_changed else {"bn.weight": base["bn.weight"]})
    folders = [save_directory(tmp_path / "base", base), save_directory(tmp_path / "t", tuned)]
    run("extract", "--base", folders[0], "--merge", folders[1], "--adapter-rank", "2",
        "--output", tmp_path / "out")  # fmt: skip
    made = tensors_in(tmp_path / "out")
    assert (f"{PREFIX}bn.running_mean" in made) == norm_changed
    assert ("left out: 'bn.running_mean'" in capsys.readouterr().err) == (not norm_changed)


@pytest.mark.parametrize("rank", [4, 0.8])
def test_a_dry_run_says_what_a_rank_keeps(tmp_path: Path, rank: float) -> None:
    base, models, _ = make_inputs(tmp_path)
    merger = make_merger(base, models, drop_rate=0.0, adapter_rank=rank)
    plan = merger.plan(tmp_path / "out", estimate=True)
    assert plan.adapter.tensors
    assert str(plan.adapter) in str(plan)
    report = merger.merge(tmp_path / "out")
    assert plan.adapter.ranks == report.adapter.ranks
    for name, kept in plan.adapter.tensors.items():
        assert report.adapter.tensors[name] == pytest.approx(kept)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert "base_model_relation: adapter" in card


# --- products of a rank ---------------------------------------------------------------------------


@examples(9)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 90),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.integers(0, 99),
)
def test_any_matrix_has_a_product_whose_energy_is_within_two_percent_of_the_best(
    rows: int, columns: int, rank: int, decay: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    shorter = min(rows, columns)
    left, right = (generator.normal(size=(side, shorter)) for side in (rows, columns))
    sizes = np.arange(1, shorter + 1) ** -decay
    matrix = ((left * sizes) @ right.T).astype(np.float32)
    product = approximate(matrix.copy(), rank)
    squares = np.linalg.svd(matrix.astype(np.float64), compute_uv=False) ** 2
    total = squares.sum()
    best = squares[:rank].sum()
    lost = float(np.linalg.norm(matrix - product.left @ product.right) ** 2)
    assert product.left.shape[1] <= rank
    assert product.kept <= product.total * (1 + 1e-6)
    assert lost - (total - best) <= 0.02 * total
    assert product.kept == pytest.approx(total - lost, abs=1e-4 * total)
