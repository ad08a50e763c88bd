"""Merging matrix by matrix: the definition, files and memory, adapters, what may differ."""

import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import threadpoolctl
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dare import DareConfig, DareError, dare_merge, dare_sweep
from darelib.arithmetic import matrix_engine
from darelib.core import pieces
from darelib.methods import wudi
from darelib.run import solving
from tests.scene import launch, wait_for
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    POSIX,
    Capture,
    Patch,
    Tensors,
    assert_same,
    define,
    examples,
    low_rank,
    make_merger,
    make_models,
    merge,
    merge_paths,
    random_model,
    run,
    run_merge,
    save,
    save_directories,
    slow,
    tensors_in,
    tune,
    write_adapter,
)

# Wide, tall, square, a row, a column, a convolution, experts that end within a tile; and no matrix.
SHAPES = {
    "wide.weight": (12, 50),
    "tall.weight": (70, 9),
    "square.weight": (40, 40),
    "row.weight": (1, 30),
    "column.weight": (30, 1),
    "conv.weight": (8, 4, 3, 3),
    "mlp.experts.weight": (3, 37, 29),
    "norm.weight": (40,),
    "empty.weight": (0, 4),
}
DROPS = [
    {"drop_rate": 0},
    {"drop_rate": 0.6},
    {"drop_rate": 0.5, "drop": "magnitude", "rescale": "l1"},
    {"drop_rate": 0.5, "drop": "della"},
    {"drop_rate": [0.3, 0.9, 0.0], "weights": [1, 2, 0.5], "lambda_coeff": 1.3, "ridge": 0.1},
]


def find_error(merged: Tensors, wanted: Tensors, base: Tensors) -> float:
    """The largest difference of a tensor, by norm, relative to what was changed in it."""
    changes = {name: float((wanted[name].double() - base[name].double()).norm()) for name in base}
    errors = {name: float((wanted[name].double() - merged[name].double()).norm()) for name in base}
    return max(errors[name] / change for name, change in changes.items() if change)


def make_three(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Tensors]:
    return make_models(3, dtype, shapes, 0.01)


@pytest.mark.parametrize("config", DROPS)
@pytest.mark.parametrize(
    ("engine", "dtype", "error"),
    [
        ("plain", BF16, 5e-3),
        ("plain", F32, 1e-6),
        slow("plain", F64, 1e-12),
        slow("plain", F16, 1e-3),
        slow("numba", BF16, 5e-3),
    ],
)
def test_files_and_tensors_are_merged_as_the_definition_says(
    tmp_path: Path, engine: str, dtype: torch.dtype, error: float, config: dict[str, Any]
) -> None:
    tune(job_elements=2048, min_chunk=1024, max_chunk=1024)
    base, *models = make_three(dtype)
    wanted = define(base, models, method="wudi", **config)
    merged = merge(tmp_path, base, *models, method="wudi", engine=engine, **config)
    assert find_error(merged, wanted, base) < error
    in_memory = dare_merge(base, models, DareConfig(method="wudi", verbose=False, **config))
    assert find_error(in_memory, wanted, base) < error


@pytest.mark.parametrize("engine", ["plain", slow("numba")])
def test_models_may_lack_a_matrix_or_some_of_its_rows(tmp_path: Path, engine: str) -> None:
    base, *models = make_three(F32, {"a.weight": (20, 30), "b.weight": (30, 20)})
    del models[1]["a.weight"]
    models[0]["b.weight"][25:] = base["b.weight"][25:]
    fewer = {**models[0], "b.weight": models[0]["b.weight"][:25].clone()}
    config = {"method": "wudi", "drop_rate": 0, "engine": engine}
    merged = merge(tmp_path, base, fewer, *models[1:], mismatch="overlap", **config)
    assert find_error(merged, define(base, models, **config), base) < 1e-6


@pytest.mark.parametrize("rank", [1, 3])
def test_changes_of_low_rank_are_as_exact(tmp_path: Path, rank: int) -> None:
    base = {"a.weight": torch.zeros(300, 200)}
    products = [low_rank("a", (300, 200), rank, seed).values() for seed in range(2)]
    models = [{"a.weight": 1e4 * left @ right} for right, left in products]
    config = {"method": "wudi", "drop_rate": 0, "ridge": 0.01, "any_base": True}
    merged = merge(tmp_path, base, *models, **config)
    assert find_error(merged, define(base, models, **config), base) < 1e-6


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    count=st.integers(1, 3),
    block=st.integers(1, 9),
    product=st.integers(1, 30),
    seed=st.integers(0, 99),
)
@examples(20)
def test_matrices_are_solved_as_defined_in_any_blocks(
    rows: int, columns: int, count: int, block: int, product: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    deltas = [generator.normal(size=(rows, columns)) for _ in range(count)]
    weights = generator.dirichlet(np.ones(count)).tolist()
    options = {"ridge": 0.1, "norm_limit": 1.5}
    wanted = wudi.define(deltas, weights, options)
    sizes = {"BLOCK_SIDE": block, "PRODUCT_SIDE": product}
    with mock.patch.multiple(wudi, **sizes):
        found = wudi.merge_matrices([d.copy() for d in deltas], weights, options, True)
    assert np.linalg.norm(found - wanted) < 1e-9 * np.linalg.norm(wanted)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    count=st.integers(1, 4),
    ridge=st.floats(0.01, 10),
    seed=st.integers(0, 99),
)
@examples(20)
def test_identities_hold_for_any_shape_and_number_of_models(
    rows: int, columns: int, count: int, ridge: float, seed: int
) -> None:
    base, model, *others = make_models(count + 1, F32, {"a.weight": (rows, columns)}, 0.1, seed)
    config = DareConfig(method="wudi", drop_rate=0.0, ridge=ridge, verbose=False)
    some = [*others, base]
    assert_same(dare_merge(base, [model], config), model)
    torch.testing.assert_close(dare_merge(base, [model] * count, config), model)
    assert_same(dare_merge(base, [base] * count, config), base)
    assert_same(dare_merge(base, some, replace(config, lambda_coeff=0.0)), base)
    assert dare_merge(base, some, config)["a.weight"].isfinite().all()
    averaged = dare_merge(base, some, replace(config, ridge=1e12, norm_limit=0))
    linear = DareConfig(drop_rate=0, verbose=False)
    torch.testing.assert_close(averaged, dare_merge(base, some, linear))


def test_the_merged_change_is_resized_within_its_limit() -> None:
    base, *models = make_three(F32, {"a.weight": (64, 64)})
    opposite = {"a.weight": 2 * base["a.weight"] - models[0]["a.weight"]}

    def find_change(*models: Tensors, **config: Any) -> torch.Tensor:
        given = DareConfig(drop_rate=0, verbose=False, **config)
        merged = dare_merge(base, list(models), given)
        return (merged["a.weight"] - base["a.weight"]).double().view(-1)

    deltas = torch.stack([find_change(model) for model in models])
    mean = float(deltas.norm(dim=1).mean())
    short, long = (find_change(*models, method="wudi", norm_limit=limit) for limit in (0.5, 100))
    assert float(short.norm()) == pytest.approx(0.5 * mean, rel=1e-5)
    held = deltas @ long / deltas.norm(dim=1) ** 2
    assert float(held.mean()) == pytest.approx(1, rel=1e-5)
    left = find_change(models[0], opposite, method="wudi")
    assert float(left.norm()) < 1e-3 * mean, "what cancels out is not blown up"


def test_a_rule_chooses_another_method(tmp_path: Path) -> None:
    shapes = {f"layers.{k}.{part}.weight": (12, 16) for k in range(3) for part in ("up", "down")}
    base, *models = make_three(F32, shapes)
    rules = [{"match": "*down*", "method": "linear"}]
    merged = merge(tmp_path, base, *models, method="wudi", drop_rate=0, rules=rules)
    linear = merge(tmp_path, base, *models, drop_rate=0)
    for name in shapes:
        assert torch.equal(merged[name], linear[name]) == ("down" in name)


def test_a_resumed_merge_gives_the_same_bytes(tmp_path: Path, monkeypatch: Patch) -> None:
    shapes = {f"layers.{k}.weight": (40, 30) for k in range(6)} | {"x.experts": (4, 10, 20)}
    paths = save_directories(tmp_path, make_three(BF16, shapes)[:3])
    flags = ["-q", "-b", paths[0], "-m", *paths[1:], "--method", "wudi", "--drop-rate", "0.3"]
    run(*flags, "-o", tmp_path / "whole")
    solved = []
    merge_one = matrix_engine.MatrixEngine.merge

    def fail(self: Any, *arguments: Any, **named: Any) -> Any:
        solved.append(1)
        if len(solved) == 5:
            raise OSError(28, "no space left")
        return merge_one(self, *arguments, **named)

    tune(matrix_elements=1, journal_seconds=0.0, flush_seconds=0.0)
    monkeypatch.setattr(matrix_engine.MatrixEngine, "merge", fail)
    run(*flags, "-o", tmp_path / "again", "--resume", status=1)
    run(*flags, "-o", tmp_path / "again", "--resume")
    assert 10 < len(solved) < 15, "nothing was continued"
    assert_same(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "whole"))


def test_a_mask_of_infinities_is_no_obstacle_and_a_broken_weight_is_an_error(
    tmp_path: Path,
) -> None:
    base, *models = make_three(F32, {"a.weight": (20, 20), "b.weight": (6, 6)})
    for model in (base, *models):
        model["b.weight"] = torch.full((6, 6), -torch.inf).triu(1)
    merged = merge(tmp_path, base, *models, method="wudi", drop_rate=0)
    assert torch.equal(merged["b.weight"], base["b.weight"])
    models[0]["a.weight"][3, 4] = torch.nan
    with pytest.raises(DareError, match=re.escape("[3, 4]")):
        merge(tmp_path, base, *models, method="wudi", drop_rate=0)


# --- stopping, progress and threads ---------------------------------------------------------------

# Each piece of a product, of few operations, takes so many SECONDS.
SLOW_PRODUCTS = """
import numpy
from darelib.core import pieces
compute = numpy.matmul
TUNING.first_line_seconds = 0.0
pieces.MOST_OPERATIONS = pieces.LEAST_OPERATIONS = 1_000_000
numpy.matmul = lambda *given, **named: (time.sleep(SECONDS), compute(*given, **named))[1]
"""


def launch_slowly(folder: Path, seconds: float, *flags: str) -> tuple[subprocess.Popen[str], Path]:
    """A merge of one matrix whose products take minutes."""
    models = make_three(F32, {"a.weight": (400, 400)})[:3]
    paths = save(folder, **dict(zip("bmn", models, strict=True)))
    out = folder / "out" / "merged.safetensors"
    given = ["-b", paths[0], "-m", *paths[1:], "-o", out, "--method", "wudi", "--engine", "plain"]
    prelude = SLOW_PRODUCTS.replace("SECONDS", str(seconds))
    return launch(prelude, *given, *flags), out


@POSIX
@pytest.mark.parametrize("sent", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_stops_between_the_pieces_of_a_product(
    tmp_path: Path, sent: signal.Signals
) -> None:
    process, out = launch_slowly(tmp_path, 0.5)
    assert process.stderr
    assert "merging: 1% done" in process.stderr.readline()
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + sent
    assert re.search(r"(?m)^stopping\n(merging.*\n)*interrupted$", said)
    assert not out.parent.exists()


@POSIX
@pytest.mark.slow
def test_a_second_signal_waits_for_nothing_and_what_is_left_is_no_obstacle(tmp_path: Path) -> None:
    process, out = launch_slowly(tmp_path, 600.0)
    wait_for(lambda: out.parent.exists())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.stderr
    assert process.stderr.readline() == "stopping\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not out.exists()
    process, out = launch_slowly(tmp_path, 0.0, "-q")
    process.communicate(timeout=60)
    assert out.exists()
    assert len(list(out.parent.iterdir())) == 1


@given(
    rows=st.integers(0, 50),
    columns=st.integers(1, 50),
    inner=st.integers(1, 50),
    most=st.integers(100, 20_000),
    threads=st.integers(1, 4),
)
@examples(60)
def test_products_are_computed_in_pieces_of_few_operations(
    rows: int, columns: int, inner: int, most: int, threads: int
) -> None:
    generator = np.random.default_rng(rows)
    left = generator.normal(size=(rows, inner))
    right = generator.normal(size=(columns, inner)).T
    counted: list[int] = []
    sizes = {"LEAST_OPERATIONS": most // 10, "MOST_OPERATIONS": most}
    with (
        mock.patch.multiple(pieces, **sizes),
        ThreadPoolExecutor(threads) as pool,
        pieces.employ(pieces.Crew(pool, counted.append)),
    ):
        found = pieces.multiply(left, right)
    np.testing.assert_allclose(found, left @ right, atol=1e-12)
    assert sum(counted) == 2 * rows * columns * inner
    assert max(counted, default=0) <= most


def test_progress_moves_within_a_matrix_and_reaches_its_end(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    tune(first_line_seconds=0.0, last_line_seconds=0.0)
    monkeypatch.setattr(pieces, "MOST_OPERATIONS", 1_000_000)
    models = make_three(F32, {"a.weight": (300, 300)})[:3]
    base, *others = save(tmp_path, **dict(zip("bmn", models, strict=True)))
    out = tmp_path / "o.safetensors"
    run("-b", base, "-m", *others, "-o", out, "--method", "wudi", "--engine", "plain")
    run("verify", out, "--engine", "plain")
    said = capsys.readouterr().err
    for what in ("merging", "verifying"):
        shares = [int(share) for share in re.findall(rf"{what}: (\d+)% done", said)]
        assert shares == sorted(shares)
        assert len({*shares}) > 20
        assert shares[0] < 10 < 80 < shares[-1]


@pytest.mark.parametrize("threads", [1, 3])
def test_each_job_has_one_core(tmp_path: Path, monkeypatch: Patch, threads: int) -> None:
    seen = []
    merge_one = matrix_engine.MatrixEngine.merge

    def list_threads() -> list[int]:
        info = threadpoolctl.threadpool_info()
        return [pool["num_threads"] for pool in info if pool["user_api"] == "blas"]

    def watch(self: Any, *arguments: Any, **named: Any) -> Any:
        seen.append((max(list_threads()), pieces.EMPLOYED.get().pool is not None))
        return merge_one(self, *arguments, **named)

    monkeypatch.setattr(matrix_engine.MatrixEngine, "merge", watch)
    tune(job_elements=1024)
    shapes = {"small.weight": (40, 40), "large.weight": (80, 80)}
    monkeypatch.setattr(solving, "SMALL_MATRIX", 1600)
    base, *models = make_three(BF16, shapes)
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = list_threads()
        merge(tmp_path, base, *models, method="wudi", engine="plain", threads=threads)
        assert list_threads() == before
    assert {*seen} == {(1, False), (1, True)}, "BLAS has one, and a large matrix all of ours"


def test_the_bytes_of_large_matrices_do_not_depend_on_threads(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    tune(job_elements=1024)
    monkeypatch.setattr(pieces, "LEAST_OPERATIONS", 10_000)
    monkeypatch.setattr(solving, "SMALL_MATRIX", 0)
    base, *models = make_three(F32, {"a.weight": (200, 300), "b.weight": (300, 150)})
    config = {"method": "wudi", "drop_rate": 0, "engine": "plain"}
    merged = [merge(tmp_path, base, *models, threads=k, **config) for k in (1, 2, 3)]
    assert_same(merged[0], merged[1])
    assert_same(merged[0], merged[2])


# --- adapters ------------------------------------------------------------------------------------


def write_adapters(folder: Path, ranks: list[int], shape: tuple[int, int]) -> list[Path]:
    paths = []
    for seed, rank in enumerate(ranks):
        tensors = low_rank("one", shape, rank, seed) | low_rank("two", shape[::-1], rank, seed + 9)
        paths.append(write_adapter(folder / f"lora{seed}", tensors, r=rank, lora_alpha=rank))
    return paths


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_adapters_are_merged_in_their_own_space_to_the_same_result(
    tmp_path: Path, monkeypatch: Patch, dtype: torch.dtype
) -> None:
    base = random_model(1, dtype, {"one.weight": (48, 80), "two.weight": (80, 48)})
    [path] = save(tmp_path, base=base)
    adapters = write_adapters(tmp_path, [4, 2, 8], (48, 80))
    config = {"method": "wudi", "drop_rate": 0, "weights": [1, 3, 2]}
    out = tmp_path / "out.safetensors"
    report = run_merge(path, adapters, out, **config)
    small = load_file(out)
    monkeypatch.setattr("darelib.models.lora.LowRank.read_factors", lambda *_: None)
    counted = run_merge(path, adapters, out, **config)
    assert find_error(small, load_file(out), base) < (1e-5 if dtype is F32 else 1e-3)
    for mine, theirs in zip(report.models, counted.models, strict=True):
        assert mine.mean_delta == pytest.approx(theirs.mean_delta, rel=0.2)
        assert mine.parameters == theirs.parameters


def test_adapters_that_are_thinned_or_as_large_as_the_matrix_are_merged_whole(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    base = random_model(1, F32, {"one.weight": (12, 9), "two.weight": (9, 12)})
    [path] = save(tmp_path, base=base)
    adapters = write_adapters(tmp_path, [4, 5], (12, 9))
    monkeypatch.setattr("darelib.run.solving.merge_factors", None)
    for config in ({"drop_rate": 0.5}, {"drop_rate": 0}):
        merged = merge_paths(path, adapters, tmp_path / "o.safetensors", method="wudi", **config)
        assert not torch.equal(merged["one.weight"], base["one.weight"])


# --- what is promised -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "by", "complaint"),  # of the 2,400 of the matrix, and the 40 behind them
    [
        (17, 0, ""),
        (17, 1, "1 values differ in the last place"),
        (97, 3, "[2, 17]"),
        (2405, 1, "'norm.weight' differs at [5]"),
    ],
)
def test_verify_allows_the_last_place_of_a_matrix_and_nothing_more(
    tmp_path: Path, capsys: Capture, element: int, by: int, complaint: str
) -> None:
    shapes = {"a.weight": (60, 40), "norm.weight": (40,)}
    base, *models = save(tmp_path, **dict(zip("bmn", make_three(BF16, shapes)[:3], strict=True)))
    out = tmp_path / "out.safetensors"
    run("-q", "-b", base, "-m", *models, "-o", out, "--method", "wudi", "--drop-rate", "0")
    data = np.fromfile(out, np.uint8)
    data[-2 * 2440 :].view(np.uint16)[element] += by
    data.tofile(out)
    run("verify", out, status=int("[" in complaint))
    said = "".join(capsys.readouterr())
    assert complaint in said
    assert by or "differ" not in said


def test_a_dry_run_knows_what_matrices_take(tmp_path: Path) -> None:
    base, *models = save(tmp_path, **dict(zip("bmn", make_three(BF16)[:3], strict=True)))
    rules = [{"match": "wide*", "method": "linear", "norm_limit": 1}]
    usual, plan = (
        make_merger(base, models, **config).plan(tmp_path / "o.safetensors", estimate=True)
        for config in ({}, {"method": "wudi", "rules": rules})
    )
    assert plan.memory > usual.memory
    assert plan.estimate
    assert plan.estimate.seconds > 0
    assert re.search(r"wide\*.*method = .linear..*norm_limit = 1(.|\n)*ridge = 1", str(plan))


def test_a_search_in_memory_solves_once_for_all_lambdas(monkeypatch: Patch) -> None:
    base, *models = make_three(F32, {"a.weight": (30, 20), "b.weight": (20, 30)})
    solved = []
    solve = wudi.solve
    monkeypatch.setattr(wudi, "solve", lambda *given: solved.append(1) or solve(*given))

    def score(state: Tensors) -> float:
        return float((state["a.weight"] - base["a.weight"]).norm())

    config = DareConfig(method="wudi", drop_rate=0, verbose=False)
    space = {"lambda_coeff": [0.5, 1.0, 1.5], "ridge": [0.1, 1.0]}
    found = dare_sweep(base, models, score, space, config, search="grid")
    assert len(solved) == 4, "once for each matrix and ridge"
    best = dare_merge(base, models, replace(config, **found.best.params))
    assert found.best.scores == [pytest.approx(score(best))]
    assert found.best.params["lambda_coeff"] == 1.5


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_files_are_merged_by_torch_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: Patch, dtype: torch.dtype
) -> None:
    base, *models = make_three(dtype)
    paths = save(tmp_path, **dict(zip("abcd", (base, *models), strict=True)))
    out = tmp_path / "merged.safetensors"
    config = {"method": "wudi", "drop_rate": 0}
    report = run_merge(paths[0], paths[1:], out, **config)
    # The processor stands in for the GPU.
    monkeypatch.setattr(matrix_engine.MatrixEngine, "device", "cpu")
    monkeypatch.setattr(matrix_engine, "load_gpu", lambda: torch)
    for more in ({"drop_rate": 0.5}, {}):
        again = run_merge(paths[0], paths[1:], out, **config | more)
        usual = define(base, models, **config | more)
        assert find_error(load_file(out), usual, base) < (1e-6 if dtype is F32 else 5e-3)
    for mine, theirs in zip(again.models, report.models, strict=True):
        assert mine.mean_delta == pytest.approx(theirs.mean_delta, rel=1e-5)
        assert mine.largest_delta == theirs.largest_delta
        assert mine.share_above_threshold == theirs.share_above_threshold
    models[0]["square.weight"][1, 2] = torch.inf
    with pytest.raises(DareError, match=re.escape("[1, 2]")):
        merge(tmp_path, base, *models, **config)


def raise_error() -> str:
    raise RuntimeError("a mix of the legacy and new APIs")


@pytest.mark.parametrize("answer", [lambda: "high", raise_error])
def test_a_merge_is_as_precise_where_products_are_told_to_be_rough(
    monkeypatch: Patch, answer: Any
) -> None:
    base, *models = make_three(BF16)
    config = DareConfig(method="wudi", drop_rate=0, verbose=False)
    wide = [{name: tensor.float() for name, tensor in model.items()} for model in (base, *models)]
    exact = dare_merge(wide[0], wide[1:], config)  # by float64
    monkeypatch.setattr(torch, "get_float32_matmul_precision", answer)
    merged = dare_merge(base, models, config)
    assert all(torch.equal(merged[name], exact[name].bfloat16()) for name in base)


def test_an_analysis_says_whether_changes_lie_in_the_same_space(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = random_model(1, F32, {"one.weight": (64, 48), "two.weight": (48, 64), "norm": (48,)})
    inputs = torch.randn(2, 4, 48, generator=generator)
    models = []
    for space in (inputs[0], inputs[0], inputs[1]):
        change = 0.01 * torch.randn(64, 4, generator=generator) @ space
        models.append({**base, "one.weight": base["one.weight"] + change})
    vectors = [{**base, "norm": base["norm"] + k} for k in (0.01, 0.02)]
    base_file, *files = save(
        tmp_path, **dict(zip("bcdefg", [base, *models, *vectors], strict=True))
    )
    adapters = write_adapters(tmp_path, [2, 3], (64, 48))
    given = (files[:2], files[1:3], adapters, files[3:])
    reports = [make_merger(base_file, pair, engine="plain").analyze() for pair in given]
    alike, apart, low, none = (report.as_dict()["pairs"][0]["shared_space"] for report in reports)
    assert none is None
    assert 0 <= max(apart, low) < 0.5 < 0.8 < alike


def test_long_matrices_are_solved_from_the_shorter_side(tmp_path: Path, monkeypatch: Patch) -> None:
    for room in ("core.arrays", "methods.wudi"):
        monkeypatch.setattr(f"darelib.{room}.LONGEST_SIDE", 50)
    base, *models = make_three(F32, {"a.weight": (90, 20), "b.weight": (20, 90), "c": (60, 70)})
    config = {"method": "wudi", "drop_rate": 0}
    merged = merge(tmp_path, base, *models, **config)
    assert find_error(merged, define(base, models, **config), base) < 1e-6
    linear = merge(tmp_path, base, *models, drop_rate=0)
    assert torch.equal(merged["c"], linear["c"]), "both sides are too long"


@pytest.mark.parametrize("settings", [{}, {"ridge": 1e-12}, {"ridge": 1e12}])
def test_changes_of_any_size_are_merged(tmp_path: Path, settings: Any) -> None:
    base = {"tiny.weight": torch.zeros(20, 30), "large.weight": torch.zeros(20, 30)}
    signs = torch.where(torch.randn(2, 20, 30, generator=torch.manual_seed(0)) > 0, 1.0, -1.0)
    models = [{"tiny.weight": sign * 1e-40, "large.weight": sign * 1e30} for sign in signs]
    merged = merge(tmp_path, base, *models, method="wudi", **settings)
    for name, size in (("tiny.weight", 1e-40), ("large.weight", 1e30)):
        assert 0.1 < float(merged[name].abs().double().mean()) / size < 2
