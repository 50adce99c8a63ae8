"""`ptsave.convert`: writes the tensors of a checkpoint in another format.

The source is opened without its tensors' values; a pickle or a header describes the tensors.  Then
the writers of `ptsave.save` copy the tensors' bytes from the source in chunks, and compute their
CRC-32.  Before the target gets its name, each record is compared with its checksum.  If only a part
of a record is needed, the complete record is read and compared first.

A tensor whose bytes cannot be copied as one range (transposed, expanded, conjugate) goes through an
unnamed temporary file, in pieces of 32 MiB.  A source at a URL is first copied to such a file.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ptsave.contents.opening import OpenOptions, open_checkpoint
from ptsave.contents.safetensors import safetensors_dtypes
from ptsave.errors import UnsupportedUrlError
from ptsave.inspection.extraction import without_opaque
from ptsave.models.save_model import (
    FORMAT_FILES,
    Shard,
    ShardSet,
    files_of_sets,
    save_errors,
    split,
)
from ptsave.models.shards import (
    ExtraState,
    is_extra_state,
    metadata_names,
    metadata_of,
    require_loadable,
)
from ptsave.sources.locations import LocalFolder, describe, position_kept
from ptsave.sources.ranges import Folder
from ptsave.sources.url_locations import UrlLocation
from ptsave.streaming.payload_sources import (
    PayloadSources,
    PicklePlan,
    SafetensorsPlan,
    SourceCheckpoint,
    StreamedPlan,
)
from ptsave.support.calls import check_flags, parse_size, progress_bar, progress_from
from ptsave.support.text import some_of
from ptsave.support.torch_names import storage_id
from ptsave.tree.containers import attributes_of, items_of, set_attributes
from ptsave.tree.extents import check_expansion
from ptsave.tree.leaves import flatten, leaves_of, read_entry
from ptsave.tree.tree import holds_opaque, refuse_opaque
from ptsave.writing.targets import FileTarget, is_url_file, resolve_folder

Format: TypeAlias = Literal["pt", "safetensors", "dcp"]

_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SHARD_NBYTES = 5 * 10**9  # the default size of shards
_N_NAMED = 8
# The library transformers looks for this metadata in a safetensors file.
_PLAIN_METADATA = {"format": "pt"}


@dataclass
class Conversion:
    """The result of `convert`.

    Attributes
    ----------
    path : str
        The file or directory that was written.
    n_tensors : int
        Number of tensors in the target.
    nbytes : int
        The size of the written files in bytes, without an index.
    remarks : list of str
        Changes that lose no values, for example that the target has no ``_metadata``.
    """

    path: str
    n_tensors: int = 0
    nbytes: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Target:
    path: str
    format: Format
    is_directory: bool
    url: UrlLocation | None = None

    @property
    def file(self) -> FileTarget:
        """The target, if it is one file."""
        return self.path if self.url is None else self.url

    @property
    def files(self) -> Folder:
        """The target, if it is a directory."""
        return LocalFolder(self.path) if self.url is None else self.url

    @property
    def folder(self) -> str:
        """An existing folder for temporary files, near the target if this is local."""
        if self.url is not None:
            return tempfile.gettempdir()
        folder = self.path if self.is_directory else os.path.dirname(self.path)
        while folder and not os.path.isdir(folder):
            folder = os.path.dirname(folder.rstrip("/"))
        return folder or "."


def convert(
    source: Any,
    target: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002 (the usual name of this option)
    max_shard_size: int | str | None = None,
    max_size: int | str | None = None,
    drop: bool = False,
    force: bool = False,
    fsync: bool = False,
    progress: bool = False,
    recover: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
    checksums: bool = True,
) -> Conversion:
    """Write the tensors of a checkpoint in another format, with the same bits.

    Bytes are copied from file to file, with at most a few MiB of memory for each thread.  Before
    the target gets its name, the source is compared with its checksums, if it has any.

    Parameters
    ----------
    source : str, os.PathLike or file-like
        As for :func:`ptsave.open`: a ``.pt`` or safetensors file, a directory of shards, an index
        of shards, or a directory of torch.distributed.checkpoint.
    target : str or os.PathLike
        A path or a URL for fsspec.  The suffix of a file determines its format: ``.pt``, ``.pth``,
        ``.bin``, ``.ckpt`` or ``.safetensors``.  If the target is a directory, ends with a slash or
        has no suffix, shards are written to this directory.
    format : {"pt", "safetensors", "dcp"}, optional
        Format of a directory (default: ``"safetensors"``), or of a file with another suffix.
        ``"dcp"`` writes a directory that :func:`torch.distributed.checkpoint.load` can load.
    max_shard_size : int or str, optional
        The most bytes of tensors in a shard, as for :func:`ptsave.save_model`; default "5GB".
    max_size : int or str, optional
        The most bytes that all tensors together may take when each is written in full.  This
        protects from small files with huge expanded tensors.  The default is 8 times the bytes of
        the storages, and at least 1 GiB.  It has no effect if a ``.pt`` file becomes a ``.pt``
        file, because expanded tensors stay expanded.
    drop : bool, default False
        Whether to leave out entries that the format cannot hold, instead of raising ValueError.
    force : bool, default False
        Whether to replace an existing target.
    fsync : bool, default False
        Whether to wait until the files are on the disk, and not only in caches.
    progress : bool, default False
        Whether to show a progress bar.
    recover : bool, default False
        As for :func:`ptsave.open`: whether to read what is left of a file that has lost its end.
    storage_options, target_storage_options : mapping, optional
        Arguments for the file systems of the source's URL and of the target's URL.
    checksums : bool, default True
        Whether safetensors files have checksums, as for :func:`ptsave.save_model`.

    Returns
    -------
    Conversion
        The files that were written, and remarks about changes.

    Raises
    ------
    ValueError
        If the target cannot hold an entry (the message names such entries), two tensors have the
        same flat name, the tensors would take more than `max_size`, or the arguments conflict.
    FileExistsError
        If the target exists and `force` is False, or if it is the source.
    CorruptCheckpointError
        If the source is damaged; the message names records and entries.
    SaveError
        If the target cannot be written, or is a URL that fsspec cannot write to.  After an error,
        an old target is unchanged, and a new target does not exist.

    Notes
    -----
    If source and target are single files, a ``.pt`` target has the same object as the source.  From
    a distributed checkpoint, a ``.pt`` file gets the object that torch's ``dcp_to_torch_save``
    writes: complete tensors in dicts and lists.  All other results are flat dicts of tensors.  If a
    module's extra state is not a tensor, a safetensors file has it in its metadata, as with
    `save_model`.  Conversion of this file to ``.pt`` puts the extra state back into the dict.

    Parts of a distributed checkpoint's tensors that are complete rows are copied from file to file;
    other parts, such as columns, go through a temporary file.  If torch has to load a whole file
    (from before torch 1.6, or with sparse or quantized tensors), it is converted from memory.
    Compressed archives, tensors that are not contiguous, and sources that are not local files go
    through an unnamed temporary file beside the target.  No accelerator is used, even if the
    tensors were saved from one.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> from ptsave.conversion.converting import convert
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "model")
    ...     ptsave.save({"layer": {"weight": torch.ones(3)}}, path + ".pt")
    ...     convert(path + ".pt", path + ".safetensors").remarks
    ['1 tensor is from within containers: their names are the paths, with dots']
    """
    check_flags(drop=drop, force=force, fsync=fsync, recover=recover, checksums=checksums)
    place = _target_of(target, format, target_storage_options)
    if max_shard_size is not None and not place.is_directory:
        raise ValueError(f"{place.path}: max_shard_size is only for directories")
    limit = _SHARD_NBYTES
    if max_shard_size is not None:
        limit = parse_size(max_shard_size, "max_shard_size")
    _check_target(place, describe(source), force=force)
    with position_kept(source), ExitStack() as stack:
        sources = PayloadSources(stack, place.folder)
        options = OpenOptions(
            storage_options, recover=recover, localize=sources.localize, stays_open=True
        )
        contents = open_checkpoint(source, options)
        checkpoint = SourceCheckpoint(contents, sources)
        _refuse_source(place, checkpoint.paths)
        conversion = Conversion(place.path, remarks=checkpoint.remarks)
        writing = _Writing(
            place, checkpoint, sources, conversion, max_size, fsync, progress, checksums
        )
        if place.format == "dcp":
            writing.write_ranks()
        elif place.format == "pt" and not place.is_directory:
            writing.write_object(drop=drop)
        elif place.is_directory:
            writing.write_directory(limit, drop=drop)
        else:
            writing.write_safetensors(drop=drop)
    return conversion


@dataclass
class _Writing:
    """Writes the target of one conversion, whose source is open."""

    _target: _Target
    _checkpoint: SourceCheckpoint
    _sources: PayloadSources
    _conversion: Conversion
    _max_size: int | str | None
    _fsync: bool
    _progress: bool
    _checksums: bool
    _extra: dict[str, str] = field(default_factory=dict)  # extra state that is not a tensor

    def write_object(self, *, drop: bool) -> None:
        obj = self._checkpoint.obj
        if drop:
            obj, lost = without_opaque(obj)
            if lost:
                self._conversion.remarks.append(f"left out: {some_of(lost, _N_NAMED)}")
        refuse_opaque(obj, self._checkpoint.path)
        if self._checkpoint.metadata:
            extra = dict(ExtraState(self._checkpoint.metadata, self._checkpoint.path))
            obj = {**self._without_metadata(obj, extra), **extra}
        self._conversion.n_tensors = sum(isinstance(leaf, Tensor) for leaf in leaves_of(obj))
        plan = PicklePlan(obj, self._target.file, self._sources)
        self._write([plan], plan.nbytes)

    def write_ranks(self) -> None:
        from ptsave.conversion.rank_writing import RankWriting  # its imports take a second

        writing = RankWriting(self._checkpoint, self._sources, max_size=self._max_size)
        with progress_bar(self._progress, "converting", writing.nbytes, delay=1) as callback:
            writing.write(self._target.path, fsync=self._fsync, progress=callback)
        self._conversion.n_tensors = writing.n_tensors
        self._conversion.nbytes = writing.nbytes
        self._conversion.remarks += writing.remarks

    def write_safetensors(self, *, drop: bool) -> None:
        plan = self._safetensors_plan(self._flat(drop=drop), self._target.file)
        self._write([plan], plan.nbytes)

    def write_directory(self, limit: int, *, drop: bool) -> None:
        tensors = self._flat(drop=drop)
        if self._target.format == "pt":
            tensors = self._without_metadata(tensors)
            tensors = self._sources.contiguous(tensors)
        shards = split(tensors, limit, tied=self._target.format == "pt")
        folder = self._target.files
        with _new_directory(folder), save_errors(folder.path):
            _StreamedShards(
                folder,
                self._target.format,
                shards,
                self._fsync,
                self._checksums,
                self._plan,
                self._write,
            ).write()
        for other in FORMAT_FILES.keys() - {self._target.format}:
            files = FORMAT_FILES[other]
            for name in (files.single, files.index_name):
                if folder.is_taken(name):
                    self._conversion.remarks.append(
                        f"{name} is in the directory, too: readers prefer safetensors files"
                    )

    def _plan(self, shard: Shard, target: FileTarget) -> StreamedPlan:
        if self._target.format == "safetensors":
            return self._safetensors_plan(shard.tensors, target)
        return PicklePlan(shard.under_all_names(), target, self._sources)

    def _safetensors_plan(self, tensors: Mapping[str, Tensor], target: FileTarget) -> StreamedPlan:
        metadata = self._checkpoint.metadata if self._checkpoint.is_safetensors else _PLAIN_METADATA
        metadata = {**metadata, **self._extra}
        return SafetensorsPlan(tensors, target, self._sources, metadata, checksums=self._checksums)

    def _flat(self, *, drop: bool) -> dict[str, Tensor]:
        dtypes = safetensors_dtypes() if self._target.format == "safetensors" else None
        obj = self._checkpoint.obj
        if dtypes is not None and isinstance(obj, Mapping):
            obj = self._without_extra_state(obj)
        flat = flatten(obj, dtypes, keeps_ties=dtypes is None)
        tensors = list(flat.tensors.values())
        if dtypes is None:
            tensors = _without_ties(tensors)
        check_expansion(tensors, self._checkpoint.path, max_size=self._max_size)
        self._conversion.remarks += flat.remarks
        self._conversion.n_tensors = len(flat.tensors)
        if flat.losses and not drop:
            raise ValueError(
                f"{self._target.path} cannot hold {some_of(flat.losses, _N_NAMED)}: "
                "pass --drop (drop=True) to leave out what does not fit"
            )
        if flat.losses:
            self._conversion.remarks.append(f"left out: {some_of(flat.losses, _N_NAMED)}")
        return flat.tensors

    def _without_extra_state(self, obj: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return a state dict without the extra state that goes into safetensors metadata."""
        path, contents = self._checkpoint.path, self._checkpoint.contents
        extra = {
            name: value
            for name, value in items_of(obj)
            if is_extra_state(name, value) and holds_opaque(value) is None
        }
        if not extra:
            return obj
        read = read_entry(extra, lambda tensors: contents.read(tensors, None), path)
        require_loadable(read)
        self._extra = metadata_of(read)
        others = OrderedDict((name, value) for name, value in items_of(obj) if name not in extra)
        set_attributes(others, attributes_of(obj))
        return others

    def _without_metadata(
        self, tensors: dict[str, Tensor], extra: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Tensor]:
        """Return `tensors`, and tied tensors whose names are only in a safetensors file's metadata.

        All other metadata is left out; a remark names it, except the extra state `extra`.
        """
        kept = metadata_names(extra)
        metadata = {k: v for k, v in self._checkpoint.metadata.items() if k not in kept}
        others = {
            name: tensors[first]
            for name, first in metadata.items()
            if name != "format" and name not in tensors and first in tensors
        }
        for name in others:
            first = metadata.pop(name)
            self._conversion.remarks.append(
                f"{name} is {first} according to the metadata: both names were written"
            )
        if metadata.items() - _PLAIN_METADATA.items():
            keys = some_of(sorted(metadata), _N_NAMED)
            self._conversion.remarks.append(f"__metadata__ has no place in a .pt file: {keys}")
        self._conversion.n_tensors += len(others)
        return {**tensors, **others}

    def _write(self, plans: Iterable[StreamedPlan], nbytes: int) -> None:
        """Write files one at a time, because each write uses all threads."""
        with progress_bar(self._progress, "converting", nbytes, delay=1) as callback:
            for plan in plans:
                progress = progress_from(callback, self._conversion.nbytes)
                plan.write(fsync=self._fsync, progress=progress)
                self._conversion.nbytes += plan.nbytes


def _without_ties(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Leave out contiguous tensors that have the memory, dtype and shape of an earlier one."""
    found: dict[Any, Tensor] = {}
    for tensor in tensors:
        place = (storage_id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape)
        key = (*place, tensor.dtype) if tensor.is_contiguous() else id(tensor)
        found.setdefault(key, tensor)
    return list(found.values())


@dataclass
class _StreamedShards(ShardSet):
    """Shards whose tensors' values are not in memory, but in the source."""

    plan: Callable[[Shard, FileTarget], StreamedPlan]
    write_plans: Callable[[Iterable[StreamedPlan], int], None]

    def write_files(self, targets: Sequence[FileTarget]) -> None:
        """Write each shard to its target, with the values from the source."""
        planned = zip(self.shards, targets, strict=True)
        plans = (self.plan(shard, target) for shard, target in planned)
        self.write_plans(plans, sum(shard.nbytes for shard in self.shards))


@contextmanager
def _new_directory(folder: Folder) -> Iterator[None]:
    """Make a directory if it is missing; if the `with` block raises, remove it if it is empty."""
    existed = folder.is_url or os.path.isdir(folder.path)
    with save_errors(folder.path) if folder.is_url else nullcontext():
        folder.make()
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):
                os.rmdir(folder.path)
        raise


# ------------------------------------------------------------------------------------- the target


def _target_of(
    target: str | os.PathLike[str], wanted: Format | None, storage_options: Mapping[str, Any] | None
) -> _Target:
    if wanted not in (None, "pt", "safetensors", "dcp"):
        raise ValueError(f"format must be 'pt', 'safetensors' or 'dcp', not {wanted!r}")
    ends = os.fsdecode(target).endswith("/")
    folder = resolve_folder(target, storage_options)
    path = folder.path
    url = folder if is_url_file(folder) else None
    if wanted == "dcp":
        if url is not None:
            raise UnsupportedUrlError.of(path)
        return _Target(path, "dcp", is_directory=True)
    suffix = os.path.splitext(path)[1].lower()
    if ends or not suffix or (url is None and os.path.isdir(path)):
        return _Target(path, wanted or "safetensors", is_directory=True, url=url)
    implied: Format | None = "pt" if suffix in _PICKLE_SUFFIXES else None
    if suffix == ".safetensors":
        implied = "safetensors"
    if implied is None and wanted is None:
        raise ValueError(f"{path}: {suffix} does not tell the format: pass --format (format=)")
    if implied is not None and wanted not in (None, implied):
        raise ValueError(f"{path}: the suffix {suffix} is not for the format {wanted!r}")
    if url is not None:
        url.require_file_name()
    return _Target(path, implied or wanted or "pt", is_directory=False, url=url)


def _check_target(target: _Target, source: str, *, force: bool) -> None:
    url = target.url
    path = target.path.rstrip("/") if target.is_directory else target.path
    if url is not None:
        is_source = source.rstrip("/") == target.path.rstrip("/")
    else:
        both = os.path.exists(source) and os.path.exists(target.path)
        is_source = both and not target.is_directory and os.path.samefile(source, target.path)
    if is_source:
        raise FileExistsError(errno.EEXIST, "the target is the source itself", target.path)
    is_there = os.path.lexists(path) if url is None else target.is_directory or url.is_there()
    taken = target.path if is_there else ""
    if target.is_directory and is_there:
        if url is None and not os.path.isdir(target.path):
            raise FileExistsError(errno.EEXIST, "exists and is not a directory", path)
        found = sorted(_own_names(target).intersection(target.files.files()))
        taken = target.files.join(found[0]) if found else ""
    if taken and not force:
        raise FileExistsError(errno.EEXIST, "exists already: pass --force (force=True)", taken)
    if url is None and not target.is_directory:
        if taken and not os.path.isfile(taken):
            raise FileExistsError(errno.EEXIST, "exists and is not a file", taken)
        parent = os.path.dirname(target.path.rstrip("/")) or "."
        if not os.path.isdir(parent):
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", parent)


def _own_names(target: _Target) -> set[str]:
    """Return the file names in the target's directory that the conversion may replace."""
    if target.format == "dcp":
        return {".metadata"}
    files = FORMAT_FILES[target.format]
    return {files.single, files.index_name} | files_of_sets(target.files, files)


def _refuse_source(target: _Target, files: Iterable[str]) -> None:
    """Raise FileExistsError if the target would replace a file of the source."""
    if target.url is not None:
        own_files = {target.url.file(name).path for name in target.url.files()}
        for path in own_files.intersection(files) if target.is_directory else ():
            raise FileExistsError(errno.EEXIST, "this is a file of the source", path)
        return
    for path in filter(os.path.exists, files):
        own = os.path.dirname(path) or "."
        if not target.is_directory:
            same = os.path.exists(target.path) and os.path.samefile(path, target.path)
        else:
            layout = FORMAT_FILES.get(target.format)
            there = os.path.isdir(target.path) and os.path.samefile(own, target.path)
            same = there and path.endswith(".distcp" if layout is None else layout.suffix)
            if layout is not None:  # the target's single file may be a link to it
                single = os.path.join(target.path, layout.single)
                same = same or (os.path.exists(single) and os.path.samefile(path, single))
        if same:
            raise FileExistsError(errno.EEXIST, "this is a file of the source", path)
