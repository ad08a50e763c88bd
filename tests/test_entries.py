"""The methods that decide about single entries: nearswap, sce, ramplus and arcee_fusion, against
formulas of their own, and with the same bytes however they are merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dare import DareConfig, dare_merge
from tests.support import (
    BF16,
    F32,
    F64,
    Config,
    Refusal,
    Tensors,
    assert_same,
    examples,
    finetune,
    make_models,
    mask,
    merge,
    run,
    same_bits,
    save_models,
    slow,
    tensors_in,
    tune,
)

SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (60, 200),
    "bias": (61,),
    "conv.weight": (3, 4, 3, 3),
    "scalar": (),
    "wide.weight": (2, 1500),  # rows that are longer than a chunk
}
ALONE = ("nearswap", "arcee_fusion")  # take one model
NEAR: Config = {"method": "nearswap", "drop_rate": 0.0, "swap_t": 0.005}
SCE: Config = {"method": "sce", "drop_rate": 0.0}
PLUS: Config = {"method": "ramplus", "drop_rate": 0.0, "threshold": 0.01}
FUSION: Config = {"method": "arcee_fusion", "drop_rate": 0.0}
CONFIGS: list[Config] = [
    NEAR,
    {**NEAR, "drop_rate": 0.5, "lambda_coeff": 0.7},
    {**NEAR, "drop": "magnitude", "drop_rate": 0.5, "rescale": "l1"},
    SCE,
    {**SCE, "keep_ratio": 0.3},
    {**SCE, "drop_rate": [0.5, 0.1, 0.9], "keep_ratio": 0.3},
    PLUS,
    {**PLUS, "drop_rate": 0.5, "weights": [1, 2, 3], "boost": 0.5, "boost_limit": 0.9},
    FUSION,
    {**FUSION, "drop_rate": 0.5},
]


def models_for(config: Config, dtype: torch.dtype = F32, size: float = 0.02) -> list[Tensors]:
    return make_models(1 if config["method"] in ALONE else 3, dtype, SHAPES, size)


# --- formulas -------------------------------------------------------------------------------------


def near(base: np.ndarray, deltas: list[np.ndarray], config: Config) -> np.ndarray:
    share = config["swap_t"] / np.maximum(abs(deltas[0]), 1e-6)
    return np.clip(share, 0, 1) * deltas[0]


def sce(base: np.ndarray, deltas: list[np.ndarray], config: Config) -> np.ndarray:
    stack = np.stack(deltas)
    ratio = config.get("keep_ratio", 1.0)
    if ratio < 1:
        variance = stack.var(axis=0)
        number = int(np.count_nonzero(variance) * ratio)
        largest = np.sort(variance, axis=None)[::-1]
        stack = stack * (variance >= largest[number - 1] if number else np.zeros_like(variance))
    squares = np.array([(each**2).mean() for each in stack])
    weights = np.full(len(stack), 1 / len(stack))
    if squares.sum() >= 1e-6:
        weights = squares / squares.sum()
    sign = np.where(stack.sum(axis=0) >= 0, 1, -1)
    own = weights.reshape(-1, *(1,) * sign.ndim) * (np.sign(stack) == sign)
    return (own * stack).sum(axis=0) / np.maximum(own.sum(axis=0), 1e-6)


def plus(base: np.ndarray, deltas: list[np.ndarray], config: Config) -> np.ndarray:
    changed = np.stack([abs(delta) >= config["threshold"] for delta in deltas])
    number = changed.sum(axis=0)
    total = np.zeros_like(base)
    for delta, own in zip(deltas, changed, strict=True):
        alone = int((own & (number == 1)).sum())
        shared = int((own & (number > 1)).sum())
        factor = 1 + 0.1 * min(shared / max(alone, 1e-5), 0.2)
        total += np.where(own, delta * np.where(number == 1, factor, 1 / np.maximum(number, 1)), 0)
    return total


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) + 1e-8


def fusion(base: np.ndarray, deltas: list[np.ndarray], config: Config) -> np.ndarray:
    delta = np.atleast_1d(deltas[0])
    before = softmax(np.atleast_1d(base))
    after = softmax(np.atleast_1d(base) + delta)
    divergence = (after * np.log(after / before)).sum(axis=-1, keepdims=True)
    importance = abs(delta) * divergence
    ordered = np.sort(importance, axis=None)
    low, middle, high = (ordered[int(q * (ordered.size - 1))] for q in (0.25, 0.5, 0.75))
    least = middle + 1.5 * (high - low)
    # What lies on the edge may fall to either side.
    assert np.abs(importance / least - 1).min() > 1e-5 if least else True
    return np.where(importance >= least, delta, 0).reshape(base.shape)


FORMULAS: dict[str, Callable[[np.ndarray, list[np.ndarray], Config], np.ndarray]] = {
    "nearswap": near,
    "sce": sce,
    "ramplus": plus,
    "arcee_fusion": fusion,
}


@pytest.mark.parametrize("config", [NEAR, SCE, {**SCE, "keep_ratio": 0.3}, PLUS, FUSION], ids=str)
@pytest.mark.parametrize("size", [0.02, 0.3])
def test_a_merge_is_what_the_formula_says(tmp_path: Path, config: Config, size: float) -> None:
    base, *models = models_for(config, size=size)
    merged = merge(tmp_path, base, *models, engine="plain", **config)
    for name, tensor in base.items():
        start = tensor.double().numpy()
        deltas = [(model[name] - tensor).double().numpy() for model in models]
        expected = start + FORMULAS[config["method"]](start, deltas, config)
        np.testing.assert_allclose(merged[name].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_fusion_finds_the_divergence_of_rows_of_any_size(tmp_path: Path, scale: float) -> None:
    """Logarithms and powers of our own are those of a library, as far as it matters."""
    rng = np.random.default_rng(7)
    base = rng.normal(0, scale, (40, 57))
    delta = rng.normal(0, 0.1, (40, 57))
    tensors = [{"w": torch.from_numpy(each)} for each in (base, base + delta)]
    merged = merge(tmp_path, *tensors, engine="plain", **FUSION)["w"].numpy()
    expected = base + fusion(base, [delta], FUSION)
    assert 0 < np.count_nonzero(expected != base) < base.size
    np.testing.assert_allclose(merged, expected, rtol=1e-12)


# --- the same bytes -------------------------------------------------------------------------------


# Each kernel takes seconds to compile, so the usual run leaves them to the slow one.
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("engine", "dtype"), [("plain", BF16), *(slow("numba", dtype) for dtype in (BF16, F32, F64))]
)
def test_files_and_memory_engines_threads_and_chunks_give_the_same_bytes(
    tmp_path: Path, config: Config, engine: str, dtype: torch.dtype
) -> None:
    base, *models = models_for(config, dtype)
    usual = merge(tmp_path, base, *models, threads=1, engine="plain", **config)
    tune(min_chunk=1024, max_chunk=1024, memory_chunk=2048, job_elements=2048, batch_elements=5000)
    assert_same(merge(tmp_path, base, *models, threads=3, engine=engine, **config), usual)
    assert_same(dare_merge(base, models, DareConfig(**config)), usual)


@examples(20)
@given(st.data())
def test_any_tensors_give_the_same_bytes_in_files_and_in_memory(
    tmp_path: Path, data: st.DataObject
) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    shape = data.draw(st.lists(st.integers(1, 40), max_size=3))
    size = data.draw(st.sampled_from([1e-4, 0.02, 3.0]))
    count = 1 if config["method"] in ALONE else 3
    base, *models = make_models(
        count, F32, {"w": tuple(shape)}, size, seed=data.draw(st.integers(0, 99))
    )
    files = merge(tmp_path, base, *models, engine="plain", **config)
    assert_same(dare_merge(base, models, DareConfig(**config)), files)


# --- what must hold -------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_models_equal_to_the_base_change_nothing(config: Config) -> None:
    base, *models = models_for(config)
    same = [base] * len(models)
    assert_same(dare_merge(base, same, DareConfig(**config, any_base=True)), base)
    assert_same(dare_merge(base, models, DareConfig(**{**config, "lambda_coeff": 0.0})), base)


def test_sce_without_a_difference_or_with_one_model_is_that_model() -> None:
    base, model = make_models(1, F32, SHAPES, 0.02)
    assert_same(dare_merge(base, [model], DareConfig(**SCE)), model)
    merged = dare_merge(base, [model, model], DareConfig(**SCE))
    for name in base:
        torch.testing.assert_close(merged[name], model[name], rtol=1e-6, atol=1e-8)
    # Where no entry has a variance, none is selected.
    few = DareConfig(**SCE, keep_ratio=0.9)
    assert_same(dare_merge(base, [model, model], few), base)


def test_sce_selects_all_entries_that_equal_the_last_one() -> None:
    base = {"w": torch.zeros(6)}
    models = [{"w": torch.tensor(row)} for row in ([4.0, 1, 1, 0, 0, 2], [0.0, 0, 0, 0, 1, 2])]
    merged = dare_merge(base, models, DareConfig(**SCE, keep_ratio=0.5))
    assert merged["w"].tolist() == [4, 1, 1, 0, 1, 0]


def test_ramplus_without_a_boost_is_ram() -> None:
    base, *models = make_models(3, BF16, SHAPES, 0.02)
    ram = {**PLUS, "method": "ram"}
    merged = dare_merge(base, models, DareConfig(**PLUS, boost=0.0))
    assert_same(merged, dare_merge(base, models, DareConfig(**ram)))
    boosted = dare_merge(base, models, DareConfig(**PLUS))
    assert not same_bits(boosted["a.weight"], merged["a.weight"])


def test_a_drop_thins_what_fusion_chooses() -> None:
    base, model = make_models(1, F32, {"w": (40, 70)}, 0.02)
    whole = dare_merge(base, [model], DareConfig(**FUSION))["w"] - base["w"]
    config = DareConfig(**{**FUSION, "drop_rate": 0.5, "rescale": False})
    thinned = dare_merge(base, [model], config)["w"] - base["w"]
    kept = torch.from_numpy(mask(42, "w", 40 * 70, 0.5)).reshape(40, 70)
    assert torch.equal(thinned, torch.where(kept, whole, 0.0))


@pytest.mark.parametrize("engine", ["plain", slow("numba")])
def test_a_tensor_that_no_model_has_stays_as_it_is(tmp_path: Path, engine: str) -> None:
    for config in (NEAR, SCE, PLUS, FUSION):
        base, *models = models_for(config, BF16)
        for model in models:
            del model["a.weight"]
        merged = merge(tmp_path, base, *models, engine=engine, **config)
        assert same_bits(merged["a.weight"], base["a.weight"])


# --- the front door -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "nearswap"], "takes 1 model"),
        (["--method", "arcee_fusion"], "takes 1 model"),
        (["--method", "sce", "--swap-t", "0.1"], "swap_t means nothing to method sce"),
        (["--method", "ramplus", "--boost", "-1"], "boost must be a number from 0 up"),
        (["--boost-limit", "1"], "boost_limit means nothing to method linear"),
        (["--method", "sce", "--weights", "1", "2"], "weights mean nothing to method sce"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, refused: Refusal, flags: list[str], words: str
) -> None:
    paths = save_models(tmp_path, make_models(2, BF16, {"w": (5,)}))
    refused(2, words, "-b", paths[0], "-m", *paths[1:], "-o", tmp_path / "out.safetensors", *flags)


def test_fusion_refuses_drops_by_size(tmp_path: Path, refused: Refusal) -> None:
    base, model = save_models(tmp_path, make_models(1, BF16, {"w": (5,)}))
    words = ["-b", base, "-m", model, "-o", tmp_path / "out.safetensors"]
    refused(2, "goes with drop random only", *words, "--method", "arcee_fusion", "--drop", "della")


@pytest.mark.parametrize("config", [NEAR, {**SCE, "keep_ratio": 0.3}, PLUS, FUSION], ids=str)
def test_a_merged_directory_says_how_and_makes_itself_again(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    base, *models = models_for(config, BF16)
    merged = merge(tmp_path, base, *models, engine="plain", **config)
    paths = [tmp_path / "base.safetensors", *(tmp_path / f"m{i}.safetensors" for i in range(3))]
    paths = paths[: 1 + len(models)]
    flags: list[Any] = [
        word
        for name, value in config.items()
        for word in (f"--{name.replace('_', '-')}", value)
        if name != "drop"
    ]
    words = ["-b", paths[0], "-m", *paths[1:], "-o", tmp_path / "out", *flags]
    plain = ("--engine", "plain")
    run(*words, *plain)
    assert_same(tensors_in(tmp_path / "out"), merged)
    assert f"method {config['method']}" in capsys.readouterr().out
    run("verify", tmp_path / "out", *plain, "--base", paths[0], "--merge", *paths[1:])
    assert config["method"] in (tmp_path / "out" / "README.md").read_text()


def test_a_finetune_of_a_finetune_is_boosted_as_files_of_other_types_are(tmp_path: Path) -> None:
    base, *models = make_models(2, BF16, SHAPES, 0.02)
    wide = {name: tensor.float() for name, tensor in finetune(models[0], 5, 0.02).items()}
    config = {**PLUS, "dtype": "float32"}
    merged = merge(tmp_path, base, *models, wide, engine="plain", **config)
    assert_same(dare_merge(base, [*models, wide], DareConfig(**config)), merged)
