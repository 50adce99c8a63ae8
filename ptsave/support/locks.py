"""Locks on files and directories that end with the process that took them."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ptsave import _C
from ptsave.errors import SaveError


class HeldLock:
    """Holds the descriptor of a locked file; a forked child closes its copy."""

    _descriptor: int | None = None

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    def _close(self) -> None:
        """Give the lock up; in a forked child, leave it to the parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self._close()


_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_all)


def try_lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock a file; return False if another holds the lock, None if the system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_locked(descriptor: int) -> bool:
    """Return whether another descriptor, of this process or another, holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked_directory(directory: str, *, wait: bool = False) -> Iterator[bool]:
    """Lock a directory in the block; yield False if another process has locked it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(descriptor, wait=wait) is not False
    finally:
        with suppress(OSError):  # closing is not enough: a forked child has the descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class FolderLock(HeldLock):
    """Makes and locks a directory; raises a SaveError about `place` if it is locked already.

    On a file system without locks, other processes are not kept out.
    """

    def __init__(self, folder: str, name: str, place: str) -> None:
        self._folder, self._path = folder, os.path.join(folder, name)
        descriptor = None
        while descriptor is None:  # a holder may remove the file at the same time
            descriptor = self._locked(place)
        self._hold(descriptor)

    def release(self) -> None:
        """Unlock the directory, and remove it if nothing else is in it."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.unlink(self._path)
            with suppress(OSError):
                os.rmdir(self._folder)
            # While a file system writes a checkpoint to its disk, it may take a tenth of a second
            # to close a file that was removed.
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            _C.release_later(descriptor)

    def _locked(self, place: str) -> int | None:
        """Return a descriptor of the locked file, or None if the file was removed meanwhile."""
        os.makedirs(self._folder, exist_ok=True)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        try:
            if try_lock(descriptor) is False:
                reason = "another process is saving there: wait until it has, or save elsewhere"
                raise SaveError(errno.EBUSY, reason, place)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None
