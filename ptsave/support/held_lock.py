"""Locks on files and directories that end with the process which has taken them."""

from __future__ import annotations

import fcntl
import os
import weakref

__all__ = ["HeldLock", "try_lock"]


class HeldLock:
    """Has the descriptor of a locked file; a forked child, which would hold it too, closes it."""

    _descriptor: int | None = None

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(self)

    def _close(self) -> None:
        """Give the lock up, or leave it to the process that this one was forked from."""
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

    Examples
    --------
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
