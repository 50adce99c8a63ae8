"""Finds the functions and classes that a checkpoint asks for, without running its pickle.

Functions import the modules that need torch, because `ptsave globals` often needs no torch.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickletools
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from ptsave.contents.directories import find_files
from ptsave.errors import CorruptCheckpointError
from ptsave.sources.locations import named_errors, position_kept
from ptsave.sources.ranges import RangeSource

# The globals that most files name and that every torch allows.
ORDINARY_GLOBALS = frozenset(
    {"collections.OrderedDict"}
    | {f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_parameter")}
    | {
        f"torch.{kind}Storage"
        for kind in (
            "Byte",
            "Char",
            "Short",
            "Int",
            "Long",
            "Bool",
            "Half",
            "BFloat16",
            "Float",
            "Double",
        )
    }
)

_UNKNOWN = "(computed while unpickling)"
_DTYPE_CODE = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,9}")
_PUTS = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}


def globals_in_pickle(stream: BinaryIO, path: str) -> dict[str, str]:
    """Return the globals of one pickle, as `required_globals` does; leave the stream behind it."""
    found: dict[str, str] = {}
    memo: dict[int, str | None] = {}
    strings: list[str | None] = []  # the last two pushed values; None for a value that is no text
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
            if len(strings) > 1 and isinstance(strings[-2], _Global):
                found |= _dtype_class(strings[-1]) if strings[-2] == "numpy.dtype" else {}
            del strings[:-2]
    except (ValueError, AttributeError, IndexError, OverflowError, UnicodeError) as error:
        raise CorruptCheckpointError(
            f"{path}: its pickle is damaged: {error}", path=path, record="data.pkl"
        ) from None
    return found


class _Global(str):
    """A text in a pickle that is the full name of a global."""


def _add(found: dict[str, str], module: str | None, name: str | None) -> _Global:
    if not module or not name:
        found[_UNKNOWN] = ""
        return _Global(_UNKNOWN)
    # Pickles use the module names of Python 2.
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    found[f"{module}.{name}"] = module
    return _Global(f"{module}.{name}")


def _dtype_class(code: str | None) -> dict[str, str]:
    """Return the class of the dtype with this code, and its module, if NumPy has a name for it."""
    if code is None or not _DTYPE_CODE.fullmatch(code):
        return {}
    with suppress(ImportError, TypeError, ValueError):
        import numpy

        kind = type(numpy.dtype(code))
        if kind.__module__ == "numpy.dtypes":  # before NumPy 1.25 these classes have no names
            return {f"numpy.dtypes.{kind.__name__}": "numpy.dtypes"}
    return {}


# A legacy file has pickles of: magic number, protocol, machine, object, keys of storages.
_N_LEGACY_PICKLES = 5


def required_globals(f: Any, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the functions and classes that a checkpoint's files name, and their modules.

    The full names are those of Python 3, as in torch.  The pickle is read, not run.  For NumPy
    arrays, the result includes the classes of their dtypes: files do not name these classes, but
    torch requires that they are allowed.
    """
    from ptsave.contents.opening import require_checkpoint

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
    from ptsave.archive.damage import check_compressed_members
    from ptsave.archive.opening import open_source_archive
    from ptsave.contents.opening import require_saved_object
    from ptsave.support.torch_names import ArchiveFileReader

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
    from ptsave.support.torch_names import allowed_globals, user_allowed_globals

    allowed = {*allowed_globals(), *user_allowed_globals()}
    return sorted(name for name in names if name not in allowed)


def never_allowed(module: str) -> bool:
    """Whether torch refuses a module's functions even if the user allows them."""
    from ptsave.support.torch_names import blocked_modules

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
