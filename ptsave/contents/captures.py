"""Decides whether a checkpoint is a capture; `ptsave.capturing`, imported when needed, reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.errors import CorruptCheckpointError
from ptsave.support.text import count_text

if TYPE_CHECKING:
    from ptsave.capturing.run import CapturedRun

FORMAT = "ptsave.capture"
HEADER = "capture"  # the key of the header, the first entry


def is_capture(obj: object) -> bool:
    """Return whether a loaded object is a capture, of any version."""
    header = dict.get(obj, HEADER) if isinstance(obj, dict) else None
    return isinstance(header, dict) and dict.get(header, "format") == FORMAT


def captured_run(obj: object, path: str) -> CapturedRun:
    """Return the records of a capture; an object that is not a capture raises ValueError."""
    if not is_capture(obj):
        raise ValueError(
            f"{path} is no capture: ptsave.capture writes them; the tensors of any other "
            "checkpoint are read with get_tensor()"
        )
    from ptsave.capturing.run import CapturedRun

    return CapturedRun(obj, path)


class CapturedRecords:
    """Stands for a block of records, which may have 100,000 parts, when a file is listed."""

    def __init__(self, block: dict[str, Any]) -> None:
        self._block = block

    def __str__(self) -> str:
        n_calls, n_values = len(self._block["calls"]), len(self._block["values"])
        return f"{count_text(n_calls, 'call')}, {count_text(n_values, 'value')}"


def with_short_records(obj: object, path: str) -> object:
    """Return a saved object; a capture has `CapturedRecords` in place of its blocks."""
    if not isinstance(obj, dict) or not is_capture(obj):
        return obj
    try:
        blocks = captured_run(obj, path).blocks
    except (CorruptCheckpointError, ValueError):
        return obj  # a damaged capture is listed as it is
    return {
        key: CapturedRecords(value) if key in blocks else value for key, value in dict.items(obj)
    }
