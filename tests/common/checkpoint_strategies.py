"""Checkpoints for Hypothesis: tensors of every dtype and layout that share storages, in trees."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from stock_comparison import dtypes, typed_storage
from torch import nn

DTYPES = dtypes(
    "float32 float64 float16 bfloat16 int64 int8 uint8 bool complex64 uint16 float8_e4m3fn"
)
# Sizes at which something changes: nothing, one, alignment, a page, a chunk's fraction.
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 1000, 4095, 4096, 4097, 70_000]))


@dataclass(frozen=True)
class Pool:
    """A description of one storage: random bits."""

    dtype: torch.dtype
    size: int
    seed: int

    def build(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        upper = 2 if self.dtype is torch.bool else 256
        shape = (self.size * self.dtype.itemsize,)
        raw = torch.randint(0, upper, shape, generator=generator, dtype=torch.uint8)
        return raw.view(self.dtype)


@dataclass(frozen=True)
class View:
    """A description of what refers to one of the storages: so there are ties."""

    index: int
    kind: str
    numbers: tuple[int, int, int, int, int]

    def build(self, pool: list[torch.Tensor]) -> Any:
        tensor = pool[self.index % len(pool)]
        build: Callable[[torch.Tensor], Any] = getattr(self, f"_{self.kind}")
        return build(tensor)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = self.numbers[0] % (tensor.numel() + 1)
        return tensor[begin : begin + self.numbers[1]]

    def _strided(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, columns, row_stride, stride, offset = self.numbers
        reach = offset + max(rows - 1, 0) * row_stride + max(columns - 1, 0) * stride
        if reach >= tensor.numel():
            return tensor
        return tensor.as_strided((rows, columns), (row_stride, stride), offset)

    def _scalar(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.numbers[0] % tensor.numel()] if tensor.numel() else tensor

    def _grid(self, tensor: torch.Tensor) -> torch.Tensor:
        even = tensor.numel() // 2 * 2
        return tensor[:even].view(2, even // 2).t()

    def _parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(tensor, requires_grad=tensor.dtype.is_floating_point)

    def _storage(self, tensor: torch.Tensor) -> Any:
        known = tensor.dtype in torch.storage._dtype_to_storage_type_map()
        return typed_storage(tensor) if known else tensor

    def _attributes(self, tensor: torch.Tensor) -> torch.Tensor:
        view = tensor.view(-1)
        view.label = str(self.numbers[0])  # type: ignore[attr-defined]
        return view


POOLS = st.lists(
    st.builds(Pool, st.sampled_from(DTYPES), SIZES, st.integers(0, 9)), min_size=1, max_size=5
)
VIEWS = st.builds(
    View,
    st.integers(0, 4),
    st.sampled_from([name[1:] for name in vars(View) if name[1:2].isalpha() and name[0] == "_"]),
    st.tuples(*[st.integers(0, 5)] * 5),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-300, 70_000),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.binary(min_size=1, max_size=20),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided]),
)
KEYS = st.one_of(
    st.text(max_size=8),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text(max_size=3)),
    st.sampled_from(["storage", "cpu", "0", "weight"]),
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=6),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(KEYS, children, max_size=5),
        st.lists(st.tuples(KEYS, children), max_size=4).map(OrderedDict),
        st.sets(st.integers(), max_size=4),
        st.text(max_size=6).map(Counter),
        # The same part twice: one object in the pickle.
        children.map(lambda part: [part, {"again": part}]),
    )


class _Builder:
    """Puts tensors in the places of their descriptions; what was one object stays one."""

    def __init__(self, pool: list[torch.Tensor]) -> None:
        self.pool = pool
        self.built: dict[int, Any] = {}

    def build(self, tree: Any) -> Any:
        if id(tree) not in self.built:
            self.built[id(tree)] = self._build(tree)
        return self.built[id(tree)]

    def _build(self, tree: Any) -> Any:
        if isinstance(tree, View):
            return tree.build(self.pool)
        if type(tree) in (list, tuple):
            return type(tree)(self.build(part) for part in tree)
        if type(tree) in (dict, OrderedDict):
            return type(tree)((key, self.build(value)) for key, value in tree.items())
        return tree


def _build(pools: list[Pool], tree: Any) -> Any:
    return _Builder([pool.build() for pool in pools]).build(tree)


PARTS = st.recursive(st.one_of(SCALARS, VIEWS, VIEWS), _containers, max_leaves=25)
STATE_DICTS = st.dictionaries(st.text(max_size=4), VIEWS, min_size=2, max_size=20)
TREES = st.one_of(PARTS, STATE_DICTS, STATE_DICTS.map(OrderedDict), st.lists(PARTS, min_size=3))
# Nested containers of scalars and of views over a few storages.
CHECKPOINTS = st.builds(_build, POOLS, TREES)
