"""Directories into which several files are written: local ones, and those at URLs."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ptsave import _C, _core
from ptsave.sources.kinds import regular_only
from ptsave.support.syncing import sync_path
from ptsave.writing.targets import resolve

if TYPE_CHECKING:
    from ptsave.writing.url_targets import UrlTarget

__all__ = ["Folder", "LocalFolder", "UrlFolder", "resolve_folder"]


class LocalFolder:
    """A directory of this machine.

    Parameters
    ----------
    path : str
        The directory.
    """

    def __init__(self, path: str) -> None:
        self.name = path

    def make(self) -> None:
        """Make the directory, with its parents."""
        os.makedirs(self.name, exist_ok=True)

    def files(self) -> list[str]:
        """Return the names of everything in it."""
        return os.listdir(self.name)

    def file(self, name: str) -> str:
        """Return the target for a file in it."""
        return os.path.join(self.name, name)

    def exists(self, name: str) -> bool:
        """Return whether there is anything of that name, also a link that leads nowhere."""
        return os.path.lexists(self.file(name))

    def bytes_of(self, name: str) -> bytes:
        """Return the contents of a file, empty if it is not there."""
        try:
            with open(self.file(name), "rb", opener=regular_only) as stream:
                return stream.read()
        except FileNotFoundError:
            return b""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        _C.remove_file(os.fsencode(self.file(name)))

    def check_room(self, nbytes: int) -> None:
        """Refuse files that do not fit on the disk, as far as that tells."""
        if self._has_room(nbytes):
            return
        _C.finish_releases()  # of files that were replaced
        if not self._has_room(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)

    def _has_room(self, nbytes: int) -> bool:
        disk = os.statvfs(self.name)
        return not disk.f_blocks or nbytes <= disk.f_bavail * disk.f_frsize

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        """Remove temporary files of killed processes that were writing one of our files."""
        entries = os.listdir(os.fsencode(self.name))
        for target in {os.fsdecode(_core.target_of_temporary(entry)) for entry in entries}:
            if is_own(target):
                _C.remove_leftovers(os.fsencode(self.file(target)))

    def sync(self) -> None:
        """Let the names of its files survive power loss."""
        sync_path(self.name)


class UrlFolder:
    """A directory of a file system that fsspec knows; methods as of `LocalFolder`.

    Parameters
    ----------
    target : UrlTarget
        The directory.
    """

    def __init__(self, target: UrlTarget) -> None:
        self.name = target.url
        self.target = target

    def make(self) -> None:
        self.target.make_directory()

    def files(self) -> list[str]:
        return self.target.files()

    def file(self, name: str) -> UrlTarget:
        return self.target.child(name)

    def exists(self, name: str) -> bool:
        return self.file(name).exists()

    def bytes_of(self, name: str) -> bytes:
        return self.file(name).contents()

    def remove(self, name: str) -> None:
        self.file(name).remove()

    def check_room(self, nbytes: int) -> None:
        """Do nothing: no file system far away says how much room there is."""

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        """Do nothing: nobody can see whether a temporary file is being written."""

    def sync(self) -> None:
        """Do nothing: a server that has confirmed a file has it."""


Folder: TypeAlias = LocalFolder | UrlFolder


def resolve_folder(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Folder:
    """Return the directory that a path or a URL names.

    Raises
    ------
    UnsupportedUrlError, TypeError
        As from `resolve`.
    """
    target = resolve(directory, storage_options)
    return LocalFolder(target) if isinstance(target, str) else UrlFolder(target)
