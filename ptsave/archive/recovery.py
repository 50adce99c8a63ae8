"""Makes an archive whole that an `ArchiveWriter` has left unfinished, or that has lost its end.

Its records are those up to the last journal whose bytes are all there and right.  A journal is the
pickle of a dict; the entries of all of them, one behind the other, are `data.pkl`, but for those
that need a record that is damaged.  Nothing is written: the missing end of the file is in memory.
Hostile journals have no more power than a hostile `data.pkl`, which the restricted unpickler reads;
so has the directory, which is parsed as that of any file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from ptsave import _C
from ptsave.archive.cut import CutArchive, CutRecord
from ptsave.archive.opening import RECOVERY_ADVICE, open_source_archive
from ptsave.archive.surviving import without_entries
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.sources.ranges import RangeSource
from ptsave.support.user_warnings import warn_user

__all__ = [
    "JOURNAL_PREFIX",
    "Recovery",
    "dict_of_parts",
    "part_of_dict",
    "recover",
    "recovered",
]

JOURNAL_PREFIX = ".journal/"
_DATA = "data/"
_LOST = ".lost/"  # of bytes in which a record was
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_ZIP64 = 0xFFFFFFFF
_Found: TypeAlias = tuple[str, int, int, int, int]  # as `_C.closing_bytes` takes a record
_OTHER_RECORDS = {"data.pkl", "byteorder", "version", ".data/serialization_id"}
_MAX_DIGITS = 16
_N_NAMED = 8  # in a warning
_ALIGNMENT = 64  # of the records that are added, which are read like any other


class _CompletedFile(RangeSource):
    """The beginning of a file, with headers where there are none, and another end, in memory.

    Tensors are read from it when they are asked for, so the file is closed with the last reader.
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
    """Return the part of a dict's pickle that adds its entries; None if that is not what it is."""
    if not pickle.startswith(_C.DICT_HEAD) or not pickle.endswith(_C.STOP):
        return None
    return pickle[len(_C.DICT_HEAD) : -len(_C.STOP)]


def dict_of_parts(parts: list[bytes]) -> bytes:
    """Return the pickle of a dict with the entries that all these parts add."""
    return b"".join([_C.DICT_HEAD, *parts, _C.STOP])


@dataclass(frozen=True)
class Recovery:
    """Rest of an archive without its end.

    Attributes
    ----------
    source : RangeSource
        A whole archive, with the entries that can be read.
    storages, journals : sequence of str
        Names of damaged records: of storages that entries need, and of journals, whose entries are
        not known.
    entries : sequence of str
        Names of entries that need damaged records.
    n_records : int
        The records of the file that are whole and belong to it.
    """

    source: RangeSource
    storages: Sequence[str] = ()
    journals: Sequence[str] = ()
    entries: Sequence[str] = ()
    n_records: int = 0

    def damage(self) -> str:
        """Return a text about damaged records, and entries lost with them; empty if nothing is."""
        if not self.storages and not self.journals:
            return ""
        text = f"damaged: {_some([*self.storages, *self.journals])}"
        if self.entries:
            text += f"; without the entries {_some(self.entries)}"
        if self.journals:
            text += f"; what else was added with {_some(self.journals)} is not known"
        return text


def recovered(source: RangeSource) -> RangeSource:
    """Return the source of an archive that is whole: the given one, or with an end of its own.

    Entries that need damaged records are not in it, which a `CheckpointWarning` says.

    Raises
    ------
    CorruptCheckpointError
        If it has no end, and is none of an `ArchiveWriter` with any entries.
    """
    found = recover(source)
    if found is None:
        return source
    if damage := found.damage():
        warn_user(f"{source.name}: {damage}", CheckpointWarning)
    return found.source


def recover(source: RangeSource) -> Recovery | None:
    """Return the rest of an archive without its end; None if it is whole, or is none.

    Raises
    ------
    CorruptCheckpointError
        As of `recovered`.
    """
    if source.kind not in ("zip", None) or not source.nbytes:
        return None
    if source.kind is None:  # perhaps its first bytes are damaged
        return _recovery(source)
    try:
        open_source_archive(source, verify=False)
    except CorruptCheckpointError as error:
        found = _recovery(source)
        if found is None:
            reason = "nothing of it can be recovered, as no journal is whole"
            error.args = (str(error).replace(RECOVERY_ADVICE, reason),)
            raise error from None
        return found
    return None


def _recovery(source: RangeSource) -> Recovery | None:
    cut = CutArchive(source)
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
    lost: list[str] = []
    entries: list[str] = []
    lost_journals: list[str] = []
    before = cut.records[: cut.records.index(last) + 1]
    if before != records[: len(before)] or not all(record.follows for record in before):
        numbers = {record.name for record in records}
        try:
            data, entries, lost = without_entries(data, lambda n: f"{_DATA}{n}" in numbers)
        except ValueError as error:
            raise CorruptCheckpointError(f"{source.name}: {error}", path=source.name) from error
        lost_journals = [] if pickles else _missing(journals)
    finished = [
        record
        for record in records
        if record.header_offset <= last.header_offset
        and record.name.startswith((_DATA, JOURNAL_PREFIX))
    ]
    found: list[_Found] = []
    patches: dict[int, bytes] = {}
    at = 0
    for record in finished:
        if record.header_offset > at:
            place, header = _lost(cut, f"{_LOST}{len(patches)}", at, record.header_offset)
            found.append(place)
            patches[at] = header
        found.append((record.name, record.header_offset, record.nbytes, record.crc, record.end))
        at = record.end
    try:
        end = _C.closing_bytes(cut.root, _ALIGNMENT, found, data)
    except ValueError:  # a folder of a name that no archive can have
        return None
    storages = [f"{_DATA}{number}" for number in sorted(lost, key=lambda n: (len(n), n))]
    completed = _CompletedFile(source, at, end, patches)
    return Recovery(completed, storages, lost_journals, entries, len(finished))


def _lost(cut: CutArchive, name: str, begin: int, end: int) -> tuple[_Found, bytes]:
    """Return a record for bytes that no other one has, and its header.

    For archives have no gaps: where a payload begins is told from where the next record does.
    """
    full_name = f"{cut.root}/{name}".encode()
    front = _LOCAL_HEADER.size + len(full_name)
    descriptor_nbytes = 24 if max(begin, end - begin) >= _ZIP64 else 16
    payload = begin + front
    nbytes = max(end - payload - descriptor_nbytes, 0)
    flags, rest = (0x0808, b"") if nbytes else (0x0800, bytes(max(end - payload, 0)))
    header = _LOCAL_HEADER.pack(ZIP_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(full_name), len(rest))
    crc = cut.crc(payload, payload + nbytes)
    return (name, begin, nbytes, crc, end), header + full_name + rest


def _rightly_named(records: list[CutRecord]) -> list[CutRecord]:
    """Return the whole records whose names are theirs, of which there is no checksum.

    Storages and journals are numbered in the order of the file.
    """
    found = []
    last = {_DATA: -1, JOURNAL_PREFIX: -1}
    known = set(last)  # those of which it is clear which number is the next one
    for record in records:
        prefix, number = _series_of(record.name)
        if not record.follows:
            known.clear()
        is_right = record.name in _OTHER_RECORDS
        if prefix:
            is_right = number == last[prefix] + 1 if prefix in known else number > last[prefix]
        if not is_right:  # of which series it is nobody knows
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
    """Return the names of journals in front of the last one that are not there."""
    numbers = {_series_of(record.name)[1] for record in journals}
    missing = (i for i in range(max(numbers)) if i not in numbers)
    return [f"{JOURNAL_PREFIX}{i}" for i in islice(missing, _N_NAMED + 1)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _N_NAMED:,} more" if len(names) > _N_NAMED else ""
    return ", ".join(names[:_N_NAMED]) + more
