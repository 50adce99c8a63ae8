"""Remembers a signal that asks a run to end, so that the training loop can save before it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from types import FrameType

__all__ = ["StopSignals"]


class StopSignals:
    """Takes signals until it is released; the handlers that were there come back then.

    Parameters
    ----------
    numbers : collection of int
        The signals.

    Attributes
    ----------
    came : bool
        Whether one of them has come.

    Raises
    ------
    ValueError
        If a signal cannot be taken, or this is not the main thread, which alone may take them.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.came = False
        self._pid = os.getpid()
        self._before = {}
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._note)
        except (OSError, TypeError, ValueError) as error:
            self.release()
            raise ValueError(f"stop_signals={numbers!r} cannot be taken: {error}") from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if os.getpid() != self._pid and number == signal.SIGTERM:
            # A parent ends its children by this one, whose handler a fork has copied.
            self.release()
            os.kill(os.getpid(), number)

    def release(self) -> None:
        """Put the handlers back, unless somebody else has taken a signal since."""
        while self._before:
            number, handler = self._before.popitem()
            with suppress(ValueError):  # not the main thread
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
