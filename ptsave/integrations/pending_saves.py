"""Background saves for libraries that remove an old checkpoint right after saving a new one.

The new one is not written by then.  So a removal waits for the saves that began before it, and does
not happen if one of them fails.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ptsave import _C
from ptsave.background.async_save import async_save
from ptsave.background.save_future import SaveFuture
from ptsave.background.saves import release_own
from ptsave.errors import add_note
from ptsave.integrations.staged_files import StagedFile
from ptsave.sources.urls import is_url_target
from ptsave.writing.targets import absolute, resolve_file
from ptsave.writing.url_targets import UrlTarget, save_errors

__all__ = ["PendingSaves", "make_parent", "path_key", "remove_checkpoint"]


class PendingSaves:
    """The unfinished saves of one writer of checkpoints, and removals that wait for them.

    Any thread may use it.  A copy, a pickle and a forked process begin without saves.
    """

    def __init__(self) -> None:
        self._start_afresh()

    def save(
        self,
        obj: object,
        path: str,
        staged: Callable[[], StagedFile | None] = lambda: None,
        **options: Any,
    ) -> SaveFuture:
        """Make the directory, and begin a save with the `options` of :func:`ptsave.async_save`.

        `staged` may return a temporary place; the writing thread then gives the file its name.  A
        pending removal of the same path is dropped, because the save replaces the file.
        """
        self._check_process()
        make_parent(path, options.get("storage_options"))
        key = path_key(path)
        with self._changed:
            removed = self._removals.pop(key, None)
        place = None
        try:
            place = staged()
            future = async_save(obj, path if place is None else place.path, **options)
        except BaseException:
            if place is not None:
                place.discard()
            if removed is not None:
                with self._changed:
                    self._removals[key] = removed
            raise
        with self._changed:
            self._pending.add(future)
        # Not the future's own method, which would mark the outcome as observed.
        fsync = bool(options.get("fsync"))
        Future.add_done_callback(future, lambda _: self._finish(future, place, fsync=fsync))
        return future

    def remove(self, path: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Remove a checkpoint when all pending saves are durable, or now if there are none.

        A relative path is resolved now.
        """
        self._check_process()
        with self._changed:
            if self._pending:
                awaited = set(self._pending)
                self._removals[path_key(path)] = (_absolute(path), storage_options, awaited)
                return
        remove_checkpoint(path, storage_options)

    def check(self) -> None:
        """Raise the first unobserved error of a save or removal, with the others as notes."""
        self._check_process()
        errors: list[BaseException] = []
        with self._changed:
            failures = list(self._failures)
            self._failures.clear()
        for failure in failures:
            if not isinstance(failure, SaveFuture):
                errors.append(failure)
            elif not failure.observed():
                error = failure.exception()
                assert error is not None
                errors.append(error)
        for other in errors[1:]:
            add_note(errors[0], f"another checkpoint failed, too: {other}")
        if errors:
            raise errors[0]

    def wait(self) -> None:
        """Wait until nothing is pending; then `check`."""
        self._check_process()
        release_own()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
        self.check()

    # ------------------------------------------------------------------------- on the other thread

    def _finish(self, future: SaveFuture, place: StagedFile | None, *, fsync: bool) -> None:
        """Publish a save's file, and do the removals that waited; runs on the writing thread."""
        failed = future.cancelled() or Future.exception(future) is not None
        if failed and not future.cancelled():
            with self._changed:
                self._failures.append(future)
        if place is not None:
            failed = not self._publish(place, failed=failed, fsync=fsync)
        while True:
            with self._changed:
                due = self._due_removals(future, failed=failed)
                if not due:  # and under the lock none can be added
                    self._pending.discard(future)
                    self._changed.notify_all()
                    return
            for path, storage_options in due:
                try:
                    remove_checkpoint(path, storage_options)
                except Exception as error:
                    with self._changed:
                        self._failures.append(error)

    def _publish(self, place: StagedFile, *, failed: bool, fsync: bool) -> bool:
        """Give a file its name unless its save failed; return whether it has the name."""
        if failed:
            place.discard()
            return False
        try:
            place.publish(fsync=fsync)
        except Exception as error:
            with self._changed:
                self._failures.append(error)
            return False
        return True

    def _due_removals(
        self, future: SaveFuture, *, failed: bool
    ) -> list[tuple[str, Mapping[str, Any] | None]]:
        due = []
        for key, (path, storage_options, awaited) in list(self._removals.items()):
            if future not in awaited:
                continue
            awaited.discard(future)
            if not failed and awaited:
                continue
            del self._removals[key]
            if not failed:
                due.append((path, storage_options))
        return due

    # -------------------------------------------------------------------------- copies and children

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._pending: set[SaveFuture] = set()
        self._removals: dict[str, tuple[str, Mapping[str, Any] | None, set[SaveFuture]]] = {}
        self._failures: list[SaveFuture | Exception] = []

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._start_afresh()

    def __reduce__(self) -> tuple[type[PendingSaves], tuple[()]]:
        return PendingSaves, ()


def make_parent(path: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Make the directory of a file to save, with its parents; a failure is a SaveError."""
    target = resolve_file(path, storage_options)
    if isinstance(target, UrlTarget):
        target.make_parent()
        return
    parent = os.path.dirname(target)
    if parent:
        with save_errors(parent, "the directory cannot be made"):
            os.makedirs(parent, exist_ok=True)


def remove_checkpoint(path: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove a file or a directory, by path or URL, if it exists."""
    target = resolve_file(path, storage_options)
    if isinstance(target, UrlTarget):
        with suppress(FileNotFoundError), save_errors(path, "it cannot be removed"):
            target.file_system.rm(target.path, recursive=True)
    elif os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    else:
        _C.remove_file(os.fsencode(target))


def _absolute(path: str) -> str:
    return path if is_url_target(path) else absolute(path)


def path_key(path: str) -> str:
    """Return the absolute path, or the URL, as a key."""
    return path if is_url_target(path) else os.path.abspath(path)
