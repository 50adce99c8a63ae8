"""Items of dicts, lists and tuples, read past attributes that a file has given to them.

A pickle sets attributes of an ``OrderedDict`` or a ``Counter``, which is how ``_metadata`` travels.
One that is called ``items`` takes the method's place in ``value.items()``; it does not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = [
    "attributes_of",
    "is_container",
    "items_of",
    "parts_of",
    "set_attributes",
    "values_of",
    "walk",
]


def is_container(value: Any) -> bool:
    """Return whether something is a mapping, a list or a tuple."""
    return isinstance(value, (Mapping, list, tuple))


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


def parts_of(value: Any) -> list[Any]:
    """Return the values in a container, and those of its attributes.

    >>> parts_of({"a": 1})
    [1]
    """
    return [*values_of(value), *attributes_of(value).values()]


def walk(
    obj: Any,
    *,
    opens: Callable[[Any], bool] = is_container,
    parts: Callable[[Any], Iterable[Any]] = parts_of,
) -> Iterator[Any]:
    """Yield an object and all that is in it, in order: containers once, before their parts.

    Parameters
    ----------
    obj : object
        The object.
    opens : callable
        Returns whether something is a container that is looked into.
    parts : callable
        Returns the values in such a container.

    Examples
    --------
    >>> list(walk({"a": [1, 2]}))
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    seen: set[int] = set()
    pending = [obj]
    while pending:
        value = pending.pop()
        if not opens(value):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            yield value
            pending += reversed([*parts(value)])
