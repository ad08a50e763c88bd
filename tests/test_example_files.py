"""Files of examples: what is one, which are used, and how others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dare import ConfigError, DareError, DareMerger
from darelib.models.examples import read_examples
from tests.support import Pair, Patch, Refusal, make_models, save_directories

PAIR = {"prompt": "a", "completion": "b"}
TURNS = {"messages": [{"role": "user", "content": "hi"}]}


def write(path: Path, content: Any) -> Path:
    """A file of these bytes, this text, or lines of JSON."""
    if isinstance(content, list):
        content = "".join(f"{json.dumps(each)}\n" for each in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "entries"),
    [
        ("a.jsonl", [PAIR, {"text": "t"}, TURNS, {"input_ids": [1, 2]}],
         [PAIR, {"text": "t"}, TURNS, {"input_ids": [1, 2]}]),
        ("a.jsonl", [{"id": 7, "text": "t", **PAIR}], [PAIR]),
        ("a.jsonl", '\ufeff{"text": "ä"}\n\n  \n{"text": "b"}', [{"text": "ä"}, {"text": "b"}]),
        ("a.txt", "\ufeffone\ntwo\n\n \n\nthree", [{"text": "one\ntwo\n"}, {"text": "three"}]),
    ],
)  # fmt: skip
def test_an_example_is_a_line_of_json_or_a_paragraph(
    tmp_path: Path, name: str, content: Any, entries: Any
) -> None:
    assert list(read_examples(write(tmp_path / name, content), 9, 9).entries) == entries


def test_where_there_are_too_many_the_same_ones_are_chosen_each_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": f"t{k}"} for k in range(50)])
    first, again = (read_examples(path, 8, 9).entries for _ in range(2))
    assert first == again
    numbers = [int(entry["text"][1:]) for entry in first]
    assert len({*numbers}) == 8
    assert numbers == sorted(numbers) != list(range(8))


NO_EXAMPLES = {
    "not JSON": ("a.jsonl", '{"text": "a"}\n\n{"text": oops}', "'a.jsonl', line 3 is not JSON"),
    "deep": ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
    "a list": ("a.jsonl", [["text"]], "'a.jsonl', line 1 is no example"),
    "half": ("a.jsonl", [PAIR, {"prompt": "a"}], "line 2 is no example: it has 'prompt'"),
    "empty text": ("a.jsonl", [{"text": " "}], "'text' is empty, or of another kind"),
    "no text": ("a.jsonl", [{**PAIR, "completion": 3}], "'completion' is empty"),
    "half a character": ("a.jsonl", '{"text": "\\ud800"}', "'text' is empty, or of another"),
    "no turns": ("a.jsonl", [{"messages": ["hi"]}], "'messages' is empty, or of another"),
    "no ids": ("a.jsonl", [{"input_ids": [1, True]}], "'input_ids' is empty, or of another"),
    "negative": ("a.jsonl", [{"input_ids": [1, -1]}], "'input_ids' is empty, or of another"),
    "nothing": ("a.jsonl", "\n", "there are no examples in 'a.jsonl'"),
    "no paragraph": ("a.txt", " \n\n", "there are no examples in 'a.txt'"),
    "suffix": ("a.csv", "a,b", "'a.csv' is neither"),
    "bytes": ("a.jsonl", b'{"text": "\xff"}', "'a.jsonl' is not text in UTF-8"),
}


@pytest.mark.parametrize("kind", NO_EXAMPLES)
def test_what_is_no_example_is_refused_with_its_place(
    pair: Pair, tmp_path: Path, refused: Refusal, kind: str
) -> None:
    name, content, words = NO_EXAMPLES[kind]
    path = write(tmp_path / name, content)
    refused(1, words, "-b", pair[0], "-m", pair[1], "-o", tmp_path / "out", "--examples", path,
            "--dry-run")  # fmt: skip


@pytest.mark.parametrize(
    ("status", "words", "flags"),
    [
        (1, ("nowhere.jsonl", "--examples"), ["--examples", "nowhere.jsonl"]),
        (1, ".jsonl", ["--examples", "folder.jsonl"]),
        (2, "2 files of examples for 1 model", ["--examples", "a.jsonl", "a.jsonl"]),
        (2, "--base-examples", ["--base-examples", "a.jsonl"]),
        (2, "max_examples means nothing without examples", ["--max-examples", "5"]),
        (2, "match_ridge means nothing without examples", ["--match-ridge", "0.1"]),
        (2, "matched means nothing without examples", ["--matched"]),
        (2, "--max-tokens must be a whole number from 2 up", ["--max-tokens", "1"]),
        (2, "--match-ridge must be a number above 0", ["--match-ridge", "0"]),
        (2, "--runner ray divides a merge", ["--examples", "a.jsonl", "--runner", "ray"]),
    ],
)
def test_flags_of_examples_that_do_not_fit_are_refused(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, refused: Refusal,
    status: int, words: str | tuple[str, ...], flags: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [PAIR])
    (tmp_path / "folder.jsonl").mkdir()
    refused(status, words, "-b", pair[0], "-m", pair[1], "-o", tmp_path / "out", *flags)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[examples]\nfiles = "a.jsonl"', "files must be a list of paths"),
        ('[examples]\nfiles = ["a.jsonl"]\nbase = 3', "base must be a path"),
        ('[examples]\nfile = ["a.jsonl"]', "file"),
    ],
)
def test_a_configuration_names_files_of_examples(
    pair: Pair, tmp_path: Path, refused: Refusal, text: str, words: str
) -> None:
    (tmp_path / "config.toml").write_text(text)
    refused(2, (words, "config.toml"), "-c", tmp_path / "config.toml", "-b", pair[0],
            "-m", pair[1], "-o", tmp_path / "out")  # fmt: skip


def test_a_single_path_and_layers_of_models_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [PAIR])
    models = make_models(1, shapes={f"model.layers.{k}.up.weight": (4, 4) for k in range(2)})
    base, tuned = save_directories(tmp_path, models, num_hidden_layers=2)
    with pytest.raises(ConfigError, match="must be a list of files"):
        DareMerger(base, [tuned], examples=path)
    layers = [{"model": str(each), "layers": [k, k + 1]} for k, each in enumerate((base, tuned))]
    with pytest.raises(DareError, match="is made of layers of models"):
        DareMerger(base, [layers], examples=[path]).plan(tmp_path / "out")
