"""Copies and kernels of the accelerator made for tests: the CPU's results, in a stream's order."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

N = 10_000

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(4, -1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_layouts(fake: Any, layout: str, dtype: torch.dtype) -> None:
    base = torch.randn(6, 9).to(dtype)
    view = LAYOUTS[layout]
    expected = view(base)
    for device in ("fake:0", "fake:1"):
        assert torch.equal(view(base.to(device)).cpu(), expected)
        assert torch.equal(expected.to(device).cpu(), expected)
        assert torch.equal(view(base.to(device)).to("fake:0").cpu(), expected)
        assert torch.equal(view(base.to(device)).to("fake:1").cpu(), expected)
    target = torch.zeros(9, 6, dtype=dtype, device="fake").t()
    target.copy_(base, non_blocking=True)
    assert torch.equal(target.cpu(), base)


def test_conversions(fake: Any) -> None:
    base = torch.randn(6, 9)
    device = base.to("fake")
    assert torch.equal(device.to(torch.float16).cpu(), base.to(torch.float16))
    host = torch.zeros(6, 9, dtype=torch.float64)
    assert torch.equal(host.copy_(device), base.double())
    complex_ = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(complex_.to("fake").conj().cpu(), complex_.conj())
    assert torch.equal(complex_.to("fake").conj().imag.cpu(), complex_.conj().imag)


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


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat(fake: Any, dim: int) -> None:
    parts = [torch.randn(4, 4), torch.randn(4, 4).double().t(), torch.zeros(0)]
    result = torch.cat([part.to("fake") for part in parts], dim)
    assert torch.equal(result.cpu(), torch.cat(parts, dim))
    with pytest.raises(RuntimeError, match="sizes"):
        torch.cat([torch.zeros(2, 3, device="fake"), torch.zeros(3, 4, device="fake")])


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


def test_storages(fake: Any, devices: list[str]) -> None:
    source = torch.arange(100, dtype=torch.uint8)
    for device in devices:
        storage = torch.UntypedStorage(100, device=device)
        assert str(storage.device) == device
        storage.copy_(source.untyped_storage())
        assert storage.cpu().tolist() == source.tolist()
        storage.resize_(40)
        assert storage.cpu().tolist() == source.tolist()[:40]
        storage.resize_(0)
        assert storage.nbytes() == 0
        tensor = torch.empty(0, dtype=torch.uint8, device=device)
        tensor.set_(source.to(device).untyped_storage(), 10, (3, 4), (20, 2))
        assert torch.equal(tensor.cpu(), source.as_strided((3, 4), (20, 2), 10))
        grown = source.to(device).resize_(200)
        assert torch.equal(grown[:100].cpu(), source)
        emptied: Any = torch.empty(3, device=device)
        assert emptied.set_().numel() == 0


def test_training_step(fake: Any) -> None:
    def trained(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(4, 8, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return next(model.parameters()).detach().cpu()

    torch.testing.assert_close(trained("fake:1"), trained("cpu"))


@pytest.mark.parametrize("location", [None, "cpu", "fake", "fake:0", "fake:1"])
def test_stock_torch_saves_and_loads(fake: Any, location: str | None) -> None:
    value = {
        "a": torch.randn(30).to("fake:1"),
        "b": torch.nn.Parameter(torch.randn(3, 4).to("fake:0")),
    }
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    for name, tensor in value.items():
        assert torch.equal(loaded[name].cpu(), tensor.cpu())
        expected = torch.device(location or tensor.device)
        assert loaded[name].device.type == expected.type
        assert loaded[name].device.index == (0 if location == "fake" else expected.index)
    assert isinstance(loaded["b"], torch.nn.Parameter)
