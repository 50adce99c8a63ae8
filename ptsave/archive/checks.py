"""Validates compressed members of an archive, which torch's loader is going to read."""

from __future__ import annotations

import zlib

from ptsave import _C
from ptsave.archive.reader import RecordReader
from ptsave.errors import NotCheckpointError

__all__ = ["check_compressed_member", "check_compressed_members", "torchscript_error"]

_DEFLATED = 8
# DEFLATE cannot do better than this, so a member that claims more lies.
_MAX_INFLATION = 1032
_PIECE_NBYTES = 1 << 20


def torchscript_error(path: str) -> NotCheckpointError:
    """Return the error for a TorchScript archive where a state dict is wanted."""
    return NotCheckpointError(
        f"{path} is a TorchScript archive, a program and no state dict: load it with "
        "torch.jit.load, whose result has a state_dict()",
        path=path,
    )


def check_compressed_members(reader: RecordReader) -> None:
    """Verify every member of an archive that torch's loader is about to read.

    That loader compares no checksum, hands out uninitialised memory where a member does not inflate
    as promised, and allocates whatever size a member claims.

    Parameters
    ----------
    reader : RecordReader
        An archive with compressed members.

    Raises
    ------
    CorruptCheckpointError
        If the size or the CRC-32 of a member differs from the directory's.
    """
    for index in range(len(reader.engine.records())):
        check_compressed_member(reader, index)


def check_compressed_member(reader: RecordReader, index: int) -> None:
    """Verify one member, as `check_compressed_members` does all."""
    record = reader.engine.record(index)
    reader.require_small(index)
    if record.directory:
        reader.fail("it is marked as a directory, of which nothing is read", record.name)
    offset = reader.get_record_offset(record.name)  # refuses other methods and encryption
    if record.nbytes > _MAX_INFLATION * record.stored_nbytes + 64:
        reader.fail(f"it cannot inflate to {record.nbytes} bytes", record.name)
    nbytes, crc = _inflate(reader, index, offset)
    is_verified = reader.verify and reader.engine.has_crcs
    if nbytes != record.nbytes or (is_verified and crc != record.crc):
        reader.fail("it does not inflate to what its checksum promises", record.name)


def _inflate(reader: RecordReader, index: int, offset: int) -> tuple[int, int]:
    """Return size and CRC-32 of a member's contents, never holding more than a piece of them."""
    record = reader.engine.record(index)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    nbytes = crc = 0
    for begin in range(0, record.stored_nbytes, _PIECE_NBYTES):
        stored = reader.read_at(offset + begin, min(_PIECE_NBYTES, record.stored_nbytes - begin))
        while stored and nbytes <= record.nbytes:
            if record.method == _DEFLATED:
                try:
                    piece = inflater.decompress(stored, _PIECE_NBYTES)
                except zlib.error as error:
                    reader.fail(f"it does not inflate ({error})", record.name)
                stored = inflater.unconsumed_tail
            else:
                piece, stored = stored, b""
            nbytes += len(piece)
            crc = _C.crc32(piece, crc)
    return nbytes, crc
