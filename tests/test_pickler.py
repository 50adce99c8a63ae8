"""The engine's pickler: Python's bytes for what it writes, and nothing for what it leaves alone."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import gc
import io
import pickle
import sys
import threading
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparison import (
    assert_same_bytes,
    assert_same_failure,
    saved_bytes,
    stock_save,
    typed_storage,
    zip_records,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ptsave
from ptsave import _C

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]

Factory = Callable[[], Any]


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


# -------------------------------------------------------------------------------- what is pickled


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


@pytest.mark.parametrize("name", PICKLED)
def test_pickled(name: str, tmp_path: Path) -> None:
    assert_pickled(PICKLED[name](), tmp_path)


@pytest.mark.parametrize("size", [1, 2, 999, 1000, 1001, 1002, 2000, 2001, 3001])
@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "ordered dict", "set", "attributes"])
def test_batches(kind: str, size: int, tmp_path: Path) -> None:
    numbers = range(10**6, 10**6 + size)
    if kind == "attributes":
        obj: Any = OrderedDict()
        vars(obj).update({f"attribute {i}": i for i in numbers})
    else:
        kinds: dict[str, Callable[[Any], Any]] = {
            "list": list,
            "tuple": tuple,
            "dict": lambda keys: {key: str(key) for key in keys},
            "ordered dict": lambda keys: OrderedDict((key, str(key)) for key in keys),
            "set": set,
        }
        obj = kinds[kind](numbers)
    assert_pickled([obj, obj], tmp_path)


def test_meta_storages() -> None:
    """Their pickle can be made, but their bytes cannot be saved."""
    storage = torch.UntypedStorage(3, device="meta")
    obj = ["meta", storage, typed_storage(torch.ones(2, device="meta")), storage, fresh("meta")]
    pickled = _C.pickle_object(obj)
    with torch.serialization.skip_data():
        assert pickled is not None
        assert pickled[0] == stock_pickle(obj)
    assert not pickled[1].on_cpu
    assert_same_failure(
        lambda: ptsave.save(obj, io.BytesIO()), lambda: stock_save(obj, io.BytesIO())
    )


def _cycles() -> Iterator[Any]:
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


@pytest.mark.parametrize("number", range(12))
def test_cycles(number: int) -> None:
    obj = list(_cycles())[number]
    pickled = _C.pickle_object(obj)
    assert pickled is not None
    assert pickled[0] == stock_pickle(obj)


def test_nothing_of_the_engine_is_used_for_other_pickles(tmp_path: Path) -> None:
    class Module:
        Pickler = pickle.Pickler

    obj = {"tensor": torch.ones(3), "bytes": b"abc"}
    for options in ({"pickle_protocol": 4}, {"pickle_module": Module}):
        assert_same_bytes(obj, tmp_path, **options)


def test_replaced_pickler_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by packages that put a pickler of their own in place of Python's."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return (int, ("7",)) if obj == OrderedDict(a=1) else NotImplemented

    monkeypatch.setattr(pickle, "Pickler", Pickler)
    stream = io.BytesIO()
    ptsave.save([OrderedDict(a=1), {2}], stream)
    assert torch.load(io.BytesIO(stream.getvalue()), weights_only=False) == [7, {2}]


# ---------------------------------------------------------------------------- what is handed over


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


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


# ------------------------------------------------------------------------------------- robustness


def test_errors_surface_unchanged() -> None:
    error = ValueError("the reason")

    class Raises:
        def __reduce__(self) -> Any:
            raise error

    with pytest.raises(ValueError, match="the reason") as caught:
        ptsave.save([torch.ones(2), Raises()], io.BytesIO())
    assert caught.value is error


def _nested(kind: str, depth: int) -> Any:
    obj: Any = torch.ones(1)
    for _ in range(depth):
        kinds: dict[str, Factory] = {
            "list": lambda part=obj: [part],  # type: ignore[misc]
            "tuple": lambda part=obj: (part,),  # type: ignore[misc]
            "dict": lambda part=obj: {"a": part},  # type: ignore[misc]
            "ordered dict": lambda part=obj: OrderedDict(a=part),  # type: ignore[misc]
        }
        obj = kinds[kind]()
    return obj


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "ordered dict"])
@pytest.mark.parametrize("depth", [100, 300, 500, 5000, 100_000])
def test_deep_objects(kind: str, depth: int) -> None:
    """Saved or refused, as by Python's pickler."""
    obj = _nested(kind, depth)
    try:
        expected = stock_pickle(obj)
    except RecursionError:
        with pytest.raises(RecursionError):
            ptsave.save(obj, io.BytesIO())
    else:
        assert zip_records(saved_bytes(ptsave.save, obj))["data.pkl"] == expected
    pickled = _C.pickle_object(obj)
    assert (pickled is not None) == (depth < 400)
    while isinstance(obj, (list, tuple, dict)):  # or freeing it would recurse
        obj = next(iter(obj.values())) if isinstance(obj, dict) else obj[0]


def test_recursion_limit_is_respected() -> None:
    """Where Python's pickler has no room, the engine claims none."""

    def call_deep(levels: int) -> Any:
        return call_deep(levels - 1) if levels else _C.pickle_object(obj)

    obj = _nested("list", 150)
    assert call_deep(100) is not None
    assert call_deep(sys.getrecursionlimit() - 300) is None


@pytest.mark.parametrize("kind", [list, dict, OrderedDict])
def test_containers_that_change_meanwhile(kind: Any) -> None:
    """The result is unspecified, but there is one, or an error; and nothing breaks."""
    container: Any = [] if kind is list else kind()
    stop = threading.Event()

    def change() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            if kind is list:
                container.append([torch.ones(1), str(i)])
                del container[: len(container) // 100]
            else:
                container[str(i % 500)] = [torch.ones(1), {str(i): i}]
                container.pop(str((i + 77) % 500), None)

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(150):
            with suppress(RuntimeError):
                ptsave.save([container, Point(1), container], io.BytesIO())
                ptsave.save([container, container], io.BytesIO())
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_changes_from_within() -> None:
    """Garbage collection runs finalizers while a set's items are being listed."""
    victims: list[Any] = []

    class Cyclic:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            victims.clear()

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            victims[:] = [[{i}, torch.ones(1), (str(i),)] for i in range(300)]
            Cyclic()
            _C.pickle_object(victims)
    finally:
        gc.set_threshold(*threshold)


def _everything() -> list[Any]:
    names = [name for name in PICKLED if name not in ("functions", "classes")]
    return [PICKLED[name]() for name in names] + list(_cycles())


def test_nothing_leaks() -> None:
    everything = _everything()
    exotic = [everything, Point(1)]
    constants = [torch.float32, OrderedDict, "storage", "cpu", torch._utils._rebuild_tensor_v2]

    def count() -> list[int]:
        return [sys.getrefcount(each) for each in [*constants, *everything]]

    def run(times: int) -> None:
        for _ in range(times):
            assert _C.pickle_object(everything) is not None
            assert _C.pickle_object(exotic) is None

    run(3)
    gc.collect()
    before = count()
    run(100)
    assert all(abs(now - then) < 10 for now, then in zip(count(), before, strict=True))
    tracemalloc.start()
    try:
        run(2)
        first = tracemalloc.get_traced_memory()[0]
        run(50)
        assert tracemalloc.get_traced_memory()[0] - first < 2000
    finally:
        tracemalloc.stop()


def test_storages_live_as_long_as_their_list() -> None:
    tensors = [torch.ones(3), torch.ones(4).to(torch.uint16)]
    pickled = _C.pickle_object(tensors)
    assert pickled is not None
    storages = _C.untyped_storages(pickled[1])
    assert [s.data_ptr() for s in storages] == [t.data_ptr() for t in tensors]
    assert pickled[1].on_cpu
    del tensors
    assert [s.nbytes() for s in storages] == [12, 8]
