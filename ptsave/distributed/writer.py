"""`StorageWriter`: saves of torch.distributed.checkpoint, one file a rank."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable
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
from ptsave.dcp.blocks import BLOCK_NBYTES, table_nbytes
from ptsave.dcp.metadata import CheckedFile, set_checked_files
from ptsave.distributed.directory import CheckpointDirectory
from ptsave.distributed.paths import accepts, local_path
from ptsave.distributed.rank_file import RankFile
from ptsave.distributed.staging import staged
from ptsave.support import torch_dcp
from ptsave.support.flags import check_flags
from ptsave.support.garbage import pausing_garbage_collection

__all__ = ["StorageWriter"]

_PLAIN_TYPES = (Tensor, Parameter)
# Attribute of the first item of a file, on the way to the coordinator.
_FILE = "ptsave_file"
# Attribute of an item that is a whole torch.save file, as an object's is.
_WHOLE = "ptsave_whole"
# Attribute of an item whose tensor differs from the plan: dtype and shape.
_TENSOR = "ptsave_tensor"


class StorageWriter(storage.StorageWriter):
    """Storage for :func:`torch.distributed.checkpoint.save` and ``async_save``.

    Every rank writes one file, with all threads of the engine and past the page cache, and the
    checkpoint changes by the rename of ``.metadata``, once the files of all ranks are durable.
    Torch's ``FileSystemReader`` reads the checkpoint as well.

    Parameters
    ----------
    path : str or os.PathLike
        Directory of the checkpoint, local or on a file system that all ranks have mounted; made if
        it is not there.
    fsync : bool, default True
        Whether the checkpoint survives power loss as soon as the save returns.
    overwrite : bool, default True
        Whether a checkpoint that is there may be replaced.

    Raises
    ------
    UnsupportedUrlError
        If `path` is a URL.

    Notes
    -----
    Saves raise :class:`SaveError` (in DCP's ``CheckpointException``, which names the rank) where a
    file cannot be written, and :class:`RuntimeError` with ``overwrite=False``; the checkpoint that
    was there stays then.  Objects of this class can be pickled, and used for one save after
    another.

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
        self._save_id = str(uuid.uuid4())
        self._rank = 0
        self._use_collectives = True

    # --------------------------------------------------------- called by DCP, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another directory if that is given."""
        if checkpoint_id:
            self._path = local_path(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank."""
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, and refuse to overwrite if that is not wanted."""
        directory = CheckpointDirectory(self._path)
        directory.make()
        if not self._overwrite and directory.has_checkpoint(
            None if self._use_collectives else self._rank
        ):
            raise RuntimeError(f"Checkpoint already exists and overwrite=False: {self._path}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are: nothing of where a rank writes is in them."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; it is there, durable, when the call returns."""
        future: Future[list[WriteResult]] = Future()
        with pausing_garbage_collection():
            future.set_result(self._write(plan.items, planner))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, and remove the one before."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for each in results for result in each
        }
        metadata.storage_meta = self.storage_meta()
        files = _files_of(results)
        set_checked_files(metadata, files)
        sizes = {name: file.nbytes + table_nbytes(file.nbytes) for name, file in files.items()}
        rank = None if self._use_collectives else self._rank
        with pausing_garbage_collection():
            CheckpointDirectory(self._path).publish(metadata, sizes, rank, fsync=self._fsync)

    # ------------------------------------------------------------------------------ the rest

    def storage_meta(self) -> StorageMeta:
        """Return the metadata of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be there: no URL, and a directory that can be made."""
        return accepts(checkpoint_id)

    # ------------------------------------------------- as torch's AsyncStager, for async_save

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Return False: the copy is complete when :meth:`stage` returns."""
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict in CPU memory, which the next save uses again."""
        return staged(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is complete."""

    def close(self) -> None:
        """Do nothing: the copies' memory goes back with the last of them."""

    def _write(self, items: Iterable[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        resolved = [(item, _data_of(item, planner)) for item in items]
        if not resolved:
            return []
        resolved.sort(key=lambda pair: _size_class(pair[1]))
        directory = CheckpointDirectory(self._path)
        name = directory.new_name(self._rank)
        file = RankFile()
        results = []
        for item, data in resolved:
            if isinstance(data, Tensor):
                offset, length = file.add_tensor(data)
            else:
                offset, length = file.add_bytes(data)
            info = torch_dcp.StorageInfo(name, offset, length)
            _describe(info, item, data)
            results.append(WriteResult(item.index, length, info))
        written = file.write(directory.file(name), fsync=self._fsync)
        setattr(results[0].storage_data, _FILE, (written.nbytes, written.crcs))
        return results


def _data_of(item: WriteItem, planner: SavePlanner) -> Tensor | bytes:
    """Return an item's value: a contiguous tensor, or a whole torch.save file."""
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise TypeError(f"the planner's value of {item.index.fqn} is no io.BytesIO")
        return data.getvalue()
    if not isinstance(data, Tensor):
        raise TypeError(f"the planner's value of {item.index.fqn} is no tensor")
    tensor = data.detach()
    if not _is_plain(tensor):
        stream = io.BytesIO()
        torch.save(tensor.cpu(), stream)
        return stream.getvalue()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu" and not _C.can_stage(tensor.device):
        tensor = tensor.cpu()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _size_class(data: Tensor | bytes) -> int:
    """Return 0 for bytes, 1 for small tensors, 2 for those that get blocks of their own."""
    if not isinstance(data, Tensor):
        return 0
    return 1 if data.nbytes < BLOCK_NBYTES else 2


def _describe(info: Any, item: WriteItem, data: Tensor | bytes) -> None:
    """Note on an item the facts that a reader cannot take from the plan."""
    planned = item.tensor_data
    if planned is None:
        return
    if not isinstance(data, Tensor):
        setattr(info, _WHOLE, True)
    elif (data.dtype, data.shape) != (planned.properties.dtype, planned.chunk.sizes):
        setattr(info, _TENSOR, (data.dtype, data.shape))


def _files_of(results: list[list[WriteResult]]) -> dict[str, CheckedFile]:
    """Take the files' checksums from the items that have brought them."""
    files = {}
    for each in results:
        for result in each:
            brought = vars(result.storage_data).pop(_FILE, None)
            if brought is not None:
                files[result.storage_data.relative_path] = CheckedFile(*brought)
    return files
