"""The benchmark and the experiment on quality: they run, and the documents show what they found."""

import importlib
import json
import operator
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from typing import Any

import benchmark
import benchmark_report
import pytest
import quality_report

from darelib.commands.analyze import advice
from tests.support import HERE, Patch, read_json

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]
MEASURED = ("median time", "peak memory")
RESULTS = HERE / "examples" / "results"
QUALITY: dict[str, Any] = read_json(RESULTS / "quality.json")
METHODS: dict[str, Any] = read_json(RESULTS / "methods.json")  # an earlier run: by weights alone
TEXTS = {
    path: path.read_text() for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
}
README = TEXTS[HERE / "README.md"]
EVIDENCE = TEXTS[HERE / "docs" / "evidence.md"]
ROLES = ("this tool", "mergekit", "torch script")
MERGES = quality_report.list_merges(METHODS)
MATCHED_MERGES = quality_report.list_merges(QUALITY)
AVERAGE = quality_report.REFERENCE
PLAIN = quality_report.PLAIN
CASE = advice.CASES["whole"]
START = f"{CASE.method}, lambda {CASE.lambda_coeff:g}"


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


def test_the_figures_in_the_documents_are_those_of_the_stored_results() -> None:
    results = read_json(RESULTS / "benchmark.json")
    blocks = [block for section in results.values() for block in benchmark_report.tell(section)]
    blocks.append(benchmark_report.project(results))
    assert [block for block in blocks if block not in EVIDENCE] == []
    outcomes = results["files"]["outcomes"]
    largest = max(outcomes, key=lambda outcome: outcome["point"]["parameters"])
    kits = [
        (benchmark_report.ratio(outcome, "mergekit"), outcome)
        for outcome in outcomes
        if outcome["point"]["method"] != "slerp" and "mergekit" in outcome["figures"]
    ]
    cached = [ratio for ratio, each in kits if not each["point"]["cold"] and each is not largest]

    def show(outcome: Any, role: str) -> list[float]:
        return [benchmark_report.value(outcome, role, each) for each in MEASURED]

    tool, kit, script = (show(outcomes[0], role) for role in ROLES)
    great, great_kit, great_script = (show(largest, role) for role in ROLES)
    claims = [
        f"to {max(cached):.0f} times as fast as mergekit's DARE",
        f"| **{tool[0]:.1f} s** | {kit[0]:.1f} s | {script[0]:.1f} s |",
        f"| memory for it | **{tool[1]:.0f} MiB** | {kit[1] / 1024:.1f} GiB |",
        f"{kit[1] / 1024:.1f} GiB | {script[1] / 1024:.1f} GiB |",
        f"| **{great[0]:.0f} s, {great[1]:.0f} MiB** | "
        f"{great_kit[0]:.0f} s, {great_kit[1] / 1024:.0f} GiB |",
        f"| {great_script[0]:.0f} s, {great_script[1] / 1024:.0f} GiB |",
    ]
    for gpu in results.get("gpu", {}).get("outcomes", [])[:1]:
        copies = benchmark_report.ratio(gpu, "linear")
        taken = 1000 * benchmark_report.value(gpu, "linear")
        claims.append(f"in {taken:.1f} ms, {copies:.1f} times what a copy takes")
    assert [claim for claim in claims if claim not in README] == []


def test_the_experiment_in_the_documents_is_the_stored_one() -> None:
    report = quality_report
    tables = [report.scores, report.networks, report.chosen, report.lambdas]
    tables += [report.limits, report.wrong, report.elsewhere, report.seconds]
    shown = [table(QUALITY) for table in tables]
    for results in (QUALITY, METHODS):
        shown += [report.ranking(results, searched) for searched in (True, False)]
    shown.append(report.cliffs(METHODS))
    assert [table for table in shown if table not in EVIDENCE] == []
    assert max(record["parameters"] for record in METHODS["units"].values()) == pytest.approx(
        advice.LARGEST_TRIED, rel=0.01
    )


def differ(
    name: str,
    other: str,
    keep: Callable[[Any], bool] = lambda merge: True,
    merges: list[Any] = MERGES,
) -> float:
    """How many points a way is ahead of another: the mean of rounds, of merges that have both."""
    rounds: dict[str, list[float]] = {}
    for merge in filter(keep, merges):
        if {name, other} <= merge.arms.keys():
            ahead = quality_report.score(merge, name) - quality_report.score(merge, other)
            rounds.setdefault(merge.record["round"], []).append(ahead)
    return fmean(map(fmean, rounds.values()))


def test_what_is_said_of_the_experiment_can_be_told_from_chance() -> None:
    everywhere = quality_report.EVERYWHERE
    ranked = quality_report.compare(METHODS, True)
    better = {each.name for each in ranked if "better" in map(each.verdict, each.rounds)}
    assert {name.split()[0] for name in better} == {CASE.method}, "nothing else"
    starts = {each.name: each for each in quality_report.compare(METHODS, False)}
    assert starts[START].verdict(everywhere) == "better"
    wudi = ranked[0]
    assert wudi.name == CASE.method
    cells = [cell for cell in wudi.rounds if cell[1] == 8]
    assert {wudi.verdict(cell) for cell in [everywhere, *cells]} == {"better"}
    dropped = [name for name in quality_report.list_names(MERGES, True) if " + DARE" in name]
    assert len(dropped) > 10
    assert all(differ(name, name.partition(" + DARE")[0]) < 0 for name in dropped), "no gain"
    ranked = quality_report.compare(QUALITY, True)
    better = {each.name for each in ranked if each.p.get(everywhere, 1) <= 0.05}
    matched = {
        name for name in quality_report.list_names(MATCHED_MERGES, True) if "matched" in name
    }
    everywhere_tried = {each.name for each in ranked if everywhere in each.rounds}
    wanted = {name for name in matched & everywhere_tried if "tenths" not in name} | {CASE.method}
    assert {name for name in better if "DARE" not in name and "tenths" not in name} == wanted


def test_the_figures_of_the_experiment_in_texts_are_those_of_its_results() -> None:
    words = {
        "advice": " ".join(map(str, vars(advice).values())),
        **{path.stem: " ".join(text.split()) for path, text in TEXTS.items()},
    }
    half = " + DARE 0.5"
    most = " + DARE 0.9"

    def is_transformer(merge: Any) -> bool:
        return bool(merge.family != "digits")

    def has_halves(merge: Any) -> bool:
        return AVERAGE + half in merge.arms

    def count_skills(count: int) -> Callable[[Any], bool]:
        return lambda merge: merge.skills == count and is_transformer(merge)

    def is_large(merge: Any) -> bool:
        return bool(merge.record["parameters"] > 14e6)

    def score(name: str) -> str:
        """Of the largest networks that were trained more than once, with all skills."""
        own = [m for m in MERGES if (m.unit, m.skills) == ("chars/1024", 8)]
        return f"{fmean(quality_report.score(merge, name) for merge in own):.1f}%"

    def tell(name: str, other: str = AVERAGE, keep: Callable[[Any], bool] = bool) -> str:
        return f"{abs(differ(name, other, keep)):.1f}"

    leads = [quality_report.lead(merge, "wudi") for merge in MERGES]
    by_skills = [tell("wudi", keep=count_skills(count)) for count in (2, 3, 8)]
    packed = [tell("wudi" + drop, AVERAGE + drop) for drop in (half, most)]
    lambdas: dict[tuple[str, int], list[float]] = {}
    for merge in MERGES:
        lambdas.setdefault((merge.unit, merge.skills), []).append(merge.arms["wudi"][2])
    medians = [median(chosen) for chosen in lambdas.values()]
    claims = {
        f"{tell('wudi')} points ahead": "advice evidence",
        f"by {tell('wudi')} points": "README",
        f"{tell('wudi', keep=is_transformer)} on transformers": "advice",
        "{}, {} and {} with 2, 3 and 8 skills".format(*by_skills): "evidence",
        f"{sum(points > 0 for points in leads)} of {len(leads)} merges": "evidence",
        f"{len(METHODS['units'])} trainings": "evidence",
        f"{tell(START)} points ahead": "evidence",
        f"{tell('wudi', START)} points for `wudi`": "evidence",
        f"{tell(START, AVERAGE + ', lambda 1.5')} ahead of it": "evidence",
        f"`wudi` {tell('wudi' + half, 'wudi', has_halves)}": "evidence",
        f"wudi lost {tell('wudi' + half, 'wudi', has_halves)}": "advice",
        f"{tell('wudi' + half, 'wudi', has_halves)} points at 0.5": "guide",
        f"{tell(AVERAGE + half)} points": "evidence",
        f"linear {tell(AVERAGE + half)}": "advice",
        f"{tell(AVERAGE + most)} and {tell('wudi' + most, 'wudi')}": "evidence",
        f"{tell('wudi' + most, 'wudi')} at 0.9": "guide",
        f"{tell(AVERAGE + most, keep=is_large)} and "
        f"{tell('wudi' + most, 'wudi', is_large)}": "evidence",
        "by {} points at 0.5 and {} at 0.9".format(*packed): "advice",
        f"from {min(medians):g} to {max(medians):g} by network": "advice",
        f"1 was {-differ('wudi' + half + ', lambda 1', AVERAGE):.0f} points behind": "advice",
        f"and {-differ('wudi' + most + ', lambda 1', AVERAGE):.0f} at 0.9": "advice",
        score("wudi"): "evidence",
        score(AVERAGE): "evidence",
        score("wudi" + most): "evidence",
        score("wudi" + half): "evidence",
        score(PLAIN): "evidence",
        f"{differ('ram', AVERAGE):+.1f} and `ties` {differ('ties', AVERAGE):+.1f}": "README",
    }
    assert list_missing(claims, words) == []


def list_missing(claims: dict[str, str], words: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (claim, where)
        for claim, places in claims.items()
        for where in places.split()
        if claim not in words[where]
    ]


def test_the_figures_of_matched_merges_in_texts_are_those_of_the_results() -> None:
    words = {path.stem: " ".join(text.split()) for path, text in TEXTS.items()}
    matched = quality_report.MATCHED
    tenths_one = f"{quality_report.TENTHS}, lambda 1"

    def tell(unit: str, name: str, skills: int = 8) -> str:
        """Of one kind of network."""
        own = [merge for merge in MATCHED_MERGES if (merge.unit, merge.skills) == (unit, skills)]
        return f"{fmean(quality_report.score(merge, name) for merge in own):.1f}"

    def lead(name: str, keep: Callable[[Any], bool] = bool, other: str = AVERAGE) -> str:
        return f"{abs(differ(name, other, keep, MATCHED_MERGES)):.1f}"

    def is_transformer(merge: Any) -> bool:
        return bool(merge.family != "digits")

    def is_wide(merge: Any) -> bool:
        return is_transformer(merge) and quality_report.width_of(merge.unit) >= 384

    def is_wide_lora(merge: Any) -> bool:
        return is_wide(merge) and bool(merge.family == "lora")

    def is_wide_full(merge: Any) -> bool:
        return is_wide(merge) and bool(merge.family != "lora")

    def count_tasks(count: int) -> Callable[[Any], bool]:
        return lambda merge: merge.skills == count and merge.family in ("chars", "lora")

    def by_examples(unit: str, start: str, mark: str) -> str:
        names = [f"{start}, matched with {count}, lambda 1" for count in (16, 64, 512)]
        return mark.join(tell(unit, name) for name in names)

    def is_wide_of(family: str) -> Callable[[Any], bool]:
        return lambda merge: is_wide(merge) and merge.family == family

    def beside_wudi(count: int, family: str) -> str:
        """Of merges that are matched from wudi, with lambda 1: by how much, and how often."""
        names = f"wudi, matched with {count}, lambda 1", "wudi, lambda 1"
        own = [merge for merge in MATCHED_MERGES if merge.family == family]
        gains = [operator.sub(*(quality_report.score(merge, n) for n in names)) for merge in own]
        ahead = differ(*names, lambda merge: merge.family == family, MATCHED_MERGES)
        words = "ahead" if ahead > 0 else "points behind in full word tasks"
        often = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
        return f"{abs(ahead):.1f} {words} ({'' if ahead > 0 else 'ahead in '}{often}"

    def list_gains(name: str, other: str, *skills: int) -> list[float]:
        """Of wide networks in full word tasks, from the smallest up: by how much one is ahead."""
        found: dict[tuple[int, str, int], list[float]] = {}
        for merge in filter(is_wide_of("chars"), MATCHED_MERGES):
            ahead = quality_report.score(merge, name) - quality_report.score(merge, other)
            size = merge.record["parameters"]
            found.setdefault((size, merge.unit, merge.skills), []).append(ahead)
        return [fmean(gains) for cell, gains in sorted(found.items()) if cell[2] in skills]

    def beside_none(*skills: int) -> list[float]:
        """With few examples, in networks of more than 14 million parameters."""
        names = [f"wudi, matched with {count}, lambda 1" for count in (16, 64)]
        return [gain for name in names for gain in list_gains(name, alone, *skills)[len(skills) :]]

    def list_costs(family: str, other: str) -> list[float]:
        """Of wide networks by number of skills: how many times as much a matched merge forgets."""
        found: dict[tuple[str, int], list[list[float]]] = {}
        for merge in filter(is_wide_of(family), MATCHED_MERGES):
            before = merge.record["elsewhere"]["base"]
            lost = [merge.arms[name][1] - before for name in (one, other)]
            found.setdefault((merge.unit, merge.skills), []).append(lost)
        return [operator.truediv(*map(sum, zip(*lost, strict=True))) for lost in found.values()]

    def span(values: list[float], form: str = ".1f") -> str:
        return f"{min(values):{form}} to {max(values):{form}}"

    def cost_of_text() -> list[float]:
        """Of wide transformers by number of skills: in points, with lambda 1."""
        found: dict[tuple[str, int], list[float]] = {}
        for merge in filter(is_wide, MATCHED_MERGES):
            scores = [quality_report.score(merge, name) for name in (one, based)]
            found.setdefault((merge.unit, merge.skills), []).append(operator.sub(*scores))
        return [fmean(lost) for lost in found.values()]

    def mislead(name: str) -> float:
        """What digits lose where answers choose lambda."""
        answers = f"{name}, lambda by answers"
        return differ(name, answers, lambda m: m.family == "digits", MATCHED_MERGES)

    def start(count: int) -> str:
        name = f"matched with {count}, lambda 1"
        return lead(f"wudi, {name}", is_transformer, f"{AVERAGE}, {name}")

    def alone_by(unit: str) -> str:
        """The fine-tunes' own scores."""
        own = [each for name, each in QUALITY["units"].items() if name.startswith(f"{unit}/")]
        return f"{100 * fmean(each['curves']['DARE'][0] for each in own):.1f}"

    def drop_loss(units: list[str]) -> list[float]:
        """What fine-tunes themselves lose, by network, if nine tenths are dropped."""
        every = QUALITY["units"].items()
        found = [
            [each["curves"]["DARE"] for name, each in every if name.startswith(f"{unit}/")]
            for unit in units
        ]
        return [100 * fmean(map(operator.sub, *zip(*own, strict=True))) for own in found]

    def forget(unit: str, name: str) -> str:
        own = [merge for merge in MATCHED_MERGES if (merge.unit, merge.skills) == (unit, 8)]
        return f"{fmean(merge.arms[name][1] for merge in own):.2f}"

    def list_scores(unit: str, skills: int, best: bool) -> str:
        """A row of docs/examples.md."""
        own = alone_by(unit) if skills == 8 else "-"  # what two fine-tunes have is not stored
        by_weights = tell(unit, alone, skills)
        if best:
            by_weights += f" (best: {tell(unit, 'wudi', skills)})"
        names = [*(f"{few}{count}, lambda 1" for count in (16, 64, 512)), tenths_one]
        matched_so = [tell(unit, name, skills) for name in names]
        return " | ".join([own, tell(unit, AVERAGE, skills), by_weights, *matched_so])

    def wrong(kind: str) -> str:
        return tell(full, f"examples {kind}, lambda 1")

    def warned(family: str, kind: str) -> str:
        """For how many models it was said that they are no better than the base."""
        found = [
            made[f"examples {kind}"]
            for name, record in QUALITY["units"].items()
            for made in record["tried"].values()
            if name.startswith(family) and f"examples {kind}" in made
        ]
        return f"{sum(each['warned'] for each in found)} of {sum(each['models'] for each in found)}"

    thinned, few = AVERAGE + " + DARE 0.9", AVERAGE + ", matched with "
    small, small_lora, largest = "chars/768", "lora/768", "chars/1536"
    full, lora = "chars/512x24", "lora/512x24"
    lora_units = sorted({merge.unit for merge in MATCHED_MERGES if is_wide_lora(merge)})
    one, alone = f"{matched}, lambda 1", "wudi, lambda 1"
    based = "matched with 512, and the base's text, lambda 1"
    ways = [AVERAGE, "wudi", *(f"{name}, matched with 512" for name in (AVERAGE, "wudi"))]
    most = "wudi, matched with 512, lambda 1"
    best = tell(full, most)
    by_skills = [lead(one, count_tasks(count)) for count in (2, 3, 8)]
    ahead = sum(quality_report.lead(merge, one) > 0 for merge in MATCHED_MERGES)
    claims = {
        f"average, with its best lambda, they give {tell(full, AVERAGE)}%, by `wudi` "
        f"{tell(full, alone)}%, and matched with 512 examples of each skill {best}%": "README",
        f"| {by_examples(full, 'wudi', ' / ')} | {by_examples(lora, 'wudi', ' / ')} |": "README",
        f"| {tell(full, 'wudi, lambda 1')} | {tell(lora, 'wudi, lambda 1')} |": "README",
        f"| {tell(full, AVERAGE)} | {tell(lora, AVERAGE)} |": "README",
        f"{tell(full, thinned + ', lambda 1')} ({tell(full, thinned)}) | "
        f"{tell(lora, thinned + ', lambda 1')} ({tell(lora, thinned)}) |": "README",
        f"With 1 the plain average has {tell(full, PLAIN)} (full) and {tell(lora, PLAIN)} (LoRA)"
        "": "README",
        f"examples: {tell(full, tenths_one)} instead of {tell(full, one)}": "README",
        f"{tell(full, 'wudi + DARE 0.9, lambda 1')} instead of {tell(full, alone)}": "README",
        f"{tell(lora, tenths_one)} instead of {tell(lora, one)}": "README",
        f"the plain average ({tell(full, PLAIN)}, in full), the right ones give {tell(full, one)}, "
        f"prompts alone {tell(full, 'examples without answers, lambda 1')}, other text "
        f"{tell(full, 'examples of other text, lambda 1')}, the wrong order "
        f"{tell(full, 'examples in the wrong order, lambda 1')}": "README",
        f"`wudi` has {tell(small, alone)} in full, and {by_examples(small, 'wudi', ' / ')} with "
        f"examples; as LoRA {tell(small_lora, alone)}, and "
        f"{by_examples(small_lora, 'wudi', ' / ')}.": "README",
        f"({lead('wudi')} in the later run)": "README",
        f"{len(QUALITY['units'])} trainings in all": "evidence",
        f"is {lead(one)} points ahead of itself": "evidence",
        f"{ahead} of {len(MATCHED_MERGES)} merges": "evidence",
        f"it is {lead(one, is_transformer)} ahead ({lead(one, is_wide)} from a": "evidence",
        "{}, {} and {} with 2, 3 and 8 word tasks".format(*by_skills): "evidence",
        f"it is {lead(one, is_transformer, 'wudi')} points ahead": "evidence",
        f"{lead(one, is_wide_of('contexts'), 'wudi')} where tasks are in each other's way, "
        f"and {lead(one, is_wide_of('lora'), 'wudi')} with LoRA. In full": "evidence",
        f"384 wide are {span(list_gains(one, 'wudi', 2, 3), '+.1f')} points ahead": "evidence",
        f"14 million parameters {list_gains(one, 'wudi', 8)[0]:+.1f}, and the larger ones "
        f"{span(list_gains(one, 'wudi', 8)[1:])}.": "evidence",
        f"give {tell(largest, one)}% with lambda 1, where with their best lambdas `wudi` has "
        f"{tell(largest, 'wudi')}% and the plain average {tell(largest, AVERAGE)}%": "evidence",
        f"three skills are {span(beside_none(2, 3), '+.1f')} points ahead of none, and of each of "
        f"eight {span(beside_none(8), '+.1f')}:": "evidence",
        f"gain at most {max(list_gains(most, alone, 2)):.1f} points on `wudi`": "README",
        f"and with LoRA {lead('wudi + DARE 0.9, lambda 1', is_wide_lora, 'wudi, lambda 1')} "
        "(with": "evidence",
        f"16 examples are {beside_wudi(16, 'chars')}), and with 64 {beside_wudi(64, 'chars')});"
        f" with LoRA they are {beside_wudi(16, 'lora').split()[0]} and "
        f"{beside_wudi(64, 'lora').split()[0]} ahead": "evidence",
        f"lose {span([mislead(name) for name in ways])}):": "evidence",
        f"on {span(list_costs('chars', PLAIN))} times as much in full, "
        f"{span(list_costs('lora', PLAIN))} times as LoRA, "
        f"{span(list_costs('contexts', PLAIN), '.0f')} times where": "evidence",
        f"it is {span(list_costs('chars', alone) + list_costs('lora', alone))} times as much "
        f"there, and {span(list_costs('contexts', alone))} times where": "evidence",
        f"costs {span(cost_of_text())} points of skill in": "evidence examples",
        f"is worth {start(16)} points with 16 examples, {start(64)} with 64": "evidence",
        f"average {lead(thinned, is_wide_full)} points, matched merges "
        f"{lead(quality_report.TENTHS, is_wide_full, matched)} and `wudi` "
        f"{lead('wudi + DARE 0.9', is_wide_full, 'wudi')}, each": "evidence",
        f"(LoRA: {lead(thinned, is_wide_lora)}, "
        f"{lead(quality_report.TENTHS, is_wide_lora, matched)} and "
        f"{lead('wudi + DARE 0.9', is_wide_lora, 'wudi')})": "evidence",
        f"loses {lead('wudi + DARE 0.9, lambda 1', is_wide_full, 'wudi, lambda 1')}": "evidence",
        f"1 costs matched merges {lead(one, is_transformer, matched)} points on transformers, "
        f"`wudi` {lead('wudi, lambda 1', is_transformer, 'wudi')} and the plain average "
        f"{lead(PLAIN, is_transformer)}": "evidence",
        f"1 it is {lead('wudi, lambda 1', lambda m: m.family == 'contexts', PLAIN)} points behind "
        "the plain average with 1": "evidence",
        "row is {}, {} and {}.".format(*by_examples(full, "wudi", " ").split()): "examples",
        **{
            f"| {list_scores(unit, skills, best)} |": "examples"
            for unit, skills, best in (
                (full, 8, False),
                (full, 2, False),
                (lora, 8, True),
                (small, 8, False),
                ("digits/512", 8, False),
            )
        },
        f"With 8 examples the first row is {tell(full, few + '8, lambda 1')}, with 2,048 "
        f"{tell(full, few + '2048, lambda 1')}.": "examples",
        f"there is {tell(full, based)} with it, and a loss on other text of "
        f"{forget(full, based)} bits a letter instead of {forget(full, one)}": "examples",
        f"give {alone_by(full)}% right answers, each": "README",
        f"have {alone_by(full)} (full) and {alone_by(lora)} (LoRA": "README",
        f"adapters lost {span(drop_loss(lora_units), '.0f')} points here": "README",
        f"a tenth is kept | {tell(full, tenths_one)} |": "README",
        f"24 blocks they give {tell(full, one)}%, where `wudi` has {tell(full, 'wudi')}% and the "
        f"plain average {tell(full, AVERAGE)}%; as LoRA {tell(lora, one)}%, "
        f"{tell(lora, 'wudi')}% and {tell(lora, AVERAGE)}%": "evidence",
        f"leave {wrong('in the wrong order')}%, other text {wrong('of other text')}%, where "
        f"there are {tell(full, PLAIN)}% without examples. Prompts without their answers give "
        f"{wrong('without answers')}%, `wudi` without examples {tell(full, alone)}%, the right "
        f"ones {tell(full, one)}%": "evidence",
        f"prompts were so noticed ({warned('chars', 'of other text')}), but never the wrong order "
        f"({warned('chars', 'in the wrong order')})": "evidence",
        f"that no model has ({warned('chars', 'of another skill')})": "evidence",
        f"On digits {warned('digits', 'of other text')}, {warned('digits', 'in the wrong order')} "
        f"and {warned('digits', 'of another skill')} were": "evidence",
    }
    assert list_missing(claims, words) == []
    assert warned("chars", "of other text") == warned("chars", "without answers")


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
