"""``save_file`` and ``load_file`` of ``safetensors.torch``, by the engine.

The engine takes the ordinary case.  Anything else, every error included, is the library's own
function's, which gets the call whole and before anything has been written.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ptsave import _C
from ptsave.archive.loading import LoadOptions
from ptsave.contents.safetensors_header import safetensors_dtypes
from ptsave.contents.safetensors_loading import load_safetensors
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.opening import open_source
from ptsave.streaming.streamed_files import write_safetensors

__all__ = [
    "engine_can_save",
    "exchange",
    "load_file",
    "originals",
    "require_library",
    "save_file",
    "taken_by",
]

_BACKENDS = ("mmap", "pread")  # of the library, which reads by either


@functools.cache
def originals() -> dict[str, Callable[..., Any]]:
    """Return the library's own functions, which are ptsave's after `exchange`."""
    module = require_library()
    return {"load_file": module.load_file, "save_file": module.save_file}


@functools.cache
def require_library() -> Any:
    """Return ``safetensors.torch``.

    Raises
    ------
    ImportError
        If it is not installed, or too old to be asked for its checks.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "install(safetensors=True) needs the library: pip install safetensors"
        ) from None
    if not hasattr(safetensors.torch, _CHECK):
        raise ImportError(
            f"safetensors has no {_CHECK}, which is asked for its checks: pip install -U it"
        )
    return safetensors.torch


# Refuses what the format, or the library, does not hold: tensors that share memory, for example.
_CHECK = "_evaluate_tensors_for_save"


def save_file(
    tensors: dict[str, Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    fsync: bool = False,
) -> None:
    """Save tensors as ``safetensors.torch.save_file`` does: the same bytes, faster.

    Parameters
    ----------
    tensors, filename, metadata
        As for ``safetensors.torch.save_file``.
    fsync : bool, default False
        Whether the file is on the disk, past all caches, when the call returns.

    Raises
    ------
    Exception
        What ``safetensors.torch.save_file`` raises for these arguments.
    safetensors.SafetensorError
        If the file cannot be written; the one that was there is unchanged.

    Notes
    -----
    The file gets the mode of the one it replaces, or 0666 less the umask, and a symbolic link is
    followed; the library gives it 0600 and replaces the link.
    """
    if any(taker(tensors, filename, metadata) for taker in reversed(_takers)):
        return
    if not engine_can_save(tensors, filename, metadata):
        originals()["save_file"](tensors, filename, metadata)
        return
    getattr(require_library(), _CHECK)(tensors)
    from safetensors import SafetensorError

    path = os.fspath(filename)
    if os.path.isdir(path):  # in the library's words: renaming the new file fails
        number = errno.ENOTDIR if path.endswith("/") else errno.EISDIR
        reason = f"I/O error: {os.strerror(number)} (os error {number})"
        raise SafetensorError(f"Error while serializing: {reason}")
    try:
        write_safetensors(tensors, path, metadata or {}, fsync=fsync)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SafetensorError(
            f"Error while serializing: I/O error: {reason} (os error {error.errno}) at path "
            f'"{path}"'
        ) from error


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", **options: Any
) -> dict[str, Tensor]:
    """Load a file as ``safetensors.torch.load_file`` does, into memory of its own.

    The library's tensors are a mapping of the file, whose pages are read when they are touched.
    These are read at once, by several threads, and do not change with the file.

    Parameters
    ----------
    filename, device, **options
        As for ``safetensors.torch.load_file``.

    Raises
    ------
    Exception
        What ``safetensors.torch.load_file`` raises for these arguments and this file.
    """
    tensors = None
    if _engine_can_load(filename, device, options):
        tensors = _loaded(os.fspath(filename), device)
    if tensors is None:
        loaded: dict[str, Tensor] = originals()["load_file"](filename, device, **options)
        return loaded
    return tensors


Taker: TypeAlias = Callable[[Any, Any, Any], bool]
_takers: list[Taker] = []


@contextmanager
def taken_by(taker: Taker) -> Iterator[None]:
    """Offer the calls of `save_file` in the block to a function, which may take them.

    Parameters
    ----------
    taker : callable
        Gets the tensors, the file's name and the metadata; returns whether that is all.
    """
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def exchange(*pairs: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """Put the second function of each pair in the place of the first, whatever module has that.

    Names of modules only: libraries import these functions by name.
    """
    everything: list[object] = list(sys.modules.values())  # which may hold anything
    modules = [each for each in everything if isinstance(each, ModuleType)]
    names = [vars(module) for module in modules]
    olds = [old for old, _ in pairs]
    # Libraries have thousands of modules, and checkpoints exchange and put back.
    for module, name, pair in _C.find_values(names, olds):
        if modules[module].__name__ != __name__:
            setattr(modules[module], name, pairs[pair][1])


def engine_can_save(tensors: Any, filename: Any, metadata: Any) -> bool:
    """Whether nothing about these arguments is an error, or out of the ordinary."""
    if not isinstance(tensors, dict) or not tensors or sys.byteorder != "little":
        return False
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(os.fspath(filename), str):
        return False
    return (metadata is None or _is_ordinary(metadata)) and all(
        _is_name(name) and name != "__metadata__" and _is_plain(value)
        for name, value in tensors.items()
    )


def _is_ordinary(metadata: Any) -> bool:
    # The library writes those of an empty dict.
    return (
        isinstance(metadata, dict)
        and len(metadata) > 0
        and all(_is_text(each) for pair in metadata.items() for each in pair)
    )


def _is_text(text: Any) -> bool:
    """Whether both write the same JSON for it: all that is Unicode."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair
        return False
    return True


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text.isprintable()


def _is_plain(value: Any) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
        return False
    if value.is_meta or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    dtypes = safetensors_dtypes()
    return (
        value.dtype in dtypes
        and not (dtypes[value.dtype] == "F4" and value.dim() == 0)
        and value.is_contiguous()
        and (value.numel() == 0 or value.untyped_storage().nbytes() > 0)
    )


def _engine_can_load(filename: Any, device: Any, options: Mapping[str, Any]) -> bool:
    if not isinstance(filename, (str, os.PathLike)) or sys.byteorder != "little":
        return False
    if not options.keys() <= {"backend"} or options.get("backend", "mmap") not in _BACKENDS:
        return False
    return device == "cpu" and isinstance(os.fspath(filename), str) and os.path.isfile(filename)


def _loaded(path: str, device: Any) -> dict[str, Tensor] | None:
    """Return the tensors of a local file; None if the library has to say what is wrong with it."""
    try:
        source = open_source(path)
        with source.closed_on_error():
            if source.kind == "safetensors":
                return load_safetensors(source, LoadOptions(map_location=device, mmap=False))
        source.close()
    except (OSError, CorruptCheckpointError):
        pass
    return None
