"""dare.py convert: pickles as safetensors files."""

import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dare
from tests.support import (
    HERE,
    POSIX,
    Capture,
    Patch,
    Refusal,
    random_model,
    run,
    save_directory,
    tune,
)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in wanted.items()}
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """All that a checkpoint may hold: shared, transposed, integer, scalar and half tensors."""
    shared = torch.randn(5, 3)
    return OrderedDict(
        random_model(),
        transposed=torch.randn(4, 2).t(),
        embedding=shared,
        head=shared,
        part=shared[1:3],
        position_ids=torch.arange(7),
        scale=torch.tensor(2.5),
        half=torch.randn(3).bfloat16(),
        parameter=torch.nn.Parameter(torch.randn(2)),
        empty=torch.zeros(0, 3),
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda w: w,
        lambda w: {"state_dict": w, "epoch": 3},
        lambda w: {"model": {"state_dict": w}},
        lambda w: {"module": w, "optimizer": {"lr": 0.1}},
        lambda w: {"model_state_dict": w},
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_weights_are_found_wherever_they_are(
    tmp_path: Path, weights: Any, wrap: Any, zipped: bool
) -> None:
    torch.save(wrap(weights), tmp_path / "old.bin", _use_new_zipfile_serialization=zipped)
    run("convert", tmp_path / "old.bin", tmp_path / "new.safetensors", "-q")
    assert_equal(load_file(tmp_path / "new.safetensors"), weights)


def test_entries_that_are_no_tensors_are_left_out(tmp_path: Path, capsys: Capture) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    torch.save({"state_dict": tensors | {"odd": 3}}, tmp_path / "old.pt")
    tune(first_line_seconds=0.0)
    run("convert", tmp_path / "old.pt", tmp_path / "new.safetensors")
    said = capsys.readouterr().err
    assert "left out what has no place in 'new.safetensors': 'odd'" in said
    assert said.startswith("writing: 50% done, ")
    assert_equal(load_file(tmp_path / "new.safetensors"), tensors)


def test_shards_and_directories_become_one_file(tmp_path: Path, weights: Any) -> None:
    names = list(weights)
    torch.save({name: weights[name] for name in names[:4]}, tmp_path / "pytorch_model-1.bin")
    torch.save({name: weights[name] for name in names[4:]}, tmp_path / "pytorch_model-2.bin")
    files = {name: f"pytorch_model-{1 + (k >= 4)}.bin" for k, name in enumerate(names)}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(str({"weight_map": files}).replace("'", '"'))
    for old in (tmp_path, index):
        run("convert", old, tmp_path / "model.safetensors", "-q", "--force")
        assert_equal(load_file(tmp_path / "model.safetensors"), weights)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def write_wrong(folder: Path) -> None:
    """Files that hold something else than weights."""
    loop: dict[str, Any] = {}
    loop["model"] = loop
    evil = {"a": torch.ones(2), "b": Evil()}
    torch.save(evil, folder / "evil_old.pt", _use_new_zipfile_serialization=False)
    for name, content in {
        "evil": evil,
        "module": torch.nn.Linear(2, 2),
        "trainer": {"state_dict": {"a": torch.ones(2)}, "loss": np.float64(3)},
        "sparse": {"a": torch.ones(3).to_sparse()},
        "list": [torch.ones(3)],
        "meta": {"a": torch.ones(3, device="meta")},
        "named": {"__metadata__": torch.ones(3)},
        "loop": loop,
        "numbers": {"lr": 0.1},
        "plain": {"a": torch.ones(3)},
    }.items():
        torch.save(content, folder / f"{name}.pt")
    with zipfile.ZipFile(folder / "list.pt") as old, zipfile.ZipFile(folder / "z.pt", "w") as new:
        for member in old.namelist():
            new.writestr(member, old.read(member), zipfile.ZIP_DEFLATED)
    save_directory(folder / "model", {"a": torch.ones(3)})
    for name, data in {
        "large.bin": b"c__builtin__\nbytearray\n(I4000000000\ntR.",
        "index.json": b'{"weight_map": [1]}',
        "junk.bin": b"junk" * 99,
        "torn.bin": (folder / "list.pt").read_bytes()[:200],
        "there.safetensors": b"precious",
        "folder/x": b"",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("evil.pt x.safetensors", 1, "posix.mkdir, which could run any code"),
        ("evil_old.pt x.safetensors", 1, "posix.mkdir, which could run any code"),
        ("module.pt x.safetensors", 1, ("Linear, which could run", "torch.save(model.state_dict")),
        ("trainer.pt x.safetensors", 1, "multiarray.scalar, which could run any code"),
        ("sparse.pt x.safetensors", 1, "'a' is torch.float32 (torch.sparse_coo)"),
        ("list.pt x.safetensors", 1, "holds no table of tensors"),
        ("numbers.pt x.safetensors", 1, "holds no table of tensors"),
        ("loop.pt x.safetensors", 1, "holds no table of tensors"),
        ("junk.bin x.safetensors", 1, "'junk.bin'"),
        ("torn.bin x.safetensors", 1, "'torn.bin'"),
        ("none.bin x.safetensors", 1, "'none.bin'"),
        ("folder x.safetensors", 1, "pytorch_model.bin"),
        ("meta.pt x.safetensors", 1, "'a' is torch.float32"),
        ("named.pt x.safetensors", 1, "'__metadata__'"),
        ("index.json x.safetensors", 1, "weight_map"),
        ("large.bin x.safetensors", 1, "could run any code"),
        ("z.pt x.safetensors", 1, "is compressed"),
        ("model x.safetensors", 1, "need no conversion"),
        ("model/model.safetensors x.safetensors", 2, "already"),
        ("plain.pt x.bin", 2, ".safetensors"),
        ("list.pt there.safetensors", 2, "--force"),
        ("list.pt nowhere/x.safetensors", 2, "no directory"),
        ("list.pt", 2, "NEW"),
        ("numbers.pt x.safetensors --threads 2", 2, "--threads means nothing to convert"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, refused: Refusal, monkeypatch: Patch, arguments: str, status: int, words: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_wrong(tmp_path)
    refused(status, words, "convert", *arguments.split())


def test_tensors_are_written_one_after_the_other_and_copied_in_pieces(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A tensor that repeats its values is large only on the disk."""
    weights = {
        "repeated": torch.arange(5.0)[:, None].expand(5, 1000),
        "turned": torch.randn(1, 300, 7).transpose(1, 2),
        "conjugate": torch.randn(99, dtype=torch.complex64).conj(),
        "whole": torch.randn(999),
    }
    torch.save(weights, tmp_path / "old.pt")
    assert (tmp_path / "old.pt").stat().st_size < 20_000
    sizes: list[int] = []
    copy = torch.Tensor.contiguous

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(0 if tensor.is_contiguous() else tensor.nbytes)
        written = [path.stat().st_size for path in tmp_path.rglob("*") if "new" in str(path)]
        assert len(sizes) < 20 or max(written) > 8192, "not before the first bytes are written"
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "contiguous", watch)
    monkeypatch.setattr("darelib.commands.conversions.PIECE_BYTES", 1024)
    run("convert", tmp_path / "old.pt", tmp_path / "new.safetensors", "-q")
    monkeypatch.undo()
    assert 0 < max(sizes) <= 1024
    assert_equal(load_file(tmp_path / "new.safetensors"), weights)


@pytest.mark.slow
@POSIX
def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path, weights: Any) -> None:
    torch.save(weights, tmp_path / "old.bin")
    words = ["convert", str(tmp_path / "old.bin"), str(tmp_path / "new.safetensors"), "-q"]
    program = (
        "import os, dare, darelib.commands.conversions as room\n"
        f"room.tensor_bytes = lambda _: map(os.kill, [os.getpid()], [9])\ndare.main({words})"
    )
    subprocess.run([sys.executable, "-c", program], check=False, cwd=HERE)
    assert len(os.listdir(tmp_path)) == 2, "the old file, and what was begun"
    assert dare.main(words) == 0
    assert sorted(os.listdir(tmp_path)) == ["new.safetensors", "old.bin"]


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: Patch, weights: Any
) -> None:
    torch.save(weights, tmp_path / "old.bin")
    stop = Mock(side_effect=KeyboardInterrupt)  # when the first bytes are written
    interrupt = "darelib.commands.conversions.tensor_bytes"
    monkeypatch.setattr(interrupt, lambda tensor: map(stop, [tensor]))
    run("convert", tmp_path / "old.bin", tmp_path / "new.safetensors", status=130)
    assert os.listdir(tmp_path) == ["old.bin"]


def test_without_torch_there_is_a_hint(
    tmp_path: Path, refused: Refusal, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "old.bin").write_bytes(b"x")
    refused(1, "torch", "convert", tmp_path / "old.bin", tmp_path / "new.safetensors")
