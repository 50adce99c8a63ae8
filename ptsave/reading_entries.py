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


def _copy(entry: Any, made: dict[int, Any]) -> Any:
    """Return a copy of containers around what is made already; deep ones need no recursion."""
    containers = list(_containers_in(entry))
    for container in containers:
        if type(container) is not tuple:
            made[id(container)] = type(container)()
    for container in containers:
        if type(container) is tuple:
            _make_tuple(container, made)
    for container in containers:
        copy = made[id(container)]
        if type(container) is list:
            copy += (_made(part, made) for part in container)
        elif type(container) is not tuple:
            for key, part in container.items():
                copy[key] = _made(part, made)
            for name, part in getattr(container, "__dict__", {}).items():
                setattr(copy, name, _made(part, made))  # `_metadata` of state dicts
    return _made(entry, made)


def _made(part: Any, made: dict[int, Any]) -> Any:
    return made.get(id(part), part)


def _make_tuple(value: tuple[Any, ...], made: dict[int, Any]) -> None:
    """Make the copy of a tuple after those of the tuples in it."""
    pending = [value]
    while pending:
        last = pending[-1]
        inner = [part for part in last if type(part) is tuple and id(part) not in made]
        if inner:
            pending += inner
            continue
        pending.pop()
        made.setdefault(id(last), tuple([_made(part, made) for part in last]))


def _containers_in(entry: Any) -> Iterator[Any]:
    """Yield every container of an entry once."""
    seen: set[int] = set()
    pending = [entry]
    while pending:
        value = pending.pop()
        if _is_container(value) and id(value) not in seen:
            seen.add(id(value))
            yield value
            pending += value.values() if isinstance(value, dict) else value
            pending += getattr(value, "__dict__", {}).values()
