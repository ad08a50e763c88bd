"""Output directories: what is in them, how they are split, what they may replace, and that inputs
are never touched."""

import html
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dare import ConfigError, DareConfig
from darelib.config import parse_size
from darelib.output.destination import list_files
from tests.scene import contents
from tests.support import (
    BF16,
    INDEX,
    POSIX,
    Capture,
    Models,
    Pair,
    Patch,
    Refusal,
    assert_same,
    define,
    finetune,
    low_rank,
    merge_paths,
    random_model,
    read_json,
    run,
    run_merge,
    save,
    save_directory,
    save_sharded,
    snapshot,
    tensors_in,
    to_hub_cache,
    write_adapter,
)

MADE = {"README.md", "dare_recipe.toml", "model.safetensors"}  # in each directory
# recipes that claim nothing


@pytest.fixture
def no_output(refused: Refusal) -> Any:
    """A merge into this output must fail with these words and leave everything as it was; always:
    even if forced."""

    def check(
        models: Any,
        output: Any,
        *words: str,
        status: int = 1,
        flags: Any = (),
        always: bool = False,
    ) -> None:
        for force in ([], ["--force"]) if always else ([],):
            refused(status, words, "-b", models[0], "-m", models[1], "-o", output, *flags, *force)

    return check


def merge_directory(pair: Pair, output: Path, *flags: Any) -> None:
    run("-q", "-b", pair[0], "-m", pair[1], "-o", output, *flags)
    assert not any("partial" in name for name in os.listdir(output.parent)), "no litter"


def fill(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_side_files_of_the_base_come_along_and_weights_and_training_do_not(
    pair: Pair, tmp_path: Path
) -> None:
    odd = os.fsdecode(b"caf\xe9.txt") if sys.platform == "linux" else "caf\u00e9.txt"
    kept = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "LICENSE",
        "modeling_own.py",
        "additional_chat_templates/tool.jinja",
        "1_Pooling/config.json",
        odd,
    )
    left = (
        "readme.md",
        "README.md",
        "dare_recipe.toml",
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "tf_model.h5",
        "model-00001-of-00002.safetensors",
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/model.onnx",
        "training_args.bin",
        "trainer_state.json",
        "checkpoint-10/config.json",
        ".git/config",
    )
    fill(
        pair[0],
        {name: f'{{"is": {k}}}' for k, name in enumerate(kept)}
        | dict.fromkeys(left, "of the base"),
    )
    fill(pair[1], {"config.json": "{}", "more.txt": "of a fine-tune"})
    report = run_merge(pair[0], [pair[1]], tmp_path / "out")
    assert set(list_files(tmp_path / "out")) == {*kept, *MADE}
    assert set(report.side_files) == {*kept, *MADE} - {"model.safetensors"}
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (pair[0] / name).read_bytes()
    assert "of the base" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_config_json_names_the_type_of_the_tensors(
    pair: Pair, tmp_path: Path, key: str | None, stored: str
) -> None:
    """Also if the base's own was wrong."""
    before: dict[str, Any] = {"hidden_size": 3, "quantization_config": {"dtype": "x"}}
    before |= {key: stored, "text_config": {"dtype": stored, "more": 1}} if key else {}
    fill(pair[0], {"config.json": json.dumps(before)})
    run_merge(pair[0], [pair[1]], tmp_path / "out", dtype="bfloat16")
    after = before | {key or "torch_dtype": "bfloat16"}
    after |= {"text_config": {"dtype": "bfloat16", "more": 1}} if key else {}
    assert read_json(tmp_path / "out" / "config.json") == after


# --- modules that are stored apart, as sentence-transformers does ---------------------------------

DENSE = "2_Dense"


@pytest.fixture
def encoders(pair: Pair) -> Pair:
    """The pair with a pooling module, which has no weights, and a dense one, which has."""
    modules = [{"idx": k, "path": path} for k, path in enumerate(("", "1_Pooling", DENSE))]
    base = random_model(7, BF16, {"linear.weight": (40, 50), "linear.bias": (40,)})
    for folder, tensors in zip(pair, (base, finetune(base, 8)), strict=True):
        (folder / "modules.json").write_text(json.dumps(modules))
        save_directory(folder / DENSE, tensors, in_features=50)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text("{}")
    return pair


def test_modules_that_are_stored_apart_are_merged_and_stay_apart(
    encoders: Pair, tmp_path: Path
) -> None:
    base, math = encoders
    out = tmp_path / "out"
    models = ["-q", "-b", base, "-m", math]
    run(*models, "-o", out, "--max-shard-size", "4KB", "--resume")
    prefixed = [
        {f"{DENSE}/{name}": tensor for name, tensor in tensors_in(folder / DENSE).items()}
        for folder in encoders
    ]
    expected = define(prefixed[0], prefixed[1:])
    merged = tensors_in(out / DENSE)
    assert_same({f"{DENSE}/{name}": tensor for name, tensor in merged.items()}, expected)
    assert tensors_in(out).keys() == tensors_in(base).keys()
    assert {f"{DENSE}/config.json", "1_Pooling/config.json", "modules.json"} <= {*list_files(out)}
    assert read_json(out / INDEX)["weight_map"].keys() == tensors_in(base).keys()
    run("verify", "-q", out)
    run("-q", "-c", out, "-o", tmp_path / "again")
    assert contents(out) == contents(tmp_path / "again")
    for flags in (("--part", "1/2"), ("--part", "2/2"), ("--resume",)):
        run(*models, "-o", tmp_path / "parts", "--max-shard-size", "4KB", *flags)
    assert contents(out) == contents(tmp_path / "parts")
    run(*models, "-o", tmp_path / "one.safetensors")
    assert load_file(tmp_path / "one.safetensors").keys() == tensors_in(base).keys()
    run("pack", *models, "-o", tmp_path / "packed")
    run("-q", "-b", base, "-m", tmp_path / "packed", "-o", tmp_path / "like")
    assert_same(tensors_in(tmp_path / "like" / DENSE), tensors_in(tmp_path / "again" / DENSE))


@pytest.mark.parametrize("pickled", [False, True])
def test_modules_that_cannot_be_merged_are_the_base_s_and_it_is_said(
    encoders: Pair, tmp_path: Path, capsys: Capture, pickled: bool
) -> None:
    base, math = encoders
    name = f"{DENSE}/model.safetensors"
    (math / name).unlink()
    if pickled:
        (base / name).unlink()
        name = f"{DENSE}/pytorch_model.bin"
        (base / name).write_bytes(b"a pickle")
    run("-b", base, "-m", math, "-o", tmp_path / "out")
    assert (name if pickled else f"{DENSE}/linear.weight") in capsys.readouterr().err
    if pickled:
        assert (tmp_path / "out" / name).read_bytes() == b"a pickle"
    else:
        assert_same(load_file(tmp_path / "out" / name), load_file(base / name))
    run("verify", "-q", tmp_path / "out")


@POSIX
@pytest.mark.parametrize("linked", [0, 1])
def test_a_module_that_is_a_link_is_refused(
    encoders: Pair, tmp_path: Path, no_output: Any, linked: int
) -> None:
    """Without it the output would not load."""
    module = encoders[linked] / DENSE
    module.symlink_to(module.rename(tmp_path / "elsewhere"))
    no_output(encoders, tmp_path / "out", str(module), "is a link")


def test_the_tokenizer_may_come_from_elsewhere(tmp_path: Path, no_output: Any) -> None:
    base = random_model(dtype=BF16, shapes={"model.embed_tokens.weight": (40, 3)})
    pair = [save_directory(tmp_path / name, base, model_type="x") for name in ("base", "math")]
    fill(pair[0], {"LICENSE": "base", "vocab.txt": "of the base only", "assets/some.model": "base"})
    other = tmp_path / "other"
    tokens = {"model": {"vocab": {f"t{k}": k for k in range(40)}}}
    fill(other, {"tokenizer.json": json.dumps(tokens), "LICENSE": "other"})
    merge_directory((pair[0], pair[1]), tmp_path / "out", "--tokenizer", other)
    made = {*MADE, "config.json", "assets/some.model", "LICENSE", "tokenizer.json"}
    assert set(list_files(tmp_path / "out")) == made
    assert (tmp_path / "out" / "LICENSE").read_text() == "base"
    beyond = {"added_tokens": [{"id": 41, "content": "x"}]}
    fill(other, {"tokenizer.json": json.dumps(tokens | beyond)})
    for output, given, status, words in (
        ("x", "other", 1, ("41", "40", "--tokenizer union")),
        ("x", "math", 1, ("math",)),
        ("x", "nowhere", 1, ("nowhere",)),
        ("x.safetensors", "other", 2, ("tokenizer means nothing",)),
    ):
        flags = ["--tokenizer", tmp_path / given]
        no_output(pair, tmp_path / output, *words, status=status, flags=flags)


def test_the_model_card_has_front_matter_and_the_recipe(pair: Pair, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    out = tmp_path / "out"
    run_merge(pair[0], [pair[1]] * 2, out, engine="plain")
    card = hub.ModelCard.load(out / "README.md")
    assert card.data.base_model == ["base", "math"]
    assert card.data.library_name == "transformers"
    assert card.data.base_model_relation == "merge"
    assert card.data.tags == ["merge", "dare", "linear"]
    assert "# A merge of 2 models by dare and linear\n" in card.text
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert f"```toml\n{file.metadata()['dare_recipe']}```" in card.text


@pytest.mark.parametrize(
    ("settings", "tags", "paper"),
    [
        ({"method": "wudi"}, ["wudi"], "2503.08099"),
        ({"method": "ties", "drop": "magnitude"}, ["magnitude", "ties"], "2306.01708"),
        ({"method": "karcher"}, ["karcher"], "by karcher"),
    ],
)
def test_the_model_card_names_and_cites_the_method_that_was_used(
    pair: Pair, tmp_path: Path, settings: dict[str, str], tags: list[str], paper: str
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    out = tmp_path / "out"
    run_merge(pair[0], [pair[1]] * 2, out, engine="plain", **settings)
    card = hub.ModelCard.load(out / "README.md")
    assert card.data.tags == ["merge", *tags]
    prose = card.text.partition("```")[0]
    assert paper in prose
    assert "dare" not in prose.lower()


@pytest.mark.skipif(os.name == "nt", reason="such names are not allowed there")
@pytest.mark.parametrize("packed", [False, True])
def test_names_in_a_model_card_are_no_markup(tmp_path: Path, packed: bool) -> None:
    import yaml

    name = "a`b|c]<img src=x>\n---\n# \U0001f600\\"
    shown = name.replace("\n", "\\n")
    base = random_model(dtype=BF16)
    paths = [
        save_directory(tmp_path / name, base),
        save_directory(tmp_path / f"{name}2", finetune(base, 1)),
    ]
    command = "pack" if packed else "merge"
    run(command, "-q", "-b", paths[0], "-m", paths[1], "-o", tmp_path / "out")
    _, front, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    named = yaml.safe_load(front)["base_model"]
    assert named == (shown if packed else [shown, f"{shown}2"])
    prose = text.partition("```")[0]
    assert not re.search("<img|a`b|^---$", prose, re.M)
    spans = re.findall("<code>(.*?)</code>", prose)
    assert {html.unescape(span) for span in spans} == {shown, f"{shown}2"}
    assert not {*"`|<[*_"} & {*"".join(spans)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "ties"}, ["sign", "at random"]),
        ({"drop_rate": 0}, ["what each fine-tune changed is summed up"]),
        ({"drop_rate": 0, "rules": [{"match": "*bias", "drop_rate": 0.5}]}, ["most of what each"]),
        (
            {"drop": ["della", "breadcrumbs", "random"], "drop_rate": 0.5},
            ["https://arxiv.org/abs/2406.11617", "https://arxiv.org/abs/2312.06795"],
        ),
    ],
    ids=str,
)
def test_the_model_card_says_what_was_dropped(
    pair: Pair, tmp_path: Path, config: Any, words: list[str]
) -> None:
    run_merge(pair[0], [pair[1]] * 3, tmp_path / "out", **config, engine="plain")
    card = (tmp_path / "out" / "README.md").read_text()
    assert [word for word in words if word not in card] == []


def test_a_base_without_a_configuration_is_warned_about(models: Models, tmp_path: Path) -> None:
    report = run_merge(models[0], models[1:], tmp_path / "bare")
    assert any("config.json" in warning for warning in report.warnings)
    assert set(list_files(tmp_path / "bare")) == MADE, "what lies beside a file belongs to no model"


@pytest.mark.parametrize("limit", ["1B", 4514, 4515, 4636, 10_000, 19_637, 19_638, "20kB"])
def test_shards_hold_no_more_than_the_limit_unless_one_tensor_does(
    pair: Pair, tmp_path: Path, limit: Any
) -> None:
    out = tmp_path / "out"
    report = run_merge(pair[0], [pair[1]], out, max_shard_size=limit)
    # One file is never split.
    whole = merge_paths(pair[0], [pair[1]], tmp_path / "out.safetensors", max_shard_size=limit)
    assert_same(tensors_in(out), whole)
    sizes = [sum(t.nbytes for t in load_file(out / name).values()) for name in report.files]
    several = len(report.files) > 1
    assert (out / INDEX).exists() == several
    for name, size in zip(report.files, sizes, strict=True):
        assert size <= parse_size(limit) or len(load_file(out / name)) == 1
    for size, other in itertools.pairwise(sizes):
        assert size + other > parse_size(limit), "no more files than are needed"
    if several:
        assert read_json(out / INDEX) == {
            "metadata": {
                "total_size": sum(tensor.nbytes for tensor in whole.values()),
                "total_parameters": sum(tensor.numel() for tensor in whole.values()),
            },
            "weight_map": {n: f for f in report.files for n in load_file(out / f)},
        }


@pytest.mark.parametrize(
    ("text", "size"),
    {
        "5GB": 5 * 10**9,
        "5gb": 5 * 10**9,
        "1.5GiB": 3 << 29,
        "300 MB": 300 * 10**6,
        " 2TiB ": 2 << 40,
        "10kB": 10_000,
        "10KiB": 10_240,
        "1000": 1000,
        1000: 1000,
        "1B": 1,
    }.items(),
)
def test_sizes_are_read_as_people_write_them(text: Any, size: int) -> None:
    assert parse_size(DareConfig(max_shard_size=text).max_shard_size) == size


@pytest.mark.parametrize(
    "size",
    [
        *("", "GB", "5XB", "5 G B", "-5GB", "5,5GB", "1e9", "0", "0GB", "0.5", "nan", "5GBs"),
        *("1.5.1GB", "0x10", "9" * 16, 0, -1, 1.5, True, None, [5], 1 << 63),
    ],
)
def test_what_is_no_size_is_refused(refused: Refusal, size: Any) -> None:
    if isinstance(size, str):
        refused(2, ("--max-shard-size", repr(size)), f"--max-shard-size={size}")
    with pytest.raises(ConfigError, match="max_shard_size must be a size"):
        DareConfig(max_shard_size=size)


def test_no_spelling_of_an_input_is_taken_as_output(
    tmp_path: Path, monkeypatch: Patch, no_output: Any
) -> None:
    base = random_model(dtype=BF16)
    home = tmp_path / "home"
    first = save_directory(home / "models" / "base", base, model_type="x")
    second = save_sharded(home / "models" / "math", finetune(base, 1), [[name] for name in base])
    (first / "sub").mkdir()
    (home / "link").symlink_to(first)
    (home / "all").symlink_to(home / "models")
    monkeypatch.chdir(second)
    for relation, outputs in {
        "is": [
            first,
            home / "link",
            "../base",
            "./../base/",
            first / "sub" / "..",
            home / "all/base",
            ".",
            "../math",
        ],
        "lies inside": [
            first / "new",
            home / "link" / "new",
            "../base/sub",
            home / "all/base/x.safetensors",
            "new",
        ],
        "holds": [home / "models", home / "all", "..", "../../models", home / "link" / ".."],
    }.items():
        for output in outputs:
            no_output((first, second), output, f"{relation} the input", status=2, always=True)


def test_files_adapters_caches_and_tokenizers_are_inputs_too(
    pair: Pair, tmp_path: Path, no_output: Any
) -> None:
    lone = save(tmp_path / "mine", base=random_model(dtype=BF16), math=random_model(1, BF16))
    adapted = (pair[0], write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61))))
    cached = (pair[0], to_hub_cache(tmp_path / "hub", "org/math", pair[1], "1a2b"))
    fill(pair[1], {"tokenizer.json": "{}"})
    for models, output, *flags in (
        (lone, tmp_path / "mine"),
        (adapted, adapted[1]),
        (adapted, adapted[1] / "new"),
        (adapted, pair[1], "--tokenizer", pair[1]),
        (cached, cached[1]),
        (cached, cached[1].parent.parent / "blobs"),
        (cached, tmp_path / "hub"),
    ):
        no_output(models, output, "the input", status=2, always=True, flags=flags)


def test_what_cannot_be_copied_is_named_at_once(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, no_output: Any
) -> None:
    no_output(("", pair[1]), tmp_path / "out", "is empty", status=2)
    no_output(pair, "", "is empty", status=2)
    fill(pair[0], {"config.json": '{"a":'})
    no_output(pair, tmp_path / "out", "base/config.json' is not valid")
    fill(pair[0], {"config.json": "{}", "vocab.txt": "secret"})
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "vocab" not in str(path) and real(path, mode)
    )
    no_output(pair, tmp_path / "out", "cannot read", "vocab.txt'")


@pytest.mark.parametrize("kind", ["empty directory", "link"])
def test_a_directory_of_this_tool_is_replaced_and_nothing_of_it_survives(
    pair: Pair, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    real = tmp_path / "real"
    (real if kind == "link" else out).mkdir()
    if kind == "link":
        out.symlink_to(real)
    made = []
    for limit, count in (("100B", 4), ("10kB", 2), ("5GB", 1)):
        merge_directory(pair, out, "--max-shard-size", limit, "--force")
        assert len(list(out.glob("*.safetensors"))) == count
        made.append(tensors_in(out))
        assert_same(made[-1], made[0])
    assert set(list_files(out)) == MADE
    assert [out.is_symlink(), real.is_dir()] == [kind == "link"] * 2, "a link keeps leading there"


@pytest.mark.parametrize(
    ("ours", "texts", "words"),
    [
        (True, {"README.md": "what I found out about it"}, "'README.md'"),
        (
            True,
            {"eval/results.json": "{}", "notes.txt": "mine"},
            "'eval/results.json', 'notes.txt'",
        ),
        (True, {"link/precious.txt": "mine"}, "'link'"),
        (True, {"model.safetensors": "trained on"}, "'model.safetensors'"),
        (False, {"notes/precious.txt": "mine"}, "was not made by this tool"),
        *(
            (False, {"dare_recipe.toml": recipe}, "was not made by this tool")
            for recipe in (
                "",
                "[recipe]\nfiles = 3",
                "recipe = 1",
                "not toml",
                "[recipe]\nfiles = []",
            )
        ),
    ],
)
def test_what_this_tool_did_not_write_is_replaced_only_if_forced(
    pair: Pair, tmp_path: Path, no_output: Any, ours: bool, texts: dict[str, str], words: str
) -> None:
    out = tmp_path / "out"
    kept = tmp_path / "kept"
    kept.mkdir()
    if ours:
        merge_directory(pair, out)
    else:
        save_sharded(out, random_model(), [[name] for name in random_model()])
    if "link/precious.txt" in texts:
        (out / "link").symlink_to(kept)
    fill(out, texts)
    if "model.safetensors" in texts:
        save_directory(out, random_model(9, BF16))
    before = snapshot(kept)
    no_output(pair, out, words, "--force")
    merge_directory(pair, out, "--force")
    assert set(list_files(out)) == MADE
    assert snapshot(kept) == before, "what a link leads to is never removed"


def test_a_recipe_with_an_endless_name_is_another_recipe(models: Models, refused: Refusal) -> None:
    """A pattern that tried every letter as the first one of a folder would take days."""
    output = models[0].with_name("out.safetensors")
    recipe = f'models = {{base_file = "{"a" * 900_000}"}}\nrecipe = {{inputs = []}}'
    save_file({}, output, {"dare_recipe": recipe})
    words = ["-b", models[0], "-m", models[1], "-o", output]
    refused(1, ["exists and has another recipe", "--force"], *words)


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_a_merge_of_another_recipe_is_replaced_only_if_forced(
    pair: Pair, tmp_path: Path, no_output: Any, output: str
) -> None:
    out = tmp_path / output
    moved = tmp_path / "elsewhere" / "math"
    shutil.copytree(pair[1], moved)
    seed = ["--seed", "7"]
    for model in (pair[1], pair[1], moved):
        merge_directory((pair[0], model), out, *seed)
    words = ("has another recipe", "--force")
    for models, flags, difference in (
        (pair, [], "dare.seed is 7, not 42"),
        (pair, ["--dry-run"], "dare.seed is 7, not 42"),
        (pair, ["--resume"], "dare.seed is 7, not 42"),
        (pair, ["--part", "1/2"], "dare.seed is 7, not 42"),
        (pair, [*seed, "--rule", "scalar:drop_rate=0"], "rules is None"),
        ((pair[0], pair[0]), seed, "models.merge_files.0 is 'math', not 'base'"),
    ):
        no_output(models, out, *words, difference, flags=flags)
    save_directory(pair[1], random_model(9, BF16))
    no_output(pair, out, *words, "recipe.inputs.1 (math).content_sha256", flags=seed)
    merge_directory(pair, out, "--force")
    assert set(list_files(tmp_path / output)) == (MADE if output == "out" else set())


@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_a_packed_model_of_another_recipe_is_replaced_only_if_forced(
    pair: Pair, tmp_path: Path, no_output: Any, refused: Refusal, output: str
) -> None:
    out = tmp_path / output
    other = save_directory(tmp_path / "code", finetune(random_model(dtype=BF16), 2))
    packing = ["pack", "-q", "-b", pair[0], "-o", out, "-m"]
    words = ("has another recipe", "--force")
    for _ in range(2):
        run(*packing, pair[1])
    refused(1, words, *packing, other)
    refused(1, words, *packing, pair[1], "--seed", "7")
    no_output(pair, out, *words, "recipe.packed")
    merge_directory(pair, out, "--force")
    refused(1, words, *packing, pair[1])
    run(*packing, pair[1], "--force")


def test_a_recipe_of_another_version_is_the_same_unless_it_says_something_else(
    pair: Pair, tmp_path: Path, no_output: Any
) -> None:
    out = tmp_path / "out"
    merge_directory(pair, out)
    recipe = (out / "dare_recipe.toml").read_text()
    version = re.sub('version = ".*"', 'version = "0.1"', recipe)
    for text, difference in (
        (version, ""),
        (version.replace("[dare]", "[dare]\nnews = 1"), "its dare.news is 1"),
        (version.replace("[recipe]", "[recipe]\nnews = 1"), "its recipe.news is 1"),
    ):
        fill(out, {"dare_recipe.toml": text})
        if difference:
            no_output(pair, out, "has another recipe", difference)
        else:
            merge_directory(pair, out)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("thesis", "other things in it"),
        ("notes", "other things in it"),
        ("data", "other things in it"),
        ("repository", "other things in it"),
        ("file", "file' is a file"),
        ("to-file", "to-file' is a file"),
        ("folder.safetensors", "is a directory"),
        ("to-folder.safetensors", "is a directory"),
        ("file/out", "is not writable, or a file"),
        ("file/deeper/out.safetensors", "is not writable, or a file"),
        ("empty", "is the working directory"),
    ],
)
def test_what_is_no_model_is_never_replaced(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, no_output: Any, output: str, words: str
) -> None:
    names = (
        "thesis/chapters/model.safetensors thesis/thesis.tex notes/config.json notes/x.tex"
        " data/data.npy repository/.git/HEAD repository/model.safetensors file"
    )
    fill(tmp_path, dict.fromkeys(names.split(), "mine"))
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "to-folder.safetensors").symlink_to("folder.safetensors")
    monkeypatch.chdir(tmp_path / "empty")
    no_output(pair, tmp_path / output, words, always=True)
