"""Makes an archive whole that an `ArchiveWriter` has left unfinished.

Its records are those that end in front of the last journal whose bytes are all there and right.  A
journal is the pickle of a dict; the entries of all of them, one behind the other, are `data.pkl`.
Nothing is written: the missing end of the file is in memory.  Hostile journals have no more power
than a hostile `data.pkl`, which the restricted unpickler reads; so has the directory, which is
parsed as that of any file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptsave import _C
from ptsave.archive.cut import CutArchive, CutRecord
from ptsave.archive.opening import open_source_archive
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.ranges import RangeSource

__all__ = ["JOURNAL_PREFIX", "dict_of_parts", "part_of_dict", "recovered"]

JOURNAL_PREFIX = ".journal/"
_ALIGNMENT = 64  # of the records that are added, which are read like any other


class _CompletedFile(RangeSource):
    """The beginning of a file, and another end in memory.

    Tensors are read from it when they are asked for, so the file is closed with the last reader.
    """

    def __init__(self, source: RangeSource, nbytes: int, end: bytes) -> None:
        self.name = source.name
        self.nbytes = nbytes + len(end)
        self._source = source
        self._source_nbytes = nbytes
        self._end = end

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        limit = self._source_nbytes
        fronts = self._source.read([(min(begin, limit), min(end, limit)) for begin, end in ranges])
        return [
            front + self._end[max(begin - limit, 0) : max(end - limit, 0)]
            for front, (begin, end) in zip(fronts, ranges, strict=True)
        ]


def part_of_dict(pickle: bytes) -> bytes | None:
    """Return the part of a dict's pickle that adds its entries; None if that is not what it is."""
    if not pickle.startswith(_C.DICT_HEAD) or not pickle.endswith(_C.STOP):
        return None
    return pickle[len(_C.DICT_HEAD) : -len(_C.STOP)]


def dict_of_parts(parts: list[bytes]) -> bytes:
    """Return the pickle of a dict with the entries that all these parts add."""
    return b"".join([_C.DICT_HEAD, *parts, _C.STOP])


def recovered(source: RangeSource) -> RangeSource:
    """Return the source of an archive that is whole: the given one, or with an end of its own.

    Raises
    ------
    CorruptCheckpointError
        If it has no end, and is none of an `ArchiveWriter` with any entries.
    """
    if source.kind != "zip":
        return source
    try:
        open_source_archive(source, verify=False)
    except CorruptCheckpointError as error:
        completed = _completed(source)
        if completed is None:
            raise error from None
        return completed
    return source


def _completed(source: RangeSource) -> RangeSource | None:
    with CutArchive(source) as cut:
        records: list[CutRecord] = []
        parts: list[bytes] = []
        n_finished = 0
        for record in _whole(cut.records):
            records.append(record)
            if record.name == f"{JOURNAL_PREFIX}{len(parts)}":
                part = part_of_dict(cut.payload(record))
                if part is None:
                    break
                parts.append(part)
                n_finished = len(records)
    if not parts:
        return None
    finished = records[:n_finished]
    found = [(each.name, each.header_offset, each.nbytes, each.crc, each.end) for each in finished]
    try:
        end = _C.closing_bytes(cut.root, _ALIGNMENT, found, dict_of_parts(parts))
    except ValueError:  # a folder of a name that no archive can have
        return None
    return _CompletedFile(source, finished[-1].end, end)


def _whole(records: list[CutRecord]) -> Iterator[CutRecord]:
    for record in records:
        if not record.is_whole:
            return
        yield record
