"""The engine's functions over columns of values: kinds of tensors, instances, rows of bytes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ptsave import _C

TYPES = (Tensor, Parameter)


class Derived(Tensor):
    """A class that is not asked for."""


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = 2


@dataclass(slots=True)
class Slots:
    a: Any


class New:
    def __new__(cls) -> New:
        return super().__new__(cls)


def test_kinds_are_numbered_by_their_first() -> None:
    kinds: list[Any] = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(()),
        torch.zeros(2, 3).t(),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(2, 3, dtype=torch.complex64).conj(),
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        nested = torch.nested.nested_tensor([torch.zeros(1)])
    others: list[Any] = [
        nested,
        None,
        1,
        "text",
        Derived(),
        [torch.zeros(1)],
    ]
    again = [value.clone() if value.is_contiguous() else value for value in kinds[:4]]
    found = _C.tensor_kinds([*kinds, *others, *again, torch.ones(2, 3)], TYPES)
    assert found == [*range(len(kinds)), *[-1] * len(others), 0, 1, 2, 3, 0]
    parameters: list[Any] = [Parameter(torch.zeros(2)), torch.zeros(2, requires_grad=True)]
    assert _C.tensor_kinds(parameters, TYPES) == [0, 0]
    assert _C.tensor_kinds(parameters, (Tensor,)) == [-1, 1]
    assert _C.tensor_kinds([], TYPES) == []


def test_instances_have_their_attributes() -> None:
    made = _C.instances(Frozen, {"a": [1, [2]], "b": "x"})
    assert made == [Frozen(1, "x"), Frozen([2], "x")]
    assert vars(made[0]) == vars(Frozen(1, "x"))
    assert _C.instances(Frozen, {"a": [1]}) == [Frozen(1)]
    assert _C.instances(Frozen, {"a": []}) == []
    assert _C.instances(Slots, {"a": [(1,), None]}) == [Slots((1,)), Slots(None)]


@pytest.mark.parametrize(
    ("kind", "attributes", "error"),
    [
        (Frozen, {"a": [1], "b": []}, ValueError),
        (Frozen, {"a": 1}, ValueError),
        (Frozen, {}, ValueError),
        (Slots, {"b": [1]}, AttributeError),
        (Frozen, {1: [1]}, TypeError),
        (New, {"a": [1]}, TypeError),
        (int, {"a": [1]}, TypeError),
        (3, {"a": [1]}, TypeError),
    ],
    ids=str,
)
def test_instances_that_cannot_be(kind: Any, attributes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _C.instances(kind, attributes)


def test_rows_are_packed() -> None:
    rows = _C.packed_rows((b"<", [1, b"", "\xe9\ud800"], 2, ["", 3, b"x"]))
    assert rows == (
        b"<\1\0\0\0\2\0\0\0\0\0\0\0<\2\0\0\0\3\0\0\0<\5\0\0\0\xc3\xa9\xed\xa0\x80\2\0\0\0x"
    )
    assert _C.packed_rows(([(1 << 32) - 1],)) == b"\xff\xff\xff\xff"
    assert _C.packed_rows(([],)) == b""


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (([1 << 32],), ValueError),
        (([1 << 64],), OverflowError),
        (([-1],), OverflowError),
        (([1.5],), TypeError),
        (([True],), TypeError),
        (([1], [1, 2]), ValueError),
        ((b"x",), ValueError),
        ((), ValueError),
    ],
    ids=str,
)
def test_rows_that_cannot_be(columns: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _C.packed_rows(columns)
