"""Records of files that one rank of a process group reads and sends to all ranks.

Each rank says which records it wants.  The records that any rank wants are sent in file order, in
chunks: one chunk is read while the chunk before is sent and the one before that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ptsave import _C
from ptsave.archive.part_copies import PART_ALIGNMENT
from ptsave.archive.spans import Span, memory_of
from ptsave.support.group_call import GroupCall
from ptsave.support.group_chunks import CHUNK_NBYTES, received_chunks

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
    `damaged` returns the error for a record by its number and its wrong checksum.  `nbytes_done`
    counts the bytes sent.
    """

    def __init__(
        self,
        call: GroupCall,
        n_records: int,
        record: Callable[[int], GroupRecord],
        read: Callable[[Sequence[Span]], None] | None,
        damaged: Callable[[int, int], Exception],
    ) -> None:
        self.nbytes_done = 0
        self._call = call
        self._n_records = n_records
        self._record = record
        self._read = read
        self._damaged = damaged

    def receive(
        self,
        records: Collection[int],
        take: Take,
        *,
        verify: bool,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Receive records now, while other ranks may wait at a barrier.

        `verify` compares records with their checksums.  A record of up to 8 MiB is compared before
        `take` gets any of its bytes.  `progress` gets `nbytes_done`.
        """
        for wanted in self._rounds(None, records):
            taker = _Taker(self._record, self._damaged, records, take, verify=verify)
            self._transfer(wanted, taker, progress)

    def wait(self, barrier: int, progress: Callable[[int], None] | None = None) -> None:
        """Wait until all ranks reach a barrier; meanwhile bytes for other ranks are passed on.

        Raises an error if any rank, or reading the file, has failed.
        """
        for wanted in self._rounds(barrier, ()):
            taker = _Taker(self._record, self._damaged, (), _ignore, verify=False)
            self._transfer(wanted, taker, progress)

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
        self, wanted: Collection[int], taker: _Taker, progress: Callable[[int], None] | None
    ) -> None:
        """Transfer the records that any rank wants, and take this rank's own bytes."""
        chunks = list(_chunks(self._record, wanted))
        sizes = [parts[-1].at + parts[-1].nbytes for parts in chunks]

        def read(k: int, memory: Tensor) -> None:
            assert self._read is not None
            self._read([Span(p.record, p.begin, memory[p.at : p.at + p.nbytes]) for p in chunks[k]])

        for parts, chunk in zip(chunks, received_chunks(self._call, sizes, read), strict=True):
            taker.take(parts, chunk)
            self.nbytes_done += len(chunk)
            if progress is not None:
                progress(self.nbytes_done)
        self._call.agree(None, taker.error)


class _Taker:
    """Verifies the bytes that this rank wants, and hands them on.

    After an error it ignores further bytes, because the transfer goes on for the other ranks.
    """

    def __init__(
        self,
        record: Callable[[int], GroupRecord],
        damaged: Callable[[int, int], Exception],
        records: Collection[int],
        take: Take,
        *,
        verify: bool,
    ) -> None:
        self.error: Exception | None = None
        self._record, self._damaged = record, damaged
        self._records, self._hand_on = frozenset(records), take
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
        record = self._record(part.record)
        if record.crc is None:
            return
        payload = memory_of(chunk[part.at : part.at + part.nbytes])
        self._crc = _C.crc32(payload, self._crc if part.begin else 0)
        if part.begin + part.nbytes == record.nbytes and self._crc != record.crc:
            raise self._damaged(part.record, self._crc)


def _ignore(record: int, begin: int, part: Tensor) -> None:
    """Take no bytes."""


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
