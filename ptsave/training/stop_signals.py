"""Remembers a signal that asks a run to end, so that the training loop can save before it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]

_before: dict[int, Any] = {}  # the handlers that this module's has taken the place of
_waiting: list[StopSignals] = []


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
        self._numbers = frozenset(numbers)
        _waiting.append(self)
        try:
            for number in self._numbers:
                handler = signal.signal(number, _note)
                if handler is not _note:
                    _before[number] = handler
        except (OSError, TypeError, ValueError) as error:
            self.release()
            raise ValueError(f"stop_signals={numbers!r} cannot be taken: {error}") from error

    def takes(self, number: int) -> bool:
        """Return whether a signal asks this process to end, and no parent its forked child."""
        return number in self._numbers and (number != signal.SIGTERM or self._pid == os.getpid())

    def release(self) -> None:
        """Take signals no more; outside of the main thread handlers stay until they run."""
        if self in _waiting:
            _waiting.remove(self)
        for number in self._numbers & _before.keys():
            if not any(number in each._numbers for each in _waiting):
                _put_back(number)


def _note(number: int, frame: FrameType | None) -> None:
    takers = [each for each in _waiting if each.takes(number)]
    for each in takers:
        each.came = True
    if not takers and signal.getsignal(number) is _note:  # or another handler has called this one
        _put_back(number)
        os.kill(os.getpid(), number)


def _put_back(number: int) -> None:
    """Put a handler back, unless somebody else has taken the signal since."""
    try:
        if signal.getsignal(number) is _note:
            before = _before.get(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)
        _before.pop(number, None)
    except ValueError:  # not the main thread
        return
