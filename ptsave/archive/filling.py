"""Fills the storages of an archive in the background, or of chosen records at once."""

from __future__ import annotations

from collections.abc import Iterable

from ptsave import _C
from ptsave.archive.damage import damage_of
from ptsave.archive.format_errors import raise_corrupt
from ptsave.archive.reader import ID_RECORD, RecordReader
from ptsave.errors import CheckpointWarning
from ptsave.support.progress import ProgressCallback
from ptsave.support.user_warnings import warn_user

__all__ = ["fill", "start_reading", "storages_were_left_out", "verifies_storages"]

_ID_N_DIGITS = 20  # of names, and then of checksums


def verifies_storages(reader: RecordReader) -> bool:
    """Whether storages are compared with checksums; warns if they should be and have none."""
    if not reader.verify or reader.engine.storages_have_crcs:
        return reader.verify
    if storages_were_left_out(reader):
        return False
    warn_user(
        f"{reader.path} was written without checksums of its storages "
        "(set_crc32_options(False)): they are loaded unverified",
        CheckpointWarning,
    )
    return False


def storages_were_left_out(reader: RecordReader) -> bool:
    """Whether ``torch.serialization.skip_data`` wrote the file, for others to fill it in.

    Only storages have no checksums then, and the serialization id is made of that: an ordinary
    file that has lost them says otherwise.
    """
    if reader.engine.storages_have_crcs or not reader.engine.has_crcs:
        return False
    records = [record for record in reader.engine.records() if record.name != ID_RECORD]
    crcs = [record.crc for record in records if record.nbytes]
    return reader.serialization_id()[_ID_N_DIGITS:] == f"{_folded(crcs):0{_ID_N_DIGITS}}"


def start_reading(reader: RecordReader, *, exact_offsets: bool) -> None:
    """Begin to fill the storages of all tensors, until ``reader.engine.cancel()``."""
    reader.engine.start(
        None,
        n_threads=reader.limits.n_readers,
        verify=verifies_storages(reader),
        exact_offsets=exact_offsets,
    )


def fill(
    reader: RecordReader, records: Iterable[int], *, verify: bool, progress: ProgressCallback | None
) -> None:
    """Make the copies that were planned, and read these records into their storages."""
    try:
        damaged = reader.engine.fill(
            list(records),
            n_threads=reader.limits.n_readers,
            verify=verify,
            max_pinned_nbytes=reader.limits.max_pinned_nbytes,
            progress=progress,
        )
    except _C.FormatError as error:
        raise_corrupt(error, reader.path)
    if damaged:
        raise damage_of(reader, damaged)


def _folded(crcs: Iterable[int]) -> int:
    """Return the hash of checksums in a serialization id (docs/format.md)."""
    seed = 0
    for crc in crcs:
        seed ^= (crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFF_FFFF_FFFF_FFFF
    return seed
