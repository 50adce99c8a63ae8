"""Which entries of a saved object use which records: for messages, so it never fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ptsave.reading import RecordReader

__all__ = ["entries_using"]

_MAX_DEPTH = 64


def entries_using(reader: RecordReader, records: set[str]) -> list[str]:
    """Return the dotted paths of the tensors that are stored in one of `records`.

    The object is rebuilt on the meta device by torch's restricted unpickler, so no code of the file
    runs and no data is read.

    Parameters
    ----------
    reader : RecordReader
        The archive.
    records : set of str
        Record names.

    Returns
    -------
    list of str
        Empty if the object cannot be rebuilt that way.
    """
    try:
        offsets = {reader.get_record_offset(name) for name in records}
        obj = torch.serialization._load(reader, "meta", torch._weights_only_unpickler)
    except Exception:  # the message is better without entries than not raised
        return []
    found: list[str] = []
    _collect(obj, "", offsets, found, 0)
    return found


def _offset(tensor: torch.Tensor) -> int | None:
    try:
        return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage
        return None


def _collect(obj: Any, path: str, offsets: set[int], found: list[str], depth: int) -> None:
    if isinstance(obj, torch.Tensor):
        if _offset(obj) in offsets:
            found.append(path or "the tensor itself")
    elif depth < _MAX_DEPTH:
        for key, value in _children(obj):
            _collect(value, f"{path}.{key}" if path else str(key), offsets, found, depth + 1)


def _children(obj: Any) -> list[tuple[object, Any]]:
    if isinstance(obj, dict):
        return list(obj.items())
    if isinstance(obj, (list, tuple, set)):
        return list(enumerate(obj))
    return []
