"""What a file says about its tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive_contents import Contents
from ptsave.entry_names import EntryNames, Path

__all__ = ["TensorInfo", "list_tensors", "pausing_garbage_collection"]


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
        facts = _C.tensor_facts(names.tensors)
        infos = []
        for name, fact, tensor, place in zip(
            names.names, facts, names.tensors, places, strict=True
        ):
            dtype, shape, stride, begin, nbytes = fact or _facts_of(tensor)
            key, record, offset, location = place
            others = sharing.get(key)
            shared = () if others is None else tuple([o for o in others if o is not name])
            at = None if offset is None else offset + begin
            infos.append(
                TensorInfo(name, dtype, shape, stride, location, nbytes, at, record, shared)
            )
        return infos


def _facts_of(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int, int]:
    """Return of a tensor that is not strided what `_C.tensor_facts` does of the others."""
    return tensor.dtype, tensor.shape, (), 0, int(tensor.numel() * tensor.itemsize)


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
