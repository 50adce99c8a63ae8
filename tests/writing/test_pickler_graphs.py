"""Generated object graphs: the engine's pickle is Python's, byte for byte.

A graph is built step by step, so that its parts are shared in every way, also in cycles; and then
only its root is kept, because the engine treats what has one reference in its own way.
"""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stock_comparison import assert_same_failure, dtypes, saved_bytes, stock_save, typed_storage
from torch import nn

import ptsave
from ptsave import _C

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = dtypes(
    "float32 float64 bfloat16 int64 uint8 bool complex64 complex32"
    " uint16 float8_e4m3fn float8_e8m0fnu"
)
# Strings that are one object wherever they are written in a source, and that torch writes too.
WORDS = ["storage", "cpu", "meta", "0", "1", "10", "torch", "FloatStorage", "latin1", "conj", ""]


class Step(NamedTuple):
    """Makes one part of the graph, out of those made before."""

    kind: str
    parts: list[int]
    number: int
    value: Any


def _dtype(step: Step) -> torch.dtype:
    return DTYPES[step.number % len(DTYPES)]


def _tensor(step: Step, parts: list[Any]) -> Any:
    shape = [abs(part) % 4 for part in step.parts]
    if step.number % 7 == 0:
        return torch.empty(shape, dtype=_dtype(step), device="meta")
    tensor = torch.empty(shape, dtype=torch.uint8).to(_dtype(step))
    return (
        tensor.requires_grad_() if tensor.is_floating_point() and step.number % 3 == 0 else tensor
    )


def _view(step: Step, parts: list[Any]) -> Any:
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if not tensors:
        return None
    tensor = tensors[step.number % len(tensors)]
    kinds: list[Callable[[], Any]] = [
        tensor.detach,
        tensor.flatten,
        lambda: tensor.detach().reshape(-1)[step.number % 3 :],
        lambda: tensor.mT if tensor.dim() > 1 else tensor,
        tensor.conj,
        lambda: torch._neg_view(tensor) if tensor.is_complex() else tensor,
        lambda: nn.Parameter(tensor.detach(), requires_grad=tensor.is_floating_point()),
    ]
    return kinds[len(step.parts) % len(kinds)]()


def _storage(step: Step, parts: list[Any]) -> Any:
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and not part.is_meta]
    if not tensors:
        return torch.UntypedStorage(step.number % 5)
    tensor = tensors[step.number % len(tensors)]
    known = tensor.dtype in torch.storage._dtype_to_storage_type_map()
    return typed_storage(tensor) if known else tensor.untyped_storage()


def _hashable(part: Any) -> bool:
    try:
        hash(part)
    except TypeError:
        return False
    return True


def _pairs(parts: list[Any], step: Step) -> list[tuple[Any, Any]]:
    keys = [part if _hashable(part) else f"key {i}" for i, part in enumerate(parts)]
    return list(zip(keys, reversed(parts), strict=True))


def _ordered_dict(step: Step, parts: list[Any]) -> Any:
    result = OrderedDict(_pairs(parts, step))
    if step.number % 2:
        vars(result).update({f"attribute {i}": part for i, part in enumerate(parts)})
    if result and step.number % 3 == 0:
        result.move_to_end(next(iter(result)))
    return result


def _repeated(step: Step, parts: list[Any]) -> Any:
    return [*parts, *range(step.number % 3000)]


def _set(step: Step, parts: list[Any]) -> Any:
    hashable = [part for part in parts if _hashable(part)]
    return set(hashable) if step.number % 2 else frozenset(hashable)


MAKERS: dict[str, Callable[[Step, list[Any]], Any]] = {
    "value": lambda step, parts: step.value,
    "word": lambda step, parts: WORDS[step.number % len(WORDS)],
    "fresh word": lambda step, parts: WORDS[step.number % len(WORDS)].encode().decode(),
    "key": lambda step, parts: str(step.number % 20),
    "list": lambda step, parts: list(parts),
    "tuple": lambda step, parts: tuple(parts),
    "pair": lambda step, parts: tuple(parts[:2]),
    "dict": lambda step, parts: dict(_pairs(parts, step)),
    "ordered dict": _ordered_dict,
    "long list": _repeated,
    "long dict": lambda step, parts: dict.fromkeys(range(step.number % 3000), 1),
    "set": _set,
    "tensor": _tensor,
    "view": _view,
    "storage": _storage,
    "size": lambda step, parts: torch.Size([abs(part) for part in step.parts]),
    "dtype": lambda step, parts: _dtype(step),
    "device": lambda step, parts: torch.device("cuda", step.number % 8),
    "class": lambda step, parts: [OrderedDict, torch.Size, nn.Linear, dict][step.number % 4],
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010)),
    st.binary(max_size=5),
)
STEPS = st.builds(
    Step,
    st.sampled_from(list(MAKERS)),
    st.lists(st.integers(-3, 40), max_size=5),
    st.integers(0, 5000),
    VALUES,
)


def _copy(value: Any) -> Any:
    """Return an object of its own, where Python makes one: hypothesis holds the original."""
    if type(value) is str:
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    return bytes(bytearray(value)) if type(value) is bytes else value


def _add(container: Any, part: Any, number: int) -> None:
    if type(container) is list:
        container.append(part)
    elif type(container) in (dict, OrderedDict):
        container[f"added {number}"] = part


def build(steps: list[Step], edges: list[tuple[int, int]]) -> Any:
    parts: list[Any] = []
    for step in steps:
        chosen = [parts[i % len(parts)] for i in step.parts if parts]
        parts.append(_copy(MAKERS[step.kind](step, chosen if step.kind != "view" else parts)))
        del chosen
    for number, (i, j) in enumerate(edges):  # also back to what contains it
        _add(parts[i % len(parts)], parts[j % len(parts)], number)
    return parts.pop()


GRAPHS = st.builds(
    build,
    st.lists(STEPS, min_size=1, max_size=25),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
)


def _pickle_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        return records.read("archive/data.pkl")


@given(graph=GRAPHS)
def test_graphs(graph: Any) -> None:
    pickled = _C.pickle_object(graph)
    try:
        expected = saved_bytes(stock_save, graph)
    except (RuntimeError, NotImplementedError):
        # Two dtypes in one storage, or a storage without bytes.
        assert_same_failure(
            lambda: ptsave.save(graph, io.BytesIO()), lambda: stock_save(graph, io.BytesIO())
        )
        return
    assert pickled is not None
    assert pickled[0] == _pickle_of(expected)
    assert saved_bytes(ptsave.save, graph) == expected


@given(steps=st.lists(STEPS, min_size=1, max_size=12))
def test_parts_with_one_reference(steps: list[Step]) -> None:
    """The same parts in containers of their own: nearly nothing is shared."""
    graph: Any = []
    for step in steps:
        graph = [graph, _copy(MAKERS[step.kind](step, [1, 2.5, "text"])), {step.number: graph}]
        if step.number % 2:
            graph = tuple(graph)
    pickled = _C.pickle_object(graph)
    assert pickled is not None
    assert pickled[0] == _pickle_of(saved_bytes(stock_save, graph))
