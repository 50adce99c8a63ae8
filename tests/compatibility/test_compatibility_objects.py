"""What is saved: either engine reads what either has written, bit by bit and share by share."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import io
import math
import pathlib
import pickle
import random
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dill
import numpy as np
import pytest
import torch
from _pickling import PICKLED
from _system import in_threads
from stock_comparison import (
    assert_interchangeable,
    assert_same_bytes,
    assert_same_failure,
    assert_same_load,
    assert_same_load_failure,
    assert_same_object,
    assert_same_save_failure,
    dtypes,
    saved_bytes,
    sparse_tensors_to_validate,
    stock_load,
    stock_save,
    storage_bytes,
    typed_storage,
    zip_records,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode
from torch.serialization import safe_globals, skip_data
from torch.testing._internal.two_tensor import TwoTensor

import ptsave
from ptsave.archive.filling import goes_by_torchs_rules

Factory = Callable[..., Any]

DTYPES = dtypes(
    "float64 float32 float16 bfloat16 complex128 complex64 complex32 int64 int32 int16 int8 uint8"
    " uint16 uint32 uint64 bool float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz"
    " float8_e8m0fnu float4_e2m1fn_x2"
)


def bits(dtype: torch.dtype, n: int = 24) -> torch.Tensor:
    """Return a tensor of random bits: every NaN and subnormal is fair."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (n * dtype.itemsize,))
    return raw.to(torch.uint8).view(dtype)


# --------------------------------------------------------------------------- things without tensors


class Point(NamedTuple):
    x: int
    y: torch.Tensor


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Flags(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Record:
    name: str
    values: list[int]
    tensor: torch.Tensor | None = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: int
    y: torch.Tensor


class SlottedAndMore(Slotted):
    """Pickles as a pair: the instance's dict and its slots."""

    more: str


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.value = torch.arange(3)


class Reduced:
    """Rebuilt by a function, then given a state, items and pairs."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.pairs: dict[Any, Any] = {}

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs[key] = value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensor = torch.arange(4.0)
        items = iter([tensor, tensor[1:], 3])
        return Reduced, (), {"state": tensor}, items, iter({"pair": tensor}.items())


def _with_attributes(obj: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


def _itself() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    return cycle


def _deep(depth: int = 150) -> Any:
    nested: Any = torch.ones(1)
    for _ in range(depth):
        nested = [nested, (nested,), {"in": nested}][:1]
    return nested


# What torch refuses to load, or loads with a warning.
_NOT_PLAIN = ("ints", "bytes", "sets", "classes", "functions", "legacy storages")
# What the restricted unpickler reads without being told.
PLAIN: dict[str, Factory] = {
    **{name: make for name, make in PICKLED.items() if name not in _NOT_PLAIN},
    "integers": lambda: [
        sign * (2**n_bits + more)
        for n_bits in (0, 8, 16, 31, 32, 63, 64)
        for sign in (1, -1)
        for more in (-1, 0)
    ],
    "huge integers": lambda: [2**200, -(2**200), 2**2039 - 1],
    "some bytes": lambda: [b"\x00\xff", b"a" * 300, bytes(range(256)) * 300],
    "some sets": lambda: [set(), {1, 2, 3}, {"one"}],
    "bytearray": lambda: [bytearray(b"bytearray"), bytearray(b"\0")],
    "keys of dicts": lambda: {"a": {}, 1: {"b": 2}, (1, 2): 3, None: 4, 1.5: 5, False: 6, b"k": 7},
    "counter": lambda: collections.Counter("abracadabra"),
    "torch values": lambda: [
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.device("cuda:1"),
        torch.float16,
        torch.uint4,  # type: ignore[attr-defined]
        torch.int7,  # type: ignore[attr-defined]
        torch.strided,
        torch.sparse_coo,
        torch.sparse_csr,
    ],
    "more than one batch": lambda: [list(range(2500)), dict.fromkeys(range(2500))],
    "a batch and one": lambda: [list(range(1001)), dict.fromkeys(range(1001))],
    "itself": _itself,
    "deep nesting": _deep,
}

# What needs the unrestricted one, or an entry in the list of safe globals.
UNSAFE: dict[str, tuple[Factory, list[Any]]] = {
    "no bytes": (lambda: [b"", bytearray()], [bytes]),
    "frozenset": (lambda: frozenset({1, 2}), [frozenset]),
    "range": (lambda: range(1, 9, 2), [range]),
    "slice": (lambda: slice(1, None, 2), [slice]),
    "defaultdict": (
        lambda: collections.defaultdict(list, {"a": [torch.ones(1)]}),
        [collections.defaultdict, list],
    ),
    "deque": (lambda: collections.deque([1, torch.ones(2)], maxlen=5), [collections.deque]),
    "named tuple": (lambda: Point(1, torch.ones(2)), [Point]),
    "enum": (lambda: [Colour.RED, Colour.BLUE, Flags.A | Flags.B], [Colour, Flags]),
    "data class": (lambda: Record("n", [1], torch.ones(2)), [Record]),
    "slots": (lambda: Slotted(1, torch.arange(3)), [Slotted]),
    "slots and dict": (
        lambda: _with_attributes(SlottedAndMore(1, torch.ones(2)), more="text"),
        [SlottedAndMore],
    ),
    "nested class": (lambda: [Outer.Inner(), Outer.Inner()], [Outer, Outer.Inner, getattr]),
    "reduced to parts": (Reduced, [Reduced]),
    "path": (lambda: pathlib.PurePosixPath("/a/b"), [pathlib.PurePosixPath]),
    "date and time": (
        lambda: datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
        [datetime.datetime, datetime.timezone, datetime.timedelta],
    ),
    "decimal": (
        lambda: [decimal.Decimal("1.10"), fractions.Fraction(1, 3)],
        [decimal.Decimal, fractions.Fraction],
    ),
    "uuid": (lambda: uuid.UUID(int=7), [uuid.UUID]),
    "global function": (lambda: [math.sin, torch.nn.functional.relu, len], [math.sin, torch.relu]),
    "class": (lambda: [nn.Linear, Record, int], [nn.Linear, Record, int]),
    "random state": (lambda: random.Random(0).getstate(), []),
    "exception": (lambda: ValueError("text"), [ValueError]),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", PLAIN)
def test_plain_objects(name: str, tmp_path: Path) -> None:
    assert_interchangeable(PLAIN[name](), tmp_path)


@pytest.mark.parametrize("name", UNSAFE)
def test_objects_of_other_classes(name: str, tmp_path: Path) -> None:
    """Restricted: the same error without, and the same object with the classes allow-listed."""
    factory, allowed = UNSAFE[name]
    assert_interchangeable(factory(), tmp_path, weights_only=[False])
    data = saved_bytes(stock_save, factory())
    for extra in ([], allowed):
        with safe_globals(extra):
            assert_same_load(data)


@pytest.mark.parametrize("protocol", [-7, -1, 0, 1, 2, 3, 4, 5, None])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickle_protocols(protocol: int | None, tmp_path: Path) -> None:
    obj = {"a": torch.ones(2), "b": b"bytes", "c": "text", "d": [1, 2.5, 2**70], "e": {1, 2}}
    assert_same_load(assert_same_bytes(obj, tmp_path, pickle_protocol=protocol))
    if protocol != 0:  # writes persistent ids as text, which neither engine reads back
        assert_interchangeable(obj, tmp_path, weights_only=[False], pickle_protocol=protocol)


# ------------------------------------------------------------------------------------------ tensors


def _views() -> dict[str, torch.Tensor]:
    base = torch.arange(60, dtype=torch.float32)
    grid = base.view(3, 4, 5)
    return {
        "base": base,
        "grid": grid,
        "slice": base[7:13],
        "step": base[1::7],
        "transposed": grid.permute(2, 0, 1),
        "expanded": base[3].expand(4, 4),
        "overlapping": base.as_strided((5, 5), (3, 2), 4),
        "empty view": base[10:10],
        "empty view of none": base.as_strided((0, 3), (7, 11), 5),
        "scalar": base[59],
        "diagonal": grid[0].diagonal(),
        "unsqueezed": base[None, :, None],
    }


def _mixed_storages() -> list[Any]:
    tensor, other = torch.arange(10, dtype=torch.int16), torch.arange(5, dtype=torch.int16)
    return [
        tensor,
        typed_storage(tensor),
        tensor[3:],
        typed_storage(tensor[3:]),
        other.untyped_storage().clone(),
        typed_storage(other),
        (typed_storage(other), other),
    ]


def _requires_grad() -> list[torch.Tensor]:
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.ones(3)  # is not saved
    return [
        leaf,
        leaf * 2,
        leaf.detach(),
        leaf[1:],
        torch.ones(2, dtype=torch.complex64, requires_grad=True),
    ]


def _python_attributes() -> list[torch.Tensor]:
    tensor = _with_attributes(torch.zeros(3), label="foo", number=3.14)
    parameter = _with_attributes(nn.Parameter(torch.zeros(3)), label="bar", other=tensor)
    return [tensor, parameter, tensor, _with_attributes(torch.ones(2)[1:], inner={"t": tensor})]


def _some_views(dtype: torch.dtype) -> list[torch.Tensor]:
    tensor = bits(dtype)
    return [tensor, tensor[1::2], tensor[3:], tensor.view(4, 6).t()]


TENSORS: dict[str, Factory] = {
    **{f"{dtype}": functools.partial(bits, dtype) for dtype in DTYPES},
    **{f"views of {dtype}": functools.partial(_some_views, dtype) for dtype in DTYPES[:-1]},
    "scalars": lambda: [torch.tensor(1.5), torch.tensor(True), torch.tensor(3 + 4j)],
    "one storage without elements": lambda: [t := torch.empty(0), t.view(0, 2), t],
    "views": _views,
    "views before their base": lambda: dict(reversed(list(_views().items()))),
    "storages and tensors": _mixed_storages,
    "same memory twice": lambda: [  # two storages, one address: each is saved
        torch.from_numpy(part) for array in [np.arange(10.0)] for part in (array, array, array[2:])
    ],
    "storage larger than the tensor": lambda: torch.arange(1000)[:2],
    "gradients": _requires_grad,
    "parameters": lambda: [
        parameter := nn.Parameter(torch.arange(4.0)),
        *(parameter, nn.Parameter(parameter.data[1:], requires_grad=False)),
        *(nn.Buffer(torch.ones(2)), nn.Buffer(torch.ones(2), persistent=False)),
        nn.Parameter(torch.empty(0)),
    ],
    "python attributes": _python_attributes,
    "meta": lambda: [
        tensor := torch.empty(1000, 100_000, 1000, device="meta"),
        *(tensor[1:], nn.Parameter(torch.empty(2, device="meta")), tensor.half()),
    ],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "many": lambda: [torch.full((i % 7,), i) for i in range(1200)],
    "larger than a chunk": lambda: [
        torch.arange(3_000_000),
        torch.ones(5),
        torch.arange(1_500_001),
    ],
    "generator state": torch.get_rng_state,
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, tmp_path: Path) -> None:
    assert_interchangeable(TENSORS[name](), tmp_path)


@pytest.mark.parametrize(
    "kind", ["per tensor", "per channel", "per channel float", "qint32", "quint8", "views"]
)
@pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated",  # torch rebuilds quantized tensors with them
    "ignore:torch.quantize_per_tensor, .* are deprecated",
)
def test_quantized(kind: str, tmp_path: Path) -> None:
    values, scales = torch.randn(4, 6), torch.rand(4) + 0.1
    zeros = torch.arange(4)
    quantized = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    parameter = nn.Parameter(quantized, requires_grad=False)
    tensors: dict[str, Factory] = {
        "per tensor": lambda: torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "per channel": lambda: torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "per channel float": lambda: torch.quantize_per_channel(
            values, scales, zeros.float(), 0, torch.quint8
        ),
        "qint32": lambda: torch.quantize_per_tensor(values, 0.1, 3, torch.qint32),
        "quint8": lambda: torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        "views": lambda: [quantized, quantized[1:], quantized.t(), parameter],
    }
    assert_interchangeable(tensors[kind](), tmp_path)


def _sparse() -> torch.Tensor:
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 5] = 1.5, -2
    return dense


def _coo(indices: list[list[int]], values: list[float], *size: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), torch.tensor(values), size)


SPARSE: dict[str, Factory] = {
    "coo": lambda: _sparse().to_sparse(),
    "coo of one dimension": lambda: _sparse().to_sparse(1),
    "coo not coalesced": lambda: _coo([[0, 0], [1, 1]], [1.0, 2.0], 2, 3),
    "coo empty": lambda: torch.zeros(3, 4).to_sparse(),
    "csr": lambda: _sparse().to_sparse_csr(),
    "csc": lambda: _sparse().to_sparse_csc(),
    "bsr": lambda: _sparse().to_sparse_bsr((2, 3)),
    "bsc": lambda: _sparse().to_sparse_bsc((2, 3)),
    "csr with gradient": lambda: _sparse().to_sparse_csr().requires_grad_(),
    "batch of csr": lambda: torch.stack([_sparse(), _sparse()]).to_sparse_csr(),
    "parameter": lambda: nn.Parameter(_sparse().to_sparse()),
    "several": lambda: {
        "a": (sparse := _sparse().to_sparse()),
        "b": sparse,
        "values": sparse._values(),
        "dense": _sparse(),
    },
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("check", [False, True])
def test_sparse(name: str, check: bool, tmp_path: Path) -> None:
    with torch.sparse.check_sparse_tensor_invariants(check):
        assert_interchangeable(SPARSE[name](), tmp_path)
    assert sparse_tensors_to_validate() == []


class Spoof:
    """Pickles as a call with the wrong arguments."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced


def _invalid_sparse(kind: str) -> Spoof:
    rebuild = torch._utils._rebuild_sparse_tensor
    dense = _sparse()
    if kind == "coo":
        sparse = dense.to_sparse()
        indices = sparse._indices().clone()
        indices[0, 0] = 7
        return Spoof(rebuild, (sparse.layout, (indices, sparse._values(), sparse.size())))
    sparse = getattr(dense, f"to_sparse_{kind}")(*([(1, 1)] if "b" in kind else []))
    compressed, plain, values = (
        (sparse.crow_indices(), sparse.col_indices(), sparse.values())
        if kind.endswith("r")
        else (sparse.ccol_indices(), sparse.row_indices(), sparse.values())
    )
    compressed = compressed.clone()
    compressed[0] = 3
    return Spoof(rebuild, (sparse.layout, (compressed, plain, values, sparse.size())))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_invalid_sparse_tensors_are_refused(kind: str, weights_only: bool) -> None:
    """Torch looks at the indices at the end of a load: they must have arrived by then."""
    data = saved_bytes(ptsave.save, {"spoofed": _invalid_sparse(kind), "big": torch.ones(100_000)})
    for check in (True, False):
        with torch.sparse.check_sparse_tensor_invariants(check):
            assert_same_load(data, weights_only=weights_only)
        assert sparse_tensors_to_validate() == []


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*deprecated")
def test_nested_tensors(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    name = "torch._utils._rebuild_nested_tensor"
    is_allowed = name in torch._weights_only_unpickler._get_allowed_globals()
    allowed = [True, False] if is_allowed else [False]
    assert_interchangeable({"nested": nested, "again": nested}, tmp_path, weights_only=allowed)


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*deprecated")
def test_jagged_tensors(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([[1, 2, 3], [4, 5]], layout=torch.jagged)
    assert_interchangeable({"jagged": jagged}, tmp_path, weights_only=[False])


def test_zero_tensor_is_refused() -> None:
    assert_same_save_failure(torch._efficientzerotensor((4, 5)))


def test_hooks_are_warned_about() -> None:
    """By torch's own code, once for each tensor."""
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(print)
    for save in (stock_save, ptsave.save):
        with pytest.warns(UserWarning, match="backward hook .* will not be serialized") as caught:
            save(tensor, io.BytesIO())
        assert len(caught) == 1


# -------------------------------------------------------------------------- one storage, two dtypes


def _complexes(first: Factory, second: Factory) -> list[Any]:
    complexes = torch.randn(10, dtype=torch.complex128)
    return [first(complexes), second(complexes.imag)]


def _floats(of: Factory) -> list[Any]:
    floats = torch.randn(10)
    return [of(floats), typed_storage(floats, torch.uint8)]


TWO_DTYPES: dict[str, Factory] = {
    "tensor, tensor": lambda: _complexes(torch.detach, torch.detach),
    "storage, tensor": lambda: _complexes(typed_storage, torch.detach),
    "tensor, storage": lambda: _complexes(torch.detach, typed_storage),
    "storage, storage": lambda: _complexes(typed_storage, typed_storage),
    "tensor, bytes": lambda: _floats(torch.detach),
    "storage, bytes": lambda: _floats(typed_storage),
    "untyped, tensor": lambda: [t := torch.randn(10), t.untyped_storage()][::-1],
    "two storages of one address": lambda: [
        torch.from_numpy(array := np.zeros(4)),
        torch.from_numpy(array.view(np.int64)),
    ],
}


@pytest.mark.parametrize("kind", TWO_DTYPES)
@pytest.mark.parametrize("new_format", [True, False])
def test_two_dtypes_of_one_storage_are_refused(kind: str, new_format: bool) -> None:
    obj = TWO_DTYPES[kind]()
    error = assert_same_save_failure(obj, _use_new_zipfile_serialization=new_format)
    assert "view the same data as different types" in str(error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_two_dtypes_of_a_storage_without_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    """There is nothing that could be seen as another type."""
    tensor = torch.tensor([], dtype=dtype)
    for other in (torch.float32, torch.uint8, torch.complex64):
        obj = [
            tensor,
            typed_storage(tensor, other),
            typed_storage(tensor),
            torch.empty(0, dtype=other),
        ]
        assert_interchangeable(obj, tmp_path)


# -------------------------------------------------------------------------- subclasses and wrappers


class Empty(torch.Tensor):
    pass


class Wrapping(torch.Tensor):
    """Holds the real tensor in a slot."""

    elem: torch.Tensor
    __slots__ = ["elem", "unset"]

    @staticmethod
    def __new__(cls, elem: torch.Tensor, *args: Any) -> Any:
        wrapper = torch.Tensor._make_subclass(cls, elem.to("meta"), elem.requires_grad)
        wrapper.elem = elem
        return wrapper


class WithState(Wrapping):
    """Chooses what is saved, and looks at the values when it is loaded."""

    __slots__: list[str] = []
    total: float

    def __getstate__(self) -> Any:
        return ("marker", getattr(self, "elem", None), self.__dict__)

    def __setstate__(self, state: Any) -> None:
        marker, elem, attributes = state
        self.__dict__.update(attributes)
        assert marker == "marker"
        if elem is not None:  # torch asks for the state of a view of this tensor too
            self.elem = elem
            self.total = float(elem.sum())


class WithReduce(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_with_reduce, (self.as_subclass(torch.Tensor), "extra")


def _rebuild_with_reduce(tensor: torch.Tensor, extra: str) -> Any:
    assert extra == "extra"
    return (tensor + tensor.mean()).as_subclass(WithReduce)


UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]


class FourBits(torch.Tensor):
    """A wrapper of a dtype that no storage has."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Any:
        shape = (*elem.shape[:-1], elem.shape[-1] * 2)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=UINT4)

    def __init__(self, elem: torch.Tensor) -> None:
        self.elem = elem

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return None


SUBCLASSES: dict[str, tuple[Factory, list[Any]]] = {
    "empty class": (lambda: torch.ones(3).as_subclass(Empty), [Empty]),
    "empty class, attributes": (
        lambda: _with_attributes(torch.ones(3).as_subclass(Empty), foo="bar"),
        [Empty],
    ),
    "empty class without memory": (Empty, [Empty]),
    "slots": (lambda: _with_attributes(Wrapping(torch.rand(2)), foo="bar"), [Wrapping]),
    "state": (lambda: _with_attributes(WithState(torch.rand(2)), foo="bar"), [WithState]),
    "reduce": (lambda: torch.rand(5).as_subclass(WithReduce), [_rebuild_with_reduce]),
    "wrapper": (lambda: TwoTensor(torch.randn(2, 3), torch.randn(2, 3)), [TwoTensor]),
    "parameter of wrapper": (
        lambda: nn.Parameter(TwoTensor(torch.randn(2), torch.randn(2))),
        [TwoTensor],
    ),
    "views of a subclass": (
        lambda: [t := torch.ones(4).as_subclass(Empty), t[1:], t.as_subclass(torch.Tensor)],
        [Empty],
    ),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses(name: str, tmp_path: Path) -> None:
    factory, allowed = SUBCLASSES[name]
    with safe_globals(allowed):
        assert_interchangeable(factory(), tmp_path)
    assert_same_load_failure(saved_bytes(ptsave.save, factory()))


def test_wrapper_of_four_bits(tmp_path: Path) -> None:
    tensor = FourBits(torch.tensor([[0x01, 0x23], [0xFE, 0xDC]], dtype=torch.uint8))
    data = assert_same_bytes(tensor, tmp_path)
    with safe_globals([FourBits]):
        loaded = ptsave.load(io.BytesIO(data))
    assert type(loaded) is FourBits
    assert loaded.dtype is UINT4
    assert torch.equal(loaded.elem, tensor.elem)


# ------------------------------------------------------------------------------ modules, optimizers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.extra: dict[str, Any] = {"rate": 0.5}
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        output: torch.Tensor = self.head(self.norm(hidden.mean(0)))
        return output

    def get_extra_state(self) -> Any:
        return {"extra": self.extra, "tensor": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def _trained() -> tuple[Net, torch.optim.Optimizer, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    net(torch.randint(0, 11, (5, 4))).sum().backward()
    optimizer.step()
    scheduler.step()
    return net, optimizer, scheduler


def test_training_checkpoint(tmp_path: Path) -> None:
    """What most files hold: state dicts, with metadata, ties and nothing unusual."""
    net, optimizer, scheduler = _trained()
    checkpoint = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": 3,
    }
    assert_interchangeable(checkpoint, tmp_path)
    loaded = ptsave.load(tmp_path / "ptsave" / "file.pt")
    assert loaded["model"]._metadata == net.state_dict()._metadata  # type: ignore[attr-defined]
    fresh = Net()
    fresh.load_state_dict(loaded["model"])
    assert_same_object(fresh.state_dict(), net.state_dict())


def test_whole_modules(tmp_path: Path) -> None:
    net, optimizer, _ = _trained()
    assert_same_bytes([net, optimizer], tmp_path)
    loaded, _ = ptsave.load(tmp_path / "ptsave" / "file.pt", weights_only=False)
    assert_same_object(loaded.state_dict(), net.state_dict())
    assert loaded.head.weight is loaded.embedding.weight
    loaded.eval()
    ids = torch.randint(0, 11, (5, 4))
    assert torch.equal(loaded(ids), net.eval()(ids))


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Linear(2, 3),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()),
        lambda: nn.Linear(3, 4, device="meta"),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)).state_dict(),
    ],
)
def test_modules_without_warnings(module: Factory, tmp_path: Path) -> None:
    """Warnings are errors in these tests: saving and loading gives none."""
    assert_interchangeable(module(), tmp_path, weights_only=[False])


def test_many_tensors_without_warnings_about_typed_storages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning comes once in a process; made to come always, it must still not come."""
    monkeypatch.setattr(torch.storage, "_always_warn_typed_storage_removal", True)
    obj = [torch.ones(20, 20) for _ in range(30)]
    for new_format in (True, False):
        path = tmp_path / "file.pt"
        ptsave.save(obj, path, _use_new_zipfile_serialization=new_format)
        for weights_only in (True, False):
            assert_same_object(ptsave.load(path, weights_only=weights_only), obj)


# ------------------------------------------------------------------- other pickle modules, numpy


def test_dill(tmp_path: Path) -> None:
    """Saves functions by value."""
    factor = 3
    obj = {"tensor": torch.ones(3), "function": lambda x: x * factor}
    assert_same_bytes(obj, tmp_path, pickle_module=dill)
    path = tmp_path / "ptsave" / "file.pt"
    for encoding in ("utf-8", "latin1"):
        options: dict[str, Any] = {"encoding": encoding}
        loaded = ptsave.load(path, pickle_module=dill, weights_only=False, **options)
        assert loaded["function"](7) == 21
        assert torch.equal(loaded["tensor"], obj["tensor"])  # type: ignore[arg-type]


def test_old_dill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.pt"
    stock_save([1], path)
    monkeypatch.setattr(dill, "__version__", "0.3.0")
    assert_same_save_failure([1], path, pickle_module=dill)
    assert_same_load_failure(path, pickle_module=dill, weights_only=False)


class _CustomPickle:
    """A pickle module with its own pickler, and one that is not a module at all."""

    __name__ = "custom"

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (Point, (1, torch.zeros(2))) if isinstance(obj, Record) else NotImplemented

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return super().find_class(module, name)

    load = staticmethod(pickle.load)


def test_custom_pickle_module(tmp_path: Path) -> None:
    obj = [Record("n", [1]), torch.ones(2), {"k": torch.arange(3)}]
    module = _CustomPickle()
    assert_same_bytes(obj, tmp_path, pickle_module=module)
    path = tmp_path / "ptsave" / "file.pt"
    options: dict[str, Any] = {"pickle_module": module, "weights_only": False}
    loaded = ptsave.load(path, **options)
    assert type(loaded[0]) is Point
    assert_same_object(loaded, stock_load(path, **options))
    assert_same_object(ptsave.load(path, pickle_module=pickle), loaded)


def test_error_of_a_custom_unpickler_comes_through(tmp_path: Path) -> None:
    class Unpickler(pickle.Unpickler):
        def load(self) -> Any:
            raise RuntimeError("rumpelstiltskin")

    class Module:
        pass

    Module.Unpickler = Unpickler  # type: ignore[attr-defined]
    path = tmp_path / "file.pt"
    ptsave.save(torch.eye(3), path)
    with pytest.raises(RuntimeError, match="rumpelstiltskin"):
        ptsave.load(path, pickle_module=Module, weights_only=False)
    assert torch.equal(ptsave.load(path), torch.eye(3))


@pytest.mark.filterwarnings("ignore:.*numpy.core")
def test_numpy(tmp_path: Path) -> None:
    obj = {
        "array": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "scalar": np.float32(1.5),
        "objects": np.array([None, "a"], dtype=object),
        "tensor": torch.ones(2),
    }
    assert_interchangeable(obj, tmp_path, weights_only=[False])
    assert_same_load_failure(saved_bytes(ptsave.save, obj))


# ---------------------------------------------------------------------------------- device packages


@pytest.fixture
def _other_device() -> None:
    """Storages filled with 7s are on the device "sevens", which restores them as 8s."""

    def tag(storage: Any) -> str | None:
        is_cpu = storage.device.type == "cpu" and storage.nbytes()
        return "sevens" if is_cpu and not storage_bytes(storage).strip(b"\7") else None

    def restore(storage: Any, location: str) -> Any:
        if location != "sevens":
            return None
        assert not storage_bytes(storage).strip(b"\7"), "the bytes have not arrived"
        return torch.full((storage.nbytes(),), 8, dtype=torch.uint8).untyped_storage()

    torch.serialization.register_package(0, tag, restore)


@pytest.mark.usefixtures("_other_device")
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_registered_packages(size: int, tmp_path: Path) -> None:
    sevens = torch.full((size,), 7, dtype=torch.uint8)
    obj = {"sevens": sevens, "view": sevens[3:], "others": torch.ones(3)}
    assert_interchangeable(obj, tmp_path)
    path = tmp_path / "ptsave" / "file.pt"
    assert b"sevens" in zip_records(path.read_bytes())["data.pkl"]
    loaded = ptsave.load(path)
    assert loaded["view"].eq(8).all()
    assert_same_object(ptsave.load(path, map_location="cpu"), stock_load(path, map_location="cpu"))


def test_a_rule_that_holds_torchs_function_is_the_users() -> None:
    """Only torch's own partial objects hide a function of torch."""

    class Rule:
        func = staticmethod(torch.serialization.default_restore_location)

        def __call__(self, storage: Any, location: str) -> Any:
            return None

    assert goes_by_torchs_rules(None)
    torch.serialization.register_package(0, lambda storage: None, Rule())
    assert not goes_by_torchs_rules(None)


def test_storage_that_no_package_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "_package_registry", [])
    assert_same_save_failure(torch.ones(2))


def test_device_that_is_not_here(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        registry = [(0, lambda storage: "cuda:5", lambda storage, location: None)]
        patch.setattr(torch.serialization, "_package_registry", registry)
        assert_same_bytes([torch.ones(2), torch.ones(3)], tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    path = tmp_path / "ptsave" / "file.pt"
    error = assert_same_load_failure(path)
    assert "Attempting to deserialize object on a CUDA device" in str(error)
    for map_location in ("cpu", {"cuda:5": "cpu"}, torch.device("cpu"), lambda storage, _: storage):
        loaded = ptsave.load(path, map_location=map_location)
        assert_same_object(loaded, [torch.ones(2), torch.ones(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors(tmp_path: Path) -> None:
    """Copied to the host one at a time, and back; views and ties stay what they are."""
    weight = torch.arange(3_000_000.0, device="cuda")
    obj = {"weight": weight, "view": weight[5:], "tied": weight, "host": torch.ones(3)}
    obj["parameter"] = nn.Parameter(torch.randn(5, device="cuda:0"))
    assert_interchangeable(obj, tmp_path)
    path = tmp_path / "ptsave" / "file.pt"
    options: list[dict[str, Any]] = [
        {"map_location": "cpu"},
        {"map_location": {"cuda:0": "cpu"}},
        {"map_location": torch.device("cuda", torch.cuda.device_count() - 1)},
        {"mmap": True},
        {"mmap": True, "map_location": "cuda"},
        {"map_location": lambda storage, location: storage},
    ]
    for each in options:
        assert_same_object(ptsave.load(path, **each), stock_load(path, **each))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pinned", [True, False])
def test_cuda_tensors_through_pinned_memory(pinned: bool, tmp_path: Path) -> None:
    from torch.utils.serialization import config

    config.save.use_pinned_memory_for_d2h = pinned
    assert_interchangeable([torch.arange(3_000_000, device="cuda")], tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_wrapper_subclass_is_mapped_to_cuda(tmp_path: Path) -> None:
    """And the next load is not."""
    path = tmp_path / "file.pt"
    ptsave.save({"t": TwoTensor(torch.randn(2, 3), torch.randn(2, 3))}, path)
    with safe_globals([TwoTensor]):
        for map_location, expected in (("cuda:0", "cuda"), (None, "cpu")):
            loaded = ptsave.load(path, map_location=map_location)["t"]
            assert [each.device.type for each in (loaded, loaded.a, loaded.b)] == [expected] * 3


# ------------------------------------------------------------------------------ skipped data, fakes


def _skippable() -> dict[str, Any]:
    tensor = torch.randn(2, 3)
    return {
        "tensor": tensor,
        "view": tensor.view(-1),
        "slice": tensor[1],
        "wrapper": TwoTensor(torch.randn(2), torch.randn(2)),
        "complex": torch.randn(2, 3, dtype=torch.complex64),
        "sparse": _coo([[0, 1], [2, 0]], [3.0, 4.0], 2, 4),
        "empty": torch.empty(0),
        "large": torch.ones(300_000),
    }


def test_save_with_skipped_data(tmp_path: Path) -> None:
    """Space is left, to be filled later; what is loaded before that is zeros."""
    with safe_globals([TwoTensor]):
        with skip_data():
            data = assert_same_bytes(_skippable(), tmp_path)
        for source in (io.BytesIO(data), tmp_path / "ptsave" / "file.pt"):
            loaded = ptsave.load(source)
            assert_same_object(loaded, stock_load(io.BytesIO(data)))
            assert not loaded["tensor"].any()
            assert loaded["view"].untyped_storage() is loaded["tensor"].untyped_storage()


def test_skipped_data_is_filled_in_later(tmp_path: Path) -> None:
    """What torch's documentation suggests: the checksums then say nothing about the data."""
    path = tmp_path / "file.pt"
    with skip_data():
        ptsave.save({"a": torch.zeros(100), "b": torch.zeros(3)}, path)
    reader: Any = torch._C.PyTorchFileReader(str(path))
    offset = reader.get_record_offset("data/0")
    del reader
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(torch.arange(100.0).numpy().tobytes())
    loaded = ptsave.load(path)  # as with torch, without a warning
    assert torch.equal(loaded["a"], torch.arange(100.0))
    assert_same_object(loaded, stock_load(path))


def test_skipped_data_in_a_stream() -> None:
    class Sink(io.RawIOBase):
        def __init__(self) -> None:
            self.memory = io.BytesIO()

        def write(self, chunk: Any) -> int:
            return self.memory.write(chunk)

        def seek(self, offset: int, whence: int = 0) -> int:
            return self.memory.seek(offset, whence)

    ours: Any = Sink()
    theirs: Any = Sink()
    with skip_data():
        ptsave.save(_skippable(), ours)
        stock_save(_skippable(), theirs)
    assert ours.memory.getvalue() == theirs.memory.getvalue()


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("as_path", [True, False])
def test_load_with_skipped_data(weights_only: bool, as_path: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    ptsave.save(_skippable(), path)
    source: Any = path if as_path else io.BytesIO(path.read_bytes())
    with safe_globals([TwoTensor]), skip_data():
        loaded = ptsave.load(source, weights_only=weights_only)
    assert loaded["tensor"].shape == (2, 3)
    assert loaded["view"].untyped_storage() is loaded["tensor"].untyped_storage()
    loaded["tensor"].zero_()
    assert not loaded["slice"].any()
    assert not torch.serialization._serialization_tls.skip_data


def test_fake_tensors_as_placeholders(tmp_path: Path) -> None:
    with FakeTensorMode():
        tensor = torch.randn(2, 3)
        obj = {"tensor": tensor, "view": tensor.view(-1), "slice": tensor[1]}
    with skip_data(materialize_fake_tensors=True):
        data = assert_same_bytes(obj, tmp_path)
    assert not torch.serialization._serialization_tls.materialize_fake_tensors
    loaded = ptsave.load(io.BytesIO(data))
    assert_same_object(loaded, stock_load(io.BytesIO(data)))
    assert loaded["view"].untyped_storage() is loaded["tensor"].untyped_storage()
    assert not loaded["tensor"].any()


@pytest.mark.filterwarnings("ignore:.*prototype stage")
def test_what_cannot_be_skipped() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
    with skip_data():
        error = assert_same_save_failure(nested)
        assert "Cannot serialize nested tensor" in str(error)
        with pytest.warns(UserWarning, match="is a no-op") as caught:
            ptsave.save(torch.empty(2, device="meta"), io.BytesIO())
        assert len(caught) == 1
        assert_same_save_failure([1], _use_new_zipfile_serialization=False)


def test_fake_tensor_itself_cannot_be_saved(tmp_path: Path) -> None:
    fake = FakeTensorConverter().from_real_tensor(FakeTensorMode(), torch.randn(2))
    for context in (skip_data(), skip_data(materialize_fake_tensors=False)):
        with context:
            assert_same_failure(
                lambda: ptsave.save(fake, tmp_path / "file.pt"),
                lambda: stock_save(fake, io.BytesIO()),
            )
    assert not (tmp_path / "file.pt").exists()


@pytest.mark.parametrize("alignment", [64, 4096])
def test_load_into_fake_tensors(alignment: int, tmp_path: Path) -> None:
    """Tools read the place of every tensor's bytes from there."""
    from torch.utils.serialization import config

    config.save.storage_alignment = alignment
    path = tmp_path / "file.pt"
    obj = {**nn.Linear(10, 10).state_dict(), "empty": torch.empty(0), "tied": None}
    obj["tied"] = obj["weight"]
    ptsave.save(obj, path)
    for source in (lambda: path, lambda: io.BytesIO(path.read_bytes())):
        with FakeTensorMode():
            loaded, expected = ptsave.load(source()), stock_load(source())
        storage = loaded["weight"].untyped_storage()
        for name in obj:
            mine, theirs = (each[name].untyped_storage() for each in (loaded, expected))
            assert mine._checkpoint_offset == theirs._checkpoint_offset, name
            assert loaded[name].shape == expected[name].shape
        begin = storage._checkpoint_offset
        assert path.read_bytes()[begin : begin + 400] == obj["weight"].numpy().tobytes()
        assert getattr(storage, "_fake_device", None) == "cpu"


# ---------------------------------------------------------- what runs while loading and saving


class SavesInside:
    def __reduce__(self) -> Any:
        stream = io.BytesIO()
        torch.save({"inner": torch.arange(5)}, stream)
        return _load_inside, (stream.getvalue(), torch.ones(2))


def _load_inside(data: bytes, tensor: torch.Tensor) -> Any:
    return [torch.load(io.BytesIO(data), map_location="cpu"), tensor]


def test_saving_and_loading_inside_of_saving_and_loading(tmp_path: Path) -> None:
    with ptsave.installed():
        data = saved_bytes(torch.save, [SavesInside(), torch.ones(3)])
        loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert data == saved_bytes(stock_save, [SavesInside(), torch.ones(3)])
    assert_same_object(loaded, stock_load(io.BytesIO(data), weights_only=False))


class MakesTensors:
    """Every tensor lives only while it is pickled: its address is used again by the next."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return torch.Tensor.add, (torch.full((1000,), self.value), 0)


def test_tensors_that_live_only_while_they_are_pickled(tmp_path: Path) -> None:
    obj = [MakesTensors(i) for i in range(50)]
    data = assert_same_bytes(obj, tmp_path)
    loaded = ptsave.load(io.BytesIO(data), weights_only=False)
    assert [int(tensor[0]) for tensor in loaded] == list(range(50))


def test_threads(tmp_path: Path) -> None:
    """Each has its own map_location, files and errors."""

    def work(number: int) -> None:
        path = tmp_path / f"{number}.pt"
        device = "meta" if number % 2 else "cpu"
        for i in range(15):
            tensor = torch.full((2000 + number,), i)
            ptsave.save({"t": tensor}, path)
            loaded = ptsave.load(path, map_location=device)["t"]
            assert loaded.device.type == device
            assert number % 2 or torch.equal(loaded, tensor)

    in_threads(work, range(8))


def test_saving_one_object_from_several_threads(tmp_path: Path) -> None:
    obj = {"t": torch.arange(100_000), "n": [1, 2, 3]}
    expected = saved_bytes(stock_save, obj)
    assert in_threads(lambda _: saved_bytes(ptsave.save, obj), range(6)) == [expected] * 6


# ---------------------------------------------------------------------- what loaded storages can do


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, torch.Tensor]:
    path = tmp_path / "file.pt"
    ptsave.save({"small": torch.arange(10), "large": torch.arange(3_000_000.0)}, path)
    result: dict[str, torch.Tensor] = ptsave.load(path)
    return result


def test_loaded_storages_are_freed_one_by_one(loaded: dict[str, torch.Tensor]) -> None:
    references = {name: weakref.ref(t.untyped_storage()) for name, t in loaded.items()}
    small = loaded.pop("small")
    assert references["large"]() is loaded["large"].untyped_storage()
    del loaded["large"]
    assert references["large"]() is None
    assert torch.equal(small, torch.arange(10))


def test_nothing_is_kept_alive_by_save_or_load(tmp_path: Path) -> None:
    """Not even until the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(1000)
        reference = weakref.ref(tensor.untyped_storage())
        path = tmp_path / "file.pt"
        ptsave.save({"t": tensor}, path)
        del tensor
        assert reference() is None
        for weights_only in (True, False):
            loaded = ptsave.load(path, weights_only=weights_only)
            reference = weakref.ref(loaded["t"].untyped_storage())
            del loaded
            assert reference() is None
    finally:
        gc.enable()


def test_saving_does_not_change_the_object(tmp_path: Path) -> None:
    net, optimizer, _ = _trained()
    before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    ptsave.save([net, net.state_dict(), optimizer.state_dict()], tmp_path / "file.pt")
    assert_same_object([net.state_dict(), optimizer.state_dict()], before)
