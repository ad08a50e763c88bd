"""Packed models merge bit for bit like the fine-tunes they are made of, and nothing else is
accepted as one."""

import contextlib
import io
import json
import os
import struct
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.scene import contents, make_many_jobs, stop_after
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    METHODS,
    Capture,
    Models,
    Pair,
    Patch,
    Refusal,
    assert_same,
    examples,
    finetune,
    low_rank,
    make_merger,
    make_models,
    merge_paths,
    random_model,
    run,
    run_merge,
    save,
    save_directories,
    save_directory,
    save_models,
    tune,
    write_adapter,
)
from tests.test_tokenizer import write_model

PLAIN = ("--engine", "plain")
pytestmark = pytest.mark.usefixtures("small_blocks")
TYPES = st.sampled_from([BF16, F16, F32, F64])
TIED: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (50, 8), "lm_head.weight": (50, 8)}


def pack(base: Path, model: Path, output: Path, *flags: Any) -> Path:
    words = ["pack", "-b", base, "-m", model, "-o", output, *PLAIN, "--force", *flags]
    with contextlib.redirect_stdout(io.StringIO()):
        run(*words)
    return output


def pack_all(paths: list[Path], rate: float, seed: int = 42, *flags: Any) -> list[Path]:
    """Every model with the seed that it has at its place in the list."""
    base, *models = paths
    return [
        pack(
            base,
            model,
            base.parent / f"packed{i}.safetensors",
            "--drop-rate",
            rate,
            "--seed",
            seed + i,
            *flags,
        )
        for i, model in enumerate(models)
    ]


def table_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    table: dict[str, Any] = json.loads(header["__metadata__"]["dare_packed"])
    return table


def compare(paths: list[Path], packed: list[Path], **config: Any) -> None:
    """Merges of packed models and of the originals must give the same tensors, bit for bit."""
    out = paths[0].parent / "out.safetensors"
    config = {"drop_rate": 0.9} | config
    usual = run_merge(paths[0], paths[1:], out, **config)
    expected = load_file(out)
    report = run_merge(paths[0], packed, out, **config)
    assert_same(load_file(out), expected)
    extra = [[model.extra_tensors for model in each.models] for each in (report, usual)]
    assert extra[0] == extra[1]


# --- a merge of packed models is a merge of the models --------------------------------------------


@pytest.mark.parametrize("engine", [pytest.param("numba", marks=pytest.mark.slow), "plain"])
@pytest.mark.parametrize("config", METHODS, ids=lambda config: "-".join(map(str, config.values())))
@pytest.mark.parametrize(
    "dtype",
    [BF16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (F16, F32, F64))],
    ids=str,
)
def test_every_method_gives_the_bits_of_the_originals(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype, engine: str
) -> None:
    shapes = {"layer.weight": (97, 131), "bias": (131,), "scalar": (), "none": (0, 4)}
    paths = save_models(tmp_path, make_models(2, dtype, shapes))
    packed = pack_all(paths, 0.5, 42, "--engine", engine)
    for elements, threads in ((8192, 1), (2048, 3)):
        tune(job_elements=elements)
        compare(paths, packed, engine=engine, threads=threads, **config)
        compare(
            paths, [packed[0], paths[2]], engine=engine, threads=threads, **config
        )  # one of them packed


@examples(14)
@given(data=st.data())
def test_any_types_shapes_rates_seeds_and_methods_give_the_bits_of_the_originals(
    tmp_path: Path, data: Any
) -> None:
    shapes = {
        f"t{k}": data.draw(st.sampled_from([(), (1,), (0,), (4095,), (4096,), (3, 1367), (9001,)]))
        for k in "ab"
    }
    base = random_model(0, data.draw(TYPES, "base"), shapes)
    tunes = [
        {n: t.to(data.draw(TYPES)) for n, t in finetune(base, k, 0.01).items()} for k in (1, 2)
    ]
    paths = save(tmp_path, base=base, math=tunes[0], code=tunes[1])
    low, high = sorted(data.draw(st.tuples(*[st.floats(0, 0.9999)] * 2), "rates"))
    seed = data.draw(st.integers(0, 2**63 - 3))
    rule = data.draw(st.floats(0, 0.99), "rule")
    packed = pack_all(paths, low, seed, "--rule", f"tb:drop_rate={rule!r}")
    method = data.draw(st.sampled_from(METHODS)) | {
        "drop_rate": high,
        "seed": seed,
        "engine": "plain",
    }
    compare(paths, packed, rules=[{"match": "tb", "drop_rate": rule}], **method)


def test_its_seed_is_its_own_at_any_place_and_one_seed_for_two_is_a_warning(
    models: list[Path],
) -> None:
    packed = pack_all(models, 0.5)
    out = models[0].with_name("out.safetensors")
    made = []
    for order, seeds in ((packed, [42, 43]), (packed[::-1], [43, 42])):
        report = run_merge(models[0], order, out, seed=7, engine="plain")
        made.append(load_file(out))
        assert [model.seed for model in report.models] == seeds
        assert not any("seed" in warning for warning in report.warnings)
    assert_same(*made)  # since a + b is b + a
    other = pack(models[0], models[2], packed[1].with_name("same.safetensors"), "--drop-rate", 0.5)
    report = run_merge(models[0], [packed[0], other], out, engine="plain")
    assert any("have one seed, 42" in warning for warning in report.warnings)


@pytest.mark.parametrize("method", ["linear", "wudi"])
def test_a_packed_model_brings_its_own_drop_rates(models: list[Path], method: str) -> None:
    rule = {"match": "*bias", "drop_rate": 0.1}
    packed = pack_all(models, 0.5, 42, "--rule", "*bias:drop_rate=0.1")
    out = models[0].with_name("out.safetensors")
    run_merge(models[0], models[1:], out, method=method, drop_rate=0.5, rules=[rule])
    expected = load_file(out)
    for config in ({}, {"drop_rate": 0.0}, {"drop_rate": 0.05}):
        run_merge(models[0], packed, out, method=method, **config)
        assert_same(load_file(out), expected)
        run("verify", out, "-q", "--base", models[0], "--merge", *packed)
    default = {"linear": 0.9, "wudi": 0.0}[method]
    own = {"drop_rate": [0.5, default], "rules": [{"match": "*bias", "drop_rate": [0.1, default]}]}
    run_merge(*models[:1], models[1:], out, method=method, **own)
    expected = load_file(out)
    run_merge(models[0], [packed[0], models[2]], out, method=method)
    assert_same(load_file(out), expected)


def test_what_is_not_merged_is_whole(tmp_path: Path) -> None:
    """Integers, and other shapes; what the base lacks too, so that it is reported as of the
    original."""
    base = random_model(0, BF16, {"embed.weight": (40, 60), "w": (70, 90)})
    base["ids"] = torch.arange(9)
    tuned = finetune(base, 1, 0.01) | {"ids": torch.arange(9) + 1}
    tuned |= random_model(5, BF16, {"embed.weight": (43, 60), "more": (3,)})
    paths = save(tmp_path, base=base, math=tuned)
    packed = pack_all(paths, 0.5, 42, "--mismatch", "overlap")
    found = load_file(packed[0])
    assert all(torch.equal(found[name], tuned[name]) for name in ("embed.weight", "ids", "more"))
    assert len(found["w"]) < 0.6 * 6300
    compare(paths, packed, mismatch="overlap", engine="plain")


@pytest.mark.parametrize("stored", [True, False])
def test_tied_heads_stay_tied(tmp_path: Path, stored: bool) -> None:
    embedding = "model.embed_tokens.weight"
    made = make_models(1, BF16, {embedding: (64, 100), "w": (9,)})
    for tensors in made if stored else made[:1]:
        tensors["lm_head.weight"] = tensors[embedding].clone()
    paths = save_directories(tmp_path, made, model_type="llama", tie_word_embeddings=True)
    packed = pack(*paths, tmp_path / "packed")
    compare(paths, [packed], engine="plain")
    merged = load_file(tmp_path / "out.safetensors")
    assert torch.equal(merged["lm_head.weight"], merged[embedding])
    entry = table_of(packed / "packed.safetensors")["tensors"].get("lm_head.weight", {})
    assert entry.get("mask_name") == (embedding if stored else None)


# --- everything else that takes a model -----------------------------------------------------------


def test_a_packed_directory_has_all_but_the_weights_and_merges_like_the_model(
    pair: Pair, tmp_path: Path
) -> None:
    texts = {"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}", "notes.txt": "mine"}
    for folder in pair:
        for name, text in texts.items():
            (folder / name).write_text(text)
    base, math = pair
    packed = pack(base, math, tmp_path / "packed", "--rule", "*bias:drop_rate=0")
    files = contents(packed)
    assert files.keys() == {"README.md", "dare_recipe.toml", "packed.safetensors", *texts}
    assert {name: files[name].decode() for name in texts} == texts
    assert not any(str(tmp_path).encode() in content for content in files.values())
    rules = [{"match": "*bias", "drop_rate": 0}]
    made = [merge_paths(base, [m], tmp_path / "out", rules=rules) for m in (math, packed)]
    assert_same(*made)
    pack(base, math, packed, "--rule", "*bias:drop_rate=0")  # which may replace what it made
    assert contents(packed) == files


def test_dry_run_verify_and_resume_take_packed_models(
    models: Models, capsys: Capture, monkeypatch: Patch
) -> None:
    make_many_jobs()
    packed = pack_all(models, 0.9, 7)
    monkeypatch.chdir(models[0].parent)
    out = Path("out.safetensors")
    words = ["-b", models[0], "-m", *packed, "-o", out, *PLAIN, "--threads", "1"]
    run(*words, "--dry-run")
    assert "packed at drop rate 0.9, seed 7" in capsys.readouterr().out
    with Patch.context() as patch:
        stop_after(patch, 4)
        run(*words, "--resume", status=130)
    run(*words, "--resume")
    run("verify", out)


def test_figures_of_samples_stay_in_bounds(models: Models, tmp_path: Path, capsys: Capture) -> None:
    """One model, packed twice: that all is the same in both is found in a few entries."""
    one, *others = [pack(*models[:2], tmp_path / str(seed), "--seed", seed) for seed in range(6)]
    for other in others:
        run("analyze", "-b", models[0], "-m", one, other, "--json", *PLAIN)
        (pair,) = json.loads(capsys.readouterr().out)["pairs"]
        assert pair["cosine"] <= 1
        assert pair["share_both"] <= 1


def test_what_an_analysis_suggests_for_packed_models_merges(
    models: list[Path], tmp_path: Path
) -> None:
    packed = pack_all(models, 0.95, 42, "--rule", "*norm*:drop_rate=0.1")
    mixed = [packed[0], models[2]]
    for merged, wanted, flags in (
        (packed[:1], {"method": "linear", "drop_rate": 0.95}, ()),
        (mixed, {"method": "wudi", "drop_rate": [0.95, 0.0], "lambda_coeff": 0.6}, ()),
        (
            mixed,
            {"method": "wudi", "drop_rate": [0.95, 0.0], "lambda_coeff": 0.8},
            ("--method", "wudi", "--lambda", 0.8),
        ),
    ):
        run(
            "analyze",
            "-b",
            models[0],
            "-m",
            *merged,
            "--write-config",
            tmp_path / "a.toml",
            "--force",
            "-q",
            *PLAIN,
            "--drop-rate",
            0.95,
            *flags,
        )
        suggested = tomllib.loads((tmp_path / "a.toml").read_text())["dare"]
        assert suggested == wanted
        run("--config", tmp_path / "a.toml", *PLAIN, "-q", "--force")


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_advice_on_a_packed_model_can_be_followed(
    models: list[Path], tmp_path: Path, rate: float
) -> None:
    """What was packed thin cannot be kept whole; what was packed whole is."""
    rules = [f"--rule={name}:drop_rate={rate}" for name in ("*bias", "scalar")]
    packed = pack_all(models[:2], 0.9, 42, *rules)
    analysis = make_merger(models[0], packed, engine="plain").analyze()
    suggested = tomllib.loads(analysis.suggestion)
    found = suggested.get("rules", [])
    assert [rule["drop_rate"] for rule in found] == ([] if rate else [0.0])
    run_merge(models[0], packed, tmp_path / "out.safetensors", rules=found, **suggested["dare"])


def check_near(estimate: Any, exact: Any, *fields: str, **near: float) -> None:
    """Figures of a sample must be near those of the whole."""
    for field in fields:
        assert getattr(estimate, field) == pytest.approx(getattr(exact, field), **near), field


def test_analyze_and_warnings_take_the_entries_for_a_sample(tmp_path: Path) -> None:
    base = random_model(0, F32, {"a.weight": (200, 300), "b.weight": (150, 200)})
    first = finetune(base, 1, 0.004)
    first["b.weight"] += 0.01  # of tensors that are known in part, each counts by its size
    second = {name: 0.5 * (first[name] + t) for name, t in finetune(base, 2, 0.004).items()}
    paths = save(tmp_path, base=base, math=first, code=second)
    packed = pack_all(paths, 0.5, 42, "--rule", "b*:drop_rate=0.1")
    mergers = [
        make_merger(paths[0], models, engine="plain", drop_rate=0.9)
        for models in (paths[1:], packed)
    ]
    whole, sample = (merger.analyze() for merger in mergers)
    merged, sampled = (
        merger.merge(tmp_path / f"out{k}.safetensors") for k, merger in enumerate(mergers)
    )
    assert sum("a random sample" in warning for warning in sample.warnings) == 2
    for exact, other in zip(whole.models, sample.models, strict=True):
        figures = ("parameters", "mean", "standard_deviation", "relative_norm", "relative_noise")
        for stats, estimate in zip(exact.tensors, other.tensors, strict=True):
            check_near(estimate, stats, *figures, rel=0.04)
        check_near(other.total, exact.total, *figures, rel=0.04)
        assert not other.energy, "what was dropped hides the rank"
    conflicts = ("cosine", "share_both", "sign_conflict", "weighted_sign_conflict")
    check_near(sample.pairs[0], whole.pairs[0], *conflicts, abs=0.02)
    for exact, other in zip(merged.models, sampled.models, strict=True):
        check_near(other, exact, "mean_delta", "dropped_share", rel=0.02)
        check_near(other, exact, "share_above_threshold", rel=0.05)


# --- what cannot be packed, or merged -------------------------------------------------------------


def test_what_is_small_already_and_other_bases_are_refused(
    models: Models, tmp_path: Path, refused: Refusal, check_refused: Refusal
) -> None:
    packed = pack(*models[:2], tmp_path / "packed.safetensors")
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    (tmp_path / "all.toml").write_text('[dare]\ndrop = "magnitude"')
    (tmp_path / "some.toml").write_text('[[rules]]\nmatch = "*bias"\ndrop = "magnitude"')
    for flags, status, words in (
        (["-m", adapter], 1, "a LoRA adapter"),
        (["-m", packed], 1, "packed already"),
        ([], 2, "pack needs a base, a model and an output"),
        (["-m", models[1], "-c", tmp_path / "all.toml"], 2, "drop magnitude"),
        (["-m", models[1], "-c", tmp_path / "some.toml"], 2, "drop magnitude"),
        (["-m", *models[1:]], 2, "one model, not 2"),
    ):
        refused(status, words, "pack", "-b", models[0], "-o", tmp_path / "x.safetensors", *flags)
    check_refused(models[2], packed, "'base.safetensors'", "another base")
    check_refused(packed, models[1], "is a packed model")


def test_rows_of_packed_models_cannot_be_united(
    pair: Any, tmp_path: Path, refused: Refusal
) -> None:
    for k, name in enumerate(("base", "math")):
        write_model(tmp_path / name, 12, {"<s>": 8, "</s>": 9} | ({"<a>": 10} if k else {}), k)
    words = ["-b", pair[0], "-m", pack(*pair, tmp_path / "packed"), "-o", tmp_path / "out"]
    refused(1, "is packed", *words, "--tokenizer", "union")


def test_a_configuration_that_says_how_to_merge_can_be_packed_by(
    models: list[Path], tmp_path: Path
) -> None:
    text = (
        '[dare]\nmethod = "ties"\nkeep_ratio = 0.3\ndrop_rate = 0.5\ndrop = ["random"]\n'
        '[[rules]]\nmatch = "*bias"\nkeep_ratio = 1.0\ndrop = ["random"]\n'
    )
    (tmp_path / "c.toml").write_text(text + '[[rules]]\nmatch = "scalar"\ndrop_rate = 0.0\n')
    packed = pack(*models[:2], tmp_path / "packed.safetensors", "--config", tmp_path / "c.toml")
    rates = {name: entry["drop_rate"] for name, entry in table_of(packed)["tensors"].items()}
    assert rates == {"layer.weight": 0.5, "layer.bias": 0.5, "head.weight": 0.5, "scalar": 0.0}


# --- packing that does not end well ---------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_an_interrupted_packing_leaves_nothing_or_is_continued_to_the_same_bytes(
    models: Models, tmp_path: Path, flags: list[str]
) -> None:
    make_many_jobs()
    whole = pack(*models[:2], tmp_path / "whole.safetensors").read_bytes()
    out = tmp_path / "out" / "out.safetensors"
    out.parent.mkdir()
    words = ["pack", "-b", models[0], "-m", models[1], "-o", out, *PLAIN, "--threads", "1"]
    with Patch.context() as patch:
        stop_after(patch, 5)
        run(*words, *flags, status=130)
    assert len(os.listdir(out.parent)) == len(flags)
    run(*words, *flags)
    assert contents(out.parent) == {out.name: whole}


def test_heads_that_are_tied_otherwise_than_at_packing_are_refused(
    tmp_path: Path, refused: Refusal
) -> None:
    """The mask of a tied head is its embedding's; whether it is tied, the base's configuration
    says."""
    base, tuned = make_models(1, BF16, TIED)
    tied = save_directory(tmp_path / "tied", base, tie_word_embeddings=True)
    bare, model = save_models(tmp_path, [base, tuned])
    for packed_with, merged_with in ((bare, tied), (tied, bare)):
        packed = pack(packed_with, model, tmp_path / "packed.safetensors", "--force")
        refused(1, "tied", "-b", merged_with, "-m", packed, "-o", tmp_path / "x.safetensors")
        compare([packed_with, model], [packed])


def test_what_a_fine_tune_says_of_its_head_is_kept(tmp_path: Path) -> None:
    base, model = make_models(1, BF16, TIED)
    del model["lm_head.weight"]
    folder = save_directory(tmp_path / "model", model, tie_word_embeddings=True)
    [path] = save(tmp_path, base=base)
    compare([path, folder], [pack(path, folder, tmp_path / "packed.safetensors")])


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(BF16, float("inf")), (F16, float("nan")), (F32, float("-inf")), (F64, float("nan"))],
)
def test_a_broken_fine_tune_is_not_packed(
    tmp_path: Path, refused: Refusal, dtype: Any, value: Any
) -> None:
    """Not even where the bad value would be dropped: nobody could tell later."""
    base, model = make_models(1, BF16)
    model = {name: tensor.to(dtype) for name, tensor in model.items()}
    model["head.weight"][3, 5] = value
    base, tuned = save_models(tmp_path, [base, model])
    words = ["pack", "-b", base, "-m", tuned, "-o", tmp_path / "x.safetensors", *PLAIN]
    refused(1, ("'head.weight'", "[3, 5]"), *words)


def test_mistakes_with_packing_are_explained(pair: Pair, tmp_path: Path, refused: Refusal) -> None:
    base, model = pair
    for path, kind in zip(pair, ("llama", "qwen2"), strict=True):
        (path / "config.json").write_text(json.dumps({"model_type": kind}))
    refused(1, "--any-base", "pack", "-b", base, "-o", tmp_path / "x", "-m", model)
    packed = pack(*pair, tmp_path / "packed.safetensors", "--any-base", "--drop-rate", 0.1)
    refused(1, "is a packed model", "verify", packed)
    (model / "packed.safetensors").write_bytes(packed.read_bytes())
    out = tmp_path / "out.safetensors"
    run_merge(base, [model], out, any_base=True, drop_rate=0.0)  # the model, not that


def test_what_must_see_all_of_a_model_takes_none_that_is_thinned(
    models: list[Path], check_refused: Refusal
) -> None:
    """What is important depends on the whole fine-tune: what nothing was dropped of is whole."""
    fusion = ("--method", "arcee_fusion", "--drop-rate", "0.5")
    thinned = pack_all(models[:2], 0.5)[0]
    check_refused(models[0], thinned, "packed", "arcee_fusion must see all of", flags=fusion)
    whole = pack_all(models[:2], 0.0)
    compare(models[:2], whole, method="arcee_fusion", drop_rate=0.5, engine="plain")
