"""Models as people have them, directories, shards, indexes, and how their tensors are matched with
the base's."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dare
from dare import DareConfig, DareMerger
from darelib.core.tuning import TUNING
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    INDEX,
    Pair,
    Refusal,
    Tensors,
    assert_same,
    define,
    finetune,
    merge,
    random_model,
    raw,
    run_merge,
    same_bits,
    save,
    save_directory,
    save_sharded,
    tensors_in,
    write_config,
)

OUT, EMBEDDING, HEAD = "out.safetensors", "model.embed_tokens.weight", "lm_head.weight"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SLERP = {"method": "slerp", "drop_rate": 0.5}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"drop_rate": 0.0},
    {"method": "ties", "keep_ratio": 0.5},
    SLERP,
]


def test_a_model_is_a_file_a_directory_shards_or_an_index(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    model, names, layouts = finetune(base, 1), list(base), []
    for kind, tensors in (("base", base), ("model", model)):
        [file] = save(tmp_path, **{kind: tensors})
        whole = save_directory(tmp_path / f"{kind}-whole", tensors)
        sharded = save_sharded(tmp_path / f"{kind}-sharded", tensors, [names[:1], names[1:]])
        below = save_sharded(tmp_path / f"{kind}-below", tensors, [names[:2], names[2:]])
        (below / "shards").mkdir()
        for shard in below.glob("*.safetensors"):
            shard.rename(below / "shards" / shard.name)
        (below / INDEX).write_text((below / INDEX).read_text().replace('"model-', '"shards/model-'))
        layouts.append([file, whole, whole / "model.safetensors", sharded, sharded / INDEX, below])
    for sources in zip(layouts[0], layouts[1][1:] + layouts[1][:1], strict=True):
        run_merge(sources[0], [sources[1]], tmp_path / OUT)
        assert_same(load_file(tmp_path / OUT), define(base, [model]))


def test_any_sharding_gives_the_same_tensors(tmp_path: Path) -> None:
    base = random_model(dtype=BF16)
    models, (a, b, c, d) = [base, finetune(base, 1), finetune(base, 2)], base
    parts = [[[a], [b], [c], [d]], [[c, d], [a, b]], [[d, a], [b], [c]]]
    for turn in range(3):
        path = tmp_path / f"out{turn}"
        source = [
            save_sharded(tmp_path / f"{turn}{k}", models[k], parts[(turn + k) % 3])
            for k in range(3)
        ]
        run_merge(source[0], source[1:], path, max_shard_size=5000 * turn + 1000)
        assert_same(tensors_in(path), define(base, models[1:]))


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
    complaint = (
        f"evil/{INDEX}' says that tensor 'layer.weight' is in {entry!r}, which is no file beside it"
    )
    check_refused(evil, pair[1], complaint, "not followed")
    check_refused(pair[0], evil, complaint, "not followed")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "is JSON without a weight_map"),
        *(
            (f'{{"weight_map": {text}}}', "is JSON without a weight_map")
            for text in ("{}", "null", '["x"]')
        ),
        *(
            (text, "is not valid")
            for text in ("", "layer.weight: x", '{"weight_map": {"a": "x"}', "\ufeff{}", "\xff")
        ),
        ("[]", "is not valid: it is not a JSON object"),
        ('{"weight_map": ' + "[" * 200_000, "is nested too deeply"),
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
    check_refused(pair[0], index.parent, f"odd/{INDEX}'", complaint)
    check_refused(index, pair[1], f"odd/{INDEX}'", complaint)


@pytest.mark.parametrize("source", ["model", f"model/{INDEX}"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, f"lacks its file {SHARDS[1]!r}"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (slice(-10), "not a complete"),
        ("directory", "not a regular file"),
    ],
    ids=str,
)
def test_a_shard_that_is_missing_or_broken_is_named(
    pair: Pair, tmp_path: Path, check_refused: Refusal, content: Any, complaint: str, source: str
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    shard = save_sharded(tmp_path / "model", model, [list(model)[:1], list(model)[1:]]) / SHARDS[1]
    whole = shard.read_bytes()
    shard.unlink()
    if content == "directory":
        shard.mkdir()
    elif content is not None:
        shard.write_bytes(whole[content] if isinstance(content, slice) else content)
    error = check_refused(pair[0], tmp_path / source, complaint)
    assert (repr(str(shard)) if content else "download or save it again") in error
    assert "permissions" not in error


def test_an_index_that_does_not_fit_its_shards_is_refused(
    pair: Pair, tmp_path: Path, check_refused: Refusal
) -> None:
    model = finetune(random_model(dtype=BF16), 1)
    names = list(model)
    for name, said in zip(("ghost.weight", "layer.weight"), SHARDS, strict=True):
        folder = save_sharded(
            tmp_path / name, model, [names[:2], names[2:]], **{name.replace(".", "__"): said}
        )
        check_refused(
            pair[0], folder, f"{name}' says that tensor {name!r} is in {said!r}, and it is not"
        )
    folder = save_sharded(tmp_path / "twice", model, [names[:2], names[1:]])
    check_refused(
        folder, pair[1], f"tensor {names[1]!r} of", f"is in {SHARDS[0]!r} and in {SHARDS[1]!r}"
    )


def test_a_directory_without_a_model_says_what_is_in_it(
    pair: Pair, tmp_path: Path, check_refused: Refusal
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, *complaints in (
        ("LICENSE", "holds no model", "model.safetensors or model.safetensors.index.json"),
        ("config.json", "holds no model", "model.safetensors or model.safetensors.index.json"),
        ("consolidated.00.pth", "holds PyTorch pickles", "convert"),
        ("pytorch_model.bin", "holds PyTorch pickles", "dare.py convert"),
        ("model-Q4_K_M.gguf", "holds GGUF files", "merge the original model"),
        ("extra.safetensors", "'extra.safetensors'", "name the file"),
        (
            "consolidated.safetensors",
            "'consolidated.safetensors', 'extra.safetensors'",
            "name the file",
        ),
    ):
        (folder / name).write_text("{}")
        check_refused(folder, pair[1], "odd'", *complaints)
        check_refused(pair[0], folder, "odd'", *complaints)


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
    ("shape", "words"),
    [((38, 61), ", 1 row more\n"), ((36, 61), ", 1 row fewer\n"), ((7, 61), ", 30 rows fewer\n")]
    + [(shape, "") for shape in ((37, 60), (37,), (37, 61, 1), (61, 37), ())],
)
def test_a_tensor_of_another_shape_is_refused_with_the_ways_out(
    models: list[Path], tmp_path: Path, check_refused: Refusal, shape: tuple[int, ...], words: str
) -> None:
    [other] = save(
        tmp_path, other={**load_file(models[1]), "layer.weight": torch.ones(shape, dtype=BF16)}
    )
    complaints = (
        "'layer.weight' is [37, 61] in",
        f"and {list(shape)} in",
        "other.safetensors'",
        words,
    )
    for flags in ((), ("--mismatch=error",)):
        hint = check_refused(models[0], other, *complaints, flags=flags).splitlines()[-1]
        ways = [way in hint for way in ("--mismatch overlap", "--mismatch base")]
        assert ways == [bool(words), True], "what would not help is not advised"
    if not words:
        complaints += ("more than the number of rows", "--mismatch base")
        check_refused(models[0], other, *complaints, flags=("--mismatch=overlap",))


# Rare types are merged by the plain engine, which gives the same bits, unless slow tests are asked
# for.
RARE = [(*types, {}) for types in ((F32, F32), (BF16, F32), (F32, BF16), (F16, BF16), (F64, F32))]
RARE += [(F32, BF16, SETTINGS[2]), (BF16, BF16, {"dtype": "float32", "drop_rate": 0.5})]


@pytest.mark.parametrize(
    ("base_type", "model_type", "config", "engine"),
    [(BF16, BF16, config, "numba") for config in SETTINGS]
    + [(*case, "plain") for case in RARE]
    + [pytest.param(*case, "numba", marks=pytest.mark.slow) for case in RARE],
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
    tuned = [
        {n: t.to(model_type) for n, t in finetune(base, seed, 0.01).items()} for seed in (1, 2)
    ]
    common = torch.promote_types(base_type, model_type)
    cases = [((45, 20), 1 << 18), ((45, 20), 1024), ((3, 0), 1024), ((3,), 1024)]
    for counts, chunk in cases[:3] if config == SLERP else cases:
        TUNING.min_chunk = TUNING.max_chunk = chunk
        models, padded = [], []
        for model, rows in zip(tuned, counts, strict=False):
            models.append(with_rows(model, rows))
            own, rest = (
                models[-1]["layer.weight"][:37].to(common),
                base["layer.weight"][rows:].to(common),
            )
            padded.append({**model, "layer.weight": torch.cat([own, rest])})
        merged = merge(tmp_path, base, *models, mismatch="overlap", engine=engine, **config)
        assert_same(merged, define(base, padded, **config))
        if config != SLERP:
            assert same_bits(
                *(tensors["layer.weight"][max(counts) :].to(F64) for tensors in (merged, base))
            )


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_mismatch_base_keeps_the_bases_tensor_bit_for_bit(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    base = random_model(dtype=BF16)
    base["layer.weight"][0, 0] = -0.0
    models = [
        finetune(base, 1),
        {**finetune(base, 2), "layer.weight": torch.ones(3, 3, 3, dtype=BF16)},
    ]
    merged = merge(tmp_path, base, *models, mismatch="base", **config)
    rest = [
        {name: tensor for name, tensor in model.items() if name != "layer.weight"}
        for model in models
    ]
    assert_same(merged, {**define(base, rest, **config), "layer.weight": base["layer.weight"]})


@pytest.mark.parametrize(
    ("mismatch", "what"), [("overlap", "common rows are merged"), ("base", "base's are kept")]
)
def test_the_report_names_what_does_not_fit(tmp_path: Path, mismatch: str, what: str) -> None:
    base = random_model(dtype=BF16) | {"position_ids": torch.arange(8)}
    first = with_rows(finetune(base, 1), 45)
    extra = {"rotary.inv_freq": torch.ones(4), "attn.bias": torch.ones(4, 4, dtype=torch.bool)}
    extra |= {"attn.masked_bias": torch.tensor(-1e4), "new.weight": torch.ones(3)}
    second = (
        finetune(base, 2) | extra | {"position_ids": torch.arange(12)}
    )  # integers are not merged in any shape
    del second["layer.bias"]
    paths = save(tmp_path, base=base, first=first, second=second)
    report = run_merge(paths[0], paths[1:], tmp_path / OUT, mismatch=mismatch)
    merged = load_file(tmp_path / OUT)
    assert merged.keys() == base.keys()
    assert same_bits(merged["position_ids"], base["position_ids"])
    found = [
        (m.mismatched_tensors, m.missing_tensors, sorted(m.extra_tensors)) for m in report.models
    ]
    assert found == [
        (("layer.weight",), (), []),
        (("position_ids",), ("layer.bias",), sorted(extra)),
    ]
    assert json.loads(json.dumps(report.as_dict()))["models"][0]["mismatched_tensors"] == [
        "layer.weight"
    ]
    lacking, having, odd, *others = report.warnings
    assert "second.safetensors lacks 1 tensor of the base: 'layer.bias'" in lacking
    assert re.search(
        "second.safetensors has 4 tensors that the base lacks: .* and 1 more; ignored$", having
    )
    assert re.search(
        (
            rf"first.safetensors has tensors of other shapes: 'layer.weight' \(\[45, 61]\); "
            rf"the.*{what}$"
        ),
        odd,
    )
    assert not any("of other shapes" in warning for warning in others)


def test_parameters_that_a_model_does_not_have_are_not_counted_as_its_own(tmp_path: Path) -> None:
    base, model = save(
        tmp_path, base={"w": torch.ones(100, 50)}, model={"w": torch.full((40, 50), 1.5)}
    )
    report = run_merge(base, [model], tmp_path / OUT, mismatch="overlap").models[0]
    assert (report.parameters, report.mean_delta) == (40 * 50, 0.5)


def test_mismatch_comes_from_toml_flags_and_recipes(models: list[Path], tmp_path: Path) -> None:
    save_file(with_rows(load_file(models[1]), 45), models[1])
    config, base = (
        str(write_config(tmp_path, mismatch="overlap", verbose=False)),
        load_file(models[0]),
    )
    assert dare.main(["-c", config, "-o", str(tmp_path / "first")]) == 0
    assert not same_bits(tensors_in(tmp_path / "first")["layer.weight"], base["layer.weight"])
    recipe = str(tmp_path / "first" / "dare_recipe.toml")
    assert dare.main(["-q", "-c", recipe, "-o", str(tmp_path / "again")]) == 0
    assert_same(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "first"))
    assert dare.main(["-c", config, "--mismatch", "base"]) == 0
    assert same_bits(load_file(tmp_path / OUT)["layer.weight"], base["layer.weight"]), (
        "flags beat TOML"
    )


# --- tied heads -----------------------------------------------------------------------------------

TIED: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},
    {"text_config": {"tie_word_embeddings": True}},
]
TIED += [
    {"model_type": "gpt2", "text_config": [1]}
]  # not stated: a head that is missing must be the embedding


def tied_models(dtype: torch.dtype = BF16) -> tuple[Tensors, Tensors]:
    """A base whose head is its embedding, and a fine-tune of it that was saved without the head."""
    base = random_model(dtype=dtype, shapes={EMBEDDING: (40, 16), "model.norm.weight": (16,)})
    return base | {HEAD: base[EMBEDDING].clone()}, finetune(base, 1)


@pytest.mark.parametrize("where", ["base", "model"])
@pytest.mark.parametrize("config", TIED)
def test_a_tied_head_that_a_model_lacks_is_merged_like_the_embedding(
    tmp_path: Path, where: str, config: dict[str, Any]
) -> None:
    base, model = tied_models()
    base_path = save_directory(tmp_path / "base", base, **(config if where == "base" else {"x": 1}))
    model_path = save_directory(tmp_path / "model", model, **(config if where == "model" else {}))
    for settings in SETTINGS[:3]:
        report = run_merge(base_path, [model_path], tmp_path / OUT, **settings)
        merged = load_file(tmp_path / OUT)
        assert same_bits(merged[HEAD], merged[EMBEDDING])
        assert not torch.equal(merged[HEAD], base[HEAD])
        assert report.models[0].missing_tensors == ()
        words = f"lacks {HEAD!r}, which is tied to {EMBEDDING!r} and merged like it"
        assert any(words in warning for warning in report.warnings)


def test_a_tied_head_that_all_models_have_stays_the_embedding(tmp_path: Path) -> None:
    """Loaders untie a model whose head and embedding are both stored and differ."""
    base, _ = tied_models()
    paths = [save_directory(tmp_path / "base", base, tie_word_embeddings=True)]
    for seed in range(2):
        model = finetune(base, seed)
        paths.append(
            save_directory(tmp_path / f"m{seed}", model | {HEAD: model[EMBEDDING].clone()})
        )
    run_merge(paths[0], paths[1:], tmp_path / OUT, rules=[{"match": "lm_head*", "drop_rate": 0.1}])
    merged = load_file(tmp_path / OUT)
    assert same_bits(merged[HEAD], merged[EMBEDDING])
    assert not same_bits(merged[EMBEDDING], base[EMBEDDING])


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}])
def test_a_head_that_is_not_tied_stays_the_bases_and_is_listed(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    base, model = tied_models()
    base_path = save_directory(tmp_path / "base", base, **config)
    report = run_merge(base_path, [save_directory(tmp_path / "model", model)], tmp_path / OUT)
    assert same_bits(load_file(tmp_path / OUT)[HEAD], base[HEAD])
    assert report.models[0].missing_tensors == (HEAD,)
    assert any(f"lacks 1 tensor of the base: {HEAD!r}" in warning for warning in report.warnings)


@pytest.mark.parametrize("mismatch", ["overlap", "base"])
@pytest.mark.parametrize("rows", [43, 30])
def test_a_tied_head_follows_an_embedding_of_other_rows(
    tmp_path: Path, mismatch: str, rows: int
) -> None:
    base, model = tied_models()
    base_path = save_directory(tmp_path / "base", base, tie_word_embeddings=True)
    model_path = save_directory(tmp_path / "model", with_rows(model, rows, EMBEDDING))
    run_merge(base_path, [model_path], tmp_path / OUT, mismatch=mismatch)
    merged = load_file(tmp_path / OUT)
    assert same_bits(merged[HEAD], merged[EMBEDDING])
    assert same_bits(merged[EMBEDDING], base[EMBEDDING]) == (mismatch == "base")


def test_a_model_that_has_a_head_keeps_its_mask_beside_one_that_lacks_it(tmp_path: Path) -> None:
    """A mask is drawn by a tensor's own name, whatever the other models have."""
    base, lacking = tied_models(F32)
    base_path = save_directory(tmp_path / "base", base, tie_word_embeddings=True)
    own_path, heads = save_directory(tmp_path / "own", finetune(base, 2)), []
    for other in (base, {name: base[name] for name in lacking}):
        run_merge(base_path, [own_path, save_directory(tmp_path / "other", other)], tmp_path / OUT)
        heads.append(load_file(tmp_path / OUT)[HEAD])
    assert same_bits(*heads)


# --- quantised models -----------------------------------------------------------------------------

FP8, E5M2, I8, U8, I32 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
)
AWQ: dict[str, Any] = {"qweight": (I32, 8, 4), "qzeros": (I32, 1, 2), "scales": (F16, 1, 8)}
NF4: dict[str, Any] = {
    "weight": (U8, 32, 1),
    "weight.absmax": (F32, 2),
    "weight.quant_map": (F32, 16),
}
NF4 |= {"weight.quant_state.bitsandbytes__nf4": (U8, 40)}
NESTED = {
    "weight.absmax": (U8, 2),
    "weight.nested_absmax": (F32, 1),
    "weight.nested_quant_map": (F32, 16),
}
# The parts of a module in each layout: their types and shapes.
LAYOUTS: dict[str, dict[str, Any]] = {
    "e5m2": {"weight": (E5M2, 8, 8), "weight_scale_inv": (F32, 1, 1)},
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
    generator, parts = torch.Generator().manual_seed(3), LAYOUTS[kind].items()
    module = {
        f"layer.{n}": torch.randint(100, size, generator=generator).to(kind)
        for n, (kind, *size) in parts
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
    assert_same(
        {n: merged[n] for n in rest},
        {n: tensor.to(F32 if dtype else F16) for n, tensor in tuned.items()},
    )
    assert merged.keys() - rest.keys() == module.keys()
    for name, tensor in module.items():
        assert (merged[name].dtype, merged[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(merged[name]).tobytes() == raw(tensor).tobytes()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_quantised_module_that_differs_in_one_bit_anywhere_is_refused(
    tmp_path: Path, check_refused: Refusal, kind: str
) -> None:
    module, rest = quantised(kind)
    for name in module:
        other = {n: t.clone() for n, t in module.items()}
        raw(other[name])[0] ^= 1
        base, model = save(tmp_path, base=module | rest, model=other | rest)
        complaints = (
            f"tensor {name!r} is part of a quantised module",
            "model.safetensors'",
            "before quantising",
        )
        check_refused(
            base,
            model,
            *complaints,
            flags=("--dtype=float32", "--mismatch=overlap", "--engine=plain"),
        )


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_quantised_model_and_a_plain_one_are_not_merged(
    tmp_path: Path, check_refused: Refusal, kind: str
) -> None:
    module, rest = quantised(kind)
    weight = {
        "layer.gate_up_proj" if kind == "mxfp4" else "layer.weight": torch.ones(8, 8, dtype=F16)
    }
    other = quantised("int8" if kind == "awq" else "awq")
    packed, plain, odd = save(
        tmp_path, quantised=module | rest, plain=rest | weight, other=other[0] | other[1]
    )
    complaints = (
        "quantised.safetensors' is quantised",
        "plain.safetensors' is not",
        "before quantising",
    )
    for flags in ((), ("--mismatch=base",)):
        check_refused(plain, packed, *complaints, flags=flags)
        check_refused(packed, plain, *complaints, flags=flags)
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
        {"hidden_size": 64, "sliding_window": None, "vocab_size": 3},
    ),
    (
        {"_name_or_path": "org/one", "vocab_size": 1, "hidden_size": [1]},
        {"_name_or_path": "two", "hidden_size": 2},
    ),
    ({"text_config": {"hidden_size": 4}}, {"hidden_size": 5, "text_config": "hidden_size"}),
]
UNLIKE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"d_ff": 4, "n_head": 2},
        {"n_head": 3, "d_ff": 5},
        "its d_ff is 5, not 4, its n_head is 3, not 2",
    ),
    (ROPE, ROPE | {"rope_theta": 5e5}, "its rope_theta is 500000.0, not 10000"),
    (ROPE, {"rope_parameters": {"rope_theta": 5e5}}, "its rope_theta is 500000.0, not 10000"),
    (
        ROPE,
        {"rope_scaling": {"type": "linear", "factor": 2}},
        "its rope_scaling.rope_type is 'linear', not 'default'",
    ),
    (
        {"rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"factor": 4}},
        "its rope_scaling.factor is 4, not 8.0",
    ),
    (
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        "its tie_word_embeddings is False, not True",
    ),
    (
        {"text_config": {"rms_norm_eps": 1e-5}},
        {"text_config": {"rms_norm_eps": 1e-6}},
        "its text_config.rms_norm_eps is 1e-06, not 1e-05",
    ),
]


@pytest.mark.parametrize(("mine", "theirs", "words"), [*((*pair, "") for pair in ALIKE), *UNLIKE])
def test_what_shapes_computation_is_compared_with_the_base(
    pair: Pair,
    tmp_path: Path,
    mine: dict[str, Any],
    theirs: dict[str, Any],
    words: str,
) -> None:
    base, model = pair
    for path, config in ((base, mine), (model, theirs)):
        (path / "config.json").write_text(json.dumps(config))
    merger = DareMerger(base, [model], DareConfig(verbose=False))
    wanted = (
        f"{model} is configured differently from {base}: {words}; check that it was fine-tuned "
        f"from it"
    )
    assert merger.plan(tmp_path / OUT).warnings == ((wanted,) if words else ())
    reverse = DareMerger(model, [base], DareConfig(verbose=False)).plan(tmp_path / OUT).warnings
    assert len(reverse) == bool(words), "one warning, whatever differs"


@pytest.mark.parametrize("part", ["", "text_config"])
def test_a_base_of_another_architecture_is_refused_unless_the_user_knows(
    pair: Pair, tmp_path: Path, check_refused: Refusal, part: str
) -> None:
    for path, kind in zip(pair, ("llama", "qwen2"), strict=True):
        config = {"model_type": kind}
        (path / "config.json").write_text(json.dumps({part: config} if part else config))
    words = (
        "model_type is 'qwen2', not 'llama'\nhint: give the base that it was fine-tuned from, "
        "or add --any-base"
    )
    check_refused(*pair, "is another kind of model than", words)
    arguments = ["-q", "-b", str(pair[0]), "-m", str(pair[1])]
    assert dare.main(["analyze", *arguments]) == 0, "which is how to find out about a base"
    out = tmp_path / "merged"
    assert dare.main([*arguments, "-o", str(out), "--any-base"]) == 0
    recipe = out / "dare_recipe.toml"
    assert tomllib.loads(recipe.read_text())["dare"]["any_base"] is True
    assert dare.main(["-q", "-c", str(recipe), "-o", str(tmp_path / "again")]) == 0
    assert dare.main(["verify", "-q", str(out)]) == 0
    (warning,) = run_merge(pair[0], [pair[1]], out, any_base=True).warnings
    assert "model_type is 'qwen2', not 'llama'" in warning


def test_a_base_that_is_also_a_model_gets_one_warning(pair: Pair, tmp_path: Path) -> None:
    (warning,) = run_merge(pair[0], [pair[1], pair[0]], tmp_path / "out.safetensors").warnings
    assert "is the base itself" in warning
