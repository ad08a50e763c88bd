"""Hugging Face: models by their name on the Hub, from a cache of it on this machine; merged
directories in transformers."""

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from darelib.commands.analyze import measure as analyze_measure
from tests.scene import contents
from tests.support import (
    BF16,
    F32,
    FAMILIES,
    INDEX,
    Capture,
    Patch,
    Refusal,
    assert_same,
    command,
    define,
    family_model,
    finetune,
    low_rank,
    make_models,
    merge_paths,
    run,
    run_merge,
    save_directory,
    save_sharded,
    tensors_in,
    to_hub_cache,
    write_adapter,
)

COMMITS = {"base": "b" * 40, "math": "c" * 40}
PINNED = {name: f"org/{name}@{commit}" for name, commit in COMMITS.items()}
BASE, MATH = make_models(1, BF16)


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: Patch) -> list[Path]:
    """org/base and org/math in a cache of the Hub, which is all there is of it; tmp_path is where
    we are."""
    base = save_sharded(tmp_path / "made" / "base", BASE, [[name] for name in BASE])
    (base / "tokenizer.json").write_text("{}")
    save_sharded(tmp_path / "made" / "math", MATH, [list(MATH)])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "made"
    return [
        to_hub_cache(tmp_path / "hub", f"org/{name}", made / name, COMMITS[name])
        for name in COMMITS
    ]


def merge_by_name(base: str, model: str, *flags: str) -> Path:
    run("-q", "-b", base, "-m", model, "-o", "out", *flags)
    return Path("out")


def test_shards_may_be_links_that_lead_somewhere(
    tmp_path: Path, snapshots: list[Path], check_refused: Refusal
) -> None:
    base, math = snapshots
    assert_same(merge_paths(base, [math / INDEX], tmp_path / "out"), define(BASE, [MATH]))
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    (math / "model-00001-of-00001.safetensors").resolve().unlink()
    check_refused(base, math, "lacks its file 'model-00001-of-00001.safetensors'")


def test_models_are_found_by_name_and_recipes_pin_their_commits(
    tmp_path: Path, snapshots: list[Path]
) -> None:
    out = merge_by_name("org/base", PINNED["math"], "--tokenizer", "org/base@main")
    assert_same(tensors_in(out), define(BASE, [MATH]))
    assert (out / "tokenizer.json").read_text() == "{}"
    models = tomllib.loads((out / "dare_recipe.toml").read_text())["models"]
    assert (models["base_file"], models["merge_files"]) == (PINNED["base"], [PINNED["math"]])
    assert models["tokenizer"] == PINNED["base"]
    # The recipe makes the same again, from anywhere, as the user runs it.
    (tmp_path / "elsewhere").mkdir()
    kept = {key: os.environ[key] for key in os.environ if not key.startswith(("HF_", "HUGGING"))}
    environment = {**kept, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    arguments = ("-q", "-c", "../out/dare_recipe.toml", "-o", "again")
    done = command(*arguments, env=environment, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "elsewhere" / "again") == contents(out)


@pytest.mark.parametrize(
    ("name", "revision", "status"),
    [
        ("org/base", None, 0),
        ("org/base", COMMITS["base"], 0),
        ("org/base", "other", 2),
        ("org/none", None, 2),
        ("org/shell", None, 2),  # of which only the configuration was needed so far
    ],
)
def test_the_base_that_an_adapter_names_is_taken_from_the_cache_alone(
    tmp_path: Path,
    snapshots: list[Path],
    monkeypatch: Patch,
    capsys: Capture,
    name: str,
    revision: str | None,
    status: int,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", asked := Mock(side_effect=OSError))
    shell = save_directory(tmp_path / "made" / "shell", {}, model_type="llama")
    (shell / "model.safetensors").unlink()
    to_hub_cache(tmp_path / "hub", "org/shell", shell, "d" * 40)
    tensors = low_rank("layer", tuple(BASE["layer.weight"].shape))
    write_adapter(tmp_path / "adapter", tensors, base_model_name_or_path=name, revision=revision)
    run("-m", "adapter", "-o", "out", "--engine", "plain", status=status)
    words = "nor in the cache" if status else f"base: {name}"
    assert words in capsys.readouterr().err
    if status == 0:
        recipe = tomllib.loads(Path("out", "dare_recipe.toml").read_text())
        assert recipe["models"]["base_file"] == PINNED["base"]
    asked.assert_not_called()


def test_parts_may_each_have_a_cache_of_their_own(
    tmp_path: Path, snapshots: list[Path], monkeypatch: Patch
) -> None:
    """As machines do that share no cache: what was downloaded by one has other times, and perhaps
    another place."""
    flags = ("org/base", "org/math", "--max-shard-size", "6kB", "--engine", "plain")
    merge_by_name(*flags, "--part", "1/2")
    for name, commit in COMMITS.items():
        to_hub_cache(tmp_path / "another", f"org/{name}", tmp_path / "made" / name, commit)
    for path in (tmp_path / "another").rglob("*.safetensors"):
        os.utime(path, (1, 1))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "another"))
    merge_by_name(*flags, "--part", "2/2")
    assert_same(tensors_in(merge_by_name(*flags, "--resume")), define(BASE, [MATH]))


def test_a_path_beats_a_name_on_the_hub(tmp_path: Path, snapshots: list[Path]) -> None:
    save_directory(tmp_path / "org" / "math", finetune(BASE, 8))
    assert_same(
        tensors_in(merge_by_name("org/base", "org/math")), define(BASE, [finetune(BASE, 8)])
    )


@pytest.mark.parametrize("name", ["org/absent", "org/math@nightly", "made/mth"])
def test_a_name_that_the_hub_does_not_have_is_one_error(
    snapshots: list[Path], check_refused: Refusal, name: str
) -> None:
    complaint = (
        f"error: there is no file or directory {name!r}, and the Hugging Face Hub does not give"
    )
    hints = (
        ("did you mean made/math?",) if name == "made/mth" else ("hint: looked for ", "HF_TOKEN")
    )
    assert len(check_refused("org/base", name, complaint, *hints).splitlines()) == 2


def test_that_there_is_no_connection_is_said(
    snapshots: list[Path], check_refused: Refusal, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=OSError))
    said = check_refused("org/base", "org/new", "there is no connection to the Hugging Face Hub")
    assert "Got" not in said


def test_without_the_hubs_library_the_extra_is_named(
    pair: tuple[Path, Path], tmp_path: Path, check_refused: Refusal, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    check_refused(pair[0], "org/name@main", "directory 'org/name@main'", "need huggingface_hub")
    for name in ("org/name.safetensors", "org/model.json", "a/b/c", "../org/name", "org/name@"):
        error = check_refused(name, pair[1], f"no file or directory {name!r}")
        assert "huggingface_hub" not in error, "which no name on the Hub looks like"


@pytest.mark.slow  # it imports Optuna, and searches
def test_branches_that_move_during_a_sweep_or_an_analysis_change_nothing_of_it(
    tmp_path: Path, snapshots: list[Path], monkeypatch: Patch
) -> None:
    for snapshot in snapshots:
        shutil.copytree(snapshot, snapshot.with_name("d" * 40), symlinks=True)

    def move(commits: dict[str, str]) -> None:
        for name, commit in commits.items():
            (tmp_path / "hub" / f"models--org--{name}" / "refs" / "main").write_text(commit)

    def measure(*arguments: Any) -> Any:
        move(dict.fromkeys(COMMITS, "d" * 40))
        return measure_deltas(*arguments)

    Path("moves.py").write_text(
        "from pathlib import Path\ndef score(path):\n"
        "    for branch in Path('hub').glob('*/refs/main'): branch.write_text('d' * 40)\n"
        "    return 1.0\n"
    )
    models = ("-b", "org/base", "-m", "org/math", "--tokenizer", "org/base", "--engine", "plain")
    search = ("--vary", "drop_rate=[0.1, 0.5]", "--search", "grid")
    run("sweep", "-q", *models, *search, "--evaluate", "moves.py:score", "--keep-models", "kept")
    move(COMMITS)
    measure_deltas = analyze_measure.measure_deltas
    monkeypatch.setattr(analyze_measure, "measure_deltas", measure)
    run("analyze", "-q", *models, "--write-config", "advice.toml")
    written = [
        Path("merge_best.toml"),
        Path("advice.toml"),
        *Path("kept").rglob("dare_recipe.toml"),
    ]
    assert len(written) == 2 + 3
    for path in written:
        named = tomllib.loads(path.read_text())["models"]
        assert (named["base_file"], named["merge_files"]) == (PINNED["base"], [PINNED["math"]])
        assert named["tokenizer"] == PINNED["base"]


# --- among Hugging Face's tools -------------------------------------------------------------------

LOADED = [(family, dtype) for family in FAMILIES if family != "t5" for dtype in (BF16, F32)]


def save_family(folder: Path, family: str, dtype: torch.dtype = F32, **shards: str) -> list[Path]:
    """A base and two fine-tunes as transformers saves them, with the given sizes of shards."""
    model = family_model(family, dtype)
    paths = []
    for seed, name in enumerate(("base", "math", "code")):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters() if seed else ():
                parameter += (torch.randn(parameter.shape, generator=generator) * 0.001).to(dtype)
        paths.append(folder / name)
        model.save_pretrained(paths[-1], max_shard_size=shards.get(name, "5GB"))
    return paths


@pytest.mark.slow  # importing transformers takes longer than most of the suite
@pytest.mark.parametrize(("family", "dtype"), LOADED)
def test_a_merged_directory_loads_in_transformers_and_runs(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    import transformers

    base, *models = save_family(tmp_path, family, dtype, math="9KB")
    report = run_merge(base, models, tmp_path / "merged", max_shard_size="5kB")
    run_merge(base, models, tmp_path / "merged.safetensors")
    assert len(report.files) > 1
    assert_same(tensors_in(tmp_path / "merged"), load_file(tmp_path / "merged.safetensors"))
    loaded, info = getattr(transformers, FAMILIES[family][0]).from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.dtype == dtype
    assert bool(loaded(torch.arange(8)[None]).logits.isfinite().all())
    # What transformers saves again is what we wrote, under the same names, in as many bytes.
    loaded.save_pretrained(tmp_path / "again", max_shard_size="5KB")
    assert_same(tensors_in(tmp_path / "again"), load_file(tmp_path / "merged.safetensors"))
    ours, theirs = (
        json.loads((tmp_path / name / INDEX).read_text()) for name in ("merged", "again")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
