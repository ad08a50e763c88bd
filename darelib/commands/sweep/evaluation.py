"""What scores models: a command that prints scores, or a function that returns them."""

import hashlib
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, Self

from darelib.commands.sweep.harness import PREFIX, find_harness
from darelib.commands.sweep.scores import KEPT, EvaluationFailed, Objective, parse_output
from darelib.core.text import ConfigError

OUTPUT_TAIL: Final = 1 << 16  # bytes of what an evaluation prints that are read, from the end
SHELL_WORDS: Final = ("|", "||", "&&", ";", "<", ">", ">>", "2>&1", "&")
SHELL_HINT: Final = """use bash -c '... "$1" ...' bash {model}"""
NAMED_FUNCTION: Final = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
# Kinds of evaluations, as messages name them.
COMMAND: Final = "a command"
FUNCTION: Final = "a function"
HARNESS: Final = "lm-eval"
# Of a model and a trial: a score, or several by name, as yet unread.
Evaluate = Callable[[Any, Any], Any]


def read_end(file: IO[bytes]) -> str:
    """The end of what a process has printed to a file."""
    length = file.seek(0, os.SEEK_END)
    file.seek(max(0, length - OUTPUT_TAIL))
    return file.read().decode(errors="replace")


@dataclass(frozen=True)
class ShellCommand:
    """An evaluation that is a command: its words, one or more of them with {model} in it."""

    words: tuple[str, ...]
    timeout: float | None

    @classmethod
    def of(cls, text: str, timeout: float | None) -> Self:
        """Split as a shell would, but run without one: no path is more than a word."""
        try:
            words = shlex.split(text, posix=os.name != "nt")
        except ValueError as error:
            raise ConfigError(
                f"--evaluate {text!r} cannot be split into words: {error}", "check its quotes"
            ) from None
        if os.name == "nt":  # where a backslash is no escape, and quotes stay
            words = [word.strip("\"'") for word in words]
        if not any("{model}" in word for word in words):
            raise ConfigError(
                f"--evaluate {text!r} has no {{model}}",
                "write {model} where the model's path belongs, "
                "or name a function or tasks: file.py:function, lm-eval:TASK",
            )
        if odd := next((word for word in words if word in SHELL_WORDS), None):
            raise ConfigError(
                f"--evaluate is run without a shell, to which {odd!r} belongs", SHELL_HINT
            )
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"there is no command {words[0]!r}",
                f"check the first word of --evaluate, and the PATH; for variables, {SHELL_HINT}",
            )
        return cls(tuple(words), timeout)

    def __call__(self, model: Any, _: Any) -> Any:
        words = [word.replace("{model}", str(model)) for word in self.words]
        words[0] = shutil.which(words[0]) or words[0]
        # Files, since a pipe would be held open by whatever outlives the command.
        with TemporaryFile() as output, TemporaryFile() as errors:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                status = process.wait(self.timeout)
                verb = "was ended by signal" if status < 0 else "ended with status"
                problem = f"it {verb} {abs(status)}" if status else ""
            except subprocess.TimeoutExpired:
                problem = f"it took longer than {self.timeout:g} s"
            finally:
                kill_all(process)
            printed = read_end(output)
            complaints = read_end(errors)
        try:
            if not problem:
                return parse_output(printed)
            last = complaints.strip().rpartition("\n")[2]
            raise EvaluationFailed(f"{problem}: {last[-300:]}" if last else problem)
        except EvaluationFailed as error:
            error.output = (printed + complaints)[-KEPT:]
            raise


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it still runs, and all that it has started."""
    if os.name != "nt":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        subprocess.run(
            ["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False
        )
    process.kill()
    process.wait()


def load_function(path: str, name: str) -> Callable[..., Any]:
    """A function of a Python file, which is imported as if it were run, with what is beside it."""
    place = Path(os.path.expanduser(path))
    if not place.is_file():
        raise ConfigError(
            f"there is no file {path!r}",
            "--evaluate takes file.py:function, lm-eval:TASK, or a command with {model}",
        )
    module_name = f"evaluation_{place.stem}"  # so that it replaces no other module
    spec: Any = importlib.util.spec_from_file_location(module_name, place)  # as it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(place.resolve().parent)
    try:
        with on_path(folder):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"cannot import {path!r}: {type(error).__name__}: {error}", "run it by itself"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path!r} has no function {name!r}", "check the name after the colon")
    return on_path(folder)(function)  # which may import what is beside it later


@contextmanager
def on_path(folder: str) -> Iterator[None]:
    """Let Python import what is in a folder."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # an evaluation may have changed the path itself
            sys.path.remove(folder)


@dataclass(frozen=True)
class Terms:
    """What a sweep asks of an evaluation."""

    objectives: Sequence[Objective]
    in_memory: bool
    timeout: float | None = None
    tasks: Path | None = None  # a folder, for lm-eval

    def check(self, kind: str) -> None:
        """Refuse a kind of evaluation that cannot do it."""
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(
                f"--timeout must be above 0, not {self.timeout:g}", "it is in seconds"
            )
        if self.timeout is not None and kind != COMMAND:
            raise ConfigError(
                f"--timeout is for commands: {kind} cannot be ended",
                "leave it out, or use a command",
            )
        if self.tasks is not None and kind != HARNESS:
            raise ConfigError(
                "--lm-eval-tasks is for --evaluate lm-eval:TASK", "leave out one of the two"
            )
        if self.in_memory and kind != FUNCTION:
            raise ConfigError(
                f"{kind} needs models in files", "give a function, or leave out --in-memory"
            )


def find_evaluation(given: Any, terms: Terms) -> tuple[Evaluate, str]:
    """What evaluates models, and its label: a script that was edited is another evaluation."""
    if isinstance(given, str):
        return find_by_name(given, terms)
    if not callable(given):
        raise ConfigError(
            "evaluate must be a function, file.py:function, lm-eval:TASK or a command",
            "like 'python eval.py {model}'",
        )
    terms.check(FUNCTION)
    label = str(getattr(given, "__qualname__", type(given).__qualname__))
    with suppress(OSError, TypeError):  # of what has no source, as in an interactive session
        label += digest(inspect.getsource(given).encode())
    return adapt(given), label


def find_by_name(text: str, terms: Terms) -> tuple[Evaluate, str]:
    if text.startswith(PREFIX):
        terms.check(HARNESS)
        return find_harness(text, terms.tasks, terms.objectives)
    if named := NAMED_FUNCTION.fullmatch(text):
        terms.check(FUNCTION)
        return adapt(load_function(named[1], named[2])), f"{text} {digest_file(named[1])}"
    command = ShellCommand.of(text, terms.timeout)
    terms.check(COMMAND)
    scripts = [word for word in command.words if word.endswith((".py", ".sh"))]
    return command, " ".join([text, *map(digest_file, filter(os.path.isfile, scripts))])


def digest_file(path: str) -> str:
    return digest(Path(os.path.expanduser(path)).read_bytes())


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def adapt(function: Callable[..., Any]) -> Evaluate:
    """A function that needs a second argument is given the trial, to report to and be pruned."""
    needed = 1
    with suppress(ValueError, TypeError):  # of what is written in C
        parameters = inspect.signature(function).parameters.values()
        needed = sum(p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)

    def call(model: Any, trial: Any) -> Any:
        with redirect_stdout(sys.stderr):  # results have stdout for themselves
            return function(model, trial) if needed > 1 else function(model)

    return call
