"""Records of files that one rank of a process group reads and sends to all ranks.

Each rank says which records it wants.  The records that any rank wants are sent in file order, in
chunks: one chunk is read while the chunk before is sent and the one before that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.part_copies import PART_ALIGNMENT
from ptsave.archive.spans import Span, memory_of
from ptsave.support.calls import ProgressCallback
from ptsave.support.group_call import GroupCall

CHUNK_NBYTES = 8 << 20
# One buffer is filled, one is sent, and one is used: 24 MiB.
_N_BUFFERS = 3
# In front of each chunk: whether reading it failed.  A cache line keeps the bytes aligned.
_HEAD_NBYTES = 64
_FAILED = 1

# Barriers, in this order.  All ranks have checked their targets, know where the bytes belong, and
# have the bytes, before any rank goes on.
CHECKED, PLANNED, ENDED = range(3)

# Takes bytes that this rank wants: the record's number, their offset in it, and the bytes.
Take = Callable[[int, int, Tensor], None]


class GroupRecord(NamedTuple):
    """A record, as all ranks know it; records are sent in the order of `place`."""

    nbytes: int
    place: int
    crc: int | None


class _Part(NamedTuple):
    """The bytes of a record in a chunk: `begin` is in the record, `at` in the chunk."""

    record: int
    begin: int
    nbytes: int
    at: int


class GroupRecords:
    """Records that the ranks of a group are receiving, seen from one rank.

    `read` fills spans without verifying them, on the rank that reads, and is None on the others.
    `damaged` returns the error for a record by its number and its wrong checksum.  `progress` gets
    the number of bytes sent.
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

        `verify` compares records with their checksums.  A record of up to 8 MiB is compared before
        `take` gets any of its bytes.
        """
        records = frozenset(records)
        for wanted in self._rounds(None, records):
            self._transfer(wanted, records, take, verify=verify)

    def wait(self, barrier: int) -> None:
        """Wait until all ranks reach a barrier; meanwhile bytes for other ranks are passed on.

        Raises an error if any rank, or reading the file, has failed.
        """
        for wanted in self._rounds(barrier, ()):
            self._transfer(wanted, (), lambda *_: None, verify=False)

    def _rounds(self, barrier: int | None, records: Collection[int]) -> Iterator[set[int]]:
        """Yield the records to transfer, until this rank may go on; without a barrier, at once."""
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
        """Transfer the records that any rank wants, and take this rank's own bytes.

        After an error this rank ignores further bytes, but the others still get theirs.
        """
        chunks = list(_chunks(self._record, wanted))
        sizes = [parts[-1].at + parts[-1].nbytes for parts in chunks]

        def read(k: int, memory: Tensor) -> None:
            assert self._read is not None
            self._read([Span(p.record, p.begin, memory[p.at : p.at + p.nbytes]) for p in chunks[k]])

        error: Exception | None = None
        crc = 0  # of the bytes so far of a record that several chunks have
        for parts, chunk in zip(chunks, _received_chunks(self._call, sizes, read), strict=True):
            try:
                mine = [] if error is not None else [part for part in parts if part.record in own]
                in_memory = chunk.cpu() if verify and mine else chunk
                for part in mine:
                    where = slice(part.at, part.at + part.nbytes)
                    if verify and self._record(part.record).crc is not None:
                        crc = _C.crc32(memory_of(in_memory[where]), crc if part.begin else 0)
                        self._check(part, crc)
                    take(part.record, part.begin, chunk[where])
            except Exception as failure:
                error = failure
            self._nbytes_done += len(chunk)
            if self.progress is not None:
                self.progress(self._nbytes_done)
        self._call.agree(None, error)

    def _check(self, part: _Part, crc: int) -> None:
        """Raise if a part ends its record, and the checksum `crc` differs from the record's."""
        record = self._record(part.record)
        if part.begin + part.nbytes == record.nbytes and crc != record.crc:
            raise self._damaged(part.record, crc)


def _bits(records: Collection[int], n_records: int) -> bytes:
    flags = bytearray(n_records)
    for record in records:
        flags[record] = 1
    return bytes(flags)


def _chunks(
    record_of: Callable[[int], GroupRecord], records: Collection[int]
) -> Iterator[list[_Part]]:
    """Yield the contents of each chunk; a record that fits into one is not divided."""
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
    """Yield the bytes of each chunk, as uint8 on the group's device, the same on every rank.

    Collective: each rank takes all chunks.  A chunk is valid until the next one is asked for.
    `sizes` are in bytes, and at most `CHUNK_NBYTES`.  The reader calls `read` in a thread, with a
    chunk's number and memory; if that fails, every rank raises.
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
