"""Finds names of modules in the names of tensors, and replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


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
