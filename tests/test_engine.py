"""Compiled functions: loaded where a merge is large, and never in the way of one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support import HERE, Models, Tensors, assert_same, merge_paths

# The command, in a process where no merge is small.
LARGE = """
import sys
import dare
from darelib.core.tuning import TUNING
TUNING.compiled_work = 0
"""
RUN = "sys.exit(dare.main(sys.argv[1:]))"
BROKEN = 'raise ImportError("Numba needs an older NumPy")'
NO_PLACE = "from numba.core.caching import CacheImpl\nCacheImpl._locator_classes = []\n"
FULL = """
from numba.core.caching import IndexDataCacheFile
def save(*_):
    raise OSError(28, "No space left on device")
IndexDataCacheFile.save = save
"""
SMALL = """
assert dare.main(sys.argv[1:]) == 0
assert "numba" not in sys.modules
"""
COMPILES = "compiling for this machine, once; later runs start at once"
SLOWLY = "so NumPy computes: the same result, many times slower"
Started = subprocess.Popen[str]
Start = Callable[..., Started]


@pytest.fixture
def start(models: Models, tmp_path: Path) -> Start:
    """Starts merges in processes of their own, with an empty cache, or a module that is found
    before Numba.
    """

    def run(*flags: str, program: str = LARGE + RUN, out: str = "out", numba: str = "") -> Started:
        if numba:
            (tmp_path / "numba.py").write_text(numba)
        path = tmp_path / f"{out}.safetensors"
        own = {
            "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE)]),
        }
        words = ["-b", models[0], "-m", *models[1:], "-o", path, "--force", *flags]
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, words)],
            env=os.environ | own,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


@pytest.fixture
def expected(models: Models, tmp_path: Path) -> Tensors:
    return merge_paths(models[0], models[1:], tmp_path / "plain.safetensors", engine="plain")


def end(process: Started, status: int = 0) -> list[str]:
    """What was printed to stderr, but for files that are replaced, and progress."""
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == status, printed
    aside = ("replaces ", "merging: ")  # progress, where compiling takes long
    return [line for line in printed.splitlines() if not line.startswith(aside)]


def test_only_the_first_merge_of_an_installation_says_that_it_compiles(
    start: Start, expected: Tensors, tmp_path: Path
) -> None:
    assert end(start()) == [COMPILES]
    assert end(start()) == []
    assert_same(load_file(tmp_path / "out.safetensors"), expected)


def test_two_processes_may_compile_at_once(start: Start, expected: Tensors, tmp_path: Path) -> None:
    processes = [start(out=out) for out in ("one", "other")]
    for process, out in zip(processes, ("one", "other"), strict=True):
        assert set(end(process)) <= {COMPILES}
        assert_same(load_file(tmp_path / f"{out}.safetensors"), expected)


def test_a_small_merge_needs_no_numba(start: Start) -> None:
    assert end(start(program=f"import sys\nimport dare{SMALL}", numba=BROKEN)) == []


@pytest.mark.parametrize("flags", [(), ("--engine", "plain")], ids=str)
def test_without_numba_a_large_merge_says_so_in_a_line(
    start: Start, expected: Tensors, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    told = f"Numba cannot be used (Numba needs an older NumPy), {SLOWLY}"
    assert end(start(*flags, numba=BROKEN)) == ([] if flags else [f"warning: {told}"])
    assert_same(load_file(tmp_path / "out.safetensors"), expected)


def test_who_asks_for_numba_hears_why_it_cannot_be_used(start: Start, tmp_path: Path) -> None:
    error, hint = end(start("--engine", "numba", numba=BROKEN), 1)
    assert error == "error: the engine numba cannot be used: Numba needs an older NumPy"
    assert hint.startswith("hint: use engine auto")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (NO_PLACE, "compiling for this machine, each time: there is no place to keep it"),
        (FULL, f"warning: Numba cannot be used ([Errno 28] No space left on device), {SLOWLY}"),
    ],
)
def test_a_cache_that_cannot_be_written_costs_time_only(
    start: Start, expected: Tensors, tmp_path: Path, fault: str, told: str
) -> None:
    lines = end(start(program=LARGE + fault + RUN))
    assert [line for line in lines if line != COMPILES] == [told]
    assert_same(load_file(tmp_path / "out.safetensors"), expected)
