"""`save`, with torch's signature and semantics; `load` is in `contents.loading`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL, get_crc32_options

from ptsave.support import torch_names as stock
from ptsave.support.calls import progress_bar
from ptsave.support.torch_names import (
    check_dill_version,
    check_save_filelike,
    log_api_usage,
)
from ptsave.writing.planning import SaveOptions, engine_can_save, pickle_object, plan_archive
from ptsave.writing.targets import (
    TargetWriter,
    is_url_file,
    refuse_safetensors_name,
    resolve_file,
    resolve_target,
)


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
    """Save an object to a file as :func:`torch.save` does: the same bytes, but faster and safer.

    Several threads checksum and write the data, and read it from memory once.  They need at most
    64 MiB besides the object, and release the GIL.

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
        Whether the data survives power loss once `save` has returned: file and directory are
        synced.
    atomic : bool, default True
        Whether a path gets its new contents by rename.  A reader then always sees the complete old
        file or the complete new one, even if several processes save to it.  If the file is
        writable but its directory is not, one save at a time overwrites the file in place.
        Ignored for file-like objects, and for URLs, whose files are always replaced as a whole.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        For the file system of a URL: ``{"endpoint_url": "http://localhost:9000"}``.
    weights_only_check : bool, default False
        Whether to warn of objects that ``weights_only=True`` will refuse to load.  The restricted
        unpickler runs the pickle, and if it refuses, the pickle is searched for places to name.

    Raises
    ------
    SaveError
        An :class:`OSError` (with ``errno`` and ``filename``) that is also a :class:`RuntimeError`:
        disk full, no permission, missing directory, unreachable server, ...  The old file is
        unchanged and nothing is left beside it.  For a URL that fsspec cannot write to (or whose
        package is not installed) it is an :class:`UnsupportedUrlError`.
    ValueError
        If the name ends with ``.safetensors``: :func:`ptsave.save_model` writes such files.
        After :func:`ptsave.install`, ``torch.save`` writes any name.

    Warns
    -----
    CheckpointWarning
        With `weights_only_check`: names the parts that will be refused, with their types.

    Notes
    -----
    At a URL the new contents appear all at once, when the call returns.  Object stores
    (``s3://``, ``gs://``, ``abfs://``) get up to 16 MiB in one request, and more in parts of that
    size.  One part is in memory at a time, and a failed upload is discarded.  If the process is
    killed, its parts stay invisible in the store, until a rule for incomplete uploads removes them.
    ``memory://`` gets its contents at once, and ``file://`` is the local path.  Other file systems
    get a file under a temporary name, which is then moved (for some: copied and removed).

    torch itself writes the format before 1.6 (``_use_new_zipfile_serialization=False``).

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "tensor.pt")
    ...     ptsave.save({"weight": torch.ones(3)}, path, fsync=True)
    ...     torch.load(path)
    {'weight': tensor([1., 1., 1.])}
    """
    options = SaveOptions(  # .of(locals()) would take a tenth of a small save's time
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
        fsync,
        atomic,
        progress,
        storage_options,
        weights_only_check,
    )
    save_with(obj, f, options)


def save_with(obj: object, f: Any, options: SaveOptions) -> None:
    """Save an object as :func:`save` does."""
    options.check()
    pickling = options.pickle_module, options.pickle_protocol
    new_format = options._use_new_zipfile_serialization
    no_byte_order = options._disable_byteorder_record
    if options.weights_only_check:
        from ptsave.writing.weights_only_check import warn_of_refusals
    if torch.save is stock.save:  # code that has ptsave installed writes any name, as torch does
        refuse_safetensors_name(f)
    check_dill_version(options.pickle_module)
    if not is_url_file(f):  # a UrlLocation comes from a checkpoint directory at a URL
        check_save_filelike(f)
    if not engine_can_save(new_format):
        if options.weights_only_check:
            warn_of_refusals(obj, *pickling)
        with _opened_for_torch(f, options.storage_options) as target:
            stock.save(obj, target, *pickling, new_format, no_byte_order)
        return
    log_api_usage("torch.save")
    f = resolve_target(f, options.storage_options)
    data, storages = pickle_object(obj, *pickling)
    if options.weights_only_check:
        warn_of_refusals(obj, *pickling, data)
    plan = plan_archive(f, data, storages, no_byte_order)
    with progress_bar(options.progress, "saving", plan.nbytes) as callback:
        writer = TargetWriter(
            plan,
            compute_crcs=get_crc32_options(),
            fsync=options.fsync,
            atomic=options.atomic,
            progress=callback,
        )
        writer.write(f)


def _opened_for_torch(
    f: Any, storage_options: Mapping[str, Any] | None
) -> AbstractContextManager[Any]:
    """Return a context that yields `f` for torch's own writer, or an open file for a URL."""
    if isinstance(f, (str, os.PathLike)) or (storage_options and not is_url_file(f)):
        f = resolve_file(f, storage_options)
    return f.opened() if is_url_file(f) else nullcontext(f)
