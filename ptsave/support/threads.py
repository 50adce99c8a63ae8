"""Threads whose start never hangs, and a thread pool that also works if no thread can start.

``threading.Thread.start`` waits forever if the new thread runs out of memory while it begins.
``concurrent.futures`` uses that method, too.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeAlias, TypeVar

Call: TypeAlias = Callable[[], None]
_Result = TypeVar("_Result")

PAUSE = 0.02  # seconds between two checks of a condition, or two attempts to get memory


def run_all(take: Callable[[], Call | None]) -> None:
    """Run each call that `take` returns, until `take` returns None.

    A call that runs out of memory is repeated, because a caller waits for its result.
    """
    call: Call | None = None
    while True:
        try:
            call = call or take()
            if call is None:
                return
            call()
            call = None  # otherwise the call and its objects live until the next call
        except MemoryError:
            time.sleep(PAUSE)


class Thread(threading.Thread):
    """A thread whose :meth:`start` waits until the thread has begun, or raises if it cannot begin.

    The interpreter waits for the thread at exit.  `call` runs on the thread, and gets a function as
    its argument.  `call` must run that function as soon as it can handle errors itself.  If the
    thread fails before that, `start` raises.
    """

    def __init__(self, call: Callable[[Callable[[], None]], None], name: str | None = None) -> None:
        super().__init__(name=name, daemon=False)
        self._call = call
        self._started = _Unawaited()  # replaces threading's event
        self._waiting = threading.Lock()
        self._waiting.acquire()
        self._entry: weakref.ref[_Entry] | None = None

    @property
    def _bootstrap(self) -> _Entry:
        # The new thread's entry point; threading reads this property once, in start().
        entry = _Entry(super()._bootstrap)  # type: ignore[misc]
        self._entry = weakref.ref(entry)
        return entry

    def start(self) -> None:
        """Start the thread and wait until it has begun; raise if it cannot be started."""
        try:
            super().start()
        except (RuntimeError, MemoryError):  # no `as error`, which would keep its frames
            if not self._begins():
                threading._limbo.pop(self, None)  # type: ignore[attr-defined]  # or it stays there
                raise
        else:
            if not self._begins():
                threading._limbo.pop(self, None)  # type: ignore[attr-defined]
                raise MemoryError("a thread ran out of memory while it was starting")

    def run(self) -> None:
        self._call(self._waiting.release)

    def _begins(self) -> bool:
        """Wait for the thread, and return whether it has begun."""
        while not self._waiting.acquire(timeout=PAUSE):
            entry = None if self._entry is None else self._entry()
            if entry is None or entry.ended:  # the thread has died, and its entry point with it
                return self._waiting.acquire(blocking=False)
            del entry
        return True


class _Entry:
    """Entry point of a new thread; only the thread refers to it, so it dies with the thread."""

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


class ThreadPool(Executor):
    """Threads that run calls, like :class:`concurrent.futures.ThreadPoolExecutor`.

    The threads exist only while there are calls.  If no thread can start, `submit` runs them.
    """

    def __init__(self, n_threads: int, name: str = "ptsave-worker") -> None:
        self._name = name
        self._n_threads = n_threads
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._threads: list[Thread] = []
        self._n_working = 0
        self._closed = False

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Queue the call ``fn(*args, **kwargs)``, and return a future of its result."""
        call = _Call(partial(fn, *args, **kwargs))
        with self._lock:
            if self._closed:
                raise RuntimeError("no call can be submitted after the shutdown")
            self._calls.append(call)
            if self._n_working == self._n_threads:
                return call.future
            self._n_working += 1
        if not self._start_thread():
            run_all(self._next)
        return call.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls; see :meth:`concurrent.futures.Executor.shutdown`."""
        with self._lock:
            self._closed = True
            calls = list(self._calls) if cancel_futures else []
        for call in calls:
            call.future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    def _start_thread(self) -> bool:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = Thread(self._run, self._name)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return False
        self._threads.append(thread)
        return True

    def _run(self, begun: Callable[[], None]) -> None:
        begun()
        run_all(self._next)

    def _next(self) -> _Call | None:
        with self._lock:
            if self._calls:
                return self._calls.popleft()
            self._n_working -= 1
            return None


class _Call:
    """A call and its future."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call
        self._has_begun = False

    def __call__(self) -> None:
        """Run the call; if it is run again after a MemoryError, only set the future's error."""
        future = self.future
        try:
            if self._has_begun:
                raise MemoryError("a thread ran out of memory")
            if not future.set_running_or_notify_cancel():
                return
            self._has_begun = True
            result = self._call()
        except BaseException as error:
            if not future.done():
                future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            del future, self  # an error's traceback refers to this frame
