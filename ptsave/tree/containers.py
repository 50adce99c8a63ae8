"""Items of dicts, lists and tuples, read past attributes that a file has given to them.

A pickle sets attributes of an ``OrderedDict`` or a ``Counter``, which is how ``_metadata`` travels.
One that is called ``items`` takes the method's place in ``value.items()``; it does not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ptsave.support.tensor_types import tensor_types
from ptsave.tree.paths import MAX_DEPTH, Path

__all__ = [
    "CONTAINERS",
    "Visit",
    "attributes_of",
    "is_container",
    "items_of",
    "nested_too_deep",
    "set_attributes",
    "values_of",
    "walk",
    "walk_entries",
]

# Their instances hold the entries of a saved object.
CONTAINERS = (Mapping, list, tuple)

# Path and prefix ("a.b.") of a container, key and value of a part of it, whether that is itself a
# container, and if it is one that has been met before, its name there.
Visit: TypeAlias = tuple[Path, str, Any, Any, bool, str | None]


def is_container(value: Any) -> bool:
    """Whether something is a dict, a list or a tuple."""
    return isinstance(value, CONTAINERS)


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a mapping, or the numbers and values of a list or a tuple.

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
    """Return the values of a mapping, or of any other container.

    >>> list(values_of({"a": 1})), list(values_of([2]))
    ([1], [2])
    """
    if isinstance(value, Mapping):
        values: Iterable[Any] = type(value).values(value)
        return values
    iterable: Iterable[Any] = value
    return iterable


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance, such as ``_metadata`` of state dicts; none of a class.

    >>> attributes_of([]), attributes_of(dict)
    ({}, {})
    """
    found = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    return dict(found)


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Give attributes to an instance as torch's unpickler does, which assigns none.

    So one that is called ``__class__`` is an attribute and changes no type.
    """
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
    """Return an object and all that is in it, in order: containers once, before their parts.

    Parameters
    ----------
    obj : object
        The object.
    kinds : tuple of type
        Containers that are looked into.
    exactly : bool, default False
        Whether instances of subclasses are none.
    keys : bool, default False
        Whether the keys of a mapping are among its parts.
    attributes : bool, default True
        Whether the values of a container's attributes are.

    Examples
    --------
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
    """Yield every part of a container and of those in it, in order, before its own parts.

    A container is looked into where it is met first, down to `MAX_DEPTH` levels: one below, which
    is yielded with a path of that length, is not.

    Parameters
    ----------
    obj : mapping, list or tuple
        The outermost container.
    is_container : callable, optional
        Whether a value that is no tensor is looked into.
    whole : str, optional
        The name of `obj` itself, where it contains itself.

    Examples
    --------
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
    """Return the error for containers below `MAX_DEPTH` levels, where they may not be left out.

    Parameters
    ----------
    file : str, optional
        The file that they are in.
    """
    where = f"{file}: " if file else ""
    return ValueError(f"{where}containers are nested deeper than {MAX_DEPTH} levels")
