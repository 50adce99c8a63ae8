"""Walks the containers of a saved object, and gives names and paths to its entries.

A pickle can set attributes of an ``OrderedDict`` or a ``Counter``, for example ``_metadata``. An
attribute with the name ``items`` would replace the method in ``value.items()``. So this module
calls ``type(value).items(value)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ptsave._core import OutlinedTensor

if TYPE_CHECKING:
    from torch import Tensor

Path: TypeAlias = tuple[Any, ...]  # keys that lead to an entry, the outermost container's first

# Code that names entries goes down at most this many levels of containers.  A file may have any
# number of levels, and each level makes the names longer.  torch.save raises a RecursionError at
# about 970 levels.
MAX_DEPTH = 1000

# The types whose instances hold the entries of a saved object.
CONTAINERS = (Mapping, list, tuple)

# Path and prefix ("a.b.") of a container; key and value of a part in it; whether the part is a
# container.  The last is the name under which the walk has met the part before, or None.
Visit: TypeAlias = tuple[Path, str, Any, Any, bool, str | None]


def tensor_types() -> tuple[Any, ...]:
    """Return the types of tensors: `OutlinedTensor`, and torch.Tensor if torch is imported."""
    torch = sys.modules.get("torch")
    return (OutlinedTensor,) if torch is None else (torch.Tensor, OutlinedTensor)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor or an `OutlinedTensor`, a tensor without values."""
    return isinstance(value, tensor_types())


def is_container(value: Any) -> bool:
    """Return whether a value is a dict, a list or a tuple."""
    return isinstance(value, CONTAINERS)


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a mapping, or the indexes and values of a list or a tuple.

    >>> from collections import OrderedDict
    >>> entries = OrderedDict(a=1)
    >>> entries.items = OrderedDict
    >>> list(entries.items()), list(items_of(entries))
    ([], [('a', 1)])
    """
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = type(value).items(value)
        return items
    return enumerate(value)


def values_of(value: Any) -> Iterable[Any]:
    """Return the values of a mapping, or of any other container."""
    if isinstance(value, Mapping):
        values: Iterable[Any] = type(value).values(value)
        return values
    iterable: Iterable[Any] = value
    return iterable


def attributes_of(value: Any) -> dict[str, Any]:
    """Return a copy of an instance's ``__dict__``; return an empty dict for a class."""
    found = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return dict(found)


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Add attributes to an instance's ``__dict__``; `setattr` could replace its ``__class__``."""
    if attributes:
        value.__dict__.update(attributes)


def walk(
    obj: Any,
    kinds: tuple[type, ...] = CONTAINERS,
    *,
    exactly: bool = False,
    keys: bool = False,
    attributes: bool = True,
) -> list[Any]:
    """Return an object and everything in it; each container comes once, before its parts.

    The walk enters containers of `kinds`, and also of their subclasses unless `exactly`. With
    `keys`, a mapping's keys are parts, too. With `attributes`, the values of a container's
    attributes are parts, too.

    >>> walk({"a": [1, 2]})
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending = [obj]
    while pending:
        value = pending.pop()
        if type(value) in kinds if exactly else isinstance(value, kinds):
            if id(value) in seen:
                continue
            seen.add(id(value))
            parts = [*value] if keys and isinstance(value, Mapping) else []
            parts += values_of(value)
            parts += attributes_of(value).values() if attributes else ()
            pending += reversed(parts)
        found.append(value)
    return found


def walk_entries(
    obj: Any, is_container: Callable[[Any], bool] = is_container, *, whole: str = ""
) -> Iterator[Visit]:
    """Yield every part of a container and of the containers in it, each before its own parts.

    The walk enters a container once, down to `MAX_DEPTH` levels. It yields the containers at this
    depth, but does not enter them. `is_container` chooses the values to enter, and is not called
    with tensors. `whole` is the name of `obj` itself, in case `obj` contains itself.

    >>> [f"{prefix}{key}" for _, prefix, key, _, _, _ in walk_entries({"a": [1, 2]})]
    ['a', 'a.0', 'a.1']
    """
    tensors = tensor_types()
    seen = {id(obj): whole}
    pending: list[tuple[Iterator[tuple[Any, Any]], Path, str]] = [(iter(items_of(obj)), (), "")]
    while pending:
        items, path, prefix = pending[-1]
        for key, value in items:
            if isinstance(value, tensors) or not is_container(value):
                yield path, prefix, key, value, False, None
                continue
            again = seen.get(id(value))
            yield path, prefix, key, value, True, again
            if again is None and len(path) < MAX_DEPTH:
                seen[id(value)] = f"{prefix}{key}"
                pending.append((iter(items_of(value)), (*path, key), f"{prefix}{key}."))
                break
        else:
            pending.pop()


def nested_too_deep(file: str = "") -> ValueError:
    """Return the error for containers that are nested deeper than `MAX_DEPTH` levels."""
    where = f"{file}: " if file else ""
    return ValueError(f"{where}containers are nested deeper than {MAX_DEPTH} levels")


def dotted(path: Path) -> str:
    """Return the keys of a path as text, joined by dots."""
    return ".".join(map(str, path))


def path_in(text: str) -> Path | None:
    """Return the keys of a name that is written as a Python tuple; None for any other text.

    >>> path_in("('a.b', 0)"), path_in("a.b")
    (('a.b', 0), None)
    """
    if text.startswith("(") and text.endswith(")"):
        import ast

        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            path = ast.literal_eval(text)
            if isinstance(path, tuple):
                return path
    return None
