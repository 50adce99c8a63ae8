"""`Contents`: an open checkpoint with its saved object, and methods to read the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C
from ptsave.archive.filling import fill, to_device, to_devices, verifies_storages
from ptsave.archive.opening import spans_of
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import (
    Allocator,
    ArchiveSpans,
    Span,
    bytes_of,
    new_storage,
    read_view,
    view_as,
)
from ptsave.archive.unpickling import unpickle_unread
from ptsave.contents.files import ShardFiles, merged, metadata_of
from ptsave.errors import CheckpointWarning
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support.calls import ProgressCallback, progress_bar, warn_user
from ptsave.support.torch_names import restricted_unpickler, storage_id_of
from ptsave.tree.extents import span_of

if TYPE_CHECKING:
    from ptsave.archive.maps import MapCheck

CPU = torch.device("cpu")
_ALIGNMENT = 16  # the largest element size of a dtype, in bytes
_MAX_COPIED_NBYTES = 64 << 20  # the most bytes of tensors that are read together, then copied


# Place of a storage in a file: a key that no other storage has, the archive's record, the offset
# in bytes, and the device that the storage was saved from.  A plain tuple, because there may be
# 100,000.
Place: TypeAlias = tuple[object, str | None, int | None, str | None]
# Dtype, shape and stride of a tensor; then, in bytes, where the tensor begins in its storage, the
# size of the tensor, and the size of the storage.  A plain tuple, because there may be 100,000.
Facts: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...], int, int, int]


class ChunkInfo(NamedTuple):
    """A part of a tensor that one rank has written into a distributed checkpoint.

    Attributes
    ----------
    offsets : tuple of int
        Index of the part's first element in the tensor.
    sizes : tuple of int
        Shape of the part.
    file : str
        The file's name in the directory.
    offset : int
        Position in the file, in bytes, of the saved item that holds the part.
    nbytes : int
        Size of this item: the elements, and other data that torch.load needs to read them.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


class Contents(Protocol):
    """An open checkpoint of any format, which several threads may use at the same time."""

    path: str  # for messages
    kind: str  # the format: "pt", "safetensors", ...
    obj: Any  # the saved object; its tensors may have no values
    metadata: dict[str, str]
    nbytes: int  # the size of the file

    @property
    def parts(self) -> Sequence[Contents]: ...  # one for each file; a single file is its own part
    def by_part(self, tensors: list[Tensor]) -> list[tuple[Contents, list[Tensor]]]: ...

    def places_of(self, tensors: list[Tensor]) -> list[Place]: ...
    def chunks_of(self, tensor: Tensor) -> Sequence[ChunkInfo]: ...
    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]: ...
    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor: ...
    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor: ...
    def verify(self, *, progress: bool) -> None: ...
    def park(self) -> None: ...


class FileContents(Contents, Protocol):
    """`Contents` of a single file, which can also read tensors into existing tensors."""

    def read_into(self, copies: Sequence[tuple[Tensor, Tensor]], verify: bool | None) -> None: ...


class OneFile:
    """Default methods for the `Contents` of a single file."""

    map_check: MapCheck | None = None  # compares the entries of a mapped file

    def park(self) -> None:
        """Close the file; the next read opens it again.  This default does nothing."""

    @property
    def parts(self: Contents) -> Sequence[Contents]:
        return [self]

    def by_part(self: Contents, tensors: list[Tensor]) -> list[tuple[Contents, list[Tensor]]]:
        return [(self, tensors)]

    def chunks_of(self: Contents, tensor: Tensor) -> Sequence[ChunkInfo]:
        """Return no chunks: only a distributed checkpoint has chunks."""
        return ()

    def read_to(
        self: Contents, device: torch.device, tensor: Tensor, verify: bool | None
    ) -> Tensor:
        """Read a tensor into CPU memory, then copy it to a device."""
        (values,) = self.read([tensor], verify)
        return to_device(values, device)

    def read_into(
        self: Contents, copies: Sequence[tuple[Tensor, Tensor]], verify: bool | None
    ) -> None:
        """For each (target, tensor) in `copies`, read the tensor and copy it to the target."""
        for batch in _batches(copies):
            values = self.read([tensor for _, tensor in batch], verify)
            devices = [
                target.device if _C.convert_alike(v.dtype, target.dtype) else v.device
                for (target, _), v in zip(batch, values, strict=True)
            ]
            with torch.no_grad():
                for (target, _), value in zip(batch, to_devices(values, devices), strict=True):
                    target.copy_(value.reshape(target.shape))


def _batches(
    copies: Sequence[tuple[Tensor, Tensor]],
) -> Iterator[Sequence[tuple[Tensor, Tensor]]]:
    begin = nbytes = 0
    for end, (_, tensor) in enumerate(copies):
        if end > begin and nbytes + tensor.nbytes > _MAX_COPIED_NBYTES:
            yield copies[begin:end]
            begin, nbytes = end, 0
        nbytes += tensor.nbytes
    if copies:
        yield copies[begin:]


class UnreadContents(OneFile):
    """`Contents` of a ``.pt`` file; the tensors of `obj` are unread, and take no memory.

    `can_defer_reading` must be true for `reader`.  `file` is the archive's local file, or None.
    """

    def __init__(self, reader: RecordReader, file: LocalFile | None = None) -> None:
        self.reader = reader
        self.path = reader.path
        self.begin = 0 if file is None else file.begin
        self._file = file
        self.nbytes = reader.engine.nbytes
        self._first_at: dict[int, str] = {}
        try:
            self.obj = unpickle_unread(reader, restricted_unpickler, set(), self._first_at)
        except UnpicklingError as error:
            from ptsave.archive.loading import raise_with_advice

            raise_with_advice(error, restricted_unpickler)
        self.metadata = metadata_of(reader.small)
        self.kind = self.metadata["format"]

    def park(self) -> None:
        if self._file is not None:
            self.reader.park(self._file)

    def close(self) -> None:
        """Close the archive, even if other objects still refer to these contents."""
        self.__dict__.pop("spans", None)
        self.reader.close()

    @cached_property
    def spans(self) -> ArchiveSpans:
        return spans_of(self.reader)

    @cached_property
    def verifies(self) -> bool:
        """Whether to compare storages with checksums; warns once if the file has no checksums."""
        return verifies_storages(self.reader)

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        engine = self.reader.engine
        places: list[Place] = [*engine.places()]
        for number, location in self._first_at.items():
            places[number] = (*places[number][:3], location)
        return [
            (id(tensor), None, None, None) if number is None else places[number]
            for number, tensor in zip(engine.records_of(tensors), tensors, strict=True)
        ]

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        """Read tensors; tensors that share a storage in the file also share one in memory."""
        if len(tensors) == 1:
            values = self.read_slice(tensors[0], ..., verify, allocate=allocate)
            return [as_saved(tensors[0], values)]
        extents: dict[int, tuple[int, int]] = {}
        for tensor in tensors:
            number = self.reader.engine.record_of(tensor)
            begin, end = span_of(tensor)
            begin -= begin % _ALIGNMENT  # other views may have other dtypes
            if number is not None and begin < end:
                first, last = extents.get(number, (begin, end))
                extents[number] = min(first, begin), max(last, end)
        storages = {number: allocate(end - begin) for number, (begin, end) in extents.items()}
        spans = [Span(i, extents[i][0], bytes_of(storage)) for i, storage in storages.items()]
        self.spans.read(spans, verify=verify)
        result = []
        for tensor in tensors:
            number = self.reader.engine.record_of(tensor)
            if number is None or number not in extents:
                storage, offset = new_storage(0), 0
            else:
                storage = storages[number]
                offset = int(tensor.storage_offset()) - extents[number][0] // tensor.itemsize
            result.append(as_saved(tensor, view_as(storage, tensor, offset, tensor.stride())))
        return result

    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor:
        return as_saved(tensor, self.read_slice(tensor, ..., verify, device))

    def read_into(self, copies: Sequence[tuple[Tensor, Tensor]], verify: bool | None) -> None:
        """For each (target, tensor) in `copies`, read the tensor directly into the target."""
        with self.reader.opened():
            for target, tensor in copies:
                alike = tensor if tensor.shape == target.shape else tensor.view(target.shape)
                # No variable for the engine, because a traceback would keep it.
                self.reader.engine.plan_copy(target, alike)
            fill(self.reader, (), verify=bool(verify), progress=None)

    def can_read_packed(self, tensors: list[Tensor]) -> bool:
        """Whether each tensor has a record, and no two tensors share one."""
        numbers = set(self.reader.engine.records_of(tensors))
        return None not in numbers and len(numbers) == len(tensors)

    def read_packed(
        self,
        tensors: list[Tensor],
        begins: list[int],
        nbytes: int,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        """Read tensors into one flat tensor of `nbytes` bytes, and set all other bytes to zero.

        `can_read_packed` must be true for the tensors.  Each tensor must be contiguous and fill its
        storage.  `begins` are the byte offsets of the tensors in the result.
        """
        row = bytes_of(allocate(nbytes)).zero_()
        spans = []
        for number, tensor, begin in zip(
            self.reader.engine.records_of(tensors), tensors, begins, strict=True
        ):
            assert number is not None
            spans.append(Span(number, 0, row[begin : begin + tensor.nbytes]))
        self.spans.read(spans, verify=None)
        return row

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        number = self.reader.engine.record_of(tensor)
        return read_view(
            self.spans, number, tensor.detach()[index], verify, device, allocate=allocate
        )

    def check(self, records: Sequence[int]) -> None:
        """Compare the records that have these numbers with their checksums."""
        self.spans.check(records)

    def verify(self, *, progress: bool) -> None:
        """Compare every record with its checksum."""
        if not self.reader.engine.storages_have_crcs:
            warn_user(
                f"{self.reader.path} was written without checksums of its storages "
                "(set_crc32_options(False) or skip_data()): its storages cannot be verified",
                CheckpointWarning,
            )
        with progress_bar(progress, "verifying", self.nbytes) as callback:
            error = self._find_error(callback)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so to the archive

    def _find_error(self, progress: ProgressCallback | None) -> Exception | None:
        from ptsave.archive.damage import damage_of, find_damage

        damage = find_damage(self.reader, self.spans.find_damage, progress)
        crcs = [found.crcs for found in damage if found.crcs is not None]
        others = [found.error for found in damage if found.crcs is None]
        if others:
            return others[0]
        return damage_of(self.reader, crcs) if crcs else None


class LoadedContents(OneFile):
    """`Contents` of a file that must be loaded completely; all its tensors are in memory."""

    def __init__(
        self, obj: Any, locations: dict[int, str], metadata: dict[str, str], source: RangeSource
    ) -> None:
        self.obj = obj
        self.path = source.name
        self.metadata = metadata
        self.kind = metadata["format"]
        self.nbytes = source.nbytes
        self.locations = locations  # the devices that storages were saved from, by `storage_id`

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        places: list[Place] = []
        for tensor in tensors:
            storage, location = storage_id_of(tensor), str(tensor.device)
            if storage is not None:
                location = self.locations.get(storage, location)
            places.append((id(tensor) if storage is None else storage, None, None, location))
        return places

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        return list(tensors)

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        part = self._part_of(tensor, index)
        return part if part.is_meta else to_device(part, device)

    def _part_of(self, tensor: Tensor, index: Any) -> Tensor:
        from ptsave.state.copying import shares_bytes

        if shares_bytes(tensor):
            raise TypeError(
                f"a {tensor.dtype} tensor cannot be read in part, because its elements share "
                "bytes: read all of it with get_tensor()"
            )
        view = tensor.detach()[index]
        if view.layout != torch.strided or view.is_nested or view.is_quantized or not view.is_cpu:
            return view.clone()
        begin, end = span_of(view)
        if view.nbytes <= end - begin:
            return view.clone()
        storage = new_storage(end - begin)  # clone() would expand the tensor in memory
        bytes_of(storage).copy_(bytes_of(view.untyped_storage())[begin:end])
        return view_as(storage, view, 0, view.stride())

    def verify(self, *, progress: bool) -> None:
        """Do nothing: loading has compared the checksums, if there are any."""


class ShardedContents:
    """Several files as one `Contents`; its `obj` is one dict with the entries of all files."""

    def __init__(self, parts: Sequence[Contents], files: ShardFiles) -> None:
        self.parts = parts
        self.path = files.path
        self.is_flat = files.ranks is None  # False: keys such as "rank0" lead to ranks' objects
        self.kind = ", ".join(dict.fromkeys(part.kind for part in parts))
        self.nbytes = sum(part.nbytes for part in parts)
        self.metadata = {"format": self.kind}
        for key, value in parts[0].metadata.items():
            if all(part.metadata.get(key) == value for part in parts):
                self.metadata[key] = value
        self.obj = merged(((part.path, part.obj) for part in parts), files)
        from ptsave.tree.leaves import tensors_over

        self._part_of: dict[int, Contents] = {}
        for part in parts:
            self._part_of.update((_key_of(tensor), part) for tensor in tensors_over(part.obj))

    def park(self) -> None:
        """Close each file; the next read from a file opens it again."""
        for part in self.parts:
            part.park()

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        places: dict[int, Place] = {}
        for part, group in self.by_part(tensors):
            found = part.places_of(group)
            for tensor, place in zip(group, found, strict=True):
                places[id(tensor)] = ((id(part), place[0]), *place[1:])
        return [places[id(tensor)] for tensor in tensors]

    def chunks_of(self, tensor: Tensor) -> Sequence[ChunkInfo]:
        ((part, _),) = self.by_part([tensor])
        return part.chunks_of(tensor)

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        values: dict[int, Tensor] = {}
        for part, group in self.by_part(list(tensors)):
            found = part.read(group, verify, allocate)
            values.update((id(t), v) for t, v in zip(group, found, strict=True))
        return [values[id(tensor)] for tensor in tensors]

    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor:
        ((part, _),) = self.by_part([tensor])
        return part.read_to(device, tensor, verify)

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        ((part, _),) = self.by_part([tensor])
        return part.read_slice(tensor, index, verify, device, allocate)

    def verify(self, *, progress: bool) -> None:
        for part in self.parts:
            part.verify(progress=progress)

    def by_part(self, tensors: list[Tensor]) -> list[tuple[Contents, list[Tensor]]]:
        """Group tensors by file, and return (contents of the file, its tensors) for each group."""
        groups: dict[int, tuple[Contents, list[Tensor]]] = {}
        for tensor in tensors:
            part = self._part_of.get(_key_of(tensor), self.parts[-1])
            groups.setdefault(id(part), (part, []))[1].append(tensor)
        return list(groups.values())


def _key_of(tensor: Tensor) -> int:
    """Return a key for a tensor's storage; all tensors that share a storage have the same key."""
    return storage_id_of(tensor) or id(tensor)


def as_saved(like: Tensor, values: Tensor) -> Tensor:
    """Return `values` as a Parameter if `like` is one, and with the `requires_grad` of `like`."""
    if isinstance(like, Parameter):
        return Parameter(values, requires_grad=like.requires_grad)
    return values.requires_grad_() if like.requires_grad else values


def facts_of(tensors: list[Tensor]) -> list[Facts]:
    """Return dtype, shape, stride and sizes of tensors; if not strided, the stride is ``()``."""
    facts = _C.tensor_facts(tensors)
    if None not in facts:
        return facts  # type: ignore[return-value]  # no copy: the list may be long
    return [
        _dense_facts_of(tensor) if found is None else found
        for found, tensor in zip(facts, tensors, strict=True)
    ]


def _dense_facts_of(tensor: Tensor) -> Facts:
    nbytes = int(tensor.numel() * tensor.itemsize)
    return tensor.dtype, _shape_of(tensor), (), 0, nbytes, nbytes


def _shape_of(tensor: Tensor) -> torch.Size:
    """Return a tensor's shape; -1 marks a size that differs in the parts of a nested tensor."""
    if not tensor.is_nested:
        return tensor.shape
    if tensor.layout == torch.jagged:
        return torch.Size([n if type(n) is int else -1 for n in tensor.shape])
    sizes = tensor._nested_tensor_size().tolist()  # of its parts
    each = (n[0] if len(set(n)) == 1 else -1 for n in zip(*sizes, strict=True))
    return torch.Size([tensor.size(0), *each])
