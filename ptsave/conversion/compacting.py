"""`ptsave.compact`: rewrites a checkpoint with only the bytes that its tensors use."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C
from ptsave.archive.spans import unfilled_tensors, view_as
from ptsave.contents.contents import as_saved
from ptsave.contents.directories import find_files
from ptsave.contents.files import ShardFiles
from ptsave.contents.opening import open_file
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.locations import (
    describe,
    is_url,
    is_url_target,
    position_kept,
    refuse_storage_options,
    refuse_url_target,
)
from ptsave.sources.ranges import RangeSource, open_source
from ptsave.streaming.payload_sources import (
    PayloadSources,
    PicklePlan,
    SafetensorsPlan,
    SourceCheckpoint,
    StoragePlace,
    StreamedPlan,
    check_records,
    write_bytes,
)
from ptsave.support.calls import check_flags, progress_bar
from ptsave.support.torch_names import storage_id
from ptsave.tree.extents import span_of
from ptsave.tree.leaves import leaves_of, read_entry, require_picklable
from ptsave.writing.planning import pickle_object
from ptsave.writing.targets import (
    FileTarget,
    exists,
    resolve,
    resolve_file,
    resolve_target,
    scratch_folder,
)

# A tensor's gaps are left out if its range of a storage exceeds this many times its own bytes.
_MAX_SPARSE = 2
# An upper bound of the bytes that one more storage adds to a file, besides its contents.
_RECORD_NBYTES = 1024


@dataclass(frozen=True)
class Compaction:
    """What `compact` has written, or what it would write (a dry run).

    Attributes
    ----------
    path : str
        The file or directory that was written, or would be written.
    n_tensors : int
        Number of tensors in the checkpoint.
    n_storages : int
        Number of storages with bytes that no tensor uses.
    nbytes_before, nbytes : int
        The size of all files in bytes, before and after.
    is_written : bool
        Whether a file was written.
    """

    path: str
    n_tensors: int
    n_storages: int
    nbytes_before: int
    nbytes: int
    is_written: bool


def compact(
    source: Any,
    target: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    force: bool = False,
    fsync: bool = False,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
) -> Compaction:
    """Rewrite a checkpoint without those bytes of storages that no tensor uses.

    torch.save writes the complete storage of a view.  Compaction keeps only the range from the
    view's first to its last element, or only its elements if they fill less than half of that
    range.  Views that overlap still share a storage, so writing to one still changes the others.
    Views that are 1 KiB or more apart do not share a storage any more.  Closer views still share
    one, because another storage would take as many bytes as it saves.  All else stays the same.

    Parameters
    ----------
    source : str, os.PathLike or file-like
        As for :func:`ptsave.open`; the checkpoint is loaded with ``weights_only=True``.  If it has
        several files, each is compacted and keeps its name.
    target : str or os.PathLike, optional
        Path or URL to write to.  For several files, this is a directory, which also gets a copy of
        the index.  By default, a smaller new file replaces its source file.
    dry_run : bool, default False
        Whether to compute the size of the result, without writing anything.
    force : bool, default False
        Whether to replace an existing target.
    fsync : bool, default False
        Whether to wait until the files are on the disk, and not only in caches.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options, target_storage_options : mapping, optional
        Arguments for the file systems of the source's URL and of the target's URL.

    Raises
    ------
    CorruptCheckpointError
        If the source is damaged.
    FileExistsError
        If the target exists, and `force` is False.
    SaveError
        If the target cannot be written.  The target is then unchanged.
    UnsupportedSourceError
        If the source is a file object and there is no target.
    TypeError
        If `target_storage_options` is given, but `target` is a local path or is left out.

    Notes
    -----
    A safetensors file has no unused bytes, so it is not changed; a target gets a copy of it.

    If a file can be overwritten but not replaced, the new content is first written to a temporary
    file in its directory or in ``$TMPDIR``.  A compressed archive is first inflated into a
    temporary file.  If torch has to load a file completely, it is rewritten from memory.

    Sparse, nested and quantized tensors, tensors with attributes, and tensors of types that are not
    torch's own keep their storages.  So do all views that share memory with such tensors.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> from ptsave.conversion.compacting import compact
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "row.pt")
    ...     ptsave.save(torch.ones(1000, 1000)[0], path)
    ...     done = compact(path)
    ...     print(done.nbytes_before > 4_000_000, done.nbytes < 10_000)
    True True
    """
    check_flags(dry_run=dry_run, force=force, fsync=fsync)
    if target is not None:
        resolve(target, target_storage_options)  # raise before anything is read
    else:
        refuse_storage_options(target_storage_options)
        if not dry_run:
            _require_replaceable(source, storage_options)
    own = storage_options if target is None else target_storage_options
    options = _Options(dry_run, force, fsync, progress, own)
    path = None if target is None else os.fsdecode(target)
    with position_kept(source):
        files = find_files(source, storage_options)
        if files.source is None:
            return _compact_files(files, path, options)
        with files.source.closed_on_error():
            if path is not None:
                _check_target(files.path, path, options)
            path_of_result = files.path if path is None else path
            return _compact_file(files.source, path_of_result, path is not None, options)


def _require_replaceable(source: Any, storage_options: Mapping[str, Any] | None) -> None:
    """Raise an error if the source is not a file or directory that can be replaced."""
    if not isinstance(source, (str, os.PathLike)):
        raise UnsupportedSourceError(f"{describe(source)} cannot be replaced: pass a target")
    if is_url(source):
        resolve(source, storage_options)
    else:
        refuse_url_target(source)  # a local file named like a URL cannot be written by that name


class _Options(NamedTuple):
    dry_run: bool
    force: bool
    fsync: bool
    progress: bool
    target_options: Mapping[str, Any] | None


def _compact_files(files: ShardFiles, folder: str | None, options: _Options) -> Compaction:
    targets = {path: path for path in files.paths}
    if folder is not None:
        names = {path: files.name_of(path) for path in (*files.paths, files.index_path) if path}
        targets = {path: os.path.join(folder, name) for path, name in names.items()}
        for path, target in targets.items():
            _check_target(path, target, options)
            if not options.dry_run and not is_url_target(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
    done = [
        _compact_file(source, targets[path], folder is not None, options)
        for path, source in zip(files.paths, files.open(), strict=True)
    ]
    if files.index_path in targets and not options.dry_run:
        source = open_source(files.index_path, files.storage_options)
        (text,) = source.read([(0, source.nbytes)])
        index = resolve_file(targets[files.index_path], options.target_options)
        write_bytes(index, text, fsync=options.fsync)
    return Compaction(
        files.path if folder is None else folder,
        sum(each.n_tensors for each in done),
        sum(each.n_storages for each in done),
        sum(each.nbytes_before for each in done),
        sum(each.nbytes for each in done),
        any(each.is_written for each in done),
    )


def _compact_file(source: RangeSource, path: str, is_other: bool, options: _Options) -> Compaction:
    with ExitStack() as stack:
        target: FileTarget = path
        if not options.dry_run:  # raises early if the target cannot be written
            target = resolve_target(path, options.target_options)
        nearby = os.path.realpath(target) if isinstance(target, str) else target
        sources = PayloadSources(stack, scratch_folder(nearby))
        checkpoint = SourceCheckpoint(open_file(sources.localize(source)), sources)
        require_picklable(checkpoint.obj, source.name)
        compactor = _Compactor(sources, dry_run=options.dry_run)
        tensors = [leaf for leaf in leaves_of(checkpoint.obj) if isinstance(leaf, Tensor)]
        plan: StreamedPlan
        if checkpoint.is_safetensors:
            plan = SafetensorsPlan(
                checkpoint.obj,
                target,
                sources,
                checkpoint.metadata,
                checksums=checkpoint.has_checksums,
            )
        else:
            plan = PicklePlan(
                read_entry(checkpoint.obj, compactor.compact, source.name), target, sources
            )
        before = source.nbytes
        is_smaller = compactor.n_storages > 0 and plan.nbytes < before
        writes = not options.dry_run and (is_other or is_smaller)
        if writes:
            check_records(compactor.in_parts)
            with progress_bar(options.progress, "compacting", plan.nbytes, delay=1) as callback:
                plan.write(fsync=options.fsync, progress=callback)
    nbytes = plan.nbytes if writes or options.dry_run else before
    return Compaction(path, len(tensors), compactor.n_storages, before, nbytes, writes)


def _check_target(source: str, path: str, options: _Options) -> None:
    both = os.path.exists(path) and os.path.exists(source)
    if path == source or (both and os.path.samefile(path, source)):
        raise FileExistsError(errno.EEXIST, "this is the source itself: use --in-place", path)
    if exists(resolve_file(path, options.target_options)) and not options.force:
        raise FileExistsError(errno.EEXIST, "exists already: pass --force (force=True)", path)


class _Part(NamedTuple):
    """A range of a storage's bytes that tensors use."""

    begin: int
    end: int
    users: list[int]  # positions of its tensors in the list
    nbytes: int  # bytes to write; fewer than the range if it loses its gaps

    @property
    def is_packed(self) -> bool:
        return self.nbytes < self.end - self.begin


class _Compactor:
    """Gives tensors new, smaller storages, without bytes that no tensor uses."""

    def __init__(self, sources: PayloadSources, *, dry_run: bool) -> None:
        self._sources = sources
        self._dry_run = dry_run
        self.n_storages = 0  # storages that lose bytes
        self.in_parts: list[StoragePlace] = []  # the places of these storages

    def compact(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in the same order; those with unused bytes get smaller storages."""
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
                nothing = torch.UntypedStorage(0)
                for i in group:
                    if tensors[i].numel() == 0:  # no part contains an empty tensor
                        self._move(result, i, nothing, 0)
        self._pack(result, [part for part, _ in kept if part.is_packed])
        self._cut(result, [(part, place) for part, place in kept if not part.is_packed])
        return result

    def _cut(self, tensors: list[Tensor], kept: list[tuple[_Part, StoragePlace]]) -> None:
        """Make a storage for each part, and move the part's tensors to this storage."""
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
        """For parts with one tensor each, give the tensor a storage without gaps."""
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
    """Return the positions of tensors that may get a new storage: a list for each storage."""
    others = [tensor for tensor in tensors if not _is_plain(tensor)]
    _, storages = pickle_object(others, pickle, 2)  # pickling finds all of their storages
    stays = {storage_id(storage) for storage in _C.untyped_storages(storages)}
    groups: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if _is_plain(tensor) and storage_id(tensor.untyped_storage()) not in stays:
            groups.setdefault(storage_id(tensor.untyped_storage()), []).append(i)
    return list(groups.values())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, of torch's own type, and without attributes."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.__dict__
        and not (tensor.requires_grad and tensor.grad_fn is not None)
    )


def _parts_of(tensors: Sequence[Tensor], group: Sequence[int]) -> list[_Part]:
    """Return the parts of one storage that the tensors of a group use, in order."""
    alignment = max(tensors[i].itemsize for i in group)
    spans = ((*span_of(tensors[i].detach()), i) for i in group)
    merged: list[_Part] = []
    # The begin of each part is aligned to the largest dtype.
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
    """Return `part`; if only one tensor uses it and has large gaps, the size is without gaps."""
    nbytes = tensors[part.users[0]].nbytes
    saved = part.nbytes - nbytes
    if len(part.users) > 1 or saved < _RECORD_NBYTES or part.nbytes <= _MAX_SPARSE * nbytes:
        return part
    return part._replace(nbytes=nbytes)
