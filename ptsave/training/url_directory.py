"""The checkpoints below a URL.

An object store has neither locks nor renames, and needs none here: a key is a complete checkpoint,
because a save shows it when it is.  One process at a time prunes, that of the rank which saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ptsave.training.directory import CheckpointDirectory, create_directory
from ptsave.training.naming import Naming
from ptsave.writing.targets import resolve

__all__ = ["directory_opener"]


def directory_opener(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, fsync: bool
) -> tuple[Path | str, Callable[[Naming | None], CheckpointDirectory]]:
    """Make a directory for checkpoints, and return its place and what opens it, in any process.

    Raises
    ------
    SaveError
        As from :func:`create_directory`; an `UnsupportedUrlError` for a URL that cannot be written.
    TypeError
        If there are options for the file system of a URL, and it is none.
    """
    target = resolve(directory, storage_options)
    if not isinstance(target, str):
        target.make_directory()
        url = target.url
        # Once for each process: connections do not survive a fork.
        return url, lambda naming: UrlCheckpointDirectory(url, storage_options, naming)
    path = create_directory(target, fsync=fsync)
    return path, lambda naming: CheckpointDirectory(path, naming)


class UrlCheckpointDirectory(CheckpointDirectory):
    """The checkpoints of one directory of a file system that fsspec knows.

    Parameters
    ----------
    url : str
        The directory.  While it does not exist it has no checkpoints.
    storage_options : mapping or None
        Arguments of the file system.
    naming : Naming, optional
        Which files are checkpoints.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None, naming: Naming | None = None
    ) -> None:
        super().__init__(url, naming)
        target = resolve(url, storage_options)
        assert not isinstance(target, str)
        self._target = target
        self._open_options = {"storage_options": storage_options}

    def remove_temporary_files(self) -> None:
        """Do nothing: whether somebody is writing a temporary file cannot be seen."""

    def place_of(self, name: str) -> str:
        return self._target.child(name).url

    def _files(self) -> list[str]:
        return self._target.files()

    def _identity(self, name: str) -> object:
        return self._target.child(name).identity()

    def _open(self, path: Any) -> AbstractContextManager[Any]:
        return nullcontext(path)  # a client opens one connection or many, as it reads

    def remove(self, name: str) -> None:
        self._target.child(name).remove()

    def _locked(self) -> AbstractContextManager[bool]:
        return nullcontext(True)
