"""Settings chosen by an evaluation: the search, scores, models in memory, and the report on the
best."""

import itertools
import json
import logging
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matplotlib
import optuna
import pytest
import torch
from matplotlib import pyplot
from safetensors import safe_open
from safetensors.torch import load_file
from sqlalchemy import Engine, event

import dare
from dare import ConfigError, DareConfig, DareError, DareMerger, SweepReport, dare_merge, dare_sweep
from tests.scene import wait_for
from tests.support import (
    HERE,
    POSIX,
    Capture,
    Models,
    Patch,
    Refusal,
    assert_same,
    make_models,
    run,
    save_models,
    snapshot,
    write_config,
)

AS_COMMAND = f'"{sys.executable}" judge.py {{model}}'
SHAPES: dict[str, tuple[int, ...]] = {"layer.weight": (8, 16), "head.weight": (4, 8)}
TUNED = {"drop_rate": {"low": 0.0, "high": 0.95}, "lambda_coeff": {"low": 0.0, "high": 2.0}}
# An evaluation that knows what was done to a model, from the recipe in its header, and notes it.
# Best at drop rate 0.8.
JUDGE = """
import json, os, struct, sys, time, tomllib
def score(path):
    data = open(path, "rb").read()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    made = tomllib.loads(header.get("__metadata__", {}).get("dare_recipe", "dare = {}"))["dare"]
    rate, scale = made.get("drop_rate", 0), made.get("lambda_coeff", 1)
    with open("calls.jsonl", "a") as calls:
        print(json.dumps([os.getpid(), rate, scale, made.get("seed")]), file=calls)
    value = -((rate - 0.8) ** 2) - (scale - 1) ** 2 if made else -1.0
"""


def hurry(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: Patch) -> Models:
    """A base and two fine-tunes of a few numbers, as files in the working directory; databases on a
    quick disk."""
    monkeypatch.chdir(tmp_path)
    if not event.contains(Engine, "connect", hurry):
        event.listen(Engine, "connect", hurry)
    return save_models(tmp_path, make_models(2, shapes=SHAPES))


def judge(ending: str = "    return value") -> str:
    """The evaluation as a function of a file; as a command, the file prints what the function
    returns."""
    Path("judge.py").write_text(
        f"{JUDGE}{ending}\nif __name__ == '__main__': print(score(sys.argv[1]))\n"
    )
    return "judge.py:score"


def calls() -> list[Any]:
    lines = Path("calls.jsonl").read_text().splitlines() if Path("calls.jsonl").exists() else []
    return [json.loads(line) for line in lines]


def has_ended(process: int) -> bool:
    try:
        return Path("/proc", str(process), "stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def command(*flags: str, evaluate: str = "", text: str = "", **values: Any) -> list[str]:
    config = write_config(Path(), text, **{"engine": "plain", **values})
    return ["sweep", "-c", str(config), "--evaluate", evaluate or judge(), *flags]


def settings_of(path: Path) -> dict[str, Any]:
    """How a model was merged, and with which seeds; nothing if it was not."""
    with safe_open(path, "np") as file:
        recipe = tomllib.loads((file.metadata() or {}).get("dare_recipe", ""))
    return recipe and DareConfig().__dict__ | recipe["dare"] | {"seeds": recipe["recipe"]["seeds"]}


def hill(path: Path) -> float:
    """Best at drop rate 0.8 and lambda 1, whatever the seed."""
    made = settings_of(path)
    return -((made["drop_rate"] - 0.8) ** 2) - (made["lambda_coeff"] - 1) ** 2 if made else -1.0


def sweep(
    evaluate: Any, space: Any, search: str = "grid", config: Any = None, **options: Any
) -> SweepReport:
    names = [f"{name}.safetensors" for name in ("base", "math", "code")]
    return DareMerger(names[0], names[1:], DareConfig(engine="plain", **(config or {}))).sweep(
        evaluate, space, search=search, **options
    )


@pytest.mark.parametrize(("search", "near"), [("tpe", 0.01), ("random", 0.05)])
def test_a_search_finds_a_known_optimum(tmp_path: Path, search: str, near: float) -> None:
    before = snapshot(tmp_path)
    seen = list[float]()

    def depth(path: Path) -> float:
        seen.append(-hill(path))
        return seen[-1]

    found = sweep(depth, TUNED, search, trials=25, objectives=["score:min"])
    assert 0 <= found.best.scores[0] == min(row.scores[0] for row in found.rows) < near
    assert found.winner is found.best is found.ranked[0]
    assert (found.base, len(found.rows), found.failures) == ([1.0], 25, [])
    # The plain average is scored all over the range of lambda, and with that of the best.
    assert {0.0, 0.5, 1.0, 1.5, 2.0} < {row.config.lambda_coeff for row in found.averages}
    assert (len(seen), len(found.averages)) == (1 + 25 + 6, 6)
    assert snapshot(tmp_path) == before, "nothing is left behind"


def test_a_grid_tries_every_combination_that_makes_sense_once() -> None:
    tried: list[dict[str, Any]] = []
    space = {
        "method": ["linear", "ties"],
        "drop_rate": [0, 0.5, 0.8, 0.8],
        "keep_ratio": [0.5, 1],
        "rescale_q": {"low": 0.1, "high": 1.0, "step": 0.3},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = sweep(lambda path: len(tried.append(settings_of(path)) or tried), space)
    points = [0.1, 0.4, 0.7, 1.0]
    q = {0: [None], 0.5: [p for p in points if p >= 0.5], 0.8: [p for p in points if p >= 0.2]}
    expected = [("linear", p, None, each) for p in q for each in q[p]]
    expected += [("ties", p, keep, each) for p in q for keep in (0.5, 1) for each in q[p]]
    chosen = [
        tuple(map(row.params.get, ("method", "drop_rate", "keep_ratio", "rescale_q")))
        for row in found.rows
    ]
    assert Counter(chosen) == Counter(expected)
    made = [(each["method"], each["drop_rate"], each["rescale_q"]) for each in tried[1:-1]]
    assert made == [(method, rate, q) for method, rate, _, q in chosen], (
        "merges are what the trials say"
    )
    assert (tried[0], tried[-1]["drop_rate"]) == ({}, 0.0), "the base first, the plain average last"
    assert len(sweep(hill, {"drop_rate": [0.1, 0.2, 0.3]}, trials=2).rows) == 2
    stored: Any = {
        "storage": "sqlite:///x.db",
        "study": "x",
        "trials": 1,
        "config": {"seed": 2**63 - 1},
    }
    assert len(sweep(hill, {"drop_rate": {"low": 0.5, "high": 0.9}}, "tpe", **stored).rows) == 1
    with pytest.raises(ConfigError, match="'x' is of other models"):
        sweep(hill, {"drop_rate": {"low": 0.5, "high": 0.9, "step": 0.2}}, **stored)


@pytest.mark.slow
def test_the_same_command_goes_on_with_its_study(capsys: Capture) -> None:
    flags = command("--vary", "drop_rate = {low = 0.1, high = 0.9}", "--trials")
    run(*flags, "3")
    first = calls()
    assert len(first) == 1 + 3 + 1
    run(*flags, "3", "--storage", "sqlite:///config_sweep.db?timeout=20")
    assert calls() == first, "nothing is scored again"
    run(*flags, "5", "--json")
    printed = capsys.readouterr()
    assert "going on with the study" in printed.err
    assert len({call[1] for call in calls()[len(first) :]} - {call[1] for call in first}) == 2
    shown = json.loads(printed.out.partition("\n{")[2].join(["{", ""]))
    assert sorted(each["number"] for each in shown["trials"]) == list(range(5))
    # Another space, other settings, another or an edited evaluation, other models: another study.
    same = [*flags[5:], "1"]
    for words, values in (
        (["--vary", "drop_rate = [0.1, 0.5]", "--trials", "1"], {}),
        (same, {"weights": [1, 2]}),
        ([*same, "--objective", "score:min"], {}),
    ):
        run(*command(*words, **values))
    run(*command(*same, evaluate=judge("    return value + 0")))
    studies = optuna.get_all_study_summaries("sqlite:///config_sweep.db")
    assert len({each.study_name for each in studies}) == 5


def test_what_is_chosen_again_is_not_merged_again_and_a_named_study_is_of_one_search(
    capsys: Capture,
) -> None:
    Path("kept/mine").mkdir(parents=True)
    flags = [
        "--vary",
        "drop_rate=[0.2, 0.8]",
        "--trials",
        "8",
        "--study",
        "mine",
        "--keep-models",
    ]
    run(*command(*flags, "kept"))
    assert Counter(call[1] for call in calls()) == {0: 1 + 1, 0.2: 1, 0.8: 1}
    assert {"mine", "mine-trial-0000.safetensors"} < set(os.listdir("kept"))
    assert capsys.readouterr().out.count("drop rate 0.8") == 2, "in the table, and in the verdict"
    run(*command(*flags, "kept", lambda_coeff=0.5), status=2)
    assert "the study 'mine' is of other models, settings or values" in capsys.readouterr().err
    # Weights make a merge longer, so that a plain average as long is what it is compared with;
    # packed models are swept.
    found = sweep(hill, {"weights": [[0.75, 0.75], [1.0, 1.0]]}, config={"drop_rate": 0.5})
    assert {row.config.lambda_coeff for row in found.averages} == {1.0, 1.5}
    packing = "pack -q -b base.safetensors -m math.safetensors -o math.packed --engine plain"
    run(*packing.split())
    merger = DareMerger("base.safetensors", ["math.packed"], DareConfig(engine="plain"))
    assert len(merger.sweep(hill, {"drop_rate": [0.9, 0.95]}, search="grid").rows) == 2


def test_models_are_kept_whatever_the_study_is_called() -> None:
    names = ("a/b", "a_b", "../c d", "ü%2F")
    for name in names:
        sweep(hill, {"drop_rate": [0.5]}, folder="kept", keep_models=True, study=name)
    assert len(os.listdir("kept")) == 2 * len(names), "a trial and a plain average of each"
    assert "a%2Fb-trial-0000.safetensors" in os.listdir("kept")


def test_a_kept_model_is_replaced_by_none_of_other_settings(tmp_path: Path) -> None:
    kept = {"folder": "kept", "keep_models": True, "study": "mine"}
    for _ in range(2):
        sweep(hill, {"drop_rate": [0.5]}, **kept)
    before = snapshot(tmp_path)
    with pytest.raises(DareError, match=r"trial-0000.* has another recipe: its dare.drop_rate"):
        sweep(hill, {"drop_rate": [0.25]}, **kept)
    assert snapshot(tmp_path) == before


@POSIX
@pytest.mark.slow
def test_what_a_killed_sweep_left_is_removed_by_the_next_and_nothing_else_is(
    tmp_path: Path,
) -> None:
    judge("    if os.path.exists('kill') and rate: os.kill(os.getpid(), 9)\n    return value")
    flags = command("--vary", "drop_rate=[0.5]", evaluate="judge.py:score")
    Path(".sweep-mine").mkdir()
    Path(".sweep-mine/merged.safetensors").touch()
    Path("kill").touch()
    process = subprocess.run([sys.executable, HERE / "dare.py", *flags], check=False)
    assert process.returncode == -signal.SIGKILL
    [left] = set(tmp_path.glob(".sweep-*/merged.safetensors")) - {
        tmp_path / ".sweep-mine/merged.safetensors"
    }
    Path("kill").unlink()
    seen = []

    def look(path: Path) -> float:
        """One sweep inside another: neither takes the other's folder for abandoned."""
        seen.append(path.exists())
        return len(seen)

    def outer(path: Path) -> float:
        sweep(look, {"drop_rate": [0.5]})
        return float(path.exists())

    assert sweep(outer, {"drop_rate": [0.5]}).rows[0].scores == [1.0]
    assert (left.exists(), all(seen)) == (False, True)
    assert list(tmp_path.glob(".sweep-*/*")) == [tmp_path / ".sweep-mine/merged.safetensors"]


@pytest.mark.slow
def test_two_processes_work_on_one_study() -> None:
    # The first one waits in its second trial until the other has begun one.
    judge("""
    def is_alone():
        lines = [line.split()[0] for line in open('calls.jsonl')]
        return len(lines) == 3 and lines[1] == lines[2]
    while is_alone():
        time.sleep(0.02)
    return value""")
    rates = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    flags = ["--vary", f"drop_rate={rates}", "--search", "grid"]
    flags = command(*flags, evaluate="judge.py:score")
    words = [sys.executable, str(HERE / "dare.py"), *flags]
    first = subprocess.Popen([*words, "--write-config", "first.toml"], stderr=subprocess.PIPE)
    wait_for(lambda: len(calls()) > 1, 60)
    second = subprocess.Popen(words, stderr=subprocess.PIPE)
    printed = [process.communicate(timeout=120)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], printed
    # SQLite may give one waiting trial to both.
    assert {call[1] for call in calls() if call[1]} == {*rates}
    assert {call[0] for call in calls() if call[1]} == {first.pid, second.pid}
    assert Path("config_best.toml").exists()


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("0.5", 0.5),
        ("step 12: loss 3\naccuracy: 93.5%\n", 93.5),
        ("acc=1e-3", 0.001),
        ("-7 of them.", -7.0),
        ("\x1b[32m0.25\x1b[0m", 0.25),
        ("loaded model2 in 3s: .75", 0.75),
        ('{\n "a": {"x": 3},\n "score": 4\n}\n', 4.0),
        ("{not json} 8", 8.0),
        ("0.85 (took 12 s)", "not one number but 2"),
        ("model2 only", "not one number"),
        ('{"score": 1}\n{"score": 2, "tasks": [1, 2]}', 2.0),
        ('{"score": "high"}', "no finite number but 'high'"),
        ('{"score": true}', "but True"),
        ("score: nan", "but nan"),
        ('{"accuracy": 1}', "no score 'score', but 'accuracy'"),
        ('{"score": 0.9', "not complete"),
        ('{\n  "score": 0.9', "not complete"),
        ('{"tasks": [\n1', "not complete"),
        ('score": 0.5}', "not complete"),
        ('{"step": 1}\ndone: 0.5', 0.5),
        ('result: {"score": 0.5}', 0.5),
        ("9" * (1 << 16) + "x", "not one number"),
        ("9" * (1 << 16), "no finite number"),
        (torch.tensor(0.25), 0.25),
        ({"score": 3}, 3.0),
        ("", "no"),
    ],
)
def test_a_score_is_the_last_number_of_the_last_line_or_named_in_json(
    output: Any, score: float | str
) -> None:
    def evaluate(path: Path) -> Any:
        return output if settings_of(path).get("drop_rate") else 0

    with (
        nullcontext()
        if isinstance(score, float)
        else pytest.raises(DareError, match=f"the first failed: .*{score}")
    ):
        assert sweep(evaluate, {"drop_rate": [0.5]}).rows[0].scores == [score]


@POSIX
def test_what_an_evaluation_leaves_running_is_not_waited_for() -> None:
    judge("""
    import subprocess
    print("x" * 99_999)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open("child", "w").write(str(child.pid))
    return 0.25""")
    found = sweep(AS_COMMAND, {"drop_rate": [0.1]})
    assert (found.base, found.rows[0].scores) == ([0.25], [0.25])
    os.kill(int(Path("child").read_text()), signal.SIGKILL)


@pytest.mark.slow
@POSIX
def test_an_evaluation_that_fails_costs_its_trial_only_and_what_it_printed_is_kept() -> None:
    judge("""
    import signal, subprocess
    print("working on it", flush=True)
    if rate == 0.1:
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    if rate == 0.2:
        open("child", "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)
    if rate == 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    return {0.4: "nothing", 0.5: "nan"}.get(rate, value)""")
    rates = "drop_rate=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]"
    flags = ["--vary", rates, "--search", "grid", "--timeout", "6"]
    flags = command(*flags, evaluate=AS_COMMAND)
    run(*flags)
    trials = optuna.load_study(storage="sqlite:///config_sweep.db", study_name=None).trials
    assert [trial.state.name for trial in trials] == ["FAIL"] * 5 + ["COMPLETE"]
    reasons = ["status 3: out of memory", "longer than 6 s", "signal 9", "'nothing'", "nan"]
    for trial, reason in zip(trials, reasons, strict=False):
        assert reason in trial.user_attrs["why"]
    assert trials[0].user_attrs["output"] == "working on it\nout of memory\n"
    wait_for(lambda: has_ended(int(Path("child").read_text())))
    done = len(calls())
    run(*flags)
    assert len(calls()) == done + 5, "what has failed is tried again by the next run"


@pytest.mark.parametrize(
    ("evaluate", "words"),
    [
        ("judge.py:score", ["RuntimeError", "no tokenizer"]),
        (f'"{sys.executable}" -c "print(1); raise SystemExit(\'no data\')" {{model}}', ["no data"]),
    ],
)
def test_an_evaluation_that_cannot_score_the_base_ends_it_at_once(
    tmp_path: Path, capsys: Capture, evaluate: str, words: list[str]
) -> None:
    judge("    raise RuntimeError('no tokenizer')")
    flags = command("--vary", "drop_rate=[0.1]", "--keep-models", "kept", evaluate=evaluate)
    run(*flags, status=1)
    printed = capsys.readouterr().err
    assert [word for word in ("score the base", *words) if word not in printed] == []
    assert (os.listdir("kept"), list(tmp_path.glob(".sweep-*"))) == ([], [])
    assert list(tmp_path.glob("*.db")) == [], "nothing was scored that a study could keep"


def test_a_study_in_which_nothing_was_scored_may_become_another_one() -> None:
    optuna.create_study(storage="sqlite:///config_sweep.db", study_name="other")
    flags = ("--vary", "drop_rate=[0.1]", "--search", "grid", "--study", "mine")
    Path("bad.py").write_text("def score(path):\n    raise RuntimeError('no tokenizer')\n")
    run(*command(*flags, evaluate="bad.py:score"), status=1)
    run(*command(*flags, lambda_coeff=0.5))


@pytest.mark.slow
def test_several_scores_give_a_front_and_a_function_can_prune(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    Path("both.py").write_text(
        "import torch, optuna\ndef score(state, trial):\n    assert isinstance(state, dict)\n"
        "    if trial.params.get('drop_rate', 0) == 0.25: raise optuna.TrialPruned\n"
        "    flat = torch.cat([state[n].flatten() for n in sorted(state)]).double()\n"
        "    return {'cost': float(flat.std()), 'gain': float(flat[::3].sum()), 'other': 'x'}"
    )
    flags = command(
        "--vary",
        "drop_rate=[0, 0.25, 0.5, 0.75, 0.9]",
        "--vary",
        "lambda_coeff={low=0.5,high=2,step=0.5}",
        "--search",
        "grid",
        "--objective",
        "gain:max",
        "cost:min",
        "--in-memory",
        "--json",
        "--plot",
        evaluate="~/both.py:score",
    )
    run(*flags, "front.svg")
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["trials"]), len(shown["plain_averages"]) >= 5) == (16, True)
    assert [each["why"] for each in shown["failed"]] == ["pruned"] * 4

    points = {
        each["number"]: (each["scores"]["gain"], -each["scores"]["cost"])
        for each in shown["trials"]
    }
    beaten = {
        a
        for a, b in itertools.permutations(points, 2)
        if all(map(float.__le__, points[a], points[b])) and points[a] != points[b]
    }
    assert set(shown["front"]) == set(points) - beaten
    assert re.search(rf"{len(shown['front'])} trials on the Pareto front", shown["verdict"])
    assert ("<svg" in Path("front.svg").read_text(), list(tmp_path.glob("*.sweep*"))) == (True, [])


SPACE = {"drop_rate": [0.25, 0.5, 0.75], "lambda_coeff": [0.5, 1.0]}


def make_net() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {"layer": torch.nn.Linear(16, 8, bias=False), "head": torch.nn.Linear(8, 4, bias=False)}
    )


def test_state_dicts_and_live_models_are_searched_in_memory(models: Models, tmp_path: Path) -> None:
    base, *tunes = map(load_file, models)
    goal = dare_merge(base, tunes, DareConfig(drop_rate=0.5))

    def miss(given: Any) -> float:
        state = given.state_dict() if isinstance(given, torch.nn.Module) else given
        return -float(sum((state[name] - goal[name]).abs().sum() for name in goal))

    def search(states: list[Any], model: Any = None, evaluate: Any = miss) -> SweepReport:
        return dare_sweep(states[0], states[1:], evaluate, SPACE, model=model, search="grid")

    before = snapshot(tmp_path)
    plain = search([base, *tunes])
    winner = plain.winner
    assert (winner.params, winner.scores) == ({"drop_rate": 0.5, "lambda_coeff": 1.0}, [0.0])
    net = make_net()
    net.load_state_dict(base)
    other = make_net()
    # The state is merged into: the base of every merge must be what it was.
    live = search([net.state_dict(), *tunes], net)
    reports = [live, sweep(miss, SPACE, model=other), sweep(miss, SPACE, in_memory=True)]
    assert live.base == plain.base == [miss(base)]
    scores = [(row.params, row.scores) for row in plain.rows]
    assert [[(row.params, row.scores) for row in each.rows] for each in reports] == [scores] * 3
    assert_same(dict(net.state_dict()), dare_merge(base, tunes, live.winner.config))
    assert_same(dict(other.state_dict()), goal)
    assert_same(base, load_file(models[0]))

    def give_up(model: Any) -> float:
        return miss(model) if miss(model) == plain.base[0] else sys.exit(3)

    for states, model, evaluate, words in (
        ([base, tunes[0], net.state_dict()], net, miss, "model 1 .* share their memory"),
        ([base, *tunes], net, give_up, "the first failed: SystemExit: 3"),
        ([base, *tunes], torch.nn.ModuleDict({"head": net["head"]}), miss, r"'layer\.weight'"),
    ):
        with pytest.raises(DareError, match=words):
            search(states, model, evaluate)
    assert_same(dict(net.state_dict()), base)  # since there is no winner
    one = torch.nn.Linear(8, 4, bias=False)
    tied = torch.nn.ModuleDict({"one": one, "two": one})
    heads = [{"one.weight": state["head.weight"]} for state in (base, *tunes)]
    both = [head | {"two.weight": head["one.weight"]} for head in heads]
    found = search(both, tied, lambda model: float(model["two"].weight.detach().sum()))
    assert_same(
        dict(one.state_dict(prefix="one.")), dare_merge(heads[0], heads[1:], found.winner.config)
    )
    net.register_buffer("empty", torch.zeros(0))  # which has no memory to share
    states = [{**state, "empty": torch.zeros(0)} for state in (base, *tunes)]
    assert search(states, net).winner.scores == [0.0]
    assert snapshot(tmp_path) == before, "nothing is written"


@pytest.mark.parametrize(
    ("base", "average", "trial", "verdict"),
    [
        (0, 0.5, 1, "The best merge is trial 0 (drop rate 0.5), with 1, better than the plain"),
        (0, 1, 1, "No trial scores better than the plain average (lambda 1: 1), so that is the"),
        (1, 0.5, 1, "The best merge is trial 0 (drop rate 0.5), with 1, better than the plain"),
        (1, 0.5, 0, "The base beats every merge: it has 1, and the best, plain average: lambda 1,"),
    ],
)
def test_the_best_is_compared_with_the_plain_average_and_with_the_base(
    capsys: Capture, base: float, average: float, trial: float, verdict: str
) -> None:
    judge(f"    return {trial} if rate else {average} if made else {base}")
    flags = command("--vary", "drop_rate=[0.5]", "--search", "grid", evaluate="judge.py:score")
    run(*flags)
    printed = capsys.readouterr()
    assert verdict in printed.out
    is_beaten = verdict.startswith("The base")
    assert Path("config_best.toml").exists() != is_beaten
    assert ("no configuration was written" in printed.err) == is_beaten
    run(*flags, "--force")
    settings = tomllib.loads(Path("config_best.toml").read_text())["dare"]
    assert settings["drop_rate"] == (0.5 if trial > average else 0)


@pytest.mark.parametrize(
    ("space", "remark"),
    [
        ({"lambda_coeff": {"low": 0.1, "high": 0.9, "step": 0.3}}, "best lambda_coeff is at"),
        ({"lambda_coeff": {"low": 0.1, "high": 1.5, "step": 0.3}}, ""),
        ({"ridge": {"low": 1e-9, "high": 1e-8, "log": True}}, "range, 1e-08: a wider one"),
        ({"drop_rate": {"low": 0, "high": 0.4, "step": 0.2}}, ""),  # nothing below 0 can be
    ],
)
def test_a_best_value_at_the_end_of_its_range_is_remarked_on(space: Any, remark: str) -> None:
    def score(path: Path) -> float:
        """Best at lambda 1, drop rate 0 and a large ridge."""
        made = settings_of(path) or {"lambda_coeff": 9, "drop_rate": 1}
        return -abs(made["lambda_coeff"] - 1) - made["drop_rate"] + (made.get("ridge") or 0) * 1e6

    config = {"method": "wudi", "drop_rate": 0}
    found = sweep(score, space, "tpe", config, trials=12)
    assert remark in str(found)
    assert ("at the end of its range" in str(found)) == bool(remark)


def test_a_trial_has_one_number_everywhere_and_axes_have_the_models_names(capsys: Capture) -> None:
    flags = ["--vary", "weights = {low = 0, high = 1, step = 1}", "--vary", "drop_rate = [0.5]"]
    flags += ["--search", "grid", "--keep-models", "kept", "--json", "--plot", "found.png"]
    run(*command(*flags))
    printed = capsys.readouterr()
    shown = json.loads(printed.out)["trials"]
    study = optuna.load_study(storage="sqlite:///config_sweep.db", study_name=None)
    for trial in shown:
        weights = trial["params"]["weights math"], trial["params"]["weights code"]
        number = trial["number"]
        assert study.trials[number].params == trial["params"]
        [kept] = Path("kept").glob(f"*-trial-{number:04}.safetensors")
        assert settings_of(kept)["weights"] == list(weights)
        assert re.search(
            rf"trial {number}: .*math {weights[0]:g}, weights code {weights[1]:g}: .* of 3 done",
            printed.err,
        )
    assert len(shown) == 3, "all but two weights of 0"
    assert Path("found.png").read_bytes()[:4] == b"\x89PNG"


def test_pictures_are_optunas() -> None:
    space = {"weights": {"low": 0, "high": 1}, "method": ["linear", "ties"], "keep_ratio": [0.5, 1]}
    Path("math.safetensors").rename("$m_$.safetensors")
    merger = DareMerger("base.safetensors", ["$m_$.safetensors"], DareConfig(engine="plain"))
    found = merger.sweep(lambda path: len(path.read_bytes()), space, trials=6)
    labels = {axis.get_xlabel() for axis in found.draw().axes}
    assert {"weights $m_$", "method", "keep_ratio"} < labels
    found.plot("found.svg")
    both = merger.sweep(
        lambda path: {"a": 1, "b": 2}, space, trials=2, objectives=["a:max", "b:min"]
    )
    [axis] = both.draw().axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("a", "b")


@pytest.mark.slow
def test_the_winners_configuration_makes_the_very_model_that_was_scored(capsys: Capture) -> None:
    rules = "[[rules]]\nmatch = 'head.*'\nlambda_coeff = 0.5\n"
    rules += "[[sweep.rules]]\nmatch = 'layer.*'\nlambda_coeff = [1.0]\n"
    flags = ["--vary", "drop_rate = [0.5, 0.8]", "--vary", "method = ['ties']", "--search", "grid"]
    flags += ["--keep-models", "kept"]
    run(*command(*flags, text=rules, weights=[1, 2], method="ties", keep_ratio=0.5))
    printed = capsys.readouterr()
    assert re.search(
        r"\ntrial 1: .* 0.8.*\ntrial 0: .*\nplain average: .*\nbase +-1\n", printed.out
    )
    run("-q", "-c", "config_best.toml", "--engine", "plain", "-o", "again.safetensors")
    [scored] = Path("kept").glob("*-trial-0001.*")
    assert Path("again.safetensors").read_bytes() == scored.read_bytes()
    assert len(os.listdir("kept")) == 2 + 1


@pytest.mark.slow
@POSIX
def test_an_interrupt_waits_for_the_trial_a_second_one_does_not_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    judge("    while os.path.exists(f'wait{rate}'): time.sleep(0.02)\n    return value")
    flags = ["--vary", "drop_rate=[0.1, 0.2, 0.3, 0.4]", "--search", "grid"]
    flags = command(*flags, evaluate=AS_COMMAND)

    def interrupt(rate: float, then: Callable[[subprocess.Popen[str]], None]) -> str:
        Path(f"wait{rate}").touch()
        process = subprocess.Popen(
            [sys.executable, str(HERE / "dare.py"), *flags], stderr=subprocess.PIPE, text=True
        )
        wait_for(lambda: [call[1] for call in calls()[-1:]] == [rate], 60)
        assert len(list(tmp_path.glob(".sweep-*/merged.safetensors"))) == 1
        process.send_signal(signal.SIGINT)
        assert any(
            "stopping after this trial; once more to stop at once" in line
            for line in process.stderr
        )
        then(process)
        left = process.communicate(timeout=120)[1]
        assert (process.returncode, list(tmp_path.glob(".sweep-*"))) == (130, [])
        assert left.endswith("interrupted\nhint: the same command goes on from here\n")
        return left

    assert "trial 1: drop rate 0.2" in interrupt(0.2, lambda _: Path("wait0.2").unlink())
    assert "4 of 4 done" not in interrupt(0.4, lambda process: process.send_signal(signal.SIGINT))
    wait_for(lambda: has_ended(calls()[-1][0]))
    Path("wait0.4").unlink()
    run(*flags)
    assert [call[1] for call in calls() if call[1]] == [0.1, 0.2, 0.3, 0.4, 0.4], (
        "what was stopped is tried again"
    )


def cut(study: Path) -> None:
    study.write_bytes(study.read_bytes()[:40_000])


def alter(change: str) -> Callable[[Path], None]:
    def apply(study: Path) -> None:
        with sqlite3.connect(study) as database:
            database.execute(change)

    return apply


DAMAGES: list[Callable[[Path], Any]] = [
    cut,
    lambda study: study.write_text("no database"),
    alter("update study_user_attributes set value_json = '{' where key = 'base'"),
    alter("""update study_user_attributes set value_json = '"abc"' where key = 'base'"""),
    alter("update study_user_attributes set value_json = '[1, 2]' where key = 'base'"),
    alter("update trial_params set param_name = 'other'"),
    alter("update trial_params set distribution_json = '{}'"),
    alter("drop table trial_values"),
    alter("delete from study_user_attributes"),
]


def test_a_damaged_study_or_that_of_another_tool_is_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    flags = ["--vary", "drop_rate={low=0.1,high=0.9}", "--study", "mine"]
    flags = command(*flags, "--trials")
    run(*flags, "2")
    study = Path("config_sweep.db")
    sound = study.read_bytes()
    for damage in DAMAGES:
        study.write_bytes(sound)
        damage(study)
        capsys.readouterr()
        assert dare.main([*flags, "3"]) in (1, 2)
        printed = capsys.readouterr().err
        assert "this is a bug" not in printed, printed
        assert ("the study" in printed, list(tmp_path.glob(".sweep-*"))) == (True, [])


def test_a_sweep_leaves_the_process_as_it_was(monkeypatch: Patch) -> None:
    def look() -> Any:
        levels = {name: logging.getLogger(name).level for name in ("optuna", "dare")}
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        folder = (os.getcwd(), dict(os.environ))
        looks = (dict(matplotlib.rcParams), pyplot.get_fignums())
        return levels, list(warnings.filters), list(sys.path), handlers, folder, sys.stdout, looks

    optuna.logging.set_verbosity(optuna.logging.INFO)
    before = look()
    Path("helper.py").write_text("value = 0.5")
    # What is beside the file is imported, also while the function runs.
    Path("late.py").write_text("def score(path):\n    import helper\n    return helper.value\n")
    sweep("late.py:score", {"drop_rate": [0.1, 0.5]}, storage="sqlite:///x.db").draw()
    with pytest.raises(DareError, match="score the base"):
        sweep(lambda path: "nothing", {"drop_rate": [0.1]})
    assert look() == before


def test_models_that_change_end_the_search() -> None:
    def score(path: Path) -> float:
        os.utime("math.safetensors")
        return 1.0

    with pytest.raises(DareError, match=r"math\.safetensors' changed"):
        sweep(score, {"drop_rate": [0.1, 0.2]})


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--evaluate 'python judge.py'", 2, "has no {model}"),
        ("--evaluate 'pyhton {model}'", 2, "no command 'pyhton'"),
        ("--evaluate 'python \"{model}'", 2, "cannot be split"),
        ("--evaluate judge.py:scores", 2, "no function 'scores'"),
        ("--evaluate no.py:score", 2, "no file 'no.py'"),
        ("--search genetic", 2, "there is no search 'genetic'"),
        ("--evaluate config.toml.py:f", 2, "no file"),
        ("--objective accuracy", 2, "must be NAME:max or NAME:min"),
        ("--trials 0", 2, "trials must be a whole number from 1"),
        ("--timeout 5", 2, "is for commands"),
        ("--write-config config.toml --force", 2, "is the configuration itself"),
        ("--write-config config_sweep.db --force", 2, "is the study itself"),
        ("--write-config math.safetensors --force", 2, "is the input"),
        ("--objective a:max a:min", 2, "have one name"),
        ("--evaluate 'cat {model} | tail'", 2, "without a shell"),
        ("--evaluate 'cat {model} | wc'", 2, """bash -c '... "$1" ...' bash {model}"""),
        ("--in-memory --keep-models x", 2, "no models to keep"),
        ("--evaluate 'echo {model}' --in-memory", 2, "a command needs models in files"),
        ("--in-memory --examples a.txt b.txt", 2, "in memory, a search merges without examples"),
        ("--lm-eval-tasks .", 2, "--lm-eval-tasks is for --evaluate lm-eval:TASK"),
        ("--evaluate lm-eval:,", 2, "'lm-eval:,' names no task"),
        ("--evaluate lm-eval:a --lm-eval-tasks no", 2, "no folder 'no'"),
        ("--evaluate lm-eval:a --timeout 5", 2, "lm-eval cannot be ended"),
        ("--evaluate lm-eval:a --in-memory", 2, "lm-eval needs models in files"),
        ("--evaluate lm-eval:a", 1, "lm-eval cannot be imported"),
        ("--storage sqlite:///no/such.db", 1, "cannot be used: OperationalError"),
        ("--storage ::", 1, "cannot be used: "),
        ("--keep-models config.toml/x", 1, "cannot write models in"),
        ("--plot a.gif", 2, "cannot be written"),
        (
            "--search grid --vary lambda_coeff={low=1,high=2}",
            2,
            "a grid needs values for lambda_coeff, not a range",
        ),
        ("--merge nothing.safetensors", 1, "nothing.safetensors"),
        ("without", 2, "nothing scores the models"),
        ("optuna", 1, "a sweep needs Optuna"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_merged(
    monkeypatch: Patch, refused: Refusal, flags: str, status: int, message: str
) -> None:
    words = command(
        "--vary", "drop_rate=[0.5]", *(shlex.split(flags) if flags.startswith("-") else [])
    )
    if flags == "optuna":
        monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    error = refused(status, message, *(words[:3] if flags == "without" else words))
    assert error.count("error: ") == 1
    assert flags != "optuna" or "optuna" in error or "--extra sweep" in error
