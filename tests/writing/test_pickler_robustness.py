"""The engine's pickler and errors, depth, changes meanwhile and leaks."""

from __future__ import annotations

import gc
import io
import sys
import threading
import tracemalloc
from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
import torch
from _pickling import PICKLED, QUIET, Factory, Point, cycles, stock_pickle
from stock_comparison import saved_bytes, zip_records

import ptsave
from ptsave import _C

pytestmark = QUIET


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
