"""Where files are: in local and remote directories, at URLs, and under temporary names.

A directory is a `Location`: a `LocalFolder`, or a `UrlLocation` of a file system that fsspec knows.
`resolve` in writing/targets.py finds the target of a save, and ranges.py opens files for reading.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import Any, TypeAlias

from ptsave.errors import UnsupportedUrlError

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]+"  # one letter would be a Windows drive
_URL = rf"({_SCHEME}::)*{_SCHEME}://"
# A URL that pathlib or normpath has collapsed: s3:/bucket/file.
_COLLAPSED = rf"(?P<first>({_SCHEME}::)*{_SCHEME}:)/(?!/)"

_BY_STATUS: dict[int, type[OSError]] = {
    401: PermissionError,
    403: PermissionError,
    404: FileNotFoundError,
    410: FileNotFoundError,
}

# ---------------------------------------------------------------------------------- directories


class Location:
    """A local or remote directory; its methods take the names of its files.

    `path` is the path or URL.  Methods that only local disks need do nothing here: at a URL, ptsave
    cannot see who writes a temporary file, and needs no sync after the server confirms a file.
    """

    is_url = True
    path: str
    storage_options: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        """The path or URL, for messages."""
        return self.path

    def names(self) -> list[str]:
        """Return the sorted names of all files and directories in the directory."""
        raise NotImplementedError

    def files(self) -> list[str]:
        """Return the names of files at a URL, or of files and directories in a local directory."""
        raise NotImplementedError

    def regular_files(self) -> list[str]:
        """Return the names of the files; an empty list if the directory does not exist."""
        return self.files()

    def join(self, name: str) -> str:
        """Return the path or URL of a file in the directory."""
        raise NotImplementedError

    def file(self, name: str) -> Any:
        """Return the target for a file in the directory: a path or a `UrlLocation`."""
        raise NotImplementedError

    def exists(self, path: str) -> bool:
        """Return whether a path from `join` may exist; always True at a URL."""
        return True

    def is_taken(self, name: str) -> bool:
        """Return whether the name exists, even as a broken link."""
        raise NotImplementedError

    def identity(self, name: str) -> object:
        """Return a value that changes when another file takes the name."""
        raise NotImplementedError

    def bytes_of(self, name: str) -> bytes:
        """Return the contents of a file; no bytes if the file does not exist."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        raise NotImplementedError

    def make(self) -> None:
        """Make the directory, with its parents."""
        raise NotImplementedError

    def remove_all(self) -> None:
        """Remove the directory, if it exists, and the files in it."""
        raise NotImplementedError

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        """Remove temporary files of killed processes, if `is_own` accepts their final names."""

    def check_room(self, nbytes: int) -> None:
        """Raise an OSError if the disk reports too little free space for `nbytes` bytes."""

    def sync(self) -> None:
        """Make the names of the directory's files survive power loss."""

    def locked(self, *, wait: bool = False) -> AbstractContextManager[bool]:
        """Lock the directory for the block; yield True, or False if another process locked it."""
        return nullcontext(True)


class LocalFolder(Location):
    """A local directory."""

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

    def remove_all(self) -> None:
        import shutil

        with suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def remove_leftovers(self, is_own: Callable[[str], bool]) -> None:
        from ptsave import _C

        with suppress(FileNotFoundError):
            for target in {*map(target_of, os.listdir(self.path))} - {""}:
                if is_own(target):
                    _C.remove_leftovers(os.fsencode(self.join(target)))

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
    """Sync a file, or the names in a directory, to the disk, so that it survives power loss."""
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

    A URL that pathlib has shortened to ``s3:/bucket`` is an error; so are options without a URL.
    """
    if is_url(f):
        return True
    refuse_storage_options(storage_options)
    if isinstance(f, (str, os.PathLike)):
        refuse_url(f)
    return False


def refuse_url(path: str | bytes | os.PathLike[Any]) -> None:
    """Raise an error if `path` is a URL, or a URL that pathlib has shortened to ``s3:/bucket``.

    An existing local file is accepted, whatever its name is.
    """
    text = os.fsdecode(path)
    if _looks_like_url(text) and not os.path.exists(text):
        raise UnsupportedUrlError.of(text)


def is_url_target(f: Any) -> bool:
    """Return whether a target is a URL for fsspec.

    A target with ``://`` is a URL even if a directory such as ``s3:`` exists, because another
    program may have made this directory by mistake.
    """
    return isinstance(f, str) and "://" in f and re.match(_URL, f) is not None


def options_of(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of a URL's file system as a dict; raise an error if a key is not a str."""
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
    """Raise an error for a URL, even a shortened ``s3:/bucket``, and for options without a URL."""
    text = os.fsdecode(path)
    if _looks_like_url(text):
        raise UnsupportedUrlError.of(text)
    refuse_storage_options(storage_options)


def url_to_fs(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a URL's file system and the path in it; raise ImportError if a library is missing."""
    try:
        from fsspec.core import url_to_fs as find
    except ImportError as error:
        message = "URLs need fsspec: run `pip install fsspec`"
        raise ImportError(message, name="fsspec") from error
    found: tuple[Any, str] = find(url, **storage_options)
    return found


@contextmanager
def os_errors(url: str) -> Iterator[None]:
    """Turn errors of fsspec and its HTTP client in the block into an OSError that names the URL.

    fsspec raises FileNotFoundError for each error of a web server; ``__cause__`` has the server's
    answer.  Errors of HTTP clients are recognized by common attributes, because the clients may not
    be installed.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        if cause is None and isinstance(error, OSError) and error.errno is None:
            # Most file systems give only the path, without the URL's beginning.
            reason = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, reason, url) from error
        if cause is None or (cause is error and isinstance(error, OSError) and error.args):
            raise
        raise _os_error(url, cause) from error


def _os_error(url: str, error: BaseException) -> OSError:
    status = getattr(error, "status", None)
    if isinstance(status, int):
        reason = f"{status} {getattr(error, 'message', '')}".strip()
        return _BY_STATUS.get(status, OSError)(f"{url}: the server answered {reason}")
    asyncio = sys.modules.get("asyncio")  # imported already if the error is asyncio's
    timeouts = (TimeoutError,) if asyncio is None else (TimeoutError, asyncio.TimeoutError)
    if isinstance(error, timeouts):
        return TimeoutError(f"{url}: the server did not answer in time")
    kind = ConnectionError if isinstance(error, OSError) else OSError
    return kind(f"{url}: {type(error).__name__}: {error}")


def refuse_storage_options(storage_options: Mapping[str, Any] | None) -> None:
    """Raise a TypeError if there are `storage_options` for something that is not a URL."""
    if storage_options:
        raise TypeError("storage_options are only for URLs, and this is not a URL")


def _looks_like_url(text: str) -> bool:
    if ":/" not in text:  # patterns take time to compile
        return False
    if re.match(_URL, text):
        return True
    collapsed = re.match(_COLLAPSED, text)
    return collapsed is not None and not os.path.lexists(collapsed["first"])


def with_path(url: str, change: Callable[[str], str]) -> str:
    """Change the path in a URL, such as ``a`` in ``zip://a::memory://b``; drop an HTTP query."""
    links = url.split("::")
    i = next((i for i, link in enumerate(links) if "://" in link), 0)
    scheme, _, path = links[i].partition("://")
    if scheme in ("http", "https"):
        path = path.partition("?")[0]
    links[i] = f"{scheme}://{change(path)}"
    return "::".join(links)


# ---------------------------------------------------------------------------------- local files

# For legacy files, whose storages torch reads itself.
_TORCH_READ_ERROR = r"read\(\): fd \d+ failed with (.+)"


def describe(f: Any) -> str:
    """Return the name of `f` for messages: a path, a file object's name, or its type."""
    if isinstance(f, (str, os.PathLike)):
        return os.fsdecode(f)
    name = getattr(f, "name", None)
    return name if isinstance(name, str) else f"<{type(f).__name__}>"


def engine_name(name: str) -> bytes:
    """Encode the name of a buffer for the engine, even if a file could not have this name."""
    return name.encode(sys.getfilesystemencoding(), "backslashreplace")


@contextmanager
def named_errors(name: str | os.PathLike[str]) -> Iterator[None]:
    """Add a file's name to an OSError of the block; turn torch's read errors into OSErrors."""
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
    """Add the file's name to an error of the system that does not name a file."""
    if error.errno is not None and error.filename is None:
        error.filename = os.fspath(name)


@contextmanager
def position_kept(f: Any) -> Iterator[None]:
    """After the block, restore the position of a file object, if it has one."""
    position = None
    if hasattr(f, "tell") and hasattr(f, "seek"):
        with suppress(OSError):  # of a pipe or a socket, which is refused later
            position = f.tell()
    try:
        yield
    finally:
        if position is not None:
            f.seek(position)


def real_file(f: Any) -> Any:
    """Return the file object in `f` that reads directly from a file descriptor, or None.

    Subclasses may change the bytes, so the types of `f` and of its raw file must match exactly.
    """
    tempfile = sys.modules.get("tempfile")
    fsspec = sys.modules.get("fsspec.implementations.local")  # Lightning opens files with it
    if tempfile is not None and type(f) is tempfile._TemporaryFileWrapper:
        f = f.file
    elif fsspec is not None and type(f) is fsspec.LocalFileOpener:
        f = f.f
    if type(f) in (io.BufferedReader, io.BufferedWriter, io.BufferedRandom):
        return f if not f.closed and type(f.raw) is io.FileIO else None
    return f if type(f) is io.FileIO and not f.closed else None


Identity: TypeAlias = "tuple[int, ...]"
_N_DESCRIPTORS = 3  # per file: its own, the engine's, and one for direct reads


def n_files_to_hold() -> int:
    """Return how many files may stay open for reading; half of the descriptors remain free."""
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
    """If the block opens more files than the system allows, state the limit in the error."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE or n_files == 1:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason = (
            f"{os.strerror(errno.EMFILE)}: this process may open {limit} files, but has to read "
            f"{n_files} files at the same time. Raise the limit (ulimit -n)"
        )
        raise OSError(errno.EMFILE, reason, error.filename) from error


def identity_of(file: int | str | os.PathLike[str]) -> Identity:
    """Return values that change when the file changes or another file takes its name."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def require_identity(found: Identity, wanted: Identity, path: str) -> None:
    """Raise an OSError if `found` is not `wanted`, because the file was changed or replaced."""
    if found != wanted:
        raise OSError(
            errno.ESTALE,
            "the file was replaced or changed while its checkpoint was being read",
            path,
        )


# ------------------------------------------------------------------------------ temporary names

# The engine names and locks its files by the first rule (`AtomicFile` in csrc/core/io/file.h).  It
# shortens names that are too long; `target_of` understands shortened names, too.
#
# .<name>.<16 hex digits>.ptsave      a new file, beside the one that it replaces
# .<name>.ptsave                      a directory that holds a new directory <name>
# .staged-<16 hex digits>.ptsave      a directory that hides the name of its file
SUFFIX = ".ptsave"
STAGING = r"\.staged-[0-9a-f]{16}\.ptsave"  # a pattern of `staging_name`
_N_DIGITS = 16
_MAX_NAME_BYTES = 255


def name_for(name: str) -> str:
    """Return a new temporary name for a file that will be renamed to `name`."""
    return f".{name}.{_token()}{SUFFIX}"


def staging_name() -> str:
    """Return a new random name for a temporary directory; it does not name the saved file."""
    return f".staged-{_token()}{SUFFIX}"


def _token() -> str:
    import secrets

    return secrets.token_hex(_N_DIGITS // 2)


def folder_for(name: str) -> str:
    """Return the temporary directory's name for a save to `name`; a digest shortens long names."""
    whole = f".{name}{SUFFIX}"
    if len(os.fsencode(whole)) <= _MAX_NAME_BYTES:
        return whole
    import hashlib

    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    return f".{name[:50]}-{digest}{SUFFIX}"


def folders_in(directory: str, prefix: str) -> list[str]:
    """Return the names that begin with `prefix`, and for which `folder_for` directories exist."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [name for name in names if name.startswith(f".{prefix}") and name.endswith(SUFFIX)]
    return [name[1 : -len(SUFFIX)] for name in found]


def target_of(entry: str) -> str:
    """Return the final name of the temporary file `entry`; "" if `entry` is any other name."""
    from ptsave import _core

    return os.fsdecode(_core.target_of_temporary(os.fsencode(entry)))


def rivals_of(temporary: str) -> list[str]:
    """Return the temporary files of other running writers that save to the same path.

    `temporary` is the path of the caller's own file ``.run.pt.4f1c0a93b2d7e856.ptsave``, for
    example.  Files that a killed process has left are not returned.
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
