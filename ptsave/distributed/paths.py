"""Where checkpoints of DCP may be: local directories."""

from __future__ import annotations

import os

from ptsave.errors import UnsupportedUrlError
from ptsave.sources.urls import is_url

__all__ = ["accepts", "local_path"]


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the directory that `path` names.

    Raises
    ------
    UnsupportedUrlError
        If it is a URL.
    """
    name = os.fspath(path)
    if isinstance(path, str) and is_url(name):
        raise UnsupportedUrlError.of(name)
    return name


def accepts(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint can be at `checkpoint_id`, as torch's FileSystemWriter has it."""
    if not isinstance(checkpoint_id, str):
        return isinstance(checkpoint_id, os.PathLike)
    if is_url(checkpoint_id):
        return False
    parent = os.path.dirname(os.path.abspath(checkpoint_id))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    return os.access(parent, os.W_OK)
