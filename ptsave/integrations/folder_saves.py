"""Folders that are written in the background: one rank publishes a folder that all ranks wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ptsave.background.async_safetensors import async_save_safetensors, covers_its_storage
from ptsave.background.async_save import async_save
from ptsave.background.save_future import SaveFuture
from ptsave.background.saves import writes_held_back
from ptsave.errors import SaveError, StagingFullError
from ptsave.installation import installed
from ptsave.integrations.pending_saves import Pending
from ptsave.integrations.staged_folders import StagedFolder, in_place_of, staged_folders_in
from ptsave.streaming import safetensors_functions
from ptsave.support.rank_groups import RankLock, last_word_of

__all__ = ["FolderParts", "FolderSaves", "give_up", "writes_in_background"]

_WRITTEN = "written"
_MAX_N_CHARACTERS = 2000  # of an error
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class FolderParts:
    """The parts of a folder that the ranks of a job write while training goes on.

    A collective call in the background would mix with those of the training.  So each rank locks a
    file beside the folder while it writes, and leaves its outcome there for the rank that publishes
    the folder.  An unlocked file without an outcome means that its process has died.

    A second process with the same `rank` is a RuntimeError.  A file system without locks is an
    OSError.
    """

    def __init__(self, folder: StagedFolder, rank: int, size: int) -> None:
        os.makedirs(folder.root, exist_ok=True)
        self._folder, self._rank, self._size = folder, rank, size
        self._lock = RankLock(Path(folder.root), rank, size)

    def tell(self, error: BaseException | None) -> None:
        """Report that this rank's part is written, or its error."""
        text = _WRITTEN if error is None else f"{type(error).__name__}: {error}"
        self._lock.leave(text[:_MAX_N_CHARACTERS])

    def wait(self) -> None:
        """Wait for the other ranks' parts; a rank that failed, or has died, is a SaveError."""
        words = {rank: self._word_of(rank) for rank in range(self._size) if rank != self._rank}
        self._lock.release()
        for rank, word in words.items():
            if word != _WRITTEN:
                problem = word or "it has ended, or does not see this file system"
                raise SaveError(
                    f"{self._folder.final}: rank {rank} could not write its part of the "
                    f"checkpoint: {problem}"
                )

    def _word_of(self, rank: int) -> str:
        pause = _SHORTEST_PAUSE_S
        while (word := last_word_of(Path(self._folder.root), rank, self._size)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return word


class FolderSaves(Pending[StagedFolder]):
    """The unfinished folders of one writer of checkpoints."""

    def leftovers(self, directory: str, prefix: str) -> list[StagedFolder]:
        """Return the staged folders in a directory that are not this writer's."""
        with self._locked():
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

        def end(error: BaseException | None) -> None:
            try:
                if parts is not None:
                    parts.wait()  # also after an error: other ranks may be writing into the folder
            except Exception as failure:
                error = error or failure
            if error is not None:
                folder.discard()
                raise error
            folder.publish()
            afterwards()

        self._when_written(folder, futures, end)

    def tell(self, folder: StagedFolder, futures: Sequence[SaveFuture], parts: FolderParts) -> None:
        """Report the outcome of this rank's saves to the rank that publishes the folder."""

        def end(error: BaseException | None) -> None:
            parts.tell(error)
            if error is not None:
                raise error

        self._when_written(folder, futures, end)

    def forget_failures(self) -> None:
        """Wait until nothing is pending, and drop all errors."""
        self.settle()
        with self._locked():
            self._failures.clear()

    def _when_written(
        self,
        folder: StagedFolder,
        futures: Sequence[SaveFuture],
        end: Callable[[BaseException | None], None],
    ) -> None:
        """Call `end` with the first error, if any, after the last save; on the writing thread."""
        if not futures:
            end(None)
            return
        with self._locked():
            self._pending.add(folder)
        errors: list[BaseException | None] = []

        def finish(future: Future[None]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            with self._changed:
                errors.append(error)
                if len(errors) < len(futures):
                    return
            try:
                end(next(filter(None, errors), None))
            except Exception as failure:
                with self._changed:
                    self._failures.append(failure)
            finally:
                with self._changed:
                    self._pending.discard(folder)
                    self._changed.notify_all()

        for future in futures:
            future.add_done_callback(finish)


@contextmanager
def writes_in_background(folder: StagedFolder, *, fsync: bool) -> Iterator[list[SaveFuture]]:
    """Let ``torch.save`` and ``save_file`` into a folder only copy the tensors; yield the futures.

    The files are written after the block, or within it if memory for the copies runs out.  Calls
    for files elsewhere, or with tensors that safetensors has to check, write at once.  After an
    error in the block each save is cancelled or has ended.
    """
    futures: list[SaveFuture] = []
    try:
        with installed(safetensors=True, fsync=fsync), writes_held_back() as release:
            save = torch.save

            def begin(function: Callable[..., SaveFuture], *args: Any) -> None:
                try:
                    future = function(*args, fsync=fsync, when_full="raise")
                except StagingFullError:  # earlier saves have to be written first
                    release()
                    future = function(*args, fsync=fsync, when_full="wait")
                futures.append(future)

            def save_later(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
                if _is_in(f, folder.path) and not args and not kwargs:
                    begin(async_save, obj, f)
                else:
                    save(obj, f, *args, **kwargs)

            def take_file(tensors: Any, filename: Any, metadata: Any) -> bool:
                if not (_is_in(filename, folder.path) and _can_wait(tensors, filename, metadata)):
                    return False
                begin(async_save_safetensors, tensors, os.fspath(filename), metadata or {})
                return True

            with in_place_of(save, save_later), safetensors_functions.taken_by(take_file):
                yield futures
    except BaseException:
        give_up(futures)
        raise


def give_up(futures: Sequence[SaveFuture]) -> None:
    """Cancel saves, and wait for those that cannot be cancelled."""
    for future in [each for each in futures if not each.cancel()]:
        future.exception()


def _is_in(path: Any, folder: str) -> bool:
    if not isinstance(path, (str, os.PathLike)):
        return False
    return os.path.abspath(os.fsdecode(path)).startswith(folder + os.sep)


def _can_wait(tensors: Any, filename: Any, metadata: Any) -> bool:
    if not safetensors_functions.engine_can_save(tensors, filename, metadata):
        return False
    each = [tensor for tensor in tensors.values() if tensor.numel()]
    places = {(tensor.device, tensor.data_ptr()) for tensor in each}
    return len(places) == len(each) and all(map(covers_its_storage, each))
