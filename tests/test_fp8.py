"""FP8 models: read as what they stand for, merged, and written in FP8 again or as plain weights.

What they should give is made by torch here: dequantise, merge in memory, quantise.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dare import DareConfig, DareError, DareMerger, dare_merge
from darelib.arithmetic import float8
from darelib.models.tensorfile import TensorFile
from tests import support
from tests.support import (
    BF16,
    F32,
    F64,
    INDEX,
    METHODS,
    Refusal,
    Tensors,
    assert_same,
    finetune,
    low_rank,
    make_merger,
    random_model,
    raw,
    read_json,
    same_bits,
    save_directories,
    save_directory,
    slow,
    tensors_in,
    tune,
    write_adapter,
)
from tests.test_tokenizer import write_model

# Kernels for float32 take long to compile.
run_merge = partial(support.run_merge, engine="plain")
merge_paths = partial(support.merge_paths, engine="plain")
FP8 = torch.float8_e4m3fn
SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (300, 200),
    "b.weight": (128, 256),
    "c.weight": (37, 61),
    "d.weight": (5, 1111),
    "a.bias": (300,),
    "norm.weight": (61,),
}
WEIGHTS = [name for name, shape in SHAPES.items() if len(shape) == 2]
# By kind: what a scale's name ends in, its type, the block that shares one (0: all), and its
# shape's form.
KINDS: dict[str, tuple[str, torch.dtype, tuple[int, int], str]] = {
    "blocks": ("_scale_inv", F32, (128, 128), "grid"),
    "small blocks": ("_scale_inv", F32, (16, 48), "grid"),
    "rows": ("_scale", BF16, (1, 0), "column"),
    "flat rows": ("_scale", F32, (1, 0), "flat"),
    "tensor": ("_scale", F32, (0, 0), "scalar"),
    "tensor of one": ("_scale", BF16, (0, 0), "flat"),
}
USUAL = [kind if kind in ("blocks", "rows", "tensor") else slow(kind) for kind in KINDS]


def spread(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """What each value has of what each block has."""
    high = block[0] or shape[0]
    wide = block[1] or shape[1]
    whole = scales.reshape(-(-shape[0] // high), -1).repeat_interleave(high, 0)
    return whole.repeat_interleave(wide, 1)[: shape[0], : shape[1]]


def find_peaks(values: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest value of each block."""
    rows = values.split(block[0] or len(values))
    columns = torch.stack([part.amax(0) for part in rows]).split(block[1] or values.shape[1], 1)
    return torch.stack([part.amax(1) for part in columns], 1)


def quantise(values: Tensors, kind: str, old: Tensors | None = None) -> Tensors:
    """The model in FP8; where a block of an old one stands for the same values, it is kept."""
    end, dtype, block, form = KINDS[kind]
    made = {name: tensor for name, tensor in values.items() if name not in WEIGHTS}
    for name in WEIGHTS:
        value = values[name].float()
        peaks = find_peaks(value.abs(), block)
        changed = peaks > 0
        scales = torch.where(changed, peaks / torch.tensor(448.0), 1).to(dtype)
        if old is not None:
            before = old[name].float() * spread(old[name + end].float(), value.shape, block)
            changed = find_peaks((value != before).float(), block) > 0
            kept = old[name + end].reshape(scales.shape)
            scales = torch.where(changed & (peaks > 0), scales, kept)
        made[name] = (value / spread(scales.float(), value.shape, block)).to(FP8)
        if old is not None:
            bits = torch.where(
                spread(changed, value.shape, block),
                made[name].view(torch.uint8),
                old[name].view(torch.uint8),
            )
            made[name] = bits.view(FP8)
        forms = {"flat": [-1], "scalar": []}
        made[name + end] = scales.reshape(forms.get(form, [*scales.shape]))
    return made


def dequantise(model: Tensors, kind: str) -> Tensors:
    """What a model in FP8 stands for."""
    end, _, block, _ = KINDS[kind]
    made = {name: tensor for name, tensor in model.items() if not name.endswith(end)}
    for name in WEIGHTS:
        scales = spread(model[name + end].float(), model[name].shape, block)
        made[name] = model[name].float() * scales
    return made


def make_models(kind: str, count: int = 3) -> list[Tensors]:
    """A base and fine-tunes.

    Of one weight a corner has not changed, and nothing of another in the first of them.
    """
    base = random_model(dtype=BF16, shapes=SHAPES)
    base["a.weight"][:16, :48] = 0
    models = [base, *(finetune(base, k, 0.01) for k in range(1, count))]
    for model in models[1:]:
        model["a.weight"][:128, :128] = base["a.weight"][:128, :128]
        model["d.weight"][3] = base["d.weight"][3]
    models[1]["b.weight"] = base["b.weight"]
    made = [quantise(model, kind) for model in models]
    for model in made[1:] if kind.startswith("tensor") else []:
        # Where values are equal, so are bytes, whatever else the scale is for.
        for name in ("d.weight", "a.weight"):
            scale = name + KINDS[kind][0]
            model |= {name: made[0][name].clone(), scale: made[0][scale].clone()}
            raw(model[name])[-9:] ^= 1
    return made


def write(folder: Path, kind: str, models: list[Tensors]) -> list[Path]:
    config = (
        {"quant_method": "fp8", "weight_block_size": [16, 48]} if kind == "small blocks" else {}
    )
    return [
        save_directory(folder / f"m{k}", model, torch_dtype="bfloat16", quantization_config=config)
        for k, model in enumerate(models)
    ]


def expect(models: list[Tensors], kind: str, **config: Any) -> Tensors:
    plain = [dequantise(model, kind) for model in models]
    return quantise(dare_merge(plain[0], plain[1:], DareConfig(**config)), kind, models[0])


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("settings", METHODS, ids=lambda s: "-".join(map(str, s.values())))
def test_a_merge_is_what_torch_makes_of_it(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    models = make_models(kind)
    paths = write(tmp_path, kind, models)
    report = run_merge(paths[0], paths[1:], tmp_path / "out", **settings, threads=1)
    assert_same(tensors_in(tmp_path / "out"), expect(models, kind, **settings))
    assert (tmp_path / "out" / "config.json").read_bytes() == (
        paths[0] / "config.json"
    ).read_bytes()
    assert (report.tensors, report.models[0].parameters) == (
        len(SHAPES),
        sum(v.numel() for v in dequantise(models[0], kind).values()),
    )


@pytest.mark.parametrize(
    ("job", "chunk", "threads", "engine"),
    [slow(8192, 1024, 3, "numba"), (1024, 1024, 2, "plain"), (4096, 4096, 1, "plain")],
)
@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize(
    "settings",
    [
        {"drop_rate": 0.0},
        *map(slow, [{"drop": "della", "drop_rate": 0.5, "rescale": "l1"}, *METHODS[2:]]),
    ],
)
def test_jobs_chunks_threads_and_engines_change_nothing(
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    job: int,
    chunk: int,
    threads: int,
    engine: str,
) -> None:
    models = make_models(kind)
    paths = write(tmp_path, kind, models)
    expected = expect(models, kind, **settings)
    tune(job_elements=job, min_chunk=chunk, max_chunk=chunk)
    run_merge(paths[0], paths[1:], tmp_path / "out", **settings, threads=threads, engine=engine)
    assert_same(tensors_in(tmp_path / "out"), expected)


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
@pytest.mark.parametrize("kind", ["blocks", "rows", "tensor"])
def test_base_and_fine_tunes_may_be_stored_differently(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """The output is as the base: FP8, or plain with the base's own configuration."""
    base, one, other = make_models(kind)
    plain = {name: tensor.to(dtype) for name, tensor in dequantise(other, kind).items()}
    scaled, tuned, bare = write(tmp_path, kind, [base, one, plain])
    wide, wide_one = (dequantise(model, kind) for model in (base, one))
    run_merge(scaled, [tuned, bare], tmp_path / "scaled", drop_rate=0.5)
    merged = dare_merge(wide, [wide_one, plain], DareConfig(drop_rate=0.5))
    assert_same(tensors_in(tmp_path / "scaled"), quantise(merged, kind, base))
    (bare / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    run_merge(bare, [scaled], tmp_path / "bare", drop_rate=0.5)
    assert_same(tensors_in(tmp_path / "bare"), dare_merge(plain, [wide], DareConfig(drop_rate=0.5)))
    assert (tmp_path / "bare" / "config.json").read_bytes() == (bare / "config.json").read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["small blocks", "tensor"])
def test_with_a_dtype_the_output_is_plain(tmp_path: Path, kind: str, dtype: str) -> None:
    models = make_models(kind)
    plain = [dequantise(model, kind) for model in models]
    for model in models:
        model |= {"a.input_scale": torch.ones(1), "a.k_scale": torch.tensor(0.5)}
    paths = write(tmp_path, kind, models)
    (paths[0] / "hf_quant_config.json").write_text("{}")
    run_merge(paths[0], paths[1:], tmp_path / "out", drop_rate=0.5, dtype=dtype)
    expected = dare_merge(plain[0], plain[1:], DareConfig(drop_rate=0.5, dtype=dtype))
    assert_same(tensors_in(tmp_path / "out"), expected)
    assert read_json(tmp_path / "out" / "config.json") == {"torch_dtype": dtype}
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    DareMerger(paths[0], paths[1:], DareConfig(dtype=dtype, drop_rate=0.5, engine="plain")).verify(
        tmp_path / "out"
    )
    experts = {"experts.weight": torch.zeros(2, 4, 4).to(FP8)}
    write(tmp_path, kind, [model | experts for model in models])
    with pytest.raises(DareError, match=rf"'experts\.weight' .*{dtype}"):
        run_merge(paths[0], paths[1:], tmp_path / "third", dtype=dtype)


@pytest.mark.parametrize("kind", ["blocks", "rows", "tensor"])
def test_what_no_model_changed_keeps_its_bytes(tmp_path: Path, kind: str) -> None:
    """Also where the base's scales, made by other rules, are not those that would be found."""
    base = make_models(kind)[0]
    base |= {name: (base[name].float() / 2).to(FP8) for name in WEIGHTS}
    other = {name: tensor.clone() for name, tensor in base.items()}
    raw(other["a.weight"])[200 * 130 + 5] ^= 2
    same, changed = write(tmp_path, kind, [base, other])
    out = tmp_path / "out"
    assert_same(merge_paths(same, [same], out, drop_rate=0.9), base)
    assert_same(merge_paths(same, [changed], out, lambda_coeff=0.0), base)
    wanted = expect([base, other], kind, drop_rate=0.0)
    assert_same(merge_paths(same, [changed], out, drop_rate=0.0), wanted)


def test_a_block_that_becomes_zero_keeps_its_scale_and_a_tiny_one_has_one(tmp_path: Path) -> None:
    base = make_models("blocks")[0]
    scale = "c.weight_scale_inv"
    zero = base | {"c.weight": torch.zeros(37, 61).to(FP8)}
    tiny = base | {scale: torch.full((1, 1), 2.0**-147)}
    paths = write(tmp_path, "blocks", [base, zero, tiny])
    found = [merge_paths(paths[0], [path], tmp_path / "out", drop_rate=0.0) for path in paths[1:]]
    assert same_bits(found[0][scale], base[scale])
    assert not found[0]["c.weight"].float().any()
    assert found[1][scale].item() == 2.0**-126
    assert found[1]["c.weight"].float().isfinite().all()


@pytest.mark.parametrize("kind", ["blocks", "tensor"])
def test_matrices_are_merged_as_a_whole_and_written_in_fp8(tmp_path: Path, kind: str) -> None:
    models = make_models(kind)
    paths = write(tmp_path, kind, models)
    config = {"method": "wudi", "drop_rate": 0.0, "engine": "plain"}
    run_merge(paths[0], paths[1:], tmp_path / "out", **config)
    merged = dequantise(tensors_in(tmp_path / "out"), kind)
    wanted = dequantise(expect(models, kind, **config), kind)
    base = dequantise(models[0], kind)
    for name, tensor in wanted.items():
        change = (tensor - base[name]).norm()
        assert (merged[name] - tensor).norm() <= 0.02 * change, name
    assert make_merger(paths[0], paths[1:], **config).verify(tmp_path / "out").tensors


@pytest.mark.parametrize("kind", ["blocks", slow("rows"), slow("tensor")])
def test_a_merge_in_parts_has_the_same_scales_and_verify_compares_them(
    tmp_path: Path, kind: str
) -> None:
    models = make_models(kind)
    paths = write(tmp_path, kind, models)
    tune(job_elements=8192, min_chunk=1024, max_chunk=1024)
    out = tmp_path / "out"
    settings: Any = {"method": "slerp", "drop_rate": 0.5}
    limits = {"max_shard_size": "60KB", "engine": "plain"}
    merger = make_merger(paths[0], paths[1:], **settings, **limits)
    merger.merge(out, part=(2, 3))
    merger.merge(out, resume=True)
    assert_same(tensors_in(out), expect(models, kind, **settings))
    assert merger.verify(out).tensors == len(SHAPES)
    scale = f"c.weight{KINDS[kind][0]}"
    shard = out / read_json(out / INDEX)["weight_map"][scale]
    with shard.open("r+b") as file:
        file.seek(TensorFile(shard, "").tensors[scale].offset)
        file.write(b"\x01")
    with pytest.raises(DareError, match=f"'{scale}' differs at"):
        merger.verify(out)


def test_an_adapter_is_merged_onto_an_fp8_base(tmp_path: Path) -> None:
    base = make_models("blocks")[0]
    [path] = write(tmp_path, "blocks", [base])
    adapter = write_adapter(tmp_path / "adapter", low_rank("a", (300, 200)))
    run_merge(path, [adapter], tmp_path / "out", drop_rate=0.0)
    plain = save_directory(tmp_path / "plain", dequantise(base, "blocks"))
    run_merge(plain, [adapter], tmp_path / "expected", drop_rate=0.0)
    assert_same(
        tensors_in(tmp_path / "out"), quantise(tensors_in(tmp_path / "expected"), "blocks", base)
    )


@pytest.mark.parametrize("name", ["a.input_scale", "a.input_scale_ub", "self_attn.k_scale"])
def test_activation_scales_are_copied_and_must_be_equal(
    tmp_path: Path, check_refused: Refusal, name: str
) -> None:
    models = make_models("tensor")
    for model in models:
        model |= {name: torch.tensor([0.25]), "self_attn.k_proj.weight": model["a.weight"].clone()}
        model["self_attn.k_proj.weight_scale"] = model["a.weight_scale"].clone()
    paths = write(tmp_path, "tensor", models)
    assert merge_paths(paths[0], paths[1:], tmp_path / "out", drop_rate=0.5)[name].item() == 0.25
    models[1][name] += 1
    write(tmp_path, "tensor", models)
    check_refused(
        paths[0], paths[1], f"'{name}' is part of a quantised module", "before quantising"
    )


SCALE = "a.weight_scale_inv"
WRONG: dict[str, tuple[dict[str, Any], Any, str]] = {
    "shape": ({SCALE: torch.ones(3, 3)}, None, f"{SCALE!r} is [3, 3], and 'a.weight'"),
    "dimensions": ({SCALE: torch.ones(6)}, None, f"{SCALE!r} is [6]"),
    "block size": ({}, [64, 64], "[5, 4] blocks of [64, 64]"),
    "no block size": ({}, "128", "weight_block_size in config.json is '128'"),
    "missing": ({SCALE: None}, None, "is not in the same way"),
    "another type": ({SCALE: torch.ones(3, 2).double()}, None, "is not in the same way"),
    "more parts": ({"a.weight_zero_point": torch.zeros(3, 2)}, None, "is not in the same way"),
    "NaN": ({SCALE: torch.full((3, 2), torch.nan)}, None, "'a.weight' holds nan at [0, 0]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_in_a_sentence(
    tmp_path: Path, check_refused: Refusal, case: str
) -> None:
    changes, size, complaint = WRONG[case]
    base, model = make_models("blocks", 2)
    odd = {name: tensor for name, tensor in (model | changes).items() if tensor is not None}
    paths = write(tmp_path, "blocks", [base, odd])
    (paths[1] / "config.json").write_text(
        json.dumps({"quantization_config": {"weight_block_size": size}})
    )
    check_refused(*paths, complaint)


def test_a_base_that_lacks_a_scale_is_refused(tmp_path: Path, check_refused: Refusal) -> None:
    base, model = make_models("blocks", 2)
    del base[SCALE]
    paths = write(tmp_path, "blocks", [base, dequantise(model, "blocks")])
    check_refused(*paths, "is quantised", "weight_scale or weight_scale_inv")


def test_scales_that_are_said_to_be_powers_of_two_stay_so(tmp_path: Path) -> None:
    """So that a fine-tune comes back bit for bit."""
    models = make_models("blocks", 2)
    for model in models:
        values = dequantise(model, "blocks")
        for name in WEIGHTS:  # the next power of two, and the values by that
            scale = model[f"{name}_scale_inv"].log2().ceil().exp2()
            stored = (values[name] / spread(scale, values[name].shape, (128, 128))).to(FP8)
            model |= {f"{name}_scale_inv": scale, name: stored}
    base, model = save_directories(
        tmp_path, models, quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0"}
    )
    made = merge_paths(base, [model], tmp_path / "out", drop_rate=0.0)
    scales = [tensor.flatten() for name, tensor in made.items() if name.endswith("_scale_inv")]
    assert (torch.cat(scales).frexp().mantissa == 0.5).all()
    values = dequantise(made, "blocks")
    wanted = dequantise(models[1], "blocks")
    assert all(torch.equal(values[name], wanted[name]) for name in WEIGHTS)


def test_what_cannot_be_done_in_fp8_is_refused(tmp_path: Path, refused: Refusal) -> None:
    """Packing, and more rows."""
    tokens = [{"<s>": 8, "</s>": 9}, {"<s>": 8, "</s>": 9, "<a>": 10, "<b>": 11}]
    for k, added in enumerate(tokens):
        model = write_model(tmp_path / f"m{k}", 12, added, k)
        model |= {"lm_head.weight": model["lm_head.weight"].to(FP8)}
        save_directory(tmp_path / f"m{k}", model | {"lm_head.weight_scale": torch.ones(1)})
    flags = ("-b", tmp_path / "m0", "-m", tmp_path / "m1", "-o", tmp_path / "out")
    refused(1, "is in FP8", "pack", *flags)
    refused(1, "is in FP8", *flags, "--tokenizer", "union")


def test_every_float_is_rounded_as_torch_rounds_it() -> None:
    """Every 16 bits at the top, with what decides ties below them."""
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (tops[:, None] | ties).view(np.float32)
    values = values[np.abs(values) < 464]  # what is beyond rounds to no number
    assert np.array_equal(float8.encode(values), raw(torch.from_numpy(values).to(FP8)))
    every = np.arange(255, dtype=np.uint8)
    decoded = np.empty(255, np.float32)
    float8.decode(every, decoded)
    assert np.array_equal(decoded, torch.from_numpy(every).view(FP8).float(), equal_nan=True)


# --- in memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["blocks", "rows", "tensor"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_state_dicts_in_fp8_are_merged_as_what_they_stand_for(kind: str, dtype: str | None) -> None:
    base, *models = make_models(kind)
    plain_base, *plain = [dequantise(model, kind) for model in (base, *models)]
    config = DareConfig(drop_rate=0.5, dtype=dtype)
    expected = dare_merge(plain_base, plain, config)
    scales = {"a.input_scale": torch.ones(1), "scaled_fp8": torch.zeros(2, dtype=FP8)}
    for mine, theirs in (
        (base, models),
        (plain_base, models),
        (plain_base, [models[0], plain[1]]),
        (base | scales, plain),
    ):
        for _ in range(2):  # the second time, the plan is known, and the first tensors are gone
            mine, *theirs = [
                {name: tensor.clone() for name, tensor in state.items()}
                for state in (mine, *theirs)
            ]
            assert_same(dare_merge(mine, theirs, config), expected)
    out = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    assert_same(dare_merge(base, models, config, out=out), expected)
    assert_same(out, expected)
    with pytest.raises(DareError, match="of out is"):
        dare_merge(base, models, config, out=base)


def test_whether_a_base_is_the_models_own_is_seen_from_what_fp8_stands_for() -> None:
    shapes = dict.fromkeys(WEIGHTS, (600, 600))
    base, model, other = (random_model(seed, BF16, shapes) for seed in (1, 1, 2))
    stored = quantise(model, "tensor")
    assert_same(dare_merge(base, [stored]), dare_merge(base, [dequantise(stored, "tensor")]))
    with pytest.raises(DareError, match="is not the base of"):
        dare_merge(base, [quantise(other, "tensor")])
