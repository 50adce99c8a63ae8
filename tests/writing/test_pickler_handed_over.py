"""What the engine's pickler leaves to Python's, as a whole."""

from __future__ import annotations

import copyreg
import functools
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pickling import QUIET, Factory, Point, assert_handed_over, assert_pickled, stock_pickle
from stock_comparison import assert_same_bytes, assert_same_failure, stock_save, typed_storage
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ptsave
from ptsave import _C

pytestmark = QUIET


class SubclassedDict(dict[str, Any]):
    pass


class SubclassedTensor(torch.Tensor):
    pass


class Meta(type):
    pass


class WithMeta(metaclass=Meta):
    class Inner:
        pass


def _with(obj: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


def _with_fake_device(obj: Any) -> Any:
    return _with(obj, _fake_device=torch.device("cuda:3"))


HANDED_OVER: dict[str, Factory] = {
    "instance": lambda: Point(1),
    "deep inside": lambda: {"a": [torch.zeros(2), (1, {"b": Point(2, torch.ones(3))})]},
    "subclasses": lambda: [SubclassedDict(a=1), True],
    "defaultdict": lambda: defaultdict(list, a=[1]),
    "counter": lambda: Counter("abc"),
    "numpy": lambda: [np.arange(3), np.float64(2.5)],
    "bytearray": lambda: bytearray(b"abc"),
    "range": lambda: range(3),
    "layout": lambda: torch.strided,
    "memory format": lambda: torch.contiguous_format,
    "class with a metaclass": lambda: [WithMeta, torch.FloatStorage],
    "inner class": lambda: WithMeta.Inner,
    "classes of singletons": lambda: [type(None), type(...), type(NotImplemented)],
    "built-in function": lambda: [len, torch.add],
    "tensor subclass": lambda: torch.ones(2).as_subclass(SubclassedTensor),
    "tensor with an attribute": lambda: _with(torch.ones(2), label="a"),
    "parameter with an attribute": lambda: _with(nn.Parameter(torch.ones(2)), label="a"),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "uninitialized parameter": nn.UninitializedBuffer,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "lazy copy": lambda: [t := torch.ones(3), t._lazy_clone()],
    "fake device of an untyped storage": lambda: _with_fake_device(torch.UntypedStorage(3)),
    "fake device of a typed storage": lambda: _with_fake_device(typed_storage(torch.ones(3))),
    "quantized storage": lambda: torch.QInt8Storage(3),
    "module": lambda: nn.Linear(2, 2),
    "ordered dict that reduces itself": lambda: _with(
        OrderedDict(a=1), __reduce_ex__=lambda protocol: (OrderedDict, ((("b", 2),),))
    ),
    "ordered dict with other items": lambda: _with(OrderedDict(a=1), items={"b": 2}.items),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.*beta state", "ignore:.*quant")
@pytest.mark.parametrize("name", HANDED_OVER)
def test_handed_over(name: str, tmp_path: Path) -> None:
    obj = HANDED_OVER[name]()
    assert _C.pickle_object(obj) is None
    assert _C.pickle_object({"key": [obj]}) is None
    try:
        stock_pickle(obj)
    except Exception:
        assert_same_failure(
            lambda: ptsave.save(obj, io.BytesIO()), lambda: stock_save(obj, io.BytesIO())
        )
    else:
        assert_same_bytes(obj, tmp_path)


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_FunctionMode, _DispatchMode, torch.serialization.skip_data])
def test_modes(mode: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    with mode():
        assert_handed_over([torch.ones(2)], tmp_path)
    assert_pickled([torch.ones(2)], tmp_path)


def test_default_device_is_no_obstacle(tmp_path: Path) -> None:
    obj = [torch.ones(2), nn.Parameter(torch.ones(3))]
    with torch.device("meta"):
        assert_pickled(obj, tmp_path)
        with _FunctionMode():
            assert_handed_over(obj, tmp_path)


def test_tracing() -> None:
    """Sizes are tensors then."""
    results = []

    def traced(tensor: torch.Tensor) -> torch.Tensor:
        results.append(_C.pickle_object([tensor]))
        return tensor

    torch.jit.trace(traced, torch.ones(2))
    assert results[0] is None


def test_transforms() -> None:
    results = []

    def transformed(tensor: torch.Tensor) -> torch.Tensor:
        results.append(_C.pickle_object([tensor]))
        return tensor * 2

    torch.vmap(transformed)(torch.ones(2, 3))
    torch.func.grad(lambda x: transformed(x).sum())(torch.ones(3))
    assert results == [None, None]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.Tensor, "__reduce_ex__"),
        (torch.Tensor, "_reduce_ex_internal"),
        (nn.Parameter, "__reduce_ex__"),
        (torch._utils, "_get_obj_state"),
        (torch.utils.hooks, "warn_if_has_hooks"),
    ],
)
def test_replaced_functions(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)  # so that it looks like the original
    def replacement(*args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(owner, name, replacement)
    assert_handed_over([torch.ones(2), nn.Parameter(torch.ones(2))], tmp_path)


def test_replaced_property(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "requires_grad", property(lambda self: True), raising=False)
    assert_handed_over([torch.ones(2)], tmp_path)
    assert b"\x88" in stock_pickle(torch.ones(2))


def test_replaced_rebuild_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's pickler looks where the function says that it is defined."""
    monkeypatch.setattr(torch._utils, "_rebuild_tensor_v2", torch._utils._rebuild_tensor)
    assert_pickled([torch.ones(2), torch.ones(2)], tmp_path)
    monkeypatch.setattr(torch._utils, "_rebuild_tensor_v2", lambda *args: None)
    assert _C.pickle_object(torch.ones(2)) is None
    assert_same_failure(
        lambda: ptsave.save(torch.ones(2), io.BytesIO()),
        lambda: stock_save(torch.ones(2), io.BytesIO()),
        ignore=r"0x\w+",
    )


@pytest.mark.parametrize(
    "cls", [torch.Tensor, nn.Parameter, OrderedDict, torch.Size, torch.dtype, complex]
)
def test_registered_reducers(cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, cls, lambda obj: (str, ("reduced",)))
    obj = [torch.ones(2), nn.Parameter(torch.ones(2)), torch.Size([1]), torch.half, 1j]
    assert_handed_over(obj, tmp_path)


def test_registered_extension(tmp_path: Path) -> None:
    copyreg.add_extension("collections", "OrderedDict", 1234)
    try:
        assert_handed_over([OrderedDict(), torch.ones(2)], tmp_path)
    finally:
        copyreg.remove_extension("collections", "OrderedDict", 1234)


def test_registered_packages(tmp_path: Path) -> None:
    """Those that are asked before torch's own may know a tensor's device by another name."""
    obj = [torch.ones(2), torch.ones(3).to(torch.uint16)]
    torch.serialization.register_package(11, lambda storage: "eleven", lambda *args: None)
    assert_pickled(obj, tmp_path)
    assert _C.pickle_object(torch.UntypedStorage(3, device="meta")) is None
    torch.serialization.register_package(9, lambda storage: None, lambda *args: None)
    assert_handed_over(obj, tmp_path)


@pytest.mark.parametrize("dtypes", [(np.float64, np.int64), (np.float32, np.uint16)])
def test_one_address_two_dtypes(dtypes: tuple[Any, Any]) -> None:
    array = np.zeros(4)
    obj = [torch.zeros(1), *(torch.from_numpy(array.view(dtype)) for dtype in dtypes)]
    assert _C.pickle_object(obj) is None
    assert_same_failure(
        lambda: ptsave.save(obj, io.BytesIO()), lambda: stock_save(obj, io.BytesIO())
    )


def test_storage_without_accessible_memory() -> None:
    tensor = torch.ones(2)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    assert _C.pickle_object(tensor) is None


def test_nothing_is_called_before_handing_over() -> None:
    calls = []

    class Watched:
        def __reduce__(self) -> Any:
            calls.append("reduce")
            return (int, ())

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            raise AttributeError(name)

    assert _C.pickle_object([torch.ones(2), Watched(), 1]) is None
    assert calls == []
