"""Models inside models: names that begin otherwise are found, and merge as if they did not."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dare import ConfigError, DareConfig, DareError, dare_merge
from tests import support
from tests.support import (
    BF16,
    Refusal,
    Tensors,
    assert_same,
    finetune,
    load_file,
    make_merger,
    random_model,
    read_json,
    run,
    save,
    save_directory,
    slow,
    tensors_in,
    write_config,
)

merge_paths = partial(support.merge_paths, engine="plain", drop_rate=0.5)
run_merge = partial(support.run_merge, engine="plain", drop_rate=0.5)

TEXT: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (12, 8),
    **{f"model.layers.{k}.self_attn.q_proj.weight": (8, 8) for k in range(3)},
    **{f"model.layers.{k}.mlp.up_proj.weight": (16, 8) for k in range(3)},
    **{f"model.layers.{k}.input_layernorm.weight": (8,) for k in range(3)},
    "model.norm.weight": (8,),
    "lm_head.weight": (12, 8),
}
# With attention that looks like the text's.
VISION: dict[str, tuple[int, ...]] = {
    "vision_tower.patch_embedding.weight": (8, 3, 2, 2),
    **{f"vision_tower.encoder.layers.{k}.self_attn.q_proj.weight": (8, 8) for k in range(3)},
    **{f"vision_tower.encoder.layers.{k}.mlp.fc1.weight": (16, 8) for k in range(3)},
    **{f"vision_tower.encoder.layers.{k}.layer_norm1.weight": (8,) for k in range(3)},
    "multi_modal_projector.linear_1.weight": (8, 8),
}
LLAMA = {"model_type": "llama", "hidden_size": 8}
LLAVA = {"model_type": "llava", "text_config": LLAMA}


def rename(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """The same by other names: of the prefixes, the first that fits is replaced."""
    made = {}
    for name, tensor in tensors.items():
        old, new = next(((o, n) for o, n in pairs if name.startswith(o)), ("", ""))
        made[new + name.removeprefix(old)] = tensor.clone()
    return made


# How a language model's names are changed in what holds it, or in what is left of it.
INSIDE = {
    "transformers 4": [("", "language_model.")],
    "transformers 5": [("model.", "model.language_model.")],
    "compiled": [("", "_orig_mod.")],
    "distributed": [("", "module.")],
    "twice": [("", "model.")],
    "adapted": [("", "base_model.model.")],
    "without a head": [("model.", "")],
}
# And those of one that sees, between transformers 4 and 5.
VERSIONS = {
    "llava": [
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ],
    "llava 5": [
        ("model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
    "clip": [
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("vision_tower.", "vision_tower.vision_model."),
    ],
}


@pytest.fixture(scope="module")
def text() -> list[Tensors]:
    """A language model and a fine-tune of it."""
    base = random_model(1, BF16, TEXT)
    return [base, finetune(base, 1)]


@pytest.fixture(scope="module")
def vision() -> Tensors:
    return random_model(2, BF16, VISION)


def merge_alike(
    folder: Path, base: Tensors, model: Tensors, same: Tensors, **config: Any
) -> tuple[str, ...]:
    """A model must merge as the same does with the base's names. Gives the warnings."""
    paths = save(folder, base=base, math=model, same=same)
    expected = merge_paths(paths[0], paths[2:], folder / "expected.safetensors")
    out = folder / "out.safetensors"
    warnings = run_merge(paths[0], [paths[1]], out, **config).warnings
    assert_same(load_file(out), expected)
    assert expected.keys() == base.keys()
    return warnings


def check_again(out: Path) -> None:
    """What was merged can be merged once more by its recipe, and verified."""
    run("-q", "-c", out, "-o", out.with_name("again.safetensors"))
    assert out.with_name("again.safetensors").read_bytes() == out.read_bytes()
    run("verify", "-q", out)


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize("sees", [True, slow(False)])
def test_a_language_model_is_merged_into_what_holds_it(
    tmp_path: Path, text: list[Tensors], vision: Tensors, kind: str, sees: bool
) -> None:
    own = [rename(model, *INSIDE[kind]) for model in text]
    outside = vision if sees else {}
    [warning] = merge_alike(tmp_path, own[0] | outside, text[1], own[1])
    assert f"matched 12 of 12 tensors; {len(outside)} of the base's are not in it" in warning
    check_again(tmp_path / "out.safetensors")


@pytest.mark.parametrize("kind", INSIDE)
def test_what_a_model_holds_besides_the_base_is_left_out(
    tmp_path: Path, text: list[Tensors], vision: Tensors, kind: str
) -> None:
    model = rename(text[1], *INSIDE[kind]) | vision
    [warning] = merge_alike(tmp_path, text[0], model, text[1])
    assert f"0 of the base's are not in it and stay; {len(vision)} of its own" in warning


@pytest.mark.parametrize(
    ("kind", "other"),
    # Most names of llava and clip are equal, so that the others are as they are.
    [pair for pair in product(VERSIONS, VERSIONS) if {*pair} != {"llava", "clip"}],
)
def test_models_that_see_are_merged_whichever_version_saved_them(
    tmp_path: Path, text: list[Tensors], vision: Tensors, kind: str, other: str
) -> None:
    base = text[0] | vision
    model = finetune(base, 4)
    renamed = [rename(tensors, *VERSIONS[kind]) for tensors in (base, model)]
    merge_alike(tmp_path, renamed[0], rename(model, *VERSIONS[other]), renamed[1])


def write_pair(tmp_path: Path, text: list[Tensors], vision: Tensors, **kinds: Any) -> list[Path]:
    """A model that sees, as transformers 4 has it, and a language model, with configurations."""
    base = rename(text[0], *INSIDE["transformers 4"]) | vision
    return [
        save_directory(tmp_path / "base", base, **kinds.get("base", LLAVA)),
        save_directory(tmp_path / "model", text[1], **kinds.get("model", LLAMA)),
    ]


def test_the_configuration_of_the_text_part_is_compared(
    tmp_path: Path, text: list[Tensors], vision: Tensors, check_refused: Refusal
) -> None:
    paths = write_pair(tmp_path, text, vision)
    out = tmp_path / "out"
    run_merge(paths[0], [paths[1]], out)
    assert read_json(out / "config.json") == LLAVA
    run("verify", "-q", out)
    [found] = run_merge(paths[1], [paths[0]], tmp_path / "reverse").warnings
    assert "its 'language_model.*' is the base's '*'" in found
    paths = write_pair(tmp_path, text, vision, model={**LLAMA, "model_type": "mistral"})
    check_refused(*paths, "text_config.model_type is 'mistral', not 'llama'", "--any-base")
    check_refused(*reversed(paths), "model_type is 'llama', not 'mistral'", "--any-base")
    paths = write_pair(tmp_path, text, vision, model={**LLAMA, "hidden_size": 9})
    warnings = run_merge(paths[0], [paths[1]], out).warnings
    assert any("its text_config.hidden_size is 9, not 8" in warning for warning in warnings)
    part = {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"}}
    paths = write_pair(tmp_path, text, vision, base=part, model={"model_type": "qwen2"})
    run_merge(paths[0], [paths[1]], out)


@pytest.mark.parametrize("is_base", [True, False])
def test_a_head_that_is_tied_is_merged_like_the_embedding(
    tmp_path: Path, text: list[Tensors], vision: Tensors, is_base: bool
) -> None:
    """is_base: of what holds the language model. What its whole configuration says counts."""
    models = [{n: t for n, t in model.items() if n != "lm_head.weight"} for model in text]
    models[0]["lm_head.weight"] = models[0]["model.embed_tokens.weight"].clone()
    whole = 0 if is_base else 1
    models[whole] = rename(models[whole], *INSIDE["transformers 4"]) | vision
    tied = {"tie_word_embeddings": True}
    told = {**LLAVA, "text_config": {**LLAMA, "tie_word_embeddings": False}, **tied}
    configs = [told, {**LLAMA, **tied}] if is_base else [LLAMA, told]
    folders = [tmp_path / "base", tmp_path / "model"]
    for folder, model, config in zip(folders, models, configs, strict=True):
        save_directory(folder, model, **config)
    merged = merge_paths(folders[0], folders[1:], tmp_path / "out")
    prefix = "language_model." if is_base else ""
    head = f"{prefix}lm_head.weight"
    assert torch.equal(merged[head], merged[f"{prefix}model.embed_tokens.weight"])
    assert not torch.equal(merged[head], models[0][head])


def test_other_numbers_of_tokens_are_met_as_everywhere(
    tmp_path: Path, text: list[Tensors], vision: Tensors, check_refused: Refusal
) -> None:
    own = [rename(model, *INSIDE["transformers 5"]) for model in text]
    more = {
        name: torch.cat([tensor, tensor[:4]]) if len(tensor) == 12 else tensor
        for name, tensor in (own[0] | vision).items()
    }
    paths = save(tmp_path, base=more, model=text[1], same=own[1])
    check_refused(*paths[:2], "[12, 8]", "--mismatch overlap")
    expected, merged = (
        merge_paths(paths[0], [path], tmp_path / "out.safetensors", mismatch="overlap")
        for path in reversed(paths[1:])
    )
    assert_same(merged, expected)
    # A head that is all that its prefix is for.
    new, old = (rename(text[0], *VERSIONS[version]) for version in ("llava 5", "llava"))
    paths = save(
        tmp_path, base=new, model=old | {"language_model.lm_head.weight": torch.ones(9, 8)}
    )
    check_refused(*paths, "'lm_head.weight' is [12, 8]", "[9, 8]")


def test_what_only_another_part_of_the_base_has_is_left_out(
    tmp_path: Path, text: list[Tensors], vision: Tensors
) -> None:
    bias = {f"layers.{k}.self_attn.q_proj.bias": torch.full((8,), k / 9) for k in range(3)}
    eye = vision | {f"vision_tower.encoder.{name}": tensor for name, tensor in bias.items()}
    own = [rename(model, *INSIDE["transformers 5"]) | eye for model in text]
    model = text[1] | {f"model.{name}": tensor + 1 for name, tensor in bias.items()}
    merge_alike(tmp_path, own[0], model, own[1])


@pytest.mark.parametrize("part_of", ["critic", {"": "critic."}], ids=["flag", "table"])
def test_where_several_parts_fit_the_user_says_which(
    tmp_path: Path, text: list[Tensors], check_refused: Refusal, part_of: Any
) -> None:
    base = rename(text[0], ("", "actor.")) | rename(text[0], ("", "critic."))
    paths = save(tmp_path, base=base, math=text[1])
    words = ("its '*' is the base's 'actor.*', or its '*' is the base's 'critic.*'", "--part-of")
    check_refused(*paths, *words)
    check_refused(*paths, "begins with 'crtic.'", flags=["--part-of", "crtic"])
    merge_alike(tmp_path, base, text[1], rename(text[1], ("", "critic.")), part_of=part_of)
    check_again(tmp_path / "out.safetensors")


def test_of_prefixes_the_longest_counts_and_a_part_of_the_model_can_be_named(
    tmp_path: Path, text: list[Tensors], check_refused: Refusal
) -> None:
    base = rename(text[0], ("", "actor.")) | rename(text[0], ("", "critic."))
    same = rename(text[1], ("model.", "actor.model."), ("", "critic."))
    both = {"": "critic.", "model.": "actor.model."}
    merge_alike(tmp_path, base, text[1], same, part_of=both)
    pair = rename(text[1], ("", "actor.")) | rename(text[0], ("", "critic."))
    [plain, whole] = save(tmp_path, plain=text[0], whole=pair)
    check_refused(plain, whole, "its 'actor.*' is the base's '*', or its 'critic.*'")
    for part_of in ("actor.", {"actor.": ""}):
        merge_alike(tmp_path, text[0], pair, text[1], part_of=part_of)


def test_the_part_that_is_named_is_meant_even_if_the_names_fit_as_they_are(
    tmp_path: Path, text: list[Tensors], vision: Tensors, check_refused: Refusal
) -> None:
    base = text[0] | rename(text[0], ("", "draft."))
    own = rename(text[1], ("", "draft."))
    for model in (text[1], own, text[0] | own):  # names of the part are merged as they are
        merge_alike(tmp_path, base, model, own, part_of="draft.")
    paths = save(tmp_path, base=base, math=text[1])
    words = "has a name that begins with 'nonsense.'"
    check_refused(*paths, words, "the base's are draft.", flags=["--part-of", "nonsense."])
    with pytest.raises(DareError, match=words):
        run_merge(paths[0], [paths[1]], tmp_path / "no", part_of={"model.": "nonsense."})
    [seeing] = save(tmp_path, seeing=text[0] | vision)
    part = "multi_modal_projector."
    check_refused(seeing, paths[1], "nothing of", repr(part), flags=["--part-of", part])
    # What sees has most of the names, and those of its text begin otherwise.
    more = {f"vision_tower.b{k}.weight": torch.full((3, 3), k / 7) for k in range(9)}
    sights = vision | more
    base, same = (rename(model, *INSIDE["transformers 5"]) | sights for model in text)
    merge_alike(tmp_path, base, text[1] | sights, same, part_of="model.language_model.")


def test_a_table_of_prefixes_is_a_setting_like_any_other(
    tmp_path: Path, text: list[Tensors], vision: Tensors
) -> None:
    models = [rename(model, *INSIDE["transformers 5"]) for model in text]
    save(tmp_path, base=models[0] | vision, math=text[1], code=models[1])
    config = write_config(tmp_path, 'part_of = {"model." = "model.language_model."}\n', drop_rate=0)
    run("-q", "-c", config, "--engine", "plain")
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "code", "code")]
    expected = merge_paths(paths[0], paths[1:], tmp_path / "expected.safetensors", drop_rate=0)
    assert_same(load_file(tmp_path / "out.safetensors"), expected)
    new = tmp_path / "new.toml"
    run("analyze", "-q", "-c", config, "--engine", "plain", "--write-config", new)
    assert 'part_of = {"model." = "model.language_model."}' in new.read_text()
    with pytest.raises(ConfigError, match="part_of is for files"):
        dare_merge(models[0], [models[1]], DareConfig(part_of="model."))
    for wrong in ("", 3, {}, {"model.": 1}, "\ud800"):
        with pytest.raises(ConfigError, match="part_of must be"):
            DareConfig(part_of=wrong)  # type: ignore[arg-type]


def test_a_search_writes_files_and_in_memory_it_is_refused(
    tmp_path: Path, text: list[Tensors], vision: Tensors
) -> None:
    own = [rename(model, *INSIDE["transformers 5"]) for model in text]
    base, math = save(tmp_path, base=own[0] | vision, math=text[1])
    merger = make_merger(base, [math], engine="plain")
    axes = {"lambda_coeff": [0.0, 1.0]}

    def count_changed(path: str) -> int:
        found = load_file(path)
        return sum(not torch.equal(found[name], tensor) for name, tensor in own[0].items())

    winner = merger.sweep(count_changed, axes, folder=tmp_path).winner
    assert winner.params == {"lambda_coeff": 1.0}
    with pytest.raises(DareError, match=r"math.safetensors' is no whole model of plain weights"):
        merger.sweep(count_changed, axes, in_memory=True)


def test_names_that_are_alike_by_chance_are_not_mixed_up(
    tmp_path: Path, text: list[Tensors], vision: Tensors, check_refused: Refusal
) -> None:
    base = rename(text[0], ("model.", "language_model."))
    other = {"model.norm.weight": torch.ones(8)}
    paths = save(tmp_path, last=base | other, first=other | base, model=text[1], eye=vision)
    for path in paths[:2]:
        check_refused(path, paths[2], "in several ways", "--part-of")
    check_refused(*paths[2:], "has no tensor in common with", "'model.embed_tokens.weight'")


SMALL = {**support.GROUPED, "head_dim": 8, "tie_word_embeddings": False}
EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2}
PICTURE = {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16}
# What transformers calls a model that sees and its configuration, its text's and its vision's.
SEEING = {
    "Llava": ("llama", "clip_vision_model", "LlamaForCausalLM"),
    "Mistral3": ("mistral", "pixtral", "MistralForCausalLM"),
    "Gemma3": ("gemma3_text", "siglip_vision_model", "Gemma3ForCausalLM"),
    "Qwen2VL": ("qwen2_vl_text", "qwen2_vl", "Qwen2ForCausalLM"),
    "Qwen2_5_VL": ("qwen2_5_vl_text", "qwen2_5_vl", "Qwen2ForCausalLM"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("live", [True, False])
def test_models_of_transformers_are_merged_into_one_another(
    tmp_path: Path, family: str, live: bool
) -> None:
    """live: with the names of the modules, which are not always those that are saved."""
    transformers = pytest.importorskip("transformers")
    kind, eye, text_class = SEEING[family]
    sights = {"model_type": eye, **EYE, **PICTURE, "out_hidden_size": 16}
    texts = {"model_type": kind, **SMALL}
    parts = {"text_config": texts, "vision_config": sights, "tie_word_embeddings": False}
    config = getattr(transformers, f"{family}Config")(**parts)
    plain = getattr(transformers, text_class)
    torch.manual_seed(0)
    seeing = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    speaking = plain(plain.config_class(**SMALL))
    base, math = tmp_path / "base", tmp_path / "math"
    for path, model in ((base, seeing), (math, speaking)):
        model.save_pretrained(path)
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        if live:
            support.save_file(state, path / "model.safetensors", {"format": "pt"})
    merged = merge_paths(base, [math], tmp_path / "out", drop_rate=0)
    before = tensors_in(base)
    own = {name.removeprefix("model."): t for name, t in speaking.state_dict().items()}
    changed = {name: t for name, t in merged.items() if not torch.equal(t, before[name])}
    assert len(changed) == sum(bool(tensor.std()) for tensor in own.values())  # norms are ones
    for name, tensor in changed.items():
        [end] = [end for end in own if f".{name}".endswith(f".{end}")]
        assert torch.allclose(tensor, own[end], atol=1e-6)
    back = merge_paths(math, [base], tmp_path / "back", drop_rate=0)
    assert back.keys() == tensors_in(math).keys()
    run("verify", "-q", tmp_path / "out")
