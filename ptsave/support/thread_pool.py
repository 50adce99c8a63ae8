"""A thread pool that works without threads if the system cannot start any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from ptsave.support.threads import Thread, run_all

_Result = TypeVar("_Result")


class ThreadPool(Executor):
    """Threads that run calls, like :class:`concurrent.futures.ThreadPoolExecutor`.

    The threads exist only while there are calls.  If none can be started, `submit` runs the calls.
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
        """Queue a call, and return the future of its result."""
        call = _Call(partial(fn, *args, **kwargs))
        with self._lock:
            if self._closed:
                raise RuntimeError("nothing can be submitted after the shutdown")
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
        """Run the call; a second try, after a MemoryError, only fails the future."""
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
            del future, self  # an error refers to this frame
