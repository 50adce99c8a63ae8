"""Opens the source of a conversion: its object, with tensors whose bytes stay where they are."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ptsave.archive.spans import MIB
from ptsave.contents.contents import LoadedContents, UnreadContents
from ptsave.contents.opening import open_contents
from ptsave.contents.safetensors_header import read_header
from ptsave.contents.shard_files import find_shards, merged
from ptsave.sources.kinds import HEAD_NBYTES, is_safetensors, regular_only
from ptsave.sources.ranges import FsspecFile, LocalFile, expect_no_more_reads
from ptsave.sources.remote_errors import named_errors
from ptsave.sources.urls import is_url, refuse_url
from ptsave.streaming.payload_sources import (
    PayloadSources,
    StoragePlace,
    TemporaryFile,
    unfilled_tensors,
)
from ptsave.tree.containers import items_of

__all__ = ["SourceCheckpoint", "open_checkpoint"]

# Of a URL: bytes in memory at a time, and bytes asked for in one request.
_BATCH_NBYTES = 32 * MIB
_REQUEST_NBYTES = 8 * MIB


@dataclass
class SourceCheckpoint:
    """A file, or all files of a model, opened without reading tensors.

    Attributes
    ----------
    path : str
        The file or directory, or the URL.
    obj : object
        The saved object; for the files of a model, one dict of all of them.
    files : list of str
        The local files.
    is_safetensors : bool
        Whether all are safetensors files.
    metadata : dict of str to str
        Their ``__metadata__``.
    remarks : list of str
        Facts that the owner of the files should know.
    """

    path: str = ""
    obj: Any = None
    files: list[str] = field(default_factory=list)
    is_safetensors: bool = True
    metadata: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def open_checkpoint(
    path: str,
    sources: PayloadSources,
    stack: ExitStack,
    *,
    folder: str,
    storage_options: Mapping[str, Any],
) -> SourceCheckpoint:
    """Open a file, a directory of shards, an index of shards, or a URL.

    Parameters
    ----------
    path : str
        The file, directory or URL to open.
    sources : PayloadSources
        Learns where the bytes of the tensors are.
    stack : contextlib.ExitStack
        Closes the files.
    folder : str
        Folder for a temporary file: a URL is fetched into it first.
    storage_options : mapping
        For the file system of a URL.

    Raises
    ------
    NotCheckpointError, CorruptCheckpointError, pickle.UnpicklingError, OSError
        As from :func:`ptsave.open` and :func:`ptsave.load_model`.
    """
    checkpoint = SourceCheckpoint(path)
    if is_url(path):
        fd = _fetch(path, storage_options, folder, stack)
        checkpoint.obj = _open_file(path, f"/proc/self/fd/{fd}", sources, stack, checkpoint)
        return checkpoint
    if storage_options:
        raise TypeError("storage_options are for URLs")
    refuse_url(path)
    files = find_shards(path)
    checkpoint.files = files.paths
    objects = [_open_file(each, each, sources, stack, checkpoint) for each in files.paths]
    if len(objects) == 1 and files.weight_map is None:
        checkpoint.obj = objects[0]
    else:
        checkpoint.obj = merged(_entries(files.paths, objects), files)
    return checkpoint


def _open_file(
    path: str, opened: str, sources: PayloadSources, stack: ExitStack, checkpoint: SourceCheckpoint
) -> Any:
    stream = io.FileIO(opened, opener=regular_only)
    stack.callback(stream.close)
    with named_errors(opened):
        head = stream.read(HEAD_NBYTES)
    if is_safetensors(head, os.fstat(stream.fileno()).st_size):
        stream.seek(0)
        expect_no_more_reads(stream.fileno())
        file = LocalFile(stream, path)
        stack.callback(file.close)
        stream.close()  # of many shards each descriptor counts
        return _open_safetensors(file, sources, checkpoint)
    checkpoint.is_safetensors = False
    stream.seek(0)
    contents = open_contents(stream, path, {}, verify=True)
    if isinstance(contents, UnreadContents):
        sources.add_unread(contents, stream.fileno(), path)
        if not contents.reader.engine.storages_have_crcs:
            checkpoint.remarks.append(
                f"{path} has no checksums of its storages: they are copied unverified"
            )
    elif isinstance(contents, LoadedContents):
        sources.add_loaded(contents)
    return contents.obj


def _open_safetensors(
    file: LocalFile, sources: PayloadSources, checkpoint: SourceCheckpoint
) -> Any:
    header = read_header(file)
    source = sources.add_file(file.descriptor, file.name)
    tensors = unfilled_tensors([(stored.dtype, stored.shape) for stored in header.tensors])
    for stored, tensor in zip(header.tensors, tensors, strict=True):
        place = StoragePlace(source, stored.offset, stored.nbytes)
        sources.put(tensor.untyped_storage(), place)
    checkpoint.metadata.update(header.metadata)
    return {stored.name: tensor for stored, tensor in zip(header.tensors, tensors, strict=True)}


def _entries(paths: list[str], objects: list[Any]) -> Iterator[tuple[str, str, Any]]:
    for path, obj in zip(paths, objects, strict=True):
        if not isinstance(obj, Mapping):
            raise TypeError(f"{path} holds {type(obj).__name__}, not a dict of tensors")
        for name, value in items_of(obj):
            yield name, path, value


def _fetch(url: str, storage_options: Mapping[str, Any], folder: str, stack: ExitStack) -> int:
    """Fetch a file piece by piece into a temporary one without a name; return its descriptor."""
    source = FsspecFile(url, dict(storage_options))
    file = TemporaryFile(folder, stack)
    for begin in range(0, source.nbytes, _BATCH_NBYTES):
        end = min(begin + _BATCH_NBYTES, source.nbytes)
        ranges = [(at, min(at + _REQUEST_NBYTES, end)) for at in range(begin, end, _REQUEST_NBYTES)]
        for piece in source.read(ranges):
            file.write_all(piece)
    return file.descriptor
