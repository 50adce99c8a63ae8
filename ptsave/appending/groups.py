"""Pickles groups of entries; their pickles, put together, are the pickle of one dict.

The pickle of a dict with ``k`` and ``v`` is ``HEAD k v SETITEM .``; without the head and the full
stop, it adds the entries to the dict on the stack.  Each group numbers its memo from 1 again,
because nothing refers to the memo of an earlier group.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

import torch

from ptsave import _C
from ptsave.archive.recovery import part_of_dict
from ptsave.support.torch_tensors import storage_id
from ptsave.writing.pickling import StorageTable, dump

_PROTOCOL = 2


class _SharedStorages(StorageTable):
    """Numbers storages as the archive does, so that each storage is written once."""

    def __init__(self, numbers: _C.NumberedStorages) -> None:
        super().__init__({})
        self._numbers = numbers
        self._tensors: dict[int, torch.Tensor] = {}  # by storage

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if isinstance(obj, torch.Tensor) and obj.layout == torch.strided:
            with suppress(RuntimeError, NotImplementedError):  # a subclass without a storage
                self._tensors[storage_id(obj.untyped_storage())] = obj
        return super().persistent_id(obj)

    def number(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
        return self._numbers.number(storage, self._tensors.get(storage_id(storage)), dtype)


def pickle_group(entries: dict[str, object], numbers: _C.NumberedStorages) -> bytes:
    """Return the pickle of entries, without head and full stop.

    `numbers` gets the storages of the entries; the caller commits them or rolls them back.
    """
    data = numbers.pickle(entries)
    if data is None:
        numbers.rollback()  # forgets storages that the engine met before it gave up
        data = dump(entries, _SharedStorages(numbers), pickle, _PROTOCOL)
    part = part_of_dict(data)
    assert part is not None
    return part
