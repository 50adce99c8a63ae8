"""`load_model`: fills a model from published weights, as inference engines do.

* Everything is known before anything moves: every file is open, its size agrees with its header,
  the index with the files, and each tensor has one place.  The files stay open, so a set that is
  replaced meanwhile is read to its end.
* Bytes that fit as they are are read straight into parameters, from all files over one cursor:
  those on an accelerator through page-locked memory.  Another dtype is converted there.
* Other tensors (a ``weight_loader``, another dtype or layout, memory that overlaps) are read in
  batches, some of them ahead of the one that is delivered on the calling thread, in the order of
  the files.  Conversions come in pieces of 32 MiB; a loader gets the whole tensor.
* All local files are one load: they stay open, and only its first 32 MiB go through the page cache
  in case that other ranks read them, too.
* Cached parts of such tensors are mapped privately instead of read, so the loader's copy is the
  only one.  If a loader keeps the tensor, which its storage's reference count tells, a copy takes
  the place of the mapping, at the same address, before the next is delivered: nobody ever sees the
  file change.
* Tied tensors need one entry; of several the last one in the model's order is read, because
  ``load_state_dict`` would leave that one there.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.contents.checkpoint_files import find_files
from ptsave.errors import CheckpointWarning, add_note
from ptsave.models.lazy_buffers import LazyBuffers
from ptsave.models.packed_modules import PackedModules, PackedModulesMapping
from ptsave.models.pinned_memory import PinnedMemory
from ptsave.models.recycled_memory import MIN_NBYTES, RecycledMemory, is_idle
from ptsave.models.shards import (
    Entry,
    Read,
    SafetensorsShard,
    Shard,
    ShardReader,
    open_shards,
)
from ptsave.models.weight_plan import Delivery, LoadedWeights, ModelTensors, WeightPlan, loaders_of
from ptsave.sources.urls import refuse_url
from ptsave.state.plain_copies import PLAIN_TYPES
from ptsave.support import config
from ptsave.support.progress import ProgressCallback, progress_bar
from ptsave.support.thread_pool import ThreadPool
from ptsave.support.torch_modules import buffers_of, parameters_of
from ptsave.support.torch_tensors import make_subclass
from ptsave.support.user_warnings import warn_user

__all__ = ["load_model"]

# For tensors that do not go straight into a parameter: those that are being used, and those that
# are being read meanwhile.
_MAX_AHEAD_NBYTES = 128 << 20
_MIN_AHEAD_NBYTES = 1 << 20  # below this another thread costs more than it saves
_CPU = torch.device("cpu")
_PIECE_NBYTES = 32 << 20  # of a tensor that is only converted


def load_model(
    model: nn.Module,
    path: Any,
    *,
    packed_modules_mapping: PackedModulesMapping | None = None,
    strict: bool = True,
    device: torch.device | str | int | None = None,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadedWeights:
    """Fill a model's parameters and buffers from a directory of shards, or one file.

    Before the first byte of the model changes all files are opened, and names, shapes, headers and
    sizes are checked.  Then every byte is read once, by several threads: straight into the
    parameter where that is all it takes, and otherwise ahead of its use, into tensors of at most
    128 MiB together (or the largest tensor that a ``weight_loader`` gets; what one is to copy to an
    accelerator is in page-locked memory, as far as ``PTSAVE_MAX_PINNED_BYTES`` reaches).  Parts of
    a safetensors file that the page cache holds are not read ahead, but used where they are.

    Parameters
    ----------
    model : torch.nn.Module
        The model.  A parameter with a ``weight_loader`` is filled by it, in the order of the files:
        ``weight_loader(parameter, tensor)``, or ``weight_loader(parameter, tensor, shard_id)`` for
        a part of a packed parameter.  The tensor is on the CPU, as the file has it, and may be
        kept.
    path : str, os.PathLike or file-like
        A directory, by path or URL, or one file: an index of shards, a safetensors file, or
        anything that :func:`torch.load` reads with ``weights_only=True``; that may be a seekable
        file object, too.  The content of a file decides how it is read, whatever it is called.  In
        a directory the first of these counts: ``*.safetensors``, ``pytorch_model*.bin``, ``*.pt``,
        each with the files that an index names if there is one.
    packed_modules_mapping : mapping, optional
        Modules of the checkpoint that are parts of one in the model:
        ``{"q_proj": ("qkv_proj", "q"), ...}``, with the shard id in the tuple, or
        ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``, whose shard ids are 0, 1 and 2.  Names
        match whole components of a path, and the longest one wins.  Default: the model's attribute
        of that name, if it has one.  A tensor whose packed parameter does not exist keeps its name.
    strict : bool, default True
        Whether tensors that are missing, unexpected, there twice, or left out of a packed parameter
        are an error.  If not, of two tensors for one place the later one is loaded.
    device : torch.device, str or int, optional
        Device to move the model to.  A tensor on the meta device gets memory there, as by
        :meth:`torch.nn.Module.to_empty` (but tied parameters stay tied, and attributes stay), and
        anything else is moved.  By default the model stays where it is.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Returns
    -------
    LoadedWeights
        The names that did not fit.

    Raises
    ------
    RuntimeError
        Names or shapes that do not fit, as from :meth:`torch.nn.Module.load_state_dict`, with the
        file's and the tensor's name; a model on the meta device without `device`; a tensor for a
        ``weight_loader`` that is expanded to more than 1 GiB and 8 times its storage.
    CorruptCheckpointError
        A file is damaged or cut short, is no checkpoint (a git-lfs pointer, a web page), or has not
        got a tensor that the index promises.
    FileNotFoundError
        There are no shards, or one of them is missing.
    UnsupportedUrlError
        `path` is a URL that fsspec cannot read.
    OSError
        A file cannot be read.
    TypeError
        A file holds something else than tensors.

    Notes
    -----
    Parameters and buffers that share memory count as one, of which one name is enough; where the
    checkpoint has several, the last in the model's order counts, as for ``load_state_dict``.
    Buffers that state dicts leave out may be missing.  Lazy buffers
    (:func:`ptsave.register_lazy_buffer`) take the checkpoint's shape, and are None where it has no
    such tensor.  CRCs are verified for files of :func:`torch.save`; safetensors files have none.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> trained, fresh = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model(trained, folder)
    ...     ptsave.load_model(fresh, folder)
    <All weights loaded>
    >>> torch.equal(trained.weight, fresh.weight)
    True
    """
    if packed_modules_mapping is None:
        packed_modules_mapping = getattr(model, "packed_modules_mapping", None) or {}
    packed = PackedModules(packed_modules_mapping)
    if isinstance(path, bytes):
        refuse_url(path)
        path = os.fsdecode(path)
    files = find_files(path, storage_options)
    with ExitStack() as stack:
        entries = open_shards(path, files, stack)
        lazy_buffers = LazyBuffers(model, entries)
        plan = WeightPlan(ModelTensors(model, lazy_buffers), packed, entries)
        plan.check(model, strict=strict)
        tied_names = plan.tied_names()
        _move(model, plan, device)
        nbytes = sum(delivery.entry.nbytes for delivery in plan.deliveries)
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        if lazy_buffers.changing:
            tensors.update(lazy_buffers.allocate())
        with progress_bar(progress, "loading", nbytes) as callback:
            filling = Filling(tensors, plan.deliveries, callback)
            stack.callback(filling.close)
            filling.run()
        _renew_ties(tensors, tied_names)
        if lazy_buffers.changing:
            lazy_buffers.put()
    return plan.report


# ------------------------------------------------------------------------------- where the model is


def _move(model: nn.Module, plan: WeightPlan, device: torch.device | str | int | None) -> None:
    """Move the model to `device`; tensors on the meta device that are filled need one."""
    on_meta = [name for name, tensor in plan.tensors.by_name.items() if tensor.is_meta]
    if device is None:
        if planned := {delivery.name for delivery in plan.deliveries}.intersection(on_meta):
            raise RuntimeError(
                f"{len(planned)} parameters, such as {min(planned)}, are on the meta device and "
                "have no memory: pass device="
            )
        return
    device = torch.empty(0, device=device).device  # raises torch's error for a bad one
    if on_meta:
        _allocate(model, device)
        filled = {
            tied for delivery in plan.deliveries for tied in plan.tensors.tied_names(delivery.name)
        }
        _warn_of_garbage([name for name in on_meta if name not in filled])
    model.to(device)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Give every tensor on the meta device memory on `device`.

    Unlike ``to_empty``, which makes new parameters one module after the other: tied ones stay tied,
    and types and attributes (``weight_loader``) stay.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # holds the old one, too: its id must stay its own
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, _allocated(tensor, device)
                table[name] = made[id(tensor)][1]


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        memory = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter) or type(tensor) is not Tensor:
        memory = make_subclass(type(tensor), memory, tensor.requires_grad)
    memory.__dict__.update(tensor.__dict__)
    return memory


def _warn_of_garbage(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        warn_user(
            f"the model was on the meta device, and the checkpoint has no values for "
            f"{', '.join(names[:8])}{more}: set them before you use the model",
            CheckpointWarning,
        )


def _renew_ties(tensors: dict[str, Tensor], tied_names: dict[str, list[str]]) -> None:
    """Give the values to the other names of a tensor that moving the model has made tensors."""
    with torch.no_grad():
        for name, names in tied_names.items():
            for other in names:
                if tensors[other] is not tensors[name] and (
                    tensors[other].data_ptr() != tensors[name].data_ptr()
                ):
                    tensors[other].copy_(tensors[name])


# -------------------------------------------------------------------------------------- the filling


@dataclass(frozen=True)
class Staged:
    """A tensor in memory of its own, until it is in the model."""

    delivery: Delivery
    read: Read

    @property
    def nbytes(self) -> int:
        return self.read.target.nbytes


@dataclass(frozen=True)
class _Batch:
    """Tensors that are read together.

    `pending` is the future of their bytes, unless they have them.
    """

    staged: list[Staged]
    nbytes: int
    pending: Future[None] | None


@dataclass(frozen=True)
class _Ahead:
    """How far the reading of tensors may be ahead of their delivery.

    Batches are small where files stay open, so that little memory is touched: the first tensors are
    delivered soon, and a batch that is used up leaves its pages for the next but two.
    """

    n_threads: int
    n_batches: int
    batch_nbytes: int

    @classmethod
    def of(cls, deliveries: Iterable[Delivery]) -> _Ahead:
        """Return the bounds for these: shards of other kinds are read by one thread at a time."""
        if all(isinstance(each.entry.shard, SafetensorsShard) for each in deliveries):
            return cls(2, 3, 16 << 20)
        return cls(1, 1, _MAX_AHEAD_NBYTES // 2)


@dataclass
class Filling:
    """Fills a model from open files."""

    tensors: dict[str, Tensor]
    deliveries: list[Delivery]
    progress: ProgressCallback | None
    _nbytes_done: int = field(default=0, init=False)

    def run(self) -> None:
        """Fill the model: first the tensors read straight into it, then the rest in order."""
        direct: list[Read] = []
        others: list[Delivery] = []
        places: defaultdict[torch.device, Places] = defaultdict(Places)
        for delivery in self.deliveries:
            target = self.tensors[delivery.name]
            has_loader = delivery.name in self._loaders
            in_place = not has_loader and _is_filled_in_place(delivery.entry, target)
            if in_place and places[target.device].take(target):
                direct.append(Read(delivery.entry, target.detach()))
            else:
                others.append(delivery)
        self._read(direct)
        for read in direct:
            _note_change(read.target)
        if others:
            self._deliver(others)

    def close(self) -> None:
        """Let go of the files."""
        self._reader.close()

    def __post_init__(self) -> None:
        self._loaders = loaders_of(self.tensors)
        self._pinned = PinnedMemory(config.current().max_pinned_nbytes)
        self._reader = ShardReader(delivery.entry.shard for delivery in self.deliveries)
        self._nbytes_left: Counter[Shard] = Counter()
        for delivery in self.deliveries:
            self._nbytes_left[delivery.entry.shard] += delivery.entry.nbytes

    def _read(self, reads: list[Read]) -> None:
        reads = [read for read in reads if read.target.numel() > 0]
        done = self._nbytes_done
        callback = self.progress
        progress = None if callback is None else lambda nbytes: callback(done + nbytes)
        self._reader.read(reads, progress)
        self._count(reads)

    def _count(self, reads: list[Read]) -> None:
        """Note that the targets of these have their bytes."""
        for read in reads:
            self._nbytes_done += read.target.nbytes
            self._nbytes_left[read.entry.shard] -= read.target.nbytes
        for shard in {read.entry.shard for read in reads}:
            if self._nbytes_left[shard] == 0:
                shard.close()  # it may hold all of its tensors

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Read some batches ahead while the one before them is delivered, on this thread."""
        ahead = _Ahead.of(deliveries)
        max_nbytes = self._max_ahead_nbytes(deliveries)
        memory = RecycledMemory(max_nbytes)
        batches: deque[_Batch] = deque()
        with ThreadPool(ahead.n_threads, "ptsave-read") as threads:
            for pieces in self._batches(deliveries, min(ahead.batch_nbytes, max_nbytes // 2)):
                nbytes = sum(count * item.entry.dtype.itemsize for item, _, count in pieces)
                while batches and (
                    len(batches) > ahead.n_batches
                    or sum(batch.nbytes for batch in batches) + nbytes > max_nbytes
                ):
                    self._put_first(batches)
                staged = [self._stage(memory, *piece) for piece in pieces]
                batches.append(self._begin_reading(staged, nbytes, threads))
            while batches:
                self._put_first(batches)

    def _begin_reading(self, staged: list[Staged], nbytes: int, threads: ThreadPool) -> _Batch:
        # On this thread, whose streams their memory belongs to, or because it is not worth another.
        here = [item.read for item in staged if item.read.target.device != _CPU]
        ahead = [item.read for item in staged if item.read.target.device == _CPU]
        pending = None
        if sum(read.target.nbytes for read in ahead if not read.is_mapped) >= _MIN_AHEAD_NBYTES:
            pending = threads.submit(self._reader.read, ahead)
        else:
            here += ahead
        self._reader.read(here)
        return _Batch(staged, nbytes, pending)

    def _put_first(self, batches: deque[_Batch]) -> None:
        batch = batches.popleft()
        if batch.pending is not None:
            batch.pending.result()
        self._count([item.read for item in batch.staged])
        self._put(batch.staged)
        if self.progress is not None:
            self.progress(self._nbytes_done)

    def _stage(
        self, memory: RecycledMemory, delivery: Delivery, begin: int, n_elements: int
    ) -> Staged:
        target = self.tensors[delivery.name]
        if delivery.name not in self._loaders:
            converts_there = _is_converted_there(delivery.entry, target)
            device = target.device if converts_there else _CPU
            return _stage(device, memory, delivery, begin, n_elements)
        if _C.can_stage(target.device):
            pinned = self._pinned.tensor(delivery.entry.shape, delivery.entry.dtype)
            if pinned is not None:
                return Staged(delivery, Read(delivery.entry, pinned, begin))
        return _stage(_CPU, memory, delivery, begin, n_elements)

    def _max_ahead_nbytes(self, deliveries: list[Delivery]) -> int:
        """Return the budget: page-locked memory's, if loaders are to copy to accelerators."""
        loaded = (self.tensors[each.name] for each in deliveries if each.name in self._loaders)
        if any(_C.can_stage(tensor.device) for tensor in loaded):
            return min(_MAX_AHEAD_NBYTES, config.current().max_pinned_nbytes)
        return _MAX_AHEAD_NBYTES

    def _batches(
        self, deliveries: Iterable[Delivery], max_nbytes: int
    ) -> Iterator[list[tuple[Delivery, int, int]]]:
        """Yield batches to read together: `max_nbytes`, or one tensor."""
        batch: list[tuple[Delivery, int, int]] = []
        nbytes = 0
        for delivery in deliveries:
            itemsize = delivery.entry.dtype.itemsize
            for begin, count in self._pieces(delivery):
                if batch and nbytes + count * itemsize > max_nbytes:
                    yield batch
                    batch, nbytes = [], 0
                batch.append((delivery, begin, count))
                nbytes += count * itemsize
        if batch:
            yield batch

    def _pieces(self, delivery: Delivery) -> Iterator[tuple[int, int]]:
        """Yield (begin, number of elements) of the parts in which a tensor is delivered."""
        target, entry = self.tensors[delivery.name], delivery.entry
        n_elements = entry.shape.numel()
        step = max(1, _PIECE_NBYTES // entry.dtype.itemsize)
        in_pieces = delivery.name not in self._loaders and _is_filled_piecewise(entry, target)
        if not in_pieces or n_elements <= step:
            yield 0, n_elements
            return
        for begin in range(0, n_elements, step):
            yield begin, min(step, n_elements - begin)

    def _put(self, batch: list[Staged]) -> None:
        batch.reverse()
        while batch:
            staged = batch.pop()  # nothing here keeps a tensor that has been delivered
            delivery, storages = staged.delivery, [staged.read.target.untyped_storage()]
            is_mapped = staged.read.is_mapped
            try:
                with torch.no_grad():
                    loader = self._loaders.get(delivery.name)
                    _put_into(self.tensors[delivery.name], staged, loader)
                del staged
            except Exception as error:
                entry = delivery.entry
                add_note(
                    error,
                    f"while {delivery.name} was being filled from tensor {entry.name} of "
                    f"{entry.shard.path}",
                )
                raise
            finally:
                if is_mapped and not is_idle(storages, 0):
                    assert isinstance(delivery.entry.shard, SafetensorsShard)
                    delivery.entry.shard.detach(storages[0])


class Places:
    """Tracks the memory to read into, so that no byte is written by two threads."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._sorted: list[int] = []

    def take(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` overlaps none that was taken; takes it then."""
        begin = tensor.data_ptr()
        storage = tensor.untyped_storage()  # where the end of another layout is, at most
        nbytes = tensor.nbytes if tensor.is_contiguous() else storage.nbytes()
        end = begin + nbytes
        at = bisect_left(self._sorted, begin)
        if at < len(self._sorted) and self._sorted[at] < end:
            return False
        if at > 0 and self._ends[self._sorted[at - 1]] > begin:
            return False
        self._sorted.insert(at, begin)
        self._ends[begin] = end
        return True


def _is_filled_in_place(entry: Entry, target: Tensor) -> bool:
    return (
        type(target) in PLAIN_TYPES
        and target.layout == torch.strided
        and entry.nbytes > 0
        and not target.is_meta
        and (not isinstance(entry.shard, SafetensorsShard) or _takes_bytes(entry, target))
    )


def _takes_bytes(entry: Entry, target: Tensor) -> bool:
    """Whether the bytes of the whole entry are all that a tensor takes."""
    return (
        (target.device == _CPU or _C.can_stage(target.device))
        and target.dtype == entry.dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _is_filled_piecewise(entry: Entry, target: Tensor) -> bool:
    return (
        isinstance(entry.shard, SafetensorsShard)
        and type(target) in PLAIN_TYPES
        and target.is_contiguous()
    )


def _stage(
    device: torch.device,
    memory: RecycledMemory,
    delivery: Delivery,
    begin: int,
    n_elements: int,
) -> Staged:
    entry, shard = delivery.entry, delivery.entry.shard
    is_whole = n_elements == entry.shape.numel()
    shape = entry.shape if is_whole else torch.Size([n_elements])
    if device != _CPU:
        there = torch.empty(shape, dtype=entry.dtype, device=device)
        return Staged(delivery, Read(entry, there, begin))
    if isinstance(shard, SafetensorsShard) and shape.numel() * entry.dtype.itemsize >= MIN_NBYTES:
        mapped = shard.map_cached(entry, begin, shape)
        if mapped is not None:
            return Staged(delivery, Read(entry, mapped, begin, is_mapped=True))
    return Staged(delivery, Read(entry, memory.tensor(shape, entry.dtype), begin))


def _is_converted_there(entry: Entry, target: Tensor) -> bool:
    """Whether a tensor goes to the device as the file has it: half of the bytes, often."""
    return (
        isinstance(entry.shard, SafetensorsShard)
        and type(target) in PLAIN_TYPES
        and _C.can_stage(target.device)
        and _C.convert_alike(entry.dtype, target.dtype)
    )


def _put_into(target: Tensor, staged: Staged, loader: Callable[..., Any] | None) -> None:
    tensor, delivery = staged.read.target, staged.delivery
    if loader is None:
        if tensor.shape != delivery.entry.shape:  # a piece
            target = target.view(-1)[staged.read.begin :][: tensor.numel()]
        target.copy_(tensor)
    elif delivery.shard_id is None:
        loader(target, tensor)
    else:
        loader(target, tensor, delivery.shard_id)


def _note_change(tensor: Tensor) -> None:
    """Let autograd know, as it does of any other change."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
