"""`save`, with torch's signature and semantics; `load` is in `contents.loading`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from ptsave.writing.sharing import SavedBytes


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
    base: str | os.PathLike[str] | None = None,
) -> SavedBytes | None:
    """Save an object to a file as :func:`torch.save` does: the same bytes, but faster and safer.

    Several threads compute checksums and write the data; they read each byte only once.  The
    threads need at most 64 MiB of memory besides the object, and release the GIL.

    Parameters
    ----------
    obj : object
        The object to save.
    f : str, os.PathLike or file-like
        A path, a URL for fsspec (``"s3://bucket/model.pt"``, as a str), or an object with ``write``
        and ``flush``.  A file of :func:`open` is written through its descriptor, at its current
        position.
    pickle_module : module, default pickle
        As for :func:`torch.save`.
    pickle_protocol : int, default 2
        As for :func:`torch.save`.
    fsync : bool, default False
        Whether to sync the file and its directory, so that the data survives power loss after
        `save` returns.
    atomic : bool, default True
        Whether to write a temporary file and rename it to the path.  A reader then always sees the
        complete old file or the complete new file, even if several processes save to the path.
        If the file is writable but its directory is not, saves overwrite the file in place, one at
        a time.  Ignored for file-like objects, and for URLs, where saves are always atomic.
    progress : bool, default False
        Whether to show a progress bar.
    storage_options : mapping, optional
        Options of a URL's file system, such as ``{"endpoint_url": "http://localhost:9000"}``.
    weights_only_check : bool, default False
        Whether to warn of objects that ``weights_only=True`` will refuse to load.  `save` tries the
        pickle with the restricted unpickler; if this fails, it looks for the refused parts.
    base : str or os.PathLike, optional
        An older file in torch's format, with which the new file may share unchanged bytes.  The new
        file has the same bytes as without `base`, and is as complete: either file may be removed.
        `base` may be `f` itself.

    Returns
    -------
    SavedBytes or None
        With `base`, the numbers of bytes that were written and shared.  Otherwise None, as from
        :func:`torch.save`.

    Raises
    ------
    SaveError
        If the file cannot be written, for example because the disk is full.  The error is an
        :class:`OSError` (with ``errno`` and ``filename``) and a :class:`RuntimeError`.  An existing
        file is unchanged unless it was overwritten in place; no temporary file is left.  If fsspec
        cannot write to a URL, the error is an :class:`UnsupportedUrlError`.
    ValueError
        If the name ends with ``.safetensors``: :func:`ptsave.save_model` writes such files.
        After :func:`ptsave.install`, ``torch.save`` accepts any name.
    FileNotFoundError, UnsupportedSourceError, CorruptCheckpointError
        If `base` is missing, is not in torch's format, or is damaged.
    TypeError
        If there is a `base`, but `f` is a file-like object.

    Warns
    -----
    CheckpointWarning
        With `weights_only_check`, if ``weights_only=True`` will refuse parts of the object.  The
        warning names these parts and their types.

    Notes
    -----
    At a URL, the complete new contents appear when the call returns.  Object stores (``s3://``,
    ``gs://``, ``abfs://``) get up to 16 MiB in one request, and larger contents in parts of 16 MiB.
    One part is sent at a time, and a failed upload is discarded.  If the process is killed,
    the sent parts stay invisible in the store until a rule for incomplete uploads removes them.
    A ``memory://`` file is replaced in one step, and a ``file://`` URL is a local path.  On other
    file systems, a temporary file is written and then moved (on some, copied and removed).

    A file can share blocks with `base` on XFS and btrfs (and on NFS 4.2, where the server copies
    them).  Blocks of 64 KiB are compared: by their hashes (XXH3-128) if this process has written
    `base` with a base of its own, else by their bytes.  A tensor's bytes must be at the same place
    in both files, or be moved by a multiple of 4096 bytes.  With
    ``torch.utils.serialization.config.save.storage_alignment = 4096`` they always are.  On other
    file systems, all bytes are written.

    With ``_use_new_zipfile_serialization=False``, torch's own code writes its format of before 1.6.

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
        base,
    )
    return save_with(obj, f, options)


def save_with(obj: object, f: Any, options: SaveOptions) -> SavedBytes | None:
    """Save an object as :func:`save` does."""
    options.check()
    pickling = options.pickle_module, options.pickle_protocol
    new_format = options._use_new_zipfile_serialization
    no_byte_order = options._disable_byteorder_record
    if options.weights_only_check:
        from ptsave.writing.weights_only_check import warn_of_refusals
    if torch.save is stock.save:  # after ptsave.install(), any name is allowed, as with torch
        refuse_safetensors_name(f)
    check_dill_version(options.pickle_module)
    if not is_url_file(f):  # a UrlLocation comes from a checkpoint directory at a URL
        check_save_filelike(f)
    if not engine_can_save(new_format):
        if options.base is not None:
            raise ValueError(
                "base needs torch's zip format, with storages aligned to at most 32 KiB"
            )
        if options.weights_only_check:
            warn_of_refusals(obj, *pickling)
        with _opened_for_torch(f, options.storage_options) as target:
            stock.save(obj, target, *pickling, new_format, no_byte_order)
        return None
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
            base=options.base_for(f),
        )
        writer.write(f)
    if options.base is None:
        return None
    from ptsave.writing.sharing import SavedBytes

    return SavedBytes(plan.nbytes - writer.nbytes_shared, writer.nbytes_shared)


def _opened_for_torch(
    f: Any, storage_options: Mapping[str, Any] | None
) -> AbstractContextManager[Any]:
    """Return a context manager for torch's own writer: it yields `f`, or for a URL an open file."""
    if isinstance(f, (str, os.PathLike)) or (storage_options and not is_url_file(f)):
        f = resolve_file(f, storage_options)
    return f.opened() if is_url_file(f) else nullcontext(f)
