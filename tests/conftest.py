"""Fixtures for all tests: models as files, and a disk that is not waited for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from darelib.core.tuning import TUNING, Tuning
from tests import fuzz

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, since tests run side by side


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and config.cache:
        # Programs are started hundreds of times, and would compile their modules each time.
        os.environ["PYTHONPYCACHEPREFIX"] = str(config.cache.mkdir("bytecode"))
    fuzz.THOROUGH = config.getoption("markexpr") != "not slow"


@pytest.fixture(autouse=True)
def no_fsync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are slow, and only the tests of faults (marked real_fsync) care what has arrived on one."""
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
def models(tmp_path: Path) -> list[Path]:
    """A base and two fine-tunes in bf16, as files."""
    from tests.support import BF16, finetune, random_model, save

    base = random_model(dtype=BF16)
    return save(tmp_path, base=base, math=finetune(base, 1), code=finetune(base, 2))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a fine-tune of it in bf16, as directories."""
    from tests.support import BF16, finetune, random_model, save_directory

    base = random_model(dtype=BF16)
    return save_directory(tmp_path / "base", base), save_directory(
        tmp_path / "math", finetune(base, 1)
    )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, jobs and chunks so small that tiny models have several of each."""
    import darelib.commands.pack.packer
    import darelib.models.packed

    for module in (darelib.commands.pack.packer, darelib.models.packed):
        monkeypatch.setattr(module, "COUNTED_BLOCK", 4096)
    TUNING.job_elements, TUNING.min_chunk, TUNING.max_chunk = 8192, 1024, 2048
    TUNING.many_threads = 1 << 30  # whose chunks would be larger than a block


@pytest.fixture
def check_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Checks that a merge of a base and a model is refused with these words and changes nothing. Gives the words."""
    from tests.support import refuse

    def check(
        base: Path | str, model: Path | str, *complaints: str, flags: tuple[str, ...] = ()
    ) -> str:
        arguments = [
            "--base",
            base,
            "--merge",
            model,
            "--output",
            tmp_path / "out.safetensors",
            *flags,
        ]
        return refuse(tmp_path, capsys, 1, *complaints, arguments=arguments)

    return check
