"""Opens an archive, and chooses its reader.

A `RecordReader` reads a path, a file with a descriptor, or an `io.BytesIO` with the engine.  A
`RemoteReader` fetches ranges from a URL or any other file object.  Loads call `reader_for` to open
paths and file objects, and make a `StreamReader` for a URL.  Other callers, and the rank that reads
for a group, call `open_source_archive`.
"""

from __future__ import annotations

import io
import os
import stat
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ptsave import _C
from ptsave.archive.reader import RecordReader
from ptsave.errors import RECOVERY_ADVICE, CorruptCheckpointError
from ptsave.sources.kinds import (
    ZIP_MAGIC,
    refuse_special_file,
    refuse_special_stream,
    regular_only,
)
from ptsave.sources.locations import describe, engine_name, name_file, real_file
from ptsave.support import config

if TYPE_CHECKING:
    from ptsave.archive.spans import ArchiveSpans
    from ptsave.sources.ranges import RangeSource


def open_archive(f: Any, *, verify: bool) -> RecordReader | None:
    """Open `f` with the engine; None if `f` is not a zip archive that the engine can read."""
    try:
        if isinstance(f, (str, os.PathLike)):
            return _open_path(os.fspath(f), verify)
        return _open_file_object(f, verify)
    except OSError as error:
        name_file(error, describe(f))
        raise


def _open_path(path: str | bytes, verify: bool) -> RecordReader | None:
    if not isinstance(path, str):
        with suppress(FileNotFoundError):  # torch raises its own error for a missing file
            refuse_special_file(path)  # torch's loader would wait for a pipe's writer
        return None
    if path.endswith(".safetensors") and not os.path.exists(path):
        return None  # torch.load raises the safetensors library's error
    if "\0" in path or stat.S_ISCHR(os.stat(path).st_mode):  # /dev/null: torch decides
        return None
    with open(path, "rb", buffering=0, opener=regular_only) as stream:
        return _open_stream(stream, path, verify)


def _open_file_object(f: Any, verify: bool) -> RecordReader | None:
    path = describe(f)
    if type(f) is tempfile.SpooledTemporaryFile:
        f = f._file  # a BytesIO, or the file that has replaced it
    if type(f) is io.BytesIO:
        begin = f.tell()
        with f.getbuffer() as view:
            if view[begin : begin + 4] != ZIP_MAGIC:
                return None
            engine = _C.Reader.open_memory(view[begin:], engine_name(path))
        return RecordReader(engine, path, config.current(), verify=verify)
    raw = real_file(f)
    if raw is None or not raw.readable():
        return None
    refuse_special_stream(raw, describe(raw))
    return _open_stream(raw, path, verify)


def _open_stream(stream: Any, path: str, verify: bool) -> RecordReader | None:
    fd, begin = stream.fileno(), stream.tell()
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.pread(fd, 4, begin) != ZIP_MAGIC:
        return None
    limits = config.current()
    try:
        engine = _C.Reader.open_descriptor(fd, begin, os.fsencode(path), direct=limits.direct_reads)
    except CorruptCheckpointError as error:
        _advise(error, RECOVERY_ADVICE)
        raise
    return RecordReader(engine, path, limits, verify=verify)


def reader_for(f: Any, mmap: bool, verify: bool) -> RecordReader | None:
    """Open the archive that ptsave is to load; return None if torch's own loader has to load `f`.

    torch's loader gets files that are not zip archives (formats before torch 1.6, or other files),
    missing ``.safetensors`` paths, and file objects that cannot seek.  It also raises the error for
    ``mmap=True`` with a file object.
    """
    if mmap and not isinstance(f, (str, os.PathLike)):
        return None
    reader = open_archive(f, verify=verify)
    if reader is not None or isinstance(f, (str, os.PathLike)):
        return reader
    from ptsave.archive.remote import open_stream

    return open_stream(f, verify=verify)


def open_source_archive(
    source: RangeSource, *, verify: bool, advice: str = RECOVERY_ADVICE
) -> RecordReader:
    """Open the archive in `source`; if the archive's end is missing, the error gives `advice`."""
    from ptsave.sources.ranges import Buffer, LocalFile

    limits = config.current()
    try:
        if isinstance(source, LocalFile):
            if not stat.S_ISREG(os.fstat(source.descriptor).st_mode):
                raise OSError(f"{source.name} does not support seeking: it is not a regular file")
            engine = _C.Reader.open_descriptor(
                source.descriptor,
                source.begin,
                os.fsencode(source.name),
                direct=limits.direct_reads,
            )
        elif isinstance(source, Buffer):
            engine = _C.Reader.open_memory(source.view, engine_name(source.name))
        else:
            from ptsave.archive.remote import RemoteReader

            return RemoteReader(source, limits, verify=verify)
    except OSError as error:
        name_file(error, source.name)
        raise
    except CorruptCheckpointError as error:
        _advise(error, advice)
        raise
    return RecordReader(engine, source.name, limits, verify=verify)


def spans_of(reader: RecordReader) -> ArchiveSpans:
    """Return an object that reads parts of records, from a local file or by fetching bytes."""
    if not reader.is_fetched:
        from ptsave.archive.spans import EngineSpans

        return EngineSpans(reader)
    from ptsave.archive.remote import FetchedSpans, RemoteReader

    assert isinstance(reader, RemoteReader)
    return FetchedSpans(reader)


def _advise(error: CorruptCheckpointError, advice: str) -> None:
    """Add `advice` to an error about an archive whose end is missing."""
    if error.lacks_end:
        error.args = (f"{error}. The file is cut short, or was never finished: {advice}",)
