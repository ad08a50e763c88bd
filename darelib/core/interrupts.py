"""Signals that wait until it is safe to stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn, Self

from darelib.core.text import show_cursor

# Programs that start others may pass one Ctrl-C on twice: so soon after the first, it is the same.
SAME_SECONDS: Final = 0.5


class Terminated(BaseException):
    """Somebody sent SIGTERM: to be handled like an interrupt."""


def ignore_signals() -> None:
    with suppress(ValueError):  # only a main thread gets them
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


class SecondSignal:
    """Ends the process."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, number: int, _: object) -> None:
        if time.monotonic() - self._started > SAME_SECONDS:
            show_cursor()
            os._exit(128 + number)


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """The first signal stops the command, which tidies up. Another one ends the process at once, as
    a crash would: the next merge removes or continues what is left.

    Gives a list that will hold the first one's number: what it raises within an import may come out
    as another error.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> NoReturn:
        second = SecondSignal()
        for each in before:
            signal.signal(each, second)
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # only a main thread may take signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """Holds SIGINT and SIGTERM back, so that nothing is torn in two; check() lets one through.

    Before it is entered, it holds nothing back.
    """

    def __init__(self) -> None:
        self._caught: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # no other gets signals
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._before = {number: old for number, old in handlers.items() if callable(old)}
        self.hold()
        return self

    def hold(self) -> None:
        """Catch signals; once more where a library has begun to catch them itself."""
        for number in self._before:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._caught.append((number, frame))

    def check(self) -> None:
        if self._caught:
            number, frame = self._caught.pop(0)
            self._before[number](number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Once a signal has been let through, a second one ends the process.
            if not isinstance(signal.getsignal(number), SecondSignal):
                signal.signal(number, handler)
        if kind is None:
            self.check()
