"""Buffers and bus crossings of a transfer, where the machine or the file makes them difficult."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ptsave
from accelerator.test_errors import MIB, NAMES, Work
from ptsave.support import config

CHUNK_NBYTES = 2 * MIB  # of an archive that is loaded


def warnings_of(work: Work, name: str) -> list[str]:
    """Run a call, check what it did, and return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work.start(name)
    work.check(name)
    assert all(each.category is ptsave.CheckpointWarning for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_no_pinned_memory(
    devices: list[str], tmp_path: Path, fake: Any, name: str, after: int
) -> None:
    """A full host, or a limit, refuses to lock memory: ordinary memory takes its place."""
    work = Work(tmp_path, devices[-1])
    work.start(name)
    ptsave.release_staging_memory()
    fake.refuse_pinned(after)
    assert ["lock host memory" in each for each in warnings_of(work, name)] == [True]
    fake.reset()
    assert warnings_of(work, name) == []


def test_two_at_once_without_pinned_memory(devices: list[str], tmp_path: Path, fake: Any) -> None:
    works = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        works.append(Work(folder, devices[-1]))
    ptsave.release_staging_memory()
    fake.refuse_pinned()
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore", ptsave.CheckpointWarning)
        list(pool.map(Work.start, works, ["load", "save"]))
    works[0].check("load")
    works[1].check("save")


def test_fewer_leases(
    devices: list[str], tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that can lock a buffer for each thread, and no more, goes on with those."""
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "1")
    n_threads = config.current().n_readers
    tensors = [torch.full((MIB,), float(i)) for i in range(4 * n_threads)]
    torch.save(tensors, tmp_path / "file.pt")
    peaks = []
    for is_refused in (False, True):
        ptsave.release_staging_memory()
        fake.reset()
        if is_refused:
            fake.refuse_pinned(after=n_threads)
        fake.set_delay(5000, 5000)  # so that more buffers are wanted while copies are in progress
        with warnings.catch_warnings(action="error"):
            loaded = ptsave.load(tmp_path / "file.pt", devices[-1])
        assert all(torch.equal(a.cpu(), b) for a, b in zip(loaded, tensors, strict=True))
        peaks.append(fake.stats()["pinned_peak"])
    assert peaks[0] > peaks[1] == CHUNK_NBYTES * n_threads


def test_tensors_on_alternating_devices(devices: list[str], tmp_path: Path, fake: Any) -> None:
    tensors = [
        torch.full((i % 700 + 1,), float(i)).to(devices[i % 3 % len(devices)]) for i in range(3000)
    ]
    n_chunks = sum(tensor.nbytes for tensor in tensors) // (2 * MIB) + 1
    fake.reset()
    ptsave.save(tensors, tmp_path / "file.pt")
    assert len(fake.stats()["d2h"]) <= 2 * len(devices) * n_chunks
    loaded = ptsave.load(tmp_path / "file.pt")
    assert len(fake.stats()["h2d"]) <= 2 * len(devices) * n_chunks
    for found, tensor in zip(loaded, tensors, strict=True):
        assert found.device == tensor.device
        assert torch.equal(found.cpu(), tensor.cpu())
