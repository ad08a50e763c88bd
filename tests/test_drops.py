"""What each drop keeps and each rescale does: by hand, and in every engine the same bits."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dare import DareConfig, DareError, dare_merge
from darelib.arithmetic.definition import draw_bits
from darelib.core.mask import mask_key
from tests.support import (
    BF16,
    F32,
    F64,
    Config,
    Models,
    Refusal,
    Tensors,
    assert_same,
    command,
    define,
    examples,
    low_rank,
    make_models,
    merge,
    merge_paths,
    run_merge,
    save,
    slow,
    tune,
    write_adapter,
)
from tests.test_arithmetic import DEVICES, merge_by
from tests.test_packed import pack

DROPS = ("random", "magnitude", "breadcrumbs", "della")
# A drop of each kind, with rescales and methods in turn.
CONFIGS: list[Config] = [
    {"drop": "magnitude", "rescale": "l1"},
    {"drop": "breadcrumbs", "gamma": 0.2, "method": "ties"},
    {"drop": "della"},
    {"drop": "della", "rescale": "l1", "method": "ties", "normalize": False},
    {"drop": ["random", "della"], "rescale": "l1", "method": "ram"},
    {"drop": ["breadcrumbs", "magnitude"], "method": "ram", "weights": [1, 2]},
    {"drop": ["magnitude", "della"], "epsilon": 0.3},
    {"method": "slerp", "rescale": "l1"},
]


def merge_delta(delta: Any, **config: Any) -> torch.Tensor:
    """What is left of one delta, in memory."""
    tensor = torch.tensor(delta) if isinstance(delta, list) else delta
    kept = dare_merge({"w": torch.zeros_like(tensor)}, [{"w": tensor}], DareConfig(**config))
    return kept["w"]


# --- by hand --------------------------------------------------------------------------------------


FIVE = [1.0, -5.0, 3.0, -2.0, 4.0]


@pytest.mark.parametrize(
    ("config", "delta", "kept"),
    [
        ({"drop": "magnitude", "drop_rate": 0.5}, FIVE, [0, -5, 0, 0, 4]),
        ({"drop": "magnitude", "drop_rate": 0.99}, FIVE, [0, -5, 0, 0, 0]),  # at least one
        ({"drop": "magnitude", "drop_rate": 0.0}, FIVE, FIVE),
        ({"drop": "magnitude", "drop_rate": 0.5}, [0.0, 0.0, 0.0], [0, 0, 0]),
        ({"drop": "magnitude", "drop_rate": 0.9}, [7.0], [7]),
        # although (1 - 0.9) * 10 is a little less than 1
        ({"drop": "magnitude", "drop_rate": 0.9}, [*map(float, range(10))], [0] * 9 + [9]),
        # 0.29 * 100 is a little less than 29
        (
            {"drop": "magnitude", "drop_rate": 0.71},
            [*map(float, range(100))],
            [0] * 72 + [*range(72, 100)],
        ),
        ({"drop": "breadcrumbs", "drop_rate": 0.6, "gamma": 0.2}, FIVE, [0, 0, 3, 0, 4]),
        ({"drop": "breadcrumbs", "drop_rate": 0.6, "gamma": 0.4}, FIVE, [0, 0, 3, -2, 0]),
        ({"drop": "breadcrumbs", "drop_rate": 0.6, "gamma": 0.0}, FIVE, [0, -5, 0, 0, 4]),
        # fewer of the largest are dropped than gamma says
        ({"drop": "breadcrumbs", "drop_rate": 0.2, "gamma": 0.6}, FIVE, [1, 0, 3, -2, 4]),
        # a tenth of five is none
        ({"drop": "breadcrumbs", "drop_rate": 0.9, "gamma": 0.2}, FIVE, [0, 0, 0, 0, 0]),
        ({"drop": "breadcrumbs", "drop_rate": 0.0, "gamma": 0.4}, FIVE, FIVE),
    ],
)
def test_drops_by_size_keep_the_largest_or_those_below_them(
    config: Config, delta: list[float], kept: list[float]
) -> None:
    assert merge_delta(delta, **config).tolist() == kept


@pytest.mark.parametrize(
    ("settings", "shares"),
    [  # of those of each size, 0 to 9, that are kept
        ({"drop": "magnitude", "drop_rate": 0.75}, [0, 0, 0, 0, 0, 0, 0, 0.5, 1, 1]),
        ({"drop": "magnitude", "drop_rate": 0.95}, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0.5]),
        (
            {"drop": "breadcrumbs", "drop_rate": 0.7, "gamma": 0.08},
            [0, 0, 0, 0, 0, 0, 0.8, 1, 1, 0.2],
        ),
        (
            {"drop": "breadcrumbs", "drop_rate": 0.96, "gamma": 0.03},
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0.4],
        ),
    ],
)
def test_of_equal_deltas_as_many_are_kept_as_there_is_room_for(
    settings: Config, shares: list[float]
) -> None:
    """As in models that are stored in 16 bits."""
    delta = torch.randint(0, 10, (400, 500), generator=torch.Generator().manual_seed(1)).float()
    kept = merge_delta(delta + 100, **settings) != 0
    for size, share in enumerate(shares):
        found = kept[delta == size].float().mean().item()
        assert abs(found - share) < 0.03, size
        assert found == share or 0 < share < 1
    assert kept.float().mean(0).std() < 0.05  # at random, and not by position


@pytest.mark.parametrize("rescale", ["expectation", "none"])
@pytest.mark.parametrize("width", [70, 1])
def test_della_keeps_by_ranks_within_rows_and_divides_each_by_its_own_probability(
    width: int, rescale: str
) -> None:
    rate = 0.6
    epsilon = 0.3
    shape = (40, width)
    random = np.random.default_rng(3)
    delta = random.integers(-20, 20, shape).astype(np.float32)  # many are equal
    bits = draw_bits(mask_key(42, "w"), 0, 3)[: delta.size].reshape(shape)
    # Equal ones stay in order; a row of one is in the middle.
    ranks = np.abs(delta).argsort(axis=1, kind="stable").argsort(axis=1)
    places = ranks / (width - 1) if width > 1 else ranks + 0.5
    rates = (1 - rate - epsilon) + 2 * epsilon * places
    thresholds = np.rint(rates * 65536)
    divisors = (thresholds / 65536 if rescale == "expectation" else 1 + 0 * rates).astype("f4")
    expected = np.where(bits < thresholds, delta / divisors, np.float32(0))
    given = torch.from_numpy(delta)
    kept = merge_delta(given, drop="della", drop_rate=rate, epsilon=epsilon, rescale=rescale)
    assert np.array_equal(kept.numpy(), expected)


@pytest.mark.parametrize("drop", DROPS)
def test_l1_restores_the_sum_of_sizes(drop: str) -> None:
    delta = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    kept = merge_delta(delta, drop=drop, drop_rate=0.7, rescale="l1")
    assert abs(kept).sum() == pytest.approx(float(abs(delta).sum()), rel=1e-5)
    factors = (kept / delta)[kept != 0]
    assert torch.allclose(factors, factors[:1])
    assert factors[0] > 1.1
    nothing = merge_delta([1e-12] * 300, drop=drop, drop_rate=0.7, rescale="l1")
    assert float(nothing.max()) == pytest.approx(1e-12)


def test_ram_keeps_what_one_model_has_and_averages_what_several_have() -> None:
    deltas = [[4.0, 2.0, 1e-6, 3.0, 0.0], [0.0, 6.0, 8.0, -3.0, 1e-6], [0.0, 1.0, 0.0, 6.0, 0.0]]
    models = [{"w": torch.tensor(delta)} for delta in deltas]

    def combine(**config: Any) -> list[float]:
        merged = dare_merge(
            {"w": torch.zeros(5)}, models, DareConfig(method="ram", drop_rate=0.0, **config)
        )
        return merged["w"].tolist()

    assert combine() == [4, 3, 8, 2, 0]
    assert combine(weights=[1, 2, 1]) == pytest.approx([4, 3.75, 8, 0.75, 0])
    assert combine(threshold=2.5) == [4, 6, 8, 2, 0]
    # What is 0 is no change at any threshold: none of these counts for a model that lacks them.
    assert combine(threshold=0) == pytest.approx([4, 3, 4, 2, 1e-6])
    assert merge_delta(deltas[0], method="ram", drop_rate=0.0).tolist() == [4, 2, 0, 3, 0]


# --- the same bits --------------------------------------------------------------------------------


SHAPES = {
    "rows": (9, 900),
    "long": (2, 5000),
    "flat": (3000,),
    "one": (1,),
    "none": (),
    "last": (2, 3, 40),
    "empty": (0, 4),
    "flat empty": (4, 0),
}


def make_tensors(
    kind: str, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[Tensors, list[Tensors]]:
    """A base and two models, the second of which lacks a tensor."""
    base, *models = make_models(2, dtype, shapes, 0.01)
    if kind == "ties":  # many equal deltas, zeros among them
        base = {name: torch.ones_like(tensor) for name, tensor in base.items()}
        steps = {n: torch.arange(t.numel()).reshape(t.shape) % 7 - 3 for n, t in base.items()}
        models = [{name: (1 + k * steps[name] / 8).to(dtype) for name in base} for k in (1, 2)]
    elif kind == "equal":
        models = [{name: (t + 0.25 * k).to(dtype) for name, t in base.items()} for k in (0, 1)]
    models[1].pop("last", None)
    return base, models


@pytest.mark.parametrize("kind", ["random", slow("ties"), slow("equal")])
@pytest.mark.parametrize(
    ("engine", "dtypes"),
    [
        ("plain", (BF16, BF16)),
        slow("numba", (BF16, BF16)),
        slow("cpu", (BF16, BF16)),
        pytest.param("cuda", (BF16, BF16), marks=DEVICES[1].marks),
        *map(slow, ("plain",) * 4, ((F32, F32), (F64, F64), (F32, F64), (BF16, F32))),
        *map(slow, ("cpu",) * 4, ((F32, F32), (F64, F64), (BF16, F32), (F32, F64))),
        *map(slow, ("numba",) * 3, ((F32, F32), (F64, F64), (BF16, F32))),
    ],
    ids=str,
)
def test_rows_that_span_chunks_and_jobs_give_the_bits_of_the_definition_in_any_types(
    tmp_path: Path, engine: str, kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    tune(job_elements=4096, min_chunk=1024, max_chunk=1024, memory_chunk=2048)
    base, models = make_tensors(kind, SHAPES, F64)
    base = {name: tensor.to(dtypes[0]) for name, tensor in base.items()}
    models = [{name: tensor.to(dtypes[1]) for name, tensor in model.items()} for model in models]
    for config in CONFIGS:
        chosen = {"drop_rate": 0.6, **config}
        assert_same(
            merge_by(engine, tmp_path, base, models, chosen), define(base, models, **chosen)
        )


@pytest.mark.parametrize("engine", ["plain", "cpu", slow("numba")])
@examples(3)
@given(
    drops=st.lists(st.sampled_from(DROPS), min_size=2, max_size=2),
    method=st.sampled_from(["linear", "ties", "ram"]),
    rescale=st.sampled_from([None, "l1", "none"]),
    rates=st.lists(st.floats(0.3, 0.7), min_size=2, max_size=2),
    own=st.floats(0, 0.29),
    shape=st.sampled_from([(), (1,), (2500,), (7, 300), (1500, 2), (2, 1300), (3, 1, 50)]),
    size=st.sampled_from([0, 0.0001, 0.01, 1]),
)
def test_any_settings_give_the_bits_of_the_definition(
    tmp_path: Path,
    engine: str,
    drops: list[str],
    method: str,
    rescale: str | None,
    rates: list[float],
    own: float,
    shape: tuple[int, ...],
    size: float,
) -> None:
    tune(job_elements=2048, min_chunk=1024, max_chunk=1024, memory_chunk=1024)
    config: Config = {"method": method, "drop": drops, "rescale": rescale, "drop_rate": rates}
    config |= {"epsilon": own} if "della" in drops else {}
    config |= {"gamma": own} if "breadcrumbs" in drops else {}
    base, *models = make_models(2, BF16, {"w": shape}, size)
    made = merge_by(engine, tmp_path, base, models, config)
    assert_same(made, define(base, models, **config))


# --- all kinds of inputs --------------------------------------------------------------------------


@pytest.mark.parametrize("drop", DROPS[1:])
def test_rows_that_a_model_lacks_are_deltas_of_0(tmp_path: Path, drop: str) -> None:
    tune(job_elements=4096, min_chunk=1024, max_chunk=1024)
    base, whole = make_models(1, BF16, {"w": (90, 70), "b": (90,)}, 0.01)
    config: Config = {"drop": drop, "rescale": "l1", "drop_rate": 0.6}
    for name in whole:
        whole[name][60:] = base[name][60:]
    fewer = {name: tensor[:60].clone() for name, tensor in whole.items()}
    for model in (fewer, {name: tensor.float() for name, tensor in fewer.items()}):
        made = merge(tmp_path, base, model, mismatch="overlap", engine="plain", **config)
        assert_same(made, define(base, [whole], **config))


@pytest.mark.parametrize("engine", ["plain", slow("numba")])
@pytest.mark.parametrize("drop", DROPS[1:])
def test_adapters_are_thinned_like_the_deltas_that_they_stand_for(
    tmp_path: Path, drop: str, engine: str
) -> None:
    tune(job_elements=4096, min_chunk=1024, max_chunk=1024)
    base = {"layer.weight": torch.zeros(60, 90)}
    adapter = write_adapter(tmp_path / "lora", low_rank("layer", (60, 90)))
    output = tmp_path / "out.safetensors"
    [path] = save(tmp_path, base=base)
    delta = merge_paths(path, [adapter], output, drop_rate=0.0, engine=engine)
    config: Config = {"drop": drop, "drop_rate": 0.6, "rescale": "l1"}
    run_merge(path, [adapter], output, engine=engine, **config)
    assert_same(load_file(output), define(base, [delta], **config))


@pytest.mark.parametrize("drop", ["magnitude", "della"])
def test_packed_models_go_with_other_drops_of_other_models_only(
    models: Models, tmp_path: Path, check_refused: Refusal, drop: str
) -> None:
    packed = pack(*models[:2], tmp_path / "packed.safetensors")
    out = tmp_path / "out.safetensors"
    config: Config = {"drop": ["random", drop], "drop_rate": [0.9, 0.5], "engine": "plain"}
    made = [merge_paths(models[0], [one, models[2]], out, **config) for one in (models[1], packed)]
    assert_same(*made)
    for flags in (("--drop", drop, "--drop-rate", "0.5"), ("--rescale", "l1")):
        check_refused(models[0], packed, "is packed", flags[1], flags=flags)


@pytest.mark.parametrize("engine", ["plain", "cpu", slow("numba")])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, config: Config, engine: str
) -> None:
    base, models = make_tensors("random", {"w": (9, 300)}, BF16)
    models[1]["w"][3, 5] = math.nan
    with pytest.raises(DareError, match=r"not finite|nan"):
        merge_by(engine, tmp_path, base, models, {**config, "drop_rate": 0.6})


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("room", [0, 5000, 1 << 20])
def test_ranks_that_are_remembered_are_those_that_were_found(
    tmp_path: Path, room: int, threads: int
) -> None:
    base, models = make_tensors(
        "ties", {"rows": (9, 900), "long": (2, 5000), "flat": (3000,)}, BF16
    )
    config: dict[str, Any] = {
        "drop": ["della", "random"],
        "drop_rate": 0.5,
        "rescale": "l1",
        "engine": "plain",
    }
    wanted = merge(tmp_path, base, *models, **config)
    tune(job_elements=4096, min_chunk=1024, max_chunk=1024, ranked_elements=4096, ranked_bytes=room)
    assert_same(merge(tmp_path, base, *models, **config, threads=threads), wanted)


def test_stacked_matrices_are_ranked_for_a_look_and_again_for_each_matrix(tmp_path: Path) -> None:
    """Their chunks begin where a look's do, and are shorter."""
    models = make_models(2, BF16, {"model.experts.weight": (4, 64, 33)}, 0.001)
    config = {"method": "wudi", "drop": "della", "drop_rate": 0.5, "rescale": "l1"}
    plain, compiled = (
        merge(tmp_path, models[0], *models[1:], engine=engine, **config)
        for engine in ("plain", "numba")
    )
    assert_same(plain, compiled)


def test_a_fault_is_told_in_a_sentence_and_no_warning_of_numpy(tmp_path: Path) -> None:
    base, *models = make_models(2, F32)
    models[0]["layer.weight"][3, 4] = math.inf
    paths = save(tmp_path, base=base, math=models[0], code=models[1])
    for method in ("sce", "arcee_fusion"):
        tunes = paths[1:] if method == "sce" else paths[1:2]
        words = ["-b", paths[0], "-m", *tunes, "-o", tmp_path / "out.safetensors"]
        done = command(*words, "--method", method, "--drop-rate", "0")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-2].endswith("'layer.weight' holds inf at [3, 4]")
        assert "Warning" not in done.stderr
