"""Places of storages and tensors whose bytes are written without being loaded."""

from __future__ import annotations

from typing import NamedTuple

from ptsave.contents.contents import UnreadContents


class StoragePlace(NamedTuple):
    """The bytes of a storage, as a range of a source."""

    source: int  # number of the file or memory
    offset: int  # of the first byte in the source
    nbytes: int
    crc: int | None = None  # of the bytes, if known
    contents: UnreadContents | None = None  # the archive that has them as a record
    record: int = 0  # number of that record
    # Of bytes in several ranges: where each begins in the storage, its source, its offset there.
    parts: tuple[tuple[int, int, int], ...] = ()
    path: str = ""  # directory of a checkpoint of many ranks
    entry: str = ""  # the tensor in that checkpoint


class Payload(NamedTuple):
    """The bytes of a tensor, in the order of its elements, as a range of a source."""

    nbytes: int
    source: int = 0  # number of the file or memory
    offset: int = 0  # of the first byte in the source
    place: StoragePlace | None = None  # of the storage, if the payload is all of it
    crc: int | None = None  # of the bytes, if known
    parts: tuple[tuple[int, int, int], ...] = ()  # like `StoragePlace.parts`
