"""Detects the files of `ptsave.capture`, and imports `ptsave.capturing` only if it finds one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptsave.errors import CorruptCheckpointError
from ptsave.support.text import count_text

if TYPE_CHECKING:
    from ptsave.capturing.run import CapturedRun

FORMAT = "ptsave.capture"
HEADER = "capture"  # the key of the first entry, which is the header


def is_capture(obj: object) -> bool:
    """Return whether a loaded object is from a file of `ptsave.capture`, in any version."""
    header = dict.get(obj, HEADER) if isinstance(obj, dict) else None
    return isinstance(header, dict) and dict.get(header, "format") == FORMAT


def captured_run(obj: object, path: str) -> CapturedRun:
    """Return the `CapturedRun` of a loaded object; raise ValueError if it is not a capture."""
    if not is_capture(obj):
        raise ValueError(
            f"{path} is not a capture, because ptsave.capture did not write it: read its tensors "
            "with get_tensor()"
        )
    from ptsave.capturing.run import CapturedRun

    return CapturedRun(obj, path)


class CapturedRecords:
    """Replaces, in a listing, a block of call records, because it may have 100,000 records."""

    def __init__(self, block: dict[str, Any]) -> None:
        self._block = block

    def __str__(self) -> str:
        n_calls, n_values = len(self._block["calls"]), len(self._block["values"])
        return f"{count_text(n_calls, 'call')}, {count_text(n_values, 'value')}"


def with_short_records(obj: object, path: str) -> object:
    """Return `obj`; if it is a capture, a copy whose blocks of records are `CapturedRecords`."""
    if not isinstance(obj, dict) or not is_capture(obj):
        return obj
    try:
        blocks = captured_run(obj, path).blocks
    except (CorruptCheckpointError, ValueError):
        return obj  # a damaged capture is listed as it is
    return {
        key: CapturedRecords(value) if key in blocks else value for key, value in dict.items(obj)
    }
