"""A budget of bytes that may be staged before they are written."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from ptsave.errors import StagingFullError

_NBYTES_WITHOUT_LOOKING = 32 << 20


class Reservation:
    """A part of the budget, held until it is released or garbage-collected."""

    def __init__(self, budget: StagingBudget, number: int) -> None:
        self._budget = budget
        self._number = number

    def release(self) -> None:
        """Give the bytes back, if that has not been done yet."""
        self._budget.release(self._number)

    def __del__(self) -> None:
        self.release()


class StagingBudget:
    """Bytes that unfinished saves have staged; saves that wait for room get it in order."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Start afresh in a forked process: the staged bytes are the parent's."""
        self.changed = threading.Condition()
        self._held: dict[int, int] = {}  # bytes, by the reservation's number
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
        """Reserve room for `nbytes`; all reservations together have at most `limit` bytes.

        `help_out` is for a call on the thread that makes room.  It does a part of that work instead
        of waiting, and returns whether there was any.  Such a call goes before calls that wait,
        because a waiting call may have made it.

        `room` returns how many bytes all reservations may have as memory is now.  That is an
        estimate, so it can only delay a reservation: without other reservations, only `limit`
        counts.  `option` is the argument that sets the limit, for messages.
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
                    time.sleep(0.02)  # another thread is staging a save and will hand it over
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
        # Looking at the memory takes longer than a small copy.
        if room is None or held_nbytes == 0 or held_nbytes + nbytes <= _NBYTES_WITHOUT_LOOKING:
            return limit
        return min(limit, room())

    def _held_nbytes(self) -> int:
        return sum(self._held.values())

    def release(self, number: int) -> None:
        with self.changed:
            if self._held.pop(number, None) is not None:
                self.changed.notify_all()
