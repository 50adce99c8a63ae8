"""Recovers the records in front of the cut from an archive whose end is missing.

The directory comes last, and sizes are only there and in the descriptors behind the payloads.  So
records are found by walking: a payload ends where there is a descriptor with exactly its size.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import Any

from ptsave import _C
from ptsave.archive.damage import entries_using
from ptsave.sources.ranges import LocalFile, RangeSource

__all__ = ["CutArchive", "CutRecord"]

_LOCAL, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_ZIP64_ID = 1
_HAS_DESCRIPTOR = 8  # a flag: sizes and checksum come behind the payload
_PIECE_NBYTES = 64 << 20


@dataclass(frozen=True)
class CutRecord:
    """A record, as far as it is there."""

    name: str
    header_offset: int
    payload_offset: int
    nbytes: int  # as far as they are there
    is_whole: bool  # it has its end, and its checksum is right
    crc: int  # as its end has it
    end: int  # where the next record begins


class CutArchive:
    """A file that begins as torch's archives do; a context manager.

    Parameters
    ----------
    source : RangeSource
        The file, not empty.  All of it is read, if it is no local one.

    Attributes
    ----------
    records : list of CutRecord
        Up to the first whose end cannot be found.
    nbytes : int
        The size of the file.
    root : str
        The folder of the first record.
    """

    def __init__(self, source: RangeSource) -> None:
        self._map = _mapped(source)
        self.nbytes = len(self._map)
        self.root = ""
        self.records: list[CutRecord] = []
        offset: int | None = 0
        while offset is not None:
            offset = self._take_record(offset)

    def __enter__(self) -> CutArchive:
        return self

    def __exit__(self, *exception: object) -> None:
        self._map.close()

    def _take_record(self, offset: int) -> int | None:
        """Add the record at an offset; return where the next one begins."""
        header = self._map[offset : offset + _LOCAL_HEADER.size]
        if len(header) < _LOCAL_HEADER.size or header[:4] != _LOCAL:
            return None
        _, _, flags, _, _, _, _, _, _, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        name_end = offset + _LOCAL_HEADER.size + name_nbytes
        begin: int = name_end + extra_nbytes
        if begin > self.nbytes:
            return None
        full_name = self._map[name_end - name_nbytes : name_end].decode("utf-8", "replace")
        root, _, name = full_name.partition("/")
        self.root = self.root or root
        extra = self._map[name_end : name_end + 2]
        is_zip64 = len(extra) == 2 and int.from_bytes(extra, "little") == _ZIP64_ID
        if not flags & _HAS_DESCRIPTOR:  # torch writes none behind an empty record
            self.records.append(CutRecord(name, offset, begin, 0, True, 0, begin))
            return begin
        found = self._find_end(begin, "<4sIQQ" if is_zip64 else "<4sIII")
        if found is None:
            rest = self.nbytes - begin
            self.records.append(CutRecord(name, offset, begin, rest, False, 0, self.nbytes))
            return None
        end, crc, next_offset = found
        is_whole = self._crc(begin, end) == crc
        found_record = CutRecord(name, offset, begin, end - begin, is_whole, crc, next_offset)
        self.records.append(found_record)
        return next_offset

    def _find_end(self, begin: int, layout: str) -> tuple[int, int, int] | None:
        """Return where a payload ends, its CRC-32, and where the next record begins."""
        descriptor = struct.Struct(layout)
        end = self._map.find(_DESCRIPTOR, begin)
        while end >= 0 and end + descriptor.size <= self.nbytes:
            _, crc, nbytes, _ = descriptor.unpack_from(self._map, end)
            if nbytes == end - begin:
                return end, int(crc), end + descriptor.size
            end = self._map.find(_DESCRIPTOR, end + 1)
        return None

    def _crc(self, begin: int, end: int) -> int:
        crc = 0
        for offset in range(begin, end, _PIECE_NBYTES):
            crc = _C.crc32(self._map[offset : min(offset + _PIECE_NBYTES, end)], crc)
        return crc

    def payload(self, record: CutRecord) -> bytes:
        """Return the bytes of a record, as far as they are there."""
        return self._map[record.payload_offset : record.payload_offset + record.nbytes]

    def entries(self) -> tuple[list[str], list[str]]:
        """Return the names of all tensors, and of those whose records are whole.

        Both are empty if the pickle is not there, or needs more than ``weights_only=True``.
        """
        whole = {record.name: record for record in self.records if record.is_whole}
        if "data.pkl" not in whole:
            return [], []
        reader: Any = _WholeRecords(self._map, whole)
        entries_using(reader, set())  # which asks for all that there should be
        lost = set(entries_using(reader, reader.asked_for.keys() - whole.keys()))
        tensors = entries_using(reader, set(reader.asked_for))
        return tensors, [name for name in tensors if name not in lost]


def _mapped(source: RangeSource) -> mmap.mmap:
    if isinstance(source, LocalFile) and source.begin == 0:
        return mmap.mmap(source.descriptor, 0, access=mmap.ACCESS_READ)
    copy = mmap.mmap(-1, source.nbytes)
    for begin in range(0, source.nbytes, _PIECE_NBYTES):
        (piece,) = source.read([(begin, min(begin + _PIECE_NBYTES, source.nbytes))])
        copy.write(piece)
    return copy


class _WholeRecords:
    """Stands in for a `RecordReader` in `entries_using`; each record has a place of its own."""

    def __init__(self, archive: mmap.mmap, whole: dict[str, CutRecord]) -> None:
        self._map = archive
        self._whole = whole
        self.asked_for: dict[str, int] = {}

    def has_record(self, name: str) -> bool:
        return name in self._whole

    def get_record(self, name: str) -> bytes:
        record = self._whole[name]
        return self._map[record.payload_offset : record.payload_offset + record.nbytes]

    def serialization_id(self) -> str:
        return ""

    def get_record_header_offset(self, name: str) -> int:
        return self.asked_for.setdefault(name, len(self.asked_for))
