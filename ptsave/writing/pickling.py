"""Pickles an object as torch.save does, and collects the storages that the pickle refers to."""

from __future__ import annotations

import _pickle
import functools
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from ptsave import _C
from ptsave.support.torch_names import numel_of_typed, storage_id, storage_type_name, untyped_of

Storage = torch.UntypedStorage


class StorageTable:
    """Numbers storages in the order in which the pickler meets them."""

    def __init__(self, locations: Mapping[int, str]) -> None:
        self._locations = locations
        self.storages: dict[str, Storage] = {}
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        """Return torch's reference to a storage, or None for any other object."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage: Any = untyped_of(obj)
            dtype = obj.dtype
            storage_type = getattr(torch, storage_type_name(obj))
            numel = numel_of_typed(obj)
        elif torch.is_storage(obj):
            storage = obj
            dtype = torch.uint8
            storage_type = normalize_storage_type(type(obj))
            numel = storage.nbytes()
        else:
            return None
        self._check_dtype(storage, dtype)
        key = self._keys.get(storage_id(storage))
        if key is None:
            key = self._keys[storage_id(storage)] = str(self.number(storage, dtype))
        fake_device = getattr(obj, "_fake_device", None)
        location = str(fake_device) if fake_device is not None else location_tag(storage)
        location = self._locations.get(storage_id(storage), location)
        self.storages[key] = storage
        return ("storage", storage_type, key, location, numel)

    def number(self, storage: Storage, dtype: torch.dtype) -> int:
        """Return the record number of a storage that is met for the first time."""
        return len(self._keys)

    def _check_dtype(self, storage: Storage, dtype: torch.dtype) -> None:
        # A file records one dtype for each storage, so views of other dtypes cannot be saved.
        if storage.device.type == "meta" or storage.data_ptr() == 0:
            return
        if self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as "
                "different types"
            )


@functools.lru_cache(maxsize=8)
def _pickler_class(base: Any) -> Any:
    # One class for all saves: a class is in a reference cycle with itself.  A class made for each
    # save would keep that save's storages alive until the garbage collector runs.
    class Pickler(base):  # type: ignore[misc]
        table: StorageTable

        def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
            return self.table.persistent_id(obj)

    return Pickler


def pickle_object(
    obj: object,
    pickle_module: Any,
    pickle_protocol: int,
    locations: Mapping[int, str] | None = None,
) -> tuple[bytes, _C.StorageList]:
    """Pickle `obj` as :func:`torch.save` does; storage i of the list is the record ``data/i``.

    `locations` replaces the locations of storages, by their ``_cdata``.
    """
    if not locations and _is_standard(pickle_module, pickle_protocol):
        pickled = _C.pickle_object(obj)
        if pickled is not None:
            return pickled
    table = StorageTable(locations or {})
    data = dump(obj, table, pickle_module, pickle_protocol)
    return data, _C.StorageList(list(table.storages.values()))


def dump(obj: object, table: StorageTable, pickle_module: Any, pickle_protocol: int) -> bytes:
    """Pickle an object with a module's pickler; `table` makes the references to storages."""
    stream = io.BytesIO()
    pickler = _pickler_class(pickle_module.Pickler)(stream, protocol=pickle_protocol)
    pickler.table = table
    pickler.dump(obj)
    return stream.getvalue()


def _is_standard(pickle_module: Any, pickle_protocol: int) -> bool:
    """Return whether the pickler is Python's own, which the engine can replace."""
    return (
        pickle_module is pickle
        and pickle.Pickler is _pickle.Pickler
        and type(pickle_protocol) is int
        and pickle_protocol == 2
    )
