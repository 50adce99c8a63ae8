"""`save` and `load`: torch's signatures and semantics, and every choice of engine or torch."""

from __future__ import annotations

import mmap as mmap_module
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch.serialization import (
    DEFAULT_PROTOCOL,
    UNSAFE_MESSAGE,
    get_crc32_options,
    get_default_mmap_options,
)

from ptsave.archive.byte_order import is_native_byte_order
from ptsave.archive.checks import check_compressed_members, check_small_records, check_version
from ptsave.archive.opening import open_archive
from ptsave.archive.reader import RecordReader
from ptsave.archive.stream_reader import open_stream
from ptsave.archive.unpickling import fills_storages, unpickle, unpickle_without_bytes
from ptsave.errors import CorruptCheckpointError, not_checkpoint
from ptsave.sources.kinds import HEAD_NBYTES, is_of_another_program, what_it_surely_is
from ptsave.sources.local import describe
from ptsave.sources.remote_errors import named_errors
from ptsave.sources.urls import refuse_url, refuse_url_target
from ptsave.support import torch_serialization as stock
from ptsave.support.progress import progress_bar
from ptsave.support.torch_serialization import (
    IGNORES_CASE_OF_VARIABLES,
    WARNS_OF_UNUSED_ARGUMENTS,
    ArchiveFileReader,
    check_dill_version,
    check_save_filelike,
    defaults_to_weights_only,
    is_path,
    log_api_usage,
    restricted_unpickler,
)
from ptsave.writing.pickling import pickle_object
from ptsave.writing.planning import engine_can_save, plan_archive
from ptsave.writing.targets import ArchiveWriter, resolve_target

__all__ = ["load", "reader_for", "resolve_weights_only", "save", "unpickling_errors", "wants_mmap"]

_TRUE_VALUES = ("1", "y", "yes", "true")
_TORCHSCRIPT_WARNING = (
    "'torch.load' received a zip file that looks like a TorchScript archive dispatching to "
    "'torch.jit.load' (call 'torch.jit.load' directly to silence this warning)"
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
) -> None:
    """Save an object to a file, as :func:`torch.save` does: the same bytes, faster and safely.

    Data is checksummed and written by several threads, read from memory once, and needs at most
    64 MiB above the object.  The GIL is released meanwhile.

    Parameters
    ----------
    obj : object
        The object to save.
    f : str, os.PathLike or file-like
        A path, or an object with ``write`` and ``flush``.  A real file is written through its
        descriptor, at its current position.
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
        Ignored for file-like objects.
    progress : bool, default False
        Whether to show a progress bar.

    Raises
    ------
    SaveError
        An :class:`OSError` (with ``errno`` and ``filename``) that is also a :class:`RuntimeError`:
        disk full, no permission, missing directory, ...  The old file is unchanged and nothing is
        left beside it.  For a URL it is an :class:`UnsupportedUrlError`.

    Notes
    -----
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
    check_dill_version(pickle_module)
    check_save_filelike(f)
    if is_path(f):
        refuse_url_target(f)
    if not engine_can_save(_use_new_zipfile_serialization):
        return stock.save(
            obj,
            f,
            pickle_module,
            pickle_protocol,
            _use_new_zipfile_serialization,
            _disable_byteorder_record,
        )
    log_api_usage("torch.save")
    f = resolve_target(f)
    data, storages = pickle_object(obj, pickle_module, pickle_protocol)
    plan = plan_archive(f, data, storages, _disable_byteorder_record)
    with progress_bar(progress, "saving", plan.nbytes) as callback:
        writer = ArchiveWriter(
            plan,
            compute_crcs=get_crc32_options(),
            fsync=fsync,
            atomic=atomic,
            progress=callback,
        )
        writer.write(f)
    return None


def load(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool = True,
    progress: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Load a file of :func:`torch.save` or :func:`ptsave.save`, as :func:`torch.load` does.

    Storages are filled by several threads, directly in their final memory: cached bytes come from
    the page cache, others from the disk past it.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        A path, or a seekable object with ``read``.
    map_location : callable, torch.device, str, dict or None
        As for :func:`torch.load`.
    pickle_module : module or None
        As for :func:`torch.load`.
    weights_only : bool or None
        As for :func:`torch.load`: by default only tensors, plain containers and allow-listed types
        are built, and no code of the file runs.
    mmap : bool or None
        Whether to map the file instead of reading it.  Nothing is read ahead then, so nothing is
        verified.
    verify : bool, default True
        Whether every record is compared with its CRC-32, while its bytes are in the cache.  Files
        whose storages were overwritten in place on purpose need ``verify=False``, or
        ``PTSAVE_VERIFY=0`` in the environment where the call cannot be edited.
    progress : bool, default False
        Whether to show a progress bar.
    **pickle_load_args
        Passed to the unpickler if ``weights_only=False``.

    Returns
    -------
    object
        The saved object.

    Raises
    ------
    CorruptCheckpointError
        A :class:`RuntimeError` that names the damaged record, its offset and the entries using it.
    UnsupportedUrlError
        A :class:`FileNotFoundError`: `f` is a URL; :func:`ptsave.open` reads those.
    pickle.UnpicklingError
        As from :func:`torch.load`.

    Notes
    -----
    Formats before torch 1.6, TorchScript archives, compressed archives and ``.safetensors`` paths
    are loaded by torch.  File-like objects other than real files, :class:`io.BytesIO` and fsspec's
    wrappers of local files are read in order, one storage at a time.  The position
    of any file-like object is behind the last storage afterwards, where torch leaves it.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> stream = io.BytesIO()
    >>> torch.save([torch.arange(3), "three"], stream)
    >>> _ = stream.seek(0)
    >>> ptsave.load(stream)
    [tensor([0, 1, 2]), 'three']
    """
    begin = None if is_path(f) else _position(f)
    reader = reader_for(f, mmap, verify)
    restricted = resolve_weights_only(weights_only, pickle_module)
    if reader is not None and reader.has_record("constants.pkl"):
        reader.close()
        warnings.warn(_TORCHSCRIPT_WARNING, UserWarning, stacklevel=2)
        return _load_torchscript(f, map_location, restricted)
    if reader is not None and not reader.engine.all_stored:
        with closing(reader):
            check_compressed_members(reader)
        reader = None
        if not fills_storages(map_location):  # torch would swap bytes that are not there
            module = restricted_unpickler if restricted else pickle_module or pickle
            archive = ArchiveFileReader(os.fspath(f) if is_path(f) else f)
            with unpickling_errors(module):
                return unpickle_without_bytes(archive, map_location, module, pickle_load_args)
    if reader is None:
        with named_errors(describe(f)), _naming_what_it_is(f):
            return stock.load(
                f,
                map_location,
                pickle_module,
                weights_only=restricted,
                mmap=mmap,
                **pickle_load_args,
            )
    log_api_usage("torch.load")
    if pickle_load_args and restricted and WARNS_OF_UNUSED_ARGUMENTS:
        warnings.warn("pickle_load_args only works if `weights_only=False`.", stacklevel=2)
    module = restricted_unpickler if restricted else pickle_module or pickle
    pickle_load_args.setdefault("encoding", "utf-8")
    with (
        closing(reader),
        progress_bar(progress, "loading", reader.engine.nbytes) as reader.progress,
    ):
        check_dill_version(pickle_module)
        overall_storage = _map_file(reader, map_location) if wants_mmap(mmap) else None
        result = _load_archive(reader, map_location, module, overall_storage, pickle_load_args)
        end = None if begin is None else begin + reader.end_of_storages()
    if end is not None:
        f.seek(end)
    return result


def _load_archive(
    reader: RecordReader,
    map_location: Any,
    pickle_module: Any,
    overall_storage: Any,
    pickle_load_args: dict[str, Any],
) -> Any:
    check_version(reader)
    with unpickling_errors(pickle_module):
        result = unpickle(reader, map_location, pickle_module, overall_storage, pickle_load_args)
    if reader.verify:
        check_small_records(reader)
    return result


@contextmanager
def unpickling_errors(pickle_module: Any) -> Iterator[None]:
    """Put torch's advice around the errors of its restricted unpickler."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if pickle_module is not restricted_unpickler or isinstance(error, RuntimeError):
            raise
        raise pickle.UnpicklingError(_weights_only_message(str(error))) from None


@contextmanager
def _naming_what_it_is(f: Any) -> Iterator[None]:
    """Name a file that torch has failed to load and that is known to be something else.

    torch's own words, about pickles and ``weights_only=False``, come after that, because programs
    may look for them; not where the file is another program's.
    """
    begin = None if is_path(f) else _position(f)
    try:
        yield
    except (OSError, MemoryError, CorruptCheckpointError):
        raise
    except Exception as error:
        head, nbytes = _head_of(f, begin)
        what = what_it_surely_is(head, nbytes)
        if what is None:
            raise
        path = describe(f)
        words = "" if is_of_another_program(head) else f"\n{error}"
        raise not_checkpoint(f"{path} is no checkpoint: {what}{words}", path, error) from error


def _position(f: Any) -> Any:
    try:
        return f.tell()
    except Exception:  # of anybody's file-like object
        return None


def _head_of(f: Any, begin: Any) -> tuple[bytes, int]:
    """Return the first bytes of a file that failed to load, and its size; a pickle's if unknown."""
    try:
        if is_path(f):
            with open(f, "rb") as stream:
                return stream.read(HEAD_NBYTES), os.fstat(stream.fileno()).st_size
        nbytes = f.seek(0, os.SEEK_END) - begin
        f.seek(begin)
        head = bytes(f.read(HEAD_NBYTES))
    except Exception:  # the error that is being raised is the one that counts
        return b"\x80\x02", 2
    return head, nbytes


def reader_for(f: Any, mmap: bool | None, verify: bool) -> RecordReader | None:
    """Decide who loads: an open archive for ptsave, or None for torch's own loader.

    torch's loader gets whatever is no zip archive (the formats before torch 1.6, or not a
    checkpoint at all), ``.safetensors`` paths, and file-like objects that cannot be read at any
    position; and it raises the error for arguments that do not go together.
    """
    if is_path(f):
        refuse_url(f)
    elif wants_mmap(mmap):
        return None
    engine = open_archive(f)
    if engine is not None:
        return RecordReader(engine, describe(f), verify=verify)
    return open_stream(f, verify=verify)


def _load_torchscript(f: Any, map_location: Any, restricted: bool) -> Any:
    if restricted:
        raise RuntimeError(
            "Cannot use ``weights_only=True`` with TorchScript archives passed to "
            "``torch.load``. " + UNSAFE_MESSAGE
        )
    return torch.jit.load(f, map_location=map_location)


def resolve_weights_only(weights_only: bool | None, pickle_module: Any) -> bool:
    """Apply torch's default and its environment variables."""
    force = _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    force_not = _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    if force and force_not:
        raise RuntimeError(
            "Only one of `TORCH_FORCE_WEIGHTS_ONLY_LOAD` or `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` "
            "should be set, but both were set."
        )
    restricted = defaults_to_weights_only(pickle_module) if weights_only is None else weights_only
    if force:
        restricted = True
    elif force_not and weights_only is None:
        warnings.warn(
            "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected, since the"
            "`weights_only` argument was not explicitly passed to `torch.load`, forcing "
            "weights_only=False.",
            UserWarning,
            stacklevel=3,
        )
        restricted = False
    if restricted and pickle_module is not None:
        raise RuntimeError("Can not safely load weights when explicit pickle_module is specified")
    return bool(restricted)


def _is_set(variable: str) -> bool:
    value = os.environ.get(variable, "0")
    return (value.lower() if IGNORES_CASE_OF_VARIABLES else value) in _TRUE_VALUES


def wants_mmap(mmap: bool | None) -> bool:
    """Whether files are mapped by a load with that option; None is torch's default."""
    from torch.utils.serialization import config

    return config.load.mmap if mmap is None else mmap


def _map_file(reader: RecordReader, map_location: Any) -> Any:
    """Map the very file that was opened, whatever has got its name meanwhile."""
    shared = get_default_mmap_options() == mmap_module.MAP_SHARED
    if shared and fills_storages(map_location) and not is_native_byte_order(reader):
        raise ValueError(
            f"{reader.path} is in another byte order than this machine, and to load it with "
            "mmap=True and MAP_SHARED would swap the bytes in the file: use MAP_PRIVATE, or "
            "mmap=False"
        )
    descriptor = reader.engine.descriptor
    nbytes = os.fstat(descriptor).st_size
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared, nbytes)


def _weights_only_message(message: str) -> str:
    """Put torch's advice around an error of its restricted unpickler."""
    documentation = (
        "\n\nCheck the documentation of torch.load to learn more about types accepted by default "
        "with weights_only https://pytorch.org/docs/stable/generated/torch.load.html."
    )
    if re.search(r"GLOBAL (\S+) was not an allowed global by default.", message):
        return (
            "Weights only load failed. This file can still be loaded, to do so you have two "
            "options, \033[1mdo those steps only if you trust the source of the checkpoint\033[0m. "
            f"\n\t(1) {UNSAFE_MESSAGE}\n\t(2) Alternatively, to load with `weights_only=True` "
            "please check the recommended steps in the following error message.\n\t"
            f"WeightsUnpickler error: {message}{documentation}"
        )
    if re.search(r"(\S+) must be (\S+) to load", message):
        return f"Weights only load failed. {message}\n {UNSAFE_MESSAGE}\n"
    advice = (
        ""
        if re.search(r"whose module (\S+) is blocked", message)
        else "Please file an issue with the following so that we can make `weights_only=True` "
        "compatible with your use case: WeightsUnpickler error: "
    )
    return f"Weights only load failed. {UNSAFE_MESSAGE}\n{advice}\n\n{message}{documentation}"
