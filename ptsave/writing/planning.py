"""Pickles an object, and plans the records of its archive; `SaveOptions` has a save's options."""

from __future__ import annotations

import _pickle
import functools
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.serialization import DEFAULT_PROTOCOL, location_tag, normalize_storage_type

from ptsave import _C
from ptsave.support.calls import check_flags
from ptsave.support.torch_names import (
    numel_of_typed,
    options,
    storage_alignment,
    storage_id,
    storage_type_name,
    untyped_of,
)
from ptsave.writing.targets import absolute, is_url_file, name_of, resolve, root_for_path

if TYPE_CHECKING:
    from ptsave.writing.sharing import Base

_Records: TypeAlias = "_C.PlannedRecord | _C.StorageList"

_SERIALIZATION_ID_NBYTES = 40
# With a larger alignment, the padding may not fit into a zip header, so torch writes a bad file.
_MAX_ALIGNMENT = 32768


def engine_can_save(new_format: bool) -> bool:
    """Return whether the engine can write the zip format with torch's current storage alignment."""
    return new_format and storage_alignment() <= _MAX_ALIGNMENT


def plan_archive(
    target: object, data: bytes, storages: _C.StorageList, no_byte_order: bool
) -> _C.WritePlan:
    """Plan the archive of a pickle and its storages; keep the storages alive until the write ends.

    The archive's root folder has the stem of a path or URL as its name; otherwise it is "archive".
    With `no_byte_order`, the record ``byteorder`` comes after ``version``, because torch's Python
    code then leaves the record out, and torch's C++ code adds it at the end.
    """
    alignment = str(storage_alignment()).encode()
    byte_order = [("byteorder", sys.byteorder.encode(), len(sys.byteorder))]
    root = "archive"
    if isinstance(target, str) or is_url_file(target):
        root = root_for_path(name_of(target))
    records: list[_Records] = [
        ("data.pkl", data, len(data)),
        (".format_version", b"1", 1),
        (".storage_alignment", alignment, len(alignment)),
        *([] if no_byte_order else byte_order),
        *_storage_records(storages),
        ("version", b"3\n", 2),
        *(byte_order if no_byte_order else []),
        (".data/serialization_id", b"", _SERIALIZATION_ID_NBYTES),
    ]
    return _C.WritePlan(root, records, storage_alignment())


def _storage_records(storages: _C.StorageList) -> list[_Records]:
    skip_data = options.skip_data
    if storages.in_reach and not skip_data:
        return [storages]
    records: list[_Records] = []
    staged: list[torch.UntypedStorage] = []  # at most one: the CPU copy being written
    for i, storage in enumerate(_C.untyped_storages(storages)):
        payload: int | Callable[[], int] | None
        if skip_data:
            payload = None
        elif storage.device.type == "cpu":
            payload = storage.data_ptr() or None
        else:
            payload = functools.partial(_stage, storage, staged)
        records.append((f"data/{i}", payload, storage.nbytes()))
    return records


def _stage(storage: torch.UntypedStorage, staged: list[torch.UntypedStorage]) -> int:
    """Drop the previous copy, copy a storage to CPU memory, and return the copy's address."""
    from torch.utils.serialization import config

    staged.clear()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    same_device = accelerator is not None and accelerator.type == storage.device.type
    if config.save.use_pinned_memory_for_d2h and same_device:
        pinned = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        copy = pinned.untyped_storage()
        copy.copy_(storage)
        torch.accelerator.current_stream(storage.device.index).synchronize()
    else:
        copy = storage.cpu()
    staged.append(copy)
    return copy.data_ptr()


@dataclass(frozen=True, eq=False, repr=False)
class SaveOptions:
    """The arguments of `ptsave.async_save` except `obj` and `f`; `ptsave.save` has some of them."""

    pickle_module: ModuleType = pickle
    pickle_protocol: int = DEFAULT_PROTOCOL
    _use_new_zipfile_serialization: bool = True
    _disable_byteorder_record: bool = False
    fsync: bool = False
    atomic: bool = True
    progress: bool = False
    storage_options: Mapping[str, Any] | None = None
    weights_only_check: bool = False
    base: Base | str | os.PathLike[str] | None = None
    staging: str = "blocking"
    max_staged_bytes: int | None = None
    when_full: str = "wait"

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SaveOptions:
        """Return the options from a call's arguments, which the caller passes as ``locals()``."""
        return cls(
            **{each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        )

    def check(self) -> None:
        """Raise an error if an option has an invalid value."""
        if self.staging not in ("blocking", "background"):
            raise ValueError(f"staging must be 'blocking' or 'background', not {self.staging!r}")
        if self.when_full not in ("wait", "raise"):
            raise ValueError(f"when_full must be 'wait' or 'raise', not {self.when_full!r}")
        check_flags(
            fsync=self.fsync, atomic=self.atomic, weights_only_check=self.weights_only_check
        )

    def base_for(self, target: object) -> Base | None:
        """Return the base of a save to `target`, with an absolute path."""
        if self.base is None:
            return None
        from ptsave.writing.sharing import Base

        if isinstance(self.base, Base):
            return self.base
        if not isinstance(target, str) and not is_url_file(target):
            raise TypeError("base needs a path or a URL to save to, not a file-like object")
        base = resolve(self.base, self.storage_options)
        return Base(absolute(base) if isinstance(base, str) else base, is_required=True)


class StorageTable:
    """Numbers storages in the order in which the pickler meets them."""

    def __init__(self, locations: Mapping[int, str]) -> None:
        self._locations = locations
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        """Return the tuple by which torch's pickles name a storage; None for any other object."""
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

    def number(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
        """Return the record number of a storage that the pickler meets for the first time."""
        return len(self._keys)

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        # A file records one dtype for each storage, so views with different dtypes cannot be saved.
        if storage.device.type == "meta" or storage.data_ptr() == 0:
            return
        if self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as "
                "different types"
            )


@functools.lru_cache(maxsize=8)
def _pickler_class(base: Any) -> Any:
    # All saves share one class, because every class is in a reference cycle.  A class for each save
    # would keep that save's storages alive until the garbage collector runs.
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
    """Pickle `obj` as torch.save does; `locations` maps a `storage_id` to the device to record."""
    is_standard = pickle_module is pickle and pickle.Pickler is _pickle.Pickler
    if is_standard and type(pickle_protocol) is int and pickle_protocol == 2 and not locations:
        pickled = _C.pickle_object(obj)
        if pickled is not None:
            return pickled
    table = StorageTable(locations or {})
    data = dump(obj, table, pickle_module, pickle_protocol)
    return data, _C.StorageList(list(table.storages.values()))


def dump(obj: object, table: StorageTable, pickle_module: Any, pickle_protocol: int) -> bytes:
    """Pickle an object with the pickler of `pickle_module`; `table` numbers the storages."""
    stream = io.BytesIO()
    pickler = _pickler_class(pickle_module.Pickler)(stream, protocol=pickle_protocol)
    pickler.table = table
    pickler.dump(obj)
    return stream.getvalue()
