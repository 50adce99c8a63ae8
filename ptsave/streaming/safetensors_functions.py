"""Faster ``save_file`` and ``load_file`` of ``safetensors.torch``, with ptsave's C++ engine.

The engine handles ordinary calls.  The library's own functions handle all other calls, and report
invalid arguments before anything is written.
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
from ptsave.contents.safetensors import load_safetensors, safetensors_dtypes
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.ranges import open_source
from ptsave.streaming.payload_sources import write_safetensors

_BACKENDS = ("mmap", "pread")  # the library's ways to read


@functools.cache
def originals() -> dict[str, Callable[..., Any]]:
    """Return the library's own functions, which `exchange` replaces."""
    module = require_library()
    return {"load_file": module.load_file, "save_file": module.save_file}


@functools.cache
def require_library() -> Any:
    """Return ``safetensors.torch``; raise ImportError if it or its function `_CHECK` is missing."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "install(safetensors=True) needs the library: pip install safetensors"
        ) from None
    if not hasattr(safetensors.torch, _CHECK):
        raise ImportError(
            f"install(safetensors=True) calls {_CHECK}, which this version of safetensors does not "
            "have: pip install -U safetensors"
        )
    return safetensors.torch


# The library's function that refuses some tensors, such as tensors that share memory.
_CHECK = "_evaluate_tensors_for_save"


def save_file(
    tensors: dict[str, Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    fsync: bool = False,
    checksums: bool = False,
) -> None:
    """Save tensors as ``safetensors.torch.save_file`` does: the same bytes, faster.

    With `checksums`, the metadata has the checksums of the tensors, too.
    The file keeps the mode of the file that it replaces; a new file has mode 0666 minus the umask.
    A symbolic link is followed.  The library's own function sets mode 0600 and replaces the link.
    """
    if any(taker(tensors, filename, metadata) for taker in reversed(_takers)):
        return
    if not engine_can_save(tensors, filename, metadata):
        originals()["save_file"](tensors, filename, metadata)
        return
    getattr(require_library(), _CHECK)(tensors)
    from safetensors import SafetensorError

    path = os.fspath(filename)
    if os.path.isdir(path):  # the library's words for a failed rename
        number = errno.ENOTDIR if path.endswith("/") else errno.EISDIR
        reason = f"I/O error: {os.strerror(number)} (os error {number})"
        raise SafetensorError(f"Error while serializing: {reason}")
    try:
        write_safetensors(tensors, path, metadata or {}, fsync=fsync, checksums=checksums)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SafetensorError(
            f"Error while serializing: I/O error: {reason} (os error {error.errno}) at path "
            f'"{path}"'
        ) from error


def load_file(
    filename: str | os.PathLike[str],
    device: str | int = "cpu",
    *,
    verify: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    """Load a file as ``safetensors.torch.load_file`` does, but into new memory.

    With `verify`, tensors are compared with their checksums, if the file has any.
    The library maps the file, so its tensors are read on first use.  Here, several threads read the
    tensors during the call, and later changes to the file do not change the tensors.
    """
    tensors: dict[str, Tensor] | None = None
    damage: CorruptCheckpointError | None = None
    if _engine_can_load(filename, device, options):
        # After an error, the library's own function runs and reports it.
        try:
            source = open_source(os.fspath(filename))
            with source.closed_on_error():
                if source.kind == "safetensors":
                    tensors = load_safetensors(
                        source, LoadOptions(device, mmap=False, verify=verify)
                    )
            if tensors is None:
                source.close()
        except OSError:
            pass
        except CorruptCheckpointError as error:
            damage = error
    if tensors is None:
        tensors = originals()["load_file"](filename, device, **options)
        if damage is not None:  # the library has not noticed it
            raise damage
    return tensors


Taker: TypeAlias = Callable[[Any, Any, Any], bool]
_takers: list[Taker] = []


@contextmanager
def taken_by(taker: Taker) -> Iterator[None]:
    """Offer `save_file` calls in the block to `taker`, which returns True if it handles a call."""
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def exchange(*pairs: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace the first function of each pair by the second, in all modules that have the first."""
    everything: list[object] = list(sys.modules.values())  # may hold any object
    modules = [each for each in everything if isinstance(each, ModuleType)]
    names = [vars(module) for module in modules]
    olds = [old for old, _ in pairs]
    # This is C++, because there are thousands of modules, and each checkpoint calls it twice.
    for module, name, pair in _C.find_values(names, olds):
        if modules[module].__name__ != __name__:
            setattr(modules[module], name, pairs[pair][1])


def engine_can_save(tensors: Any, filename: Any, metadata: Any) -> bool:
    """Whether these arguments of `save_file` are valid and ordinary, so the engine can save."""
    if not isinstance(tensors, dict) or not tensors or sys.byteorder != "little":
        return False
    if not isinstance(filename, (str, os.PathLike)) or not isinstance(os.fspath(filename), str):
        return False
    # For an empty dict, the library writes empty metadata, but the engine would write none.
    if metadata is not None and not (isinstance(metadata, dict) and metadata):
        return False
    return all(_is_text(each) for pair in (metadata or {}).items() for each in pair) and all(
        isinstance(name, str) and name.isprintable() and name != "__metadata__" and _is_plain(value)
        for name, value in tensors.items()
    )


def _is_text(text: Any) -> bool:
    """Whether a value is Unicode text, for which the library and the engine write equal JSON."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


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
