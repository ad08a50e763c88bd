"""Any index, adapter, configuration or recipe gets an answer, in little memory: a merge or a
sentence, no crash."""

import json
import os
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

import dare
from darelib import config
from darelib.models.peft import OTHER_ADAPTERS
from darelib.output.directory import recipe_metadata
from tests.scene import put
from tests.support import (
    INDEX,
    Capture,
    Patch,
    Refusal,
    damaged,
    examples,
    low_rank,
    save,
    save_directory,
    save_sharded,
    tensors_in,
    with_header,
    write_adapter,
)

Answer = Callable[..., int]
Paths = tuple[Path, Path]
SHARD = "model-00001-of-00002.safetensors"
ODD_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=[]), max_size=6),
    st.sampled_from(
        [
            "",
            ".",
            "..",
            "~",
            "~\0",
            "~nobody-of-that-name",
            "a\0b",
            "\ud800",
            "\udcff",
            "a\nb",
            "\x1b[2J",
        ]
    ),
    st.sampled_from(
        [
            "\u202e",
            "x" * 70_000,
            "x" * 5000,
            "x" * 300,
            "CON",
            "a/b/c",
            "./x",
            "C:x",
            "out.safetensors",
        ]
    ),
)
SCALARS = st.booleans() | st.floats() | st.integers(-(2**70), 2**70) | st.integers(0, 4)
ODD_VALUES = st.recursive(
    st.none() | SCALARS | ODD_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS, inner, max_size=3),
    max_leaves=6,
)
TOML_VALUES = st.recursive(
    SCALARS | st.datetimes() | ODD_TEXTS.filter(lambda text: text.isascii() or text.isprintable()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def one_or_some(
    table: dict[str, st.SearchStrategy[Any]], odd: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """One key with any value, or any keys with likely values."""
    ones = [st.fixed_dictionaries({key: values | odd}) for key, values in table.items()]
    return st.one_of(*ones, st.fixed_dictionaries({}, optional=table))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: Patch) -> Paths:
    """A base file and a sharded fine-tune of it, as small as can be.

    No name makes a test ask the network.
    """
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    [path] = save(tmp_path, base={"layer.weight": torch.ones(4, 3), "layer.bias": torch.ones(4)})
    tuned = {"layer.weight": torch.full((4, 3), 1.001), "layer.bias": torch.full((4,), 1.001)}
    return path, save_sharded(tmp_path / "model", tuned, [["layer.weight"], ["layer.bias"]])


@pytest.fixture
def answer(capsys: Capture) -> Answer:
    """Run the command on anything: it must do what it was asked to, or say in one line why it
    cannot."""

    def run(*arguments: str | Path, output: Path | None = None) -> int:
        capsys.readouterr()
        status = dare.main(
            [*map(str, arguments), *(["-o", str(output)] if output else []), "--engine", "plain"]
        )
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert (status in (0, 1, 2), len(errors)) == (True, status != 0), printed.err
        assert not re.search("this is a bug|Traceback", printed.err), printed.err
        # Nothing but the ends of lines could move a terminal's cursor, or do worse to it.
        assert all(letter.isprintable() or letter == "\n" for letter in printed.out + printed.err)
        if output is not None:
            assert output.exists() == (status == 0)
            assert not list(output.parent.glob("*.partial"))
            assert status or (tensors_in(output) if output.is_dir() else load_file(output))
            put(output, {})
        return status

    return run


@examples(14)
@given(
    index=ODD_VALUES | st.fixed_dictionaries({"weight_map": ODD_VALUES}),
    tensor=st.sampled_from(["layer.weight", "layer.bias", "other"]) | ODD_TEXTS,
    file=ODD_VALUES
    | st.sampled_from([SHARD, f"./{SHARD}", f"x/../{SHARD}", f"{SHARD}/x", INDEX, "y/" * 3000]),
    drop=st.booleans(),
)
def test_any_index_is_answered(
    small: Paths, answer: Answer, index: Any, tensor: str, file: Any, drop: bool
) -> None:
    base, model = small
    shards = {"layer.weight": SHARD, "layer.bias": SHARD.replace("00001", "00002", 1)}
    for content in (index, {"weight_map": ({} if drop else shards) | {tensor: file}}):
        (model / INDEX).write_text(json.dumps(content))
        answer("-b", base, "-m", model, output=base.with_name("out.safetensors"))
    answer("-b", model / INDEX, "-m", base, output=base.with_name("out.safetensors"))


GOOD_ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
PATTERNS = st.text("()[]{}*+?|\\^$.layer12,-<=!:P", max_size=8) | st.sampled_from(
    [
        "layer",
        "l.*r",
        "(",
        "[",
        "[[l]ayer",
        "a{99999999999}",
        "(?i)layer",
        "a**",
        "\\",
        "(?P<n>l",
        ")|(",
    ]
)
ADAPTER_KEYS: dict[str, st.SearchStrategy[Any]] = {
    "r": st.integers(0, 4),
    "lora_alpha": st.floats() | st.integers(-(10**400), 10**400),
    "rank_pattern": st.dictionaries(PATTERNS, st.integers(0, 3) | ODD_VALUES, max_size=3),
    "alpha_pattern": st.dictionaries(PATTERNS, st.floats() | ODD_VALUES, max_size=2),
    "init_lora_weights": st.sampled_from([True, "gaussian", "pissa"]),
    **dict.fromkeys(
        ("use_rslora", "fan_in_fan_out", *OTHER_ADAPTERS),
        st.sampled_from([None, False, True, [], {}, 0]),
    ),
    **dict.fromkeys(("peft_type", "bias", "base_model_name_or_path", "target_modules"), ODD_TEXTS),
}
ADAPTER_NAMES = st.tuples(
    st.sampled_from(["", "base_model.model.", "base_model.model.base_model.model.", "."]),
    st.sampled_from(
        ["layer", "layer.weight", "", ".", "a\nb", "lora_A", "layer.lora_A", "x.layer"]
    ),
    st.sampled_from(
        [
            "",
            ".lora_A.weight",
            ".lora_B.weight",
            ".lora_A",
            ".lora_embedding_A",
            ".lora_B.default.weight",
        ]
    )
    | st.sampled_from(
        [".modules_to_save.weight", ".base_layer.weight", ".lora_A.weight.weight", ".bias"]
    ),
).map("".join)
SHAPES = st.sampled_from([(2, 3), (4, 2), (2,), (), (0, 0), (2, 0), (4, 3), (2, 3, 1, 1)])


@examples(27)
@given(
    text=one_or_some(ADAPTER_KEYS, ODD_VALUES).map(
        lambda table: json.dumps(GOOD_ADAPTER | table).encode()
    )
    | ODD_VALUES.map(json.dumps).map(str.encode)
    | damaged(json.dumps(GOOD_ADAPTER).encode()),
    tensors=st.none()
    | st.dictionaries(ADAPTER_NAMES.filter(bool), SHAPES.map(torch.ones), min_size=1, max_size=4),
)
def test_any_adapter_is_answered(small: Paths, answer: Answer, text: bytes, tensors: Any) -> None:
    adapter = write_adapter(small[0].with_name("adapter"), tensors or low_rank("layer", (4, 3)))
    if tensors is None:
        (adapter / "adapter_config.json").write_bytes(text)
    answer("-b", small[0], "-m", adapter, output=small[0].with_name("out.safetensors"))


KOHYA_NAMES = st.tuples(
    st.sampled_from(
        [
            "lora_unet_layer",
            "lora_te_layer",
            "lora_te3_layer",
            "lora_unet_",
            "layer",
            "lora_unet_other",
        ]
    ),
    st.sampled_from(
        [".lora_down.weight", ".lora_up.weight", ".alpha", ".dora_scale", ".", ".lora_down", ""]
    ),
).map("".join)
VALUES = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool])


@examples(20)
@given(tensors=st.dictionaries(KOHYA_NAMES.filter(bool), st.tuples(SHAPES, VALUES), max_size=5))
def test_any_lora_file_is_answered(small: Paths, answer: Answer, tensors: Any) -> None:
    whole = {
        "lora_unet_layer.lora_down.weight": torch.ones(2, 3),
        "lora_unet_layer.lora_up.weight": torch.ones(4, 2),
    }
    odd = {name: torch.ones(shape).to(kind) for name, (shape, kind) in tensors.items()}
    [lora] = save(small[0].parent, lora=whole | odd)
    answer("-b", small[0], "-m", lora, output=small[0].with_name("out.safetensors"))


MODELS = {"base_file": "base.safetensors", "merge_files": [f"model/{INDEX}", "model"]}
EACH = st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=2, max_size=2)
NUMBERS = (
    EACH
    | st.floats()
    | st.integers(-(10**400), 10**400)
    | st.sampled_from([0, 1, 2, 2**63 - 1, True])
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(config.SETTINGS, NUMBERS) | {
    "method": st.sampled_from(["linear", "ties", "slerp", "LINEAR"]),
    "weights": st.lists(st.floats(-1e308, 1e308) | st.integers(-1, 3), max_size=3),
    "dtype": st.sampled_from(["float32", "bf16", "float8"]),
    "mismatch": st.sampled_from(["error", "overlap", "base"]),
    "max_shard_size": st.sampled_from(["1", "1B", "5 kb", "9" * 15 + "TiB", "0.0001KB", "\u0661GB"])
    | st.integers(),
    "engine": st.sampled_from(["auto", "numba", "plain", "cuda"]),
}
RULES = st.fixed_dictionaries(
    {"match": st.text("*?[]!-layer.", max_size=6) | TOML_VALUES},
    optional={key: SETTINGS[key] | TOML_VALUES for key in config.RULE_SETTINGS},
)
ODD_MODELS = dict.fromkeys(
    [*MODELS, "tokenizer", "chat_template"], TOML_VALUES | st.lists(TOML_VALUES)
)
ODD_RECIPE = dict.fromkeys(
    ["version", "inputs", "mask", "files"], TOML_VALUES | st.lists(TOML_VALUES)
)
CONFIGS = st.one_of(
    one_or_some(SETTINGS, TOML_VALUES).map(lambda table: {"dare": table}),
    st.lists(RULES, max_size=2).map(lambda rules: {"rules": rules}),
    one_or_some(ODD_MODELS, TOML_VALUES).map(lambda table: {"models": MODELS | table}),
    (TOML_VALUES | one_or_some(ODD_RECIPE, TOML_VALUES)).map(lambda value: {"recipe": value}),
).map(lambda tables: tomli_w.dumps({"models": MODELS} | tables).encode())
PLAIN = {
    "models": MODELS,
    "dare": {"drop_rate": [0.5, 0.25]},
    "rules": [{"match": ["*bias*"], "drop_rate": 0.5}],
}


@examples(34)
@given(
    text=CONFIGS | damaged(tomli_w.dumps(PLAIN).encode()) | st.binary(max_size=30),
    folder=st.booleans(),
)
def test_any_configuration_is_answered(
    small: Paths, answer: Answer, text: bytes, folder: bool
) -> None:
    config = small[0].with_name("config.toml")
    config.write_bytes(text)
    answer("-c", config, output=small[0].with_name("out" if folder else "out.safetensors"))


@pytest.mark.parametrize(
    "key", ["base_file", "merge_files", "output_file", "tokenizer", "chat_template"]
)
def test_paths_that_cannot_be_are_refused_wherever_they_are_given(
    small: Paths, answer: Answer, key: str
) -> None:
    for path in (
        "~\0",
        "a\0b",
        "x" * 5000,
        "~" + "x" * 5000,
        "base.safetensors/x",
        "y/" * 3000 + "z",
    ):
        named = MODELS | {"output_file": "out", key: [path] if key == "merge_files" else path}
        config = small[0].with_name("config.toml")
        config.write_text(tomli_w.dumps({"models": named}))
        assert answer("-c", config) == 1
        assert "\0" in path or answer("verify", path) in (1, 2)


@pytest.mark.parametrize(
    "rule",
    [
        "a:drop_rate=" + "1" * 5000,
        "a:drop_rate=" + "[" * 5000,
        "a:" + "b." * 5000 + "c=1",
        "a:drop_rate=0.5}\nx={y=1",
    ],
    ids=["digits", "lists", "keys", "lines"],
)
def test_a_rule_given_by_a_flag_cannot_break_the_command(
    small: Paths, answer: Answer, rule: str
) -> None:
    output = small[0].with_name("out.safetensors")
    assert answer("-b", small[0], "-m", small[1], "--rule", rule, output=output) == 2


@examples(20)
@given(data=st.data())
def test_any_recipe_in_a_merged_file_is_answered(
    small: Paths, answer: Answer, data: st.DataObject
) -> None:
    """Even if it is sealed as ours are."""
    merged, changed, config = (
        small[0].with_name(name) for name in ("merged.safetensors", "x.safetensors", "x.toml")
    )
    assert merged.exists() or answer("-b", small[0], "-m", small[1], "-o", merged) == 0
    content = merged.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    recipe = header["__metadata__"]["dare_recipe"]
    tables = tomllib.loads(recipe)
    homes = [tables["models"], tables["dare"], tables["recipe"], tables["recipe"]["inputs"][1]]
    home = data.draw(st.sampled_from(homes))
    home[data.draw(st.sampled_from(sorted(home)))] = data.draw(TOML_VALUES)
    texts = damaged(recipe.encode()) | st.just(tomli_w.dumps(tables).encode())
    text = data.draw(texts).decode(errors="replace")
    header["__metadata__"] = recipe_metadata(text)
    changed.write_bytes(with_header(json.dumps(header), content[8 + length :]))
    answer("verify", changed)
    config.write_text(text)
    answer("-c", config, output=small[0].with_name("again.safetensors"))


@pytest.mark.parametrize(
    "recipe",
    [
        "recipe = 3",
        "[recipe]\nfiles = 3",
        "[recipe]\nfiles = [[1], {}]",
        "a = " + "[" * 50_000,
        "\0",
        "a." * 3000 + "b=1",
    ],
)
def test_a_hostile_recipe_in_a_directory_does_not_let_it_be_replaced(
    small: Paths, answer: Answer, refused: Refusal, recipe: str
) -> None:
    output = save_directory(small[0].with_name("out"), {"w": torch.ones(3)})
    (output / "dare_recipe.toml").write_text(recipe)
    refused(1, "out", "-b", small[0], "-m", small[1], "-o", output)
    assert answer("verify", output) in (1, 2)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\ud800"}',
        '{"a_config": ' * 400 + "{}" + "}" * 400,
        '{"a_config": ' * 900 + "{}" + "}" * 900,
        "[" * 100_000,
        '{"dtype": 3, "text_config": [], "x": NaN}',
        "\ufeff{}",
        "",
        '{"torch_dtype": {}}',
    ],
    ids=range(8),
)
def test_any_config_json_of_the_base_is_answered(small: Paths, answer: Answer, text: str) -> None:
    folder = save_directory(small[0].with_name("folder"), load_file(small[0]))
    (folder / "config.json").write_text(text)
    for flags in ([], ["--dtype", "bfloat16"]):
        answer("-b", folder, "-m", small[1], *flags, output=small[0].with_name("out"))


TOKENS = {
    "model": ODD_VALUES | st.fixed_dictionaries({"vocab": ODD_VALUES}),
    "added_tokens": ODD_VALUES,
}


@examples(9)
@given(
    table=ODD_VALUES
    | st.fixed_dictionaries({}, optional=TOKENS)
    | st.just({"added_tokens": [{"content": "x"}]})
)
@example(table={"model": {"vocab": {"": 4}}})
def test_any_tokenizer_is_no_obstacle_unless_it_numbers_more_rows_than_there_are(
    small: Paths, answer: Answer, table: Any
) -> None:
    [base] = save(small[0].parent, embedded={"embed_tokens.weight": torch.ones(4, 3)})
    (small[1] / "tokenizer.json").write_text(json.dumps(table))
    status = answer(
        "-b", base, "-m", base, "--tokenizer", small[1], output=small[0].with_name("out")
    )
    numbers = re.findall(r"\d+", json.dumps(table, ensure_ascii=False))
    assert status == 0 or max(map(int, numbers), default=0) > 3


@pytest.mark.skipif(sys.platform != "linux", reason="only here may names be any bytes")
def test_a_directory_with_a_file_whose_name_is_no_text_is_merged(
    small: Paths, answer: Answer
) -> None:
    folder = save_directory(small[0].with_name("folder"), load_file(small[0]), model_type="x")
    name = os.fsdecode(b"n\xff.txt")
    output = small[0].with_name("out")
    (folder / name).write_text("a licence")
    assert answer("-b", folder, "-m", small[1], "-o", output) == 0
    assert (output / name).read_text() == "a licence"
    assert answer("verify", output) == 0


# --- files that are all there is room for ---

MEASURED = (
    "import sys, dare; print(dare.main(sys.argv[1:]), "
    "open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
)
EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def table(count: int, value: str, name: str = "{}") -> str:
    """A table of so many entries, each with its number in its name."""
    return "{" + ",".join(f'"{name.format(k)}":{value}' for k in range(count)) + "}"


# What is far beyond what a model needs, and what is just within: the file that it is in, and
# its text.
LARGE_FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "tensors": ("model", lambda: table(249_900, EMPTY, "{:0121}")),
    "too many tensors": ("model", lambda: table(260_000, EMPTY)),
    "a header": ("model", lambda: table(1, '""', "{:064000000}")),
    "metadata": ("model", lambda: table(1, table(90_000, '""'), "__metadata__")),
    "a path of an index": (INDEX, lambda: '{"weight_map":{"w":"' + "x/" * 16_800_000 + '"}}'),
    "patterns of an adapter": (
        "adapter_config.json",
        lambda: (
            '{"peft_type":"LORA","rank_pattern":{"' + "[\\\\u0100-\\\\uffff]" * 50_000 + '":1}}'
        ),
    ),
    "empty rules": ("config.toml", lambda: "[[rules]]\n" * 100_000),
    "lists of a configuration": ("config.toml", lambda: "a=" + "[" * 300_000),
    "parts of a key": ("config.toml", lambda: '"a".' * 200_000 + "b=1"),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", LARGE_FILES)
def test_a_large_file_of_nonsense_is_refused_in_the_usual_memory(small: Paths, kind: str) -> None:
    (name, make) = LARGE_FILES[kind]
    odd = small[0].with_name("odd")
    odd.mkdir()
    (odd / "adapter_model.safetensors").write_bytes(with_header("{}", b""))
    (odd / name).write_bytes(with_header(make(), b"") if name == "model" else make().encode())
    model = odd / name if name == "model" else odd
    output = small[0].with_name("out.safetensors")
    arguments = ["-b", small[0], "-m", model, "-o", output, "--engine", "plain"]
    arguments = ["-c", odd / name] if name == "config.toml" else arguments
    words = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(
        words, cwd=Path(dare.__file__).parent, capture_output=True, text=True, timeout=120
    )
    status, peak = map(int, done.stdout.split())
    assert status == (2 if name == "config.toml" else 1), done.stderr
    assert re.fullmatch(f"error: .*{re.escape(str(odd))}.*\nhint: .*\n", done.stderr), done.stderr
    assert peak < 400 * 1024
