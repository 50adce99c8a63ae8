"""Saves in the background: the values of the call, whatever the accelerator is told to do next."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from stock_comparison import saved_bytes, stock_save

import ptsave
from accelerator.test_fake import run_on_fake
from ptsave.background.async_safetensors import async_save_safetensors

MIB = 1 << 20


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_the_file_holds_the_old_values(
    devices: list[str], tmp_path: Path, staging: Literal["blocking", "background"]
) -> None:
    tensors = [
        torch.zeros(1000 + 400_000 * (i % 3)).to(devices[i % len(devices)]) for i in range(9)
    ]
    tensors.append(torch.zeros(300_000))
    for step in range(20):
        for tensor in tensors:
            tensor.fill_(step)
        expected = saved_bytes(stock_save, tensors)
        stream = io.BytesIO()
        future = ptsave.async_save(tensors, stream, staging=staging)
        future.wait_staged()
        for tensor in tensors:
            tensor.fill_(-1)
        future.result()
        assert stream.getvalue() == expected


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_unchanged_bytes_are_shared(
    devices: list[str], shared: Path, staging: Literal["blocking", "background"]
) -> None:
    tensors = [torch.full((MIB,), float(i)).to(devices[i % len(devices)]) for i in range(4)]
    ptsave.save(tensors, shared / "old.pt")
    for step in range(5):
        tensors[2].fill_(-step)
        (shared / "stock").mkdir(exist_ok=True)
        stock_save(tensors, shared / "stock" / "new.pt")
        future = ptsave.async_save(
            tensors, shared / "new.pt", base=shared / "old.pt", staging=staging
        )
        future.wait_staged()
        tensors[1].fill_(-1)  # not in this file any more
        future.result()
        tensors[1].fill_(1)
        assert (shared / "new.pt").read_bytes() == (shared / "stock" / "new.pt").read_bytes()
        assert 11.9 * MIB < future.nbytes_shared <= 12 * MIB


def test_work_that_is_under_way_counts(devices: list[str], fake: ModuleType) -> None:
    """What the caller's stream was given before the call is in the file."""
    fake.set_delay(20_000, 30_000)
    stream = torch.Stream(devices[0])
    with stream:
        tensor = torch.zeros(500_000, device=devices[0])
        tensor.fill_(3)
        target = io.BytesIO()
        future = ptsave.async_save(tensor, target, staging="background")
    fake.set_delay(0, 100)
    future.result()
    assert target.getvalue() == saved_bytes(stock_save, torch.full((500_000,), 3.0).to(devices[0]))


def test_memory_may_go_at_once(devices: list[str]) -> None:
    for _ in range(20):
        tensor = torch.randn(700_000).to(devices[0])
        expected = saved_bytes(stock_save, [tensor])
        target = io.BytesIO()
        future = ptsave.async_save([tensor], target, staging="background")
        del tensor
        spoilt = [torch.full((700_000,), float(i)).to(devices[0]) for i in range(3)]
        future.result()
        del spoilt
        assert target.getvalue() == expected


def test_staging_does_not_keep_tensors(devices: list[str]) -> None:
    tensor = torch.randn(100_000).to(devices[0])
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    future = ptsave.async_save(tensor, io.BytesIO())
    assert torch._C._storage_Use_Count(storage._cdata) == before
    future.result()


def test_errors_of_copies_come_out(devices: list[str], tmp_path: Path, fake: ModuleType) -> None:
    tensor = torch.randn(5_000_000).to(devices[0])
    path = tmp_path / "tensor.pt"
    for asynchronous in (False, True):
        fake.fail_copy(after=3, asynchronous=asynchronous)
        with pytest.raises(RuntimeError, match="fail"):
            ptsave.async_save(tensor, path)
        fake.fail_copy(after=3, asynchronous=asynchronous)
        future = ptsave.async_save(tensor, path, staging="background")
        with pytest.raises(RuntimeError, match="fail"):
            future.result()
        assert not list(tmp_path.iterdir())
    ptsave.async_save(tensor, path).result()
    assert torch.equal(torch.load(path, "cpu"), tensor.cpu())


def test_pinned_memory_stays_within_the_budget(devices: list[str], fake: ModuleType) -> None:
    budget = 40 * MIB
    tensors = [torch.randn(2 * MIB).to(devices[i % len(devices)]) for i in range(3)]  # 24 MiB
    fake.reset()
    futures = [ptsave.async_save(tensors, io.BytesIO(), max_staged_bytes=budget) for _ in range(6)]
    for future in futures:
        future.result()
    del futures, future
    assert fake.stats()["pinned_peak"] <= budget
    reserved = fake.stats()["pinned_reserved"]
    for _ in range(5):
        ptsave.async_save(tensors, io.BytesIO(), max_staged_bytes=budget).result()
    # A stream may still hold a block back when the next one is wanted.
    assert fake.stats()["pinned_reserved"] < reserved + budget
    with pytest.raises(ptsave.StagingFullError):
        ptsave.async_save(tensors, io.BytesIO(), max_staged_bytes=20 * MIB)


def test_cancelled_saves_let_go(devices: list[str]) -> None:
    class Gate(io.BytesIO):
        opened = threading.Event()

        def write(self, data: Any) -> int:
            assert self.opened.wait(60)
            return super().write(data)

    tensor = torch.randn(1_000_000).to(devices[0])
    futures = [ptsave.async_save(tensor, Gate(), staging="background") for _ in range(20)]
    cancelled = [future.cancel() for future in reversed(futures)]
    Gate.opened.set()
    assert any(cancelled)
    for future in futures:
        if not future.cancelled():
            future.result()


@pytest.mark.parametrize("n_host", [0, 1 << 20])
@pytest.mark.parametrize("n", [10, 16_384, 1_200_000])
def test_pinned_memory_is_what_there_is_to_stage(
    devices: list[str], fake: ModuleType, n: int, n_host: int
) -> None:
    """However much of the file lies between: a chunk of it has pinned memory for its own part."""
    tensors = [torch.randn(n).to(devices[i % len(devices)]) for i in range(15)]
    host = torch.randn(n_host)
    obj = [each for tensor in tensors for each in (tensor, host.clone())]
    pinned_nbytes = 2 * sum(max(tensor.nbytes, 4096) for tensor in tensors)  # powers of two
    budget = pinned_nbytes + len(tensors) * host.nbytes
    fake.reset()
    before = fake.stats()["pinned_bytes"]
    stream = io.BytesIO()
    ptsave.async_save(obj, stream, max_staged_bytes=budget).result()
    assert fake.stats()["pinned_peak"] - before <= pinned_nbytes
    assert stream.getvalue() == saved_bytes(stock_save, obj)


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_forked_children_leave_accelerators_alone(fake: ModuleType, staging: str) -> None:
    """Those of a DataLoader must not end because a save is unfinished."""
    run_on_fake(
        f"""
        import gc, io, os, sys, threading
        import ptsave

        class Gate(io.BytesIO):
            opened = threading.Event()

            def write(self, data):
                self.opened.wait()
                return super().write(data)

        target = Gate()
        tensors = [torch.ones(2_000_000).to(device) for device in (fake.FIRST, fake.LAST, "cpu")]
        tensors[0].record_stream(torch.Stream(device=fake.FIRST))
        tensors.append(torch.ones(1000).pin_memory())
        tensors[-1].to(fake.FIRST, non_blocking=True)  # whoever frees it asks for this copy
        fake.set_delay(50_000, 50_000)
        futures = [ptsave.async_save(tensors, target, staging="{staging}")]
        futures.append(ptsave.async_save(tensors, io.BytesIO(), staging="{staging}"))
        del tensors
        pid = os.fork()
        if pid == 0:
            for future in futures:
                assert isinstance(future.exception(), RuntimeError)
            del future, futures, target
            gc.collect()
            ptsave.release_staging_memory()
            ptsave.async_save(torch.ones(10), io.BytesIO()).result()
            sys.exit(0)
        status = os.waitpid(pid, 0)[1]
        target.opened.set()
        for future in futures:
            future.result()
        assert status == 0, status
        """
    )


def test_a_safetensors_file_holds_the_old_values(devices: list[str], tmp_path: Path) -> None:
    """Its tensors of the CPU are copied into one snapshot, the others one by one."""
    homes = ["cpu", *devices]
    tensors = {f"{i}": torch.full((100_000 + i,), i).to(homes[i % len(homes)]) for i in range(9)}
    save_file(tensors, tmp_path / "stock")
    future = async_save_safetensors(tensors, f"{tmp_path}/file", {})
    for tensor in tensors.values():
        tensor.fill_(-1)
    future.result()
    assert (tmp_path / "file").read_bytes() == (tmp_path / "stock").read_bytes()
