"""Finds the real file behind a file object, and the names of sources."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any


def describe(f: Any) -> str:
    """Return the name of `f` for messages: a path, a file object's name, or its type."""
    if isinstance(f, (str, os.PathLike)):
        return os.fsdecode(f)
    name = getattr(f, "name", None)
    return name if isinstance(name, str) else f"<{type(f).__name__}>"


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
