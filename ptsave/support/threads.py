"""Threads whose start returns when they run, or raises.

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

PAUSE = 0.02  # seconds between two looks at a condition, or two attempts to get memory


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
        Runs on the thread.  Gets a function to call as soon as it handles errors by itself: until
        then `start` handles them.
    name : str or None
        Name of the thread.
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
        # Entry point of the new thread; threading asks for it once, in start().
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
        """Run the call; the new thread calls this."""
        self._call(self._waiting.release)

    def _begins(self) -> bool:
        """Wait for the thread; returns whether it has begun."""
        while not self._waiting.acquire(timeout=PAUSE):
            entry = None if self._entry is None else self._entry()
            if entry is None or entry.ended:  # the thread has died, and its entry point with it
                return self._waiting.acquire(blocking=False)
            del entry
        return True

    def _forget(self) -> None:
        # threading lists it as one that will begin.
        threading._limbo.pop(self, None)  # type: ignore[attr-defined]


class _Entry:
    """Entry point of a new thread; only the thread refers to it, so it goes when that dies."""

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
    """Replaces the event that ``threading.Thread.start`` waits for, because it may never be set."""

    def wait(self, timeout: float | None = None) -> bool:
        return True
