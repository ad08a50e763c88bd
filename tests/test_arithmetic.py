"""One arithmetic: every engine gives the bits of the definition."""

import hashlib
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dare import ConfigError, DareConfig, DareError, dare_drop, dare_merge, dare_sparsify
from darelib.arithmetic import chunks, definition, stored
from darelib.arithmetic.chunks import CUT, Combining, Cut
from darelib.arithmetic.engine import ENGINE
from darelib.core.mask import keep_rate, mask_key
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    METHODS,
    Config,
    Tensors,
    assert_same,
    define,
    draw_pieces,
    finetune,
    mask,
    merge,
    philox,
    random_model,
    same_bits,
)

SLOW = pytest.mark.slow
BITS = {BF16: torch.int16, F16: torch.int16, F32: torch.int32, F64: torch.int64}
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
# Each combination of types is a kernel to compile, so of these the usual run has one.
SAME = [(dtype, [dtype] * 2, None) for dtype in (BF16, F16, F32, F64)]
MIXED = [
    (BF16, [F32, F32], None),
    (BF16, [F64, BF16], None),
    (F16, [BF16, F16], None),
    (F32, [F16, F16], None),
    (F64, [BF16, F32], None),
    (BF16, [BF16, BF16], "float32"),
    (F64, [F64, F64], "float16"),
    (F32, [F32, F32], "bfloat16"),
    (F32, [F32, F32], "float64"),
]


def merge_by(
    engine: str, folder: Path, base: Tensors, models: list[Tensors], config: Config
) -> Tensors:
    if engine in ("cpu", "cuda"):  # in memory
        given = [
            {name: tensor.to(engine) for name, tensor in model.items()} for model in (base, *models)
        ]
        merged = dare_merge(given[0], given[1:], DareConfig(**config))
        assert all(tensor.device.type == engine for tensor in merged.values())
        return {name: tensor.cpu() for name, tensor in merged.items()}
    return merge(folder, base, *models, engine=engine, **config)


def list_values(dtype: torch.dtype, largest: float) -> torch.Tensor:
    """All values of a 16-bit type up to a size, subnormals and both zeros too; of a wider one,
    random bit patterns."""
    if dtype in (BF16, F16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        limit = {F32: 2**31, F64: 2**63}[dtype]
        patterns = np.random.default_rng(1).integers(-limit, limit, 30_000)
        small = (
            torch.arange(-200, 200).to(BITS[dtype]).view(dtype)
        )  # subnormals and zeros of both signs
        values = torch.cat([torch.from_numpy(patterns).to(BITS[dtype]).view(dtype), small, -small])
    return values[values.double().abs() <= largest]


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float64 to a type in one rounding to nearest even, by scaling to integers."""
    digits, least = {BF16: (8, -133), F16: (11, -24), F32: (24, -149), F64: (53, -1074)}[dtype]
    quantum = np.maximum(np.frexp(values.numpy())[1] - digits, least)
    return torch.from_numpy(np.ldexp(np.rint(np.ldexp(values.numpy(), -quantum)), quantum)).to(
        dtype
    )


# --- the mask -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "result"),
    [  # of Random123's file of known answers
        ("00000000" * 4, "00000000" * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff" * 4, "ffffffff" * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    given, keys, wanted = (
        np.frombuffer(bytes.fromhex(text), ">u4").astype(np.uint64)
        for text in (counter, key, result)
    )
    assert np.array_equal(philox(tuple(map(int, keys)), given), wanted)


@pytest.mark.parametrize("threshold", [1, 1000, 6554, 32768, 65535])
@pytest.mark.parametrize("tile", [0, 1, 2**22 - 1, 2**22, 2**25 - 1, 2**25, 2**40])
def test_masks_are_philox_also_beyond_two_to_the_32_elements(tile: int, threshold: int) -> None:
    """No test could merge tensors of these sizes, so this one asks the engines themselves."""
    key = struct.unpack("<II", hashlib.blake2b(b"42:huge", digest_size=8).digest())
    bits = draw_pieces(key, np.arange(tile * 128, tile * 128 + 128, dtype=np.uint64)).ravel()
    assert key == mask_key(42, "huge")
    assert np.array_equal(definition.draw_bits(key, tile, 1), bits)
    assert np.array_equal(definition.draw_bits(key, tile, 1, torch.arange), bits)
    ENGINE.choose("numba", 0)
    kept = chunks.take_kept(np.arange(1024, dtype=np.uint16), *key, threshold, tile)
    assert np.array_equal(kept, np.flatnonzero(bits < threshold))


def test_masks_keep_the_share_that_rescales_and_are_independent_of_each_other() -> None:
    """Correlated masks would show in the share of positions that two of them keep together."""
    count = 200_000
    for rate in (0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.999, 0.999999):
        share = keep_rate(rate)
        assert abs(share - (1 - rate)) <= 2**-16
        assert abs(np.mean(mask(7, "a", count, rate)) - share) <= 5 * math.sqrt(
            share * (1 - share) / count
        )
    masks = [mask(seed, name, count, 0.5) for seed in (7, 8) for name in ("a", "b")]
    pairs = [(one, other) for k, one in enumerate(masks) for other in masks[:k]]
    # Within a mask, the distances at which the generator's lanes lie.
    pairs += [(one[far:], one[:-far]) for one in masks for far in (1, 2, 127, 128, 129, 512, 1024)]
    for one, other in pairs:
        assert abs(np.mean(one & other) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(one))


# --- compiled functions ---------------------------------------------------------------------------

NOTHING = np.zeros(0, np.uint16)
KEYS = (0x12345678, 0x9ABCDEF0)
CUTS = {
    "all": Cut(*KEYS),
    "random": Cut(*KEYS, threshold=6554, draws=True, scale=10.0),
    "above a floor": Cut(*KEYS, threshold=40_000, draws=True, scale=1.5, floor=0.01),
    "by size": Cut(*KEYS, 1 << 16, True, bounded=True, low=0.01, high=0.03, at_low=20_000, scale=2),
    "by rank": Cut(*KEYS, 6554, True, ranked=True, divided=True, scale=2),
}
WEIGHTS = np.array([1.0, 0.3, 2.0])
HOW = [
    Combining(False, False, WEIGHTS, 0.0, 0.25, 0.7),
    Combining(False, False, WEIGHTS, -0.5, 0.0, 1.0),
    Combining(True, True, WEIGHTS, 0.0, 0.25, 1.0),
    Combining(True, False, WEIGHTS, 0.0, 0.0, 0.5),
]


def draw_values(count: int, real: Any, seed: int) -> np.ndarray:
    """Random numbers, some of which are equal, 0 or -0."""
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(real).round(4)


def run_both(function: Any, *given: Any) -> Any:
    """What both make of copies of these arguments: the same, and the same of the arguments."""
    found = []
    for engine in ("numba", "plain"):
        ENGINE.choose(engine, 0)
        copies = [each.copy() if isinstance(each, np.ndarray) else each for each in given]
        result = function(*copies)
        parts = list(result) if isinstance(result, tuple) else [result]
        found.append([*parts, *copies])
        assert (ENGINE.jitted is None) == (engine == "plain")
    for one, other in zip(*found, strict=True):
        if isinstance(one, np.ndarray):
            assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
        else:
            assert one == other or (one != one and other != other)
    return found[0]


@pytest.mark.parametrize("count", [1, 1024, 5000])
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_compiled_functions_give_the_bits_of_those_that_define_them(real: Any, count: int) -> None:
    base, one, other = (draw_values(count, real, k) for k in range(3))
    values = np.stack([one, other, one - base])
    row, merged = np.zeros((2, count), real)
    last_bits = np.random.default_rng(4).integers(0, 1 << 16, values.shape).astype(np.uint16)
    cuts = np.array([*CUTS.values()], CUT)
    for k, start in enumerate((3072, 3372, 3072, 3372)):
        # Each with other ways to be thinned; the last is a change.
        own = np.roll(cuts, k)[:3]
        own["is_delta"][2] = True
        for how in HOW:
            run_both(
                chunks.merge, base, values, own, last_bits, start, 0.02, how, values[:0], merged
            )
        nothing = (np.empty_like(values), merged[:0])
        run_both(chunks.merge, base, values, own, last_bits, start, 0.02, HOW[0], *nothing)
    run_both(chunks.add_change, base, merged, 0.7)
    run_both(chunks.dot, one, other)
    run_both(chunks.measure, one, 0.02, np.zeros(1024, np.int64))
    run_both(chunks.compare, one, other)
    raw = one.view(f"u{one.itemsize}")
    run_both(chunks.take_kept, raw, *KEYS, 6554, 3)
    run_both(chunks.put_kept, base, one[: count // 20], *KEYS, 6554, 3, row)
    for cut in (CUTS["all"], CUTS["random"]):
        patterns = abs(one - base).view(raw.dtype).astype(np.uint64)
        top = 8 * one.itemsize - 16
        known = [*(patterns[:2] >> np.uint64(top)), 0]
        for down, prefixes in ((top, [0, 0]), (top - 16, known)):
            wanted = np.array(prefixes[:2], np.uint64)
            counts = np.zeros((2, 1 << 16), np.uint32)
            given = (one, base, cut, 3, down, wanted, counts)
            run_both(chunks.count_digits, *given)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_largest_value(odd: float) -> None:
    good, bad = draw_values(3000, np.float32, 1), draw_values(3000, np.float32, 2)
    bad[2500] = odd
    for engine in ("numba", "plain"):
        ENGINE.choose(engine, 0)
        cuts, rows = np.array([CUTS["all"]], CUT), np.zeros((1, 3000), np.float32)
        given = (good, bad[None], cuts, NOTHING[None], 0, 0.1, HOW[0], rows, good[:0])
        assert chunks.merge(*given)[1][0] == math.inf
        assert chunks.add_change(good, bad.copy(), 1.0) == math.inf
        assert chunks.measure(bad, 0.1, np.zeros(1024, np.int64))[4] == math.inf


@pytest.mark.parametrize("width", [1, 7, 16, 17, 640, 4096])
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_compiled_ranks_are_those_of_a_stable_sort(real: Any, width: int) -> None:
    sizes = abs(draw_values(3 * width, real, 1)).view(f"u{np.dtype(real).itemsize}")
    by_rank = np.random.default_rng(2).integers(0, 1 << 16, width).astype(np.uint16)
    skipped = width // 3
    run_both(chunks.rank_rows, sizes, by_rank, skipped, 2 * width)


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_compiled_products_are_added_in_the_order_of_the_ranks(real: Any) -> None:
    left = draw_values(5 * 7, real, 1).reshape(5, 7)
    right = draw_values(7 * 3000, real, 2).reshape(7, 3000)
    product = draw_values(11_000, real, 3)
    made = run_both(chunks.add_product, left, right, product, 1500)[3]
    wide = left.astype(np.longdouble) @ right
    assert np.allclose(made, product + wide.reshape(-1)[1500:12_500].astype(real), atol=1e-6)


@pytest.mark.parametrize("function", ["bf16", "f16"])
def test_compiled_functions_read_and_round_every_16_bits(function: str) -> None:
    raw = np.arange(1 << 16, dtype=np.uint16)
    values = run_both(getattr(stored, f"widen_{function}"), raw, np.zeros(1 << 16, np.float32))[-1]
    bits = values.view(np.uint32)
    steps = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], np.uint32)
    between = bits[:, None] + steps
    numbers = between.ravel().view(np.float32)
    run_both(getattr(stored, f"narrow_{function}"), numbers[~np.isnan(numbers)])


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*METHODS, {"drop_rate": 0.0}], ids=str)
@pytest.mark.parametrize(
    ("engine", "types"),
    [
        ("numba", SAME[0]),
        *((engine, types) for engine in ("plain", "cpu") for types in SAME + MIXED),
        *(pytest.param("cuda", types, marks=DEVICES[1].marks) for types in SAME + MIXED[1:2]),
        *(pytest.param("numba", types, marks=SLOW) for types in SAME[1:] + MIXED),
    ],
    ids=str,
)
def test_every_engine_gives_the_bits_of_the_definition_for_every_kind_of_value(
    tmp_path: Path,
    engine: str,
    types: tuple[torch.dtype, list[torch.dtype], str | None],
    config: Config,
) -> None:
    dtype, others, output = types
    half = F16 in (dtype, *others) or output == "float16"
    values = list_values(dtype, 2000.0 if half else 1e100 if types == SAME[-1] else 1e37)
    shuffle = torch.Generator().manual_seed(5)
    base, *models = (values[torch.randperm(len(values), generator=shuffle)] for _ in range(3))
    models[0][::3] = base[::3]  # unchanged entries, negative zeros among them
    parts = [{"w": model.to(other)} for model, other in zip(models, others, strict=True)]
    config = {**config, "dtype": output}
    assert_same(
        merge_by(engine, tmp_path, {"w": base}, parts, config), define({"w": base}, parts, **config)
    )


@pytest.mark.parametrize("engine", ["plain", *DEVICES, pytest.param("numba", marks=SLOW)])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_one_rounding_is_to_nearest_even_even_from_float64(
    tmp_path: Path, engine: str, dtype: torch.dtype
) -> None:
    """Halfway cases and their neighbours, which a detour over float32 would round twice."""
    steps = 1 + torch.tensor(
        [2**-8, 3 * 2**-8, 2**-8 + 2**-40, 2**-8 - 2**-40, 2**-9, -2 - 2**-8 - 2**-50], dtype=F64
    )
    values = torch.cat([steps, steps * 2.0**-130, steps * 2.0**-20, 1 + (steps - 1) * 2**-16])
    base = {"w": torch.zeros(len(values), dtype=dtype)}
    merged = merge_by(engine, tmp_path, base, [{"w": values}] * 2, {"drop_rate": 0.0})
    assert_same(merged, {"w": round_to(values, dtype)})


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_finite_16_bit_value_is_read_and_written_as_it_is(dtype: torch.dtype) -> None:
    model = {"w": list_values(dtype, 1e39)}
    base = {"w": model["w"].flip(0)}
    assert_same(define(base, [model], drop_rate=0.0), model)
    wide = {"w": model["w"].double()}
    assert_same(define(base, [model], drop_rate=0.0, dtype="float64"), wide)


# --- tensors in memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_in_memory_are_merged_and_left_as_they_are(tmp_path: Path, device: str) -> None:
    base = {**random_model(6, BF16), "ids": torch.arange(7), "empty": torch.zeros(0, 3, dtype=BF16)}
    models = [{**base, **finetune(random_model(6, BF16), seed, 0.02)} for seed in (1, 2, 3)]
    del models[0]["layer.weight"], models[1]["scalar"], models[1]["layer.weight"]
    config = {
        "method": "ties",
        "drop_rate": [0.1, 0.5, 0.9],
        "keep_ratio": 0.6,
        "weights": [1, 2, 3],
    }
    before = [{name: tensor.clone() for name, tensor in model.items()} for model in (base, *models)]
    assert_same(
        merge_by(device, tmp_path, base, models, config), merge(tmp_path, base, *models, **config)
    )
    sparse = dare_sparsify(base, models[2], drop_rate=0.8, seed=3)
    assert_same(sparse, merge(tmp_path, base, models[2], drop_rate=0.8, seed=3))
    for model, original in zip((base, *models), before, strict=True):
        assert_same(model, original)


@pytest.mark.parametrize("method", ["linear", "ties", "wudi"])
def test_the_default_device_of_torch_is_nothing_to_a_merge(method: str) -> None:
    base = {"w": torch.randn(64, 48), "b": torch.randn(7)}
    models = [finetune(base, seed, 0.02) for seed in (1, 2)]
    expected = dare_merge(base, models, DareConfig(method=method, drop_rate=0.5))
    with torch.device("meta"):
        assert_same(dare_merge(base, models, DareConfig(method=method, drop_rate=0.5)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rescale", [True, False])
def test_dropped_deltas_are_masked_and_rescaled_without_a_word(
    device: str, rescale: bool, caplog: pytest.LogCaptureFixture
) -> None:
    deltas = {"w": torch.randn(100, 70), "half": torch.randn(3000).to(BF16), "ids": torch.arange(3)}
    given = {name: delta.to(device) for name, delta in deltas.items()}
    thinned = dare_drop(given, drop_rate=0.7, seed=5, rescale=rescale)
    scale = np.float32(1 / keep_rate(0.7)) if rescale else np.float32(1)
    for name in ("w", "half"):
        expected = torch.where(
            torch.from_numpy(mask(5, name, deltas[name].numel(), 0.7)).reshape(deltas[name].shape),
            deltas[name].float() * scale,
            0.0,
        ).to(deltas[name].dtype)
        assert same_bits(thinned[name].cpu(), expected)
    assert same_bits(thinned["ids"].cpu(), deltas["ids"])
    assert_same(dare_drop(deltas, drop_rate=0.0), deltas)
    assert not caplog.records


STATE: Any = {"w": torch.zeros(10)}


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: dare_merge(STATE, [STATE], {}), "config must be a DareConfig"),
        (lambda: dare_merge(STATE, [STATE], 0.9), "config must be a DareConfig"),
        (
            lambda: dare_merge("base.safetensors", [STATE]),
            "the base must be a state dict, not of type str",
        ),
        (
            lambda: dare_merge(torch.nn.Linear(2, 2), [STATE]),
            "the base must be a state dict, not of type Linear",
        ),
        (lambda: dare_merge({}, [STATE]), "the base has no tensors"),
        (
            lambda: dare_merge({"w": np.zeros(10)}, [STATE]),
            "the base must map names to tensors, not 'w' to ndarray",
        ),
        (
            lambda: dare_merge({0: torch.zeros(10)}, [STATE]),
            "the base must map names to tensors, not 0 to Tensor",
        ),
        (
            lambda: dare_merge(STATE, "model.safetensors"),
            "finetuned must be a list of state dicts",
        ),
        (lambda: dare_merge(STATE, Path("model")), "finetuned must be a list of state dicts"),
        (lambda: dare_merge(STATE, None), "finetuned must be a list of state dicts"),
        (
            lambda: dare_merge(STATE, [STATE, Path("model")]),
            "model 1 must be a state dict, not of type",
        ),
        (
            lambda: dare_merge(STATE, [{**STATE, "v": None}]),
            "model 0 must map names to tensors, not 'v' to NoneType",
        ),
        (
            lambda: dare_merge(STATE, [{"w": torch.zeros(10, device="meta")}]),
            "model 0 has tensors without values",
        ),
        (lambda: dare_sparsify(Path("base"), STATE), "the base must be a state dict"),
        (
            lambda: dare_sparsify(STATE, "model"),
            "model 0 must be a state dict, not of type str",
        ),
        (
            lambda: dare_sparsify(STATE, [STATE]),
            "model 0 must be a state dict, not of type list",
        ),
        (lambda: dare_drop("delta"), "the task vector must be a state dict, not of type str"),
        (
            lambda: dare_drop({"w": 1.0}),
            "the task vector must map names to tensors, not 'w' to float",
        ),
        (lambda: dare_drop(STATE, drop_rate=1.0), "drop_rate must be a number"),
    ],
)
def test_arguments_of_another_type_are_refused_with_a_sentence(
    call: Callable[[], Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{complaint}") as caught:
        call()
    assert caught.value.hint


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "wrap", [lambda tensor: tensor.as_subclass(Own), torch.nn.Parameter], ids=["own", "parameter"]
)
def test_tensors_of_any_class_are_merged(wrap: Any) -> None:
    base, model = torch.randn(50), torch.randn(50)
    merged = dare_merge({"w": wrap(base)}, [{"w": wrap(model)}])["w"]
    assert torch.equal(merged, dare_merge({"w": base}, [{"w": model}])["w"])
    assert not merged.requires_grad


def test_tensors_that_share_their_values_stay_tied() -> None:
    base, model = ({"embed.weight": torch.randn(30, 4), "b": torch.randn(5)} for _ in range(2))
    for table in (base, model):
        table["head.weight"] = table["embed.weight"]
    merged = dare_merge(base, [model])
    lacking = dare_merge(base, [{n: t for n, t in model.items() if n != "head.weight"}])
    for made in (merged, lacking):
        assert made["head.weight"] is made["embed.weight"]
    assert_same(lacking, merged)
    untied = dare_merge(base, [model | {"head.weight": model["embed.weight"].clone()}])
    assert not torch.equal(untied["head.weight"], untied["embed.weight"])


def test_what_does_not_fit_into_out_is_refused_before_anything_is_written() -> None:
    base, model = ({"a": torch.randn(9), "b": torch.randn(4, 3)} for _ in range(2))
    with pytest.raises(DareError, match="out must be a state dict"):
        dare_merge(base, [model], out=[torch.zeros(10)])
    for wrong, complaint in (
        ({"b": torch.zeros(3, 4)}, "'b' of out is [3, 4] of torch.float32"),
        ({"b": torch.zeros(4, 3).double()}, "of torch.float64"),
        ({}, "out has no tensor 'b'"),
    ):
        out = {"a": torch.zeros(9), **wrong}
        with pytest.raises(DareError, match=re.escape(complaint)) as caught:
            dare_merge(base, [model], out=out)
        assert caught.value.hint
        assert not out["a"].any()
    kept = base["a"].clone()
    with pytest.raises(DareError, match=re.escape("'b' is [4, 3] in 'the base' and [2]")):
        dare_merge(base, [{"a": model["a"], "b": torch.zeros(2)}], out=base)
    assert torch.equal(base["a"], kept)


def test_tensors_of_out_share_memory_only_where_the_merged_ones_are_one() -> None:
    base, model = ({"embed.weight": torch.randn(30, 4)} for _ in range(2))
    base["head.weight"] = base["embed.weight"]
    untied = model | {"head.weight": model["embed.weight"].clone()}
    with pytest.raises(DareError, match="of out shares its memory with"):
        dare_merge(base, [untied], out=base)
    expected = dare_merge(base, [model])
    own = {
        name: torch.zeros(30, 4, requires_grad=True) for name in base
    }  # a live model's parameters
    for out in (own, base):
        merged = dare_merge(base, [model], out=out)
        assert all(
            merged[name] is out[name] and torch.equal(out[name], expected[name]) for name in base
        )
