"""The accelerator made for tests: what goes wrong on real hardware goes wrong here, visibly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _system import in_threads

TESTS = Path(__file__).resolve().parent.parent
N = 10_000
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


def test_many_threads(fake: Any) -> None:
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
                assert torch.equal(back, torch.full((N,), 100 * seed + i)), i

    in_threads(work, range(6))


# ---------------------------------------------------------------------------------------- copies


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
