"""Signals that wait until it is safe to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self


class Terminated(BaseException):
    """Somebody sent SIGTERM: to be handled like an interrupt."""


def ignore_signals() -> None:
    with suppress(ValueError):  # only a main thread gets them
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """The first signal stops the command; more of them must not stop it from tidying up.

    Gives a list that will hold its number: what it raises within an import may come out as
    another error.
    """
    received: list[int] = []

    def stop(number: int, _: object) -> NoReturn:
        ignore_signals()
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
    """Holds SIGINT and SIGTERM back, so that nothing is torn in two; check() lets one through."""

    def __enter__(self) -> Self:
        self._caught: list[tuple[int, FrameType | None]] = []
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
            # Once a signal has been let through, they are ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        if kind is None:
            self.check()
