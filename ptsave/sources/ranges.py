"""Reads ranges of bytes from local files, file objects, buffers and URLs.

Only the requested ranges and small gaps between them are fetched.  The engine can read only files
and buffers.  So for an archive elsewhere, the engine gets a sparse file in memory that has the
archive's size.  The fetched ZIP directory and small records are written to this file.
"""

from __future__ import annotations

import copy
import errno
import io
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from ptsave.errors import UnsupportedUrlError
from ptsave.sources.kinds import HEAD_NBYTES, Kind, kind_of, refuse_special_stream, regular_only
from ptsave.sources.locations import (
    Identity,
    LocalFolder,
    Location,
    describe,
    identity_of,
    is_url,
    is_url_source,
    name_file,
    options_of,
    os_errors,
    real_file,
    require_identity,
    url_to_fs,
    with_path,
)

if TYPE_CHECKING:
    from torch import Tensor

# Ranges with small gaps are fetched by one request: the gap's and the request's largest sizes.
_MAX_GAP = 64 << 10
_MAX_MERGED = 16 << 20
_STREAM_NBYTES = 4 << 20  # fetched at once when a whole file is read


def expect_no_more_reads(descriptor: int) -> None:
    """Turn readahead off for a file, because cached pages interfere with direct reads."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


class RangeSource:
    """A source of byte ranges, safe for concurrent use; `name` is for messages."""

    name: str
    nbytes: int

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range (begin, end)."""
        pieces = [self._read(*where) for where in ranges]
        self._require_whole(pieces, ranges)
        return pieces

    def _read(self, begin: int, end: int) -> bytes:
        """Return the bytes of a range, or fewer bytes at the end of the file."""
        raise NotImplementedError

    def _require_whole(self, pieces: list[bytes], ranges: Sequence[tuple[int, int]]) -> None:
        for piece, (begin, end) in zip(pieces, ranges, strict=True):
            if len(piece) != end - begin:
                raise self._incomplete(len(piece), begin, end)

    def _incomplete(self, nbytes: int, begin: int, end: int) -> OSError:
        return OSError(
            f"{self.name}: read {nbytes} bytes of the range {begin} to {end}, because the file has "
            "changed or the server does not serve ranges"
        )

    @cached_property
    def head(self) -> bytes:
        """The first `HEAD_NBYTES` bytes, or all of a smaller file; they show the file's kind."""
        (head,) = self.read([(0, min(HEAD_NBYTES, self.nbytes))])
        return head

    @cached_property
    def kind(self) -> Kind | None:
        """The kind of checkpoint that the first bytes show, or None."""
        return kind_of(self.head, self.nbytes)

    def stream(self) -> AbstractContextManager[Any]:
        """Return a file object over all bytes of the source, at its first byte."""
        return io.BufferedReader(_RangeStream(self), _STREAM_NBYTES)

    def close(self) -> None:
        """Release the file or memory; the caller's file object stays open."""

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the source if the block raises, because the traceback would keep it open."""
        try:
            yield
        except BaseException:
            self.close()
            raise


class FsspecFile(RangeSource):
    """A file of any file system that fsspec knows."""

    def __init__(self, url: str, storage_options: dict[str, Any]) -> None:
        self.name = url
        try:
            self.file_system, self.path = url_to_fs(url, storage_options)
        except ValueError as error:
            if not str(error).startswith("Protocol not known"):
                raise
            raise UnsupportedUrlError.of(url, str(error)) from None
        except ImportError as error:
            raise UnsupportedUrlError.unreadable(url, str(error)) from error
        self._take_size()

    def _take_size(self) -> None:
        url = self.name
        with os_errors(url):
            info = self.file_system.info(self.path)
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{url} is a directory: open one of the files in it")
        if info.get("size") is None:
            raise OSError(f"{url}: the server does not tell the file's size: download it first")
        if info.get("partial") is False:
            raise OSError(f"{url}: the server does not serve ranges: download the file first")
        self.nbytes = int(info["size"])

    def url_beside(self, name: str) -> str:
        """Return the URL of another file in the same directory."""
        return with_path(self.name, lambda path: os.path.join(os.path.dirname(path), name))

    def beside(self, name: str) -> FsspecFile:
        """Open another file in the same directory."""
        other = copy.copy(self)
        vars(other).pop("head", None)
        vars(other).pop("kind", None)
        other.name = self.url_beside(name)
        other.path = os.path.join(os.path.dirname(self.path), name)
        other._take_size()
        return other

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        merged = _merged(ranges)
        begins, ends = [begin for begin, _ in merged], [end for _, end in merged]
        with os_errors(self.name):
            pieces = self.file_system.cat_ranges(
                [self.path] * len(merged), begins, ends, on_error="raise"
            )
        self._require_whole(pieces, merged)
        found = [(begin, end, bisect_right(begins, begin) - 1) for begin, end in ranges]
        return [pieces[i][begin - begins[i] : end - begins[i]] for begin, end, i in found]


class _RangeStream(io.RawIOBase):
    """A file object that reads from a `RangeSource`, and raises the source's errors."""

    def __init__(self, source: RangeSource) -> None:
        self.name = source.name
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (0, self._at, self._source.nbytes)[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        end = min(self._at + len(target), self._source.nbytes)
        if self._at >= end:
            return 0
        (piece,) = self._source.read([(self._at, end)])
        target[: len(piece)] = piece
        self._at = end
        return len(piece)


class FileObject(RangeSource):
    """The contents of a seekable file object, from the current position on."""

    def __init__(self, stream: Any, name: str) -> None:
        self.name = name
        self._stream = stream
        self._lock = threading.Lock()
        with _seekable(name):
            self._begin = stream.tell()
            stream.seek(0, os.SEEK_END)  # mmap's seek returns None
        self.nbytes = max(stream.tell() - self._begin, 0)
        self.rewind()

    def rewind(self) -> None:
        """Move the stream back to its original position."""
        self._stream.seek(self._begin)

    def stream(self) -> AbstractContextManager[Any]:
        """Lend the stream at its original position."""
        return _lent(self._stream, self._begin)

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` from offset `begin`, without a copy if the stream has ``readinto``."""
        rest = target
        with self._lock:
            self._stream.seek(self._begin + begin)
            while rest and (n := self._read_some(rest[:_STREAM_NBYTES])):
                rest = rest[n:]
        if rest:
            end = begin + len(target)
            raise self._incomplete(len(target) - len(rest), begin, end)

    def _read_some(self, target: memoryview) -> int:
        if hasattr(self._stream, "readinto"):
            return self._stream.readinto(target) or 0
        piece = self._stream.read(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def _read(self, begin: int, end: int) -> bytes:
        pieces = []
        with self._lock:
            self._stream.seek(self._begin + begin)
            while begin < end and (piece := self._stream.read(end - begin)):
                if isinstance(piece, str):
                    raise TypeError(f"{self.name} is open for text: open it with mode 'rb'")
                pieces.append(piece)
                begin += len(piece)
        return b"".join(pieces)


@contextmanager
def _seekable(name: str) -> Iterator[None]:
    """Explain the error of a file object that cannot seek, and name the object."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ESPIPE and not isinstance(error, io.UnsupportedOperation):
            raise
        reason = (
            f"{os.strerror(errno.ESPIPE)}: this file object does not support seeking: copy its "
            "output to a file or an io.BytesIO"
        )
        raise OSError(errno.ESPIPE, reason, name) from error


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges to fetch, in order; ranges with small gaps between them are merged."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if begin == end and merged:
            continue
        last_begin, last_end = merged[-1] if merged else (begin, begin)
        is_near = begin - last_end <= _MAX_GAP and end - last_begin <= _MAX_MERGED
        if merged and (is_near or end <= last_end):
            merged[-1] = (last_begin, max(last_end, end))
        else:
            merged.append((begin, end))
    return merged


@contextmanager
def _lent(stream: Any, begin: int) -> Iterator[Any]:
    """Yield a stream at position `begin`; afterwards, restore the stream's own position."""
    position = stream.tell()
    stream.seek(begin)
    try:
        yield stream
    finally:
        stream.seek(position)


class Buffer(RangeSource):
    """An :class:`io.BytesIO` from its position on; it cannot be resized until `close` is called."""

    def __init__(self, stream: io.BytesIO, name: str) -> None:
        self.name = name
        self._stream = stream
        self._begin = stream.tell()
        self.view = stream.getbuffer()[self._begin :]
        self.nbytes = self.view.nbytes

    def stream(self) -> AbstractContextManager[Any]:
        """Lend the stream at its original position."""
        return _lent(self._stream, self._begin)

    def close(self) -> None:
        """Allow the stream to be resized again."""
        self.view.release()

    def _read(self, begin: int, end: int) -> bytes:
        return bytes(self.view[begin:end])


class _OpenFile:
    """Owns a file descriptor, which is closed at the latest when this object is deleted."""

    descriptor = -1
    _close = staticmethod(os.close)  # at the interpreter's exit, this module may be gone

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._close(descriptor)

    __del__ = close


class LocalFile(_OpenFile, RangeSource):
    """A local file, from a stream's position on; the stream may be closed afterwards."""

    _parked_as: Identity | None = None  # set while the file is parked

    def __init__(self, stream: Any, name: str) -> None:
        self.name = name
        self.begin = stream.tell()
        try:
            self.descriptor = os.dup(stream.fileno())
        except OSError as error:  # without the name of the file
            raise OSError(error.errno, error.strerror, name) from None
        self.nbytes = max(os.fstat(self.descriptor).st_size - self.begin, 0)

    @classmethod
    def open(cls, path: str, name: str = "") -> LocalFile:
        """Open a local file for the engine, without readahead."""
        with open(path, "rb", buffering=0, opener=regular_only) as stream:
            expect_no_more_reads(stream.fileno())
            return cls(stream, name or path)

    def park(self) -> None:
        """Close the file; each use opens it for a moment, by its `name`, which must be a path."""
        self._parked_as = identity_of(self.descriptor)
        self.close()

    @property
    def is_parked(self) -> bool:
        """Whether `park` has closed the file, so that each use opens it for a moment."""
        return self._parked_as is not None

    @contextmanager
    def opened(self) -> Iterator[LocalFile]:
        """Lend the open file; raise an OSError if a parked file is gone or was replaced."""
        if self._parked_as is None:
            yield self
            return
        with closing(LocalFile.open(self.name)) as file:
            require_identity(identity_of(file.descriptor), self._parked_as, self.name)
            yield file

    @contextmanager
    def stream(self) -> Iterator[Any]:
        """Open the same file as a file object; the original stream keeps its position."""
        with self.opened() as file:
            opener = lambda *_: os.dup(file.descriptor)  # noqa: E731 - dup shares the position
            with io.FileIO(self.name, opener=opener) as stream, _lent(stream, self.begin):
                yield stream

    @cached_property
    def is_remote(self) -> bool:
        """Whether the file is on a network file system, or on one that a program serves (FUSE)."""
        from ptsave import _C

        with self.opened() as file:
            return _C.is_remote(*file.for_engine)

    @property
    def for_engine(self) -> tuple[int, bytes]:
        """The descriptor and the name, as `_C.RangeFiles` takes them; invalid while parked."""
        return self.descriptor, os.fsencode(self.name)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        try:
            with self.opened() as file:
                return RangeSource.read(file, ranges)
        except OSError as error:
            name_file(error, self.name)
            raise

    def map(self, begin: int, nbytes: int) -> Tensor:
        """Map bytes of the file into memory as a tensor; the bytes are read when they are used."""
        from ptsave import _C

        with self.opened() as file:
            return _C.map_range(*file.for_engine, offset=self.begin + begin, nbytes=nbytes)

    def map_cached(self, begin: int, nbytes: int) -> Tensor | None:
        """Map bytes as `map` does if the page cache holds all of them; otherwise return None.

        On network file systems, which may discard cached pages, the result is always None.
        """
        if self.is_remote:
            return None
        from ptsave import _C

        with self.opened() as file:
            return _C.map_cached_range(*file.for_engine, offset=self.begin + begin, nbytes=nbytes)

    def _read(self, begin: int, end: int) -> bytes:
        pieces = []
        while begin < end and (piece := os.pread(self.descriptor, end - begin, self.begin + begin)):
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)


class SparseFile(_OpenFile):
    """A file in memory; ranges that were never written take no memory."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("ptsave", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: bytes) -> None:
        while data:
            n = os.pwrite(self.descriptor, data, offset)
            data, offset = data[n:], offset + n


Folder: TypeAlias = Location  # a location that is a directory


def folder_of(path: str, storage_options: Mapping[str, Any]) -> Folder:
    """Return the directory of a file, given its path or URL.

    >>> folder_of("zip://model/a.index.json::memory://models.zip", {}).path
    'zip://model::memory://models.zip'
    """
    if not is_url(path):
        return LocalFolder(os.path.dirname(path))
    from ptsave.sources.url_locations import UrlLocation

    return UrlLocation(with_path(path, os.path.dirname), storage_options)


def open_folder_or_file(
    f: Any, storage_options: Mapping[str, Any] | None = None
) -> Folder | RangeSource:
    """Open a directory, or a file as `open_source` does."""
    if is_url_source(f, storage_options):
        try:
            return FsspecFile(f, options_of(storage_options))
        except IsADirectoryError:
            from ptsave.sources.url_locations import UrlLocation

            return UrlLocation(f, options_of(storage_options))
    if isinstance(f, (str, os.PathLike)) and os.path.isdir(f):
        return LocalFolder(os.fsdecode(f))
    return _open_local(f)


def folder_at(f: Any, storage_options: Mapping[str, Any] | None = None) -> Folder | None:
    """Return the directory that a path or URL names; None for a file or a file object."""
    if not isinstance(f, (str, os.PathLike)):
        return None
    place = open_folder_or_file(f, storage_options)
    if isinstance(place, Folder):
        return place
    place.close()
    return None


def open_source(f: Any, storage_options: Mapping[str, Any] | None = None) -> RangeSource:
    """Open a path, a URL, or a seekable file object from its current position on."""
    if is_url_source(f, storage_options):
        return FsspecFile(f, options_of(storage_options))
    return _open_local(f)


def _open_local(f: Any) -> RangeSource:
    path = describe(f)
    if isinstance(f, (str, os.PathLike)):
        try:
            with io.FileIO(os.fspath(f), opener=regular_only) as stream:
                return LocalFile(stream, path)
        except OSError as error:
            name_file(error, path)
            raise
    if not all(hasattr(f, method) for method in ("read", "seek", "tell")):
        raise TypeError(f"expected a path, a URL or a seekable file, not {type(f).__name__}")
    if type(f) is io.BytesIO:
        return Buffer(f, path)
    if real_file(f) is not None:
        refuse_special_stream(f, path)
        return LocalFile(f, path)
    return FileObject(f, path)
