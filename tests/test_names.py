"""Single files and directories of diffusers are one model: either may be the base of the other."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import test_diffusers
from tests.support import (
    BF16,
    F32,
    Capture,
    Refusal,
    Tensors,
    assert_same,
    finetune,
    low_rank,
    merge_paths,
    random_model,
    read_json,
    run,
    run_merge,
    save,
    slow,
    snapshot,
    write_adapter,
)

Shapes = dict[str, tuple[int, ...]]
WIDE = 6  # all models here are as wide as this
UNET = "model.diffusion_model."
VAE = "first_stage_model."
# By family: the weights of an original file, each with its shape and what diffusers makes of it,
# as its own conversion named them: one tensor, or several of its rows, one after the other.
NAMES: dict[str, Any] = read_json(Path(__file__).with_name("diffusion_names.json"))
NAMES["sd3.5"] = json.loads(json.dumps(NAMES["sd3"]).replace("blocks.23.", "blocks.37."))
FILES: dict[str, Shapes] = {
    family: {name: tuple(shape) for name, (shape, _) in names.items()}
    for family, names in NAMES.items()
}
# Where shift and scale are the other way round.
SWAPPED = re.compile(r"(final_layer|joint_blocks\.(23|37)\.context_block)\.adaLN_modulation")
COMPONENTS = {
    UNET: "unet/",
    VAE: "vae/",
    "cond_stage_model.transformer.": "text_encoder/",
    "cond_stage_model.model.": "text_encoder/",
    "conditioner.embedders.0.transformer.": "text_encoder/",
    "conditioner.embedders.1.model.": "text_encoder_2/",
    "": "transformer/",
}


def put(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def to_diffusers(tensors: Tensors, family: str) -> Tensors:
    """What diffusers makes of an original file, with the component before each name."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        _, named = NAMES[family][name]
        if SWAPPED.match(name):
            tensor = torch.cat(tensor.chunk(2)[::-1])
        if name.endswith("text_projection"):
            tensor = tensor.T
        parts = tensor.split([shape[0] for shape in named.values()])
        pairs = zip(named.items(), parts, strict=True)
        made |= {new: part.reshape(shape).contiguous() for (new, shape), part in pairs}
    return made


def number(shapes: Shapes) -> Tensors:
    """A model whose values are all different: the place of a value tells which it is."""
    made = {}
    start = 0
    for name, shape in shapes.items():
        tensor = torch.arange(start, start + int(np.prod(shape)), dtype=torch.int32)
        start += tensor.numel()
        made[name] = tensor.reshape(shape).view(F32)
    return made


def randomise(shapes: Shapes, dtype: torch.dtype = F32) -> Tensors:
    """A base of weights so unlike each other that none can be taken for another's."""
    return {name: 20 * tensor for name, tensor in random_model(5, dtype, shapes).items()}


def choose(family: str) -> Shapes:
    """Those that are not simply called otherwise, and some of the rest: each file takes a while."""
    needed = (
        r"\.1\.0\.in_layers\.0|blocks\.0\.1\.norm|up\.[03]\.block\.0\.norm1|attn_1|proj|emb|conv"
    )
    shapes = FILES[family].items()
    return {n: s for k, (n, s) in enumerate(shapes) if k % 25 == 0 or re.search(needed, n)}


SMALL = {"sd": choose("sd"), "sdxl": choose("sdxl"), "flux": FILES["flux"]}


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sd2", "sdxl"])
def test_these_names_are_those_of_diffusers(family: str) -> None:
    """Its conversions of the others want models of full size, from which these were recorded."""
    own = pytest.importorskip("diffusers.loaders.single_file_utils")
    original = number(FILES[family])
    biases = {name.replace(".weight", ".bias"): torch.zeros(WIDE) for name in original}
    config: Any = {"layers_per_block": 2, "down_block_types": [""] * 4, "up_block_types": [""] * 4}
    if family == "sdxl":
        config["addition_embed_type"] = "text_time"
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=WIDE))
    made: Tensors = {}
    for prefix in {p: None for name in original for p in COMPONENTS if p and name.startswith(p)}:
        part = {n: t for n, t in (biases | original).items() if n.startswith(prefix)}
        if prefix == UNET:
            found = own.convert_ldm_unet_checkpoint(part, config)
        elif prefix == VAE:
            found = own.convert_ldm_vae_checkpoint(part, config)
        elif prefix.endswith("model."):
            found = own.convert_open_clip_checkpoint(model, part, prefix)
        else:
            found = own.convert_ldm_clip_checkpoint(part)
        made |= {COMPONENTS[prefix] + name: tensor for name, tensor in found.items()}
    mine = to_diffusers(original, family)
    if family == "sd2":  # whose text encoder has no projection in diffusers
        del mine["text_encoder/text_projection.weight"]
    assert_same({name: made[name] for name in mine}, mine)


def test_names_of_any_length_are_read_at_once(tmp_path: Path) -> None:
    """Quick as well as right: every start of a name would be looked up."""
    long: Shapes = {f"{k}{'.' * 10_000}": (1,) for k in range(100)}
    original = number({**SMALL["sd"], **put(UNET, long)})
    named = to_diffusers(number(SMALL["sd"]), "sd") | number(put("unet/", long))
    base, model = save(tmp_path, base=named, model=original)
    started = time.process_time()
    report = run_merge(base, [model], tmp_path / "out.safetensors", engine="plain")
    assert report.models[0].extra_tensors == report.models[0].missing_tensors == ()
    assert time.process_time() - started < 5


def test_a_projection_larger_than_any_has_no_other_name(tmp_path: Path, capsys: Capture) -> None:
    """To read a chunk of it turned, all of it is read."""
    large = torch.zeros(4097, 4096, dtype=torch.float8_e4m3fn)
    named = number(REFINER_PARTS) | {"text_encoder_2/text_projection.weight": large}
    run("convert", put_pipeline(tmp_path / "old", named), tmp_path / "new.safetensors")
    assert "'text_encoder_2/text_projection.weight'" in capsys.readouterr().err


# --- merges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "config"),
    [
        ("sd", BF16, {"drop_rate": 0.5}),
        ("sdxl", BF16, {"drop_rate": 0.5}),
        ("flux", F32, {"drop_rate": 0.9, "method": "ties"}),
    ],
)
def test_fine_tunes_of_one_kind_merge_onto_a_base_of_the_other(
    tmp_path: Path, family: str, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    original = randomise(SMALL[family], dtype)
    models = [original, *(finetune(original, k, 0.01) for k in (1, 2))]
    kinds = []
    for kind in ("original", "named"):
        own = models if kind == "original" else [to_diffusers(each, family) for each in models]
        kinds.append(save(tmp_path / kind, base=own[0], one=own[1], two=own[2]))
    for base, *same in kinds:
        [others] = [each[1:] for each in kinds if each[0] != base]
        crossed, plain = (
            merge_paths(base, paths, tmp_path / "x.safetensors", engine="plain", **config)
            for paths in (others, same)
        )
        assert_same(crossed, plain)


@pytest.mark.parametrize("kind", ["packed", "fp8", "fine-tune"])
def test_what_is_made_of_pieces_is_read_like_what_is_stored(tmp_path: Path, kind: str) -> None:
    original = randomise(FILES["flux"])
    tuned = finetune(original, 1, 0.5)
    if kind == "fp8":
        tuned = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tuned.items()}
    base, *models = save(tmp_path, base=original, tuned=tuned, named=to_diffusers(tuned, "flux"))
    if kind == "packed":
        for model in models:
            packed = tmp_path / f"packed-{model.name}"
            words = ["-b", base, "-m", model, "-o", packed, "--drop-rate", 0.5]
            run("pack", "-q", *words, "--engine=plain")
        models = [tmp_path / f"packed-{model.name}" for model in models]
    out = tmp_path / "out.safetensors"
    outputs = [merge_paths(base, [m], out, drop_rate=0.5, engine="plain") for m in models]
    assert_same(*outputs)
    run("verify", "-q", out, "--engine=plain")


def test_what_is_used_in_part_is_reported(tmp_path: Path, capsys: Capture) -> None:
    original = randomise(FILES["flux"])
    named = to_diffusers(original, "flux")
    del named["transformer/transformer_blocks.0.attn.to_k.weight"]
    base, model = save(tmp_path, base=named, model=finetune(original, 1, 0.01))
    run("-b", base, "-m", model, "-o", tmp_path / "out.safetensors", "--engine=plain")
    shown = "".join(capsys.readouterr())
    assert "1 tensor that the base lacks" in shown
    assert "'double_blocks.0.img_attn.qkv.weight'" in shown


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (
            {
                "double_blocks.0.img_attn.qkv": (3 * WIDE, WIDE),
                "transformer/transformer_blocks.0.attn.to_k": (WIDE, WIDE),
            },
            "changes 'double_blocks.0.img_attn.qkv.weight' twice",
        ),
        (
            {"transformer/transformer_blocks.0.attn.to_q": (3 * WIDE, WIDE)},
            "is [6, 6] in the base, and [18, 6]",
        ),
        (
            {"transformer/transformer_blocks.0.ff.net.0.proj": (2 * WIDE, 2 * WIDE)},
            "is [24, 6] in the base, and [12, 12]",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, check_refused: Refusal, modules: dict[str, tuple[int, int]], words: str
) -> None:
    [base] = save(tmp_path, base=randomise(FILES["flux"]))
    pairs: Tensors = {}
    for name, shape in modules.items():
        pairs |= low_rank(name, shape)
    check_refused(base, write_adapter(tmp_path / "adapter", pairs), words)


# --- convert --------------------------------------------------------------------------------------


def put_pipeline(folder: Path, tensors: Tensors) -> Path:
    """A directory as diffusers saves a pipeline."""
    parts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        part, _, inside = name.partition("/")
        parts.setdefault(part, {})[inside] = tensor
    for part, own in parts.items():
        is_text = part.startswith("text")
        test_diffusers.put(folder / part, own, "model" if is_text else test_diffusers.STEM)
    index = {part: ["diffusers", "Model"] for part in parts}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def load_pipeline(folder: Path) -> Tensors:
    return test_diffusers.join(test_diffusers.load(folder))


@pytest.mark.parametrize("family", [slow("sd"), *(family for family in FILES if family != "sd")])
def test_a_pipeline_becomes_one_file_and_that_becomes_it_again(
    tmp_path: Path, capsys: Capture, family: str
) -> None:
    original = number(FILES[family])
    named = to_diffusers(original, family)
    old = put_pipeline(tmp_path / "old", named)
    other = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    form = put_pipeline(tmp_path / "form", other)
    one = tmp_path / "one.safetensors"
    run("convert", "-q", old, one)
    assert_same(load_file(one), original)
    run("convert", one, tmp_path / "again", "--base", form)
    wrote = f"wrote {tmp_path / 'again'}: {len(named)} tensors, "
    assert [line.startswith(wrote) for line in capsys.readouterr().out.splitlines()] == [True]
    assert_same(load_pipeline(tmp_path / "again"), named)
    run("verify", "-q", tmp_path / "again")
    run("convert", "-q", old, tmp_path / "other.safetensors", "--base", one)
    assert_same(load_file(tmp_path / "other.safetensors"), original)


CLIP: Shapes = {
    "text_model.embeddings.token_embedding.weight": (40, WIDE),
    "text_model.encoder.layers.0.self_attn.q_proj.weight": (WIDE, WIDE),
}
PROJECTED: Shapes = {**CLIP, "text_projection.weight": (WIDE, WIDE)}
T5: Shapes = {"encoder.block.0.layer.0.SelfAttention.q.weight": (WIDE, WIDE)}
DECODER: Shapes = {"vae/decoder.up_blocks.3.resnets.0.norm1.weight": (WIDE,)}
SD3_PARTS = {
    **DECODER,
    "transformer/transformer_blocks.23.norm1_context.linear.weight": (2, WIDE),
    **put("text_encoder/", PROJECTED),
    **put("text_encoder_2/", PROJECTED),
}
FLUX_PARTS = {
    **DECODER,
    "transformer/single_transformer_blocks.0.proj_mlp.weight": (8, WIDE),
    **{f"transformer/single_transformer_blocks.0.attn.to_{k}.weight": (2, WIDE) for k in "qkv"},
    **put("text_encoder/", CLIP),
}
REFINER_PARTS = {
    "unet/down_blocks.0.resnets.0.norm1.weight": (WIDE,),
    **put("text_encoder_2/", PROJECTED),
}
CLIP_L = "text_encoders.clip_l.transformer."
CLIP_G = "text_encoders.clip_g.transformer."
LARGE_T5 = "text_encoders.t5xxl.transformer."


@pytest.mark.parametrize(
    ("parts", "starts"),
    [
        (SD3_PARTS, [UNET, VAE, CLIP_L, CLIP_G]),
        ({**SD3_PARTS, **put("text_encoder_3/", T5)}, [UNET, VAE, CLIP_L, CLIP_G, LARGE_T5]),
        (FLUX_PARTS, [UNET, "vae.", CLIP_L]),
        ({**FLUX_PARTS, **put("text_encoder_2/", T5)}, [UNET, "vae.", CLIP_L, LARGE_T5]),
        (REFINER_PARTS, [UNET, "conditioner.embedders.0.model."]),
    ],
    ids=["sd3 without t5", "sd3", "flux without t5", "flux", "refiner"],
)
def test_the_main_component_says_where_the_others_are(
    tmp_path: Path, parts: Shapes, starts: list[str]
) -> None:
    """Text encoders may be left out, which changes nothing for those that are there."""
    old = put_pipeline(tmp_path / "old", number(parts))
    one = tmp_path / "one.safetensors"
    run("convert", "-q", old, one)
    found = [[start for start in starts if name.startswith(start)] for name in load_file(one)]
    assert all(found)
    assert {start for [start] in found} == {*starts}
    run("convert", "-q", one, tmp_path / "again", "--base", old)
    assert_same(load_pipeline(tmp_path / "again"), load_pipeline(old))


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "any"])
def test_the_name_of_a_text_encoder_by_itself_says_which_of_the_two_it_is(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    named = randomise({**put("text_encoder/", PROJECTED), **put("text_encoder_2/", PROJECTED)})
    base = put_pipeline(tmp_path / "base", named)
    tuned = randomise(PROJECTED)
    [model] = save(tmp_path, **{name: tuned})
    out = tmp_path / "out"
    one = tmp_path / "one.safetensors"
    status = 1 if name == "any" else 0
    both = ["--components", "text_encoder", "text_encoder_2", "--any-base"]
    run("-q", "-b", base, "-m", model, "-o", out, "--drop-rate=0", *both, status=status)
    if name == "any":
        run("convert", "-q", model, one, status=1)
        assert capsys.readouterr().err.count("may be any of text_encoder, text_encoder_2") == 2
        return
    merged = load_pipeline(out)
    own = {f"{name}/{each}": tensor for each, tensor in tuned.items()}
    for each, tensor in (named | own).items():
        torch.testing.assert_close(merged[each], tensor)
    if name == "text_encoder_2":
        run("convert", "-q", model, one)
        assert "text_projection" in load_file(one)


def test_a_text_encoder_has_its_names_with_and_without_a_prefix(tmp_path: Path) -> None:
    original = randomise(SMALL["sd"])
    named = to_diffusers(original, "sd")
    short = {name.replace("/text_model.", "/"): tensor for name, tensor in named.items()}
    run("convert", "-q", put_pipeline(tmp_path / "old", short), tmp_path / "one.safetensors")
    assert_same(load_file(tmp_path / "one.safetensors"), original)
    [base] = save(tmp_path, base=original)
    out = tmp_path / "out.safetensors"
    config = {"drop_rate": 0, "engine": "plain"}
    assert_same(merge_paths(base, [tmp_path / "old"], out, **config), original)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("one.safetensors", "new", "--base MODEL"),
        ("one.safetensors", "new.safetensors", "has the names of original files already"),
        ("old", "new", "like new.safetensors"),
        ("other", "new.safetensors", "no original name is known for 'transformer/new.weight'"),
        ("pickled", "new.safetensors", "'vae/diffusion_pytorch_model.bin' of"),
        ("old", "one.safetensors", "exists already"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, capsys: Capture, old: str, new: str, words: str
) -> None:
    original = randomise(SMALL["sd"])
    named = to_diffusers(original, "sd")
    save(tmp_path, one=original)
    put_pipeline(tmp_path / "old", named)
    vae = {name: tensor for name, tensor in named.items() if name.startswith("vae/")}
    put_pipeline(tmp_path / "other", vae | {"transformer/new.weight": torch.ones(3)})
    pickled = put_pipeline(tmp_path / "pickled", named) / "vae/diffusion_pytorch_model.safetensors"
    pickled.rename(pickled.with_suffix(".bin"))
    before = snapshot(tmp_path)
    status = 1 if old in ("other", "pickled") else 2
    run("convert", tmp_path / old, tmp_path / new, status=status)
    assert words in capsys.readouterr().err
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_diffusers_loads_what_was_converted(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64, 64, 64),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=2,
        norm_num_groups=8,
    )
    old = tmp_path / "old"
    for name, model in (("unet", unet), ("vae", vae)):
        model.save_pretrained(old / name)
    index = {name: ["diffusers", "Model"] for name in ("unet", "vae")}
    (old / "model_index.json").write_text(json.dumps(index))
    one = tmp_path / "one.safetensors"
    run("convert", "-q", old, one)
    for name, model in (("unet", unet), ("vae", vae)):
        loaded = type(model).from_single_file(str(one), config=str(old), subfolder=name)
        assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
