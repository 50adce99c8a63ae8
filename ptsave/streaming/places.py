"""Where the bytes of storages and tensors are that are written without being loaded."""

from __future__ import annotations

from typing import NamedTuple

from ptsave.contents.contents import UnreadContents

__all__ = ["Payload", "StoragePlace"]


class StoragePlace(NamedTuple):
    """The bytes of a storage, as a range of a source.

    Attributes
    ----------
    source : int
        The number of the file or memory.
    offset : int
        Position of the first byte in it.
    nbytes : int
        Number of bytes.
    crc : int or None
        Their CRC-32, if it is known.
    contents : UnreadContents or None
        The archive that they are a record of.
    record : int
        The number of the record.
    parts : tuple of (int, int, int)
        If the bytes are no one range: where each part begins in the storage, its source, and its
        offset there.
    path, entry : str
        Of a checkpoint of many ranks: its directory, and the tensor.
    """

    source: int
    offset: int
    nbytes: int
    crc: int | None = None
    contents: UnreadContents | None = None
    record: int = 0
    parts: tuple[tuple[int, int, int], ...] = ()
    path: str = ""
    entry: str = ""


class Payload(NamedTuple):
    """The bytes of a tensor, in the order of its elements, as a range of a source.

    Attributes
    ----------
    nbytes : int
        Number of bytes.
    source : int
        The number of the file or memory.
    offset : int
        Position of the first byte in it.
    place : StoragePlace or None
        The storage that they are all of.
    crc : int or None
        Their CRC-32, if it is known.
    parts : tuple of (int, int, int)
        As of `StoragePlace`.
    """

    nbytes: int
    source: int = 0
    offset: int = 0
    place: StoragePlace | None = None
    crc: int | None = None
    parts: tuple[tuple[int, int, int], ...] = ()
