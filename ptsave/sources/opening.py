"""Opens sources of bytes: paths, URLs and file objects as ranges, folders as lists of names."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from ptsave.sources.kinds import refuse_special_stream, regular_only
from ptsave.sources.local import describe, name_file, real_file
from ptsave.sources.locations import (
    LocalFolder,
    Location,
    is_url,
    is_url_source,
    options_of,
    with_path,
)
from ptsave.sources.ranges import Buffer, FileObject, FsspecFile, LocalFile, RangeSource

Folder: TypeAlias = Location  # one that is a directory


def folder_of(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """Return the directory of a file, given its path or URL.

    >>> folder_of("zip://model/a.index.json::memory://models.zip", {}).path
    'zip://model::memory://models.zip'
    """
    if not is_url(path):
        return LocalFolder(os.path.dirname(path))
    from ptsave.sources.url_locations import UrlLocation

    return UrlLocation(with_path(path, os.path.dirname), storage_options)


def open_folder_or_file(
    f: Any, storage_options: Mapping[str, Any] | None = None
) -> Folder | RangeSource:
    """Open anything that may hold a checkpoint: a directory, or a file as `open_source` does."""
    if is_url_source(f, storage_options):
        try:
            return FsspecFile(f, options_of(storage_options))
        except IsADirectoryError:
            from ptsave.sources.url_locations import UrlLocation

            return UrlLocation(f, options_of(storage_options))
    if isinstance(f, (str, os.PathLike)) and os.path.isdir(f):
        return LocalFolder(os.fsdecode(f))
    return _open_local(f)


def folder_at(f: Any, storage_options: Mapping[str, Any] | None = None) -> Folder | None:
    """Return the directory that a path or URL names; None for a file or a file object."""
    if not isinstance(f, (str, os.PathLike)):
        return None
    place = open_folder_or_file(f, storage_options)
    if isinstance(place, Folder):
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
