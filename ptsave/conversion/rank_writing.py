"""Writes a checkpoint as a directory of torch.distributed.checkpoint with one file."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.nn import Parameter

from ptsave.dcp.metadata import set_checked_files
from ptsave.distributed.directory import CheckpointDirectory, RankFile
from ptsave.errors import SaveError
from ptsave.streaming.payload_sources import PayloadSources, SourceCheckpoint, check_records
from ptsave.support import torch_dcp
from ptsave.support.calls import ProgressCallback
from ptsave.support.text import count_text
from ptsave.tree.extents import check_expansion
from ptsave.tree.leaves import read_entry

_PLAIN_TYPES = (Tensor, Parameter)


class RankWriting:
    """Plans and writes a dict as a DCP directory; raises ValueError if two flat names are equal."""

    def __init__(
        self, checkpoint: SourceCheckpoint, sources: PayloadSources, *, max_size: int | str | None
    ) -> None:
        if not isinstance(checkpoint.obj, Mapping):
            raise ValueError(
                f"{checkpoint.path} holds a {type(checkpoint.obj).__name__}, but a directory of "
                "torch.distributed.checkpoint holds a dict: write a .pt file"
            )
        self._checkpoint = checkpoint
        self._sources = sources
        try:
            flat, paths = torch_dcp.flatten_state_dict(checkpoint.obj)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}: two entries have this name") from None
        self.remarks = _remarks(checkpoint.obj)  # about changes that lose no values
        tensors = {name: value.detach() for name, value in flat.items() if _is_plain(value)}
        check_expansion(tensors.values(), checkpoint.path, max_size=max_size)
        self.n_tensors = sum(isinstance(value, Tensor) for value in flat.values())
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._metadata = Metadata({}, planner_data=paths, storage_data={})
        self._file = RankFile()
        self._infos: list[Any] = []
        self._add(flat, tensors)

    def _add(self, flat: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if self._checkpoint.contents.kind == "dcp":
            self._checkpoint.contents.verify(progress=False)  # copying compares no checksums later
        payloads = dict(
            zip(tensors, self._sources.payloads_of(list(tensors.values())), strict=True)
        )
        # Compare the records whose bytes are all used.  Other records were compared before.
        check_records(payloads.values())
        for name, value in flat.items():
            if name in payloads:
                item = self._file.add_payload(value.dtype, value.shape, payloads[name])
            else:
                item = self._file.add_bytes(self._saved(name, value))
            self._describe(name, value, item)

    def _saved(self, name: str, value: Any) -> bytes:
        """Return a file of torch.save with one object; tensors' values are read from the source."""
        contents = self._checkpoint.contents
        stream = io.BytesIO()
        where = f"{self._checkpoint.path}: {name!r}"
        torch.save(read_entry(value, lambda tensors: contents.read(tensors, None), where), stream)
        return stream.getvalue()

    def _describe(self, name: str, value: Any, item: tuple[int, int]) -> None:
        info = torch_dcp.StorageInfo("", *item)
        self._infos.append(info)
        described: Any = BytesStorageMetadata()
        offsets = None
        if isinstance(value, Tensor):
            offsets = torch.Size([0] * value.dim())
            described = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype, requires_grad=value.requires_grad),
                value.shape,
                [ChunkStorageMetadata(offsets, value.shape)],
            )
            if not _is_plain(value):
                info.ptsave_whole = True
        self._metadata.state_dict_metadata[name] = described
        self._metadata.storage_data[MetadataIndex(name, offsets)] = info

    def write(self, path: str, *, fsync: bool, progress: ProgressCallback | None) -> None:
        """Write the directory; after an error, a checkpoint that was there before is unchanged."""
        directory = CheckpointDirectory(path)
        existed = os.path.isdir(path)
        try:
            directory.make()
        except OSError as error:
            raise SaveError.from_os_error(error, path) from None
        name = directory.new_name(0)
        try:
            written = self._file.write(
                directory.file(name), fsync=fsync, sources=self._sources.open(), progress=progress
            )
        except BaseException:
            if not existed and not os.listdir(path):
                os.rmdir(path)
            raise
        for info in self._infos:
            info.relative_path = name
        metadata = self._metadata
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=path, save_id=str(uuid.uuid4()))
        set_checked_files(metadata, {name: written})
        directory.publish(metadata, {name: written.saved_nbytes}, None, fsync=fsync)


def _is_plain(value: Any) -> bool:
    return (
        type(value) in _PLAIN_TYPES
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def _remarks(obj: Mapping[Any, Any]) -> list[str]:
    """Return a remark if keys of dicts are not str: the checkpoint has them as text."""
    found = 0
    pending: list[Any] = [obj]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            found += sum(not isinstance(key, str) for key in value)
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return [f"{count_text(found, 'key')} of dicts became text, as in dcp.save"] if found else []
