"""Models as people have them, directories, shards, indexes, and how their tensors are matched with
the base's."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from dare import DareConfig, DareError, dare_merge
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    INDEX,
    Config,
    Models,
    Pair,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    define,
    finetune,
    make_merger,
    make_models,
    merge,
    merge_paths,
    random_model,
    raw,
    read_json,
    run,
    run_merge,
    same_bits,
    save,
    save_directory,
    save_sharded,
    slow,
    tensors_in,
    tune,
)

OUT = "out.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SLERP = {"method": "slerp", "drop_rate": 0.5}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"drop_rate": 0.0},
    {"method": "ties", "keep_ratio": 0.5},
    SLERP,
]


def test_a_model_is_a_file_a_directory_shards_or_an_index(tmp_path: Path) -> None:
    base, model = make_models(1, BF16)
    names = list(base)

    def lay_out(kind: str, tensors: Tensors) -> list[Path]:
        whole = save_directory(tmp_path / f"{kind}-whole", tensors)
        sharded = save_sharded(tmp_path / f"{kind}-sharded", tensors, [names[:1], names[1:]])
        below = save_sharded(tmp_path / f"{kind}-below", tensors, [[name] for name in names])
        (below / "shards").mkdir()
        for shard in below.glob("*.safetensors"):
            shard.rename(below / "shards" / shard.name)
        (below / INDEX).write_text((below / INDEX).read_text().replace('"model-', '"shards/model-'))
        [file] = save(tmp_path, **{kind: tensors})
        return [file, whole / "model.safetensors", sharded / INDEX, whole, sharded, below]

    models = lay_out("model", model)
    for one, other in zip(lay_out("base", base), models[1:] + models[:1], strict=True):
        assert_same(merge_paths(one, [other], tmp_path / OUT), define(base, [model]))


@pytest.mark.parametrize(
    "entry",
    [
        "/etc/x",
        "C:\\x",
        "C:/x",
        "\\\\server\\share\\x",
        "//server/share/x",
        "C:x",
        "../math/model.safetensors",
        "sub/../../math/model.safetensors",
        "..\\math\\model.safetensors",
        "sub\\..\\..\\x",
        "..",
        ".",
        "",
        "a\x00b",
        "a\nb",
        7,
        None,
        ["model.safetensors"],
    ],
    ids=repr,
)
def test_an_index_that_leads_elsewhere_is_not_followed(
    pair: Pair, tmp_path: Path, check_refused: Refusal, entry: Any
) -> None:
    evil = tmp_path / "evil"
    (evil / "sub").mkdir(parents=True)
    (evil / INDEX).write_text(json.dumps({"weight_map": {"layer.weight": entry}}))
    for base, model in ((evil, pair[1]), (pair[0], evil)):
        check_refused(base, model, f"evil/{INDEX}'", "'layer.weight'", repr(entry), "not followed")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "without a weight_map"),
        ('{"weight_map": {}}', "without a weight_map"),
        ('{"weight_map": null}', "without a weight_map"),
        ('{"weight_map": ["x"]}', "without a weight_map"),
        ("", "is not valid"),
        ("layer.weight: x", "is not valid"),
        ('{"weight_map": {"a": "x"}', "is not valid"),
        ("\ufeff{}", "is not valid"),
        ("\xff", "is not valid"),
        ("[]", "is not valid"),
        ('{"weight_map": ' + "[" * 200_000, "too deeply"),
        ('{"weight_map": {"a": ' + "1" * 5000 + "}}", "is not valid"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' is in it twice"),
        ('{"weight_map": {"a": "x"}, "weight_map": {"a": "y"}}', "'weight_map' is in it twice"),
    ],
    ids=lambda text: text[:40],
)
def test_an_index_that_cannot_be_read_is_named(
    pair: Pair, tmp_path: Path, check_refused: Refusal, text: str, complaint: str
) -> None:
    index = tmp_path / "odd" / INDEX
    index.parent.mkdir()
    index.write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8"))
    for base, model in ((pair[0], index.parent), (index, pair[1])):
        check_refused(base, model, f"odd/{INDEX}'", complaint)


@pytest.mark.parametrize("source", ["model", f"model/{INDEX}"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "download or save it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b"\x10" + bytes(9), "not a complete"),
        ("directory", "not a regular file"),
    ],
    ids=str,
)
def test_a_shard_that_is_missing_or_broken_is_named(
    pair: Pair, tmp_path: Path, check_refused: Refusal, content: Any, complaint: str, source: str
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    shard = save_sharded(tmp_path / "model", model, [list(model)[:1], list(model)[1:]]) / SHARDS[1]
    shard.unlink()
    if content == "directory":
        shard.mkdir()
    elif content is not None:
        shard.write_bytes(content)
    check_refused(pair[0], tmp_path / source, complaint, shard.name)


def test_an_index_that_does_not_fit_its_shards_is_refused(
    pair: Pair, tmp_path: Path, check_refused: Refusal
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    names = list(model)
    for name, said in zip(("ghost.weight", "layer.weight"), SHARDS, strict=True):
        extra = {name.replace(".", "__"): said}
        folder = save_sharded(tmp_path / name, model, [names[:2], names[2:]], **extra)
        check_refused(pair[0], folder, f"tensor {name!r} is in {said!r}, and it is not")
    folder = save_sharded(tmp_path / "twice", model, [names[:2], names[1:]])
    check_refused(folder, pair[1], repr(names[1]), *map(repr, SHARDS))


def test_a_directory_without_a_model_says_what_is_in_it(
    pair: Pair, tmp_path: Path, check_refused: Refusal
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, *complaints in (
        ("LICENSE", "holds no model", "model.safetensors", INDEX),
        ("config.json", "holds no model", "model.safetensors", INDEX),
        ("consolidated.00.pth", "PyTorch pickles", "convert"),
        ("pytorch_model.bin", "PyTorch pickles", "dare convert"),
        ("model-Q4_K_M.gguf", "GGUF"),
        ("extra.safetensors", "'extra.safetensors'", "name the file"),
        ("consolidated.safetensors", "'consolidated.safetensors', 'extra.safetensors'"),
    ):
        (folder / name).write_text("{}")
        for base, model in ((folder, pair[1]), (pair[0], folder)):
            check_refused(base, model, "odd'", *complaints)


# --- tensors of other shapes ----------------------------------------------------------------------


def with_rows(model: Tensors, rows: int, name: str = "layer.weight") -> Tensors:
    """The model with a tensor cut to so many rows, or grown to them by rows that resemble the
    others."""
    weight = model[name]
    new = (
        torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(9)) * 0.05
    ).to(weight.dtype)
    return {**model, name: torch.cat([weight, new[len(weight) :]])[:rows].contiguous()}


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        *(((rows, 61), ("--mismatch overlap", "--mismatch base")) for rows in (38, 36, 7)),
        *((shape, ("--mismatch base",)) for shape in ((37, 60), (37,), (37, 61, 1), (61, 37), ())),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_the_ways_out(
    models: Models,
    tmp_path: Path,
    check_refused: Refusal,
    shape: tuple[int, ...],
    ways: tuple[str, ...],
) -> None:
    [other] = save(
        tmp_path, other={**load_file(models[1]), "layer.weight": torch.ones(shape, dtype=BF16)}
    )
    named = ("'layer.weight' is [37, 61] in", f"and {list(shape)} in", "other.safetensors'")
    fits = len(ways) == 2
    for flags in ((), ("--mismatch=error",), *([] if fits else [("--mismatch=overlap",)])):
        error = check_refused(models[0], other, *named, *ways, flags=flags)
        assert fits or "--mismatch overlap" not in error, "what would not help is not advised"


OVERLAPS = [
    *((BF16, BF16, config) for config in SETTINGS),
    *((*types, {}) for types in ((F32, F32), (BF16, F32), (F32, BF16), (F16, BF16), (F64, F32))),
    (F32, BF16, SETTINGS[2]),
    (BF16, BF16, {"dtype": "float32", "drop_rate": 0.5}),
]


@pytest.mark.parametrize(
    ("base_type", "model_type", "config", "engine"),
    [*((*case, "plain") for case in OVERLAPS), *(slow(*case, "numba") for case in OVERLAPS)],
    ids=str,
)
def test_overlap_merges_common_rows_and_keeps_the_bases_others(
    tmp_path: Path,
    base_type: torch.dtype,
    model_type: torch.dtype,
    config: dict[str, Any],
    engine: str,
) -> None:
    """As if the models had the base's rows, which are not rounded to the models' type."""
    base = random_model(dtype=base_type)
    base["layer.weight"][30, :4] = torch.tensor([0.0, -0.0, 1e-7, -1.0]).to(base_type)
    common = torch.promote_types(base_type, model_type)
    cases = [((45, 20), 1 << 18), ((45, 20), 1024), ((3, 0), 1024), ((3,), 1024)]
    for counts, chunk in cases[:3] if config == SLERP else cases:
        tune(min_chunk=chunk, max_chunk=chunk)
        models = []
        padded = []
        for seed, rows in enumerate(counts, 1):
            tuned = {n: t.to(model_type) for n, t in finetune(base, seed, 0.01).items()}
            models.append(with_rows(tuned, rows))
            whole = [models[-1]["layer.weight"][:37], base["layer.weight"][rows:]]
            padded.append({**tuned, "layer.weight": torch.cat([t.to(common) for t in whole])})
        merged = merge(tmp_path, base, *models, mismatch="overlap", engine=engine, **config)
        assert_same(merged, define(base, padded, **config))


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_mismatch_base_keeps_the_bases_tensor_bit_for_bit(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    base, *models = make_models(2, BF16)
    base["layer.weight"][0, 0] = -0.0
    models[1]["layer.weight"] = torch.ones(3, 3, 3, dtype=BF16)
    merged = merge(tmp_path, base, *models, mismatch="base", **config)
    for model in models:
        del model["layer.weight"]
    assert_same(merged, define(base, models, **config))


@pytest.mark.parametrize("mismatch", ["overlap", "base"])
def test_the_report_names_what_does_not_fit(tmp_path: Path, mismatch: str) -> None:
    base = random_model(dtype=BF16) | {"position_ids": torch.arange(8)}
    first = with_rows(finetune(base, 1), 45)
    extra = {
        "rotary.inv_freq": torch.ones(4),
        "attn.bias": torch.ones(4, 4, dtype=torch.bool),
        "attn.masked_bias": torch.tensor(-1e4),
        "new.weight": torch.ones(3),
    }
    # Integers are not merged in any shape.
    second = finetune(base, 2) | extra | {"position_ids": torch.arange(12)}
    del second["layer.bias"]
    paths = save(tmp_path, base=base, first=first, second=second)
    report = run_merge(paths[0], paths[1:], tmp_path / OUT, mismatch=mismatch)
    merged = load_file(tmp_path / OUT)
    assert merged.keys() == base.keys()
    assert same_bits(merged["position_ids"], base["position_ids"])
    assert [
        (model.mismatched_tensors, model.missing_tensors, {*model.extra_tensors})
        for model in report.models
    ] == [(("layer.weight",), (), set()), (("position_ids",), ("layer.bias",), {*extra})]
    words = (
        r"second.* 'layer.bias'",
        r"second.* 4 tensors",
        r"first.* 'layer.weight' \(\[45, 61]\)",
    )
    assert [*map(bool, map(re.search, words, report.warnings))] == [True] * 3, report.warnings


def test_parameters_that_a_model_does_not_have_are_not_counted_as_its_own(tmp_path: Path) -> None:
    base, model = save(
        tmp_path, base={"w": torch.ones(100, 50)}, model={"w": torch.full((40, 50), 1.5)}
    )
    merger = make_merger(base, [model], mismatch="overlap", engine="plain")
    [report] = merger.merge(tmp_path / OUT).models
    assert (report.parameters, report.mean_delta) == (40 * 50, 0.5)


# --- tied heads -----------------------------------------------------------------------------------

TIED: list[Config] = [
    {"tie_word_embeddings": True},
    {"text_config": {"tie_word_embeddings": True}},
    # Not stated: a head that is missing must be the embedding.
    {"model_type": "gpt2", "text_config": [1]},
]


def save_tied(
    folder: Path, base_config: Config, model_config: Config
) -> tuple[Tensors, Path, Path]:
    """A base whose head is its embedding, and a fine-tune of it that was saved without the head."""
    base = random_model(dtype=BF16, shapes={EMBEDDING: (40, 16), "model.norm.weight": (16,)})
    model = save_directory(folder / "model", finetune(base, 1), **model_config)
    base |= {HEAD: base[EMBEDDING].clone()}
    return base, save_directory(folder / "base", base, **base_config), model


@pytest.mark.parametrize(
    ("base_config", "model_config"),
    [
        *((config, {}) for config in TIED),
        *(({"x": 1}, config) for config in TIED),
        # A fine-tune knows best what it lacks.
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
def test_a_tied_head_that_a_model_lacks_is_merged_like_the_embedding(
    tmp_path: Path, base_config: Config, model_config: Config, settings: Config
) -> None:
    base, base_path, model_path = save_tied(tmp_path, base_config, model_config)
    report = run_merge(base_path, [model_path], tmp_path / OUT, **settings)
    merged = load_file(tmp_path / OUT)
    assert same_bits(merged[HEAD], merged[EMBEDDING])
    assert not torch.equal(merged[HEAD], base[HEAD])
    assert report.models[0].missing_tensors == ()
    assert any(HEAD in warning and EMBEDDING in warning for warning in report.warnings)


def test_a_tied_head_that_all_models_have_stays_the_embedding(tmp_path: Path) -> None:
    """Loaders untie a model whose head and embedding are both stored and differ."""
    base, base_path, model_path = save_tied(tmp_path, {"tie_word_embeddings": True}, {})
    model = tensors_in(model_path)
    save_directory(model_path, model | {HEAD: model[EMBEDDING].clone()})
    rules = [{"match": "lm_head*", "drop_rate": 0.1}]
    merged = merge_paths(base_path, [model_path], tmp_path / OUT, rules=rules)
    assert same_bits(merged[HEAD], merged[EMBEDDING])
    assert not same_bits(merged[EMBEDDING], base[EMBEDDING])


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}])
def test_a_head_that_is_not_tied_stays_the_bases_and_is_listed(
    tmp_path: Path, config: Config
) -> None:
    base, base_path, model_path = save_tied(tmp_path, config, {})
    report = run_merge(base_path, [model_path], tmp_path / OUT)
    assert same_bits(load_file(tmp_path / OUT)[HEAD], base[HEAD])
    assert report.models[0].missing_tensors == (HEAD,)


@pytest.mark.parametrize("mismatch", ["overlap", "base"])
@pytest.mark.parametrize("rows", [43, 30])
def test_a_tied_head_follows_an_embedding_of_other_rows(
    tmp_path: Path, mismatch: str, rows: int
) -> None:
    base, base_path, model_path = save_tied(tmp_path, {"tie_word_embeddings": True}, {})
    save_directory(model_path, with_rows(tensors_in(model_path), rows, EMBEDDING))
    merged = merge_paths(base_path, [model_path], tmp_path / OUT, mismatch=mismatch)
    assert same_bits(merged[HEAD], merged[EMBEDDING])
    assert same_bits(merged[EMBEDDING], base[EMBEDDING]) == (mismatch == "base")


def test_a_model_that_has_a_head_keeps_its_mask_beside_one_that_lacks_it(tmp_path: Path) -> None:
    """A mask is drawn by a tensor's own name, whatever the other models have."""
    base, base_path, model_path = save_tied(tmp_path, {"tie_word_embeddings": True}, {})
    own = save_directory(tmp_path / "own", finetune(base, 2))
    heads = []
    for other in (base, {name: base[name] for name in tensors_in(model_path)}):
        run_merge(base_path, [own, save_directory(tmp_path / "other", other)], tmp_path / OUT)
        heads.append(load_file(tmp_path / OUT)[HEAD])
    assert same_bits(*heads)


# --- quantised models -----------------------------------------------------------------------------

FP8 = torch.float8_e4m3fn

I8 = torch.int8
U8 = torch.uint8
I32 = torch.int32
AWQ: dict[str, Any] = {"qweight": (I32, 8, 4), "qzeros": (I32, 1, 2), "scales": (F16, 1, 8)}
NF4: dict[str, Any] = {
    "weight": (U8, 32, 1),
    "weight.absmax": (F32, 2),
    "weight.quant_map": (F32, 16),
    "weight.quant_state.bitsandbytes__nf4": (U8, 40),
}
NESTED = {
    "weight.absmax": (U8, 2),
    "weight.nested_absmax": (F32, 1),
    "weight.nested_quant_map": (F32, 16),
}
# The parts of a module in each layout: their types and shapes.
LAYOUTS: dict[str, dict[str, Any]] = {
    "e5m2": {"weight": (torch.float8_e5m2, 8, 8), "weight_scale_inv": (F32, 1, 1)},
    "unscaled": {"weight": (FP8, 8, 8), "input_scale": (BF16, 1)},
    "mxfp8": {"weight": (FP8, 8, 8), "weight_scale": (U8, 8, 1)},
    "gptq": AWQ | {"qweight": (I32, 4, 8), "g_idx": (I32, 32)},
    "awq": AWQ,
    "nf4": NF4,
    "nf4-nested": NF4 | NESTED,
    "int8": {"weight": (I8, 8, 8), "SCB": (F32, 8), "weight_format": (U8, 1)},
    "mxfp4": {"gate_up_proj_blocks": (U8, 2, 8, 4), "gate_up_proj_scales": (U8, 2, 8)},
    "compressed": {
        "weight_packed": (I32, 8, 1),
        "weight_scale": (F16, 8, 1),
        "weight_shape": (torch.int64, 2),
    },
}


def quantised(kind: str) -> tuple[Tensors, Tensors]:
    """A module in this layout, and what is not quantised: its bias, a norm and an embedding."""
    generator = torch.Generator().manual_seed(3)
    module = {
        f"layer.{name}": torch.randint(100, size, generator=generator).to(dtype)
        for name, (dtype, *size) in LAYOUTS[kind].items()
    }
    bias = "layer.gate_up_proj_bias" if kind == "mxfp4" else "layer.bias"
    return module, random_model(3, F16, {bias: (8,), "norm.weight": (8,), "embed.weight": (16, 8)})


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_quantised_module_is_copied_and_the_rest_is_merged(
    tmp_path: Path, kind: str, dtype: str | None
) -> None:
    module, rest = quantised(kind)
    tuned = finetune(rest, 1, 0.01)
    merged = merge(
        tmp_path, module | rest, module | tuned, drop_rate=0.0, dtype=dtype, engine="plain"
    )
    wide = {n: tensor.to(F32 if dtype else F16) for n, tensor in tuned.items()}
    assert_same(merged, module | wide)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_quantised_module_that_differs_in_one_bit_anywhere_is_refused(
    tmp_path: Path, check_refused: Refusal, kind: str
) -> None:
    module, rest = quantised(kind)
    flags = ("--dtype=float32", "--mismatch=overlap", "--engine=plain")
    for name in module:
        other = {n: t.clone() for n, t in module.items()}
        raw(other[name])[0] ^= 1
        paths = save(tmp_path, base=module | rest, model=other | rest)
        check_refused(*paths, repr(name), "model.safetensors'", "before quantising", flags=flags)


@pytest.mark.parametrize("flags", [(), ("--mismatch=base",)])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_quantised_model_and_a_plain_one_are_not_merged(
    tmp_path: Path, check_refused: Refusal, kind: str, flags: tuple[str, ...]
) -> None:
    module, rest = quantised(kind)
    name = "layer.gate_up_proj" if kind == "mxfp4" else "layer.weight"
    other, others = quantised("int8" if kind == "awq" else "awq")
    packed, plain, odd = save(
        tmp_path,
        quantised=module | rest,
        plain=rest | {name: torch.ones(8, 8, dtype=F16)},
        other=other | others,
    )
    for base, model in ((plain, packed), (packed, plain)):
        names = ("quantised.safetensors'", "plain.safetensors'", "before quantising")
        check_refused(base, model, *names, flags=flags)
    check_refused(packed, odd, "is quantised", "'layer.", flags=flags)


# --- a base of another kind -----------------------------------------------------------------------

ROPE: dict[str, Any] = {"rope_theta": 10000, "rope_scaling": None}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0}
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (ROPE, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", **LLAMA3},
        },
    ),
    (
        {"rope_scaling": {"type": "su", "long_factor": [1, 2]}},
        {"rope_scaling": {"rope_type": "longrope", "type": "su"}},
    ),
    (
        {"rope_theta": 1e6, "rope_scaling": 3},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    ),
    (
        {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        {"hidden_size": 64, "vocab_size": 3},
    ),
    ({"sliding_window": 4096, "use_sliding_window": False}, {"sliding_window": None}),
    (
        {"_name_or_path": "org/one", "vocab_size": 1, "hidden_size": [1]},
        {"_name_or_path": "two", "hidden_size": 2},
    ),
    ({"text_config": {"hidden_size": 4}}, {"hidden_size": 5, "text_config": "hidden_size"}),
]


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        *((*pair, "") for pair in ALIKE),
        *[
            (
                {"d_ff": 4, "n_head": 2},
                {"n_head": 3, "d_ff": 5},
                "d_ff is 5, not 4, its n_head is 3",
            ),
            (
                {"sliding_window": 4096},
                {"sliding_window": None},
                "sliding_window is 'off', not 4096",
            ),
            (
                {"max_position_embeddings": 4096},
                {"max_position_embeddings": 8192},
                "max_position_embeddings is 8192, not 4096",
            ),
            (ROPE, ROPE | {"rope_theta": 5e5}, "rope_theta is 500000.0, not 10000"),
            (ROPE, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0, not 10000"),
            (
                ROPE,
                {"rope_scaling": {"type": "linear", "factor": 2}},
                "rope_scaling.rope_type is 'linear'",
            ),
            (
                {"rope_scaling": LLAMA3},
                {"rope_parameters": LLAMA3 | {"factor": 4}},
                "rope_scaling.factor is 4, not 8.0",
            ),
            (
                {"tie_word_embeddings": True},
                {"tie_word_embeddings": False},
                "tie_word_embeddings is False, not True",
            ),
            (
                {"text_config": {"rms_norm_eps": 1e-5}},
                {"text_config": {"rms_norm_eps": 1e-6}},
                "text_config.rms_norm_eps is 1e-06, not 1e-05",
            ),
        ],
    ],
)
def test_what_shapes_computation_is_compared_with_the_base(
    pair: Pair, tmp_path: Path, mine: Config, theirs: Config, words: str
) -> None:
    for path, config in zip(pair, (mine, theirs), strict=True):
        (path / "config.json").write_text(json.dumps(config))
    for base, model in (pair, pair[::-1]):
        warnings = make_merger(base, [model]).plan(tmp_path / OUT).warnings
        assert len(warnings) == bool(words), "one warning, whatever differs"
        assert base == pair[1] or words in "".join(warnings)


@pytest.mark.parametrize("part", ["", "text_config"])
def test_a_base_of_another_architecture_is_refused_unless_the_user_knows(
    pair: Pair, tmp_path: Path, check_refused: Refusal, part: str
) -> None:
    for path, kind in zip(pair, ("llama", "qwen2"), strict=True):
        config = {"model_type": kind}
        (path / "config.json").write_text(json.dumps({part: config} if part else config))
    check_refused(*pair, "model_type is 'qwen2', not 'llama'", "--any-base")
    run("analyze", "-q", "-b", pair[0], "-m", pair[1])  # which is how to find out about a base
    (warning,) = run_merge(pair[0], [pair[1]], tmp_path / "merged", any_base=True).warnings
    assert "model_type is 'qwen2', not 'llama'" in warning


def test_a_file_of_any_name_has_the_configuration_beside_it(
    tmp_path: Path, check_refused: Refusal
) -> None:
    base = random_model()
    paths = [*save(tmp_path / "one", base=base), *save(tmp_path / "two", math=finetune(base, 1))]
    for path, kind in zip(paths, ("llama", "qwen2"), strict=True):
        (path.parent / "config.json").write_text(json.dumps({"model_type": kind}))
    check_refused(*paths, "model_type is 'qwen2', not 'llama'")
    run_merge(paths[0], paths[1:], tmp_path / "merged", any_base=True)
    assert read_json(tmp_path / "merged" / "config.json") == {"model_type": "llama"}


def test_a_model_file_beside_an_index_with_shards_is_warned_about(tmp_path: Path) -> None:
    base = random_model()
    both = save_directory(tmp_path / "both", base)
    clean = save_directory(tmp_path / "clean", finetune(base, 1))
    save_sharded(both, base, [["layer.weight"], ["layer.bias", "head.weight", "scalar"]])
    for one, other in ((both, clean), (clean, both)):
        (warning,) = run_merge(one, [other], tmp_path / OUT).warnings
        assert "both has model.safetensors" in warning
        assert "model-00001-of-00002.safetensors" in warning


def test_a_model_that_has_most_tensors_under_other_names_is_refused_unless_the_user_insists(
    tmp_path: Path, check_refused: Refusal
) -> None:
    base = random_model(shapes={f"layers.{k}.weight": (8, 8) for k in range(9)})
    common = {name: tensor for name, tensor in base.items() if name < "layers.4"}
    renamed = {
        name.replace("layers", "blocks"): tensor
        for name, tensor in base.items()
        if name not in common
    }
    path, other, half, subset, more = save(
        tmp_path,
        base=base,
        other=finetune(common | renamed, 1),
        half=finetune(common | {"layers.4.weight": base["layers.4.weight"]} | renamed, 1),
        subset=finetune(common, 1),
        more=finetune(base, 1) | {f"extra.{k}": torch.ones(3) for k in range(50)},
    )
    check_refused(path, other, "only 4 of its 9", "'blocks.4.weight'", "--any-base")
    for model in (half, subset, more):
        run_merge(path, [model], tmp_path / OUT)
    report = run_merge(path, [other], tmp_path / OUT, any_base=True)
    assert report.models[0].parameters == 4 * 64


LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.attn.weight": (4, 4),
    "model.layers.0.mlp.up.weight": (4, 4),
    "model.layers.1.attn.weight": (4, 4),
    "model.layers.1.mlp.up.weight": (4, 4),
    "proj.weight": (4, 4),
    "proj.bias": (4,),
}
EXTRA_SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.2.attn.weight": (4, 4),
    "model.layers.0.rotary_emb.inv_freq": (2,),
    "score.weight": (2, 4),
    "v_head.summary.bias": (1,),
    "logit_scale": (),
}


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["model.layers.1.mlp.up.weight"], "1 tensor of its own layers"),
        (["model.layers.0.mlp.up.weight", "proj.bias"], "2 tensors of its own layers"),
    ],
)
def test_a_base_that_lacks_weights_of_its_own_layers_is_refused(
    tmp_path: Path, refused: Refusal, missing: list[str], named: str
) -> None:
    base, *models = make_models(2, BF16, LAYER_SHAPES)
    partial = {name: tensor for name, tensor in base.items() if name not in missing}
    paths = save(tmp_path, base=partial, math=models[0], code=models[1])
    flags = ("-b", paths[0], "-m", *paths[1:], "-o", tmp_path / OUT)
    refused(1, [named, *missing, "--any-base"], *flags)
    assert dare_merge(partial, models, DareConfig(any_base=True)).keys() == partial.keys()
    with pytest.raises(DareError, match="of its own layers"):
        dare_merge(partial, models)
    # What only one of them has is its own.
    assert dare_merge(partial, [models[0], partial]).keys() == partial.keys()


def test_extra_heads_and_layers_of_fine_tunes_are_left_out_with_a_warning(tmp_path: Path) -> None:
    base, model = make_models(1, BF16, LAYER_SHAPES)
    paths = save(tmp_path, base=base, model=model | random_model(2, BF16, EXTRA_SHAPES))
    report = run_merge(paths[0], paths[1:], tmp_path / OUT)
    assert load_file(tmp_path / OUT).keys() == base.keys()
    assert report.models[0].extra_tensors == tuple(sorted(EXTRA_SHAPES))
    assert any("5 tensors" in line and "left out" in line for line in report.warnings)


def test_a_base_that_is_surely_another_models_is_refused_and_nothing_is_published(
    tmp_path: Path, check_refused: Refusal, refused: Refusal, monkeypatch: Patch
) -> None:
    shapes = {"layer.weight": (1000, 1000), "layer.bias": (1000,)}
    base = random_model(dtype=BF16, shapes=shapes)
    far = {name: tensor * 0.3 for name, tensor in random_model(1, BF16, shapes).items()}
    near = finetune(base, 1, size=0.04)
    zeros = {name: torch.zeros_like(each) for name, each in base.items()}
    paths = save(tmp_path, base=base, far=far, trained=near, zeros=zeros)
    words = ("is not the base of", "--any-base")
    with monkeypatch.context() as patch:  # where the sample shows nothing, all weights do
        patch.setattr("darelib.output.prepare.check_sample", lambda *_: None)
        check_refused(*paths[:2], *words, flags=("--quiet",))
    with monkeypatch.context() as patch:  # before a job is run
        patch.setattr("darelib.run.worker.Worker.__init__", Mock(side_effect=MemoryError))
        for command in (("merge",), ("merge", "--dry-run"), ("pack",)):
            flags = ("-b", paths[0], "-m", paths[1], "-o", tmp_path / OUT)
            refused(1, words, *command, *flags)
    with pytest.raises(DareError, match="'model 1'"):
        dare_merge(base, [near, far])
    assert dare_merge(base, [far], DareConfig(any_base=True)).keys() == base.keys()
    for model, insists in ((paths[1], True), (paths[2], False)):
        (warning,) = run_merge(paths[0], [model], tmp_path / OUT, any_base=insists).warnings
        assert "does not look like the base of" in warning
    run_merge(paths[3], [paths[0]], tmp_path / OUT)
