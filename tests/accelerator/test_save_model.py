"""save_model of models on accelerators: the files are those of the same model on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ptsave


def model_on(devices: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a state dict on the CPU and on devices, some of it in both on the CPU."""
    base = torch.arange(200_000.0).view(400, 500)
    host = {
        "large": torch.randn(1_500_000),
        "part": base[100:300],
        "turned": base.t(),
        "strided": base[:, ::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "short": torch.randn(77).bfloat16(),
        "stays": torch.randn(1000),
    }
    there = {
        name: tensor if name == "stays" else tensor.to(devices[i % len(devices)])
        for i, (name, tensor) in enumerate(host.items())
    }
    there["part"] = base.to(devices[0])[100:300]
    return host, there


@pytest.mark.parametrize(
    ("kind", "size", "fsync"),
    [("safetensors", "1MB", True), ("safetensors", "1GB", False), ("pt", "1MB", False)],
)
def test_same_files_as_from_the_cpu(
    devices: list[str], tmp_path: Path, kind: Any, size: str, fsync: bool
) -> None:
    host, there = model_on(devices)
    for name, tensors in (("host", host), ("there", there)):
        ptsave.save_model(tensors, tmp_path / name, max_shard_size=size, format=kind, fsync=fsync)
    files = [{p.name for p in (tmp_path / name).iterdir()} for name in ("host", "there")]
    assert files[0] == files[1]
    for name in files[0]:
        if kind == "safetensors" or name.endswith(".json"):  # .bin files say where tensors were
            assert (tmp_path / "host" / name).read_bytes() == (
                tmp_path / "there" / name
            ).read_bytes(), name
    model = torch.nn.Module()
    for name, tensor in host.items():
        model.register_buffer(name, torch.empty_like(tensor, memory_format=torch.contiguous_format))
    ptsave.load_model(model, tmp_path / "there")
    for name, tensor in host.items():
        assert torch.equal(model.get_buffer(name), tensor), name


def test_tied_on_a_device(devices: list[str], tmp_path: Path) -> None:
    weight = torch.randn(1000).to(devices[-1])
    ptsave.save_model({"a": weight, "b": weight}, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 5000
