"""The command as the shell sees it: its streams, its messages and its exit status."""

import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper

from darelib.core.interrupts import Terminated, stop_on_signals
from darelib.core.text import LOG, DareError, Messages, label


def run_command(act: Callable[[], None]) -> int:
    """The exit status. Errors become a sentence and a hint: no traceback reaches a user."""
    # Closed by the caller, as after >&- or 2>&-, they are None. Here they stay open.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A name that the terminal lacks letters for is no error.
            stream.reconfigure(errors="backslashreplace")
    messages = Messages(sys.stderr)
    LOG.addHandler(messages)
    LOG.propagate = False
    with stop_on_signals() as received:
        try:
            act()
            sys.stdout.flush()
            return 0
        except (Exception, KeyboardInterrupt, Terminated) as error:
            if isinstance(error, Exception) and not received:
                known = explain(error)
                print(label("error", str(known), sys.stderr), file=sys.stderr)
                print_hints([known.hint] if known.hint else [])
                return known.status
            print("interrupted", file=sys.stderr)
            print_hints(getattr(error, "__notes__", []))
            terminated = isinstance(error, Terminated) or signal.SIGTERM in received
            return 143 if terminated else 130
        finally:
            LOG.removeHandler(messages)
            LOG.propagate = True


def print_hints(hints: list[str]) -> None:
    for hint in hints:
        print(label("hint", hint, sys.stderr), file=sys.stderr)


def explain(error: Exception) -> DareError:
    if isinstance(error, DareError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return DareError(
            f"{error.name} is not installed for {sys.executable}",
            "use uv run python dare.py ..., or pip install . first",
        )
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return DareError(
            f"there is too little memory: {error or type(error).__name__}",
            "give fewer --threads, or raise the limits on memory and processes (ulimit -a)",
        )
    if os.environ.get("DARE_TRACEBACK"):
        raise error
    return DareError(
        f"unexpected {type(error).__name__}: {error}",
        "this is a bug; run again with DARE_TRACEBACK=1 set and report what it shows",
    )
