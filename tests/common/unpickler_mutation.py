"""Two machines on one pickle: torch's and the engine's, and pickles that nobody has written.

Both get the same `persistent_load` over the same storages, so that what comes out can be compared
down to the memory it lies in, without a look at any value.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import pickletools
import random
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from stock_comparison import (
    dtypes,
    saved_bytes,
    sparse_tensors_to_validate,
    stock_save,
    typed_storage,
)
from torch import _weights_only_unpickler

from ptsave.archive import unpickling
from ptsave.archive.opening import open_archive

# ------------------------------------------------------------------------- what pickles are of


class WithState:
    """Restored by its own method."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class WithSlots:
    """Its state is a pair of dictionaries."""

    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


class WithArguments(tuple):  # type: ignore[type-arg]
    """Made by NEWOBJ with arguments."""

    __slots__ = ()

    def __new__(cls, *parts: Any) -> WithArguments:
        return super().__new__(cls, parts)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)


class Subclass(torch.Tensor):
    """A tensor with an attribute."""


# How many changed pickles a test tries; `make stress` tries more.
N_MUTATIONS = int(os.environ.get("PTSAVE_MUTATIONS", "2000"))
SAFE_GLOBALS: list[Any] = [WithState, WithSlots, WithArguments, Subclass]


def _subclass() -> torch.Tensor:
    tensor = torch.arange(3.0).as_subclass(Subclass)
    tensor.note = "a note"  # type: ignore[attr-defined]
    return tensor


def _parameter_with_state() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.arange(2.0))
    parameter.note = [1, 2]  # type: ignore[attr-defined]
    return parameter


def _state_dict() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()


def _quantized() -> list[torch.Tensor]:
    values = torch.arange(6.0).reshape(2, 3)
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            torch.quantize_per_tensor(values, 0.5, 3, torch.qint8),
            torch.quantize_per_channel(values, scales, zeros, 0, torch.quint8),
        ]


def _sparse() -> list[torch.Tensor]:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [dense.to_sparse(), dense.to_sparse_csr()]


def _nested() -> dict[str, torch.Tensor]:
    """Return a nested tensor, if this torch's restricted unpickler takes any."""
    if "torch._utils._rebuild_nested_tensor" not in _weights_only_unpickler._get_allowed_globals():
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    return {"nested": nested}


def objects() -> dict[str, Any]:
    """Return what torch's restricted unpickler accepts, one of each kind."""
    base = torch.arange(12.0).reshape(3, 4)
    shared: list[Any] = [base, "text"]
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    return {
        "plain": {"a": [1, -1, 300, 70_000, 1 << 31, -(1 << 70), 1.5, None, True, False], "b": ()},
        "text": ["", "a", "ä€😀", "\ud800", b"bytes", bytearray(b"array"), 1 + 2j],
        "tuples": [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1,), ((2,), 3)), torch.Size([1, 2])],
        "sets": [{1, 2, 3}, {"a"}, set(), collections.Counter("abca")],
        "shared": [shared, shared, {"again": shared}, (shared,)],
        "cyclic": cyclic,
        "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.float32, torch.bfloat16],
        "tensor": base,
        "tensors": {f"weight.{i}": torch.full((i % 3 + 1,), float(i)) for i in range(8)},
        "views": [base, base[1], base.t(), base[:, 1:3], base.expand(2, 3, 4), base[0, 0]],
        "flags": [base.clone().requires_grad_(), (base * 1j).conj(), (base * 1j).conj().imag],
        "empty": [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(5), torch.tensor([])],
        "dtypes": [
            base.to(dtype)
            for dtype in dtypes(
                "bool int8 uint8 int64 uint16 uint64 float16 bfloat16 float64"
                " complex64 complex128 float8_e4m3fn float8_e5m2"
            )
        ],
        "half complex": base.to(torch.complex32),
        "meta": torch.empty(2, 3, device="meta"),
        "storages": [torch.arange(3).untyped_storage(), typed_storage(base), base],
        "parameters": [torch.nn.Parameter(base), torch.nn.Parameter(base[0], requires_grad=False)],
        "parameter with state": _parameter_with_state(),
        "state dict": _state_dict(),
        "optimizer": _optimizer(),
        "quantized": _quantized(),
        "sparse": _sparse(),
        **_nested(),
        "subclass": _subclass(),
        "users": [WithState(base), WithSlots(1, base), WithArguments(1, base)],
    }


def _optimizer() -> Any:
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def corpus() -> dict[str, bytes]:
    """Return an archive of each of the objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: saved_bytes(stock_save, obj) for name, obj in objects().items()}


# ------------------------------------------------------------------------------ two machines


@dataclass
class Outcome:
    """What a machine made of a pickle."""

    value: Any
    error: Exception | None
    warnings: list[str]


class Subject:
    """An archive whose pickle can be replaced."""

    def __init__(self, archive: bytes) -> None:
        reader = open_archive(io.BytesIO(archive), verify=True)
        assert reader is not None
        self.reader = reader
        self.pickle = self.reader.get_record("data.pkl")
        reader.engine.start(None, n_threads=1, verify=True, exact_offsets=False)
        assert reader.engine.wait_all(progress=None) == []

    def by_torch(self, data: bytes) -> Outcome:
        return self._outcome(data, _weights_only_unpickler)

    def by_engine(self, data: bytes, *, storages_are_plain: bool) -> Outcome:
        module = unpickling.faster(
            _weights_only_unpickler, self.reader, storages_are_plain=storages_are_plain
        )
        assert module is not _weights_only_unpickler
        return self._outcome(data, module)

    def _outcome(self, data: bytes, module: Any) -> Outcome:
        self.reader.small["data.pkl"] = data
        torch.storage._warn_typed_storage_removal.__dict__["has_warned"] = True
        value, error = None, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.use_deterministic_algorithms(True)  # which fill what Tensor(3) leaves as it is
            try:
                value = torch.serialization._load(self.reader, None, module, encoding="utf-8")
            except Exception as raised:
                error = raised
            finally:
                torch.use_deterministic_algorithms(False)
        torch.serialization._serialization_tls.map_location = None
        sparse_tensors_to_validate().clear()
        # What torch says once in a process is only for the machine that comes first.
        texts = [str(warning.message) for warning in caught]
        return Outcome(value, error, [text for text in texts if "Triggered internally" not in text])


# Where torch's machine goes on to crash, or would, the engine's stops.
_REFUSED = (
    "a quantized tensor's offset, size and stride do not lie within its storage",
    "too many levels",
    "a bytearray larger than the pickle",
)


# torch 2.9 does not look for the dict that it puts no items into.
_LOOKS_AT_TARGETS = hasattr(_weights_only_unpickler.Unpickler, "_check_set_item_target")


def disagreement(subject: Subject, data: bytes, *, storages_are_plain: bool = True) -> str | None:
    """Return what the engine's machine does otherwise than torch's, or None."""
    ours = subject.by_engine(data, storages_are_plain=storages_are_plain)
    refused = ours.error is not None and any(words in str(ours.error) for words in _REFUSED)
    if refused and isinstance(ours.error, pickle.UnpicklingError):
        return None
    stock = subject.by_torch(data)
    if (ours.error is None) != (stock.error is None):
        return f"engine: {ours.error!r}; torch: {stock.error!r}"
    if stock.error is not None and isinstance(ours.error, IndexError) and not _LOOKS_AT_TARGETS:
        return None  # at once, where torch goes on until something else is wrong
    if ours.warnings != stock.warnings:
        return f"engine warns {ours.warnings}; torch: {stock.warnings}"
    if stock.error is not None:
        return _other_error(ours.error, stock.error)
    return _Comparison().compare(ours.value, stock.value)


def _other_error(ours: Any, stock: Exception) -> str | None:
    if not isinstance(ours, type(stock)):
        return f"engine raises {ours!r}, torch {stock!r}"
    if _without_addresses(stock) not in _without_addresses(ours):
        return f"engine says {ours}, torch {stock}"
    return None


def _without_addresses(error: Exception) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(error).partition("\n")[0])  # torch's stack follows


class _Comparison:
    """Whether two object graphs are the same, in the same storages."""

    def __init__(self) -> None:
        self._twin: dict[int, int] = {}
        self._twin_back: dict[int, int] = {}
        self._pairs: list[tuple[Any, Any]] = []
        self._kept: list[Any] = []  # what identities are noted of

    def compare(self, ours: Any, stock: Any) -> str | None:
        self._pairs.append((ours, stock))
        while self._pairs:
            a, b = self._pairs.pop()
            if type(a) is not type(b):
                return f"{type(a)} in place of {type(b)}"
            difference = self._differ(a, b)
            if difference:
                return difference
        return None

    def _differ(self, a: Any, b: Any) -> str | None:
        if isinstance(a, (int, str, bytes, complex, type(None), torch.dtype, torch.device)):
            return None if a == b or repr(a) == repr(b) else f"{a!r} in place of {b!r}"
        if isinstance(a, float):
            same = struct.pack("<d", a) == struct.pack("<d", b)
            return None if same else f"{a!r} in place of {b!r}"
        if a is b:
            return None
        is_new = id(a) not in self._twin and id(b) not in self._twin_back
        if self._twin.setdefault(id(a), id(b)) != id(b):
            return f"shared otherwise: {type(a)}"
        if self._twin_back.setdefault(id(b), id(a)) != id(a):
            return f"shared otherwise: {type(a)}"
        if not is_new:
            return None
        self._kept += [a, b]
        return self._parts_differ(a, b)

    def _parts_differ(self, a: Any, b: Any) -> str | None:
        if isinstance(a, torch.Tensor):
            return self._tensors_differ(a, b)
        if isinstance(a, (torch.storage.TypedStorage, torch.UntypedStorage)):
            return self._storages_differ(a, b)
        if isinstance(a, (set, bytearray, frozenset)):
            if len(a) != len(b):
                return f"lengths {len(a)} and {len(b)}"
            self._push(*(sorted(each, key=repr) if len(a) < 1000 else [] for each in (a, b)))
        elif isinstance(a, dict):
            self._push([x for pair in a.items() for x in pair], [x for p in b.items() for x in p])
        elif isinstance(a, (list, tuple)):
            self._push(a, b)
        if len(a) != len(b) if hasattr(a, "__len__") else False:
            return f"lengths {len(a)} and {len(b)}"
        self._push_attributes(a, b)
        return None

    def _push(self, a: Sequence[Any], b: Sequence[Any]) -> None:
        self._pairs += zip(a, b, strict=False)

    def _push_attributes(self, a: Any, b: Any) -> None:
        self._pairs.append((getattr(a, "__dict__", None), getattr(b, "__dict__", None)))
        for name in getattr(type(a), "__slots__", ()):
            self._pairs.append((getattr(a, name, None), getattr(b, name, None)))

    def _storages_differ(self, a: Any, b: Any) -> str | None:
        if a.dtype != b.dtype if isinstance(a, torch.storage.TypedStorage) else False:
            return f"storages of {a.dtype} and {b.dtype}"
        x, y = (getattr(each, "_untyped_storage", each) for each in (a, b))
        return None if _same_memory(x, y) else "other storages"

    def _tensors_differ(self, a: torch.Tensor, b: torch.Tensor) -> str | None:
        x, y = _described(a), _described(b)
        if x != y:
            return f"{x} in place of {y}"
        if a.layout is torch.strided and not a.is_nested:
            if not _same_memory(a.untyped_storage(), b.untyped_storage()):
                return "tensors in other storages"
        elif a.layout is torch.sparse_coo:
            self._push([a._indices(), a._values()], [b._indices(), b._values()])
        elif a.layout is torch.sparse_csr:
            self._push([a.crow_indices(), a.values()], [b.crow_indices(), b.values()])
        self._push([a.__dict__, a._backward_hooks], [b.__dict__, b._backward_hooks])
        return None


def _same_memory(a: Any, b: Any) -> bool:
    """Whether storages are the same: the machines share those of records, others have no values."""
    if a.nbytes() != b.nbytes() or a.device != b.device:
        return False
    of_record = a._cdata == b._cdata or (a.device.type == "cpu" and a.data_ptr() == b.data_ptr())
    return of_record or a.nbytes() == 0 or a.device.type == "meta" or _was_made(a, b)


def _was_made(a: Any, b: Any) -> bool:
    """Whether they hold the same values, made by a call (of small tensors, in a seeded corpus)."""
    return a.nbytes() > 4096 or bytes(a.tolist()) == bytes(b.tolist())


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    asked: dict[str, Callable[[], Any]] = {
        "dtype": lambda: tensor.dtype,
        "device": lambda: tensor.device,
        "layout": lambda: tensor.layout,
        "shape": lambda: None if tensor.is_nested else tuple(tensor.shape),
        "stride": lambda: tuple(tensor.stride()) if tensor.layout is torch.strided else None,
        "offset": lambda: tensor.storage_offset() if tensor.layout is torch.strided else None,
        "requires_grad": lambda: tensor.requires_grad,
        "is_leaf": lambda: tensor.is_leaf,
        "is_view": tensor._is_view,
        "version": lambda: tensor._version,
        "conj": lambda: (tensor.is_conj(), tensor.is_neg()),
        "grad_fn": lambda: type(tensor.grad_fn),
        "inference": tensor.is_inference,
        "quantizer": lambda: tensor.qscheme() if tensor.is_quantized else None,
        "contiguous": lambda: (
            tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous()
        ),
    }
    described = {}
    for name, ask in asked.items():
        try:
            described[name] = ask()
        except Exception as error:  # odd tensors refuse odd questions; both then
            described[name] = type(error)
    return described


# -------------------------------------------------------------------------------- mutations

_NUMBERS = [0, 1, 2, 3, 5, 6, 7, 63, 127, 128, 255, 256, 65_535, (1 << 31) - 1]
_PIECES = [
    b"(", b")", b"]", b"}", b"\x8f", b"N", b"\x88", b"\x89", b"t", b"\x85", b"\x86", b"\x87", b"R",
    b"Q", b"b", b"s", b"u", b"a", b"e", b"\x81", b"0", b"1", b"2", b"K\x00", b"K\x05", b"M\xff\xff",
    b"J\xff\xff\xff\xff", b"G?\xf0\0\0\0\0\0\0", b"\x8a\0", b"\x8a\x09" + b"\xff" * 8 + b"\0",
    b"X\x01\0\0\0a", b"X\xff\xff\xff\xff", b"U\x01a", b"U\x01\xff", b"h\x00", b"q\x00", b"q\xff",
    b"r\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"\x80\x02", b"\x80\x04",
    b".",    b"\x85\x85\x85", b"(t", b"(e", b"(u", b")R", b"}b", b"ccollections\nOrderedDict\n",
    b"ctorch\nSize\n", b"ctorch\nFloatStorage\n", b"ctorch\nTensor\n", b"cos\nsystem\n",
    b"ccollections\nCounter\n", b"c__builtin__\nset\n", b"cbuiltins\neval\n",
    b"ctorch.nn.parameter\nParameter\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n", b"ctorch\nfloat32\n", b"cunfinished", b"c\n\n",
]  # fmt: skip


def _operations(data: bytes) -> list[bytes]:
    """Cut a pickle into opcodes with their operands; what is none stays in one piece."""
    positions = []
    try:
        for _, _, position in pickletools.genops(data):
            assert position is not None
            positions.append(position)
    except Exception:
        pass
    ends = [*positions[1:], len(data)]
    return [data[begin:end] for begin, end in zip(positions, ends, strict=True)] or [data]


def mutated(data: bytes, others: Sequence[bytes], source: random.Random) -> bytes:
    """Change a pickle in a few places, most often so that it still nearly is one."""
    operations = _operations(data)
    for _ in range(source.choice([1, 1, 1, 2, 3, 6])):
        change = source.choice(_CHANGES)
        operations = change(operations, others, source) or [b""]
    return b"".join(operations)


_Operations = list[bytes]


def _delete(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    at = source.randrange(len(ops))
    return ops[:at] + ops[at + source.choice([1, 1, 1, 2, 5]) :]


def _duplicate(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    at = source.randrange(len(ops))
    end = at + source.choice([1, 1, 2, 5, 20])
    return ops[:end] + ops[at:end] + ops[end:]


def _swap(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    a, b = source.randrange(len(ops)), source.randrange(len(ops))
    ops[a], ops[b] = ops[b], ops[a]
    return ops


def _swap_neighbours(
    ops: _Operations, others: Sequence[bytes], source: random.Random
) -> _Operations:
    at = source.randrange(len(ops))
    ops[at : at + 2] = reversed(ops[at : at + 2])
    return ops


def _insert(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    at = source.randrange(len(ops) + 1)
    return [*ops[:at], source.choice(_PIECES), *ops[at:]]


def _replace(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    ops[source.randrange(len(ops))] = source.choice(_PIECES)
    return ops


def _recall(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    """Read a memo entry again: what a machine could have thought nobody would."""
    puts = [op[1] for op in ops if op[:1] == b"q" and len(op) == 2] or [0]
    at = source.randrange(len(ops) + 1)
    get = b"h" + bytes([source.choice(puts)])
    recalled = source.choice([[get], [get, b"a"], [b"0", get], [get, get, b"s"], [get, b"R"]])
    if source.random() < 0.5:  # where it does no harm: a list of the object and the entry
        last = source.choice(puts)
        return [*ops[:-1], b"q\xfe", b"]", b"h\xfe", b"a", b"h" + bytes([last]), b"a", b"."]
    return [*ops[:at], *recalled, *ops[at:]]


def _forget(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    """Leave memo entries out."""
    return [op for op in ops if op[:1] not in (b"q", b"r") or source.random() < 0.9]


def _splice(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    other = _operations(source.choice(others))
    at, begin = source.randrange(len(ops) + 1), source.randrange(len(other))
    return ops[:at] + other[begin : begin + source.choice([1, 2, 5, 30])] + ops[at:]


def _number(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    at = source.choice([i for i, op in enumerate(ops) if op[:1] in b"KMJhqjrX"] or [0])
    number = source.choice(_NUMBERS)
    formats = {b"K": "<B", b"h": "<B", b"q": "<B", b"M": "<H"}
    code = formats.get(ops[at][:1], "<I")
    operand = struct.pack(code, number & ((1 << 8 * struct.calcsize(code)) - 1))
    if ops[at][:1] in b"KMJ" and source.random() < 0.4:
        wide = source.choice(
            [-1, -number, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, -(1 << 63)]
        )
        ops[at] = b"\x8a\x08" + struct.pack("<q", wide)
    else:
        ops[at] = ops[at][:1] + operand + ops[at][1 + len(operand) :]
    return ops


def _flip(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    data = bytearray(b"".join(ops)) or bytearray(b".")
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return [bytes(data)]


def _scribble(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    data = bytearray(b"".join(ops)) or bytearray(b".")
    data[source.randrange(len(data))] = source.randrange(256)
    return [bytes(data)]


def _truncate(ops: _Operations, others: Sequence[bytes], source: random.Random) -> _Operations:
    data = b"".join(ops)
    return [data[: source.randrange(len(data) + 1)]]


_CHANGES = [
    _delete, _delete, _duplicate, _swap, _swap_neighbours, _insert, _insert, _replace, _recall,
    _recall, _forget, _splice, _splice, _number, _number, _number, _flip, _scribble, _truncate,
]  # fmt: skip
