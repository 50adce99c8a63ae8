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

    If the saved object is not a container, it is the only entry, and its `key` is ``""``.
    """

    depth: int  # the number of containers around it, not counting the saved object itself
    parent: int  # the number of its container's node; -1 if it is in the saved object itself
    prefix: str  # the container's dotted path, with a dot at the end
    key: Any
    value: Any
    tensor: int  # its number among the tensors; -1 if it is not a tensor
    again: str | None  # the first name of a container that has several; else None

    @property
    def name(self) -> str:
        """The entry's path, with dots."""
        return f"{self.prefix}{self.key}"


class EntryTree:
    """All entries of an object as `nodes`, each container before its contents; and all `tensors`.

    Each dict, list and tuple is entered once, down to `MAX_DEPTH` levels; `is_whole` is False if
    there are deeper containers. A list or tuple of plain values (see `is_plain`) counts as a
    value, not as a container.
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
        """For each tensor, the number of its node in `nodes`."""
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
        """Return the number of the first node after a container and its contents."""
        return self._ends.get(number, number + 1)

    def is_container(self, number: int) -> bool:
        """Return whether a node's value is a container whose contents are nodes, too."""
        return number in self._ends

    def path_of(self, number: int) -> Path:
        """Return the keys that lead from the saved object to a node."""
        keys: list[Any] = []
        while number >= 0 and not self._is_alone:
            keys.append(self.nodes[number].key)
            number = self.nodes[number].parent
        return tuple(reversed(keys))

    def select(self, patterns: Sequence[str]) -> list[int]:
        """Return the numbers of nodes that match any of `patterns`, and of containers around them.

        A pattern is a name, a shell pattern, or a path of keys such as ``"('a.b', 0)"``. If a
        container matches, its contents are included.
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
    """Return whether a value is a number, text, bytes or None, or a list or tuple of these."""
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

    `tensors` and `names` are in the order of the file. A name has the keys, joined by dots;
    it is a tuple of keys if another tensor has the same dotted name.
    """

    def __init__(self, obj: Any, path: str) -> None:
        self._obj = obj
        self._path = path
        self.tensors: list[Tensor] = []
        self.names: list[str | Path] = []
        self._numbers: dict[str | Path, int] = {}  # in `tensors`, by dotted name and by name
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
        """Rename each tensor whose dotted name is not unique: its new name is its tuple of keys."""
        for number, (name, entry, _) in enumerate(_tensors_of(self._obj, self._path)):
            if name in self._ambiguous:
                if self._numbers[name] == number:
                    self._ambiguous[name].insert(0, entry)
                self.names[number] = entry
                self._numbers[entry] = number

    def find(self, name: str | Path) -> Any:
        """Return the entry with this name; raise EntryNotFoundError if there is not exactly one."""
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
                f"{self._path}: several entries have the name {name!r}: ask for {choices}"
            )
        if not paths:
            raise self._missing(name)
        return self._follow(paths[0])

    def number_of(self, name: str | Path, tensor: Tensor) -> int:
        """Return the index in `tensors` of a tensor that `find` has returned for this name."""
        for each in (name, dotted(name) if isinstance(name, tuple) else name):
            number = self._numbers.get(each)
            if number is not None and self.tensors[number] is tensor:
                return number
        # The name is another path to the tensor, through a container that occurs twice.
        return next(i for i, other in enumerate(self.tensors) if other is tensor)

    def _follow(self, path: Path) -> Any:
        value = self._obj
        for key in path:
            if not is_container(value):
                raise self._missing(path)
            try:
                if isinstance(value, Mapping) and key not in value:  # a Counter accepts any key
                    raise KeyError(key)
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self._missing(path) from None
        return value

    def _missing(self, name: str | Path) -> EntryNotFoundError:
        return entry_not_found(self._path, name, [node.name for node in EntryTree(self._obj).nodes])


def entry_not_found(file: str, name: str | Path, names: Iterable[str]) -> EntryNotFoundError:
    """Return the error for a name that is not in `names`; the error suggests similar names."""
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
    """Yield every path whose keys, joined by dots, are `name`; a key itself may contain dots."""
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
    """Return the keys of a container that are `text`, as a string or as an integer."""
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
    """Stands for a class, function or object of a pickle, which ptsave has not imported or built.

    `type_name` is the full name of the class or function; for an object, it names the class or
    function that would make the object. `parts` lists the steps by which the pickle would make
    and change the object, each with its operands.
    """

    __slots__ = ("parts", "type_name")

    def __init__(self, type_name: str, parts: list[Any]) -> None:
        self.type_name = type_name if type_name.isprintable() else ascii(type_name)[1:-1]
        self.parts = parts

    def __repr__(self) -> str:
        return f"<{self.type_name}>"

    def __setitem__(self, key: Any, value: Any) -> None:
        """Add an item to `parts`; the engine's unpickler calls this method as if for a dict."""
        self.parts += ["item", key, value]

    def made_with(self, arguments: Any) -> Opaque:
        """Return an `Opaque` for the object that this class or function would make."""
        name = self.type_name
        if name in _BY_CLASS and type(arguments) is tuple and arguments:
            name = getattr(arguments[0], "type_name", name)
        return Opaque(name, ["made by", self.type_name, arguments])


def type_name_of(value: Any) -> str:
    """Return the name of a value's class; for an `Opaque`, return its `type_name`.

    >>> type_name_of([]), type_name_of(Opaque("argparse.Namespace", []))
    ('list', 'argparse.Namespace')
    """
    return value.type_name if isinstance(value, Opaque) else type(value).__name__


def holds_opaque(value: Any) -> Opaque | None:
    """Return the first `Opaque` in a value or in its attributes; None if there is none."""
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
    """Remove from an object's tensors all attributes and hooks that hold an `Opaque`."""
    tensors: dict[int, Any] = {}
    pending = [obj]
    while pending:
        for leaf in filter(is_tensor, walk(pending.pop())):
            if id(leaf) not in tensors:
                tensors[id(leaf)] = leaf
                pending += attributes_of(leaf).values()
    for leaf in reversed(tensors.values()):  # tensors in attributes first
        attributes = attributes_of(leaf)
        lost = {name for name, value in attributes.items() if holds_opaque(value)}
        if lost:  # torch.compile's marks are attributes that are useful only together
            lost |= {name for name in attributes if name.startswith("_dynamo_")}
        for name in lost:
            del leaf.__dict__[name]
        if leaf._backward_hooks and holds_opaque(leaf._backward_hooks):
            leaf._backward_hooks = None


def refuse_opaque(value: Any, name: str) -> None:
    """Raise UnpicklingError about `name` if a value, or a part of it, is an `Opaque`."""
    found = holds_opaque(value)
    if found is None:
        return
    raise pickle.UnpicklingError(
        f"{name} needs {found.type_name}, which is not allowed, because building it runs code. If "
        "you trust the file, call torch.serialization.add_safe_globals("
        f"[{found.type_name}]), pass --trust {found.type_name} to the ptsave command, or allow all "
        "names with ptsave.load(..., weights_only=False)"
    )
