"""Uploads to S3 whose unchanged parts the server copies from an older object.

Parts have at least 5 MiB.  The headers of an archive's records have the file's name, so they differ
in each file.  So the last 5 MiB of each large payload form a part with the headers behind them, and
the bytes before form parts that have the same hashes in each file.  The hashes stay in this
process, with the object's ETag, so that the server copies only from the very object that was
hashed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from ptsave import _C

_MIN_NBYTES = 5 << 20  # of a part, except the last
_PART_NBYTES = 8 << 20
_MAX_N_PARTS = 10_000
_MAX_N_HASHED = 8


class _Hashed(NamedTuple):
    """An object that this process has uploaded."""

    name: dict[str, str]  # its bucket and key, as arguments of requests
    etag: str
    places: dict[str, tuple[int, int]]  # the first and the last byte of each part, by its hash


_hashed: OrderedDict[str, _Hashed] = OrderedDict()  # by path in the file system


def part_ends(payloads: Iterable[tuple[int, int]], nbytes: int) -> Iterator[int]:
    """Yield where the parts of an archive of `nbytes` bytes end; payloads are (begin, nbytes)."""
    # Half of the parts are for payloads, each of which makes two cuts.
    min_nbytes = max(2 * _MIN_NBYTES, 4 * nbytes // _MAX_N_PARTS)
    cuts = [0]
    for place, n in payloads:
        first = place if place - cuts[-1] >= _MIN_NBYTES else place + _MIN_NBYTES
        last = place + n - _MIN_NBYTES
        if n >= min_nbytes and last - first >= _MIN_NBYTES:
            cuts += [first, last]
    part_nbytes = max(_PART_NBYTES, 3 * nbytes // _MAX_N_PARTS)
    for begin, end in pairwise([*cuts, nbytes]):
        n = max((end - begin) // part_nbytes, 1)
        yield from (begin + (end - begin) * i // n for i in range(1, n + 1))


class SharedUpload:
    """An upload with the methods of fsspec's files; `ends` are the ends of the parts."""

    def __init__(self, file_system: Any, path: str, base: str | None, ends: Iterable[int]) -> None:
        self._call, self._path = file_system.call_s3, path
        bucket, key, _ = file_system.split_path(path)
        self._name = {"Bucket": bucket, "Key": key}
        self._base = None if base is None else _hashed.get(base)
        if self._base is not None and self._base.etag != self._etag_of(self._base):
            self._base = None  # also checked here, because some servers copy regardless
        self._ends = [*ends]  # of the parts that are not sent yet
        self._buffer = bytearray()
        self._begin = 0  # of the buffer in the file
        self._etags: list[str] = []
        self._places: dict[str, tuple[int, int]] = {}
        upload = self._call("create_multipart_upload", **self._name)
        self._upload = {**self._name, "UploadId": upload["UploadId"]}
        self.nbytes_shared = 0

    def _etag_of(self, base: _Hashed) -> str:
        with suppress(OSError):  # a base that cannot be read is not needed
            return str(self._call("head_object", **base.name)["ETag"])
        return ""

    def write(self, data: memoryview) -> int:
        """Take bytes, and send full parts."""
        self._buffer += data
        while self._ends and self._begin + len(self._buffer) >= self._ends[0]:
            part = bytes(self._buffer[: self._ends.pop(0) - self._begin])
            del self._buffer[: len(part)]
            self._send(part)
        return len(data)

    def _send(self, part: bytes) -> None:
        digest = _C.Xxh3()
        digest.update(part)
        digits = digest.hexdigest()
        where = {**self._upload, "PartNumber": len(self._etags) + 1}
        etag = self._copied(where, digits)
        self._etags.append(etag or self._call("upload_part", Body=part, **where)["ETag"])
        self._places[digits] = self._begin, self._begin + len(part) - 1
        self._begin += len(part)

    def _copied(self, where: dict[str, Any], digits: str) -> str | None:
        """Let the server copy a part from the base; return None if this is not possible."""
        if self._base is None or digits not in self._base.places:
            return None
        first, last = self._base.places[digits]
        try:
            result = self._call(
                "upload_part_copy",
                CopySource=self._base.name,
                CopySourceRange=f"bytes={first}-{last}",
                CopySourceIfMatch=self._base.etag,
                **where,
            )
        except OSError:  # the base was removed or replaced; the upload needs only the new bytes
            self._base = None
            return None
        self.nbytes_shared += last + 1 - first
        return str(result["CopyPartResult"]["ETag"])

    def close(self) -> None:
        """Do nothing: the last part is sent when it is full."""

    def commit(self) -> None:
        """Let the object appear."""
        parts = [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(self._etags, 1)]
        done = self._call(
            "complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload
        )
        _hashed[self._path] = _Hashed(self._name, done["ETag"], self._places)
        while len(_hashed) > _MAX_N_HASHED:
            _hashed.popitem(last=False)

    def discard(self) -> None:
        """Let the server forget the parts."""
        self._call("abort_multipart_upload", **self._upload)
