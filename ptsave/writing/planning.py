"""Plans the records of an archive, in torch's order, and the sources of the storages' bytes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeAlias

import torch

from ptsave import _C
from ptsave.support.torch_names import options, storage_alignment
from ptsave.writing.targets import is_url_file, name_of, root_for_path

_Records: TypeAlias = "_C.PlannedRecord | _C.StorageList"

_SERIALIZATION_ID_NBYTES = 40
# The padding for a larger alignment may not fit into a zip header, and torch writes a broken file.
_MAX_ALIGNMENT = 32768


def engine_can_save(new_format: bool) -> bool:
    """Return whether the engine can save: it writes zip, with alignments that zip can hold."""
    return new_format and storage_alignment() <= _MAX_ALIGNMENT


def plan_archive(
    target: object, data: bytes, storages: _C.StorageList, no_byte_order: bool
) -> _C.WritePlan:
    """Plan the archive of a pickle and its storages, which must live until it is written.

    The archive's root folder is named after a path or URL.  With `no_byte_order`, torch's Python
    code leaves out the byte order, and its C++ code adds it in another place.
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
    """Copy a storage to CPU memory, drop the previous copy, and return the address."""
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
