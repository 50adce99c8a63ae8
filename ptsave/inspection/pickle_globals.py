"""Finds the globals of a pickle by reading its steps, without running them."""

from __future__ import annotations

import _compat_pickle
import pickletools
import re
from contextlib import suppress
from typing import BinaryIO

from ptsave.errors import CorruptCheckpointError

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
    """Return the globals of one pickle, as `required_globals`; leaves the stream at its end."""
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
    # Files have the names of Python 2.
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
        if kind.__module__ == "numpy.dtypes":  # before NumPy 1.25 they have no names
            return {f"numpy.dtypes.{kind.__name__}": "numpy.dtypes"}
    return {}
