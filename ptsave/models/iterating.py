"""`iter_weights` and `read_ahead`: read tensors in order, while earlier ones are used."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import RecycledMemory
from ptsave.models.shards import Entry, Read, Shard, ShardReader, open_model
from ptsave.sources.locations import refuse_url
from ptsave.state.renaming import Rename, Renaming
from ptsave.support.calls import one_of, pausing_garbage_collection
from ptsave.support.threads import ThreadPool

_CPU = torch.device("cpu")


def iter_weights(
    path: Any,
    *,
    device: torch.device | str | int | None = None,
    rename: Rename | None = None,
    prefix: str = "",
    storage_options: Mapping[str, Any] | None = None,
    map_location: torch.device | str | int | None = None,
    key_mapping: Rename | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of each tensor in a model's files, in the order of the files.

    While the caller uses one tensor, the next ones are read.  If the caller keeps no tensor, this
    needs at most 128 MiB of memory, or the size of the largest tensor if that is more.

    Parameters
    ----------
    path : str, os.PathLike, file-like or ptsave.deltas.Weights
        A directory, an index or a file, as for :func:`ptsave.load_model`.
    device : torch.device, str or int, optional
        Device of the tensors: the CPU by default.
    rename : callable or mapping, optional
        New names, as for :func:`ptsave.load_model`.  A tensor whose new name is None is left out.
    prefix : str, default ""
        Reads only tensors whose names begin with the prefix, and removes the prefix from the names.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    map_location, key_mapping : optional
        Other names of `device` and `rename`.

    Yields
    ------
    (str, torch.Tensor)
        The tensor has its own memory, and the caller may keep it.

    Raises
    ------
    CorruptCheckpointError, FileNotFoundError, OSError, TypeError, ValueError
        As from :func:`ptsave.load_model`.  All files are opened before any tensor is yielded.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model(model, folder, max_shard_size=30)
    ...     for name, tensor in ptsave.iter_weights(folder, prefix="1."):
    ...         print(name, tuple(tensor.shape))
    bias (1,)
    weight (1, 3)
    """
    device = one_of(device=device, map_location=map_location)
    rename = one_of(rename=rename, key_mapping=key_mapping)
    place = _CPU if device is None else torch.empty(0, device=device).device
    renaming = Renaming(rename, prefix)
    if isinstance(path, bytes):
        refuse_url(path)
        path = os.fsdecode(path)
    with ExitStack() as stack:
        with pausing_garbage_collection():  # there may be 100,000 entries, all in use
            _, entries = open_model(path, storage_options, stack)
            named = [(entry, renaming(entry.name)) for entry in entries]
            wanted = [(entry, name) for entry, name in named if name is not None]
            del entries, named
        reader = stack.enter_context(closing(ShardReader(entry.shard for entry, _ in wanted)))
        memory = RecycledMemory(MAX_AHEAD_NBYTES)
        bounds = Bounds.of((entry.shard for entry, _ in wanted), MAX_AHEAD_NBYTES)
        items = (((entry, name), entry.nbytes) for entry, name in wanted)
        is_staged_there = _C.can_stage(place)

        def allocate(entry: Entry) -> Tensor:
            if is_staged_there:
                return torch.empty(entry.shape, dtype=entry.dtype, device=place)
            return memory.tensor(entry.shape, entry.dtype)

        def stage(items: list[tuple[Entry, str]]) -> list[Read | None]:
            return [Read(entry, allocate(entry)) for entry, _ in items]

        batches = stack.enter_context(closing(read_ahead(reader, items, stage, bounds)))
        for batch in batches:
            batch.reverse()
            while batch:
                (_, name), read = batch.pop()
                assert read is not None
                tensor = read.target
                del read  # so that a used tensor can be freed
                yield name, tensor if tensor.device == place else tensor.to(place)
                del tensor


# ---------------------------------------------------------------------------------- reading ahead

_T = TypeVar("_T")

# The most bytes of tensors in memory outside the model: those being read, and those in use.
MAX_AHEAD_NBYTES = 128 << 20
_MIN_AHEAD_NBYTES = 1 << 20  # a thread would take more time than it saves for less
_MIN_MEAN_NBYTES = 4 << 10  # smaller reads take mostly Python time, so threads do not help


class Bounds(NamedTuple):
    """Limits how much is read before it is used; one large tensor may exceed both byte limits."""

    n_threads: int  # each reads one batch at a time
    n_batches: int  # most batches that are read, or being read, and not used yet
    batch_nbytes: int
    max_nbytes: int  # of all these batches together

    @classmethod
    def of(cls, shards: Iterable[Shard], max_nbytes: int) -> Bounds:
        """Return the bounds: two threads if all shards are local safetensors files, or else one.

        For two threads the batches are small, so that the first tensors can be used soon.
        """
        if all(each.file is not None for each in shards):
            return cls(2, 3, min(16 << 20, max_nbytes // 2), max_nbytes)
        return cls(1, 1, max_nbytes // 2, max_nbytes)


@dataclass(eq=False, repr=False)
class _Batch(Generic[_T]):
    """Items that are read together; `pending` is set if another thread reads them."""

    items: list[tuple[_T, Read | None]]
    nbytes: int
    pending: Future[None] | None


def read_ahead(
    reader: ShardReader,
    items: Iterable[tuple[_T, int]],
    stage: Callable[[list[_T]], list[Read | None]],
    bounds: Bounds,
) -> Generator[list[tuple[_T, Read | None]], None, None]:
    """Yield the items in batches, each after its reads are done, while the next ones are read.

    `items` has pairs of an item and its number of bytes. `stage` is called in the caller's thread.
    It allocates memory, and returns a `Read` for each item, or None if there is nothing to read.
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
    """Yield groups of at most `max_nbytes`, or of one larger item, with each group's bytes."""
    iterator = iter(items)
    ahead = next(iterator, None)
    while ahead is not None:
        group: list[_T] = []
        total = 0
        with pausing_garbage_collection():  # for speed: many new objects, all in use
            while ahead is not None and (not group or total + ahead[1] <= max_nbytes):
                group.append(ahead[0])
                total += ahead[1]
                ahead = next(iterator, None)
        yield group, total


def _begin(
    reader: ShardReader, staged: list[tuple[_T, Read | None]], nbytes: int, threads: ThreadPool
) -> _Batch[_T]:
    # The calling thread reads tensors on accelerators, because their memory belongs to its streams.
    # The calling thread also reads batches that are too small for another thread.
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
