"""load_model: what a weight_loader gets of files that are in the page cache is the files' memory.

A loader must not be able to tell.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ptsave
from ptsave import _C

WEIGHT = torch.arange(1 << 19, dtype=torch.float32).reshape(512, 1024)  # 2 MiB
BIAS = torch.arange(512.0)

Loader = Callable[[nn.Parameter, Tensor], None]


def copy(parameter: nn.Parameter, tensor: Tensor) -> None:
    parameter.copy_(tensor)


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


def keep_tensor(tensor: Tensor) -> Any:
    return tensor


def keep_view(tensor: Tensor) -> Any:
    return tensor[3:5]


def keep_array(tensor: Tensor) -> Any:
    return tensor.numpy()


def keep_storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def keep_parameter(tensor: Tensor) -> Any:
    return nn.Parameter(tensor, requires_grad=False)


def values(kept: Any) -> Tensor:
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept).view(WEIGHT.shape)
    return torch.as_tensor(kept)


@needs_cachestat
@pytest.mark.parametrize("keep", [keep_tensor, keep_view, keep_array, keep_storage, keep_parameter])
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
