"""Lets files and the names in a directory survive power loss."""

from __future__ import annotations

import os

__all__ = ["sync_path"]


def sync_path(path: str | os.PathLike[str]) -> None:
    """Write what the system has not written of a file, or of the names in a directory, to the disk.

    Raises
    ------
    OSError
        If it cannot be opened or written.

    Examples
    --------
    >>> sync_path(".")
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
