"""A part of a saved object with its tensors read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["leaves_of", "read_entry", "tensor_over"]


def read_entry(entry: Any, read: Callable[[Sequence[Tensor]], list[Tensor]]) -> Any:
    """Return an entry of an archive, with values.

    Parameters
    ----------
    entry : object
        Its tensors and storages may have no values.  What it shares within, the result does, too.
    read : callable
        Returns tensors with values for some without.
    """
    leaves = {id(leaf): leaf for leaf in leaves_of(entry)}
    found = read([tensor_over(leaf) for leaf in leaves.values()])
    made: dict[int, Any] = {
        key: _back(leaf, values) for (key, leaf), values in zip(leaves.items(), found, strict=True)
    }
    return _copy(entry, made)


def leaves_of(entry: Any) -> Iterator[Any]:
    """Yield the tensors and storages of an entry."""
    seen: set[int] = set()
    pending = [entry]
    while pending:
        value = pending.pop()
        if isinstance(value, (Tensor, torch.UntypedStorage, torch.TypedStorage)):
            yield value
        elif id(value) not in seen and _is_container(value):
            seen.add(id(value))
            inner = list(value.values()) if isinstance(value, dict) else list(value)
            pending += reversed(inner + list(getattr(value, "__dict__", {}).values()))


def _is_container(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list, tuple)


def tensor_over(leaf: Any) -> Tensor:
    """Return a tensor, or one of all the bytes of a storage."""
    if isinstance(leaf, Tensor):
        return leaf
    untyped = leaf if isinstance(leaf, torch.UntypedStorage) else leaf._untyped_storage
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)


def _back(leaf: Any, values: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return values
    untyped = values.untyped_storage()
    if isinstance(leaf, torch.UntypedStorage):
        return untyped
    return torch.TypedStorage(wrap_storage=untyped, dtype=leaf.dtype, _internal=True)


def _copy(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:
        return made[id(value)]
    if type(value) is tuple:
        copy: Any = tuple(_copy(part, made) for part in value)
        return made.setdefault(id(value), copy)  # itself, if it is in a list in itself
    if type(value) is list:
        made[id(value)] = copy = []
        copy += (_copy(part, made) for part in value)
        return copy
    if not _is_container(value):
        return value
    made[id(value)] = copy = type(value)()
    for key, part in value.items():
        copy[key] = _copy(part, made)
    for name, part in getattr(value, "__dict__", {}).items():
        setattr(copy, name, _copy(part, made))  # `_metadata` of state dicts
    return copy
