"""The benchmarks and the experiment on quality: they run, go on, and report what they found."""

import importlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import benchmark
import pytest
import quality_report

from tests.support import HERE, Patch, read_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]
QUALITY: dict[str, Any] = read_json(HERE / "examples" / "results" / "quality.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def run(module: Any, words: str) -> str:
    """Call the main function of a script as the command line does: its status and what it printed,
    less times."""
    with Patch.context() as patch, redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        patch.setattr(sys, "argv", [module.__name__, *words.split()])
        with pytest.raises(SystemExit) as end:
            sys.exit(module.main())
    return re.sub(r"[\d.]+ s\b", "? s", f"{end.value.code}\n{printed.getvalue()}")


@pytest.fixture(scope="module")
def quality() -> Any:
    """The experiment, as small as can be: what is learned does not matter here.

    It takes seconds to import.
    """
    pytest.importorskip("sklearn")
    module: Any = importlib.import_module("quality")
    recipe = (3, 1e-2, 8)
    few = ("task arithmetic", "wudi", "wudi + DARE 0.9", quality_report.MATCHED)
    chars = module.Unit("chars", 4, 1, recipe, recipe, 2, (2, 4), ways=few)
    module.QUICK = (
        chars,
        chars._replace(family="lora", trainings=1, merged=(2,), rank=2),
        chars._replace(family="contexts", trainings=1, merged=(2, 3)),
        module.Unit("digits", 4, 2, recipe, recipe, 1, (2, 3), limits=True),
    )
    return module


def test_an_experiment_goes_on_where_it_was_stopped_and_a_report_trains_nothing(
    quality: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(quality, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor(1))
    whole = run(quality, "--quick --out whole.json")
    printed = run(quality, "--report whole.json --plot picture.png")
    assert printed == re.sub(r"(?m)^.*(is trained|is measured|left).*\n", "", whole)
    assert Path("picture.png").stat().st_size > 10_000
    results = json.loads(Path("whole.json").read_text())
    names = "chars/4/0 chars/4/1 lora/4/0 contexts/4/0 digits/4/0"
    assert results["units"].keys() == set(names.split())
    assert "| chars, 2 / 4 skills | lora, 2 skills | contexts, 2 / 3 skills |" in printed
    for choice in ("lambda 1", "lambda auto", "lambda by answers"):
        assert re.search(rf"(?m)^\| {quality_report.MATCHED}, {choice} \| \d", printed)
    assert re.search(r"(?m)^\| digits, 0.3\d* k \| \d+\.\d \(\d of 3\) \| ", printed), (
        "wrong examples"
    )
    lost = results["units"].pop("chars/4/1")
    Path("whole.json").write_text(json.dumps(results))
    assert run(quality, "--quick --out whole.json").count("is measured") == 1
    again = json.loads(Path("whole.json").read_text())["units"]["chars/4/1"]
    assert {name: again[name] for name in ("merges", "curves", "base")} == {
        name: lost[name] for name in ("merges", "curves", "base")
    }


@pytest.fixture(scope="module")
def lab(quality: Any) -> Any:
    unit = quality.Unit("digits", 32, 2, (60, 1e-2, 64), (60, 1e-2, 64), 1, (2, 3))
    return quality.Lab(unit, 0)


def test_a_lambda_is_chosen_without_test_data_and_as_dare_match_chooses_it(
    quality: Any, lab: Any, monkeypatch: Patch
) -> None:
    skills = lab.skills[:2]
    experts = lab.thin(skills, 0.0, 0)
    held = [own for [own] in lab.show(skills, quality.JUDGING)]
    shown = [own for [own] in lab.show(skills, quality.WAYS["wudi, matched with 64"])]
    for own, others in zip(held, shown, strict=True):
        images = {tuple(image.flatten().tolist()) for image in others.inputs}
        assert not [each for each in own.inputs if tuple(each.flatten().tolist()) in images]
    merged = lab.merge(experts, [], quality.WAYS["task arithmetic"])
    parts = set()
    score = quality.Lab.score

    def watch(lab: Any, state: Any, skills: Any, part: str) -> float:
        parts.add(part)
        return float(score(lab, state, skills, part))

    monkeypatch.setattr(quality.Lab, "score", watch)
    chosen = lab.choose(merged, experts, skills)
    assert parts == {"validation"}
    # dare_match holds whole batches out: the last half of them.
    batches = [[own.inputs.clone(), own.inputs] for own in held]
    taken: list[float] = []
    states = importlib.import_module("darelib.run.matching.models")
    of = states.LambdaChoice.of

    def note(*given: Any) -> Any:
        choice = of(*given)
        taken.append(choice.chosen)
        return choice

    monkeypatch.setattr(states.LambdaChoice, "of", note)
    config = quality.DareConfig(
        drop_rate=0.0, matched=False, lambda_coeff="auto", held_out=0.5, verbose=False
    )
    quality.dare_match(lab.model, lab.base, experts, batches, config)
    assert taken == [chosen["lambda auto"]]


def make_results(gains: dict[str, float], trainings: int = 9) -> dict[str, Any]:
    """What an experiment might have found: ways that are so much better than the reference, more or
    less."""
    units = {}
    for k in range(trainings):
        noise = 0.001 * (2 * k % 9 - 4)
        arms = {name: [0.5 + gain + noise, 2.0 + gain, 1.5] for name, gain in gains.items()}
        pair = {quality_report.REFERENCE: [0.5, 2.0, 1.5], **arms}
        three = {name: found for name, found in pair.items() if name != "slerp"}
        units[f"chars/64/{k}"] = {
            "machine": "a machine",
            "parameters": 10,
            "base": 0.1,
            "elsewhere": {"base": 1.5, "fine-tunes": 1.75},
            "curves": {"DARE": [0.9, 0.5]},
            "merges": {"a + b": pair, "a + b + c": three},
        }
    return {"seconds": 1.0, "rates": [0.0, 0.9], "units": units}


def test_verdicts_of_the_experiment_come_out_each_way() -> None:
    gains = {"ties": -0.1, "ram": 0.1, "karcher": 0.0, "slerp": 0.2}
    compared = quality_report.compare(make_results(gains), True)
    everywhere = quality_report.EVERYWHERE
    verdicts = {each.name: each.verdict(everywhere) for each in compared[:-1]}
    assert verdicts == {"ram": "better", "karcher": "cannot be told", "ties": "worse"}
    assert list(verdicts) == ["ram", "karcher", "ties"], "the best first"
    assert compared[-1].name == "slerp", "of pairs alone: no mean over all"
    assert compared[-1].rounds.keys() == {("chars", 2)}
    assert quality_report.ranking(make_results(gains), True).splitlines()[2:] == [
        "| ram | **+10.0** | **+10.0** / **+10.0** |",
        "| karcher | +0.0 | +0.0 / +0.0 |",
        "| ties | **-10.0** | **-10.0** / **-10.0** |",
        "| slerp | - | **+20.0** / - |",
    ]
    chances = [compared[0].p[place] for place in (everywhere, ("chars", 2))]
    alone = quality_report.probability(compared[0].rounds[everywhere])
    ratios = [p / alone for p in chances]
    assert ratios == pytest.approx([3, 6]), "of three; of seven, slerp first"
    once = quality_report.compare(make_results(gains, 1), True)
    assert {p for each in once for p in each.p.values()} == {1.0}
    assert quality_report.correct([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    found = [quality_report.probability(values) for values in ([0.1, 0.2, -0.05], [1.0, 2.0, 2.5])]
    assert found == pytest.approx([0.37005921165, 0.05327073759]), (
        "what scipy.stats.ttest_1samp gives"
    )
    assert {quality_report.probability(values) for values in ([0.0] * 3, [1.0] * 2)} == {1}


def test_a_round_is_a_mean_over_networks_that_were_tried_with_a_way() -> None:
    results = make_results({"ram": 0.1, "wudi": 0.1}, 3)
    larger = make_results({"wudi": 0.2}, 2)["units"]
    for name, record in larger.items():
        results["units"][name.replace("64", "256")] = {**record, "parameters": 20}
    found = {each.name: each for each in quality_report.compare(results, True)}
    assert found["ram"].rounds["chars", 2] == pytest.approx([9.6, 9.8, 10.0])
    assert found["wudi"].rounds["chars", 2] == pytest.approx([14.6, 14.8, 10.0])
    printed = quality_report.report(results)
    assert "| chars, 0.01 k | 10 | 3 | 10.0 | 90.0 | 50.0 |" in printed
    assert "| chars, 0.02 k | 9 ± 0 |" in printed, "95% of the gain is kept up to a rate of 0.09"
    quality_report.draw(results, Path("picture.png"))
    assert 10_000 < Path("picture.png").stat().st_size < 200_000


def test_a_small_benchmark_runs_and_compares(monkeypatch: Patch) -> None:
    small = {"files": [benchmark.Point(200_000), benchmark.Point(200_000, "ties")]}
    names = ("drops", "packed", "matrices", "adapters", "extraction", "analysis", "gpu", "threads")
    small |= {name: benchmark.SECTIONS[name] for name in names}
    monkeypatch.setattr(benchmark, "SECTIONS", small)
    printed = run(benchmark, "--whole --parameters 2e5 --repeat 1 --json f.json --plot f.png")
    assert run(benchmark, "--report f.json") == re.sub(r"(?m)^(run \d|[a-z]+:) .*\n", "", printed)
    Path("dare.py").write_text("raise SystemExit('broken on purpose')")
    usual = "--parameters 2e5 --repeat 1"
    for words, pattern in (
        (None, r"\| ties \| \? s .* \(\d+\.\d x\) \|.* \|$"),
        (None, r"\| magnitude, .*\? s"),
        (None, r".*error 0\.\d{3}"),
        (None, r"\| cold \| \? s \| \? s \(.* x\) \| \? s \(.* x, 0 MB\)"),
        (f"{usual} --method analyze", r"\| torch script \| 1 \|"),
        (f"--gpu --only threads {usual}", r"\| ties \| [\d.?]+ m?s"),
        (f"{usual} --against {HERE}", r"\| this checkout / the other \|  \| \d"),
        (f"{usual} --against .", r".*ended with status 1\nbroken on purpose"),
    ):
        text = run(benchmark, words) if words else printed
        assert re.search(f"(?m)^{pattern}", text), pattern
        assert text[0] == ("1" if "broken" in pattern else "0")


def test_a_small_benchmark_of_matching_runs(monkeypatch: Patch) -> None:
    """A block of it beside the same by hand, and whole commands with one model's bytes twice."""
    match = importlib.import_module("benchmark_match")
    monkeypatch.setitem(match.SIZES, "0.1", (16, 32, 2, 4, 2, 1000))
    few = "--examples 16 --tokens 32"
    block = json.loads(run(match, f"block {few} --times 1").partition("\n")[2])
    assert block["tokens of each model"] == 16 * 32
    printed = run(match, f"command --models 3 {few}").splitlines()
    figures = {name for line in printed[2:] for name in json.loads(line.replace("? s", "s"))}
    assert {f"{way}, GB" for way in match.WAYS} | {"before", "after"} <= figures
    assert not Path("benchmark_match").exists()


def test_the_stored_results_are_of_the_experiment_as_it_is(quality: Any) -> None:
    wanted = {
        f"{unit}/{k}": quality.describe(unit)
        for unit in quality.UNITS
        for k in range(unit.trainings)
    }
    stored = {name: record["settings"] for name, record in QUALITY["units"].items()}
    assert {name: wanted[name] for name in stored} == stored
    families = {(name.partition("/")[0], "x24" in name) for name in stored}
    assert len(families) == 7, "of each kind, those of 24 blocks too"
