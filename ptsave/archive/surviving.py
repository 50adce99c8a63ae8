"""Leaves entries out of the pickle of a dict: those that need storages that are lost.

The pickle is read without a single import: functions and classes are names, what they would make is
the call itself.  Without the entries it is written again, with all that they had in common.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar

__all__ = ["without_entries"]

_PROTOCOL = 2  # of torch's files


def without_entries(
    data: bytes, is_there: Callable[[str], bool]
) -> tuple[bytes, list[str], list[str]]:
    """Return the pickle of a dict without entries that need storages that are not there.

    Parameters
    ----------
    data : bytes
        The pickle.
    is_there : callable
        Whether there is a storage, by its number in the pickle, ``"3"``.

    Returns
    -------
    data : bytes
        The pickle of the others; the given one if all are there.
    names : list of str
        Those of the entries that are left out.
    storages : list of str
        Numbers of the storages that are not there.

    Raises
    ------
    ValueError
        If it is no pickle of a dict.
    """
    try:
        obj = _Reader(BytesIO(data)).load()
    except Exception as error:  # whatever the machine of the standard library stumbles over
        raise ValueError(f"its entries cannot be told apart ({error})") from error
    if type(obj) is not dict:
        raise ValueError(f"it holds no dict, but {type(obj).__name__}")
    lost = {key: _missing_in(value, is_there) for key, value in obj.items()}
    names = [key for key, storages in lost.items() if storages]
    if not names:
        return data, [], []
    kept = {key: value for key, value in obj.items() if not lost[key]}
    stream = BytesIO()
    _Writer(stream, _PROTOCOL).dump(kept)
    return stream.getvalue(), list(map(str, names)), sorted(set().union(*lost.values()))


class _Global:
    """A function or class, by its name."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __call__(self, *args: Any) -> _Made:
        return _Made(self, args)


class _Stored:
    """A storage, by its persistent id."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid

    @property
    def number(self) -> str | None:
        pid = self.pid
        is_storage = type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str
        return pid[2] if is_storage else None


class _Made:
    """What a call makes, with all that is done to it afterwards."""

    def __init__(self, function: Any, args: Any, opcode: bytes = pickle.REDUCE) -> None:
        self.function = function
        self.args = args
        self.opcode = opcode
        self.elements: list[Any] = []
        self.items: list[tuple[Any, Any]] = []
        self.states: list[Any] = []

    def append(self, value: Any) -> None:
        self.elements.append(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def parts(self) -> Iterator[Any]:
        yield from (self.function, self.args, self.elements, self.states)
        for pair in self.items:
            yield from pair


if TYPE_CHECKING:  # the parts of the standard library's machines that typeshed does not have

    class _PythonUnpickler(pickle.Unpickler):
        dispatch: ClassVar[dict[int, Callable[[Any], None]]]
        stack: list[Any]

    class _PythonPickler(pickle.Pickler):
        memo: Any

        def save(self, obj: Any, save_persistent_id: bool = True) -> None: ...
        def write(self, data: bytes) -> None: ...
        def get(self, i: int) -> bytes: ...
        def memoize(self, obj: Any) -> None: ...
        def _batch_appends(self, items: Iterable[Any]) -> None: ...
        def _batch_setitems(self, items: Iterable[tuple[Any, Any]]) -> None: ...

else:
    _PythonUnpickler, _PythonPickler = pickle._Unpickler, pickle._Pickler


class _Reader(_PythonUnpickler):
    """Python's machine, which imports nothing and calls nothing."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return _Global(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return _Stored(pid)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = _Made(self.stack[-1], args, pickle.NEWOBJ)

    dispatch[pickle.NEWOBJ[0]] = load_newobj


class _Writer(_PythonPickler):
    """Python's pickler, for what `_Reader` has read."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if type(obj) is _Stored else None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) not in (_Global, _Made):
            super().save(obj, save_persistent_id)
            return
        known = self.memo.get(id(obj))
        if known is not None:
            self.write(self.get(known[0]))
        elif type(obj) is _Global:
            text = f"{obj.module}\n{obj.name}\n"
            self.write(pickle.GLOBAL + text.encode())
            self.memoize(obj)
        else:
            self._save_made(obj)

    def _save_made(self, obj: _Made) -> None:
        self.save(obj.function)
        self.save(obj.args)
        self.write(obj.opcode)
        self.memoize(obj)
        self._batch_appends(obj.elements)
        self._batch_setitems(obj.items)
        for state in obj.states:
            self.save(state)
            self.write(pickle.BUILD)


def _missing_in(value: Any, is_there: Callable[[str], bool]) -> set[str]:
    """Return the numbers of storages in a value that are not there."""
    found: set[str] = set()
    seen: set[int] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if type(each) is _Stored:
            if each.number is not None and not is_there(each.number):
                found.add(each.number)
        elif id(each) not in seen:
            seen.add(id(each))
            pending += _parts_of(each)
    return found


def _parts_of(value: Any) -> Iterable[Any]:
    if type(value) is _Made:
        return value.parts()
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    return value if type(value) in (list, tuple, set, frozenset) else ()
