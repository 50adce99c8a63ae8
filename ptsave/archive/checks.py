"""Validates the format version, the small records and compressed members of an archive."""

from __future__ import annotations

import re
import zlib

from ptsave import _C
from ptsave.archive.reader import RecordReader
from ptsave.errors import NotCheckpointError

__all__ = [
    "check_compressed_member",
    "check_compressed_members",
    "check_small_records",
    "check_version",
    "torchscript_error",
]

# The file format versions that torch reads (caffe2/serialize/versions.h).
_MIN_VERSION = 1
_MAX_VERSION = 10
_DEFLATED = 8
# DEFLATE cannot do better than this, so a member that claims more lies.
_MAX_INFLATION = 1032
_PIECE_NBYTES = 1 << 20
_MAX_DIGITS = 1000
_MAX_QUOTED = 200


def check_version(reader: RecordReader) -> None:
    """Refuse an archive without a version, or with one that torch does not read.

    Parameters
    ----------
    reader : RecordReader
        The archive.

    Raises
    ------
    CorruptCheckpointError
        In the words of torch's reader.
    """
    name = ".data/version" if reader.has_record(".data/version") else "version"
    if not reader.has_record(name):
        reader.fail(
            'Expected hasRecord("version") to be true, but got false.  (Could this error message '
            "be improved?  If so, please report an enhancement request to PyTorch.)",
            name,
        )
    text = reader.get_record(name).decode("latin-1")
    number = re.match(r"\s*[+-]?\d+", text)
    # A number of thousands of digits is one that int() refuses, too.
    if number is None or len(number[0]) > _MAX_DIGITS or int(number[0]) >= 1 << 64:
        shown = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."
        reader.fail(f"Couldn't parse the version {shown} as Long Long.", name)
    version = int(number[0])
    attempt = f"Attempted to read a PyTorch file with version {version}, but the"
    if version < _MIN_VERSION:
        reader.fail(
            f"{attempt} minimum supported version for reading is {_MIN_VERSION}. Your PyTorch "
            "script module file is too old. Please regenerate it with latest version of PyTorch "
            "to mitigate this issue.",
            name,
        )
    if version > _MAX_VERSION:
        reader.fail(
            f"{attempt} maximum supported version for reading is {_MAX_VERSION}. The version of "
            "your PyTorch installation may be too old, please upgrade PyTorch to latest version "
            "to mitigate this issue.",
            name,
        )


def torchscript_error(path: str) -> NotCheckpointError:
    """Return the error for a TorchScript archive where a state dict is wanted."""
    return NotCheckpointError(
        f"{path} is a TorchScript archive, a program and no state dict: load it with "
        "torch.jit.load, whose result has a state_dict()",
        path=path,
    )


def check_small_records(reader: RecordReader) -> None:
    """Read every record that holds no storage, which verifies its name, header and checksum."""
    for name in reader.engine.other_names():
        reader.get_record(name)


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
