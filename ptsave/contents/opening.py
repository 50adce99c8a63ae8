"""Recognizes the format of a file, and opens it with the reader of that format."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pickle import UnpicklingError
from typing import Any

from ptsave.archive.checks import check_compressed_members, check_version
from ptsave.archive.loading import LoadOptions, load_file, reader_for
from ptsave.archive.opening import open_archive
from ptsave.archive.reader import RecordReader
from ptsave.archive.remote import RemoteReader
from ptsave.archive.unpickling import can_defer_reading
from ptsave.contents.contents import Contents, LoadedContents, UnreadContents, metadata_of
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.contents.shard_files import directory_error
from ptsave.errors import CorruptCheckpointError, NotCheckpointError
from ptsave.sources.kinds import (
    HEAD_NBYTES,
    is_legacy,
    is_safetensors,
    is_zip,
    refuse_special_stream,
    regular_only,
    what_it_is,
)
from ptsave.sources.local import real_file
from ptsave.sources.ranges import Buffer, FileObject, FsspecFile, LocalFile, RangeSource
from ptsave.sources.remote_errors import named_errors
from ptsave.sources.urls import is_url, refuse_url
from ptsave.support.torch_serialization import restricted_unpickler
from ptsave.support.torch_tensors import storage_id

__all__ = ["open_contents", "reporting_damage", "require_saved_object"]

_LEGACY = {"format": "torch before 1.6"}
_Opener = Callable[[], AbstractContextManager[Any]]  # of the file from its beginning


def open_contents(f: Any, path: str, storage_options: dict[str, Any], verify: bool) -> Contents:
    """Open the file, URL or file object of :func:`ptsave.open`.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        As for :func:`ptsave.open`.
    path : str
        Its name in messages.
    storage_options : dict
        For the file system of a URL.
    verify : bool
        Whether checksums are compared.
    """
    if storage_options and not is_url(f):
        raise TypeError("storage_options are for URLs")
    is_file = all(hasattr(f, method) for method in ("read", "seek", "tell"))
    if not is_file and not isinstance(f, (str, os.PathLike)):
        raise TypeError(f"expected a path, a URL or a seekable file, not {type(f).__name__}")
    if is_url(f):
        source = FsspecFile(f, storage_options)
        with reporting_damage(path):
            return _open_source(source, verify, source.open)
    with reporting_damage(path):
        return _open_local(f, path, verify)


def _open_local(f: Any, path: str, verify: bool) -> Contents:
    if isinstance(f, (str, os.PathLike)):
        refuse_url(f)
        return _open_path(os.fspath(f), path, verify)
    if type(f) is io.BytesIO or real_file(f) is not None:
        return _open_stream(f, path, verify)
    stream = FileObject(f, path)
    return _open_source(stream, verify, stream.rewind)


@contextmanager
def reporting_damage(path: str) -> Iterator[None]:
    """Map errors that torch raises for unexpected damage to `CorruptCheckpointError`."""
    try:
        with named_errors(path):
            yield
    except (CorruptCheckpointError, OSError, ImportError, MemoryError):
        raise
    except UnpicklingError as error:
        error.path = path  # type: ignore[attr-defined]  # torch's message does not say it
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path} cannot be loaded ({type(error).__name__}: {error})", path=path
        ) from error


def _open_path(name: str | bytes, path: str, verify: bool) -> Contents:
    if stat.S_ISDIR(os.stat(name).st_mode):
        raise directory_error(name, path)
    with io.FileIO(name, opener=regular_only) as stream:
        return _open_stream(stream, path, verify)


def _open_stream(stream: Any, path: str, verify: bool) -> Contents:
    """Open a real file, or bytes in memory."""
    if type(stream) is not io.BytesIO:
        refuse_special_stream(stream, path)
    begin = stream.tell()
    nbytes = stream.seek(0, os.SEEK_END) - begin
    stream.seek(begin)
    head = stream.read(HEAD_NBYTES)
    stream.seek(begin)
    if is_safetensors(head, nbytes):
        if type(stream) is io.BytesIO:
            return SafetensorsContents(Buffer(stream, path))
        file = LocalFile(stream, path)
        with file.closed_on_error():
            return SafetensorsContents(file)
    _require_checkpoint(head, nbytes, path)
    if is_legacy(head):
        return _load_whole(nullcontext(stream), _LEGACY, nbytes, verify)
    engine = open_archive(stream)
    if engine is None:
        raise OSError(f"{path} cannot be read at any position: it is no regular file")
    return _open_zip(RecordReader(engine, path, verify=verify), lambda: nullcontext(stream), verify)


def _open_source(source: RangeSource, verify: bool, open_stream: _Opener) -> Contents:
    (head,) = source.read([(0, min(HEAD_NBYTES, source.nbytes))])
    if is_safetensors(head, source.nbytes):
        return SafetensorsContents(source)
    _require_checkpoint(head, source.nbytes, source.name)
    if is_legacy(head):
        return _load_whole(open_stream(), _LEGACY, source.nbytes, verify)
    return _open_zip(RemoteReader(source, verify=verify), open_stream, verify)


def _require_checkpoint(head: bytes, nbytes: int, path: str) -> None:
    if is_legacy(head):
        return
    what = what_it_is(head, nbytes)
    if what is not None:
        raise NotCheckpointError(f"{path} is no checkpoint: {what}", path=path)
    assert is_zip(head)


def _open_zip(reader: RecordReader, open_stream: _Opener, verify: bool) -> Contents:
    require_saved_object(reader)
    if not reader.engine.all_stored:
        check_compressed_members(reader)
        return _load_whole(
            open_stream(), {"format": "pt, compressed"}, reader.engine.nbytes, verify
        )
    check_version(reader)
    if not can_defer_reading(reader, restricted_unpickler):
        return _load_whole(open_stream(), metadata_of(reader), reader.engine.nbytes, verify)
    return UnreadContents(reader)


def require_saved_object(reader: RecordReader) -> None:
    """Refuse an archive that `torch.save` has not written."""
    if reader.has_record("constants.pkl"):
        raise NotCheckpointError(
            f"{reader.path} is a TorchScript archive: load it with torch.jit.load", path=reader.path
        )
    if not reader.has_record("data.pkl"):
        raise NotCheckpointError(
            f"{reader.path} is a zip archive that torch.save has not written: it has no data.pkl",
            path=reader.path,
        )


def _load_whole(
    opened: AbstractContextManager[Any], metadata: dict[str, str], nbytes: int, verify: bool
) -> LoadedContents:
    locations: dict[int, str] = {}

    def stay(storage: Any, location: str) -> Any:
        locations[storage_id(storage)] = location
        return storage

    with opened as stream:
        options = LoadOptions(stay, weights_only=True, verify=verify)
        obj = load_file(stream, options, reader_for(stream, None, verify))
    return LoadedContents(obj, locations, metadata, nbytes)
