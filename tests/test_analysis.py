"""Analyses: figures that NumPy finds too, advice that follows from them, a suggestion that merges,
and pictures."""

import errno
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dare import AnalysisReport, DareConfig, DareError
from darelib.commands.analyze.advice import SEARCHED
from darelib.commands.analyze.measure import DeltaStats, kind_of, layer_of
from darelib.config import Rule
from darelib.output.files import MADE
from tests.scene import launch
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    HERE,
    POSIX,
    Capture,
    Config,
    Models,
    Pair,
    Patch,
    Refusal,
    Tensors,
    examples,
    finetune,
    low_rank,
    make_merger,
    make_models,
    merge,
    random_model,
    run,
    save,
    save_directory,
    save_sharded,
    slow,
    snapshot,
    tune,
    write_adapter,
)

ANALYSED = {
    "model.embed_tokens.weight": (30, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "lm_head.weight": (30, 8),
    "model.layers.0.mlp.up_proj.weight": (37, 61),
    "model.layers.10.mlp.up_proj.weight": (61, 37),
    "model.layers.10.input_layernorm.weight": (8,),
}
LAYERED = {"model.embed_tokens.weight": (50, 40)} | {
    f"model.layers.{k}.mlp.weight": (60, 40) for k in range(10)
}
LAYERED |= {"model.norm.weight": (40,)}
# Modules by the kind of their tensors; up to a bar, they are a layer.
KINDS = {
    "embedding": [
        "model.embed_tokens",
        "transformer.wte",
        "transformer.wpe",
        "bert.embeddings.word_embeddings",
        "embedder",
        "cond_stage_model|.transformer.text_model.embeddings.token_embedding",
        "text_encoder_2|.shared",
        "conditioner.embedders.0|.transformer.text_model.embeddings.token_embedding",
    ],
    "text encoder": [
        "cond_stage_model|.transformer.text_model.encoder.layers.0.mlp.fc1",
        "text_encoder|.layers.1.q_proj",
        "conditioner.embedders.1|.model.transformer.resblocks.3.ln_1",
        "text_encoders.t5xxl|.encoder.block.0.layer.0.wi",
        "text_model.encoder.layers.7|.self_attn.q_proj",
    ],
    "VAE": [
        "first_stage_model|.encoder.mid.attn_1.norm",
        "first_stage_model|.decoder.up.0.conv",
        "vae|.decoder.conv_out",
    ],
    "attention": [
        "model.layers.12|.self_attn.q_proj",
        "h.0|.attn.c_attn",
        "encoder.block.0|.layer.0.SelfAttention.q",
        "bert.encoder.layer.9|.attention.output.dense",
        "unet.mid_block|.attentions.0.transformer_blocks.0.attn1.to_q",
        "model.diffusion_model.output_blocks.11|.1.transformer_blocks.0.attn2.to_k",
        "double_blocks.18|.img_attn.qkv",
    ],
    "MLP": [
        "model.layers.4|.mlp.experts.17.down_proj",
        "model.layers.5|.block_sparse_moe.gate",
        "h.1|.mlp.c_fc",
        "fc1",
        "bert.encoder.layer.10|.intermediate.dense",
        "encoder.block.1|.layer.1.DenseReluDense.wi",
        "model.diffusion_model.middle_block|.1.transformer_blocks.0.ff.net.2",
        "double_blocks.2|.txt_mlp.0",
        "down_blocks.1|.attentions.0.transformer_blocks.0.ff.net.0.proj",
    ],
    "norm": [
        "model.layers.3|.self_attn.q_norm",
        "model.layers.6|.post_attention_layernorm",
        "model.norm",
        "h.2|.ln_1",
        "ln_f",
        "bert.embeddings.LayerNorm",
        "bert.encoder.layer.11|.output.LayerNorm",
    ],
    "head": ["lm_head", "cls.predictions.decoder", "score"],
    "other": [
        "something",
        "model.diffusion_model.time_embed.0",
        "model.diffusion_model.label_emb.0|.0",
        "single_blocks.37|.linear1",
        "model.diffusion_model.input_blocks.4|.0.in_layers.2",
        "time_embedding.linear_1",
        "x_embedder.proj",
        "up_blocks.3|.resnets.0.conv1",
    ],
}


def analyze(
    folder: Path, base: Tensors, *models: Tensors, engine: str = "plain", **config: Any
) -> AnalysisReport:
    """By the plain engine, which finds the same to the bit, unless that is to be shown."""
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    return make_merger(paths[0], paths[1:], engine=engine, **config).analyze()


def deltas_of(base: Tensors, model: Tensors) -> dict[str, np.ndarray]:
    """The deltas as they are computed, in float32, or float64 where a tensor has that."""
    found = {}
    for name, tensor in base.items():
        kind = F64 if F64 in (tensor.dtype, model[name].dtype) else F32
        found[name] = (model[name].to(kind) - tensor.to(kind)).double().numpy().ravel()
    return found


def check_stats(stats: DeltaStats, deltas: np.ndarray, weights: np.ndarray) -> None:
    sizes = np.abs(deltas)
    assert (stats.parameters, stats.largest) == (len(deltas), sizes.max())
    assert stats.share_zero == np.mean(deltas == 0)
    assert stats.share_above_threshold == np.mean(sizes > float(np.float32(0.002)))
    norm = np.linalg.norm(deltas) / np.linalg.norm(weights)
    assert [stats.mean, stats.relative_norm] == pytest.approx([sizes.mean(), norm], rel=1e-5)
    assert stats.standard_deviation == pytest.approx(sizes.std(), rel=1e-3, abs=1e-3 * sizes.mean())
    exact = [np.percentile(sizes, share, method="inverted_cdf") for share in (50, 95, 99)]
    assert [stats.p50, stats.p95, stats.p99] == pytest.approx(exact, rel=0.0311, abs=1e-12)
    hundredth = sizes.max() / 100
    near = np.mean((sizes > hundredth * 0.93) & (sizes < hundredth * 1.07))
    assert abs(stats.share_below_1_percent - np.mean(sizes < hundredth)) <= near + 1e-9


def check_analysis(report: AnalysisReport, base: Tensors, *models: Tensors) -> None:
    weights = {name: tensor.double().numpy().ravel() for name, tensor in base.items()}
    deltas = [deltas_of(base, model) for model in models]
    every = np.stack([np.concatenate([*parts.values()]) for parts in deltas])
    for found, parts, flat in zip(report.models, deltas, every, strict=True):
        groups = [(found.total, list(base)), *((stats, [stats.name]) for stats in found.tensors)]
        of = {name: (kind_of(name), layer_of(name)) for name in base}
        groups += [
            (stats, [name for name in of if stats.name in of[name]])
            for stats in (*found.kinds, *found.layers)
        ]
        for stats, names in groups:
            assert stats.tensors == len(names)
            check_stats(
                stats,
                np.concatenate([parts[n] for n in names]),
                np.concatenate([weights[n] for n in names]),
            )
        for group in (found.tensors, found.kinds, found.layers):
            assert sum(stats.parameters for stats in group) == found.total.parameters
        assert sum(count for _, count in found.histogram) == np.count_nonzero(flat)
    for pair, (one, other) in zip(report.pairs, itertools.combinations(every, 2), strict=True):
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        assert pair.share_both == np.mean((one != 0) & (other != 0))
        assert pair.cosine == pytest.approx(one @ other / norms if norms else 0, abs=1e-5)
        check_conflicts(pair, np.stack([one, other]))


def check_conflicts(found: Any, deltas: np.ndarray) -> None:
    mixed = (deltas > 0).any(0) & (deltas < 0).any(0)
    several = (deltas != 0).sum(0) > 1
    size = np.abs(deltas).sum(0)
    shares = [0, 0]
    if several.any():
        shares = [mixed.sum() / several.sum(), size[mixed].sum() / size[several].sum()]
    assert [found.sign_conflict, found.weighted_sign_conflict] == pytest.approx(shares, rel=1e-5)


@pytest.mark.parametrize(
    ("engine", "types"),
    [
        ("auto", (BF16, BF16)),
        ("plain", (F32, F32)),
        ("plain", (F64, F32)),
        *(slow("numba", types) for types in [(F32, F32), (F16, BF16), (F64, F32)]),
    ],
)
@examples(3)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    size=st.sampled_from([1e-6, 1e-3, 0.01, 3.0]),
    same=st.sampled_from([0.0, 0.3, 0.99]),
)
def test_an_analysis_of_any_models_is_what_numpy_finds(
    tmp_path: Path, engine: str, types: Any, seed: int, count: int, size: float, same: float
) -> None:
    base = random_model(seed, types[0], ANALYSED)
    tuned = [finetune(base, seed + i, size) for i in range(count)]
    for i, model in enumerate(tuned):
        generator = torch.Generator().manual_seed(seed + i)
        for name, tensor in base.items():
            stays = torch.rand(tensor.shape, generator=generator) < same
            model[name] = torch.where(stays, tensor, model[name]).to(types[1])
    check_analysis(analyze(tmp_path, base, *tuned, engine=engine), base, *tuned)


@pytest.mark.parametrize("size", [100_003, slow(5_000_011)])
def test_an_analysis_depends_neither_on_threads_nor_on_chunks_nor_on_the_engine(
    tmp_path: Path, size: int
) -> None:
    base, *tuned = make_models(3, BF16, {"layers.0.weight": (size,), "layers.1.weight": (1025, 3)})
    reports = []
    for threads, chunk, engine in (
        (1, 1 << 18, "numba"),
        (2, 4096, "numba"),
        (5, 1 << 14, "plain"),
    ):
        tune(job_elements=size // 8 // 4096 * 4096, min_chunk=1024, max_chunk=chunk)
        report = analyze(tmp_path, base, *tuned, threads=threads, engine=engine)
        reports.append(report.to_dict(per_tensor=True) | {"seconds": 0})
    assert reports[1:] == reports[:1] * 2
    check_analysis(report, base, *tuned)


def test_only_what_a_model_has_and_a_merge_changes_is_analysed(tmp_path: Path) -> None:
    base, short = make_models(
        1, F32, {"embed_tokens.weight": (1000, 7), "layers.0.mlp.weight": (40, 30)}
    )
    short["embed_tokens.weight"] = short["embed_tokens.weight"][:333].clone()
    others = {"steps": torch.arange(4), "empty": torch.zeros(0, 3)}
    short["steps"] = others["steps"]
    report = analyze(tmp_path, base | others, short, mismatch="overlap")
    assert report.copied_tensors == 1
    assert [stats.name for stats in report.models[0].tensors] == list(base)
    weights = base["embed_tokens.weight"].double().numpy().ravel()
    base["embed_tokens.weight"] = base["embed_tokens.weight"][:333]
    check_stats(report.models[0].tensors[0], deltas_of(base, short)["embed_tokens.weight"], weights)


def test_an_adapter_is_analysed_as_what_it_changes(tmp_path: Path) -> None:
    base = random_model(1, F32, {"layers.0.mlp.weight": (40, 30), "layers.1.mlp.weight": (40, 30)})
    tensors = low_rank("layers.0.mlp", (40, 30), rank=4)
    a, b = (tensor.double() for tensor in tensors.values())
    paths = [*save(tmp_path, base=base), write_adapter(tmp_path / "adapter", tensors, r=4)]
    report = make_merger(paths[0], paths[1:], engine="plain").analyze()
    (model,) = report.models
    assert (model.adapter, [stats.name for stats in model.tensors]) == (True, [*base][:1])
    assert [model.total.mean, model.total.largest] == pytest.approx(
        [(b @ a).abs().mean().item(), (b @ a).abs().max().item()], rel=1e-5
    )
    assert tomllib.loads(report.suggestion)["dare"]["drop_rate"] == 0.85, "it has less to spare"
    assert [verdict.base for verdict in report.verdicts] == ["unknown"]


def test_values_that_no_analysis_can_use_are_named(tmp_path: Path) -> None:
    base = {"fine.weight": torch.ones(4, 4), "large.weight": torch.full((4, 4), 1e25)}
    model = {name: tensor * 1.01 for name, tensor in base.items()}
    with pytest.raises(DareError, match=r"'large.weight' are so large"):
        analyze(tmp_path, base, model)
    wide = analyze(tmp_path, {name: tensor.double() for name, tensor in base.items()}, model)
    assert wide.models[0].total.relative_norm == pytest.approx(0.01, rel=1e-4)
    model["fine.weight"][3, 2] = math.nan
    with pytest.raises(DareError, match=r"tensor 'fine.weight' holds nan at \[3, 2\]"):
        analyze(tmp_path, base, model)


def test_tensors_are_told_apart_by_their_names(tmp_path: Path) -> None:
    expected = {module: kind for kind, modules in KINDS.items() for module in modules}
    base = {f"{module.replace('|', '')}.weight": torch.ones(1) for module in expected}
    (model,) = analyze(tmp_path, base, base).models
    found = {(layer, kind) for layer, kinds in model.cells.items() for kind in kinds}
    assert found == {(module.split("|")[0], kind) for module, kind in expected.items()}


def test_layers_are_sorted_by_number_and_no_name_takes_long(tmp_path: Path) -> None:
    layers = ["h.0", "h.9", "h.10", f"h.{'1' * 5000}", "in.2", "middle_block", "out.1", "norm"]
    base = {f"{layer}.weight": torch.ones(1) for layer in reversed(layers)}
    long = {"_ln" * 21000: torch.ones(1), "fc" + "_" * 60000: torch.ones(1)}
    started = time.perf_counter()
    (model,) = analyze(tmp_path, base | long, base | long).models
    assert time.perf_counter() - started < 5
    assert [stats.name for stats in model.layers if f"{stats.name}.weight" in base] == layers


def test_models_are_called_by_their_names_or_whole_paths(tmp_path: Path) -> None:
    one = {"weight": torch.ones(1)}
    [base] = save(tmp_path, base=one)
    paths = [*save(tmp_path / "x", m=one), *save(tmp_path / "y", m=one)]
    for chosen, labels in ((paths[:1], ["m"]), (paths, [*map(str, paths)])):
        report = make_merger(base, chosen, engine="plain").analyze()
        assert [model.label for model in report.models] == labels


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"drop_rate": 0.9}, 3.0),
        ({"drop_rate": 0.5}, 1.0),
        ({"drop_rate": 0.0}, 0.0),
        ({"drop_rate": 0.9, "rescale": False}, math.sqrt(0.9)),
        ({"drop_rate": 0.9, "rescale_q": 0.4}, math.sqrt(0.1 * 1.5**2 + 0.9)),
    ],
    ids=str,
)
def test_the_noise_that_an_analysis_expects_is_what_a_merge_adds(
    tmp_path: Path, config: Config, expected: float
) -> None:
    base, tuned = make_models(1, F64, {"mlp.weight": (500, 500)})
    (model,) = analyze(tmp_path, base, tuned, **config).models
    merged = merge(tmp_path, base, tuned, engine="plain", **config)
    before, after, made = (each["mlp.weight"] for each in (base, tuned, merged))
    noise = float((made - after).norm())
    assert noise / float((after - before).norm()) == pytest.approx(expected, rel=0.02, abs=1e-4)
    assert model.total.relative_noise == pytest.approx(
        noise / float(before.norm()), rel=0.02, abs=1e-5
    )


def scaled(base: Tensors, size: float, seed: int = 1, **others: float) -> Tensors:
    """A fine-tune whose deltas are normal with this deviation.

    others: deviations of tensors whose names have such a part.
    """
    rng = np.random.default_rng(seed)
    deviations = {
        name: next((other for part, other in others.items() if part in name.split(".")), size)
        for name in base
    }
    return {
        name: tensor
        + torch.from_numpy(rng.normal(size=tensor.shape) * deviations[name]).to(tensor.dtype)
        for name, tensor in base.items()
    }


def advise(
    folder: Path, base: Tensors, *models: Tensors, **config: Any
) -> tuple[AnalysisReport, dict[str, Any]]:
    """An analysis, and what it suggests, which can be merged."""
    report = analyze(folder, base, *models, **config)
    tables = tomllib.loads(report.suggestion)
    DareConfig(**tables["dare"], rules=tables.get("rules", ())).check_models(len(models))
    return report, tables


BASE = random_model(1, F32, LAYERED)
FIRST, SECOND = (scaled(BASE, 0.0005, seed) for seed in (1, 2))
AGAINST = {name: 2 * BASE[name] - FIRST[name] for name in BASE}
UNRELATED = random_model(2, F32, LAYERED)
WUDI: Config = {"method": "wudi", "drop_rate": 0.0}
LINEAR: Config = {"method": "linear", "drop_rate": 0.0}
OF_WUDI: Config = {"weights": [2, 1], "ridge": 0.1, "norm_limit": 2.0}
OF_LAYER = {"match": ["*layers.0*"], "ridge": 0.1, "norm_limit": 0.0}
SIGNS = {"match": ["*norm*"], "weights": [1, -1]}
HALF = {"match": ["*layers.0*"], "lambda_coeff": 0.3}
GRADIENT: Config = {"weights": [{"gradient": [0.0, 1.0]}, 3.0]}
BY_LAYER = {"match": ["*layers.0*"], "weights": [0.0, {"gradient": [2.0, 1.0]}], "normalize": True}
SIGNED = {"weights": [3, -1], "normalize": False}
SHARES = {"weights": [3, 1], "normalize": True}
OTHERS: Config = {"seed": 7, "weights": [1.0, 0.5], "dtype": "bfloat16"}
FADING = {"lambda_coeff": {"gradient": [1.0, 0.5]}}
DROPPED = HALF | {"drop_rate": 0.3}
LESS = {"rescale_q": 0.8}
TWO = [FIRST, SECOND]


@pytest.mark.parametrize(
    ("size", "related", "rate", "words"),
    [
        (0.0, "identical", 0.9, "m0 is identical to the base and only dilutes an average"),
        (0.0009, "right", 0.9, ""),
        (0.0015, "right", 0.8, ""),
        (0.005, "right", 0.5, ""),
        (0.012, "doubtful", 0.5, "base may not be the base of m0: its delta is "),
        (0.02, "doubtful", 0.0, "base may not be the base of m0: its delta is "),
        (0.07, "wrong", 0.0, "base does not look like the base of m0: its delta is "),
    ],
)
def test_advice_on_base_and_drop_rate_follows_from_the_size_of_the_deltas(
    tmp_path: Path, size: float, related: str, rate: float, words: str
) -> None:
    report, suggested = advise(tmp_path, BASE, scaled(BASE, size))
    [verdict] = report.verdicts
    assert (verdict.base, verdict.drop_rate) == (related, rate)
    assert suggested["dare"] == {"method": "linear", "drop_rate": rate}
    assert ("rules" in suggested) == (size > 0 and rate > 0)
    assert report.advice[0].startswith(words or "method linear")


def test_an_analysis_says_how_sure_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    count = sum(tensor.numel() for tensor in BASE.values())
    largest = "darelib.commands.analyze.advice.LARGEST_TRIED"
    for small, tried, models, words in (
        (count + 1, count, [UNRELATED], "base is in doubt"),
        (count + 1, count, [FIRST], "billions"),
        (0, count, [FIRST], "fairly"),
        (10**9, count, [FIRST, SECOND], "fairly"),
        (10**9, count - 1, [FIRST, SECOND], f"{count - 1:,}"),
    ):
        tune(small_model=small)
        monkeypatch.setattr(largest, tried)
        assert words in advise(tmp_path, BASE, *models)[0].confidence


def test_nothing_is_dropped_of_norms_biases_and_embeddings(tmp_path: Path) -> None:
    plain = {name: tensor for name, tensor in BASE.items() if "mlp" in name}
    shapes = {f"features.{k}.weight": (20,) if k % 2 else (20, 20) for k in range(8)}
    shapes |= {f"features.{k}.bias": (20,) for k in range(0, 8, 2)}
    mixed = random_model(1, F32, shapes)
    for base, model, names in (
        (BASE, FIRST, {"model.embed_tokens.weight", "model.norm.weight"}),
        (plain, scaled(plain, 0.0003), set()),
        (BASE, scaled(BASE, 0.0003, embed_tokens=0.0, norm=0.0), set()),
        (mixed, scaled(mixed, 0.0003), {name for name in shapes if len(shapes[name]) == 1}),
    ):
        rules = advise(tmp_path, base, model)[1].get("rules", [])
        typed = [Rule(tuple(rule["match"]), drop_rate=rule["drop_rate"]) for rule in rules]
        assert {name for name in base if any(rule.matches(name) for rule in typed)} == names
        assert [rule.drop_rate for rule in typed] == [0.0] * bool(names)


@pytest.mark.parametrize(
    ("models", "config", "suggested", "rules"),
    [
        ([FIRST], {}, {"method": "linear", "drop_rate": 0.9}, []),
        ([FIRST, BASE], {}, {"method": "linear", "drop_rate": 0.9}, []),
        (TWO, {}, WUDI, []),
        ([BASE, FIRST, SECOND], {}, WUDI, []),
        ([FIRST, AGAINST], {}, WUDI, []),
        ([FIRST, UNRELATED], {}, WUDI, []),
        (TWO, {"weights": [1, 1]}, LINEAR | {"weights": [1, 1]}, []),
        (TWO, WUDI | {"lambda_coeff": 0.8}, WUDI | {"lambda_coeff": 0.8}, []),
        (TWO, {"method": "ram", "lambda_coeff": 1.5}, WUDI, []),
        (TWO, WUDI | OF_WUDI, WUDI | OF_WUDI, []),
        (TWO, WUDI | {"rules": [OF_LAYER]}, WUDI, [OF_LAYER]),
        (TWO, {"normalize": True, "rules": [HALF]}, WUDI, [HALF]),
        (TWO, {"method": "wudi", "rules": [SIGNS | {"method": "linear"}]}, LINEAR, [SIGNS]),
        (TWO, OTHERS | {"rescale_q": 0.5, "rules": [DROPPED | LESS]}, LINEAR | OTHERS, [HALF]),
        (TWO, SHARES | {"method": "ties"}, LINEAR | SHARES, []),
        (TWO, SIGNED | {"method": "linear"}, LINEAR | SIGNED, []),
        (
            TWO,
            GRADIENT | {"rules": [BY_LAYER], "method": "ties"},
            LINEAR | GRADIENT | {"normalize": True},
            [BY_LAYER],
        ),
        (TWO, WUDI | FADING | {"drop": "della", "epsilon": 0.05}, WUDI | FADING, []),
    ],
)
def test_a_suggestion_is_what_is_advised_and_what_else_was_set(
    tmp_path: Path, models: list[Tensors], config: Config, suggested: Config, rules: list[Config]
) -> None:
    """Several begin with nothing dropped; to ties, weights were shares."""
    report, tables = advise(tmp_path, BASE, *models, **config)
    assert tables["dare"] == suggested
    assert any(f"method {suggested['method']}: " in advice for advice in report.advice)
    assert tables.get("rules", [])[: len(rules)] == rules, "what is advised comes after them"
    assert tables.get("sweep") == (SEARCHED if suggested["drop_rate"] == 0 else None)


def test_examples_are_advised_where_transformers_knows_the_model(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [
        save_directory(Path(name), tensors, model_type="llama")
        for name, tensors in zip(("base", "math", "code"), (BASE, *TWO), strict=True)
    ]
    for word in ("math", "code"):
        Path(f"{word}.jsonl").write_text('{"text": "one and one is two"}\n')
    words = ["analyze", "-b", folders[0], "-m", *folders[1:], "--engine", "plain"]
    path = Path("advice.toml")
    run(*words, "--write-config", path)
    assert "--examples FILE..., one for each model" in capsys.readouterr().out
    text = path.read_text()
    assert "examples" not in tomllib.loads(text), "it is a comment"
    path.write_text(re.sub(r"^# (?=\[examples|files)", "", text, flags=re.MULTILINE))
    run("analyze", "-c", path, "--engine", "plain", "--write-config", "-")
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["examples"] == {"files": ["math.jsonl", "code.jsonl"]}
    assert "--examples" not in printed
    files = analyze(tmp_path, BASE, *TWO)
    alone = make_merger(folders[0], folders[1:2], engine="plain").analyze()
    assert not any("examples" in each.suggestion for each in (files, alone))


STATE = """
import os, sys, warnings
import matplotlib.figure
import numpy
from dare import DareConfig, DareMerger, plot_analysis

def look():
    drawing = matplotlib.get_backend(auto_select=False), dict(matplotlib.rcParams.copy())
    python = list(warnings.filters), list(sys.path), sys.excepthook, dict(os.environ)
    return drawing, python, numpy.geterr(), "matplotlib.pyplot" in sys.modules

before = look()
base, *models = sys.argv[1:]
report = DareMerger(base, models, DareConfig(engine="plain", verbose=False)).analyze()
for suffix in ("png", "svg", "pdf"):
    plot_analysis(report, f"{base}.{suffix}")
assert look() == before
"""


@pytest.mark.slow
def test_an_analysis_and_its_pictures_leave_the_process_alone(models: Models) -> None:
    words = [sys.executable, "-c", STATE, *map(str, models)]
    subprocess.run(words, check=True, cwd=HERE, timeout=120)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: Patch) -> list[Any]:
    """The words that analyze the models that ship, from the folder that they are in."""
    shutil.copytree(
        HERE / "examples" / "models", tmp_path / "models", ignore=shutil.ignore_patterns("merged*")
    )
    monkeypatch.chdir(tmp_path / "models")
    names = [f"{name}.safetensors" for name in ("base", "rotated", "covered")]
    return ["analyze", "-b", names[0], "-m", *names[1:], "--engine", "plain"]


@pytest.mark.parametrize(
    ("flags", "layers", "tensors"),
    [("", False, False), ("--full", True, False), ("--per-tensor", False, True)],
)
def test_advice_comes_first_and_the_rest_if_asked_for(
    example: list[Any], tmp_path: Path, capsys: Capture, flags: str, layers: bool, tensors: bool
) -> None:
    before = snapshot(tmp_path)
    run(*example, *flags.split())
    printed = capsys.readouterr().out
    places = [
        printed.index(word) for word in ("Advice\n", "How sure", "[dare]", "covered, by kind")
    ]
    assert places == sorted(places)
    assert places[0] == 0
    rest = ("rotated, by layer", "kept at rank", "rotated and covered  ")
    assert [word in printed for word in rest] == [layers] * 3
    assert ("fc2.weight" in printed) == tensors
    assert len(printed.splitlines()) < 35 or layers or tensors
    run(*example, *flags.split(), "--json")
    found = json.loads(capsys.readouterr().out)["models"][0].get("tensors", [])
    assert len(found) == 6 * tensors
    assert snapshot(tmp_path) == before


def test_a_suggestion_finds_the_models_from_where_it_lies(
    example: list[Any], tmp_path: Path, refused: Refusal
) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "down")
    suggested = tmp_path / "link" / "a.toml"
    Path("tokenizer.json").write_text("{}")
    words = [*example, "-q", "--write-config", suggested]
    run(*words)
    refused(2, (str(suggested), "--force"), *words)
    run(*words, "--force", "--tokenizer", tmp_path / "models")
    run("-c", suggested, "-q", "--engine", "plain")
    assert (tmp_path / "deep" / "down" / "a_merged" / "tokenizer.json").exists()


@POSIX
@pytest.mark.parametrize("command", ["analyze", "merge"])
def test_what_is_left_when_a_configuration_is_written_is_removed_by_the_next(
    example: list[Any], tmp_path: Path, command: str
) -> None:
    words = [command, *example[1:], "-q", "--write-config", tmp_path / "a.toml"]
    before = snapshot(tmp_path)
    killed = launch("os.fsync = lambda _: os.kill(os.getpid(), 9)", *words)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(f"a.toml.partial-*/{MADE}"))) == 1
    run(*words)
    assert {*snapshot(tmp_path)} - {*before} == {"a.toml"}


@pytest.mark.parametrize("command", ["analyze", "merge"])
def test_a_configuration_is_printed_alone(
    example: list[Any], tmp_path: Path, capsys: Capture, refused: Refusal, command: str
) -> None:
    before = snapshot(tmp_path)
    words = [command, *example[1:], "--write-config", "-"]
    run(*words)
    printed = capsys.readouterr().out
    assert snapshot(tmp_path) == before
    assert tomllib.loads(printed)["models"]["base_file"] == "base.safetensors"
    refused(2, "--write-config -", "analyze", *words[1:], "--json")
    Path("printed.toml").write_text(printed)
    run("-c", "printed.toml", "-q")
    assert Path("merged.safetensors").exists()


def test_an_analysis_writes_over_no_input(
    pair: Pair, models: Models, tmp_path: Path, refused: Refusal
) -> None:
    (tmp_path / "link.toml").symlink_to(models[1])
    parts = save_sharded(tmp_path / "parts", random_model(), [["layer.weight"], ["scalar"]])
    flags = ["analyze", "-q", "-m", models[1], "--engine", "plain", "--force", "--write-config"]
    for base, name in (
        (models[0], "base.safetensors"),
        (models[0], "math.safetensors"),
        (models[0], "link.toml"),
        (pair[0], "base/a.toml"),
        (parts / "model.safetensors.index.json", "parts/model-00001-of-00002.safetensors"),
        (models[0], "nowhere/a.toml"),
    ):
        refused(2, str(tmp_path / name), *flags, tmp_path / name, "-b", base)


@pytest.mark.slow
def test_any_models_are_drawn(
    pair: Pair, tmp_path: Path, refused: Refusal, monkeypatch: Patch
) -> None:
    pytest.importorskip("matplotlib")
    base = {"a.weight": torch.rand(4, 4), r"$\foo$.weight": torch.rand(4, 4), "n": torch.arange(3)}
    names = (r"$\bar$", "_hidden", "long" * 50, "same")
    models = {
        name: {key: tensor + (name != "same") for key, tensor in base.items()} for name in names
    }
    paths = save(tmp_path, base=base, **models, counts={"n": base["n"]})
    # One is given twice, one is the base, one has nothing that is merged.
    arguments = ["analyze", "-b", paths[0], "-m", *paths[1:], paths[1], "--engine", "plain"]
    run(*arguments, "-q", "--plot", tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    labels = (r"Where $\bar$ changed", "_hidden (0% unchanged)", "Where longlong...")
    assert [x for x in labels if not re.search(f"<!--  ?{re.escape(x)}", drawn)] == []
    refused(2, "a.png", "analyze", "-b", pair[0], "-m", pair[1], "--plot", pair[0] / "a.png")

    with monkeypatch.context() as patch:  # a picture that is not complete does not get its name
        patch.setattr("os.replace", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
        refused(1, "disk full", *arguments, "-q", "--plot", tmp_path / "x.svg", "--force")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(2, ("matplotlib", "install it: "), *arguments, "--plot", tmp_path / "a.png")
