"""FP8 files without scales, as ComfyUI has them: read as they are, and written in another type.

What they should give is made by torch: its values, merged in memory.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dare import ConfigError, DareConfig, DareError, dare_merge
from tests import support
from tests.support import (
    BF16,
    F32,
    Refusal,
    Tensors,
    assert_same,
    finetune,
    make_merger,
    random_model,
    raw,
    run,
    save,
    slow,
)

merge_paths = partial(support.merge_paths, engine="plain")
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
NORM = "norms.0.scale"
SHAPES: dict[str, tuple[int, ...]] = {
    "img_in.weight": (37, 61),
    "img_in.bias": (37,),
    "blocks.0.weight": (5, 3, 2, 2),
    NORM: (3,),
    # What layers of models without scales are called, and not the scales of others.
    "blocks.1.norm.query_norm.scale": (4,),
    "text_encoders.clip_g.logit_scale": (),
    "blocks.1.scale_shift_table": (6, 4),
    "first_stage_model.quant_conv.weight": (4, 4, 1, 1),
}


def make_models(*dtypes: torch.dtype) -> list[Tensors]:
    """A base and fine-tunes, each with its tensors but one in a type of its own."""
    base = random_model(dtype=F32, shapes=SHAPES)
    models = [base, *(finetune(base, k, 0.02) for k in range(1, len(dtypes)))]
    return [
        {name: tensor.to(BF16 if name == NORM else dtype) for name, tensor in model.items()}
        for model, dtype in zip(models, dtypes, strict=True)
    ]


def widen(model: Tensors) -> Tensors:
    """What FP8 stands for, in a type that has all of its values."""
    return {name: tensor.to(BF16) for name, tensor in model.items()}


@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    [
        ((E4M3, E4M3, E4M3), "bfloat16"),
        ((E5M2, E5M2, E5M2), "float32"),
        ((E4M3, BF16, E5M2), "bfloat16"),
        slow((E4M3, BF16, E5M2), "float16"),
        ((F32, E4M3, E5M2), "float32"),
        ((BF16, E4M3, E5M2), None),  # of the base
    ],
)
@pytest.mark.parametrize("config", [{"drop_rate": 0.5}, {"method": "ties", "drop_rate": 0.3}])
def test_fp8_without_scales_is_merged_in_the_type_that_is_asked_for(
    tmp_path: Path, dtypes: tuple[torch.dtype, ...], dtype: str | None, config: dict[str, Any]
) -> None:
    models = make_models(*dtypes)
    paths = save(tmp_path, **dict(zip(support.NAMES, models, strict=True)))
    out = tmp_path / "out.safetensors"
    merged = merge_paths(paths[0], paths[1:], out, dtype=dtype, **config)
    read = [widen(m) if d in (E4M3, E5M2) else m for m, d in zip(models, dtypes, strict=True)]
    assert_same(merged, dare_merge(read[0], read[1:], DareConfig(dtype=dtype, **config)))
    make_merger(paths[0], paths[1:], engine="plain", dtype=dtype, **config).verify(out)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_of_fp8_is_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    finite = torch.isfinite(codes.view(dtype).float())
    values = torch.where(finite, codes, 0).view(dtype)
    [path] = save(tmp_path, base={"a.weight": values})
    flags = ["-q", "--engine", "plain", "--method", "passthrough", "-b", path]
    out = tmp_path / "out.safetensors"
    run(*flags, "-o", out, "--dtype", "float32", "--force")
    assert_same(load_file(out), {"a.weight": values.float()})
    run(*flags, "-o", out, "--force")  # what is only copied keeps its bytes
    assert_same(load_file(out), {"a.weight": values})
    [path] = save(tmp_path, base={"a.weight": codes.view(dtype)})
    with pytest.raises(DareError, match=r"'a\.weight' holds (inf|-inf|nan)"):
        merge_paths(path, [path], out, dtype="bfloat16")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_without_a_type_to_write_a_hint_names_it(
    tmp_path: Path, check_refused: Refusal, dtype: torch.dtype
) -> None:
    models = make_models(dtype, dtype, BF16)
    paths = save(tmp_path, **dict(zip(support.NAMES, models, strict=True)))
    for model in paths[1:]:
        check_refused(paths[0], model, "quantised", "--dtype bfloat16", flags=["--engine=plain"])
    with pytest.raises(ConfigError) as error:
        DareConfig(dtype="float8_e4m3fn")
    assert "--keep-fp8" in error.value.hint
    # What is the same in all is copied, as any quantised weight is.
    same = models[0] | {NORM: models[1][NORM]}
    [other] = save(tmp_path, other=same)
    merged = merge_paths(paths[0], [other], tmp_path / "out.safetensors", drop_rate=0)
    assert_same(merged, same)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_it_is_written_in_fp8_again_if_that_is_asked_for(
    tmp_path: Path, refused: Refusal, kind: torch.dtype
) -> None:
    models = make_models(kind, E4M3, BF16)
    plain = {name: tensor.to(F32) for name, tensor in models[0].items()}
    paths = save(tmp_path, **dict(zip(support.NAMES, models, strict=True)))
    out = tmp_path / "out.safetensors"
    words = ("-b", paths[0], "-m", *paths[1:], "-o", out, "--engine=plain", "--drop-rate=0.5")
    run("-q", *words, "--keep-fp8")
    merged = dare_merge(plain, [widen(model) for model in models[1:]], DareConfig(drop_rate=0.5))
    stored = load_file(out)
    assert {stored[name].dtype for name in SHAPES if name != NORM} == {E4M3}
    assert_same(stored, {n: t.to(stored[n].dtype) for n, t in merged.items()})
    run("verify", "-q", out, "--engine=plain")
    refused(2, "keep_fp8", *words, "--keep-fp8", "--dtype=bfloat16", "--force")


@pytest.mark.parametrize("dtypes", [(E4M3, BF16), (BF16, E4M3)])
def test_what_cannot_be_packed_can_be_converted_first(
    tmp_path: Path, refused: Refusal, dtypes: tuple[torch.dtype, ...]
) -> None:
    models = make_models(*dtypes)
    paths = save(tmp_path, base=models[0], math=models[1])
    out = tmp_path / "packed.safetensors"
    words = ("quantised", "with --dtype bfloat16 or --keep-fp8 reads it", "--method passthrough")
    refused(1, words, "pack", "-b", paths[0], "-m", paths[1], "-o", out)
    plain = [tmp_path / f"plain{k}.safetensors" for k in range(2)]
    flags = ["-q", "--engine=plain", "--method=passthrough", "--dtype=bfloat16"]
    for path, made, model in zip(paths, plain, models, strict=True):
        run(*flags, "-b", path, "-o", made)
        assert_same(load_file(made), widen(model))
    run("pack", "-q", "--engine=plain", "-b", plain[0], "-m", plain[1], "-o", out)


@pytest.mark.parametrize(
    "name",
    [
        "img_in.input_scale",
        "scaled_fp8",
        "blocks.0.scale_weight",
        "img_in.qscale_weight",  # of Mistral
        "img_in.scale",  # of DeepSeek
        "img_in.weight_quantizer._amax",
        "img_in.weight._scale",
        "img_in.weight_s",
        "scale",
    ],
)
def test_a_file_in_which_anything_has_a_scale_is_not_taken_for_one_without(
    tmp_path: Path, check_refused: Refusal, name: str
) -> None:
    models = make_models(E4M3, E4M3)
    scaled = [model | {name: torch.ones(1)} for model in models]
    paths = save(tmp_path, base=scaled[0], math=scaled[1])
    words = ("quantised", "looks like a scale")
    check_refused(*paths, *words, flags=["--dtype=bfloat16", "--engine=plain"])
    [base] = save(tmp_path, base=widen(models[0]))
    check_refused(base, paths[1], "quantised", flags=["--engine=plain"])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_comfyuis_scales_are_read(tmp_path: Path, dtype: str | None) -> None:
    models = [{n: t for n, t in m.items() if t.ndim < 3} for m in make_models(F32, F32)]
    marks = {"scaled_fp8": torch.zeros(2).to(E4M3), "img_in.scale_input": torch.ones(())}
    read, stored = [], []
    for model in models:
        scale = model["img_in.weight"].abs().max() / 448
        weight = (model["img_in.weight"] / scale).to(E4M3)
        read.append(model | {"img_in.weight": weight.float() * scale})
        stored.append(model | marks | {"img_in.weight": weight, "img_in.scale_weight": scale})
    paths = save(tmp_path, base=stored[0], math=stored[1])
    out = tmp_path / "out.safetensors"
    merged = merge_paths(paths[0], paths[1:], out, drop_rate=0.5, dtype=dtype)
    make_merger(paths[0], paths[1:], engine="plain", drop_rate=0.5, dtype=dtype).verify(out)
    expected = dare_merge(read[0], read[1:], DareConfig(drop_rate=0.5, dtype=dtype))
    if dtype:
        assert_same(merged, expected)  # nothing speaks of FP8 any more
        return
    assert merged.keys() == stored[0].keys()
    assert all(np.array_equal(raw(merged[name]), raw(mark)) for name, mark in marks.items())
    value = merged["img_in.weight"].float() * merged["img_in.scale_weight"]
    assert torch.allclose(value, expected["img_in.weight"], rtol=0.07, atol=1e-4)
