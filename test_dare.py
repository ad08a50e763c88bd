"""The claims that dare makes, each with a test that runs the real thing on real files.

Run with `uv run pytest` (or `uv run python test_dare.py`); add `-m ''` for the slow ones too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dare
from dare import ConfigError, DareConfig, DareError, DareMerger

HERE = Path(__file__).resolve().parent
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BITS = {BF16: torch.int16, F16: torch.int16, F32: torch.int32, F64: torch.int64}
Tensors = dict[str, torch.Tensor]

# ---------------------------------------------------------------------------------------------------------------------
# Making and merging small models
# ---------------------------------------------------------------------------------------------------------------------


def random_model(seed: int = 0, dtype: torch.dtype = F32, shapes: dict[str, tuple[int, ...]] | None = None) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes or {"layer.weight": (37, 61), "layer.bias": (61,), "head.weight": (5, 1500), "scalar": ()}
    return {name: (torch.randn(shape, generator=generator) * 0.05).to(dtype) for name, shape in shapes.items()}


def finetune(base: Tensors, seed: int, size: float = 0.001) -> Tensors:
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: (tensor.double() + torch.randn(tensor.shape, generator=generator).double() * size).to(tensor.dtype)
        for name, tensor in base.items()
    }


def save(folder: Path, **models: Tensors) -> list[Path]:
    """Write each model to folder/NAME.safetensors."""
    paths = []
    for name, tensors in models.items():
        paths.append(folder / f"{name}.safetensors")
        save_file(tensors, paths[-1])
    return paths


def merge(folder: Path, base: Tensors, *models: Tensors, **config: Any) -> Tensors:
    """Merge through the front door: write the files, merge them, load the result."""
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    output = folder / "merged.safetensors"
    DareMerger(paths[0], paths[1:], DareConfig(verbose=False, **config)).merge(output)
    return load_file(output)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = BITS.get(a.dtype)
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(*((a, b) if kind is None else (a.view(kind), b.view(kind))))
    )


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert same_bits(a[name], b[name]), name


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything in a folder: size, modification time and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and os.access(path, os.R_OK) else ""
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns, content)
    return found


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """A base and two fine-tunes in bf16, as files."""
    base = random_model(dtype=BF16)
    return save(tmp_path, base=base, math=finetune(base, 1), code=finetune(base, 2))


def command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, str(HERE / "dare.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


# ---------------------------------------------------------------------------------------------------------------------
# An independent version of the mask, in NumPy, from the README's description
# ---------------------------------------------------------------------------------------------------------------------


def philox4x32(counter: Any, key: tuple[int, int], rounds: int) -> list[np.ndarray]:
    """Salmon et al., 2011, section 3.3 and the constants of its table."""
    word = np.uint64(0xFFFFFFFF)
    c = [np.asarray(part, dtype=np.uint64) for part in counter]
    for turn in range(rounds):
        k0 = np.uint64((key[0] + turn * 0x9E3779B9) % 2**32)
        k1 = np.uint64((key[1] + turn * 0xBB67AE85) % 2**32)
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = np.uint64(32)
        c = [(second >> high) ^ c[1] ^ k0, second & word, (first >> high) ^ c[3] ^ k1, first & word]
    return c


def reference_bits(key: tuple[int, int], start: int, count: int) -> np.ndarray:
    """The 16 random bits of each element from start, which is a multiple of 1024."""
    tiles = -(-count // 1024)
    block = np.arange(tiles * 128, dtype=np.uint64) + np.uint64(start // 8)
    words = philox4x32([block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), block * 0, block * 0], key, 7)
    pieces = np.stack([piece for w in words for piece in (w & np.uint64(0xFFFF), w >> np.uint64(16))])
    return pieces.reshape(8, tiles, 128).transpose(1, 0, 2).reshape(-1)[:count]


def reference_key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def reference_mask(seed: int, name: str, count: int, drop_rate: float) -> np.ndarray:
    return reference_bits(reference_key(seed, name), 0, count) < max(1, round((1 - drop_rate) * 65536))


def honoured(drop_rate: float) -> float:
    return max(1, round((1 - drop_rate) * 65536)) / 65536


def kept_positions(tensors: Tensors, name: str) -> np.ndarray:
    return (tensors[name] != 0).numpy().ravel()


def unit_models(shapes: dict[str, int], count: int = 1) -> list[Tensors]:
    """A base of zeros and fine-tunes of ones: in their merge, what is not zero was kept."""
    return [{name: torch.full((size,), float(i > 0)) for name, size in shapes.items()} for i in range(count + 1)]


# Random123's known-answer file, philox4x32 with 7 and with 10 rounds: rounds, counter, key, result.
ZEROS, ONES = (0, 0, 0, 0), (0xFFFFFFFF,) * 4
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN_ANSWERS = [
    (7, ZEROS, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, ONES[:2], (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0xA4093822, 0x299F31D0), (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, ZEROS, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, ONES[:2], (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(rounds: int, counter: Any, key: Any, result: Any) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key, rounds)) == result


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**63 - 1),
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
        lambda n: n != "__metadata__"
    ),
    count=st.integers(1, 5000),
    drop_rate=st.floats(0, 1, exclude_max=True),
)
def test_any_compiled_mask_equals_the_numpy_mask(
    tmp_path: Path, seed: int, name: str, count: int, drop_rate: float
) -> None:
    merged = merge(tmp_path, *unit_models({name: count}), seed=seed, drop_rate=drop_rate)
    assert np.array_equal(kept_positions(merged, name), reference_mask(seed, name, count, drop_rate))


def test_the_published_answer_comes_out_of_the_compiled_mask() -> None:
    bits = run_kernel_mask((0, 0), first_tile=0)
    words = KNOWN_ANSWERS[0][3]
    pieces = [piece for word in words for piece in (word & 0xFFFF, word >> 16)]
    assert [int(bits[128 * h]) for h in range(8)] == pieces


@pytest.mark.parametrize("first", [2**32 - 1024, 2**32, 2**35 - 1024, 2**35, 2**40])
def test_masks_go_on_beyond_two_to_the_32_elements(first: int) -> None:
    key = reference_key(42, "huge")
    assert np.array_equal(run_kernel_mask(key, first // 1024), reference_bits(key, first, 1024))


def run_kernel_mask(key: tuple[int, int], first_tile: int) -> np.ndarray:
    """The 16 bits that the kernel draws for each element of a tile, found by halving the interval they can be in."""
    kernel = dare.load_kernel(dare.KernelSpec("linear", "F32", "F32", "F32"))
    low, high = np.zeros(1024, np.int64), np.full(1024, 65535, np.int64)
    base, finetuned, output = np.zeros(1024, np.float32), np.ones(1024, np.float32), np.empty(1024, np.float32)
    reals = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]])  # scale and weight 1; lambda 1, no pull
    scratch, counts = np.zeros(16 * dare.SCRATCH_WIDTH), np.zeros((1, 1), np.int64)
    for bit in reversed(range(16)):
        for prefix in np.unique(low):
            limit = prefix + (1 << bit) - 1
            words = np.array([[*key, limit, 0, dare.BASE_ROW, 0, 0, 0], [0] * 8], np.uint64)
            buffers = (base, finetuned, output, words, reals, scratch, counts)
            kernel(*(buffer.ctypes.data for buffer in buffers), 1024, 1024, 1, first_tile, 0)
            here, below = low == prefix, output != 0
            high[here & below] = limit
            low[here & ~below] = limit + 1
    assert np.array_equal(low, high)
    return low


def test_the_honoured_rate_is_the_rate_that_rescales(tmp_path: Path) -> None:
    for drop_rate in (0.0, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.999, 0.999999):
        merged = merge(tmp_path, *unit_models({"w": 200_000}), drop_rate=drop_rate)["w"]
        kept = merged[merged != 0]
        assert torch.all(kept == np.float32(1 / honoured(drop_rate)))
        expected, spread = honoured(drop_rate), math.sqrt(honoured(drop_rate) * (1 - honoured(drop_rate)) / 200_000)
        assert abs(len(kept) / 200_000 - expected) <= 5 * spread


def test_masks_of_models_and_of_tensors_are_independent(tmp_path: Path) -> None:
    """Correlated masks would show in the share of positions that two of them keep together."""
    count, rate = 200_000, 0.5
    base, model = unit_models({"a": count, "b": count})
    first = merge(tmp_path, base, model, drop_rate=rate, seed=7)
    second = merge(tmp_path, base, model, drop_rate=rate, seed=8)
    masks = [kept_positions(tensors, name) for tensors in (first, second) for name in ("a", "b")]
    for i in range(4):
        for j in range(i):
            both = np.mean(masks[i] & masks[j])
            assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / count), (i, j)
    # and neighbours within a mask are independent too, at the distances at which the generator's lanes lie
    for mask in masks:
        for distance in (1, 2, 127, 128, 129, 512, 1024):
            both = np.mean(mask[distance:] & mask[:-distance])
            assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / (count - distance)), distance


def test_each_model_draws_with_its_own_seed(tmp_path: Path) -> None:
    base, one = unit_models({"w": 5000})
    two = {"w": torch.full((5000,), 3.0)}
    merged = merge(tmp_path, base, one, two, drop_rate=0.5, seed=10)["w"].numpy()
    masks = [reference_mask(10 + i, "w", 5000, 0.5) for i in range(2)]
    assert np.array_equal(merged, masks[0] * 1.0 + masks[1] * 3.0)
    assert not np.array_equal(masks[0], masks[1])


def test_the_mean_over_seeds_is_the_plain_average_with_the_right_variance(tmp_path: Path) -> None:
    """Every seed gives an unbiased estimate with variance p / (1 - p) * delta^2 per model."""
    rng = np.random.default_rng(3)
    base = torch.from_numpy(rng.normal(size=2048).astype(np.float32))
    deltas = [torch.from_numpy(rng.normal(size=2048).astype(np.float32)) for _ in range(2)]
    paths = save(tmp_path, base={"w": base}, a={"w": base + deltas[0]}, b={"w": base + deltas[1]})
    seeds, rate, results = 400, 0.8, []
    for seed in range(seeds):
        config = DareConfig(drop_rate=rate, seed=2 * seed, verbose=False)
        DareMerger(paths[0], paths[1:], config).merge(tmp_path / "out.safetensors")
        results.append(load_file(tmp_path / "out.safetensors")["w"].double())
    samples = torch.stack(results)
    average = base.double() + sum(delta.double() for delta in deltas) / 2
    keep = honoured(rate)
    variance = sum(((delta.double() / 2) ** 2) * (1 - keep) / keep for delta in deltas)
    z = (samples.mean(0) - average) / (variance / seeds).sqrt()
    assert z.abs().max() < 6
    assert abs(z.pow(2).mean() - 1) < 0.2
    assert abs((samples.var(0) / variance).mean() - 1) < 0.03


# ---------------------------------------------------------------------------------------------------------------------
# Same recipe, same bytes
# ---------------------------------------------------------------------------------------------------------------------


def test_same_bytes_on_any_number_of_threads(models: list[Path], tmp_path: Path) -> None:
    files = []
    for threads in (1, 2, 7):
        output = tmp_path / f"on{threads}.safetensors"
        DareMerger(models[0], models[1:], DareConfig(threads=threads, verbose=False)).merge(output)
        files.append(output.read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("chunk", [1024, 2048, 1 << 16])
def test_same_bytes_for_any_chunk_size(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "usual.safetensors")
    monkeypatch.setattr(dare, "MIN_CHUNK", chunk)
    monkeypatch.setattr(dare, "MAX_CHUNK", chunk)
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "other.safetensors")
    assert (tmp_path / "usual.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def write_in_order(path: Path, tensors: Tensors, names: list[str]) -> None:
    """A safetensors file with its tensors in any order; the library always sorts them."""
    header: dict[str, Any] = {}
    data = b""
    for name in names:
        raw = tensors[name].contiguous().view(torch.uint8).numpy().tobytes() if tensors[name].numel() else b""
        kind = {BF16: "BF16", F16: "F16", F32: "F32", F64: "F64", torch.int64: "I64"}[tensors[name].dtype]
        ends = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": ends}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_same_tensors_in_any_stored_order_and_alone_or_among_others(tmp_path: Path) -> None:
    base = {name: t.reshape(-1) for name, t in random_model(dtype=BF16).items()}
    model = finetune(base, 1)
    together = merge(tmp_path, base, model)
    backwards = sorted(base, reverse=True)
    write_in_order(tmp_path / "base.safetensors", base, backwards)
    write_in_order(tmp_path / "m0.safetensors", model, sorted(base, key=lambda n: n[::-1]))
    DareMerger(tmp_path / "base.safetensors", [tmp_path / "m0.safetensors"], DareConfig(verbose=False)).merge(
        tmp_path / "merged.safetensors"
    )
    assert_same(load_file(tmp_path / "merged.safetensors"), together)
    with safe_open(tmp_path / "merged.safetensors", framework="pt") as file:
        assert list(file.offset_keys()) == backwards, "the base's order is kept"
    for name in base:
        alone = merge(tmp_path, {name: base[name]}, {name: model[name]})
        assert same_bits(alone[name], together[name])


def test_same_bytes_everywhere(tmp_path: Path) -> None:
    """The digest of a merge of exactly known inputs: any platform, thread count or version that differs is a bug."""
    n = 30_000
    pattern = np.arange(n, dtype=np.int64) * 2654435761 % 2**32
    base = (pattern / 2**32 - 0.5).astype(np.float32)
    shifts = [((pattern * k % 65537) / 65537 - 0.5).astype(np.float32) / 128 for k in (3, 7, 11)]
    as_torch = [torch.from_numpy(base), *(torch.from_numpy(base + shift) for shift in shifts)]
    digest = hashlib.sha256()
    for dtype in (BF16, F16, F32, F64):
        parts = [{"w": tensor.to(dtype)} for tensor in as_torch]
        digest.update(merge(tmp_path, *parts, drop_rate=0.7)["w"].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "f9420cbd6b1041eccf3938001823bd5d0d5527bb87c6ba2fd488cb9508313eed"


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic, against plain NumPy
# ---------------------------------------------------------------------------------------------------------------------


def round_to(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Exact values (float64) to a type in one rounding to nearest even, by scaling to integers."""
    digits, least = {BF16: (8, -133), F16: (11, -24), F32: (24, -149), F64: (53, -1074)}[dtype]
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - digits, least)
    return torch.from_numpy(np.ldexp(np.rint(np.ldexp(values, -quantum)), quantum)).to(dtype)


def reference_merge(
    base: torch.Tensor, models: list[torch.Tensor], name: str, drop_rate: float, seed: int
) -> torch.Tensor:
    """The four formulas in plain NumPy."""
    real = np.float64 if F64 in {base.dtype, *(m.dtype for m in models)} else np.float32
    wide = [tensor.to(F64).numpy().astype(real).ravel() for tensor in (base, *models)]
    merged = np.zeros_like(wide[0])
    for i, finetuned in enumerate(wide[1:]):
        mask = reference_mask(seed + i, name, base.numel(), drop_rate)
        scale = real(1 / len(models) / honoured(drop_rate))
        with np.errstate(over="ignore"):
            merged += np.where(mask, scale * (finetuned - wide[0]), real(0))
    output = np.where(merged == 0, wide[0], wide[0] + merged)
    if len(models) == 1 and drop_rate == 0:
        output = wide[1]
    return round_to(output.astype(np.float64), base.dtype).reshape(base.shape)


def every_finite(dtype: torch.dtype, largest: float) -> torch.Tensor:
    """All values of a 16-bit type up to a size, subnormals and both zeros too; of a wider one, random bit patterns."""
    if dtype in (BF16, F16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        count, limit = 60_000, {F32: 2**31, F64: 2**63}[dtype]
        patterns = np.random.default_rng(1).integers(-limit, limit, count)
        values = torch.from_numpy(patterns).to(BITS[dtype]).view(dtype)
        small = torch.arange(-200, 200).to(BITS[dtype]).view(dtype)  # subnormals and zeros of both signs
        values = torch.cat([values, small, -small])
    return values[values.double().abs() <= largest]


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize(("drop_rate", "count"), [(0.0, 1), (0.0, 2), (0.5, 1), (0.9, 3)])
def test_kernels_equal_numpy_on_every_kind_of_value(
    tmp_path: Path, dtype: torch.dtype, drop_rate: float, count: int
) -> None:
    values = every_finite(dtype, {BF16: 1e37, F16: 2000.0, F32: 1e37, F64: 1e300}[dtype])
    generator = torch.Generator().manual_seed(5)
    base = values[torch.randperm(len(values), generator=generator)]
    models = [values[torch.randperm(len(values), generator=generator)] for _ in range(count)]
    models[0][::3] = base[::3]  # unchanged entries, negative zeros among them
    merged = merge(tmp_path, {"w": base}, *({"w": m} for m in models), drop_rate=drop_rate)["w"]
    assert same_bits(merged, reference_merge(base, models, "w", drop_rate, 42))


MIXTURES = [(BF16, (F32,)), (BF16, (F64, BF16, F32)), (F16, (BF16, F16)), (F32, (F16, F16)), (F64, (BF16, F32))]
OTHER_MIXTURES = [
    (base, types)
    for base in (BF16, F16, F32, F64)
    for types in ((F32,), (F16,), (BF16, BF16), (F64, F64), (BF16, F16), (F64, BF16))
    if (base, types) not in MIXTURES
]


@pytest.mark.parametrize(
    ("base_type", "types"), [*MIXTURES, *(pytest.param(*m, marks=pytest.mark.slow) for m in OTHER_MIXTURES)]
)
def test_base_and_models_may_be_of_different_types(
    tmp_path: Path, base_type: torch.dtype, types: tuple[torch.dtype, ...]
) -> None:
    generator = torch.Generator().manual_seed(8)
    base = torch.randn(4000, generator=generator, dtype=F64).to(base_type)
    models = [(base.double() + torch.randn(4000, generator=generator, dtype=F64) * 0.01).to(kind) for kind in types]
    merged = merge(tmp_path, {"w": base}, *({"w": m} for m in models), drop_rate=0.3)["w"]
    assert same_bits(merged, reference_merge(base, models, "w", 0.3, 42))


def test_the_one_rounding_is_to_nearest_even_even_from_float64(tmp_path: Path) -> None:
    """Halfway cases and their neighbours, which a detour over float32 would round twice."""
    steps = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-9, -(1 + 2**-8 + 2**-50)]
    )
    for base_type in (BF16, F16, F32):
        values = torch.from_numpy(
            np.concatenate([steps, steps * 2.0**-130, steps * 2.0**-20, 1 + (steps - 1) * 2**-16])
        )
        base = torch.zeros(len(values), dtype=base_type)
        merged = merge(tmp_path, {"w": base}, {"w": values}, {"w": values}, drop_rate=0.0)["w"]
        assert same_bits(merged, round_to(values.numpy(), base_type))


sixteen_bits = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=300)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=sixteen_bits, b=sixteen_bits, dtype=st.sampled_from([BF16, F16]))
def test_dropping_nothing_gives_any_finetune_back_bit_for_bit(
    tmp_path: Path, a: list[int], b: list[int], dtype: torch.dtype
) -> None:
    pair = [torch.tensor(bits[: min(len(a), len(b))], dtype=torch.int32).to(torch.int16).view(dtype) for bits in (a, b)]
    base, model = (torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor)) for tensor in pair)
    assert same_bits(merge(tmp_path, {"w": base}, {"w": model}, drop_rate=0.0)["w"], model)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=sixteen_bits, dtype=st.sampled_from([BF16, F16]), drop_rate=st.floats(0, 0.999), copies=st.integers(1, 3))
def test_models_equal_to_the_base_change_nothing_at_any_drop_rate(
    tmp_path: Path, bits: list[int], dtype: torch.dtype, drop_rate: float, copies: int
) -> None:
    base = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)
    base = torch.where(base.isfinite(), base, torch.tensor(-0.0, dtype=dtype))
    assert same_bits(merge(tmp_path, {"w": base}, *[{"w": base}] * copies, drop_rate=drop_rate)["w"], base)


def test_empty_tensors_and_scalars_merge(tmp_path: Path) -> None:
    base = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0), "one": torch.ones(1, 1)}
    model = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0), "one": torch.ones(1, 1) * 5}
    assert_same(merge(tmp_path, base, model, drop_rate=0.0), model)


def test_a_tensor_that_a_model_lacks_is_a_zero_delta(tmp_path: Path) -> None:
    base = {"a": torch.ones(4), "b": torch.ones(4)}
    merged = merge(tmp_path, base, {"a": torch.full((4,), 3.0)}, {"b": torch.full((4,), 5.0)}, drop_rate=0.0)
    assert merged["a"].tolist() == [2.0] * 4
    assert merged["b"].tolist() == [3.0] * 4


def test_one_model_that_lacks_a_tensor_leaves_the_base(tmp_path: Path) -> None:
    base = {"a": torch.ones(4), "b": torch.ones(4)}
    assert_same(merge(tmp_path, base, {"a": torch.zeros(4)}, drop_rate=0.0), {"a": torch.zeros(4), "b": torch.ones(4)})


def test_tensors_that_are_not_floats_are_copied_and_differences_reported(tmp_path: Path) -> None:
    base = {"w": torch.ones(4), "ids": torch.arange(3000), "flag": torch.tensor([True, False]), "same": torch.arange(5)}
    model = {"w": torch.ones(4) * 1.001, "ids": torch.arange(3000) + 1, "flag": torch.tensor([True]).expand(2).clone()}
    model["same"] = torch.arange(5)
    paths = save(tmp_path, base=base, model=model)
    report = DareMerger(paths[0], [paths[1]], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    merged = load_file(tmp_path / "out.safetensors")
    assert_same({name: merged[name] for name in ("ids", "flag", "same")}, {n: base[n] for n in ("ids", "flag", "same")})
    assert any("'flag', 'ids'" in warning and "copied" in warning for warning in report.warnings)
    assert report.copied_tensors == 3


def test_integers_of_another_type_count_as_different(tmp_path: Path) -> None:
    paths = save(
        tmp_path,
        base={"w": torch.ones(4), "ids": torch.arange(4)},
        model={"w": torch.ones(4), "ids": torch.arange(4, dtype=torch.int32)},
    )
    report = DareMerger(paths[0], [paths[1]], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    assert any("'ids'" in warning for warning in report.warnings)


def test_quantised_tensors_are_copied_where_equal_and_refused_where_not(tmp_path: Path) -> None:
    quantised = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    base = {"w": torch.ones(4), "q": quantised}
    merged = merge(tmp_path, base, {"w": torch.ones(4), "q": quantised})
    assert torch.equal(merged["q"].view(torch.uint8), quantised.view(torch.uint8))
    with pytest.raises(DareError, match="'q' is part of a quantised module"):
        merge(tmp_path, base, {"w": torch.ones(4), "q": torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn)})


# ---------------------------------------------------------------------------------------------------------------------
# What the report says
# ---------------------------------------------------------------------------------------------------------------------


def test_the_report_has_the_figures_of_each_model(tmp_path: Path) -> None:
    base = random_model(dtype=F32)
    first, second = finetune(base, 1), finetune(base, 2, size=0.01)
    del second["layer.bias"]
    second["adapter"] = torch.ones(3)
    paths = save(tmp_path, base=base, first=first, second=second)
    config = DareConfig(drop_rate=0.9, seed=5, verbose=False)
    report = DareMerger(str(paths[0]), [str(paths[1]), paths[2]], config).merge(str(tmp_path / "out.safetensors"))

    assert [model.name for model in report.models] == [str(paths[1]), str(paths[2])]
    assert [model.seed for model in report.models] == [5, 6]
    for model, tensors in zip(report.models, (first, second), strict=True):
        deltas = torch.cat([(tensors[n] - base[n]).ravel() for n in base if n in tensors]).abs()
        masks = np.concatenate([reference_mask(model.seed, n, base[n].numel(), 0.9) for n in base if n in tensors])
        assert model.parameters == len(deltas)
        assert model.honoured_drop_rate == 1 - honoured(0.9)
        assert model.dropped_share == 1 - masks.mean()
        assert model.mean_delta == pytest.approx(deltas.double().mean().item(), rel=1e-5)
        assert model.largest_delta == deltas.max().item()
        assert model.share_above_threshold == (deltas > 0.002).double().mean().item()
    assert report.models[0].missing_tensors == ()
    assert report.models[1].missing_tensors == ("layer.bias",)
    assert report.models[1].extra_tensors == ("adapter",)
    assert report.tensors == 4
    assert report.bytes_written == (tmp_path / "out.safetensors").stat().st_size
    in_base = sum(t.nbytes for t in base.values())
    assert report.bytes_read == 3 * in_base - base["layer.bias"].nbytes
    assert report.seconds > 0


def test_the_report_prints_as_a_table_and_converts_to_plain_data(models: list[Path], tmp_path: Path) -> None:
    report = DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    lines = str(report).splitlines()
    assert lines[0].split()[:3] == ["model", "seed", "parameters"]
    assert str(models[1]) in lines[1]
    assert "merged 2 models" in lines[-1]
    data = json.loads(json.dumps(report.as_dict()))
    assert data["models"][0]["seed"] == 42
    assert data["tensors"] == 4


def warnings_of(folder: Path, base: Tensors, *models: Tensors, **config: Any) -> list[str]:
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    report = DareMerger(paths[0], paths[1:], DareConfig(verbose=False, **config)).merge(folder / "out.safetensors")
    return list(report.warnings)


def test_small_deltas_are_not_warned_about(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    assert warnings_of(tmp_path, base, finetune(base, 1, 0.0005)) == []


def test_large_deltas_are_warned_about_once_per_model(tmp_path: Path) -> None:
    base = random_model()
    large, mixed = finetune(base, 1, 0.02), finetune(base, 2, 0.0005)
    mixed["layer.bias"] = base["layer.bias"] + 0.02
    warnings = warnings_of(tmp_path, base, large, mixed)
    assert len(warnings) == 2
    assert "in 4 of 4 tensors" in warnings[0] or "in 3 of 4 tensors" in warnings[0]
    assert "in 1 of 4 tensors" in warnings[1]
    assert "'layer.bias' (0.02)" in warnings[1]
    assert all("lower the drop rate" in warning and "base is the right one" in warning for warning in warnings)
    assert warnings_of(tmp_path, base, large, delta_threshold=0.05) == []


def test_a_base_that_is_not_the_base_is_noticed(tmp_path: Path) -> None:
    warnings = warnings_of(tmp_path, random_model(0), random_model(1))
    assert len(warnings) == 1
    assert "does not look like the base" in warnings[0]


def test_a_finetune_identical_to_the_base_is_noticed(tmp_path: Path) -> None:
    base = random_model()
    warnings = warnings_of(tmp_path, base, base, finetune(base, 1))
    assert len(warnings) == 1
    assert "identical to the base" in warnings[0]


def test_the_same_model_twice_and_the_base_as_a_model_are_noticed(models: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(models[1])
    merger = DareMerger(models[0], [models[1], link, models[0]], DareConfig(verbose=False))
    warnings = merger.merge(tmp_path / "out.safetensors").warnings
    assert any("given more than once" in warning and "link" in warning for warning in warnings)
    assert any("is the base itself" in warning for warning in warnings)


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    base = random_model()
    model = finetune(base, 1)
    del model["scalar"]
    model["new\x1b[31m"] = torch.ones(1)
    warnings = warnings_of(tmp_path, base, model)
    assert "lacks 1 tensors of the base: 'scalar'" in warnings[0]
    assert "that the base lacks: 'new\\x1b[31m'" in warnings[1], "and an escape sequence is shown, not sent"


# ---------------------------------------------------------------------------------------------------------------------
# The recipe
# ---------------------------------------------------------------------------------------------------------------------


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_a_merged_file_says_how_it_was_made(models: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    DareMerger(models[0], models[1:], DareConfig(drop_rate=0.75, seed=9, verbose=False)).merge(output)
    assert metadata(output)["format"] == "pt"
    recipe = tomllib.loads(metadata(output)["dare_recipe"])
    assert recipe["dare"]["drop_rate"] == 0.75
    assert recipe["dare"]["seed"] == 9
    assert recipe["models"] == {"base_file": str(models[0]), "merge_files": [str(m) for m in models[1:]]}
    assert recipe["recipe"]["version"] == dare.__version__
    assert recipe["recipe"]["seeds"] == [9, 10]
    for entry, path in zip(recipe["recipe"]["inputs"], models, strict=True):
        raw = path.read_bytes()
        header = raw[: 8 + struct.unpack("<Q", raw[:8])[0]]
        assert entry == {"file": str(path), "size": len(raw), "header_sha256": hashlib.sha256(header).hexdigest()}


def test_what_does_not_determine_the_bytes_is_not_in_them(models: list[Path], tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "elsewhere" / "second.safetensors"
    second.parent.mkdir()
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(first)
    DareMerger(models[0], models[1:], DareConfig(threads=1, delta_threshold=9, verbose=True)).merge(second)
    assert first.read_bytes() == second.read_bytes()


def test_the_recipe_makes_the_same_file_again(models: list[Path], tmp_path: Path) -> None:
    shutil.copytree(tmp_path, tmp_path / "work")
    work = tmp_path / "work"
    names = [path.name for path in models]
    options = ("--drop-rate", "0.6", "--seed", "3", "--output", "first.safetensors")
    done = command("--base", names[0], "--merge", *names[1:], *options, cwd=work)
    assert done.returncode == 0, done.stderr
    (work / "recipe.toml").write_text(metadata(work / "first.safetensors")["dare_recipe"])
    done = command("--config", work / "recipe.toml", "--output", work / "again.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (work / "first.safetensors").read_bytes() == (work / "again.safetensors").read_bytes()


def test_a_recipe_refuses_other_inputs_than_its_own(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "first.safetensors")
    (tmp_path / "recipe.toml").write_text(metadata(tmp_path / "first.safetensors")["dare_recipe"])
    base = load_file(models[0])
    save_file(finetune({**base, "more": base["scalar"]}, 3), models[2])
    arguments = ["-c", str(tmp_path / "recipe.toml"), "-q", "-o", str(tmp_path / "again.safetensors")]
    assert dare.main(arguments) == 1
    assert "is not the file that the recipe was made with: its size is" in capsys.readouterr().err
    assert not (tmp_path / "again.safetensors").exists()
    assert dare.main([*arguments, "--merge", str(models[1])]) == 0, "named anew, the models are taken as they are"


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


def write_config(folder: Path, text: str = "", **values: Any) -> Path:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = folder / "config.toml"
    names = 'base_file = "base.safetensors"\nmerge_files = ["math.safetensors", "code.safetensors"]\n'
    path.write_text("[models]\n" + names + 'output_file = "out.safetensors"\n[dare]\n' + "\n".join(lines) + "\n" + text)
    return path


def recipe_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads(metadata(folder / "out.safetensors")["dare_recipe"])


def test_flags_beat_toml_and_toml_beats_defaults(models: list[Path], tmp_path: Path) -> None:
    config = str(write_config(tmp_path, drop_rate=0.5, verbose=False))
    assert dare.main(["-c", config]) == 0
    assert recipe_of(tmp_path)["dare"]["drop_rate"] == 0.5
    assert recipe_of(tmp_path)["dare"]["seed"] == 42
    assert dare.main(["-c", config, "--drop-rate", "0.25", "--merge", str(models[1])]) == 0
    assert recipe_of(tmp_path)["dare"]["drop_rate"] == 0.25
    assert recipe_of(tmp_path)["models"]["merge_files"] == [str(models[1])]


def test_paths_in_toml_are_relative_to_it_and_paths_in_flags_to_the_working_directory(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, verbose=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert dare.main(["-c", str(config), "-o", "here.safetensors"]) == 0
    assert (elsewhere / "here.safetensors").exists()
    assert dare.main(["-c", "../config.toml"]) == 0
    assert (tmp_path / "out.safetensors").exists()
    assert recipe_of(tmp_path)["models"]["base_file"] == "base.safetensors", "as the user typed it"


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        ("drop_rat = 0.5", "no key 'drop_rat' in [dare]", "did you mean drop_rate?"),
        ("[model]\nx = 1", "no table [model]", "did you mean models?"),
        ("[weights]\nx = 1", "no table [weights]", "put weights under [dare]"),
        ("zzz = 1", "no key 'zzz'", "known here: delta_threshold, drop_rate"),
        ('drop_rate = "0.5"', "[dare] drop_rate must be a number", ""),
        ("drop_rate = true", "[dare] drop_rate must be a number", ""),
        ("drop_rate = 1", "[dare] drop_rate must be a number from 0 up to but not including 1", ""),
        ("drop_rate = -0.1", "[dare] drop_rate must be", ""),
        ("drop_rate = nan", "[dare] drop_rate must be", ""),
        ("delta_threshold = 0", "[dare] delta_threshold must be a number above 0", ""),
        ("seed = 1.5", "[dare] seed must be a whole number", ""),
        ("seed = -1", "[dare] seed must be a whole number", ""),
        ("threads = 0", "[dare] threads must be a whole number from 1 up", ""),
        ("verbose = 1", "[dare] verbose must be true or false", ""),
        ("drop_rate = ", "is not valid TOML", ""),
        ("[recipe]\nmask = 'other'", "draws its mask with 'other'", "run it with the version of dare"),
        ("[recipe]\ninputs = 3", "inputs must be a list of tables", ""),
    ],
)
def test_a_wrong_configuration_is_named_with_file_and_key(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str, hint: str
) -> None:
    config = write_config(tmp_path, text)
    before = snapshot(tmp_path)
    assert dare.main(["--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {config}")
    assert complaint in error
    assert f"hint: {hint}" in error or not hint
    assert error.count("\n") <= 2
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('merge_files = "one.safetensors"', "merge_files must be a list of paths"),
        ("merge_files = [1]", "merge_files must be a list of paths"),
        ("base_file = 3", "base_file must be a path in quotes"),
    ],
)
def test_wrong_model_entries_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    (tmp_path / "c.toml").write_text(f"[models]\n{line}\n")
    assert dare.main(["-c", str(tmp_path / "c.toml")]) == 2
    assert complaint in capsys.readouterr().err
    (tmp_path / "c.toml").write_text("models = 3\n")
    assert dare.main(["-c", str(tmp_path / "c.toml")]) == 2
    assert "models must be a table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        (["--drop-rate", "1"], "--drop-rate must be a number from 0 up to but not including 1", "--help"),
        (["--drop-rate", "-0.5"], "--drop-rate must be", "--help"),
        (["--drop-rate", "nan"], "--drop-rate must be", "--help"),
        (["--drop-rate", "much"], "invalid float value: 'much'", "files go after --merge"),
        (["--drop-rte", "0.5"], "no option '--drop-rte'", "did you mean --drop-rate?"),
        (["--threads", "0"], "--threads must be a whole number from 1 up", "--help"),
        (["--seed"], "expected one argument", "--help"),
        (["--config", "nowhere.toml"], "no configuration file 'nowhere.toml'", "check the path"),
        (["--config", "."], "cannot read '.'", "give --config a TOML file"),
        (["merge_config.toml"], "'merge_config.toml' is not expected here", "--config"),
    ],
)
def test_wrong_flags_are_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str, hint: str
) -> None:
    assert dare.main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert hint in error


@pytest.mark.parametrize("value", [1, -0.1, math.nan, "0.5", True, None])
def test_scripts_get_the_same_checks(value: Any) -> None:
    with pytest.raises(ConfigError, match="drop_rate must be a number"):
        DareConfig(drop_rate=value)


def test_scripts_must_give_a_list_of_models(models: list[Path]) -> None:
    with pytest.raises(ConfigError, match="must be a list"):
        DareMerger(models[0], str(models[1]))
    with pytest.raises(ConfigError, match="no models"):
        DareMerger(models[0], [])
    with pytest.raises(ConfigError, match="must be a DareConfig"):
        DareMerger(models[0], [models[1]], {"drop_rate": 0.5})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: one sentence, a hint, the right status, and nothing changed
# ---------------------------------------------------------------------------------------------------------------------


def refuse(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    *complaints: str,
    base: str = "base",
    merge: list[str] | None = None,
    output: str = "out.safetensors",
    flags: tuple[str, ...] = (),
) -> str:
    """Run the command on files of a folder; it must fail with these words and leave the folder as it was."""
    before = snapshot(folder)
    merge = ["math", "code"] if merge is None else merge
    paths = [str(folder / (name if "." in name else f"{name}.safetensors")) for name in [base, *merge]]
    arguments = ["--base", paths[0], "--merge", *paths[1:], "--output", str(folder / output), *flags]
    assert dare.main(arguments) == status
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert lines[-2].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    for complaint in complaints:
        assert complaint in printed.err
    assert "Traceback" not in printed.err
    assert snapshot(folder) == before
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no base model"),
        (["-b", "b.safetensors"], "no models to merge"),
        (["-b", "b.safetensors", "-m", "m.safetensors"], "no output"),
    ],
)
def test_what_was_not_given_is_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert dare.main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_files_that_are_not_models_are_refused(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(tmp_path, capsys, 1, "there is no file or directory", "absent.safetensors", base="absent")
    (tmp_path / "folder.d").mkdir()
    refuse(tmp_path, capsys, 1, "holds no model", merge=["folder.d"])
    (tmp_path / "empty.safetensors").touch()
    refuse(tmp_path, capsys, 1, "is empty", merge=["math", "empty"])
    (tmp_path / "short.safetensors").write_bytes(models[1].read_bytes()[:-100])
    refuse(tmp_path, capsys, 1, "is not a complete safetensors file", "again", merge=["short"])
    (tmp_path / "text.safetensors").write_text("not a model at all, just text")
    refuse(tmp_path, capsys, 1, "is not a complete safetensors file", base="text")
    torch.save({"w": torch.ones(3)}, tmp_path / "pickle.bin")
    refuse(tmp_path, capsys, 1, "is a PyTorch pickle", "torch.load", merge=["pickle.bin"])
    (tmp_path / "pickle.bin").rename(tmp_path / "renamed.safetensors")
    refuse(tmp_path, capsys, 1, "is a PyTorch pickle", merge=["renamed"])
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    refuse(tmp_path, capsys, 1, "Git LFS pointer", "git lfs pull", merge=["pointer"])
    (tmp_path / "index.json").write_text('{"weight_map": {}}')
    refuse(tmp_path, capsys, 1, "is JSON without a weight_map", merge=["index.json"])
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    refuse(tmp_path, capsys, 1, "is a GGUF file", merge=["model.gguf"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_rather_than_waited_for(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    refuse(tmp_path, capsys, 1, "is not a regular file", merge=["pipe"])


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="permissions do not bind this user")
def test_unreadable_files_and_unwritable_folders_are_refused(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models[1].chmod(0)
    refuse(tmp_path, capsys, 1, "cannot read", "Permission denied")
    models[1].chmod(0o644)
    (tmp_path / "locked").mkdir(mode=0o555)
    refuse(tmp_path, capsys, 1, "is not writable", output="locked/out.safetensors")


def test_what_the_system_refuses_is_passed_on(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root nothing is unreadable, so the system's refusals are stood in for."""

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        refuse(tmp_path, capsys, 1, "cannot read", "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
        refuse(tmp_path, capsys, 1, "is not writable")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", denied)
        refuse(tmp_path, capsys, 1, "cannot write", "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", denied)
        refuse(tmp_path, capsys, 1, "cannot write", "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", denied)
        assert dare.main(["-b", "b", "-m", "m", "-o", "o.safetensors"]) == 1
    assert "cannot read 'b'" in capsys.readouterr().err


def test_a_disk_that_fails_in_the_background_fails_the_merge(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports a failed write to the first sync that follows, and to no later one."""
    calls: list[int] = []

    def failing_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")

    run = dare.Worker.run

    def slowly(self: Any, job: Any, work: Any) -> Any:
        time.sleep(0.05)
        return run(self, job, work)

    monkeypatch.setattr(dare, "FLUSH_SECONDS", 0.001)
    monkeypatch.setattr(os, "fsync", failing_once)
    monkeypatch.setattr(dare.Worker, "run", slowly)
    refuse(tmp_path, capsys, 1, "cannot write", "Input/output error")
    assert len(calls) == 1


def test_models_that_do_not_fit_the_base_are_refused(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = load_file(models[0])
    save(tmp_path, other={**base, "layer.bias": torch.ones(62, dtype=BF16)})
    refuse(tmp_path, capsys, 1, "'layer.bias' is [61] in", "and [62] in", "other.safetensors", merge=["math", "other"])
    save(tmp_path, other={"something": torch.ones(3)})
    refuse(tmp_path, capsys, 1, "has no tensor in common", "'something'", merge=["other"])
    save(tmp_path, other={**base, "layer.bias": torch.ones(61, dtype=torch.int64)})
    refuse(tmp_path, capsys, 1, "'layer.bias' is BF16 in", "and I64 in", merge=["other"])


def test_an_output_that_is_an_input_is_refused_by_any_spelling(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "soft.safetensors").symlink_to(models[1])
    os.link(models[0], tmp_path / "hard.safetensors")
    for spelling in ("base", "sub/../math", "./code", "soft", "hard"):
        refuse(tmp_path, capsys, 2, "is the input", output=f"{spelling}.safetensors", flags=("--force",))


def test_paths_that_no_system_would_take_are_refused(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(tmp_path, capsys, 1, "cannot be used: File name too long", output="x" * 300 + ".safetensors")
    refuse(tmp_path, capsys, 1, "there is no file or directory", base="~nosuch/x.safetensors")
    config = write_config(tmp_path, "")
    config.write_text(config.read_text().replace("base.safetensors", "a\\u0000b"))
    assert dare.main(["-c", str(config)]) == 1
    assert "is not a path" in capsys.readouterr().err
    config = write_config(tmp_path, "seed = " + "1" * 5000)
    assert dare.main(["-c", str(config)]) == 2
    assert "is not valid TOML" in capsys.readouterr().err


def test_a_toml_file_from_a_windows_editor_is_read(models: list[Path], tmp_path: Path) -> None:
    config = write_config(tmp_path, verbose=False)
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert dare.main(["-c", str(config)]) == 0


def test_negative_numbers_with_exponents_are_numbers(models: list[Path], tmp_path: Path) -> None:
    arguments = ["-q", "-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors")]
    assert dare.main([*arguments, "--lambda", "-1e-3", "--weights", "-2.5E+1"]) == 0
    assert recipe_of(tmp_path)["dare"]["lambda_coeff"] == -1e-3
    assert recipe_of(tmp_path)["dare"]["weights"] == [-25.0]


def test_outputs_that_cannot_be_written_are_refused(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(tmp_path, capsys, 1, "does not exist", output="nowhere/out.safetensors")
    (tmp_path / "taken.safetensors").mkdir()
    refuse(tmp_path, capsys, 1, "is a directory", output="taken.safetensors")
    refuse(tmp_path, capsys, 2, "does not end in .safetensors", output="merged.bin")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    refuse(tmp_path, capsys, 1, "out", output="loop.safetensors")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    refuse(tmp_path, capsys, 1, "the output needs", "1 kB free", "make room")


def test_only_files_of_this_tool_are_replaced_without_force(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "out.safetensors"
    save_file({"w": torch.ones(3)}, precious)
    refuse(tmp_path, capsys, 1, "exists and was not made by this tool", "--force")
    precious.write_text("some notes")
    refuse(tmp_path, capsys, 1, "exists and was not made by this tool", "--force")
    arguments = ["-q", "-b", str(models[0]), "-m", str(models[1]), "-o", str(precious)]
    assert dare.main([*arguments, "--force"]) == 0
    first = precious.read_bytes()
    assert dare.main([*arguments, "--seed", "1"]) == 0
    assert precious.read_bytes() != first


def test_a_link_as_output_keeps_leading_where_it_led(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "latest.safetensors"
    link.symlink_to(tmp_path / "store" / "real.safetensors")
    assert dare.main(["-q", "-b", str(models[0]), "-m", str(models[1]), "-o", str(link)]) == 0
    assert link.is_symlink()
    assert "layer.weight" in load_file(tmp_path / "store" / "real.safetensors")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["base", "math", "code"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("flags", [[], ["--method=ties", "--keep-ratio=0.5"], ["--method=slerp"]], ids=str)
def test_a_value_that_is_not_finite_is_named_with_its_place(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    dtype: torch.dtype,
    where: str,
    bad: float,
) -> None:
    for path in models:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        if path.stem == where:
            tensors["layer.weight"][30, 7] = bad
        save(tmp_path, **{path.stem: tensors})
    error = refuse(tmp_path, capsys, 1, f"tensor 'layer.weight' holds {bad} at [30, 7]", flags=tuple(flags))
    assert f"{where}.safetensors" in error
    state = [load_file(path) for path in models]
    config = {flag.split("=")[0][2:].replace("-", "_"): flag.split("=")[1] for flag in flags}
    ratio = {"keep_ratio": 0.5} if "keep_ratio" in config else {}
    with pytest.raises(DareError, match="not finite"):
        dare.dare_merge(state[0], state[1:], DareConfig(method=config.get("method", "linear"), **ratio))


def test_a_broken_base_is_noticed_where_no_model_has_the_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, base={"a": torch.ones(3), "b": torch.tensor([1.0, math.nan])}, model={"a": torch.ones(3)})
    refuse(tmp_path, capsys, 1, "tensor 'b' holds nan at [1]", merge=["model"])


@pytest.mark.parametrize(("dtype", "large"), [(F16, 60000.0), (BF16, 3e38), (F32, 3e38), (F64, 1.7e308)])
def test_a_result_beyond_the_type_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype, large: float
) -> None:
    model = torch.zeros(3000, dtype=dtype)
    model[17] = large
    model[1500:] = large / 2
    save(tmp_path, base={"w": torch.zeros(3000, dtype=dtype)}, model={"w": model})
    refuse(tmp_path, capsys, 1, "tensor 'w' gives values beyond the range", merge=["model"])
    model = torch.full((3000,), -large, dtype=dtype)
    save(tmp_path, base={"w": torch.full((3000,), large, dtype=dtype)}, model={"w": model})
    refuse(tmp_path, capsys, 1, "tensor 'w' gives values beyond the range", merge=["model"])


def test_of_several_faults_the_first_in_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {f"t{i:03}": torch.ones(2000) for i in range(100)}
    model = {name: tensor.clone() for name, tensor in base.items()}
    for name in ("t013", "t014", "t050"):
        model[name][5] = math.nan
    save(tmp_path, base=base, model=model)
    for _ in range(5):
        refuse(tmp_path, capsys, 1, "tensor 't013'", merge=["model"], flags=("--threads", "7"))


def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = DareMerger._plan

    def shrink(self: DareMerger, *arguments: Any) -> Any:
        made = plan(self, *arguments)
        os.truncate(models[1], 2000)
        return made

    monkeypatch.setattr(DareMerger, "_plan", shrink)
    with pytest.raises(DareError, match="became shorter"):
        DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    assert list(tmp_path.glob("*.partial")) == []


def test_jobs_that_were_never_run_are_never_committed(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = dare.Plan._jobs

    def failing(self: Any, *arguments: Any) -> Any:
        for job in jobs(self, *arguments):
            if job.number == 2:
                raise MemoryError("no more")
            yield job

    monkeypatch.setattr(dare.Plan, "_jobs", failing)
    refuse(tmp_path, capsys, 1, "unexpected MemoryError: no more")


def test_a_thread_that_cannot_start_stops_the_others(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def failing(self: threading.Thread) -> None:
        started.append(self)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", failing)
    refuse(tmp_path, capsys, 1, "can't start new thread", flags=("--threads", "4"))
    assert not any(thread.is_alive() for thread in started)


def test_an_error_of_the_disk_while_reading_is_named(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def failing(descriptor: int, view: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 12:
            raise OSError(5, "Input/output error")
        return os.preadv(descriptor, [view], offset)

    monkeypatch.setattr(dare, "read_at", failing)
    refuse(tmp_path, capsys, 1, "cannot read", "Input/output error")


def test_a_bug_is_reported_as_one_without_a_traceback(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(dare.Worker, "run", broken)
    refuse(tmp_path, capsys, 1, "unexpected ZeroDivisionError: oops", "DARE_TRACEBACK")
    monkeypatch.setenv("DARE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        dare.main(["-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors")])


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_merge_leaves_nothing_behind(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    big = {f"t{i}": torch.zeros(1 << 24, dtype=BF16) for i in range(8)}
    save(tmp_path, base=big, model=big)
    before = snapshot(tmp_path)
    arguments = ["-b", "base.safetensors", "-m", *["model.safetensors"] * 8, "-o", "out.safetensors", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "dare.py"), *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.partial")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(sent)
    _, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert error.splitlines()[-1] == "interrupted"
    assert snapshot(tmp_path) == before


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = "import sys, dare; s = 0\ntry: dare.main(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=True)
    for heavy in ("torch", "numba", "numpy", "rich", "llvmlite", "safetensors"):
        assert f"'{heavy}'" not in done.stdout


def test_a_merge_loads_neither_torch_nor_once_compiled_numba(models: list[Path], tmp_path: Path) -> None:
    arguments = ["-q", "-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors")]
    assert dare.main(arguments) == 0
    code = f"import sys, dare; dare.main({arguments!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=True)
    for heavy in ("torch", "numba", "rich"):
        assert f"'{heavy}'" not in done.stdout


def test_dry_run_prints_the_plan_and_writes_nothing(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tmp_path)
    arguments = ["-b", str(models[0]), "-m", str(models[1]), str(models[1]), "-o", str(tmp_path / "out.safetensors")]
    assert dare.main([*arguments, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "would merge 2 models" in printed.out
    assert "seeds 42, 43" in printed.out
    assert "warning: " in printed.err
    assert snapshot(tmp_path) == before


def test_quiet_prints_only_warnings(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors")]
    assert dare.main([*arguments, "--quiet"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert dare.main([*arguments, "--quiet", "--delta-threshold", "1e-9"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("warning: ")
    assert dare.main([*arguments, "--verbose"]) == 0
    assert "merged 1 model into" in capsys.readouterr().out


def test_progress_goes_to_terminals_only(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    merger = DareMerger(models[0], models[1:], DareConfig(verbose=True))
    merger.merge(tmp_path / "out.safetensors")
    assert "merging" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    merger.merge(tmp_path / "out.safetensors")
    assert "merging" in capsys.readouterr().err


def test_warnings_reach_scripts_too(models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DareConfig(delta_threshold=1e-9, verbose=False)
    report = DareMerger(models[0], models[1:], config).merge(tmp_path / "out.safetensors")
    assert [record.getMessage() for record in caplog.records] == list(report.warnings)


def test_a_reader_who_has_read_enough_is_no_error(models: list[Path], tmp_path: Path) -> None:
    arguments = ["-b", models[0], "-m", models[1], "-o", tmp_path / "out.safetensors"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "dare.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=buffered,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Traceback" not in error
    assert b"Exception" not in error


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_that_nobody_listens_to_is_no_error(models: list[Path], tmp_path: Path, closed: str) -> None:
    arguments = ["-b", models[0], "-m", models[1], "-o", tmp_path / "out.safetensors"]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, str(HERE / "dare.py"), *map(str, arguments)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "error" not in done.stdout + done.stderr
    assert (tmp_path / "out.safetensors").exists()


def test_names_that_the_terminal_has_no_letters_for_are_no_error(models: list[Path], tmp_path: Path) -> None:
    odd = models[1].rename(tmp_path / "\u6a21\u578b.safetensors")
    arguments = ["-b", models[0], "-m", odd, "-o", tmp_path / "out.safetensors"]
    done = command(*arguments, env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0, done.stderr
    assert "\\u6a21" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only here may names be any bytes")
def test_names_that_are_no_text_still_give_a_file_that_opens(models: list[Path], tmp_path: Path) -> None:
    odd = models[1].rename(os.fsdecode(os.fsencode(tmp_path) + b"/n\xff.safetensors"))
    DareMerger(models[0], [odd], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    [name] = recipe_of(tmp_path)["models"]["merge_files"]
    assert name.endswith("n\\udcff.safetensors")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        dare.main(["--version"])
    assert capsys.readouterr().out == f"dare {dare.__version__}\n"


# ---------------------------------------------------------------------------------------------------------------------
# Other machines
# ---------------------------------------------------------------------------------------------------------------------


def test_same_bytes_without_positioned_reads_and_writes(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where there is no preadv, no pwrite and no way to sync a directory."""
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "usual.safetensors")
    for name in ("preadv", "pwrite", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    real_open = os.open

    def no_directories(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", no_directories)
    DareMerger(models[0], models[1:], DareConfig(verbose=False, threads=3)).merge(tmp_path / "other.safetensors")
    assert (tmp_path / "usual.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "other.safetensors")


def test_short_writes_are_continued(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "usual.safetensors")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, offset: real(descriptor, view[:777], offset))
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "other.safetensors")
    assert (tmp_path / "usual.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


@pytest.fixture
def fresh_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty place for compiled kernels, and none in memory."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    dare.load_kernel.cache_clear()
    yield folder
    dare.load_kernel.cache_clear()


def test_kernels_are_compiled_once_and_said_so(
    fresh_kernels: Path, models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors")]
    assert dare.main(arguments) == 0
    assert "compiling the linear kernel" in capsys.readouterr().err
    [kernel] = fresh_kernels.iterdir()
    assert kernel.name.startswith("dare.linear-BF16-BF16-BF16."), "what is needed, and only that"
    dare.load_kernel.cache_clear()
    assert dare.main(arguments) == 0
    assert capsys.readouterr().err == ""
    kernel.write_bytes(kernel.read_bytes()[:-1])
    dare.load_kernel.cache_clear()
    assert dare.main(arguments) == 0, "a damaged kernel is compiled again"
    assert "compiling the linear kernel" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_kernels_are_compiled_is_not_lost(
    fresh_kernels: Path, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """What comes while the compiler runs is held back until it is done, since the compiler would swallow it."""
    compiled = []

    def interrupted(*_: Any) -> bytes:
        signal.raise_signal(number)
        compiled.append(number)
        return b""

    monkeypatch.setattr(dare, "compile_object", interrupted)
    arguments = ["-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors")]
    before = signal.getsignal(number)
    assert dare.main(arguments) == (130 if number == signal.SIGINT else 143)
    assert compiled == [number]
    assert signal.getsignal(number) == before
    assert not (tmp_path / "out.safetensors").exists()


def test_a_place_for_kernels_that_cannot_be_written_only_costs_time(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("not a directory")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked / "below"))
    assert dare.cache_folder() is None
    dare.load_kernel.cache_clear()
    DareMerger(models[0], models[1:], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr(os, "access", lambda path, mode: "__pycache__" not in str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert dare.cache_folder() == tmp_path / "cache" / "dare"


def test_the_buffers_shrink_as_threads_and_models_grow(models: list[Path], tmp_path: Path) -> None:
    for threads, count in [(1, 1), (2, 2), (64, 5), (256, 3)]:
        merger = DareMerger(models[0], [models[1]] * count, DareConfig(threads=threads, verbose=False))
        plan = dataclasses.replace(merger.plan(tmp_path / "out.safetensors"), threads=threads)
        assert plan.chunk % 1024 == 0
        held = threads * (count + 2) * plan.chunk * plan.itemsize
        assert held <= dare.BUFFER_BYTES or plan.chunk == dare.MIN_CHUNK


def test_sizes_are_printed_for_people() -> None:
    assert [dare.human(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**9, 3 * 10**12)] == [
        "0 B", "999 B", "1 kB", "1.5 MB", "2 GB", "3 TB",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_tensor_of_more_than_two_to_the_32_elements_merges(tmp_path: Path) -> None:
    count = 2**32 + 5000
    if shutil.disk_usage(tmp_path).free < 3 * count * 2:
        pytest.skip("needs 26 GB of disk")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    for name in ("base", "model"):
        with open(tmp_path / f"{name}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + 2 * count)  # zeros that take no space
            if name == "model":
                file.seek(8 + len(header) + 2 * (2**32))
                file.write(b"\x80\x3f" * 5000)  # 1.0 in bf16
    paths = [tmp_path / "base.safetensors", tmp_path / "model.safetensors"]
    DareMerger(paths[0], paths[1:], DareConfig(drop_rate=0.5, verbose=False)).merge(tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        tail = file.get_slice("w")[2**32 :]
    expected = reference_bits(reference_key(42, "w"), 2**32, 5000) < 32768
    assert np.array_equal(tail.float().numpy(), expected * 2.0)


# ---------------------------------------------------------------------------------------------------------------------
# Every way to combine
# ---------------------------------------------------------------------------------------------------------------------


def per_model(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * count


def reference_kept(
    base: np.ndarray, models: list[np.ndarray], name: str, config: dict[str, Any], weights: list[float]
) -> list[np.ndarray]:
    """What is left of each delta after drop, rescale and trim, times its weight."""
    real, kept = base.dtype.type, []
    rates = per_model(config.get("drop_rate", 0.9), len(models))
    divisors = per_model(config.get("rescale_q"), len(models))
    for i, model in enumerate(models):
        delta = model - base
        mask = reference_mask(config.get("seed", 42) + i, name, base.size, rates[i])
        if config.get("keep_ratio", 1) < 1 and mask.any():
            sizes = np.sort(np.abs(delta[mask]))[::-1]
            mask = mask & (np.abs(delta) >= sizes[max(1, int(config["keep_ratio"] * sizes.size)) - 1])
        divisor = 1.0 if config.get("rescale") is False else divisors[i] or honoured(rates[i])
        kept.append(np.where(mask, real(weights[i] / divisor) * delta, real(0)))
    return kept


def reference_ties(kept: list[np.ndarray], weights: list[float]) -> np.ndarray:
    real = kept[0].dtype.type
    elected = np.zeros_like(kept[0])
    for part in kept:
        elected = elected + part
    total, share = np.zeros_like(elected), np.zeros_like(elected)
    for part, weight in zip(kept, weights, strict=True):
        agrees = np.where(elected >= 0, part > 0, part < 0)
        total = total + np.where(agrees, part, real(0))
        share = share + np.where(agrees, real(weight), real(0))
    return np.where(share > 0, total / np.where(share > 0, share, real(1)), real(0))


def reference_any(base: torch.Tensor, models: list[torch.Tensor], name: str, **config: Any) -> torch.Tensor:
    """Linear and ties, with every setting, in plain NumPy."""
    output = getattr(torch, config["dtype"]) if config.get("dtype") else base.dtype
    real = np.float64 if F64 in {output, base.dtype, *(m.dtype for m in models)} else np.float32
    wide = [tensor.to(F64).numpy().astype(real).ravel() for tensor in (base, *models)]
    ties = config.get("method") == "ties"
    weights = config.get("weights") or [1.0 if ties else 1 / len(models)] * len(models)
    kept = reference_kept(wide[0], wide[1:], name, config, weights)
    if ties:
        merged = reference_ties(kept, weights)
    else:
        merged = np.zeros_like(wide[0])
        for part in kept:
            merged = merged + part
    change = real(config.get("lambda_coeff", 1.0)) * merged
    values = np.where(change == 0, wide[0], wide[0] + change)
    return round_to(values.astype(np.float64), output).reshape(base.shape)


VARIATIONS: list[dict[str, Any]] = [
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
]
OTHER_TYPES: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"method": "ties", "dtype": "bfloat16", "keep_ratio": 0.5},
    {"dtype": "float64", "method": "ties", "keep_ratio": 0.5},
]
# Each pair of types is a kernel to compile, so the default run has a few of them.
CASES = [
    *((config, dtype) for config in VARIATIONS for dtype in (BF16, F32, F64)),
    (OTHER_TYPES[0], BF16),
    (OTHER_TYPES[1], F64),
    (OTHER_TYPES[2], F32),
    *(pytest.param(config, dtype, marks=pytest.mark.slow) for config in OTHER_TYPES for dtype in (F16, F32, F64)),
]


@pytest.mark.parametrize(("config", "dtype"), CASES, ids=str)
def test_linear_and_ties_equal_numpy_with_every_setting(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype
) -> None:
    base = random_model(3, dtype, {"w": (50, 73), "tiny": (3,)})
    models = [finetune(base, seed, 0.01) for seed in range(3)]
    merged = merge(tmp_path, base, *models, **config)
    for name in base:
        assert same_bits(merged[name], reference_any(base[name], [m[name] for m in models], name, **config)), name
    again = dare.dare_merge(base, models, DareConfig(**config))
    assert_same(again, merged)


def test_trim_keeps_all_entries_as_large_as_the_last_one_it_must_keep(tmp_path: Path) -> None:
    """Deltas stored in 16 bits tie a lot. Which of two equal entries is kept must not depend on where they lie."""
    base = {"w": torch.zeros(3000)}
    model = {"w": torch.arange(3000) % 4 * 0.25}
    merged = merge(tmp_path, base, model, method="ties", drop_rate=0.0, keep_ratio=0.3)["w"]
    assert same_bits(merged, torch.where(model["w"] >= 0.5, model["w"], 0.0))
    merged = merge(tmp_path, base, model, method="ties", drop_rate=0.0, keep_ratio=0.25)["w"]
    assert same_bits(merged, torch.where(model["w"] >= 0.75, model["w"], 0.0))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 3000),
    keep_ratio=st.floats(0.001, 1),
    drop_rate=st.sampled_from([0.0, 0.5, 0.97]),
    dtype=st.sampled_from([BF16, F32, F64]),
)
def test_trim_finds_the_exact_threshold_of_any_tensor(
    tmp_path: Path, seed: int, count: int, keep_ratio: float, drop_rate: float, dtype: torch.dtype
) -> None:
    values = np.random.default_rng(seed).standard_cauchy(count) * 2.0 ** np.random.default_rng(seed).integers(-30, 20)
    base, model = torch.zeros(count, dtype=dtype), torch.from_numpy(values).clamp(-1e30, 1e30).to(dtype)
    config = {"method": "ties", "keep_ratio": keep_ratio, "drop_rate": drop_rate}
    merged = merge(tmp_path, {"w": base}, {"w": model}, **config)["w"]
    assert same_bits(merged, reference_any(base, [model], "w", **config))


def test_ties_with_one_model_equals_linear(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    model = finetune(base, 1)
    for drop_rate in (0.0, 0.9):
        linear = merge(tmp_path, base, model, drop_rate=drop_rate)
        assert_same(merge(tmp_path, base, model, drop_rate=drop_rate, method="ties"), linear)


def reference_slerp(base: torch.Tensor, models: list[torch.Tensor], name: str, t: float, **config: Any) -> np.ndarray:
    wide = [tensor.double().numpy().ravel() for tensor in (base, *models)]
    kept = reference_kept(wide[0], wide[1:], name, config, [1.0, 1.0])
    first, second = (wide[0] + part for part in kept)
    cosine = float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
    if abs(cosine) > 0.9995:
        values = (1 - t) * first + t * second
    else:
        angle = math.acos(cosine)
        values = (math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)
    return (wide[0] + config.get("lambda_coeff", 1.0) * (values - wide[0])).reshape(base.shape)


@pytest.mark.parametrize("size", [0.0001, 0.05, 1.0], ids=["nearly parallel", "at an angle", "nearly orthogonal"])
@pytest.mark.parametrize("config", [{}, {"slerp_t": 0.0}, {"slerp_t": 0.3, "drop_rate": 0.0}, {"lambda_coeff": 0.5}])
def test_slerp_equals_the_closed_form_within_rounding(tmp_path: Path, size: float, config: dict[str, Any]) -> None:
    base = random_model(1, F64)
    models = [finetune(base, seed, size) for seed in (1, 2)]
    merged = merge(tmp_path, base, *models, method="slerp", **config)
    t = config.get("slerp_t", 0.5)
    for name, tensor in merged.items():
        others = {key: value for key, value in config.items() if key != "slerp_t"}
        expected = reference_slerp(base[name], [m[name] for m in models], name, t, **others)
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-13)
    assert_same(dare.dare_merge(base, models, DareConfig(method="slerp", **config)), merged)


def test_slerp_at_its_ends_gives_the_models(tmp_path: Path) -> None:
    base = random_model(1)
    models = [finetune(base, seed, 0.1) for seed in (1, 2)]
    for t, model in ((0.0, models[0]), (1.0, models[1])):
        merged = merge(tmp_path, base, *models, method="slerp", drop_rate=0.0, slerp_t=t)
        for name in base:
            torch.testing.assert_close(merged[name], model[name], rtol=1e-6, atol=1e-7)


def test_slerp_treats_a_tensor_that_a_model_lacks_as_the_base(tmp_path: Path) -> None:
    base = random_model(1, F64)
    models = [finetune(base, seed, 0.1) for seed in (1, 2)]
    whole = merge(tmp_path, base, {**models[0], "head.weight": base["head.weight"]}, models[1], method="slerp")
    del models[0]["head.weight"]
    assert_same(merge(tmp_path, base, *models, method="slerp"), whole)
    assert_same(dare.dare_merge(base, models, DareConfig(method="slerp")), whole)


def test_slerp_of_zero_vectors_is_linear(tmp_path: Path) -> None:
    base, one = unit_models({"w": 3000})
    merged = merge(tmp_path, base, base, one, method="slerp", drop_rate=0.0, slerp_t=0.25)["w"]
    assert same_bits(merged, torch.full((3000,), 0.25))


def test_slerp_does_not_depend_on_the_sine_of_a_library() -> None:
    for cosine, t in ((0.3, 0.5), (-0.9, 0.1), (0.999, 0.77), (0.0, 0.5), (-0.9994, 0.4)):
        angle = math.acos(cosine)
        expected = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
        assert dare.slerp_ends(4.0, 9.0, 6 * cosine, t) == pytest.approx(expected, rel=1e-13)
    first, second = dare.slerp_ends(1.0, 1.0, 0.5, 0.5)  # 60 degrees: sin 30 / sin 60 = 1 / sqrt 3
    assert first == second == 1 / math.sqrt(3) or abs(first - 3**-0.5) < 2**-53


METHODS: list[dict[str, Any]] = [
    {"method": "linear", "drop_rate": 0.7},
    {"method": "ties", "drop_rate": 0.5},
    {"method": "ties", "drop_rate": 0.5, "keep_ratio": 0.3},
    {"method": "slerp", "drop_rate": 0.5},
]


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_every_method_gives_the_same_bytes_on_any_threads_and_chunks(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = random_model(4, BF16, {"a": (300, 200), "b": (7,), "c": (64, 64), "d": (5000,)})
    models = [finetune(base, seed, 0.02) for seed in (1, 2)]
    usual = merge(tmp_path, base, *models, threads=1, **config)
    monkeypatch.setattr(dare, "BATCH_ELEMENTS", 5000)
    for chunk, threads in ((1024, 7), (4096, 2), (1 << 15, 3)):
        monkeypatch.setattr(dare, "MIN_CHUNK", chunk)
        monkeypatch.setattr(dare, "MAX_CHUNK", chunk)
        assert_same(merge(tmp_path, base, *models, threads=threads, **config), usual)
        monkeypatch.setattr(dare, "MEMORY_CHUNK", chunk)
        assert_same(dare.dare_merge(base, models, DareConfig(**config)), usual)


@pytest.mark.parametrize("config", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_lambda_0_gives_the_base_bit_for_bit(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    base = random_model(4, dtype)
    base["layer.bias"][:20] = -0.0
    models = [finetune(base, seed, 0.02) for seed in (1, 2)]
    assert_same(merge(tmp_path, base, *models, lambda_coeff=0, **config), base)


@pytest.mark.parametrize("config", METHODS, ids=str)
def test_models_equal_to_the_base_change_nothing_by_any_method(tmp_path: Path, config: dict[str, Any]) -> None:
    base = random_model(4, F32)
    base["layer.bias"][:20] = -0.0
    assert_same(merge(tmp_path, base, base, base, **config), base)


def test_drop_rates_of_one_model_leave_the_other_masks_alone(tmp_path: Path) -> None:
    base, one = unit_models({"w": 5000})
    two = {"w": torch.full((5000,), 64.0)}
    for rate in (0.0, 0.3, 0.9):
        merged = merge(tmp_path, base, one, two, drop_rate=[rate, 0.5], rescale=False, weights=[1, 1])["w"].numpy()
        assert np.array_equal(merged >= 64, reference_mask(43, "w", 5000, 0.5))
        assert np.array_equal(merged % 64 == 1, reference_mask(42, "w", 5000, rate))


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [{"drop_rate": 0.3}, {"drop_rate": [0.3, 0.6]}, {"lambda_coeff": 0.5}, {"rescale_q": 0.4}, {"keep_ratio": 0.3}],
    ids=str,
)
def test_a_rule_for_all_tensors_equals_the_same_setting_for_all(tmp_path: Path, setting: dict[str, Any]) -> None:
    base = random_model(dtype=BF16)
    models = [finetune(base, seed, 0.02) for seed in (1, 2)]
    method = "ties" if "keep_ratio" in setting else "linear"
    everywhere = merge(tmp_path, base, *models, method=method, **setting)
    assert_same(merge(tmp_path, base, *models, method=method, rules=[{"match": "*", **setting}]), everywhere)


def test_the_first_rule_that_matches_wins(tmp_path: Path) -> None:
    base, model = unit_models({"model.embed_tokens": 2000, "lm_head": 2000, "layer.mlp": 2000, "layer.norm": 2000})
    rules = [
        {"match": ["*embed_tokens*", "lm_head"], "drop_rate": 0.5},
        {"match": "layer.norm", "lambda_coeff": 0},
        {"match": "layer.*", "drop_rate": 0.0},
    ]
    merged = merge(tmp_path, base, model, rules=rules)
    for name in ("model.embed_tokens", "lm_head"):
        assert np.array_equal(kept_positions(merged, name), reference_mask(42, name, 2000, 0.5))
    assert same_bits(merged["layer.norm"], base["layer.norm"])
    assert same_bits(merged["layer.mlp"], model["layer.mlp"])
    assert_same(dare.dare_merge(base, [model], DareConfig(rules=rules)), merged)


def test_rules_may_be_objects_and_are_checked_like_tables() -> None:
    rule = dare.Rule("*norm*", lambda_coeff=0)  # type: ignore[arg-type]
    assert rule.match == ("*norm*",)
    assert DareConfig(rules=[rule]).for_tensor("w", 1).lambda_coeff == 1
    with pytest.raises(ConfigError, match="drop_rate must be a number"):
        dare.Rule(("*",), drop_rate=5.0)
    with pytest.raises(ConfigError, match="rules must be a list"):
        DareConfig(rules=5)  # type: ignore[arg-type]


def test_rules_that_are_never_used_are_reported(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    rules = [
        {"match": "layer.*", "drop_rate": 0.5},
        {"match": ["*nothing*"], "drop_rate": 0.1},
        {"match": "layer.bias", "lambda_coeff": 0.5},
    ]
    warnings = warnings_of(tmp_path, base, finetune(base, 1, 0.0005), rules=rules)
    assert warnings == [
        "rule 2 ('*nothing*') matches no tensor",
        "rule 3 ('layer.bias') matches only tensors that an earlier rule takes",
    ]


def test_rules_from_toml_and_flags_and_recipes_are_the_same(models: list[Path], tmp_path: Path) -> None:
    rule = '[[rules]]\nmatch = ["layer.*", "scalar"]\ndrop_rate = [0.5, 0.25]\nlambda_coeff = 0.5\n'
    config = write_config(tmp_path, rule, verbose=False)
    assert dare.main(["-c", str(config)]) == 0
    from_toml = load_file(tmp_path / "out.safetensors")
    (tmp_path / "recipe.toml").write_text(metadata(tmp_path / "out.safetensors")["dare_recipe"])
    assert dare.main(["-q", "-c", str(tmp_path / "recipe.toml"), "-o", str(tmp_path / "again.safetensors")]) == 0
    assert_same(load_file(tmp_path / "again.safetensors"), from_toml)
    flags = ["--rule", "layer.*:drop_rate=[0.5, 0.25], lambda_coeff=0.5", "--rule", "scalar:lambda_coeff=0.5"]
    arguments = ["-q", "-b", *map(str, models[:1]), "-m", *map(str, models[1:]), "-o", str(tmp_path / "f.safetensors")]
    assert dare.main([*arguments, *flags]) == 0
    assert_same({n: t for n, t in load_file(tmp_path / "f.safetensors").items() if n != "scalar"},
                {n: t for n, t in from_toml.items() if n != "scalar"})  # fmt: skip
    assert dare.main(["-q", "-c", str(config), "--rule", "*:lambda_coeff=0"]) == 0
    assert_same(load_file(tmp_path / "out.safetensors"), load_file(models[0]))


def test_every_setting_survives_the_recipe(models: list[Path], tmp_path: Path) -> None:
    runs = [
        ["--method", "ties", "--weights", "1", "2", "--keep-ratio", "0.4", "--lambda", "0.9", "--dtype", "float32"],
        ["--method", "slerp", "--slerp-t", "0.3", "--drop-rate", "0.5", "0.7", "--rescale-q", "0.6"],
        ["--no-rescale", "--drop-rate", "0.2", "--weights", "1", "-1", "--rule", "*bias:drop_rate=0"],
    ]
    for k, run in enumerate(runs):
        first, again = tmp_path / f"first{k}.safetensors", tmp_path / f"again{k}.safetensors"
        arguments = ["-q", "-b", str(models[0]), "-m", str(models[1]), str(models[2]), "-o", str(first)]
        assert dare.main([*arguments, *run]) == 0
        (tmp_path / "recipe.toml").write_text(metadata(first)["dare_recipe"])
        assert dare.main(["-q", "-c", str(tmp_path / "recipe.toml"), "-o", str(again)]) == 0
        assert first.read_bytes() == again.read_bytes()


def test_dropping_without_rescaling_is_warned_about(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    [warning] = warnings_of(tmp_path, base, finetune(base, 1, 0.0005), rescale=False)
    assert "rescale is off" in warning
    assert "10 times too weak" in warning
    assert warnings_of(tmp_path, base, finetune(base, 1, 0.0005), rescale=False, drop_rate=0.0) == []
    rules = [{"match": "*", "drop_rate": 0.5}]
    [warning] = warnings_of(tmp_path, base, finetune(base, 1, 0.0005), rescale=False, drop_rate=0.0, rules=rules)
    assert "2 times too weak" in warning


@pytest.mark.parametrize(
    ("config", "count", "complaint"),
    [
        ({"method": "slerp"}, 3, "slerp goes between two models, not 3"),
        ({"method": "slerp"}, 1, "slerp goes between two models, not 1"),
        ({"slerp_t": 0.5}, 2, "slerp_t means nothing to method linear"),
        ({"keep_ratio": 0.5}, 2, "keep_ratio means nothing to method linear"),
        ({"rules": [{"match": "*", "keep_ratio": 0.5}]}, 2, "keep_ratio means nothing to method linear"),
        ({"weights": [1.0]}, 2, "weights has 1 values for 2 models"),
        ({"weights": [1.0, 1.0], "method": "slerp"}, 2, "weights mean nothing to method slerp"),
        ({"weights": [0.0, 0.0], "method": "ties"}, 2, "must not be negative nor all 0"),
        ({"weights": [1.0, -1.0], "method": "ties"}, 2, "must not be negative nor all 0"),
        ({"rescale_q": 0.5, "rescale": False}, 2, "rescale_q means nothing when rescale is off"),
        ({"rescale_q": 0.05}, 2, "rescale_q 0.05 is below 1 - drop_rate = 0.1"),
        ({"rescale_q": 0.2, "rules": [{"match": "*", "drop_rate": 0.5}]}, 2, "rescale_q 0.2 is below 1 - drop_rate"),
        ({"rescale_q": [0.2, 0.2, 0.2]}, 2, "rescale_q has 3 values for 2 models"),
        ({"drop_rate": [0.5]}, 2, "drop_rate has 1 values for 2 models"),
        ({"rules": [{"match": "*", "drop_rate": [0.1, 0.2, 0.3]}]}, 2, "rule 1: drop_rate has 3 values"),
        ({"method": "magic"}, 2, "method must be one of linear, ties, slerp"),
        ({"dtype": "int8"}, 2, "dtype must be one of float32, float16, bfloat16, float64"),
        ({"drop_rate": []}, 2, "drop_rate must be a number"),
        ({"lambda_coeff": math.inf}, 2, "lambda_coeff must be a number"),
        ({"weights": 0.5}, 2, "weights must be a list of numbers"),
        ({"rescale_q": 0}, 2, "rescale_q must be a number above 0"),
        ({"keep_ratio": 1.5, "method": "ties"}, 2, "keep_ratio must be a number above 0 and at most 1"),
        ({"slerp_t": -1, "method": "slerp"}, 2, "slerp_t must be a number from 0 to 1"),
        ({"rules": ["*"]}, 2, "rule 1 must be a table"),
        ({"rules": [{"match": "*", "drop_rat": 0.5}]}, 2, "rule 1 has no key 'drop_rat'"),
        ({"rules": [{"match": "*", "drop_rate": 2}]}, 2, "rule 1: drop_rate must be a number"),
        ({"rules": [{"drop_rate": 0.5}]}, 2, "rule 1: match must be a pattern"),
        ({"rules": [{"match": []}]}, 2, "rule 1: match must be a pattern"),
        ({"rules": [{"match": "*"}]}, 2, "rule 1: it sets nothing"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_with_a_reason(
    models: list[Path], config: dict[str, Any], count: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        DareMerger(models[0], [models[1]] * count, DareConfig(**config))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rule", "nonsense"], "has no colon after its pattern"),
        (["--rule", "*:drop_rate"], "must be PATTERN:SETTING=VALUE"),
        (["--rule", "*:drop_rate=3"], "drop_rate must be a number"),
        (["--rule", "*:seed=3"], "has no key 'seed'"),
        (["--lambda", "inf"], "--lambda must be a number"),
        (["--method", "tis"], "--method must be one of linear, ties, slerp"),
        (["--slerp-t", "0.5"], "slerp_t means nothing to method linear"),
    ],
)
def test_wrong_ways_to_combine_are_refused_by_the_command(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    refuse(tmp_path, capsys, 2, complaint, flags=tuple(arguments))


def test_wrong_rules_in_toml_are_named_with_the_file(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, '[[rules]]\nmatch = "*"\ndrop = 1\n')
    assert dare.main(["-c", str(config)]) == 2
    assert f"error: {config}: rule 1 has no key 'drop'" in capsys.readouterr().err
    config.write_text(config.read_text().replace("[[rules]]", "[rules]"))
    assert dare.main(["-c", str(config)]) == 2
    assert "write [[rules]]" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Tensors in memory
# ---------------------------------------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def on(tensors: Tensors, device: str) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("config", [*METHODS, {"drop_rate": 0.0}], ids=str)
def test_tensors_in_memory_give_the_bits_of_the_files(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    base = {**random_model(6, dtype), "ids": torch.arange(7), "empty": torch.zeros(0, 3, dtype=dtype)}
    models = [{**finetune(random_model(6, dtype), seed, 0.02), "ids": torch.arange(7)} for seed in (1, 2)]
    expected = merge(tmp_path, base, *models, **config)
    arguments = [on(tensors, device) for tensors in (base, *models)]
    merged = dare.dare_merge(arguments[0], arguments[1:], DareConfig(**config))
    assert all(tensor.device.type == device for tensor in merged.values())
    assert_same(on(merged, "cpu"), expected)
    for argument, original in zip(arguments, (base, *models), strict=True):
        assert_same(on(argument, "cpu"), original)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sparsified_model_is_the_merge_of_one(tmp_path: Path, device: str) -> None:
    base = random_model(6, BF16)
    model = finetune(base, 1)
    merged = dare.dare_sparsify(on(base, device), on(model, device), drop_rate=0.8, seed=3)
    assert_same(on(merged, "cpu"), merge(tmp_path, base, model, drop_rate=0.8, seed=3))


@pytest.mark.parametrize("device", DEVICES)
def test_dropped_deltas_are_masked_and_rescaled(device: str) -> None:
    deltas = {"w": torch.randn(100, 70), "half": torch.randn(3000).to(BF16), "ids": torch.arange(3)}
    for rescale in (True, False):
        thinned = on(dare.dare_drop(on(deltas, device), drop_rate=0.7, seed=5, rescale=rescale), "cpu")
        for name in ("w", "half"):
            mask = torch.from_numpy(reference_mask(5, name, deltas[name].numel(), 0.7)).reshape(deltas[name].shape)
            scale = np.float32(1 / honoured(0.7)) if rescale else np.float32(1)
            expected = torch.where(mask, deltas[name].float() * scale, 0.0).to(deltas[name].dtype)
            assert same_bits(thinned[name], expected)
        assert same_bits(thinned["ids"], deltas["ids"])
    assert_same(dare.dare_drop(deltas, drop_rate=0.0), deltas)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ties", "keep_ratio": 0.5, "drop_rate": 0.0},
        {"method": "ties", "weights": [2.0], "drop_rate": 0.0},
        {"drop_rate": 0.0},
        {"drop_rate": 0.0, "rescale": False, "lambda_coeff": 1},
    ],
    ids=str,
)
def test_one_model_comes_back_alike_from_files_and_from_memory(tmp_path: Path, config: dict[str, Any]) -> None:
    base, model = {"w": torch.full((3000,), 1e10)}, {"w": torch.full((3000,), 1e10)}
    model["w"][:900] = 1e-3
    merged = merge(tmp_path, base, model, **config)
    assert_same(dare.dare_merge(base, [model], DareConfig(**config)), merged)
    if "keep_ratio" not in config:
        assert_same(merged, model)


def test_models_that_lack_tensors_merge_alike_from_files_and_from_memory(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    models = [finetune(base, seed) for seed in (1, 2, 3)]
    del models[0]["layer.weight"], models[1]["scalar"], models[1]["layer.weight"]
    config = {"method": "ties", "drop_rate": [0.1, 0.5, 0.9], "keep_ratio": 0.6, "weights": [1, 2, 3]}
    assert_same(dare.dare_merge(base, models, DareConfig(**config)), merge(tmp_path, base, *models, **config))


def test_quantised_tensors_in_memory_are_copied_where_equal() -> None:
    quantised = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    merged = dare.dare_merge({"q": quantised}, [{"q": quantised.clone()}])
    assert torch.equal(merged["q"].view(torch.uint8), quantised.view(torch.uint8))


def test_parameters_that_want_gradients_are_merged_too() -> None:
    base = {"w": torch.nn.Parameter(torch.zeros(10))}
    merged = dare.dare_merge(base, [{"w": torch.nn.Parameter(torch.ones(10))}], DareConfig(drop_rate=0.0))
    assert merged["w"].tolist() == [1.0] * 10
    assert not merged["w"].requires_grad


def test_tensors_in_memory_are_refused_like_files() -> None:
    base = {"w": torch.zeros(10)}
    for model, complaint in [
        ({"w": torch.zeros(11)}, r"tensor 'w' is \[10\] of torch.float32 in the base and \[11\]"),
        ({"w": torch.zeros(10, dtype=torch.int64)}, "int64 in model 0"),
        ({"w": torch.full((10,), math.nan)}, "holds a value that is not finite"),
        ({"w": torch.full((10,), 3e38)}, "holds or gives a value that is not finite"),
        ({"w": torch.zeros(10).to(torch.float8_e4m3fn)}, "cannot be merged"),
    ]:
        with pytest.raises(DareError, match=complaint):
            dare.dare_merge(base, [model], DareConfig(drop_rate=0.5))
    with pytest.raises(DareError, match="no tensor in common"):
        dare.dare_merge(base, [{"v": torch.zeros(10)}])
    with pytest.raises(ConfigError, match="list of state dicts"):
        dare.dare_merge(base, base)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Against mergekit, where it is installed
# ---------------------------------------------------------------------------------------------------------------------


def llama_model(folder: Path, seed: int, base: Tensors | None = None) -> Tensors:
    """A tiny Llama in float32, in the directory that mergekit wants."""
    hidden, mlp, vocabulary = 32, 64, 48
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for part, shape in {
        "q": (hidden, hidden),
        "k": (hidden, hidden),
        "v": (hidden, hidden),
        "o": (hidden, hidden),
    }.items():
        shapes[f"model.layers.0.self_attn.{part}_proj.weight"] = shape
    for part, shape in {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}.items():
        shapes[f"model.layers.0.mlp.{part}_proj.weight"] = shape
    for part in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"model.layers.0.{part}.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    tensors = random_model(seed, F32, shapes) if base is None else finetune(base, seed, 0.02)
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def run_mergekit(folder: Path, method: str, count: int, each: dict[str, Any], shared: dict[str, Any]) -> Tensors:
    pytest.importorskip("mergekit")
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    paths = [str(folder / f"m{i}") for i in range(count)]
    recipe: dict[str, Any] = {"merge_method": method, "dtype": "float32", "parameters": shared}
    if method == "slerp":
        recipe |= {"base_model": paths[0], "models": [{"model": path} for path in paths]}
    else:
        recipe |= {"base_model": str(folder / "base"), "models": [{"model": p, "parameters": each} for p in paths]}
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, cuda=False)
    run_merge(MergeConfiguration.model_validate(recipe), str(folder / "theirs"), options)
    return load_file(folder / "theirs" / "model.safetensors")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("method", "each", "shared", "ours"),
    [
        ("task_arithmetic", {"weight": 0.3}, {"normalize": False}, {"weight": 0.3}),
        ("dare_linear", {"weight": 0.3, "density": 1.0}, {"normalize": False, "lambda": 0.7},
         {"weight": 0.3, "lambda_coeff": 0.7}),
        ("ties", {"weight": 1.0, "density": 1.0}, {"normalize": True}, {"weight": 1.0, "method": "ties"}),
        ("ties", {"weight": 0.3, "density": 0.25}, {"normalize": True},
         {"weight": 0.3, "method": "ties", "keep_ratio": 0.25}),
        ("dare_ties", {"weight": 0.5, "density": 1.0}, {"normalize": True}, {"weight": 0.5, "method": "ties"}),
    ],
)  # fmt: skip
def test_linear_and_ties_equal_mergekit_to_the_last_bit(
    tmp_path: Path,
    offline: None,
    count: int,
    method: str,
    each: dict[str, Any],
    shared: dict[str, Any],
    ours: dict[str, Any],
) -> None:
    base = llama_model(tmp_path / "base", 0)
    models = [llama_model(tmp_path / f"m{i}", i + 1, base) for i in range(count)]
    theirs = run_mergekit(tmp_path, method, count, each, shared)
    config = {key: value for key, value in ours.items() if key != "weight"}
    merged = merge(tmp_path, base, *models, drop_rate=0.0, weights=[ours["weight"]] * count, **config)
    assert_same(merged, theirs)


@pytest.mark.parametrize("t", [0.2, 0.5])
def test_slerp_equals_mergekit_within_rounding(tmp_path: Path, offline: None, t: float) -> None:
    base = llama_model(tmp_path / "base", 0)
    models = [llama_model(tmp_path / f"m{i}", i + 1, base) for i in range(2)]
    theirs = run_mergekit(tmp_path, "slerp", 2, {}, {"t": t})
    merged = merge(tmp_path, base, *models, drop_rate=0.0, method="slerp", slerp_t=t)
    for name in merged:
        torch.testing.assert_close(merged[name], theirs[name], rtol=2e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# The README, the configuration and the example that ship
# ---------------------------------------------------------------------------------------------------------------------

README = (HERE / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_has_the_options_that_help_has() -> None:
    rows = []
    for action in dare.build_parser()._actions:
        many = "..." if action.nargs == "+" else ""
        names = ", ".join(f"`{name}`" for name in sorted(action.option_strings, key=len))
        if action.metavar:
            names = f"{names[:-1]} {action.metavar}{many}`"
        rows.append(f"| {names} | {action.help} |")
    table = README.split("| option | meaning |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    assert sorted(table) == sorted(rows)


def test_the_readmes_python_runs(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {path.stem: load_file(path) for path in models}
    names = {"pretrained": state["base"], "finetuned": state["math"], "task_vector": state["code"], **state}
    for block in blocks("python"):
        exec(block, names)
    assert "merged 2 models into merged.safetensors" in capsys.readouterr().out
    assert_same(
        names["merged"], dare.dare_merge(state["base"], [state["math"], state["code"]], DareConfig(method="ties"))
    )
    again = ["-q", "--config", "recipe.toml", "--output", "again.safetensors"]
    assert dare.main(again) == 0
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "merged.safetensors").read_bytes()


def test_the_readmes_toml_is_a_configuration(models: list[Path], tmp_path: Path) -> None:
    [block] = blocks("toml")
    (tmp_path / "c.toml").write_text(block)
    assert dare.main(["-q", "-c", str(tmp_path / "c.toml")]) == 0


def test_the_shipped_configuration_comments_every_key() -> None:
    text = (HERE / "merge_config.toml").read_text()
    for table, keys in dare.TABLES.items():
        for key in keys if table != "recipe" else ():
            assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), key
    shown = tomllib.loads(text)["dare"]
    assert shown == {key: getattr(DareConfig(), key) for key in shown}, "what is not commented out is the default"
    without_comments = re.sub(r"^# (?=\[\[|[a-z_]+ = )", "", text, flags=re.MULTILINE)
    assert set(tomllib.loads(without_comments)["dare"]) == set(dare.CHECKS)


def test_the_shipped_example_is_a_merge_that_works(tmp_path: Path) -> None:
    output = tmp_path / "merged.safetensors"
    assert dare.main(["-q", "-c", str(HERE / "merge_config.toml"), "-o", str(output)]) == 0
    named = [HERE / "examples" / "models" / f"{name}.safetensors" for name in ("base", "rotated", "covered")]
    evaluate = [sys.executable, str(HERE / "examples" / "evaluate.py"), "--json", *map(str, named), str(output)]
    done = subprocess.run(evaluate, capture_output=True, text=True, check=True)
    scores = json.loads(done.stdout)["models"]
    assert scores["merged"]["mean"] > 0.05 + max(scores[name]["mean"] for name in ("base", "rotated", "covered"))
    assert min(scores["merged"][task] for task in ("rotated", "covered")) > 0.8


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
