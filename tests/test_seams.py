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

from tests.support import F32, finetune, random_model, save

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text()
[MEDIAN] = [block for block in re.findall("```python\n(.*?)```", PAGE, re.S) if "MEDIAN" in block]
SCRIPT = """
from safetensors.torch import load_file, save_file
from dare import DareConfig, dare_merge

base, *models = [load_file(f"{name}.safetensors") for name in ("base", "a", "b", "c")]
save_file(dare_merge(base, models, DareConfig(method="median")), "memory.safetensors")
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
    environment = os.environ | {"PYTHONPATH": str(program)}

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    dare = str(program / "dare.py")
    models = ["--base", "base.safetensors", "--merge", *(f"{name}.safetensors" for name in names)]
    deltas = {key: torch.stack([t[key] - base[key] for t in tunes.values()]) for key in base}
    wanted = {key: base[key] + deltas[key].median(0).values for key in base}

    run(dare, "-q", *models, "--method", "median", "--output", "flag.safetensors")
    (tmp_path / "merge.toml").write_text(
        '[models]\nbase_file = "base.safetensors"\n'
        'merge_files = ["a.safetensors", "b.safetensors", "c.safetensors"]\n'
        'output_file = "toml.safetensors"\n[dare]\nmethod = "median"\n'
    )
    run(dare, "-q", "--config", "merge.toml")
    (tmp_path / "merge.yaml").write_text(
        "merge_method: median\nbase_model: base.safetensors\nmodels:\n"
        + "".join(f"- model: {name}.safetensors\n" for name in names)
    )
    run(dare, "-q", "--config", "merge.yaml", "--output", "yaml.safetensors")
    run("-c", SCRIPT)
    for made in ("flag", "toml", "yaml", "memory"):
        found = load_file(tmp_path / f"{made}.safetensors")
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), made

    rule = 'b:method="median"'
    run(dare, "-q", *models, "--drop-rate", "0", "--rule", rule, "--output", "rule.safetensors")
    found = load_file(tmp_path / "rule.safetensors")
    assert torch.equal(found["b"], wanted["b"])
    assert torch.allclose(found["a.weight"], base["a.weight"] + deltas["a.weight"].mean(0))

    for made in ("flag", "rule"):
        run(dare, "verify", "-q", f"{made}.safetensors")
    (tmp_path / "score.py").write_text(
        "def score(path):\n    from safetensors.torch import load_file\n"
        "    return float(load_file(path)['b'].sum())\n"
    )
    words = ["--evaluate", "score.py:score", "--vary", 'method=["linear", "median"]', "--json"]
    found = json.loads(run(dare, "sweep", "-q", *models, "--search", "grid", *words))
    assert {trial["params"]["method"] for trial in found["trials"]} == {"linear", "median"}
    assert "median" in run(dare, "--help")
