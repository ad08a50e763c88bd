"""What ships beside the tool: the documents, and the short examples."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import dare
from tests.house import House, make_adapter
from tests.support import HERE, Capture, Patch, run, snapshot

EXAMPLES = HERE / "examples"
TEXTS = {
    path: path.read_text() for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
}


README = TEXTS[HERE / "README.md"]


def run_example(name: str, *arguments: str | Path) -> str:
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout


def test_the_map_of_the_house_names_every_file() -> None:
    text = TEXTS[HERE / "docs" / "contributing.md"]
    rooms = re.findall(r"^\| \d+ \| `(\w+)/` \| (.*) \|$", text, re.MULTILINE)
    named = {f"{room}/{name}" for room, row in rooms for name in re.findall(r"`([\w/]+)`", row)}
    house = HERE / "darelib"
    files = [path for path in house.glob("*/**/*.py") if path.name != "__init__.py"]
    there = {path.relative_to(house).with_suffix("").as_posix() for path in files}
    assert named <= there
    assert all(name.startswith("methods/") for name in there - named)  # a method is one file


def test_every_link_in_the_documents_leads_somewhere() -> None:
    for document, text in TEXTS.items():
        assert all((HERE / script).is_file() for script in re.findall(r"examples/\w+\.py", text))
        for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            target = document.parent / path if path else document
            assert target.is_file(), f"{document.name}: {path}"
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else [""]
            assert anchor in [
                re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
            ]


def test_the_tests_that_prove_the_promises_exist() -> None:
    code = "".join(
        path.read_text() for path in (HERE / "test_dare.py", *(HERE / "tests").glob("test_*.py"))
    )
    named = re.findall(r"\btest_\w+\b(?!\.py)", TEXTS[HERE / "docs" / "reliability.md"])
    assert len(named) >= 5
    assert [name for name in named if f"def {name}(" not in code] == []


def read_section(title: str) -> str:
    """A section of the README."""
    return re.split(r"(?m)^## ", README.partition(f"\n## {title}\n")[2])[0]


def test_three_commands_of_the_readme_merge_evaluate_and_match(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    make_adapter(House(tmp_path, "llama"), tmp_path / "chat", 5)
    shutil.copy("code.jsonl", "chat.jsonl")
    commands = re.findall(r"(?m)^\$ dare (.+)$", read_section("Your own models"))
    assert [words.split()[0] for words in commands] == ["--base", "evaluate", "--base"]
    for words in commands:
        run(*words.split())
    assert re.search(r"(?m)^merged +\d.*\*", capsys.readouterr().out), "judged"
    for output in ("merged", "matched"):
        run("verify", output, "-q")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # importing PEFT takes longer than most of the suite
def test_two_adapters_become_a_model_that_generates_text_as_in_the_readme(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    import peft
    import torch

    monkeypatch.chdir(tmp_path)
    house = House(tmp_path, "llama")
    for seed, name in enumerate(("math", "code")):
        model = house.kind.from_pretrained("base")
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weights in adapted.parameters():
                if weights.requires_grad:
                    weights += 0.1 * torch.randn(weights.shape, generator=generator)
        adapted.save_pretrained(f"adapters/{name}")
    section = read_section("From two adapters to text")
    [words] = re.findall(r"(?m)^\$ dare (.+)$", section)
    run(*words.split(), "-q")
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    prompt = "What is 12 times 12?"
    assert prompt in code
    capsys.readouterr()
    exec(code.replace(prompt, "w1 w2 w3"), {})
    printed = capsys.readouterr().out
    assert re.match(r"w1 w2 w3( ?w\d+){20,}\n", printed), printed


@pytest.mark.slow
def test_the_advice_merges_the_example_to_what_the_guide_says(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--config", str(HERE / "merge_config.toml"), "-q", "--output"]
    for words in (
        [*given, "plain.safetensors"],
        ["analyze", *given, "advised.safetensors", "--write-config", "advice.toml"],
        ["--config", "advice.toml", "-q"],
    ):
        assert dare.main(words) == 0
    scores = [
        run_example("evaluate", tmp_path / f"{name}.safetensors").split()[-1]
        for name in ("advised", "plain")
    ]
    guide = " ".join(TEXTS[HERE / "docs" / "guide.md"].split())
    assert "That merges the example to {}, where the defaults gave {}.".format(*scores) in guide


ROW: Final = re.compile(r"(?m)^(\S.*?) +((?:[\d.]+% *)+)$")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["evaluate", "match_digits"])
def test_the_right_answers_in_the_readme_are_those_of_the_example(
    script: str, tmp_path: Path
) -> None:
    section = read_section("Two commands")
    [shown] = re.findall(rf"(?s)examples/{script}\.py\n(.*?)```", section)
    merged = tmp_path / "merged.safetensors"
    run("--config", HERE / "merge_config.toml", "-q", "--output", merged)
    own = [EXAMPLES / "models" / f"{name}.safetensors" for name in ("base", "rotated", "covered")]
    given = [*own, merged] if script == "evaluate" else []
    printed = dict(ROW.findall(run_example(script, *given)))
    rows = ROW.findall(shown)
    assert len(rows) == 4
    for name, scores in rows:
        found = [float(each) for each in re.findall(r"[\d.]+", printed[name])]
        wanted = [float(each) for each in re.findall(r"[\d.]+", scores)]
        assert found == pytest.approx(wanted, abs=1.0), name  # elsewhere a few images may differ


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "analyze_models",
            (
                "cosine 0.082",
                "method wudi",
                "[dare]",
                "would merge 2 models",
                "drew ",
            ),
        ),
        ("drop_rates", ("mean of 3 masks", "0.95")),
        ("match_digits", ("'merge 3' has the least mean cost", "\naverage, lambda auto    90")),
        (
            "evaluate",
            ("rotated     96.1%     60.8%     78.5%", "covered     50.9%     94.8%     72.9%"),
        ),
    ],
)
def test_the_short_examples_run_and_leave_the_models_alone(
    script: str, words: tuple[str, ...]
) -> None:
    before = snapshot(EXAMPLES / "models")
    printed = run_example(*script.split())
    assert all(word in printed for word in words), printed
    assert snapshot(EXAMPLES / "models") == before
