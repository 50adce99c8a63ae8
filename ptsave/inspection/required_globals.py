"""Finds the functions and classes that a checkpoint's pickle asks for, without running it."""

from __future__ import annotations

import _compat_pickle
import io
import pickletools
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from ptsave.archive.checks import check_compressed_members
from ptsave.archive.opening import open_source_archive
from ptsave.contents.checkpoint_files import find_files
from ptsave.contents.opening import require_checkpoint, require_saved_object
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.local import position_kept
from ptsave.sources.ranges import RangeSource
from ptsave.sources.remote_errors import named_errors
from ptsave.support.torch_serialization import (
    ArchiveFileReader,
    allowed_globals,
    blocked_modules,
    user_allowed_globals,
)

__all__ = [
    "code_to_allow",
    "globals_in_pickle",
    "never_allowed",
    "required_globals",
    "unsafe_globals",
]

# Magic number, protocol, a description of the machine, the object, the keys of its storages.
_N_LEGACY_PICKLES = 5
_UNKNOWN = "(computed while unpickling)"
_DTYPE_CODE = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,9}")
_PUTS = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}


def required_globals(f: Any, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the functions and classes that a checkpoint, or any of its files, names.

    The steps of the pickle are read, and none is taken.  With NumPy's arrays there are the classes
    of their dtypes, which no file names, but torch wants to have allowed, too.

    Parameters
    ----------
    f : str, os.PathLike or file-like
        As for :func:`ptsave.open`.
    storage_options : mapping, optional
        For the file system of a URL.

    Returns
    -------
    dict of str to str
        The module of each by its full name, which is that of Python 3, as torch has it.  A
        safetensors file names none.

    Raises
    ------
    NotCheckpointError
        If it is something else.
    CorruptCheckpointError
        If it, or its pickle, is damaged.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> import os, pathlib, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "checkpoint.pt")
    ...     torch.save({"where": pathlib.PurePosixPath("x"), "t": torch.ones(1)}, path)
    ...     unsafe_globals(required_globals(path))
    ['pathlib.PurePosixPath']
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
    return found  # of a safetensors file: it has none


def _pickle_of(source: RangeSource) -> bytes:
    reader = open_source_archive(source, verify=True)
    require_saved_object(reader)
    if reader.engine.all_stored:
        return reader.get_record("data.pkl")
    check_compressed_members(reader)
    with source.stream() as stream:
        data: bytes = ArchiveFileReader(stream).get_record("data.pkl")
    return data


def globals_in_pickle(stream: BinaryIO, path: str) -> dict[str, str]:
    """Return the globals of one pickle, at whose end the stream is left, as `required_globals`."""
    found: dict[str, str] = {}
    memo: dict[int, str | None] = {}
    strings: list[str | None] = []  # the last values that were pushed; None for no text
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            value: str | None = argument if isinstance(argument, str) else None
            if opcode.name in ("GLOBAL", "INST"):
                value = _add(found, *str(argument).split(" ", 1))
            elif opcode.name == "STACK_GLOBAL":
                value = _add(found, *(strings if len(strings) == 2 else (None, None)))
            if opcode.name in _PUTS:
                key = len(memo) if opcode.name == "MEMOIZE" else int(str(argument))
                memo[key] = strings[-1] if strings else None
            elif opcode.name in _GETS:
                strings.append(memo.get(int(str(argument))))
            elif opcode.stack_after:
                strings.append(value)
            if len(strings) > 1 and _is_dtype(strings[-2]):
                found |= _dtype_class(strings[-1])
            del strings[:-2]
    except (ValueError, AttributeError, IndexError, OverflowError, UnicodeError) as error:
        raise CorruptCheckpointError(
            f"{path}: its pickle is damaged: {error}", path=path, record="data.pkl"
        ) from None
    return found


class _Global(str):
    """The full name of a global, among texts that are none."""


def _add(found: dict[str, str], module: str | None, name: str | None) -> _Global:
    if not module or not name:
        found[_UNKNOWN] = ""
        return _Global(_UNKNOWN)
    # Files are written with the names of Python 2.
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    found[f"{module}.{name}"] = module
    return _Global(f"{module}.{name}")


def _is_dtype(value: str | None) -> bool:
    return isinstance(value, _Global) and value == "numpy.dtype"


def _dtype_class(code: str | None) -> dict[str, str]:
    """Return the class of the dtype that NumPy makes of such a text, and its module."""
    if code is None or not _DTYPE_CODE.fullmatch(code):
        return {}
    with suppress(ImportError, TypeError, ValueError):
        import numpy

        kind = type(numpy.dtype(code))
        if kind.__module__ == "numpy.dtypes":  # before NumPy 1.25 they have no names
            return {f"numpy.dtypes.{kind.__name__}": "numpy.dtypes"}
    return {}


def unsafe_globals(names: Iterable[str]) -> list[str]:
    """Return those that torch does not build by default with ``weights_only=True``.

    Parameters
    ----------
    names : iterable of str
        As from `required_globals`.
    """
    allowed = {*allowed_globals()}
    allowed |= user_allowed_globals().keys()
    return sorted(name for name in names if name not in allowed)


def never_allowed(module: str) -> bool:
    """Whether torch refuses a module's functions even if they are on the list."""
    return module in ("", *blocked_modules)


def code_to_allow(modules: Mapping[str, str]) -> str:
    """Return the Python code that makes torch build some globals.

    Parameters
    ----------
    modules : mapping of str to str
        The module of each.

    Examples
    --------
    >>> print(code_to_allow({"pathlib.PosixPath": "pathlib"}))
    import pathlib, torch
    torch.serialization.add_safe_globals([pathlib.PosixPath])
    """
    return (
        f"import {', '.join(sorted({'torch', *modules.values()}))}\n"
        f"torch.serialization.add_safe_globals([{', '.join(sorted(modules))}])"
    )
