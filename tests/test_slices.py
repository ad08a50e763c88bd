"""Models made of layers of other models: copied, scaled, merged; their files, recipes, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dare import DareConfig, DareMerger, dare_merge
from tests.scene import contents
from tests.support import (
    BF16,
    F32,
    Capture,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    examples,
    family_model,
    low_rank,
    random_model,
    read_json,
    run,
    save_directory,
    tensors_in,
    tune,
    write_adapter,
)
from tests.test_fp8 import quantise
from tests.test_tokenizer import write_tokenizer

DEPTHS = {"a": 3, "b": 4}
COPY = ("--method", "passthrough", "-q")
Slices = list[tuple[str, int, int]]


def shapes_of(depth: int) -> dict[str, tuple[int, ...]]:
    layers = {
        f"model.layers.{k}.{part}.weight": (6, 6) for k in range(depth) for part in ("attn", "mlp")
    }
    outside = {"model.norm.weight": (6,), "lm_head.weight": (9, 6)}
    return {"model.embed_tokens.weight": (9, 6), **layers, **outside}


def make(name: str, dtype: torch.dtype = F32) -> Tensors:
    return random_model(sum(map(ord, name)), dtype, shapes_of(DEPTHS[name]))


def save_pair(folder: Path, dtype: torch.dtype = F32) -> None:
    for name, depth in DEPTHS.items():
        kinds = ["full" if k % 2 else name for k in range(depth)]
        config = {"model_type": "llama", "num_hidden_layers": depth, "layer_types": kinds}
        save_directory(folder / name, make(name, dtype), **config, eos_token_id=[1, 2, 3][:depth])


def name_slices(folder: Path, slices: Slices) -> list[dict[str, Any]]:
    return [{"model": folder / name, "layers": [start, stop]} for name, start, stop in slices]


def stack(slices: Slices, **models: Tensors) -> Tensors:
    """What layers one after the other should be."""
    first, last = models[slices[0][0]], models[slices[-1][0]]
    made = {"model.embed_tokens.weight": first["model.embed_tokens.weight"]}
    order = [(name, k) for name, start, stop in slices for k in range(start, stop)]
    for place, (name, k) in enumerate(order):
        for key, tensor in models[name].items():
            if key.startswith(f"model.layers.{k}."):
                made[key.replace(f"layers.{k}.", f"layers.{place}.")] = tensor
    return made | {key: last[key] for key in ("model.norm.weight", "lm_head.weight")}


def merge_stack(folder: Path, slices: Slices, output: Path, **config: Any) -> None:
    settings = DareConfig(method="passthrough", verbose=False, engine="plain", **config)
    DareMerger(name_slices(folder, slices), [], settings).merge(output, force=True)


RANGES = st.sampled_from(["a", "b"]).flatmap(
    lambda name: st.tuples(
        st.just(name), st.integers(0, DEPTHS[name]), st.integers(0, DEPTHS[name])
    ).map(lambda each: (each[0], min(each[1:]), max(each[1:])))
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    save_pair(folder)
    return folder


@examples(10)
@given(slices=st.lists(RANGES, min_size=1, max_size=5))
def test_any_layers_are_copied_in_any_order(pair: Path, slices: Slices) -> None:
    """Left out, repeated, reordered: what is written is what copying by hand gives."""
    if any(start < stop for _, start, stop in slices):
        merge_stack(pair, slices, pair / "tall.safetensors")
        wanted = stack(slices, a=make("a"), b=make("b"))
        assert_same(load_file(pair / "tall.safetensors"), wanted)


@pytest.mark.parametrize("family", ["qwen", "llama", "gpt2"])
@pytest.mark.slow  # importing transformers takes longer than most of the suite
def test_transformers_loads_a_stack_and_computes_what_its_layers_do(
    tmp_path: Path, family: str
) -> None:
    model = family_model(family)
    model.save_pretrained(tmp_path / "m")
    order = [1, 0, 1]
    (tmp_path / "tall.toml").write_text(
        '[dare]\nmethod = "passthrough"\n[models]\noutput_file = "tall"\n'
        'base_file = [{model = "m", layers = [1, 2]}, {model = "m", layers = [0, 2]}]\n'
    )
    run("-c", tmp_path / "tall.toml", "-q")
    loaded = type(model).from_pretrained(tmp_path / "tall")
    inner = model.transformer if family == "gpt2" else model.model
    name = "h" if family == "gpt2" else "layers"
    layers = getattr(inner, name)
    setattr(inner, name, torch.nn.ModuleList([layers[k] for k in order]))
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    assert getattr(loaded.config, key) == len(order)
    model.config.num_hidden_layers = len(order)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[k] for k in order]
    tokens = torch.arange(1, 9).reshape(1, -1)
    with torch.no_grad():
        logits = [each.eval()(tokens, use_cache=False).logits for each in (loaded, model)]
    assert torch.equal(*logits)


def test_the_configuration_has_an_entry_for_each_layer(tmp_path: Path) -> None:
    """Of its own model's; lists of tokens are no lists of layers. Numbers of layers are new."""
    save_pair(tmp_path)
    numbers = {
        "a": {"mlp_only_layers": [0, 2], "moe_layers": [], "rope_scaling_layers": [0, 1, 2]},
        "b": {"mlp_only_layers": [1], "moe_layers": [0, 3], "rope_scaling_layers": []},
    }
    for name in DEPTHS:  # as models of text and images have it
        path = tmp_path / name / "config.json"
        table = read_json(path) | numbers[name]
        path.write_text(json.dumps({"model_type": "x", "text_config": table, **table}))
    merge_stack(tmp_path, [("a", 1, 3), ("b", 0, 3)], tmp_path / "tall")
    config = read_json(tmp_path / "tall" / "config.json")
    for table in (config, config["text_config"]):
        assert table["num_hidden_layers"] == 5
        assert table["layer_types"] == ["full", "a", "b", "full", "b"]
        assert table["eos_token_id"] == [1, 2, 3]
        assert [table[key] for key in numbers["a"]] == [[1, 3], [2], [0, 1]]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scales_multiply_by_rule_and_by_layer(tmp_path: Path, dtype: torch.dtype) -> None:
    """In float32; what has none keeps its bits; in memory it is the same."""
    save_pair(tmp_path, dtype)
    rules = [
        {"match": "*attn*", "scale": {"gradient": [0.12345, 0.67891]}},
        {"match": "lm_head*", "scale": 0},
    ]
    slices: Slices = [("a", 1, 3), ("b", 1, 2)]
    merge_stack(tmp_path, slices, tmp_path / "tall", rules=rules)
    plain = stack(slices, a=make("a", dtype), b=make("b", dtype))
    wanted = plain | {"lm_head.weight": torch.zeros_like(plain["lm_head.weight"])}
    for k, scale in enumerate((0.12345, 0.40118, 0.67891)):
        name = f"model.layers.{k}.attn.weight"
        wanted[name] = (plain[name].float() * scale).to(dtype)
    made = tensors_in(tmp_path / "tall")
    torch.testing.assert_close(made, wanted, rtol=1e-6, atol=0)
    assert_same(dare_merge(plain, [], DareConfig(method="passthrough", rules=rules)), made)


@pytest.mark.parametrize("config", [{"drop_rate": 0.5}, {"method": "slerp", "drop_rate": 0.0}])
def test_stacks_are_merged_like_models_that_are_stored_so(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """A base and models, each of layers of several models; one may be stored so already."""
    save_pair(tmp_path, BF16)
    models = {name: make(name, BF16) for name in DEPTHS}
    columns: list[Slices] = [
        [("a", 0, 2), ("b", 1, 3)],
        [("b", 0, 2), ("a", 1, 3)],
        [("b", 2, 4), ("b", 0, 2)],
    ]
    stored = [
        save_directory(tmp_path / f"stored {k}", stack(column, **models))
        for k, column in enumerate(columns)
    ]
    settings = DareConfig(verbose=False, any_base=True, **config)
    made = []
    sources = [name_slices(tmp_path, column) for column in columns]
    for base, *others in (sources, [sources[0], *stored[1:]], stored):
        DareMerger(base, others, settings).merge(tmp_path / f"out {len(made)}")
        made.append(tensors_in(tmp_path / f"out {len(made)}"))
    assert_same(made[0], made[2])
    assert_same(made[1], made[2])


def test_a_recipe_makes_the_same_bytes_from_the_same_models(
    tmp_path: Path, refused: Refusal, capsys: Capture
) -> None:
    """Also in shards, in parts, continued, and where two models have the same last name."""
    tune(job_elements=64)
    for name in DEPTHS:
        save_directory(tmp_path / name / "final", make(name))
    (tmp_path / "tall.toml").write_text(
        '[dare]\nmethod = "passthrough"\nmax_shard_size = "600B"\n'
        '[models]\noutput_file = "tall"\n'
        '[[models.base_file]]\nmodel = "a/final"\nlayers = [0, 2]\n'
        '[[models.base_file]]\nmodel = "b/final"\nlayers = [1, 4]\n'
    )
    words = ("-c", tmp_path / "tall.toml")
    run(*words, "--dry-run")
    assert "a/final[0:2] + b/final[1:4]" in capsys.readouterr().out
    run(*words, "--part", "1/2")
    run(*words, "--resume")
    tall = tmp_path / "tall"
    assert_same(tensors_in(tall), stack([("a", 0, 2), ("b", 1, 4)], a=make("a"), b=make("b")))
    assert "# Layers of 2 models" in (tall / "README.md").read_text()
    given = ("-b", tmp_path / "a/final", "-m", tmp_path / "b/final")
    run("verify", tall, "-q")  # by the paths in its configuration
    run("-c", tall, *given, "-o", tmp_path / "again", "-q")
    assert contents(tmp_path / "again") == contents(tall)
    save_directory(tmp_path / "b/final", make("a"))
    refused(1, ("cannot find 'b/final'", "is another one"), "verify", tall, *given)


def test_fp8_layers_keep_their_bytes_and_scales(tmp_path: Path, monkeypatch: Patch) -> None:
    names = [name for name in shapes_of(4) if "layers" in name]
    monkeypatch.setattr("tests.test_fp8.WEIGHTS", names)
    model = quantise(random_model(1, F32, shapes_of(4)), "tensor")
    quantised = {"quant_method": "fp8"}
    save_directory(tmp_path / "m", model, model_type="llama", quantization_config=quantised)
    slices: Slices = [("m", 2, 4), ("m", 0, 1)]
    merge_stack(tmp_path, slices, tmp_path / "tall")
    assert_same(tensors_in(tmp_path / "tall"), stack(slices, m=model))


def test_layers_may_be_of_a_model_with_an_adapter_on_top(tmp_path: Path) -> None:
    save_pair(tmp_path, BF16)
    made = []
    for k in (0, 2):
        pair = low_rank(f"model.layers.{k}.attn", (6, 6), seed=k)
        write_adapter(tmp_path / f"l{k}", pair, target_modules=["attn"])
        run("-b", f"{tmp_path / 'a'}+{tmp_path / f'l{k}'}", *COPY, "-o", tmp_path / f"m{k}")
    for names in ((f"a+{tmp_path}/l0", f"a+{tmp_path}/l2", "b"), ("m0", "m2", "b")):
        slices = [{"model": f"{tmp_path}/{name}", "layers": [k, 3]} for k, name in enumerate(names)]
        config = DareConfig(method="passthrough", verbose=False, engine="plain")
        DareMerger(slices, [], config).merge(tmp_path / f"out {len(made)}")
        made.append(tensors_in(tmp_path / f"out {len(made)}"))
    assert_same(*made)
    name = "model.layers.0.attn.weight"
    assert not torch.equal(made[0][name], make("a", BF16)[name])
    run("verify", tmp_path / "out 0", "-q")


@pytest.mark.parametrize(
    ("base", "status", "words"),
    [
        ('[{model = "a", layers = [0, 4]}]', 1, "'a' has 3 layers, so there is no layer 3"),
        ('[{model = "a", layers = [1, 1]}]', 1, "would have no layers"),
        ('[{model = "a", layers = [2, 1]}]', 2, "does not name layers of a model"),
        ('[{model = "a", layers = [0, 1.5]}]', 2, "does not name layers of a model"),
        ('[{model = "a"}]', 2, "does not name layers of a model"),
        ("[{model = 3, layers = [0, 1]}]", 2, "a model must be a path"),
        ("[]", 2, "base_file must be a path"),
        ('["a", "b"]', 2, "base_file must be a path"),
        ('[{model = "none", layers = [0, 1]}]', 1, "there is no file or directory 'none'"),
        ('[{model = "lora", layers = [0, 1]}]', 1, "'lora' is a LoRA adapter"),
        (
            '[{model = "a", layers = [0, 1]}, {model = "wide", layers = [0, 1]}]',
            1,
            "layers of 'wide' do not fit 'a': its hidden_size is 8, not 6",
        ),
        (
            '[{model = "a", layers = [0, 1]}, {model = "other", layers = [0, 1]}]',
            1,
            "its layers are called 'h.', not 'model.layers.'",
        ),
        (
            '[{model = "a", layers = [0, 1]}, {model = "headless", layers = [0, 1]}]',
            1,
            "'headless', whose layers come last, has no 'lm_head.weight'",
        ),
        ('"a"\nmerge_files = ["b"]', 2, "method passthrough takes 0 models, not 1"),
        ('"a"\nmerge_files = [{model = "a", layers = [0, 1]}]', 2, "must be a list of paths"),
    ],
)
def test_layers_that_make_no_model_are_refused(
    tmp_path: Path, refused: Refusal, base: str, status: int, words: str
) -> None:
    for name in DEPTHS:
        save_directory(tmp_path / name, make(name), hidden_size=6)
    save_directory(tmp_path / "wide", make("a"), hidden_size=8)
    save_directory(tmp_path / "other", random_model(0, F32, {"h.0.w": (2, 2), "h.1.w": (2, 2)}))
    headless = {name: tensor for name, tensor in make("a").items() if name != "lm_head.weight"}
    save_directory(tmp_path / "headless", headless, hidden_size=6)
    write_adapter(tmp_path / "lora", {"base_model.model.x.lora_A.weight": torch.ones(2, 2)})
    (tmp_path / "c.toml").write_text(
        f'[dare]\nmethod = "passthrough"\n[models]\noutput_file = "out"\nbase_file = {base}\n'
    )
    refused(status, words, "-c", tmp_path / "c.toml")


def test_what_else_goes_without_models_is_refused(tmp_path: Path, refused: Refusal) -> None:
    save_pair(tmp_path)
    base = 'base_file = [{model = "a", layers = [0, 2]}]\noutput_file = "out"\n'
    whole = '{model = "b", layers = [0, 4]}, '
    many = f"base_file = [{whole * 2501}]\n"
    copy = 'method = "passthrough"\n'
    for dare, models, status, words in (
        ('method = "linear"', base, 2, "there are no models to merge"),
        (copy, "output_file = 'out'", 2, "there is no base model"),
        (copy, f"{many}output_file = 'out'", 1, "would have too many layers"),
        (
            f"{copy}adapter_rank = 2\nscale = 0.5",
            base,
            2,
            "the changes of models, and there are no models",
        ),
        ("scale = 2", f'{base}merge_files = ["a"]', 2, "scale means nothing to method linear"),
        ("adapter_rank = 4", f'{base}merge_files = ["a"]', 1, "has no name to refer to it by"),
    ):
        (tmp_path / "c.toml").write_text(f"[dare]\n{dare}\n[models]\n{models}\n")
        refused(status, words, "-c", tmp_path / "c.toml")
    flags = ("-b", tmp_path / "a", "--method", "passthrough")
    refused(2, "there are no models to look at", "analyze", *flags)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, None),
        ({"drop_rate": 0, "rescale": True}, None),
        ({"drop_rate": 0.5}, "drop_rate has no effect"),
        ({"drop": "della", "rescale": False}, "drop and rescale have no effect"),
        ({"rules": [{"match": "*", "lambda_coeff": 0}]}, "lambda_coeff has no effect"),
    ],
)
def test_settings_of_deltas_have_no_effect_without_models(
    pair: Path, config: dict[str, Any], words: str | None
) -> None:
    """What a recipe or a file of mergekit's always sets is nothing to warn of."""
    merger = DareMerger(pair / "a", [], DareConfig(method="passthrough", **config))
    expected = () if words is None else (f"{words}: without models there are no deltas",)
    assert merger.plan(pair / "plain").warnings == expected


@pytest.mark.parametrize("tokenizer", ["union", "a", "b"])
def test_layers_of_models_with_other_tokens_take_no_tokenizer(
    tmp_path: Path, monkeypatch: Patch, refused: Refusal, tokenizer: str
) -> None:
    """The embedding is the first model's, and the head the last one's: no tokenizer fits both."""
    monkeypatch.chdir(tmp_path)
    save_pair(tmp_path)
    slices = [{"sources": [{"model": name, "layer_range": [0, 2]}]} for name in "ab"]
    recipe = {"merge_method": "passthrough", "tokenizer_source": tokenizer, "slices": slices}
    Path("m.yaml").write_text(json.dumps(recipe))
    write_tokenizer(Path("a"), {})
    write_tokenizer(Path("b"), {}, {"padding_side": "left"})
    run("m.yaml", "same", "-q", "--engine", "plain")
    write_tokenizer(Path("b"), {"<new>": 8})
    refused(1, "'a' and 'b' have different tokenizers", "m.yaml", "out")
