"""`TensorInfo`: dtype, shape and place of a file's tensors, read without their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from ptsave.contents.contents import ChunkInfo, Contents, facts_of
from ptsave.support.calls import pausing_garbage_collection

if TYPE_CHECKING:
    from ptsave.tree.containers import Path
    from ptsave.tree.tree import EntryNames


class TensorInfo(NamedTuple):
    """Dtype, shape and place of one tensor of a file.

    Attributes
    ----------
    name : str or tuple
        As in :meth:`Archive.keys`.
    dtype : torch.dtype
        Dtype of its elements.
    shape : torch.Size
        Shape in elements; -1 in a dimension in which the parts of a nested tensor differ.
    stride : tuple of int
        In elements; empty for a tensor that is nested or not strided.
    location : str or None
        The device it was saved from, for example ``"cuda:0"``; None where the file does not say.
    nbytes : int
        Elements times their size; the storage may be larger, or smaller for an expanded tensor.
    offset : int or None
        Position of its first element in the file, in bytes, by the file's directory.  None for an
        empty tensor, and for files that can only be loaded as a whole.
    record : str or None
        The archive's record that holds its storage; None where there is none.
    shared_with : sequence of (str or tuple)
        The names of the other tensors in the same storage; equal to the tuple of them.
    chunks : sequence of ChunkInfo
        The parts that ranks have written, if the file is a directory of
        torch.distributed.checkpoint: index, shape, file and place of each.
    """

    name: str | Path
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    location: str | None
    nbytes: int
    offset: int | None
    record: str | None
    shared_with: Sequence[str | Path]
    chunks: Sequence[ChunkInfo] = ()


class _Others(Sequence["str | Path"]):
    """The names of a group except one, as a view: a copy for each member would be quadratic."""

    __slots__ = ("_group", "_left_out")

    def __init__(self, group: Sequence[str | Path], left_out: int) -> None:
        self._group = group
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self._group) - 1

    def __iter__(self) -> Iterator[str | Path]:
        return iter(self._as_tuple())

    @overload
    def __getitem__(self, index: int) -> str | Path: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str | Path, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._as_tuple()[index]
        index = range(len(self))[index]
        return self._group[index if index < self._left_out else index + 1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Others):
            other = other._as_tuple()
        return isinstance(other, tuple) and self._as_tuple() == other

    def __hash__(self) -> int:
        return hash(self._as_tuple())

    def __repr__(self) -> str:
        return repr(self._as_tuple())

    def _as_tuple(self) -> tuple[str | Path, ...]:
        return (*self._group[: self._left_out], *self._group[self._left_out + 1 :])


def list_tensors(contents: Contents, names: EntryNames) -> list[TensorInfo]:
    """Return the `TensorInfo` of all tensors of a file, in the order of their names."""
    with pausing_garbage_collection():
        places = contents.places_of(names.tensors)
        groups: dict[object, list[str | Path]] = {}
        for name, (key, _, _, _) in zip(names.names, places, strict=True):
            groups.setdefault(key, []).append(name)
        n_met: dict[object, int] = {}  # tensors so far, by their shared storage
        infos = []
        facts_and_places = zip(facts_of(names.tensors), places, strict=True)
        for name, tensor, (facts, place) in zip(
            names.names, names.tensors, facts_and_places, strict=True
        ):
            dtype, shape, stride, begin, nbytes, _ = facts
            key, record, offset, location = place
            shared: Sequence[str | Path] = ()
            if len(groups[key]) > 1:
                number = n_met[key] = n_met.get(key, -1) + 1
                shared = _Others(groups[key], number)
            at = None if offset is None else offset + begin
            infos.append(
                TensorInfo(
                    name,
                    dtype,
                    shape,
                    stride,
                    location,
                    nbytes,
                    at,
                    record,
                    shared,
                    contents.chunks_of(tensor),
                )
            )
        return infos
