"""Fills a model's tensors from open files: directly, or from memory that is filled in advance."""

from __future__ import annotations

import inspect
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import compress
from time import sleep
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import MIN_NBYTES, RecycledMemory, is_idle
from ptsave.errors import add_note
from ptsave.models.packed_modules import ShardId
from ptsave.models.shards import Entry, OpenShard, Read, Shard, ShardReader
from ptsave.models.weight_parts import Part, WeightSlice, part_of, target_of
from ptsave.models.weight_plan import WeightPlan, takes_slices
from ptsave.state.copying import PLAIN_TYPES
from ptsave.support import config
from ptsave.support.calls import ProgressCallback, pausing_garbage_collection, progress_from
from ptsave.support.torch_names import is_distributed_tensor, set_grad_enabled

if TYPE_CHECKING:
    from ptsave.models.weight_parts import WeightSlice

_PIECE_NBYTES = 32 << 20  # most bytes to read at once of a tensor that needs no loader


@dataclass(eq=False, repr=False, slots=True)
class Item:
    """Pairs a stored tensor, or a part of one, with the model's tensor to fill."""

    entry: Entry
    name: str  # the model's name of `target`, for messages
    target: Tensor  # the complete parameter if `loader` fills it
    part: Part
    nbytes: int
    loader: Callable[..., Any] | None = None
    shard_id: ShardId | None = None
    is_sliced: bool = False  # the loader gets a `WeightSlice`, and reads parts of it


def items_of(tensors: Mapping[str, Tensor], plan: WeightPlan) -> list[Item]:
    """Return one `Item` for each of `plan.deliveries` that fills a part of `tensors` here."""
    whole: dict[torch.Size, Part] = {}  # by shape: many layers have the same shapes
    items = []
    with pausing_garbage_collection():
        for entry, name, shard_id, place in plan.deliveries:
            tensor, shape = tensors[name], entry.shape
            part = whole.get(shape) or whole.setdefault(shape, Part(shape))
            loader = plan.loaders.get(name)
            if loader is not None:
                loader = getattr(tensor, "weight_loader", loader)
                is_sliced = takes_slices(loader)
                item = Item(entry, name, tensor, part, entry.nbytes, loader, shard_id, is_sliced)
                items.append(item)
            elif place is None and not is_distributed_tensor(tensor):
                items.append(Item(entry, name, tensor, part, entry.nbytes))
            elif (target := target_of(tensor, shape, place)) is not None:
                is_packed = entry.shard.file is not None
                part = part_of(tensor, shape, place, is_packed=is_packed)
                nbytes = part.shape.numel() * entry.dtype.itemsize
                items.append(Item(entry, name, target, part, nbytes))
    return items


@dataclass(eq=False, repr=False, slots=True)
class _Piece:
    """Consecutive elements of an item that are read together; `begin` is the first one's index."""

    item: Item
    begin: int
    shape: torch.Size
    nbytes: int


class Filling:
    """Fills tensors from open files, and calls `progress` with the number of bytes read so far."""

    def __init__(self, reader: ShardReader, progress: ProgressCallback | None) -> None:
        self._reader = reader
        self._progress = progress
        self._nbytes_done = 0
        self._pinned = PinnedMemory(config.current().max_pinned_nbytes)
        self._nbytes_left: dict[Shard, int] = {}
        self._sent_to: set[torch.device] = set()  # accelerators of parameters that loaders fill

    def fill(self, items: Sequence[Item], *, is_all: bool) -> None:
        """Fill the items' targets; with `is_all` (last call), close files after their last item."""
        with pausing_garbage_collection():
            direct, others = divided(items)
            wanted = items if is_all else ()
            self._nbytes_left = _nbytes_by_shard((each.entry.shard, each.nbytes) for each in wanted)
            reads = [_read_of(item) for item in direct]
            self._reader.read(reads, progress_from(self._progress, self._nbytes_done))
            self._count(_nbytes_by_shard((item.entry.shard, item.nbytes) for item in direct))
            note_changes([read.target for read in reads])
        if others:
            self._deliver(others)

    def _count(self, done: Mapping[Shard, int]) -> None:
        """Add each file's `done` bytes to the progress; close a file when its items are filled."""
        for shard, nbytes in done.items():
            self._nbytes_done += nbytes
            if shard in self._nbytes_left:
                self._nbytes_left[shard] -= nbytes
                if self._nbytes_left[shard] == 0:
                    shard.close()  # also frees tensors, if torch had to load all of them

    def _deliver(self, items: list[Item]) -> None:
        """Put items into their targets in order, while other threads read the next items."""
        from ptsave.models.iterating import Bounds, read_ahead

        max_nbytes = self._max_ahead_nbytes(items)
        memory = RecycledMemory(max_nbytes)
        bounds = Bounds.of((item.entry.shard for item in items), max_nbytes)
        pieces = (
            (piece, 0 if item.is_sliced else piece.nbytes)
            for item in items
            for piece in _pieces(item)
        )

        def stage(pieces: list[_Piece]) -> list[Read | None]:
            return self._stage_all(memory, pieces)

        with closing(read_ahead(self._reader, pieces, stage, bounds)) as batches:
            for batch in batches:
                self._count(
                    _nbytes_by_shard(
                        (piece.item.entry.shard, 0 if read is None else piece.nbytes)
                        for piece, read in batch
                    )
                )
                self._put(batch)
                if self._progress is not None:
                    self._progress(self._nbytes_done)

    def _stage_all(self, memory: RecycledMemory, pieces: list[_Piece]) -> list[Read | None]:
        """Return a `Read` into new memory for each piece, or None if the item's loader reads it."""
        are_small = [piece.nbytes < MIN_NBYTES and self._stays_here(piece.item) for piece in pieces]
        small = list(compress(pieces, are_small))
        dtypes = [piece.item.entry.dtype for piece in small]
        targets = iter(_C.empty_tensors([piece.shape for piece in small], dtypes))
        reads: list[Read | None] = []
        for piece, is_small in zip(pieces, are_small, strict=True):
            item = piece.item
            if is_small:
                begin = piece.begin + item.part.begin
                reads.append(Read(item.entry, next(targets), begin, item.part.index))
            else:
                reads.append(None if item.is_sliced else self._stage(memory, piece))
        return reads

    def _stays_here(self, item: Item) -> bool:
        """Return whether an item is read into ordinary CPU memory, which is not page-locked."""
        if item.loader is None:
            return not _is_converted_there(item)
        return not item.is_sliced and not (self._sent_to and item.target.device in self._sent_to)

    def _stage(self, memory: RecycledMemory, piece: _Piece) -> Read:
        item, shape = piece.item, piece.shape
        entry, part = item.entry, item.part
        begin = piece.begin + part.begin
        if item.loader is None and _is_converted_there(item):
            there = torch.empty(shape, dtype=entry.dtype, device=item.target.device)
            return Read(entry, there, begin, part.index)
        if item.loader is not None and self._sent_to and item.target.device in self._sent_to:
            pinned = self._pinned.tensor(entry.shape, entry.dtype, self._sent_to)
            if pinned is not None:
                return Read(entry, pinned, piece.begin)
        if isinstance(entry.shard, OpenShard) and part.index is None:
            mapped = entry.shard.map_cached(entry, begin, shape)
            if mapped is not None:
                return Read(entry, mapped, begin, is_mapped=True)
        return Read(entry, memory.tensor(shape, entry.dtype), begin, part.index)

    def _max_ahead_nbytes(self, items: Iterable[Item]) -> int:
        """Return how many bytes may be read in advance: 128 MiB, or less in page-locked memory."""
        from ptsave.models.iterating import MAX_AHEAD_NBYTES

        self._sent_to = {
            device
            for device in {each.target.device for each in items if each.loader}
            if _C.can_stage(device)
        }
        for device in self._sent_to:
            _C.refuse_capture(device)  # loaders' copies would be captured instead of made
        if self._sent_to:
            return min(MAX_AHEAD_NBYTES, config.current().max_pinned_nbytes)
        return MAX_AHEAD_NBYTES

    def _put(self, batch: list[tuple[_Piece, Read | None]]) -> None:
        batch.reverse()
        with torch.no_grad():
            while batch:
                set_grad_enabled(False)  # a loader may have enabled gradients
                piece, read = batch.pop()  # pop(), so that `batch` does not keep the tensor alive
                item = piece.item
                mapped = [read.target.untyped_storage()] if read and read.is_mapped else []
                try:
                    if read is None:
                        self._lend(item)
                    else:
                        put_into(item, read.target, read.begin - item.part.begin)
                    del read
                finally:
                    # If the loader keeps the mapped tensor, writes to the file must not change it.
                    if mapped and not is_idle(mapped, 0):
                        _C.detach_from_file(mapped[0], os.fsencode(item.entry.shard.path))

    def _lend(self, item: Item) -> None:
        """Call an item's loader with a `WeightSlice`, through which the loader reads."""
        with closing(WeightSlice(item.entry, self._reader)) as weight:
            put_into(item, weight)
        self._count({item.entry.shard: item.nbytes})


def _read_of(item: Item) -> Read:
    entry, target, part = item.entry, item.target, item.part
    if entry.shard.file is None:
        target = target.detach()  # autograd would refuse to copy into a parameter
    return Read(entry, target, part.begin, part.index)


def _nbytes_by_shard(sizes: Iterable[tuple[Shard, int]]) -> dict[Shard, int]:
    total: dict[Shard, int] = {}
    for shard, nbytes in sizes:
        total[shard] = total.get(shard, 0) + nbytes
    return total


def divided(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return two lists: items that can be read directly into their targets, and all others."""
    direct: list[Item] = []
    others: list[Item] = []
    take_bytes = _C.take_bytes(
        [item.target for item in items], [item.entry.dtype for item in items]
    )
    for item, takes_bytes in zip(items, take_bytes, strict=True):
        (direct if _is_filled_in_place(item, takes_bytes) else others).append(item)
    if _C.are_apart([item.target for item in direct]):
        return direct, others
    first: list[Item] = []
    taken: defaultdict[torch.device, list[tuple[int, int]]] = defaultdict(list)
    in_place = set(map(id, direct))
    others = []
    for item in items:
        is_first = id(item) in in_place and _take_memory(taken[item.target.device], item.target)
        (first if is_first else others).append(item)
    return first, others


def _take_memory(taken: list[tuple[int, int]], tensor: Tensor) -> bool:
    """Add a tensor's address range to `taken`; return False if another range overlaps it."""
    begin = tensor.data_ptr()
    is_whole = tensor.is_contiguous()  # if not, `end` may be too high
    end = begin + (tensor.nbytes if is_whole else tensor.untyped_storage().nbytes())
    at = bisect_left(taken, (begin, end))
    if (at < len(taken) and taken[at][0] < end) or (at > 0 and taken[at - 1][1] > begin):
        return False
    taken.insert(at, (begin, end))
    return True


def _pieces(item: Item) -> Iterator[_Piece]:
    """Divide an item into the pieces that are read and copied one at a time."""
    if item.nbytes <= _PIECE_NBYTES or not _is_filled_piecewise(item):
        yield _Piece(item, 0, item.part.shape, item.nbytes)
        return
    n_elements, itemsize = item.part.shape.numel(), item.entry.dtype.itemsize
    step = max(1, _PIECE_NBYTES // itemsize)
    for begin in range(0, n_elements, step):
        n = min(step, n_elements - begin)
        yield _Piece(item, begin, torch.Size([n]), n * itemsize)


def _is_filled_in_place(item: Item, takes_bytes: bool) -> bool:
    if item.loader is not None or item.nbytes == 0:
        return False
    if takes_bytes and item.part.index is None:
        return True
    target = item.target
    return (
        item.entry.shard.file is None
        and type(target) in PLAIN_TYPES
        and target.layout is torch.strided
        and not target.is_meta
    )


def _is_filled_piecewise(item: Item) -> bool:
    return (
        item.loader is None
        and item.entry.shard.file is not None
        and item.part.index is None
        and type(item.target) in PLAIN_TYPES
        and item.target.is_contiguous()
    )


def _is_converted_there(item: Item) -> bool:
    """Return whether the target's device, not the CPU, converts the values to another dtype."""
    return (
        item.entry.shard.file is not None
        and type(item.target) in PLAIN_TYPES
        and _C.can_stage(item.target.device)
        and _C.convert_alike(item.entry.dtype, item.target.dtype)
    )


def _takes_experts(loader: Callable[..., Any]) -> bool:
    """Return whether a loader, like that of vLLM's FusedMoE, takes `shard_id` and `expert_id`."""
    return {"shard_id", "expert_id"} <= _arguments_of(getattr(loader, "__func__", loader))


@cache  # a model may have thousands of experts
def _arguments_of(function: Callable[..., Any]) -> Set[str]:
    try:
        return inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # the function has no signature
        return set()


def put_into(item: Item, values: Tensor | WeightSlice, begin: int = 0) -> None:
    """Put `values` into an item's target; `begin` is the number of their first element."""
    try:
        if item.loader is not None:
            if item.shard_id is None:
                item.loader(item.target, values)
            elif isinstance(item.shard_id, tuple) and _takes_experts(item.loader):
                part, expert = item.shard_id
                item.loader(item.target, values, item.name, shard_id=part, expert_id=expert)
            else:
                item.loader(item.target, values, item.shard_id)
            return
        assert isinstance(values, Tensor)
        if values.shape == item.part.shape:
            item.target.copy_(values.reshape(item.target.shape))
        else:  # a piece
            item.target.view(-1)[begin:][: values.numel()].copy_(values)
    except Exception as error:
        entry = item.entry
        add_note(
            error,
            f"while {item.name} was being filled from tensor {entry.name} of {entry.shard.path}",
        )
        raise


def note_changes(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that the values of these tensors have changed."""
    changed = [tensor for tensor in tensors if not tensor.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)


class PinnedMemory:
    """Lends page-locked tensors that take at most `max_nbytes` together.

    A loader may start copies without waiting.  Torch reuses freed memory only after its copies, so
    freed memory counts until the streams on which loaders copy are idle.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._lent: list[torch.UntypedStorage] = []
        self._freed_nbytes = 0

    def tensor(
        self, shape: torch.Size, dtype: torch.dtype, devices: Set[torch.device]
    ) -> Tensor | None:
        """Return an uninitialized tensor; None if it would be small, or exceed `max_nbytes`.

        The result is None, too, if the system refuses to lock memory.  This may wait for the
        current streams of `devices`, to which the tensors are copied.
        """
        nbytes = shape.numel() * dtype.itemsize
        self._free_idle()
        lent_nbytes = sum(_rounded(storage.nbytes()) for storage in self._lent)
        free_nbytes = self._max_nbytes - lent_nbytes - _rounded(nbytes)
        if nbytes < MIN_NBYTES or free_nbytes < 0:
            return None
        if free_nbytes < self._freed_nbytes:
            for device in devices:
                _wait_until_idle(torch.accelerator.current_stream(device))
            self._freed_nbytes = 0
        storage = _C.page_locked_storage(nbytes, next(iter(devices)))
        if storage is None:
            self._max_nbytes = 0
            return None
        self._lent.append(storage)
        strides = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def _free_idle(self) -> None:
        idle = [is_idle(self._lent, number) for number in range(len(self._lent))]
        sizes = [_rounded(storage.nbytes()) for storage in self._lent]
        self._freed_nbytes += sum(compress(sizes, idle))
        self._lent = [storage for storage, gone in zip(self._lent, idle, strict=True) if not gone]


def _wait_until_idle(stream: torch.Stream) -> None:
    while not stream.query():  # synchronize() would keep a core busy
        sleep(0.0001)


def _rounded(nbytes: int) -> int:
    """Return how many bytes torch's allocator takes for `nbytes`: the next power of two."""
    return 1 << (nbytes - 1).bit_length()
