"""Opens checkpoints of any kind and from anywhere: their content decides who reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, TypeAlias

from ptsave.archive.loading import LoadOptions, load_file
from ptsave.archive.opening import open_source_archive, reader_for
from ptsave.archive.reader import RecordReader
from ptsave.archive.unpickling import can_defer_reading
from ptsave.contents.checkpoint_files import find_files
from ptsave.contents.contents import Contents, LoadedContents, UnreadContents
from ptsave.contents.metadata import metadata_of
from ptsave.contents.rank_directories import (
    is_metadata,
    refuse_file_of_rank,
    require_files_beside,
)
from ptsave.contents.shard_files import (
    ShardFiles,
    is_zero_file,
    name_lost_entries,
    refuse_files_of_ranks,
    without_lost,
)
from ptsave.errors import CheckpointWarning, CorruptCheckpointError, NotCheckpointError
from ptsave.sources.file_limits import n_files_to_hold, naming_limit
from ptsave.sources.kinds import Kind, what_it_is
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.sources.remote_errors import name_file
from ptsave.sources.urls import is_url
from ptsave.support.torch_serialization import restricted_unpickler
from ptsave.support.torch_tensors import storage_id
from ptsave.support.user_warnings import warn_user

__all__ = [
    "open_contents",
    "open_each",
    "open_file",
    "open_files",
    "open_one",
    "reporting_damage",
    "require_checkpoint",
    "require_saved_object",
]

_LEGACY = {"format": "torch before 1.6"}
Localizer: TypeAlias = Callable[[RangeSource], RangeSource]


def open_contents(
    f: Any,
    storage_options: Mapping[str, Any] | None = None,
    *,
    verify: bool = True,
    recover: bool = False,
    localize: Localizer | None = None,
    stays_open: bool = False,
) -> Contents:
    """Open a checkpoint of any kind, and read none of its tensors if that can be.

    Of more files than the process may well hold open, each is open only while it is read.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A ``.pt`` file of any age or a safetensors file under any name; a directory of shards or
        their index, of torch.distributed.checkpoint or its metadata, or of files of which each rank
        has written one; by path or URL; or a seekable file object, from its current position on.
    storage_options : mapping, optional
        For the file system of a URL.
    verify : bool, default True
        Whether checksums are compared.
    recover : bool, default False
        Whether files that have lost their end are read as far as they are there.  A
        `CheckpointWarning` names the entries that are left out.
    localize : callable, optional
        Gets each file and returns the one to read instead, such as a copy.
    stays_open : bool, default False
        Whether all files stay open, however many there are.

    Returns
    -------
    Contents
        Of several files one dict.

    Raises
    ------
    NotCheckpointError
        If a file is something else; the message names its format.
    CorruptCheckpointError
        If one is damaged, or lacks a tensor that the index promises; it names the file.
    pickle.UnpicklingError
        If its pickle is of another kind than torch's restricted machine reads.
    OSError, TypeError, ValueError
        As from `find_files`; of several files, if one holds no dict, or two the same name.

    Examples
    --------
    >>> import io, torch
    >>> stream = io.BytesIO()
    >>> torch.save({"weight": torch.ones(2)}, stream)
    >>> _ = stream.seek(0)
    >>> open_contents(stream).kind
    'pt'
    """
    files = find_files(f, storage_options, distributed=True)
    return open_files(
        files, verify=verify, recover=recover, localize=localize, stays_open=stays_open
    )


def open_files(
    files: ShardFiles,
    *,
    verify: bool = True,
    recover: bool = False,
    localize: Localizer | None = None,
    stays_open: bool = False,
) -> Contents:
    """Open the files of a checkpoint as one; parameters and errors as of `open_contents`."""
    if not files.is_one and any(map(is_zero_file, files.paths)):
        refuse_files_of_ranks(files)  # before their pickles, which name DeepSpeed's classes
    parts = list(
        open_each(files, verify=verify, recover=recover, localize=localize, stays_open=stays_open)
    )
    if files.is_one:
        return parts[0]
    if not parts:
        raise NotCheckpointError(f"{files.paths[0]}: nothing of any shard can be read")
    if recover:
        files = without_lost(files, ((part.path, part.obj) for part in parts))
    from ptsave.contents.rank_sets import ranks_of_parts
    from ptsave.contents.sharded import ShardedContents

    ranks = ranks_of_parts(files)
    if ranks is not None and ShardedContents.have_same_names(parts):
        files = files._replace(ranks=ranks)
    return ShardedContents(parts, files)


def open_each(
    files: ShardFiles,
    *,
    verify: bool = True,
    recover: bool = False,
    localize: Localizer | None = None,
    stays_open: bool = False,
) -> Iterator[Contents]:
    """Open the files of a checkpoint one by one; parameters and errors as of `open_contents`."""
    parks = not stays_open and len(files.paths) > n_files_to_hold()
    for path in files.paths:
        try:
            with naming_limit(len(files.paths)):
                contents = open_one(
                    files.open_one(path), files, verify=verify, recover=recover, localize=localize
                )
        except CorruptCheckpointError as error:
            if not recover or files.is_one:
                raise
            warn_user(f"nothing of a shard can be read: {error}", CheckpointWarning)
            continue
        if parks:
            contents.park()
        yield contents


def open_one(
    source: RangeSource,
    files: ShardFiles,
    *,
    verify: bool = True,
    recover: bool = False,
    localize: Localizer | None = None,
) -> Contents:
    """Open one of the files of a checkpoint; parameters and errors as of `open_contents`."""
    try:
        if recover:
            from ptsave.contents.recovery import recovered

            source = recovered(source)
        is_copied = localize is not None and not (is_metadata(source) and is_url(source.name))
        return open_file(localize(source) if localize and is_copied else source, verify=verify)
    except CorruptCheckpointError as error:
        name_lost_entries(error, source.name, files)
        raise


def open_file(source: RangeSource, *, verify: bool) -> Contents:
    """Open one file; errors as of `open_contents`."""
    try:
        refuse_file_of_rank(source)
        if is_metadata(source):
            require_files_beside(source)
        with reporting_damage(source.name):
            if is_metadata(source):
                from ptsave.contents.dcp import DcpContents  # torch's module takes a second

                return DcpContents(source, verify=verify)
            kind = require_checkpoint(source)
            if kind == "safetensors":
                from ptsave.contents.safetensors import SafetensorsContents

                return SafetensorsContents(source)
            if kind == "legacy":
                return _load_whole(source, _LEGACY, verify)
            return _open_zip(source, verify)
    except BaseException:
        source.close()
        raise


@contextmanager
def reporting_damage(path: str) -> Iterator[None]:
    """Map errors that torch raises for unexpected damage to `CorruptCheckpointError`."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise
    except (CorruptCheckpointError, ImportError, MemoryError):
        raise
    except UnpicklingError as error:
        error.path = path  # type: ignore[attr-defined]  # torch's message does not say it
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path} cannot be loaded ({type(error).__name__}: {error})", path=path
        ) from error


def require_checkpoint(source: RangeSource) -> Kind:
    """Return the kind of a checkpoint; refuse a file that does not begin as one of any kind.

    Raises
    ------
    NotCheckpointError
        The message names the format of the file.
    """
    kind = source.kind
    what = what_it_is(source.head, source.nbytes) if kind in (None, "zip") else None
    if what is not None:
        raise NotCheckpointError(f"{source.name} is no checkpoint: {what}", path=source.name)
    assert kind is not None
    return kind


def _open_zip(source: RangeSource, verify: bool) -> Contents:
    reader = open_source_archive(source, verify=verify)
    require_saved_object(reader)
    if not reader.engine.all_stored:
        from ptsave.archive.checks import check_compressed_members

        check_compressed_members(reader)
        return _load_whole(source, {"format": "pt, compressed"}, verify)
    reader.check_version()
    reader.leaves_opaque = True
    if not can_defer_reading(reader, restricted_unpickler):
        return _load_whole(source, metadata_of(reader.small_records()), verify)
    if isinstance(source, LocalFile):
        source.park()  # the engine has it open: of many shards each descriptor counts
        return UnreadContents(reader, source)
    source.close()
    return UnreadContents(reader)


def require_saved_object(reader: RecordReader) -> None:
    """Refuse an archive that `torch.save` has not written."""
    if reader.engine.find("constants.pkl") is not None:
        raise NotCheckpointError(
            f"{reader.path} is a TorchScript archive: load it with torch.jit.load", path=reader.path
        )
    if reader.engine.find("data.pkl") is None:
        raise NotCheckpointError(
            f"{reader.path} is a zip archive that torch.save has not written: it has no data.pkl",
            path=reader.path,
        )


def _load_whole(source: RangeSource, metadata: dict[str, str], verify: bool) -> LoadedContents:
    locations: dict[int, str] = {}

    def stay(storage: Any, location: str) -> Any:
        locations[storage_id(storage)] = location
        return storage

    with source.stream() as stream:
        options = LoadOptions(stay, weights_only=True, verify=verify, leaves_opaque=True)
        obj = load_file(stream, options, reader_for(stream, options.mmap, verify))
    return LoadedContents(obj, locations, metadata, source)
