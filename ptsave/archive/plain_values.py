"""Rebuilds harmless values that torch's restricted unpickler refuses, such as paths and dates.

A training checkpoint may have such values beside tensors, so a restore accepts them with
``weights_only=True``. torch's own unpickler tries first; this module handles what torch refuses.

A pickle gets a stand-in from this module instead of a function that the pickle names.  Any pickle
may call a stand-in with any arguments.  So a stand-in checks the type and size of each argument,
runs no code of other classes, and makes the value without other effects.  An array has exactly the
bytes in the pickle; its elements are numbers, text or dates.
"""

from __future__ import annotations

import _compat_pickle
import datetime
import functools
import io
import pathlib
import pickle
import pickletools
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from math import prod
from types import FunctionType
from typing import Any

from ptsave.support.torch_names import restricted_unpickler, user_allowed_globals
from ptsave.tree.containers import walk
from ptsave.tree.tree import Opaque

# One-step pickles that the engine's unpickler leaves to Python; the memo holds their operands.
_REDUCE = b"h\0h\1R."
_NEW = b"h\0h\1\x81."
_BUILD = b"h\0h\1b."
_APPEND = b"h\0h\1a."
_APPENDS = b"h\0(e."  # checks whether a container can be appended to
_SET_ITEM = b"h\0h\1h\2s."
_SET_ITEMS = b"h\0(u."

_DTYPE_CODE = r"\?|[bBhHiIlLqQefdgFDG]|[biufcmM][0-9]{1,2}|[SU][0-9]{0,9}"
_MAX_N_DIMENSIONS = 64
_UNITS = {b"generic", *(b"Y M W D h m s ms us ns ps fs as".split())}
_FACTORIES = (bool, dict, float, int, list, set, str, tuple, type(None))


def _require(condition: object, name: str) -> None:
    if not condition:
        raise pickle.UnpicklingError(f"weights_only=True refuses {name} with these arguments")


def _all_are(arguments: Any, kinds: tuple[type, ...]) -> bool:
    return all(type(argument) in kinds for argument in arguments)


# ------------------------------------------------------------------------------------------- NumPy


@functools.cache
def _numpy() -> Any:
    """Return NumPy, or None if it is not installed."""
    with suppress(ImportError):
        import numpy

        return numpy
    return None


def _is_plain_dtype(dtype: Any) -> bool:
    """Whether a dtype's elements are numbers, text or dates, which hold no Python objects."""
    return isinstance(dtype, _numpy().dtype) and dtype.kind in "biufcSUmM"


def _dtype(code: Any, align: Any = False, copy: Any = True) -> Any:
    _require(type(code) is str and re.fullmatch(_DTYPE_CODE, code), "numpy.dtype")
    _require(_all_are((align, copy), (bool, int)), "numpy.dtype")
    try:
        return _numpy().dtype(code, False, True)  # a copy, because its byte order may be changed
    except TypeError as error:
        raise pickle.UnpicklingError(f"numpy.dtype({code!r}): {error}") from None


def _set_dtype_state(dtype: Any, state: Any) -> None:
    now = dtype.__reduce__()[2]
    _require(_is_plain_dtype(dtype) and type(state) is tuple, "numpy.dtype")
    _require(len(state) == len(now) and _all_are(state[:8], (int, str, type(None))), "numpy.dtype")
    orders = "<>=" if now[1] in ("<", ">", "=") else now[1]
    _require(state[1] in [*orders], "numpy.dtype")
    _require((state[0], *state[2:8]) == (now[0], *now[2:8]), "numpy.dtype")
    if len(state) > 8:
        _require(_is_unit(state[8]), "numpy.dtype")
    dtype.__setstate__(state)


def _is_unit(metadata: Any) -> bool:
    """Whether `metadata` describes a unit of time for NumPy, as (None, (b"ns", 1, 1, 1)) does."""
    if type(metadata) is not tuple or len(metadata) != 2 or metadata[0] not in (None, {}):
        return False
    unit = metadata[1]
    if type(unit) is not tuple or len(unit) != 4 or type(unit[0]) is not bytes:
        return False
    return unit[0] in _UNITS and all(type(n) is int and 0 < n < 1 << 31 for n in unit[1:])


def _scalar(dtype: Any, data: Any = b"") -> Any:
    _require(_is_plain_dtype(dtype) and type(data) is bytes, "numpy scalar")
    _require(len(data) == dtype.itemsize, "numpy scalar")
    numpy = _numpy()
    return numpy.ndarray((), dtype, data)[()] if data else dtype.type()


def _array_type(*_: Any) -> None:
    """Stand in for ``numpy.ndarray``, which pickles name but do not call."""
    _require(False, "numpy.ndarray")


def _reconstruct(subtype: Any, shape: Any, code: Any) -> Any:
    is_usual = subtype is _array_type and type(shape) is tuple and len(shape) == 1
    _require(is_usual and type(shape[0]) is int and shape[0] == 0, "numpy.ndarray")
    _require(type(code) in (bytes, str) and code in (b"b", "b"), "numpy.ndarray")
    return _numpy().empty(0, "b")


def _set_array_state(array: Any, state: Any) -> None:
    """Give a new array its values; refuse an array that may share its memory with a tensor."""
    _require(array.shape == (0,) and array.dtype == "b", "numpy.ndarray")
    _require(type(state) is tuple and len(state) == 5, "numpy.ndarray")
    version, shape, dtype, is_fortran, data = state
    _require(type(version) is int and version == 1, "numpy.ndarray")
    _require(type(shape) is tuple and len(shape) <= _MAX_N_DIMENSIONS, "numpy.ndarray")
    _require(all(type(size) is int and size >= 0 for size in shape), "numpy.ndarray")
    _require(_is_plain_dtype(dtype) and type(data) is bytes, "numpy.ndarray")
    _require(type(is_fortran) in (bool, int), "numpy.ndarray")
    _require(prod(shape) * dtype.itemsize == len(data), "numpy.ndarray")
    array.__setstate__(state)


# ------------------------------------------------------------------------------------------ Python


def _made_by(kind: Callable[..., Any], name: str, *kinds: type) -> Callable[..., Any]:
    """Return a function that calls `kind`, but refuses arguments of types other than `kinds`."""

    def make(*arguments: Any) -> Any:
        _require(_all_are(arguments, kinds), name)
        try:
            return kind(*arguments)
        except (ArithmeticError, TypeError, ValueError, NotImplementedError) as error:
            raise pickle.UnpicklingError(f"{name}: {error}") from None

    return make


def _no_bytes() -> bytes:
    return b""


def _frozen_set(items: Any = ()) -> Any:
    _require(type(items) in (list, tuple), "frozenset")
    return frozenset(items)


def _default_dict(factory: Any = None) -> Any:
    _require(factory is None or any(factory is kind for kind in _FACTORIES), "defaultdict")
    return defaultdict(factory)


def _deque(items: Any = (), maxlen: Any = None) -> Any:
    _require(type(items) is tuple and not items, "deque")
    _require(maxlen is None or (type(maxlen) is int and 0 <= maxlen < 1 << 62), "deque")
    return deque(items, maxlen)


_TIME = (int, bytes, str, type(None), datetime.timezone)


@functools.cache
def _by_name() -> dict[str, Callable[..., Any]]:
    """Return the stand-ins, keyed by the full names of the functions that they replace."""
    import decimal  # its import takes as long as this module's

    found: dict[str, Callable[..., Any]] = {
        "datetime.timedelta": _made_by(datetime.timedelta, "timedelta", int),
        "datetime.timezone": _made_by(datetime.timezone, "timezone", datetime.timedelta, str),
        "decimal.Decimal": _made_by(decimal.Decimal, "Decimal", str),
        "builtins.range": _made_by(range, "range", int),
        "builtins.slice": _made_by(slice, "slice", int, type(None)),
        "builtins.bytes": _no_bytes,
        "builtins.frozenset": _frozen_set,
        "collections.defaultdict": _default_dict,
        "collections.deque": _deque,
    }
    for kind in (datetime.date, datetime.datetime, datetime.time):
        found[f"datetime.{kind.__name__}"] = _made_by(kind, kind.__name__, *_TIME)
    for path in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath):
        for home in ("pathlib", "pathlib._local"):  # the latter in Python 3.13
            found[f"{home}.{path.__name__}"] = _made_by(path, path.__name__, str)
    if _numpy() is not None:
        found |= {"numpy.dtype": _dtype, "numpy.ndarray": _array_type}
        for home in ("numpy.core.multiarray", "numpy._core.multiarray"):
            found |= {f"{home}.scalar": _scalar, f"{home}._reconstruct": _reconstruct}
    return found


_TYPES = {f"builtins.{kind.__name__}": kind for kind in _FACTORIES[:-1]}


# ----------------------------------------------------------------------------------------- machine


class ValueUnpickler(restricted_unpickler.Unpickler):  # type: ignore[misc]
    """Runs one step of a pickle like torch's restricted unpickler, but allows harmless values."""

    given: set[Callable[..., Any]]
    memo: dict[int, Any]

    def __init__(self, file: io.BytesIO, *, encoding: str = "bytes") -> None:
        super().__init__(file, encoding=encoding)
        self._program = file.getvalue()

    def load(self) -> Any:
        program, memo = self._program, self.memo
        if program.startswith(b"c"):
            return self._global(program)
        target = memo.get(0)
        if program == _REDUCE:
            if type(target) is FunctionType and target in _by_name().values():
                return self._call(target, memo[1])
        elif program == _BUILD:
            if self._build(target, memo[1]):
                return target
        elif type(target) is deque and program in (_APPEND, _APPENDS):
            if program == _APPEND:
                target.append(memo[1])
            return target
        elif type(target) is defaultdict and program in (_SET_ITEM, _SET_ITEMS):
            if program == _SET_ITEM:
                target[memo[1]] = memo[2]
            return target
        return super().load()

    def _global(self, program: bytes) -> Any:
        try:
            return super().load()
        except pickle.UnpicklingError:
            lines = program[1:-1].decode("utf-8").split("\n")
            name = _full_name(*lines[:2])
            if name in _TYPES:
                return _TYPES[name]
            if name not in _by_name():
                raise
            self.given.add(_by_name()[name])
            return _by_name()[name]

    def _call(self, function: Callable[..., Any], arguments: Any) -> Any:
        _require(type(arguments) is tuple, "a call")
        try:
            return function(*arguments)
        except TypeError as error:  # a wrong number of arguments
            raise pickle.UnpicklingError(str(error)) from None

    def _build(self, target: Any, state: Any) -> bool:
        """Set the state of an array or dtype; return False if torch has to set the state."""
        numpy = _numpy()
        if numpy is None or not isinstance(target, (numpy.ndarray, numpy.dtype)):
            return False
        if type(target) in user_allowed_globals().values():
            return False
        if isinstance(target, numpy.dtype):
            _set_dtype_state(target, state)
        else:
            _require(type(target) is numpy.ndarray, "numpy.ndarray")
            _set_array_state(target, state)
        return True


def _full_name(module: str, name: str) -> str:
    """Return a global's full name in Python 3, as torch does; pickles have Python 2's names."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    else:
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


class OpaqueUnpickler(ValueUnpickler):
    """A `ValueUnpickler` that makes an `Opaque` for every object that it does not build.

    `refused` collects the stand-ins that have refused arguments.  If a load fails and `refused` has
    grown, the caller loads the pickle again with the same set; then these functions give `Opaque`s.
    """

    refused: set[Callable[..., Any]]

    def load(self) -> Any:
        program, memo = self._program, self.memo
        target = memo.get(0)
        if not isinstance(target, Opaque):
            other = _opaque_argument(memo[1]) if program == _REDUCE else None
            if other is None:
                return self._tried(target)
            names = (name for name, function in _by_name().items() if function is target)
            return Opaque(next(names, other.type_name), []).made_with(memo[1])
        if program in (_REDUCE, _NEW):
            return target.made_with(memo[1])
        if program in (_BUILD, _APPEND, _SET_ITEM):
            target.parts += [program, *(memo[i] for i in range(1, len(memo)))]
        return target

    def _tried(self, target: Any) -> Any:
        try:
            return super().load()
        except pickle.UnpicklingError:
            if type(target) is FunctionType:
                self.refused.add(target)
            elif _numpy() is not None and isinstance(target, _numpy().ndarray):
                self.refused.add(_reconstruct)  # its call was accepted, its state was not
            elif _numpy() is not None and isinstance(target, _numpy().dtype):
                self.refused.add(_dtype)
            raise

    def _global(self, program: bytes) -> Any:
        with suppress(pickle.UnpicklingError):
            found = super()._global(program)
            if type(found) is not FunctionType or found not in self.refused:
                return found
        return Opaque(_full_name(*program[1:-1].decode("utf-8").split("\n")[:2]), [])


def _opaque_argument(arguments: Any) -> Opaque | None:
    """Return the first argument that is an `Opaque`, or None; containers are not searched."""
    found = arguments if isinstance(arguments, tuple) else ()
    return next((each for each in found if isinstance(each, Opaque)), None)


def opaque_globals(data: bytes) -> set[str]:
    r"""Return the globals, as "module\nname", that `OpaqueUnpickler` does not build for a pickle.

    >>> opaque_globals(pickle.dumps({1.5: io.StringIO, 1: pathlib.PosixPath}, 2))
    {'_io\nStringIO'}
    """
    found = set()
    with suppress(ValueError, AttributeError, IndexError, UnicodeError):  # a damaged pickle
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                found.add("\n".join(str(argument).split(" ", 1)))
    attributes: dict[str, Any] = {"given": set(), "refused": set()}
    machine: type[OpaqueUnpickler] = type("Machine", (OpaqueUnpickler,), attributes)
    programs = {each: io.BytesIO(f"c{each}\n.".encode()) for each in found}
    return {each for each in found if isinstance(machine(programs[each]).load(), Opaque)}


def refuse_functions(obj: Any, given: Set[Callable[..., Any]]) -> None:
    """Raise torch's error for a refused global if `obj` contains a stand-in from `given`."""
    kinds = (Mapping, list, tuple, set, frozenset, deque)
    for value in walk(obj, kinds, keys=True) if given else ():
        if type(value) is FunctionType and value in given:
            name = next(name for name, function in _by_name().items() if function is value)
            raise pickle.UnpicklingError(
                f"Unsupported global: GLOBAL {name} was not an allowed global by default"
            )
