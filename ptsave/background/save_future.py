"""`SaveFuture`: the progress and the outcome of a save in the background."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

from ptsave.errors import CheckpointWarning

_numbers = itertools.count()
_unseen_failures: dict[int, str] = {}  # by number, because the futures may be gone


class SaveFuture(concurrent.futures.Future[None]):
    """The outcome of :func:`ptsave.async_save`: a future whose result is None.

    ``result()`` and ``exception()`` wait until the file is written.  ``cancel()`` cancels a save
    that still waits for earlier saves, and frees its staging memory.  Callbacks run on the thread
    that writes, so they must not wait for another save.  The program learns of a failure from
    ``result()``, ``exception()``, ``wait_staged()`` or a callback.  If the program uses none of
    these, a :class:`CheckpointWarning` reports the failure when the interpreter exits.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> future = ptsave.async_save(torch.ones(3), io.BytesIO())
    >>> future.staged()
    True
    >>> future.result()
    >>> future.nbytes_written == future.nbytes
    True
    """

    def __init__(
        self,
        target: str,
        nbytes: int,
        withdraw: Callable[[], bool],
        before_wait: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._target = target
        self._nbytes = nbytes
        self._nbytes_written = 0
        self._nbytes_shared = 0
        self._withdraw: Callable[[], bool] | None = withdraw
        self._before_wait = before_wait
        self._staged = threading.Event()
        self._staging_error: BaseException | None = None
        self._number = next(_numbers)
        self._observed = False

    # ----------------------------------------------------------------------------------- progress

    @property
    def nbytes(self) -> int:
        """Size of the file, in bytes."""
        return self._nbytes

    @property
    def nbytes_written(self) -> int:
        """Bytes of the file that have been written so far, updated every 0.1 s.

        Until the save ends, they include the shared bytes.
        """
        return self._nbytes_written

    @property
    def nbytes_shared(self) -> int:
        """Bytes of the file that it shares with the save's `base`, after the save."""
        return self._nbytes_shared

    def staged(self) -> bool:
        """Return whether all tensors have been copied, so that they may be overwritten."""
        return self._staged.is_set() and self._staging_error is None

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until all tensors have been copied, so that they may be overwritten.

        Parameters
        ----------
        timeout : float or None
            Seconds; None waits as long as it takes.

        Raises
        ------
        concurrent.futures.TimeoutError
            If the tensors have not been copied within `timeout`.
        concurrent.futures.CancelledError
            If the save was cancelled before the tensors were copied.
        Exception
            If copying failed: the error of the copy.
        """
        if not self._staged.wait(timeout):
            raise concurrent.futures.TimeoutError
        if self._staging_error is not None:
            self._observe()
            raise self._staging_error

    # ------------------------------------------------------------------------------------- outcome

    def result(self, timeout: float | None = None) -> None:
        """Wait until the file is written; raise the error if writing fails."""
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
        finally:
            del error, self  # they refer to each other

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the file is written, and return None; return the error if writing fails."""
        self._before_wait()
        error = super().exception(timeout)
        self._observe()
        return error

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[None]], Any]) -> None:
        """Call `fn` with this future when the save has succeeded, failed or been cancelled."""
        self._observe()
        super().add_done_callback(fn)

    def observed(self) -> bool:
        """Return whether the program has asked for the outcome, or has added a callback."""
        return self._observed

    def cancel(self) -> bool:
        """Cancel the save if writing has not begun; return whether the save is cancelled."""
        withdraw = self._withdraw
        if withdraw is None or not withdraw():
            return self.cancelled()
        self._withdraw = None
        super().cancel()
        self.set_running_or_notify_cancel()
        return True

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the error of the save; called by the thread that writes."""
        self._withdraw = None
        if not self._observed:
            _unseen_failures[self._number] = f"{self._target}: {exception}"
        super().set_exception(exception)
        if self._observed:  # observed after the check above
            self._observe()

    def set_result(self, result: None) -> None:
        """Note that the save has succeeded; called by the thread that writes."""
        self._withdraw = None
        self._nbytes_written = self._nbytes - self._nbytes_shared
        super().set_result(result)

    def _observe(self) -> None:
        self._observed = True
        _unseen_failures.pop(self._number, None)


class PendingSave(SaveFuture):
    """A `SaveFuture` with methods for the threads that carry out the save."""

    def join_staging(self) -> BaseException | None:
        """Wait until copying ends; return its error or None.  Called by the thread that writes."""
        self._staged.wait()
        return self._staging_error

    def set_staged(self, error: BaseException | None = None) -> None:
        """Note that the save no longer reads tensors; called by the thread that copies them."""
        self._staging_error = error
        self._staged.set()

    def set_nbytes_written(self, nbytes: int) -> None:
        """Set the progress; called by the thread that writes."""
        self._nbytes_written = nbytes

    def set_nbytes_shared(self, nbytes: int) -> None:
        """Note how many bytes are shared; called by the thread that writes, before the result."""
        self._nbytes_shared = nbytes

    def fail_in_child(self, error: BaseException) -> None:
        """Let the future fail in a forked process, which does not have the threads of the save."""
        self._observed = True  # the parent reports the failure
        self._condition = threading.Condition()
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        if not self._staged.is_set():
            self._staged = threading.Event()
            self.set_staged(error)
        if not self.done():
            self.set_exception(error)


def report_failures() -> None:
    """Warn of each failed save whose result the program has not asked for."""
    failures = [_unseen_failures.pop(number) for number in list(_unseen_failures)]
    if failures:
        message = "saves failed, and the program never asked for their results: " + "; ".join(
            failures
        )
        warnings.warn(message, CheckpointWarning, stacklevel=2)


def forget_failures() -> None:
    """Forget the parent's failures in a forked child: the parent process reports them."""
    _unseen_failures.clear()
