"""Analyses: figures that NumPy finds too, advice that follows from them, a suggestion that merges,
and pictures."""

import fnmatch
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dare
from dare import AnalysisReport, DareConfig, DareError, DareMerger
from darelib.commands.analyze.measure import kind_of, layer_of
from darelib.commands.analyze.report import DeltaStats
from darelib.core.tuning import TUNING
from tests.support import (
    BF16,
    F32,
    HERE,
    Capture,
    Tensors,
    examples,
    finetune,
    merge,
    random_model,
    refuse,
    save,
    slow,
    snapshot,
    write_adapter,
)

F16, F64 = torch.float16, torch.float64
pick = st.sampled_from
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
    "embedding": "model.embed_tokens transformer.wte transformer.wpe bert.embeddings.word_embeddings embedder "
    "cond_stage_model|.transformer.text_model.embeddings.token_embedding text_encoder_2|.shared "
    "conditioner.embedders.0|.transformer.text_model.embeddings.token_embedding",
    "text encoder": "cond_stage_model|.transformer.text_model.encoder.layers.0.mlp.fc1 text_encoder|.layers.1.q_proj "
    "conditioner.embedders.1|.model.transformer.resblocks.3.ln_1 text_encoders.t5xxl|.encoder.block.0.layer.0.wi "
    "text_model.encoder.layers.7|.self_attn.q_proj",
    "VAE": "first_stage_model|.encoder.mid.attn_1.norm first_stage_model|.decoder.up.0.conv vae|.decoder.conv_out",
    "attention": "model.layers.12|.self_attn.q_proj h.0|.attn.c_attn encoder.block.0|.layer.0.SelfAttention.q "
    "bert.encoder.layer.9|.attention.output.dense unet.mid_block|.attentions.0.transformer_blocks.0.attn1.to_q "
    "model.diffusion_model.output_blocks.11|.1.transformer_blocks.0.attn2.to_k double_blocks.18|.img_attn.qkv",
    "MLP": "model.layers.4|.mlp.experts.17.down_proj model.layers.5|.block_sparse_moe.gate h.1|.mlp.c_fc fc1 "
    "bert.encoder.layer.10|.intermediate.dense encoder.block.1|.layer.1.DenseReluDense.wi "
    "model.diffusion_model.middle_block|.1.transformer_blocks.0.ff.net.2 double_blocks.2|.txt_mlp.0 "
    "down_blocks.1|.attentions.0.transformer_blocks.0.ff.net.0.proj",
    "norm": "model.layers.3|.self_attn.q_norm model.layers.6|.post_attention_layernorm model.norm h.2|.ln_1 ln_f "
    "bert.embeddings.LayerNorm bert.encoder.layer.11|.output.LayerNorm",
    "head": "lm_head cls.predictions.decoder score",
    "other": "something model.diffusion_model.time_embed.0 model.diffusion_model.label_emb.0|.0 "
    "single_blocks.37|.linear1 model.diffusion_model.input_blocks.4|.0.in_layers.2 time_embedding.linear_1 "
    "x_embedder.proj up_blocks.3|.resnets.0.conv1",
}


def analyze(
    folder: Path, base: Tensors, *models: Tensors, engine: str = "plain", **config: Any
) -> AnalysisReport:
    """By the plain engine, which finds the same to the bit, unless that is to be shown."""
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    return DareMerger(
        paths[0], paths[1:], DareConfig(verbose=False, engine=engine, **config)
    ).analyze()


def deltas_of(base: Tensors, model: Tensors) -> dict[str, np.ndarray]:
    """The deltas as they are computed, in float32, or float64 where a tensor has that."""
    found = {}
    for name, tensor in base.items():
        kind = F64 if F64 in (tensor.dtype, model[name].dtype) else F32
        found[name] = (model[name].to(kind) - tensor.to(kind)).double().numpy().ravel()
    return found


def check_stats(stats: DeltaStats, deltas: np.ndarray, weights: np.ndarray) -> None:
    """Hold every figure to plain NumPy."""
    sizes = np.abs(deltas)
    assert stats.parameters == len(deltas)
    assert stats.share_zero == np.mean(deltas == 0)
    assert stats.share_above_threshold == np.mean(sizes > float(np.float32(0.002)))
    assert stats.largest == sizes.max()
    assert stats.mean == pytest.approx(sizes.mean(), rel=1e-5)
    assert stats.standard_deviation == pytest.approx(sizes.std(), rel=1e-3, abs=1e-3 * sizes.mean())
    assert stats.relative_norm == pytest.approx(
        np.linalg.norm(deltas) / np.linalg.norm(weights), rel=1e-5
    )
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
        both, norms = (one != 0) & (other != 0), np.linalg.norm(one) * np.linalg.norm(other)
        assert pair.share_both == np.mean(both)
        assert pair.cosine == pytest.approx(one @ other / norms if norms else 0, abs=1e-5)
        check_conflicts(pair, np.stack([one, other]))
    check_conflicts(report, every)


def check_conflicts(found: Any, deltas: np.ndarray) -> None:
    mixed, several, size = (
        (deltas > 0).any(0) & (deltas < 0).any(0),
        (deltas != 0).sum(0) > 1,
        np.abs(deltas).sum(0),
    )
    assert found.sign_conflict == (mixed.sum() / several.sum() if several.any() else 0)
    expected = size[mixed].sum() / size[several].sum() if several.any() else 0
    assert found.weighted_sign_conflict == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("engine", "types"),
    [
        ("auto", (BF16, BF16)),
        ("plain", (F32, F32)),
        ("plain", (F64, F32)),
        *(slow("numba", types) for types in [(F32, F32), (F16, BF16), (F64, F32)]),
    ],
)
@examples(8)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 4),
    size=pick([1e-6, 1e-3, 0.01, 3.0]),
    same=pick([0.0, 0.3, 0.99]),
)
def test_an_analysis_of_any_models_is_what_numpy_finds(
    tmp_path: Path, engine: str, types: Any, seed: int, count: int, size: float, same: float
) -> None:
    base, tuned = random_model(seed, types[0], ANALYSED), []
    for i in range(count):
        generator, changed = torch.Generator().manual_seed(seed + i), finetune(base, seed + i, size)
        for name, tensor in base.items():
            stays = torch.rand(tensor.shape, generator=generator) < same
            changed[name] = torch.where(stays, tensor, changed[name]).to(types[1])
        tuned.append(changed)
    check_analysis(analyze(tmp_path, base, *tuned, engine=engine), base, *tuned)


@pytest.mark.parametrize("size", [100_003, slow(5_000_011)])
def test_an_analysis_depends_neither_on_threads_nor_on_chunks_nor_on_the_engine(
    tmp_path: Path, size: int
) -> None:
    base = random_model(3, BF16, {"layers.0.weight": (size,), "layers.1.weight": (1025, 3)})
    tuned = [finetune(base, seed) for seed in (1, 2, 3)]
    TUNING.job_elements, TUNING.min_chunk = size // 8 // 4096 * 4096, 1024
    found = []
    for threads, TUNING.max_chunk, engine in (
        (1, 1 << 18, "numba"),
        (2, 4096, "numba"),
        (5, 1 << 14, "plain"),
    ):
        report = analyze(tmp_path, base, *tuned, threads=threads, engine=engine)
        found.append(report.as_dict(per_tensor=True) | {"seconds": 0})
    assert found[0] == found[1] == found[2]
    check_analysis(report, base, *tuned)


@pytest.mark.slow
def test_an_analysis_of_many_tensors_takes_little_memory_for_each(tmp_path: Path) -> None:
    peaks = []
    for count in (100, 1100):
        base = {f"layers.{k % 7}.{k}.weight": torch.zeros(4, 4) for k in range(count)}
        tracemalloc.start()
        analyze(tmp_path, base, *[base] * 4, threads=1, engine="numba")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / (1000 * 4) < 2500  # counts by size alone would take 8192


def test_only_what_a_model_has_and_a_merge_changes_is_analysed(tmp_path: Path) -> None:
    base = random_model(1, F32, {"embed_tokens.weight": (1000, 7), "layers.0.mlp.weight": (40, 30)})
    short = finetune(base, 1)
    short["embed_tokens.weight"] = short["embed_tokens.weight"][:333].clone()
    others = {"steps": torch.arange(4), "empty": torch.zeros(0, 3)}
    report = analyze(
        tmp_path, base | others, short | {"steps": others["steps"]}, mismatch="overlap"
    )
    rows, rest = report.models[0].tensors
    assert (report.copied_tensors, rows.name, rest.name) == (1, *base), (
        "neither integers nor empty tensors"
    )
    base["embed_tokens.weight"] = base["embed_tokens.weight"][:333]
    deltas = deltas_of(base, short)["embed_tokens.weight"]
    assert (rows.parameters, rows.share_zero) == (333 * 7, np.mean(deltas == 0))
    assert rows.p50 == pytest.approx(
        np.percentile(np.abs(deltas), 50, method="inverted_cdf"), rel=0.0311
    )


def test_an_adapter_is_analysed_as_what_it_changes(tmp_path: Path) -> None:
    base = random_model(1, F32, {"layers.0.mlp.weight": (40, 30), "layers.1.mlp.weight": (40, 30)})
    a, b = torch.randn(4, 30) * 0.01, torch.randn(40, 4) * 0.01
    matrices = {
        f"base_model.model.layers.0.mlp.lora_{name}.weight": m for name, m in (("A", a), ("B", b))
    }
    adapter = write_adapter(tmp_path / "adapter", matrices, r=4)
    whole = analyze(
        tmp_path, base, base | {"layers.0.mlp.weight": base["layers.0.mlp.weight"] + b @ a}
    )
    report = DareMerger(
        tmp_path / "base.safetensors", [adapter], DareConfig(verbose=False, engine="plain")
    ).analyze()
    (model,) = report.models
    assert (model.adapter, [stats.name for stats in model.tensors]) == (
        True,
        ["layers.0.mlp.weight"],
    )
    deltas = (b.double() @ a.double()).abs()
    figures = [deltas.mean().item(), deltas.max().item()]
    assert [model.total.mean, model.total.largest] == pytest.approx(figures, rel=1e-5)
    assert tomllib.loads(report.suggestion)["dare"]["drop_rate"] == 0.85, "it has less to spare"
    texts = [advice.text for advice in report.advice if advice.about == "base"]
    assert ["cannot be told from its deltas" in text for text in texts] == [True], (
        "they are the same on any base"
    )
    assert tomllib.loads(whole.suggestion)["dare"]["drop_rate"] == 0.9


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
    expected = {module: kind for kind, modules in KINDS.items() for module in modules.split()}
    base = {f"{module.replace('|', '')}.weight": torch.ones(1) for module in expected}
    (model,) = analyze(tmp_path, base, base).models
    found = {(layer, kind) for layer, kinds in model.cells.items() for kind in kinds}
    assert found == {(module.split("|")[0], kind) for module, kind in expected.items()}
    layers = [
        "h.0",
        "h.9",
        "h.10",
        f"h.{'1' * 5000}",
        "in.2",
        "middle_block",
        "out.1",
        "norm",
    ]  # sorted by number
    base = {f"{layer}.weight": torch.ones(1) for layer in reversed(layers)}
    long = {"_ln" * 21000: torch.ones(1), "fc" + "_" * 60000: torch.ones(1)}
    started = time.perf_counter()
    (model,) = analyze(tmp_path, base | long, base | long).models
    assert time.perf_counter() - started < 5, "no name takes long"
    assert [stats.name for stats in model.layers if f"{stats.name}.weight" in base] == layers


def test_models_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    places = (("a", "base"), ("x", "m"), ("y", "m"))
    base, *paths = (
        save(tmp_path / place, **{name: {"weight": torch.ones(1)}})[0] for place, name in places
    )
    for chosen, labels in (
        (paths[:1], ["m"]),
        (paths, ["x/m", "y/m"]),
        (paths[:1] * 2, ["m", "m"]),
    ):
        report = DareMerger(base, chosen, DareConfig(verbose=False, engine="plain")).analyze()
        assert [model.label for model in report.models] == labels


def test_the_noise_that_an_analysis_expects_is_what_a_merge_adds(tmp_path: Path) -> None:
    base = random_model(1, F32, {"mlp.weight": (500, 500)})
    tuned = finetune(base, 1)
    before, after = base["mlp.weight"].double(), tuned["mlp.weight"].double()
    for expected, config in (
        *((3.0, {"drop_rate": 0.9}), (1.0, {"drop_rate": 0.5}), (0.0, {"drop_rate": 0.0})),
        (math.sqrt(0.9), {"drop_rate": 0.9, "rescale": False}),
        (math.sqrt(0.1 * 1.5**2 + 0.9), {"drop_rate": 0.9, "rescale_q": 0.4}),
    ):
        (model,) = analyze(tmp_path, base, tuned, **config).models
        assert model.expected_noise == pytest.approx(expected, rel=1e-3, abs=1e-9)
        merged = merge(tmp_path, base, tuned, engine="plain", **config)["mlp.weight"].double()
        noise = float((merged - after).norm())
        assert noise / float((after - before).norm()) == pytest.approx(expected, rel=0.02, abs=1e-4)
        assert model.total.relative_noise == pytest.approx(
            noise / float(before.norm()), rel=0.02, abs=1e-5
        )


def scaled(base: Tensors, size: float, seed: int = 1, **others: float) -> Tensors:
    """A fine-tune whose deltas are normal with this deviation, or another in tensors whose names have such a part."""
    rng, tuned = np.random.default_rng(seed), {}
    for name, tensor in base.items():
        deviation = next((other for part, other in others.items() if part in name.split(".")), size)
        tuned[name] = tensor + torch.from_numpy(rng.normal(size=tensor.shape) * deviation).to(
            tensor.dtype
        )
    return tuned


def advise(
    folder: Path, base: Tensors, *models: Tensors, **config: Any
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The verdicts of an analysis by what they are about, its suggestion, and how sure it is."""
    report, found = analyze(folder, base, *models, **config), {}
    for advice in report.advice:
        found[advice.about] = [*found.get(advice.about, ()), advice.verdict]
        assert re.search(r"\d|identical|one model|experiment", advice.text), "each has a reason"
    tables = tomllib.loads(report.suggestion)
    DareConfig(**tables["dare"], rules=tables.get("rules", ())).check_models(
        len(models)
    )  # whatever it is, it is valid
    return found, tables, report.confidence


def test_advice_on_base_and_drop_rate_and_how_sure_it_is(tmp_path: Path) -> None:
    base = random_model(1, F32, LAYERED)
    for size, related, level, rate in (
        (0.0, "identical", None, 0.9),
        (0.0003, "right", "small", 0.9),
        (0.0009, "right", "small", 0.9),
        (0.0015, "right", "tailed", 0.8),
        (0.005, "right", "large", 0.5),
        (0.012, "doubtful", "large", 0.5),
        (0.02, "doubtful", "huge", 0.0),
        (0.04, "wrong", "huge", 0.0),
        (0.07, "wrong", "huge", 0.0),
    ):
        found, suggested, _ = advise(tmp_path, base, scaled(base, size))
        assert (found["base"], found.get("drop_rate")) == ([related], [level] if level else None)
        assert suggested["dare"]["drop_rate"] == rate
        assert ("rules" in suggested) == (size > 0 and rate > 0)
    found, _, sure = advise(tmp_path, base, random_model(2, F32, LAYERED))
    assert (found["base"], "a base is in doubt" in sure) == (["wrong"], True), (
        "of an unrelated model"
    )
    assert "billions of parameters" in advise(tmp_path, base, scaled(base, 0.0003))[2]
    TUNING.small_model = 0
    assert "fairly" in advise(tmp_path, base, scaled(base, 0.0003))[2]
    assert "close to where the advice changes" in advise(tmp_path, base, scaled(base, 0.0025))[2]


def test_models_of_different_sizes_tolerate_different_drop_rates_and_begin_without_any(
    tmp_path: Path,
) -> None:
    base = random_model(1, F32, LAYERED)
    small, alike, large = (
        scaled(base, size, seed) for seed, size in enumerate((0.0003, 0.0004, 0.004))
    )
    found, suggested, _ = advise(tmp_path, base, small, large)
    assert (found["drop_rate"], found["rules"], found["balance"]) == (
        ["small", "large"],
        ["vectors", "embeddings"],
        ["uneven"],
    )
    assert (suggested["dare"]["drop_rate"], "rules" in suggested) == (0, False)
    assert "balance" not in advise(tmp_path, base, small, alike)[0]
    base = {"a.weight": torch.rand(8, 8), "b.weight": torch.zeros(8, 8)}
    changed = {name: tensor + 0.001 for name, tensor in base.items()}
    for model in (
        {"b.weight": changed["b.weight"]},
        base | {"b.weight": torch.full((8, 8), 1e-25)},
    ):  # squares are 0
        assert "balance" not in advise(tmp_path, base, model, changed)[0], (
            "a delta without a norm has none"
        )


def test_advice_on_rules(tmp_path: Path) -> None:
    base = random_model(1, F32, LAYERED)
    found, suggested, _ = advise(tmp_path, base, scaled(base, 0.0003, **{"3": 0.006}))
    assert found["rules"] == ["vectors", "embeddings", "layers"]
    rules = {"model.norm.weight": 0.0, "model.embed_tokens.weight": 0.6, "model.layers.3.*": 0.5}
    assert suggested["rules"] == [
        {"match": [pattern], "drop_rate": rate} for pattern, rate in rules.items()
    ]
    plain = random_model(1, F32, {name: shape for name, shape in LAYERED.items() if "mlp" in name})
    for of, model in (
        (plain, scaled(plain, 0.0003)),
        (base, scaled(base, 0.0003, embed_tokens=0.0, norm=0.0)),
    ):
        assert "rules" not in advise(tmp_path, of, model)[0], (
            "none for what is not there or not changed"
        )
    shapes = {f"features.{k}.weight": (20,) if k % 2 else (20, 20) for k in range(8)}
    shapes |= {f"features.{k}.bias": (20,) for k in range(0, 8, 2)}
    base = random_model(1, F32, shapes)
    (rule,) = advise(tmp_path, base, scaled(base, 0.0003))[1]["rules"]
    matched = [
        name
        for name in shapes
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule["match"])
    ]
    assert matched == [name for name, shape in shapes.items() if len(shape) == 1], (
        "a rule is for no other tensors"
    )
    assert "features.*.bias" in rule["match"]


def test_advice_on_method_and_lambda(tmp_path: Path, monkeypatch: Any) -> None:
    base = random_model(1, F32, LAYERED)
    first, second, third = (scaled(base, 0.0005, seed) for seed in range(1, 4))
    against = {name: 2 * base[name] - first[name] for name in base}
    for models in (
        [first],
        [first, second],
        [first, second, third],
        [base, first, second],
        [first, against],
        [first, base],
    ):
        found, suggested, _ = advise(tmp_path, base, *models)
        scaled_up = len(models) > 1 and models[-1] is not base
        method = "ram" if scaled_up else "linear"
        assert (found["method"], suggested["dare"]["method"]) == ([method], method)
        (text,) = (
            advice.text
            for advice in analyze(tmp_path, base, *models).advice
            if advice.about == "method"
        )
        assert ("cancels" in text) == (models[-1] is against)
        assert (suggested["dare"].get("lambda_coeff"), "lambda" in found) == (
            1.5 if scaled_up else None,
            scaled_up,
        )
    kept: dict[str, Any]
    for kept, method in (
        ({"weights": [1, 1]}, "linear"),
        ({"lambda_coeff": 0.8}, "ram"),
        ({"method": "ram", "weights": [2, 1]}, "ram"),
    ):
        found, suggested, _ = advise(tmp_path, base, first, second, **kept)
        assert ("lambda" in found, kept.items() <= suggested["dare"].items()) == (False, True), (
            "it is the user's"
        )
        assert found["method"] == [method]
    rules = [{"match": ["*norm*"], "lambda_coeff": 0.5}]
    found, suggested, _ = advise(tmp_path, base, first, second, normalize=True, rules=rules)
    assert (suggested["dare"], suggested["rules"]) == ({"method": "ram", "drop_rate": 0}, rules)
    faint = scaled(base, 0.000008, 4)
    for kept, method in (({}, "linear"), ({"method": "ram", "threshold": 1e-7}, "ram")):
        found, suggested, _ = advise(tmp_path, base, first, faint, **kept)
        assert (found["method"], "lambda" in found) == ([method], method == "ram"), (
            "ram would lose most of it"
        )
        assert suggested["dare"].get("threshold") == kept.get("threshold")
    apart = [
        base | {name: model[name] for name in list(base)[k::2]}
        for k, model in enumerate((first, second))
    ]
    nested = base | {"model.norm.weight": second["model.norm.weight"]}
    other, huge = random_model(2, F32, LAYERED), [scaled(base, 0.02, seed) for seed in (1, 2)]
    for models in (apart, [first, nested], [first, second, nested], [first, other], huge):
        found, suggested, sure = advise(tmp_path, base, *models)
        assert "were not tried" in sure
        assert (found["method"], found["start"], "lambda" in found) == (["ram"], ["whole"], False)
        assert suggested["dare"] == {"method": "ram", "drop_rate": 0}, (
            "no model of the experiment was like these"
        )
    TUNING.small_model, count = 10**9, sum(tensor.numel() for tensor in base.values())
    assert "fairly" in advise(tmp_path, base, first, second)[2], (
        "where nothing is dropped, small models are like others"
    )
    monkeypatch.setattr("darelib.commands.analyze.advice.LARGEST_TRIED", count - 1)
    assert f"of up to {count - 1:,} parameters" in advise(tmp_path, base, first, second)[2]


def test_a_suggestion_keeps_what_else_was_set(tmp_path: Path) -> None:
    base = random_model(1, BF16, LAYERED)
    models, linear, ties = (
        [scaled(base, 0.0003, seed) for seed in (1, 2, 3)],
        {"method": "linear"},
        {"method": "ties"},
    )
    linear |= {"drop_rate": 0.0}
    kept: dict[str, Any] = {"seed": 7, "weights": [1.0, 0.5], "dtype": "bfloat16"}
    rule = {"match": ["*layers.0*"], "lambda_coeff": 0.3}
    rules = [rule | {"rescale_q": 0.8, "drop_rate": 0.3}, {"match": ["*norm*"], "drop_rate": 0.5}]
    tables = advise(tmp_path, base, *models[:2], **kept, rescale_q=0.5, rules=rules)[1]
    assert (tables["dare"], tables["rules"]) == ({**linear, **kept}, [rule]), (
        "several begin with nothing dropped"
    )
    rules[0]["drop"] = "magnitude"
    del rules[0]["rescale_q"]
    assert advise(tmp_path, base, models[0], rules=rules)[1]["rules"][:2] == [rule, rules[1]]
    kept = {"max_shard_size": "1MB", "delta_threshold": 0.01, "weights": [3, 1]}
    tables = advise(tmp_path, base, *models[:2], **kept, **ties, keep_ratio=0.5)[1]
    assert tables["dare"] == {**linear, **kept, "normalize": True}, "to ties, they were shares"
    for kept in ({"weights": [3, -1], "normalize": False}, {"weights": [3, 1], "normalize": True}):
        for method in (ties, linear):
            assert advise(tmp_path, base, *models[:2], **method, **kept)[1]["dare"] == {
                **linear,
                **kept,
            }
    kept = {"weights": [{"gradient": [0.0, 1.0]}, 3.0]}
    rules = [
        {"match": ["*layers.0*"], "weights": [0.0, {"gradient": [2.0, 1.0]}], "normalize": True}
    ]
    tables = advise(tmp_path, base, *models[:2], **kept, rules=rules)[1]
    assert (tables["dare"], tables["rules"][:1]) == ({**linear, **kept}, rules)
    tables = advise(tmp_path, base, *models[:2], **ties, **kept, rules=rules)[1]
    assert (tables["dare"], tables["rules"][:1]) == ({**linear, **kept, "normalize": True}, rules)
    usual = analyze(tmp_path, base, *models[:2])
    found = analyze(
        tmp_path, base, *models[:2], drop=["magnitude", "random"], rescale="l1", engine="auto"
    )
    for one, other, drop in zip(found.models, usual.models, ("magnitude", "random"), strict=True):
        assert one.total.relative_noise == pytest.approx(other.total.relative_noise, rel=1e-3)
        assert (one.drop, one.total.mean, one.histogram) == (
            drop,
            other.total.mean,
            other.histogram,
        )
    assert (
        "dropping 0.9 at random, instead of by magnitude, would add noise of 3 times its delta"
        in str(found)
    )
    for dropped in (
        {"drop": "magnitude", "rescale": "none"},
        {"drop": "della", "epsilon": 0.05, "rescale": "l1"},
    ):
        tables = advise(
            tmp_path, base, *models[:2], **dropped, lambda_coeff={"gradient": [1, 0.5]}
        )[1]
        assert tables["dare"] == {
            **linear,
            "method": "ram",
            "lambda_coeff": {"gradient": [1.0, 0.5]},
        }
    assert advise(tmp_path, base, models[0], rescale="l1")[1]["dare"] == {
        **linear,
        "drop_rate": 0.9,
        "rescale": "l1",
    }


def run(*words: Any) -> int:
    return dare.main([*map(str, words), "--engine", "plain"])


def test_the_command_analyses_and_suggests_what_merges(
    tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    shutil.copytree(
        HERE / "examples" / "models", tmp_path / "models", ignore=shutil.ignore_patterns("merged*")
    )
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "down")
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "models")
    flags = [
        "analyze",
        "-b",
        "base.safetensors",
        "-m",
        "rotated.safetensors",
        "covered.safetensors",
    ]
    before, printed = snapshot(tmp_path), []
    for more in ([], ["--per-tensor"], ["--json"], ["--json", "--per-tensor"]):
        assert run(*flags, *more) == 0
        printed.append(capsys.readouterr().out)
    for words in (
        "rotated and covered",
        "Advice",
        "How sure",
        "[dare]",
        "lambda_coeff",
        "by layer",
        "fc2",
        "read in",
    ):
        assert words in printed[0]
    assert ["fc2.weight" in text for text in printed] == [False, True, False, True]
    assert [model["name"] for model in json.loads(printed[2])["models"]] == flags[4:]
    assert len(json.loads(printed[3])["models"][0]["tensors"]) == 6
    assert snapshot(tmp_path) == before
    suggested = tmp_path / "link" / "a.toml"
    tokenizer = ["--force", "--tokenizer", "../chat"]
    for more, made in (([], "a_merged.safetensors"), (tokenizer, "a_merged/tokenizer.json")):
        assert run(*flags, "--write-config", suggested, "-q", *more) == 0
        assert suggested.read_text().startswith("# ")
        assert run("-c", suggested, "-q") == 0, "it finds the models from where it lies"
        assert (tmp_path / "deep" / "down" / made).exists()
    refuse(
        tmp_path,
        capsys,
        2,
        "exists already",
        "--force",
        arguments=[*flags, "--write-config", suggested],
    )
    assert (
        run(*flags, "-q", "--write-config", suggested, "--force", "-o", tmp_path / "x.safetensors")
        == 0
    )
    assert tomllib.loads(suggested.read_text())["models"]["output_file"] == str(
        tmp_path / "x.safetensors"
    )


def test_an_analysis_writes_over_no_input(
    pair: Any, models: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    flags = [
        "analyze",
        "-q",
        "-b",
        models[0],
        "-m",
        models[1],
        "--engine",
        "plain",
        "--force",
        "--write-config",
    ]
    (tmp_path / "link.toml").symlink_to(models[1])
    for name in ("base.safetensors", "math.safetensors", "link.toml"):
        refuse(tmp_path, capsys, 2, f"{name}' is the input", arguments=[*flags, tmp_path / name])
    arguments = ["analyze", "-b", pair[0], "-m", models[1], "--write-config", pair[0] / "a.toml"]
    refuse(tmp_path, capsys, 2, "a.toml' lies inside the input", arguments=arguments)
    refuse(
        tmp_path,
        capsys,
        2,
        "there is no directory",
        arguments=[*flags, tmp_path / "nowhere" / "a.toml"],
    )
    (tmp_path / f"d.toml.{os.getpid()}.partial").symlink_to(models[1])
    refuse(tmp_path, capsys, 1, "cannot write", arguments=[*flags, tmp_path / "d.toml"])


def test_wrong_words_are_named(models: list[Path], tmp_path: Path, capsys: Capture) -> None:
    for words, complaint, hint in (
        ("--threads 1 analyze", "'analyze' must be the first word", "like"),
        ("--plot a.png", "--plot means nothing to merge", "analyze"),
        ("analyse", "'analyse' is not", "analyze"),
        ("merge --per-tensor", "--per-tensor means nothing to merge", "analyze"),
        ("analyze --dry-run", "--dry-run means nothing to analyze", "merge"),
        ("analyze --verify x", "--verify means nothing to analyze", "verify"),
        ("analyze --plot a.gif", "a plot cannot be written to 'a.gif'", ".png"),
        ("analyze --plot nowhere/a.png", "there is no directory for 'nowhere/a.png'", "make it"),
    ):
        arguments = [*words.split(), "-b", models[0], "-m", models[1]]
        assert hint in refuse(tmp_path, capsys, 2, complaint, arguments=arguments).splitlines()[1]


@pytest.mark.slow
def test_any_models_are_drawn(pair: Any, tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    base = {"a.weight": torch.rand(4, 4), r"$\foo$.weight": torch.rand(4, 4), "n": torch.arange(3)}
    names = (r"$\bar$", "_hidden", "long" * 50, "same")
    models = {
        name: {key: tensor + (name != "same") for key, tensor in base.items()} for name in names
    }
    paths = save(tmp_path, base=base, **models, counts={"n": base["n"]})
    # One is given twice, one is the base, one has nothing that is merged.
    arguments, picture = (
        ["analyze", "-q", "-b", paths[0], "-m", *paths[1:], paths[1], "--plot"],
        tmp_path / "x.svg",
    )
    assert run(*arguments, picture) == 0
    for label in (
        r"Where $\bar$ changed",
        "_hidden (0% unchanged)",
        "Where longlong...",
        "mean |delta|",
    ):
        assert re.search(f"<!--  ?{re.escape(label)}", picture.read_text()), label
    assert run(*arguments[:6], "--plot", tmp_path / "picture.png") == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    inside = ["analyze", "-b", pair[0], "-m", pair[1], "--plot", pair[0] / "a.png"]
    refuse(tmp_path, capsys, 2, "a.png' lies inside the input", arguments=inside)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refuse(
        tmp_path,
        capsys,
        2,
        "plots need matplotlib",
        "install it: ",
        arguments=[*arguments, tmp_path / "a.png"],
    )


def test_a_reader_who_goes_away_costs_no_file(models: list[Path], tmp_path: Path) -> None:
    """As after `analyze --write-config x.toml | head -1`: what was asked for is done first, and printed last."""
    words = [
        sys.executable,
        HERE / "dare.py",
        "analyze",
        "-b",
        models[0],
        "-m",
        models[1],
        "--engine",
        "plain",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    written = tmp_path / "x.toml"
    done = subprocess.run(
        [*words, "--write-config", written], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, f"wrote {written}\n")
    assert tomllib.loads(written.read_text())["dare"]["method"] == "linear"
