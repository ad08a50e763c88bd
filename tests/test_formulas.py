"""Methods against formulas of their own, on whole vectors: Model Stock, arcs, means on a sphere,
and those that decide about single entries; the same bytes however they are merged."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dare import DareConfig, dare_merge
from tests.support import (
    BF16,
    F32,
    F64,
    Config,
    Tensors,
    assert_same,
    define,
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

Vectors = np.ndarray  # one in each row
SHAPES: dict[str, tuple[int, ...]] = {"w": (40, 73), "tiny": (3,)}


# --- the formulas, on whole vectors ---------------------------------------------------------------


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def stock(deltas: Vectors, **_: Any) -> Vectors:
    """The paper's ratio, of the mean cosine, with mergekit's least product of lengths."""
    n = len(deltas)
    pairs = list(itertools.combinations(deltas, 2))
    lengths = [np.linalg.norm(a) * np.linalg.norm(b) for a, b in pairs]
    cosine = np.mean([a @ b / max(s, 1e-6) for (a, b), s in zip(pairs, lengths, strict=True)])
    return n * cosine / (1 + (n - 1) * cosine) * deltas.mean(0)


def slerp(ends: Vectors, slerp_t: float = 0.5, **_: Any) -> Vectors:
    shares = np.array([1 - slerp_t, slerp_t])
    is_line = abs(unit(ends[0]) @ unit(ends[1])) > 0.9995
    return shares @ ends if is_line else arc(ends, shares)


def arc(ends: Vectors, weights: Any = (1, 1), **_: Any) -> Vectors:
    one, other = ends
    angle = np.arccos(unit(one) @ unit(other))
    t = weights[1] / sum(weights)
    return (np.sin((1 - t) * angle) * one + np.sin(t * angle) * other) / np.sin(angle)


def sphere(ends: Vectors, weights: Any = None, normalize: bool = True, **_: Any) -> Vectors:
    """As mergekit writes it, with the tangents that add up to 0."""
    shares = np.ones(len(ends)) if weights is None else np.array(weights)
    shares = shares / shares.sum() if normalize else shares
    units = ends / (np.linalg.norm(ends, axis=1, keepdims=True) + 1e-8)
    mean = unit(shares @ units)
    tangents = units - np.outer(units @ mean, mean)
    way = shares @ tangents
    size = np.linalg.norm(way) + 1e-8
    turned = np.cos(size) * mean + np.sin(size) / size * way
    return turned * (shares @ np.linalg.norm(ends, axis=1))


def karcher(ends: Vectors, max_iter: int = 10, tol: float = 1e-5, **_: Any) -> Vectors:
    lengths = np.linalg.norm(ends, axis=1)
    if not (lengths > tol).any():
        return 0 * ends[0]
    units = unit(ends[lengths > tol])
    mean = units.mean(0)
    mean = unit(units[0] if np.linalg.norm(mean) < tol else mean)  # they cancel out
    for _ in range(max_iter):
        cosines = units @ mean
        angles = np.arccos(np.clip(cosines, -1, 1))
        factors = [a / np.sin(a) / len(units) if a >= tol else 0 for a in angles]
        tangent = factors @ (units - np.outer(cosines, mean))
        size = np.linalg.norm(tangent)
        if size < tol:
            break
        mean = unit(np.cos(size) * mean + np.sin(size) * tangent / size)
    return mean * lengths.mean()


def near(deltas: Vectors, swap_t: float = 0, **_: Any) -> Vectors:
    share = swap_t / np.maximum(abs(deltas[0]), 1e-6)
    return np.clip(share, 0, 1) * deltas[0]


def sce(deltas: Vectors, keep_ratio: float = 1.0, **_: Any) -> Vectors:
    if keep_ratio < 1:
        variance = deltas.var(axis=0)
        number = int(np.count_nonzero(variance) * keep_ratio)
        largest = np.sort(variance)[::-1]
        deltas = deltas * (variance >= largest[number - 1] if number else 0 * variance)
    squares = (deltas**2).mean(axis=1, keepdims=True)
    weights = np.full_like(squares, 1 / len(deltas))
    if squares.sum() >= 1e-6:
        weights = squares / squares.sum()
    sign = np.where(deltas.sum(axis=0) >= 0, 1, -1)
    own = weights * (np.sign(deltas) == sign)
    return (own * deltas).sum(axis=0) / np.maximum(own.sum(axis=0), 1e-6)


def plus(deltas: Vectors, threshold: float = 0, **_: Any) -> Vectors:
    changed = abs(deltas) >= threshold
    number = changed.sum(axis=0)
    total = np.zeros(deltas.shape[1])
    for delta, own in zip(deltas, changed, strict=True):
        alone = int((own & (number == 1)).sum())
        shared = int((own & (number > 1)).sum())
        factor = 1 + 0.1 * min(shared / max(alone, 1e-5), 0.2)
        total += np.where(own, delta * np.where(number == 1, factor, 1 / np.maximum(number, 1)), 0)
    return total


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) + 1e-8


def fusion(deltas: Vectors, base: np.ndarray, **_: Any) -> Vectors:
    delta = deltas[0].reshape(base.shape)
    before = softmax(base)
    after = softmax(base + delta)
    divergence = (after * np.log(after / before)).sum(axis=-1, keepdims=True)
    importance = abs(delta) * divergence
    ordered = np.sort(importance, axis=None)
    low, middle, high = (ordered[int(q * (ordered.size - 1))] for q in (0.25, 0.5, 0.75))
    least = middle + 1.5 * (high - low)
    # What lies on the edge may fall to either side.
    assert np.abs(importance / least - 1).min() > 1e-5
    return np.where(importance >= least, delta, 0).reshape(-1)


FORMULAS: dict[str, Callable[..., Vectors]] = {
    "slerp": slerp,
    "model_stock": stock,
    "nuslerp": arc,
    "multislerp": sphere,
    "karcher": karcher,
    "nearswap": near,
    "sce": sce,
    "ramplus": plus,
    "arcee_fusion": fusion,
}
ALONE = ("nearswap", "arcee_fusion")  # take one model
NEAR: Config = {"method": "nearswap", "swap_t": 0.005}
SCE: Config = {"method": "sce", "keep_ratio": 0.3}
PLUS: Config = {"method": "ramplus", "threshold": 0.01}
FUSION: Config = {"method": "arcee_fusion"}
CASES: list[Any] = [
    (2, {"method": "slerp", "drop_rate": 0.5}),
    (2, {"method": "slerp", "slerp_t": 0.3, "lambda_coeff": 0.5}),
    (2, {"method": "slerp", "slerp_t": 1.0, "drop_rate": 0.9}),
    slow(2, {"method": "model_stock"}),
    (4, {"method": "model_stock", "drop_rate": 0.3, "lambda_coeff": 0.7}),
    (3, {"method": "model_stock", "drop": "magnitude", "drop_rate": [0.1, 0.5, 0.9]}),
    (2, {"method": "nuslerp", "weights": [1, 3]}),
    slow(2, {"method": "nuslerp", "weights": [3, -1], "origin": "zero"}),
    (2, {"method": "nuslerp", "drop": "della", "drop_rate": 0.5, "rescale": "l1"}),
    slow(3, {"method": "multislerp"}),
    (3, {"method": "multislerp", "weights": [1, 2, -0.5], "origin": "zero", "drop_rate": 0.5}),
    (4, {"method": "multislerp", "weights": [0.5, 2, 0.3, 1], "normalize": False}),
    slow(3, {"method": "karcher", "lambda_coeff": 0.5}),
    (4, {"method": "karcher", "origin": "base", "drop": "breadcrumbs", "drop_rate": 0.5}),
    slow(3, {"method": "karcher", "max_iter": 1, "drop_rate": 0.9}),
    (3, {"method": "karcher", "origin": "base", "tol": 0.3, "drop_rate": 0.2}),
    slow(2, {"method": "karcher", "max_iter": 0}),
    slow(24, {"method": "karcher"}),  # whose sums by tile take more room than a chunk's result
    (1, NEAR),
    (1, {**NEAR, "drop": "magnitude", "drop_rate": 0.5, "rescale": "l1", "lambda_coeff": 0.7}),
    (3, {"method": "sce"}),
    (3, SCE),
    (3, {**SCE, "drop_rate": [0.5, 0.1, 0.9]}),
    (3, PLUS),
    (1, FUSION),
]
# What the formulas above do not have.
MORE: list[Any] = [
    (3, {**PLUS, "drop_rate": 0.5, "weights": [1, 2, 3], "boost": 0.5, "boost_limit": 0.9}),
    (1, {**FUSION, "drop_rate": 0.5}),
]


@pytest.mark.parametrize("size", [0.05, slow(0.0001), slow(0.001), slow(1.0)])
@pytest.mark.parametrize(("count", "config"), CASES, ids=str)
def test_each_equals_its_formula_within_rounding(
    tmp_path: Path, count: int, config: Config, size: float
) -> None:
    config = {"drop_rate": 0.0} | config
    base, *models = make_models(count, F64, SHAPES, size)
    merged = merge(tmp_path, base, *models, engine="plain", **config)
    # What is left of each model alone.
    own = ("drop", "drop_rate", "rescale")
    thinned = []
    for i, model in enumerate(models):
        drops = {name: config[name] for name in own if name in config}
        if isinstance(drops["drop_rate"], list):
            drops["drop_rate"] = drops["drop_rate"][i]
        thinned.append(define(base, [model], seed=42 + i, **drops))
    default = "zero" if config["method"] in ("slerp", "karcher") else "base"
    for name, tensor in merged.items():
        start = base[name].numpy().reshape(-1)
        origin = start if config.get("origin", default) == "base" else np.zeros_like(start)
        ends = np.stack([end[name].numpy().reshape(-1) for end in thinned]) - origin
        if not ends.any(1).all():
            continue  # where all of a small tensor was dropped: below
        made = FORMULAS[config["method"]](ends, base=base[name].numpy(), **config)
        wanted = start + config.get("lambda_coeff", 1.0) * (origin + made - start)
        np.testing.assert_allclose(tensor.numpy().reshape(-1), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_fusion_finds_the_divergence_of_rows_of_any_size(scale: float) -> None:
    """Logarithms and powers of our own are those of a library, as far as it matters."""
    rng = np.random.default_rng(7)
    base = rng.normal(0, scale, (40, 57))
    delta = rng.normal(0, 0.1, (40, 57))
    expected = base + fusion(delta[None], base).reshape(base.shape)
    assert 0 < np.count_nonzero(expected != base) < base.size
    start, model = ({"w": torch.from_numpy(each)} for each in (base, base + delta))
    merged = dare_merge(start, [model], DareConfig(**FUSION, drop_rate=0.0))["w"]
    np.testing.assert_allclose(merged, expected, rtol=1e-12)


# Each kernel takes seconds to compile, so the usual run leaves them to the slow one.
@pytest.mark.parametrize(
    ("engine", "dtype"), [("plain", BF16), *(slow("numba", dtype) for dtype in (BF16, F32, F64))]
)
@pytest.mark.parametrize(("count", "config"), [*CASES, *MORE], ids=str)
def test_every_engine_chunk_and_thread_gives_the_bits_of_the_definition(
    tmp_path: Path, count: int, config: Config, engine: str, dtype: torch.dtype
) -> None:
    shapes = {"a": (90, 73), "b": (7,), "c": (3, 4, 3, 3), "wide": (2, 1500), "scalar": ()}
    base, *models = make_models(count, dtype, shapes, 0.02)
    del models[0]["c"]
    expected = define(base, models, **config)
    tune(min_chunk=1024, max_chunk=1024, memory_chunk=2048, job_elements=2048, batch_elements=999)
    for threads in (1, 3):
        merged = merge(tmp_path, base, *models, engine=engine, threads=threads, **config)
        assert_same(merged, expected)
    assert_same(dare_merge(base, models, DareConfig(**config)), expected)


# --- what has no angle, nothing to choose from, or no room ----------------------------------------


def lines(*values: Any, dtype: torch.dtype = F32) -> list[Tensors]:
    return [{"w": torch.tensor(each, dtype=dtype)} for each in values]


@pytest.mark.parametrize(
    ("config", "models", "expected"),
    [
        ({"method": "slerp", "slerp_t": 0.25}, ([0, 0], [1, 0]), [0.25, 0]),
        # A mean of opposite deltas says nothing: the base stays.
        ({"method": "model_stock"}, ([1, 0], [-1, 0]), [0, 0]),
        ({"method": "model_stock"}, ([1, 0], [0, 2]), [0, 0]),
        ({"method": "model_stock"}, ([0, 0], [0, 0]), [0, 0]),
        ({"method": "model_stock"}, ([2, 0], [4, 0]), [3, 0]),
        # Along a line, an arc is straight; a delta of 0 is at a right angle to all others.
        ({"method": "nuslerp", "weights": [1, 3]}, ([1, 0], [-2, 0]), [-1.25, 0]),
        ({"method": "nuslerp", "weights": [1, 1]}, ([0, 0], [1, 0]), [0.5**0.5, 0]),
        ({"method": "nuslerp", "weights": [1, -1]}, ([1, 0], [3, 0]), [2, 0]),
        # Directions that cancel out: a sum. Where there are no deltas, there is nothing to merge.
        ({"method": "multislerp"}, ([1, 0], [-3, 0]), [-1, 0]),
        ({"method": "multislerp"}, ([0, 1], [0, -4], [0, 0]), [0, -1]),
        ({"method": "multislerp"}, ([0, 0], [0, 0], [0, 0]), [0, 0]),
        ({"method": "multislerp"}, ([0, 0], [0, 2]), [0, 1]),
        ({"method": "multislerp", "weights": [3]}, ([0, 2],), [0, 2]),
        ({"method": "multislerp"}, ([3, 1],) * 3, [3, 1]),
        ({"method": "multislerp", "origin": "zero"}, ([3, 1],) * 3, [3, 1]),
        # What is left of their sum is rounding.
        ({"method": "multislerp"}, ([0.1, 0.3], [-0.3, -0.9]), [-0.1, -0.3]),
        # The first of opposite directions; what is too short has none, but counts.
        ({"method": "karcher"}, ([1, 0], [-3, 0]), [2, 0]),
        ({"method": "karcher"}, ([0, 0], [0, 2]), [0, 1]),
        ({"method": "karcher"}, ([0, 1e-6], [2, 0]), [1, 0]),
        ({"method": "karcher"}, ([0, 0], [0, 0]), [0, 0]),
        ({"method": "karcher"}, ([0, 2],), [0, 2]),
        ({"method": "karcher"}, ([3, 1],) * 3, [3, 1]),
        ({"method": "karcher", "tol": 1e-12}, ([0.1, 0.3], [-0.3, -0.9]), [0.2, 0.6]),
        # Where no entry has a variance, none is selected; else all that equal the last one.
        ({"method": "sce"}, ([3, 1],), [3, 1]),
        ({"method": "sce"}, ([3, 1], [3, 1]), [3, 1]),
        ({"method": "sce", "keep_ratio": 0.9}, ([3, 1], [3, 1]), [0, 0]),
        (
            {"method": "sce", "keep_ratio": 0.5},
            ([4, 1, 1, 0, 0, 2], [0, 0, 0, 0, 1, 2]),
            [4, 1, 1, 0, 1, 0],
        ),
    ],
    ids=str,
)
def test_what_a_formula_says_nothing_of_is_merged_as_mergekit_does(
    config: Config, models: Any, expected: list[float]
) -> None:
    base, *given = lines([0] * len(expected), *models)
    merged = dare_merge(base, given, DareConfig(drop_rate=0.0, any_base=True, **config))
    assert merged["w"].tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("method", [*FORMULAS][:5])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_largest_and_smallest_values_are_merged(method: str, dtype: torch.dtype) -> None:
    for size in (torch.finfo(dtype).max / 4, torch.finfo(dtype).smallest_normal):
        base, *models = lines([0.0] * 3, [size, 0, size], [size, size, 0], dtype=dtype)
        merged = dare_merge(base, models, DareConfig(method=method, drop_rate=0, any_base=True))
        assert merged["w"].isfinite().all()


# --- what must hold -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FORMULAS)
def test_the_base_stays_where_no_model_changes_it(method: str) -> None:
    base, *models = make_models(1 if method in ALONE else 2, F32, SHAPES, 0.02)
    config: Config = {"method": method, "drop_rate": 0.0, "any_base": True}
    none = DareConfig(**config, lambda_coeff=0.0)
    assert_same(dare_merge(base, models, none), base)
    for model in models:
        del model["tiny"]
    for others in (models, [base] * len(models)):
        merged = dare_merge(base, others, DareConfig(**config))
        np.testing.assert_allclose(merged["tiny"], base["tiny"], rtol=1e-6)


def test_ramplus_without_a_boost_is_ram() -> None:
    base, *models = make_models(3, BF16, SHAPES, 0.02)
    merged, ram, boosted = (
        dare_merge(base, models, DareConfig(**{"threshold": 0.01, **config}))
        for config in ({**PLUS, "boost": 0.0}, {"method": "ram"}, PLUS)
    )
    assert_same(merged, ram)
    assert not same_bits(boosted["w"], merged["w"])


def test_a_drop_thins_what_fusion_chooses() -> None:
    base, model = make_models(1, F32, {"w": (40, 70)}, 0.02)
    whole = dare_merge(base, [model], DareConfig(**FUSION, drop_rate=0.0))["w"] - base["w"]
    config = DareConfig(**FUSION, drop_rate=0.5, rescale=False)
    thinned = dare_merge(base, [model], config)["w"] - base["w"]
    kept = torch.from_numpy(mask(42, "w", 40 * 70, 0.5)).reshape(40, 70)
    assert torch.equal(thinned, torch.where(kept, whole, 0.0))


@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (2, "--method nuslerp --weights 1 3 --origin zero"),
        slow(2, "--method multislerp --weights 1 2 --no-normalize"),
        (2, "--method karcher --max-iter 3 --tol 1e-7 --origin base"),
        slow(2, "--origin zero --weights 0.7 0.6"),
        (1, "--method nearswap --swap-t 0.005"),
        (2, "--method sce --keep-ratio 0.3"),
        (2, "--method ramplus --threshold 0.01 --boost 0.2 --boost-limit 0.5"),
        (1, "--method arcee_fusion"),
    ],
)
def test_a_merged_directory_says_how_and_makes_itself_again(
    tmp_path: Path, count: int, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, *models = save_models(tmp_path, make_models(count, BF16, SHAPES, 0.02))
    common = ("--engine", "plain", "-b", base, "-m", *models)
    method = flags.split()[1].replace("zero", "linear")
    run(*common, *flags.split(), "-o", tmp_path / "out")
    assert f"method {method}" in capsys.readouterr().out
    assert method in (tmp_path / "out" / "README.md").read_text()
    run(*common, "-c", tmp_path / "out", "-o", tmp_path / "again")
    assert_same(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "out"))
    run("verify", tmp_path / "out", *common)
