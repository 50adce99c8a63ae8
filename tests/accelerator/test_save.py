"""Saving what is on accelerators: the same bytes as torch writes, in few large copies."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from stock_comparison import assert_same_bytes

import ptsave


@pytest.mark.parametrize("nbytes", [0, 1, 100, 1 << 20, (9 << 20) + 13])
def test_same_bytes(devices: list[str], tmp_path: Path, nbytes: int) -> None:
    tensors = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8).to(d) for d in devices]
    assert_same_bytes(tensors, tmp_path)


def test_many_small_ones(devices: list[str], tmp_path: Path) -> None:
    tensors = [
        torch.full((i % 700 + 1,), float(i)).to(devices[i % 3 % len(devices)]) for i in range(3000)
    ]
    assert_same_bytes(tensors, tmp_path)


def test_several_devices(devices: list[str], tmp_path: Path) -> None:
    obj = {
        "large": torch.randn(3_000_000).to(devices[-1]),
        "host": torch.randn(100_000),
        "small": [torch.randn(7).to(d) for d in devices],
    }
    assert_same_bytes(obj, tmp_path)
    path, stock_path = tmp_path / "ptsave" / "file.pt", tmp_path / "stock" / "file.pt"
    ptsave.save(obj, path, fsync=True)
    assert path.read_bytes() == stock_path.read_bytes()


@pytest.mark.parametrize("after", [1, 2])
def test_an_error_waits_for_the_copies_before_it(
    devices: list[str], tmp_path: Path, fake: ModuleType, after: int
) -> None:
    """One chunk has these tensors, and each is large enough for a copy of its own."""
    tensors = [torch.randn(300_000).to(devices[0]) for _ in range(3)]
    fake.set_delay(20_000, 20_000)
    fake.fail_copy(after)
    with pytest.raises(RuntimeError, match="fail"):
        ptsave.save(tensors, tmp_path / "file.pt")
    assert fake.operations_in_flight() == 0
