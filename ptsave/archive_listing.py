"""What a file says about its tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive_contents import Contents
from ptsave.entry_names import EntryNames, Path

__all__ = ["Facts", "TensorInfo", "facts_of", "list_tensors", "pausing_garbage_collection"]

# Of a tensor: dtype, shape, stride, where in its storage it begins, its size, and its storage's
# size; all three in bytes.  A plain tuple, of which there may be 100,000.
Facts: TypeAlias = tuple[torch.dtype, torch.Size, tuple[int, ...], int, int, int]


class TensorInfo(NamedTuple):
    """What a file says about one of its tensors.

    Attributes
    ----------
    name : str or tuple
        As in :meth:`Archive.keys`.
    dtype : torch.dtype
        Of its elements.
    shape : torch.Size
        In elements.
    stride : tuple of int
        In elements; empty for a tensor that is not strided.
    location : str or None
        The device it was saved from, for example ``"cuda:0"``; None where the file does not say.
    nbytes : int
        Elements times their size; the storage may be larger, or smaller for an expanded tensor.
    offset : int or None
        Where its first element lies in the file, in bytes, by the file's directory.  None for an
        empty tensor, and for files that can only be loaded as a whole.
    record : str or None
        The archive's record that holds its storage; None where there is none.
    shared_with : tuple of (str or tuple)
        The names of the other tensors in the same storage.
    """

    name: str | Path
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    location: str | None
    nbytes: int
    offset: int | None
    record: str | None
    shared_with: tuple[str | Path, ...]


def list_tensors(contents: Contents, names: EntryNames) -> list[TensorInfo]:
    """Return what there is to say about all tensors of a file, in the order of their names."""
    with pausing_garbage_collection():
        places = contents.places_of(names.tensors)
        first_of: dict[object, str | Path] = {}
        sharing: dict[object, list[str | Path]] = {}
        for name, (key, _, _, _) in zip(names.names, places, strict=True):
            first = first_of.setdefault(key, name)
            if first is not name:
                sharing.setdefault(key, [first]).append(name)
        infos = []
        for name, facts, place in zip(names.names, facts_of(names.tensors), places, strict=True):
            dtype, shape, stride, begin, nbytes, _ = facts
            key, record, offset, location = place
            others = sharing.get(key)
            shared = () if others is None else tuple([o for o in others if o is not name])
            at = None if offset is None else offset + begin
            infos.append(
                TensorInfo(name, dtype, shape, stride, location, nbytes, at, record, shared)
            )
        return infos


def facts_of(tensors: list[Tensor]) -> list[Facts]:
    """Return what tensors say about themselves; one that is not strided has no stride."""
    facts = _C.tensor_facts(tensors)
    if None not in facts:
        return facts  # type: ignore[return-value]  # no copy of what may be long
    return [
        _dense_facts_of(tensor) if found is None else found
        for found, tensor in zip(facts, tensors, strict=True)
    ]


def _dense_facts_of(tensor: Tensor) -> Facts:
    nbytes = int(tensor.numel() * tensor.itemsize)
    return tensor.dtype, tensor.shape, (), 0, nbytes, nbytes


@contextmanager
def pausing_garbage_collection() -> Iterator[None]:
    """Make many objects without the collector's looking for garbage among them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
