"""The files of a model as sources of tensors: lists their entries, and reads them into place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.format_errors import raise_corrupt
from ptsave.contents.safetensors_header import read_header
from ptsave.contents.shard_files import ShardFiles, refuse_what_came_instead, those_in_index
from ptsave.errors import CorruptCheckpointError, CorruptPickleError
from ptsave.restoring import FileCopier, restoring
from ptsave.sources.opening import open_source
from ptsave.sources.ranges import LocalFile
from ptsave.state.copying import Copier
from ptsave.state.nested_state import parts_with_tensors
from ptsave.support import config
from ptsave.support.progress import ProgressCallback
from ptsave.tree.containers import items_of
from ptsave.tree.expansion import stored_nbytes_of

__all__ = [
    "Entry",
    "PickledShard",
    "Read",
    "SafetensorsShard",
    "Shard",
    "open_shards",
    "read_all",
]


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard: Shard
    stored_nbytes: int  # in the file: its own, or those of the storage that it is a view of

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Read:
    """The elements of an entry from `begin` on that fill a tensor.

    All of them, in the entry's shape, or a part of them in a flat one.  The target may be the
    file's memory itself: then there is nothing to read.
    """

    entry: Entry
    target: Tensor
    begin: int = 0
    is_mapped: bool = False


class SafetensorsShard:
    """A safetensors file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = LocalFile.open(path)
        with self._file.closed_on_error():
            tensors = read_header(self._file).tensors
        self.entries = [
            Entry(stored.name, stored.shape, stored.dtype, self, stored.nbytes)
            for stored in tensors
        ]
        self._offsets = {stored.name: stored.offset for stored in tensors}

    @property
    def for_engine(self) -> tuple[int, bytes]:
        return self._file.for_engine

    def range_of(self, read: Read) -> tuple[int, Tensor]:
        """Return where in the file a read begins, and its tensor."""
        offset = self._offsets[read.entry.name] + read.begin * read.entry.dtype.itemsize
        return offset, read.target

    def map_cached(self, entry: Entry, begin: int, shape: torch.Size) -> Tensor | None:
        """Return the elements of an entry from `begin` on if the page cache has them at hand."""
        itemsize = entry.dtype.itemsize
        offset = self._offsets[entry.name] + begin * itemsize
        if offset % itemsize:
            return None
        memory = self._file.map_cached(offset, shape.numel() * itemsize)
        return None if memory is None else memory.view(entry.dtype).view(shape)

    def detach(self, storage: torch.UntypedStorage) -> None:
        """Make a mapped tensor independent of the file, because somebody keeps it."""
        _C.detach_from_file(storage, os.fsencode(self.path))

    def can_fill(self, entry: Entry, target: Tensor) -> bool:
        """Whether `target` may be that of a `Read` of the whole entry: bytes are all it takes."""
        return (
            target.device.type == "cpu"
            and target.dtype == entry.dtype
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
        )

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *exception: Any) -> None:
        self.close()


class PickledShard:
    """A file of :func:`torch.save` with a dict of tensors, loaded with ``weights_only=True``.

    Files whose tensors cannot be left unread (those of old versions of torch) are loaded to list
    them, let go of, and loaded again when they are read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._open_file = ExitStack()
        self._copier: Copier | None = None
        self._tensors: dict[str, Tensor] = {}
        self._open()
        self.entries = [
            Entry(name, tensor.shape, tensor.dtype, self, stored_nbytes_of([tensor]))
            for name, tensor in self._tensors.items()
        ]
        if not isinstance(self._copier, FileCopier):
            self.close()

    def _open(self) -> None:
        with ExitStack() as stack:
            loading = restoring(self.path, "cpu", weights_only=True, verify=True, progress=False)
            try:
                obj, self._copier, _ = stack.enter_context(loading)
            except (CorruptCheckpointError, OSError, MemoryError, Warning):
                raise
            except Exception as error:  # torch's unpickler stumbles in every way
                raise CorruptPickleError(f"{self.path}: {error}", path=self.path) from error
            self._tensors = self._checked(obj)
            self._open_file = stack.pop_all()

    def _checked(self, obj: Any) -> dict[str, Tensor]:
        if not isinstance(obj, Mapping):
            raise TypeError(f"{self.path} holds {type(obj).__name__}, not a dict of tensors")
        for name, tensor in items_of(obj):
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.path}: entry {name!r} is {type(tensor).__name__}, not a tensor: a "
                    f"checkpoint with more in it than weights is for {_loader_of(obj)}"
                )
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise TypeError(f"{self.path}: entry {name!r} is not a dense tensor")
        return {name: tensor.detach() for name, tensor in items_of(obj)}

    def can_fill(self, entry: Entry, target: Tensor) -> bool:
        """Whether `target` may be that of a `Read`: any that ``copy_`` would fill."""
        return not target.is_meta

    def read(self, reads: Iterable[Read]) -> None:
        if self._copier is None:
            self._open()
        assert self._copier is not None
        for read in reads:
            source = self._tensors[read.entry.name]
            self._copier.copy(read.target, source)
        self._copier.show({})  # makes the copies

    def close(self) -> None:
        """Let go of the file, reading nothing more."""
        self.__exit__(None, None, None)

    def __exit__(self, *exception: Any) -> None:
        self._tensors = {}  # storages that are still referenced would be read
        self._copier = None
        self._open_file.__exit__(*exception)
        self._open_file = ExitStack()


def _loader_of(obj: Mapping[Any, Any]) -> str:
    parts = [part for part in parts_with_tensors(obj) if part.isidentifier()]
    if not parts:
        return "ptsave.load_checkpoint()"
    return f"ptsave.load_checkpoint(path, {parts[0]}=model)"


Shard = SafetensorsShard | PickledShard


def open_shards(files: ShardFiles, stack: ExitStack) -> list[Entry]:
    """Open all files, closed by `stack`, and return their tensors in the order of the files.

    Where there is an index, a tensor counts in the file that the index names.

    Raises
    ------
    CorruptCheckpointError
        If a file is damaged, no checkpoint, or lacks a tensor that the index promises.
    OSError
        If one cannot be opened.
    """
    entries: list[Entry] = []
    for path in files.paths:
        shard = _open_indexed(path, files)
        stack.push(shard.__exit__)
        entries += shard.entries
    return those_in_index(((entry.name, entry.shard.path, entry) for entry in entries), files)


def _open_indexed(path: str, files: ShardFiles) -> Shard:
    """Open a shard; of one that is too damaged to name tensors the index knows them."""
    try:
        return _open_shard(path)
    except CorruptCheckpointError as error:
        if not error.entries and files.weight_map is not None:
            error.entries = [name for name, shard in files.weight_map.items() if shard == path]
            more = ", ..." if len(error.entries) > 3 else ""
            named = ", ".join(error.entries[:3]) + more
            error.args = (f"{error}; {files.index_path} says that it holds {named}",)
        raise


def _open_shard(path: str) -> Shard:
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    with closing(open_source(path)) as source:
        refuse_what_came_instead(source)
    return SafetensorsShard(path) if path.endswith(".safetensors") else PickledShard(path)


def read_all(reads: Sequence[Read], progress: ProgressCallback | None = None) -> None:
    """Fill the targets of all reads, those of safetensors files at the same time.

    Raises
    ------
    CorruptCheckpointError, OSError
        Some targets may have been changed by then.
    """
    reads = [read for read in reads if not read.is_mapped]
    _read_ranges(
        [read for read in reads if isinstance(read.entry.shard, SafetensorsShard)], progress
    )
    by_shard: dict[PickledShard, list[Read]] = {}
    for read in reads:
        if isinstance(read.entry.shard, PickledShard):
            by_shard.setdefault(read.entry.shard, []).append(read)
    for shard, its_reads in by_shard.items():
        shard.read(its_reads)


def _read_ranges(reads: Sequence[Read], progress: ProgressCallback | None) -> None:
    numbers: dict[SafetensorsShard, int] = {}
    ranges = []
    for read in reads:
        shard = read.entry.shard
        assert isinstance(shard, SafetensorsShard)
        ranges.append((numbers.setdefault(shard, len(numbers)), *shard.range_of(read)))
    try:
        _C.read_ranges(
            [shard.for_engine for shard in numbers],
            ranges,
            n_threads=config.current().n_readers,
            direct=config.current().direct_reads,
            progress=progress,
        )
    except _C.FormatError as error:  # a file has become shorter; the message has its name
        paths = [shard.path for shard in numbers]
        raise_corrupt(error, next((path for path in paths if path in error.args[1]), ""))
