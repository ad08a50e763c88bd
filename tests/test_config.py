"""Configuration and bad input: one sentence that says what is wrong, a hint, the right status, and
nothing changed."""

import errno
import math
import os
import shlex
import shutil
import subprocess
import threading
import time
import tomllib
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import dare
from dare import ConfigError, DareConfig, DareError, DareMerger
from darelib.config import SETTINGS, freeze
from darelib.core.drops import DROPS
from darelib.methods import METHODS
from darelib.models import tensorfile
from darelib.plan.plan import MergePlan
from darelib.requests.recipe import read_recipe
from darelib.run.worker import Worker
from tests.scene import put
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    POSIX,
    Capture,
    Models,
    Pair,
    Patch,
    Refusal,
    command,
    finetune,
    random_model,
    run,
    run_merge,
    save,
    slow,
    snapshot,
    write_config,
)

MERGE = [
    "-b",
    "base.safetensors",
    "-m",
    "math.safetensors",
    "code.safetensors",
    "-o",
    "out.safetensors",
]
OUT = Path("out.safetensors")
LOCK = "merged.partial/lock"


@pytest.fixture(autouse=True)
def at_the_models(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def fill(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        put(Path(name), {"": content})


def test_paths_in_toml_are_relative_to_it(
    models: Models, tmp_path: Path, monkeypatch: Patch
) -> None:
    config = write_config(tmp_path, verbose=False)
    config.write_text(config.read_text(), "utf-8-sig", newline="\r\n")  # as on Windows
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    run("-c", config, "-o", "here.safetensors")
    assert Path("here.safetensors").exists()
    run("-c", "../config.toml")
    assert [model.name for model in read_recipe(tmp_path / OUT).merge] == [
        "math.safetensors",
        "code.safetensors",
    ]


def test_a_path_that_is_no_text_is_written_as_text(models: Models, tmp_path: Path) -> None:
    for output in (f"{tmp_path}/\udcff", "\udcff"):
        config = write_config(tmp_path)
        run("-c", config, "-o", output, "--write-config", "new.toml", "--force")
        assert tomllib.loads(Path("new.toml").read_text())["models"]["output_file"] == (
            output.replace("\udcff", "\\udcff")
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[dare] \r\n" + "\r\n" * 600_000 + "seed = 7\r\n", "it is longer than 1,048,576 bytes"),
        (
            "[dare]\n" + "# \u20ac\u20ac\n" * 200_000 + "seed = 7\n",
            "it is longer than 1,048,576 bytes",
        ),
        (
            "\ufeff[dare]\n" + "#\n" * 524_284 + "\n\n\nseed = 7\n",
            "it is longer than 1,048,576 bytes",
        ),
        ("a." * 500_000 + "a = 1", "too many parts"),
        ("[" + "a . " * 250_000 + "a]", "too many parts"),
        ('"".' * 300_000 + "a = 1", "too many parts"),
        ('"\\"".' * 150_000 + "a = 1", "too many parts"),
        ("x = [{" + "'a'." * 20_000 + "a = 1}]", "too many parts"),
        ('"\\' * 20_000, "is not valid TOML"),
        ("x = " + "[" * 100_000, "is not valid TOML"),
    ],
    ids=lambda text: text[:12],
)
def test_toml_that_takes_forever_is_refused_at_once(
    models: Models, refused: Refusal, text: str, words: str
) -> None:
    """Recipes too: that of a model directory may come from anywhere."""
    fill({"out/dare_recipe.toml": text.encode()})
    started = time.process_time()
    refused(2, words, "-c", "out/dare_recipe.toml")
    refused(1, "was not made by this tool", *MERGE, "-o", "out")
    assert time.process_time() - started < 5


@pytest.mark.slow
def test_a_recipe_that_could_not_be_read_again_is_not_written(
    models: Models, refused: Refusal
) -> None:
    Path("c.toml").write_text(
        f'[[rules]]\nmatch = ["*", "{"x" * ((1 << 20) - 60)}"]\ndrop_rate = 0.5'
    )
    refused(2, "the recipe would be longer than 1,048,576 bytes", *MERGE, "-c", "c.toml")


def list_wrong_settings() -> list[tuple[str, Any]]:
    wrong: dict[str, list[Any]] = {
        "drop_rate": [1, -0.1, math.nan, "0.5", True, [], [0.5, 1]],
        "weights": [0.5, [], ["1"], [math.inf]],
        "lambda_coeff": [math.inf, "1"],
        "rescale": [1],
        "rescale_q": [0, 1.5, []],
        "keep_ratio": [0, 1.5],
        "normalize": [1, "no"],
        "slerp_t": [-1, 2],
        "drop": [1, [], ["random", "no"]],
        "gamma": [1, -0.1, "0.1"],
        "epsilon": [0.5, -0.1, [0.6]],
        "threshold": [-1, "1"],
        "max_shard_size": ["5 XB", "", -1, "5", " 999 ", 1],
        "delta_threshold": [0],
        "seed": [1.5, -1, True],
        "threads": [0, 1.5],
        "engine": [1],
        "verbose": [1],
        "method": [2],
        "dtype": [16],
        "mismatch": [False],
        "any_base": [1],
    }
    gradients: dict[str, list[Any]] = {
        "drop_rate": [[0.5, 1], [], 0.5],
        "gamma": [[0.5] * 1001],
        "weights": [[1, 2]],
        "seed": [[1, 2]],
        "rescale": [[0, 1]],
        "drop": [[0, 1]],
    }
    pairs = [(setting, value) for setting, values in wrong.items() for value in values]
    pairs += [(key, {"gradient": value}) for key, values in gradients.items() for value in values]
    return [
        *pairs,
        ("drop_rate", [{"gradient": ["x"]}, 0.5]),
        ("drop_rate", {"gradiant": [0.5, 0.9]}),
        ("slerp_t", {"gradient": [0, 1], "layers": 2}),
    ]


@pytest.mark.parametrize(
    ("setting", "value"), list_wrong_settings(), ids=lambda value: str(value)[:40]
)
def test_every_setting_is_checked_in_toml_and_in_scripts(
    refused: Refusal, setting: str, value: Any
) -> None:
    Path("c.toml").write_text(tomli_w.dumps({"dare": {setting: value}}))
    refused(2, f"error: c.toml: [dare] {setting} must be ", "-c", "c.toml")
    with pytest.raises(ConfigError, match=f"^{setting} must be "):
        DareConfig(**{setting: value})


def test_the_numbers_of_numpy_are_numbers() -> None:
    settings = {
        "drop_rate": np.float32(0.5),
        "weights": np.array([1.0, 0.5]),
        "lambda_coeff": {"gradient": np.array([1, 0.5], np.float32)},
        "seed": np.int64(7),
        "max_shard_size": np.uint32(5000),
        "rules": [{"match": "*bias", "drop_rate": [np.float16(0.25), np.int8(0)]}],
    }
    plain = {
        "drop_rate": 0.5,
        "weights": [1.0, 0.5],
        "lambda_coeff": {"gradient": [1, 0.5]},
        "seed": 7,
        "max_shard_size": 5000,
        "rules": [{"match": "*bias", "drop_rate": [0.25, 0]}],
    }
    assert DareConfig(**settings) == DareConfig(**plain)
    with pytest.raises(ConfigError, match="drop_rate must be"):
        DareConfig(drop_rate=np.float32(1.5))


@pytest.mark.parametrize(
    ("config", "recorded"),
    [
        ({}, "expectation"),
        ({"rescale": True}, "expectation"),
        ({"rescale": "expectation"}, "expectation"),
        ({"rescale": False}, "none"),
        ({"rescale": "l1"}, "l1"),
        ({"drop": ["random", "random"]}, "expectation"),
        ({"drop": "magnitude"}, "none"),
        ({"drop": "magnitude", "rescale": False}, "none"),
        ({"drop": ["magnitude", "random"]}, None),
        ({"rules": [{"match": "*", "drop": "magnitude"}]}, None),
        ({"drop": "della", "drop_rate": 0.5}, "expectation"),
    ],
    ids=str,
)
def test_a_recipe_says_how_it_rescales_and_means_it(config: dict[str, Any], recorded: Any) -> None:
    config = DareConfig(**config)
    table = config.recipe_settings()
    assert table.get("rescale") == recorded
    again = DareConfig(**table, rules=config.rules)
    assert (again.recipe_settings(), asdict(again.general(2))) == (table, asdict(config.general(2)))


def vary(name: str) -> tuple[dict[str, Any], Any]:
    """Settings beside which one means something, and a value that it does not have there."""
    method = next((method for method in METHODS if name in METHODS[method].settings), "linear")
    drop = next((drop for drop in DROPS if name in DROPS[drop].settings), "random")
    config = {"method": method, "drop": drop, "drop_rate": 0.25}
    config |= {"adapter_rank": 8} if name == "adapter_rest" else {}
    usual = getattr(DareConfig(**config), name)
    check = SETTINGS[name].check
    tried = (*check.choices, True, False, 0.125, 0.75, 7, [0.25, 1], "12MB", ["unet"])
    fitting = [value for value in map(freeze, tried) if check.accepts(value) and value != usual]
    return config, fitting[-1]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_holds_what_decides_bytes_and_nothing_else(
    models: Models, tmp_path: Path, name: str
) -> None:
    """By construction, also for settings that are yet to come."""
    config, value = vary(name)
    one, other = DareConfig(**config), DareConfig(**{**config, name: value})
    decides = SETTINGS[name].decides
    assert (one.recipe_settings() != other.recipe_settings()) == (decides == "tensors")
    assert (one.recipe_settings(True) != other.recipe_settings(True)) == (
        decides in ("tensors", "files")
    )
    table = other.recipe_settings(True)
    assert DareConfig(**table).recipe_settings(True) == table
    assert "drop_rate" in table


def test_what_is_set_is_in_the_recipe_even_if_the_method_has_it_by_default(models: Models) -> None:
    """A rule may have another method, with another default."""
    rule = "layer.weight:method='ties'"
    run("-q", *MERGE, "--no-normalize", "--weights", "1", "2", "--rule", rule)
    run("verify", OUT)


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        ("method", "tie", "ties?"),
        ("method", "Linear", "linear?"),
        ("method", "dare", "known here: arcee_fusion, karcher, linear, "),
        ("method", "nuslrp", "nuslerp?"),
        ("dtype", "bfloat", "bfloat16?"),
        ("dtype", "BF16", "bf16?"),
        ("drop", "magnitud", "magnitude?"),
        ("rescale", "L1", "l1?"),
        ("mismatch", "overlaps", "overlap?"),
        ("engine", "Plain", "plain?"),
    ],
)
def test_what_was_probably_meant_is_hinted_at(
    refused: Refusal, setting: str, value: Any, hint: str
) -> None:
    Path("c.toml").write_text(tomli_w.dumps({"dare": {setting: value}}))
    for flags in (["-c", "c.toml"], [f"--{setting.replace('_', '-')}={value}"]):
        assert hint in refused(2, "", *flags).splitlines()[1]
    with pytest.raises(ConfigError) as caught:
        DareConfig(**{setting: value})
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        ("[dare]\ndrop_rat = 0.5", "'drop_rat'", "drop_rate?"),
        ("[dare]\ndensity = 0.1", "'density'", "drop_rate = 1 - density"),
        ("merge_method = 'dare_ties'", "[merge_method]", 'dare_linear is "linear"'),
        ("[dare]\nzzz = 1", "'zzz'", "any_base, boost, boost_limit, components, delta_threshold"),
        ("[dare]\ndrop_rate = ", "TOML", "merge_config.toml"),
        ("[dare]\nseed = " + "1" * 5000, "TOML", "merge_config.toml"),
        ("[model]\nx = 1", "[model]", "models?"),
        ("[weights]\nx = 1", "[weights]", "weights under [dare]"),
        ('[models]\nmerge_files = "one.safetensors"', "merge_files", "write it as"),
        ("[models]\nmerge_files = [1]", "merge_files", "write it as"),
        ("[models]\nbase_file = 3", "base_file", "write it as"),
        ("[[models]]\nbase_file = 3", "models", "[models]"),
        ("[recipe]\nmask = 'other'", "'other'", "version"),
        ("[recipe]\ninputs = 3", "inputs", "[recipe]"),
    ],
)
def test_a_wrong_configuration_is_named(
    refused: Refusal, text: str, complaint: str, hint: str
) -> None:
    Path("c.toml").write_text(text)
    error, hinted = refused(2, complaint, "--config", "c.toml").splitlines()
    assert error.startswith("error: c.toml")
    assert hint in hinted


@pytest.mark.parametrize(
    ("flags", "complaint", "hint"),
    [
        ("-q", "no base", "--base MODEL"),
        ("--seed", "one argument", "--help"),
        ("-b b.safetensors", "no models", "--merge MODEL"),
        ("-b b.safetensors -m m.safetensors", "no output", "--output PATH"),
        ("-b '' -m m.safetensors", "empty", "shell"),
        ("--drop-rate 1", "--drop-rate", "--help"),
        ("--drop-rate 90", "--drop-rate", "90% are 0.9"),
        ("--drop-rate much", "'much'", "only numbers"),
        ("--drop-rte 0.5", "'--drop-rte'", "--drop-rate?"),
        ("--density 0.1", "'--density'", "drop_rate = 1 - density"),
        ("--drops 0.5", "'--drops'", "did you mean --"),
        ("--drop 0.5", "one of random", "known here"),
        ("-c nowhere.toml", "'nowhere.toml'", "path"),
        ("-c none.yaml -o out", "'none.yaml'", "path"),
        ("-c /dev/null/x", "'/dev/null/x'", "--config"),
        ("c.toml", "'c.toml'", "--config"),
        ("verify", "nothing to verify", "verify PATH"),
        ("verfy x", "'verfy'", "verify"),
        ("mege", "no command 'mege'", "did you mean merge?"),
        ("help mege", "no command 'mege'", "did you mean merge?"),
        ("models/a models/b", "no command 'models/a'", "files go after --base"),
        ("verify x --seed 3", "--seed means nothing to verify", "belongs to"),
        ("--verify x --resume", "--resume means nothing to verify", "belongs to"),
        ("-q verify x", "'verify'", "verify ..."),
        ("--rule '\udcff*:drop_rate=0'", "match must be a pattern", "like"),
        ("--threads 1 analyze", "'analyze'", "analyze ..."),
        ("--plot a.png", "--plot means nothing to merge", "analyze"),
        ("analyse", "'analyse'", "analyze"),
        ("unite", "'unite'", "analyze, convert, evaluate, extract, merge, pack, sweep, verify"),
        ("merge --per-tensor", "--per-tensor means nothing to merge", "analyze"),
        ("analyze --dry-run", "--dry-run means nothing to analyze", "merge"),
        ("analyze --verify x", "--verify means nothing to analyze", "verify"),
        ("analyze -b b -m m --plot a.gif", "'a.gif'", ".png"),
        ("analyze -b b -m m --plot nowhere/a.png", "'nowhere/a.png'", "make it"),
        *(
            (f"verify x {flag}", f"{flag.split()[0]} means nothing to verify", "belongs to")
            for flag in (
                *("--output x", "--config x", "--rule *:drop_rate=0", "--tokenizer x"),
                *("--lambda 1", "--force", "--dry-run", "--per-tensor"),
            )
        ),
    ],
)
def test_wrong_flags_are_named(refused: Refusal, flags: str, complaint: str, hint: str) -> None:
    assert hint in refused(2, complaint, *shlex.split(flags)).splitlines()[-1]


def test_scripts_must_give_a_list_of_models_and_a_config() -> None:
    for words, *given in (
        ("be a list of files", "m"),
        ("no models", []),
        ("be a DareConfig", ["m"], {"seed": 1}),
    ):
        with pytest.raises(ConfigError, match=words):
            DareMerger("base.safetensors", *given)


def test_types_have_short_names() -> None:
    for name in ("bfloat16", "float16", "float32", "float64"):
        short = name.replace("bfloat", "bf").replace("float", "fp")
        assert DareConfig(dtype=short) == DareConfig(dtype=name)


def test_files_that_are_not_models_of_this_base_are_refused(
    models: Models, refused: Refusal
) -> None:
    base = load_file(models[0])
    misread = ("$(reboot).bin", "a'b.bin", "`x`.bin")
    fill(
        {
            "empty": b"",
            "text": b"no model at all, just text",
            "model.gguf": b"GGUF" + bytes(100),
            "folder/x": b"",
            "short": models[1].read_bytes()[:-100],
            "index.json": b'{"weight_map": {}}',
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        }
    )
    for name in ("pickle.bin", "pickled.safetensors", *misread):
        torch.save({"w": torch.ones(3)}, name)
    save(
        Path(),
        wide={**base, "layer.bias": torch.ones(62, dtype=BF16)},
        other={"something": torch.ones(3)},
        ints={**base, "layer.bias": torch.ones(61, dtype=torch.int64)},
    )
    os.mkfifo("pipe") if hasattr(os, "mkfifo") else Path("pipe").symlink_to(os.devnull)
    for name, words in {
        "absent": "'absent'",
        "~nosuch/x.safetensors": "no file or directory",
        "folder": "holds no model",
        "empty": "is empty",
        "short": "complete safetensors",
        "text": "complete safetensors",
        "pointer": "Git LFS",
        "model.gguf": "GGUF",
        "index.json": "weight_map",
        "pipe": "regular file",
        "pickle.bin": "dare convert pickle.bin pickle.safetensors",
        "pickled.safetensors": "PyTorch pickle",
        "wide.safetensors": "'layer.bias' is [61] in 'base.safetensors' and [62] in",
        "ints.safetensors": "'layer.bias' is BF16 in 'base.safetensors' and I64 in",
        "other.safetensors": "no tensor in common",
        **{name: f"dare convert {shlex.quote(name)} " for name in misread},
    }.items():
        refused(1, words, *MERGE, "-m", name)


def test_outputs_that_cannot_be_written_are_refused(
    models: Models, refused: Refusal, monkeypatch: Patch
) -> None:
    Path("taken.safetensors").mkdir()
    Path("loop.safetensors").symlink_to("loop.safetensors")
    os.link(models[0], "hard.safetensors")
    refused(2, "is the input", *MERGE, "-o", "hard.safetensors", "--force")
    suffixes = "bin pt pth ckpt gguf safetensor safetensors2 SafeTensor safetenosrs st"
    for suffix in suffixes.split():
        refused(2, f"'merged.{suffix}'", *MERGE, "-o", f"merged.{suffix}")
    for output, status, words in (
        (os.path.abspath(os.sep), 2, "holds the input"),
        ("taken.safetensors", 1, "is a directory"),
        ("loop.safetensors", 1, "loop"),
        ("x" * 300, 1, "File name too long"),
    ):
        refused(status, words, *MERGE, "-o", output)
    refused(1, "is not a path", *MERGE, "-b", "a\0b")
    room = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    refused(1, " has 1 kB free", *MERGE)


@pytest.mark.parametrize("output", ["new/deep/out.safetensors", "new/deep/out"])
def test_directories_above_an_output_are_made_with_it(
    models: Models, refused: Refusal, output: str
) -> None:
    merge = [*MERGE, "-q", "-o", output]
    run(*merge, "--dry-run")
    broken = load_file(models[1]) | {"scalar": torch.tensor(math.nan, dtype=BF16)}
    [path] = save(Path(), broken=broken)
    refused(1, "'scalar' holds nan", *merge, "-m", path)
    assert not Path("new").exists(), "what failed leaves nothing behind"
    run(*merge)
    assert Path(output).exists()
    assert os.listdir("new/deep") == [Path(output).name]


def test_what_the_system_refuses_is_passed_on(
    models: Models, capsys: Capture, monkeypatch: Patch
) -> None:
    """As root nothing is unreadable, so the system's refusals are stood in for."""
    denied = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    broken = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    folder = Path().absolute()
    before = snapshot(folder)
    for owner, name, stand_in, complaint in (
        (Path, "open", denied, "'base.safetensors': Permission denied"),
        (Path, "stat", denied, "'out.safetensors' cannot be used: Permission denied"),
        (os, "access", lambda path, mode: Path(path) != folder, "is not writable"),
        (os, "fsync", denied, "'out.safetensors': Permission denied"),
        (tensorfile, "read_at", broken, "'base.safetensors': Input/output error"),
        (shutil, "disk_usage", broken, "'out.safetensors' cannot be used: Input/output error"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stand_in)
            run(*MERGE, status=1)
        assert complaint in capsys.readouterr().err
        assert snapshot(folder) == before


@pytest.mark.skipif(os.name == "nt", reason="paths are too short there")
def test_what_is_nested_too_deeply_is_no_accident(pair: Pair, capsys: Capture) -> None:
    flags = ["-q", "-b", "base", "-m", "math", "-o", "merged"]
    for text in ('{"x":' + "[" * 100_000, '{"added_tokens":[' + "[" * 30_000):
        Path("base/tokenizer.json").write_text(text)
        run(*flags, "--tokenizer", "./base", status=1)
        assert "'base/tokenizer.json'" in capsys.readouterr().err
    subprocess.run(["mkdir", "-p", "base" + "/d" * 1200], check=True)
    Path("base" + "/d" * 1200, "f").touch()
    try:
        run(*flags, status=1)
    finally:
        subprocess.run(["rm", "-rf", "base/d"], check=True)  # which pytest could not do
    assert "nested too deeply" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_in_an_output_or_beside_it_are_not_waited_for(
    pair: tuple[Path, Path], kind: str
) -> None:
    fill({"base/config.json": b"{}", LOCK: b""})
    merge = ("-q", "-b", "base", "-m", "math", "-o", "merged")
    for place, flags, status, words in (
        (LOCK, merge, 1, "merged.partial"),
        ("merged.partial/journal", (*merge, "--resume"), 0, ""),
        ("merged/mine", merge, 1, "also holds 'mine'"),
        ("merged/config.json", ("verify", "merged"), 1, "'config.json' cannot be read"),
        ("merged/model.safetensors", ("verify", "merged"), 1, "is not a regular file"),
        ("merged/dare_recipe.toml", ("verify", "merged"), 1, "is not a regular file"),
        ("merged/dare_recipe.toml", merge, 1, "was not made by this tool"),
    ):
        Path(place).unlink(missing_ok=True)
        os.mkfifo(place) if kind == "pipe" else Path(place).symlink_to("/dev/zero")
        done = command(*flags)
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr
        Path(place).unlink(missing_ok=True)
        fill({LOCK: b"dare is merging here: process 1\n"} if place == LOCK else {})


@pytest.mark.parametrize(
    ("bad", "dtype", "config"),
    [
        (math.nan, BF16, []),
        (math.inf, F32, []),
        (-math.inf, F16, ["--engine=plain"]),
        (math.nan, F64, ["--engine=plain"]),
        (math.inf, BF16, ["--method=ties", "--keep-ratio=0.5"]),
        (-math.inf, BF16, ["--method=slerp"]),
        slow(math.nan, F16, []),
        slow(math.inf, F64, []),
    ],
    ids=str,
)
def test_a_value_that_is_not_finite_is_named_with_its_place(
    refused: Refusal, bad: float, dtype: Any, config: list[str]
) -> None:
    names = ("base", "math", "code")
    for where, name, place in (("base", "own", 1), *((m, "layer.bias", 60) for m in names)):
        base = random_model(dtype=dtype) | {"own": torch.zeros(3, dtype=dtype)}
        models = {model: finetune(base, k) for k, model in enumerate(names)}
        models[where][name][place] = bad
        save(Path(), **models)
        refused(
            1, f"'{where}.safetensors': tensor '{name}' holds {bad} at [{place}]", *MERGE, *config
        )


@pytest.mark.parametrize(
    ("dtype", "large"), [(F16, 60000.0), (BF16, 3e38), (F32, 3e38), (F64, 1.7e308)]
)
def test_a_result_beyond_the_type_is_refused(refused: Refusal, dtype: Any, large: float) -> None:
    base = torch.zeros(3000, dtype=dtype)
    model = base.clone()
    model[17] = large
    model[1500:] = large / 2
    for one, other in (
        (base, model),
        (torch.full_like(base, large), torch.full_like(base, -large)),
    ):
        save(Path(), base={"w": one}, math={"w": other}, code={"w": other})
        refused(1, "'w' gives values beyond", *MERGE, "--engine", "plain")


def test_of_several_faults_the_first_in_the_file_is_named(
    refused: Refusal, monkeypatch: Patch
) -> None:
    base = {f"t{i:03}": torch.ones(2000, dtype=BF16) for i in range(100)}
    broken = base | {name: base[name] * math.nan for name in ("t013", "t014", "t050")}
    save(Path(), base=base, math=broken, code=broken)
    run = Worker.run  # in which the first fault is found last

    def find_late(*given: Any) -> Any:
        time.sleep(0.2 * (given[1].tensor.name == "t013"))
        return run(*given)

    monkeypatch.setattr(Worker, "run", find_late)
    refused(1, "'math.safetensors': tensor 't013'", *MERGE, "--threads", "7")


def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    models: Models, monkeypatch: Patch
) -> None:
    jobs = MergePlan.jobs
    monkeypatch.setattr(
        MergePlan, "jobs", lambda *arguments: os.truncate(models[1], 2000) or jobs(*arguments)
    )
    with pytest.raises(DareError, match="became shorter"):
        run_merge(models[0], models[1:], OUT)
    assert list(Path().glob("out*")) == []


def test_threads_that_cannot_be_started_are_too_little_memory(
    models: Models, refused: Refusal, monkeypatch: Patch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_two(self: threading.Thread) -> None:
        started.append(self)
        if len(started) % 3 == 0:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    refused(1, "too little memory", *MERGE, "--threads", "4")
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("no more"), "too little memory"),
        (ZeroDivisionError("oops"), "ZeroDivisionError: oops\nhint: this is a bug"),
        (ModuleNotFoundError(name="numpy"), "numpy is not installed for "),
    ],
)
def test_any_error_leaves_nothing_behind_and_no_traceback(
    models: Models, capsys: Capture, monkeypatch: Patch, error: Exception, words: str
) -> None:
    before = snapshot(Path())
    monkeypatch.setattr(Worker, "run", Mock(side_effect=error))
    run(*MERGE, status=1)
    assert words in capsys.readouterr().err
    monkeypatch.setenv("DARE_TRACEBACK", "1")
    with nullcontext() if "bug" not in words else pytest.raises(ZeroDivisionError):
        dare.main(MERGE)
    assert snapshot(Path()) == before


LATE_IMPORT = """
import os, signal
try:
    os.kill(os.getpid(), signal.{})
except BaseException:  # as compiled modules do
    raise ImportError("it failed to import") from None
"""


@POSIX
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_within_an_import_stops_the_command(
    models: Models, name: str, status: int
) -> None:
    fill({"late/tomli_w.py": LATE_IMPORT.format(name).encode()})
    before = snapshot(Path())
    done = command(*MERGE, env=os.environ | {"PYTHONPATH": "late", "PYTHONDONTWRITEBYTECODE": "1"})
    assert (done.returncode, done.stderr) == (status, "interrupted\n")
    assert snapshot(Path()) == before
