"""One merge in parts, by processes that know of one another only what lies in a folder: the same
bytes as by one."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dare
from dare import ConfigError
from darelib.output.files import Journal, Lock
from darelib.output.publish import OutputPart
from darelib.run.worker import Worker
from tests.scene import HELD, Contents, contents, launch, make_many_jobs, wait_for
from tests.support import (
    BF16,
    POSIX,
    Capture,
    Patch,
    Refusal,
    finetune,
    make_merger,
    make_models,
    random_model,
    save_directories,
    save_directory,
    slow,
    tune,
)

SHAPES = {f"model.layers.{k}.weight": (32, 64) for k in range(11)} | {"lm_head.weight": (64, 64)}
Run = Callable[..., int]


@pytest.fixture
def whole(tmp_path: Path) -> Contents:
    """What one process makes of a base and two models: a directory with twelve files of tensors."""
    save_directories(tmp_path, make_models(2, BF16, SHAPES), torch_dtype="bfloat16")
    assert dare.main(arguments(tmp_path, "-o", tmp_path / "whole")) == 0
    made = contents(tmp_path / "whole")
    assert len([name for name in made if name.endswith(".safetensors")]) == 12
    return made


def arguments(folder: Path, *flags: Any) -> list[str]:
    models = ["-b", folder / "base", "-m", folder / "math", folder / "code", "-o", folder / "out"]
    usual = "-q --engine plain --max-shard-size 4kB --method ties --keep-ratio 0.5"
    return [*usual.split(), *(str(word) for word in (*models, *flags))]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return lambda *flags: dare.main(arguments(tmp_path, *flags))


def test_parts_in_any_order_and_a_last_call_make_the_bytes_and_figures_of_one_merge(
    tmp_path: Path, whole: Contents, run: Run, monkeypatch: Patch
) -> None:
    """In a directory that they make, and from wherever they are started."""
    out = tmp_path / "new" / "deep" / "out"
    for k in (3, 1, 5, 2, 4):
        assert run("--part", f"{k}/5", "-o", out) == 0
        assert not out.exists()
    monkeypatch.chdir(tmp_path / "new")
    merger = make_merger(
        Path("../base"),
        [Path("../math"), Path("../code")],
        method="ties",
        keep_ratio=0.5,
        max_shard_size="4kB",
        engine="plain",
    )
    reports = [merger.merge("deep/out", resume=True), merger.merge("../whole")]
    assert contents(out) == whole
    assert reports[0].models == reports[1].models
    assert os.listdir(out.parent) == ["out"]


def test_the_last_call_makes_only_what_the_parts_left(
    tmp_path: Path, whole: Contents, run: Run, monkeypatch: Patch
) -> None:
    for k in (1, 2, 4):
        assert run("--part", f"{k}/4") == 0
    made: list[str] = []
    work = Worker.merge

    def note(self: Worker, job: Any, *more: Any) -> Any:
        made.append(job.tensor.name)
        return work(self, job, *more)

    monkeypatch.setattr(Worker, "merge", note)
    for flags, count in ((["--part", "2/4"], 0), (["--resume"], 3)):
        assert run(*flags) == 0
        assert len(made) == count
    assert contents(tmp_path / "out") == whole


def test_a_part_is_every_nth_file_and_a_part_too_many_is_empty(
    tmp_path: Path, whole: Contents
) -> None:
    settings = {"max_shard_size": "4kB", "engine": "plain"}
    merger = make_merger(tmp_path / "base", [tmp_path / "math"], **settings)
    with pytest.raises(ConfigError, match="there is no part"):
        merger.merge(tmp_path / "out", part=3)
    files = [merger.merge(tmp_path / "out", part=(k, 5)).files for k in range(1, 6)]
    assert [len(each) for each in files] == [3, 3, 2, 2, 2]
    assert len({name for each in files for name in each}) == 12
    assert merger.merge(tmp_path / "out", part=(13, 16)).files == ()
    assert (
        str(merger.merge(tmp_path / "out", part=(1, 5)))
        .splitlines()[-1]
        .startswith(f"merged 1 model into {tmp_path / 'out'} (part 1 of 5)")
    )


@POSIX
@pytest.mark.slow
def test_parts_that_run_at_the_same_time_and_one_that_is_killed(
    tmp_path: Path, whole: Contents, run: Run
) -> None:
    go = tmp_path / "go"
    running = [
        launch(HELD, *arguments(tmp_path, "--part", f"{k}/3"), GO=str(go)) for k in (1, 2, 3, 3)
    ]
    wait_for(
        lambda: any(Journal(path).done for path in (tmp_path / "out.partial").glob("*/journal-*"))
    )
    assert run("--resume") == 1  # while others are at work
    running[0].send_signal(signal.SIGKILL)
    go.touch()
    for process in running:
        process.communicate(timeout=60)
    assert [process.returncode for process in running] == [-signal.SIGKILL, 0, 0, 0]
    assert run("--resume") == 0
    assert contents(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base",
        "code",
        "go",
        "math",
        "out",
        "whole",
    ]


@POSIX
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("flags", ["--part 1/3", *map(slow, ("--part 2/3", "--resume", ""))])
def test_a_part_that_was_killed_when_it_began_is_no_obstacle(
    tmp_path: Path, whole: Contents, run: Run, flags: str, when: str
) -> None:
    """Just before it notes that it has begun, and just after."""
    dying = "from darelib.output.files import Journal\n"
    dying += "append = lambda *entry: None\n" if when == "before" else "append = Journal.append\n"
    dying += "Journal.append = lambda *entry: (append(*entry), os.kill(os.getpid(), 9))"
    killed = launch(dying, *arguments(tmp_path, "--part", "1/3"))
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert run(*flags.split()) == 0
    assert [path.name for path in tmp_path.glob("out*")] == [
        "out.partial" if "part" in flags else "out"
    ]


def test_a_part_that_is_interrupted_goes_on_from_there(
    tmp_path: Path, whole: Contents, run: Run, monkeypatch: Patch
) -> None:
    make_many_jobs()
    write = OutputPart.write_at
    count = iter(range(5))

    def stopping(self: OutputPart, file: int, view: memoryview, offset: int) -> None:
        if offset and next(count, None) is None:
            raise KeyboardInterrupt
        write(self, file, view, offset)

    with monkeypatch.context() as patch:
        patch.setattr(OutputPart, "write_at", stopping)
        assert run("--part", "1/2", "--threads", "1") == 130
    noted = sum(len(Journal(path).done) for path in (tmp_path / "out.partial").glob("*/journal-*"))
    assert noted == 5
    assert run("--part", "1/2") == run("--part", "2/2") == run("--resume") == 0
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "change", ["--seed 7", "--drop-rate 0.5", "--max-shard-size 10kB", "--merge math", "inputs"]
)
def test_parts_of_different_merges_are_refused(
    tmp_path: Path, whole: Contents, run: Run, refused: Refusal, change: str, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--part", "1/3") == 0
    if change == "inputs":
        save_directory(tmp_path / "math", finetune(random_model(dtype=BF16, shapes=SHAPES), 9))
    flags = change.split() if change.startswith("-") else []
    refused(1, "is another one", *arguments(tmp_path, "--part", "2/3", *flags))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--part 1/3 -o out.safetensors", "a single file"),
        ("--part 1/3 --max-shard-size 1GB", "a single file"),
        ("--part 4/3", "(4, 3)"),
        ("--part 0/3", "(0, 3)"),
        ("--part third", "'third'"),
        ("--part 1/3 --runner ray", "both divide a merge"),
        ("--part 0/3 --dry-run", "(0, 3)"),
        ("--runner slurm", "'slurm'"),
        ("--ray-address 10.0.0.1:6379", "--runner ray"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, whole: Contents, refused: Refusal, monkeypatch: Patch, flags: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(2, words, *arguments(tmp_path, *flags.split()))


def test_what_ray_is_told_when_it_is_imported_does_not_stay_in_the_environment(
    tmp_path: Path, whole: Contents, run: Run, monkeypatch: Patch
) -> None:
    told = "import os\nopen('told', 'w').write(os.environ['RAY_ENABLE_UV_RUN_RUNTIME_ENV'])\n"
    (tmp_path / "ray.py").write_text(f"{told}raise ImportError")
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    assert run("--runner", "ray") == 1
    assert ((tmp_path / "told").read_text(), dict(os.environ)) == ("0", before)


@POSIX
def test_a_part_takes_an_empty_folder_but_not_one_in_which_a_merge_begins(
    tmp_path: Path, whole: Contents, run: Run, refused: Refusal
) -> None:
    lock = Lock(tmp_path / "out.partial", "out")
    refused(1, "another merge", *arguments(tmp_path, "--part", "1/3"))
    lock.release(keep=False)
    (tmp_path / "out.partial").mkdir()
    assert run("--part", "1/3") == 0


def test_a_part_does_not_go_on_with_what_no_journal_speaks_of(
    tmp_path: Path, whole: Contents, run: Run, refused: Refusal
) -> None:
    """As a merge leaves the model that it replaced, if it is killed at that moment."""
    assert run("--part", "1/3") == 0
    for journal in (tmp_path / "out.partial").glob("*/journal*"):
        journal.unlink()
    words = ["cannot be continued", "without --part"]  # whose folder may hold the only old model
    refused(1, words, *arguments(tmp_path, "--part", "2/3"))


def test_a_part_whose_last_bytes_do_not_reach_the_disk_fails(
    tmp_path: Path,
    whole: Contents,
    run: Run,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    tune(flush_seconds=60)  # so that all is flushed at the end
    with monkeypatch.context() as patch:
        patch.setattr(OutputPart, "_flush", lambda *_: os.fsync(-1))
        patch.setattr(os, "fsync", os.fstat)  # which knows no file -1
        assert run("--part", "1/3") == 1
    assert "cannot write" in capsys.readouterr().err
    assert [run("--part", f"{k}/3") for k in (1, 2, 3)] == [0, 0, 0]
    assert run("--resume") == 0
    assert contents(tmp_path / "out") == whole


def test_a_file_of_the_output_that_is_lost_or_torn_is_made_again(
    tmp_path: Path, whole: Contents, run: Run
) -> None:
    assert run("--part", "1/1") == 0
    made = sorted((tmp_path / "out.partial").glob("*/output/*.safetensors"))
    made[0].unlink()
    made[5].write_bytes(b"torn")
    assert run("--resume") == 0
    assert contents(tmp_path / "out") == whole
