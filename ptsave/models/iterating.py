"""`iter_weights`: yields the tensors of a checkpoint one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor

from ptsave import _C
from ptsave.archive.spans import RecycledMemory
from ptsave.contents.directories import find_files
from ptsave.models.reading_ahead import MAX_AHEAD_NBYTES, Bounds, read_ahead
from ptsave.models.shards import Entry, Read, ShardReader, open_shards
from ptsave.sources.locations import refuse_url
from ptsave.state.renaming import Rename, Renaming
from ptsave.support.calls import one_of, pausing_garbage_collection

_CPU = torch.device("cpu")


def iter_weights(
    path: Any,
    *,
    device: torch.device | str | int | None = None,
    rename: Rename | None = None,
    prefix: str = "",
    storage_options: Mapping[str, Any] | None = None,
    map_location: torch.device | str | int | None = None,
    key_mapping: Rename | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a set of shards, or one file, in the order of the files.

    The next tensors are read while one is used.  Tensors that the caller does not keep take at most
    128 MiB, or as much as the largest tensor.

    Parameters
    ----------
    path : str, os.PathLike or file-like
        A directory, an index or a file, as for :func:`ptsave.load_model`.
    device : torch.device, str or int, optional
        Device of the tensors: the CPU by default.
    rename : callable or mapping, optional
        New names, as for :func:`ptsave.load_model`; tensors whose new name is None are not read.
    prefix : str, default ""
        Reads only tensors whose names begin with it, under their names without it.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    map_location, key_mapping : optional
        Other names of `device` and `rename`.

    Yields
    ------
    (str, torch.Tensor)
        The tensor has memory of its own, and may be kept.

    Raises
    ------
    CorruptCheckpointError, FileNotFoundError, OSError, TypeError, ValueError
        As from :func:`ptsave.load_model`.  All files are opened before the first tensor is read.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ptsave.save_model(model, folder, max_shard_size=30)
    ...     for name, tensor in ptsave.iter_weights(folder, prefix="1."):
    ...         print(name, tuple(tensor.shape))
    bias (1,)
    weight (1, 3)
    """
    device = one_of(device=device, map_location=map_location)
    rename = one_of(rename=rename, key_mapping=key_mapping)
    place = _CPU if device is None else torch.empty(0, device=device).device
    renaming = Renaming(rename, prefix)
    if isinstance(path, bytes):
        refuse_url(path)
        path = os.fsdecode(path)
    with ExitStack() as stack:
        with pausing_garbage_collection():  # there may be 100,000 entries, and none is garbage
            entries = open_shards(path, find_files(path, storage_options), stack).entries
            named = [(entry, renaming(entry.name)) for entry in entries]
            wanted = [(entry, name) for entry, name in named if name is not None]
            del entries, named
        reader = stack.enter_context(closing(ShardReader(entry.shard for entry, _ in wanted)))
        memory = RecycledMemory(MAX_AHEAD_NBYTES)
        bounds = Bounds.of((entry.shard for entry, _ in wanted), MAX_AHEAD_NBYTES)
        items = (((entry, name), entry.nbytes) for entry, name in wanted)

        is_staged_there = _C.can_stage(place)

        def stage(item: tuple[Entry, str]) -> Read:
            entry, _ = item
            if is_staged_there:
                return Read(entry, torch.empty(entry.shape, dtype=entry.dtype, device=place))
            return Read(entry, memory.tensor(entry.shape, entry.dtype))

        def stage_all(items: list[tuple[Entry, str]]) -> list[Read | None]:
            return [*map(stage, items)]

        batches = stack.enter_context(closing(read_ahead(reader, items, stage_all, bounds)))
        for batch in batches:
            batch.reverse()
            while batch:
                (_, name), read = batch.pop()
                assert read is not None
                tensor = read.target
                del read  # so that a used tensor can be freed
                yield name, tensor if tensor.device == place else tensor.to(place)
                del tensor
