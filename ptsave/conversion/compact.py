"""`compact`: a checkpoint whose storages hold only bytes that its tensors use."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C
from ptsave.archive.views import unfilled_tensors, view_as
from ptsave.contents.contents import as_saved
from ptsave.conversion.source_checkpoints import SourceCheckpoint
from ptsave.sources.urls import refuse_url_target
from ptsave.streaming.payload_sources import (
    PayloadSources,
    StoragePlace,
    check_records,
)
from ptsave.streaming.streamed_files import PicklePlan
from ptsave.support.progress import progress_bar
from ptsave.support.torch_tensors import storage_id
from ptsave.tree.entry_reading import leaves_of, read_entry, require_picklable
from ptsave.tree.view_blocks import span_of
from ptsave.writing.pickling import pickle_object

__all__ = ["Compaction", "compact"]

# Largest ratio of a part of a storage that only one tensor uses to that tensor's elements.
_MAX_SPARSE = 2
# Bytes that a further storage takes in a file at most: headers, alignment, its part of the pickle.
_RECORD_NBYTES = 1024


@dataclass(frozen=True)
class Compaction:
    """The result of `compact`, or of a dry run.

    Attributes
    ----------
    path : str
        The file that was written, or would be.
    n_tensors : int
        Number of tensors in the checkpoint.
    n_storages : int
        Number of its storages with bytes that no tensor uses.
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

    A view that is saved takes its whole storage along.  Here it gets a storage from its first to
    its last element, or, if it would leave most of that unused, of its elements alone.  Views that
    overlap share one storage, so writing through one still changes the others; those of one storage
    that are a KiB or more apart share nothing afterwards. (Between others a further storage would
    take as much as it saves.) All else stays as it is.

    Parameters
    ----------
    source : str or os.PathLike
        The file, which is loaded with ``weights_only=True``.
    target : str or os.PathLike, optional
        File to write: the source by default, if that makes it smaller.
    dry_run : bool, default False
        Whether only to compute the size of the result.
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
    A file that can only be overwritten, not replaced, is put together in a temporary file first, in
    its directory or that of ``$TMPDIR``.  Files that only load as a whole are rewritten from
    memory.  Sparse and quantized tensors, those
    with attributes and those of other types than torch's own stay as they are, and so do views that
    share memory with them.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> from ptsave.conversion.compact import compact
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "row.pt")
    ...     ptsave.save(torch.ones(1000, 1000)[0], path)
    ...     done = compact(path)
    ...     print(done.nbytes_before > 4_000_000, done.nbytes < 10_000)
    True True
    """
    source = os.fspath(source)
    path = source if target is None else os.fspath(target)
    if target is not None or not dry_run:
        refuse_url_target(path)
    if os.path.isdir(source):
        raise IsADirectoryError(errno.EISDIR, "give the files in it, one at a time", source)
    if target is not None:
        _check_target(source, path, force=force)
    with ExitStack() as stack:
        folder = os.path.dirname(os.path.realpath(path))
        sources = PayloadSources(stack, folder)
        checkpoint = SourceCheckpoint(source, sources)
        if checkpoint.is_safetensors:
            raise ValueError(f"{source}: tensors of a safetensors file share nothing")
        require_picklable(checkpoint.obj, source)
        compactor = _Compactor(sources, dry_run=dry_run)
        tensors = [leaf for leaf in leaves_of(checkpoint.obj) if isinstance(leaf, Tensor)]
        obj = read_entry(checkpoint.obj, compactor.compact)
        plan = PicklePlan(obj, path, sources)
        before = checkpoint.nbytes
        is_smaller = compactor.n_storages > 0 and plan.nbytes < before
        writes = not dry_run and (target is not None or is_smaller)
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


class _Part(NamedTuple):
    """Bytes of a storage that tensors use.

    Attributes
    ----------
    begin, end : int
        Range of the bytes in the storage.
    users : list of int
        The numbers of these tensors.
    nbytes : int
        Bytes that are kept: fewer, if those of a single tensor are packed.
    """

    begin: int
    end: int
    users: list[int]
    nbytes: int

    @property
    def is_packed(self) -> bool:
        return self.nbytes < self.end - self.begin


class _Compactor:
    """Makes tensors over storages of only the bytes that they need.

    Attributes
    ----------
    n_storages : int
        Number of storages of which parts are left out.
    in_parts : list of StoragePlace
        Places of those.
    """

    def __init__(self, sources: PayloadSources, *, dry_run: bool) -> None:
        self._sources = sources
        self._dry_run = dry_run
        self.n_storages = 0
        self.in_parts: list[StoragePlace] = []

    def compact(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the same shapes, strides and kinds in the same order."""
        result = list(tensors)
        groups = _by_storage(tensors)
        storages = [tensors[group[0]].untyped_storage() for group in groups]
        places = self._sources.places_of(storages)
        kept: list[tuple[_Part, StoragePlace]] = []
        for group, storage, place in zip(groups, storages, places, strict=True):
            parts = _parts_of(tensors, group)
            if sum(part.nbytes for part in parts) < storage.nbytes():
                self.n_storages += 1
                self.in_parts.append(place or self._sources.memory(storage))
                kept += [(part, self.in_parts[-1]) for part in parts]
                empty = [i for i in group if tensors[i].numel() == 0]  # which are in no part
                nothing = torch.UntypedStorage(0)
                for i in empty:
                    self._move(result, i, nothing, 0)
        self._pack(result, [part for part, _ in kept if part.is_packed])
        self._cut(result, [(part, place) for part, place in kept if not part.is_packed])
        return result

    def _cut(self, tensors: list[Tensor], kept: list[tuple[_Part, StoragePlace]]) -> None:
        """Let tensors have storages of the parts that they use."""
        storages = _C.untyped_storages(_C.unfilled_storages([part.nbytes for part, _ in kept]))
        for (part, place), storage in zip(kept, storages, strict=True):
            at = StoragePlace(place.source, place.offset + part.begin, part.nbytes)
            self._sources.put(storage, at)
            for i in part.users:
                self._move(tensors, i, storage, part.begin)

    def _move(
        self, tensors: list[Tensor], i: int, storage: torch.UntypedStorage, begin: int
    ) -> None:
        plain = tensors[i].detach()
        offset = (span_of(plain)[0] - begin) // plain.itemsize
        self._put(tensors, i, view_as(storage, plain, offset, plain.stride()))

    def _pack(self, tensors: list[Tensor], packed: Sequence[_Part]) -> None:
        """Let tensors have storages of only their elements."""
        plain = {str(part.users[0]): tensors[part.users[0]].detach() for part in packed}
        if self._dry_run:
            made = unfilled_tensors([(tensor.dtype, tensor.shape) for tensor in plain.values()])
        else:
            made = list(self._sources.contiguous(plain).values())
        for part, values in zip(packed, made, strict=True):
            self._put(tensors, part.users[0], values)

    def _put(self, tensors: list[Tensor], i: int, values: Tensor) -> None:
        self._sources.copy_location(tensors[i].detach(), values)
        tensors[i] = as_saved(tensors[i], values)


def _by_storage(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of tensors that may get another storage, by the one that they have."""
    others = [tensor for tensor in tensors if not _is_plain(tensor)]
    _, storages = pickle_object(others, pickle, 2)  # pickling finds the storages of such tensors
    stays = {storage_id(storage) for storage in _C.untyped_storages(storages)}
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if _is_plain(tensor) and storage_id(tensor.untyped_storage()) not in stays:
            groups.setdefault(storage_id(tensor.untyped_storage()), []).append(i)
    return list(groups.values())


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


def _parts_of(tensors: Sequence[Tensor], group: Sequence[int]) -> list[_Part]:
    """Return the parts of one storage that tensors use, in order."""
    alignment = max(tensors[i].itemsize for i in group)
    spans = ((*span_of(tensors[i].detach()), i) for i in group)
    merged: list[_Part] = []
    # Views of other dtypes begin at a whole element, too.
    for begin, end, i in sorted((b - b % alignment, e, i) for b, e, i in spans if b < e):
        if merged and begin < merged[-1].end:
            merged[-1] = _joined(merged[-1], end, i)
        else:
            merged.append(_Part(begin, end, [i], end - begin))
    joined: list[_Part] = []
    for part in (_packed(part, tensors) for part in merged):
        last = joined[-1] if joined else part
        is_near = part.begin - last.end < _RECORD_NBYTES
        if joined and is_near and not last.is_packed and not part.is_packed:
            joined[-1] = _joined(last, part.end, *part.users)
        else:
            joined.append(part)
    return joined


def _joined(part: _Part, end: int, *users: int) -> _Part:
    part.users.extend(users)
    end = max(part.end, end)
    return _Part(part.begin, end, part.users, end - part.begin)


def _packed(part: _Part, tensors: Sequence[Tensor]) -> _Part:
    """Return a part without the gaps between the elements of its only tensor, if they are large."""
    nbytes = tensors[part.users[0]].nbytes
    saved = part.nbytes - nbytes
    if len(part.users) > 1 or saved < _RECORD_NBYTES or part.nbytes <= _MAX_SPARSE * nbytes:
        return part
    return part._replace(nbytes=nbytes)
