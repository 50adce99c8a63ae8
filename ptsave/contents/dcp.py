"""Opens checkpoints of torch.distributed.checkpoint (DCP) as `Contents`.

The ranks have written each tensor in chunks.  The wanted part of each chunk is read directly into
its place in the result, from the files of all ranks in parallel.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_device
from ptsave.archive.loading import LoadOptions, load_file
from ptsave.archive.opening import reader_for
from ptsave.archive.spans import Allocator, bytes_of, memory_of, new_storage, unfilled_tensors
from ptsave.contents.contents import CPU, ChunkInfo, LoadedContents, OneFile, Place
from ptsave.dcp.checkpoint import Chunk, DcpCheckpoint, DcpTensor, find_dcp_damage
from ptsave.dcp.rank_files import RankFiles
from ptsave.dcp.read_plan import ReadPlan
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.kinds import is_legacy, is_zip
from ptsave.sources.ranges import FsspecFile, RangeSource
from ptsave.support.calls import progress_bar, warn_user
from ptsave.support.text import some_of
from ptsave.support.torch_names import storage_id

_T = TypeVar("_T")
_MIN_HUGE_NBYTES = 64 << 10
# The most files that are open at once.
_MAX_FILES = 256
# Saved objects are read in batches; a batch is full when its objects have this many bytes.
_MAX_OBJECTS_NBYTES = 32 << 20
# The most attempts to open a checkpoint while other saves replace it.
_MAX_OPENINGS = 3


@dataclass(frozen=True)
class _Part:
    """The elements of one chunk that the caller wants, and the memory to read them into."""

    tensor: DcpTensor
    chunk: Chunk
    begins: tuple[int, ...]  # index of the first wanted element in the chunk
    steps: tuple[int, ...]
    out: Tensor


class DcpContents(OneFile):
    """`Contents` of a distributed checkpoint; `source`, its metadata file, is read and closed."""

    def __init__(self, source: RangeSource, *, verify: bool) -> None:
        objects, locations = self._opened(source, verify)
        checkpoint = self.checkpoint
        self.kind = "dcp"
        self.metadata = {"format": "dcp", **checkpoint.facts}
        self.path = checkpoint.path
        self.nbytes = checkpoint.nbytes
        # The devices that tensors inside objects were saved from, by `storage_id`.
        self.locations = {key: where for key, where in locations.items() if where != "cpu"}
        self._loaded = LoadedContents(objects, locations, {"format": "pt"}, source)
        self._checked_items: set[int] = set()  # ids of chunks whose saved items are checked
        stored = list(checkpoint.tensors.values())
        unread = unfilled_tensors([(each.dtype, each.shape) for each in stored])
        self._stored = {id(tensor): each for tensor, each in zip(unread, stored, strict=True)}
        named = dict(zip(checkpoint.tensors, unread, strict=True))
        self.obj: Any = checkpoint.nested({**named, **objects})
        source.close()

    def _opened(self, source: RangeSource, verify: bool) -> tuple[dict[str, Any], dict[int, str]]:
        """Read the metadata and the objects; try again if another save replaced the files."""
        metadata = source if isinstance(source, FsspecFile) else source.name
        for n_left in reversed(range(_MAX_OPENINGS)):
            self.checkpoint = DcpCheckpoint(metadata)
            try:
                self.checkpoint.require_files()
                return self._objects(verify)
            except OSError as error:
                if error.errno != errno.ESTALE or n_left == 0:
                    raise
        raise AssertionError  # the last attempt has returned or raised

    # ------------------------------------------------------------------------- its objects

    def _objects(self, verify: bool) -> tuple[dict[str, Any], dict[int, str]]:
        """Load all entries that are not tensors; return them, and the device of each storage."""
        self._require_room()
        objects: dict[str, Any] = {}
        locations: dict[int, str] = {}

        def load(name: str, values: Tensor) -> None:
            objects[name] = self._object(name, values, locations, verify)

        for names in _batches(
            self.checkpoint.objects, lambda name: self.checkpoint.objects[name].relative_path
        ):
            with self.checkpoint.rank_files(verify=verify) as files:
                plan = ReadPlan(files.read, load, max_staged=_MAX_OBJECTS_NBYTES)
                for name in names:
                    info = self.checkpoint.objects[name]
                    plan.add(files.bytes_of(info, name), (0,), None, name)
                plan.read()
        return objects, locations

    def _require_room(self) -> None:
        """Raise CorruptCheckpointError if the objects have more bytes than all files together."""
        nbytes = sum(info.length for info in self.checkpoint.objects.values())
        if nbytes > self.checkpoint.nbytes:
            raise CorruptCheckpointError(
                f"{self.checkpoint.metadata_path}: according to this file, objects take {nbytes} "
                f"bytes, but all files together have only {self.checkpoint.nbytes}",
                path=self.checkpoint.metadata_path,
            )

    def _object(self, name: str, values: Tensor, locations: dict[int, str], verify: bool) -> Any:
        def stay(storage: Any, location: str) -> Any:
            locations[storage_id(storage)] = location
            return storage

        info = self.checkpoint.objects[name]
        path = self.checkpoint.file(info.relative_path)
        data = bytes(memory_of(values))
        _require_saved(data, path, name)
        stream = io.BytesIO(data)
        try:
            options = LoadOptions(stay, weights_only=True, verify=verify, leaves_opaque=True)
            return load_file(stream, options, reader_for(stream, options.maps, verify))
        except UnpicklingError as error:
            error.args = (f"{path}: {name}: {error}",)
            raise
        except CorruptCheckpointError as error:
            error.args = (f"{path}: {name} (from offset {info.offset} on): {error}",)
            error.path, error.entries = path, [name]
            raise

    # ------------------------------------------------------------------------- its tensors

    def chunks_of(self, tensor: Tensor) -> Sequence[ChunkInfo]:
        """Return the chunks of a tensor; a tensor inside a pickled object has none."""
        stored = self._stored.get(id(tensor))
        chunks = () if stored is None else stored.chunks
        return tuple(
            ChunkInfo(each.offsets, each.sizes, each.file, each.begin, each.nbytes)
            for each in chunks
        )

    def stored_tensor(self, tensor: Tensor) -> DcpTensor | None:
        """Return the metadata's entry for a tensor; None for a tensor inside a pickled object."""
        return self._stored.get(id(tensor))

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        places: list[Place] = []
        for tensor in tensors:
            stored = self._stored.get(id(tensor))
            if stored is None:
                places += self._loaded.places_of([tensor])
            else:
                places.append((stored.name, None, None, None))
        return places

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        """Read whole tensors from all files in parallel."""
        result: list[Tensor] = []
        parts: list[_Part] = []
        for tensor in tensors:
            stored = self._stored.get(id(tensor))
            if stored is None:
                result += self._loaded.read([tensor], verify, allocate)
                continue
            out = _memory_for(stored.shape, stored.dtype, allocate)
            parts += self._parts_of(stored, tuple(map(range, stored.shape)), out)
            result.append(out)
        self._read(parts, verify)
        return result

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        stored = self._stored.get(id(tensor))
        if stored is None:
            return self._loaded.read_slice(tensor, index, verify, device, allocate)
        shape = tensor[index].shape  # raises torch's errors
        region = _region_of(index, stored.shape)
        out = _memory_for(torch.Size(map(len, region)), stored.dtype, allocate)
        self._read(self._parts_of(stored, region, out), verify)
        return to_device(out.view(shape), device)

    def _parts_of(self, stored: DcpTensor, region: Sequence[range], out: Tensor) -> Iterator[_Part]:
        """Yield each chunk's part in `region`, which has a range of indexes for each dimension."""
        self.checkpoint.require_tensor(stored)
        for chunk in stored.chunks:
            part = _part_of(stored, chunk, region, out)
            if part is not None:
                yield part

    def _read(self, parts: Iterable[_Part], verify: bool | None) -> None:
        for some in _batches(parts, lambda part: part.chunk.file):
            with self.checkpoint.rank_files(verify=verify is not False) as files:
                plan = ReadPlan(files.read)
                for part in some:
                    self._plan(plan, files, part, check_item=bool(verify))
                plan.read()

    def _plan(self, plan: ReadPlan, files: RankFiles, part: _Part, *, check_item: bool) -> None:
        """Add a part to `plan`, or copy its values now if only torch can read the saved chunk."""
        if check_item:
            self._check_item(files, part)
        stored = self.checkpoint.stored(files, part.tensor, part.chunk)
        if stored is None:
            index = tuple(
                slice(begin, begin + (n - 1) * step + 1, step)
                for begin, n, step in zip(part.begins, part.out.shape, part.steps, strict=True)
            )
            part.out.copy_(self._whole(files, part)[index])
        else:
            plan.add(stored, part.begins, part.out, steps=part.steps)

    def _check_item(self, files: RankFiles, part: _Part) -> None:
        """Compare the checksums of a chunk of torch's writer, unless an earlier call did this."""
        key = id(part.chunk)
        if key in self._checked_items or files.is_checked(part.chunk.info):
            return
        name, path = part.tensor.name, files.file(part.chunk.file)
        for damage in files.damage_in(part.chunk.info, name) or ():
            raise CorruptCheckpointError(
                f"{path}: record {damage.record} of {name}: {damage.reason}",
                path=path,
                offset=part.chunk.begin + damage.offset,
                entries=[name],
            )
        self._checked_items.add(key)

    def _whole(self, files: RankFiles, part: _Part) -> Tensor:
        """Load a chunk that only torch can read, such as a sparse tensor."""
        name, chunk = part.tensor.name, part.chunk
        data = files.read_whole(chunk.info, name)
        path = files.file(chunk.file)
        _require_saved(data, path, name)
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.sizes:
            raise CorruptCheckpointError(
                f"{path}: a part of {name} is not a tensor of shape {list(chunk.sizes)}",
                path=path,
                offset=chunk.begin,
                entries=[name],
            )
        values = values.detach()
        if values.is_quantized:
            raise NotImplementedError(
                f"{name} is a quantized tensor: read it with torch.distributed.checkpoint.load"
            )
        return values.to_dense() if values.layout != torch.strided else values

    def verify(self, *, progress: bool) -> None:
        """Read all data and compare it with its checksums; warn of entries without checksums."""
        with progress_bar(progress, "verifying", self.nbytes) as callback:
            found = find_dcp_damage(self.checkpoint, callback)
        for damage in found.damage:
            raise CorruptCheckpointError(
                f"{damage.path}: {damage.reason}",
                path=damage.path,
                offset=damage.offset,
                entries=damage.entries,
            )
        if found.unverified:
            warn_user(
                f"{self.path}: these entries have no checksums, so they cannot be verified: "
                f"{some_of(found.unverified, 3)}",
                CheckpointWarning,
            )


def _batches(values: Iterable[_T], file_of: Callable[[_T], str]) -> Iterator[list[_T]]:
    """Yield batches of values; the values of a batch are in at most `_MAX_FILES` files."""
    by_file: dict[str, list[_T]] = {}
    for value in values:
        by_file.setdefault(file_of(value), []).append(value)
    names = sorted(by_file)
    for at in range(0, len(names), _MAX_FILES):
        yield [value for name in names[at : at + _MAX_FILES] for value in by_file[name]]


def _require_saved(data: bytes, path: str, name: str) -> None:
    if not is_zip(data[:4]) and not is_legacy(data[:64]):
        raise CorruptCheckpointError(
            f"{path}: the data of {name} is not a torch.save file: it is damaged, or was written "
            "with another serialization_format",
            path=path,
            entries=[name],
        )


def _memory_for(shape: torch.Size, dtype: torch.dtype, allocate: Allocator) -> Tensor:
    """Return an uninitialised contiguous tensor, on huge pages if it is large."""
    nbytes = shape.numel() * dtype.itemsize
    is_fresh = allocate is new_storage and nbytes >= _MIN_HUGE_NBYTES
    flat = bytes_of((_C.huge_page_storage if is_fresh else allocate)(nbytes))
    return flat.view(dtype).view(shape)


def _region_of(index: Any, shape: Sequence[int]) -> tuple[range, ...]:
    """Return the range of elements that an index selects in each dimension.

    >>> _region_of((slice(1, None), ..., 2), (4, 5, 6))
    (range(1, 4), range(0, 5), range(2, 3))
    """
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    if ... not in parts:
        parts.append(...)
    at = parts.index(...)
    n_missing = len(shape) - (len(parts) - 1)
    parts[at : at + 1] = [slice(None)] * n_missing
    return tuple(
        range(n)[part] if isinstance(part, slice) else range(n)[part:][:1]
        for part, n in zip(parts, shape, strict=True)
    )


def _part_of(tensor: DcpTensor, chunk: Chunk, region: Sequence[range], out: Tensor) -> _Part | None:
    """Return the part of a chunk that is in a region, or None if no element is in it."""
    begins: list[int] = []
    for dim, numbers in enumerate(region):
        begin, end = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
        first = max(-((numbers.start - begin) // numbers.step), 0)
        last = min(-((numbers.start - end) // numbers.step), len(numbers))
        if first >= last:
            return None
        begins.append(numbers[first] - begin)
        out = out.narrow(dim, first, last - first)
    return _Part(tensor, chunk, tuple(begins), tuple(each.step for each in region), out)
