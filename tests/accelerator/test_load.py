"""Loading to accelerators: the same objects as torch's, straight into their final memory."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from stock_comparison import assert_same_object
from torch.utils._python_dispatch import TorchDispatchMode

import ptsave


def saved(obj: object, path: Path) -> Path:
    torch.save(obj, path)
    return path


def make_object(devices: list[str]) -> dict[str, Any]:
    base = torch.randn(70, 50).to(devices[-1])
    return {
        "host": torch.randn(1000),
        "large": [torch.randn(1_500_000).to(d) for d in devices],
        "small": [torch.full((i % 90,), i).to(devices[i % len(devices)]) for i in range(300)],
        "parameter": torch.nn.Parameter(torch.randn(30, 40).to(devices[0])),
        "transposed": base.t(),
        "shared": [base, base[3:5], base],
        "bfloat16": torch.randn(100).bfloat16().to(devices[0]),
        "number": 3,
    }


@pytest.mark.parametrize("where", ["saved", "first", "last", "cpu", "swap", "index", "device"])
def test_same_objects(devices: list[str], tmp_path: Path, where: str) -> None:
    path = saved(make_object(devices), tmp_path / "object.pt")
    locations: dict[str, Any] = {
        "saved": None,
        "first": devices[0],
        "last": devices[-1],
        "cpu": "cpu",
        "swap": {"cpu": devices[0], devices[0]: devices[-1], devices[-1]: "cpu"},
        "index": devices[0].partition(":")[0],
        "device": torch.device(devices[-1]),
    }
    stream = io.BytesIO(path.read_bytes())
    for f, weights_only in ((path, True), (path, False), (stream, True)):
        ours = ptsave.load(f, locations[where], weights_only=weights_only)
        stock = torch.load(path, locations[where], weights_only=weights_only)
        assert_same_object(ours, stock)


def test_storages_are_ordinary(devices: list[str], tmp_path: Path) -> None:
    path = saved(torch.randn(100).to(devices[0]), tmp_path / "tensor.pt")
    storage = ptsave.load(path).untyped_storage()
    assert storage.resizable()
    storage.resize_(0)
    storage.resize_(800)


def test_callables_get_cpu_storages(devices: list[str], tmp_path: Path) -> None:
    path = saved(torch.arange(100).to(devices[0]), tmp_path / "tensor.pt")
    seen = []

    def look(storage: torch.UntypedStorage, location: str) -> None:
        seen.append((storage.device.type, location, bytes(storage)[:8]))

    loaded = ptsave.load(path, look)
    assert_same_object(loaded, torch.load(path))
    assert seen == [("cpu", devices[0], bytes(8))]


@pytest.mark.parametrize("location", ["{}:77", "nonsense", "{}:x"])
def test_unknown_locations(
    devices: list[str], device_type: str, tmp_path: Path, location: str
) -> None:
    path = saved([torch.randn(10), torch.randn(10).to(devices[0])], tmp_path / "tensor.pt")
    for map_location in (location.format(device_type), {"cpu": location.format(device_type)}):
        with pytest.raises(Exception) as stock:
            torch.load(path, map_location)
        with pytest.raises(type(stock.value)) as ours:
            ptsave.load(path, map_location)
        assert str(ours.value) == str(stock.value)


def test_a_device_by_its_number(devices: list[str], tmp_path: Path) -> None:
    """As `load_model` takes it; of `load_into` the target's place counts."""
    state = torch.nn.Linear(3, 2).state_dict()
    path = saved(state, tmp_path / "state.pt")
    for index, device in enumerate(devices):
        loaded = ptsave.load(path, device=index)
        assert {str(tensor.device) for tensor in loaded.values()} == {device}
        assert_same_object(loaded, torch.load(path, device))
        with ptsave.open(path) as archive:
            assert str(archive.get_tensor("weight", map_location=device).device) == device
        target = torch.nn.Linear(3, 2)
        ptsave.load_into(path, target, device=index)
        assert target.weight.device.type == "cpu"
        assert_same_object(dict(target.state_dict()), dict(state))


def test_arguments_of_the_unpickler(devices: list[str], tmp_path: Path) -> None:
    path = saved([torch.arange(10).to(devices[0])], tmp_path / "tensor.pt")
    for load in (torch.load, ptsave.load):
        assert len(load(path, weights_only=False, encoding="latin1")) == 1
        with pytest.raises(TypeError):
            load(path, weights_only=False, nonsense=1)


def test_damage_is_found(devices: list[str], tmp_path: Path) -> None:
    tensor = torch.arange(1_000_000).to(devices[0])
    path = saved({"weight": tensor}, tmp_path / "tensor.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ptsave.CorruptCheckpointError, match="weight"):
        ptsave.load(path)
    ptsave.load(path, verify=False)


def test_side_streams_of_the_caller(devices: list[str], tmp_path: Path) -> None:
    """What the caller does next, on its own stream, finds the values."""
    path = saved(torch.arange(3_000_000).to(devices[-1]), tmp_path / "tensor.pt")
    stream = torch.Stream(devices[-1])
    with stream:
        loaded = ptsave.load(path)
        doubled = loaded + loaded
    stream.synchronize()
    assert torch.equal(doubled.cpu(), 2 * torch.arange(3_000_000))


def test_nothing_is_early(
    devices: list[str], tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a buffer used again before it was copied from, nor is anything read too soon."""
    tensors = [torch.arange(2_000_000) + i for i in range(3)]
    small = [torch.full((1000,), i) for i in range(300)]
    path = saved([tensors, small], tmp_path / "tensors.pt")
    monkeypatch.setenv("PTSAVE_MAX_PINNED_BYTES", str(4 << 20))
    fake.set_delay(3000, 5000)
    loaded = ptsave.load(path, devices[-1])
    fake.set_delay(0, 0)
    assert fake.stats()["pinned_peak"] <= 4 << 20
    for ours, theirs in zip(loaded[0] + loaded[1], tensors + small, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_threads_take_turns_on_a_stream(
    devices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more threads than streams, and each stream has one memory for joined pieces."""
    tensors = [torch.full((400,), float(i)) for i in range(20_000)]
    path = saved(tensors, tmp_path / "tensors.pt")
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "16")
    expected = torch.cat(tensors)
    for _ in range(3):
        found = torch.cat(ptsave.load(path, devices[-1])).cpu()
        assert torch.equal(found, expected)


def test_memory_that_was_let_go_of_is_not_overwritten_early(
    devices: list[str], tmp_path: Path, fake: ModuleType
) -> None:
    """The new storage may be where work of the caller still reads an old one."""
    path = saved(torch.ones(500_000), tmp_path / "tensor.pt")
    old = torch.zeros(500_000).to(devices[0])
    copy = torch.full((500_000,), 5.0).to(devices[0])
    fake.set_delay(20_000, 30_000, torch.accelerator.current_stream(devices[0]))
    copy.copy_(old, non_blocking=True)
    del old
    loaded = ptsave.load(path, devices[0])
    fake.set_delay(0, 0)
    assert torch.equal(copy.cpu(), torch.zeros(500_000))
    assert torch.equal(loaded.cpu(), torch.ones(500_000))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("after", [0, 2])
def test_errors_of_copies_come_out(
    devices: list[str], tmp_path: Path, fake: ModuleType, after: int, asynchronous: bool
) -> None:
    tensors = [torch.randn(900_000) for _ in range(5)]
    path = saved(tensors, tmp_path / "tensors.pt")
    fake.fail_copy(after=after, asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match="fail"):
        ptsave.load(path, devices[0])
    assert fake.operations_in_flight() == 0
    loaded = ptsave.load(path, devices[0])
    assert all(map(torch.equal, (tensor.cpu() for tensor in loaded), tensors))


@pytest.mark.parametrize(("after", "asynchronous"), [(0, True), (1, False)])
def test_errors_of_one_device_wait_for_the_others(
    devices: list[str], tmp_path: Path, fake: ModuleType, after: int, asynchronous: bool
) -> None:
    """Memory that copies are under way to must not be freed."""
    tensors = [torch.randn(10)] + [torch.randn(70_000) for _ in range(6)]
    placed = [tensors[0].to(devices[0])] + [tensor.to(devices[-1]) for tensor in tensors[1:]]
    path = saved(placed, tmp_path / "tensors.pt")
    fake.set_delay(20_000, 20_000)
    fake.fail_copy(after, asynchronous=asynchronous)
    with pytest.raises(RuntimeError, match="fail"):
        ptsave.load(path)
    assert fake.operations_in_flight() == 0


def test_load_into_modules_there(devices: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(9)))
    path = saved(source.state_dict(), tmp_path / "model.pt")
    target = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(9))).to(devices[-1])
    pointers = [parameter.data_ptr() for parameter in target.parameters()]
    ptsave.load_into(path, target)
    assert [parameter.data_ptr() for parameter in target.parameters()] == pointers
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert ours.device == torch.device(devices[-1])
        assert torch.equal(ours.detach().cpu(), theirs.detach())


class Seen(TorchDispatchMode):
    """Notes the operators that reach Python modes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_modes_do_not_see_copies(devices: list[str], tmp_path: Path) -> None:
    """A mode of Python needs the GIL, for which copies do not wait."""
    model = torch.nn.Linear(30, 20).to(devices[-1])
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    with Seen() as seen:
        ptsave.save_model(model, tmp_path)
        for parameter in model.parameters():
            parameter.detach().zero_()
        ptsave.load_model(model, tmp_path)
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    assert_same_object(found, expected)
    assert "aten::zero_" in seen.names
    assert not [name for name in seen.names if "copy" in name]
