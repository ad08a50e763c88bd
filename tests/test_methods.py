"""Every way to combine, against the definition and closed forms; rules; settings that mean nothing
are refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dare import ConfigError, DareConfig, DareMerger, Rule, dare_merge
from darelib.config import RULE_SETTINGS
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    METHODS,
    Config,
    Models,
    Refusal,
    assert_same,
    define,
    examples,
    make_models,
    mask,
    merge,
    run,
    run_merge,
    same_bits,
    slow,
    tune,
    write_config,
)

VARIATIONS: list[Config] = [
    {"weights": [0.5, 0.3, 1.7]},
    {"weights": [1.0, -0.5, 0.0], "lambda_coeff": 0.7},
    {"drop_rate": [0.1, 0.9, 0.0], "lambda_coeff": -1.5},
    {"drop_rate": 0.8, "rescale_q": 0.5},
    {"drop_rate": [0.8, 0.5, 0.3], "rescale_q": [0.2, 0.6, 1.0]},
    {"drop_rate": 0.8, "rescale": False},
    {"method": "ties"},
    {"method": "ties", "drop_rate": 0.0},
    {"method": "ties", "drop_rate": 0.5, "weights": [1.0, 3.0, 0.5], "lambda_coeff": 0.4},
    {"method": "ties", "drop_rate": 0.5, "keep_ratio": 0.2},
    {"method": "ties", "drop_rate": [0.0, 0.5, 0.9], "keep_ratio": 0.7, "weights": [0.2, 0.5, 0.3]},
    {"method": "ties", "drop_rate": 0.3, "rescale_q": 0.9, "keep_ratio": 0.001},
    {"weights": [1.0, -0.5, 2.5], "normalize": True},
    {"method": "ties", "drop_rate": 0.5, "normalize": False},
    {
        "method": "ties",
        "drop_rate": 0.3,
        "weights": [1.0, -0.5, 0.2],
        "keep_ratio": 0.5,
        "normalize": False,
    },
    {"method": "slerp"},
    {"method": "slerp", "drop_rate": [0.3, 0.9], "slerp_t": 0.2, "lambda_coeff": 0.5},
]
# Each combination of types is a kernel to compile, so the usual run has one.
TYPES = [("numba", BF16), ("plain", F32), ("plain", F64)]
SLOW = [pytest.param("numba", dtype, marks=pytest.mark.slow) for dtype in (F16, F32, F64)]
few = examples(14)


def units(*sizes: float, count: int = 5000, name: str = "w") -> list[dict[str, torch.Tensor]]:
    """A base of zeros and fine-tunes of equal entries: what is not zero in a merge was kept."""
    return [{name: torch.full((count,), size, dtype=BF16)} for size in (0.0, *sizes)]


# --- against the definition and closed forms ------------------------------------------------------


@pytest.mark.parametrize(("engine", "dtype"), TYPES + SLOW)
@pytest.mark.parametrize("config", VARIATIONS, ids=str)
def test_every_setting_means_what_the_definition_says(
    tmp_path: Path, config: Config, engine: str, dtype: torch.dtype
) -> None:
    count = 2 if config.get("method") == "slerp" else 3
    base, *models = make_models(count, dtype, {"w": (50, 73), "tiny": (3,)}, 0.01)
    expected = define(base, models, **config)
    assert_same(merge(tmp_path, base, *models, engine=engine, **config), expected)
    assert_same(dare_merge(base, models, DareConfig(**config)), expected)
    # A rule for all tensors is the same as a setting for all.
    others = {name: value for name, value in config.items() if name not in RULE_SETTINGS}
    rule = {
        "match": "*",
        "lambda_coeff": 1.0,
        **{name: config[name] for name in RULE_SETTINGS if name in config},
    }
    assert_same(merge(tmp_path, base, *models, engine=engine, rules=[rule], **others), expected)


# at each position, what the models change and what comes out
@pytest.mark.parametrize("engine", ["numba", "plain", "memory"])
@pytest.mark.parametrize(
    ("normalize", "weights", "positions"),  # what the models change, and what comes out
    [
        (
            True,
            [1, 1],
            {(1, 3): 2, (4, -1): 4, (-4, 1): -4, (2, -2): 2, (-2, 2): 2, (0, 3): 3, (0, 0): 0},
        ),
        (True, [1, 3], {(1, -1): -1, (2, 4): 3.5, (4, -1): 4, (3, -1): 3, (0, 5): 5}),
        (True, [1, 0], {(1, -8): 1, (0, 3): 0, (-2, -6): -2}),
        (True, [0.3], {(1,): 1, (-2,): -2, (0,): 0}),  # one model alone is as it is
        (True, [1, 1, 2], {(1, 2, -1): 1.5, (1, 1, -2): -2, (-1, -3, 2): 2, (1, 1, 1): 1}),
        (
            False,
            [1, 1],
            {(1, 3): 4, (4, -1): 4, (-4, 1): -4, (2, -2): 2, (0, 3): 3, (0, -3): -3, (0, 0): 0},
        ),
        (False, [0.5, 3], {(1, -1): -3, (2, 4): 13, (8, -1): 4, (6, -1): 3, (0, 5): 15}),
        (
            False,
            [1, -1],
            {(1, -3): 4, (4, 1): 4, (1, 4): -4, (2, 2): 2, (0, 3): -3, (-1, 3): -4},
        ),
        (False, None, {(1, 3): 2, (4, -1): 2, (-4, 1): -2, (0, 0): 0}),
    ],
)
def test_ties_averages_or_adds_up_the_models_that_have_the_elected_sign(
    tmp_path: Path, engine: str, normalize: bool, weights: Any, positions: Any
) -> None:
    base = {"w": torch.zeros(len(positions), dtype=BF16)}
    models = [{"w": torch.tensor(column, dtype=BF16)} for column in zip(*positions, strict=True)]
    config = {"method": "ties", "drop_rate": 0, "weights": weights, "normalize": normalize}
    if engine == "memory":
        merged = dare_merge(base, models, DareConfig(**config))
    else:
        merged = merge(tmp_path, base, *models, **config, engine=engine)
    assert merged["w"].tolist() == list(positions.values())


def test_linear_normalizes_by_the_weights_of_all_models(tmp_path: Path) -> None:
    base, *models = make_models(2, BF16, size=0.1)
    del models[0]["head.weight"]
    for weights, shares in (
        ([1, 3], [0.25, 0.75]),
        ([3, -1], [1.5, -0.5]),
        ([1.7e308, 1.7e308], [0.5, 0.5]),
    ):
        expected = merge(tmp_path, base, *models, weights=shares)
        assert_same(merge(tmp_path, base, *models, weights=weights, normalize=True), expected)
    assert_same(
        merge(tmp_path, base, models[1], weights=[0.3], drop_rate=0.0, normalize=True), models[1]
    )


@few
@given(
    st.integers(0, 1000),
    st.integers(1, 3000),
    st.floats(0.001, 1),
    st.sampled_from([0, 0.5, 0.97]),
    st.sampled_from(TYPES),
)
def test_trim_finds_the_exact_threshold_of_any_tensor(
    tmp_path: Path,
    seed: int,
    count: int,
    keep_ratio: float,
    drop_rate: float,
    kind: tuple[str, torch.dtype],
) -> None:
    random = np.random.default_rng(seed)
    (engine, dtype) = kind
    values = random.standard_cauchy(count) * 2.0 ** random.integers(-30, 20)
    model = torch.from_numpy(values).clamp(-1e30, 1e30).to(dtype)
    config = {"method": "ties", "keep_ratio": keep_ratio, "drop_rate": drop_rate, "rescale": False}
    merged = merge(tmp_path, {"w": torch.zeros_like(model)}, {"w": model}, engine=engine, **config)[
        "w"
    ]
    survives = torch.from_numpy(mask(42, "w", count, drop_rate))
    sizes = model[survives].abs().sort(descending=True).values
    least = sizes[max(1, int(keep_ratio * len(sizes))) - 1] if len(sizes) else 0
    assert same_bits(
        merged, torch.where(survives & (model.abs() >= least) & (model != 0), model, 0.0)
    )


@pytest.mark.parametrize(("chunk", "threads"), [(1024, 7), slow(4096, 2), (1 << 15, 3)])
@pytest.mark.parametrize("config", METHODS, ids=str)
def test_every_method_gives_the_same_bytes_on_any_threads_and_chunks(
    tmp_path: Path, config: Config, chunk: Any, threads: int
) -> None:
    base, *models = make_models(
        2, BF16, {"a": (300, 200), "b": (7,), "c": (64, 64), "d": (5000,)}, 0.02
    )
    usual = merge(tmp_path, base, *models, threads=1, **config)
    tune(min_chunk=chunk, max_chunk=chunk, memory_chunk=chunk)
    tune(job_elements=2 * chunk, batch_elements=5000)
    for engine in ("numba", "plain"):
        assert_same(merge(tmp_path, base, *models, threads=threads, engine=engine, **config), usual)
    assert_same(dare_merge(base, models, DareConfig(**config)), usual)


# --- rules ----------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_wins(tmp_path: Path) -> None:
    names = ("model.embed_tokens", "lm_head", "layer.mlp", "layer.norm")
    base, model = ({name: units(1, count=2000)[k]["w"] for name in names} for k in range(2))
    rules = [
        {"match": ["*embed_tokens*", "lm_head"], "drop_rate": 0.5},
        {"match": "layer.norm", "lambda_coeff": 0},
        Rule("layer.*", drop_rate=0.0),
    ]
    merged = merge(tmp_path, base, model, rules=rules)
    for name in names[:2]:
        assert np.array_equal(merged[name] != 0, mask(42, name, 2000, 0.5))
    assert same_bits(merged["layer.norm"], base["layer.norm"])
    assert same_bits(merged["layer.mlp"], model["layer.mlp"])
    assert_same(dare_merge(base, [model], DareConfig(rules=rules)), merged)


LAYERS = (
    "embed.weight",
    *(f"model.layers.{k}.mlp.{k % 2}.weight" for k in range(5)),
    "blocks.0.bias",
    "norm.weight",
)
DEPTHS = dict(zip(LAYERS, (0, 0, 0.25, 0.5, 0.75, 1, 1, 0), strict=True))


@pytest.mark.parametrize(
    ("gradient", "at"),
    [
        (
            {"drop_rate": {"gradient": [0.8, 0.4, 0.8]}},
            lambda t: {"drop_rate": 0.8 - 0.8 * min(t, 1 - t)},
        ),
        (
            {"drop_rate": [0.5, {"gradient": [0.2, 0.6]}]},
            lambda t: {"drop_rate": [0.5, 0.2 + 0.4 * t]},
        ),
        (
            {
                "lambda_coeff": {"gradient": [1, 0]},
                "rescale_q": {"gradient": [0.6, 1.0]},
                "drop_rate": 0.5,
            },
            lambda t: {"lambda_coeff": 1 - t, "rescale_q": 0.6 + 0.4 * t},
        ),
        (
            {"method": "ties", "keep_ratio": {"gradient": [0.25, 0.75]}, "drop_rate": 0.5},
            lambda t: {"keep_ratio": 0.25 + t / 2},
        ),
        (
            {"method": "slerp", "slerp_t": {"gradient": [0.25, 0.75]}},
            lambda t: {"slerp_t": 0.25 + t / 2},
        ),
        ({"weights": [1, {"gradient": [-1, 3]}]}, lambda t: {"weights": [1, 4 * t - 1]}),
        (
            {"drop": "breadcrumbs", "gamma": {"gradient": [0, 0.4]}, "drop_rate": 0.5},
            lambda t: {"gamma": 0.4 * t},
        ),
        (
            {
                "drop": ["della", "magnitude"],
                "epsilon": {"gradient": [0.1, 0.3]},
                "drop_rate": 0.5,
                "rescale": "l1",
            },
            lambda t: {"epsilon": 0.1 + 0.2 * t},
        ),
        ({"lambda_coeff": {"gradient": [0.5]}}, lambda t: {"lambda_coeff": 0.5}),
    ],
)
def test_a_gradient_is_a_value_for_each_layer(tmp_path: Path, gradient: Config, at: Any) -> None:
    base, *models = make_models(2, F32, dict.fromkeys(LAYERS, (40, 50)))
    rules = [{"match": name, **at(depth)} for name, depth in DEPTHS.items()]
    plain = {name: value for name, value in gradient.items() if name not in at(0)}
    wanted = merge(tmp_path, base, *models, **plain, rules=rules, engine="plain")
    everywhere = {name: value for name, value in gradient.items() if name in at(0)}
    for config in (gradient, plain | {"rules": [{"match": "*", **everywhere}]}):
        merged = merge(tmp_path, base, *models, **config, engine="plain")
        for name in LAYERS:
            assert torch.allclose(merged[name], wanted[name], rtol=0, atol=1e-8), name
        assert_same(dare_merge(base, models, DareConfig(**config)), merged)


GRADIENT = {"gradient": [0.9, 0.5]}
PATTERNS = ("layer.*", "*nothing*", "layer.bias", "ead.we")


@pytest.mark.parametrize(
    ("config", "patterns"),
    [
        ({"drop_rate": GRADIENT}, ["number of a layer"]),
        ({"rules": [{"match": "*", "drop_rate": [GRADIENT]}]}, ["number of a layer"]),
        (
            {"rules": [{"match": pattern, "drop_rate": 0.5} for pattern in PATTERNS]},
            [
                r"rule 2 \('\*nothing\*'\) matches no tensor$",
                r"rule 3 \('layer.bias'\) matches only .* an earlier rule",
                r"rule 4 \('ead.we'\) matches no tensor; .*'\*ead.we\*'",
            ],
        ),
        ({"rescale": False}, ["10 times too weak"]),
        ({"rescale": False, "drop_rate": 0.0}, []),
        (
            {"rescale": False, "drop_rate": 0.0, "rules": [{"match": "*", "drop_rate": 0.5}]},
            ["2 times too weak"],
        ),
    ],
    ids=str,
)
def test_settings_that_do_nothing_or_harm_are_warned_about(
    models: Models, tmp_path: Path, config: Config, patterns: list[str]
) -> None:
    report = run_merge(
        models[0], models[1:2], tmp_path / "out.safetensors", delta_threshold=1, **config
    )
    assert len(report.warnings) == len(patterns), report.warnings
    assert all(map(re.search, patterns, report.warnings)), report.warnings


def test_rules_from_toml_and_flags_are_the_same_and_flags_come_first(
    models: list[Path], tmp_path: Path
) -> None:
    rule = '[[rules]]\nmatch = ["layer.*", "scalar"]\ndrop_rate = [0.5, 0.25]\nlambda_coeff = 0.5\n'
    config = write_config(tmp_path, rule, verbose=False)
    output = tmp_path / "f.safetensors"
    run("-c", config)
    settings = ":drop_rate=[0.5, 0.25], lambda_coeff=0.5"
    flags = ["--rule", f"layer.*{settings}", "--rule", f"scalar{settings}", "-o", str(output)]
    run("-q", "-b", models[0], "-m", models[1], models[2], *flags)
    assert_same(load_file(output), load_file(tmp_path / "out.safetensors"))
    run("-c", config, "--rule", "*:lambda_coeff=0", "--force")
    assert_same(load_file(tmp_path / "out.safetensors"), load_file(models[0]))


# --- settings that mean nothing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "count", "complaint"),
    [
        ({"method": "slerp"}, 3, "method slerp takes 2 models, not 3"),
        ({"method": "slerp"}, 1, "method slerp takes 2 models, not 1"),
        ({"method": "model_stock"}, 1, "method model_stock takes at least 2 models, not 1"),
        ({"method": "nearswap"}, 2, "method nearswap takes 1 model"),
        ({"slerp_t": 0.5}, 2, "slerp_t means nothing to method linear"),
        ({"max_iter": 5}, 2, "max_iter means nothing to method linear"),
        ({"ridge": 0.5}, 2, "ridge means nothing to method linear"),
        ({"method": "sce", "swap_t": 0.1}, 2, "swap_t means nothing to method sce"),
        ({"method": "karcher", "tol": 0}, 2, "tol must be a number above 0"),
        ({"method": "karcher", "max_iter": -1}, 2, "max_iter must be a whole number from 0 up"),
        ({"method": "ramplus", "boost": -1}, 2, "boost must be a number from 0 up"),
        ({"method": "wudi", "ridge": 0}, 2, "ridge must be a number from 1e-12 to 1e12"),
        ({"method": "wudi", "ridge": 1e300}, 2, "ridge must be a number from 1e-12 to 1e12"),
        ({"rules": [{"match": "*", "slerp_t": 0.5}]}, 2, "slerp_t means nothing to method linear"),
        ({"keep_ratio": 0.5}, 2, "keep_ratio means nothing to method linear"),
        ({"rules": [{"match": "*", "keep_ratio": 0.5}]}, 2, "keep_ratio means nothing"),
        ({"weights": [1.0]}, 2, "weights has 1 value for 2 models"),
        ({"rules": [{"match": "*", "weights": [1.0]}]}, 2, "rule 1: weights has 1 value"),
        ({"weights": [1.0, 1.0], "method": "slerp"}, 2, "weights mean nothing to method slerp"),
        ({"weights": [1.0, 2.0], "method": "karcher"}, 2, "weights mean nothing to method karcher"),
        ({"weights": [1.0, -1.0], "method": "multislerp"}, 2, "the weights add up to 0"),
        ({"weights": [1.0, -1.0], "method": "wudi"}, 2, "must not be negative"),
        ({"weights": [0.0, 0.0], "method": "ties"}, 2, "all weights are 0"),
        ({"weights": [0.0, 0.0]}, 2, "all weights are 0"),
        ({"weights": [1.0, -1.0], "method": "ties"}, 2, "must not be negative"),
        ({"weights": [1.0, -1.0], "method": "ties", "normalize": True}, 2, "must not be negative"),
        (
            {
                "method": "ties",
                "rules": [{"match": "*", "weights": [1, {"gradient": [1, -1, 1]}]}],
            },
            2,
            "rule 1: ties weights",
        ),
        ({"weights": [0.1, 0.2, -0.3], "normalize": True}, 3, "the weights add up to 0"),
        ({"normalize": False, "method": "slerp"}, 2, "normalize means nothing to method slerp"),
        ({"rescale_q": 0.5, "rescale": False}, 2, "rescale_q means nothing when rescale is off"),
        ({"rescale": "l1", "rescale_q": 0.6}, 2, "rescale_q means nothing when rescale is l1"),
        (
            {"rules": [{"match": "*", "rescale": "none", "rescale_q": 0.6}]},
            2,
            "rule 1: rescale_q means nothing",
        ),
        ({"rescale_q": 0.05}, 2, "rescale_q 0.05 is below 1 - drop_rate = 0.1"),
        (
            {"rescale_q": 0.5, "drop_rate": {"gradient": [0.9, 0.4, 0.9]}},
            2,
            "rescale_q 0.5 is below 1 - drop_rate = 0.6",
        ),
        (
            {"rescale_q": 0.2, "rules": [{"match": "*", "drop_rate": 0.5}]},
            2,
            "rescale_q 0.2 is below",
        ),
        ({"rescale_q": [0.2, 0.2, 0.2]}, 2, "rescale_q has 3 values for 2 models"),
        ({"drop_rate": [0.5]}, 2, "drop_rate has 1 value for 2 models"),
        ({"rules": [{"match": "*", "drop_rate": [0.1, 0.2, 0.3]}]}, 2, "rule 1: drop_rate has 3"),
        ({"rules": 5}, 2, "rules must be a list"),
        ({"rules": ["*"]}, 2, "rule 1 must be a table"),
        ({"rules": [{"match": "*", "drop_rat": 0.5}]}, 2, "rule 1 has no key 'drop_rat'"),
        ({"rules": [{"match": "*", "drop_rate": 2}]}, 2, "rule 1: drop_rate must be a number"),
        ({"rules": [{"drop_rate": 0.5}]}, 2, "rule 1: match"),
        ({"rules": [{"match": []}]}, 2, "rule 1: match"),
        ({"rules": [{"match": "*"}]}, 2, "rule 1: it sets nothing"),
        ({"drop": "magnitude", "method": "slerp"}, 2, "method slerp goes with drop random only"),
        ({"drop": "della", "method": "arcee_fusion"}, 1, "goes with drop random only"),
        (
            {
                "drop": ["random", "della"],
                "drop_rate": 0.5,
                "method": "ties",
                "keep_ratio": 0.5,
            },
            2,
            "not della",
        ),
        ({"drop": "magnitude", "rescale": True}, 2, "rescale true means nothing to drop magnitude"),
        ({"drop": "breadcrumbs", "rescale": "expectation"}, 2, "rescale expectation means nothing"),
        (
            {"rules": [{"match": "*", "drop": "magnitude"}], "rescale": True},
            2,
            "rule 1: rescale true means",
        ),
        ({"drop": "della", "drop_rate": 0.5, "rescale_q": 0.6}, 2, "rescale_q means nothing"),
        ({"gamma": 0.1}, 2, "gamma means nothing to drop random"),
        ({"epsilon": 0.1, "drop": ["magnitude", "random"]}, 2, "drop magnitude and random"),
        (
            {"rules": [{"match": "*", "gamma": 0.1}, {"match": "*", "drop": "breadcrumbs"}]},
            2,
            "rule 1: gamma",
        ),
        ({"drop": "della"}, 2, "with drop_rate 0.9 and epsilon 0.15"),
        (
            {
                "drop": "della",
                "drop_rate": 0.5,
                "epsilon": {"gradient": [0.1, 0.45, 0.499]},
                "rules": [{"match": "*", "drop_rate": 0.52}],
            },
            2,
            "rule 1: with drop_rate 0.52 and epsilon 0.499",
        ),
        ({"drop": ["random"]}, 2, "drop has 1 value for 2 models"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_together_are_refused(
    config: Config, count: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        DareMerger("base.safetensors", ["model.safetensors"] * count, DareConfig(**config))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("rule", "complaint"),
    {
        "nonsense": "no colon",
        "*:drop_rate": "PATTERN:SETTING=VALUE",
        "*:drop=della": 'drop="magnitude"',
        "*:drop_rate=3": "drop_rate must be a number",
        "*:seed=3": "has no key 'seed'",
        '[[rules]]\nmatch = "*"\ndrops = 1\n': "rule 1 has no key 'drops'",
        '[rules]\nmatch = "*"\n': "write [[rules]]",
    }.items(),
)
def test_wrong_rules_are_named_with_the_flag_or_the_file(
    tmp_path: Path, refused: Refusal, rule: str, complaint: str
) -> None:
    if "\n" in rule:
        refused(2, ("config.toml", complaint), "-c", write_config(tmp_path, rule))
    else:
        refused(2, (repr(rule), complaint), "--rule", rule)
