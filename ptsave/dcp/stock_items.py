"""Finds a tensor's bytes in an item of torch's FileSystemWriter, which is a torch.save archive."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ptsave.archive.checks import find_damage
from ptsave.archive.reader import RecordReader
from ptsave.archive.remote import RemoteReader
from ptsave.archive.spans import Damage, spans_of
from ptsave.archive.unpickling import can_defer_reading, unpickle_unread
from ptsave.archive.weights_only import raise_with_advice
from ptsave.dcp.rank_files import RankFiles, StoredTensor
from ptsave.sources.kinds import ZIP_MAGIC, is_legacy
from ptsave.support.torch_serialization import restricted_unpickler


def stored_tensor(files: RankFiles, info: Any, name: str) -> StoredTensor | None:
    """Return the tensor that an item holds, or None if only torch can read the item.

    `info` is the item in the metadata.  `name` is for errors; a damaged archive is a
    CorruptCheckpointError.
    """
    offset, _ = files.place_of(info, name)
    if files.head_of(info, name, len(ZIP_MAGIC)) != ZIP_MAGIC:
        return None
    path = f"{files.file(info.relative_path)} ({name}, from offset {offset} on)"
    try:
        reader = files.archive_of(info, name, path, verify=files.verify)
        if not can_defer_reading(reader, restricted_unpickler):
            return None
        tensor = unpickle_unread(reader, restricted_unpickler, set())
        return _describe(tensor, reader, info.relative_path, name, offset)
    except UnpicklingError as error:
        raise_with_advice(error, restricted_unpickler)


def damage_in(files: RankFiles, info: Any, name: str) -> list[Damage] | None:
    """Return the damaged records of an item, with offsets in it; None if it has no checksums."""
    path = files.file(info.relative_path)
    if is_legacy(files.head_of(info, name, 64)):
        return None
    reader = files.archive_of(info, name, path, verify=True)
    damage = find_damage(reader, spans_of(reader), None)
    return damage if damage or reader.engine.storages_have_crcs else None


def _describe(
    tensor: Any, reader: RecordReader, file: str, name: str, offset: int
) -> StoredTensor | None:
    engine = reader.engine
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    if tensor.numel() == 0:
        return StoredTensor(file, name, tensor.dtype, tensor.shape, strides, offset)
    number = engine.record_of(tensor)
    if number is None:
        return None
    record = engine.record(number)
    is_remote = isinstance(reader, RemoteReader)  # its header has to be fetched
    at = reader.get_record_offset(record.name) if is_remote else engine.payload_offset(number)
    begin = at + int(tensor.storage_offset()) * tensor.itemsize
    is_all = tensor.is_contiguous() and record.nbytes == tensor.nbytes
    crc = record.crc if is_all and engine.has_crcs else None
    return StoredTensor(file, name, tensor.dtype, tensor.shape, strides, offset + begin, crc)
