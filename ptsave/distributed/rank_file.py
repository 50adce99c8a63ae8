"""A rank's file: the items of its plan at places of their own, and checksums of its blocks.

::

    small items   head, payload, head, payload, ...          payloads at multiples of 64
    large items   padding, head | payload                    payloads at multiples of 4,096
    table         the CRC-32 of each block of 4,096 bytes before it

The metadata has a checksum for each section of the table, of 1,024 blocks.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Buffer

from ptsave import _C
from ptsave.distributed.items import head_of
from ptsave.distributed.metadata import CheckedFile
from ptsave.writing.targets import FileWriter

__all__ = ["BLOCK_NBYTES", "SECTION_BLOCKS", "RankFile", "table_nbytes"]

BLOCK_NBYTES = _C.CHECKED_BLOCK_NBYTES
SECTION_BLOCKS = 1024
_CRC_NBYTES = 4
_SMALL_ALIGNMENT = 64


def table_nbytes(nbytes: int) -> int:
    """Return the size of the table behind so many bytes of blocks."""
    return nbytes // BLOCK_NBYTES * _CRC_NBYTES


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class RankFile:
    """Lays out one file and writes it.

    Items are added in any order, the small ones first.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[int, bytes | Tensor]] = []
        self._end = 0

    def add_tensor(self, tensor: Tensor) -> tuple[int, int]:
        """Add a contiguous tensor; returns offset and size of its item."""
        head = head_of(tensor.dtype, tensor.shape)
        nbytes = tensor.nbytes
        alignment = _SMALL_ALIGNMENT if nbytes < BLOCK_NBYTES else BLOCK_NBYTES
        payload = _align(self._end + len(head), alignment)
        begin = payload - len(head)
        self._pieces.append((begin, head))
        if nbytes:
            self._pieces.append((payload, tensor))
        self._end = payload + nbytes
        return begin, self._end - begin

    def add_bytes(self, data: bytes) -> tuple[int, int]:
        """Add an item that is whole in itself; returns its offset and size."""
        begin = _align(self._end, _SMALL_ALIGNMENT)
        self._pieces.append((begin, data))
        self._end = begin + len(data)
        return begin, len(data)

    def write(self, path: str, *, fsync: bool) -> CheckedFile:
        """Write the file, which appears whole or not at all.

        Raises
        ------
        SaveError
            If it cannot be written.
        """
        plan = _C.CheckedPlan(self._pieces)
        FileWriter(plan, compute_crcs=True, fsync=fsync, atomic=True, progress=None).write_path(
            path
        )
        table = plan.block_crcs
        section = SECTION_BLOCKS * _CRC_NBYTES
        return CheckedFile(
            nbytes=_align(self._end, BLOCK_NBYTES), crcs=section_crcs(table, section)
        )


def section_crcs(table: Buffer, section_nbytes: int) -> bytes:
    """Return the checksums of the sections of a table, four bytes each."""
    view = memoryview(table)
    return b"".join(
        _C.crc32(view[at : at + section_nbytes]).to_bytes(_CRC_NBYTES, "little")
        for at in range(0, view.nbytes, section_nbytes)
    )
