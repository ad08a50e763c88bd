"""verify: a merged model is made again by its recipe and compared, and any difference is found."""

import errno
import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import dare
from dare import DareError, DareMerger
from darelib.models.tensorfile import TensorFile
from darelib.output.recipe import recipe_metadata
from tests.scene import SLOWLY, Scene, contents, launch, put
from tests.support import (
    BF16,
    POSIX,
    Capture,
    Patch,
    finetune,
    random_model,
    refuse,
    run,
    save_directory,
    save_sharded,
    slow,
    snapshot,
)

PLAIN = ("--engine", "plain")


@pytest.fixture
def verify(capsys: Capture, tmp_path: Path, monkeypatch: Any) -> Any:
    """Verify a model: what it is, with these flags, and the words that must be printed if it is not
    what it was."""

    def check(path: Path, *flags: Any, words: str | None = None, status: int = 1) -> None:
        capsys.readouterr()
        monkeypatch.chdir(
            tmp_path / "inputs" if (tmp_path / "inputs").exists() else "/"
        )  # where models are looked for
        found, printed = (
            dare.main(["verify", str(path), "-q", *map(str, flags)]),
            capsys.readouterr().err,
        )
        assert found == (0 if words is None else status), printed
        assert printed.startswith("" if words is None else "error: ")
        assert (words or "") in printed
        assert "this is a bug" not in printed

    return check


def made(folder: Path, kind: str, *flags: str, **options: Any) -> Scene:
    """A merged model, as a file or a directory."""
    scene = Scene(folder, kind, old=False, **options)
    assert scene.run(*flags) == 0, scene.printed
    scene.new = contents(scene.output)
    return scene


@pytest.mark.parametrize(
    ("kind", "step"), [("file", 7), ("directory", 37), slow("file", 1), slow("directory", 3)]
)
def test_a_flipped_bit_is_found_anywhere(
    tmp_path: Path, monkeypatch: Any, verify: Any, kind: str, step: int
) -> None:
    monkeypatch.chdir(tmp_path)  # short names make short recipes
    base = random_model(0, BF16, {"a": (3, 7), "b": (5,), "c": ()})
    save_directory(tmp_path / "base", base, torch_dtype="bfloat16")
    (tmp_path / "base" / "tokenizer.json").write_text('{"model": 1}')
    save_directory(tmp_path / "math", finetune(base, 1, 0.05))
    out = tmp_path / ("out.safetensors" if kind == "file" else "out")
    run("-q", "-b", "base", "-m", "math", "-o", out.name, "--max-shard-size", "40B")
    files = contents(out)
    assert len(files) == (1 if kind == "file" else 7)
    for name, data in files.items():
        bits = (8 * byte + byte // step % 8 for byte in range(0, len(data), step))
        for bit in (
            *bits,
            *range(8 * len(data) - 96, 8 * len(data), 5),
        ):  # the latter: where tensors are
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            (out / name).write_bytes(flipped)
            verify(out, words="")
        (out / name).write_bytes(data)
    verify(out)


@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "gone", "a directory"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_files_that_are_cut_longer_or_gone_are_found(
    tmp_path: Path, verify: Any, kind: str, damage: str
) -> None:
    scene = made(tmp_path, kind)
    for name, data in scene.new.items():
        path = scene.output / name
        path.unlink()
        if damage == "a directory":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes({"cut": data[:-1], "emptied": b"", "longer": data + b"\n"}[damage])
        verify(scene.output, words="")
        put(path, {"": data})
    verify(scene.output)


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("method", ["linear", "ties --keep-ratio 0.3", "slerp"])
def test_the_first_tensor_that_differs_is_named(
    tmp_path: Path, verify: Any, kind: str, method: str
) -> None:
    engine = () if method == "linear" else PLAIN
    scene = made(tmp_path, kind, "--drop-rate", "0.5", *engine, "--method", *method.split())
    before = snapshot(scene.output.parent)
    verify(scene.output, "--threads", "3", *engine)
    assert snapshot(scene.output.parent) == before, "verify writes nothing"
    files = [scene.output] if kind == "file" else sorted(scene.output.glob("*.safetensors"))
    tensors = [
        (path, name, info) for path in files for name, info in TensorFile(path, "").tensors.items()
    ]
    for first, second in itertools.combinations(tensors, 2):
        for path, _, info in (first, second):
            data = bytearray(path.read_bytes())
            data[info.offset + info.nbytes - 1] ^= 0x40
            path.write_bytes(data)
        words = (
            f"is not what its recipe makes: tensor '{first[1]}' differs at "
            f"{[size - 1 for size in first[2].shape]}"
        )
        verify(scene.output, "--threads", "3", *engine, words=words)
        put(scene.output, scene.new)
    assert snapshot(scene.inputs) == scene.before


def test_what_was_compared_is_printed_and_reported_to_scripts(
    tmp_path: Path, capsys: Capture, monkeypatch: Any
) -> None:
    scene = made(tmp_path, "file")
    monkeypatch.chdir(scene.inputs)
    for words in (["verify"], ["--verify"], ["merge", "--verify"]):
        run(*words, scene.output)
        assert f"verified {scene.output}: 4 tensors, " in capsys.readouterr().out
    run("verify", scene.output, "--json")
    base, *models = (scene.inputs / name for name in ("base", "math", "code"))
    report = DareMerger(base, models).verify(scene.output).as_dict()
    assert json.loads(capsys.readouterr().out) | {"seconds": 0} == report | {"seconds": 0}
    assert (report["tensors"], report["bytes_compared"]) == (4, len(scene.new[""]))
    with pytest.raises(DareError, match=r"the header of 'out.safetensors' differs|bytes long"):
        DareMerger(base, models[:1]).verify(scene.output)
    with pytest.raises(DareError, match="is not there"):
        DareMerger(base, models).verify(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_moved_inputs_and_outputs_are_found_where_they_are_now(
    tmp_path: Path, verify: Any, kind: str
) -> None:
    scene = made(tmp_path, kind)
    moved = scene.output.rename(tmp_path / f"elsewhere{scene.output.suffix}")
    verify(moved)
    scene.inputs.rename(tmp_path / "archive")
    verify(moved, words="cannot find 'base', which the recipe was made with")
    base, *models = (tmp_path / "archive" / name for name in ("base", "math", "code"))
    verify(moved, "--base", base, "--merge", *models)
    verify(
        moved, "--base", base, "--merge", *reversed(models)
    )  # what they hold tells which is which
    verify(
        moved,
        "--base",
        base,
        "--merge",
        models[0],
        words="cannot find 'code', which the recipe was made with",
    )
    copies = [path.rename(tmp_path / f"other {path.name}") for path in (base, *models)]
    verify(moved, "--base", copies[0], "--merge", *copies[1:])  # whatever they are called
    for path in copies:
        path.rename(tmp_path / path.name.removeprefix("other "))
    verify(moved)  # beside it


def test_adapters_shards_and_another_tokenizer_are_verified(tmp_path: Path, verify: Any) -> None:
    shards, chat, tensors = (
        tmp_path / "shards",
        tmp_path / "chat",
        finetune(random_model(dtype=BF16), 3),
    )
    save_sharded(shards, tensors, [[name] for name in tensors])
    put(chat, {"tokenizer.json": b"{}"})
    flags = [
        "--tokenizer",
        str(chat),
        "--merge",
        str(shards),
        "--rule",
        "*bias:drop_rate=0.5",
        "--dtype",
        "fp32",
    ]
    scene = made(tmp_path, "directory", *flags, models=["adapter"])
    put(chat, {})
    where = ["--merge", str(shards)]
    (scene.inputs / "base" / "tokenizer.json").write_text("changed")
    verify(
        scene.output, *PLAIN, *where
    )  # the tokenizer is held to its digest, not to what it was copied from
    (scene.output / "tokenizer.json").write_text("{ }")
    verify(
        scene.output, *PLAIN, *where, words="is not what its recipe makes: 'tokenizer.json' differs"
    )
    config = scene.inputs / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    verify(scene.output, *PLAIN, *where, words="adapter' is another one: its config_sha256 is")


def test_other_inputs_are_an_error(tmp_path: Path, verify: Any) -> None:
    scene = made(tmp_path, "file")
    weights = scene.inputs / "math" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"more": torch.zeros(3)}, weights, {"format": "pt"})
    verify(scene.output, words="math' is another one: its size is")
    save_file(finetune(tensors, 5, 0.05), weights, {"format": "pt"})
    verify(scene.output, words="math' is another one: its content_sha256 is")
    weights.unlink()
    verify(scene.output, words="holds no model")


def test_a_disk_that_fails_under_a_merged_model_is_an_error_about_that_model(
    tmp_path: Path, monkeypatch: Patch, verify: Any
) -> None:
    scene = made(tmp_path, "file")
    monkeypatch.setattr(
        "darelib.commands.verify.read_at",
        Mock(side_effect=OSError(errno.EIO, "Input/output error")),
    )
    verify(scene.output, words=f"cannot read {str(scene.output)!r}: Input/output error")


def test_settings_come_from_the_recipe_only(tmp_path: Path, verify: Any) -> None:
    for flags in (
        "--output x",
        "--seed 1",
        "--config x",
        "--rule *:drop_rate=0",
        "--tokenizer x",
        "--lambda 1",
        "--force",
        "--resume",
        "--dry-run",
        "--per-tensor",
    ):
        words = f"{flags.split()[0]} means nothing to verify"
        verify(tmp_path / "x", *flags.split(), words=words, status=2)


def test_what_has_no_recipe_is_not_verified(tmp_path: Path, capsys: Capture, verify: Any) -> None:
    save_directory(tmp_path / "model", random_model())
    for name, words in {
        "model/model.safetensors": "has no recipe",
        "model": "has no dare_recipe.toml",
        "nowhere": "No such file or directory",
    }.items():
        refuse(tmp_path, capsys, 1, words, arguments=["verify", tmp_path / name])
    refuse(tmp_path, capsys, 2, "there is nothing to verify", arguments=["verify"])
    for recipe in (
        "",
        "[dare]\nseed = 1\n",
        "[recipe]\nversion = 3\n",
        "[models]\nmerge_files = []\n",
    ):
        save_file(random_model(), tmp_path / "odd.safetensors", {"dare_recipe": recipe})
        verify(tmp_path / "odd.safetensors", words="the recipe itself is damaged")
        save_file(random_model(), tmp_path / "odd.safetensors", recipe_metadata(recipe))
        verify(tmp_path / "odd.safetensors", words="names no inputs")


@POSIX
def test_verify_stops_when_it_is_told_to(tmp_path: Path) -> None:
    scene = made(tmp_path, "file")
    before = snapshot(tmp_path)
    process = launch(
        SLOWLY.replace("0.05", "1"), "-q", "--threads", "1", "--verify", scene.output, *scene.models
    )
    assert process.stdout.readline() == "started\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=8)  # all jobs take twelve seconds
    assert (process.returncode, printed) == (130, "interrupted\n")
    assert snapshot(tmp_path) == before
