"""Finds other writers of the same path, by the locks of the temporary files beside it."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress

_END = re.compile(r"[0-9a-f]{16}\.ptsave")
_N_END = 16 + len(".ptsave")


def rivals_of(temporary: str) -> list[str]:
    """Return other writers' temporary files for the same path, in this process or another.

    `temporary` is the caller's own file, such as ``.run.pt.4f1c0a93b2d7e856.ptsave`` in its
    directory.  Files that a killed process has left do not count.
    """
    folder, own = os.path.split(temporary)
    prefix = own[:-_N_END]
    try:
        names = os.listdir(folder or ".")
    except OSError:  # a directory may be writable, but not readable
        return []
    others = (
        os.path.join(folder, name)
        for name in sorted(names)
        if name != own and name.startswith(prefix) and _END.fullmatch(name[len(prefix) :])
    )
    return [other for other in others if _is_locked(other)]


def _is_locked(path: str) -> bool:
    with suppress(OSError):  # the file is gone, or another user's
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False
