"""The files of a model on the rank that reads them for its group.

In a safetensors file each tensor is a record. An archive has records of its own. In any other file
each tensor, which is in memory, is a record.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave.archive.filling import verifies_storages
from ptsave.archive.part_copies import StorageView, is_viewable
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import Span, spans_of
from ptsave.archive.views import bytes_of, unfilled_tensors
from ptsave.errors import UnsupportedSourceError
from ptsave.models.shards import (
    Entry,
    FetchedShard,
    OpenShards,
    PickledShard,
    Read,
    SafetensorsShard,
    ShardReader,
)


class SentRecord(NamedTuple):
    """A record, as the other ranks know it.

    `name` is the record's name, or the name of the tensor that makes up the record. `crc` is None
    if there is nothing to verify.
    """

    name: str
    nbytes: int
    offset: int = 0
    crc: int | None = None


class SentEntry(NamedTuple):
    """A tensor of a file, as the other ranks know it; other fields as in `Entry`.

    `record` is the number of its record in the file, or -1 for an empty tensor of an archive.
    `view` is its place in the record.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    stored_nbytes: int
    record: int
    view: StorageView


class SentShard(NamedTuple):
    """A file, as the other ranks know it.

    `entries` lacks tensors that an index places in another file.
    """

    path: str
    entries: list[SentEntry]
    records: list[SentRecord]
    objects: Mapping[str, Any]
    metadata: Mapping[str, Any]


# Fills spans of the records of one shard.
_ReadSpans = Callable[[Sequence[Span]], None]


class WeightSource:
    """Open files, whose records are numbered through all files.

    `shards` describes the files for the other ranks.
    """

    def __init__(self, opened: OpenShards) -> None:
        by_shard: dict[int, list[Entry]] = defaultdict(list)
        for entry in opened.entries:
            by_shard[id(entry.shard)].append(entry)
        self._opened = opened
        self._last = 0  # number of the shard read last
        self._local = ShardReader(each.shard for each in opened.entries)
        self.shards: list[SentShard] = []
        self._reads: list[_ReadSpans] = []
        self._homes: list[tuple[int, int]] = []  # numbers of the shard and of the record in it
        for number, shard in enumerate(opened.shards):
            entries = by_shard[id(shard)]
            if isinstance(shard, PickledShard):
                sent, records, read = _of_pickled(shard, entries)
            else:
                sent, records, read = self._of_safetensors(shard, entries)
            self.shards.append(
                SentShard(shard.path, sent, records, dict(shard.objects), shard.metadata)
            )
            self._reads.append(read)
            self._homes += [(number, record) for record in range(len(records))]

    def read(self, spans: Sequence[Span]) -> None:
        """Fill spans, whose records are numbered through all files."""
        by_shard: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            shard, record = self._homes[span.record]
            by_shard[shard].append(Span(record, span.begin, span.target))
        for shard, some in by_shard.items():
            if shard != self._last:
                self._park(self._last)
            self._last = shard
            self._reads[shard](some)

    def digest(self) -> bytes:
        """Return a hash by which the files of two hosts are compared."""
        found = hashlib.sha256()
        for shard in self.shards:
            found.update(repr((shard.path, shard.records, shard.entries)).encode())
        return found.digest()

    def _park(self, number: int) -> None:
        shard = self._opened.shards[number]
        if isinstance(shard, PickledShard):
            shard.park()

    def close(self) -> None:
        """Read nothing more."""
        self._local.close()
        self._reads = []

    def _of_safetensors(
        self, shard: SafetensorsShard | FetchedShard, entries: list[Entry]
    ) -> tuple[list[SentEntry], list[SentRecord], _ReadSpans]:
        sent = [_sent(entry, i, _view_of(entry)) for i, entry in enumerate(entries)]
        records = [SentRecord(entry.name, entry.nbytes) for entry in entries]
        if isinstance(shard, SafetensorsShard):

            def read(spans: Sequence[Span]) -> None:
                reads = []
                for span in spans:
                    entry = entries[span.record]
                    reads.append(Read(entry, span.target, span.begin // entry.dtype.itemsize))
                self._local.read(reads)

            return sent, records, read
        numbers = {id(entry): number for number, entry in enumerate(shard.entries)}
        in_file = [numbers[id(entry)] for entry in entries]
        source = shard.spans

        def fetch(spans: Sequence[Span]) -> None:
            source.read([Span(in_file[s.record], s.begin, s.target) for s in spans], verify=False)

        return sent, records, fetch


def _of_pickled(
    shard: PickledShard, entries: list[Entry]
) -> tuple[list[SentEntry], list[SentRecord], _ReadSpans]:
    try:
        reader = shard.archive()
        tensors = [shard.tensor(entry) for entry in entries]
        for entry, tensor in zip(entries, tensors, strict=True):
            if not is_viewable(tensor):
                raise UnsupportedSourceError(
                    f"{shard.path}: tensor {entry.name} of {entry.dtype} cannot be sent to other "
                    "ranks: let each load the file by itself, without process_group"
                )
        if reader is None:
            return _in_memory(shard, entries)
        return _in_archive(shard, reader, entries, tensors)
    finally:
        shard.park()


def _in_archive(
    shard: PickledShard, reader: RecordReader, entries: list[Entry], tensors: list[Tensor]
) -> tuple[list[SentEntry], list[SentRecord], _ReadSpans]:
    engine = reader.engine
    verify = verifies_storages(reader)
    in_file: dict[int, int] = {}  # numbers among the sent records, by those in the archive
    sent = []
    for entry, tensor in zip(entries, tensors, strict=True):
        home = engine.record_of(tensor) if entry.nbytes else None
        number = -1 if home is None else in_file.setdefault(home, len(in_file))
        sent.append(_sent(entry, number, StorageView.of(tensor)))
    records = []
    for number in in_file:
        record = engine.record(number)
        crc = record.crc if verify else None
        records.append(SentRecord(record.name, record.nbytes, record.payload_offset, crc))
    numbers = list(in_file)

    def read(spans: Sequence[Span]) -> None:
        own = shard.archive()
        assert own is not None
        numbered = [Span(numbers[span.record], span.begin, span.target) for span in spans]
        spans_of(own).read(numbered, verify=False)

    return sent, records, read


def _in_memory(
    shard: PickledShard, entries: list[Entry]
) -> tuple[list[SentEntry], list[SentRecord], _ReadSpans]:
    """Return the tensors of a file that only torch reads, each as one record."""
    sent = [_sent(entry, number, _view_of(entry)) for number, entry in enumerate(entries)]
    records = [SentRecord(entry.name, entry.nbytes) for entry in entries]

    def read(spans: Sequence[Span]) -> None:
        for span in spans:
            values = shard.tensor(entries[span.record]).resolve_conj().resolve_neg().contiguous()
            begin = int(values.storage_offset()) * values.itemsize + span.begin
            memory = bytes_of(values.untyped_storage())
            span.target.copy_(memory[begin : begin + len(span.target)])

    return sent, records, read


def _sent(entry: Entry, record: int, view: StorageView) -> SentEntry:
    return SentEntry(
        entry.name, entry.shape, entry.dtype, entry.nbytes, entry.stored_nbytes, record, view
    )


def _view_of(entry: Entry) -> StorageView:
    (tensor,) = unfilled_tensors([(entry.dtype, entry.shape)])
    return StorageView.of(tensor)
