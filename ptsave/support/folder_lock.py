"""Keeps a directory for one process, by a lock on a file in it that ends with the process."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from ptsave import _C
from ptsave.errors import SaveError
from ptsave.support.held_lock import HeldLock


class FolderLock(HeldLock):
    """Makes and locks a directory; raises a SaveError about `place` if it is locked already.

    On a file system without locks, other processes are not kept out.

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
            _lock(descriptor, place)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None


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
