"""The processes that compile kernels and prove them: what crashes there ends one of them, and no merge."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from darelib.interrupts import Interrupts
from darelib.kernels import EngineUnavailable, KernelSpec
from darelib.kernels.machine import FEATURE_VARIABLES, host_features
from darelib.kernels.objects import announced, object_name, read_object
from darelib.text import LOG
from darelib.tuning import TUNING, count_cores

# Far more than all kernels of a merge take on a busy machine.
COMPILE_SECONDS: Final = 600
CHILD: Final = "import sys; from darelib.kernels import child; child.work(*sys.argv[1:])"

Process = subprocess.Popen[bytes]

_background: list[Process] = []  # which nobody waits for


def compile_objects(
    wanted: Collection[KernelSpec], others: Mapping[KernelSpec, Path], interrupts: Interrupts, kept: bool
) -> dict[KernelSpec, bytes]:
    """The machine code of kernels, proved.

    others: what other processes compile besides, without being waited for, and where they store it.
    """
    types = ", ".join(dict.fromkeys(code.finetuned for code in wanted))
    LOG.info(f"compiling for this machine ({types}){'; later runs start at once' if kept else ''}")
    cores = count_cores()
    with _open_folder() as folder, announced(others.values()):
        jobs = [["object", folder, *names] for names in _divide(wanted, cores)]
        places = {str(path.parent) for path in others.values()}
        aside = [["object", place, *names] for place in places for names in _divide(others, max(1, cores - len(jobs)))]
        _work_off(jobs, aside, folder, interrupts)
        made = {code: read_object(Path(folder, object_name(code))) for code in wanted}
    if None in made.values():
        raise EngineUnavailable("what it compiled could not be written")
    return {code: what for code, what in made.items() if what}


def prove_here(codes: Collection[KernelSpec], interrupts: Interrupts) -> None:
    """Let another process find out whether kernels that Numba compiles and runs itself can be used."""
    with _open_folder() as folder:
        _work_off([["here", folder, *names] for names in _divide(codes, 1)], [], folder, interrupts)


@contextmanager
def _open_folder() -> Iterator[str]:
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield folder
    except OSError as error:  # such as a full disk, or where Python is part of another program
        raise EngineUnavailable(f"its compiler cannot be run: {error.strerror or error}") from None


def _divide(codes: Collection[KernelSpec], shares: int) -> list[list[str]]:
    """The names of their object files, in so many lists or fewer: Numba takes as long to load as to compile."""
    names = [object_name(code) for code in codes]
    return [names[start::shares] for start in range(min(shares, len(names)))]


def _work_off(jobs: Sequence[list[str]], aside: Sequence[list[str]], folder: str, interrupts: Interrupts) -> None:
    """Run processes with these arguments; aside: those that nobody waits for, which begin when there is a core left."""
    running, background, deadline = dict[Process, Path](), list[Process](), time.monotonic() + COMPILE_SECONDS
    try:
        for number, words in enumerate(jobs):
            messages = Path(folder, f"{number}.txt")
            running[_start(words, messages)] = messages
        while running:
            if len(running) < count_cores() and not background:
                background += _start_aside(aside)
            for process in [process for process in running if process.poll() is not None]:
                interrupts.check()  # which may be why it ended
                messages = running.pop(process)
                if process.returncode:
                    raise EngineUnavailable(_explain(process.returncode, messages.read_text(errors="replace")))
            if time.monotonic() > deadline:
                raise EngineUnavailable("its compiler does not come to an end")
            time.sleep(TUNING.poll_seconds / 5)
            interrupts.check()
    except BaseException:
        for process in (*running, *background):
            process.kill()
            process.wait()
        raise
    _background[:] = [process for process in _background if process.poll() is None]
    _background.extend(background or _start_aside(aside))


def _start_aside(jobs: Sequence[list[str]]) -> list[Process]:
    started = []
    with suppress(OSError):  # where there is no room for another process, the merge needs none
        for words in jobs:
            started.append(_start(words, None))
    return started


def _explain(status: int, messages: str) -> str:
    """Why a process failed: what it said last, unless it was ended without a word."""
    last = messages.strip().rpartition("\n")[2]
    if status < 0 or not last:
        return f"what was compiled crashed when it was tried, with status {status}"
    return last


def _start(words: Sequence[str], messages: Path | None) -> Process:
    """messages: a file for what it says, if anybody will read that."""
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
        "NUMBA_DISABLE_JIT": "0",
        "OPENBLAS_NUM_THREADS": "1",  # more of them only take memory, and where there is little they never start
    }
    if "+avx512f" in host_features() and not any(name in os.environ for name in FEATURE_VARIABLES):
        environment["NUMBA_CPU_FEATURES"] = host_features()
    # -P: nothing is imported from the working directory. A session of its own: Ctrl-C is for this process to handle.
    command = [sys.executable or "python", "-P", "-c", CHILD, *words]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with open(messages or os.devnull, "wb") as told:
        return subprocess.Popen(command, env=environment, start_new_session=True, stderr=told, **quiet)
