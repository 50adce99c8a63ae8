"""Finds the functions and classes that a checkpoint's pickle asks for, without running it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

from ptsave.archive.checks import check_compressed_members
from ptsave.archive.opening import open_source_archive
from ptsave.contents.directories import find_files
from ptsave.contents.opening import require_checkpoint, require_saved_object
from ptsave.inspection.pickle_globals import globals_in_pickle
from ptsave.sources.locations import named_errors, position_kept
from ptsave.sources.ranges import RangeSource
from ptsave.support.torch_names import (
    ArchiveFileReader,
    allowed_globals,
    blocked_modules,
    user_allowed_globals,
)

# Of a legacy file: magic number, protocol, machine, object, keys of its storages.
_N_LEGACY_PICKLES = 5


def required_globals(f: Any, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the functions and classes that a checkpoint's files name, and their modules.

    The full names are those of Python 3, as torch has them.  The steps of the pickle are read, not
    run.  With NumPy's arrays come the classes of their dtypes: no file names them, but torch wants
    them allowed.
    """
    found: dict[str, str] = {}
    with position_kept(f):
        for source in find_files(f, storage_options).open():
            with named_errors(source.name):
                require_checkpoint(source)
                found |= _globals_in(source)
    return found


def _globals_in(source: RangeSource) -> dict[str, str]:
    found: dict[str, str] = {}
    if source.kind == "legacy":
        with source.stream() as stream:
            for _ in range(_N_LEGACY_PICKLES):
                found |= globals_in_pickle(stream, source.name)
    elif source.kind == "zip":
        found = globals_in_pickle(io.BytesIO(_pickle_of(source)), source.name)
    return found  # a safetensors file has none


def _pickle_of(source: RangeSource) -> bytes:
    reader = open_source_archive(source, verify=True)
    require_saved_object(reader)
    if reader.engine.all_stored:
        return reader.get_record("data.pkl")
    check_compressed_members(reader)
    with source.stream() as stream:
        data: bytes = ArchiveFileReader(stream).get_record("data.pkl")
    return data


def unsafe_globals(names: Iterable[str]) -> list[str]:
    """Return the globals that neither torch nor the user allows with ``weights_only=True``."""
    allowed = {*allowed_globals()}
    allowed |= user_allowed_globals().keys()
    return sorted(name for name in names if name not in allowed)


def never_allowed(module: str) -> bool:
    """Whether torch refuses a module's functions even if the user allows them."""
    return module in ("", *blocked_modules)


def code_to_allow(modules: Mapping[str, str]) -> str:
    """Return the Python code that makes torch build some globals, given the module of each.

    >>> print(code_to_allow({"pathlib.PosixPath": "pathlib"}))
    import pathlib, torch
    torch.serialization.add_safe_globals([pathlib.PosixPath])
    """
    return (
        f"import {', '.join(sorted({'torch', *modules.values()}))}\n"
        f"torch.serialization.add_safe_globals([{', '.join(sorted(modules))}])"
    )
