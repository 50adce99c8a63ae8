"""Reads parts of the files of ranks, all of them in one pipeline, and checks their blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.distributed.directory import CheckpointDirectory
from ptsave.distributed.metadata import CheckedFile
from ptsave.distributed.rank_file import (
    BLOCK_NBYTES,
    SECTION_BLOCKS,
    section_crcs,
    table_nbytes,
)
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.kinds import regular_only
from ptsave.support import config

__all__ = ["Box", "RankFiles", "StoredTensor"]

_SECTION_NBYTES = SECTION_BLOCKS * BLOCK_NBYTES
_CRC_NBYTES = 4
# Gaps of this size are read rather than left out, unless the columns of a tensor are wanted.
_MAX_GAP = 64 << 10
_MAX_GAP_OF_COLUMNS = 8 << 10
_N_READERS_OF_COLUMNS = 48
# Runs of fewer bytes are not worth a read of their own.
_MIN_RUN_NBYTES = 4 << 10


@dataclass(frozen=True)
class Box:
    """A block of a stored tensor, and memory for it.

    Attributes
    ----------
    file : str
        Name of the file.
    name : str
        The tensor or object, for errors.
    offset : int
        Where the block's first element is in the file, in bytes.
    strides : tuple of int
        Bytes from one element of each dimension to the next, in the file.
    target : torch.Tensor
        Gets the block; in CPU memory.
    crc : int or None
        The checksum of all bytes of the target, if it is known.
    """

    file: str
    name: str
    offset: int
    strides: tuple[int, ...]
    target: Tensor
    crc: int | None = None

    @property
    def end(self) -> int:
        """Where the block's last byte ends in the file."""
        if self.target.numel() == 0:
            return self.offset
        steps = zip(self.target.shape, self.strides, strict=True)
        return self.offset + sum((n - 1) * step for n, step in steps) + self.target.itemsize

    @property
    def has_gaps(self) -> bool:
        """Whether it takes long runs with long gaps between them, as columns do."""
        run = self.target.itemsize
        for n, step in reversed(list(zip(self.target.shape, self.strides, strict=True))):
            if n == 1:
                continue
            if step != run:
                return run >= _MIN_RUN_NBYTES and step - run > _MAX_GAP_OF_COLUMNS
            run *= n
        return False


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes
    ----------
    file, name : str
        The file and the tensor.
    dtype : torch.dtype
        Of the elements.
    shape : torch.Size
        Elements of each dimension.
    strides : tuple of int
        As of a box.
    offset : int
        Where the first element is in the file, in bytes.
    crc : int or None
        The checksum of all bytes, if they are in the order of a contiguous tensor.
    """

    file: str
    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    crc: int | None = None

    def box(self, begins: Sequence[int], target: Tensor) -> Box:
        """Return the block from an index on, as large as the target.

        Raises
        ------
        CorruptCheckpointError
            If the tensor does not have it.
        """
        shape = target.shape
        fits = len(begins) == len(shape) == len(self.shape) and all(
            0 <= begin <= begin + n <= size
            for begin, n, size in zip(begins, shape, self.shape, strict=True)
        )
        if not fits:
            raise CorruptCheckpointError(
                f"{self.file}: {self.name} is stored with shape {list(self.shape)}, and does not "
                f"have the part from {list(begins)} on of shape {list(shape)}",
                path=self.file,
                entries=[self.name],
            )
        begin = sum(b * step for b, step in zip(begins, self.strides, strict=True))
        is_whole = shape == self.shape and target.is_contiguous()
        crc = self.crc if is_whole else None
        return Box(self.file, self.name, self.offset + begin, self.strides, target, crc)


def packed_strides(shape: torch.Size, itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in bytes."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


class RankFiles:
    """The files of one load; closes them at the end of a ``with`` block.

    Parameters
    ----------
    directory : CheckpointDirectory
        Where they are.
    checked : dict of str to CheckedFile
        Those that have checksums.
    verify : bool
        Whether checksums are compared.
    """

    def __init__(
        self, directory: CheckpointDirectory, checked: dict[str, CheckedFile], *, verify: bool
    ) -> None:
        self.path = directory.path
        self.verify = verify and config.current().verify
        self._directory = directory
        self._checked = checked
        self._open: dict[str, tuple[int, int]] = {}  # descriptor and size
        self._mapped: dict[str, memoryview] = {}
        self._stack = ExitStack()

    def __enter__(self) -> RankFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------------------- their contents

    def is_checked(self, info: Any) -> bool:
        """Return whether an item is in a file that has checksums."""
        return getattr(info, "relative_path", None) in self._checked

    def descriptor(self, name: str) -> tuple[int, int]:
        """Return descriptor and size of a file, opening it."""
        if name not in self._open:
            _refuse_outside(name, self.path)
            path = self._directory.file(name)
            descriptor = regular_only(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, descriptor)
            nbytes = os.fstat(descriptor).st_size
            file = self._checked.get(name)
            if file is not None and nbytes != file.nbytes + table_nbytes(file.nbytes):
                raise CorruptCheckpointError(
                    f"{path}: the file has {nbytes} bytes, and its checkpoint was saved with "
                    f"{file.nbytes + table_nbytes(file.nbytes)}",
                    path=path,
                )
            self._open[name] = descriptor, nbytes
        return self._open[name]

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return self._directory.file(name)

    def view(self, name: str) -> memoryview:
        """Return the bytes of a file, mapped."""
        if name not in self._mapped:
            descriptor, nbytes = self.descriptor(name)
            mapped = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) if nbytes else b""
            self._mapped[name] = memoryview(mapped)
        return self._mapped[name]

    def place_of(self, info: Any, name: str) -> tuple[int, int]:
        """Return offset and size of an item.

        Raises
        ------
        CorruptCheckpointError
            If the metadata points outside the directory or the file.
        """
        file = getattr(info, "relative_path", None)
        offset, length = getattr(info, "offset", None), getattr(info, "length", None)
        if type(file) is not str or type(offset) is not int or type(length) is not int:
            raise CorruptCheckpointError(
                f"{self.path}: the metadata does not say where {name} is",
                path=self.path,
                entries=[name],
            )
        if getattr(info, "transform_descriptors", None):
            raise NotImplementedError(
                f"{name} was transformed by extensions {info.transform_descriptors}: read it with "
                "torch's FileSystemReader"
            )
        _, nbytes = self.descriptor(file)
        checked = self._checked.get(file)
        limit = nbytes if checked is None else checked.nbytes
        if not 0 <= offset <= offset + length <= limit:
            path = self._directory.file(file)
            raise CorruptCheckpointError(
                f"{path}: cut short: {name} is {length} bytes from offset {offset} on, and the "
                f"file ends at {limit}",
                path=path,
                offset=offset,
                entries=[name],
            )
        return offset, length

    def tensor_at_end(
        self, info: Any, name: str, dtype: torch.dtype, shape: torch.Size
    ) -> StoredTensor:
        """Return the tensor whose bytes are the last ones of an item of ours."""
        offset, length = self.place_of(info, name)
        nbytes = shape.numel() * dtype.itemsize
        if not 0 <= nbytes <= length:
            raise CorruptCheckpointError(
                f"{self.path}: {name} has {nbytes} bytes, and its item only {length}",
                path=self.path,
                entries=[name],
            )
        return StoredTensor(
            info.relative_path,
            name,
            dtype,
            shape,
            packed_strides(shape, dtype.itemsize),
            offset + length - nbytes,
        )

    def whole(self, info: Any, name: str) -> Box:
        """Return all bytes of an item, with fresh memory for them."""
        offset, length = self.place_of(info, name)
        target = torch.empty(length, dtype=torch.uint8)
        return Box(info.relative_path, name, offset, (1,), target)

    def read_whole(self, info: Any, name: str) -> bytes:
        """Read all bytes of an item."""
        box = self.whole(info, name)
        self.read([box])
        return box.target.numpy().tobytes()

    # ------------------------------------------------------------------------------ reading them

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill the targets of boxes.

        Raises
        ------
        CorruptCheckpointError
            If a checksum differs.
        OSError
            If a file cannot be read.
        """
        boxes = [box for box in boxes if box.target.numel() > 0]
        if not boxes:
            return
        names = sorted({box.file for box in boxes})
        numbers = {name: number for number, name in enumerate(names)}
        tables = [self._table(name, [box for box in boxes if box.file == name]) for name in names]
        are_columns = any(box.has_gaps for box in boxes)
        n_threads = config.current().n_readers
        if are_columns:  # of short runs the disk has to have many at a time
            n_threads = max(n_threads, _N_READERS_OF_COLUMNS)
        damaged = _C.read_checked(
            self._range_files(names, n_threads),
            [(numbers[box.file], box.offset, list(box.strides), box.target) for box in boxes],
            tables,
            n_threads=n_threads,
            max_gap=_MAX_GAP_OF_COLUMNS if are_columns else _MAX_GAP,
            progress=None,
        )
        if damaged:
            number, offset = damaged[0]
            self._raise_damaged(names[number], offset, boxes)
        if self.verify:
            for box in boxes:
                self._check_whole(box)

    def _range_files(self, names: Sequence[str], n_threads: int) -> _C.RangeFiles:
        opened = [
            (self.descriptor(name)[0], os.fsencode(self._directory.file(name))) for name in names
        ]
        direct = config.current().direct_io
        return _C.RangeFiles(opened, direct=direct, n_threads=n_threads)

    def _table(self, name: str, boxes: Sequence[Box]) -> Tensor | None:
        """Return the checksums of a file's blocks, as far as boxes need them."""
        file = self._checked.get(name)
        if file is None or not self.verify:
            return None
        table = torch.empty(table_nbytes(file.nbytes), dtype=torch.uint8)
        spans = [(box.offset // _SECTION_NBYTES, -(-box.end // _SECTION_NBYTES)) for box in boxes]
        section = SECTION_BLOCKS * _CRC_NBYTES
        merged = _merged(spans)
        parts = [(begin, table[begin * section : end * section]) for begin, end in merged]
        n_threads = config.current().n_readers
        _C.read_checked(
            self._range_files([name], n_threads),
            [(0, file.nbytes + begin * section, [1], part) for begin, part in parts],
            [None],
            n_threads=n_threads,
            max_gap=_MAX_GAP,
            progress=None,
        )
        for begin, part in parts:
            found = section_crcs(part.numpy().data, section)
            if found != file.crcs[begin * _CRC_NBYTES : begin * _CRC_NBYTES + len(found)]:
                self._raise_damaged(name, file.nbytes + begin * section, boxes)
        return table

    def _check_whole(self, box: Box) -> None:
        """Compare the checksum of a record in an archive of torch's writer."""
        if box.crc is None:
            return
        if _C.crc32(box.target.view(-1).view(torch.uint8).numpy().data) != box.crc:
            self._raise_damaged(box.file, box.offset, [box])

    def _raise_damaged(self, name: str, offset: int, boxes: Sequence[Box]) -> None:
        path = self._directory.file(name)
        end = offset + BLOCK_NBYTES
        hit = [b.name for b in boxes if b.file == name and b.offset < end and b.end > offset]
        entries = list(dict.fromkeys(hit))
        held = f"; it holds bytes of {', '.join(entries[:5])}" if entries else ""
        raise CorruptCheckpointError(
            f"{path}: the checksum of the block at offset {offset} differs{held}",
            path=path,
            offset=offset,
            entries=entries,
        )


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of half-open spans, in order."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _refuse_outside(name: str, directory: str) -> None:
    """Refuse a name of a file that is not below the directory."""
    parts = name.split("/")
    if os.path.isabs(name) or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise CorruptCheckpointError(
            f"{directory}: the metadata points outside its directory, to {name!r}", path=directory
        )
