"""What the documents say is what was measured: their figures are those of the stored results."""

import operator
import re
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import benchmark_report
import pytest
import quality_report

from darelib.commands.analyze import advice
from tests.support import HERE, read_json

pytestmark = pytest.mark.slow
MEASURED = ("median time", "peak memory")
RESULTS = HERE / "examples" / "results"
QUALITY: dict[str, Any] = read_json(RESULTS / "quality.json")
METHODS: dict[str, Any] = read_json(RESULTS / "methods.json")  # an earlier run: by weights alone
DOCUMENTS = {
    path.stem: path.read_text()
    for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
}
# Without breaks between lines; also what the command advises.
WORDS = {name: " ".join(text.split()) for name, text in DOCUMENTS.items()}
WORDS["advice"] = " ".join(map(str, vars(advice).values()))
README = DOCUMENTS["README"]
EVIDENCE = DOCUMENTS["evidence"]
WAYS = ("linear", "wudi", "matched")
ROLES = ("this tool", "mergekit", "torch script")
MERGES = quality_report.list_merges(METHODS)
MATCHED_MERGES = quality_report.list_merges(QUALITY)
CASE = advice.CASES["whole"]
START = f"{CASE.method}, lambda {CASE.lambda_coeff:g}"
# Ways of merging.
AVERAGE = quality_report.REFERENCE
PLAIN = quality_report.PLAIN
THINNED = f"{AVERAGE} + DARE 0.9"
THINNED_WUDI = "wudi + DARE 0.9"
WUDI_ONE = "wudi, lambda 1"
MATCHED = quality_report.MATCHED
MATCHED_ONE = f"{MATCHED}, lambda 1"
TENTHS_ONE = f"{quality_report.TENTHS}, lambda 1"
BASED_ONE = f"{quality_report.BASED}, lambda 1"
# Networks.
FULL = "chars/512x24"
LORA = "lora/512x24"
SMALL = "chars/768"
SMALL_LORA = "lora/768"
LARGEST = "chars/1536"


def list_missing(claims: dict[str, str]) -> list[tuple[str, str]]:
    """claims: sentences, and in which documents they are."""
    return [
        (claim, where)
        for claim, places in claims.items()
        for where in places.split()
        if claim not in WORDS[where]
    ]


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
        f"6 to {max(cached):.0f} times as fast as mergekit's DARE",
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
    assert min(ratio for ratio, _ in kits) > 6, "as in the later run, which is not stored"


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


def test_what_the_documents_call_better_can_be_told_from_chance() -> None:
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


def is_transformer(merge: Any) -> bool:
    return bool(merge.family != "digits")


def test_the_figures_of_the_experiment_in_texts_are_those_of_its_results() -> None:
    half = " + DARE 0.5"
    most = " + DARE 0.9"

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

    def tell_lead(name: str, other: str = AVERAGE, keep: Callable[[Any], bool] = bool) -> str:
        return f"{abs(differ(name, other, keep)):.1f}"

    leads = [quality_report.lead(merge, "wudi") for merge in MERGES]
    by_skills = [tell_lead("wudi", keep=count_skills(count)) for count in (2, 3, 8)]
    packed = [tell_lead("wudi" + drop, AVERAGE + drop) for drop in (half, most)]
    lambdas: dict[tuple[str, int], list[float]] = {}
    for merge in MERGES:
        lambdas.setdefault((merge.unit, merge.skills), []).append(merge.arms["wudi"][2])
    medians = [median(chosen) for chosen in lambdas.values()]
    claims = {
        f"{tell_lead('wudi')} points ahead": "advice evidence",
        f"by {tell_lead('wudi')} points": "README",
        f"{tell_lead('wudi', keep=is_transformer)} on transformers": "advice",
        "{}, {} and {} with 2, 3 and 8 skills".format(*by_skills): "evidence",
        f"{sum(points > 0 for points in leads)} of {len(leads)} merges": "evidence",
        f"{len(METHODS['units'])} trainings": "evidence",
        f"{tell_lead(START)} points ahead": "evidence",
        f"{tell_lead('wudi', START)} points for `wudi`": "evidence",
        f"{tell_lead(START, AVERAGE + ', lambda 1.5')} ahead of it": "evidence",
        f"`wudi` {tell_lead('wudi' + half, 'wudi', has_halves)}": "evidence",
        f"wudi lost {tell_lead('wudi' + half, 'wudi', has_halves)}": "advice",
        f"{tell_lead('wudi' + half, 'wudi', has_halves)} points at 0.5": "guide",
        f"{tell_lead(AVERAGE + half)} points": "evidence",
        f"linear {tell_lead(AVERAGE + half)}": "advice",
        f"{tell_lead(AVERAGE + most)} and {tell_lead('wudi' + most, 'wudi')}": "evidence",
        f"{tell_lead('wudi' + most, 'wudi')} at 0.9": "guide",
        f"{tell_lead(AVERAGE + most, keep=is_large)} and "
        f"{tell_lead('wudi' + most, 'wudi', is_large)}": "evidence",
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
    assert list_missing(claims) == []


# --- merges with examples -------------------------------------------------------------------------


def is_wide(merge: Any) -> bool:
    return is_transformer(merge) and quality_report.width_of(merge.unit) >= 384


def is_wide_full(merge: Any) -> bool:
    return is_wide(merge) and bool(merge.family != "lora")


def is_wide_of(family: str) -> Callable[[Any], bool]:
    return lambda merge: is_wide(merge) and merge.family == family


def name_match(start: str, count: int) -> str:
    return f"{start}, matched with {count}, lambda 1"


def list_own(unit: str, skills: int = 8) -> list[Any]:
    """The merges of one network."""
    return [merge for merge in MATCHED_MERGES if (merge.unit, merge.skills) == (unit, skills)]


def tell(unit: str, name: str, skills: int = 8) -> str:
    return f"{fmean(quality_report.score(merge, name) for merge in list_own(unit, skills)):.1f}"


def tell_matched(unit: str, start: str, mark: str) -> str:
    return mark.join(tell(unit, name_match(start, count)) for count in (16, 64, 512))


def tell_wrong(kind: str) -> str:
    return tell(FULL, f"examples {kind}, lambda 1")


def tell_alone(unit: str) -> str:
    """The fine-tunes' own scores."""
    own = [each for name, each in QUALITY["units"].items() if name.startswith(f"{unit}/")]
    return f"{100 * fmean(each['curves']['DARE'][0] for each in own):.1f}"


def lead(name: str, keep: Callable[[Any], bool] = bool, other: str = AVERAGE) -> str:
    return f"{abs(differ(name, other, keep, MATCHED_MERGES)):.1f}"


def span(values: Sequence[float], form: str = ".1f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def list_gains(
    name: str, other: str, skills: Sequence[int] = (2, 3, 8), keep: Callable[[Any], bool] = is_wide
) -> list[float]:
    """Of each network and number of skills, from the smallest network up: by how many points one
    way is ahead of another.
    """
    found: dict[tuple[int, str, int], list[float]] = {}
    for merge in filter(keep, MATCHED_MERGES):
        ahead = quality_report.score(merge, name) - quality_report.score(merge, other)
        cell = merge.record["parameters"], merge.unit, merge.skills
        found.setdefault(cell, []).append(ahead)
    return [fmean(gains) for cell, gains in sorted(found.items()) if cell[2] in skills]


def list_word_gains(name: str, other: str, *skills: int) -> list[float]:
    return list_gains(name, other, skills, is_wide_of("chars"))


def test_what_readme_says_of_matched_merges_is_in_the_results() -> None:
    def drop_loss(unit: str) -> float:
        """What fine-tunes themselves lose if nine tenths are dropped."""
        every = QUALITY["units"].items()
        own = [each["curves"]["DARE"] for name, each in every if name.startswith(f"{unit}/")]
        return 100 * fmean(map(operator.sub, *zip(*own, strict=True)))

    adapters = {merge.unit for merge in MATCHED_MERGES if is_wide_of("lora")(merge)}
    lost = [drop_loss(unit) for unit in adapters]
    gained = max(list_word_gains(name_match("wudi", 512), WUDI_ONE, 2))
    sentences = [
        f"give {tell_alone(FULL)}% right answers, each",
        f"average, with its best lambda, they give {tell(FULL, AVERAGE)}%, by `wudi` "
        f"{tell(FULL, WUDI_ONE)}%, and matched with 512 examples of each skill "
        f"{tell(FULL, name_match('wudi', 512))}%",
        f"have {tell_alone(FULL)} (full) and {tell_alone(LORA)} (LoRA",
        f"| {tell_matched(FULL, 'wudi', ' / ')} | {tell_matched(LORA, 'wudi', ' / ')} |",
        f"| {tell(FULL, WUDI_ONE)} | {tell(LORA, WUDI_ONE)} |",
        f"| {tell(FULL, AVERAGE)} | {tell(LORA, AVERAGE)} |",
        f"{tell(FULL, THINNED + ', lambda 1')} ({tell(FULL, THINNED)}) | "
        f"{tell(LORA, THINNED + ', lambda 1')} ({tell(LORA, THINNED)}) |",
        f"a tenth is kept | {tell(FULL, TENTHS_ONE)} |",
        f"`wudi` has {tell(SMALL, WUDI_ONE)} in full, and {tell_matched(SMALL, 'wudi', ' / ')} "
        f"with examples; as LoRA {tell(SMALL_LORA, WUDI_ONE)}, and "
        f"{tell_matched(SMALL_LORA, 'wudi', ' / ')}.",
        f"gain at most {gained:.1f} points on `wudi`",
        f"the plain average ({tell(FULL, PLAIN)}, in full), the right ones give "
        f"{tell(FULL, MATCHED_ONE)}, prompts alone {tell_wrong('without answers')}, other text "
        f"{tell_wrong('of other text')}, the wrong order {tell_wrong('in the wrong order')}",
        f"With 1 the plain average has {tell(FULL, PLAIN)} (full) and {tell(LORA, PLAIN)} (LoRA)",
        f"({lead('wudi')} in the later run)",
        f"adapters lost {span(lost, '.0f')} points here",
        f"examples: {tell(FULL, TENTHS_ONE)} instead of {tell(FULL, MATCHED_ONE)}",
        f"{tell(FULL, THINNED_WUDI + ', lambda 1')} instead of {tell(FULL, WUDI_ONE)}",
        f"{tell(LORA, TENTHS_ONE)} instead of {tell(LORA, MATCHED_ONE)}",
    ]
    assert list_missing(dict.fromkeys(sentences, "README")) == []


def test_what_the_page_on_examples_says_of_matched_merges_is_in_the_results() -> None:
    def tell_row(unit: str, skills: int = 8, best: bool = False) -> str:
        names = [*(name_match(AVERAGE, count) for count in (16, 64, 512)), TENTHS_ONE]
        cells = [
            tell_alone(unit) if skills == 8 else "-",  # what two fine-tunes have is not stored
            tell(unit, AVERAGE, skills),
            tell(unit, WUDI_ONE, skills) + f" (best: {tell(unit, 'wudi', skills)})" * best,
            *(tell(unit, name, skills) for name in names),
        ]
        return f"| {' | '.join(cells)} |"

    def forget(name: str) -> str:
        return f"{fmean(merge.arms[name][1] for merge in list_own(FULL)):.2f}"

    sentences = [
        tell_row(FULL),
        tell_row(FULL, skills=2),
        tell_row(LORA, best=True),
        tell_row(SMALL),
        tell_row("digits/512"),
        "row is {}, {} and {}.".format(*tell_matched(FULL, "wudi", " ").split()),
        f"With 8 examples the first row is {tell(FULL, name_match(AVERAGE, 8))}, with 2,048 "
        f"{tell(FULL, name_match(AVERAGE, 2048))}.",
        f"costs {span(list_gains(MATCHED_ONE, BASED_ONE))} points of skill in",
        f"there is {tell(FULL, BASED_ONE)} with it, and a loss on other text of "
        f"{forget(BASED_ONE)} bits a letter instead of {forget(MATCHED_ONE)}",
    ]
    assert list_missing(dict.fromkeys(sentences, "examples")) == []


def test_what_the_evidence_says_of_matched_merges_is_in_the_results() -> None:
    def count_tasks(count: int) -> Callable[[Any], bool]:
        return lambda merge: merge.skills == count and merge.family in ("chars", "lora")

    def beside_wudi(count: int, family: str) -> str:
        """Of merges that are matched from wudi, with lambda 1: by how much, and how often."""
        name = name_match("wudi", count)
        own = [merge for merge in MATCHED_MERGES if merge.family == family]
        ahead = differ(name, WUDI_ONE, lambda merge: merge.family == family, MATCHED_MERGES)
        better = sum(
            quality_report.score(merge, name) > quality_report.score(merge, WUDI_ONE)
            for merge in own
        )
        words = "ahead" if ahead > 0 else "points behind in full word tasks"
        often = f"{better} of {len(own)}"
        return f"{abs(ahead):.1f} {words} ({'' if ahead > 0 else 'ahead in '}{often}"

    def beside_none(*skills: int) -> str:
        """With few examples, in networks of more than 14 million parameters."""
        names = [name_match("wudi", count) for count in (16, 64)]
        gains = [list_word_gains(name, WUDI_ONE, *skills)[len(skills) :] for name in names]
        return span([*gains[0], *gains[1]], "+.1f")

    def list_costs(family: str, other: str) -> list[float]:
        """Of wide networks by number of skills: how many times as much a matched merge forgets."""
        found: dict[tuple[str, int], list[list[float]]] = {}
        for merge in filter(is_wide_of(family), MATCHED_MERGES):
            before = merge.record["elsewhere"]["base"]
            lost = [merge.arms[name][1] - before for name in (MATCHED_ONE, other)]
            found.setdefault((merge.unit, merge.skills), []).append(lost)
        return [operator.truediv(*map(sum, zip(*lost, strict=True))) for lost in found.values()]

    def mislead(name: str) -> float:
        """What digits lose where answers choose lambda."""
        answers = f"{name}, lambda by answers"
        return differ(name, answers, lambda m: m.family == "digits", MATCHED_MERGES)

    def start(count: int) -> str:
        return lead(name_match("wudi", count), is_transformer, name_match(AVERAGE, count))

    def drop(way: str, keep: Callable[[Any], bool]) -> str:
        return lead(THINNED_WUDI + way, keep, "wudi" + way)

    def warned(family: str, kind: str) -> str:
        """For how many models a warning came that they are no better than the base."""
        found = [
            made[f"examples {kind}"]
            for name, record in QUALITY["units"].items()
            for made in record["tried"].values()
            if name.startswith(family) and f"examples {kind}" in made
        ]
        return f"{sum(each['warned'] for each in found)} of {sum(each['models'] for each in found)}"

    is_wide_lora = is_wide_of("lora")
    ahead = sum(quality_report.lead(merge, MATCHED_ONE) > 0 for merge in MATCHED_MERGES)
    by_skills = [lead(MATCHED_ONE, count_tasks(count)) for count in (2, 3, 8)]
    with_eight = list_word_gains(MATCHED_ONE, "wudi", 8)
    ways = [AVERAGE, "wudi", *(f"{name}, matched with 512" for name in (AVERAGE, "wudi"))]
    full = list_costs("chars", WUDI_ONE)
    adapters = list_costs("lora", WUDI_ONE)
    sentences = [
        f"{len(QUALITY['units'])} trainings in all",
        f"is {lead(MATCHED_ONE)} points ahead of itself",
        f"{ahead} of {len(MATCHED_MERGES)} merges",
        f"it is {lead(MATCHED_ONE, is_transformer)} ahead ({lead(MATCHED_ONE, is_wide)} from a",
        "{}, {} and {} with 2, 3 and 8 word tasks".format(*by_skills),
        f"it is {lead(MATCHED_ONE, is_transformer, 'wudi')} points ahead",
        f"{lead(MATCHED_ONE, is_wide_of('contexts'), 'wudi')} where tasks are in each other's way, "
        f"and {lead(MATCHED_ONE, is_wide_lora, 'wudi')} with LoRA. In full",
        f"384 wide are {span(list_word_gains(MATCHED_ONE, 'wudi', 2, 3), '+.1f')} points ahead",
        f"14 million parameters {with_eight[0]:+.1f}, and the larger ones {span(with_eight[1:])}.",
        f"give {tell(LARGEST, MATCHED_ONE)}% with lambda 1, where with their best lambdas `wudi` "
        f"has {tell(LARGEST, 'wudi')}% and the plain average {tell(LARGEST, AVERAGE)}%",
        f"24 blocks they give {tell(FULL, MATCHED_ONE)}%, where `wudi` has {tell(FULL, 'wudi')}% "
        f"and the plain average {tell(FULL, AVERAGE)}%; as LoRA {tell(LORA, MATCHED_ONE)}%, "
        f"{tell(LORA, 'wudi')}% and {tell(LORA, AVERAGE)}%",
        f"16 examples are {beside_wudi(16, 'chars')}), and with 64 {beside_wudi(64, 'chars')});"
        f" with LoRA they are {beside_wudi(16, 'lora').split()[0]} and "
        f"{beside_wudi(64, 'lora').split()[0]} ahead",
        f"three skills are {beside_none(2, 3)} points ahead of none, and of each of eight "
        f"{beside_none(8)}:",
        f"is worth {start(16)} points with 16 examples, {start(64)} with 64",
        f"average {lead(THINNED, is_wide_full)} points, matched merges "
        f"{lead(quality_report.TENTHS, is_wide_full, MATCHED)} and `wudi` "
        f"{drop('', is_wide_full)}, each",
        f"(LoRA: {lead(THINNED, is_wide_lora)}, "
        f"{lead(quality_report.TENTHS, is_wide_lora, MATCHED)} and {drop('', is_wide_lora)})",
        f"loses {drop(', lambda 1', is_wide_full)}, and with LoRA "
        f"{drop(', lambda 1', is_wide_lora)} (with",
        f"leave {tell_wrong('in the wrong order')}%, other text {tell_wrong('of other text')}%, "
        f"where there are {tell(FULL, PLAIN)}% without examples. Prompts without their answers "
        f"give {tell_wrong('without answers')}%, `wudi` without examples {tell(FULL, WUDI_ONE)}%, "
        f"the right ones {tell(FULL, MATCHED_ONE)}%",
        f"prompts were so noticed ({warned('chars', 'of other text')}), but never the wrong order "
        f"({warned('chars', 'in the wrong order')})",
        f"that no model has ({warned('chars', 'of another skill')})",
        f"On digits {warned('digits', 'of other text')}, {warned('digits', 'in the wrong order')} "
        f"and {warned('digits', 'of another skill')} were",
        f"1 costs matched merges {lead(MATCHED_ONE, is_transformer, MATCHED)} points on "
        f"transformers, `wudi` {lead(WUDI_ONE, is_transformer, 'wudi')} and the plain average "
        f"{lead(PLAIN, is_transformer)}",
        f"1 it is {lead(WUDI_ONE, lambda m: m.family == 'contexts', PLAIN)} points behind the "
        "plain average with 1",
        f"lose {span([mislead(name) for name in ways])}):",
        f"on {span(list_costs('chars', PLAIN))} times as much in full, "
        f"{span(list_costs('lora', PLAIN))} times as LoRA, "
        f"{span(list_costs('contexts', PLAIN), '.0f')} times where",
        f"it is {span([*full, *adapters])} times as much there, and "
        f"{span(list_costs('contexts', WUDI_ONE))} times where",
        f"costs {span(list_gains(MATCHED_ONE, BASED_ONE))} points of skill in",
    ]
    assert list_missing(dict.fromkeys(sentences, "evidence")) == []
    assert warned("chars", "of other text") == warned("chars", "without answers")


# --- how long it takes ----------------------------------------------------------------------------


def read_seconds(cell: str) -> float:
    number, unit = cell.partition(",")[0].strip(" *").split()
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


def test_the_times_in_readme_are_those_that_the_page_on_examples_has() -> None:
    """What is bold is measured, and all that is measured there for two models is bold."""
    measured = {}
    row = r"(?m)^\| two of (0.5|1|3|8) billion \| (an H200|two cores)[^|]*\|[^|]*\|(.*)\|$"
    for size, machine, cells in re.findall(row, DOCUMENTS["examples"]):
        for way, cell in zip(WAYS, cells.split("|"), strict=True):
            if cell.strip() != "-":
                measured[size, machine, way] = read_seconds(cell)
    assert len(measured) == 16
    shown = {}
    columns = [(machine, way) for machine in ("two cores", "an H200") for way in WAYS]
    for size, cells in re.findall(r"(?m)^\| (\S+) billion \|(.*)\|$", README):
        for column, cell in zip(columns, cells.split("|"), strict=True):
            if "**" in cell:
                shown[size, *column] = read_seconds(cell)
    assert shown == pytest.approx(measured, rel=0.06), "170 s are 3 min"
