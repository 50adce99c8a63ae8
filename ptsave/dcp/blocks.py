"""The layout of checksums in a rank's file that `ptsave.distributed` has written.

A table behind the last block has the CRC-32 of each block of 4,096 bytes.  The metadata has a
CRC-32 for each section of the table, which covers 1,024 blocks.
"""

from __future__ import annotations

from typing_extensions import Buffer

from ptsave import _C

BLOCK_NBYTES = _C.CHECKED_BLOCK_NBYTES
SECTION_BLOCKS = 1024
SECTION_NBYTES = SECTION_BLOCKS * BLOCK_NBYTES
CRC_NBYTES = 4


def table_nbytes(nbytes: int) -> int:
    """Return the size of the table for blocks of `nbytes` bytes in all."""
    return nbytes // BLOCK_NBYTES * CRC_NBYTES


def section_crcs(table: Buffer) -> bytes:
    """Return the checksums of the sections of a table, four bytes each."""
    view = memoryview(table)
    return b"".join(
        _C.crc32(view[at : at + SECTION_BLOCKS * CRC_NBYTES]).to_bytes(CRC_NBYTES, "little")
        for at in range(0, view.nbytes, SECTION_BLOCKS * CRC_NBYTES)
    )
