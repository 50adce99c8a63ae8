"""Presents the files of a checkpoint as one `Contents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave.archive.views import Allocator, new_storage
from ptsave.contents.contents import CPU, ChunkInfo, Contents, Place
from ptsave.contents.shard_files import ShardFiles, merged
from ptsave.support.torch_tensors import storage_id_of
from ptsave.tree.entry_reading import tensors_over


class ShardedContents:
    """The dicts of several files as one `Contents`.

    A name counts in the file that the index names.  Objects of ranks lie below the keys of their
    ranks; `is_flat` is true if there are no such keys.
    """

    def __init__(self, parts: Sequence[Contents], files: ShardFiles) -> None:
        self.parts = parts
        self.path = files.path
        self.is_flat = files.ranks is None
        self.kind = ", ".join(dict.fromkeys(part.kind for part in parts))
        self.nbytes = sum(part.nbytes for part in parts)
        self.metadata = {"format": self.kind}
        for key, value in parts[0].metadata.items():
            if all(part.metadata.get(key) == value for part in parts):
                self.metadata[key] = value
        self.obj = merged(((part.path, part.obj) for part in parts), files)
        self._part_of: dict[int, Contents] = {}
        for part in parts:
            self._part_of.update((_key_of(tensor), part) for tensor in tensors_over(part.obj))

    @staticmethod
    def have_same_names(parts: Sequence[Contents]) -> bool:
        """Return whether dicts of several files have a name in common."""
        dicts = [part.obj for part in parts if isinstance(part.obj, Mapping)]
        return len(set().union(*dicts)) < sum(map(len, dicts))

    def park(self) -> None:
        """Close the files until they are read."""
        for part in self.parts:
            part.park()

    def places_of(self, tensors: list[Tensor]) -> list[Place]:
        places: dict[int, Place] = {}
        for part, group in self.by_part(tensors):
            found = part.places_of(group)
            for tensor, place in zip(group, found, strict=True):
                places[id(tensor)] = ((id(part), place[0]), *place[1:])
        return [places[id(tensor)] for tensor in tensors]

    def chunks_of(self, tensor: Tensor) -> Sequence[ChunkInfo]:
        ((part, _),) = self.by_part([tensor])
        return part.chunks_of(tensor)

    def read(
        self, tensors: Sequence[Tensor], verify: bool | None, allocate: Allocator = new_storage
    ) -> list[Tensor]:
        values: dict[int, Tensor] = {}
        for part, group in self.by_part(list(tensors)):
            found = part.read(group, verify, allocate)
            values.update((id(t), v) for t, v in zip(group, found, strict=True))
        return [values[id(tensor)] for tensor in tensors]

    def read_to(self, device: torch.device, tensor: Tensor, verify: bool | None) -> Tensor:
        ((part, _),) = self.by_part([tensor])
        return part.read_to(device, tensor, verify)

    def read_slice(
        self,
        tensor: Tensor,
        index: Any,
        verify: bool | None,
        device: torch.device = CPU,
        allocate: Allocator = new_storage,
    ) -> Tensor:
        ((part, _),) = self.by_part([tensor])
        return part.read_slice(tensor, index, verify, device, allocate)

    def verify(self, *, progress: bool) -> None:
        for part in self.parts:
            part.verify(progress=progress)

    def by_part(self, tensors: list[Tensor]) -> list[tuple[Contents, list[Tensor]]]:
        """Group tensors by the files that hold them."""
        groups: dict[int, tuple[Contents, list[Tensor]]] = {}
        for tensor in tensors:
            part = self._part_of.get(_key_of(tensor), self.parts[-1])
            groups.setdefault(id(part), (part, []))[1].append(tensor)
        return list(groups.values())


def _key_of(tensor: Tensor) -> int:
    """Return a key that is unique among all files, and equal for each wrapper of a storage."""
    return storage_id_of(tensor) or id(tensor)
