"""What ships beside the tool: the sweep, the experiment on quality, the benchmark, and what the documents show."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

import dare
from dare import DareConfig, DareError
from tests import support
from tests.scene import POSIX, Patch, wait_for
from tests.support import HERE, finetune, random_model, save_directory, snapshot

sys.path.insert(0, str(HERE / "examples"))

import benchmark
import benchmark_report
import quality_report
import sweep
from sweep_command import Command, EvaluationFailed, score_in

Capture, Models = pytest.CaptureFixture[str], list[Path]
EXAMPLES = HERE / "examples"
STORED = EXAMPLES / "results" / "benchmark.json"
QUALITY: dict[str, Any] = json.loads((EXAMPLES / "results" / "quality.json").read_text())
TEXTS = {path: path.read_text() for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))}
README, EVIDENCE = (TEXTS[HERE / name] for name in ("README.md", "docs/evidence.md"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(name: str, *arguments: str | Path) -> str:
    """What a script prints, in a process of its own."""
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=300, check=True).stdout


# An evaluation that knows what was done to a model: the recipe is in the file's header. It notes every call.
JUDGE = """
import hashlib, json, os, struct, sys, time, tomllib
data = open(sys.argv[-1], "rb").read()
header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
settings = tomllib.loads(header.get("__metadata__", {}).get("dare_recipe", "dare = {}"))["dare"]
rate, seed = settings.get("drop_rate", 0), settings.get("seed", 0)
print(json.dumps([hashlib.sha256(data).hexdigest(), rate, seed]), file=open("calls.jsonl", "a"))
score = 1 - (rate - 0.8) ** 2 + seed % 5 * 1e-5 if settings else 0.1
"""


def judge(ending: str = "print('accuracy:', score)") -> str:
    """The evaluation as a command, with a space in its path."""
    Path("my judge.py").write_text(JUDGE + ending)
    return f'"{sys.executable}" "my judge.py" {{model}}'


def calls() -> list[Any]:
    return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]


def settings_of(path: Path) -> dict[str, Any]:
    """How a model was merged, and with which seeds; nothing if it was not."""
    with safe_open(path, "np") as file:
        recipe = tomllib.loads((file.metadata() or {}).get("dare_recipe", ""))
    return recipe and recipe["dare"] | {"seeds": recipe["recipe"]["seeds"]}


class Hill(list[dict[str, Any]]):
    """An evaluation in Python, best at drop rate 0.8 and lambda 1, with a little noise by the seed. Notes its calls."""

    def __call__(self, path: Path) -> float:
        self.append(made := settings_of(path))
        noise = 1e-4 * math.sin(made.get("seed", 0)) * (made.get("drop_rate", 0) > 0)
        return -((made["drop_rate"] - 0.8) ** 2) - (made["lambda_coeff"] - 1) ** 2 + noise if made else -1.0


def run_sweep(models: Models, evaluate: Any, grid: dict[str, Any], **options: Any) -> Any:
    return sweep.sweep(models[0], models[1:], sweep.Grid(**grid), evaluate, **options)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sweep_finds_a_known_optimum_and_ranks_everything(models: Models, folder: Path, sign: int) -> None:
    before, hill = snapshot(folder), Hill()
    grid = {"drop_rate": (0.0, 0.5, 0.8), "method": ("linear", "ties"), "lambda_coeff": (0.5, 1), "seeds": 3}
    options: Any = {"directory": folder, "minimize": sign < 0, "config": DareConfig(seed=7)}
    result = run_sweep(models, lambda path: sign * hill(path), grid, **options)
    best = result.best.candidate.settings
    assert (best.drop_rate, best.lambda_coeff, result.distinguishable) == (0.8, 1, True)
    means = [sign * row.mean for row in result.rows]
    assert means == sorted(means, reverse=True)
    assert means[-3:] == [-1.0] * 3, "the models alone"
    assert sign * result.baseline.mean == pytest.approx(-0.64)
    # 12 combinations: the four without dropping have no seeds, and one of those is the baseline.
    assert (len(result.rows), len(hill)) == (3 + 12, 3 + 4 + 8 * 3)
    one = {"drop_rate": 0.8, "method": "ties", "lambda_coeff": 1}
    drawn = [seed for made in hill if made.items() >= one.items() for seed in made["seeds"]]
    assert sorted(drawn) == list(range(7, 13)), "its seeds share no mask"
    assert snapshot(folder) == before, "nothing is left behind"


def test_a_sweep_tries_drops_and_draws_seeds_only_where_they_mean_something(models: Models, folder: Path) -> None:
    settings: Any = {"rules": [{"match": "*bias", "slerp_t": 0.2, "drop_rate": 0}], "slerp_t": {"gradient": [0, 1]}}
    config = DareConfig(drop_rate={"gradient": [0.5, 0.8]}, method="slerp", **settings)
    grid = {"drop": ("random", "magnitude", "della"), "method": ("ties", "slerp"), "seeds": 2}
    tried: list[Any] = []
    result = run_sweep(models, lambda path: len(tried.append(settings_of(path)) or tried), grid, config=config)
    names = {row.name: row.wanted for row in result.rows if row.candidate.kind == "grid"}
    assert names == {
        "ties, drop 0.5..0.8, lambda 1": 2, "ties, magnitude, drop 0.5..0.8, lambda 1": 1,
        "ties, della, drop 0.5..0.8, lambda 1": 2, "slerp, drop 0.5..0.8, lambda 1": 2,
    }  # fmt: skip
    best = tomllib.loads(sweep.winning_configuration(result, Path("best.toml")))["dare"]
    assert (best["drop"], best["drop_rate"]) == ("della", {"gradient": [0.5, 0.8]})


def test_a_combination_is_tried_once_and_only_if_it_makes_sense(models: Models, caplog: Any) -> None:
    grid = {"drop_rate": (0.9, 0.5, 0.9, 0), "rescale_q": (0.1, 0.5, 1), "keep_ratio": (0.5,), "seeds": 1}
    result = run_sweep(models, lambda path: -abs(settings_of(path).get("rescale_q", 9) - 0.4), grid)
    tried = sorted((row.candidate.settings.drop_rate, row.candidate.settings.rescale_q or 0) for row in result.merges)
    assert tried == [(0, 0), (0.5, 0.5), (0.5, 1), (0.9, 0.1), (0.9, 0.5), (0.9, 1)]
    # Where nothing is dropped, q means nothing, and keep_ratio is only for ties.
    assert re.search("left out 1 combination that .* rescale_q 0.1 is below 1 - drop_rate = 0.5", caplog.text)
    assert tomllib.loads(sweep.winning_configuration(result, Path("best.toml")))["dare"]["rescale_q"] == 0.5


@pytest.mark.parametrize(("normalize", "shares"), [(None, (0.75, 0.25)), (True, (0.75, 0.25)), (False, (3.0, 1.0))])
def test_the_baseline_is_the_plain_average_whatever_the_rules_say(
    models: Models, normalize: bool | None, shares: tuple[float, float]
) -> None:
    rules, made = [{"match": "layer.*", "drop_rate": 0.5}, {"match": "head.*", "lambda_coeff": 0.0}], {}
    config = DareConfig(method="ties", weights=(3.0, 1.0), normalize=normalize, rules=rules)
    run_sweep(models, lambda path: len(made.setdefault(str(settings_of(path)), load_file(path))), {}, config=config)
    [average] = [tensors for settings, tensors in made.items() if "linear" in settings]
    base, first, second = ({name: tensor.float() for name, tensor in load_file(path).items()} for path in models)
    for name, found in average.items():
        delta = shares[0] * (first[name] - base[name]) + shares[1] * (second[name] - base[name])
        expected = base[name] + (0 if name == "head.weight" else delta)
        assert (found == expected.to(found.dtype)).float().mean() > 0.999


@pytest.mark.parametrize(("output", "score"), [
    ("0.5", 0.5), ("step 12: loss 3\naccuracy: 93.5%\n", 93.5), ("acc=1e-3", 0.001), ("-7 of them.", -7.0),
    ("perplexity 1,234.5", 1234.5), ("\x1b[32m0.25\x1b[0m", 0.25), ("loaded model2 in 3s: .75", 0.75),
    ('{\n "a": {"score": 3},\n "score": 4\n}\n', 4.0), ('{"accuracy": 0.75}', 0.75), ("{not json} 8", 8.0),
    ('{"score": 1}\nlog 7\n{"score": 2, "tasks": [1, 2]}\ndone in 5 s', 2.0), ("model2 only", "it printed no number"),
    ('{"score": "high"} 3', "no number but 'high'"), ('{"score": true, "n": 5}', "no number but True"),
])  # fmt: skip
def test_the_score_is_that_of_the_json_or_the_last_number(output: str, score: float | str) -> None:
    with pytest.raises(EvaluationFailed, match=score) if isinstance(score, str) else nullcontext():
        assert score_in(output) == score


def test_the_winner_makes_the_very_bytes_and_what_failed_is_tried_again(models: Models, capsys: Capture) -> None:
    ending = "if rate == 0.5 and not os.path.exists('fixed'): sys.exit(print(9) or 'out of memory\\nsorry')\n"
    ending += "print({0.6: 'no score', 0.7: 'score 3, then nan'}.get(rate, score))"
    Path("a b").mkdir()
    flags = ["-c", str(support.write_config(Path())), "--drop-rate", "0.5", "0.6", "0.7", "0.8", "--seeds", "2"]
    flags += ["--evaluate", judge(ending), "--directory", "a b"]
    before = set(os.listdir())
    assert sweep.main(flags) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("9 merges to make and 12 evaluations to run; scores are kept in sweep_results.jsonl")
    failures = {line.split("failed: ")[1] for line in printed.err.splitlines() if "failed: " in line}
    assert failures == {"it ended with status 1: sorry", "it printed no number", "its score is nan"}
    assert re.match(r".*\n1  linear, drop 0.8, lambda 1 +1\.0000.*\n2  plain average \(baseline\) ", printed.out)
    assert re.findall(r"drop (.*), lambda 1 +failed", printed.out) == ["0.5", "0.6", "0.7"]
    assert set(os.listdir()) == before | {"calls.jsonl", "sweep_results.jsonl", "sweep_best.toml"}
    assert dare.main(["-q", "--config", "sweep_best.toml"]) == 0
    assert [hashlib.sha256(Path("out.safetensors").read_bytes()).hexdigest(), 0.8, 42] in calls()
    Path("fixed").touch()
    assert sweep.main(flags) == 0
    assert len(calls()) == 12 + 6, "what failed is tried again, and nothing else"
    assert re.findall(r"drop (.*), lambda 1 +failed", capsys.readouterr().out) == ["0.6", "0.7"]


@POSIX
def test_an_evaluation_that_hangs_is_ended_with_all_that_it_started(folder: Path) -> None:
    with pytest.raises(EvaluationFailed, match="it took longer than 1 s"):
        Command.of("sh -c 'sleep 60 & echo $! > child; wait' {model}", timeout=1)(folder)
    status = Path("/proc", Path("child").read_text().strip(), "stat")
    wait_for(lambda: not status.exists() or status.read_text().split()[2] == "Z")


@POSIX
def test_an_interrupted_sweep_cleans_up_and_continues(models: Models, folder: Path) -> None:
    ending = "if len(open('calls.jsonl').readlines()) == 6: time.sleep(60)\nprint(score)"
    flags = ["-c", str(support.write_config(folder)), "--drop-rate", "0.5", "0.8", "--seeds", "2", "-e", judge(ending)]
    process = subprocess.Popen([sys.executable, EXAMPLES / "sweep.py", *flags], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: Path("calls.jsonl").exists() and len(calls()) == 6)
    assert list(folder.glob("sweep-*")) != [], "the model that is being scored"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.endswith("interrupted; what is scored is kept, and the same command continues\n")
    assert (list(folder.glob("sweep-*")), Path("sweep_best.toml").exists()) == ([], False)
    assert sweep.main([*flags, "--plot", "sweep.svg"]) == 0
    assert len(calls()) == 8 + 1
    assert sweep.MARK in Path("sweep.svg").read_text()


def test_results_that_are_damaged_or_of_something_else_are_not_used(models: Models) -> None:
    results = Path("r.jsonl")

    def count(label: str = "one", **settings: Any) -> int:
        hill, options = Hill(), {"results": results, "label": label, "config": DareConfig(**settings)}
        run_sweep(models, hill, {"drop_rate": (0.5,), "seeds": 1}, **options)
        return len(hill)

    assert [count(), count(), count("two"), count(seed=1), count(weights=(0.3, 0.7))] == [5, 0, 5, 1, 2]
    os.utime(models[2], ns=(0, 0))
    assert count() == 3, "the model that changed, and the merges with it"
    results.write_bytes(results.read_bytes()[:-20])
    assert count() == 1, "the line that was cut short"
    for damage in ('{"ke', '{"key": "a", "score": 1' + "0" * 400, '{"key": "a", "score": ' + "[" * 10**5):
        results.write_text(damage)
        assert [count(), count()] == [5, 0]
    labels = [Command.of(judge(ending)).label for ending in ("print(1)", "print(1)", "print(2)")]
    assert labels[0] == labels[1] != labels[2], "a script that was edited is another evaluation"
    with pytest.raises(DareError, match=r"math\.safetensors' has changed during"):
        run_sweep(models, lambda path: float(settings_of(path) != {} and bool(os.utime(models[1]))), {"seeds": 1})


@pytest.mark.parametrize(("scores", "better", "words"), [
    ([[0.1, 0.1001, 0.1002]], True, "more than its seeds' spread explains"),
    ([[0.1, 0.6, 1.1]], False, "not distinguishable from the plain average"),
    ([[0.1]], None, "there is only one seed; give --seeds 3 or more"),
    ([[-0.1, -0.2, -0.3]], False, "No combination scores better than the plain average"),
    ([[0.04, 0.05, 0.06]] * 1, True, "p = 0.0065 with allowance for the choice"),
    ([[0.04, 0.05, 0.06]] * 8, False, "p = 0.052 with allowance for the choice"),
])  # fmt: skip
def test_the_best_is_only_called_better_if_its_seeds_agree(scores: Any, better: bool | None, words: str) -> None:
    model, rows = sweep.Model("math", Path("math")), []
    for number, by_seed in enumerate([[0.0], *scores]):  # the plain average scores 0
        config = DareConfig(drop_rate=0.5 + number / 100 if number else 0.0)
        candidate = sweep.Candidate(f"number {number}", "grid" if number else "baseline", (model,), (config,))
        rows.append(sweep.Row(candidate, tuple(by_seed), len(by_seed)))
    result = sweep.SweepResult(sweep.rank(rows, False), False, model, None, DareConfig())
    assert result.distinguishable is better
    assert words in result.verdict
    assert ("put 0 among the drop rates" in str(result)) == (result.best is not result.baseline)
    for freedom, t, beyond in [(1, 12.7062, 0.025), (2, 4.30265, 0.025), (3, 5.84091, 0.005), (4, 2.13185, 0.05)]:
        assert sweep.chance(t, freedom) == pytest.approx(beyond, rel=1e-4), "as in the tables of Student's t"


def test_directories_stay_directories_and_adapters_alone_are_merged_first(folder: Path) -> None:
    base, found = save_directory(folder / "base", random_model(), model_type="x"), {}
    full = save_directory(folder / "full", finetune(random_model(), 1), model_type="x")
    (full / "tokenizer.json").write_text("{}")
    adapter = support.write_adapter(folder / "adapter", support.low_rank("layer", (37, 61)))

    def score(path: Path) -> float:
        found[len(settings_of(path / "model.safetensors").get("seeds", ()))] = load_file(path / "model.safetensors")
        return float((path / "config.json").exists())

    made = run_sweep([base, full, adapter], score, {"seeds": 1}, config=DareConfig(engine="plain"), tokenizer_from=full)
    assert [row.scores for row in made.rows] == [(1.0,)] * 5
    support.run_merge(base, [adapter], Path("alone"), drop_rate=0, engine="plain")
    support.assert_same(found[1], load_file("alone/model.safetensors"))
    Path("best.toml").write_text(sweep.winning_configuration(made, Path("best.toml")))
    assert dare.main(["-q", "-c", "best.toml", "--engine", "plain"]) == 0
    assert Path("merged", "tokenizer.json").exists()


@pytest.mark.parametrize(("flags", "message"), [
    ("--evaluate 'python judge.py'", "has no {model}"), ("--evaluate 'pyhton {model}'", "there is no command 'pyhton'"),
    ("--drop-rate 0.5 1.5", "--drop-rate must be a number from 0"), ("--method tie", "did you mean ties?"),
    ("--drop-rate 0.5 --rescale-q 0.2", "no combination makes sense: rescale_q 0.2"), ("--seeds 0", "at least 1"),
    ("--plot a.gif", "neither .png nor .svg"), ("--plot a.png", "matplotlib, which is not installed\nhint: uv sync"),
    ("--write-config config.toml", "exists and was not written"), ("--results config.toml", "is not a results file"),
    ("--results math.safetensors", "is the input"), ("--write-config math.safetensors --force", "is the input"),
    ("--merge nothing.safetensors", "there is no file or directory 'nothing.safetensors'"),
])  # fmt: skip
def test_wrong_usage_is_refused_before_anything_is_merged_or_overwritten(
    models: Models, folder: Path, monkeypatch: Patch, capsys: Capture, flags: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    words = ["-c", str(support.write_config(folder)), "--evaluate", judge(), *shlex.split(flags)]
    before = snapshot(folder)
    assert sweep.main(words) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert re.fullmatch(r"error: .+\nhint: .+\n", error)
    assert snapshot(folder) == before


def test_every_link_in_the_documents_leads_somewhere() -> None:
    for document, text in TEXTS.items():
        assert all((HERE / script).is_file() for script in re.findall(r"examples/\w+\.py", text))
        for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            target = document.parent / path if path else document
            assert target.is_file(), f"{document.name}: {path}"
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else [""]
            assert anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


def test_the_tests_that_prove_the_promises_exist() -> None:
    code = "".join(path.read_text() for path in (HERE / "test_dare.py", *(HERE / "tests").glob("test_*.py")))
    named = re.findall(r"\btest_\w+\b(?!\.py)", TEXTS[HERE / "docs" / "reliability.md"])
    assert len(named) >= 5
    assert [name for name in named if f"def {name}(" not in code] == []


def test_the_figures_in_the_documents_are_those_of_the_stored_results() -> None:
    printed = run_example("benchmark", "--report", STORED)
    assert "\n".join(line for line in printed.splitlines() if line.startswith("|")) in EVIDENCE
    first = json.loads(STORED.read_text())["outcomes"][0]
    times = [benchmark_report.value(first, role) for role in ("tool", "mergekit", "torch")]
    assert "| **{:.1f} s** | {:.1f} s | not measured | not measured | {:.1f} s |".format(*times) in README
    units, prose = quality_report.order(QUALITY), " ".join(EVIDENCE.split())
    assert quality_report.cliffs_table(units) in EVIDENCE
    assert f"these results took it {QUALITY['seconds']:.0f} s on an NVIDIA H200" in prose
    said = ["`linear` with DARE is {:.1f} points below", "it loses {:.1f} points", "it helps: {:.1f} points more"]
    for arm, words in zip(quality_report.MERGE_ARMS, said, strict=False):
        found = quality_report.differences(units, arm).values()
        assert words.format(abs(100 * mean(map(mean, found)))) in prose
    narrow = units["chars/256"]
    ends = [100 * mean(quality_report.curve(narrow, narrow["skills"], arm)[-1]) for arm in ("DAREx-q", "DARE")]
    assert "at 99%, chars of width 256 score {:.0f}% with it and {:.0f}% without".format(*ends) in prose
    large = [
        [mean(quality_report.cliffs(unit, ["large"], arm)) for arm in ("DAREx-q", "DARE")] for unit in units.values()
    ]
    assert f"and by up to {100 * max(q - plain for q, plain in large):.0f} with large ones" in prose
    for family in ("chars", "digits"):
        wider = [unit for name, unit in units.items() if name.startswith(family)]
        found = [mean(quality_report.cliffs(unit, unit["skills"], "DARE")) for unit in wider]
        assert found == sorted(found), "later the wider the model is"


def test_verdicts_of_the_experiment_come_out_each_way() -> None:
    for gain, said in {0.5: "better in 24, worse in 0,", -0.5: "better in 0, worse in 24,", 0: "worse in 3,"}.items():
        results = json.loads(json.dumps(QUALITY))
        for arm in (arms["linear + DARE"] for unit in results["units"].values() for arms in unit["merged"].values()):
            arm["scores"] = [[score + gain for score in row] for row in arm["scores"]]
        assert re.search(rf"\nlinear \+ DARE against average, lambda tuned, .*{said}", quality_report.report(results))
    told = {(0.1, 0.11, 0.12): 1, (-0.1, -0.11): -1, (0.1, -0.1, 0.2): 0, (0.009, 0.009): 0, (0.1, 0.1): 1, (0.5,): 0}
    assert {values: quality_report.direction(values) for values in told} == told


def run(module: Any, words: str) -> str:
    """Call the main function of a script as the command line does: its status and what it printed, less times."""
    with Patch.context() as patch, redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        patch.setattr(sys, "argv", [module.__name__, *words.split()])
        with pytest.raises(SystemExit) as end:
            sys.exit(module.main())
    return re.sub(r"[\d.]+ s\b", "? s", f"{end.value.code}\n{printed.getvalue()}")


@pytest.fixture(scope="module")
def quality() -> Any:
    """The experiment, as small as can be: what is learned does not matter here. It takes seconds to import."""
    pytest.importorskip("sklearn")
    module: Any = importlib.import_module("quality")
    recipes = [(3, 1e-2, 8)] * 3
    small = {"rates": (0.0, 0.9), "shifts": (0.0, 0.5), "merge_rates": (0.9,), "lambdas": (1.0,), "test_seeds": 2}
    module.QUICK = module.QUICK._replace(chars=((4,), *recipes), digits=((4, 8), *recipes), **small)
    return module


@pytest.mark.slow
def test_an_experiment_comes_out_the_same_again_and_a_report_trains_nothing(quality: Any) -> None:
    whole = run(quality, "--quick --out whole.json")
    assert run(quality, "--report whole.json --plot picture.png") == whole
    assert Path("picture.png").stat().st_size > 10_000
    results = json.loads(Path("whole.json").read_text())
    assert results["units"].keys() == {"chars/4", "digits/4", "digits/8"}
    name, unit = quality.measure("digits/8", quality.QUICK)
    assert json.loads(json.dumps(unit)) == results["units"][name]


@pytest.mark.slow
def test_what_is_chosen_never_sees_test_data_or_test_masks(quality: Any, monkeypatch: Patch) -> None:
    lab, seeds, calls = quality.Lab.__new__(quality.Lab), [], []
    lab.base, lab.experts, lab.skills = {}, {"rotated": {}}, {"rotated": "rotated"}
    lab.model = SimpleNamespace(load_state_dict=seeds.append)
    score = quality.torch.tensor([0.5])
    lab.family = SimpleNamespace(right=lambda model, skill, part: calls.append((part, seeds[-1])) or score)
    monkeypatch.setattr(quality, "dare_merge", lambda base, experts, config: config.seed)
    settings = quality.Settings(validation_seeds=5, test_seeds=5)
    arms = quality.merge_arms(2, settings)
    found = lab.tune(["rotated"], arms["linear + DARE"], settings)
    assert (found["drop_rate"], found["lambda"]) == (0.3, 0.5), "the first of equals"
    assert [part for part, _ in calls] == ["validation"] * 5 * 36 + ["test"] * 5, "what is chosen is chosen before"
    masks = {
        part: {seed + i for seen, seed in calls for i in range(3) if seen == part} for part in ("validation", "test")
    }
    assert len(masks["validation"] | masks["test"]) == 2 * 5 * 3, "no mask of three models is used twice"
    pairs = [(arm, arm.split()[0]) for arm in quality_report.MERGE_ARMS]
    lambdas = [{config.lambda_coeff for config in arms[arm]} for pair in pairs for arm in pair]
    assert lambdas == [set(settings.lambdas)] * 8, "DARE and its rivals choose from the same"


def test_a_benchmark_prints_what_ran_out_of_memory_or_of_disk(folder: Path) -> None:
    for code, trouble in {"raise MemoryError": "out of memory", "1 / 0": "failed"}.items():
        with pytest.raises(benchmark.Trouble, match=trouble):
            benchmark.measure([sys.executable, "-c", code], {})
    with pytest.raises(SystemExit, match=r"MiB of disk are free, and .* MiB are needed"):
        benchmark.measure_point(benchmark.Point(10**12), 1, None, folder)
    outcome = json.loads(STORED.read_text())["outcomes"][0]
    next(each for each in outcome["figures"] if each["role"] == "mergekit")["trouble"] = (
        "out of memory"  # in a later run
    )
    assert benchmark_report.rival(outcome, "mergekit") == "28.6 (14.6 x, then out of memory)"


@pytest.mark.slow
def test_a_small_benchmark_runs_and_compares(monkeypatch: Patch) -> None:
    monkeypatch.setattr(benchmark, "POINTS", [benchmark.Point(200_000), benchmark.Point(200_000, "ties")])
    printed = run(benchmark, "--whole --repeat 1 --json f.json --plot f.png")
    assert re.search(r"(?m)^\| ties \| \d.* \(\d+\.\d x\) \|.* \|$", printed)
    said = re.sub(r"(?m)^(run \d|warm-up:) .*\n", "", printed)
    assert run(benchmark, "--report f.json") == said
    assert "plain torch script" in run(benchmark, "--parameters 2e5 --repeat 1 --method analyze")
    printed = run(benchmark, f"--parameters 2e5 --repeat 1 --against {HERE}")
    assert re.match(r"(?s)0\n.*this checkout / the other: best time \d", printed)
    Path("dare.py").write_text("raise SystemExit('broken on purpose')")
    printed = run(benchmark, "--parameters 2e5 --repeat 1 --against .")
    assert re.match(r"(?s)1\n.*ended with status 1\nbroken on purpose", printed)


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_stopped_leaves_neither_a_process_nor_files(folder: Path, number: int) -> None:
    import fcntl

    Path("dare.py").write_text(
        "import fcntl, time\nlock = open('lock', 'w')\nfcntl.flock(lock, fcntl.LOCK_EX)\ntime.sleep(600)"
    )
    words = [sys.executable, EXAMPLES / "benchmark.py", "--parameters", "2e5", "--against", "."]
    process = subprocess.Popen(words, env=os.environ | {"TMPDIR": str(folder)})

    def is_held() -> bool:
        """Whether the program that is measured runs: the system frees a lock when a process ends."""
        with Path("lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    wait_for(is_held, 60)
    assert list(folder.glob("dare-benchmark-*")) != []
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    wait_for(lambda: not is_held())
    assert list(folder.glob("dare-benchmark-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("script", "words"), [
    ("analyze_models", ("cosine 0.082", "drop 0.8 of rotated", "[[rules]]", "would merge 2 models", "drew ")),
    ("sweep_settings", ("plain average (baseline)", "The best merge is")), ("drop_rates", ("mean of 3 masks", "0.95")),
    ("evaluate", ("rotated     96.1%     60.8%     78.5%", "covered     50.9%     94.8%     72.9%")),
])  # fmt: skip
def test_the_short_examples_run_and_leave_the_models_alone(script: str, words: tuple[str, ...]) -> None:
    before = snapshot(EXAMPLES / "models")
    printed = run_example(*script.split())
    assert all(word in printed for word in words), printed
    assert snapshot(EXAMPLES / "models") == before
