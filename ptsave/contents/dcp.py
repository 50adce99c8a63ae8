"""Opens checkpoints of torch.distributed.checkpoint (DCP) as `Contents`.

Ranks have written each tensor as chunks.  A read takes the wanted part of each chunk straight to
its place, from the files of all ranks at once.
"""

from __future__ import annotations

import errno
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.filling import to_device
from ptsave.archive.loading import LoadOptions, load_file
from ptsave.archive.opening import reader_for
from ptsave.archive.spans import memory_of
from ptsave.archive.views import Allocator, bytes_of, new_storage, unfilled_tensors
from ptsave.contents.contents import CPU, ChunkInfo, LoadedContents, OneFile, Place
from ptsave.dcp.checking import find_dcp_damage
from ptsave.dcp.checkpoint import Chunk, DcpCheckpoint, DcpTensor
from ptsave.dcp.rank_files import Box, RankFiles
from ptsave.dcp.stock_items import damage_in
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.kinds import is_legacy, is_zip
from ptsave.sources.ranges import FsspecFile, RangeSource
from ptsave.support.calls import progress_bar, warn_user
from ptsave.support.text import some_of
from ptsave.support.torch_tensors import storage_id

_MIN_HUGE_NBYTES = 64 << 10
# The most files that are open at once, and the most runs of bytes that are planned at once.
_MAX_FILES = 256
_MAX_RUNS = 1 << 18
# The most bytes of saved objects that are read at once; a larger object is read alone.
_BATCH_NBYTES = 32 << 20
# Attempts to open a checkpoint while other saves replace it.
_MAX_OPENINGS = 3


@dataclass(frozen=True)
class _Wanted:
    """The elements of a tensor to read, as a range in each dimension, and memory for them."""

    tensor: DcpTensor
    region: tuple[range, ...]
    out: Tensor


@dataclass(frozen=True)
class _Part:
    """The wanted elements of one chunk, and memory for them."""

    tensor: DcpTensor
    chunk: Chunk
    begins: tuple[int, ...]  # index in the chunk of the first element
    steps: tuple[int, ...]
    out: Tensor


class DcpContents(OneFile):
    """`Contents` of a checkpoint of many ranks.

    `source` is its metadata, a local file or one at a URL, and is closed.  `locations` has the
    devices other than the CPU that tensors in objects were saved from, by `storage_id`.
    """

    def __init__(self, source: RangeSource, *, verify: bool) -> None:
        objects, locations = self._opened(source, verify)
        checkpoint = self.checkpoint
        self.kind = "dcp"
        self.metadata = {"format": "dcp", **checkpoint.facts}
        self.path = checkpoint.path
        self.nbytes = checkpoint.nbytes
        self.locations = {key: where for key, where in locations.items() if where != "cpu"}
        self._loaded = LoadedContents(objects, locations, {"format": "pt"}, source)
        self._checked_items: set[int] = set()  # by the ids of their chunks
        stored = list(checkpoint.tensors.values())
        unread = unfilled_tensors([(each.dtype, each.shape) for each in stored])
        self._stored = {id(tensor): each for tensor, each in zip(unread, stored, strict=True)}
        named = dict(zip(checkpoint.tensors, unread, strict=True))
        self.obj: Any = checkpoint.nested({**named, **objects})
        source.close()

    def _opened(self, source: RangeSource, verify: bool) -> tuple[dict[str, Any], dict[int, str]]:
        """Read the metadata and the objects; start again if another save replaces the files."""
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
        """Load the values that are no tensors; return them and the locations of their storages."""
        self._require_room()
        objects: dict[str, Any] = {}
        locations: dict[int, str] = {}
        for batch in self._batches():
            with self.checkpoint.rank_files(verify=verify) as files:
                boxes = [files.whole(self.checkpoint.objects[name], name) for name in batch]
                files.read(boxes)
            while boxes:
                name, box = batch[len(batch) - len(boxes)], boxes.pop(0)
                objects[name] = self._object(name, box, locations, verify)
        return objects, locations

    def _require_room(self) -> None:
        """Raise if objects take more bytes than all files have: such objects share their bytes."""
        nbytes = sum(info.length for info in self.checkpoint.objects.values())
        if nbytes > self.checkpoint.nbytes:
            raise CorruptCheckpointError(
                f"{self.checkpoint.metadata_path}: by it, objects take {nbytes} bytes, and all "
                f"files together have {self.checkpoint.nbytes}",
                path=self.checkpoint.metadata_path,
            )

    def _batches(self) -> Iterator[list[str]]:
        batch: list[str] = []
        files: set[str] = set()
        nbytes = 0
        for name, info in self.checkpoint.objects.items():
            is_full = nbytes + info.length > _BATCH_NBYTES or len(files) == _MAX_FILES
            if batch and is_full:
                yield batch
                batch, nbytes = [], 0
                files.clear()
            batch.append(name)
            files.add(info.relative_path)
            nbytes += info.length
        if batch:
            yield batch

    def _object(self, name: str, box: Box, locations: dict[int, str], verify: bool) -> Any:
        def stay(storage: Any, location: str) -> Any:
            locations[storage_id(storage)] = location
            return storage

        path = self.checkpoint.file(box.file)
        data = bytes(memory_of(box.target))
        _require_saved(data, path, name)
        stream = io.BytesIO(data)
        try:
            options = LoadOptions(stay, weights_only=True, verify=verify, leaves_opaque=True)
            return load_file(stream, options, reader_for(stream, options.mmap, verify))
        except UnpicklingError as error:
            error.args = (f"{path}: {name}: {error}",)
            raise
        except CorruptCheckpointError as error:
            error.args = (f"{path}: {name} (from offset {box.offset} on): {error}",)
            error.path, error.entries = path, [name]
            raise

    # ------------------------------------------------------------------------- its tensors

    def chunks_of(self, tensor: Tensor) -> Sequence[ChunkInfo]:
        """Return the chunks of a tensor; a tensor inside an object has none."""
        stored = self._stored.get(id(tensor))
        chunks = () if stored is None else stored.chunks
        return tuple(
            ChunkInfo(each.offsets, each.sizes, each.file, each.begin, each.nbytes)
            for each in chunks
        )

    def stored_tensor(self, tensor: Tensor) -> DcpTensor | None:
        """Return the metadata's entry for a tensor, or None for a tensor inside an object."""
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
        """Read whole tensors, from all files at once."""
        result: list[Tensor] = []
        wanted: list[_Wanted] = []
        for tensor in tensors:
            stored = self._stored.get(id(tensor))
            if stored is None:
                result += self._loaded.read([tensor], verify, allocate)
                continue
            out = _memory_for(stored.shape, stored.dtype, allocate)
            wanted.append(_Wanted(stored, tuple(map(range, stored.shape)), out))
            result.append(out)
        self._read(wanted, verify)
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
        self._read([_Wanted(stored, region, out)], verify)
        return to_device(out.view(shape), device)

    def _read(self, wanted: Iterable[_Wanted], verify: bool | None) -> None:
        parts: dict[str, list[_Part]] = {}
        for each in wanted:
            self.checkpoint.require_tensor(each.tensor)
            for chunk in each.tensor.chunks:
                part = _part_of(each, chunk)
                if part is not None:
                    parts.setdefault(chunk.file, []).append(part)
        names = sorted(parts)
        for at in range(0, len(names), _MAX_FILES):
            with self.checkpoint.rank_files(verify=verify is not False) as files:
                found = [part for name in names[at : at + _MAX_FILES] for part in parts[name]]
                self._read_parts(files, found, check_items=bool(verify))

    def _read_parts(self, files: RankFiles, parts: list[_Part], *, check_items: bool) -> None:
        boxes: list[Box] = []
        n_runs = 0
        for part in (piece for whole in parts for piece in _pieces(whole)):
            if n_runs + _n_runs(part) > _MAX_RUNS:
                files.read(boxes)
                boxes, n_runs = [], 0
            n_runs += _n_runs(part)
            box = self._box(files, part, check_items=check_items)
            if box is not None:
                boxes.append(box)
        files.read(boxes)

    def _box(self, files: RankFiles, part: _Part, *, check_items: bool) -> Box | None:
        """Return the box of a part's bytes, or None if this call has copied the values itself."""
        if check_items:
            self._check_item(files, part)
        stored = self.checkpoint.stored(files, part.tensor, part.chunk)
        if stored is None:
            part.out.copy_(self._whole(files, part)[_slices(part)])
            return None
        if stored.dtype != part.out.dtype:
            values = torch.empty(stored.shape, dtype=stored.dtype)
            files.read([stored.box([0] * len(stored.shape), values)])
            part.out.copy_(values[_slices(part)])
            return None
        if all(step == 1 for step in part.steps):
            return stored.box(part.begins, part.out)
        begins = zip(part.begins, stored.strides, strict=True)
        offset = stored.offset + sum(begin * stride for begin, stride in begins)
        strides = [a * b for a, b in zip(stored.strides, part.steps, strict=True)]
        return Box(stored.file, stored.name, offset, tuple(strides), part.out)

    def _check_item(self, files: RankFiles, part: _Part) -> None:
        """Compare a whole item of torch's writer with its checksums, once."""
        key = id(part.chunk)
        if key in self._checked_items or files.is_checked(part.chunk.info):
            return
        name, path = part.tensor.name, files.file(part.chunk.file)
        for damage in damage_in(files, part.chunk.info, name) or ():
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
                f"{path}: a part of {name} is no tensor of shape {list(chunk.sizes)}",
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
        """Compare everything with its checksums; warn about parts that have none."""
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
                f"{self.path}: there are no checksums of {some_of(found.unverified, 3)}: they "
                "cannot be verified",
                CheckpointWarning,
            )


def _require_saved(data: bytes, path: str, name: str) -> None:
    if not is_zip(data[:4]) and not is_legacy(data[:64]):
        raise CorruptCheckpointError(
            f"{path}: {name} is no torch.save file there: it is damaged, or was written with "
            "another serialization_format",
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
    return tuple(_numbers(part, n) for part, n in zip(parts, shape, strict=True))


def _numbers(part: slice | int, n: int) -> range:
    if isinstance(part, slice):
        return range(n)[part]
    number = part + n if part < 0 else part
    return range(number, number + 1)


def _part_of(wanted: _Wanted, chunk: Chunk) -> _Part | None:
    """Return the wanted elements of a chunk, or None if the chunk has none of them."""
    begins: list[int] = []
    out = wanted.out
    for dim, numbers in enumerate(wanted.region):
        begin, end = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
        first = max(-((numbers.start - begin) // numbers.step), 0)
        last = min(-((numbers.start - end) // numbers.step), len(numbers))
        if first >= last:
            return None
        begins.append(numbers[first] - begin)
        out = out.narrow(dim, first, last - first)
    steps = tuple(numbers.step for numbers in wanted.region)
    return _Part(wanted.tensor, chunk, tuple(begins), steps, out)


def _n_runs(part: _Part) -> int:
    """Estimate the number of contiguous runs of bytes in a part."""
    shape = part.out.shape
    if not shape:
        return 1
    is_run = part.steps[-1] == 1
    return math.prod(shape[:-1] if is_run else shape)


def _pieces(part: _Part) -> Iterator[_Part]:
    """Split a part into pieces of at most `_MAX_RUNS` runs, which need little memory to plan."""
    if _n_runs(part) <= _MAX_RUNS:
        yield part
        return
    n_dims = part.out.dim() - (part.steps[-1] == 1)
    dim = max(range(n_dims), key=part.out.shape.__getitem__)
    half = part.out.shape[dim] // 2
    for begin, n in ((0, half), (half, part.out.shape[dim] - half)):
        begins = list(part.begins)
        begins[dim] += begin * part.steps[dim]
        piece = part.out.narrow(dim, begin, n)
        yield from _pieces(_Part(part.tensor, part.chunk, tuple(begins), part.steps, piece))


def _slices(part: _Part) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + (n - 1) * step + 1, step)
        for begin, n, step in zip(part.begins, part.out.shape, part.steps, strict=True)
    )
