"""Completes an archive that has lost its end, or that an `ArchiveWriter` has left unfinished.

Files of torch begin with `data.pkl`.  In files that grow, records count up to the last whole
journal.  A journal is the pickle of a dict; the entries of all journals, in order, are `data.pkl`.
Entries that need a damaged or missing record are left out.  The file is not written: its missing
end is made in memory.

Hostile journals can do no more than a hostile `data.pkl`, which the restricted unpickler reads.
The new directory is parsed like any other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import TypeAlias

from ptsave import _C
from ptsave.archive.cut import ZIP64, CutArchive, CutRecord
from ptsave.archive.opening import open_source_archive
from ptsave.archive.reader import SMALL_RECORDS
from ptsave.archive.surviving import SavedEntries
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.sources.ranges import RangeSource

JOURNAL_PREFIX = ".journal/"
_DATA = "data/"
_LOST = ".lost/"  # for ranges in which a record is lost
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_Found: TypeAlias = tuple[str, int, int, int, int]  # name, header's offset, size, CRC-32, end
_OTHER_RECORDS = {"data.pkl", *SMALL_RECORDS}
_MAX_DIGITS = 16
_N_NAMED = 8  # in a warning
_ALIGNMENT = 64  # of the records that are added


class CompletedFile(RangeSource):
    """The beginning of a file with headers patched in, and another end, in memory.

    Tensors are read from it on demand, so the last reader closes the file.
    """

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
    """Return the part of a dict's pickle that adds its entries; None for any other pickle."""
    if not pickle.startswith(_C.DICT_HEAD) or not pickle.endswith(_C.STOP):
        return None
    return pickle[len(_C.DICT_HEAD) : -len(_C.STOP)]


def dict_of_parts(parts: list[bytes]) -> bytes:
    """Return the pickle of a dict with the entries that all these parts add."""
    return b"".join([_C.DICT_HEAD, *parts, _C.STOP])


@dataclass(frozen=True)
class Recovery:
    """The rest of a file without its end: `source` is a whole file with the readable entries.

    `storages` and `journals` are the names of damaged or missing records: storages that entries
    need, and journals, whose entries are unknown.  `entries` are the names left out.  `n_records`
    counts the whole records that belong to the file.
    """

    source: RangeSource
    storages: Sequence[str] = ()
    journals: Sequence[str] = ()
    entries: Sequence[str] = ()
    n_records: int = 0

    def damage(self) -> str:
        """Return a text about the lost records and entries; empty if none are lost."""
        records = [*self.storages, *self.journals]
        parts = [f"damaged or missing: {_some(records)}"] if records else []
        if self.entries:
            parts.append(f"without the entries {_some(self.entries)}")
        if self.journals:
            parts.append(f"what else was added with {_some(self.journals)} is not known")
        return "; ".join(parts)


def recover_archive(source: RangeSource) -> Recovery | None:
    """Return the rest of an archive without its end; None if it is whole, or is no archive.

    `source` is not empty.  Its kind is an archive's, or None because its first bytes may be
    damaged.  Raises CorruptCheckpointError if nothing can be recovered.
    """
    if source.kind is None:
        return _recovery(source)
    hopeless = "nothing of it can be recovered, as neither data.pkl nor a journal is whole"
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
    """Return the rest of an archive that begins with its pickle.

    The pickle gives the size of each storage, so the place of each is known.  Bytes in a storage
    that look like an archive are therefore never taken for a record.
    """
    first = [*takewhile(lambda record: record.follows, cut.records[: len(_OTHER_RECORDS)])]
    small = {record.name: cut.payload(record) for record in first if record.is_whole}
    if small.get("byteorder", b"little") != b"little":
        raise ValueError("nothing of it can be recovered, as its byte order is another one")
    saved = SavedEntries(data)
    if min(saved.storages.values(), default=0) < 0:
        raise ValueError("nothing of it can be recovered, as a storage in it has no known size")
    text = small.get(".storage_alignment", b"")
    is_number = text.isdigit() and len(text) < _MAX_DIGITS and int(text) > 0
    alignment = int(text) if is_number else _ALIGNMENT
    by_text = sorted(saved.storages)
    by_number = sorted(by_text, key=len)
    found = [
        _storages_in(cut, order, saved.storages, record.end, alignment)
        for order in ([by_number] if by_number == by_text else [by_number, by_text])
        for record in first  # storages begin behind one of them; their names may be damaged
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
    """Return the whole storages of an archive that has them in an order, from an offset on.

    They lie where torch puts them or, in an archive of another program, where headers say.
    """
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
    """Return the rest of an archive that grew; None if no journal is whole."""
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
    """Return a recovery with a whole archive of these records, empty storages and a pickle.

    Raises ValueError if its folder has a name that no archive can have.
    """
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
    """Return a local header whose checksum and sizes are zero, or follow the payload."""
    fields = _LOCAL_HEADER.pack(ZIP_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(name), n_extra)
    return fields + name


def _lost(cut: CutArchive, name: str, begin: int, end: int) -> tuple[_Found, bytes]:
    """Return a record for bytes that belong to no other record, and its header.

    Archives must have no gaps: the next record's place tells where a payload begins.
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
    """Return the whole records whose names are right, because names have no checksum.

    Storages and journals are numbered in file order.
    """
    found = []
    last = {_DATA: -1, JOURNAL_PREFIX: -1}
    known = set(last)  # series whose next number is certain
    for record in records:
        prefix, number = _series_of(record.name)
        if not record.follows:
            known.clear()
        is_right = record.name in _OTHER_RECORDS
        if prefix:
            is_right = number == last[prefix] + 1 if prefix in known else number > last[prefix]
        if not is_right:  # unknown series
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
    """Return the names of the missing journals in front of the last one."""
    numbers = {_series_of(record.name)[1] for record in journals}
    missing = (i for i in range(max(numbers)) if i not in numbers)
    return [f"{JOURNAL_PREFIX}{i}" for i in islice(missing, _N_NAMED + 1)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_NAMED:,} more" if len(names) > _N_NAMED else ""
    return ", ".join(names[:_N_NAMED]) + more
