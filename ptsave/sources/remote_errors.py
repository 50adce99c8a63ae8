"""Maps errors of files, local and remote, to an OSError that names the file."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# For legacy files, whose storages torch reads itself.
_TORCH_READ_ERROR = r"read\(\): fd \d+ failed with (.+)"
_BY_STATUS: dict[int, type[OSError]] = {
    401: PermissionError,
    403: PermissionError,
    404: FileNotFoundError,
    410: FileNotFoundError,
}


@contextmanager
def named_errors(name: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in an OSError of the block, also for a RuntimeError of torch's reads."""
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
    """Name the file in an error of the system that names none."""
    if error.errno is not None and error.filename is None:
        error.filename = os.fspath(name)


@contextmanager
def os_errors(url: str) -> Iterator[None]:
    """Map errors of fsspec and its HTTP client in the block to an OSError that names the URL.

    fsspec raises FileNotFoundError whatever a web server answers; the answer is in the cause.
    Errors of HTTP clients are recognized by common attributes, because the clients may not be
    installed.
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
        return _BY_STATUS.get(status, OSError)(f"{url}: its server answers {reason}")
    asyncio = sys.modules.get("asyncio")  # imported already if the error is asyncio's
    timeouts = (TimeoutError,) if asyncio is None else (TimeoutError, asyncio.TimeoutError)
    if isinstance(error, timeouts):
        return TimeoutError(f"{url}: its server did not answer in time")
    kind = ConnectionError if isinstance(error, OSError) else OSError
    return kind(f"{url}: {type(error).__name__}: {error}")
