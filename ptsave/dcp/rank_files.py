"""Reads parts of several ranks' files together, and compares their blocks with checksums.

The engine reads and checks only local files.  So for each file at a URL, there is a sparse file of
the same size in memory.  It has only the blocks that the current read needs.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.damage import Damage, find_damage
from ptsave.archive.loading import raise_with_advice
from ptsave.archive.opening import spans_of
from ptsave.archive.reader import RecordReader
from ptsave.archive.remote import RemoteReader
from ptsave.archive.unpickling import can_defer_reading, unpickle_unread
from ptsave.dcp.metadata import (
    BLOCK_NBYTES,
    CRC_NBYTES,
    SECTION_BLOCKS,
    SECTION_NBYTES,
    CheckedFile,
    ReadMetadata,
    replaced,
    section_crcs,
)
from ptsave.dcp.read_plan import (
    MAX_GAP_OF_COLUMNS,
    Box,
    StoredTensor,
    batches,
    is_strided,
    packed_strides,
)
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import ZIP_MAGIC, is_legacy, regular_only
from ptsave.sources.ranges import FsspecFile, RangeSource, SparseFile
from ptsave.support import config, torch_dcp
from ptsave.support.torch_names import restricted_unpickler

# Gaps of up to this size between wanted bytes are read, too.  For columns, the limit is lower.
MAX_GAP = 64 << 10
_N_READERS_OF_COLUMNS = 128
_MAX_COPIED_NBYTES = 32 << 20
_VERIFIED_NBYTES = 32 << 20  # bytes that `damaged_blocks` reads at a time
# For files at a URL: the most bytes in one request, and in memory at once.
_REQUEST_NBYTES = 8 << 20
_BATCH_NBYTES = 32 << 20


class RankFiles:
    """Opens the files of one load, and closes them at the end of a ``with`` block.

    `checked` has the files with checksums; `verify` says whether to compare these.  If a file is
    missing and `metadata` has changed, the error says that the checkpoint was replaced.
    """

    def __init__(
        self,
        path: str,
        checked: dict[str, CheckedFile],
        *,
        verify: bool,
        metadata: ReadMetadata | None = None,
    ) -> None:
        self.path = path
        self._metadata = metadata
        self.verify = verify and config.current().verify
        self._checked = checked
        self._open: dict[str, tuple[int, int]] = {}  # descriptor and size
        self._mapped: dict[str, memoryview] = {}
        self._stack = ExitStack()

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------------------- their contents

    def fail(self, what: str, name: str) -> NoReturn:
        """Raise CorruptCheckpointError: the metadata is wrong for the tensor or object `name`."""
        raise CorruptCheckpointError(f"{self.path}: {what}", path=self.path, entries=[name])

    def is_checked(self, info: Any) -> bool:
        """Return whether an item is in a file that has checksums."""
        return getattr(info, "relative_path", None) in self._checked

    def holds_as_planned(self, info: Any) -> bool:
        """Whether an item is in a checked file, and its tensor has the planned dtype and shape."""
        if type(info) is not torch_dcp.StorageInfo:
            return False
        state = vars(info)
        return (
            state.get("relative_path") in self._checked
            and "ptsave_whole" not in state
            and "ptsave_tensor" not in state
        )

    def descriptor(self, name: str) -> tuple[int, int]:
        """Return the descriptor and size of a file, which the first call opens."""
        if name not in self._open:
            refuse_outside(name, self.path)
            path = self.file(name)
            descriptor, nbytes = self._open_file(name)
            file = self._checked.get(name)
            if file is not None and nbytes != file.saved_nbytes:
                raise CorruptCheckpointError(
                    f"{path}: the file has {nbytes} bytes, but was saved with {file.saved_nbytes}",
                    path=path,
                )
            self._open[name] = descriptor, nbytes
        return self._open[name]

    def _open_file(self, name: str) -> tuple[int, int]:
        """Open a file, which `__exit__` closes, and return its descriptor and size."""
        try:
            descriptor = regular_only(self.file(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._metadata is None or not self._metadata.has_changed:
                raise
            raise replaced(self.path) from None
        self._stack.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.file(name))
        return descriptor, found.st_size

    def _fetch(self, name: str, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch byte ranges of a file at a URL for the engine; do nothing for a local file."""

    def _fetch_boxes(self, name: str, boxes: Sequence[Box]) -> None:
        """Fetch the bytes of boxes from a URL for the engine; do nothing for a local file."""

    def head_of(self, info: Any, name: str, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes of an item."""
        offset, length = self.place_of(info, name)
        return bytes(self.view(info.relative_path)[offset : offset + min(nbytes, length)])

    def archive_of(self, info: Any, name: str, path: str, *, verify: bool) -> RecordReader:
        """Open an item that is an archive; `path` names the archive in errors."""
        offset, length = self.place_of(info, name)
        view = self.view(info.relative_path)[offset : offset + length]
        engine = _C.Reader.open_memory(view, os.fsencode(path))
        return RecordReader(engine, path, config.current(), verify=verify)

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def view(self, name: str) -> memoryview:
        """Return the bytes of a file, which the first call maps into memory."""
        if name not in self._mapped:
            descriptor, nbytes = self.descriptor(name)
            mapped = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) if nbytes else b""
            self._mapped[name] = memoryview(mapped)
        return self._mapped[name]

    def place_of(self, info: Any, name: str) -> tuple[int, int]:
        """Return the offset and size of an item; raise if it is not within its file.

        Raises NotImplementedError if an extension of DCP has transformed the item.
        """
        state = vars(info) if type(info) is torch_dcp.StorageInfo else {}
        file, offset, length = map(state.get, ("relative_path", "offset", "length"))
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            self.fail(f"the metadata does not say where {name} is", name)
        if state.get("transform_descriptors"):
            raise NotImplementedError(
                f"{name} was transformed by extensions {info.transform_descriptors}: read it with "
                "torch's FileSystemReader"
            )
        _, nbytes = self.descriptor(file)
        checked = self._checked.get(file)
        limit = nbytes if checked is None else checked.nbytes
        if not 0 <= offset <= offset + length <= limit:
            path = self.file(file)
            raise CorruptCheckpointError(
                f"{path}: the file is cut short: {name} takes {length} bytes from offset {offset}, "
                f"but the file ends at {limit}",
                path=path,
                offset=offset,
                entries=[name],
            )
        return offset, length

    def stored_tensor(
        self, info: Any, name: str, kind: Callable[[], tuple[torch.dtype, torch.Size]]
    ) -> StoredTensor | None:
        """Return the place of the tensor in an item, or None if only torch can read the item.

        `kind` returns the planned dtype and shape of the tensor, for an item that ptsave has
        written.  Raises CorruptCheckpointError if an archive of torch's writer is damaged.
        """
        if not self.is_checked(info):
            return self._tensor_in_archive(info, name)
        if getattr(info, "ptsave_whole", False):
            return None
        match getattr(info, "ptsave_tensor", None):
            case None:
                dtype, shape = kind()
            case (torch.dtype() as dtype, sizes) if are_sizes(sizes):  # differs from the plan
                shape = torch.Size(sizes)
            case _:
                self.fail(f"the metadata does not say what kind of tensor {name} is", name)
        offset, length = self.place_of(info, name)
        nbytes = shape.numel() * dtype.itemsize
        if not 0 <= nbytes <= length:
            self.fail(f"{name} has {nbytes} bytes, but its item has only {length}", name)
        steps, begin = packed_strides(shape, dtype.itemsize), offset + length - nbytes
        return StoredTensor(info.relative_path, name, dtype, shape, steps, begin)

    def _tensor_in_archive(self, info: Any, name: str) -> StoredTensor | None:
        offset, _ = self.place_of(info, name)
        if self.head_of(info, name, len(ZIP_MAGIC)) != ZIP_MAGIC:
            return None
        path = f"{self.file(info.relative_path)} ({name}, from offset {offset} on)"
        try:
            reader = self.archive_of(info, name, path, verify=self.verify)
            if not can_defer_reading(reader, restricted_unpickler):
                return None
            tensor = unpickle_unread(reader, restricted_unpickler, set())
            return _describe(tensor, reader, info.relative_path, name, offset)
        except UnpicklingError as error:
            raise_with_advice(error, restricted_unpickler)

    def damage_in(self, info: Any, name: str) -> list[Damage] | None:
        """Return the damaged records in an item of torch's writer; None if it has no checksums."""
        if is_legacy(self.head_of(info, name, 64)):
            return None
        reader = self.archive_of(info, name, self.file(info.relative_path), verify=True)
        damage = find_damage(reader, spans_of(reader).find_damage, None)
        return damage if damage or reader.engine.storages_have_crcs else None

    def whole_tensors(
        self,
        infos: Sequence[Any],
        names: Sequence[str],
        targets: Sequence[Tensor],
        alike: Sequence[int],
    ) -> list[Box]:
        """Return a `Box` for each item, to read the tensor at the item's end into its target.

        Targets with the same number in `alike` have the same dtype and shape.
        """
        kinds: dict[int, tuple[int, tuple[int, ...]]] = {}
        limits: dict[str, int] = {}  # where the blocks of each open file end
        offsets, sizes, strides = [], [], []
        for info, name, target, number in zip(infos, names, targets, alike, strict=True):
            if number not in kinds:
                kinds[number] = target.nbytes, packed_strides(target.shape, target.itemsize)
            nbytes, steps = kinds[number]
            state = vars(info)
            offset, length = state.get("offset"), state.get("length")
            if not (
                type(offset) is type(length) is int
                and "transform_descriptors" not in state
                and 0 <= offset <= offset + length <= limits.get(state["relative_path"], -1)
            ):
                offset, length = self.place_of(info, name)
                limits[info.relative_path] = self._checked[info.relative_path].nbytes
            if nbytes > length:
                self.fail(f"{name} has {nbytes} bytes, but its item has only {length}", name)
            offsets.append(offset + length - nbytes)
            sizes.append(nbytes)
            strides.append(steps)
        box = {
            "file": [info.relative_path for info in infos],
            "name": names,
            "offset": offsets,
            "strides": strides,
            "target": targets,
            "crc": None,
            "packed_nbytes": sizes,
        }
        return _C.instances(Box, box)

    def bytes_of(self, info: Any, name: str) -> StoredTensor:
        """Return the place of an item's bytes, described as a one-dimensional uint8 tensor."""
        offset, length = self.place_of(info, name)
        shape = torch.Size([length])
        return StoredTensor(info.relative_path, name, torch.uint8, shape, (1,), offset)

    def read_whole(self, info: Any, name: str) -> bytes:
        """Read all bytes of an item."""
        stored = self.bytes_of(info, name)
        target = torch.empty(stored.shape, dtype=torch.uint8)
        self.read([stored.box((0,), target)])
        return target.numpy().tobytes()

    # ------------------------------------------------------------------------------ reading them

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill the targets of boxes; raise CorruptCheckpointError if a checksum is wrong."""
        boxes = [box for box in boxes if box.target.numel() > 0]
        for batch in batches(boxes):
            self._read(batch)
        for box in boxes if self.verify else ():
            if box.crc is not None:
                self._check_whole(box)

    def _read(self, boxes: Sequence[Box]) -> None:
        by_file: dict[str, list[Box]] = {}
        for box in boxes:
            by_file.setdefault(box.file, []).append(box)
        names = sorted(by_file)
        numbers = {name: number for number, name in enumerate(names)}
        tables = [self._table(name, by_file[name]) for name in names]
        for name in names:
            self._fetch_boxes(name, by_file[name])
        damaged = self._read_checked(
            names,
            [(numbers[box.file], box.offset, box.strides, box.target) for box in boxes],
            tables,
            are_columns=any(box.has_gaps for box in boxes),
        )
        if damaged:
            number, offset = damaged[0]
            self._raise_damaged(names[number], offset, boxes)

    def _read_checked(
        self,
        names: Sequence[str],
        parts: Sequence[tuple[int, int, Sequence[int], Tensor]],
        tables: Sequence[Tensor | None],
        *,
        are_columns: bool = False,
    ) -> list[tuple[int, int]]:
        """Read parts of files; return (number of the file, offset) for each damaged block."""
        limits = config.current()
        # Short runs are fast only if the disk gets many requests at once.
        n_threads = max(limits.n_readers, _N_READERS_OF_COLUMNS if are_columns else 0)
        opened = [(self.descriptor(name)[0], os.fsencode(self.file(name))) for name in names]
        return _C.read_checked(
            _C.RangeFiles(opened, direct=limits.direct_io, n_threads=n_threads),
            parts,
            tables,
            n_threads=n_threads,
            max_gap=MAX_GAP_OF_COLUMNS if are_columns else MAX_GAP,
            progress=None,
        )

    def _read_bytes(
        self, name: str, parts: Sequence[tuple[int, Tensor]], table: Tensor | None = None
    ) -> list[int]:
        """Fill the tensor of each (offset, tensor) in `parts`; return offsets of damaged blocks."""
        parts = [(begin, part) for begin, part in parts if part.numel()]
        self._fetch(name, ((begin, begin + part.numel()) for begin, part in parts))
        boxes = [(0, begin, [1], part) for begin, part in parts]
        return [offset for _, offset in self._read_checked([name], boxes, [table])]

    def _table(self, name: str, boxes: Sequence[Box | StoredTensor]) -> Tensor | None:
        """Return the parts that `boxes` need of a file's checksums; None if nothing is verified."""
        file = self._checked.get(name)
        if file is None or not self.verify:
            return None
        table = torch.empty(file.table_nbytes, dtype=torch.uint8)
        spans = {(box.offset // SECTION_NBYTES, -(-box.end // SECTION_NBYTES)) for box in boxes}
        section = SECTION_BLOCKS * CRC_NBYTES
        parts = [(begin, table[begin * section : end * section]) for begin, end in joined(spans)]
        self._read_bytes(name, [(file.nbytes + begin * section, part) for begin, part in parts])
        for begin, part in parts:
            found = section_crcs(part.numpy().data)
            if found != file.crcs[begin * CRC_NBYTES : begin * CRC_NBYTES + len(found)]:
                self._raise_damaged(name, file.nbytes + begin * section, boxes)
        return table

    def crcs_of(self, tensors: Sequence[StoredTensor]) -> list[int]:
        """Return the checksums of contiguous tensors in checked files.

        If a tensor begins where a block begins, the checksums of its whole blocks are combined.
        Then only the bytes in its last, partial block are read.
        """
        crcs = [0] * len(tensors)
        by_file: dict[str, list[int]] = {}
        rest: list[Box] = []
        of_rest: list[int] = []
        for number, tensor in enumerate(tensors):
            by_file.setdefault(tensor.file, []).append(number)
            n_whole = tensor.whole_blocks
            nbytes = tensor.nbytes - n_whole * BLOCK_NBYTES
            if nbytes:
                target = torch.empty(nbytes, dtype=torch.uint8)
                at = tensor.offset + n_whole * BLOCK_NBYTES
                rest.append(Box(tensor.file, tensor.name, at, (1,), target))
                of_rest.append(number)
        for name, numbers in by_file.items():
            large = [tensors[number] for number in numbers if tensors[number].whole_blocks]
            table = self._table(name, large) if large else None
            for number in numbers:
                first, n = tensors[number].offset // BLOCK_NBYTES, tensors[number].whole_blocks
                if table is not None and n:
                    crcs[number] = _C.crc_of_blocks(
                        table[first * CRC_NBYTES : (first + n) * CRC_NBYTES]
                    )
        self.read(rest)
        for number, box in zip(of_rest, rest, strict=True):
            crc = _C.crc32(box.target.numpy().data)
            crcs[number] = _C.crc32_combine(crcs[number], crc, box.target.numel())
        return crcs

    def damaged_blocks(
        self, name: str, progress: Callable[[int], None] | None = None
    ) -> list[tuple[int, int]]:
        """Read a checked file, and return the ranges of bytes that do not match their checksums.

        A range is a block, or a section of the table of checksums.  Blocks whose section is damaged
        cannot be compared.  `progress` gets the number of bytes compared so far.
        """
        file = self._checked[name]
        section = SECTION_BLOCKS * CRC_NBYTES
        table = torch.empty(file.table_nbytes, dtype=torch.uint8)
        buffer = torch.empty(min(_VERIFIED_NBYTES, file.nbytes), dtype=torch.uint8)
        self._read_bytes(name, [(file.nbytes, table)])
        crcs = section_crcs(table.numpy().data)
        lost = {
            number
            for number in range(len(crcs) // CRC_NBYTES)
            if _crc_at(crcs, number) != _crc_at(file.crcs, number)
        }
        found = [
            (
                file.nbytes + number * section,
                file.nbytes + min((number + 1) * section, table.numel()),
            )
            for number in sorted(lost)
        ]
        for begin in range(0, file.nbytes, _VERIFIED_NBYTES):
            part = buffer[: min(_VERIFIED_NBYTES, file.nbytes - begin)]
            for at in self._read_bytes(name, [(begin, part)], table):
                if at // SECTION_NBYTES not in lost:
                    found.append((at, at + BLOCK_NBYTES))
            if progress is not None:
                progress(begin + part.numel())
        return sorted(found)

    def _check_whole(self, box: Box) -> None:
        """Compare a target with the checksum of its record in an archive of torch's writer."""
        crc = 0
        for piece in _pieces(box.target):
            crc = _C.crc32(piece.contiguous().view(-1).view(torch.uint8).numpy().data, crc)
        if crc != box.crc:
            self._raise_damaged(box.file, box.offset, [box])

    def _raise_damaged(self, name: str, offset: int, boxes: Sequence[Box | StoredTensor]) -> None:
        path = self.file(name)
        end = offset + BLOCK_NBYTES
        hit = [b.name for b in boxes if b.file == name and b.offset < end and b.end > offset]
        entries = list(dict.fromkeys(hit))
        held = f"; the block holds bytes of {', '.join(entries[:5])}" if entries else ""
        raise CorruptCheckpointError(
            f"{path}: the checksum of the block at offset {offset} differs{held}",
            path=path,
            offset=offset,
            entries=entries,
        )


def _describe(
    tensor: Any, reader: RecordReader, file: str, name: str, offset: int
) -> StoredTensor | None:
    engine = reader.engine
    if not is_strided(tensor):
        return None
    if tensor.numel() == 0:
        return StoredTensor.of(tensor, file, name, offset)
    number = engine.record_of(tensor)
    if number is None:
        return None
    record = engine.record(number)
    is_remote = isinstance(reader, RemoteReader)  # the record's header has to be fetched
    at = reader.get_record_offset(record.name) if is_remote else engine.payload_offset(number)
    is_all = tensor.is_contiguous() and record.nbytes == tensor.nbytes
    crc = record.crc if is_all and engine.has_crcs else None
    return StoredTensor.of(tensor, file, name, offset + at, crc)


def _crc_at(crcs: bytes, number: int) -> bytes:
    return crcs[number * CRC_NBYTES : (number + 1) * CRC_NBYTES]


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Split a tensor into parts so small that a contiguous copy of one takes little memory."""
    if tensor.is_contiguous() or tensor.nbytes <= _MAX_COPIED_NBYTES:
        yield tensor
        return
    n_rows = max(_MAX_COPIED_NBYTES * tensor.shape[0] // tensor.nbytes, 1)
    yield from tensor.split(n_rows)


def joined(spans: Iterable[tuple[int, int]], max_gap: int = 0) -> list[tuple[int, int]]:
    """Sort half-open spans, and join spans that are at most `max_gap` apart."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] <= max_gap:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def are_sizes(value: Any) -> bool:
    """Return whether a value from the metadata can be a shape or an index."""
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def refuse_outside(name: str, directory: str) -> None:
    """Raise CorruptCheckpointError if the name of a file leads out of `directory`."""
    parts = name.split("/")
    if os.path.isabs(name) or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise CorruptCheckpointError(
            f"{directory}: the metadata points outside its directory, to {name!r}", path=directory
        )


# ---------------------------------------------------------------------------------- files at a URL


class FetchedFiles(RankFiles):
    """`RankFiles` of a checkpoint at a URL."""

    def __init__(
        self, metadata: FsspecFile, checked: dict[str, CheckedFile], *, verify: bool
    ) -> None:
        super().__init__(files_beside(metadata), checked, verify=verify)
        self._beside = metadata
        self._sources: dict[str, FsspecFile] = {}
        self._files: dict[str, SparseFile] = {}

    def file(self, name: str) -> str:
        """Return the URL of a file."""
        return self._beside.url_beside(name)

    def _open_file(self, name: str) -> tuple[int, int]:
        source = self._sources[name] = self._beside.beside(name)
        file = self._files[name] = SparseFile(source.nbytes)
        self._stack.callback(file.close)
        return file.descriptor, source.nbytes

    def head_of(self, info: Any, name: str, nbytes: int) -> bytes:
        return self._part(info, name).read([(0, min(nbytes, int(info.length)))])[0]

    def archive_of(self, info: Any, name: str, path: str, *, verify: bool) -> RecordReader:
        return RemoteReader(self._part(info, name, path), config.current(), verify=verify)

    def _part(self, info: Any, name: str, path: str = "") -> _Part:
        offset, length = self.place_of(info, name)
        return _Part(self._sources[info.relative_path], offset, length, path)

    # ---------------------------------------------------------------------------- reading them

    def _read(self, boxes: Sequence[Box]) -> None:
        """Read in batches, to limit the memory for fetched bytes."""
        for batch in batches(boxes, _BATCH_NBYTES):
            super()._read(batch)

    def _fetch(self, name: str, spans: Iterable[tuple[int, int]]) -> None:
        self.descriptor(name)
        source, file = self._sources[name], self._files[name]
        os.ftruncate(file.descriptor, 0)  # frees the blocks of earlier reads
        os.ftruncate(file.descriptor, source.nbytes)
        limit = self._checked[name].nbytes if name in self._checked else source.nbytes
        wanted = [span for begin, end in spans for span in _blocks(begin, end, limit)]
        for batch in _batches(dict.fromkeys(wanted)):
            for (begin, _), piece in zip(batch, source.read(batch), strict=True):
                file.write(begin, piece)

    def _fetch_boxes(self, name: str, boxes: Sequence[Box]) -> None:
        # Short gaps are fetched, too, because the engine reads and checks them.
        runs = (
            run
            for box in boxes
            for run in _runs(box.offset, box.target.shape, box.strides, box.target.itemsize)
        )
        self._fetch(name, joined(runs, MAX_GAP))


class _Part(RangeSource):
    """A part of a file that is read as if it were a file."""

    def __init__(self, source: RangeSource, begin: int, nbytes: int, name: str) -> None:
        self.name = name or source.name
        self.nbytes = nbytes
        self._source, self._begin = source, begin

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        at = self._begin
        return self._source.read([(at + begin, at + end) for begin, end in ranges])


def files_beside(metadata: FsspecFile) -> str:
    """Return the URL of the directory that holds the metadata."""
    return metadata.url_beside("").rstrip("/")


def _blocks(begin: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
    """Extend a byte range to whole blocks, and yield it in pieces of up to `_REQUEST_NBYTES`.

    The bytes after `limit` are checksums, and belong to no block.
    """
    if begin < limit:
        begin -= begin % BLOCK_NBYTES
        end = min(end + -end % BLOCK_NBYTES, limit)
    for at in range(begin, end, _REQUEST_NBYTES):
        yield at, min(at + _REQUEST_NBYTES, end)


def _batches(ranges: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    batch: list[tuple[int, int]] = []
    nbytes = 0
    for begin, end in ranges:
        batch.append((begin, end))
        nbytes += end - begin
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _runs(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that a box needs, joined across short gaps."""
    if _is_dense(shape, strides, itemsize):
        steps = zip(shape, strides, strict=True)
        yield offset, offset + sum((n - 1) * step for n, step in steps) + itemsize
        return
    for number in range(shape[0]):
        yield from _runs(offset + number * strides[0], shape[1:], strides[1:], itemsize)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether all gaps between the elements are short."""
    inner = itemsize
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1:
            if step - inner > MAX_GAP:
                return False
            inner += (n - 1) * step
    return True
