"""Sweeps that lm-evaluation-harness scores, by tasks of our own."""

import gc
import json
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dare import DareConfig, DareMerger, SweepReport
from tests.support import Patch, Refusal, read_json, run
from tests.test_matched_files import House, write_lines

pytestmark = pytest.mark.slow
TASK = """
task: {name}
tag: the_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: {metric}}}, {{metric: acc_norm}}]
"""
NOISE = ("it/s", "Loading", "lm_eval", "fatal")


def make_rows(count: int) -> list[dict[str, Any]]:
    """Questions of four words, each with three answers of one or two words."""
    ids = torch.randint(1, 40, (count, 4, 4), generator=torch.Generator().manual_seed(count))
    words = [[[f"w{word}" for word in line] for line in row] for row in ids.tolist()]
    return [
        {
            "question": " ".join(question),
            "choices": [" ".join(answer[: 1 + k % 2]) for answer in answers],
            "answer": k % 3,
        }
        for k, (question, *answers) in enumerate(words)
    ]


# By task; and groups of two tasks, with a metric of its own and without.
ROWS = {"one": make_rows(8), "two": make_rows(16), "three": make_rows(24), "brier": make_rows(9)}
GROUPS = {"pair": "aggregate_metric_list: [{metric: acc}]", "bare": ""}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two fine-tunes, and a folder of tasks."""
    folder = tmp_path_factory.mktemp("house")
    settings = House(folder, "llama").base / "tokenizer_config.json"
    settings.write_text(json.dumps(read_json(settings) | {"eos_token": "w0"}))  # lm-eval needs one
    (folder / "tasks").mkdir()
    for name in (*ROWS, "lost"):
        data = folder / f"{name}.rows"
        write_lines(data, ROWS.get(name, []))
        metric = "brier_score" if name == "brier" else "acc"
        text = TASK.format(name=name, data=data, metric=metric)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    for name, metric in GROUPS.items():
        text = f"group: {name}\ntask: [two, three]\n{metric}\n"
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, tmp_path_factory: Any, monkeypatch: Patch) -> None:
    """None of lm-eval's thousands of tasks is read, and nothing is kept in the user's cache."""
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.chdir(tmp_path)


@torch.no_grad()
def count_right(folder: Path, name: str) -> int:
    """How often the right answer is the most likely one."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)

    def score(question: str, answer: str) -> float:
        ids = torch.tensor([[int(word[1:]) for word in f"{question} {answer}".split()]])
        chosen = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])
        return float(chosen[0, -len(answer.split()) :].sum())

    right = 0
    for row in ROWS[name]:
        scores = [score(row["question"], each) for each in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    return right


def sweep(house: Path, evaluate: str, tasks: Path | None = None, **options: Any) -> SweepReport:
    config = DareConfig(drop_rate=0.0, any_base=True, engine="plain", verbose=False)
    return DareMerger(house / "base", [house / "math", house / "code"], config).sweep(
        evaluate,
        {"lambda_coeff": [1.0]},
        search="grid",
        lm_eval_tasks=tasks or house / "tasks",
        **options,
    )


def test_scores_are_accuracies_and_no_model_stays_in_memory(house: Path) -> None:
    objectives = ["score:max", "one:max", "pair:max"]
    given: Any = {"objectives": objectives, "folder": "kept", "keep_models": True}
    found = sweep(house, "lm-eval:one, pair", **given)
    [kept] = Path("kept").glob("*-trial-0000")
    for folder, scores in ((house / "base", found.base), (kept, found.rows[0].scores)):
        one = count_right(folder, "one") / 8
        pair = (count_right(folder, "two") + count_right(folder, "three")) / (16 + 24)
        assert scores == pytest.approx([(one + pair) / 2, one, pair])
    assert found.base != found.rows[0].scores
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "LlamaForCausalLM"]


def test_tasks_that_are_edited_are_another_study(house: Path, tmp_path: Path) -> None:
    tasks = Path(shutil.copytree(house / "tasks", tmp_path / "tasks"))
    lower: Any = {"tasks": tasks, "objectives": ["brier:min"]}
    names = [sweep(house, "lm-eval:brier", **lower).study for _ in range(2)]
    with (tasks / "brier.yaml").open("a") as file:
        file.write("num_fewshot: 1\n")
    names.append(sweep(house, "lm-eval:brier", **lower).study)
    assert names[0] == names[1] != names[2]


def command(house: Path, *flags: Any) -> list[Any]:
    models = ["-b", house / "base", "-m", house / "math", "--drop-rate", "0", "--any-base"]
    how = ["--vary", "lambda_coeff=[1.0]", "--lm-eval-tasks", house / "tasks", "--engine", "plain"]
    return ["sweep", *models, *how, *flags]


def test_only_results_are_printed(house: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(*command(house, "--evaluate", "lm-eval:one", "--json"))
    printed = capfd.readouterr()
    assert json.loads(printed.out)["base"].keys() == {"score"}
    assert [word for word in NOISE if word in printed.err] == []


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("lm-eval:twoo", 2, ("lm-eval has no task 'twoo'", "did you mean two?")),
        ("lm-eval:brier", 2, ("a lower brier_score is better", "--objectives brier:min")),
        ("lm-eval:bare", 2, ("without a metric of its own", "'two', 'three'")),
        ("lm-eval:one,pair,two", 1, ("cannot load", "Duplicate task 'two'")),
        ("lm-eval:lost", 1, ("lm-eval cannot load 'lost'",)),
        ("lm-eval:the_one", 2, ("is a tag", "'one'")),
        ("lm-eval:one --objective on:max", 1, ("no score 'on'",)),
        ("lm-eval:one --base coded", 1, ("cannot score the base", "contains custom code")),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_merged(
    house: Path, refused: Refusal, flags: str, status: int, words: tuple[str, ...]
) -> None:
    coded = Path(shutil.copytree(house / "base", "coded"))  # it comes with code
    config = read_json(coded / "config.json") | {"model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "own.py").write_text("open('ran', 'w')")
    refused(status, words, *command(house, "--evaluate", *shlex.split(flags)))
