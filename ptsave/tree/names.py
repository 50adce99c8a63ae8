"""Dotted names of the entries of a saved object, and the entry that a name means.

Each container is listed once, under its first path, so that a file of shared lists cannot multiply.
Every other path finds it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ptsave.errors import EntryNotFoundError
from ptsave.tree.containers import (
    MAX_DEPTH,
    Path,
    dotted,
    is_container,
    is_tensor,
    nested_too_deep,
    walk_entries,
)
from ptsave.tree.tree import EntryTree

if TYPE_CHECKING:
    from torch import Tensor

_MAX_COMPARED = 20_000
_MAX_SUGGESTED = 3


class EntryNames:
    """The names of the tensors of an object, and the way from a name to an entry.

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
        """Return the entry that a name means; none or several are an EntryNotFoundError."""
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
        # The name leads to its container by a second path.
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
