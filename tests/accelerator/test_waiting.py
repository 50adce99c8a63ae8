"""Streams, events and memory of transfers: few, kept, waited for asleep, and given back."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import ptsave

MIB = 1 << 20
N_THREADS = 3
POOL = 32  # torch's streams of a device


def many_chunks(device: str) -> dict[str, torch.Tensor]:
    """Return 40 MiB: ten chunks of a save, twenty of a load."""
    small = {f"small{i}": torch.full((1000 + i,), i) for i in range(300)}
    large = {f"large{i}": torch.randn(2_400_000) for i in range(4)}
    return {name: tensor.to(device) for name, tensor in (small | large).items()}


Calls = dict[str, Callable[[], Any]]


@pytest.fixture
def calls(devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return calls that move 40 MiB to or from the last device, by three threads."""
    monkeypatch.setenv("PTSAVE_NUM_THREADS", str(N_THREADS))
    monkeypatch.setenv("PTSAVE_MAX_PINNED_BYTES", str(12 * MIB))
    tensors = many_chunks(devices[-1])
    file = tmp_path / "file.pt"
    torch.save(tensors, file)
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, torch.zeros_like(tensor))
    return {
        "save": lambda: ptsave.save(tensors, tmp_path / "saved.pt"),
        "save to a stream": lambda: ptsave.save(tensors, io.BytesIO()),
        "async_save": lambda: ptsave.async_save(tensors, io.BytesIO()).result(),
        "async_save, background": lambda: ptsave.async_save(
            tensors, io.BytesIO(), staging="background"
        ).result(),
        "load": lambda: ptsave.load(file, devices[-1]),
        "load_into": lambda: ptsave.load_into(file, model),
    }


def test_events_and_streams_are_kept(calls: Calls, fake: Any) -> None:
    for name, call in calls.items():
        call()
        fake.reset()
        call()
        stats = fake.stats()
        # One for the caller's stream, and one for each buffer that is used at a time.
        assert 2 <= stats["events"] <= 1 + 2 * N_THREADS, name
        assert stats["streams"] == 0, name


def test_waiting_keeps_no_core_busy(calls: Calls, fake: Any) -> None:
    fake.set_delay(2000, 3000)
    for name, call in calls.items():
        before = fake.stats()["busy_waits"]
        call()
        assert fake.stats()["busy_waits"] == before, name


def test_a_wait_is_asleep(calls: Calls, fake: Any) -> None:
    """A loop that asks again and again is no busy wait for the device, but keeps a core busy."""

    def cpu_seconds(call: Any) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    for name, call in calls.items():
        fake.set_delay(0, 0)
        call()
        without_waits = cpu_seconds(call)
        fake.set_delay(100_000, 100_000)
        start = time.perf_counter()
        busy = cpu_seconds(call) - without_waits
        assert busy < 0.8 * (time.perf_counter() - start), name  # a thread that asks takes 1.0


def test_memory_on_the_device_is_given_back(calls: Calls, devices: list[str], fake: Any) -> None:
    """To the caller's stream, which can use it again at once."""
    device = torch.device(devices[-1])

    def memory(kind: str) -> Any:
        return torch.accelerator.memory_stats(device)[kind]

    for name, call in calls.items():
        kept = call()
        in_use = memory("allocated_bytes.all.current")
        reserved = memory("reserved_bytes.all.current")
        torch.accelerator.reset_peak_memory_stats(device)
        del kept
        loaded = call()
        n_loaded = sum(t.nbytes for t in loaded.values()) if isinstance(loaded, dict) else 0
        if n_loaded == 0:
            assert memory("allocated_bytes.all.peak") - in_use <= 16 * MIB, name
        assert memory("allocated_bytes.all.current") == in_use, name
        again = [torch.empty(2 * MIB, dtype=torch.uint8, device=device) for _ in range(4)]
        assert memory("reserved_bytes.all.current") <= reserved, name
        del again, loaded


def test_page_locked_memory_is_released(calls: Calls, fake: Any) -> None:
    for call in calls.values():
        call()
    assert fake.stats()["pinned_reserved"] > 0
    ptsave.release_staging_memory()
    assert fake.stats()["pinned_reserved"] == fake.stats()["pinned_bytes"] == 0
    calls["save"]()
    assert fake.stats()["pinned_peak"] > 0


class Gate(io.BytesIO):
    """A target of saves that waits until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def write(self, data: Any) -> int:
        assert self.opened.wait(60)
        return super().write(data)


def test_page_locked_memory_of_busy_streams_is_released(devices: list[str], fake: Any) -> None:
    """The allocator frees memory only when streams that have used it are done."""
    target = Gate()
    future = ptsave.async_save(torch.ones(MIB, device=devices[-1]), target)
    fake.set_delay(500_000, 500_000)
    for _ in range(POOL):
        with torch.Stream(device=devices[-1]):
            torch.zeros(10, device=devices[-1])
    target.opened.set()
    future.result()
    ptsave.release_staging_memory()
    assert fake.stats()["pinned_reserved"] == 0


def test_no_copies_while_a_graph_is_captured(
    calls: Calls, devices: list[str], tmp_path: Path, fake: Any
) -> None:
    stream = torch.accelerator.current_stream(devices[-1])
    for call in calls.values():
        refused = pytest.raises(RuntimeError, match=f"{devices[-1]} .* captures a graph")
        with fake.capturing(stream), refused:
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.pt"]
    for call in calls.values():
        call()


def test_streams_that_capture_are_left_alone(calls: Calls, devices: list[str], fake: Any) -> None:
    """Torch's pool hands streams out to everybody: one that ptsave keeps may be in use."""
    calls["load"]()
    pool = [torch.Stream(device=devices[-1]) for _ in range(POOL)]
    with ExitStack() as stack:
        for stream in pool[1:]:
            stack.enter_context(fake.capturing(stream))
        calls["load"]()
        ptsave.release_staging_memory()
