"""verify: a merged model is made again by its recipe and compared, and any difference is found."""

import errno
import itertools
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

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


@pytest.fixture
def verify(capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> Any:
    """Verify a model with these flags: if there are words, it must fail and print them."""

    def check(path: Path, *flags: Any, words: str | None = None, status: int = 1) -> str:
        capsys.readouterr()
        # Where models are looked for.
        monkeypatch.chdir(tmp_path / "inputs" if (tmp_path / "inputs").exists() else "/")
        run("verify", path, "-q", *flags, status=0 if words is None else status)
        printed = capsys.readouterr().err
        assert printed.startswith("" if words is None else "error: ")
        assert (words or "") in printed
        assert "this is a bug" not in printed
        return printed

    return check


def check_found(verify: Any, output: Path, name: str) -> None:
    """A file that was changed must be found: an error, or a warning about what nobody loads."""
    if name == "README.md":
        assert "warning: 'README.md' is not" in verify(output)
    else:
        verify(output, words="")


def make_merged(folder: Path, kind: str, *flags: str, **options: Any) -> Scene:
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
            check_found(verify, out, name)
        (out / name).write_bytes(data)
    verify(out)


@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "gone", "a directory"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_files_that_are_cut_longer_or_gone_are_found(
    tmp_path: Path, verify: Any, kind: str, damage: str
) -> None:
    scene = make_merged(tmp_path, kind)
    for name, data in scene.new.items():
        path = scene.output / name
        path.unlink()
        if damage == "a directory":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes({"cut": data[:-1], "emptied": b"", "longer": data + b"\n"}[damage])
        check_found(verify, scene.output, name)
        put(path, {"": data})
    verify(scene.output)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "adapter_config.json",
        "modeling_llama.py",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
        "special_tokens_map.json",
        "2_Dense/model.safetensors",
    ],
)
def test_files_that_the_recipe_does_not_know_are_refused(
    tmp_path: Path, verify: Any, name: str
) -> None:
    scene = make_merged(tmp_path, "directory")
    put(scene.output, scene.new | {name: b"{}"})
    verify(scene.output, words=f"{name!r}, which its recipe does not know")


def test_what_no_loader_reads_may_be_added_and_edited(tmp_path: Path, verify: Any) -> None:
    scene = make_merged(tmp_path, "directory")
    names = [".git/config", ".gitattributes", "pictures/scores.png", "LICENSE", "notes.md"]
    put(scene.output, scene.new | dict.fromkeys(names, b"text"))
    (scene.output / "empty").mkdir()
    assert verify(scene.output) == ""
    (scene.output / "README.md").write_text("# A better card")
    assert "'README.md'" in verify(scene.output)


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("method", ["linear", "ties --keep-ratio 0.3", "slerp"])
def test_the_first_tensor_that_differs_is_named(
    tmp_path: Path, verify: Any, kind: str, method: str
) -> None:
    engine = [] if method == "linear" else ["--engine", "plain"]
    settings = ["--drop-rate", "0.5", *engine, "--method", *method.split()]
    scene = make_merged(tmp_path, kind, *settings)
    before = snapshot(tmp_path)
    verify(scene.output, "--threads", "3", *engine)
    assert snapshot(tmp_path) == before, "verify writes nothing"
    files = [scene.output] if kind == "file" else sorted(scene.output.glob("*.safetensors"))
    tensors = [
        (path, name, info) for path in files for name, info in TensorFile(path, "").tensors.items()
    ]
    for first, second in itertools.combinations(tensors, 2):
        for path, _, info in (first, second):
            data = bytearray(path.read_bytes())
            data[info.offset + info.nbytes - 1] ^= 0x40
            path.write_bytes(data)
        words = f"tensor '{first[1]}' differs at {[size - 1 for size in first[2].shape]}"
        verify(scene.output, "--threads", "3", *engine, words=words)
        put(scene.output, scene.new)


def test_what_was_compared_is_printed_and_reported_to_scripts(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    scene = make_merged(tmp_path, "file")
    monkeypatch.chdir(scene.inputs)
    for words in (["verify"], ["--verify"], ["merge", "--verify"]):
        run(*words, scene.output)
        assert f"verified {scene.output}: 4 tensors, " in capsys.readouterr().out
    report = DareMerger("base", ["math", "code"]).verify(scene.output)
    assert (report.tensors, report.bytes_compared) == (4, len(scene.new[""]))
    for models, output, words in (
        (["math"], scene.output, "header of 'out.safetensors' differs|bytes long"),
        (["math", "code"], tmp_path / "nowhere.safetensors", "is not there"),
    ):
        with pytest.raises(DareError, match=words):
            DareMerger("base", models).verify(output)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_moved_inputs_and_outputs_are_found_where_they_are_now(
    tmp_path: Path, verify: Any, kind: str
) -> None:
    scene = make_merged(tmp_path, kind)
    moved = scene.output.rename(tmp_path / f"elsewhere{scene.output.suffix}")
    verify(moved)
    scene.inputs.rename(tmp_path / "archive")
    verify(moved, words="'base'")
    base, math, code = (tmp_path / "archive" / name for name in ("base", "math", "code"))
    verify(moved, "--base", base, "--merge", math, code)
    verify(moved, "--base", base, "--merge", code, math)  # what they hold tells which is which
    verify(moved, "--base", base, "--merge", math, words="'code'")
    copies = [path.rename(tmp_path / f"other {path.name}") for path in (base, math, code)]
    verify(moved, "--base", copies[0], "--merge", *copies[1:])  # whatever they are called
    for path in copies:
        path.rename(tmp_path / path.name.removeprefix("other "))
    verify(moved)  # beside it


def test_adapters_shards_and_another_tokenizer_are_verified(tmp_path: Path, verify: Any) -> None:
    chat = tmp_path / "chat"
    put(chat, {"tokenizer.json": b"{}"})
    tensors = finetune(random_model(dtype=BF16), 3)
    shards = save_sharded(tmp_path / "shards", tensors, [[name] for name in tensors])
    rule = ["--rule", "*bias:drop_rate=0.5", "--dtype", "fp32"]
    flags = ["--tokenizer", str(chat), "--merge", str(shards), *rule]
    scene = make_merged(tmp_path, "directory", *flags, models=["adapter"])
    put(chat, {})
    where = ["--engine", "plain", "--merge", shards]
    (scene.inputs / "base" / "tokenizer.json").write_text("changed")
    # The tokenizer is held to its digest, not to what it was copied from.
    verify(scene.output, *where)
    (scene.output / "tokenizer.json").write_text("{ }")
    verify(scene.output, *where, words="'tokenizer.json' differs")
    config = scene.inputs / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    verify(scene.output, *where, words="config_sha256")


@pytest.mark.parametrize("change", ["size", "content_sha256", "holds no model"])
def test_other_inputs_are_an_error(tmp_path: Path, verify: Any, change: str) -> None:
    scene = make_merged(tmp_path, "file")
    weights = scene.inputs / "math" / "model.safetensors"
    tensors = load_file(weights)
    if change == "holds no model":
        weights.unlink()
    else:
        more = {"more": torch.zeros(3)} if change == "size" else {}
        save_directory(weights.parent, finetune(tensors, 5, 0.05) | more)
    verify(scene.output, words=change)


def test_a_disk_that_fails_under_a_merged_model_is_an_error_about_that_model(
    tmp_path: Path, monkeypatch: Patch, verify: Any
) -> None:
    scene = make_merged(tmp_path, "file")
    monkeypatch.setattr(
        "darelib.commands.verify.read_at",
        Mock(side_effect=OSError(errno.EIO, "Input/output error")),
    )
    verify(scene.output, words=f"cannot read {str(scene.output)!r}: Input/output error")


@pytest.mark.parametrize(
    "flags",
    [
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
    ],
)
def test_settings_come_from_the_recipe_only(tmp_path: Path, verify: Any, flags: str) -> None:
    words = f"{flags.split()[0]} means nothing to verify"
    verify(tmp_path / "x", *flags.split(), words=words, status=2)


def test_what_has_no_recipe_is_not_verified(tmp_path: Path, capsys: Capture, verify: Any) -> None:
    model = save_directory(tmp_path / "model", random_model())
    for words, status, named in (
        ([model / "model.safetensors"], 1, "no recipe"),
        ([model], 1, "no dare_recipe.toml"),
        ([tmp_path / "nowhere"], 1, "nowhere"),
        ([], 2, "nothing to verify"),
    ):
        refuse(tmp_path, capsys, status, named, arguments=["verify", *words])
    odd = tmp_path / "odd.safetensors"
    tables = ("", "[dare]\nseed = 1\n", "[recipe]\nversion = 3\n", "[models]\nmerge_files = []\n")
    for recipe in tables:
        for metadata, words in (
            ({"dare_recipe": recipe}, "is damaged"),
            (recipe_metadata(recipe), "names no inputs"),
        ):
            save_file(random_model(), odd, metadata)
            verify(odd, words=words)


@POSIX
def test_verify_stops_when_it_is_told_to(tmp_path: Path) -> None:
    scene = make_merged(tmp_path, "file")
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
