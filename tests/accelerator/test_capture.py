"""Captures of networks on accelerators: values, statistics, bounds of memory, and no waiting."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from captured_runs import Run, captured
from torch import Tensor, nn

import ptsave
from ptsave.errors import StagingFullError

N = 250_000  # elements: 1 MB
N_LAYERS = 4


class Fill(nn.Module):
    """Fills a new tensor, which the fake device does later, as a real one."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).fill_(self.value)


def run(model: nn.Module, device: str) -> None:
    for _ in range(3):
        x = torch.zeros(N, device=device)
        for layer in model.children():
            x = layer(x)
        x.fill_(-1)  # after the hooks


def layers() -> nn.Module:
    return nn.Sequential(*[Fill(i + 1) for i in range(N_LAYERS)])


def outputs(captures: Run) -> list[str]:
    return [name for name in captures.names("forward") if "/outputs" in name]


@pytest.mark.parametrize("max_memory_bytes", [None, 3 * N * 4])
def test_values_and_statistics_are_those_of_the_hook(
    devices: list[str], tmp_path: Path, max_memory_bytes: int | None
) -> None:
    for i, device in enumerate(devices):
        captures = captured(
            model := layers(),
            lambda model=model, device=device: run(model, device),  # type: ignore[misc]
            tmp_path / f"{i}.pt",
            what=("outputs",),
            max_memory_bytes=max_memory_bytes,
        )
        names = outputs(captures)
        assert len(names) == 3 * N_LAYERS
        for name in names:
            value = captures.values[name]
            layer = int(name.split("/")[2].partition("#")[0])
            assert value.device == device
            assert value.note == ""
            assert value.statistics is not None
            assert value.statistics.mean == layer + 1
            assert captures.tensor(name).unique().tolist() == [layer + 1]


def test_drop_and_raise(devices: list[str], fake: ModuleType, tmp_path: Path) -> None:
    fake.set_delay(20_000, 30_000)
    try:
        options: dict[str, Any] = {"what": ("outputs",), "max_memory_bytes": 2 * N * 4}
        model = layers()
        captures = captured(
            model,
            lambda: run(model, devices[0]),
            tmp_path / "drop.pt",
            when_full="drop",
            **options,
        )
        notes = [captures.values[name].note for name in outputs(captures)]
        assert "dropped: no room in memory" in notes
        with (
            pytest.raises(StagingFullError),
            ptsave.capture(model, tmp_path / "raise.pt", when_full="raise", **options),
        ):
            run(model, devices[0])
    finally:
        fake.set_delay(0, 100)


def test_the_hook_does_not_wait(devices: list[str], fake: ModuleType, tmp_path: Path) -> None:
    model = layers()
    with ptsave.capture(model, tmp_path / "run.pt", what=("outputs",)):
        run(model, devices[0])
        x = torch.zeros(N, device=devices[0])
        fake.set_delay(200_000, 300_000)
        start = time.perf_counter()
        for layer in model.children():
            x = layer(x)
        seconds = time.perf_counter() - start
        fake.set_delay(0, 100)
    assert seconds < 0.2
