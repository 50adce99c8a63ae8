"""Where no thread can be started, everything goes on with the caller's."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ptsave
from ptsave.comparison.compare import compare
from ptsave.support.calls import pausing_garbage_collection
from ptsave.support.threads import Thread, ThreadPool


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_calls_run_here(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise error("can't start new thread")

    def fail() -> None:
        raise ValueError("no")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ThreadPool(2) as pool:
        assert pool.submit(threading.get_ident).result() == threading.get_ident()
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
        with pytest.raises(ValueError, match="no"):
            pool.submit(fail).result()


def test_a_call_runs_once_if_the_second_thread_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    calls: list[int] = []
    with ThreadPool(4) as pool:
        futures = [pool.submit(calls.append, i) for i in range(100)]
    assert all(future.done() for future in futures)
    assert sorted(calls) == list(range(100))


@pytest.mark.usefixtures("no_threads")
def test_compare(tmp_path: Path) -> None:
    for name, value in (("a.pt", 0.0), ("b.pt", 1.0)):
        tensors = {"large": torch.zeros(3_000_000), "small": torch.full((3,), value)}
        torch.save(tensors, tmp_path / name)
    found = compare(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    assert [each.name for each in found.differences] == ["small"]


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_load_model_with_loaders(tmp_path: Path, kind: Any) -> None:
    def load(parameter: Tensor, tensor: Tensor) -> None:
        parameter.data.copy_(tensor)

    trained, fresh = nn.Linear(1000, 1000), nn.Linear(1000, 1000)
    ptsave.save_model(trained, tmp_path, format=kind)
    vars(fresh.weight)["weight_loader"] = load
    vars(fresh.bias)["weight_loader"] = load
    ptsave.load_model(fresh, tmp_path)
    assert torch.equal(fresh.weight, trained.weight)
    assert torch.equal(fresh.bias, trained.bias)


def test_an_error_of_a_start_keeps_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """What callers hold, such as tensors, is freed without the garbage collector."""

    def refuse(start: Any, arguments: Any, *_: Any, **others: Any) -> None:
        del start, arguments, others
        raise RuntimeError("can't start new thread")

    def fail(held: Tensor) -> None:
        with pytest.raises(RuntimeError, match="can't start"):
            Thread(lambda begun: begun()).start()

    for name in ("_start_new_thread", "_start_joinable_thread"):  # until Python 3.12, and since
        if hasattr(threading, name):
            monkeypatch.setattr(threading, name, refuse)
    held = torch.ones(2)
    freed = weakref.ref(held)
    with pausing_garbage_collection():
        fail(held)
        del held
        assert freed() is None
