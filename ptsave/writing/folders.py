"""Directories into which several files are written: local ones, and directories at URLs."""

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


class LocalFolder:
    """A directory of this machine."""

    def __init__(self, path: str) -> None:
        self.name = path

    def make(self) -> None:
        """Make the directory, with its parents."""
        os.makedirs(self.name, exist_ok=True)

    def files(self) -> list[str]:
        """Return the names of everything in the directory."""
        return os.listdir(self.name)

    def file(self, name: str) -> str:
        """Return the target for a file in the directory."""
        return os.path.join(self.name, name)

    def exists(self, name: str) -> bool:
        """Return whether the name exists, also as a link that leads nowhere."""
        return os.path.lexists(self.file(name))

    def bytes_of(self, name: str) -> bytes:
        """Return the contents of a file, empty if the file does not exist."""
        try:
            with open(self.file(name), "rb", opener=regular_only) as stream:
                return stream.read()
        except FileNotFoundError:
            return b""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        _C.remove_file(os.fsencode(self.file(name)))

    def check_room(self, nbytes: int) -> None:
        """Raise if `nbytes` do not fit on the disk, as far as the disk tells."""
        if self._has_room(nbytes):
            return
        _C.finish_releases()  # frees the room of replaced files
        if not self._has_room(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.name)

    def _has_room(self, nbytes: int) -> bool:
        disk = os.statvfs(self.name)
        return not disk.f_blocks or nbytes <= disk.f_bavail * disk.f_frsize

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        """Remove temporary files that killed processes left while writing our files."""
        entries = os.listdir(os.fsencode(self.name))
        for target in {os.fsdecode(_core.target_of_temporary(entry)) for entry in entries}:
            if is_own(target):
                _C.remove_leftovers(os.fsencode(self.file(target)))

    def sync(self) -> None:
        """Make the names of the directory's files survive power loss."""
        sync_path(self.name)


class UrlFolder:
    """A directory of a file system that fsspec knows, with the methods of `LocalFolder`."""

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
        """Do nothing: remote file systems do not say how much room they have."""

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        """Do nothing: at a URL, a temporary file's writer cannot be seen."""

    def sync(self) -> None:
        """Do nothing: a server that has confirmed a file has stored it."""


Folder: TypeAlias = LocalFolder | UrlFolder


def resolve_folder(
    directory: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Folder:
    """Return the directory that a path or a URL names."""
    target = resolve(directory, storage_options)
    return LocalFolder(target) if isinstance(target, str) else UrlFolder(target)
