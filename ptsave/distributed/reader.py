"""`StorageReader`: loads of torch.distributed.checkpoint that read the bytes they need, checked."""

from __future__ import annotations

import io
import os
import uuid
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.nn import Parameter

from ptsave.dcp.metadata import checked_files, load_metadata, metadata_name
from ptsave.dcp.rank_files import Box, RankFiles
from ptsave.dcp.stock_items import stored_tensor
from ptsave.distributed.paths import accepts, local_path
from ptsave.errors import CorruptCheckpointError
from ptsave.support.flags import check_flags
from ptsave.support.garbage import pausing_garbage_collection

__all__ = ["StorageReader"]

_PLAIN_TYPES = (Tensor, Parameter)
_CPU = torch.device("cpu")
# Values that are brought to their targets by a copy are read so many bytes at a time.
_STAGED_NBYTES = 256 << 20


class StorageReader(storage.StorageReader):
    """Storage for :func:`torch.distributed.checkpoint.load`.

    A rank reads only the bytes that it needs, from all files at once, straight into its tensors in
    CPU memory; tensors elsewhere get theirs by a copy, 256 MiB at a time.  Checkpoints of torch's
    ``FileSystemWriter`` are read as well.  Nothing that the metadata says is run: it may hold
    DCP's classes only.

    Parameters
    ----------
    path : str or os.PathLike
        Directory of the checkpoint.
    verify : bool, default True
        Whether bytes are compared with their checksums before they reach a tensor, a block of
        4,096 bytes at a time.  Of a checkpoint by torch's writer only tensors that are wanted as a
        whole can be checked, after they are read.

    Raises
    ------
    UnsupportedUrlError
        If `path` is a URL.

    Notes
    -----
    Loads raise :class:`CorruptCheckpointError` (in DCP's ``CheckpointException``, which names the
    rank) for damaged files and metadata, with the file, the offset and the names of the tensors;
    some tensors may have changed by then.

    Examples
    --------
    >>> import tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = {"weight": torch.ones(2)}
    ...     saved = dcp.save(state, checkpoint_id=folder, no_dist=True)
    ...     dcp.load(state, storage_reader=StorageReader(folder), no_dist=True)
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        check_flags(verify=verify)
        self._path = local_path(path)
        self._verify = verify
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None

    # --------------------------------------------------------- called by DCP, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from another directory if that is given."""
        self._metadata = None
        if checkpoint_id:
            self._path = local_path(checkpoint_id)
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata: of all ranks, or of the one that saved by itself (``rank=``)."""
        metadata = load_metadata(self._file(metadata_name(kwargs.get("rank"))))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata that was read."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; all is there when the call returns."""
        if self._metadata is None:
            raise RuntimeError("set_up_storage_reader() comes before read_data()")
        metadata_path = self._file(metadata_name(None))
        checked = checked_files(self._metadata, metadata_path)
        with (
            pausing_garbage_collection(),
            RankFiles(self._path, checked, verify=self._verify) as files,
        ):
            _Load(self._metadata, files, planner).run(plan.items)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ------------------------------------------------------------------------------ the rest

    def _file(self, name: str) -> str:
        return os.path.join(self._path, name)

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be there, as torch's FileSystemReader has it."""
        return accepts(checkpoint_id)


@dataclass
class _Wanted:
    """An item with the memory that its bytes are read into.

    Attributes
    ----------
    item : ReadItem
        The plan's entry.
    box : Box
        Where the bytes are, and where they go.
    target : torch.Tensor or None
        The tensor that gets them; None for an object.
    """

    item: ReadItem
    box: Box
    target: Tensor | None

    @property
    def is_staged(self) -> bool:
        return self.target is not self.box.target


class _Load:
    """Reads the items of one plan, in pipelines of bounded memory."""

    def __init__(self, metadata: Metadata, files: RankFiles, planner: LoadPlanner) -> None:
        self._metadata = metadata
        self._files = files
        self._planner = planner
        self._wanted: list[_Wanted] = []
        self._n_staged = 0

    def run(self, items: list[ReadItem]) -> None:
        """Read all of them, and hand them to the planner."""
        for item in items:
            self._add(item)
            if self._n_staged >= _STAGED_NBYTES:
                self._flush()
        self._flush()

    def _add(self, item: ReadItem) -> None:
        info = self._info_of(item)
        if item.type == LoadItemType.BYTE_IO:
            self._want(item, self._files.whole(info, item.storage_index.fqn), None)
            return
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise AssertionError(
                f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}"
            )
        box = self._box_of(item, info, target)
        if box is None:  # it is a file of its own in a format that has no places
            self._planner.commit_tensor(item, self._copy_whole(item, info, target))
            return
        self._want(item, box, target)

    def _want(self, item: ReadItem, box: Box, target: Tensor | None) -> None:
        wanted = _Wanted(item, box, target)
        self._wanted.append(wanted)
        if wanted.is_staged:
            self._n_staged += box.target.nbytes

    def _info_of(self, item: ReadItem) -> Any:
        try:
            return self._metadata.storage_data[item.storage_index]
        except KeyError:
            raise CorruptCheckpointError(
                f"{self._files.path}: the metadata does not say where {item.storage_index} is",
                path=self._files.path,
                entries=[item.storage_index.fqn],
            ) from None

    def _box_of(self, item: ReadItem, info: Any, target: Tensor) -> Box | None:
        name = item.storage_index.fqn
        if self._files.is_checked(info) and not getattr(info, "ptsave_whole", False):
            dtype, shape = getattr(info, "ptsave_tensor", None) or self._planned(item)
            tensor = self._files.tensor_at_end(info, name, dtype, torch.Size(shape))
        else:
            stored = stored_tensor(self._files, info, name)
            if stored is None:
                return None
            tensor = stored
        place = target if _takes_bytes(target, tensor.dtype) else None
        if place is None:
            place = torch.empty(item.lengths, dtype=tensor.dtype)
        return tensor.box(item.storage_offsets, place)

    def _planned(self, item: ReadItem) -> tuple[torch.dtype, torch.Size]:
        index = item.storage_index
        described = self._metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(described, TensorStorageMetadata):
            raise CorruptCheckpointError(
                f"{self._files.path}: the metadata describes no tensor {index.fqn}",
                path=self._files.path,
                entries=[index.fqn],
            )
        return described.properties.dtype, _chunk_of(described, item, self._files.path).sizes

    def _copy_whole(self, item: ReadItem, info: Any, target: Tensor) -> Tensor:
        stream = io.BytesIO(self._files.read_whole(info, item.storage_index.fqn))
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            if offset or length != tensor.size(dim):
                tensor = tensor.narrow(dim, offset, length)
        target.copy_(tensor)
        return target

    def _flush(self) -> None:
        wanted, self._wanted, self._n_staged = self._wanted, [], 0
        self._files.read([each.box for each in wanted])
        wanted.reverse()
        while wanted:
            self._deliver(wanted.pop())

    def _deliver(self, wanted: _Wanted) -> None:
        if wanted.target is None:
            data = io.BytesIO(wanted.box.target.numpy().tobytes())
            self._planner.load_bytes(wanted.item, data)
            return
        if wanted.is_staged:
            wanted.target.copy_(wanted.box.target)
        self._planner.commit_tensor(wanted.item, wanted.target)


def _chunk_of(described: TensorStorageMetadata, item: ReadItem, path: str) -> ChunkStorageMetadata:
    """Return the chunk of a tensor that an item reads from."""
    index, chunks = item.storage_index, described.chunks
    hint = index.index
    if hint is not None and 0 <= hint < len(chunks) and chunks[hint].offsets == index.offset:
        return chunks[hint]
    for chunk in chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    raise CorruptCheckpointError(
        f"{path}: the metadata has no part of {index.fqn} at {index.offset}",
        path=path,
        entries=[index.fqn],
    )


def _takes_bytes(target: Tensor, dtype: torch.dtype) -> bool:
    """Return whether bytes can be read straight into a tensor, in runs that are worth it."""
    return (
        type(target) in _PLAIN_TYPES
        and target.device == _CPU
        and target.layout == torch.strided
        and target.dtype == dtype
        and not target.is_conj()
        and not target.is_neg()
        and not target.is_quantized
        and (target.is_contiguous() or target.dim() == 0 or target.stride(-1) == 1)
    )
