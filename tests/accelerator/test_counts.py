"""Numbers of copies and waits, and the peak of page-locked memory, beside those of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ptsave

MIB = 1 << 20
PINNED, STAGED = 12 * MIB, 64 * MIB  # limits
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")

Calls = dict[str, tuple[Callable[[], object], Callable[[], object]]]  # ptsave's and torch's


class Counts(NamedTuple):
    """What a call did."""

    sizes: list[int]  # of copies
    kernels: int
    queries: int
    busy_waits: int
    waits: int
    pinned_peak: int


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "3")
    monkeypatch.setenv("PTSAVE_MAX_PINNED_BYTES", str(PINNED))
    monkeypatch.setenv("PTSAVE_MAX_STAGED_BYTES", str(STAGED))


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def model(devices: list[str], request: pytest.FixtureRequest) -> nn.Module:
    """Return 40 MiB in 1,010 tensors on the last device, or a half on each of the last two."""
    devices = devices[-request.param :]
    model = nn.Module()
    for i in range(10):
        layer = nn.Module()
        layer.register_buffer("large", torch.full((1000, 998), float(i)))
        for k in range(100):
            layer.register_buffer(f"small{k}", torch.full((100 + k,), float(k)))
        model.add_module(f"{i}", layer.to(devices[i * len(devices) // 10]))
    return model


def make_calls(model: nn.Module, folder: Path) -> Calls:
    tensors = model.state_dict()
    file, shards = folder / "file.pt", folder / "shards"
    torch.save(tensors, file)
    ptsave.save_model(model, shards)

    def stock_restore() -> None:
        model.load_state_dict(torch.load(file, "cpu"))

    def stock_save() -> None:
        torch.save(tensors, folder / "stock.pt")

    return {
        "save": (lambda: ptsave.save(tensors, folder / "ours.pt"), stock_save),
        "async_save": (
            lambda: ptsave.async_save(tensors, folder / "ours.pt").result(),
            stock_save,
        ),
        "load": (lambda: ptsave.load(file), lambda: torch.load(file)),
        "load_into": (lambda: ptsave.load_into(file, model), stock_restore),
        "load_model": (lambda: ptsave.load_model(model, shards), stock_restore),
    }


def counts_of(fake: Any, call: Callable[[], object]) -> Counts:
    """Count what the second call does."""
    call()
    fake.reset()
    kept = call()
    stats = fake.stats()
    calls = fake.calls() if hasattr(fake, "calls") else Counter()
    del kept
    return Counts(
        stats["h2d"] + stats["d2h"],
        stats["cat"] + stats["foreach_copy"],
        calls["cudaEventQuery"],
        stats["busy_waits"],
        sum(calls[name] for name in WAITS),
        stats["pinned_peak"],
    )


@pytest.mark.parametrize("name", ["save", "async_save", "load", "load_into", "load_model"])
def test_counts(
    model: nn.Module, tmp_path: Path, fake: Any, record: Callable[[list[object]], None], name: str
) -> None:
    tensors: list[Tensor] = list(model.buffers())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    ptsave.release_staging_memory()
    call, stock_call = make_calls(model, tmp_path)[name]
    ours, stock = counts_of(fake, call), counts_of(fake, stock_call)
    limit = STAGED if name == "async_save" else PINNED
    record(
        [
            name,
            len({tensor.device for tensor in tensors}),
            *(len(ours.sizes), len(stock.sizes), ours.kernels),
            *(ours.waits, stock.waits, ours.queries),
            *(round(ours.pinned_peak / MIB), limit // MIB),
        ]
    )
    assert sum(stock.sizes) == nbytes
    assert sum(ours.sizes) >= nbytes
    assert len(stock.sizes) == len(tensors)
    assert len(ours.sizes) <= 2 * nbytes / (4 * MIB) + 8
    assert ours.waits == ours.busy_waits == 0
    assert 0 < ours.pinned_peak <= limit
