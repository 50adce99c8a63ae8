"""Reading parts of records into memory, from an archive that is local or far away."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from ptsave import _C, config
from ptsave.reading import RecordReader, raise_corrupt
from ptsave.sources import RemoteReader

__all__ = ["EngineSpans", "FetchedSpans", "Span", "SpanReader", "memory_of"]

MIB = 1 << 20
# What is asked for at once, and what is fetched in one request: some file systems make several at
# a time.
_BATCH_NBYTES = 64 * MIB
_REQUEST_NBYTES = 8 * MIB


@dataclass(frozen=True)
class Span:
    """A part of a record's payload, and the memory it belongs in.

    Attributes
    ----------
    record : int
        The number of the record.
    begin : int
        Where the part begins in the payload, in bytes.
    target : torch.Tensor
        Contiguous uint8 in CPU memory, as long as the part.
    """

    record: int
    begin: int
    target: Tensor


class SpanReader(Protocol):
    """Fills spans; safe for concurrent use.

    Attributes
    ----------
    max_gap : int
        How many bytes that nobody wants are read rather than skipped.
    """

    max_gap: int

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        """Fill the targets.

        Parameters
        ----------
        spans : sequence of Span
            If one is a whole record, it is the only one of that record.
        verify : bool or None
            Whether to compare checksums: None for whole records only, True for all, for which
            the whole records are read.
        """
        ...

    def check(self, records: Sequence[int]) -> None:
        """Compare records with their checksums."""
        ...


class EngineSpans:
    """A `SpanReader` for what the engine reads: files and memory.

    Parameters
    ----------
    reader : RecordReader
        The open archive.
    """

    max_gap = 16 << 10

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._engine = reader.engine
        self._can_verify = self._engine.storages_have_crcs

    def read(self, spans: Sequence[Span], *, verify: bool | None) -> None:
        whole, parts = _divide(self._engine, spans)
        verify = verify if self._can_verify else False
        try:
            if verify and parts:
                self._check([span.record for span in parts])
            if whole:
                targets = [span.target for span in whole]
                self._transfer([s.record for s in whole], targets, verify=verify is not False)
            records = {span.record for span in parts}
            offsets = {record: self._engine.payload_offset(record) for record in records}
            n_threads = config.current().n_readers
            for span in parts:
                begin = offsets[span.record] + span.begin
                self._engine.read_range(begin, span.target, n_threads=n_threads)
        except _C.FormatError as error:
            raise_corrupt(error, self._reader.path)

    def check(self, records: Sequence[int]) -> None:
        try:
            self._check(records)
        except _C.FormatError as error:
            raise_corrupt(error, self._reader.path)

    def _check(self, records: Sequence[int]) -> None:
        self._transfer(sorted(set(records)), [], verify=True)

    def _transfer(self, records: list[int], targets: list[Tensor], *, verify: bool) -> None:
        damaged = self._engine.read_records(
            records, targets, n_threads=config.current().n_readers, verify=verify
        )
        if damaged:
            raise self._reader.damage(damaged)


class FetchedSpans:
    """A `SpanReader` for an archive whose bytes have to be fetched.

    Parameters
    ----------
    reader : RemoteReader
        The open archive.
    """

    max_gap = 1 * MIB

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
        for batch in _batches(spans):
            self._fetch(batch)
        if verify is not False:
            for span in whole:
                self._compare(span.record, _C.crc32(memory_of(span.target)))

    def check(self, records: Sequence[int]) -> None:
        for record in sorted(set(records)):
            crc = 0
            nbytes = self._engine.record(record).nbytes
            piece = torch.empty(min(nbytes, _BATCH_NBYTES), dtype=torch.uint8)
            for begin in range(0, nbytes, _BATCH_NBYTES):
                part = piece[: min(_BATCH_NBYTES, nbytes - begin)]
                for batch in _batches([Span(record, begin, part)]):
                    self._fetch(batch)
                crc = _C.crc32(memory_of(part), crc)
            self._compare(record, crc)

    def _fetch(self, spans: Sequence[Span]) -> None:
        """Fetch spans and the local headers of their records, which may put them elsewhere."""
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
        try:
            offsets = {number: self._engine.payload_offset(number) for number in records}
        except _C.FormatError as error:
            raise_corrupt(error, self._reader.path)
        found = [_range_of(span, offsets[span.record]) for span in spans]
        if found != wanted:
            pieces = self._source.read(found)
        for span, piece in zip(spans, pieces, strict=True):
            memory_of(span.target)[:] = piece

    def _compare(self, record: int, crc: int) -> None:
        found = self._engine.record(record)
        if crc != found.crc:
            self._fail(found, crc)

    def _fail(self, record: _C.Record, crc: int) -> NoReturn:
        self._reader.fail(
            f"it is damaged: its CRC-32 is {crc:08x}, not {record.crc:08x}. Copy it again, or pass "
            "verify=False to read it as it is.",
            record.name,
        )


def _divide(engine: _C.Reader, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return the spans that are whole records, and the others."""
    whole: list[Span] = []
    parts: list[Span] = []
    for span in spans:
        is_whole = span.begin == 0 and len(span.target) == engine.record(span.record).nbytes
        (whole if is_whole else parts).append(span)
    return whole, parts


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the spans, the large ones cut, in groups of at most `_BATCH_NBYTES`."""
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
    """Return the bytes of a tensor, which has to outlive them; NumPy may not be there."""
    array = (ctypes.c_ubyte * len(target)).from_address(target.data_ptr())
    return memoryview(array).cast("B")
