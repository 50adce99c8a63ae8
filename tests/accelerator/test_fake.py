"""The accelerator made for tests: what goes wrong on real hardware goes wrong here, visibly."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import in_threads, run_python

TESTS = Path(__file__).resolve().parent.parent
N = 10_000
SLOW = 100_000  # us
POISON = 0xDB  # what freed memory holds


def run_on_fake(code: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which has the same accelerator, as ``fake``."""
    prologue = "import torch\nfrom accelerator import controlled\nfake = controlled.load()\n"
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}:{TESTS / 'common'}"}
    return run_python(prologue + textwrap.dedent(code), status=status, env=environment, timeout=60)


def test_memory_faults_on_the_cpu(fake: Any) -> None:
    run_on_fake(
        """
        import ctypes, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        x = torch.zeros(4, device=fake.TYPE)
        torch.accelerator.synchronize()
        ctypes.string_at(x.data_ptr(), 1)
        """,
        -signal.SIGSEGV,
    )


def test_exit_with_work_in_flight(fake: Any) -> None:
    result = run_on_fake(
        """
        fake.set_delay(5000, 5000)
        x = torch.zeros(1000, device=fake.LAST).to(fake.FIRST)
        host = torch.empty(1000, pin_memory=True)
        host.copy_(x, non_blocking=True)
        stream = torch.Stream(device=fake.TYPE)
        fake.held(stream).__enter__()
        with stream:
            y = x.clone()
        """
    )
    assert not result.stderr


def test_forked_child(fake: Any) -> None:
    run_on_fake(
        """
        import os
        x = torch.ones(1000, device=fake.TYPE)
        host = torch.empty(1000, pin_memory=True)
        pid = os.fork()
        if pid == 0:
            assert torch.ones(2).sum() == 2
            try:
                x.cpu()
            except RuntimeError as error:
                assert fake.IN_A_CHILD in str(error), error
            else:
                raise AssertionError
            del x, host
        else:
            assert os.waitpid(pid, 0)[1] == 0
        """
    )


# ----------------------------------------------------------------------------- streams and events


def on_side_stream(fake: Any, delay: int = 0) -> tuple[torch.Stream, torch.Tensor, torch.Tensor]:
    """Return a stream, zeros, and what the zeros are after a copy that was just queued there."""
    source = torch.arange(N).pin_memory()
    target = torch.zeros(N, dtype=torch.int64, device=fake.TYPE)
    torch.accelerator.synchronize()
    side = torch.Stream(device=fake.TYPE)
    fake.set_delay(delay, delay, side)
    with side:
        target.copy_(source, non_blocking=True)
    return side, target, source


def test_missing_wait(fake: Any) -> None:
    source = torch.arange(N).pin_memory()
    target = torch.zeros(N, dtype=torch.int64, device=fake.TYPE)
    side = torch.Stream(device=fake.TYPE)
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


def test_event_waits_for_what_was_recorded_then(fake: Any) -> None:
    stream = torch.Stream(device=fake.TYPE)
    event = stream.record_event()
    event.synchronize()
    with fake.held(stream):
        with stream:
            x = torch.zeros(N, device=fake.TYPE)
        event.synchronize()
        assert not stream.query()
        event.record(stream)
        assert not event.query()
    event.synchronize()
    assert x.sum() == 0


def test_many_threads(fake: Any) -> None:
    def work(seed: int) -> None:
        device = f"{fake.TYPE}:{seed % 2}"
        with torch.Stream(device=device) as stream:
            for i in range(20):
                host = torch.full((N,), 100 * seed + i).pin_memory()
                back = torch.empty_like(host, pin_memory=True)
                x = host.to(device, non_blocking=True)
                back.copy_(x.clone(), non_blocking=True)
                del x, host
                stream.synchronize()
                assert torch.equal(back, torch.full((N,), 100 * seed + i)), i

    in_threads(work, range(6))


# ---------------------------------------------------------------------------------------- copies


def test_copies_between_devices_are_ordered(fake: Any) -> None:
    fake.set_delay(0, 2000)
    expected = torch.arange(N)
    for _ in range(10):
        x = expected.to(fake.FIRST).to(fake.LAST).clone().to(fake.FIRST)
        assert torch.equal(x.cpu(), expected)


def test_gathers_and_scatters_are_asynchronous(fake: Any) -> None:
    parts = [torch.arange(float(n)) for n in (3, 0, 5, 700)]
    on_device = [part.to(fake.LAST) for part in parts]
    back = [torch.zeros_like(part) for part in on_device]
    out = torch.empty(708, device=fake.LAST)
    torch.accelerator.synchronize(1)
    with torch.Stream(device=fake.LAST) as stream, fake.held(stream):
        torch.cat(on_device, out=out)
        torch._foreach_copy_(back, list(out.split([3, 0, 5, 700])))
        assert fake.operations_in_flight() == 2
    stream.synchronize()
    assert torch.equal(out.cpu(), torch.cat(parts))
    assert all(torch.equal(x.cpu(), part) for x, part in zip(back, parts, strict=True))
    assert (fake.stats()["cat"], fake.stats()["foreach_copy"]) == (1, 1)


def test_statistics(fake: Any) -> None:
    host = torch.zeros(100, dtype=torch.uint8)
    x = host.to(fake.FIRST)
    y = x.to(fake.LAST)
    y.cpu()
    x.add_(1)
    stats = fake.stats()
    assert (stats["h2d"], stats["d2d"], stats["d2h"]) == ([100], [100], [100])
    fake.reset()
    assert fake.stats()["h2d"] == []


# ---------------------------------------------------------------------------------------- errors


def test_error_when_queued(fake: Any) -> None:
    x = torch.ones(N, device=fake.TYPE)
    fake.fail_copy(1)
    x.cpu()
    with pytest.raises(RuntimeError, match=fake.FAILURE):
        x.cpu()
    assert (x.cpu() == 1).all()


@pytest.mark.parametrize("what", ["event", "stream", "device", "copy"])
def test_error_of_an_operation(fake: Any, what: str) -> None:
    x = torch.ones(N, device=fake.TYPE)
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
    with pytest.raises(RuntimeError, match=fake.FAILURE):
        synchronize[what]()
    assert (host == 0).all()
    torch.accelerator.synchronize()


# --------------------------------------------------------------------------------- device memory


def freed_while_read(fake: Any, *, record: bool) -> torch.Tensor:
    """Return what another stream reads from a tensor that is freed before it gets to that."""
    x = torch.full((N,), 7, dtype=torch.uint8, device=fake.TYPE)
    host = torch.empty(N, dtype=torch.uint8, pin_memory=True)
    side = torch.Stream(device=fake.TYPE)
    side.wait_stream(torch.accelerator.current_stream())
    with fake.held(side):
        with side:
            host.copy_(x, non_blocking=True)
        if record:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        reused = torch.empty(N, dtype=torch.uint8, device=fake.TYPE)
        assert (reused.data_ptr() == address) != record
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    return host


def test_freed_memory_is_poisoned(fake: Any) -> None:
    assert (freed_while_read(fake, record=False) == POISON).all()


def test_recorded_memory_is_held_back(fake: Any) -> None:
    assert (freed_while_read(fake, record=True) == 7).all()


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
    assert not fake.POISONS_PINNED or (again.view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("to_device", [True, False])
def test_pinned_memory_is_not_used_again_under_a_copy(fake: Any, to_device: bool) -> None:
    device = torch.full((N,), 7, device=fake.TYPE)
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
    device = torch.zeros(N, dtype=torch.uint8, device=fake.TYPE)
    host = torch.full((N,), 8, dtype=torch.uint8).pin_memory()
    # The same memory by an address that the allocator does not know, as views over mappings have.
    inside = (ctypes.c_uint8 * (N - 1)).from_address(host.data_ptr() + 1)
    part = torch.frombuffer(inside, dtype=torch.uint8)
    torch.accelerator.synchronize()
    with fake.held(torch.accelerator.current_stream()):
        device[1:].copy_(part, non_blocking=True)
        del host
        again = torch.empty(N, dtype=torch.uint8, pin_memory=True).fill_(POISON)
    assert (device.cpu()[1:] == POISON).all()
    assert again.is_pinned()


@pytest.mark.parametrize("pinned", [True, False])
def test_only_copies_of_pinned_memory_are_asynchronous(fake: Any, pinned: bool) -> None:
    source = torch.arange(N)
    target = torch.zeros(N, dtype=torch.int64, pin_memory=pinned)
    device = source.to(fake.TYPE)
    torch.accelerator.synchronize()
    fake.set_delay(SLOW, SLOW)
    target.copy_(device, non_blocking=True)
    assert torch.equal(target, source) != pinned
    torch.accelerator.synchronize()
    assert torch.equal(target, source)
