"""Opens a checkpoint, a file or a directory of shards, as one object with unread tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ptsave.contents.contents import Contents, UnreadContents
from ptsave.contents.opening import open_contents
from ptsave.contents.safetensors import SafetensorsContents
from ptsave.contents.shard_files import files_at, merged
from ptsave.tree.names import EntryNames
from ptsave.tree.paths import dotted

__all__ = ["ComparedCheckpoint", "flat"]


class ComparedCheckpoint:
    """One side of a comparison: an open checkpoint.  Safe for concurrent use.

    Parameters
    ----------
    path : str
        A file, a directory of shards, an index of shards, or a URL of a file.

    Attributes
    ----------
    path : str
        As it was given.
    obj : object
        The object in the file; of shards, and of a safetensors file, a dict of tensors.
    is_flat : bool
        Whether it cannot hold more than a dict of tensors.

    Raises
    ------
    OSError, CorruptCheckpointError, NotCheckpointError, pickle.UnpicklingError
        As :func:`ptsave.open` does; and if a shard is missing.
    ValueError
        If a name is in two shards and no index says which one counts.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._contents_of: dict[int, Contents] = {}
        files = files_at(path)
        if files is None:
            contents = open_contents(path, path, {}, True)
            self.obj = contents.obj
            self._default = contents
            self.is_flat = isinstance(contents, SafetensorsContents)
        else:
            self.is_flat = True
            self.obj = merged(self._entries_of(files.paths), files)

    def _entries_of(self, paths: Sequence[str]) -> Iterator[tuple[str, str, Tensor]]:
        for path in paths:
            contents = open_contents(path, path, {}, True)
            self._default = contents
            for name, tensor in flat(contents.obj, path).items():
                self._contents_of[id(tensor)] = contents
                yield name, path, tensor

    def contents_of(self, tensor: Tensor) -> Contents:
        """Return the contents that a tensor is read from."""
        return self._contents_of.get(id(tensor), self._default)

    def has_values(self, tensor: Tensor) -> bool:
        """Whether the file holds values of a tensor, which it does not of those on ``meta``."""
        return not tensor.is_meta or isinstance(self.contents_of(tensor), SafetensorsContents)

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Read whole tensors."""
        found: dict[int, Tensor] = {}
        for contents, group in self._by_contents(tensors):
            values = contents.read(group, None)
            found.update((id(t), v) for t, v in zip(group, values, strict=True))
        return [found[id(tensor)] for tensor in tensors]

    def packs(self, tensors: list[Tensor]) -> UnreadContents | None:
        """Return the contents that can read all of these tensors in one row; None if none can."""
        found = {id(each): each for each in map(self.contents_of, tensors)}
        contents = next(iter(found.values())) if len(found) == 1 else None
        if not isinstance(contents, UnreadContents) or not contents.can_read_packed(tensors):
            return None
        return contents

    def read_slice(self, tensor: Tensor, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor."""
        return self.contents_of(tensor).read_slice(tensor, index, None)

    def places_of(self, tensors: Sequence[Tensor]) -> list[tuple[int, object]]:
        """Return for each tensor a key of its storage, unique in a file and across files."""
        keys: dict[int, tuple[int, object]] = {}
        for contents, group in self._by_contents(tensors):
            for tensor, place in zip(group, contents.places_of(group), strict=True):
                keys[id(tensor)] = id(contents), place[0]
        return [keys[id(tensor)] for tensor in tensors]

    def _by_contents(self, tensors: Sequence[Tensor]) -> list[tuple[Contents, list[Tensor]]]:
        groups: dict[int, tuple[Contents, list[Tensor]]] = {}
        for tensor in tensors:
            contents = self.contents_of(tensor)
            groups.setdefault(id(contents), (contents, []))[1].append(tensor)
        return [*groups.values()]


def flat(obj: Any, path: str) -> dict[str, Tensor]:
    """Return the tensors of an object by their dotted names, as a safetensors file has them.

    Raises
    ------
    ValueError
        If two would have the same name.
    """
    names = EntryNames(obj, path)
    result: dict[str, Tensor] = {}
    for name, tensor in zip(names.names, names.tensors, strict=True):
        text = name if isinstance(name, str) else dotted(name)
        if text in result:
            raise ValueError(f"{path}: two tensors are called {text!r} when their names are dotted")
        result[text] = tensor
    return result
