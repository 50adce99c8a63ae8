"""Unfinished saves: their memory, their order, and their fate at forks and exits.

* The call decides on the file's contents: pickle, layout, options of torch and the environment, the
  directory that a relative path means.  Then storages are copied, by the call or by a lane of its
  own (`_staging`), which a long write does not hold up.
* One write at a time, in the order of the calls, because each uses all threads (`_writing`).  A
  save in the lane has its memory already, so the lane never waits for room.  A callback that saves
  again runs on the thread that makes room: it writes the next save instead of waiting.
* The default budget has two bounds: half of the memory that this process may ever use, above which
  a save is refused; and, while others are unfinished, half of the memory that would be free without
  them.  The second is an estimate, so it can delay a save and never refuses one.
* Fresh staging memory can cost more than the disk, where a virtual machine's host has taken free
  memory back.  A copy that notices that has the file written at once, from its first byte on, as a
  save in the foreground would be.  It goes on from the last byte towards the writer only where the
  writer is slower.  Only files that are replaced as a whole are, because the copy may fail.
* A traceback that somebody keeps refers to plans and snapshots, so these are told to release their
  memory when a save ends, in whatever way.
* Forked children do not have the pool's memory, begin with an empty queue and budget, and fail the
  futures that they inherited.  Python's fork hooks hold the locks of lanes and budget meanwhile.
* At exit the interpreter waits for the lanes' threads, which are no daemons, and an atexit callback
  for saves that others' callbacks began; later saves are written by the call itself.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import concurrent.futures.thread  # imported first, so that its exit callback runs after ours
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ptsave import _C
from ptsave.background.save_future import PendingSave, forget_failures, report_failures
from ptsave.background.staging_budget import Reservation, StagingBudget
from ptsave.background.worker_lane import WorkerLane
from ptsave.errors import StagingFullError
from ptsave.support import config, memory_limits
from ptsave.support.progress import ProgressCallback, progress_bar
from ptsave.writing.targets import TargetWriter, is_url_file, name_of

__all__ = [
    "BackgroundSave",
    "default_limit_nbytes",
    "release_own",
    "reserve",
    "start",
    "writes_held_back",
]

_FORKED = (
    "this process was forked while the save was unfinished: the parent process writes the file, "
    "and only its future tells the outcome"
)

_log = logging.getLogger(__name__)

_budget = StagingBudget()
_staging = WorkerLane("ptsave-staging")
_writing = WorkerLane("ptsave-writing")
_unfinished: dict[PendingSave, BackgroundSave] = {}


class _Progress:
    # Not a method of the save: it would be in a cycle with its writer, and keep the target until
    # the garbage collector comes by.
    def __init__(self, future: PendingSave) -> None:
        self._future = future
        self.bar: ProgressCallback | None = None

    def __call__(self, nbytes: int) -> None:
        self._future.set_nbytes_written(nbytes)
        if self.bar is not None:
            self.bar(nbytes)


class BackgroundSave:
    """One save, from its staging to its end.

    Parameters
    ----------
    plan : _C.WritePlan
        The archive, with the storages of `snapshot`.
    snapshot : _C.Snapshot
        Copies of the storages, without their bytes yet.
    reservation : Reservation
        The room for them.
    target : str, UrlTarget or file-like
        An absolute path, a URL, or an object with ``write``.
    show_progress : bool
        Whether to show a progress bar.
    **options : Any
        For :class:`ptsave.writing.targets.TargetWriter`.
    """

    def __init__(
        self,
        plan: _C.WritePlan,
        snapshot: _C.Snapshot,
        reservation: Reservation,
        target: Any,
        *,
        show_progress: bool,
        **options: Any,
    ) -> None:
        name = f"<{type(target).__name__}>"
        if isinstance(target, str) or is_url_file(target):
            name = name_of(target)
        self.future = PendingSave(name, plan.nbytes, self._withdraw, release_own)
        self._plan = plan
        self._snapshot = snapshot
        self._reservation = reservation
        self._target = target
        self._show_progress = show_progress
        self._withdrawn = False
        self._copying = threading.Lock()
        self._copier: threading.Thread | None = None
        self._may_write = threading.Event()
        self._is_followed = False
        self.is_queued = False
        self._progress = _Progress(self.future)
        self._writer = TargetWriter(
            plan, progress=self._progress, payloads_are_still=True, **options
        )
        self._writer.begin_staging()
        self._n_threads = config.current().n_threads

    @property
    def is_remote(self) -> bool:
        """Whether it goes to a URL."""
        return is_url_file(self._target)

    # ------------------------------------------------------------------------------------- staging

    def stage(self) -> None:
        """Copy the storages of the plan."""
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
                    self.future.exception()  # the write ends, which has lost its tensors
            else:
                self._release()
            raise
        finally:
            self._copier = None
            self._may_write.set()
        if not self._is_followed:
            self._snapshot.release()  # the plan has the copies, and nothing has the tensors
        self.future.set_staged()

    def _write_meanwhile(self) -> bool:
        """Have the file written while its storages are copied, if the target allows it."""
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
        """Have the file written after those before it."""
        if self.is_queued:
            return
        self.is_queued = True
        _unfinished[self.future] = self
        if self.is_remote:
            _wait_before_executors_end()
        _writing.put(self.write)

    def stage_in_background(self) -> None:
        """Copy the storages, and set the outcome for those who wait for it."""
        try:
            self.stage()
        except BaseException as error:
            self.future.set_staged(error)

    def _stop_if_cancelled(self, _nbytes: int) -> None:
        if self._withdrawn:
            raise concurrent.futures.CancelledError

    # ------------------------------------------------------------------------------------- writing

    def write(self) -> None:
        """Write the file, and set the outcome, a success or an error, for those who wait for it.

        Called again after a MemoryError, it completes the steps that are still missing.
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
                self.future.set_result(None)
            else:
                self.future.set_exception(error)
        except BaseException:  # a callback wants to end the thread, which has more to do
            _log.exception("calling the callbacks of %r", self.future)
        finally:
            _unfinished.pop(self.future, None)  # not before: a forked process must find it
            staging_error = error = None  # they refer to this frame
        if self._is_followed:
            _populate_pool()

    # ------------------------------------------------------------------------------------- the end

    def _withdraw(self) -> bool:
        """Take the save back, with its memory, unless it is being written."""
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
        """Undo a start that was interrupted, unless the file is being written already."""
        if self.future.cancel() or not concurrent.futures.Future.cancel(self.future):
            return
        # Neither lane may have it, but each may: nothing is copied or written from here on.
        _unfinished.pop(self.future, None)
        self._withdrawn = True
        with self._copying:
            self._release()

    def forget(self) -> None:
        """Leave the save to the parent process."""
        self.future.fail_in_child(RuntimeError(_FORKED))
        self._snapshot.abandon()
        self._plan.abandon()
        self._reservation.release()

    def _release(self) -> None:
        # Not left to the reference counts: a traceback that somebody keeps refers to all of this.
        self._snapshot.release()
        self._plan.release()
        self._reservation.release()


def default_limit_nbytes() -> int:
    """Return half of the memory that this process may use, with other ranks and its container."""
    return memory_limits.share_nbytes(config.local_world_size()) // 2


def reserve(
    nbytes: int, limit: int | None, *, wait: bool, option: str = "max_staged_bytes"
) -> Reservation:
    """Reserve room for a copy of `nbytes`: see :meth:`StagingBudget.reserve`.

    Without a limit it is `default_limit_nbytes`, and while other saves hold some, also half of the
    memory that is free.
    """
    if wait and _held:
        try:
            return reserve(nbytes, limit, wait=False, option=option)
        except StagingFullError:
            release_own()
    # A callback runs on the thread that makes room.
    help_out = _writing.run_next if _writing.runs_here() else None
    if limit is not None:
        return _budget.reserve(nbytes, limit, wait=wait, help_out=help_out, option=option)
    limit = default_limit_nbytes()
    reservation = _budget.reserve(
        nbytes, limit, wait=wait, help_out=help_out, room=_room_nbytes, option=option
    )
    _shrink_pool(nbytes)
    return reservation


def _room_nbytes() -> int:
    """Return half of the memory that would be free if nothing were staged: the rest is not ours."""
    staged_nbytes = _C.staging_statistics()["mapped_nbytes"]
    available_nbytes = memory_limits.available_nbytes() // config.local_world_size()
    return (staged_nbytes + available_nbytes) // 2


def _shrink_pool(nbytes: int) -> None:
    """Free the memory that the pool keeps for later saves if it leaves too little for others."""
    pool = _C.staging_statistics()
    kept_nbytes = pool["mapped_nbytes"] - pool["used_nbytes"]
    if kept_nbytes > nbytes and pool["mapped_nbytes"] > _room_nbytes():
        _C.trim_staging_pool()


def _populate_pool() -> None:
    """Fetch the staging memory that a save did without, for the next one."""

    def stop_if_waited_for(_nbytes: int) -> None:
        if _writing.is_waited_for():
            raise concurrent.futures.CancelledError

    with suppress(concurrent.futures.CancelledError, MemoryError):
        _C.populate_staging_pool(progress=stop_if_waited_for)


def start(save: BackgroundSave, *, stage_in_background: bool) -> None:
    """Stage a save, or let that be done, and have it written after those before it."""
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
        report_failures()  # there is no later moment


@contextmanager
def writes_held_back() -> Iterator[Callable[[], object]]:
    """Let saves that begin in the block be written after it, so that none slows down their copies.

    Yields a function that lets them be written at once: for a call that waits for the memory of
    others, which only their end frees.  The thread of the block lets them when it waits for one.
    """
    released = threading.Event()
    held = threading.get_ident(), released
    owner = threading.current_thread()

    def wait() -> None:
        if threading.current_thread() is not owner:  # which writes if no thread can be started
            released.wait()

    _held.append(held)
    _writing.put(wait)
    try:
        yield released.set
    finally:
        released.set()
        _held.remove(held)


_held: list[tuple[int, threading.Event]] = []  # the threads of such blocks


def release_own() -> None:
    """Let the writes go on that this thread holds back, because it is going to wait for them."""
    for ident, released in list(_held):
        if ident == threading.get_ident():
            released.set()


@functools.cache
def _wait_before_executors_end() -> None:
    """Let the interpreter's exit wait for saves while clients of servers still work.

    They look up hosts in executors, which take nothing more once the exit has begun, long before
    the threads of the lanes are waited for.  The last to be registered is the first to be called.
    """
    register = getattr(threading, "_register_atexit", None)  # of Python itself, for its executors
    if register is not None:
        with suppress(RuntimeError):  # the exit has begun
            register(_wait_for_remote_saves)


def _wait_for_remote_saves() -> None:
    for future, save in list(_unfinished.items()):
        if save.is_remote:
            with suppress(concurrent.futures.CancelledError):
                # Not the future's own method: then somebody would count as knowing the outcome.
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
