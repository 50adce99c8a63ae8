"""Writes a checkpoint in a directory of its own until it is complete: `StagedFile`.

A killed save leaves ``.<name>.<16 hex digits>.ptsave`` beside the file.  Lightning takes the digits
of any name with ``hpc_ckpt_`` for a checkpoint's number, and would resume from one that does not
exist.  So the directory's name contains nothing of the file's.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress

from ptsave.errors import SaveError
from ptsave.support.held_lock import HeldLock, try_lock
from ptsave.support.syncing import sync_path
from ptsave.writing.targets import replaceable_file
from ptsave.writing.url_targets import save_errors

__all__ = ["StagedFile", "staged_file"]

_PREFIX, _SUFFIX = ".staged-", ".ptsave"
_STAGED = re.compile(rf"{re.escape(_PREFIX)}[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
_N_ATTEMPTS = 16


class StagedFile(HeldLock):
    """A file that is written at `path`, in a locked directory beside its `final` path.

    `final` is absolute and without links.  The next StagedFile there removes directories of dead
    processes.
    """

    def __init__(self, final: str) -> None:
        self._final = final
        self._parent, name = os.path.split(final)
        with save_errors(final):
            _remove_leftovers(self._parent)
            self._folder, descriptor = _make_locked(self._parent)
        self._hold(descriptor)
        self.path = os.path.join(self._folder, name)

    def publish(self, *, fsync: bool) -> None:
        """Give the complete file its name, durably with `fsync` if the save synced the file.

        After a SaveError the file that had the name keeps it.
        """
        try:
            with save_errors(self._final):
                with suppress(FileNotFoundError):
                    shutil.copymode(self._final, self.path)  # as a save to that path would
                os.replace(self.path, self._final)
                if fsync:
                    sync_path(self._folder)
                    sync_path(self._parent)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove an unpublished file; do nothing the second time, or in a forked process."""
        if self._descriptor is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._close()


def staged_file(target: object) -> StagedFile | None:
    """Return a place to write a local file whose name Lightning counts; None for all others.

    A file that can only be overwritten in place needs no temporary name, and has no such place.
    """
    if not isinstance(target, str) or not os.path.basename(target).startswith("hpc_ckpt_"):
        return None
    try:
        final = replaceable_file(target)
    except SaveError:
        return None
    return None if os.path.isdir(final) else StagedFile(final)


def _make_locked(parent: str) -> tuple[str, int]:
    """Make a directory, and return it with the descriptor that holds its lock."""
    for attempt in range(_N_ATTEMPTS):
        folder = os.path.join(parent, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        os.mkdir(folder)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another save took it for a leftover
            if attempt == _N_ATTEMPTS - 1:
                raise
            continue
        if try_lock(lock) is not False and os.path.isdir(folder):
            return folder, lock
        os.close(lock)
    raise FileExistsError(f"{_N_ATTEMPTS} directories were taken away by other saves: save again")


def _remove_leftovers(parent: str) -> None:
    """Remove the directories of dead processes; on a file system without locks they stay."""
    for name in filter(_STAGED.fullmatch, os.listdir(parent)):
        folder = os.path.join(parent, name)
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
