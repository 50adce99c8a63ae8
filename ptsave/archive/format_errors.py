"""Maps the engine's FormatError to CorruptCheckpointError, in torch's words if it has some."""

from __future__ import annotations

from typing import NoReturn

from ptsave import _C
from ptsave.errors import MINIZ_ADVICE, CorruptCheckpointError, CorruptPickleError

__all__ = ["bare_message", "corrupt", "raise_corrupt"]


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


def bare_message(error: BaseException, path: str) -> str:
    """Return the message of an error without the file, the record and torch's advice."""
    text = str(error).replace(MINIZ_ADVICE, "").removeprefix(f"{path}: ")
    record = getattr(error, "record", None)
    return text if record is None else text.removeprefix(f"record {record}: ")
