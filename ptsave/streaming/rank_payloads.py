"""Finds the tensors of a distributed checkpoint as payloads of files that are written.

If a tensor's chunks in sequence are its bytes (rows of ranks, or all of it on one), it is read from
the ranks' files while it is written.  Its checksum is known before, from the checksums of its
blocks or records.  Any other tensor, such as one in columns, goes through a temporary file, piece
by piece, and is checked on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ptsave import _C
from ptsave.contents.contents import Contents
from ptsave.contents.dcp import DcpContents
from ptsave.dcp.checkpoint import Chunk, DcpTensor
from ptsave.dcp.rank_files import RankFiles, StoredTensor
from ptsave.sources.kinds import regular_only
from ptsave.streaming.places import StoragePlace
from ptsave.support.config import Config
from ptsave.tree.entry_reading import tensors_over

_T = TypeVar("_T")

# With more files, none is read in place: each would keep a descriptor until the conversion ends.
_MAX_FILES = 128
_PIECE_NBYTES = 32 << 20
# Chunks whose checksums are found at once: each takes less than a block of memory.
_N_CHUNKS = 4096


class Sources(Protocol):
    """The part of `PayloadSources` that `RankPayloads` needs."""

    limits: Config

    def add_file(self, fd: int, name: str) -> int: ...
    def enter(self, context: AbstractContextManager[_T]) -> _T: ...
    def put(self, storage: torch.UntypedStorage, place: StoragePlace) -> None: ...
    def spool(self, pieces: Iterable[Tensor]) -> tuple[int, int]: ...


@dataclass(frozen=True)
class _InPlace:
    """A tensor that is read from the files of ranks: its chunks in the order of its bytes."""

    tensor: Tensor
    stored: DcpTensor
    chunks: list[StoredTensor]


class RankPayloads:
    """The tensors of one distributed checkpoint, as sources of a conversion.

    `locations` has the devices other than the CPU that tensors in objects were saved from, by
    `storage_id`.
    """

    def __init__(self, contents: Contents, sources: Sources) -> None:
        assert isinstance(contents, DcpContents)
        self._contents = contents
        self._checkpoint = contents.checkpoint
        self._sources = sources
        self._verify = sources.limits.verify
        self._numbers: dict[str, int] = {}
        self.locations = contents.locations
        self._tensors = {
            tensor.untyped_storage().data_ptr(): tensor
            for tensor in tensors_over(contents.obj)
            if contents.stored_tensor(tensor) is not None and tensor.nbytes
        }

    def place(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Tell the sources where the bytes of this checkpoint's storages are."""
        pointers = dict.fromkeys(storage.data_ptr() for storage in storages)
        tensors = [self._tensors[each] for each in pointers if each in self._tensors]
        if self._checkpoint.is_remote or len(self._checkpoint.sizes) > _MAX_FILES:
            for tensor in tensors:
                self._spool(tensor)
            return
        batch: list[_InPlace] = []
        n_chunks = 0
        with self._checkpoint.rank_files(verify=self._verify) as files:
            for tensor in tensors:
                found = self._in_place(files, tensor)
                if found is None:
                    self._spool(tensor)
                    continue
                batch.append(found)
                n_chunks += len(found.chunks)
                if n_chunks >= _N_CHUNKS:
                    self._put(files, batch)
                    batch, n_chunks = [], 0
            self._put(files, batch)

    # ------------------------------------------------------------------------ in their files

    def _in_place(self, files: RankFiles, tensor: Tensor) -> _InPlace | None:
        """Return a tensor's chunks in the order of its bytes; None if they are not its bytes."""
        stored = self._contents.stored_tensor(tensor)
        assert stored is not None
        self._checkpoint.require_tensor(stored)
        if not all(_is_range(chunk, stored) for chunk in stored.chunks):
            return None
        chunks = sorted(stored.chunks, key=lambda chunk: chunk.offsets)
        found: list[StoredTensor] = []
        for chunk in chunks:
            each = self._checkpoint.stored(files, stored, chunk)
            if each is None or each.dtype != stored.dtype or not each.is_packed:
                return None
            found.append(each)
        return _InPlace(tensor, stored, found)

    def _put(self, files: RankFiles, batch: list[_InPlace]) -> None:
        crcs = self._crcs(files, [chunk for each in batch for chunk in each.chunks])
        for each in batch:
            self._put_one(each, crcs[: len(each.chunks)])
            crcs = crcs[len(each.chunks) :]

    def _put_one(self, found: _InPlace, crcs: list[int | None]) -> None:
        parts: list[tuple[int, int, int]] = []
        begin = 0
        whole: int | None = 0
        for chunk, crc in zip(found.chunks, crcs, strict=True):
            parts.append((begin, self._number(chunk.file), chunk.offset))
            known = whole is not None and crc is not None
            whole = _C.crc32_combine(whole, crc, chunk.nbytes) if known else None  # type: ignore[arg-type]
            begin += chunk.nbytes
        self._sources.put(
            found.tensor.untyped_storage(),
            self._place(found.stored, parts, begin, whole),
        )

    def _place(
        self, stored: DcpTensor, parts: list[tuple[int, int, int]], nbytes: int, crc: int | None
    ) -> StoragePlace:
        _, source, offset = parts[0]
        return StoragePlace(
            source,
            offset,
            nbytes,
            crc,
            parts=tuple(parts) if len(parts) > 1 else (),
            path=self._checkpoint.path,
            entry=stored.name,
        )

    def _crcs(self, files: RankFiles, chunks: list[StoredTensor]) -> list[int | None]:
        """Return the checksums of chunks, with None for unknown or unwanted ones."""
        if not self._verify:
            return [None] * len(chunks)
        crcs: list[int | None] = [chunk.crc for chunk in chunks]
        checked = [i for i, chunk in enumerate(chunks) if chunk.file in self._checkpoint.checked]
        found = files.crcs_of([chunks[i] for i in checked])
        for i, crc in zip(checked, found, strict=True):
            crcs[i] = crc
        return crcs

    def _number(self, file: str) -> int:
        """Return the number of a file among the sources, which is opened once."""
        if file not in self._numbers:
            path = self._checkpoint.file(file)
            stack = self._sources.enter(ExitStack())
            descriptor = regular_only(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            self._numbers[file] = self._sources.add_file(descriptor, path)
        return self._numbers[file]

    # --------------------------------------------------------------- through a temporary file

    def _spool(self, tensor: Tensor) -> None:
        pieces = (
            self._contents.read_slice(tensor, index, self._verify)
            for index in _pieces(tensor.shape, tensor.itemsize)
        )
        source, begin = self._sources.spool(pieces)
        place = StoragePlace(source, begin, tensor.nbytes)
        self._sources.put(tensor.untyped_storage(), place)


def _is_range(chunk: Chunk, stored: DcpTensor) -> bool:
    """Whether a chunk is one range of the tensor's elements, in their order."""
    is_cut = False
    for n, size in zip(reversed(chunk.sizes), reversed(stored.shape), strict=True):
        if is_cut and n != 1:
            return False
        is_cut = is_cut or n != size
    return True


def _pieces(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices of parts that, one after the other, are the whole tensor.

    >>> list(_pieces((3, 1 << 25), 1)) == [(slice(i, i + 1),) for i in range(3)]
    True
    """
    nbytes = itemsize
    for n in shape:
        nbytes *= n
    if nbytes <= _PIECE_NBYTES or not shape:
        yield ()
        return
    row = nbytes // shape[0]
    step = max(_PIECE_NBYTES // row, 1)
    for begin in range(0, shape[0], step):
        part = slice(begin, begin + step)
        if row <= _PIECE_NBYTES:
            yield (part,)
        else:
            yield from ((part, *rest) for rest in _pieces(shape[1:], itemsize))
