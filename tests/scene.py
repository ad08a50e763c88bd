"""Scenes of merges that go wrong: the inputs, a place with an old output or none, and what may be
there afterwards."""

import contextlib
import io
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dare
from darelib.output.destination import list_files
from darelib.output.files import Journal
from darelib.output.publish import Output
from darelib.run import threads
from tests.support import (
    BF16,
    HERE,
    Patch,
    finetune,
    low_rank,
    random_model,
    save_directory,
    save_sharded,
    slow,
    snapshot,
    tune,
    write_adapter,
)

Contents = dict[str, bytes]
BOTH = pytest.mark.parametrize("kind", ["file", slow("directory")])


def contents(path: Path) -> Contents:
    """All bytes of a file or of a directory's files, by name; nothing if there is nothing."""
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in list_files(path)}
    return {"": path.read_bytes()} if path.exists() else {}


def put(path: Path, files: Contents) -> None:
    """Make a path hold these contents and nothing else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


class Scene:
    """Inputs, a place that holds an old output or nothing, and what a merge makes there.

    status, printed: the exit status of the last run, and what it printed to stderr.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        old: bool = True,
        name: str = "",
        models: Iterable[str] = ("math", "code"),
    ) -> None:
        """kind: file or directory. An old output has the same recipe, and is not to be told by it.
        name: of the output.
        """
        make_many_jobs()
        self.inputs = folder / "inputs"
        self.output = folder / "place" / (name or ("out.safetensors" if kind == "file" else "out"))
        self.partial = self.output.with_name(f"{self.output.name}.partial")
        self.output.parent.mkdir(parents=True)
        self._write_inputs()
        base, *paths = [str(self.inputs / model) for model in ("base", *models)]
        self.models = ["-b", base, "-m", *paths]
        self.arguments = ["-q", "--threads", "1", "-o", str(self.output), *self.models]
        self.arguments += ["--max-shard-size", "10kB"] if kind == "directory" else []
        self.old: Contents = {}
        assert self.run() == 0, self.printed
        self.new = contents(self.output)
        if old:
            ending = ".safetensors" if kind == "directory" else ""
            # Only the bytes of tensors distinguish its files from the new ones.
            self.old = {
                name: data[:-1] + bytes([data[-1] ^ name.endswith(ending)])
                for name, data in self.new.items()
            }
        self.before = snapshot(self.inputs)
        self.reset()

    def _write_inputs(self) -> None:
        base = random_model(dtype=BF16)
        folder = save_directory(
            self.inputs / "base", base, torch_dtype="bfloat16", tie_word_embeddings=False
        )
        put(folder / "tokenizer.json", {"": b'{"model": {"vocab": {"a": 0}}}'})
        put(folder / "templates", {"chat.txt": b"hello"})
        for k, name in enumerate(("math", "code"), 1):
            save_directory(self.inputs / name, finetune(base, k))
        save_directory(
            self.inputs / "broken", base | {"scalar": torch.tensor(math.nan, dtype=BF16)}
        )
        save_sharded(
            self.inputs / "shards",
            finetune(base, 3),
            [["scalar"], [name for name in base if name != "scalar"]],
        )
        write_adapter(self.inputs / "adapter", low_rank("layer", (37, 61)))

    def run(self, *flags: str) -> int:
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            self.status = dare.main([*self.arguments, *flags])
        self.printed = stream.getvalue()
        return self.status

    def check(
        self, *flags: str, status: int = 0, words: str = "", left: Iterable[Path] = ()
    ) -> None:
        """A run must end with this status, print these words, and keep every promise.

        left: what it may leave beside the output.
        """
        assert self.run(*flags) == status, self.printed
        assert words in self.printed
        assert self.broken(*left) == []

    def fail(self) -> int:
        """Merge a model that holds a value that no merge can use, which is found out late."""
        return self.run("--force", "--merge", str(self.inputs / "broken"))

    def interrupt(self, ranges: int) -> None:
        """Leave an unfinished merge in which that many ranges are done."""
        with Patch.context() as patch:
            stop_after(patch, ranges)
            assert self.run("--resume") == 130
        assert [name.endswith(".partial") for name in self.besides()] == [True]
        assert contents(self.output) == self.old

    @property
    def begun(self) -> Path:
        """The folder of the unfinished merge."""
        [folder] = [path for path in self.partial.iterdir() if path.is_dir()]
        return folder

    @property
    def journal(self) -> list[Any]:
        return [entry for path in self.partial.glob("*/journal") for entry in Journal(path).done]

    def besides(self) -> list[str]:
        return sorted(path.name for path in self.output.parent.iterdir() if path != self.output)

    def reset(self) -> None:
        """Make the place hold the old output again, and nothing else."""
        for name in self.besides():
            put(self.output.with_name(name), {})
        if contents(self.output) != self.old:
            put(self.output, self.old)

    def broken(self, *allowed: Path, status: int | None = None) -> list[str]:
        """The promises that the last run, or one with this status, broke.

        allowed: what it may leave.
        """
        status = self.status if status is None else status
        files = contents(self.output)
        which = "new" if files == self.new else "old" if files == self.old else "torn"
        # It may fail after the output had its name.
        late = "is in place, but may not survive" in self.printed
        expected = "new" if status == 0 or late else "old" if status == 1 else ""
        left = [name for name in self.besides() if self.output.with_name(name) not in allowed]
        promises = {
            f"{which} with status {status}: {sorted(files)}": which == expected,
            f"left {left}": not left,
            f"an unexpected error: {self.printed}": "this is a bug" not in self.printed,
            "inputs changed": snapshot(self.inputs) == self.before,
        }
        return [promise for promise, kept in promises.items() if not kept]


def make_many_jobs() -> None:
    """Many small jobs, and a journal that is written at once: what large models do in minutes."""
    tune(job_elements=1024, flush_seconds=0.0005, journal_seconds=0.0)


def stop_after(patch: Patch, ranges: int) -> None:
    """Make merges stop as if by Ctrl-C when that many ranges are written and in the journal."""
    write = Output.write_at
    written = itertools.count(1)

    def stopping(self: Output, file: int, view: memoryview, offset: int) -> None:
        if offset and (done := next(written)) > ranges:
            wait_for(
                lambda: len(Journal(self.journal.path).done) - len(self.journal.done) >= done - 1
            )
            raise KeyboardInterrupt
        write(self, file, view, offset)

    patch.setattr(Output, "write_at", stopping)


def meanwhile(patch: Patch, act: Callable[[Any], object]) -> None:
    """Let something happen in a merge: when all ranges are written, and nothing is published."""

    def run_merge(plan: Any, *arguments: Any, real: Any = threads.run_merge) -> Any:
        outcomes = real(plan, *arguments)
        act(plan)
        return outcomes

    tune(flush_seconds=60)  # nobody looks but who publishes
    patch.setattr(threads, "run_merge", run_merge)


def wait_for(happens: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


SLOWLY = """
work = Worker.run
Worker.run = lambda *arguments: (time.sleep(0.05), work(*arguments))[1]
TUNING.job_elements, TUNING.journal_seconds = 1024, 0.01
"""
# What is done first is noted; nothing more is done until there is a file GO.
HELD = """
from darelib.output.files import Files
note = Files.note
def hold(*arguments):
    note(*arguments)
    end = time.monotonic() + 60
    while not os.path.exists(os.environ["GO"]) and time.monotonic() < end:
        time.sleep(0.01)
Files.note = hold
TUNING.journal_seconds = 0.01
"""
PRELUDE = """
import os, sys, tempfile, time
import dare, darelib.plan.plan
from darelib.models.checkpoint import Checkpoint
from darelib.models.tensorfile import Stored
from darelib.output.publish import Output
from darelib.run import threads
from darelib.run.worker import Worker
from darelib.core.tuning import TUNING
parse = dare.parse_flags
dare.parse_flags = lambda *given: (print("started", flush=True), parse(*given))[1]
"""


def launch(prelude: str, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    """The command in a session of its own; it prints when it listens to signals, and its end."""
    end = "\nstatus = dare.main()\nprint('ended', flush=True)\nsys.exit(status)"
    words = [sys.executable, "-c", PRELUDE + prelude + end, *map(str, arguments)]
    return subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(HERE), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
