"""Names the entries of a saved object that damaged records belong to; never fails itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ptsave import _C
from ptsave.archive.reader import LOADERS_RECORDS, RecordReader, UnfilledView
from ptsave.errors import CorruptCheckpointError
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

# A map_location that keeps the storages of `_PlainView`; before torch 2.11, "meta" would make new
# ones.
_NOWHERE: Any = "meta" if META_LOADS_KEEP_OFFSETS else lambda storage, location: storage


class RecordDamage(NamedTuple):
    """A record that does not match its checksum, with the fields of ``_C.DamagedRecord``."""

    name: str
    payload_offset: int
    expected_crc: int
    actual_crc: int


def damage_of(
    reader: RecordReader, damaged: Sequence[_C.DamagedRecord | RecordDamage]
) -> CorruptCheckpointError:
    """Return the error for records that do not match their checksums."""
    first = damaged[0]
    entries = entries_using(reader, {record.name for record in damaged})
    others = f"; {len(damaged) - 1} more damaged records" if len(damaged) > 1 else ""
    used_by = f"; used by {', '.join(entries[:8])}" if entries else ""
    more = ", ..." if len(entries) > 8 else ""
    advice = ", or pass verify=False to load it as it is"
    return CorruptCheckpointError(
        f"{reader.path}: record {first.name} at offset {first.payload_offset} is damaged: its "
        f"CRC-32 is {first.actual_crc:08x}, not {first.expected_crc:08x}"
        f"{others}{used_by}{more}. Restore the file from a copy{advice}.",
        path=reader.path,
        record=first.name,
        offset=first.payload_offset,
        entries=entries,
        advice=advice,
    )


def entries_using(
    reader: RecordReader, records: set[str], pickle_module: Any = restricted_unpickler
) -> list[str]:
    """Return the dotted paths of the tensors that are stored in one of `records`.

    torch's restricted unpickler, or a stand-in for it, rebuilds the object on the meta device.  So
    no code of the file runs and no data is read.  The list is empty if the object cannot be rebuilt
    that way.
    """
    return [
        *dict.fromkeys(name for name, _ in entries_with_records(reader, records, pickle_module))
    ]


def entries_with_records(
    reader: RecordReader, records: Set[str], pickle_module: Any = restricted_unpickler
) -> list[tuple[str, str]]:
    """Return (entry, record) for each tensor of `entries_using` and each record that stores it."""
    location = options.map_location
    try:
        names: dict[int | None, str] = {
            reader.get_record_header_offset(name): name for name in records
        }
        plain = _PlainView(reader, [*filter(".format_version".__ne__, LOADERS_RECORDS)])
        obj = load_archive(plain, _NOWHERE, pickle_module)
        found = _collect(obj, names.keys(), _offset)
    except Exception:  # the message is better without entries than not raised
        return []
    finally:
        options.map_location = location  # torch does not reset it if unpickling fails
    return [(entry, names[offset]) for entry, offset in found]


def entries_in(obj: Any, storages: Set[int | None]) -> list[str]:
    """Return the dotted paths of an object's tensors in `storages`, ids as from `storage_id_of`."""
    return [*dict.fromkeys(name for name, _ in _collect(obj, storages, storage_id_of))]


class _PlainView(UnfilledView):
    """The archive without the record that makes torch compute offsets instead of asking for them.

    Its offsets are those of headers, which the directory has.  The file itself may be cut short, or
    unreadable, when an error message needs the damaged entries.
    """

    def get_record_offset(self, name: str) -> int:
        return int(self._reader.get_record_header_offset(name))


def _collect(
    obj: Any, places: Set[int | None], place_of: Callable[[torch.Tensor], int | None]
) -> list[tuple[str, int | None]]:
    """Return (name, place) of the tensors at `places`; shared containers count once."""
    found: list[tuple[str, int | None]] = []
    for name, tensor in EntryTree(obj).named_tensors():
        for part in _parts_of(tensor):
            place = place_of(part)
            if place in places:
                found.append((name, place))
    return found


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse tensor, or any other tensor itself."""
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
