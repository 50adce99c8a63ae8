"""Finds other writers of the same path: the temporary files beside it whose locks are held."""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress

__all__ = ["rivals_of"]

_END = re.compile(r"[0-9a-f]{16}\.ptsave")
_N_END = 16 + len(".ptsave")


def rivals_of(temporary: str) -> list[str]:
    """Return the temporary files of others that write the same path now, in this process or not.

    What a killed process has left is none of them.

    Parameters
    ----------
    temporary : str
        The own one, ``.run.pt.4f1c0a93b2d7e856.ptsave`` in its directory.
    """
    folder, own = os.path.split(temporary)
    prefix = own[:-_N_END]
    try:
        names = os.listdir(folder or ".")
    except OSError:  # a directory may be written to and not be read
        return []
    others = (
        os.path.join(folder, name)
        for name in sorted(names)
        if name != own and name.startswith(prefix) and _END.fullmatch(name[len(prefix) :])
    )
    return [other for other in others if _is_locked(other)]


def _is_locked(path: str) -> bool:
    with suppress(OSError):  # it is gone, or another user's
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False
