"""Reads parts of records into memory, from a local or remote archive."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.reader import RecordReader
from ptsave.errors import CorruptCheckpointError, bare_message
from ptsave.support import config
from ptsave.support.calls import ProgressCallback

if TYPE_CHECKING:
    from ptsave.archive.remote import RemoteReader
    from ptsave.sources.ranges import LocalFile

Range: TypeAlias = tuple[int, int, Tensor]  # number of the file, offset in it, target

MIB = 1 << 20
# Largest gap, in bytes, that is fetched rather than skipped.
MAX_FETCHED_GAP = 1 * MIB
# Largest gap that is read in a local file.
MAX_READ_GAP = 16 << 10
# Bytes of a batch, and of a request; some file systems send a batch's requests at the same time.
_BATCH_NBYTES = 64 * MIB
_REQUEST_NBYTES = 8 * MIB


class Span(NamedTuple):
    """A part of a record's payload, from byte `begin` on, and the memory it belongs in.

    `target` is contiguous uint8 in CPU memory.  Readers that `reach_devices` also fill targets on
    accelerators.
    """

    record: int
    begin: int
    target: Tensor


class Damage(NamedTuple):
    """A damaged record, and the offset of the damage in the archive, in bytes.

    `error` is the exception to raise if nothing can be added.  `crcs` is set if the checksums
    differ.
    """

    record: str
    offset: int
    reason: str
    error: Exception
    crcs: _C.DamagedRecord | None = None


class SpanReader(Protocol):
    """Fills spans; safe for concurrent use.

    `max_gap` is the largest unwanted gap, in bytes, that is read rather than skipped.
    `reach_devices` says that targets may be on accelerators, which are filled through page-locked
    memory.
    """

    max_gap: int
    reach_devices: bool

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        """Fill the targets; a span that is a whole record must be the only span of that record.

        `verify` None compares whole records with their checksums.  True compares all records, and
        reads the whole of each.
        """
        ...

    def check(self, records: Sequence[int]) -> None:
        """Compare records with their checksums; raises an error for the first damaged record."""
        ...


class ArchiveSpans(SpanReader, Protocol):
    """A `SpanReader` for an archive, whose records may have checksums."""

    def find_damage(self, records: Sequence[int], *, verify: bool) -> list[Damage]:
        """Read records, compare them with their checksums if asked, and return the damage."""
        ...


class EngineSpans:
    """`ArchiveSpans` for archives that the engine reads: files and memory."""

    max_gap = MAX_READ_GAP
    reach_devices = True

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._engine = reader.engine
        self._can_verify = self._engine.storages_have_crcs

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        whole, parts = _divide(self._engine, spans)
        verify = verify if self._can_verify else False
        with self._reader.opened():
            if verify and parts:
                self._check([span.record for span in parts])
            if whole:
                targets = [span.target for span in whole]
                self._transfer([s.record for s in whole], targets, verify=verify is not False)
            if parts:
                self._read_parts(parts)

    def _read_parts(self, parts: Sequence[Span]) -> None:
        records = {span.record for span in parts}
        offsets = {record: self._engine.payload_offset(record) for record in records}
        limits = self._reader.limits
        self._engine.read_ranges(
            [(offsets[span.record] + span.begin, span.target) for span in parts],
            n_threads=limits.n_readers,
            max_pinned_nbytes=limits.max_pinned_nbytes,
        )

    def check(self, records: Sequence[int]) -> None:
        with self._reader.opened():
            self._check(records)

    def find_damage(self, records: Sequence[int], *, verify: bool) -> list[Damage]:
        try:
            with self._reader.opened():
                damaged = self._engine.read_records(
                    list(records),
                    [],
                    n_threads=self._reader.limits.n_readers,
                    verify=verify,
                    max_pinned_nbytes=self._reader.limits.max_pinned_nbytes,
                )
        except (CorruptCheckpointError, OSError) as error:
            if len(records) > 1:  # the engine stops at the first error
                return [d for number in records for d in self.find_damage([number], verify=verify)]
            return [_damage_of(self._reader, records[0], error)]
        return [
            Damage(
                found.name,
                found.payload_offset,
                f"its CRC-32 is {found.actual_crc:08x}, not {found.expected_crc:08x}",
                CorruptCheckpointError(f"{self._reader.path}: record {found.name} is damaged"),
                found,
            )
            for found in damaged
        ]

    def _check(self, records: Sequence[int]) -> None:
        self._transfer(sorted(set(records)), [], verify=True)

    def _transfer(self, records: list[int], targets: list[Tensor], *, verify: bool) -> None:
        damaged = self._engine.read_records(
            records,
            targets,
            n_threads=self._reader.limits.n_readers,
            verify=verify,
            max_pinned_nbytes=self._reader.limits.max_pinned_nbytes,
        )
        if damaged:
            from ptsave.archive.damage import damage_of

            raise damage_of(self._reader, damaged)


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
        whole, parts = _divide(self._engine, spans)
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
        piece = torch.empty(min(nbytes, _BATCH_NBYTES), dtype=torch.uint8)
        for begin in range(0, nbytes, _BATCH_NBYTES):
            part = piece[: min(_BATCH_NBYTES, nbytes - begin)]
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
                damage.append(_damage_of(self._reader, number, error))
        return damage

    def _fetch(self, spans: Sequence[Span]) -> None:
        """Fetch spans and the local headers of their records; a header may move a span."""
        records = {span.record: self._engine.record(span.record) for span in spans}
        for record in records.values():
            if not record.stored or record.encrypted:
                self._reader.fail("it is compressed or encrypted", record.name)
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
            f"it is damaged: its CRC-32 is {crc:08x}, not {record.crc:08x}. Copy it again{advice}.",
            record.name,
            advice,
        )


def spans_of(reader: RecordReader) -> ArchiveSpans:
    """Return the reader of parts of an archive's records, for fetched or local bytes."""
    if not reader.is_fetched:
        return EngineSpans(reader)
    from ptsave.archive.remote import RemoteReader

    assert isinstance(reader, RemoteReader)
    return FetchedSpans(reader)


def range_files(files: Sequence[LocalFile], *, direct: bool = True) -> _C.RangeFiles:
    """Open local files for `read_ranges`; the engine keeps them open, also parked ones.

    `direct` false reads through the page cache, whatever the configuration allows.
    """
    limits = config.current()
    with ExitStack() as stack:
        opened = [stack.enter_context(file.opened()).for_engine for file in files]
        direct = direct and limits.direct_reads
        return _C.RangeFiles(opened, n_threads=limits.n_readers, direct=direct)


def read_ranges(
    files: _C.RangeFiles,
    ranges: Sequence[Range],
    progress: ProgressCallback | None = None,
    **options: int,
) -> None:
    """Fill tensors from ranges of files, by several threads."""
    limits = config.current()
    files.read(
        ranges,
        n_threads=limits.n_readers,
        max_pinned_nbytes=limits.max_pinned_nbytes,
        progress=progress,
        **options,
    )


def _damage_of(reader: RecordReader, number: int, error: Exception) -> Damage:
    record = reader.engine.record(number)
    at = record.header_offset
    if isinstance(error, CorruptCheckpointError) and error.finding:
        at = at if error.offset is None else error.offset
        return Damage(record.name, at, error.finding, error)
    return Damage(record.name, at, bare_message(error, reader.path), error)


def _divide(engine: _C.Reader, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return the spans that are whole records, and the others."""
    whole: list[Span] = []
    parts: list[Span] = []
    for span in spans:
        is_whole = span.begin == 0 and len(span.target) == engine.record(span.record).nbytes
        (whole if is_whole else parts).append(span)
    return whole, parts


def batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the spans in groups of at most `_BATCH_NBYTES`; large spans are cut."""
    batch: list[Span] = []
    nbytes = 0
    for span in spans:
        for begin in range(0, len(span.target), _REQUEST_NBYTES):
            target = span.target[begin : begin + _REQUEST_NBYTES]
            if nbytes + len(target) > _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(Span(span.record, span.begin + begin, target))
            nbytes += len(target)
    if batch:
        yield batch


def _range_of(span: Span, payload_offset: int) -> tuple[int, int]:
    begin = payload_offset + span.begin
    return begin, begin + len(span.target)


def memory_of(target: Tensor) -> memoryview:
    """Return the bytes of a tensor, which must outlive them; works without NumPy."""
    array = (ctypes.c_ubyte * len(target)).from_address(target.data_ptr())
    return memoryview(array).cast("B")
