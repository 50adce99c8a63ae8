"""Compares an archive with its checksums: finds all damage; inflates compressed members."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator

from ptsave import _C
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import ArchiveSpans, Damage
from ptsave.errors import CorruptCheckpointError, NotCheckpointError, bare_message
from ptsave.support.calls import ProgressCallback

_READ_AT_ONCE_NBYTES = 512 << 20  # between two updates of a progress bar
_DEFLATED = 8
# DEFLATE's highest ratio: a member that claims more is damaged or hostile.
_MAX_INFLATION = 1032
_PIECE_NBYTES = 1 << 20


def find_damage(
    reader: RecordReader, spans: ArchiveSpans, progress: ProgressCallback | None
) -> list[Damage]:
    """Return the damaged records of an archive, in file order.

    Records without checksums are read too, because reading checks their headers.  Keeps no bytes,
    so it needs little memory.  `progress` gets the file offset reached.
    """
    damage = []
    with_crcs = set(_with_checksums(reader))
    for batch in _batches(reader):
        stored = [i for i in batch if _is_readable(reader, i)]
        checked = [i for i in stored if i in with_crcs]
        if checked:
            damage += spans.find_damage(checked, verify=True)
        if len(checked) < len(stored):
            others = [i for i in stored if i not in with_crcs]
            damage += spans.find_damage(others, verify=False)
        if len(stored) < len(batch):
            damage += _find_damage_of_compressed(
                reader, [i for i in batch if not _is_readable(reader, i)]
            )
        if progress is not None:
            progress(reader.engine.record(batch[-1]).limit)
    return sorted(damage, key=lambda found: found.offset)


def _with_checksums(reader: RecordReader) -> Iterator[int]:
    engine = reader.engine
    others = set(engine.other_names())
    for number, record in enumerate(engine.records()):
        if engine.has_crcs and (engine.storages_have_crcs or record.name in others):
            yield number


def _batches(reader: RecordReader) -> Iterator[list[int]]:
    batch: list[int] = []
    nbytes = 0
    for number, record in enumerate(reader.engine.records()):
        batch.append(number)
        nbytes += record.nbytes
        if nbytes >= _READ_AT_ONCE_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _is_readable(reader: RecordReader, number: int) -> bool:
    record = reader.engine.record(number)
    return record.stored and not record.encrypted


def _find_damage_of_compressed(reader: RecordReader, numbers: list[int]) -> list[Damage]:
    damage = []
    for number in numbers:
        record = reader.engine.record(number)
        try:
            deque(member_pieces(reader, number), 0)
        except (CorruptCheckpointError, OSError) as error:
            reason = bare_message(error, reader.path)
            damage.append(Damage(record.name, record.header_offset, reason, error))
    return damage


def torchscript_error(path: str) -> NotCheckpointError:
    """Return the error for a TorchScript archive where a state dict is expected."""
    return NotCheckpointError(
        f"{path} is a TorchScript archive, a program and no state dict: load it with "
        "torch.jit.load, whose result has a state_dict()",
        path=path,
    )


def check_compressed_members(reader: RecordReader) -> None:
    """Verify every member of an archive with compressed members, before torch's loader reads it.

    torch's loader compares no checksum, returns uninitialised memory where a member does not
    inflate as promised, and allocates whatever size a member claims.
    """
    for index in range(len(reader.engine.records())):
        deque(member_pieces(reader, index), 0)


def member_pieces(reader: RecordReader, index: int) -> Iterator[bytes]:
    """Yield a member's contents, inflated, in pieces of at most 1 MiB.

    Raises CorruptCheckpointError after the last piece if the size or the checksum is wrong.
    """
    record = reader.engine.record(index)
    reader.require_small(index)
    if record.directory:
        reader.fail(
            "it is marked as a directory, and nothing is read from a directory", record.name
        )
    offset = reader.get_record_offset(record.name)  # refuses other methods and encryption
    if record.nbytes > _MAX_INFLATION * record.stored_nbytes + 64:
        reader.fail(f"it cannot inflate to {record.nbytes} bytes", record.name)
    nbytes = crc = 0
    for piece in _inflated(reader, index, offset):
        nbytes += len(piece)
        if nbytes > record.nbytes:
            break
        crc = _C.crc32(piece, crc)
        yield piece
    is_verified = reader.verify and reader.engine.has_crcs
    if nbytes != record.nbytes or (is_verified and crc != record.crc):
        reader.fail("it does not inflate to what its checksum promises", record.name)


def _inflated(reader: RecordReader, index: int, offset: int) -> Iterator[bytes]:
    record = reader.engine.record(index)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for begin in range(0, record.stored_nbytes, _PIECE_NBYTES):
        stored = reader.read_at(offset + begin, min(_PIECE_NBYTES, record.stored_nbytes - begin))
        while stored:
            if record.method == _DEFLATED:
                try:
                    piece = inflater.decompress(stored, _PIECE_NBYTES)
                except zlib.error as error:
                    reader.fail(f"it does not inflate ({error})", record.name)
                stored = inflater.unconsumed_tail
            else:
                piece, stored = stored, b""
            yield piece
