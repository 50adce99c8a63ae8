"""Presents one side of a comparison as one object with unread tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ptsave.archive.recycled_memory import RecycledMemory
from ptsave.archive.views import Allocator
from ptsave.contents.contents import Contents, UnreadContents
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.contents.sharded import ShardedContents
from ptsave.tree.containers import dotted
from ptsave.tree.names import EntryNames

_MAX_IDLE_NBYTES = 64 << 20  # fresh pages take longer than reading and comparing


class ComparedCheckpoint:
    """One side of a comparison: an open checkpoint.  Safe for concurrent use.

    `is_flat` says that it cannot hold more than a dict of tensors.  `allocate` gives memory for
    values that are compared and dropped.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.path = self._contents.path
        self.obj = self._contents.obj
        is_set = isinstance(self._contents, ShardedContents) and self._contents.is_flat
        self.is_flat = is_set or isinstance(self._contents, SafetensorsContents)
        self.allocate: Allocator = RecycledMemory(_MAX_IDLE_NBYTES).storage

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Read whole tensors."""
        return self._contents.read(tensors, None, self.allocate)

    def packs(self, tensors: list[Tensor]) -> UnreadContents | None:
        """Return the contents that can read all of these tensors in one row; None if none can."""
        found = self._contents.by_part(tensors)
        contents = found[0][0] if len(found) == 1 else None
        if not isinstance(contents, UnreadContents) or not contents.can_read_packed(tensors):
            return None
        return contents

    def read_slice(self, tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor."""
        return self._contents.read_slice(tensor, index, None, allocate=self.allocate)

    def places_of(self, tensors: list[Tensor]) -> list[object]:
        """Return a key of each tensor's storage, unique in a file and across files."""
        return [place[0] for place in self._contents.places_of(tensors)]


def flat(obj: Any, path: str) -> dict[str, Tensor]:
    """Return the tensors of an object by their dotted names, as a safetensors file has them.

    Raises ValueError if two tensors would have the same name.
    """
    names = EntryNames(obj, path)
    result: dict[str, Tensor] = {}
    for name, tensor in zip(names.names, names.tensors, strict=True):
        text = name if isinstance(name, str) else dotted(name)
        if text in result:
            raise ValueError(f"{path}: two tensors are called {text!r} when their names are dotted")
        result[text] = tensor
    return result
