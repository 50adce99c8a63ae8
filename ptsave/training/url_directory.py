"""Checkpoints in a directory at a URL.

An object store needs no locks and no renames, because a save shows a key only when the checkpoint
is complete.  Only one process removes old checkpoints: the rank that saves, or rank 0.
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


def directory_opener(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, fsync: bool
) -> tuple[Path | str, Callable[[Naming | None], CheckpointDirectory]]:
    """Make a checkpoint directory; return its place and a function that opens it."""
    target = resolve(directory, storage_options)
    if not isinstance(target, str):
        target.make_directory()
        url = target.url
        # Each process opens the directory anew: connections do not survive a fork.
        return url, lambda naming: UrlCheckpointDirectory(url, storage_options, naming)
    path = create_directory(target, fsync=fsync)
    return path, lambda naming: CheckpointDirectory(path, naming)


class UrlCheckpointDirectory(CheckpointDirectory):
    """The checkpoints of one directory in a file system that fsspec knows."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None, naming: Naming | None = None
    ) -> None:
        super().__init__(url, naming)
        target = resolve(url, storage_options)
        assert not isinstance(target, str)
        self._target = target
        self._open_options = {"storage_options": storage_options}

    def remove_temporary_files(self) -> None:
        """Do nothing: at a URL, a temporary file's writer cannot be seen."""

    def place_of(self, name: str) -> str:
        return self._target.child(name).url

    def _files(self) -> list[str]:
        return self._target.files()

    def _identity(self, name: str) -> object:
        return self._target.child(name).identity()

    def _open(self, path: Any) -> AbstractContextManager[Any]:
        return nullcontext(path)  # the reader opens its own connections

    def remove(self, name: str) -> None:
        self._target.child(name).remove()

    def _locked(self) -> AbstractContextManager[bool]:
        return nullcontext(True)
