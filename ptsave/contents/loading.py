"""Loads a checkpoint of any kind, from anywhere: its content decides who reads it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from ptsave.archive.group_loading import load_by_group
from ptsave.archive.loading import LoadOptions, load_file
from ptsave.archive.opening import reader_for
from ptsave.archive.stream_reader import StreamReader
from ptsave.contents.checkpoint_files import find_files
from ptsave.contents.safetensors_loading import load_safetensors
from ptsave.contents.shard_files import ShardFiles, merged
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.kinds import HEAD_NBYTES, is_safetensors
from ptsave.sources.opening import open_source
from ptsave.sources.ranges import FsspecFile, RangeSource
from ptsave.sources.urls import is_url_source
from ptsave.support.group_call import has_others

__all__ = ["load_source"]

_HEADER_OFFSET = 8  # in a safetensors file


def load_source(
    f: Any,
    options: LoadOptions,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> Any:
    """Load a checkpoint; parameters and errors as of :func:`ptsave.load`.

    A local file that begins as an archive is opened once, and nothing else is asked of the system.
    """
    if has_others(process_group):
        return load_by_group(f, options, storage_options, process_group)
    if is_url_source(f, storage_options):
        return _load_files(find_files(f, storage_options), options)
    try:
        reader = reader_for(f, options.mmap, options.verify)
    except IsADirectoryError:
        return _load_files(_files_in(os.fspath(f)), options)
    if reader is None:
        is_path = isinstance(f, (str, os.PathLike))
        return _load_path(f, options) if is_path else _load_stream(f, options)
    return load_file(f, options, reader)


def _files_in(directory: str) -> ShardFiles:
    """Return the files of the checkpoint in a directory.

    Raises
    ------
    IsADirectoryError
        If it holds none: torch's words, and why.
    """
    try:
        return find_files(directory)
    except (FileNotFoundError, IsADirectoryError) as error:
        if error.filename != directory:
            raise  # a shard is missing
        words = f"{os.strerror(errno.EISDIR)}: {directory!r}: {error.strerror}"
        raise IsADirectoryError(errno.EISDIR, words, directory) from None


def _load_path(f: Any, options: LoadOptions) -> Any:
    """Load a safetensors file, or the files of an index; torch loads the rest, or refuses it."""
    path: object = os.fspath(f)
    if not isinstance(path, str):
        return load_file(f, options, None)
    try:
        files = find_files(path)
    except (OSError, ValueError) as error:
        if getattr(error, "filename", path) != path:
            raise  # a shard is missing
        return load_file(f, options, None)
    if files.source is not None:
        return _load_file(files.source, options, f)
    return _load_files(files, options)


def _load_stream(f: Any, options: LoadOptions) -> Any:
    """Load what is no archive from a file object: a safetensors file, or torch does."""
    head = _head_of(f)
    if head.lstrip().startswith(b"{"):
        begin = f.tell()
        find_files(f)  # refuses an index
        f.seek(begin)
    if head[_HEADER_OFFSET:].startswith(b"{"):
        source = open_source(f)
        if is_safetensors(head, source.nbytes):
            _refuse_mmap(source, options)
            tensors = load_safetensors(source, options)
            del source  # a BytesIO cannot grow meanwhile
            f.seek(0, os.SEEK_END)
            return tensors
    return load_file(f, options, None)


def _head_of(f: Any) -> bytes:
    """Return the first bytes of a file object, from its position on; none if it has no such."""
    try:
        begin = f.tell()
        head = f.read(HEAD_NBYTES)
        f.seek(begin)
    except Exception:  # of anybody's file-like object: torch says what is missing
        return b""
    return head if isinstance(head, bytes) else b""


def _load_files(files: ShardFiles, options: LoadOptions) -> Any:
    """Load the files of a checkpoint, one after another, as one dict; a single one as it is."""
    if files.is_one:
        (source,) = files.open()
        return _load_file(source, options)
    objects = ((source.name, _load_file(source, options)) for source in files.open())
    return merged(objects, files)


def _load_file(source: RangeSource, options: LoadOptions, path: Any = None) -> Any:
    """Load a file that was opened by its path, to be named as that was given, or its URL."""
    path = source.name if path is None else path
    if isinstance(source, FsspecFile):
        return _load_remote(source, options)
    with source.closed_on_error():
        if source.kind == "safetensors":
            return load_safetensors(source, options)
    source.close()
    return load_file(path, options, reader_for(path, options.mmap, options.verify))


def _load_remote(source: FsspecFile, options: LoadOptions) -> Any:
    _refuse_mmap(source, options)
    if source.kind == "safetensors":
        return load_safetensors(source, options)
    with source.stream() as stream:
        is_archive = source.kind == "zip"
        reader = StreamReader(source, verify=options.verify) if is_archive else None
        return load_file(stream, options, reader)


def _refuse_mmap(source: RangeSource, options: LoadOptions) -> None:
    if options.mmap:
        raise UnsupportedSourceError(
            f"{source.name}: mmap=True maps local files: pass the path of one, or load it with "
            "mmap=False"
        )
