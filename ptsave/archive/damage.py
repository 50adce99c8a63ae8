"""Finds damaged records of archives and the tensors that use them; reads compressed records."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.parameter import is_lazy

from ptsave import _C
from ptsave.archive.reader import LOADERS_RECORDS, RecordReader, UnfilledView
from ptsave.errors import CorruptCheckpointError, NotCheckpointError, bare_message
from ptsave.support.calls import ProgressCallback
from ptsave.support.torch_names import (
    CHECKPOINT_OFFSET,
    META_LOADS_KEEP_OFFSETS,
    load_archive,
    options,
    parts_of_sparse_coo,
    restricted_unpickler,
    storage_id_of,
)
from ptsave.tree.tree import EntryTree

_READ_AT_ONCE_NBYTES = 512 << 20  # between two updates of a progress bar
_DEFLATED = 8
# DEFLATE's highest ratio: a member that claims more is damaged or hostile.
_MAX_INFLATION = 1032
_PIECE_NBYTES = 1 << 20
# A map_location that keeps the storages of `_PlainView`; before torch 2.11, "meta" would make new
# storages.
_NOWHERE: Any = "meta" if META_LOADS_KEEP_OFFSETS else lambda storage, location: storage


class RecordDamage(NamedTuple):
    """A record with a wrong checksum; the class has the same fields as ``_C.DamagedRecord``."""

    name: str
    payload_offset: int
    expected_crc: int
    actual_crc: int


class Damage(NamedTuple):
    """A damaged record, and the byte offset of the damage in the archive."""

    record: str
    offset: int
    reason: str
    error: Exception
    crcs: _C.DamagedRecord | None = None


class FindDamage(Protocol):
    """The type of a function with the signature of `ArchiveSpans.find_damage`."""

    def __call__(self, records: Sequence[int], *, verify: bool) -> list[Damage]: ...


def damage_of(
    reader: RecordReader, damaged: Sequence[_C.DamagedRecord | RecordDamage]
) -> CorruptCheckpointError:
    """Return the error to raise for records that do not match their checksums."""
    first = damaged[0]
    entries = entries_using(reader, {record.name for record in damaged})
    users = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "")
    advice = ", or pass verify=False to load it as it is"
    return CorruptCheckpointError(
        f"{reader.path}: record {first.name} at offset {first.payload_offset} is damaged: its "
        f"CRC-32 is {first.actual_crc:08x}, not {first.expected_crc:08x}"
        f"{consequences(len(damaged), users)}. Restore the file from a copy{advice}.",
        path=reader.path,
        record=first.name,
        offset=first.payload_offset,
        entries=entries,
        advice=advice,
    )


def consequences(n_damaged: int, users: str) -> str:
    """Return the end of a message about the first damaged record; `users` use all of the data."""
    others = f"; the file has {n_damaged - 1} more damaged records" if n_damaged > 1 else ""
    return others + (f"; the damaged data is used by {users}" if users else "")


def entries_using(
    reader: RecordReader, records: set[str], pickle_module: Any = restricted_unpickler
) -> list[str]:
    """Return the dotted paths of tensors stored in `records`; no paths if unpickling fails."""
    return [
        *dict.fromkeys(name for name, _ in entries_with_records(reader, records, pickle_module))
    ]


def entries_with_records(
    reader: RecordReader, records: Set[str], pickle_module: Any = restricted_unpickler
) -> list[tuple[str, str]]:
    """For each tensor that is stored in `records`, return its pairs (dotted path, record)."""
    location = options.map_location
    try:
        names: dict[int | None, str] = {
            reader.get_record_header_offset(name): name for name in records
        }
        plain = _PlainView(reader, [*filter(".format_version".__ne__, LOADERS_RECORDS)])
        obj = load_archive(plain, _NOWHERE, pickle_module)
        found = _collect(obj, names.keys(), _offset)
    except Exception:  # the caller then reports the damage without the entries
        return []
    finally:
        options.map_location = location  # torch does not reset it if unpickling fails
    return [(entry, names[offset]) for entry, offset in found]


def entries_in(obj: Any, storages: Set[int | None]) -> list[str]:
    """Return the dotted paths of tensors in `obj` whose storages have ids in `storages`."""
    return [*dict.fromkeys(name for name, _ in _collect(obj, storages, storage_id_of))]


def addresses_in(obj: Any) -> set[int]:
    """Return the address of each storage of the tensors in `obj`."""
    found = set()
    for _, tensor in EntryTree(obj).named_tensors():
        for part in parts_of(tensor):
            if storage_id_of(part) is not None and part.device.type == "cpu":
                found.add(part.untyped_storage().data_ptr())
    return found


class _PlainView(UnfilledView):
    """Gives torch the offset of a record's header as the offset of the record's payload."""

    def get_record_offset(self, name: str) -> int:
        return int(self._reader.get_record_header_offset(name))


def _collect(
    obj: Any, places: Set[int | None], place_of: Callable[[torch.Tensor], int | None]
) -> list[tuple[str, int | None]]:
    """Return a pair (tensor's name, place) for each tensor's part whose place is in `places`."""
    found: list[tuple[str, int | None]] = []
    for name, tensor in EntryTree(obj).named_tensors():
        for part in parts_of(tensor):
            place = place_of(part)
            if place in places:
                found.append((name, place))
    return found


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the index and value tensors of a sparse tensor; a dense tensor is its only part."""
    if is_lazy(tensor):
        return []  # it has no values until it is initialized
    if tensor.layout is torch.sparse_coo:
        return parts_of_sparse_coo(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _offset(tensor: torch.Tensor) -> int | None:
    try:
        return getattr(tensor.untyped_storage(), CHECKPOINT_OFFSET, None)
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage
        return None


def find_damage(
    reader: RecordReader, find_in: FindDamage, progress: ProgressCallback | None
) -> list[Damage]:
    """Return all damage in an archive by offset; `progress` gets each offset that is reached."""
    engine = reader.engine
    others = set(engine.other_names())
    damage = []
    for batch in _batches(reader):
        with_crcs, without = [], []
        for number in batch:
            record = engine.record(number)
            if not record.stored or record.encrypted:
                try:
                    deque(member_pieces(reader, number), 0)
                except (CorruptCheckpointError, OSError) as error:
                    damage.append(damage_at(reader, number, error))
            elif engine.has_crcs and (engine.storages_have_crcs or record.name in others):
                with_crcs.append(number)
            else:
                without.append(number)
        for numbers, verify in ((with_crcs, True), (without, False)):
            if numbers:
                damage += find_in(numbers, verify=verify)
        if progress is not None:
            progress(engine.record(batch[-1]).limit)
    return sorted(damage, key=lambda found: found.offset)


def damage_at(reader: RecordReader, number: int, error: Exception) -> Damage:
    """Return the `Damage` of record `number`, which could not be read because of `error`."""
    record = reader.engine.record(number)
    at = record.header_offset
    if isinstance(error, CorruptCheckpointError) and error.finding:
        at = at if error.offset is None else error.offset
        return Damage(record.name, at, error.finding, error)
    return Damage(record.name, at, bare_message(error, reader.path), error)


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


def torchscript_error(path: str) -> NotCheckpointError:
    """Return the error for a TorchScript archive where a state dict is expected."""
    return NotCheckpointError(
        f"{path} is a TorchScript archive, which is a program, not a state dict: load "
        "it with torch.jit.load, and call state_dict() of the result",
        path=path,
    )


def check_compressed_members(reader: RecordReader) -> None:
    """Verify all records of a compressed archive before torch's loader reads the archive.

    torch's loader compares no checksums, and allocates any size that a record's header states.  If
    a record does not inflate to this size, torch's loader returns uninitialised memory.
    """
    for index in range(len(reader.engine.records())):
        deque(member_pieces(reader, index), 0)


def member_pieces(reader: RecordReader, index: int) -> Iterator[bytes]:
    """Yield a record's inflated contents in pieces of at most 1 MiB; then check size and CRC-32."""
    record = reader.engine.record(index)
    reader.require_small(index)
    if record.directory:
        reader.fail("the record is marked as a directory, which has no contents", record.name)
    offset = reader.get_record_offset(record.name)  # refuses other methods and encryption
    if record.nbytes > _MAX_INFLATION * record.stored_nbytes + 64:
        reader.fail(f"the record cannot inflate to {record.nbytes} bytes", record.name)
    nbytes = crc = 0
    for piece in _inflated(reader, index, offset):
        nbytes += len(piece)
        if nbytes > record.nbytes:
            break
        crc = _C.crc32(piece, crc)
        yield piece
    is_verified = reader.verify and reader.engine.has_crcs
    if nbytes != record.nbytes or (is_verified and crc != record.crc):
        reader.fail("the inflated contents do not match the stated size or checksum", record.name)


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
                    reader.fail(f"the record does not inflate ({error})", record.name)
                stored = inflater.unconsumed_tail
            else:
                piece, stored = stored, b""
            yield piece
