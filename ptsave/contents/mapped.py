"""`MappedContents`: a checkpoint that `open(map=True)` maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave.archive.damage import parts_of
from ptsave.archive.loading import LoadOptions, load_file
from ptsave.archive.maps import ArchiveRecords, MapCheck, watch
from ptsave.archive.reader import RecordReader
from ptsave.archive.spans import Allocator, bytes_of, new_storage
from ptsave.contents.contents import CPU, LoadedContents, Place
from ptsave.contents.files import metadata_of
from ptsave.sources.ranges import RangeSource
from ptsave.support.torch_names import storage_id, storage_id_of


class MappedContents(LoadedContents):
    """`Contents` of a mapped file; its tensors are views of the map."""

    map_check: MapCheck

    def __init__(
        self,
        loaded: LoadedContents,
        source: RangeSource,
        records: ArchiveRecords,
        check: MapCheck,
        mapped: Tensor,
    ) -> None:
        super().__init__(loaded.obj, loaded.locations, loaded.metadata, source)
        self._records = records
        self.map_check = check
        self._mapped = mapped
        check.recall()

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        places = super().places_of(tensors)
        for i, tensor in enumerate(tensors):
            offset = self._offset_of(tensor)
            if offset is not None:
                record = self._records.name_at(offset)
                places[i] = (places[i][0], record, offset, places[i][3])
        return places

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        if verify is not False:
            self._compare(tensors)
        return list(tensors)

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        if verify:
            self._compare([tensor])
        return super().read_slice(tensor, index, verify, device, allocate)

    def verify(self, *, progress: bool) -> None:
        """Compare all records with their checksums."""
        self.map_check.wait()

    def _compare(self, tensors: Sequence[Tensor]) -> None:
        offsets = [self._offset_of(part) for tensor in tensors for part in parts_of(tensor)]
        records = {self._records.at(at) for at in offsets if at is not None}
        self.map_check.compare(records, self._mapped)

    def _offset_of(self, tensor: Tensor) -> int | None:
        """Return the file position of a tensor's storage; None if the map does not contain it."""
        if storage_id_of(tensor) is None:
            return None
        offset = tensor.untyped_storage().data_ptr() - self._mapped.data_ptr()
        return offset if 0 <= offset < self.nbytes else None


def open_map(source: RangeSource, reader: RecordReader) -> MappedContents:
    """Map a local ``.pt`` file, and build its object."""
    locations: dict[int, str] = {}
    copy = RecordReader(reader.engine, reader.path, reader.limits, verify=reader.verify)
    records = ArchiveRecords(copy)
    maps: list[tuple[MapCheck, Tensor]] = []

    def stay(storage: Any, location: str) -> Any:
        locations[storage_id(storage)] = location
        return storage

    def note(_: RecordReader, storage: torch.UntypedStorage) -> MapCheck:
        maps.append((watch(records, storage), bytes_of(storage)))
        return maps[0][0]

    metadata = metadata_of(reader.small_records())
    options = LoadOptions(
        stay, weights_only=True, mmap=True, verify=reader.verify, leaves_opaque=True, on_map=note
    )
    obj = load_file(source.name, options, copy)  # which closes the copy
    return MappedContents(
        LoadedContents(obj, locations, metadata, source), source, records, *maps[0]
    )
