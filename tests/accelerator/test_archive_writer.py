"""Archives that grow, from accelerators: the values of the calls, and nobody waits for them."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import torch

import ptsave
from accelerator.test_fake import run_on_fake


def test_the_values_are_those_of_the_calls(devices: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    tensors = [
        torch.zeros(1000 + 400_000 * (i % 3), device=devices[i % len(devices)]) for i in range(9)
    ]
    with ptsave.ArchiveWriter(path) as writer:
        for step in range(5):
            for i, tensor in enumerate(tensors):
                tensor.fill_(step)
                writer.add(f"{step}/{i}", tensor)
                writer.add(f"{step}/{i}/host", torch.full((10,), step))
                tensor.fill_(-1)
            writer.add_group({f"{step}/last": tensors[0].fill_(step), f"{step}/plain": step})
    loaded = torch.load(path, map_location="cpu")
    assert len(loaded) == 5 * 20
    for name, value in loaded.items():
        assert (torch.as_tensor(value) == int(name.partition("/")[0])).all()


def test_the_call_does_not_wait(devices: list[str], fake: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    tensor = torch.zeros(500_000, device=devices[0])
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("before", tensor + 1)
        writer.flush()
        fake.set_delay(200_000, 300_000)
        start = time.perf_counter()
        tensor.fill_(3)
        writer.add("copied", tensor)
        tensor.fill_(4)
        seconds = time.perf_counter() - start
        writer.add("kept", torch.full((100_000,), 5.0, device=devices[0]), copy=False)
        fake.set_delay(0, 100)
    assert seconds < 0.2
    loaded = torch.load(path, map_location="cpu")
    assert [loaded[name].unique().item() for name in loaded] == [1, 3, 5]
    assert torch.load(path)["copied"].device == tensor.device


def test_a_storage_is_written_once(devices: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    tensor = torch.arange(1000, device=devices[0])
    with ptsave.ArchiveWriter(path) as writer:
        writer.add("a", tensor)
        nbytes = writer.nbytes
        writer.add("b", tensor[5:10])
        assert writer.nbytes - nbytes < 4000
    assert torch.load(path)["b"].tolist() == [5, 6, 7, 8, 9]


def test_forked_children_leave_accelerators_alone(fake: ModuleType, tmp_path: Path) -> None:
    run_on_fake(
        f"""
        import os, sys
        import ptsave
        there = torch.ones(500_000, device=fake.FIRST)
        there.record_stream(torch.Stream(device=fake.FIRST))
        pinned = torch.ones(500_000).pin_memory()
        pinned.to(fake.FIRST, non_blocking=True)
        writer = ptsave.ArchiveWriter({str(tmp_path / "run.pt")!r})
        fake.set_delay(200_000, 200_000)
        for i in range(3):
            writer.add(f"first{{i}}", there)  # the thread that writes waits for its values
        writer.add("there", there, copy=False)
        writer.add("pinned", pinned, copy=False)
        del there, pinned
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        status = os.waitpid(pid, 0)[1]
        fake.set_delay(0, 0)
        writer.close()
        assert status == 0, status
        """
    )
    assert len(torch.load(tmp_path / "run.pt", "cpu")) == 5
