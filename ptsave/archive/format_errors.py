"""Maps the engine's errors to Python's: FormatError to CorruptCheckpointError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ptsave import _C
from ptsave.errors import MINIZ_ADVICE, CorruptCheckpointError, CorruptPickleError
from ptsave.support.text import size_text


def raise_corrupt(error: _C.FormatError, path: str) -> NoReturn:
    """Raise the engine's error about an archive as a :class:`CorruptCheckpointError`."""
    raise corrupt(error, path) from None


def corrupt(error: _C.FormatError, path: str) -> CorruptCheckpointError:
    """Return the engine's error about an archive as a :class:`CorruptCheckpointError`."""
    reason, detail, record, offset = error.args
    by_torch = reason.startswith("Pytorch")
    parts = [f"{reason}{MINIZ_ADVICE if by_torch else ''} ({detail})"]
    if record is not None:
        parts.append(f"record {record}")
    if offset is not None:
        parts.append(f"offset {offset}")
    kind = CorruptPickleError if record == "data.pkl" else CorruptCheckpointError
    message = f"{path}: {'; '.join(parts)}"
    return kind(message, path=path, record=record, offset=offset)


@contextmanager
def naming_what_needs_memory(path: str, nbytes: int) -> Iterator[None]:
    """Name the file and its size in a `MemoryError` that has no message of its own."""
    try:
        yield
    except MemoryError as error:
        if str(error) not in ("", "std::bad_alloc"):
            raise
        raise MemoryError(
            f"{path}: the system has no memory for its {size_text(nbytes)}: free some, raise the "
            "limit (ulimit -v, a container's), or read parts of it with ptsave.open"
        ) from None


def bare_message(error: BaseException, path: str) -> str:
    """Return the message of an error without the file, the record and torch's advice."""
    text = str(error).replace(MINIZ_ADVICE, "").removeprefix(f"{path}: ")
    record = getattr(error, "record", None)
    return text if record is None else text.removeprefix(f"record {record}: ")
