"""Reads the files of ranks at a URL, through files in memory.

The engine reads and checks files.  So each remote file has a sparse file of its size in memory,
which gets the blocks that are wanted next and loses them after the read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ptsave.archive.reader import RecordReader
from ptsave.archive.remote import RemoteReader
from ptsave.dcp.metadata import BLOCK_NBYTES, CheckedFile
from ptsave.dcp.rank_files import MAX_GAP, RankFiles, joined
from ptsave.dcp.read_plan import Box, batches
from ptsave.sources.ranges import FsspecFile, RangeSource, SparseFile
from ptsave.support import config

# The most bytes in one request, and in memory at once.
_REQUEST_NBYTES = 8 << 20
_BATCH_NBYTES = 32 << 20


class FetchedFiles(RankFiles):
    """`RankFiles` beside metadata at a URL."""

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
        """Read in batches, which limits the memory for fetched bytes."""
        for batch in batches(boxes, _BATCH_NBYTES):
            super()._read(batch)

    def _fetch(self, name: str, spans: Iterable[tuple[int, int]]) -> None:
        self.descriptor(name)
        source, file = self._sources[name], self._files[name]
        os.ftruncate(file.descriptor, 0)  # frees the blocks fetched before
        os.ftruncate(file.descriptor, source.nbytes)
        limit = self._checked[name].nbytes if name in self._checked else source.nbytes
        wanted = [span for begin, end in spans for span in _blocks(begin, end, limit)]
        for batch in _batches(dict.fromkeys(wanted)):
            for (begin, _), piece in zip(batch, source.read(batch), strict=True):
                file.write(begin, piece)

    def _fetch_boxes(self, name: str, boxes: Sequence[Box]) -> None:
        # The engine reads and checks the bytes in short gaps, too.
        self._fetch(name, joined((span for box in boxes for span in _runs(box)), MAX_GAP))


class _Part(RangeSource):
    """A part of a file, as a file of its own."""

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
    """Yield a range of bytes, extended to whole blocks, in pieces of one request each.

    Bytes behind `limit`, where the checksums are, belong to no block.
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


def _runs(box: Box) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that a box needs, joined across short gaps."""
    return _runs_of(box.offset, tuple(box.target.shape), tuple(box.strides), box.target.itemsize)


def _runs_of(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, int]]:
    if _is_dense(shape, strides, itemsize):
        steps = zip(shape, strides, strict=True)
        yield offset, offset + sum((n - 1) * step for n, step in steps) + itemsize
        return
    for number in range(shape[0]):
        yield from _runs_of(offset + number * strides[0], shape[1:], strides[1:], itemsize)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether all gaps between the elements are short."""
    inner = itemsize
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1:
            if step - inner > MAX_GAP:
                return False
            inner += (n - 1) * step
    return True
