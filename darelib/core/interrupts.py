"""Signals that wait until it is safe to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


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
            signal.signal(number, lambda *signal_and_frame: self._caught.append(signal_and_frame))

    def check(self) -> None:
        if self._caught:
            number, frame = self._caught.pop(0)
            self._before[number](number, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # It is ignored once a signal has been let through.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        if kind is None:
            self.check()
