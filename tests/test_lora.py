"""LoRA adapters merge as PEFT merges them, to the bit as the formulas say, and what is not plain
LoRA is refused."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dare
from darelib.models.checkpoint import EMBEDDINGS
from darelib.models.peft import OTHER_ADAPTERS
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    METHODS,
    Capture,
    Pair,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    define,
    family_model,
    finetune,
    low_rank,
    make_merger,
    merge_paths,
    random_model,
    run,
    run_merge,
    same_bits,
    save,
    save_directory,
    slow,
    tensors_in,
    tune,
    write_adapter,
)

OUT = "out.safetensors"
PREFIX = "base_model.model.layer"
LAYER = low_rank("layer", (37, 61))
A, B = LAYER
A_FILE = "adapter_model.safetensors"
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {
        "q_proj": 2,
        r"layers\.1\.mlp\.up_proj": 9,
        r"^model.layers.0.mlp.down_proj": 3,
    },
    "alpha_pattern": {"q_proj": 3, "0.self_attn.k_proj": 11},
}
DORA = {"use_dora": True}
# The family of the model, the modules that are adapted, and PEFT's settings.
ADAPTERS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "plain": ("llama", LLAMA_TARGETS, {}),
    "rank of one": ("llama", LLAMA_TARGETS, {"r": 1}),
    "rslora": ("llama", LLAMA_TARGETS, {"use_rslora": True, "r": 7}),
    "patterns": ("llama", LLAMA_TARGETS, PATTERNS),
    "modules_to_save": ("llama", ["q_proj"], {"modules_to_save": ["lm_head", "norm"]}),
    "embedding": ("llama", ["embed_tokens", "q_proj"], {}),
    "tied embedding": ("qwen", ["embed_tokens", "q_proj"], {}),
    "biases": ("qwen", ["q_proj", "v_proj"], {"bias": "all"}),
    "conv1d": ("gpt2", ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    "conv1d and embedding": ("gpt2", ["c_attn", "c_proj", "wte"], {"fan_in_fan_out": True}),
    # PEFT saves fan_in_fan_out as is true of the last module that it looked at: here, of the head.
    "square conv1d": ("gpt2 untied", ["c_attn", "c_proj", "lm_head"], {}),
    "bert": ("bert", ["query", "value", "dense"], {}),
    "layers": ("llama", LLAMA_TARGETS, {"layers_to_transform": [1]}),
    "dora": ("llama", LLAMA_TARGETS, DORA),
    "dora rslora patterns": ("llama", LLAMA_TARGETS, DORA | {"use_rslora": True} | PATTERNS),
    "dora embedding": ("llama", ["embed_tokens", "q_proj", "lm_head"], DORA),
    "dora conv1d": ("gpt2", ["c_attn", "c_proj", "c_fc"], DORA | {"fan_in_fan_out": True}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.slow  # importing PEFT takes longer than most of the suite
def test_an_adapter_merges_as_peft_merges_it(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """As a model, and on top of one, where it is PEFT's to the last bit, but for the order of the
    ranks in a sum, and for embeddings, whose change PEFT rounds too."""
    import peft

    family, targets, settings = ADAPTERS[kind]
    model = family_model(family, dtype)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model.save_pretrained(base)
    known = {"r": 4, "lora_alpha": 6, "target_modules": targets, **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**known))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += (torch.randn(parameter.shape, generator=generator) * 0.05).to(dtype)
    adapted.save_pretrained(adapter)
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    before, expected = tensors_in(base), tensors_in(tmp_path / "expected")
    report = run_merge(base, [adapter], tmp_path / "merged", drop_rate=0.0)
    assert report.models[0].missing_tensors == report.models[0].extra_tensors == ()
    joined = Path(f"{base}+{adapter}")
    on_top = merge_paths(joined, [base], tmp_path / "joined", lambda_coeff=0.0)
    other = 0
    for merged in (tensors_in(tmp_path / "merged"), on_top):
        assert merged.keys() == expected.keys() == before.keys()
        for name, tensor in merged.items():
            # One rounding of the output type; PEFT rounds the change too, to the type of the
            # weights. In float32 its sums are in another order, which shows where base and change
            # nearly cancel: the bound there is 1e-7.
            near, far = tensor.double(), expected[name].double()
            step = torch.maximum(near.abs(), far.abs()) * torch.finfo(dtype).eps
            change = (far - before[name].double()).abs() * torch.finfo(dtype).eps
            assert bool(((near - far).abs() <= step + change + 1e-7 * (dtype == F32)).all()), name
            is_rounded_once = merged is on_top and not name.endswith(EMBEDDINGS)
            other += int((near != far).sum()) if is_rounded_once else 0
        assert sum(not same_bits(tensor, before[name]) for name, tensor in merged.items()) >= 2
    count = sum(tensor.numel() for tensor in before.values())
    assert dtype == F32 or other / count < 0.002


def multiply(tensors: Tensors, scale: float, real: Any = np.float32) -> torch.Tensor:
    """An adapter's change, with the products added in the order of the rank."""
    right, left = (tensor.double().numpy().astype(real) for tensor in tensors.values())
    total = sum(left[:, k : k + 1] * right[k] for k in range(len(right)))
    return torch.from_numpy(total * real(scale))


@pytest.mark.parametrize(
    ("dtype", "stored", "engine"),
    [
        (BF16, F32, "plain"),
        slow(BF16, F32, "numba"),
        (BF16, F16, "plain"),
        (F64, BF16, "plain"),
        slow(F64, BF16, "numba"),
    ],
    ids=str,
)
def test_changes_are_dropped_and_rescaled_bit_for_bit_like_the_formulas_in_any_chunks(
    tmp_path: Path, dtype: torch.dtype, stored: torch.dtype, engine: str
) -> None:
    """Also of several adapters alike in all but their values, and of matrices that are stored
    transposed."""
    base = random_model(
        0, dtype, {"layer.weight": (50, 333), "embed.weight": (70, 130), "rest": (9,)}
    )
    real = np.float64 if dtype == F64 else np.float32
    paths = save(tmp_path, base=base)
    changes = []
    for k in range(2):
        parts = [low_rank("layer", (50, 333), 7, k), low_rank("embed", (130, 70), 7, k)]
        parts = [
            {n.replace("d.lora", "d.lora_embedding"): t.to(stored) for n, t in part.items()}
            for part in parts
        ]
        paths.append(write_adapter(tmp_path / f"{k}", parts[0] | parts[1], r=7, lora_alpha=5))
        layer, embed = (multiply(part, 5 / 7, real) for part in parts)
        changes.append({"layer.weight": layer, "embed.weight": embed.T.contiguous()})
    kept = define(
        {name: torch.zeros_like(change) for name, change in changes[0].items()},
        changes,
        drop_rate=0.7,
    )
    expected = {"rest": base["rest"]}
    for name, change in kept.items():
        wide = base[name].to(change.dtype)
        expected[name] = torch.where(change == 0, wide, wide + change).to(dtype)
    for chunk, room, threads in (
        (1 << 18, 1 << 22, 1),
        (1024, 1 << 22, 3),
        (2048, 1000, 1),
        (1 << 14, 50, 2),
    ):
        tune(min_chunk=chunk, max_chunk=chunk, expand_elements=room)
        run_merge(
            paths[0], paths[1:], tmp_path / OUT, drop_rate=0.7, engine=engine, threads=threads
        )
        assert_same(load_file(tmp_path / OUT), expected)


@pytest.mark.parametrize("ending", ["", ".weight", ".default.weight"])
@pytest.mark.parametrize("kind", ["matrix", "embedding", "convolution", "saved"])
def test_dora_gives_each_output_its_magnitude_in_any_chunks(
    tmp_path: Path, kind: str, ending: str
) -> None:
    base = torch.randn(50, 332).to(BF16)
    tensors = low_rank("layer", (50, 332), 3)
    change = multiply(tensors, 4 / 3)
    if kind == "embedding":  # whose outputs are its columns
        base = base.T.contiguous()
        change = change.T
        tensors = {n.replace("lora_", "lora_embedding_"): t for n, t in tensors.items()}
    elif kind == "convolution":
        base = base.reshape(50, 83, 2, 2)
        a, b = tensors.values()
        tensors = {A: a.reshape(3, 83, 2, 2), B: b.reshape(50, 3, 1, 1)}
    whole = base.float().reshape(change.shape)
    if kind == "saved":
        whole = torch.randn(50, 332)
        tensors[f"{PREFIX}.base_layer.weight"] = whole
    magnitudes = torch.rand(50) + 1
    tensors[f"{PREFIX}.lora_magnitude_vector{ending}"] = magnitudes
    axis = 0 if kind == "embedding" else 1
    changed = (whole + change).double()
    expected = changed / changed.norm(dim=axis, keepdim=True) * magnitudes.unsqueeze(axis)
    [path] = save(tmp_path, base={"layer.weight": base})
    adapter = write_adapter(tmp_path / "adapter", tensors, r=3, use_dora=True)
    made = []
    for chunk, room, threads in ((1 << 18, 1 << 22, 1), (1024, 1000, 3), (1 << 14, 50, 2)):
        tune(min_chunk=chunk, max_chunk=chunk, job_elements=chunk, expand_elements=room)
        config = {"drop_rate": 0.0, "dtype": "float32", "engine": "plain", "threads": threads}
        made.append(merge_paths(path, [adapter], tmp_path / OUT, **config)["layer.weight"])
    assert all(same_bits(made[0], other) for other in made)
    torch.testing.assert_close(made[0].double(), expected.reshape(base.shape), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", ["plain", slow("numba")])
@pytest.mark.parametrize(
    ("dtype", "other", "config"),
    [
        *((BF16, BF16, config) for config in METHODS),
        *[(BF16, F32, {}), (BF16, F64, {}), (F32, F32, {}), (F64, F64, {})],
    ],
    ids=str,
)
def test_adapters_and_full_finetunes_merge_together(
    tmp_path: Path, dtype: torch.dtype, other: torch.dtype, config: dict[str, Any], engine: str
) -> None:
    """As if the adapter's sums, in float32 or float64, were stored as a full fine-tune."""
    base = random_model(dtype=dtype)
    full = finetune({name: tensor.to(other) for name, tensor in base.items()}, 3)
    wide = {
        "layer.weight": base["layer.weight"].to(F64 if dtype == F64 else F32) + multiply(LAYER, 2)
    }
    paths = [*save(tmp_path, base=base, full=full), write_adapter(tmp_path / "adapter", LAYER)]
    merged = merge_paths(paths[0], [paths[2], paths[1]], tmp_path / OUT, engine=engine, **config)
    expected = define(base, [wide, full], **config)
    step = 1e-5 if dtype == F64 else 2 * torch.finfo(dtype).eps
    assert torch.allclose(
        merged.pop("layer.weight"), expected.pop("layer.weight"), rtol=step, atol=1e-6
    )
    assert_same(merged, expected)  # what the adapter does not change


@pytest.mark.parametrize("name", ["", "adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_for_a_convolution_merges_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    kernel, a, b = torch.randn(6, 3, 2, 2), torch.randn(2, 3, 2, 2), torch.randn(6, 2, 1, 1)
    [base] = save(tmp_path, base={"layer.weight": kernel})
    adapter = write_adapter(
        tmp_path / "adapter", {f"{PREFIX}.lora_A.weight": a, f"{PREFIX}.lora_B.weight": b}
    )
    run_merge(base, [adapter / name], tmp_path / OUT, drop_rate=0.0)
    expected = kernel + 2 * torch.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
    assert torch.allclose(load_file(tmp_path / OUT)["layer.weight"], expected, atol=1e-6)


@pytest.mark.parametrize("chunk", [1024, 1 << 18])
@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("rows", [5, 30, 45])
def test_an_adapter_of_fewer_or_more_rows_overlaps_like_a_model(
    tmp_path: Path, embedding: bool, rows: int, chunk: int
) -> None:
    weight = random_model()["layer.weight"]
    tensors = low_rank("layer", (rows, 61))
    a, b = tensors.values()
    if embedding:
        turned = {"A": b.T.contiguous(), "B": a.T.contiguous()}
        tensors = {f"{PREFIX}.lora_embedding_{name}": tensor for name, tensor in turned.items()}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    tune(min_chunk=chunk, max_chunk=chunk)
    [base] = save(tmp_path, base={"layer.weight": weight})
    merged = merge_paths(base, [adapter], tmp_path / OUT, drop_rate=0.0, mismatch="overlap")[
        "layer.weight"
    ]
    common = min(rows, 37)
    assert torch.allclose(
        merged[:common], weight[:common] + 2 * (b @ a)[:common], rtol=1e-6, atol=1e-7
    )
    assert same_bits(merged[common:], weight[common:])


def test_an_adapters_names_are_not_guessed_where_several_fit(
    tmp_path: Path, check_refused: Refusal
) -> None:
    [base] = save(
        tmp_path, base={f"{part}.layer.weight": torch.randn(37, 61) for part in ("text", "vision")}
    )
    complaint = "may mean several tensors: 'text.layer.weight', 'vision.layer.weight'"
    check_refused(base, write_adapter(tmp_path / "adapter", LAYER), complaint)


def test_modules_that_an_adapter_saved_are_not_mistaken_for_others(tmp_path: Path) -> None:
    base = {"layer.weight": torch.randn(37, 61), "dense.weight": torch.randn(3, 3)}
    extra = {"classifier.dense.weight": torch.ones(3, 3), "bn.num_batches_tracked": torch.tensor(7)}
    tensors = low_rank("model.layer", (37, 61)) | {
        f"base_model.model.{name}": t for name, t in extra.items()
    }
    report = run_merge(
        *save(tmp_path, base=base), [write_adapter(tmp_path / "adapter", tensors)], tmp_path / OUT
    )
    assert same_bits(load_file(tmp_path / OUT)["dense.weight"], base["dense.weight"])
    assert set(report.models[0].extra_tensors) == set(extra)


@pytest.mark.parametrize("stated", [False, True])
def test_a_square_layer_is_turned_as_its_neighbours_that_are_not_square(
    tmp_path: Path, stated: bool
) -> None:
    layers = {
        "a.b.square": (4, 4, 4),
        "a.b.c.long": (4, 8, 8),
        "a.b-c.long": (4, 8, 4),
        "a.d.square": (4, 4, 4),
        "a.d.long": (8, 4, 8),
        "a.bc.long": (8, 4, 8),
        "a.e.square": (4, 4, 4),
        "a.e.1": (4, 8, 8),
        "a.e.2": (8, 4, 8),
        "a.f.square": (4, 4, 4),
        "square": (4, 4, 4),
    }
    base = {f"{name}.weight": torch.zeros(high, wide) for name, (high, wide, _) in layers.items()}
    base |= {f"{name}.bias": torch.zeros(bias) for name, (_, _, bias) in layers.items()}
    [path] = save(tmp_path, base=base)
    names = [name for name in layers if name.endswith("square")]
    tensors = {key: t for name in names for key, t in low_rank(name, (4, 4)).items()}
    straight = multiply(low_rank("any", (4, 4)), 2)
    adapter = write_adapter(tmp_path / "a", tensors, fan_in_fan_out=stated)
    merged = merge_paths(path, [adapter], tmp_path / OUT, drop_rate=0.0)
    for name in names:
        turned = {"a.b.square": True, "a.d.square": False}.get(name, stated)
        assert torch.equal(merged[f"{name}.weight"], straight.T if turned else straight), name


def test_an_adapter_that_was_trained_on_another_base_is_warned_about(
    pair: Pair, tmp_path: Path, monkeypatch: Patch
) -> None:
    base, other = pair
    save_directory(base, random_model(), _name_or_path="org/Called-2", hidden_size=64)
    save_directory(other, random_model(), hidden_size=32)
    copy = save_directory(tmp_path / "copies" / "base", random_model(), hidden_size=32)
    link = tmp_path / "link"
    link.symlink_to(base)
    monkeypatch.chdir(tmp_path)
    cached = "/elsewhere/hub/models--org--BASE/snapshots/0123"
    same = (str(base), "base", "org/base", "Base/", cached, r"C:\models\base", "who/called-2")
    cases: list[tuple[Any, Path, str]] = [
        *((stated, base, "") for stated in (..., None, 3, "", "x" * 5000, *same)),
        ("org/base", base / "model.safetensors", ""),
        ("org/base", link, ""),
        *(
            (name, base, repr(name))
            for name in ("org/other", "//machine/share", "a\0b", "org/base/x")
        ),
        *((str(folder), base, "hidden_size is 64") for folder in (other, copy)),
    ]
    for stated, given, words in cases:
        adapter = write_adapter(tmp_path / "adapter", LAYER, base_model_name_or_path=stated)
        merger = make_merger(given, [adapter], drop_rate=0.0)
        warnings = merger.plan(tmp_path / OUT).warnings
        assert len(warnings) == bool(words), stated
        assert words in "".join(warnings)


@pytest.mark.parametrize("way", ["flags", "dry run", "TOML", "class"])
def test_without_a_base_the_one_that_all_adapters_name_is_taken(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, capsys: Capture, way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stated = (str(pair[0]), "base")[way == "flags"]  # from where we are
    names = ("first", "second")
    adapters = [
        write_adapter(tmp_path / name, LAYER, base_model_name_or_path=stated) for name in names
    ]
    run_merge(pair[0], adapters, tmp_path / "expected", engine="plain")
    if way == "class":
        dare.DareMerger(None, adapters, dare.DareConfig(engine="plain")).merge(tmp_path / "out")
    elif way == "TOML":
        text = f'dare.engine = "plain"\n[models]\nmerge_files = {[*names]}\noutput_file = "out"\n'
        Path("c.toml").write_text(text)
        run("-c", "c.toml")
    else:
        dry = ["--dry-run"] * (way == "dry run")
        run("-m", adapters[0], adapters[1] / A_FILE, "-o", "out", "--engine", "plain", *dry)
    written = capsys.readouterr().err
    assert written.count(f"base: {stated} (named by the adapters)") == (way != "class")
    if way != "dry run":
        assert_same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "expected"))


@pytest.mark.parametrize(
    ("stated", "complaints"),
    [
        (["base", "other"], ["'first' was trained on 'base', and 'second' on 'other'"]),
        (["base", ...], ["no base model", "'second' is no adapter that names one"]),
        (["base", 3], ["no base model", "'second' is no adapter that names one"]),
        (["gone", "gone"], ["'gone', which is neither a directory here"]),
        (["org/gone", "org/gone"], ["'org/gone', which is neither a directory here", "cache"]),
        (["//base", "//base"], ["'//base', which is neither a directory here"]),
        (["base", None], ["no base model", "'math' is no adapter that names one"]),
    ],
    ids=str,
)
def test_without_a_base_adapters_that_name_none_that_is_here_are_refused(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, capsys: Capture, stated: Any, complaints: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in zip(("first", "second"), stated, strict=True):
        write_adapter(tmp_path / name, LAYER, base_model_name_or_path=value)
    run("-m", "first", "second" if stated[1] else "math", "-o", "out", status=2)
    error = capsys.readouterr().err
    assert all(words in error for words in (*complaints, "--base MODEL"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("models", "config", "flags"),
    [
        ("a", {}, "--bake"),
        ("aa", {}, "--bake"),
        ("am", {}, "--drop-rate 0 0.9 --weights 1 0.5"),
        ("aa", {"drop_rate": 0.5}, "--weights 1 1"),
        ("aa", {"method": "ties", "engine": "plain"}, "--drop-rate 0"),
        ("aa", {"weights": [0.7, 0.4]}, "--bake"),
        ("aa", {"drop_rate": 0.0, "normalize": True}, ""),
        ("a", {"drop_rate": 0.8}, ""),
        ("mm", {}, ""),
    ],
    ids=str,
)
def test_what_defaults_do_to_adapters_is_said_with_the_flags_that_bake_them(
    pair: Pair, tmp_path: Path, models: str, config: dict[str, Any], flags: str
) -> None:
    adapters = [write_adapter(tmp_path / f"a{k}", LAYER) for k in range(2)]
    given = [adapters[k] if kind == "a" else pair[1] for k, kind in enumerate(models)]
    warnings = run_merge(pair[0], given, tmp_path / OUT, **config).warnings
    said = [warning for warning in warnings if "strength 1" in warning]
    assert [warning.partition("add ")[2] for warning in said] == [flags] * bool(flags)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "kind", "is_other"),
    [
        ("transformers.models.qwen2.modeling_qwen2", "llama", True),
        ("transformers.models.llama.modeling_llama", "llama", False),
        ("transformers.models.xlm_roberta.modeling_xlm_roberta", "xlm-roberta", False),
        ("transformers.models.gemma3.modeling_gemma3", "gemma3_text", False),
        ("transformers.models.llama.modeling_llama", ..., False),
        ("transformers_modules.custom.modeling_custom", "llama", False),
        (["transformers.models.llama.modeling_llama"], "llama", False),
    ],
    ids=str,
)
def test_an_adapter_for_another_kind_of_model_is_refused_by_the_class_that_peft_noted(
    tmp_path: Path, check_refused: Refusal, library: Any, kind: Any, is_other: bool
) -> None:
    config = {} if kind is ... else {"model_type": kind}
    base = save_directory(tmp_path / "base", random_model(), **config)
    noted = {"base_model_class": "Any", "parent_library": library}
    adapter = write_adapter(tmp_path / "adapter", LAYER, auto_mapping=noted)
    if is_other:
        check_refused(base, adapter, "model_type is 'qwen2', not 'llama'", "--any-base")
    run_merge(base, [adapter], tmp_path / OUT, any_base=is_other)


def test_an_adapter_for_another_kind_of_model_is_refused_by_its_own_base(
    tmp_path: Path, check_refused: Refusal
) -> None:
    base = save_directory(tmp_path / "base", random_model(), model_type="llama")
    own = save_directory(tmp_path / "own", random_model(), model_type="qwen2")
    adapter = write_adapter(tmp_path / "adapter", LAYER, base_model_name_or_path=str(own))
    check_refused(base, adapter, "model_type is 'qwen2', not 'llama'", "--any-base")
    run_merge(own, [adapter], tmp_path / OUT)


def test_an_adapter_that_unties_the_head_is_warned_about_or_refused(
    tmp_path: Path, check_refused: Refusal
) -> None:
    shapes = {"model.embed_tokens.weight": (40, 16), "model.q_proj.weight": (16, 16)}
    base = save_directory(tmp_path / "base", random_model(shapes=shapes), tie_word_embeddings=True)
    tensors = low_rank("model.q_proj", (16, 16))
    saved = {"base_model.model.model.embed_tokens.modules_to_save.weight": torch.ones(40, 16)}
    report = run_merge(base, [write_adapter(tmp_path / "saved", tensors | saved)], tmp_path / OUT)
    assert any("output head too" in warning for warning in report.warnings)
    head = write_adapter(tmp_path / "head", tensors | low_rank("lm_head", (40, 16)))
    check_refused(base, head, "'lm_head.weight'", "unties")


def test_a_directory_of_a_model_and_an_adapter_is_ambiguous(
    pair: Pair, tmp_path: Path, check_refused: Refusal
) -> None:
    both = write_adapter(pair[1], LAYER)
    check_refused(pair[0], both, "math' holds a model and an adapter", "model.safetensors")
    whole = sum(tensor.numel() for tensor in random_model().values())
    for name, count in (("model.safetensors", whole), ("adapter_model.safetensors", 37 * 61)):
        report = run_merge(pair[0], [both / name], tmp_path / OUT)
        assert report.models[0].parameters == count


def test_settings_that_are_null_are_those_that_are_left_out(pair: Pair, tmp_path: Path) -> None:
    others = ("use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "init_lora_weights")
    nulls = dict.fromkeys((*OTHER_ADAPTERS, *others))
    run_merge(pair[0], [write_adapter(tmp_path / "adapter", LAYER, **nulls)], tmp_path / OUT)


@pytest.mark.parametrize(
    ("config", "complaints"),
    [
        *(
            ({key: {"some": [1, 2]}}, [f"uses {words} ({key})", "merge_and_unload"])
            for key, words in OTHER_ADAPTERS.items()
        ),
        *(
            ({"peft_type": kind}, [f"is of type {kind!r}", "merge_and_unload"])
            for kind in ("IA3", "LOHA", "LOKR", "OFT", "VERA")
        ),
        *(
            ({"peft_type": kind}, [f"is of type {kind!r}", "only LoRA"])
            for kind in ("PROMPT_TUNING", "lora", ["LORA"], None)
        ),
        ({"peft_type": ...}, ["is of type None", "only LoRA"]),
        *(
            ({"init_lora_weights": start}, [f"was started by {start!r}", "changed the base"])
            for start in ("pissa", "pissa_niter_4", "olora", "loftq", "corda", {})
        ),
        *(
            ({key: value}, [f"has {key} = {value!r}"])
            for key, value in [
                ("r", "8"),
                ("r", 0),
                ("r", 2.0),
                ("r", True),
                ("lora_alpha", "16"),
                ("lora_alpha", math.nan),
                ("lora_alpha", math.inf),
                ("use_rslora", 1),
                ("use_rslora", "true"),
                ("use_dora", "yes"),
                ("fan_in_fan_out", "no"),
                ("rank_pattern", ["layer"]),
                ("rank_pattern", {"layer": "4"}),
                ("alpha_pattern", {"layer": None}),
                ("alpha_pattern", 3),
            ]
        ),
        *(
            ({"r": r}, ["[2, 61] and [37, 2] of", f"not of rank {rank}"])
            for r, rank in ((4, 4), (..., 8))
        ),
        ({"rank_pattern": {"layer": 3}}, ["not of rank 3"]),
        *(
            ({"alpha_pattern": {pattern: 2}}, ["no regular expression", "repeats no group"])
            for pattern in (
                "lay(er",
                "*layer",
                "[z-a]",
                "a{99999999999}",
                "(" * 5000 + ")" * 5000,
                "(a+)+",
                "((l|r)a?)*",
                r"(l)\1",
                "(?!x)layer",
                "(l|l)" * 40,
                "[[a]",
                "[a--b]",
            )
        ),
        ({"rank_pattern": {"a" * 1_000_001: 2}}, ["are too long"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_adapter_whose_settings_make_no_sense_is_refused(
    pair: Pair,
    tmp_path: Path,
    check_refused: Refusal,
    config: dict[str, Any],
    complaints: list[str],
) -> None:
    adapter = write_adapter(tmp_path / "adapter", LAYER, **config)
    check_refused(pair[0], adapter, "adapter'", *complaints)


@pytest.mark.parametrize(
    "pattern",
    ["q", r".*\.q", r"^model\.layers\.\d+\.q$", "[0-9]{1,2}.(q|k)", r"model.*[^.]\.(?:k|.)", "q|k"],
)
def test_a_pattern_finds_the_modules_that_it_finds_in_peft(tmp_path: Path, pattern: str) -> None:
    module = "model.layers.12.q"
    [base] = save(tmp_path, base={f"{module}.weight": torch.randn(8, 16)})
    assert re.match(rf"(.*\.)?({pattern})$", module), "as PEFT does"
    tensors = low_rank(module, (8, 16))
    adapter = write_adapter(tmp_path / "adapter", tensors, r=9, rank_pattern={"x": 5, pattern: 2})
    run_merge(base, [adapter], tmp_path / OUT, drop_rate=0.0)


def test_a_pattern_that_would_take_hours_is_refused(tmp_path: Path, check_refused: Refusal) -> None:
    module = "a" * 60
    [base] = save(tmp_path, base={f"{module}.weight": torch.randn(8, 16)})
    adapter = write_adapter(
        tmp_path / "adapter", low_rank(module, (8, 16)), rank_pattern={"a*" * 9 + "b": 3}
    )
    check_refused(base, adapter, "adapter_config.json", "a*a*b'", "names of modules")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"r": 2, "r": 4}', b"[" * 200_000, b"\xff"])
def test_an_adapters_settings_that_cannot_be_read_are_named(
    pair: Pair, tmp_path: Path, check_refused: Refusal, text: Any
) -> None:
    config = write_adapter(tmp_path / "adapter", LAYER) / "adapter_config.json"
    config.write_bytes(text)
    for source in (config.parent, config.parent / "adapter_model.safetensors", config):
        check_refused(pair[0], source, f"{str(config)!r} is not valid")


NO_PART = ("lora_B.bias", "lora_C.weight", "token_adapter.trainable_tokens_delta")
NO_PAIR = ({B: None}, {A: None}, {f"{PREFIX}.lora_embedding_A": torch.ones(2, 61)})


@pytest.mark.parametrize(
    ("change", "complaints"),
    [
        *(
            ({f"{PREFIX}.{part}": torch.ones(37)}, [f"'{PREFIX}.{part}'", "plain LoRA"])
            for part in NO_PART
        ),
        ({f"{PREFIX}.lora_magnitude_vector": torch.ones(37)}, ["not of rank 2"]),
        *((change, ["no pair of matrices A and B for 'layer'"]) for change in NO_PAIR),
        (
            {f"{PREFIX}.lora_A.other.weight": torch.ones(2, 61)},
            ["several adapters", f"'{PREFIX}.lora_A.", "each"],
        ),
        (low_rank("layer", (37, 61)) | {"layer.lora_A.weight": torch.ones(2, 61)}, ["several"]),
        ({"layer.alpha": torch.ones(())}, ["not a plain LoRA of PEFT's"]),
        ({A: torch.ones(2, 61, dtype=torch.int8)}, [f"'{A}'", "is I8"]),
        ({A: torch.ones(2, 0)}, ["[2, 0] and [37, 2] of", "no pair"]),
        ({A: torch.ones(())}, ["[] and [37, 2] of", "no pair"]),
        ({B: torch.ones(37, 3)}, ["[2, 61] and [37, 3] of", "no pair"]),
        ({A: torch.ones(2, 60)}, ["'layer.weight' is [37, 61]", "and [37, 60] in"]),
        (
            {f"{PREFIX}.base_layer.weight": torch.ones(37, 60)},
            ["is [37, 61], but its saved weights are [37, 60]"],
        ),
        (
            low_rank("other", (37, 61)),
            ["changes 'other.weight', which the base does not have", "'layer.weight'"],
        ),
        (low_rank("scalar", (37, 61)), ["changes 'scalar.weight', which the base does not have"]),
        (dict.fromkeys(LAYER), ["adapter' is empty"]),
    ],
    ids=lambda value: ",".join(value)[:70],
)
def test_an_adapter_whose_tensors_do_not_fit_is_refused(
    pair: Pair,
    tmp_path: Path,
    check_refused: Refusal,
    change: dict[str, Any],
    complaints: list[str],
) -> None:
    tensors = {name: tensor for name, tensor in {**LAYER, **change}.items() if tensor is not None}
    error = check_refused(
        pair[0], write_adapter(tmp_path / "adapter", tensors), "adapter'", *complaints
    )
    assert error.splitlines()[-1].rstrip() == error.splitlines()[-1], "the hint is a whole sentence"


@pytest.mark.parametrize(
    ("magnitudes", "shape", "complaints"),
    [
        (None, (37, 61), ["not of rank 2 with magnitudes"]),
        (torch.ones(36), (37, 61), ["magnitudes [36]", "37 outputs"]),
        (torch.ones(30), (30, 61), ["another shape than in the base"]),
        (torch.zeros(37, dtype=torch.int8), (37, 61), ["lora_magnitude_vector", "is I8"]),
        (torch.full((37,), math.nan), (37, 61), ["tensor 'layer.weight' holds nan at [0, 0]"]),
    ],
    ids=str,
)
def test_dora_that_does_not_fit_is_refused(
    pair: Pair,
    tmp_path: Path,
    check_refused: Refusal,
    magnitudes: torch.Tensor | None,
    shape: tuple[int, int],
    complaints: list[str],
) -> None:
    tensors = low_rank("layer", shape)
    if magnitudes is not None:
        tensors[f"{PREFIX}.lora_magnitude_vector.weight"] = magnitudes
    adapter = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    check_refused(pair[0], adapter, "adapter'", *complaints)


def test_an_adapter_that_lacks_a_file_or_a_base_says_so(
    pair: Pair, tmp_path: Path, check_refused: Refusal
) -> None:
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    adapter = write_adapter(tmp_path / "a", LAYER)
    for source in ("", weights, config):
        check_refused(adapter / source, pair[1], "is a LoRA adapter")
    (adapter / weights).unlink()
    for source in ("", config):
        check_refused(pair[0], adapter / source, weights)
    (adapter / "adapter_model.bin").write_bytes(b"PK")
    check_refused(pair[0], adapter, f"a' has no {weights}", "PEFT")
    write_adapter(adapter, LAYER)
    (adapter / config).unlink()
    for source in ("", weights):
        check_refused(pair[0], adapter / source, f"has no {config}")


def test_a_model_with_an_adapter_inside_is_a_model(tmp_path: Path) -> None:
    base = random_model(shapes={"a.base_layer.weight": (4, 4), "a.lora_A.speech.weight": (2, 4)})
    paths = save(tmp_path, base=base, math=finetune(base, 1))
    run_merge(paths[0], paths[1:], tmp_path / OUT, engine="plain")


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_an_adapter_on_a_quantised_base_is_refused(
    tmp_path: Path, check_refused: Refusal, dtype: Any, dora: bool
) -> None:
    more = {f"{PREFIX}.lora_magnitude_vector": torch.ones(37)} if dora else {}
    adapter = write_adapter(tmp_path / "adapter", LAYER | more, use_dora=dora)
    [base] = save(
        tmp_path, base={"layer.weight": torch.ones(37, 61).to(dtype), "norm.weight": torch.ones(61)}
    )
    check_refused(
        base, adapter, "base.safetensors' is quantised", "'layer.weight'", "before quantising"
    )


def test_an_adapter_of_a_rank_far_above_its_columns_is_multiplied_whole(tmp_path: Path) -> None:
    """By so many ranks at a time as there is room for, which the rows of a chunk decide."""
    tune(min_chunk=1024, max_chunk=1024, expand_elements=4096)
    weight = torch.zeros(700, 8)
    tensors = low_rank("layer", (700, 8), rank=64)
    adapter = write_adapter(tmp_path / "adapter", tensors, r=64, lora_alpha=64)
    [base] = save(tmp_path, base={"layer.weight": weight})
    for engine in ("plain", "numba"):
        config = {"drop_rate": 0.0, "engine": engine, "threads": 1}
        merged = merge_paths(base, [adapter], tmp_path / OUT, **config)["layer.weight"]
        a, b = tensors.values()
        assert torch.allclose(merged.double(), b.double() @ a.double(), atol=1e-6)
