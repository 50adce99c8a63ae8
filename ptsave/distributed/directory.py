"""The directory of a checkpoint: its place, its files, and how a save replaces the files.

A save writes files with new names, replaces ``.metadata`` by one rename, and only then removes
the files of the old metadata.  So a reader finds either the old checkpoint or the new one.

A rank's file has the items of its plan, each at an aligned offset, and checksums of its blocks::

    small items   head, payload, head, payload, ...          payloads at multiples of 64
    large items   padding, head | payload                    payloads at multiples of 4,096
    table         the CRC-32 of each block of 4,096 bytes before it

The metadata has a checksum for each section of the table: see `ptsave.dcp.metadata`.

DCP stores each tensor as a ``torch.save`` file, and reads it with ``torch.load``.  Here each such
file has the format from before torch 1.6: a few pickles (the head), then the bytes (the payload).
A head takes about 300 bytes; an archive adds 1.6 KiB to a payload.  The payload is at the end
of the item, so readers find it without reading the head.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from ptsave import _C
from ptsave.dcp.metadata import (
    BLOCK_NBYTES,
    CheckedFile,
    dump_metadata,
    load_metadata,
    metadata_name,
    section_crcs,
)
from ptsave.errors import CorruptCheckpointError, SaveError, UnsupportedUrlError
from ptsave.sources.locations import LocalFolder, is_url, is_url_source, options_of, with_path
from ptsave.sources.ranges import FsspecFile
from ptsave.streaming.payload_sources import StoragePlace
from ptsave.support import torch_dcp
from ptsave.support.calls import ProgressCallback
from ptsave.writing.targets import FileWriter

# ptsave's __<rank>_<16 hex digits>.distcp, and FileSystemWriter's __<rank>_<number>.distcp.
_RANK_FILE = re.compile(r"__(?P<rank>\d+)_([0-9a-f]{16}|\d+)\.distcp")
_RANK_METADATA = re.compile(r"__(?P<rank>\d+)\.metadata")
_SMALL_ALIGNMENT = 64


class CheckpointDirectory(LocalFolder):
    """The local directory of one checkpoint."""

    def has_checkpoint(self, rank: int | None) -> bool:
        """Return whether the metadata of all ranks, or of a `rank` that saves by itself, exists."""
        return self.is_taken(metadata_name(rank))

    def new_name(self, rank: int) -> str:
        """Return a name for a rank's file that no earlier save has used."""
        return f"__{rank}_{secrets.token_hex(8)}.distcp"

    def publish(
        self, metadata: Metadata, sizes: dict[str, int], rank: int | None, *, fsync: bool
    ) -> None:
        """Publish the metadata, which makes its files the checkpoint, and remove the old files.

        `sizes` has the size of each file that the metadata names.  `rank` is the rank that saves by
        itself, or None if all ranks save together.  If another save has removed some of these
        files, SaveError is raised, the others are removed, and the old checkpoint stays.
        """
        from ptsave.streaming.payload_sources import write_bytes

        data = dump_metadata(metadata)
        with self.locked(wait=True):
            try:
                self._require(sizes)
            except SaveError:
                for each in sizes:
                    self.remove(each)
                raise
            name = metadata_name(rank)
            write_bytes(self.file(name), data, fsync=fsync)
            if fsync:
                self.sync()
            self._remove_others(set(sizes), rank)

    def remove_unnamed(self, names: Iterable[str], rank: int) -> None:
        """Remove files that a rank has written, unless metadata names them."""
        there = [name for name in names if self.is_taken(name)]
        if not there:
            return
        with self.locked(wait=True):
            metadata = [*map(self.bytes_of, (metadata_name(None), metadata_name(rank)))]
            for name in there:
                if not any(name.encode() in data for data in metadata):
                    self.remove(name)

    def _require(self, sizes: dict[str, int]) -> None:
        for name, nbytes in sizes.items():
            path = self.file(name)
            try:
                found = os.stat(path).st_size
            except FileNotFoundError:
                found = -1
            if found != nbytes:
                raise SaveError(
                    5,
                    "another save to this directory has removed this file, or the rank that wrote "
                    "this file has another directory at this path: all ranks must save to one "
                    "directory that they share"
                    if found < 0
                    else "the size of the file has changed",
                    path,
                )

    def _remove_others(self, kept: set[str], rank: int | None) -> None:
        """Remove the files of older checkpoints and of killed saves."""
        names = self.files()
        kept = kept | self._named_by_ranks(names, rank)
        for name in names:
            match = _RANK_FILE.fullmatch(name)
            if match is None or name in kept or rank not in (None, int(match["rank"])):
                continue
            self.remove(name)
        self.remove_leftovers(lambda name: _RANK_FILE.fullmatch(name) is not None)

    def _named_by_ranks(self, names: list[str], rank: int | None) -> set[str]:
        """Return the files that metadata of other saves in the directory names."""
        named: set[str] = set()
        for name in names:
            match = _RANK_METADATA.fullmatch(name)
            if match is not None and int(match["rank"]) == rank:
                continue  # this save has just written this metadata
            if match is None and (name != metadata_name(None) or rank is None):
                continue
            try:
                infos = load_metadata(self.file(name)).storage_data.values()
                named |= {info.relative_path for info in infos}
            except (OSError, CorruptCheckpointError, AttributeError):
                # The metadata's names are unknown, so no file that it might name is removed.
                pattern = rf"__{match['rank']}_.*" if match is not None else r"__.*"
                named |= {each for each in names if re.fullmatch(pattern, each)}
        return named


# ---------------------------------------------------- where a checkpoint may be: URLs for loads


def directory_name(path: str | os.PathLike[str]) -> str:
    """Return a path as text; an empty path means the current directory, like in torch's classes."""
    return os.fsdecode(path) or os.curdir


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the directory that `path` names; raise UnsupportedUrlError for a URL."""
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
    url = with_path(path, lambda directory: os.path.join(directory, name))
    return FsspecFile(url, options_of(storage_options))


def accepts(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether FileSystemWriter would accept `checkpoint_id` as a checkpoint's path."""
    if not isinstance(checkpoint_id, str):
        return isinstance(checkpoint_id, os.PathLike)
    if is_url(checkpoint_id):
        return False
    parent = os.path.dirname(os.path.abspath(checkpoint_id))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    return os.access(parent, os.W_OK)


# ----------------------------------------------------------------------------------- a rank's file


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _alignment(nbytes: int) -> int:
    return _SMALL_ALIGNMENT if nbytes < BLOCK_NBYTES else BLOCK_NBYTES


class RankFile:
    """Lays out and writes a rank's file; adding small items first gives the least padding."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []
        self._end = 0

    def add_tensors(
        self, tensors: Sequence[Tensor], alike: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Add contiguous tensors, and return the offsets and the sizes of their items.

        Tensors with the same number in `alike` have the same dtype and shape.
        """
        kinds: dict[int, tuple[bytes, int, int]] = {}
        begins, lengths, pieces, end = [], [], self._pieces, self._end
        for tensor, number in zip(tensors, alike, strict=True):
            kind = kinds.get(number)
            if kind is None:
                head, nbytes = head_of(tensor.dtype, tensor.shape), tensor.nbytes
                kind = kinds[number] = head, nbytes, _alignment(nbytes)
            head, nbytes, alignment = kind
            payload = _align(end + len(head), alignment)
            begin, end = payload - len(head), payload + nbytes
            pieces.append((begin, head))
            if nbytes:
                pieces.append((payload, tensor))
            begins.append(begin)
            lengths.append(end - begin)
        self._end = end
        return begins, lengths

    def add_payload(
        self, dtype: torch.dtype, shape: torch.Size, payload: StoragePlace
    ) -> tuple[int, int]:
        """Add a tensor that `write` reads from its `sources`; return the item's offset and size."""
        place = (payload.nbytes, payload.source, payload.offset, payload.parts)
        head = head_of(dtype, shape)
        at = _align(self._end + len(head), _alignment(payload.nbytes))
        begin = at - len(head)
        self._pieces.append((begin, head))
        if payload.nbytes:
            self._pieces.append((at, place))
        self._end = at + payload.nbytes
        return begin, self._end - begin

    def add_bytes(self, data: bytes) -> tuple[int, int]:
        """Add an item that needs no head; return its offset and size."""
        begin = _align(self._end, _SMALL_ALIGNMENT)
        self._pieces.append((begin, data))
        self._end = begin + len(data)
        return begin, len(data)

    def write(
        self,
        path: str,
        *,
        fsync: bool,
        sources: _C.PayloadSources | None = None,
        progress: ProgressCallback | None = None,
    ) -> CheckedFile:
        """Write the file atomically; `sources` has the bytes of tensors from `add_payload`."""
        plan = _C.CheckedPlan(self._pieces, sources)
        FileWriter(plan, compute_crcs=True, fsync=fsync, atomic=True, progress=progress).write_file(
            path
        )
        nbytes = _align(self._end, BLOCK_NBYTES)
        return CheckedFile(nbytes=nbytes, crcs=section_crcs(plan.block_crcs))


# ------------------------------------------------------------------------------ heads of items

_SYSTEM = {
    "protocol_version": PROTOCOL_VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
_STORAGES: dict[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
_KEY = "0"
_PROTOCOL = 2


class _Storage:
    """Stands for the storage of a tensor, whose bytes follow the pickles."""

    def __init__(self, kind: Any, numel: int) -> None:
        self.id = ("storage", kind, _KEY, "cpu", numel, None)


class _Tensor:
    """An object whose pickle loads as a contiguous tensor."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, _Storage) else None


@functools.lru_cache(maxsize=1024)
def head_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Return the pickles that torch.load reads before the bytes of a contiguous tensor.

    >>> values = torch.tensor([1.0, 2.0])
    >>> file = head_of(values.dtype, values.shape) + values.numpy().tobytes()
    >>> torch.load(io.BytesIO(file), weights_only=True)
    tensor([1., 2.])
    """
    # A meta tensor has the strides that torch gives to a contiguous tensor.
    stride = torch.empty(shape, device="meta").stride()
    tail: tuple[Any, ...] = (0, tuple(shape), stride, False, OrderedDict())
    kind = _STORAGES.get(dtype)
    nbytes = shape.numel() * dtype.itemsize
    if kind is not None:
        numel = shape.numel()
        tensor = _Tensor(torch_dcp.rebuild_tensor, (_Storage(kind, numel), *tail))
    else:  # such as float8, for which torch has no storage class
        numel = nbytes
        storage = _Storage(torch.ByteStorage, numel)
        tensor = _Tensor(torch_dcp.rebuild_tensor_of_dtype, (storage, *tail, dtype))
    stream = io.BytesIO()
    for value in (MAGIC_NUMBER, PROTOCOL_VERSION, _SYSTEM, tensor, [_KEY]):
        _Pickler(stream, protocol=_PROTOCOL).dump(value)
    stream.write(numel.to_bytes(8, "little"))
    return stream.getvalue()
