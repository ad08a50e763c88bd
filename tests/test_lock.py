"""Others may be at work in the same place: nobody's files are lost, and no two merges are mixed."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from darelib.output.publish import Output
from tests.scene import BOTH, HELD, Scene, contents, launch, meanwhile, put, wait_for
from tests.support import POSIX, Patch, slow, snapshot


@BOTH
def test_a_merge_whose_folder_was_taken_by_another_publishes_nothing(
    tmp_path: Path, monkeypatch: Patch, kind: str
) -> None:
    """Somebody removes the folder by hand, and another merge begins in one of the same name."""
    scene = Scene(tmp_path, kind)

    def take(plan: Any) -> None:
        shutil.rmtree(scene.partial)
        Output(plan.output, plan.files, {}, False).discard(keep=True)

    meanwhile(monkeypatch, take)
    assert scene.run() == 1
    assert "somebody removed" in scene.printed or "No such file" in scene.printed
    assert contents(scene.output) == scene.old


def test_space_that_an_unfinished_merge_takes_is_space_for_the_next(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    scene = Scene(tmp_path, "file")
    scene.interrupt(3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**4))
    other = scene.output.with_name("other.safetensors")
    scene.check("-o", str(other), status=1, words="has 10 kB free", left=[scene.partial])
    scene.check("--resume")


@POSIX
@pytest.mark.parametrize("flags", [[], slow(["--resume", "--force"])], ids=str)
def test_the_second_of_two_merges_to_one_place_is_told_of_the_first(
    tmp_path: Path, flags: list[str]
) -> None:
    scene = Scene(tmp_path, "file")
    go = tmp_path / "go"
    first = launch(HELD, *scene.arguments, GO=str(go))
    try:
        wait_for(lambda: (scene.partial / "lock").exists() and (scene.partial / "lock").read_text())
        words = f"another merge (process {first.pid}) is writing"
        scene.check(*flags, status=1, words=words, left=[scene.partial])
    finally:
        go.touch()
        _, printed = first.communicate(timeout=60)
    assert first.returncode == 0, printed
    assert scene.broken(status=0) == []


@POSIX
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_many_merges_to_one_place_at_once_leave_one_complete_model(
    tmp_path: Path, kind: str
) -> None:
    scene = Scene(tmp_path, kind)
    for _ in range(2):
        for process in [launch("", *scene.arguments) for _ in range(6)]:
            _, printed = process.communicate(timeout=60)
            assert process.returncode == (1 if "another merge (" in printed else 0), printed
        assert scene.broken(status=0) == []
        scene.reset()


MINE = {"deep/thesis.tex": b"mine"}
DOORS = {"lock": b"a list of the doors in my house that have one\n"}
FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "file": lambda partial, _: put(partial, {"": b"mine"}),
    "folder": lambda partial, _: put(partial, MINE),
    "folder with a lock": lambda partial, _: put(partial, MINE | DOORS),
    "link to a folder": lambda partial, other: partial.symlink_to(other),
    "link to nothing": lambda partial, other: partial.symlink_to(other / "nothing"),
}


@BOTH
@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_only_happens_to_be_called_partial_is_never_touched(
    tmp_path: Path, kind: str, foreign: str
) -> None:
    scene = Scene(tmp_path, kind)
    put(tmp_path / "elsewhere", MINE)
    FOREIGN[foreign](scene.partial, tmp_path / "elsewhere")
    before = snapshot(tmp_path)
    for flags in ([], ["--resume"], ["--force"]):
        scene.check(*flags, status=1, words=str(scene.partial), left=[scene.partial])
        assert snapshot(tmp_path) == before


def give_away(folder: Path, monkeypatch: Patch) -> None:
    """Let a folder belong to another user, which only root could do."""
    look = os.lstat

    def lstat(path: Any, **how: Any) -> os.stat_result:
        status = look(path, **how)
        is_given = Path(path) == folder
        return os.stat_result([*status[:4], 54321, *status[5:]]) if is_given else status

    monkeypatch.setattr(os, "lstat", lstat)


UNSAFE: dict[str, Callable[[Path, Patch], object]] = {
    "another user": give_away,
    "other users": lambda folder, _: folder.chmod(0o777),
    "was not made": lambda folder, _: folder.symlink_to(folder.rename(f"{folder}.moved")),
}


@POSIX
@pytest.mark.parametrize("flags", ["", "--resume", "--force", "--part 1/2"])
@pytest.mark.parametrize("words", UNSAFE)
def test_a_folder_in_which_others_may_have_put_links_is_refused(
    tmp_path: Path, monkeypatch: Patch, words: str, flags: str
) -> None:
    scene = Scene(tmp_path, "directory")
    scene.interrupt(3)
    UNSAFE[words](scene.partial, monkeypatch)
    before = snapshot(tmp_path)
    assert scene.run(*flags.split()) == 1
    assert words in scene.printed
    assert str(scene.partial) in scene.printed
    assert snapshot(tmp_path) == before


@POSIX
def test_a_disk_that_gives_all_files_to_another_user_is_no_obstacle(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """As NFS gives what root makes to nobody."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    scene = Scene(tmp_path, "directory")
    scene.interrupt(3)
    for flags in ("--part 1/2", "--part 2/2", "--resume"):
        assert scene.run(*flags.split()) == 0, scene.printed
    assert scene.broken(status=0) == []


@POSIX
@pytest.mark.parametrize("flags", [[], ["--resume"]], ids=str)
def test_what_an_unfinished_merge_left_is_never_written_through_a_link(
    tmp_path: Path, monkeypatch: Patch, flags: list[str]
) -> None:
    scene = Scene(tmp_path, "file")
    scene.interrupt(3)
    made = scene.begun / "output"
    made.symlink_to(made.rename(tmp_path / "elsewhere"))
    before = (tmp_path / "elsewhere").read_bytes()
    refuse = Mock(side_effect=PermissionError(1, "Operation not permitted"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)  # as in a folder of somebody else
        assert scene.run(*flags) == 1
    assert (tmp_path / "elsewhere").read_bytes() == before
    scene.check()


@POSIX
@BOTH
def test_an_output_that_is_a_link_to_nothing_is_refused(tmp_path: Path, kind: str) -> None:
    scene = Scene(tmp_path, kind, old=False)
    scene.output.symlink_to(tmp_path / "nothing")
    for flags in ([], ["--force"]):
        assert scene.run(*flags) == 1
        assert str(tmp_path / "nothing") in scene.printed
        assert [*scene.besides(), *tmp_path.glob("nothing*")] == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "touched": lambda path: os.utime(path, ns=(1, path.stat().st_mtime_ns + 1)),
    "written to": lambda path: path.write_bytes(path.read_bytes()),
    "replaced by a copy": lambda path: os.replace(shutil.copy2(path, path.with_name("copy")), path),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "gone": Path.unlink,
    "moved away": lambda path: path.rename(path.with_name("moved")),
    "a directory": lambda path: put(path, {"model.safetensors": b""}),
}


ALWAYS = [("touched", "file"), ("longer", "directory")]
CASES = itertools.product(CHANGES, ("file", "directory"))


@pytest.mark.parametrize(
    ("change", "kind"), [case if case in ALWAYS else slow(*case) for case in CASES]
)
def test_inputs_that_change_during_a_merge_are_noticed_and_nothing_is_published(
    tmp_path: Path, monkeypatch: Patch, change: str, kind: str
) -> None:
    scene = Scene(tmp_path, kind, models=["math", "shards", "adapter"])
    shutil.copytree(scene.inputs, tmp_path / "kept")
    weights = ("base/model", "math/model", "shards/model-00002-of-00002", "adapter/adapter_model")
    names = [f"{name}.safetensors" for name in weights]
    if change not in list(CHANGES)[:3]:  # of a small file the content counts
        names += [
            "adapter/adapter_config.json",
            *(["base/tokenizer.json"] if kind == "directory" else []),
        ]
    for name, flags in itertools.product(names, ([], ["--resume"])):
        shutil.rmtree(scene.inputs)
        shutil.copytree(tmp_path / "kept", scene.inputs)
        with monkeypatch.context() as patch:
            meanwhile(patch, lambda _, path=scene.inputs / name: CHANGES[change](path))
            assert scene.run(*flags) == 1, name
        assert (
            str(scene.inputs / "adapter") if "config" in name else Path(name).name
        ) in scene.printed
        assert any(words in scene.printed for words in ("while it was merged", "any more"))
        assert contents(scene.output) == scene.old
        kept = (
            change == "longer" and "tokenizer" in name and "--resume" in flags
        )  # the tensors are as good as before
        assert scene.besides() == [scene.partial.name] * kept
        scene.reset()


@BOTH
@pytest.mark.parametrize("words", ["was not made by this tool", "has another recipe"])
def test_what_somebody_puts_in_the_outputs_place_during_a_merge_is_not_lost(
    tmp_path: Path, monkeypatch: Patch, kind: str, words: str
) -> None:
    scene = Scene(tmp_path, kind, old=False)
    weights = contents(scene.inputs / "math" / "model.safetensors")[""]
    precious = {"" if kind == "file" else "model.safetensors": weights}
    if "recipe" in words:
        assert scene.run("--seed", "7") == 0
        precious = contents(scene.output)
        scene.reset()
    meanwhile(monkeypatch, lambda _: put(scene.output, precious))
    assert scene.run() == 1
    assert f"exists and {words}" in scene.printed
    assert contents(scene.output) == precious
    assert scene.besides() == []
