"""Reads tensors ahead of their use, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ptsave.models.shards import Read, Shard, ShardReader
from ptsave.support.calls import pausing_garbage_collection
from ptsave.support.threads import ThreadPool

_T = TypeVar("_T")

# For tensors that do not go straight into a parameter: those in use and those being read.
MAX_AHEAD_NBYTES = 128 << 20
_MIN_AHEAD_NBYTES = 1 << 20  # below this another thread costs more than it saves
_MIN_MEAN_NBYTES = 4 << 10  # smaller reads spend their time in Python, which threads share


class Bounds(NamedTuple):
    """How far reading may be ahead of use.

    `n_threads` batches are read at a time, and `n_batches` may wait unused. One large tensor may
    exceed `batch_nbytes`, the size of a batch, and `max_nbytes`, the size of all. Batches of
    safetensors files are small, so that the first tensors are there soon and little memory is
    touched: a used batch leaves its pages for the next but two.
    """

    n_threads: int
    n_batches: int
    batch_nbytes: int
    max_nbytes: int

    @classmethod
    def of(cls, shards: Iterable[Shard], max_nbytes: int) -> Bounds:
        """Return the bounds for shards: only local safetensors files are read by two threads."""
        if all(each.file is not None for each in shards):
            return cls(2, 3, min(16 << 20, max_nbytes // 2), max_nbytes)
        return cls(1, 1, max_nbytes // 2, max_nbytes)


@dataclass(eq=False, repr=False)
class _Batch(Generic[_T]):
    """Items that are read together; `pending` is the future of reads that are not done yet."""

    items: list[tuple[_T, Read | None]]
    nbytes: int
    pending: Future[None] | None


def read_ahead(
    reader: ShardReader,
    items: Iterable[tuple[_T, int]],
    stage: Callable[[list[_T]], list[Read | None]],
    bounds: Bounds,
) -> Generator[list[tuple[_T, Read | None]], None, None]:
    """Yield batches of items whose reads are done, while the next ones are being read.

    `items` are pairs of an item and its bytes. `stage` returns the reads of items, with memory for
    them, or None for an item that reads nothing. The thread that asks for the batches calls it.
    """
    batches: deque[_Batch[_T]] = deque()
    with ThreadPool(bounds.n_threads, "ptsave-read") as threads:
        for group, nbytes in _grouped(items, bounds.batch_nbytes):
            while batches and (
                len(batches) > bounds.n_batches
                or sum(batch.nbytes for batch in batches) + nbytes > bounds.max_nbytes
            ):
                yield _first(batches)
            with pausing_garbage_collection():
                staged = list(zip(group, stage(group), strict=True))
                batches.append(_begin(reader, staged, nbytes, threads))
            del staged
        while batches:
            yield _first(batches)


def _grouped(items: Iterable[tuple[_T, int]], max_nbytes: int) -> Iterator[tuple[list[_T], int]]:
    """Yield items to read together, and their bytes: at most `max_nbytes`, or one larger item."""
    iterator = iter(items)
    ahead = next(iterator, None)
    while ahead is not None:
        group: list[_T] = []
        total = 0
        with pausing_garbage_collection():  # many small objects are made, and none is garbage
            while ahead is not None and (not group or total + ahead[1] <= max_nbytes):
                group.append(ahead[0])
                total += ahead[1]
                ahead = next(iterator, None)
        yield group, total


def _begin(
    reader: ShardReader, staged: list[tuple[_T, Read | None]], nbytes: int, threads: ThreadPool
) -> _Batch[_T]:
    # This thread reads tensors on devices, because their memory belongs to its streams, and batches
    # that are too small for another thread.
    here: list[Read] = []
    ahead: list[Read] = []
    for _, read in staged:
        if read is not None:
            (ahead if read.target.is_cpu else here).append(read)
    pending = None
    min_nbytes = max(_MIN_AHEAD_NBYTES, _MIN_MEAN_NBYTES * len(ahead))
    if sum(read.target.nbytes for read in ahead if not read.is_mapped) >= min_nbytes:
        pending = threads.submit(reader.read, ahead)
    else:
        here += ahead
    reader.read(here)
    return _Batch(staged, nbytes, pending)


def _first(batches: deque[_Batch[_T]]) -> list[tuple[_T, Read | None]]:
    batch = batches.popleft()
    if batch.pending is not None:
        batch.pending.result()
    return batch.items
