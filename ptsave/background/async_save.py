"""`async_save`: copies the tensors now and writes the file later."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

from torch.serialization import DEFAULT_PROTOCOL, get_crc32_options

from ptsave import _C
from ptsave.background import saves as background
from ptsave.background.save_future import SaveFuture
from ptsave.support import torch_names as stock
from ptsave.support.torch_names import (
    check_dill_version,
    check_save_filelike,
    log_api_usage,
    storage_alignment,
)
from ptsave.writing.planning import SaveOptions, engine_can_save, pickle_object, plan_archive
from ptsave.writing.targets import absolute, refuse_safetensors_name, resolve_target


def async_save(
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
    staging: Literal["blocking", "background"] = "blocking",
    max_staged_bytes: int | None = None,
    when_full: Literal["wait", "raise"] = "wait",
    storage_options: Mapping[str, Any] | None = None,
    weights_only_check: bool = False,
    base: str | os.PathLike[str] | None = None,
) -> SaveFuture:
    """Save the current state of an object, while the program goes on and may change the object.

    The call pickles the object and copies the bytes of its tensors, at the speed of memory.  After
    the call has returned, threads that do not hold the GIL write the file.  The file has the same
    bytes as a file of :func:`ptsave.save`, and the save is equally atomic and durable.  Saves are
    written one after another, in the order of the calls.

    Parameters
    ----------
    obj, f, pickle_module, pickle_protocol
    fsync, atomic, progress, storage_options, weights_only_check, base
        As for :func:`ptsave.save`.  A relative path is relative to the current directory during
        the call.  `base` is opened when the write begins, after earlier saves.  If `f` is a
        file-like object, the program must not use it until the save ends.
    staging : {"blocking", "background"}
        When the tensors are copied.  With "blocking", the call copies them, and the program may
        overwrite them when it returns.  With "background", the call does not wait for the copy, and
        the program may overwrite the tensors when ``future.wait_staged()`` returns.  Tensors
        outside of CPU memory are always copied during the call.
    max_staged_bytes : int or None
        The most bytes that all unfinished saves together may hold.  None means the value of the
        environment variable ``PTSAVE_MAX_STAGED_BYTES``.  If the variable is not set, the limit is
        half of the memory that this process may use (the memory of the machine or container,
        divided by ``LOCAL_WORLD_SIZE``).  While other saves are unfinished, the limit is also at
        most half of the memory that would be free without their copies.
    when_full : {"wait", "raise"}
        What to do if there is no room now: "wait" for earlier saves, or "raise" StagingFullError.

    Returns
    -------
    SaveFuture
        A :class:`concurrent.futures.Future` whose result is None.  ``future.result()`` raises the
        error if the write fails (disk full, ...).  At exit, the interpreter waits for unfinished
        saves, and warns of each failed save whose result the program has not asked for.

    Raises
    ------
    StagingFullError
        If there is no room and ``when_full="raise"``, or if the tensors have more bytes than
        the limit.  Nothing is copied then.
    SaveError
        If `f` can never be written: `f` is a directory, the directory of `f` does not exist, or `f`
        is a URL that fsspec cannot write to.
    ValueError
        If an option has an unknown value, if the name ends with ``.safetensors``, or if only
        :func:`ptsave.save` can write the format (``_use_new_zipfile_serialization=False``, or a
        storage alignment above 32 KiB).

    Notes
    -----
    ptsave keeps the memory of the copies for the next save; :func:`ptsave.release_staging_memory`
    frees it.  :func:`ptsave.save` and :func:`ptsave.load` do not wait for unfinished saves.  After
    a fork, the parent process finishes its saves; in the child, the futures of these saves fail.

    Examples
    --------
    >>> import os, tempfile, torch, ptsave
    >>> weight = torch.ones(3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "step-1.pt")
    ...     future = ptsave.async_save({"weight": weight}, path)
    ...     _ = weight.zero_()  # training goes on
    ...     future.result()  # the file is there, or this says why not
    ...     torch.load(path)
    {'weight': tensor([1., 1., 1.])}
    """
    return async_save_with(obj, f, SaveOptions.of(locals()))


def async_save_with(obj: object, f: Any, options: SaveOptions) -> SaveFuture:
    """Save an object as :func:`async_save` does."""
    options.check()
    limit = background.limit_of(options.max_staged_bytes, "max_staged_bytes")
    refuse_safetensors_name(f)
    check_dill_version(options.pickle_module)
    check_save_filelike(f)
    if not engine_can_save(options._use_new_zipfile_serialization):
        raise ValueError(
            "async_save writes only torch's zip format, with storages aligned to at most 32 KiB; "
            "use ptsave.save for any other format"
        )
    log_api_usage("torch.save")
    named = target = resolve_target(f, options.storage_options)
    if isinstance(named, str):
        target = absolute(named)
    pickling = options.pickle_module, options.pickle_protocol
    data, storages = pickle_object(obj, *pickling)
    if options.weights_only_check:
        from ptsave.writing.weights_only_check import warn_of_refusals

        warn_of_refusals(obj, *pickling, data)
    skip_data = stock.options.skip_data
    with ExitStack() as undo:  # explicit, because a traceback may keep the memory alive
        nbytes = 0 if skip_data else storages.staging_nbytes(storage_alignment())
        reservation = background.reserve(nbytes, limit, wait=options.when_full == "wait")
        undo.callback(reservation.release)
        try:
            snapshot = _C.Snapshot(storages, without_bytes=skip_data)
        except MemoryError:
            raise MemoryError(
                f"the system has no memory for a copy of {nbytes} bytes of tensors: free memory, "
                "or use ptsave.save, which needs no copy"
            ) from None
        undo.callback(snapshot.release)
        if not storages.in_reach and not skip_data:
            _copy_from_devices(storages, snapshot.storages)
        save = background.BackgroundSave(
            plan_archive(named, data, snapshot.storages, options._disable_byteorder_record),
            snapshot,
            reservation,
            target,
            options,
            compute_crcs=get_crc32_options(),
        )
        undo.pop_all()  # from here on, `save` releases the memory
    background.start(save, stage_in_background=options.staging == "background")
    return save.future


def release_staging_memory() -> None:
    """Free the memory that :func:`ptsave.async_save` keeps for the next save.

    If tensors were on an accelerator, this also frees the page-locked memory that torch keeps after
    copies by ptsave and by other code.  Copies for unfinished saves stay.

    Examples
    --------
    >>> import ptsave
    >>> ptsave.release_staging_memory()
    """
    _C.trim_staging_pool()
    _C.release_pinned_memory()


def _copy_from_devices(sources: _C.StorageList, copies: _C.StorageList) -> None:
    # On the calling thread, because its streams compute the values; torch waits for the copies.
    targets = _C.untyped_storages(copies)
    try:
        for i, source in enumerate(_C.untyped_storages(sources)):
            if targets[i].device != source.device:
                targets[i].copy_(source)
    finally:
        targets.clear()  # otherwise a traceback would keep the copies
