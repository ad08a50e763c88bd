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
from dare import DareConfig, DareMerger
from darelib.core.mask import keep_rate
from darelib.core.text import human
from darelib.core.tuning import TUNING
from darelib.run.worker import Worker
from tests import support
from tests.support import (
    BF16,
    F16,
    HERE,
    Capture,
    Models,
    Patch,
    Tensors,
    finetune,
    low_rank,
    mask,
    random_model,
    run,
    run_merge,
    save,
    tune,
)

OUT = Path("out.safetensors")
MERGE = ["-b", "base.safetensors", "-m", "math.safetensors", "-o", str(OUT)]
# Settings, and how often a tensor is looked at before it is merged by them.
LOOKS: Any = [({}, 0), ({"method": "slerp"}, 1), ({"method": "ties", "keep_ratio": 0.5}, 2)]


@pytest.fixture(autouse=True)
def at_the_models(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


def merge(base: Tensors, *models: Tensors, **config: Any) -> dare.MergeReport:
    paths = save(Path(), base=base, **{f"m{i}": model for i, model in enumerate(models)})
    return run_merge(paths[0], paths[1:], OUT, **config)


def planned(capsys: Capture, *flags: str) -> str:
    run(*MERGE, *flags, "--dry-run")
    return capsys.readouterr().out


def test_the_report_has_the_figures_of_each_model() -> None:
    base = random_model()
    first, second = finetune(base, 1), finetune(base, 2, size=0.01)
    del second["layer.bias"]
    report = merge(base, first, second | {"adapter": torch.ones(3)}, seed=5)
    assert [(model.name, model.seed) for model in report.models] == [
        ("m0.safetensors", 5),
        ("m1.safetensors", 6),
    ]
    for model, tensors in zip(report.models, (first, second), strict=True):
        deltas = torch.cat(
            [(tensors[name] - base[name]).ravel() for name in base if name in tensors]
        ).abs()
        masks = [
            mask(model.seed, name, base[name].numel(), 0.9) for name in base if name in tensors
        ]
        assert model.parameters == len(deltas)
        assert model.exact_drop_rate == 1 - keep_rate(0.9)
        assert model.dropped_share == 1 - np.concatenate(masks).mean()
        assert model.mean_delta == pytest.approx(deltas.double().mean().item(), rel=1e-5)
        assert model.largest_delta == deltas.max().item()
        assert model.share_above_threshold == (deltas > 0.002).double().mean().item()
    assert [model.missing_tensors for model in report.models] == [(), ("layer.bias",)]
    assert [model.extra_tensors for model in report.models] == [(), ("adapter",)]
    assert (report.tensors, report.bytes_written) == (4, OUT.stat().st_size)
    assert report.bytes_read == 3 * sum(t.nbytes for t in base.values()) - base["layer.bias"].nbytes


def test_no_figure_depends_on_the_number_of_threads(monkeypatch: Patch) -> None:
    sizes = torch.logspace(-12, 3, 64 * 1024).flip(
        0
    )  # so that no two orders of adding them up agree
    save(Path(), base={"w": torch.zeros(64 * 1024)}, math={"w": sizes}, code={"w": sizes.sqrt()})
    tune(job_elements=1024, min_chunk=1024, max_chunk=1024)
    reports, run = [], Worker.run
    monkeypatch.setattr(
        Worker, "run", lambda *given: time.sleep(0.002 * (given[1].number % 3 == 0)) or run(*given)
    )
    for threads in (1, 2, 7):
        report = run_merge(
            Path("base.safetensors"),
            [Path("math.safetensors"), Path("code.safetensors")],
            OUT,
            threads=threads,
            engine="plain",
        )
        reports.append(report.as_dict() | {"seconds": 0})
    assert reports[0] == reports[1] == reports[2]


def test_the_report_prints_as_a_table_and_is_plain_data(models: Models) -> None:
    tune(least_for_rate=1000)
    rules = [{"match": "head*", "drop_rate": 0.5}]
    report = run_merge(
        models[0],
        models[1:],
        OUT,
        method="ties",
        drop_rate=[0.9, 0.8],
        lambda_coeff=0.5,
        rules=rules,
    )
    lines = str(report).splitlines()
    count = {name: tensor.numel() for name, tensor in load_file(models[0]).items()}
    total, head = sum(count.values()), count["head.weight"]
    assert lines[0].split()[:3] == ["model", "seed", "parameters"]
    for line, path, rate in zip(lines[1:3], models[1:], (0.9, 0.8), strict=True):
        assert line.startswith(str(path))
        assert f"  {rate:g} ({(rate * (total - head) + 0.5 * head) / total:.3g} in all)  " in line
    assert lines[3].startswith("(method ties, lambda 0.5; above: ")
    speed = human((report.bytes_read + report.bytes_written) / report.seconds)
    assert lines[4].startswith(f"merged 2 models into {OUT}: 4 tensors, ")
    assert lines[4].endswith(f" written in {report.seconds:.2f} s ({speed}/s)")
    data = json.loads(json.dumps(report.as_dict()))
    assert [model["seed"] for model in data["models"]] == [42, 43]
    tune(least_for_rate=10**9)
    assert not any(
        word in str(run_merge(models[0], models[1:], OUT)) for word in ("in all", "copied", "/s)")
    )


def test_odd_models_are_warned_about_once_each() -> None:
    base = random_model()
    large, mixed, lacking = (
        finetune(base, 1, 0.02),
        finetune(base, 2, 0.0005),
        finetune(base, 3, 0.0005),
    )
    mixed["layer.bias"] = base["layer.bias"] + 0.02
    del lacking["scalar"]
    lacking["new\x1b[31m"] = torch.ones(1)
    assert merge(base, finetune(base, 1, 0.0005)).warnings == ()
    assert merge(base, large, mixed, drop_rate=0).warnings == (), (
        "where nothing is dropped, nothing is lost"
    )
    first, second = merge(base, large, mixed).warnings
    assert re.search(r"m0.safetensors has large deltas: .* in [34] of 4 tensors", first)
    assert re.search(
        r"m1.safetensors has large deltas: .* in 1 of 4 tensors, .* worst: 'layer.bias' \(0.02\)",
        second,
    )
    assert all(
        "lower the drop rate, and check that the base is the right one" in words
        for words in (first, second)
    )
    assert merge(base, large, delta_threshold=0.05).warnings == ()
    [warning] = merge(base, random_model(1)).warnings
    assert "base.safetensors does not look like the base of m0.safetensors" in warning
    [warning] = merge(base, base, finetune(base, 1, 0.0005)).warnings
    assert "m0.safetensors is identical to the base" in warning
    lacks, has = merge(base, lacking).warnings
    assert "m0.safetensors lacks 1 tensor of the base: 'scalar'" in lacks
    assert "has 1 tensor that the base lacks: 'new\\x1b[31m'" in has, (
        "an escape sequence is shown, not sent"
    )
    Path("link").symlink_to("m0.safetensors")
    report = run_merge(
        Path("base.safetensors"),
        [Path("m0.safetensors"), Path("link"), Path("base.safetensors")],
        OUT,
    )
    for words in ("link is given more than once", "base.safetensors is the base itself"):
        assert sum(words in warning for warning in report.warnings) == 1


@pytest.fixture
def mixture() -> Models:
    """A base of two types with integers in it, as a directory; a fine-tune in shards; an adapter."""
    base = random_model(
        0, BF16, {"embed.weight": (40, 8), "layer.weight": (6, 8), "norm.weight": (8,)}
    )
    base |= {"table": torch.arange(12), "scale": torch.ones(3)}
    support.save_directory(Path("base"), base, torch_dtype="bfloat16")
    Path("base/tokenizer.json").write_text("{}")
    tuned = finetune({name: tensor for name, tensor in base.items() if name != "table"}, 1) | {
        "table": base["table"]
    }
    support.save_sharded(
        Path("math"), tuned, [["embed.weight", "table"], ["layer.weight", "norm.weight", "scale"]]
    )
    support.write_adapter(Path("code"), low_rank("layer", (6, 8)))
    return [Path("base"), Path("math"), Path("code")]


def test_the_plan_shows_models_rules_files_and_needs(
    mixture: Models, tmp_path: Path, capsys: Capture
) -> None:
    flags = [
        "-b",
        "base",
        "-m",
        "math",
        "code",
        "-o",
        "out",
        "--drop-rate",
        "0.9",
        "0.8",
        "--max-shard-size=750B",
    ]
    flags += [
        "--rule",
        "embed*:drop_rate=0.5,rescale_q=0.6",
        "--rule",
        "*norm*:lambda_coeff=0",
        "--engine=plain",
    ]
    before = support.snapshot(tmp_path)
    run(*flags, "--dry-run")
    assert support.snapshot(tmp_path) == before
    lines = capsys.readouterr().out.splitlines()
    sizes = [
        human(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
        for folder in mixture
    ]
    assert lines[0] == "would merge 2 models into out"
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    for row in (
        ["base", sizes[0], "5", "391", "BF16 3, I64 1, F32 1, the base"],
        ["math", sizes[1], "5", "391", "BF16 3, I64 1, F32 1"],
        ["code", sizes[2], "2", "28", "F32, LoRA of rank 2, changes 1 tensor"],
        ["method linear; seeds 42, 43; weights 0.5, 0.5"],
        ["embed*", "1", "320", "drop rate 0.5; rescale_q 0.6"],
        ["*norm*", "1", "8", "lambda 0: as in the base"],
        ["all others", "2", "51", "drop rate 0.9, 0.8"],
        ["not merged", "1", "as in the base"],
        ["README.md, config.json, dare_recipe.toml, model.safetensors.index.json, tokenizer.json"],
    ):
        assert row in rows
    assert not any(
        "lacks" in line or "more than the base" in line or "shapes" in line for line in lines
    )
    run("-q", *flags)
    for word, path in zip(("write", ""), sorted(Path("out").glob("*.safetensors")), strict=True):
        assert f"{word:8}{path.name}, {human(path.stat().st_size)}" in lines
    written = human(sum(path.stat().st_size for path in Path("out").iterdir()))
    assert any(line.startswith(f"disk    {written} needed, ") for line in lines)
    assert any(
        re.match(r"time    .+ to read .* and compute on \d+ threads?, ", line) for line in lines
    )
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drop", "magnitude", "--rescale", "l1"], "drop rate 0.9 by magnitude; rescaled by l1"),
        (["--drop", "magnitude", "random"], "drop rate 0.9 by magnitude, random"),
        (
            ["--drop", "breadcrumbs", "--gamma", ".1", ".2", "--no-rescale"],
            "drop rate 0.9 by breadcrumbs; gamma 0.1, 0.2",
        ),
        (
            ["--drop", "della", "--drop-rate", ".5", "--no-rescale"],
            "drop rate 0.5 by della; epsilon 0.15; not rescaled",
        ),
        (
            [
                "--rule",
                "*:weights=[1,{gradient=[0,2]}],lambda_coeff={gradient=[0.1,0.5]},normalize=true",
            ],
            "drop rate 0.9; lambda 0.1 to 0.5; weights 0.3333 to 1, 0 to 0.6667; normalize true",
        ),
        (
            ["--method", "slerp", "--rule", "*:slerp_t={gradient=[0,1]}"],
            "drop rate 0.9; slerp_t 0 to 1",
        ),
    ],
    ids=str,
)
def test_the_plan_says_what_is_dropped_and_how_it_changes_over_the_layers(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    base = random_model(shapes={f"layers.{k}.weight": (3, 4) for k in range(3)})
    paths = save(tmp_path, base=base, a=finetune(base, 1), b=finetune(base, 2))
    flags = ["-b", str(paths[0]), "-m", *map(str, paths[1:]), *flags]
    merger = dare.make_merger(dare.parse_flags(flags)[1])[0]
    assert [rule.words for rule in merger.plan(tmp_path / OUT).rules if rule.tensors] == [words]


def test_large_deltas_are_only_warned_about_where_they_may_be_dropped(tmp_path: Path) -> None:
    base = random_model()
    paths = save(tmp_path, base=base, tuned=finetune(base, 1, 0.01))
    for drop, warned in (("random", True), ("della", True), ("magnitude", False)):
        report = run_merge(
            paths[0], paths[1:], tmp_path / OUT, drop=drop, drop_rate=0.5, engine="plain"
        )
        assert any("has large deltas" in warning for warning in report.warnings) == warned
        assert (f" 0.5 by {drop}  " in str(report)) == (drop != "random")


def test_the_plan_is_plain_data_and_what_the_merge_then_does(mixture: Models) -> None:
    rules = [{"match": ["embed*", "none"], "drop_rate": 0.5}]
    merger = DareMerger(
        mixture[0], mixture[1:], DareConfig(verbose=False, engine="plain", rules=rules)
    )
    plan = merger.plan("out")
    assert plan.estimate is None, "asking costs half a second, so it must be asked for"
    data = json.loads(json.dumps(plan.as_dict()))
    assert [model["note"] for model in data["models"]] == [
        "",
        "",
        "LoRA of rank 2, changes 1 tensor",
    ]
    rules = [
        [rule["match"], rule["tensors"], rule["settings"]["drop_rates"]] for rule in data["rules"]
    ]
    assert rules == [[["embed*", "none"], 1, [0.5, 0.5]], [[], 3, [0.9, 0.9]]]
    assert "\nembed* and 1 more " in str(plan)
    assert data["copied_tensors"] == ["table"]
    report = merger.merge("out")
    written = {path.name: path.stat().st_size for path in Path("out").iterdir()}
    assert data["bytes_to_write"] == sum(written.values()) == report.bytes_written
    assert {file["name"]: file["size"] for file in data["files"]} == {
        name: written[name] for name in report.files
    }
    assert data["side_files"] == list(report.side_files)
    assert data["bytes_to_read"] == report.bytes_read
    assert (report.copied_tensors, str(report).count("5 tensors (1 copied)")) == (1, 1)


def test_the_plan_says_what_does_not_fit_and_what_will_be_replaced(capsys: Capture) -> None:
    base = random_model()
    odd = finetune(base, 1) | {"new": torch.ones(2), "head.weight": torch.zeros(7, 1500)}
    del odd["scalar"]
    save(Path(), base=base, math=odd, own=base)
    overlap = ("--mismatch", "overlap")
    plan = planned(capsys, *overlap)
    for words in ("lacks", "has more than the base:", "has in other shapes (overlap):"):
        assert f"\nmath.safetensors {words} 1 tensor\n" in plan
    assert "replace" not in plan
    replaced = f"replace {human(Path('own.safetensors').stat().st_size)} that something else made\n"
    assert replaced in planned(capsys, *overlap, "-o", "own.safetensors", "--force")
    run("-q", *MERGE, *overlap)
    replaced = f"replace {human(OUT.stat().st_size)} that an earlier merge made\n"
    assert replaced in planned(capsys, *overlap)
    assert "unfinished" not in planned(capsys, *overlap)
    Path("out.safetensors.partial").mkdir()
    Path("out.safetensors.partial/journal").touch()
    assert "remove  an unfinished merge (or continue it" in planned(capsys, *overlap)
    resumed = planned(capsys, *overlap, "--resume")
    assert "resume  an unfinished merge" in resumed
    assert "remove" not in resumed


@pytest.mark.parametrize(("config", "looks"), LOOKS, ids=str)
def test_the_estimate_is_what_the_first_jobs_say_of_all(config: dict[str, Any], looks: int) -> None:
    base = {f"t{k}": torch.ones(20_000, dtype=BF16) for k in range(8)}
    paths = save(Path(), base=base, math=finetune(base, 1), code=finetune(base, 2))
    merger = DareMerger(paths[0], paths[1:], DareConfig(verbose=False, threads=1, **config))
    for TUNING.sample_seconds, jobs in ((60, 8), (0, 1)):  # a round, or one job of it
        plan = merger.plan(OUT, estimate=True)
        assert plan.estimate.sampled_bytes == jobs * 3 * 40_000
        assert plan.bytes_to_read == 8 * (1 + looks) * 3 * 40_000
        assert plan.estimate.seconds == pytest.approx(
            8 / jobs * (1 + looks) * plan.estimate.sampled_seconds
        )
    assert not OUT.exists()
    assert merger.merge(OUT).bytes_read == plan.bytes_to_read


def test_a_dry_run_fails_only_by_what_would_fail_the_merge(
    models: Models, tmp_path: Path, capsys: Capture
) -> None:
    broken = load_file(models[1])
    broken["layer.weight"][3, 4] = math.nan
    save(tmp_path, math=broken)
    support.refuse(
        tmp_path, capsys, 1, "'layer.weight' holds nan at [3, 4]", arguments=[*MERGE, "--dry-run"]
    )
    base = {
        "w": torch.tensor([65000.0, 0.0] * 1000, dtype=F16)
    }  # overflows, unless trim drops the small deltas
    save(
        tmp_path, base=base, math={"w": base["w"] + torch.tensor([400.0, 3000.0] * 1000, dtype=F16)}
    )
    flags = [*MERGE, "--method", "ties", "--drop-rate", "0", "--lambda", "2", "--engine", "plain"]
    support.refuse(tmp_path, capsys, 1, "beyond the range", arguments=flags)
    run("-q", *flags, "--keep-ratio", "0.5", "--dry-run")
    run("-q", *flags, "--keep-ratio", "0.5")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("tensors", "threads"), [(8, 1), (256, 32), (5000, 1), (20_000, 2)])
def test_a_merge_takes_about_the_memory_of_its_plan(tensors: int, threads: int) -> None:
    elements = {8: TUNING.job_elements, 256: TUNING.max_chunk}.get(tensors, 10)
    base = {f"model.layers.{k}.weight": torch.ones(elements, dtype=BF16) for k in range(tensors)}
    paths = save(Path(), base=base, math=base, code=base)
    merger = DareMerger(paths[0], paths[1:], DareConfig(verbose=False, threads=threads))
    planned = merger.plan(OUT, estimate=True).memory  # and now it is compiled
    flags = ["-q", *MERGE, "-m", "code.safetensors", "--threads", str(threads)]
    code = f"import dare; dare.main({flags!r}); print(open('/proc/self/status').read())"
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", printed)
    assert 0.75 < planned / (int(peak) * 1024) < 1.33


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
    said, piece = b"", b"."
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
        ({"NO_COLOR": ""}, True, True),
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
