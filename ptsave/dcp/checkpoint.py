"""`DcpCheckpoint`: the entries of a DCP checkpoint, where their bytes are, and which are damaged.

The metadata may be hostile.  So its numbers are compared with the sizes of the files before any
memory is allocated.
"""

from __future__ import annotations

import errno
import math
import os
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ptsave.dcp.metadata import ReadMetadata, checked_files, has_checksum, load_metadata, replaced
from ptsave.dcp.rank_files import FetchedFiles, RankFiles, are_sizes, files_beside, refuse_outside
from ptsave.dcp.read_plan import StoredTensor
from ptsave.errors import CorruptCheckpointError, bare_message
from ptsave.sources.ranges import FsspecFile
from ptsave.support.calls import progress_from
from ptsave.support.text import some_of

# The most empty elements that are added to lists: an entry at the path ("a", 2) may add two.
_MAX_PADDING = 1 << 20
# Attempts to read the metadata while other saves replace the checkpoint.
_MAX_READS = 5


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, in a file of one rank."""

    offsets: tuple[int, ...]  # index of its first element in the tensor
    sizes: tuple[int, ...]
    info: Any  # the place of the item that holds the chunk, from the metadata

    @property
    def file(self) -> str:
        """The name of the file."""
        return str(self.info.relative_path)

    @property
    def begin(self) -> int:
        """Where the item that holds the chunk begins in the file, in bytes."""
        return int(self.info.offset)

    @property
    def nbytes(self) -> int:
        """The size of the item in bytes: the chunk's elements, and a header."""
        return int(self.info.length)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class DcpTensor:
    """A tensor whose parts are in the files of one or more ranks."""

    name: str  # its flat name, as in the metadata
    dtype: torch.dtype
    shape: torch.Size
    chunks: list[Chunk]  # without empty chunks, in the order of the metadata
    lost: str = ""  # why the tensor cannot be read; "" if it can


@dataclass(frozen=True)
class Item:
    """A part of a file: a chunk of a tensor, or a pickled object."""

    name: str  # the flat name of the tensor or object
    info: Any  # its place, from the metadata
    tensor: DcpTensor | None = None  # None for an object
    chunk: Chunk | None = None

    @property
    def begin(self) -> int:
        """Where the item begins in the file, in bytes."""
        return int(self.info.offset)

    @property
    def end(self) -> int:
        """Where the item ends in the file, in bytes."""
        return int(self.info.offset + self.info.length)


class DcpCheckpoint:
    """A DCP directory that torch's FileSystemWriter or ptsave has written; no file stays open.

    `file` is the metadata: ``.metadata``, or ``__<rank>.metadata`` of a rank that saved by itself.
    Reading a file that another save has removed meanwhile raises OSError with ``ESTALE``.

    `checked` has the files with a checksum for each block.  `sizes` has the size in bytes of each
    file that the metadata names, or -1 if the file is missing.  `tensors` and `objects` have the
    entries by flat name, in the order of the metadata.  `nbytes` is the size of all files together.
    """

    def __init__(self, file: str | FsspecFile) -> None:
        self._remote = file if isinstance(file, FsspecFile) else None
        self.metadata_path = metadata_path = file if isinstance(file, str) else file.name
        self.path = os.path.dirname(metadata_path) or "."
        if self._remote is not None:
            self.path = files_beside(self._remote)
        for _ in range(_MAX_READS):
            self._read_metadata = None if self._remote else ReadMetadata(metadata_path)
            metadata = load_metadata(metadata_path, data=self._metadata_bytes())
            self._infos: dict[Any, Any] = metadata.storage_data
            self.sizes = {name: self._size_of(name) for name in self._file_names()}
            if min(self.sizes.values(), default=0) >= 0 or not self._was_replaced():
                break  # otherwise, read the checkpoint that has replaced it
        self.checked = checked_files(metadata, metadata_path)
        self._metadata = metadata
        self.nbytes = self._metadata_nbytes() + sum(max(n, 0) for n in self.sizes.values())
        self._oversized: list[str] = []
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, Any] = {}
        for name, described in metadata.state_dict_metadata.items():
            if type(name) is not str:
                self._fail(f"the metadata has an entry with the name {name!r}, which is not text")
            if type(described) is TensorStorageMetadata:
                self.tensors[name] = self._tensor(name, described)
            elif type(described) is BytesStorageMetadata:
                self.objects[name] = self._info(name, None)
            else:
                self._fail(f"the metadata describes {name} with a class that is not DCP's", name)
        self._stored: dict[int, StoredTensor | None] = {}

    @property
    def facts(self) -> dict[str, str]:
        """A dict with the version that the metadata states; empty if it states none."""
        version = getattr(self._metadata, "version", None)
        return {"version": version} if type(version) is str else {}

    # -------------------------------------------------------------------------------- its files

    def _file_names(self) -> list[str]:
        names: dict[str, None] = {}
        for info in self._infos.values():
            name = getattr(info, "relative_path", None)
            if type(name) is not str:
                self._fail("the metadata does not say in which file an item is")
            if name not in names:
                refuse_outside(name, self.path)
                names[name] = None
        return [*names]

    def _metadata_bytes(self) -> bytes | None:
        """Return the bytes of metadata at a URL; None for a local file."""
        if self._remote is None:
            return None
        (data,) = self._remote.read([(0, self._remote.nbytes)])
        return data

    def _metadata_nbytes(self) -> int:
        return os.stat(self.metadata_path).st_size if self._remote is None else self._remote.nbytes

    def metadata_is_checked(self) -> bool:
        """Return whether the metadata has a checksum; raise if the checksum is damaged."""
        return has_checksum(self.metadata_path, self._metadata_bytes())

    @property
    def is_remote(self) -> bool:
        """Whether the files are at a URL."""
        return self._remote is not None

    def _was_replaced(self) -> bool:
        return self._read_metadata is not None and self._read_metadata.has_changed

    def _size_of(self, name: str) -> int:
        try:
            if self._remote is not None:
                return self._remote.beside(name).nbytes
            return os.stat(self.file(name)).st_size
        except FileNotFoundError:
            return -1

    def file(self, name: str) -> str:
        """Return the path or URL of a file."""
        if self._remote is not None:
            return self._remote.url_beside(name)
        return os.path.join(self.path, name)

    def what_is_wrong(self, name: str) -> str:
        """Return why the size of a file is wrong, or "" if it is right."""
        nbytes = self.sizes[name]
        if nbytes < 0:
            return f"this file is missing, but {self.metadata_path} names it"
        file = self.checked.get(name)
        if file is not None:
            saved = file.saved_nbytes
            return "" if nbytes == saved else f"the file has {nbytes} bytes instead of {saved}"
        end = max((item.end for item in self.items_in(name)), default=0)
        if nbytes < end:
            return f"the file is cut short: it has {nbytes} bytes, but its last item ends at {end}"
        return ""

    def require_files(self) -> None:
        """Raise if a file is missing or has a wrong size; the message names tensors in the file."""
        for name in self.sizes:
            wrong = self.what_is_wrong(name)
            if not wrong:
                continue
            entries = self.entries_in(name)
            what = f"{wrong}. The file holds parts of {some_of(entries, 3)}"
            path = self.file(name)
            if self.sizes[name] < 0 and self._was_replaced():
                raise replaced(self.path)
            if self.sizes[name] < 0:
                raise FileNotFoundError(
                    errno.ENOENT, f"{what}. If you copied the checkpoint, copy this file, too", path
                )
            raise CorruptCheckpointError(f"{path}: {what}", path=path, entries=entries)
        for text in self._oversized:
            self._fail(text)

    def items_in(self, file: str) -> list[Item]:
        """Return all items in a file, sorted by offset."""
        return self._items_by_file.get(file, [])

    def entries_in(self, file: str, begin: int = -1, end: float = math.inf) -> list[str]:
        """Return the flat names of all items that have bytes in a range of a file."""
        items = self.items_in(file)
        return list(dict.fromkeys(i.name for i in items if i.begin < end and i.end > begin))

    @cached_property
    def _items_by_file(self) -> dict[str, list[Item]]:
        found: dict[str, list[Item]] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                item = Item(tensor.name, chunk.info, tensor, chunk)
                found.setdefault(chunk.file, []).append(item)
        for name, info in self.objects.items():
            found.setdefault(info.relative_path, []).append(Item(name, info))
        for items in found.values():
            items.sort(key=lambda item: item.begin)
        return found

    def rank_files(self, *, verify: bool) -> RankFiles:
        """Return a `RankFiles`, which opens and reads files until its ``with`` block ends."""
        if self._remote is not None:
            return FetchedFiles(self._remote, self.checked, verify=verify)
        return RankFiles(self.path, self.checked, verify=verify, metadata=self._read_metadata)

    # ------------------------------------------------------------------------------ its entries

    def _fail(self, what: str, *entries: str) -> NoReturn:
        path = self.metadata_path
        raise CorruptCheckpointError(f"{path}: {what}", path=path, entries=list(entries))

    def _info(self, name: str, offset: Sequence[int] | None) -> Any:
        info = self._infos.get(MetadataIndex(name, offset))
        if info is None:
            at = "" if offset is None else f" the part at {list(offset)} of"
            self._fail(f"the metadata does not say where{at} {name} is", name)
        begin, length = getattr(info, "offset", None), getattr(info, "length", None)
        if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
            self._fail(f"the metadata does not say where {name} is", name)
        return info

    def _tensor(self, name: str, described: TensorStorageMetadata) -> DcpTensor:
        properties = vars(described).get("properties")
        dtype = getattr(properties, "dtype", None)
        shape = vars(described).get("size")
        if type(properties) is not TensorProperties or not isinstance(dtype, torch.dtype):
            self._fail(f"the metadata does not say what kind of tensor {name} is", name)
        if not are_sizes(shape):
            self._fail(f"{name} cannot have the shape {shape!r}", name)
        assert isinstance(shape, tuple)
        parts = vars(described).get("chunks")
        if type(parts) is not list:
            self._fail(f"the metadata does not say which parts {name} has", name)
        chunks = [self._chunk(name, part, shape) for part in parts]
        whole = [chunk for chunk in chunks if chunk is not None]
        lost = _what_is_lost(shape, whole, dtype.itemsize)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.nbytes:
            lost = (
                f"the metadata gives this tensor {nbytes} bytes, but all files together have only "
                f"{self.nbytes}"
            )
            self._oversized.append(f"{name}: {lost}")
        return DcpTensor(name, dtype, torch.Size(shape), whole, lost)

    def _chunk(self, name: str, chunk: Any, shape: tuple[int, ...]) -> Chunk | None:
        """Return a part of a tensor; None if the part has no elements."""
        is_one = type(chunk) is ChunkStorageMetadata
        offsets = vars(chunk).get("offsets") if is_one else None
        sizes = vars(chunk).get("sizes") if is_one else None
        if not are_sizes(offsets) or not are_sizes(sizes):
            self._fail(f"the metadata does not say which parts {name} has", name)
        assert isinstance(offsets, tuple)
        assert isinstance(sizes, tuple)
        if 0 in sizes:
            return None
        fits = len(offsets) == len(sizes) == len(shape) and all(
            begin + n <= size for begin, n, size in zip(offsets, sizes, shape, strict=True)
        )
        if not fits:
            self._fail(
                f"{name} has shape {list(shape)}, but a part of shape {list(sizes)} at "
                f"{list(offsets)}, which is out of bounds",
                name,
            )
        return Chunk(tuple(offsets), tuple(sizes), self._info(name, offsets))

    def require_tensor(self, tensor: DcpTensor) -> None:
        """Raise if a tensor's parts overlap, have gaps, or need more bytes than the files have."""
        if tensor.lost:
            self._fail(f"{tensor.name}: {tensor.lost}", tensor.name)
        wanted: dict[str, int] = {}
        for chunk in tensor.chunks:
            wanted[chunk.file] = wanted.get(chunk.file, 0) + chunk.nbytes
        for file, nbytes in wanted.items():
            if 0 <= self.sizes[file] < nbytes:
                self._fail(
                    f"according to this file, parts of {tensor.name} take {nbytes} bytes of "
                    f"{self.file(file)}, which has only {self.sizes[file]}",
                    tensor.name,
                )

    def stored(self, files: RankFiles, tensor: DcpTensor, chunk: Chunk) -> StoredTensor | None:
        """Return where a chunk's elements are in its file; None if only torch can read them."""
        key = id(chunk)
        if key not in self._stored:
            planned = tensor.dtype, torch.Size(chunk.sizes)
            found = files.stored_tensor(chunk.info, tensor.name, lambda: planned)
            if found is not None and tuple(found.shape) != chunk.sizes:
                path = self.file(chunk.file)
                raise CorruptCheckpointError(
                    f"{path}: a part of {tensor.name} has shape {list(found.shape)} here, but "
                    f"{list(chunk.sizes)} according to {self.metadata_path}",
                    path=path,
                    offset=chunk.begin,
                    entries=[tensor.name],
                )
            self._stored[key] = found
        return self._stored[key]

    # ------------------------------------------------------------------------------- its object

    def nested(self, values: Mapping[str, Any]) -> dict[Any, Any]:
        """Rebuild the dicts and lists that the save's planner flattened, in the metadata's order.

        `values` has all entries by flat name.  The result has the same structure as the file that
        torch's ``dcp_to_torch_save`` writes.  Two equal paths raise CorruptCheckpointError.
        """
        paths = self._metadata.planner_data
        if not isinstance(paths, dict):  # absent, or in another planner's format
            paths = {}
        nested = _Nested()
        for name in self._metadata.state_dict_metadata:
            path = paths.get(name, (name,))
            if type(path) is not tuple or not path or not all(map(_is_key, path)):
                self._fail(f"{name} cannot have the path {path!r}", name)
            try:
                nested.put(path, values[name])
            except ValueError as error:
                self._fail(f"{name} cannot be at {path!r}: {error}", name)
        return nested.root


class _Nested:
    """Nested dicts and lists; `put` adds a value as torch's function `set_element` does."""

    def __init__(self) -> None:
        self.root: dict[Any, Any] = {}
        self._padding_left = _MAX_PADDING

    def put(self, path: tuple[Any, ...], value: Any) -> None:
        container: Any = self.root
        for key, following in pairwise(path):
            kind = dict if type(following) is str else list
            found = self._slot(container, key)
            if found is None:
                container[key] = found = kind()
            if type(found) is not kind:
                raise ValueError(f"{key!r} is not a {kind.__name__}")
            container = found
        if self._slot(container, path[-1]) is not None:
            raise ValueError("another entry has this place")
        container[path[-1]] = value

    def _slot(self, container: Any, key: Any) -> Any:
        """Return a key's value in a container, or None; extend a list until the key can be set."""
        if type(container) is dict:
            return container.get(key)
        if type(key) is not int:
            raise ValueError(f"a list has no index {key!r}")
        n_missing = key + 1 - len(container)
        if n_missing > self._padding_left:
            raise ValueError("the list would be nearly empty")
        self._padding_left -= max(n_missing - 1, 0)
        container.extend([None] * n_missing)
        return container[key]


def _is_key(key: Any) -> bool:
    return type(key) is str or (type(key) is int and key >= 0)


def _what_is_lost(shape: tuple[int, ...], chunks: Sequence[Chunk], itemsize: int) -> str:
    """Return why chunks do not make a tensor of this shape, or "" if they do."""
    for chunk in chunks:
        is_whole = getattr(chunk.info, "ptsave_whole", False)  # the tensor may be sparse
        if chunk.numel * itemsize > chunk.nbytes and not is_whole:
            return (
                f"the part at {list(chunk.offsets)} needs {chunk.numel * itemsize} bytes, but its "
                f"item in {chunk.file} has only {chunk.nbytes}"
            )
    overlap = _overlap(shape, chunks)
    if overlap is not None:
        one, other = overlap
        return (
            f"the part of shape {list(one.sizes)} at {list(one.offsets)} overlaps the part of "
            f"shape {list(other.sizes)} at {list(other.offsets)}"
        )
    n_there = sum(chunk.numel for chunk in chunks)
    n_all = math.prod(shape)
    if n_there != n_all:
        return f"the parts have {n_there} elements, but the tensor has {n_all}"
    return ""


def _overlap(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Return two chunks that overlap, or None; sweep along the longest dimension to find them."""
    if len(chunks) < 2:
        return None
    if not shape:
        return chunks[0], chunks[1]
    dim = max(range(len(shape)), key=shape.__getitem__)
    active: list[tuple[int, int]] = []  # of each chunk: its end along `dim`, and its number
    for number in sorted(range(len(chunks)), key=lambda i: chunks[i].offsets[dim]):
        chunk = chunks[number]
        begin = chunk.offsets[dim]
        del active[: bisect_right(active, (begin, len(chunks)))]
        for _, other in active:
            if _overlaps(chunk, chunks[other]):
                return chunk, chunks[other]
        insort(active, (begin + chunk.sizes[dim], number))
    return None


def _overlaps(a: Chunk, b: Chunk) -> bool:
    ranges = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(x < y + m and y < x + n for x, n, y, m in ranges)


# ----------------------------------------------------------------------------------- its damage


@dataclass(frozen=True)
class DcpDamage:
    """Damage in a file, or a contradiction in the metadata."""

    path: str
    reason: str
    offset: int | None = None  # where the damage begins in the file
    entries: list[str] = field(default_factory=list)  # flat names of the affected entries


@dataclass
class DcpFindings:
    """The result of `find_dcp_damage`."""

    damage: list[DcpDamage] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)  # flat names of entries without checksums
    metadata_is_checked: bool = False  # the metadata has a checksum and matches it


def find_dcp_damage(
    checkpoint: DcpCheckpoint, progress: Callable[[int], None] | None = None
) -> DcpFindings:
    """Read all files of a checkpoint, and compare everything with its checksums.

    Files of `ptsave.distributed` have a checksum for each block.  Files of torch's writer have a
    checksum for each record of each item.  `progress` gets the number of bytes compared so far.
    """
    found = DcpFindings()
    try:
        found.metadata_is_checked = checkpoint.metadata_is_checked()
    except CorruptCheckpointError as error:
        found.damage.append(_damage_of(error, checkpoint.metadata_path))
    wrong = {name: checkpoint.what_is_wrong(name) for name in checkpoint.sizes}
    for name, reason in wrong.items():
        if reason:
            entries = checkpoint.entries_in(name)
            found.damage.append(DcpDamage(checkpoint.file(name), reason, None, entries))
    for tensor in checkpoint.tensors.values():
        if any(wrong[chunk.file] for chunk in tensor.chunks):
            continue  # reported already
        try:
            checkpoint.require_tensor(tensor)
        except CorruptCheckpointError as error:
            found.damage.append(_damage_of(error, checkpoint.metadata_path))
    done = 0
    for name, nbytes in checkpoint.sizes.items():
        if nbytes < 0 or (wrong[name] and name in checkpoint.checked):
            continue
        with checkpoint.rank_files(verify=True) as files:
            check = _check_blocks if name in checkpoint.checked else _check_items
            check(checkpoint, files, name, found, progress_from(progress, done))
        done += nbytes
    return found


def _check_blocks(
    checkpoint: DcpCheckpoint,
    files: RankFiles,
    name: str,
    found: DcpFindings,
    progress: Callable[[int], None] | None,
) -> None:
    nbytes = checkpoint.checked[name].nbytes
    for begin, end in files.damaged_blocks(name, progress):
        what = "block" if begin < nbytes else "table of checksums"
        entries = checkpoint.entries_in(name, begin, end) if begin < nbytes else []
        found.damage.append(
            DcpDamage(checkpoint.file(name), f"the checksum of this {what} differs", begin, entries)
        )


def _check_items(
    checkpoint: DcpCheckpoint,
    files: RankFiles,
    name: str,
    found: DcpFindings,
    progress: Callable[[int], None] | None,
) -> None:
    """Check a file of torch's writer item by item, because each item is an archive."""
    path = checkpoint.file(name)
    unverified: dict[str, None] = dict.fromkeys(found.unverified)
    for item in checkpoint.items_in(name):
        if item.end > checkpoint.sizes[name]:
            continue  # reported already
        try:
            damage = files.damage_in(item.info, item.name)
            if damage is None:
                unverified[item.name] = None
            for each in damage or ():
                record = f"record {each.record} of {item.name}: {each.reason}"
                at = item.begin + each.offset
                found.damage.append(DcpDamage(path, record, at, [item.name]))
            if not damage and item.tensor is not None and item.chunk is not None:
                checkpoint.stored(files, item.tensor, item.chunk)
        except CorruptCheckpointError as error:
            found.damage.append(DcpDamage(path, bare_message(error, path), item.begin, [item.name]))
        except NotImplementedError:  # an extension of DCP has transformed the item
            unverified[item.name] = None
        if progress is not None:
            progress(item.end)
    found.unverified = [*unverified]


def _damage_of(error: CorruptCheckpointError, path: str) -> DcpDamage:
    return DcpDamage(path, bare_message(error, path), None, list(error.entries))
