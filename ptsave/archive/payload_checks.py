"""Compares everything in an archive with its checksums: finds all damage, not only the first."""

from __future__ import annotations

from collections.abc import Iterator

from ptsave.archive.checks import check_compressed_member
from ptsave.archive.format_errors import bare_message
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import ArchiveSpans, Damage
from ptsave.errors import CorruptCheckpointError
from ptsave.support.progress import ProgressCallback

__all__ = ["find_damage"]

_READ_AT_ONCE_NBYTES = 512 << 20  # between two movements of a progress bar


def find_damage(
    reader: RecordReader, spans: ArchiveSpans, progress: ProgressCallback | None
) -> list[Damage]:
    """Return the records of an archive that are damaged, in the order of the file.

    Records without checksums are read all the same: their headers are checked then.  Nothing is
    kept, so this needs little memory.

    Parameters
    ----------
    reader : RecordReader
        The archive.
    spans : ArchiveSpans
        Reads its records.
    progress : callable or None
        Gets the number of bytes that have been looked at.
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
            check_compressed_member(reader, number)
        except (CorruptCheckpointError, OSError) as error:
            reason = bare_message(error, reader.path)
            damage.append(Damage(record.name, record.header_offset, reason, error))
    return damage
