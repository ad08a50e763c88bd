"""What ships beside the tool: the experiment on quality, the benchmark, and what the documents
show."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import pytest

import dare
from darelib.commands.analyze import advice
from tests.scene import wait_for
from tests.support import HERE, POSIX, Patch, snapshot

sys.path.insert(0, str(HERE / "examples"))

import benchmark
import benchmark_report
import quality_report

EXAMPLES = HERE / "examples"
MEASURED = ("median time", "peak memory")
STORED = EXAMPLES / "results" / "benchmark.json"
QUALITY: dict[str, Any] = json.loads((EXAMPLES / "results" / "quality.json").read_text())
TEXTS = {
    path: path.read_text() for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
}
README, EVIDENCE = (TEXTS[HERE / name] for name in ("README.md", "docs/evidence.md"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(name: str, *arguments: str | Path) -> str:
    """What a script prints, in a process of its own."""
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout


def test_every_link_in_the_documents_leads_somewhere() -> None:
    for document, text in TEXTS.items():
        assert all((HERE / script).is_file() for script in re.findall(r"examples/\w+\.py", text))
        for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            target = document.parent / path if path else document
            assert target.is_file(), f"{document.name}: {path}"
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else [""]
            assert anchor in [
                re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
            ]


def test_the_tests_that_prove_the_promises_exist() -> None:
    code = "".join(
        path.read_text() for path in (HERE / "test_dare.py", *(HERE / "tests").glob("test_*.py"))
    )
    named = re.findall(r"\btest_\w+\b(?!\.py)", TEXTS[HERE / "docs" / "reliability.md"])
    assert len(named) >= 5
    assert [name for name in named if f"def {name}(" not in code] == []


def test_the_figures_in_the_documents_are_those_of_the_stored_results() -> None:
    results, printed = json.loads(STORED.read_text()), run_example("benchmark", "--report", STORED)
    blocks = [block for section in results.values() for block in benchmark_report.tell(section)]
    assert [block for block in blocks if block not in printed or block not in EVIDENCE] == []
    outcomes, roles = results["files"]["outcomes"], ("this tool", "mergekit", "torch script")
    largest = max(outcomes, key=lambda outcome: outcome["point"]["parameters"])
    kits = [
        outcome
        for outcome in outcomes
        if outcome["point"]["method"] != "slerp" and "mergekit" in outcome["figures"]
    ]
    times = {id(outcome): benchmark_report.ratio(outcome, "mergekit") for outcome in kits}
    cached = [
        times[id(outcome)]
        for outcome in kits
        if not outcome["point"]["cold"] and outcome is not largest
    ]
    assert f"{min(cached):.0f} to {max(cached):.0f} times as fast as mergekit's DARE" in README
    assert f"({min(times.values()):.0f} and more where one waits for the disk)" in README
    tool, kit, script = (
        [benchmark_report.value(outcomes[0], role, each) for each in MEASURED] for role in roles
    )
    assert (
        f"| **{tool[0]:.1f} s** | {kit[0]:.1f} s | not measured | not measured | "
        f"{script[0]:.1f} s |"
    ) in README
    assert f"| memory for it | **{tool[1]:.0f} MiB** | {kit[1] / 1024:.1f} GiB |" in README
    assert f"the base and all adapters | {script[1] / 1024:.1f} GiB |" in README
    tool, kit, script = (
        [benchmark_report.value(largest, role, each) for each in MEASURED] for role in roles
    )
    assert (
        f"| **{tool[0]:.0f} s, {tool[1]:.0f} MiB** | {kit[0]:.0f} s, {kit[1] / 1024:.0f} GiB |"
        in README
    )
    assert f"| {script[0]:.0f} s, {script[1] / 1024:.0f} GiB |" in README
    if "gpu" in results:
        gpu = results["gpu"]["outcomes"][0]
        taken, times_as_fast = (
            benchmark_report.value(gpu, "linear"),
            benchmark_report.ratio(gpu, "mergekit's linear"),
        )
        assert (
            f"in {1000 * taken:.1f} ms, {times_as_fast:.0f} times as fast as mergekit's arithmetic"
            in README
        )
    assert benchmark_report.project(results) in printed
    assert benchmark_report.project(results) in EVIDENCE


def test_the_experiment_in_the_documents_is_the_stored_one() -> None:
    report, (readme, evidence) = (
        quality_report,
        (" ".join(text.split()) for text in (README, EVIDENCE)),
    )
    for show in (report.scores, report.ranking, report.steps, report.starts, report.cliffs):
        assert show(QUALITY) in EVIDENCE
    steps, ranked = (
        {each.name: each for each in found}
        for found in (report.compare(QUALITY, report.STEPS), report.rank(QUALITY))
    )
    starts = {each.name: each for each in report.compare_starts(QUALITY)}
    assert (
        f"{len(ranked) + 1} ways to merge by a search and {len(starts)} without one, in "
        f"seven networks"
    ) in readme
    assert f"trained {len(QUALITY['units'])} times" in readme
    assert QUALITY["seconds"] <= 15 * 60
    better = [
        name
        for name, each in starts.items()
        if {each.tell(family) for family in each.p} == {"better"}
    ]
    begin = starts[f"{advice.START_METHOD}, lambda {advice.START_LAMBDA:g}"]
    assert better == ["ram, lambda 1", "ram, lambda 1.5"]
    assert min(fmean(each.values()) for each in begin.values.values()) > 0, "ahead in each network"
    assert (
        f"and in {sum(each > 0 for each in begin.every)} of {len(begin.every)} trainings"
        in evidence
    )
    assert max(record["parameters"] for record in QUALITY["units"].values()) == pytest.approx(
        advice.LARGEST_TRIED, rel=0.01
    )
    chars, digits = map(fmean, begin.families.values())
    assert (
        f"That is {chars:.1f} points ahead of the plain average on chars and {digits:.1f} on digits"
        in evidence
    )
    assert (
        f"is {chars:.1f} points ahead of the plain average on transformers and {digits:.1f} "
        f"on digits"
    ) in readme
    assert "better" not in {each.tell(family) for each in ranked.values() for family in each.p}
    assert ranked["ties"].tell("digits") == "worse"
    assert f"`ties` is {-fmean(ranked['ties'].families['digits']):.1f} points behind" in readme
    dropped = [ranked["task arithmetic + DARE"], steps["DARE in slerp"], steps["DARE in ram"]]
    assert "better" not in {each.tell(family) for each in dropped for family in each.p}
    best = [
        median(
            arms["ram"]["chosen"]["lambda_coeff"]
            for record in records
            for arms in record["merges"].values()
        )
        for records in report.units_of(QUALITY).values()
    ]
    assert min(best) < advice.START_LAMBDA < max(best)
    for words, text in (("goes", readme), ("went", Path(advice.__file__).read_text())):
        assert f"{words} from {min(best):.1f} to {max(best):.1f}" in text


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
    pytest.importorskip("optuna")
    module: Any = importlib.import_module("quality")
    recipe = (3, 1e-2, 8)
    units = (
        module.Unit("chars", 4, 1, recipe, recipe, 1, 2),
        module.Unit("digits", 4, 2, recipe, recipe, 2, 2),
    )
    module.QUICK = module.QUICK._replace(units=units, rescaled=True, rates=(0.0, 0.9))
    module.THINNINGS = {
        name: module.THINNINGS[name] for name in ("", " + DARE", " + DARE, l1", " + magnitude")
    }
    return module


@pytest.mark.slow
def test_an_experiment_goes_on_where_it_was_stopped_and_a_report_trains_nothing(
    quality: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(quality, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor(1))
    whole = run(quality, "--quick --out whole.json")
    printed = re.sub(r"(?m)^.*is (trained|measured).*\n", "", whole)
    assert run(quality, "--report whole.json --plot picture.png") == printed
    assert Path("picture.png").stat().st_size > 10_000
    results = json.loads(Path("whole.json").read_text())
    assert results["units"].keys() == {"chars/4/0", "digits/4/0", "digits/4/1"}
    lost = results["units"].pop("digits/4/1")
    Path("whole.json").write_text(json.dumps(results))
    assert run(quality, "--quick --out whole.json").count("is measured") == 1
    again = json.loads(Path("whole.json").read_text())["units"]["digits/4/1"]
    assert {**again, "seconds": 0} == {**lost, "seconds": 0}
    chars, digits = quality.QUICK.units
    monkeypatch.setattr(
        quality, "QUICK", quality.QUICK._replace(units=(chars._replace(trials=3), digits))
    )
    assert run(quality, "--quick --out whole.json").count("chars/4/0 is measured") == 1, (
        "by other settings"
    )


@pytest.mark.slow
def test_what_is_chosen_never_sees_test_data_or_test_masks(
    quality: Any, monkeypatch: Patch
) -> None:
    lab, calls, seeds = quality.Lab.__new__(quality.Lab), [], []
    lab.unit, lab.training = quality.QUICK.units[0]._replace(trials=3), 1
    lab.base, lab.experts = (
        {"w": quality.torch.zeros(64)},
        {s: {"w": quality.torch.ones(64)} for s in "abc"},
    )
    monkeypatch.setattr(
        lab, "score", lambda state, skills, part: calls.append(part) or float(state["w"].mean())
    )
    real = quality.dare_merge
    monkeypatch.setattr(
        quality, "dare_merge", lambda *given: seeds.append(given[2].seed) or real(*given)
    )
    lab.contend(
        "abc", quality.list_contenders(3)["task arithmetic + DARE"], quality.Settings(masks=3)
    )
    first = calls.index("test")
    assert calls[first:] == ["test"] * 3, "what is chosen is chosen before"
    assert len(calls[:first]) >= 3 + 3 * 3
    searched = {
        seed + k for seed in quality.SEARCH_SEEDS for k in range(3 * 4)
    }  # three models, a search, three masks
    assert not searched & {seed + i for seed in seeds for i in range(3)}
    spaces = quality.list_contenders(2)
    assert {str(space["lambda_coeff"]) for space in spaces.values()} == {str(quality.SCALE)}, (
        "all choose from the same"
    )


def make_results(gains: dict[str, float], trainings: int = 9) -> dict[str, Any]:
    """What an experiment might have found: contenders that are so much better than the reference,
    more or less."""
    units = {}
    for k in range(trainings):
        arms = {
            name: {"score": 0.5 + gain + 0.001 * (2 * k % 9 - 4), "chosen": {"lambda_coeff": 1.5}}
            for name, gain in {quality_report.REFERENCE: 0.0, **gains}.items()
        }
        arms[quality_report.REFERENCE]["score"] = 0.5
        units[f"chars/64/{k}"] = {
            "machine": "m",
            "parameters": 10,
            "base": 0.1,
            "merges": {"a + b": arms},
        }
    return {"rates": [0.0, 0.9], "seconds": 1.0, "units": units}


def test_verdicts_of_the_experiment_come_out_each_way() -> None:
    gains = {"ties": -0.1, "ram": 0.1, "slerp": 0.0}
    found = {each.name: each.tell("chars") for each in quality_report.rank(make_results(gains))}
    assert found == {"ram": "better", "slerp": "cannot be told", "ties": "worse"}
    assert [each.p for each in quality_report.rank(make_results(gains, 1))] == [
        {"chars": 1.0}
    ] * 3, "one tells nothing"
    assert quality_report.correct([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    stats = pytest.importorskip("scipy.stats")
    for values in ([0.1, 0.2, -0.05], [1.0, 2.0, 2.5], [0.3, 0.1, 0.2, 0.25, -0.4]):
        assert quality_report.probability(values) == pytest.approx(
            stats.ttest_1samp(values, 0).pvalue
        )
    assert (
        quality_report.probability([0.0, 0.0, 0.0]) == quality_report.probability([1.0, 1.0]) == 1
    )
    values = {
        "chars/8": {"0": 1.0, "1": 2.0, "2": 3.0},
        "chars/64": {"2": 4.0},
        "digits/8": {"1": 5.0, "0": 6.0},
    }
    told = quality_report.Comparison("ram", values)
    assert (told.families, len(told.every)) == (
        {"chars": [1.0, 2.0, 3.5], "digits": [5.0, 6.0]},
        6,
    ), "by rounds"


def options(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(repeat=1, against=None, json=None, parameters=None, **changed)


def outcome_of(seconds: dict[str, list[float]], trouble: str = "") -> dict[str, Any]:
    """What is stored of a point; the last program ran into trouble."""
    figures = {
        role: {"runs": [{"wall_s": each} for each in runs], "trouble": ""}
        for role, runs in seconds.items()
    }
    list(figures.values())[-1]["trouble"] = trouble
    return {"figures": figures}


def test_a_benchmark_prints_what_ran_out_of_memory_or_of_disk(folder: Path) -> None:
    for code, trouble in {"raise MemoryError": "out of memory", "1 / 0": "failed"}.items():
        with pytest.raises(benchmark.Trouble, match=trouble):
            benchmark.measure([sys.executable, "-c", code], {})
    with pytest.raises(SystemExit, match=r"MiB of disk are free, and .* MiB are needed"):
        benchmark.measure_programs("files", benchmark.Point(10**12), options(), folder)
    point = {"point": benchmark.Point(10**6)._asdict()}
    for runs, shown in {
        (28.0, 30.0): "29.0 s (14.5 x, then out of memory)",
        (): "out of memory",
    }.items():
        outcome = point | outcome_of(
            {"this tool": [2.0, 2.0], "mergekit": list(runs)}, "out of memory"
        )
        assert benchmark_report.show_time(outcome, "mergekit") == shown


def test_a_benchmark_that_was_stopped_goes_on_and_keeps_other_sections(monkeypatch: Patch) -> None:
    measured: list[tuple[str, str]] = []

    def pretend(section: str, point: Any, *_: Any) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((section, point.method))
        return outcome_of(
            {"this tool": [1.0], "mergekit": [20.0]}, "failed" * (point.method == "della")
        )

    monkeypatch.setattr(benchmark, "measure_programs", pretend)
    Path("f.json").write_text(json.dumps({"gpu": json.loads(STORED.read_text())["files"]}))
    with pytest.raises(KeyboardInterrupt):
        run(benchmark, "--only drops --json f.json")
    del measured[0]
    printed = run(benchmark, "--only drops --json f.json")
    assert [method for _, method in measured] == ["breadcrumbs", "della"], (
        "the first is not measured again"
    )
    assert printed.startswith("1\n")
    assert re.search(r"(?m)^\| breadcrumbs \| \? s \| \? s \(20.0 x\) \|$", printed)
    results = json.loads(Path("f.json").read_text())
    assert list(results) == ["gpu", "drops"]
    measured.clear()
    run(benchmark, "--only drops --json f.json")
    assert measured == [("drops", "della")], "what failed is measured again"
    measured[:] = []
    results["drops"]["code"] = "of an older version"
    Path("f.json").write_text(json.dumps(results))
    with pytest.raises(KeyboardInterrupt):
        run(benchmark, "--only drops --json f.json")
    assert [method for _, method in measured] == ["magnitude", "breadcrumbs"], (
        "other code is measured from the start"
    )
    assert len(json.loads(Path("f.json").read_text())["drops"]["outcomes"]) == 2


@pytest.mark.slow
def test_a_small_benchmark_runs_and_compares(monkeypatch: Patch) -> None:
    small = {"files": [benchmark.Point(200_000), benchmark.Point(200_000, "ties")]}
    small |= {
        name: benchmark.SECTIONS[name] for name in ("drops", "packed", "analysis", "gpu", "threads")
    }
    monkeypatch.setattr(benchmark, "SECTIONS", small)
    printed = run(benchmark, "--whole --parameters 2e5 --repeat 1 --json f.json --plot f.png")
    assert re.search(r"(?m)^\| ties \| \? s .* \(\d+\.\d x\) \|.* \|$", printed)
    assert re.search(r"(?m)^\| magnitude, .*\? s", printed)
    assert re.search(r"(?m)^\| cold \| \? s \| \? s \(.* x\) \| \? s \(.* x, 0 MB\)", printed)
    said = re.sub(r"(?m)^(run \d|files:|drops:|packed:|analysis:) .*\n", "", printed)
    assert run(benchmark, "--report f.json") == said
    assert "| torch script | 1 |" in run(benchmark, "--parameters 2e5 --repeat 1 --method analyze")
    printed = run(benchmark, "--gpu --only threads --parameters 2e5 --repeat 1")
    assert re.search(r"(?m)^\| ties \| [\d.?]+ m?s", printed)
    printed = run(benchmark, f"--parameters 2e5 --repeat 1 --against {HERE}")
    assert re.match(r"(?s)0\n.*\n\| this checkout / the other \|  \| \d", printed)
    Path("dare.py").write_text("raise SystemExit('broken on purpose')")
    printed = run(benchmark, "--parameters 2e5 --repeat 1 --against .")
    assert re.match(r"(?s)1\n.*ended with status 1\nbroken on purpose", printed)


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_stopped_leaves_neither_a_process_nor_files(
    folder: Path, number: int
) -> None:
    import fcntl

    Path("dare.py").write_text(
        (
            "import fcntl, time\nlock = open('lock', 'w')\nfcntl.flock(lock, "
            "fcntl.LOCK_EX)\ntime.sleep(600)"
        )
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
def test_the_advice_merges_the_example_to_what_the_readme_says(folder: Path) -> None:
    given = ["--config", str(HERE / "merge_config.toml"), "-q", "--output"]
    assert dare.main([*given, "plain.safetensors"]) == 0
    assert (
        dare.main(["analyze", *given, "advised.safetensors", "--write-config", "advice.toml"]) == 0
    )
    assert dare.main(["--config", "advice.toml", "-q"]) == 0
    scores = [
        run_example("evaluate", folder / f"{name}.safetensors").split()[-1]
        for name in ("advised", "plain")
    ]
    assert (
        "a configuration that merges: here to {}, where the defaults gave {}.".format(*scores)
        in README
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "analyze_models",
            (
                "cosine 0.082",
                "tolerates a drop rate of 0.8",
                "[dare]",
                "would merge 2 models",
                "drew ",
            ),
        ),
        ("drop_rates", ("mean of 3 masks", "0.95")),
        (
            "evaluate",
            ("rotated     96.1%     60.8%     78.5%", "covered     50.9%     94.8%     72.9%"),
        ),
    ],
)
def test_the_short_examples_run_and_leave_the_models_alone(
    script: str, words: tuple[str, ...]
) -> None:
    before = snapshot(EXAMPLES / "models")
    printed = run_example(*script.split())
    assert all(word in printed for word in words), printed
    assert snapshot(EXAMPLES / "models") == before
