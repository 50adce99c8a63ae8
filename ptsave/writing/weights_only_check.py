"""Warns at save time of objects that ``weights_only=True`` will refuse to load.

The unpickler that would load the file runs the pickle, with storages that have no bytes.  If the
unpickler refuses the pickle, this module finds the parts of the object that the warning names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave.archive.unpickling import refusal_of
from ptsave.errors import CheckpointWarning
from ptsave.support.calls import warn_user
from ptsave.tree.containers import is_container, walk_entries
from ptsave.writing.planning import pickle_object

_MAX_NAMED = 8
_SMALLEST_ODD_INT = 1 << (8 * 255 - 1)  # torch's unpickler lacks the opcode of such large ints
_ACCEPTED = (type(None), bool, float, str, torch.dtype, torch.device, torch.Size)
_PLAIN_CONTAINERS = (dict, list, tuple, OrderedDict, Counter)


class _Refused(NamedTuple):
    """A part of an object that torch will refuse; if `restores`, ptsave.load_into accepts it."""

    name: str
    kind: str
    restores: bool

    def __str__(self) -> str:
        return f"{self.name!r} ({self.kind})" if self.name else f"the object itself ({self.kind})"


def warn_of_refusals(
    obj: object, pickle_module: Any, pickle_protocol: int, data: bytes | None = None
) -> None:
    """Warn of the parts of an object that ``weights_only=True`` will refuse to load."""
    if data is None:
        data, _ = pickle_object(obj, pickle_module, pickle_protocol)
    reason = refusal_of(data)
    if reason is None:
        return
    found: list[_Refused] = []
    for refused in _refused_parts(obj, pickle_module, pickle_protocol):
        if len(found) == _MAX_NAMED:
            named = ", ".join(map(str, found)) + " and more"
            break
        found.append(refused)
    else:
        first_sentence = reason.partition(". ")[0]
        named = ", ".join(map(str, found)) or f"a key or an attribute ({first_sentence})"
    message = f"torch.load() with weights_only=True will refuse this checkpoint because of {named}"
    restored = [each for each in found if each.restores]
    if restored:
        which = "these" if len(restored) == len(found) else ", ".join(map(str, restored))
        message += f"; ptsave.load_checkpoint() and ptsave.load_into() accept {which}"
    advice = "Save numbers, text and plain containers instead, or load with weights_only=False"
    warn_user(f"{message}. {advice}", CheckpointWarning)


def _refused_parts(obj: object, pickle_module: Any, pickle_protocol: int) -> Iterator[_Refused]:
    """Yield the parts that torch refuses, but not the parts inside a refused container."""
    inside: str | None = None
    for name, value in _odd_parts(obj):
        if inside is not None and name.startswith(inside):
            continue
        try:
            data, _ = pickle_object(value, pickle_module, pickle_protocol)
        except Exception:
            continue
        if refusal_of(data) is not None:
            kind = type(value)
            inside = f"{name}." if name else ""
            restores = refusal_of(data, allows_values=True) is None
            yield _Refused(name, f"{kind.__module__}.{kind.__qualname__}", restores)


def _odd_parts(obj: object) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for an object and each part of it if `_is_odd(value)` is true."""
    if _is_odd(obj):
        yield "", obj
    if is_container(obj):
        for _, prefix, key, value, _, again in walk_entries(obj):
            if again is None and _is_odd(value):
                yield f"{prefix}{key}", value


def _is_odd(value: Any) -> bool:
    kind = type(value)
    if kind in (Tensor, Parameter):
        return bool(value.__dict__)
    if kind is int:
        return bool(abs(value) >= _SMALLEST_ODD_INT)
    return kind not in _ACCEPTED and kind not in _PLAIN_CONTAINERS
