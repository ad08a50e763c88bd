"""The evaluation of a sweep as a command: run it on a model, and find the score in what it prints."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from dare import ConfigError, DareError

# How much of the output is read, from its end, in bytes; and of the errors shown, in characters.
OUTPUT_TAIL: Final = 1 << 20
COMPLAINT: Final = 300


class EvaluationFailed(DareError):
    """This model has no score; others may have one."""


ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBER: Final = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?!\.?\w)",
    re.I,
)


def score_in(output: str) -> float:
    """The "score" of the last JSON object that has one, or else the last number of all."""
    text = ESCAPES.sub("", output)
    found: dict[str, Any] = {}
    decoder, position = json.JSONDecoder(), 0
    for start in re.finditer(r"^[ \t]*(?=\{)", text, re.MULTILINE):
        if start.end() < position:  # inside the one before
            continue
        with suppress(ValueError, RecursionError):
            table, position = decoder.raw_decode(text, start.end())
            found = table if "score" in table else found
    if found:
        score = found["score"]
        if isinstance(score, bool) or not isinstance(score, int | float):  # some other number would be a guess
            raise EvaluationFailed(f'its "score" is no number but {score!r}')
        return float(score)
    numbers = NUMBER.findall(text)
    if not numbers:
        raise EvaluationFailed("it printed no number")
    return float(numbers[-1].replace(",", ""))


@dataclass(frozen=True)
class Command:
    """An evaluation that is a command: its words, one or more of them with {model} in it."""

    words: tuple[str, ...]
    timeout: float | None = None

    @classmethod
    def of(cls, text: str, timeout: float | None = None) -> Command:
        """Split as a shell would, but run without one, so that no path can be mistaken for more than a word."""
        try:
            words = shlex.split(text, posix=os.name != "nt")
        except ValueError as error:
            raise ConfigError(f"--evaluate {text!r} cannot be split into words: {error}", "check its quotes") from None
        if os.name == "nt":  # where a backslash is no escape, and quotes stay
            words = [word.strip("\"'") for word in words]
        if not any("{model}" in word for word in words):
            raise ConfigError(f"--evaluate {text!r} has no {{model}}", "write {model} where the model's path belongs")
        if shutil.which(words[0]) is None:
            raise ConfigError(f"there is no command {words[0]!r}", "check the first word of --evaluate, and the PATH")
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"--timeout must be above 0, not {timeout:g}", "it is in seconds")
        return cls(tuple(words), timeout)

    @property
    def label(self) -> str:
        """What its scores are kept under: a script that was edited is another evaluation."""
        scripts = [Path(word) for word in self.words[1:] if word.endswith((".py", ".sh")) and os.path.isfile(word)]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in scripts]
        return " ".join([shlex.join(self.words), *digests])

    def __call__(self, model: Path) -> float:
        words = [word.replace("{model}", str(model)) for word in self.words]
        words[0] = shutil.which(words[0]) or words[0]
        # Files, not pipes: a process that outlives its parent would hold a pipe open, and this would wait for it.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": complaints}
            process = subprocess.Popen(words, **streams, start_new_session=True)
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                raise EvaluationFailed(f"it took longer than {self.timeout:g} s{last_line(complaints)}") from None
            finally:
                end(process)
            if status:
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                raise EvaluationFailed(f"it {how}{last_line(complaints)}")
            try:
                return score_in(tail(output))
            except EvaluationFailed as error:
                raise EvaluationFailed(f"{error}{last_line(complaints)}") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it has started."""
    if process.poll() is not None:
        return
    if os.name == "nt":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL))
    return file.read().decode(errors="replace")


def last_line(complaints: IO[bytes]) -> str:
    lines = ESCAPES.sub("", tail(complaints)).strip().splitlines()
    return f": {lines[-1].strip()[-COMPLAINT:]}" if lines else ""
