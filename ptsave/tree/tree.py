"""The entries of a saved object as a tree: containers, tensors and other values, in its order."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ptsave.support.tensor_types import is_tensor, tensor_types
from ptsave.tree.containers import walk_entries
from ptsave.tree.paths import MAX_DEPTH, Path, path_in

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EntryTree", "Node", "is_plain"]

_PLAIN_TYPES = {int, float, complex, bool, str, bytes, type(None)}


class Node(NamedTuple):
    """One entry: a container, a tensor or another value.

    Attributes
    ----------
    depth : int
        Number of containers around it, not counting the object itself.
    parent : int
        The number of the node of its container; -1 for the object itself.
    prefix : str
        The dotted path of its container, with a dot behind it.
    key : object
        In its container; ``""`` for an object that is no container.
    value : object
        The container, tensor or other value.
    tensor : int
        Its number among the tensors; -1 if it is none.
    again : str or None
        For a container that has been met before: its name there.
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
    """All entries of an object.

    Parameters
    ----------
    obj : object
        Dicts, lists and tuples are looked into, each of them once, down to `MAX_DEPTH` levels.  One
        that holds nothing but numbers and text is no container but a value.

    Attributes
    ----------
    obj : object
        The object.
    nodes : list of Node
        Every container in front of its contents.
    tensors : list of torch.Tensor
        In the same order.
    is_whole : bool
        Whether there are no containers below `MAX_DEPTH` levels, which are not looked into.

    Examples
    --------
    >>> import torch
    >>> tree = EntryTree({"model": {"weight": torch.ones(2)}, "sizes": [1, 2]})
    >>> [(node.depth, node.name) for node in tree.nodes]
    [(0, 'model'), (1, 'model.weight'), (0, 'sizes')]
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
        around = [-1]  # the numbers of the containers around an entry, from outside
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
        """The number of the node of each tensor."""
        return [number for number, node in enumerate(self.nodes) if node.tensor >= 0]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors with their names for messages: those in a set have the set's."""
        found: list[tuple[str, Tensor]] = []
        for node in self.nodes:
            if node.tensor >= 0:
                found.append((node.name or "the tensor itself", node.value))
            elif isinstance(node.value, (set, frozenset)):
                name = node.name or "the set itself"
                found += [(name, value) for value in node.value if is_tensor(value)]
        return found

    def end_of(self, number: int) -> int:
        """Return the number of the first node behind a container and all that is in it."""
        return self._ends.get(number, number + 1)

    def is_container(self, number: int) -> bool:
        """Whether a node's value is a container whose contents are nodes, too."""
        return number in self._ends

    def path_of(self, number: int) -> Path:
        """Return the keys that lead to a node."""
        keys: list[Any] = []
        while number >= 0 and not self._is_alone:
            keys.append(self.nodes[number].key)
            number = self.nodes[number].parent
        return tuple(reversed(keys))

    def select(self, patterns: Sequence[str]) -> list[int]:
        """Return the numbers of the nodes that some patterns mean, with the containers around them.

        Parameters
        ----------
        patterns : sequence of str
            Names, which include the contents of a container, or shell patterns.  ``"('a.b', 0)"``
            is a path of keys.
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
    """Whether something is a list or a tuple of numbers and text, or one of these itself."""
    if isinstance(value, (list, tuple)):
        return _PLAIN_TYPES.issuperset(map(type, value))
    return type(value) in _PLAIN_TYPES


def _is_container(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, (list, tuple)) and not is_plain(value)
