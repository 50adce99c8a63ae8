"""Paths of entries: keys from the outermost container inwards, and their text with dots."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeAlias

Path: TypeAlias = tuple[Any, ...]

# The limit for all code that names entries.  A file decides how deep its object is, and each level
# makes the names below it longer.  torch.save reaches 970 levels before a RecursionError.
MAX_DEPTH = 1000


def dotted(path: Path) -> str:
    """Return a path as text with dots."""
    return ".".join(map(str, path))


def path_in(text: str) -> Path | None:
    """Return the keys of a name that is written as a Python tuple; None for any other text.

    >>> path_in("('a.b', 0)"), path_in("a.b")
    (('a.b', 0), None)
    """
    if text.startswith("(") and text.endswith(")"):
        import ast

        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            path = ast.literal_eval(text)
            if isinstance(path, tuple):
                return path
    return None
