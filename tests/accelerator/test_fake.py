"""The accelerator made for tests: what goes wrong on real hardware goes wrong here, visibly."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parent.parent
N = 10_000
POISON = 0xDB
SLOW = 100_000  # us


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, in which the backend is registered."""
    prologue = "import torch\nfrom accelerator import fake_device\nfake = fake_device.load()\n"
    return subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
    )


def test_memory_faults_on_the_cpu(fake: Any) -> None:
    result = run_python(
        """
        import ctypes, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        x = torch.zeros(4, device="fake")
        torch.accelerator.synchronize()
        ctypes.string_at(x.data_ptr(), 1)
        """
    )
    assert result.returncode == -signal.SIGSEGV, result.stderr


def test_exit_with_work_in_flight(fake: Any) -> None:
    result = run_python(
        """
        fake.set_delay(5000, 5000)
        x = torch.zeros(1000, device="fake:1").to("fake:0")
        host = torch.empty(1000, pin_memory=True)
        host.copy_(x, non_blocking=True)
        stream = torch.Stream(device="fake")
        fake._backend.set_held((0, stream.stream_id), True)
        with stream:
            y = x.clone()
        """
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_forked_child(fake: Any) -> None:
    result = run_python(
        """
        import os
        x = torch.ones(1000, device="fake")
        host = torch.empty(1000, pin_memory=True)
        pid = os.fork()
        if pid == 0:
            assert torch.ones(2).sum() == 2
            try:
                x.cpu()
            except RuntimeError as error:
                assert "forked child" in str(error), error
            else:
                raise AssertionError
            del x, host
        else:
            assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert result.returncode == 0, result.stderr


# ----------------------------------------------------------------------------- streams and events


def on_side_stream(fake: Any, delay: int = 0) -> tuple[torch.Stream, torch.Tensor, torch.Tensor]:
    """Return a stream, zeros, and what the zeros are after a copy that was just queued there."""
    source = torch.arange(N).pin_memory()
    target = torch.zeros(N, dtype=torch.int64, device="fake")
    torch.accelerator.synchronize()
    side = torch.Stream(device="fake")
    fake.set_delay(delay, delay, side)
    with side:
        target.copy_(source, non_blocking=True)
    return side, target, source


def test_missing_wait(fake: Any) -> None:
    source = torch.arange(N).pin_memory()
    target = torch.zeros(N, dtype=torch.int64, device="fake")
    side = torch.Stream(device="fake")
    side.wait_stream(torch.accelerator.current_stream())
    with fake.held(side):
        with side:
            target.copy_(source, non_blocking=True)
        assert (target.cpu() == 0).all()
    side.synchronize()
    assert torch.equal(target.cpu(), source)


def test_missing_wait_for_a_slow_stream(fake: Any) -> None:
    side, target, _ = on_side_stream(fake, SLOW)
    assert (target.cpu() == 0).all()
    side.synchronize()


WAITS: dict[str, Callable[[torch.Stream], object]] = {
    "stream, on the device": lambda side: torch.accelerator.current_stream().wait_stream(side),
    "event, on the device": lambda side: torch.accelerator.current_stream().wait_event(
        side.record_event()
    ),
    "stream": lambda side: side.synchronize(),
    "event": lambda side: side.record_event().synchronize(),
    "device": lambda side: torch.accelerator.synchronize(side.device),
}


@pytest.mark.parametrize("wait", WAITS)
def test_waits(fake: Any, wait: str) -> None:
    side, target, source = on_side_stream(fake, SLOW)
    WAITS[wait](side)
    assert torch.equal(target.cpu(), source)


def test_query(fake: Any) -> None:
    stream = torch.Stream(device="fake")
    event = torch.Event(device="fake")
    assert event.query()
    with fake.held(stream):
        with stream:
            x = torch.zeros(N, device="fake")
        event.record(stream)
        assert fake.operations_in_flight() == 1
        assert not event.query()
        assert not stream.query()
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()
    assert fake.operations_in_flight() == 0
    assert x.sum() == 0


def test_event_waits_for_what_was_recorded_then(fake: Any) -> None:
    stream = torch.Stream(device="fake")
    event = stream.record_event()
    event.synchronize()
    with fake.held(stream):
        with stream:
            x = torch.zeros(N, device="fake")
        event.synchronize()
        assert not stream.query()
        event.record(stream)
        assert not event.query()
    event.synchronize()
    assert x.sum() == 0


def test_delay_that_cannot_be(fake: Any) -> None:
    with pytest.raises(ValueError, match="delay"):
        fake.set_delay(2, 1)


def test_elapsed_time(fake: Any) -> None:
    fake.set_delay(SLOW, SLOW)
    first = torch.Event(device="fake", enable_timing=True)
    second = torch.Event(device="fake", enable_timing=True)
    first.record()
    x = torch.zeros(N, device="fake")
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= SLOW / 1000
    assert x.sum() == 0


def test_streams_are_per_thread(fake: Any) -> None:
    seen = []
    with torch.Stream(device="fake:1") as stream:
        assert torch.accelerator.current_stream() == stream
        thread = threading.Thread(
            target=lambda: seen.append(
                (
                    torch.accelerator.current_device_index(),
                    torch.accelerator.current_stream("fake:1"),
                )
            )
        )
        thread.start()
        thread.join()
    assert seen[0][0] == 0
    assert seen[0][1] != stream
    assert torch.accelerator.current_device_index() == 0


def test_many_threads(fake: Any) -> None:
    failed = []

    def work(seed: int) -> None:
        device = f"fake:{seed % 2}"
        with torch.Stream(device=device) as stream:
            for i in range(20):
                host = torch.full((N,), 100 * seed + i).pin_memory()
                back = torch.empty_like(host, pin_memory=True)
                x = host.to(device, non_blocking=True)
                back.copy_(x.clone(), non_blocking=True)
                del x, host
                stream.synchronize()
                if not torch.equal(back, torch.full((N,), 100 * seed + i)):
                    failed.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# --------------------------------------------------------------------------------- device memory


def freed_while_read(fake: Any, *, record: bool) -> torch.Tensor:
    """Return what another stream reads from a tensor that is freed before it gets to that."""
    x = torch.full((N,), 7, dtype=torch.uint8, device="fake")
    host = torch.empty(N, dtype=torch.uint8, pin_memory=True)
    side = torch.Stream(device="fake")
    side.wait_stream(torch.accelerator.current_stream())
    with fake.held(side):
        with side:
            host.copy_(x, non_blocking=True)
        if record:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        reused = torch.empty(N, dtype=torch.uint8, device="fake")
        assert (reused.data_ptr() == address) != record
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    return host


def test_freed_memory_is_poisoned(fake: Any) -> None:
    assert (freed_while_read(fake, record=False) == POISON).all()


def test_recorded_memory_is_held_back(fake: Any) -> None:
    assert (freed_while_read(fake, record=True) == 7).all()


def test_memory_recorded_on_a_stream_of_another_device(fake: Any) -> None:
    x = torch.zeros(N, device="fake:0")
    side = torch.Stream(device="fake:1")
    address = x.data_ptr()
    with fake.held(side):
        with side:
            y = torch.zeros(N, device="fake:1")
        x.record_stream(side)
        del x
        assert torch.empty(N, device="fake:0").data_ptr() != address
    side.synchronize()
    kept = [torch.empty(N, device="fake:0") for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in kept]
    assert (y.cpu() == 0).all()


def test_empty_cache(fake: Any) -> None:
    x = torch.zeros(N, device="fake")
    del x
    torch.accelerator.empty_cache()
    y = torch.empty(N, device="fake")
    assert (y.view(torch.uint8).cpu() == POISON).all()


def test_held_back_memory_is_used_again(fake: Any) -> None:
    side = torch.Stream(device="fake")
    x = torch.zeros(N, device="fake")
    address = x.data_ptr()
    x.record_stream(side)
    del x
    side.synchronize()
    assert torch.zeros(N, device="fake").data_ptr() == address


def test_memory_is_used_again_in_order(fake: Any) -> None:
    fake.set_delay(1000, 1000)
    host = torch.empty(N, dtype=torch.uint8, pin_memory=True)
    x = torch.full((N,), 7, dtype=torch.uint8, device="fake")
    host.copy_(x, non_blocking=True)
    address = x.data_ptr()
    del x  # nobody waits: it is the same stream that reads it and poisons it
    y = torch.empty(N, dtype=torch.uint8, device="fake")
    assert y.data_ptr() == address
    assert (y.cpu() == POISON).all()
    assert (host == 7).all()


def test_other_streams_get_other_memory(fake: Any) -> None:
    x = torch.zeros(N, device="fake")
    address = x.data_ptr()
    del x
    with torch.Stream(device="fake"):
        assert torch.zeros(N, device="fake").data_ptr() != address


def test_alignment_and_statistics(fake: Any) -> None:
    def in_use() -> Any:
        return torch.accelerator.memory_stats(1)["allocated_bytes.all.current"]

    before = in_use()
    tensors = [torch.empty(n, device="fake:1") for n in (1, 1000, 128)]
    assert all(tensor.data_ptr() % 512 == 0 for tensor in tensors)
    assert in_use() - before == 512 + 4096 + 512
    assert torch.accelerator.max_memory_allocated(1) >= in_use()
    del tensors
    assert in_use() == before


def test_out_of_memory(fake: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1 << 40, device="fake")


# --------------------------------------------------------------------------------- pinned memory


def pinned_at(address: int) -> torch.Tensor:
    """Allocate N integers until that block is handed out, which must be cached."""
    kept = []
    for _ in range(20):
        kept.append(torch.empty(N, dtype=torch.int64, pin_memory=True))
        if kept[-1].data_ptr() == address:
            return kept[-1]
    raise AssertionError("the block was not used again")


def test_pinned(fake: Any) -> None:
    x = torch.arange(N)
    before = fake.stats()["pinned_bytes"]
    pinned = x.pin_memory()
    assert not x.is_pinned()
    assert pinned.is_pinned()
    assert pinned[5:].is_pinned()
    assert torch.equal(x, pinned)
    assert fake.stats()["pinned_bytes"] - before == 1 << 17
    address = pinned.data_ptr()
    del pinned
    assert fake.stats()["pinned_bytes"] == before
    again = pinned_at(address)
    assert (again.view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("to_device", [True, False])
def test_pinned_memory_is_not_used_again_under_a_copy(fake: Any, to_device: bool) -> None:
    device = torch.full((N,), 7, device="fake")
    host = torch.full((N,), 8).pin_memory()
    torch.accelerator.synchronize()
    with fake.held(torch.accelerator.current_stream()):
        if to_device:
            device.copy_(host, non_blocking=True)
        else:
            host.copy_(device, non_blocking=True)
        address = host.data_ptr()
        del host
        other = torch.empty(N, dtype=torch.int64, pin_memory=True)
        assert other.data_ptr() != address
        other.zero_()
    torch.accelerator.synchronize()
    assert (other == 0).all()
    assert (device.cpu() == (8 if to_device else 7)).all()
    pinned_at(address)


def test_pinned_memory_that_was_not_recorded(fake: Any) -> None:
    device = torch.zeros(N, dtype=torch.uint8, device="fake")
    host = torch.full((N,), 8, dtype=torch.uint8).pin_memory()
    # The same memory by an address that the allocator does not know, as views over mappings have.
    inside = (ctypes.c_uint8 * (N - 1)).from_address(host.data_ptr() + 1)
    part = torch.frombuffer(inside, dtype=torch.uint8)
    torch.accelerator.synchronize()
    with fake.held(torch.accelerator.current_stream()):
        device[1:].copy_(part, non_blocking=True)
        del host
        again = torch.empty(N, dtype=torch.uint8, pin_memory=True)
    assert (device.cpu()[1:] == POISON).all()
    assert again.is_pinned()


@pytest.mark.parametrize("pinned", [True, False])
def test_only_copies_of_pinned_memory_are_asynchronous(fake: Any, pinned: bool) -> None:
    source = torch.arange(N)
    target = torch.zeros(N, dtype=torch.int64, pin_memory=pinned)
    device = source.to("fake")
    torch.accelerator.synchronize()
    fake.set_delay(SLOW, SLOW)
    target.copy_(device, non_blocking=True)
    assert torch.equal(target, source) != pinned
    torch.accelerator.synchronize()
    assert torch.equal(target, source)


# ---------------------------------------------------------------------------------------- errors


def test_error_when_queued(fake: Any) -> None:
    x = torch.ones(N, device="fake")
    fake.fail_copy(1)
    x.cpu()
    with pytest.raises(RuntimeError, match="injected failure"):
        x.cpu()
    assert (x.cpu() == 1).all()


@pytest.mark.parametrize("what", ["event", "stream", "device", "copy"])
def test_error_of_an_operation(fake: Any, what: str) -> None:
    x = torch.ones(N, device="fake")
    host = torch.zeros(N, pin_memory=True)
    fake.fail_copy(0, asynchronous=True)
    stream = torch.accelerator.current_stream()
    host.copy_(x, non_blocking=True)
    event = stream.record_event()
    synchronize: dict[str, Callable[[], object]] = {
        "event": event.synchronize,
        "stream": stream.synchronize,
        "device": torch.accelerator.synchronize,
        "copy": x.cpu,
    }
    with pytest.raises(RuntimeError, match="injected failure"):
        synchronize[what]()
    assert (host == 0).all()
    torch.accelerator.synchronize()


# --------------------------------------------------------------------------------- copies, kernels

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(4, -1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_layouts(fake: Any, layout: str, dtype: torch.dtype) -> None:
    base = torch.randn(6, 9).to(dtype)
    view = LAYOUTS[layout]
    expected = view(base)
    for device in ("fake:0", "fake:1"):
        assert torch.equal(view(base.to(device)).cpu(), expected)
        assert torch.equal(expected.to(device).cpu(), expected)
        assert torch.equal(view(base.to(device)).to("fake:0").cpu(), expected)
        assert torch.equal(view(base.to(device)).to("fake:1").cpu(), expected)
    target = torch.zeros(9, 6, dtype=dtype, device="fake").t()
    target.copy_(base, non_blocking=True)
    assert torch.equal(target.cpu(), base)


def test_conversions(fake: Any) -> None:
    base = torch.randn(6, 9)
    device = base.to("fake")
    assert torch.equal(device.to(torch.float16).cpu(), base.to(torch.float16))
    host = torch.zeros(6, 9, dtype=torch.float64)
    assert torch.equal(host.copy_(device), base.double())
    complex_ = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(complex_.to("fake").conj().cpu(), complex_.conj())
    assert torch.equal(complex_.to("fake").conj().imag.cpu(), complex_.conj().imag)


def test_copies_between_devices_are_ordered(fake: Any) -> None:
    fake.set_delay(0, 2000)
    expected = torch.arange(N)
    for _ in range(10):
        x = expected.to("fake:0").to("fake:1").clone().to("fake:0")
        assert torch.equal(x.cpu(), expected)


def test_gathers_and_scatters_are_asynchronous(fake: Any) -> None:
    parts = [torch.arange(float(n)) for n in (3, 0, 5, 700)]
    on_device = [part.to("fake:1") for part in parts]
    back = [torch.zeros_like(part) for part in on_device]
    out = torch.empty(708, device="fake:1")
    torch.accelerator.synchronize(1)
    with torch.Stream(device="fake:1") as stream, fake.held(stream):
        torch.cat(on_device, out=out)
        torch._foreach_copy_(back, list(out.split([3, 0, 5, 700])))
        assert fake.operations_in_flight() == 2
    stream.synchronize()
    assert torch.equal(out.cpu(), torch.cat(parts))
    assert all(torch.equal(x.cpu(), part) for x, part in zip(back, parts, strict=True))
    assert (fake.stats()["cat"], fake.stats()["foreach_copy"]) == (1, 1)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat(fake: Any, dim: int) -> None:
    parts = [torch.randn(4, 4), torch.randn(4, 4).double().t(), torch.zeros(0)]
    result = torch.cat([part.to("fake") for part in parts], dim)
    assert torch.equal(result.cpu(), torch.cat(parts, dim))
    with pytest.raises(RuntimeError, match="sizes"):
        torch.cat([torch.zeros(2, 3, device="fake"), torch.zeros(3, 4, device="fake")])


def test_statistics(fake: Any) -> None:
    host = torch.zeros(100, dtype=torch.uint8)
    x = host.to("fake:0")
    y = x.to("fake:1")
    y.cpu()
    x.add_(1)
    stats = fake.stats()
    assert (stats["h2d"], stats["d2d"], stats["d2h"]) == ([100], [100], [100])
    fake.reset()
    assert fake.stats()["h2d"] == []


def test_storages(fake: Any, devices: list[str]) -> None:
    source = torch.arange(100, dtype=torch.uint8)
    for device in devices:
        storage = torch.UntypedStorage(100, device=device)
        assert str(storage.device) == device
        storage.copy_(source.untyped_storage())
        assert storage.cpu().tolist() == source.tolist()
        storage.resize_(40)
        assert storage.cpu().tolist() == source.tolist()[:40]
        storage.resize_(0)
        assert storage.nbytes() == 0
        tensor = torch.empty(0, dtype=torch.uint8, device=device)
        tensor.set_(source.to(device).untyped_storage(), 10, (3, 4), (20, 2))
        assert torch.equal(tensor.cpu(), source.as_strided((3, 4), (20, 2), 10))
        grown = source.to(device).resize_(200)
        assert torch.equal(grown[:100].cpu(), source)
        emptied: Any = torch.empty(3, device=device)
        assert emptied.set_().numel() == 0


def test_training_step(fake: Any) -> None:
    def trained(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(4, 8, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return next(model.parameters()).detach().cpu()

    torch.testing.assert_close(trained("fake:1"), trained("cpu"))


@pytest.mark.parametrize("location", [None, "cpu", "fake", "fake:0", "fake:1"])
def test_stock_torch_saves_and_loads(fake: Any, location: str | None) -> None:
    value = {
        "a": torch.randn(30).to("fake:1"),
        "b": torch.nn.Parameter(torch.randn(3, 4).to("fake:0")),
    }
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    for name, tensor in value.items():
        assert torch.equal(loaded[name].cpu(), tensor.cpu())
        expected = torch.device(location or tensor.device)
        assert loaded[name].device.type == expected.type
        assert loaded[name].device.index == (0 if location == "fake" else expected.index)
    assert isinstance(loaded["b"], torch.nn.Parameter)
