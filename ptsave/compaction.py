"""`compact`: a checkpoint whose storages hold only what its tensors use."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C
from ptsave.archive_contents import as_saved
from ptsave.payload_sources import PayloadSources, StoragePlace, check_records, unfilled_tensors
from ptsave.progress import progress_bar
from ptsave.reading_entries import leaves_of, read_entry
from ptsave.slicing import span_of
from ptsave.source_checkpoints import open_checkpoint
from ptsave.streamed_files import PicklePlan
from ptsave.view_reading import view_as

__all__ = ["Compaction", "compact"]

# How much larger than its elements the part of a storage may be that only one tensor uses.
_MAX_SPARSE = 2


@dataclass(frozen=True)
class Compaction:
    """What `compact` has done, or would do.

    Attributes
    ----------
    path : str
        What was written, or would be.
    n_tensors : int
        How many tensors the checkpoint has.
    n_storages : int
        How many of its storages have bytes that no tensor uses.
    nbytes_before, nbytes : int
        The size of the file, as it was and as it is.
    is_written : bool
        Whether the file was written.
    """

    path: str
    n_tensors: int
    n_storages: int
    nbytes_before: int
    nbytes: int
    is_written: bool


def compact(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    fsync: bool = False,
    progress: bool = False,
) -> Compaction:
    """Rewrite a ``.pt`` file without the bytes of storages that none of its tensors uses.

    A view that is saved takes its whole storage along.  Here it gets a storage of what lies between
    its first and its last element, or, if it would leave most of that unused, of its elements
    alone.  Views that overlap share one storage, so writing through one still changes the others;
    those of one storage that do not overlap share nothing afterwards.  All else stays as it is.

    Parameters
    ----------
    source : str or os.PathLike
        The file, which is loaded with ``weights_only=True``.
    target : str or os.PathLike, optional
        Where to write: over the source by default, if that saves anything.
    dry_run : bool, default False
        Whether only to find out what would be saved.
    force : bool, default False
        Whether to replace another file than the source.
    fsync : bool, default False
        Whether the file is on the disk, past all caches, when the call returns.
    progress : bool, default False
        Whether to show a progress bar.

    Raises
    ------
    CorruptCheckpointError
        If the source is damaged.
    FileExistsError
        If the target exists.
    SaveError
        If the target cannot be written; nothing has changed then.
    ValueError
        If the source is a safetensors file, in which nothing is shared, or a directory.

    Notes
    -----
    Files that only load as a whole are rewritten from memory.  Sparse and quantized tensors and
    those of other types than torch's own stay as they are.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> from ptsave.compaction import compact
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "row.pt")
    ...     ptsave.save(torch.ones(1000, 1000)[0], path)
    ...     done = compact(path)
    ...     print(done.nbytes_before > 4_000_000, done.nbytes < 10_000)
    True True
    """
    source = os.fspath(source)
    path = source if target is None else os.fspath(target)
    if os.path.isdir(source):
        raise IsADirectoryError(errno.EISDIR, "give the files in it, one at a time", source)
    if target is not None:
        _check_target(source, path, force=force)
    with ExitStack() as stack:
        folder = os.path.dirname(os.path.realpath(path))
        sources = PayloadSources(stack, folder)
        checkpoint = open_checkpoint(source, sources, stack, folder=folder, storage_options={})
        if checkpoint.is_safetensors:
            raise ValueError(f"{source}: tensors of a safetensors file share nothing")
        compactor = _Compactor(sources, dry_run=dry_run)
        tensors = [leaf for leaf in leaves_of(checkpoint.obj) if isinstance(leaf, Tensor)]
        obj = read_entry(checkpoint.obj, compactor.compact)
        plan = PicklePlan(obj, path, sources)
        before = sum(os.stat(file).st_size for file in checkpoint.files)
        writes = not dry_run and (target is not None or compactor.n_storages > 0)
        if writes:
            check_records(compactor.in_parts)
            with progress_bar(progress, "compacting", plan.nbytes, delay=1) as callback:
                plan.write(fsync=fsync, progress=callback)
    nbytes = plan.nbytes if writes or dry_run else before
    return Compaction(path, len(tensors), compactor.n_storages, before, nbytes, writes)


def _check_target(source: str, path: str, *, force: bool) -> None:
    if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
        raise FileExistsError(errno.EEXIST, "it is the source itself: use --in-place", path)
    if os.path.lexists(path) and not force:
        raise FileExistsError(errno.EEXIST, "exists already: --force (force=True) replaces", path)


class _Extent(NamedTuple):
    """Bytes of a storage that tensors use."""

    begin: int
    end: int


class _Compactor:
    """Makes tensors over storages of only what they need.

    Attributes
    ----------
    n_storages : int
        Of how many storages parts are left out.
    in_parts : list of StoragePlace
        Where those are.
    """

    def __init__(self, sources: PayloadSources, *, dry_run: bool) -> None:
        self._sources = sources
        self._dry_run = dry_run
        self.n_storages = 0
        self.in_parts: list[StoragePlace] = []

    def compact(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the same shapes, strides and kinds in the same order."""
        by_storage: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if _is_plain(tensor):
                by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(i)
        result = list(tensors)
        storages = [tensors[group[0]].untyped_storage() for group in by_storage.values()]
        places = self._sources.places_of(storages)
        kept: list[tuple[list[int], list[_Extent], StoragePlace]] = []
        for group, storage, place in zip(by_storage.values(), storages, places, strict=True):
            extents = _extents([tensors[i] for i in group])
            if sum(end - begin for begin, end in extents) < storage.nbytes():
                kept.append((group, extents, place or self._sources.memory(storage)))
        self._replace(result, kept)
        return result

    def _replace(
        self, tensors: list[Tensor], kept: list[tuple[list[int], list[_Extent], StoragePlace]]
    ) -> None:
        sizes = [end - begin for _, extents, _ in kept for begin, end in extents]
        storages = iter(_C.untyped_storages(_C.unfilled_storages(sizes)))
        for group, extents, place in kept:
            self.n_storages += 1
            self.in_parts.append(place)
            made = [(extent, next(storages)) for extent in extents]
            for (begin, end), storage in made:
                part = StoragePlace(place.source, place.offset + begin, end - begin)
                self._sources.put(storage, part)
            homes = {i: _home(tensors[i].detach(), made) for i in group}
            n_in = Counter(storage.data_ptr() for _, storage in homes.values())
            for i, (begin, storage) in homes.items():
                alone = n_in[storage.data_ptr()] == 1
                tensors[i] = self._over(tensors[i], begin, storage, alone=alone)

    def _over(
        self, tensor: Tensor, begin: int, storage: torch.UntypedStorage, *, alone: bool
    ) -> Tensor:
        plain = tensor.detach()
        if alone and storage.nbytes() > _MAX_SPARSE * plain.nbytes > 0:
            values = self._contiguous(plain)
        else:
            offset = (span_of(plain)[0] - begin) // plain.itemsize
            values = view_as(storage, plain, offset, plain.stride())
        self._sources.copy_location(plain, values)
        return as_saved(tensor, values)

    def _contiguous(self, tensor: Tensor) -> Tensor:
        if self._dry_run:
            return unfilled_tensors([(tensor.dtype, tensor.shape)])[0]
        return self._sources.contiguous({"": tensor})[""]


def _home(
    tensor: Tensor, made: list[tuple[_Extent, torch.UntypedStorage]]
) -> tuple[int, torch.UntypedStorage]:
    """Return the storage that a tensor goes to, and where that begins in its old one."""
    begin, end = span_of(tensor)
    if begin == end:
        return 0, torch.UntypedStorage(0)
    i = bisect_right([extent.begin for extent, _ in made], begin) - 1
    return made[i][0].begin, made[i][1]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its storage, shape and strides, and nothing that would get lost."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.__dict__
        and not (tensor.requires_grad and tensor.grad_fn is not None)
    )


def _extents(tensors: Sequence[Tensor]) -> list[_Extent]:
    """Return the parts of their storage that tensors use; those that overlap are one."""
    alignment = max(tensor.itemsize for tensor in tensors)
    merged: list[_Extent] = []
    spans = (span_of(tensor.detach()) for tensor in tensors)
    # Views of other dtypes begin at a whole element, too.
    for begin, end in sorted((b - b % alignment, e) for b, e in spans if b < e):
        if merged and begin < merged[-1].end:
            merged[-1] = _Extent(merged[-1].begin, max(merged[-1].end, end))
        else:
            merged.append(_Extent(begin, end))
    return merged
