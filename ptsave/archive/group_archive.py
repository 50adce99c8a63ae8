"""An archive that one rank of a process group reads: all ranks receive its bytes.

The reading rank sends the directory and all records but the storages; each rank puts them into a
sparse file in memory, which the engine opens, and unpickles by itself, without bytes.  Then the
ranks say which storages they want.  Those that any of them wants go around in the order of the
file, in chunks: the next is read while one is on its way and the one before is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ptsave import _C
from ptsave.archive.checks import torchscript_error
from ptsave.archive.damage import RecordDamage, damage_of
from ptsave.archive.format_errors import raise_corrupt
from ptsave.archive.opening import open_source_archive
from ptsave.archive.part_copies import PART_ALIGNMENT
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import Span, memory_of, spans_of
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.opening import open_source
from ptsave.sources.ranges import SparseFile
from ptsave.support import config
from ptsave.support.group_call import GroupCall
from ptsave.support.group_chunks import CHUNK_NBYTES, received_chunks

__all__ = ["CHECKED", "PLANNED", "GroupArchive", "group_archive"]

# Barriers, in this order: no rank goes on before all have checked their targets, know where the
# bytes belong, and have them.
CHECKED, PLANNED, _ENDED = range(3)

# Takes bytes of a record that this rank has asked for: its number, their offset, and they.
Take = Callable[[int, int, Tensor], None]


class ReceivedReader(RecordReader):
    """A `RecordReader` of an archive whose storages are not there.

    Parameters
    ----------
    outline : Outline
        The rest of it.
    path : str
        Its name in messages.
    verify : bool
        Whether checksums are compared.
    """

    def __init__(self, outline: Outline, path: str, *, verify: bool) -> None:
        self._file = SparseFile(outline.nbytes)
        for offset, piece in outline.pieces:
            self._file.write(offset, piece)
        try:
            engine = _C.Reader.open_descriptor(
                self._file.descriptor, 0, os.fsencode(path), direct=False
            )
        except _C.FormatError as error:
            raise_corrupt(error, path)
        super().__init__(engine, path, config.current(), verify=verify)

    def get_record_offset(self, name: str) -> int:
        return self.engine.record(self._find(name)).payload_offset

    def close(self) -> None:
        super().close()
        self._file.close()


class Outline(NamedTuple):
    """The bytes of an archive that are no storage's.

    Attributes
    ----------
    nbytes : int
        The size of the file.
    pieces : list of (int, bytes)
        Parts of it, by their offsets.
    """

    nbytes: int
    pieces: list[tuple[int, bytes]]

    @classmethod
    def of(cls, reader: RecordReader) -> Outline:
        """Return that of an open archive."""
        engine = reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        ranges = []
        end = 0
        for i, record in enumerate(engine.records()):
            end = max(end, record.limit)
            if i in others:
                reader.get_record(record.name)  # fetched, if it has to be, and verified
                ranges.append((record.header_offset, record.limit))
        ranges.append((end, engine.nbytes))
        return cls(engine.nbytes, [(a, reader.read_at(a, b - a)) for a, b in ranges])


class _Part(NamedTuple):
    """Bytes of a record in a chunk.

    Attributes
    ----------
    record : int
        The number of the record.
    begin, nbytes : int
        The bytes, in the record.
    at : int
        Their offset in the chunk.
    """

    record: int
    begin: int
    nbytes: int
    at: int


class GroupArchive:
    """An archive that is being received by the ranks of a group, seen from one of them.

    Parameters
    ----------
    call : GroupCall
        The call of all ranks.
    reader : ReceivedReader
        The archive.
    source : RecordReader or None
        The file, on the rank that reads it.
    """

    def __init__(
        self, call: GroupCall, reader: ReceivedReader, source: RecordReader | None
    ) -> None:
        self.reader = reader
        self._call = call
        self._spans = None if source is None else spans_of(source)
        self._nbytes_done = 0

    def storages(self) -> list[int]:
        """Return the records that are storages."""
        engine = self.reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        return [i for i in range(len(engine.records())) if i not in others]

    def receive(self, records: Collection[int], take: Take, *, verify: bool) -> None:
        """Receive records now, while others may wait at a barrier; errors as of `wait`.

        Parameters
        ----------
        records : collection of int
            What this rank wants.
        take : callable
            Given the number of a record, the offset of a part of it, and that.
        verify : bool
            Whether they are compared with their checksums.  A record of up to 8 MiB is before any
            of it is taken.
        """
        for wanted in self._rounds(None, records):
            self._transfer(wanted, records, take, verify=verify)

    def wait(self, barrier: int) -> None:
        """Wait until all ranks have come to a barrier; what others receive meanwhile passes by.

        Raises
        ------
        Exception
            A rank has failed, or reading the file has.
        """
        for wanted in self._rounds(barrier, ()):
            self._transfer(wanted, (), _ignore, verify=False)

    def _rounds(self, barrier: int | None, records: Collection[int]) -> Iterator[set[int]]:
        """Yield the records that are transferred, until this rank may go on."""
        n_records = len(self.reader.engine.records())
        while True:
            states = self._call.agree((barrier, _bits(records, n_records)))
            urgent = [bits for at, bits in states if at is None]
            if urgent:
                yield {i for i in range(n_records) if any(bits[i] for bits in urgent)}
            if barrier is None or (not urgent and barrier == min(at for at, _ in states)):
                return

    def _transfer(
        self, wanted: Collection[int], own: Collection[int], take: Take, *, verify: bool
    ) -> None:
        """Let each rank take the bytes of its own records among those that are wanted by any."""
        chunks = list(_chunks(self.reader.engine, sorted(wanted)))
        sizes = [parts[-1].at + parts[-1].nbytes for parts in chunks]
        taker = _Taker(self.reader, frozenset(own), take, verify=verify)

        def read(k: int, memory: Tensor) -> None:
            assert self._spans is not None
            parts = chunks[k]
            spans = [Span(p.record, p.begin, memory[p.at : p.at + p.nbytes]) for p in parts]
            self._spans.read(spans, verify=False)

        for parts, chunk in zip(chunks, received_chunks(self._call, sizes, read), strict=True):
            taker.take(parts, chunk)
            self._nbytes_done += len(chunk)
            if self.reader.progress is not None:
                self.reader.progress(self._nbytes_done)
        self._call.agree(None, taker.error)


class _Taker:
    """Verifies the bytes that this rank wants, and hands them on.

    After an error it goes on without using anything, because the other ranks need theirs.
    """

    def __init__(
        self, reader: RecordReader, records: frozenset[int], take: Take, *, verify: bool
    ) -> None:
        self.error: Exception | None = None
        self._reader, self._records, self._hand_on = reader, records, take
        self._verify = verify
        self._crc = 0

    def take(self, parts: list[_Part], chunk: Tensor) -> None:
        if self.error is not None:
            return
        try:
            in_memory = chunk.cpu() if self._verify else chunk
            for part in parts:
                if part.record in self._records:
                    if self._verify:
                        self._check(part, in_memory)
                    where = slice(part.at, part.at + part.nbytes)
                    self._hand_on(part.record, part.begin, chunk[where])
        except Exception as error:
            self.error = error

    def _check(self, part: _Part, chunk: Tensor) -> None:
        payload = memory_of(chunk[part.at : part.at + part.nbytes])
        self._crc = _C.crc32(payload, self._crc if part.begin else 0)
        record = self._reader.engine.record(part.record)
        if part.begin + part.nbytes == record.nbytes and self._crc != record.crc:
            offset = record.payload_offset
            raise damage_of(
                self._reader, [RecordDamage(record.name, offset, record.crc, self._crc)]
            )


def _ignore(record: int, begin: int, part: Tensor) -> None:
    """Take no bytes."""


def _bits(records: Collection[int], n_records: int) -> bytes:
    flags = bytearray(n_records)
    for record in records:
        flags[record] = 1
    return bytes(flags)


def _chunks(engine: _C.Reader, records: list[int]) -> Iterator[list[_Part]]:
    """Yield what is in each chunk; a record that fits into one is not divided."""
    parts: list[_Part] = []
    at = 0
    for record in sorted(records, key=lambda i: engine.record(i).header_offset):
        nbytes, begin = engine.record(record).nbytes, 0
        while begin < nbytes:
            n = min(nbytes - begin, CHUNK_NBYTES)
            if at + n > CHUNK_NBYTES:
                yield parts
                parts, at = [], 0
            parts.append(_Part(record, begin, n, at))
            begin += n
            at += -(-n // PART_ALIGNMENT) * PART_ALIGNMENT
    if parts:
        yield parts


# ------------------------------------------------------------------------------------ opening


@contextmanager
def group_archive(
    f: Any, group: Any, *, verify: bool, storage_options: Any = None
) -> Iterator[GroupArchive]:
    """Open an archive that one rank of a group reads.

    Collective: an exception in the block is raised on all ranks, which leave it together.

    Parameters
    ----------
    f : str or os.PathLike
        The path or URL of the file, the same on all ranks.
    group : torch.distributed.ProcessGroup
        The ranks.
    verify : bool
        Whether checksums are compared.
    storage_options : mapping, optional
        Arguments of the file system of a URL.

    Raises
    ------
    Exception
        The file cannot be opened, or the ranks ask for different ones.
    UnsupportedSourceError
        It is no archive, or of a kind that only torch reads.
    """
    call = GroupCall(group)
    source: RecordReader | None = None
    with call.failing_together():
        _agree_on_file(call, f)
    try:
        outline = None
        with call.failing_together():
            if call.is_reader:
                source = _opened(f, verify, storage_options)
                outline = Outline.of(source)
            call.agree(None)
        reader = ReceivedReader(call.send(outline), call.name, verify=verify)
        try:
            archive = GroupArchive(call, reader, source)
            with call.failing_together():
                yield archive
                archive.wait(_ENDED)
        finally:
            reader.close()
    finally:
        if source is not None:
            source.close()


def _agree_on_file(call: GroupCall, f: Any) -> None:
    if not isinstance(f, (str, os.PathLike)):
        raise UnsupportedSourceError(
            f"process_group is for a path or a URL, not {type(f).__name__}: one rank reads it for "
            "all, so pass the same path on all ranks"
        )
    call.name = os.fsdecode(f)
    names = call.agree(call.name)
    if len(set(names)) > 1:
        rank = next(i for i, name in enumerate(names) if name != names[0])
        raise ValueError(
            f"{names[0]}: the ranks of process_group ask for different files: rank {rank} for "
            f"{names[rank]}"
        )


def _opened(f: Any, verify: bool, storage_options: Any) -> RecordReader:
    source = open_source(f, storage_options)
    with source.closed_on_error():
        if source.kind != "zip":
            raise UnsupportedSourceError(
                f"{source.name}: process_group is for one archive of torch.save, of torch 1.6 or "
                "later: every rank can load this file by itself, without process_group"
            )
        reader = open_source_archive(source, verify=verify)
        if reader.engine.find("constants.pkl") is not None:
            raise torchscript_error(reader.path)
        if not reader.engine.all_stored:
            raise UnsupportedSourceError(
                f"{source.name}: process_group is for archives as torch.save writes them, and this "
                "one is compressed: load it without process_group"
            )
    return reader
