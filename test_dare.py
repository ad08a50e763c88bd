"""The claims that dare makes, each with a test that runs the real thing on real files.

Run with `uv run pytest` (or `uv run python test_dare.py`); add `-m ''` for the slow ones too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fnmatch
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import tomllib
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "lacks 1 tensor of the base: 'scalar'" in warnings[0]
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


@pytest.mark.parametrize(
    "text",
    [
        "[dare] \r\n" + "\r\n" * 600_000 + "seed = 7\r\n",
        "[dare]\n" + "# \u20ac\u20ac\n" * 200_000 + "seed = 7\n",
        "\ufeff[dare]\n" + "#\n" * 524_284 + "\n\n\nseed = 7\n",
    ],
)
def test_a_configuration_that_is_too_long_is_refused_rather_than_cut_short(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match="it is longer than 1,048,576 bytes"):
        dare.load_settings(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "a." * 500_000 + "a = 1",
        "[" + "a . " * 250_000 + "a]",
        '"".' * 300_000 + "a = 1",
        "x = [{" + "'a'." * 20_000 + "a = 1}]",
        "".join(f"k{k}." + "a." * 14 + "a = 1\n" for k in range(20_000)),
    ],
)
def test_keys_of_more_parts_than_any_are_refused_at_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    started = time.perf_counter()
    with pytest.raises(ConfigError, match="its keys have too many parts"):
        dare.load_settings(path)
    path.rename(tmp_path / "dare_recipe.toml")
    assert dare.made_here(tmp_path) == {}
    assert time.perf_counter() - started < 10


def test_dots_in_strings_and_comments_are_no_parts_of_a_key(tmp_path: Path) -> None:
    dots = "a." * 30_000
    written = [f'"{dots}"', f"'{dots}'", f'"""{dots}\n""{dots}\\""""""', f"'''{dots}\n''{dots}'''", f'"\\"{dots}"']
    text = "".join(f"[[rules]] # {dots}\nmatch = {string}\ndrop_rate = 0.5\n" for string in written)
    (tmp_path / "config.toml").write_text(text)
    rules = dare.load_settings(tmp_path / "config.toml").rules
    assert [rule.match[0] for rule in rules] == [rule["match"] for rule in tomllib.loads(text)["rules"]]


def test_a_recipe_that_could_not_be_read_again_is_not_written(small: tuple[Path, Path]) -> None:
    rules = [{"match": f"{k:0500d}", "drop_rate": 0.5} for k in range(2100)]
    with pytest.raises(ConfigError, match="the recipe would be longer"):
        DareMerger(small[0], [small[1]], quiet(rules=rules)).plan(small[0].with_name("out.safetensors"))


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


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", ["pipe", pytest.param("device", marks=pytest.mark.slow)])
def test_pipes_and_devices_in_an_output_or_beside_it_are_not_waited_for(small: tuple[Path, Path], kind: str) -> None:
    folder = small[0].parent
    base = save_directory(folder / "base", load_file(small[0]), model_type="x")
    merged, partial = folder / "merged", folder / "merged.partial"
    arguments = ("-q", "-b", base, "-m", small[1], "-o", merged)

    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")

    def refused(words: str, *given: str | Path) -> None:
        done = command(*given)
        assert done.returncode == 1, done.stderr
        assert words in done.stderr

    for file in ("lock", "journal"):
        partial.mkdir(exist_ok=True)
        (partial / "lock").write_text("dare is merging here: process 1\n")
        put(partial / file)
        if file == "lock":
            refused("is in the way", *arguments)
            shutil.rmtree(partial)
        else:
            assert command(*arguments, "--resume").returncode == 0
    put(merged / "mine")
    refused("also holds 'mine'", *arguments)
    (merged / "mine").unlink()
    assert command("-q", "--verify", merged).returncode == 0
    put(merged / "config.json")
    refused("'config.json' cannot be read", "--verify", merged)
    put(merged / "model.safetensors")
    refused("'model.safetensors' is not a regular file", "--verify", merged)
    put(merged / "dare_recipe.toml")
    refused("is not a regular file", "--verify", merged)
    refused("was not made by this tool", *arguments)


@pytest.mark.skipif(os.name == "nt", reason="paths are too short there")
def test_what_is_nested_too_deeply_beside_a_model_is_no_accident(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small[0].parent
    base = save_directory(folder / "base", {"wte.weight": torch.zeros(4, 3)}, model_type="x")
    arguments = ["-q", "-b", str(base), "-m", str(base), "-o", str(folder / "merged")]
    for text in ('{"x":' + "[" * 100_000, '{"added_tokens":[' + "[" * 30_000):
        (base / "tokenizer.json").write_text(text)
        assert dare.main([*arguments, "--tokenizer-from", str(base)]) == 0
    partial = folder / "merged.partial"
    partial.mkdir()
    (partial / "lock").write_text("dare is merging here: process 1\n")
    text = b"[" * 100_000
    (partial / "journal").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    assert dare.main([*arguments, "--resume"]) == 0
    capsys.readouterr()
    here = os.getcwd()
    try:
        os.chdir(base)
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("f").touch()
        assert dare.main(arguments) == 1
        Path("f").unlink()
        for _ in range(1200):  # which pytest could not remove either
            os.chdir("..")
            os.rmdir("d")
    finally:
        os.chdir(here)
    assert "nested too deeply" in capsys.readouterr().err


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
    assert "'o.safetensors' cannot be used: Permission denied" in capsys.readouterr().err
    real_stat = Path.stat

    def denied_to_models(path: Path, **options: Any) -> Any:
        return denied() if path == models[0] else real_stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", denied_to_models)
        assert dare.main(["-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "o.safetensors")]) == 1
    assert f"cannot read {str(models[0])!r}: Permission denied" in capsys.readouterr().err


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

    def slowly(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(os, "fsync", failing_once)  # only now: the header has been synced
        time.sleep(0.05)
        return run(self, *arguments)

    monkeypatch.setattr(dare, "FLUSH_SECONDS", 0.001)
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
@pytest.mark.parametrize(
    ("dtype", "flags"),
    [
        *((dtype, []) for dtype in (BF16, F16, F32, F64)),
        (BF16, ["--method=ties", "--keep-ratio=0.5"]),
        (BF16, ["--method=slerp"]),
    ],
    ids=str,
)
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
    big = {f"t{i}": torch.zeros(1 << 22, dtype=BF16) for i in range(8)}
    save(tmp_path, base=big, model=big)
    before = snapshot(tmp_path)
    arguments = ["-b", "base.safetensors", "-m", *["model.safetensors"] * 24, "-o", "out.safetensors", "--threads", "1"]
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
    monkeypatch.setenv("TERM", "xterm")
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


@pytest.mark.parametrize(
    ("variable", "value", "expected"), [("NUMBA_ENABLE_AVX", "0", None), ("NUMBA_CPU_FEATURES", "+sse2", "+sse2")]
)
def test_what_a_user_tells_numba_about_the_processor_holds(variable: str, value: str, expected: str | None) -> None:
    code = "import dare; print(repr(dare.load_numba().config.CPU_FEATURES))"
    environment = {**os.environ, variable: value}
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == repr(expected), done.stderr


def test_kernels_use_the_whole_width_of_the_vectors() -> None:
    if "+avx512f" not in dare.host_features():
        pytest.skip("no vectors of 512 bits")
    spec = "dare.KernelSpec('linear', *['BF16'] * 3)"
    code = f"import dare; dare.load_numpy(); print(dare.BUILDERS['linear']({spec}).inspect_llvm())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=HERE, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("<16 x float>") > done.stdout.count("<8 x float>")


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


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_while_kernels_are_compiled_stops_at_once(
    models: list[Path], tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    """The compiler cannot be stopped, so it is left behind."""
    before = snapshot(tmp_path)
    process = subprocess.Popen(
        [sys.executable, HERE / "dare.py", "-b", models[0], "-m", models[1], "-o", tmp_path / "out.safetensors"],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "compiling" in process.stderr.readline()
    started = time.monotonic()
    process.send_signal(sent)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - started < 2
    assert process.returncode == status
    assert error == "interrupted\n"
    shutil.rmtree(tmp_path / "cache")
    assert snapshot(tmp_path) == before


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
# Models as directories, shards and indexes
# ---------------------------------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"
COMMITS = {"base": "b" * 40, "math": "c" * 40}


def save_directory(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A model directory with its weights in one file, and these settings in config.json if there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_sharded(folder: Path, tensors: Tensors, parts: list[list[str]], **extra: str) -> Path:
    """A model directory with a shard for each list of names and an index, as Hugging Face's tools write them.

    extra: entries that the index gets besides, or instead of, the true ones; dots are written as double underscores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        shard = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    weight_map |= {name.replace("__", "."): file for name, file in extra.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    return folder


def each_alone(tensors: Tensors) -> list[list[str]]:
    return [[name] for name in tensors]


def run_merge(base: Path, merge: list[Path], output: Path, **config: Any) -> dare.MergeReport:
    return DareMerger(base, merge, DareConfig(verbose=False, **config)).merge(output)


def tensors_in(folder: Path) -> Tensors:
    """All tensors of a merged directory."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def refuse_models(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    *complaints: str,
    base: Path | str,
    merge: Path | str,
    output: Path | str | None = None,
    flags: tuple[str, ...] = (),
) -> str:
    """Run the command on any models; it must fail with these words and leave the folder that holds all as it was."""
    before = snapshot(folder)
    output = folder / "out.safetensors" if output is None else output
    assert dare.main(["--base", str(base), "--merge", str(merge), "--output", str(output), *flags]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "this is a bug" not in printed.err, printed.err
    lines = printed.err.splitlines()
    assert lines[-2].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    for complaint in complaints:
        assert complaint in printed.err, printed.err
    assert snapshot(folder) == before
    return printed.err


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a fine-tune of it in bf16, as directories."""
    base = random_model(dtype=BF16)
    return save_directory(tmp_path / "base", base), save_directory(tmp_path / "math", finetune(base, 1))


def test_a_model_is_a_file_a_directory_shards_or_an_index(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    model = finetune(base, 1)
    names = list(base)
    layouts = {}
    for kind, tensors in (("base", base), ("model", model)):
        [file] = save(tmp_path, **{kind: tensors})
        whole = save_directory(tmp_path / f"{kind}-whole", tensors)
        sharded = save_sharded(tmp_path / f"{kind}-sharded", tensors, [names[:1], names[1:]])
        layouts[kind] = [file, whole, whole / "model.safetensors", sharded, sharded / INDEX]
    run_merge(layouts["base"][0], [layouts["model"][0]], tmp_path / "out.safetensors")
    expected = load_file(tmp_path / "out.safetensors")
    for source in layouts["base"]:
        run_merge(source, [layouts["model"][0]], tmp_path / "out.safetensors")
        assert_same(load_file(tmp_path / "out.safetensors"), expected)
    for source in layouts["model"]:
        run_merge(layouts["base"][0], [source], tmp_path / "out.safetensors")
        assert_same(load_file(tmp_path / "out.safetensors"), expected)


def test_any_sharding_gives_the_same_tensors(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    names = list(base)
    parts = [each_alone(base), [names[2:], names[:2]], [[names[3], names[0]], [names[1]], [names[2]]]]
    found = []
    for turn in range(3):
        source = [
            save_sharded(tmp_path / f"{turn}-{k}", tensors, parts[(turn + k) % 3])
            for k, tensors in enumerate((base, finetune(base, 1), finetune(base, 2)))
        ]
        run_merge(source[0], source[1:], tmp_path / f"out{turn}", max_shard_size=5000 * turn + 1000)
        found.append(tensors_in(tmp_path / f"out{turn}"))
    assert len(found[0]) == len(base)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    assert_same(found[0], merge(tmp_path, base, finetune(base, 1), finetune(base, 2)))


def test_shards_may_lie_in_a_folder_below_the_index(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    names = list(base)
    folder = save_sharded(tmp_path / "base", base, [names[:2], names[2:]])
    (folder / "shards").mkdir()
    for shard in folder.glob("*.safetensors"):
        shard.rename(folder / "shards" / shard.name)
    index = folder / INDEX
    index.write_text(index.read_text().replace('"model-', '"shards/model-'))
    save_directory(tmp_path / "math", finetune(base, 1))
    run_merge(folder, [tmp_path / "math"], tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), merge(tmp_path, base, finetune(base, 1)))


def to_hub_cache(cache: Path, repository: str, folder: Path, commit: str) -> Path:
    """Lay a model directory out as the Hub's cache does: blobs, links to them in a snapshot, and a branch."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        (home / "blobs" / blob).write_bytes(path.read_bytes())
        link = home / "snapshots" / commit / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(home / "blobs" / blob, link.parent))
    return home / "snapshots" / commit


def test_shards_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    model = finetune(base, 1)
    source = [
        to_hub_cache(tmp_path, f"org/{name}", save_sharded(tmp_path / name, tensors, each_alone(tensors)), "1" * 40)
        for name, tensors in (("base", base), ("model", model))
    ]
    run_merge(source[0], [source[1] / INDEX], tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert_same(tensors_in(tmp_path / "out"), merge(tmp_path, base, model))


# ---------------------------------------------------------------------------------------------------------------------
# Indexes that lie
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        "/etc/x",
        "C:\\x",
        "C:/x",
        "\\\\server\\share\\x",
        "//server/share/x",
        "C:x",
        "../math/model.safetensors",
        "sub/../../math/model.safetensors",
        "..\\math\\model.safetensors",
        "sub\\..\\..\\x",
        "..",
        ".",
        "",
        "a\x00b",
        "a\nb",
        7,
        None,
        ["model.safetensors"],
    ],
    ids=repr,
)
@pytest.mark.parametrize("side", ["base", "merge"])
def test_an_index_that_leads_elsewhere_is_not_followed(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: Any, side: str
) -> None:
    (tmp_path / "evil" / "sub").mkdir(parents=True)
    (tmp_path / "evil" / INDEX).write_text(json.dumps({"weight_map": {"layer.weight": entry}}))
    source: dict[str, Any] = {"base": pair[0], "merge": pair[1]} | {side: tmp_path / "evil"}
    complaint = f"says that tensor 'layer.weight' is in {entry!r}, which is no file beside it"
    refuse_models(tmp_path, capsys, 1, f"evil/{INDEX}'", complaint, "not followed", **source)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "is JSON without a weight_map"),
        ('{"weight_map": {}}', "is JSON without a weight_map"),
        ('{"weight_map": null}', "is JSON without a weight_map"),
        ('{"weight_map": ["model.safetensors"]}', "is JSON without a weight_map"),
        ("[]", "is not a JSON object"),
        ("", "is not a JSON object"),
        ("layer.weight: model.safetensors", "is not a JSON object"),
        ('{"weight_map": {"a": "x"}', "is not valid"),
        ("\ufeff{}", "is not valid"),
        ("\xff", "is not valid"),
        ('{"weight_map": ' + "[" * 200_000, "is nested too deeply"),
        ('{"weight_map": {"a": ' + "1" * 5000 + "}}", "is not valid"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' is in it twice"),
        ('{"weight_map": {"a": "x"}, "weight_map": {"a": "y"}}', "'weight_map' is in it twice"),
    ],
    ids=lambda text: text[:40],
)
def test_an_index_that_cannot_be_read_is_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    (tmp_path / "odd").mkdir()
    index = tmp_path / "odd" / INDEX
    index.write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8"))
    refuse_models(tmp_path, capsys, 1, f"odd/{INDEX}'", complaint, base=pair[0], merge=tmp_path / "odd")
    refuse_models(tmp_path, capsys, 1, f"odd/{INDEX}'", complaint, base=index, merge=pair[1])


@pytest.mark.parametrize("source", ["model", f"model/{INDEX}"])
def test_a_missing_shard_is_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    save_sharded(tmp_path / "model", model, each_alone(model))
    (tmp_path / "model" / "model-00002-of-00004.safetensors").unlink()
    error = refuse_models(
        tmp_path, capsys, 1, "lacks its file 'model-00002-of-00004.safetensors'", base=pair[0], merge=tmp_path / source
    )
    assert "download or save it again" in error
    assert "permissions" not in error


def test_a_link_to_a_shard_that_is_gone_is_a_missing_shard(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    snap = to_hub_cache(
        tmp_path / "hub", "o/m", save_sharded(tmp_path / "model", model, each_alone(model)), COMMITS["math"]
    )
    link = snap / "model-00003-of-00004.safetensors"
    link.resolve().unlink()
    refuse_models(tmp_path, capsys, 1, "lacks its file 'model-00003-of-00004.safetensors'", base=pair[0], merge=snap)


@pytest.mark.parametrize("source", ["model", f"model/{INDEX}"])
@pytest.mark.parametrize("broken", ["truncated", "pointer", "directory"])
def test_a_broken_shard_is_named_by_a_path_that_exists(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str, source: str
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    folder = save_sharded(tmp_path / "model", model, each_alone(model))
    shard = folder / "model-00002-of-00004.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    if broken == "truncated":
        shard.write_bytes(whole[:-10])
    elif broken == "pointer":
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    else:
        shard.mkdir()
    reason = {"truncated": "not a complete", "pointer": "Git LFS pointer", "directory": "not a regular file"}[broken]
    refuse_models(tmp_path, capsys, 1, repr(str(shard)), reason, base=pair[0], merge=tmp_path / source)


def test_an_index_that_does_not_fit_its_shards_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    names = list(model)
    parts = [names[:2], names[2:]]
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    folder = save_sharded(tmp_path / "absent", model, parts, ghost__weight=first)
    complaint = f"says that tensor 'ghost.weight' is in {first!r}, and it is not"
    refuse_models(tmp_path, capsys, 1, complaint, "absent", base=pair[0], merge=folder)

    folder = save_sharded(tmp_path / "other", model, parts, layer__weight=second)
    complaint = f"says that tensor 'layer.weight' is in {second!r}, and it is not"
    refuse_models(tmp_path, capsys, 1, complaint, "other", base=pair[0], merge=folder)

    folder = save_sharded(tmp_path / "twice", model, [names[:2], names[1:]])
    complaint = f"tensor {names[1]!r} of"
    refuse_models(tmp_path, capsys, 1, complaint, f"is in {first!r} and in {second!r}", base=folder, merge=pair[1])


# ---------------------------------------------------------------------------------------------------------------------
# Directories that hold no model, or too many
# ---------------------------------------------------------------------------------------------------------------------


def test_a_directory_without_a_model_says_what_it_has_instead(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()

    def check(*complaints: str) -> None:
        refuse_models(tmp_path, capsys, 1, "odd'", *complaints, base=folder, merge=pair[1])
        refuse_models(tmp_path, capsys, 1, "odd'", *complaints, base=pair[0], merge=folder)

    check("holds no model", "model.safetensors or model.safetensors.index.json")
    (folder / "config.json").write_text("{}")
    check("holds no model", "model.safetensors or model.safetensors.index.json")
    torch.save({"w": torch.ones(3)}, folder / "pytorch_model.bin")
    check("holds PyTorch pickles", "convert", "save_pretrained")
    (folder / "pytorch_model.bin").rename(folder / "consolidated.00.pth")
    check("holds PyTorch pickles", "convert")
    (folder / "consolidated.00.pth").unlink()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(100))
    check("holds GGUF files", "merge the original model")
    save_file({"w": torch.ones(3)}, folder / "consolidated.safetensors")
    save_file({"w": torch.ones(3)}, folder / "extra.safetensors")
    check("'consolidated.safetensors', 'extra.safetensors'", "name the file")


def test_a_model_and_an_adapter_in_one_directory_must_be_told_apart(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "both")
    write_adapter(folder, low_rank("layer", (37, 61)))
    refuse_models(
        tmp_path, capsys, 1, "both' holds a model and an adapter", "model.safetensors", base=pair[0], merge=folder
    )
    run_merge(pair[0], [folder / "model.safetensors"], tmp_path / "model.safetensors")
    run_merge(pair[0], [pair[1]], tmp_path / "math.safetensors")
    assert_same(load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "math.safetensors"))
    report = run_merge(pair[0], [folder / "adapter_model.safetensors"], tmp_path / "adapter.safetensors")
    assert report.models[0].parameters == 37 * 61


# ---------------------------------------------------------------------------------------------------------------------
# Adapters that are not plain LoRA, or not of this base
# ---------------------------------------------------------------------------------------------------------------------


def low_rank(module: str, shape: tuple[int, int], rank: int = 2, seed: int = 5) -> Tensors:
    """The two matrices of a LoRA on one module, under the names that PEFT saves them by."""
    generator = torch.Generator().manual_seed(seed)
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, shape[1], generator=generator) * 0.01,
        f"{prefix}.lora_B.weight": torch.randn(shape[0], rank, generator=generator) * 0.01,
    }


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A LoRA adapter of rank 2 with these settings; one that is ... is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    table = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["layer"]} | config
    table = {key: value for key, value in table.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(table))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def test_a_small_adapter_is_merged_as_the_model_that_it_makes(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    base = load_file(pair[0] / "model.safetensors")
    a, b = low_rank("layer", (37, 61)).values()
    changed = base | {"layer.weight": base["layer.weight"].float() + 2 * (b @ a)}
    run_merge(pair[0], [adapter], tmp_path / "out.safetensors", drop_rate=0.0, dtype="float32")
    merged = load_file(tmp_path / "out.safetensors")
    assert torch.allclose(merged["layer.weight"], changed["layer.weight"], rtol=1e-6, atol=1e-7)
    assert torch.equal(merged["layer.bias"], base["layer.bias"].float())


@pytest.mark.parametrize("key", dare.OTHER_ADAPTERS)
def test_an_adapter_that_is_not_two_matrices_is_refused_by_its_name(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)), **{key: {"some": [1, 2]}})
    words = dare.OTHER_ADAPTERS[key]
    refuse_models(
        tmp_path, capsys, 1, f"adapter' uses {words} ({key})", "merge_and_unload", base=pair[0], merge=adapter
    )
    write_adapter(adapter, low_rank("layer", (37, 61)), **{key: None})
    run_merge(pair[0], [adapter], tmp_path / "out.safetensors")
    write_adapter(adapter, low_rank("layer", (37, 61)), **{key: False})
    run_merge(pair[0], [adapter], tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("config", "complaints"),
    [
        ({"peft_type": "LOHA"}, ["is of type 'LOHA'", "only LoRA"]),
        ({"peft_type": "lora"}, ["is of type 'lora'", "only LoRA"]),
        ({"peft_type": ["LORA"]}, ["is of type ['LORA']", "only LoRA"]),
        ({"peft_type": ...}, ["is of type None", "only LoRA"]),
        ({"init_lora_weights": "pissa"}, ["was started by 'pissa'", "changed the base", "plain LoRA"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["was started by 'pissa_niter_4'", "changed the base"]),
        ({"init_lora_weights": "olora"}, ["was started by 'olora'", "changed the base"]),
        ({"init_lora_weights": "loftq"}, ["was started by 'loftq'", "changed the base"]),
        ({"init_lora_weights": "corda"}, ["was started by 'corda'", "changed the base"]),
        ({"init_lora_weights": {}}, ["was started by {}"]),
        ({"r": "8"}, ["has r = '8'", "adapter_config.json"]),
        ({"r": 0}, ["has r = 0", "adapter_config.json"]),
        ({"r": 2.0}, ["has r = 2.0", "adapter_config.json"]),
        ({"r": True}, ["has r = True", "adapter_config.json"]),
        ({"lora_alpha": "16"}, ["has lora_alpha = '16'", "adapter_config.json"]),
        ({"lora_alpha": math.nan}, ["has lora_alpha = nan", "adapter_config.json"]),
        ({"lora_alpha": math.inf}, ["has lora_alpha = inf", "adapter_config.json"]),
        ({"use_rslora": 1}, ["has use_rslora = 1", "adapter_config.json"]),
        ({"use_rslora": "true"}, ["has use_rslora = 'true'", "adapter_config.json"]),
        ({"fan_in_fan_out": "no"}, ["has fan_in_fan_out = 'no'", "adapter_config.json"]),
        ({"rank_pattern": ["layer"]}, ["has rank_pattern = ['layer']", "adapter_config.json"]),
        ({"rank_pattern": {"layer": "4"}}, ["has rank_pattern = {'layer': '4'}", "adapter_config.json"]),
        ({"alpha_pattern": {"layer": None}}, ["has alpha_pattern = {'layer': None}", "adapter_config.json"]),
        ({"alpha_pattern": 3}, ["has alpha_pattern = 3", "adapter_config.json"]),
        ({"r": 4}, ["[2, 61] and [37, 2] of 'layer'", "not of rank 4", "adapter_config.json"]),
        ({"r": ...}, ["[2, 61] and [37, 2] of 'layer'", "not of rank 8", "adapter_config.json"]),
        ({"rank_pattern": {"layer": 3}}, ["of 'layer'", "not of rank 3", "adapter_config.json"]),
        ({"rank_pattern": {"lay(er": 2}}, ["no regular expression", "adapter_config.json"]),
        ({"alpha_pattern": {"*layer": 2}}, ["no regular expression", "adapter_config.json"]),
        ({"rank_pattern": {"a{99999999999}": 2}}, ["no regular expression", "adapter_config.json"]),
        ({"rank_pattern": {"(" * 5000 + ")" * 5000: 2}}, ["no regular expression", "adapter_config.json"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_adapter_whose_settings_make_no_sense_is_refused(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    complaints: list[str],
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)), **config)
    refuse_models(tmp_path, capsys, 1, "adapter'", *complaints, base=pair[0], merge=adapter)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 2, "r": 4}', "[" * 200_000, "\xff"], ids=lambda text: text[:20])
@pytest.mark.parametrize("source", ["", "adapter_model.safetensors", "adapter_config.json"])
def test_an_adapters_settings_that_cannot_be_read_are_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, source: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    (adapter / "adapter_config.json").write_bytes(text.encode("latin-1"))
    named = repr(str(adapter / "adapter_config.json"))
    refuse_models(tmp_path, capsys, 1, f"{named} is not valid", base=pair[0], merge=adapter / source)


def test_settings_that_are_null_have_their_defaults(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = low_rank("layer", (37, 61), rank=8)
    nothing = dict.fromkeys(("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern"))
    write_adapter(tmp_path / "null", tensors, **nothing, init_lora_weights=None)
    write_adapter(tmp_path / "full", tensors, r=8, lora_alpha=8)
    run_merge(pair[0], [tmp_path / "null"], tmp_path / "null.safetensors")
    run_merge(pair[0], [tmp_path / "full"], tmp_path / "full.safetensors")
    assert_same(load_file(tmp_path / "null.safetensors"), load_file(tmp_path / "full.safetensors"))


PREFIX = "base_model.model.layer"


@pytest.mark.parametrize(
    ("change", "complaints"),
    [
        ({f"{PREFIX}.lora_magnitude_vector": torch.ones(37)}, [f"'{PREFIX}.lora_magnitude_vector'", "plain LoRA"]),
        ({f"{PREFIX}.lora_magnitude_vector.weight": torch.ones(37)}, ["lora_magnitude_vector.weight'", "plain LoRA"]),
        ({f"{PREFIX}.lora_B.bias": torch.ones(37)}, [f"'{PREFIX}.lora_B.bias'", "plain LoRA"]),
        ({f"{PREFIX}.lora_C.weight": torch.ones(37)}, [f"'{PREFIX}.lora_C.weight'", "plain LoRA"]),
        ({f"{PREFIX}.token_adapter.trainable_tokens_delta": torch.ones(3)}, ["trainable_tokens", "plain LoRA"]),
        ({f"{PREFIX}.lora_B.weight": None}, ["no pair of matrices A and B for 'layer'"]),
        ({f"{PREFIX}.lora_A.weight": None}, ["no pair of matrices A and B for 'layer'"]),
        ({f"{PREFIX}.lora_embedding_A": torch.ones(2, 61)}, ["no pair of matrices A and B for 'layer'"]),
        ({f"{PREFIX}.lora_A.other.weight": torch.ones(2, 61)}, ["several adapters", f"'{PREFIX}.lora_A.", "each"]),
        ({f"{PREFIX}.lora_A.weight": torch.ones(2, 61, dtype=torch.int8)}, [f"'{PREFIX}.lora_A.weight'", "is I8"]),
        ({f"{PREFIX}.lora_A.weight": torch.ones(2, 0)}, ["[2, 0] and [37, 2] of 'layer'", "not of rank 2"]),
        ({f"{PREFIX}.lora_A.weight": torch.ones(())}, ["[] and [37, 2] of 'layer'", "not of rank 2"]),
        ({f"{PREFIX}.lora_B.weight": torch.ones(37, 3)}, ["[2, 61] and [37, 3] of 'layer'", "not of rank 2"]),
        ({f"{PREFIX}.lora_A.weight": torch.ones(2, 60)}, ["'layer.weight' is [37, 61]", "and [37, 60] in"]),
        (
            {f"{PREFIX}.base_layer.weight": torch.ones(37, 60)},
            ["'layer' is [37, 60] and [37, 61]"],
        ),
        (low_rank("other", (37, 61)), ["changes 'other.weight', which the base does not have", "'layer.weight'"]),
        (low_rank("scalar", (37, 61)), ["changes 'scalar.weight', which the base does not have"]),
    ],
    ids=lambda value: ",".join(value)[:70],
)
def test_an_adapter_whose_tensors_do_not_fit_is_refused(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, torch.Tensor | None],
    complaints: list[str],
) -> None:
    tensors = {n: t for n, t in {**low_rank("layer", (37, 61)), **change}.items() if t is not None}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    refuse_models(tmp_path, capsys, 1, "adapter'", *complaints, base=pair[0], merge=adapter)


def test_an_adapter_without_tensors_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", {})
    error = refuse_models(tmp_path, capsys, 1, "adapter' is empty", base=pair[0], merge=adapter)
    assert error.splitlines()[-1].rstrip() == error.splitlines()[-1], "the hint is a whole sentence"


def test_an_adapter_cannot_be_the_base(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    for source in ("", "adapter_model.safetensors", "adapter_config.json"):
        complaints = ("the base '", "is a LoRA adapter", "the model that it was trained on")
        refuse_models(tmp_path, capsys, 1, *complaints, base=adapter / source, merge=pair[1])


def test_an_adapter_without_its_weights_says_so(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    (adapter / "adapter_model.safetensors").unlink()
    for source in ("", "adapter_config.json"):
        complaints = ("adapter", "adapter_model.safetensors", "download or save it again")
        refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge=adapter / source)
    torch.save(low_rank("layer", (37, 61)), adapter / "adapter_model.bin")
    complaints = ("adapter' has no adapter_model.safetensors", "save it with a current PEFT")
    refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge=adapter)


def test_adapter_weights_without_their_settings_are_not_taken_for_a_model(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    (adapter / "adapter_config.json").unlink()
    for source in ("", "adapter_model.safetensors"):
        refuse_models(tmp_path, capsys, 1, "adapter_config.json", base=pair[0], merge=adapter / source)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_adapter_on_a_quantised_base_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    base = {"layer.weight": torch.ones(37, 61).to(dtype), "norm.weight": torch.ones(61)}
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    folder = save_directory(tmp_path / "base", base)
    complaints = ("base' is quantised", "'layer.weight'", "before quantising")
    refuse_models(tmp_path, capsys, 1, *complaints, base=folder, merge=adapter)


def test_an_adapter_on_a_gptq_base_is_refused_for_being_on_a_quantised_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    folder = save_directory(tmp_path / "base", quantised("gptq"))
    refuse_models(tmp_path, capsys, 1, "base' is quantised", "before quantising", base=folder, merge=adapter)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors of other shapes
# ---------------------------------------------------------------------------------------------------------------------


def with_rows(model: Tensors, rows: int, seed: int = 9) -> Tensors:
    """The model with its layer.weight cut to so many rows, or grown to them by rows that resemble the others."""
    weight = model["layer.weight"]
    new = (torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed)) * 0.05).to(weight.dtype)
    return {**model, "layer.weight": torch.cat([weight, new[len(weight) :]])[:rows].contiguous()}


@pytest.mark.parametrize(
    ("rows", "words"), [(38, "1 row more"), (36, "1 row fewer"), (47, "10 rows more"), (7, "30 rows fewer")]
)
def test_other_numbers_of_rows_are_refused_with_the_ways_out(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: int,
    words: str,
) -> None:
    save(tmp_path, other=with_rows(load_file(models[1]), rows))
    complaints = ("'layer.weight' is [37, 61] in", f"and [{rows}, 61] in", "other.safetensors'", f", {words}\n")
    for flags in ((), ("--mismatch", "error")):
        error = refuse(tmp_path, capsys, 1, *complaints, merge=["math", "other"], flags=flags)
        assert "--mismatch overlap" in error
        assert "--mismatch base" in error


@pytest.mark.parametrize(
    "other",
    [torch.ones(37, 60), torch.ones(37), torch.ones(37, 61, 1), torch.ones(61, 37), torch.ones(())],
    ids=lambda tensor: str(list(tensor.shape)),
)
def test_overlap_is_refused_where_more_than_rows_differs(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    other: torch.Tensor,
) -> None:
    save(tmp_path, other={**load_file(models[1]), "layer.weight": other.to(BF16)})
    shape = f"and {list(other.shape)} in"
    complaints = ("'layer.weight' is [37, 61] in", shape, "more than the number of rows", "--mismatch base")
    refuse(tmp_path, capsys, 1, *complaints, merge=["other"], flags=("--mismatch=overlap",))
    error = refuse(tmp_path, capsys, 1, "'layer.weight' is [37, 61] in", shape, merge=["other"])
    assert "overlap" not in error.splitlines()[-1], "what would not help is not advised"


METHOD_FLAGS: list[dict[str, Any]] = [
    {},
    {"drop_rate": 0.0},
    {"method": "ties", "keep_ratio": 0.5},
    {"method": "slerp", "drop_rate": 0.5},
    {"dtype": "float32", "drop_rate": 0.5},
]
TYPES = [(BF16, BF16), (F32, F32), (BF16, F32), (F32, BF16)]


@pytest.mark.parametrize(
    ("config", "base_type", "model_type"),
    [(config, BF16, BF16) for config in METHOD_FLAGS]
    + [({}, *types) for types in (*TYPES[1:], (F16, BF16), (F64, F32))],
    ids=str,
)
def test_overlap_merges_as_if_the_models_had_the_bases_rows(
    tmp_path: Path, config: dict[str, Any], base_type: torch.dtype, model_type: torch.dtype
) -> None:
    base = random_model(dtype=base_type)
    first, second = (
        {n: t.to(model_type) for n, t in finetune({n: t.double() for n, t in base.items()}, seed).items()}
        for seed in (1, 2)
    )
    more, fewer = with_rows(first, 45), with_rows(second, 20)
    # Rows of the base that would be rounded in the model's type are held in the type that has room for both.
    common = torch.promote_types(base_type, model_type)
    rest = base["layer.weight"][20:].to(common)
    padded = {**second, "layer.weight": torch.cat([fewer["layer.weight"].to(common), rest])}
    (tmp_path / "other").mkdir()
    merged = merge(tmp_path, base, more, fewer, mismatch="overlap", **config)
    assert merged["layer.weight"].shape == (37, 61)
    assert_same(merged, merge(tmp_path / "other", base, first, padded, **config))


@pytest.mark.parametrize("config", [*METHOD_FLAGS[:2], {"method": "ties"}], ids=str)
@pytest.mark.parametrize(("base_type", "model_type"), TYPES, ids=str)
@pytest.mark.parametrize("chunk", [1024, 1 << 18])
def test_rows_that_no_model_has_stay_the_bases_bit_for_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    base_type: torch.dtype,
    model_type: torch.dtype,
    chunk: int,
) -> None:
    monkeypatch.setattr(dare, "MIN_CHUNK", chunk)
    monkeypatch.setattr(dare, "MAX_CHUNK", chunk)
    base = random_model(dtype=base_type)
    base["layer.weight"][30, :4] = torch.tensor([0.0, -0.0, 1e-7, -1.0]).to(base_type)
    model = {n: t.to(model_type) for n, t in finetune(base, 1, 0.01).items()}
    merged = merge(tmp_path, base, with_rows(model, 3), mismatch="overlap", **config)
    assert same_bits(merged["layer.weight"][3:].clone(), base["layer.weight"][3:].clone())
    assert not torch.equal(merged["layer.weight"][:3], base["layer.weight"][:3])


def test_a_model_without_any_rows_overlaps_in_none(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    model = with_rows(finetune(base, 1), 0)
    assert same_bits(merge(tmp_path, base, model, mismatch="overlap")["layer.weight"], base["layer.weight"])


@pytest.mark.parametrize("config", METHOD_FLAGS[:4], ids=str)
def test_mismatch_base_keeps_the_bases_tensor_bit_for_bit(tmp_path: Path, config: dict[str, Any]) -> None:
    base = random_model(dtype=BF16)
    base["layer.weight"][0, 0] = -0.0
    odd = {**finetune(base, 2), "layer.weight": torch.ones(3, 3, 3, dtype=BF16)}
    merged = merge(tmp_path, base, finetune(base, 1), odd, mismatch="base", **config)
    assert same_bits(merged["layer.weight"], base["layer.weight"])
    (tmp_path / "other").mkdir()
    fitting = {**odd, "layer.weight": base["layer.weight"]}
    expected = merge(tmp_path / "other", base, finetune(base, 1), fitting, **config)
    assert_same({**merged, "layer.weight": base["layer.weight"]}, {**expected, "layer.weight": base["layer.weight"]})


@pytest.mark.parametrize(("mismatch", "what"), [("overlap", "common rows are merged"), ("base", "base's are kept")])
def test_the_report_names_what_does_not_fit(tmp_path: Path, mismatch: str, what: str) -> None:
    base = random_model(dtype=BF16)
    first = with_rows(finetune(base, 1), 45)
    second = finetune(base, 2) | {"new.weight": torch.ones(3), "rotary.inv_freq": torch.ones(4)}
    del second["layer.bias"]
    paths = save(tmp_path, base=base, first=first, second=second)
    report = run_merge(paths[0], paths[1:], tmp_path / "out.safetensors", mismatch=mismatch)
    assert report.models[0].mismatched_tensors == ("layer.weight",)
    assert report.models[0].missing_tensors == report.models[0].extra_tensors == ()
    assert report.models[1].mismatched_tensors == ()
    assert report.models[1].missing_tensors == ("layer.bias",)
    assert sorted(report.models[1].extra_tensors) == ["new.weight", "rotary.inv_freq"]
    assert json.loads(json.dumps(report.as_dict()))["models"][0]["mismatched_tensors"] == ["layer.weight"]
    lacking, having, odd = report.warnings[:3]
    assert "first.safetensors has tensors of other shapes: 'layer.weight' ([45, 61]); the" in odd
    assert odd.endswith(what)
    assert "second.safetensors lacks 1 tensor of the base: 'layer.bias'" in lacking
    assert "2 tensors that the base lacks: 'new.weight', 'rotary.inv_freq'; ignored" in having


def test_integers_of_another_shape_are_not_said_to_be_merged(tmp_path: Path) -> None:
    base = {"w": torch.ones(4, 4), "position_ids": torch.arange(8)}
    model = {"w": torch.ones(4, 4) * 1.001, "position_ids": torch.arange(12)}
    paths = save(tmp_path, base=base, model=model)
    report = run_merge(paths[0], paths[1:], tmp_path / "out.safetensors", mismatch="overlap")
    assert same_bits(load_file(tmp_path / "out.safetensors")["position_ids"], base["position_ids"])
    assert report.models[0].mismatched_tensors == ("position_ids",)
    assert not any("common rows are merged" in warning for warning in report.warnings), report.warnings


def test_parameters_that_a_model_does_not_have_are_not_counted_as_its_own(tmp_path: Path) -> None:
    base = {"w": torch.ones(100, 50)}
    paths = save(tmp_path, base=base, model={"w": torch.full((40, 50), 1.5)})
    report = run_merge(paths[0], paths[1:], tmp_path / "out.safetensors", mismatch="overlap")
    assert report.models[0].parameters == 40 * 50
    assert report.models[0].mean_delta == 0.5


def test_mismatch_comes_from_toml_flags_and_recipes(models: list[Path], tmp_path: Path) -> None:
    save_file(with_rows(load_file(models[1]), 45), models[1])
    config = str(write_config(tmp_path, mismatch="overlap", verbose=False))
    assert dare.main(["-c", config]) == 0
    assert recipe_of(tmp_path)["dare"]["mismatch"] == "overlap"
    by_toml = (tmp_path / "out.safetensors").read_bytes()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(metadata(tmp_path / "out.safetensors")["dare_recipe"])
    assert dare.main(["-q", "-c", str(recipe), "-o", str(tmp_path / "again.safetensors")]) == 0
    assert (tmp_path / "again.safetensors").read_bytes() == by_toml
    assert dare.main(["-c", config, "--mismatch", "base"]) == 0
    assert recipe_of(tmp_path)["dare"]["mismatch"] == "base"
    assert same_bits(load_file(tmp_path / "out.safetensors")["layer.weight"], load_file(models[0])["layer.weight"]), (
        "flags beat TOML"
    )


@pytest.mark.parametrize("value", ["pad", "", "Overlap", True, ["base"]])
def test_a_wrong_way_to_treat_mismatches_is_refused(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: Any,
) -> None:
    with pytest.raises(ConfigError, match="mismatch must be one of error, overlap, base"):
        DareConfig(mismatch=value)
    config = write_config(tmp_path, mismatch=value)
    assert dare.main(["-c", str(config)]) == 2
    assert f"{config}: [dare] mismatch must be one of error, overlap, base, not {value!r}" in capsys.readouterr().err
    if isinstance(value, str):
        refuse(tmp_path, capsys, 2, "--mismatch must be one of error, overlap, base", flags=(f"--mismatch={value}",))


@pytest.mark.parametrize("kind", ["lora", "embedding"])
@pytest.mark.parametrize("chunk", [1024, 1 << 18])
def test_an_adapter_of_fewer_or_more_rows_overlaps_like_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int
) -> None:
    monkeypatch.setattr(dare, "MIN_CHUNK", chunk)
    monkeypatch.setattr(dare, "MAX_CHUNK", chunk)
    base = {"layer.weight": random_model()["layer.weight"]}
    [path] = save(tmp_path, base=base)
    for rows in (5, 30, 45):
        a, b = low_rank("layer", (rows, 61)).values()
        names = ("lora_A.weight", "lora_B.weight") if kind == "lora" else ("lora_embedding_A", "lora_embedding_B")
        stored = (a, b) if kind == "lora" else (b.T.contiguous(), a.T.contiguous())
        tensors = {f"{PREFIX}.{name}": tensor for name, tensor in zip(names, stored, strict=True)}
        adapter = write_adapter(tmp_path / f"{rows}", tensors)
        run_merge(path, [adapter], tmp_path / "out.safetensors", drop_rate=0.0, mismatch="overlap")
        merged = load_file(tmp_path / "out.safetensors")["layer.weight"]
        common = min(rows, 37)
        expected = base["layer.weight"][:common] + 2 * (b @ a)[:common]
        assert torch.allclose(merged[:common], expected, rtol=1e-6, atol=1e-7)
        assert same_bits(merged[common:].clone(), base["layer.weight"][common:].clone())


# ---------------------------------------------------------------------------------------------------------------------
# Tied heads, missing and extra tensors
# ---------------------------------------------------------------------------------------------------------------------


def tied_models(dtype: torch.dtype = BF16) -> tuple[Tensors, Tensors]:
    """A base whose head is its embedding, and a fine-tune of it that was saved without the head."""
    base = random_model(dtype=dtype, shapes={"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)})
    return base | {"lm_head.weight": base["model.embed_tokens.weight"].clone()}, finetune(base, 1)


# Said in so many words, or not said: a head that is not there must be the embedding.
TIED: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"text_config": {"tie_word_embeddings": True}},
    {"model_type": "gpt2", "text_config": [1]},
]


@pytest.mark.parametrize("where", ["base", "model"])
@pytest.mark.parametrize("config", TIED)
@pytest.mark.parametrize("method", METHOD_FLAGS[:3], ids=str)
def test_a_tied_head_that_a_model_lacks_is_merged_like_the_embedding(
    tmp_path: Path, where: str, config: dict[str, Any], method: dict[str, Any]
) -> None:
    base, model = tied_models()
    base_path = save_directory(tmp_path / "base", base, **(config if where == "base" else {"model_type": "x"}))
    model_path = save_directory(tmp_path / "model", model, **(config if where == "model" else {}))
    report = run_merge(base_path, [model_path], tmp_path / "out.safetensors", **method)
    merged = load_file(tmp_path / "out.safetensors")
    assert same_bits(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    assert not torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    assert report.models[0].missing_tensors == ()
    words = "lacks 'lm_head.weight', which is tied to 'model.embed_tokens.weight' and merged like it"
    assert any(words in warning for warning in report.warnings)


def test_a_tied_head_that_all_models_have_stays_the_embedding(tmp_path: Path) -> None:
    """Loaders untie a model whose head and embedding are both stored and differ."""
    base, _ = tied_models()
    paths = [save_directory(tmp_path / "base", base, tie_word_embeddings=True)]
    for seed in range(2):
        model = finetune(base, seed)
        model["lm_head.weight"] = model["model.embed_tokens.weight"].clone()
        paths.append(save_directory(tmp_path / f"m{seed}", model))
    rules = [{"match": "lm_head*", "drop_rate": 0.1}]
    run_merge(paths[0], paths[1:], tmp_path / "out.safetensors", rules=rules)
    merged = load_file(tmp_path / "out.safetensors")
    assert same_bits(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}])
def test_a_head_that_is_not_tied_stays_the_bases_and_is_listed(tmp_path: Path, config: dict[str, Any]) -> None:
    base, model = tied_models()
    base_path = save_directory(tmp_path / "base", base, **config)
    report = run_merge(base_path, [save_directory(tmp_path / "model", model)], tmp_path / "out.safetensors")
    merged = load_file(tmp_path / "out.safetensors")
    assert same_bits(merged["lm_head.weight"], base["lm_head.weight"])
    assert report.models[0].missing_tensors == ("lm_head.weight",)
    assert any("lacks 1 tensor of the base: 'lm_head.weight'" in warning for warning in report.warnings)


@pytest.mark.parametrize("mismatch", ["overlap", "base"])
@pytest.mark.parametrize("rows", [43, 30])
def test_a_tied_head_follows_an_embedding_of_other_rows(tmp_path: Path, mismatch: str, rows: int) -> None:
    base, model = tied_models()
    model["model.embed_tokens.weight"] = with_rows({"layer.weight": model["model.embed_tokens.weight"]}, rows)[
        "layer.weight"
    ]
    base_path = save_directory(tmp_path / "base", base, tie_word_embeddings=True)
    model_path = save_directory(tmp_path / "model", model)
    run_merge(base_path, [model_path], tmp_path / "out.safetensors", mismatch=mismatch)
    merged = load_file(tmp_path / "out.safetensors")
    assert same_bits(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_a_model_that_has_a_head_keeps_its_mask_beside_one_that_lacks_it(tmp_path: Path) -> None:
    """A mask is drawn by a tensor's own name, whatever the other models have."""
    base, lacking = tied_models(F32)
    own = finetune(base, 2)
    same = {name: base[name] for name in lacking}
    base_path = save_directory(tmp_path / "base", base, tie_word_embeddings=True)
    own_path = save_directory(tmp_path / "own", own)
    heads = []
    for other in (base, same):
        other_path = save_directory(tmp_path / "other", other)
        run_merge(base_path, [own_path, other_path], tmp_path / "out.safetensors")
        heads.append(load_file(tmp_path / "out.safetensors")["lm_head.weight"])
    assert same_bits(*heads)


def test_buffers_that_a_model_has_besides_are_listed_and_left_out(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    model = finetune(base, 1) | {"rotary.inv_freq": torch.ones(4), "attn.masked_bias": torch.tensor(-1e4)}
    model |= {"attn.bias": torch.ones(4, 4, dtype=torch.bool), "position_ids": torch.arange(9)}
    paths = save(tmp_path, base=base, model=model)
    report = run_merge(paths[0], paths[1:], tmp_path / "out.safetensors")
    assert sorted(report.models[0].extra_tensors) == sorted(model.keys() - base.keys())
    assert load_file(tmp_path / "out.safetensors").keys() == base.keys()
    assert any("has 4 tensors that the base lacks: " in w and "and 1 more; ignored" in w for w in report.warnings)


# ---------------------------------------------------------------------------------------------------------------------
# Quantised models
# ---------------------------------------------------------------------------------------------------------------------


def quantised(kind: str) -> Tensors:
    """A small model with one module in this layout, and a bias and a norm that are not quantised."""
    generator = torch.Generator().manual_seed(3)

    def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(-100 if dtype.is_signed else 0, 100, shape, generator=generator).to(dtype)

    def reals(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(F16)

    u8, i8, i32 = torch.uint8, torch.int8, torch.int32
    layouts: dict[str, Tensors] = {
        "fp8": {"weight": reals(8, 8).to(torch.float8_e4m3fn), "weight_scale_inv": reals(1, 1).float()},
        "fp8-static": {
            "weight": reals(8, 8).to(torch.float8_e4m3fn),
            "weight_scale": reals(1).to(BF16),
            "input_scale": reals(1).to(BF16),
        },
        "gptq": {
            "qweight": numbers(i32, 4, 8),
            "qzeros": numbers(i32, 1, 2),
            "g_idx": numbers(i32, 32),
            "scales": reals(1, 8),
        },
        "awq": {"qweight": numbers(i32, 8, 4), "qzeros": numbers(i32, 1, 2), "scales": reals(1, 8)},
        "nf4": {
            "weight": numbers(u8, 32, 1),
            "weight.absmax": reals(2).float(),
            "weight.quant_map": reals(16).float(),
            "weight.quant_state.bitsandbytes__nf4": numbers(u8, 40),
        },
        "nf4-nested": {
            "weight": numbers(u8, 32, 1),
            "weight.absmax": numbers(u8, 2),
            "weight.nested_absmax": reals(1).float(),
            "weight.nested_quant_map": reals(16).float(),
            "weight.quant_map": reals(16).float(),
            "weight.quant_state.bitsandbytes__nf4": numbers(u8, 40),
        },
        "int8": {"weight": numbers(i8, 8, 8), "SCB": reals(8).float(), "weight_format": numbers(u8, 1)},
        "mxfp4": {"gate_up_proj_blocks": numbers(u8, 2, 8, 4), "gate_up_proj_scales": numbers(u8, 2, 8)},
        "compressed": {
            "weight_packed": numbers(i32, 8, 1),
            "weight_scale": reals(8, 1),
            "weight_shape": numbers(torch.int64, 2),
        },
    }
    module = {f"layer.{name}": tensor for name, tensor in layouts[kind].items()}
    bias = "layer.gate_up_proj_bias" if kind == "mxfp4" else "layer.bias"
    return module | {bias: reals(8), "norm.weight": reals(8), "embed.weight": reals(16, 8)}


PLAIN = ("layer.bias", "layer.gate_up_proj_bias", "norm.weight", "embed.weight")
LAYOUTS = ["fp8", "fp8-static", "gptq", "awq", "nf4", "nf4-nested", "int8", "mxfp4", "compressed"]
PARTS = [(kind, name) for kind in LAYOUTS for name in quantised(kind) if name not in PLAIN]


def tuned(model: Tensors) -> Tensors:
    """A fine-tune of what is not quantised."""
    plain = {name: tensor for name, tensor in model.items() if name in PLAIN}
    return model | finetune(plain, 1, 0.01)


def unquantised(model: Tensors) -> Tensors:
    plain = {name: tensor for name, tensor in model.items() if name in PLAIN}
    name = "layer.gate_up_proj" if "layer.gate_up_proj_bias" in model else "layer.weight"
    return plain | {name: torch.ones(8, 8, dtype=F16)}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_quantised_module_is_copied_whole_and_the_rest_is_merged(
    tmp_path: Path, kind: str, dtype: str | None
) -> None:
    base = quantised(kind)
    model = tuned(base)
    config: dict[str, Any] = {"drop_rate": 0.0, "dtype": dtype}
    merged = merge(tmp_path, base, model, **config)
    assert merged.keys() == base.keys()
    for name in base:
        if name in PLAIN:
            assert merged[name].dtype == (F32 if dtype else F16), name
            assert torch.equal(merged[name], model[name].to(merged[name].dtype)), name
        else:
            assert merged[name].dtype == base[name].dtype, name
            assert torch.equal(bytes_of(merged[name]), bytes_of(base[name])), name


@pytest.mark.parametrize(("kind", "name"), PARTS)
def test_a_quantised_module_that_differs_in_one_bit_anywhere_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    base = quantised(kind)
    model = tuned(base)
    model[name] = model[name].clone()
    bytes_of(model[name])[0] ^= 1
    save(tmp_path, base=base, model=model)
    complaints = (f"tensor {name!r} is part of a quantised module", "model.safetensors'", "before quantising")
    refuse(tmp_path, capsys, 1, *complaints, merge=["model"], flags=("--dtype=float32", "--mismatch=overlap"))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_quantised_model_and_a_plain_one_are_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    model = quantised(kind)
    save(tmp_path, quantised=model, plain=unquantised(model), other=quantised("int8" if kind == "awq" else "awq"))
    for flags in ((), ("--mismatch=base",)):
        complaints = ("plain.safetensors' is not", "quantised.safetensors' is quantised", "before quantising")
        refuse(tmp_path, capsys, 1, *complaints, base="plain", merge=["quantised"], flags=flags)
        complaints = ("quantised.safetensors' is quantised", "plain.safetensors' is not", "before quantising")
        refuse(tmp_path, capsys, 1, *complaints, base="quantised", merge=["plain"], flags=flags)
        refuse(tmp_path, capsys, 1, "quantised", "'layer.", base="quantised", merge=["other"], flags=flags)


# ---------------------------------------------------------------------------------------------------------------------
# Output directories
# ---------------------------------------------------------------------------------------------------------------------


def test_an_output_directory_never_touches_an_input_by_any_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = random_model(dtype=BF16)
    home = tmp_path / "home"
    source = {
        "base": save_directory(home / "models" / "base", base, model_type="x"),
        "merge": save_sharded(home / "models" / "math", finetune(base, 1), each_alone(base)),
    }
    (source["base"] / "sub").mkdir()
    (home / "link").symlink_to(source["base"])
    (home / "all").symlink_to(home / "models")
    (home / "models" / "config.json").write_text("{}")
    monkeypatch.chdir(source["merge"])
    is_base = [source["base"], home / "link", "../base", "./../base/", source["base"] / "sub" / "..", home / "all/base"]
    inside = [source["base"] / "new", home / "link" / "new", "../base/sub", home / "all/base/x.safetensors", "new"]
    holds = [home / "models", home / "all", "..", "../../models", home / "link" / ".."]
    for flags in ((), ("--force",)):
        for output in (*is_base, ".", home / "models" / "math", "../math"):
            refuse_models(tmp_path, capsys, 2, "is the input", **source, output=output, flags=flags)
        for output in inside:
            refuse_models(tmp_path, capsys, 2, "lies inside the input", **source, output=output, flags=flags)
        for output in holds:
            refuse_models(tmp_path, capsys, 2, "holds the input", **source, output=output, flags=flags)


def test_an_output_directory_that_holds_a_lone_input_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = random_model(dtype=BF16)
    (tmp_path / "mine").mkdir()
    paths = save(tmp_path / "mine", base=base, math=finetune(base, 1))
    for flags in ((), ("--force",)):
        refuse_models(
            tmp_path, capsys, 2, "holds the input", base=paths[0], merge=paths[1], output=tmp_path / "mine", flags=flags
        )


def test_an_adapter_and_a_cache_are_inputs_too(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    for output, words in ((adapter, "is the input"), (adapter / "new", "lies inside the input")):
        refuse_models(tmp_path, capsys, 2, words, base=pair[0], merge=adapter, output=output, flags=("--force",))
    cached = to_hub_cache(tmp_path / "hub", "org/math", pair[1], COMMITS["math"])
    for output in (cached, cached.parent.parent / "blobs", tmp_path / "hub"):
        refuse_models(tmp_path, capsys, 2, "the input", base=pair[0], merge=cached, output=output, flags=("--force",))


def test_the_directory_that_the_tokenizer_comes_from_is_never_overwritten(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = save_directory(tmp_path / "chat", random_model(dtype=BF16), model_type="x")
    (chat / "tokenizer.json").write_text("{}")
    flags = ("--force", "--tokenizer-from", str(chat))
    refuse_models(tmp_path, capsys, 2, "is the input", base=pair[0], merge=pair[1], output=chat, flags=flags)


def merge_directory(pair: tuple[Path, Path], output: Path, *flags: str) -> int:
    return dare.main(["-q", "-b", str(pair[0]), "-m", str(pair[1]), "-o", str(output), *flags])


def no_litter(folder: Path) -> bool:
    return not any("partial" in path.name or "replaced" in path.name for path in folder.rglob("*"))


def test_a_directory_of_somebody_else_is_replaced_only_if_forced(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = save_sharded(tmp_path / "out", random_model(), each_alone(random_model()))
    (out / "notes").mkdir()
    (out / "notes" / "precious.txt").write_text("mine")
    complaints = ("exists and was not made by this tool", "--force")
    refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge=pair[1], output=out)
    assert merge_directory(pair, out, "--force") == 0
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "dare_recipe.toml", "model.safetensors"]
    assert no_litter(tmp_path)


@pytest.mark.parametrize("change", ["model.safetensors", "README.md"])
def test_what_was_changed_in_a_directory_of_this_tool_is_not_lost_unasked(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    out = tmp_path / "out"
    assert merge_directory(pair, out) == 0
    if change == "README.md":
        (out / change).write_text("what I found out about it")
    else:
        save_file(random_model(9, BF16), out / change, {"format": "pt"})  # as after some more training
    refuse_models(tmp_path, capsys, 1, f"also holds '{change}'", base=pair[0], merge=pair[1], output=out)
    assert merge_directory(pair, out, "--force") == 0


@pytest.mark.parametrize("others", [["config.json", "thesis.tex"], ["data.npy"], [".git/HEAD", "model.safetensors"]])
def test_what_only_looks_like_a_model_is_never_replaced(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], others: list[str]
) -> None:
    for name in others:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    words = "is a directory with other things in it"
    refuse_models(tmp_path, capsys, 1, words, base=pair[0], merge=pair[1], output=tmp_path / "out", flags=("--force",))


def test_the_working_directory_is_not_replaced(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    refuse_models(tmp_path, capsys, 1, "is the working directory", base=pair[0], merge=pair[1], output=".")


def test_inputs_of_the_same_name_in_different_places_are_both_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in TOML and a path in a flag may be spelled alike and be two files."""
    (tmp_path / "x").mkdir()
    base = random_model()
    save(tmp_path / "x", m=base)
    save(tmp_path, m=finetune(base, 1))
    (tmp_path / "x" / "c.toml").write_text('[models]\nbase_file = "m.safetensors"\n')
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    flags = "-c x/c.toml -m m.safetensors -o x/m.safetensors --force"
    assert dare.main(flags.split()) == 2
    assert "is the input 'm.safetensors'" in capsys.readouterr().err
    assert snapshot(tmp_path) == before


def test_empty_paths_are_refused(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuse_models(tmp_path, capsys, 2, "is empty", base="", merge=pair[1])
    refuse_models(tmp_path, capsys, 2, "is empty", base=pair[0], merge=pair[1], output="")


def test_a_broken_configuration_of_the_base_is_not_copied(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pair[0] / "config.json").write_text('{"a":')
    refuse_models(
        tmp_path, capsys, 1, "base/config.json' is not valid", base=pair[0], merge=pair[1], output=tmp_path / "o"
    )


def test_another_kind_of_model_is_warned_about(tmp_path: Path) -> None:
    base = random_model()
    base_path = save_directory(tmp_path / "base", base, model_type="llama", num_hidden_layers=2)
    other = save_directory(tmp_path / "other", finetune(base, 1), model_type="llama", num_hidden_layers=3)
    report = run_merge(base_path, [other], tmp_path / "out.safetensors")
    assert "is another kind of model" in report.warnings[0]
    assert "its num_hidden_layers is 3, not 2" in report.warnings[0]


def test_side_files_with_any_name_come_along(pair: tuple[Path, Path], tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9.txt") if sys.platform == "linux" else "caf\u00e9.txt"
    (pair[0] / odd).write_text("menu")
    (pair[0] / "readme.md").write_text("of the base")
    assert merge_directory(pair, tmp_path / "out") == 0
    assert (tmp_path / "out" / odd).read_text() == "menu"
    assert "readme.md" not in os.listdir(tmp_path / "out")


def test_side_files_that_cannot_be_read_are_named_before_the_merge(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (pair[0] / "vocab.txt").write_text("secret")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "vocab" not in str(path) and real(path, mode))
    words = ("cannot read", "vocab.txt'", "Permission denied")
    refuse_models(tmp_path, capsys, 1, *words, base=pair[0], merge=pair[1], output=tmp_path / "out")


def test_a_directory_of_this_tool_is_replaced_unless_something_was_put_into_it(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert merge_directory(pair, out) == 0
    first = tensors_in(out)
    assert merge_directory(pair, out, "--seed", "7") == 0
    assert not same_bits(tensors_in(out)["layer.weight"], first["layer.weight"])
    (out / "eval").mkdir()
    (out / "eval" / "results.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    complaints = ("also holds 'eval/results.json', 'notes.txt'", "did not write", "--force")
    refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge=pair[1], output=out)
    assert merge_directory(pair, out, "--force") == 0
    assert not (out / "notes.txt").exists()
    assert no_litter(tmp_path)


def test_a_link_to_a_directory_in_the_output_is_not_lost_unasked(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious.txt").write_text("mine")
    out = tmp_path / "out"
    assert merge_directory(pair, out) == 0
    (out / "results").symlink_to(tmp_path / "results")
    capsys.readouterr()
    refuse_models(tmp_path, capsys, 1, "also holds 'results'", base=pair[0], merge=pair[1], output=out)
    assert merge_directory(pair, out, "--force") == 0
    assert (tmp_path / "results" / "precious.txt").read_text() == "mine", "what a link leads to is never removed"


@pytest.mark.parametrize("recipe", ["", "[recipe]\nfiles = 3\n", "recipe = 1\n", "not toml", "[recipe]\nfiles = []\n"])
def test_a_recipe_that_names_no_files_claims_none(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    out = save_directory(tmp_path / "out", random_model())
    (out / "dare_recipe.toml").write_text(recipe)
    complaints = ("exists and was not made by this tool", "--force")
    refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge=pair[1], output=out)


def test_a_directory_that_is_no_model_is_refused_even_if_forced(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "thesis"
    (out / "chapters").mkdir(parents=True)
    (out / "chapters" / "model.safetensors").write_text("not here")
    (out / "thesis.tex").write_text("mine")
    for flags in ((), ("--force",)):
        refuse_models(
            tmp_path, capsys, 1, "with other things in it", base=pair[0], merge=pair[1], output=out, flags=flags
        )


def test_an_empty_directory_is_filled(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert merge_directory(pair, tmp_path / "out") == 0
    assert tensors_in(tmp_path / "out").keys() == random_model().keys()
    assert no_litter(tmp_path)


def test_a_file_in_the_place_of_a_directory_and_the_reverse_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "to-folder.safetensors").symlink_to("folder.safetensors")
    for flags in ((), ("--force",)):
        for output, words in (
            ("file", "file' is a file"),
            ("to-file", "to-file' is a file"),
            ("folder.safetensors", "folder.safetensors' is a directory"),
            ("to-folder.safetensors", "to-folder.safetensors' is a directory"),
            ("file/out", "does not exist"),
            ("nowhere/out", "does not exist"),
        ):
            refuse_models(
                tmp_path, capsys, 1, words, base=pair[0], merge=pair[1], output=tmp_path / output, flags=flags
            )


def test_a_link_to_a_directory_as_output_keeps_leading_there(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "store" / "real")
    for seed in ("1", "2"):
        assert merge_directory(pair, link, "--seed", seed) == 0
        assert link.is_symlink()
        recipe = tomllib.loads((tmp_path / "store" / "real" / "dare_recipe.toml").read_text())
        assert recipe["dare"]["seed"] == int(seed)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["real"]


@pytest.mark.parametrize("where", ["nan", "tokenizer"])
def test_a_merge_into_a_directory_that_fails_leaves_the_old_one(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    out = tmp_path / "out"
    assert merge_directory(pair, out) == 0
    broken = finetune(random_model(dtype=BF16), 1)
    broken["scalar"] = torch.tensor(math.nan, dtype=BF16)
    save_directory(tmp_path / "broken", broken)
    capsys.readouterr()
    if where == "nan":
        refuse_models(tmp_path, capsys, 1, "'scalar' holds nan", base=pair[0], merge=tmp_path / "broken", output=out)
    else:
        flags = ("--tokenizer-from", str(pair[1]))
        complaints = ("there is no tokenizer in", "math'")
        refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge=pair[1], output=out, flags=flags)
    assert no_litter(tmp_path)
    new = tmp_path / "new"
    refuse_models(tmp_path, capsys, 1, "holds nan", base=pair[0], merge=tmp_path / "broken", output=new)


def test_shards_of_an_earlier_merge_do_not_survive(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert merge_directory(pair, out, "--max-shard-size", "100B") == 0
    assert len(list(out.glob("model-*-of-00004.safetensors"))) == 4
    many = tensors_in(out)
    assert merge_directory(pair, out, "--max-shard-size", "10kB") == 0
    assert len(list(out.glob("*.safetensors"))) == 2
    assert_same(tensors_in(out), many)
    assert merge_directory(pair, out) == 0
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert_same(tensors_in(out), many)
    assert no_litter(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Models by their name on the Hub
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> dict[str, str]:
    """A cache of the Hub with org/base and org/math in it, and the environment in which it is all there is."""
    base = random_model(dtype=BF16)
    made = tmp_path / "made"
    save_sharded(made / "base", base, each_alone(base))
    (made / "base" / "config.json").write_text('{"model_type": "x"}')
    (made / "base" / "tokenizer.json").write_text("{}")
    save_directory(made / "math", finetune(base, 1))
    for name, commit in COMMITS.items():
        to_hub_cache(tmp_path / "home" / "hub", f"org/{name}", made / name, commit)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    return {**kept, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
def test_models_are_found_on_the_hub_and_recipes_pin_their_commits(tmp_path: Path, hub: dict[str, str]) -> None:
    made = tmp_path / "made"
    run_merge(made / "base", [made / "math"], tmp_path / "expected")
    only_cache = {key: value for key, value in hub.items() if key != "HF_HOME"}
    only_cache["HF_HUB_CACHE"] = str(tmp_path / "home" / "hub")
    spellings = [("", hub), ("@main", only_cache), ("@{}", hub)]
    for number, (ending, environment) in enumerate(spellings):
        names = [f"org/{name}{ending.format(commit)}" for name, commit in COMMITS.items()]
        done = command("-q", "-b", names[0], "-m", names[1], "-o", f"out{number}", env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        out = tmp_path / f"out{number}"
        assert_same(tensors_in(out), tensors_in(tmp_path / "expected"))
        assert (out / "tokenizer.json").read_text() == "{}"
        recipe = tomllib.loads((out / "dare_recipe.toml").read_text())
        assert recipe["models"]["base_file"] == f"org/base@{COMMITS['base']}"
        assert recipe["models"]["merge_files"] == [f"org/math@{COMMITS['math']}"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = command("-q", "-c", "../out0/dare_recipe.toml", "-o", "again", env=hub, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    for path in sorted((tmp_path / "out0").iterdir()):
        assert (elsewhere / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_path_beats_a_name_on_the_hub(tmp_path: Path, hub: dict[str, str]) -> None:
    base = random_model(dtype=BF16)
    local = finetune(base, 8)
    save_directory(tmp_path / "org" / "math", local)
    done = command("-q", "-b", "org/base", "-m", "org/math", "-o", "out.safetensors", env=hub, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert recipe_of(tmp_path)["models"]["merge_files"] == ["org/math"]
    assert_same(load_file(tmp_path / "out.safetensors"), merge(tmp_path, base, local))


def test_a_name_that_the_hub_does_not_have_is_one_clear_error(tmp_path: Path, hub: dict[str, str]) -> None:
    before = snapshot(tmp_path)
    for name in ("org/absent", "org/math@nightly"):
        done = command("-b", "org/base", "-m", name, "-o", "out", env=hub, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        error, hint = done.stderr.splitlines()
        assert error.startswith(
            f"error: there is no file or directory {name!r}, and the Hugging Face Hub does not give"
        )
        assert hint.startswith("hint: looked for ")
        assert "HF_TOKEN" in hint
    assert snapshot(tmp_path) == before


def test_a_mistyped_path_that_could_be_a_name_on_the_hub_gets_a_hint_from_its_folder(
    tmp_path: Path, hub: dict[str, str]
) -> None:
    done = command("-b", "org/base", "-m", "made/mth", "-o", "out", env=hub, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "hint: did you mean math?"


def test_the_recipe_pins_where_the_tokenizer_came_from(tmp_path: Path, hub: dict[str, str]) -> None:
    arguments = ["-q", "-b", "made/math", "-m", "made/math", "--tokenizer-from", "org/base", "-o", "out"]
    done = command(*arguments, env=hub, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = tomllib.loads((tmp_path / "out" / "dare_recipe.toml").read_text())
    assert recipe["models"]["tokenizer_from"] == f"org/base@{COMMITS['base']}"


def test_without_the_hubs_library_the_extra_is_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    complaints = ("there is no file or directory 'org/name@main'", "dare-merge[hub]")
    error = refuse_models(tmp_path, capsys, 1, *complaints, base=pair[0], merge="org/name@main")
    assert len(error.splitlines()) == 2
    for name in ("org/name.safetensors", "org/model.json", "a/b/c", "../org/name", "name", "org/name@"):
        error = refuse_models(tmp_path, capsys, 1, f"no file or directory {name!r}", base=name, merge=pair[1])
        assert "[hub]" not in error, "which no name on the Hub looks like"


# ---------------------------------------------------------------------------------------------------------------------
# The size of shards
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("1.5GiB", 3 << 29),
        ("300 MB", 300 * 10**6),
        (" 2TiB ", 2 << 40),
        ("10kB", 10_000),
        ("10KiB", 10_240),
        ("1000", 1000),
        ("1000B", 1000),
        (1000, 1000),
        ("1B", 1),
    ],
)
def test_sizes_are_read_as_people_write_them(source: Any, size: int) -> None:
    assert dare.parse_size(source) == size
    assert DareConfig(max_shard_size=source).max_shard_size == source


@pytest.mark.parametrize(
    "source",
    ["", "GB", "5XB", "5 G B", "-5GB", "5,5GB", "1e9", "0", "0GB", "0.5", "nan", "5GBs", "1.5.1GB", "9" * 16, "0x10"],
)
def test_wrong_sizes_are_refused(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    assert dare.parse_size(source) == 0
    complaint = f"--max-shard-size must be a size like 5GB or 500MiB, or a number of bytes, not {source!r}"
    refuse(tmp_path, capsys, 2, complaint, output="out", flags=(f"--max-shard-size={source}",))
    config = write_config(tmp_path, max_shard_size=source)
    assert dare.main(["-c", str(config)]) == 2
    assert f"{config}: [dare] max_shard_size must be a size like 5GB" in capsys.readouterr().err


@pytest.mark.parametrize("source", [0, -1, 1.5, True, None, [5], 1 << 63])
def test_wrong_sizes_are_refused_in_scripts(source: Any) -> None:
    with pytest.raises(ConfigError, match="max_shard_size must be a size like 5GB"):
        DareConfig(max_shard_size=source)


@pytest.mark.parametrize("limit", ["1B", "100B", 4514, 4515, 4636, 10_000, 15_000, 19_637, 19_638, "20kB"])
def test_shards_hold_no_more_than_the_limit_unless_one_tensor_does(
    pair: tuple[Path, Path], tmp_path: Path, limit: int | str
) -> None:
    out = tmp_path / "out"
    report = run_merge(pair[0], [pair[1]], out, max_shard_size=limit)
    bound = dare.parse_size(limit)
    shards = {path.name: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    assert list(shards) == list(report.files)
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in shards.values()]
    for tensors, size in zip(shards.values(), sizes, strict=True):
        assert size <= bound or len(tensors) == 1
    firsts = [dare.TensorFile(out / name, name) for name in shards]
    for size, following in zip(sizes, firsts[1:], strict=False):
        first = next(iter(following.tensors.values()))
        assert size + first.nbytes > bound, "no shard ends before it must"
    for file in firsts:
        file.close()
    run_merge(pair[0], [pair[1]], tmp_path / "out.safetensors")
    assert_same(tensors_in(out), load_file(tmp_path / "out.safetensors"))
    if len(shards) == 1:
        assert list(shards) == ["model.safetensors"]
        assert not (out / INDEX).exists()
    else:
        index = json.loads((out / INDEX).read_text())
        assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(sizes)
        assert list(shards) == [f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)]


def test_a_file_is_never_split(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run_merge(pair[0], [pair[1]], tmp_path / "out.safetensors", max_shard_size="1B")
    assert len(load_file(tmp_path / "out.safetensors")) == 4


def test_a_refusal_is_an_error_that_scripts_can_catch(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DareError, match="holds no model") as caught:
        run_merge(pair[0], [tmp_path / "empty"], tmp_path / "out.safetensors")
    assert caught.value.hint


# ---------------------------------------------------------------------------------------------------------------------
# At home in the Hugging Face ecosystem
# ---------------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32, "bos_token_id": 0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", {**SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "eos_token_id": 0}),
    "moe": ("MixtralForCausalLM", "MixtralConfig", {**SMALL, "num_key_value_heads": 1, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
}


def family_model(family: str, dtype: torch.dtype = F32, **changes: Any) -> Any:
    """A model of a family, small and random."""
    import transformers

    model, config, settings = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**{**settings, **changes})).to(dtype)


def save_family(folder: Path, family: str, dtype: torch.dtype = F32, **shards: str) -> list[Path]:
    """A base and two fine-tunes as transformers saves them, with the given sizes of shards."""
    model, paths = family_model(family, dtype), []
    for seed, name in enumerate(("base", "math", "code")):
        generator = torch.Generator().manual_seed(seed)
        if seed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += (torch.randn(parameter.shape, generator=generator) * 0.001).to(dtype)
        paths.append(folder / name)
        model.save_pretrained(paths[-1], max_shard_size=shards.get(name, "5GB"))
    return paths


def load_directory(folder: Path) -> Tensors:
    """All tensors of a model directory, as the safetensors library reads its files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def quiet(**settings: Any) -> DareConfig:
    return DareConfig(verbose=False, **settings)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_directory_loads_in_transformers_and_runs(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    import transformers

    paths = save_family(tmp_path, family, dtype, math="9KB")
    merger = DareMerger(paths[0], paths[1:], quiet(max_shard_size="5kB"))
    report = merger.merge(tmp_path / "merged")
    merger.merge(tmp_path / "merged.safetensors")
    assert len(report.files) > 1
    assert_same(load_directory(tmp_path / "merged"), load_file(tmp_path / "merged.safetensors"))
    loaded, info = getattr(transformers, FAMILIES[family][0]).from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.dtype == dtype
    assert bool(loaded(torch.arange(8)[None]).logits.isfinite().all())
    # What transformers saves again is what we wrote, under the same names.
    loaded.save_pretrained(tmp_path / "again")
    assert_same(load_directory(tmp_path / "again"), load_file(tmp_path / "merged.safetensors"))


def test_the_same_models_sharded_in_any_way_give_the_same_tensors(tmp_path: Path) -> None:
    results = []
    for name, shards in {
        "one": {},
        "few": {"base": "9KB"},
        "many": {"base": "3KB", "math": "9KB", "code": "2KB"},
    }.items():
        paths = save_family(tmp_path / name, "llama", BF16, **shards)
        DareMerger(paths[0], paths[1:], quiet()).merge(tmp_path / name / "merged")
        results.append(load_directory(tmp_path / name / "merged"))
    assert len(list((tmp_path / "many" / "base").glob("*.safetensors"))) > 3
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_an_output_directory_is_laid_out_as_transformers_does(tmp_path: Path) -> None:
    paths = save_family(tmp_path, "llama")
    base = load_file(paths[0] / "model.safetensors")
    DareMerger(paths[0], paths[1:], quiet(max_shard_size="5KiB")).merge(tmp_path / "merged")
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in base.values())
    assert index["weight_map"] == {name: path.name for path in shards for name in load_file(path)}
    order = []
    for path in shards:
        with safe_open(path, framework="np") as file:
            order += file.offset_keys()
            sizes = [base[name].nbytes for name in file.keys()]  # noqa: SIM118
            assert sum(sizes) <= 5 * 1024 or len(sizes) == 1
            assert file.metadata()["format"] == "pt"
    with safe_open(paths[0] / "model.safetensors", framework="np") as file:
        assert order == file.offset_keys()
    DareMerger(paths[0], paths[1:], quiet()).merge(tmp_path / "whole")
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()
    assert [path.name for path in (tmp_path / "whole").glob("*.safetensors")] == ["model.safetensors"]


def test_side_files_come_along_and_weights_do_not(tmp_path: Path) -> None:
    paths = save_family(tmp_path, "qwen")
    texts = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}",
        "LICENSE": "free", "NOTICE.txt": "note", "modeling_own.py": "x = 1",
        "additional_chat_templates/tool.jinja": "{{ tools }}", "1_Pooling/config.json": "{}",
    }  # fmt: skip
    left = {
        "README.md": "of the base", "pytorch_model.bin": "old", "model.fp16.safetensors": "old", "tf_model.h5": "old",
        "original/consolidated.00.pth": "old", "original/params.json": "{}", "training_args.bin": "old",
        ".git/config": "",
        "checkpoint-10/config.json": "{}", "trainer_state.json": "{}", "model-00001-of-00002.safetensors": "stale",
        "onnx/model.onnx": "old", "dare_recipe.toml": "old",
    }  # fmt: skip
    for name, text in {**texts, **left}.items():
        (paths[0] / name).parent.mkdir(exist_ok=True)
        (paths[0] / name).write_text(text)
    report = DareMerger(paths[0], paths[1:], quiet()).merge(tmp_path / "merged")
    found = {
        path.relative_to(tmp_path / "merged").as_posix() for path in (tmp_path / "merged").rglob("*") if path.is_file()
    }
    made = {"README.md", "dare_recipe.toml"}
    assert found == {*texts, *made, "config.json", "generation_config.json", "model.safetensors"}
    assert set(report.side_files) == found - {"model.safetensors"}
    for name, text in texts.items():
        assert (tmp_path / "merged" / name).read_text() == text
    assert (tmp_path / "merged" / "config.json").read_bytes() == (paths[0] / "config.json").read_bytes()
    assert "of the base" not in (tmp_path / "merged" / "README.md").read_text()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_config_json_tells_the_new_type(tmp_path: Path, key: str | None) -> None:
    import transformers

    paths = save_family(tmp_path, "llama")
    config = json.loads((paths[0] / "config.json").read_text())
    config.pop("dtype")
    config |= {key: "float32"} if key else {}
    config["text_config"] = {"dtype": "float32", "more": 1}
    config["quantization_config"] = {"dtype": "float32"}
    (paths[0] / "config.json").write_text(json.dumps(config))
    DareMerger(paths[0], paths[1:], quiet(dtype="bfloat16")).merge(tmp_path / "merged")
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written.pop("text_config") == {"dtype": "bfloat16", "more": 1}
    assert written.pop("quantization_config") == {"dtype": "float32"}
    assert {k: v for k, v in written.items() if "dtype" in k} == ({key: "bfloat16"} if key else {})
    del config["text_config"], config["quantization_config"]
    (tmp_path / "merged" / "config.json").write_text(json.dumps(written))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == BF16


def test_the_tokenizer_may_come_from_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = save_family(tmp_path, "llama")
    for path, text in zip(paths, ("base", "math", "code"), strict=True):
        (path / "tokenizer_config.json").write_text(json.dumps({"from": text}))
        (path / "LICENSE").write_text(text)
    (paths[0] / "vocab.txt").write_text("of the base only")
    vocabulary = {"model": {"vocab": {f"t{k}": k for k in range(40)}}, "added_tokens": [{"id": 41}]}
    (paths[1] / "tokenizer.json").write_text(json.dumps(vocabulary))
    output = tmp_path / "merged"
    flags = ["-b", paths[0], "-m", *paths[1:], "-o", output, "--tokenizer-from", paths[1], "--drop-rate", "0.5"]
    assert dare.main([*map(str, flags)]) == 0
    assert "knows tokens up to 41, and the merged model has rows for 40" in capsys.readouterr().err
    assert json.loads((output / "tokenizer_config.json").read_text()) == {"from": "math"}
    assert (output / "tokenizer.json").exists()
    assert not (output / "vocab.txt").exists()
    assert (output / "LICENSE").read_text() == "base"
    again = tmp_path / "again"
    assert dare.main(["--config", str(output / "dare_recipe.toml"), "--output", str(again)]) == 0
    assert json.loads((again / "tokenizer_config.json").read_text()) == {"from": "math"}
    (tmp_path / "bare").mkdir()
    with pytest.raises(DareError, match="there is no tokenizer in"):
        DareMerger(paths[0], paths[1:], quiet(), tokenizer_from=tmp_path / "bare").merge(tmp_path / "other")
    with pytest.raises(ConfigError, match="tokenizer_from means nothing to an output of one file"):
        DareMerger(paths[0], paths[1:], quiet(), tokenizer_from=paths[1]).merge(tmp_path / "other.safetensors")


def test_the_recipe_in_a_directory_makes_the_same_tensors_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With relative paths, from another working directory, through a link, and with every file but the card alike."""
    save_family(tmp_path / "models", "llama", BF16, math="9KB")
    (tmp_path / "results").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "results", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    flags = (
        "-q -b models/base -m models/math models/code/model.safetensors -o link/merged --max-shard-size 9kB --seed 7"
    )
    assert dare.main(flags.split()) == 0
    monkeypatch.chdir("/")
    recipe = tmp_path / "results" / "merged" / "dare_recipe.toml"
    assert "/tmp" not in recipe.read_text().replace(str(tmp_path), "/tmp") or "models/base" in recipe.read_text()
    assert dare.main(["-q", "--config", str(recipe), "--output", str(tmp_path / "elsewhere")]) == 0
    first, second = tmp_path / "results" / "merged", tmp_path / "elsewhere"
    assert_same(load_directory(first), load_directory(second))
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


def test_the_model_card_has_front_matter_and_the_recipe(tmp_path: Path) -> None:
    import huggingface_hub

    paths = save_family(tmp_path, "llama")
    settings = quiet(method="ties", weights=[2, 1], keep_ratio=0.5, rules=[{"match": "*norm*", "lambda_coeff": 0.0}])
    DareMerger(paths[0], paths[1:], settings).merge(tmp_path / "merged")
    card = huggingface_hub.ModelCard.load(tmp_path / "merged" / "README.md")
    assert card.data.base_model == ["base", "math", "code"]
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["merge", "dare"]
    assert "agree on a sign" in card.text
    assert "| `math` | 42 | 0.9 | 0.1 | 2 |" in card.text
    assert "the largest 0.5" in card.text
    recipe = card.text.split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(recipe)["dare"]["method"] == "ties"
    assert recipe == metadata(tmp_path / "merged" / "model.safetensors")["dare_recipe"]
    DareMerger(paths[0], paths[1:], quiet(method="slerp", slerp_t=0.25)).merge(tmp_path / "slerp")
    assert "slerp at 0.25" in (tmp_path / "slerp" / "README.md").read_text()


def test_a_bare_file_as_base_gives_a_directory_without_configuration_and_says_so(
    models: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "private.txt").write_text("of no model")
    report = DareMerger(models[0], models[1:], quiet()).merge(tmp_path / "merged")
    assert any("has no config.json beside it" in warning for warning in report.warnings)
    assert set(report.side_files) == {"README.md", "dare_recipe.toml"}


@pytest.mark.slow
def test_a_directory_of_20000_tensors_plans_in_seconds_and_merges(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.{k // 10}.part{k % 10}.weight": (4, 8) for k in range(20000)}
    base = random_model(0, BF16, shapes)
    paths = []
    for k in range(2):
        (tmp_path / f"m{k}").mkdir()
        save_file(base, tmp_path / f"m{k}" / "model.safetensors")
        paths.append(tmp_path / f"m{k}")
    started = time.perf_counter()
    rules = [{"match": f"*.{k}.*", "drop_rate": 0.5} for k in range(10)]
    plan = DareMerger(paths[0], [paths[1]], quiet(rules=rules, max_shard_size="20kB")).plan(tmp_path / "merged")
    assert time.perf_counter() - started < 20  # about two on a quiet machine
    assert len(plan.tensors) == 20000
    assert len(plan.files) == 65


# ---------------------------------------------------------------------------------------------------------------------
# LoRA adapters
# ---------------------------------------------------------------------------------------------------------------------


def save_adapter(folder: Path, model: Any, seed: int = 1, size: float = 0.05, **settings: Any) -> Any:
    """Train nothing, but fill the adapter with random numbers, and save it as PEFT does. Gives the model with it."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)
    adapted.save_pretrained(folder)
    return adapted


LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": LLAMA_TARGETS}),
    "rank of one": ("llama", {"target_modules": LLAMA_TARGETS, "r": 1}),
    "rslora": ("llama", {"target_modules": LLAMA_TARGETS, "use_rslora": True, "r": 7}),
    "patterns": (
        "llama",
        {
            "target_modules": LLAMA_TARGETS,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 9, r"^model.layers.0.mlp.down_proj": 3},
            "alpha_pattern": {"q_proj": 3, "0.self_attn.k_proj": 11},
        },
    ),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding": ("qwen", {"target_modules": ["embed_tokens", "q_proj"]}),
    "biases": ("qwen", {"target_modules": ["q_proj", "v_proj"], "bias": "all"}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d and embedding": ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "bert": ("bert", {"target_modules": ["query", "value", "dense"]}),
    "layers": ("llama", {"target_modules": LLAMA_TARGETS, "layers_to_transform": [1]}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_merges_as_peft_merges_it(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    family, settings = ADAPTERS[kind]
    model = family_model(family, dtype)
    model.save_pretrained(tmp_path / "base")
    adapted = save_adapter(tmp_path / "adapter", model, **settings)
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    report = DareMerger(tmp_path / "base", [tmp_path / "adapter"], quiet(drop_rate=0.0)).merge(tmp_path / "merged")
    merged, expected = load_directory(tmp_path / "merged"), load_directory(tmp_path / "expected")
    base = load_directory(tmp_path / "base")
    assert merged.keys() == expected.keys() == base.keys()
    changed = 0
    for name, tensor in merged.items():
        # One rounding of the output type; PEFT rounds the change too, to the type of the weights. In float32 its sums
        # are in another order, which shows where base and change nearly cancel: the bound there is 1e-7.
        near, far = tensor.double(), expected[name].double()
        step = torch.maximum(near.abs(), far.abs()) * torch.finfo(dtype).eps
        change = (far - base[name].double()).abs() * torch.finfo(dtype).eps
        assert bool(((near - far).abs() <= step + change + 1e-7 * (dtype == F32)).all()), name
        changed += not torch.equal(tensor, base[name])
    assert changed >= 2
    assert not report.models[0].missing_tensors
    assert not report.models[0].extra_tensors
    assert not any("lacks" in warning for warning in report.warnings)


def reference_delta(folder: Path, module: str, scale: float) -> np.ndarray:
    stored = load_file(folder / "adapter_model.safetensors")
    a = stored[f"base_model.model.{module}.lora_A.weight"].float().numpy()
    b = stored[f"base_model.model.{module}.lora_B.weight"].float().numpy()
    total = np.zeros((b.shape[0], a.shape[1]), np.float32)
    for k in range(len(a)):
        total += b[:, k : k + 1] * a[k]
    return total * np.float32(scale)


@pytest.mark.filterwarnings("ignore")
def test_an_adapters_changes_are_dropped_and_rescaled_bit_for_bit_like_the_formulas(tmp_path: Path) -> None:
    model = family_model("llama", BF16)
    model.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", model, target_modules=["q_proj"], r=5)
    DareMerger(tmp_path / "base", [tmp_path / "adapter"], quiet(drop_rate=0.7)).merge(tmp_path / "merged")
    base, merged = load_directory(tmp_path / "base"), load_directory(tmp_path / "merged")
    for name in base:
        expected = base[name]
        if "q_proj" in name:
            delta = reference_delta(tmp_path / "adapter", name.removesuffix(".weight"), 6 / 5)
            mask = reference_mask(42, name, delta.size, 0.7).reshape(delta.shape)
            kept = np.where(mask, delta * np.float32(1 / honoured(0.7)), np.float32(0))
            expected = round_to(base[name].float().numpy() + kept, BF16)
        assert same_bits(merged[name], expected), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (BF16, {}),
        (BF16, {"method": "ties"}),
        (BF16, {"method": "ties", "keep_ratio": 0.3}),
        (BF16, {"method": "slerp"}),
        (F32, {}),
        (F64, {}),
    ],
    ids=str,
)
def test_adapters_and_full_finetunes_merge_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    """As the same merge with the adapter's sums in float32 (float64) stored as a full fine-tune."""
    model = family_model("llama", dtype)
    model.save_pretrained(tmp_path / "base")
    base = load_directory(tmp_path / "base")
    full = {name: tensor.clone() for name, tensor in finetune(base, 3).items()}
    (full_path,) = save(tmp_path, full=full)
    save_adapter(tmp_path / "adapter", model, target_modules=LLAMA_TARGETS)
    merger = DareMerger(tmp_path / "base", [tmp_path / "adapter", full_path], quiet(drop_rate=0.4, **config))
    merger.merge(tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    monkeypatch.setattr(dare, "MAX_CHUNK", 1 << 14)
    monkeypatch.setattr(dare, "EXPAND_ELEMENTS", 50)
    merger.merge(tmp_path / "chunks.safetensors")
    assert_same(merged, load_file(tmp_path / "chunks.safetensors"))
    exact = F64 if dtype == F64 else F32
    wide = {name: tensor.to(exact) for name, tensor in base.items()}
    for module in {name.rsplit(".", 1)[0] for name in base if name.split(".")[-2] in LLAMA_TARGETS}:
        wide[f"{module}.weight"] += reference_delta(tmp_path / "adapter", module, 6 / 4)
    (wide_path,) = save(tmp_path, wide=wide)
    stored = {name for name in base if name.split(".")[-2] in LLAMA_TARGETS}
    DareMerger(tmp_path / "base", [wide_path, full_path], quiet(drop_rate=0.4, **config)).merge(
        tmp_path / "expected.safetensors"
    )
    expected = load_file(tmp_path / "expected.safetensors")
    for name in stored:
        step = 1e-5 if dtype == F64 else 2 * torch.finfo(dtype).eps
        assert torch.allclose(merged[name], expected[name], rtol=step, atol=1e-6), name


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_several_adapters_alike_in_all_but_their_values_are_told_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    """And merge with a fine-tune of a wider type than theirs."""
    generator = torch.Generator().manual_seed(0)
    shape = (300, 1000)  # several chunks
    base = {"layer.weight": torch.randn(shape, generator=generator).to(BF16)}
    pairs = [[torch.randn(size, generator=generator) * 0.01 for size in ((3, 1000), (300, 3))] for _ in range(2)]
    full = {"layer.weight": base["layer.weight"].to(dtype) + 0.001}
    paths = save(tmp_path, base=base, full=full)
    adapters = [lora_directory(tmp_path / f"a{k}", {"layer": (a, b)}) for k, (a, b) in enumerate(pairs)]
    DareMerger(paths[0], [*adapters, paths[1]], quiet(drop_rate=0.0, dtype="float64", weights=[1, 1, 1])).merge(
        tmp_path / "merged.safetensors"
    )
    merged = load_file(tmp_path / "merged.safetensors")["layer.weight"]
    expected = full["layer.weight"].double() + sum(b.double() @ a.double() for a, b in pairs)
    assert torch.allclose(merged, expected, atol=1e-6, rtol=0)


def test_an_adapter_is_a_small_part_of_what_is_read(tmp_path: Path) -> None:
    base = {"layer.weight": torch.randn(300, 2000)}
    save(tmp_path, base=base)
    lora_directory(tmp_path / "adapter", {"layer": (torch.randn(8, 2000), torch.randn(300, 8) * 0.01)})
    merger = DareMerger(tmp_path / "base.safetensors", [tmp_path / "adapter"], quiet())
    report = merger.merge(tmp_path / "merged.safetensors")
    assert report.bytes_read == 4 * (300 * 2000 + 8 * 2000 + 300 * 8)
    assert report.models[0].parameters == 300 * 2000


def lora_directory(folder: Path, modules: dict[str, tuple[torch.Tensor, torch.Tensor]], **config: Any) -> Path:
    """An adapter made by hand: A and B for each module."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(modules.values()))[0].shape[0]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for module, (a, b) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("in_base", "in_adapter"),
    [("h.0.attn", "transformer.h.0.attn"), ("model.h.0.attn", "h.0.attn"), ("h.0.attn", "h.0.attn")],
)
def test_names_with_and_without_the_models_prefix_meet(tmp_path: Path, in_base: str, in_adapter: str) -> None:
    base = {f"{in_base}.weight": torch.zeros(6, 8), "other.weight": torch.zeros(3)}
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    save(tmp_path, base=base)
    lora_directory(tmp_path / "adapter", {in_adapter: (a, b)})
    DareMerger(tmp_path / "base.safetensors", [tmp_path / "adapter"], quiet(drop_rate=0.0)).merge(
        tmp_path / "merged.safetensors"
    )
    merged = load_file(tmp_path / "merged.safetensors")
    assert torch.allclose(merged[f"{in_base}.weight"], b @ a, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_square_layers_of_gpt2_are_transposed_whatever_the_configuration_says(tmp_path: Path) -> None:
    """PEFT writes there what is true of the last module that it looked at: here, of the head."""
    model = family_model("gpt2", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "base")
    adapted = save_adapter(tmp_path / "adapter", model, target_modules=["c_attn", "c_proj", "lm_head"])
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"] is False
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    DareMerger(tmp_path / "base", [tmp_path / "adapter"], quiet(drop_rate=0.0)).merge(tmp_path / "merged")
    merged, expected = load_directory(tmp_path / "merged"), load_directory(tmp_path / "expected")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name


def test_an_adapters_names_are_not_guessed_where_several_fit(tmp_path: Path) -> None:
    base = {f"{part}.layer.weight": torch.randn(6, 8) for part in ("text", "vision")}
    save(tmp_path, base=base)
    lora_directory(tmp_path / "adapter", {"layer": (torch.randn(2, 8), torch.randn(6, 2))})
    merger = DareMerger(tmp_path / "base.safetensors", [tmp_path / "adapter"], quiet())
    with pytest.raises(DareError, match=r"may mean several tensors: 'text.layer.weight', 'vision.layer.weight'"):
        merger.merge(tmp_path / "out.safetensors")


def test_modules_that_an_adapter_saved_are_not_mistaken_for_others(tmp_path: Path) -> None:
    base = {"layer.weight": torch.randn(6, 8), "dense.weight": torch.randn(3, 3)}
    save(tmp_path, base=base)
    folder = lora_directory(tmp_path / "adapter", {"model.layer": (torch.randn(2, 8), torch.randn(6, 2))})
    stored = load_file(folder / "adapter_model.safetensors")
    stored |= {"base_model.model.classifier.dense.weight": torch.ones(3, 3)}
    stored |= {"base_model.model.bn.num_batches_tracked": torch.tensor(7)}
    save_file(stored, folder / "adapter_model.safetensors")
    report = DareMerger(tmp_path / "base.safetensors", [folder], quiet()).merge(tmp_path / "out.safetensors")
    assert same_bits(load_file(tmp_path / "out.safetensors")["dense.weight"], base["dense.weight"])
    assert set(report.models[0].extra_tensors) == {"classifier.dense.weight", "bn.num_batches_tracked"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an adapter", "a model of one tensor", "a tied head"])
def test_the_time_to_plan_grows_with_the_number_of_tensors_and_not_faster(tmp_path: Path, kind: str) -> None:
    """Models of experts have tens of thousands, and an adapter few of them."""
    base = {f"model.layers.{k}.up_proj.weight": torch.zeros(2, 2) for k in range(20_000)}
    base |= {"model.embed_tokens.weight": torch.zeros(3, 2), "lm_head.weight": torch.zeros(3, 2)}
    folder = save_directory(tmp_path / "base", base, tie_word_embeddings=kind == "a tied head")
    model = folder
    if kind == "an adapter":
        pairs = {f"model.layers.{k}.up_proj": (torch.zeros(1, 2), torch.zeros(2, 1)) for k in range(2000)}
        model = lora_directory(tmp_path / "model", pairs)
    elif kind == "a model of one tensor":
        model = save_directory(tmp_path / "model", {"model.layers.0.up_proj.weight": torch.zeros(2, 2)})
    started = time.perf_counter()
    DareMerger(folder, [model], quiet()).plan(tmp_path / "out.safetensors")
    assert time.perf_counter() - started < 30  # it was a hundred and more


def test_a_square_layer_is_turned_as_its_neighbours_that_are_not_square(tmp_path: Path) -> None:
    def layer(name: str, *shape: int, bias: int) -> Tensors:
        return {f"{name}.weight": torch.zeros(shape), f"{name}.bias": torch.zeros(bias)}

    base = layer("a.b.square", 4, 4, bias=4) | layer("a.b.c.long", 4, 8, bias=8) | layer("a.b-c.long", 4, 8, bias=4)
    base |= layer("a.d.square", 4, 4, bias=4) | layer("a.d.long", 8, 4, bias=8) | layer("a.bc.long", 8, 4, bias=8)
    base |= layer("a.e.square", 4, 4, bias=4) | layer("a.e.1", 4, 8, bias=8) | layer("a.e.2", 8, 4, bias=8)
    base |= layer("a.f.square", 4, 4, bias=4) | layer("square", 4, 4, bias=4)
    save(tmp_path, base=base)
    modules = [name.removesuffix(".weight") for name in base if name.endswith("square.weight")]
    for said in (False, True):
        folder = lora_directory(
            tmp_path / "adapter", {m: (torch.zeros(2, 4), torch.zeros(4, 2)) for m in modules}, fan_in_fan_out=said
        )
        opened = dare.open_model(dare.Source.of(tmp_path / "base.safetensors"))
        adapter = dare.open_model(dare.Source.of(folder), opened)
        pairs = {m: adapter.tensors[f"{m}.weight"].low_rank for m in modules}
        opened.close()
        adapter.close()
        expected = dict.fromkeys(modules, said) | {"a.b.square": True, "a.d.square": False}
        assert {m: pair.transposed for m, pair in pairs.items() if pair} == expected


def test_patterns_that_could_take_forever_are_refused(tmp_path: Path) -> None:
    save(tmp_path, base={"layer.weight": torch.randn(6, 8)})
    modules = {"layer": (torch.randn(2, 8), torch.randn(6, 2))}
    for pattern in (
        "([a-z._0-9]+)+!", "(a*)*b", "(x{1,9}){1,9}y", "a?" * 30 + "a" * 30, ".*" * 12 + "!", "(a|aa)" * 38,
        "(a+)(?#)+b", "(?x:(a+) +b)", "(a+)?" * 20 + "b", "a*?" * 12 + "b", "(?=" + "a*" * 12 + "b)", "a{1,40}" * 12,
        "a" * 10_001,
    ):  # fmt: skip
        folder = lora_directory(tmp_path / "adapter", modules, rank_pattern={pattern: 2})
        with pytest.raises(DareError, match="is too intricate"):
            DareMerger(tmp_path / "base.safetensors", [folder], quiet()).plan(tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    "pattern",
    [
        r".*layers\.\d+\..*experts\.[0-9]+\..*",
        r"model\.layers\.([0-9]|1[0-9]|2[0-3])\.(self_attn|mlp)\.(q|k|up)_proj",
        r"^model\.layers\.(?:0|7|12)\.mlp\.experts\.\d{1,3}\.up_proj", r"(?<=a)b|[?|(]*up_proj", "up_proj",
        "|".join(f"layers.{k}.mlp.experts.{k}.up_proj" for k in range(200)),
    ],
)  # fmt: skip
def test_patterns_as_people_write_them_match_as_peft_matches_them(pattern: str) -> None:
    settings = dare.AdapterConfig("x", r=4, rank_pattern={pattern: 2})
    for module in (
        "model.layers.12.mlp.experts.112.up_proj",
        "layers.12.mlp.experts.12.up_proj",
        "up_proj",
        "gup_proj",
    ):
        assert settings.rank(module) == (2 if re.match(rf"(.*\.)?({pattern})$", module) else 4)


def test_as_many_patterns_as_modules_are_compiled_once(tmp_path: Path) -> None:
    """Python remembers 512."""
    settings = dare.AdapterConfig("x", r=4, rank_pattern={f"layers.{k}.q_proj": k + 1 for k in range(1000)})
    started = time.perf_counter()
    assert [settings.rank(f"model.layers.{k}.q_proj") for k in range(1000)] == list(range(1, 1001))
    assert time.perf_counter() - started < 20


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_would_untie_the_head_is_warned_about_or_refused(tmp_path: Path) -> None:
    model = family_model("qwen")
    model.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", model, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    report = DareMerger(tmp_path / "base", [tmp_path / "adapter"], quiet()).merge(tmp_path / "merged")
    assert any("the base uses that as its output head too" in warning for warning in report.warnings)
    save_adapter(tmp_path / "head", family_model("qwen"), target_modules=["q_proj", "lm_head"])
    with pytest.raises(DareError, match=r"changes 'lm_head.weight', which the base does not have") as caught:
        DareMerger(tmp_path / "base", [tmp_path / "head"], quiet()).merge(tmp_path / "other")
    assert "unties them" in caught.value.hint


def test_an_adapter_for_a_convolution_merges(tmp_path: Path) -> None:
    base = {"conv.weight": torch.randn(6, 3, 2, 2)}
    a, b = torch.randn(2, 3, 2, 2), torch.randn(6, 2, 1, 1)
    save(tmp_path, base=base)
    lora_directory(tmp_path / "adapter", {"conv": (a, b)})
    for name in ("adapter", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        DareMerger(tmp_path / "base.safetensors", [tmp_path / name], quiet(drop_rate=0.0)).merge(
            tmp_path / "merged.safetensors"
        )
        merged = load_file(tmp_path / "merged.safetensors")
        expected = base["conv.weight"] + torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
        assert torch.allclose(merged["conv.weight"], expected, atol=1e-6)


def test_values_in_an_adapter_that_are_not_finite_are_named(tmp_path: Path) -> None:
    base, a, b = {"layer.weight": torch.randn(6, 8)}, torch.randn(2, 8), torch.randn(6, 2)
    a[1, 5] = math.inf
    save(tmp_path, base=base)
    lora_directory(tmp_path / "adapter", {"layer": (a, b)})
    merger = DareMerger(tmp_path / "base.safetensors", [tmp_path / "adapter"], quiet())
    with pytest.raises(DareError, match=r"adapter': tensor 'layer.weight' holds -?inf at \[0, 5\]"):
        merger.merge(tmp_path / "merged.safetensors")


def test_another_adapter_configuration_is_another_input(tmp_path: Path) -> None:
    save(tmp_path, base={"layer.weight": torch.randn(6, 8)})
    modules = {"layer": (torch.randn(2, 8), torch.randn(6, 2))}
    lora_directory(tmp_path / "adapter", modules)
    DareMerger(tmp_path / "base.safetensors", [tmp_path / "adapter"], quiet()).merge(tmp_path / "merged")
    recipe = str(tmp_path / "merged" / "dare_recipe.toml")
    assert dare.main(["-q", "-c", recipe, "-o", str(tmp_path / "again")]) == 0
    lora_directory(tmp_path / "adapter", modules, lora_alpha=4)
    assert dare.main(["-q", "-c", recipe, "-o", str(tmp_path / "third")]) == 1
    assert not (tmp_path / "third").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Hostile files: every rule of the safetensors format, broken
# ---------------------------------------------------------------------------------------------------------------------

SOUND = {"v": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
SOUND |= {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]}}
SOUND_DATA = np.arange(10, dtype="<f4").tobytes()


def with_header(header: bytes | str, data: bytes = SOUND_DATA, length: int | None = None) -> bytes:
    """The bytes of a file that has this header, and says that it is of that length."""
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def sound(**entries: Any) -> str:
    """A sound header with some entries changed, added or, by None, left out."""
    kept = {name: entry for name, entry in (SOUND | entries).items() if entry is not None}
    return json.dumps(kept, separators=(",", ":"))


def of_w(**fields: Any) -> str:
    """A sound header in which the entry of w has some other fields."""
    return sound(w={key: value for key, value in ({**SOUND["w"], **fields}).items() if value is not None})


def w_spelled(**fields: str) -> str:
    """As of_w, with the fields spelled in JSON."""
    spelled = {key: json.dumps(value) for key, value in SOUND["w"].items()} | fields
    entry = ", ".join(f'"{key}": {value}' for key, value in spelled.items())
    return f'{{"v": {json.dumps(SOUND["v"])}, "w": {{{entry}}}}}'


def twice(name: str) -> str:
    return sound()[:-1] + f', "{name}": {json.dumps(SOUND[name])}}}'


# What is wrong with a file: its bytes, and a word of what is to be said about it.
BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "header past the end of the file": (with_header(sound(), length=100_000), "100,000"),
    "header one byte past the end of the file": (with_header(sound(), b"", len(sound()) + 1), "long"),
    "header of 2**63 bytes": (with_header(sound(), length=2**63), "long"),
    "header of 2**64 - 1 bytes": (with_header(sound(), length=2**64 - 1), "long"),
    "header of 0 bytes": (with_header(b""), "{"),
    "one byte": (b"\x10", "too short"),
    "seven bytes": (struct.pack("<Q", 2)[:7], "too short"),
    "eight bytes": (struct.pack("<Q", 2), "long"),
    "not UTF-8": (with_header(sound().encode().replace(b'"w"', b'"\xff"')), "utf-8"),
    "a character cut off": (with_header(sound().encode()[:-1] + b"\xc3"), "utf-8"),
    "a surrogate in UTF-8": (with_header(sound().encode().replace(b'"w"', b'"\xed\xa0\x80"')), "utf-8"),
    "a byte order mark": (with_header("\ufeff" + sound()), "{"),
    "not JSON": (with_header("{not JSON at all}"), ""),
    "nothing after the brace": (with_header("{"), ""),
    "two objects": (with_header(sound() + "{}"), ""),
    "a zero byte after the header": (with_header(sound() + "\0"), ""),
    "single quotes": (with_header(sound().replace('"', "'")), ""),
    "a comma too many": (with_header(sound()[:-1] + ",}"), ""),
    "a comment": (with_header(sound()[:-1] + "/* */}"), ""),
    "a control character in a name": (with_header(sound().replace('"w"', '"w\n"')), ""),
    "a list": (with_header(f"[{sound()}]"), "{"),
    "a string": (with_header('"{}"'), "{"),
    "null": (with_header("null"), "{"),
    "a space before the header": (with_header(" " + sound()), "{"),
    "a line end before the header": (with_header("\n" + sound()), "{"),
    "a tensor twice": (with_header(twice("w")), "'w'"),
    "another tensor twice": (with_header(twice("v")), "'v'"),
    "a tensor twice by another spelling": (with_header(twice("w").replace('"w"', '"\\u0077"', 1)), "'w'"),
    "metadata twice": (with_header('{"__metadata__": {}, "__metadata__": {}, ' + sound()[1:]), "'__metadata__'"),
    "a field twice": (with_header(w_spelled(dtype='"F32", "dtype": "F32"')), "'dtype'"),
    "a metadata key twice": (with_header('{"__metadata__": {"a": "1", "a": "1"}, ' + sound()[1:]), "'a'"),
    "overlap": (with_header(of_w(data_offsets=[12, 36]), SOUND_DATA[:36]), "'w'"),
    "two tensors in one place": (with_header(sound(x=SOUND["w"])), "overlap"),
    "a hole": (with_header(of_w(data_offsets=[20, 44]), SOUND_DATA + bytes(4)), "'w'"),
    "a hole at the start": (with_header(sound(v=None)), "'w'"),
    "bytes after the last tensor": (with_header(sound(), SOUND_DATA + b"\0"), "41"),
    "bytes and no tensors": (with_header("{}"), "40"),
    "a byte missing": (with_header(sound(), SOUND_DATA[:-1]), "39"),
    "all bytes missing": (with_header(sound(), b""), "40"),
    "offsets reversed": (with_header(of_w(data_offsets=[40, 16])), "'w'"),
    "one offset": (with_header(of_w(data_offsets=[16])), "'w'"),
    "three offsets": (with_header(of_w(data_offsets=[16, 40, 40])), "'w'"),
    "no offsets": (with_header(of_w(data_offsets=[])), "'w'"),
    "offsets past 2**64": (with_header(of_w(data_offsets=[2**64 + 16, 2**64 + 40])), "'w'"),
    "negative offsets": (with_header(sound(v=SOUND["v"] | {"data_offsets": [-16, 0]})), "'v'"),
    "offsets as text": (with_header(of_w(data_offsets=["16", "40"])), "'w'"),
    "offsets as a table": (with_header(of_w(data_offsets={"begin": 16, "end": 40})), "'w'"),
    "larger than its shape": (with_header(of_w(shape=[2, 2])), "'w'"),
    "smaller than its shape": (with_header(of_w(shape=[3, 3])), "'w'"),
    "not its type's size": (with_header(of_w(dtype="F16")), "'w'"),
    "no whole number of bytes": (with_header(of_w(dtype="F4", shape=[47])), "'w'"),
    "more elements than 2**64": (with_header(of_w(shape=[2**40, 2**40])), "'w'"),
    "elements that wrap around to the right number": (with_header(of_w(shape=[2**32, 2**32 + 6])), "'w'"),
    "elements of thousands of digits": (with_header(of_w(shape=[2**62] * 300)), "'w'"),
    "a shape of 10,000 sides": (with_header(of_w(shape=[2] * 10_000)), "'w'"),
    "more elements than 2**64, times zero": (
        with_header(sound(x={"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [40, 40]})),
        "'x'",
    ),
    "a negative side": (with_header(of_w(shape=[-2, -3])), "'w'"),
    "a side of 2**63": (with_header(of_w(shape=[2**63, 0])), "'w'"),
    "a side of 2**64 + 6": (with_header(of_w(shape=[2**64 + 6])), "'w'"),
    "a side with a point": (with_header(of_w(shape=[2.0, 3.0])), "'w'"),
    "a side with an exponent": (with_header(w_spelled(shape="[6e0]")), "'w'"),
    "a side of minus zero": (
        with_header(sound()[:-1] + ', "x": {"dtype": "F32", "shape": [-0], "data_offsets": [40, 40]}}'),
        "'x'",
    ),
    "a side that is true": (with_header(of_w(shape=[6, True])), "'w'"),
    "a side that is null": (with_header(of_w(shape=[6, None])), "'w'"),
    "a side that is text": (with_header(of_w(shape=["6"])), "'w'"),
    "a side that is a list": (with_header(of_w(shape=[[6]])), "'w'"),
    "a side of 4,000 digits": (with_header(w_spelled(shape=f"[{'9' * 4000}]")), "'w'"),
    "a side of 4,999 digits": (with_header(w_spelled(shape=f"[{'9' * 4999}]")), "two offsets"),
    "an offset of 4,999 digits": (with_header(w_spelled(data_offsets=f"[16, {'9' * 4999}]")), "two offsets"),
    "a side of a million digits": (with_header(w_spelled(shape=f"[{'9' * 1_000_000}]")), "two offsets"),
    "a side with leading zeros": (with_header(w_spelled(shape="[06]")), ""),
    "a side with a plus": (with_header(w_spelled(shape="[+6]")), ""),
    "a side in hexadecimal": (with_header(w_spelled(shape="[0x6]")), ""),
    "a side in other digits": (with_header(w_spelled(shape="[\u0666]")), ""),
    "a side of NaN": (with_header(w_spelled(shape="[NaN]")), ""),
    "a side of Infinity": (with_header(w_spelled(shape="[Infinity]")), ""),
    "an offset of -Infinity": (with_header(w_spelled(data_offsets="[16, -Infinity]")), ""),
    "a field of NaN that nobody reads": (with_header(w_spelled(more="NaN")), ""),
    "a field of 1e999 that nobody reads": (with_header(w_spelled(more="1e999")), ""),
    "a shape that is a number": (with_header(of_w(shape=6)), "'w'"),
    "a shape that is text": (with_header(of_w(shape="6")), "'w'"),
    "a shape that is a table": (with_header(of_w(shape={"6": 6})), "'w'"),
    "an unknown type": (with_header(of_w(dtype="F31")), "'F31'"),
    "a type in small letters": (with_header(of_w(dtype="f32")), "'f32'"),
    "a type that is a number": (with_header(of_w(dtype=32)), "'w'"),
    "a type that is a list": (with_header(of_w(dtype=["F32"])), "'w'"),
    "no type": (with_header(of_w(dtype=None)), "'w'"),
    "no shape": (with_header(of_w(shape=None)), "'w'"),
    "no place": (with_header(of_w(data_offsets=None)), "'w'"),
    "a tensor that is null": (with_header(w_spelled()[: w_spelled().index('"w"')] + '"w": null}'), "'w'"),
    "a tensor that is a list": (with_header(sound(w=["F32", [2, 3], [16, 40]])), "'w'"),
    "a tensor that is text": (with_header(sound(w="F32")), "'w'"),
    "100,000 lists in each other": (with_header('{"w": ' + "[" * 100_000), "two offsets"),
    "100,000 tables in each other": (with_header('{"a":' * 100_000), "two offsets"),
    "100,000 closed lists in each other": (with_header(w_spelled(shape="[" * 100_000 + "]" * 100_000)), "two offsets"),
    "500 lists in a field that nobody reads": (with_header(w_spelled(more="[" * 500 + "]" * 500)), ""),
    "metadata of numbers": (with_header(sound(__metadata__={"a": 1})), "metadata"),
    "metadata of nulls": (with_header(sound(__metadata__={"a": None})), "metadata"),
    "metadata of tables": (with_header(sound(__metadata__={"a": {}})), "metadata"),
    "metadata that is a list": (with_header(sound(__metadata__=[])), "metadata"),
    "metadata that is text": (with_header(sound(__metadata__="pt")), "metadata"),
    "a tensor of the name of the metadata": (
        with_header(sound(w=None, __metadata__=SOUND["w"])),
        "metadata",
    ),
    "half a surrogate pair in a name": (with_header(sound().replace('"w"', '"\\ud800"')), ""),
    "the other half of a surrogate pair in a name": (with_header(sound().replace('"w"', '"w\\udfff"')), ""),
    "half a surrogate pair in a type": (with_header(w_spelled(dtype='"\\ud800"')), ""),
    "half a surrogate pair in the metadata": (with_header(sound(__metadata__={"a": "\ud800"})), ""),
    "half a surrogate pair in a key of the metadata": (with_header(sound(__metadata__={"\ud800": "a"})), ""),
    "half a surrogate pair in a field that nobody reads": (with_header(w_spelled(more='"\\ud800"')), ""),
    "an unknown escape": (with_header(sound().replace('"w"', '"\\x77"')), ""),
}


def refused_in_two_lines(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 1) -> str:
    """Run the command; it must fail with an error and a hint, each of one line that no name can break."""
    capsys.readouterr()
    assert dare.main(arguments) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert calm(printed.err)
    error, hint = printed.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert not error.startswith("error: unexpected"), error[:300]
    return error


def calm(text: str) -> bool:
    """Whether nothing in a text but the ends of its lines could move a terminal's cursor, or do worse to it."""
    return all(letter.isprintable() or letter == "\n" for letter in text)


def sound_models(folder: Path, base: str = "base", model: str = "model") -> list[str]:
    """Two small sound files with the same names and shapes, and the arguments that merge them."""
    paths = [folder / f"{name}.safetensors" for name in (base, model)]
    for path in paths:
        path.write_bytes(with_header(sound()))
    return ["-b", str(paths[0]), "-m", str(paths[1]), "-o", str(folder / "out.safetensors")]


@pytest.mark.parametrize("side", ["base", "model"])
@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_a_file_that_breaks_a_rule_of_the_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, side: str
) -> None:
    arguments = sound_models(tmp_path)
    content, complaint = BROKEN_FILES[fault]
    (tmp_path / f"{side}.safetensors").write_bytes(content)
    before = snapshot(tmp_path)
    error = refused_in_two_lines(capsys, arguments)
    assert repr(str(tmp_path / f"{side}.safetensors")) in error
    assert "not a complete safetensors file" in error
    assert complaint in error
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_what_breaks_a_rule_is_broken_for_the_library_too(tmp_path: Path, fault: str) -> None:
    """So that the table above holds no rules of our own, but for those that the library forgot."""
    forgotten = {"a tensor twice", "another tensor twice", "a tensor twice by another spelling", "a metadata key twice"}
    forgotten |= {"a space before the header", "a line end before the header", "a tensor that is a list"}
    (tmp_path / "file.safetensors").write_bytes(BROKEN_FILES[fault][0])
    assert (as_the_library_reads(tmp_path / "file.safetensors") is None) == (fault not in forgotten)


def as_the_library_reads(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """Types and shapes by name, or None where the library refuses the file."""
    try:
        with safe_open(path, framework="np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
            return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except Exception:
        return None


@pytest.mark.parametrize("side", ["base", "model"])
@pytest.mark.parametrize("length", [100_000_001, 2**32, 2**40])
def test_a_header_of_more_than_100_mb_is_refused_unread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], side: str, length: int
) -> None:
    arguments = sound_models(tmp_path)
    with open(tmp_path / f"{side}.safetensors", "wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(8 + length)  # all holes: no disk holds that much
    error = refused_in_two_lines(capsys, arguments)
    assert f"{length:,}" in error
    assert sorted(os.listdir(tmp_path)) == ["base.safetensors", "model.safetensors"]


@pytest.mark.parametrize("length", [0x80, 0x180, 0x280, 0x480, 0x5880])
def test_a_file_cut_off_is_not_taken_for_a_pickle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    """Pickles start with the byte 0x80, as the length of one header in 32 does."""
    arguments = sound_models(tmp_path)
    header = sound(v=None, w={"dtype": "F32", "shape": [10], "data_offsets": [0, 40]})
    header += " " * (length - len(header))
    (tmp_path / "model.safetensors").write_bytes(with_header(header, SOUND_DATA[:-1]))
    error = refused_in_two_lines(capsys, arguments)
    assert "pickle" not in error
    assert "not a complete safetensors file" in error


@pytest.mark.parametrize("fault", ["a tensor twice", "a hole", "not JSON"])
def test_a_broken_shard_or_adapter_is_refused_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    base = {"w": torch.ones(2, 3), "v": torch.ones(4)}
    [path] = save(tmp_path, base=base)
    folder = save_sharded(tmp_path / "sharded", base, [["w"], ["v"]])
    adapter = write_adapter(tmp_path / "adapter", low_rank("w", (2, 3)))
    content, _ = BROKEN_FILES[fault]
    for file in (folder / "model-00002-of-00002.safetensors", adapter / "adapter_model.safetensors"):
        file.write_bytes(content)
        refuse_models(tmp_path, capsys, 1, repr(str(file)), "complete", base=path, merge=file.parent)


# ---------------------------------------------------------------------------------------------------------------------
# Odd, and sound all the same
# ---------------------------------------------------------------------------------------------------------------------


def written(path: Path, tensors: dict[str, tuple[list[int], list[float]]], names: list[str], padding: str = "") -> None:
    """A file of F32 tensors: their values in the order of tensors, their entries in the order of names."""
    entries, place = {}, 0
    for name, (shape, values) in tensors.items():
        ends = [place, place + 4 * len(values)]
        entries[name], place = {"dtype": "F32", "shape": shape, "data_offsets": ends}, ends[1]
    data = b"".join(np.array(values, "<f4").tobytes() for _, values in tensors.values())
    text = "{" + padding + ",".join(f"{padding}{json.dumps(name)}:{json.dumps(entries[name])}" for name in names)
    path.write_bytes(with_header(text + padding + "}" + padding, data))


ODD_NAMES = [
    "\u00fcber.\u6a21\u578b.\U0001f600",
    "two\nlines",
    "\r\x1b[2J\x07",
    "a\x00b",
    "x" * 10_000,
    "",
    " ",
    '"quoted"\\',
    "\u202ereversed",
    "e\u0301",  # and the same letter, composed:
    "\u00e9",
    "__metadata",
    "../../etc/passwd",
    "%s %d {} {0}",
]


@pytest.mark.parametrize("padding", ["", "  ", "\t\r\n "], ids=["tight", "spaces", "lines"])
def test_odd_but_sound_files_are_merged_right(tmp_path: Path, padding: str) -> None:
    rng = np.random.default_rng(4)
    shapes: dict[str, list[int]] = {"empty at the start": [0]}
    for number, name in enumerate(ODD_NAMES):
        shapes |= {name: [3, 7], f"empty {number}": [5, 0, 2**31]}
    shapes |= {"scalar": [], "of 100 sides": [1] * 50 + [3] + [1] * 49, "of 60 sides": [1] * 60, "empty at the end": []}
    shapes["empty at the end"] = [2, 0]
    base = {name: (shape, list(rng.normal(size=math.prod(shape)))) for name, shape in shapes.items()}
    model = {name: (shape, [value + 1e-3 for value in values]) for name, (shape, values) in reversed(base.items())}
    order = rng.permutation(list(base)).tolist()
    written(tmp_path / "base.safetensors", base, order, padding)
    written(tmp_path / "model.safetensors", model, order[::-1], padding)
    arguments = ["-q", "-b", str(tmp_path / "base.safetensors"), "-m", str(tmp_path / "model.safetensors")]
    output = tmp_path / "out.safetensors"
    assert dare.main([*arguments, "-o", str(output), "--drop-rate", "0", "--lambda", "2"]) == 0
    found = dare.TensorFile(output, "out")
    file = output.read_bytes()
    assert found.tensors.keys() == base.keys()
    assert as_the_library_reads(output) == {name: ("F32", shape) for name, shape in shapes.items()}
    for name, (_, values) in base.items():
        info = found.tensors[name]
        merged = np.frombuffer(file[info.offset : info.offset + info.nbytes], "<f4")
        old, new = np.array(values, "<f4"), np.array(model[name][1], "<f4")
        assert np.allclose(merged, old + 2 * (new.astype("f8") - old), rtol=1e-6, atol=1e-9)
    found.close()
    assert dare.main(["-q", "--verify", str(output)]) == 0


def test_files_without_tensors_have_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = sound_models(tmp_path)
    for side in ("base", "model"):
        (tmp_path / f"{side}.safetensors").write_bytes(with_header('{"__metadata__": {"format": "pt"}}', b""))
    before = snapshot(tmp_path)
    assert "has no tensor in common" in refused_in_two_lines(capsys, arguments)
    assert snapshot(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(with_header(sound()))
    assert "has no tensor in common" in refused_in_two_lines(capsys, arguments)


def test_files_of_empty_tensors_alone_merge(tmp_path: Path) -> None:
    arguments = sound_models(tmp_path)
    for side in ("base", "model"):
        (tmp_path / f"{side}.safetensors").write_bytes(
            with_header('{"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', b"")
        )
    for method in ("linear", "ties"):
        assert dare.main([*arguments, "-q", "--method", method]) == 0
        assert load_file(tmp_path / "out.safetensors")["w"].shape == (0,)


@pytest.mark.parametrize("sides", [0, 64, 65, 100])
def test_a_broken_value_is_found_in_a_tensor_of_any_number_of_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sides: int
) -> None:
    arguments = sound_models(tmp_path)
    shape = [1] * sides
    written(tmp_path / "base.safetensors", {"w": (shape, [1.0])}, ["w"])
    written(tmp_path / "model.safetensors", {"w": (shape, [math.nan])}, ["w"])
    assert f"tensor 'w' holds nan at {[0] * sides}" in refused_in_two_lines(capsys, arguments)


def test_a_changed_byte_is_found_in_a_tensor_of_100_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = sound_models(tmp_path)
    for side, value in (("base", 1.0), ("model", 1.5)):
        written(tmp_path / f"{side}.safetensors", {"w": ([1] * 100, [value])}, ["w"])
    assert dare.main([*arguments, "-q"]) == 0
    output = tmp_path / "out.safetensors"
    output.write_bytes(output.read_bytes()[:-1] + b"\x01")
    assert "tensor 'w' differs at [0, 0" in refused_in_two_lines(capsys, ["--verify", str(output)])


# ---------------------------------------------------------------------------------------------------------------------
# Agreement with the library, on headers that nobody thought of
# ---------------------------------------------------------------------------------------------------------------------

FUZZED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}

# JSON as text: what stands where a number, a name or a value should be.
ODD_JSON = st.one_of(
    st.integers(-2, 50).map(str),
    st.sampled_from([2**31, 2**32 + 4, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)]).map(str),
    st.sampled_from(
        ["-0", "0.0", "4.0", "4e0", "1e999", "NaN", "Infinity", "-Infinity", "true", "null", "{}", "[]", "[[]]", '""']
    ),
    st.sampled_from(['"F32"', '"BF16"', '"BOOL"', '"F4"', '"F8_E4M3"', '"C64"', '"I64"', '"\\ud800"', '"\\u0000"']),
    st.sampled_from(["[0]", "[2, 2]", "[4611686018427387904, 4, 0]", "[0, 4611686018427387904, 4]", "[-0]", "[1, 1]"]),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ).map(json.dumps),
)
NAMES_IN_JSON = st.sampled_from(['"v"', '"w"', '"e"', '"\\u0077"', '"__metadata__"', '""', '"\\ud800"', '"dtype"'])


@st.composite
def mangled_headers(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[bytes, bytes]:
    """A header with some of its parts changed, dropped, doubled or moved, and the data behind it."""
    parts: list[list[Any]] = [
        ['"__metadata__"', [['"format"', '"pt"'], ['"a"', '"b"']]],
        ['"v"', [['"dtype"', '"F32"'], ['"shape"', "[4]"], ['"data_offsets"', "[0, 16]"]]],
        ['"e"', [['"dtype"', '"I64"'], ['"shape"', "[3, 0]"], ['"data_offsets"', "[16, 16]"]]],
        ['"w"', [['"dtype"', '"BF16"'], ['"shape"', "[3, 4]"], ['"data_offsets"', "[16, 40]"]]],
    ]
    for _ in range(draw(st.integers(1, 3))):
        entry = draw(st.sampled_from(parts)) if parts else ['""', []]
        fields = entry[1] if isinstance(entry[1], list) and draw(st.booleans()) else parts
        change = draw(st.sampled_from(["drop", "double", "move", "value", "key", "add"]))
        if change == "add" or not fields:
            fields.append([draw(NAMES_IN_JSON), draw(ODD_JSON)])
            continue
        k = draw(st.integers(0, len(fields) - 1))
        if change == "drop":
            del fields[k]
        elif change == "double":
            fields.insert(draw(st.integers(0, len(fields))), list(fields[k]))
        elif change == "move":
            fields.insert(draw(st.integers(0, len(fields) - 1)), fields.pop(k))
        elif change == "key":
            fields[k] = [draw(NAMES_IN_JSON), fields[k][1]]
        elif isinstance(fields[k][1], str) and draw(st.booleans()) and re.search(r"\d+(?=[],])", fields[k][1]):
            fields[k] = [fields[k][0], re.sub(r"\d+(?=[],])", lambda _: draw(ODD_JSON), fields[k][1], count=1)]
        else:
            fields[k] = [fields[k][0], draw(ODD_JSON)]
    space = draw(st.sampled_from(["", "", " ", "\n\t"]))

    def spelled(value: Any) -> str:
        if isinstance(value, str):
            return value
        return "{" + f",{space}".join(f"{key}:{space}{spelled(inner)}" for key, inner in value) + "}"

    return (spelled(parts) + space).encode(), bytes(draw(st.sampled_from([40, 40, 40, 40, 39, 41, 16, 24, 0])))


@st.composite
def damaged(draw: Callable[[st.SearchStrategy[Any]], Any], whole: bytes) -> bytes:
    """Bytes of which a few are changed, taken out or put in."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place, length = draw(st.integers(0, max(len(raw) - 1, 0))), draw(st.integers(0, 3))
        raw[place : place + length] = draw(
            st.binary(max_size=3) | st.sampled_from(list(b'{}[]",:0-9e \\')).map(lambda b: bytes([b]))
        )
    return bytes(raw)


def assert_agreement(folder: Path, content: bytes) -> None:
    """What we accept the library accepts too, and finds the same in it; what we refuse we refuse in words.

    And it does not matter in what pieces the header is read.
    """
    path = folder / "file.safetensors"
    path.write_bytes(content)

    def read() -> Any:
        try:
            file = dare.TensorFile(path, str(path))
        except DareError:
            return None
        file.close()
        return file.tensors, file.metadata, file.header_sha256

    found = read()
    for size in (1, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dare, "JSON_PIECE", size)
            assert read() == found
    if found is not None:
        ours = {name: (info.dtype, list(info.shape)) for name, info in found[0].items()}
        assert ours == as_the_library_reads(path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=300, **FUZZED)
@given(value=ANY_JSON, indent=st.sampled_from([None, 0, 3]), ascii_only=st.booleans(), data=st.data())
def test_json_in_any_pieces_is_what_it_is_in_one(
    value: Any, indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]

    def taken(reader: dare.JsonReader) -> Any:
        opened = reader.peek()
        if opened == "{":
            return {name: taken(reader) for name in reader.members()}
        if opened == "[":
            return [taken(reader) for _ in reader.elements()]
        return reader.string(1000) if opened == '"' else reader.value(1000)

    for how in (taken, lambda reader: reader.value(100_000), lambda reader: reader.skip()):
        reader = dare.JsonReader(iter(pieces))
        found = how(reader)
        assert found == value or (found is None and reader.position)
        reader.end()
        if len(text) > 1 and isinstance(value, (str, list, dict)):
            short = dare.JsonReader(iter([text[:-1]]))
            with pytest.raises(ValueError, match=r"."):
                how(short)
    if text[:1] == '"':
        room = len(text) - 1
        with pytest.raises(ValueError, match="longer than"):
            dare.JsonReader(iter([*pieces, " " * 3000])).value(room)


def test_json_says_where_it_is_wrong_wherever_it_is_cut() -> None:
    text = '{"a":' + " " * 3000 + '[1, 2, x], "b": [' + "0," * 3000 + "0]}"
    for size in (1, 7, 1000, 100_000):
        reader = dare.JsonReader(text[k : k + size] for k in range(0, len(text), size))
        members = reader.members()
        assert next(members) == "a"
        with pytest.raises(ValueError, match=rf"Expecting value \(character {text.index('x'):,}\)"):
            reader.value(5000)


@pytest.mark.parametrize(
    "number", ["1" * 1200 + ".25", "0." + "1" * 1200 + "e-7", "1" * 1200, "-0." + "3" * 2000 + "E+10"]
)
def test_a_long_number_is_read_whole_wherever_it_is_cut(number: str) -> None:
    for cut in range(990, len(number) + 1):
        reader = dare.JsonReader(iter([number[:cut], number[cut:] + "," + " " * 9]))
        assert reader.value(len(number)) == json.loads(number)
        assert reader.take(",") == ","


@settings(max_examples=250, **FUZZED)
@given(made=mangled_headers())
def test_a_header_with_parts_moved_is_read_as_the_library_reads_it(tmp_path: Path, made: tuple[bytes, bytes]) -> None:
    assert_agreement(tmp_path, with_header(*made))


@settings(max_examples=250, **FUZZED)
@given(content=damaged(with_header(sound(__metadata__={"format": "pt"}))))
def test_a_file_with_bytes_changed_is_read_as_the_library_reads_it(tmp_path: Path, content: bytes) -> None:
    assert_agreement(tmp_path, content)


@settings(max_examples=200, **FUZZED)
@given(header=damaged(sound(__metadata__={"format": "pt"}).encode()), extra=st.binary(max_size=2))
def test_a_header_with_bytes_changed_is_read_as_the_library_reads_it(
    tmp_path: Path, header: bytes, extra: bytes
) -> None:
    assert_agreement(tmp_path, with_header(header, SOUND_DATA + extra * (len(extra) == 2)))


@pytest.mark.parametrize("dtype", [*dare.STORED_BITS, "F8_E4M3FN", "I4", "U4", "C128", "F128"])
def test_types_are_those_of_the_library_with_the_same_sizes(tmp_path: Path, dtype: str) -> None:
    for size in (0, 1, 2, 3, 4, 6, 8, 16):
        header = json.dumps({"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, size * 8 // 8]}})
        assert_agreement(tmp_path, with_header(header, bytes(size)))
    theirs = [
        size
        for size in range(65)
        if size_is_taken(tmp_path, json.dumps({"w": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}), size)
    ]
    assert theirs == ([dare.STORED_BITS[dtype]] if dtype in dare.STORED_BITS else [])


def size_is_taken(folder: Path, header: str, size: int) -> bool:
    (folder / "sized.safetensors").write_bytes(with_header(header, bytes(size)))
    return as_the_library_reads(folder / "sized.safetensors") is not None


# ---------------------------------------------------------------------------------------------------------------------
# Any index, adapter, configuration or recipe: an answer, never a crash
# ---------------------------------------------------------------------------------------------------------------------

ODD_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=[]), max_size=6),
    st.sampled_from(
        ["", ".", "..", "~", "~\0", "~nobody-of-that-name", "a\0b", "\ud800", "\udcff", "a\nb", "\x1b[2J", "\u202e"]
    ),
    st.sampled_from(["x" * 5000, "x" * 300, "CON", "a/b/c", "./x", "C:x", "out.safetensors", "base.safetensors"]),
)
ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.integers(0, 4) | ODD_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS, inner, max_size=3),
    max_leaves=6,
)


def answered(capsys: pytest.CaptureFixture[str], arguments: list[str], output: Path | None = None) -> int:
    """Run the command on anything: it must do what it was asked to, or say in one line why it cannot."""
    capsys.readouterr()
    status = dare.main(arguments)
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert status in (0, 1, 2)
    assert len(errors) == (status != 0), printed.err
    assert not any(error.startswith("error: unexpected") for error in errors), printed.err
    assert "Traceback" not in printed.err
    assert calm(printed.out + printed.err)
    if output is not None:
        if status == 0:
            assert tensors_in(output) if output.is_dir() else load_file(output)
        else:
            assert not output.exists()
            assert not list(output.parent.glob("*.partial"))
        remove_made(output)
    return status


def remove_made(output: Path) -> None:
    for path in [*output.glob("*"), output] if output.is_dir() else [output]:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


@pytest.fixture
def without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where dare-merge[hub] is not installed, so that no name makes a test ask the network."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)


@pytest.fixture
def small(tmp_path: Path, without_the_hub: None) -> tuple[Path, Path]:
    """A base file and a sharded fine-tune of it, as small as can be."""
    base = {"layer.weight": torch.ones(4, 3), "layer.bias": torch.ones(4)}
    [path] = save(tmp_path, base=base)
    return path, save_sharded(tmp_path / "model", finetune(base, 1), [["layer.weight"], ["layer.bias"]])


SHARD = "model-00001-of-00002.safetensors"


@settings(max_examples=60, **FUZZED)
@given(index=ODD_VALUES | st.fixed_dictionaries({"weight_map": ODD_VALUES}))
def test_any_json_as_an_index_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], index: Any
) -> None:
    (small[1] / INDEX).write_text(json.dumps(index))
    output = small[0].with_name("out.safetensors")
    answered(capsys, ["-b", str(small[0]), "-m", str(small[1]), "-o", str(output)], output)
    answered(capsys, ["-b", str(small[1] / INDEX), "-m", str(small[0]), "-o", str(output)], output)


@settings(max_examples=80, **FUZZED)
@given(
    tensor=st.sampled_from(["layer.weight", "layer.bias", "other"]) | ODD_TEXTS,
    file=st.sampled_from([SHARD, f"./{SHARD}", f"x/../{SHARD}", f"{SHARD}/", INDEX, f"{SHARD}/x"]) | ODD_VALUES,
    drop=st.booleans(),
)
def test_any_entry_of_an_index_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tensor: str, file: Any, drop: bool
) -> None:
    index = json.loads((small[1] / INDEX).read_text())
    shards = {"layer.weight": SHARD, "layer.bias": SHARD.replace("00001", "00002", 1)}
    index["weight_map"] = ({} if drop else shards) | {tensor: file}
    (small[1] / INDEX).write_text(json.dumps(index))
    output = small[0].with_name("out.safetensors")
    answered(capsys, ["-b", str(small[0]), "-m", str(small[1]), "-o", str(output)], output)


def test_an_index_that_names_what_no_file_can_be_called_is_refused(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("\ud800", "\udfff.safetensors", "x" * 5000, "y/" * 3000 + "z"):
        (small[1] / INDEX).write_text(json.dumps({"weight_map": {"layer.weight": name}}))
        arguments = ["-b", str(small[0]), "-m", str(small[1]), "-o", str(small[0].with_name("out.safetensors"))]
        refused_in_two_lines(capsys, arguments)


ADAPTER_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "peft_type": st.sampled_from(["LORA", "LOHA"]),
    "r": st.integers(0, 4),
    "lora_alpha": st.floats() | st.integers(-(10**400), 10**400),
    "use_rslora": st.booleans(),
    "fan_in_fan_out": st.booleans(),
    "rank_pattern": st.dictionaries(
        st.sampled_from(
            ["layer", "l.*r", "(", "[", "[[l]ayer", "a{99999999999}", "(?i)layer", "a**", "\\", "(?P<n>l", ")|("]
        )
        | st.text("()[]{}*+?|\\^$.layer12,-<=!:P", max_size=8),
        st.integers(0, 3) | ODD_VALUES,
        max_size=3,
    ),
    "alpha_pattern": st.dictionaries(st.text("()[]*+?|\\^$.layer", max_size=6), st.floats() | ODD_VALUES, max_size=2),
    "init_lora_weights": st.sampled_from([True, False, "gaussian", "pissa", "loftq"]),
    "target_modules": st.just(["layer"]),
    "bias": st.sampled_from(["none", "all"]),
    "base_model_name_or_path": ODD_TEXTS,
    **dict.fromkeys(dare.OTHER_ADAPTERS, st.sampled_from([None, False, [], {}, 0])),
}
GOOD_ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.filterwarnings("ignore:Possible set:FutureWarning")
@settings(max_examples=80, **FUZZED)
@given(
    table=st.one_of(
        *(
            st.tuples(st.just(key), values | ODD_VALUES).map(lambda pair: {pair[0]: pair[1]})
            for key, values in ADAPTER_KEYS.items()
        ),
        st.fixed_dictionaries({}, optional=ADAPTER_KEYS),
    )
)
def test_any_adapter_configuration_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], table: dict[str, Any]
) -> None:
    adapter = write_adapter(small[0].with_name("adapter"), low_rank("layer", (4, 3)))
    (adapter / "adapter_config.json").write_text(json.dumps(GOOD_ADAPTER | table))
    output = small[0].with_name("out.safetensors")
    answered(capsys, ["-b", str(small[0]), "-m", str(adapter), "-o", str(output)], output)


@settings(max_examples=40, **FUZZED)
@given(text=ODD_VALUES.map(json.dumps).map(str.encode) | damaged(json.dumps(GOOD_ADAPTER).encode()))
def test_any_json_as_an_adapter_configuration_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    adapter = write_adapter(small[0].with_name("adapter"), low_rank("layer", (4, 3)))
    (adapter / "adapter_config.json").write_bytes(text)
    output = small[0].with_name("out.safetensors")
    answered(capsys, ["-b", str(small[0]), "-m", str(adapter), "-o", str(output)], output)


@settings(max_examples=60, **FUZZED)
@given(
    names=st.lists(
        st.tuples(
            st.sampled_from(["", "base_model.model.", "base_model.model.base_model.model.", "."]),
            st.sampled_from(["layer", "layer.weight", "", ".", "a\nb", "lora_A", "layer.lora_A", "x.layer"]),
            st.sampled_from(["", ".lora_A.weight", ".lora_B.weight", ".lora_A", ".lora_embedding_A",
                             ".lora_B.default.weight", ".modules_to_save.weight", ".base_layer.weight",
                             ".lora_A.weight.weight", ".bias"]),
            st.sampled_from([(2, 3), (4, 2), (2,), (), (0, 0), (2, 0), (4, 3), (2, 3, 1, 1)]),
        ),
        min_size=1,
        max_size=4,
    )
)  # fmt: skip
def test_any_names_in_an_adapter_are_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], names: list[tuple[str, str, str, tuple[int, ...]]]
) -> None:
    tensors = {"".join(parts) or "x": torch.ones(shape) for *parts, shape in names}
    adapter = write_adapter(small[0].with_name("adapter"), tensors)
    output = small[0].with_name("out.safetensors")
    answered(capsys, ["-b", str(small[0]), "-m", str(adapter), "-o", str(output)], output)


CONFIG_TEXT = """\
[models]
base_file = "base.safetensors"
merge_files = ["model/model.safetensors.index.json", 'model']
output_file = "out.safetensors"
# tokenizer_from = "model"

[dare]
method = "linear"
drop_rate = [0.5, 0.25]
weights = [0.5, 0.5]
lambda_coeff = 1.0
mismatch = "error"
max_shard_size = "5GB"
seed = 42
verbose = true

[[rules]]
match = ["*bias*", "lay*"]
drop_rate = 0.5
"""


@settings(max_examples=80, **FUZZED)
@given(text=damaged(CONFIG_TEXT.encode()) | st.text(max_size=30).map(str.encode) | st.binary(max_size=20))
def test_any_text_as_a_configuration_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    config, output = small[0].with_name("config.toml"), small[0].with_name("fixed.safetensors")
    config.write_bytes(text)
    answered(capsys, ["-c", str(config), "-o", str(output)], output)


TOML_VALUES = st.recursive(
    st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.integers(0, 3) | st.datetimes()
    | ODD_TEXTS.filter(lambda text: text.isprintable() or not any(0xD800 <= ord(letter) < 0xE000 for letter in text)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
LIKELY_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "method": st.sampled_from(["linear", "ties", "slerp", "LINEAR"]),
    "drop_rate": st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=2, max_size=2),
    "weights": st.lists(st.floats(-1e308, 1e308) | st.integers(-1, 3), max_size=3),
    "lambda_coeff": st.floats() | st.integers(-(10**400), 10**400),
    "rescale": st.booleans(),
    "rescale_q": st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=2, max_size=2),
    "keep_ratio": st.floats(0, 1),
    "slerp_t": st.floats(0, 1),
    "dtype": st.sampled_from(["float32", "bfloat16", "float8"]),
    "mismatch": st.sampled_from(["error", "overlap", "base"]),
    "max_shard_size": st.sampled_from(["1", "1B", "5 kb", "9" * 15 + "TiB", "0.0001KB", "-1", "\u0661GB"])
    | st.integers(),
    "delta_threshold": st.floats() | st.integers(0, 10**400),
    "seed": st.integers(0, 2**63) | st.just(2**63 - 1),
    "threads": st.integers(-1, 3) | st.just(2**63 - 1),
    "verbose": st.booleans(),
}


@settings(max_examples=100, **FUZZED)
@given(
    wanted=st.one_of(
        *(
            st.tuples(st.just(key), values | TOML_VALUES).map(lambda pair: {pair[0]: pair[1]})
            for key, values in LIKELY_VALUES.items()
        ),
        st.fixed_dictionaries({}, optional=LIKELY_VALUES),
    ),
    rules=st.just([])
    | st.lists(
        st.fixed_dictionaries(
            {"match": st.text("*?[]!-layer.", max_size=6) | TOML_VALUES},
            optional={key: LIKELY_VALUES[key] | TOML_VALUES for key in dare.RULE_SETTINGS},
        ),
        max_size=2,
    ),
    folder=st.booleans(),
)
def test_any_setting_in_a_configuration_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], wanted: dict[str, Any], rules: list[Any], folder: bool
) -> None:
    import tomli_w

    output = small[0].with_name("out" if folder else "out.safetensors")
    named = {"base_file": "base.safetensors", "merge_files": ["model", "model"], "output_file": output.name}
    config = small[0].with_name("config.toml")
    config.write_text(tomli_w.dumps({"models": named, "dare": wanted} | ({"rules": rules} if rules else {})))
    answered(capsys, ["-c", str(config)], output)


@settings(max_examples=80, **FUZZED)
@given(
    key=st.sampled_from(["base_file", "merge_files", "tokenizer_from", "recipe", "version", "inputs", "mask", "files"]),
    value=TOML_VALUES | st.lists(TOML_VALUES, min_size=1, max_size=2),
)
def test_any_model_or_recipe_in_a_configuration_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    import tomli_w

    tables: dict[str, Any] = {"models": {"base_file": "base.safetensors", "merge_files": ["model"]}}
    if key in ("base_file", "merge_files", "tokenizer_from"):
        tables["models"][key] = value
    else:
        tables["recipe"] = value if key == "recipe" else {key: value}
    config, output = small[0].with_name("config.toml"), small[0].with_name("out")
    config.write_text(tomli_w.dumps(tables))
    answered(capsys, ["-c", str(config), "-o", str(output)], output)


def test_paths_that_cannot_be_are_refused_wherever_they_are_given(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["~\\u0000", "a\\u0000b", "x" * 5000, "~" + "x" * 5000, "base.safetensors/x", "y/" * 3000 + "z"]
    for key in ("base_file", "merge_files", "output_file", "tokenizer_from"):
        for path in paths:
            named = {"base_file": '"base.safetensors"', "merge_files": '["model"]', "output_file": '"out"'}
            named[key] = f'["{path}"]' if key == "merge_files" else f'"{path}"'
            config = small[0].with_name("config.toml")
            config.write_text("[models]\n" + "\n".join(f"{key} = {value}" for key, value in named.items()))
            assert answered(capsys, ["-c", str(config)], small[0].with_name("out")) == 1, (key, path[:20])


@pytest.mark.parametrize("path", ["x" * 5000, "y/" * 3000 + "z", "base.safetensors/x", "", "."])
def test_a_path_that_cannot_be_is_not_verified(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(small[0].parent)
    assert answered(capsys, ["--verify", path]) in (1, 2)


@pytest.mark.parametrize(
    "rule",
    ["a:drop_rate=" + "1" * 5000, "a:drop_rate=" + "[" * 5000, "a:" + "b." * 5000 + "c=1", "a:drop_rate=0.5}\nx={y=1"],
    ids=["digits", "lists", "keys", "lines"],
)
def test_a_rule_given_by_a_flag_cannot_break_the_command(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    output = small[0].with_name("out.safetensors")
    arguments = ["-b", str(small[0]), "-m", str(small[1]), "-o", str(output), "--rule", rule]
    assert answered(capsys, arguments, output) in (0, 2)


def with_recipe(path: Path, recipe: str) -> None:
    """The same file with another recipe in its metadata."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"]["dare_recipe"] = recipe
    path.write_bytes(with_header(json.dumps(header), raw[8 + length :]))


@settings(max_examples=80, **FUZZED)
@given(data=st.data())
def test_any_recipe_in_a_merged_file_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    output = small[0].with_name("out.safetensors")
    if not output.exists():
        run_merge(small[0], [small[1]], output)
        output.with_suffix(".recipe").write_text(metadata(output)["dare_recipe"])
    recipe = output.with_suffix(".recipe").read_bytes()
    text = data.draw(damaged(recipe) | st.text(max_size=20).map(str.encode)).decode(errors="replace")
    with_recipe(output, text)
    answered(capsys, ["--verify", str(output)])
    config = small[0].with_name("recipe.toml")
    config.write_text(text)
    again = small[0].with_name("again.safetensors")
    answered(capsys, ["-c", str(config), "-o", str(again)], again)


@settings(max_examples=60, **FUZZED)
@given(
    key=st.sampled_from(["inputs", "version", "seeds", "mask", "file", "size", "base_file", "merge_files"]),
    value=TOML_VALUES,
)
def test_any_value_in_a_stored_recipe_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    import tomli_w

    output = small[0].with_name("out.safetensors")
    if not output.exists():
        run_merge(small[0], [small[1]], output)
        output.with_suffix(".recipe").write_text(metadata(output)["dare_recipe"])
    tables = tomllib.loads(output.with_suffix(".recipe").read_text())
    home: Any = tables["recipe"]["inputs"][1] if key in ("file", "size") else tables["recipe"]
    (tables["models"] if key.endswith(("_file", "_files")) else home)[key] = value
    with_recipe(output, tomli_w.dumps(tables))
    answered(capsys, ["--verify", str(output)])


@pytest.mark.parametrize(
    "recipe",
    [
        "recipe = 3",
        "[recipe]\nfiles = 3",
        "[recipe]\nfiles = [[1], {}]",
        "a = " + "[" * 50_000,
        "\x00",
        "a." * 3000 + "b=1",
    ],
    ids=["number", "files", "lists", "nested", "zero", "keys"],
)
def test_a_hostile_recipe_in_a_directory_does_not_let_it_be_replaced(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    output = small[0].with_name("out")
    save_directory(output, {"w": torch.ones(3)})
    (output / "dare_recipe.toml").write_text(recipe)
    before = snapshot(output)
    error = refused_in_two_lines(capsys, ["-b", str(small[0]), "-m", str(small[1]), "-o", str(output)])
    assert "out" in error
    assert snapshot(output) == before
    assert answered(capsys, ["--verify", str(output)]) in (1, 2)


@pytest.mark.parametrize(
    "text",
    ['{"a": "\\ud800"}', '{"a_config": ' * 400 + "{}" + "}" * 400, '{"a_config": ' * 900 + "{}" + "}" * 900,
     "[" * 100_000, '{"dtype": 3, "text_config": [], "x": NaN}', "\ufeff{}", "",
     '{"torch_dtype": {}, "tie_word_embeddings": "yes"}'],
    ids=["surrogate", "nested 400", "nested 900", "nested 100,000", "types", "mark", "nothing", "table"],
)  # fmt: skip
def test_any_config_json_of_the_base_is_answered(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder = save_directory(small[0].with_name("folder"), load_file(small[0]))
    (folder / "config.json").write_text(text)
    output = small[0].with_name("out")
    arguments = ["-b", str(folder), "-m", str(small[1]), "-o", str(output)]
    answered(capsys, [*arguments, "--dtype", "bfloat16"], output)
    answered(capsys, arguments, output)


@settings(max_examples=40, **FUZZED)
@given(
    table=ODD_VALUES
    | st.fixed_dictionaries(
        {}, optional={"model": ODD_VALUES | st.fixed_dictionaries({"vocab": ODD_VALUES}), "added_tokens": ODD_VALUES}
    )
)
def test_any_tokenizer_is_answered(small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], table: Any) -> None:
    [base] = save(small[0].parent, embedded={"embed_tokens.weight": torch.ones(4, 3)})
    [model] = save(small[0].parent, tuned={"embed_tokens.weight": torch.ones(4, 3) + 1e-3})
    folder = small[0].with_name("tokenizer")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(table))
    output = small[0].with_name("out")
    answered(capsys, ["-b", str(base), "-m", str(model), "--tokenizer-from", str(folder), "-o", str(output)], output)


def test_a_token_without_a_number_is_no_crash(small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    [base] = save(small[0].parent, embedded={"embed_tokens.weight": torch.ones(4, 3)})
    (small[1] / "tokenizer.json").write_text('{"added_tokens": [{"content": "x"}]}')
    output = small[0].with_name("out")
    arguments = ["-b", str(base), "-m", str(base), "--tokenizer-from", str(small[1]), "-o", str(output)]
    assert answered(capsys, arguments, output) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only here may names be any bytes")
def test_a_directory_with_a_file_whose_name_is_no_text_is_merged(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_directory(small[0].with_name("folder"), load_file(small[0]), model_type="x")
    (folder / os.fsdecode(b"n\xff.txt")).write_text("a licence")
    output = small[0].with_name("out")
    assert answered(capsys, ["-b", str(folder), "-m", str(small[1]), "-o", str(output)]) == 0
    assert (output / os.fsdecode(b"n\xff.txt")).read_text() == "a licence"
    assert answered(capsys, ["--verify", str(output)]) == 0
    assert answered(capsys, ["-b", str(folder), "-m", str(small[1]), "-o", str(output), "--seed", "1"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Names that talk to terminals
# ---------------------------------------------------------------------------------------------------------------------

TERMINAL_TRICKS = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "return": "a\rerror: b",
    "lines": "a\nerror: b\nhint: c",
    "bell": "\x07\x08\x7f",
    "C1": "\x9b31m\x85\x9d0;x\x9c",
    "bidi": "\u202e\u2066evil\u200f",
    "separators": "a\u2028b\u2029c\x0b\x0c\x1cd",
    "tags": "\U000e0041\ufeff\u00ad",
}
PLAIN_TRICK = "plain"


def spoken(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> tuple[int, int]:
    """How many lines the command prints and how many it complains in; nothing else may reach the terminal."""
    capsys.readouterr()
    assert dare.main(arguments) == status
    printed = capsys.readouterr()
    assert calm(printed.out + printed.err)
    assert "unexpected" not in printed.err
    assert len(printed.out.splitlines()) == printed.out.count("\n")
    assert len(printed.err.splitlines()) == printed.err.count("\n")
    return printed.out.count("\n"), printed.err.count("\n")


@pytest.mark.skipif(os.name == "nt", reason="such names cannot be")
@pytest.mark.parametrize("trick", TERMINAL_TRICKS)
def test_no_name_of_a_file_reaches_the_terminal_as_more_than_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trick: str
) -> None:
    base = random_model(shapes={"w": (30, 5), "b": (5,)})
    lines = []
    for word in (PLAIN_TRICK, TERMINAL_TRICKS[trick]):
        folder = tmp_path / f"in {word}"
        folder.mkdir()
        named = {f"base{word}": base, f"model{word}": finetune(base, 1, 1.0), f"nan{word}": {"w": base["w"] * math.nan}}
        named |= {f"other{word}": {"x": base["w"]}, f"shape{word}": {"w": base["w"][:7], "extra": base["b"]}}
        paths = dict(zip(("base", "model", "nan", "other", "shape"), save(folder, **named), strict=True))
        (folder / f"broken{word}.safetensors").write_bytes(b"nothing")
        (folder / f"config{word}.toml").write_text("[dare]\nx = 1")
        (folder / f"no{word}.toml").write_bytes(b"\xff")
        (folder / f"empty{word}").mkdir()
        (folder / f"several{word}").mkdir()
        save_file(base, folder / f"several{word}" / f"one{word}.safetensors")
        sharded = save_sharded(folder / f"sharded{word}", base, [["w"], ["b"]])
        (sharded / "model-00002-of-00002.safetensors").unlink()
        source = ["-b", str(paths["base"]), "-m"]
        output = ["-o", str(folder / f"out{word}.safetensors")]
        runs: list[tuple[list[str], int]] = [
            ([*source, str(paths["model"]), *output, "--dry-run"], 0),
            ([*source, str(paths["model"]), *output], 0),
            (["--verify", output[1]], 0),
            ([*source, str(paths["base"]), str(paths["model"]), str(paths["model"]), *output], 0),
            (["--verify", output[1], "-b", str(paths["model"])], 1),
            ([*source, str(paths["shape"]), *output, "--mismatch", "overlap"], 0),
            ([*source, str(paths["model"]), "-o", str(folder / f"dir{word}")], 0),
            (["--verify", str(folder / f"dir{word}")], 0),
            ([*source, str(paths["model"]), "-o", str(paths["model"])], 2),
            ([*source, str(paths["model"]), "-o", str(folder / f"no{word}" / "x.safetensors")], 1),
            ([*source, str(paths["model"]), "-o", str(folder / f"x{word}.bin")], 2),
            ([*source, str(paths["model"]), "-o", str(paths["nan"])], 1),
            ([*source, str(paths["nan"]), *output], 1),
            ([*source, str(paths["other"]), *output], 1),
            ([*source, str(paths["shape"]), *output], 1),
            ([*source, str(folder / f"broken{word}.safetensors"), *output], 1),
            ([*source, str(folder / f"absent{word}.safetensors"), *output], 1),
            ([*source, str(folder / f"empty{word}"), *output], 1),
            ([*source, str(folder / f"several{word}"), *output], 1),
            ([*source, str(sharded), *output], 1),
            (["-c", str(folder / f"config{word}.toml")], 2),
            (["-c", str(folder / f"no{word}.toml")], 2),
            (["-c", str(folder / f"absent{word}.toml")], 2),
            (["--verify", str(folder / f"empty{word}")], 1),
            (["--verify", str(paths["base"])], 1),
        ]
        lines.append([spoken(capsys, *each) for each in runs])
    assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("trick", TERMINAL_TRICKS)
def test_no_name_in_a_file_reaches_the_terminal_as_more_than_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trick: str
) -> None:
    lines = []
    for word in (PLAIN_TRICK, TERMINAL_TRICKS[trick]):
        base = random_model(shapes={f"w{word}": (30, 5), f"layer{word}.weight": (6, 4)})
        more = {f"i{word}": torch.arange(3), f"q{word}.weight": torch.ones(3, dtype=torch.int8)}
        large = finetune(base, 1, 0.02)
        models: dict[str, Tensors] = {"base": base, "large": large | {f"extra{word}": torch.ones(2)}}
        models |= {"lacks": {f"w{word}": large[f"w{word}"]}, "nan": {f"w{word}": base[f"w{word}"] * math.inf}}
        models |= {"rows": {f"w{word}": base[f"w{word}"][:7]}, "kinds": {f"w{word}": base[f"w{word}"].to(torch.int64)}}
        models |= {"more": base | more, "copied": base | more | {f"i{word}": torch.arange(3) + 1}}
        models |= {"none": {f"z{word}": torch.ones(2)}}
        save(tmp_path, **models)
        name = json.dumps(f"w{word}")
        header = f'{{{name}: {{"dtype": {json.dumps(word)}, "shape": [1], "data_offsets": [0, 4]}}}}'
        (tmp_path / "type.safetensors").write_bytes(with_header(header, bytes(4)))
        (tmp_path / "twice.safetensors").write_bytes(with_header(f"{{{name}: {{}}, {name}: {{}}}}", bytes(4)))
        (tmp_path / "entry.safetensors").write_bytes(with_header(f"{{{name}: {{}}}}", bytes(4)))
        header = header.replace(json.dumps(word), '"F32"', 1).replace("[0, 4]", "[1, 5]")
        (tmp_path / "hole.safetensors").write_bytes(with_header(header, bytes(5)))
        index = tmp_path / "index.json"
        index.write_text(json.dumps({"weight_map": {f"w{word}": f"{word}.safetensors"}}))
        modules = {f"layer{word}": (torch.ones(2, 4) * 1e-3, torch.ones(6, 2))}
        adapter = lora_directory(tmp_path / "adapter", modules)
        odd = lora_directory(tmp_path / "odd", {f"gone{word}": modules[f"layer{word}"]})
        kind = lora_directory(tmp_path / "kind", modules, peft_type=word)
        rank = lora_directory(tmp_path / "rank", modules, rank_pattern={f".*{word}": 3}, lora_alpha=1)
        pattern = lora_directory(tmp_path / "pattern", modules, rank_pattern={f"({word}": 3})

        def run(model: str | Path, status: int, *flags: str, base: str = "base") -> tuple[int, int]:
            path = model if isinstance(model, Path) else tmp_path / f"{model}.safetensors"
            arguments = ["-b", str(tmp_path / f"{base}.safetensors"), "-m", str(path), *flags]
            return spoken(capsys, [*arguments, "-o", str(tmp_path / "out.safetensors")], status)

        runs = [run(model, 0) for model in ("large", "lacks")]
        runs += [run(model, 0, "--dry-run") for model in ("large", "lacks")]
        runs += [run("copied", 0, base="more"), run("rows", 0, "--mismatch", "overlap")]
        runs += [run("large", 0, "--rule", f"{word}*:lambda_coeff=0.5")]
        runs += [run(model, 1) for model in ("nan", "rows", "kinds", "none", "type", "twice", "entry", "hole", "more")]
        runs += [run(index, 1), run(adapter, 0), run(odd, 1), run(kind, 1), run(rank, 1), run(pattern, 1)]
        lines.append(runs)
    assert lines[0] == lines[1]


@pytest.mark.parametrize("trick", TERMINAL_TRICKS)
def test_no_word_of_a_configuration_reaches_the_terminal_as_more_than_text(
    small: tuple[Path, Path], capsys: pytest.CaptureFixture[str], trick: str
) -> None:
    import tomli_w

    config, output = small[0].with_name("config.toml"), small[0].with_name("out.safetensors")
    lines = []
    for word in (PLAIN_TRICK, TERMINAL_TRICKS[trick]):
        named = {"base_file": "base.safetensors", "merge_files": ["model"]}
        tables: list[tuple[int, dict[str, Any]]] = [
            (2, {word: {}}),
            (2, {"dare": {word: 1}}),
            (2, {"dare": {"method": word}}),
            (2, {"dare": {"drop_rate": [word]}}),
            (2, {"dare": {"drop_rate": {word: word}}}),
            (2, {"models": {word: 1}}),
            (2, {"models": {"merge_files": [{word: 1}]}}),
            (1, {"models": named | {"base_file": word}}),
            (1, {"models": named | {"merge_files": [word]}}),
            (1, {"models": named | {"tokenizer_from": word}}),
            (2, {"rules": [word]}),
            (2, {"rules": [{word: 1}]}),
            (0, {"models": named, "rules": [{"match": word, "drop_rate": 0.5}]}),
            (2, {"recipe": {"mask": word}}),
            (1, {"models": named, "recipe": {"inputs": [{"size": word}]}}),
        ]
        said = []
        for status, table in tables:
            config.write_text(tomli_w.dumps(table))
            said.append(spoken(capsys, ["-c", str(config), "-o", str(output)], status))
        config.write_text(f"[dare]\nx = {word}")
        said.append(spoken(capsys, ["-c", str(config)], 2))
        for flags in (
            [f"--{word}"], [word], ["--method", word], ["--seed", word], ["--drop-rate", word], ["--rule", word],
            ["--rule", f"{word}:{word}"], ["--rule", f"a:{json.dumps(word)}=1"], [f"--force={word}"], ["--dtype", word],
        ):  # fmt: skip
            said.append(spoken(capsys, flags, 2))
        lines.append(said)
    assert lines[0] == lines[1]


def test_what_python_thinks_of_a_pattern_does_not_reach_the_terminal(small: tuple[Path, Path]) -> None:
    """It warns of patterns like [[a], in lines of its own with a piece of our source."""
    adapter = lora_directory(
        small[0].with_name("adapter"),
        {"layer": (torch.ones(2, 3) * 1e-4, torch.ones(4, 2))},
        rank_pattern={"[[a]": 3, "a--b": 3, "[a||b]": 3},
    )
    output = small[0].with_name("out.safetensors")
    done = command("-q", "-b", small[0], "-m", adapter, "-o", output)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# Headers that are all there is room for
# ---------------------------------------------------------------------------------------------------------------------

MEASURED_RUN = """
import sys, time, dare
started = time.perf_counter()
status = dare.main(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(status, peak, time.perf_counter() - started)
"""
HEADER_ROOM = 50_000_000
USUAL_BOUND = 200 * 1024  # KiB: no more than the first merge, which compiles, takes anyway
OF_W = '{"w":{"dtype":"F32","shape":['
OF_NOTHING = '"dtype":"F32","shape":[0],"data_offsets":[0,0]'
LONG = "x" * 65_500
LARGE_HEADERS: dict[str, Callable[[], str]] = {
    "a million tiny entries": lambda: (
        "{" + ",".join(f'"{k}":{{"dtype":"F32","shape":[1],"d":[]}}' for k in range(1_150_000)) + "}"
    ),
    "sound entries and one that is not": lambda: (
        "{" + ",".join(f'"{k}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for k in range(950_000)) + ',"x":0}'
    ),
    "a shape of zeros": lambda: OF_W + "0," * 24_999_000 + '0],"data_offsets":[0,1]}}',
    "a shape of lists": lambda: OF_W + "[]," * 16_600_000 + '0],"data_offsets":[0,0]}}',
    "a shape of tables": lambda: OF_W + "{}," * 16_600_000 + '0],"data_offsets":[0,0]}}',
    "a name": lambda: '{"' + "x" * (HEADER_ROOM - 100) + '":0}',
    "a name of escapes": lambda: '{"' + "\\u0007" * (HEADER_ROOM // 6 - 100) + '":0}',
    "long names with a wide letter": lambda: (
        "{" + ",".join(f'"\U0001f600{k}{LONG}":{{{OF_NOTHING}}}' for k in range(HEADER_ROOM // 65_600)) + "}"
    ),
    "metadata of many keys": lambda: '{"__metadata__":{' + ",".join(f'"{k}":""' for k in range(4_000_000)) + ',"x":0}}',
    "metadata of one value": lambda: '{"__metadata__":{"a":"' + "x" * HEADER_ROOM + '"}}',
    "metadata of one value with a wide letter": lambda: '{"__metadata__":{"a":"\U0001f600' + "x" * HEADER_ROOM + '"}}',
    "metadata of lists": lambda: '{"__metadata__":{"a":' + "[]," * 16_600_000 + "[]}}",
    "white space": lambda: "{" + " " * HEADER_ROOM,
    "white space behind": lambda: "{}" + " " * HEADER_ROOM + "x",
    "lists in each other": lambda: '{"w":' + "[" * HEADER_ROOM,
    "tables in each other": lambda: '{"w":' * (HEADER_ROOM // 5),
    "sides of many digits": lambda: OF_W + "9" * HEADER_ROOM + '],"data_offsets":[0,1]}}',
}
# Other files that belong to a model: where they lie, and what they hold.
LARGE_FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "an index of many tensors": (
        INDEX,
        lambda: '{"weight_map":{' + ",".join(f'"{k}":"model.safetensors"' for k in range(1_700_000)) + "}}",
    ),
    "an index of many files": (
        INDEX,
        lambda: '{"weight_map":{' + ",".join(f'"{k}":"{k}.safetensors"' for k in range(1_700_000)) + "}}",
    ),
    "an index of lists": (INDEX, lambda: '{"metadata":[' + "[]," * 16_600_000 + "[]]}"),
    "an index of keys": (INDEX, lambda: "{" + ",".join(f'"{k}":0' for k in range(4_500_000)) + "}"),
    "an index of long keys with a wide letter": (
        INDEX,
        lambda: "{" + ",".join(f'"\U0001f600{k}{LONG}":0' for k in range(HEADER_ROOM // 65_600)) + "}",
    ),
    "an index of long names with a wide letter": (
        INDEX,
        lambda: (
            '{"weight_map":{' + ",".join(f'"{k}":"\U0001f600{k}{LONG}"' for k in range(HEADER_ROOM // 65_600)) + "}}"
        ),
    ),
    "an index of tables for names": (
        INDEX,
        lambda: '{"weight_map":{' + ",".join(f'"{k}":[' + "[]," * 20_000 + "[]]" for k in range(800)) + "}}",
    ),
    "an index without end": (INDEX, lambda: '{"' + "x" * HEADER_ROOM),
    "a configuration of lists": ("adapter_config.json", lambda: '{"peft_type":[' + "[]," * 16_600_000 + "[]]}"),
    "a configuration of short lists": ("adapter_config.json", lambda: '{"a":[' + "[]," * 5_000_000 + "[]]}"),
    "a configuration of text": ("adapter_config.json", lambda: '{"a":"\U0001f600' + "x" * HEADER_ROOM + '"}'),
    "a configuration of less text": ("adapter_config.json", lambda: '{"a":"\U0001f600' + "x" * 16_000_000 + '"}'),
}


def measured(
    folder: Path, content: str, timeout: float, file: str = "model.safetensors"
) -> tuple[int, int, float, str]:
    """Merge with a fine-tune that has this header, in a process of its own: status, peak KiB, seconds and stderr."""
    arguments = sound_models(folder)
    if file == "model.safetensors":
        (folder / file).write_bytes(with_header(content, b""))
    else:
        (folder / "odd").mkdir()
        (folder / "odd" / file).write_text(content, encoding="utf-8")
        (folder / "odd" / "adapter_model.safetensors").write_bytes(with_header(sound()))
        arguments = [argument.replace("model.safetensors", "odd") for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED_RUN, *arguments], cwd=HERE, capture_output=True, text=True, timeout=timeout
    )
    status, peak, seconds = done.stdout.split()
    return int(status), int(peak), float(seconds), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", [*LARGE_HEADERS, *LARGE_FILES])
def test_50_mb_of_nonsense_are_refused_in_the_usual_memory(tmp_path: Path, kind: str) -> None:
    file, made = LARGE_FILES[kind] if kind in LARGE_FILES else ("model.safetensors", LARGE_HEADERS[kind])
    status, peak, seconds, error = measured(tmp_path, made(), 120, file)
    print(f"\n{kind}: {peak / 1024:.0f} MiB in {seconds:.1f} s, {len(error):,} characters of error")
    assert status == 1, error
    assert error.count("\n") == 2
    assert not error.startswith("error: unexpected")
    assert peak < USUAL_BOUND


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_many_files_hold_that_is_not_needed_is_not_kept(tmp_path: Path) -> None:
    """The metadata of 20 shards, the configurations of five models, and one that would grow when it is written."""

    def peak_of(*arguments: str) -> int:
        run = [sys.executable, "-c", MEASURED_RUN, "-q", *arguments, "-o", str(tmp_path / "out")]
        done = subprocess.run(run, cwd=HERE, capture_output=True, text=True)
        status, peak, _ = done.stdout.split()
        assert int(status) in (0, 1), done.stderr
        assert "unexpected" not in done.stderr
        return int(peak)

    wide = "\U0001f600" + "x" * 8_000_000
    folders = []
    for k in range(5):
        folders.append(tmp_path / f"model {k}")
        folders[-1].mkdir()
        (folders[-1] / "model.safetensors").write_bytes(with_header(sound()))
        (folders[-1] / "config.json").write_text(f'{{"a":"{wide}{wide[1:]}"}}', encoding="utf-8")
    command("-q", "-b", folders[0] / "model.safetensors", "-m", folders[0], "-o", tmp_path / "first.safetensors")
    assert peak_of("-b", str(folders[0]), "-m", *map(str, folders[1:]), "--force") < USUAL_BOUND
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for k in range(20):
        header = f'{{"__metadata__":{{"a":"{wide}"}},"{k}":{{{OF_NOTHING}}}}}'
        (sharded / f"{k}.safetensors").write_bytes(with_header(header, b""))
    index = {"weight_map": {str(k): f"{k}.safetensors" for k in range(20)}}
    (sharded / INDEX).write_text(json.dumps(index))
    assert peak_of("-b", str(folders[0]), "-m", str(sharded), "--force") < USUAL_BOUND
    (folders[0] / "config.json").write_text('{"a":' * 700 + "[" + "0," * 240_000 + "0]" + "}" * 700)
    assert peak_of("-b", str(folders[0]), "-m", str(folders[0]), "--force", "--dtype", "float16") < USUAL_BOUND


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_configuration_of_50_mb_is_refused_in_the_usual_memory(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    for text in ("[[rules]]\n" * (HEADER_ROOM // 10), "[[rules]]\n" * 100_000, "a" * HEADER_ROOM, "a=[" * 300_000):
        config.write_text(text)
        done = subprocess.run(
            [sys.executable, "-c", MEASURED_RUN, "-c", str(config)], cwd=HERE, capture_output=True, text=True
        )
        status, peak, seconds = done.stdout.split()
        print(f"\n{int(peak) / 1024:.0f} MiB in {float(seconds):.1f} s: {done.stderr[:200]}")
        assert int(status) == 2, done.stderr
        assert int(peak) < USUAL_BOUND


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_shape_of_100_000_huge_sides_takes_no_time_to_refuse(tmp_path: Path) -> None:
    """Multiplied out, they make a number of 6 million bits; a header of 100 MB has room for 50 times as many."""
    sides = ",".join(["4611686018427387903"] * 100_000)
    header = f'{{"w":{{"dtype":"F32","shape":[{sides}],"data_offsets":[0,0]}}}}'
    status, _, seconds, error = measured(tmp_path, header, 15)
    assert status == 1
    assert "'w'" in error
    assert seconds < 5


def test_no_message_is_longer_than_a_person_would_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name may be as long as a header; a screen is not."""
    arguments = sound_models(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(with_header(sound().replace('"w":{', f'"{"x" * 1_000_000}":{{"a":0,')))
    assert len(refused_in_two_lines(capsys, arguments)) < 10_000


# ---------------------------------------------------------------------------------------------------------------------
# Faults: whatever happens, inputs are unchanged and the destination is the old model or the new one
# ---------------------------------------------------------------------------------------------------------------------

Contents = dict[str, bytes]
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR)
BOTH = ["file", pytest.param("directory", marks=pytest.mark.slow)]
POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals and processes")


def contents(path: Path) -> Contents:
    """All bytes of a file or of a directory's files, by name; nothing if there is nothing."""
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in dare.files_in(path)}
    return {"": path.read_bytes()} if path.exists() else {}


def put(path: Path, files: Contents) -> None:
    """Make a path hold these contents and nothing else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name if name else path).write_bytes(data)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@dataclasses.dataclass
class Scene:
    """Inputs, a place that holds nothing but an old output or nothing at all, and what a merge makes there."""

    inputs: Path
    output: Path
    arguments: list[str]
    old: Contents = dataclasses.field(default_factory=dict)
    new: Contents = dataclasses.field(default_factory=dict)
    before: Any = None

    @classmethod
    def of(cls, folder: Path, kind: str, old: bool = True, **config: Any) -> Scene:
        """kind: file or directory. An old output is made with another seed."""
        base = random_model(dtype=BF16)
        inputs, place = folder / "inputs", folder / "place"
        place.mkdir(parents=True)
        save_directory(inputs / "base", base, torch_dtype="bfloat16", tie_word_embeddings=False)
        (inputs / "base" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        (inputs / "base" / "templates").mkdir()
        (inputs / "base" / "templates" / "chat.txt").write_text("hello")
        for k, name in enumerate(("math", "code"), 1):
            save_directory(inputs / name, finetune(base, k))
        nan = torch.tensor(math.nan, dtype=BF16)
        save_directory(inputs / "broken", base | {"scalar": nan})
        output = place / ("out.safetensors" if kind == "file" else "out")
        models = [str(inputs / name) for name in ("base", "math", "code")]
        scene = cls(inputs, output, ["-q", "-b", models[0], "-m", *models[1:], "-o", str(output), "--threads", "1"])
        scene.arguments += ["--max-shard-size", "10kB"] if kind == "directory" else []
        for name, value in config.items():
            scene.arguments += [f"--{name.replace('_', '-')}", str(value)]
        assert scene.run() == 0
        scene.new = contents(output)
        if old:
            assert scene.run("--seed", "7") == 0
            scene.old = contents(output)
        scene.before = snapshot(inputs)
        scene.reset()
        return scene

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")

    def run(self, *flags: str) -> int:
        return dare.main([*self.arguments, *flags])

    def fail(self) -> int:
        """Merge a model that holds a value that no merge can use, which is found out late."""
        return self.run("--merge", str(self.inputs / "broken"))

    def reset(self) -> None:
        """Make the place hold the old output again, and nothing else."""
        for path in self.output.parent.iterdir():
            if path != self.output:
                put(path, {})
        if contents(self.output) != self.old:
            put(self.output, self.old)

    def besides(self) -> list[str]:
        """What lies beside the output."""
        return sorted(path.name for path in self.output.parent.iterdir() if path != self.output)

    def broken(self, status: int, printed: str, allowed: tuple[str, ...] = ()) -> list[str]:
        """The promises that a run with this exit status and these messages broke."""
        found = contents(self.output)
        which = "new" if found == self.new else "old" if found == self.old else f"torn {sorted(found)}"
        broken = [f"status {status}"] if status not in (0, 1) else []
        broken += [] if which == ("new" if status == 0 else "old") else [f"{which} with status {status}"]
        broken += [f"left {name}" for name in self.besides() if name not in allowed]
        broken += ["an unexpected error: " + printed.strip()] if "this is a bug" in printed else []
        return broken + ([] if snapshot(self.inputs) == self.before else ["inputs changed"])


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small jobs, and a journal that is written at once: what large models do in minutes."""
    monkeypatch.setattr(dare, "JOB_ELEMENTS", 1024)
    monkeypatch.setattr(dare, "FLUSH_SECONDS", 0.0005)
    monkeypatch.setattr(dare, "JOURNAL_SECONDS", 0.0)


class Failing:
    """Stands in for a function of the system, and makes one call of it fail, or all from that one on."""

    def __init__(self, real: Callable[..., Any], number: int, lasting: bool = False, really: bool = False) -> None:
        self.real, self.number, self.lasting, self.really = real, number, lasting, really
        self.calls = 0
        self.mutex = threading.Lock()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self.mutex:
            self.calls += 1
            mine = self.calls
        if mine == self.number or (self.lasting and mine > self.number):
            if self.really:
                self.real(*arguments, **options)
            error = ERRORS[self.number % len(ERRORS)]
            raise OSError(error, os.strerror(error))
        return self.real(*arguments, **options)


CALLS = ["open", "pwrite", "write", "ftruncate", "reserve", "fsync", "rename", "replace", "close", "mkdir"]


def fail_each(
    scene: Scene, call: str, capsys: pytest.CaptureFixture[str], lasting: bool = False, flags: tuple[str, ...] = ()
) -> Iterator[tuple[int, int, str]]:
    """Merge with the first call failing, then the second, and so on until all succeed: number, status, messages."""
    owner = dare if call == "reserve" else os
    for number in itertools.count(1):
        failing = Failing(getattr(owner, call), number, lasting, really=call == "close")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, call, failing)
            if call == "rename":  # which is used only where names cannot be exchanged
                patch.setattr(dare, "exchange", lambda *_: False)
            status = scene.run(*flags)
        printed = capsys.readouterr().err
        if failing.calls < number:
            assert status == 0
            return
        yield number, status, printed


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("call", CALLS)
def test_any_one_call_to_the_system_may_fail_and_nothing_is_lost(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], call: str, kind: str
) -> None:
    problems = []
    for old in (False, True):
        scene = Scene.of(tmp_path / str(old), kind, old)
        files = open_files()
        for number, status, printed in fail_each(scene, call, capsys):
            problems += [f"{call} {number}, old {old}: {what}" for what in scene.broken(status, printed)]
            problems += [f"{call} {number}: a file stays open"] if open_files() > files else []
            files = open_files()
            scene.reset()
        assert contents(scene.output) == scene.new
    assert problems == []


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        *(("pwrite", "file"), ("fsync", "file"), ("rename", "directory")),
        *(pytest.param(call, "directory", marks=pytest.mark.slow) for call in ("open", "write", "fsync", "mkdir")),
    ],
)
def test_a_call_that_keeps_failing_loses_nothing(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], call: str, kind: str
) -> None:
    """A disk that is full or broken stays so for the rest of the run."""
    scene, problems = Scene.of(tmp_path, kind), []
    for number, status, printed in fail_each(scene, call, capsys, lasting=True):
        if call == "rename" and contents(scene.output) == {}:
            # Not even the old one could be given its name back: it must be kept for the next run to do so.
            problems += [] if scene.fail() == 1 and contents(scene.output) == scene.old else ["the old model is lost"]
        problems += [f"{call} from {number} on: {what}" for what in scene.broken(status, printed)]
        scene.reset()
    assert problems == []


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_what_cannot_be_removed_is_removed_by_the_next_run(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], call: str, kind: str
) -> None:
    scene, problems = Scene.of(tmp_path, kind), []
    for number, status, printed in fail_each(scene, call, capsys):
        broken = scene.broken(status, printed, allowed=(scene.partial.name,))
        again = scene.run()
        broken += [f"then {what}" for what in scene.broken(again, capsys.readouterr().err)]
        problems += [f"{call} {number}: {what}" for what in broken + (["not merged again"] if again else [])]
        scene.reset()
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        *("pwrite", "rename", "mkdir"),
        *(pytest.param(call, marks=pytest.mark.slow) for call in ("open", "write", "reserve", "fsync", "close")),
    ],
)
def test_a_merge_that_failed_with_resume_is_continued_to_the_same_bytes(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    scene, problems = Scene.of(tmp_path, "directory"), []
    for number, status, printed in fail_each(scene, call, capsys, flags=("--resume",)):
        broken = scene.broken(status, printed, allowed=(scene.partial.name,))
        broken += [f"then {what}" for what in scene.broken(scene.run("--resume"), capsys.readouterr().err)]
        broken += [] if contents(scene.output) == scene.new else ["not continued"]
        problems += [f"{call} {number}: {what}" for what in broken]
        scene.reset()
    assert problems == []


@pytest.mark.parametrize(
    "call",
    ["open", "ftruncate", *(pytest.param(call, marks=pytest.mark.slow) for call in ("write", "fsync", "pwrite"))],
)
def test_a_failure_while_resuming_keeps_what_was_done_before(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    scene = Scene.of(tmp_path, "directory")
    interrupt(scene, monkeypatch, 6)
    begun = contents(scene.partial)
    done = len(dare.Journal(scene.partial / "journal").done)
    assert done >= 6
    problems = []
    for number, status, printed in fail_each(scene, call, capsys, flags=("--resume",)):
        if status == 0:  # a call whose failure is harmless
            assert contents(scene.output) == scene.new
        else:
            problems += [f"{call} {number}: {what}" for what in scene.broken(status, printed, (scene.partial.name,))]
            if len(dare.Journal(scene.partial / "journal").done) < done:
                problems.append(f"{call} {number}: what was done is gone")
        scene.reset()
        put(scene.partial, begun)
    assert problems == []


def test_after_a_failure_the_same_process_can_merge_again(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts retry; a lock that a failed merge keeps would stop them."""
    scene = Scene.of(tmp_path, "file")
    for call in ("ftruncate", "write"):
        interrupt(scene, monkeypatch, 3)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, Failing(getattr(os, call), 1))
            assert scene.run() == 1
        capsys.readouterr()
        assert scene.run() == 0, capsys.readouterr().err
        scene.reset()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("most", [1, 100, 4096])
def test_short_writes_of_any_kind_are_continued(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    scene = Scene.of(tmp_path, kind)
    pwrite, write = os.pwrite, os.write
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, offset: pwrite(descriptor, view[:most], offset))
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:most]))
    assert scene.run() == 0
    assert contents(scene.output) == scene.new
    assert scene.besides() == []


# ---------------------------------------------------------------------------------------------------------------------
# Faults: processes that are killed or stopped
# ---------------------------------------------------------------------------------------------------------------------

DEADLY = ["open", "pwrite", "write", "ftruncate", "fsync", "rename", "replace", "close", "mkdir", "unlink", "rmdir"]


def dies_at(number: int, scene: Scene, flags: tuple[str, ...], exchange: bool, background: bool) -> bool:
    """Merge in a process that kills itself at one of its calls to the system, in the middle of it if it writes."""
    child = os.fork()
    if child == 0:
        count = itertools.count(1)

        def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(count) == number:
                    if real in (WRITE, PWRITE):
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        try:
            for name in DEADLY:
                setattr(os, name, deadly(getattr(os, name)))
            if not exchange:
                dare.exchange = lambda *_: False
            if not background:  # then the calls have an order
                dare.FLUSH_SECONDS = 60  # type: ignore[misc]
            scene.run(*flags)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


WRITE, PWRITE = os.write, getattr(os, "pwrite", None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "exchange", "background"),
    [
        ("file", True, False),
        pytest.param("file", True, True, marks=pytest.mark.slow),
        *(pytest.param("directory", exchange, False, marks=pytest.mark.slow) for exchange in (True, False)),
    ],
)
def test_a_merge_killed_at_any_call_to_the_system_is_made_good_by_the_next(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], kind: str, exchange: bool, background: bool
) -> None:
    scene, problems = Scene.of(tmp_path, kind), []
    for number in itertools.count(1, 1 if background or kind == "directory" else 3):
        capsys.readouterr()
        resume = ("--resume",) if number % 2 else ()
        if not dies_at(number, scene, resume, exchange, background):
            break
        found, besides = contents(scene.output), scene.besides()
        between = not found and (scene.partial / "replaced").exists() and not exchange
        broken = [] if between or found in (scene.old, scene.new) else [f"torn {sorted(found)}"]
        broken += [f"left {name}" for name in besides if name != scene.partial.name]
        begun = sorted(os.listdir(scene.partial)) if besides else []
        if between:  # a run that fails still restores what was there
            assert scene.fail() == 1
            broken += [] if contents(scene.output) == scene.old else ["the old model is not restored"]
            capsys.readouterr()
        status = scene.run(*resume)
        printed = capsys.readouterr().err
        broken += [f"then {what}" for what in scene.broken(status, printed)] + ([printed] if status else [])
        if set(begun) - {"lock"} and not resume and not between and "unfinished merge" not in printed:
            broken.append(f"not told of {begun}")
        problems += [f"killed at {number}: {what}" for what in broken]
        scene.reset()
    assert number > 20
    assert problems == []


def launch(folder: Path, prelude: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """The command in a process of its own, which says when it has begun to listen to signals, and when it has ended."""
    code = f"""
import os, sys, time
import dare
run = dare.run
def started(arguments):
    print("started", flush=True)
    run(arguments)
dare.run = started
{prelude}
status = dare.main()
print("ended", flush=True)
sys.exit(status)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SLOW_JOBS = """
work = dare.Worker.run
def slowly(*arguments):
    time.sleep(0.05)
    return work(*arguments)
dare.Worker.run = slowly
dare.JOB_ELEMENTS, dare.JOURNAL_SECONDS = 1024, 0.01
"""


def wait_for(happens: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@POSIX
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_stops_a_merge_and_keeps_what_is_done_only_with_resume(
    tmp_path: Path, eager: None, sent: signal.Signals, status: int, kind: str
) -> None:
    scene = Scene.of(tmp_path, kind)
    for flags in ((), ("--resume",)):
        process = launch(tmp_path, SLOW_JOBS, *scene.arguments, *flags)
        wait_for(lambda: dare.Journal(scene.partial / "journal").done)
        begun = time.monotonic()
        process.send_signal(sent)
        _, printed = process.communicate(timeout=30)
        assert time.monotonic() - begun < 2
        assert (process.returncode, printed) == (status, "interrupted\n")
        assert contents(scene.output) == scene.old
        assert scene.besides() == ([scene.partial.name] if flags else [])
    assert dare.Journal(scene.partial / "journal").done
    assert scene.run("--resume") == 0
    assert contents(scene.output) == scene.new
    assert scene.besides() == []
    assert snapshot(scene.inputs) == scene.before


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "signals"),
    [
        ("file", [signal.SIGKILL]),
        ("directory", [signal.SIGKILL]),
        ("file", [signal.SIGINT, signal.SIGTERM]),
        ("directory", [signal.SIGINT, signal.SIGTERM]),
    ],
    ids=["kill a file", "kill a directory", "stop a file", "stop a directory"],
)
def test_a_merge_stopped_at_any_moment_and_resumed_ends_with_the_same_bytes(
    tmp_path: Path, kind: str, signals: list[signal.Signals]
) -> None:
    base = {f"t{k:02}": torch.full((1 << 20,), k / 8, dtype=BF16) for k in range(16)}
    base |= {"t00": random_model(1, BF16, {"t": (1 << 20,)})["t"]}
    (tmp_path / "inputs").mkdir()
    (tmp_path / "place").mkdir()
    save_directory(tmp_path / "inputs" / "base", base, architectures=["X"])
    save_directory(tmp_path / "inputs" / "math", finetune(base, 1))
    before = snapshot(tmp_path / "inputs")
    output = tmp_path / "place" / ("out.safetensors" if kind == "file" else "out")
    models = ["-b", "inputs/base", "-m", *["inputs/math"] * 8]
    arguments = ["-q", *models, "-o", str(output), "--threads", "1", "--max-shard-size", "10MB", "--resume"]
    prelude = "dare.FLUSH_SECONDS, dare.JOURNAL_SECONDS = 0.01, 0.03"
    made = {}
    for seed in ("7", "42"):
        begun = time.monotonic()
        process = launch(tmp_path, prelude, *arguments, "--seed", seed)
        _, printed = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        made[seed], lasts = contents(output), time.monotonic() - begun
    old, new = made["7"], made["42"]
    moments, stopped, finished, resumed = random.Random(2024), 0, 0, 0
    put(output, old)
    # On a fast machine, most of the time is spent before there is anything to resume.
    while stopped < 16 or (resumed <= 3 and stopped < 100):
        process = launch(tmp_path, prelude, *arguments)
        sent = moments.choice(signals)
        try:
            process.wait(moments.uniform(0.1, lasts))
        except subprocess.TimeoutExpired:
            process.send_signal(sent)
            stopped += 1
        begun = time.monotonic()
        said, printed = process.communicate(timeout=30)
        assert time.monotonic() - begun < 2
        listening = "started" in said and "ended" not in said
        if listening:
            stops = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
            assert process.returncode == stops[sent]
            assert sent == signal.SIGKILL or printed.splitlines()[-1] == "interrupted"
            assert "Traceback" not in printed
        found, besides = contents(output), {path.name for path in output.parent.iterdir()}
        assert found in (old, new)
        assert besides <= {output.name, f"{output.name}.partial"}
        assert snapshot(tmp_path / "inputs") == before
        resumed += bool(dare.Journal(output.parent / f"{output.name}.partial" / "journal").done)
        if found == new:
            finished += 1
            put(output, old)
            assert process.returncode != 0 or besides == {output.name}
    assert resumed > 3
    process = launch(tmp_path, prelude, *arguments)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert contents(output) == new
    assert [path.name for path in output.parent.iterdir()] == [output.name]


# ---------------------------------------------------------------------------------------------------------------------
# Faults: a disk that is full
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("needs to mount a disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", place], capture_output=True).returncode:
        pytest.skip("may not mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("reserves", [True, False], ids=["reserved", "found out late"])
def test_a_full_disk_is_an_error_that_changes_nothing(
    tmp_path: Path,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    reserves: bool,
) -> None:
    base = random_model(0, BF16, {"a": (100, 200), "b": (30, 500), "c": (50, 500)})
    save_directory(tmp_path / "base", base, torch_dtype="bfloat16")
    save_directory(tmp_path / "math", finetune(base, 1))
    output = small_disk / ("out.safetensors" if kind == "file" else "out")
    arguments = ["-q", "-b", str(tmp_path / "base"), "-m", str(tmp_path / "math"), "-o", str(output), "--threads", "1"]
    assert dare.main(arguments) == 0
    before = snapshot(small_disk)
    assert dare.main([*arguments, "--seed", "1"]) == 1
    assert "the output needs 121 kB and" in capsys.readouterr().err or kind == "directory"
    assert snapshot(small_disk) == before
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))
    if not reserves:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    for _ in range(2):
        assert dare.main([*arguments, "--seed", "1"]) == 1
        printed = capsys.readouterr().err
        assert f"cannot write '{output}': No space left on device" in printed
        assert "what was there before is unchanged" in printed
        assert snapshot(small_disk) == before


def test_a_disk_that_the_last_file_does_not_fit_keeps_the_old_directory(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene.of(tmp_path / "scene", "directory")
    put(small_disk / "out", scene.old)
    (scene.inputs / "base" / "tokenizer.model").write_bytes(bytes(200_000))
    scene.arguments[scene.arguments.index("-o") + 1] = str(small_disk / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))
    before = snapshot(small_disk)
    assert scene.run() == 1
    assert "No space left on device" in capsys.readouterr().err
    assert snapshot(small_disk) == before


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX limits")
@pytest.mark.parametrize("kind", BOTH)
def test_files_that_may_not_grow_are_an_error_that_changes_nothing(tmp_path: Path, kind: str) -> None:
    import resource

    scene = Scene.of(tmp_path, kind)
    for limit in (3, 15_000) if kind == "directory" else (15_000,):
        done = command(
            *scene.arguments, preexec_fn=lambda size=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        )
        assert done.returncode == 1
        assert f"cannot write '{scene.output}': File too large" in done.stderr
        assert scene.broken(1, done.stderr) == []


# ---------------------------------------------------------------------------------------------------------------------
# Faults: an unfinished merge is continued to the same bytes, or left alone
# ---------------------------------------------------------------------------------------------------------------------


def stop_after(patch: pytest.MonkeyPatch, ranges: int) -> None:
    """Make merges stop as if by Ctrl-C as soon as that many ranges are written, and the journal says so."""
    write, written = dare.Output.write_at, itertools.count(1)

    def stopping(self: dare.Output, file: int, view: memoryview, offset: int) -> None:
        before = len(self.done)
        if offset and (done := next(written)) > ranges:
            wait_for(lambda: len(dare.Journal(self.journal.path).done) - before >= done - 1, 5)
            raise KeyboardInterrupt
        write(self, file, view, offset)

    patch.setattr(dare.Output, "write_at", stopping)


def interrupt(scene: Scene, monkeypatch: pytest.MonkeyPatch, ranges: int, *flags: str) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, ranges)
        assert scene.run("--resume", *flags) == 130
    assert scene.besides() == [scene.partial.name]
    assert contents(scene.output) == scene.old


def figures(report: dare.MergeReport) -> dict[str, Any]:
    return {key: value for key, value in report.as_dict().items() if key != "seconds"}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("config", METHODS, ids=str)
def test_a_resumed_merge_has_the_bytes_and_the_figures_of_one_that_was_not_interrupted(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], kind: str
) -> None:
    scene = Scene.of(tmp_path, kind)
    inputs = [scene.inputs / name for name in ("base", "math", "code")]

    def merger(threads: int) -> DareMerger:
        return DareMerger(
            inputs[0], inputs[1:], quiet(threads=threads, max_shard_size="10kB", delta_threshold=1e-9, **config)
        )

    usual = figures(merger(1).merge(scene.output))
    new = contents(scene.output)
    assert usual["warnings"] != ()
    for stops in ([0], [1, 3], [5, 2, 3], [12]):
        put(scene.output, {})
        for ranges in stops:
            with monkeypatch.context() as patch:
                stop_after(patch, ranges)
                with pytest.raises(KeyboardInterrupt):
                    merger(1).merge(scene.output, resume=True)
        if stops == [1, 3]:  # other threads add up in another order
            report = merger(3).merge(scene.output, resume=True)
            mine, theirs = report.models[0], usual["models"][0]
            assert mine.mean_delta == pytest.approx(theirs["mean_delta"])
            assert mine.parameters == theirs["parameters"]
        else:
            with monkeypatch.context() as patch:
                write = dare.Output.write_at
                written: list[Any] = []

                def counting(*arguments: Any, write: Any = write, written: list[Any] = written) -> None:
                    written.append(arguments)
                    write(*arguments)

                patch.setattr(dare.Output, "write_at", counting)
                assert figures(merger(1).merge(scene.output, resume=True)) == usual
                assert len(written) == 13 - sum(stops), "what is done is not done again"
        assert contents(scene.output) == new
        assert scene.besides() == []


def test_a_merge_that_reads_an_adapter_is_resumed_too(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene.of(tmp_path, "directory", old=False)
    write_adapter(scene.inputs / "adapter", low_rank("layer", (37, 61)))
    scene.arguments[scene.arguments.index("-m") + 1] = str(scene.inputs / "adapter")
    assert scene.run() == 0
    scene.new = contents(scene.output)
    scene.reset()
    for ranges in (2, 3):
        interrupt(scene, monkeypatch, ranges)
    assert scene.run("--resume") == 0
    assert contents(scene.output) == scene.new


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seed", "3"], "its dare.seed is 42, not 3"),
        (["--merge", "EXTRA"], "its models.merge_files is ["),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["--drop-rate", "0.5"], "its dare.drop_rate is 0.9, not 0.5"),
                (["--weights", "1", "2"], "its dare.weights is None, not [1.0, 2.0]"),
                (["--method", "slerp"], "its dare.method is 'linear', not 'slerp'"),
                (["--dtype", "float32"], "its dare.dtype is None, not 'float32'"),
                (["--max-shard-size", "1kB"], "its "),
                (["--rule", "*:drop_rate=0.5"], "its rules is {}, not [{"),
            )
        ),
    ],
    ids=str,
)
def test_an_unfinished_merge_of_another_recipe_is_refused_and_left_alone(
    tmp_path: Path,
    eager: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    named: str,
) -> None:
    scene = Scene.of(tmp_path, "directory")
    interrupt(scene, monkeypatch, 4)
    capsys.readouterr()
    flags = [flag.replace("EXTRA", str(scene.inputs / "math")) for flag in flags]
    begun = {name: data for name, data in contents(scene.partial).items() if name != "lock"}
    assert scene.run("--resume", *flags) == 1
    printed = capsys.readouterr().err
    assert "is another one: " + named in printed
    assert "run without --resume" in printed
    assert {name: data for name, data in contents(scene.partial).items() if name != "lock"} == begun
    assert contents(scene.output) == scene.old
    assert scene.run("--resume") == 0, "the right recipe still continues it"
    assert contents(scene.output) == scene.new
    scene.reset()
    interrupt(scene, monkeypatch, 4)
    capsys.readouterr()
    assert scene.run(*flags) == 0
    assert "an unfinished merge in" in capsys.readouterr().err
    assert scene.besides() == []


@pytest.mark.parametrize("change", ["touched", "rewritten", "other tensors"])
def test_an_unfinished_merge_of_other_inputs_is_refused_and_left_alone(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    scene = Scene.of(tmp_path, "directory")
    interrupt(scene, monkeypatch, 4)
    capsys.readouterr()
    weights = scene.inputs / "math" / "model.safetensors"
    status = weights.stat()
    tensors = load_file(weights)
    if change == "rewritten":
        save_file(finetune(tensors, 9), weights, {"format": "pt"})
    elif change == "other tensors":
        save_file(tensors | {"more": torch.zeros(3)}, weights, {"format": "pt"})
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    begun = {name: data for name, data in contents(scene.partial).items() if name != "lock"}
    assert scene.run("--resume") == 1
    printed = capsys.readouterr().err
    assert "is another one: its inputs." in printed
    assert str(weights) in printed
    assert {name: data for name, data in contents(scene.partial).items() if name != "lock"} == begun


def test_a_change_of_the_tied_embeddings_between_two_runs_does_not_mix_them(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json says whether a model without a head merges the embedding's changes into it."""
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (40, 100), "model.embed_tokens.weight": (40, 100)}
    base = random_model(0, BF16, shapes)
    base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
    model = finetune(base, 1, 0.02)
    del model["lm_head.weight"]
    scene = Scene.of(tmp_path, "file", old=False)
    save_directory(scene.inputs / "base", base, tie_word_embeddings=True)
    save_directory(scene.inputs / "math", model, tie_word_embeddings=True)
    save_directory(scene.inputs / "code", model, tie_word_embeddings=True)
    interrupt(scene, monkeypatch, 2)
    for name in ("base", "math", "code"):
        (scene.inputs / name / "config.json").write_text('{"tie_word_embeddings": false}')
    resumed = scene.run("--resume")
    found = contents(scene.output)
    assert scene.run() == 0
    assert resumed == 1 or found == contents(scene.output), "half of it is merged by the old config.json"


def test_an_unfinished_merge_is_told_about_and_removed_without_resume(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene.of(tmp_path, "file")
    interrupt(scene, monkeypatch, 4)
    capsys.readouterr()
    assert scene.run() == 0
    printed = capsys.readouterr().err
    assert printed == f"warning: an unfinished merge in {scene.partial} is removed (--resume would continue it)\n"
    assert contents(scene.output) == scene.new
    assert scene.besides() == []


def damaged_journals(journal: bytes) -> Iterator[bytes]:
    """Journals as crashes, disks and editors leave them."""
    lines = journal.splitlines(keepends=True)
    yield from (b"", b"\n", b"00000000\n", b"00000000 \n" + journal, journal + b"00000000\n", journal + bytes(4096))
    yield from (bytes(len(journal)), journal[1:], journal[:-1], journal + lines[-1][:20], b"".join(lines[1:]))
    yield from (b"".join([lines[0], *lines[2:]]), b"".join([*lines, *lines[1:][:1]]), journal.replace(b"\n", b"\r\n"))
    random_places = random.Random(5)
    for _ in range(10):
        place = random_places.randrange(len(journal))
        yield journal[:place]
        yield journal[:place] + bytes([journal[place] ^ 1 << random_places.randrange(8)]) + journal[place + 1 :]


def test_a_journal_damaged_anywhere_still_gives_the_right_bytes(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene, problems = Scene.of(tmp_path, "file"), []
    interrupt(scene, monkeypatch, 7)
    begun = contents(scene.partial)
    for k, journal in enumerate(damaged_journals(begun["journal"])):
        put(scene.partial, begun | {"journal": journal})
        capsys.readouterr()
        status = scene.run("--resume")
        printed = capsys.readouterr().err
        problems += [f"{k}: {what}" for what in scene.broken(status, printed)] + ([printed] if status else [])
        scene.reset()
    assert problems == []


def test_what_is_done_after_a_torn_line_of_the_journal_is_noted_too(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene.of(tmp_path, "file")
    interrupt(scene, monkeypatch, 4)
    journal = scene.partial / "journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    torn = len(dare.Journal(journal).done)
    with monkeypatch.context() as patch:
        write, written = dare.Output.write_at, itertools.count(1)

        def stopping(self: dare.Output, file: int, view: memoryview, offset: int) -> None:
            if next(written) > 5:
                time.sleep(0.2)
                raise KeyboardInterrupt
            write(self, file, view, offset)

        patch.setattr(dare.Output, "write_at", stopping)
        assert scene.run("--resume") == 130
    assert len(dare.Journal(journal).done) == torn + 5


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "a directory", "no made folder"])
def test_files_of_an_unfinished_merge_that_are_not_as_they_were_are_made_again(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    scene = Scene.of(tmp_path, "directory")
    interrupt(scene, monkeypatch, 9)
    [shard, *_] = sorted((scene.partial / dare.MADE).glob("*.safetensors"))
    if damage in ("missing", "a directory"):
        shard.unlink()
    if damage == "a directory":
        shard.mkdir()
    if damage in ("shorter", "longer"):
        os.truncate(shard, shard.stat().st_size + (1 if damage == "longer" else -1))
    if damage == "no made folder":
        shutil.rmtree(scene.partial / dare.MADE)
    capsys.readouterr()
    assert scene.run("--resume") == 0
    assert "cannot be continued" in capsys.readouterr().err
    assert contents(scene.output) == scene.new
    assert scene.besides() == []


def test_resume_without_an_unfinished_merge_begins_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene.of(tmp_path, "file")
    assert scene.run("--resume", "--verbose") == 0
    assert "there is no unfinished merge to resume" in capsys.readouterr().err
    assert contents(scene.output) == scene.new


# ---------------------------------------------------------------------------------------------------------------------
# Faults: others at work in the same place
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_a_merge_whose_folder_was_taken_by_another_publishes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Somebody removes the folder by hand, and another merge begins in one of the same name."""
    scene = Scene.of(tmp_path, kind)
    work = DareMerger._work

    def then_taken(self: Any, plan: Any, *arguments: Any) -> None:
        work(self, plan, *arguments)
        shutil.rmtree(scene.partial)
        again = dare.Output(plan.output, plan.files, {}, False)
        again.discard(keep=True)

    monkeypatch.setattr(DareMerger, "_work", then_taken)
    before = contents(scene.output) if scene.output.exists() else None
    assert scene.run() == 1
    error = capsys.readouterr().err
    assert "somebody removed" in error or "No such file" in error
    assert (contents(scene.output) if scene.output.exists() else None) == before


def test_room_that_an_unfinished_merge_takes_is_room_for_the_next(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.safetensors"
    plan = DareMerger(models[0], models[1:], quiet()).plan(output)
    begun = dare.Output(plan.output, plan.files, {}, False)
    begun.discard(keep=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 0))  # type: ignore[attr-defined]
    DareMerger(models[0], models[1:], quiet()).plan(output)
    with pytest.raises(DareError, match="has 0 B free"):
        DareMerger(models[0], models[1:], quiet()).plan(tmp_path / "other.safetensors")


def test_a_report_that_cannot_be_printed_does_not_undo_the_merge(models: list[Path], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    output = tmp_path / "out.safetensors"
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {HERE / 'dare.py'} -b {models[0]} -m {models[1]} -o {output} > /dev/full"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert "cannot print what was done" in done.stderr
    assert output.exists()


@POSIX
@pytest.mark.parametrize("flags", [(), pytest.param(("--resume", "--force"), marks=pytest.mark.slow)], ids=str)
def test_the_second_of_two_merges_to_one_place_is_told_of_the_first(tmp_path: Path, flags: tuple[str, ...]) -> None:
    scene = Scene.of(tmp_path, "file")
    first = launch(tmp_path, SLOW_JOBS, *scene.arguments)
    try:
        wait_for(lambda: (scene.partial / "lock").exists() and (scene.partial / "lock").read_text())
        with pytest.raises(DareError, match=rf"another merge \(process {first.pid}\) is writing"):
            DareMerger(scene.inputs / "base", [scene.inputs / "math"], quiet()).merge(
                scene.output, resume="--resume" in flags, force="--force" in flags
            )
        assert scene.run(*flags) == 1
        assert contents(scene.output) == scene.old
        assert scene.besides() == [scene.partial.name]
    finally:
        _, printed = first.communicate(timeout=60)
    assert first.returncode == 0, printed
    assert scene.broken(0, printed) == []


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_many_merges_to_one_place_at_once_leave_one_complete_model(tmp_path: Path, kind: str) -> None:
    scene = Scene.of(tmp_path, kind)
    for _ in range(2):
        processes = [launch(tmp_path, "", *scene.arguments) for _ in range(6)]
        for process in processes:
            _, printed = process.communicate(timeout=60)
            told = process.returncode == 1 and "another merge (process" in printed
            assert process.returncode == 0 or told, printed
        assert scene.broken(0, "") == []
        scene.reset()


@pytest.mark.parametrize("foreign", ["file", "folder", "folder with a lock", "link to a folder", "link to nothing"])
@pytest.mark.parametrize("kind", BOTH)
def test_what_only_happens_to_be_called_partial_is_never_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, foreign: str
) -> None:
    scene = Scene.of(tmp_path, kind)
    place = tmp_path / "elsewhere" if "link" in foreign else scene.partial
    if foreign == "file":
        place.write_text("mine")
    elif foreign != "link to nothing":
        (place / "deep").mkdir(parents=True)
        (place / "deep" / "thesis.tex").write_text("mine")
    if foreign == "folder with a lock":
        (place / "lock").write_text("a list of the doors in my house that have one\n")
    if "link" in foreign:
        scene.partial.symlink_to(place)
    before = snapshot(tmp_path)
    for flags in ((), ("--resume",), ("--force",)):
        assert scene.run(*flags) == 1
        printed = capsys.readouterr().err
        assert "is in the way" in printed
        assert "this is a bug" not in printed
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["replaced", "lock", "journal"])
def test_an_output_may_have_any_name_that_this_tool_uses_itself(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    scene = Scene.of(tmp_path, "directory", old=False)
    scene.output = scene.output.with_name(name)
    scene.arguments[scene.arguments.index("-o") + 1] = str(scene.output)
    interrupt(scene, monkeypatch, 4)
    assert scene.fail() == 1
    assert contents(scene.output) == {}, "half a model got its name"
    for flags in ((), ("--seed", "7"), ()):
        assert scene.run(*flags) == 0, capsys.readouterr().err
        monkeypatch.setattr(dare, "exchange", lambda *_: False)
    assert contents(scene.output) == scene.new
    assert scene.besides() == []


def made_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, Callable[[Path], object]] = {
    "touched": lambda path: os.utime(path, ns=(1, path.stat().st_mtime_ns + 1)),
    "written to": lambda path: path.write_bytes(path.read_bytes()),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "gone": Path.unlink,
    "replaced by a copy": lambda path: os.replace(shutil.copy2(path, path.with_name("copy")), path),
    "moved away": lambda path: path.rename(path.with_name("moved")),
    "a directory": made_a_directory,
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("change", CHANGES)
def test_inputs_that_change_during_a_merge_are_noticed_and_nothing_is_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: str, kind: str
) -> None:
    scene = Scene.of(tmp_path, kind)
    write_adapter(scene.inputs / "adapter", low_rank("layer", (37, 61)))
    base = load_file(scene.inputs / "base" / "model.safetensors")
    save_sharded(scene.inputs / "shards", finetune(base, 3), each_alone(base))
    names = ["math", "shards", "adapter"]
    start = scene.arguments.index("-m") + 1
    scene.arguments[start : scene.arguments.index("-o")] = [str(scene.inputs / name) for name in names]
    run_jobs = dare.run_jobs
    shutil.copytree(scene.inputs, tmp_path / "kept")
    for name in (
        "base/model.safetensors",
        "math/model.safetensors",
        "shards/model-00002-of-00004.safetensors",
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
    ):
        if name.endswith("json") and change in ("touched", "written to", "replaced by a copy"):
            continue  # of a small file the content counts

        def changing(*arguments: Any, path: Path = scene.inputs / name) -> None:
            run_jobs(*arguments)
            CHANGES[change](path)

        for flags in ((),) if kind == "file" else ((), ("--resume",)):
            shutil.rmtree(scene.inputs)
            shutil.copytree(tmp_path / "kept", scene.inputs)
            capsys.readouterr()
            with monkeypatch.context() as patch:
                patch.setattr(dare, "run_jobs", changing)
                assert scene.run(*flags) == 1, name
            printed = capsys.readouterr().err
            assert name.split("/")[0] in printed
            assert "changed while it was merged" in printed or "vanished while it was merged" in printed
            assert contents(scene.output) == scene.old
            assert scene.besides() == []


def test_an_input_touched_from_outside_in_the_middle_of_its_jobs_is_noticed(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene.of(tmp_path, "directory")
    write, written = dare.Output.write_at, itertools.count()

    def touching(self: dare.Output, *arguments: Any) -> None:
        if next(written) == 5:
            touch = threading.Thread(target=os.utime, args=(scene.inputs / "code" / "model.safetensors",))
            touch.start()
            touch.join()
        write(self, *arguments)

    monkeypatch.setattr(dare.Output, "write_at", touching)
    assert scene.run() == 1
    assert "code/model.safetensors' changed while it was merged" in capsys.readouterr().err
    assert contents(scene.output) == scene.old
    assert scene.besides() == []


def test_a_file_that_vanishes_before_it_is_copied_fails_the_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene.of(tmp_path, "directory")
    write_file = dare.Output.write_file

    def vanishing(self: dare.Output, name: str, content: bytes | Path) -> None:
        (scene.inputs / "base" / "tokenizer.json").unlink(missing_ok=True)
        write_file(self, name, content)

    monkeypatch.setattr(dare.Output, "write_file", vanishing)
    assert scene.run() == 1
    assert "this is a bug" not in capsys.readouterr().err
    assert contents(scene.output) == scene.old
    assert scene.besides() == []


@pytest.mark.parametrize("kind", BOTH)
def test_what_somebody_puts_in_the_outputs_place_during_a_merge_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    scene = Scene.of(tmp_path, kind, old=False)
    run_jobs = dare.run_jobs
    precious = random_model(5)

    def meanwhile(*arguments: Any) -> None:
        run_jobs(*arguments)
        save_file(precious, scene.output) if kind == "file" else save_directory(scene.output, precious)

    monkeypatch.setattr(dare, "run_jobs", meanwhile)
    assert scene.run() == 1
    assert "exists and was not made by this tool" in capsys.readouterr().err
    assert load_file(scene.output if kind == "file" else scene.output / "model.safetensors").keys() == precious.keys()
    assert scene.besides() == []


# ---------------------------------------------------------------------------------------------------------------------
# Faults: --verify finds every one
# ---------------------------------------------------------------------------------------------------------------------


def small_models(folder: Path) -> list[Path]:
    base = random_model(0, BF16, {"a": (3, 7), "b": (5,), "c": ()})
    return save(folder, base=base, math=finetune(base, 1, 0.05), code=finetune(base, 2, 0.05))


def unfound(path: Path, verified: Path, places: Iterator[int] | range, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Flip a bit of a file at each of these places, counted in bits, and verify: what is not found, or is a bug."""
    data, missed = path.read_bytes(), []
    capsys.readouterr()
    for place in places:
        byte, bit = divmod(place, 8)
        flipped = bytearray(data)
        flipped[byte] ^= 1 << bit
        path.write_bytes(flipped)
        status = dare.main(["-q", "--verify", str(verified)])
        printed = capsys.readouterr().err
        around = bytes(flipped[max(0, byte - 12) : byte + 4])
        if status == 0:
            missed.append(f"{path.name}: bit {bit} of byte {byte}, {around!r}")
        elif "this is a bug" in printed or not printed.startswith("error: "):
            missed.append(f"{path.name}: bit {bit} of byte {byte}, {around!r}: {printed}")
    path.write_bytes(data)
    return missed


def spread(size: int, step: int) -> Iterator[int]:
    """A bit of every step-th byte: each time another one."""
    return (8 * byte + (byte // step) % 8 for byte in range(0, size, step))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_verify_finds_a_flipped_bit_anywhere_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.chdir(tmp_path)
    small_models(tmp_path)
    arguments = ["-q", "-b", "base.safetensors", "-m", "math.safetensors", "code.safetensors"]
    assert dare.main([*arguments, "-o", "out.safetensors", "--drop-rate", "0.5"]) == 0
    out = tmp_path / "out.safetensors"
    size = out.stat().st_size
    assert unfound(out, out, spread(size, step), capsys) == []
    assert unfound(out, out, range(8 * (size - 54), 8 * size, 5), capsys) == [], "the data"
    assert dare.main(["-q", "--verify", "out.safetensors"]) == 0


@pytest.mark.parametrize("step", [29, pytest.param(3, marks=pytest.mark.slow)])
def test_verify_finds_a_flipped_bit_in_any_file_of_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.chdir(tmp_path)
    base = random_model(0, BF16, {"a": (3, 7), "b": (5,), "c": ()})
    save_directory(tmp_path / "base", base, torch_dtype="bfloat16")
    (tmp_path / "base" / "tokenizer.json").write_text('{"model": 1}')
    save_directory(tmp_path / "math", finetune(base, 1, 0.05))
    assert dare.main(["-q", "-b", "base", "-m", "math", "-o", "out", "--max-shard-size", "40B"]) == 0
    names = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    names |= {"README.md", "config.json", "dare_recipe.toml", "tokenizer.json"}
    assert set(dare.files_in(tmp_path / "out")) == names
    missed = []
    for name in sorted(names):
        path = tmp_path / "out" / name
        missed += unfound(path, tmp_path / "out", spread(path.stat().st_size, step), capsys)
    assert dare.main(["-q", "--verify", "out"]) == 0
    assert missed == []


def test_verify_finds_a_changed_shard_size_in_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the recipe itself tells it, where a model fits into one file by any of them."""
    scene = Scene.of(tmp_path, "directory")
    assert dare.main([*scene.arguments, "--max-shard-size", "5GB"]) == 0
    recipe = scene.output / "dare_recipe.toml"
    text = recipe.read_text()
    assert 'max_shard_size = "5GB"' in text
    recipe.write_text(text.replace('"5GB"', '"4GB"'))
    assert dare.main(["-q", "--verify", str(scene.output)]) == 1


@pytest.mark.parametrize("damage", ["cut", "cut to nothing", "longer", "gone", "a directory"])
def test_verify_finds_files_that_are_cut_longer_or_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    scene = Scene.of(tmp_path, "directory")
    put(scene.output, scene.new)
    for name, data in scene.new.items():
        path = scene.output / name
        path.unlink()
        if damage == "a directory":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes({"cut": data[:-1], "cut to nothing": b"", "longer": data + b"\n"}[damage])
        assert dare.main(["-q", "--verify", str(scene.output)]) in (1, 2), name
        printed = capsys.readouterr().err
        assert printed.startswith("error: "), name
        assert "this is a bug" not in printed, name
        put(path, {"": data})
    assert dare.main(["-q", "--verify", str(scene.output)]) == 0
    single = tmp_path / "single.safetensors"
    assert dare.main([*scene.arguments, "-o", str(single)]) == 0
    data = single.read_bytes()
    for changed in (data[:-1], data + b"\0", data[:100], b""):
        single.write_bytes(changed)
        assert dare.main(["-q", "--verify", str(single)]) == 1


@pytest.mark.parametrize(
    "config", [*METHODS[::3], *(pytest.param(config, marks=pytest.mark.slow) for config in METHODS[1:3])], ids=str
)
def test_verify_names_the_first_tensor_that_differs_by_any_method(
    tmp_path: Path, eager: None, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    for kind in ("file", "directory"):
        scene = Scene.of(tmp_path / kind, kind, old=False, **config)
        put(scene.output, scene.new)
        before = snapshot(scene.output.parent)
        assert dare.main(["-q", "--verify", str(scene.output), "--threads", "3"]) == 0
        assert snapshot(scene.output.parent) == before, "verify writes nothing"
        files = [scene.output] if kind == "file" else sorted(scene.output.glob("*.safetensors"))
        tensors = [(path, name, info) for path in files for name, info in dare.TensorFile(path, "").tensors.items()]
        for first, second in itertools.combinations(tensors, 2):
            for path, _, info in (first, second):
                with open(path, "r+b") as file:
                    file.seek(info.offset + info.nbytes - 1)
                    last = file.read(1)[0]
                    file.seek(info.offset + info.nbytes - 1)
                    file.write(bytes([last ^ 0x40]))
            assert dare.main(["-q", "--verify", str(scene.output), "--threads", "3"]) == 1
            place = [size - 1 for size in first[2].shape]
            assert f"is not what its recipe makes: tensor '{first[1]}' differs at {place}" in capsys.readouterr().err
            put(scene.output, scene.new)
        assert snapshot(scene.inputs) == scene.before


def test_verify_says_what_it_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene.of(tmp_path, "file")
    assert dare.main(["--verify", str(scene.output)]) == 0
    assert f"verified {scene.output}: 4 tensors, " in capsys.readouterr().out


def test_verify_finds_moved_inputs_and_outputs_where_they_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("file", "directory"):
        scene = Scene.of(tmp_path / kind, kind, old=False)
        moved = tmp_path / kind / f"elsewhere{scene.output.suffix}"
        put(moved, scene.new)
        assert dare.main(["-q", "--verify", str(moved)]) == 0, "absolute paths still lead there"
        scene.inputs.rename(scene.inputs.with_name("archive"))
        assert dare.main(["-q", "--verify", str(moved)]) == 1
        assert "there is no file or directory" in capsys.readouterr().err
        archive = [str(tmp_path / kind / "archive" / name) for name in ("base", "math", "code")]
        given = ["-q", "--verify", str(moved), "--base", archive[0], "--merge", *archive[1:]]
        assert dare.main(given) == 0, capsys.readouterr().err
        assert dare.main(given[:-1]) == 2
        assert "has 2 models" in capsys.readouterr().err
        assert dare.main([*given[:-2], archive[2], archive[1]]) == 1, "the order counts"
        data = bytearray(next(iter(contents(moved).values())) if kind == "file" else b"")
        if kind == "file":
            data[-1] ^= 1
            moved.write_bytes(data)
        else:
            (moved / "config.json").write_text("{}")
        assert dare.main(given) == 1
        assert "is not what its recipe makes" in capsys.readouterr().err


def test_verify_with_an_adapter_shards_and_another_tokenizer_finds_them_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene.of(tmp_path, "directory", old=False)
    base = load_file(scene.inputs / "base" / "model.safetensors")
    save_sharded(scene.inputs / "shards", finetune(base, 3), each_alone(base))
    adapter = write_adapter(scene.inputs / "adapter", low_rank("layer", (37, 61)))
    (scene.inputs / "math" / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    merged = ["--merge", str(scene.inputs / "shards"), str(adapter), "--tokenizer-from", str(scene.inputs / "math")]
    assert scene.run(*merged, "--max-shard-size", "5kB", "--rule", "*bias:drop_rate=0.5", "--dtype", "float32") == 0
    verify = ["-q", "--verify", str(scene.output)]
    assert dare.main(verify) == 0, capsys.readouterr().err
    (scene.inputs / "math" / "tokenizer.json").write_text("{}")
    assert dare.main(verify) == 1
    assert "'tokenizer.json' differs" in capsys.readouterr().err
    (scene.inputs / "math" / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    assert dare.main(verify) == 1
    assert "is not the file that the recipe was made with: its config_sha256" in capsys.readouterr().err


def test_verify_with_other_inputs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = Scene.of(tmp_path, "file")
    weights = scene.inputs / "math" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"more": torch.zeros(3)}, weights, {"format": "pt"})
    assert dare.main(["-q", "--verify", str(scene.output)]) == 1
    assert "is not the file that the recipe was made with: its size" in capsys.readouterr().err
    save_file(finetune(tensors, 5, 0.05), weights, {"format": "pt"})
    assert dare.main(["-q", "--verify", str(scene.output)]) == 1
    assert "or the inputs were" in capsys.readouterr().err, "values of the same header are told by the result"
    weights.unlink()
    assert dare.main(["-q", "--verify", str(scene.output)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "flags",
    [
        *(["--output", "x"], ["--seed", "1"], ["--drop-rate", "0.5"], ["--force"], ["--resume"], ["--dry-run"]),
        *(["--config", "x.toml"], ["--rule", "*:drop_rate=0"], ["--lambda", "1"], ["--max-shard-size", "1GB"]),
    ],
    ids=str,
)
def test_verify_takes_no_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert dare.main(["--verify", str(tmp_path / "x.safetensors"), *flags]) == 2
    printed = capsys.readouterr().err
    assert "--verify takes its settings from the recipe, not from --" in printed
    assert flags[0] in printed, "the flag as it was given"


def test_verify_without_a_recipe_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, plain=random_model())
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty").mkdir()
    save_directory(tmp_path / "model", random_model())
    for name, words in (
        ("plain.safetensors", "has no recipe"),
        ("text.safetensors", "is not a complete safetensors file"),
        ("empty", "has no dare_recipe.toml"),
        ("model", "has no dare_recipe.toml"),
        ("nowhere", "No such file or directory"),
    ):
        assert dare.main(["--verify", str(tmp_path / name)]) == 1
        printed = capsys.readouterr().err
        assert words in printed
        assert "hint: " in printed
    save_file(random_model(), tmp_path / "odd.safetensors", {"dare_recipe": "not [ toml"})
    assert dare.main(["--verify", str(tmp_path / "odd.safetensors")]) in (1, 2)
    for recipe in (
        "",
        "[dare]\nseed = 1\n",
        "[recipe]\nversion = 3\n",
        '[models]\nbase_file = "x"\nmerge_files = []\n',
    ):
        save_file(random_model(), tmp_path / "odd.safetensors", {"dare_recipe": recipe})
        capsys.readouterr()
        assert dare.main(["--verify", str(tmp_path / "odd.safetensors")]) in (1, 2)
        assert "this is a bug" not in capsys.readouterr().err


def test_scripts_verify_too(tmp_path: Path) -> None:
    scene = Scene.of(tmp_path, "file", old=False)
    put(scene.output, scene.new)
    merger = DareMerger(scene.inputs / "base", [scene.inputs / "math", scene.inputs / "code"], quiet())
    report = merger.verify(scene.output)
    assert (report.tensors, report.bytes_compared) == (4, len(scene.new[""]))
    with pytest.raises(DareError, match=r"the header of 'out.safetensors' differs|bytes long"):
        DareMerger(scene.inputs / "base", [scene.inputs / "math"], quiet()).verify(scene.output)
    with pytest.raises(DareError, match="is not there"):
        merger.verify(tmp_path / "nowhere.safetensors")
    data = bytearray(scene.new[""])
    data[-1] ^= 1
    scene.output.write_bytes(data)
    with pytest.raises(DareError, match="differs at"):
        merger.verify(scene.output)


@POSIX
def test_verify_stops_when_it_is_told_to(tmp_path: Path) -> None:
    scene = Scene.of(tmp_path, "file", old=False)
    put(scene.output, scene.new)
    before = snapshot(tmp_path)
    process = launch(tmp_path, SLOW_JOBS.replace("0.05", "0.3"), "-q", "--verify", scene.output)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=30)
    assert time.monotonic() - begun < 2
    assert (process.returncode, printed) == (130, "interrupted\n")
    assert snapshot(tmp_path) == before


# ---------------------------------------------------------------------------------------------------------------------
# Faults: systems that lack something
# ---------------------------------------------------------------------------------------------------------------------


class Refusing:
    """A system library whose every function says that this filesystem cannot do it."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def refuse_call(*_: Any) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

        return refuse_call


@pytest.mark.parametrize("kind", ["directory", pytest.param("file", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lacking", ["functions", "support", "directory sync", "locks", "links"])
def test_a_filesystem_may_lack_what_others_have(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, kind: str, lacking: str
) -> None:
    """Room reserved at once, names exchanged, directories synced, locks: all are used only where they are there."""
    scene = Scene.of(tmp_path, kind)
    fsync = os.fsync

    def no_directories(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if lacking == "functions":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    elif lacking == "support":
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    elif lacking == "directory sync":
        monkeypatch.setattr(os, "fsync", no_directories)
    elif lacking == "locks":
        monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", no_locks)
    else:
        monkeypatch.setattr(dare, "exchange", lambda *_: False)
    assert scene.run() == 0
    assert scene.broken(0, "") == []
    scene.reset()
    interrupt(scene, monkeypatch, 5)
    assert scene.run("--resume") == 0
    assert scene.broken(0, "") == []


@pytest.mark.parametrize("then", ["merge", "fail", "resume", "unfit"])
def test_an_old_model_that_a_crash_left_without_its_name_gets_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], then: str
) -> None:
    """Where names cannot be exchanged there is an instant in which neither has it."""
    scene = Scene.of(tmp_path, "directory")
    scene.partial.mkdir()
    (scene.partial / "lock").write_text(f"{dare.LOCK_WORDS} 1\n")
    scene.output.rename(scene.partial / "replaced")
    put(scene.partial / "out", scene.new)
    flags = {"resume": ["--resume"], "unfit": ["--method", "slerp", "--weights", "1", "1"]}.get(then, [])
    status = scene.fail() if then == "fail" else scene.run(*flags)
    if then in ("merge", "resume"):
        assert status == 0
        assert scene.broken(0, "") == []
    else:
        assert status in (1, 2)
        assert contents(scene.output) == scene.old or then == "unfit"  # nothing is touched before settings are right
        assert scene.run() == 0
        assert scene.broken(0, "") == []


def test_an_old_model_of_somebody_else_that_lost_its_name_is_given_back_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene.of(tmp_path, "directory", old=False)
    scene.partial.mkdir()
    (scene.partial / "lock").write_text(f"{dare.LOCK_WORDS} 1\n")
    save_directory(scene.partial / "replaced", random_model(5), mine=True)
    theirs = contents(scene.partial / "replaced")
    assert scene.run() == 1
    assert "was not made by this tool" in capsys.readouterr().err
    assert contents(scene.output) == theirs
    assert scene.besides() == []


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
@pytest.mark.parametrize(("umask", "file", "folder"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)])
def test_new_files_have_the_permissions_that_the_user_gives_new_files(
    tmp_path: Path, umask: int, file: int, folder: int
) -> None:
    before = os.umask(umask)
    try:
        for kind in ("file", "directory"):
            scene = Scene.of(tmp_path / kind, kind)
            assert scene.run() == 0
            for path in [scene.output, *scene.output.rglob("*")]:
                assert path.stat().st_mode & 0o777 == (folder if path.is_dir() else file), path
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", BOTH)
def test_a_link_as_output_is_resumed_and_refused_and_replaced_where_it_leads(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    scene = Scene.of(tmp_path, kind)
    link = tmp_path / f"latest{scene.output.suffix}"
    link.symlink_to(scene.output)
    scene.arguments[scene.arguments.index("-o") + 1] = str(link)
    interrupt(scene, monkeypatch, 5)
    assert scene.fail() == 1
    assert scene.broken(1, "") == []
    interrupt(scene, monkeypatch, 5)
    assert scene.run("--resume") == 0
    assert contents(scene.output) == scene.new
    assert link.is_symlink()
    assert dare.main(["-q", "--verify", str(link)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs", link.name, "place"]


@pytest.mark.parametrize(
    "name",
    [
        *("modèle fusionné", "🙂" * 60),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("合并" * 30, "ж" * 121, "x" * 243, "a\nb", ".hidden")
        ),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_outputs_may_have_names_as_long_and_odd_as_the_filesystem_allows(
    tmp_path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    longest = 255 - len(os.fsencode(name + suffix))
    name = name + "y" * longest * (longest < 15) + suffix
    scene = Scene.of(tmp_path, "file" if suffix else "directory", old=False)
    scene.output = scene.output.with_name(name)
    scene.arguments[scene.arguments.index("-o") + 1] = str(scene.output)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert scene.run("--resume") == 130
    assert len(scene.besides()) == 1
    assert scene.besides()[0].endswith(".partial")
    assert scene.run("--resume") == 0
    assert contents(scene.output) == scene.new
    assert scene.besides() == []
    assert dare.main(["-q", "--verify", str(scene.output)]) == 0


@pytest.mark.slow
def test_neither_a_terminal_nor_a_writable_place_for_anything_but_the_output_is_needed(tmp_path: Path) -> None:
    """Root may write anywhere, so a file in the place of a folder stands in for folders that cannot be written."""
    scene = Scene.of(tmp_path, "file")
    (tmp_path / "blocked").write_text("")
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    before = snapshot(folder)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "blocked" / "below"), "HOME": "/nonexistent"}
    for name in ("TERM", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = command(*scene.arguments[1:], cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    assert done.returncode == 0, done.stderr
    assert "compiling" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert scene.broken(0, "") == []
    assert snapshot(folder) == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of addresses that binds")
@pytest.mark.parametrize("flags", [[], ["--method", "ties", "--keep-ratio", "0.5"], ["--verify"]], ids=str)
def test_a_model_larger_than_the_memory_merges(tmp_path: Path, flags: list[str]) -> None:
    import resource

    count = 350 << 20
    entries = {
        f"t{k}": {"dtype": "BF16", "shape": [count // 2], "data_offsets": [k * count, (k + 1) * count]} for k in (0, 1)
    }
    header = json.dumps(entries).encode()
    for name in ("base", "math"):
        with open(tmp_path / f"{name}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + 2 * count)
    limit = 512 << 20
    arguments: list[str | Path] = ["-q", "-b", "base.safetensors", "-m", "math.safetensors", "-o", "out.safetensors"]
    arguments += [] if flags == ["--verify"] else flags
    limited: dict[str, Any] = {
        "cwd": tmp_path,
        "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    }
    done = command(*arguments, **limited)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.safetensors").stat().st_size > 2 * count
    if flags == ["--verify"]:
        done = command("-q", "--verify", "out.safetensors", **limited)
        assert done.returncode == 0, done.stderr
    (tmp_path / "out.safetensors").unlink()


# ---------------------------------------------------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------------------------------------------------


def doubles(tensors: Tensors, name: str) -> np.ndarray:
    return tensors[name].double().numpy().ravel()


def float_deltas(base: Tensors, model: Tensors, names: list[str]) -> np.ndarray:
    """The deltas as they are computed, in float32, or float64 where a tensor has that."""
    parts = []
    for name in names:
        wide = F64 in (base[name].dtype, model[name].dtype)
        kind = np.float64 if wide else np.float32
        parts.append((doubles(model, name).astype(kind) - doubles(base, name).astype(kind)).astype(np.float64))
    return np.concatenate(parts) if parts else np.zeros(0)


def check_stats(stats: dare.DeltaStats, deltas: np.ndarray, weights: np.ndarray, threshold: float = 0.002) -> None:
    """Hold every figure to plain NumPy."""
    sizes = np.abs(deltas)
    limit = float(np.float32(threshold))
    assert stats.parameters == len(deltas)
    assert stats.share_zero == np.mean(deltas == 0)
    assert stats.share_above_threshold == np.mean(sizes > limit)
    assert stats.largest == sizes.max()
    assert stats.mean == pytest.approx(sizes.mean(), rel=1e-5)
    assert stats.standard_deviation == pytest.approx(sizes.std(), rel=1e-3, abs=1e-3 * sizes.mean())
    assert stats.relative_norm == pytest.approx(np.linalg.norm(deltas) / np.linalg.norm(weights), rel=1e-5)
    for found, share in ((stats.p50, 50), (stats.p95, 95), (stats.p99, 99)):
        exact = np.percentile(sizes, share, method="inverted_cdf")
        assert found == pytest.approx(exact, rel=0.0311, abs=1e-12)
    hundredth = sizes.max() / 100
    near = np.mean((sizes > hundredth * 0.93) & (sizes < hundredth * 1.07))
    assert abs(stats.share_below_1_percent - np.mean(sizes < hundredth)) <= near + 1e-9


def check_analysis(report: dare.AnalysisReport, base: Tensors, *models: Tensors) -> None:
    names = list(base)
    weights = {name: doubles(base, name) for name in names}
    deltas = [{name: float_deltas(base, model, [name]) for name in names} for model in models]

    def joined(parts: dict[str, np.ndarray], chosen: list[str]) -> np.ndarray:
        return np.concatenate([parts[name] for name in chosen])

    for found, parts in zip(report.models, deltas, strict=True):
        check_stats(found.total, joined(parts, names), joined(weights, names))
        assert {stats.name for stats in found.tensors} == set(names)
        for stats in found.tensors:
            check_stats(stats, parts[stats.name], weights[stats.name])
        for group, of in ((found.kinds, dare.kind_of), (found.layers, dare.layer_of)):
            assert sum(stats.parameters for stats in group) == found.total.parameters
            for stats in group:
                chosen = [name for name in names if of(name) == stats.name]
                assert stats.tensors == len(chosen)
                check_stats(stats, joined(parts, chosen), joined(weights, chosen))
        assert sum(count for _, count in found.histogram) == np.count_nonzero(joined(parts, names))
    for pair, (i, k) in zip(report.pairs, itertools.combinations(range(len(models)), 2), strict=True):
        one, other = joined(deltas[i], names), joined(deltas[k], names)
        both, opposed = (one != 0) & (other != 0), np.sign(one) * np.sign(other) < 0
        size = np.abs(one) + np.abs(other)
        norms = np.linalg.norm(one) * np.linalg.norm(other)
        assert pair.share_both == np.mean(both)
        assert pair.sign_conflict == (opposed.sum() / both.sum() if both.any() else 0)
        assert pair.weighted_sign_conflict == pytest.approx(size[opposed].sum() / size[both].sum() if both.any() else 0)
        assert pair.cosine == pytest.approx(one @ other / norms if norms else 0, abs=1e-5)
    if len(models) > 1:
        every = np.stack([joined(parts, names) for parts in deltas])
        mixed, several = (every > 0).any(0) & (every < 0).any(0), (every != 0).sum(0) > 1
        size = np.abs(every).sum(0)
        assert report.sign_conflict == (mixed.sum() / several.sum() if several.any() else 0)
        expected = size[mixed].sum() / size[several].sum() if several.any() else 0
        assert report.weighted_sign_conflict == pytest.approx(expected, rel=1e-5)


ANALYSED = {
    "model.embed_tokens.weight": (30, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (37, 61),
    "model.layers.10.mlp.up_proj.weight": (61, 37),
    "model.layers.10.input_layernorm.weight": (8,),
    "lm_head.weight": (30, 8),
}


@pytest.mark.parametrize(
    "dtypes",
    [
        (BF16, BF16),
        *(pytest.param(pair, marks=pytest.mark.slow) for pair in [(F32, F32), (F16, BF16), (F64, F32)]),
    ],
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    models=st.integers(1, 4),
    size=st.sampled_from([1e-6, 1e-3, 0.01, 3.0]),
    unchanged=st.sampled_from([0.0, 0.3, 0.99]),
)
def test_an_analysis_of_any_models_is_what_numpy_finds(
    tmp_path: Path, seed: int, models: int, dtypes: tuple[torch.dtype, torch.dtype], size: float, unchanged: float
) -> None:
    base = random_model(seed, dtypes[0], ANALYSED)
    tuned = []
    for i in range(models):
        generator = torch.Generator().manual_seed(seed + i)
        changed = finetune(base, seed + i, size)
        for name, tensor in base.items():
            stays = torch.rand(tensor.shape, generator=generator) < unchanged
            changed[name] = torch.where(stays, tensor, changed[name]).to(dtypes[1])
        tuned.append(changed)
    paths = save(tmp_path, base=base, **{f"m{i}": model for i, model in enumerate(tuned)})
    report = DareMerger(paths[0], paths[1:], quiet()).analyze()
    check_analysis(report, base, *tuned)


@pytest.mark.slow
def test_an_analysis_depends_neither_on_threads_nor_on_chunks(tmp_path: Path) -> None:
    shapes = {"layers.0.weight": (5_000_011,), "layers.1.weight": (1025, 3)}
    base = random_model(3, BF16, shapes)
    tuned = [finetune(base, seed) for seed in (1, 2, 3)]
    paths = save(tmp_path, base=base, a=tuned[0], b=tuned[1], c=tuned[2])
    found = []
    for threads in (1, 2, 5):
        report = DareMerger(paths[0], paths[1:], quiet(threads=threads)).analyze()
        found.append(report.as_dict(per_tensor=True) | {"seconds": 0})
    assert found[0] == found[1] == found[2]
    check_analysis(report, base, *tuned)


@pytest.mark.slow
def test_an_analysis_of_many_tensors_takes_little_memory_for_each(tmp_path: Path) -> None:
    peaks = {}
    for count in (100, 1100):
        base = {f"layers.{k % 7}.{k}.weight": torch.zeros(4, 4) for k in range(count)}
        paths = save(tmp_path, base=base, **{f"m{i}": base for i in range(4)})
        tracemalloc.start()
        DareMerger(paths[0], paths[1:], quiet(threads=1)).analyze()
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (peaks[1100] - peaks[100]) / (1000 * 4) < 2500  # counts by size alone would take 8192


def test_an_adapter_is_analysed_as_what_it_changes(tmp_path: Path) -> None:
    base = random_model(1, F32, {"layers.0.mlp.weight": (40, 30), "layers.1.mlp.weight": (40, 30)})
    a, b = torch.randn(4, 30) * 0.01, torch.randn(40, 4) * 0.01
    adapter = lora_directory(tmp_path / "adapter", {"layers.0.mlp": (a, b)})
    save(tmp_path, base=base)
    report = DareMerger(tmp_path / "base.safetensors", [adapter], quiet()).analyze()
    (model,) = report.models
    assert model.adapter
    assert [stats.name for stats in model.tensors] == ["layers.0.mlp.weight"]
    deltas = (b.double() @ a.double()).numpy().ravel()
    assert model.total.mean == pytest.approx(np.abs(deltas).mean(), rel=1e-5)
    assert model.total.largest == pytest.approx(np.abs(deltas).max(), rel=1e-5)
    full = {**base, "layers.0.mlp.weight": base["layers.0.mlp.weight"] + b @ a}
    save(tmp_path, full=full)
    whole = DareMerger(tmp_path / "base.safetensors", [tmp_path / "full.safetensors"], quiet()).analyze()
    assert tomllib.loads(report.suggestion)["dare"]["drop_rate"] == 0.85
    assert tomllib.loads(whole.suggestion)["dare"]["drop_rate"] == 0.9


def test_rows_that_a_model_lacks_are_not_in_its_analysis(tmp_path: Path) -> None:
    base = random_model(1, F32, {"embed_tokens.weight": (1000, 7), "mlp.weight": (9, 9)})
    tuned = finetune(base, 1)
    short = {**tuned, "embed_tokens.weight": tuned["embed_tokens.weight"][:333].clone()}
    paths = save(tmp_path, base=base, short=short)
    report = DareMerger(paths[0], paths[1:], quiet(mismatch="overlap")).analyze()
    stats = next(stats for stats in report.models[0].tensors if stats.name == "embed_tokens.weight")
    deltas = float_deltas({**base, "embed_tokens.weight": base["embed_tokens.weight"][:333]}, short, [stats.name])
    assert stats.parameters == 333 * 7
    assert stats.share_zero == np.mean(deltas == 0)
    assert stats.p50 == pytest.approx(np.percentile(np.abs(deltas), 50, method="inverted_cdf"), rel=0.0311)


def test_an_analysis_leaves_out_what_is_not_merged(tmp_path: Path) -> None:
    base = {"mlp.weight": torch.randn(5, 5), "steps": torch.arange(4), "empty": torch.zeros(0, 3)}
    paths = save(tmp_path, base=base, model={**finetune({"mlp.weight": base["mlp.weight"]}, 1), "steps": base["steps"]})
    report = DareMerger(paths[0], paths[1:], quiet()).analyze()
    assert report.copied_tensors == 1
    assert [stats.name for stats in report.models[0].tensors] == ["mlp.weight"]


def test_values_whose_squares_overflow_are_told_and_not_reckoned_with(tmp_path: Path) -> None:
    base = {"fine.weight": torch.ones(4, 4), "large.weight": torch.full((4, 4), 1e25)}
    paths = save(tmp_path, base=base, model={name: tensor * 1.01 for name, tensor in base.items()})
    with pytest.raises(DareError, match=r"'large.weight' are so large"):
        DareMerger(paths[0], paths[1:], quiet()).analyze()
    wide = save(tmp_path, base={name: tensor.double() for name, tensor in base.items()})[0]
    assert DareMerger(wide, paths[1:], quiet()).analyze().models[0].total.relative_norm == pytest.approx(0.01, rel=1e-4)


def test_an_analysis_names_values_that_are_not_finite(tmp_path: Path) -> None:
    base = random_model(1)
    broken = finetune(base, 1)
    broken["layer.weight"][3, 4] = math.nan
    paths = save(tmp_path, base=base, broken=broken)
    with pytest.raises(DareError, match=r"tensor 'layer.weight' holds nan at \[3, 4\]"):
        DareMerger(paths[0], paths[1:], quiet()).analyze()


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("model.embed_tokens.weight", "embedding", "model.embed_tokens"),
        ("model.layers.12.self_attn.q_proj.weight", "attention", "model.layers.12"),
        ("model.layers.3.self_attn.q_norm.weight", "norm", "model.layers.3"),
        ("model.layers.3.mlp.experts.17.down_proj.weight", "MLP", "model.layers.3"),
        ("model.layers.3.block_sparse_moe.gate.weight", "MLP", "model.layers.3"),
        ("model.layers.3.post_attention_layernorm.weight", "norm", "model.layers.3"),
        ("model.norm.weight", "norm", "model.norm"),
        ("lm_head.weight", "head", "lm_head"),
        ("transformer.wte.weight", "embedding", "transformer.wte"),
        ("transformer.wpe.weight", "embedding", "transformer.wpe"),
        ("h.0.attn.c_attn.bias", "attention", "h.0"),
        ("h.0.mlp.c_fc.weight", "MLP", "h.0"),
        ("h.0.ln_1.weight", "norm", "h.0"),
        ("ln_f.bias", "norm", "ln_f"),
        ("bert.embeddings.word_embeddings.weight", "embedding", "bert.embeddings.word_embeddings"),
        ("bert.embeddings.LayerNorm.weight", "norm", "bert.embeddings.LayerNorm"),
        ("bert.encoder.layer.11.attention.output.dense.weight", "attention", "bert.encoder.layer.11"),
        ("bert.encoder.layer.11.intermediate.dense.weight", "MLP", "bert.encoder.layer.11"),
        ("bert.encoder.layer.11.output.LayerNorm.bias", "norm", "bert.encoder.layer.11"),
        ("cls.predictions.decoder.weight", "head", "cls.predictions.decoder"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "attention", "encoder.block.0"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "MLP", "encoder.block.0"),
        ("score.weight", "head", "score"),
        ("fc1.weight", "MLP", "fc1"),
        ("something.else", "other", "something"),
    ],
)
def test_tensors_are_told_apart_by_their_names(name: str, kind: str, layer: str) -> None:
    assert dare.kind_of(name) == kind
    assert dare.layer_of(name) == layer


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"drop_rate": 0.9}, 3.0),
        ({"drop_rate": 0.5}, 1.0),
        ({"drop_rate": 0.0}, 0.0),
        ({"drop_rate": 0.9, "rescale": False}, math.sqrt(0.9)),
        ({"drop_rate": 0.9, "rescale_q": 0.4}, math.sqrt(0.1 * 1.5**2 + 0.9)),
    ],
    ids=str,
)
def test_the_noise_that_an_analysis_expects_is_what_a_merge_adds(
    tmp_path: Path, settings: dict[str, Any], expected: float
) -> None:
    base = random_model(1, F32, {"mlp.weight": (500, 500)})
    tuned = finetune(base, 1)
    paths = save(tmp_path, base=base, tuned=tuned)
    merger = DareMerger(paths[0], paths[1:], quiet(**settings))
    (model,) = merger.analyze().models
    assert model.expected_noise == pytest.approx(expected, rel=1e-3, abs=1e-9)
    merger.merge(tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")["mlp.weight"].double()
    delta = tuned["mlp.weight"].double() - base["mlp.weight"].double()
    noise = (merged - tuned["mlp.weight"].double()).norm()
    assert float(noise / delta.norm()) == pytest.approx(expected, rel=0.02, abs=1e-4)
    assert model.total.relative_noise == pytest.approx(
        float(noise / base["mlp.weight"].double().norm()), rel=0.02, abs=1e-5
    )


def scaled(base: Tensors, sizes: dict[str, float], seed: int = 1) -> Tensors:
    """A fine-tune whose deltas are normal with these deviations; of a fraction of the entries, where that is given."""
    rng = np.random.default_rng(seed)
    return {
        name: tensor + torch.from_numpy(rng.normal(size=tensor.shape) * sizes.get(name, sizes[""])).to(tensor.dtype)
        for name, tensor in base.items()
    }


def advised(folder: Path, base: Tensors, *models: Tensors, **config: Any) -> dict[str, list[str]]:
    """The verdicts of an analysis, by what they are about."""
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    report = DareMerger(paths[0], paths[1:], quiet(**config)).analyze()
    found: dict[str, list[str]] = {"sure": [report.confidence], "toml": [report.suggestion]}
    for advice in report.advice:
        found.setdefault(advice.about, []).append(advice.verdict)
        assert re.search(r"\d", advice.text) or "identical" in advice.text or "one model" in advice.text
    # Whatever is suggested is a valid configuration of these models.
    tables = tomllib.loads(report.suggestion)
    DareConfig(**tables["dare"], rules=tables.get("rules", ())).check_models(len(models))
    return found


LAYERED = {"model.embed_tokens.weight": (50, 40)} | {f"model.layers.{k}.mlp.weight": (60, 40) for k in range(10)}
LAYERED |= {"model.norm.weight": (40,)}


@pytest.mark.parametrize(
    ("size", "verdict"),
    [(0.0, "identical"), (0.0005, "right"), (0.005, "right"), (0.012, "doubtful"), (0.04, "wrong"), (0.07, "wrong")],
)
def test_advice_on_the_base(tmp_path: Path, size: float, verdict: str) -> None:
    assert advised(tmp_path, random_model(1, F32, LAYERED), scaled(random_model(1, F32, LAYERED), {"": size}))[
        "base"
    ] == [verdict]


def test_an_unrelated_model_is_known_by_its_delta(tmp_path: Path) -> None:
    found = advised(tmp_path, random_model(1, F32, LAYERED), random_model(2, F32, LAYERED))
    assert found["base"] == ["wrong"]
    assert "a base is in doubt" in found["sure"][0]


@pytest.mark.parametrize(
    ("size", "level", "rate"),
    [
        (0.0003, "small", 0.9),
        (0.0009, "small", 0.9),
        (0.0015, "tailed", 0.8),
        (0.004, "large", 0.5),
        (0.02, "huge", 0.0),
    ],
)
def test_advice_on_the_drop_rate(tmp_path: Path, size: float, level: str, rate: float) -> None:
    base = random_model(1, F32, LAYERED)
    found = advised(tmp_path, base, scaled(base, {"": size}))
    assert found["drop_rate"] == [level]
    suggested = tomllib.loads(found["toml"][0])
    assert suggested["dare"]["drop_rate"] == rate
    assert ("rules" in suggested) == (rate > 0)


def test_models_of_different_sizes_get_different_drop_rates(tmp_path: Path) -> None:
    base = random_model(1, F32, LAYERED)
    found = advised(tmp_path, base, scaled(base, {"": 0.0003}), scaled(base, {"": 0.004}, 2))
    assert tomllib.loads(found["toml"][0])["dare"]["drop_rate"] == [0.9, 0.5]
    assert found["balance"] == ["uneven"]
    alike = advised(tmp_path, base, scaled(base, {"": 0.0003}), scaled(base, {"": 0.0004}, 2))
    assert "balance" not in alike


def test_advice_on_rules(tmp_path: Path) -> None:
    base = random_model(1, F32, LAYERED)
    found = advised(tmp_path, base, scaled(base, {"": 0.0003, "model.layers.3.mlp.weight": 0.006}))
    assert found["rules"] == ["vectors", "embeddings", "layers"]
    rules = tomllib.loads(found["toml"][0])["rules"]
    assert [(rule["match"], rule["drop_rate"]) for rule in rules] == [
        (["model.norm.weight"], 0.0),
        (["model.embed_tokens.weight"], 0.6),
        (["model.layers.3.*"], 0.5),
    ]
    plain = random_model(1, F32, {name: shape for name, shape in LAYERED.items() if "mlp" in name})
    assert "rules" not in advised(tmp_path, plain, scaled(plain, {"": 0.0003}))
    unchanged = scaled(base, {"": 0.0003, "model.embed_tokens.weight": 0.0, "model.norm.weight": 0.0})
    assert "rules" not in advised(tmp_path, base, unchanged)


def test_a_suggested_rule_is_for_no_other_tensors(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(4):
        shapes |= {f"features.{2 * k}.weight": (20, 20), f"features.{2 * k + 1}.weight": (20,)}
        shapes |= {f"features.{2 * k}.bias": (20,)}
    base = random_model(1, F32, shapes)
    rules = tomllib.loads(advised(tmp_path, base, scaled(base, {"": 0.0003}))["toml"][0])["rules"]
    matched = [name for name in shapes if any(fnmatch.fnmatchcase(name, pattern) for pattern in rules[0]["match"])]
    assert matched == [name for name, shape in shapes.items() if len(shape) == 1]
    assert "features.*.bias" in rules[0]["match"]


def test_advice_on_the_method(tmp_path: Path) -> None:
    base = random_model(1, F32, LAYERED)
    first, second, third = (scaled(base, {"": 0.0005}, seed) for seed in (1, 2, 3))
    against = {name: 2 * base[name] - first[name] for name in base}
    close = [{name: (4 * first[name] + other[name]) / 5 for name in base} for other in (second, third)]
    assert advised(tmp_path, base, first)["method"] == ["linear"]
    assert advised(tmp_path, base, first, second)["method"] == ["linear"]
    assert advised(tmp_path, base, first, against)["method"] == ["ties"]
    assert advised(tmp_path, base, first, second, third)["method"] == ["ties"]
    assert advised(tmp_path, base, first, *close)["method"] == ["linear"]
    # Five that share half of their direction agree, though some two of five differ nearly everywhere.
    halves = [
        {n: base[n] + (first[n] - base[n]) + (scaled(base, {"": 0.0005}, s)[n] - base[n]) for n in base}
        for s in range(5, 10)
    ]
    assert advised(tmp_path, base, *halves)["method"] == ["linear"]


def test_an_analysis_says_how_sure_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = random_model(1, F32, LAYERED)
    assert "billions of parameters" in advised(tmp_path, base, scaled(base, {"": 0.0003}))["sure"][0]
    monkeypatch.setattr(dare, "SMALL_MODEL", 0)
    assert "fairly" in advised(tmp_path, base, scaled(base, {"": 0.0003}))["sure"][0]
    assert "close to where the advice changes" in advised(tmp_path, base, scaled(base, {"": 0.0025}))["sure"][0]


def test_a_suggestion_keeps_what_else_was_set(tmp_path: Path) -> None:
    base = random_model(1, F32, LAYERED)
    models = [scaled(base, {"": 0.0003}, seed) for seed in (1, 2)]
    rule = {"match": ["*layers.0*"], "drop_rate": 0.3, "rescale_q": 0.8}
    found = advised(tmp_path, base, *models, seed=7, weights=[1.0, 0.5], dtype="bfloat16", rescale_q=0.5, rules=[rule])
    tables = tomllib.loads(found["toml"][0])
    expected = {"method": "linear", "drop_rate": 0.9, "seed": 7, "weights": [1.0, 0.5], "dtype": "bfloat16"}
    assert tables["dare"] == expected
    assert tables["rules"][0] == {"match": ["*layers.0*"], "drop_rate": 0.3}
    others = {"max_shard_size": "1MB", "delta_threshold": 0.01}
    found = advised(tmp_path, base, *models, **others, method="ties", keep_ratio=0.5, weights=[3, 1])
    expected = {"method": "linear", "drop_rate": 0.9, "weights": [0.75, 0.25], **others}  # to ties, they were shares
    assert tomllib.loads(found["toml"][0])["dare"] == expected
    three = [*models, scaled(base, {"": 0.0003}, 3)]
    found = advised(tmp_path, base, *three, method="ties", keep_ratio=0.5, weights=[3, 1, 0])
    expected = {"method": "ties", "drop_rate": 0.9, "keep_ratio": 0.5, "weights": [3, 1, 0]}
    assert tomllib.loads(found["toml"][0])["dare"] == expected
    assert "weights" not in advised(tmp_path, base, *three, weights=[0, 0, 0])["toml"][0]


def test_the_command_analyses(tmp_path: Path) -> None:
    shutil.copytree(HERE / "examples" / "models", tmp_path / "models", ignore=shutil.ignore_patterns("merged*"))
    (tmp_path / "sub").mkdir()
    before = snapshot(tmp_path)
    base, *models = (tmp_path / "models" / f"{name}.safetensors" for name in ("base", "rotated", "covered"))
    flags = ["analyze", "-b", base, "-m", *models]
    done = command(*flags)
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path) == before
    for words in ("rotated and covered", "Advice", "How sure", "[dare]", "[[rules]]", "by layer", "fc2", "read in"):
        assert words in done.stdout
    assert "fc2.weight" not in done.stdout
    assert "fc2.weight" in command(*flags, "--per-tensor").stdout
    data = json.loads(command(*flags, "--json").stdout)
    assert "tensors" not in data["models"][0]
    assert data["models"][0]["name"] == str(models[0])
    assert len(json.loads(command(*flags, "--json", "--per-tensor").stdout)["models"][0]["tensors"]) == 6
    # What is suggested is a configuration that merges, wherever it lies.
    suggested = tmp_path / "sub" / "suggested.toml"
    assert command(*flags, "--write-config", suggested).returncode == 0
    assert suggested.read_text().startswith("# ")
    done = command("merge", "-c", suggested)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sub" / "suggested_merged.safetensors").exists()
    again = command(*flags, "--write-config", suggested)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert command(*flags, "--write-config", suggested, "--force", "-o", tmp_path / "x.safetensors").returncode == 0
    assert tomllib.loads(suggested.read_text())["models"]["output_file"] == str(tmp_path / "x.safetensors")


def test_what_an_analysis_writes_is_never_written_over_an_input(tmp_path: Path) -> None:
    flags = ["analyze", "-q", *sound_models(tmp_path)[:-2], "--force"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    shutil.copy(tmp_path / "model.safetensors", folder / "model.safetensors")
    (tmp_path / "link.toml").symlink_to(tmp_path / "model.safetensors")
    (tmp_path / "d.toml.partial").symlink_to(tmp_path / "model.safetensors")
    before = snapshot(tmp_path)
    for name in ("base.safetensors", "model.safetensors", "link.toml"):
        done = command(*flags, "--write-config", tmp_path / name)
        assert done.returncode == 2
        assert f"{name}' is the input" in done.stderr
    for option, name in (("--write-config", "a.toml"), ("--plot", "a.png")):
        inputs = ["-b", folder, "-m", tmp_path / "model.safetensors"]
        done = command("analyze", "-q", *inputs, option, folder / name)
        assert done.returncode == 2, done.stderr
        assert f"{name}' lies inside the input" in done.stderr
    done = command(*flags, "--write-config", tmp_path / "nowhere" / "a.toml")
    assert done.returncode == 2
    assert "there is no directory" in done.stderr
    assert snapshot(tmp_path) == before
    assert command(*flags, "--write-config", tmp_path / "d.toml").returncode == 0
    (tmp_path / "d.toml").unlink()
    assert snapshot(tmp_path) == before


def test_a_suggestion_finds_the_models_from_where_it_lies(tmp_path: Path) -> None:
    sound_models(tmp_path)
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "down")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    flags = ["-b", "base.safetensors", "-m", "model.safetensors", "--tokenizer-from", "tokenizer"]
    done = command("analyze", "-q", *flags, "--write-config", "link/a.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command("-q", "-c", "link/a.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deep" / "down" / "a_merged" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        (["--threads", "1", "analyze"], "the word 'analyze' is not where it belongs", "it comes first"),
        (["--plot", "a.png"], "--plot means nothing to merge", "analyze"),
        (["merge", "--per-tensor"], "--per-tensor means nothing to merge", "analyze"),
        (["analyze", "--dry-run"], "--dry-run means nothing to analyze", "merge"),
        (["analyze", "--verify", "x"], "--verify means nothing to analyze", "merge"),
        (["analyse"], "'analyse' is not expected here", "analyze"),
        (["analyze", "--plot", "a.gif"], "a plot cannot be written to 'a.gif'", ".png"),
        (["analyze", "--plot", "nowhere/a.png"], "there is no directory for 'nowhere/a.png'", "make it"),
        (["analyze"], "there is no base model", "--base"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_words_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str, hint: str
) -> None:
    models = [] if arguments == ["analyze"] else sound_models(tmp_path)[:-2]
    word = arguments[:1] if arguments[0] in dare.COMMANDS else []
    assert dare.main([*word, *arguments[len(word) :], *models]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert hint in error.splitlines()[1]


@pytest.mark.parametrize(
    "content", ['{"ke', '{"key": "a", "score": 1' + "0" * 400, '{"key": "a", "score": ' + "[" * 10**5]
)
def test_any_damage_to_the_end_of_results_is_survived(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.jsonl").write_text(content)
    assert SWEEP.Results(tmp_path / "results.jsonl").scores == {}


def test_the_winner_of_a_sweep_with_another_tokenizer_merges(tmp_path: Path) -> None:
    sound_models(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    base, model = tmp_path / "base.safetensors", tmp_path / "model.safetensors"
    grid = SWEEP.Grid(drop_rate=(0.5,), seeds=1)
    result = SWEEP.sweep(base, [model], grid, lambda path: 1.0, tokenizer_from=tmp_path / "tokenizer")
    (tmp_path / "best.toml").write_text(SWEEP.winning_configuration(result, tmp_path / "best.toml"))
    assert dare.main(["-q", "-c", str(tmp_path / "best.toml")]) == 0
    assert (tmp_path / "merged" / "tokenizer.json").exists()


@pytest.mark.parametrize("flag", ["--write-config", "--results"])
def test_a_sweep_never_writes_over_its_inputs(tmp_path: Path, flag: str) -> None:
    sound_models(tmp_path)
    (tmp_path / "config.toml").write_text(
        "[models]\nbase_file = 'base.safetensors'\nmerge_files = ['model.safetensors']\n"
    )
    evaluation = judge(tmp_path)
    before = snapshot(tmp_path)
    done = run_sweep(tmp_path, "--evaluate", evaluation, "--seeds", "1", flag, "model.safetensors", "--force")
    assert done.returncode == 2, done.stderr
    assert "'model.safetensors' is the input" in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [pytest.param("png", marks=pytest.mark.slow), "svg"])
def test_an_analysis_is_drawn(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    base = random_model(1, F32, LAYERED)
    sizes = ({"": 0.0003}, {"": 0.002, "model.layers.2.mlp.weight": 0.0}, {"": 0.0})
    models = [scaled(base, each, seed) for seed, each in enumerate(sizes)]
    paths = save(tmp_path, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    for count in (1, 3):
        picture = tmp_path / f"picture{count}.{suffix}"
        flags = ["analyze", "-q", "-b", paths[0], "-m", *paths[1 : count + 1], "--plot", picture]
        assert dare.main([*map(str, flags)]) == 0
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
        if suffix == "svg":
            assert b"mean |delta|" in content
    assert "warning" not in capsys.readouterr().err


def test_any_models_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    base = {"a.weight": torch.rand(4, 4), r"$\foo$.weight": torch.rand(4, 4), "n": torch.arange(3)}
    names = (r"$\bar$", "_hidden", "long" * 50, "counts")
    models = {name: {key: tensor + 1 for key, tensor in base.items() if name != "counts"} for name in names}
    paths = save(tmp_path, base=base, **{**models, "counts": {"n": base["n"]}})
    # One is given twice, one has nothing that is merged.
    report = DareMerger(paths[0], [*paths[1:], paths[1]], quiet()).analyze()
    dare.plot_analysis(report, tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()
    for label in (r"Where $\bar$ changed", "_hidden (0% unchanged)", "Where longlong..."):
        assert f"<!-- {label}" in picture or f"<!--  {label}" in picture


def test_without_matplotlib_a_plot_is_a_hint(tmp_path: Path) -> None:
    arguments = sound_models(tmp_path)[:-2]
    script = "import sys; sys.modules['matplotlib'] = None; import dare; sys.exit(dare.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "analyze", *arguments, "--plot", str(tmp_path / "a.png")],
        cwd=HERE, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "error: plots need matplotlib\nhint: install it: uv sync --extra plot, or pip install matplotlib\n"
    )
    assert not (tmp_path / "a.png").exists()


def test_layers_are_sorted_by_number_and_no_name_takes_long() -> None:
    names = ["h.10", "h.9", "h.09", "h.0", "norm", f"h.{'1' * 5000}"]
    assert sorted(names, key=dare.natural) == ["h.0", "h.9", "h.09", "h.10", f"h.{'1' * 5000}", "norm"]
    started = time.perf_counter()
    assert [dare.kind_of(name) for name in ("_ln" * 21000, "fc" + "_" * 60000)] == ["other", "other"]
    assert time.perf_counter() - started < 1


def test_a_delta_without_a_norm_has_no_balance(tmp_path: Path) -> None:
    base = {"a.weight": torch.rand(8, 8), "b.weight": torch.zeros(8, 8)}
    changed = {name: tensor + 0.001 for name, tensor in base.items()}
    tiny = {**base, "b.weight": torch.full((8, 8), 1e-25)}  # whose squares are 0
    assert "balance" not in advised(tmp_path, base, {"b.weight": changed["b.weight"]}, changed)
    assert "balance" not in advised(tmp_path, base, tiny, changed)


def test_models_are_called_by_what_tells_them_apart() -> None:
    assert dare.short_names(["a/base.safetensors", "b/math"]) == ["base", "math"]
    assert dare.short_names(["a/x/model.safetensors", "a/y/model.safetensors"]) == ["x/model", "y/model"]
    assert dare.short_names(["org/model", "org/model"]) == ["model", "model"]


# ---------------------------------------------------------------------------------------------------------------------
# The sweep over settings
# ---------------------------------------------------------------------------------------------------------------------


def load_example(name: str) -> Any:
    """A script of examples/, as a module."""
    spec = importlib.util.spec_from_file_location(name, HERE / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SWEEP = load_example("sweep")
Score = Callable[[Path], float]

# An evaluation that knows what was done to a model: the recipe is in the file's header. It notes every call.
JUDGE = """
import hashlib, json, os, struct, subprocess, sys, time, tomllib
from pathlib import Path

model = Path(sys.argv[-1])
data = (model / "model.safetensors" if model.is_dir() else model).read_bytes()
header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
settings = tomllib.loads(header.get("__metadata__", {}).get("dare_recipe", "dare = {}"))["dare"]
rate, seed = settings.get("drop_rate", 0), settings.get("seed", 0)
with open("calls.jsonl", "a") as calls:
    print(json.dumps([str(model), hashlib.sha256(data).hexdigest(), settings]), file=calls)
score = 1 - (rate - 0.8) ** 2 + seed % 5 * 1e-5 if settings else 0.1
"""


def judge(folder: Path, rest: str = "print('accuracy:', score)") -> str:
    """The evaluation as a command, with a space in its path; rest: how it ends."""
    (folder / "my judge.py").write_text(JUDGE + rest)
    return f'"{sys.executable}" "{folder / "my judge.py"}" {{model}}'


def calls(folder: Path) -> list[Any]:
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_sweep(folder: Path, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own, in a folder that has a configuration."""
    words = [sys.executable, str(HERE / "examples" / "sweep.py"), "--config", "config.toml", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=folder, **options)


def settings_of(path: Path) -> dict[str, Any]:
    """How a model was merged; nothing if it was not."""
    recipe = (metadata(path) or {}).get("dare_recipe", "")
    return tomllib.loads(recipe).get("dare", {})


def hill(path: Path, noise: float = 1e-4) -> float:
    """Best at drop rate 0.8 and lambda 1, with some noise by the seed."""
    made = settings_of(path)
    if not made:
        return -1.0
    wobble = noise * math.sin(made["seed"]) * (made["drop_rate"] > 0)
    return -((made["drop_rate"] - 0.8) ** 2) - (made["lambda_coeff"] - 1) ** 2 + wobble


def counted_calls(evaluate: Score) -> tuple[Score, list[Path]]:
    seen: list[Path] = []

    def call(path: Path) -> float:
        seen.append(path)
        return evaluate(path)

    return call, seen


def test_a_sweep_finds_a_known_optimum_and_ranks_everything(models: list[Path], tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    evaluate, seen = counted_calls(hill)
    grid = SWEEP.Grid(drop_rate=(0.0, 0.5, 0.8, 0.95), method=("linear", "ties"), lambda_coeff=(0.5, 1), seeds=3)
    result = SWEEP.sweep(models[0], models[1:], grid, evaluate, directory=tmp_path)
    assert result.best.candidate.settings.drop_rate == 0.8
    assert result.best.candidate.settings.lambda_coeff == 1
    means = [row.mean for row in result.rows]
    assert means == sorted(means, reverse=True)
    assert [row.mean for row in result.rows if row.candidate.kind == "alone"] == [-1.0] * 3
    assert result.baseline.mean == pytest.approx(-0.64)
    assert result.distinguishable
    # 16 combinations: the four without dropping have no seeds, and one of those is the baseline.
    assert len(result.rows) == 3 + 16
    assert len(seen) == 3 + 4 + 12 * 3
    assert result.best.spread > 0
    assert snapshot(tmp_path) == before, "nothing is left behind"


def test_where_lower_is_better_the_ranks_are_reversed(models: list[Path]) -> None:
    grid = SWEEP.Grid(drop_rate=(0.5, 0.8), seeds=2)
    result = SWEEP.sweep(models[0], models[1:], grid, lambda path: -hill(path), minimize=True)
    assert result.best.candidate.settings.drop_rate == 0.8
    assert [row.mean for row in result.rows] == sorted(row.mean for row in result.rows)
    assert result.distinguishable
    assert "lower is better" in str(result)


def test_seeds_of_a_sweep_share_no_mask(models: list[Path]) -> None:
    drawn: list[int] = []

    def note(path: Path) -> float:
        if settings_of(path).get("drop_rate"):
            drawn.extend(tomllib.loads(metadata(path)["dare_recipe"])["recipe"]["seeds"])
        return 0.0

    SWEEP.sweep(models[0], models[1:], SWEEP.Grid(seeds=4), note, config=DareConfig(seed=7))
    assert sorted(drawn) == list(range(7, 15))


def test_a_combination_is_tried_once_and_only_if_it_makes_sense(
    models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    evaluate, seen = counted_calls(lambda path: 0.0)
    grid = SWEEP.Grid(drop_rate=(0.9, 0.5, 0.9, 0), rescale_q=(0.1, 0.5, 1), keep_ratio=(0.5,), seeds=1)
    result = SWEEP.sweep(models[0], models[1:], grid, evaluate)
    tried = sorted((row.candidate.settings.drop_rate, row.candidate.settings.rescale_q or 0) for row in result.merges)
    assert tried == [(0, 0), (0.5, 0.5), (0.5, 1), (0.9, 0.1), (0.9, 0.5), (0.9, 1)]
    assert len(seen) == 3 + 6
    assert "left out 1 combination that" in caplog.text  # q 0.1 at 0.5; where nothing is dropped, q means nothing
    assert "rescale_q 0.1 is below 1 - drop_rate = 0.5" in caplog.text


def test_a_grid_of_q_is_the_search_of_darex_q(models: list[Path], tmp_path: Path) -> None:
    def nearness(path: Path) -> float:
        return -abs(settings_of(path).get("rescale_q", 9) - 0.4)

    grid = SWEEP.Grid(drop_rate=(0.9,), rescale_q=(0.1, 0.2, 0.4, 0.8), seeds=2)
    result = SWEEP.sweep(models[0], models[1:], grid, nearness)
    assert result.best.candidate.settings.rescale_q == 0.4
    toml = tomllib.loads(SWEEP.winning_configuration(result, tmp_path / "best.toml"))
    assert toml["dare"]["rescale_q"] == 0.4


def test_the_baseline_drops_nothing_whatever_the_rules_say(models: list[Path], tmp_path: Path) -> None:
    rules = [{"match": "layer.*", "drop_rate": 0.5, "keep_ratio": 0.5}, {"match": "head.*", "lambda_coeff": 0.0}]
    config = DareConfig(method="ties", weights=(3.0, 1.0), rules=rules)
    merged: dict[str, dict[str, Any]] = {}

    def keep(path: Path) -> float:
        made = settings_of(path)
        merged[f"{made['method']} {made['drop_rate']}" if made else path.stem] = load_file(path)
        return 0.0

    SWEEP.sweep(models[0], models[1:], SWEEP.Grid(method=("linear", "ties"), seeds=1), keep, config=config)
    assert merged.keys() == {"base", "math", "code", "linear 0.0", "linear 0.9", "ties 0.9"}
    base, first, second = (load_file(path) for path in models)
    name = "layer.weight"
    deltas = [model[name].float() - base[name].float() for model in (first, second)]
    average = (base[name].float() + (0.75 * deltas[0] + 0.25 * deltas[1])).to(base[name].dtype)
    assert (merged["linear 0.0"][name] == average).float().mean() > 0.999
    assert (merged["linear 0.0"]["head.weight"] == base["head.weight"]).all()
    assert (merged["linear 0.9"]["head.weight"] == base["head.weight"]).all()


SCORES = [
    ("0.5", 0.5),
    ("step 12: loss 3\naccuracy: 93.5%\n", 93.5),
    ("acc=1e-3", 0.001),
    ("-7 of them.", -7.0),
    ("perplexity 1,234.5", 1234.5),
    ("\x1b[32m0.25\x1b[0m", 0.25),
    ("loaded model2 in 3s: .75", 0.75),
    ('{"score": 0.5, "n": 100}', 0.5),
    ('{\n "a": {"score": 3},\n "score": 4\n}\n', 4.0),
    ('{"score": 1}\nlog 7\n{"score": 2, "tasks": [1, 2]}\ndone in 5 s', 2.0),
    ('{"accuracy": 0.75}', 0.75),
    ("{not json} 8", 8.0),
]


@pytest.mark.parametrize(("output", "score"), SCORES)
def test_the_score_is_that_of_the_json_or_the_last_number(output: str, score: float) -> None:
    assert SWEEP.score_in(output) == score


@pytest.mark.parametrize(
    "output", ["", "no numbers, model2 only", '{"score": "high"} 3', '{"score": true}', '{"score": null, "n": 5}']
)
def test_output_without_a_score_is_a_failure(output: str) -> None:
    with pytest.raises(DareError):
        SWEEP.score_in(output)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_a_failure(models: list[Path], score: float) -> None:
    grid = SWEEP.Grid(drop_rate=(0.5, 0.8), seeds=1)
    odd = SWEEP.sweep(models[0], models[1:], grid, lambda p: score if settings_of(p).get("drop_rate") == 0.8 else 1.0)
    assert [row.scores for row in odd.rows if row.candidate.kind == "grid"] == [(1.0,), ()]
    assert math.isnan(SWEEP.score_in("score 3, then nan"))


def test_the_sweep_command_writes_a_winner_that_makes_the_same_bytes(tmp_path: Path) -> None:
    """On the shipped example, in a folder with a space in its name."""
    folder = tmp_path / "a b"
    shutil.copytree(HERE / "examples" / "models", folder / "examples" / "models")
    shutil.copy(HERE / "merge_config.toml", folder / "config.toml")
    before = {path.name for path in folder.iterdir()}
    flags = ["--drop-rate", "0.5", "0.8", "--method", "linear", "ties", "--seeds", "2", "--evaluate", judge(folder)]
    done = run_sweep(folder, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "9 merges to make and 12 evaluations to run; scores are kept in sweep_results.jsonl\n"
    )
    ranks = [line.split("  ")[1].strip() for line in done.stdout.splitlines()[1:9]]
    assert ranks[:2] == ["linear, drop 0.8, lambda 1", "ties, drop 0.8, lambda 1"]
    assert sorted(ranks[5:]) == [f"examples/models/{n}.safetensors alone" for n in ("base", "covered", "rotated")]
    assert "confirm it on data that was not used here" in done.stdout
    made = {"my judge.py", "calls.jsonl", "sweep_results.jsonl", "sweep_best.toml"}
    assert {path.name for path in folder.iterdir()} == before | made
    best = dare.load_settings(folder / "sweep_best.toml")
    assert (best.dare["drop_rate"], best.dare["method"]) == (0.8, "linear")
    assert command("-q", "--config", "sweep_best.toml", cwd=folder).returncode == 0
    merged = (folder / "examples" / "models" / "merged.safetensors").read_bytes()
    [digest] = [
        d for _, d, s in calls(folder) if (s.get("drop_rate"), s.get("method"), s.get("seed")) == (0.8, "linear", 42)
    ]
    assert hashlib.sha256(merged).hexdigest() == digest
    text = (folder / "sweep_best.toml").read_text()
    assert "# plain average: " in text
    again = run_sweep(folder, *flags, "-q")
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")
    assert len(calls(folder)) == 12, "nothing was evaluated twice"
    assert (folder / "sweep_best.toml").read_text() == text


@pytest.mark.slow
def test_failing_and_hanging_evaluations_do_not_lose_the_rest(models: list[Path], tmp_path: Path) -> None:
    write_config(tmp_path)
    ending = """
if rate == 0.5 and not os.path.exists("mended"):
    print("0.99")
    sys.exit("out of memory\\nsorry")
if rate == 0.7 and not os.path.exists("mended"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path("child").write_text(str(child.pid))
    time.sleep(60)
print("no score" if rate == 0.6 else json.dumps({"score": score}))
"""
    flags = [
        "--drop-rate",
        "0.5",
        "0.6",
        "0.7",
        "0.8",
        "--seeds",
        "1",
        "--timeout",
        "2",
        "--evaluate",
        judge(tmp_path, ending),
    ]
    done = run_sweep(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "failed" in line]
    assert [line.split("failed: ")[1] for line in warned] == [
        "it ended with status 1: sorry",
        "it printed no number",
        "it took longer than 2 s",
    ]
    assert "The best merge is linear, drop 0.8" in done.stdout
    assert done.stdout.count(" failed ") == 3
    pid = int((tmp_path / "child").read_text())
    wait_for(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2], 5)
    (tmp_path / "mended").touch()
    before = len(calls(tmp_path))
    done = run_sweep(tmp_path, *flags)
    assert len(calls(tmp_path)) == before + 3, "what failed is tried again, and nothing else"
    assert done.stdout.count(" failed ") == 1


def test_an_interrupted_sweep_cleans_up_and_continues(models: list[Path], tmp_path: Path) -> None:
    write_config(tmp_path)
    ending = """
if len(open("calls.jsonl").readlines()) == 6:
    time.sleep(60)
print(score)
"""
    flags = ["--config", "config.toml", "--drop-rate", "0.5", "0.8", "--seeds", "2", "-e", judge(tmp_path, ending)]
    words = [sys.executable, str(HERE / "examples" / "sweep.py"), *flags]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(calls(tmp_path)) == 6)
    assert list(tmp_path.glob("sweep-*")) != [], "the model that is being scored"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted; what is scored is kept, and the same command continues"
    assert list(tmp_path.glob("sweep-*")) == []
    assert not (tmp_path / "sweep_best.toml").exists()
    done = run_sweep(tmp_path, *flags[2:])
    assert done.returncode == 0, done.stderr
    assert (
        "3 merges to make and 3 evaluations to run; scores are kept in sweep_results.jsonl, where 5 of 8 are already"
        in done.stderr
    )
    assert len(calls(tmp_path)) == 8 + 1


def test_a_sweep_that_raises_keeps_its_scores_and_a_line_cut_short_is_made_again(
    models: list[Path], tmp_path: Path
) -> None:
    def stop_at_fifth(path: Path) -> float:
        if len(seen) == 5:
            raise KeyboardInterrupt
        return hill(path)

    evaluate, seen = counted_calls(stop_at_fifth)
    results, grid = tmp_path / "r.jsonl", SWEEP.Grid(drop_rate=(0.5, 0.8), seeds=2)
    options: dict[str, Any] = {"results": results, "label": "hill"}
    with pytest.raises(KeyboardInterrupt):
        SWEEP.sweep(models[0], models[1:], grid, evaluate, **options)
    assert len(results.read_text().splitlines()) == 4
    results.write_bytes(results.read_bytes()[:-20])
    evaluate, seen = counted_calls(hill)
    result = SWEEP.sweep(models[0], models[1:], grid, evaluate, **options)
    assert len(seen) == 8 - 3
    whole = SWEEP.sweep(models[0], models[1:], grid, hill)
    assert str(result) == str(whole)
    evaluate, seen = counted_calls(hill)
    assert str(SWEEP.sweep(models[0], models[1:], grid, evaluate, **options)) == str(whole)
    assert seen == []


def test_scores_of_other_evaluations_models_and_settings_are_not_mixed_up(models: list[Path], tmp_path: Path) -> None:
    def evaluations(label: str, **config: Any) -> int:
        evaluate, seen = counted_calls(hill)
        grid = SWEEP.Grid(drop_rate=(0.5,), seeds=1)
        options: dict[str, Any] = {"results": tmp_path / "r.jsonl", "label": label, "config": DareConfig(**config)}
        SWEEP.sweep(models[0], models[1:], grid, evaluate, **options)
        return len(seen)

    assert evaluations("one") == 5
    assert evaluations("one") == 0
    assert evaluations("two") == 5
    assert evaluations("one", seed=1) == 1
    assert evaluations("one", weights=(0.3, 0.7)) == 2
    os.utime(models[2], ns=(0, 0))
    assert evaluations("one") == 3, "the model that changed, and the merges with it"


def test_a_script_that_was_edited_is_another_evaluation(tmp_path: Path) -> None:
    first = SWEEP.Command.of(judge(tmp_path)).label
    assert SWEEP.Command.of(judge(tmp_path)).label == first
    assert SWEEP.Command.of(judge(tmp_path, "print(-score)")).label != first


def test_inputs_that_change_during_a_sweep_end_it(models: list[Path], tmp_path: Path) -> None:
    def touch(path: Path) -> float:
        if settings_of(path):
            os.utime(models[1])
        return 0.0

    with pytest.raises(DareError, match=r"math\.safetensors' has changed during"):
        SWEEP.sweep(models[0], models[1:], SWEEP.Grid(), touch, results=tmp_path / "r.jsonl")


# Noise by seed, seeds, whether the best is distinguishable from the baseline, and what is said.
VERDICTS = [
    (1e-4, 3, True, "more than its seeds' spread explains"),
    (0.5, 3, False, "not distinguishable from the plain average"),
    (1e-4, 1, None, "there is only one seed; give --seeds 3 or more"),
    (-9.0, 1, False, "No combination scores better than the plain average"),
]


@pytest.mark.parametrize(("noise", "seeds", "told", "words"), VERDICTS)
def test_the_best_is_only_said_to_be_better_if_its_seeds_agree(
    models: list[Path], noise: float, seeds: int, told: bool | None, words: str
) -> None:
    def evaluate(path: Path) -> float:
        made = settings_of(path)
        if not made or not made["drop_rate"]:
            return 0.0
        return 0.1 + noise * ((made["seed"] // 2 % 3) if noise > 0 else 1)

    result = SWEEP.sweep(models[0], models[1:], SWEEP.Grid(drop_rate=(0.5, 0.8), seeds=seeds), evaluate)
    assert result.distinguishable is told
    assert words in result.verdict
    assert "evaluation's own noise is unknown" in str(result)
    assert ("put 0 among the drop rates" in str(result)) == (result.best is not result.baseline)


def test_a_choice_among_many_must_be_clearer_than_one_of_a_few(models: list[Path]) -> None:
    def evaluate(path: Path) -> float:
        made = settings_of(path)
        return 0.0 if not made or not made["drop_rate"] else 0.04 + 0.01 * (made["seed"] // 2 % 3)

    few, many = (
        SWEEP.sweep(models[0], models[1:], SWEEP.Grid(drop_rate=[0.5 + 0.01 * k for k in range(n)]), evaluate)
        for n in (1, 8)
    )
    assert (few.distinguishable, many.distinguishable) == (True, False)
    assert many.probability == pytest.approx(8 * few.probability)


TAILS = [(1, 12.7062, 0.025), (2, 4.30265, 0.025), (3, 5.84091, 0.005), (4, 2.13185, 0.05), (9, 3.24984, 0.005)]


@pytest.mark.parametrize(("freedom", "t", "beyond"), TAILS)
def test_the_t_test_is_that_of_the_tables(freedom: int, t: float, beyond: float) -> None:
    assert SWEEP.chance(t, freedom) == pytest.approx(beyond, rel=1e-4)
    assert SWEEP.chance(0, freedom) == pytest.approx(0.5)


def test_directories_stay_directories_and_adapters_alone_are_merged_first(tmp_path: Path) -> None:
    base = random_model()
    save_directory(tmp_path / "base", base, model_type="x")
    save_directory(tmp_path / "full", finetune(base, 1))
    write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    alone: dict[str, Any] = {}

    def evaluate(path: Path) -> float:
        assert path.is_absolute()
        assert path.name in ("base", "full") or (path / "config.json").exists()
        if (
            path.name == "merged"
            and len(tomllib.loads((path / "dare_recipe.toml").read_text())["recipe"]["seeds"]) == 1
        ):
            alone.update(load_file(path / "model.safetensors"))
        return 0.0

    sources = [tmp_path / "full", tmp_path / "adapter"]
    result = SWEEP.sweep(tmp_path / "base", sources, SWEEP.Grid(seeds=1), evaluate, directory=tmp_path)
    assert [row.complete for row in result.rows] == [True] * 5
    run_merge(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out", drop_rate=0)
    expected = load_file(tmp_path / "out" / "model.safetensors")
    assert alone.keys() == expected.keys()
    assert all((alone[name] == expected[name]).all() for name in expected)
    toml = SWEEP.winning_configuration(result, tmp_path / "best.toml")
    (tmp_path / "best.toml").write_text(toml)
    assert dare.main(["-q", "-c", str(tmp_path / "best.toml")]) == 0
    assert (tmp_path / "merged" / "config.json").exists()


BAD_USAGE = [
    (["--evaluate", "{python} judge.py"], "has no {model}", "write {model} where"),
    (["--evaluate", "pyhton judge.py {model}"], "there is no command 'pyhton'", "first word"),
    (["--evaluate", "'python {model}"], "cannot be split into words", "quotes"),
    (["--drop-rate", "0.5", "1.5"], "--drop-rate must be a number from 0", "--help"),
    (["--method", "tie"], "--method must be one of linear, ties, slerp", "did you mean ties?"),
    (["--drop-rate", "0.5", "--rescale-q", "0.2"], "no combination makes sense: rescale_q 0.2 is below", "--help"),
    (["--seeds", "0"], "--seeds must be at least 1", "3 or more"),
    (["--timeout", "0"], "--timeout must be above 0", "seconds"),
    (["--plot", "sweep.gif"], "neither .png nor .svg", "sweep.png"),
    (["--write-config", "config.toml"], "exists and was not written by a sweep", "--force"),
    (["--write-config", "no/such.toml"], "does not exist", "create"),
    (["--results", "config.toml"], "is not a results file of a sweep", "--results"),
    (["--merge", "nothing.safetensors"], "there is no file or directory 'nothing.safetensors'", "looked for"),
    (["--directory", "nowhere"], "cannot use 'nowhere'", "--directory"),
    (["--config", "missing.toml"], "there is no configuration file", "--config"),
]


@pytest.mark.parametrize(("flags", "message", "hint"), BAD_USAGE, ids=[" ".join(row[0])[:40] for row in BAD_USAGE])
def test_wrong_usage_of_a_sweep_is_told_before_anything_is_merged(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    flags: list[str], message: str, hint: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    usual = ["--config", "config.toml", "--evaluate", judge(tmp_path)]
    before = snapshot(tmp_path)
    given = [flag.replace("{python}", f'"{sys.executable}"') for flag in flags]
    assert SWEEP.main([*usual, *given]) in (1, 2)
    error, hinted = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hinted.startswith("hint: ")
    assert hint in hinted
    assert snapshot(tmp_path) == before


def test_a_plot_is_drawn_and_only_its_own_is_replaced(models: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    grid = SWEEP.Grid(drop_rate=(0, 0.5), lambda_coeff=(0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6), seeds=2)
    result = SWEEP.sweep(models[0], models[1:], grid, hill)
    for name, start in (("sweep.png", b"\x89PNG"), ("sweep.svg", b"<?xml")):
        path = tmp_path / name
        SWEEP.draw(result, path)
        assert path.read_bytes().startswith(start)
        SWEEP.check_ours(path, "--plot", False)
    text = (tmp_path / "sweep.svg").read_text()
    for words in ("the best 7 of 8 lines", "bands: lowest to highest", "plain average -0.64", "base alone -1.0"):
        assert f"<!-- {words}" in text or words in text
    (tmp_path / "other.png").write_bytes(b"\x89PNG of a dog")
    with pytest.raises(DareError, match="was not written by a sweep"):
        SWEEP.check_ours(tmp_path / "other.png", "--plot", False)


def test_without_matplotlib_a_plot_is_a_hint_before_the_sweep(models: list[Path], tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "blocked")}
    done = run_sweep(tmp_path, "--plot", "sweep.png", "--evaluate", judge(tmp_path), env=environment)
    assert done.returncode == 1
    assert done.stderr == "error: a plot needs matplotlib, which is not installed\nhint: uv sync --extra plot\n"
    assert calls(tmp_path) == []


def test_labels_of_a_plot_never_overlap() -> None:
    for places in ([0.5, 0.5, 0.5], [0, 0, 0, 0.01], [0.2, 0.9, 1, 1, 1]):
        moved = SWEEP.apart(places, 0.05)
        assert min(b - a for a, b in itertools.pairwise(moved)) > 0.049
        assert min(moved) >= 0
        assert max(moved) <= 1


# ---------------------------------------------------------------------------------------------------------------------
# What a person sees: plans, estimates, JSON, colours and hints
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixture(tmp_path: Path) -> list[Path]:
    """A base of two types with integers in it, as a directory; a fine-tune in shards; an adapter."""
    base = random_model(0, BF16, {"embed.weight": (40, 8), "layer.weight": (6, 8), "norm.weight": (8,)})
    base |= {"table": torch.arange(12), "scale": torch.ones(3)}
    paths = [save_directory(tmp_path / "base", base, torch_dtype="bfloat16")]
    (paths[0] / "tokenizer.json").write_text("{}")
    tuned = finetune({name: tensor for name, tensor in base.items() if name != "table"}, 1) | {"table": base["table"]}
    paths.append(
        save_sharded(tmp_path / "math", tuned, [["embed.weight", "table"], ["layer.weight", "norm.weight", "scale"]])
    )
    return [*paths, lora_directory(tmp_path / "code", {"layer": (torch.ones(2, 8) * 1e-3, torch.ones(6, 2))})]


def words_of(line: str) -> list[str]:
    """The cells of a table's row."""
    return re.split(r"\s{2,}", line.strip())


def test_the_plan_shows_models_rules_files_and_needs(
    mixture: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["-b", "base", "-m", "math", "code", "-o", "out", "--drop-rate", "0.9", "0.8"]
    arguments += ["--rule", "embed*:drop_rate=0.5,rescale_q=0.6", "--rule", "*norm*:lambda_coeff=0"]
    arguments += ["--max-shard-size", "750B"]
    before = snapshot(tmp_path)
    assert dare.main([*arguments, "--dry-run"]) == 0
    assert snapshot(tmp_path) == before
    lines = capsys.readouterr().out.splitlines()
    sizes = {
        name: sum(p.stat().st_size for p in (tmp_path / name).glob("*.safetensors"))
        for name in ("base", "math", "code")
    }
    rows = [words_of(line) for line in lines]
    assert lines[0] == "would merge 2 models into out"
    assert ["base", dare.human(sizes["base"]), "5", "391", "BF16 3, I64 1, F32 1, the base"] in rows
    assert ["math", dare.human(sizes["math"]), "5", "391", "BF16 3, I64 1, F32 1"] in rows
    assert ["code", dare.human(sizes["code"]), "2", "28", "F32, LoRA of rank 2, changes 1 tensor"] in rows
    assert "method linear; seeds 42, 43; weights 0.5, 0.5" in lines
    assert ["embed*", "1", "320", "drop rate 0.5; rescale_q 0.6"] in rows
    assert ["*norm*", "1", "8", "lambda 0: as in the base"] in rows
    assert ["all others", "2", "51", "drop rate 0.9, 0.8"] in rows
    assert ["not merged", "1", "12", "I64: as in the base"] in rows
    assert not any("lacks" in line or "more than the base" in line or "shapes" in line for line in lines)
    assert dare.main(["-q", *arguments]) == 0
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    for label, path in zip(("write", ""), shards, strict=True):
        assert f"{label:8}{path.name}, {dare.human(path.stat().st_size)}" in lines
    others = "README.md, config.json, dare_recipe.toml, model.safetensors.index.json, tokenizer.json"
    assert f"        {others}" in lines
    written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert any(line.startswith(f"disk    {dare.human(written)} needed, ") for line in lines)
    assert max(map(len, lines)) <= 120


def test_the_plan_says_what_does_not_fit_and_what_will_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = random_model()
    odd = finetune(base, 1) | {"new": torch.ones(2), "head.weight": torch.zeros(7, 1500)}
    del odd["scalar"]
    save(tmp_path, base=base, odd=odd, own=base)
    arguments = ["-b", "base.safetensors", "-m", "odd.safetensors", "--mismatch", "overlap", "--dry-run"]

    def planned(*more: str) -> str:
        assert dare.main([*arguments, *more]) == 0
        return capsys.readouterr().out

    plan = planned("-o", "out.safetensors")
    assert "odd.safetensors lacks 1 tensor\n" in plan
    assert "odd.safetensors has more than the base: 1 tensor\n" in plan
    assert "odd.safetensors has in other shapes (overlap): 1 tensor\n" in plan
    assert "replace" not in plan
    size = dare.human((tmp_path / "own.safetensors").stat().st_size)
    assert f"replace {size} that are there, NOT made by this tool\n" in planned("-o", "own.safetensors", "--force")
    assert dare.main(["-q", *arguments[:-1], "-o", "out.safetensors"]) == 0
    capsys.readouterr()
    size = dare.human((tmp_path / "out.safetensors").stat().st_size)
    assert f"replace {size} that are there, made by this tool\n" in planned("-o", "out.safetensors")
    assert "unfinished" not in planned("-o", "out.safetensors")
    (tmp_path / "out.safetensors.partial").mkdir()
    (tmp_path / "out.safetensors.partial" / "journal").write_text("")
    assert "remove  out.safetensors.partial, an unfinished merge" in planned("-o", "out.safetensors")


def test_a_plan_of_many_files_names_the_first_of_them(models: list[Path], tmp_path: Path) -> None:
    base = {f"t{k}": torch.ones(300) for k in range(9)}
    paths = save(tmp_path, base=base, math=finetune(base, 1))
    text = str(DareMerger(paths[0], [paths[1]], quiet(max_shard_size=1200)).plan(tmp_path / "out"))
    assert text.count("-of-00009.safetensors") == 5
    assert re.search(r"\n +\.\.\. and 4 more: \d", text)


def test_the_plan_is_plain_data_too(mixture: list[Path], tmp_path: Path) -> None:
    merger = DareMerger(mixture[0], mixture[1:], quiet(rules=[{"match": "embed*", "drop_rate": 0.5}]))
    plan = merger.plan(tmp_path / "out")
    assert plan.estimate is None, "asking costs half a second, so it must be asked for"
    data = json.loads(json.dumps(plan.as_dict()))
    assert [model["ranks"] for model in data["models"]] == [[], [], [2]]
    assert [(rule["match"], rule["tensors"], rule["settings"]["drop_rates"]) for rule in data["rules"]] == [
        (["embed*"], 1, [0.5, 0.5]),
        ([], 3, [0.9, 0.9]),
    ]
    assert data["copied_tensors"] == ["table"]
    report = merger.merge(tmp_path / "out")
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert data["bytes_to_write"] == sum(written.values()) == report.bytes_written
    assert {file["name"]: file["size"] for file in data["files"]} == {n: written[n] for n in report.files}
    assert data["side_files"] == list(report.side_files)
    assert data["bytes_to_read"] == report.bytes_read


STAGED: list[dict[str, Any]] = [{}, {"method": "slerp"}, {"method": "ties", "keep_ratio": 0.5}]


@pytest.mark.parametrize("config", STAGED, ids=str)
def test_the_estimate_is_what_the_sampled_jobs_say_of_all(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    base = {f"t{k}": torch.ones(20_000, dtype=BF16) for k in range(8)}
    paths = save(tmp_path, base=base, math=finetune(base, 1), code=finetune(base, 2))
    merger = DareMerger(paths[0], paths[1:], quiet(threads=1, **config))
    found = merger.plan(tmp_path / "out.safetensors", estimate=True).estimate
    assert found is not None
    assert found.sampled_bytes <= merger.plan(tmp_path / "out.safetensors").bytes_to_read
    monkeypatch.setattr(dare, "SAMPLE_SECONDS", 0.0)
    plan = merger.plan(tmp_path / "out.safetensors", estimate=True)
    assert plan.estimate is not None
    stages = len(plan.tensors[0].stages)
    assert plan.bytes_to_read == 8 * (1 + stages) * plan.estimate.sampled_bytes, "one job, and it was that large"
    assert plan.estimate.seconds == pytest.approx(8 * (1 + stages) * plan.estimate.sampled_seconds)
    assert not (tmp_path / "out.safetensors").exists()
    merger.merge(tmp_path / "out.safetensors")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 100, 101])
def test_every_beginning_of_the_sample_is_spread_over_the_plan(tmp_path: Path, count: int) -> None:
    base = {f"t{k:03d}": torch.ones(5) for k in range(count)} | {"none": torch.ones(0)}
    paths = save(tmp_path, base=base, math=base)
    plan = DareMerger(paths[0], [paths[1]], quiet()).plan(tmp_path / "out.safetensors", estimate=True)
    order = [job.number for job in plan.sample()]
    assert sorted(order) == list(range(count))
    for k in range(1, count + 1):
        places = [-1, *sorted(order[:k]), count]
        widest = max(after - before for before, after in itertools.pairwise(places))
        assert widest <= 3 * count / k + 1, "no part of the plan is forgotten"


def test_a_value_that_would_fail_the_merge_fails_the_dry_run_if_it_is_met(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = load_file(models[1])
    broken["layer.weight"][3, 4] = math.nan
    save(tmp_path, math=broken)
    refuse(tmp_path, capsys, 1, "tensor 'layer.weight' holds nan at [3, 4]", flags=("--dry-run",))


def test_what_only_the_sample_would_compute_fails_no_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample does not know what trim drops: here what would overflow, had it been kept."""
    base = {"w": torch.tensor([65000.0, 0.0] * 1000, dtype=F16)}
    math_ = {"w": base["w"] + torch.tensor([400.0, 3000.0] * 1000, dtype=F16)}
    paths = save(tmp_path, base=base, math=math_)
    arguments = ["-q", "-b", str(paths[0]), "-m", str(paths[1]), "-o", str(tmp_path / "out.safetensors")]
    arguments += ["--method", "ties", "--drop-rate", "0", "--lambda", "2"]
    assert dare.main(arguments) == 1
    assert "beyond the range" in capsys.readouterr().err
    assert dare.main([*arguments, "--keep-ratio", "0.5", "--dry-run"]) == 0
    assert dare.main([*arguments, "--keep-ratio", "0.5"]) == 0


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_signal_stops_the_sample(models: list[Path], tmp_path: Path) -> None:
    arguments = ["-b", str(models[0]), "-m", str(models[1]), "-o", str(tmp_path / "out.safetensors"), "--dry-run"]
    assert dare.main(arguments) == 0  # so that nothing is left to compile
    code = (
        "import itertools, sys, dare\n"
        "dare.SAMPLE_SECONDS, sample = 60, dare.Plan.sample\n"
        "def endless(plan):\n    print('started', flush=True)\n    yield from itertools.cycle(list(sample(plan)))\n"
        f"dare.Plan.sample = endless\nsys.exit(dare.main({arguments!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=HERE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    started = time.perf_counter()
    assert process.wait(timeout=30) == 130
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("config", [*STAGED, {"threads": 3, "dtype": "float64"}], ids=str)
def test_the_plan_counts_every_byte_of_the_buffers(models: list[Path], tmp_path: Path, config: dict[str, Any]) -> None:
    plan = DareMerger(models[0], models[1:], quiet(**config)).plan(tmp_path / "out.safetensors")
    arrays = [array for array in vars(dare.Workspace(plan)).values() if isinstance(array, np.ndarray)]
    known = dare.PROCESS_BYTES + dare.TENSOR_BYTES * 4 * 3
    assert plan.memory == known + plan.threads * sum(array.nbytes for array in arrays)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("tensors", "threads"),
    [(8, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(8, 8), (5000, 1), (20_000, 2)])],
)
def test_a_merge_takes_about_the_memory_of_its_plan(tmp_path: Path, tensors: int, threads: int) -> None:
    elements = dare.JOB_ELEMENTS if tensors == 8 else 10
    base = {f"model.layers.{k}.weight": torch.ones(elements, dtype=BF16) for k in range(tensors)}
    paths = save(tmp_path, base=base, math=base, code=base)
    arguments = ["-q", "-b", str(paths[0]), "-m", *map(str, paths[1:]), "-o", str(tmp_path / "out.safetensors")]
    merger = DareMerger(paths[0], paths[1:], quiet(threads=threads))
    planned = merger.plan(tmp_path / "out.safetensors", estimate=True).memory  # and now it is compiled
    code = (
        f"import dare; dare.main({[*arguments, '--threads', str(threads)]!r}); print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=True)
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert 0.75 < planned / (int(peak) * 1024) < 1.33


def test_json_is_all_that_is_printed(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "out.safetensors")
    arguments = ["-b", str(models[0]), "-m", str(models[1]), "-o", output, "--delta-threshold", "1e-9"]
    printed = {}
    for flags in (["--dry-run"], [], ["--quiet"], ["--verify", output], ["--quiet", "--verify", output]):
        capsys.readouterr()
        assert dare.main([*([] if "--verify" in flags else arguments), *flags, "--json"]) == 0
        said = capsys.readouterr()
        printed[" ".join(flags).replace(output, "it")] = json.loads(said.out)
        assert said.err.startswith("warning: ") or flags[-2:] == ["--verify", output] or flags == ["--dry-run"]
    assert printed["--dry-run"]["estimate"]["seconds"] > 0
    assert printed[""]["models"][0]["name"] == printed["--quiet"]["models"][0]["name"] == str(models[1])
    assert printed[""]["method"] == "linear"
    assert printed["--verify it"]["tensors"] == printed["--quiet --verify it"]["tensors"] == 4
    refuse(tmp_path, capsys, 2, "must be one of", flags=("--json", "--method", "x"))


@pytest.mark.skipif(os.name == "nt", reason="such names cannot be")
@pytest.mark.parametrize("trick", TERMINAL_TRICKS)
def test_no_name_in_json_upsets_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], trick: str) -> None:
    base = random_model(shapes={f"w{TERMINAL_TRICKS[trick]}": (30, 5)})
    paths = save(tmp_path, **{f"b{TERMINAL_TRICKS[trick]}": base}, extra=base | {TERMINAL_TRICKS[trick]: torch.ones(2)})
    arguments = ["-b", str(paths[0]), "-m", str(paths[1]), "-o", str(tmp_path / "out.safetensors"), "--json"]
    for flags in (["--dry-run"], []):
        assert dare.main([*arguments, *flags]) == 0
        printed = capsys.readouterr()
        assert calm(printed.out + printed.err)
        data = json.loads(printed.out)
        assert TERMINAL_TRICKS[trick] in (data["extra_tensors"][0] if flags else data["models"][0]["extra_tensors"])


def on_terminal(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """The real command with a terminal as its stderr: its status, and what it said to a pipe and to the terminal."""
    import pty

    controller, terminal = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "dare.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**kept, "TERM": "xterm", **environment},
        text=True,
    )
    os.close(terminal)
    said = b""
    while True:
        try:
            said += (piece := os.read(controller, 1 << 16))
        except OSError:  # as Linux says that nobody has the terminal any more
            break
        if not piece:
            break
    os.close(controller)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out, said.decode()


COLOURED = re.compile(r"\x1b\[[0-9;]*3[0-8][0-9;]*m")


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("environment", "moves", "colours"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)
def test_colours_and_progress_are_for_terminals_that_show_them(
    models: list[Path], tmp_path: Path, environment: dict[str, str], moves: bool, colours: bool
) -> None:
    arguments = ["-b", models[0], "-m", models[1], "-o", tmp_path / "out.safetensors", "--delta-threshold", "1e-9"]
    assert dare.main(["-q", *map(str, arguments)]) == 0  # so that nothing is left to compile
    status, out, said = on_terminal(*arguments, **environment)
    assert status == 0
    assert "\x1b" not in out
    assert ("merging" in said) is moves
    assert ("\x1b" in said) is moves
    assert bool(COLOURED.search(said)) is colours
    assert ("\x1b[33mwarning:\x1b[0m " in said) is colours
    assert colours or "warning: " in said
    status, out, said = on_terminal(*arguments, "--drop-rate", "2", **environment)
    assert (status, out) == (2, "")
    assert ("\x1b[31merror:\x1b[0m " in said) is colours
    assert ("\x1b[36mhint:\x1b[0m " in said) is colours
    assert colours or ("\x1b" not in said and said.startswith("error: "))


def test_a_pipe_gets_no_colours(models: list[Path], tmp_path: Path) -> None:
    done = command("-b", models[0], "-m", models[1], "-o", tmp_path / "out.safetensors", "--delta-threshold", "1e-9")
    assert "warning: " in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_the_summary_has_the_method_the_rates_and_the_speed(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dare, "LEAST_FOR_RATE", 1000)
    rules = [{"match": "head*", "drop_rate": 0.5}]
    config = quiet(method="ties", drop_rate=[0.9, 0.8], lambda_coeff=0.5, rules=rules)
    report = DareMerger(models[0], models[1:], config).merge(tmp_path / "out.safetensors")
    lines = str(report).splitlines()
    count = {name: tensor.numel() for name, tensor in load_file(models[0]).items()}
    total, head = sum(count.values()), count["head.weight"]
    for line, rate in zip(lines[1:], (0.9, 0.8), strict=False):
        honoured_rate = (rate * (total - head) + 0.5 * head) / total
        assert f"  {rate:g} ({honoured_rate:.3g} by rules)  " in line
    assert lines[3].startswith("(method ties, lambda 0.5; above: ")
    speed = dare.human((report.bytes_read + report.bytes_written) / report.seconds)
    assert lines[4].endswith(f" written in {report.seconds:.2f} s ({speed}/s)")
    plain = DareMerger(models[0], models[1:], quiet()).merge(tmp_path / "out.safetensors")
    assert "by rules" not in str(plain)
    assert "copied" not in str(plain)


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        ("method", "tie", "did you mean ties?"),
        ("method", "Linear", "did you mean linear?"),
        ("method", "dare", "known here: linear, slerp, ties"),
        ("dtype", "bfloat", "did you mean bfloat16?"),
        ("dtype", "BF16", "did you mean bf16?"),
        ("mismatch", "overlaps", "did you mean overlap?"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_right_one(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, value: str, hint: str
) -> None:
    assert f"hint: {hint}\n" in refuse(tmp_path, capsys, 2, flags=(f"--{setting}", value))
    assert dare.main(["-c", str(write_config(tmp_path, **{setting: value}))]) == 2
    assert f"hint: {hint}\n" in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        DareConfig(**{setting: value})
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")]
)
def test_short_names_of_types_make_the_same_bytes(models: list[Path], tmp_path: Path, short: str, name: str) -> None:
    output, base = tmp_path / "out.safetensors", ["-q", "-b", str(models[0]), "-m", str(models[1]), "-o"]
    assert dare.main([*base, str(output), "--dtype", name]) == 0
    expected = output.read_bytes()
    assert dare.main([*base, str(output), "--dtype", short]) == 0
    assert output.read_bytes() == expected
    assert recipe_of(tmp_path)["dare"]["dtype"] == name == DareConfig(dtype=short).dtype
    config = write_config(tmp_path, dtype=short)
    assert dare.main(["-q", "-c", str(config), "-m", str(models[1])]) == 0
    assert load_file(output)["layer.weight"].dtype == getattr(torch, name)


@pytest.mark.parametrize(("size", "least"), [("5", "5B"), (" 999 ", "999B"), ("5.5", "5B"), (5, "5B"), (1, "1B")])
def test_a_size_without_a_unit_that_nobody_means_is_asked_about(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], size: Any, least: str
) -> None:
    hint = f"hint: say {str(size).strip()}GB, or {least} if you mean it\n"
    assert hint in refuse(tmp_path, capsys, 2, output="out", flags=(f"--max-shard-size={size}",))
    assert dare.main(["-c", str(write_config(tmp_path, max_shard_size=size))]) == 2
    assert hint in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"max_shard_size would be {least[:-1]} byte"):
        DareConfig(max_shard_size=size)
    assert dare.parse_size(DareConfig(max_shard_size=least).max_shard_size) == int(least[:-1])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("name", ["my model.pt", "pickled.safetensors"])
def test_the_command_that_converts_a_pickle_can_be_pasted(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    torch.save(load_file(models[1]), tmp_path / name)
    error = refuse(tmp_path, capsys, 1, "is a PyTorch pickle", merge=[name])
    [line] = re.findall(r"convert it first: (python .*)\n", error)
    before = set(tmp_path.iterdir())
    shell = f"{shlex.quote(sys.executable)}{line.removeprefix('python')}"
    subprocess.run(["sh", "-c", shell], check=True, timeout=60)
    [made] = set(tmp_path.iterdir()) - before
    assert made.suffix == ".safetensors"
    assert_same(load_file(made), load_file(models[1]))


def test_a_name_that_a_shell_could_misread_is_not_in_a_command(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("$(reboot).bin", "a'b.bin", "`x`.bin"):
        torch.save({}, tmp_path / name)
        error = refuse(tmp_path, capsys, 1, "is a PyTorch pickle", "open('in.bin'", merge=[name])
        assert error.count(name) == 1


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


def test_the_readmes_dry_run_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [shown] = (block for block in blocks("console") if "--dry-run" in block)
    monkeypatch.chdir(HERE)
    assert dare.main(["--config", "merge_config.toml", "--dry-run"]) == 0
    lines = shown.splitlines()[1:]
    assert lines[:13] == capsys.readouterr().out.splitlines()[:13]
    assert [line.split()[0] for line in lines[13:]] == ["disk", "memory", "time", "writing"]


def test_the_tests_that_the_readme_names_are_there() -> None:
    named = re.findall(r"`(test_\w+)`", README)
    assert len(named) >= 12
    assert [name for name in named if name not in globals()] == []


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("analyze_models.py", ("cosine 0.082", "drop 0.8 of rotated", "[[rules]]", "would merge 2 models", "drew ")),
        ("sweep_settings.py", ("plain average (baseline)", "The best merge is")),
        ("drop_rates.py", ("mean of 3 masks", "0.95")),
    ],
)
def test_the_examples_scripts_run(script: str, words: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    before = snapshot(HERE / "examples" / "models")
    done = subprocess.run([sys.executable, str(HERE / "examples" / script)], capture_output=True, text=True, check=True)
    assert all(word in done.stdout for word in words), done.stdout
    assert snapshot(HERE / "examples" / "models") == before


# ---------------------------------------------------------------------------------------------------------------------
# Does it work: the experiment on quality
# ---------------------------------------------------------------------------------------------------------------------

DIGITS = load_example("digits")
QUALITY = load_example("quality")


def tiny_settings() -> Any:
    """Everything there is, as small as can be: what is learned does not matter here."""
    recipe = QUALITY.Recipe(steps=3, rate=1e-2, batch=8)
    plan = QUALITY.Plan((4, 8), recipe, recipe, recipe)
    return QUALITY.Settings(
        plans={"chars": plan, "digits": plan},
        rates=(0.0, 0.9),
        shifts=(0.0, 0.5),
        merge_rates=(0.9,),
        lambdas=(1.0,),
        validation_seeds=1,
        test_seeds=2,
    )


@pytest.fixture(scope="module")
def lab() -> Any:
    """Digits that are learned a little."""
    recipe = QUALITY.Recipe(steps=40, rate=5e-3, batch=32)
    return QUALITY.Lab("digits", 24, QUALITY.Plan((24,), recipe, recipe, recipe), "cpu")


@pytest.fixture(scope="module")
def trained(lab: Any) -> tuple[Tensors, dict[str, Tensors]]:
    made: tuple[Tensors, dict[str, Tensors]] = lab.make()
    return made


def quality(folder: Path, *arguments: str) -> None:
    """The command with tiny settings, in a folder."""
    words = [f"{folder / word}" if word.endswith((".json", ".png", ".svg")) else word for word in arguments]
    QUALITY.run(words if "--report" in words else [*words, "--jobs", "1"], tiny_settings())


def made_up_unit(dare_curve: list[float], merged: list[float], rival: float, large: list[float]) -> dict[str, Any]:
    """A unit's results with one skill's numbers for all three; masks differ by a thousandth."""
    skills = ["a", "b", "c"]
    settings = dataclasses.replace(tiny_settings(), rates=(0.0, 0.5, 0.9, 0.99), test_seeds=3)
    curve = {arm: [[x, x + 0.001, x - 0.001] for x in dare_curve] for arm in ("DARE", "DAREx-q")}
    curve |= {"no rescale": [[1.0] * 3, [0.5] * 3, [0.0] * 3, [0.0] * 3], "magnitude": [[1.0], [1.0], [0.5], [0.0]]}
    single: dict[str, Any] = {name: {**curve, "q": [1, 0.5, 0.1, 0.01]} for name in (*skills, "large")}
    single["large"]["DARE"] = [[x] * 3 for x in large]
    delta = {"mean": 0.001, "p99": 0.002, "relative": 0.1}
    arms = {
        arm: {"drop_rate": 0.0, "lambda": 1.0, "scores": [[rival, rival]]}
        for arm in ("average", "linear", "ties", "slerp")
    }
    arms |= {
        f"{arm} + DARE": {"drop_rate": 0.5, "lambda": 1.0, "scores": [[x, x] for x in merged]}
        for arm in ("linear", "ties", "slerp")
    }
    arms |= {"linear + DARE 0.9": arms["linear + DARE"], "ties trimmed": arms["ties"]}
    return {
        "settings": QUALITY.unit_settings("chars/8", settings, "cpu"),
        "machine": "made up",
        "seconds": 1.0,
        "parameters": 100,
        "skills": skills,
        "models": {"base": {"scores": [0.0] * 3}}
        | {n: {"scores": [1.0] * 3, "delta": delta} for n in (*skills, "large")},
        "single": single,
        "merged": {"a + b": arms},
    }


def results_of(**units: dict[str, Any]) -> dict[str, Any]:
    return {
        "mark": QUALITY.MARK,
        "seconds": 2.0,
        "units": {name.replace("_", "/"): unit for name, unit in units.items()},
    }


def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to read and to score than the experiment has."""
    monkeypatch.setattr(QUALITY, "TEXTS", "argparse")
    monkeypatch.setattr(QUALITY, "HELD_OUT", 30)


def test_one_pass_finds_what_greedy_decoding_letter_by_letter_gets_right(monkeypatch: pytest.MonkeyPatch) -> None:
    few_words(monkeypatch)
    recipe = QUALITY.Recipe(steps=30, rate=1e-2, batch=16)
    lab = QUALITY.Lab("chars", 32, QUALITY.Plan((32,), recipe, recipe, recipe), "cpu")
    lab.fit(recipe, 1, "reverse")
    lines, answers = lab.family.lines["reverse", "test"]
    greedy = lines.clone()
    for row, marks in zip(greedy, answers, strict=True):
        for place in marks.nonzero()[:, 0].tolist():
            row[place] = lab.model(row[None, :place])[0, -1].argmax()
    # A model that gets many words right would need long training; so what it says is put for every second right answer.
    half = torch.arange(len(lines)) % 2 == 0
    expected = torch.where(half[:, None], greedy, lines)
    lab.family.lines["reverse", "test"] = expected, answers
    right = lab.family.right(lab.model, "reverse", "test")
    assert torch.equal(right, (expected == greedy).all(1))
    assert right[half].all()
    assert not right.all()


def test_the_words_of_test_and_validation_are_in_no_training_line() -> None:
    family = QUALITY.Chars("cpu")
    letters = {
        part: {bytes(row.tolist()) for row in family.lines["shift", part][0]}
        for part in ("train", "validation", "test")
    }
    assert len(letters["test"]) == len(letters["validation"]) == QUALITY.HELD_OUT
    assert len(letters["train"]) > 500
    assert not letters["train"] & letters["validation"]
    assert not (letters["train"] | letters["validation"]) & letters["test"]
    shown = "".join(QUALITY.ALPHABET[k] for k in family.lines["shift", "train"][0][0].tolist()).strip()
    word, answer = re.fullmatch(r"n (\w+)=(\w+)", shown).groups()  # type: ignore[union-attr]
    assert answer == "".join("bcdefghijklmnopqrstuvwxyza"[ord(letter) - ord("a")] for letter in word)


def test_magnitude_pruning_keeps_just_the_largest() -> None:
    base, expert = random_model(), finetune(random_model(), 1)
    [config] = QUALITY.single_configs("magnitude", 0.75, tiny_settings())
    pruned = dare.dare_merge(base, [expert], config)
    for name, tensor in base.items():
        delta = (expert[name] - tensor).flatten()
        kept = max(1, int(0.25 * len(delta)))
        largest = torch.zeros(len(delta), dtype=torch.bool).scatter(0, delta.abs().topk(kept).indices, True)
        expected = torch.where(largest, expert[name].flatten(), tensor.flatten()).reshape(tensor.shape)
        torch.testing.assert_close(pruned[name], expected, rtol=0, atol=1e-7)
        assert torch.equal((pruned[name] != tensor).flatten(), largest & (delta != 0))


def test_the_experiments_merges_are_those_of_the_command(lab: Any, trained: Any, tmp_path: Path) -> None:
    base, experts = trained
    settings = tiny_settings()
    one = [QUALITY.single_configs(arm, 0.9, settings)[-1] for arm in QUALITY.SINGLE_ARMS]
    two = [configs[-1] for configs in QUALITY.merge_arms(2, settings).values()]
    paths = save(tmp_path, base=base, rotated=experts["rotated"], shifted=experts["shifted"])
    for config in (*one, *two):
        count = 1 if config in one else 2
        models = [experts["rotated"], experts["shifted"]][:count]
        DareMerger(paths[0], paths[1 : 1 + count], config).merge(tmp_path / "merged.safetensors", force=True)
        assert_same(dare.dare_merge(base, models, config), load_file(tmp_path / "merged.safetensors"))


def test_what_is_chosen_never_sees_test_data_or_test_masks(
    lab: Any, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, experts = trained
    parts, used, real = set(), set(), QUALITY.dare_merge
    trial = QUALITY.Trial(lab, base, [experts["rotated"]], ("rotated",))
    monkeypatch.setattr(lab, "score", lambda weights, skill, part: parts.add(part) or 0.5)
    monkeypatch.setattr(QUALITY, "dare_merge", lambda *given: used.add(given[2].seed) or real(*given))
    configs = QUALITY.single_configs("DAREx-q", 0.9, tiny_settings())
    assert trial.chosen(configs, 5) == configs[0], "the first of equals"
    assert parts == {"validation"}
    chosen_with = set(used)
    trial.tested(configs[0], 5)
    assert parts == {"validation", "test"}
    masks = [{seed + model for seed in seeds for model in range(3)} for seeds in (chosen_with, used - chosen_with)]
    assert len(masks[0]) == len(masks[1]) == 15, "no two masks are the same"
    assert not masks[0] & masks[1]


def test_dares_grid_leaves_its_rival_out_and_has_the_same_lambdas() -> None:
    arms = QUALITY.merge_arms(2, QUALITY.FULL)
    for dropping, rival in QUALITY.RIVALS:
        assert all(config.drop_rate > 0 for config in arms[dropping])
        assert all(config.drop_rate == 0 for config in arms[rival])
        lambdas = [{config.lambda_coeff for config in arms[arm]} for arm in (dropping, rival)]
        assert lambdas[0] == lambdas[1] == set(QUALITY.FULL.lambdas)
    assert not any("slerp" in arm for arm in QUALITY.merge_arms(3, QUALITY.FULL))


@pytest.mark.slow
def test_an_interrupted_experiment_continues_to_the_same_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quality(tmp_path, "--only", "digits", "--out", "whole.json")
    whole = capsys.readouterr().out
    real = QUALITY.run_unit

    def stopped(unit: str, *given: Any) -> Any:
        if unit == "digits/4":
            raise KeyboardInterrupt
        return real(unit, *given)

    monkeypatch.setattr(QUALITY, "run_unit", stopped)
    with pytest.raises(KeyboardInterrupt):
        quality(tmp_path, "--only", "digits", "--out", "part.json")
    assert list(json.loads((tmp_path / "part.json").read_text())["units"]) == ["digits/8"]
    ran: list[str] = []
    monkeypatch.setattr(QUALITY, "run_unit", lambda unit, *given: ran.append(unit) or real(unit, *given))
    quality(tmp_path, "--only", "digits", "--out", "part.json")
    assert ran == ["digits/4"]
    assert list(tmp_path.glob("*.partial")) == []
    timeless = re.compile(r"[\d.]+ s\b|\"seconds\": [\d.]+")
    files = [timeless.sub("", (tmp_path / name).read_text()) for name in ("whole.json", "part.json")]
    assert files[0] == files[1]
    assert timeless.sub("", capsys.readouterr().out) == timeless.sub("", whole)


def test_results_of_other_settings_are_neither_mixed_nor_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = made_up_unit([1.0, 1.0, 1.0, 0.2], [0.8, 0.81, 0.82], 0.5, [1.0, 0.5, 0.2, 0.0])
    (tmp_path / "r.json").write_text(json.dumps(results_of(chars_8=unit)))
    before = snapshot(tmp_path)
    monkeypatch.setattr(QUALITY, "run_unit", lambda *_: pytest.fail("there is nothing to train"))
    with pytest.raises(ConfigError, match="holds results of other settings"):
        quality(tmp_path, "--only", "chars/8", "--out", "r.json")
    assert snapshot(tmp_path) == before


def test_a_report_needs_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    unit = made_up_unit([1.0, 1.0, 1.0, 0.2], [0.8, 0.81, 0.82], 0.5, [1.0, 0.5, 0.2, 0.0])
    (tmp_path / "r.json").write_text(json.dumps(results_of(chars_8=unit, chars_16=unit, digits_8=unit)))
    quality(tmp_path, "--report", "r.json", "--plot", "r.png")
    out = capsys.readouterr().out
    [row] = (line.split() for line in out.splitlines() if "| linear + DARE  " in line and "chars/16" in line)
    assert " ".join(row) == "| chars/16 | a + b | linear + DARE | drop 0.5, lambda 1 | 81.0 ± 1.0 | 81.0 / 81.0 |"
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_readmes_table_of_the_experiment_is_that_of_its_results() -> None:
    units = QUALITY.load_results(HERE / "examples" / "results" / "quality.json")["units"]
    rows = re.findall(r"^\| (chars|digits), width (\d+) \| ([\d,]+) \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) == len(units)
    for family, width, parameters, cells in rows:
        unit = units[f"{family}/{width}"]
        found = [QUALITY.mean_cliffs(unit, arm) for arm in QUALITY.SINGLE_ARMS]
        found.append(QUALITY.cliffs(unit, "large", "DARE"))
        assert parameters == f"{unit['parameters']:,}"
        assert cells.split(" | ") == [f"{100 * sum(masks) / len(masks):.0f}" for masks in found]


def test_the_cliff_is_where_the_gain_is_lost() -> None:
    rates = (0.0, 0.5, 0.9, 0.99)
    assert QUALITY.cliff(rates, [1, 1, 1, 1], 0.95) == 0.99
    assert QUALITY.cliff(rates, [0.9, 1, 1, 1], 0.95) == 0
    assert QUALITY.cliff(rates, [1, 1, 0.5, 1], 0.95) == pytest.approx(0.5 + 0.1 * 0.4)


def test_verdicts_come_out_each_way() -> None:
    steady, early, falls = [1.0, 1.0, 1.0, 0.2], [1.0, 0.5, 0.2, 0.0], [0.3, 0.31, 0.29]

    def said(**units: dict[str, Any]) -> str:
        results = results_of(**units)
        return "\n".join([*QUALITY.single_verdicts("chars", results["units"]), *QUALITY.merge_verdicts(results)])

    good = said(
        chars_8=made_up_unit(early, [0.8, 0.81, 0.82], 0.5, [1.0, 0.0, 0.0, 0.0]),
        chars_16=made_up_unit(steady, [0.8, 0.81, 0.82], 0.5, early),
    )
    assert re.search(r"cliff moves right .* as the paper says", good)
    assert re.search(r"chars/16: flat until 90.* as the paper says", good)
    assert re.search(r"chars/8: flat until .* not as the paper says", good)
    assert re.search(r"chars/16: large deltas .*: as the paper says", good)
    assert re.search(r"chars/16: without rescaling .*: as the paper says", good)
    assert "linear + DARE against the average, lambda tuned the same way: helps in 2, hurts in 0" in good
    bad = said(
        chars_8=made_up_unit(steady, falls, 0.5, steady), chars_16=made_up_unit(early, [0.2, 0.9, 0.5], 0.5, steady)
    )
    assert re.search(r"cliff moves right .*: not as the paper says", bad)
    assert re.search(r"chars/8: large deltas .*: cannot be told", bad)
    assert re.search(r"chars/16: large deltas .*: not as the paper says", bad)
    assert "helps in 0, hurts in 1, cannot be told in 1 of 2" in bad


@pytest.mark.parametrize(
    ("values", "sign"),
    [
        ([0.1, 0.11, 0.12], 1),
        ([-0.1, -0.11, -0.12], -1),
        ([0.1, -0.1, 0.2], 0),
        ([0.009, 0.009], 0),
        ([0.1, 0.1], 1),
        ([0.5], 0),
    ],
)
def test_a_difference_is_told_by_a_t_test_and_when_it_matters(values: list[float], sign: int) -> None:
    assert QUALITY.direction(values) == sign


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "words"], "there is no 'words'"),
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["--report", "no.json"], "there is no file 'no.json'"),
        (["--report", "odd.json"], "'odd.json' is not a results file of this script"),
        (["--out", "no/r.json"], "the directory of 'no/r.json' does not exist"),
        (["--plot", "r.gif"], "neither .png nor .svg"),
        (["--device", "cuda:99"], "there is no GPU that torch can use"),
        (["--device", "meta"], "--device takes cpu or cuda, not 'meta'"),
        (["--report", "odd.json", "--quick"], "--report trains nothing"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_usage_of_the_experiment_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "odd.json").write_text("[]")
    assert QUALITY.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 2, "the sentence and a hint"


def test_letters_need_no_scikit_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sklearn" else real(name, *more)
    )
    assert QUALITY.main(["--quick"]) == 1
    assert "the digits need scikit-learn, which is not installed" in capsys.readouterr().err
    few_words(monkeypatch)
    quality(tmp_path, "--only", "chars/8")
    assert "| chars/8 | large" in capsys.readouterr().out


@pytest.mark.slow
def test_the_quick_experiment_runs_from_the_command_line(tmp_path: Path) -> None:
    words = ["--quick", "--only", "digits/32", "digits/128", "--jobs", "2", "--out", "r.json"]
    script = [sys.executable, str(HERE / "examples" / "quality.py"), *words]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "linear + DARE against the average" in done.stdout
    assert "digits/128" in done.stderr
    models = json.loads((tmp_path / "r.json").read_text())["units"]["digits/128"]["models"]
    assert models["rotated"]["scores"][0] > models["base"]["scores"][0] + 0.3, "the expert has learned its skill"


# ---------------------------------------------------------------------------------------------------------------------
# The benchmark
# ---------------------------------------------------------------------------------------------------------------------

BENCHMARK = load_example("benchmark")
TINY = BENCHMARK.Point(200_000)


def run_benchmark(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(HERE / "examples" / "benchmark.py"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600)


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The whole comparison with the given points alone, called as from the command line."""

    def call(points: list[Any], *flags: str | Path) -> int:
        monkeypatch.setattr(BENCHMARK, "star", lambda sizes, threads: points)
        words = f"benchmark.py --whole --sizes 1e5 2e5 2e6 --repeat 1 --directory {tmp_path / 'scratch'}".split()
        monkeypatch.setattr(sys, "argv", [*words, *map(str, flags)])
        return int(BENCHMARK.main())

    return call


def test_the_benchmark_tells_what_ran_out_of_memory_and_goes_on(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.json"
    # Between what the tool holds and what importing torch takes.
    flags = ("--without", "mergekit", "--memory-limit", "2e8", "--json", path)
    if not Path("/proc/self/status").exists():
        pytest.skip("memory is watched through /proc")
    assert compare([TINY], *flags) == 0, "a result, not a failure"
    outcome = BENCHMARK.load(path).outcomes[0]
    troubles = {figures.role: figures.trouble for figures in outcome.figures}
    assert troubles.pop("torch") == "out of memory"
    assert set(troubles.values()) == {""}
    assert outcome.of("tool").peak < 2e8
    printed = capsys.readouterr().out
    assert "plain torch script                                out of memory: ended after" in printed
    assert re.search(r"^linear, 2 fine-tunes, bf16, 0.2 million .* out of memory ", printed, re.MULTILINE)


def test_the_benchmark_kills_what_takes_too_much_memory_or_time() -> None:
    sleep = "__import__('time').sleep(60)"
    # It holds what it takes until it is looked at, and a slow start of Python is not taken for the other trouble.
    cases = [("out of memory", f"x = b'x' * (1 << 28); {sleep}", 60), ("over 1 s", sleep, 1)]
    for trouble, code, timeout in cases[not Path("/proc/self/status").exists() :]:  # where memory is watched
        with pytest.raises(BENCHMARK.MeasureError) as caught:
            BENCHMARK.measure([sys.executable, "-c", code], BENCHMARK.Conditions(False, timeout, 100_000_000))
        assert caught.value.trouble == trouble
    for said in ("MemoryError", "std::bad_alloc", "DefaultCPUAllocator: can't allocate memory"):
        assert BENCHMARK.explain(1, said, "").trouble == "out of memory"
    assert BENCHMARK.explain(1, "KeyError: 'x'", "").trouble == "failed"


@pytest.mark.slow
def test_an_interrupted_benchmark_continues(
    compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tmp_path / "f.json", TINY._replace(method="ties", models=3, dtype="fp32")
    flags = ("--json", path, "--without", "mergekit", "torch")
    assert compare([TINY], *flags) == 0
    first = BENCHMARK.load(path).outcomes[0]
    assert compare([TINY, other], *flags) == 0
    assert "which is there already" in capsys.readouterr().err
    results = BENCHMARK.load(path)
    assert [outcome.point for outcome in results.outcomes] == [TINY, other]
    assert results.outcomes[0] == first, "measured once"
    assert not list(tmp_path.glob("*.partial"))
    assert compare([TINY], *flags, "--repeat", "2") == 2
    assert "was measured with other repeat" in capsys.readouterr().err
    assert BENCHMARK.load(path) == results

    before = snapshot(tmp_path / "scratch")
    report = run_benchmark("--report", path)
    assert report.returncode == 0
    assert re.search(r"^ties, 3 fine-tunes, fp32 +\d", report.stdout, re.MULTILINE), report.stdout
    table = run_benchmark("--report", path, "--markdown").stdout.splitlines()
    assert len(table) == 4
    assert {line.count("|") for line in table} == {11}
    assert snapshot(tmp_path / "scratch") == before, "a report measures nothing"


def test_the_benchmark_draws_what_it_stored(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, machine = BENCHMARK.Run(1.5, 2.0, 1 << 27), BENCHMARK.Machine("Linux", "a processor", 2, 1 << 34)
    figures = [BENCHMARK.Figures(role, role, [run]) for role in ("floor-1-fsync", "floor-n-fsync", "tool")]
    figures += [BENCHMARK.Figures("mergekit", "mergekit", [], "over 900 s"), BENCHMARK.Figures("torch", "torch", [run])]
    outcomes = [BENCHMARK.Outcome(point, "Llama", 400_000, 2, figures) for point in (TINY, TINY._replace(cold=True))]
    results = BENCHMARK.Results([], machine, {}, "", 1, sizes=[1, 200_000, 2_000_000], outcomes=outcomes)
    BENCHMARK.store(results, tmp_path / "f.json")
    assert BENCHMARK.load(tmp_path / "f.json") == results
    done = run_benchmark("--report", tmp_path / "f.json", "--plot", tmp_path / "f.svg")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^cold .* over 900 s +1.5 \(1.0 x\)", done.stdout, re.MULTILINE), done.stdout
    assert (tmp_path / "f.svg").read_text().count("mergekit: over 900 s") == 4, "for each point, in both panels"


def test_a_failed_program_is_told_and_tried_again(
    compare: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dare.py").write_text("import sys\nsys.exit('broken on purpose')")
    path, real = tmp_path / "f.json", BENCHMARK.TOOL
    flags = ("--json", path, "--without", "mergekit", "torch")
    monkeypatch.setattr(BENCHMARK, "TOOL", tmp_path / "dare.py")
    assert compare([TINY], *flags) == 1
    assert "dare.py linear: ended with status 1\nbroken on purpose" in capsys.readouterr().out
    assert compare([TINY], *flags) == 1
    assert "which is there already" not in capsys.readouterr().err
    monkeypatch.setattr(BENCHMARK, "TOOL", real)
    assert compare([TINY], *flags) == 2, "another program"


def test_a_point_without_room_on_the_disk_is_left_out(
    compare: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare([BENCHMARK.Point(10**12)]) == 0
    assert re.search(r"left out: linear.*1000 billion: .* MiB free, and .* MiB are needed", capsys.readouterr().out)


def test_an_ended_benchmark_leaves_neither_files_nor_processes(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    note, scratch, sleeper = tmp_path / "note", tmp_path / "scratch", tmp_path / "sleeper.py"
    # It has the lock as long as it lives.
    sleeper.write_text(
        f"import fcntl, time\nheld = open({str(note)!r}, 'a')\nfcntl.flock(held, fcntl.LOCK_EX)\n"
        "print('held', file=held, flush=True)\ntime.sleep(600)"
    )
    scratch.mkdir()
    words = [sys.executable, str(HERE / "examples" / "benchmark.py"), "--parameters", "2e5", "--against", str(sleeper)]
    process = subprocess.Popen(
        [*words, "--without", "mergekit", "torch"],
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (note.exists() and note.read_text()):
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    assert list(scratch.iterdir()) == []
    with note.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_trouble_after_a_good_run_is_told_beside_it() -> None:
    tool, good = BENCHMARK.Figures("tool", "tool", [BENCHMARK.Run(1.0)]), [BENCHMARK.Run(800.0)]
    slow = BENCHMARK.Figures("mergekit", "mergekit", good, "over 900 s")
    outcome = BENCHMARK.Outcome(TINY, "Llama", 400_000, 2, [tool, slow])
    assert BENCHMARK.rival(outcome, "mergekit") == "800.0 (800.0 x, then over 900 s)"


def test_inputs_that_a_point_does_not_need_are_no_room_for_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = BENCHMARK.llama(200_000, "bf16")
    BENCHMARK.make_inputs(tmp_path, shape, 5)
    for free, lacks in ((256 << 20, True), (300 << 20, False)):
        monkeypatch.setattr(BENCHMARK.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert bool(BENCHMARK.lacking_space(tmp_path, shape, 2)) == lacks


def test_a_cold_run_finds_nothing_of_its_inputs_in_memory(tmp_path: Path) -> None:
    if not BENCHMARK.can_evict(tmp_path):
        pytest.skip("this system or file system cannot forget a file")
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(os.urandom(3 << 20))
    BENCHMARK.read_all(files)
    assert [BENCHMARK.cached_share(file) for file in files] == [1, 1]
    BENCHMARK.evict(files)
    assert [BENCHMARK.cached_share(file) for file in files] == [0, 0]


@pytest.mark.parametrize("method", ["linear", "ties", "slerp"])
def test_the_torch_script_merges_as_the_tool_does(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = random_model()
    models = [finetune(base, seed, 0.05) for seed in (1, 2)]
    expected = merge(tmp_path, base, *models, method=method, drop_rate=0.0)
    if method == "linear":
        for name, tensor in expected.items():
            mean = (models[0][name].double() + models[1][name].double()) / 2
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-7)
    files = [str(tmp_path / f"{name}.safetensors") for name in ("base", "m0", "m1")]
    monkeypatch.setattr(sys, "argv", ["", method, "1", str(tmp_path / "torch.safetensors"), *files])
    BENCHMARK.torch_merge()
    found = load_file(tmp_path / "torch.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_fine_tunes_of_either_type_differ_from_the_base_by_the_same_delta(tmp_path: Path) -> None:
    deltas = {}
    for dtype, kind in (("bf16", BF16), ("fp32", F32)):
        made = BENCHMARK.make_inputs(tmp_path, BENCHMARK.llama(200_000, dtype), 1)
        base, model = map(load_file, made.files)
        assert {tensor.dtype for tensor in base.values()} == {kind}
        deltas[dtype] = {name: model[name].double() - base[name].double() for name in base}
    block = torch.from_numpy(BENCHMARK.random_block(BENCHMARK.DELTAS, 0.001, 2)).double()
    place = 350377  # where the first fine-tune's deltas begin
    first = deltas["fp32"]["lm_head.weight"].flatten()
    torch.testing.assert_close(first, block[place : place + len(first)], rtol=0, atol=2**-27)
    for name, delta in deltas["fp32"].items():
        torch.testing.assert_close(deltas["bf16"][name], delta, rtol=0, atol=2**-7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--whole", "--method", "ties"], "--method is about one setting, and does not go with --whole"),
        (["--sizes", "1e5", "1e6", "1e7"], "--sizes goes with --whole"),
        (["--whole", "--sizes", "1e6", "1e5", "1e7"], "the smallest first"),
        (["--method", "slerp", "--models", "3"], "slerp is between two fine-tunes"),
        (["--report", "nowhere.json"], "cannot read nowhere.json: No such file"),
        (["--parameters", "1e6", "--json", str(HERE / "README.md")], "does not hold the figures of a benchmark"),
        (["--parameters", "1e6", "--json", "/no/such/f.json"], "the directory of /no/such/f.json does not exist"),
        (["--parameters", "1e6", "--plot", "f.jpg"], "--plot f.jpg is neither .png nor .svg"),
        (["--parameters", "1e6", "--against", "no.py"], "there is no file no.py"),
        (["--report", str(HERE / "README.md")], "does not hold the figures of a benchmark"),
        (["--report", "f.json", "--whole"], "--report measures nothing"),
        (["--repeat", "0"], "0 is not a number of at least 1"),
    ],
)
def test_wrong_usage_of_the_benchmark_is_told_in_one_sentence(flags: list[str], message: str) -> None:
    done = run_benchmark(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_the_readme_has_the_stored_figures_of_the_whole_comparison() -> None:
    stored = BENCHMARK.load(HERE / "examples" / "results" / "benchmark.json")
    assert BENCHMARK.markdown(BENCHMARK.summary(stored)) in README
    tool, mergekit, torch_script = (stored.outcomes[0].of(role).median for role in ("tool", "mergekit", "torch"))
    assert f"| **{tool:.1f} s** | {mergekit:.1f} s | not measured | not measured | {torch_script:.1f} s |" in README


def test_the_readme_has_the_verdicts_of_the_experiment() -> None:
    stored = QUALITY.load_results(HERE / "examples" / "results" / "quality.json")
    text = " ".join(README.split())
    assert f"took it {stored['seconds']:.0f} s on an NVIDIA H200" in text
    found = {arm: QUALITY.differences(stored, arm, rival) for arm, rival in QUALITY.RIVALS}
    for arm, said in {
        "linear + DARE": "`linear` with DARE is {:.1f} points below",
        "linear + DARE 0.9": "it loses {:.1f} points",
        "ties + DARE": "it helps: {:.1f} points more",
    }.items():
        assert said.format(abs(100 * np.mean([np.mean(values) for values in found[arm].values()]))) in text


@pytest.mark.slow
def test_the_whole_comparison_runs(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    words = ["--whole", "--sizes", "2e5", "1e6", "2e6", "--repeat", "1", "--without", "mergekit", "--json", path]
    done = run_benchmark(*words)
    assert done.returncode == 0, done.stderr
    results = BENCHMARK.load(path)
    points = BENCHMARK.star([200_000, 1_000_000, 2_000_000], BENCHMARK.cores())
    left_out = [point for point in points if not results.of(point)]
    assert len(left_out) == len(results.left_out)
    assert all(point.cold for point in left_out)
    for outcome in results.outcomes:
        assert not any(figures.trouble for figures in outcome.figures)
        assert outcome.of("tool").peak < 200 << 20
    for text in ("copy on 1 thread", "size: time, last / first", "of memory"):
        assert text in done.stdout
    assert done.stdout.count("plain torch script") == len(results.outcomes)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
