"""What a search may choose: values and ranges, asked where they mean something, and wrong ones that
are named."""

import re
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare import ConfigError, DareConfig, DareMerger
from darelib.commands.sweep.space import Space
from darelib.config import PER_MODEL, RULE_SETTINGS, SWEEP_SETTINGS
from darelib.methods import METHODS
from tests.support import Capture, Models, Refusal, examples, run, write_config


def test_settings_are_only_asked_where_they_mean_something_and_others_do_not_hinder(
    models: Models,
) -> None:
    space = {
        "method": ["linear", "ties", "slerp", "ram"],
        "drop": ["random", "breadcrumbs", "della"],
        "drop_rate": [0, 0.5],
        "gamma": [0.01, 0.02],
        "epsilon": {"low": 0.01, "high": 0.1},
        "rescale_q": {"low": 0.1, "high": 1},
        "keep_ratio": {"low": 0.1, "high": 1, "log": True},
        "slerp_t": {"low": 0, "high": 1, "step": 0.25},
        "weights": {"low": 0.1, "high": 2},
        "lambda_coeff": [1, {"gradient": [0.5, 1]}],
        "rules": [
            {
                "match": ["head.*"],
                "drop_rate": [{"low": 0.5, "high": 0.6}, {"low": 0.7, "high": 0.8}],
            }
        ],
    }
    rules = [{"match": "layer.*", "keep_ratio": 0.5}]
    config = DareConfig(method="ties", keep_ratio=0.3, engine="plain", rules=rules)
    merger = DareMerger(models[0], models[1:], config)
    found = merger.sweep(
        lambda path: 1.0, space, folder=models[0].parent, search="random", trials=25
    )
    assert (len(found.rows), found.failures) == (25, []), "none was refused"
    for row in found.rows:
        names = {*row.params}
        method = row.params["method"]
        drop = row.params.get("drop", "random")
        assert (drop, "drop" in names) == ((drop, True) if method != "slerp" else ("random", False))
        assert ("slerp_t" in names) == (method == "slerp") == ("weights math" not in names)
        assert ("keep_ratio" in names) == (method == "ties" and drop == "random")
        assert ("gamma" in names, "epsilon" in names) == (drop == "breadcrumbs", drop == "della")
        assert ("rescale_q" in names) == (drop == "random")
        assert row.params.get("rescale_q", 1) >= 1 - row.params["drop_rate"]
        assert row.params.get("slerp_t", 0) in (0, 0.25, 0.5, 0.75, 1)
        rates = tuple(row.params[f"rule 1 drop_rate {model}"] for model in ("math", "code"))
        assert 0.5 <= rates[0] <= 0.6 < 0.7 <= rates[1] <= 0.8
        [own, *kept] = row.config.typed_rules
        assert own.drop_rate == rates
        assert kept[0].match == ("layer.*",)
        assert row.config.weights == (
            tuple(row.params[f"weights {model}"] for model in ("math", "code"))
            if method != "slerp"
            else None
        )
    assert len({row.params["method"] for row in found.rows}) == 4
    assert found.averages[0].config.method == "linear"


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ("lamda_coeff=[1]", r"\[sweep\] has no key 'lamda_coeff'.*did you mean lambda_coeff"),
        ("drop_rate=[]", r"\[sweep\] drop_rate has no values"),
        ("drop_rate=[0.5, 1.5]", r"\[sweep\] drop_rate must be"),
        ("method=['linear', 'tie']", r"\[sweep\] method must be .*did you mean ties"),
        ("seed=[1, 2]", "masks are noise"),
        ("drop_rate={low=0.5, high=0.5}", "the range from 0.5 to 0.5 is empty"),
        ("drop_rate={low=0}", "low and high"),
        ("drop_rate={low=0, high=2}", r"\[sweep\] drop_rate must be"),
        ("method={low=1, high=2}", r"\[sweep\] method must"),
        ("drop_rate={low='a', high=1}", "low must be a num"),
        ("lambda_coeff={low=1, high=2, log=1}", "log must be true"),
        ("lambda_coeff={low=1, high=2, steps=1}", "no key 'steps'"),
        ("lambda_coeff={low=0, high=2, log=true}", "above 0"),
        ("lambda_coeff={low=1, high=2, step=0}", "step must be above"),
        ("lambda_coeff={low=0, high=2, step=1e-6}", "steps of 1e-06"),
        ("lambda_coeff={low=0, high=2, step=1e-320}", "steps of"),
        ("normalize=['yes']", r"\[sweep\] normalize must"),
        ("drop_rate=[{low=0, high=0.5}]", "1 ranges for 2 models"),
        ("weights=[0.5, 0.5]", r"\[sweep\] weights must be"),
        ("rules=[1]", "rules must be tables"),
        ("rules=[{drop_rate=[0.5]}]", "rule 1"),
        ("threads=[1]", "no key 'threads'"),
        ("matched=[true, false]", "no key 'matched'"),
        ("match_ridge=[0.02, 0.1]", "no key 'match_ridge'"),
        ("rules=[{match='*'}]", "sets nothing"),
        ("rules=[{match='*', mismatch=['base']}]", "rule 1 has no key 'mismatch'"),
        ("rules=[{match='*', matched=[false]}]", "rule 1 has no key 'matched'"),
        ("keep_ratio=[0.5, 0.7]", "keep_ratio means nothing"),
        ("rules=[]", "nothing to search"),
        ("drop_rate", "must be SETTING=VALUES"),
        ("", "nothing to search"),
    ],
)
def test_a_wrong_space_is_named(
    models: Models, tmp_path: Path, refused: Refusal, space: str, message: str
) -> None:
    words = ["sweep", "--evaluate", f"'{sys.executable}' {{model}}", "-c", write_config(tmp_path)]
    error = refused(2, "", *words, *(["--vary", space] if space else []))
    assert re.search(message, error, re.DOTALL), error
    if "=" in space and "rules" not in space:  # the same under [sweep]
        write_config(tmp_path, f"[sweep]\n{space}")
        refused(2, "", *words)


def test_what_a_search_may_choose_is_written_with_the_rest(
    models: Models, tmp_path: Path, capsys: Capture
) -> None:
    space = """[sweep]
method = ["linear", "ties"]
drop_rate = {low = 0.0, high = 0.5}
[[sweep.rules]]
match = "*embed*"
lambda_coeff = [{gradient = [0.1, 0.2]}, 1.0]
"""
    run("-c", write_config(tmp_path, space), "--write-config", "-")
    assert tomllib.loads(capsys.readouterr().out)["sweep"] == tomllib.loads(space)["sweep"]


ENDS: dict[str, tuple[float, float]] = {
    "drop_rate": (0.05, 0.95),
    "gamma": (0.01, 0.04),
    "epsilon": (0.01, 0.04),
    "weights": (0.1, 2),
    "slerp_t": (0.1, 1),
    "lambda_coeff": (0.5, 2.5),
    "rescale_q": (0.1, 1),
    "keep_ratio": (0.1, 1),
    "threshold": (1e-6, 1e-3),
    "ridge": (0.1, 10),
    "norm_limit": (0, 3),
}
VALUES: dict[str, list[Any]] = {
    "method": [*METHODS],
    "drop": ["random", "magnitude", "breadcrumbs", "della"],
    "drop_rate": [0, 0.5, 0.9, [0.2, 0.8], {"gradient": [0.9, 0.5]}],
    "gamma": [0.01, [0, 0.1]],
    "epsilon": [0.1, 0.2],
    "weights": [[0.3, 0.7], [{"gradient": [0, 1]}, 1]],
    "normalize": [True, False],
    "origin": ["base", "zero"],
    "dtype": ["float32", "bf16"],
    "lambda_coeff": [1, {"gradient": [1, 2]}],
    "rescale": [True, False, "none", "l1", "expectation"],
    "rescale_q": [0.1, [0.5, 1]],
    "keep_ratio": [0.2, 1],
    "slerp_t": [0, {"gradient": [0, 1]}],
    "swap_t": [0.001, {"gradient": [0, 1]}],
    "boost": [0, 0.1],
    "boost_limit": [0.2, 1],
    "threshold": [0, 1e-5],
    "ridge": [0.3, {"gradient": [0.1, 1]}],
    "norm_limit": [0, 1.5],
    "scale": [0.5, {"gradient": [0, 1]}],
    "mismatch": ["error", "base"],
    "matched": [True, False],
    "match_ridge": [0.02, 0.1],
}
SWEEP_RULES = [name for name in RULE_SETTINGS if name in SWEEP_SETTINGS]
CONFIGS = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}
)


def axes(names: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables with some of these settings, each with values, a range, or a range for each model."""

    def axis(name: str) -> st.SearchStrategy[Any]:
        kinds: list[st.SearchStrategy[Any]] = [
            st.lists(st.sampled_from(VALUES[name]), min_size=1, max_size=3)
        ]
        if name in ENDS:
            low, high = ENDS[name]
            more: list[dict[str, Any]] = [
                {},
                {"log": True},
                {"step": (high - low) / 3},
                {"step": (high - low) * 0.4},
            ]
            ranges = st.sampled_from([{"low": low, "high": high, **each} for each in more])
            kinds += [ranges] + [st.lists(ranges, min_size=2, max_size=2)] * (name in PER_MODEL)
        return st.one_of(kinds)

    return st.sets(st.sampled_from(names), min_size=1, max_size=5).flatmap(
        lambda some: st.fixed_dictionaries({name: axis(name) for name in sorted(some)})
    )


@examples(50)
@given(axes(SWEEP_SETTINGS), st.none() | axes(SWEEP_RULES), CONFIGS, st.integers(0, 999))
def test_whatever_is_chosen_can_be_merged_or_is_refused(
    space: Any, rule: Any, given: Any, seed: int
) -> None:
    try:
        config = DareMerger("a", ["b", "c"], DareConfig(**given)).config
    except ConfigError:
        config = DareConfig()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed)).ask()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            choices = Space(
                space | ({"rules": [{"match": "*weight", **rule}]} if rule else {}),
                config,
                ["b", "c"],
            )
            chosen = choices.choose(trial)
            for made in (chosen, choices.plain_average(1.0)):
                DareMerger("a", ["b", "c"], made)
        except ConfigError:
            return
    assert choices.choose(optuna.trial.FixedTrial(trial.params)) == chosen, (
        "a study says all about it"
    )
