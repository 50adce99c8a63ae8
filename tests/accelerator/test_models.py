"""Weights between files and accelerators: through a bounded pinned memory, in few large copies."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from _weights import module_of
from torch import Tensor, nn

import ptsave
from ptsave import _C
from ptsave.deltas import Publisher, Weights, apply

MIB = 1 << 20
BUDGET = 12 * MIB
KINDS: list[Literal["safetensors", "pt"]] = ["safetensors", "pt"]


def weights() -> dict[str, Tensor]:
    """Return 40 MiB: large tensors and small ones, at odd places of their files."""
    torch.manual_seed(0)
    tensors = {}
    for i in range(8):
        tensors[f"layers.{i}.weight"] = torch.randn(1024, 1024)
        tensors[f"layers.{i}.up.weight"] = torch.randn(500, 407)
        tensors |= {f"layers.{i}.norm{k}": torch.randn(33 + k) for k in range(20)}
    return tensors


def model_of(tensors: dict[str, Tensor], device: str, dtype: torch.dtype | None = None) -> Any:
    return module_of(tensors, requires_grad=True, device=device, dtype=dtype)


def nbytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def assert_loaded(model: Any, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    for name, tensor in tensors.items():
        found = model.get_parameter(name).detach().cpu()
        assert torch.equal(found, tensor.to(dtype or tensor.dtype)), name


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTSAVE_NUM_THREADS", "3")
    monkeypatch.setenv("PTSAVE_MAX_PINNED_BYTES", str(BUDGET))


@contextmanager
def few_large_copies(fake: Any, direction: str, nbytes: int) -> Iterator[None]:
    """Expect `nbytes` to cross the bus inside, through pinned memory, in two copies of 4 MiB each.

    One more for each of 8 files, whose last one may be smaller.
    """
    fake.reset()
    before = fake.stats()["pinned_bytes"]
    yield
    stats = fake.stats()
    assert sum(stats[direction]) >= nbytes
    assert len(stats[direction]) <= 2 * nbytes / (4 * MIB) + 8
    assert 0 < stats["pinned_peak"] - before <= BUDGET
    assert stats["busy_waits"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_load_model_of_8_shards(
    devices: list[str], tmp_path: Path, fake: Any, kind: Literal["safetensors", "pt"]
) -> None:
    tensors = weights()
    ptsave.save_model(tensors, tmp_path, max_shard_size="6MB", format=kind)
    assert len(list(tmp_path.glob("*-of-*"))) == 8
    model = model_of(tensors, devices[-1])
    with few_large_copies(fake, "h2d", nbytes_of(tensors)):
        ptsave.load_model(model, tmp_path)
    assert_loaded(model, tensors)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("safetensors", torch.float16), ("pt", torch.float64), ("stream", torch.float64)],
)
def test_load_model_of_another_dtype(
    devices: list[str], tmp_path: Path, fake: Any, kind: Any, dtype: torch.dtype
) -> None:
    """The bytes of the file cross the bus, and are converted on the device."""
    # From a stream small ones are wherever malloc has put them, so fewer are neighbours.
    tensors = {name: t for name, t in weights().items() if t.nbytes > MIB or kind != "stream"}
    source: Any = tmp_path
    ptsave.save_model(tensors, tmp_path, format="pt" if kind == "pt" else "safetensors")
    if kind == "stream":
        source = io.BytesIO((tmp_path / "model.safetensors").read_bytes())
    model = model_of(tensors, devices[-1], dtype)
    with few_large_copies(fake, "h2d", nbytes_of(tensors)):
        ptsave.load_model(model, source)
    assert_loaded(model, tensors, dtype)


def test_load_model_from_a_side_stream(devices: list[str], tmp_path: Path, fake: Any) -> None:
    """Memory for conversions belongs to the caller's stream, and so does what used it before."""
    tensors = weights()
    ptsave.save_model(tensors, tmp_path)
    model = model_of(tensors, devices[-1], torch.float64)
    with torch.Stream(devices[-1]) as stream:
        fake.set_delay(50_000, 50_000, stream)
        spoilt = [torch.full((1024, 1024), 7.0, device=devices[-1]) for _ in range(3)]
        copies = [tensor.clone() for tensor in spoilt]
        del spoilt
        ptsave.load_model(model, tmp_path)
    fake.set_delay(0, 0, stream)
    stream.synchronize()
    for copy in copies:
        assert (copy.cpu() == 7.0).all()
    assert_loaded(model, tensors, torch.float64)


@pytest.mark.parametrize(
    ("kind", "loader"),
    [("pt", "waits"), ("safetensors", "does not wait"), ("pt", "keeps"), ("safetensors", "keeps")],
)
def test_weight_loaders(
    devices: list[str], tmp_path: Path, fake: Any, kind: Any, loader: str
) -> None:
    """They get what is large in page-locked memory, which is not reused while they copy from it."""
    tensors = weights()
    ptsave.save_model(tensors, tmp_path, format=kind)
    model = model_of(tensors, devices[-1])
    n_pinned, kept = 0, []

    def weight_loader(parameter: Tensor, tensor: Tensor) -> None:
        nonlocal n_pinned
        assert tensor.device.type == "cpu"
        n_pinned += tensor.is_pinned()
        parameter.data.copy_(tensor, non_blocking=loader != "waits")
        if loader == "keeps":
            kept.append(tensor)

    for parameter in model.parameters():
        parameter.weight_loader = weight_loader
    fake.reset()
    fake.set_delay(1000, 2000)
    ptsave.load_model(model, tmp_path)
    fake.set_delay(0, 0)
    assert n_pinned == (3 if loader == "keeps" else 8)  # of 4 MiB
    assert_loaded(model, tensors)
    assert fake.stats()["pinned_peak"] <= BUDGET


def test_load_into_another_dtype(devices: list[str], tmp_path: Path, fake: Any) -> None:
    tensors = weights()
    torch.save(tensors, tmp_path / "file.pt")
    model = model_of(tensors, devices[-1], torch.bfloat16)
    with few_large_copies(fake, "h2d", nbytes_of(tensors)):
        ptsave.load_into(tmp_path / "file.pt", model)
    assert_loaded(model, tensors, torch.bfloat16)


def test_save_model(devices: list[str], tmp_path: Path, fake: Any) -> None:
    tensors = weights()
    there = {name: tensor.to(devices[-1]) for name, tensor in tensors.items()}
    ptsave.save_model(tensors, tmp_path / "host", max_shard_size="9MB")
    with few_large_copies(fake, "d2h", nbytes_of(tensors)):
        ptsave.save_model(there, tmp_path / "there", max_shard_size="9MB")
    for path in (tmp_path / "host").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


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


@pytest.mark.parametrize("kind", KINDS)
def test_get_tensor(devices: list[str], tmp_path: Path, fake: Any, kind: str) -> None:
    tensor = torch.randn(3000, 3333)
    ptsave.save_model({"a": tensor, "b": tensor[7].clone()}, tmp_path, format=kind)  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    with ptsave.open(file) as archive:
        with few_large_copies(fake, "h2d", tensor.nbytes):
            found = archive.get_tensor("a", device=devices[-1])
        small = archive.get_tensor("b", device=torch.device(devices[-1]))
    assert found.device == small.device == torch.device(devices[-1])
    assert found.stride() == tensor.stride()
    assert torch.equal(found.cpu(), tensor)
    assert torch.equal(small.cpu(), tensor[7])


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_copies_come_out(
    devices: list[str], tmp_path: Path, fake: Any, kind: str
) -> None:
    ptsave.save_model({"a": torch.randn(1 << 20)}, tmp_path, format=kind)  # type: ignore[arg-type]
    (file,) = tmp_path.iterdir()
    with ptsave.open(file) as archive:
        fake.fail_copy(0, asynchronous=True)
        with pytest.raises(RuntimeError, match="fail"):
            archive.get_tensor("a", device=devices[-1])
    assert fake.operations_in_flight() == 0


def test_get_tensor_of_a_record(
    devices: list[str], tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read into page-locked memory, and never as a whole into host memory."""
    tensor = torch.randn(4000, 4000)
    torch.save({"a": tensor}, tmp_path / "file.pt")
    copied = []
    monkeypatch.setattr(_C, "copy_to_devices", lambda *_, **__: copied.append(1))
    archive = ptsave.open(tmp_path / "file.pt")
    with archive, few_large_copies(fake, "h2d", tensor.nbytes):
        found = archive.get_tensor("a", device=devices[-1])
    assert not copied
    assert torch.equal(found.cpu(), tensor)


PARTS: dict[str, Any] = {
    "rows": slice(100, 900),
    "columns": (slice(None), slice(3, 7)),
    "far apart": (slice(None, None, 9), slice(3, 11)),
    "every other": (slice(1, None), slice(None, None, 2)),
    "with new dimensions": (None, slice(5, 500), None, ...),
}


@pytest.fixture
def host_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the host memory that reads of views take from now on."""
    sizes = []

    def noted(nbytes: int, device: torch.device = torch.device("cpu")) -> torch.UntypedStorage:  # noqa: B008
        if device.type == "cpu":
            sizes.append(nbytes)
        return torch.UntypedStorage(nbytes, device=device)

    monkeypatch.setattr("ptsave.archive.spans.new_storage", noted)
    return sizes


@pytest.fixture(params=KINDS)
def cube(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Tensor]:
    """Return a file with a tensor "a", and that."""
    tensor = torch.randn(1000, 12, 1024)
    ptsave.save_model({"a": tensor}, tmp_path, format=request.param)
    (file,) = tmp_path.iterdir()
    return file, tensor


@pytest.mark.parametrize("index", PARTS.values(), ids=PARTS.keys())
def test_get_slice(
    devices: list[str], cube: tuple[Path, Tensor], fake: Any, index: Any, host_sizes: list[int]
) -> None:
    file, tensor = cube
    with ptsave.open(file) as archive:
        part = archive.get_slice("a", devices[-1])
        fake.reset()
        found = part[index]
        stats = fake.stats()
    assert 0 < stats["pinned_peak"] <= BUDGET
    assert len(stats["h2d"]) <= 2 * sum(stats["h2d"]) / (4 * MIB) + 8
    assert stats["busy_waits"] == 0
    assert found.device == torch.device(devices[-1])
    assert torch.equal(found.cpu(), tensor[index])
    assert sum(host_sizes) < 2 * tensor[index].nbytes + BUDGET
    assert max(host_sizes, default=0) <= 16 * MIB


def damaged_zeros(folder: Path, place: int) -> Path:
    """Write a file of zeros, and change a byte at a place."""
    path = folder / "file.pt"
    torch.save({"a": torch.zeros(1 << 20)}, path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    return path


def test_get_slice_verified(devices: list[str], tmp_path: Path) -> None:
    with ptsave.open(damaged_zeros(tmp_path, 3 * MIB)) as archive:
        assert archive.get_slice("a", devices[-1])[: 1 << 19].count_nonzero().item() == 0
        with pytest.raises(ptsave.CorruptCheckpointError, match="data/0"):
            archive.get_slice("a", devices[-1], verify=True)[: 1 << 19]


def test_get_slice_of_a_file_that_has_become_shorter(
    devices: list[str], tmp_path: Path, fake: Any
) -> None:
    ptsave.save_model({"a": torch.randn(1 << 20)}, tmp_path)
    path = tmp_path / "model.safetensors"
    with ptsave.open(path) as archive:
        part = archive.get_slice("a", devices[-1])
        path.write_bytes(path.read_bytes()[: 2 << 20])
        with pytest.raises(ptsave.CorruptCheckpointError, match=r"model\.safetensors"):
            part[100:]


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t(),
    "a part of a record": lambda t: t[100:2900],
    "columns": lambda t: t[:, 17:2000],
    "expanded": lambda t: t[:1200, :1].expand(-1, 3),
    "conjugate": lambda t: torch.view_as_complex(t[:, :2998].reshape(3000, 1499, 2)).conj(),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_get_tensor_that_is_no_whole_record(
    devices: list[str], tmp_path: Path, fake: Any, view: Callable[[Tensor], Tensor]
) -> None:
    tensor = view(torch.randn(3000, 3000))
    torch.save({"a": tensor}, tmp_path / "file.pt")
    with ptsave.open(tmp_path / "file.pt") as archive:
        fake.reset()
        here = archive.get_tensor("a")
        found = archive.get_tensor("a", device=devices[-1])
        if tensor.nbytes >= MIB:
            assert fake.stats()["busy_waits"] == 0
            assert 0 < fake.stats()["pinned_peak"] <= BUDGET
    assert found.device == torch.device(devices[-1])
    assert found.stride() == here.stride()
    assert found.is_conj() == here.is_conj()
    assert torch.equal(found.cpu(), tensor)


def test_get_tensor_of_a_parameter(devices: list[str], tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.randn(1 << 20))
    torch.save({"a": parameter}, tmp_path / "file.pt")
    with ptsave.open(tmp_path / "file.pt") as archive:
        found = archive.get_tensor("a", device=devices[-1])
    assert isinstance(found, nn.Parameter)
    assert found.is_leaf
    assert torch.equal(found.detach().cpu(), parameter.detach())


def test_get_tensor_of_a_damaged_record(devices: list[str], tmp_path: Path) -> None:
    with ptsave.open(damaged_zeros(tmp_path, 2 * MIB)) as archive:
        with pytest.raises(ptsave.CorruptCheckpointError, match="data/0"):
            archive.get_tensor("a", device=devices[-1])
        found = archive.get_tensor("a", device=devices[-1], verify=False)
    assert found.cpu().count_nonzero() == 1


@pytest.mark.parametrize("locate", [str, torch.device], ids=["string", "device"])
def test_load_of_safetensors(
    devices: list[str], tmp_path: Path, fake: Any, locate: Callable[[str], Any]
) -> None:
    tensors = weights()
    ptsave.save_model(tensors, tmp_path)
    with few_large_copies(fake, "h2d", nbytes_of(tensors)):
        loaded = ptsave.load(tmp_path / "model.safetensors", locate(devices[-1]))
    for name, tensor in tensors.items():
        assert loaded[name].device == torch.device(devices[-1])
        assert torch.equal(loaded[name].cpu(), tensor), name


# ---------------------------------------------------------------------------------------- versions


def test_versions(devices: list[str], tmp_path: Path) -> None:
    """A whole version and patches of tensors on each device, one of which is not contiguous."""
    pytest.importorskip("zstandard", reason="patches need zstandard")
    old = {"a": torch.randn(300, 70), "b": torch.randn(9), "c": torch.randn(40, 30)}
    places = zip(old.items(), devices * 3, strict=False)
    trained = {name: tensor.to(device) for (name, tensor), device in places}
    publisher = Publisher(tmp_path, trained, max_depth=2)
    held = {name: tensor.clone() for name, tensor in trained.items()}
    held["c"] = held["c"].t().contiguous().t()
    new = {name: tensor.clone() for name, tensor in old.items()}
    for _ in range(4):
        new["a"][7] += 1
        new["c"][:, 5] -= 1
        for name, tensor in trained.items():
            tensor.copy_(new[name])
        publisher.publish(trained)
        assert apply(tmp_path, held) == publisher.version
        for name, tensor in trained.items():
            assert torch.equal(held[name].cpu(), tensor.cpu()), name
    model = model_of({name: torch.zeros_like(tensor) for name, tensor in old.items()}, devices[-1])
    ptsave.save_model(old, tmp_path / "base")
    ptsave.load_model(model, Weights(tmp_path, tmp_path / "base"))
    assert_loaded(model, {name: tensor.cpu() for name, tensor in trained.items()})


@pytest.mark.parametrize("after", range(3))
def test_a_copy_of_a_version_fails(
    devices: list[str], tmp_path: Path, fake: Any, after: int
) -> None:
    """All tensors keep their old values."""
    pytest.importorskip("zstandard", reason="patches need zstandard")
    old = {name: torch.zeros(100_000) for name in "abc"}
    Publisher(tmp_path, old).publish({name: tensor + 1 for name, tensor in old.items()})
    held = {name: tensor.to(devices[-1]) for name, tensor in old.items()}
    fake.fail_copy(len(held) + after)  # after those that read the old values
    with pytest.raises(RuntimeError, match="fail"):
        apply(tmp_path, held)
    assert not any(tensor.cpu().any() for tensor in held.values())
    assert apply(tmp_path, held) == 1
    assert all(tensor.cpu().eq(1).all() for tensor in held.values())
