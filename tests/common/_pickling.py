"""What the tests of the engine's pickler share."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stock_comparison import assert_same_bytes, saved_bytes, stock_save, typed_storage, zip_records
from torch import nn

from ptsave import _C

Factory = Callable[[], Any]

# Of the tests that pickle those objects.
QUIET = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]


def stock_pickle(obj: object) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved_bytes(stock_save, obj))) as archive:
        return archive.read("archive/data.pkl")


def assert_pickled(obj: object, folder: Path) -> None:
    """The engine must have written this itself, as Python's pickler does."""
    pickled = _C.pickle_object(obj)
    assert pickled is not None, "handed over"
    data, storages = pickled
    expected = zip_records(assert_same_bytes(obj, folder))
    assert data == expected["data.pkl"]
    assert len(storages) == sum(name.startswith("data/") for name in expected)


def assert_handed_over(obj: object, folder: Path) -> None:
    assert _C.pickle_object(obj) is None
    assert_same_bytes(obj, folder)


def fresh(text: str) -> str:
    """Return an equal str that is another object."""
    return text.encode().decode()


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


def _with_metadata() -> OrderedDict[str, Any]:
    state = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    assert state._metadata  # type: ignore[attr-defined]
    result: OrderedDict[str, Any] = state  # type: ignore[assignment]
    return result


def _powers() -> list[int]:
    near = [
        2**n + d for n in (7, 8, 15, 16, 31, 32, 39, 63, 64, 71, 2039, 2040) for d in (-1, 0, 1)
    ]
    return near + [-number for number in near] + [0, 3**5000, -(3**5000)]


def _moved() -> OrderedDict[int, int]:
    moved = OrderedDict((i, -i) for i in range(5))
    moved.move_to_end(1, last=False)
    return moved


def _all_dtypes() -> list[torch.Tensor]:
    names = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    names += ["float8_e8m0fnu", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32"]
    names += ["float64", "int8", "int16", "int32", "int64", "uint8", "bool", "complex32"]
    names += ["complex64", "complex128"]
    return [torch.empty(3, dtype=torch.uint8).new_zeros(16).view(getattr(torch, n)) for n in names]


def _shared() -> dict[str, Any]:
    base = torch.arange(24.0)
    views = {f"view {i}": base[i:].view(2, -1).t() for i in range(0, 24, 2)}
    return {"base": base, **views, "again": base, "parameter": nn.Parameter(base)}


def _conjugated() -> list[torch.Tensor]:
    base = torch.zeros(3, dtype=torch.cfloat)
    imaginary = torch.zeros(3, dtype=torch.cfloat).conj().imag
    return [base.conj(), imaginary, torch._neg_view(base.conj()), nn.Parameter(base.conj())]


def _untied_texts() -> list[str]:
    words = ["storage", "cpu", "0", "1", "FloatStorage", "torch", "latin1", "collections", "meta"]
    return words + [fresh(word) for word in words]


def _around_tensors(text: str) -> list[Any]:
    return [text, torch.zeros(2), text, fresh(text), torch.zeros(2), fresh(text)]


class Plain:
    """Has a __dict__, whose keys it shares with the other instances."""


def _instance_dicts() -> list[dict[str, Any]]:
    instances = [Plain() for _ in range(3)]
    for instance in instances:
        instance.__dict__[fresh("not interned")] = [1]
        instance.interned = 1  # type: ignore[attr-defined]
    return [vars(instance) for instance in instances]


def _inference_tensors() -> list[torch.Tensor]:
    with torch.inference_mode():
        return [torch.ones(3), nn.Parameter(torch.ones(2), requires_grad=False)]


def _optimizer_state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


PICKLED: dict[str, Factory] = {
    "none": lambda: None,
    "bools": lambda: [True, False, (True,), {True: False}],
    "ints": _powers,
    "floats": lambda: [0.0, -0.0, 1e300, float("nan"), float("-inf")],
    "complex": lambda: [1 + 2j, complex("nan"), 1 + 2j],
    "texts": lambda: ["", "a", "é", "\ud800", "\U0001f600", "x" * 70_000, "a\0b", fresh("ab")],
    "texts that torch uses": lambda: [_untied_texts(), torch.zeros(3), _untied_texts()],
    "storage": lambda: _around_tensors("storage"),
    "cpu": lambda: _around_tensors("cpu"),
    "key": lambda: _around_tensors("0"),
    "bytes": lambda: [b"", b"a", "a", b"\xff", b"ab", b"ab", "latin1", b"", bytes(range(256))],
    "lists": lambda: [[], [1], [1, 2], [[]], [[[]]]],
    "tuples": lambda: [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)],
    "dicts": lambda: [{}, {1: 2}, {1: 2, "a": {}}, {(): [], (1, "b"): 0.5}],
    "ordered dicts": lambda: [OrderedDict(), OrderedDict(a=1), OrderedDict(a=1, b=2), _moved()],
    "ordered dict with metadata": _with_metadata,
    "sets": lambda: [set(), {1}, {"a", "b", 3}, frozenset(), frozenset([(1, 2)])],
    "sizes": lambda: [torch.Size([]), torch.Size([2, 3]), torch.Size([2, 3])],
    "devices": lambda: [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "dtypes": lambda: [torch.float32, torch.half, torch.float32, torch.uint16, torch.qint8],
    "classes": lambda: [int, dict, OrderedDict, nn.Linear, Plain, Counter, torch.Size, bytes],
    "functions": lambda: [torch._utils._rebuild_tensor_v2, torch.zeros(2), torch.save],
    "tensor": lambda: torch.arange(6.0),
    "tensors": lambda: {"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(0, 4)},
    "dimensions": lambda: [torch.zeros([1] * n) for n in range(8)],
    "large numbers": lambda: torch.zeros(1).expand(70_000, 256, 2**33),
    "all dtypes": _all_dtypes,
    "views": _shared,
    "gradients": lambda: [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2],
    "parameters": lambda: [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), False)],
    "conjugated and negated": _conjugated,
    "meta tensors": lambda: [
        torch.zeros(2, device="meta"),
        nn.Parameter(torch.zeros(2).to("meta")),
    ],
    "inference tensors": _inference_tensors,
    "loaded tensor": lambda: torch.load(io.BytesIO(saved_bytes(stock_save, torch.ones(3)))),
    "shared memory": lambda: torch.ones(3).share_memory_(),
    "numpy's memory": lambda: [torch.from_numpy(np.arange(3)), torch.from_numpy(np.arange(9))[2:]],
    "typed storages": lambda: [typed_storage(t := torch.ones(3)), t, typed_storage(torch.ones(2))],
    "legacy storages": lambda: [torch.FloatStorage(3), torch.BoolStorage(2)],
    "untyped storages": lambda: [s := torch.UntypedStorage(3), s, torch.UntypedStorage(0)],
    "untyped storage of a tensor": lambda: [t := torch.ones(3).byte(), t.untyped_storage(), t],
    "storages without memory": lambda: [torch.zeros(0), torch.zeros(0).long(), torch.zeros(0)],
    "more than 256 of each": lambda: [
        *(torch.full((1,), i) for i in range(300)),
        *(str(i) for i in range(300)),
    ],
    "optimizer": _optimizer_state,
    "dicts of instances": _instance_dicts,
    "the same twice": lambda: [x := [1, "a", (2.5, b"c")], x, (x, {"x": x})],
    "equal but not the same": lambda: [fresh("ab"), fresh("ab"), (number := 2.5, 1), (number, 1)],
    "key and value": lambda: {(text := fresh("text")): text, fresh("text2"): [text]},
}


def cycles() -> Iterator[Any]:
    for size in (0, 2, 5):
        items: list[Any] = ["only here " + str(size), [size]]
        recursive = (items, *(fresh("part") for _ in range(size)), [size])
        items.append(recursive)
        yield recursive
        yield items
        yield [items, recursive]
    nested: dict[str, Any] = {"self": None, "ordered": OrderedDict()}
    nested["self"] = nested
    nested["ordered"]["up"] = nested
    nested["ordered"]["tuple"] = (nested["ordered"],)
    yield nested
    ordered: Any = OrderedDict(a=1)
    ordered.attribute = (ordered, [ordered])
    yield ordered
    inner: list[Any] = [torch.zeros(2)]
    inner.append((inner, inner[0], fresh("text"), [(inner,)]))
    yield inner
