"""Opens an archive with the engine: a path, a real file or memory."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from contextlib import suppress
from typing import Any

from ptsave import _C
from ptsave.archive.format_errors import raise_corrupt
from ptsave.archive.reader import RecordReader
from ptsave.archive.remote import RemoteReader
from ptsave.sources.kinds import is_zip, refuse_special_file, refuse_special_stream, regular_only
from ptsave.sources.local import describe, real_file
from ptsave.sources.ranges import Buffer, LocalFile, RangeSource
from ptsave.sources.remote_errors import named_errors
from ptsave.support import config

__all__ = ["open_archive", "open_source_archive"]


def open_archive(f: Any) -> _C.Reader | None:
    """Open `f` with ptsave's own reader.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        As for :func:`torch.load`.

    Returns
    -------
    _C.Reader or None
        None if `f` does not begin as a zip archive, or is of a kind that only torch's loader reads.

    Raises
    ------
    CorruptCheckpointError
        If it begins as an archive and is none.
    """
    try:
        with named_errors(describe(f)):
            return _open(f)
    except _C.FormatError as error:
        raise_corrupt(error, describe(f))


def _open(f: Any) -> _C.Reader | None:
    if isinstance(f, (str, os.PathLike)):
        return _open_path(os.fspath(f))
    if type(f) is tempfile.SpooledTemporaryFile:
        f = f._file  # a BytesIO, or the file it has become
    if type(f) is io.BytesIO:
        begin = f.tell()
        with f.getbuffer() as view:
            if not is_zip(bytes(view[begin : begin + 4])):
                return None
            return _C.Reader.open_memory(view[begin:], name="BytesIO")
    raw = real_file(f)
    if raw is not None:
        return _open_file_object(raw)
    return None


def _open_path(path: str | bytes) -> _C.Reader | None:
    if not isinstance(path, str):
        with suppress(FileNotFoundError):  # which torch says in words of its own
            refuse_special_file(path)  # or torch's loader would wait for somebody to write to it
        return None
    if path.endswith(".safetensors") and not os.path.exists(path):
        return None  # the library's words, as from torch.load
    if "\0" in path or stat.S_ISCHR(os.stat(path).st_mode):  # /dev/null: as torch has it
        return None
    with open(path, "rb", buffering=0, opener=regular_only) as stream:
        return _open_file_object(stream)


def _open_file_object(stream: Any) -> _C.Reader | None:
    if not stream.readable():
        return None
    refuse_special_stream(stream, describe(stream))
    fd = stream.fileno()
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    begin = stream.tell()
    if not is_zip(os.pread(fd, 4, begin)):
        return None
    name = os.fsencode(str(stream.name))
    return _C.Reader.open_descriptor(fd, begin, name, direct=config.current().direct_reads)


def open_source_archive(source: RangeSource, *, verify: bool) -> RecordReader:
    """Open an archive whose bytes are a source's.

    Parameters
    ----------
    source : RangeSource
        It begins as a zip archive.
    verify : bool
        Whether checksums are compared.

    Raises
    ------
    CorruptCheckpointError
        If it is none.
    OSError
        If it is a local file that has no positions to read at.
    """
    try:
        with named_errors(source.name):
            if isinstance(source, LocalFile):
                return RecordReader(_open_local_file(source), source.name, verify=verify)
            if isinstance(source, Buffer):
                engine = _C.Reader.open_memory(source.view, name="BytesIO")
                return RecordReader(engine, source.name, verify=verify)
    except _C.FormatError as error:
        raise_corrupt(error, source.name)
    return RemoteReader(source, verify=verify)


def _open_local_file(file: LocalFile) -> _C.Reader:
    if not stat.S_ISREG(os.fstat(file.descriptor).st_mode):
        raise OSError(f"{file.name} cannot be read at any position: it is no regular file")
    fd, name = file.for_engine
    return _C.Reader.open_descriptor(fd, file.begin, name, direct=config.current().direct_reads)
