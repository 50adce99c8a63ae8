"""Remembers signals that ask a run to end, so that the training loop can save first."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from types import FrameType
from typing import Any

_before: dict[int, Any] = {}  # the handlers that `_note` has replaced
_waiting: list[StopSignals] = []


class StopSignals:
    """Takes signals until it is released, and then puts the earlier handlers back.

    `came` tells whether a signal has come.  Only the main thread may take signals: other threads
    get a ValueError.
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
        """Return whether this object takes a signal; SIGTERM ends a forked child instead."""
        return number in self._numbers and (number != signal.SIGTERM or self._pid == os.getpid())

    def release(self) -> None:
        """Put the earlier handlers back.

        Outside the main thread that is impossible: there a handler stays until its signal comes.
        """
        if self in _waiting:
            _waiting.remove(self)
        for number in self._numbers & _before.keys():
            if not any(number in each._numbers for each in _waiting):
                _put_back(number)


def _note(number: int, frame: FrameType | None) -> None:
    takers = [each for each in _waiting if each.takes(number)]
    for each in takers:
        each.came = True
    if not takers and signal.getsignal(number) is _note:  # not called by another handler
        _put_back(number)
        os.kill(os.getpid(), number)


def _put_back(number: int) -> None:
    """Put the earlier handler back, unless other code has taken the signal since."""
    try:
        if signal.getsignal(number) is _note:
            before = _before.get(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)
        _before.pop(number, None)
    except ValueError:  # not the main thread
        return
