"""`save` and `load`: torch's signatures and semantics."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.serialization import DEFAULT_PROTOCOL, get_crc32_options
from torch.utils.serialization import config as torch_config

from ptsave.archive.loading import LoadOptions
from ptsave.contents.loading import load_source
from ptsave.sources.local import describe
from ptsave.support import torch_serialization as stock
from ptsave.support.flags import check_flags
from ptsave.support.group_call import failing_together
from ptsave.support.progress import progress_bar
from ptsave.support.torch_serialization import (
    check_dill_version,
    check_save_filelike,
    log_api_usage,
)
from ptsave.writing.pickling import pickle_object
from ptsave.writing.planning import engine_can_save, plan_archive
from ptsave.writing.targets import TargetWriter, resolve_file, resolve_target
from ptsave.writing.url_targets import UrlTarget
from ptsave.writing.weights_only_check import warn_of_refusals

__all__ = ["load", "save"]


def save(
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    fsync: bool = False,
    atomic: bool = True,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    weights_only_check: bool = False,
) -> None:
    """Save an object to a file, as :func:`torch.save` does: the same bytes, faster and safely.

    Data is checksummed and written by several threads, read from memory once, and needs at most
    64 MiB above the object.  The GIL is released meanwhile.

    Parameters
    ----------
    obj : object
        The object to save.
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``"s3://bucket/model.pt"``, as a str), or an object with ``write``
        and ``flush``.  A real file is written through its descriptor, at its current position.
    pickle_module : module, default pickle
        As for :func:`torch.save`.
    pickle_protocol : int, default 2
        As for :func:`torch.save`.
    fsync : bool, default False
        Whether the data must survive power loss once `save` has returned: file and directory are
        synced.
    atomic : bool, default True
        Whether a path gets its new contents by rename, so that a reader sees the old file or the
        new one, whatever happens and however many save to it.  If only the file itself may be
        written, not its directory, the file is overwritten in place, by one save at a time.
        Ignored for file-like objects, and for URLs, whose files are always replaced as a whole.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        For the file system of a URL: ``{"endpoint_url": "http://localhost:9000"}``.
    weights_only_check : bool, default False
        Whether to warn of what ``weights_only=True`` will refuse to load: the pickle is run by the
        machine that will load it, and looked through for places to name if that refuses it.

    Raises
    ------
    SaveError
        An :class:`OSError` (with ``errno`` and ``filename``) that is also a :class:`RuntimeError`:
        disk full, no permission, missing directory, server not there, ...  The old file is
        unchanged and nothing is left beside it.  For a URL that fsspec cannot write to (or whose
        package is not installed) it is an :class:`UnsupportedUrlError`.

    Warns
    -----
    CheckpointWarning
        With `weights_only_check`, names the parts that will be refused, with their types.

    Notes
    -----
    At a URL the new contents are there all at once, when the call returns.  Object stores
    (``s3://``, ``gs://``, ``abfs://``) get up to 16 MiB in one request, and more in parts of that
    size, of which one is in memory at a time; an upload that fails is discarded.  If the process is
    killed, its parts stay invisible in the store: a rule for incomplete uploads removes them.
    ``memory://`` gets its contents at once, ``file://`` is the local path.  Other file systems get
    a file under a temporary name, which is moved (for some of them: copied and removed).

    ``_use_new_zipfile_serialization=False`` (the format before torch 1.6) is written by torch.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "tensor.pt")
    ...     ptsave.save({"weight": torch.ones(3)}, path, fsync=True)
    ...     torch.load(path)
    {'weight': tensor([1., 1., 1.])}
    """
    check_flags(fsync=fsync, atomic=atomic, weights_only_check=weights_only_check)
    check_dill_version(pickle_module)
    if not isinstance(f, UrlTarget):  # of a directory, which has its options
        check_save_filelike(f)
    if not engine_can_save(_use_new_zipfile_serialization):
        if weights_only_check:
            warn_of_refusals(obj, pickle_module, pickle_protocol)
        with _opened_for_torch(f, storage_options) as target:
            return stock.save(
                obj,
                target,
                pickle_module,
                pickle_protocol,
                _use_new_zipfile_serialization,
                _disable_byteorder_record,
            )
    log_api_usage("torch.save")
    f = resolve_target(f, storage_options)
    data, storages = pickle_object(obj, pickle_module, pickle_protocol)
    if weights_only_check:
        warn_of_refusals(obj, pickle_module, pickle_protocol, data)
    plan = plan_archive(f, data, storages, _disable_byteorder_record)
    with progress_bar(progress, "saving", plan.nbytes) as callback:
        writer = TargetWriter(
            plan,
            compute_crcs=get_crc32_options(),
            fsync=fsync,
            atomic=atomic,
            progress=callback,
        )
        writer.write(f)
    return None


def _opened_for_torch(
    f: Any, storage_options: Mapping[str, Any] | None
) -> AbstractContextManager[Any]:
    """Return a context with the file that torch's own writer is given: `f`, unless it is a URL."""
    if isinstance(f, (str, os.PathLike)) or (storage_options and not isinstance(f, UrlTarget)):
        f = resolve_file(f, storage_options)
    return f.opened() if isinstance(f, UrlTarget) else nullcontext(f)


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
    **pickle_load_args: Any,
) -> Any:
    """Load a file of :func:`torch.save` or :func:`ptsave.save`, as :func:`torch.load` does.

    Storages are filled by several threads, directly in their final memory: cached bytes come from
    the page cache, others from the disk past it.  The content of a file decides how it is read,
    whatever it is called.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``s3://bucket/model.pt``), or a seekable object with ``read``: of
        a ``.pt`` file of any age, a safetensors file, or (a path only) an index of shards or their
        directory.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`.
    pickle_module : module or None
        As for :func:`torch.load`.
    weights_only : bool or None
        As for :func:`torch.load`: by default only tensors, plain containers and allow-listed types
        are built, and no code of the file runs.
    mmap : bool or None
        Whether to map the file instead of reading it.  Nothing is read ahead then, so nothing is
        verified.  Only for local paths.
    verify : bool, default True
        Whether every record is compared with its CRC-32, while its bytes are in the cache.  Files
        whose storages were overwritten in place on purpose need ``verify=False``, or
        ``PTSAVE_VERIFY=0`` in the environment where the call cannot be edited.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        Arguments for the file system of a URL.
    process_group : torch.distributed.ProcessGroup, optional
        The ranks that load the same path or URL at the same time, one archive of torch 1.6 or
        later: rank 0 of the group reads each byte once, for all, or the first rank of each host
        does, if the file is there.  Every rank calls this, with options of its own, as to where its
        tensors belong.  None: each rank reads.
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
        `mmap` is asked of something else than a local path.
    pickle.UnpicklingError
        As from :func:`torch.load`.
    RuntimeError, TypeError
        `process_group` has been destroyed, or is no process group; or a rank of it has ended.

    Notes
    -----
    With `process_group`, what fails on one rank (the file is damaged, a pickle is refused there)
    is an error on all, which names the rank and the file.  A chunk of 8 MiB is on its way while the
    next is read; a rank needs 40 MiB above its tensors, and compares the checksums itself.  One
    that uses no bytes (``map_location="meta"``) keeps none.

    Formats before torch 1.6, TorchScript archives and compressed archives are loaded by torch.
    File-like objects other than real files, :class:`io.BytesIO` and fsspec's wrappers of local
    files are read in order, one storage at a time.  The position of any file-like object is behind
    the last storage afterwards, where torch leaves it.  A safetensors file has no checksums.

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
    maps = torch_config.load.mmap if mmap is None else mmap
    options = LoadOptions(
        map_location, pickle_module, weights_only, maps, verify, progress, pickle_load_args
    )
    return load_source(f, options, storage_options, process_group)
