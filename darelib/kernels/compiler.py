"""The processes that compile kernels and prove them: what crashes there ends no merge."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG
from darelib.core.tuning import TUNING, count_cores
from darelib.kernels import EngineUnavailable, KernelSpec
from darelib.kernels.machine import FEATURE_VARIABLES, host_features
from darelib.kernels.objects import announced, object_name, read_objects

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

    others: what the same processes compile afterwards, without being waited for, and where they
    store it.
    """
    types = ", ".join(dict.fromkeys(code.finetuned for code in wanted))
    promise = "; later runs start at once" if kept else ""
    LOG.info(f"compiling for this machine ({types}){promise}")
    with _open_folder() as folder, announced(others.values()):
        paths = {code: folder / object_name(code) for code in wanted}
        _run_processes("object", list(paths.values()), list(others.values()), folder, interrupts)
        compiled = read_objects(paths)
    if len(compiled) < len(wanted):
        raise EngineUnavailable("what it compiled cannot be read")
    return compiled


def prove_here(codes: Collection[KernelSpec], interrupts: Interrupts) -> None:
    """Let another process find out whether kernels that Numba itself runs can be used."""
    with _open_folder() as folder:
        paths = [folder / object_name(code) for code in codes]
        _run_processes("here", paths, [], folder, interrupts)


@contextmanager
def _open_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:  # such as a full disk, or where Python is part of another program
        raise EngineUnavailable(f"its compiler cannot be run: {error.strerror or error}") from None


def _run_processes(
    how: str, wanted: Sequence[Path], others: Sequence[Path], folder: Path, interrupts: Interrupts
) -> None:
    """Start a process for each core, and wait for what is wanted; they make others after that."""
    count = min(count_cores(), len(wanted) + len(others))
    deadline = time.monotonic() + COMPILE_SECONDS
    running: dict[Process, list[Path]] = {}  # what is wanted of each
    try:
        for number in range(count):
            paths = [*wanted, *others][number::count]
            its = [path for path in paths if path in wanted]
            # What nobody waits for need not be made.
            with nullcontext() if its else suppress(OSError):
                running[_start([how, *map(str, paths)], folder / f"{number}.txt")] = its
        while not all(map(os.path.exists, wanted)):
            for number, (process, its) in enumerate(running.items()):
                ended = process.poll() is not None
                interrupts.check()  # which may be why it ended
                if ended and not all(map(os.path.exists, its)):
                    raise EngineUnavailable(_explain(process, folder / f"{number}.txt"))
            if time.monotonic() > deadline:
                raise EngineUnavailable("its compiler does not come to an end")
            time.sleep(TUNING.poll_seconds / 5)
    except BaseException:
        for process in running:
            process.kill()
            process.wait()
        raise
    _background[:] = [process for process in (*_background, *running) if process.poll() is None]


def _explain(process: Process, messages: Path) -> str:
    """Why a process made nothing: what it said last, unless it was ended without a word."""
    if process.returncode == 0:
        return "what it compiled could not be written"
    last = messages.read_text(errors="replace").strip().rpartition("\n")[2]
    crash = f"its compiler, or what that made, crashed with status {process.returncode}"
    return last if process.returncode == 1 and last else crash


def _start(words: Sequence[str], messages: Path) -> Process:
    """messages: a file for what it says."""
    root = str(Path(__file__).parent.parent.parent)
    paths = [path for path in sys.path if path and isinstance(path, str)]
    # What else is set for Numba, as for finding mistakes, would change what is stored for good.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("NUMBA_") or name in FEATURE_VARIABLES
    }
    environment["PYTHONPATH"] = os.pathsep.join(paths if root in paths else [root, *paths])
    # More of them only take memory, and where there is little they never start.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if "+avx512f" in host_features() and environment.keys().isdisjoint(FEATURE_VARIABLES):
        environment["NUMBA_CPU_FEATURES"] = host_features()
    # -P: nothing is imported from the working directory.
    command = [sys.executable or "python", "-P", "-c", CHILD, *words]
    with open(messages, "wb") as errors:
        return subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process to handle
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
