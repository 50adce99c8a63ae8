"""`StorageWriter`: saves for torch.distributed.checkpoint, with one file per rank."""

from __future__ import annotations

import copy
import errno
import io
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.nn import Parameter

from ptsave import _C
from ptsave.background import saves
from ptsave.background.saves import Reservation
from ptsave.dcp.metadata import BLOCK_NBYTES, CheckedFile, metadata_name, set_checked_files
from ptsave.dcp.read_plan import is_strided
from ptsave.distributed.directory import CheckpointDirectory, RankFile, accepts, local_path
from ptsave.distributed.planners import ItemList, with_item_list
from ptsave.errors import SaveError
from ptsave.support import config, torch_dcp
from ptsave.support.calls import check_flags, pausing_garbage_collection
from ptsave.support.torch_names import is_distributed_tensor, storage_id_of

_PLAIN_TYPES = (Tensor, Parameter)
# Attribute of a file's first item that brings the file's checksums to the coordinator.
_FILE = "ptsave_file"
# Attribute of a tensor's item that is a complete torch.save file, as each object's item is.
_WHOLE = "ptsave_whole"
# Attribute of an item whose tensor differs from the plan: the tensor's dtype and shape.
_TENSOR = "ptsave_tensor"
_YIELD_SECONDS = 1e-3
# If a tensor uses a smaller share of its storage, only the tensor is copied, not its storage.
_MIN_SHARE = 0.5
# The longest wait for the previous save's memory, because fresh memory would take as long.
_MAX_WAIT_SECONDS, _POLL_SECONDS = 2e-3, 1e-4
_FRESH_NBYTES_A_SECOND = 8e9


class StorageWriter(storage.StorageWriter):
    """Storage for :func:`torch.distributed.checkpoint.save` and ``async_save``.

    Every rank writes one file, with all threads of the engine and without the page cache.  Once all
    ranks have written their files, a rename of the file ``.metadata`` makes them the checkpoint.
    Torch's ``FileSystemReader`` can read the checkpoint, too.

    Parameters
    ----------
    path : str or os.PathLike
        Directory of the checkpoint, local or on a file system that all ranks have mounted.  It is
        created if it does not exist.
    fsync : bool, default True
        Whether the checkpoint survives power loss as soon as the save returns.
    overwrite : bool, default True
        Whether an existing checkpoint may be replaced.

    Raises
    ------
    UnsupportedUrlError
        If `path` is a URL.

    Notes
    -----
    DCP wraps the errors of a save in its ``CheckpointException``, which names the rank.  A file
    that cannot be written raises :class:`SaveError`.  So does a save with ``use_collectives=False``
    into a directory that holds a checkpoint of all ranks.  With ``overwrite=False``, an existing
    checkpoint raises :class:`RuntimeError`.  After these errors, the existing checkpoint stays.

    ``async_save`` copies the state dict.  It waits until the copy fits beside the copies of
    unfinished saves.  The limit for all copies together is ``PTSAVE_MAX_STAGED_BYTES``, by default
    half of the memory that this process may use.  A state dict that never fits raises
    :class:`StagingFullError`.  A writer can be pickled, and used for several saves in sequence.

    Examples
    --------
    >>> import tempfile, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = {"weight": torch.ones(2)}
    ...     saved = dcp.save(state, storage_writer=StorageWriter(folder), no_dist=True)
    ...     dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, fsync: bool = True, overwrite: bool = True
    ) -> None:
        check_flags(fsync=fsync, overwrite=overwrite)
        self._path = local_path(path)
        self._fsync = fsync
        self._overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self._rank = 0
        self._use_collectives = True
        self._is_staged = False

    # --------------------------------------------------------- called by DCP, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; `checkpoint_id`, if given, is its directory."""
        if checkpoint_id:
            self._path = local_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())
        if self._is_staged:
            # This is async_save's thread.  The caller's thread waits for the interpreter's lock.
            self._is_staged = False
            time.sleep(_YIELD_SECONDS)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this process's rank, and whether all ranks save together."""
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory; raise if it has a checkpoint that must not be replaced."""
        directory = CheckpointDirectory(self._path)
        directory.make()
        if not self._overwrite and directory.has_checkpoint(
            None if self._use_collectives else self._rank
        ):
            raise RuntimeError(f"Checkpoint already exists and overwrite=False: {self._path}")
        if not self._use_collectives and directory.has_checkpoint(None):
            # DCP's loads look for the checkpoint of all ranks first.
            raise SaveError(
                errno.EEXIST,
                "this directory has a checkpoint of all ranks, which loads would read instead of "
                f"what rank {self._rank} saves by itself: save to another directory, or with "
                "use_collectives=True",
                directory.file(metadata_name(None)),
            )
        return with_item_list(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans; each rank chooses the name of its file itself."""
        return [*map(with_item_list, plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; on return, it is complete, and with `fsync` it is on the disk."""
        future: Future[list[WriteResult]] = Future()
        with pausing_garbage_collection():
            future.set_result(self._write(plan.items, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, and remove the previous one."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for each in results for result in each
        }
        metadata.storage_meta = self.storage_meta()
        files = _files_of(results)
        set_checked_files(metadata, files)
        sizes = {name: file.saved_nbytes for name, file in files.items()}
        rank = None if self._use_collectives else self._rank
        with pausing_garbage_collection():
            CheckpointDirectory(self._path).publish(metadata, sizes, rank, fsync=self._fsync)

    # ------------------------------------------------------------------------------ the rest

    def storage_meta(self) -> StorageMeta:
        """Return a StorageMeta with the directory and id of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether torch's FileSystemWriter would accept an id as a checkpoint's path."""
        return accepts(checkpoint_id)

    # ------------------------------------------------- as torch's AsyncStager, for async_save

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: the copy is complete when :meth:`stage` returns."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict in CPU memory; the next save reuses that memory."""
        copied = staged(state_dict)
        self._is_staged = True
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is complete."""

    def close(self) -> None:
        """Do nothing: a copy's memory returns to the pool when the last tensor is freed."""

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        data, alike = _data_of_all(items, planner)
        order = _order_in_file(data, alike)
        items = [items[at] for at in order]
        data, alike = [data[at] for at in order], [alike[at] for at in order]
        n_whole = sum(type(each) is bytes for each in data)
        file = RankFile()
        places = [file.add_bytes(each) for each in data[:n_whole]]
        offsets, lengths = file.add_tensors(data[n_whole:], alike[n_whole:])
        directory = CheckpointDirectory(self._path)
        _remove_failed(directory, self._rank)
        place = {
            "relative_path": directory.new_name(self._rank),
            "offset": [offset for offset, _ in places] + offsets,
            "length": [length for _, length in places] + lengths,
            "transform_descriptors": None,
        }
        infos = _C.instances(torch_dcp.StorageInfo, place)
        _describe_all(infos, items, data, alike)
        written = file.write(directory.file(infos[0].relative_path), fsync=self._fsync)
        _note_written(directory, self._rank, infos[0].relative_path)
        setattr(infos[0], _FILE, (written.nbytes, written.crcs))
        result = {
            "index": [item.index for item in items],
            "size_in_bytes": place["length"],
            "storage_data": infos,
        }
        return ItemList(_C.instances(WriteResult, result))


def _data_of_all(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[Any], list[int]]:
    """Return what to write for each item, and a number for its kind of tensor (-1 for bytes)."""
    values: list[Any] = [planner.resolve_data(item) for item in items]
    alike = _C.tensor_kinds(values, _PLAIN_TYPES)
    as_is = {number for number in set(alike) - {-1} if _is_written_as_is(values[number])}
    data = [
        value
        if number in as_is and item.type is not WriteItemType.BYTE_IO
        else _data_of(item, value)
        for item, value, number in zip(items, values, alike, strict=True)
    ]
    if len(as_is) < len(set(alike)):  # some values are new tensors
        alike = _C.tensor_kinds(data, _PLAIN_TYPES)
    return data, alike


def _order_in_file(data: Sequence[Any], alike: Sequence[int]) -> list[int]:
    """Return the indices of bytes, then of tensors smaller than a block, then of larger tensors."""
    classes = {
        number: 1 if data[number].nbytes < BLOCK_NBYTES else 2 for number in set(alike) - {-1}
    }
    keys = [classes.get(number, 0) for number in alike]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _is_written_as_is(tensor: Tensor) -> bool:
    return _is_plain(tensor) and is_strided(tensor) and tensor.is_cpu and tensor.is_contiguous()


def _data_of(item: WriteItem, data: Any) -> Tensor | bytes:
    """Return what to write for an item: a contiguous tensor, or a complete torch.save file."""
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"the planner's value of {item.index.fqn} is not an io.BytesIO")
        return data.getvalue()
    if not isinstance(data, Tensor):
        raise TypeError(f"the planner's value of {item.index.fqn} is not a tensor")
    tensor = data if type(data) is Tensor and not data.requires_grad else data.detach()
    if not _is_plain(tensor):
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        return stream.getvalue()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_cpu and not _C.can_stage(tensor.device):
        tensor = tensor.cpu()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _describe_all(
    infos: Sequence[Any],
    items: Sequence[WriteItem],
    data: Sequence[Tensor | bytes],
    alike: Sequence[int],
) -> None:
    """Note in `infos` which items are torch.save files, or differ from the planned tensor."""
    described: set[tuple[int, int]] = set()  # kinds of tensors that are as planned
    for info, item, value, number in zip(infos, items, data, alike, strict=True):
        planned = item.tensor_data
        if planned is None or (number, id(planned)) in described:
            continue
        if not isinstance(value, Tensor):
            setattr(info, _WHOLE, True)
        elif (value.dtype, value.shape) != (planned.properties.dtype, planned.chunk.sizes):
            setattr(info, _TENSOR, (value.dtype, value.shape))
        else:
            described.add((number, id(planned)))


def _files_of(results: list[list[WriteResult]]) -> dict[str, CheckedFile]:
    """Take each file's checksums from the file's first item."""
    files = {}
    for each in results:
        for result in each[:1]:
            brought = vars(result.storage_data).pop(_FILE)
            files[result.storage_data.relative_path] = CheckedFile(*brought)
    return files


# ------------------------------------------------------------------------------ failed saves


@dataclass(frozen=True)
class _Written:
    """A file that this process has written."""

    name: str
    thread: threading.Thread  # the save is over when this thread has ended, or saves again
    process: int  # id of the process that wrote it; a forked child has another id

    @property
    def is_of_ended_save(self) -> bool:
        """Whether the save that has written the file is over."""
        has_ended = self.thread is threading.current_thread() or not self.thread.is_alive()
        return has_ended and self.process == os.getpid()


_lock = threading.Lock()
_written: dict[tuple[str, int], list[_Written]] = {}  # by directory and rank


def _note_written(directory: CheckpointDirectory, rank: int, name: str) -> None:
    """Remember a file of this thread's save, because no call reports the end of the save."""
    key = os.path.abspath(directory.path), rank
    with _lock:
        found = _Written(name, threading.current_thread(), os.getpid())
        _written.setdefault(key, []).append(found)


def _remove_failed(directory: CheckpointDirectory, rank: int) -> None:
    """Remove the files of a rank's ended saves, unless metadata names them.

    A save that succeeds removes all other files.  If a save fails on one rank, the writers of the
    other ranks do not learn of the failure, and their files stay.  Without this function, a loop
    that keeps saving to a full disk would add a file with each save.
    """
    key = os.path.abspath(directory.path), rank
    with _lock:
        all_written = _written.pop(key, [])
        ended = [each for each in all_written if each.is_of_ended_save]
        others = [each for each in all_written if each not in ended]
        if others:
            _written[key] = others
    directory.remove_unnamed([each.name for each in ended], rank)


# ----------------------------------------------------------------------- staging of async_save


class _Staged(dict[str, Any]):
    """A copied state dict.  Its memory is reserved until DCP drops the copy after the save."""

    def __init__(self, values: dict[str, Any], reservation: Reservation) -> None:
        super().__init__(values)
        self._reservation = reservation

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # the process that saves needs no reservation


def staged(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Copy a state dict into CPU memory, where other code cannot change it.

    Tensors that share a storage share one in the copy, too.  The memory returns to the pool when
    the last tensor is freed.  If the copies of other saves leave too little room, the call waits.
    A state dict that never fits raises StagingFullError.
    """
    all_tensors = list(_tensors_of(state_dict))
    tensors = [tensor for tensor in all_tensors if _can_snapshot(tensor)]
    storages = {storage_id_of(tensor): tensor.untyped_storage() for tensor in tensors}
    nbytes = sum(storage.nbytes() for storage in storages.values())
    nbytes += sum(each.nbytes for each in all_tensors if storage_id_of(each) not in storages)
    _wait_for_memory(nbytes)
    reservation = saves.reserve(nbytes, config.current().max_staged_nbytes, wait=True)
    snapshot = _C.Snapshot(_C.StorageList(list(storages.values())))
    try:
        snapshot.copy(n_threads=config.current().n_threads, progress=None)
        copies = dict(zip(storages, _C.untyped_storages(snapshot.storages), strict=True))
    finally:
        snapshot.release()  # the tensors keep their memory
    return _Staged(_Copier(copies).copy(state_dict), reservation)


def _wait_for_memory(nbytes: int) -> None:
    """Wait until the memory of a save that has just ended is back in the pool.

    DCP drops the copy after the save's future is done, in a thread that needs the interpreter's
    lock.  The thread that begins the next save holds that lock.  Getting fresh memory would take
    longer than copying into it.
    """
    deadline = time.perf_counter() + min(_MAX_WAIT_SECONDS, nbytes / _FRESH_NBYTES_A_SECOND)
    while time.perf_counter() < deadline:
        pool = _C.staging_statistics()
        used_nbytes = pool["used_nbytes"]
        if not used_nbytes or pool["mapped_nbytes"] - used_nbytes >= nbytes:
            return
        time.sleep(_POLL_SECONDS)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _tensors_of(each)
    elif type(value) in (list, tuple):
        for each in value:
            yield from _tensors_of(each)
    elif is_distributed_tensor(value):
        yield value.detach().to_local()
    elif type(value) in _PLAIN_TYPES:
        yield value


def _can_snapshot(tensor: Tensor) -> bool:
    """Return whether a tensor's storage is copied as a whole."""
    if not is_strided(tensor) or tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    return bool(tensor.nbytes >= _MIN_SHARE * tensor.untyped_storage().nbytes())


class _Copier:
    """Copies containers and their tensors, given the copies of the tensors' storages."""

    def __init__(self, storages: dict[Any, torch.UntypedStorage]) -> None:
        self._storages = storages

    def copy(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: self.copy(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.copy(each) for each in value)
        if is_distributed_tensor(value):
            return self._distributed(value.detach())
        if type(value) in _PLAIN_TYPES:
            return self._tensor(value.detach())
        if not isinstance(value, dict):
            return copy.deepcopy(value)
        copied = copy.copy(value)
        for key, each in value.items():
            copied[key] = self.copy(each)
        return copied

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = self._storages.get(storage_id_of(tensor)) if _can_snapshot(tensor) else None
        if storage is None:
            return tensor.to("cpu", copy=True)
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return copied

    def _distributed(self, tensor: Any) -> Any:
        return type(tensor).from_local(
            self._tensor(tensor.to_local()),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
