"""What a mergekit configuration means here, and what is refused of it; test_mergekit compares the
results."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dare import DareConfig
from darelib.config import Chooser, Gradient
from darelib.methods import MERGEKIT
from darelib.models.vocabulary import TEMPLATES
from darelib.requests.mergekit import parse_yaml
from darelib.requests.mergekitfile import PARAMETERS
from darelib.requests.request import Request
from tests.support import (
    F32,
    Capture,
    Models,
    Patch,
    Refusal,
    assert_same,
    examples,
    make_models,
    random_model,
    read_json,
    run,
    save,
    save_directory,
    slow,
    tensors_in,
)

SHAPES = {
    "model.embed_tokens.weight": (12, 8),
    "lm_head.weight": (12, 8),
    "model.norm.weight": (8,),
    **{
        f"model.layers.{k}.{part}.weight": (8, 8)
        for k in range(4)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    },
}
MODELS = (
    "base_model: base\nmodels: [{model: one, parameters: {weight: 0.7}}, {model: two, "
    "parameters: {weight: 0.4}}]\n"
)


TIES = f"merge_method: ties\n{MODELS}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The working directory, with a base of four layers and two fine-tunes as directories."""
    monkeypatch.chdir(tmp_path)
    for name, tensors in zip(("base", "one", "two"), make_models(2, F32, SHAPES), strict=True):
        save_directory(tmp_path / name, tensors, model_type="llama")
    return tmp_path


@pytest.fixture
def check(folder: Path, refused: Refusal) -> Refusal:
    """Checks that a file is refused with these words."""

    def check(text: str | bytes, words: str) -> str:
        (folder / "merge.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return refused(2, ("merge.yaml", words), "-c", "merge.yaml", "-o", "out")

    return check


def read(text: str) -> Request:
    return parse_yaml(text, "merge.yaml", Path())


def with_method(method: str, parameters: str = "", models: str = MODELS) -> dict[str, Any]:
    return read(f"merge_method: {method}\n{models}{parameters}").dare


# --- what a file means


def test_a_name_and_an_only_module_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plain = read(f"{TIES}parameters: {{lambda: 0.5, density: 0.5}}")
    base, models = MODELS.splitlines()
    inner = f"modules: {{default: {{{models}, parameters: {{lambda: 0.5}}}}}}"
    wrapped = read(f"name: x\nmerge_method: ties\n{base}\n{inner}\nparameters: {{density: 0.5}}")
    assert wrapped == plain
    assert not caplog.records


SOURCES = "base_model: base\nslices: [{sources: [{model: one, layer_range: [0, 4]}]"


@pytest.mark.parametrize(
    ("plain", "changed", "warnings"),
    [
        (MODELS, f"license: mit\n{MODELS}", ["license has no effect here, as in mergekit"]),
        (
            MODELS,
            f"{MODELS}int8_mask: true\nrandom_seed: 3",
            [
                "int8_mask has no effect here, as in mergekit; put it under parameters",
                "random_seed has no effect here, as in mergekit",
            ],
        ),
        (
            MODELS,
            MODELS.replace(
                "{model: two", "{model: two, density: 0.5, revision: main, layer_range: 1"
            ),
            [
                "models[1]: density has no effect here, as in mergekit; put it under parameters",
                "models[1]: revision has no effect here, as in mergekit",
                "models[1]: layer_range has no effect here, as in mergekit",
            ],
        ),
        (
            f"{SOURCES}}}]\nparameters: {{weight: 1}}",
            f"{SOURCES}, merge_method: slerp, dtype: float16}}]\nparameters: {{weight: 1}}",
            [f"slices[0]: {key} has no effect here" for key in ("merge_method", "dtype")],
        ),
        (
            MODELS.replace("0.7", "[{filter: mlp, value: 1}, {value: 0.5}]"),
            MODELS.replace(
                "0.7",
                "[{filter: mlp.*.weight, value: 2}, {filter: mlp, value: 1}, {value: 0.5}]",
            ),
            ["filter 'mlp.*.weight' is part of no tensor's name, so it has no effect"],
        ),
        (
            MODELS,
            MODELS.replace("model: one", "model: one@v1"),
            ["models[0].model: 'one' is on this machine, so its revision has no effect"],
        ),
        (
            MODELS,
            MODELS.replace("model: one", "model: {model: {path: one, revision: v1}}"),
            ["models[0].model: 'one' is on this machine, so its revision has no effect"],
        ),
    ],
)
def test_what_mergekit_does_not_read_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, plain: str, changed: str, warnings: list[str]
) -> None:
    assert read(f"merge_method: ties\n{changed}") == read(f"merge_method: ties\n{plain}")
    for record, warning in zip(caplog.records, warnings, strict=True):
        assert record.message.startswith(f"merge.yaml: {warning}")


@pytest.mark.parametrize("method", MERGEKIT)
def test_parameters_of_other_methods_are_a_warning(
    method: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At every level: the file's, a slice's and a model's."""
    _, family = MERGEKIT[method]
    own = {*family.each, *family.shared, *family.only, *family.ignored}
    others = dict.fromkeys(sorted(PARAMETERS - own), 0.5)
    used = {key: 0.5 for key in ("weight", "t") if key in own}
    models = ["two"] if method == "passthrough" else ["one", "two", "base"]
    listed = models[-2:] if family.others[1] == 1 else models

    def write(given: dict[str, float]) -> str:
        sources = [{"model": model, "layer_range": [0, 4], "parameters": given} for model in listed]
        slices = [{"sources": sources, "parameters": given}]
        file = {"merge_method": method, "base_model": "base", "slices": slices}
        return json.dumps(file | {"parameters": used | given})

    plain = read(write({}))
    assert not caplog.records
    assert read(write(others)) == plain
    assert len(caplog.records) == len(others) * (len(listed) + 2)


def test_misspellings_are_errors_unless_lenient(
    folder: Path, refused: Refusal, capsys: Capture
) -> None:
    text = f"{TIES}lamda: 2\nevaluation: {{tasks: [a]}}\n"
    (folder / "typos.yaml").write_text(text)
    refused(2, "--lenient", "-c", "typos.yaml", "-o", "out")
    refused(2, "--lenient means nothing", "-b", "base", "-m", "one", "-o", "out", "--lenient")
    run("-c", "typos.yaml", "-o", "out", "--lenient", "-q", "--engine", "plain")
    assert "lamda has no effect here, as in mergekit" in capsys.readouterr().err
    assert parse_yaml(text, "merge.yaml", Path(), lenient=True) == read(TIES)


@pytest.mark.parametrize("method", ["task_arithmetic", "dare_ties", "sce"])
def test_a_base_without_models_is_the_result(method: str, folder: Path) -> None:
    text = f"merge_method: {method}\nbase_model: base\nmodels: [{{model: base}}]\n"
    (folder / "merge.yaml").write_text(text)
    run("merge.yaml", "out", "-q", "--engine", "plain")
    assert_same(tensors_in(folder / "out"), tensors_in(folder / "base"))


@pytest.mark.parametrize(
    ("method", "parameters", "weights", "normalize"),
    [
        ("ties", "", [0.7, 0.0], True),
        ("breadcrumbs", "", [0.7, 0.0], False),
        ("dare_linear", "parameters: {normalize: true}", [0.7 / 1.1, 0.0], False),
        ("della", "", [0.7, 0.0], True),
    ],
)
def test_a_model_of_density_0_has_no_weight_but_counts_where_all_do(
    method: str, parameters: str, weights: list[float], normalize: bool
) -> None:
    models = MODELS.replace("0.4", "0.4, density: 0").replace("0.7", "0.7, density: 0.5")
    made = with_method(method, parameters, models)
    assert (made["weights"], made["normalize"]) == (weights, normalize)
    assert made["drop_rate"] == [0.5, 0.0]


@pytest.mark.parametrize(
    ("method", "expected"),
    {
        "task_arithmetic": {"method": "linear", "normalize": False},
        "ties": {"method": "ties", "normalize": True, "drop": "magnitude", "rescale": "none"},
        "dare_linear": {"method": "linear", "normalize": False, "drop": "random", "rescale": "l1"},
        "dare_ties": {"method": "ties", "normalize": False, "drop": "random", "rescale": "l1"},
        "breadcrumbs": {
            "method": "linear",
            "normalize": False,
            "drop": "breadcrumbs",
            "gamma": 0.01,
            "rescale": "none",
        },
        "breadcrumbs_ties": {
            "method": "ties",
            "normalize": False,
            "drop": "breadcrumbs",
            "gamma": 0.01,
            "rescale": "none",
        },
        "della": {
            "method": "ties",
            "normalize": True,
            "drop": "della",
            "epsilon": 0.15,
            "rescale": "l1",
        },
        "della_linear": {
            "method": "linear",
            "normalize": False,
            "drop": "della",
            "epsilon": 0.15,
            "rescale": "l1",
        },
    }.items(),
)
def test_each_method_of_the_family_has_mergekits_defaults(
    method: str, expected: dict[str, Any]
) -> None:
    assert with_method(method) == expected | {
        "weights": [0.7, 0.4],
        "lambda_coeff": 1.0,
        "drop_rate": 0.0,
    }


def test_parameters_are_the_models_own_or_the_files() -> None:
    models = (
        "base_model: b\nmodels:\n- {model: b, parameters: {weight: 9}}\n- {model: a, "
        "parameters: {density: 0.1}}\n"
        "- {model: c, parameters: {weight: [1, '2e-1', 1e-1], epsilon: 0.02}}\n"
    )
    given = (
        "parameters: {weight: 0.5, density: 0.3, epsilon: 5e-2, rescale: no, normalize: off, "
        "lambda: 2, int8_mask: 1.0}"
    )
    assert with_method("della", given, models) == {
        "method": "ties",
        "drop": "della",
        "drop_rate": [0.9, 0.7],
        "epsilon": [0.05, 0.02],
        "rescale": "none",
        "weights": [0.5, {"gradient": [1.0, 0.2, 0.1]}],
        "normalize": False,
        "lambda_coeff": 2.0,
    }
    given = "parameters: {density: [1, 0.7, 0.1], gamma: [0.5]}"
    made = with_method("breadcrumbs", given)
    assert (made["drop_rate"], made["gamma"]) == ({"gradient": [0.0, 0.3, 0.9]}, 0.5)
    assert (
        with_method("task_arithmetic", "parameters: {density: 0.2, rescale: true}")["drop_rate"]
        == 0
    )


WEIGHTED = """
models: [{model: one, parameters: {weight: 1}}, {model: two, parameters: {weight: 3}}]
"""
REFERENCES = """
merge_method: ties
base_model: org/base@v1
parameters: {weight: 1}
models:
- {model: org/base@v1+org/lora@main}
- {model: {model: {path: org/other, revision: abc}}}
- {model: {model: {path: org/base, revision: v1}, lora: {path: dir/with+plus}}}
- {model: {model: dir/x}}
"""
AVERAGE = {"method": "linear", "drop_rate": 0.0, "weights": [1.0, 3.0], "normalize": True}
SLERP = "merge_method: slerp\nbase_model: one\nparameters: {t: 0.3}\nmodels: "
STOCK = "merge_method: model_stock\nbase_model: base\nmodels: "
KARCHER = (
    "merge_method: karcher\nbase_model: base\nmodels: [{model: one}, {model: two}]\nparameters: {"
)


@pytest.mark.parametrize(
    ("text", "base", "merge", "settings"),
    [
        (f"merge_method: linear{WEIGHTED}", "one", "one two", AVERAGE),
        (
            f"merge_method: linear\nbase_model: base{WEIGHTED}parameters: {{weight: 2}}",
            "base",
            "one two base",
            AVERAGE | {"weights": [1.0, 3.0, 2.0]},
        ),
        (
            f"merge_method: linear{WEIGHTED}parameters: {{normalize: false}}".replace(
                "1}", "0.25}"
            ).replace("3}", "0.75}"),
            "one",
            "one two",
            AVERAGE | {"weights": [0.25, 0.75], "normalize": False, "origin": "zero"},
        ),
        *(
            (SLERP + listed, "one", "one two", {"method": "slerp", "drop_rate": 0, "slerp_t": 0.3})
            for listed in (
                "[{model: two}]",
                "[{model: one}, {model: two}]",
                "[{model: two}, {model: one}]",
            )
        ),
        (
            f"merge_method: nuslerp{WEIGHTED}",
            "one",
            "one two",
            {"method": "nuslerp", "drop_rate": 0, "weights": [1.0, 3.0], "origin": "zero"},
        ),
        (
            f"merge_method: multislerp\nbase_model: base{WEIGHTED}"
            "parameters: {normalize_weights: false, eps: 1e-6}",
            "base",
            "one two",
            {"method": "multislerp", "weights": [1.0, 3.0], "normalize": False},
        ),
        (
            "merge_method: karcher\nmodels: [{model: one}, {model: two}]\n"
            "parameters: {max_iter: 3}",
            "one",
            "one two",
            {"method": "karcher", "max_iter": 3.0, "tol": 1e-5},
        ),
        (
            "merge_method: ram\nbase_model: base\nmodels: [{model: one}, {model: two}]\n"
            "parameters: {epsilon: 0.002}",
            "base",
            "one two",
            {"method": "ram", "drop_rate": 0.0, "threshold": 0.002},
        ),
        *(
            (f"{TIES}{given}", "base", "one two", {"dtype": dtype})
            for given, dtype in (
                ("dtype: bfloat16", "bfloat16"),
                ("dtype: float32\nout_dtype: torch.float16", "float16"),
            )
        ),
        (REFERENCES, "org/base@v1", "org/lora@main org/other@abc dir/with+plus dir/x", {}),
        (
            "merge_method: linear\nmodels: [{model: x}, {model: b+l}]\nparameters: {weight: 1}",
            "b",
            "x l",
            {},
        ),
        (
            "merge_method: linear\nmodels: [{model: a+x}, {model: b+x}]\nparameters: {weight: 2}",
            "a",
            "x b+x",
            {},
        ),
        (
            "merge_method: ties\nbase_model: b+x\nparameters: {weight: 1}\n"
            "models: [{model: b}, {model: b+x}, {model: b+y}, {model: {model: c, lora: d+e}}]",
            "b+x",
            "b b+y c+d+e",
            {},
        ),
    ],
)
def test_what_is_the_base_and_what_is_merged(
    text: str, base: str, merge: str, settings: dict[str, Any]
) -> None:
    request = read(text)
    assert (request.base.name, [source.name for source in request.merge]) == (base, merge.split())
    assert settings.items() <= request.dare.items()


@pytest.mark.parametrize(
    ("given", "tokenizer", "template"),
    [
        ("", None, None),
        ("tokenizer_source: union", "union", None),
        ("tokenizer_source: base", "base", None),
        ("tokenizer_source: two", "two", None),
        ("tokenizer_source: base+l", "base", None),
        ("tokenizer_source: {model: {path: two}}", "two", None),
        ("tokenizer: {}", "union", None),
        ("tokenizer: {source: base, tokens: {}, pad_to_multiple_of: null}", "base", None),
        ("tokenizer: {source: two@v2}", "two@v2", None),
        ("chat_template: auto", None, "auto"),
        ("chat_template: '{{ messages }}'", None, "{{ messages }}"),
        ("chat_template: ''", None, None),
    ],
)
def test_tokenizer_and_chat_template(
    given: str, tokenizer: str | None, template: str | None
) -> None:
    request = read(f"{TIES}{given}")
    assert [s and s.name for s in (request.tokenizer, request.chat_template)] == [
        tokenizer,
        template,
    ]


# --- filters and slices


def test_filters_become_rules_for_the_bases_names(folder: Path) -> None:
    text = (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: one}]\nparameters:\n  t:\n"
        "  - {filter: s.3.self, value: [0, 0.5, 1]}\n  - {filter: nothing, value: 1}\n"
        "  - {filter: mlp, value: 0.1}\n  - {value: 0.5}"
    )
    found = {rule.match: rule.slerp_t for rule in read(text).rules}
    assert found == {
        ("model.layers.*.mlp.up_proj.weight",): 0.1,
        ("model.layers.3.self_attn.q_proj.weight",): Gradient((0.0, 0.5, 1.0)),
    }


PARTS = st.sampled_from(["a", "b", "ab", "ba", "a[0]", "0", "1", "10", "*"])
NAMES = st.lists(
    st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12, unique=True
)
WORDS = st.text("ab01.[*", max_size=3)
VALUES = st.sampled_from([0.25, 0.5, 0.75, [0.5, 1.0]])
CHOICES = st.lists(st.tuples(WORDS, VALUES), max_size=3)


@examples(50)
@given(names=NAMES, data=st.data())
def test_a_name_gets_of_every_parameter_what_mergekits_first_match_gives(
    names: list[str], data: st.DataObject
) -> None:
    """Parameters have filters of their own, at three levels; the names are any, also with numbers
    and brackets."""
    keys = ("weight", "density", "lambda")
    drawn = {(key, level): data.draw(CHOICES) for key in keys for level in ("one", "two", "file")}

    def write(key: str, level: str) -> list[dict[str, Any]]:
        entries = [{"filter": word, "value": value} for word, value in drawn[key, level]]
        return entries + ([{"value": 0.125}] if level == "file" else [])

    def expect(key: str, *levels: str) -> Any:
        listed = [(word, value) for level in levels for word, value in drawn[key, level]]
        return next((value for word, value in listed if word == "*" or word in name), 0.125)

    file = {
        "merge_method": "breadcrumbs",
        "base_model": "b",
        "parameters": {key: write(key, "file") for key in keys},
    }
    own = {m: {key: write(key, m) for key in ("weight", "density")} for m in ("one", "two")}
    file["models"] = [
        {"model": m, "parameters": {k: v for k, v in own[m].items() if v}} for m in own
    ]
    base = mock.MagicMock(tensors=dict.fromkeys(names))
    with mock.patch("darelib.requests.mergekit.open_models") as opened:
        opened.return_value.__enter__.return_value = [base]
        request = read(json.dumps(file))
    config = DareConfig(**request.dare, rules=request.rules)
    for name in names:
        _, made = Chooser(config, names, 2).choose(name, ())
        plain = DareConfig(
            drop="breadcrumbs",
            rescale="none",
            normalize=False,
            weights=[as_value(expect("weight", m, "file")) for m in ("one", "two")],
            drop_rate=[as_rate(expect("density", m, "file")) for m in ("one", "two")],
            lambda_coeff=as_value(expect("lambda", "file")),
        )
        assert asdict(made) == asdict(Chooser(plain, names, 2).choose(name, ())[1])


def as_value(value: Any) -> Any:
    return {"gradient": value} if isinstance(value, list) else value


def as_rate(value: Any) -> Any:
    return {"gradient": [1 - number for number in value]} if isinstance(value, list) else 1 - value


# --- through the front door


def test_a_file_runs_as_it_is_and_as_toml(folder: Path) -> None:
    """Paths are relative to the working directory, as mergekit has them, and in the TOML file to
    that file."""
    (folder / "sub").mkdir()
    text = (
        f"merge_method: dare_ties\n{MODELS}parameters:\n  density: [{{filter: mlp, value: [0.9, "
        f"0.1]}}, {{value: 0.5}}]"
    )
    (folder / "sub" / "merge.yml").write_text(
        text + "\n  rescale: false\ntokenizer_source: base\nout_dtype: bfloat16\n"
    )
    flags = ["-c", "sub/merge.yml", "-q", "--engine", "plain"]
    run(*flags, "-o", "out")
    run(*flags, "--write-config", "sub/merge.toml", "-o", "other")
    assert not (folder / "other").exists()
    run("-c", "sub/merge.toml", "--engine", "plain")
    assert_same(tensors_in(folder / "out"), tensors_in(folder / "other"))
    assert (folder / "out" / "dare_recipe.toml").read_text() == (
        folder / "other" / "dare_recipe.toml"
    ).read_text()
    run("verify", "out", "-q", "--engine", "plain")
    written = (folder / "sub" / "merge.toml").read_text()
    assert 'base_file = "../base"' in written
    assert "normalize = false" in written


def test_written_configurations(models: Models, tmp_path: Path, refused: Refusal) -> None:
    """Any configuration can be written, with the flags on top of it; nothing is overwritten."""
    text = "-q --seed 7 --rule *bias:drop_rate=0 --engine plain"
    flags = ["-b", models[0], "-m", models[1], *text.split()]
    written = tmp_path / "new.toml"
    run(*flags, "--write-config", written)
    run(*flags, "-o", tmp_path / "flags.safetensors")
    run("-c", written, "-q")
    made = [load_file(tmp_path / f"{name}.safetensors") for name in ("flags", "new_merged")]
    assert_same(*made)
    for words, path, named in (
        (flags, written, "exists already"),
        (flags, tmp_path / "new.yaml", ".toml"),
        (["analyze", *flags], tmp_path / "new.yaml", ".toml"),
        ([*flags, "--force"], models[1], "is the input"),
        ([*flags, "--force"], tmp_path / "no" / "x.toml", "no directory"),
    ):
        refused(2, named, *words, "--write-config", path)
    run(*flags, "--force", "--write-config", written)
    run(*flags, "-b", "a/b@v1", "--force", "--write-config", written)
    assert 'base_file = "a/b@v1"' in written.read_text()


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "linear"])
def test_weights_of_0_leave_the_bases_tensor(method: str, folder: Path, capsys: Capture) -> None:
    """By a filter or at the end of a gradient; that the base is part of an average is no reason for
    a warning."""
    base = load_file(folder / "base" / "model.safetensors")
    both = "[{filter: norm, value: 0.5}, {filter: lm_head, value: 0}, {value: [0, 0.5]}]"
    text = (
        f"merge_method: {method}\nbase_model: base\nmodels: [{{model: one}}, {{model: two}}, "
        f"{{model: base, parameters: {{weight: 0.1}}}}]\nparameters: {{weight: {both}}}"
    )
    (folder / "m.yaml").write_text(text)
    run("-c", "m.yaml", "-o", "out", "-q", "--engine", "plain")
    assert "is the base itself" not in capsys.readouterr().err
    made = tensors_in(folder / "out")
    kept = {name for name in base if made[name].equal(base[name])}
    assert kept == {
        name for name in base if "norm" not in name and ("layers" not in name or "layers.0" in name)
    }


@pytest.mark.parametrize(
    ("words", "flags", "expected"),
    [
        ("auto", "", "{{ b }}"),
        ("'{% c %}{{ d }}'", "", "{% c %}{{ d }}"),
        ("chatml", "", TEMPLATES["chatml"]),
        ("llama3", "", TEMPLATES["llama3"]),
        ("auto", "--chat-template chatml", TEMPLATES["chatml"]),
        ("auto", "--chat-template llama3", "{{ mine }}"),
    ],
)
def test_chat_templates_of_files_and_flags(
    folder: Path, words: str, flags: str, expected: str
) -> None:
    """auto is what most models have; a text is itself. To a flag, and in TOML, a file of that name
    is that file; mergekit's file means its template anyway."""
    for name, template in (("base", "{{ a }}"), ("one", "{{ b }}"), ("two", "{{ b }}")):
        (folder / name / "tokenizer.json").write_text("{}")
        (folder / name / "chat_template.jinja").write_text(template)
    (folder / "llama3").write_text("{{ mine }}")
    text = f"merge_method: task_arithmetic\n{MODELS}chat_template: {words}\n"
    (folder / "m.yaml").write_text(text)
    run("m.yaml", "out", "-q", *flags.split())
    run("-c", "m.yaml", "-q", "--write-config", "m.toml", *flags.split())
    run("m.toml", "again", "-q")
    for name in ("out", "again"):
        assert (folder / name / "chat_template.jinja").read_text() == expected
    run("verify", "out", "-q")


# --- files as people publish them, over tiny models

# By what is special about each. The names are those of the models in the zoo.
PUBLISHED = {
    "dare_ties with three models": """
models:
  - model: base
    # No parameters necessary for base model
  - model: one
    parameters:
      density: 0.53
      weight: 0.4
  - model: two
    parameters:
      density: 0.53
      weight: 0.3
  - model: three
    parameters:
      density: 0.53
      weight: 0.3
merge_method: dare_ties
base_model: base
parameters:
  int8_mask: true
dtype: bfloat16
""",
    "slerp with filters of t": """
slices:
  - sources:
      - model: one
        layer_range: [0, 4]
      - model: two
        layer_range: [0, 4]
merge_method: slerp
base_model: one
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
dtype: bfloat16
""",
    "slerp of models": """
models:
  - model: one
  - model: two
merge_method: slerp
base_model: two
dtype: float16
parameters:
  t: [0, 0.5, 1, 0.5, 0] # V shaped curve
""",
    "ties with a mask in 8 bits": """
models:
  - model: one
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: two
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: three
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: base
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
    "task arithmetic that takes something away": """
base_model: base
models:
  - model: one
    parameters: {weight: 1.0}
  - model: two
    parameters: {weight: -0.5}
merge_method: task_arithmetic
dtype: float32
""",
    "breadcrumbs": """
models:
  - model: one
    parameters:
      weight: 0.65
      density: 0.9
      gamma: 0.01
  - model: two
    parameters: {weight: 0.35, density: 0.9, gamma: 0.03}
merge_method: breadcrumbs
base_model: base
parameters: {normalize: false, lambda: 1.1}
""",
    "breadcrumbs_ties, words for numbers": """
merge_method: breadcrumbs_ties
base_model: base
models:
  - {model: one, parameters: {weight: "0.3", density: "0.8"}}
  - {model: two, parameters: {weight: 3e-1}}
parameters: {gamma: "1e-2", normalize: "true"}
""",
    "della": """
models:
  - model: one
    parameters:
      weight: 1
      density: 0.5
      epsilon: 0.1
  - model: two
    parameters: {weight: 0.5, density: 0.6}
merge_method: della
base_model: base
parameters:
  epsilon: 0.05
  lambda: 1
tokenizer_source: base
""",
    "della_linear": """
merge_method: della_linear
base_model: base
dtype: bfloat16
parameters: {epsilon: 0.1, lambda: 1.0, normalize: true, int8_mask: true}
models:
  - {model: one, parameters: {weight: [0.3, 0.7], density: [0.4, 0.6]}}
  - {model: two, parameters: {weight: 0.5, density: 0.5}}
""",
    "dare_linear without a rescale": """
merge_method: dare_linear
base_model: base
models:
  - {model: one, parameters: {weight: 0.5, density: 0.6}}
  - {model: two, parameters: {weight: 0.5, density: 0.6}}
parameters: {rescale: false}
""",
    "a linear soup": """
models:
  - model: one
    parameters:
      weight: 1.0
  - model: two
    parameters:
      weight: 0.3
merge_method: linear
dtype: float16
""",
    "linear with all tokens": """
merge_method: linear
models: [{model: base, parameters: {weight: 0.2}}, {model: one, parameters: {weight: 0.8}}]
tokenizer_source: union
parameters: {normalize: true}
""",
    "linear in one slice": """
slices:
- sources:
  - {model: one, layer_range: [0, 4], parameters: {weight: 0.6}}
  - {model: two, layer_range: [0, 4], parameters: {weight: 0.4}}
merge_method: linear
dtype: float32
""",
    "ram": """
merge_method: ram
base_model: base
models: [{model: one}, {model: two}]
""",
    "a module, as mergekit writes it": """
base_model: base
dtype: float32
merge_method: ties
modules:
  default:
    slices:
    - sources:
      - layer_range: [0, 4]
        model: one
        parameters:
          density: 0.5
          weight: 0.5
      - layer_range: [0, 4]
        model: base
parameters:
  int8_mask: 1.0
  normalize: 1.0
out_dtype: bfloat16
tokenizer: {source: base}
""",
    "a chat template and a tokenizer of a model": """
merge_method: task_arithmetic
base_model: base
models: [{model: one, parameters: {weight: 0.5}}]
tokenizer_source: one
chat_template: chatml
""",
    "a tokenizer with nothing special": """
merge_method: dare_ties
base_model: base
models: [{model: one, parameters: {weight: 0.5, density: 0.4}}]
tokenizer: {source: union, tokens: {}, pad_to_multiple_of: null}
chat_template: auto
""",
    "what a card says": """
license: apache-2.0
tags: [merge, mergekit]
merge_method: ties
base_model: base
models:
  - model: one
    parameters:
  - model: two
    name: the second
parameters: {weight: 0.5, density: 0.5}
random_seed: 0
trust_remote_code: true
""",
    "a method in a slice": """
slices:
  - sources: [{model: base, layer_range: [0, 2]}, {model: one, layer_range: [0, 2]}]
    merge_method: slerp
  - sources: [{model: base, layer_range: [2, 4]}, {model: one, layer_range: [2, 4]}]
    parameters: {t: 0.9}
merge_method: slerp
base_model: base
parameters: {t: 0.2}
""",
    "weight and density by filter": """
merge_method: ties
base_model: base
models:
  - model: one
    parameters:
      weight: [{filter: mlp, value: [0.1, 0.9]}, {filter: self_attn, value: 0.4}, {value: 0.2}]
      density: [{filter: lm_head, value: 1}, {filter: "*", value: 0.6}]
  - model: two
parameters: {weight: 0.3, density: 0.2}
""",
    "one reference many ways": """
merge_method: task_arithmetic
base_model: {model: {path: base}}
models:
  - model: {model: {path: one}}
    parameters: {weight: 0.2}
  - model: {model: two}
    parameters: {weight: 0.2}
""",
    "the base listed with parameters": """
merge_method: ties
base_model: base
models:
  - {model: base, parameters: {weight: 1, density: 1}}
  - {model: one, parameters: {weight: 0.5, density: 0.5}}
""",
    "weights for the file": """
merge_method: dare_linear
base_model: base
models: [{model: one}, {model: two}, {model: three}]
parameters: {weight: 0.33, density: 0.26}
dtype: torch.bfloat16
""",
    "anchors": """
merge_method: ties
base_model: base
models:
  - {model: one, parameters: &usual {weight: 0.5, density: 0.5}}
  - {model: two, parameters: *usual}
  - {model: three, parameters: {<<: *usual, weight: 0.1}}
""",
    "model_stock with parameters of other methods": """
models:
  - model: one
    parameters: {weight: 1.0}
  - model: two
base_model: base
merge_method: model_stock
parameters: {normalize: false, int8_mask: true}
dtype: bfloat16
tokenizer_source: base
""",
    "arcee_fusion with weights": """
merge_method: arcee_fusion
base_model: base
models: [{model: base}, {model: one, parameters: {weight: 0.5}}]
parameters: {normalize: true}
out_dtype: bfloat16
""",
    "sce, select_topk and a padded union": """
merge_method: sce
base_model: base
models: [{model: one}, {model: two}, {model: three}]
parameters: {select_topk: 0.3, normalize: true, lambda: 1.0}
int8_mask: true
tokenizer: {source: union, pad_to_multiple_of: 4}
chat_template: auto
""",
    "multislerp": """
merge_method: multislerp
models:
  - {model: one, parameters: {weight: 0.6}}
  - {model: two, parameters: {weight: 0.4}}
parameters: {normalize: true}
tokenizer_source: one
""",
    "nuslerp": """
merge_method: nuslerp
base_model: base
models:
  - {model: one, parameters: {weight: [{filter: self_attn, value: [0.2, 0.8]}, {value: 0.5}]}}
  - {model: two, parameters: {weight: 0.5}}
parameters: {int8_mask: true, nuslerp_row_wise: false}
""",
    "slerp with normalize": """
merge_method: slerp
base_model: base
slices:
  - sources:
      - {model: base, layer_range: [0, 4], parameters: {int8_mask: true}}
      - {model: two, layer_range: [0, 4]}
    parameters: {int8_mask: true}
parameters: {t: 0.4, normalize: true, int8_mask: true}
""",
    "passthrough that stacks layers": """
slices:
  - sources: [{model: one, layer_range: [0, 3]}]
  - sources: [{model: two, layer_range: [1, 4], parameters: {scale: 0.5, weight: 1}}]
merge_method: passthrough
parameters: {normalize: true}
dtype: float16
""",
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of four layers and three fine-tunes of it, all with one tokenizer."""
    folder = tmp_path_factory.mktemp("zoo")
    words = {f"w{number}": number for number in range(12)}
    added = {"id": 11, "content": "w11", "special": True}
    names = ("base", "one", "two", "three")
    for name, tensors in zip(names, make_models(3, F32, SHAPES), strict=True):
        save_directory(folder / name, tensors, model_type="llama", vocab_size=12)
        table = {"added_tokens": [added], "model": {"vocab": words}}
        (folder / name / "tokenizer.json").write_text(json.dumps(table))
        (folder / name / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("what", PUBLISHED)
def test_files_as_they_are_published_run(
    what: str, zoo: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(zoo)
    (tmp_path / "merge.yaml").write_text(PUBLISHED[what])
    run(tmp_path / "merge.yaml", tmp_path / "out", "-q", "--engine", "plain")
    made = tensors_in(tmp_path / "out")
    base = load_file(zoo / "base" / "model.safetensors")
    assert made.keys() >= base.keys()
    assert any(not made[name].equal(base[name]) for name in base)


def test_a_padded_vocabulary_has_rows_of_the_mean(
    zoo: Path, tmp_path: Path, monkeypatch: Patch, refused: Refusal
) -> None:
    monkeypatch.chdir(zoo)
    text = "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: one}, {model: two}]\n"
    text += "parameters: {weight: 0.5}\ntokenizer: {source: base, pad_to_multiple_of: 5}\n"
    (tmp_path / "merge.yaml").write_text(text)
    flags = ("-q", "--engine", "plain")
    run(tmp_path / "merge.yaml", tmp_path / "out", *flags)
    made = tensors_in(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert made[name].shape == (15, 8)
        expected = made[name][:12].mean(0).expand(3, 8)
        torch.testing.assert_close(made[name][12:], expected, rtol=1e-5, atol=1e-7)
    assert read_json(tmp_path / "out" / "config.json")["vocab_size"] == 15
    run("-c", tmp_path / "merge.yaml", "-q", "--write-config", tmp_path / "merge.toml")
    run("-c", tmp_path / "merge.toml", "-o", tmp_path / "again", *flags)
    assert_same(tensors_in(tmp_path / "again"), made)
    run("verify", tmp_path / "out", *flags)
    words = ("-b", "base", "-m", "one", "-o", tmp_path / "no", "--pad-vocabulary", 5)
    refused(1, ("pad_vocabulary needs the tokens", "--tokenizer union"), *words)


@pytest.mark.parametrize("trims", [False, True])
def test_chat_templates_render_their_formats(trims: bool) -> None:
    """Whether lines that hold nothing but a tag are left out, as transformers does, or not."""
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=trims, lstrip_blocks=trims)
    talk = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]

    def render(name: str) -> str:
        return environment.from_string(TEMPLATES[name]).render(
            messages=talk, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )

    assert (
        render("chatml")
        == "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in talk)
        + "<|im_start|>assistant\n"
    )
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    turns = [header.format(each["role"]) + f"{each['content']}<|eot_id|>" for each in talk]
    assert render("llama3") == "<s>" + "".join(turns) + header.format("assistant")
    assert render("mistral") == "<s> [INST] s\n\nu [/INST] a</s> [INST] u [/INST]"
    assert render("alpaca") == (
        "s\n\n### Instruction:\nu\n\n### Response:\na\n\n### Instruction:\nu\n\n### Response:\n"
    )
    assert render("exaone") == (
        "[|system|]s[|endofturn|]\n[|user|]u\n[|assistant|]a[|endofturn|]\n[|user|]u\n[|assistant|]"
    )


# --- what is refused


def write_slices(method: str, *slices: list[str]) -> str:
    """A file whose slices have sources like "one[0, 2]"."""
    text = f"merge_method: {method}\nbase_model: base\nslices:\n"
    for sources in slices:
        pairs = [source.partition("[") for source in sources]
        listed = [f"{{model: {model}, layer_range: [{layers}}}" for model, _, layers in pairs]
        text += f"- sources: [{', '.join(listed)}]\n"
    return text if method != "ties" else f"{text}parameters: {{weight: 1}}\n"


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be a mapping"),
        ("[1]", "must be a mapping"),
        ("a: b: c", "mapping values are not allowed"),
        ("merge_method: linar\n" + MODELS, "merge_method: this tool has no 'linar'"),
        (
            "merge_method: passthrough\nmodels: [{model: one}, {model: two}]",
            "models: passthrough takes one model, not 2",
        ),
        (MODELS, "merge_method: "),
        ("merge_method: ties", "either models or slices"),
        ("merge_method: ties\nslices: []\nmodels: null", "either models or slices"),
        ("merge_method: ties\nmodels: one", "models: "),
        ("merge_method: ties\nmodels: [one]", "models[0]: "),
        ("merge_method: ties\nmodels: [{parameters: {}}]", "models[0].model: "),
        ("merge_method: ties\nmodels: [{model: 3}]", "models[0].model: '3'"),
        ("merge_method: ties\nmodels: [{model: a+b+c}]", "models[0].model: 'a+b+c'"),
        ("merge_method: ties\nmodels: [{model: a@b@c}]", "'a@b@c'"),
        ("merge_method: ties\nmodels: [{model: a+}]", "''"),
        ("merge_method: ties\nmodels: [{model: one}]", "base_model: "),
        (
            "merge_method: multislerp\nbase_model: base\nmodels: [{model: base}]",
            "merges at least 1, not 0",
        ),
        (
            "merge_method: slerp\nbase_model: base\nmodels: [{model: one}, {model: two}]",
            "merges 1, not 2",
        ),
        (f"{TIES}".replace("model: two", "model: one"), "models[1]: 'one' is there twice"),
        (f"{TIES}lamda: 1", "'lamda'"),
        (f"{TIES}parameters: {{license: 1}}".replace("license", "dype"), "dype"),
        (f"{TIES}modules: {{a: {{}}, b: {{}}}}", "modules"),
        (f"{TIES}parameters: {{density: 0}}", "nothing would be merged"),
        (f"{TIES}parameters: {{density: -0.1}}", "density: "),
        (f"{TIES}parameters: {{density: [0.5, 1.5]}}", "density: "),
        (f"{TIES}parameters: {{lambda: yes}}", "lambda: "),
        (f"{TIES}parameters: {{lambda: .inf}}", "lambda: "),
        (f"{TIES}parameters: {{lambda: x}}", "lambda: "),
        (f"{TIES}parameters: {{lambda: [[1]]}}", "lambda: "),
        (f"{TIES}parameters: {{normalize: 2}}", "normalize: "),
        (f"{TIES}parameters: {{normalize: [true, false]}}", "normalize: "),
        (f"{TIES}parameters: {{lambda: [1, {{value: 1}}]}}", "lambda: "),
        (f"{TIES}parameters: {{lambda: {{value: 1, if: x}}}}", "'if'"),
        (f"{TIES}parameters: {{lambda: {{value: 1, filter: 3}}}}", "filter must be a word"),
        (f"{TIES}parameters: {{lambda: {{filter: mlp}}}}", "lambda: "),
        ("merge_method: ties\nbase_model: base\nmodels: [{model: one}]", "weight of 'one': "),
        (
            (
                "merge_method: ties\nbase_model: base\nmodels: [{model: one, parameters: {weight: "
                "{value: 1, filter: mlp}}}]"
            ),
            "weight of 'one': there is no value for '",
        ),
        ("merge_method: slerp\nbase_model: base\nmodels: [{model: one}]", "t: "),
        (
            "merge_method: slerp\nbase_model: base\nmodels: [{model: one}]\nparameters: {t: 1.5}",
            "slerp_t must be",
        ),
        (f"{STOCK}[{{model: one}}]", "besides the base, model_stock merges at least 2, not 1"),
        (
            f"{STOCK}[{{model: one}}, {{model: two}}]\nparameters: {{filter_wise: true}}",
            "False here",
        ),
        (f"merge_method: nuslerp\n{MODELS}parameters: {{nuslerp_flatten: no}}", "True here"),
        (
            "merge_method: nuslerp\nmodels: [{model: one, parameters: {weight: 1}}]",
            "nuslerp merges 2, not 1",
        ),
        (f"{KARCHER}max_iter: [1, 5]}}", "max_iter must be a whole number"),
        (f"{KARCHER}max_iter: [{{filter: mlp, value: 2}}, {{value: 5}}]}}", "no key 'max_iter'"),
        (f"{TIES}dtype: int8", ": dtype: "),
        (f"{TIES}dtype: float32\nout_dtype: int8", ": out_dtype: "),
        (f"{TIES}tokenizer_source: base\ntokenizer: {{source: base}}", "also a tokenizer_source"),
        (
            f"{TIES}tokenizer: {{source: base, pad_to_multiple_of: 0.5}}",
            "tokenizer.pad_to_multiple_of must be a whole number from 1 to 65536, not 0.5",
        ),
        (f"{TIES}tokenizer: {{source: base, tokens: {{x: {{}}}}}}", "tokens"),
        (f"{TIES}tokenizer: {{source: 3}}", "tokenizer: '3'"),
        (f"{TIES}parameters:\n\tlambda: 1", "indented with spaces, not with tabs"),
        (f"{TIES}chat_template: chatlm", "'chatlm' is neither the name"),
        (f"{TIES}chat_template: [1]", "chat_template"),
        (f"{TIES}---\nmerge_method: ties", "document 2: models: "),
        (f"{TIES}tokenzer_source: base", "did you mean tokenizer_source? (--l"),
        (f"{SLERP}[{{model: two}}]\nembed_slerp: true", "there is no key 'embed_slerp'"),
        (
            f"{TIES}parameters: {{nomalize: 1}}",
            "did you mean normalize? (--lenient ignores it, as mergekit does)",
        ),
        (
            "base_model: base\ngate_mode: hidden\nexperts: [{source_model: one}]",
            "mergekit-moe makes mixtures of experts",
        ),
        (
            f"merge_method: ties\nmerge_method: dare_ties\n{MODELS}",
            "the key 'merge_method' is there 2 times (line 1)",
        ),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: &x [*x]", "more than 50,000 values"),
        ("a: *x", "undefined alias"),
        ("[" * 1000, "recursion"),
        ("? [a, b]\n: c", "key"),
        ("a: \x07", "special characters"),
        ("a: 0x" + "9" * 5000, "has 5,002 digits"),
        ("a: " + "x" * (1 << 18), "longer than 262,144 bytes"),
        ("a: 2020-13-45", "month"),
        ("a: !!bool maybe", "cannot be read"),
        ("a: !!timestamp nope", "cannot be read"),
        ('a: !!int ""', "cannot be read"),
        (f'merge_method: ties\n{MODELS}\ntokenizer_source: "\\ud800"', "half of a surrogate pair"),
        (BOMB, "aliases written out, it holds more than 50,000 values"),
        slow("a: [" + "1," * 60_000 + "]", "more than 50,000 values"),
        (b"\xff\xfe", "YAML"),
        (write_slices("ties", ["one[0, 2]", "two[1, 2]"]), "layers, or none: [[0, 2], [1, 2]]"),
        (write_slices("ties", ["one[2, 0]"]), "different numbers of layers, or none"),
        (
            write_slices("ties", ["one[0, 2]", "two[2, 4]"]),
            "the base 'base' is not a source, and the sources have different layers",
        ),
        (write_slices("ties", ["one[0, 4, 5]"]), "layer_range must be two whole numbers"),
        (write_slices("ties", ["one[-1, 4]"]), "two whole numbers"),
        (write_slices("ties", ["one[0, 2]"], []), "slices[1].sources: it must be a list"),
        (
            write_slices("ties", ["one[0, 2]"]).replace("base_model: base", ""),
            "base_model: it is missing",
        ),
        (write_slices("ram", ["one[0, 2]"], ["one[2, 4]", "two[2, 4]"]), "models: [1, 2]"),
        (write_slices("passthrough", ["one[2, 4]", "two[2, 4]"]), "takes one model, not 2"),
    ],
)
def test_what_is_refused(check: Refusal, text: str | bytes, complaint: str) -> None:
    check(text, complaint)


@pytest.mark.parametrize(
    ("base", "layers", "complaint"),
    [
        ("base", "[2, 5]", "'base' has 4 layers, so there is no layer 4"),
        ("base", "[2, 2]", "would have no layers"),
        ("two_stacks", "[0, 1]", "'two_stacks' has 2 stacks of layers"),
    ],
)
def test_layers_that_models_lack_are_refused(
    refused: Refusal, folder: Path, base: str, layers: str, complaint: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"encoder.0.w": (4, 4), "decoder.0.w": (4, 4)}
    save(folder / "two_stacks", model=random_model(0, F32, shapes))
    text = write_slices("ties", [f"one{layers}"]).replace("base_model: base", f"base_model: {base}")
    (folder / "merge.yaml").write_text(text)
    refused(1, complaint, "-c", "merge.yaml", "-o", "out")
