"""Locks on files and directories that end with the process that took them."""

from __future__ import annotations

import fcntl
import os
import weakref


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


def try_lock(descriptor: int) -> bool | None:
    """Lock without waiting: False if another process has the lock, None if there are no locks.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file, open(file.name) as other:
    ...     print(try_lock(file.fileno()), try_lock(other.fileno()))
    True False
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
