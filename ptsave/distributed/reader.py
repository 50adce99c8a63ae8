"""`StorageReader`: verified loads for torch.distributed.checkpoint that read only needed bytes."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ptsave import _C
from ptsave.dcp.metadata import (
    CheckedFile,
    ReadMetadata,
    checked_files,
    load_metadata,
    metadata_name,
    replaced,
)
from ptsave.dcp.rank_files import FetchedFiles, RankFiles
from ptsave.dcp.read_plan import ReadPlan, takes_bytes
from ptsave.distributed.directory import accepts, directory_name, remote_metadata
from ptsave.distributed.planners import with_item_list
from ptsave.sources.locations import is_url_source
from ptsave.sources.ranges import FsspecFile
from ptsave.support.calls import check_flags, pausing_garbage_collection

_N_ITEMS_AT_A_TIME = 4096
_NOWHERE = object(), None


class StorageReader(storage.StorageReader):
    """Storage for :func:`torch.distributed.checkpoint.load`.

    A rank reads only the bytes that it needs, from all files at once, directly into its tensors in
    CPU memory.  For tensors on other devices, about 256 MiB at a time are read into temporary
    memory and copied.  Checkpoints of torch's ``FileSystemWriter`` can be read, too.  No code in
    the metadata runs.

    Parameters
    ----------
    path : str or os.PathLike
        Path or URL of the checkpoint's directory.
    verify : bool, default True
        Whether each block of 4,096 bytes is compared with its checksum before its bytes reach a
        tensor.  In a checkpoint of torch's writer, each saved part of a tensor has one checksum.
        This checksum is compared after the read, and only if the whole part is read.
    weights_only : bool, default False
        Whether to refuse objects that ``torch.load(weights_only=True)`` does not allow.  DCP's
        planner loads objects with ``weights_only=False``, which lets a checkpoint run any code.
        Pass True for checkpoints that you do not trust.
    storage_options : mapping, optional
        Arguments for the file system of a URL.

    Raises
    ------
    TypeError
        If `storage_options` are given for a local directory.

    Notes
    -----
    DCP wraps the errors of a load in its ``CheckpointException``, which names the rank.  Damaged
    files and metadata raise :class:`CorruptCheckpointError` with the file, the offset and the names
    of the tensors; some tensors may already have changed.  With ``weights_only=True``, an object
    that is not allowed raises :class:`pickle.UnpicklingError` before the planner gets it.

    Another save may replace the checkpoint after its metadata was read and before its files are
    opened.  Then every rank raises an :class:`OSError` with ``errno.ESTALE``, and no rank gets a
    mixture of both checkpoints.  Load again.

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

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        weights_only: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_flags(verify=verify, weights_only=weights_only)
        is_url_source(path, storage_options)  # raises if a local directory has options
        self._path = directory_name(path)
        self._storage_options = storage_options
        self._remote: FsspecFile | None = None
        self._verify = verify
        self._weights_only = weights_only
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._read: ReadMetadata | None = None
        self._is_common = True

    # --------------------------------------------------------- called by DCP, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load; `checkpoint_id`, if given, is its directory or URL."""
        self._metadata = None
        if checkpoint_id:
            is_url_source(checkpoint_id, self._storage_options)
            self._path = directory_name(checkpoint_id)
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of all ranks, or of a rank that saved by itself (``rank=``)."""
        name = metadata_name(kwargs.get("rank"))
        self._is_common = kwargs.get("rank") is None
        self._remote = remote_metadata(self._path, name, self._storage_options)
        if self._remote is None:
            path = self._file(name)
            self._read = ReadMetadata(path)
            metadata = load_metadata(path)
        else:
            self._read = None
            (data,) = self._remote.read([(0, self._remote.nbytes)])
            metadata = load_metadata(self._remote.name, data=data)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the metadata that `read_metadata` has returned."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with the id of the save whose metadata this rank has read."""
        if not self._is_common or plan.storage_data is not None:
            return with_item_list(plan)
        meta = None if self._metadata is None else self._metadata.storage_meta
        planned = _Planned(getattr(meta, "save_id", None))
        return dataclasses.replace(with_item_list(plan), storage_data=planned)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans.

        Raises
        ------
        OSError
            ``ESTALE``, if ranks have read the metadata of different saves.
        """
        saves = {p.storage_data.save_id for p in plans if type(p.storage_data) is _Planned}
        if len(saves) > 1:
            raise replaced(self._path)
        return [*map(with_item_list, plans)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; the reads are complete when the call returns."""
        if self._metadata is None:
            raise RuntimeError("call set_up_storage_reader() before read_data()")
        metadata_path = self._file(metadata_name(None))
        checked = checked_files(self._metadata, metadata_path)
        with (
            pausing_garbage_collection(),
            self._files(checked) as files,
        ):
            load = _Load(self._metadata, files, planner, weights_only=self._weights_only)
            load.run(plan.items)
            self._require_same(files, plan)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _require_same(self, files: RankFiles, plan: LoadPlan) -> None:
        """Raise if another save may have overwritten the files in place, as torch's writer does."""
        if self._read is None or self._metadata is None or not self._read.has_changed:
            return
        infos = (self._metadata.storage_data[item.storage_index] for item in plan.items)
        if not all(map(files.is_checked, infos)):
            raise replaced(self._path)

    # ------------------------------------------------------------------------------ the rest

    def _files(self, checked: dict[str, CheckedFile]) -> RankFiles:
        if self._remote is not None:
            return FetchedFiles(self._remote, checked, verify=self._verify)
        return RankFiles(self._path, checked, verify=self._verify, metadata=self._read)

    def _file(self, name: str) -> str:
        return os.path.join(self._path, name)

    @property
    def checkpoint_id(self) -> str:
        """The directory or URL of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether torch's FileSystemReader would accept an id as a checkpoint's path."""
        return accepts(checkpoint_id)


@dataclass(frozen=True)
class _Planned:
    """The save whose metadata a rank has used to plan its reads."""

    save_id: str | None


class _Load:
    """Reads the items of one plan with bounded memory."""

    def __init__(
        self, metadata: Metadata, files: RankFiles, planner: LoadPlanner, *, weights_only: bool
    ) -> None:
        self._weights_only = weights_only
        self._metadata = metadata
        self._files = files
        self._planner = planner
        self._plan = ReadPlan(files.read, self._deliver)
        # For each kind of item and target: the result of `_is_simple`.
        self._known: dict[tuple[int, ...], bool] = {}

    def run(self, items: list[ReadItem]) -> None:
        """Read all items, and hand them to the planner."""
        for begin in range(0, len(items), _N_ITEMS_AT_A_TIME):
            self._known.clear()  # `tensor_kinds` numbers the kinds anew in each call
            self._add_all(items[begin : begin + _N_ITEMS_AT_A_TIME])
        self._plan.read()

    def _add_all(self, items: list[ReadItem]) -> None:
        infos = [*map(self._info_of, items)]
        targets = [
            None if item.type is LoadItemType.BYTE_IO else self._target_of(item) for item in items
        ]
        alike = _C.tensor_kinds(targets, (Tensor,))
        rows = []
        for row in zip(items, infos, targets, alike, strict=True):
            if self._is_simple(*row):
                rows.append(row)
                continue
            item, info, target, _ = row
            self._add(item, info, target)
        if rows:
            simple, places, whole, kinds = map(list, zip(*rows, strict=True))
            names = [item.storage_index.fqn for item in simple]
            boxes = self._files.whole_tensors(places, names, whole, kinds)
            self._plan.add_boxes(boxes, whole, simple)

    def _target_of(self, item: ReadItem) -> Tensor:
        target = self._planner.resolve_tensor(item)
        if type(target) is not Tensor or target.requires_grad:
            target = target.detach()
        return target

    def _is_simple(self, item: ReadItem, info: Any, target: Tensor | None, number: int) -> bool:
        """Return whether an item reads a checked file's complete tensor into contiguous memory."""
        described = self._metadata.state_dict_metadata.get(item.storage_index.fqn)
        if (
            number < 0
            or type(described) is not TensorStorageMetadata
            or len(described.chunks) != 1
            or not self._files.holds_as_planned(info)
        ):
            return False
        sizes, properties = described.chunks[0].sizes, described.properties
        offsets, lengths = item.storage_offsets, item.lengths
        kind = number, id(sizes), id(properties), id(offsets), id(lengths)
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = (
                target is not None
                and sizes == target.shape == lengths
                and properties.dtype == target.dtype
                and not any(offsets)
                and target.is_contiguous()
                and takes_bytes(target, target.dtype)
            )
        return known

    def _add(self, item: ReadItem, info: Any, target: Tensor | None) -> None:
        name = item.storage_index.fqn
        if target is None:
            self._plan.add(self._files.bytes_of(info, name), (0,), None, item)
            return
        if target.shape != item.lengths:
            raise AssertionError(
                f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}"
            )
        stored = self._files.stored_tensor(info, name, lambda: self._planned_kind(item))
        if stored is None:  # only torch can read the item
            self._planner.commit_tensor(item, self._copy_whole(item, info, target))
        else:
            self._plan.add(stored, item.storage_offsets, target, item)

    @cached_property
    def _infos(self) -> dict[str, tuple[Any, Any]]:
        """By tensor name, the offset and StorageInfo of one part; this avoids a MetadataIndex."""
        return {
            key.fqn: (key.offset, info)
            for key, info in self._metadata.storage_data.items()
            if type(key) is MetadataIndex and type(key.fqn) is str
        }

    def _info_of(self, item: ReadItem) -> Any:
        index = item.storage_index
        offset, info = self._infos.get(index.fqn, _NOWHERE)
        if offset == index.offset:  # a tensor's other parts are found by index
            return info
        info = self._metadata.storage_data.get(index)
        if info is None:
            self._files.fail(f"the metadata does not say where {index} is", index.fqn)
        return info

    def _planned_kind(self, item: ReadItem) -> tuple[torch.dtype, torch.Size]:
        """Return the dtype and the shape of the tensor that an item was planned to hold."""
        index = item.storage_index
        described = self._metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(described, TensorStorageMetadata):
            self._files.fail(f"the metadata describes no tensor {index.fqn}", index.fqn)
        first = 0 if index.offset is None else max(index.index or 0, 0)  # the planner's guess
        chunks = chain(described.chunks[first:], described.chunks[:first])
        found = next((each for each in chunks if index.offset in (None, each.offsets)), None)
        if found is None:
            self._files.fail(
                f"the metadata has no part of {index.fqn} at {index.offset}", index.fqn
            )
        return described.properties.dtype, found.sizes

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

    def _deliver(self, item: ReadItem, values: Tensor) -> None:
        if item.type is not LoadItemType.BYTE_IO:
            self._planner.commit_tensor(item, values)
            return
        data = values.numpy().tobytes()
        if self._weights_only:
            self._refuse_code(item, data)
        self._planner.load_bytes(item, io.BytesIO(data))

    def _refuse_code(self, item: ReadItem, data: bytes) -> None:
        """Raise UnpicklingError if torch.load with ``weights_only=True`` fails for an object."""
        try:
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            path = self._files.file(self._info_of(item).relative_path)
            raise UnpicklingError(f"{path}: {item.storage_index.fqn}: {error}") from error
