"""The recipe in a merged model: it says how the model was made, and makes it again."""

import hashlib
import json
import struct
import tomllib
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dare
from darelib.output.directory import seal
from tests.scene import contents
from tests.support import Capture, Models, Pair, Patch, finetune, refuse, run, run_merge


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
    recipes = [second, *([second / "dare_recipe.toml"] if second.is_dir() else [])]
    for recipe in recipes:
        run("-q", "-c", recipe, "-o", first)  # the models are beside it
        assert contents(second) == contents(first)


@pytest.mark.parametrize("config", ["first.safetensors", "recipe.toml"])
def test_a_recipe_refuses_other_inputs(
    models: Models, tmp_path: Path, capsys: Capture, config: str
) -> None:
    out = tmp_path / "first.safetensors"
    run_merge(models[0], models[1:], out)
    (tmp_path / "recipe.toml").write_text(recipe_of(out))
    other = finetune(load_file(models[0]), 9)
    arguments = ["-c", tmp_path / config, "-q", "-o", tmp_path / "again.safetensors"]
    save_file(other, models[2])
    refuse(tmp_path, capsys, 1, "content_sha256", "--base and --merge", arguments=arguments)
    save_file(other | {"more": other["scalar"].clone()}, models[2])
    refuse(tmp_path, capsys, 1, "its size is", arguments=[*arguments, "--merge", *models[1:]])
    models[2].unlink()
    refuse(tmp_path, capsys, 1, "'code.safetensors'", arguments=arguments)


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
    pair: Pair, tmp_path: Path, monkeypatch: Patch, capsys: Capture, config: str, words: str
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
    refuse(tmp_path, capsys, status, words, arguments=["-c", config, *output])


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
