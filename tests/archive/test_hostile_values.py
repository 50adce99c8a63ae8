"""What code sees while a file is loaded, and what the storages are that come out of it."""

from __future__ import annotations

import collections
import copy
import ctypes
import gc
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from _corruption import Entry, archive_of
from _system import in_child, run_python
from stock_comparison import (
    Calls,
    assert_same_object,
    saved_bytes,
    stock_load,
    stock_save,
    typed_storage,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ptsave
from ptsave.archive.opening import open_archive

_NUMEL = 16_000_000  # times 8 bytes: takes long enough to arrive that looking early shows zeros


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


# ------------------------------------------------------------ looking at values while loading

_seen: list[int] = []


def _look(tensor: torch.Tensor) -> torch.Tensor:
    """Note the sum of a tensor of ones, without going through any mode."""
    values = np.ctypeslib.as_array(
        ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int64)), (tensor.numel(),)
    )
    _seen.append(int(values.sum()))
    return tensor


def _look_at_storage(storage: Any) -> Any:
    _look(torch.empty(0, dtype=torch.int64).set_(storage))
    return storage


class WithState:
    """Looks at its tensor in ``__setstate__``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        _look(state["tensor"])
        self.__dict__.update(state)


class WithReduce:
    """Is rebuilt by a function that looks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.tensor,))


def _rebuild(tensor: torch.Tensor) -> WithReduce:
    return WithReduce(_look(tensor))


class Subclass(torch.Tensor):
    """Looks when its attributes are restored."""

    def __setstate__(self, state: Any) -> None:
        _look(self.as_subclass(torch.Tensor))
        self.note = state


class LookingUnpickler(pickle.Unpickler):
    """Looks at every storage as it is made."""

    def load(self) -> Any:
        load_storage = self.persistent_load

        def persistent_load(saved_id: Any) -> Any:
            storage = load_storage(saved_id)
            _look_at_storage(storage._untyped_storage)
            return storage

        self.persistent_load = persistent_load  # type: ignore[method-assign]
        return super().load()


class LookingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == _NUMEL:
            _look(result)
        return result


class LookingDispatchMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == _NUMEL:
            _look(result)
        return result


class SaysCpu:
    """A callable map_location that reads like the CPU."""

    def __str__(self) -> str:
        return "cpu"

    def __call__(self, storage: Any, _location: str) -> Any:
        return _look_at_storage(storage)


def _look_at_cpu(storage: Any, location: str) -> Any:
    return _look_at_storage(storage) if location == "cpu" else None


def _register() -> None:
    torch.serialization.register_package(-1, lambda _storage: None, _look_at_cpu)


_Makes = Callable[[torch.Tensor], Any]
_LOOKS: dict[str, tuple[_Makes, dict[str, Any]]] = {
    "__setstate__": (WithState, {"weights_only": False}),
    "__reduce__": (WithReduce, {"weights_only": False}),
    "safe global": (WithState, {"weights_only": True}),
    "map_location": (list, {"map_location": lambda storage, _: _look_at_storage(storage)}),
    "map_location that says cpu": (list, {"map_location": SaysCpu()}),
    "package": (list, {}),
    "pickle_module": (
        list,
        {
            "pickle_module": SimpleNamespace(__name__="own", Unpickler=LookingUnpickler),
            "weights_only": False,
        },
    ),
    "function mode": (list, {}),
    "dispatch mode": (list, {}),
}


@pytest.fixture(scope="module")
def ones() -> torch.Tensor:
    return torch.ones(_NUMEL, dtype=torch.int64)


@pytest.fixture
def file_of_ones(ones: torch.Tensor, tmp_path: Path) -> Iterator[Callable[[_Makes], Path]]:
    path = tmp_path / "ones.pt"

    def save(make: _Makes) -> Path:
        stock_save({"first": make([ones] if make is list else ones)}, path)  # type: ignore[arg-type]
        _forget(path)
        return path

    yield save
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", _LOOKS)
def test_code_that_looks_at_values_sees_them(
    name: str, file_of_ones: Callable[[_Makes], Path]
) -> None:
    make, options = _LOOKS[name]
    path = file_of_ones(make)
    _seen.clear()
    mode: AbstractContextManager[Any] = nullcontext()
    if name == "package":
        _register()
    elif name == "function mode":
        mode = LookingFunctionMode()
    elif name == "dispatch mode":
        mode = LookingDispatchMode()
    elif name == "safe global":
        torch.serialization.add_safe_globals([WithState])
    with mode:
        ptsave.load(path, **options)
    assert _seen or name == "function mode"  # which is not asked when storages become tensors
    assert set(_seen) <= {_NUMEL}


def test_subclass_that_looks(ones: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "subclass.pt"
    tensor = ones.as_subclass(Subclass)
    tensor.note = "hello"
    stock_save(tensor, path)
    _forget(path)
    _seen.clear()
    assert ptsave.load(path, weights_only=False).note == {"note": "hello"}
    assert set(_seen) == {_NUMEL}


@pytest.mark.parametrize("what", ["Size", "OrderedDict", "shape", "set"])
def test_plain_globals_applied_to_tensors(what: str, ones: torch.Tensor, tmp_path: Path) -> None:
    """No object pickles like that, but what stock loads is what the values say."""
    storage: Any = typed_storage(torch.arange(100.0))
    hooks: Any = collections.OrderedDict()
    calls = {
        "Size": Calls(torch.Size, torch.tensor([3, 4, 5])),
        "OrderedDict": Calls(collections.OrderedDict, torch.tensor([[3, 4]])),
        "set": Calls(set, torch.tensor([3, 4])),
        "shape": Calls(
            torch._utils._rebuild_tensor_v2, *(storage, 0, (torch.tensor(7),), (1,), False, hooks)
        ),
    }
    path = tmp_path / "calls.pt"
    stock_save({"ones": ones, "call": calls[what]}, path)
    expected = stock_load(path)["call"]
    _forget(path)
    actual = ptsave.load(path)["call"]
    if what in ("OrderedDict", "set"):
        pairs = [sorted(str(each) for each in both) for both in (actual, expected)]
        assert pairs[0] == pairs[1]
    else:
        assert_same_object(actual, expected)


def test_pickle_that_fails_while_bytes_arrive(ones: torch.Tensor, path: Path) -> None:
    archive = archive_of({"a": ones})
    archive.entry("data.pkl").payload = archive.entry("data.pkl").payload[:-1]
    path.write_bytes(archive.to_bytes())
    _forget(path)
    with pytest.raises(EOFError):
        ptsave.load(path)


def test_tensors_dropped_while_bytes_arrive(ones: torch.Tensor, tmp_path: Path) -> None:
    """The pickle throws its first storages away again; what follows is still right."""
    archive = archive_of([ones, torch.arange(3.0)])
    data = archive.entry("data.pkl")
    cut = data.payload.index(b"ctorch._utils\n")
    end = data.payload.index(b"R", data.payload.index(b"collections\nOrderedDict\n")) + 1
    assert data.payload[end:].count(b"tq") >= 1
    dropped = b"\x80\x02" + data.payload[cut:].replace(b"e.", b"0.", 1)
    data.payload = dropped.replace(b"\x80\x02", b"\x80\x02]q\xff(", 1).replace(b"0.", b"e.")
    path = tmp_path / "dropped.pt"
    path.write_bytes(archive.to_bytes())
    _forget(path)
    for _ in range(3):
        result = ptsave.load(path)
        assert_same_object(result, stock_load(path))


def test_archive_with_gaps(path: Path) -> None:
    """Payloads that are not where torch's writer would have put them are found all the same."""
    obj = {f"t{i}": torch.arange(200_000) + i for i in range(4)}
    archive = archive_of(obj)
    archive.entry("data/1").local = {"extra": b"XX\x64\0" + bytes(100)}
    archive.entry("data/2").descriptor = True
    gap = Entry(b"archive/gap", bytes(3_000_000))
    archive.entries.insert(6, gap)
    path.write_bytes(archive.to_bytes())
    for _ in range(2):
        assert_same_object(ptsave.load(path), obj)
        _forget(path)
    assert_same_object(ptsave.load(io.BytesIO(path.read_bytes())), obj)


def test_file_that_is_cut_while_it_is_loaded(path: Path) -> None:
    """An error, not a crash: the file is read, not mapped."""
    obj = [torch.ones(1_000_000) for _ in range(4)]
    stock_save(obj, path)
    reader = open_archive(path, verify=True)
    assert reader is not None
    engine = reader.engine
    os.truncate(path, 1000)
    engine.start([4], n_threads=2, verify=True, exact_offsets=False)
    with pytest.raises(RuntimeError, match="unexpected end of file"):
        engine.wait_all(progress=None)
    engine.cancel()


# ----------------------------------------------------------------- what the storages are after


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Small tensors that share memory pages, and a large one."""
    path = tmp_path / "loaded.pt"
    obj = {f"t{i}": torch.full((50 + i,), float(i)) for i in range(100)}
    stock_save({**obj, "large": torch.arange(600_000.0)}, path)
    result: dict[str, torch.Tensor] = ptsave.load(path)
    return result


def _all_but(loaded: dict[str, torch.Tensor], name: str) -> None:
    """Nothing that is done to one tensor shows in another."""
    for i in range(100):
        if name != f"t{i}":
            assert loaded[f"t{i}"].eq(i).all(), i
    if name != "large":
        assert loaded["large"].equal(torch.arange(600_000.0))


@pytest.mark.parametrize("name", ["t3", "large"])
def test_resize_to_nothing_and_back(loaded: dict[str, torch.Tensor], name: str) -> None:
    """As FSDP does."""
    tensor = loaded[name]
    storage = tensor.untyped_storage()
    nbytes, before = storage.nbytes(), tensor.clone()
    storage.resize_(0)
    assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
    storage.resize_(nbytes)
    tensor.copy_(before)
    assert tensor.equal(before)
    storage.resize_(2 * nbytes)
    assert tensor.equal(before)
    _all_but(loaded, name)


@pytest.mark.parametrize("name", ["t3", "large"])
def test_growing_a_tensor(loaded: dict[str, torch.Tensor], name: str) -> None:
    tensor = loaded[name]
    before = tensor.clone()
    tensor.resize_(2 * before.numel()).fill_(-1)
    assert tensor.eq(-1).all()
    tensor.set_(before)  # type: ignore[call-overload]
    assert tensor.equal(before)
    _all_but(loaded, name)


def test_storages_are_plain_memory(loaded: dict[str, torch.Tensor]) -> None:
    for tensor in loaded.values():
        storage = tensor.untyped_storage()
        assert storage.resizable()
        assert not storage.is_shared()
        assert not tensor.is_pinned()
        assert storage.filename is None
        assert storage.data_ptr() % 64 == 0
        assert storage.nbytes() == 4 * tensor.numel()


def test_sharing_with_another_process(loaded: dict[str, torch.Tensor]) -> None:
    for name in ("t3", "large"):
        tensor = loaded[name].share_memory_()
        assert tensor.is_shared()
        in_child(lambda tensor=tensor: _fill([tensor], 5))  # type: ignore[misc]
        assert tensor.eq(5).all()
    loaded["t3"].fill_(3)
    loaded["large"].copy_(torch.arange(600_000.0))
    _all_but(loaded, "")


def test_a_child_has_its_own_copy(loaded: dict[str, torch.Tensor]) -> None:
    in_child(lambda: _fill(list(loaded.values()), -1))
    _all_but(loaded, "")


def _fill(tensors: list[torch.Tensor], value: int) -> None:
    for tensor in tensors:
        tensor.numpy()[:] = value


def test_copies_and_pickles(loaded: dict[str, torch.Tensor]) -> None:
    _all_but(copy.deepcopy(loaded), "")
    _all_but(copy.copy(loaded), "")
    _all_but(pickle.loads(pickle.dumps(loaded)), "")
    storages = [tensor.untyped_storage() for tensor in loaded.values()]
    assert_same_object(copy.deepcopy(storages), storages)
    for save in (ptsave.save, stock_save):
        for load in (ptsave.load, stock_load):
            _all_but(load(io.BytesIO(saved_bytes(save, loaded))), "")


def test_writing_to_one_tensor_changes_no_other(loaded: dict[str, torch.Tensor]) -> None:
    for i in range(0, 100, 2):
        loaded[f"t{i}"].fill_(-1)
    for i in range(1, 100, 2):
        assert loaded[f"t{i}"].eq(i).all()
    loaded["large"].mul_(2).neg_()
    assert loaded["large"][7] == -14
    loaded["t1"].requires_grad_(True).sum().backward()
    assert loaded["t1"].grad is not None


def test_numpy_views_outlive_the_tensors(loaded: dict[str, torch.Tensor]) -> None:
    views = {name: tensor.numpy() for name, tensor in loaded.items()}
    loaded.clear()
    gc.collect()
    views["t4"][:] = 7
    assert (views["t5"] == 5).all()
    assert (views["large"] == np.arange(600_000.0)).all()


def test_loaded_tensors_are_independent_of_the_file(path: Path) -> None:
    stock_save({"a": torch.ones(500_000), "b": torch.ones(3)}, path)
    with path.open("r+b") as stream:
        result = ptsave.load(stream)
        stream.seek(0)
        stream.write(bytes(path.stat().st_size))
        stream.truncate(10)
    path.unlink()
    assert result["a"].eq(1).all()
    assert result["b"].eq(1).all()


_RESIDENT = """
import gc, re, sys
import torch, ptsave
def mib():
    return int(re.search(r"VmRSS:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10
ptsave.load(sys.argv[2])
start = mib()
obj = ptsave.load(sys.argv[1])
for tensor in obj.values():
    assert tensor[0] == tensor[-1]
whole = mib() - start
names = list(obj)
for name in names[1::2]:
    del obj[name]
gc.collect()
half = mib() - start
for name in list(obj):
    if name != "tiny":
        del obj[name]
gc.collect()
print(whole, half, mib() - start, float(obj["tiny"].sum()))
"""


@pytest.mark.parametrize("kind", ["few large", "many small"])
def test_memory_goes_back_tensor_by_tensor(kind: str, tmp_path: Path) -> None:
    """One tiny tensor in the middle keeps a few MiB of a checkpoint of 400, not all of it."""
    numel, n = (2_500_000, 40) if kind == "few large" else (125_000, 800)
    obj = {f"t{i}": torch.zeros(numel) for i in range(n // 2)}
    obj["tiny"] = torch.ones(5)
    obj |= {f"t{i}": torch.zeros(numel) for i in range(n // 2, n)}
    path, small = tmp_path / "file.pt", tmp_path / "small.pt"
    stock_save(obj, path)
    stock_save([torch.ones(3)], small)
    output = run_python(_RESIDENT, path, small).stdout
    whole, half, tiny, total = map(float, output.split())
    assert 370 < whole < 460
    assert tiny < 24
    assert total == 5
    if kind == "few large":  # neighbours of half a MiB share segments, which go as one
        assert half < whole / 2 + 30
