"""What is added is a file and one line: the method of docs/contributing.md, in a copy of it all."""

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

from tests.support import F32, command, finetune, random_model, save

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text()
[MEDIAN] = [block for block in re.findall("```python\n(.*?)```", PAGE, re.S) if "MEDIAN" in block]
# Commands in one process, which prints what each has printed; and a merge of tensors.
SCRIPT = """
import contextlib, io, json, sys
from safetensors.torch import load_file, save_file
import dare

printed = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert dare.main(words) == 0, words
    printed.append(stream.getvalue())
base, *models = [load_file(f"{name}.safetensors") for name in ("base", "a", "b", "c")]
merged = dare.dare_merge(base, models, dare.DareConfig(method="median"))
save_file(merged, "memory.safetensors")
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program, with a method more: its file, and its line in the table."""
    home = tmp_path_factory.mktemp("program")
    shutil.copy(ROOT / "dare.py", home)
    shutil.copytree(ROOT / "darelib", home / "darelib")
    methods = home / "darelib" / "methods"
    (methods / "median.py").write_text(MEDIAN)
    table = (methods / "__init__.py").read_text()
    table = table.replace("        LINEAR,\n", "        LINEAR,\n        MEDIAN,\n")
    imported = "from darelib.methods.median import MEDIAN\n"
    end = table.index("METHODS: Final")
    (methods / "__init__.py").write_text(f"{table[:end]}{imported}{table[end:]}")
    return home


def test_a_method_is_one_file(program: Path, tmp_path: Path) -> None:
    base = random_model(0, F32, {"a.weight": (40, 30), "b": (50,)})
    names = ("a", "b", "c")
    tunes = {name: finetune(base, k, 0.01) for k, name in enumerate(names, 1)}
    save(tmp_path, base=base, **tunes)
    models = ["--base", "base.safetensors", "--merge", *(f"{name}.safetensors" for name in names)]
    (tmp_path / "merge.toml").write_text(
        '[models]\nbase_file = "base.safetensors"\n'
        'merge_files = ["a.safetensors", "b.safetensors", "c.safetensors"]\n'
        'output_file = "toml.safetensors"\n[dare]\nmethod = "median"\n'
    )
    (tmp_path / "merge.yaml").write_text(
        "merge_method: median\nbase_model: base.safetensors\nmodels:\n"
        + "".join(f"- model: {name}.safetensors\n" for name in names)
    )
    (tmp_path / "score.py").write_text(
        "def score(path):\n    from safetensors.torch import load_file\n"
        "    return float(load_file(path)['b'].sum())\n"
    )
    rule = ["--drop-rate", "0", "--rule", 'b:method="median"']
    search = ["--search", "grid", "--vary", 'method=["linear", "median"]', "--json"]
    *_, found = run_commands(
        program,
        tmp_path,
        ["-q", *models, "--method", "median", "--output", "flag.safetensors"],
        ["-q", "--config", "merge.toml"],
        ["-q", "--config", "merge.yaml", "--output", "yaml.safetensors"],
        ["-q", *models, *rule, "--output", "rule.safetensors"],
        ["verify", "-q", "flag.safetensors"],
        ["verify", "-q", "rule.safetensors"],
        ["sweep", "-q", *models, "--evaluate", "score.py:score", *search],
    )

    deltas = {key: torch.stack([t[key] - base[key] for t in tunes.values()]) for key in base}
    wanted = {key: base[key] + deltas[key].median(0).values for key in base}
    for made in ("flag", "toml", "yaml", "memory"):
        merged = load_file(tmp_path / f"{made}.safetensors")
        assert all(torch.equal(merged[key], wanted[key]) for key in wanted), made
    merged = load_file(tmp_path / "rule.safetensors")
    assert torch.equal(merged["b"], wanted["b"])
    assert torch.allclose(merged["a.weight"], base["a.weight"] + deltas["a.weight"].mean(0))
    trials = json.loads(found)["trials"]
    assert {trial["params"]["method"] for trial in trials} == {"linear", "median"}
    assert "median" in command("--help", program=program / "dare.py").stdout


def run_commands(program: Path, folder: Path, *commands: list[str]) -> list[str]:
    """Run commands of a copy of the program in a folder, all in one process; what each prints."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(program)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
