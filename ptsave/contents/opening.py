"""Opens checkpoints of any kind from any place; a file's content decides which reader it gets."""

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
from ptsave.contents.rank_sets import (
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
from ptsave.sources.kinds import Kind, what_it_is
from ptsave.sources.local import n_files_to_hold, name_file, naming_limit
from ptsave.sources.locations import is_url
from ptsave.sources.ranges import LocalFile, RangeSource
from ptsave.support.calls import warn_user
from ptsave.support.torch_serialization import restricted_unpickler
from ptsave.support.torch_tensors import storage_id

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
    """Open a checkpoint of any kind, if possible without reading its tensors.

    `f`, `verify` and `recover` are those of `ptsave.open`.  Several files give one dict.  More
    files than `n_files_to_hold` are open only while they are read, unless `stays_open`.  `localize`
    gets each file and returns the file to read instead, such as a copy.
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
    """Open the files of a checkpoint as one; the options are those of `open_contents`."""
    if not files.is_one and any(map(is_zero_file, files.paths)):
        refuse_files_of_ranks(files)  # before their pickles are read: they name DeepSpeed's classes
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
    """Open the files of a checkpoint one by one; the options are those of `open_contents`."""
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
    """Open one file of a checkpoint; the options are those of `open_contents`."""
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
    """Open a file by its kind, and close it if that fails."""
    try:
        refuse_file_of_rank(source)
        if is_metadata(source):
            require_files_beside(source)
        with reporting_damage(source.name):
            if is_metadata(source):
                from ptsave.contents.dcp import DcpContents  # imports a torch module, for a second

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
    """Turn the errors that torch raises for unexpected damage into `CorruptCheckpointError`."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise
    except (CorruptCheckpointError, ImportError, MemoryError):
        raise
    except UnpicklingError as error:
        error.path = path  # type: ignore[attr-defined]  # torch's message does not name it
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path} cannot be loaded ({type(error).__name__}: {error})", path=path
        ) from error


def require_checkpoint(source: RangeSource) -> Kind:
    """Return the kind of a checkpoint, or raise NotCheckpointError, which names the format."""
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
        source.park()  # the engine has it open, and many shards need many descriptors
        return UnreadContents(reader, source)
    source.close()
    return UnreadContents(reader)


def require_saved_object(reader: RecordReader) -> None:
    """Raise NotCheckpointError for an archive that `torch.save` has not written."""
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
