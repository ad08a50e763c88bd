"""Models judged by examples, and the lambda that examples choose: all numbers are those that
transformers gives for models on disk."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dare
from dare import DareConfig, DareError, DareMerger, dare_evaluate, dare_match
from darelib.models.examples import divide
from darelib.run.matching import network
from darelib.run.matching.judging import LAMBDAS
from darelib.run.matching.model_files import Inputs
from darelib.run.matching.network import START, Network
from tests.house import (
    LLAMA,
    NEAR,
    House,
    are_near,
    find_cost,
    hold_out,
    make_adapter,
    measure,
    numbers_in,
    pack,
    read_lines,
    write_lines,
)
from tests.scene import contents
from tests.support import (
    Capture,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    family_model,
    run,
    slow,
    snapshot,
    tensors_in,
)
from tests.test_matching import (
    BATCHES,
    FLAT,
    TOWER,
    configure,
    draw,
    give,
    make_bert,
    make_states,
    make_vit,
)

Houses = Callable[[str], House]


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
    monkeypatch.setattr(network, "find_blocks", lambda model: [])
    report = check_numbers(llama, tmp_path, texts)
    assert "text 0.jsonl (all tokens)" in str(report)
    assert "text 0.jsonl: 20 examples, 170 tokens" in str(report)


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
    words = "matched with these examples, and therefore better at them than elsewhere: 'out'"
    assert words not in str(written)
    assert words in str(llama.merger().evaluate([tmp_path / "out", llama.models[0]]))


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
        for room in ("judging", "models"):
            monkeypatch.setattr(f"darelib.run.matching.{room}.LAMBDAS", lambdas)
        calls.clear()
        made.clear()
        llama.merger(lambda_coeff="auto", matched=False).evaluate()
        assert {*made.values()} == {1}
        found.append(dict(calls))
    few, many = found
    grown = {name: many[name] - few[name] for name in many}
    assert {*grown.values()} == {4 * 2}  # each batch, by each of four more lambdas


def test_what_was_tried_is_reported_printed_and_given_as_json(
    llama: House, tmp_path: Path, capsys: Capture
) -> None:
    auto = ["--lambda", "auto", "--no-matched", "--examples", *llama.examples]
    run(*llama.flags, *auto, "-o", tmp_path / "out", "--json")
    printed = capsys.readouterr()
    choice = json.loads(printed.out)["choice"]
    tried = ", ".join(f"{factor:g}: {cost:.4g}" for factor, cost in choice["tried"])
    assert [factor for factor, _ in choice["tried"]] == [*LAMBDAS]
    few = "'math.jsonl', 'code.jsonl' judge by fewer than 32 examples or 1,000 tokens"
    assert f"{few} (the least: 5 and 21): small" in printed.err
    run(*["evaluate", *llama.flags[:-4], "--any-base"], *auto)
    line = (
        f"lambda {choice['chosen']:g} is the best on 10 held-out examples (42 tokens), "
        f"by loss on the answers in bits a token ({tried}); it cannot be told apart from "
    )
    assert line in capsys.readouterr().out


# --- remarks and warnings -------------------------------------------------------------------------


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
    best, other = ("near", "same") if "'near' has the least" in remark else ("same", "near")
    assert f"{best!r} has the least mean cost, of 'base', 'far', 'near' and 1 more" in remark
    assert f"{other!r}" in remark.partition("; it cannot be told apart from ")[2]
    assert "far" not in remark.partition(";")[2]
    assert "fewer than" not in str(report)
    few = llama.merger().evaluate([tmp_path / "near"])
    remark, _ = few.remarks
    assert remark.startswith("'math.jsonl', 'code.jsonl' judge by fewer than 32 examples or 1,000")


def test_files_in_another_order_and_models_that_lack_tensors_are_named(
    llama: House, tmp_path: Path, capsys: Capture
) -> None:
    math, code = llama.examples
    words = "the fine-tune whose examples these should be is no better than the base"
    turned = llama.merger(examples=[code, math], matched=False)
    [*_, remark] = turned.evaluate().remarks
    assert remark.startswith("other models are better at 'code.jsonl', 'math.jsonl' than those")
    [*_, remark] = llama.merger(examples=[math, math], matched=False).evaluate().remarks
    assert words in remark
    known = " ".join(llama.merger(matched=False).evaluate().remarks)
    assert "other models" not in known
    assert words not in known
    turned.sweep(None, {"lambda_coeff": [1.0]}, search="grid")
    short = tensors_in(llama.models[0])
    short.pop("model.norm.weight")
    shutil.copytree(llama.models[0], tmp_path / "short")
    save_file(short, tmp_path / "short" / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    run("evaluate", *llama.flags, "--examples", *llama.examples, "--model", tmp_path / "short")
    assert "model.norm.weight" in capsys.readouterr().err


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
    assert numbers_in(report, 3) == [(None, 0.0, None)] * 2
    assert "'math' has the least mean cost" in report.remarks[-1]
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["models"][3]["scores"][0] == {
        "loss": None, "agreement": 0.0, "divergence": None
    }  # fmt: skip


# --- any torch module -----------------------------------------------------------------------------


def compare_states(
    module: nn.Module, state: Tensors, own: Tensors, batches: Sequence[Any]
) -> tuple[float, float]:
    """Agreement and divergence, over all rows of logits."""
    module.eval()
    pairs = [(give(module, state, batch), give(module, own, batch)) for batch in batches]
    given, wanted = (torch.cat([each.flatten(0, -2) for each in some]).double().log_softmax(-1)
                     for some in zip(*pairs, strict=True))  # fmt: skip
    same = (given.argmax(-1) == wanted.argmax(-1)).double().mean()
    divergence = (wanted.exp() * (wanted - given)).sum(-1).mean() / math.log(2)
    return float(same), float(divergence)


Made = tuple[nn.Module, list[list[Any]]]


@pytest.mark.parametrize(
    "make", [lambda: (FLAT, BATCHES), lambda: (TOWER, BATCHES), *map(slow, (make_bert, make_vit))]
)
def test_any_module_is_judged_and_its_lambda_chosen_in_memory(make: Callable[[], Made]) -> None:
    module, batches = make()
    states = make_states(module)
    merge = dare.dare_merge(states[0], states[1:], configure({}))
    report = dare_evaluate(module, states[0], states[1:], batches, [merge], base_batches=batches[0])
    assert report.names == ("base", "model 0", "model 1", "merge 0")
    owners = [*zip([*states[1:], states[0]], [*batches, batches[0]], strict=True)]
    for k, state in enumerate([*states, merge]):
        found = [compare_states(module, state, own, some) for own, some in owners]
        assert [each[0] for each in numbers_in(report, k)] == [None] * 3
        assert [pytest.approx(each, abs=NEAR) for each in found] == [
            each[1:] for each in numbers_in(report, k)
        ]


@pytest.mark.parametrize("is_matched", [True, False])
def test_in_memory_the_lambda_taken_is_the_best_on_batches_that_are_held_out(
    is_matched: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [[draw(9, 5, seed=9 * k + b) for b in range(8)] for k in range(2)]
    how = {} if is_matched else {"matched": False}
    with caplog.at_level("INFO", "dare"):
        made = dare_match(
            FLAT, *states_of(FLAT), batches, configure({"lambda_coeff": "auto", **how})
        )
    used, held = zip(*(divide(each, 0.25) for each in batches), strict=True)
    base, tuned = states_of(FLAT)
    costs = {}
    for factor in LAMBDAS:
        config = configure({"lambda_coeff": factor})
        merged = (
            dare_match(FLAT, base, tuned, used, config)
            if is_matched
            else dare.dare_merge(base, tuned, config)
        )
        own = [compare_states(FLAT, merged, *each)[1] for each in zip(tuned, held, strict=True)]
        costs[factor] = sum(own) / 2, merged
    best = min(costs, key=lambda factor: costs[factor][0])
    assert_same(made, costs[best][1])
    assert f"lambda {best:g} is the best on 36 held-out examples (36 tokens)" in caplog.text


def states_of(module: nn.Module) -> tuple[Tensors, list[Tensors]]:
    base, *tuned = make_states(module)
    return base, tuned


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda *some: dare_match(*some, [[BATCHES[0][0]]] * 2, AUTO), "cannot be divided"),
        (lambda *some: dare_match(*some, BATCHES, UNMATCHED), "nothing is matched with the ex"),
        (lambda *some: dare_evaluate(*some, BATCHES[:1]), "batches for 1 of 2 models"),
        (lambda *some: dare_evaluate(*some, BATCHES, some[1]), "merges must be a list"),
        (lambda _, base, tuned: dare.dare_merge(base, tuned, AUTO), "lambda auto is chosen by"),
        (lambda _, *some: dare.dare_merge(*some, DareConfig(matched=True)), "without examples"),
        (lambda module, base, _: dare_evaluate(module, base, [], []), "no models"),
    ],
)
def test_what_cannot_be_judged_in_memory_is_refused(call: Any, words: str) -> None:
    with pytest.raises(DareError, match=words):
        call(FLAT, *states_of(FLAT))


AUTO = DareConfig(drop_rate=0.0, any_base=True, lambda_coeff="auto")
UNMATCHED = DareConfig(drop_rate=0.0, any_base=True, matched=False)


# --- what is refused ------------------------------------------------------------------------------

EXAMPLES = "--examples math.jsonl code.jsonl"
AUTOMATIC = f"--lambda auto {EXAMPLES}"
BERT = "-b bert -m bert --any-base --examples ids.jsonl"
SEARCH = "sweep --vary drop_rate=[0.5]"
REFUSED = [
    ("evaluate", 2, "nothing judges the models"),
    ("merge --lambda auto", 2, "lambda auto is chosen by examples, and there are none"),
    (f"merge {EXAMPLES} --rule '*:lambda_coeff=\"auto\"'", 2, "lambda_coeff must be"),
    (f"merge --no-matched {EXAMPLES}", 2, "nothing is matched with the examples, and no lambda"),
    (f"merge {EXAMPLES} --held-out 1", 2, "must be a number above 0 and below 1, not 1.0"),
    (f"evaluate {EXAMPLES} --model vocabulary", 1, "is [40, 16] in "),
    (f"evaluate {EXAMPLES} --model wide", 1, "is [24, 16] in "),
    (f"evaluate {EXAMPLES} --tokenizer union", 2, "the output has other token ids"),
    (f"evaluate {EXAMPLES} --max-tokens 5", 1, "no answer of 'math.jsonl' is among the tokens"),
    (f"evaluate {BERT}", 1, "BertForMaskedLM does not"),
    (f"merge {BERT} --lambda auto", 1, "BertForMaskedLM does not"),
    (SEARCH, 2, "nothing scores the models"),
    (f"{SEARCH} {EXAMPLES} --in-memory", 2, "--in-memory means nothing where examples judge"),
    (f"{SEARCH} {EXAMPLES} --keep-models x", 2, "--keep-models means nothing where examples"),
    (f"{SEARCH} {EXAMPLES} --timeout 3", 2, "--timeout means nothing where examples judge"),
    (f"{SEARCH} {EXAMPLES} --objective no:min", 2, "examples give no 'no:min'"),
    (f"{SEARCH} {EXAMPLES} --objective math:max", 2, "they give costs, of which less is better"),
    ("sweep --vary matched=[true] --evaluate 'cat {model}'", 2, "has no key 'matched'"),
    (f"merge {AUTOMATIC} --part 1/2", 2, "--part divides a merge by files"),
    (f"merge {AUTOMATIC} --resume", 2, "cannot be continued"),
    (f"merge {AUTOMATIC} --runner ray", 2, "--runner ray divides a merge"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "status", "words"), REFUSED)
def test_what_cannot_be_judged_is_refused_before_anything_is_written(
    llama: House, tmp_path: Path, monkeypatch: Patch, refused: Refusal,
    line: str, status: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for path in llama.examples:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = llama.kind.config_class
    for name, size in (("vocabulary", {"vocab_size": 48}), ("wide", {"intermediate_size": 40})):
        llama.kind(config(**{**LLAMA, **size})).save_pretrained(tmp_path / name)
    family_model("bert").save_pretrained(tmp_path / "bert")
    write_lines(tmp_path / "ids.jsonl", [{"input_ids": [2, 3, 4]}] * 4)
    verb, *flags = shlex.split(line)
    output = ["-o", tmp_path / "out"] if verb == "merge" else []
    models = [] if "-b" in flags else llama.flags
    refused(status, words, verb, *models, *output, *flags)


@pytest.mark.parametrize("verb", ["merge", "evaluate"])
def test_a_full_disk_is_one_sentence(
    llama: House, tmp_path: Path, monkeypatch: Patch, refused: Refusal, verb: str
) -> None:
    class Full:
        """A file on a full disk."""

        def seek(self, _: int) -> None: ...
        def write(self, _: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            self.write(b"what was held back")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("darelib.run.matching.models.TemporaryFile", lambda **_: Full())
    own = ["--lambda", "auto", "-o", tmp_path / "out"] if verb == "merge" else []
    refused(1, "No space left on device", verb, *llama.flags, *own,
            "--examples", *llama.examples)  # fmt: skip
