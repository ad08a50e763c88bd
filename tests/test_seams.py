"""What is added is a file and one line, or a row of a table: the examples of docs/contributing.md,
in a copy of it all.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import (
    F32,
    Config,
    Tensors,
    assert_same,
    command,
    finetune,
    random_model,
    read_json,
    save,
    save_directory,
    tensors_in,
)

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text()
BLOCKS = re.findall("```python\n(.*?)```", PAGE, re.S)
[MEDIAN] = [block for block in BLOCKS if "MEDIAN" in block]
[INT8] = [block for block in BLOCKS if "recognise_int8" in block]
[CAP] = re.findall(r'^    "cap": Drop\(\n.*?^    \),\n', PAGE, re.S | re.M)
[MOST] = re.findall(r"^    most: .*?^    \)\n", PAGE, re.S | re.M)
NAMES = ("a", "b", "c")
MODELS = ["--base", "base.safetensors", "--merge", *(f"{name}.safetensors" for name in NAMES)]
# Commands in one process, which prints what each has printed; and merges of tensors: by the name
# of the output, the files that have the base and the models, and the settings.
SCRIPT = """
import contextlib, io, json, sys
from safetensors.torch import load_file, save_file
import dare

commands, merges = json.load(sys.stdin)
printed = []
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert dare.main(words) == 0, words
    printed.append(stream.getvalue())
for name, (files, settings) in merges.items():
    base, *models = map(load_file, files)
    for _ in range(2):  # the second time, its plan is known
        merged = dare.dare_merge(base, models, dare.DareConfig(**settings))
        base, *models = [{name: t.clone() for name, t in s.items()} for s in (base, *models)]
    save_file(merged, name)
print(json.dumps(printed))
"""


def insert(path: Path, before: str, text: str) -> None:
    """Put a text before another in a file, which has that once."""
    [head, tail] = path.read_text().split(before)
    path.write_text(head + text + before + tail)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program, with a method, an encoding and a drop scheme more."""
    home = tmp_path_factory.mktemp("program")
    shutil.copy(ROOT / "dare.py", home)
    shutil.copytree(ROOT / "darelib", home / "darelib")
    library = home / "darelib"
    # A method: its file, and its line in the table.
    (library / "methods" / "median.py").write_text(MEDIAN)
    table = library / "methods" / "__init__.py"
    insert(table, "        LINEAR,\n", "        MEDIAN,\n")
    insert(table, "METHODS: Final", "from darelib.methods.median import MEDIAN\n")
    # An encoding: likewise.
    (library / "models" / "int8.py").write_text(INT8)
    inputs = library / "models" / "inputs.py"
    insert(inputs, "recognise_fp8,)\n", "recognise_int8, ")
    insert(inputs, "from darelib.models.lora ", "from darelib.models.int8 import recognise_int8\n")
    # A drop scheme with a setting: its entry, and the row of the setting.
    insert(library / "core" / "drops.py", "    RANDOM: Drop(\n", CAP)
    insert(library / "config" / "settings.py", "    rescale: bool", MOST)
    return home


def test_a_method_is_one_file(program: Path, tmp_path: Path) -> None:
    base, *tunes = write_models(tmp_path)
    (tmp_path / "merge.toml").write_text(
        '[models]\nbase_file = "base.safetensors"\n'
        'merge_files = ["a.safetensors", "b.safetensors", "c.safetensors"]\n'
        'output_file = "toml.safetensors"\n[dare]\nmethod = "median"\n'
    )
    (tmp_path / "merge.yaml").write_text(
        "merge_method: median\nbase_model: base.safetensors\nmodels:\n"
        + "".join(f"- model: {name}.safetensors\n" for name in NAMES)
    )
    rule = ["--drop-rate", "0", "--rule", 'b:method="median"']
    search = ["--search", "grid", "--vary", 'method=["linear", "median"]', "--json"]
    *_, found = run_commands(
        program,
        tmp_path,
        ["-q", *MODELS, "--method", "median", "--output", "flag.safetensors"],
        ["-q", "--config", "merge.toml"],
        ["-q", "--config", "merge.yaml", "--output", "yaml.safetensors"],
        ["-q", *MODELS, *rule, "--output", "rule.safetensors"],
        ["verify", "-q", "flag.safetensors"],
        ["verify", "-q", "rule.safetensors"],
        ["sweep", "-q", *MODELS, "--evaluate", "score.py:score", *search],
        memory={"memory.safetensors": (list_files(tmp_path), {"method": "median"})},
    )

    deltas = {key: torch.stack([t[key] - base[key] for t in tunes]) for key in base}
    wanted = {key: base[key] + deltas[key].median(0).values for key in base}
    for made in ("flag", "toml", "yaml", "memory"):
        assert_same(load_file(tmp_path / f"{made}.safetensors"), wanted)
    merged = load_file(tmp_path / "rule.safetensors")
    assert torch.equal(merged["b"], wanted["b"])
    assert torch.allclose(merged["a.weight"], base["a.weight"] + deltas["a.weight"].mean(0))
    trials = json.loads(found)["trials"]
    assert {trial["params"]["method"] for trial in trials} == {"linear", "median"}
    assert "median" in command("--help", program=program / "dare.py").stdout


def test_a_stored_encoding_is_one_file(program: Path, tmp_path: Path) -> None:
    """What models in int8 give is what the same values in float32 give."""
    base = random_model(0, F32, {"a.weight": (40, 30), "b.weight": (50, 7), "c": (50,)})
    tunes = [quantise(finetune(base, k, 0.01)) for k in range(1, 4)]
    for name, tune in zip(NAMES, tunes, strict=True):
        save_directory(tmp_path / "int8" / name, tune, quantization_config={"quant_method": "int8"})
        save_directory(tmp_path / "plain" / name, dequantise(tune), torch_dtype="float32")
    for folder in ("int8", "plain"):
        save_directory(tmp_path / folder / "base", base, torch_dtype="float32")
    rule = {"match": "b.weight", "method": "ties", "drop_rate": 0.2}
    rule_words = ["--rule", 'b.weight:method="ties",drop_rate=0.2']
    # By output: the models, the base first, and a rule.
    ways = {
        "file.safetensors": (("base", *NAMES), []),
        "rule.safetensors": (("base", *NAMES), rule_words),
        "directory": (("base", *NAMES), []),
        "onto int8": (NAMES, []),
    }
    merges = []
    for folder in ("int8", "plain"):
        for output, (names, words) in ways.items():
            first, *others = (f"{folder}/{name}" for name in names)
            models = ["--base", first, "--merge", *others]
            merges.append(["-q", *models, *words, "--output", f"{folder}/{output}"])
    files = [str(tmp_path / "int8" / name / "model.safetensors") for name in ("base", *NAMES)]
    run_commands(
        program,
        tmp_path,
        *merges,
        ["verify", "-q", "int8/rule.safetensors"],
        ["verify", "-q", "int8/directory"],
        memory={
            "memory.safetensors": (files, {}),
            "memory by rule.safetensors": (files, {"rules": [rule]}),
            "memory onto int8.safetensors": (files[1:], {}),
        },
    )

    wanted, by_rule = (load_file(tmp_path / "plain" / name) for name in list(ways)[:2])
    onto = tensors_in(tmp_path / "plain" / "onto int8")
    assert not torch.equal(wanted["b.weight"], by_rule["b.weight"])
    assert_same(load_file(tmp_path / "int8" / "file.safetensors"), wanted)
    assert_same(load_file(tmp_path / "int8" / "rule.safetensors"), by_rule)
    assert_same(tensors_in(tmp_path / "int8" / "directory"), wanted)
    assert_same(tensors_in(tmp_path / "int8" / "onto int8"), onto)
    assert_same(load_file(tmp_path / "memory.safetensors"), wanted)
    assert_same(load_file(tmp_path / "memory by rule.safetensors"), by_rule)
    assert_same(load_file(tmp_path / "memory onto int8.safetensors"), onto)
    assert "quantization_config" not in read_json(tmp_path / "int8" / "onto int8" / "config.json")


def quantise(model: Tensors) -> Tensors:
    """The matrices in int8, each row with its largest magnitude as 127."""
    stored = dict(model)
    for name, values in model.items():
        if values.dim() == 2:
            scales = values.abs().amax(1) / 127
            stored[name] = (values / scales[:, None]).round().to(torch.int8)
            stored[f"{name}_scale"] = scales
    return stored


def dequantise(stored: Tensors) -> Tensors:
    values = {name: each for name, each in stored.items() if not name.endswith("_scale")}
    for name, each in values.items():
        if each.dtype == torch.int8:
            values[name] = each.float() * stored[f"{name}_scale"][:, None]
    return values


def test_a_drop_scheme_is_one_entry_and_its_setting_one_row(program: Path, tmp_path: Path) -> None:
    base, tune, *_ = write_models(tmp_path)
    (tmp_path / "merge.toml").write_text(
        '[models]\nbase_file = "base.safetensors"\nmerge_files = ["a.safetensors"]\n'
        'output_file = "toml.safetensors"\n[dare]\ndrop_rate = 0.2\ndrop = "cap"\nmost = 30\n'
    )
    models = MODELS[:4]  # of the models, the first
    cap = ["--drop", "cap", "--most", "30"]
    rule = ["--drop-rate", "0", "--rule", 'b:drop_rate=0.2,drop="cap",most=30']
    search = ["--evaluate", "score.py:score", "--search", "grid", "--vary", "most=[30, 50]"]
    settings = {"drop_rate": 0.2, "drop": "cap"}
    files = list_files(tmp_path)[:2]
    *_, found = run_commands(
        program,
        tmp_path,
        ["-q", *models, "--drop-rate", "0.2", *cap, "--output", "flag.safetensors"],
        ["-q", *models, "--drop-rate", "0.2", *cap[:2], "--output", "default.safetensors"],
        ["-q", "--config", "merge.toml"],
        ["-q", *models, *rule, "--output", "rule.safetensors"],
        ["verify", "-q", "flag.safetensors"],
        ["verify", "-q", "rule.safetensors"],
        ["sweep", "-q", *models, "--drop-rate", "0.2", "--drop", "cap", *search, "--json"],
        memory={
            "memory.safetensors": (files, settings | {"most": 30}),
            "each.safetensors": (files, settings | {"most": [30]}),
        },
    )

    capped = {key: keep_largest(base[key], tune[key], 30) for key in base}
    trimmed = {key: keep_largest(base[key], tune[key], base[key].numel() * 4 // 5) for key in base}
    for made in ("flag", "toml", "memory", "each"):
        assert_same(load_file(tmp_path / f"{made}.safetensors"), capped)
    assert_same(load_file(tmp_path / "default.safetensors"), trimmed)
    by_rule = load_file(tmp_path / "rule.safetensors")
    assert_same(by_rule, {"a.weight": tune["a.weight"], "b": capped["b"]})
    assert {trial["params"]["most"] for trial in json.loads(found)["trials"]} == {30, 50}
    assert "cap: most entries of a tensor to keep (default 1e+06)" in " ".join(
        command("--help", program=program / "dare.py").stdout.split()
    )
    refused = command(*models, "--most", "3", "--output", "no", program=program / "dare.py")
    assert "most means nothing to drop random" in refused.stderr


def keep_largest(base: torch.Tensor, tune: torch.Tensor, count: int) -> torch.Tensor:
    """The base and the largest changes to it."""
    delta = (tune - base).flatten()
    kept = torch.zeros_like(delta)
    places = delta.abs().topk(count).indices
    kept[places] = delta[places]
    return base + kept.reshape(base.shape)


def write_models(folder: Path) -> list[Tensors]:
    """A base and three fine-tunes, in files, and a score of merges."""
    base = random_model(0, F32, {"a.weight": (40, 30), "b": (50,)})
    tunes = [finetune(base, k, 0.01) for k in range(1, 4)]
    save(folder, base=base, **dict(zip(NAMES, tunes, strict=True)))
    (folder / "score.py").write_text(
        "def score(path):\n    from safetensors.torch import load_file\n"
        "    return float(load_file(path)['b'].sum())\n"
    )
    return [base, *tunes]


def list_files(folder: Path) -> list[str]:
    return [str(folder / f"{name}.safetensors") for name in ("base", *NAMES)]


def run_commands(
    program: Path,
    folder: Path,
    *commands: list[str],
    memory: dict[str, tuple[list[str], Config]],
) -> list[str]:
    """Run commands of a copy of the program in a folder, and merges in memory, all in one process;
    what each command prints.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([commands, memory]),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(program)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
