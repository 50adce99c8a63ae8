"""Saving what is on accelerators: the same bytes as torch writes, in few large copies."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import ptsave


def stock_bytes(obj: object) -> bytes:
    stream = io.BytesIO()
    torch.save(obj, stream)
    return stream.getvalue()


def saved_bytes(obj: object) -> bytes:
    stream = io.BytesIO()
    ptsave.save(obj, stream)
    return stream.getvalue()


@pytest.mark.parametrize("nbytes", [0, 1, 100, 1 << 20, (9 << 20) + 13])
def test_same_bytes(devices: list[str], nbytes: int) -> None:
    tensors = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8).to(d) for d in devices]
    assert saved_bytes(tensors) == stock_bytes(tensors)


def test_many_small_ones(devices: list[str]) -> None:
    tensors = [
        torch.full((i % 700 + 1,), float(i)).to(devices[i % 3 % len(devices)]) for i in range(3000)
    ]
    assert saved_bytes(tensors) == stock_bytes(tensors)


def test_to_a_file(devices: list[str], tmp_path: Path) -> None:
    obj = {
        "large": torch.randn(3_000_000).to(devices[-1]),
        "host": torch.randn(100_000),
        "small": [torch.randn(7).to(d) for d in devices],
    }
    for name in ("stock", "ptsave"):
        (tmp_path / name).mkdir()
    torch.save(obj, tmp_path / "stock" / "file.pt")
    for fsync in (False, True):
        ptsave.save(obj, tmp_path / "ptsave" / "file.pt", fsync=fsync)
        written = (tmp_path / "ptsave" / "file.pt").read_bytes()
        assert written == (tmp_path / "stock" / "file.pt").read_bytes()
