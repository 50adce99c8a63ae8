"""Reads archives in file objects and behind URLs: each storage when unpickling asks for it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.remote import RemoteReader
from ptsave.archive.spans import FetchedSpans, Span, memory_of
from ptsave.sources.kinds import is_zip
from ptsave.sources.locations import describe
from ptsave.sources.ranges import FileObject, RangeSource
from ptsave.support import config

_AHEAD_NBYTES = 32 << 20  # of storages fetched together, as a small one alone costs a request, too


def open_stream(f: Any, *, verify: bool) -> StreamReader | None:
    """Open an archive in a seekable file object, from its current position on.

    Returns None, and keeps the position, if `f` cannot be read at any position or does not begin as
    a zip archive.
    """
    if not all(callable(getattr(f, method, None)) for method in ("read", "seek", "tell")):
        return None
    try:
        begin = f.tell()
        head = f.read(4)
        f.seek(begin)
    except (OSError, io.UnsupportedOperation):
        return None  # torch's error names the missing method
    is_archive = isinstance(head, bytes) and is_zip(head)  # torch refuses text
    return StreamReader(FileObject(f, describe(f)), verify=verify) if is_archive else None


class StreamReader(RemoteReader):
    """A reader that reads a storage when unpickling asks for it, as torch's reader does.

    A file object gets its position back when the reader is made, and when it is closed.
    """

    reads_when_asked = True

    def __init__(self, source: RangeSource, *, verify: bool) -> None:
        super().__init__(source, config.current(), verify=verify)
        self._rewind()
        self._nbytes_read = 0
        self._n_records = len(self.engine.records())
        self._ahead: dict[int, Tensor] = {}  # payloads fetched ahead, by record
        self.verifies = self.verify

    def get_storage_from_record(self, name: str, nbytes: int, dtype: object) -> Tensor:
        record = self.find_storage(name, nbytes)
        if isinstance(self.source, FileObject):
            payload = self._read_one(self.source, record, self.get_record_offset(name), nbytes)
        else:
            if record not in self._ahead:
                self._fetch_from(record)
            payload = self._ahead.pop(record)
        self._nbytes_read += nbytes
        if self.progress is not None:
            self.progress(self._nbytes_read)
        return payload

    def _read_one(self, source: FileObject, record: int, offset: int, nbytes: int) -> Tensor:
        payload = torch.empty(nbytes, dtype=torch.uint8)
        source.read_into(offset, memory_of(payload))
        if self.verifies:
            self.require_crc(record, _C.crc32(memory_of(payload)))
        return payload

    def _fetch_from(self, record: int) -> None:
        """Fetch a storage and the storages behind it, which are usually asked for next."""
        payloads = {
            number: torch.empty(self.engine.record(number).nbytes, dtype=torch.uint8)
            for number in self._storages_from(record)
        }
        spans = [Span(number, 0, payload) for number, payload in payloads.items()]
        FetchedSpans(self).read(spans, verify=None if self.verifies else False)
        self._ahead = payloads  # drops earlier payloads that were not asked for

    def _storages_from(self, record: int) -> Iterator[int]:
        yield record
        nbytes = self.engine.record(record).nbytes
        for number in range(record + 1, self._n_records):
            found = self.engine.record(number)
            nbytes += found.nbytes
            if nbytes > _AHEAD_NBYTES:
                return
            if found.name.startswith("data/"):
                yield number

    def close(self) -> None:
        super().close()
        self._ahead.clear()
        self._rewind()

    def _rewind(self) -> None:
        if isinstance(self.source, FileObject):
            self.source.rewind()
