"""Errors, words for people (messages, names, figures as a terminal shows them), and TOML."""

import json
import logging
import os
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from darelib.core.tuning import TUNING

LOG: Final = logging.getLogger("dare")
# How many names a message lists before it says "and 12 more".
LISTED: Final = 3
MOST_KNOWN: Final = 60  # names that a hint lists
# How many characters of a message are printed: names may be as long as a header.
MAX_MESSAGE: Final = 4000
# How many characters of a name the tables show.
MAX_CELL: Final = 56
# The packages of each extra.
EXTRAS: Final = {
    "torch": "torch safetensors",
    "match": "torch safetensors transformers",
    "hub": "huggingface_hub",
    "plot": "matplotlib",
    "sweep": "optuna",
    "lm-eval": "'lm-eval[hf]'",
    "ray": "ray",
}
# As terminals number them.
COLOURS: Final = {"error": 31, "warning": 33, "hint": 36}


class DareError(Exception):
    """Something a person can fix: a sentence that says what is wrong, a hint what to do."""

    status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is sent from one process to another."""
        return type(self), (*self.args, self.hint)


class InputChanged(DareError):
    """An input changed while it was read, so that everything made from it is worthless."""


class ConfigError(DareError):
    """Wrong usage or configuration, as opposed to files that cannot be merged."""

    status = 2


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra, as this tool itself was installed."""
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").exists()
    if is_checkout and "UV" in os.environ:  # uv run
        return f"install it: uv run --extra {extra} python dare.py ..."
    if (Path(sys.prefix) / "uv-receipt.toml").exists():  # uv tool install
        return f"install it: uv pip install --python {sys.executable} {EXTRAS[extra]}"
    return f"install it: {sys.executable} -m pip install {EXTRAS[extra]}"


class Messages(logging.StreamHandler[IO[str]]):
    """Warnings and notes on stderr, one to a line, as the command's errors are."""

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return label("warning", record.getMessage(), self.stream)
        return printable(record.getMessage())


def as_text(name: str | Path) -> str:
    """A name that may hold bytes that are no text, as text."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Text without anything that a terminal obeys: names may hold escape sequences."""
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def clip(name: str, most: int = MAX_CELL) -> str:
    """A printable name for a table; of a long one the end is kept, because names differ there."""
    text = printable(name)
    return text if len(text) <= most else f"{text[:8]}...{text[11 - most :]}"


def is_terminal(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that obeys control characters."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def show_cursor() -> None:
    """Undo what a bar does to a terminal."""
    if is_terminal(sys.stderr):
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")


def label(kind: str, text: str, stream: IO[str]) -> str:
    """An error, a warning or a hint as one line, its first word in colour where there are colours.

    Not by rich, which takes longer to load than most errors take to be found. Users may have turned
    colours off (no-color.org).
    """
    known = os.name != "nt" or "WT_SESSION" in os.environ or "ANSICON" in os.environ
    coloured = known and is_terminal(stream) and not os.environ.get("NO_COLOR")
    word = f"\x1b[{COLOURS[kind]}m{kind}:\x1b[0m" if coloured else f"{kind}:"
    return f"{word} {printable(text)}"


def list_names(names: Sequence[str]) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED:,} more"


def shorten_names(names: Sequence[str]) -> list[str]:
    """What to call models: the last parts of their paths, if these tell them apart."""
    short = [Path(name).name.removesuffix(".safetensors") for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def nearest(word: str, known: Iterable[str], folder: str = "") -> str:
    """A hint with the known word that is spelled most like this one, in its folder.

    It begins with the same letter: nuslerp is a method of its own, and no slerp.
    """
    import difflib

    alike = [other for other in known if other[:1].lower() == word[:1].lower()]
    close = difflib.get_close_matches(word, alike, n=1)
    if close:
        return f"did you mean {folder}{close[0]}?"
    every = sorted(known)
    return f"known here: {', '.join(every[:MOST_KNOWN])}{', ...' * (len(every) > MOST_KNOWN)}"


def count_of(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def human(size: float) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    """A time that is only known roughly."""
    if seconds < 1:
        return "under a second"
    if seconds < 120:
        return f"about {seconds:.2g} s" if seconds < 10 else f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"


def table(rows: list[list[str]], texts: Collection[int] = (0,)) -> str:
    """Aligned columns: those of texts to the left, numbers to the right."""
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        align = str.ljust if number in texts else str.rjust
        columns.append([align(cell, width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def print_result(result: str | dict[str, Any]) -> None:
    """Print what came out, as text or as JSON. That nobody can read it does not undo it."""
    try:
        print(result if isinstance(result, str) else json.dumps(result, indent=2), flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whoever read our output has read enough
            LOG.warning(f"cannot print what was done: {error.strerror}")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the interpreter's last flush)


class Lines:
    """Progress where no bar can move, as in a file or a notebook: lines at growing intervals."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._due = TUNING.first_line_seconds
        self._lock = threading.Lock()

    def advance(self, amount: int) -> None:
        with self._lock:
            self._done += amount
            passed = time.monotonic() - self._started
            # Of less than a hundredth, the rest cannot be told.
            if self._due < passed and self._total <= 100 * self._done < 100 * self._total:
                self._due = passed + min(passed, TUNING.last_line_seconds)
                left = duration(passed * (self._total - self._done) / self._done)
                share = self._done / self._total
                print(f"{self._what}: {share:.0%} done, {left} left", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar and the time left on stderr if that is a terminal, else now and then a line.

    Gives the function that advances it, for any thread.
    """
    if not shown:
        yield lambda _: None
        return
    if not is_terminal(sys.stderr):
        yield Lines(what, total).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    columns = (what, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


MAX_TOML: Final = 1 << 20  # bytes, so that a hostile file takes little memory and time
TOO_LONG: Final = f"it is longer than {MAX_TOML:,} bytes"
# Python's parser takes memory and time with the square of the number of parts of a dotted key.
LONG_KEY: Final = re.compile(  # of bare or quoted parts
    r"""(?<![\w\\-])(?:(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}"""
)


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML text says; what is not TOML, or too much to read, is a ValueError."""
    if len(text.encode(errors="replace")) > MAX_TOML:
        raise ValueError(TOO_LONG)
    if LONG_KEY.search(text):
        raise ValueError("one of its keys has too many parts")
    return tomllib.loads(text)
