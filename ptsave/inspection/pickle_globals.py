"""Finds the functions and classes that a checkpoint names, without running its pickle.

Modules that need torch are imported in functions: `ptsave globals` often works without torch.
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

# Functions and classes that most files name, and that every version of torch allows.
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
    """Read one pickle, and return the functions and classes that it names, with their modules."""
    found: dict[str, str] = {}
    memo: dict[int, str | None] = {}
    strings: list[str | None] = []  # the last two pushed values; None if not text
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
            f"{path}: the pickle is damaged: {error}", path=path, record="data.pkl"
        ) from None
    return found


class _Global(str):
    """The full name of a global, as text from a pickle."""


def _add(found: dict[str, str], module: str | None, name: str | None) -> _Global:
    if not module or not name:
        found[_UNKNOWN] = ""
        return _Global(_UNKNOWN)
    # The pickles use Python 2's names of modules, such as __builtin__.
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    found[f"{module}.{name}"] = module
    return _Global(f"{module}.{name}")


def _dtype_class(code: str | None) -> dict[str, str]:
    """Return the class of the dtype `code`, and its module, if NumPy names this class."""
    if code is None or not _DTYPE_CODE.fullmatch(code):
        return {}
    with suppress(ImportError, TypeError, ValueError):
        import numpy

        kind = type(numpy.dtype(code))
        if kind.__module__ == "numpy.dtypes":  # before NumPy 1.25 these classes have no names
            return {f"numpy.dtypes.{kind.__name__}": "numpy.dtypes"}
    return {}


# A file from before torch 1.6 has five pickles: magic number, protocol, machine, object, keys.
_N_LEGACY_PICKLES = 5


def required_globals(f: Any, *, storage_options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the functions and classes that a checkpoint's files name, and their modules.

    If a pickle has a module's Python 2 name (``__builtin__``), the result has the Python 3 name
    (``builtins``).  The pickle is read, not run.  For NumPy arrays, the result includes the classes
    of their dtypes.  A file does not name these classes, but torch refuses it unless they are
    allowed.
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
    return found  # a safetensors file has no pickle


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
    """Return whether torch refuses all functions of a module, even if the user allows them."""
    from ptsave.support.torch_names import blocked_modules

    return module in ("", *blocked_modules)


def code_to_allow(modules: Mapping[str, str]) -> str:
    """Return Python code that allows functions and classes; `modules` maps each to its module.

    >>> print(code_to_allow({"pathlib.PosixPath": "pathlib"}))
    import pathlib, torch
    torch.serialization.add_safe_globals([pathlib.PosixPath])
    """
    return (
        f"import {', '.join(sorted({'torch', *modules.values()}))}\n"
        f"torch.serialization.add_safe_globals([{', '.join(sorted(modules))}])"
    )
