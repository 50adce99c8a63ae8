"""State dicts over meshes: the same values for every mesh, placement and number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as _dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

dcp: Any = _dcp  # a package that does not export its names to type checkers
# Marks of tests in one process that save to the same place again.
QUIET = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (3,),
    (0, 4),
    (5, 7),
    (8, 4),
    (2, 3, 4),
    (33, 1025),
    (700, 513),
)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint16, torch.float8_e4m3fn, torch.bool)


def values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the whole tensor of a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    numbers = torch.randint(0, 100, shape, generator=generator)
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def meshes(world_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes that a mesh of so many ranks can have."""
    yield "flat", (world_size,)
    if world_size == 4:
        yield "square", (2, 2)


def placements(n_mesh_dims: int) -> dict[str, tuple[Any, ...]]:
    """Return kinds of placement by name."""
    if n_mesh_dims == 1:
        return {"rows": (Shard(0),), "columns": (Shard(1),), "same": (Replicate(),)}
    return {
        "hsdp": (Replicate(), Shard(0)),
        "blocks": (Shard(0), Shard(1)),
        "twice": (Shard(0), Shard(0)),
        "strided": (_StridedShard(0, split_factor=2), Shard(0)),
        "columns": (Shard(1), Replicate()),
    }


def layouts(world_size: int) -> list[str]:
    """Return all layouts that so many ranks can have."""
    return [
        f"{mesh}-{kind}" for mesh, shape in meshes(world_size) for kind in placements(len(shape))
    ]


def state_of(layout: str, world_size: int, *, filled: bool) -> dict[str, Any]:
    """Return the state dict of this rank in a layout; zeros if it is not filled."""
    mesh_name, kind = layout.split("-")
    shape = dict(meshes(world_size))[mesh_name]
    mesh = init_device_mesh("cpu", shape)
    placed = placements(len(shape))[kind]
    model: dict[str, Any] = {}
    for tensor_shape in SHAPES:
        name = "x".join(map(str, tensor_shape)) or "scalar"
        model[name] = _distribute(name, tensor_shape, torch.float32, mesh, placed, filled=filled)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        model[name] = _distribute(name, (9, 6), dtype, mesh, placed, filled=filled)
    plain = values("plain", (11, 3), torch.float64)
    transposed = values("transposed", (6, 40), torch.float32)
    return {
        "model": model,
        "optimizer": {
            "state": {"w": {"step": torch.tensor(7.0 if filled else 0.0), "exp": model["8x4"]}},
            "param_groups": [{"lr": 0.1 if filled else 0.0, "names": ["w"]}],
        },
        "plain": plain if filled else torch.zeros_like(plain),
        "transposed": (transposed if filled else torch.zeros_like(transposed)).t(),
        "epoch": 3 if filled else 0,
        "note": "text" if filled else "",
        "blob": b"\x00\x01" if filled else b"",
    }


def _distribute(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placed: tuple[Any, ...],
    *,
    filled: bool,
) -> Tensor:
    whole = values(name, shape, dtype)
    if not filled:
        whole = torch.zeros(shape).to(dtype)
    fits = all(getattr(each, "dim", 0) < len(shape) for each in placed)
    if any(isinstance(each, _StridedShard) for each in placed):
        # Torch distributes whole rows over both dimensions of the mesh only.
        fits = fits and bool(shape) and shape[0] % 4 == 0 and shape[0] > 0
    if not fits:
        placed = (Replicate(),) * len(placed)
    return distribute_tensor(whole, mesh, placed, src_data_rank=None)


def differences(state: Any, expected: Any, path: str = "") -> list[str]:
    """Return where two state dicts of this rank differ."""
    if isinstance(expected, dict):
        return [
            each
            for key, value in expected.items()
            for each in differences(state[key], value, f"{path}.{key}")
        ]
    if isinstance(expected, list):
        return [
            each
            for i, value in enumerate(expected)
            for each in differences(state[i], value, f"{path}.{i}")
        ]
    if isinstance(expected, DTensor):
        state, expected = state.to_local(), expected.to_local()
    if isinstance(expected, Tensor):
        same = state.dtype == expected.dtype and torch.equal(
            state.contiguous().view(-1).view(torch.uint8) if state.numel() else state,
            expected.contiguous().view(-1).view(torch.uint8) if state.numel() else expected,
        )
        return [] if same else [path]
    return [] if state == expected else [f"{path}: {state!r}"]
