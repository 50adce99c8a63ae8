"""A thread pool that does without threads where the system gives none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["ThreadPool"]

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    """Runs calls on threads; on the caller's, when no thread can be started.

    ``ThreadPoolExecutor.submit`` raises RuntimeError then (of a process at its limit, say), though
    another of its threads may have got the call already: a call runs once in any case.

    Examples
    --------
    >>> with ThreadPool(2) as pool:
    ...     print(pool.submit(pow, 2, 10).result(), list(pool.map(abs, [-1, 2])))
    1024 [1, 2]
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn(*args, **kwargs)``, and return the future of what it returns."""
        future: Future[T] = Future()
        first = threading.Lock()

        def run() -> None:
            if not first.acquire(blocking=False) or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        try:
            super().submit(run)
        except RuntimeError:
            run()
        return future
