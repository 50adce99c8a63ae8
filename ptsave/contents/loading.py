"""`ptsave.load`: loads a checkpoint of any format; the content of the file shows the format."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ptsave.archive.loading import LoadOptions, load_file
from ptsave.archive.opening import reader_for
from ptsave.errors import UnsupportedSourceError
from ptsave.sources.kinds import HEAD_NBYTES, is_safetensors
from ptsave.sources.locations import describe, is_url_source
from ptsave.support.calls import check_flags, failing_together, has_others, location_of

if TYPE_CHECKING:
    from ptsave.contents.files import ShardFiles
    from ptsave.sources.ranges import RangeSource

_HEADER_OFFSET = 8  # in a safetensors file


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool | Literal["background"] = True,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    device: Any = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a file of :func:`torch.save` or :func:`ptsave.save`, as :func:`torch.load` does.

    Several threads read the storages directly into their final memory.  Bytes that are in the page
    cache are copied from the cache; other bytes are read from the disk and bypass the cache.  A
    file's content, not its name, decides how it is read.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``s3://bucket/model.pt``), or a seekable object with ``read``.
        The file is a ``.pt`` file of any torch version or a safetensors file.  A path or URL may
        also name an index of shards, or the directory of the shards.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`.
    pickle_module : module or None
        As for :func:`torch.load`.
    weights_only : bool or None
        As for :func:`torch.load`: by default only tensors, plain containers and allow-listed types
        are built, and no code of the file runs.
    mmap : bool or None
        Whether to map a local file instead of reading it.  A mapped file's storages are verified
        only with ``verify="background"``, because their bytes are read later, when they are used.
    verify : bool or "background", default True
        Whether to compare every record with its CRC-32.  If you have overwritten storages in the
        file on purpose, pass ``verify=False``.  If you cannot edit the call, set
        ``PTSAVE_VERIFY=0`` in the environment.  With ``mmap=True``, ``"background"`` returns at
        once and compares on a thread; :func:`ptsave.verified` waits for the verdict.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that together load one ``.pt`` file (torch 1.6 or later), by path or URL.  If all
        hosts have the file, the first rank of each host reads it and sends it to the ranks of its
        host.  Otherwise, rank 0 of the group reads the file and sends it to all ranks.  Every rank
        must make this call, and may choose its own devices.  With None, each rank reads for itself.
    device : torch.device, str or int, optional
        Another name for `map_location`.
    **pickle_load_args
        Passed to the unpickler if ``weights_only=False``.

    Returns
    -------
    object
        The saved object.  For a safetensors file, or for several shards, one dict of all tensors.

    Raises
    ------
    CorruptCheckpointError
        A :class:`RuntimeError` whose message names the damaged record, its offset and its entries.
    UnsupportedUrlError
        fsspec cannot read this URL.  The error is a :class:`FileNotFoundError`.
    ValueError
        `mmap` is true, but `f` is not a local path.  `verify` is "background", but the file cannot
        be mapped and compared (no `mmap`, another format, another device, a safetensors file
        without checksums).
    pickle.UnpicklingError
        As from :func:`torch.load`.
    RuntimeError, TypeError
        `process_group` has been destroyed or is not a process group, or one of its ranks has ended.

    Notes
    -----
    With `process_group`, if one rank fails (a damaged file, a refused pickle), all ranks raise an
    error that names the rank and the file.  The rank that reads sends a chunk of 8 MiB while it
    reads the next chunk.  Each rank compares the checksums itself, and needs about 40 MiB besides
    its tensors.  A rank with ``map_location="meta"`` keeps no bytes.

    torch itself loads files in its format before 1.6, TorchScript archives and compressed archives.
    A file-like object is read in order, one storage at a time, unless it is a real file, an
    :class:`io.BytesIO` or fsspec's wrapper of a local file.  After the call, the position of a
    file-like object is behind the last storage, as after :func:`torch.load`.  Safetensors files
    have no checksums.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> stream = io.BytesIO()
    >>> torch.save([torch.arange(3), "three"], stream)
    >>> _ = stream.seek(0)
    >>> ptsave.load(stream)
    [tensor([0, 1, 2]), 'three']
    """
    with failing_together(process_group, describe(f)):
        in_background = verify == "background"
        compares = True if verify == "background" else verify
        check_flags(verify=compares)
        map_location = location_of(map_location, device)
    options = LoadOptions(
        map_location=map_location,
        pickle_module=pickle_module,
        weights_only=weights_only,
        mmap=mmap,
        verify=compares,
        progress=progress,
        pickle_load_args=pickle_load_args,
    )
    if in_background:
        from ptsave.archive.maps import mapping

        with failing_together(process_group, describe(f)):
            options = mapping(f, options, waits=False)
    return load_source(f, options, storage_options, process_group)


def load_source(
    f: Any,
    options: LoadOptions,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> Any:
    """Load a checkpoint as `ptsave.load` does."""
    if has_others(process_group):
        from ptsave.archive.group_archive import load_by_group

        return load_by_group(f, options, storage_options, process_group)
    if is_url_source(f, storage_options):
        from ptsave.contents.directories import find_files

        return _load_files(find_files(f, storage_options), options)
    try:
        reader = reader_for(f, options.maps, options.verify)
    except IsADirectoryError:
        return _load_files(_files_in(os.fspath(f)), options)
    if reader is None:
        is_path = isinstance(f, (str, os.PathLike))
        return _load_path(f, options) if is_path else _load_stream(f, options)
    return load_file(f, options, reader)


def _files_in(directory: str) -> ShardFiles:
    """Return the files of the checkpoint in a directory; raise IsADirectoryError if it has none."""
    from ptsave.contents.directories import find_files

    try:
        return find_files(directory)
    except (FileNotFoundError, IsADirectoryError) as error:
        if error.filename != directory:
            raise  # a shard is missing
        words = f"{os.strerror(errno.EISDIR)}: {directory!r}: {error.strerror}"
        raise IsADirectoryError(errno.EISDIR, words, directory) from None


def _load_path(f: Any, options: LoadOptions) -> Any:
    """Load a safetensors file or the files of an index; let torch load any other file."""
    from ptsave.contents.directories import find_files

    path: object = os.fspath(f)
    if not isinstance(path, str):
        return load_file(f, options, None)
    try:
        files = find_files(path)
    except (OSError, ValueError) as error:
        if getattr(error, "filename", path) != path:
            raise  # a shard is missing
        return load_file(f, options, None)
    if files.source is not None:
        return _load_file(files.source, options, f)
    return _load_files(files, options)


def _load_stream(f: Any, options: LoadOptions) -> Any:
    """Load a safetensors file from a file object; let torch load any other file."""
    head = _head_of(f)
    if head.lstrip().startswith(b"{"):
        from ptsave.contents.directories import find_files

        begin = f.tell()
        find_files(f)  # refuses an index
        f.seek(begin)
    if head[_HEADER_OFFSET:].startswith(b"{"):
        from ptsave.sources.ranges import open_source

        source = open_source(f)
        if is_safetensors(head, source.nbytes):
            from ptsave.contents.safetensors import load_safetensors

            _refuse_mmap(source, options)
            tensors = load_safetensors(source, options)
            del source  # while it exists, a BytesIO cannot grow
            f.seek(0, os.SEEK_END)
            return tensors
    return load_file(f, options, None)


def _head_of(f: Any) -> bytes:
    """Return the first bytes after a file object's position; no bytes if reading fails."""
    try:
        begin = f.tell()
        head = f.read(HEAD_NBYTES)
        f.seek(begin)
    except Exception:  # a user's object may raise any error; torch then reports it
        return b""
    return head if isinstance(head, bytes) else b""


def _load_files(files: ShardFiles, options: LoadOptions) -> Any:
    """Load a single file; or load several files, and join their dicts into one dict."""
    from ptsave.contents.files import merged

    if files.is_one:
        (source,) = files.open()
        return _load_file(source, options)
    objects = ((source.name, _load_file(source, options)) for source in files.open())
    return merged(objects, files)


def _load_file(source: RangeSource, options: LoadOptions, path: Any = None) -> Any:
    """Load an opened file; `path` is its name in messages, by default the name of `source`."""
    from ptsave.sources.ranges import FsspecFile

    is_remote = isinstance(source, FsspecFile)
    with source.closed_on_error():
        if is_remote:
            _refuse_mmap(source, options)
        if source.kind == "safetensors":
            from ptsave.contents.safetensors import load_safetensors

            return load_safetensors(source, options)
    if is_remote:
        from ptsave.contents.opening import load_whole

        return load_whole(source, options)
    source.close()
    path = source.name if path is None else path
    return load_file(path, options, reader_for(path, options.maps, options.verify))


def _refuse_mmap(source: RangeSource, options: LoadOptions) -> None:
    if options.maps:
        raise UnsupportedSourceError(
            f"{source.name}: mmap=True maps only local files: pass the path of a local file, or "
            "mmap=False"
        )
