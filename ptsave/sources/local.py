"""Local files: names, errors, the file behind a file object, open files' limit and identity."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

# For legacy files, whose storages torch reads itself.
_TORCH_READ_ERROR = r"read\(\): fd \d+ failed with (.+)"


def describe(f: Any) -> str:
    """Return the name of `f` for messages: a path, a file object's name, or its type."""
    if isinstance(f, (str, os.PathLike)):
        return os.fsdecode(f)
    name = getattr(f, "name", None)
    return name if isinstance(name, str) else f"<{type(f).__name__}>"


def engine_name(name: str) -> bytes:
    """Encode the name of memory for the engine, also a name that no file can have."""
    return name.encode(sys.getfilesystemencoding(), "backslashreplace")


@contextmanager
def named_errors(name: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in an OSError of the block, also for a RuntimeError of torch's reads."""
    try:
        yield
    except OSError as error:
        name_file(error, name)
        raise
    except RuntimeError as error:
        reason = re.search(_TORCH_READ_ERROR, str(error))
        if reason is None:
            raise
        number = {os.strerror(each): each for each in errno.errorcode}.get(reason[1], errno.EIO)
        raise OSError(number, reason[1], os.fspath(name)) from error


def name_file(error: OSError, name: str | os.PathLike[str]) -> None:
    """Name the file in an error of the system that names none."""
    if error.errno is not None and error.filename is None:
        error.filename = os.fspath(name)


def position_kept(f: Any) -> AbstractContextManager[None]:
    """Return a context that restores the position of a file object that has one."""
    has_one = hasattr(f, "tell") and hasattr(f, "seek")
    return _position_kept(f) if has_one else nullcontext()


@contextmanager
def _position_kept(f: Any) -> Iterator[None]:
    position = None
    with suppress(OSError):  # of a pipe or a socket, which is refused later
        position = f.tell()
    try:
        yield
    finally:
        if position is not None:
            f.seek(position)


def real_file(f: Any) -> Any:
    """Return the file object that reads straight from a descriptor, or None if `f` has none.

    Subclasses may do anything with the bytes, so only exact types count, also below a buffer.
    """
    if _is_temporary(f):
        f = f.file
    elif _is_fsspec_local(f):
        f = f.f
    if type(f) in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom):
        return f if not f.closed and type(f.raw) is io.FileIO else None
    return f if type(f) is io.FileIO and not f.closed else None


def _is_temporary(f: object) -> bool:
    tempfile = sys.modules.get("tempfile")
    return tempfile is not None and type(f) is tempfile._TemporaryFileWrapper


def _is_fsspec_local(f: object) -> bool:
    """Return whether `f` is fsspec's wrapper of a local file, as Lightning opens checkpoints."""
    local = sys.modules.get("fsspec.implementations.local")
    return local is not None and type(f) is local.LocalFileOpener


Identity: TypeAlias = "tuple[int, ...]"
_N_DESCRIPTORS = 3  # per file: its own, the engine's, and one for direct reads


def n_files_to_hold() -> int:
    """Return how many files may be open for reading; half of the room is for others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    try:
        n_open = len(os.listdir("/proc/self/fd"))
    except OSError:
        n_open = limit // 2
    return max(1, (limit - n_open) // (2 * _N_DESCRIPTORS))


@contextmanager
def naming_limit(n_files: int) -> Iterator[None]:
    """Name the limit if the set of files that the block opens is too large for it."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE or n_files == 1:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason = (
            f"{os.strerror(errno.EMFILE)}: this process may have {limit} of them, and the "
            f"{n_files} of this set are read together: raise the limit (ulimit -n)"
        )
        raise OSError(errno.EMFILE, reason, error.filename) from error


def identity_of(file: int | str | os.PathLike[str]) -> Identity:
    """Return values that tell a file, by descriptor or path, from another file of its name."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def require_identity(found: Identity, wanted: Identity, path: str) -> None:
    """Raise an OSError if a file that was opened again is another file by now."""
    if found != wanted:
        raise OSError(
            errno.ESTALE,
            "the file was replaced or changed while its checkpoint was being read",
            path,
        )
