"""Maps the names of a checkpoint's tensors to the names in a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from ptsave.tree.containers import items_of


class Match(NamedTuple):
    """A pattern that was found in a name, between `begin` and `end`."""

    name: str
    begin: int
    end: int
    pattern: str

    def replaced_by(self, other: str) -> str:
        """Return the name with `other` in place of the pattern."""
        return self.name[: self.begin] + other + self.name[self.end :]


class NamePatterns:
    """Parts of names to look for: one or more components, such as ``"attn.q_proj"``.

    A dot at an end of a pattern belongs to it, and is replaced with it.

    >>> match = next(NamePatterns([".q_proj"]).matches("attn.q_proj.weight"))
    >>> match.replaced_by(".qkv_proj")
    'attn.qkv_proj.weight'
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = list(patterns)
        self._by_parts: dict[tuple[str, ...], list[str]] = {}
        for pattern in self._patterns:
            parts = tuple(pattern.removeprefix(".").removesuffix(".").split("."))
            self._by_parts.setdefault(parts, []).append(pattern)
        self._longest = max(map(len, self._by_parts), default=0)
        self._first_parts = {parts[0] for parts in self._by_parts}

    def matches(self, name: str) -> Iterator[Match]:
        """Yield patterns that are whole components of a name.

        Those with most components come first; among these, those nearest to the end.
        """
        parts = tuple(name.split("."))
        if self._first_parts.isdisjoint(parts):
            return
        firsts = [i for i in range(len(parts) - 1, -1, -1) if parts[i] in self._first_parts]
        for n_parts in range(min(self._longest, len(parts)), 0, -1):
            for first in firsts:
                if first + n_parts > len(parts):
                    continue
                for pattern in self._by_parts.get(parts[first : first + n_parts], ()):
                    begin = sum(map(len, parts[:first])) + first - pattern.startswith(".")
                    end = begin + len(pattern)
                    if begin >= 0 and end <= len(name):
                        yield Match(name, begin, end, pattern)

    def loose_matches(self, name: str) -> Iterator[Match]:
        """Yield patterns anywhere in a name, also within components, the longest first."""
        for pattern in sorted(self._patterns, key=len, reverse=True):
            begin = name.rfind(pattern)
            if begin >= 0:
                yield Match(name, begin, begin + len(pattern), pattern)


# A name in the file -> the model's, or None to leave the tensor out; or parts of names.
Rename: TypeAlias = "Callable[[str], str | None] | Mapping[str, str | None]"


class Renaming:
    """The names that a model has for a checkpoint's.

    `rename` is a function of a name, or a mapping. A mapping replaces whole names, or one or more
    components of a name wherever they are, the longest first. The new name None leaves a tensor
    out. Only names that begin with `prefix` count; it is removed before they are renamed. `changes`
    tells whether there is anything to do.

    >>> Renaming({"encoder.h": "layers", "gamma": "weight"}, "model.")("model.encoder.h.gamma")
    'layers.weight'
    >>> Renaming(None, "model.")("vision.ln.gamma") is None
    True
    """

    def __init__(self, rename: Rename | None = None, prefix: str = "") -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, not {type(prefix).__name__}")
        self._prefix = prefix
        self.changes = bool(prefix) or rename is not None
        self._rename: Callable[[str], str | None] | None
        if rename is None or callable(rename):
            self._rename = rename
        elif isinstance(rename, Mapping):
            self._new_names = dict(rename)
            for name, new in self._new_names.items():
                _check_names(name, new)
            self._patterns = NamePatterns(rename)
            self._rename = self._by_mapping
        else:
            raise TypeError(
                f"rename must be a function or a mapping of names, not {type(rename).__name__}"
            )

    def __call__(self, name: str) -> str | None:
        """Return the model's name; None for a tensor that is left out."""
        if not name.startswith(self._prefix):
            return None
        name = name[len(self._prefix) :]
        if self._rename is None:
            return name
        renamed = self._rename(name)
        if renamed is not None and not isinstance(renamed, str):
            raise TypeError(f"rename({name!r}) is {type(renamed).__name__}, not a string or None")
        return renamed

    def of_state_dict(self, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return a state dict, with its metadata, under the model's names."""
        from ptsave.state.prefixes import renamed

        return renamed(
            state_dict, self, lambda metadata, _: OrderedDict(renamed_metadata(metadata, self))
        )

    def _by_mapping(self, name: str) -> str | None:
        if name in self._new_names:
            return self._new_names[name]
        found: list[Match] = []
        for match in self._patterns.matches(name):  # the longest first
            if all(match.end <= other.begin or other.end <= match.begin for other in found):
                found.append(match)
        for match in sorted(found, key=lambda each: each.begin, reverse=True):
            new = self._new_names[match.pattern]
            if new is None:
                return None
            name = name[: match.begin] + new + name[match.end :]
        return name


def _check_names(name: object, new: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"rename: a name must be a string, not {name!r}")
    if new is not None and not isinstance(new, str):
        raise TypeError(f"rename[{name!r}] must be a string or None, not {new!r}")


def renamed_metadata(
    metadata: Mapping[str, Any], renaming: Callable[[str], str | None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the versions of modules by their names in the model: copies, as loads edit them."""
    marker = ".weight"
    for key, versions in items_of(metadata):
        name = renaming(f"{key}{marker}" if key else marker[1:])
        if name is not None and f".{name}".endswith(marker):
            yield f".{name}".removesuffix(marker).removeprefix("."), dict(versions)
