"""Ctrl-C and SIGTERM: heeded at a good moment, or at once when they come again."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised by what a signal has ended in good order; its text says how to go on.

    Args:
      received: The signal's name.
      text: What has been kept, and how to go on.

    Attributes:
      received: The signal.
    """

    def __init__(self, received: str, text: str):
        super().__init__(f"ended by {received}; {text}")
        self.received = signal.Signals[received]


class Interrupts:
    """Notes the first signal, and lets the second raise; a context manager.

    Signals that were ignored stay ignored, and on leaving the handlers are those of
    before. Only the main thread can have handlers: elsewhere nothing is noted.

    Attributes:
      received: The signal's name, once one has come.

    Examples:
      >>> with Interrupts() as interrupts:
      ...     signal.raise_signal(signal.SIGINT)
      ...     interrupts.received
      'SIGINT'
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None is a handler that Python did not install and cannot restore.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt("interrupted twice: ended at once")
        self.received = signal.Signals(number).name
