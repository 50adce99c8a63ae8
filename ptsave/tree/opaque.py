"""`Opaque`: an object in a file that is not built, so that inspecting the file needs no trust."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping
from typing import Any

from ptsave.tree.containers import attributes_of, is_tensor, values_of, walk

_BY_CLASS = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
# Containers that may hold objects that are not built.
OPAQUE_HOLDERS = (Mapping, list, tuple, set, frozenset, deque)


class Opaque:
    """A class, a function or an object that a pickle names, and that is not built.

    `type_name` is the full name of the class or function, or of the one that would make the object.
    `parts` are what the pickle gives to it: names of steps, and their operands.
    """

    __slots__ = ("parts", "type_name")

    def __init__(self, type_name: str, parts: list[Any]) -> None:
        self.type_name = type_name if type_name.isprintable() else ascii(type_name)[1:-1]
        self.parts = parts

    def __repr__(self) -> str:
        return f"<{self.type_name}>"

    def __setitem__(self, key: Any, value: Any) -> None:
        """Note an item, because the engine's unpickler sets items as in a dict."""
        self.parts += ["item", key, value]

    def made_with(self, arguments: Any) -> Opaque:
        """Return what a call of this class or function would make."""
        name = self.type_name
        if name in _BY_CLASS and type(arguments) is tuple and arguments:
            name = getattr(arguments[0], "type_name", name)
        return Opaque(name, ["made by", self.type_name, arguments])


def type_name_of(value: Any) -> str:
    """Return the name of the class of a value, also of one that is not built.

    >>> type_name_of([]), type_name_of(Opaque("argparse.Namespace", []))
    ('list', 'argparse.Namespace')
    """
    return value.type_name if isinstance(value, Opaque) else type(value).__name__


def holds_opaque(value: Any) -> Opaque | None:
    """Return the first object in a value, its keys and attributes that is not built, or None."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, Opaque):
            return each
        is_container = isinstance(each, OPAQUE_HOLDERS)
        if id(each) in seen or not (is_container or is_tensor(each)):
            continue
        seen.add(id(each))
        pending += attributes_of(each).values()
        if isinstance(each, Mapping):
            pending += each
        if is_container:
            pending += each if isinstance(each, (set, frozenset)) else values_of(each)
        elif each._backward_hooks:
            pending.append(each._backward_hooks)
    return None


def drop_opaque_attributes(obj: Any) -> None:
    """Remove from an object's tensors the attributes and hooks that are not built."""
    tensors: dict[int, Any] = {}
    pending = [obj]
    while pending:
        for leaf in filter(is_tensor, walk(pending.pop())):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = leaf
                pending += attributes_of(leaf).values()
    for leaf in reversed(tensors.values()):  # those in attributes first
        attributes = attributes_of(leaf)
        lost = {name for name, value in attributes.items() if holds_opaque(value)}
        if lost:  # torch.compile's marks, as on jagged tensors, are incomplete without it
            lost |= {name for name in attributes if name.startswith("_dynamo_")}
        for name in lost:
            del leaf.__dict__[name]
        if leaf._backward_hooks and holds_opaque(leaf._backward_hooks):
            leaf._backward_hooks = None


def refuse_opaque(value: Any, name: str) -> None:
    """Raise UnpicklingError with the class if a value holds an object that is not built."""
    found = holds_opaque(value)
    if found is None:
        return
    raise pickle.UnpicklingError(
        f"{name} needs {found.type_name}, which is not built, as that runs code: if you trust "
        f"the file, allow it with torch.serialization.add_safe_globals([{found.type_name}]), with "
        f"--trust {found.type_name} of the command, or all of it with ptsave.load(..., "
        "weights_only=False)"
    )
