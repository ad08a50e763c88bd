"""Configuration and bad input: one sentence that says what is wrong, a hint, the right status, and
nothing changed."""

import errno
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

import dare
from dare import ConfigError, DareConfig, DareError, DareMerger
from darelib import kernels
from darelib.core.tuning import TUNING
from darelib.kernels import EngineUnavailable, here, native
from darelib.models import tensorfile
from darelib.output.publish import Output
from darelib.plan.plan import Task
from darelib.requests.recipe import read_recipe
from darelib.run.worker import Worker
from tests import support
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    Capture,
    Models,
    Patch,
    command,
    finetune,
    random_model,
    save,
    snapshot,
    write_config,
)

Refused = Callable[..., str]
MERGE = [
    "-b",
    "base.safetensors",
    "-m",
    "math.safetensors",
    "code.safetensors",
    "-o",
    "out.safetensors",
]
OUT, LOCK = Path("out.safetensors"), "merged.partial/lock"


@pytest.fixture(autouse=True)
def refused(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> Refused:
    """A function that wants the command refused with a status and some words, and nothing changed,
    at the models."""
    monkeypatch.chdir(tmp_path)
    return lambda status, words, *flags: support.refuse(
        tmp_path, capsys, status, words, arguments=[*flags]
    )


def fill(contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)


def test_flags_beat_toml_and_toml_beats_defaults(models: Models, tmp_path: Path) -> None:
    config = str(write_config(tmp_path, drop_rate=0.5, verbose=False))
    assert dare.main(["-c", config]) == 0
    assert (read_recipe(OUT).dare["drop_rate"], read_recipe(OUT).dare["seed"]) == (0.5, 42)
    flags = [
        "--drop-rate",
        ".25",
        "--merge",
        str(models[1]),
        "--lambda",
        "-1e-3",
        "--weights",
        "-2.5E+1",
    ]
    assert dare.main([*flags, "-c", config]) == 0
    recipe = read_recipe(OUT)
    assert [recipe.dare[name] for name in ("drop_rate", "lambda_coeff", "weights")] == [
        0.25,
        -0.001,
        [-25.0],
    ]
    assert [model.name for model in recipe.merge] == [models[1].name]


def test_paths_in_toml_are_relative_to_it(
    models: Models, tmp_path: Path, monkeypatch: Patch
) -> None:
    config = write_config(tmp_path, verbose=False)
    config.write_bytes(
        b"\xef\xbb\xbf" + config.read_bytes().replace(b"\n", b"\r\n")
    )  # as editors on Windows do
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert dare.main(["-c", str(config), "-o", "here.safetensors"]) == 0
    assert Path("here.safetensors").exists()
    assert dare.main(["-c", "../config.toml"]) == 0
    assert [model.name for model in read_recipe(tmp_path / OUT).merge] == [
        "math.safetensors",
        "code.safetensors",
    ]


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
    models: Models, refused: Refused, text: str, words: str
) -> None:
    """Recipes too: that of a model directory may come from anywhere."""
    fill({"out/dare_recipe.toml": text.encode()})
    started = time.process_time()
    refused(2, words, "-c", "out/dare_recipe.toml")
    refused(1, "was not made by this tool", *MERGE, "-o", "out")
    assert time.process_time() - started < 5


@pytest.mark.slow
def test_a_recipe_that_could_not_be_read_again_is_not_written(
    models: Models, refused: Refused
) -> None:
    Path("c.toml").write_text(
        f'[[rules]]\nmatch = ["*", "{"x" * ((1 << 20) - 60)}"]\ndrop_rate = 0.5'
    )
    refused(2, "the recipe would be longer than 1,048,576 bytes", *MERGE, "-c", "c.toml")


@pytest.mark.parametrize(
    ("setting", "values"),
    {
        "drop_rate": (1, -0.1, math.nan, "0.5", True, [], [0.5, 1]),
        "weights": (0.5, [], ["1"], [math.inf]),
        "lambda_coeff": (math.inf, "1"),
        "rescale": (1,),
        "rescale_q": (0, 1.5, []),
        "keep_ratio": (0, 1.5),
        "normalize": (1, "no"),
        "slerp_t": (-1, 2),
        "drop": (1, [], ["random", "no"]),
        "gamma": (1, -0.1, "0.1"),
        "epsilon": (0.5, -0.1, [0.6]),
        "threshold": (-1, "1"),
        "max_shard_size": ("5 XB", "", -1),
        "delta_threshold": (0,),
        "seed": (1.5, -1, True),
        "threads": (0, 1.5),
        "engine": (1,),
        "verbose": (1,),
        "method": (2,),
        "dtype": (16,),
        "mismatch": (False,),
        "any_base": (1,),
    }.items(),
)
def test_every_setting_is_checked_in_toml_and_in_scripts(
    refused: Refused, setting: str, values: Any
) -> None:
    for value in values:
        Path("c.toml").write_text(tomli_w.dumps({"dare": {setting: value}}))
        error = refused(2, "hint: --help says what it does", "-c", "c.toml")
        assert error.startswith(f"error: c.toml: [dare] {setting} must be ")
        with pytest.raises(ConfigError, match=f"^{setting} must be "):
            DareConfig(**{setting: value})


@pytest.mark.parametrize(
    "table",
    [
        {"drop_rate": {"gradient": [0.5, 1]}},
        {"drop_rate": {"gradient": []}},
        {"drop_rate": {"gradient": 0.5}},
        {"gamma": {"gradient": [0.5] * 1001}},
        {"drop_rate": [{"gradient": ["x"]}, 0.5]},
        {"weights": {"gradient": [1, 2]}},
        {"seed": {"gradient": [1, 2]}},
        {"slerp_t": {"gradient": [0, 1], "layers": 2}},
        {"rescale": {"gradient": [0, 1]}},
        {"drop": {"gradient": [0, 1]}},
        {"drop_rate": {"gradiant": [0.5, 0.9]}},
    ],
    ids=lambda table: str(table)[:50],
)
def test_a_gradient_of_what_the_setting_cannot_be_is_refused(refused: Refused, table: Any) -> None:
    Path("c.toml").write_text(tomli_w.dumps({"dare": table}))
    error = refused(2, "hint: only numbers change over the layers, like {gradient", "-c", "c.toml")
    assert error.startswith(f"error: c.toml: [dare] {next(iter(table))} must be ")


def test_a_bare_list_is_no_gradient(models: Models, capsys: Capture) -> None:
    words = [
        "--base",
        *models[:1],
        "--merge",
        *models[1:3],
        "-o",
        "out",
        "--drop-rate",
        "0.9",
        "0.5",
        "0.9",
    ]
    assert dare.main(list(map(str, words))) == 2
    assert (
        "for 2 models\nhint: give one for each model; what changes over the layers is"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("config", "complaint", "hint"),
    [
        (
            {"drop": "magnitude", "method": "slerp"},
            "method slerp goes with drop random only",
            "use method linear or ties",
        ),
        (
            {"drop": ["random", "della"], "drop_rate": 0.5, "method": "ties", "keep_ratio": 0.5},
            "not della",
            "trim off",
        ),
        (
            {"drop": "magnitude", "rescale": True},
            "rescale true means nothing to drop magnitude",
            '"l1" or "none"',
        ),
        (
            {"drop": "breadcrumbs", "rescale": "expectation"},
            "rescale expectation means nothing to",
            '"l1" or "none"',
        ),
        (
            {"rules": [{"match": "*", "drop": "magnitude"}], "rescale": True},
            "rule 1: rescale true means",
            '"l1" or "none"',
        ),
        (
            {"drop": "della", "drop_rate": 0.5, "rescale_q": 0.6},
            "rescale_q means nothing to drop della",
            "leave one",
        ),
        (
            {"rescale": "l1", "rescale_q": 0.6},
            "rescale_q means nothing when rescale is l1",
            "leave one",
        ),
        (
            {"rules": [{"match": "*", "rescale": "none", "rescale_q": 0.6}]},
            "rule 1: rescale_q means nothing",
            "leave one",
        ),
        ({"gamma": 0.1}, "gamma means nothing to drop random", "use drop breadcrumbs"),
        (
            {"epsilon": 0.1, "drop": ["magnitude", "random"]},
            "nothing to drop magnitude and random",
            "use drop della",
        ),
        (
            {"rules": [{"match": "*", "gamma": 0.1}, {"match": "*", "drop": "breadcrumbs"}]},
            "rule 1: gamma",
            "breadcrumbs",
        ),
        (
            {"drop": "della"},
            "with drop_rate 0.9 and epsilon 0.15, della would keep",
            "give an epsilon below 0.1, or a drop_rate between 0.15 and 0.85",
        ),
        (
            {
                "drop": "della",
                "drop_rate": 0.5,
                "epsilon": {"gradient": [0.1, 0.45, 0.499]},
                "rules": [{"match": "*", "drop_rate": 0.52}],
            },
            "rule 1: with drop_rate 0.52 and epsilon 0.499",
            "below 0.48",
        ),
        ({"drop": ["random"]}, "drop has 1 values for 2 models", "one for each"),
        (
            {"rules": [{"match": "*", "weights": [1.0]}]},
            "rule 1: weights has 1 values for 2 models",
            "one for each",
        ),
        (
            {"method": "ties", "rules": [{"match": "*", "weights": [1, {"gradient": [1, -1, 1]}]}]},
            "rule 1: ties weights",
            "normalize to false",
        ),
        (
            {"rescale_q": 0.5, "drop_rate": {"gradient": [0.9, 0.4, 0.9]}},
            "rescale_q 0.5 is below 1 - drop_rate = 0.6",
            "q",
        ),
        (
            {"rules": [{"match": "*", "slerp_t": 0.5}]},
            "slerp_t means nothing to method linear",
            "use method slerp",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_drop_is_refused(
    config: dict[str, Any], complaint: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        DareMerger("base.safetensors", ["model.safetensors"] * 2, DareConfig(**config))
    assert hint in caught.value.hint


def test_what_goes_with_each_drop_is_accepted() -> None:
    breadcrumbs, della = (
        {"match": "a", "drop": "breadcrumbs"},
        {"match": "b", "drop": "della", "drop_rate": [0.5, 0]},
    )
    for config in (
        {"drop": ["random", "magnitude"], "rescale": "l1", "rules": [breadcrumbs, della]},
        {"gamma": 0.1, "epsilon": 0.4, "rules": [breadcrumbs, della]},
        {"method": "ties", "keep_ratio": 0.5, "rules": [breadcrumbs | {"keep_ratio": 1}]},
        {"rescale": True, "rules": [della, breadcrumbs | {"rescale": False}]},
    ):
        DareConfig(**config).check_models(2)


@pytest.mark.parametrize(
    ("config", "recorded"),
    [
        ({}, True),
        ({"rescale": True}, True),
        ({"rescale": "expectation"}, True),
        ({"rescale": "none"}, False),
        ({"rescale": "l1"}, "l1"),
        ({"drop": ["random", "random"]}, True),
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
    assert ("drop" in table) == (config.drop not in ("random", ("random", "random")))


def test_a_flag_beats_the_rescale_of_a_file(models: Models, tmp_path: Path) -> None:
    config = str(
        write_config(tmp_path, drop_rate=0.5, verbose=False, engine="plain", rescale="none")
    )
    for flags, recorded in (
        ([], False),
        (["--rescale", "expectation"], True),
        (["--no-rescale"], False),
    ):
        assert dare.main(["-c", config, *flags]) == 0
        assert read_recipe(OUT).dare["rescale"] is recorded


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        ("method", "tie", "did you mean ties?"),
        ("method", "Linear", "did you mean linear?"),
        ("method", "dare", "known here: linear, ram, slerp, ties"),
        ("dtype", "bfloat", "did you mean bfloat16?"),
        ("drop", "magnitud", "did you mean magnitude?"),
        ("rescale", "L1", "did you mean l1?"),
        ("dtype", "BF16", "did you mean bf16?"),
        ("mismatch", "overlaps", "did you mean overlap?"),
        ("engine", "Plain", "did you mean plain?"),
        ("max_shard_size", "5", "write 5GB, or 5B if you mean it"),
        ("max_shard_size", " 999 ", "write 999GB, or 999B if you mean it"),
        ("max_shard_size", "5.5", "write 5.5GB, or 5B if you mean it"),
        ("max_shard_size", 1, "write 1GB, or 1B if you mean it"),
    ],
)
def test_what_was_probably_meant_is_hinted_at(
    refused: Refused, setting: str, value: Any, hint: str
) -> None:
    Path("c.toml").write_text(tomli_w.dumps({"dare": {setting: value}}))
    refused(2, f"hint: {hint}\n", "-c", "c.toml")
    refused(2, f"hint: {hint}\n", f"--{setting.replace('_', '-')}={value}")
    with pytest.raises(ConfigError) as caught:
        DareConfig(**{setting: value})
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        (
            "[dare]\ndrop_rat = 0.5",
            "there is no key 'drop_rat' in [dare]",
            "did you mean drop_rate?",
        ),
        (
            "[dare]\ndensity = 0.1",
            "there is no key 'density' in [dare]",
            "here it is drop_rate = 1 - density",
        ),
        (
            "merge_method = 'dare_ties'",
            "there is no table [merge_method]",
            'here it is method: dare_linear is "linear"',
        ),
        (
            "[dare]\nzzz = 1",
            "there is no key 'zzz' in [dare]",
            "known here: any_base, delta_threshold, drop, drop_rate",
        ),
        ("[dare]\ndrop_rate = ", "is not valid TOML", "see merge_config.toml"),
        ("[dare]\nseed = " + "1" * 5000, "is not valid TOML", "see merge_config.toml"),
        ("[model]\nx = 1", "there is no table [model]", "did you mean models?"),
        ("[weights]\nx = 1", "there is no table [weights]", "put weights under [dare]"),
        (
            '[models]\nmerge_files = "one.safetensors"',
            "merge_files must be a list of paths",
            "write it as",
        ),
        ("[models]\nmerge_files = [1]", "merge_files must be a list of paths", "write it as"),
        ("[models]\nbase_file = 3", "base_file must be a path in quotes", "write it as"),
        ("[[models]]\nbase_file = 3", "models must be a table", "write [models]"),
        (
            "[recipe]\nmask = 'other'",
            "this recipe draws its mask with 'other'",
            "run it with the version of dare",
        ),
        ("[recipe]\ninputs = 3", "inputs must be a list of tables", "take the [recipe] table out"),
    ],
)
def test_a_wrong_configuration_is_named(
    refused: Refused, text: str, complaint: str, hint: str
) -> None:
    Path("c.toml").write_text(text)
    error, hinted = refused(2, complaint, "--config", "c.toml").splitlines()
    assert error.startswith("error: c.toml")
    assert hinted.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("flags", "complaint", "hint"),
    [
        ("", "there is no base model", "--base MODEL"),
        ("--seed", "expected one argument", "--help"),
        ("-b b.safetensors", "there are no models to merge", "--merge MODEL"),
        ("-b b.safetensors -m m.safetensors", "there is no output", "--output PATH"),
        ("-b '' -m m.safetensors", "the path of a model is empty", "a variable of the shell"),
        (
            "--drop-rate 1",
            "--drop-rate must be a number from 0 up to but not including 1",
            "--help",
        ),
        ("--drop-rate 90", "--drop-rate must be", "it is a share: 90% are 0.9"),
        ("--drop-rate much", "invalid float value: 'much'", "files go after --merge"),
        ("--drop-rte 0.5", "there is no option '--drop-rte'", "did you mean --drop-rate?"),
        ("--density 0.1", "there is no option '--density'", "here it is drop_rate = 1 - density"),
        ("--drops 0.5", "there is no option '--drops'", "did you mean --"),
        ("--drop 0.5", "one of random", "known here"),
        ("-c nowhere.toml", "there is no configuration file 'nowhere.toml'", "check the path"),
        ("-c /dev/null/x", "cannot read '/dev/null/x'", "give --config"),
        ("c.toml", "'c.toml' is not expected here", "--config"),
        ("verify", "there is nothing to verify", "verify PATH"),
        ("verfy x", "'verfy' is not expected", "verify"),
        ("verify x --seed 3", "--seed means nothing to verify", "it belongs to"),
        ("--verify x --resume", "--resume means nothing to verify", "it belongs to"),
        ("-q verify x", "'verify' must be the first word", "like"),
    ],
)
def test_wrong_flags_are_named(refused: Refused, flags: str, complaint: str, hint: str) -> None:
    assert hint in refused(2, complaint, *shlex.split(flags)).splitlines()[-1]


def test_scripts_must_give_a_list_of_models_and_a_config() -> None:
    for words, *given in (
        ("be a list of files", "m"),
        ("no models", []),
        ("be a DareConfig", ["m"], {"seed": 1}),
    ):
        with pytest.raises(ConfigError, match=words):
            DareMerger("base.safetensors", *given)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_short_names_of_types_make_the_same_bytes(
    models: Models, tmp_path: Path, name: str
) -> None:
    short, made = name.replace("bfloat", "bf").replace("float", "fp"), set()
    for flags in (
        ["--dtype", name],
        ["--dtype", short],
        ["-c", str(write_config(tmp_path, dtype=short))],
    ):
        assert dare.main(["-q", "--engine", "plain", *MERGE, *flags]) == 0
        made.add(OUT.read_bytes())
    assert len(made) == 1
    assert read_recipe(OUT).dare["dtype"] == name
    assert load_file(OUT)["layer.weight"].dtype == getattr(torch, name)


def test_flags_and_toml_choose_an_engine(
    models: Models, refused: Refused, capsys: Capture, monkeypatch: Patch
) -> None:
    assert dare.main(["-q", "--engine", "numba", *MERGE]) == 0
    made = {OUT.read_bytes()}
    monkeypatch.setattr(kernels, "_refused", {})
    for engine in (native, here):
        monkeypatch.setattr(
            engine, "load_kernels", Mock(side_effect=EngineUnavailable("it is out of order"))
        )
    refused(1, "the engine numba cannot be used: it is out of order", *MERGE, "--engine", "numba")
    config = str(write_config(Path(), engine="plain"))
    for flags, warned in (
        (["--engine", "plain"], False),
        (["-c", config], False),
        (["--engine", "auto"], True),
    ):
        assert dare.main(["-q", *MERGE, *flags]) == 0
        made.add(OUT.read_bytes())
        assert ("warning: Numba cannot be used" in capsys.readouterr().err) is warned
    assert len(made) == 1
    assert dare.main(["verify", "-q", "--engine", "plain", str(OUT)]) == 0
    assert dare.main(["verify", str(OUT), "--engine", "numba"]) == 1


def test_files_that_are_not_models_of_this_base_are_refused(
    models: Models, refused: Refused
) -> None:
    base, misread = load_file(models[0]), ("$(reboot).bin", "a'b.bin", "`x`.bin")
    texts = {
        "empty": b"",
        "text": b"no model at all, just text",
        "model.gguf": b"GGUF" + bytes(100),
    }
    texts |= {
        "folder/x": b"",
        "short": models[1].read_bytes()[:-100],
        "index.json": b'{"weight_map": {}}',
    }
    fill(texts | {"pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"})
    for name in ("pickle.bin", "pickled.safetensors", *misread):
        torch.save({"w": torch.ones(3)}, name)
    save(
        Path(),
        wide={**base, "layer.bias": torch.ones(62, dtype=BF16)},
        other={"something": torch.ones(3)},
    )
    save(Path(), ints={**base, "layer.bias": torch.ones(61, dtype=torch.int64)})
    os.mkfifo("pipe") if hasattr(os, "mkfifo") else Path("pipe").symlink_to(os.devnull)
    for name, words in {
        "absent": "there is no file or directory 'absent'",
        "~nosuch/x.safetensors": "there is no file or directory",
        "folder": "holds no model",
        "empty": "is empty",
        "short": "is not a complete safetensors file",
        "text": "is not a complete safetensors file",
        "pointer": "Git LFS pointer",
        "model.gguf": "is a GGUF file",
        "index.json": "is JSON without a weight_map",
        "pipe": "is not a regular file",
        "pickle.bin": "dare.py convert pickle.bin pickle.safetensors",
        "pickled.safetensors": "is a PyTorch pickle",
        "wide.safetensors": "'layer.bias' is [61] in 'base.safetensors' and [62] in 'wide.safetensors'",
        "ints.safetensors": "'layer.bias' is BF16 in 'base.safetensors' and I64 in 'ints.safetensors'",
        "other.safetensors": "has no tensor in common",
        **{name: f"dare.py convert {shlex.quote(name)} " for name in misread},
    }.items():
        refused(1, words, *MERGE, "-m", name)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("name", ["my model.pt", "pickled.safetensors"])
def test_the_command_that_converts_a_pickle_can_be_pasted(
    models: Models, refused: Refused, name: str
) -> None:
    torch.save(load_file(models[1]), name)
    [line] = re.findall(
        r"which runs none: dare.py (convert .*)\n", refused(1, "", *MERGE, "-m", name)
    )
    before = set(Path().iterdir())
    program = shlex.join([sys.executable, str(support.HERE / "dare.py")])
    subprocess.run(["sh", "-c", f"{program} {line}"], check=True, timeout=60)
    [made] = set(Path().iterdir()) - before
    assert made.suffix == ".safetensors"
    support.assert_same(load_file(made), load_file(models[1]))


def test_outputs_that_cannot_be_written_are_refused(
    models: Models, refused: Refused, monkeypatch: Patch
) -> None:
    Path("sub").mkdir()
    Path("taken.safetensors").mkdir()
    Path("soft.safetensors").symlink_to(models[1])
    Path("loop.safetensors").symlink_to("loop.safetensors")
    os.link(models[0], "hard.safetensors")
    for output in ("base", "sub/../math", "./code", "soft", "hard"):
        refused(2, "is the input", *MERGE, "-o", f"{output}.safetensors", "--force")
    for suffix in (
        "bin",
        "pt",
        "pth",
        "ckpt",
        "gguf",
        "safetensor",
        "safetensors2",
        "SafeTensor",
        "safetenosrs",
        "st",
    ):
        words = f"'merged.{suffix}' does not end in .safetensors\nhint: did you mean .safetensors?"
        refused(2, words, *MERGE, "-o", f"merged.{suffix}")
    refused(2, "cannot be written to standard output", *MERGE, "-o", "-")
    refused(2, "holds the input", *MERGE, "-o", os.path.abspath(os.sep))
    for output, words in {
        "nowhere/out": "does not exist",
        "taken": "is a directory",
        "loop": "loop",
    }.items():
        refused(1, words, *MERGE, "-o", f"{output}.safetensors")
    refused(1, "cannot be used: File name too long", *MERGE, "-o", "x" * 300)
    refused(1, "is not a path", *MERGE, "-b", "a\0b")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000)
    )
    refused(1, " has 1 kB free\nhint: make room", *MERGE)


def test_only_files_of_this_tool_are_replaced_without_force(
    models: Models, refused: Refused
) -> None:
    for content in (models[0].read_bytes(), b"some notes"):
        OUT.write_bytes(content)
        refused(1, "exists and was not made by this tool\nhint: add --force", *MERGE)
    assert dare.main(["-q", *MERGE, "--force"]) == 0
    assert dare.main(["-q", *MERGE, "--seed", "1"]) == 0
    assert read_recipe(OUT).dare["seed"] == 1


def test_what_the_system_refuses_is_passed_on(
    models: Models, capsys: Capture, monkeypatch: Patch
) -> None:
    """As root nothing is unreadable, so the system's refusals are stood in for."""
    denied, stat, before = (
        Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")),
        Path.stat,
        snapshot(Path()),
    )
    broken = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    base, folder = Path("base.safetensors"), Path().absolute()
    for owner, name, stand_in, complaint in (
        (Path, "open", denied, "cannot read 'base.safetensors': Permission denied"),
        (
            Path,
            "stat",
            lambda path, **_: denied() if path == base else stat(path, **_),
            "cannot read 'base.safetens",
        ),
        (Path, "stat", denied, "'out.safetensors' cannot be used: Permission denied"),
        (os, "access", lambda path, mode: Path(path) != folder, "is not writable"),
        (os, "fsync", denied, "cannot write 'out.safetensors': Permission denied"),
        (tensorfile, "read_at", broken, "cannot read 'base.safetensors': Input/output error"),
        (
            shutil,
            "disk_usage",
            broken,
            "the output 'out.safetensors' cannot be used: Input/output error",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stand_in)
            assert dare.main(MERGE) == 1
        error, hint = capsys.readouterr().err.splitlines()
        assert complaint in error
        assert "bug" not in hint
        assert snapshot(Path()) == before


def test_a_directory_that_may_not_be_read_is_not_missing(
    pair: tuple[Path, Path], refused: Refused, monkeypatch: Patch
) -> None:
    """Neither is it looked for on the Hub."""
    arguments = ["-o", "merged", "-m", "math", "-b"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path) != Path("base"))
        refused(
            1,
            "cannot read 'base': Permission denied\nhint: check its permissions",
            *arguments,
            "base",
        )
    stat = Path.stat

    def deny(path: Path, **options: Any) -> os.stat_result:
        if "locked" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", deny)
        patch.setattr(Path, "lstat", deny)
        for words in (["locked/base"], ["base", "--tokenizer", "locked/base"]):
            refused(1, "cannot read 'locked/base': Permission denied", *arguments, *words)


def test_a_disk_that_fails_in_the_background_is_noticed(
    models: Models, refused: Refused, monkeypatch: Patch
) -> None:
    """The system reports a failed write to the first sync that follows, and to no later one."""
    publish, failures = Output.publish, [OSError(errno.EIO, "Input/output error")]

    def sync(_: int) -> None:
        if failures and threading.current_thread() is not threading.main_thread():
            raise failures.pop()

    def publish_later(output: Output, *arguments: Any) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        output.flusher.mark(output.descriptors[0])
        time.sleep(0.1)
        publish(output, *arguments)

    TUNING.flush_seconds = 0.001
    monkeypatch.setattr(Output, "publish", publish_later)
    refused(1, "cannot write 'out.safetensors': Input/output error", *MERGE)
    assert not failures


@pytest.mark.skipif(os.name == "nt", reason="paths are too short there")
def test_what_is_nested_too_deeply_is_no_accident(pair: tuple[Path, Path], capsys: Capture) -> None:
    flags = ["-q", "-b", "base", "-m", "math", "-o", "merged"]
    for text in ('{"x":' + "[" * 100_000, '{"added_tokens":[' + "[" * 30_000):
        Path("base/tokenizer.json").write_text(text)
        assert dare.main([*flags, "--tokenizer", "./base"]) == 0
    fill({LOCK: b"dare is merging here: process 1\n"})
    fill({"merged.partial/journal": b"%08x %s\n" % (zlib.crc32(b"[" * 100_000), b"[" * 100_000)})
    assert dare.main([*flags, "--resume"]) == 0
    subprocess.run(["mkdir", "-p", "base" + "/d" * 1200], check=True)
    Path("base" + "/d" * 1200, "f").touch()
    try:
        assert dare.main(flags) == 1
    finally:
        subprocess.run(["rm", "-rf", "base/d"], check=True)  # which pytest could not do
    assert (
        "error: something in the models' directories is nested too deeply"
        in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_in_an_output_or_beside_it_are_not_waited_for(
    pair: tuple[Path, Path], kind: str
) -> None:
    fill({"base/config.json": b"{}", LOCK: b""})
    merge = ("-q", "-b", "base", "-m", "math", "-o", "merged")
    for place, flags, status, words in (
        (LOCK, merge, 1, "is in the way"),
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
    ("dtype", "config"),
    [
        (BF16, {}),
        (F32, {}),
        (F16, {"engine": "plain"}),
        (F64, {"engine": "plain"}),
        (BF16, {"method": "ties", "keep_ratio": 0.5}),
        (BF16, {"method": "slerp"}),
        *(pytest.param(dtype, {}, marks=pytest.mark.slow) for dtype in (F16, F64)),
    ],
    ids=str,
)
def test_a_value_that_is_not_finite_is_named_with_its_place(
    refused: Refused, dtype: Any, config: Any
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in config.items()]
    for bad in (math.nan, math.inf, -math.inf):
        for where, name, place in (
            ("base", "own", 1),
            *((m, "layer.bias", 60) for m in ("base", "math", "code")),
        ):
            models = {
                model: finetune(random_model(dtype=dtype), k)
                for k, model in enumerate(("base", "math", "code"))
            }
            models["base"]["own"] = torch.zeros(3, dtype=dtype)
            models[where][name][place] = bad
            save(Path(), **models)
            refused(
                1,
                f"'{where}.safetensors': tensor '{name}' holds {bad} at [{place}]",
                *MERGE,
                *flags,
            )


@pytest.mark.parametrize(
    ("dtype", "large"), [(F16, 60000.0), (BF16, 3e38), (F32, 3e38), (F64, 1.7e308)]
)
def test_a_result_beyond_the_type_is_refused(refused: Refused, dtype: Any, large: float) -> None:
    base, model = torch.zeros(3000, dtype=dtype), torch.zeros(3000, dtype=dtype)
    model[17], model[1500:] = large, large / 2
    for pair in ((base, model), (torch.full_like(base, large), torch.full_like(base, -large))):
        save(Path(), base={"w": pair[0]}, math={"w": pair[1]}, code={"w": pair[1]})
        engine = "plain" if dtype in (F16, F64) else "numba"
        refused(
            1, "merging tensor 'w' gives values beyond the range of ", *MERGE, "--engine", engine
        )


def test_of_several_faults_the_first_in_the_file_is_named(
    refused: Refused, monkeypatch: Patch
) -> None:
    base = {f"t{i:03}": torch.ones(2000, dtype=BF16) for i in range(100)}
    broken = {
        name: tensor * (math.nan if name in ("t013", "t014", "t050") else 1)
        for name, tensor in base.items()
    }
    save(Path(), base=base, math=broken, code=broken)
    run = Worker.run  # in which the first fault is found last
    monkeypatch.setattr(
        Worker,
        "run",
        lambda *given: time.sleep(0.2 * (given[1].tensor.name == "t013")) or run(*given),
    )
    refused(1, "'math.safetensors': tensor 't013'", *MERGE, "--threads", "7")


def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    models: Models, monkeypatch: Patch
) -> None:
    jobs = Task.jobs
    monkeypatch.setattr(
        Task, "jobs", lambda *arguments: os.truncate(models[1], 2000) or jobs(*arguments)
    )
    with pytest.raises(DareError, match="became shorter"):
        support.run_merge(models[0], models[1:], OUT)
    assert list(Path().glob("out*")) == []


def test_a_bug_leaves_nothing_behind_and_no_traceback(
    models: Models, capsys: Capture, monkeypatch: Patch
) -> None:
    jobs, start, before = Task.jobs, threading.Thread.start, snapshot(Path())
    started: list[threading.Thread] = []

    def make_one_job(self: Task, *arguments: Any) -> Any:
        yield next(jobs(self, *arguments))
        raise MemoryError("no more")

    def start_two(self: threading.Thread) -> None:
        started.append(self)
        start(self) if len(started) % 3 else Mock(
            side_effect=RuntimeError("can't start new thread")
        )()

    for owner, name, stand_in, kind, words in (
        (Task, "jobs", make_one_job, MemoryError, "no more"),
        (threading.Thread, "start", start_two, RuntimeError, "can't start new thread"),
        (Worker, "run", Mock(side_effect=ZeroDivisionError("oops")), ZeroDivisionError, "oops"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stand_in)
            assert dare.main([*MERGE, "--threads", "4"]) == 1
            error, hint = capsys.readouterr().err.splitlines()
            assert error == f"error: unexpected {kind.__name__}: {words}"
            assert "DARE_TRACEBACK" in hint
            patch.setenv("DARE_TRACEBACK", "1")
            with pytest.raises(kind, match=words):
                dare.main([*MERGE, "--threads", "4"])
            assert not any(thread.is_alive() for thread in started)
            assert snapshot(Path()) == before
