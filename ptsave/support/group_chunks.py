"""Sends chunks of bytes to a group: one rank reads ahead while all ranks use earlier chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ptsave.support.group_call import GroupCall

CHUNK_NBYTES = 8 << 20
# One buffer is filled, one is sent, and one is used: 24 MiB.
_N_BUFFERS = 3
# In front of each chunk: whether reading it failed.  A cache line keeps the bytes aligned.
_HEAD_NBYTES = 64
_FAILED = 1


def received_chunks(
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
    with ExitStack() as stack:
        source = stack.enter_context(_Source(sizes, read)) if call.is_reader else None
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device=call.device) for _ in range(2)]
        if source is not None and call.device.type == "cpu":
            buffers = source.buffers
        with call.exchanging("read"):
            work = _begin(call, sizes, source, buffers, 0)
        for k in range(len(sizes)):
            with call.exchanging("read"):
                work.wait()
                chunk = buffers[k % len(buffers)][: _HEAD_NBYTES + sizes[k]]
                failed = int(chunk[0]) == _FAILED
                if not failed and k + 1 < len(sizes):
                    work = _begin(call, sizes, source, buffers, k + 1)
            if failed:
                call.agree(None, source.error if source is not None else None)
            yield chunk[_HEAD_NBYTES:]
            if source is not None:
                source.give_back(k)


def _begin(
    call: GroupCall, sizes: Sequence[int], source: _Source | None, buffers: list[Tensor], k: int
) -> Any:
    """Begin to send a chunk from the reader to the other ranks."""
    buffer = buffers[k % len(buffers)][: _HEAD_NBYTES + sizes[k]]
    if source is not None:
        chunk = source.chunk(k)
        if chunk.data_ptr() != buffer.data_ptr():
            buffer.copy_(chunk)
    return call.broadcast(buffer)


class _Source:
    """Reads chunks in a thread, ahead of the chunks that are sent."""

    def __init__(self, sizes: Sequence[int], read: Callable[[int, Tensor], None]) -> None:
        self._sizes, self._read = sizes, read
        nbytes = _HEAD_NBYTES + max(sizes)
        n = min(_N_BUFFERS, len(sizes))
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(n)]
        self.error: Exception | None = None
        self._pool = ThreadPoolExecutor(1, "ptsave-group")
        self._reads: dict[int, Future[None]] = {}

    def __enter__(self) -> _Source:
        for k in range(len(self.buffers)):
            self._submit(k)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def chunk(self, k: int) -> Tensor:
        """Return a chunk with its head, once the chunk has been read or reading it has failed."""
        chunk = self._memory(k)
        chunk[0] = 0
        try:
            self._reads.pop(k).result()
        except Exception as error:
            self.error = error
            chunk[0] = _FAILED
        return chunk

    def give_back(self, k: int) -> None:
        """Use the memory of a chunk for a later chunk."""
        self._submit(k + len(self.buffers))

    def _submit(self, k: int) -> None:
        if k < len(self._sizes):
            self._reads[k] = self._pool.submit(self._read, k, self._memory(k)[_HEAD_NBYTES:])

    def _memory(self, k: int) -> Tensor:
        return self.buffers[k % len(self.buffers)][: _HEAD_NBYTES + self._sizes[k]]
