"""How many bytes may be staged and not yet written."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from ptsave.errors import StagingFullError

__all__ = ["Reservation", "StagingBudget"]


class Reservation:
    """A part of the budget, until it is released or nobody refers to it any more."""

    def __init__(self, budget: StagingBudget, number: int) -> None:
        self._budget = budget
        self._number = number

    def release(self) -> None:
        """Give it back, if that has not been done yet."""
        self._budget.release(self._number)

    def __del__(self) -> None:
        self.release()


class StagingBudget:
    """Bytes that unfinished saves have staged; those that wait for room get it in their order."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked process: nothing of what is staged is ours."""
        self.changed = threading.Condition()
        self._held: dict[int, int] = {}  # bytes, by the numbers of reservations
        self._waiting: deque[int] = deque()

    def reserve(
        self, nbytes: int, limit: int, *, wait: bool, help_out: Callable[[], bool] | None = None
    ) -> Reservation:
        """Reserve room for `nbytes`.

        Parameters
        ----------
        nbytes, limit : int
            How much, and what all reservations together may be, in bytes.
        wait : bool
            Whether to wait for room, or to raise.
        help_out : callable or None
            For the thread that makes room: does a part of that instead of waiting, and returns
            whether there was anything to do.  Such a call comes before those that wait: one of them
            may be what it was called from.

        Raises
        ------
        StagingFullError
            If there is no room, and `wait` is false or there never will be.
        """
        if nbytes > limit:
            raise StagingFullError.too_large(nbytes, limit)
        number = next(self._numbers)
        reservation = Reservation(self, number)  # gives back what an interrupted call has got
        with self.changed:
            is_next = help_out is not None or not self._waiting
            if self._fits(nbytes, limit) and (is_next or not wait):
                self._held[number] = nbytes
                return reservation
            if not wait:
                raise StagingFullError.no_room(nbytes, self._held_nbytes(), limit)
        try:
            if help_out is None:
                self._waiting.append(number)
            else:
                self._waiting.appendleft(number)
            while not self._take_turn(number, nbytes, limit, block=help_out is None):
                if help_out is not None and not help_out():
                    time.sleep(0.02)  # another thread is staging what it will hand over then
        finally:
            with self.changed:
                if number in self._waiting:
                    self._waiting.remove(number)
                self.changed.notify_all()
        return reservation

    def _take_turn(self, number: int, nbytes: int, limit: int, *, block: bool) -> bool:
        with self.changed:
            if self._waiting[0] == number and self._fits(nbytes, limit):
                self._held[number] = nbytes
                return True
            if block:
                self.changed.wait()
            return False

    def _fits(self, nbytes: int, limit: int) -> bool:
        return self._held_nbytes() + nbytes <= limit

    def _held_nbytes(self) -> int:
        return sum(self._held.values())

    def release(self, number: int) -> None:
        with self.changed:
            if self._held.pop(number, None) is not None:
                self.changed.notify_all()
