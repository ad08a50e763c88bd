"""Single files and directories of diffusers are one model: either may be the base of the other."""

import json
import re
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from darelib.models.inputs import open_source
from darelib.models.names import MAPS
from darelib.models.source import Source
from darelib.models.translation import LONGEST, find_homes, list_ways
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
    run,
    save,
    snapshot,
    write_adapter,
)

Shapes = dict[str, tuple[int, ...]]
WIDE = 6  # all models here are as wide as this, and have all the names of the real ones

# --- the names of original files ------------------------------------------------------------------


def layer(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def linear(name: str, rows: int = WIDE, columns: int = WIDE) -> Shapes:
    return layer(name, rows, columns)


def resnet(name: str, has_skip: bool) -> Shapes:
    shapes = layer(f"{name}.in_layers.0", WIDE) | layer(f"{name}.out_layers.0", WIDE)
    shapes |= layer(f"{name}.in_layers.2", WIDE, WIDE, 3, 3) | linear(f"{name}.emb_layers.1")
    shapes |= layer(f"{name}.out_layers.3", WIDE, WIDE, 3, 3)
    return shapes | (layer(f"{name}.skip_connection", WIDE, WIDE, 1, 1) if has_skip else {})


def attention(name: str, depth: int, point: tuple[int, ...]) -> Shapes:
    shapes = layer(f"{name}.norm", WIDE) | layer(f"{name}.proj_in", WIDE, WIDE, *point)
    shapes |= layer(f"{name}.proj_out", WIDE, WIDE, *point)
    for k in range(depth):
        block = f"{name}.transformer_blocks.{k}"
        for number in (1, 2):
            own = f"{block}.attn{number}"
            shapes |= {f"{own}.to_{part}.weight": (WIDE, WIDE) for part in "qkv"}
            shapes |= linear(f"{own}.to_out.0")
        shapes |= linear(f"{block}.ff.net.0.proj", 8 * WIDE) | linear(f"{block}.ff.net.2")
        for number in (1, 2, 3):
            shapes |= layer(f"{block}.norm{number}", WIDE)
    return shapes


def unet(depths: tuple[int, ...], middle: int, has_labels: bool, point: tuple[int, ...]) -> Shapes:
    """depths: for each level, the blocks of its attention."""
    shapes = linear("time_embed.0") | linear("time_embed.2")
    if has_labels:
        shapes |= linear("label_emb.0.0") | linear("label_emb.0.2")
    shapes |= layer("input_blocks.0.0", WIDE, 4, 3, 3)
    shapes |= layer("out.0", WIDE) | layer("out.2", 4, WIDE, 3, 3)
    number = 1
    for level, depth in enumerate(depths):
        for k in range(2):
            shapes |= resnet(f"input_blocks.{number}.0", level in (1, 2) and k == 0)
            shapes |= attention(f"input_blocks.{number}.1", depth, point) if depth else {}
            number += 1
        if level < len(depths) - 1:
            shapes |= layer(f"input_blocks.{number}.0.op", WIDE, WIDE, 3, 3)
            number += 1
    shapes |= resnet("middle_block.0", False) | resnet("middle_block.2", False)
    shapes |= attention("middle_block.1", middle, point)
    number = 0
    for level, depth in reversed(list(enumerate(depths))):
        for k in range(3):
            shapes |= resnet(f"output_blocks.{number}.0", True)
            shapes |= attention(f"output_blocks.{number}.1", depth, point) if depth else {}
            if k == 2 and level:
                last = f"output_blocks.{number}.{2 if depth else 1}.conv"
                shapes |= layer(last, WIDE, WIDE, 3, 3)
            number += 1
    return shapes


def vae() -> Shapes:
    shapes = linear("quant_conv", 8, 8) | linear("post_quant_conv", 4, 4)
    for side, count in (("encoder", 2), ("decoder", 3)):
        shapes |= layer(f"{side}.conv_in", WIDE, 3, 3, 3) | layer(f"{side}.norm_out", WIDE)
        shapes |= layer(f"{side}.conv_out", 3, WIDE, 3, 3)
        for part in ("q", "k", "v", "proj_out"):
            shapes |= layer(f"{side}.mid.attn_1.{part}", WIDE, WIDE, 1, 1)
        shapes |= layer(f"{side}.mid.attn_1.norm", WIDE)
        names = [f"{side}.mid.block_{k}" for k in (1, 2)]
        way = "down" if side == "encoder" else "up"
        levels = [(f"{side}.{way}.{level}", level) for level in range(4)]
        names += [f"{name}.block.{k}" for name, _ in levels for k in range(count)]
        for name in names:
            for k in (1, 2):
                shapes |= layer(f"{name}.norm{k}", WIDE)
                shapes |= layer(f"{name}.conv{k}", WIDE, WIDE, 3, 3)
        for name, level in levels:
            if level in ((1, 2) if side == "encoder" else (0, 1)):
                shapes |= layer(f"{name}.block.0.nin_shortcut", WIDE, WIDE, 1, 1)
            if level != (3 if side == "encoder" else 0):
                shapes |= layer(f"{name}.{way}sample.conv", WIDE, WIDE, 3, 3)
    return shapes


def clip(depth: int) -> Shapes:
    shapes = {
        "text_model.embeddings.token_embedding.weight": (40, WIDE),
        "text_model.embeddings.position_embedding.weight": (7, WIDE),
    }
    for k in range(depth):
        own = f"text_model.encoder.layers.{k}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{own}.self_attn.{part}")
        shapes |= linear(f"{own}.mlp.fc1", 4 * WIDE) | linear(f"{own}.mlp.fc2", WIDE, 4 * WIDE)
        shapes |= layer(f"{own}.layer_norm1", WIDE) | layer(f"{own}.layer_norm2", WIDE)
    return shapes | layer("text_model.final_layer_norm", WIDE)


def open_clip(depth: int) -> Shapes:
    shapes: Shapes = {
        "token_embedding.weight": (40, WIDE),
        "positional_embedding": (7, WIDE),
        "text_projection": (WIDE, WIDE),
        "logit_scale": (),
    }
    for k in range(depth):
        own = f"transformer.resblocks.{k}"
        shapes |= {f"{own}.attn.in_proj_weight": (3 * WIDE, WIDE)}
        shapes |= {f"{own}.attn.in_proj_bias": (3 * WIDE,)} | linear(f"{own}.attn.out_proj")
        shapes |= linear(f"{own}.mlp.c_fc", 4 * WIDE) | linear(f"{own}.mlp.c_proj", WIDE, 4 * WIDE)
        shapes |= layer(f"{own}.ln_1", WIDE) | layer(f"{own}.ln_2", WIDE)
    return shapes | layer("ln_final", WIDE)


def flux(double: int, single: int, wide: int = WIDE) -> Shapes:
    """wide: rows of what diffusers' own conversion cuts by a number that it knows."""
    shapes = linear("img_in") | linear("txt_in")
    for name in ("time_in", "vector_in", "guidance_in"):
        shapes |= linear(f"{name}.in_layer") | linear(f"{name}.out_layer")
    for k in range(double):
        for side in ("img", "txt"):
            own = f"double_blocks.{k}.{side}"
            shapes |= linear(f"{own}_mod.lin", 6 * WIDE) | linear(f"{own}_attn.qkv", 3 * WIDE)
            shapes |= linear(f"{own}_attn.proj") | linear(f"{own}_mlp.0", 4 * WIDE)
            shapes |= linear(f"{own}_mlp.2", WIDE, 4 * WIDE)
            norm = f"{own}_attn.norm"
            shapes |= {f"{norm}.{part}_norm.scale": (WIDE,) for part in ("query", "key")}
    for k in range(single):
        own = f"single_blocks.{k}"
        shapes |= linear(f"{own}.modulation.lin", 3 * WIDE)
        shapes |= linear(f"{own}.linear1", 7 * wide, 1) | linear(f"{own}.linear2", WIDE, 5 * WIDE)
        shapes |= {f"{own}.norm.{part}_norm.scale": (WIDE,) for part in ("query", "key")}
    shapes |= linear("final_layer.adaLN_modulation.1", 2 * WIDE)
    return shapes | linear("final_layer.linear", 4)


def sd3(depth: int, dual: int, has_norms: bool) -> Shapes:
    """dual: how many blocks have two attentions."""
    shapes: Shapes = {"pos_embed": (1, 9, WIDE)} | layer("x_embedder.proj", WIDE, 4, 2, 2)
    for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder.mlp.0", "y_embedder.mlp.2"):
        shapes |= linear(name)
    for k in range(depth):
        for side in ("x_block", "context_block"):
            own = f"joint_blocks.{k}.{side}"
            is_end = k == depth - 1 and side == "context_block"
            names = ["attn", "attn2"] if k < dual and side == "x_block" else ["attn"]
            for name in names:
                shapes |= linear(f"{own}.{name}.qkv", 3 * WIDE)
                shapes |= {f"{own}.{name}.ln_{p}.weight": (WIDE,) for p in "qk" if has_norms}
                shapes |= {} if is_end else linear(f"{own}.{name}.proj")
            parts = 2 if is_end else 3 * (len(names) + 1)
            shapes |= linear(f"{own}.adaLN_modulation.1", parts * WIDE)
            if not is_end:
                shapes |= linear(f"{own}.mlp.fc1", 4 * WIDE) | linear(f"{own}.mlp.fc2")
    shapes |= linear("context_embedder") | linear("final_layer.linear", 4)
    return shapes | linear("final_layer.adaLN_modulation.1", 2 * WIDE)


def put(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


UNET = "model.diffusion_model."
VAE = "first_stage_model."
# By family: the shapes of an original file.
FILES = {
    "sd": {
        **put(UNET, unet((1, 1, 1, 0), 1, False, (1, 1))),
        **put("cond_stage_model.transformer.", clip(12)),
        **put(VAE, vae()),
    },
    "sd2": {
        **put(UNET, unet((1, 1, 1, 0), 1, False, ())),
        **put("cond_stage_model.model.", open_clip(23)),
    },
    "sdxl": {
        **put(UNET, unet((0, 2, 10), 10, True, ())),
        **put("conditioner.embedders.0.transformer.", clip(12)),
        **put("conditioner.embedders.1.model.", open_clip(32)),
        **put(VAE, vae()),
    },
    "flux": flux(19, 38),
}


def number(shapes: Shapes, dtype: torch.dtype = F32) -> Tensors:
    """A model whose values are all different: the place of a value tells which it is."""
    made = {}
    start = 0
    for name, shape in shapes.items():
        tensor = torch.arange(start, start + int(np.prod(shape)), dtype=torch.int32).reshape(shape)
        start += tensor.numel()
        made[name] = tensor.view(F32) if dtype == F32 else tensor.to(dtype)
    return made


def read_ways(path: Path) -> Tensors:
    """All tensors of a model by the names that the map has for them."""
    found = {}
    with closing(open_source(Source.of(path), None)) as model:
        for name, info in list_ways(model.tensors, find_homes(model.tensors)).items():
            made = np.empty(info.nbytes, np.uint8)
            half = info.count // 2  # not all at once
            item = info.nbytes // max(info.count, 1)
            model.read(info, 0, half, made[: half * item])
            model.read(info, half, info.count - half, made[half * item :])
            dtype = {"F32": F32, "BF16": BF16}[info.dtype]
            found[name] = torch.from_numpy(made).view(dtype).reshape(info.shape)
    return found


# --- the names of diffusers, by hand --------------------------------------------------------------

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
UNET_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
VAE_WORDS = {
    ".mid.attn_1.": ".mid_block.attentions.0.",
    ".mid.block_1.": ".mid_block.resnets.0.",
    ".mid.block_2.": ".mid_block.resnets.1.",
    ".norm.": ".group_norm.",
    ".q.": ".to_q.",
    ".k.": ".to_k.",
    ".v.": ".to_v.",
    ".proj_out.": ".to_out.0.",
    ".nin_shortcut.": ".conv_shortcut.",
    "coder.norm_out.": "coder.conv_norm_out.",
    ".block.": ".resnets.",
    ".downsample.": ".downsamplers.0.",
    ".upsample.": ".upsamplers.0.",
}
CLIP_WORDS = {
    "transformer.resblocks.": "text_model.encoder.layers.",
    ".attn.": ".self_attn.",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "c_fc": "fc1",
    "c_proj": "fc2",
    "ln_final": "text_model.final_layer_norm",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text_projection": "text_projection.weight",
}
FLUX_WORDS = {
    "single_blocks.": "single_transformer_blocks.",
    "double_blocks.": "transformer_blocks.",
    "img_in.": "x_embedder.",
    "txt_in.": "context_embedder.",
    "time_in.": "time_text_embed.timestep_embedder.",
    "vector_in.": "time_text_embed.text_embedder.",
    "guidance_in.": "time_text_embed.guidance_embedder.",
    "in_layer.": "linear_1.",
    "out_layer.": "linear_2.",
    "img_mod.lin.": "norm1.linear.",
    "txt_mod.lin.": "norm1_context.linear.",
    "modulation.lin.": "norm.linear.",
    "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
    "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
    "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
    "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
    ".norm.query_norm.scale": ".attn.norm_q.weight",
    ".norm.key_norm.scale": ".attn.norm_k.weight",
    "img_attn.proj.": "attn.to_out.0.",
    "txt_attn.proj.": "attn.to_add_out.",
    "img_mlp.0.": "ff.net.0.proj.",
    "img_mlp.2.": "ff.net.2.",
    "txt_mlp.0.": "ff_context.net.0.proj.",
    "txt_mlp.2.": "ff_context.net.2.",
    "linear2.": "proj_out.",
    "final_layer.linear.": "proj_out.",
}


def replace_words(name: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        name = name.replace(old, new)
    return name


def name_unet(name: str) -> str:
    module, _, end = name.rpartition(".")
    if module in UNET_ENDS:
        return f"{UNET_ENDS[module]}.{end}"
    side, first, *rest = module.split(".")
    if side == "middle_block":
        kind = "attentions.0" if first == "1" else f"resnets.{int(first) // 2}"
        inside = ".".join(rest)
        block = f"mid_block.{kind}"
    else:
        way = "down" if side == "input_blocks" else "up"
        level, k = divmod(int(first) - (way == "down"), 3)
        inside = ".".join(rest[1:])
        kind = f"resnets.{k}" if rest[0] == "0" else f"attentions.{k}"
        if inside in ("op", "conv"):
            kind = f"{way}samplers.0"
            inside = "conv"
        block = f"{way}_blocks.{level}.{kind}"
    return ".".join([block, RESNET.get(inside, inside), end])


def name_vae(name: str) -> str:
    parts = name.split(".")
    if parts[1] in ("down", "up"):
        level = int(parts[2])
        parts[1] += "_blocks"
        parts[2] = str(level if parts[1] == "down_blocks" else 3 - level)
    return replace_words(".".join(parts), VAE_WORDS)


def cut(names: list[str], tensor: torch.Tensor, rows: list[int]) -> Tensors:
    return dict(zip(names, tensor.split(rows), strict=True))


def name_clip(name: str, tensor: torch.Tensor) -> Tensors:
    if name.startswith("text_model."):
        return {name: tensor}
    new = replace_words(name, CLIP_WORDS)
    if "in_proj_" in new:
        start, _, kind = new.partition("in_proj_")
        names = [f"{start}{part}_proj.{kind}" for part in "qkv"]
        return cut(names, tensor, [len(tensor) // 3] * 3)
    return {new: tensor.T.contiguous() if name == "text_projection" else tensor}


def name_flux(name: str, tensor: torch.Tensor) -> Tensors:
    new = replace_words(name, FLUX_WORDS)
    start, _, kind = new.rpartition(".")
    block = start.rpartition(".")[0]
    third = [len(tensor) // 3] * 3
    if start.endswith("img_attn.qkv"):
        names = [f"{block[: -len('img_attn')]}attn.to_{part}.{kind}" for part in "qkv"]
        return cut(names, tensor, third)
    if start.endswith("txt_attn.qkv"):
        names = [f"{block[: -len('txt_attn')]}attn.add_{part}_proj.{kind}" for part in "qkv"]
        return cut(names, tensor, third)
    if start.endswith("linear1"):
        names = [f"{block}.attn.to_{part}.{kind}" for part in "qkv"]
        wide = len(tensor) // 7
        return cut([*names, f"{block}.proj_mlp.{kind}"], tensor, [wide, wide, wide, 4 * wide])
    if name.startswith("final_layer.adaLN"):
        shift, scale = tensor.chunk(2)
        return {f"norm_out.linear.{kind}": torch.cat([scale, shift])}
    return {new: tensor}


# What stands before names in original files, and which component it is.
PREFIXES = {
    UNET: "unet/",
    VAE: "vae/",
    "cond_stage_model.transformer.": "text_encoder/",
    "cond_stage_model.model.": "text_encoder/",
    "conditioner.embedders.0.transformer.": "text_encoder/",
    "conditioner.embedders.1.model.": "text_encoder_2/",
    "": "transformer/",
}
POINT = re.compile(r"mid\.attn_1\.(q|k|v|proj_out)\.weight")


def to_diffusers(tensors: Tensors) -> Tensors:
    """What diffusers makes of an original file, with the component before each name."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        prefix = next(each for each in PREFIXES if name.startswith(each))
        component = PREFIXES[prefix]
        inside = name.removeprefix(prefix)
        found = {inside: tensor}
        if component == "unet/":
            found = {name_unet(inside): tensor}
        elif component == "vae/":
            is_point = POINT.search(name)
            found = {name_vae(inside): tensor.reshape(WIDE, WIDE) if is_point else tensor}
        elif component == "transformer/":
            found = name_flux(inside, tensor)
        elif inside != "logit_scale":
            found = name_clip(inside, tensor)
        made |= {component + new: value for new, value in found.items()}
    return made


def convert_by_diffusers(tensors: Tensors) -> Tensors:
    """The components of an original file as diffusers itself converts them."""
    from diffusers.loaders import single_file_utils as own

    config: Any = {"layers_per_block": 2, "down_block_types": [""] * 4, "up_block_types": [""] * 4}
    if any("label_emb" in name for name in tensors):
        config["addition_embed_type"] = "text_time"
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=WIDE))
    made: Tensors = {}
    for prefix in {p: None for name in tensors for p in PREFIXES if name.startswith(p)}:
        component = PREFIXES[prefix]
        part = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if component == "unet/":
            found = own.convert_ldm_unet_checkpoint(part, config)
        elif component == "vae/":
            found = own.convert_ldm_vae_checkpoint(part, config)
        elif component == "transformer/":
            is_flux = not tensors.keys() & {f"{UNET}out.2.weight"}
            found = own.convert_flux_transformer_checkpoint_to_diffusers(part) if is_flux else {}
        elif prefix.endswith("model."):
            found = own.convert_open_clip_checkpoint(model, part, prefix)
        else:
            found = own.convert_ldm_clip_checkpoint(part)
        made |= {component + name: tensor for name, tensor in found.items()}
    return made


# --- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FILES)
def test_every_tensor_has_the_names_of_both_kinds(tmp_path: Path, family: str) -> None:
    original = number(FILES[family])
    named = to_diffusers(original)
    components = {
        PREFIXES[prefix] + name.removeprefix(prefix): tensor
        for name, tensor in original.items()
        for prefix in [next(each for each in PREFIXES if name.startswith(each))]
    }
    for path in save(tmp_path, original=original, named=named):
        ways = read_ways(path)
        both = named | {
            name: tensor for name, tensor in components.items() if "logit_scale" not in name
        }
        assert both.keys() <= ways.keys()
        assert_same({name: ways[name] for name in both}, both)


def test_names_of_any_length_are_read_at_once(tmp_path: Path) -> None:
    """Quick as well as right: every start of a name would be looked up."""
    known = {key for own in MAPS for table in (*own.shares, own.others) for key in table}
    assert max(map(len, known)) <= LONGEST
    long: Shapes = {f"{k}{'.' * 10_000}": (1,) for k in range(100)}
    path = save(tmp_path, long=number({**choose("sd"), **put(UNET, long)}))[0]
    started = time.process_time()
    assert put("unet/", long).keys() <= read_ways(path).keys()
    assert time.process_time() - started < 5


def test_a_projection_larger_than_any_has_no_other_name(tmp_path: Path) -> None:
    """To read a chunk of it turned, all of it is read."""
    large = torch.zeros(4097, 4096, dtype=torch.float8_e4m3fn)
    path = save(tmp_path, base={"text_encoder_2/text_projection.weight": large})[0]
    with closing(open_source(Source.of(path), None)) as model:
        ways = list_ways(model.tensors, find_homes(model.tensors))
    assert "text_encoder_2/text_projection.weight" in ways
    assert "text_encoder_2/text_projection" not in ways


@pytest.mark.slow
@pytest.mark.parametrize("family", FILES)
def test_these_names_are_those_of_diffusers(family: str) -> None:
    pytest.importorskip("diffusers")
    # Its conversion of Flux knows how wide the real one is.
    original = number(flux(19, 38, 3072) if family == "flux" else FILES[family])
    theirs = convert_by_diffusers(dict(original))
    mine = {name: t for name, t in to_diffusers(original).items() if "logit_scale" not in name}
    if family == "sd2":  # whose text encoder has no projection in diffusers
        del mine["text_encoder/text_projection.weight"]
    assert_same(mine, theirs)


def test_the_last_block_of_sd3_has_shift_and_scale_swapped(tmp_path: Path) -> None:
    original = number(sd3(24, 13, True))
    ways = read_ways(save(tmp_path, original=original)[0])
    block = "joint_blocks.{}.context_block.adaLN_modulation.1.bias"
    place = "transformer/transformer_blocks.{}.norm1_context.linear.bias"
    assert_same({"": ways[place.format(22)]}, {"": original[block.format(22)]})
    shift, scale = original[block.format(23)].chunk(2)
    assert_same({"": ways[place.format(23)]}, {"": torch.cat([scale, shift])})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(24, 0, False), (38, 0, True), (24, 13, True)], ids=str)
def test_the_names_of_sd3_are_those_of_diffusers(
    tmp_path: Path, shape: tuple[int, int, bool]
) -> None:
    own = pytest.importorskip("diffusers.loaders.single_file_utils")
    original = number(sd3(*shape))
    made = own.convert_sd3_transformer_checkpoint_to_diffusers(dict(original))
    named = {name: tensor.clone() for name, tensor in made.items()}
    for path in save(tmp_path, original=original, named=named):
        ways = read_ways(path)
        for wanted in (original, named):
            assert_same({name: ways[f"transformer/{name}"] for name in wanted}, wanted)


# By these a component is recognised, or they are not simply called otherwise.
NEEDED = re.compile(
    r"\.1\.0\.in_layers\.0\.w|blocks\.0\.1\.norm\.w|up\.[03]\.block\.0\.norm1\.w|attn_1|q_proj|in_proj"
    r"|text_projection|token_emb|positional|conv\.w|skip"
)


def choose(family: str) -> Shapes:
    """A few tensors of each kind of a whole model: each file takes a while."""
    shapes = FILES[family].items()
    return {name: s for k, (name, s) in enumerate(shapes) if k % 25 == 0 or NEEDED.search(name)}


SMALL = {"sd": choose("sd"), "sdxl": choose("sdxl"), "flux": flux(2, 3)}


def randomise(shapes: Shapes, dtype: torch.dtype) -> Tensors:
    """A base of weights so unlike each other that none can be taken for another's."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def to_original(tensors: Tensors, like: Tensors) -> Tensors:
    """A model in diffusers' names by those of an original file, which is given."""
    places = number({name: tuple(tensor.shape) for name, tensor in like.items()})
    made = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    flat = torch.cat([tensor.reshape(-1) for tensor in made.values()])
    for name, where in to_diffusers(places).items():
        flat[where.contiguous().view(torch.int32).reshape(-1).long()] = tensors[name].reshape(-1)
    ends = torch.tensor([tensor.numel() for tensor in made.values()]).cumsum(0)[:-1]
    pairs = zip(made.items(), flat.tensor_split(ends), strict=True)
    return {name: part.reshape(tensor.shape).clone() for (name, tensor), part in pairs}


SETTINGS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (BF16, {"drop_rate": 0.5}),
    (F32, {"drop_rate": 0.9, "method": "ties"}),
]


@pytest.mark.parametrize(("dtype", "config"), SETTINGS, ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", SMALL)
def test_fine_tunes_of_one_kind_merge_onto_a_base_of_the_other(
    tmp_path: Path, capsys: Capture, family: str, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    original = randomise(SMALL[family], dtype)
    tuned = [finetune(original, k, 0.01) for k in (1, 2)]
    named = to_diffusers(original)
    paths = save(tmp_path, original=original, named=named, o1=tuned[0], o2=tuned[1])
    paths += save(tmp_path, d1=to_diffusers(tuned[0]), d2=to_diffusers(tuned[1]))
    base, other, *models = paths
    crossed = merge_paths(base, models[2:], tmp_path / "x.safetensors", **config)
    assert_same(crossed, merge_paths(base, models[:2], tmp_path / "y.safetensors", **config))
    crossed = merge_paths(other, models[:2], tmp_path / "x.safetensors", **config)
    assert_same(crossed, merge_paths(other, models[2:], tmp_path / "y.safetensors", **config))


def test_what_is_made_of_pieces_is_packed_and_compared_like_what_is_stored(
    tmp_path: Path, capsys: Capture
) -> None:
    original = randomise(SMALL["flux"], F32)
    tuned = finetune(original, 1, 0.01)
    named = to_diffusers(tuned)
    base, *models = save(
        tmp_path, base=original, tuned=tuned, named=named, same=to_diffusers(original)
    )
    outputs = []
    for model in models[:2]:
        packed = tmp_path / f"packed-{model.name}"
        run("pack", "-q", "-b", base, "-m", model, "-o", packed, "--drop-rate", 0.5)
        config = {"drop_rate": 0.5, "engine": "plain"}
        outputs.append(merge_paths(base, [packed], tmp_path / "out.safetensors", **config))
    assert_same(*outputs)
    rule = ["--rule", "*qkv*:lambda_coeff=0"]
    run("-b", base, "-m", models[2], "-o", tmp_path / "x.safetensors", "--engine=plain", *rule)
    assert "identical to the base" in capsys.readouterr().err
    run("verify", "-q", tmp_path / "x.safetensors", "--engine=plain")


def test_what_was_packed_against_one_kind_of_names_wants_that_base(
    tmp_path: Path, check_refused: Refusal
) -> None:
    original = randomise(SMALL["flux"], F32)
    base, model, other = save(
        tmp_path, base=original, model=finetune(original, 1, 0.01), other=to_diffusers(original)
    )
    packed = tmp_path / "packed.safetensors"
    run("pack", "-q", "-b", base, "-m", model, "-o", packed, "--drop-rate", 0.5)
    check_refused(other, packed, "give the base that it was packed against")


def test_what_is_used_in_part_is_reported(tmp_path: Path, capsys: Capture) -> None:
    original = randomise(SMALL["flux"], F32)
    named = to_diffusers(original)
    del named["transformer/transformer_blocks.0.attn.to_k.weight"]
    base, model = save(tmp_path, base=named, model=finetune(original, 1, 0.01))
    run("-b", base, "-m", model, "-o", tmp_path / "out.safetensors", "--drop-rate=0")
    shown = capsys.readouterr()
    assert "1 tensor that the base lacks" in shown.err + shown.out
    assert "'double_blocks.0.img_attn.qkv.weight'" in shown.err + shown.out


def test_pieces_of_fp8_are_read_like_what_is_stored(tmp_path: Path) -> None:
    original = randomise(SMALL["flux"], BF16)
    tuned = {
        name: tensor.to(torch.float8_e4m3fn) if tensor.ndim > 1 else tensor
        for name, tensor in finetune(original, 1, 0.5).items()
    }
    paths = save(tmp_path, base=original, tuned=tuned, named=to_diffusers(tuned))
    base, *models = paths
    config = {"drop_rate": 0.5, "engine": "plain"}
    outputs = [merge_paths(base, [m], tmp_path / f"x-{m.name}", **config) for m in models]
    assert_same(*outputs)


# --- adapters -------------------------------------------------------------------------------------


def products(shapes: Shapes) -> tuple[Tensors, Tensors]:
    """An adapter of PEFT's on these tensors, and the changes that it makes."""
    pairs: Tensors = {}
    changes: Tensors = {}
    for k, (name, shape) in enumerate(shapes.items()):
        module = name.removesuffix(".weight")
        own = low_rank(module, (shape[0], shape[1]), seed=k)
        a, b = own.values()
        pairs |= own
        changes[name] = 2 * (b @ a).reshape(shape)
    return pairs, changes


DIFFUSERS_SIDE = {
    "transformer/transformer_blocks.0.attn.to_q.weight": (WIDE, WIDE),
    "transformer/transformer_blocks.0.attn.to_v.weight": (WIDE, WIDE),
    "transformer/transformer_blocks.1.attn.add_k_proj.weight": (WIDE, WIDE),
    "transformer/transformer_blocks.1.ff.net.2.weight": (WIDE, 4 * WIDE),
    "transformer/single_transformer_blocks.2.proj_mlp.weight": (4 * WIDE, 1),
    "transformer/norm_out.linear.weight": (2 * WIDE, WIDE),
}
ORIGINAL_SIDE = {
    "transformer/double_blocks.0.img_attn.qkv.weight": (3 * WIDE, WIDE),
    "transformer/double_blocks.1.txt_mlp.0.weight": (4 * WIDE, WIDE),
    "transformer/single_blocks.1.linear1.weight": (7 * WIDE, 1),
    "transformer/final_layer.adaLN_modulation.1.weight": (2 * WIDE, WIDE),
}


@pytest.mark.parametrize(
    ("shapes", "is_original"),
    [
        (DIFFUSERS_SIDE, True),
        (DIFFUSERS_SIDE, False),
        (ORIGINAL_SIDE, True),
        (ORIGINAL_SIDE, False),
    ],
)
def test_an_adapter_changes_the_same_weights_by_either_name(
    tmp_path: Path, shapes: Shapes, is_original: bool
) -> None:
    """What it leaves alone in a stacked tensor stays as it was."""
    original = randomise(SMALL["flux"], F32)
    named = to_diffusers(original)
    pairs, changes = products(shapes)
    adapter = write_adapter(tmp_path / "adapter", pairs)
    [base] = save(tmp_path, base=original if is_original else named)
    merged = merge_paths(base, [adapter], tmp_path / "out.safetensors", drop_rate=0)
    ways = named | {f"transformer/{name}": tensor for name, tensor in original.items()}
    ways |= {name: ways[name] + change for name, change in changes.items()}
    if shapes is ORIGINAL_SIDE:
        expected = {name: ways[f"transformer/{name}"] for name in original}
    else:
        expected = to_original({name: ways[name] for name in named}, original)
    found = merged if is_original else to_original(merged, original)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_change_of_as_many_elements_in_another_shape_is_refused(
    tmp_path: Path, check_refused: Refusal
) -> None:
    [base] = save(tmp_path, base=randomise(SMALL["flux"], F32))
    pairs = low_rank("transformer/transformer_blocks.0.ff.net.0.proj", (2 * WIDE, 2 * WIDE))
    words = "is [24, 6] in the base, and [12, 12]"
    check_refused(base, write_adapter(tmp_path / "adapter", pairs), words)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["double_blocks.0.img_attn.qkv", "transformer/transformer_blocks.0.attn.to_k"],
            "changes 'double_blocks.0.img_attn.qkv.weight' twice",
        ),
        (["transformer/transformer_blocks.0.attn.to_q"], "is [6, 6] in the base, and [18, 6]"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, check_refused: Refusal, names: list[str], words: str
) -> None:
    [base] = save(tmp_path, base=randomise(SMALL["flux"], F32))
    rows = [3 * WIDE, WIDE][: len(names)]
    pairs: Tensors = {}
    for name, height in zip(names, rows, strict=True):
        pairs |= low_rank(name, (height, WIDE))
    check_refused(base, write_adapter(tmp_path / "adapter", pairs), words)


# --- convert --------------------------------------------------------------------------------------


def put_pipeline(folder: Path, tensors: Tensors) -> Path:
    """A directory as diffusers saves a pipeline."""
    parts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        part, _, inside = name.partition("/")
        parts.setdefault(part, {})[inside] = tensor
    for part, own in parts.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
        stem = "model" if part.startswith("text") else "diffusion_pytorch_model"
        save_file(own, folder / part / f"{stem}.safetensors")
    index = {part: ["diffusers", "Model"] for part in parts}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def load_pipeline(folder: Path) -> Tensors:
    paths = folder.glob("*/*.safetensors")
    return {f"{p.parent.name}/{name}": t for p in paths for name, t in load_file(p).items()}


@pytest.mark.parametrize("family", SMALL)
def test_a_pipeline_becomes_one_file_and_that_becomes_it_again(tmp_path: Path, family: str) -> None:
    original = randomise(SMALL[family], BF16)
    original.pop("conditioner.embedders.1.model.logit_scale", None)
    named = to_diffusers(original)
    other = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    old = put_pipeline(tmp_path / "old", named)
    form = put_pipeline(tmp_path / "form", other)
    one = tmp_path / "one.safetensors"
    run("convert", "-q", old, one)
    assert_same(load_file(one), original)
    run("convert", "-q", one, tmp_path / "again", "--base", form)
    assert_same(load_pipeline(tmp_path / "again"), named)
    run("verify", "-q", tmp_path / "again")
    run("convert", "-q", old, tmp_path / "other.safetensors", "--base", one)
    assert_same(load_file(tmp_path / "other.safetensors"), original)


T5 = {"encoder.block.0.layer.0.SelfAttention.q.weight": (WIDE, WIDE)}
PROJECTED = {**clip(1), "text_projection.weight": (WIDE, WIDE)}
SD3_PARTS = {
    **put("transformer/", {"transformer_blocks.23.norm1_context.linear.weight": (2, WIDE)}),
    **put("vae/", {"decoder.up_blocks.3.resnets.0.norm1.weight": (WIDE,)}),
    **put("text_encoder/", PROJECTED),
    **put("text_encoder_2/", PROJECTED),
}
FLUX_PARTS = {
    **put("transformer/single_transformer_blocks.0.", {"proj_mlp.weight": (8, WIDE)}),
    **put(
        "transformer/single_transformer_blocks.0.attn.", {f"to_{k}.weight": (2, 6) for k in "qkv"}
    ),
    **put("vae/", {"decoder.up_blocks.3.resnets.0.norm1.weight": (WIDE,)}),
    **put("text_encoder/", clip(1)),
}
REFINER_PARTS = {
    **put("unet/", {"down_blocks.0.resnets.0.norm1.weight": (WIDE,)}),
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


def pair_encoders(wide: int) -> Tensors:
    """Both text encoders of a pipeline, with projections; the second is as wide as this."""
    shapes = {
        name: tuple(side * wide // WIDE if side % WIDE == 0 else side for side in shape)
        for name, shape in PROJECTED.items()
    }
    parts = {**put("text_encoder/", PROJECTED), **put("text_encoder_2/", shapes)}
    return randomise(parts, F32)


@pytest.mark.parametrize(
    ("wide", "name"),
    [(WIDE, "text_encoder_2"), (WIDE, "text_encoder"), (2 * WIDE, "any"), (WIDE, "any")],
)
def test_a_text_encoder_by_itself_is_one_of_the_two(
    tmp_path: Path, check_refused: Refusal, wide: int, name: str
) -> None:
    """Told by its shapes, or by its name; where neither does, nothing is written."""
    named = pair_encoders(wide)
    base = put_pipeline(tmp_path / "base", named)
    part = "text_encoder" if name == "text_encoder" else "text_encoder_2"
    inside = {n.removeprefix(f"{part}/"): t for n, t in named.items() if n.startswith(f"{part}/")}
    tuned = finetune(inside, 1, 0.01)
    [model] = save(tmp_path, **{name: tuned})
    if (wide, name) == (WIDE, "any"):
        check_refused(base, model, "may be any of text_encoder, text_encoder_2")
        return
    out = tmp_path / "out"
    both = ["--components", "text_encoder", "text_encoder_2"]
    run("-q", "-b", base, "-m", model, "-o", out, "--drop-rate=0", *both)
    merged = load_pipeline(out)
    for each, tensor in named.items():
        own = tuned[each.removeprefix(f"{part}/")] if each.startswith(f"{part}/") else tensor
        torch.testing.assert_close(merged[each], own)
    run("verify", "-q", out)


def test_a_second_text_encoder_becomes_one_file(tmp_path: Path, capsys: Capture) -> None:
    """One with more layers than OpenAI's is the second by itself."""
    original = randomise(open_clip(13), F32)
    del original["logit_scale"]
    named = to_diffusers({f"conditioner.embedders.1.model.{n}": t for n, t in original.items()})
    inside = {name.removeprefix("text_encoder_2/"): tensor for name, tensor in named.items()}
    shallow = {name: tensor for name, tensor in inside.items() if "layers.12." not in name}
    save(tmp_path, deep=inside, shallow=shallow, text_encoder_2=shallow)
    out = tmp_path / "out.safetensors"
    run("convert", "-q", tmp_path / "deep.safetensors", out)
    assert_same(load_file(out), original)
    run("convert", tmp_path / "shallow.safetensors", tmp_path / "no.safetensors", status=1)
    assert "may be any of text_encoder, text_encoder_2" in capsys.readouterr().err
    assert not (tmp_path / "no.safetensors").exists()
    run("convert", "-q", "--force", tmp_path / "text_encoder_2.safetensors", out)
    assert_same(load_file(out), {n: t for n, t in original.items() if "blocks.12." not in n})


def test_a_text_encoder_has_its_names_with_and_without_a_prefix(tmp_path: Path) -> None:
    original = randomise(SMALL["sd"], F32)
    named = to_diffusers(original)
    short = {name.replace("/text_model.", "/"): tensor for name, tensor in named.items()}
    run("convert", "-q", put_pipeline(tmp_path / "old", short), tmp_path / "one.safetensors")
    assert_same(load_file(tmp_path / "one.safetensors"), original)
    base = save(tmp_path, base=original)[0]
    out = tmp_path / "out.safetensors"
    assert_same(merge_paths(base, [tmp_path / "old"], out, drop_rate=0), original)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("one.safetensors", "new", "--base MODEL"),
        ("one.safetensors", "new.safetensors", "has the names of original files already"),
        ("old", "new", "like new.safetensors"),
        ("other", "new.safetensors", "no original name is known for 'transformer/new.weight'"),
        ("old", "one.safetensors", "exists already"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, capsys: Capture, old: str, new: str, words: str
) -> None:
    original = randomise(SMALL["sd"], F32)
    named = to_diffusers(original)
    save(tmp_path, one=original)
    put_pipeline(tmp_path / "old", named)
    vae = {name: tensor for name, tensor in named.items() if name.startswith("vae/")}
    put_pipeline(tmp_path / "other", vae | {"transformer/new.weight": torch.ones(3)})
    before = snapshot(tmp_path)
    run("convert", tmp_path / old, tmp_path / new, status=1 if old == "other" else 2)
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
