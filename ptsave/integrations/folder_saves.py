"""Folders that are still being written in the background.

One rank publishes a folder when the saves of all ranks into it have ended.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

from ptsave.background.save_future import SaveFuture
from ptsave.background.saves import release_own
from ptsave.errors import add_note
from ptsave.integrations.folder_parts import FolderParts
from ptsave.integrations.staged_folders import StagedFolder, staged_folders_in

__all__ = ["FolderSaves"]

_Errors = list[BaseException]


class FolderSaves:
    """The unfinished folders of one writer of checkpoints; a forked process begins with none."""

    def __init__(self) -> None:
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._pending: dict[StagedFolder, int] = {}
        self._failures: list[Exception] = []

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._start_afresh()

    def remove_leftovers(self, directory: str, prefix: str) -> None:
        """Remove leftovers of killed processes, but no folder that another process is writing.

        A checkpoint that gave up its name gets it back if no successor has it.
        """
        for folder in self._leftovers(directory, prefix):
            folder.discard_leftover()

    def restore_names(self, directory: str, prefix: str) -> None:
        """Give checkpoints their names back as `remove_leftovers` does, and remove nothing."""
        for folder in self._leftovers(directory, prefix):
            folder.restore()

    def _leftovers(self, directory: str, prefix: str) -> list[StagedFolder]:
        self._check_process()
        with self._changed:
            own = {folder.root for folder in self._pending}
        return [each for each in staged_folders_in(directory, prefix) if each.root not in own]

    def commit(
        self,
        folder: StagedFolder,
        futures: Sequence[SaveFuture],
        afterwards: Callable[[], object],
        parts: FolderParts | None = None,
    ) -> None:
        """Publish a folder when its saves and other ranks' `parts` have ended; call `afterwards`.

        If a save fails, the folder is removed, and `check` raises the error.  Without futures all
        of this happens now, and the call raises the error.
        """

        def end(errors: _Errors) -> None:
            try:
                if parts is not None:
                    parts.wait()  # also after an error: other ranks may be writing into the folder
            except Exception as error:
                errors.append(error)
            if errors:
                folder.discard()
                raise errors[0]
            folder.publish()
            afterwards()

        self._when_written(folder, futures, end)

    def tell(self, folder: StagedFolder, futures: Sequence[SaveFuture], parts: FolderParts) -> None:
        """Report the outcome of this rank's saves to the rank that publishes the folder."""

        def end(errors: _Errors) -> None:
            parts.tell(errors[0] if errors else None)
            if errors:
                raise errors[0]

        self._when_written(folder, futures, end)

    def check(self) -> None:
        """Raise the first error of failed folders, with the others as notes; each once."""
        self._check_process()
        with self._changed:
            failures = list(self._failures)
            self._failures.clear()
        for other in failures[1:]:
            add_note(failures[0], f"another checkpoint failed, too: {other}")
        if failures:
            raise failures[0]

    def forget_failures(self) -> None:
        """Wait until nothing is pending, and drop all errors."""
        self.settle()
        with self._changed:
            self._failures.clear()

    def settle(self, final: str | None = None) -> None:
        """Wait until no folder is pending, or none with the name `final`; raise no error."""

        def is_awaited(folder: StagedFolder) -> bool:
            return final is None or folder.final == final

        self._check_process()
        release_own()
        with self._changed:
            self._changed.wait_for(lambda: not any(map(is_awaited, self._pending)))

    def wait(self) -> None:
        """Wait until nothing is pending; then `check`."""
        self.settle()
        self.check()

    def _when_written(
        self, folder: StagedFolder, futures: Sequence[SaveFuture], end: Callable[[_Errors], None]
    ) -> None:
        self._check_process()
        if not futures:
            end([])
            return
        with self._changed:
            self._pending[folder] = len(futures)
        errors: _Errors = []
        for future in futures:
            future.add_done_callback(functools.partial(self._finish, folder, errors, end))

    def _finish(
        self,
        folder: StagedFolder,
        errors: _Errors,
        end: Callable[[_Errors], None],
        future: Future[None],
    ) -> None:
        """Count an ended save, and end the folder after the last; runs on the writing thread."""
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            errors.append(error)
        with self._changed:
            self._pending[folder] -= 1
            if self._pending[folder]:
                return
        try:
            end(errors)
        except Exception as failure:
            with self._changed:
                self._failures.append(failure)
        finally:
            with self._changed:
                del self._pending[folder]
                self._changed.notify_all()
