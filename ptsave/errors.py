"""The exceptions and the warning of ptsave; many also inherit from the type that torch raises."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import warnings
from typing import Any

RECOVERY_ADVICE = "ptsave.open(recover=True), or a command with --recover, reads the intact part"
# torch's advice when miniz fails; people search for it.
MINIZ_ADVICE = (
    ". This is an internal miniz error. If you are seeing this error, there is a high likelihood "
    "that your checkpoint file is corrupted. This can happen if the checkpoint was not saved "
    "properly, was transferred incorrectly, or the file was modified after saving."
)


class CorruptCheckpointError(RuntimeError):
    r"""A checkpoint is damaged: it is not an archive, is cut short, or differs from its checksums.

    Attributes
    ----------
    path : str
        The file, or a description of the file-like object.
    record : str or None
        The damaged archive record, for example ``"data/7"``.
    offset : int or None
        Position of the damage in the archive, in bytes.
    entries : list of str
        The entries of the saved object that use the record, for example
        ``["model.layers.0.weight"]``; empty if they are unknown.
    rank : int or None
        The rank that found the damage, if several ranks made the call together.

    Examples
    --------
    >>> import io, ptsave
    >>> try:
    ...     ptsave.load(io.BytesIO(b"PK\x03\x04 and then nothing"))
    ... except ptsave.CorruptCheckpointError as error:
    ...     print("failed reading zip archive" in str(error))
    True
    """

    # Only ptsave's modules read these.  An error that an older release pickled gets these values.
    lacks_end = False  # True if the end of an archive is missing
    finding = ""  # what the engine has found, without path and offset
    advice = ""  # the part of the message that helps only in Python code

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        record: str | None = None,
        offset: int | None = None,
        entries: list[str] | None = None,
        rank: int | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(message)
        self.path = path
        self.record = record
        self.offset = offset
        self.entries = entries or []
        self.rank = rank
        self.advice = advice

    @property
    def brief(self) -> str:
        """The message without the advice that helps only in Python code."""
        return str(self).replace(self.advice, "")


class NotCheckpointError(CorruptCheckpointError):
    r"""A file is not a checkpoint; the message names the file's format and a remedy.

    Examples
    --------
    >>> import io, ptsave
    >>> try:
    ...     ptsave.open(io.BytesIO(b"<!DOCTYPE html><title>404</title>"))
    ... except ptsave.NotCheckpointError as error:
    ...     print("HTML page" in str(error))
    True
    """


class _NotCheckpointPickleError(NotCheckpointError, pickle.UnpicklingError):
    """A file of another format; torch usually raises an UnpicklingError for it."""


class _NotCheckpointEOFError(NotCheckpointError, EOFError):
    """An empty file; torch raises an EOFError for it."""


class _NotCheckpointKeyError(NotCheckpointError, KeyError):
    """A file of zeros; torch takes it for a tar archive and raises a KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


def not_checkpoint(message: str, path: str, error: Exception | None = None) -> NotCheckpointError:
    """Return the error for a file of another format; if possible, it has the type of `error`."""
    kind = NotCheckpointError
    if isinstance(error, pickle.UnpicklingError):
        kind = _NotCheckpointPickleError
    elif isinstance(error, EOFError):
        kind = _NotCheckpointEOFError
    elif isinstance(error, KeyError):
        kind = _NotCheckpointKeyError
    return kind(message, path=path)


class EntryNotFoundError(KeyError):
    """A saved object has no entry, or several entries, with the wanted name."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


class CorruptPickleError(CorruptCheckpointError, pickle.UnpicklingError):
    """An archive's pickle is damaged; torch raises an UnpicklingError for that."""


class CorruptRecordError(CorruptCheckpointError, ValueError):
    """A small record has unexpected contents; torch's loader raises a ValueError for that."""


def corrupt_archive(
    path: str,
    reason: str,
    detail: str,
    *,
    record: str | None,
    offset: int | None,
    lacks_end: bool,
) -> CorruptCheckpointError:
    """Return the error for damage that the engine has found; the engine calls this function.

    If torch's reader finds the same damage, `reason` has the words of torch's message.
    """
    advice = MINIZ_ADVICE if reason.startswith("Pytorch") else ""
    message = f"{path}: {reason}{advice} ({detail})"
    if record is not None:
        message += f"; record {record}"
    if offset is not None:
        message += f"; offset {offset}"
    kind = CorruptPickleError if record == "data.pkl" else CorruptCheckpointError
    error = kind(message, path=path, record=record, offset=offset, advice=advice)
    error.finding = f"{detail} ({reason})"
    error.lacks_end = lacks_end
    return error


def bare_message(error: BaseException, path: str) -> str:
    """Return an error's message without path, record name and advice that helps only in Python."""
    if not isinstance(error, CorruptCheckpointError):
        return str(error).removeprefix(f"{path}: ")
    return error.brief.removeprefix(f"{path}: ").removeprefix(f"record {error.record}: ")


class MalformedPickleError(CorruptPickleError):
    """The restricted unpickler failed at byte `offset` of ``data.pkl``.

    torch's unpickler raises errors such as IndexError for a damaged pickle.  For each of these
    types, there is a class that inherits from this class and from that type.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # some of these types format their message in another way

    @classmethod
    def from_error(cls, error: Exception, offset: int, path: str) -> MalformedPickleError | None:
        """Return the error to raise instead of `error`; None if `error` itself is to be raised."""
        if not cls.stands_for(error):
            return None
        where = f"{path}: data.pkl, offset {offset}"
        return cls._in_place_of(error, where, path=path, record="data.pkl", offset=offset)

    @classmethod
    def of_file(cls, error: Exception, path: str) -> MalformedPickleError:
        """Return the error to raise instead of `error` for a file that is not an archive."""
        return cls._in_place_of(error, f"{path}: damaged, or not a checkpoint", path=path)

    @classmethod
    def stands_for(cls, error: Exception) -> bool:
        """Return whether there is an error of this class to raise instead of `error`."""
        return type(error) in _MALFORMED

    @classmethod
    def _in_place_of(cls, error: Exception, where: str, **attributes: Any) -> MalformedPickleError:
        kind = type(error)
        words = f"{kind.__name__}: {error}" if str(error) else kind.__name__
        malformed = _MALFORMED[kind](f"{words} ({where})", **attributes)
        if isinstance(error, UnicodeDecodeError):
            for name in ("encoding", "object", "start", "end", "reason"):
                setattr(malformed, name, getattr(error, name))
        return malformed


def _both(name: str, base: type[Any], kind: type[Exception]) -> Any:
    """Return a new exception type that inherits from `base` and from `kind`."""
    return type(name, (base, kind), {"__module__": __name__, "__qualname__": name})


_MALFORMED: dict[type[Exception], type[MalformedPickleError]] = {
    RuntimeError: MalformedPickleError,
    struct.error: _both("MalformedPickleStructError", MalformedPickleError, struct.error),
    **{
        kind: _both(f"MalformedPickle{kind.__name__}", MalformedPickleError, kind)
        for kind in (
            *(AssertionError, AttributeError, EOFError, IndexError, KeyError, OverflowError),
            *(RecursionError, TypeError, UnicodeDecodeError, ValueError),
        )
    },
}


class SaveError(OSError, RuntimeError):
    """A checkpoint could not be written; an existing file is usually unchanged.

    An existing file changes only if the save overwrites it in place: with ``atomic=False``, or if
    a rename cannot replace it.

    The error is an :class:`OSError` with ``errno`` and ``filename``.  It is also a
    :class:`RuntimeError`, like the errors of :func:`torch.save`.  If Python has a type for the
    `errno` (:class:`PermissionError`, :class:`FileNotFoundError`, :class:`IsADirectoryError`,
    ...), the error also has that type.

    Examples
    --------
    >>> import ptsave
    >>> try:
    ...     ptsave.save([1, 2], "/no/such/directory/list.pt")
    ... except FileNotFoundError as error:
    ...     print(error.errno, error.filename, isinstance(error, ptsave.SaveError))
    2 /no/such/directory/list.pt True
    """

    def __new__(cls, *args: object) -> SaveError:
        """Make an error that also has Python's type for the `errno`."""
        combined = _SAVE_ERRORS.get(type(OSError(*args)), cls)
        return super().__new__(combined if cls is SaveError else cls, *args)

    @classmethod
    def from_os_error(cls, error: OSError, path: str) -> SaveError:
        """Return the error for a failed write, in the words of torch's writer."""
        number = error.errno or errno.EIO
        reason = os.strerror(number)
        message = f"PytorchStreamWriter failed writing file: file write failed ({reason})"
        if operation_of(error) == "open":
            message = f"open file failed with strerror: {reason}"
        if error.filename2 is None:
            return cls(number, message, path)
        return cls(number, message, path, None, error.filename2)


# The types that OSError(number, ...) makes: BlockingIOError, PermissionError, ...
_SAVE_ERRORS: dict[type[OSError], type[SaveError]] = {
    kind: _both(f"Save{kind.__name__}", SaveError, kind)
    for kind in {type(OSError(number, "")) for number in errno.errorcode} - {OSError}
}
# Pickles name types as attributes of their modules.
globals().update({kind.__name__: kind for kind in (*_SAVE_ERRORS.values(), *_MALFORMED.values())})


class UnsupportedUrlError(SaveError, FileNotFoundError, ValueError):
    """The call takes no URLs, or fsspec cannot open this URL; nothing was read or written.

    It has the types of the errors that :func:`torch.save` and :func:`torch.load` raise for a URL,
    because they take the URL for a path that does not exist.

    Examples
    --------
    >>> import ptsave
    >>> try:
    ...     ptsave.save([1, 2], "https://host/list.pt")
    ... except ptsave.UnsupportedUrlError as error:
    ...     print(error.filename, isinstance(error, ptsave.SaveError))
    https://host/list.pt True
    """

    @classmethod
    def unreadable(cls, url: str, reason: str) -> UnsupportedUrlError:
        """Return the error for a URL that needs another package; `reason` is fsspec's message."""
        message = (
            f"this URL cannot be read ({reason}): install the package of its file system, or copy "
            "the file to a local path"
        )
        return cls(errno.ENOENT, message, url)

    @classmethod
    def of(cls, url: str, reason: str = "") -> UnsupportedUrlError:
        """Return the error for a call that takes no URLs, or that refuses a URL for `reason`."""
        message = (
            "URLs are not accepted here, only local files and directories"
            f"{reason and f' ({reason})'}: pass a URL as a str with two slashes (ptsave bench "
            "takes no URLs), copy the file to or from a local path, or begin the name of a local "
            "file with ./"
        )
        return cls(errno.ENOENT, message, url)

    @classmethod
    def of_target(cls, url: str, reason: str) -> UnsupportedUrlError:
        """Return the error for a URL that cannot be written to."""
        message = (
            f"nothing can be written to this URL ({reason}): save to a local path and copy the "
            "file; if this is the name of a local file, begin the name with ./"
        )
        return cls(errno.ENOENT, message, url)


class UnsupportedSourceError(ValueError):
    """The operation does not apply to this source; the message names an operation that does.

    Examples
    --------
    >>> import io, ptsave
    >>> try:
    ...     ptsave.open(io.BytesIO(b'{"weight_map": {"weight": "model-00001-of-00002.pt"}}'))
    ... except ptsave.UnsupportedSourceError as error:
    ...     print(error)
    <BytesIO> is an index, whose shards lie beside it: pass the path or the URL of the index, or ...
    """


class WrongBaseError(ValueError):
    """The weights are not those that a patch changes, so nothing was changed.

    :func:`ptsave.deltas.apply` raises it if a tensor would not get the checksum of its version.

    Examples
    --------
    >>> import tempfile, torch, ptsave
    >>> from ptsave.deltas import Publisher, apply
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = Publisher(path, {"a": torch.zeros(4)}, max_depth=None).publish({"a": torch.ones(4)})
    ...     try:
    ...         apply(path, {"a": torch.rand(4)})
    ...     except ptsave.WrongBaseError as error:
    ...         print("version 1" in str(error))
    True
    """


class StagingFullError(RuntimeError):
    """There is no room for a copy of the tensors; nothing was copied.

    :func:`ptsave.async_save`, :class:`ptsave.ArchiveWriter` and :func:`ptsave.capture` raise it.

    Attributes
    ----------
    nbytes : int
        Bytes that the copy needs.
    staged_nbytes : int
        Bytes that are held by unfinished saves and by values that wait to be written.
    max_staged_bytes : int
        The limit, in bytes, for all copies together.

    Examples
    --------
    >>> import io, torch, ptsave
    >>> try:
    ...     ptsave.async_save(torch.ones(100), io.BytesIO(), max_staged_bytes=100)
    ... except ptsave.StagingFullError as error:
    ...     print(error.nbytes, error.staged_nbytes, error.max_staged_bytes)
    400 0 100
    """

    def __init__(
        self, message: str, *, nbytes: int = 0, staged_nbytes: int = 0, max_staged_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.nbytes = nbytes
        self.staged_nbytes = staged_nbytes
        self.max_staged_bytes = max_staged_bytes

    @classmethod
    def too_large(
        cls, nbytes: int, limit: int, option: str = "max_staged_bytes"
    ) -> StagingFullError:
        """Return the error for a single copy that exceeds the limit; `option` sets the limit."""
        message = (
            f"a copy of the tensors takes {nbytes} bytes, but all copies may take at most {limit}: "
            f"raise {option} (or PTSAVE_MAX_STAGED_BYTES)"
        )
        if option == "max_staged_bytes":
            message += ", or use ptsave.save, which needs no copy"
        return cls(message, nbytes=nbytes, max_staged_bytes=limit)

    @classmethod
    def no_room(
        cls, nbytes: int, staged_nbytes: int, limit: int, option: str = "max_staged_bytes"
    ) -> StagingFullError:
        """Return the error for a copy that would have to wait for other saves."""
        message = (
            f"a copy of the tensors takes {nbytes} bytes, unfinished saves hold {staged_nbytes}, "
            f"and all copies may take at most {limit}: wait for a save, use when_full='wait', or "
            f"raise {option} (or PTSAVE_MAX_STAGED_BYTES)"
        )
        return cls(message, nbytes=nbytes, staged_nbytes=staged_nbytes, max_staged_bytes=limit)


class CheckpointWarning(UserWarning):
    """The call succeeded, but the message tells something that the user should know."""


def operation_of(error: OSError) -> str:
    """Return the name of the failed system call if the engine reports one, else ""."""
    return str(getattr(error, "operation", ""))


def add_note(error: BaseException, message: str) -> None:
    """Add a note to an exception that is being raised; before Python 3.11, warn instead."""
    if hasattr(error, "add_note"):
        error.add_note(message)
    else:
        warnings.warn(message, CheckpointWarning, stacklevel=3)
