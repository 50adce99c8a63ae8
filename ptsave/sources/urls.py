"""Recognizes URLs, and refuses them where only local files and directories are served."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from ptsave.errors import UnsupportedUrlError

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]+"  # one letter is a drive
_URL = rf"({_SCHEME}::)*{_SCHEME}://"
# A URL that pathlib or normpath has collapsed: s3:/bucket/file.
_COLLAPSED = rf"(?P<first>({_SCHEME}::)*{_SCHEME}:)/(?!/)"


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
