"""Systems differ: what a filesystem or a machine lacks costs time at most, and never a model."""

import ctypes
import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dare
from darelib.core.tuning import count_cores
from darelib.output import publish
from darelib.output.files import LOCK_WORDS, MADE
from tests.scene import Scene, launch, put
from tests.support import (
    BF16,
    POSIX,
    Patch,
    command,
    random_model,
    run,
    run_merge,
    save_sharded,
    slow,
    with_header,
)


class Refusing:
    """A system library whose every function says that this filesystem cannot do it."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: ctypes.set_errno(errno.EOPNOTSUPP) or -1


def refuse(descriptor: int, *_: Any) -> None:
    """Neither sync a directory nor lock a file."""
    if _ or stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def unlink_closed(path: Path, *, unlink: Any = os.unlink, **options: Any) -> None:
    """Remove a file, but none that this process has open: as Windows does."""
    status = os.stat(path, follow_symlinks=False, **options)
    opened: list[os.stat_result] = []
    for descriptor in range(200):
        with suppress(OSError):
            opened.append(os.fstat(descriptor))
    if any(os.path.samestat(status, each) for each in opened):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    unlink(path, **options)


LACKS: dict[str, Callable[[Patch], object]] = {
    "functions": lambda patch: patch.setattr(ctypes, "CDLL", lambda *_, **__: object()),
    "support": lambda patch: patch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing()),
    "directory sync": lambda patch: patch.setattr(os, "fsync", refuse),
    "locks": lambda patch: patch.setattr(pytest.importorskip("fcntl"), "flock", refuse),
    "exchanged names": lambda patch: patch.setattr(publish, "exchange", lambda *_: False),
    "removal of what is open": lambda patch: patch.setattr(os, "unlink", unlink_closed),
    "positioned reads": lambda patch: patch.delattr(os, "preadv"),
    "positioned writes": lambda patch: patch.delattr(os, "pwrite"),
}


@pytest.mark.parametrize("kind", ["directory", slow("file")])
@pytest.mark.parametrize("lacking", LACKS)
def test_a_system_may_lack_what_others_have(
    tmp_path: Path, monkeypatch: Patch, kind: str, lacking: str
) -> None:
    """Space reserved at once, names exchanged, directories synced, locks: all are used only where
    they are there."""
    scene = Scene(tmp_path, kind)
    LACKS[lacking](monkeypatch)
    scene.check("--threads", "3")
    scene.reset()
    scene.interrupt(5)
    scene.check("--resume")


@pytest.mark.parametrize(("flags", "status"), [("", 0), ("--resume", 0), ("-m broken", 1)])
def test_an_old_model_that_a_crash_left_without_its_name_gets_it_back(
    tmp_path: Path, monkeypatch: Patch, flags: str, status: int
) -> None:
    """Where names cannot be exchanged there is an instant in which neither has it."""
    scene = Scene(tmp_path, "directory")
    put(scene.partial, {"lock": f"{LOCK_WORDS} 1\n".encode()})
    scene.output.rename(scene.partial / "replaced")
    put(scene.partial / "of the crash" / MADE, scene.new)
    monkeypatch.chdir(scene.inputs)
    scene.check("--force", *flags.split(), status=status)


@POSIX
def test_new_files_have_the_permissions_that_the_user_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        outputs = [Scene(tmp_path / kind, kind).output for kind in ("file", "directory")]
    finally:
        os.umask(before)
    for path in [*outputs, *outputs[1].rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


ODD_NAMES = [
    "modèle fusionné",
    "🙂" * 60,
    *map(slow, ("合并" * 30, "ж" * 121, "x" * 243, "a\nb", ".hidden")),
]


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_outputs_may_have_any_name_that_the_filesystem_allows(
    tmp_path: Path, name: str, suffix: str
) -> None:
    left = 255 - len(os.fsencode(name + suffix))
    name = name + "y" * left * (left < 15) + suffix
    scene = Scene(tmp_path, "file" if suffix else "directory", old=False, name=name)
    scene.interrupt(5)
    scene.check("--resume")
    run("verify", scene.output, "-q", *scene.models)


def test_neither_a_terminal_nor_a_place_for_anything_but_the_output_is_needed(
    tmp_path: Path,
) -> None:
    """Root may write anywhere, so a file in the place of a folder stands in for folders that cannot
    be written."""
    scene = Scene(tmp_path, "file")
    folder = tmp_path / "here"
    blocked = tmp_path / "blocked"
    folder.mkdir()
    blocked.write_text("")
    prelude = (
        f"os.chdir({str(folder)!r}); TUNING.compiled_work = 0\n"
        "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []\n"
        f"tempfile._candidate_tempdir_list = lambda: [{str(blocked)!r}]"
    )
    places = {"HOME": "/nonexistent", "XDG_CACHE_HOME": ""}
    process = launch(prelude, *scene.arguments[1:], TERM="", **places)
    told, printed = process.communicate(timeout=60)
    assert "compiling for this machine, each time: there is no place to keep it" in printed
    assert "\x1b" not in told + printed
    assert scene.broken(status=process.returncode) == []
    assert list(folder.iterdir()) == []


@POSIX
def test_the_command_opens_more_files_than_usual_and_a_script_is_asked_to_allow_them(
    tmp_path: Path,
) -> None:
    import resource

    base = random_model(shapes={f"t{k}": (8,) for k in range(200)}, dtype=BF16)
    shards = [[tensor] for tensor in base]
    paths = [save_sharded(tmp_path / name, base, shards) for name in ("base", "math")]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, limits[1]))
    try:
        with pytest.raises(dare.DareError, match="Too many open files") as caught:
            run_merge(paths[0], paths[1:], tmp_path / "out", max_shard_size="16B")
        assert "raise the limit on open files" in caught.value.hint
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (150, limits[1])
        words = ["-q", "-b", paths[0], "-m", paths[1], "-o", tmp_path / "out"]
        run(*words, "--max-shard-size", "16B")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 200


MERGE = "-q --force -b base.safetensors -m math.safetensors -o out.safetensors"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of addresses that binds")
def test_a_model_larger_than_the_memory_merges(tmp_path: Path) -> None:
    import resource

    size = 350 << 20
    entry = {"dtype": "BF16", "shape": [size // 2]}
    entries = {f"t{k}": entry | {"data_offsets": [k * size, (k + 1) * size]} for k in (0, 1)}
    header = with_header(json.dumps(entries), b"")
    for name in ("base", "math"):
        (tmp_path / f"{name}.safetensors").write_bytes(header)
        os.truncate(tmp_path / f"{name}.safetensors", len(header) + 2 * size)
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (512 << 20, 512 << 20))
    for words in (MERGE, f"{MERGE} --method ties --keep-ratio 0.5", "verify out.safetensors"):
        done = command(*words.split(), cwd=tmp_path, preexec_fn=limit)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.safetensors").stat().st_size > 2 * size + len(header)
    (tmp_path / "out.safetensors").unlink()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({}, 8),
        ({"cpu.max": "9900000 100000"}, 8),
    ],
)
def test_a_container_s_share_of_the_processor_counts(
    tmp_path: Path, monkeypatch: Patch, files: dict[str, str], cores: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("darelib.core.tuning.CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert count_cores() == cores
