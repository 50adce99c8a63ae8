"""Divides a module's part of a state dict among its children, in one pass."""

from __future__ import annotations

from typing import Any

__all__ = ["StateDictPart"]


class StateDictPart:
    """The part of a state dict that one module is given, and the parts of its children."""

    __slots__ = ("_grouped_at", "_groups", "entries", "is_kept", "prefix")

    _groups: dict[str, dict[str, Any]] | None

    def __init__(self, entries: dict[str, Any], prefix: str) -> None:
        self.entries = entries
        self.prefix = prefix
        self.is_kept = False  # by other people's code, which may change it when it runs next
        self._grouped_at = -1

    def groups(self, foreign_runs: int) -> dict[str, dict[str, Any]] | None:
        """Return the entries with a dot behind the prefix, by the name before the dot.

        None if there are keys that are not plain strings.
        """
        if self._grouped_at < 0 or (self.is_kept and self._grouped_at != foreign_runs):
            self._groups = _group(self.entries, self.prefix)
            self._grouped_at = foreign_runs
        return self._groups

    def of_child(self, name: str, child_prefix: str, foreign_runs: int) -> dict[str, Any]:
        """Return the entries under `child_prefix`: a new dict, in this one's order."""
        groups = self.groups(foreign_runs)
        if groups is None or type(name) is not str or "." in name:
            return {
                key: entry for key, entry in self.entries.items() if key.startswith(child_prefix)
            }
        return groups.get(name) or {}


def _group(entries: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]] | None:
    groups: dict[str, dict[str, Any]] = {}
    start = len(prefix)
    for key, entry in entries.items():
        if type(key) is not str:
            return None
        end = key.find(".", start)
        if end >= 0 and key.startswith(prefix):
            name = key[start:end]
            group = groups.get(name)
            if group is None:
                groups[name] = {key: entry}
            else:
                group[key] = entry
    return groups
