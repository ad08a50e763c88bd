"""Sums whose coefficients follow from scalar products, against the formulas on whole vectors: Model
Stock, arcs, and means on a sphere."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dare import DareConfig, dare_merge
from darelib.kernels.records import Buffers
from tests.support import (
    BF16,
    F32,
    F64,
    Config,
    Refusal,
    Tensors,
    assert_same,
    define,
    examples,
    make_models,
    merge,
    run,
    save,
    slow,
    tune,
)

few = examples(15)
Vectors = np.ndarray  # one in each row
SHAPES = {"w": (40, 73), "tiny": (3,)}


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
    mean = unit(units.mean(0))
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


FORMULAS: dict[str, Callable[..., Vectors]] = {
    "model_stock": stock,
    "nuslerp": arc,
    "multislerp": sphere,
    "karcher": karcher,
}
CASES: list[Any] = [
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
]


@pytest.mark.parametrize("size", [0.05, slow(0.001)], ids=["at an angle", "nearly parallel"])
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
    default = "zero" if config["method"] == "karcher" else "base"
    for name, tensor in merged.items():
        start = base[name].numpy().reshape(-1)
        origin = start if config.get("origin", default) == "base" else np.zeros_like(start)
        ends = np.stack([end[name].numpy().reshape(-1) for end in thinned]) - origin
        if not ends.any(1).all():
            continue  # where all of a small tensor was dropped: below
        expected = origin + FORMULAS[config["method"]](ends, **config)
        wanted = start + config.get("lambda_coeff", 1.0) * (expected - start)
        np.testing.assert_allclose(tensor.numpy().reshape(-1), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("count", "config"), CASES, ids=str)
def test_every_engine_chunk_and_thread_gives_the_bits_of_the_definition(
    tmp_path: Path, count: int, config: Config
) -> None:
    base, *models = make_models(count, BF16, {"a": (90, 73), "b": (7,)}, 0.02)
    del models[0]["a"]
    expected = define(base, models, **config)
    tune(min_chunk=1024, max_chunk=1024, memory_chunk=2048, job_elements=2048, batch_elements=999)
    for engine, threads in (("numba", 3), ("plain", 1)):
        merged = merge(tmp_path, base, *models, engine=engine, threads=threads, **config)
        assert_same(merged, expected)
    assert_same(dare_merge(base, models, DareConfig(**config)), expected)


def test_many_models_have_room_for_all_their_products(tmp_path: Path) -> None:
    """A chunk's sums by tile are more than its result."""
    count = 24
    base, *models = make_models(count, BF16, {"a": (3, 1024)}, 0.02)
    config = {"method": "karcher", "drop_rate": 0.5}
    tune(min_chunk=1024, max_chunk=2048)
    assert_same(
        merge(tmp_path, base, *models, engine="numba", **config), define(base, models, **config)
    )
    usual, larger = (Buffers(count, 4096, kinds).nbytes for kinds in ((), ("products",)))
    assert larger - usual == 300 * 2 * 8 - 4096


# --- what has no angle ----------------------------------------------------------------------------


def lines(*values: Any, dtype: torch.dtype = F32) -> list[Tensors]:
    return [{"w": torch.tensor(each, dtype=dtype)} for each in values]


@pytest.mark.parametrize(
    ("config", "models", "expected"),
    [
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
        # The first of opposite directions; what is too short has none, but counts.
        ({"method": "karcher"}, ([1, 0], [-3, 0]), [2, 0]),
        ({"method": "karcher"}, ([0, 0], [0, 2]), [0, 1]),
        ({"method": "karcher"}, ([0, 1e-6], [2, 0]), [1, 0]),
        ({"method": "karcher"}, ([0, 0], [0, 0]), [0, 0]),
        ({"method": "karcher"}, ([0, 2],), [0, 2]),
    ],
    ids=str,
)
def test_vectors_without_an_angle_are_merged_as_mergekit_does(
    tmp_path: Path, config: Config, models: Any, expected: list[float]
) -> None:
    base, *given_models = lines([0, 0], *models)
    merged = merge(tmp_path, base, *given_models, drop_rate=0.0, engine="plain", **config)
    assert merged["w"].tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("method", FORMULAS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_largest_and_smallest_values_are_merged_or_named(
    tmp_path: Path, refused: Refusal, method: str, dtype: torch.dtype
) -> None:
    large, small = torch.finfo(dtype).max / 4, torch.finfo(dtype).smallest_normal
    for size in (large, small):
        models = lines([0.0] * 3, [size, 0, size], [size, size, 0], dtype=dtype)
        merged = merge(tmp_path, *models, method=method, drop_rate=0, engine="plain")["w"]
        assert merged.isfinite().all()
    base, *paths = save(tmp_path, a=models[0], b=models[1], c={"w": torch.full((3,), np.nan)})
    words = ("-q", "-b", base, "-m", *paths, "-o", tmp_path / "o.safetensors", "--engine", "plain")
    refused(1, "holds nan", *words, "--method", method)


@pytest.mark.parametrize("method", FORMULAS)
def test_a_tensor_that_no_model_has_is_the_bases(tmp_path: Path, method: str) -> None:
    base, *models = make_models(2, F32, SHAPES, 0.02)
    for model in models:
        del model["tiny"]
    merged = merge(tmp_path, base, *models, method=method, drop_rate=0.0, engine="plain")
    np.testing.assert_allclose(merged["tiny"], base["tiny"], rtol=1e-6)


# --- claims about any models ----------------------------------------------------------------------

sizes = st.floats(1e-3, 10)
seeds = st.integers(0, 1000)


def merge_vectors(base: Vectors, models: Vectors, **config: Any) -> Vectors:
    state, *states = ({"w": torch.from_numpy(vector.copy())} for vector in (base, *models))
    return dare_merge(state, states, DareConfig(drop_rate=0.0, **config))["w"].numpy()


@few
@given(seeds, sizes, st.integers(2, 5), st.sampled_from([*FORMULAS][2:]))
def test_equal_models_are_merged_into_that_model(
    seed: int, size: float, count: int, method: str
) -> None:
    random = np.random.default_rng(seed)
    base, model = random.normal(size=(2, 500)) * size
    for origin in ("base", "zero"):
        merged = merge_vectors(base, np.stack([model] * count), method=method, origin=origin)
        np.testing.assert_allclose(merged, model, rtol=1e-12, atol=1e-12 * size)


@few
@given(seeds, st.integers(1, 4))
def test_opposite_directions_are_no_way_to_large_values(seed: int, pairs: int) -> None:
    """What is left of their sum is rounding."""
    random = np.random.default_rng(seed)
    base, *ends = random.normal(size=(1 + pairs, 500))
    models = np.concatenate([base + np.stack(ends), base - 2 * np.stack(ends)])
    config = {"origin": "base"}
    merged = merge_vectors(base, models, method="multislerp", **config)
    np.testing.assert_allclose(merged, models.mean(0), rtol=1e-11, atol=1e-11)
    merged = merge_vectors(base, models, method="karcher", tol=1e-12, **config)
    length = np.linalg.norm(models - base, axis=1).mean()
    assert np.linalg.norm(merged - base) == pytest.approx(length)


@few
@given(seeds, sizes, st.sampled_from(["nuslerp", "multislerp", "karcher"]))
def test_from_zero_the_base_does_not_matter(seed: int, size: float, method: str) -> None:
    random = np.random.default_rng(seed)
    one, other, *models = random.normal(size=(4, 500)) * size
    merged = [
        merge_vectors(base, np.stack(models), method=method, origin="zero")
        for base in (one, other, models[0])
    ]
    np.testing.assert_allclose(merged[0], merged[1], rtol=1e-11, atol=1e-11 * size)
    np.testing.assert_allclose(merged[0], merged[2], rtol=1e-11, atol=1e-11 * size)


@few
@given(seeds, st.integers(2, 5), st.floats(0, 0.9))
def test_the_order_of_models_does_not_matter_where_nothing_is_random(
    seed: int, count: int, shared: float
) -> None:
    """And Model Stock is between the base and the mean, where deltas agree."""
    random = np.random.default_rng(seed)
    base, common, *own = random.normal(size=(2 + count, 300))
    models = base + shared * common + np.stack(own)
    for method in ("model_stock", "multislerp", "karcher"):
        merged = merge_vectors(base, models, method=method)
        again = merge_vectors(base, models[::-1], method=method)
        np.testing.assert_allclose(merged, again, rtol=1e-11, atol=1e-11)
    share = np.linalg.norm(merge_vectors(base, models, method="model_stock") - base)
    assert share <= np.linalg.norm(models.mean(0) - base) * (1 + 1e-12)


# --- through the front door -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (2, "--method nuslerp --weights 1 3 --origin zero"),
        slow(3, "--method multislerp --weights 1 2 3 --no-normalize"),
        (3, "--method karcher --max-iter 3 --tol 1e-7 --origin base"),
        slow(3, "--method model_stock"),
        slow(2, "--origin zero --weights 0.7 0.6"),
    ],
)
def test_a_recipe_gives_the_same_model_again(tmp_path: Path, count: int, flags: str) -> None:
    models = make_models(count, F32, SHAPES, 0.02)
    base, *paths = save(tmp_path, **{f"m{i}": model for i, model in enumerate(models)})
    outputs = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    common = ("-q", "--engine", "plain", "-b", base, "-m", *paths)
    run(*common, *flags.split(), "-o", outputs[0])
    run(*common, "-c", outputs[0], "-o", outputs[1])
    assert_same(load_file(outputs[0]), load_file(outputs[1]))
    run("verify", outputs[0], *common)


@pytest.mark.parametrize(
    ("count", "flags", "complaint"),
    [
        (1, "--method model_stock", "method model_stock takes at least 2 models, not 1"),
        (3, "--method nuslerp", "method nuslerp takes 2 models, not 3"),
        (2, "--method karcher --tol 0", "tol must be a number above 0"),
        (2, "--method karcher --max-iter -1", "--max-iter must be a whole number from 0 up"),
        (2, "--method karcher --weights 1 2", "weights mean nothing to method karcher"),
        (2, "--method multislerp --weights 1 -1", "the weights add up to 0"),
        (2, "--max-iter 5", "max_iter means nothing to method linear"),
    ],
)
def test_what_means_nothing_is_refused(
    refused: Refusal, count: int, flags: str, complaint: str
) -> None:
    words = ("-b", "b.safetensors", "-m", *("m.safetensors",) * count, "-o", "o.safetensors")
    refused(2, complaint, *words, *flags.split())
