"""Files and state dicts are merged by one plan: what one refuses or warns of, the other does."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import dare
from dare import DareConfig, DareError
from tests.support import Tensors, assert_same, finetune, random_model, save

SHAPES = {"a.weight": (12, 8), "b.weight": (6, 8), "layers.0.norm": (8,)}
BASE = random_model(1, torch.bfloat16, SHAPES)
TUNED = finetune(BASE, 2, 0.01)
TALL = TUNED | {"b.weight": torch.cat([TUNED["b.weight"], TUNED["a.weight"][:3]])}
SHORT = TUNED | {"b.weight": TUNED["b.weight"][:4].clone()}
TURNED = TUNED | {"b.weight": TUNED["b.weight"].T.contiguous()}
IDS = {"ids": torch.arange(4)}
QUANTISED = {
    "q.weight": torch.arange(16, dtype=torch.int8).reshape(2, 8),
    "q.weight_scale": torch.ones(2),
}


class Merge(NamedTuple):
    """What came of a merge, with the models called base, 0 and 1."""

    tensors: Tensors
    warnings: list[str]
    error: DareError | None


def name_models(text: str, folder: Path) -> str:
    for name, short in ((f"{folder}/", ""), (".safetensors", ""), ("model ", "m")):
        text = text.replace(name, short)
    return text.replace("the base", "base")


def run(
    where: str, folder: Path, caplog: Any, base: Tensors, models: list[Tensors], config: Any
) -> Merge:
    tensors: Tensors = {}
    error = None
    try:
        if where == "memory":
            tensors = dare.dare_merge(base, models, DareConfig(**config))
        else:
            paths = save(folder, base=base, **{f"m{i}": m for i, m in enumerate(models)})
            out = folder / "out.safetensors"
            dare.DareMerger(paths[0], paths[1:], DareConfig(**config)).merge(out)
            tensors = load_file(out)
    except DareError as caught:
        error = caught
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return Merge(tensors, [name_models(line, folder) for line in lines], error)


REFUSED: dict[str, tuple[Tensors, list[Tensors], dict[str, Any], list[str]]] = {
    "more rows": (BASE, [TALL], {}, ["b.weight", "[6, 8]", "[9, 8]"]),
    "fewer rows": (BASE, [TUNED, SHORT], {}, ["b.weight", "[4, 8]"]),
    "another shape": (BASE, [TURNED], {}, ["b.weight", "[8, 6]"]),
    "another shape to overlap": (BASE, [TURNED], {"mismatch": "overlap"}, ["b.weight"]),
    "nothing in common": (BASE, [{"other": torch.ones(3)}], {}, []),
    "integers for weights": (
        BASE,
        [TUNED | {"a.weight": TUNED["a.weight"].long()}],
        {},
        ["a.weight"],
    ),
    "quantised weights that differ": (
        BASE | QUANTISED,
        [TUNED | QUANTISED | {"q.weight": QUANTISED["q.weight"] + 1}],
        {},
        ["q.weight"],
    ),
    "quantised scales that differ": (
        BASE | QUANTISED,
        [TUNED | QUANTISED | {"q.weight_scale": torch.full((2,), 3.0)}],
        {},
        ["q.weight_scale"],
    ),
    "only the base is quantised": (
        BASE | QUANTISED,
        [TUNED | {"q.weight": torch.ones(2, 8), "q.weight_scale": torch.ones(2)}],
        {},
        ["q.weight"],
    ),
    "only a model is quantised": (
        BASE | {"q.weight": torch.ones(2, 8)},
        [TUNED | QUANTISED],
        {},
        ["q.weight"],
    ),
    "a row too long to rank": (
        {"w": torch.zeros(1, (1 << 20) + 8)},
        [{"w": torch.ones(1, (1 << 20) + 8)}],
        {"drop": "della", "drop_rate": 0.5},
        ["w", "della"],
    ),
    "not finite": (
        BASE,
        [TUNED | {"b.weight": TUNED["b.weight"] * float("nan")}],
        {},
        ["b.weight"],
    ),
    "too large": (
        {"w": torch.full((9,), 6e4, dtype=torch.float16)},
        [{"w": torch.full((9,), -6e4, dtype=torch.float16)}],
        {"drop_rate": 0.0, "lambda_coeff": -1.0, "engine": "plain"},
        ["w"],
    ),
    "too many weights": (BASE, [TUNED], {"weights": [1.0, 2.0]}, ["weights"]),
}


@pytest.mark.parametrize("where", ["files", "memory"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused(
    where: str, case: str, tmp_path: Path, caplog: Any
) -> None:
    base, models, config, names = REFUSED[case]
    merge = run(where, tmp_path, caplog, base, models, config)
    assert merge.error is not None
    assert merge.error.hint
    assert [name for name in names if name not in str(merge.error)] == []
    assert not (tmp_path / "out.safetensors").exists()


WARNED: dict[str, tuple[Tensors, list[Tensors], dict[str, Any], list[str]]] = {
    "nothing": (BASE, [TUNED], {}, []),
    "nothing of empty tensors": (
        BASE | {"none": torch.zeros(0, 3, dtype=torch.int64)},
        [TUNED | {"none": torch.zeros(0, 3, dtype=torch.int64)}],
        {},
        [],
    ),
    "missing tensors": (BASE, [{"a.weight": TUNED["a.weight"]}], {}, ["m0", "b.weight", "norm"]),
    "extra tensors": (BASE, [TUNED | {"more": torch.ones(2)}], {}, ["m0", "more"]),
    "integers that differ": (BASE | IDS, [TUNED | {"ids": IDS["ids"] + 1}], {}, ["m0", "ids"]),
    "integers that are floats": (BASE | IDS, [TUNED | {"ids": torch.arange(4.0)}], {}, ["ids"]),
    "rows to overlap": (BASE, [TUNED, SHORT], {"mismatch": "overlap"}, ["m1", "[4, 8]"]),
    "more rows to overlap": (BASE, [TALL], {"mismatch": "overlap"}, ["m0", "[9, 8]"]),
    "shapes to leave": (BASE, [TURNED, TUNED], {"mismatch": "base"}, ["m0", "b.weight"]),
    "a rule for nothing": (BASE, [TUNED], {"rules": [{"match": "c.*", "drop_rate": 0}]}, ["c.*"]),
    "no rescaling": (BASE, [TUNED], {"rescale": False}, ["rescale"]),
    "gradients without layers": (
        {"a.weight": BASE["a.weight"]},
        [{"a.weight": TUNED["a.weight"]}],
        {"drop_rate": {"gradient": [0.1, 0.9]}},
        ["gradient"],
    ),
}


@pytest.mark.parametrize("where", ["files", "memory"])
@pytest.mark.parametrize("case", WARNED)
def test_what_a_user_should_know_is_said_and_the_tensors_are_the_same(
    where: str, case: str, tmp_path: Path, caplog: Any
) -> None:
    base, models, config, names = WARNED[case]
    merge = run(where, tmp_path, caplog, base, models, config | {"delta_threshold": 10.0})
    assert merge.error is None
    said = " ".join(merge.warnings)
    assert [name for name in names if name not in said] == []
    assert bool(names) == bool(said)
    caplog.clear()
    other = run("files", tmp_path, caplog, base, models, config | {"delta_threshold": 10.0})
    assert_same(merge.tensors, other.tensors)
    assert merge.warnings == other.warnings


@pytest.mark.parametrize(("given", "words"), [([BASE], "itself"), ([TUNED] * 2, "more than once")])
def test_models_that_are_given_again_are_named(
    given: list[Tensors], words: str, caplog: Any
) -> None:
    """Of files, test_report has that."""
    dare.dare_merge(BASE, given, DareConfig(drop_rate=0.5, delta_threshold=10.0))
    assert [words in record.getMessage() for record in caplog.records] == [True]


BUFFER = torch.zeros(400, dtype=torch.bfloat16)
PLACES = {
    "views of one buffer": lambda base, models: {
        name: BUFFER[: tensor.numel()].view(tensor.shape) for name, tensor in base.items()
    },
    "another tensor of a fine-tune": lambda base, models: (
        base | {"b.weight": models[1]["a.weight"][:6]}
    ),
    "another tensor of the base": lambda base, models: (
        base | {"b.weight": base["a.weight"][:6], "a.weight": torch.zeros_like(base["a.weight"])}
    ),
    "rows of the base's own": lambda base, models: (
        base
        | {"a.weight": torch.cat([base["a.weight"], base["a.weight"]])[1:13]}
        | {"b.weight": base["a.weight"].view(-1)[1:49].view(6, 8)}
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_memory_that_would_be_written_before_it_is_read_is_refused(case: str) -> None:
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    models = [TUNED, finetune(BASE, 3, 0.01)]
    before = {name: tensor.clone() for name, tensor in models[1].items()}
    out = PLACES[case](base, models)
    with pytest.raises(DareError, match="memory"):
        dare.dare_merge(base, models, out=out)
    assert_same(base, BASE)
    assert_same(models[1], before)


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "the base's as well"])
def test_an_input_may_be_written_over_by_its_own_name(shared: bool) -> None:
    base = {name: tensor.clone() for name, tensor in BASE.items()}
    model = {name: tensor.clone() for name, tensor in TUNED.items()}
    if shared:  # a tensor that was not trained
        model["a.weight"] = base["a.weight"]
    expected = dare.dare_merge(base, [model, TUNED])
    assert_same(dare.dare_merge(base, [model, TUNED], out=base if shared else model), expected)


def test_tied_tensors_of_which_one_is_kept_are_not_one() -> None:
    base = {"embed_tokens.weight": torch.zeros(4, 2)}
    base["lm_head.weight"] = base["embed_tokens.weight"]
    model = {"embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(5, 2)}
    assert_same(
        dare.dare_merge(base, [model], DareConfig(mismatch="base", drop_rate=0.0)),
        {"embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.zeros(4, 2)},
    )


def test_every_other_row_of_a_buffer_is_a_place_of_its_own() -> None:
    expected = dare.dare_merge(BASE, [TUNED])
    out = {name: torch.zeros_like(tensor) for name, tensor in BASE.items()}
    rows = torch.zeros(24, 8, dtype=torch.bfloat16)
    out["a.weight"] = rows[::2]
    merged = dare.dare_merge(BASE, [TUNED], out=out)
    assert_same({name: tensor.contiguous() for name, tensor in merged.items()}, expected)
    assert not rows[1::2].any()
