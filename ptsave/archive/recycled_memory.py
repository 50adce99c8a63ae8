"""A pool of CPU memory for tensors; memory is reused once nothing references its tensor."""

from __future__ import annotations

import sys
from threading import Lock

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.views import new_storage

MIN_NBYTES = 1 << 20  # below this, malloc has memory whose pages exist
_CPU = torch.device("cpu")
_MAX_LENT = 256  # beyond this, the pool forgets the oldest


class RecycledMemory:
    """Lends memory for tensors, and lends it again when nothing refers to it any more.

    Fresh pages cost more than the copy into them, and a model has many tensors of one size.  Memory
    is lent again only for the same number of bytes, so a tensor that is kept holds no more than its
    own.  The pool holds at most `max_nbytes`, lent or idle, but may lend more.  Safe for concurrent
    use.

    >>> memory = RecycledMemory(1 << 24)
    >>> tensor = memory.tensor(torch.Size([1024, 512]), torch.float32)
    >>> place = tensor.data_ptr()
    >>> del tensor
    >>> memory.tensor(torch.Size([1 << 19]), torch.int32).data_ptr() == place
    True
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._storages: list[torch.UntypedStorage] = []
        self._lock = Lock()

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in CPU memory, with any values."""
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < MIN_NBYTES:
            return torch.empty(shape, dtype=dtype, device=_CPU)
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        contiguous = torch.empty(shape, dtype=dtype, device="meta").stride()
        return tensor.set_(self.storage(nbytes), 0, shape, contiguous)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return CPU memory, with any values."""
        if nbytes < MIN_NBYTES:
            return new_storage(nbytes)
        with self._lock:
            return self._recycled(nbytes)

    def _recycled(self, nbytes: int) -> torch.UntypedStorage:
        lent, idle = self._sorted_by_use()
        found = next((storage for storage in idle if storage.nbytes() == nbytes), None)
        if found is None:
            found = _C.huge_page_storage(nbytes)
        else:
            idle = [storage for storage in idle if storage is not found]
        room_nbytes = self._max_nbytes - nbytes - sum(storage.nbytes() for storage in lent)
        self._storages = [*lent[-_MAX_LENT:], found]
        for storage in idle:
            room_nbytes -= storage.nbytes()
            if room_nbytes >= 0:
                self._storages.append(storage)
        return found

    def _sorted_by_use(self) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
        lent: list[torch.UntypedStorage] = []
        idle: list[torch.UntypedStorage] = []
        for number in range(len(self._storages)):
            (idle if is_idle(self._storages, number) else lent).append(self._storages[number])
        return lent, idle


def is_idle(storages: list[torch.UntypedStorage], number: int) -> bool:
    """Whether only the list refers to one of the storages in it."""
    # Two references: the list's, and getrefcount's argument.  Tensors, and other users in C++, are
    # in the other count.
    return sys.getrefcount(storages[number]) <= 2 and _C.storage_use_count(storages[number]) == 1
