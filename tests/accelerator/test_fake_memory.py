"""Memory of the accelerator made for tests: who still uses what was freed sees other bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

N = 10_000
POISON = 0xDB
SLOW = 100_000  # us


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
