"""Several merges in one file, as mergekit-multi takes them."""

import os
from pathlib import Path
from unittest import mock

import pytest

from dare import DareMerger
from tests.support import (
    F32,
    Patch,
    Refusal,
    assert_same,
    make_models,
    run,
    save_directory,
    tensors_in,
)

SHAPES = {"model.layers.0.mlp.weight": (8, 8), "model.layers.1.mlp.weight": (8, 8)}
FIRST = """name: first
merge_method: slerp
base_model: base
models: [{model: one}]
parameters: {t: 0.3}
"""
SECOND = """name: second
merge_method: task_arithmetic
base_model: first
models: [{model: two, parameters: {weight: {filter: mlp, value: 0.5}}}]
"""
LAST = """merge_method: ties
base_model: base
models: [{model: second}, {model: {model: {path: first}}}]
parameters: {weight: 0.5, density: 0.7}
"""
QUIET = ("-q", "--engine", "plain")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, tensors in zip(("base", "one", "two"), make_models(2, F32, SHAPES), strict=True):
        save_directory(tmp_path / name, tensors, model_type="llama")
    return tmp_path


def write(*documents: str) -> None:
    Path("all.yaml").write_text("---\n".join(documents))


@pytest.mark.parametrize("last", [LAST, f"name: third\n{LAST}"])
def test_documents_are_merged_in_the_order_of_their_references(
    folder: Path, refused: Refusal, last: str
) -> None:
    """The one that no other refers to is the output; by hand, the same is made, and verified."""
    write(last, SECOND, FIRST, "")
    before = set(os.listdir())
    run("all.yaml", "out", *QUIET)
    assert set(os.listdir()) == before | {"out"}
    for name, text in (("first", FIRST), ("second", SECOND), ("by_hand", last)):
        Path("one.yaml").write_text(text)
        run("one.yaml", name, *QUIET)
    assert_same(tensors_in(folder / "out"), tensors_in(folder / "by_hand"))
    assert Path("out/dare_recipe.toml").read_text() == Path("by_hand/dare_recipe.toml").read_text()
    assert str(folder) not in Path("out/dare_recipe.toml").read_text()
    run("verify", "out", *QUIET)
    Path("second").rename("elsewhere")
    refused(1, "cannot find 'second', which the recipe was made with", "verify", "out")


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt, 130), (MemoryError, 1)])
def test_nothing_is_left_behind(folder: Path, stop: type[BaseException], status: int) -> None:
    write(FIRST, SECOND, LAST)
    before = set(os.listdir())
    with mock.patch("darelib.commands.merge.merge_to_end", side_effect=stop) as merge:
        run("all.yaml", "out", *QUIET, status=status)
    models = merge.call_args.args[0].models
    assert models[0].path.parts[-3].startswith(".out.documents-")
    assert set(os.listdir()) == before


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([FIRST, SECOND, FIRST], "another document has the name 'first'"),
        ([LAST, LAST], "two documents have none"),
        ([FIRST, LAST.replace("second", "one"), SECOND], "no other document uses '', 'second'"),
        ([FIRST.replace("model: one", "model: second"), SECOND, LAST], "first -> second -> first"),
        ([FIRST.replace("name: first", "name: a/b"), LAST], "'a/b' is no name for a folder"),
        ([FIRST.replace("name: first", "name: .."), LAST], "'..' is no name for a folder"),
        ([FIRST, SECOND.replace("model: two", "model: nowhere"), LAST], "'nowhere'"),
        ([FIRST, SECOND.replace("0.5", "x"), LAST], "document 2: weight: it must be"),
    ],
)
def test_what_is_refused(folder: Path, refused: Refusal, documents: list[str], words: str) -> None:
    write(*documents)
    refused(1 if "nowhere" in words else 2, words, "all.yaml", "out", *QUIET)


def test_what_is_for_one_merge_is_refused(folder: Path, refused: Refusal) -> None:
    write(FIRST, SECOND, LAST)
    for flag in ("--resume", "--dry-run", "--drop-rate=0.5", "--merge=one"):
        words = f"{flag.partition('=')[0]} means nothing to a file of several documents"
        refused(2, words, "all.yaml", "out", flag)
    refused(2, "holds 3 documents, each a merge of its own", "analyze", "-c", "all.yaml")
    refused(2, "there is no output", "all.yaml")
    refused(2, "no directory", "all.yaml", "nowhere/out")
    (folder / "out").mkdir()
    refused(2, "'out' exists already", "all.yaml", "out")


SLICES = """name: tall
merge_method: passthrough
slices:
- sources: [{model: first, layer_range: [0, 2]}]
- sources: [{model: two, layer_range: [1, 2]}]
"""
FROM_TALL = "merge_method: passthrough\nmodels: [{model: tall}]\n"


def test_the_models_of_all_slices_must_be_there(folder: Path, refused: Refusal) -> None:
    write(FIRST, SLICES.replace("model: two", "model: nothing+two"), FROM_TALL)
    with mock.patch.object(DareMerger, "merge") as merge:
        refused(1, "no file or directory 'nothing'", "all.yaml", "out", *QUIET)
    merge.assert_not_called()
