"""Keeps a directory for one process, by a lock on a file in it that goes when the process does."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from contextlib import suppress

from ptsave.errors import SaveError

__all__ = ["FolderLock"]


class FolderLock:
    """Holds a directory, which is made.  Where the file system has no locks nobody is kept out.

    Parameters
    ----------
    folder : str
        The directory.
    name : str
        The file's.
    place : str
        The path that the message names.

    Raises
    ------
    SaveError
        Another process, or another object of this one, holds it.
    OSError
        The file cannot be made.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     lock = FolderLock(f"{parent}/folder", ".lock", "step-1")
    ...     try:
    ...         FolderLock(f"{parent}/folder", ".lock", "step-1")
    ...     except OSError as error:
    ...         print("another process is saving" in str(error))
    ...     lock.release()
    ...     print(os.listdir(parent))
    True
    []
    """

    def __init__(self, folder: str, name: str, place: str) -> None:
        self._folder, self._path = folder, os.path.join(folder, name)
        self._descriptor: int | None = None
        while self._descriptor is None:  # a holder may remove the file while this one opens it
            self._descriptor = self._locked(place)
        _held.add(self)

    def release(self) -> None:
        """Let others have the directory; it goes, if nothing else is in it."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.unlink(self._path)
            with suppress(OSError):
                os.rmdir(self._folder)
            self._close()

    def _locked(self, place: str) -> int | None:
        """Return a descriptor of the file, or None if it has lost its name meanwhile."""
        os.makedirs(self._folder, exist_ok=True)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        try:
            _lock(descriptor, place)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self._close()


def _lock(descriptor: int, place: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SaveError(
            errno.EBUSY,
            "another process is saving there: wait until it has, or save elsewhere",
            place,
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_all() -> None:
    """Leave all locks to the process that this one was forked from."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget_all)
