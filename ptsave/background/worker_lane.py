"""Runs calls one after another, on a thread that exists only while there are calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ptsave.support.threads import Call, Thread, run_all


class WorkerLane:
    """Runs calls in the order in which they were put.

    The thread starts for the first call and ends after the last one.  It is no daemon, so the
    interpreter waits for it at exit.  If no thread can be started (no threads or memory left, or
    the interpreter has already waited), a call runs on the thread that puts it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.closed = False  # True: no thread is started any more
        self.forget()

    def forget(self) -> None:
        """Start afresh in a forked process: thread and calls are the parent's."""
        self.changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._thread: threading.Thread | None = None

    def put(self, call: Call) -> None:
        """Add a call, which may raise only MemoryError, and is called again if it does."""
        thread = Thread(self._run_on_thread, self._name)
        try:
            with self.changed:
                self._calls.append(call)
                if self._thread is not None:
                    return
                self._thread = threading.current_thread() if self.closed else thread
            if self.closed or not self._start(thread):
                self._run()
        except BaseException:
            if self._thread is thread and thread.ident is None:
                self._thread = None  # interrupted before it has begun
            raise

    def _start(self, thread: Thread) -> bool:
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            self._thread = threading.current_thread()
            return False
        return True

    def withdraw(self, call: Call) -> bool:
        """Take a call back, and return whether it had not begun."""
        with self.changed:
            if call not in self._calls:
                return False
            self._calls.remove(call)
            return True

    def is_waited_for(self) -> bool:
        """Return whether other calls, or the end of the process, wait for the current call."""
        return self.closed or bool(self._calls) or not threading.main_thread().is_alive()

    def runs_here(self) -> bool:
        """Return whether the current thread is running one of the calls."""
        return self._thread is threading.current_thread()

    def run_next(self) -> bool:
        """Run the next call inside the running call, and return whether there was one."""
        with self.changed:
            call = self._calls.popleft() if self._calls else None
        if call is not None:
            call()
        return call is not None

    def finish(self) -> None:
        """Wait until there is nothing to do; later calls run on the thread that puts them."""
        with self.changed:
            self.closed = True
            self.changed.wait_for(lambda: self._thread is None)
        self._run()  # calls left by a thread that was ended by force

    def _run_on_thread(self, begun: Callable[[], None]) -> None:
        begun()
        self._run()

    def _run(self) -> None:
        try:
            run_all(self._next)
        except BaseException:
            self._leave()
            raise

    def _next(self) -> Call | None:
        with self.changed:
            if self._calls:
                return self._calls.popleft()
            self._leave()
            return None

    def _leave(self) -> None:
        with self.changed:
            self.changed.notify_all()
            self._thread = None
