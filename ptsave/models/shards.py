"""Lists the tensors in a model's files, and reads them into the tensors of the model."""

from __future__ import annotations

import base64
import io
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import (
    Range,
    bytes_of,
    new_storage,
    range_files,
    read_ranges,
    unfilled_tensors,
    view_as,
)
from ptsave.contents.contents import (
    Contents,
    FileContents,
    LoadedContents,
    UnreadContents,
    facts_of,
)
from ptsave.contents.directories import find_files
from ptsave.contents.files import (
    ShardFiles,
    name_lost_entries,
    refuse_parallel_parts,
    those_in_index,
)
from ptsave.contents.opening import OpenOptions, open_file
from ptsave.errors import CorruptCheckpointError, CorruptPickleError, not_checkpoint
from ptsave.sources.locations import n_files_to_hold, refuse_storage_options
from ptsave.sources.ranges import FileObject, LocalFile, RangeSource, expect_no_more_reads
from ptsave.state.copying import PLAIN_TYPES
from ptsave.support.calls import ProgressCallback, progress_from
from ptsave.support.torch_modules import EXTRA_STATE_KEY_SUFFIX, METADATA
from ptsave.tree.containers import items_of
from ptsave.tree.extents import blocks_of

if TYPE_CHECKING:
    from ptsave.contents.safetensors import SafetensorsContents

_N_READS_AT_A_TIME = 3  # two reading threads, and a loader that itself reads
_MIN_DIRECT_NBYTES = 256 << 10  # smaller parts of a tensor are read through the page cache
_MAX_GAP = 1 << 10  # a gap up to this many bytes is read along, not skipped
_OPTIONS = OpenOptions(for_state=True)


@dataclass(eq=False, repr=False, slots=True)
class Entry:
    """A tensor in a file; not a frozen dataclass, because making one takes twice as long."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard: Shard
    nbytes: int
    stored_nbytes: int  # the bytes in the file: of the tensor, or of its complete storage
    offset: int = 0  # where a local safetensors file has its first byte
    crc: int | None = None  # of a safetensors file's tensor


@dataclass(eq=False, repr=False, slots=True)
class Read:
    """A read of an entry's elements into `target`: at `index`, or else from number `begin` on."""

    entry: Entry
    target: Tensor  # its shape may differ from the shape of the elements
    begin: int = 0
    index: Any = None
    is_mapped: bool = False  # `target` is already mapped from the file


class Shard:
    """A file of a model."""

    path: str
    objects: Mapping[str, Any]  # extra state that is not a tensor, by key in the state dict
    metadata: Mapping[str, Any]  # the state dict's `_metadata`: versions of modules
    file: LocalFile | None = None  # set for a safetensors file, which only `ShardReader` reads

    def read(self, reads: Sequence[Read]) -> None:
        """Fill the targets of reads; if `file` is set, `ShardReader` does this itself."""
        raise NotImplementedError

    def note_copied(self, name: str) -> None:
        """Note that the values of a tensor may have reached the model."""

    def close(self) -> None:
        """Close the file, if this process has it open."""


class OpenShard(Shard):
    """A file of a model that this process reads.

    torch has to load some files completely.  If such a file has a path (`is_named`), the loaded
    object is freed once its tensors are listed, and loaded again for each read.  Without
    `stays_open`, the file is closed between reads.
    """

    def __init__(self, source: RangeSource, *, is_named: bool, stays_open: bool) -> None:
        self.path = source.name
        self._source = source
        self._droppable = source if is_named and isinstance(source, LocalFile) else None
        self._stays_open = stays_open or self._droppable is None
        self._contents: FileContents | None = None
        self._copied: list[str] = []
        self.objects = {}
        self.metadata = {}
        self.entries: list[Entry] = []

    def list_tensors(self) -> None:
        """Open the file, and set `entries` to the list of its tensors."""
        source = self._source
        if isinstance(source, LocalFile):
            expect_no_more_reads(source.descriptor)  # pages in the cache slow down direct reads
            if source.kind != "safetensors":
                os.posix_fadvise(source.descriptor, 0, 0, os.POSIX_FADV_NORMAL)
        contents = self.contents
        if contents.kind == "safetensors":
            header = cast("SafetensorsContents", contents).header
            if header.metadata:
                self.objects = ExtraState(header.metadata, self.path)
            self.file = source if isinstance(source, LocalFile) else None
            first = 0 if self.file is None else self.file.begin
            self.entries = [
                Entry(name, shape, dtype, self, nbytes, nbytes, first + offset, crc)
                for name, shape, dtype, offset, nbytes, crc in header.tensors
            ]
        else:
            tensors = contents.obj
            facts = facts_of([*tensors.values()])
            self.entries = [
                Entry(name, shape, dtype, self, nbytes, stored_nbytes)
                for name, (dtype, shape, _, _, nbytes, stored_nbytes) in zip(
                    tensors, facts, strict=True
                )
            ]
        if not self._stays_open:
            contents.park()
        self.drop()

    @property
    def contents(self) -> FileContents:
        """The open file, whose `obj` is a dict of tensors; after `drop`, it is opened again."""
        if self._contents is None:
            self._open()
            assert self._contents is not None
        return self._contents

    def _open(self) -> None:
        try:
            contents = self._contents = open_file(self._source, _OPTIONS)
        except (CorruptCheckpointError, OSError, MemoryError, Warning):
            raise
        except UnpicklingError as error:
            raise _more_than_tensors(error, self.path) from error
        except Exception as error:  # torch's unpickler may raise anything
            raise CorruptPickleError(f"{self.path}: {error}", path=self.path) from error
        if contents.kind != "safetensors":
            self._take_tensors(contents)
        if isinstance(contents, UnreadContents):
            contents.spans.max_gap = _MAX_GAP
            verifies(contents)  # may warn, so call it before the model changes

    def _take_tensors(self, contents: Contents) -> None:
        """Leave only tensors in `contents.obj`; move extra state and metadata to this object."""
        obj = _state_dict_in(contents)
        others = [(key, each) for key, each in items_of(obj) if type(each) not in PLAIN_TYPES]
        extra: dict[Any, Any] = {}
        if others:
            extra = {key: value for key, value in others if is_extra_state(key, value)}
        if extra and not self.objects:
            from ptsave.tree.leaves import read_entry

            self.objects = read_entry(
                extra, lambda tensors: contents.read(tensors, verifies(contents)), self.path
            )
        self.metadata = getattr(obj, METADATA, None) or {}
        tensors = {key: value for key, value in items_of(obj) if key not in extra}
        _require_tensors(tensors, self.path)
        contents.obj = {name: _detached(tensor) for name, tensor in tensors.items()}

    def read(self, reads: Sequence[Read]) -> None:
        reads = [read for read in reads if read.target.numel()]
        if not reads:
            return  # the file may be closed already
        contents = self.contents
        obj = contents.obj
        self._copied += [read.entry.name for read in reads]
        verify = verifies(contents)
        whole = [(read.target, obj[read.entry.name]) for read in reads if read.index is None]
        contents.read_into(whole, verify)
        with torch.no_grad():
            for read in reads:
                if read.index is not None:  # parts have no checksums
                    part = contents.read_slice(obj[read.entry.name], read.index, verify and None)
                    read.target.copy_(part.reshape(read.target.shape))
        if not self._stays_open:
            self.drop()

    def note_copied(self, name: str) -> None:
        self._copied.append(name)

    def drop(self) -> None:
        """Free the object that torch has loaded completely, if it can be loaded again."""
        if self._droppable is not None and isinstance(self._contents, LoadedContents):
            self._contents = None
            if not (self._stays_open or self._droppable.is_parked):
                self._droppable.park()

    def map_cached(self, entry: Entry, begin: int, shape: torch.Size) -> Tensor | None:
        """Map elements from number `begin` on; return None if the page cache lacks some of them."""
        itemsize = entry.dtype.itemsize
        offset = entry.offset + begin * itemsize
        if self.file is None or offset % itemsize:
            return None
        memory = self.file.map_cached(offset - self.file.begin, shape.numel() * itemsize)
        return None if memory is None else memory.view(entry.dtype).view(shape)

    def close(self) -> None:
        if isinstance(self._contents, UnreadContents):
            self._contents.close()
        self._contents = None
        self._source.close()
        if isinstance(self._source, FileObject):
            self._source.rewind()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and (names := self._overwritten()):
            from ptsave.training.restoring import note_overwritten

            note_overwritten(error, names, self.path)
        self.close()

    def _overwritten(self) -> list[str]:
        """Return the names of tensors whose values may have reached the model, at least in part."""
        contents = self._contents
        if not isinstance(contents, UnreadContents):
            return [*dict.fromkeys(self._copied)]
        from ptsave.archive.damage import entries_using

        engine = contents.reader.engine
        records = {engine.record(number).name for number in engine.changed()}
        return (entries_using(contents.reader, records) or sorted(records)) if records else []


def verifies(contents: Contents) -> bool | None:
    """Return whether reads of a file compare its checksums; None if its format has none."""
    if not isinstance(contents, UnreadContents):
        return None
    return contents.verifies


def _state_dict_in(contents: Contents) -> Mapping[Any, Any]:
    obj, path = contents.obj, contents.path
    if isinstance(obj, torch.nn.Module):
        raise TypeError(
            f"{path} holds a module that was saved whole ({type(obj).__name__}), not a "
            "dict of tensors: load the module with ptsave.load(), and use its state_dict()"
        )
    if not isinstance(obj, Mapping):
        raise TypeError(f"{path} holds {type(obj).__name__}, not a dict of tensors")
    return obj


def _require_tensors(obj: Mapping[Any, Any], path: str) -> None:
    for name, tensor in obj.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"{path}: entry {name!r} is {type(tensor).__name__}, not a tensor: load a "
                f"checkpoint that has more than weights with {_loader_of(obj)}"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{path}: entry {name!r} is not a dense tensor")


def _detached(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) is Tensor and not tensor.requires_grad
    return tensor if is_plain else tensor.detach()


def _more_than_tensors(error: UnpicklingError, path: str) -> CorruptCheckpointError:
    """Return the error for a pickle that torch refuses: it needs code to load, or is damaged."""
    refused = re.search(r"GLOBAL (\S+) was not an allowed global by default", str(error))
    if refused is None:
        return CorruptPickleError(f"{path}: {error}", path=path)
    return not_checkpoint(
        f"{path} holds more than tensors: it needs {refused[1]}. If this is a module "
        "that was saved whole, and you trust the file, load the module with "
        "ptsave.load(path, weights_only=False), and use its state_dict()\n"
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


class OpenShards(NamedTuple):
    """The open files of a model, and all of their tensors in the order of the files."""

    shards: list[OpenShard]
    entries: list[Entry]


class ModelSource:
    """An object that `load_model` and `iter_weights` accept in place of a path."""

    def _open(self, stack: ExitStack) -> tuple[Sequence[Shard], list[Entry]]:
        """Open the files, and return them with their tensors; `stack` will close them."""
        raise NotImplementedError


def open_model(
    f: Any, storage_options: Mapping[str, Any] | None, stack: ExitStack
) -> tuple[Sequence[Shard], list[Entry]]:
    """Open the files of the model at the path or file object `f`, or those of a `ModelSource`."""
    if isinstance(f, ModelSource):
        refuse_storage_options(storage_options)
        return f._open(stack)
    return open_shards(f, find_files(f, storage_options), stack)


def open_shards(f: Any, files: ShardFiles, stack: ExitStack) -> OpenShards:
    """Open `files`, which were found at the path or file object `f`; `stack` will close them.

    If there is an index, each tensor is taken only from the file that the index names. Files that
    hold one model's parts for several ranks raise ValueError.
    """
    is_named = isinstance(f, (str, os.PathLike))
    stay_open = len(files.paths) <= n_files_to_hold()
    shards: list[OpenShard] = []
    for path in files.paths:
        shard = OpenShard(files.open_one(path), is_named=is_named, stays_open=stay_open)
        stack.push(shard.__exit__)
        try:
            shard.list_tensors()
        except CorruptCheckpointError as error:
            name_lost_entries(error, path, files)
            raise
        shards.append(shard)
    entries = [entry for shard in shards for entry in shard.entries]
    found = [(entry.name, entry.shard.path, entry) for entry in entries]
    refuse_parallel_parts(((name, path) for name, path, _ in found), files)
    return OpenShards(shards, those_in_index(found, files))


class ShardReader:
    """Reads tensors of open shards; all local safetensors files are read at the same time.

    The first 32 MiB of these files together go through the page cache, because other ranks may read
    the same bytes. If there are very many files, only some are open at a time. Several threads may
    call `read`, but only one at a time reads files of other kinds.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        files = {shard: shard.file for shard in shards if shard.file is not None}
        self._numbers = {shard: number for number, shard in enumerate(files)}
        self._lock = threading.Lock()
        self._local = list(files.values())
        self._n_at_a_time = max(1, n_files_to_hold() // _N_READS_AT_A_TIME)
        self._files: _C.RangeFiles | None = None
        self._is_closed = False
        if not any(file.is_parked for file in self._local):
            self._n_at_a_time = max(1, len(self._local))
            self._files = range_files(self._local)

    def read(self, reads: Sequence[Read], progress: ProgressCallback | None = None) -> None:
        """Fill the targets of all reads; an error may leave some targets filled, and others not."""
        whole: list[Range] = []
        checked: dict[tuple[int, int], Entry] = {}
        parts: list[tuple[LocalFile, Read]] = []
        by_shard: dict[Shard, list[Read]] = {}
        for read in reads:
            shard = read.entry.shard
            if read.is_mapped:
                _compare_mapped(read)
                continue
            if shard.file is None:
                by_shard.setdefault(shard, []).append(read)
            elif read.index is not None:
                parts.append((shard.file, read))
            else:
                entry, number = read.entry, self._numbers[shard]
                offset = entry.offset + (read.begin and read.begin * entry.dtype.itemsize)
                whole.append((number, offset, read.target))
                if entry.crc is not None:
                    shard.note_copied(entry.name)
                    if read.target.nbytes == entry.nbytes:
                        checked[number, offset] = entry
        self._read_ranges(whole, progress, checked)
        self._read_indexed(parts)
        with self._lock:
            for other, its_reads in by_shard.items():
                other.read(its_reads)

    def _read_indexed(self, reads: Sequence[tuple[LocalFile, Read]]) -> None:
        for file, read in reads:
            ranges, values = _ranges_of(read)
            if len(ranges) > 1 and ranges[0][1].nbytes < _MIN_DIRECT_NBYTES:
                # For each range, a direct read would read complete blocks of the file system.
                files = range_files([file], direct=False)
                read_ranges(files, [(0, *each) for each in ranges], max_gap=_MAX_GAP)
            else:
                number = self._numbers[read.entry.shard]
                self._read_ranges([(number, *each) for each in ranges], None, {})
            with torch.no_grad():
                read.target.copy_(values.reshape(read.target.shape))

    def close(self) -> None:
        """Close the files now: an error's traceback may keep this object alive for long."""
        self._files = None
        self._is_closed = True

    def _read_ranges(
        self,
        ranges: list[Range],
        progress: ProgressCallback | None,
        checked: Mapping[tuple[int, int], Entry],
    ) -> None:
        """Read ranges; compare those of `checked`, by file and offset, with their checksums."""
        assert not self._is_closed
        groups: dict[int, list[Range]] = {0: ranges}
        if len(self._local) > self._n_at_a_time:
            groups = {}
            for file, offset, target in ranges:
                group, number = divmod(file, self._n_at_a_time)
                groups.setdefault(group, []).append((number, offset, target))
        done = 0
        for group, numbered in sorted(groups.items()):
            begin = group * self._n_at_a_time
            files = self._files
            if files is None:
                files = range_files(self._local[begin : begin + self._n_at_a_time])
            for some in _rounds(numbered):
                entries = [checked.get((begin + file, offset)) for file, offset, _ in some]
                crcs = [
                    None if entry is None or target.nbytes != entry.nbytes else entry.crc
                    for entry, (*_, target) in zip(entries, some, strict=True)
                ]
                found = read_ranges(
                    files, some, progress_from(progress, done), crcs=crcs if checked else ()
                )
                if found:
                    raise _damaged([checked[begin + file, offset] for file, offset in found])
                if progress is not None:
                    done += sum(target.nbytes for *_, target in some)


def _compare_mapped(read: Read) -> None:
    entry = read.entry
    if entry.crc is None or read.target.nbytes != entry.nbytes:
        return
    from ptsave.archive.spans import crc_of

    if crc_of(read.target) != entry.crc:
        raise _damaged([entry])


def _damaged(entries: Sequence[Entry]) -> CorruptCheckpointError:
    """Return the error for the damaged tensors of the first entry's file."""
    from ptsave.contents.safetensors import damaged_tensors

    shard = entries[0].shard
    names = [each.name for each in entries if each.shard is shard]
    return damaged_tensors(shard.path, names, entries[0].offset)


def _ranges_of(read: Read) -> tuple[list[tuple[int, Tensor]], Tensor]:
    """Return file ranges for `read.index`, each with memory, and a view of the values there."""
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


def _rounds(ranges: Sequence[Range]) -> Sequence[Sequence[Range]]:
    """Divide file ranges into groups without overlaps, which are read one after another."""
    rounds: list[list[Range]] = []
    ends: list[tuple[int, int]] = []
    if _are_in_order(ranges):
        return [ranges]
    in_order = sorted(ranges, key=itemgetter(0, 1))
    if _are_in_order(in_order):
        return [in_order]
    for file, offset, target in in_order:
        number = next((i for i, end in enumerate(ends) if end <= (file, offset)), len(ends))
        if number == len(ends):
            rounds.append([])
            ends.append((file, offset))
        rounds[number].append((file, offset, target))
        ends[number] = (file, offset + target.nbytes)
    return rounds


def _are_in_order(ranges: Sequence[Range]) -> bool:
    """Return whether the ranges are in file order and do not overlap."""
    last_file, last_end = -1, 0
    for file, offset, target in ranges:
        if file < last_file or (file == last_file and offset < last_end):
            return False
        last_file, last_end = file, offset + target.nbytes
    return True


# ------------------------------------------------------------------------------------ extra state

# In safetensors metadata, keys of extra state that is not a tensor begin like this.
_EXTRA_STATE = "ptsave.extra_state."


def is_extra_state(key: Any, value: Any) -> bool:
    """Return whether a state dict's value is the extra state of a module, and is not a tensor."""
    is_named_so = isinstance(key, str) and f".{key}".endswith(f".{EXTRA_STATE_KEY_SUFFIX}")
    return is_named_so and not isinstance(value, Tensor)


def metadata_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return extra state as safetensors metadata: each value is saved, and encoded in base 64.

    >>> metadata = metadata_of({"layer._extra_state": {"count": 3}})
    >>> dict(ExtraState(metadata, "model.safetensors"))
    {'layer._extra_state': {'count': 3}}
    """
    saved = {name: base64.b64encode(_saved(value)) for name, value in objects.items()}
    return {_EXTRA_STATE + name: text.decode() for name, text in saved.items()}


def metadata_names(objects: Iterable[str]) -> set[str]:
    """Return the metadata keys of extra state with these names."""
    return {_EXTRA_STATE + name for name in objects}


def require_loadable(objects: Mapping[str, Any]) -> None:
    """Raise TypeError for extra state that could not be loaded again after the save."""
    for name, value in objects.items():
        try:
            _loaded(_saved(value))
        except Exception as error:  # torch's unpickler may raise anything
            reason = str(error).strip().splitlines()[0]
            raise TypeError(
                f"entry {name!r} could not be loaded from a model's files, which are read without "
                f"running code ({reason}): let get_extra_state() return tensors and plain values"
            ) from error


def _saved(value: Any) -> bytes:
    from ptsave.serialization import save

    stream = io.BytesIO()
    save(value, stream)
    return stream.getvalue()


def _loaded(data: bytes) -> Any:
    from ptsave.archive.loading import LoadOptions
    from ptsave.contents.loading import load_source

    options = LoadOptions("cpu", weights_only=True, wants_state=True)
    return load_source(io.BytesIO(data), options)


class ExtraState(Mapping[str, Any]):
    """The extra state in a safetensors file's metadata; a value is loaded when it is asked for."""

    def __init__(self, metadata: Mapping[str, str], path: str) -> None:
        self._path = path
        self._texts = {
            name.removeprefix(_EXTRA_STATE): text
            for name, text in metadata.items()
            if name.startswith(_EXTRA_STATE)
        }

    def __getitem__(self, name: str) -> Any:
        text = self._texts[name]
        try:
            return _loaded(base64.b64decode(text, validate=True))
        except Exception as error:  # torch's unpickler may raise anything
            message = f"{self._path}: {name}: {error}"
            raise CorruptPickleError(message, path=self._path) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)
