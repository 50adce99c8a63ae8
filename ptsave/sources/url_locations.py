"""Files and directories at URLs of fsspec; a save replaces a file completely or not at all.

How a file is replaced depends on the file system:

* object stores (``s3``, ``gs``, ``abfs``): one request, or an upload in parts that is completed at
  the end;
* ``memory``: a buffer collects the contents, and then replaces the old contents;
* ``file``: the local path is written like any other path;
* all others: a temporary file beside the file is written, and then moved (or copied and removed, if
  the file system cannot move files).
"""

from __future__ import annotations

import asyncio
import copy
import errno
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any

from ptsave.errors import SaveError, UnsupportedUrlError, add_note
from ptsave.sources.locations import Location, name_for, options_of, os_errors, url_to_fs, with_path

_PART_NBYTES = 16 << 20
_MAX_N_PARTS = 10_000  # of S3; others allow more
_MIB = 1 << 20
# torch's message.
_WRITE_FAILED = "PytorchStreamWriter failed writing file: file write failed"
_NOT_FOUND = "the URL cannot be looked up"

_LOCAL = {"file", "local"}
# An upload appears when commit() is called, and vanishes when discard() is called.
_COMMITTED = {"s3", "s3a", "gs", "gcs"}
# An upload appears when the file is closed; an upload that is never closed vanishes by itself.
_COMPLETED_BY_CLOSING = {"abfs", "abfss", "az"}
_OBJECT_STORES = _COMMITTED | _COMPLETED_BY_CLOSING
_READ_ONLY = {
    **dict.fromkeys(("http", "https"), "ptsave cannot write to web servers"),
    **dict.fromkeys(("zip", "tar", "libarchive"), "ptsave cannot write files in archives"),
    "hf": "each file would be a commit: save to a directory, and upload that with huggingface_hub",
}

_NUMBERS: tuple[tuple[type[BaseException], int], ...] = (
    (PermissionError, errno.EACCES),
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (TimeoutError, errno.ETIMEDOUT),
    (asyncio.TimeoutError, errno.ETIMEDOUT),  # another type before Python 3.11
    (ConnectionError, errno.ECONNRESET),
)


class UrlLocation(Location):
    """A file or a directory at a URL; `key` is its path in the file system.

    In an object store, a directory is only a common beginning of names.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.path = url
        self.storage_options = storage_options

    @cached_property
    def _found(self) -> tuple[Any, str]:
        return url_to_fs(self.path, self.storage_options)

    @property
    def file_system(self) -> Any:
        """The fsspec file system of the URL."""
        return self._found[0]

    @property
    def key(self) -> str:
        """The path in the file system."""
        return self._found[1]

    @cached_property
    def protocols(self) -> set[str]:
        """The schemes of the file system's URLs, such as ``s3`` and ``s3a``."""
        protocol = self.file_system.protocol
        return {protocol} if isinstance(protocol, str) else set(protocol)

    @property
    def is_object_store(self) -> bool:
        """Whether the file system is an object store, where a file's directory need not exist."""
        return bool(self.protocols & _OBJECT_STORES)

    def require_file_name(self) -> None:
        """Raise a SaveError if the URL ends with a slash, or names only a bucket."""
        is_bucket = self.is_object_store and "/" not in self.key
        if self.path.endswith("/") or not self.key.strip("/") or is_bucket:
            raise SaveError(errno.EISDIR, "the URL lacks a file name: add one", self.path)

    # ------------------------------------------------------------------------- as a directory

    def names(self) -> list[str]:
        with os_errors(self.path):
            self.file_system.invalidate_cache(self.key)
            found = self.file_system.ls(self.key, detail=False)
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def files(self) -> list[str]:
        with save_errors(self.path, "the directory cannot be listed"):
            self.file_system.invalidate_cache(self.key)
            try:
                entries = self.file_system.ls(self.key, detail=True)
            except FileNotFoundError:
                return []
        return [
            entry["name"].rpartition("/")[2]
            for entry in entries
            if entry["type"] == "file" and entry["name"] != self.key
        ]

    def join(self, name: str) -> str:
        return with_path(self.path, lambda path: os.path.join(path, name))

    def file(self, name: str) -> UrlLocation:
        file = copy.copy(self)
        file._found = self.file_system, f"{self.key.rstrip('/')}/{name}"
        scheme, _, rest = self.path.partition("://")
        rest = rest.rstrip("/")
        file.path = f"{scheme}://{rest}/{name}" if rest else f"{scheme}://{name}"
        return file

    def is_taken(self, name: str) -> bool:
        return self.file(name).is_there()

    def identity(self, name: str) -> str:
        file = self.file(name)
        with save_errors(file.path, _NOT_FOUND):
            return str(self.file_system.ukey(file.key))

    def bytes_of(self, name: str) -> bytes:
        file = self.file(name)
        try:
            with save_errors(file.path, "the file cannot be read"):
                return bytes(self.file_system.cat_file(file.key))
        except FileNotFoundError:
            return b""

    def remove(self, name: str) -> None:
        file = self.file(name)
        with suppress(FileNotFoundError), save_errors(file.path, "the file cannot be removed"):
            self.file_system.rm_file(file.key)

    def make(self) -> None:
        """Make the directory and its parents if the file system has directories; then list it."""
        if not self.is_object_store:
            self._make(self.key, "the directory cannot be made")
        elif not self.key.strip("/"):
            raise SaveError(errno.ENOENT, "the URL lacks a bucket name: add one", self.path)
        self.files()

    def remove_all(self) -> None:
        for name in self.files():
            self.remove(name)
        if not self.is_object_store:
            with save_errors(self.path, "the directory cannot be removed"):
                self.file_system.rmdir(self.key)

    # ------------------------------------------------------------------------------ as a file

    def is_there(self) -> bool:
        """Return whether the file or directory exists now."""
        with save_errors(self.path, _NOT_FOUND):
            self.file_system.invalidate_cache(self.file_system._parent(self.key))
            return bool(self.file_system.exists(self.key))

    def make_parent(self) -> None:
        """Make the file's directory with its parents, if the file system has directories."""
        if not self.is_object_store:
            self._make(self.file_system._parent(self.key), "the file's directory cannot be made")

    def _make(self, key: str, failed: str) -> None:
        with save_errors(self.path, failed):
            self.file_system.makedirs(key, exist_ok=True)

    def opened(
        self,
        nbytes: int | None = None,
        *,
        payloads: Iterable[tuple[int, int]] | None = None,
        base: UrlLocation | None = None,
    ) -> AbstractContextManager[Any]:
        """Open the file for writing; the new contents appear at the end of the ``with`` block.

        If the block raises, the file is unchanged.  `nbytes` is the size of the contents, if known;
        it determines the size of the uploaded parts.  With `payloads` (begin, nbytes), S3 copies
        unchanged parts from `base`, and may later copy parts of this file.  If the file system
        fails, a SaveError names the URL.
        """
        is_small = nbytes is not None and nbytes <= _PART_NBYTES
        if "memory" in self.protocols or (self.is_object_store and is_small):
            return self._put_at_once()
        if self.protocols & _COMMITTED:
            return self._uploaded(self._upload(nbytes or 0, payloads, base))
        if self.protocols & _COMPLETED_BY_CLOSING:
            return self._completed_by_closing(nbytes or 0)
        return self._moved()

    def create(self, data: bytes) -> None:
        """Write a small file; raise FileExistsError if another writer has made it meanwhile.

        S3 and Google's store compare and write in one step.  Other stores only look beforehand.
        """
        options = {"mode": "create"} if self.protocols & (_COMMITTED | {"memory"}) else {}
        try:
            if self.is_there():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
            with save_errors(self.path):
                self.file_system.pipe_file(self.key, data, **options)
        except FileExistsError:
            if self.file_system.cat_file(self.key) != data:  # or the request was sent twice
                raise

    @contextmanager
    def _put_at_once(self) -> Iterator[Any]:
        buffer = io.BytesIO()
        yield buffer
        with save_errors(self.path):
            self.file_system.pipe_file(self.key, buffer.getvalue())

    @contextmanager
    def _uploaded(self, stream: Any) -> Iterator[Any]:
        try:
            yield _NamingSink(stream, self.path)
            with save_errors(self.path):
                stream.close()
                stream.commit()
        except BaseException as error:
            try:
                stream.discard()
            except Exception as failure:
                note = f"the uploaded parts of {self.path} could not be discarded: {failure}"
                add_note(error, note)
            raise
        finally:
            stream.closed = True  # or its destructor would send the rest

    def _upload(
        self, nbytes: int, payloads: Iterable[tuple[int, int]] | None, base: UrlLocation | None
    ) -> Any:
        if payloads is not None and hasattr(self.file_system, "call_s3"):
            from ptsave.sources.shared_uploads import SharedUpload, part_ends

            key = None if base is None else base.key
            with save_errors(self.path):
                return SharedUpload(self.file_system, self.key, key, part_ends(payloads, nbytes))
        stream = self._open(self.key, block_size=_part_nbytes(nbytes), autocommit=False)
        with suppress(ValueError):  # a transaction must not commit it
            self.file_system.transaction.files.remove(stream)
        return stream

    @contextmanager
    def _completed_by_closing(self, nbytes: int) -> Iterator[Any]:
        stream = self._open(self.key, block_size=_part_nbytes(nbytes))
        try:
            yield _NamingSink(stream, self.path)
            with save_errors(self.path):
                stream.close()
        finally:
            stream.closed = True

    @contextmanager
    def _moved(self) -> Iterator[Any]:
        parent, slash, name = self.key.rpartition("/")
        temporary = f"{parent}{slash}{name_for(name)}"
        stream = self._open(temporary)
        sink = _NamingSink(stream, self.path)
        try:
            yield sink
            with save_errors(self.path):
                stream.close()
                self._require_size(temporary, sink.nbytes)
                self.file_system.mv(temporary, self.key)
        except BaseException:
            try:
                with suppress(Exception):
                    _abandon(stream)
            finally:
                with suppress(Exception):
                    self.file_system.rm_file(temporary)
            raise

    def _open(self, path: str, **options: Any) -> Any:
        with save_errors(self.path):
            return self.file_system.open(path, "wb", **options)

    def _require_size(self, path: str, nbytes: int) -> None:
        """Raise an OSError if a file that the server has confirmed does not have `nbytes` bytes."""
        self.file_system.invalidate_cache(path)
        found = self.file_system.info(path).get("size")
        if found is not None and found != nbytes:
            message = f"{nbytes} bytes were written, but {found} have arrived"
            raise OSError(errno.EIO, message, path)


class _NamingSink:
    """A stream whose errors name the URL."""

    def __init__(self, stream: Any, url: str) -> None:
        self._stream = stream
        self._url = url
        self.nbytes = 0

    def flush(self) -> None:
        """Do nothing: parts are sent when they are full."""

    @property
    def nbytes_shared(self) -> int:
        """The bytes that the server has copied from a base."""
        return getattr(self._stream, "nbytes_shared", 0)

    def write(self, data: Any, /) -> object:
        with save_errors(self._url):
            n = self._stream.write(data)
        self.nbytes += n if isinstance(n, int) else len(data)
        return n


def resolve_url(url: str, storage_options: Mapping[str, Any] | None) -> str | UrlLocation:
    """Return the file or directory that a URL names; a ``file://`` URL gives a local path.

    Raises an UnsupportedUrlError if fsspec cannot write there, or cannot replace a file completely.
    """
    if "::" in url:
        raise UnsupportedUrlError.of_target(url, "ptsave cannot write to chains of URLs")
    scheme = url.partition(":")[0]
    if scheme in _READ_ONLY:
        raise UnsupportedUrlError.of_target(url, _READ_ONLY[scheme])
    location = UrlLocation(url, options_of(storage_options))
    try:
        file_system = location.file_system
    except ImportError as error:
        raise UnsupportedUrlError.of_target(url, str(error)) from None
    except ValueError as error:
        if not str(error).startswith("Protocol not known"):
            raise
        raise UnsupportedUrlError.of_target(url, str(error)) from None
    if not location.protocols & _LOCAL:
        return location
    if file_system.auto_mkdir:
        with save_errors(url):
            os.makedirs(os.path.dirname(location.key), exist_ok=True)
    return location.key


def _part_nbytes(nbytes: int) -> int:
    """Return the size of an upload's parts, which grows so that 10,000 parts are enough."""
    needed = -(-nbytes // _MAX_N_PARTS)
    return max(_PART_NBYTES, -(-needed // _MIB) * _MIB)


def _abandon(stream: Any) -> None:
    """Close a stream, if possible without sending the bytes in its buffer."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True
    else:
        stream.close()


@contextmanager
def save_errors(url: str, failed: str = _WRITE_FAILED) -> Iterator[None]:
    """Turn errors of a file system in the block into a :class:`SaveError` that names the URL.

    Libraries raise errors of many types, and their messages lack the beginning of the URL.
    """
    try:
        yield
    except (SaveError, MemoryError):
        raise
    except NotImplementedError as error:
        reason = f"the file system does not support this{error.args and f': {error}'}"
        raise UnsupportedUrlError.of_target(url, reason) from error
    except Exception as error:
        reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
        if not isinstance(error, OSError):
            reason = f"{type(error).__name__}: {reason}"
        message = f"{failed} ({reason})"
        raise SaveError(_number_of(error), message, url) from error


def _number_of(error: Exception) -> int:
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number in errno.errorcode:
        return number
    return next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)
