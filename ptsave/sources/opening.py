"""Opens sources of bytes: paths, URLs and file objects as ranges, folders as lists of names."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from ptsave.sources.kinds import refuse_special_stream, regular_only
from ptsave.sources.local import describe, real_file
from ptsave.sources.ranges import Buffer, FileObject, FsspecFile, LocalFile, RangeSource
from ptsave.sources.remote_errors import name_file, os_errors
from ptsave.sources.urls import is_url, is_url_source, options_of, url_to_fs, with_path


class LocalFolder:
    """A local directory; its `storage_options` are empty."""

    storage_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the names of everything in the directory, sorted."""
        return sorted(os.listdir(self.path))

    def join(self, name: str) -> str:
        """Return the path of a file in the directory."""
        return os.path.join(self.path, name)

    def exists(self, path: str) -> bool:
        """Return whether a file exists, given its path from `join`."""
        return os.path.exists(path)


class FsspecFolder:
    """A directory of a file system that fsspec knows."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.path = url
        self.storage_options = storage_options

    def names(self) -> list[str]:
        file_system, path = url_to_fs(self.path, self.storage_options)
        with os_errors(self.path):
            found = file_system.ls(path, detail=False)
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def join(self, name: str) -> str:
        return with_path(self.path, lambda path: os.path.join(path, name))

    def exists(self, path: str) -> bool:
        return True  # opening the file tells, without an extra request


Folder: TypeAlias = LocalFolder | FsspecFolder


def folder_of(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """Return the directory of a file, given its path or URL.

    >>> folder_of("zip://model/a.index.json::memory://models.zip", {}).path
    'zip://model::memory://models.zip'
    """
    if not is_url(path):
        return LocalFolder(os.path.dirname(path))
    return FsspecFolder(with_path(path, os.path.dirname), storage_options)


def open_folder_or_file(
    f: Any, storage_options: Mapping[str, Any] | None = None
) -> Folder | RangeSource:
    """Open anything that may hold a checkpoint: a directory, or a file as `open_source` does."""
    if is_url_source(f, storage_options):
        try:
            return FsspecFile(f, options_of(storage_options))
        except IsADirectoryError:
            return FsspecFolder(f, options_of(storage_options))
    if isinstance(f, (str, os.PathLike)) and os.path.isdir(f):
        return LocalFolder(os.fsdecode(f))
    return _open_local(f)


def folder_at(f: Any, storage_options: Mapping[str, Any] | None = None) -> Folder | None:
    """Return the directory that a path or URL names; None for a file or a file object."""
    if not isinstance(f, (str, os.PathLike)):
        return None
    place = open_folder_or_file(f, storage_options)
    if isinstance(place, (LocalFolder, FsspecFolder)):
        return place
    place.close()
    return None


def open_source(f: Any, storage_options: Mapping[str, Any] | None = None) -> RangeSource:
    """Open the bytes of a path, a URL, or a seekable file object from its position on."""
    if is_url_source(f, storage_options):
        return FsspecFile(f, options_of(storage_options))
    return _open_local(f)


def _open_local(f: Any) -> RangeSource:
    path = describe(f)
    if isinstance(f, (str, os.PathLike)):
        try:
            with io.FileIO(os.fspath(f), opener=regular_only) as stream:
                return LocalFile(stream, path)
        except OSError as error:
            name_file(error, path)
            raise
    if not all(hasattr(f, method) for method in ("read", "seek", "tell")):
        raise TypeError(f"expected a path, a URL or a seekable file, not {type(f).__name__}")
    if type(f) is io.BytesIO:
        return Buffer(f, path)
    if real_file(f) is not None:
        refuse_special_stream(f, path)
        return LocalFile(f, path)
    return FileObject(f, path)
