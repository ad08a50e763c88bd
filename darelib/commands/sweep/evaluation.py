"""Scores: by a command that prints them, or a function that returns them."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from darelib.core.text import ConfigError, DareError

OUTPUT_TAIL: Final = 1 << 16  # bytes of what an evaluation prints that are read, from the end
KEPT: Final = 4000  # characters of it that are kept with a trial that has failed
ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBER: Final = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?![\w.])", re.I
)
SHELL_WORDS: Final = ("|", "||", "&&", ";", "<", ">", ">>", "2>&1", "&")
FUNCTION: Final = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
Evaluate = Callable[
    [Any, Any], Any
]  # of a model and a trial: a score, or several by name, as yet unread


class EvaluationFailed(DareError):
    """This model has no score; others may have one. output: what the evaluation printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Objective:
    """A score, and whether more of it is better."""

    name: str
    maximize: bool

    @classmethod
    def of(cls, text: str) -> Objective:
        name, _, way = str(text).rpartition(":")
        if not name or way not in ("max", "min"):
            raise ConfigError(
                f"the objective {text!r} must be NAME:max or NAME:min", "like accuracy:max loss:min"
            )
        return cls(name, way == "max")

    def is_better(self, one: float, other: float) -> bool:
        return one > other if self.maximize else one < other


def read_scores(given: Any, objectives: Sequence[Objective]) -> list[float]:
    """The scores in what a function has returned or a command has printed."""
    names = [objective.name for objective in objectives]
    if isinstance(given, str):
        given = parse_output(given)
    if not isinstance(given, Mapping):
        given = {names[0]: given} if len(names) == 1 else {}
    found = []
    for name in names:
        if name not in given:
            known = ", ".join(map(str, given)) or "nothing"
            raise EvaluationFailed(
                f"it gives no score {name!r}, but {known}; --objective NAME:max names another"
            )
        value = given[name]
        value = value.item() if hasattr(value, "item") else value  # of a tensor or a NumPy number
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise EvaluationFailed(f"its {name!r} is no finite number but {value!r}")
        found.append(float(value))
    return found


def parse_output(text: str) -> Any:
    """The JSON object that an output ends with, or else the only number in its last line."""
    text = ESCAPES.sub("", text).rstrip()
    for start in reversed([found.start() for found in re.finditer(r"^\{", text, re.MULTILINE)]):
        with suppress(ValueError, RecursionError):
            return json.loads(text[start:])
    line = text.rpartition("\n")[2]
    numbers = NUMBER.findall(line)
    if len(numbers) != 1:
        raise EvaluationFailed(
            f"its last line, {line[:80]!r}, is no JSON and has not one number but {len(numbers)}"
        )
    return float(numbers[0])


@dataclass(frozen=True)
class ShellCommand:
    """An evaluation that is a command: its words, one or more of them with {model} in it."""

    words: tuple[str, ...]
    timeout: float | None

    @classmethod
    def of(cls, text: str, timeout: float | None) -> ShellCommand:
        """Split as a shell would, but run without one, so that no path can be mistaken for more than a word."""
        try:
            words = shlex.split(text, posix=os.name != "nt")
        except ValueError as error:
            raise ConfigError(
                f"--evaluate {text!r} cannot be split into words: {error}", "check its quotes"
            ) from None
        if os.name == "nt":  # where a backslash is no escape, and quotes stay
            words = [word.strip("\"'") for word in words]
        if not any("{model}" in word for word in words):
            hint = (
                "write {model} where the model's path belongs, or name a function: file.py:function"
            )
            raise ConfigError(f"--evaluate {text!r} has no {{model}}", hint)
        if odd := next((word for word in words if word in SHELL_WORDS), None):
            raise ConfigError(
                f"--evaluate is run without a shell, to which {odd!r} belongs", "use bash -c '...'"
            )
        if shutil.which(words[0]) is None:
            hint = (
                "check the first word of --evaluate, and the PATH; for variables, use bash -c '...'"
            )
            raise ConfigError(f"there is no command {words[0]!r}", hint)
        return cls(tuple(words), timeout)

    def __call__(self, model: Any, _: Any) -> str:
        words = [word.replace("{model}", str(model)) for word in self.words]
        words[0] = shutil.which(words[0]) or words[0]
        # A file, not a pipe: a process that outlives its parent would hold a pipe open, and this would wait for it.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
            streams: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": complaints,
            }
            process = subprocess.Popen(words, **streams, start_new_session=True)
            try:
                status: int | None = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
            printed, complained = (_read_tail(file) for file in (output, complaints))
        if status != 0:
            last = complained.strip().rpartition("\n")[2]
            how = (
                f"it was ended by signal {-status}"
                if status and status < 0
                else f"it ended with status {status}"
            )
            how = f"it took longer than {self.timeout:g} s" if status is None else how
            raise EvaluationFailed(
                f"{how}{': ' * bool(last)}{last[-300:]}", (printed + complained)[-KEPT:]
            )
        try:
            parse_output(printed)
        except EvaluationFailed as error:
            raise EvaluationFailed(str(error), (printed + complained)[-KEPT:]) from None
        return printed


def end(process: subprocess.Popen[bytes]) -> None:
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


def _read_tail(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL))
    return str(file.read().decode(errors="replace"))


def load_function(path: str, name: str) -> Callable[..., Any]:
    """A function of a Python file, which is imported as if it were run: files beside it can be imported."""
    place = Path(os.path.expanduser(path))
    if not place.is_file():
        raise ConfigError(
            f"there is no file {path!r}",
            "--evaluate takes file.py:function, or a command with {model}",
        )
    sys.path.insert(0, str(place.resolve().parent))
    name_here = f"evaluation_{place.stem}"  # so that it takes no other module's place
    spec = importlib.util.spec_from_file_location(name_here, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_here] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"cannot import {path!r}: {type(error).__name__}: {error}", "run it by itself"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path!r} has no function {name!r}", "check the name after the colon")
    return function


def find_evaluation(given: Any, timeout: float | None) -> tuple[Evaluate, str]:
    """What evaluates models, and what to call it: a script that was edited is another evaluation."""
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"--timeout must be above 0, not {timeout:g}", "it is in seconds")
    label, files = str(given), list[Path]()
    if isinstance(given, str) and (found := FUNCTION.fullmatch(given)):
        if timeout is not None:
            raise ConfigError(
                "--timeout is for commands: a function cannot be ended",
                "leave it out, or use a command",
            )
        files, given = [Path(os.path.expanduser(found[1]))], load_function(found[1], found[2])
    elif isinstance(given, str):
        given = ShellCommand.of(given, timeout)
        files = [
            Path(word)
            for word in given.words
            if word.endswith((".py", ".sh")) and os.path.isfile(word)
        ]
        return given, " ".join([label, *map(_digest, files)])
    if not callable(given):
        raise ConfigError(
            "evaluate must be a function, file.py:function or a command",
            "like 'python eval.py {model}'",
        )
    if not files:
        label = str(getattr(given, "__qualname__", type(given).__qualname__))
        with suppress(OSError, TypeError):  # of what has no source, as in an interactive session
            label += hashlib.sha256(inspect.getsource(given).encode()).hexdigest()[:16]
    return _call(given), " ".join([label, *map(_digest, files)])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _call(function: Callable[..., Any]) -> Evaluate:
    """A function that takes a second argument is given the trial, to report how it goes and be pruned."""
    wants_trial = False
    with suppress(ValueError, TypeError):  # of what is written in C
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
        wants_trial = len([p for p in required if p.default is p.empty]) >= 2

    def call(model: Any, trial: Any) -> Any:
        with redirect_stdout(sys.stderr):  # results have stdout for themselves
            return function(model, trial) if wants_trial else function(model)

    return call
