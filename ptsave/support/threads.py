"""Threads that begin or say that they cannot.

Python's own wait for ever for a thread that dies while it begins, as one does that runs out of
memory there (``threading.Thread.start``, which ``concurrent.futures`` uses as well).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["PAUSE", "Call", "Thread", "run_all"]

Call: TypeAlias = Callable[[], None]

PAUSE = 0.02  # seconds between two looks at what may have changed, or two attempts to get memory


def run_all(take: Callable[[], Call | None]) -> None:
    """Run calls until `take` has no more.

    Calls that run out of memory are repeated until they do not, because somebody waits for them.

    Parameters
    ----------
    take : callable
        Returns the next call, which it takes out of a queue; None if there is none.
    """
    call: Call | None = None
    while True:
        try:
            call = call or take()
            if call is None:
                return
            call()
            call = None  # as it would live until the next one comes, with all that it holds
        except MemoryError:
            time.sleep(PAUSE)


class Thread(threading.Thread):
    """A thread whose :meth:`start` returns when it has begun, and raises if it cannot.

    The interpreter waits for it when it exits.

    Parameters
    ----------
    call : callable
        What it runs.  Is given a function, to be called as soon as whatever happens will be dealt
        with: until then it is `start` that deals with it.
    name : str or None
        Of the thread.
    """

    def __init__(self, call: Callable[[Callable[[], None]], None], name: str | None = None) -> None:
        super().__init__(name=name, daemon=False)
        self._call = call
        self._started = _Unawaited()  # instead of threading's
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._entry: weakref.ref[_Entry] | None = None

    @property
    def _bootstrap(self) -> _Entry:
        # What threading makes the new thread call: asked for once, by start().
        entry = _Entry(super()._bootstrap)  # type: ignore[misc]
        self._entry = weakref.ref(entry)
        return entry

    def start(self) -> None:
        """Start the thread, and wait until it has begun.

        Raises
        ------
        RuntimeError, MemoryError
            There is no thread: the system has none left, no memory for it, or the interpreter
            starts none any more.
        """
        try:
            super().start()
        except (RuntimeError, MemoryError):
            if not self._begins():
                self._forget()
                raise
        else:
            if not self._begins():
                self._forget()
                raise MemoryError("a thread ran out of memory while it was starting")

    def run(self) -> None:
        """For the thread."""
        self._call(self._waiting.release)

    def _begins(self) -> bool:
        """Wait for the thread; returns whether it has begun."""
        while not self._waiting.acquire(timeout=PAUSE):
            entry = None if self._entry is None else self._entry()
            if entry is None or entry.ended:  # what it calls is gone with it
                return self._waiting.acquire(blocking=False)
            del entry
        return True

    def _forget(self) -> None:
        # threading lists it as one that will begin.
        threading._limbo.pop(self, None)  # type: ignore[attr-defined]


class _Entry:
    """What a new thread calls, to which nobody else refers."""

    __slots__ = ("__weakref__", "_bootstrap", "ended")

    def __init__(self, bootstrap: Callable[[], None]) -> None:
        self._bootstrap = bootstrap
        self.ended = False

    def __call__(self) -> None:
        try:
            self._bootstrap()
        finally:
            self.ended = True


class _Unawaited(threading.Event):
    """What ``threading.Thread.start`` waits for: not here, as it may never come."""

    def wait(self, timeout: float | None = None) -> bool:
        return True
