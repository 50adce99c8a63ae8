"""Pickles entries, collects them in batches, and writes the batches on a thread.

A batch collects entries while the batch before it is written, so that many small entries become one
large write.  The thread writes a batch when the batch is large, or a moment after the batch began.
After a moment without work, the thread ends.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ptsave import _C
from ptsave.archive.recovery import part_of_dict
from ptsave.background.saves import Reservation
from ptsave.support.threads import PAUSE, Thread
from ptsave.support.torch_names import storage_id
from ptsave.writing.planning import StorageTable, dump

# A batch that reaches this size, or half of the budget, is written at once, and a new batch begins.
# A smaller batch waits until `_MAX_AGE`, because a write would take cores from the copying of the
# entries of a training step.  Batches are large because the disk idles between two batches.
_MAX_NBYTES = 256 << 20
_MAX_AGE = 0.05  # seconds that a small batch waits for more entries
_LINGER = 0.2  # seconds without work after which the thread ends
_SLAB_NBYTES = 32 << 20
_MIN_SLAB_NBYTES = 64 << 10
_PROTOCOL = 2


class Batch:
    """Entries that are written together, and reservations of the memory that their copies need."""

    def __init__(self, slab_nbytes: int) -> None:
        self.engine = _C.AppendBatch(slab_nbytes=slab_nbytes)
        self.nbytes = 0
        self.n_entries = 0
        self.due = time.monotonic() + _MAX_AGE
        self.room_nbytes = 0  # reserved but not used yet
        self._reservations: list[Reservation] = []

    def hold(self, reservation: Reservation, nbytes: int) -> None:
        """Keep a reservation of `nbytes` until the batch is released."""
        self._reservations.append(reservation)
        self.room_nbytes += nbytes

    def use(self, nbytes: int, reserved_nbytes: int, n_entries: int) -> None:
        """Count added entries, their bytes, and how many reserved bytes they use."""
        self.nbytes += nbytes
        self.room_nbytes -= reserved_nbytes
        self.n_entries += n_entries

    def release(self) -> None:
        """Release the memory and the reservations."""
        self.engine.release()
        for reservation in self._reservations:
            reservation.release()


class BatchQueue:
    """A queue of batches, in the order in which they are written.

    `write` writes one batch, on the queue's thread.  `failure` is the first error of `write`; after
    an error, no batch is written.  `max_nbytes` is the memory budget of all batches together;
    a batch allocates its memory in small steps.
    """

    def __init__(self, write: Callable[[Batch], None], max_nbytes: int | None) -> None:
        self.failure: BaseException | None = None
        self._write = write
        self._slab_nbytes = _SLAB_NBYTES
        self._full_nbytes = _MAX_NBYTES
        if max_nbytes is not None:
            self._full_nbytes = min(_MAX_NBYTES, max(max_nbytes // 2, 1))
            self._slab_nbytes = min(_SLAB_NBYTES, max(max_nbytes // 16, _MIN_SLAB_NBYTES))
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._is_writing = False
        self._is_urgent = False  # a caller waits
        self._is_filling = False  # entries are being added to the last batch
        self._thread: Thread | None = None

    # --------------------------------------------------------- for adding: one thread at a time

    def begin(self, nbytes: int) -> Batch | None:
        """Return the last batch if it has room, or None.  After adding entries, call `end`."""
        with self._changed:
            if not self._batches:
                return None
            batch = self._batches[-1]
            if batch.room_nbytes < nbytes or batch.nbytes > self._full_nbytes:
                return None
            self._is_filling = True
            return batch

    def begin_with(self, reservation: Reservation, nbytes: int) -> Batch:
        """Add the reservation to a batch; return the batch.  After adding entries, call `end`."""
        with self._changed:
            if not self._batches or self._batches[-1].nbytes > self._full_nbytes:
                self._batches.append(Batch(self._slab_nbytes))
            batch = self._batches[-1]
            batch.hold(reservation, nbytes)
            self._is_filling = True
            self._is_urgent = False
            return batch

    def end(self) -> None:
        """Let the thread write the batch when it is due; start the thread if there is none."""
        with self._changed:
            self._is_filling = False
            batch = self._batches[-1]
            if self._thread is not None:
                if batch.nbytes >= self._full_nbytes or batch.n_entries <= 1 or self._is_urgent:
                    self._changed.notify_all()
                return
            thread = self._thread = Thread(self._run, "ptsave-appending")
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            self._thread = None  # no thread can be started: `hurry` writes the batches
        except BaseException:
            if thread.ident is None:
                self._thread = None  # interrupted before it has begun
            raise

    def hurry(self) -> None:
        """Let the thread write all batches now, because a caller waits for room."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            if self._thread is not None:
                return
        while True:  # no thread could be started, so this thread writes
            with self._changed:
                if not self._batches or self._is_filling:
                    return
                self._is_writing = True
                batch = self._batches.popleft()
            self._write_batch(batch)

    def drain(self) -> None:
        """Wait until nothing is left to write."""
        self.hurry()
        with self._changed:
            self._changed.wait_for(lambda: not self._batches and not self._is_writing)
            self._is_urgent = False

    def drop(self) -> None:
        """Discard all batches whose write has not begun, and wait for a write that has begun."""
        with self._changed:
            dropped = list(self._batches)
            self._batches.clear()
        for batch in dropped:
            batch.release()
        self.drain()

    def abandon(self) -> None:
        """Discard all batches in a forked child; the parent process writes them."""
        for batch in self._batches:
            batch.engine.abandon()
        self._batches.clear()

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of entries that are not written yet."""
        with self._changed:
            return sum(batch.nbytes for batch in self._batches)

    # ---------------------------------------------------------------------------- for the thread

    def _run(self, begun: Callable[[], None]) -> None:
        begun()
        while True:
            try:
                batch = self._take()
                if batch is None:
                    return
                self._write_batch(batch)
                batch = None
            except MemoryError:
                time.sleep(PAUSE)

    def _take(self) -> Batch | None:
        """Wait for a batch to write; if none comes for a while, return None to end the thread."""
        idle_until = time.monotonic() + _LINGER
        with self._changed:
            while True:
                pause = self._pause(idle_until)
                if pause <= 0:
                    break
                self._changed.wait(pause)
            if not self._batches:
                self._thread = None
                return None
            self._is_writing = True
            return self._batches.popleft()

    def _pause(self, idle_until: float) -> float:
        """Return the seconds until the first batch is due; without batches, until `idle_until`."""
        if not self._batches:
            return idle_until - time.monotonic()
        batch = self._batches[0]
        if len(self._batches) > 1:
            return 0
        if self._is_filling:
            return PAUSE
        if batch.nbytes >= self._full_nbytes or self._is_urgent:
            return 0
        return batch.due - time.monotonic()

    def _write_batch(self, batch: Batch) -> None:
        try:
            if self.failure is None:
                self._write(batch)
        except BaseException as error:
            self.failure = error
        try:
            batch.release()
        finally:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()


# -------------------------------------------------------------------------- pickles of entries


class _SharedStorages(StorageTable):
    """Gives storages the numbers that they have in the archive, so that each is written once."""

    def __init__(self, numbers: _C.NumberedStorages) -> None:
        super().__init__({})
        self._numbers = numbers
        self._tensors: dict[int, torch.Tensor] = {}  # by the `storage_id` of their storages

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if isinstance(obj, torch.Tensor) and obj.layout == torch.strided:
            with suppress(RuntimeError, NotImplementedError):  # a subclass without a storage
                self._tensors[storage_id(obj.untyped_storage())] = obj
        return super().persistent_id(obj)

    def number(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
        return self._numbers.number(storage, self._tensors.get(storage_id(storage)), dtype)


def pickle_group(entries: dict[str, object], numbers: _C.NumberedStorages) -> bytes:
    """Return the part of the archive's pickle that adds these entries to the archive's dict.

    In each part, the indexes of the pickle's memo start at 1.  Afterwards, the caller must call
    ``numbers.commit()`` or ``numbers.rollback()``.
    """
    data = numbers.pickle(entries)
    if data is None:
        numbers.rollback()  # forgets storages that the engine numbered before it gave up
        data = dump(entries, _SharedStorages(numbers), pickle, _PROTOCOL)
    part = part_of_dict(data)
    assert part is not None
    return part
