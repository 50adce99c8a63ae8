"""What a weight_loader gets: read ahead from cold shards, or the memory of files in the page cache.

A loader must not be able to tell.
"""

from __future__ import annotations

import gc
import json
import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ptsave
from ptsave import _C
from ptsave.bench.system import cached_fraction, make_cold
from ptsave.models.shards import ShardReader

MIB = 1 << 20
N_SHARDS = 6
KINDS: list[Literal["safetensors", "pt"]] = ["safetensors", "pt"]
Loader = Callable[[nn.Parameter, Tensor], None]


@cache
def weights() -> dict[str, Tensor]:
    """Return 36 MiB, large and small, of which each of `N_SHARDS` has a part."""
    torch.manual_seed(0)
    tensors = {}
    for i in range(3 * N_SHARDS):
        tensors[f"{i:02}a"] = torch.randn(1000, 500 + i)
        tensors[f"{i:02}b"] = torch.randn(100 + i)
    return tensors


def model_of(tensors: dict[str, Tensor], loader: Loader | None) -> nn.ParameterDict:
    model = nn.ParameterDict({name: torch.zeros_like(each) for name, each in tensors.items()})
    if loader is not None:
        for parameter in model.values():
            parameter.weight_loader = loader
    return model


@pytest.fixture(params=KINDS)
def cold(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder of cold shards."""
    ptsave.save_model(weights(), tmp_path, max_shard_size=6_500_000, format=request.param)
    shards = list(tmp_path.glob("*-of-*"))
    assert len(shards) == N_SHARDS
    for shard in shards:
        make_cold(shard, drop_all=False)
    return tmp_path


def assert_filled(model: nn.ParameterDict) -> None:
    for name, tensor in weights().items():
        assert torch.equal(model[name], tensor), name


def copy(parameter: nn.Parameter, tensor: Tensor) -> None:
    parameter.copy_(tensor)


def copy_slowly(parameter: nn.Parameter, tensor: Tensor) -> None:
    time.sleep(0.002)
    parameter.copy_(tensor)


def copy_by_threads(parameter: nn.Parameter, tensor: Tensor) -> None:
    halves = zip(parameter.detach().chunk(2), tensor.chunk(2), strict=True)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda pair: pair[0].copy_(pair[1]), halves))


@pytest.mark.parametrize("loader", [None, copy, copy_slowly, copy_by_threads])
def test_every_tensor_arrives(cold: Path, loader: Loader | None) -> None:
    model = model_of(weights(), loader)
    ptsave.load_model(model, cold)
    assert_filled(model)


def test_every_second_tensor_is_kept(cold: Path) -> None:
    kept: list[tuple[nn.Parameter, Tensor]] = []

    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        if len(kept) % 2:
            kept.append((parameter, tensor))
        else:
            kept.append((parameter, tensor.clone()))
            tensor.zero_()  # nobody else sees it

    model = model_of(weights(), loader)
    ptsave.load_model(model, cold)
    with torch.no_grad():
        for parameter, tensor in kept:
            parameter.copy_(tensor)
    assert_filled(model)


def test_a_thread_that_copies_later(cold: Path) -> None:
    """It has a reference until it is done, and so the memory is not used again before."""
    with ThreadPoolExecutor(1) as thread:

        def later(parameter: nn.Parameter, tensor: Tensor) -> None:
            time.sleep(0.003)
            parameter.detach().copy_(tensor)

        def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
            thread.submit(later, parameter, tensor)

        model = model_of(weights(), loader)
        ptsave.load_model(model, cold)
    assert_filled(model)


def test_few_pages_are_touched(cold: Path) -> None:
    if any(cold.glob("*.bin")):
        pytest.skip("records are read in larger batches")
    places: set[int] = set()

    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        if tensor.nbytes > MIB:
            places.add(tensor.data_ptr())
        parameter.copy_(tensor)

    same = {f"{i:02}": torch.full((1 << 20,), i, dtype=torch.float32) for i in range(64)}
    folder = cold / "same"
    folder.mkdir()
    ptsave.save_model(same, folder)
    make_cold(folder / "model.safetensors", drop_all=False)
    ptsave.load_model(model_of(same, loader), folder)
    assert len(places) * 4 * MIB <= 96 * MIB


def test_a_loader_that_raises_ends_the_reading(cold: Path) -> None:
    n_threads = threading.active_count()
    seen = []

    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        seen.append(parameter)
        if len(seen) == 5:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough") as caught:
        ptsave.load_model(model_of(weights(), loader), cold)
    assert len(seen) == 5
    assert "while" in caught.value.__notes__[0]
    assert threading.active_count() == n_threads


def test_a_flipped_bit_of_a_record(cold: Path) -> None:
    shards = sorted(cold.glob("*.bin"))
    if not shards:
        pytest.skip("safetensors files have no checksums")
    data = bytearray(shards[2].read_bytes())
    data[3 * MIB] ^= 1
    shards[2].write_bytes(data)
    with pytest.raises(ptsave.CorruptCheckpointError, match="data/"):
        ptsave.load_model(model_of(weights(), copy), cold)


def has_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("loader", [None, copy])
def test_only_the_beginning_goes_through_the_page_cache(
    tmp_path: Path, loader: Loader | None
) -> None:
    """That of all shards together, which is slower than reading past it."""
    tensors = {f"{i:02}": torch.full((1 << 20,), i, dtype=torch.float32) for i in range(18)}
    ptsave.save_model(tensors, tmp_path, max_shard_size=12 * MIB)
    shards = list(tmp_path.glob("*.safetensors"))
    for shard in shards:
        make_cold(shard, drop_all=False)
    if not has_direct_reads(shards[0]):
        pytest.skip("this file system has no direct reads")
    model = model_of(tensors, loader)
    ptsave.load_model(model, tmp_path)
    assert all(torch.equal(model[name], tensor) for name, tensor in tensors.items())
    assert sum(cached_fraction(path) * path.stat().st_size for path in shards) <= 60 * MIB


@pytest.mark.parametrize("has_loaders", [True, False])
def test_garbage_of_loaders_is_collected(tmp_path: Path, has_loaders: bool) -> None:
    """The collector rests only while nobody else's code runs."""
    seen: list[bool] = []
    gc.enable()

    def load(parameter: nn.Parameter, tensor: Tensor) -> None:
        seen.append(gc.isenabled())
        copy(parameter, tensor)

    tensors = {f"{number:04}": torch.randn(16) for number in range(300)}
    ptsave.save_model(tensors, tmp_path, max_shard_size="4KB")
    model = model_of(tensors, load if has_loaders else None)
    ptsave.load_model(model, tmp_path)
    assert seen == [True] * (len(tensors) if has_loaders else 0)
    assert gc.isenabled()
    assert all(torch.equal(model[name], tensors[name]) for name in tensors)


def test_many_small_tensors_are_read_by_the_thread_that_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: set[int] = set()
    read = ShardReader.read

    def noting(self: ShardReader, *args: Any) -> None:
        readers.add(threading.get_ident())
        read(self, *args)

    monkeypatch.setattr(ShardReader, "read", noting)
    tensors = {f"{number:04}": torch.randn(200) for number in range(3000)}  # 2.3 MiB
    ptsave.save_model(tensors, tmp_path)
    ptsave.load_model(model_of(tensors, copy), tmp_path)
    assert readers == {threading.get_ident()}


# ------------------------------------------------------------------------------ in the page cache

WEIGHT = torch.arange(1 << 19, dtype=torch.float32).reshape(512, 1024)  # 2 MiB
BIAS = torch.arange(512.0)


def model_with(loader: Loader) -> nn.Linear:
    model = nn.Linear(1024, 512)
    for parameter in model.parameters():
        parameter.weight_loader = loader  # type: ignore[attr-defined]
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    result = tmp_path / "model.safetensors"
    save_file({"weight": WEIGHT, "bias": BIAS}, result)
    result.read_bytes()  # it is in the page cache now
    return result


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what has been made independent of its file."""
    sizes: list[int] = []
    detach = _C.detach_from_file

    def counting(storage: torch.UntypedStorage, name: bytes) -> None:
        sizes.append(storage.nbytes())
        detach(storage, name)

    monkeypatch.setattr(_C, "detach_from_file", counting)
    return sizes


def is_mapped(tensor: Tensor, path: Path) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


needs_cachestat = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 5),
    reason="this kernel does not tell what is in the page cache",
)


@needs_cachestat
def test_large_tensors_are_the_files_memory(path: Path, detached: list[int]) -> None:
    mapped: list[bool] = []

    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        mapped.append(is_mapped(tensor, path))
        parameter.copy_(tensor)

    model = model_with(loader)
    ptsave.load_model(model, path)
    assert sorted(mapped) == [False, True]
    assert detached == []
    assert torch.equal(model.weight, WEIGHT)
    assert torch.equal(model.bias, BIAS)
    assert str(path) not in Path("/proc/self/maps").read_text()


KEEPERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[3:5],
    "array": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "parameter": lambda tensor: nn.Parameter(tensor, requires_grad=False),
}


def values(kept: Any) -> Tensor:
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept).view(WEIGHT.shape)
    return torch.as_tensor(kept)


@needs_cachestat
@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_what_a_loader_keeps_is_its_own(
    keep: Callable[[Tensor], Any], path: Path, detached: list[int]
) -> None:
    kept: list[Any] = []

    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        if tensor.dim() == 2:
            kept.append(keep(tensor))

    ptsave.load_model(model_with(loader), path)
    assert detached == [WEIGHT.nbytes]
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(0)
    expected = keep(WEIGHT)
    assert torch.equal(values(kept[0]), values(expected))


@needs_cachestat
def test_a_parameter_may_take_the_tensor(path: Path) -> None:
    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.data = tensor

    model = model_with(loader)
    ptsave.load_model(model, path)
    os.truncate(path, 0)
    assert torch.equal(model.weight, WEIGHT)
    model.weight.data.add_(1)
    assert torch.equal(model.weight, WEIGHT + 1)


@needs_cachestat
def test_what_an_exception_keeps_is_its_own(path: Path, detached: list[int]) -> None:
    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        if tensor.dim() == 2:
            raise ValueError(tensor)

    with pytest.raises(ValueError, match="tensor") as caught:
        ptsave.load_model(model_with(loader), path)
    os.truncate(path, 0)
    assert detached == [WEIGHT.nbytes]
    assert torch.equal(caught.value.args[0], WEIGHT)


def test_writing_to_a_tensor_does_not_change_the_file(path: Path) -> None:
    def loader(parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.copy_(tensor.mul_(2))

    model = model_with(loader)
    ptsave.load_model(model, path)
    assert torch.equal(model.weight, 2 * WEIGHT)
    assert torch.equal(load_file(path)["weight"], WEIGHT)


def test_tensors_at_odd_places(tmp_path: Path) -> None:
    fields = {"weight": {"dtype": "F32", "shape": WEIGHT.shape, "data_offsets": [0, WEIGHT.nbytes]}}
    text = json.dumps(fields).encode()
    text += b" " * (1 - len(text) % 4)  # not a multiple of 4
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + WEIGHT.numpy().tobytes())
    model = nn.Linear(1024, 512, bias=False)
    model.weight.weight_loader = copy  # type: ignore[attr-defined]
    ptsave.load_model(model, path)
    assert torch.equal(model.weight, WEIGHT)


@pytest.mark.parametrize("cold", [0, 1 << 20, None], ids=["warm", "half", "cold"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_in_the_page_cache_is_read(
    cold: int | None, dtype: torch.dtype, path: Path
) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if cold != 0:
            os.posix_fadvise(file.fileno(), cold or 0, 0, os.POSIX_FADV_DONTNEED)
    model = nn.Linear(1024, 512, dtype=dtype)
    model.bias.weight_loader = copy  # type: ignore[attr-defined]
    ptsave.load_model(model, path)
    assert torch.equal(model.weight, WEIGHT.to(dtype))
    assert torch.equal(model.bias, BIAS.to(dtype))
