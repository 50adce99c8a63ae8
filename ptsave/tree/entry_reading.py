"""Reads a part of a saved object: a copy of its containers with the values of its tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ptsave.support.torch_names import untyped_of
from ptsave.tree.containers import attributes_of, items_of, set_attributes, walk
from ptsave.tree.opaque import refuse_opaque

_CONTAINERS = (dict, OrderedDict, list, tuple)


def read_entry(entry: Any, read: Callable[[Sequence[Tensor]], list[Tensor]], name: str) -> Any:
    """Return an entry of an archive, with values.

    The entry's tensors and storages may have no values, and `read` returns tensors with values for
    them. Objects that the entry shares within itself are shared in the result, too. An object that
    is not built raises UnpicklingError, with `name` in its message.
    """
    refuse_opaque(entry, name)
    leaves = {id(leaf): leaf for leaf in leaves_of(entry)}
    found = read([*map(_tensor_over, leaves.values())])
    made: dict[int, Any] = {
        key: _back(leaf, values) for (key, leaf), values in zip(leaves.items(), found, strict=True)
    }
    return _copy(entry, made)


def leaves_of(entry: Any) -> list[Any]:
    """Return the tensors and storages of an entry."""
    leaves = (Tensor, torch.UntypedStorage, torch.TypedStorage)
    return [value for value in walk(entry, _CONTAINERS, exactly=True) if isinstance(value, leaves)]


def tensors_over(entry: Any) -> list[Tensor]:
    """Return the tensors of an entry, and for each storage a tensor of all its bytes."""
    return [*map(_tensor_over, leaves_of(entry))]


def require_picklable(entry: Any, path: str) -> None:
    """Raise ValueError for containers whose attributes replace methods that pickling calls.

    Pickling an ``OrderedDict`` calls its ``items``. An attribute of that name would be called
    instead, and the entries would be lost.
    """
    for container in _containers_in(entry):
        for name in attributes_of(container):
            if hasattr(type(container), name):
                raise ValueError(
                    f"{path}: a {type(container).__name__} has an attribute {name!r} in place of a "
                    "method, and would lose its entries when it is written: load the file, "
                    "and save a dict of what is in it"
                )


def _tensor_over(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    untyped = leaf if isinstance(leaf, torch.UntypedStorage) else untyped_of(leaf)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)


def _back(leaf: Any, values: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return values
    untyped = values.untyped_storage()
    if isinstance(leaf, torch.UntypedStorage):
        return untyped
    return torch.TypedStorage(wrap_storage=untyped, dtype=leaf.dtype, _internal=True)


def _copy(entry: Any, made: dict[int, Any]) -> Any:
    """Return a copy of the containers with `made` leaves in them, without recursion."""
    containers = _containers_in(entry)
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
            for key, part in items_of(container):
                copy[key] = _made(part, made)
            attributes = attributes_of(container).items()  # `_metadata` of state dicts
            set_attributes(copy, {name: _made(part, made) for name, part in attributes})
    return _made(entry, made)


def _made(part: Any, made: dict[int, Any]) -> Any:
    return made.get(id(part), part)


def _make_tuple(value: tuple[Any, ...], made: dict[int, Any]) -> None:
    """Make the copy of a tuple after the copies of the tuples in it."""
    pending = [value]
    while pending:
        last = pending[-1]
        inner = [part for part in last if type(part) is tuple and id(part) not in made]
        if inner:
            pending += inner
            continue
        pending.pop()
        made.setdefault(id(last), tuple([_made(part, made) for part in last]))


def _containers_in(entry: Any) -> list[Any]:
    """Return every container of an entry once."""
    values = walk(entry, _CONTAINERS, exactly=True)
    return [value for value in values if type(value) in _CONTAINERS]
