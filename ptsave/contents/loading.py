"""`ptsave.load`: loads a checkpoint of any kind; its content decides which reader it gets."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    verify: bool = True,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    device: Any = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a file of :func:`torch.save` or :func:`ptsave.save`, as :func:`torch.load` does.

    Storages are filled by several threads, directly in their final memory: cached bytes come from
    the page cache, others from the disk past it.  The content of a file decides how it is read,
    whatever it is called.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``s3://bucket/model.pt``), or a seekable object with ``read``.  It
        is a ``.pt`` file of any age or a safetensors file; a path or URL may also lead to an index
        of shards or their directory.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`.
    pickle_module : module or None
        As for :func:`torch.load`.
    weights_only : bool or None
        As for :func:`torch.load`: by default only tensors, plain containers and allow-listed types
        are built, and no code of the file runs.
    mmap : bool or None
        Whether to map a local file instead of reading it.  Then nothing is verified, because
        nothing is read ahead.
    verify : bool, default True
        Whether every record is compared with its CRC-32, while its bytes are in the cache.  Files
        whose storages were overwritten in place on purpose need ``verify=False``, or
        ``PTSAVE_VERIFY=0`` in the environment where the call cannot be edited.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    process_group : torch.distributed.ProcessGroup, optional
        Ranks that load the same path or URL together, an archive of torch 1.6 or later.  Rank 0 of
        the group reads each byte once for all, or the first rank of each host does if the file is
        there.  Every rank makes this call, and may choose its own devices.  None: each rank reads.
    device : torch.device, str or int, optional
        Another name of `map_location`.
    **pickle_load_args
        Passed to the unpickler if ``weights_only=False``.

    Returns
    -------
    object
        The saved object; of a safetensors file, and of several files, one dict of tensors.

    Raises
    ------
    CorruptCheckpointError
        A :class:`RuntimeError` that names the damaged record, its offset and the entries using it.
    UnsupportedUrlError
        A :class:`FileNotFoundError`: fsspec cannot read such a URL.
    ValueError
        `mmap` is true, and `f` is no local path.
    pickle.UnpicklingError
        As from :func:`torch.load`.
    RuntimeError, TypeError
        `process_group` has been destroyed, or is no process group; or a rank of it has ended.

    Notes
    -----
    With `process_group`, a failure of one rank (a damaged file, a refused pickle) is an error on
    all ranks, which names the rank and the file.  A chunk of 8 MiB is sent while the next is read.
    A rank needs 40 MiB above its tensors, and compares the checksums itself.  A rank that uses no
    bytes (``map_location="meta"``) keeps none.

    Formats before torch 1.6, TorchScript archives and compressed archives are loaded by torch.
    File-like objects other than real files, :class:`io.BytesIO` and fsspec's wrappers of local
    files are read in order, one storage at a time.  Afterwards the position of a file-like object
    is behind the last storage, where torch leaves it.  A safetensors file has no checksums.

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
        check_flags(verify=verify)
        map_location = location_of(map_location, device)
    options = LoadOptions(
        map_location, pickle_module, weights_only, mmap, verify, progress, pickle_load_args
    )
    return load_source(f, options, storage_options, process_group)


def load_source(
    f: Any,
    options: LoadOptions,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
) -> Any:
    """Load a checkpoint, as `ptsave.load` does; a local archive takes no other system calls."""
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
    """Return the files of a checkpoint in a directory; if there are none, raise as torch does."""
    from ptsave.contents.directories import find_files

    try:
        return find_files(directory)
    except (FileNotFoundError, IsADirectoryError) as error:
        if error.filename != directory:
            raise  # a shard is missing
        words = f"{os.strerror(errno.EISDIR)}: {directory!r}: {error.strerror}"
        raise IsADirectoryError(errno.EISDIR, words, directory) from None


def _load_path(f: Any, options: LoadOptions) -> Any:
    """Load a safetensors file or the files of an index; leave other files to torch."""
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
    """Load a safetensors file from a file object; leave other files to torch."""
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
    """Return the first bytes from a file object's position on, or none if reading fails."""
    try:
        begin = f.tell()
        head = f.read(HEAD_NBYTES)
        f.seek(begin)
    except Exception:  # any error of a user's object: torch says what is missing
        return b""
    return head if isinstance(head, bytes) else b""


def _load_files(files: ShardFiles, options: LoadOptions) -> Any:
    """Load a single file as it is, or several files one after another as one dict."""
    from ptsave.contents.files import merged

    if files.is_one:
        (source,) = files.open()
        return _load_file(source, options)
    objects = ((source.name, _load_file(source, options)) for source in files.open())
    return merged(objects, files)


def _load_file(source: RangeSource, options: LoadOptions, path: Any = None) -> Any:
    """Load an opened file; messages name it by `path`, or else by its source's name."""
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
            f"{source.name}: mmap=True maps local files: pass the path of one, or load it with "
            "mmap=False"
        )
