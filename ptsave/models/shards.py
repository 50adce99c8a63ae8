"""Lists the tensors in the files of a model, and reads them into place."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_devices
from ptsave.archive.reader import RecordReader
from ptsave.archive.views import bytes_of, new_storage, unfilled_tensors, view_as
from ptsave.contents.shard_files import (
    ShardFiles,
    name_lost_entries,
    refuse_parallel_parts,
    refuse_what_came_instead,
    those_in_index,
)
from ptsave.contents.tensor_info import facts_of
from ptsave.errors import CorruptCheckpointError, CorruptPickleError, not_checkpoint
from ptsave.models.extra_state import ExtraState, is_extra_state
from ptsave.sources.local import describe, identity_of, n_files_to_hold, require_identity
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import FileObject, LocalFile, RangeSource, expect_no_more_reads
from ptsave.state.copying import PLAIN_TYPES, Copier
from ptsave.support import config
from ptsave.support.calls import ProgressCallback
from ptsave.support.torch_modules import METADATA
from ptsave.training.restoring import FileCopier, restoring
from ptsave.tree.containers import items_of
from ptsave.tree.extents import blocks_of

if TYPE_CHECKING:
    from ptsave.contents.safetensors import SafetensorsContents

_Range: TypeAlias = "tuple[int, int, Tensor]"  # file, offset in it, target

_N_READS_AT_A_TIME = 3  # reads that open files: two threads read ahead, and a loader reads
_MAX_FETCHED_NBYTES = 64 << 20  # of tensors that are fetched together, then copied
_MIN_DIRECT_NBYTES = 256 << 10  # smaller blocks of an index go through the page cache
_MAX_GAP = 1 << 10  # bytes between blocks of an index that are read rather than skipped


@dataclass(eq=False, repr=False, slots=True)
class Entry:
    """A tensor of a file.

    Treat as immutable. Not `frozen`, because creating frozen instances takes twice as long and
    there may be 100,000.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard: Shard
    nbytes: int
    stored_nbytes: int  # in the file: the tensor's, or those of the storage that it views
    offset: int = 0  # of its first byte in a safetensors file


@dataclass(eq=False, repr=False, slots=True)
class Read:
    """The elements of an entry, from `begin` on or selected by `index`, that fill a tensor.

    The target has any shape with as many elements. With `is_mapped` it is the file's own memory,
    and nothing is read.
    """

    entry: Entry
    target: Tensor
    begin: int = 0
    index: Any = None
    is_mapped: bool = False


class SafetensorsShard:
    """A local safetensors file, which is open and may be parked later.

    `objects` holds the extra state of modules that is no tensor, by its name in the state dict.
    `metadata`, the versions of modules, is empty: the format has none.
    """

    def __init__(self, file: LocalFile) -> None:
        from ptsave.contents.safetensors_header import read_header

        self.path = file.name
        self.file = file
        self.close = file.close
        header = read_header(file)
        tensors = header.tensors
        self.objects = ExtraState(header.metadata, self.path)
        self.metadata: Mapping[str, Any] = {}
        self.entries = [
            Entry(name, shape, dtype, self, nbytes, nbytes, file.begin + offset)
            for name, shape, dtype, offset, nbytes in tensors
        ]

    def ranges_of(self, read: Read) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """Return the blocks that a read with an index needs, and their view for the target."""
        entry, target = read.entry, read.target
        (whole,) = unfilled_tensors([(entry.dtype, entry.shape)])
        view = whole[read.index]
        blocks = blocks_of(view, _MAX_GAP)
        storage = new_storage(blocks.nbytes * len(blocks.begins), target.device)
        memory = bytes_of(storage)
        ranges = [
            (entry.offset + begin, memory[i * blocks.nbytes : (i + 1) * blocks.nbytes])
            for i, begin in enumerate(blocks.begins)
        ]
        return ranges, view_as(storage, view, 0, blocks.stride)

    def map_cached(self, entry: Entry, begin: int, shape: torch.Size) -> Tensor | None:
        """Map an entry's elements from `begin` on if the page cache holds them, or return None."""
        itemsize = entry.dtype.itemsize
        offset = entry.offset + begin * itemsize
        if offset % itemsize:
            return None
        memory = self.file.map_cached(offset - self.file.begin, shape.numel() * itemsize)
        return None if memory is None else memory.view(entry.dtype).view(shape)

    def detach(self, storage: torch.UntypedStorage) -> None:
        """Copy a mapped tensor to memory at the same address, because a loader keeps it."""
        _C.detach_from_file(storage, os.fsencode(self.path))


class FetchedShard:
    """A safetensors file that is remote, or whose bytes are in memory or in a file object.

    `spans` reads parts of its tensors, by their numbers in the file.
    """

    def __init__(self, source: RangeSource) -> None:
        from ptsave.contents.safetensors import SafetensorsContents

        self.path = source.name
        contents = SafetensorsContents(source)
        self._contents: SafetensorsContents | None = contents
        self.spans = contents.spans
        self.objects = ExtraState(contents.metadata, self.path)
        self.metadata: Mapping[str, Any] = {}
        self.entries = [
            Entry(name, tensor.shape, tensor.dtype, self, tensor.nbytes, tensor.nbytes)
            for name, tensor in contents.obj.items()
        ]

    def read(self, reads: Iterable[Read]) -> None:
        """Fetch tensors, some of them at a time, and copy them into their targets."""
        for batch in _batches(reads):
            assert self._contents is not None
            obj = self._contents.obj
            wanted = [obj[read.entry.name] for read in batch if read.index is None]
            whole = iter(self._contents.read(wanted, None))
            values = [
                next(whole)
                if read.index is None
                else self._contents.read_slice(obj[read.entry.name], read.index, None)
                for read in batch
            ]
            devices = [
                read.target.device if _C.convert_alike(v.dtype, read.target.dtype) else v.device
                for read, v in zip(batch, values, strict=True)
            ]
            with torch.no_grad():
                for read, value in zip(batch, to_devices(values, devices), strict=True):
                    read.target.copy_(value.reshape(read.target.shape))

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

    A local file whose tensors cannot be left unread (from an old version of torch) is loaded to
    list its tensors, and loaded again when they are read. Without `stays_open`, a local file is
    opened again for each read. `objects` and `metadata` are those of `SafetensorsShard`; `metadata`
    has the state dict's versions of modules.
    """

    def __init__(
        self,
        f: Any,
        storage_options: Mapping[str, Any] | None = None,
        *,
        stays_open: bool = True,
    ) -> None:
        self.path = describe(f)
        self._f = f
        self._storage_options = storage_options
        self._open_file = ExitStack()
        self._copier: Copier | None = None
        self._tensors: dict[str, Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.metadata: Mapping[str, Any] = {}
        self._open()
        facts = facts_of(list(self._tensors.values()))
        self.entries = [
            Entry(name, shape, dtype, self, nbytes, stored_nbytes)
            for name, (dtype, shape, _, _, nbytes, stored_nbytes) in zip(
                self._tensors, facts, strict=True
            )
        ]
        is_local = isinstance(f, (str, os.PathLike)) and not is_url(f)
        self._stays_open = stays_open or not is_local
        self._identity = identity_of(f) if is_local else None
        self.park()

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
            except Exception as error:  # torch's unpickler may raise anything
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
        extra = {
            key: value
            for key, value in items_of(obj)
            if type(value) not in PLAIN_TYPES and is_extra_state(key, value)
        }
        if extra and not self.objects:
            assert self._copier is not None
            self._copier.show(extra)
            self.objects = extra
        self.metadata = getattr(obj, METADATA, None) or {}
        obj = {key: value for key, value in items_of(obj) if key not in extra}
        for name, tensor in items_of(obj):
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.path}: entry {name!r} is {type(tensor).__name__}, not a tensor: a "
                    f"checkpoint with more in it than weights is for {_loader_of(obj)}"
                )
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise TypeError(f"{self.path}: entry {name!r} is not a dense tensor")
        return {name: _detached(tensor) for name, tensor in items_of(obj)}

    def read(self, reads: Iterable[Read]) -> None:
        self._reopen()
        assert self._copier is not None
        whole: list[tuple[Tensor, Tensor]] = []
        for read in reads:
            source = self._source_of(read)
            if read.index is not None and isinstance(self._copier, FileCopier):
                with torch.no_grad():
                    read.target.copy_(self._copier.read_view(source, _MAX_GAP))
            else:
                whole.append((read.target, source))
        self._copier.copy(whole)
        self._copier.show({})  # makes the copies
        if not self._stays_open:
            self.close()

    def archive(self) -> RecordReader | None:
        """Return the archive that holds the tensors, opened again; None if they are in memory."""
        self._reopen()
        return self._copier.reader if isinstance(self._copier, FileCopier) else None

    def tensor(self, entry: Entry) -> Tensor:
        """Return a tensor, whose values are still in the archive if there is one."""
        self._reopen()
        return self._tensors[entry.name]

    def park(self) -> None:
        """Close the file until it is used, unless it is to stay open."""
        is_unread = isinstance(self._copier, FileCopier)
        if self._identity is not None and not (self._stays_open and is_unread):
            self.close()

    def _reopen(self) -> None:
        if self._copier is None:
            if self._identity is not None:
                require_identity(identity_of(self._f), self._identity, self.path)
            self._open()

    def _source_of(self, read: Read) -> Tensor:
        tensor = self._tensors[read.entry.name]
        source = tensor if read.index is None else tensor[read.index]
        return source if source.shape == read.target.shape else source.view(read.target.shape)

    def close(self) -> None:
        """Let go of the file, reading nothing more."""
        self.__exit__(None, None, None)

    def __exit__(self, *exception: Any) -> None:
        self._tensors = {}  # or the end of the block would read their storages
        self._copier = None
        self._open_file.__exit__(*exception)
        self._open_file = ExitStack()


def _detached(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) is Tensor and not tensor.requires_grad
    return tensor if is_plain else tensor.detach()


def _more_than_tensors(error: UnpicklingError, path: str) -> CorruptCheckpointError:
    """Return the error for a pickle that torch has refused, because of a global or damage."""
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
    from ptsave.state.nested_state import parts_with_tensors

    parts = [part for part in parts_with_tensors(obj) if part.isidentifier()]
    if not parts:
        return "ptsave.load_checkpoint()"
    return f"ptsave.load_checkpoint(path, {parts[0]}=model)"


# Files that this process reads.
OpenShard = SafetensorsShard | FetchedShard | PickledShard


class ReceivedShard:
    """A file that another rank of a process group reads; `receive` fills the targets of reads."""

    def __init__(
        self,
        path: str,
        objects: Mapping[str, Any],
        metadata: Mapping[str, Any],
        receive: Callable[[Sequence[Read]], None],
    ) -> None:
        self.path = path
        self.objects = objects
        self.metadata = metadata
        self.read = receive

    def close(self) -> None:
        """Do nothing: the file is not open here."""


Shard = OpenShard | ReceivedShard


class OpenShards(NamedTuple):
    """The open files of a model, and all of their tensors in the order of the files."""

    shards: list[OpenShard]
    entries: list[Entry]


def open_shards(f: Any, files: ShardFiles, stack: ExitStack) -> OpenShards:
    """Open the `files` that were found for the source `f`; `stack` closes them.

    If there is an index, a tensor counts only in the file that the index names. Parts for ranks of
    a job, which all have the same names, raise ValueError.
    """
    is_named = isinstance(f, (str, os.PathLike))
    stay_open = len(files.paths) <= n_files_to_hold()
    shards: list[OpenShard] = []
    for path in files.paths:
        source = files.open_one(path)
        try:
            own_source = source.name if is_named else f
            shard = _open_shard(source, own_source, files.storage_options, stay_open=stay_open)
        except BaseException as error:
            source.close()
            if isinstance(error, CorruptCheckpointError):
                name_lost_entries(error, source.name, files)
            raise
        if isinstance(shard, PickledShard):
            stack.push(shard.__exit__)
        else:
            stack.callback(shard.close)
        shards.append(shard)
    entries = [entry for shard in shards for entry in shard.entries]
    found = [(entry.name, entry.shard.path, entry) for entry in entries]
    refuse_parallel_parts(((name, path) for name, path, _ in found), files)
    return OpenShards(shards, those_in_index(found, files))


def _open_shard(
    source: RangeSource, f: Any, storage_options: Mapping[str, Any], *, stay_open: bool
) -> OpenShard:
    if isinstance(source, LocalFile):  # readahead would cache pages, which hinder direct reads
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
        return PickledShard(f, storage_options, stays_open=stay_open)
    if not isinstance(source, LocalFile):
        return FetchedShard(source)
    shard = SafetensorsShard(source)
    if not stay_open:
        source.park()
    return shard


class ShardReader:
    """Reads tensors of open shards, from all local safetensors files at the same time.

    Those files count as one load: only its first 32 MiB go through the page cache, in case other
    ranks read them, too. Large sets open only some files at a time. Safe for concurrent use; shards
    of other kinds are read by one thread at a time.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        local = (shard for shard in shards if isinstance(shard, SafetensorsShard))
        self._numbers = {shard: number for number, shard in enumerate(dict.fromkeys(local))}
        self._lock = threading.Lock()
        self._shards = list(self._numbers)
        self._n_at_a_time = max(1, n_files_to_hold() // _N_READS_AT_A_TIME)
        self._files: _C.RangeFiles | None = None
        self._is_closed = False
        if not any(shard.file.is_parked for shard in self._shards):
            self._n_at_a_time = max(1, len(self._shards))
            self._files = _files_of(self._shards, direct=config.current().direct_reads)

    def read(self, reads: Sequence[Read], progress: ProgressCallback | None = None) -> None:
        """Fill the targets of all reads; after an error, some may have been changed."""
        whole: list[_Range] = []
        parts: list[tuple[SafetensorsShard, Read]] = []
        by_shard: dict[FetchedShard | PickledShard | ReceivedShard, list[Read]] = {}
        for read in reads:
            shard = read.entry.shard
            if read.is_mapped:
                continue
            if not isinstance(shard, SafetensorsShard):
                by_shard.setdefault(shard, []).append(read)
            elif read.index is not None:
                parts.append((shard, read))
            else:
                entry = read.entry
                offset = entry.offset + (read.begin and read.begin * entry.dtype.itemsize)
                whole.append((self._numbers[shard], offset, read.target))
        self._read_ranges(whole, progress)
        self._read_indexed(parts)
        with self._lock:
            for other, its_reads in by_shard.items():
                other.read(its_reads)

    def _read_indexed(self, reads: Sequence[tuple[SafetensorsShard, Read]]) -> None:
        for shard, read in reads:
            ranges, values = shard.ranges_of(read)
            if len(ranges) > 1 and ranges[0][1].nbytes < _MIN_DIRECT_NBYTES:
                # A direct read would get whole blocks of the file system for each range.
                files = _files_of([shard], direct=False)
                _read(files, [(0, *each) for each in ranges], max_gap=_MAX_GAP)
            else:
                self._read_ranges([(self._numbers[shard], *each) for each in ranges], None)
            with torch.no_grad():
                read.target.copy_(values.reshape(read.target.shape))

    def close(self) -> None:
        """Let go of the files, because an error's traceback may keep this object."""
        self._files = None
        self._is_closed = True

    def _read_ranges(
        self,
        ranges: list[_Range],
        progress: ProgressCallback | None,
    ) -> None:
        assert not self._is_closed
        groups: dict[int, list[_Range]] = {}
        if len(self._shards) <= self._n_at_a_time:
            groups[0] = ranges
        else:
            for file, offset, target in ranges:
                group, number = divmod(file, self._n_at_a_time)
                groups.setdefault(group, []).append((number, offset, target))
        done = 0
        for group, numbered in sorted(groups.items()):
            begin = group * self._n_at_a_time
            shards = self._shards[begin : begin + self._n_at_a_time]
            files = self._files
            if files is None:
                files = _files_of(shards, direct=config.current().direct_reads)
            for some in _rounds(numbered):
                _read(files, some, _shifted(progress, done))
                if progress is not None:
                    done += sum(target.nbytes for *_, target in some)


def _shifted(progress: ProgressCallback | None, done: int) -> ProgressCallback | None:
    return None if progress is None else lambda nbytes: progress(done + nbytes)


def _files_of(shards: Sequence[SafetensorsShard], *, direct: bool) -> _C.RangeFiles:
    with ExitStack() as stack:
        files = [stack.enter_context(shard.file.opened()).for_engine for shard in shards]
        return _C.RangeFiles(files, n_threads=config.current().n_readers, direct=direct)


def _read(
    files: _C.RangeFiles,
    ranges: Sequence[_Range],
    progress: ProgressCallback | None = None,
    **options: int,
) -> None:
    limits = config.current()
    files.read(
        ranges,
        n_threads=limits.n_readers,
        max_pinned_nbytes=limits.max_pinned_nbytes,
        progress=progress,
        **options,
    )


def _rounds(
    ranges: Sequence[_Range],
) -> Sequence[Sequence[_Range]]:
    """Divide ranges of files into rounds without overlaps; mostly one round has all."""
    rounds: list[list[_Range]] = []
    ends: list[tuple[int, int]] = []
    if _are_in_order(ranges):
        return [ranges]
    in_order = sorted(ranges, key=itemgetter(0, 1))
    if _are_in_order(in_order):
        return [in_order]
    for each in in_order:
        file, offset, target = each
        number = next((i for i, end in enumerate(ends) if end <= (file, offset)), len(ends))
        if number == len(ends):
            rounds.append([])
            ends.append((file, offset))
        rounds[number].append(each)
        ends[number] = (file, offset + target.nbytes)
    return rounds


def _are_in_order(ranges: Sequence[_Range]) -> bool:
    """Return whether each range begins behind the end of the one before it."""
    last_file, last_end = -1, 0
    for file, offset, target in ranges:
        if file < last_file or (file == last_file and offset < last_end):
            return False
        last_file, last_end = file, offset + target.nbytes
    return True
