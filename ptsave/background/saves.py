"""Unfinished saves: their memory, their order, and what a fork or an exit does to them.

* The call of `async_save` fixes the file's contents: the pickle, the layout, the options of torch
  and the environment, and the directory of a relative path.  Then the storages are copied, either
  by the call or by the lane (worker thread) `_staging`.  This lane only copies, so a long write
  does not delay the copy.
* The lane `_writing` writes saves one at a time, in the order of the calls, because each write uses
  all threads.  A save in this lane has its memory already, so the lane never waits for memory.  The
  callbacks of futures run on this lane's thread, whose writes free memory.  So if a callback saves
  again, and there is no free memory, the callback writes the next save instead of waiting.
* The default budget has two bounds.  The first is half of the memory that this process may ever
  use; a larger save is refused.  The second applies while other saves are unfinished: half of the
  memory that would be free without them.  The second bound is an estimate, so it only delays saves.
* Fresh staging memory can be slower than the disk, if the host of a virtual machine has taken free
  memory back.  If a copy is slow for this reason, the write starts at once, from the file's first
  byte on, as in a foreground save.  Meanwhile, the copy goes on backwards from the last byte.  It
  ends where it meets the writer.  A rename must put the file in place, because the copy may fail.
* A traceback may keep plans and snapshots alive.  So each save releases their memory explicitly
  when it ends.
* Forked children do not have the memory for staging.  They begin with an empty queue and budget,
  and the futures that they inherited fail.  During a fork, hooks hold the locks of the lanes and
  the budget.
* At exit the interpreter waits for the lanes' threads, which are not daemons.  An atexit callback
  waits for saves that other callbacks began.  A later save is written by the call that begins it.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import concurrent.futures.thread  # imported first, so that its exit callback runs after ours
import functools
import itertools
import logging
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ptsave import _C
from ptsave.background.save_future import PendingSave, forget_failures, report_failures
from ptsave.errors import StagingFullError
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, progress_bar
from ptsave.support.threads import Call, Thread, run_all
from ptsave.writing.planning import SaveOptions
from ptsave.writing.targets import TargetWriter, is_url_file, name_of

_NBYTES_WITHOUT_LOOKING = 32 << 20
_FORKED = (
    "this process was forked while the save was unfinished: the parent process writes the file, "
    "and only the future in the parent process has the result"
)

# ------------------------------------------------------------------------- memory and order


class Reservation:
    """A part of the memory budget, held until it is released or garbage-collected."""

    def __init__(self, budget: StagingBudget, number: int) -> None:
        self._budget = budget
        self._number = number

    def release(self) -> None:
        """Give the bytes back; later calls do nothing."""
        self._budget.release(self._number)

    def __del__(self) -> None:
        self.release()


class StagingBudget:
    """Counts the bytes that saves reserve for copies; the save that has waited longest is next."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.forget()

    def forget(self) -> None:
        """Start afresh in a forked process, because the copied bytes belong to the parent."""
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
        """Reserve `nbytes`; if all reservations would exceed `limit` bytes, wait for room or raise.

        `help_out` is for a caller on the thread that writes saves.  Instead of waiting for room,
        this method then calls `help_out`, which writes a save and returns whether there was one.
        This caller gets room first, because it may run inside the `help_out` of a waiting caller.

        `room` returns how many bytes all reservations may have, given the memory that is free now.
        The number is an estimate, so it can only delay a reservation: if there is no other
        reservation, only `limit` counts.  `option` is the limit's name in messages.
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
            while True:
                with self.changed:
                    if self._waiting[0] == number and self._fits(nbytes, limit, room):
                        self._held[number] = nbytes
                        return reservation
                    if help_out is None:
                        self.changed.wait()
                        continue
                if not help_out():
                    time.sleep(0.02)  # another thread copies a save, and will then queue it
        finally:
            with self.changed:
                if number in self._waiting:
                    self._waiting.remove(number)
                self.changed.notify_all()

    def _fits(self, nbytes: int, limit: int, room: Callable[[], int] | None) -> bool:
        return self._held_nbytes() + nbytes <= self._limit_now(nbytes, limit, room)

    def _limit_now(self, nbytes: int, limit: int, room: Callable[[], int] | None) -> int:
        held_nbytes = self._held_nbytes()
        # Checking the free memory takes longer than a small copy.
        if room is None or held_nbytes == 0 or held_nbytes + nbytes <= _NBYTES_WITHOUT_LOOKING:
            return limit
        return min(limit, room())

    def _held_nbytes(self) -> int:
        return sum(self._held.values())

    def release(self, number: int) -> None:
        with self.changed:
            if self._held.pop(number, None) is not None:
                self.changed.notify_all()


class WorkerLane:
    """Runs calls on one thread, in the order in which `put` added them.

    The thread starts for the first call and ends after the last call.  It is not a daemon, so the
    interpreter waits for it at exit.  If no thread can be started (no threads or memory left, or
    the interpreter has already waited), a call runs on the thread that calls `put`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.closed = False  # True: no thread is started any more
        self.forget()

    def forget(self) -> None:
        """Start afresh in a forked child; the thread and the calls belong to the parent process."""
        self.changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._thread: threading.Thread | None = None

    def put(self, call: Call) -> None:
        """Add a call, which may raise only MemoryError; after this error, the call runs again."""
        thread = Thread(self._run, self._name)
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
        """Remove a call if it has not begun, and return whether it was removed."""
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
        """Run the next call now, inside the running call; return whether there was a next call."""
        with self.changed:
            call = self._calls.popleft() if self._calls else None
        if call is not None:
            call()
        return call is not None

    def finish(self) -> None:
        """Wait until all calls have run; a later call runs on the thread that calls `put`."""
        with self.changed:
            self.closed = True
            self.changed.wait_for(lambda: self._thread is None)
        self._run()  # runs the calls that are left if the thread was ended by force

    def _run(self, begun: Callable[[], None] = lambda: None) -> None:
        try:
            begun()
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


# -------------------------------------------------------------------------- unfinished saves

_log = logging.getLogger(__name__)

_budget = StagingBudget()
_staging = WorkerLane("ptsave-staging")
_writing = WorkerLane("ptsave-writing")
_unfinished: dict[PendingSave, BackgroundSave] = {}


class _Progress:
    # Not a method of the save, because then the save and the writer would refer to each other, and
    # keep the target until the garbage collector runs.
    def __init__(self, future: PendingSave) -> None:
        self._future = future
        self.bar: ProgressCallback | None = None

    def __call__(self, nbytes: int) -> None:
        self._future.set_nbytes_written(nbytes)
        if self.bar is not None:
            self.bar(nbytes)


class BackgroundSave:
    """One save, from the copying of its tensors to the end of the write.

    `stage` copies the storages into the memory of `snapshot`.  `plan` is the layout of the file.
    `target` is an absolute path, a URL (`is_remote`), or an object with ``write``.
    """

    def __init__(
        self,
        plan: _C.WritePlan,
        snapshot: _C.Snapshot,
        reservation: Reservation,
        target: Any,
        options: SaveOptions,
        *,
        compute_crcs: bool,
    ) -> None:
        self.is_remote = is_url_file(target)
        has_name = isinstance(target, str) or self.is_remote
        name = name_of(target) if has_name else f"<{type(target).__name__}>"
        self.future = PendingSave(name, plan.nbytes, self._withdraw, release_own)
        self._plan = plan
        self._snapshot = snapshot
        self._reservation = reservation
        self._target = target
        self._show_progress = options.progress
        self._withdrawn = False
        self._copying = threading.Lock()
        self._copier: threading.Thread | None = None
        self._may_write = threading.Event()
        self._is_followed = False
        self.is_queued = False
        self._progress = _Progress(self.future)
        self._writer = TargetWriter(
            plan,
            compute_crcs=compute_crcs,
            fsync=options.fsync,
            atomic=options.atomic,
            progress=self._progress,
            payloads_are_still=True,
            base=options.base_for(target),
        )
        self._writer.begin_staging()
        self._n_threads = config.current().n_threads

    # ------------------------------------------------------------------------------------- staging

    def stage(self) -> None:
        """Copy the storages, so that the program may change its tensors."""
        self._copier = threading.current_thread()
        try:
            with self._copying:
                self._stop_if_cancelled(0)
                self._snapshot.copy(
                    n_threads=self._n_threads,
                    progress=self._stop_if_cancelled,
                    when_slow=self._write_meanwhile,
                )
                self._plan.stage(n_threads=self._n_threads, progress=self._stop_if_cancelled)
        except BaseException as error:
            if self._is_followed:
                self.future.set_staged(error)
                if not self.future.cancel():
                    self.future.exception()  # wait for the write to end; it has lost its tensors
            else:
                self._release()
            raise
        finally:
            self._copier = None
            self._may_write.set()
        if not self._is_followed:
            self._snapshot.release()  # the plan has the copies
        self.future.set_staged()

    def _write_meanwhile(self) -> bool:
        """Let the write begin during the copy if the target allows it; return whether it began."""
        if _writing.closed or _writing.runs_here():
            return False
        if not self._writer.follow(self._snapshot, self._target):
            return False
        self._is_followed = True
        release_own()
        self.queue()
        self._may_write.set()
        return self._is_followed

    def queue(self) -> None:
        """Put the save at the end of the queue of saves to write."""
        if self.is_queued:
            return
        self.is_queued = True
        _unfinished[self.future] = self
        if self.is_remote:
            wait_before_executors_end(_wait_for_remote_saves)
        _writing.put(self.write)

    def stage_in_background(self) -> None:
        """Copy the storages; if this fails, set the error on the future instead of raising it."""
        try:
            self.stage()
        except BaseException as error:
            self.future.set_staged(error)

    def _stop_if_cancelled(self, _nbytes: int) -> None:
        if self._withdrawn:
            raise concurrent.futures.CancelledError

    # ------------------------------------------------------------------------------------- writing

    def write(self) -> None:
        """Write the file, and set the outcome of the save on the future.

        A second call, after a MemoryError, completes the missing steps.
        """
        if self.future.done() and not self.future.cancelled():
            _unfinished.pop(self.future, None)
            return
        if self._copier is threading.current_thread():  # no thread can be started
            self._is_followed = self.is_queued = False
            return
        error: BaseException | None = None
        try:
            if self.future.running():
                raise MemoryError("the thread that writes has run out of memory")
            if not self.future.set_running_or_notify_cancel():
                return  # abandoned
            self._may_write.wait()
            if not self._is_followed:
                staging_error = self.future.join_staging()
                if staging_error is not None:
                    raise staging_error
            with progress_bar(self._show_progress, "saving", self.future.nbytes) as bar:
                self._progress.bar = bar
                self._writer.write(self._target)
        except BaseException as caught:
            error = caught
        self._snapshot.close()
        self._release()
        try:
            if error is None:
                self.future.set_nbytes_shared(self._writer.nbytes_shared)
                self.future.set_result(None)
            else:
                self.future.set_exception(error)
        except BaseException:  # a callback tried to end the thread, which has more to do
            _log.exception("calling the callbacks of %r", self.future)
        finally:
            _unfinished.pop(self.future, None)  # only now: a forked process must find it
            staging_error = error = None  # they refer to this frame
        if self._is_followed:
            _populate_pool()

    # ------------------------------------------------------------------------------------- the end

    def _withdraw(self) -> bool:
        """If the write has not begun, cancel the save; return whether it was cancelled."""
        if not _writing.withdraw(self.write):
            return False
        _unfinished.pop(self.future, None)
        self._withdrawn = True
        try:
            if _staging.withdraw(self.stage_in_background):
                self.future.set_staged(concurrent.futures.CancelledError())
            self.future.join_staging()  # not for long: see _stop_if_cancelled
        except BaseException:  # interrupted: the lane completes the save
            _unfinished[self.future] = self
            _writing.put(self.write)
            raise
        self._release()
        return True

    def abandon(self) -> None:
        """Undo an interrupted `start`, unless the file is being written already."""
        if self.future.cancel() or not concurrent.futures.Future.cancel(self.future):
            return
        # Either lane may have the save; from here on, no lane copies or writes it.
        _unfinished.pop(self.future, None)
        self._withdrawn = True
        with self._copying:
            self._release()

    def forget(self) -> None:
        """Leave the save to the parent process; called in a forked child."""
        self.future.fail_in_child(RuntimeError(_FORKED))
        self._snapshot.abandon()
        self._plan.abandon()
        self._reservation.release()

    def _release(self) -> None:
        # Explicit, because a traceback may keep all these objects alive.
        self._snapshot.release()
        self._plan.release()
        self._reservation.release()


def limit_of(nbytes: int | None, option: str) -> int | None:
    """Return `nbytes`; if it is None, PTSAVE_MAX_STAGED_BYTES, or None if that is not set."""
    if nbytes is None:
        return config.current().max_staged_nbytes
    limit = operator.index(nbytes)
    if limit < 0:
        raise ValueError(f"{option} must not be negative: {limit}")
    return limit


def default_limit_nbytes() -> int:
    """Return half of this process's share of the memory; all local ranks have equal shares."""
    return config.share_nbytes(config.local_world_size()) // 2


def reserve(
    nbytes: int, limit: int | None, *, wait: bool, option: str = "max_staged_bytes"
) -> Reservation:
    """Reserve room for a copy of `nbytes`: see :meth:`StagingBudget.reserve`.

    If `limit` is None, the limit is `default_limit_nbytes`; while other saves have copies, it is
    also at most `_room_nbytes`.
    """
    if wait and _held:
        try:
            return reserve(nbytes, limit, wait=False, option=option)
        except StagingFullError:
            release_own()
    # A callback runs on the thread that writes, and so frees memory.
    help_out = _writing.run_next if _writing.runs_here() else None
    if limit is not None:
        return _budget.reserve(nbytes, limit, wait=wait, help_out=help_out, option=option)
    limit = default_limit_nbytes()
    reservation = _budget.reserve(
        nbytes, limit, wait=wait, help_out=help_out, room=_room_nbytes, option=option
    )
    pool = _C.staging_statistics()
    kept_nbytes = pool["mapped_nbytes"] - pool["used_nbytes"]
    if kept_nbytes > nbytes and pool["mapped_nbytes"] > _room_nbytes():
        _C.trim_staging_pool()  # memory is short: free the memory kept for later saves
    return reservation


def _room_nbytes() -> int:
    """Return half of the memory that would be free without the copies for saves."""
    staged_nbytes = _C.staging_statistics()["mapped_nbytes"]
    available_nbytes = config.available_nbytes() // config.local_world_size()
    return (staged_nbytes + available_nbytes) // 2


def _populate_pool() -> None:
    """Let the system provide all memory of the staging pool now, not during the next save."""

    def stop_if_waited_for(_nbytes: int) -> None:
        if _writing.is_waited_for():
            raise concurrent.futures.CancelledError

    with suppress(concurrent.futures.CancelledError, MemoryError):
        _C.populate_staging_pool(progress=stop_if_waited_for)


def start(save: BackgroundSave, *, stage_in_background: bool) -> None:
    """Copy a save's tensors, now or in the background, and queue the save to be written."""
    try:
        if stage_in_background:
            _unfinished[save.future] = save
            _staging.put(save.stage_in_background)
        else:
            save.stage()
        save.queue()
    except BaseException:
        save.abandon()
        raise
    if _writing.closed:
        report_failures()  # at exit, nothing else runs later that could report


@contextmanager
def writes_held_back() -> Iterator[Callable[[], object]]:
    """Delay the writes of saves that begin in the block, so that no write slows the copies.

    The writes begin when the block ends.  They begin earlier if the block's thread waits for one of
    these saves, or calls the yielded function.  Code in the block must call the yielded function
    before it waits for memory, because memory becomes free only when these saves end.
    """
    released = threading.Event()
    held = threading.get_ident(), released
    owner = threading.current_thread()

    def wait() -> None:
        if threading.current_thread() is not owner:  # if no thread can be started, the owner writes
            released.wait()

    _held.append(held)
    _writing.put(wait)
    try:
        yield released.set
    finally:
        released.set()
        _held.remove(held)


_held: list[tuple[int, threading.Event]] = []  # the threads of `writes_held_back` blocks


def release_own() -> None:
    """Let the writes begin that this thread delays, because the thread will wait for them."""
    for ident, released in list(_held):
        if ident == threading.get_ident():
            released.set()


@functools.cache
def wait_before_executors_end(wait: Callable[[], None]) -> None:
    """Let the interpreter's exit call `wait` while network clients still work.

    The clients look up host names in executors.  When the exit begins, executors stop accepting
    work, long before the exit waits for the lanes.  The exit calls the newest callback first.
    """
    register = getattr(threading, "_register_atexit", None)  # Python has it for its executors
    if register is not None:
        with suppress(RuntimeError):  # the exit has begun
            register(wait)


def _wait_for_remote_saves() -> None:
    for future, save in list(_unfinished.items()):
        if save.is_remote:
            with suppress(concurrent.futures.CancelledError):
                # Not the future's own method, which would count as asking for the result.
                concurrent.futures.Future.exception(future)


@atexit.register
def _finish() -> None:
    _staging.finish()
    _writing.finish()
    report_failures()


def _lock_for_fork() -> None:
    for part in (_budget, _staging, _writing):
        part.changed.acquire()


def _unlock_in_parent() -> None:
    for part in (_budget, _staging, _writing):
        part.changed.release()


def _begin_child() -> None:
    saves = list(_unfinished.values())
    _unfinished.clear()
    for part in (_budget, _staging, _writing):
        part.forget()
    forget_failures()
    for save in saves:
        save.forget()


os.register_at_fork(
    before=_lock_for_fork, after_in_parent=_unlock_in_parent, after_in_child=_begin_child
)
