"""The entries of a saved object as a tree: containers, tensors and other values, in its order."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.tree.containers import MAX_DEPTH, Path, is_tensor, path_in, tensor_types, walk_entries

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN_TYPES = {int, float, complex, bool, str, bytes, type(None)}


class Node(NamedTuple):
    """One entry: a container, a tensor or another value.

    `depth` is the number of containers around it, not counting the object itself. `parent` is the
    number of its container's node, or -1 for the object itself. `prefix` is the container's dotted
    path, with a dot at the end. `key` is ``""`` for an object that is no container. `tensor` is its
    number among the tensors, or -1. `again` is the earlier name of a container that has been met
    before.
    """

    depth: int
    parent: int
    prefix: str
    key: Any
    value: Any
    tensor: int
    again: str | None

    @property
    def name(self) -> str:
        """Its path, with dots."""
        return f"{self.prefix}{self.key}"


class EntryTree:
    """All entries of an object: `nodes`, with containers before their contents, and `tensors`.

    Dicts, lists and tuples are looked into once, down to `MAX_DEPTH` levels; `is_whole` tells
    whether there are none below. A list of nothing but numbers and text is not a container, but a
    value.
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

        A pattern is a name, which includes the contents of a container, or a shell pattern.
        ``"('a.b', 0)"`` is a path of keys.
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
