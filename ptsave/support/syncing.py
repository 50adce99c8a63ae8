"""Syncs files and directories to the disk, so that they survive power loss."""

from __future__ import annotations

import os


def sync_path(path: str | os.PathLike[str]) -> None:
    """Write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
