"""The names that diffusion models have: those of original single files, and those of diffusers.

A name here is that of a component and what it calls a tensor, like unet/conv_in.weight. A table
says, for modules of original files, by which names diffusers has them; what it does not list has
the same name. A # stands for the number of a block. What is stacked in one tensor of an original
file lists its parts: name, and from which to which share of the rows.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

# The parts of a stacked tensor: name, and the first and last share of the rows there.
NameTable: TypeAlias = Mapping[str, str | tuple[tuple[str, int, int], ...]]

TRANSPOSED: Final = ("text_projection", "text_projection.weight")  # of either against the other

# --- tables --------------------------------------------------------------------------------------

RESNET: Final = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
LEVELS: Final = range(4)
# By level of the UNet: its blocks are numbered throughout, two in each and one that makes the
# picture smaller; on the way back three, and what makes it larger is beside the last one.
UNET: Final[NameTable] = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "middle_block.1": "mid_block.attentions.0",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
    **{
        f"input_blocks.{3 * level + k + 1}.0.{old}": f"down_blocks.{level}.resnets.{k}.{new}"
        for level in LEVELS
        for k in range(2)
        for old, new in RESNET.items()
    },
    **{
        f"input_blocks.{3 * level + k + 1}.1": f"down_blocks.{level}.attentions.{k}"
        for level in LEVELS
        for k in range(2)
    },
    **{
        f"input_blocks.{3 * level + 3}.0.op": f"down_blocks.{level}.downsamplers.0.conv"
        for level in LEVELS
    },
    **{
        f"middle_block.{2 * k}.{old}": f"mid_block.resnets.{k}.{new}"
        for k in range(2)
        for old, new in RESNET.items()
    },
    **{
        f"output_blocks.{3 * level + k}.0.{old}": f"up_blocks.{level}.resnets.{k}.{new}"
        for level in LEVELS
        for k in range(3)
        for old, new in RESNET.items()
    },
    **{
        f"output_blocks.{3 * level + k}.1": f"up_blocks.{level}.attentions.{k}"
        for level in LEVELS
        for k in range(3)
    },
    **{
        f"output_blocks.{3 * level + 2}.2.conv": f"up_blocks.{level}.upsamplers.0.conv"
        for level in LEVELS
    },
}
# Where there is no attention on the lowest level, its place is taken.
PLAIN_LEVEL: Final = {"output_blocks.2.1.conv": "up_blocks.0.upsamplers.0.conv"}
SMALL_UNET: Final[NameTable] = {
    **{old: new for old, new in UNET.items() if new not in PLAIN_LEVEL.values()},
    **PLAIN_LEVEL,
}

VAE_ATTENTION: Final = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v"}
VAE: Final[NameTable] = {
    **{
        f"{side}.mid.attn_1.{old}": f"{side}.mid_block.attentions.0.{new}"
        for side in ("encoder", "decoder")
        for old, new in {**VAE_ATTENTION, "proj_out": "to_out.0"}.items()
    },
    **{
        f"{side}.mid.block_{k + 1}": f"{side}.mid_block.resnets.{k}"
        for side in ("encoder", "decoder")
        for k in range(2)
    },
    **{f"{side}.norm_out": f"{side}.conv_norm_out" for side in ("encoder", "decoder")},
    **{
        f"encoder.down.{level}.block.{k}{old}": f"encoder.down_blocks.{level}.resnets.{k}{new}"
        for level in LEVELS
        for k in range(2)
        for old, new in {"": "", ".nin_shortcut": ".conv_shortcut"}.items()
    },
    **{
        f"decoder.up.{3 - level}.block.{k}{old}": f"decoder.up_blocks.{level}.resnets.{k}{new}"
        for level in LEVELS
        for k in range(3)
        for old, new in {"": "", ".nin_shortcut": ".conv_shortcut"}.items()
    },
    **{
        f"encoder.down.{level}.downsample.conv": f"encoder.down_blocks.{level}.downsamplers.0.conv"
        for level in LEVELS
    },
    **{
        f"decoder.up.{3 - level}.upsample.conv": f"decoder.up_blocks.{level}.upsamplers.0.conv"
        for level in LEVELS
    },
}
# Convolutions of a single point in original files that are matrices in diffusers, by both names.
POINTS: Final = {name for pair in VAE.items() if ".attn_1." in pair[0] for name in pair}
# What diffusers called them first, which files still have.
OLD_VAE: Final = {
    f"{side}.mid_block.attentions.0.{old}": f"{side}.mid_block.attentions.0.{new}"
    for side in ("encoder", "decoder")
    for old, new in {
        "query": "to_q",
        "key": "to_k",
        "value": "to_v",
        "proj_attn": "to_out.0",
    }.items()
}

LAYER: Final = "text_model.encoder.layers.#."
OPEN_CLIP: Final[NameTable] = {
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    "transformer.resblocks.#.ln_1": f"{LAYER}layer_norm1",
    "transformer.resblocks.#.ln_2": f"{LAYER}layer_norm2",
    "transformer.resblocks.#.mlp.c_fc": f"{LAYER}mlp.fc1",
    "transformer.resblocks.#.mlp.c_proj": f"{LAYER}mlp.fc2",
    "transformer.resblocks.#.attn.out_proj": f"{LAYER}self_attn.out_proj",
    **{
        f"transformer.resblocks.#.attn.in_proj_{kind}": tuple(
            (f"{LAYER}self_attn.{part}_proj.{kind}", 0, 1) for part in "qkv"
        )
        for kind in ("weight", "bias")
    },
}

# What transformers saves since 5.0, as did some before there was a text_model.
SHORT_CLIP: Final = {
    name: f"text_model.{name}" for name in ("embeddings", "encoder.layers", "final_layer_norm")
}

DOUBLE: Final = "transformer_blocks.#."
SINGLE: Final = "single_transformer_blocks.#."
EMBEDDERS: Final = {
    "time_in": "timestep_embedder",
    "vector_in": "text_embedder",
    "guidance_in": "guidance_embedder",
}
FLUX: Final[NameTable] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    **{
        f"{old}.{side}_layer": f"time_text_embed.{new}.linear_{k}"
        for old, new in EMBEDDERS.items()
        for k, side in enumerate(("in", "out"), 1)
    },
    "double_blocks.#.img_mod.lin": f"{DOUBLE}norm1.linear",
    "double_blocks.#.txt_mod.lin": f"{DOUBLE}norm1_context.linear",
    "double_blocks.#.img_attn.qkv": tuple((f"{DOUBLE}attn.to_{part}", 0, 1) for part in "qkv"),
    "double_blocks.#.txt_attn.qkv": tuple(
        (f"{DOUBLE}attn.add_{part}_proj", 0, 1) for part in "qkv"
    ),
    "double_blocks.#.img_attn.norm.query_norm.scale": f"{DOUBLE}attn.norm_q.weight",
    "double_blocks.#.img_attn.norm.key_norm.scale": f"{DOUBLE}attn.norm_k.weight",
    "double_blocks.#.txt_attn.norm.query_norm.scale": f"{DOUBLE}attn.norm_added_q.weight",
    "double_blocks.#.txt_attn.norm.key_norm.scale": f"{DOUBLE}attn.norm_added_k.weight",
    "double_blocks.#.img_attn.proj": f"{DOUBLE}attn.to_out.0",
    "double_blocks.#.txt_attn.proj": f"{DOUBLE}attn.to_add_out",
    "double_blocks.#.img_mlp.0": f"{DOUBLE}ff.net.0.proj",
    "double_blocks.#.img_mlp.2": f"{DOUBLE}ff.net.2",
    "double_blocks.#.txt_mlp.0": f"{DOUBLE}ff_context.net.0.proj",
    "double_blocks.#.txt_mlp.2": f"{DOUBLE}ff_context.net.2",
    "single_blocks.#.modulation.lin": f"{SINGLE}norm.linear",
    # The MLP is four times as wide as the model.
    "single_blocks.#.linear1": (
        *((f"{SINGLE}attn.to_{part}", 0, 1) for part in "qkv"),
        (f"{SINGLE}proj_mlp", 0, 4),
    ),
    "single_blocks.#.linear2": f"{SINGLE}proj_out",
    "single_blocks.#.norm.query_norm.scale": f"{SINGLE}attn.norm_q.weight",
    "single_blocks.#.norm.key_norm.scale": f"{SINGLE}attn.norm_k.weight",
    "final_layer.linear": "proj_out",
    # Shift and scale are the other way round.
    "final_layer.adaLN_modulation.1": (("norm_out.linear", 1, 2), ("norm_out.linear", 0, 1)),
}


SD3: Final[NameTable] = {
    "x_embedder.proj": "pos_embed.proj",
    "pos_embed": "pos_embed.pos_embed",
    **{
        f"{old}.mlp.{2 * k - 2}": f"time_text_embed.{new}.linear_{k}"
        for old, new in {"t_embedder": "timestep_embedder", "y_embedder": "text_embedder"}.items()
        for k in (1, 2)
    },
    **{
        f"joint_blocks.#.x_block.{own}.qkv": tuple((f"{DOUBLE}{own}.to_{k}", 0, 1) for k in "qkv")
        for own in ("attn", "attn2")
    },
    **{
        f"joint_blocks.#.x_block.{own}.{old}": f"{DOUBLE}{own}.{new}"
        for own in ("attn", "attn2")
        for old, new in {"ln_q": "norm_q", "ln_k": "norm_k", "proj": "to_out.0"}.items()
    },
    "joint_blocks.#.context_block.attn.qkv": FLUX["double_blocks.#.txt_attn.qkv"],
    "joint_blocks.#.context_block.attn.ln_q": f"{DOUBLE}attn.norm_added_q",
    "joint_blocks.#.context_block.attn.ln_k": f"{DOUBLE}attn.norm_added_k",
    "joint_blocks.#.context_block.attn.proj": f"{DOUBLE}attn.to_add_out",
    "joint_blocks.#.x_block.adaLN_modulation.1": f"{DOUBLE}norm1.linear",
    "joint_blocks.#.context_block.adaLN_modulation.1": f"{DOUBLE}norm1_context.linear",
    "joint_blocks.#.x_block.mlp.fc1": f"{DOUBLE}ff.net.0.proj",
    "joint_blocks.#.x_block.mlp.fc2": f"{DOUBLE}ff.net.2",
    "joint_blocks.#.context_block.mlp.fc1": f"{DOUBLE}ff_context.net.0.proj",
    "joint_blocks.#.context_block.mlp.fc2": f"{DOUBLE}ff_context.net.2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": FLUX["final_layer.adaLN_modulation.1"],
}

# --- single files --------------------------------------------------------------------------------

# Which of the two names.
ORIGINAL = 0
DIFFUSERS = 1
# The single files that programs read: for each component, what stands before its names, and which
# they are. Text encoders of OpenAI are everywhere called as in diffusers.
Places: TypeAlias = Mapping[str, tuple[str, int]]
SD_FILE: Final[Places] = {
    "unet": ("model.diffusion_model.", ORIGINAL),
    "vae": ("first_stage_model.", ORIGINAL),
    "text_encoder": ("cond_stage_model.transformer.", DIFFUSERS),
    "text_encoder_2": ("conditioner.embedders.0.model.", ORIGINAL),  # SDXL's refiner has only that
}
SDXL_FILE: Final[Places] = {
    **SD_FILE,
    "text_encoder": ("conditioner.embedders.0.transformer.", DIFFUSERS),
    "text_encoder_2": ("conditioner.embedders.1.model.", ORIGINAL),
}
FLUX_FILE: Final[Places] = {
    "transformer": ("model.diffusion_model.", ORIGINAL),
    "vae": ("vae.", ORIGINAL),
    "text_encoder": ("text_encoders.clip_l.transformer.", DIFFUSERS),
    "text_encoder_2": ("text_encoders.t5xxl.transformer.", DIFFUSERS),
}
SD3_FILE: Final[Places] = {
    **FLUX_FILE,
    "vae": ("first_stage_model.", ORIGINAL),
    "text_encoder_2": ("text_encoders.clip_g.transformer.", DIFFUSERS),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.", DIFFUSERS),
}
# What may be a file by itself.
ALONE: Final[Places] = dict.fromkeys(("transformer", "vae", "text_encoder_2"), ("", ORIGINAL))
# The text encoder of SD 2 is not OpenAI's, and has more layers.
DEEP: Final = "text_model.encoder.layers.12.layer_norm1.weight"
DEEP_PLACE: Final = ("cond_stage_model.model.", ORIGINAL)

# --- maps ----------------------------------------------------------------------------------------


class Share(NamedTuple):
    """Rows that a tensor of one kind of names has in common with one of the other kind: which they
    are in either, by shares, and how many shares those have.
    """

    name: str  # of the other
    first: int
    other_first: int
    length: int
    total: int
    other_total: int


@dataclass(frozen=True)
class Map:
    """The two names of each tensor of a component."""

    component: str
    # A tensor that every such component has: its name in original files, and those in diffusers.
    markers: tuple[str, ...]
    table: NameTable
    # Other names that diffusers has for the same: the usual ones by them.
    others: Mapping[str, str] = field(default_factory=dict)
    file: Places | None = None  # the single file that it is in; None: it may be in several

    @cached_property
    def shares(self) -> tuple[dict[str, list[Share]], dict[str, list[Share]]]:
        """By what original files, and by what diffusers calls modules: what they consist of."""
        both = defaultdict[str, list[Share]](list), defaultdict[str, list[Share]](list)
        for old, new in self.table.items():
            parts = ((new, 0, 1),) if isinstance(new, str) else new
            total = sum(last - first for _, first, last in parts)
            place = 0
            for name, first, last in parts:
                length = last - first
                whole = max(end for other, _, end in parts if other == name)
                both[0][old].append(Share(name, place, first, length, total, whole))
                both[1][name].append(Share(old, first, place, length, whole, total))
                place += length
        return both


T5: Final = "encoder.block.0.layer.0.SelfAttention.q.weight"
# The first that has its marker is a component's.
MAPS: Final = (
    Map(
        "unet",
        ("output_blocks.0.1.norm.weight", "up_blocks.0.attentions.0.norm.weight"),
        UNET,
        file=SDXL_FILE,
    ),
    Map(
        "unet",
        ("input_blocks.1.0.in_layers.0.weight", "down_blocks.0.resnets.0.norm1.weight"),
        SMALL_UNET,
        file=SD_FILE,
    ),
    Map(
        "transformer",
        ("double_blocks.0.img_attn.qkv.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        FLUX,
        file=FLUX_FILE,
    ),
    # Of SD 3 and 3.5, by the number of the last block: there, shift and scale are swapped, too.
    *(
        Map(
            "transformer",
            (
                f"joint_blocks.{last}.x_block.attn.qkv.weight",
                f"transformer_blocks.{last}.norm1_context.linear.weight",
            ),
            {
                **SD3,
                f"joint_blocks.{last}.context_block.adaLN_modulation.1": (
                    (f"transformer_blocks.{last}.norm1_context.linear", 1, 2),
                    (f"transformer_blocks.{last}.norm1_context.linear", 0, 1),
                ),
            },
            file=SD3_FILE,
        )
        for last in (37, 23)
    ),
    Map(
        "vae",
        ("decoder.up.3.block.0.norm1.weight", "decoder.up_blocks.3.resnets.0.norm1.weight"),
        VAE,
        OLD_VAE,
    ),
    Map(
        "text_encoder_2",
        ("text_projection", "text_projection.weight"),
        OPEN_CLIP,
        SHORT_CLIP,
        file=SDXL_FILE,
    ),
    Map(
        "text_encoder",
        (
            "transformer.resblocks.0.attn.in_proj_weight",
            "text_model.embeddings.token_embedding.weight",
            "embeddings.token_embedding.weight",
        ),
        OPEN_CLIP,
        SHORT_CLIP,
    ),
    Map("text_encoder_2", (T5, T5), {}, file=FLUX_FILE),
    Map("text_encoder_3", (T5, T5), {}, file=SD3_FILE),
)
# What stands before the names of a component, in files of all kinds.
PREFIXES: Final = (
    ("unet", ("unet/", "model.diffusion_model.", "diffusion_model.", "unet.")),
    ("transformer", ("transformer/", "model.diffusion_model.", "diffusion_model.", "transformer.")),
    ("vae", ("vae/", "first_stage_model.", "vae.")),
    (
        "text_encoder",
        (
            "text_encoder/",
            "cond_stage_model.transformer.",
            "cond_stage_model.model.",
            "conditioner.embedders.0.transformer.",
            "text_encoders.clip_l.transformer.",
            "text_encoder.",
        ),
    ),
    (
        "text_encoder_2",
        (
            "text_encoder_2/",
            "conditioner.embedders.1.model.",
            "conditioner.embedders.0.model.",
            "text_encoders.clip_g.transformer.",
            "text_encoders.t5xxl.transformer.",
            "text_encoder_2.",
        ),
    ),
    (
        "text_encoder_3",
        ("text_encoder_3/", "text_encoders.t5xxl.transformer.", "text_encoder_3."),
    ),
)
