"""Makes a file whole that has lost its end: an archive, or a safetensors file."""

from __future__ import annotations

import json

from ptsave.archive.recovery import CompletedFile, Recovery, recover_archive
from ptsave.contents.safetensors_fields import LENGTH_NBYTES, fetch_header, read_fields
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.ranges import RangeSource
from ptsave.support.user_warnings import warn_user

__all__ = ["recover", "recovered"]


def recovered(source: RangeSource) -> RangeSource:
    """Return the source of a file that is whole: the given one, or with an end of its own.

    Entries that need what is damaged or missing are not in it, which a `CheckpointWarning` says.

    Raises
    ------
    CorruptCheckpointError
        If nothing of it can be recovered.
    """
    found = recover(source)
    if found is None:
        return source
    if damage := found.damage():
        warn_user(f"{source.name}: {damage}", CheckpointWarning)
    return found.source


def recover(source: RangeSource) -> Recovery | None:
    """Return the rest of a file without its end; None if it is whole, or of another kind.

    Raises
    ------
    CorruptCheckpointError
        As of `recovered`.
    """
    if source.kind == "safetensors":
        return _recover_safetensors(source)
    if source.kind not in ("zip", None) or not source.nbytes:
        return None
    return recover_archive(source)


def _recover_safetensors(source: RangeSource) -> Recovery | None:
    """Return a file of the tensors that are there: they are stored one behind the other."""
    try:
        read_fields(source)
    except CorruptCheckpointError as error:
        head = fetch_header(source)
        if not error.entries:  # it is something else that is wrong
            raise
        fields = json.loads(head[LENGTH_NBYTES:])
        ends = {name: fields[name]["data_offsets"] for name in error.entries}
        lost = {name: None for name, (begin, end) in ends.items() if begin < end}
        kept = {name: value for name, value in fields.items() if name not in lost}
        whole = kept.keys() - ends.keys() - {"__metadata__"}
        if not whole:
            raise
        last = max(kept[name]["data_offsets"][1] for name in whole)
        for name in ends.keys() & kept.keys():  # of no bytes
            kept[name]["data_offsets"] = [last, last]
        header = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
        nbytes = len(head) - LENGTH_NBYTES
        if len(header) > nbytes:
            raise
        end = len(head) + last
        patch = head[:LENGTH_NBYTES] + header.ljust(nbytes)
        return Recovery(CompletedFile(source, end, b"", {0: patch}), entries=[*lost])
    return None
