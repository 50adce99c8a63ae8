"""The files of a model as sources of tensors: lists their entries, and reads them into place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_devices
from ptsave.archive.format_errors import raise_corrupt
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.contents.safetensors_header import read_header
from ptsave.contents.shard_files import (
    ShardFiles,
    name_lost_entries,
    refuse_what_came_instead,
    those_in_index,
)
from ptsave.errors import CorruptCheckpointError, CorruptPickleError, not_checkpoint
from ptsave.sources.local import describe
from ptsave.sources.ranges import FileObject, LocalFile, RangeSource, expect_no_more_reads
from ptsave.sources.urls import is_url
from ptsave.state.copying import Copier
from ptsave.state.nested_state import parts_with_tensors
from ptsave.support import config
from ptsave.support.progress import ProgressCallback
from ptsave.training.restoring import FileCopier, restoring
from ptsave.tree.containers import items_of
from ptsave.tree.expansion import stored_nbytes_of

__all__ = [
    "Entry",
    "FetchedShard",
    "PickledShard",
    "Read",
    "SafetensorsShard",
    "Shard",
    "ShardReader",
    "open_shards",
]

_MAX_FETCHED_NBYTES = 64 << 20  # of tensors that are fetched before they are copied


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard: Shard
    nbytes: int
    stored_nbytes: int  # in the file: its own, or those of the storage that it is a view of


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

    def __init__(self, file: LocalFile) -> None:
        self.path = file.name
        self.file = file
        self.close = file.close
        tensors = read_header(file).tensors
        self.entries = [
            Entry(each.name, each.shape, each.dtype, self, each.nbytes, each.nbytes)
            for each in tensors
        ]
        self._offsets = {stored.name: stored.offset for stored in tensors}

    def range_of(self, read: Read) -> tuple[int, Tensor]:
        """Return where in the file a read begins, and its tensor."""
        offset = self._offsets[read.entry.name] + read.begin * read.entry.dtype.itemsize
        return self.file.begin + offset, read.target

    def map_cached(self, entry: Entry, begin: int, shape: torch.Size) -> Tensor | None:
        """Return the elements of an entry from `begin` on if the page cache has them at hand."""
        itemsize = entry.dtype.itemsize
        offset = self._offsets[entry.name] + begin * itemsize
        if (self.file.begin + offset) % itemsize:
            return None
        memory = self.file.map_cached(offset, shape.numel() * itemsize)
        return None if memory is None else memory.view(entry.dtype).view(shape)

    def detach(self, storage: torch.UntypedStorage) -> None:
        """Make a mapped tensor independent of the file, because somebody keeps it."""
        _C.detach_from_file(storage, os.fsencode(self.path))


class FetchedShard:
    """A safetensors file whose bytes are in memory, in a file object or far away."""

    def __init__(self, source: RangeSource) -> None:
        self.path = source.name
        self._contents: SafetensorsContents | None = SafetensorsContents(source)
        self.entries = [
            Entry(name, tensor.shape, tensor.dtype, self, tensor.nbytes, tensor.nbytes)
            for name, tensor in self._contents.obj.items()
        ]

    def read(self, reads: Iterable[Read]) -> None:
        """Fetch tensors, some of them at a time, and copy them into their targets."""
        for batch in _batches(reads):
            assert self._contents is not None
            obj = self._contents.obj
            values = self._contents.read([obj[read.entry.name] for read in batch], None)
            devices = [
                read.target.device if _C.convert_alike(v.dtype, read.target.dtype) else v.device
                for read, v in zip(batch, values, strict=True)
            ]
            with torch.no_grad():
                for read, value in zip(batch, to_devices(values, devices), strict=True):
                    read.target.copy_(value)

    def close(self) -> None:
        """Let go of the file."""
        self._contents = None


def _batches(reads: Iterable[Read]) -> Iterator[list[Read]]:
    batch: list[Read] = []
    nbytes = 0
    for read in reads:
        if batch and nbytes + read.entry.nbytes > _MAX_FETCHED_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(read)
        nbytes += read.entry.nbytes
    if batch:
        yield batch


class PickledShard:
    """A file of :func:`torch.save` with a dict of tensors, loaded with ``weights_only=True``.

    Local files whose tensors cannot be left unread (those of old versions of torch) are loaded to
    list them, let go of, and loaded again when they are read.
    """

    def __init__(self, f: Any, storage_options: Mapping[str, Any] | None = None) -> None:
        self.path = describe(f)
        self._f = f
        self._storage_options = storage_options
        self._open_file = ExitStack()
        self._copier: Copier | None = None
        self._tensors: dict[str, Tensor] = {}
        self._open()
        self.entries = [
            Entry(name, t.shape, t.dtype, self, prod(t.shape) * t.itemsize, stored_nbytes_of([t]))
            for name, t in self._tensors.items()
        ]
        is_local = isinstance(f, (str, os.PathLike)) and not is_url(f)
        if is_local and not isinstance(self._copier, FileCopier):
            self.close()

    def _open(self) -> None:
        with ExitStack() as stack:
            loading = restoring(
                self._f,
                "cpu",
                weights_only=True,
                verify=True,
                progress=False,
                storage_options=self._storage_options,
            )
            try:
                obj, self._copier, _ = stack.enter_context(loading)
            except (CorruptCheckpointError, OSError, MemoryError, Warning):
                raise
            except UnpicklingError as error:
                raise _more_than_tensors(error, self.path) from error
            except Exception as error:  # torch's unpickler stumbles in every way
                raise CorruptPickleError(f"{self.path}: {error}", path=self.path) from error
            self._tensors = self._checked(obj)
            self._open_file = stack.pop_all()

    def _checked(self, obj: Any) -> dict[str, Tensor]:
        if isinstance(obj, torch.nn.Module):
            raise TypeError(
                f"{self.path} holds a module that was saved whole ({type(obj).__name__}), not a "
                "dict of tensors: get it with ptsave.load(), and load its state_dict()"
            )
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

    def read(self, reads: Iterable[Read]) -> None:
        if self._copier is None:
            self._open()
        assert self._copier is not None
        self._copier.copy([(read.target, self._tensors[read.entry.name]) for read in reads])
        self._copier.show({})  # makes the copies

    def close(self) -> None:
        """Let go of the file, reading nothing more."""
        self.__exit__(None, None, None)

    def __exit__(self, *exception: Any) -> None:
        self._tensors = {}  # storages that are still referenced would be read
        self._copier = None
        self._open_file.__exit__(*exception)
        self._open_file = ExitStack()


def _more_than_tensors(error: UnpicklingError, path: str) -> CorruptCheckpointError:
    """Return the error for a pickle that ``weights_only=True`` refuses, which torch has named."""
    refused = re.search(r"GLOBAL (\S+) was not an allowed global by default", str(error))
    if refused is None:
        return CorruptPickleError(f"{path}: {error}", path=path)
    return not_checkpoint(
        f"{path} holds more than tensors: it asks for {refused[1]}, as a module that was saved "
        "whole asks for its class.  If you trust the file, get the module with "
        "ptsave.load(path, weights_only=False), and load its state_dict()\n"
        f"{error}",
        path,
        error,
    )


def _loader_of(obj: Mapping[Any, Any]) -> str:
    parts = [part for part in parts_with_tensors(obj) if part.isidentifier()]
    if not parts:
        return "ptsave.load_checkpoint()"
    return f"ptsave.load_checkpoint(path, {parts[0]}=model)"


Shard = SafetensorsShard | FetchedShard | PickledShard


def open_shards(f: Any, files: ShardFiles, stack: ExitStack) -> list[Entry]:
    """Open all files, closed by `stack`, and return their tensors in the order of the files.

    Where there is an index, a tensor counts in the file that the index names.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        The source that `files` were found for.
    files : ShardFiles
        Its files.
    stack : contextlib.ExitStack
        Closes them.

    Raises
    ------
    CorruptCheckpointError
        If a file is damaged, no checkpoint, or lacks a tensor that the index promises.
    OSError
        If one cannot be opened.
    """
    is_named = isinstance(f, (str, os.PathLike))
    entries: list[Entry] = []
    for path in files.paths:
        source = files.open_one(path)
        try:
            shard = _open_shard(source, source.name if is_named else f, files.storage_options)
        except BaseException as error:
            source.close()
            if isinstance(error, CorruptCheckpointError):
                name_lost_entries(error, source.name, files)
            raise
        if isinstance(shard, PickledShard):
            stack.push(shard.__exit__)
        else:
            stack.callback(shard.close)
        entries += shard.entries
    return those_in_index([(entry.name, entry.shard.path, entry) for entry in entries], files)


def _open_shard(source: RangeSource, f: Any, storage_options: Mapping[str, Any]) -> Shard:
    if isinstance(source, LocalFile):  # the first read would leave a mark to read ahead from
        expect_no_more_reads(source.descriptor)
    kind: str | None = source.kind
    if kind is None:
        refuse_what_came_instead(source)
        if source.name.endswith(".safetensors"):
            kind = "safetensors"  # a damaged one
    if kind != "safetensors":
        source.close()
        if isinstance(source, FileObject):
            source.rewind()
        return PickledShard(f, storage_options)
    if not isinstance(source, LocalFile):
        return FetchedShard(source)
    return SafetensorsShard(source)


class ShardReader:
    """Reads tensors of open shards, those of local safetensors files at the same time.

    Those files stay open for it, and count as one load: only its beginning goes through the page
    cache.  Safe for concurrent use, unless there are shards of other kinds.

    Parameters
    ----------
    shards : iterable of Shard
        The open shards, each of which may come several times.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        local = (shard for shard in shards if isinstance(shard, SafetensorsShard))
        self._numbers = {shard: number for number, shard in enumerate(dict.fromkeys(local))}
        limits = config.current()
        self._files: _C.RangeFiles | None = _C.RangeFiles(
            [shard.file.for_engine for shard in self._numbers],
            n_threads=limits.n_readers,
            direct=limits.direct_reads,
        )

    def read(self, reads: Sequence[Read], progress: ProgressCallback | None = None) -> None:
        """Fill the targets of all reads.

        Raises
        ------
        CorruptCheckpointError, OSError
            Some targets may have been changed by then.
        """
        local: list[tuple[SafetensorsShard, Read]] = []
        by_shard: dict[FetchedShard | PickledShard, list[Read]] = {}
        for read in reads:
            shard = read.entry.shard
            if read.is_mapped:
                continue
            if isinstance(shard, SafetensorsShard):
                local.append((shard, read))
            else:
                by_shard.setdefault(shard, []).append(read)
        self._read_ranges(local, progress)
        for other, its_reads in by_shard.items():
            other.read(its_reads)

    def close(self) -> None:
        """Let go of the files; an error's traceback may keep this object."""
        self._files = None

    def _read_ranges(
        self, reads: Sequence[tuple[SafetensorsShard, Read]], progress: ProgressCallback | None
    ) -> None:
        assert self._files is not None
        limits = config.current()
        try:
            self._files.read(
                [(self._numbers[shard], *shard.range_of(read)) for shard, read in reads],
                n_threads=limits.n_readers,
                max_pinned_nbytes=limits.max_pinned_nbytes,
                progress=progress,
            )
        except _C.FormatError as error:  # a file has become shorter; the message has its name
            paths = [shard.path for shard in self._numbers]
            raise_corrupt(error, next((path for path in paths if path in error.args[1]), ""))
