"""How many files may be held open, and whether a file that is opened again is the same."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

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
            "the file was replaced or changed while the set of which it is one was read",
            path,
        )
