"""Tensors that are no weights: running statistics, schedules, masks, positions."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dare
from dare import DareConfig, DareError
from tests.support import (
    BF16,
    F32,
    METHODS,
    Capture,
    Refusal,
    Tensors,
    assert_same,
    finetune,
    make_models,
    merge,
    merge_paths,
    random_model,
    run,
    run_merge,
    same_bits,
    save,
    tune,
)

MEAN = "bn.running_mean"
VARIANCE = "bn.running_var"
MASK = torch.ones(5, 5).tril()[None, None]
CONSTANTS = {
    "alphas_cumprod": torch.linspace(0.99, 0.01, 64),
    "sqrt_one_minus_alphas_cumprod": torch.linspace(0.01, 0.99, 64),
    "betas": torch.linspace(1e-4, 0.02, 64),
    "layers.0.rotary_emb.inv_freq": torch.linspace(1, 1e-4, 32),
    "h.0.attn.bias": MASK,
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "embeddings.position_ids": torch.arange(77.0)[None],
    "bn.num_batches_tracked": torch.tensor(7.0),
}


def with_statistics(seed: int) -> Tensors:
    """A model whose running statistics are its own."""
    generator = torch.Generator().manual_seed(seed)
    measured = {
        MEAN: torch.randn(300, generator=generator),
        VARIANCE: torch.rand(300, generator=generator),
    }
    return finetune(random_model(), seed) | measured


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        *(({**config, "lambda_coeff": 1.7}, (0, 0.5, 0.5)) for config in METHODS),
        ({"method": "ram"}, (0, 0.5, 0.5)),
        ({"drop": "magnitude"}, (0, 0.5, 0.5)),
        ({"weights": [3, 1]}, (0, 0.75, 0.25)),
        ({"weights": [2, -1]}, (0, 0.5, 0.5)),
        ({"method": "slerp", "slerp_t": 0.25}, (0, 0.75, 0.25)),
        ({"lambda_coeff": 0.5}, (0.5, 0.25, 0.25)),
        ({"lambda_coeff": -1}, (1, 0, 0)),
        ({"rules": [{"match": "bn.*", "weights": [1, 0]}]}, (0, 1, 0)),
        ({"rules": [{"match": "*", "drop_rate": 0.5, "lambda_coeff": 0}]}, (1, 0, 0)),
    ],
    ids=str,
)
def test_running_statistics_are_averaged_by_weights_and_lambda_whatever_the_method(
    tmp_path: Path, config: dict[str, Any], shares: tuple[float, ...]
) -> None:
    models = [*map(with_statistics, range(3))]
    config = config | {"engine": "plain"}
    merged = merge(tmp_path, *models, **config)
    for name in (MEAN, VARIANCE):
        parts = [share * model[name] for share, model in zip(shares, models, strict=True)]
        torch.testing.assert_close(merged[name], sum(parts))
    assert_same(dare.dare_merge(models[0], models[1:], DareConfig(**config)), merged)
    run("verify", "-q", tmp_path / "merged.safetensors", "--engine", "plain")


def test_statistics_are_named_once_and_count_as_no_deltas(tmp_path: Path, capsys: Capture) -> None:
    base, first = make_models(1)
    ones = torch.ones(300)
    paths = save(tmp_path, base=base | {VARIANCE: ones}, first=first | {VARIANCE: 1e6 * ones})
    out = tmp_path / "out.safetensors"
    run("-b", paths[0], "-m", paths[1], "-o", out, "--dry-run")
    assert "statistics       1" in capsys.readouterr().out
    report = run_merge(paths[0], paths[1:], out)
    [warning] = report.warnings
    assert re.search(rf"averaged.*{VARIANCE}", warning)
    assert report.models[0].parameters == sum(tensor.numel() for tensor in base.values())
    assert report.models[0].largest_delta < 1


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_training_does_not_learn_is_the_bases(tmp_path: Path, dtype: str | None) -> None:
    """Other values, types and shapes of it in a model are no obstacle, and are named."""
    base = random_model() | CONSTANTS
    changed = {name: tensor * 1.5 for name, tensor in CONSTANTS.items()}
    other = {"embeddings.position_ids": torch.arange(99)[None], "h.0.attn.bias": MASK.bool()}
    models = [finetune(random_model(), 1) | changed, finetune(random_model(), 2) | other]
    paths = save(tmp_path, base=base, one=models[0], two=models[1])
    out = tmp_path / "merged.safetensors"
    report = run_merge(paths[0], paths[1:], out, dtype=dtype, engine="plain")
    for merged in (load_file(out), dare.dare_merge(base, models, DareConfig(dtype=dtype))):
        assert_same({name: merged[name] for name in CONSTANTS}, CONSTANTS)
    assert any("differs from the base" in each and "betas" in each for each in report.warnings)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attn.bias", (64,)),
        ("attn.bias", (1, 8, 5, 5)),
        ("patch.bias", (1, 1, 5, 5)),
        ("inv_freq.weight", (9, 9)),
        ("running_mean.weight", (9, 9)),
        ("betas.0.bias", (64,)),
    ],
)
def test_names_and_shapes_of_weights_are_not_taken_for_others(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    base = random_model(shapes={name: shape})
    merged = merge(tmp_path, base, finetune(base, 1), drop_rate=0.5)[name]
    share = float((merged == base[name]).float().mean())
    assert 0.2 < share < 0.8


def test_a_rule_that_thins_what_is_no_weight_is_refused(
    tmp_path: Path, check_refused: Refusal
) -> None:
    paths = save(tmp_path, base=with_statistics(0) | CONSTANTS, model=with_statistics(1))
    rules = ("--rule", "*.bias:lambda_coeff=0.5", "--rule", "*_var:drop_rate=0.5")
    check_refused(*paths, "rule 2", VARIANCE, flags=rules)
    check_refused(*paths, "rule 1", "'betas'", flags=("--rule", "betas:drop_rate=0.5"))
    allowed = [{"match": "alphas_cumprod", "weights": [1.0]}, {"match": "bn.*", "drop_rate": 0}]
    report = run_merge(paths[0], paths[1:], tmp_path / "out.safetensors", rules=allowed)
    (unused,) = [each for each in report.warnings if each.startswith("rule")]
    assert "rule 1" in unused
    assert "copied" in unused


def test_deltas_of_what_is_no_weight_are_not_dropped() -> None:
    deltas = {name: torch.ones(300) for name in (MEAN, "betas", "layer.weight")}
    thinned = dare.dare_drop(deltas, 0.5)
    assert [bool((thinned[name] == 1).all()) for name in deltas] == [True, True, False]


def test_a_packed_model_keeps_what_is_no_weight_whole(tmp_path: Path) -> None:
    changed = {name: tensor * 1.5 for name, tensor in CONSTANTS.items()}
    model = with_statistics(1) | changed
    paths = save(tmp_path, base=with_statistics(0) | CONSTANTS, model=model)
    packed = tmp_path / "packed.safetensors"
    run("pack", "-q", "-b", paths[0], "-m", paths[1], "-o", packed, "--engine", "plain")
    out = tmp_path / "out.safetensors"
    whole, thin = (
        merge_paths(paths[0], [source], out, engine="plain") for source in (paths[1], packed)
    )
    assert_same(thin, whole)
    assert same_bits(whole[VARIANCE], model[VARIANCE])


# --- values that are not finite -------------------------------------------------------------------

INFINITE = torch.zeros(40, 40).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
KEEP = {"rules": [{"match": "mask", "lambda_coeff": 0}]}


@pytest.mark.parametrize(
    "config",
    [*METHODS, {"drop": "magnitude"}, {"dtype": "float32", "engine": "plain"}],
    ids=str,
)
@pytest.mark.parametrize("rule", [False, True])
def test_a_mask_of_infinities_is_kept_if_all_have_it_or_a_rule_says_so(
    tmp_path: Path, config: dict[str, Any], rule: bool
) -> None:
    base = random_model(dtype=BF16) | {"mask": INFINITE.to(BF16)}
    models = [finetune(base, i) | {"mask": base["mask"].clone()} for i in (1, 2)]
    settings = dict(config)
    if rule:
        models[0]["mask"] = base["mask"].T.contiguous()
        settings |= KEEP
    dtype = F32 if "dtype" in config else BF16
    merged = merge(tmp_path, base, *models, **settings)
    assert same_bits(merged["mask"], INFINITE.to(dtype))
    assert not same_bits(merged["layer.weight"], base["layer.weight"].to(dtype))
    assert_same(dare.dare_merge(base, models, DareConfig(**settings)), merged)
    run("verify", "-q", tmp_path / "merged.safetensors", "--engine", config.get("engine", "auto"))
    run("analyze", "-q", "-b", tmp_path / "base.safetensors", "-m", tmp_path / "m1.safetensors")


def test_several_threads_find_out_that_a_tensor_is_a_mask(tmp_path: Path) -> None:
    """Its infinities are at its end, in many jobs at once."""
    tune(job_elements=1 << 14, max_chunk=1 << 14, min_chunk=1 << 14)
    base = random_model() | {"mask": torch.zeros(1024, 1024)}
    base["mask"][-256:] = -torch.inf
    changed = finetune(random_model(), 1) | {"mask": base["mask"]}
    paths = save(tmp_path, base=base, math=changed)
    for _ in range(3):
        run_merge(paths[0], paths[1:], tmp_path / "out.safetensors", threads=8)
    assert same_bits(load_file(tmp_path / "out.safetensors")["mask"], base["mask"])


@pytest.mark.parametrize(
    ("values", "config"),
    [
        *(([1.0, value], config) for value in (torch.nan, torch.inf) for config in ({}, KEEP)),
        ([1e5, -torch.inf], {"dtype": "float16", "engine": "plain"}),  # which cannot hold 1e5
    ],
    ids=str,
)
def test_other_values_that_are_not_finite_are_refused_even_if_all_have_them(
    tmp_path: Path, values: list[float], config: dict[str, Any]
) -> None:
    broken = random_model() | {"mask": torch.tensor(values)}
    with pytest.raises(DareError, match="'mask'") as caught:
        merge(tmp_path, broken, broken, **config)
    assert caught.value.hint
    with pytest.raises(DareError, match="'mask'"):
        dare.dare_merge(broken, [broken], DareConfig(**config))


def test_masks_that_differ_are_refused_with_the_rule_that_keeps_the_bases(
    tmp_path: Path, check_refused: Refusal
) -> None:
    base = random_model()
    other = {"mask": INFINITE.T.contiguous()}
    paths = save(tmp_path, base=base | {"mask": INFINITE}, model=base | other)
    words = check_refused(*paths, "'mask' holds -inf at [0, 1]", "--rule 'mask:lambda_coeff=0'")
    assert "such a model is broken" not in words
