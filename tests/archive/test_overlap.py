"""Which pickles are unpickled while bytes arrive: what torch.save writes, never what looks."""

from __future__ import annotations

import collections
import contextlib
import datetime
import pickle
import random
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from decimal import Decimal
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stock_comparison import saved_bytes, stock_save, typed_storage, zip_records
from torch import _weights_only_unpickler
from torch.utils._python_dispatch import TorchDispatchMode
from unpickler_mutation import N_MUTATIONS

from ptsave import _C
from ptsave.archive import unpickling


@pytest.fixture(autouse=True)
def _numpy_is_allowed() -> None:
    """Or the restricted machine would stop before it does anything with it."""
    functions: list[Any] = [np.float64(0).__reduce__()[0], np.ones(1).__reduce__()[0]]
    old_names: list[Any] = [
        (function, f"numpy.core.multiarray.{function.__name__}") for function in functions
    ]
    dtypes = [value for value in vars(np.dtypes).values() if isinstance(value, type)]
    torch.serialization.add_safe_globals([*functions, *old_names, np.dtype, np.ndarray, *dtypes])


def _is_blind(data: bytes) -> bool:
    return _C.rebuilds_blindly(data, unpickling._DTYPES)


def _pickle_of(obj: object, **options: Any) -> bytes:
    return zip_records(saved_bytes(stock_save, obj, **options))["data.pkl"]


# ------------------------------------------------------------------------------ what is written


def _trained() -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=True)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def _recursive() -> list[Any]:
    inner: list[Any] = [torch.ones(2)]
    inner.append((inner,))
    return inner


_TENSOR = torch.arange(6.0)
_ARRAY = np.ones(3)
_WRITTEN: dict[str, Any] = {
    "checkpoint": _trained(),
    "metadata": torch.nn.Sequential(torch.nn.Linear(2, 2)).state_dict(),
    "parameters": [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1), False)],
    "ties": {"a": _TENSOR, "b": _TENSOR, "c": _TENSOR[2:4], "d": _TENSOR.view(2, 3).t()},
    "dtypes": {str(d): torch.zeros(2, dtype=d) for d in (torch.bool, torch.int8, torch.uint16)},
    "float8": torch.zeros(3).to(torch.float8_e4m3fn),
    "conj": torch.zeros(2, dtype=torch.complex64).conj(),
    "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
    "scalar": torch.tensor(3),
    "empty": [torch.empty(0), torch.empty(2, 0, 3)],
    "typed storage": typed_storage(torch.ones(3)),
    "untyped storage": torch.ones(3).untyped_storage(),
    "no tensor": None,
    "numpy": {
        "loss": np.float64(0.5),
        "others": [np.float32(1), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("x")],
        "time": np.datetime64("2020-01-01"),
        "array": np.arange(12.0).reshape(3, 4),
        "order": np.asfortranarray(np.ones((2, 3), dtype=">i2")),
        "empty": np.empty((0, 2)),
        "dtype": np.dtype("float16"),
        "state": np.random.RandomState(0).get_state(),
        "tied": [_ARRAY, _ARRAY],
        "beside": (torch.ones(2), _ARRAY),
    },
    "plain": {
        "bool": True,
        "no": False,
        "ints": [0, 255, 65535, -1, 2**31, 2**70, -(2**1000)],
        "float": [0.5, float("nan"), float("-inf")],
        "text": ["", "\u00e4\u20ac\U0001f600", "\ud800", "x" * 300],
        "bytes": [b"", b"\x00\xff", bytearray(b"abc"), bytearray()],
        "complex": 1 - 2j,
        "tuples": [(), (1,), (1, (2, (3, 4, 5))), (1, 2, 3, 4), ([],)],
        "set": {1, 2, "x", (1, 2)},
        "empty set": set(),
        "values": [slice(1, 2), range(3), frozenset({1}), Decimal("0.5"), PurePosixPath("a/b")],
        "times": [datetime.date(2026, 1, 2), datetime.timedelta(1), datetime.timezone.utc],
        "torch": [torch.float32, torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu")],
        (1, "key"): {None: 1, 1.5: 2, torch.float16: 3},
    },
    "ordered": collections.OrderedDict([("a", torch.ones(1)), ("b", [{}, []])]),
    "tuple of tensors": (torch.ones(1), (torch.ones(2), "x"), [(torch.ones(1),)]),
    "recursive": _recursive(),
    "long memo": [torch.full((2,), i) for i in range(300)],
}


@pytest.mark.parametrize("name", _WRITTEN)
def test_what_torch_writes(name: str) -> None:
    assert _is_blind(_pickle_of(_WRITTEN[name]))


def test_protocols() -> None:
    assert _is_blind(_pickle_of({"a": torch.ones(2), "b": [1, "x"]}, pickle_protocol=3))
    assert not _is_blind(_pickle_of({"a": torch.ones(2)}, pickle_protocol=4))


class _Mine:
    pass


class _MyTensor(torch.Tensor):
    pass


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = "x"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "obj",
    [
        _Mine(),
        torch.nn.Linear(2, 2),
        torch.ones(2).as_subclass(_MyTensor),
        _with_attribute(),
        torch.eye(2).to_sparse(),
        {torch.ones(2): 1},
        {torch.ones(2)},
        {(1, torch.ones(2))},
        np.array([[1], None], dtype=object),
        np.zeros(2, dtype=[("a", "f4")]),
        np.random.default_rng(0),
        {np.float64(1): 1},
        {np.float64(1)},
        collections.defaultdict(list),
        slice(torch.ones(1), 2),
        print,
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_may_look(obj: object) -> None:
    assert not _is_blind(_pickle_of([torch.ones(3), obj]))


# ----------------------------------------------------------------------------- what is made up


def _g(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _t(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    return _g(module, name) + _t(*arguments) + b"R"


def _put(i: int) -> bytes:
    return b"q" + bytes([i])


def _get(i: int) -> bytes:
    return b"h" + bytes([i])


_NUMEL = b"K\x08"
_ID = (_text("storage"), _g("torch", "LongStorage"), _text("0"), _text("cpu"), _NUMEL)
_STORAGE = _t(*_ID) + b"Q"
_SHAPE, _STRIDE, _OFFSET, _NO = b"K\x02\x85", b"K\x01\x85", b"K\x00", b"\x89"
_ODICT = _g("collections", "OrderedDict") + b")R"
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_GEOMETRY = (_OFFSET, _SHAPE, _STRIDE)
_T = _call(*_REBUILD, _STORAGE, *_GEOMETRY, _NO, _ODICT)
_P = _call("torch._utils", "_rebuild_parameter", _T, _NO, _ODICT)
_NUMBER = _call(*_REBUILD, _STORAGE, _OFFSET, b"))", _NO, _ODICT)  # can be asked for its value
_SIZE = _call("torch", "Size", _SHAPE)


def _v2(**changes: bytes) -> bytes:
    arguments = {
        "storage": _STORAGE,
        "offset": _OFFSET,
        "size": _SHAPE,
        "stride": _STRIDE,
        "requires_grad": _NO,
        "hooks": _ODICT,
        **changes,
    }
    return _call(*_REBUILD, *arguments.values())


def _dict(*items: bytes) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def _list(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


_BLIND = {
    "tensor": _T,
    "parameter": _P,
    "parameter of parameter": _call("torch._utils", "_rebuild_parameter", _P, _NO, b"N"),
    "first version": _call("torch._utils", "_rebuild_tensor", _STORAGE, *_GEOMETRY),
    "third version": _call(
        "torch._utils",
        "_rebuild_tensor_v3",
        *(_STORAGE, *_GEOMETRY, _NO, _ODICT, _g("torch", "uint16"), b"N"),
    ),
    "torch.Size as size": _v2(size=_SIZE),
    "no hooks": _v2(hooks=b"N"),
    "hooks that hold a tensor": _v2(hooks=_dict(b"K\x01", _T)),
    "metadata": _v2(
        storage=_STORAGE.replace(b"Long", b"ComplexFloat"), metadata=_dict(_text("conj"), b"\x88")
    ),
    "metadata and more": _v2(metadata=_ODICT + b"(" + _text("neg") + b"\x89u"),
    "dropped": _T + b"0" + _T,
    "memo with gaps": b"]" + _put(255) + _T + _put(7) + b"a" + _get(7) + b"a",
    "long memo": _T + b"r\x03\0\0\0" + b"0j\x03\0\0\0",
    "memo written twice": _T + _put(0) + b"0K\x01" + _put(0) + b"0" + _v2(size=_get(0) + b"\x85"),
    "two kinds of append": b"]" + _T + b"a(" + _P + _T + b"e",
    "attributes": _ODICT + _dict(_text("_metadata"), _T) + b"b",
    "set": _call("builtins", "set", _list(b"K\x01", _SIZE)),
    "key": _dict(_SIZE, _T, _g("torch", "float32"), _T),
    "storage type as value": _list(_g("torch", "FloatStorage"), _g("torch", "Size")),
    "untyped": _t(_text("storage"), _g("torch.storage", "UntypedStorage"), *_ID[2:]) + b"Q",
    "mark left open": b"(" + _T,
}
_DTYPE = _call("numpy", "dtype", _text("f8"), b"\x89", b"\x88")
_NEW_ARRAY = _call(
    "numpy._core.multiarray", "_reconstruct", _g("numpy", "ndarray"), b"K\x00\x85", _text("b")
)
_STATE = (b"K\x01", b"K\x01\x85", _DTYPE, b"\x89")
_BYTES = _call("_codecs", "encode", _text("\0" * 8), _text("latin1"))
_BLIND |= {
    "array": _T + _NEW_ARRAY + _t(*_STATE, _BYTES) + b"b",
    "array scalar": _T + _call("numpy._core.multiarray", "scalar", _DTYPE, _BYTES),
    "array of old": _T + _call("numpy.core.multiarray", "scalar", _DTYPE, _BYTES),
    "array dtype of a dtype": _call("numpy", "dtype", _DTYPE),
    "array in tuples": _t(_t(_NEW_ARRAY, b"N"), _T),
    "array among hooks": _v2(hooks=_dict(_text("x"), _NEW_ARRAY)),
}
_POPS = {"dropped", "long memo", "memo written twice"}


@pytest.mark.parametrize("name", _BLIND)
def test_blind(name: str) -> None:
    assert _is_blind(b"\x80\x02" + _BLIND[name] + b".")


_PUT_INTO_LATER = b"]" + _put(0)  # a list that is plain when it is made
_LOOKS = {
    "Size(tensor)": _call("torch", "Size", _T),
    "Size of a storage": _call("torch", "Size", _STORAGE),
    "Size((tensor,))": _call("torch", "Size", _t(_T)),
    "Size([tensor])": _call("torch", "Size", _list(_T)),
    "Size by tuple from the memo": _t(_T) + _put(1) + b"0" + _g("torch", "Size") + _get(1) + b"R",
    "Size(*tensor)": _g("torch", "Size") + _T + b"R",
    "Size(*[tensor])": _g("torch", "Size") + _list(_T) + b"R",
    "device(tensor)": _call("torch", "device", _text("cuda"), _T),
    "complex(tensor)": _call("__builtin__", "complex", _NUMBER),
    "bytes(tensor)": _call("__builtin__", "bytes", _T),
    "bytearray(tensor)": _call("__builtin__", "bytearray", _T),
    "bytearray(storage)": _call("builtins", "bytearray", _STORAGE),
    "encode(tensor)": _call("_codecs", "encode", _T, _text("latin1")),
    "set(tensor)": _call("__builtin__", "set", _T),
    "set(storage)": _call("builtins", "set", _STORAGE),
    "set((tensor,))": _call("builtins", "set", _t(_T)),
    "set([tensor])": _call("builtins", "set", _list(b"K\x01", _T)),
    "set of a list": _call("builtins", "set", _list(b"]")),
    "set of a list that is filled by the memo": (
        _PUT_INTO_LATER + _T + b"a0" + _call("builtins", "set", _get(0))
    ),
    "set(dict)": _call("builtins", "set", b"}"),
    "OrderedDict(tensor)": _call("collections", "OrderedDict", _T),
    "OrderedDict([[tensor]])": _call("collections", "OrderedDict", _list(_list(_T, _T))),
    "OrderedDict(*[])": _g("collections", "OrderedDict") + b"]R",
    "tensor as size": _v2(size=_T),
    "tensor in size": _v2(size=_t(_NUMBER)),
    "tensor deep in size": _v2(size=_t(_t(_t(_NUMBER)))),
    "list as size": _v2(size=_list(b"K\x02")),
    "tensor in stride": _v2(stride=_t(_NUMBER)),
    "tensor as offset": _v2(offset=_NUMBER),
    "parameter as offset": _v2(offset=_P),
    "tensor as requires_grad": _v2(requires_grad=_T),
    "tensor as hooks": _v2(hooks=_T),
    "tensor as storage": _v2(storage=_T),
    "text as storage": _v2(storage=_text("x")),
    "tensor as metadata": _v2(metadata=_NUMBER),
    "storage as metadata": _v2(metadata=_STORAGE),
    "tensor in metadata": _v2(metadata=_dict(_text("conj"), _NUMBER)),
    "list in metadata": _v2(metadata=_dict(_text("conj"), b"]")),
    "metadata with attributes": _v2(metadata=_ODICT + b"}b"),
    "list as metadata": _v2(metadata=_list(_T)),
    "one argument too many": _v2(metadata=b"N", more=b"N"),
    "one argument too few": _call(*_REBUILD, _STORAGE, *_GEOMETRY, _NO),
    "tensor as requires_grad of a parameter": _call(
        "torch._utils", "_rebuild_parameter", _T, _NUMBER, _ODICT
    ),
    "storage as parameter": _call("torch._utils", "_rebuild_parameter", _STORAGE, _NO, _ODICT),
    "list as parameter": _call("torch._utils", "_rebuild_parameter", _list(_T), _NO, _ODICT),
    "tensor as dtype": _call(
        "torch._utils", "_rebuild_tensor_v3", _STORAGE, *_GEOMETRY, _NO, _ODICT, _T
    ),
    "tensor as key": _dict(_T, b"K\x01"),
    "tensor in key": _dict(_t(b"K\x01", _T), b"K\x01"),
    "storage as key": b"}" + _STORAGE + b"K\x01s",
    "tensor as state": _ODICT + _T + b"b",
    "list as state": _ODICT + _list(_t(_text("a"), _T)) + b"b",
    "OrderedDict as state": _ODICT + _ODICT + b"(" + _text("keys") + _T + b"ub",
    "None as state": _ODICT + b"Nb",
    "two states": (
        _ODICT
        + _dict(_text("__setstate__"), _g("builtins", "set"))
        + b"b"
        + _dict(_text("a"), _T)
        + b"b"
    ),
    "state of a tensor": _T + b"}b",
    "state of a parameter": _P + _t(_NO, b"N", b"N") + b"b",
    "state of a dict": b"}}b",
    "state of a class": _g("collections", "OrderedDict") + b"}b",
    "append attribute": (_ODICT + _dict(_text("append"), _g("torch", "Size")) + b"b" + _T + b"a"),
    "append to a tensor": _T + b"K\x01a",
    "append to a set": _call("builtins", "set", b"]") + _T + b"a",
    "extend a dict": b"}(" + _T + b"e",
    "append to bytes": _call("builtins", "bytearray", b"K\x01") + _T + b"a",
    "item of a tensor": _T + b"K\x00" + _T + b"s",
    "item of a list": b"]" + b"K\x00" + _T + b"s",
    "odd items": b"}(" + _text("a") + b"u",
    "tensor in persistent id": _t(*_ID[:4], _T) + b"Q",
    "tensor as key of persistent id": _t(_ID[0], _ID[1], _T, *_ID[3:]) + b"Q",
    "tensor as location": _t(*_ID[:3], _T, _NUMEL) + b"Q",
    "tensor as persistent id": _T + b"Q",
    "text as persistent id": _text("storage") + b"Q",
    "persistent id without type": _t(_ID[0], _ID[0], *_ID[2:]) + b"Q",
    "persistent id with two types": _t(_ID[1], *_ID[1:]) + b"Q",
    "longer persistent id": _t(*_ID, b"N") + b"Q",
    "list as persistent id": _list(*_ID) + b"Q",
    "new object": _g("collections", "OrderedDict") + b")\x81",
    "new tensor": _g("torch", "Size") + _t(_T) + b"\x81",
    "call of a storage type": _g("torch.storage", "UntypedStorage") + b"K\x01\x85R",
    "call of a legacy storage type": _g("torch", "FloatStorage") + b"K\x01\x85R",
    "call of a dtype": _g("torch", "float32") + b")R",
    "call of a tensor": _T + b")R",
    "call of text": _text("x") + b")R",
    "other function": _g("builtins", "len") + b"0",
    "other function of torch": _g("torch", "tensor") + b"0",
    "Storage of another module": _g("os", "FloatStorage") + b"0",
    "dotted storage": _g("torch", "x.FloatStorage") + b"0",
    "dtype of another module": _g("numpy", "float32") + b"0",
    "dotted dtype": _g("torch", "float32.is_floating_point") + b"0",
    "name in two": _g("torch._utils _rebuild_tensor_v2", "") + b"0",
    "extension": b"\x82\x01",
    "old global": b"\x8c\x05torch\x8c\x04Size\x93",
    "instance": b"(icollections\nOrderedDict\n",
}
_LOOKS |= {
    "array of a tensor": _NEW_ARRAY + _t(*_STATE, _T) + b"b",
    "array of a list of tensors": _NEW_ARRAY + _t(*_STATE, _list(_T)) + b"b",
    "array of a list that is filled later": (
        _PUT_INTO_LATER + _NEW_ARRAY + _t(*_STATE, _get(0)) + b"b0" + _get(0) + _T + b"a"
    ),
    "array of a storage": _NEW_ARRAY + _t(*_STATE, _STORAGE) + b"b",
    "array with a dict as state": _NEW_ARRAY + b"}b",
    "array with a tensor as state": _NEW_ARRAY + _T + b"b",
    "array shape": _call(
        "numpy._core.multiarray", "_reconstruct", _g("numpy", "ndarray"), _T, _text("b")
    ),
    "array scalar of a tensor": _call("numpy._core.multiarray", "scalar", _DTYPE, _T),
    "array scalar by tuple": (
        _t(_DTYPE, _T) + _put(1) + b"0" + _g("numpy._core.multiarray", "scalar") + _get(1) + b"R"
    ),
    "array dtype of a tensor": _call("numpy", "dtype", _T),
    "array dtype of fields": _DTYPE + _t(b"K\x03", _dict(_text("a"), _T)) + b"b",
    "array called": _NEW_ARRAY + b")R",
    "array class called": _call("numpy", "ndarray", _T),
    "array class called with numbers": _call("numpy", "ndarray", _SHAPE),
    "array method": _g("numpy", "ndarray.tobytes") + b"0",
    "array as size": _v2(size=_NEW_ARRAY),
    "array in size": _v2(size=_t(_NEW_ARRAY)),
    "array as offset": _v2(offset=_NEW_ARRAY),
    "array as metadata": _v2(metadata=_NEW_ARRAY),
    "array in metadata": _v2(metadata=_dict(_text("conj"), _NEW_ARRAY)),
    "array as storage": _v2(storage=_NEW_ARRAY),
    "array as key": _dict(_NEW_ARRAY, _T),
    "array in set": _call("builtins", "set", _list(_NEW_ARRAY)),
    "array gets a tensor": _NEW_ARRAY + b"K\x00" + _T + b"s",
    "array is appended to": _NEW_ARRAY + _T + b"a",
    "array in persistent id": _t(*_ID[:4], _NEW_ARRAY) + b"Q",
    "array as persistent id": _t(_NEW_ARRAY, *_ID[1:4], _NEW_ARRAY) + b"Q",
    "another function of numpy": _g("numpy", "save") + b"0",
    "another constructor of numpy": _g("numpy._core.multiarray", "array") + b"0",
}
_MALFORMED = {
    "get of nothing": _get(0),
    "get in a gap": b"K\x01" + _put(9) + b"0" + _get(8),
    "put of nothing": _put(0) + b"N",
    "put below a mark": b"N(" + _put(0) + b"N",
    "huge memo index": b"Nr\xff\xff\xff\xff",
    "huge memo index to get": b"Nj\xff\xff\xff\xff",
    "nothing": b"",
    "nothing above a mark": b"N(",
    "pop of nothing": b"0N",
    "pop of a mark": b"N(0",
    "pop below a mark": b"N(00N",
    "tuple below a mark": b"NN(\x86",
    "tuple of too few": b"N\x86",
    "append below a mark": b"](N" + b"a",
    "items without a mark": b"}NNu",
    "tuple without a mark": b"Nt",
    "append without a list": b"Na",
    "appends without a list": b"(Ne",
    "reduce below a mark": _g("torch", "Size") + b"()R",
    "build below a mark": _ODICT + b"(}b",
    "persistent id below a mark": _t(*_ID) + b"(Q",
    "long text": b"X\xff\xff\xff\xffabc",
    "long short text": b"U\xffabc",
    "no line": b"ctorch\nSize",
}


@pytest.mark.parametrize("name", _LOOKS)
def test_not_blind(name: str) -> None:
    """Also behind, and within, what is."""
    crafted = _LOOKS[name]
    for data in (crafted, _list(_T) + crafted, _T + _put(255) + b"0" + crafted):
        assert not _is_blind(b"\x80\x02" + data + b".")


@pytest.mark.parametrize("name", _MALFORMED)
def test_malformed(name: str) -> None:
    assert not _is_blind(b"\x80\x02" + _MALFORMED[name] + b".")


def test_end() -> None:
    assert _is_blind(b"N.")
    assert _is_blind(b"N.what follows is not read")
    assert not _is_blind(b"N")
    assert not _is_blind(b"")
    assert not _is_blind(b".")


def test_deep_nesting_takes_no_stack() -> None:
    n = 1_000_000
    assert _is_blind(b"]" * n + b"a" * (n - 1) + b".")
    assert _is_blind(b"N" + b"\x85" * n + b".")
    assert _is_blind(_T + b"\x85" * n + b".")
    assert _is_blind(b"(" * n + b"t" * n + b".")
    assert not _is_blind(_g("torch", "Size") + _T + b"\x85" * n + b"R.")
    assert not _is_blind(b"(" * n + b".")


@pytest.mark.parametrize("index", [256, 2**16, 2**20, 2**31, 2**32 - 1])
def test_memo_index_allocates_nothing_large(index: int) -> None:
    """Were this wrong, the last ones would need 16 and 32 GiB."""
    put = b"Nr" + struct.pack("<I", index)
    assert not _is_blind(put + b".")
    if index <= 2**20:
        assert _is_blind(put + b"." + bytes(index))


def test_every_truncation() -> None:
    for obj in (_WRITTEN["plain"], _WRITTEN["metadata"], _WRITTEN["conj"]):
        data = _pickle_of(obj)
        assert not any(_is_blind(data[:n]) for n in range(len(data)))


# ----------------------------------------------------- what is called blind does not look indeed

_BLIND_OPERATORS = {"aten::empty", "aten::set_", "aten::detach", "aten::alias"}


class _Watch(TorchDispatchMode):
    """Knows every operator that runs; reading one number is an operator as well."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


class _Records(dict[str, bytes]):
    """As much of torch's reader as its unpickling needs; every storage is the same fixed memory."""

    memory = torch.from_numpy(np.ones(64, dtype=np.uint8)).untyped_storage()  # cannot be resized
    leaves_opaque = False

    def has_record(self, name: str) -> bool:
        return name in self

    def get_record(self, name: str) -> bytes:
        return self[name]

    def get_storage_from_record(self, _name: str, _numel: int, _type: object) -> Any:
        return SimpleNamespace(_typed_storage=lambda: SimpleNamespace(_untyped_storage=self.memory))

    def serialization_id(self) -> str:
        return ""

    def small_records(self) -> dict[str, bytes]:
        return self

    def is_native_byte_order(self) -> bool:
        return True


def _operators_of(data: bytes) -> Iterator[set[str]]:
    """Unpickle in both ways; yields which operators ran, also where it failed."""
    for module in (pickle, _weights_only_unpickler):
        with warnings.catch_warnings(), _Watch() as watch:
            warnings.simplefilter("ignore")
            with contextlib.suppress(Exception):
                torch.serialization._load(_Records({"data.pkl": data}), None, module)
        yield watch.names


@pytest.mark.parametrize("name", [*_BLIND, *(f"written {name}" for name in _WRITTEN)])
def test_blind_runs_no_operator_that_looks(name: str) -> None:
    crafted = name in _BLIND
    data = b"\x80\x02" + _BLIND[name] + b"." if crafted else _pickle_of(_WRITTEN[name[8:]])
    for names in _operators_of(data):
        assert names <= _BLIND_OPERATORS


_SEEN = ["Size(tensor)", "complex(tensor)", "bytes(tensor)", "set(tensor)", "OrderedDict(tensor)"]
_SEEN += ["tensor in size", "tensor in stride", "tensor as offset", "tensor as metadata"]
_SEEN += ["tensor in metadata", "append attribute"]


@pytest.mark.parametrize("name", _SEEN)
def test_the_watch_sees_looking(name: str) -> None:
    """Or the tests around this one would prove nothing."""
    names = set().union(*_operators_of(b"\x80\x02" + _LOOKS[name] + b"."))
    assert names - _BLIND_OPERATORS


_SEEDS = [
    [_pickle_of(_WRITTEN[name]) for name in ("metadata", "parameters", "conj", "plain", "float8")],
    [b"\x80\x02" + each + b"." for each in _BLIND.values()],
    [b"\x80\x02" + each + b"." for each in (*_LOOKS.values(), *_MALFORMED.values())],
]


def _mutations(n: int) -> Iterator[bytes]:
    """Other bytes, and pieces of one pickle in another."""
    rng = random.Random(0)
    opcodes = b"NKMJGUX\x8a\x80(0qrhj)\x85\x86\x87t]}aesucQRb\x81."
    for _ in range(n):
        data = bytearray(rng.choice(rng.choice(_SEEDS)))
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(data))
            choice = rng.randrange(4)
            if choice == 0:
                data[at] = rng.randrange(256)
            elif choice == 1:
                data[at] = rng.choice(opcodes)
            elif choice == 2:
                data.insert(at, rng.choice(opcodes))
            else:
                other = rng.choice(rng.choice(_SEEDS))
                begin = rng.randrange(len(other))
                data[at:at] = other[begin : begin + rng.randint(1, 60)]
        yield bytes(data)


def test_mutations_never_crash() -> None:
    for data in _mutations(10 * N_MUTATIONS):
        _is_blind(data)


def test_mutations_that_are_blind_do_not_look() -> None:
    n_blind = 0
    for data in _mutations(4 * N_MUTATIONS):
        if _is_blind(data):
            n_blind += 1
            for names in _operators_of(data):
                assert names <= _BLIND_OPERATORS, data
    assert n_blind > N_MUTATIONS // 8


# ------------------------------------------------------------------------------------- loading


class _SaysCpu(str):
    def __str__(self) -> str:
        return "cpu"


class _CallableCpu:
    def __str__(self) -> str:
        return "cpu"

    def __call__(self, storage: Any, _location: str) -> Any:
        return storage


@pytest.mark.parametrize(
    ("map_location", "may"),
    [
        (None, True),
        ("cpu", True),
        (torch.device("cpu"), True),
        ("cuda:0", False),
        (_SaysCpu("cuda:0"), False),
        (_CallableCpu(), False),
        ({"cpu": "cpu"}, False),
        (lambda storage, _location: storage, False),
    ],
)
def test_map_location(map_location: Any, may: bool) -> None:
    records = _Records({"data.pkl": _pickle_of(_TENSOR)})
    reader: Any = records
    stays = unpickling._stay_on_cpu(map_location)
    assert (stays and unpickling._may_defer(reader, pickle)) is may


@pytest.mark.parametrize("module", [pickle, _weights_only_unpickler])
@pytest.mark.parametrize("name", _BLIND)
def test_blind_pickles_are_real(name: str, module: Any) -> None:
    """Both unpicklers get to the end of what was made up."""
    data = b"\x80\x02" + _BLIND[name] + b"."
    knows_pop = module is pickle or name not in _POPS
    with nullcontext() if knows_pop else pytest.raises(pickle.UnpicklingError, match="operand 48"):
        torch.serialization._load(_Records({"data.pkl": data}), None, module)


def test_speed() -> None:
    """A checkpoint of 100,000 tensors is scanned in a fraction of the time it takes to unpickle."""
    parts = torch.zeros(200_000).split(2)
    data = _pickle_of({f"layers.{i}.attention.weight": part for i, part in enumerate(parts)})
    times = []
    for _ in range(5):
        begin = time.thread_time()
        assert _is_blind(data)
        times.append(time.thread_time() - begin)
    assert len(data) > 10_000_000
    assert min(times) < 0.2  # 0.06 was measured
