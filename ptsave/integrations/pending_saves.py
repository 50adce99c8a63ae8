"""Background saves for libraries that remove an old checkpoint right after saving a new one.

At that time the new checkpoint is not written yet.  So a removal waits for the saves that began
before it, and does not happen if one of them fails.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ptsave import _C
from ptsave.background.async_save import async_save
from ptsave.background.save_future import SaveFuture
from ptsave.background.saves import release_own
from ptsave.errors import SaveError, add_note
from ptsave.sources.locations import STAGING, is_url_target, staging_name, sync_path
from ptsave.sources.url_locations import UrlLocation, save_errors
from ptsave.support.locks import HeldLock, try_lock
from ptsave.writing.targets import absolute, replaceable_file, resolve_file

__all__ = ["Pending", "PendingSaves", "StagedFile", "make_parent", "path_key", "remove_checkpoint"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Options = Mapping[str, Any] | None
_Key = TypeVar("_Key")


class Pending(Generic[_Key]):
    """The unfinished saves of one object that saves checkpoints, and the errors of failed saves.

    Any thread may use it.  A copied, unpickled or forked instance begins without saves.
    """

    def __init__(self) -> None:
        self._start_afresh()

    def check(self) -> None:
        """Raise the first error of failed saves, with the others as notes; forget them all."""
        with self._locked():
            failures = list(self._failures)
            self._failures.clear()
        # After `exception` has returned a future's error, no warning reports it when Python exits.
        errors: list[Any] = [
            each.exception() if isinstance(each, Future) else each for each in failures
        ]
        for other in errors[1:]:
            add_note(errors[0], f"another checkpoint failed, too: {other}")
        if errors:
            raise errors[0]

    def settle(self, is_awaited: Callable[[_Key], bool] = lambda _: True) -> None:
        """Wait for the pending saves that `is_awaited` accepts; raise no error."""
        release_own()
        with self._locked():
            self._changed.wait_for(lambda: not any(map(is_awaited, self._pending)))

    def wait(self) -> None:
        """Wait for all pending saves; then raise the errors as `check` does."""
        self.settle()
        self.check()

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._pending: set[_Key] = set()
        self._failures: list[Any] = []

    def _locked(self) -> threading.Condition:
        """Return the lock; a forked process gets a new one."""
        if self._pid != os.getpid():
            self._start_afresh()
        return self._changed

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class PendingSaves(Pending[SaveFuture]):
    """Saves of files, and removals that wait for them."""

    def _start_afresh(self) -> None:
        super()._start_afresh()
        # By path: the place, its options, and the saves that must succeed before the removal.
        self._removals: dict[str, tuple[str, _Options, set[SaveFuture]]] = {}

    def save(self, obj: object, path: str, place: StagedFile | None = None, **options: Any) -> None:
        """Begin to save to `path`; `options` are those of :func:`ptsave.async_save`.

        A pending removal of the same path is dropped, because the save replaces the file.  This
        happens before the tensors are copied, because the removal could begin during the copy.
        """
        place = place or StagedFile(path)
        key = path_key(path)
        with self._locked():
            removal = self._removals.pop(key, None)
        try:
            future = async_save(obj, place.path, **options)
        except BaseException:
            place.discard()
            if removal is not None:
                with self._locked():
                    self._removals[key] = removal
            raise
        with self._locked():
            self._pending.add(future)
        # Not the future's own method, which would mark the outcome as observed.
        fsync = bool(options.get("fsync"))
        Future.add_done_callback(future, lambda _: self._finish(future, place, fsync=fsync))

    def remove(self, path: str, storage_options: _Options = None) -> None:
        """Remove a checkpoint when all pending saves are written, or now if there are none.

        A later change of the current directory does not change which checkpoint is removed.
        """
        with self._locked():
            if self._pending:
                place = path if is_url_target(path) else absolute(path)
                self._removals[path_key(path)] = place, storage_options, set(self._pending)
                return
        remove_checkpoint(path, storage_options)

    def _finish(self, future: SaveFuture, place: StagedFile, *, fsync: bool) -> None:
        """Publish a save's file, and do the removals that waited for the save."""
        failure: Any = None
        if future.cancelled() or Future.exception(future) is not None:
            failure = future
            place.discard()
        else:
            try:
                place.publish(fsync=fsync)
            except Exception as error:
                failure = error
        with self._changed:
            if failure is not None and not future.cancelled():
                self._failures.append(failure)
        while True:
            with self._changed:
                due = self._due_removals(future, failed=failure is not None)
                if not due:  # and while the lock is held, none can be added
                    self._pending.discard(future)
                    self._changed.notify_all()
                    return
            for path, storage_options in due:
                try:
                    remove_checkpoint(path, storage_options)
                except Exception as error:
                    with self._changed:
                        self._failures.append(error)

    def _due_removals(self, future: SaveFuture, *, failed: bool) -> list[tuple[str, _Options]]:
        """Return removals that waited only for `future`; if `failed`, drop all that await it."""
        due = []
        for key, (path, storage_options, awaited) in list(self._removals.items()):
            if future in awaited:
                awaited.discard(future)
                if failed or not awaited:
                    del self._removals[key]
                if not (failed or awaited):
                    due.append((path, storage_options))
        return due


class StagedFile(HeldLock):
    """A file to save; write it to `path`, which may be in a temporary directory, then `publish`.

    A killed save leaves ``.<name>.<16 hex digits>.ptsave`` beside the file.  In names with
    ``hpc_ckpt_``, Lightning takes the digits for a checkpoint's number, and would try to resume
    from a checkpoint that does not exist.  So a file ``hpc_ckpt_*`` is first saved in a temporary
    directory with another name.  Each such save first removes directories of dead processes.
    """

    _N_ATTEMPTS = 16

    def __init__(self, path: str, target: object = None) -> None:
        self.path = path
        if not isinstance(target, str) or not os.path.basename(target).startswith("hpc_ckpt_"):
            return
        try:
            self._final = replaceable_file(target)
        except SaveError:  # a file that can only be overwritten in place needs no temporary name
            return
        if not os.path.isdir(self._final):
            parent, name = os.path.split(self._final)
            with save_errors(self._final):
                self._remove_leftovers(parent)
                self._make_locked(parent)
            self.path = os.path.join(self._folder, name)

    def publish(self, *, fsync: bool) -> None:
        """Give the complete file its final name; if this raises SaveError, an older file stays.

        With `fsync`, the new name also survives power loss, if the save has synced the file.
        """
        if self._descriptor is None:
            return
        try:
            with save_errors(self._final):
                with suppress(FileNotFoundError):
                    shutil.copymode(self._final, self.path)  # as a save to that path would do
                os.replace(self.path, self._final)
                if fsync:
                    sync_path(self._folder)
                    sync_path(os.path.dirname(self._final))
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove an unpublished file; do nothing in a second call, or in a forked process."""
        if self._descriptor is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self.close()

    def _make_locked(self, parent: str) -> None:
        """Make and lock a directory; try again if another save has removed it."""
        for _ in range(self._N_ATTEMPTS):
            self._folder = os.path.join(parent, staging_name())
            os.mkdir(self._folder)
            with suppress(FileNotFoundError):
                lock = os.open(self._folder, _DIRECTORY)
                if try_lock(lock) is not False and os.path.isdir(self._folder):
                    return self._hold(lock)
                os.close(lock)
        raise FileExistsError(
            f"the save could not start: other saves removed its temporary directory "
            f"{self._N_ATTEMPTS} times, as if a killed process had left it: save again"
        )

    def _remove_leftovers(self, parent: str) -> None:
        """Remove the directories of dead processes; on a file system without locks they stay."""
        for name in os.listdir(parent):
            if not re.fullmatch(STAGING, name):
                continue
            folder = os.path.join(parent, name)
            with suppress(OSError):
                lock = os.open(folder, _DIRECTORY)
                try:
                    if try_lock(lock):
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def make_parent(path: str, storage_options: _Options = None) -> None:
    """Make the directory of a file to save, with its parents; raise SaveError if that fails."""
    target = resolve_file(path, storage_options)
    if isinstance(target, UrlLocation):
        target.make_parent()
    elif parent := os.path.dirname(target):
        with save_errors(parent, "the directory cannot be made"):
            os.makedirs(parent, exist_ok=True)


def remove_checkpoint(path: str, storage_options: _Options = None) -> None:
    """Remove a file or a directory, by path or URL, if it exists."""
    target = resolve_file(path, storage_options)
    if isinstance(target, UrlLocation):
        with suppress(FileNotFoundError), save_errors(path, "the checkpoint cannot be removed"):
            target.file_system.rm(target.key, recursive=True)
    elif os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    else:
        _C.remove_file(os.fsencode(target))


def path_key(path: str) -> str:
    """Return the absolute path, or the URL, as a key."""
    return path if is_url_target(path) else os.path.abspath(path)
