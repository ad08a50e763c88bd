"""What ships beside the tool: the documents, and the short examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dare
from tests.support import HERE, Patch, snapshot

EXAMPLES = HERE / "examples"
TEXTS = {
    path: path.read_text() for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
}


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


@pytest.mark.slow
def test_the_advice_merges_the_example_to_what_the_readme_says(
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
    readme = " ".join(TEXTS[HERE / "README.md"].split())
    assert "That merges the example to {}, where the defaults gave {}.".format(*scores) in readme


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
        (
            "match_digits",
            (
                "'merge 2' is the best",
                "average, lambda auto    90",
                "\nwudi, matched           95",
                "\ntenths, matched         95",
            ),
        ),
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
