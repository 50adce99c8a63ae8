"""Archives in file objects that the engine cannot read by itself: read in order, verified."""

from __future__ import annotations

import io
from typing import Any

import torch

from ptsave import _C
from ptsave.archive.remote import RemoteReader
from ptsave.archive.spans import memory_of
from ptsave.sources.kinds import is_zip
from ptsave.sources.local import describe
from ptsave.sources.ranges import FileObject

__all__ = ["StreamReader", "open_stream"]


def open_stream(f: Any, *, verify: bool) -> StreamReader | None:
    """Open an archive in a seekable file object, such as fsspec's or a subclass of BytesIO.

    Parameters
    ----------
    f : file-like
        The archive is all of it from its current position on.
    verify : bool
        Whether checksums are compared.

    Returns
    -------
    StreamReader or None
        None if `f` cannot be read at any position or does not begin as a zip archive there; its
        position is unchanged.

    Raises
    ------
    CorruptCheckpointError
        If it begins as an archive and is none.
    """
    if not all(callable(getattr(f, method, None)) for method in ("read", "seek", "tell")):
        return None
    try:
        begin = f.tell()
        head = f.read(4)
        f.seek(begin)
    except (OSError, io.UnsupportedOperation):
        return None  # torch's error names the missing method
    is_archive = isinstance(head, bytes) and is_zip(head)  # text is torch's to refuse
    return StreamReader(f, verify=verify) if is_archive else None


class StreamReader(RemoteReader):
    """A reader whose storages are read when unpickling asks for them, as torch's own does it.

    Parameters
    ----------
    stream : file-like
        At the beginning of the archive.  It gets that position back when this is closed.
    verify : bool
        Whether checksums are compared.

    Attributes
    ----------
    verifies : bool
        Whether those of storages are.
    """

    def __init__(self, stream: Any, *, verify: bool) -> None:
        self._stream = FileObject(stream, describe(stream))
        super().__init__(self._stream, verify=verify)
        self._stream.rewind()
        self._nbytes_read = 0
        self.verifies = self.verify

    def get_storage_from_record(self, name: str, nbytes: int, dtype: object) -> torch.Tensor:
        record = self.find_storage(name, nbytes)
        offset = self.get_record_offset(name)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        self._stream.read_into(offset, memory_of(payload))
        if self.verifies:
            self.require_crc(record, _C.crc32(memory_of(payload)))
        self._nbytes_read += nbytes
        if self.progress is not None:
            self.progress(self._nbytes_read)
        return payload

    def close(self) -> None:
        super().close()
        self._stream.rewind()
