"""Searches that examples judge: scores are those of evaluations, and of the merges as written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dare import DareError, DareMerger
from darelib.run.matching.matched_files import Trials
from darelib.run.matching.model_files import Inputs
from darelib.run.matching.network import START
from tests.house import NEAR, House, find_cost, hold_out, numbers_in, read_lines
from tests.support import Capture, Patch, run, slow


def search(merger: DareMerger, space: Any, **options: Any) -> Any:
    return merger.sweep(None, space, search="grid", **options)


@pytest.fixture
def made(monkeypatch: Patch) -> list[str]:
    """The embeddings that are made in this test, of merges with lambda 1."""
    seen: list[str] = []
    make = Inputs.make

    def note(self: Any, who: int, names: Any) -> Any:
        seen.extend(name for name in names if who == START and "embed" in name)
        return make(self, who, names)

    monkeypatch.setattr(Inputs, "make", note)
    return seen


def test_a_folder_without_room_for_trials_is_refused_at_once(llama: House, tmp_path: Path) -> None:
    with pytest.raises(DareError, match="what is merged cannot be kept until it is judged"):
        search(llama.merger(), {"drop_rate": [0.0, 0.5]}, folder=tmp_path / "missing")


@pytest.mark.parametrize("is_matched", [True, slow(False)])
def test_trials_have_the_scores_of_evaluations_and_merge_once_for_all_lambdas(
    llama: House, tmp_path: Path, made: list[str], is_matched: bool
) -> None:
    how = {"matched": None if is_matched else False}
    space = {"lambda_coeff": [1.5, 0.5, 1.0], "drop_rate": [0.0, 0.5]}
    found = search(llama.merger(**how), space, folder=tmp_path)
    assert (len(found.rows), list(tmp_path.iterdir())) == (6, []), "nothing is written"
    # Of matched ones, once before they are matched; and the plain average, which is not.
    assert len(made) == (2 + 2 + 1 if is_matched else 2)
    for row in found.rows:
        rows = numbers_in(llama.merger(**how, **row.params).evaluate())
        assert row.scores == [pytest.approx((rows[0][0] + rows[1][0]) / 2, abs=NEAR)]
    files, held = hold_out(llama, tmp_path) if is_matched else (llama.examples, [])
    held = held or [read_lines(path) for path in files]
    [average] = [row for row in found.averages if row.config.lambda_coeff == 1.0]
    llama.merger(examples=()).merge(tmp_path / "average")
    assert average.scores == [pytest.approx(find_cost(llama, tmp_path / "average", held), abs=NEAR)]


@pytest.mark.parametrize("how", [{"matched": False}, slow({})])
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


@pytest.mark.parametrize("factors", [[0.0, 1.0], slow([1.0, 0.0])])
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


def test_trials_that_cannot_be_told_apart_are_named(llama: House) -> None:
    found = search(llama.merger(matched=False), {"lambda_coeff": [0.8, 0.9, 2.5]})
    assert sorted([found.best.number, *found.rivals]) == [0, 1]
    assert ("cannot be told apart from 1 other" in str(found)) == (found.winner is found.best)


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
    whole = search(llama.merger(matched=False), {"lambda_coeff": [0.3, 0.6, 1.0]})
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
    found = [(row["params"], row["scores"]) for row in json.loads(printed.out)["trials"]]
    assert found == [(row["params"], row["scores"]) for row in whole.to_dict()["trials"]]
    tried = [config.lambda_coeff for config in seen if config]
    assert sorted(tried) == [0.3, 0.3, 0.6, 0.6, 0.6, 1.0, 1.0], "trials, and plain averages"
