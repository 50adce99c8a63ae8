"""Elements of containers and arguments of calls, each with its part of a name.

The elements of a container have different parts: the key 1 beside the key "1" is ``1%3Aint``.  A
colon in a key is not escaped, so no other key gets such a part.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ptsave.tree.capture_schema import escape

PLAIN = (bool, int, float, complex, str)
AS_TEXT = (bytes, bytearray, range, slice, torch.dtype, torch.device, torch.Size, enum.Enum)
MAX_TEXT = 200

_COLON = "%3A"


def items_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return the elements of a container, each with its part of a name; None for other objects.

    >>> items_of({"a/b": 1.5, 1: 2.5, "1": 3.5})
    [('a%2Fb', 1.5), ('1%3Aint', 2.5), ('1', 3.5)]
    """
    if value is None or isinstance(value, (*PLAIN, *AS_TEXT)):
        return None
    if isinstance(value, Mapping):
        items = list(value.items())
        return list(
            zip(_parts([key for key, _ in items]), [item for _, item in items], strict=True)
        )
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return list(zip(map(str, names or range(len(value))), value, strict=False))
    if is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name))
            for field in fields(value)
            if hasattr(value, field.name)
        ]
    return None


def keyword_part(name: str, n_positional: int) -> str:
    """Return the part of a keyword argument, which differs from positional arguments' parts.

    >>> keyword_part("mask", 1), keyword_part("0", 1), keyword_part("1", 1)
    ('mask', '0%3Akeyword', '1')
    """
    part = escape(name)
    return f"{part}{_COLON}keyword" if part in map(str, range(n_positional)) else part


def _parts(keys: list[Any]) -> Iterable[str]:
    """Return a different part for each key; text keeps its own."""
    if set(map(type, keys)) <= {str} and len(set(keys)) == len(keys):
        return map(escape, keys)
    taken = {escape(key) for key in keys if type(key) is str}
    found = []
    unused = set(taken)
    for key in keys:
        part = escape(_text_of(key))
        if type(key) is str and part in unused:
            unused.discard(part)
        elif part in taken:
            part = _free(f"{part}{_COLON}{escape(type(key).__name__)}", taken)
        taken.add(part)
        found.append(part)
    return found


def _free(part: str, taken: set[str]) -> str:
    """Return the part, or with a number from 2 on if it is taken."""
    numbered, number = part, 2
    while numbered in taken:
        numbered, number = f"{part}{_COLON}{number}", number + 1
    return numbered


def _text_of(key: Any) -> str:
    if type(key) is str:
        return key
    try:
        return str(key)[:MAX_TEXT]
    except Exception:  # the key's own code, which the model does not run
        return type(key).__name__
