"""Locks on files and directories; a lock ends with the process that took it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ptsave import _C
from ptsave.errors import SaveError


class HeldLock:
    """Holds the descriptor of a locked file; a forked child closes its copy of the descriptor."""

    _descriptor: int | None = None

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    def close(self) -> None:
        """Close the descriptor, which ends the lock; after a fork, the parent process keeps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_forget_all)


def try_lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock a file: return True, False if it is locked already, or None if locks are unsupported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_locked(descriptor: int) -> bool:
    """Return whether the file is locked through another descriptor, in any process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked_directory(directory: str, *, wait: bool = False) -> Iterator[bool]:
    """Lock a directory for the `with` block; yield True, or False if it is locked already."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(descriptor, wait=wait) is not False
    finally:
        with suppress(OSError):  # closing is not enough: a forked child has the descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class FolderLock(HeldLock):
    """Makes `folder` and locks its file `name`; raises a SaveError about `place` if it is locked.

    With `wait`, it waits instead.  On a file system without locks, other processes can use the
    directory at the same time.
    """

    def __init__(self, folder: str, name: str, place: str, *, wait: bool = False) -> None:
        self._folder, self._path = folder, os.path.join(folder, name)
        descriptor = None
        while descriptor is None:  # another process may remove the file meanwhile
            descriptor = self._locked(place, wait=wait)
        self._hold(descriptor)

    def release(self) -> None:
        """Unlock the directory, and remove it if nothing else is in it."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.unlink(self._path)
            with suppress(OSError):
                os.rmdir(self._folder)
            # While the system writes a checkpoint to the disk, closing a removed file may take a
            # tenth of a second.
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            _C.release_later(descriptor)

    def _locked(self, place: str, *, wait: bool) -> int | None:
        """Return a descriptor of the locked file, or None if the file was removed meanwhile."""
        try:
            os.makedirs(self._folder, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        except FileExistsError:
            # Also raised if the directory is removed between the two looks of makedirs().
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(os.lstat(self._folder).st_mode):
                    raise
            return None
        try:
            if try_lock(descriptor, wait=wait) is False:
                reason = "another process is saving there: wait for that save, or save elsewhere"
                raise SaveError(errno.EBUSY, reason, place)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None
