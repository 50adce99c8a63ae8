"""The form of ``ptsave verify --json``, which programs rely on: keys are added, never changed.

An object with

- ``whole``: whether nothing is damaged, and all could be read;
- ``arguments``: a list of objects, one for each FILE, with ``path``, ``files``, ``problems`` (texts
  about inconsistent shards and indices), ``not_looked_at`` (names in a directory) and ``error`` (a
  text, or null if it could be read).

An object of ``files`` has

- ``path``, ``nbytes``, ``records`` (how many; 0 for a file that is no archive), ``tensors`` (how
  many, or null) and ``unfinished`` (whether its end is missing);
- ``state``: ``"whole"``, ``"damaged"``, ``"no checksums"`` or ``"unreadable"``;
- ``problems``: objects with ``reason``, ``record``, ``offset`` and ``entries``, the damaged
  tensors; and ``readable``, the names of tensors that can still be read, or null;
- ``remarks``, and ``error`` (a text, or null if the file is readable).
"""

from __future__ import annotations

from typing import Any

from ptsave.inspection.findings import Problem, Verification


def argument_json(path: str, error: str | None = None) -> dict[str, Any]:
    """Return the JSON object for one argument, without its files and problems yet."""
    return {"path": path, "files": [], "problems": [], "not_looked_at": [], "error": error}


def file_json(found: Verification) -> dict[str, Any]:
    """Return the JSON object for one file."""
    state = "damaged" if found.problems else "whole" if found.has_checksums else "no checksums"
    return {
        "path": found.path,
        "state": state,
        "unfinished": found.is_unfinished,
        "nbytes": found.nbytes,
        "records": found.n_records,
        "tensors": None if found.tensors is None else len(found.tensors),
        "readable": found.whole if found.problems else None,
        "problems": [_problem_json(problem) for problem in found.problems],
        "remarks": found.remarks,
        "error": None,
    }


def unreadable_json(path: str, error: str) -> dict[str, Any]:
    """Return the JSON object for a file that could not be read."""
    found = file_json(Verification(path, []))
    return {**found, "state": "unreadable", "nbytes": None, "records": None, "error": error}


def _problem_json(problem: Problem) -> dict[str, Any]:
    return {
        "reason": problem.reason,
        "record": problem.record,
        "offset": problem.offset,
        "entries": problem.entries,
    }
