"""Completes an archive that has lost its end, or that an `ArchiveWriter` has left unfinished.

`CutArchive` finds the records without using the ZIP directory, which is cut off, damaged or was
never written.

A file of torch begins with `data.pkl`.  An `ArchiveWriter` writes journals instead: each is the
pickle of a dict with new entries.  The records up to the last undamaged journal are used, and the
new `data.pkl` gets the entries of all undamaged journals.  Entries that need a damaged or missing
record are left out.  The missing end is made in memory, and the file itself is not changed.

Hostile journals can do no more than a hostile `data.pkl`: the restricted unpickler reads both.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any, NamedTuple, TypeAlias

from ptsave import _C
from ptsave.archive.damage import entries_using
from ptsave.archive.opening import open_source_archive
from ptsave.archive.reader import SMALL_RECORDS
from ptsave.archive.surviving import SavedEntries
from ptsave.archive.unpickling import faster
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.sources.ranges import RangeSource
from ptsave.support.text import some_of
from ptsave.support.torch_names import restricted_unpickler

JOURNAL_PREFIX = ".journal/"
_DATA = "data/"
_LOST = ".lost/"  # the prefix of names for ranges that hold no known record
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_Found: TypeAlias = tuple[str, int, int, int, int]  # name, header's offset, size, CRC-32, end
_OTHER_RECORDS = {"data.pkl", *SMALL_RECORDS}
_MAX_DIGITS = 16
_N_NAMED = 8  # names in a warning
_ALIGNMENT = 64  # of the records that are added
_SIGNATURES = re.compile(rb"PK(?:\x03\x04|\x07\x08)")
_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_MAX_HEADER_NBYTES = _LOCAL_HEADER.size + 2 * 0xFFFF
_DESCRIPTOR, _ZIP64_DESCRIPTOR = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_ZIP64_ID = b"\1\0"
ZIP64 = 0xFFFFFFFF  # sizes and offsets from this value on are in other fields
_HAS_DESCRIPTOR = 8  # a flag: size and checksum come behind the payload
_KNOWN_FLAGS = _HAS_DESCRIPTOR | 0x800  # the second flag: the name is UTF-8
_PIECE_NBYTES = 4 << 20


class CompletedFile(RangeSource):
    """The beginning of a file with some headers replaced, followed by a new end in memory."""

    def __init__(
        self, source: RangeSource, nbytes: int, end: bytes, patches: Mapping[int, bytes]
    ) -> None:
        self._patches = patches
        self.name = source.name
        self.nbytes = nbytes + len(end)
        self._source = source
        self._source_nbytes = nbytes
        self._end = end

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        limit = self._source_nbytes
        fronts = self._source.read([(min(begin, limit), min(end, limit)) for begin, end in ranges])
        return [
            self._patched(front, begin) + self._end[max(begin - limit, 0) : max(end - limit, 0)]
            for front, (begin, end) in zip(fronts, ranges, strict=True)
        ]

    def _patched(self, piece: bytes, begin: int) -> bytes:
        for offset, patch in self._patches.items():
            at = max(offset - begin, 0)
            part = patch[max(begin - offset, 0) :][: max(len(piece) - at, 0)]
            if part:
                piece = piece[:at] + part + piece[at + len(part) :]
        return piece


def part_of_dict(pickle: bytes) -> bytes | None:
    """Return the opcodes that add the entries in a dict's pickle; None for any other pickle."""
    if not pickle.startswith(_C.DICT_HEAD) or not pickle.endswith(_C.STOP):
        return None
    return pickle[len(_C.DICT_HEAD) : -len(_C.STOP)]


def dict_of_parts(parts: list[bytes]) -> bytes:
    """Return the pickle of a dict with the entries in `parts`, which `part_of_dict` returned."""
    return b"".join([_C.DICT_HEAD, *parts, _C.STOP])


@dataclass(frozen=True)
class Recovery:
    """The readable part of a file that lost its end; `source` serves it as a complete archive.

    `storages` and `journals` are the names of damaged or missing records.  `entries` are the names
    of entries that are left out because they need these storages; the entries of lost journals are
    unknown.  `n_records` counts the undamaged storages and journals.
    """

    source: RangeSource
    storages: Sequence[str] = ()
    journals: Sequence[str] = ()
    entries: Sequence[str] = ()
    n_records: int = 0

    def damage(self) -> str:
        """Return a text about lost records and entries; an empty text if nothing is lost."""
        records = [*self.storages, *self.journals]
        parts = [f"damaged or missing: {some_of(records, _N_NAMED)}"] if records else []
        if self.entries:
            parts.append(f"without the entries {some_of(self.entries, _N_NAMED)}")
        if self.journals:
            parts.append(f"the entries added with {some_of(self.journals, _N_NAMED)} are unknown")
        return "; ".join(parts)


def recover_archive(source: RangeSource) -> Recovery | None:
    """Recover an archive that lost its end; None for a complete archive or another file.

    `source` must not be empty.  ``source.kind`` must be "zip", or None if the first bytes may be
    damaged.  Raises CorruptCheckpointError if nothing can be recovered.
    """
    if source.kind is None:
        return _recovery(source)
    hopeless = "nothing can be recovered, because neither data.pkl nor a journal is undamaged"
    try:
        open_source_archive(source, verify=False, advice=hopeless)
    except CorruptCheckpointError as error:
        found = _recovery(source)
        if found is None:
            raise error from None
        return found
    return None


def _recovery(source: RangeSource) -> Recovery | None:
    cut = CutArchive(source)
    try:
        if cut.begins_with_pickle:
            return _of_pickle(source, cut, cut.payload(cut.records[0]))
        return _of_journals(source, cut)
    except ValueError as error:
        raise CorruptCheckpointError(f"{source.name}: {error}", path=source.name) from error


def _of_pickle(source: RangeSource, cut: CutArchive, data: bytes) -> Recovery:
    """Recover an archive that begins with its pickle `data`."""
    first = [*takewhile(lambda record: record.follows, cut.records[: len(_OTHER_RECORDS)])]
    small = {record.name: cut.payload(record) for record in first if record.is_whole}
    if small.get("byteorder", b"little") != b"little":
        raise ValueError("nothing can be recovered, because the byte order is not little-endian")
    saved = SavedEntries(data)
    if min(saved.storages.values(), default=0) < 0:
        raise ValueError("nothing can be recovered, because the size of a storage is unknown")
    text = small.get(".storage_alignment", b"")
    is_number = text.isdigit() and len(text) < _MAX_DIGITS and int(text) > 0
    alignment = int(text) if is_number else _ALIGNMENT
    by_text = sorted(saved.storages)
    by_number = sorted(by_text, key=len)
    found = [
        _storages_in(cut, order, saved.storages, record.end, alignment)
        for order in ([by_number] if by_number == by_text else [by_number, by_text])
        for record in first  # storages begin behind one of these, whose names may be damaged
    ]
    records = max(found, key=len)
    missing = saved.storages.keys() - {record.name.removeprefix(_DATA) for record in records}
    empty = {number for number in missing if saved.storages[number] == 0}  # these lose no bytes
    lost = missing - empty
    data, entries = saved.without(lost)
    rest = Recovery(source, _in_order(lost), (), entries)
    return _completed(source, cut, records, data, rest, empty=_in_order(empty))


def _storages_in(
    cut: CutArchive, order: list[str], sizes: Mapping[str, int], at: int, alignment: int
) -> list[CutRecord]:
    """Return the undamaged storages; storages are expected in this `order` from `at` on."""
    records = []
    by_headers = False
    for i, number in enumerate(order):
        name, nbytes = f"{_DATA}{number}", sizes[number]
        place = _C.payload_offset_after(at, f"{cut.root}/{name}", nbytes, alignment)
        stored = cut.storage_at(at, name, nbytes, -1 if by_headers else place)
        if i == 0 and stored.record is None:
            by_headers = cut.storage_at(at, name, nbytes, -1).record is not None
            stored = cut.storage_at(at, name, nbytes, -1 if by_headers else place)
        if stored.record is not None:
            records.append(stored.record)
        if not 0 <= stored.next_offset <= cut.nbytes:
            break
        at = stored.next_offset
    return records


def _of_journals(source: RangeSource, cut: CutArchive) -> Recovery | None:
    """Recover the file of an `ArchiveWriter`; None if it has no undamaged journal."""
    records = _rightly_named(cut.records)
    journals = [record for record in records if record.name.startswith(JOURNAL_PREFIX)]
    pickles = [record for record in records if record.name == "data.pkl"]  # of a finished file
    if not journals:
        return None
    last = (pickles or journals)[-1]
    data = cut.payload(last) if pickles else None
    if data is None or part_of_dict(data) is None:
        parts = (part_of_dict(cut.payload(record)) for record in journals)
        data = dict_of_parts([part for part in parts if part is not None])
    lost: set[str] = set()
    entries: list[str] = []
    lost_journals: list[str] = []
    before = cut.records[: cut.records.index(last) + 1]
    if before != records[: len(before)] or not all(record.follows for record in before):
        numbers = {record.name.removeprefix(_DATA) for record in records}
        saved = SavedEntries(data)
        lost = saved.storages.keys() - numbers
        data, entries = saved.without(lost)
        lost_journals = [] if pickles else _missing(journals)
    finished = [record for record in records if record.header_offset <= last.header_offset]
    found = Recovery(source, _in_order(lost), lost_journals, entries)
    return _completed(source, cut, finished, data, found)


def _in_order(numbers: Set[str]) -> list[str]:
    return [f"{_DATA}{number}" for number in sorted(numbers, key=lambda n: (len(n), n))]


def _completed(
    source: RangeSource,
    cut: CutArchive,
    records: list[CutRecord],
    data: bytes,
    found: Recovery,
    *,
    empty: Sequence[str] = (),
) -> Recovery:
    """Return `found` with a source of `records`, `empty` storages, and `data` as data.pkl."""
    finished = [record for record in records if record.name.startswith((_DATA, JOURNAL_PREFIX))]
    places: list[_Found] = []
    patches: dict[int, bytes] = {}
    at = 0
    for record in finished:
        if record.header_offset > at:
            place, header = _lost(cut, f"{_LOST}{len(patches)}", at, record.header_offset)
            places.append(place)
            patches[at] = header
        places.append((record.name, record.header_offset, record.nbytes, record.crc, record.end))
        at = record.end
    nbytes, headers = at, b""
    for name in empty:
        header = _header_of(f"{cut.root}/{name}".encode(), 0x0800, 0)
        places.append((name, at, 0, 0, at + len(header)))
        headers += header
        at += len(header)
    end = headers + _C.closing_bytes(cut.root, _ALIGNMENT, places, data)
    return replace(
        found, source=CompletedFile(source, nbytes, end, patches), n_records=len(finished)
    )


def _header_of(name: bytes, flags: int, n_extra: int) -> bytes:
    """Return a ZIP local header whose fields for the checksum and the sizes are zero."""
    fields = _LOCAL_HEADER.pack(ZIP_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(name), n_extra)
    return fields + name


def _lost(cut: CutArchive, name: str, begin: int, end: int) -> tuple[_Found, bytes]:
    """Return a made-up record, and its header, that fill the gap in front of a known record.

    An archive must not have gaps, because the engine uses the next record to find a payload.
    """
    full_name = f"{cut.root}/{name}".encode()
    front = _LOCAL_HEADER.size + len(full_name)
    descriptor_nbytes = 24 if max(begin, end - begin) >= ZIP64 else 16
    payload = begin + front
    nbytes = max(end - payload - descriptor_nbytes, 0)
    flags, rest = (0x0808, b"") if nbytes else (0x0800, bytes(max(end - payload, 0)))
    crc = cut.crc(payload, payload + nbytes)
    return (name, begin, nbytes, crc, end), _header_of(full_name, flags, len(rest)) + rest


def _rightly_named(records: list[CutRecord]) -> list[CutRecord]:
    """Return the undamaged records whose names are right; checksums do not cover names.

    The names of storages and journals are right if their numbers increase in file order.
    """
    found = []
    last = {_DATA: -1, JOURNAL_PREFIX: -1}
    known = set(last)  # prefixes whose next number is certain
    for record in records:
        prefix, number = _series_of(record.name)
        if not record.follows:
            known.clear()
        is_right = record.name in _OTHER_RECORDS
        if prefix:
            is_right = number == last[prefix] + 1 if prefix in known else number > last[prefix]
        if not is_right:  # the next numbers are uncertain now
            known.clear()
            continue
        if prefix:
            last[prefix] = number
            known.add(prefix)
        if record.is_whole:
            found.append(record)
    return found


def _series_of(name: str) -> tuple[str, int]:
    for prefix in (_DATA, JOURNAL_PREFIX):
        number = name.removeprefix(prefix)
        if number != name and number.isdecimal() and len(number) < _MAX_DIGITS:
            return prefix, int(number)
    return "", -1


def _missing(journals: list[CutRecord]) -> list[str]:
    """Return up to nine names of journals that are missing before the last of `journals`."""
    numbers = {_series_of(record.name)[1] for record in journals}
    missing = (i for i in range(max(numbers)) if i not in numbers)
    return [f"{JOURNAL_PREFIX}{i}" for i in islice(missing, _N_NAMED + 1)]


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
    follows: bool  # it begins where the record before ends, or where the file begins


class _Header(NamedTuple):
    """A ZIP local header, or bytes that look like a local header."""

    name_begin: int
    name_end: int
    payload_offset: int
    is_plain: bool  # neither compressed nor encrypted, as torch writes records
    descriptor: struct.Struct | None  # None: size and checksum are in the header
    nbytes: int
    crc: int


class _Stored(NamedTuple):
    """A storage's record (None if damaged), its payload's offset, and the next record's offset."""

    record: CutRecord | None
    payload_offset: int
    next_offset: int


class _End(NamedTuple):
    """The end of a payload, the payload's checksum, and the offset of the next record."""

    end: int
    crc: int
    next_offset: int


class CutArchive:
    """All records of an archive in file order, also damaged ones, found without the ZIP directory.

    Only the directory and the data descriptors behind payloads state the payloads' sizes.  So the
    file is read once to find all local headers and descriptors.  A payload ends in front of a
    descriptor that states exactly the payload's size.  Then the records are followed from the
    file's beginning; after damage, from the next local header on.  The file is read in pieces and
    never mapped, because the file may become shorter meanwhile.

    A hostile file may be full of fake headers.  So only the offsets of headers are kept, names end
    before the next header, and a header that contains another header is ignored.
    """

    def __init__(self, source: RangeSource) -> None:
        self._source = _Window(source)
        self.nbytes = source.nbytes
        self._offsets = array("Q")  # of headers, in order
        # Keyed by payload offset: the layout of the expected descriptor, and the descriptor that
        # was found, as one number: its offset, and in the lowest 32 bits its checksum.
        self._awaited: dict[int, struct.Struct] = {}
        self._descriptors: dict[int, int] = {}
        for begin in range(0, self.nbytes, _PIECE_NBYTES):
            self._find_signatures(begin, min(begin + _PIECE_NBYTES, self.nbytes))
        self.root, self.records = _of_one_folder(self._followed())
        self.begins_with_pickle = bool(self.records) and _begins_with_pickle(self.records[0])

    # ---------------------------------------------------------------------------- signatures

    def _find_signatures(self, begin: int, end: int) -> None:
        """Note the local headers in a part of the file, and the descriptors that match payloads."""
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
        """Return each record as a pair (folder, record); after damage, go on at the next header."""
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
        """Return the local header at `offset`; None if no header begins there."""
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
        if end is None:  # the header's size may be wrong, too: end at the next header
            nbytes = max(limit - begin, 0)
            return root, CutRecord(name, offset, begin, nbytes, False, 0, limit, follows)
        is_whole = header.is_plain and self.crc(begin, end.end) == end.crc
        nbytes = end.end - begin
        return root, CutRecord(
            name, offset, begin, nbytes, is_whole, end.crc, end.next_offset, follows
        )

    def _end_of(self, offset: int, header: _Header) -> _End | None:
        begin = header.payload_offset
        if self._limit(offset + 1) < begin:  # this header contains another one: it is damaged
            return None
        if header.descriptor is None:
            return self._stored_end(header)
        found = self._descriptors.get(begin)
        if found is None:
            return self._implied_end(begin, header.descriptor)
        end, crc = found >> 32, found & 0xFFFFFFFF
        return _End(end, crc, end + header.descriptor.size)

    def _stored_end(self, header: _Header) -> _End | None:
        """Return the end that the header states; None unless a ZIP structure or the end follows."""
        end = header.payload_offset + header.nbytes
        # A flipped bit in a header can look like this, but then no record follows.
        if end > self.nbytes or self._source.read(end, end + 2) not in (b"", b"PK"):
            return None
        return _End(end, header.crc, end)

    def _implied_end(self, begin: int, descriptor: struct.Struct) -> _End | None:
        """Return a payload's end if the descriptor before the next header fits it; else None."""
        limit = self._limit(begin)
        end = limit - descriptor.size
        if end < begin:
            return None
        crc = int.from_bytes(self._source.read(end + 4, end + 8), "little")
        return _End(end, crc, limit) if self.crc(begin, end) == crc else None

    def _limit(self, offset: int) -> int:
        """Return the offset of the first header from `offset` on; without one, the file's size."""
        following = self._next_header(offset)
        return self.nbytes if following is None else following

    def crc(self, begin: int, end: int) -> int:
        """Return the checksum of a part of the file."""
        crc = 0
        for offset in range(begin, end, _PIECE_NBYTES):
            crc = _C.crc32(self._source.read(offset, min(offset + _PIECE_NBYTES, end)), crc)
        return crc

    def storage_at(self, offset: int, name: str, nbytes: int, payload_offset: int) -> _Stored:
        """Look for a storage whose header is at `offset`, and whose size is `nbytes`.

        `payload_offset` is -1 if only the header gives the payload's offset.
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
        """Return two lists of names: all tensors, and undamaged tensors; empty without data.pkl."""
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
    """Return the local header at ``piece[at]``; None if it is cut off or contains a header."""
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
    """Return the archive's folder and records; a record in another folder counts as damaged."""
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
    """Reads a source forward in large pieces, and keeps the last piece for the next reads."""

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
    """Serves `entries_using` as a `RecordReader`; numbers stand for the records' offsets."""

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
