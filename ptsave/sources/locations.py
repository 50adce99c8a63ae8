"""Where files are: directories near and far, and URLs.

A directory is a `Location`: a `LocalFolder`, or a `UrlLocation` of a file system that fsspec knows.
`resolve` in writing/targets.py decides what is written to, opening.py what is read from.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import MappingProxyType
from typing import Any

from ptsave.errors import UnsupportedUrlError

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]+"  # one letter is a drive
_URL = rf"({_SCHEME}::)*{_SCHEME}://"
# A URL that pathlib or normpath has collapsed: s3:/bucket/file.
_COLLAPSED = rf"(?P<first>({_SCHEME}::)*{_SCHEME}:)/(?!/)"


# ---------------------------------------------------------------------------------- directories


class Location:
    """A directory, near or far, and its files, by their names.

    `path` is the path or URL.  The methods that only local disks need do nothing here.  At a URL,
    the writer of a temporary file cannot be seen.  A server that confirms a file has stored it.
    """

    is_url = True
    path: str
    storage_options: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        """The path or URL, for messages."""
        return self.path

    def names(self) -> list[str]:
        """Return the names of everything in the directory, sorted, for a reader."""
        raise NotImplementedError

    def files(self) -> list[str]:
        """Return the names for a save: of everything locally, of the files at a URL."""
        raise NotImplementedError

    def regular_files(self) -> list[str]:
        """Return the names of the files; none if there is no directory."""
        return self.files()

    def join(self, name: str) -> str:
        """Return the path or URL of a file in the directory."""
        raise NotImplementedError

    def file(self, name: str) -> Any:
        """Return the target for a file in the directory: a path or a `UrlLocation`."""
        raise NotImplementedError

    def exists(self, path: str) -> bool:
        """Return whether a path from `join` may exist; True at a URL, as opening the file tells."""
        return True

    def is_taken(self, name: str) -> bool:
        """Return whether the name exists, also as a link that leads nowhere."""
        raise NotImplementedError

    def identity(self, name: str) -> object:
        """Return a value that changes when another file takes the name."""
        raise NotImplementedError

    def bytes_of(self, name: str) -> bytes:
        """Return the contents of a file, empty if the file does not exist."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        raise NotImplementedError

    def make(self) -> None:
        """Make the directory, with its parents."""
        raise NotImplementedError

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        """Remove temporary files that killed processes left while writing our files."""

    def check_room(self, nbytes: int) -> None:
        """Raise if `nbytes` do not fit on the disk, as far as the disk tells."""

    def sync(self) -> None:
        """Make the names of the directory's files survive power loss."""

    def locked(self, *, wait: bool = False) -> AbstractContextManager[bool]:
        """Lock the directory in a block, which gets False if another process has locked it."""
        return nullcontext(True)


class LocalFolder(Location):
    """A directory of this machine."""

    is_url = False

    def __init__(self, path: str) -> None:
        self.path = path

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    def files(self) -> list[str]:
        return os.listdir(self.path)

    def regular_files(self) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(self.path) as entries:
            return [entry.name for entry in entries if _is_file(entry)]
        return []

    def join(self, name: str) -> str:
        return os.path.join(self.path, name)

    file = join

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_taken(self, name: str) -> bool:
        return os.path.lexists(self.join(name))

    def identity(self, name: str) -> object:
        from ptsave.sources.local import identity_of

        return identity_of(self.join(name))

    def bytes_of(self, name: str) -> bytes:
        from ptsave.sources.kinds import regular_only

        try:
            with open(self.join(name), "rb", opener=regular_only) as stream:
                return stream.read()
        except FileNotFoundError:
            return b""

    def remove(self, name: str) -> None:
        from ptsave import _C

        _C.remove_file(os.fsencode(self.join(name)))

    def make(self) -> None:
        os.makedirs(self.path, exist_ok=True)

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        from ptsave.sources.temporary import remove_leftovers

        remove_leftovers(self.path, is_own)

    def check_room(self, nbytes: int) -> None:
        from ptsave import _C

        if self._has_room(nbytes):
            return
        _C.finish_releases()  # frees the room of replaced files
        if not self._has_room(nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def _has_room(self, nbytes: int) -> bool:
        disk = os.statvfs(self.path)
        return not disk.f_blocks or nbytes <= disk.f_bavail * disk.f_frsize

    def sync(self) -> None:
        sync_path(self.path)

    def locked(self, *, wait: bool = False) -> AbstractContextManager[bool]:
        from ptsave.support.locks import locked_directory

        return locked_directory(self.path, wait=wait)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Write a file, or the names in a directory, to the disk, to survive power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads nowhere
        return False


# ----------------------------------------------------------------------------------------- URLs


def is_url(f: Any) -> bool:
    """Return whether a value is a URL: ``s3://...``, ``memory://...``, ``zip://a::b``."""
    if not isinstance(f, str) or not ("://" in f or ("::" in f and not re.match(_COLLAPSED, f))):
        return False
    return not os.path.exists(f)


def is_url_source(f: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether a source is a URL for fsspec, not a path or a file object.

    Raises for a URL that pathlib has collapsed, and for options without a URL.
    """
    if is_url(f):
        return True
    refuse_storage_options(storage_options)
    if isinstance(f, (str, os.PathLike)):
        refuse_url(f)
    return False


def refuse_url(path: str | bytes | os.PathLike[Any]) -> None:
    """Refuse to read from a URL, also from one that pathlib has collapsed to ``s3:/bucket``.

    An existing local file is accepted, whatever its name.
    """
    text = os.fsdecode(path)
    if _looks_like_url(text) and not os.path.exists(text):
        raise UnsupportedUrlError.of(text)


def is_url_target(f: Any) -> bool:
    """Return whether a target is a URL for fsspec.

    With two slashes it is a URL even if such a directory exists: another program may have made a
    directory ``s3:`` by mistake.

    >>> is_url_target("s3://bucket/model.pt"), is_url_target("./s3://bucket/model.pt")
    (True, False)
    """
    return isinstance(f, str) and "://" in f and re.match(_URL, f) is not None


def options_of(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a URL's file system options as a dict; raise if they are no mapping of names."""
    found: Any = {} if storage_options is None else storage_options
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(
            "storage_options must be a dict of arguments of the URL's file system, such as "
            f'{{"anon": True}}, not {found!r:.80}'
        )
    return dict(found)


def refuse_url_target(
    path: str | bytes | os.PathLike[Any], storage_options: Mapping[str, Any] | None = None
) -> None:
    """Refuse to write to a URL, also to a collapsed one; refuse options without a URL."""
    text = os.fsdecode(path)
    if _looks_like_url(text):
        raise UnsupportedUrlError.of(text)
    refuse_storage_options(storage_options)


def url_to_fs(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a URL's file system and the file's name there; raise if a library is missing."""
    try:
        from fsspec.core import url_to_fs as find
    except ImportError as error:
        message = "URLs need fsspec: pip install fsspec, or ptsave[fsspec]"
        raise ImportError(message, name="fsspec") from error
    found: tuple[Any, str] = find(url, **storage_options)
    return found


def refuse_storage_options(storage_options: Mapping[str, Any] | None) -> None:
    """Raise if there are options for a URL's file system, but no URL."""
    if storage_options:
        raise TypeError("storage_options are for URLs")


def _looks_like_url(text: str) -> bool:
    if ":/" not in text:  # patterns take time to compile
        return False
    if re.match(_URL, text):
        return True
    collapsed = re.match(_COLLAPSED, text)
    return collapsed is not None and not os.path.lexists(collapsed["first"])


def with_path(url: str, change: Callable[[str], str]) -> str:
    """Change the path in a URL: ``a`` in ``zip://a::memory://b.zip``; drop an HTTP query."""
    links = url.split("::")
    i = next((i for i, link in enumerate(links) if "://" in link), 0)
    scheme, _, path = links[i].partition("://")
    if scheme in ("http", "https"):
        path = path.partition("?")[0]
    links[i] = f"{scheme}://{change(path)}"
    return "::".join(links)
