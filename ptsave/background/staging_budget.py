"""A budget of bytes that may be staged and not yet written."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from ptsave.errors import StagingFullError

__all__ = ["Reservation", "StagingBudget"]

_NBYTES_WITHOUT_LOOKING = 32 << 20


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
        """Begin anew, in a forked process: the staged bytes are the parent's."""
        self.changed = threading.Condition()
        self._held: dict[int, int] = {}  # bytes, by the numbers of reservations
        self._waiting: deque[int] = deque()

    def reserve(
        self,
        nbytes: int,
        limit: int,
        *,
        wait: bool,
        help_out: Callable[[], bool] | None = None,
        room: Callable[[], int] | None = None,
        option: str = "max_staged_bytes",
    ) -> Reservation:
        """Reserve room for `nbytes`.

        Parameters
        ----------
        nbytes, limit : int
            This reservation, and the limit of all reservations together, in bytes.
        wait : bool
            Whether to wait for room, or to raise.
        help_out : callable or None
            For the thread that makes room: does a part of that instead of waiting, and returns
            whether there was anything to do.  Such a call comes before those that wait, because it
            may have been made by one of them.
        room : callable or None
            Returns how much all reservations together may be as memory is now, in bytes.  It is an
            estimate, which can delay a reservation: without any other there is nothing to wait for,
            and only `limit` counts.
        option : str
            The argument that sets the limit, for messages.

        Raises
        ------
        StagingFullError
            If there is no room, and `wait` is false or there never will be.
        """
        if nbytes > limit:
            raise StagingFullError.too_large(nbytes, limit, option)
        number = next(self._numbers)
        reservation = Reservation(self, number)  # gives the bytes back if the call is interrupted
        with self.changed:
            is_next = help_out is not None or not self._waiting
            if self._fits(nbytes, limit, room) and (is_next or not wait):
                self._held[number] = nbytes
                return reservation
            if not wait:
                limit = self._limit_now(nbytes, limit, room)
                raise StagingFullError.no_room(nbytes, self._held_nbytes(), limit, option)
        try:
            if help_out is None:
                self._waiting.append(number)
            else:
                self._waiting.appendleft(number)
            while not self._take_turn(number, nbytes, limit, room, block=help_out is None):
                if help_out is not None and not help_out():
                    time.sleep(0.02)  # another thread is staging a save that it will hand over then
        finally:
            with self.changed:
                if number in self._waiting:
                    self._waiting.remove(number)
                self.changed.notify_all()
        return reservation

    def _take_turn(
        self, number: int, nbytes: int, limit: int, room: Callable[[], int] | None, *, block: bool
    ) -> bool:
        with self.changed:
            if self._waiting[0] == number and self._fits(nbytes, limit, room):
                self._held[number] = nbytes
                return True
            if block:
                self.changed.wait()
            return False

    def _fits(self, nbytes: int, limit: int, room: Callable[[], int] | None) -> bool:
        return self._held_nbytes() + nbytes <= self._limit_now(nbytes, limit, room)

    def _limit_now(self, nbytes: int, limit: int, room: Callable[[], int] | None) -> int:
        held_nbytes = self._held_nbytes()
        # Looking takes longer than a small copy.
        if room is None or held_nbytes == 0 or held_nbytes + nbytes <= _NBYTES_WITHOUT_LOOKING:
            return limit
        return min(limit, room())

    def _held_nbytes(self) -> int:
        return sum(self._held.values())

    def release(self, number: int) -> None:
        with self.changed:
            if self._held.pop(number, None) is not None:
                self.changed.notify_all()
