"""Opens checkpoints of any kind from any place; a file's content decides how it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.archive.loading import no_map
from ptsave.archive.opening import open_source_archive, reader_for
from ptsave.archive.reader import RecordReader
from ptsave.archive.unpickling import can_defer_reading
from ptsave.contents.contents import (
    Contents,
    FileContents,
    LoadedContents,
    ShardedContents,
    UnreadContents,
)
from ptsave.contents.directories import find_files
from ptsave.contents.files import (
    ShardFiles,
    is_metadata,
    is_zero_file,
    metadata_of,
    name_lost_entries,
    ranks_of_parts,
    refuse_file_of_rank,
    refuse_files_of_ranks,
    refuse_what_came_instead,
    require_files_beside,
    without_lost,
)
from ptsave.errors import CheckpointWarning, CorruptCheckpointError, NotCheckpointError
from ptsave.sources.kinds import Kind, what_it_is
from ptsave.sources.locations import is_url, n_files_to_hold, name_file, naming_limit
from ptsave.sources.ranges import Buffer, FsspecFile, LocalFile, RangeSource
from ptsave.support import config
from ptsave.support.calls import warn_user
from ptsave.support.torch_names import restricted_unpickler, storage_id

if TYPE_CHECKING:
    from ptsave.archive.loading import LoadOptions
    from ptsave.archive.recovery import Recovery

_LEGACY = {"format": "torch before 1.6"}


class OpenOptions(NamedTuple):
    """How to open a checkpoint; the first three fields are arguments of `ptsave.open`."""

    storage_options: Mapping[str, Any] | None = None
    verify: bool = True
    recover: bool = False
    # A function that gets each file and returns the file to read instead, such as a copy.
    localize: Callable[[RangeSource], RangeSource] | None = None
    stays_open: bool = False  # False: if there are many files, each is open only while it is read
    # Whether to open a state dict.  If so, an object of a class that is not allowed raises an
    # error, and torch's loader opens a file of unknown format.
    for_state: bool = False
    # A function that opens a local .pt file as a map; all other files are then refused.
    open_map: Callable[[RangeSource, RecordReader], FileContents] | None = None


_DEFAULTS = OpenOptions()


def open_checkpoint(f: Any, options: OpenOptions = _DEFAULTS) -> Contents:
    """Open the checkpoint at `f`, without reading its tensors if the format allows that."""
    return open_files(find_files(f, options.storage_options, distributed=True), options)


def open_files(files: ShardFiles, options: OpenOptions = _DEFAULTS) -> Contents:
    """Open the files of a checkpoint as one `Contents`."""
    if not files.is_one and any(map(is_zero_file, files.paths)):
        refuse_files_of_ranks(files)  # before reading their pickles, which name DeepSpeed's classes
    parts = list(open_each(files, options))
    if files.is_one:
        return parts[0]
    if not parts:
        raise NotCheckpointError(f"{files.paths[0]}: no shard can be read, not even in part")
    if options.recover:
        files = without_lost(files, ((part.path, part.obj) for part in parts))
    if (ranks := ranks_of_parts(files)) is not None:
        dicts = [part.obj for part in parts if isinstance(part.obj, Mapping)]
        if len(set().union(*dicts)) < sum(map(len, dicts)):  # they have a name in common
            files = files._replace(ranks=ranks)
    return ShardedContents(parts, files)


def open_each(files: ShardFiles, options: OpenOptions = _DEFAULTS) -> Iterator[Contents]:
    """Open the files of a checkpoint one by one."""
    parks = not options.stays_open and len(files.paths) > n_files_to_hold()
    for path in files.paths:
        try:
            with naming_limit(len(files.paths)):
                contents = open_one(files.open_one(path), files, options)
        except CorruptCheckpointError as error:
            if not options.recover or files.is_one:
                raise
            warn_user(f"a shard cannot be read, not even in part: {error}", CheckpointWarning)
            continue
        if parks:
            contents.park()
        yield contents


def open_one(source: RangeSource, files: ShardFiles, options: OpenOptions = _DEFAULTS) -> Contents:
    """Open one file of a checkpoint."""
    try:
        if options.recover:
            source = recovered(source)
        if options.localize is not None and not (is_metadata(source) and is_url(source.name)):
            source = options.localize(source)
        return open_file(source, options)
    except CorruptCheckpointError as error:
        name_lost_entries(error, source.name, files)
        raise


def open_file(source: RangeSource, options: OpenOptions = _DEFAULTS) -> FileContents:
    """Open a file according to its format; close the file if opening fails."""
    with source.closed_on_error():
        if options.for_state:
            return _open_state(source, options)
        refuse_file_of_rank(source)
        can_map = isinstance(source, LocalFile) and source.kind in ("zip", "safetensors")
        if options.open_map is not None and not can_map:
            raise no_map(source.name)
        if is_metadata(source):
            require_files_beside(source)
        with reporting_damage(source.name):
            if is_metadata(source):
                from ptsave.contents.dcp import DcpContents  # slow: imports a large torch module

                return DcpContents(source, verify=options.verify)
            kind = require_checkpoint(source)
            if kind == "safetensors":
                contents = _open_safetensors(source, options)
                contents.obj  # noqa: B018 - made before several threads ask for it
                return contents
            if kind == "legacy":
                return _load_whole(source, _LEGACY, options)
            return _open_zip(source, options)


def _open_state(source: RangeSource, options: OpenOptions) -> FileContents:
    """Open a file with a state dict; a damaged ``*.safetensors`` file is not passed to torch."""
    if source.kind is None:
        refuse_what_came_instead(source)
    if source.kind == "safetensors" or (
        source.kind is None and source.name.endswith(".safetensors")
    ):
        return _open_safetensors(source, options)
    if source.kind == "zip" and isinstance(source, (LocalFile, Buffer)):
        return _open_zip(source, options)
    return _load_whole(source, _LEGACY, options)  # also a remote archive, read once and in order


def _open_safetensors(source: RangeSource, options: OpenOptions) -> FileContents:
    from ptsave.contents.safetensors import SafetensorsContents

    maps = options.open_map is not None
    verify = options.verify and config.current().verify
    contents = SafetensorsContents(source, maps=maps, verify=verify)
    if maps:
        from ptsave.archive.maps import watch

        contents.watch(watch).recall()
    return contents


@contextmanager
def reporting_damage(path: str) -> Iterator[None]:
    """In the ``with`` block, turn unexpected errors into `CorruptCheckpointError`."""
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
    """Return the kind of a checkpoint file; raise NotCheckpointError for any other file."""
    kind = source.kind
    what = what_it_is(source.head, source.nbytes) if kind in (None, "zip") else None
    if what is not None:
        raise NotCheckpointError(f"{source.name} is not a checkpoint: {what}", path=source.name)
    assert kind is not None
    return kind


def _open_zip(source: RangeSource, options: OpenOptions) -> FileContents:
    file = source if isinstance(source, LocalFile) else None
    with ExitStack() as stack:
        opened = source if file is None else stack.enter_context(file.opened())
        reader = open_source_archive(opened, verify=options.verify)
    with ExitStack() as stack:
        stack.callback(reader.close)  # a traceback would keep the reader open
        if options.open_map is not None:
            require_saved_object(reader)
            return options.open_map(source, reader)
        metadata = _metadata_if_whole(reader, options)
        if metadata is not None:
            return _load_whole(source, metadata, options)
        contents = UnreadContents(reader, file)
        stack.pop_all()
    if file is not None and not file.is_parked:
        file.park()  # the engine has it open, and many shards need many descriptors
    else:
        source.close()
    return contents


def _metadata_if_whole(reader: RecordReader, options: OpenOptions) -> dict[str, str] | None:
    """Return an archive's metadata if the archive must be loaded completely; otherwise None."""
    if not options.for_state:
        require_saved_object(reader)
    elif reader.engine.find("constants.pkl") is not None:
        from ptsave.archive.damage import torchscript_error

        raise torchscript_error(reader.path)
    if not reader.engine.all_stored:
        from ptsave.archive.damage import check_compressed_members

        check_compressed_members(reader)
        return {"format": "pt, compressed"}
    if not options.for_state:
        reader.check_version()
    reader.allows_values = options.for_state
    reader.leaves_opaque = not options.for_state
    if not can_defer_reading(reader, restricted_unpickler):
        return metadata_of(reader.small_records())
    if options.for_state:
        reader.check_records()
    return None


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


def _load_whole(
    source: RangeSource, metadata: dict[str, str], options: OpenOptions
) -> LoadedContents:
    from ptsave.archive.loading import LoadOptions

    locations: dict[int, str] = {}

    def stay(storage: Any, location: str) -> Any:
        locations[storage_id(storage)] = location
        return storage

    loading = LoadOptions(
        "cpu" if options.for_state else stay,
        weights_only=True,
        mmap=False,
        verify=options.verify,
        wants_state=options.for_state,
        leaves_opaque=not options.for_state,
    )
    return LoadedContents(load_whole(source, loading), locations, metadata, source)


def load_whole(source: RangeSource, options: LoadOptions) -> Any:
    """Load a file (not safetensors) as a stream; prefetch the records of a remote archive."""
    from ptsave.archive.loading import load_file

    with source.stream() as stream:
        reader: RecordReader | None
        if isinstance(source, FsspecFile) and source.kind == "zip":
            from ptsave.archive.remote import StreamReader

            reader = StreamReader(source, verify=options.verify)
        else:
            reader = reader_for(stream, False, options.verify)
        return load_file(stream, options, reader)


def recovered(source: RangeSource) -> RangeSource:
    """Return `source`, repaired if its end is missing; then a warning names the lost entries."""
    found = recover(source)
    if found is None:
        return source
    if damage := found.damage():
        warn_user(f"{source.name}: {damage}", CheckpointWarning)
    return found.source


def recover(source: RangeSource) -> Recovery | None:
    """Return the repaired file and its losses if a file's end is missing; None for other files."""
    if source.kind == "safetensors":
        from ptsave.contents.safetensors_fields import recover_safetensors

        return recover_safetensors(source)
    if source.kind not in ("zip", None) or not source.nbytes:
        return None
    from ptsave.archive.recovery import recover_archive

    return recover_archive(source)
