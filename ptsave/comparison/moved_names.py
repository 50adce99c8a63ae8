"""Pairs names that differ between two checkpoints only by a prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

# Parts that wrappers put into names, at any depth.
_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)


def moved_names(a: Mapping[str, Hashable], b: Mapping[str, Hashable]) -> dict[str, str]:
    """Return the new names in `b` of names in `a`, where these are clear.

    Parts from wrappers (``module.``, ``_orig_mod.``) do not count.  One name must end in the whole
    of the other (``model.fc.weight``, ``fc.weight``), or both must end in the same two parts or
    more.  The longest common end decides between several candidates.  The values of both names,
    such as dtype and shape, must be equal.

    >>> moved_names({"fc.weight": 1, "fc.bias": 2}, {"module.fc.weight": 1, "module.fc.bias": 3})
    {'fc.weight': 'module.fc.weight'}
    """
    by_end: dict[tuple[str, Hashable], list[str]] = {}
    for name, fact in b.items():
        for end in _ends(name):
            by_end.setdefault((end, fact), []).append(name)
    moved: dict[str, str] = {}
    for name, fact in a.items():
        found = _partner([by_end.get((end, fact), []) for end in _ends(name)])
        if found is not None:
            moved[name] = found
    count = Counter(moved.values())  # a name that several would have become is not clear
    return {name: other for name, other in moved.items() if count[other] == 1}


def _ends(name: str) -> list[str]:
    """Return the dotted ends of a name, the longest first: ``a.b.c``, ``b.c``, ``c``."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _partner(candidates: list[list[str]]) -> str | None:
    n_parts = len(candidates)
    begin = next((i for i, names in enumerate(candidates) if names), n_parts)
    if begin == n_parts:
        return None
    n_common, names = n_parts - begin, candidates[begin]
    if len(names) > 1:
        # A name may be the end of many others: the one without further parts is meant.
        names = [other for other in names if len(_ends(other)) == n_common]
    if len(names) != 1:
        return None
    is_whole = n_common == min(n_parts, len(_ends(names[0])))
    return names[0] if is_whole or n_common >= 2 else None


def prefixes_of(name: str, other: str) -> tuple[str, str]:
    """Return the beginnings of two names, in front of the parts at their common end.

    >>> prefixes_of("module.fc.weight", "fc.weight"), prefixes_of("a.w", "b.w")
    (('module.', ''), ('a.', 'b.'))
    """
    parts, others = name.split("."), other.split(".")
    n = 0
    while n < min(len(parts), len(others)) and parts[-1 - n] == others[-1 - n]:
        n += 1
    return _joined(parts[: len(parts) - n]), _joined(others[: len(others) - n])


def _joined(parts: list[str]) -> str:
    return "".join(f"{part}." for part in parts)
