"""Names of engines and of their folders."""

from __future__ import annotations

import re
from importlib.machinery import EXTENSION_SUFFIXES

FILE_NAME = f"_C{EXTENSION_SUFFIXES[0]}"
_FOLDER = re.compile(r"torch_(\d+)_(\d+)")


def series_of(torch_version: str) -> str:
    """Return the minor series of a version: "2.13" of "2.13.1+cpu"."""
    return ".".join(torch_version.split(".")[:2])


def folder_name(torch_version: str) -> str:
    """Return the name of the engine's folder for this torch."""
    return f"torch_{series_of(torch_version).replace('.', '_')}"


def series_of_folder(name: str) -> tuple[int, int] | None:
    """Return the minor series of the engine in a folder of this name."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
