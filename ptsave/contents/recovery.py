"""Completes an archive or a safetensors file that has lost its end."""

from __future__ import annotations

import json

from ptsave.archive.recovery import CompletedFile, Recovery, recover_archive
from ptsave.contents.safetensors_fields import LENGTH_NBYTES, fetch_header, read_fields
from ptsave.errors import CheckpointWarning, CorruptCheckpointError
from ptsave.sources.ranges import RangeSource
from ptsave.support.calls import warn_user


def recovered(source: RangeSource) -> RangeSource:
    """Return the source of a whole file: the given one, or one with a new end.

    A `CheckpointWarning` names the entries that are left out, because their bytes are damaged or
    missing.
    """
    found = recover(source)
    if found is None:
        return source
    if damage := found.damage():
        warn_user(f"{source.name}: {damage}", CheckpointWarning)
    return found.source


def recover(source: RangeSource) -> Recovery | None:
    """Return the recovery of a file without its end; None if it is whole or of another kind."""
    if source.kind == "safetensors":
        return _recover_safetensors(source)
    if source.kind not in ("zip", None) or not source.nbytes:
        return None
    return recover_archive(source)


def _recover_safetensors(source: RangeSource) -> Recovery | None:
    """Return a file of the tensors before the cut: tensors are stored one behind the other."""
    try:
        read_fields(source)
    except CorruptCheckpointError as error:
        head = fetch_header(source)
        if not error.entries:  # something else is wrong
            raise
        fields = json.loads(head[LENGTH_NBYTES:])
        ends = {name: fields[name]["data_offsets"] for name in error.entries}
        lost = {name: None for name, (begin, end) in ends.items() if begin < end}
        kept = {name: value for name, value in fields.items() if name not in lost}
        whole = kept.keys() - ends.keys() - {"__metadata__"}
        if not whole:
            raise
        last = max(kept[name]["data_offsets"][1] for name in whole)
        for name in ends.keys() & kept.keys():  # tensors without bytes
            kept[name]["data_offsets"] = [last, last]
        header = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()
        nbytes = len(head) - LENGTH_NBYTES
        if len(header) > nbytes:
            raise
        end = len(head) + last
        patch = head[:LENGTH_NBYTES] + header.ljust(nbytes)
        return Recovery(CompletedFile(source, end, b"", {0: patch}), entries=[*lost])
    return None
