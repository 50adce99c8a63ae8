"""Removes entries from the pickle of a dict if the entries need lost storages.

The pickle is read without imports and calls: a `_Global` holds the name of a function or class,
and a `_Made` records a call.  Then the pickle is written without these entries; shared objects
stay shared.  Neither step uses recursion, so entries may be nested to any depth.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar

from ptsave.tree.containers import MAX_DEPTH

_PROTOCOL = 2  # of torch's files
_MAX_ROUNDS = 8
_HASHED_PER_BYTE = 16  # limit of hashed tuple parts in keys, per byte of the pickle
# The size of one element in each type of storage; newer dtypes have untyped storages.
_ITEM_NBYTES = {
    **dict.fromkeys(
        ("Untyped", "Byte", "Char", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4"), 1
    ),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


class SavedEntries:
    """The pickle of a saved object, and the storages that its entries need.

    `storages` maps each storage's number, such as ``"3"``, to the size in bytes; an unknown size is
    -1.  Raises ValueError if the pickle `data` cannot be read.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        try:
            reader = _Reader(BytesIO(data))
            reader.n_to_hash = _HASHED_PER_BYTE * len(data)
            self._obj = reader.load()
        except Exception as error:  # Python's unpickler may raise anything
            raise ValueError(f"the pickle cannot be read ({error})") from error
        closed: set[int] = set()
        for _ in range(_MAX_ROUNDS):
            self._open = _open_dicts(self._obj, closed)
            self._users, self._stored = _users_of(self._obj, {id(each) for _, each in self._open})
            shared = {id(each) for _, each in self._open[1:] if id(each) in self._users}
            if not shared:
                break
            closed |= shared  # another object holds them, too, and would change
        else:
            raise ValueError("the entries cannot be separated, because they share too many dicts")
        self.storages = {
            each.number: each.nbytes for each in self._stored if each.number is not None
        }

    def without(self, lost: Collection[str]) -> tuple[bytes, list[str]]:
        """Return the pickle without the entries that need `lost` storages, and the entries' names.

        An entry is an item of the saved dict, or of a dict nested in the saved dict.  Any other
        object, such as a list, is left out completely, because removing a part would move the
        other parts.  A dict that loses all items is left out, too.  Raises ValueError if no entry
        is left, or if the rest cannot be written.
        """
        needing = self._needing([each for each in self._stored if each.number in lost])
        if not needing:
            return self._data, []
        if not self._open:
            raise ValueError("the saved object is not a dict, so no entry can be left out")
        names: list[list[str]] = []
        empty: set[int] = set()
        for prefix, each in reversed(self._open):  # inner dicts first
            items = _items_of(each)
            kept = [(k, v) for k, v in items if not needing & {id(k), id(v)} and id(v) not in empty]
            names.append([f"{prefix}{k}" for k, v in items if needing & {id(k), id(v)}])
            if items and not kept:
                empty.add(id(each))
            _set_items(each, kept)
        if id(self._obj) in needing | empty:
            raise ValueError("nothing can be recovered, because each entry needs a lost storage")
        return _Writer().written(self._obj), [name for each in reversed(names) for name in each]

    def _needing(self, lost: list[Any]) -> set[int]:
        """Return the ids of objects that need `lost` storages, except dicts that can lose items."""
        needing = {id(each) for each in lost}
        pending = lost
        while pending:
            for user in self._users.get(id(pending.pop()), ()):
                if id(user) not in needing:
                    needing.add(id(user))
                    pending.append(user)
        return needing


class _Global:
    """The name of a function or class in a pickle."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __call__(self, *args: Any) -> _Made:
        return _Made(self, args)


class _Stored:
    """The persistent id of a storage in a pickle."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid

    @property
    def number(self) -> str | None:
        pid = self.pid
        is_storage = type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str
        return pid[2] if is_storage else None

    @property
    def nbytes(self) -> int:
        """The size in bytes; -1 if the pickle does not state the size."""
        kind, count = self.pid[1], self.pid[4] if len(self.pid) > 4 else None
        if type(kind) is not _Global or type(count) is not int or count < 0:
            return -1
        item = _ITEM_NBYTES.get(kind.name.removesuffix("Storage"))
        return -1 if item is None else count * item


class _Made:
    """The result of a call in a pickle, with all later changes to this result."""

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


if TYPE_CHECKING:  # the parts of Python's unpickler that typeshed lacks

    class _PythonUnpickler(pickle.Unpickler):
        dispatch: ClassVar[dict[int, Callable[[Any], None]]]
        stack: list[Any]

else:
    _PythonUnpickler = pickle._Unpickler


# The opcodes that hash keys, and the places of the keys on the stack.
_KEYS = {
    pickle.SETITEM[0]: slice(-2, -1),
    pickle.SETITEMS[0]: slice(0, None, 2),
    pickle.ADDITEMS[0]: slice(None),
    pickle.FROZENSET[0]: slice(None),
}


def _checked(load: Callable[[Any], None], where: slice) -> Callable[[Any], None]:
    """Wrap `load` so that it refuses keys whose hash takes too long, measured by the pickle's size.

    If each of many nested tuples holds the next tuple twice, each level doubles the time.
    """

    def load_checked(reader: _Reader) -> None:
        pending = [key for key in reader.stack[where] if type(key) is tuple]
        while pending:
            parts = pending.pop()
            reader.n_to_hash -= len(parts)
            if reader.n_to_hash < 0:
                raise ValueError("some keys take too long to hash")
            pending += [part for part in parts if type(part) is tuple]
        load(reader)

    return load_checked


class _Reader(_PythonUnpickler):
    """Python's unpickler, changed so that it imports nothing and calls nothing."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)
    n_to_hash: int

    def find_class(self, module: str, name: str) -> Any:
        return _Global(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return _Stored(pid)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = _Made(self.stack[-1], args, pickle.NEWOBJ)

    dispatch[pickle.NEWOBJ[0]] = load_newobj


for _opcode, _where in _KEYS.items():
    _Reader.dispatch[_opcode] = _checked(_Reader.dispatch[_opcode], _where)


class _Writer:
    """Writes the pickle of an object that `_Reader` has read, without recursion.

    For each container, an iterator writes the container's opcodes and yields its contents.
    """

    def __init__(self) -> None:
        self._stream = BytesIO()
        self._write = self._stream.write
        self._numbers: dict[int, int] = {}  # numbers in the pickle's memo, by the ids of objects
        self._open_sets: set[int] = set()

    def written(self, obj: Any) -> bytes:
        """Return the pickle of `obj`.

        Raises ValueError if a set contains itself, which the pickle protocol cannot express.
        """
        self._write(pickle.PROTO + bytes([_PROTOCOL]))
        pending = [iter([obj])]
        while pending:
            for each in pending[-1]:
                if not self._write_known(each):
                    pending.append(self._parts(each))
                    break
            else:
                pending.pop()
        self._write(pickle.STOP)
        return self._stream.getvalue()

    def _write_known(self, obj: Any) -> bool:
        """If an object was written before, write its memo number; return whether it was."""
        number = self._numbers.get(id(obj))
        if number is None:
            return False
        self._write(pickle.LONG_BINGET + struct.pack("<I", number))
        return True

    def _memoize(self, obj: Any) -> None:
        number = self._numbers[id(obj)] = len(self._numbers)
        self._write(pickle.LONG_BINPUT + struct.pack("<I", number))

    def _parts(self, obj: Any) -> Iterator[Any]:
        """Write an object; the caller must write each yielded part before it asks for the next."""
        kind = type(obj)
        if kind is _Made:
            yield from self._made(obj)
        elif kind is _Global:
            self._write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self._memoize(obj)
        elif kind is _Stored:
            yield obj.pid
            self._write(pickle.BINPERSID)
        elif kind is dict:
            self._write(pickle.EMPTY_DICT)
            self._memoize(obj)
            yield from self._items(obj.items())
        elif kind is list:
            self._write(pickle.EMPTY_LIST)
            self._memoize(obj)
            yield from self._elements(obj)
        elif kind is tuple:
            yield from self._tuple(obj)
        elif kind in (set, frozenset):
            yield from self._set(obj)
        else:
            self._write_plain(obj)

    def _made(self, obj: _Made) -> Iterator[Any]:
        yield obj.function
        yield obj.args
        if id(obj) in self._numbers:  # written already, inside an argument
            self._write(pickle.POP * 2)
            self._write_known(obj)
            return
        self._write(obj.opcode)
        self._memoize(obj)
        yield from self._elements(obj.elements)
        yield from self._items(obj.items)
        for state in obj.states:
            yield state
            self._write(pickle.BUILD)

    def _elements(self, elements: Collection[Any]) -> Iterator[Any]:
        if elements:  # an empty APPENDS fails for tensors
            self._write(pickle.MARK)
            yield from elements
            self._write(pickle.APPENDS)

    def _items(self, items: Collection[tuple[Any, Any]]) -> Iterator[Any]:
        if items:
            self._write(pickle.MARK)
            for pair in items:
                yield from pair
            self._write(pickle.SETITEMS)

    def _tuple(self, obj: tuple[Any, ...]) -> Iterator[Any]:
        self._write(pickle.MARK)
        yield from obj
        if id(obj) in self._numbers:  # written already, inside a container in it
            self._write(pickle.POP_MARK)
            self._write_known(obj)
            return
        self._write(pickle.TUPLE)
        self._memoize(obj)

    def _set(self, obj: set[Any] | frozenset[Any]) -> Iterator[Any]:
        if id(obj) in self._open_sets:
            raise ValueError("a set in the object contains itself")
        self._open_sets.add(id(obj))
        self._write(pickle.GLOBAL + f"__builtin__\n{type(obj).__name__}\n".encode())
        self._write(pickle.MARK + pickle.EMPTY_LIST)
        yield from self._elements(obj)
        self._write(pickle.TUPLE + pickle.REDUCE)
        self._memoize(obj)

    def _write_plain(self, obj: Any) -> None:
        """Write an object that holds no other objects, such as a number, with Python's pickler."""
        stream = BytesIO()
        pickler = pickle.Pickler(stream, _PROTOCOL)
        pickler.fast = True  # without a memo, because this class has one
        pickler.dump(obj)
        self._write(stream.getvalue()[2 : -len(pickle.STOP)])  # without PROTO
        if type(obj) is str:
            self._memoize(obj)


def _open_dicts(obj: Any, closed: set[int]) -> list[tuple[str, Any]]:
    """Return pairs (name prefix, dict) for `obj` and dicts in it, unless `closed` has their ids."""
    found = [("", obj)] if _is_dict(obj) else []
    seen = {id(obj), *closed}
    depths = [0]
    for (prefix, each), depth in zip(found, depths, strict=False):  # the loop extends both lists
        for key, value in _items_of(each):
            if _is_dict(value) and id(value) not in seen and depth < MAX_DEPTH:
                seen.add(id(value))
                found.append((f"{prefix}{key}.", value))
                depths.append(depth + 1)
    return found


def _is_dict(obj: Any) -> bool:
    if type(obj) is not _Made:
        return type(obj) is dict
    function = obj.function
    is_ordered = type(function) is _Global and function.name == "OrderedDict"
    return is_ordered and obj.args == () and not obj.elements


def _items_of(obj: Any) -> Collection[tuple[Any, Any]]:
    return obj.items if type(obj) is _Made else obj.items()


def _set_items(obj: Any, items: list[tuple[Any, Any]]) -> None:
    if type(obj) is _Made:
        obj.items = items
    else:
        obj.clear()
        obj.update(items)


def _users_of(obj: Any, open_dicts: set[int]) -> tuple[dict[int, list[Any]], list[_Stored]]:
    """Map each object's id to its containers, except `open_dicts`; also return all storages."""
    users: dict[int, list[Any]] = {}
    stored = []
    seen: set[int] = set()
    pending = [obj]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each) is _Stored:
            stored.append(each)
        for part in _parts_of(each):
            if type(part) in _WITH_PARTS:
                pending.append(part)
                if id(each) not in open_dicts or part is getattr(each, "states", None):
                    users.setdefault(id(part), []).append(each)
    return users, stored


def _parts_of(value: Any) -> Iterable[Any]:
    if type(value) is _Made:
        return value.parts()
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    return value if type(value) in (list, tuple, set, frozenset) else ()


_WITH_PARTS = (_Made, _Stored, dict, list, tuple, set, frozenset)
