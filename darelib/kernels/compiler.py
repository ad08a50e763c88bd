"""The processes that compile kernels and prove them: what crashes there ends one of them, and no merge."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG
from darelib.core.tuning import TUNING, count_cores
from darelib.kernels import EngineUnavailable, KernelSpec
from darelib.kernels.machine import FEATURE_VARIABLES, host_features
from darelib.kernels.objects import announced, object_name, read_object

# Far more than all kernels of a merge take on a busy machine.
COMPILE_SECONDS: Final = 600
CHILD: Final = "import sys; from darelib.kernels import child; child.work(*sys.argv[1:])"

Process = subprocess.Popen[bytes]

_background: list[Process] = []  # which nobody waits for any more


def compile_objects(
    wanted: Collection[KernelSpec],
    others: Mapping[KernelSpec, Path],
    interrupts: Interrupts,
    kept: bool,
) -> dict[KernelSpec, bytes]:
    """The machine code of kernels, proved.

    others: what the same processes compile afterwards, without being waited for, and where they store it.
    """
    types = ", ".join(dict.fromkeys(code.finetuned for code in wanted))
    LOG.info(f"compiling for this machine ({types}){'; later runs start at once' if kept else ''}")
    with _open_folder() as folder, announced(others.values()):
        paths = {code: folder / object_name(code) for code in wanted}
        _work_off("object", list(paths.values()), list(others.values()), folder, interrupts)
        made = {code: what for code, path in paths.items() if (what := read_object(path))}
    if len(made) < len(wanted):
        raise EngineUnavailable("what it compiled cannot be read")
    return made


def prove_here(codes: Collection[KernelSpec], interrupts: Interrupts) -> None:
    """Let another process find out whether kernels that Numba compiles and runs itself can be used."""
    with _open_folder() as folder:
        _work_off("here", [folder / object_name(code) for code in codes], [], folder, interrupts)


@contextmanager
def _open_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:  # such as a full disk, or where Python is part of another program
        raise EngineUnavailable(f"its compiler cannot be run: {error.strerror or error}") from None


def _work_off(
    how: str, wanted: Sequence[Path], others: Sequence[Path], folder: Path, interrupts: Interrupts
) -> None:
    """Start a process for each core, and wait until what is wanted was made; others are made after that."""
    count = min(count_cores(), len(wanted) + len(others))
    running, deadline = dict[Process, tuple[Path, list[Path]]](), time.monotonic() + COMPILE_SECONDS
    try:
        for number in range(count):
            paths, messages = [*wanted, *others][number::count], folder / f"{number}.txt"
            its = [path for path in paths if path in wanted]
            with (
                nullcontext() if its else suppress(OSError)
            ):  # what nobody waits for need not be made
                running[_start([how, *map(str, paths)], messages)] = messages, its
        while not all(map(os.path.exists, wanted)):
            for process, (messages, its) in running.items():
                ended = process.poll() is not None
                interrupts.check()  # which may be why it ended
                if ended and not all(map(os.path.exists, its)):
                    raise EngineUnavailable(
                        _explain(process.returncode, messages.read_text(errors="replace"))
                    )
            if time.monotonic() > deadline:
                raise EngineUnavailable("its compiler does not come to an end")
            time.sleep(TUNING.poll_seconds / 5)
    except BaseException:
        for process in running:
            process.kill()
            process.wait()
        raise
    _background[:] = [process for process in (*_background, *running) if process.poll() is None]


def _explain(status: int, messages: str) -> str:
    """Why a process made nothing: what it said last, unless it was ended without a word."""
    last = messages.strip().rpartition("\n")[2]
    if status == 0:
        return "what it compiled could not be written"
    return (
        last
        if status == 1 and last
        else f"its compiler, or what that made, crashed with status {status}"
    )


def _start(words: Sequence[str], messages: Path) -> Process:
    """messages: a file for what it says."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [path for path in sys.path if path and isinstance(path, str)]
    # What else is set for Numba, as for finding mistakes, would change what is stored for good.
    known = {
        name: value
        for name, value in os.environ.items()
        if name[:6] != "NUMBA_" or name in FEATURE_VARIABLES
    }
    environment = (
        known
        | {
            "PYTHONPATH": os.pathsep.join(paths if root in paths else [root, *paths]),
            "OPENBLAS_NUM_THREADS": "1",  # more of them only take memory, and where there is little they never start
        }
    )
    if "+avx512f" in host_features() and not any(name in os.environ for name in FEATURE_VARIABLES):
        environment["NUMBA_CPU_FEATURES"] = host_features()
    # -P: nothing is imported from the working directory. A session of its own: Ctrl-C is for this process to handle.
    command = [sys.executable or "python", "-P", "-c", CHILD, *words]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with open(messages, "wb") as told:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stderr=told, **quiet
        )
