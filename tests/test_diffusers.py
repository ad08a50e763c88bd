"""Models as diffusers stores them: components, pipelines of them, and what is no model yet."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import (
    POSIX,
    Capture,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    define,
    finetune,
    merge_paths,
    random_model,
    read_json,
    run,
    save_sharded,
    snapshot,
)

STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
QUICK = ("-q", "--engine=plain")
UNET = {f"down_blocks.{k}.attentions.0.to_q.weight": (30, 40) for k in range(3)}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "unet": {**UNET, "conv_in.weight": (8, 4, 3, 3), "conv_in.bias": (8,)},
    "text_encoder": {"text_model.embeddings.token_embedding.weight": (50, 20)},
    "vae": {"decoder.conv_in.weight": (16, 4, 3, 3)},
}
STEMS = {"unet": STEM, "text_encoder": "model", "vae": STEM}
SIDE = {
    "scheduler/scheduler_config.json": '{"_class_name": "DDIMScheduler"}',
    "tokenizer/vocab.json": "{}",
    "tokenizer/merges.txt": "#version: 0.2",
    "feature_extractor/preprocessor_config.json": "{}",
    "LICENSE": "mine",
}


def put(folder: Path, tensors: Tensors, stem: str, shards: int = 1, **config: Any) -> None:
    """Weights and a configuration in a folder, in so many files, by their library's names."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / f"{stem}.safetensors", {"format": "pt"})
    else:
        save_sharded(folder, tensors, [[*tensors][k::shards] for k in range(shards)], stem)


def put_pipeline(folder: Path, parts: dict[str, Tensors], shards: int = 1) -> Path:
    """A directory as DiffusionPipeline.save_pretrained writes it."""
    known = {name: ["diffusers", "SomeModel"] for name in (*SHAPES, "scheduler", "tokenizer")}
    index = {"_class_name": "SomePipeline", **known, "safety_checker": [None, None]}
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps(index))
    for name, tensors in parts.items():
        put(folder / name, tensors, STEMS[name], shards if name == "unet" else 1, _class_name=name)
    for name, text in SIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def make_parts(seed: int | None = None) -> dict[str, Tensors]:
    """The tensors of a base's components or, with a seed, of a fine-tune's."""
    parts = {name: random_model(k, shapes=own) for k, (name, own) in enumerate(SHAPES.items())}
    return parts if seed is None else {n: finetune(own, seed) for n, own in parts.items()}


@pytest.fixture
def pipelines(tmp_path: Path) -> list[Path]:
    """A base whose U-Net is in two files, and two fine-tunes."""
    base = put_pipeline(tmp_path / "base", make_parts(), 2)
    return [base, *(put_pipeline(tmp_path / f"m{k}", make_parts(k)) for k in (1, 2))]


def join(parts: dict[str, Tensors]) -> Tensors:
    """A pipeline's tensors, by the names that a merge knows them by."""
    return {f"{part}/{name}": t for part, own in parts.items() for name, t in own.items()}


def load(folder: Path) -> dict[str, Tensors]:
    """The tensors in each folder of an output."""
    parts: dict[str, Tensors] = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        parts.setdefault(path.parent.name, {}).update(load_file(path))
    return parts


def contents(folder: Path) -> dict[str, str]:
    return {name: digest for name, (_, _, digest) in snapshot(folder).items()}


def models(paths: list[Path]) -> list[Any]:
    return ["-b", paths[0], "-m", *paths[1:]]


# --- components -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a_component_is_a_model_and_so_is_what_becomes_of_it(tmp_path: Path, shards: int) -> None:
    base = make_parts()["unet"]
    put(tmp_path / "unet", base, STEM, shards, _class_name="UNet2DConditionModel")
    tuned = finetune(base, 1)
    put(tmp_path / "tuned", tuned, f"{STEM}.fp16", _class_name="UNet2DConditionModel")
    out = tmp_path / "out"
    paths = [tmp_path / "unet", tmp_path / "tuned"]
    size = ("--max-shard-size", "6KB") if shards > 1 else ()
    run(*QUICK, *models(paths), "-o", out, *size)
    assert_same(
        {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()},
        define(base, [tuned]),
    )
    files = sorted(path.name for path in out.glob("*.safetensors"))
    if shards == 1:
        assert files == [f"{STEM}.safetensors"]
    else:
        assert files == [f"{STEM}-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
        assert read_json(out / INDEX)["weight_map"].keys() == base.keys()
    assert "library_name: diffusers" in (out / "README.md").read_text()
    run("verify", *QUICK, out)
    if shards == 1:  # by a file of it, it is the same
        run(*QUICK, *models([paths[0] / files[0], paths[1]]), "-o", tmp_path / "by file")
        assert contents(out) == contents(tmp_path / "by file")


def test_of_several_precisions_the_plain_one_is_read_and_others_must_be_chosen(
    tmp_path: Path, check_refused: Refusal
) -> None:
    base = make_parts()["unet"]
    put(tmp_path / "unet", base, STEM, _class_name="UNet2DConditionModel")
    tuned = tmp_path / "tuned"
    put(tuned, finetune(base, 1), STEM)
    for variant in ("fp16", "non_ema"):
        save_file(finetune(base, 2), tuned / f"{STEM}.{variant}.safetensors")
    (tuned / f"{STEM}.safetensors.index.fp16.json").write_text("{}")
    out = tmp_path / "out"
    made = merge_paths(tuned, [tmp_path / "unet"], out, drop_rate=0.0, engine="plain")
    assert_same(made, define(finetune(base, 1), [base], drop_rate=0.0))
    assert {*contents(out)} == {
        "README.md",
        "config.json",
        "dare_recipe.toml",
        f"{STEM}.safetensors",
    }
    (tuned / f"{STEM}.safetensors").unlink()
    check_refused(tmp_path / "unet", tuned, "tuned", "several kinds", "fp16", "non_ema")


# --- pipelines ------------------------------------------------------------------------------------


def test_a_pipeline_is_merged_by_component(
    pipelines: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    run("--engine=plain", *models(pipelines), "-o", out, "--max-shard-size", "6KB")
    printed = capsys.readouterr()
    assert "m1 has another 'vae'" in printed.err
    base, *tuned = (make_parts(seed) for seed in (None, 1, 2))
    made = load(out)
    expected = define(join(base), [join(parts) for parts in tuned])
    for name in ("unet", "text_encoder"):
        own = {name: made[name]}
        assert_same(join(own), {n: t for n, t in expected.items() if n in join(own)})
        assert made[name].keys() == base[name].keys()
    assert_same(made["vae"], base["vae"])
    assert {n: (out / n).read_text() for n in SIDE} == SIDE
    for name in ("model_index.json", *(f"{part}/config.json" for part in SHAPES)):
        assert (out / name).read_bytes() == (pipelines[0] / name).read_bytes()
    files = sorted(path.name for path in (out / "unet").glob("*.safetensors"))
    assert files == [f"{STEM}-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
    index = read_json(out / "unet" / INDEX)["weight_map"]
    assert index.keys() == base["unet"].keys()
    assert {*index.values()} == {*files}
    assert (out / "text_encoder" / "model.safetensors").exists()
    assert (out / "vae" / f"{STEM}.safetensors").exists()
    assert "library_name: diffusers" in (out / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_vae_is_noticed_whatever_its_type(
    tmp_path: Path, capsys: Capture, dtype: torch.dtype
) -> None:
    parts = make_parts()
    rounded = {n: {k: t.to(dtype) for k, t in own.items()} for n, own in parts.items()}
    tuned = {**make_parts(1), "vae": parts["vae"]}
    other = {**tuned, "vae": {name: tensor * 1.1 for name, tensor in parts["vae"].items()}}
    paths = [
        put_pipeline(tmp_path / name, own)
        for name, own in (("base", rounded), ("tuned", tuned), ("other", other))
    ]
    run(*QUICK, *models(paths), "-o", tmp_path / "out", "--drop-rate", "0")
    printed = capsys.readouterr().err
    assert "other has another 'vae'" in printed
    assert "tuned has another" not in printed


def test_every_command_takes_pipelines(
    pipelines: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    size = ("--max-shard-size", "6KB")
    common = [*models(pipelines), *QUICK]
    run(*common, *size, "-o", out)
    run("verify", *QUICK, out)
    run(*QUICK, "-c", out, "-o", tmp_path / "again")
    for flags in (("--part", "1/2"), ("--part", "2/2"), ("--resume",)):
        run(*common, *size, "-o", tmp_path / "parts", *flags)
    assert contents(out) == contents(tmp_path / "again") == contents(tmp_path / "parts")
    capsys.readouterr()
    run("analyze", *common, "--json")
    assert json.loads(capsys.readouterr().out)["models"][0]["total"]["tensors"] == 6
    run("analyze", *common, "--components", "vae", "--write-config", "-")
    assert 'components = ["vae"]' in capsys.readouterr().out
    weights = out / "vae" / f"{STEM}.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    run("verify", *QUICK, out, status=1)


@pytest.mark.parametrize("name", ["packed", "packed.safetensors"])
def test_a_pipeline_is_packed_as_it_is_merged(
    pipelines: list[Path], tmp_path: Path, name: str
) -> None:
    base, tuned = pipelines[:2]
    run("pack", *QUICK, *models([base, tuned]), "-o", tmp_path / name)
    for model, out in ((tuned, "whole"), (tmp_path / name, "like")):
        run(*QUICK, *models([base, model]), "-o", tmp_path / out)
    whole, like = load(tmp_path / "whole"), load(tmp_path / "like")
    assert_same(join(whole), join(like))
    file = tmp_path / name if name.endswith("s") else tmp_path / name / "packed.safetensors"
    stored = load_file(file)
    assert not any(each.startswith("vae/") for each in stored)
    assert stored["unet/conv_in.weight"].numel() < 100  # of 288


def test_components_are_merged_that_are_asked_for(
    pipelines: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    run("--engine=plain", *models(pipelines[:2]), "-o", out, "--components", "vae", "text_encoder")
    assert "m1 has another 'unet'" in capsys.readouterr().err
    base, tuned = make_parts(), make_parts(1)
    made = load(out)
    expected = define(join(base), [join(tuned)])
    assert_same(made["unet"], base["unet"])
    for name in ("vae", "text_encoder"):
        assert_same(
            join({name: made[name]}), {n: expected[n] for n in expected if n.startswith(name)}
        )
    (tmp_path / "c.toml").write_text(
        '[models]\nbase_file = "base"\nmerge_files = ["m1"]\noutput_file = "toml"\n'
        '[dare]\ncomponents = ["vae", "text_encoder"]\n'
    )
    run(*QUICK, "-c", tmp_path / "c.toml")
    assert contents(out) == contents(tmp_path / "toml")


@pytest.mark.parametrize(
    ("folder", "flags", "words"),
    [
        ("", "-o out --components vea", ["'vea'", "no component", "did you mean vae?"]),
        ("unet", "-o out --components unet", ["is no pipeline", "leave"]),
        ("", "-o out.safetensors", ["one file", "name a directory"]),
        ("", "-o out --adapter-rank 4", ["one of its folders", "'unet'"]),
        ("other", "-o out", ["none of the components", "'vae'", "--components NAME"]),
        ("alone", "-o out", ["--components vae"]),
    ],
    ids=str,
)
def test_components_that_cannot_be_merged_are_named(
    pipelines: list[Path],
    tmp_path: Path,
    refused: Refusal,
    monkeypatch: Patch,
    folder: str,
    flags: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = [path / folder if folder == "unet" else path for path in pipelines[:2]]
    if folder == "alone":
        pair[1] = put_pipeline(tmp_path / folder, {"vae": make_parts(1)["vae"]})
    for path in pair if folder == "other" else []:
        for name in ("unet", "text_encoder"):
            (path / name).rename(path / f"other_{name}")
    refused(2, words, *models(pair), *flags.split())


def test_what_a_fine_tune_lacks_is_unchanged(tmp_path: Path, capsys: Capture) -> None:
    base = put_pipeline(tmp_path / "base", make_parts())
    tuned = put_pipeline(tmp_path / "m1", {"unet": make_parts(1)["unet"]})
    run("--engine=plain", *models([base, tuned]), "-o", tmp_path / "out")
    assert "m1 lacks 1 tensor of the base: 'text_encoder/text_model" in capsys.readouterr().err
    made = load(tmp_path / "out")
    assert_same(made["text_encoder"], make_parts()["text_encoder"])
    expected = define(make_parts()["unet"], [make_parts(1)["unet"]])
    assert not torch.equal(made["unet"]["conv_in.weight"], make_parts()["unet"]["conv_in.weight"])
    assert made["unet"].keys() == expected.keys()


def test_rules_and_gradients_know_components(pipelines: list[Path], tmp_path: Path) -> None:
    base, tuned = make_parts(), make_parts(1)
    rules = [
        {"match": "unet/down_blocks*", "lambda_coeff": {"gradient": [0.0, 1.0]}},
        {"match": "text_encoder/*", "lambda_coeff": 0.0},
    ]
    merge_paths(*pipelines[:1], pipelines[1:2], tmp_path / "out", drop_rate=0.0, rules=rules)
    made = load(tmp_path / "out")
    assert_same(made["text_encoder"], base["text_encoder"])
    for k, share in enumerate((0.0, 0.5, 1.0)):
        name = f"down_blocks.{k}.attentions.0.to_q.weight"
        old, new = base["unet"][name].double(), tuned["unet"][name].double()
        assert torch.allclose(made["unet"][name].double(), old + share * (new - old), atol=1e-8)
    assert_same({"x": made["unet"]["conv_in.bias"]}, {"x": tuned["unet"]["conv_in.bias"]})


def test_the_type_is_that_of_all_components(pipelines: list[Path], tmp_path: Path) -> None:
    config = {"architectures": ["CLIPTextModel"], "torch_dtype": "float32"}
    (pipelines[0] / "text_encoder" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    run(*QUICK, *models(pipelines), "-o", out, "--dtype", "bfloat16")
    made = load(out)
    assert {t.dtype for t in join(made).values()} == {torch.bfloat16}
    expected = {name: t.bfloat16() for name, t in make_parts()["vae"].items()}
    assert_same(made["vae"], expected)
    assert read_json(out / "text_encoder" / "config.json")["torch_dtype"] == "bfloat16"
    assert read_json(out / "unet" / "config.json") == {"_class_name": "unet"}


def test_weights_that_are_no_safetensors_are_copied_or_refused(
    pipelines: list[Path], tmp_path: Path, capsys: Capture, check_refused: Refusal
) -> None:
    base, tuned, _ = pipelines
    for path in (base, tuned):
        (path / "vae" / f"{STEM}.safetensors").unlink()
        (path / "vae" / f"{STEM}.bin").write_bytes(b"a pickle")
    out = tmp_path / "out"
    run("--engine=plain", *models([base, tuned]), "-o", out)
    assert f"vae/{STEM}.bin' of" in capsys.readouterr().err
    assert (out / "vae" / f"{STEM}.bin").read_bytes() == b"a pickle"
    run("verify", *QUICK, out)
    (tuned / "unet" / f"{STEM}.safetensors").rename(tuned / "unet" / f"{STEM}.bin")
    check_refused(base, tuned, "m1/unet", "pickles", f"dare convert {tuned}/unet/{STEM}.bin")


@POSIX
def test_what_names_of_folders_lead_to_is_not_read(
    pipelines: list[Path], tmp_path: Path, refused: Refusal
) -> None:
    base, tuned, other = pipelines
    index = read_json(base / "model_index.json")
    odd = {name: ["a", "b"] for name in ("../m2/unet", str(other / "unet"), "..", "", "unet/..")}
    (base / "model_index.json").write_text(json.dumps(index | odd))
    run(*QUICK, *models([base, tuned]), "-o", tmp_path / "out")
    assert {*load(tmp_path / "out")} == {*SHAPES}
    (tuned / "unet").rename(tmp_path / "elsewhere")
    (tuned / "unet").symlink_to(tmp_path / "elsewhere")
    words = [str(tuned / "unet"), "model_index.json", "is a link"]
    refused(1, words, *models([base, tuned]), "-o", tmp_path / "new")
    index = tuned / "model_index.json"
    index.rename(tmp_path / "index.json")
    index.symlink_to(tmp_path / "index.json")
    refused(1, ["leads out of its model"], *models([base, tuned]), "-o", tmp_path / "new")
    index.unlink()
    index.write_text("[")
    words = ["model_index.json", "not valid"]
    refused(1, words, *models([base, tuned]), "-o", tmp_path / "new")


# --- what is no model yet -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model_index.json", "unet/config.json"], ["a pipeline without", "download its folders"]),
        (
            ["unet/diffusion_pytorch_model.safetensors", "optimizer.bin"],
            ["'unet/diffusion_pytorch_model.safetensors'", "the folder", "model_index.json"],
        ),
        (["my lora.safetensors", "notes.txt"], ["'my lora.safetensors'", "name the file"]),
        (
            ["latest", "zero_to_fp32.py", "global_step5/mp_rank_00.pt"],
            ["DeepSpeed", "zero_to_fp32"],
        ),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt", "x.pt"], ["DeepSpeed", "zero_to_fp32"]),
        (["pytorch_model_fsdp_0/__0_0.distcp", "optimizer.bin"], ["FSDP", "accelerate merge-w"]),
        ([".metadata", "__0_0.distcp"], ["FSDP", "accelerate merge-weights"]),
        (["model-q4.gguf"], ["GGUF", "llama.cpp"]),
        (["pytorch_model.bin"], ["pickles", "dare convert"]),
        (["notes.txt"], ["holds no model", "model.safetensors"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_a_directory_without_a_model_is_told_what_it_is(
    tmp_path: Path, check_refused: Refusal, files: list[str], words: list[str]
) -> None:
    base = put_pipeline(tmp_path / "base", make_parts())
    for name in files:
        path = tmp_path / "odd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    check_refused(base, tmp_path / "odd", "odd'", *words)


# --- as diffusers itself writes and reads them ----------------------------------------------------


def make_tokenizer(folder: Path) -> Any:
    """A tokenizer of CLIP's that knows letters."""
    import transformers

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    ends = ["<|startoftext|>", "<|endoftext|>"]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    files = {
        "vocab.json": json.dumps({t: k for k, t in enumerate(tokens)}),
        "merges.txt": "#version: 0.2\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return transformers.CLIPTokenizer(*(str(folder / name) for name in files), model_max_length=77)


def make_clip(kind: str = "CLIPTextModel") -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=32,
        vocab_size=60,
        bos_token_id=52,
        eos_token_id=53,
        pad_token_id=53,
    )
    return getattr(transformers, kind)(config)


def make_unet(**config: Any) -> Any:
    import diffusers

    return diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **config,
    )


def make_vae(channels: int = 4) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        shift_factor=0.1,
    )


def make_sd(tokenizer: Any) -> Any:
    import diffusers

    return diffusers.StableDiffusionPipeline(
        unet=make_unet(cross_attention_dim=32),
        scheduler=diffusers.DDIMScheduler(),
        vae=make_vae(),
        text_encoder=make_clip(),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def make_sdxl(tokenizer: Any) -> Any:
    import diffusers

    unet = make_unet(
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
    )
    return diffusers.StableDiffusionXLPipeline(
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(),
        vae=make_vae(),
        text_encoder=make_clip(),
        text_encoder_2=make_clip("CLIPTextModelWithProjection"),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
    )


def make_flux(tokenizer: Any) -> Any:
    import diffusers
    import transformers

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    t5 = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, vocab_size=60
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=make_clip(),
        text_encoder_2=transformers.T5EncoderModel(t5),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        transformer=transformer,
        vae=make_vae(1),
    )


def state_of(pipeline: Any) -> dict[str, Tensors]:
    parts = pipeline.components.items()
    modules = {name: part for name, part in parts if isinstance(part, torch.nn.Module)}
    return {
        name: {key: tensor.clone() for key, tensor in part.state_dict().items()}
        for name, part in modules.items()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make_sd, make_sdxl, make_flux])
def test_diffusers_loads_what_becomes_of_its_pipelines(tmp_path: Path, make: Any) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    pipeline = make(make_tokenizer(tmp_path))
    paths = [tmp_path / name for name in ("base", "m1", "m2")]
    pipeline.save_pretrained(paths[0], max_shard_size="20KB")
    states = [state_of(pipeline)]
    for k, path in enumerate(paths[1:], 1):
        for name, own in states[0].items():
            pipeline.components[name].load_state_dict(finetune(own, k))
        states.append(state_of(pipeline))  # where what is tied is equal
        pipeline.save_pretrained(path, variant="fp16" if k == 2 else None)
    out = tmp_path / "out"
    run(*QUICK, *models(paths), "-o", out, "--max-shard-size", "30KB")
    run("verify", *QUICK, out)
    merged = diffusers.DiffusionPipeline.from_pretrained(out)
    made = state_of(merged)
    expected = define(join(states[0]), [join(state) for state in states[1:]])
    assert made.keys() == states[0].keys()
    for name, own in made.items():
        kept = {f"{name}/{key}": tensor for key, tensor in states[0][name].items()}
        wanted = kept if name == "vae" else {key: expected[key] for key in kept}
        # What is tied is stored once.
        stored = {f"{name}/{key}" for path in (out / name).glob("*.s*s") for key in load_file(path)}
        prefixed = join({name: own})
        assert set() < stored <= prefixed.keys()
        assert_same({key: prefixed[key] for key in stored}, {key: wanted[key] for key in stored})
    image = merged("abc", num_inference_steps=2, height=16, width=16, output_type="pt").images
    assert torch.isfinite(image).all()
