"""Reads an archive whose bytes have to be fetched by ranges, through a sparse file in memory.

The engine parses that file, so there is one parser; it has the directory, small records and local
headers.  The bytes of tensors are fetched into the tensors.  A payload's offset comes from the
directory, and the local header that is fetched with it confirms the offset.
"""

from __future__ import annotations

import os

from ptsave import _C
from ptsave.archive.damage import RecordDamage, damage_of
from ptsave.archive.reader import SMALL_RECORDS, RecordReader
from ptsave.sources.ranges import RangeSource, SparseFile
from ptsave.support.config import Config


class RemoteReader(RecordReader):
    """A `RecordReader` of an archive whose bytes are fetched when they are asked for."""

    is_fetched = True

    def __init__(self, source: RangeSource, limits: Config, *, verify: bool) -> None:
        self.source = source
        self._with_headers: set[int] = set()  # records whose local headers are in the file
        self._fetched: set[int] = set()  # records whose payloads are there as well
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
        """Refuse a record that should have another checksum than its fetched payload's."""
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
        """Store the fetched bytes from a record's local header to its payload."""
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
