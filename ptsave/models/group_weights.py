"""One rank of a process group reads weights and sends them to all ranks.

The reading rank opens the files, and sends a description of their contents to all ranks.  Each rank
then finds out what its model needs.  If any rank needs a record, the record is sent to all, once.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave.archive.group_archive import (
    CHECKED,
    ENDED,
    PLANNED,
    GroupRecord,
    GroupRecords,
    StorageView,
    is_viewable,
)
from ptsave.archive.spans import RecycledMemory, Span, bytes_of, unfilled_tensors
from ptsave.contents.contents import Contents, LoadedContents, UnreadContents
from ptsave.contents.directories import find_files
from ptsave.errors import CorruptCheckpointError, UnsupportedSourceError
from ptsave.models.filling import Item, divided, note_changes, put_into
from ptsave.models.shards import (
    Entry,
    OpenShard,
    OpenShards,
    Read,
    Shard,
    ShardReader,
    open_shards,
)
from ptsave.models.weight_parts import Part, WeightSlice
from ptsave.support.calls import ProgressCallback
from ptsave.support.group_call import GroupCall, agree_on_file
from ptsave.support.torch_names import set_grad_enabled

_MAX_STAGED_NBYTES = 32 << 20  # most bytes of memory that is kept for reuse


class SentRecord(NamedTuple):
    """Describes one record of an archive, or one tensor of any other file, to the other ranks."""

    name: str  # the tensor's name, if the record is one tensor
    nbytes: int
    offset: int = 0
    crc: int | None = None  # None: the file has no CRC


class SentEntry(NamedTuple):
    """Describes a tensor of a file to the other ranks; the first fields are those of `Entry`."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    stored_nbytes: int
    record: int  # index in `SentShard.records`; -1 for an empty tensor of an archive
    view: StorageView  # offset, shape and strides in the record


class SentShard(NamedTuple):
    """Describes a file to the other ranks."""

    path: str
    entries: list[SentEntry]  # if an index names another file for a tensor, without it
    records: list[SentRecord]
    objects: Mapping[str, Any]
    metadata: Mapping[str, Any]


class WeightSource:
    """The open files on the reading rank; the records of all files are numbered consecutively."""

    def __init__(self, opened: OpenShards) -> None:
        by_shard: dict[Shard, list[Entry]] = defaultdict(list)
        for entry in opened.entries:
            by_shard[entry.shard].append(entry)
        self._last = opened.shards[0]
        self._local = ShardReader(each.shard for each in opened.entries)
        self.shards: list[SentShard] = []  # descriptions for the other ranks
        self._homes: list[tuple[OpenShard, int]] = []  # per record: file, number in the file
        for shard in opened.shards:
            entries, numbers, records = _sent(shard, by_shard[shard])
            objects = dict(shard.objects)
            self.shards.append(SentShard(shard.path, entries, records, objects, shard.metadata))
            self._homes += [(shard, number) for number in numbers]

    def read(self, spans: Sequence[Span]) -> None:
        """Read ranges of bytes into their targets; `Span.record` counts all files' records."""
        by_shard: dict[OpenShard, list[Span]] = defaultdict(list)
        for span in spans:
            shard, record = self._homes[span.record]
            by_shard[shard].append(Span(record, span.begin, span.target))
        for shard, some in by_shard.items():
            if shard is not self._last:
                self._last.drop()
            self._last = shard
            contents = shard.contents
            if shard.file is not None:
                entries = [shard.entries[span.record] for span in some]
                self._local.read(
                    [
                        Read(entry, span.target, span.begin // entry.dtype.itemsize)
                        for entry, span in zip(entries, some, strict=True)
                    ]
                )
            elif isinstance(contents, LoadedContents):
                for span in some:
                    _copy_bytes(contents.obj[shard.entries[span.record].name], span)
            else:
                contents.spans.read(some, verify=False)  # type: ignore[attr-defined]

    def digest(self) -> bytes:
        """Return a hash of the files' descriptions, so that hosts can compare their files."""
        found = hashlib.sha256()
        for shard in self.shards:
            found.update(repr((shard.path, shard.records, shard.entries)).encode())
        return found.digest()

    def close(self) -> None:
        self._local.close()
        self._homes = []


def _sent(
    shard: OpenShard, entries: Sequence[Entry]
) -> tuple[list[SentEntry], list[int], list[SentRecord]]:
    """Return descriptions of the entries, and numbers and descriptions of their records."""
    contents = shard.contents
    homes: Sequence[int | None]
    if isinstance(contents, UnreadContents):
        tensors = [contents.obj[entry.name] for entry in entries]
        found = contents.reader.engine.records_of(tensors)
        homes = [home if entry.nbytes else None for home, entry in zip(found, entries, strict=True)]
    else:
        tensors = unfilled_tensors([(entry.dtype, entry.shape) for entry in entries])
        numbers = {id(entry): number for number, entry in enumerate(shard.entries)}
        homes = [numbers[id(entry)] for entry in entries]
    in_file = [*dict.fromkeys(home for home in homes if home is not None)]
    sent_as = {home: number for number, home in enumerate(in_file)}
    sent = []
    for entry, home, tensor in zip(entries, homes, tensors, strict=True):
        if not is_viewable(tensor):
            raise UnsupportedSourceError(
                f"{shard.path}: tensor {entry.name} of {entry.dtype} cannot be sent to other "
                "ranks: load the file on each rank, without process_group"
            )
        record = -1 if home is None else sent_as[home]
        sizes = (entry.nbytes, entry.stored_nbytes)
        view = StorageView.of(tensor)
        sent.append(SentEntry(entry.name, entry.shape, entry.dtype, *sizes, record, view))
    records = [_record(shard, contents, number) for number in in_file]
    shard.drop()
    return sent, in_file, records


def _record(shard: OpenShard, contents: Contents, number: int) -> SentRecord:
    if not isinstance(contents, UnreadContents):
        entry = shard.entries[number]
        return SentRecord(entry.name, entry.nbytes, entry.offset, entry.crc)
    record = contents.reader.engine.record(number)
    crc = record.crc if contents.verifies else None
    return SentRecord(record.name, record.nbytes, record.payload_offset, crc)


def _copy_bytes(tensor: Tensor, span: Span) -> None:
    values = tensor.resolve_conj().resolve_neg().contiguous()
    begin = int(values.storage_offset()) * values.itemsize + span.begin
    span.target.copy_(bytes_of(values.untyped_storage())[begin : begin + len(span.target)])


class ReceivedShard(Shard):
    """A file that another rank reads; `receive` fills the targets of reads from received bytes."""

    def __init__(self, sent: SentShard, receive: Callable[[Sequence[Read]], None]) -> None:
        self.path, self.objects, self.metadata = sent.path, sent.objects, sent.metadata
        self._receive = receive

    def read(self, reads: Sequence[Read]) -> None:
        self._receive(reads)


@contextmanager
def group_weights(
    f: Any, storage_options: Mapping[str, Any] | None, group: Any
) -> Iterator[GroupWeights]:
    """Open a model's files on one rank of a group, or on one rank of each host, for all ranks.

    All ranks must enter the `with` block.  They leave it together; if one raises, all raise.
    """
    call = GroupCall(group)
    with ExitStack() as stack:
        with call.failing_together():
            agree_on_file(call, f)
        source = None
        with call.failing_together():
            if call.is_reader:
                files = find_files(f, storage_options)
                opened = open_shards(f, files, stack)
                source = stack.enter_context(closing(WeightSource(opened)))
            call.agree_on_contents(source.digest if source is not None else bytes)
        sent = call.send(None if source is None else source.shards)
        weights = GroupWeights(call, sent, source)
        with call.failing_together():
            yield weights
            weights.wait(ENDED)


class GroupWeights:
    """A model's files, whose contents all ranks receive; only reading ranks have a `source`."""

    def __init__(
        self, call: GroupCall, sent: Sequence[SentShard], source: WeightSource | None
    ) -> None:
        self.shards: list[Shard] = []
        self.entries: list[Entry] = []
        self._homes: list[tuple[SentShard, SentRecord]] = []
        # By id() of an entry: its record's number, and its offset, shape and strides there.
        self.places: dict[int, tuple[int, StorageView]] = {}
        for each in sent:
            shard = ReceivedShard(each, self._read)
            self.shards.append(shard)
            first = len(self._homes)
            for stored in each.entries:
                name, shape, dtype, nbytes, stored_nbytes, record, view = stored
                entry = Entry(name, shape, dtype, shard, nbytes, stored_nbytes)
                self.entries.append(entry)
                self.places[id(entry)] = (first + record, view)
            self._homes += [(each, record) for record in each.records]
        read = None if source is None else source.read
        self._records = GroupRecords(call, len(self._homes), self._record, read, self._damaged)
        self.wait = self._records.wait

    def agree(self) -> None:
        """Wait until all ranks have checked their models; all raise if a model does not fit."""
        self.wait(CHECKED)

    def filling(self, reader: ShardReader, progress: ProgressCallback | None) -> GroupFilling:
        """Return an object that fills a model from received records; `reader` is not used."""
        return GroupFilling(self, progress)

    def receive(
        self, wanted: Mapping[int, Sequence[_Copy]], done: Callable[[int], None] | None
    ) -> None:
        """Receive each record in `wanted`, make the copies given there, and call `done(record)`."""

        def take(record: int, begin: int, part: Tensor) -> None:
            with torch.no_grad():
                set_grad_enabled(False)  # a loader may have enabled gradients
                for copy in wanted[record]:
                    copy.take(part, begin)
            if done is not None and begin + len(part) == self._homes[record][1].nbytes:
                done(record)

        self._records.receive(set(wanted), take, verify=True)

    def _read(self, reads: Sequence[Read]) -> None:
        """Receive these tensors now; the other ranks wait, or receive tensors of their own."""
        wanted: dict[int, list[_Copy]] = defaultdict(list)
        for read in reads:
            if read.entry.nbytes:
                record, view = self.places[id(read.entry)]
                wanted[record].append(_Copy(view, read.target.view(read.entry.shape)))
        self.receive(wanted, None)

    def _record(self, number: int) -> GroupRecord:
        _, record = self._homes[number]
        return GroupRecord(record.nbytes, number, record.crc)

    def _damaged(self, number: int, crc: int) -> Exception:
        shard, record = self._homes[number]
        first = number - shard.records.index(record)
        names = [each.name for each in shard.entries if each.record + first == number]
        more = ", ..." if len(names) > 8 else ""
        return CorruptCheckpointError(
            f"{shard.path}: record {record.name} at offset {record.offset} is damaged: its CRC-32 "
            f"is {crc:08x}, not {record.crc:08x}; used by {', '.join(names[:8])}{more}. Restore "
            "the file from a copy.",
            path=shard.path,
            record=record.name,
            offset=record.offset,
            entries=names,
        )


class GroupFilling:
    """Fills a model from received records, and reports the bytes filled so far to `progress`."""

    def __init__(self, weights: GroupWeights, progress: ProgressCallback | None) -> None:
        self._weights = weights
        self._progress = progress
        self._nbytes_done = 0
        self._memory = RecycledMemory(_MAX_STAGED_NBYTES)

    def fill(self, items: Sequence[Item], *, is_all: bool) -> None:
        """Fill the items' targets in file order; with `is_all`, first wait for all other ranks."""
        direct, _ = divided(items)
        in_place = {id(item) for item in direct if item.target.shape == item.part.shape}
        wanted: dict[int, list[_Copy]] = defaultdict(list)
        sizes: dict[int, int] = defaultdict(int)
        empty: list[Item] = []
        for item in items:
            if not item.nbytes:
                empty.append(item)
                continue
            record, whole = self._weights.places[id(item.entry)]
            view = _part_of(whole, item.part)
            is_direct = id(item) in in_place
            copy = _Copy(view, item.target) if is_direct else _Delivery(view, item, self._memory)
            wanted[record].append(copy)
            sizes[record] += item.nbytes

        def done(record: int) -> None:
            self._nbytes_done += sizes[record]
            if self._progress is not None:
                self._progress(self._nbytes_done)

        if is_all:  # so that all ranks request their tensors together
            self._weights.wait(PLANNED)
        with torch.no_grad():
            for item in empty:
                put_into(item, torch.empty(item.part.shape, dtype=item.entry.dtype))
        self._weights.receive(wanted, done)
        note_changes([item.target for item in items if id(item) in in_place])


class _Copy:
    """Copies a tensor's bytes into `target`, in parts, while the tensor's record arrives."""

    def __init__(self, view: StorageView, target: Tensor) -> None:
        self.view = view
        self.target: Tensor | None = target
        last = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
        self.begin = view.offset * view.dtype.itemsize
        self.end = (view.offset + last + 1) * view.dtype.itemsize

    def take(self, part: Tensor, begin: int) -> None:
        """Copy the bytes that the target needs from `part`: the record's bytes from `begin` on."""
        if begin < self.end and self.begin < begin + len(part):
            assert self.target is not None
            self.view.copy_part(self.target, part, begin)


class _Delivery(_Copy):
    """Collects a tensor's bytes in memory, and fills the target when the tensor is complete."""

    def __init__(self, view: StorageView, item: Item, memory: RecycledMemory) -> None:
        if item.is_sliced:  # receive expanded dimensions once: they may be huge
            steps = zip(view.shape, view.stride, strict=True)
            view = replace(view, shape=tuple(1 if step == 0 else n for n, step in steps))
        super().__init__(view, item.target)
        self.target = None
        self._item, self._memory = item, memory

    def take(self, part: Tensor, begin: int) -> None:
        if self.target is None and begin < self.end:
            self.target = self._memory.tensor(torch.Size(self.view.shape), self.view.dtype)
        super().take(part, begin)
        if self.target is not None and self.end <= begin + len(part):
            item, values, self.target = self._item, self.target, None
            if not item.is_sliced:
                put_into(item, values)
                return
            in_memory = _InMemory(values.expand(item.entry.shape))
            with closing(WeightSlice(item.entry, in_memory)) as weight:
                put_into(item, weight)


@dataclass(frozen=True)
class _InMemory:
    """Serves the reads of a `WeightSlice` from a tensor in memory."""

    values: Tensor

    def read(self, reads: Sequence[Read]) -> None:
        for read in reads:
            read.target.copy_(self.values[read.index])


def _part_of(view: StorageView, part: Part) -> StorageView:
    """Return the offset, shape and strides of a part of a tensor in the tensor's record."""
    if part.index is None:
        return view
    begins = zip(part.index, view.stride, strict=True)
    offset = view.offset + sum(where.start * step for where, step in begins)
    return replace(view, offset=offset, shape=tuple(part.shape))
