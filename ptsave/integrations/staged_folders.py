"""Checkpoints that are directories: a directory gets its name only when it is complete.

The files are written into ``.<name>.ptsave/<name>``, which no library takes for a checkpoint.  Then
a rename gives the directory its name.  The rename exchanges it with an existing directory in one
step if the file system can do so.  Otherwise the old directory is first renamed to another name; if
even this is not possible, the new files are moved into it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
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
from ptsave.sources.locations import folder_for, folders_in, sync_path
from ptsave.streaming import safetensors_functions
from ptsave.support.locks import FolderLock
from ptsave.support.rank_groups import RankLock, last_word_of
from ptsave.writing.targets import mount_of

__all__ = [
    "FolderParts",
    "FolderSaves",
    "StagedFolder",
    "give_up",
    "in_place_of",
    "staged_folders_in",
    "writes_in_background",
]

_LOCK = ".lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Errors of renaming a directory whose files can still be renamed: a mount point, another user's
# directory in /tmp, or a directory in a lower layer of a container's file system.
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM)
_WRITTEN = "written"
_MAX_N_CHARACTERS = 2000  # of an error's text
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class StagedFolder:
    """A directory that is written at `path` and then renamed to `final`; all ranks use one `path`.

    With `keeps_others`, files that only the replaced directory has are moved into the new one; if
    the old directory cannot be renamed, the new files are moved into it.  With `above`, the
    temporary directory `root` is beside the parent of `final`, if possible, because some libraries
    take all directories in this parent for checkpoints.
    """

    def __init__(
        self, final: str, *, fsync: bool, keeps_others: bool = False, above: bool = False
    ) -> None:
        self.final = os.path.realpath(final)
        self._fsync = fsync
        self._keeps_others = keeps_others
        self._lock: FolderLock | None = None
        parent, name = os.path.split(self.final)
        beside, parent_name = os.path.split(parent)
        self._is_inside = False
        if above and not _is_fixed(parent):
            self.root = os.path.join(beside, folder_for(f"{parent_name}.{name}"))
        elif keeps_others and _is_fixed(self.final):
            self.root = os.path.join(self.final, folder_for(name))
            self._is_inside = True
        else:
            self.root = os.path.join(parent, folder_for(name))
        self.path = os.path.join(self.root, name)
        # Paths: the replaced folder; a file with the new folder's inode; a file that marks `_fill`.
        self._old, self._mark, self._filling = (
            os.path.join(self.root, each) for each in (".old", ".new", ".filling")
        )

    def claim(self) -> None:
        """Lock the folder until `discard`; raise SaveError if another process is writing it."""
        self._lock = FolderLock(self.root, _LOCK, self.final)
        self._put_in_order()

    @property
    def is_claimed(self) -> bool:
        """Whether this object holds the folder's lock."""
        return self._lock is not None

    def check_name(self) -> None:
        """Raise FileExistsError if a file has the checkpoint's name."""
        if os.path.lexists(self.final) and not os.path.isdir(self.final):
            raise FileExistsError(
                errno.EEXIST,
                "this checkpoint is a directory, but a file has its name: move that file, or save "
                "elsewhere",
                self.final,
            )

    def publish(self) -> None:
        """Give the folder its final name; after an OSError, the older folder keeps the name."""
        self.check_name()
        if self._fsync:
            for folder, _, names in os.walk(self.path):
                for path in (*(os.path.join(folder, name) for name in names), folder):
                    if not os.path.islink(path):
                        sync_path(path)
        if not os.path.lexists(self.final):
            os.rename(self.path, self.final)
        elif self._keeps_others and (self._is_inside or _is_at_work_in(self.final)):
            self._fill()
        else:
            try:
                self._replace()
            except OSError as error:
                if not self._keeps_others or error.errno not in _FIXED:
                    raise
                self._fill()
        if self._fsync:
            sync_path(os.path.dirname(self.final))
        self.discard()  # removes the replaced folder

    def discard(self) -> None:
        """Remove the unpublished folder, or the replaced one, and clean up after killed processes.

        If a killed process renamed the old folder, and no new folder has its name, the old folder
        is renamed back.
        """
        self._put_in_order()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def discard_leftover(self) -> None:
        """Discard the folder, unless another process is writing it or it cannot be changed."""
        with suppress(OSError):
            self._lock = FolderLock(self.root, _LOCK, self.final)
            self.discard()

    def complete(self) -> None:
        """If a killed process has moved only some of the files, move the rest."""
        if os.path.lexists(self._filling):
            self.claim()
            self.discard()

    def restore(self) -> None:
        """Rename the old folder back if a killed process renamed it and no folder has its name.

        Only the process that writes the folder may call this, because another writer could be
        between its two renames.
        """
        if self.left_behind() is not None:
            os.rename(self._old, self.final)

    def left_behind(self) -> str | None:
        """Return the old folder's path if a process was killed between `_replace`'s renames."""
        return self._old if os.path.isdir(self._old) and not os.path.lexists(self.final) else None

    def _put_in_order(self) -> None:
        if os.path.lexists(self._filling) and os.path.isdir(self.path):
            self._fill()
        self.restore()
        if self._keeps_others and self._is_replaced():
            for replaced in filter(os.path.isdir, (self.path, self._old)):
                _move_entries(replaced, self.final, replace=False, fsync=self._fsync)
        _remove_all_but(_LOCK, self.root)

    def _is_replaced(self) -> bool:
        """Return whether the new directory has the name `final` already."""
        with suppress(FileNotFoundError):
            return Path(self._mark).read_text() == str(os.stat(self.final).st_ino)
        return False

    def _fill(self) -> None:
        """Move the files one by one into the existing directory `final`."""
        Path(self._filling).touch()
        if self._fsync:
            sync_path(self.root)
        _move_entries(self.path, self.final, replace=True, fsync=self._fsync)
        os.unlink(self._filling)

    def _replace(self) -> None:
        """Give the new directory its name in one step or, if that is impossible, in two."""
        if self._keeps_others:
            Path(self._mark).write_text(str(os.stat(self.path).st_ino))
            if self._fsync:
                sync_path(self._mark)
                sync_path(self.root)
        if _exchange(self.path, self.final):
            return
        os.rename(self.final, self._old)
        try:
            os.rename(self.path, self.final)
        except BaseException:
            os.rename(self._old, self.final)
            raise


def staged_folders_in(
    directory: str, prefix: str, *, keeps_others: bool = False
) -> list[StagedFolder]:
    """Return the staged folders whose final names begin with `prefix`, even of dead processes."""
    return [
        StagedFolder(os.path.join(directory, name), fsync=False, keeps_others=keeps_others)
        for name in folders_in(directory, prefix)
    ]


def _move_entries(source: str, target: str, *, replace: bool, fsync: bool) -> None:
    """Move the entries of `source` and of its subdirectories into `target`.

    With `replace`, a file replaces a file with the same name.  Otherwise such a file stays in
    `source`, and nothing is moved through a link in `target`, which may lead out of the checkpoint.
    """
    for name in sorted(os.listdir(source)):
        old, new = os.path.join(source, name), os.path.join(target, name)
        is_kept = not replace and os.path.islink(new)
        if os.path.isdir(old) and not os.path.islink(old) and os.path.isdir(new) and not is_kept:
            _move_entries(old, new, replace=replace, fsync=fsync)
        elif replace or not os.path.lexists(new):
            os.rename(old, new)
    if fsync:
        sync_path(target)


def _remove_all_but(name: str, folder: str) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != name:
                with suppress(OSError):
                    os.unlink(entry.path)


def _is_fixed(folder: str) -> bool:
    """Return whether a directory is a mount point, or its parent is not writable."""
    if not os.path.isdir(folder):
        return False
    parent = os.path.dirname(folder)
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=True) or os.path.ismount(folder):
        return True
    # `ismount` does not notice a bind mount of a directory of the same file system.
    return mount_of(folder) != mount_of(parent)


def _is_at_work_in(folder: str) -> bool:
    """Return whether a directory is or contains the current directory."""
    with suppress(OSError):  # if the current directory has been removed
        current = Path.cwd()
        return any(os.path.samefile(folder, each) for each in (current, *current.parents))
    return False


def _exchange(path: str, other: str) -> bool:
    """Exchange two names in one step; return False if the system cannot do that."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    names = os.fsencode(path), os.fsencode(other)
    if function(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), path, None, other)


@contextmanager
def in_place_of(old: Callable[..., Any], new: Callable[..., Any]) -> Iterator[None]:
    """Within the block, replace `old`, which is ``torch.save`` or ``torch.load``, by `new`."""
    places = [
        (module, name)
        for module in (torch, torch.serialization)
        for name in ("save", "load")
        if getattr(module, name) is old
    ]
    for module, name in places:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name in places:
            if getattr(module, name) is new:  # False if the block has replaced it again
                setattr(module, name, old)


# ---------------------------------------------------------------- folders written in the background


class FolderParts:
    """The parts of a folder that the ranks of a job write while training goes on.

    A collective call in the background would mix with collective calls of the training.  So each
    rank locks a file beside the folder while it writes, and then writes its outcome into the file.
    The rank that publishes the folder reads these files.  If a file is unlocked and has no outcome,
    the process of its rank has died.

    Raises RuntimeError if another process has the same `rank`, and OSError if the file system has
    no locks.
    """

    def __init__(self, folder: StagedFolder, rank: int, size: int) -> None:
        os.makedirs(folder.root, exist_ok=True)
        self._folder, self._rank, self._size = folder, rank, size
        self._lock = RankLock(Path(folder.root), rank, size)

    def tell(self, error: BaseException | None) -> None:
        """Report that this rank's part is written, or report the error."""
        text = _WRITTEN if error is None else f"{type(error).__name__}: {error}"
        self._lock.leave(text[:_MAX_N_CHARACTERS])

    def wait(self) -> None:
        """Wait for the other ranks' parts; raise SaveError if a rank has failed or died."""
        words = {rank: self._word_of(rank) for rank in range(self._size) if rank != self._rank}
        self._lock.release()
        for rank, word in words.items():
            if word != _WRITTEN:
                problem = word or "the rank has ended, or does not see this file system"
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
    """The unfinished folders of one object that saves checkpoints, such as a Trainer."""

    def leftovers(self, directory: str, prefix: str) -> list[StagedFolder]:
        """Return the staged folders in a directory that do not belong to this object."""
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
        """Publish a folder when its saves and other ranks' parts are done; then call `afterwards`.

        If a save fails, the folder is removed, and `check` raises the error.  Without futures, the
        call does all of this at once, and raises the error itself.
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
        """When all `futures` are done, call `end` with the first error or None."""
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
    """In the block, ``torch.save`` and ``save_file`` into `folder` copy tensors, and write later.

    The files are written after the block, or within it if memory for the copies runs out.  Calls
    that save elsewhere, have further options, or have tensors that share memory write at once.  The
    yielded list gets the futures.  If the block raises, saves are cancelled or, if begun, awaited.
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
