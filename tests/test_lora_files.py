"""LoRA files by every usual name add what NumPy computes: strength * alpha / rank * (up @ down)."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import test_diffusers, test_names
from tests.support import (
    Capture,
    Refusal,
    Tensors,
    assert_same,
    merge_paths,
    random_model,
    run,
    run_merge,
    same_bits,
    save,
    slow,
    write_adapter,
)

OUT = "out.safetensors"
UNET = test_names.UNET
KOHYA = ("lora_down.weight", "lora_up.weight")
PEFT = ("lora_A.weight", "lora_B.weight")
RANK = 2


def make_pair(
    module: str, shape: tuple[int, ...], ends: tuple[str, str] = KOHYA, rank: int = RANK
) -> Tensors:
    """The two matrices for a tensor of this shape."""
    generator = torch.Generator().manual_seed(len(module))
    down = torch.randn(rank, *shape[1:], generator=generator)
    up = torch.randn(shape[0], rank, *(1 for _ in shape[2:]), generator=generator) * 0.1
    return {f"{module}.{ends[0]}": down, f"{module}.{ends[1]}": up}


def multiply(pair: Tensors) -> np.ndarray:
    """What up @ down is, in the shape of the tensor that it changes."""
    down, up = (tensor.double().numpy() for tensor in pair.values())
    product = up.reshape(len(up), -1) @ down.reshape(len(down), -1)
    return product.reshape(len(up), *down.shape[1:])


def bake(base: Path, loras: list[Path], **config: Any) -> Tensors:
    settings = {"drop_rate": 0.0, "engine": "plain"} | config
    return merge_paths(base, loras, base.with_name(OUT), **settings)


def check(merged: Tensors, base: Tensors, changes: dict[str, np.ndarray]) -> None:
    """Whether these tensors are changed so, and no others."""
    for name, tensor in base.items():
        if name in changes:
            expected = tensor.double().numpy() + changes[name]
            assert np.abs(changes[name]).max() > 1e-3
            np.testing.assert_allclose(merged[name].double().numpy(), expected, atol=1e-6)
        else:
            assert same_bits(merged[name], tensor), name


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ends",
    [
        PEFT,
        ("lora_A.default.weight", "lora_B.default.weight"),
        KOHYA,
        ("lora.down.weight", "lora.up.weight"),
        ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
    ],
    ids=str,
)
@pytest.mark.parametrize("alpha", [None, 3.0])
def test_both_matrices_have_any_of_their_names(
    tmp_path: Path, ends: tuple[str, str], alpha: float | None
) -> None:
    base = random_model(shapes={"mid_block.proj_in.weight": (8, 6), "mid_block.norm.weight": (6,)})
    pair = make_pair("unet.mid_block.proj_in", (8, 6), ends)
    more = {"unet.mid_block.proj_in.alpha": torch.tensor(alpha)} if alpha else {}
    paths = save(tmp_path, base=base, lora=pair | more)
    change = multiply(pair) * (alpha or RANK) / RANK
    check(bake(paths[0], paths[1:]), base, {"mid_block.proj_in.weight": change})


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("unet.m.attn1.processor.to_q_lora", "unet.m.attn1.to_q"),
        ("unet.m.attn1.processor.to_out_lora", "unet.m.attn1.to_out.0"),
        ("mid.attn1.processor.to_k_lora", "unet.mid.attn1.to_k"),
        ("text_encoder.t.self_attn.to_v_lora", "text_encoder.t.self_attn.v_proj"),
        ("text_encoder.t.self_attn.to_out_lora", "text_encoder.t.self_attn.out_proj"),
        ("double_blocks.0.processor.qkv_lora1", "double_blocks.0.img_attn.qkv"),
        ("double_blocks.0.processor.qkv_lora2", "double_blocks.0.txt_attn.qkv"),
        ("double_blocks.0.processor.proj_lora1", f"{UNET}double_blocks.0.img_attn.proj"),
        ("double_blocks.0.processor.proj_lora2", f"{UNET}double_blocks.0.txt_attn.proj"),
        ("single_blocks.0.processor.proj_lora", "single_blocks.0.linear2"),
    ],
)
def test_processors_of_old_files_and_of_xlabs_are_modules(
    tmp_path: Path, module: str, target: str
) -> None:
    base = random_model(shapes={f"{target}.weight": (8, 6), "norm.weight": (6,)})
    pair = make_pair(module, (8, 6), ("down.weight", "up.weight"))
    paths = save(tmp_path, base=base, lora=pair)
    check(bake(paths[0], paths[1:]), base, {f"{target}.weight": multiply(pair)})


UNETS = (
    ["lora_unet_", "lora_transformer_"],
    [
        "unet.",
        "transformer.",
        "diffusion_model.",
        "model.diffusion_model.",
        "",
        "base_model.model.",
    ],
)
TEXTS = {
    "cond_stage_model.transformer.": ("lora_te_", "text_encoder."),
    "conditioner.embedders.0.transformer.": ("lora_te1_", "text_encoder."),
    "conditioner.embedders.1.transformer.": ("lora_te2_", "text_encoder_2."),
    "text_encoders.clip_g.transformer.": ("lora_te2_", "text_encoder_2."),
    "text_encoders.t5xxl.transformer.": ("lora_te3_", "text_encoder_3.", "text_encoder_2."),
    "text_encoder_2.": ("lora_te2_", "lora_te3_", "text_encoder_2."),
    "text_encoder.": ("lora_te_", "lora_te1_", "text_encoder."),
    "": ("lora_te_", "text_encoder.", "lycoris_"),
}


@pytest.mark.parametrize(
    ("start", "prefix"),
    [
        *(
            (start, prefix)
            for start in (*UNETS[0], *UNETS[1])
            for prefix in ("", "model.diffusion_model.", "unet.", "transformer.")
        ),
        *((start, prefix) for prefix, starts in TEXTS.items() for start in starts),
    ],
)
def test_a_module_is_found_in_its_part_of_the_model(
    tmp_path: Path, start: str, prefix: str
) -> None:
    """Every way that a LoRA file may name it, in every way that the base may."""
    name = "down_blocks.0.attn_1.to_q"
    others = {"vae.", "control.", "text_encoder_4."}  # which have the same names
    base = random_model(shapes={f"{p}{name}.weight": (8, 6) for p in {prefix, *others}})
    module = start + (name.replace(".", "_") if start.endswith("_") else name)
    pair = make_pair(module, (8, 6))
    paths = save(tmp_path, base=base, lora=pair)
    check(bake(paths[0], paths[1:]), base, {f"{prefix}{name}.weight": multiply(pair)})


@pytest.mark.parametrize("module", ["lora_unet_down_blocks_0_attentions_0_to_q", "unet.conv_in"])
def test_a_pipeline_is_a_base(tmp_path: Path, module: str) -> None:
    parts = test_diffusers.make_parts()
    name = "conv_in" if "conv" in module else "down_blocks.0.attentions.0.to_q"
    pair = make_pair(module, tuple(parts["unet"][f"{name}.weight"].shape))
    text = make_pair("lora_te_text_model_encoder_layers_0_mlp_fc1", (4, 4))
    base = test_diffusers.put_pipeline(tmp_path / "base", parts)
    [lora] = save(tmp_path, lora=pair | text)
    run("-b", base, "-m", lora, "-o", tmp_path / "out", "--bake", "--engine=plain", "-q")
    run("verify", "-q", "--engine=plain", tmp_path / "out")
    merged = test_diffusers.load(tmp_path / "out")
    check(merged.pop("unet"), parts.pop("unet"), {f"{name}.weight": multiply(pair)})
    for part, tensors in merged.items():
        check(tensors, parts[part], {})


# --- bases of other names -------------------------------------------------------------------------


def list_modules(tensors: Tensors, starts: tuple[str, ...]) -> list[str]:
    """The modules of parts of a pipeline that a LoRA may change."""
    return [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.startswith(starts) and name.endswith(".weight") and tensor.ndim > 1
        if "embedding.weight" not in name
    ]


STARTS = {
    UNET: ("lora_unet_", "diffusion_model."),
    "double_blocks.": ("lora_unet_double_blocks_", "diffusion_model.double_blocks."),
    "single_blocks.": ("lora_unet_single_blocks_", "diffusion_model.single_blocks."),
    "final_layer.": ("lora_unet_final_layer_", "diffusion_model.final_layer."),
    "unet/": ("lora_unet_", "unet."),
    "transformer/": ("lora_transformer_", "transformer."),
    "text_encoder/": ("lora_te1_", "text_encoder."),
    "text_encoder_2/": ("lora_te2_", "text_encoder_2."),
}


def add_pairs(tensors: Tensors, modules: list[str], is_kohyas: bool) -> tuple[Tensors, Tensors]:
    """A model with a change to each of these modules, and the LoRA that makes it."""
    changed = dict(tensors)
    lora: Tensors = {}
    for k, name in enumerate(modules):
        prefix = next(start for start in STARTS if name.startswith(start))
        start, inside = STARTS[prefix][not is_kohyas], name.removeprefix(prefix)
        module = start + (inside.replace(".", "_") if is_kohyas else inside)
        weight = tensors[f"{name}.weight"]
        pair = make_pair(module, tuple(weight.shape), KOHYA if is_kohyas else PEFT)
        scale = 1.0
        if is_kohyas:
            scale = (1 + k % 3) / RANK
            lora[f"{module}.alpha"] = torch.tensor(scale * RANK)
        lora |= pair
        changed[f"{name}.weight"] = weight + torch.from_numpy(scale * multiply(pair)).float()
    return changed, lora


@pytest.mark.parametrize(
    ("family", "names", "is_kohyas"),
    [
        ("sdxl", "diffusers", True),
        ("flux", "original", True),
        ("flux", "diffusers", False),
        slow("flux", "original", False),
        slow("flux", "diffusers", True),
        slow("sdxl", "diffusers", False),
        *(slow("sdxl", "original", is_kohyas) for is_kohyas in (True, False)),
        *(slow("sd", names, kind) for names in ("original", "diffusers") for kind in (True, False)),
    ],
)
def test_a_lora_of_either_names_fits_a_base_of_either(
    tmp_path: Path, family: str, names: str, is_kohyas: bool
) -> None:
    """Both text encoders have the names of transformers in all LoRAs."""
    # Each module takes a while: of one family all are tried.
    left_out = test_names.VAE if family == "sd" else rf"{test_names.VAE}|put_blocks\.([2-9]|1\d)\."
    shapes = {n: s for n, s in test_names.SMALL[family].items() if not re.search(left_out, n)}
    original = test_names.randomise(shapes)
    named = test_names.to_diffusers(original, family)
    lora: Tensors = {}
    texts = list_modules(named, ("text_encoder",))
    if names == "original":
        starts = (UNET, "double_blocks.", "single_blocks.", "final_layer.")
        changed, lora = add_pairs(original, list_modules(original, starts), is_kohyas)
        expected = test_names.to_diffusers(changed, family)
    else:
        texts += list_modules(named, ("unet/", "transformer/"))
        expected = named
    expected, more = add_pairs(expected, texts, is_kohyas)
    paths = save(tmp_path, original=original, named=named, lora=lora | more)
    for base in paths[:2]:
        report = run_merge(base, paths[2:], tmp_path / OUT, drop_rate=0.0, engine="plain")
        assert report.models[0].extra_tensors == ()
        merged = load_file(tmp_path / OUT)
        if base == paths[0]:
            merged = test_names.to_diffusers(merged, family)
        assert merged.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=0, msg=name)
        (tmp_path / OUT).unlink()


@pytest.mark.parametrize("names", ["original", "diffusers"])
def test_a_lora_by_other_names_is_an_input_like_any(tmp_path: Path, names: str) -> None:
    """Of a base that is stacked, a part; of one that is not, several."""
    family = "flux"
    original = test_names.randomise(test_names.FILES[family])
    named = test_names.to_diffusers(original, family)
    if names == "original":
        base = original
        module = "transformer/transformer_blocks.0.attn.to_k"
        expected, lora = add_pairs(named, [module], False)
    else:
        base = named
        changed, lora = add_pairs(original, ["double_blocks.0.img_attn.qkv"], False)
        expected = test_names.to_diffusers(changed, family)
    paths = save(tmp_path, base=base, lora=lora)
    given = ["-q", "--engine=plain", "--drop-rate=0"]
    run("-b", paths[0], "-m", paths[1], "-o", tmp_path / "a.safetensors", *given)
    run("verify", "-q", "--engine=plain", tmp_path / "a.safetensors")
    joined = f"{paths[0]}+{paths[1]}"
    run("-b", paths[0], "-m", joined, "-o", tmp_path / "b.safetensors", *given)
    run("-b", paths[0], "-m", paths[1], "-o", tmp_path / "adapter", "--adapter-rank=4", *given)
    run("-b", paths[0], "-m", tmp_path / "adapter", "-o", tmp_path / "c.safetensors", *given)
    for name in "abc":
        merged = load_file(tmp_path / f"{name}.safetensors")
        if names == "original":
            merged = test_names.to_diffusers(merged, family)
        for key, tensor in expected.items():
            torch.testing.assert_close(merged[key], tensor, atol=1e-5, rtol=0, msg=f"{name} {key}")


# --- scales ---------------------------------------------------------------------------------------


def save_noted(path: Path, lora: Tensors, noted: Any) -> Path:
    save_file(lora, path, {"lora_adapter_metadata": json.dumps(noted)})
    return path


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"r": 2, "lora_alpha": 6}, (3, 3)),
        ({"r": 2, "lora_alpha": 6, "alpha_pattern": {"b.c": 1, "x": 9}}, (3, 0.5)),
        ({"r": 2, "lora_alpha": 4, "alpha_pattern": {r"^a\.c": 8}, "use_rslora": True}, (8, 4)),
    ],
    ids=str,
)
def test_the_configuration_in_a_header_scales(
    tmp_path: Path, config: dict[str, Any], scales: tuple[float, float]
) -> None:
    """Each part of a pipeline has its own; text_encoder has none here, and counts as it is."""
    names = ("unet.a.c", "unet.b.c", "text_encoder.a.c")
    base = random_model(shapes={f"{name}.weight": (8, 6) for name in names})
    pairs = {name: make_pair(name, (8, 6), PEFT) for name in names}
    [path] = save(tmp_path, base=base)
    noted = {f"unet.{key}": value for key, value in config.items()}
    both = {key: tensor for pair in pairs.values() for key, tensor in pair.items()}
    lora = save_noted(tmp_path / "l.safetensors", both, noted)
    root = np.sqrt(RANK) if "use_rslora" in config else 1
    sized = zip(names, (*(scale / root for scale in scales), 1), strict=True)
    changes = {f"{name}.weight": multiply(pairs[name]) * scale for name, scale in sized}
    check(bake(path, [lora]), base, changes)


@pytest.mark.parametrize(
    ("start", "prefix"),
    [
        ("base_model.model.model.", "model."),
        ("base_model.model.model.", ""),
        ("base_model.model.", "language_model."),
        ("model.", "model."),
    ],
)
def test_an_adapter_of_peft_without_its_configuration_counts_as_it_is(
    tmp_path: Path, start: str, prefix: str
) -> None:
    name = "layers.0.self_attn.q_proj"
    base = random_model(shapes={f"{prefix}{name}.weight": (8, 6), "lm_head.weight": (9, 6)})
    pair = make_pair(f"{start}{name}", (8, 6), PEFT)
    paths = save(tmp_path, base=base, lora=pair)
    report = run_merge(paths[0], paths[1:], tmp_path / OUT, drop_rate=0.0, engine="plain")
    check(load_file(tmp_path / OUT), base, {f"{prefix}{name}.weight": multiply(pair)})
    said = [words for words in report.warnings if "without an adapter_config.json" in words]
    assert len(said) == 1
    assert "alpha = r is assumed" in said[0]


def test_layers_of_gpt2_are_changed_the_other_way_round(tmp_path: Path) -> None:
    shapes = {"c_attn.weight": (6, 18), "c_attn.bias": (18,), "c_proj.weight": (6, 6)}
    base = random_model(shapes={f"transformer.h.0.attn.{n}": s for n, s in shapes.items()})
    pairs = {
        name: make_pair(f"base_model.model.transformer.h.0.attn.{name}", shape, PEFT)
        for name, shape in {"c_attn": (18, 6), "c_proj": (6, 6)}.items()
    }
    paths = save(tmp_path, base=base, lora=pairs["c_attn"] | pairs["c_proj"])
    changes = {f"transformer.h.0.attn.{n}.weight": multiply(pair).T for n, pair in pairs.items()}
    check(bake(paths[0], paths[1:]), base, changes)


def test_a_folder_says_which_text_encoder_it_is(tmp_path: Path, capsys: Capture) -> None:
    name = "text_model.encoder.layers.0.mlp.fc1"
    base = random_model(shapes={f"{name}.weight": (8, 6), "text_projection.weight": (6, 6)})
    pairs = [
        make_pair(f"{kind}_{name.replace('.', '_')}", (8, 6)) for kind in ("lora_te1", "lora_te2")
    ]
    [lora] = save(tmp_path, lora=pairs[0] | pairs[1])
    (tmp_path / "text_encoder_2").mkdir()
    [path] = save(tmp_path / "text_encoder_2", model=base)
    check(bake(path, [lora]), base, {f"{name}.weight": multiply(pairs[1])})
    run("--bake", "-b", path.parent, "-m", lora, "-o", tmp_path / "out", "--engine=plain")
    assert "lora_te1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "module", "named"),
    [
        ("sdxl", "unet/mid_block.proj_in", "lora_unet_mid_block_proj_in"),
        ("sdxl", "text_encoder_2/text_model.fc", "lora_te2_text_model_fc"),
        ("text_encoder", "text_model.fc", "lora_te_text_model_fc"),
        ("text_encoder", "encoder.layers.0.fc", "lora_te_text_model_encoder_layers_0_fc"),
        ("sdxl", "text_encoder/encoder.layers.0.fc", "lora_te_text_model_encoder_layers_0_fc"),
        ("sdxl/text_encoder_2", "text_model.fc", "lora_te2_text_model_fc"),
        ("text_encoder_3", "encoder.block.0.layer.0.fc", "lora_te3_encoder_block_0_layer_0_fc"),
        (None, "transformer_blocks.0.to_q", "lora_transformer_transformer_blocks_0_to_q"),
        (None, "first_stage_model.decoder.conv_in", None),
    ],
)
def test_adapters_of_pipelines_become_files_that_programs_load(
    tmp_path: Path, refused: Refusal, base: str | None, module: str, named: str | None
) -> None:
    pair = make_pair(f"base_model.model.{module}", (8, 6), PEFT)
    folder = write_adapter(tmp_path / "adapter", pair, base_model_name_or_path=base)
    if named is None:
        refused(1, module, "convert", folder, tmp_path / OUT)
    else:
        run("convert", "-q", folder, tmp_path / OUT)
        assert {key.partition(".")[0] for key in load_file(tmp_path / OUT)} == {named}


# --- DoRA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "end", "sides"),
    [
        ((8, 6), "dora_scale", (8, 1)),
        ((6, 6), "dora_scale", (6, 1)),
        ((8, 6, 3, 3), "dora_scale", (8, 1, 1, 1)),
        ((8, 6), "lora_magnitude_vector", (8,)),
        ((8, 6), "lora_magnitude_vector.default.weight", (8,)),
        ((8, 8, 3, 3), "lora_magnitude_vector.weight", (1, 8, 1, 1)),
    ],
    ids=str,
)
def test_dora_sets_the_lengths_of_rows(tmp_path: Path, shape: Any, end: str, sides: Any) -> None:
    base = random_model(shapes={"unet.a.weight": shape, "unet.b.weight": (8, 6)})
    pair = make_pair("lora_unet_a", shape)
    magnitudes = torch.rand(sides) + 0.5
    more = {f"lora_unet_a.{end}": magnitudes, "lora_unet_a.alpha": torch.tensor(1.0)}
    paths = save(tmp_path, base=base, lora=pair | more)
    old = base["unet.a.weight"].double().numpy()
    changed = (old + multiply(pair) / RANK).reshape(len(old), -1)
    changed *= magnitudes.numpy().reshape(-1, 1) / np.linalg.norm(changed, axis=1, keepdims=True)
    check(bake(paths[0], paths[1:]), base, {"unet.a.weight": changed.reshape(shape) - old})


def test_dora_of_parts_of_a_stacked_tensor_is_for_all_of_them(
    tmp_path: Path, check_refused: Refusal
) -> None:
    family = "flux"
    original = test_names.randomise(test_names.FILES[family])
    named = test_names.to_diffusers(original, family)
    modules = [f"transformer/transformer_blocks.0.attn.to_{part}" for part in "qkv"]
    expected, lora = add_pairs(named, modules, False)
    for module in modules:
        rows = expected[f"{module}.weight"]
        magnitudes = torch.arange(1.0, len(rows) + 1)
        lora[f"{module.replace('/', '.')}.lora_magnitude_vector"] = magnitudes
        expected[f"{module}.weight"] = rows * (magnitudes / rows.norm(dim=1))[:, None]
    some = {name: tensor for name, tensor in lora.items() if ".to_v." not in name}
    paths = save(tmp_path, base=original, lora=lora, some=some)
    check_refused(paths[0], paths[2], "replaces some of", "img_attn.qkv", flags=("--engine=plain",))
    merged = test_names.to_diffusers(bake(paths[0], [paths[1]]), family)
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


# --- what does not fit ----------------------------------------------------------------------------


def test_what_the_base_lacks_is_listed_in_one_warning(tmp_path: Path, capsys: Capture) -> None:
    base = random_model(shapes={"model.diffusion_model.out.weight": (8, 6)})
    pair = make_pair("lora_unet_out", (8, 6))
    others = [make_pair(f"lora_te2_text_model_{k}", (4, 4)) for k in range(2)]
    paths = save(tmp_path, base=base, lora=pair | others[0] | others[1])
    check(bake(paths[0], paths[1:]), base, {"model.diffusion_model.out.weight": multiply(pair)})
    run("-b", paths[0], "-m", paths[1], "-o", tmp_path / "new.safetensors", "--dry-run")
    [line] = [line for line in capsys.readouterr().err.splitlines() if "the base lacks" in line]
    assert "2 tensors that the base lacks: 'lora_te2_text_model_0" in line
    assert "'lora_te2_text_model_1" in line


WHOLE = make_pair("unet.a", (8, 6), PEFT)
# Tensors of a file, what its header notes of them, and the message about it.
REFUSED: list[tuple[Tensors, Any, str]] = [
    (WHOLE, [], "is no table in JSON"),
    (WHOLE, {"unet.r": 2, "unet.lora_alpha": "much"}, "lora_alpha = 'much'"),
    (WHOLE, {"unet.peft_type": "LOHA"}, "is of type 'LOHA'"),
    (WHOLE, {"unet.alpha_pattern": {"(a": 3}}, "no regular expression"),
    ({"unet.a.hada_w1_a": torch.ones(2, 2)}, {}, " is LoHa"),
    ({"unet.a.lokr_w1": torch.ones(2, 2)}, {}, " is LoKr"),
    ({"unet.a.lora_mid.weight": torch.ones(2, 2, 3, 3)}, {}, "is a LoCon of three matrices"),
    *(
        (WHOLE | {name: torch.ones(shape)}, {}, words)
        for name, shape, words in (
            ("unet.a.lora_B.bias", (8,), "not a plain LoRA: it holds 'unet.a.lora_B.bias'"),
            ("unet.a.diff_b", (8,), "it holds 'unet.a.diff_b'"),
            ("base_model.model.norm.weight", (8,), "it holds 'base_model.model.norm.weight'"),
            ("unet.a.lora_A.other.weight", (2, 6), "holds several adapters"),
            ("unet.a.lora_embedding_A", (2, 6), "no pair of matrices"),
        )
    ),
    *(
        (
            WHOLE | {"unet.a.dora_scale": torch.ones(sides)},
            {},
            f"DoRA magnitudes {[*sides]} of 'unet.a'",
        )
        for sides in ((1, 6), (6,), (8, 6))
    ),
    (
        make_pair("unet.square", (6, 6)) | {"unet.square.dora_scale": torch.ones(1, 6)},
        {},
        "DoRA magnitudes [1, 6] of 'unet.square'",
    ),
    # A reversed shape is another model's, unless neighbours lie so, too.
    (make_pair("unet.a", (6, 8)), {}, "unet.a.weight"),
]


@pytest.mark.parametrize(("lora", "noted", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_file_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, check_refused: Refusal, lora: Tensors, noted: Any, words: str
) -> None:
    shapes = {"unet.a.weight": (8, 6), "unet.a.bias": (8,), "unet.square.weight": (6, 6)}
    [base] = save(tmp_path, base=random_model(shapes=shapes))
    path = save_noted(tmp_path / "lora.safetensors", lora, noted)
    check_refused(base, path, "lora.safetensors", words, flags=("--engine=plain",))


def test_a_folder_of_diffusers_is_the_lora_in_it(tmp_path: Path, check_refused: Refusal) -> None:
    base = random_model(shapes={"unet.a.weight": (8, 6)})
    pair = make_pair("unet.a", (8, 6), PEFT)
    [path] = save(tmp_path, base=base)
    save(tmp_path / "lora", pytorch_lora_weights=pair)
    (tmp_path / "lora" / "README.md").write_text("mine")
    check(bake(path, [tmp_path / "lora"]), base, {"unet.a.weight": multiply(pair)})
    check_refused(tmp_path / "lora", path, "is a LoRA adapter")
    save(tmp_path / "lora", model=base)
    (path.parent / OUT).unlink()
    check(bake(path, [tmp_path / "lora"]), base, {})


# --- strengths ------------------------------------------------------------------------------------


def make_two(folder: Path) -> tuple[Tensors, list[Path], list[np.ndarray]]:
    """A base, two LoRA files for one tensor of it, and what they change."""
    base = random_model(shapes={"unet.a.weight": (8, 6), "unet.b.weight": (8, 6)})
    pairs = [make_pair(start, (8, 6)) for start in ("unet.a", "diffusion_model.a")]
    paths = save(folder, base=base, one=pairs[0], two=pairs[1])
    return base, paths, [multiply(pair) for pair in pairs]


@pytest.mark.parametrize(
    ("flags", "weights", "more"),
    [
        ([], (1, 1), ""),
        (["--weights", "0.8", "-0.5"], (0.8, -0.5), ""),
        ([], (0.5, 0.25), "weights = [0.5, 0.25]"),
    ],
    ids=str,
)
def test_bake_adds_every_lora_at_its_strength(
    tmp_path: Path, flags: list[str], weights: tuple[float, float], more: str, capsys: Capture
) -> None:
    """Whatever a configuration says of other ways to merge, and TOML can say the same."""
    base, paths, changes = make_two(tmp_path)
    config = tmp_path / "merge.toml"
    config.write_text(f"[dare]\ndrop_rate = 0.5\nlambda_coeff = 2.0\nnormalize = true\n{more}")
    given = ["-b", paths[0], "-m", *paths[1:], "-o", tmp_path / OUT, "-c", config]
    change = sum(w * each for w, each in zip(weights, changes, strict=True))
    run(*given, "--bake", *flags, "--force", "--engine=plain", "-q")
    assert "strength 1" not in capsys.readouterr().err
    check(load_file(tmp_path / OUT), base, {"unet.a.weight": change})
    run("verify", "-q", "--engine=plain", tmp_path / OUT)
    written = tmp_path / "written.toml"
    run(*given, "--bake", *flags, "--engine=plain", "--write-config", written)
    before = (tmp_path / OUT).read_bytes()
    run("-c", written, "--force", "-q")
    assert (tmp_path / OUT).read_bytes() == before


RULE = '[[rules]]\nmatch = "unet.a.*"\n'


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        *((flag, "") for flag in ("--drop-rate=0.5", "--method=ties", "--lambda=0.7")),
        ("--normalize", ""),
        *(("", rule) for rule in ("drop_rate = 0.9", "lambda_coeff = 0.5", "normalize = true")),
        ("", 'method = "ties"'),
    ],
)
def test_what_contradicts_bake_is_an_error(
    tmp_path: Path, refused: Refusal, flag: str, rule: str
) -> None:
    _, paths, _ = make_two(tmp_path)
    given = ["-b", paths[0], "-m", *paths[1:], "-o", tmp_path / OUT, "--bake"]
    config = tmp_path / "merge.toml"
    config.write_text(f"{RULE}{rule}\n" if rule else "")
    what = f"{rule.partition(' ')[0]} of rule 1 ('unet.a.*')" if rule else flag.partition("=")[0]
    words = f"--bake and {'' if rule else 'this '}{what} contradict"
    refused(2, words, *given, "-c", config, *filter(None, [flag]))


def test_rules_give_strengths_to_bake(tmp_path: Path) -> None:
    base, paths, changes = make_two(tmp_path)
    config = tmp_path / "merge.toml"
    config.write_text(f"{RULE}weights = [0.5, 0.25]\nlambda_coeff = 1.0\ndrop_rate = 0\n")
    given = ["-b", paths[0], "-m", *paths[1:], "-o", tmp_path / OUT, "--bake", "-q"]
    run(*given, "-c", config, "--engine=plain")
    check(load_file(tmp_path / OUT), base, {"unet.a.weight": 0.5 * changes[0] + 0.25 * changes[1]})


# --- the example of strengths by block ------------------------------------------------------------

EXAMPLE = Path(__file__).parent.parent / "examples" / "block_weights.toml"
IN = [1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
OUT_BLOCKS = [0, 0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1]
# By a module of each block: its strength.
ORIGINAL = {
    **{f"input_blocks.{k}.0.op": weight for k, weight in enumerate(IN)},
    **{f"output_blocks.{k}.0.skip": weight for k, weight in enumerate(OUT_BLOCKS)},
    "middle_block.1.proj_in": 0.5,
    "time_embed.0": 1,
    "out.2": 1,
}
DIFFUSERS = {
    "conv_in": IN[0],
    "time_embedding.linear_1": IN[0],
    **{f"down_blocks.{k // 2}.resnets.{k % 2}.conv1": IN[1 + k // 2 * 3 + k % 2] for k in range(8)},
    **{f"down_blocks.{k}.attentions.1.proj_in": IN[2 + 3 * k] for k in range(3)},
    **{f"down_blocks.{k}.downsamplers.0.conv": IN[3 + 3 * k] for k in range(3)},
    "mid_block.resnets.0.conv1": 0.5,
    **{f"up_blocks.{k // 3}.resnets.{k % 3}.conv1": OUT_BLOCKS[k] for k in range(12)},
    **{f"up_blocks.{k}.attentions.0.proj_in": OUT_BLOCKS[3 * k] for k in range(1, 4)},
    **{f"up_blocks.{k}.upsamplers.0.conv": OUT_BLOCKS[3 * k + 2] for k in range(3)},
    "conv_out": OUT_BLOCKS[-1],
}


@pytest.mark.parametrize("kind", ["original", "diffusers"])
def test_the_example_gives_every_block_its_own_strength(
    tmp_path: Path, kind: str, capsys: Capture
) -> None:
    text = EXAMPLE.read_text()
    prefix = "model.diffusion_model."
    if kind == "diffusers":
        prefix = "unet/"
        start, end = text.index("# rules = ["), text.index("# ]\n") + len("# ]\n")
        rules = text[start:end].replace("\n# ", "\n").removeprefix("# ")
        text = rules + text[end : text.index("[[rules]]")]
    names = {f"{prefix}{n}": w for n, w in (ORIGINAL if prefix[0] == "m" else DIFFUSERS).items()}
    names |= {"text_encoder.fc1": 0.7}
    base = random_model(shapes={f"{name}.weight": (4, 3) for name in names})
    pairs = {name: make_pair(name.replace("/", "."), (4, 3), PEFT) for name in names}
    lora = {key: tensor for pair in pairs.values() for key, tensor in pair.items()}
    save(tmp_path, base=base, lora=lora)
    (tmp_path / "merge.toml").write_text(text)
    run("-c", tmp_path / "merge.toml", "--engine=plain", "-q")
    assert "matches no tensor" not in capsys.readouterr().err
    merged = load_file(tmp_path / "baked.safetensors")
    for name, weight in names.items():
        key = f"{name}.weight"
        expected = base[key].double().numpy() + weight * multiply(pairs[name])
        np.testing.assert_allclose(merged[key].double().numpy(), expected, atol=1e-7, err_msg=name)
    run("-c", tmp_path / "merge.toml", "--engine=plain", "-q", "--bake", "-o", tmp_path / OUT)
    assert_same(load_file(tmp_path / OUT), merged)


# --- against diffusers ----------------------------------------------------------------------------


ENDS = (
    "to_q",
    "to_out.0",
    "q_proj",
    "out_proj",
    "fc1",
    "ff.net.2",
    "conv1",
    "proj_in",
    "add_k_proj",
)


def write_lora(parts: dict[str, Any], style: str, path: Path) -> None:
    """A LoRA file for some modules of a pipeline's parts, each part with another alpha."""
    starts = {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    lora: Tensors = {}
    noted: dict[str, Any] = {}
    for k, (part, model) in enumerate(parts.items(), 3):
        noted |= {f"{part}.r": RANK, f"{part}.lora_alpha": 5, f"{part}.alpha_pattern": {"fc1": 3}}
        chosen = [(n, m) for n, m in model.named_modules() if n.endswith(ENDS)]
        for name, module in chosen:
            shape = tuple(module.weight.shape)
            if style == "kohya":
                start = "text_model." if "text" in part else ""
                known = starts[part] + (start + name.removeprefix(start)).replace(".", "_")
                lora |= make_pair(known, shape) | {f"{known}.alpha": torch.tensor(float(k))}
            else:
                lora |= make_pair(f"{part}.{name}", shape, PEFT)
    targets = {f"{part}.target_modules": list(ENDS) for part in parts}
    metadata = {"lora_adapter_metadata": json.dumps(noted | targets)}
    save_file(lora, path, metadata if style == "noted" else {"format": "pt"})


def write_stacked(parts: dict[str, Any], path: Path) -> None:
    """A LoRA of kohya's trainer for Flux, whose modules are those of the original file."""
    wide = parts["transformer"].inner_dim
    shapes = {"qkv": (3 * wide, wide), "proj": (wide, wide)}
    lora: Tensors = {}
    for side in ("img", "txt"):
        for name, shape in shapes.items():
            module = f"lora_unet_double_blocks_0_{side}_attn_{name}"
            lora |= make_pair(module, shape) | {f"{module}.alpha": torch.tensor(1.0)}
    save_file(lora, path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # importing diffusers takes longer than most of the suite
@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("sd", "plain"),
        ("sd", "noted"),
        ("sd", "kohya"),
        ("xl", "kohya"),
        ("flux", "plain"),
        ("flux", "stacked"),
    ],
)
def test_diffusers_fuses_the_same_weights(tmp_path: Path, kind: str, style: str) -> None:
    pytest.importorskip("diffusers")
    torch.manual_seed(1)
    makers = {"sd": test_diffusers.make_sd, "xl": test_diffusers.make_sdxl}
    pipe = makers.get(kind, test_diffusers.make_flux)(test_diffusers.make_tokenizer(tmp_path))
    changed = ("transformer",) if kind == "flux" else ("unet", "text_encoder", "text_encoder_2")
    parts = {part: pipe.components[part] for part in changed if part in pipe.components}
    base = {f"{p}.{n}": t.clone() for p, m in parts.items() for n, t in m.state_dict().items()}
    [path] = save(tmp_path, base=base)
    lora = tmp_path / "lora.safetensors"
    if style == "stacked":
        write_stacked(parts, lora)
    else:
        write_lora(parts, style, lora)
    merged = bake(path, [lora])
    pipe.load_lora_weights(tmp_path, weight_name=lora.name)
    pipe.fuse_lora(components=list(parts))
    pipe.unload_lora_weights()
    for part, model in parts.items():
        fused = model.state_dict()
        assert sum(not torch.equal(base[f"{part}.{n}"], fused[n]) for n in fused) > 2
        for name, tensor in fused.items():
            torch.testing.assert_close(merged[f"{part}.{name}"], tensor, atol=1e-6, rtol=1e-6)
