"""Tells where DCP checkpoints may be: local directories, and URLs for loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ptsave.errors import UnsupportedUrlError
from ptsave.sources.opening import FsspecFolder
from ptsave.sources.ranges import FsspecFile
from ptsave.sources.urls import is_url, is_url_source, options_of


def directory_name(path: str | os.PathLike[str]) -> str:
    """Return a path as text; an empty path is the current directory, as in torch's classes.

    >>> directory_name(""), directory_name("checkpoint/")
    ('.', 'checkpoint/')
    """
    return os.fsdecode(path) or os.curdir


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the directory that `path` names; a URL is an UnsupportedUrlError."""
    name = directory_name(path)
    if isinstance(path, str) and is_url(name):
        raise UnsupportedUrlError.of(name)
    return name


def remote_metadata(
    path: str | os.PathLike[str], name: str, storage_options: Mapping[str, Any] | None
) -> FsspecFile | None:
    """Open the metadata of a checkpoint at a URL; return None for a local directory."""
    if not (isinstance(path, str) and is_url_source(path, storage_options)):
        return None
    options = options_of(storage_options)
    return FsspecFile(FsspecFolder(path, options).join(name), options)


def accepts(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint can be at `checkpoint_id`, by the rules of FileSystemWriter."""
    if not isinstance(checkpoint_id, str):
        return isinstance(checkpoint_id, os.PathLike)
    if is_url(checkpoint_id):
        return False
    parent = os.path.dirname(os.path.abspath(checkpoint_id))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    return os.access(parent, os.W_OK)
