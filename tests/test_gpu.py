"""Tensors in memory: merged by the plan that files have, by the GPU's kernels (where there is none,
by Triton's interpreter), into existing tensors if asked to."""

import importlib.util
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dare
from dare import DareConfig, DareError, dare_merge
from darelib.run import in_memory as memory
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
    save,
    tune,
)
from tests.test_arithmetic import DEVICES

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
    "ram of five": (5, {"method": "ram", "drop_rate": 0.0, "threshold": 0}),
    "ram with shares": (3, {"method": "ram", "weights": [1, 2, 3], "lambda_coeff": 1.5}),
    "della": (2, {"drop": "della", "drop_rate": 0.5, "rescale": "l1"}),
    "karcher": (3, {"method": "karcher", "drop_rate": 0.5}),
    "multislerp": (3, {"method": "multislerp", "drop": "magnitude", "drop_rate": 0.5}),
}
# Runs a merge as on a GPU, with kernels that are interpreted; torch is told that its tensors are
# there.
INTERPRET = """
import contextlib, sys, torch, dare
from darelib.arithmetic import gpu
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
    for model in (base, *models):
        model["mask"] = torch.full((70, 70), -torch.inf).triu(1).to(dtype)
    wanted = dare.dare_merge(base, models, dare.DareConfig(**settings))
    torch.Tensor.is_cuda = property(lambda _: True)
    given = dare.dare_merge(base, models, dare.DareConfig(**settings))
    torch.Tensor.is_cuda = there
    assert all(same_bits(given[n], wanted[n]) for n in base), name
    others = ("magnitude", "sums", "della", "karcher", "multislerp")
    assert bool(launched) == (name not in others), name
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
    # Measured, it would take twice as long.
    given = {key: each for key, each in os.environ.items() if not key.startswith("COVERAGE")}
    environment = {
        **given,
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
    config = DareConfig(method="ties", drop_rate=0)
    merged, wanted = (
        dare_merge({"w": rows[0] * 0}, [{"w": row} for row in rows], config)
        for rows in (values.cuda(), values)
    )
    assert_same(to_cpu(merged), wanted)


def make_mixture(device: str) -> tuple[Tensors, list[Tensors]]:
    """Odd sizes and addresses, other types, views, tensors that some models lack, that are tied, or
    on the CPU."""
    base, *models = (
        {name: tensor.to(device) for name, tensor in model.items()}
        for model in make_models(3, BF16)
    )
    for model in (base, *models):
        model["odd"] = model["even.weight"].reshape(-1)[1:3001]
        model["turned"] = model["even.weight"].T
        model["tied"] = model["even.weight"]
    models[0]["layer.weight"] = models[0]["layer.weight"].float()
    models[1]["layer.weight"] = models[1]["layer.weight"].cpu()
    del models[1]["scalar"], models[2]["odd"]
    return base, models


@on_gpu
@pytest.mark.parametrize("settings", [{}, {"method": "ties", "keep_ratio": 0.5, "drop_rate": 0.2}])
def test_on_a_gpu_tensors_of_all_kinds_are_merged_together(settings: dict[str, Any]) -> None:
    merged = dare_merge(*make_mixture("cuda"), DareConfig(**settings))
    assert_same(to_cpu(merged), dare_merge(*make_mixture("cpu"), DareConfig(**settings)))
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
@pytest.mark.parametrize("name", CONFIGS)
def test_a_mask_that_all_have_is_kept_on_any_device(name: str, device: str) -> None:
    count, settings = CONFIGS[name]
    base, *models = (
        {n: t.to(device) for n, t in model.items()} for model in make_models(count, BF16)
    )
    mask = torch.full((70, 70), -torch.inf, device=device).triu(1).to(BF16)
    for model in (base, *models):
        model["mask"] = mask.clone()
    merged = dare_merge(base, models, DareConfig(**settings))
    assert same_bits(merged["mask"].cpu(), mask.cpu())
    models[-1]["mask"] = mask.T.contiguous()
    with pytest.raises(DareError, match="'mask'"):
        dare_merge(base, models, DareConfig(**settings))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["linear", "slerp", "magnitude", "della"])
def test_results_can_be_written_into_existing_tensors(name: str, device: str) -> None:
    tune(memory_chunk=1024)  # so that ranks are of rows that are partly overwritten
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
    rows = torch.full((64, 128), 7.0, dtype=BF16, device=device)
    out["even.weight"] = rows[:, ::2]
    out["layer.weight"] = torch.nn.Parameter(out["layer.weight"])
    addresses = {name: tensor.data_ptr() for name, tensor in out.items()}
    assert_same(
        {n: t.cpu() for n, t in dare_merge(base, models, config, out=out).items()},
        to_cpu(wanted),
    )
    assert_same(to_cpu({name: tensor.detach() for name, tensor in out.items()}), to_cpu(wanted))
    assert {name: tensor.data_ptr() for name, tensor in out.items()} == addresses
    assert (rows[:, 1::2] == 7).all()
    dare_merge(base, models, config, out=base)
    assert_same(to_cpu(base), to_cpu(wanted))


def to_cpu(state: Tensors) -> Tensors:
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}


def test_without_triton_torch_merges_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("gpu", "gpu_kernels"):
        monkeypatch.delitem(sys.modules, f"darelib.arithmetic.{name}", raising=False)
        monkeypatch.delattr(f"darelib.arithmetic.{name}", raising=False)
    memory._load_gpu.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert memory._load_gpu() is None
        assert memory._load_gpu() is None
    memory._load_gpu.cache_clear()
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "Triton cannot be used"
    ]


# --- files and state dicts are merged by one plan -------------------------------------------------

SHAPES = {"a.weight": (12, 8), "b.weight": (6, 8), "layers.0.norm": (8,)}
BASE = random_model(1, torch.bfloat16, SHAPES)
TUNED = finetune(BASE, 2, 0.01)
TALL = TUNED | {"b.weight": torch.cat([TUNED["b.weight"], TUNED["a.weight"][:3]])}
SHORT = TUNED | {"b.weight": TUNED["b.weight"][:4].clone()}
TURNED = TUNED | {"b.weight": TUNED["b.weight"].T.contiguous()}
IDS = {"ids": torch.arange(4)}
QUANTISED = {
    "q.weight": torch.arange(16, dtype=torch.int8).reshape(2, 8),
    "q.weight_scale": torch.ones(2),
}


def run(
    where: str, folder: Path, caplog: Any, base: Tensors, models: list[Tensors], config: Any
) -> tuple[Tensors, list[str]]:
    """The merged tensors, and the warnings, in which the models are called base, m0 and m1."""
    if where == "memory":
        tensors = dare.dare_merge(base, models, DareConfig(**config))
    else:
        paths = save(folder, base=base, **{f"m{i}": m for i, m in enumerate(models)})
        out = folder / "out.safetensors"
        dare.DareMerger(paths[0], paths[1:], DareConfig(**config)).merge(out)
        tensors = load_file(out)
    text = "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    for name, short in ((f"{folder}/", ""), (".safetensors", ""), ("model ", "m")):
        text = text.replace(name, short)
    return tensors, text.replace("the base", "base").splitlines()


REFUSED: dict[str, tuple[Tensors, list[Tensors], dict[str, Any], list[str]]] = {
    "more rows": (BASE, [TALL], {}, ["b.weight", "[6, 8]", "[9, 8]"]),
    "fewer rows": (BASE, [TUNED, SHORT], {}, ["b.weight", "[4, 8]"]),
    "another shape": (BASE, [TURNED], {}, ["b.weight", "[8, 6]"]),
    "another shape to overlap": (BASE, [TURNED], {"mismatch": "overlap"}, ["b.weight"]),
    "nothing in common": (BASE, [{"other": torch.ones(3)}], {}, []),
    "integers for weights": (
        BASE,
        [TUNED | {"a.weight": TUNED["a.weight"].long()}],
        {},
        ["a.weight"],
    ),
    "quantised weights that differ": (
        BASE | QUANTISED,
        [TUNED | QUANTISED | {"q.weight": QUANTISED["q.weight"] + 1}],
        {},
        ["q.weight"],
    ),
    "quantised scales that differ": (
        BASE | QUANTISED,
        [TUNED | QUANTISED | {"q.weight_scale": torch.full((2,), 3.0)}],
        {},
        ["q.weight_scale"],
    ),
    "only the base is quantised": (
        BASE | QUANTISED,
        [TUNED | {"q.weight": torch.ones(2, 8), "q.weight_scale": torch.ones(2)}],
        {},
        ["q.weight"],
    ),
    "only a model is quantised": (
        BASE | {"q.weight": torch.ones(2, 8)},
        [TUNED | QUANTISED],
        {},
        ["q.weight"],
    ),
    "a row too long to rank": (
        {"w": torch.zeros(1, (1 << 20) + 8)},
        [{"w": torch.ones(1, (1 << 20) + 8)}],
        {"drop": "della", "drop_rate": 0.5},
        ["w", "della"],
    ),
    "not finite": (
        BASE,
        [TUNED | {"b.weight": TUNED["b.weight"] * float("nan")}],
        {},
        ["b.weight"],
    ),
    "too large": (
        {"w": torch.full((9,), 6e4, dtype=torch.float16)},
        [{"w": torch.full((9,), -6e4, dtype=torch.float16)}],
        {"drop_rate": 0.0, "lambda_coeff": -1.0, "engine": "plain"},
        ["w"],
    ),
    "too many weights": (BASE, [TUNED], {"weights": [1.0, 2.0]}, ["weights"]),
}


@pytest.mark.parametrize("where", ["files", "memory"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused(
    where: str, case: str, tmp_path: Path, caplog: Any
) -> None:
    base, models, config, names = REFUSED[case]
    with pytest.raises(DareError) as caught:
        run(where, tmp_path, caplog, base, models, config)
    assert caught.value.hint
    assert [name for name in names if name not in str(caught.value)] == []
    assert not (tmp_path / "out.safetensors").exists()


WARNED: dict[str, tuple[Tensors, list[Tensors], dict[str, Any], list[str]]] = {
    "nothing": (BASE, [TUNED], {}, []),
    "nothing of quantised weights alike": (BASE | QUANTISED, [TUNED | QUANTISED], {}, []),
    "nothing of empty tensors": (
        BASE | {"none": torch.zeros(0, 3, dtype=torch.int64)},
        [TUNED | {"none": torch.zeros(0, 3, dtype=torch.int64)}],
        {},
        [],
    ),
    "missing tensors": (BASE, [{"a.weight": TUNED["a.weight"]}], {}, ["m0", "b.weight", "norm"]),
    "extra tensors": (BASE, [TUNED | {"more": torch.ones(2)}], {}, ["m0", "more"]),
    "integers that differ": (BASE | IDS, [TUNED | {"ids": IDS["ids"] + 1}], {}, ["m0", "ids"]),
    "integers that are floats": (BASE | IDS, [TUNED | {"ids": torch.arange(4.0)}], {}, ["ids"]),
    "rows to overlap": (BASE, [TUNED, SHORT], {"mismatch": "overlap"}, ["m1", "[4, 8]"]),
    "more rows to overlap": (BASE, [TALL], {"mismatch": "overlap"}, ["m0", "[9, 8]"]),
    "shapes to leave": (BASE, [TURNED, TUNED], {"mismatch": "base"}, ["m0", "b.weight"]),
    "a rule for nothing": (BASE, [TUNED], {"rules": [{"match": "c.*", "drop_rate": 0}]}, ["c.*"]),
    "no rescaling": (BASE, [TUNED], {"rescale": False}, ["rescale"]),
    "gradients without layers": (
        {"a.weight": BASE["a.weight"]},
        [{"a.weight": TUNED["a.weight"]}],
        {"drop_rate": {"gradient": [0.1, 0.9]}},
        ["gradient"],
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_a_user_should_know_is_said_and_the_tensors_are_the_same(
    case: str, tmp_path: Path, caplog: Any
) -> None:
    base, models, config, names = WARNED[case]
    settings = config | {"delta_threshold": 10.0}
    tensors, warnings = run("memory", tmp_path, caplog, base, models, settings)
    said = " ".join(warnings)
    assert [name for name in names if name not in said] == []
    assert bool(names) == bool(said)
    caplog.clear()
    others, other_warnings = run("files", tmp_path, caplog, base, models, settings)
    assert_same(tensors, others)
    assert warnings == other_warnings


@pytest.mark.parametrize(("given", "words"), [([BASE], "itself"), ([TUNED] * 2, "more than once")])
def test_models_that_are_given_again_are_named(
    given: list[Tensors], words: str, caplog: Any
) -> None:
    """Of files, test_report has that."""
    dare.dare_merge(BASE, given, DareConfig(drop_rate=0.5, delta_threshold=10.0))
    assert [words in record.getMessage() for record in caplog.records] == [True]


BUFFER = torch.zeros(400, dtype=torch.bfloat16)
PLACES = {
    "views of one buffer": lambda base, models: {
        name: BUFFER[: tensor.numel()].view(tensor.shape) for name, tensor in base.items()
    },
    "another tensor of a fine-tune": lambda base, models: (
        base | {"b.weight": models[1]["a.weight"][:6]}
    ),
    "another tensor of the base": lambda base, models: (
        base | {"b.weight": base["a.weight"][:6], "a.weight": torch.zeros_like(base["a.weight"])}
    ),
    "rows of the base's own": lambda base, models: (
        base
        | {"a.weight": torch.cat([base["a.weight"], base["a.weight"]])[1:13]}
        | {"b.weight": base["a.weight"].view(-1)[1:49].view(6, 8)}
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_memory_that_would_be_written_before_it_is_read_is_refused(case: str) -> None:
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    models = [TUNED, finetune(BASE, 3, 0.01)]
    before = {name: tensor.clone() for name, tensor in models[1].items()}
    out = PLACES[case](base, models)
    with pytest.raises(DareError, match="memory"):
        dare.dare_merge(base, models, out=out)
    assert_same(base, BASE)
    assert_same(models[1], before)


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "the base's as well"])
def test_an_input_may_be_written_over_by_its_own_name(shared: bool) -> None:
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    model = {name: tensor.clone() for name, tensor in TUNED.items()}
    if shared:  # a tensor that was not trained
        model["a.weight"] = base["a.weight"]
    expected = dare.dare_merge(base, [model, TUNED])
    assert_same(dare.dare_merge(base, [model, TUNED], out=base if shared else model), expected)


def test_tied_tensors_of_which_one_is_kept_are_not_one() -> None:
    base = {"embed_tokens.weight": torch.zeros(4, 2)}
    base["lm_head.weight"] = base["embed_tokens.weight"]
    model = {"embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(5, 2)}
    assert_same(
        dare.dare_merge(base, [model], DareConfig(mismatch="base", drop_rate=0.0)),
        {"embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.zeros(4, 2)},
    )
