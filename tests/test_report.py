"""What a person sees: plans, estimates, reports, warnings, JSON, colours and progress."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dare
from dare import DareConfig, DareError, DareMerger
from darelib.core.mask import keep_rate
from darelib.core.text import human
from darelib.run.worker import Worker
from tests.support import (
    BF16,
    F16,
    HERE,
    Capture,
    Config,
    Models,
    Patch,
    Refusal,
    Tensors,
    finetune,
    low_rank,
    make_models,
    mask,
    random_model,
    run,
    run_merge,
    save,
    save_directory,
    save_models,
    save_sharded,
    slow,
    snapshot,
    tune,
    write_adapter,
)

OUT = Path("out.safetensors")
MERGE = ["-b", "base.safetensors", "-m", "math.safetensors", "-o", str(OUT)]
# Settings, and how often a tensor is looked at before it is merged by them.


@pytest.fixture(autouse=True)
def at_the_models(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def merge(base: Tensors, *models: Tensors, **config: Any) -> dare.MergeReport:
    paths = save(Path(), base=base, **{f"m{i}": model for i, model in enumerate(models)})
    return run_merge(paths[0], paths[1:], OUT, **config)


def test_the_report_has_the_figures_of_each_model() -> None:
    base = random_model()
    first = finetune(base, 1)
    second = finetune(base, 2, size=0.01)
    del second["layer.bias"]
    report = merge(base, first, second | {"adapter": torch.ones(3)}, seed=5)
    for k, (model, tensors) in enumerate(zip(report.models, (first, second), strict=True)):
        deltas = torch.cat([(tensors[n] - base[n]).ravel() for n in base if n in tensors]).abs()
        masks = [mask(5 + k, n, base[n].numel(), 0.9) for n in base if n in tensors]
        exact = {
            "name": f"m{k}.safetensors",
            "seed": 5 + k,
            "parameters": len(deltas),
            "exact_drop_rate": 1 - keep_rate(0.9),
            "dropped_share": 1 - np.concatenate(masks).mean(),
            "largest_delta": deltas.max().item(),
            "share_above_threshold": (deltas > 0.002).double().mean().item(),
            "missing_tensors": ("layer.bias",) if k else (),
            "extra_tensors": ("adapter",) if k else (),
        }
        assert {name: getattr(model, name) for name in exact} == exact
        assert model.mean_delta == pytest.approx(deltas.double().mean().item(), rel=1e-5)
    assert (report.tensors, report.bytes_written) == (4, OUT.stat().st_size)
    assert report.bytes_read == 3 * sum(t.nbytes for t in base.values()) - base["layer.bias"].nbytes


def test_no_figure_depends_on_the_number_of_threads(monkeypatch: Patch) -> None:
    # So that no two orders of adding them up agree.
    sizes = torch.logspace(-12, 3, 64 * 1024).flip(0)
    base = {"w": torch.zeros(64 * 1024)}
    tune(job_elements=1024, min_chunk=1024, max_chunk=1024)
    run = Worker.run
    monkeypatch.setattr(
        Worker, "run", lambda *given: time.sleep(0.002 * (given[1].order % 3 == 0)) or run(*given)
    )
    reports = [
        merge(base, {"w": sizes}, {"w": sizes.sqrt()}, threads=threads, engine="plain").to_dict()
        for threads in (1, 2, 7)
    ]
    assert [report | {"seconds": 0} for report in reports] == [reports[0] | {"seconds": 0}] * 3


def test_the_report_prints_as_a_table(models: Models) -> None:
    tune(least_for_rate=1000)
    rules = [{"match": "head*", "drop_rate": 0.5}]
    settings = {"drop": ["random", "magnitude"], "drop_rate": [0.9, 0.8], "rules": rules}
    report = run_merge(models[0], models[1:], OUT, method="ties", lambda_coeff=0.5, **settings)
    heads, first, second, setting, summary = str(report).splitlines()
    count = {name: tensor.numel() for name, tensor in load_file(models[0]).items()}
    dropped = 0.5 * count.pop("head.weight")
    total = sum(count.values()) + 2 * dropped
    assert heads.split()[:3] == ["model", "seed", "parameters"]
    for line, path, rate in zip((first, second), models[1:], (0.9, 0.8), strict=True):
        exact = (rate * (total - 2 * dropped) + dropped) / total
        by = " by magnitude" if rate == 0.8 else ""
        assert line.startswith(str(path))
        assert f"  {rate:g}{by} ({exact:.3g} in all)" in line
    assert "ties, lambda 0.5" in setting
    assert re.search(rf"into {OUT}: 4 tensors, .* in {report.seconds:.2f} s \(.*/s\)$", summary)
    tune(least_for_rate=10**9)
    assert not re.search(r"in all|copied|/s\)", str(run_merge(models[0], models[1:], OUT)))


def test_what_changes_over_the_layers_is_shown_as_that() -> None:
    shapes = {f"layers.{k}.weight": (8, 8) for k in range(3)}
    paths = save_models(Path(), make_models(2, shapes=shapes))
    settings: Config = {
        "lambda_coeff": {"gradient": [0, 2]},
        "weights": [1, {"gradient": [0.2, 0.8]}],
        "engine": "plain",
    }
    merger = DareMerger(paths[0], paths[1:], DareConfig(**settings))
    assert "; weights 1, 0.2 in the first layer\n" in str(merger.plan(OUT))
    report = merger.merge(OUT)
    assert "(method linear, lambda {gradient = [0.0, 2.0]}; " in str(report)
    assert report.to_dict()["lambda_coeff"] == {"gradient": [0.0, 2.0]}


def test_odd_models_are_warned_about_once_each() -> None:
    base = random_model()
    usual = finetune(base, 1, 0.0005)
    large = finetune(base, 1, 0.02)
    mixed = usual | {"layer.bias": base["layer.bias"] + 0.02}
    lacking = usual | {"new\x1b[31m": torch.ones(1)}
    del lacking["scalar"]
    for models, config, patterns in (
        ([usual], {}, []),
        ([large, mixed], {"drop_rate": 0}, []),  # where nothing is dropped, nothing is lost
        (
            [large, mixed],
            {},
            [r"^large deltas: .* in [34] of 4 tensors of m0, 1 of 4 tensors of m1 \("],
        ),
        ([large], {"delta_threshold": 0.05}, []),
        ([large], {"drop": "magnitude"}, []),  # by which little is lost
        (
            [large],
            {"drop": "della", "drop_rate": 0.5},
            ["large deltas: .* tensors of m0 "],
        ),
        ([random_model(1)], {}, ["base.safetensors does not look like the base of m0.safetensors"]),
        ([base, usual], {}, ["m0.safetensors is identical to the base"]),
        ([lacking], {}, [r"lacks 1 tensor .*: 'scalar'", r"1 tensor .*: 'new\\x1b\[31m'"]),
    ):
        warnings = merge(base, *models, engine="plain", **config).warnings
        assert len(warnings) == len(patterns)
        assert all(len(warning) < 220 for warning in warnings), "two lines of a terminal"
        assert all(map(re.search, patterns, warnings)), warnings
    Path("link").symlink_to("m0.safetensors")
    names = ("m0.safetensors", "link", "base.safetensors")
    report = run_merge(Path(names[2]), [Path(name) for name in names], OUT)
    for words in ("link is given more than once", "base.safetensors is the base itself"):
        assert sum(words in warning for warning in report.warnings) == 1


@pytest.fixture
def mixture() -> Models:
    """A base of two types with integers in it; a fine-tune in shards; an adapter."""
    floats = random_model(
        0, BF16, {"embed.weight": (40, 8), "layer.weight": (6, 8), "norm.weight": (8,)}
    ) | {"scale": torch.ones(3)}
    table = {"table": torch.arange(12)}
    save_directory(Path("base"), floats | table, torch_dtype="bfloat16")
    Path("base/tokenizer.json").write_text("{}")
    parts = [["embed.weight", "table"], ["layer.weight", "norm.weight", "scale"]]
    save_sharded(Path("math"), finetune(floats, 1) | table, parts)
    write_adapter(Path("code"), low_rank("layer", (6, 8)))
    return [Path("base"), Path("math"), Path("code")]


def test_the_plan_shows_models_rules_files_and_needs(
    mixture: Models, tmp_path: Path, capsys: Capture
) -> None:
    text = (
        "-b base -m math code -o out --drop-rate 0.9 0.8 --max-shard-size=750B --engine=plain"
        " --rule embed*:drop_rate=0.5,rescale_q=0.6 --rule *norm*:lambda_coeff=0"
    )
    before = snapshot(tmp_path)
    run(*text.split(), "--dry-run")
    assert snapshot(tmp_path) == before
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    sizes = [sum(p.stat().st_size for p in folder.glob("*.safetensors")) for folder in mixture]
    expected = [
        ["would merge 2 models into out"],
        ["base", human(sizes[0]), "5", "391", "BF16 3, I64 1, F32 1, the base"],
        ["math", human(sizes[1]), "5", "391", "BF16 3, I64 1, F32 1"],
        ["code", human(sizes[2]), "2", "28", "F32, LoRA of rank 2, changes 1 tensor"],
        ["method linear; seeds 42, 43; weights 0.5, 0.5"],
        ["embed*", "1", "320", "drop_rate = 0.5; rescale_q = 0.6"],
        ["*norm*", "1", "8", "lambda_coeff = 0.0"],
        ["all others", "2", "51", "drop_rate = [0.9, 0.8]"],
        ["not merged", "1", "as in the base"],
        ["README.md, config.json, dare_recipe.toml, model.safetensors.index.json, tokenizer.json"],
    ]
    run("-q", *text.split())
    for word, path in zip(("write", ""), sorted(Path("out").glob("*.safetensors")), strict=True):
        expected.append(f"{word}  {path.name}, {human(path.stat().st_size)}".strip().split("  "))
    assert [row for row in expected if [*map(str.strip, row)] not in rows] == []
    written = human(sum(path.stat().st_size for path in Path("out").iterdir()))
    printed = "\n".join(lines)
    assert re.search(rf"(?m)^disk    {written} needed, ", printed)
    assert re.search(r"(?m)^time    .+ to read .* and compute on \d+ threads?, ", printed)
    assert not re.search("lacks|more than the base|shapes", printed)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drop", "magnitude", "--rescale", "l1"], 'drop = "magnitude"; rescale = "l1"'),
        (["--drop", "della", "--drop-rate", ".5"], 'drop = "della"; epsilon = 0.15'),
        (
            ["--rule", "*:weights=[1,{gradient=[0,2]}],normalize=true"],
            "weights = [1.0, {gradient = [0.0, 2.0]}]; normalize = true",
        ),
        (["--method", "slerp", "--rule", "*:slerp_t=0.2"], "slerp_t = 0.2"),
    ],
    ids=str,
)
def test_the_plan_says_what_is_set(
    models: Models, capsys: Capture, flags: list[str], words: str
) -> None:
    run(*MERGE, "-m", "code.safetensors", *flags, "--dry-run")
    assert f"{words}\n" in capsys.readouterr().out


def test_the_plan_is_what_the_merge_then_does(mixture: Models) -> None:
    rules = [{"match": ["embed*", "none"], "drop_rate": 0.5}]
    config = DareConfig(verbose=False, engine="plain", rules=rules)
    merger = DareMerger(mixture[0], mixture[1:], config)
    plan = merger.plan("out").to_dict()
    assert plan["estimate"] is None, "asking costs half a second, so it must be asked for"
    chosen = [(r["match"], r["tensors"], r["settings"]["drop_rate"]) for r in plan["rules"]]
    assert json.loads(json.dumps(chosen)) == [
        [["embed*", "none"], 1, 0.5],
        [[], 3, 0.9],
    ]
    report = merger.merge("out")
    written = {path.name: path.stat().st_size for path in Path("out").iterdir()}
    sizes = {file["name"]: file["size"] for file in plan["files"]}
    assert sizes == {name: written[name] for name in report.files}
    assert sum(written.values()) == report.bytes_written
    planned = ("bytes_to_write", "bytes_to_read", "side_files", "copied_tensors")
    done = [report.bytes_written, report.bytes_read, [*report.side_files], ["table"]]
    assert [*map(plan.get, planned)] == done


def test_the_plan_says_what_does_not_fit_and_what_will_be_replaced(capsys: Capture) -> None:
    base = random_model()
    odd = finetune(base, 1) | {"new": torch.ones(2), "head.weight": torch.zeros(7, 1500)}
    del odd["scalar"]
    save(Path(), base=base, math=odd, own=base)
    merge = [*MERGE, "--mismatch", "overlap"]

    def plan(*flags: str) -> str:
        run(*merge, *flags, "--dry-run")
        return capsys.readouterr().out

    first = plan()
    for words in ("lacks", "has more than the base:", "has in other shapes (overlap):"):
        assert f"\nmath.safetensors {words} 1 tensor\n" in first
    assert not re.search("(?m)^(replace|resume|remove)", first)
    own = human(Path("own.safetensors").stat().st_size)
    assert f"replace {own}\n" in plan("-o", "own.safetensors", "--force")
    run("-q", *merge)
    assert f"replace {human(OUT.stat().st_size)}\n" in plan()
    Path("out.safetensors.partial").mkdir()
    Path("out.safetensors.partial/journal").touch()
    for flags, words in (((), "remove"), (("--resume",), "resume")):
        assert re.findall("(?m)^(resume|remove)  an unfinished merge", plan(*flags)) == [words]


@pytest.mark.parametrize(
    ("config", "looks"),
    [({}, 0), ({"method": "slerp"}, 1), ({"method": "ties", "keep_ratio": 0.5}, 2)],
    ids=str,
)
@pytest.mark.parametrize(("seconds", "jobs"), [(60, 7), (0, 1)], ids=["a round", "a job of it"])
def test_the_estimate_is_what_the_first_jobs_say_of_all(
    config: Config, looks: int, seconds: float, jobs: int
) -> None:
    """But for the very first, which may load Numba and compile."""
    base = {f"t{k}": torch.ones(20_000, dtype=BF16) for k in range(8)}
    paths = save_models(Path(), [base, finetune(base, 1), finetune(base, 2)])
    merger = DareMerger(paths[0], paths[1:], DareConfig(verbose=False, threads=1, **config))
    tune(sample_seconds=seconds)
    plan = merger.plan(OUT, estimate=True)
    assert plan.estimate.sampled_bytes == jobs * 3 * 40_000
    assert plan.bytes_to_read == 8 * (1 + looks) * 3 * 40_000
    assert plan.estimate.seconds == pytest.approx(
        8 / jobs * (1 + looks) * plan.estimate.sampled_seconds
    )
    assert merger.merge(OUT).bytes_read == plan.bytes_to_read


def test_a_dry_run_fails_only_by_what_would_fail_the_merge(
    models: Models, tmp_path: Path, refused: Refusal
) -> None:
    broken = load_file(models[1])
    broken["layer.weight"][3, 4] = math.nan
    save(tmp_path, math=broken)
    refused(1, ("'layer.weight'", "nan", "[3, 4]"), *MERGE, "--dry-run")
    # This overflows, unless trim drops the small deltas.
    base = torch.tensor([65000.0, 0.0] * 1000, dtype=F16)
    tuned = base + torch.tensor([400.0, 3000.0] * 1000, dtype=F16)
    save(tmp_path, base={"w": base}, math={"w": tuned})
    flags = [*MERGE, "--method", "ties", "--drop-rate", "0", "--lambda", "2", "--engine", "plain"]
    refused(1, "beyond the range", *flags)
    run("-q", *flags, "--keep-ratio", "0.5", "--dry-run")
    run("-q", *flags, "--keep-ratio", "0.5")


def run_on_terminal(*flags: str, **environment: str) -> tuple[int, str, str]:
    """The real command with a terminal as its stderr: its status, and what it wrote to a pipe and
    to the terminal."""
    import pty

    controller, terminal = pty.openpty()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / "dare.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**kept, "TERM": "xterm", **environment},
        text=True,
    )
    os.close(terminal)
    said = b""
    piece = b"."
    while piece:
        try:
            said += (piece := os.read(controller, 1 << 16))
        except OSError:  # Linux's word for that nobody has the terminal any more
            break
    os.close(controller)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out, said.decode()


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("environment", "moves", "colours"),
    [
        ({}, True, True),
        slow({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)
def test_colours_and_progress_are_for_terminals(
    models: Models, environment: Any, moves: bool, colours: bool
) -> None:
    flags = [*MERGE, "--delta-threshold", "1e-9"]
    run("-q", *flags)  # so that nothing is left to compile
    status, out, said = run_on_terminal(*flags, **environment)
    assert (status, "\x1b" in out) == (0, False)
    assert ("merging" in said, "\x1b" in said) == (moves, moves)
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-8][0-9;]*m", said)) is colours
    assert ("\x1b[33mwarning:\x1b[0m " if colours else "warning: ") in said
    status, out, said = run_on_terminal(*flags, "--drop-rate", "2", **environment)
    assert (status, out) == (2, "")
    assert ("\x1b[31merror:\x1b[0m " in said, "\x1b[36mhint:\x1b[0m " in said) == (colours, colours)
    assert colours or ("\x1b" not in said and said.startswith("error: "))


def test_without_a_terminal_long_work_prints_lines(models: Models, capsys: Capture) -> None:
    tune(job_elements=1024, min_chunk=1024, max_chunk=1024)
    tune(first_line_seconds=0.0, last_line_seconds=0.0)
    flags = [*MERGE, "--engine", "plain", "--threads", "1"]
    run(*flags)
    said = capsys.readouterr().err
    shares = [
        int(share) for share in re.findall(r"(?m)^merging: (\d+)% done, under .* left$", said)
    ]
    assert shares == sorted(shares)
    assert 1 < len(shares) == said.count("\n")
    run(*flags, "-q")
    tune(first_line_seconds=10.0)
    run(*flags)
    assert "merging" not in capsys.readouterr().err, "it is quiet, or short"


def test_a_report_is_short_in_a_notebook_and_can_be_a_data_frame(
    models: Models, monkeypatch: Patch
) -> None:
    merger = DareMerger(models[0], models[1:], DareConfig(verbose=False, engine="plain"))
    plan = merger.plan(OUT)
    analysis = merger.analyze()
    merged = merger.merge(OUT)
    verified = merger.verify(OUT)
    for report, count, tables in ((plan, 3, 2), (merged, 2, 1), (verified, 1, 0), (analysis, 8, 3)):
        assert repr(report).startswith(f"{type(report).__name__}(")
        assert len(repr(report)) < 600
        shown = report._repr_html_()
        pictures = shown.count('<img src="data:image/png;base64,')
        assert (shown.count("<table>"), pictures) == (tables, report is analysis)
        assert len(report.to_dataframe()) == count
        assert report.to_dict() == report.as_dict() == json.loads(json.dumps(report.to_dict()))
    assert [*analysis.to_dataframe().columns[:3]] == ["model", "name", "tensors"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "<img" not in analysis._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DareError, match="a data frame needs pandas") as raised:
        merged.to_dataframe()
    assert "pip install pandas" in raised.value.hint
