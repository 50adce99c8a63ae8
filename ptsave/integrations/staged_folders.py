"""Checkpoints that are directories: complete under their name, or absent.

The files are written into ``.<name>.ptsave/<name>``, which no library takes for a checkpoint.  Then
a rename gives the directory its name; an existing directory is exchanged in one step where the file
system can, and removed.  A directory that cannot be renamed gets the files one by one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ptsave.sources.locations import folder_for, folders_in, sync_path
from ptsave.support.locks import FolderLock
from ptsave.writing.targets import mount_of

__all__ = ["StagedFolder", "in_place_of", "staged_folders_in"]

_LOCK = ".lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Errors of renaming a directory whose files can still be renamed.  It is a mount point, another
# user's directory in /tmp, or in a lower layer of a container's file system.
_FIXED = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM)


class StagedFolder:
    """A directory that is written at `path`, the same on all ranks, until it is named `final`.

    With `keeps_others` entries that only the replaced directory has are moved into the new one, and
    a directory that cannot be renamed may be replaced.  With `above` the temporary `root` is, if
    possible, beside the parent of `final`: some libraries take all names in it for checkpoints.
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
        # The replaced folder, the new folder's inode number, and a sign that files are being moved.
        self._old, self._mark, self._filling = (
            os.path.join(self.root, each) for each in (".old", ".new", ".filling")
        )

    def claim(self) -> None:
        """Lock the folder until `discard`, and clear up leftovers; one rank of a job calls it.

        Raises SaveError if another process is writing the folder.
        """
        self._lock = FolderLock(self.root, _LOCK, self.final)
        self._put_in_order()

    @property
    def is_claimed(self) -> bool:
        """Whether this object holds the folder's lock."""
        return self._lock is not None

    def check_name(self) -> None:
        """Raise FileExistsError if a file has the name."""
        if os.path.lexists(self.final) and not os.path.isdir(self.final):
            raise FileExistsError(
                errno.EEXIST,
                "a checkpoint is a directory, and a file has its name: move it, or save elsewhere",
                self.final,
            )

    def publish(self) -> None:
        """Give the folder its name; after an OSError the folder that had the name keeps it."""
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
        """Remove the unpublished folder, or the replaced one, and clear up after killed processes.

        A folder that lost its name to a killed process gets it back if no successor has it.
        """
        self._put_in_order()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        else:
            shutil.rmtree(self.root, ignore_errors=True)

    def discard_leftover(self) -> None:
        """Discard the folder unless another process is writing it, or it cannot be changed."""
        with suppress(OSError):
            self._lock = FolderLock(self.root, _LOCK, self.final)
            self.discard()

    def complete(self) -> None:
        """Move the rest of the files that a killed process was moving; after an OSError they stay.

        Raises SaveError if another process is writing the folder.
        """
        if os.path.lexists(self._filling):
            self.claim()
            self.discard()

    def restore(self) -> None:
        """Give a folder its name back that a killed process took, if no successor has it.

        Only a process that writes here may call it: another writer could be between its renames.
        """
        if self.left_behind() is not None:
            os.rename(self._old, self.final)

    def left_behind(self) -> str | None:
        """Return the old folder's path if a process was killed between its two renames."""
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
        """Return whether the new directory has the name."""
        with suppress(FileNotFoundError):
            return Path(self._mark).read_text() == str(os.stat(self.final).st_ino)
        return False

    def _fill(self) -> None:
        """Move the files one by one into the directory that has the name."""
        Path(self._filling).touch()
        if self._fsync:
            sync_path(self.root)
        _move_entries(self.path, self.final, replace=True, fsync=self._fsync)
        os.unlink(self._filling)

    def _replace(self) -> None:
        """Exchange the directories' names, after noting which of them is the new one."""
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
    """Return the staged folders in a directory, also of dead processes, by their final prefix."""
    return [
        StagedFolder(os.path.join(directory, name), fsync=False, keeps_others=keeps_others)
        for name in folders_in(directory, prefix)
    ]


def _move_entries(source: str, target: str, *, replace: bool, fsync: bool) -> None:
    """Move the entries of a directory into another one, also in subdirectories.

    Files of the same names are replaced, or stay in `source`.  Only an entry that replaces another
    one may go through a link in `target`, out of the checkpoint.
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
    # `ismount` does not know a directory that is mounted again on the same file system.
    return mount_of(folder) != mount_of(parent)


def _is_at_work_in(folder: str) -> bool:
    """Return whether a directory is or contains the current directory."""
    with suppress(OSError):  # the current directory has been removed
        current = Path.cwd()
        return any(os.path.samefile(folder, each) for each in (current, *current.parents))
    return False


def _exchange(path: str, other: str) -> bool:
    """Exchange two names in one step; return False where the system cannot."""
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
    """Replace ``torch.save`` or ``torch.load`` in the block."""
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
            if getattr(module, name) is new:  # not if the block has replaced it again
                setattr(module, name, old)
