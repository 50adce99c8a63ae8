"""The rule of temporary names, and the leftovers of killed processes that have such names.

* ``.<name>.<16 hex digits>.ptsave`` is a new file, beside the one that it replaces.
* ``.<name>.ptsave`` is a directory that holds a new directory ``<name>``.
* ``.staged-<16 hex digits>.ptsave`` is a directory that hides the name of its file.

The engine names and locks its files by the first rule (``AtomicFile`` in csrc/core/io/file.h).
It shortens names that become too long; `target_of` knows these, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress

from ptsave import _C, _core

SUFFIX = ".ptsave"
STAGING = r"\.staged-[0-9a-f]{16}\.ptsave"  # a pattern of `staging_name`
_N_DIGITS = 16
_MAX_NAME_BYTES = 255


def name_for(name: str) -> str:
    """Return a new name for a file to be renamed to `name`."""
    return f".{name}.{_token()}{SUFFIX}"


def staging_name() -> str:
    """Return a new name for a directory that contains nothing of its file's name."""
    return f".staged-{_token()}{SUFFIX}"


def _token() -> str:
    import secrets

    return secrets.token_hex(_N_DIGITS // 2)


def folder_for(name: str) -> str:
    """Return the name of the directory that holds a new `name`; a digest shortens a long one."""
    whole = f".{name}{SUFFIX}"
    if len(os.fsencode(whole)) <= _MAX_NAME_BYTES:
        return whole
    import hashlib

    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return f".{name[:50]}-{digest}{SUFFIX}"


def folders_in(directory: str, prefix: str) -> list[str]:
    """Return the `name` of each `folder_for(name)` in a directory, by the beginning of `name`."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [name for name in names if name.startswith(f".{prefix}") and name.endswith(SUFFIX)]
    return [name[1 : -len(SUFFIX)] for name in found]


def target_of(entry: str) -> str:
    """Return the name that a temporary file was to get; "" for any other name."""
    return os.fsdecode(_core.target_of_temporary(os.fsencode(entry)))


def remove_leftovers(directory: str, is_own: Callable[[str], bool]) -> None:
    """Remove the temporary files of own targets that no process is writing."""
    with suppress(FileNotFoundError):
        for target in {*map(target_of, os.listdir(directory))} - {""}:
            if is_own(target):
                _C.remove_leftovers(os.fsencode(os.path.join(directory, target)))


def rivals_of(temporary: str) -> list[str]:
    """Return other writers' temporary files for the same path, in this process or another.

    `temporary` is the caller's own file, such as ``.run.pt.4f1c0a93b2d7e856.ptsave`` in its
    directory.  Files that a killed process has left do not count.
    """
    folder, own = os.path.split(temporary)
    prefix = re.escape(own[: -_N_DIGITS - len(SUFFIX)])
    same = rf"{prefix}[0-9a-f]{{{_N_DIGITS}}}{re.escape(SUFFIX)}"
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:  # a directory may be writable, but not readable
        return []
    others = [name for name in names if name != own and re.fullmatch(same, name)]
    return [path for path in (os.path.join(folder, name) for name in others) if _is_written(path)]


def _is_written(path: str) -> bool:
    from ptsave.support.locks import is_locked

    with suppress(OSError):  # the file is gone, or another user's
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return is_locked(file)
        finally:
            os.close(file)
    return False
