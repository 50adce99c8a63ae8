"""Finds the records of an archive whose directory is missing: cut off, damaged or never written."""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ptsave import _C
from ptsave.archive.damage import entries_using
from ptsave.archive.unpickling import faster
from ptsave.sources.ranges import RangeSource
from ptsave.support.torch_names import restricted_unpickler

_SIGNATURES = re.compile(rb"PK(?:\x03\x04|\x07\x08)")
_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MAX_HEADER_NBYTES = _LOCAL_HEADER.size + 2 * 0xFFFF
_DESCRIPTOR, _ZIP64_DESCRIPTOR = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_ZIP64_ID = b"\1\0"
ZIP64 = 0xFFFFFFFF  # sizes and offsets from here on are in other fields
_HAS_DESCRIPTOR = 8  # a flag: size and checksum come behind the payload
_KNOWN_FLAGS = _HAS_DESCRIPTOR | 0x800  # the second flag: the name is UTF-8
_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CutRecord:
    """A record that may be damaged or cut off."""

    name: str
    header_offset: int
    payload_offset: int
    nbytes: int  # of the part that exists
    is_whole: bool  # its end exists, and its checksum is right
    crc: int  # as stored at its end or in its header; 0 if its end is missing
    end: int  # where the next record begins
    follows: bool  # it begins at the end of the record before, or of the file


class _Header(NamedTuple):
    """A local header, or bytes that look like one."""

    name_begin: int
    name_end: int
    payload_offset: int
    is_plain: bool  # neither compressed nor encrypted, as torch writes records
    descriptor: struct.Struct | None  # None: size and checksum are in the header
    nbytes: int
    crc: int


class _Stored(NamedTuple):
    """A storage's record, if it is whole, the offset of its bytes, and the next record's offset."""

    record: CutRecord | None
    payload_offset: int
    next_offset: int


class _End(NamedTuple):
    """The offset of a payload's end, its checksum, and the offset of the next record."""

    end: int
    crc: int
    next_offset: int


class CutArchive:
    """The records of a file that begins as torch's archives do, in file order, damaged ones too.

    The directory comes last, and only the directory and the descriptors behind payloads have sizes.
    So the file is read once to find all signatures: a payload ends at a descriptor with exactly its
    size.  Then the records are followed from the beginning.  Where damage breaks the chain, they
    are followed from the next local header on.  The file is read in pieces and never mapped,
    because it may become shorter.

    A hostile file may consist of signatures.  So only the offsets of headers are kept, and no name
    reaches past the next header.  A header that contains another header's signature in its fixed
    part does not count, so headers number fewer than a thirtieth of the file's bytes.
    """

    def __init__(self, source: RangeSource) -> None:
        self._source = _Window(source)
        self.nbytes = source.nbytes
        self._offsets = array("Q")  # of headers, in order
        # Keyed by payload offset: the layout of the expected descriptor, and the descriptor that
        # was found.  The latter is its offset above the 32 bits of its checksum.
        self._awaited: dict[int, struct.Struct] = {}
        self._descriptors: dict[int, int] = {}
        for begin in range(0, self.nbytes, _PIECE_NBYTES):
            self._find_signatures(begin, min(begin + _PIECE_NBYTES, self.nbytes))
        self.root, self.records = _of_one_folder(self._followed())
        self.begins_with_pickle = bool(self.records) and _begins_with_pickle(self.records[0])

    # ---------------------------------------------------------------------------- signatures

    def _find_signatures(self, begin: int, end: int) -> None:
        """Note the local headers in a part of the file, and descriptors that fit one of them."""
        piece = self._source.read(begin, end + _MAX_HEADER_NBYTES)
        for found in _SIGNATURES.finditer(piece):
            at = found.start()
            if at >= end - begin:
                return
            if found[0] == _LOCAL:
                header = _parsed(piece, at, begin + at)
                if header is not None and header.payload_offset <= self.nbytes:
                    self._offsets.append(begin + at)
                    self._awaited.pop(header.payload_offset, None)
                    if header.descriptor is not None:
                        self._awaited[header.payload_offset] = header.descriptor
            else:
                self._take_descriptor(piece, at, begin + at)

    def _take_descriptor(self, piece: bytes, at: int, offset: int) -> None:
        for layout in (_DESCRIPTOR, _ZIP64_DESCRIPTOR):
            if at + layout.size <= len(piece):
                _, crc, nbytes, _ = layout.unpack_from(piece, at)
                if self._awaited.get(offset - nbytes) is layout:
                    del self._awaited[offset - nbytes]
                    self._descriptors[offset - nbytes] = offset << 32 | crc

    # ------------------------------------------------------------------------------- records

    def _followed(self) -> list[tuple[str, CutRecord]]:
        """Return the records with their folders: the first chain, and chains after damage."""
        found: list[tuple[str, CutRecord]] = []
        offset, follows = 0, True
        chain = 0  # number of records up to the last damage
        while True:
            header = self._header_at(offset)
            if header is not None:
                end = self._end_of(offset, header)
                found.append(self._record(offset, header, end, follows))
                offset, follows = found[-1][1].end, end is not None
                chain = chain if follows else len(found)
                continue
            following = self._next_header(offset)
            if following is None:
                break
            if self._source.read(offset, offset + 4) == _CENTRAL:
                # The directory of this archive or, after damage, of an archive inside a damaged
                # payload.
                if not chain:
                    break
                del found[chain:]
            offset, follows, chain = following, False, len(found)
        return found

    def _header_at(self, offset: int) -> _Header | None:
        """Return the header that was found at an offset; None if there was none."""
        if self._next_header(offset) != offset:
            return None
        name_begin = offset + _LOCAL_HEADER.size
        fields = _LOCAL_HEADER.unpack(self._source.read(offset, name_begin))
        piece = self._source.read(offset, name_begin + fields[-2] + 2 * len(_ZIP64_ID))
        return _parsed(piece, 0, offset)

    def _next_header(self, offset: int) -> int | None:
        i = bisect_left(self._offsets, offset)
        return self._offsets[i] if i < len(self._offsets) else None

    def _record(
        self, offset: int, header: _Header, end: _End | None, follows: bool
    ) -> tuple[str, CutRecord]:
        limit = self._limit(offset + 1)
        full_name = self._source.read(header.name_begin, min(header.name_end, limit))
        root, _, name = full_name.decode("utf-8", "replace").partition("/")
        begin = header.payload_offset
        if end is None:  # the header's sizes may be wrong, too: the next header counts
            nbytes = max(limit - begin, 0)
            return root, CutRecord(name, offset, begin, nbytes, False, 0, limit, follows)
        is_whole = header.is_plain and self.crc(begin, end.end) == end.crc
        nbytes = end.end - begin
        return root, CutRecord(
            name, offset, begin, nbytes, is_whole, end.crc, end.next_offset, follows
        )

    def _end_of(self, offset: int, header: _Header) -> _End | None:
        begin = header.payload_offset
        if self._limit(offset + 1) < begin:  # a header in this header: this one is damaged
            return None
        if header.descriptor is None:
            return self._stored_end(header)
        found = self._descriptors.get(begin)
        if found is None:
            return self._implied_end(begin, header.descriptor)
        end, crc = found >> 32, found & 0xFFFFFFFF
        return _End(end, crc, end + header.descriptor.size)

    def _stored_end(self, header: _Header) -> _End | None:
        """Return the end that the header gives, in empty records and those of other programs."""
        end = header.payload_offset + header.nbytes
        # A flipped bit in a header can look like this, but then no record follows.
        if end > self.nbytes or self._source.read(end, end + 2) not in (b"", b"PK"):
            return None
        return _End(end, header.crc, end)

    def _implied_end(self, begin: int, descriptor: struct.Struct) -> _End | None:
        """Return the end in front of the next header, if the checksum there is right.

        Then only the size in the descriptor is damaged.
        """
        limit = self._limit(begin)
        end = limit - descriptor.size
        if end < begin:
            return None
        crc = int.from_bytes(self._source.read(end + 4, end + 8), "little")
        return _End(end, crc, limit) if self.crc(begin, end) == crc else None

    def _limit(self, offset: int) -> int:
        """Return the offset of the next header from `offset` on, or of the file's end."""
        following = self._next_header(offset)
        return self.nbytes if following is None else following

    def crc(self, begin: int, end: int) -> int:
        """Return the checksum of a part of the file."""
        crc = 0
        for offset in range(begin, end, _PIECE_NBYTES):
            crc = _C.crc32(self._source.read(offset, min(offset + _PIECE_NBYTES, end)), crc)
        return crc

    def storage_at(self, offset: int, name: str, nbytes: int, payload_offset: int) -> _Stored:
        """Look for a storage of known place and size; the result has no record if it is not whole.

        `offset` is its header's offset.  `payload_offset` is -1 if only the header knows it; it
        stays -1 in the result where there is no header.
        """
        header = self._header_at(offset)
        if payload_offset < 0:
            if header is None:
                return _Stored(None, -1, -1)
            payload_offset = header.payload_offset
        is_large = max(offset, nbytes) >= ZIP64
        layout: struct.Struct | None = _ZIP64_DESCRIPTOR if is_large else _DESCRIPTOR
        if header is not None and header.payload_offset == payload_offset:
            layout = header.descriptor
        payload_end = payload_offset + nbytes
        end = payload_end if layout is None or not nbytes else payload_end + layout.size
        if header is None or header.payload_offset != payload_offset or not header.is_plain:
            return _Stored(None, payload_offset, end)
        full_name = self._source.read(header.name_begin, header.name_end)
        crc, size = header.crc, header.nbytes
        if layout is not None:
            tail = self._source.read(payload_end, payload_end + layout.size)
            if len(tail) < layout.size or not tail.startswith(_DESCRIPTOR_SIGNATURE):
                return _Stored(None, payload_offset, end)
            _, crc, size, _ = layout.unpack(tail)
        is_right = full_name == f"{self.root}/{name}".encode() and size == nbytes
        if not is_right or end > self.nbytes or self.crc(payload_offset, payload_end) != crc:
            return _Stored(None, payload_offset, end)
        record = CutRecord(name, offset, payload_offset, nbytes, True, crc, end, True)
        return _Stored(record, payload_offset, end)

    # ------------------------------------------------------------------------------ contents

    def payload(self, record: CutRecord) -> bytes:
        """Return the bytes of a record, as far as they exist."""
        return self._source.read(record.payload_offset, record.payload_offset + record.nbytes)

    def entries(self) -> tuple[list[str], list[str]]:
        """Return the names of all tensors, and of the tensors whose records are whole.

        Both are empty if the pickle is missing, or needs more than ``weights_only=True``.
        """
        found: dict[str, CutRecord] = {}
        for record in self.records:
            found.setdefault(record.name, record)
        whole = {name: record for name, record in found.items() if record.is_whole}
        if "data.pkl" not in whole:
            return [], []
        reader: Any = _WholeRecords(self, whole)
        machine = faster(restricted_unpickler, reader)
        entries_using(reader, set(), machine)  # asks for all records that should exist
        lost = set(entries_using(reader, reader.asked_for.keys() - whole.keys(), machine))
        tensors = entries_using(reader, set(reader.asked_for), machine)
        return tensors, [name for name in tensors if name not in lost]


def _parsed(piece: bytes, at: int, offset: int) -> _Header | None:
    """Return the local header at a place; None if it is cut off, or another one begins in it."""
    name_begin = at + _LOCAL_HEADER.size
    if name_begin > len(piece):
        return None
    if piece.find(_LOCAL, at + len(_LOCAL), name_begin + len(_LOCAL) - 1) >= 0:
        return None
    fields = _LOCAL_HEADER.unpack_from(piece, at)
    _, _, flags, method, _, _, crc, nbytes, _, name_nbytes, extra_nbytes = fields
    name_end = name_begin + name_nbytes
    is_zip64 = extra_nbytes >= 2 and piece[name_end : name_end + 2] == _ZIP64_ID
    descriptor = None
    if flags & _HAS_DESCRIPTOR:
        descriptor = _ZIP64_DESCRIPTOR if is_zip64 else _DESCRIPTOR
    return _Header(
        offset + (name_begin - at),
        offset + (name_end - at),
        offset + (name_end - at) + extra_nbytes,
        method == 0 and not flags & ~_KNOWN_FLAGS,
        descriptor,
        nbytes,
        crc,
    )


def _of_one_folder(found: list[tuple[str, CutRecord]]) -> tuple[str, list[CutRecord]]:
    """Return the archive's folder, and its records; a record in another folder is not whole."""
    roots = Counter(root for root, record in found if record.is_whole)
    root = found[0][0] if found else ""
    if roots and not _begins_with_pickle(found[0][1]):  # names may be damaged: the majority counts
        root = roots.most_common(1)[0][0]
    return root, [
        record if each == root else replace(record, name=f"{each}/{record.name}", is_whole=False)
        for each, record in found
    ]


def _begins_with_pickle(first: CutRecord) -> bool:
    return first.header_offset == 0 and first.name == "data.pkl" and first.is_whole


class _Window:
    """A source that keeps its last piece, for reads that go forward."""

    def __init__(self, source: RangeSource) -> None:
        self._source = source
        self._begin = 0
        self._piece = b""

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes of a range, as far as they exist."""
        nbytes = self._source.nbytes
        begin, end = min(begin, nbytes), min(end, nbytes)
        if begin < self._begin or end > self._begin + len(self._piece):
            wanted = min(max(end, begin + _PIECE_NBYTES), nbytes)
            (self._piece,) = self._source.read([(begin, wanted)])
            self._begin = begin
        return self._piece[begin - self._begin : end - self._begin]


class _WholeRecords:
    """Stands in for a `RecordReader` in `entries_using`; a record's number is its offset."""

    path = "data.pkl"
    allows_values = False
    leaves_opaque = True

    def __init__(self, archive: CutArchive, whole: dict[str, CutRecord]) -> None:
        self._archive = archive
        self._whole = whole
        self.asked_for: dict[str, int] = {}

    def has_record(self, name: str) -> bool:
        return name in self._whole

    def get_record(self, name: str) -> bytes:
        return self._archive.payload(self._whole[name])

    def serialization_id(self) -> str:
        return ""

    def get_record_header_offset(self, name: str) -> int:
        return self.asked_for.setdefault(name, len(self.asked_for))
