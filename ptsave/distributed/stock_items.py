"""Where the bytes of a tensor are in an item of torch's FileSystemWriter, a torch.save archive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.format_errors import raise_corrupt
from ptsave.archive.reader import RecordReader
from ptsave.archive.unpickling import can_defer_reading
from ptsave.contents.contents import UnreadContents
from ptsave.distributed.rank_file_reading import RankFiles, StoredTensor
from ptsave.sources.kinds import ZIP_MAGIC
from ptsave.support import config
from ptsave.support.torch_serialization import restricted_unpickler

__all__ = ["stored_tensor"]


def stored_tensor(files: RankFiles, info: Any, name: str) -> StoredTensor | None:
    """Return the tensor that an item holds.

    Parameters
    ----------
    files : RankFiles
        The checkpoint's files.
    info : object
        The item, as the metadata describes it.
    name : str
        The tensor's, for errors.

    Returns
    -------
    StoredTensor or None
        None if the item is no archive of one tensor that the engine can read: torch has to.

    Raises
    ------
    CorruptCheckpointError
        If the item is a damaged archive.
    """
    offset, length = files.place_of(info, name)
    view = files.view(info.relative_path)[offset : offset + length]
    if view[:4] != ZIP_MAGIC:
        return None
    path = f"{files.file(info.relative_path)} ({name}, from offset {offset} on)"
    try:
        engine = _C.Reader.open_memory(view, name=path)
        reader = RecordReader(engine, path, config.current(), verify=files.verify)
        if not can_defer_reading(reader, restricted_unpickler):
            return None
        contents = UnreadContents(reader)
        return _describe(contents, info.relative_path, name, offset)
    except _C.FormatError as error:
        raise_corrupt(error, path)


def _describe(contents: UnreadContents, file: str, name: str, offset: int) -> StoredTensor | None:
    tensor = contents.obj
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    engine = contents.reader.engine
    strides = tuple(step * tensor.itemsize for step in tensor.stride())
    if tensor.numel() == 0:
        return StoredTensor(file, name, tensor.dtype, tensor.shape, strides, offset)
    number = engine.record_of(tensor)
    if number is None:
        return None
    record = engine.record(number)
    begin = engine.payload_offset(number) + int(tensor.storage_offset()) * tensor.itemsize
    is_all = tensor.is_contiguous() and record.nbytes == tensor.nbytes
    crc = record.crc if is_all and engine.has_crcs else None
    return StoredTensor(file, name, tensor.dtype, tensor.shape, strides, offset + begin, crc)
