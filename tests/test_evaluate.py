"""Models judged by examples, the lambda that examples choose, and searches that examples judge: all
numbers are those that transformers gives for models on disk."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dare
from dare import ConfigError, DareConfig, DareError, DareMerger, dare_evaluate, dare_match
from darelib.models.examples import divide
from darelib.run.matching import network
from darelib.run.matching.judging import LAMBDAS
from darelib.run.matching.model_files import Inputs, Spool
from darelib.run.matching.network import START, Network
from darelib.run.matching.trials import Trials
from tests.house import COUNT, House, make_adapter, pack, write_lines
from tests.scene import contents
from tests.support import Capture, Patch, Refusal, Tensors, run, slow, snapshot
from tests.test_matching import (
    BATCHES,
    FLAT,
    STATES,
    TOWER,
    configure,
    give,
    make_bert,
    make_states,
    make_vit,
)

Numbers = tuple[float, float, float]  # loss, agreement, divergence
Houses = Callable[[str], House]
NEAR = 1e-5


# --- what transformers itself gives ---------------------------------------------------------------


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_ids(entry: dict[str, str]) -> tuple[list[int], int]:
    """The tokens of an example, and at which one the answer begins."""
    prompt, answer = (entry.get(key, "").split() for key in ("prompt", "completion"))
    words = [*prompt, *answer, *entry.get("text", "").split()]
    return [int(word[1:]) for word in words], max(1, len(prompt))


@torch.no_grad()
def measure(house: House, model: Path, owner: Path, entries: Sequence[Any]) -> Numbers:
    """A model beside the owner of some examples, each in a forward of its own."""
    kinds = [house.kind.from_pretrained(p, dtype=torch.float32).eval() for p in (model, owner)]
    sums = torch.zeros(4, dtype=torch.float64)
    for entry in entries:
        ids, start = read_ids(entry)
        rows = [kind(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1] for kind in kinds]
        given, wanted = (each.double().log_softmax(-1) for each in rows)
        loss = -given.gather(-1, torch.tensor(ids[start:])[:, None]).sum()
        same = (given.argmax(-1) == wanted.argmax(-1)).sum()
        sums += torch.stack(
            [loss, same, (wanted.exp() * (wanted - given)).sum(), given.new_tensor(len(given))]
        )
    loss, same, divergence = (sums[:3] / sums[3]).tolist()
    return loss / math.log(2), same, divergence / math.log(2)


def numbers_in(report: Any, model: int = -1) -> list[Numbers]:
    """Of a model, by file."""
    rows = report.to_dict()["models"][model]["scores"]
    return [(row["loss"], row["agreement"], row["divergence"]) for row in rows]


def are_near(one: Sequence[Numbers], other: Sequence[Numbers]) -> bool:
    return [pytest.approx(each, abs=NEAR) for each in one] == [*other]


def hold_out(house: House, folder: Path, share: float = 0.25) -> tuple[list[Path], list[list[Any]]]:
    """The examples that judge where some match, as files, too."""
    held = [divide(read_lines(path), share)[1] for path in house.examples]
    paths = [folder / path.name for path in house.examples]
    return [write_lines(*each) for each in zip(paths, held, strict=True)], held


def find_cost(house: House, model: Path, held: Sequence[Any]) -> float:
    """The mean loss on answers, of all skills."""
    pairs = zip(house.models, held, strict=True)
    return sum(measure(house, model, own, entries)[0] for own, entries in pairs) / len(held)


# --- the numbers ----------------------------------------------------------------------------------


def check_numbers(house: House, folder: Path, files: Sequence[Path]) -> Any:
    """Of the base, the fine-tunes and a merge, on files of the fine-tunes and the base."""
    *own, general = files
    house.merger(examples=()).merge(folder / "out")
    report = house.merger(examples=own, base_examples=general).evaluate([folder / "out"])
    assert report.names == ("base", "math", "code", "out")
    for k, model in enumerate([house.base, *house.models, folder / "out"]):
        found = [
            measure(house, model, owner, read_lines(file))
            for owner, file in zip([*house.models, house.base], files, strict=True)
        ]
        assert are_near(found, numbers_in(report, k)), model.name
    return report


@pytest.mark.parametrize("kind", ["llama", *map(slow, ("qwen", "gemma", "gpt2", "moe"))])
def test_losses_agreements_and_divergences_are_those_of_transformers(
    houses: Houses, tmp_path: Path, kind: str
) -> None:
    house = houses(kind)
    general = write_lines(tmp_path / "general.jsonl", read_lines(house.examples[1])[:7])
    report = check_numbers(house, tmp_path, [*house.examples, general])
    assert numbers_in(report, 1)[0][1:] == (1.0, pytest.approx(0.0, abs=NEAR))
    assert "math.jsonl (answers)" in str(report)


def test_texts_are_judged_by_all_their_tokens_and_a_module_without_blocks_as_a_whole(
    llama: House, tmp_path: Path, monkeypatch: Patch
) -> None:
    texts = [
        write_lines(
            tmp_path / f"text {k}.jsonl",
            [{"text": f"{each['prompt']} {each['completion']}"} for each in read_lines(file)],
        )
        for k, file in enumerate([*llama.examples, llama.examples[0]])
    ]
    monkeypatch.setattr(network, "find_blocks", lambda model: ("", []))
    report = check_numbers(llama, tmp_path, texts)
    assert "text 0.jsonl (all tokens)" in str(report)
    assert "text 0.jsonl: 20 examples, 170 tokens in all" in str(report)


MERGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rules": {"dtype": "bfloat16", "lambda_coeff": 0.7,
              "rules": [{"match": "*mlp*", "lambda_coeff": 0.0}]},
    "ties": {"method": "ties", "drop_rate": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["rules", *map(slow, ("plain", "ties"))])
def test_a_merge_that_is_not_written_has_the_scores_of_the_one_that_is(
    llama: House, tmp_path: Path, kind: str
) -> None:
    config = MERGES[kind]
    before = snapshot(llama.folder)
    described = llama.merger(matched=False, **config).evaluate()
    assert described.names[-1] == "the merge"
    assert snapshot(llama.folder) == before, "nothing is written"
    llama.merger(examples=(), **config).merge(tmp_path / "out")
    written = llama.merger(matched=False).evaluate([tmp_path / "out"])
    assert are_near(numbers_in(described), numbers_in(written))


@pytest.mark.parametrize("kind", ["plain", *map(slow, ("rules", "ties"))])
def test_a_matched_merge_is_judged_by_examples_that_have_not_matched_it(
    llama: House, tmp_path: Path, kind: str
) -> None:
    config = MERGES[kind]
    files, _ = hold_out(llama, tmp_path)
    described = llama.merger(**config).evaluate()
    llama.merger(held_out=0.25, **config).merge(tmp_path / "out")
    written = llama.merger(examples=files).evaluate([tmp_path / "out"])
    assert all(are_near(numbers_in(described, k), numbers_in(written, k)) for k in range(4))


INPUTS: dict[str, Callable[[House, Path], Any]] = {
    "adapter": lambda house, folder: make_adapter(house, folder / "a", 1),
    "model+adapter": lambda house, folder: (
        f"{house.models[1]}+{make_adapter(house, folder / 'a', 1)}"
    ),
    "packed": lambda house, folder: pack(house, folder / "p.safetensors"),
}


@pytest.mark.parametrize("kind", ["adapter", *map(slow, ("model+adapter", "packed"))])
def test_inputs_of_any_kind_are_judged_as_fine_tunes_and_beside_them(
    llama: House, tmp_path: Path, kind: str
) -> None:
    model = INPUTS[kind](llama, tmp_path)
    rate = 0.5 if kind == "packed" else 0.0
    DareMerger(llama.base, [model], configure({"drop_rate": rate, "verbose": False})).merge(
        tmp_path / "alone"
    )
    given = llama.merger(models=[llama.models[0], model], drop_rate=rate).evaluate([model])
    pairs = zip([llama.models[0], tmp_path / "alone"], llama.examples, strict=True)
    found = [measure(llama, tmp_path / "alone", own, read_lines(file)) for own, file in pairs]
    assert all(are_near(found, numbers_in(given, k)) for k in (2, 3))


# --- lambda auto ----------------------------------------------------------------------------------


def merge_each(house: House, folder: Path, **config: Any) -> dict[float, Path]:
    """The merge with each lambda, as a number."""
    paths = {factor: folder / f"lambda {factor}" for factor in LAMBDAS}
    for factor, path in paths.items():
        house.merger(lambda_coeff=factor, **config).merge(path)
    return paths


RULES = [
    {"match": "*mlp.up*", "lambda_coeff": 0.5},
    {"match": "*q_proj*", "lambda_coeff": {"gradient": [0.2, 1]}},
]


@pytest.mark.parametrize(
    ("own", "fixed"),
    [
        ({"matched": False, "rules": RULES}, {"examples": (), "rules": RULES}),
        (
            {"method": "ties", "drop_rate": 0.5},
            {"held_out": 0.25, "method": "ties", "drop_rate": 0.5},
        ),
    ],
)
def test_the_lambda_taken_is_the_one_whose_written_merge_is_best_and_the_output_is_that_merge(
    llama: House, tmp_path: Path, own: Any, fixed: Any
) -> None:
    merger = llama.merger(lambda_coeff="auto", **own)
    report = merger.merge(tmp_path / "auto")
    _, held = hold_out(llama, tmp_path)
    paths = merge_each(llama, tmp_path, **fixed)
    costs = {factor: find_cost(llama, path, held) for factor, path in paths.items()}
    assert dict(report.choice.tried) == pytest.approx(costs, abs=NEAR)
    chosen = min(costs, key=costs.__getitem__)
    assert report.choice.chosen == chosen
    assert contents(tmp_path / "auto") == contents(paths[chosen])
    recipe = tomllib.loads((tmp_path / "auto" / "dare_recipe.toml").read_text())
    assert recipe["dare"]["lambda_coeff"] == chosen
    llama.merger(examples=(), lambda_coeff=chosen, **own | {"matched": None}).verify(
        tmp_path / "auto"
    )
    evaluated = merger.evaluate()
    assert evaluated.choice == report.choice
    files, _ = hold_out(llama, tmp_path)
    given = llama.merger(examples=files).evaluate([tmp_path / "auto"])
    wanted = [measure(llama, paths[chosen], *each) for each in zip(llama.models, held, strict=True)]
    assert are_near(wanted, numbers_in(given))


def test_the_merge_is_made_once_and_calls_grow_with_lambdas_alone(
    llama: House, monkeypatch: Patch
) -> None:
    calls, made = Counter[str](), Counter[str]()
    call, make = Network.call, Inputs.make

    def count_call(self: Any, segment: Any, *rest: Any) -> Any:
        calls[segment.name] += 1
        return call(self, segment, *rest)

    def count_made(self: Any, who: int, names: Sequence[str]) -> Any:
        made.update(names if who == START else ())
        return make(self, who, names)

    monkeypatch.setattr(Network, "call", count_call)
    monkeypatch.setattr(Inputs, "make", count_made)
    found = []
    for lambdas in (LAMBDAS[:2], LAMBDAS[:6]):
        for room in ("judging", "judged_files", "trials"):
            monkeypatch.setattr(f"darelib.run.matching.{room}.LAMBDAS", lambdas)
        calls.clear()
        made.clear()
        llama.merger(lambda_coeff="auto", matched=False).evaluate()
        assert {*made.values()} == {1}
        found.append(dict(calls))
    few, many = found
    grown = {name: many[name] - few[name] for name in many}
    # Each batch, by each of four more lambdas; after the blocks, the fine-tune's own, too.
    assert {grown.pop("after the blocks")} == {4 * 2 * 2}
    assert {*grown.values()} == {4 * 2}


def test_what_was_tried_is_reported_printed_and_given_as_json(
    llama: House, tmp_path: Path, capsys: Capture
) -> None:
    auto = ["--lambda", "auto", "--no-matched", "--examples", *llama.examples]
    run(*llama.flags, *auto, "-o", tmp_path / "out", "--json")
    printed = capsys.readouterr()
    choice = json.loads(printed.out)["choice"]
    tried = ", ".join(f"{factor:g}: {cost:.4g}" for factor, cost in choice["tried"])
    assert [factor for factor, _ in choice["tried"]] == [*LAMBDAS]
    assert "fewer than 32 examples or 1,000 tokens of 'math.jsonl', 'code.jsonl'" in printed.err
    run(*["evaluate", *llama.flags[:-4], "--any-base"], *auto)
    line = (
        f"lambda {choice['chosen']:g} is the best on 10 held-out examples (42 tokens), "
        f"by loss on the answers in bits a token ({tried}); it cannot be told apart from "
    )
    assert line in capsys.readouterr().out


# --- searches by examples -------------------------------------------------------------------------


def find_scores(report: Any) -> dict[str, float]:
    """Of all trials, by what they chose."""
    return {str(row.params): row.scores[0] for row in report.rows}


def search(merger: DareMerger, space: Any, **options: Any) -> Any:
    return merger.sweep(None, space, search="grid", **options)


@pytest.fixture
def trials(monkeypatch: Patch) -> list[Trials]:
    """All searches by examples that end in this test."""
    seen: list[Trials] = []
    close = Trials.close
    monkeypatch.setattr(Trials, "close", lambda self: seen.append(self) or close(self))
    return seen


@pytest.mark.parametrize("is_matched", [False, True])
def test_trials_have_the_scores_of_evaluations_and_merge_once_for_all_lambdas(
    llama: House, tmp_path: Path, trials: list[Trials], is_matched: bool
) -> None:
    before = snapshot(tmp_path)
    how = {"matched": None if is_matched else False}
    space = {"lambda_coeff": [1.5, 0.5, 1.0], "drop_rate": [0.0, 0.5]}
    found = search(llama.merger(**how), space, folder=tmp_path)
    assert len(found.rows) == 6
    for row in found.rows:
        rows = numbers_in(llama.merger(**how, **row.params).evaluate())
        assert row.scores == [pytest.approx((rows[0][0] + rows[1][0]) / 2, abs=NEAR)]
    # The plain average is one more merge where trials are matched, and it is not.
    assert [each.merges for each in trials] == [2 + is_matched]
    files, held = hold_out(llama, tmp_path) if is_matched else (llama.examples, [])
    held = held or [read_lines(path) for path in files]
    [average] = [row for row in found.averages if row.config.lambda_coeff == 1.0]
    llama.merger(examples=()).merge(tmp_path / "average")
    assert average.scores == [pytest.approx(find_cost(llama, tmp_path / "average", held), abs=NEAR)]
    assert before.keys() <= snapshot(tmp_path).keys()


@pytest.mark.parametrize("how", [{}, {"matched": False}])
def test_settings_of_examples_and_lambda_auto_are_searched_whatever_the_others_are(
    llama: House, tmp_path: Path, how: Any
) -> None:
    space = {"matched": [True, False], "match_ridge": [0.05, 5.0], "lambda_coeff": ["auto", 1.0]}
    found = search(llama.merger(**how), space)
    assert (found.failures, len(found.rows)) == ([], 6)
    _, held = hold_out(llama, tmp_path)
    for row in found.rows:
        examples = llama.examples if row.config.needs_examples else ()
        merger = DareMerger(llama.base, llama.models, row.config, examples=examples)
        merger.config = row.config if examples else row.config.without_examples()
        merger.merge(tmp_path / str(row.number))
        cost = find_cost(llama, tmp_path / str(row.number), held)
        assert row.scores == [pytest.approx(cost, abs=NEAR)], row.params


@pytest.mark.parametrize("factors", [[0.0, 1.0], [1.0, 0.0]])
def test_what_a_trial_leaves_unmatched_another_matches(llama: House, factors: list[float]) -> None:
    found = search(llama.merger(), {"rules": [{"match": "*mlp*", "lambda_coeff": factors}]})
    for row in found.rows:
        rules = [{"match": "*mlp*", "lambda_coeff": row.params["rule 1 lambda_coeff"]}]
        rows = numbers_in(llama.merger(rules=rules).evaluate())
        assert row.scores == [pytest.approx((rows[0][0] + rows[1][0]) / 2, abs=NEAR)]


def test_each_file_is_an_objective_by_its_name(llama: House, tmp_path: Path) -> None:
    files = [tmp_path / name / "score.jsonl" for name in ("a", "b")]
    for own, path in zip(files, llama.examples, strict=True):
        own.parent.mkdir()
        own.write_bytes(path.read_bytes())
    merger = llama.merger(examples=files, matched=False)
    found = search(merger, {"drop_rate": [0, 0.5]}, objectives=["each"])
    assert len({each.name for each in found.objectives} - {"score"}) == 2
    for row in found.rows:
        rows = numbers_in(llama.merger(matched=False, **row.params).evaluate())
        assert row.scores == pytest.approx([each[0] for each in rows], abs=NEAR)
    one = search(merger, {"drop_rate": [0, 0.5]})
    pairs = zip(one.rows, found.rows, strict=True)
    assert all(a.scores == pytest.approx([sum(b.scores) / 2]) for a, b in pairs)


def write_toml(house: House, folder: Path, sweep: str) -> Path:
    path = folder / "merge.toml"
    files, merged = ([str(each) for each in some] for some in (house.examples, house.models))
    path.write_text(
        f"[models]\nbase_file = {json.dumps(str(house.base))}\nmerge_files = {json.dumps(merged)}\n"
        f"[examples]\nfiles = {json.dumps(files)}\n[sweep]\n{sweep}\n"
        "[dare]\ndrop_rate = 0.0\nany_base = true\nengine = 'plain'\n"
    )
    return path


def test_the_winners_configuration_makes_the_merge_that_was_scored(
    llama: House, tmp_path: Path, capsys: Capture
) -> None:
    config = write_toml(llama, tmp_path, "lambda_coeff = [0.3]\nmatch_ridge = [0.5]")
    run("sweep", "-c", config, "--search", "grid", "--json", "--force")
    shown = json.loads(capsys.readouterr().out)
    assert [len(shown["trials"]), shown["trials"][0]["params"]["match_ridge"]] == [1, 0.5]
    text = (tmp_path / "merge_best.toml").read_text()
    assert "The best of many" in text
    run("-q", "-c", tmp_path / "merge_best.toml", "-o", tmp_path / "out")
    _, held = hold_out(llama, tmp_path)
    best = min(row["scores"]["score"] for row in [*shown["trials"], *shown["plain_averages"]])
    assert best == pytest.approx(find_cost(llama, tmp_path / "out", held), abs=NEAR)


def test_an_interrupted_search_goes_on_with_the_same_trials(
    llama: House, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    config = write_toml(llama, tmp_path, "lambda_coeff = [0.3, 0.6, 1.0]")
    command = ["sweep", "-c", config, "--search", "grid", "--no-matched", "--json", "--storage"]
    run(*command, f"sqlite:///{tmp_path}/whole.db")
    whole = json.loads(capsys.readouterr().out)
    score, seen = Trials.score, list[Any]()

    def stop(self: Any, given: Any) -> Any:
        seen.append(given)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return score(self, given)

    monkeypatch.setattr(Trials, "score", stop)
    run(*command, f"sqlite:///{tmp_path}/cut.db", status=130)
    run(*command, f"sqlite:///{tmp_path}/cut.db")
    printed = capsys.readouterr()
    assert "going on with the study" in printed.err
    found = [
        [(row["params"], row["scores"]) for row in each["trials"]]
        for each in (whole, json.loads(printed.out))
    ]
    assert found[0] == found[1]
    tried = [config.lambda_coeff for config in seen if config]
    assert sorted(tried) == [0.3, 0.3, 0.6, 0.6, 0.6, 1.0, 1.0], "trials, and plain averages"


# --- what is said ---------------------------------------------------------------------------------


def make_many(folder: Path) -> list[Path]:
    """Many examples of no skill, 1,024 tokens of answers for each model."""
    words = [[f"w{token}" for token in row] for row in torch.randint(1, 40, (256, 12)).tolist()]
    lines = [{"prompt": " ".join(row[:4]), "completion": " ".join(row[4:])} for row in words]
    return [write_lines(folder / f"many {k}.jsonl", lines[k::2]) for k in range(2)]


def test_merges_that_differ_are_told_apart_and_those_that_hardly_do_are_not(
    llama: House, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    for name, seed, factor in (("near", 1, 1.0), ("same", 2, 1.0), ("far", 3, 8.0)):
        merger = llama.merger(examples=(), lambda_coeff=factor, drop_rate=0.1, seed=seed)
        merger.merge(tmp_path / name)
    merger = llama.merger(examples=make_many(tmp_path))
    report = merger.evaluate([tmp_path / name for name in ("far", "near", "same")])
    [remark] = report.remarks
    best, other = ("near", "same") if remark.startswith("near") else ("same", "near")
    assert (
        remark
        == f"{best} is the best of those that are judged; it cannot be told apart from {other!r}"
    )
    assert "fewer than" not in str(report)
    few = llama.merger().evaluate([tmp_path / "near"])
    [remark] = few.remarks
    assert remark.startswith("fewer than 32 examples or 1,000 tokens of 'math.jsonl', 'code.jsonl'")
    found = search(llama.merger(matched=False), {"lambda_coeff": [0.8, 0.9, 2.5]})
    assert sorted([found.best.number, *found.rivals]) == [0, 1]
    assert "cannot be told apart from 1 other" in str(found)


def test_the_worst_skill_is_marked_and_json_has_the_numbers_of_the_table(
    llama: House, capsys: Capture
) -> None:
    flags = ["evaluate", *llama.flags, "--no-matched", "--examples", *llama.examples]
    run(*flags)
    printed = capsys.readouterr().out
    run(*flags, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert [file["tokens"] for file in shown["files"]] == [90, 90]
    rows = {line.split()[0]: line for line in printed.splitlines()}
    for model, own in zip(shown["models"][:3], ("base", "math", "code"), strict=True):
        kl = [each["divergence"] for each in model["scores"]]
        cells = [
            f"{each['loss']:.4f} {each['agreement']:7.1%} {each['divergence']:8.4f}"
            for each in model["scores"]
        ]
        worst = kl.index(max(kl))
        assert model["worst"] == ("math.jsonl", "code.jsonl")[worst]
        assert all((f"{cell}*" in rows[own]) == (k == worst) for k, cell in enumerate(cells))
        assert all(cell in rows[own] for cell in cells)


@pytest.mark.filterwarnings("error")
def test_a_model_that_gives_no_numbers_is_the_worst(llama: House, tmp_path: Path) -> None:
    model = llama.kind.from_pretrained(llama.models[0])
    model.model.norm.weight.data[3] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    report = llama.merger().evaluate([tmp_path / "broken", llama.models[0]])
    assert numbers_in(report, 3) == [(math.inf, 0.0, math.inf)] * 2
    assert report.remarks[-1] == "math is the best of those that are judged"
