"""The recipe in a merged model makes it again, and verify finds any difference."""

import errno
import hashlib
import itertools
import json
import re
import signal
import struct
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dare
from dare import DareError, DareMerger
from darelib.models.tensorfile import TensorFile, header_bytes
from darelib.output.directory import recipe_metadata, seal
from tests.scene import Scene, contents, put
from tests.support import (
    BF16,
    HERE,
    Capture,
    Models,
    Pair,
    Patch,
    Refusal,
    finetune,
    low_rank,
    mask,
    random_model,
    run,
    run_merge,
    save,
    save_directory,
    save_sharded,
    slow,
    snapshot,
    write_adapter,
)

README = HERE / "README.md"


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
        assert ((words or "") in printed, "this is a bug" in printed) == (True, False)
        return printed

    return check


def check_found(verify: Any, output: Path, name: str) -> None:
    """A file that was changed must be found: an error, or a warning about what nobody loads."""
    if name == "README.md":
        assert "warning: 'README.md' is not" in verify(output)
    else:
        verify(output, words="")


def make_merged(folder: Path, kind: str, *flags: str, **options: Any) -> Scene:
    scene = Scene(folder, kind, old=False, **options)
    assert scene.run(*flags) == 0, scene.printed
    scene.new = contents(scene.output)
    return scene


@pytest.mark.parametrize(
    ("kind", "step", "last"),
    [("file", 23, 5), ("directory", 1009, 13), slow("file", 1, 5), slow("directory", 3, 5)],
)
def test_a_flipped_bit_is_found_anywhere(
    tmp_path: Path, monkeypatch: Any, verify: Any, kind: str, step: int, last: int
) -> None:
    """So is a file that is cut, longer or gone. last: of how many of the last bits one is tried."""
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
        bits = [8 * byte + byte // step % 8 for byte in range(0, len(data), step)]
        bits += range(8 * len(data) - 96, 8 * len(data), last)  # where tensors are
        whole = int.from_bytes(data, "little")
        flipped = [(whole ^ 1 << bit).to_bytes(len(data), "little") for bit in bits]
        for content in (*flipped, data[:-1], b"", data + b"\n", None):
            put(out / name, {} if content is None else {"": content})
            check_found(verify, out, name)
        put(out / name, {"": data})
    verify(out)


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


@pytest.mark.parametrize("kind", ["file", slow("directory")])
@pytest.mark.parametrize("method", ["linear", "ties --keep-ratio 0.3", "slerp"])
def test_the_first_tensor_that_differs_is_named(
    tmp_path: Path, verify: Any, kind: str, method: str
) -> None:
    engine = [] if method == "linear" else ["--engine", "plain"]
    scene = make_merged(tmp_path, kind, "--drop-rate", "0.5", *engine, "--method", *method.split())
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
        (["math"], scene.output, "tensor '.*' differs at"),
        (["math", "code"], tmp_path / "nowhere.safetensors", "is not there"),
    ):
        with pytest.raises(DareError, match=words):
            DareMerger("base", models).verify(output)


def test_what_the_readmes_commands_make_is_verified_where_it_is(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = random_model(shapes={"layer.weight": (8, 6), "layer.bias": (8,)})
    tuned = {name: finetune(base, seed) for seed, name in enumerate(("math", "code"))}
    for folder in (tmp_path, tmp_path / "models"):
        for name, tensors in {"base": base, **tuned}.items():
            save_directory(folder / name, tensors)
    write_adapter(tmp_path / "chat", low_rank("layer", (8, 6)))
    [words] = re.findall(r"\$ dare (--base .* --output merged)\n", README.read_text())
    run(*words.split(), "-q")
    run("verify", "merged", "-q")
    assert str(tmp_path) not in Path("merged/dare_recipe.toml").read_text()
    run("-q", "-b", "models/base", "-m", "models/math", "-o", "models/both")
    monkeypatch.chdir("/")
    for output in ("merged", "models/both"):
        run("verify", tmp_path / output, "-q")


def test_a_recipe_as_an_older_version_wrote_it_is_verified(tmp_path: Path, verify: Any) -> None:
    scene = make_merged(tmp_path, "file")
    recipe = recipe_of(scene.output)
    old = recipe.replace('drop = "random"\n', "").replace('"expectation"', "true")
    tensors = TensorFile(scene.output, "").tensors
    start = min(info.offset for info in tensors.values())
    placed = {name: replace(info, offset=info.offset - start) for name, info in tensors.items()}
    data = scene.output.read_bytes()[start:]
    scene.output.write_bytes(header_bytes(placed, recipe_metadata(old)) + data)
    assert len(recipe_of(scene.output)) < len(recipe)
    verify(scene.output)


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


def test_a_directory_may_be_named_by_its_recipe_or_its_index(pair: Pair, tmp_path: Path) -> None:
    settings = {"max_shard_size": "4kB", "engine": "plain", "verbose": False}
    merger = DareMerger(pair[0], [pair[1]], dare.DareConfig(**settings))
    report = merger.merge(tmp_path / "out")
    for name in ("dare_recipe.toml", "model.safetensors.index.json"):
        run("verify", tmp_path / "out" / name, "-q")
        assert merger.verify(tmp_path / "out" / name).tensors == report.tensors


def test_inputs_are_compared_by_a_sample_and_by_what_they_make(
    tmp_path: Path, refused: Refusal
) -> None:
    base = random_model(shapes={"layer.weight": (1024, 1024)})
    model = finetune(base, 1)
    paths = save(tmp_path, base=base, math=model)
    out = tmp_path / "out.safetensors"
    run_merge(paths[0], [paths[1]], out, drop_rate=0.9, engine="plain")
    kept = mask(42, "layer.weight", 1 << 20, 0.9)
    apart = range(2048, 3072)  # between two pages of the sample
    for is_kept in (False, True):
        place = next(k for k in apart if kept[k] == is_kept)
        model["layer.weight"].view(-1)[place] += 1
        save(tmp_path, math=model)
        if is_kept:
            refused(1, "'layer.weight' differs at [2, ", "verify", out)
        else:
            run("verify", out, "-q")


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


def test_a_disk_that_fails_under_a_merged_model_is_an_error_about_that_model(
    tmp_path: Path, monkeypatch: Patch, verify: Any
) -> None:
    scene = make_merged(tmp_path, "file")
    monkeypatch.setattr(
        "darelib.commands.verify.read_at",
        Mock(side_effect=OSError(errno.EIO, "Input/output error")),
    )
    verify(scene.output, words=f"cannot read {str(scene.output)!r}: Input/output error")


def test_an_interrupt_stops_a_verification_in_one_line(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    scene = make_merged(tmp_path, "file")
    monkeypatch.setattr(
        "darelib.commands.verify.Comparison.check_side_files",
        lambda _: signal.raise_signal(signal.SIGINT),
    )
    run("verify", scene.output, *scene.models, status=130)
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["model/model.safetensors"], 1, "no recipe"),
        (["model"], 1, "no dare_recipe.toml"),
        (["nowhere"], 1, "nowhere"),
        ([], 2, "nothing to verify"),
    ],
)
def test_what_has_no_recipe_is_not_verified(
    tmp_path: Path,
    monkeypatch: Patch,
    refused: Refusal,
    words: list[str],
    status: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_directory(tmp_path / "model", random_model())
    refused(status, sentence, "verify", *words)


@pytest.mark.parametrize(
    "recipe", ["", "[dare]\nseed = 1", "[recipe]\nversion = 3", "[models]\nmerge_files = []"]
)
def test_a_recipe_without_inputs_or_a_seal_is_not_verified(
    tmp_path: Path, verify: Any, recipe: str
) -> None:
    odd = tmp_path / "odd.safetensors"
    for metadata, words in (
        ({"dare_recipe": recipe}, "is damaged"),
        (recipe_metadata(recipe), "names no inputs"),
    ):
        save_file(random_model(), odd, metadata)
        verify(odd, words=words)


# --- the recipe in a merged model -----------------------------------------------------------------


def recipe_of(path: Path) -> str:
    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["dare_recipe"])


def digest_pages(data: bytes, header: bytes) -> str:
    """As the documents have it: 256 pages of 4 KiB, page k at k / 256 of the way through the
    tensors."""
    tensors = sorted(
        (name, entry) for name, entry in json.loads(header[8:]).items() if name != "__metadata__"
    )
    ends = [entry["data_offsets"] for _, entry in tensors]
    parts = [data[len(header) + start : len(header) + stop] for start, stop in ends if stop > start]
    found = hashlib.sha256()
    for k in range(256):
        part = parts[k * len(parts) // 256]
        rest = k * len(parts) % 256
        start = max(0, len(part) - 4096) * rest // 256
        found.update(part[start : start + 4096])
    return found.hexdigest()


def test_a_merged_file_says_all_that_determines_its_bytes_and_no_more(
    models: list[Path], tmp_path: Path
) -> None:
    run_merge(models[0], models[1:], tmp_path / "out.safetensors", drop_rate=0.75, seed=9)
    recipe = tomllib.loads(recipe_of(tmp_path / "out.safetensors"))
    assert (recipe["dare"]["drop_rate"], recipe["dare"]["seed"]) == (0.75, 9)
    assert recipe["models"] == {
        "base_file": models[0].name,
        "merge_files": [m.name for m in models[1:]],
    }
    assert (recipe["recipe"]["version"], recipe["recipe"]["seeds"]) == (dare.__version__, [9, 10])
    for entry, path in zip(recipe["recipe"]["inputs"], models, strict=True):
        data = path.read_bytes()
        header = data[: 8 + struct.unpack("<Q", data[:8])[0]]
        digests = {
            "header_sha256": hashlib.sha256(header).hexdigest(),
            "content_sha256": digest_pages(data, header),
        }
        assert entry == {"file": path.name, "size": len(data), **digests}
    others = {"threads": 1, "delta_threshold": 9, "engine": "plain", "max_shard_size": "1MB"}
    run_merge(
        models[0], models[1:], tmp_path / "other.safetensors", drop_rate=0.75, seed=9, **others
    )
    assert (tmp_path / "other.safetensors").read_bytes() == (
        tmp_path / "out.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        "--drop-rate 0.6 --seed 3",
        "--method ties --weights 1 2 --keep-ratio 0.4 --lambda 0.9 --dtype float32 "
        "--mismatch overlap",
        "--method ties --no-normalize --weights 1 -2",
        "--normalize --weights 1 2",
        "--method slerp --slerp-t 0.3 --drop-rate 0.5 0.7 --rescale-q 0.6",
        "--rule *.weight:drop_rate={gradient=[0.1,0.9]},weights=[1,{gradient=[0.5,-3]}],"
        "normalize=true --drop-rate .5",
        "--drop magnitude della --drop-rate .5 --epsilon .2 --rescale l1 "
        "--rule *bias:drop='breadcrumbs',gamma=0.2",
        "--drop breadcrumbs random --drop-rate .5 --gamma .1 .2 --method ties "
        "--rule *.weight:rescale='none'",
        "--method ram --threshold 1e-4 --weights 1 2 --drop-rate .5 --rule *bias:weights=[3,1]",
        "--method slerp --drop-rate .5 --rule *bias:slerp_t={gradient=[0,1]},rescale=false "
        "--rule *:slerp_t=0.7",
        "--no-rescale --drop-rate 0.2 --weights 1 -1 --rule *bias:drop_rate=0 "
        "--rule *.weight:lambda_coeff=0.5",
    ],
)
def test_a_recipe_makes_the_same_file_again(
    models: Models, tmp_path: Path, monkeypatch: Patch, flags: str
) -> None:
    monkeypatch.chdir(tmp_path)
    base, *others = (path.name for path in models)
    engine = ["-q", "--engine", "plain"]
    run(*engine, "-b", base, "-o", "first.safetensors", *flags.split(), "-m", *others)
    Path("recipe.toml").write_text(recipe_of(Path("first.safetensors")))
    monkeypatch.chdir("/")
    run(*engine, "-c", tmp_path / "recipe.toml", "-o", tmp_path / "again.safetensors")
    assert contents(tmp_path / "again.safetensors") == contents(tmp_path / "first.safetensors")


@pytest.mark.parametrize("output", ["merged.safetensors", "merged"])
def test_the_same_merge_gives_the_same_bytes_from_any_place(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, output: str
) -> None:
    """Also what a merged directory has beside the tensors; and no path of this machine is in it."""
    made = []
    for number, (place, base, model) in enumerate(
        (
            (tmp_path, "base", "math"),
            (tmp_path, "base/model.safetensors", "./math/"),
            ("/", pair[0], pair[1]),
            (pair[0], ".", "../math/model.safetensors"),
        )
    ):
        out = tmp_path / str(number) / output
        out.parent.mkdir()
        monkeypatch.chdir(place)
        run("-q", "-b", base, "-m", model, "-o", out)
        made.append(contents(out))
    assert made[1:] == made[:1] * 3
    assert not any(str(tmp_path).encode() in content for content in made[0].values())


@pytest.mark.parametrize("output", ["merged.safetensors", "merged"])
def test_a_merged_model_is_a_configuration(pair: Pair, tmp_path: Path, output: str) -> None:
    (tmp_path / "results").mkdir()
    first = tmp_path / "results" / output
    models = ["-b", pair[0], "-m", pair[1]]
    run("-q", *models, "-o", first, "--drop-rate", "0.5", "--max-shard-size=9kB")
    second = tmp_path / output
    run("-q", "-c", first, "-o", second, *models)
    assert contents(second) == contents(first)
    written = tmp_path / "results" / "again.toml"
    run("-q", "-c", first, *models, "-o", second, "--write-config", written)
    run("-q", "-c", written)
    assert contents(second) == contents(first)
    for recipe in [second, *([second / "dare_recipe.toml"] if second.is_dir() else [])]:
        run("-q", "-c", recipe, "-o", first)  # the models are beside it
        assert contents(second) == contents(first)


@pytest.mark.parametrize("config", ["first.safetensors", "recipe.toml"])
def test_a_recipe_refuses_other_inputs(
    models: Models, tmp_path: Path, refused: Refusal, config: str
) -> None:
    out = tmp_path / "first.safetensors"
    run_merge(models[0], models[1:], out)
    (tmp_path / "recipe.toml").write_text(recipe_of(out))
    other = finetune(load_file(models[0]), 9)
    arguments = ["-c", tmp_path / config, "-q", "-o", tmp_path / "again.safetensors"]
    save_file(other, models[2])
    refused(1, ("content_sha256", "--base and --merge"), *arguments)
    save_file(other | {"more": other["scalar"].clone()}, models[2])
    refused(1, "its size is", *arguments, "--merge", *models[1:])
    refused(1, f"{str(models[2])!r} is another one", "verify", out, "-m", *models[1:])
    models[2].unlink()
    refused(1, "'code.safetensors'", *arguments)


ELSEWHERE = {
    "output_file": 'output_file = "victim.safetensors"',
    "secret": 'chat_template = "secret"',
    "/secret": 'chat_template = "{folder}/secret"',
    "../secret": 'tokenizer = "../secret"',
    "a/../../secret": 'tokenizer = "a/../../secret"',
    "no inputs": "",
}


@pytest.mark.parametrize("words", ELSEWHERE)
@pytest.mark.parametrize("config", ["merged", "merged/dare_recipe.toml"])
def test_a_recipe_names_nothing_on_a_disk_but_its_inputs(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, refused: Refusal, config: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_merge(pair[0], [pair[1]], tmp_path / "merged")
    (tmp_path / "secret").write_text("a private key")
    recipe = Path("merged/dare_recipe.toml").read_text().partition("# SHA")[0]
    line = ELSEWHERE[words].format(folder=tmp_path)
    recipe = recipe.replace("[models]\n", f"[models]\n{line}\n")
    if words == "no inputs":
        recipe = recipe.partition("[recipe]")[0].replace('"base"', f'"{pair[0]}"')
    Path("merged/dare_recipe.toml").write_bytes(seal(recipe.encode()))
    output = [] if words == "output_file" else ["-o", "out"]
    status = 1 if words in ("secret", "no inputs") else 2
    refused(status, words, "-c", config, *output)


def test_a_tokenizer_that_is_no_input_is_named_by_a_flag(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for folder in (*pair, other):
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    for name in ("math", "other"):
        first = tmp_path / f"from {name}"
        again = tmp_path / f"again from {name}"
        run("-q", "-b", pair[0], "-m", pair[1], "-o", first, "--tokenizer", tmp_path / name)
        flags = ["--tokenizer", other] if name == "other" else []
        run("-q", "-c", first, "-o", again, *flags)
        assert contents(again) == contents(first)


def test_equal_inputs_are_found_under_each_name(models: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(models[1].read_bytes())
    out = tmp_path / "out.safetensors"
    run_merge(models[0], [models[1], copy], out)
    run("verify", "-q", out, "--merge", models[1], copy)
