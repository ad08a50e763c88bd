"""What ships beside the tool: the sweep, the experiment on quality, the benchmark, and what the documents say of them."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import dare
from dare import DareConfig, DareError
from tests.scene import POSIX, Patch, wait_for
from tests.support import (
    F32,
    HERE,
    assert_same,
    finetune,
    low_rank,
    merge,
    random_model,
    run_merge,
    save_directory,
    snapshot,
    write_adapter,
    write_config,
)

EXAMPLES = HERE / "examples"
sys.path.insert(0, str(EXAMPLES))

import benchmark
import benchmark_models
import benchmark_report
import benchmark_rivals
import quality_report
import sweep
import sweep_command
import sweep_plot
from benchmark_report import Point

Capture, Models = pytest.CaptureFixture[str], list[Path]
README, GUIDE, EVIDENCE, *_ = DOCUMENTS = [
    HERE / "README.md", *(HERE / "docs" / f"{name}.md" for name in ("guide", "evidence", "reliability")),
    HERE / "docs" / "how-it-works.md", HERE / "docs" / "contributing.md",
]  # fmt: skip


def run_example(name: str, *arguments: str | Path, **options: Any) -> str:
    """What a script prints, in a process of its own."""
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the sweep over settings ------------------------------------------------------------------------------------------

# An evaluation that knows what was done to a model: the recipe is in the file's header. It notes every call.
JUDGE = """
import hashlib, json, os, struct, sys, time, tomllib
data = open(sys.argv[-1], "rb").read()
header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
settings = tomllib.loads(header.get("__metadata__", {}).get("dare_recipe", "dare = {}"))["dare"]
rate, seed = settings.get("drop_rate", 0), settings.get("seed", 0)
with open("calls.jsonl", "a") as calls:
    print(json.dumps([hashlib.sha256(data).hexdigest(), rate, seed]), file=calls)
score = 1 - (rate - 0.8) ** 2 + seed % 5 * 1e-5 if settings else 0.1
"""


def judge(folder: Path, rest: str = "print('accuracy:', score)") -> str:
    """The evaluation as a command, with a space in its path; rest: how it ends."""
    (folder / "my judge.py").write_text(JUDGE + rest)
    return f'"{sys.executable}" "{folder / "my judge.py"}" {{model}}'


def calls(folder: Path) -> list[Any]:
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recipe_of(path: Path) -> dict[str, Any]:
    """How a model was merged; nothing if it was not."""
    with safe_open(path, "np") as file:
        return tomllib.loads((file.metadata() or {}).get("dare_recipe", ""))


def hill(path: Path) -> float:
    """Best at drop rate 0.8 and lambda 1, with a little noise by the seed."""
    if not (made := recipe_of(path).get("dare")):
        return -1.0
    noise = 1e-4 * math.sin(made["seed"]) * (made["drop_rate"] > 0)
    return -((made["drop_rate"] - 0.8) ** 2) - (made["lambda_coeff"] - 1) ** 2 + noise


def count_calls(evaluate: Callable[[Path], float]) -> tuple[Callable[[Path], float], Models]:
    seen: Models = []
    return (lambda path: (seen.append(path), evaluate(path))[1]), seen  # type: ignore[func-returns-value]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sweep_finds_a_known_optimum_and_ranks_everything(models: Models, tmp_path: Path, sign: int) -> None:
    before = snapshot(tmp_path)
    evaluate, seen = count_calls(lambda path: sign * hill(path))
    grid = sweep.Grid(drop_rate=(0.0, 0.5, 0.8), method=("linear", "ties"), lambda_coeff=(0.5, 1), seeds=3)
    result = sweep.sweep(models[0], models[1:], grid, evaluate, directory=tmp_path, minimize=sign < 0)
    best = result.best.candidate.settings
    assert (best.drop_rate, best.lambda_coeff, result.distinguishable) == (0.8, 1, True)
    means = [sign * row.mean for row in result.rows]
    assert means == sorted(means, reverse=True)
    assert [sign * row.mean for row in result.rows if row.candidate.kind == "alone"] == [-1.0] * 3
    assert sign * result.baseline.mean == pytest.approx(-0.64)
    # 12 combinations: the four without dropping have no seeds, and one of those is the baseline.
    assert (len(result.rows), len(seen)) == (3 + 12, 3 + 4 + 8 * 3)
    assert ("lower is better" if sign < 0 else "higher is better") in str(result)
    assert snapshot(tmp_path) == before, "nothing is left behind"


def test_seeds_of_a_sweep_share_no_mask(models: Models) -> None:
    drawn: list[int] = []

    def note(path: Path) -> float:
        recipe = recipe_of(path)
        drawn.extend(recipe["recipe"]["seeds"] if recipe and recipe["dare"]["drop_rate"] else [])
        return 0.0

    sweep.sweep(models[0], models[1:], sweep.Grid(seeds=4), note, config=DareConfig(seed=7))
    assert sorted(drawn) == list(range(7, 15))


def test_a_combination_is_tried_once_and_only_if_it_makes_sense(
    models: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate, seen = count_calls(lambda path: -abs(recipe_of(path).get("dare", {}).get("rescale_q", 9) - 0.4))
    grid = sweep.Grid(drop_rate=(0.9, 0.5, 0.9, 0), rescale_q=(0.1, 0.5, 1), keep_ratio=(0.5,), seeds=1)
    result = sweep.sweep(models[0], models[1:], grid, evaluate)
    tried = sorted((row.candidate.settings.drop_rate, row.candidate.settings.rescale_q or 0) for row in result.merges)
    assert tried == [(0, 0), (0.5, 0.5), (0.5, 1), (0.9, 0.1), (0.9, 0.5), (0.9, 1)]
    assert len(seen) == 3 + 6
    assert "left out 1 combination that" in caplog.text  # q 0.1 at 0.5; where nothing is dropped, q means nothing
    assert "rescale_q 0.1 is below 1 - drop_rate = 0.5" in caplog.text
    assert tomllib.loads(sweep.winning_configuration(result, tmp_path / "best.toml"))["dare"]["rescale_q"] == 0.5


def test_the_baseline_drops_nothing_whatever_the_rules_say(models: Models) -> None:
    rules = [{"match": "layer.*", "drop_rate": 0.5, "keep_ratio": 0.5}, {"match": "head.*", "lambda_coeff": 0.0}]
    config, merged = DareConfig(method="ties", weights=(3.0, 1.0), rules=rules, engine="plain"), {}

    def keep(path: Path) -> float:
        made = recipe_of(path).get("dare")
        merged[f"{made['method']} {made['drop_rate']}" if made else path.stem] = load_file(path)
        return 0.0

    sweep.sweep(models[0], models[1:], sweep.Grid(method=("linear", "ties"), seeds=1), keep, config=config)
    assert merged.keys() == {"base", "math", "code", "linear 0.0", "linear 0.9", "ties 0.9"}
    base, first, second = (load_file(path) for path in models)
    for name, tensor in base.items():
        deltas = [model[name].float() - tensor.float() for model in (first, second)]
        average = (tensor.float() + (0.75 * deltas[0] + 0.25 * deltas[1])).to(tensor.dtype)
        expected = tensor if name == "head.weight" else average
        assert (merged["linear 0.0"][name] == expected).float().mean() > 0.999
    assert (merged["linear 0.9"]["head.weight"] == base["head.weight"]).all()


# What an evaluation prints, and the score in it.
SCORES = [
    ("0.5", 0.5), ("step 12: loss 3\naccuracy: 93.5%\n", 93.5), ("acc=1e-3", 0.001), ("-7 of them.", -7.0),
    ("perplexity 1,234.5", 1234.5), ("\x1b[32m0.25\x1b[0m", 0.25), ("loaded model2 in 3s: .75", 0.75),
    ('{"score": 0.5, "n": 100}', 0.5), ('{\n "a": {"score": 3},\n "score": 4\n}\n', 4.0), ("{not json} 8", 8.0),
    ('{"score": 1}\nlog 7\n{"score": 2, "tasks": [1, 2]}\ndone in 5 s', 2.0), ('{"accuracy": 0.75}', 0.75),
    ("", None), ("no numbers, model2 only", None), ('{"score": "high"} 3', None), ('{"score": true}', None),
    ('{"score": null, "n": 5}', None),
]  # fmt: skip


@pytest.mark.parametrize(("output", "score"), SCORES)
def test_the_score_is_that_of_the_json_or_the_last_number(output: str, score: float | None) -> None:
    if score is None:
        with pytest.raises(DareError, match="no number"):
            sweep_command.score_in(output)
    else:
        assert sweep_command.score_in(output) == score


def test_the_command_names_a_winner_that_makes_the_very_bytes(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    folder = tmp_path / "a b"
    shutil.copytree(EXAMPLES / "models", folder / "examples" / "models")
    shutil.copy(HERE / "merge_config.toml", folder / "config.toml")
    monkeypatch.chdir(folder)
    before, evaluation = {path.name for path in folder.iterdir()}, judge(folder)
    flags = ["-c", "config.toml", "--drop-rate", "0.5", "0.8", "--seeds", "2", "--evaluate", evaluation]
    assert sweep.main(flags) == 0
    first = capsys.readouterr()
    assert first.err.startswith("5 merges to make and 8 evaluations to run; scores are kept in sweep_results.jsonl\n")
    ranks = [line.split("  ")[1].strip() for line in first.out.splitlines()[1:7]]
    assert ranks[:3] == ["linear, drop 0.8, lambda 1", "linear, drop 0.5, lambda 1", "plain average (baseline)"]
    assert sorted(ranks[3:]) == [f"examples/models/{name}.safetensors alone" for name in ("base", "covered", "rotated")]
    assert "confirm it on data that was not used here" in first.out
    made = {"my judge.py", "calls.jsonl", "sweep_results.jsonl", "sweep_best.toml"}
    assert {path.name for path in folder.iterdir()} == before | made
    text = (folder / "sweep_best.toml").read_text()
    assert "# plain average: " in text
    assert dare.main(["-q", "--config", "sweep_best.toml"]) == 0
    merged = (folder / "examples" / "models" / "merged.safetensors").read_bytes()
    assert [hashlib.sha256(merged).hexdigest(), 0.8, 42] in calls(folder)
    assert sweep.main([*flags, "-q"]) == 0
    assert capsys.readouterr() == (first.out, "")
    assert len(calls(folder)) == 8, "nothing was evaluated twice"
    assert (folder / "sweep_best.toml").read_text() == text


def test_what_fails_is_reported_and_tried_again_and_the_rest_goes_on(
    models: Models, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    ending = """
if rate == 0.5 and not os.path.exists("fixed"):
    print("0.99")
    sys.exit("out of memory\\nsorry")
print({0.6: "no score", 0.7: "score 3, then nan"}.get(rate, score))
"""
    rates = ["--drop-rate", "0.5", "0.6", "0.7", "0.8"]
    flags = ["-c", "config.toml", *rates, "--seeds", "1", "-e", judge(tmp_path, ending)]
    assert sweep.main(flags) == 0
    printed = capsys.readouterr()
    failures = [line.split("failed: ")[1] for line in printed.err.splitlines() if "failed: " in line]
    assert failures == ["it ended with status 1: sorry", "it printed no number", "its score is nan"]
    assert "The best merge is linear, drop 0.8" in printed.out
    assert "the same command tries them again" in printed.out
    assert printed.out.count(" failed ") == 3
    (tmp_path / "fixed").touch()
    before = len(calls(tmp_path))
    assert sweep.main(flags) == 0
    assert len(calls(tmp_path)) == before + 3, "what failed is tried again, and nothing else"
    assert capsys.readouterr().out.count(" failed ") == 2


@POSIX
def test_an_evaluation_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    command = sweep_command.Command.of(f"sh -c 'sleep 60 & echo $! > {tmp_path / 'child'}; wait' {{model}}", timeout=1)
    with pytest.raises(sweep_command.EvaluationFailed, match="it took longer than 1 s"):
        command(tmp_path)
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    wait_for(lambda: not child.exists() or child.read_text().split()[2] == "Z")


@POSIX
def test_an_interrupted_sweep_cleans_up_and_continues(models: Models, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    ending = "if len(open('calls.jsonl').readlines()) == 6:\n    time.sleep(60)\nprint(score)"
    flags = ["--config", "config.toml", "--drop-rate", "0.5", "0.8", "--seeds", "2", "-e", judge(tmp_path, ending)]
    words = [sys.executable, str(EXAMPLES / "sweep.py"), *flags]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(calls(tmp_path)) == 6)
    assert list(tmp_path.glob("sweep-*")) != [], "the model that is being scored"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted; what is scored is kept, and the same command continues"
    assert list(tmp_path.glob("sweep-*")) == []
    assert not (tmp_path / "sweep_best.toml").exists()
    assert sweep.main(flags) == 0
    assert len(calls(tmp_path)) == 8 + 1


# What may be left of the last line of results.
DAMAGE = ['{"ke', '{"key": "a", "score": 1' + "0" * 400, '{"key": "a", "score": ' + "[" * 10**5]


def test_damaged_results_are_made_again(models: Models, tmp_path: Path) -> None:
    results, grid = tmp_path / "r.jsonl", sweep.Grid(drop_rate=(0.5, 0.8), seeds=2)

    def run() -> tuple[str, int]:
        evaluate, seen = count_calls(hill)
        return str(sweep.sweep(models[0], models[1:], grid, evaluate, results=results, label="hill")), len(seen)

    whole, _ = run()
    assert run() == (whole, 0)
    results.write_bytes(results.read_bytes()[:-20])
    assert run() == (whole, 1)
    for damage in DAMAGE:
        results.write_text(damage)
        assert run() == (whole, 8)


def test_scores_of_other_evaluations_models_and_settings_are_not_mixed_up(models: Models, tmp_path: Path) -> None:
    def count(label: str, **settings: Any) -> int:
        evaluate, seen = count_calls(hill)
        grid, kept = sweep.Grid(drop_rate=(0.5,), seeds=1), {"results": tmp_path / "r.jsonl", "label": label}
        sweep.sweep(models[0], models[1:], grid, evaluate, config=DareConfig(**settings), **kept)
        return len(seen)

    assert [count("one"), count("one"), count("two")] == [5, 0, 5]
    assert [count("one", seed=1), count("one", weights=(0.3, 0.7))] == [1, 2]
    os.utime(models[2], ns=(0, 0))
    assert count("one") == 3, "the model that changed, and the merges with it"
    labels = [sweep.Command.of(judge(tmp_path, rest)).label for rest in ("print(1)", "print(1)", "print(2)")]
    assert labels[0] == labels[1] != labels[2], "a script that was edited is another evaluation"


def test_inputs_that_change_during_a_sweep_end_it(models: Models, tmp_path: Path) -> None:
    def touch(path: Path) -> float:
        return 0.0 if not recipe_of(path) else float(os.utime(models[1]) or 0)  # type: ignore[func-returns-value]

    with pytest.raises(DareError, match=r"math\.safetensors' has changed during"):
        sweep.sweep(models[0], models[1:], sweep.Grid(), touch, results=tmp_path / "r.jsonl")


def outcome_of(*scores: list[float]) -> Any:
    """A made-up outcome: combinations with these scores by seed, and a plain average that scores 0."""
    model, rates = sweep.Model("math", Path("math")), [0.0, *(0.5 + 0.01 * k for k in range(len(scores)))]
    kinds = ["baseline"] + ["grid"] * len(scores)
    candidates = [
        sweep.Candidate(f"{kind} {rate}", kind, (model,), (DareConfig(drop_rate=rate),))
        for kind, rate in zip(kinds, rates, strict=True)
    ]
    rows = [sweep.Row(each, tuple(by), len(by)) for each, by in zip(candidates, [[0.0], *scores], strict=True)]
    return sweep.SweepResult(sweep.rank(rows, False), False, model, None, DareConfig())


# Scores by seed, whether they can be told from a plain average that scores 0, and what is printed.
VERDICTS = [
    ([[0.1, 0.1001, 0.1002]], True, "more than its seeds' spread explains"),
    ([[0.1, 0.6, 1.1]], False, "not distinguishable from the plain average"),
    ([[0.1]], None, "there is only one seed; give --seeds 3 or more"),
    ([[0.1, 0.1, 0.1]], None, "all its seeds score the same"),
    ([[-0.1, -0.2, -0.3]], False, "No combination scores better than the plain average"),
    ([[0.04, 0.05, 0.06]] * 1, True, "p = 0.0066 with allowance"),
    ([[0.04, 0.05, 0.06]] * 8, False, "p = 0.052 with allowance"),
]


@pytest.mark.parametrize(("scores", "told", "words"), VERDICTS)
def test_the_best_is_only_called_better_if_its_seeds_agree(scores: Any, told: bool | None, words: str) -> None:
    outcome = outcome_of(*scores)
    assert outcome.distinguishable is told
    assert words in outcome.verdict
    assert "evaluation's own noise is unknown" in str(outcome)
    assert ("put 0 among the drop rates" in str(outcome)) == (outcome.best is not outcome.baseline)


def test_the_t_test_is_that_of_the_tables() -> None:
    tails = [(1, 12.7062, 0.025), (2, 4.30265, 0.025), (3, 5.84091, 0.005), (4, 2.13185, 0.05), (9, 3.24984, 0.005)]
    for freedom, t, beyond in tails:
        assert sweep.chance(t, freedom) == pytest.approx(beyond, rel=1e-4)
        assert sweep.chance(0, freedom) == pytest.approx(0.5)


def test_directories_stay_directories_and_adapters_alone_are_merged_first(tmp_path: Path) -> None:
    base, alone = random_model(), {}
    save_directory(tmp_path / "base", base, model_type="x")
    save_directory(tmp_path / "full", finetune(base, 1))
    write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")

    def evaluate(path: Path) -> float:
        assert path.is_absolute()
        assert path.name in ("base", "full") or (path / "config.json").exists()
        if path.name == "merged" and len(recipe_of(path / "model.safetensors")["recipe"]["seeds"]) == 1:
            alone.update(load_file(path / "model.safetensors"))
        return 0.0

    sources, plain = [tmp_path / "full", tmp_path / "adapter"], DareConfig(engine="plain")
    options: Any = {"config": plain, "directory": tmp_path, "tokenizer_from": tmp_path / "tokenizer"}
    result = sweep.sweep(tmp_path / "base", sources, sweep.Grid(seeds=1), evaluate, **options)
    assert [row.complete for row in result.rows] == [True] * 5
    run_merge(tmp_path / "base", sources[1:], tmp_path / "out", drop_rate=0, engine="plain")
    assert_same(alone, load_file(tmp_path / "out" / "model.safetensors"))
    (tmp_path / "best.toml").write_text(sweep.winning_configuration(result, tmp_path / "best.toml"))
    assert dare.main(["-q", "-c", str(tmp_path / "best.toml"), "--engine", "plain"]) == 0
    assert (tmp_path / "merged" / "tokenizer.json").exists()


BAD_USAGE = [
    (["--evaluate", "python judge.py"], "has no {model}", "write {model} where"),
    (["--evaluate", "pyhton judge.py {model}"], "there is no command 'pyhton'", "first word"),
    (["--evaluate", "'python {model}"], "cannot be split into words", "quotes"),
    (["--drop-rate", "0.5", "1.5"], "--drop-rate must be a number from 0", "--help"),
    (["--method", "tie"], "--method must be one of linear, ties, slerp", "did you mean ties?"),
    (["--drop-rate", "0.5", "--rescale-q", "0.2"], "no combination makes sense: rescale_q 0.2 is below", "--help"),
    (["--seeds", "0"], "--seeds must be at least 1", "3 or more"),
    (["--timeout", "0"], "--timeout must be above 0", "seconds"),
    (["--plot", "sweep.gif"], "neither .png nor .svg", "sweep.png"),
    (["--plot", "sweep.png"], "a plot needs matplotlib, which is not installed", "uv sync --extra plot"),
    (["--write-config", "config.toml"], "exists and was not written by a sweep", "--force"),
    (["--write-config", "no/such.toml"], "does not exist", "create"),
    (["--results", "config.toml"], "is not a results file of a sweep", "--results"),
    (["--results", "math.safetensors"], "math.safetensors' is the input", "never overwritten"),
    (["--write-config", "math.safetensors", "--force"], "math.safetensors' is the input", "never overwritten"),
    (["--merge", "nothing.safetensors"], "there is no file or directory 'nothing.safetensors'", "looked for"),
    (["--directory", "nowhere"], "cannot use 'nowhere'", "--directory"),
    (["--config", "missing.toml"], "there is no configuration file", "--config"),
]


@pytest.mark.parametrize(("flags", "message", "hint"), BAD_USAGE, ids=[" ".join(row[0])[:40] for row in BAD_USAGE])
def test_wrong_usage_of_a_sweep_is_refused_before_anything_is_merged(
    models: Models, tmp_path: Path, monkeypatch: Patch, capsys: Capture, flags: list[str], message: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    write_config(tmp_path)
    usual = ["--config", "config.toml", "--evaluate", judge(tmp_path)]
    before = snapshot(tmp_path)
    assert sweep.main([*usual, *flags]) in (1, 2)
    error, hinted = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hinted.startswith("hint: ")
    assert hint in hinted
    assert snapshot(tmp_path) == before
