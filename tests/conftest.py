"""Fixtures for all tests: models as files, and a disk that is not waited for.

The process that only hands out tests reads this file too, before the others start. So torch, which
tests.support needs, is imported in the fixtures.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from darelib.core.tuning import TUNING, Tuning

if TYPE_CHECKING:
    from tests.house import House
    from tests.support import Capture, Models, Pair, Patch, Refusal

# Tests run on all cores already: more threads for matrices would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and config.cache:
        # Programs are started hundreds of times, and would compile their modules each time.
        os.environ["PYTHONPYCACHEPREFIX"] = str(config.cache.mkdir("bytecode"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays, and need not be looked through again and again


@pytest.fixture(autouse=True)
def no_fsync(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Disks are slow, and only tests of faults (marked real_fsync) care what arrives on one."""
    if "real_fsync" not in request.keywords:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def usual_tuning() -> Iterator[Tuning]:
    """Tests may change TUNING as they like; it is as it was afterwards."""
    usual = dataclasses.asdict(TUNING)
    yield TUNING
    for name, value in usual.items():
        setattr(TUNING, name, value)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """A base and two fine-tunes in bf16, as files."""
    from tests import support

    return support.save_models(tmp_path, support.make_models(2, support.BF16))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A base and a fine-tune of it in bf16, as directories."""
    from tests import support

    models = support.make_models(1, support.BF16)
    base, tuned = support.save_directories(tmp_path, models)
    return base, tuned


@pytest.fixture
def small_blocks(monkeypatch: Patch) -> None:
    """Blocks, jobs and chunks so small that tiny models have several of each."""
    from tests import support

    for module in ("darelib.commands.pack.packer", "darelib.models.packed"):
        monkeypatch.setattr(f"{module}.COUNTED_BLOCK", 4096)
    # With many threads, chunks would be larger than a block.
    support.tune(job_elements=8192, min_chunk=1024, max_chunk=2048, many_threads=1 << 30)


@pytest.fixture
def refused(tmp_path: Path, capsys: Capture) -> Refusal:
    """Checks that the command fails with this status, one error and one hint, and changes nothing.

    words: what the error and the hint must name.
    """
    from tests import support

    def check(status: int, words: str | Iterable[str], *arguments: Any) -> str:
        before = support.snapshot(tmp_path)
        capsys.readouterr()
        support.run(*arguments, status=status)
        printed = capsys.readouterr()
        error, hint = printed.err.splitlines()[-2:]
        assert (printed.out, error[:7], hint[:6]) == ("", "error: ", "hint: ")
        assert not re.search("this is a bug|Traceback", printed.err), printed.err
        named = [words] if isinstance(words, str) else words
        assert [word for word in named if word not in printed.err] == [], printed.err
        assert support.snapshot(tmp_path) == before
        return printed.err

    return check


@pytest.fixture
def check_refused(tmp_path: Path, refused: Refusal) -> Refusal:
    """Checks that a merge of a base and a model is refused with these words and changes nothing."""

    def check(base: Any, model: Any, *words: str, flags: tuple[str, ...] = ()) -> str:
        return refused(
            1, words, "-b", base, "-m", model, "-o", tmp_path / "out.safetensors", *flags
        )

    return check


@pytest.fixture(scope="session")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], House]:
    """Language models with examples, by their kind."""
    from tests.house import House

    return functools.cache(lambda kind: House(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="session")
def llama(houses: Callable[[str], House]) -> House:
    return houses("llama")
