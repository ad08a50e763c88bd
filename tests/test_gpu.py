"""Tensors in memory: the GPU's kernels, by Triton's interpreter where there is no GPU; results in
existing tensors."""

import importlib.util
import logging
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from dare import DareConfig, DareError, dare_merge
from darelib.core.tuning import TUNING
from darelib.run import memory
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    HERE,
    Tensors,
    assert_same,
    finetune,
    random_model,
    same_bits,
)
from tests.test_kernels import DEVICES

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "linear": (2, {}),
    "weights": (
        3,
        {"weights": [0.5, -0.2, 0.1], "lambda_coeff": 1.5, "drop_rate": [0.1, 0.5, 0.99]},
    ),
    "ties": (2, {"method": "ties", "drop_rate": 0.5}),
    "ties of five": (5, {"method": "ties", "drop_rate": 0.3}),
    "ties with shares": (5, {"method": "ties", "drop_rate": 0.5, "weights": [1, 2, 3, 4, 5]}),
    "ties without": (3, {"method": "ties", "normalize": False}),
    "trim": (2, {"method": "ties", "keep_ratio": 0.3, "drop_rate": 0.4}),
    "trim of all": (1, {"method": "ties", "keep_ratio": 0.01, "drop_rate": 0.0}),
    "slerp": (2, {"method": "slerp", "drop_rate": 0.5, "slerp_t": 0.3}),
    "the model": (1, {"drop_rate": 0.0}),
    "q": (
        2,
        {
            "drop_rate": 0.9,
            "rescale_q": 0.5,
            "rules": [{"match": "*bias", "drop_rate": 0.6, "lambda_coeff": 0.5}],
        },
    ),
    "magnitude": (2, {"drop": "magnitude", "drop_rate": 0.5}),
    "sums": (2, {"drop_rate": 0.5, "rescale": "l1"}),
    "ram": (2, {"method": "ram", "drop_rate": 0.5}),
    "della": (2, {"drop": "della", "drop_rate": 0.5, "rescale": "l1"}),
}
# Runs a merge as on a GPU, with kernels that are interpreted; torch is told that its tensors are
# there.
INTERPRET = """
import contextlib, sys, torch, dare
from darelib.kernels import gpu
from tests.test_gpu import CONFIGS, make_models
from tests.support import same_bits
gpu.can_merge_on = lambda _: True
torch.cuda.device = lambda _: contextlib.nullcontext()
there = torch.Tensor.is_cuda
launched = []
launch, draw = gpu.Batch._launch, gpu.draw_bits
drawn = []
gpu.draw_bits = lambda *which, **where: drawn.append(which) or draw(*which, **where)
def note(self, kernel, *rest, **named):
    launched.append(kernel)
    return launch(self, kernel, *rest, **named)

gpu.Batch._launch = note
dtype = getattr(torch, sys.argv[1])
for name, (count, settings) in CONFIGS.items():
    base, *models = make_models(count, dtype)
    wanted = dare.dare_merge(base, models, dare.DareConfig(**settings))
    torch.Tensor.is_cuda = property(lambda _: True)
    given = dare.dare_merge(base, models, dare.DareConfig(**settings))
    torch.Tensor.is_cuda = there
    assert all(same_bits(given[n], wanted[n]) for n in base), name
    assert bool(launched) == (name not in ("magnitude", "sums", "ram", "della")), name
    assert drawn or launched, name
    launched.clear(), drawn.clear()
base, *models = make_models(2, dtype)
for model in (base, *models):
    model["tied"] = model["even.weight"]
wanted = dare.dare_merge(base, models)
out = {name: torch.empty_like(tensor) for name, tensor in base.items()}
# Not contiguous, so not for the kernels.
out["even.weight"] = torch.zeros(64, 128, dtype=dtype)[:, ::2]
torch.Tensor.is_cuda = property(lambda _: True)
dare.dare_merge(base, models, out=out)
torch.Tensor.is_cuda = there
assert all(same_bits(out[name].contiguous(), wanted[name]) for name in base)
print("same bits")
"""


def make_models(count: int, dtype: torch.dtype) -> list[Tensors]:
    base = {
        **random_model(6, dtype),
        "even.weight": random_model(7, F32)["layer.weight"].repeat(3, 2)[:64, :64].to(dtype),
    }
    base["whole.bias"] = torch.linspace(-1, 1, 8192).to(dtype)
    return [base, *(finetune(base, seed, 0.02) for seed in range(1, count + 1))]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # it rounds to bfloat16 in another way
def test_interpreted_kernels_give_the_bits_of_the_definition(dtype: str) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(HERE),
        "PYTHONWARNINGS": "ignore",
    }
    words = [sys.executable, "-c", INTERPRET, dtype]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=600, cwd=HERE
    )
    assert (done.stdout, done.returncode) == ("same bits\n", 0), done.stderr


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_gives_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    count, settings = CONFIGS[name]
    base, *models = make_models(count, dtype)
    there = [{name: tensor.cuda() for name, tensor in model.items()} for model in (base, *models)]
    merged = dare_merge(there[0], there[1:], DareConfig(**settings))
    assert_same(
        {n: tensor.cpu() for n, tensor in merged.items()},
        dare_merge(base, models, DareConfig(**settings)),
    )


@on_gpu
@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_gpu_divides_as_the_cpu_does_down_to_the_smallest_numbers(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    sizes = torch.randint(-149, 120, (count, 1 << 20), generator=random)
    sizes[:, ::2] = sizes[:1, ::2]  # of about the same size
    values = torch.ldexp(torch.randn((count, 1 << 20), generator=random), sizes)
    base = {"w": torch.zeros(1 << 20)}
    models = [{"w": row} for row in values]
    merged = dare_merge(
        {"w": base["w"].cuda()},
        [{"w": row.cuda()} for row in values],
        DareConfig(method="ties", drop_rate=0),
    )
    assert_same(
        {"w": merged["w"].cpu()},
        dare_merge(base, models, DareConfig(method="ties", drop_rate=0)),
    )


@on_gpu
def test_on_a_gpu_tensors_of_all_kinds_are_merged_together() -> None:
    """Odd sizes and addresses, other types, views, tensors that some models lack, that are tied, or
    on the CPU."""
    base, *models = make_models(3, BF16)
    for model in (base, *models):
        model["odd"] = model["even.weight"].reshape(-1)[1:3001]
        model["turned"] = model["even.weight"].T
        model["tied"] = model["even.weight"]
    models[0]["layer.weight"] = models[0]["layer.weight"].float()
    del models[1]["scalar"], models[2]["odd"]
    there = [{name: tensor.cuda() for name, tensor in model.items()} for model in (base, *models)]
    for model in there:
        model["odd"] = (
            model["even.weight"].reshape(-1)[1:3001]
            if "odd" in model
            else model["tied"].reshape(-1)[1:3001]
        )
        model["tied"] = model["even.weight"]
        model["turned"] = model["even.weight"].T
    del there[3]["odd"]
    there[2]["layer.weight"] = there[2]["layer.weight"].cpu()
    for settings in ({}, {"method": "ties", "keep_ratio": 0.5, "drop_rate": 0.2}):
        wanted = dare_merge(base, models, DareConfig(**settings))
        merged = dare_merge(there[0], there[1:], DareConfig(**settings))
        assert_same({name: tensor.cpu() for name, tensor in merged.items()}, wanted)
        assert merged["tied"] is merged["even.weight"]


@on_gpu
@pytest.mark.parametrize(
    ("value", "complaint"), [(math.nan, "of the base or of model 1"), (3e38, "holds or gives")]
)
def test_a_gpu_finds_values_that_are_not_finite(value: float, complaint: str) -> None:
    base, *models = (
        {name: t.cuda() for name, t in model.items()} for model in make_models(2, BF16)
    )
    models[1]["even.weight"][3, 3] = value
    with pytest.raises(DareError, match=rf"tensor 'even.weight' {complaint}"):
        dare_merge(base, models, DareConfig(drop_rate=0.0, weights=[1.0, 9.0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["linear", "slerp", "magnitude"])
def test_results_can_be_written_into_existing_tensors(name: str, device: str) -> None:
    count, settings = CONFIGS[name]
    config = DareConfig(**settings)
    base, *models = (
        {n: t.to(device) for n, t in model.items()} for model in make_models(count, BF16)
    )
    for model in (base, *models):
        model["ids"] = torch.arange(5, device=device)
        model["tied"] = model["even.weight"]
    wanted = dare_merge(base, models, config)
    out = {name: torch.full_like(tensor, 7) for name, tensor in base.items()}
    out["even.weight"] = torch.full((64, 128), 7.0, dtype=BF16, device=device)[
        :, ::2
    ]  # not contiguous
    out["layer.weight"] = torch.nn.Parameter(out["layer.weight"])
    addresses = {name: tensor.data_ptr() for name, tensor in out.items()}
    assert_same(
        {n: t.cpu() for n, t in dare_merge(base, models, config, out=out).items()},
        to_cpu(wanted),
    )
    assert_same(to_cpu({name: tensor.detach() for name, tensor in out.items()}), to_cpu(wanted))
    assert {name: tensor.data_ptr() for name, tensor in out.items()} == addresses
    dare_merge(base, models, config, out=base)
    assert_same(to_cpu(base), to_cpu(wanted))


def to_cpu(state: Tensors) -> Tensors:
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}


def test_ranks_are_those_of_the_base_before_it_is_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TUNING, "memory_chunk", 1024)
    base, model = ({"w": random_model(seed, F32)["layer.weight"].repeat(40, 1)} for seed in (1, 2))
    config = DareConfig(drop="della", drop_rate=0.5)
    wanted = dare_merge(base, [model], config)["w"]
    assert same_bits(dare_merge(base, [model], config, out=base)["w"], wanted)


def test_without_triton_torch_merges_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("gpu", "gpu_kernels"):
        monkeypatch.delitem(sys.modules, f"darelib.kernels.{name}", raising=False)
        monkeypatch.delattr(f"darelib.kernels.{name}", raising=False)
    memory._load_gpu.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert memory._load_gpu() is None
        assert memory._load_gpu() is None
    memory._load_gpu.cache_clear()
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "Triton cannot be used"
    ]
