"""The engine's pickler writes Python's bytes."""

from __future__ import annotations

import copyreg
import functools
import gc
import io
import pickle
import sys
import threading
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from _pickling import (
    PICKLED,
    QUIET,
    Factory,
    Point,
    assert_handed_over,
    assert_pickled,
    cycles,
    fresh,
    stock_pickle,
)
from hypothesis import given
from hypothesis import strategies as st
from stock_comparison import (
    assert_same_bytes,
    assert_same_failure,
    dtypes,
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

pytestmark = QUIET


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
    assert not pickled[1].in_reach
    assert_same_failure(
        lambda: ptsave.save(obj, io.BytesIO()), lambda: stock_save(obj, io.BytesIO())
    )


@pytest.mark.parametrize("number", range(12))
def test_cycles(number: int) -> None:
    obj = list(cycles())[number]
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


# ------------------------------------------------------------------------- left to Python's pickler


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


# ----------------------------------------------------------------- errors, depth, changes and leaks


def test_errors_surface_unchanged() -> None:
    error = ValueError("the reason")

    class Raises:
        def __reduce__(self) -> Any:
            raise error

    with pytest.raises(ValueError, match="the reason") as caught:
        ptsave.save([torch.ones(2), Raises()], io.BytesIO())
    assert caught.value is error


# From Python 3.12 on C code has a limit of its own, which calls of Python functions leave alone.
_PYTHON_CALLS_COUNT = sys.version_info < (3, 12)


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
    refused = False
    try:
        expected = stock_pickle(obj)
    except RecursionError:
        refused = True
        with pytest.raises(RecursionError):
            ptsave.save(obj, io.BytesIO())
    else:
        assert zip_records(saved_bytes(ptsave.save, obj))["data.pkl"] == expected
    pickled = _C.pickle_object(obj)
    if depth < 400:
        assert pickled is not None
    elif refused or _PYTHON_CALLS_COUNT:  # otherwise C code may recurse deeper than that
        assert pickled is None
    while isinstance(obj, (list, tuple, dict)):  # or freeing it would recurse
        obj = next(iter(obj.values())) if isinstance(obj, dict) else obj[0]


def test_recursion_limit_is_respected() -> None:
    """Where Python's pickler has no room, the engine claims none."""

    def call_deep(levels: int) -> Any:
        return call_deep(levels - 1) if levels else _C.pickle_object(obj)

    obj = _nested("list", 150)
    assert call_deep(100) is not None
    if _PYTHON_CALLS_COUNT:
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
    return [PICKLED[name]() for name in names] + list(cycles())


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
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        run(400)
        gc.collect()
        # Less than the smallest object for each of 800 calls, but some for Python's caches.
        assert tracemalloc.get_traced_memory()[0] - first < 800 * 40
    finally:
        tracemalloc.stop()


def test_storages_live_as_long_as_their_list() -> None:
    tensors = [torch.ones(3), torch.ones(4).to(torch.uint16)]
    pickled = _C.pickle_object(tensors)
    assert pickled is not None
    storages = _C.untyped_storages(pickled[1])
    assert [s.data_ptr() for s in storages] == [t.data_ptr() for t in tensors]
    assert pickled[1].in_reach
    del tensors
    assert [s.nbytes() for s in storages] == [12, 8]


# --------------------------------------------------------------------------------- generated graphs


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
