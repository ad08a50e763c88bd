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
