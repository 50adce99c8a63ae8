"""Reads an archive at a URL or in a file object, by fetching ranges of its bytes.

The ZIP directory, small records and local headers are put into a sparse file in memory, which the
engine parses like any other file.  The bytes of tensors are fetched into the tensors.  A payload's
offset comes from the directory; the local header, fetched with the payload, confirms the offset.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.damage import Damage, RecordDamage, damage_at, damage_of
from ptsave.archive.reader import SMALL_RECORDS, RecordReader
from ptsave.archive.spans import BATCH_NBYTES, MAX_FETCHED_GAP, Span, batches, divided, memory_of
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import is_zip
from ptsave.sources.locations import describe
from ptsave.sources.ranges import FileObject, RangeSource, SparseFile
from ptsave.support import config
from ptsave.support.config import Config


class RemoteReader(RecordReader):
    """A `RecordReader` of an archive whose bytes are fetched when they are asked for."""

    is_fetched = True

    def __init__(self, source: RangeSource, limits: Config, *, verify: bool) -> None:
        self.source = source
        self._with_headers: set[int] = set()  # records whose local headers are in the sparse file
        self._fetched: set[int] = set()  # records whose payloads are in the sparse file as well
        self._tail_begin = max(source.nbytes - _C.MAX_TAIL_NBYTES, 0)
        self._file = SparseFile(source.nbytes)
        engine = self._open()
        super().__init__(engine, source.name, limits, verify=verify)
        records = (engine.find(name) for name in SMALL_RECORDS)
        self._fetch_records([record for record in records if record is not None])

    def _open(self) -> _C.Reader:
        nbytes, name = self.source.nbytes, os.fsencode(self.source.name)
        (tail,) = self.source.read([(self._tail_begin, nbytes)])
        begin, directory_nbytes = _C.find_central_directory(tail, nbytes, name)
        self._file.write(self._tail_begin, tail)
        if begin < self._tail_begin:
            # The part of the directory that lies before the tail.
            end = min(begin + directory_nbytes, self._tail_begin)
            (directory,) = self.source.read([(begin, end)])
            self._file.write(begin, directory)
        return _C.Reader.open_descriptor(self._file.descriptor, 0, name, direct=False)

    def get_record(self, name: str) -> bytes:
        if name not in self.small:
            record = self.find(name)
            if record is not None:
                self._fetch_records([record])
        return super().get_record(name)

    def get_record_offset(self, name: str) -> int:
        record = self.find(name)
        if record is not None and not self.has_header(record):
            found = self.engine.record(record)
            (header,) = self.source.read([(found.header_offset, found.payload_offset)])
            self.add_header(record, header)
        return super().get_record_offset(name)

    def require_crc(self, record: int, crc: int) -> None:
        """Raise an error if the record's stated checksum is not `crc`, its payload's checksum."""
        found = self.engine.record(record)
        if crc != found.crc:
            offset = self.engine.payload_offset(record)
            raise damage_of(self, [RecordDamage(found.name, offset, found.crc, crc)])

    def read_at(self, offset: int, nbytes: int) -> bytes:
        (piece,) = self.source.read([(offset, offset + nbytes)])
        return piece

    def has_header(self, record: int) -> bool:
        """Whether a record's local header has been fetched."""
        return record in self._with_headers

    def add_header(self, record: int, header: bytes) -> None:
        """Write a record's local header, which has been fetched, to the sparse file."""
        self._file.write(self.engine.record(record).header_offset, header)
        self._with_headers.add(record)

    def _fetch_records(self, records: list[int]) -> None:
        for record in records:
            self.require_small(record)
        found = [self.engine.record(record) for record in records if record not in self._fetched]
        ranges = [(record.header_offset, record.limit) for record in found]
        ranges = [where for where in ranges if where[0] < self._tail_begin]
        for (begin, _), piece in zip(ranges, self.source.read(ranges), strict=True):
            self._file.write(begin, piece)
        self._fetched.update(records)
        self._with_headers.update(records)


_AHEAD_NBYTES = 32 << 20  # of storages fetched together, because each request costs time


def open_stream(f: Any, *, verify: bool) -> StreamReader | None:
    """Open the archive at a seekable file object's position; None if no archive begins there."""
    if not all(callable(getattr(f, method, None)) for method in ("read", "seek", "tell")):
        return None
    try:
        begin = f.tell()
        head = f.read(4)
        f.seek(begin)
    except (OSError, io.UnsupportedOperation):
        return None  # torch's error names the missing method
    is_archive = isinstance(head, bytes) and is_zip(head)  # torch refuses text
    return StreamReader(FileObject(f, describe(f)), verify=verify) if is_archive else None


class StreamReader(RemoteReader):
    """A reader that reads a storage when unpickling asks for the storage, as torch's reader does.

    When the reader is made or closed, a file object is put back to the position that it had first.
    """

    reads_when_asked = True

    def __init__(self, source: RangeSource, *, verify: bool) -> None:
        super().__init__(source, config.current(), verify=verify)
        self._rewind()
        self._nbytes_read = 0
        self._n_records = len(self.engine.records())
        self._ahead: dict[int, Tensor] = {}  # payloads fetched ahead, by record
        self.verifies = self.verify

    def get_storage_from_record(self, name: str, nbytes: int, dtype: object) -> Tensor:
        record = self.find_storage(name, nbytes)
        if isinstance(self.source, FileObject):
            payload = torch.empty(nbytes, dtype=torch.uint8)
            self.source.read_into(self.get_record_offset(name), memory_of(payload))
            if self.verifies:
                self.require_crc(record, _C.crc32(memory_of(payload)))
        else:
            if record not in self._ahead:
                self._fetch_from(record)
            payload = self._ahead.pop(record)
        self._nbytes_read += nbytes
        if self.progress is not None:
            self.progress(self._nbytes_read)
        return payload

    def _fetch_from(self, record: int) -> None:
        """Fetch a storage and the storages behind it, which are usually asked for next."""
        payloads = {
            number: torch.empty(self.engine.record(number).nbytes, dtype=torch.uint8)
            for number in self._storages_from(record)
        }
        spans = [Span(number, 0, payload) for number, payload in payloads.items()]
        FetchedSpans(self).read(spans, verify=None if self.verifies else False)
        self._ahead = payloads  # drops earlier payloads that were not asked for

    def _storages_from(self, record: int) -> Iterator[int]:
        yield record
        nbytes = self.engine.record(record).nbytes
        for number in range(record + 1, self._n_records):
            found = self.engine.record(number)
            nbytes += found.nbytes
            if nbytes > _AHEAD_NBYTES:
                return
            if found.name.startswith("data/"):
                yield number

    def close(self) -> None:
        super().close()
        self._ahead.clear()
        self._rewind()

    def _rewind(self) -> None:
        if isinstance(self.source, FileObject):
            self.source.rewind()


class FetchedSpans:
    """`ArchiveSpans` for an archive whose bytes have to be fetched."""

    max_gap = MAX_FETCHED_GAP
    reach_devices = False

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader
        self._engine = reader.engine
        self._source = reader.source
        self._can_verify = self._engine.storages_have_crcs

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        verify = verify if self._can_verify else False
        whole, parts = divided(self._engine, spans)
        if verify and parts:
            self.check([span.record for span in parts])
        for batch in batches(spans):
            self._fetch(batch)
        if verify is not False:
            for span in whole:
                self._reader.require_crc(span.record, _C.crc32(memory_of(span.target)))

    def check(self, records: Sequence[int]) -> None:
        for record in sorted(set(records)):
            self._reader.require_crc(record, self._crc_of(record))

    def _crc_of(self, record: int) -> int:
        crc = 0
        nbytes = self._engine.record(record).nbytes
        piece = torch.empty(min(nbytes, BATCH_NBYTES), dtype=torch.uint8)
        for begin in range(0, nbytes, BATCH_NBYTES):
            part = piece[: min(BATCH_NBYTES, nbytes - begin)]
            for batch in batches([Span(record, begin, part)]):
                self._fetch(batch)
            crc = _C.crc32(memory_of(part), crc)
        return crc

    def find_damage(self, records: Sequence[int], *, verify: bool) -> list[Damage]:
        damage = []
        for number in records:
            record = self._engine.record(number)
            try:
                offset = self._reader.get_record_offset(record.name)
                crc = self._crc_of(number) if verify else record.crc
                if verify and crc != record.crc:
                    reason = f"its CRC-32 is {crc:08x}, not {record.crc:08x}"
                    error = self._damaged(record, crc)
                    damage.append(Damage(record.name, offset, reason, error))
            except (CorruptCheckpointError, OSError) as error:
                damage.append(damage_at(self._reader, number, error))
        return damage

    def _fetch(self, spans: Sequence[Span]) -> None:
        """Fetch spans and their records' local headers; a header may correct a payload's offset."""
        records = {span.record: self._engine.record(span.record) for span in spans}
        for record in records.values():
            if not record.stored or record.encrypted:
                self._reader.fail("the record is compressed or encrypted", record.name)
        new = [number for number in records if not self._reader.has_header(number)]
        headers = [(records[i].header_offset, records[i].payload_offset) for i in new]
        wanted = [_range_of(span, records[span.record].payload_offset) for span in spans]
        pieces = self._source.read([*headers, *wanted])
        for number, header in zip(new, pieces, strict=False):
            self._reader.add_header(number, header)
        pieces = pieces[len(new) :]
        offsets = {number: self._engine.payload_offset(number) for number in records}
        found = [_range_of(span, offsets[span.record]) for span in spans]
        if found != wanted:
            pieces = self._source.read(found)
        for span, piece in zip(spans, pieces, strict=True):
            memory_of(span.target)[:] = piece

    def _damaged(self, record: _C.Record, crc: int) -> CorruptCheckpointError:
        advice = ", or pass verify=False to read it as it is"
        return self._reader.failure(
            f"its CRC-32 is {crc:08x}, not {record.crc:08x}. Copy the file again{advice}.",
            record.name,
            advice,
        )


def _range_of(span: Span, payload_offset: int) -> tuple[int, int]:
    begin = payload_offset + span.begin
    return begin, begin + len(span.target)
