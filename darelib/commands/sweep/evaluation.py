"""Scores: by a command that prints them, or a function that returns them."""

import hashlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, Self

from darelib.config import is_number
from darelib.core.text import ConfigError, DareError, list_names

OUTPUT_TAIL: Final = 1 << 16  # bytes of what an evaluation prints that are kept, from the end
KEPT: Final = 4000  # characters of it that are kept with a trial that has failed
ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Digits are never given back, so that a line takes no longer than its length.
NUMBER: Final = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d++\.?\d*+|\.\d++)(?:e[-+]?\d++)?|nan|inf(?:inity)?)(?![\w.])", re.I
)
SHELL_WORDS: Final = ("|", "||", "&&", ";", "<", ">", ">>", "2>&1", "&")
FUNCTION: Final = re.compile(r".+\.py:[A-Za-z_]\w*")
# Of a model and a trial: a score, or several by name, as yet unread.
Evaluate = Callable[[Any, Any], Any]


class EvaluationFailed(DareError):
    """This model has no score; others may have one."""

    output = ""  # what the evaluation printed


@dataclass(frozen=True)
class Objective:
    """A score, and whether more of it is better."""

    name: str
    maximize: bool

    @classmethod
    def of(cls, text: str) -> Self:
        name, _, way = str(text).rpartition(":")
        if not name or way not in ("max", "min"):
            raise ConfigError(
                f"the objective {text!r} must be NAME:max or NAME:min", "like accuracy:max loss:min"
            )
        return cls(name, way == "max")

    def gain(self, one: float, other: float) -> float:
        return one - other if self.maximize else other - one


def read_scores(given: Any, objectives: Sequence[Objective]) -> list[float]:
    """The scores in what a function has returned or a command has printed."""
    if isinstance(given, str):
        given = parse_output(given)
    if not isinstance(given, Mapping):
        given = {objectives[0].name: given} if len(objectives) == 1 else {}
    scores = []
    for objective in objectives:
        if objective.name not in given:
            raise EvaluationFailed(
                f"it gives no score {objective.name!r}, but "
                f"{list_names(list(map(str, given))) or 'nothing'}; --objective NAME:max names "
                "another"
            )
        value = given[objective.name]
        value = value.item() if hasattr(value, "item") else value  # of a tensor or a NumPy number
        if not is_number(value):
            raise EvaluationFailed(f"its {objective.name!r} is no finite number but {value!r}")
        scores.append(float(value))
    return scores


def parse_output(text: str) -> Any:
    """The JSON object that an output ends with, or else the only number in its last line."""
    text = ESCAPES.sub("", text).rstrip()
    for brace in reversed(list(re.finditer(r"^\{", text, re.MULTILINE))):
        with suppress(ValueError, RecursionError):
            return json.loads(text[brace.start() :])
    line = text.rpartition("\n")[2]
    numbers = NUMBER.findall(line)
    # What has a brace or a quote may be JSON that was cut off, whose number is any.
    if len(numbers) != 1 or any(sign in line for sign in '{}"'):
        raise EvaluationFailed(f"its last line, {line[-80:]!r}, is neither JSON nor has one number")
    return float(numbers[0])


def split_command(text: str) -> list[str]:
    """The words of a command, as a shell would split it; it is run without one, so that no path is
    more than a word.
    """
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
            "write {model} where the model's path belongs, or name a function: file.py:function",
        )
    odd = next((word for word in words if word in SHELL_WORDS), None)
    if odd:
        raise ConfigError(
            f"--evaluate is run without a shell, to which {odd!r} belongs",
            """use bash -c '... "$1" ...' bash {model}""",
        )
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"there is no command {words[0]!r}", "check the first word of --evaluate, and the PATH"
        )
    return words


def run_command(words: Sequence[str], timeout: float | None, model: Any, _: Any) -> Any:
    program, *others = (word.replace("{model}", str(model)) for word in words)
    # Files, not pipes: a process that outlives its parent may hold a pipe open.
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = subprocess.Popen(
            [shutil.which(program) or program, *others],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
            verb = "was ended by signal" if status < 0 else "ended with status"
            problem = f"it {verb} {abs(status)}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"it took longer than {timeout:g} s"
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


def read_end(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL))
    return file.read().decode(errors="replace")


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


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """A function of a Python file, which is imported as if it were run, with what is beside it."""
    module_name = f"evaluation_{path.stem}"  # so that it replaces no other module
    spec: Any = importlib.util.spec_from_file_location(module_name, path)  # as it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    try:
        with on_path(folder):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"cannot import {str(path)!r}: {type(error).__name__}: {error}", "run it by itself"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{str(path)!r} has no function {name!r}", "check the name after the colon"
        )
    return on_path(folder)(function)  # which may import what is beside it later


@contextmanager
def on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # an evaluation may have changed the path itself
            sys.path.remove(folder)


def is_command(given: Any) -> bool:
    return isinstance(given, str) and not FUNCTION.fullmatch(given)


def find_evaluation(given: Any, timeout: float | None) -> tuple[Evaluate, str]:
    """What evaluates models, and its label: a script that was edited is another evaluation."""
    if is_command(given):
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"--timeout must be above 0, not {timeout:g}", "it is in seconds")
        words = split_command(given)
        scripts = [word for word in words if word.endswith((".py", ".sh"))]
        contents = [Path(word).read_bytes() for word in scripts if os.path.isfile(word)]
        label = " ".join([given, *map(digest, contents)])
        return partial(run_command, words, timeout), label
    if timeout is not None:
        raise ConfigError(
            "--timeout is for commands: a function cannot be ended",
            "leave it out, or use a command",
        )
    if isinstance(given, str):
        file, _, name = given.rpartition(":")
        path = Path(os.path.expanduser(file))
        return adapt(load_function(path, name)), f"{given} {digest(path.read_bytes())}"
    label = str(getattr(given, "__qualname__", type(given).__qualname__))
    with suppress(OSError, TypeError):  # of what has no source, as in an interactive session
        label += digest(inspect.getsource(given).encode())
    return adapt(given), label


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
