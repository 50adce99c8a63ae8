"""An archive that one rank of a process group reads for all ranks.

The reading rank sends the ZIP directory and all records except storages.  Each rank writes
these bytes to a sparse file in memory, opens the file with the engine, and unpickles the object
without the storages' bytes.  Then each rank asks for the storages that it needs: see
`GroupRecords`.  A storage that any rank needs is sent to all ranks, in file order, in chunks.
For example, while chunk 3 is read, chunk 2 is sent, and the ranks use chunk 1.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.damage import RecordDamage, damage_of, torchscript_error
from ptsave.archive.filling import verifies_storages
from ptsave.archive.loading import LoadOptions, rebuild, resolve_weights_only
from ptsave.archive.opening import open_source_archive, spans_of
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import Span, memory_of
from ptsave.archive.unpickling import unpickle_received
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.ranges import SparseFile, open_source
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, progress_bar
from ptsave.support.group_call import GroupCall, agree_on_file
from ptsave.support.torch_names import log_api_usage, restricted_unpickler

PART_ALIGNMENT = 64  # in bytes: a multiple of every element's size


def is_viewable(tensor: Tensor) -> bool:
    """Whether `StorageView` can copy a tensor's values; it cannot if the tensor is quantized."""
    return not tensor.is_quantized and _can_view(tensor.dtype)


@functools.cache
def _can_view(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        return False
    return PART_ALIGNMENT % dtype.itemsize == 0


@dataclass(frozen=True)
class StorageView:
    """Describes where a tensor's elements are in its storage, but does not keep the storage."""

    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]
    is_conj: bool  # the values are the conjugates of the stored ones
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Return the view of `tensor`; ``is_viewable(tensor)`` must be true."""
        offset = int(tensor.storage_offset())
        bits = (tensor.is_conj(), tensor.is_neg())
        return cls(tensor.dtype, offset, tuple(tensor.shape), tensor.stride(), *bits)

    def copy_part(self, target: Tensor, part: Tensor, begin: int) -> None:
        """Copy elements from `part`, which is a part of the storage, to their places in `target`.

        `target` has the view's shape, and any strides, dtype and device.  `part` is uint8.  `begin`
        is the byte offset of `part` in the storage, and must be a multiple of `PART_ALIGNMENT`.

        >>> view, target = StorageView.of(torch.empty(100, 2).t()), torch.zeros(2, 100)
        >>> view.copy_part(target, torch.ones(16, dtype=torch.float32).view(torch.uint8), 64)
        >>> target.sum(1), target[0].nonzero().flatten()
        (tensor([8., 8.]), tensor([ 8,  9, 10, 11, 12, 13, 14, 15]))
        """
        if target.numel() == 0:
            return
        itemsize = self.dtype.itemsize
        elements = part[: len(part) // itemsize * itemsize].view(self.dtype)
        first = begin // itemsize
        self._copy(target.detach(), elements, self.offset - first, self.shape, self.stride)

    def _copy(
        self, target: Tensor, elements: Tensor, at: int, shape: Sequence[int], stride: Sequence[int]
    ) -> None:
        """Copy a view's values that are in `elements`; the view begins at `at`, maybe below 0."""
        ends = [(n - 1) * step for n, step in zip(shape, stride, strict=True)]
        last = at + sum(ends)
        if last < 0 or at >= len(elements):
            return
        if at >= 0 and last < len(elements):
            where = elements.storage_offset() + at
            values = elements.as_strided(shape, stride, where)
            values = values.conj() if self.is_conj else values
            target.copy_(values.neg() if self.is_neg else values)
            return
        dim = max(range(len(shape)), key=lambda i: stride[i] if shape[i] > 1 else -1)
        step, extent = stride[dim], last - at - ends[dim]
        # `touched`: indices in `dim` that overlap `elements`; `begin` to `end` are fully inside.
        touched = range(-((at + extent) // step), (len(elements) - 1 - at) // step + 1)
        touched = range(max(touched.start, 0), min(touched.stop, shape[dim]))
        begin = max(-(at // step), touched.start)
        end = min((len(elements) - 1 - at - extent) // step + 1, touched.stop)
        rest = [*shape[:dim], *shape[dim + 1 :]], [*stride[:dim], *stride[dim + 1 :]]
        for i in touched:
            if begin <= i < end:
                continue
            self._copy(target.select(dim, i), elements, at + i * step, *rest)
        if begin < end:
            box = [*shape[:dim], end - begin, *shape[dim + 1 :]]
            there = target.narrow(dim, begin, end - begin)
            self._copy(there, elements, at + begin * step, box, stride)


CHUNK_NBYTES = 8 << 20
# One buffer is filled, one is sent, and one is used: 24 MiB.
_N_BUFFERS = 3
# A chunk begins with a head, which says whether reading the chunk failed.  The head fills a cache
# line, so the bytes behind it stay aligned.
_HEAD_NBYTES = 64
_FAILED = 1

# Three barriers, in this order: all ranks have checked their targets, all ranks have planned where
# the bytes belong, and all ranks have received the bytes.
CHECKED, PLANNED, ENDED = range(3)

# A function that takes bytes for this rank: (record's number, offset in the record, bytes).
Take = Callable[[int, int, Tensor], None]


class GroupRecord(NamedTuple):
    """A record's size, place and CRC-32, known to all ranks; `place` sets the order of sending."""

    nbytes: int
    place: int
    crc: int | None


class _Part(NamedTuple):
    """A part of a record in a chunk; its offset is `begin` in the record, and `at` in the chunk."""

    record: int
    begin: int
    nbytes: int
    at: int


class GroupRecords:
    """The records that a group's ranks receive; each rank makes one instance.

    `read` fills spans without verifying them; it is None on ranks that do not read.  `damaged`
    returns the error for a wrong checksum.  `progress` gets the number of bytes sent so far.
    """

    def __init__(
        self,
        call: GroupCall,
        n_records: int,
        record: Callable[[int], GroupRecord],
        read: Callable[[Sequence[Span]], None] | None,
        damaged: Callable[[int, int], Exception],
    ) -> None:
        self.progress: ProgressCallback | None = None
        self._nbytes_done = 0
        self._call = call
        self._n_records = n_records
        self._record = record
        self._read = read
        self._damaged = damaged

    def receive(self, records: Collection[int], take: Take, *, verify: bool) -> None:
        """Receive records now, while other ranks may wait at a barrier.

        With `verify`, records are compared with their checksums.  A record of up to 8 MiB is
        compared before `take` gets its first bytes, a larger one before `take` gets its last bytes.
        """
        records = frozenset(records)
        for wanted in self._rounds(None, records):
            self._transfer(wanted, records, take, verify=verify)

    def wait(self, barrier: int) -> None:
        """Wait until all ranks reach a barrier; meanwhile, take part in other ranks' transfers."""
        for wanted in self._rounds(barrier, ()):
            self._transfer(wanted, (), lambda *_: None, verify=False)

    def _rounds(self, barrier: int | None, records: Collection[int]) -> Iterator[set[int]]:
        """Yield each transfer's records until all ranks reach `barrier`; for None, only once."""
        while True:
            states = self._call.agree((barrier, _bits(records, self._n_records)))
            urgent = [bits for at, bits in states if at is None]
            if urgent:
                yield {i for i in range(self._n_records) if any(bits[i] for bits in urgent)}
            if barrier is None or (not urgent and barrier == min(at for at, _ in states)):
                return

    def _transfer(
        self, wanted: Collection[int], own: Collection[int], take: Take, *, verify: bool
    ) -> None:
        """Send the `wanted` records to all ranks; `take` gets the bytes of the records in `own`."""
        chunks = list(_chunks(self._record, wanted))
        sizes = [parts[-1].at + parts[-1].nbytes for parts in chunks]

        def read(k: int, memory: Tensor) -> None:
            assert self._read is not None
            self._read([Span(p.record, p.begin, memory[p.at : p.at + p.nbytes]) for p in chunks[k]])

        error: Exception | None = None
        crc = 0  # of the parts so far, if a record is in several chunks
        for parts, chunk in zip(chunks, _received_chunks(self._call, sizes, read), strict=True):
            try:
                mine = [] if error is not None else [part for part in parts if part.record in own]
                in_memory = chunk.cpu() if verify and mine else chunk
                for part in mine:
                    where = slice(part.at, part.at + part.nbytes)
                    record = self._record(part.record)
                    if verify and record.crc is not None:
                        crc = _C.crc32(memory_of(in_memory[where]), crc if part.begin else 0)
                        is_last = part.begin + part.nbytes == record.nbytes
                        if is_last and crc != record.crc:
                            raise self._damaged(part.record, crc)
                    take(part.record, part.begin, chunk[where])
            except Exception as failure:  # the other ranks still get their bytes
                error = failure
            self._nbytes_done += len(chunk)
            if self.progress is not None:
                self.progress(self._nbytes_done)
        self._call.agree(None, error)


def _bits(records: Collection[int], n_records: int) -> bytes:
    flags = bytearray(n_records)
    for record in records:
        flags[record] = 1
    return bytes(flags)


def _chunks(
    record_of: Callable[[int], GroupRecord], records: Collection[int]
) -> Iterator[list[_Part]]:
    """For each chunk, yield a list of its parts; a record that fits into a chunk has one part."""
    parts: list[_Part] = []
    at = 0
    wanted = sorted((record_of(i).place, i) for i in records)
    for _, record in wanted:
        nbytes, begin = record_of(record).nbytes, 0
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


# ------------------------------------------------------------------------------------ chunks


def _received_chunks(
    call: GroupCall, sizes: Sequence[int], read: Callable[[int, Tensor], None]
) -> Iterator[Tensor]:
    """Yield each chunk as a uint8 tensor on the group's device; all ranks get the same bytes.

    Collective: each rank must take all chunks.  A chunk is valid until the caller takes the next
    chunk.  The reading rank calls `read` in a thread, with a chunk's number and the chunk's memory.
    If `read` fails, all ranks raise an error.
    """
    if not sizes:
        return
    nbytes = _HEAD_NBYTES + max(sizes)
    n_read = min(_N_BUFFERS, len(sizes)) if call.is_reader else 0
    memory = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(n_read)]
    buffers = memory
    if not call.is_reader or call.device.type != "cpu":
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device=call.device) for _ in range(2)]
    pool = ThreadPoolExecutor(1, "ptsave-group")
    reads: dict[int, Future[None]] = {}
    error: Exception | None = None

    def part_of(several: list[Tensor], k: int) -> Tensor:
        return several[k % len(several)][: _HEAD_NBYTES + sizes[k]]

    def begin_read(k: int) -> None:
        if k < len(sizes):
            reads[k] = pool.submit(read, k, part_of(memory, k)[_HEAD_NBYTES:])

    def begin_send(k: int) -> Any:
        nonlocal error
        buffer = part_of(buffers, k)
        if call.is_reader:
            chunk = part_of(memory, k)
            chunk[0] = 0
            try:
                reads.pop(k).result()
            except Exception as failure:
                error = failure
                chunk[0] = _FAILED
            if buffers is not memory:
                buffer.copy_(chunk)
        return call.broadcast(buffer)

    try:
        for k in range(n_read):
            begin_read(k)
        with call.exchanging("read"):
            work = begin_send(0)
        for k in range(len(sizes)):
            with call.exchanging("read"):
                if work is not None:
                    work.wait()
                chunk = part_of(buffers, k)
                failed = int(chunk[0]) == _FAILED
                if not failed and k + 1 < len(sizes):
                    work = begin_send(k + 1)
            if failed:
                call.agree(None, error)
            yield chunk[_HEAD_NBYTES:]
            if call.is_reader:
                begin_read(k + n_read)
    finally:
        pool.shutdown(cancel_futures=True)


class ReceivedReader(RecordReader):
    """A `RecordReader` of an archive whose storages are missing; `outline` has all other bytes."""

    def __init__(self, outline: Outline, path: str, *, verify: bool) -> None:
        self._file = SparseFile(outline.nbytes)
        for offset, piece in outline.pieces:
            self._file.write(offset, piece)
        engine = _C.Reader.open_descriptor(
            self._file.descriptor, 0, os.fsencode(path), direct=False
        )
        super().__init__(engine, path, config.current(), verify=verify)

    def get_record_offset(self, name: str) -> int:
        return self.engine.record(self._find(name)).payload_offset

    def close(self) -> None:
        super().close()
        self._file.close()


class Outline(NamedTuple):
    """The size of an archive, and its bytes outside storages as pairs (offset, bytes)."""

    nbytes: int
    pieces: list[tuple[int, bytes]]

    @classmethod
    def of(cls, reader: RecordReader) -> Outline:
        """Return the outline of an open archive."""
        engine = reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        ranges = []
        end = 0
        for i, record in enumerate(engine.records()):
            end = max(end, record.limit)
            if i in others:
                reader.get_record(record.name)  # fetched if necessary, and verified
                ranges.append((record.header_offset, record.limit))
        ranges.append((end, engine.nbytes))
        return cls(engine.nbytes, [(a, reader.read_at(a, b - a)) for a, b in ranges])

    def digest(self) -> bytes:
        """Return a hash to compare the outlines of two files."""
        found = hashlib.sha256(str(self.nbytes).encode())
        for offset, piece in self.pieces:
            found.update(str(offset).encode())
            found.update(piece)
        return found.digest()


class GroupArchive(GroupRecords):
    """An archive that a group receives; `source` is None on ranks that do not read the file."""

    def __init__(
        self, call: GroupCall, reader: ReceivedReader, source: RecordReader | None
    ) -> None:
        self.reader = reader
        read = None if source is None else partial(spans_of(source).read, verify=False)
        n_records = len(reader.engine.records())
        super().__init__(call, n_records, self._record_of, read, self._error_of)

    def storages(self) -> list[int]:
        """Return the numbers of the records that are storages."""
        engine = self.reader.engine
        others = {engine.find(name) for name in engine.other_names()}
        return [i for i in range(len(engine.records())) if i not in others]

    def _record_of(self, number: int) -> GroupRecord:
        record = self.reader.engine.record(number)
        return GroupRecord(record.nbytes, record.header_offset, record.crc)

    def _error_of(self, number: int, crc: int) -> Exception:
        record = self.reader.engine.record(number)
        damage = RecordDamage(record.name, record.payload_offset, record.crc, crc)
        return damage_of(self.reader, [damage])


# ------------------------------------------------------------------------------------ opening


@contextmanager
def group_archive(
    f: Any, group: Any, *, verify: bool, storage_options: Any = None
) -> Iterator[GroupArchive]:
    """Open an archive that one rank reads, or one rank per host if all hosts see the file.

    Collective: if the block raises on one rank, all ranks raise and leave the block together.  `f`
    is a path or URL, the same on all ranks.  Raises UnsupportedSourceError if the file is not an
    archive, or if only torch's loader can read the archive.
    """
    call = GroupCall(group)
    source: RecordReader | None = None
    with call.failing_together():
        agree_on_file(call, f)
    try:
        outline: Outline | None = None
        with call.failing_together():
            if call.is_reader:
                source = _opened(f, verify, storage_options)
                outline = Outline.of(source)
            call.agree_on_contents(outline.digest if outline is not None else bytes)
        reader = ReceivedReader(call.send(outline), call.name, verify=verify)
        try:
            archive = GroupArchive(call, reader, source)
            with call.failing_together():
                yield archive
                archive.wait(ENDED)
        finally:
            reader.close()
    finally:
        if source is not None:
            source.close()


_OTHERS = (
    "load_model(process_group=...) also takes safetensors files and directories of shards; "
    "without process_group, every rank loads the files by itself"
)


def _opened(f: Any, verify: bool, storage_options: Any) -> RecordReader:
    try:
        source = open_source(f, storage_options)
    except IsADirectoryError as error:
        words = f"{error.strerror}; with process_group, this call takes one .pt file. {_OTHERS}"
        raise IsADirectoryError(errno.EISDIR, words, error.filename) from None
    with source.closed_on_error():
        if source.kind != "zip":
            raise UnsupportedSourceError(
                f"{source.name}: with process_group, this call takes a .pt file of torch 1.6 or "
                f"later. {_OTHERS}"
            )
        reader = open_source_archive(source, verify=verify)
        if reader.engine.find("constants.pkl") is not None:
            raise torchscript_error(reader.path)
        if not reader.engine.all_stored:
            raise UnsupportedSourceError(
                f"{source.name} is compressed, and with process_group, this call does not take "
                "compressed archives: load the file without process_group"
            )
    return reader


# ----------------------------------------------------------------------------------- loading


def load_by_group(
    f: Any, options: LoadOptions, storage_options: Mapping[str, Any] | None, group: Any
) -> Any:
    """Load an archive on all ranks of a group, as :func:`ptsave.load` does."""
    with group_archive(f, group, verify=options.verify, storage_options=storage_options) as archive:
        return load_received(archive, options)


def load_received(archive: GroupArchive, options: LoadOptions, *, waits: bool = True) -> Any:
    """Load an archive that the ranks of a group receive.

    With `waits`, the bytes are sent after all ranks have planned where the bytes belong, so the
    file is read only once.  A rank that needs the bytes to check its targets passes False.
    """
    reader = archive.reader
    if options.maps:
        raise UnsupportedSourceError(
            f"{reader.path}: mmap=True maps the file, but with process_group the ranks receive its "
            "bytes: pass only one of the two"
        )
    restricted = resolve_weights_only(options.weights_only, options.pickle_module)
    module = restricted_unpickler if restricted else options.pickle_module or pickle
    reader.allows_values = options.wants_state
    log_api_usage("torch.load")
    with progress_bar(options.progress, "loading", reader.engine.nbytes) as archive.progress:
        unpickle = partial(unpickle_received, receive=partial(_receive, archive, waits))
        return rebuild(reader, options, module, unpickle)


def _receive(
    archive: GroupArchive,
    waits: bool,
    own: set[int],
    placed: Mapping[int, torch.UntypedStorage],
) -> None:
    """Receive and verify all storages; keep the bytes of the records in `own` and `placed`."""
    engine = archive.reader.engine

    def take(record: int, begin: int, part: Tensor) -> None:
        if record in placed:
            storage = placed[record]
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        elif record in own:
            target = engine.storage(record)
        else:
            return
        target[begin : begin + len(part)].copy_(part)

    if waits:
        archive.wait(PLANNED)
    archive.receive(archive.storages(), take, verify=verifies_storages(archive.reader))
