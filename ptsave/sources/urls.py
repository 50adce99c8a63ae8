"""Recognizes URLs, and refuses them where only local files and directories are served."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ptsave.errors import UnsupportedUrlError

__all__ = [
    "is_url",
    "is_url_source",
    "is_url_target",
    "options_of",
    "refuse_storage_options",
    "refuse_url",
    "refuse_url_target",
    "url_to_fs",
    "with_path",
]

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]+"  # of one letter it is a drive
_URL = rf"({_SCHEME}::)*{_SCHEME}://"
# A URL that pathlib or normpath has collapsed: s3:/bucket/file.
_COLLAPSED = rf"(?P<first>({_SCHEME}::)*{_SCHEME}:)/(?!/)"


def is_url(f: Any) -> bool:
    """Whether something is a URL for fsspec: ``s3://...``, ``memory://...``, ``zip://a::b``."""
    if not isinstance(f, str) or not ("://" in f or ("::" in f and not re.match(_COLLAPSED, f))):
        return False
    return not os.path.exists(f)


def is_url_source(f: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether something to read is a URL for fsspec, and not a path or a file object.

    Raises
    ------
    TypeError
        If it is none and there are options for its file system.
    UnsupportedUrlError
        If pathlib has collapsed it, as `refuse_url` says.
    """
    if is_url(f):
        return True
    refuse_storage_options(storage_options)
    if isinstance(f, (str, os.PathLike)):
        refuse_url(f)
    return False


def refuse_url(path: str | bytes | os.PathLike[Any]) -> None:
    """Refuse to read from a URL, also one that pathlib has collapsed to ``s3:/bucket``.

    An existing local file is not refused, whatever its name.

    Raises
    ------
    UnsupportedUrlError
        If it is one.

    Examples
    --------
    >>> from pathlib import Path
    >>> refuse_url("model.pt")
    >>> refuse_url(Path("s3://bucket/model.pt"))
    Traceback (most recent call last):
    ...
    ptsave.errors.UnsupportedUrlError: [Errno 2] URLs are not served here, only local files and ...
    """
    text = os.fsdecode(path)
    if _looks_like_url(text) and not os.path.exists(text):
        raise UnsupportedUrlError.of(text)


def is_url_target(f: Any) -> bool:
    """Return whether something to write to is a URL for fsspec.

    With two slashes it is one even if there is such a directory: somebody who means S3 may have an
    ``s3:`` from a program that made one.

    Examples
    --------
    >>> is_url_target("s3://bucket/model.pt"), is_url_target("./s3://bucket/model.pt")
    (True, False)
    """
    return isinstance(f, str) and "://" in f and re.match(_URL, f) is not None


def options_of(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments for the file system of a URL.

    Raises
    ------
    TypeError
        If they are something else than names and values.
    """
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
    """Refuse to write to a URL, also one that pathlib has collapsed to ``s3:/bucket``.

    Raises
    ------
    UnsupportedUrlError
        If it is one.
    TypeError
        If it is none and there are options for its file system.
    """
    text = os.fsdecode(path)
    if _looks_like_url(text):
        raise UnsupportedUrlError.of(text)
    refuse_storage_options(storage_options)


def url_to_fs(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and how that calls the file.

    Raises
    ------
    ImportError
        If a library for it is not installed, or fsspec itself.
    """
    try:
        from fsspec.core import url_to_fs as find
    except ImportError as error:
        message = "URLs need fsspec: pip install fsspec, or ptsave[fsspec]"
        raise ImportError(message, name="fsspec") from error
    found: tuple[Any, str] = find(url, **storage_options)
    return found


def refuse_storage_options(storage_options: Mapping[str, Any] | None) -> None:
    """Refuse options for the file system of a URL where something else is read or written.

    Raises
    ------
    TypeError
        If there are any.
    """
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
    """Change the path in a URL: ``a`` in ``zip://a::memory://b.zip``, without a query for HTTP."""
    links = url.split("::")
    i = next((i for i, link in enumerate(links) if "://" in link), 0)
    scheme, _, path = links[i].partition("://")
    if scheme in ("http", "https"):
        path = path.partition("?")[0]
    links[i] = f"{scheme}://{change(path)}"
    return "::".join(links)
