"""The entries of a saved object as a tree, their names, and `Opaque` stand-ins for objects."""

from __future__ import annotations

import fnmatch
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.errors import EntryNotFoundError
from ptsave.tree.containers import (
    MAX_DEPTH,
    Path,
    attributes_of,
    dotted,
    is_container,
    is_tensor,
    nested_too_deep,
    path_in,
    tensor_types,
    values_of,
    walk,
    walk_entries,
)

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN_TYPES = {int, float, complex, bool, str, bytes, type(None)}


class Node(NamedTuple):
    """One entry: a container, a tensor or another value.

    `key` is ``""`` if the saved object itself is no container.
    """

    depth: int  # the number of containers around it, without the object itself
    parent: int  # the number of its container's node; -1 in the saved object itself
    prefix: str  # the container's dotted path, with a dot at the end
    key: Any
    value: Any
    tensor: int  # its number among the tensors, or -1
    again: str | None  # the earlier name of a container that has been met before

    @property
    def name(self) -> str:
        """Its path, with dots."""
        return f"{self.prefix}{self.key}"


class EntryTree:
    """All entries of an object: `nodes`, with containers before their contents, and `tensors`.

    Each dict, list and tuple is entered once, down to `MAX_DEPTH` levels; `is_whole` is False if
    there are deeper containers. A list or tuple of only numbers and text is a value, not a
    container.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.is_whole = True
        self._ends: dict[int, int] = {}
        self._is_alone = is_tensor(obj) or not _is_container(obj)
        if is_tensor(obj):
            self.tensors.append(obj)
        if not self._is_alone:
            self._walk(obj)
        else:
            self.nodes.append(Node(0, -1, "", "", obj, len(self.tensors) - 1, None))

    def _walk(self, obj: Any) -> None:
        nodes, tensors = self.nodes, self.tensors
        types = tensor_types()
        new = tuple.__new__  # Node() takes three times as long, and there may be 100,000
        around = [-1]  # the numbers of the containers around an entry, the outermost first
        for path, prefix, key, value, is_inner, again in walk_entries(
            obj, _is_container, whole="the whole object"
        ):
            depth = len(path)
            while len(around) > depth + 1:
                self._ends[around.pop()] = len(nodes)
            if isinstance(value, types):
                nodes.append(new(Node, (depth, around[-1], prefix, key, value, len(tensors), None)))
                tensors.append(value)
                continue
            nodes.append(Node(depth, around[-1], prefix, key, value, -1, again))
            if is_inner and again is None:
                if depth >= MAX_DEPTH:
                    self.is_whole = False
                else:
                    around.append(len(nodes) - 1)
        while around:
            self._ends[around.pop()] = len(nodes)

    @cached_property
    def tensor_nodes(self) -> list[int]:
        """The number of each tensor's node."""
        return [number for number, node in enumerate(self.nodes) if node.tensor >= 0]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors with names for messages; tensors in a set have the set's name."""
        found: list[tuple[str, Tensor]] = []
        for node in self.nodes:
            if node.tensor >= 0:
                found.append((node.name or "the tensor itself", node.value))
            elif isinstance(node.value, (set, frozenset)):
                name = node.name or "the set itself"
                found += [(name, value) for value in node.value if is_tensor(value)]
        return found

    def end_of(self, number: int) -> int:
        """Return the number of the first node behind a container and its contents."""
        return self._ends.get(number, number + 1)

    def is_container(self, number: int) -> bool:
        """Return whether a node's value is a container whose contents are nodes, too."""
        return number in self._ends

    def path_of(self, number: int) -> Path:
        """Return the keys that lead to a node."""
        keys: list[Any] = []
        while number >= 0 and not self._is_alone:
            keys.append(self.nodes[number].key)
            number = self.nodes[number].parent
        return tuple(reversed(keys))

    def select(self, patterns: Sequence[str]) -> list[int]:
        """Return the numbers of the nodes that patterns name, with the containers around them.

        A pattern is a name, a shell pattern, or a path of keys such as ``"('a.b', 0)"``. If it
        names a container, the container's contents are included.
        """
        paths = [path for path in map(path_in, patterns) if path is not None]
        chosen: set[int] = set()
        number = 0
        while number < len(self.nodes):
            name = self.nodes[number].name
            if not (
                any(name == p or fnmatch.fnmatchcase(name, p) for p in patterns)
                or (paths and self.path_of(number) in paths)
            ):
                number += 1
                continue
            parent = self.nodes[number].parent
            while parent >= 0 and parent not in chosen:
                chosen.add(parent)
                parent = self.nodes[parent].parent
            end = self.end_of(number)
            chosen.update(range(number, end))
            number = end
        return sorted(chosen)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a list or tuple of these."""
    if isinstance(value, (list, tuple)):
        return _PLAIN_TYPES.issuperset(map(type, value))
    return type(value) in _PLAIN_TYPES


def _is_container(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, (list, tuple)) and not is_plain(value)


_MAX_COMPARED = 20_000
_MAX_SUGGESTED = 3


class EntryNames:
    """The names of the tensors of an object, and the look-up of entries by name.

    `tensors` and `names` are in the order of the file. A name is dotted, or a tuple of keys if
    another tensor has the same dotted name.
    """

    def __init__(self, obj: Any, path: str) -> None:
        self._obj = obj
        self._path = path
        self.tensors: list[Tensor] = []
        self.names: list[str | Path] = []
        self._numbers: dict[str | Path, int] = {}  # by dotted name, and by name
        self._ambiguous: dict[str, list[Path]] = {}
        for number, (dotted_name, entry, tensor) in enumerate(_tensors_of(obj, path)):
            self.tensors.append(tensor)
            self.names.append(dotted_name)
            first = self._numbers.setdefault(dotted_name, number)
            if first != number:
                self._ambiguous.setdefault(dotted_name, []).append(entry)
        if self._ambiguous:
            self._tell_apart()

    def _tell_apart(self) -> None:
        """Give tensors that share a dotted name their tuples of keys as names."""
        for number, (name, entry, _) in enumerate(_tensors_of(self._obj, self._path)):
            if name in self._ambiguous:
                if self._numbers[name] == number:
                    self._ambiguous[name].insert(0, entry)
                self.names[number] = entry
                self._numbers[entry] = number

    def find(self, name: str | Path) -> Any:
        """Return the entry with a name; raise EntryNotFoundError if none or several have it."""
        if isinstance(name, tuple):
            return self._follow(name)
        if not isinstance(name, str):
            raise TypeError(f"a name is a str or a tuple of keys, not {type(name).__name__}")
        number = self._numbers.get(name)
        if number is not None and name not in self._ambiguous:
            return self.tensors[number]
        paths = self._ambiguous.get(name) or list(_paths_to(self._obj, name))
        if len(paths) > 1:
            choices = " or ".join(map(repr, paths))
            raise EntryNotFoundError(
                f"{self._path}: {name!r} may be any of several entries: ask for {choices}"
            )
        if not paths:
            raise self._missing(name)
        return self._follow(paths[0])

    def number_of(self, name: str | Path, tensor: Tensor) -> int:
        """Return the number of a tensor that `find` has returned for this name."""
        for each in (name, dotted(name) if isinstance(name, tuple) else name):
            number = self._numbers.get(each)
            if number is not None and self.tensors[number] is tensor:
                return number
        # The name leads to the tensor's container by a second path.
        return next(i for i, other in enumerate(self.tensors) if other is tensor)

    def _follow(self, path: Path) -> Any:
        value = self._obj
        for key in path:
            if not is_container(value):
                raise self._missing(path)
            try:
                if isinstance(value, Mapping) and key not in value:  # a Counter has all keys
                    raise KeyError(key)
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self._missing(path) from None
        return value

    def _missing(self, name: str | Path) -> EntryNotFoundError:
        return entry_not_found(self._path, name, [node.name for node in EntryTree(self._obj).nodes])


def entry_not_found(file: str, name: str | Path, names: Iterable[str]) -> EntryNotFoundError:
    """Return the error for a name that is not in `names`; it suggests similar ones."""
    import difflib

    text = dotted(name) if isinstance(name, tuple) else name
    similar = [other for other in names if 2 * abs(len(other) - len(text)) <= len(text) + 8]
    nearest = difflib.get_close_matches(text, similar[:_MAX_COMPARED], n=_MAX_SUGGESTED)
    hint = f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    return EntryNotFoundError(f"{file}: no entry {name!r}{hint}")


def _tensors_of(obj: Any, file: str) -> Iterator[tuple[str, Path, Tensor]]:
    """Yield the dotted name, the path and the value of every tensor."""
    if is_tensor(obj):
        yield "", (), obj
        return
    if not is_container(obj):
        return
    for path, prefix, key, value, is_inner, again in walk_entries(obj):
        if is_tensor(value):
            yield f"{prefix}{key}", (*path, key), value
        elif is_inner and again is None and len(path) >= MAX_DEPTH:
            raise nested_too_deep(file)


def _paths_to(obj: Any, name: str) -> Iterator[Path]:
    """Yield every path that is written as `name`; keys may hold dots themselves."""
    if not name:
        yield ()
        return
    parts = name.split(".")
    pending: list[tuple[Path, Any, int]] = [((), obj, 0)]
    while pending:
        path, value, begin = pending.pop()
        if begin == len(parts):
            yield path
            continue
        for end in range(begin + 1, len(parts) + 1):
            for key in _keys_called(value, ".".join(parts[begin:end])):
                pending.append(((*path, key), value[key], end))


def _keys_called(value: Any, text: str) -> list[Any]:
    """Return the keys of a container that are written as `text`: text, or a whole number."""
    is_number = text.isdecimal() and text.isascii() and len(text) < 19 and str(int(text)) == text
    if isinstance(value, Mapping):
        return [key for key in ([text, int(text)] if is_number else [text]) if key in value]
    if isinstance(value, (list, tuple)) and is_number and int(text) < len(value):
        return [int(text)]
    return []


_BY_CLASS = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
# Containers that may hold an `Opaque`.
OPAQUE_HOLDERS = (Mapping, list, tuple, set, frozenset, deque)


class Opaque:
    """Stands in for a class, a function or an object of a pickle that is not built.

    `type_name` is the full name of the class or function; for an object, of the one that would make
    it. `parts` lists the steps with which the pickle changes the object, and their operands.
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
    """Return the name of the class of a value, also for an `Opaque`.

    >>> type_name_of([]), type_name_of(Opaque("argparse.Namespace", []))
    ('list', 'argparse.Namespace')
    """
    return value.type_name if isinstance(value, Opaque) else type(value).__name__


def holds_opaque(value: Any) -> Opaque | None:
    """Return the first `Opaque` in a value, its keys and attributes; None if there is none."""
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
    """Remove attributes and hooks that hold an `Opaque` from an object's tensors."""
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
    """Raise UnpicklingError, which names the class, if a value holds an `Opaque`."""
    found = holds_opaque(value)
    if found is None:
        return
    raise pickle.UnpicklingError(
        f"{name} needs {found.type_name}, which is not built, as that runs code: if you trust "
        f"the file, allow it with torch.serialization.add_safe_globals([{found.type_name}]), with "
        f"--trust {found.type_name} of the command, or all of it with ptsave.load(..., "
        "weights_only=False)"
    )
