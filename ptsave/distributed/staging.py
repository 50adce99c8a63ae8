"""Copies a state dict for `async_save`, into memory that the next save uses again."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C
from ptsave.background import saves
from ptsave.background.saves import Reservation
from ptsave.support import config
from ptsave.support.torch_names import is_distributed_tensor, storage_id_of

_PLAIN_TYPES = (Tensor, Parameter)
# If a tensor uses a smaller share of its storage, only the tensor is copied.
_MIN_SHARE = 0.5
# The wait for memory of the previous save; fresh memory from the system would take as long.
_MAX_WAIT_SECONDS, _POLL_SECONDS = 2e-3, 1e-4
_FRESH_NBYTES_A_SECOND = 8e9


class _Staged(dict[str, Any]):
    """A staged state dict, which reserves its memory until DCP drops it at the end of the save."""

    def __init__(self, values: dict[str, Any], reservation: Reservation) -> None:
        super().__init__(values)
        self._reservation = reservation

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # the process that saves needs no reservation


def staged(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Copy a state dict into CPU memory, where other code cannot change it.

    Tensors that share a storage share one in the copy.  The memory returns to the pool with the
    last tensor.  The call waits while copies of other saves take the room; a state dict that is
    larger than the whole room is a StagingFullError.
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
    """Wait until the copy of a save that has just ended is back in the pool.

    DCP drops the copy after its future is done, in a thread that needs the interpreter's lock.  The
    thread that begins the next save holds that lock.  Fresh memory would take longer than the copy
    into it.
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
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if tensor.device.type != "cpu" or tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return False
    return bool(tensor.nbytes >= _MIN_SHARE * tensor.untyped_storage().nbytes())


class _Copier:
    """Copies containers, with tensors over the copies of their storages."""

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
        if isinstance(value, dict):
            return self._mapping(value)
        return copy.deepcopy(value)

    def _mapping(self, value: Any) -> Any:
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
