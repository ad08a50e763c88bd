"""Diffusion models in one file, and LoRA files of kohya's trainer, which merge as torch would merge
them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import (
    F16,
    F32,
    F64,
    Capture,
    Refusal,
    Tensors,
    finetune,
    low_rank,
    merge_paths,
    random_model,
    run,
    run_merge,
    same_bits,
    save,
    snapshot,
    tune,
    write_adapter,
)
from tests.test_lora_files import make_pair

OUT = "out.safetensors"
IDS = "cond_stage_model.transformer.text_model.embeddings.position_ids"
CONV = "model.diffusion_model.input_blocks.0.0.weight"
UNET = "model.diffusion_model."

LINEAR = "middle_block.1.proj_in"
POINT = "input_blocks.1.1.proj_out"
KERNEL = "output_blocks.2.0.in_layers.2"
SHAPES: dict[str, tuple[int, ...]] = {
    LINEAR: (24, 40),
    POINT: (12, 20, 1, 1),
    KERNEL: (10, 6, 3, 3),
}


# --- checkpoints in one file ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layer.weight", torch.int32),
        ("layer.weight", torch.bool),
        ("layer.bias", torch.int64),
        ("ids", torch.uint8),
        ("ids", torch.int8),
        ("norm.bias", torch.float8_e4m3fn),
    ],
)
def test_what_may_be_quantised_is_no_position(
    tmp_path: Path, check_refused: Refusal, name: str, dtype: torch.dtype
) -> None:
    base = random_model() | {"ids": torch.ones(61), "norm.bias": torch.ones(61)}
    paths = save(tmp_path, base=base, model=base | {name: base[name].to(dtype)})
    for one, other in (paths, paths[::-1]):
        check_refused(one, other, repr(name))


def test_an_inpainting_model_gets_a_hint_that_works(tmp_path: Path, check_refused: Refusal) -> None:
    base = random_model(
        shapes={CONV: (8, 4, 3, 3), "model.diffusion_model.out.2.weight": (4, 8, 3, 3)}
    )
    paths = save(tmp_path, base=base, paint=finetune(base, 1) | {CONV: torch.ones(8, 9, 3, 3)})
    check_refused(
        *paths,
        "is [8, 4, 3, 3] in",
        "and [8, 9, 3, 3] in",
        "inpainting",
        "--mismatch base keeps the base's tensor",
    )
    assert same_bits(
        merge_paths(paths[0], paths[1:], tmp_path / OUT, mismatch="base")[CONV], base[CONV]
    )


# --- LoRA files of kohya's trainer ----------------------------------------------------------------


def pair(
    module: str, shape: tuple[int, ...], rank: int = 3, alpha: torch.Tensor | None = None
) -> Tensors:
    """The tensors of one module. shape: of the tensor that it changes."""
    own = {} if alpha is None else {f"{module}.alpha": alpha}
    return make_pair(module, shape, rank=rank) | own


def module_of(name: str, kind: str = "lora_unet_") -> str:
    return kind + name.replace(".", "_")


def change(tensors: Tensors, module: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What torch makes of a pair."""
    down, up = (
        tensors[f"{module}.lora_{part}.weight"].double().flatten(1) for part in ("down", "up")
    )
    alpha = float(tensors.get(f"{module}.alpha", down.shape[0]))
    return (up @ down * (alpha / down.shape[0])).reshape(shape)


def make(
    folder: Path, dtype: torch.dtype = F32, stored: torch.dtype = F32, prefix: str = UNET
) -> list[Path]:
    """A base, and an adapter for a linear layer and two convolutions, all with other ranks and
    alphas."""
    base = random_model(
        1,
        dtype,
        {f"{prefix}{name}.weight": shape for name, shape in SHAPES.items()} | {"rest": (9,)},
    )
    alphas = {LINEAR: torch.tensor(1.5), POINT: torch.tensor(8), KERNEL: None}
    tensors: Tensors = {}
    for rank, (name, shape) in enumerate(SHAPES.items(), 2):
        tensors |= pair(module_of(name), shape, rank, alphas[name])
    return save(
        folder,
        base=base,
        lora={n: t.to(stored) if t.is_floating_point() else t for n, t in tensors.items()},
    )


@pytest.mark.parametrize(
    ("dtype", "stored", "prefix"),
    [(F32, F16, UNET), (F16, F16, ""), (F16, F32, "unet."), (F64, F32, "diffusion_model.")],
    ids=str,
)
def test_a_lora_file_adds_what_torch_computes(
    tmp_path: Path, dtype: torch.dtype, stored: torch.dtype, prefix: str
) -> None:
    paths = make(tmp_path, dtype, stored, prefix)
    base, lora = map(load_file, paths)
    for chunk in (1024, 1 << 18):
        tune(min_chunk=chunk, max_chunk=chunk)
        report = run_merge(paths[0], paths[1:], tmp_path / OUT, drop_rate=0.0, engine="plain")
        merged = load_file(tmp_path / OUT)
        for name, shape in SHAPES.items():
            made = merged[f"{prefix}{name}.weight"]
            before = base[f"{prefix}{name}.weight"].double()
            expected = before + change(lora, module_of(name), shape)
            assert made.dtype == dtype
            assert torch.allclose(made.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
            assert not torch.allclose(before, expected, atol=1e-3)
        assert same_bits(merged["rest"], base["rest"])
    assert report.models[0].missing_tensors == report.models[0].extra_tensors == ()


@pytest.mark.parametrize(
    ("stored", "shape"), [((24, 40, 1, 1), (24, 40)), ((12, 20), (12, 20, 1, 1))]
)
def test_a_convolution_of_one_point_is_a_linear_layer(
    tmp_path: Path, stored: Any, shape: Any
) -> None:
    lora = pair("lora_unet_proj_in", stored)
    paths = save(tmp_path, base={"proj_in.weight": torch.zeros(shape)}, lora=lora)
    run_merge(paths[0], paths[1:], tmp_path / OUT, drop_rate=0.0, engine="plain")
    expected = change(lora, "lora_unet_proj_in", shape)
    assert torch.allclose(load_file(tmp_path / OUT)["proj_in.weight"].double(), expected, atol=1e-7)


@pytest.mark.parametrize(
    "alpha",
    [torch.tensor([2.0]), torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(2)],
    ids=str,
)
def test_an_alpha_is_a_number_of_any_type(tmp_path: Path, alpha: torch.Tensor) -> None:
    paths = save(
        tmp_path,
        base={"proj.weight": torch.zeros(5, 6)},
        lora=pair("lora_unet_proj", (5, 6), 4, alpha),
    )
    paths += save(tmp_path, plain=pair("lora_unet_proj", (5, 6), 4))
    for path, name in zip(paths[1:], ("half", "whole"), strict=True):
        run_merge(paths[0], [path], tmp_path / f"{name}.safetensors", drop_rate=0.0, engine="plain")
    half, whole = (
        load_file(tmp_path / f"{name}.safetensors")["proj.weight"] for name in ("half", "whole")
    )
    assert torch.equal(2 * half, whole)


def test_every_command_takes_a_lora_file(tmp_path: Path, capsys: Capture) -> None:
    """Together with a full fine-tune."""
    base, lora = make(tmp_path)
    [full] = save(tmp_path, full=finetune(load_file(base), 1))
    common = ["--base", base, "--merge", lora, full, "--engine=plain"]
    run(*common, "--output", tmp_path / OUT, "--dry-run")
    assert "LoRA of rank 2 to 4, changes 3 tensors" in capsys.readouterr().out
    run("analyze", *common, "--json")
    models = json.loads(capsys.readouterr().out)["models"]
    found = [(model["adapter"], model["total"]["tensors"]) for model in models]
    assert found == [(True, 3), (False, 4)]
    run("analyze", *common, "--write-config", lora, "--force", status=2)
    run(*common, "--output", tmp_path / OUT)
    run("verify", "--engine=plain", tmp_path / OUT)
    save(tmp_path, lora={name: 2 * tensor for name, tensor in load_file(lora).items()})
    run("verify", "--engine=plain", tmp_path / OUT, status=1)


DOWN, UP, ALPHA = (
    f"{module_of(LINEAR)}.{part}" for part in ("lora_down.weight", "lora_up.weight", "alpha")
)
OTHERS = {
    "hada_w1_a": "LoHa",
    "lokr_w2": "LoKr",
    "oft_blocks": "OFT",
    "on_input": "(IA)^3",
    "a1.weight": "GLoRA",
    "lora_mid.weight": "LoCon of three",
    "diff_b": "not a plain LoRA",
}


@pytest.mark.parametrize(
    ("changed", "complaints"),
    [
        *(
            ({f"{module_of(LINEAR)}.{part}": torch.ones(3)}, [words, f".{part}'"])
            for part, words in OTHERS.items()
        ),
        ({DOWN: None}, ["no pair of matrices A and B for", module_of(LINEAR)]),
        ({UP: None}, ["no pair of matrices A and B for", module_of(LINEAR)]),
        ({UP: torch.ones(24, 5)}, ["[2, 40] and [24, 5] of", "no pair"]),
        ({UP: torch.ones(24, 2, 3, 3)}, ["[2, 40] and [24, 2, 3, 3] of", "no pair"]),
        ({DOWN: torch.ones(())}, ["[] and [24, 2] of", "no pair"]),
        ({DOWN: torch.ones(2, 0)}, ["[2, 0] and [24, 2] of", "no pair"]),
        ({DOWN: torch.ones(2, 41)}, ["is [24, 40] in", "and [24, 41] in"]),
        ({DOWN: torch.ones(2, 40, dtype=torch.int8)}, [DOWN, "is I8"]),
        ({ALPHA: torch.tensor(float("nan"))}, ["the alpha of", "not a finite number"]),
        ({ALPHA: torch.ones(2)}, ["the alpha of", "not a finite number"]),
        ({ALPHA: torch.ones(1, dtype=torch.uint8)}, [ALPHA, "is U8"]),
        ({f"{module_of(LINEAR)}.dora_scale": torch.ones(3)}, ["DoRA", "magnitudes [3]"]),
    ],
)
def test_a_lora_file_that_does_not_fit_is_refused(
    tmp_path: Path, check_refused: Refusal, changed: dict[str, Any], complaints: list[str]
) -> None:
    base, lora = make(tmp_path)
    tensors = {
        name: tensor
        for name, tensor in {**load_file(lora), **changed}.items()
        if tensor is not None
    }
    save(tmp_path, lora=tensors)
    check_refused(base, lora, "lora.safetensors", *complaints, flags=("--engine=plain",))


def test_a_lora_file_of_which_nothing_fits_is_refused(
    tmp_path: Path, check_refused: Refusal
) -> None:
    base, lora = make(tmp_path)
    module = "lora_unet_down_blocks_0_attentions_0_proj_in"
    save(tmp_path, lora=pair(module, (4, 4)) | pair("lora_te3_x", (4, 4)))
    words = ["none of the modules", f"'{module}'", "'lora_te3_x'", f"the base has '{UNET}"]
    check_refused(base, lora, *words, "convert the adapter")


@pytest.mark.parametrize(
    ("base", "modules", "words"),
    [
        (["a.b_c.weight", "a_b.c.weight"], ["lora_unet_a_b_c"], "'a.b_c.weight', 'a_b.c.weight'"),
        (["text_encoder.x.weight"], ["lora_te_x", "lora_te1_x"], "'text_encoder.x.weight' twice"),
        (["x.weight"], ["lora_unet_x"], "is quantised"),
    ],
)
def test_a_lora_file_whose_names_mean_several_tensors_or_quantised_ones_is_refused(
    tmp_path: Path, check_refused: Refusal, base: list[str], modules: list[str], words: str
) -> None:
    dtype = torch.float8_e4m3fn if "quantised" in words else F32
    lora = {key: tensor for module in modules for key, tensor in pair(module, (4, 4)).items()}
    paths = save(tmp_path, base={name: torch.ones(4, 4).to(dtype) for name in base}, lora=lora)
    check_refused(*paths, words)


# --- kohya's adapters as PEFT's, and back ---------------------------------------------------------


def convert(*words: Any, status: int = 0) -> None:
    run("convert", "-q", *words, status=status)


def merge_alike(base: Path, adapters: list[Path], out: Path) -> bool:
    merged = [merge_paths(base, [each], out, drop_rate=0.0, engine="plain") for each in adapters]
    return all(same_bits(merged[0][name], other[name]) for other in merged for name in other)


@pytest.mark.parametrize("stored", [F32, F16], ids=str)
@pytest.mark.parametrize("prefix", ["", UNET])
def test_a_lora_file_becomes_a_directory_of_peft_and_the_same_file_again(
    tmp_path: Path, prefix: str, stored: torch.dtype
) -> None:
    base, lora = make(tmp_path, stored=stored, prefix=prefix)
    convert(lora, tmp_path / "peft", "--base", base)
    convert(tmp_path / "peft", tmp_path / "again.safetensors")
    old, new = load_file(lora), load_file(tmp_path / "again.safetensors")
    default = {f"{module_of(KERNEL)}.alpha": torch.tensor(4.0)}  # without one, it is the rank
    assert new.keys() == (old | default).keys()
    for name, tensor in (default | old).items():
        if name.endswith("alpha"):
            assert float(new[name]) == float(tensor)
        else:
            assert same_bits(new[name], tensor)
    assert merge_alike(
        base, [lora, tmp_path / "peft", tmp_path / "again.safetensors"], tmp_path / OUT
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # importing PEFT takes longer than most of the suite
def test_peft_loads_what_a_lora_file_became(tmp_path: Path) -> None:
    import peft

    layers = {"a": (8, 6), "b.a": (8, 6), "b.c": (4, 3, 3, 3), "d": (5, 6)}
    model = torch.nn.Module()
    model.a, model.b, model.d = torch.nn.Linear(6, 8), torch.nn.Module(), torch.nn.Linear(6, 5)
    model.b.a, model.b.c = torch.nn.Linear(6, 8), torch.nn.Conv2d(3, 4, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora: Tensors = {}
    for rank, (name, shape) in enumerate(layers.items(), 2):
        lora |= pair(module_of(name), shape, rank, torch.tensor(float(5 - rank)))
    paths = save(tmp_path, base=before, lora=lora)
    convert(paths[1], tmp_path / "peft", "-b", paths[0])
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    merged = adapted.merge_and_unload().state_dict()
    for name, shape in layers.items():
        expected = before[f"{name}.weight"].double() + change(lora, module_of(name), shape)
        assert torch.allclose(merged[f"{name}.weight"].double(), expected, atol=1e-6), name


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"lora_alpha": 0.1},
        {"rank_pattern": {"q": 3}, "alpha_pattern": {"d.0.q": 7}, "use_rslora": True},
    ],
    ids=str,
)
def test_an_adapter_of_peft_becomes_a_lora_file(tmp_path: Path, config: dict[str, Any]) -> None:
    shapes = {"d.0.q": (8, 6), "text_model.k": (6, 6)}
    ranks = {"d.0.q": 3 if "rank_pattern" in config else 2, "text_model.k": 2}
    pairs = [low_rank(name, shape, ranks[name]) for name, shape in shapes.items()]
    adapter = write_adapter(tmp_path / "adapter", pairs[0] | pairs[1], **config)
    [base] = save(tmp_path, base=random_model(shapes={f"{n}.weight": s for n, s in shapes.items()}))
    convert(adapter, tmp_path / "lora.safetensors")
    modules = {name.partition(".")[0] for name in load_file(tmp_path / "lora.safetensors")}
    assert modules == {"lora_unet_d_0_q", "lora_te_text_model_k"}
    assert merge_alike(base, [adapter, tmp_path / "lora.safetensors"], tmp_path / OUT)


PLAIN = low_rank("a.b", (8, 6))


@pytest.mark.parametrize(
    ("more", "config", "words"),
    [
        ({"base_model.model.norm.weight": torch.ones(3)}, {}, "'norm.weight'"),
        (
            {f"base_model.model.e.lora_embedding_{x}": torch.ones(2, 2) for x in "AB"},
            {},
            "'e'",
        ),
        (
            {"base_model.model.a.b.lora_magnitude_vector": torch.ones(8)},
            {"use_dora": True},
            "'a.b'",
        ),
        ({}, {"fan_in_fan_out": True}, "GPT-2"),
        ({}, {"r": 3}, "rank 3"),
        (low_rank("a_b", (8, 6)), {}, "underscores"),
    ],
    ids=str,
)
def test_an_adapter_that_kohyas_format_cannot_hold_is_refused(
    tmp_path: Path, capsys: Capture, more: Tensors, config: dict[str, Any], words: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", PLAIN | more, **config)
    convert(adapter, tmp_path / "new.safetensors", status=1)
    assert words in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [adapter]


def test_what_an_adapter_becomes_must_have_a_place_and_names(
    tmp_path: Path, capsys: Capture
) -> None:
    base, lora = make(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", PLAIN)
    weights = adapter / "adapter_model.safetensors"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    [other] = save(tmp_path, other={f"{name}.weight": torch.ones(2, 2) for name in SHAPES})
    before = snapshot(tmp_path)
    for words, complaint, status in (
        ([adapter, tmp_path / "new"], "new.safetensors", 2),
        ([adapter, weights], "exists already", 2),
        ([adapter, weights, "--force"], "is the input", 2),
        ([lora, tmp_path / "new.safetensors", "-b", base], "directory", 2),
        ([lora, tmp_path / "new"], "--base MODEL", 2),
        ([lora, tmp_path / "full", "-b", base], "exists already", 2),
        ([lora, tmp_path / "full", "-b", base, "--force"], "cannot write", 1),
        ([lora, tmp_path / "new", "-b", other], "[2, 2]", 1),
    ):
        convert(*words, status=status)
        assert complaint in capsys.readouterr().err
    assert snapshot(tmp_path) == before
